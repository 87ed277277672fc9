"""Writing to a log: as leader, as follower, and the change to a new segment.

Everything here is synchronous and ends in the page cache. The order is: check all, roll if it is time, one write for
all batches, then the state (index entries, epochs, producers, the end offset), then a request to group commit. A write
that fails has changed nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from crc32c import crc32c

from tidelog.log.admission import PREFIX, PREFIX_BYTES, Admitted, Look, admit
from tidelog.log.batch import LENGTH_PREFIX_BYTES, BatchHeader, TimestampType, check_batch
from tidelog.log.batch_header import CRC_START
from tidelog.log.config import FlushMode
from tidelog.log.kernel import COMPILED, CRC_JOIN_BYTES_MAX, crc_join
from tidelog.log.scan import BATCH_BYTES_MAX, apply_batch
from tidelog.log.segment import INDEX, TIME_INDEX, TRANSACTION_INDEX, ActiveSegment
from tidelog.model.errors import FencedLeaderEpochError, InvalidRecordError, RecordTooLargeError
from tidelog.model.ids import Offset
from tidelog.world.disk import Buffer

if TYPE_CHECKING:
    from tidelog.log.log import Log

JOIN_BYTES_MIN = 16 << 10 if COMPILED else CRC_JOIN_BYTES_MAX + 1
"""From this size on it is cheaper to join a batch's CRC to that of its file than to compute it once more."""


@dataclass(slots=True)
class Appended:
    """Where an append lies. `append_time` is the log-append time, -1 with create time. A value: nobody changes it.

    For a `duplicate` these are the offsets of the original, which may be acknowledged once they are replicated. Of
    several batches some may have been stored before and others not: `base_offset` is -1 unless all lie one behind
    another, `append_time` unless it is that of all. `last_offset` is the highest of all: when that is replicated, each
    of them is.
    """

    base_offset: Offset
    last_offset: Offset
    append_time: int = -1
    duplicate: bool = False


def append(
    log: "Log",
    data: Buffer,
    leader_epoch: int,
    is_coordinator: bool,
    looked: Look | None,
    inline_bytes_max: int | None,
) -> Appended:
    log.check_writable()
    if leader_epoch < log.epochs.latest:
        raise FencedLeaderEpochError(f"{log.path}: epoch {leader_epoch}, the log knows {log.epochs.latest}")
    now_ms = log.clock.now_ms()
    config = log.config
    admitted = admit(
        data,
        config=config,
        producers=log.producers,
        now_ms=now_ms,
        is_coordinator=is_coordinator,
        looked=looked,
        inline_bytes_max=inline_bytes_max,
    )
    base_offset: int = log.segments.end_offset
    time = now_ms if config.timestamp_type is TimestampType.LOG_APPEND else -1
    if len(admitted) == 1 and admitted[0].duplicate is None:
        _write_admitted(log, admitted, leader_epoch, now_ms)
        return Appended(Offset(base_offset), Offset(log.segments.end_offset - 1), time)
    fresh = [one for one in admitted if one.duplicate is None]
    if fresh:
        _write_admitted(log, fresh, leader_epoch, now_ms)
    return _where(admitted, base_offset, time)


def _where(admitted: list[Admitted], fresh_offset: int, time: int) -> Appended:
    """Of several batches, or of a repeat; what is new was written from `fresh_offset` on."""
    spans: list[tuple[int, int, int]] = []
    for one in admitted:
        if one.duplicate is None:
            last_offset = fresh_offset + one.header.last_offset_delta
            spans.append((fresh_offset, last_offset, time))
            fresh_offset = last_offset + 1
        else:
            stamped = one.duplicate.timestamp if time >= 0 else -1
            spans.append((one.duplicate.base_offset, one.duplicate.last_offset, stamped))
    is_duplicate = all(one.duplicate is not None for one in admitted)
    highest = Offset(max(last for _, last, _ in spans))
    is_whole = all(before[1] + 1 == after[0] for before, after in pairwise(spans))
    times = {stamped for _, _, stamped in spans}
    return Appended(
        Offset(spans[0][0] if is_whole else -1), highest, times.pop() if len(times) == 1 else -1, is_duplicate
    )


