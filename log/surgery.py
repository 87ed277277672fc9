"""Changes to the files of an open log other than appending: cutting, dropping, swapping, rebuilding an index.

All run under the log's lock, one at a time. Each is safe against a crash at any point, by one of three orders:

    cut             lower the recovery point in the store (synced), then cut the files, then sync them
    drop            raise the start offset in the store, then rename the files away
    swap, reset     store what is intended, change all names, sync the directory, forget the intent

A full disk (`DiskFullError`) stops a change before it touches a file: all is as it was, and it may be tried again. The
one exception: an intent that cannot be forgotten, though all is done (`Log.intent`). One of a swap may stand there, a
crash finds nothing to do; one of a reset would take along what is written after it, so nothing is until it is gone.

Between the first change of a file and the last there is no await, so no reader sees half of it. Once begun, a change
is carried to its end even if whoever asked for it is cancelled (`to_the_end`): the store would otherwise speak of an
intent that a living log does not know of.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from tidelog.log import checkpoint as stored
from tidelog.log import index
from tidelog.log.checkpoint import Intent, Writes
from tidelog.log.cleaner import CleanedSegment
from tidelog.log.config import FlushMode
from tidelog.log.epochs import EpochHistory
from tidelog.log.files import run_async
from tidelog.log.marking import lower_high_watermark, store_mark
from tidelog.log.producers import ProducerState
from tidelog.log.reading import IndexFaultError, locate_steps
from tidelog.log.recovered import Damage
from tidelog.log.scan import LogScan, ScanRequest, build_indexes, empty_mark, replay, scan_log
from tidelog.log.segment import (
    CLEANED,
    DELETED,
    INDEX,
    LOG,
    SUFFIXES,
    SWAP,
    TIME_INDEX,
    TRANSACTION_INDEX,
    ActiveSegment,
    RecoveryMark,
    SegmentInfo,
    parse_name,
)
from tidelog.log.transactions import ENTRY_BYTES as ABORTED_ENTRY_BYTES
from tidelog.log.transactions import TransactionIndex
from tidelog.model.errors import (
    CorruptBatchError,
    CorruptStateError,
    DamagedLogError,
    DiskFullError,
    OffsetOutOfRangeError,
)
from tidelog.model.ids import Offset, Position
from tidelog.world.disk import Disk

if TYPE_CHECKING:
    from tidelog.log.log import Log


LOGGER = logging.getLogger(__name__)

T = TypeVar("T")

RESET, SWAP_KIND = "reset", "swap"


async def to_the_end(change: Coroutine[Any, Any, T]) -> T:
    """Carry out a change; cancelling the caller does not stop it."""
    task = asyncio.get_running_loop().create_task(change)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        raise


# Cutting the end


async def truncate(log: "Log", offset: int) -> None:
    async with log.lock:
        assert not log.is_closed, f"{log.path} is closed"
        await _forget_intent(log)
        if log.damaged is not None:
            offset = min(offset, log.damaged.good_end)
        elif offset >= log.segments.end_offset:
            return
        if offset < log.start_offset or (log.damaged is not None and offset == log.start_offset):
            await _reset(log, offset)
            return
        log.is_changing = True
        try:
            await _truncate(log, offset)
        finally:
            log.is_changing = False


async def _truncate(log: "Log", offset: int) -> None:
    while True:
        try:
            base, position, bound = await run_async(locate_steps(log.segments, log.config, offset))
            break
        except IndexFaultError as fault:
            await _rebuild(log, fault.base_offset)
        except CorruptBatchError:
            if log.damaged is None:
                raise
            # Rot in front of the good end hides where that is: the cut is where the log cannot be read on.
            base, position, bound = log.segments.find(offset).base_offset, None, offset
            break
    if bound < log.start_offset:
        # The batch that goes spans the start too: nothing readable is left.
        await _reset(log, log.start_offset)
        return
    scan, is_exact = await _scan_prefix(log, base, bound)
    if position is None:
        if scan.end_offset < log.start_offset:
            await _reset(log, log.start_offset)
            return
        position = Position(scan.segments[0].size if scan.segments else 0)
    active = scan.segments[0] if scan.segments else _empty_segment(log, base)
    end = scan.end_offset
    if active.size != position:
        await log.mark_damaged(Damage(Offset(end), scan.fault or "corrupt in the part that stays"))
        raise DamagedLogError(f"{log.path}: {scan.fault}", path=log.path, good_end=end)
    producers = ProducerState.from_snapshot(scan.producers) if scan.producers else ProducerState()
    if not is_exact:
        producers = await _replay_into(log, active, end)
    epochs = EpochHistory(list(log.epochs))
    if end < log.segments.end_offset:
        epochs.truncate_from_end(end)
    await _lower_mark(log, active, end, epochs, producers)
    _cut_files(log, active, end)
    log.epochs, log.producers = epochs, producers
    log.pending_infos = {at: info for at, info in log.pending_infos.items() if at < base}
    log.pending_snapshots = {at: data for at, data in log.pending_snapshots.items() if at <= end}
    log.damaged = None
    try:
        await store_mark(log)
    except DiskFullError as error:
        # The cut is done, and so the caller is told. The mark was lowered before; a checkpoint raises it again.
        LOGGER.warning("log=%s no checkpoint after a cut: %s", log.path, error)
        await log.group_commit.flush(log)


async def _scan_prefix(log: "Log", base: int, bound: int) -> tuple[LogScan, bool]:
    """Read the segment that will be the last, up to its new end; from the recovery point if that lies in front of it.

    The second value tells whether the producers in front of what was scanned were known.
    """
    mark, snapshot = empty_mark(base, created_ms=log.clock.now_ms()), None
    is_exact = base == log.segments.first_offset
    if log.damaged is None and log.mark.base_offset == base and log.mark.offset <= bound:
        mark, is_exact = log.mark, True
        if mark.has_producers:
            snapshot = _stored_snapshot(log, mark.offset)
            is_exact = snapshot is not None
    elif base in log.pending_snapshots:
        snapshot, is_exact = log.pending_snapshots[base], True
    elif base in log.snapshots:
        snapshot = _stored_snapshot(log, base)
        is_exact = snapshot is not None
    request = ScanRequest(
        directory=log.path,
        bases=(base,) if log.disk.exists(log.segments.file_path(base)) else (),
        mark=mark,
        epoch=-1,
        gaps=log.gaps,
        index_interval_bytes=log.config.index_interval_bytes,
        producers=snapshot or None,
        stop_offset=bound,
        now_ms=log.clock.now_ms(),
    )
    return await log.work.run(scan_log, log.disk, request), is_exact


async def _replay_into(log: "Log", active: ActiveSegment, end: int) -> ProducerState:
    """Producers at `end`, and the aborted transactions of the active segment, from the newest snapshot before it."""
    bases = [view.base_offset for view in log.segments.from_offset(log.segments.first_offset)]
    start, snapshot = _newest_snapshot(log, active.base_offset, bases[0])
    span = [base for at, base in enumerate(bases) if base < end and (at + 1 == len(bases) or bases[at + 1] > start)]
    found = await log.work.run(replay, log.disk, log.path, span, snapshot, start, end, log.clock.now_ms())
    active.aborted_bytes = 0
    active.aborted = bytearray(found.aborted.get(active.base_offset, b"")) or None
    return ProducerState.from_snapshot(found.producers) if found.producers else ProducerState()


def _newest_snapshot(log: "Log", offset: int, first: int) -> tuple[int, bytes | None]:
    """Where a replay up to past `offset` begins, and the producers there: at the log's `first` offset none."""
    for at in reversed(log.snapshots):
        if at <= offset and (snapshot := _stored_snapshot(log, at)) is not None:
            return at, snapshot or None
    return first, None


