"""Appends to a log, as leader or follower, and rolls its segments.

Everything here is synchronous and ends in the page cache. Order: check everything, roll if due, one write for all
batches, then the state (index entries, epochs, producers, end offset), then a request to group commit. A write that
fails has changed nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from crc32c import crc32c

from tidelog.log.admission import (
    PREFIX,
    PREFIX_BYTES,
    AdmittedBatch,
    CheckTransaction,
    RecordRules,
    admit,
)
from tidelog.log.batch import LENGTH_PREFIX_BYTES, BatchHeader, TimestampType, check_batch
from tidelog.log.batch_header import CRC_START
from tidelog.log.config import FlushMode
from tidelog.log.index_files import create_index_files, write_index_entries
from tidelog.log.kernel import COMPILED, CRC_JOIN_BYTES_MAX, crc_join
from tidelog.log.log_scan import BATCH_BYTES_MAX, apply_batch
from tidelog.log.log_state import LogState
from tidelog.log.segment import ActiveSegment
from tidelog.log.stored_state import RESET
from tidelog.model.append_condition import AppendCondition
from tidelog.model.errors import (
    DISK_FULL_ADVICE,
    DiskFullError,
    FencedLeaderEpochError,
    InvalidRecordError,
    RecordTooLargeError,
    StorageError,
)
from tidelog.model.ids import Offset
from tidelog.world.disk import Buffer

JOIN_BYTES_MIN = 16 << 10 if COMPILED else CRC_JOIN_BYTES_MAX + 1
"""From this size on, joining a batch's CRC to that of its file is cheaper than computing it again."""


@dataclass(slots=True)
class AppendInfo:
    """The offsets of an append. `append_time` is the log-append time, -1 with create time. A value: do not change it.

    For a `duplicate` these are the offsets of the original, which may be acknowledged once they are replicated. Of
    several batches some may be duplicates: `base_offset` is -1 unless all are contiguous, `append_time` is -1 unless
    all have the same. `last_offset` is the highest of all: when it is replicated, every batch is.
    """

    base_offset: Offset
    last_offset: Offset
    append_time: int = -1
    duplicate: bool = False


