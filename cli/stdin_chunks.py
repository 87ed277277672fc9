"""Reads stdin without blocking the event loop: each chunk is available as soon as it arrives.

A daemon thread does the blocking reads, one at a time and only on request. Readiness polling is not enough: the loop
may report a descriptor as readable that was already read, or that another process has emptied, and the next read
blocks. The descriptor stays blocking because it is shared with the process that started this one. A thread that waits
in a read does not keep the process alive; it holds no lock of Python's own stdin.
"""

import asyncio
import os
import queue
import threading
from collections.abc import AsyncIterator
from typing import Any

CHUNK_BYTES = 1 << 20
LINE_BYTES_MAX = 64 << 20


class LineTooLongError(ValueError):
    """A line of the input is larger than any record may be."""


class ChunkReader:
    """Reads a descriptor in a thread. `read` is called by one task at a time; after it was cancelled nothing is lost:
    the next call returns what the thread has read meanwhile."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._requests: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Future[bytes]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pending: asyncio.Future[bytes] | None = None

    async def read(self) -> bytes:
        """The next bytes that arrive, at most `CHUNK_BYTES`; b"" at the end. Raises OSError."""
        if self._pending is None:
            loop = asyncio.get_running_loop()
            self._pending = loop.create_future()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="stdin", daemon=True)
                self._thread.start()
            self._requests.put((loop, self._pending))
        data = await asyncio.shield(self._pending)
        self._pending = None
        return data

    def _work(self) -> None:
        while True:
            loop, result = self._requests.get()
            try:
                data, error = os.read(self._fd, CHUNK_BYTES), None
            except OSError as failure:
                data, error = b"", failure
            try:
                loop.call_soon_threadsafe(_finish, result, data, error)
            except RuntimeError:
                return  # the loop has ended: nobody waits any more


def _finish(result: asyncio.Future[bytes], data: bytes, error: OSError | None) -> None:
    if result.done():
        return
    if error is None:
        result.set_result(data)
    else:
        result.set_exception(error)


class LineReader:
    """Splits a descriptor into lines. Only the line feed that ends a line is removed; every other byte is kept."""

    def __init__(self, fd: int) -> None:
        self._chunks = ChunkReader(fd)
        self._parts: list[bytes] = []
        self.incomplete_bytes = 0
        """Bytes that were read of a line whose end has not arrived."""
        self.bytes_read = 0
        self._stop: asyncio.Future[None] | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """End `batches` before the next read."""
        self._is_stopped = True
        if self._stop is not None and not self._stop.done():
            self._stop.set_result(None)

    async def batches(self) -> AsyncIterator[list[bytes]]:
        """Whole lines, as many as arrived together; at the end of the input the last line may lack its line feed."""
        self._stop = asyncio.get_running_loop().create_future()
        while not self._is_stopped:
            reading = asyncio.ensure_future(self._chunks.read())
            waiting: set[asyncio.Future[Any]] = {reading, self._stop}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                reading.cancel()
                return
            data = reading.result()
            if not data:
                if self.incomplete_bytes:
                    yield [self._take_parts()]
                return
            self.bytes_read += len(data)
            first, *rest = data.split(b"\n")
            self._add_part(first)
            if rest:
                lines = [self._take_parts(), *rest[:-1]]
                self._add_part(rest[-1])
                yield lines

    def _add_part(self, data: bytes) -> None:
        self.incomplete_bytes += len(data)
        if self.incomplete_bytes > LINE_BYTES_MAX:
            raise LineTooLongError(f"a line has more than {LINE_BYTES_MAX} bytes")
        self._parts.append(data)

    def _take_parts(self) -> bytes:
        line = b"".join(self._parts)
        self._parts, self.incomplete_bytes = [], 0
        return line


async def read_all(fd: int, *, bytes_max: int) -> bytes | None:
    """Everything up to the end of the input; None if that is more than `bytes_max` bytes."""
    chunks = ChunkReader(fd)
    parts: list[bytes] = []
    size = 0
    while data := await chunks.read():
        parts.append(data)
        size += len(data)
        if size > bytes_max:
            return None
    return b"".join(parts)