def _write_admitted(log: "Log", admitted: list[Admitted], leader_epoch: int, now_ms: int) -> None:
    buffers: list[Buffer] = []
    base_offset: int = log.segments.end_offset
    offset = base_offset
    size = 0
    max_timestamp = -1
    for one in admitted:
        data, header = one.data, one.header
        if len(data) > log.config.segment_bytes:
            limit = log.config.segment_bytes
            raise RecordTooLargeError(f"a batch of {len(data)} bytes does not fit a segment of {limit}")
        buffers.append(PREFIX.pack(offset, len(data) - LENGTH_PREFIX_BYTES, leader_epoch))
        buffers.append(memoryview(data)[PREFIX_BYTES:])
        size += len(data)
        offset += header.last_offset_delta + 1
        if header.max_timestamp > max_timestamp:
            max_timestamp = header.max_timestamp
    active = _write(log, buffers, size, offset - 1, max_timestamp, now_ms)
    if leader_epoch != log.epochs.latest:
        log.epochs.assign(leader_epoch, base_offset)
        log.epochs_changed = True
    at = base_offset
    for number, one in enumerate(admitted):
        header = one.header
        last_offset = at + header.last_offset_delta
        if active.crc is not None:
            active.crc = _with_batch(active.crc, buffers[2 * number], one.data, header)
        active.add(last_offset, len(one.data), header.max_timestamp)
        if header.producer_id >= 0:
            _apply(log, replace(header, base_offset=at, leader_epoch=leader_epoch), one.data, now_ms)
        at = last_offset + 1
    _written(log, at, now_ms)


def append_replicated(log: "Log", batches: Buffer) -> Appended:
    log.check_writable()
    headers = _check_replicated(log, batches)
    now_ms = log.clock.now_ms()
    end = log.segments.end_offset
    last_offset = headers[-1].last_offset
    max_timestamp = max(header.max_timestamp for header in headers)
    active = _write(log, [batches], len(batches), last_offset, max_timestamp, now_ms)
    if headers[0].leader_epoch < log.epochs.latest:
        log.epochs.truncate_from_end(end)  # epochs that were led in vain
        log.epochs_changed = True
    position = 0
    with memoryview(batches) as view:
        for header in headers:
            if header.leader_epoch > log.epochs.latest:
                _assign_epochs(log, header, end)
            end = header.next_offset
            batch = view[position : position + header.size]
            if active.crc is not None:
                active.crc = _with_batch(active.crc, b"", batch, header)
            active.add(header.last_offset, header.size, header.max_timestamp)
            if header.has_producer:
                _apply(log, header, batch, now_ms)
            position += header.size
    _written(log, last_offset + 1, now_ms)
    return Appended(Offset(headers[0].base_offset), last_offset)


def _assign_epochs(log: "Log", header: BatchHeader, end: int) -> None:
    """The epochs that begin between `end`, where the batch before ends, and this batch: compaction may have removed all
    records of some and the first records of others, so the leader's history counts (`lineage`)."""
    for epoch, start in log.lineage.entries:
        if log.epochs.latest < epoch <= header.leader_epoch and end <= start <= header.base_offset:
            log.epochs.assign(epoch, start)
    if header.leader_epoch > log.epochs.latest:
        log.epochs.assign(header.leader_epoch, header.base_offset)
    log.epochs_changed = True


def _check_replicated(log: "Log", batches: Buffer) -> list[BatchHeader]:
    headers: list[BatchHeader] = []
    position = 0
    expected: int = log.segments.end_offset
    # Epochs at the end without records do not count: this replica led them in vain, and who leads now may go on with
    # records of an older one.
    epoch: int = log.epochs.epoch_for(expected - 1)
    while position < len(batches):
        header = check_batch(batches, position, size_max=BATCH_BYTES_MAX)
        if header.base_offset < expected or (header.base_offset > expected and not log.gaps):
            raise InvalidRecordError(f"{log.path}: a batch at offset {header.base_offset}, expected {expected}")
        if header.leader_epoch < max(epoch, 0):
            raise InvalidRecordError(f"{log.path}: a batch of epoch {header.leader_epoch} after epoch {epoch}")
        headers.append(header)
        epoch = header.leader_epoch
        expected = header.next_offset
        position += header.size
    if not headers:
        raise InvalidRecordError("an append without a batch")
    return headers


def _write(
    log: "Log", buffers: Sequence[Buffer], size: int, last_offset: int, max_timestamp: int, now_ms: int
) -> ActiveSegment:
    """One write for all buffers, in a new segment if it is time for one. Nothing of it has happened if it raises."""
    segments, durability = log.segments, log.durability
    active = segments.active
    if active.size and active.must_roll(
        log.config,
        size=size,
        last_offset=last_offset,
        max_timestamp=max_timestamp,
        now_ms=now_ms,
        log_number=log.number if log.config.segment_jitter_ms else 0,
    ):
        roll(log)
        active = segments.active
    file = durability.writable(segments.active_path(), create=active.size == 0)
    if active.size == 0:
        durability.touch_directory(log.path)
        active.created_ms = now_ms
    position = file.append(*buffers)
    assert position == active.size, f"{file.path} has {position} bytes, not {active.size}"
    active.modified_ms = now_ms
    return active


