"""Loads the state of a coordinator's partition: reads its log up to the high watermark without blocking the event loop.

    a leader epoch begins --> its log is confirmed (the high watermark has reached the epoch start)
                          --> batches are read, decoded and applied in slices of a few milliseconds
                          --> the state has every committed record

Only this coordinator writes to the partition, so the log does not grow meanwhile; if it does, the rest is read too.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from tidelog.coordinator.records import RECORDS_BYTES_MAX
from tidelog.log.batch import Columns, decode_columns, read_header
from tidelog.model.errors import CorruptStateError
from tidelog.model.ids import Offset
from tidelog.replication.leader_replica import LeaderReplica

S = TypeVar("S")
R = TypeVar("R")

READ_BYTES = 1 << 20
RECORDS_AT_A_TIME = 64
BYTES_AT_A_TIME = 16 << 10
"""Of values: a record with 10,000 partitions takes as long as thousands of small ones."""
TURN_S = 0.005
"""Seconds of work before other tasks run."""
TURN_RECORDS = 4_096
"""Records before other tasks run: a simulated clock stands still while code runs."""


@dataclass(slots=True)
class Progress:
    """Progress of one load, for metrics."""

    records: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class LogFormat(Generic[S, R]):
    """What the records of a partition are, and what state they result in."""

    empty: S
    decode: Callable[[bytes | None, bytes | None], R | None]
    """Of (key, value); None: a record to skip. Raises `CorruptStateError`."""
    apply: Callable[[S, Iterable[R]], S]


class Turns:
    """Yields to the event loop after `TURN_S` of work."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._since_s = self._loop.time()
        self._steps = 0

    async def maybe_yield(self) -> None:
        self._steps += 1
        if self._loop.time() - self._since_s >= TURN_S or self._steps * RECORDS_AT_A_TIME >= TURN_RECORDS:
            # Loaded objects live long, as in `metadata.snapshot_loader`: without this the garbage collector would scan
            # all of them again and again while they grow, for hundreds of milliseconds.
            gc.freeze()
            await asyncio.sleep(0)
            self._since_s = self._loop.time()
            self._steps = 0


async def wait_until_confirmed(leader: LeaderReplica) -> None:
    """Return when everything from before this leader epoch is known to be committed."""
    if not leader.state.is_confirmed:
        await leader.acks.wait(leader.state.epoch_start)


async def load(leader: LeaderReplica, progress: Progress, log_format: LogFormat[S, R]) -> tuple[S, Offset]:
    """Return the state of the log and its end. Raises as reads and waits do if the epoch ends first;
    `CorruptStateError` names the offset of an unreadable record."""
    state = log_format.empty
    offset = leader.log.start_offset
    turns = Turns()
    while offset < leader.log.end_offset or leader.high_watermark < leader.log.end_offset:
        end = leader.log.end_offset
        if leader.high_watermark < end:
            await leader.acks.wait(end)
        read_slice = await leader.log.read(offset, bytes_max=READ_BYTES, end=end)
        if not read_slice.data:
            offset = end  # compaction removed these records
            continue
        position = 0
        while position < len(read_slice.data):
            header = read_header(read_slice.data, position)
            if not header.is_control:
                columns = decode_columns(read_slice.data, position, decompressed_bytes_max=2 * RECORDS_BYTES_MAX)
                for records in _slices(columns, log_format.decode):
                    state = log_format.apply(state, records)
                    progress.records += len(records)
                    await turns.maybe_yield()
            position += header.size
            offset = header.next_offset
        progress.bytes += len(read_slice.data)
        await turns.maybe_yield()
    return state, offset


def _slices(columns: Columns, decode: Callable[[bytes | None, bytes | None], R | None]) -> Iterator[list[R]]:
    records: list[R] = []
    size = 0
    for offset, raw_key, raw_value in zip(columns.offsets, columns.keys, columns.values, strict=True):
        try:
            record = decode(raw_key, raw_value)
        except CorruptStateError as error:
            raise CorruptStateError(f"offset {offset}: {error}") from error
        if record is not None:
            records.append(record)
        size += 0 if raw_value is None else len(raw_value)
        if len(records) >= RECORDS_AT_A_TIME or size >= BYTES_AT_A_TIME:
            yield records
            records, size = [], 0
    yield records
