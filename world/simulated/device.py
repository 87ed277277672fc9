"""The state of a simulated disk: inodes and directories, each with what is visible and what is on the device.

    Inode      data      what a reader sees (page cache)
               durable   what survives a power loss
               pending   operations on `data` that `durable` does not have yet, in order, numbered
    Directory  entries   names that a reader sees
               durable   names that survive
    Names      pending   operations on names, in order, each one atomic over the directories that it changes

    append, truncate          -> data, pending
    create, rename, remove    -> entries, Names.pending
    sync that succeeds        -> the operations that were pending when it began move into `durable`
    sync that fails           -> they leave `pending` without reaching `durable`: the pages count as clean, read back
                                 well, are never written again, and are gone after a power loss
    power loss                -> `durable`, plus as much of `pending` as the kind of loss says, becomes what is visible

Invariant: with nothing pending and no sync ever failed, visible and durable are equal (`validate`).
"""

import random
from collections.abc import Iterator
from enum import Enum

PAGE_BYTES = 4096


class Loss(Enum):
    """What a power loss takes of the unsynced writes."""

    ALL = "all unsynced writes and names"
    SOME = "any of them: per file a prefix of the writes, a torn write, or any set of pages; names likewise"
    TORN = "half of the last write of each file; everything before it stays"


