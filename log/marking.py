"""Storing the recovery point: the sync first, then one commit of the mark with all that it vouches for.

    write waiting index entries -> take the mark -> sync -> commit {mark, epochs, sealed segments, producers}

A mark has all producers beside it, so one of a log with many of them waits until it is worth it (`is_worth_it`); until
then recovery has a little more to read. Their rows are made a few at a time (`PACKED_PER_SLICE`) before the mark is
taken.

The mark is taken before the sync and stored after it, so that nothing in the store speaks of bytes that are not on the
device. Appends go on meanwhile; they belong to the next mark.
"""

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from tidelog.log import checkpoint as stored
from tidelog.log.appending import snapshot, write_index_entries
from tidelog.log.checkpoint import Writes
from tidelog.log.config import FlushMode, LogConfig
from tidelog.log.scan import file_crc
from tidelog.log.segment import RecoveryMark
from tidelog.model.ids import Offset

if TYPE_CHECKING:
    from tidelog.log.log import Log

SNAPSHOTS_KEPT = 4
"""Producer snapshots at so many rolls are kept, and the one at the log's beginning: a cut goes back to one of them and
replays from there."""


PRODUCERS_FEW = 500
PRODUCER_BYTES = 64
"""What a producer takes in a snapshot, about."""
SNAPSHOT_RATIO = 8
WAIT_MS_MAX = 10_000
PACKED_PER_SLICE = 500
"""Some 3 ms."""


def is_worth_it(log: "Log") -> bool:
    """Whether a regular checkpoint should store a mark now: with many producers only after as much was written as makes
    up for their snapshot, after a roll, or after a while."""
    count = len(log.producers)
    if count <= PRODUCERS_FEW or log.has_rolled or log.mark.base_offset != log.segments.active.base_offset:
        return True
    written = log.segments.active.size - log.mark.position
    waited_ms = log.clock.now_ms() - log.mark.modified_ms
    return written >= SNAPSHOT_RATIO * PRODUCER_BYTES * count or not 0 <= waited_ms < WAIT_MS_MAX


def has_news(log: "Log") -> bool:
    """Whether the stored state lags behind the log."""
    active = log.segments.active
    return (
        log.mark.offset != log.segments.end_offset
        or log.mark.base_offset != active.base_offset
        or bool(active.index.offsets or active.index.times or active.aborted)
        or not (log.durability.is_settled or _is_blank(log))
        or bool(log.pending_infos or log.pending_snapshots)
        or log.epochs_changed
        or log.intent is not None
    )


def _is_blank(log: "Log") -> bool:
    """Nothing was ever written, so there is nothing to sync: the log's own name goes to the device with its first
    records, and a blank log whose name is lost is made anew as what it was."""
    segments, durability = log.segments, log.durability
    return (
        segments.end_offset == 0
        and segments.active.size == 0
        and not segments.sealed
        and durability.generation == 0
        and durability.has_only_names
    )


async def note_page_cache(log: "Log", config: LogConfig) -> None:
    """Before the log acknowledges what it has not synced: the store says so, until `forget_page_cache`.

    A topic may change to `flush.mode=sync` and the power may go before its records are synced. The settings do not
    show then that acknowledged records may be lost; this does (`replication.announcing`).
    """
    if config.flush_mode is FlushMode.PAGE_CACHE and not log.is_page_cache:
        await log.store.commit({log.prefix + stored.PAGE_CACHE: stored.encode_number("page-cache", 1)})
        log.is_page_cache = True


async def forget_page_cache(log: "Log") -> None:
    """The log syncs what it acknowledges from now on: what it has acknowledged before is synced, and the store says no
    more. The caller makes sure that the controller knows of a loss that the last opening found."""
    assert log.config.flush_mode is FlushMode.SYNC, "it goes on without syncing"
    if log.is_page_cache:
        await log.flush()
        await log.store.commit({log.prefix + stored.PAGE_CACHE: None})
        log.is_page_cache = False