def _with_batch(crc: int, prefix: Buffer, batch: Buffer, header: BatchHeader) -> int:
    """The CRC of a file that has this batch behind it; `prefix` stands in for the first bytes of `batch`.

    The batch's own CRC has just been checked or made. It covers all but the head, so a large batch is not read again.
    """
    crc = crc32c(prefix, crc)
    with memoryview(batch) as view:
        if not JOIN_BYTES_MIN <= header.size <= CRC_JOIN_BYTES_MAX:
            return int(crc32c(view[len(prefix) :], crc))
        crc = crc32c(view[len(prefix) : CRC_START], crc)
    return crc_join(crc, header.crc, header.size - CRC_START)


def _apply(log: "Log", header: BatchHeader, batch: Buffer, now_ms: int) -> None:
    aborted = apply_batch(log.producers, header, batch, now_ms)
    if aborted is not None:
        log.segments.active.add_aborted(aborted)


def _written(log: "Log", end_offset: int, now_ms: int) -> None:
    segments = log.segments
    count = end_offset - segments.end_offset
    segments.end_offset = end_offset
    if log.config.flush_mode is FlushMode.SYNC:
        log.group_commit.request(log)
        return
    log.group_commit.touch(log)
    durability = log.durability
    durability.records_dirty += count
    if durability.oldest_dirty_ms is None:
        durability.oldest_dirty_ms = now_ms
    if flush_is_due(log, now_ms):
        log.group_commit.request(log)


def flush_is_due(log: "Log", now_ms: int) -> bool:
    """With page-cache: whether the topic's flush settings ask for a sync now."""
    config, durability = log.config, log.durability
    if config.flush_messages is not None and durability.records_dirty >= config.flush_messages:
        return True
    if config.flush_ms is None or durability.oldest_dirty_ms is None:
        return False
    return now_ms - durability.oldest_dirty_ms >= config.flush_ms


def roll(log: "Log") -> None:
    """Seal the active segment, which is not empty, and begin a new one at the log's end."""
    segments = log.segments
    active = segments.active
    active.index.add_time()
    write_index_entries(log)
    _make_index_files(log)
    info = active.info(segments.end_offset)
    segments.sealed.append(info)
    log.pending_infos[info.base_offset] = info
    log.pending_snapshots[info.next_offset] = snapshot(log)
    segments.active = ActiveSegment(
        info.next_offset, created_ms=log.clock.now_ms(), index_interval_bytes=log.config.index_interval_bytes
    )
    log.has_rolled = True
    # With page-cache too: a sealed segment is done with, and its files shall not stay open.
    log.group_commit.request(log)


def write_index_entries(log: "Log") -> None:
    """Take the index entries that wait to their files."""
    active = log.segments.active
    active.index_bytes, active.index.offsets = _write_entries(log, INDEX, active.index_bytes, active.index.offsets)
    active.time_bytes, active.index.times = _write_entries(log, TIME_INDEX, active.time_bytes, active.index.times)
    active.aborted_bytes, active.aborted = _write_entries(log, TRANSACTION_INDEX, active.aborted_bytes, active.aborted)


def _write_entries(log: "Log", suffix: str, written: int, entries: bytearray | None) -> tuple[int, bytearray | None]:
    if not entries:
        return written, None
    file = log.durability.writable(log.segments.file_path(log.segments.active.base_offset, suffix), create=True)
    if written == 0:
        log.durability.touch_directory(log.path)
        if file.size:
            file.truncate(0)
    file.append(entries)
    return written + len(entries), None


def _make_index_files(log: "Log") -> None:
    """A sealed segment has its index files, even without entries: a missing one is a lost one."""
    active = log.segments.active
    for suffix, written in ((INDEX, active.index_bytes), (TIME_INDEX, active.time_bytes)):
        if written == 0:
            log.durability.writable(log.segments.file_path(active.base_offset, suffix), create=True)
            log.durability.touch_directory(log.path)


def snapshot(log: "Log") -> bytes:
    """The producers as they are now; nothing if there are none."""
    return log.producers.to_snapshot() if len(log.producers) else b""