def _stored_snapshot(log: "Log", offset: int) -> bytes | None:
    """The producers stored for `offset`, nothing if there were none; None if they are missing or cannot be read."""
    try:
        data = log.store.get(stored.producers_key(log.prefix, offset))
        if data:
            ProducerState.from_snapshot(data)
    except CorruptStateError:
        return None
    return data


async def _lower_mark(
    log: "Log", active: ActiveSegment, end: int, epochs: EpochHistory, producers: ProducerState
) -> None:
    """The store must not speak of what is about to go. Durable when this returns."""
    writes: Writes = {log.prefix + stored.EPOCHS: stored.encode_epochs(epochs)}
    lower_high_watermark(log, end, writes)
    if end < log.mark.offset or log.damaged is not None:
        # What is fetched again is not clean, and a tombstone must not go before what it deletes. A cleaner's checkpoint
        # lies at or below the mark, so this is the only cut that can reach below one.
        writes[log.prefix + stored.CLEANER] = None
        mark = _mark_without_indexes(active, end, has_producers=len(producers) > 0)
        writes[log.prefix + stored.MARK] = stored.encode_mark(mark)
        writes[log.prefix + stored.DAMAGE] = None
        # Damage may lie below the stored start, which would then hide what is appended from here on.
        writes[log.prefix + stored.START] = stored.encode_number("start", log.start_offset)
        if log.durability.failed is None:
            # The scan ended at or below what was suspect: the log goes on without it. After a failure in this process
            # it takes no more appends, and the next recovery still has to know.
            writes[log.prefix + stored.SUSPECT] = None
        if log.store.keys(log.prefix + stored.INTENT):
            # It could not be read, or its end was not stored: the names as they are now count.
            await _sync_names(log)
            writes[log.prefix + stored.INTENT] = None
        for key in log.store.keys(log.prefix + stored.SEGMENT):
            if int.from_bytes(key[-8:], "big") >= active.base_offset:
                writes[key] = None
        for at in log.snapshots:
            if at > end:
                writes[stored.producers_key(log.prefix, at)] = None
        if mark.has_producers:
            writes[stored.producers_key(log.prefix, end)] = producers.to_snapshot()
        await log.store.commit(writes)
        log.mark = mark
        kept = {at for at in log.snapshots if at <= end} | ({end} if mark.has_producers else set())
        log.snapshots = sorted(kept)
    else:
        await log.store.commit(writes)
    log.epochs_changed = False