async def store_mark(log: "Log") -> None:
    """Bring the stored recovery point to the log's end of this moment. The log's lock is held."""
    if log.damaged is not None or log.is_closed or not has_news(log):
        return
    had_rolled, epochs_had_changed = log.has_rolled, log.epochs_changed
    try:
        await _store_mark(log)
    except BaseException:
        # A stop may cancel this in the middle: what was not stored is still to be stored.
        log.has_rolled |= had_rolled
        log.epochs_changed |= epochs_had_changed
        raise


async def _store_mark(log: "Log") -> None:
    await _compute_crcs(log)
    await _pack_producers(log)
    write_index_entries(log)
    segments = log.segments
    producers = snapshot(log)
    mark = segments.active.mark(segments.end_offset, has_producers=bool(producers))
    epochs = stored.encode_epochs(log.epochs) if log.epochs_changed else None
    log.has_rolled = log.epochs_changed = False
    if not log.durability.is_settled and not _is_blank(log):
        await log.group_commit.flush(log)
    assert log.durability.durable_end >= mark.offset, "the sync did not cover what was written before it"
    infos = {base: info for base, info in log.pending_infos.items() if info.next_offset <= mark.offset}
    snapshots = {at: data for at, data in log.pending_snapshots.items() if at <= mark.offset}
    if producers:
        snapshots[mark.offset] = producers
    writes: Writes = {log.prefix + stored.MARK: stored.encode_mark(mark)}
    if log.intent is not None:
        writes[log.prefix + stored.INTENT] = None  # the change itself is done and synced
    if epochs is not None:
        writes[log.prefix + stored.EPOCHS] = epochs
    for base, info in infos.items():
        writes[stored.segment_key(log.prefix, base)] = stored.encode_segment(info)
    kept = _choose_snapshots(log, snapshots, mark, writes)
    await log.store.commit(writes)
    log.intent = None
    log.mark = mark
    log.snapshots = kept
    for base in infos:
        log.pending_infos.pop(base, None)
    for at in snapshots:
        log.pending_snapshots.pop(at, None)


def lower_high_watermark(log: "Log", end: int, writes: Writes) -> None:
    """The commit of a cut stores it too: a later start would else find the old one over records appended since."""
    log.high_watermark = Offset(min(log.high_watermark, end))
    writes[log.prefix + stored.HIGH_WATERMARK] = stored.encode_high_watermark(log.high_watermark)


def _choose_snapshots(log: "Log", fresh: dict[int, bytes], mark: RecoveryMark, writes: Writes) -> list[int]:
    """Add the snapshots to the write set and drop old ones: the newest few at rolls stay, and the mark's."""
    bases = [view.base_offset for view in log.segments.from_offset(log.segments.first_offset)]
    rolls = [base for base in bases if base <= mark.offset]
    keep = {*rolls[:1], *rolls[-SNAPSHOTS_KEPT:]}
    if mark.has_producers:
        keep.add(mark.offset)
    for at, data in fresh.items():
        if at in keep:
            writes[stored.producers_key(log.prefix, at)] = data
    for at in log.snapshots:
        if at not in keep:
            writes[stored.producers_key(log.prefix, at)] = None
    return sorted({*log.snapshots, *fresh} & keep)


async def _pack_producers(log: "Log") -> None:
    # What is appended meanwhile changes some again: they are made with the snapshot.
    for _ in range(len(log.producers) // PACKED_PER_SLICE):
        if not log.producers.pack(PACKED_PER_SLICE):
            return
        await asyncio.sleep(0)


async def _compute_crcs(log: "Log") -> None:
    """The CRC of a segment that was cut while it was active is computed when it is sealed."""
    for base, info in list(log.pending_infos.items()):
        if info.crc is not None:
            continue
        crc = await log.work.run(file_crc, log.disk, log.segments.file_path(base), info.size)
        log.pending_infos[base] = replace(info, crc=crc)
        sealed = log.segments.sealed
        for at, known in enumerate(sealed):
            if known.base_offset == base:
                sealed[at] = log.pending_infos[base]
