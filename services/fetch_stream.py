"""Fetches the same partitions again and again, each from where the last result ended."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, replace

from tidelog.log.batch_header import HEADER, HEADER_BYTES, LENGTH_PREFIX_BYTES
from tidelog.services.context import RequestContext
from tidelog.services.deadline import before_deadline
from tidelog.services.fetch import FetchItem, FetchRequest, FetchResult, FetchService, ReadMemory
from tidelog.services.partition_lookup import check_named

WAIT_MIN_MS = 100
WAIT_MS = 1_000
"""Wait of a stream that names none."""
POLL_MS = 1_000
"""Pause between two fetches of a stream that may not wait since too many fetches do."""


@dataclass(slots=True)
class _Position:
    """Where the stream continues in one partition."""

    at: int
    """Index in the request."""
    item: FetchItem
    is_ended: bool = False
    sent_offsets: tuple[int, int] = (-1, -1)

    def advance(self, result: FetchResult) -> bool:
        """Moves past the result; returns whether it has anything to send."""
        if result.ends_wait:
            self.is_ended = True
            return True
        offsets = (result.high_watermark, result.last_stable)
        has_changed, self.sent_offsets = bool(result.data) or offsets != self.sent_offsets, offsets
        if result.data:
            end, epoch = end_of(result.data)
            self.item = replace(self.item, offset=end, last_epoch=epoch)
        return has_changed


class FetchStream:
    """`next` returns results until each partition has ended by an error, a diverging epoch or a preferred replica."""

    def __init__(
        self, service: FetchService, context: RequestContext, request: FetchRequest, memory: ReadMemory | None = None
    ) -> None:
        wait_ms = max(WAIT_MIN_MS, request.max_wait_ms or WAIT_MS)
        self._wait_s = min(wait_ms, service.limits.fetch_wait_max_ms) / 1000
        self._service = service
        self._context = context
        self._request = request
        self._memory = memory
        check_named(request.items)
        self._positions = deque(_Position(at, item) for at, item in enumerate(request.items))

    async def next(self) -> list[tuple[int, FetchResult]] | None:
        """Returns (index in the request, result) of the partitions with changes, perhaps none; None at the end."""
        if not self._positions:
            return None
        results = await before_deadline(self._context, self._fetch())
        rows = [
            (position.at, result)
            for position, result in zip(self._positions, results, strict=True)
            if position.advance(result)
        ]
        self._positions = deque(position for position in self._positions if not position.is_ended)
        self._positions.rotate(-1)  # a busy partition does not starve the others
        return rows

    async def _fetch(self) -> list[FetchResult]:
        """Returns with data or a change, or after the wait. Fetches again from time to time if it may not wait."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._wait_s
        while True:
            request = replace(
                self._request,
                items=[position.item for position in self._positions],
                min_bytes=max(1, self._request.min_bytes),
                max_wait_ms=max(0, round((deadline_s - loop.time()) * 1000)),
            )
            results = await self._service.fetch(self._context, request, self._memory)
            left_s = deadline_s - loop.time()
            if left_s <= 0.001 or any(result.data or result.ends_wait for result in results):
                return results
            await asyncio.sleep(min(left_s, POLL_MS / 1000))


def end_of(data: bytes | memoryview) -> tuple[int, int]:
    """Returns the offset after the last of these whole batches, and the leader epoch of that batch."""
    position = last = 0
    while position + HEADER_BYTES <= len(data):
        last = position
        position += LENGTH_PREFIX_BYTES + int.from_bytes(data[position + 8 : position + 12], "big")
    assert position == len(data), "whole batches"
    base_offset, _length, epoch, _magic, _crc, _attributes, last_delta, *_rest = HEADER.unpack_from(data, last)
    return base_offset + last_delta + 1, epoch
