"""Pools the open files of one disk, and runs plans of reads.

Logs hold no open files; they get them from the pool by path. The pool keeps the most recently used files open, up to
`open_max`, and closes the others. Two users need a file to stay open across an await, and pin it: a reader during an
asynchronous read, and a log with unsynced bytes (the kernel reports a device error only to a file that was open when
the bytes were written). Pinned files may exceed the bound, by at most the files that are dirty or being read at one
time.

A plan of reads (`ReadPlan`) is a generator that yields the reads it needs and is sent the bytes. The same plan
runs on the event loop if everything is in memory (`run_nowait`), or off the loop (`run_async`).
"""

import asyncio
from collections import OrderedDict
from typing import TypeVar

from tidelog.log.index import ReadPlan
from tidelog.world.disk import Disk, File

T = TypeVar("T")

_STEPS_PER_TURN = 256


class FilePool:
    """The open files of one disk.

    Invariants (`validate`): a path has at most one current file; a file with pins is open; at most `open_max` files
    without pins are open.
    """

    __slots__ = ("_disk", "_idle", "_pinned", "_pins", "open_max")

    def __init__(self, disk: Disk, *, open_max: int = 512) -> None:
        assert open_max >= 1, "a pool of no files"
        self._disk = disk
        self.open_max = open_max
        # Unpinned open files, least recently used first.
        self._idle: OrderedDict[str, File] = OrderedDict()
        # Current pinned file of a path, and pins by file identity: a discarded file lives on in `_pins` only.
        self._pinned: dict[str, File] = {}
        self._pins: dict[int, tuple[File, int]] = {}

    @property
    def open_count(self) -> int:
        return len(self._idle) + len(self._pins)

    def get(self, path: str, *, create: bool = False) -> File:
        """The open file at `path`, valid until the caller awaits or gets another file."""
        file = self._pinned.get(path)
        if file is not None:
            return file
        file = self._idle.get(path)
        if file is not None:
            self._idle.move_to_end(path)
            return file
        file = self._disk.open(path, create=create)
        self._idle[path] = file
        self._trim()
        return file

    def pin(self, path: str, *, create: bool = False) -> File:
        """As `get`, and open until `unpin`. Each pin needs an unpin."""
        file = self._pinned.get(path)
        if file is not None:
            self._pins[id(file)] = (file, self._pins[id(file)][1] + 1)
            return file
        file = self.get(path, create=create)
        del self._idle[path]
        self._pinned[path] = file
        self._pins[id(file)] = (file, 1)
        return file

    def unpin(self, file: File) -> None:
        held, pins = self._pins[id(file)]
        if pins > 1:
            self._pins[id(file)] = (held, pins - 1)
            return
        del self._pins[id(file)]
        if self._pinned.get(file.path) is file:
            del self._pinned[file.path]
            self._idle[file.path] = file
            self._trim()
        else:
            file.close()

    def discard(self, path: str) -> None:
        """Forget the file at `path`: it is about to be renamed, replaced or removed.

        Users that have it pinned go on with the old file; the next `get` opens the file that is at the path then.
        """
        self._pinned.pop(path, None)
        file = self._idle.pop(path, None)
        if file is not None:
            file.close()

    def discard_directory(self, directory: str) -> None:
        """Forget all files of a log that is closed."""
        inside = directory + "/"
        for path in [path for path in (*self._idle, *self._pinned) if path.startswith(inside)]:
            self.discard(path)

    def close(self) -> None:
        """Close everything, also pinned files: their users are gone."""
        for file in self._idle.values():
            file.close()
        for file, _ in self._pins.values():
            file.close()
        self._idle.clear()
        self._pinned.clear()
        self._pins.clear()

    def validate(self) -> None:
        assert not self._idle.keys() & self._pinned.keys(), "a path has two current files"
        assert all(id(file) in self._pins for file in self._pinned.values()), "pinned without a pin"
        assert all(pins > 0 for _, pins in self._pins.values()), "a pin count of zero"
        assert len(self._idle) <= self.open_max, "the pool is over its bound"

    def _trim(self) -> None:
        while len(self._idle) > self.open_max:
            _, file = self._idle.popitem(last=False)
            file.close()


def run_nowait(steps: ReadPlan[T]) -> T | None:
    """The result of the plan if everything that it reads is in memory, else None."""
    try:
        file, position, length = next(steps)
        while True:
            data = file.read_nowait(position, length)
            if data is None:
                steps.close()
                return None
            file, position, length = steps.send(data)
    except StopIteration as done:
        result: T = done.value
        return result
    except BaseException:
        steps.close()  # what it pinned is released now, not when nobody holds the error any more
        raise


async def run_async(steps: ReadPlan[T]) -> T:
    """The result of the plan; what is not in memory is read off the event loop."""
    taken = 0
    try:
        file, position, length = next(steps)
        while True:
            data = file.read_nowait(position, length)
            taken += 1
            if data is None:
                data = await file.read_async(position, length)
            elif taken % _STEPS_PER_TURN == 0:
                # A long walk in memory must not block the loop.
                await asyncio.sleep(0)
            file, position, length = steps.send(data)
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        # A cancelled or failed read must let the plan release what it pinned.
        steps.close()
