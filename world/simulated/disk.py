"""A simulated disk. `SimDevice` is the device of a machine, which outlives every process; `SimDisk` is one process's
handle to it, which dies with the process; `SimFile` is an open file of that handle. The contract is in `world.disk`,
the state of bytes and names in `world.simulated.device`.

- `append`, `truncate`, `rename`, ... take no virtual time; `sync_many` and `read_async` take their latency.
- A sync covers what was written before the call. Its data is durable when the device completes it, even if the process
  is paused or dead by then; a power loss before that counts it as unsynced.
- Every call on a handle of a dead node raises `MachineDied`.
- Several handles may read a file. One writes at a time: a write through a handle that has not seen another's write is a
  bug and asserts.
"""

import errno
import random
from collections.abc import Callable, Sequence
from typing import NoReturn

from tidelog.model.errors import StorageError
from tidelog.world.disk import Buffer, File
from tidelog.world.simulated.device import Change, Directory, Inode, Loss, Names, Node, restore, walk
from tidelog.world.simulated.faults import Faults, Latency, Stall, resolve
from tidelog.world.simulated.loop import SimLoop
from tidelog.world.simulated.scheduler import MachineDied
from tidelog.world.storage_errors import path_parts, storage_error

UNLIMITED_BYTES = 1 << 44
CHANGING = frozenset({"append", "truncate", "create", "make directory", "rename", "remove", "remove directory", "sync"})


