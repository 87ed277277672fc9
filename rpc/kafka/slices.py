"""Large messages are decoded and encoded in slices: other connections have their turn in between.

Kafka bounds a request by its bytes, not by how many partitions or groups it names. So the work is sliced, and the
objects that a request becomes count in the memory of requests until it is answered.

Objects take up to 70 times the bytes that they are decoded from. So a request of many objects is decoded when there is
memory for the most that it may become (`ObjectMemory`); others of its kind wait, in the order in which they came.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from tidelog.rpc.kafka.api import Api
from tidelog.rpc.kafka.wire import ELEMENT_BYTES, ELEMENTS_MAX, NUMBER_BYTES, NUMBERS_MAX, Buffer

SLICED_FROM_BYTES = 16 << 10
"""Requests from this size on; smaller ones take a few milliseconds as a whole."""

OBJECT_BYTES_MAX = 256 << 20
"""Of the objects of all requests together."""
REQUEST_OBJECT_BYTES_MAX = ELEMENTS_MAX * ELEMENT_BYTES + NUMBERS_MAX * NUMBER_BYTES

T = TypeVar("T")


class ObjectMemory:
    """Bounds the objects of all requests that are decoded and not answered. One request always has room."""

    def __init__(self, bytes_max: int = OBJECT_BYTES_MAX) -> None:
        self.used = 0
        self._bytes_max = bytes_max
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def add(self, size: int) -> None:
        """Count objects that are there already."""
        self.used += size

    async def reserve(self, size: int) -> None:
        """Returns when there is room; it counts from then on, until `give_back`."""
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
    """The request, and about the bytes of its objects, which count in `objects` until the caller gives them back."""
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


def written(api: Api[Any, Any], version: int, response: Any) -> list[Buffer] | Exception:
    """The bytes of a response, or why it has none."""
    try:
        return api.encode_response(version, response)
    except Exception as error:
        return error


def write(
    api: Api[Any, Any], version: int, response: Any, done: Callable[[list[Buffer] | Exception], None]
) -> asyncio.Task[None] | None:
    """As `written`, in slices: `done` is called at once if one is enough, else the task calls it."""
    work = api.encode_in_slices(version, response)
    try:
        next(work)
    except StopIteration as end:
        done(end.value)
        return None
    except Exception as error:
        done(error)
        return None
    return asyncio.get_running_loop().create_task(_write(work, done))


async def _write(work: Generator[None, None, list[Buffer]], done: Callable[[list[Buffer] | Exception], None]) -> None:
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