def _mark_without_indexes(active: ActiveSegment, end: int, *, has_producers: bool) -> RecoveryMark:
    """A mark that vouches for no index entry: the files still have others. Recovery drops them, reading rebuilds."""
    bare = ActiveSegment(active.base_offset, created_ms=active.created_ms, index_interval_bytes=0)
    return replace(
        bare.mark(end, has_producers=has_producers),
        position=Position(active.size),
        crc=active.crc,
        modified_ms=active.modified_ms,
        first_timestamp=active.first_timestamp,
        largest_timestamp=active.index.largest_timestamp,
        largest_offset=active.index.largest_offset,
        aborted_bytes=active.aborted_count * ABORTED_ENTRY_BYTES,
    )


def _cut_files(log: "Log", active: ActiveSegment, end: int) -> None:
    """The newest files go first: what is left after a crash has no hole."""
    segments, durability = log.segments, log.durability
    parsed = [found for name in log.disk.list(log.path) if (found := parse_name(name)) is not None and not found[2]]
    for base, suffix, _ in sorted(parsed, reverse=True):
        path = segments.file_path(base, suffix)
        if base > active.base_offset:
            durability.forget(path)
            log.disk.remove(path)
        elif base == active.base_offset:
            kept = {
                LOG: active.size,
                INDEX: active.index_bytes,
                TIME_INDEX: active.time_bytes,
                TRANSACTION_INDEX: active.aborted_bytes,
            }[suffix]
            file = durability.writable(path)
            if file.size > kept:
                file.truncate(kept)
    durability.touch_directory(log.path)
    segments.sealed = [info for info in segments.sealed if info.base_offset < active.base_offset]
    segments.active = active
    segments.end_offset = end
    if segments.rebuilt is not None:
        segments.rebuilt = {base for base in segments.rebuilt if base < active.base_offset}
    segments.changed()
    durability.cut(end)


def _empty_segment(log: "Log", base: int) -> ActiveSegment:
    return ActiveSegment(base, created_ms=log.clock.now_ms(), index_interval_bytes=log.config.index_interval_bytes)


# Dropping everything


