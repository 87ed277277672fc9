"""Reads a log: batches from an offset, offsets by timestamp, aborted transactions.

Runs the plans of `read_plans` again if files change meanwhile, and rebuilds an index that proves wrong. A look-up by
timestamp decodes a large batch in a helper process; if files change meanwhile, the look-up starts again.
"""

from collections.abc import Callable

from tidelog.log.file_pool import T, run_async, run_nowait
from tidelog.log.index import ReadPlan
from tidelog.log.index_rebuilder import IndexRebuilder
from tidelog.log.log_state import LogState
from tidelog.log.read_plans import (
    IndexFaultError,
    LargeBatch,
    Slice,
    TimestampedOffset,
    aborted_steps,
    first_at,
    largest_timestamp,
    range_steps,
    read_steps,
    timestamp_steps,
)
from tidelog.log.transactions import AbortedTransaction
from tidelog.model.errors import CorruptBatchError, OffsetOutOfRangeError, StorageError
from tidelog.model.ids import Offset
from tidelog.world.work import Work


class LogReader:
    """Reads one open log. Owns no state."""

    __slots__ = ("_rebuilder", "_state")

    def __init__(self, state: LogState, rebuilder: IndexRebuilder) -> None:
        self._state = state
        self._rebuilder = rebuilder

    def read_nowait(self, offset: int, bytes_max: int, end: int | None) -> Slice | None:
        """See `Log.read_nowait`."""
        bound = self._read_bound(offset, end)
        if offset >= bound:
            return Slice(b"", Offset(offset), Offset(offset))
        try:
            return run_nowait(read_steps(self._state.segments, self._state.context.config, offset, bytes_max, bound))
        except IndexFaultError:
            return None

    async def read(self, offset: int, bytes_max: int, end: int | None) -> Slice:
        """See `Log.read`."""
        result = self.read_nowait(offset, bytes_max, end)
        if result is not None:
            return result

        def plan() -> ReadPlan[Slice]:
            bound = self._read_bound(offset, end)
            return read_steps(self._state.segments, self._state.context.config, offset, bytes_max, bound)

        return await self._run(plan)

    async def aborted_transactions(self, start: int, end: int) -> list[AbortedTransaction]:
        """See `Log.aborted_transactions`."""
        return await self._run(lambda: aborted_steps(self._state.segments, start, end))

    async def range_bytes(self, start: int, end: int) -> int:
        """See `Log.range_bytes`."""
        start, end = max(start, self._state.offsets.start_offset), min(end, self._state.segments.end_offset)
        if start >= end:
            return 0
        return await self._run(lambda: range_steps(self._state.segments, self._state.context.config, start, end))

    async def first_record(self, timestamp: int, end: int | None, work: Work) -> TimestampedOffset | None:
        """See `Log.offset_for_timestamp`."""
        context, segments, offsets = self._state.context, self._state.segments, self._state.offsets
        passed = 0

        def plan() -> ReadPlan[TimestampedOffset | LargeBatch | None]:
            start = max(passed, offsets.start_offset)
            bound = self._read_bound(offsets.start_offset, end)
            return timestamp_steps(segments, context.config, timestamp, start, bound)

        while True:
            result = await self._run(plan)
            if not isinstance(result, LargeBatch):
                return result
            start, version = max(passed, offsets.start_offset), segments.version
            record = await work.run(first_at, result.data, timestamp, start, context.config.decompressed_bytes_max)
            if segments.version != version:
                passed = 0
            elif record is not None:
                return record if record.offset < self._read_bound(offsets.start_offset, end) else None
            else:
                passed = result.next_offset

    async def latest_record(self, work: Work) -> TimestampedOffset | None:
        """See `Log.offset_of_largest_timestamp`."""
        while True:
            version = self._state.segments.version
            largest = largest_timestamp(self._state.segments, self._state.offsets.start_offset)
            if largest < 0:
                return None
            record = await self.first_record(largest, None, work)
            if record is not None or self._state.segments.version == version:
                return record

    async def _run(self, plan: Callable[[], ReadPlan[T]]) -> T:
        """Run a plan; again if files changed meanwhile, or after an index was rebuilt."""
        segments = self._state.segments
        rebuilt: set[int] = set()
        while True:
            version = segments.version
            try:
                result = await run_async(plan())
            except IndexFaultError as fault:
                if fault.base_offset in rebuilt and segments.version == version:
                    raise CorruptBatchError(f"{self._state.context.path}: {fault}, although it was rebuilt") from fault
                await self._rebuilder.rebuild(fault.base_offset)
                rebuilt.add(fault.base_offset)
                continue
            except (CorruptBatchError, StorageError):
                if segments.version == version:
                    raise
                continue
            if segments.version == version:
                return result

    def _read_bound(self, offset: int, end: int | None) -> int:
        """Return the offset where a read from `offset` stops: `end`, the log end or the good end of a damaged log."""
        start, log_end, damage = (
            self._state.offsets.start_offset,
            self._state.segments.end_offset,
            self._state.damage.current,
        )
        bound = log_end if end is None else min(end, log_end)
        if not start <= offset <= log_end:
            raise OffsetOutOfRangeError(
                f"{self._state.context.path}: offset {offset} is outside of {start} to {log_end}",
                offset=offset,
                start=start,
                end=log_end,
            )
        if damage is not None:
            if damage.good_end <= offset < bound:
                raise self._state.damage.error()
            bound = min(bound, damage.good_end)
        return bound