class SimDevice:
    """One disk of one machine. The nemesis uses its attributes and the methods under "faults"."""

    def __init__(self, world_loop: SimLoop, label: str, stream: random.Random) -> None:
        self.label = label
        self.sync_latency = Latency(0.0002, 0.001)
        self.read_latency = Latency(0.00005, 0.0005)
        self.cold_read_probability = 0.0
        self.capacity_bytes: int | None = None
        self.is_read_only = False
        self.faults = Faults()
        self.stall = Stall(f"disk {label}")
        self.operations = 0
        self.crash_at_operation: int | None = None
        self.on_crash_point: Callable[[], None] | None = None
        self.on_call: Callable[[str, tuple[str, ...]], None] | None = None
        """Called with every call of a process before it has an effect; it may arm a fault, or end the process."""
        self.syncs = 0
        self.root = Directory()
        self.names = Names()
        self.used_bytes = 0
        self._world_loop = world_loop
        self._stream = stream
        self._power_cycles = 0

    # -- faults

    def fail(self, operation: str, *, number: int = errno.EIO, times: int = 1, path: str | None = None) -> None:
        """The next operations of this kind (`read`, `append`, `sync`, `open`, `rename`, ...) raise `number`."""
        self.faults.arm(operation, number=number, times=times, path=path)

    def fill(self, free_bytes: int = 0) -> None:
        self.capacity_bytes = self.used_bytes + free_bytes

    def begin_stall(self, *, everything: bool = False) -> None:
        self.stall.begin(everything=everything)

    def heal(self) -> None:
        """Restores space, drops armed errors and ends the stall. Damage stays."""
        self.capacity_bytes = None
        self.is_read_only = False
        self.faults.clear()
        self.stall.end()

    def files(self) -> list[tuple[str, int]]:
        """All visible files and their sizes."""
        return [(path, len(inode.data)) for path, inode in walk(self.root)]

    def raw(self, path: str) -> bytes:
        return bytes(self._inode(path).data)

    def durable(self, path: str) -> bytes:
        """Returns what a loss of all unsynced bytes would leave of this file."""
        return bytes(self._inode(path).durable)

    def overwrite(self, path: str, position: int, data: bytes) -> None:
        """Changes bytes on the device: bit rot, or a block that reverts to an old state."""
        inode = self._inode(path)
        for image in (inode.data, inode.durable):
            if position < len(image):
                image[position : position + len(data)] = data[: len(image) - position]

    def flip_bit(self, path: str, position: int, bit: int = 0) -> None:
        self.overwrite(path, position, bytes([self._inode(path).data[position] ^ (1 << bit)]))

    def cut(self, path: str, size: int) -> None:
        """Shortens the file on the device."""
        inode = self._inode(path)
        self.used_bytes -= max(0, len(inode.data) - size)
        inode.lose(inode.pending_end)
        del inode.data[size:]
        inode.durable = bytearray(inode.data)

    def evict(self) -> None:
        """Drops what failed syncs left in the page cache as clean: readers see what the device has."""
        for _, inode in walk(self.root):
            inode.evict()
        self._count_used()

    def wipe(self) -> None:
        """Replaces the disk by an empty one. Only while no process uses it."""
        self.root = Directory()
        self.names = Names()
        self.used_bytes = 0

    def lose_power(self, loss: Loss) -> None:
        """Every process of the machine is dead. No running operation completes."""
        self._power_cycles += 1
        self.stall.drop_queue()
        self.names.crash(loss, self._stream)
        restore(self.root, loss, self._stream)
        self._count_used()

    def validate(self) -> None:
        """Only where no sync ever failed and nothing was damaged."""
        for _, inode in walk(self.root):
            inode.validate()
        assert self.used_bytes == sum(size for _, size in self.files()), "used bytes are those of the files"

    # -- for the handles

    def begin(self, operation: str, *paths: str) -> None:
        """Every call of a process passes here. A changing call is counted and may be the crash point; every call may
        fail."""
        if self.on_call is not None:
            self.on_call(operation, paths)
        if operation in CHANGING:
            self.operations += 1
            if self.crash_at_operation is not None and self.operations >= self.crash_at_operation:
                self.crash_at_operation = None
                assert self.on_crash_point is not None, "a machine that can lose its power"
                self.on_crash_point()
                raise MachineDied(f"power lost before operation {self.operations}: {operation} {paths}")
        if self.is_read_only and operation in CHANGING:
            _raise(operation, paths[0] if paths else "", errno.EROFS)
        # Syncs and slow reads fail when the device completes them, not when they are submitted.
        if operation not in ("sync", "read_async"):
            error = self.faults.take(operation, paths)
            if error is not None:
                raise storage_error(operation, paths[0] if paths else "", error)

    def submit(self, latency: Latency, complete: Callable[[], None]) -> None:
        """Runs `complete` after the latency, unless power is lost first; it belongs to no process."""
        power_cycles = self._power_cycles

        def arrive() -> None:
            if power_cycles == self._power_cycles and not self.stall.wait(arrive):
                complete()

        self._world_loop.call_later(latency.draw(self._stream), arrive)

    def is_cold(self) -> bool:
        return self.cold_read_probability > 0 and self._stream.random() < self.cold_read_probability

    def capture(self, files: Sequence["SimFile"], directories: Sequence[str]) -> "SyncScope":
        """Returns what a sync that is called now makes durable."""
        nodes = [self.directory("sync directory", path) for path in directories]
        return SyncScope(
            [(file.path, file.inode, file.inode.pending_end) for file in files],
            self.names.covered(nodes),
            (*(file.path for file in files), *directories),
        )

    def finish_sync(self, scope: "SyncScope") -> StorageError | None:
        """Completes or fails a sync. A failed sync silently loses at least one part of it."""
        self.syncs += 1
        error = self.faults.take("sync", scope.paths)
        if error is None:
            for _, inode, end in scope.files:
                inode.make_durable(end)
            self.names.make_durable(scope.names)
            return None
        victim = self._stream.randrange(max(1, len(scope.files)))
        for index, (_, inode, end) in enumerate(scope.files):
            if index == victim or self._stream.random() < 0.5:
                inode.lose(end)
            else:
                inode.make_durable(end)
        self.names.lose(scope.names)
        return storage_error("sync", scope.paths[0], error)

    def reserve(self, path: str, length: int) -> None:
        if self.capacity_bytes is not None and self.used_bytes + length > self.capacity_bytes:
            _raise("append", path, errno.ENOSPC)
        self.used_bytes += length

    def find(self, path: str) -> Node | None:
        node: Node = self.root
        for part in path_parts(path):
            if not isinstance(node, Directory):
                return None
            child = node.entries.get(part)
            if child is None:
                return None
            node = child
        return node

    def directory(self, action: str, path: str) -> Directory:
        node = self.find(path)
        if node is None:
            _raise(action, path, errno.ENOENT)
        if not isinstance(node, Directory):
            _raise(action, path, errno.ENOTDIR)
        return node

    def parent(self, action: str, path: str) -> tuple[Directory, str]:
        parts = path_parts(path)
        assert parts, f"{action} of the log directory itself"
        return self.directory(action, "/".join(parts[:-1])), parts[-1]

    def forget(self, node: Node) -> None:
        """A node without a name does not count as used."""
        if isinstance(node, Inode):
            self.used_bytes -= len(node.data)
        else:
            self.used_bytes -= sum(len(inode.data) for _, inode in walk(node))

    def _inode(self, path: str) -> Inode:
        node = self.find(path)
        assert isinstance(node, Inode), f"no file {path}"
        return node

    def _count_used(self) -> None:
        self.used_bytes = sum(size for _, size in self.files())


