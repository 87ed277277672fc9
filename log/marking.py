"""Storing the recovery point: the sync first, then one commit of the mark with all that it vouches for.

    write waiting index entries -> take the mark -> sync -> commit {mark, epochs, sealed segments, producers}

The mark is taken before the sync and stored after it, so that nothing in the store speaks of bytes that are not on the
device. Appends go on meanwhile; they belong to the next mark.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from tidelog.log import checkpoint as stored
from tidelog.log.appending import snapshot, write_index_entries
from tidelog.log.checkpoint import Writes
from tidelog.log.scan import file_crc
from tidelog.log.segment import RecoveryMark

if TYPE_CHECKING:
    from tidelog.log.log import Log

SNAPSHOTS_KEPT = 4
"""Producer snapshots at so many rolls are kept, and the one at the log's beginning: a cut goes back to one of them and
replays from there."""


def has_news(log: "Log") -> bool:
    """Whether the stored state lags behind the log."""
    active = log.segments.active
    return (
        log.mark.offset != log.segments.end_offset
        or log.mark.base_offset != active.base_offset
        or bool(active.index.offsets or active.index.times or active.aborted)
        or not log.durability.is_settled
        or bool(log.pending_infos or log.pending_snapshots)
        or log.epochs_changed
    )


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
    write_index_entries(log)
    segments = log.segments
    producers = snapshot(log)
    mark = segments.active.mark(segments.end_offset, has_producers=bool(producers))
    epochs = stored.encode_epochs(log.epochs) if log.epochs_changed else None
    log.has_rolled = log.epochs_changed = False
    if not log.durability.is_settled:
        await log.group_commit.flush(log)
    assert log.durability.durable_end >= mark.offset, "the sync did not cover what was written before it"
    infos = {base: info for base, info in log.pending_infos.items() if info.next_offset <= mark.offset}
    snapshots = {at: data for at, data in log.pending_snapshots.items() if at <= mark.offset}
    if producers:
        snapshots[mark.offset] = producers
    writes: Writes = {log.prefix + stored.MARK: stored.encode_mark(mark)}
    if epochs is not None:
        writes[log.prefix + stored.EPOCHS] = epochs
    for base, info in infos.items():
        writes[stored.segment_key(log.prefix, base)] = stored.encode_segment(info)
    kept = _choose_snapshots(log, snapshots, mark, writes)
    await log.store.commit(writes)
    log.mark = mark
    log.snapshots = kept
    for base in infos:
        log.pending_infos.pop(base, None)
    for at in snapshots:
        log.pending_snapshots.pop(at, None)


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