class LogAppender:
    """Writes batches to the active segment. Owns no state: it drives the owners in the order that the module states."""

    __slots__ = ("_state",)

    def __init__(self, state: LogState) -> None:
        self._state = state

    def check_writable(self) -> None:
        context = self._state.context
        assert not context.is_closed, f"{context.path} is closed"
        assert not context.is_changing, f"{context.path}: an append while the log is truncated"
        if self._state.damage.current is not None:
            raise self._state.damage.error()
        failure = self._state.durability.failure
        if failure is not None:
            raise StorageError(f"{context.path}: a sync has failed: {failure}", path=context.path)
        if self._state.checkpoint.intent == RESET:
            # A crash would reset the log again, with the records that are written now.
            raise DiskFullError(
                f"{context.path} was reset, but the end of the reset is not stored yet; {DISK_FULL_ADVICE}",
                path=context.path,
            )

    # As leader

    def append(
        self,
        data: Buffer,
        leader_epoch: int,
        is_coordinator: bool,
        inspected: RecordRules | None,
        inline_bytes_max: int | None,
        check_transaction: CheckTransaction | None,
        condition: AppendCondition | None,
    ) -> AppendInfo:
        """See `Log.append`."""
        self.check_writable()
        latest = self._state.epochs.history.latest
        if leader_epoch < latest:
            raise FencedLeaderEpochError(f"{self._state.context.path}: epoch {leader_epoch} is older than {latest}")
        now_ms = self._state.context.clock.now_ms()
        config = self._state.context.config
        admitted = admit(
            data,
            config=config,
            producers=self._state.producers,
            now_ms=now_ms,
            is_coordinator=is_coordinator,
            inspected=inspected,
            inline_bytes_max=inline_bytes_max,
            check_transaction=check_transaction,
        )
        base_offset: int = self._state.segments.end_offset
        time = now_ms if config.timestamp_type is TimestampType.LOG_APPEND else -1
        if condition is not None:
            if len(admitted) > 1:
                raise InvalidRecordError(f"an append with a condition has one batch, not {len(admitted)}")
            if admitted[0].duplicate is None:
                condition.check(end_offset=base_offset, claim=self._state.producers.claim)
        if len(admitted) == 1 and admitted[0].duplicate is None:
            self._write_admitted(admitted, leader_epoch, now_ms, is_coordinator)
            return AppendInfo(Offset(base_offset), Offset(self._state.segments.end_offset - 1), time)
        fresh = [batch for batch in admitted if batch.duplicate is None]
        if fresh:
            self._write_admitted(fresh, leader_epoch, now_ms, is_coordinator)
        return _append_info(admitted, base_offset, time)

    def _write_admitted(
        self, admitted: list[AdmittedBatch], leader_epoch: int, now_ms: int, is_coordinator: bool
    ) -> None:
        buffers: list[Buffer] = []
        base_offset: int = self._state.segments.end_offset
        offset = base_offset
        size = 0
        max_timestamp = -1
        segment_bytes = self._state.context.config.segment_bytes
        for batch in admitted:
            data, header = batch.data, batch.header
            if len(data) > segment_bytes and not is_coordinator:
                raise RecordTooLargeError(
                    f"a batch of {len(data)} bytes does not fit a segment of {segment_bytes} bytes (segment.bytes)"
                )
            buffers.append(PREFIX.pack(offset, len(data) - LENGTH_PREFIX_BYTES, leader_epoch))
            buffers.append(memoryview(data)[PREFIX_BYTES:])
            size += len(data)
            offset += header.last_offset_delta + 1
            if header.max_timestamp > max_timestamp:
                max_timestamp = header.max_timestamp
        active = self._write(buffers, size, offset - 1, max_timestamp, now_ms)
        if leader_epoch != self._state.epochs.history.latest:
            self._state.epochs.assign(leader_epoch, base_offset)
        offset = base_offset
        for number, batch in enumerate(admitted):
            header = batch.header
            last_offset = offset + header.last_offset_delta
            crc = active.crc
            if crc is not None:
                crc = _with_batch(crc, buffers[2 * number], batch.data, header)
            active.add(last_offset, len(batch.data), header.max_timestamp, crc=crc, modified_ms=now_ms)
            if header.producer_id >= 0:
                self._apply(replace(header, base_offset=offset, leader_epoch=leader_epoch), batch.data, now_ms)
            offset = last_offset + 1
        self._advance(offset, now_ms)

    # As follower

    def append_replicated(self, batches: Buffer) -> AppendInfo:
        """See `Log.append_replicated`."""
        self.check_writable()
        headers = self._check_replicated(batches)
        now_ms = self._state.context.clock.now_ms()
        end = self._state.segments.end_offset
        last_offset = headers[-1].last_offset
        max_timestamp = max(header.max_timestamp for header in headers)
        active = self._write([batches], len(batches), last_offset, max_timestamp, now_ms)
        if headers[0].leader_epoch < self._state.epochs.history.latest:
            self._state.epochs.truncate_from_end(end)  # epochs that this replica led without a record
        position = 0
        with memoryview(batches) as view:
            for header in headers:
                if header.leader_epoch > self._state.epochs.history.latest:
                    self._assign_epochs(header, end)
                end = header.next_offset
                batch = view[position : position + header.size]
                crc = active.crc
                if crc is not None:
                    crc = _with_batch(crc, b"", batch, header)
                active.add(header.last_offset, header.size, header.max_timestamp, crc=crc, modified_ms=now_ms)
                if header.has_producer:
                    self._apply(header, batch, now_ms)
                position += header.size
        self._advance(last_offset + 1, now_ms)
        return AppendInfo(Offset(headers[0].base_offset), last_offset)

    def _assign_epochs(self, header: BatchHeader, end: int) -> None:
        """Add the epochs that begin between `end`, where the batch before ends, and this batch.

        Compaction may have removed all records of some epochs and the first records of others, so the leader's history
        decides where they start (`lineage`).
        """
        epochs = self._state.epochs
        for epoch, start in self._state.lineage.current.entries:
            if epochs.history.latest < epoch <= header.leader_epoch and end <= start <= header.base_offset:
                epochs.assign(epoch, start)
        if header.leader_epoch > epochs.history.latest:
            epochs.assign(header.leader_epoch, header.base_offset)

    def _check_replicated(self, batches: Buffer) -> list[BatchHeader]:
        headers: list[BatchHeader] = []
        path = self._state.context.path
        position = 0
        expected: int = self._state.segments.end_offset
        # Epochs at the end without records do not count: this replica led them without writing, and the next leader may
        # go on with records of an older epoch.
        epoch: int = self._state.epochs.history.epoch_for(expected - 1)
        while position < len(batches):
            header = check_batch(batches, position, size_max=BATCH_BYTES_MAX)
            if header.base_offset < expected or (header.base_offset > expected and not self._state.lineage.has_gaps):
                raise InvalidRecordError(f"{path}: a batch at offset {header.base_offset}, expected {expected}")
            if header.leader_epoch < max(epoch, 0):
                raise InvalidRecordError(f"{path}: a batch of epoch {header.leader_epoch} after epoch {epoch}")
            headers.append(header)
            epoch = header.leader_epoch
            expected = header.next_offset
            position += header.size
        if not headers:
            raise InvalidRecordError("an append without a batch")
        return headers

    # Writing

    def _write(
        self, buffers: Sequence[Buffer], size: int, last_offset: int, max_timestamp: int, now_ms: int
    ) -> ActiveSegment:
        """One write for all buffers, in a new segment if a roll is due. If it raises, nothing has changed."""
        context, segments, durability = self._state.context, self._state.segments, self._state.durability
        config, active = context.config, segments.active
        if active.size and active.must_roll(
            config,
            size=size,
            last_offset=last_offset,
            max_timestamp=max_timestamp,
            now_ms=now_ms,
            log_number=self._number if config.segment_jitter_ms else 0,
        ):
            self._roll()
            active = segments.active
        file = durability.writable(segments.active_path(), create=active.size == 0)
        if active.size == 0:
            durability.touch_directory(context.path)
            active.begin(now_ms)
        position = file.append(*buffers)
        assert position == active.size, f"{file.path} has {position} bytes, not {active.size}"
        return active

    def _apply(self, header: BatchHeader, batch: Buffer, now_ms: int) -> None:
        aborted = apply_batch(self._state.producers, header, batch, now_ms)
        if aborted is not None:
            self._state.segments.active.add_aborted(aborted)

    def _advance(self, end_offset: int, now_ms: int) -> None:
        segments, durability, config = self._state.segments, self._state.durability, self._state.context.config
        records = end_offset - segments.end_offset
        segments.advance(end_offset)
        if config.flush_mode is FlushMode.SYNC:
            durability.request_sync()
            return
        durability.touch()
        durability.note_written(records, now_ms)
        if durability.is_flush_due(config, now_ms):
            durability.request_sync()

    # Rolling

    @property
    def _number(self) -> int:
        """Differs between logs and is the same after a restart: for the jitter of rolls."""
        log_id = self._state.context.log_id
        return log_id.topic_id.int + log_id.partition

    def roll(self) -> None:
        """Seal the active segment, unless it is empty."""
        if self._state.segments.active.size:
            self.check_writable()
            self._roll()

    def roll_if_due(self) -> bool:
        """Roll a segment that is old enough although nothing is appended, so that it can expire."""
        active, now_ms = self._state.segments.active, self._state.context.clock.now_ms()
        newest = now_ms if active.first_timestamp >= 0 else -1
        if not active.is_due(self._state.context.config, max_timestamp=newest, now_ms=now_ms, log_number=self._number):
            return False
        self.roll()
        return True

    def _roll(self) -> None:
        context, segments, durability = self._state.context, self._state.segments, self._state.durability
        segments.active.index.add_time()
        write_index_entries(context.path, segments, durability)
        create_index_files(context.path, segments, durability)
        info = segments.seal(
            created_ms=context.clock.now_ms(), index_interval_bytes=context.config.index_interval_bytes
        )
        self._state.checkpoint.segment_sealed(info)
        # With page-cache too: nothing more is written to a sealed segment, so its files should not stay open.
        durability.request_sync()