async def reset_to(log: "Log", offset: int) -> None:
    async with log.lock:
        assert not log.is_closed, f"{log.path} is closed"
        await _reset(log, offset)


async def _reset(log: "Log", offset: int) -> None:
    log.is_changing = True
    try:
        mark = empty_mark(offset, created_ms=log.clock.now_ms())
        writes: Writes = {
            key: None for prefix in (stored.SEGMENT, stored.PRODUCERS) for key in log.store.keys(log.prefix + prefix)
        }
        writes[log.prefix + stored.INTENT] = stored.encode_intent(Intent(RESET))
        writes[log.prefix + stored.MARK] = stored.encode_mark(mark)
        writes[log.prefix + stored.START] = stored.encode_number("start", offset)
        writes[log.prefix + stored.EPOCHS] = stored.encode_epochs(EpochHistory())
        writes[log.prefix + stored.DAMAGE] = None
        writes[log.prefix + stored.SUSPECT] = None
        writes[log.prefix + stored.CLEANER] = None
        lower_high_watermark(log, offset, writes)
        await log.store.commit(writes)
        for name in log.disk.list(log.path):
            if parse_name(name) is not None:
                path = f"{log.path}/{name}"
                log.durability.forget(path)
                log.disk.remove(path)
        segments = log.segments
        segments.sealed = []
        segments.active = _empty_segment(log, offset)
        segments.end_offset = offset
        segments.rebuilt = None
        segments.changed()
        log.durability.reset(offset)
        log.start_offset = Offset(offset)
        log.mark = mark
        log.snapshots = []
        log.pending_infos, log.pending_snapshots, log.deleted = {}, {}, []
        log.epochs, log.producers = EpochHistory(), ProducerState()
        log.epochs_changed = False
        log.damaged = None
        await _sync_names(log)
        log.intent = RESET
        await _forget_intent(log)
    finally:
        log.is_changing = False


async def _forget_intent(log: "Log") -> None:
    """What was intended is done, and synced."""
    if log.intent is not None:
        await log.store.commit({log.prefix + stored.INTENT: None})
        log.intent = None


async def _sync_names(log: "Log") -> None:
    """The names in the log's directory are on the device. By group commit, where a failure is final."""
    log.durability.touch_directory(log.path)
    await log.group_commit.flush(log)


# Dropping the beginning


async def advance_start(log: "Log", offset: int) -> None:
    async with log.lock:
        if log.is_closed or offset <= log.start_offset:
            return
        if offset > log.segments.end_offset:
            raise OffsetOutOfRangeError(
                f"{log.path}: the start cannot advance to {offset}",
                offset=offset,
                start=log.start_offset,
                end=log.segments.end_offset,
            )
        dropped = [info for info in log.segments.sealed if info.next_offset <= offset]
        await _drop(log, dropped, offset)


async def delete_segments(log: "Log", bases: list[int]) -> None:
    async with log.lock:
        if log.is_closed:
            return
        # Some may have gone while this waited for its turn.
        wanted = [base for base in sorted(bases) if base >= log.segments.first_offset]
        dropped = log.segments.sealed[: len(wanted)]
        if not dropped:
            return
        assert [info.base_offset for info in dropped] == wanted, "only the oldest sealed segments can be dropped"
        await _drop(log, dropped, max(log.start_offset, dropped[-1].next_offset))


async def drop_oldest(log: "Log", count: int) -> None:
    """Drop the oldest sealed segments, so many of them. The log's lock is held."""
    dropped = log.segments.sealed[:count]
    await _drop(log, dropped, max(log.start_offset, dropped[-1].next_offset))


async def _drop(log: "Log", dropped: list[SegmentInfo], start: int) -> None:
    if start > log.mark.offset or (dropped and dropped[-1].base_offset >= log.mark.base_offset):
        # The stored recovery point must not lie in what goes.
        await store_mark(log)
    epochs = EpochHistory(list(log.epochs))
    epochs.truncate_from_start(start)
    writes: Writes = {
        log.prefix + stored.START: stored.encode_number("start", start),
        log.prefix + stored.EPOCHS: stored.encode_epochs(epochs),
    }
    for info in dropped:
        writes[stored.segment_key(log.prefix, info.base_offset)] = None
    await log.store.commit(writes)
    # Appends may have added epochs meanwhile; the same cut applies to them.
    log.epochs.truncate_from_start(start)
    log.start_offset = Offset(start)
    gone = {info.base_offset for info in dropped}
    log.segments.sealed = [info for info in log.segments.sealed if info.base_offset not in gone]
    for info in dropped:
        log.pending_infos.pop(info.base_offset, None)
        _rename_away(log, info.base_offset, SUFFIXES)
    if dropped:
        log.segments.forget_hints()


