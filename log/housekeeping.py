"""Compacts one log: plans a cleaning (`compaction`) and runs it (`cleaner`).

The owner passes `bound`, the smaller of the high watermark and the first open transaction: nothing at or past it is
rewritten (an open transaction that the log knows lowers it further). One cleaning of a log runs at a time. Appends,
reads, truncations, `advance_start` and `close` go on meanwhile; a cleaning that one of them overtakes is abandoned,
which leaves the segments that were swapped in and the old checkpoint.

The cleaner's checkpoint is at or below the recovery point, and a truncation that lowers the recovery point deletes it:
what is fetched again is dirty. It is stored with the leader epoch of the last batch below it, and is ignored if the
epoch history of the log disagrees.

Tombstones and markers that another replica still needs stay (`deletes_bound_of`, called again before each swap). Which
ones are gone is stored before they go (`lineage`).

Throttling: after each step the task waits for as long as the bytes of that step take at the limit.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from tidelog.log.cleaner import (
    CleanedGroup,
    CleanerLimits,
    CleaningTask,
    checkpoint_after,
    clean_group,
    discard_cleaned,
    map_keys,
)
from tidelog.log.compaction import Checkpoint, CleaningPlan, plan_cleaning
from tidelog.log.log import Log
from tidelog.log.stored_state import CLEANER, decode, encode
from tidelog.model.errors import (
    CorruptBatchError,
    CorruptStateError,
    TidelogError,
    UnsupportedMagicError,
)
from tidelog.model.ids import Epoch, Offset, PartitionId

BoundOf = Callable[[PartitionId], Offset]

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CleaningReport:
    """The result of a cleaning, for logs and metrics."""

    plan: CleaningPlan
    checkpoint: Checkpoint
    records_read: int
    records_kept: int
    bytes_read: int
    bytes_kept: int


def cleaner_checkpoint(log: Log) -> Checkpoint | None:
    """Where the last cleaning stopped; None if there is none, it cannot be read, or the log was truncated below it."""
    try:
        data = log.store.get(log.prefix + CLEANER)
        if data is None:
            return None
        fields = decode("cleaner", data)
    except CorruptStateError:
        return None  # the next cleaning starts from the beginning: slow but correct
    first_dirty, epoch = fields.get("first_dirty"), fields.get("epoch")
    waiting_until = fields.get("settle_at_ms")  # the name in stored files; words: allow
    if not isinstance(first_dirty, int) or not isinstance(epoch, int):
        return None
    known, end = log.end_offset_for_epoch(epoch)
    if first_dirty > log.start_offset and (known != epoch or end < first_dirty):
        return None
    waiting_from = fields.get("waiting_from")
    return Checkpoint(
        Offset(first_dirty),
        waiting_until if isinstance(waiting_until, int) else None,
        waiting_from if isinstance(waiting_from, int) else 0,
    )


def plan(log: Log, *, bound: Offset, deletes_bound: Offset | None = None) -> CleaningPlan | None:
    """The cleaning that is due now, or None. `deletes_bound`: see `plan_cleaning`."""
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
    deletes_bound_of: BoundOf | None = None,
) -> CleaningReport | None:
    """Run a plan group by group; each group is swapped in before the next is written.

    None if the log was truncated, closed or found damaged meanwhile, or if a replica needs tombstones that were about
    to go. Corrupt bytes that the cleaner reads make the log damaged, and the error is raised.
    """
    generation = log.durability.generation
    # Use the log's own index interval.
    limits = replace(limits, index_interval_bytes=log.config.index_interval_bytes)
    try:
        aborted = await log.aborted_transactions(cleaning.segments[0].base_offset, cleaning.end_offset)
        task = CleaningTask(log.path, cleaning, tuple(aborted), log.producers.last_batches(), limits)
        done = await _clean_groups(log, task, generation, deletes_bound_of)
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
    log: Log, task: CleaningTask, generation: int, deletes_bound_of: BoundOf | None
) -> tuple[Offset, list[CleanedGroup]] | None:
    """The start of the dirty part afterwards, and the result of each group; None if the log has changed."""
    plan, limits = task.plan, task.limits
    mapped = await log.work.run(map_keys, log.disk, task)
    task = replace(task, newest_claim=mapped.newest_claim)
    dirty = [segment.size for segment in plan.segments if segment.next_offset > plan.first_dirty_offset]
    await _pace(sum(dirty), limits)
    groups: list[CleanedGroup] = []
    unfinished: frozenset[int] = frozenset()
    for group in plan.groups_below(mapped.end_offset):
        cleaned = await log.work.run(clean_group, log.disk, task, group, unfinished)
        await _pace(cleaned.bytes_read + cleaned.bytes_kept, limits)
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
    """Store that tombstones and markers below `end` are gone. False if a replica needs one again."""
    if end <= log.lineage.deletes_end:
        return True
    if log.is_closed or (deletes_bound_of is not None and end > deletes_bound_of(log.log_id)):
        return False
    await log.raise_deletes_end(end)
    return True


def _is_current(log: Log, cleaning: CleaningPlan, generation: int) -> bool:
    """Whether the log is still the one that was planned."""
    if log.is_closed or log.damaged is not None or log.durability.generation != generation:
        return False
    return log.segments.first_offset <= cleaning.segments[0].base_offset


async def _pace(size: int, limits: CleanerLimits) -> None:
    if limits.io_bytes_per_second is not None and size:
        await asyncio.sleep(size / limits.io_bytes_per_second)


async def _find_rot(log: Log, cleaning: CleaningPlan) -> None:
    """A batch of the plan is corrupt: scrub the segments, which marks the log damaged."""
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
            "settle_at_ms": checkpoint.waiting_until_ms,  # words: allow
            "waiting_from": checkpoint.waiting_from,
        },
    )
