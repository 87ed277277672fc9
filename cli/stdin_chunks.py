"""stdin for a command that has other things to do while nobody types: what is there, as it comes."""

import asyncio
import os
from collections.abc import AsyncIterator

CHUNK_BYTES = 1 << 20
LINE_BYTES_MAX = 64 << 20


async def chunks(fd: int) -> AsyncIterator[bytes]:
    """What can be read, until the end. A file is read as it is; of a pipe or a terminal its coming is awaited, and the
    descriptor stays blocking: it is shared with who started us."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    try:
        loop.add_reader(fd, ready.set)
    except PermissionError:  # a file: it is always ready
        while data := os.read(fd, CHUNK_BYTES):
            yield data
            await asyncio.sleep(0)
        return
    try:
        while True:
            await ready.wait()
            data = os.read(fd, CHUNK_BYTES)
            if not data:
                return
            yield data
            ready.clear()
    finally:
        loop.remove_reader(fd)


async def lines(fd: int) -> AsyncIterator[list[bytes]]:
    """Whole lines without their ends, as many as came together; the last one may lack its end."""
    left = b""
    async for data in chunks(fd):
        parts = (left + data).split(b"\n")
        left = parts.pop()
        if len(left) > LINE_BYTES_MAX:
            raise ValueError(f"a line of more than {LINE_BYTES_MAX} bytes")
        if parts:
            yield [line[:-1] if line.endswith(b"\r") else line for line in parts]
    if left:
        yield [left]
