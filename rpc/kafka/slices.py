"""Decodes and encodes large messages in slices: other tasks run in between.

Kafka limits the bytes of a request, not how many partitions or groups it names. So the work is sliced, and the objects
of a request count in the memory of requests until its response.

Objects take up to 70 times the bytes that they are decoded from. So a request of many objects waits until there is
memory for the most that it may become (`ObjectMemory`), in the order of arrival.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from tidelog.rpc.kafka.api import Api
from tidelog.rpc.kafka.wire import ELEMENT_BYTES, ELEMENTS_MAX, NUMBER_BYTES, NUMBERS_MAX, Buffer

SLICED_FROM_BYTES = 16 << 10
"""Smaller requests take a few milliseconds as a whole."""

OBJECT_BYTES_MAX = 256 << 20
"""Bytes of the objects of all requests."""
REQUEST_OBJECT_BYTES_MAX = ELEMENTS_MAX * ELEMENT_BYTES + NUMBERS_MAX * NUMBER_BYTES

T = TypeVar("T")


class ObjectMemory:
    """Limits the objects of all decoded, unanswered requests. One request always fits."""

    def __init__(self, bytes_max: int = OBJECT_BYTES_MAX) -> None:
        self.used = 0
        self._bytes_max = bytes_max
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def add(self, size: int) -> None:
        """Counts objects that exist already."""
        self.used += size

    async def reserve(self, size: int) -> None:
        """Returns when the size fits; it counts until `give_back`."""
        if not self._waiting and self._has_room(size):
            self.used += size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(size)
            else:
                self._admit()  # the next one may fit
            raise

    def give_back(self, size: int) -> None:
        self.used -= size
        self._admit()

    def _has_room(self, size: int) -> bool:
        return not self.used or self.used + size <= self._bytes_max

    def _admit(self) -> None:
        while self._waiting and (self._waiting[0][1].done() or self._has_room(self._waiting[0][0])):
            size, turn = self._waiting.popleft()
            if not turn.done():
                self.used += size
                turn.set_result(None)


async def decode(api: Api[Any, Any], version: int, data: Buffer, offset: int, objects: ObjectMemory) -> tuple[Any, int]:
    """Returns the request and roughly the bytes of its objects, which count until the caller gives them back."""
    work = api.decode_in_slices(version, data, offset)
    try:
        next(work)
    except StopIteration as end:
        request, size = end.value
        objects.add(size)
        return request, size
    await objects.reserve(REQUEST_OBJECT_BYTES_MAX)
    size = 0
    try:
        request, size = await _run(work)
    finally:
        objects.give_back(REQUEST_OBJECT_BYTES_MAX - size)
    return request, size


def encode(api: Api[Any, Any], version: int, response: Any) -> list[Buffer] | Exception:
    """Encodes a response; returns the error if it cannot."""
    try:
        return api.encode_response(version, response)
    except Exception as error:
        return error


def encode_sliced(
    api: Api[Any, Any], version: int, response: Any, done: Callable[[list[Buffer] | Exception], None]
) -> asyncio.Task[None] | None:
    """As `encode`, in slices: calls `done` at once if one is enough, else the task calls it."""
    work = api.encode_in_slices(version, response)
    try:
        next(work)
    except StopIteration as end:
        done(end.value)
        return None
    except Exception as error:
        done(error)
        return None
    return asyncio.get_running_loop().create_task(_encode(work, done))


async def _encode(work: Generator[None, None, list[Buffer]], done: Callable[[list[Buffer] | Exception], None]) -> None:
    body: list[Buffer] | Exception
    try:
        await asyncio.sleep(0)
        body = await _run(work)
    except Exception as error:
        body = error
    done(body)


async def _run(work: Generator[None, None, T]) -> T:
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        await asyncio.sleep(0)
