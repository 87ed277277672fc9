"""Looking up records by time. Large batches are decoded where that holds up nobody.

The index and the headers lead to a batch; only its records say which of them it is. A search is given up and begun
anew if the files have changed while a batch was decoded elsewhere: what was found may be gone.
"""

from typing import TYPE_CHECKING

from tidelog.log.files import Steps
from tidelog.log.reading import LargeBatch, TimestampedOffset, first_at, largest_timestamp, timestamp_steps
from tidelog.world.work import Work

if TYPE_CHECKING:
    from tidelog.log.log import Log


async def first_record(log: "Log", timestamp: int, end: int | None, work: Work) -> TimestampedOffset | None:
    """See `Log.offset_for_timestamp`."""
    passed = 0

    def plan() -> Steps[TimestampedOffset | LargeBatch | None]:
        start = max(passed, log.start_offset)
        return timestamp_steps(log.segments, log.config, timestamp, start, log.read_bound(log.start_offset, end))

    while True:
        found = await log.look(plan)
        if not isinstance(found, LargeBatch):
            return found
        start, version = max(passed, log.start_offset), log.segments.version
        at = await work.run(first_at, found.data, timestamp, start, log.config.decompressed_bytes_max)
        if log.segments.version != version:
            passed = 0
        elif at is not None:
            return at if at.offset < log.read_bound(log.start_offset, end) else None
        else:
            passed = found.next_offset


async def latest_record(log: "Log", work: Work) -> TimestampedOffset | None:
    """See `Log.offset_of_largest_timestamp`."""
    while True:
        version = log.segments.version
        largest = largest_timestamp(log.segments, log.start_offset)
        if largest < 0:
            return None
        found = await first_record(log, largest, None, work)
        if found is not None or log.segments.version == version:
            return found
