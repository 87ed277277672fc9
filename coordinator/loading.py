"""Reading the groups of a partition: its whole log, up to the high watermark, without holding up the event loop.

    a leader epoch begins --> its log is confirmed (the high watermark has reached where the epoch began)
                          --> batches are read in pieces, decoded and applied, a few milliseconds at a time
                          --> everything that was ever committed is in the state

Nobody else writes to the partition, so what is read does not grow meanwhile; if it does, that is read too.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from dataclasses import dataclass

from tidelog.coordinator.records import RECORDS_BYTES_MAX, GroupRecord, decode_key, decode_value
from tidelog.coordinator.state import EMPTY, CoordinatorState, apply
from tidelog.log.batch import Columns, decode_columns, read_header
from tidelog.model.errors import CorruptStateError
from tidelog.model.ids import Offset
from tidelog.replication.leading import Leading

READ_BYTES = 1 << 20
RECORDS_AT_A_TIME = 64
TURN_S = 0.005
"""Of the event loop, before others have theirs."""
TURN_RECORDS = 4_096
"""The same where time stands still while code runs."""


@dataclass(slots=True)
class Progress:
    """Of one load, for whoever looks."""

    records: int = 0
    bytes: int = 0


class Turns:
    """Lets others run when it has been our turn for long."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._since_s = self._loop.time()
        self._steps = 0

    async def maybe_yield(self) -> None:
        self._steps += 1
        if self._loop.time() - self._since_s >= TURN_S or self._steps * RECORDS_AT_A_TIME >= TURN_RECORDS:
            # What is loaded is there to stay, as in `metadata.loading`: the collector would look through all of it
            # again and again while it grows, for hundreds of milliseconds.
            gc.freeze()
            await asyncio.sleep(0)
            self._since_s = self._loop.time()
            self._steps = 0


async def confirmed(leading: Leading) -> None:
    """Returns when everything from before this leader epoch is known to be committed."""
    if not leading.state.is_confirmed:
        await leading.acks.wait(leading.state.epoch_start)


async def load(leading: Leading, progress: Progress) -> tuple[CoordinatorState, Offset]:
    """The state that the log makes, and where it ends. Fails as reads and waits do when the epoch ends first;
    `CorruptStateError` names the offset of what cannot be read."""
    state = EMPTY
    offset = leading.log.start_offset
    turns = Turns()
    while offset < leading.log.end_offset or leading.high_watermark < leading.log.end_offset:
        end = leading.log.end_offset
        if leading.high_watermark < end:
            await leading.acks.wait(end)
        found = await leading.log.read(offset, bytes_max=READ_BYTES, end=end)
        if not found.data:
            offset = end  # what stood here is compacted away
            continue
        position = 0
        while position < len(found.data):
            header = read_header(found.data, position)
            if not header.is_control:
                columns = decode_columns(found.data, position, decompressed_bytes_max=2 * RECORDS_BYTES_MAX)
                for records in _slices(columns):
                    state = apply(state, records)
                    progress.records += len(records)
                    await turns.maybe_yield()
            position += header.size
            offset = header.next_offset
        progress.bytes += len(found.data)
        await turns.maybe_yield()
    return state, offset


def _slices(columns: Columns) -> Iterator[list[GroupRecord]]:
    records: list[GroupRecord] = []
    for offset, raw_key, raw_value in zip(columns.offsets, columns.keys, columns.values, strict=True):
        try:
            record = _record(raw_key, raw_value)
        except CorruptStateError as error:
            raise CorruptStateError(f"offset {offset}: {error}") from error
        if record is not None:
            records.append(record)
        if len(records) >= RECORDS_AT_A_TIME:
            yield records
            records = []
    yield records


def _record(raw_key: bytes | None, raw_value: bytes | None) -> GroupRecord | None:
    """None: of a kind that this version does not know."""
    if raw_key is None:
        raise CorruptStateError("a group record has no key")
    key = decode_key(raw_key)
    if key is None or not key.group:
        return None
    value = None if raw_value is None else decode_value(raw_value)
    if raw_value is not None and value is None:
        return None
    if value is not None and key.kind != value.KIND:
        raise CorruptStateError(f"a value of kind {int(value.KIND)} stands under a key of kind {int(key.kind)}")
    return GroupRecord(key, value)