class SyncScope:
    """The operations that one sync covers."""

    __slots__ = ("files", "names", "paths")

    def __init__(
        self, files: list[tuple[str, Inode, int]], names: list[tuple[Change, ...]], paths: tuple[str, ...]
    ) -> None:
        self.files = files
        self.names = names
        self.paths = paths or ("",)


class SimFile:
    """Implements `world.disk.File`."""

    __slots__ = ("_disk", "_is_closed", "_path", "_size", "inode")

    def __init__(self, disk: "SimDisk", path: str, inode: Inode) -> None:
        self._disk = disk
        self._path = path
        self._size = len(inode.data)
        self._is_closed = False
        self.inode = inode

    @property
    def path(self) -> str:
        return self._path

    @property
    def size(self) -> int:
        return self._size

    def append(self, *buffers: Buffer) -> int:
        device = self._enter("append")
        position = self._size
        assert position == len(self.inode.data), f"{self._path} has another writer"
        data = b"".join(buffers)
        device.reserve(self._path, len(data))
        if data:
            self.inode.append(data)
            self._size += len(data)
        return position

    def read(self, position: int, length: int) -> bytes:
        self._enter("read")
        return bytes(self.inode.data[position : position + length])

    def read_nowait(self, position: int, length: int) -> bytes | None:
        device = self._enter("read")
        return None if device.is_cold() else bytes(self.inode.data[position : position + length])

    async def read_async(self, position: int, length: int) -> bytes:
        device = self._enter("read_async")
        loop = self._disk.loop
        done = loop.create_future()

        def complete() -> None:
            error = device.faults.take("read", (self._path,))
            if error is not None:
                loop.call_soon(resolve, done, None, storage_error("read", self._path, error))
            else:
                loop.call_soon(resolve, done, bytes(self.inode.data[position : position + length]), None)

        device.submit(device.read_latency, complete)
        data: bytes = await done
        return data

    def truncate(self, size: int) -> None:
        device = self._enter("truncate")
        assert self._size == len(self.inode.data), f"{self._path} has another writer"
        assert 0 <= size <= self._size, f"cut {self._path} of {self._size} bytes to {size}"
        device.used_bytes -= self._size - size
        self.inode.truncate(size)
        self._size = size

    def close(self) -> None:
        self._is_closed = True

    def assert_open(self) -> None:
        assert not self._is_closed, f"{self._path} is closed"

    def _enter(self, operation: str) -> SimDevice:
        self.assert_open()
        return self._disk.enter(operation, self._path)


