"""Large messages are decoded and encoded in slices: other connections have their turn in between.

Kafka bounds a request by its bytes, not by how many partitions or groups it names. So the work is sliced, and the
objects that a request becomes count in the memory of requests until it is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from tidelog.rpc.kafka.api import Api
from tidelog.rpc.kafka.wire import Buffer

SLICED_FROM_BYTES = 16 << 10
"""Requests from this size on; smaller ones take a few milliseconds as a whole."""

T = TypeVar("T")


async def decode(api: Api[Any, Any], version: int, data: Buffer, offset: int) -> tuple[Any, int]:
    """The request, and about the bytes of its objects."""
    return await _run(api.decode_in_slices(version, data, offset))


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