def _append_info(admitted: list[AdmittedBatch], fresh_offset: int, time: int) -> AppendInfo:
    """The offsets of several batches or of a duplicate; new batches were written from `fresh_offset` on."""
    spans: list[tuple[int, int, int]] = []
    for batch in admitted:
        if batch.duplicate is None:
            last_offset = fresh_offset + batch.header.last_offset_delta
            spans.append((fresh_offset, last_offset, time))
            fresh_offset = last_offset + 1
        else:
            stamped = batch.duplicate.timestamp if time >= 0 else -1
            spans.append((batch.duplicate.base_offset, batch.duplicate.last_offset, stamped))
    is_duplicate = all(batch.duplicate is not None for batch in admitted)
    highest = Offset(max(last for _, last, _ in spans))
    is_contiguous = all(before[1] + 1 == after[0] for before, after in pairwise(spans))
    times = {stamped for _, _, stamped in spans}
    return AppendInfo(
        Offset(spans[0][0] if is_contiguous else -1), highest, times.pop() if len(times) == 1 else -1, is_duplicate
    )


def _with_batch(crc: int, prefix: Buffer, batch: Buffer, header: BatchHeader) -> int:
    """The CRC of a file after this batch is appended; `prefix` replaces the first bytes of `batch`.

    The batch's own CRC has just been checked or computed. It covers all but the head, so a large batch is not read
    again.
    """
    crc = crc32c(prefix, crc)
    with memoryview(batch) as view:
        if not JOIN_BYTES_MIN <= header.size <= CRC_JOIN_BYTES_MAX:
            return int(crc32c(view[len(prefix) :], crc))
        crc = crc32c(view[len(prefix) : CRC_START], crc)
    return crc_join(crc, header.crc, header.size - CRC_START)