class SimDisk:
    """Implements `world.disk.Disk` for one incarnation of a node."""

    def __init__(self, device: SimDevice, loop: SimLoop) -> None:
        self.loop = loop
        self._device = device
        self._is_dead = False

    @property
    def label(self) -> str:
        return self._device.label

    def die(self) -> None:
        self._is_dead = True

    def enter(self, operation: str, *paths: str) -> SimDevice:
        if self._is_dead:
            raise MachineDied(f"{operation} {paths} after death")
        self._device.begin(operation, *paths)
        self._device.stall.touch(self.loop)
        return self._device

    def open(self, path: str, *, create: bool = False) -> SimFile:
        device = self.enter("open", path)
        node = device.find(path)
        if node is None:
            if not create:
                _raise("open", path, errno.ENOENT)
            directory, name = device.parent("open", path)
            device = self.enter("create", path)
            node = Inode()
            device.names.change((directory, name, node))
        if isinstance(node, Directory):
            _raise("open", path, errno.EISDIR)
        return SimFile(self, path, node)

    def exists(self, path: str) -> bool:
        return self.enter("exists", path).find(path) is not None

    def size(self, path: str) -> int:
        node = self.enter("size", path).find(path)
        if not isinstance(node, Inode):
            _raise("size", path, errno.ENOENT if node is None else errno.EISDIR)
        return len(node.data)

    def list(self, path: str) -> list[str]:
        return sorted(self.enter("list", path).directory("list", path).entries)

    def make_directory(self, path: str) -> None:
        device = self.enter("make directory", path)
        directory = device.root
        for part in path_parts(path):
            node = directory.entries.get(part)
            if node is None:
                node = Directory()
                device.names.change((directory, part, node))
            if not isinstance(node, Directory):
                _raise("make directory", path, errno.EEXIST)
            directory = node

    def rename(self, source: str, target: str) -> None:
        device = self.enter("rename", source, target)
        action = f"rename to {target}:"
        source_directory, source_name = device.parent(action, source)
        target_directory, target_name = device.parent(action, target)
        node = source_directory.entries.get(source_name)
        replaced = target_directory.entries.get(target_name)
        if node is None:
            _raise(action, source, errno.ENOENT)
        if replaced is node:
            return
        if replaced is not None:
            if isinstance(node, Directory) != isinstance(replaced, Directory):
                _raise(action, source, errno.EISDIR if isinstance(replaced, Directory) else errno.ENOTDIR)
            if isinstance(replaced, Directory) and replaced.entries:
                _raise(action, source, errno.ENOTEMPTY)
            device.forget(replaced)
        device.names.change((source_directory, source_name, None), (target_directory, target_name, node))

    def remove(self, path: str) -> None:
        device = self.enter("remove", path)
        node = device.find(path)
        if node is None:
            return
        if isinstance(node, Directory):
            _raise("remove", path, errno.EISDIR)
        directory, name = device.parent("remove", path)
        device.forget(node)
        device.names.change((directory, name, None))

    def remove_directory(self, path: str) -> None:
        """Removes one name after the other: a crash in between leaves some of them."""
        assert path, "the log directory itself is not removed"
        device = self.enter("remove directory", path)
        node = device.find(path)
        if node is None:
            return
        if not isinstance(node, Directory):
            _raise("remove directory", path, errno.ENOTDIR)
        for name, child in sorted(node.entries.items()):
            if isinstance(child, Directory):
                self.remove_directory(f"{path}/{name}")
            else:
                self.remove(f"{path}/{name}")
        directory, name = device.parent("remove directory", path)
        device.names.change((directory, name, None))

    def free_bytes(self) -> int:
        device = self.enter("free space")
        return UNLIMITED_BYTES if device.capacity_bytes is None else max(0, device.capacity_bytes - device.used_bytes)

    def total_bytes(self) -> int:
        device = self.enter("free space")
        return UNLIMITED_BYTES if device.capacity_bytes is None else device.capacity_bytes

    def sync(self, files: Sequence[File], directories: Sequence[str] = ()) -> None:
        """Takes no virtual time: startup and helper processes use it."""
        device, scope = self._begin_sync(files, directories)
        error = device.finish_sync(scope)
        if error is not None:
            raise error

    async def sync_many(self, files: Sequence[File], directories: Sequence[str] = ()) -> None:
        if not files and not directories:
            return
        device, scope = self._begin_sync(files, directories)
        done = self.loop.create_future()

        def complete() -> None:
            self.loop.call_soon(resolve, done, None, device.finish_sync(scope))

        device.submit(device.sync_latency, complete)
        await done

    def _begin_sync(self, files: Sequence[File], directories: Sequence[str]) -> tuple[SimDevice, "SyncScope"]:
        handles = [file for file in files if isinstance(file, SimFile)]
        assert len(handles) == len(files), "files of another disk"
        for handle in handles:
            handle.assert_open()
        device = self.enter("sync", *(file.path for file in files), *directories)
        return device, device.capture(handles, directories)


def _raise(action: str, path: str, number: int) -> NoReturn:
    raise storage_error(action, path, OSError(number, "simulated"))
