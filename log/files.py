"""Open files of one disk: a bounded pool, and how a plan of reads is carried out.

Theory of operation. Logs hold no open files; they ask the pool by path. The pool keeps the most recently used ones
open, up to `open_max`, and closes the rest. Two kinds of users need a file to stay open across an await: a reader in
the middle of an asynchronous read, and a log whose written bytes are not yet synced (an error of the device is only
sure to be reported to a file that was open when the bytes were written). They pin it. Pinned files may take the pool
past its bound, by at most the files that are dirty or being read at one time.

A plan of reads (`Steps`) is a generator that yields what it needs and is sent the bytes. The same plan runs on the
event loop when everything is in memory (`run_nowait`), off the loop (`run_async`), or blocking in a helper process
(`run_blocking`).
"""

import asyncio
from collections import OrderedDict
from collections.abc import Generator
from typing import TypeVar

from tidelog.world.disk import Disk, File

T = TypeVar("T")

_STEPS_PER_TURN = 256

Steps = Generator[tuple[File, int, int], bytes, T]
"""Yields (file, position, length), is sent the bytes (fewer only at the end of the file), returns the result."""


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
        """The open file at `path`, good until the caller next awaits or asks the pool for another."""
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
        """As `get`, and open until `unpin`. Pins count: each needs its own unpin."""
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

        Who has it pinned keeps reading the old file; the next `get` opens what stands at the path then.
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
        """Close everything; pinned files too, since their users are gone by now."""
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


def run_nowait(steps: Steps[T]) -> T | None:
    """The result of the plan if all it reads is in memory, else None (the plan is closed)."""
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


async def run_async(steps: Steps[T]) -> T:
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
                # A long walk in memory must not hold up the loop.
                await asyncio.sleep(0)
            file, position, length = steps.send(data)
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        # A cancelled or failed read must let the plan release what it pinned.
        steps.close()


def run_blocking(steps: Steps[T]) -> T:
    """The result of the plan, read on the spot: for helper processes and start-up."""
    try:
        file, position, length = next(steps)
        while True:
            file, position, length = steps.send(file.read(position, length))
    except StopIteration as done:
        result: T = done.value
        return result