def _rename_away(log: "Log", base: int, suffixes: Sequence[str]) -> None:
    """Readers that have the file open go on; the name is free at once, the space after a while."""
    due_ms = log.clock.now_ms() + log.config.file_delete_delay_ms
    for suffix in suffixes:
        path = log.segments.file_path(base, suffix)
        log.durability.forget(path)
        if log.disk.exists(path):
            log.disk.rename(path, path + DELETED)
            log.deleted.append((due_ms, path + DELETED))


async def reap(log: "Log", now_ms: int) -> int:
    due = [(due_ms, path) for due_ms, path in log.deleted if due_ms <= now_ms]
    if not due or log.is_closed:
        return 0
    log.deleted = [(due_ms, path) for due_ms, path in log.deleted if due_ms > now_ms]
    try:
        await log.work.run(remove_files, log.disk, [path for _, path in due])
    except BaseException:
        # Some may be gone already; to remove them again is fine.
        log.deleted = due + log.deleted
        raise
    return len(due)


def remove_files(disk: Disk, paths: Sequence[str]) -> None:
    """In a helper process: to remove a large file takes a while."""
    for path in paths:
        disk.remove(path)


# Cleaning


async def replace_segments(log: "Log", cleaned: list[CleanedSegment], generation: int | None) -> bool:
    async with log.lock:
        if log.is_closed or log.damaged is not None:
            return False
        if generation is not None and generation != log.durability.generation:
            return False
        old = [int(base) for segment in cleaned for base in segment.replaces]
        known = {info.base_offset: info for info in log.segments.sealed}
        if any(base not in known for base in old):
            return False
        for segment in cleaned:
            assert segment.info.base_offset == segment.replaces[0], "a cleaned segment is named after its first"
            assert segment.info.next_offset == known[segment.replaces[-1]].next_offset, "a cleaned segment has a hole"
        # A crash would take these for the files of the change before.
        await _forget_intent(log)
        if any(base in log.pending_infos or base >= log.mark.base_offset for base in old):
            await store_mark(log)
        for segment in cleaned:
            for suffix in segment.suffixes:
                path = log.segments.file_path(segment.info.base_offset, suffix)
                log.disk.rename(path + CLEANED, path + SWAP)
        await _sync_names(log)
        await _store_swap(log, cleaned, old)
        _swap_files(log, cleaned, old)
        await _sync_names(log)
        log.intent = SWAP_KIND
        try:
            await _forget_intent(log)
        except DiskFullError as error:
            LOGGER.warning("log=%s its cleaning is done, which is stored later: %s", log.path, error)
            log.group_commit.touch(log)
        return True


async def _store_swap(log: "Log", cleaned: list[CleanedSegment], old: list[int]) -> None:
    """The decision: from here on the swap is finished, after a crash by recovery."""
    new = tuple((int(segment.info.base_offset), tuple(segment.suffixes)) for segment in cleaned)
    writes: Writes = {stored.segment_key(log.prefix, base): None for base in old}
    for segment in cleaned:
        writes[stored.segment_key(log.prefix, segment.info.base_offset)] = stored.encode_segment(segment.info)
    writes[log.prefix + stored.INTENT] = stored.encode_intent(Intent(SWAP_KIND, tuple(old), new))
    writes[log.prefix + stored.GAPS] = stored.encode_number("gaps", 1)
    await log.store.commit(writes)
    log.gaps = True