class Inode:
    """The bytes of one file. A pending operation is (position, bytes) for a write or (size, None) for a truncation."""

    __slots__ = ("data", "durable", "first_pending", "pending")

    def __init__(self) -> None:
        self.data = bytearray()
        self.durable = bytearray()
        self.pending: list[tuple[int, bytes | None]] = []
        self.first_pending = 0

    @property
    def pending_end(self) -> int:
        """The number of the next operation: a sync that begins now covers those below it."""
        return self.first_pending + len(self.pending)

    def append(self, data: bytes) -> None:
        self.pending.append((len(self.data), data))
        self.data += data

    def truncate(self, size: int) -> None:
        self.pending.append((size, None))
        del self.data[size:]

    def make_durable(self, end: int) -> None:
        """A sync of the operations below `end` has succeeded."""
        for operation in self._take(end):
            _apply(self.durable, operation)

    def lose(self, end: int) -> None:
        """A sync of the operations below `end` has failed: they count as written, and are not."""
        self._take(end)

    def evict(self) -> None:
        """Drops pages that a failed sync left as clean from the cache: readers now see what the device has."""
        data = bytearray(self.durable)
        for operation in self.pending:
            _apply(data, operation)
        self.data = data

    def crash(self, loss: Loss, draw: random.Random) -> None:
        if loss is Loss.ALL or not self.pending:
            image = self.durable
        elif loss is Loss.TORN:
            image = self._torn_image(len(self.pending) - 1, draw)
        else:
            image = self._some_image(draw)
        self.data = bytearray(image)
        self.durable = bytearray(image)
        self._take(self.pending_end)

    def _take(self, end: int) -> list[tuple[int, bytes | None]]:
        count = max(0, min(end - self.first_pending, len(self.pending)))
        operations = self.pending[:count]
        del self.pending[:count]
        self.first_pending += count
        return operations

    def _some_image(self, draw: random.Random) -> bytearray:
        kind = draw.randrange(5)
        if kind == 0:
            return self.durable
        if kind == 1:
            return self._prefix_image(len(self.pending))
        if kind == 2:
            return self._prefix_image(draw.randrange(len(self.pending) + 1))
        if kind == 3:
            return self._torn_image(draw.randrange(len(self.pending)), draw)
        return self._paged_image(draw)

    def _prefix_image(self, count: int) -> bytearray:
        image = bytearray(self.durable)
        for operation in self.pending[:count]:
            _apply(image, operation)
        return image

    def _torn_image(self, count: int, draw: random.Random) -> bytearray:
        """Returns the first `count` operations, and the beginning of the next one if it is a write."""
        image = self._prefix_image(count)
        position, data = self.pending[count]
        if data:
            _apply(image, (position, data[: draw.randrange(len(data))]))
        return image

    def _paged_image(self, draw: random.Random) -> bytearray:
        """Returns the final size and, for each page written since, either the new or the old bytes.

        Old bytes are zeros past the lowest size that the file was truncated to meanwhile: a file system that has
        recorded the new size does not show bytes of the old one.
        """
        final = self._prefix_image(len(self.pending))
        lowest = min([len(self.durable)] + [size for size, data in self.pending if data is None])
        image = bytearray(self.durable[:lowest])
        image += bytes(max(0, len(final) - len(image)))
        del image[len(final) :]
        written: set[int] = set()
        for position, data in self.pending:
            if data:
                written.update(range(position // PAGE_BYTES, (position + len(data) - 1) // PAGE_BYTES + 1))
        for page in sorted(written):
            if draw.random() < 0.5:
                start, end = page * PAGE_BYTES, min((page + 1) * PAGE_BYTES, len(final))
                image[start:end] = final[start:end]
        return image

    def validate(self) -> None:
        image = self._prefix_image(len(self.pending))
        assert image == self.data, "visible bytes are the durable ones plus what is pending"


class Directory:
    """The names of one directory."""

    __slots__ = ("durable", "entries")

    def __init__(self) -> None:
        self.entries: dict[str, Node] = {}
        self.durable: dict[str, Node] = {}


Node = Inode | Directory
Change = tuple[Directory, str, Node | None]


class Names:
    """The pending operations on names of a disk. An operation is a tuple of changes that apply together."""

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending: list[tuple[Change, ...]] = []

    def change(self, *changes: Change) -> None:
        for directory, name, node in changes:
            _set_name(directory.entries, name, node)
        self.pending.append(changes)

    def covered(self, directories: list[Directory]) -> list[tuple[Change, ...]]:
        """Returns what a sync of these directories makes durable: every operation on one of them, and the earlier ones
        on the other directories of these operations (a journal does not write a move without the creation before it).
        """
        needed = {id(directory) for directory in directories}
        covered: list[tuple[Change, ...]] = []
        for operation in reversed(self.pending):
            touched = {id(directory) for directory, _, _ in operation}
            if touched & needed:
                needed |= touched
                covered.append(operation)
        covered.reverse()
        return covered

    def make_durable(self, operations: list[tuple[Change, ...]]) -> None:
        for operation in self._take(operations):
            for directory, name, node in operation:
                _set_name(directory.durable, name, node)

    def lose(self, operations: list[tuple[Change, ...]]) -> None:
        self._take(operations)

    def crash(self, loss: Loss, draw: random.Random) -> None:
        """Decides which pending names survive; the rest is lost. `restore` then makes them visible."""
        if loss is Loss.TORN:
            self.make_durable(list(self.pending))
        elif loss is Loss.SOME and self.pending:
            if draw.random() < 0.5:
                self.make_durable(self.pending[: draw.randrange(len(self.pending) + 1)])
            else:
                self._keep_some_directories(draw)
        self.pending.clear()

    def _keep_some_directories(self, draw: random.Random) -> None:
        """Writes the journal of each directory up to a random point."""
        seen: list[Directory] = []
        for operation in self.pending:
            for directory, _, _ in operation:
                if all(directory is not other for other in seen):
                    seen.append(directory)
        kept = [directory for directory in seen if draw.random() < 0.5]
        operations = self.covered(kept)
        self.make_durable(operations[: draw.randrange(len(operations) + 1)])

    def _take(self, operations: list[tuple[Change, ...]]) -> list[tuple[Change, ...]]:
        """Returns those of the operations that are still pending; another sync may have been faster."""
        ids = {id(operation) for operation in operations}
        selected = [operation for operation in self.pending if id(operation) in ids]
        self.pending = [operation for operation in self.pending if id(operation) not in ids]
        return selected


def restore(directory: Directory, loss: Loss, draw: random.Random) -> None:
    """After a power loss: makes the durable state visible, in all directories and files below."""
    directory.entries = dict(directory.durable)
    for _, node in sorted(directory.entries.items()):
        if isinstance(node, Directory):
            restore(node, loss, draw)
        else:
            node.crash(loss, draw)


def walk(directory: Directory, prefix: str = "") -> Iterator[tuple[str, Inode]]:
    """Yields all visible files below, by path, in order."""
    for name, node in sorted(directory.entries.items()):
        if isinstance(node, Directory):
            yield from walk(node, f"{prefix}{name}/")
        else:
            yield prefix + name, node


def _apply(image: bytearray, operation: tuple[int, bytes | None]) -> None:
    position, data = operation
    if position > len(image):
        # An earlier write never reached the device: the gap reads as zeros.
        image += bytes(position - len(image))
    if data is None:
        del image[position:]
    else:
        image[position : position + len(data)] = data


def _set_name(names: dict[str, Node], name: str, node: Node | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node
