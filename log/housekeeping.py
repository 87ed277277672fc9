"""Retention and compaction of one log: the decisions of `retention` and `compaction`, carried out.

The owner hands in `bound`, the smaller of the high watermark and the first open transaction: nothing at or past it is
deleted or rewritten (an open transaction that the log knows of lowers it further). It cleans a log in one place at a
time. Appends, reads, cuts, `advance_start` and `close` go on meanwhile: a cleaning that was overtaken by one of them
is abandoned, which leaves the segments that were swapped in and the old checkpoint.

The cleaner's checkpoint lies at or below the recovery point, and a cut that lowers that deletes it: what is fetched
again is dirty. It is also stored with the leader epoch of the last batch below it, and counts for nothing if the
epoch history says that the log below it is another one.

Tombstones and markers that another replica still needs stay (`deletes_bound_of`, asked again before each swap); which
ones are gone is stored before they go (`lineage`).

Throttling: a helper process sleeps by itself between its chunks if the owner hands in what to sleep with; else (in the
simulator) the log's own loop waits after each step for as long as the bytes of that step are worth.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from tidelog.log import lineage
from tidelog.log.checkpoint import CLEANER, decode, encode
from tidelog.log.cleaner import (
    CleanedGroup,
    CleanerLimits,
    CleaningTask,
    Sleep,
    checkpoint_after,
    clean_group,
    discard_cleaned,
    map_keys,
)
from tidelog.log.compaction import Checkpoint, CleaningPlan, plan_cleaning
from tidelog.log.log import Log
from tidelog.log.retention import Expired, expired_segments
from tidelog.log.surgery import drop_oldest
from tidelog.model.errors import (
    CorruptBatchError,
    CorruptStateError,
    DiskFullError,
    TidelogError,
    UnsupportedMagicError,
)
from tidelog.model.ids import Epoch, Offset, PartitionId

BoundOf = Callable[[PartitionId], Offset]

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CleaningReport:
    """What a cleaning did, for logs and metrics."""

    plan: CleaningPlan
    checkpoint: Checkpoint
    records_read: int
    records_kept: int
    bytes_read: int
    bytes_kept: int


async def expire(log: Log, *, bound: Offset) -> list[Expired]:
    """Delete what retention no longer keeps; returns what went, and why."""
    async with log.lock:  # what is decided must still be so when it is done: a swap or a cut may be under way
        if log.damaged is not None or log.is_closed:
            return []
        with suppress(DiskFullError):  # what is sealed already can expire, and makes the room
            log.roll_if_due()
        expired = expired_segments(
            log.sealed_segments(),
            config=log.config,
            now_ms=log.clock.now_ms(),
            log_start=log.start_offset,
            bound=log.last_stable_offset(bound),
            active_bytes=log.active_bytes,
        )
        if not expired:
            return []
        try:
            await drop_oldest(log, len(expired))
        except DiskFullError:
            # There is no room to move the recovery point. What lies below it can go without that, and makes room.
            mark = log.mark
            expired = [
                gone for gone in expired if gone.next_offset <= mark.offset and gone.base_offset < mark.base_offset
            ]
            if not expired:
                raise
            await drop_oldest(log, len(expired))
        return expired


def cleaner_checkpoint(log: Log) -> Checkpoint | None:
    """Where the last cleaning stopped; None if there was none, it cannot be read, or the log was cut below it."""
    try:
        data = log.store.get(log.prefix + CLEANER)
        if data is None:
            return None
        fields = decode("cleaner", data)
    except CorruptStateError:
        return None  # the next cleaning starts from the beginning, which is slow and right
    first_dirty, epoch, settle_at = fields.get("first_dirty"), fields.get("epoch"), fields.get("settle_at_ms")
    if not isinstance(first_dirty, int) or not isinstance(epoch, int):
        return None
    known, end = log.end_offset_for_epoch(epoch)
    if first_dirty > log.start_offset and (known != epoch or end < first_dirty):
        return None
    waiting_from = fields.get("waiting_from")
    return Checkpoint(
        Offset(first_dirty),
        settle_at if isinstance(settle_at, int) else None,
        waiting_from if isinstance(waiting_from, int) else 0,
    )


def plan(log: Log, *, bound: Offset, deletes_bound: Offset | None = None) -> CleaningPlan | None:
    """What is to be cleaned now, or None. `deletes_bound`: see `plan_cleaning`."""
    if not log.config.cleanup_compact or log.damaged is not None or log.is_closed:
        return None
    return plan_cleaning(
        log.sealed_segments(),
        checkpoint=cleaner_checkpoint(log),
        config=log.config,
        now_ms=log.clock.now_ms(),
        log_start=log.start_offset,
        bound=log.last_stable_offset(bound),
        deletes_bound=deletes_bound,
    )


async def clean(
    log: Log,
    cleaning: CleaningPlan,
    limits: CleanerLimits,
    sleep: Sleep | None = None,
    deletes_bound_of: BoundOf | None = None,
) -> CleaningReport | None:
    """Carry out a plan: group by group, each swapped in before the next is written.

    None if the log was cut, shortened, closed or found damaged meanwhile, or a replica has come that needs tombstones
    which were about to go. Rot that the cleaner meets makes the log damaged, and is raised.
    """
    generation = log.durability.generation
    # Batches of the log are bounded by what it admits; entries as dense as its own find what they should.
    limits = replace(limits, index_interval_bytes=log.config.index_interval_bytes)
    try:
        aborted = await log.aborted_transactions(cleaning.segments[0].base_offset, cleaning.end_offset)
        task = CleaningTask(log.path, cleaning, tuple(aborted), log.producers.last_batches(), limits)
        done = await _clean_groups(log, task, generation, sleep, deletes_bound_of)
    except (CorruptBatchError, UnsupportedMagicError):
        if not _is_current(log, cleaning, generation):
            return None
        await _find_rot(log, cleaning)
        raise
    except TidelogError:
        if not _is_current(log, cleaning, generation):
            return None
        raise
    finally:
        if not log.is_closed:
            discard_cleaned(log.disk, log.path)
    if done is None:
        return None
    end, groups = done
    checkpoint = checkpoint_after(end, groups)
    if not await _store_checkpoint(log, checkpoint, generation):
        return None
    return CleaningReport(
        cleaning,
        checkpoint,
        records_read=sum(group.records_read for group in groups),
        records_kept=sum(group.records_kept for group in groups),
        bytes_read=sum(group.bytes_read for group in groups),
        bytes_kept=sum(group.bytes_kept for group in groups),
    )


async def _clean_groups(
    log: Log, task: CleaningTask, generation: int, sleep: Sleep | None, deletes_bound_of: BoundOf | None
) -> tuple[Offset, list[CleanedGroup]] | None:
    """Where the dirty part begins afterwards, and what became of each group; None if the log has changed."""
    plan, limits = task.plan, task.limits
    mapped = await log.work.run(map_keys, log.disk, task, sleep)
    dirty = [segment.size for segment in plan.segments if segment.next_offset > plan.first_dirty_offset]
    await _pace(sum(dirty), limits, sleep)
    groups: list[CleanedGroup] = []
    unfinished: frozenset[int] = frozenset()
    for group in plan.groups_below(mapped.end_offset):
        cleaned = await log.work.run(clean_group, log.disk, task, group, unfinished, sleep)
        await _pace(cleaned.bytes_read + cleaned.bytes_kept, limits, sleep)
        if cleaned.segment is None:
            is_current = _is_current(log, task.plan, generation)
        else:
            if not await _give_up_deletes(log, cleaned.deletes_end, deletes_bound_of):
                return None
            is_current = await log.replace_segments([cleaned.segment], generation=generation)
        if not is_current:
            return None
        groups.append(cleaned)
        unfinished = cleaned.unfinished
    return mapped.end_offset, groups


async def _give_up_deletes(log: Log, end: Offset, deletes_bound_of: BoundOf | None) -> bool:
    """Store that tombstones and markers below `end` are gone. False if one of them is needed again."""
    if end <= log.lineage.deletes_end:
        return True
    if log.is_closed or (deletes_bound_of is not None and end > deletes_bound_of(log.log_id)):
        return False
    await lineage.raise_deletes_end(log, end)
    return True


def _is_current(log: Log, cleaning: CleaningPlan, generation: int) -> bool:
    """Whether the log is still the one that the plan was made for."""
    if log.is_closed or log.damaged is not None or log.durability.generation != generation:
        return False
    return log.segments.first_offset <= cleaning.segments[0].base_offset


async def _pace(size: int, limits: CleanerLimits, sleep: Sleep | None) -> None:
    if limits.io_bytes_per_second is not None and sleep is None and size:
        await asyncio.sleep(size / limits.io_bytes_per_second)


async def _find_rot(log: Log, cleaning: CleaningPlan) -> None:
    """A batch of the plan is not what was written: find out in which segment, which makes the log damaged."""
    for segment in cleaning.segments:
        if any(info.base_offset == segment.base_offset for info in log.segments.sealed):
            result = await log.scrub(segment.base_offset)
            if result.fault is not None:
                return


async def _store_checkpoint(log: Log, checkpoint: Checkpoint, generation: int) -> bool:
    async with log.lock:
        if log.mark.offset < checkpoint.first_dirty_offset:
            await log.store_mark()
        if log.is_closed or log.damaged is not None or log.durability.generation != generation:
            return False
        assert log.mark.offset >= checkpoint.first_dirty_offset, "a cleaner's checkpoint past the recovery point"
        await log.store.commit(
            {log.prefix + CLEANER: _encode(checkpoint, log.epochs.epoch_for(checkpoint.first_dirty_offset - 1))}
        )
        return True


def _encode(checkpoint: Checkpoint, epoch: Epoch) -> bytes:
    return encode(
        "cleaner",
        {
            "first_dirty": checkpoint.first_dirty_offset,
            "epoch": epoch,
            "settle_at_ms": checkpoint.settle_at_ms,
            "waiting_from": checkpoint.waiting_from,
        },
    )