def _swap_files(log: "Log", cleaned: list[CleanedSegment], old: list[int]) -> None:
    for base in old:
        _rename_away(log, base, SUFFIXES)
    for segment in cleaned:
        for suffix in segment.suffixes:
            path = log.segments.file_path(segment.info.base_offset, suffix)
            log.disk.rename(path + SWAP, path)
    segments = log.segments
    kept = [info for info in segments.sealed if info.base_offset not in set(old)]
    segments.sealed = sorted([*kept, *(segment.info for segment in cleaned)], key=lambda info: info.base_offset)
    if segments.rebuilt is not None:
        segments.rebuilt.difference_update(old)
    segments.changed()


# Indexes


async def rebuild_indexes(log: "Log", fault: IndexFaultError) -> None:
    async with log.lock:
        if not log.is_closed:
            await _rebuild(log, fault.base_offset)


async def _rebuild(log: "Log", base: int) -> None:
    """Write the indexes of a segment anew, from its batches. A segment that is gone meanwhile needs none."""
    segments = log.segments
    while True:
        if base != segments.active.base_offset and all(info.base_offset != base for info in segments.sealed):
            return
        is_active = base == segments.active.base_offset
        info = segments.info(base)
        built = await log.work.run(
            build_indexes, log.disk, log.path, base, info.size, log.config.index_interval_bytes, not is_active
        )
        aborted = await _aborted_of(log, info) if info.aborted else b""
        if is_active == (base == segments.active.base_offset):
            break
    offsets, times = bytes(built.offsets or b""), bytes(built.times or b"")
    if is_active:
        _keep_newer_entries(segments.active, info, built, offsets, times, aborted)
    for suffix, data in ((INDEX, offsets), (TIME_INDEX, times), (TRANSACTION_INDEX, aborted)):
        path = segments.file_path(base, suffix)
        log.durability.forget(path)
        log.disk.remove(path)
        if data or suffix != TRANSACTION_INDEX:
            log.durability.writable(path, create=True).append(data)
    log.durability.touch_directory(log.path)
    if segments.rebuilt is None:
        segments.rebuilt = set()
    segments.rebuilt.add(base)
    segments.changed()
    if log.config.flush_mode is FlushMode.SYNC:
        log.group_commit.request(log)
    else:
        log.group_commit.touch(log)


def _keep_newer_entries(
    active: ActiveSegment, info: SegmentInfo, built: index.IndexBuilder, offsets: bytes, times: bytes, aborted: bytes
) -> None:
    """Appends went on while the index was built: entries past what was read wait on, the others are in the files."""
    base = active.base_offset
    newer = bytearray()
    for entry in index.decode_offset_entries(active.index.offsets or b"", base_offset=base):
        if entry.position >= info.size:
            newer += index.encode_offset_entry(entry, base_offset=base)
    newer_times = bytearray()
    for time in index.decode_time_entries(active.index.times or b"", base_offset=base):
        if time.timestamp > built.indexed_timestamp and time.last_offset >= info.next_offset:
            newer_times += index.encode_time_entry(time, base_offset=base)
    waiting = TransactionIndex.parse(bytes(active.aborted or b""))
    later = waiting.to_bytes()[-ABORTED_ENTRY_BYTES * sum(1 for e in waiting if e.last_offset >= info.next_offset) :]
    if all(entry.last_offset < info.next_offset for entry in waiting):
        later = b""
    active.index.offsets, active.index.times = newer or None, newer_times or None
    active.aborted = bytearray(later) or None
    active.index_bytes, active.time_bytes, active.aborted_bytes = len(offsets), len(times), len(aborted)
    if not newer_times:
        active.index.indexed_timestamp = built.indexed_timestamp


async def _aborted_of(log: "Log", info: SegmentInfo) -> bytes:
    """The transaction index of one segment, by a replay from the newest snapshot before it."""
    bases = [view.base_offset for view in log.segments.from_offset(log.segments.first_offset)]
    start, snapshot = _newest_snapshot(log, info.base_offset, bases[0])
    ends = [*bases[1:], log.segments.end_offset]
    span = [base for base, end in zip(bases, ends, strict=True) if base <= info.base_offset and end > start]
    now_ms = log.clock.now_ms()
    found = await log.work.run(replay, log.disk, log.path, span, snapshot, start, info.next_offset, now_ms)
    return found.aborted.get(info.base_offset, b"")
