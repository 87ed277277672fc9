"""The log of one partition: append, read, truncate, make durable. `Log` composes the owners of its state.

    LogContext           place on disk, settings, lock         Segments            files, active segment, end offset
    Durability           durable end, waiters                  LogOffsets          start offset, high watermark
    LeaderEpochs         epoch history                         ProducerState       sequences, transactions
    DamageState          suspect and damaged ranges            LineageState        leader's history, removed deletes
    RecoveryCheckpoint   stored recovery point                 SegmentChanges      dropped files; drops and swaps
    LogAppender, LogReader, Truncation, IndexRebuilder         drive the owners, have no state

Duties of the caller, in place of locks:

1. One owner for each log. Appends are synchronous and come from the owner only; it starts no append while a `truncate`
   or `reset_to` of its own is under way.
2. It calls `checkpoint` at least every second while there is traffic, and `remove_deleted` from time to time.
3. It passes the bounds that replication sets, and never reads, deletes or compacts at or past them.
4. After `fail_sync` the log takes no more appends; the owner closes the directory.

Invariants (`validate`): start_offset <= end_offset; mark.offset <= durable_end <= end_offset, unless damaged; no epoch
and no producer's batch is past the end; the high watermark is not past the end once the log was truncated (before that
it is the stored one, of a log that may have lost its end); the store never describes bytes that are not on the device
(see `stored_state`).
"""

import asyncio
import logging

from tidelog.log import stored_state as stored
from tidelog.log.admission import CheckTransaction, RecordRules
from tidelog.log.cleaner import CleanedSegment
from tidelog.log.config import FlushMode, LogConfig
from tidelog.log.damage import Damage, DamageState
from tidelog.log.durability import Durability
from tidelog.log.epochs import EpochHistory, LeaderEpochs
from tidelog.log.file_pool import FilePool
from tidelog.log.group_commit import GroupCommit, SyncTicket
from tidelog.log.index_check import IndexCheck
from tidelog.log.index_rebuilder import IndexRebuilder
from tidelog.log.lineage import Lineage, LineageState
from tidelog.log.log_appender import AppendInfo, LogAppender
from tidelog.log.log_context import LogContext, run_to_completion
from tidelog.log.log_offsets import LogOffsets
from tidelog.log.log_reader import LogReader
from tidelog.log.log_scan import ScrubResult
from tidelog.log.log_state import LogState
from tidelog.log.producers import ProducerState
from tidelog.log.read_plans import Slice, TimestampedOffset
from tidelog.log.recovery import Recovery
from tidelog.log.recovery_checkpoint import RecoveryCheckpoint
from tidelog.log.recovery_result import RecoveryReport, RecoveryResult
from tidelog.log.retention import ExpiredSegment
from tidelog.log.segment import RecoveryMark, SegmentInfo
from tidelog.log.segment_changes import SegmentChanges
from tidelog.log.segment_restore import SegmentRestore
from tidelog.log.segments import Segments
from tidelog.log.transactions import AbortedTransaction
from tidelog.log.truncation import Truncation
from tidelog.model.append_condition import AppendCondition
from tidelog.model.errors import FencedLeaderEpochError, StorageError
from tidelog.model.ids import Epoch, Offset, PartitionId
from tidelog.world.clock import Clock
from tidelog.world.disk import Buffer, Disk
from tidelog.world.store import StateStore
from tidelog.world.work import Work

__all__ = ["AppendInfo", "Damage", "Log", "RecoveryReport", "SegmentInfo", "Slice", "TimestampedOffset"]

LOGGER = logging.getLogger(__name__)


class Log:
    """See the module. `open` creates it; `close` (clean), `delete` or the process ends it.

    All attributes are references that never change. Their owners have the methods that change state.
    """

    __slots__ = (
        "_appender",
        "_changes",
        "_checkpoint",
        "_epochs",
        "_index_check",
        "_lineage",
        "_offsets",
        "_reader",
        "_rebuilder",
        "_restore",
        "_truncation",
        "clock",
        "context",
        "damage_state",
        "disk",
        "durability",
        "group_commit",
        "lock",
        "log_id",
        "path",
        "prefix",
        "producers",
        "report",
        "segments",
        "store",
        "work",
    )

    def __init__(self, context: LogContext, group_commit: GroupCommit, recovered: RecoveryResult) -> None:
        self.context = context
        self.clock, self.disk, self.store, self.work = context.clock, context.disk, context.store, context.work
        self.path, self.log_id, self.prefix, self.lock = context.path, context.log_id, context.prefix, context.lock
        self.group_commit = group_commit
        self.report: RecoveryReport = recovered.report
        self.segments = segments = Segments(
            context.files, context.path, recovered.sealed, recovered.active, recovered.end_offset
        )
        self.durability = durability = Durability(context.files, group_commit, self, recovered.end_offset)
        self._offsets = offsets = LogOffsets(
            start_offset=recovered.start_offset, high_watermark=recovered.high_watermark
        )
        self._epochs = epochs = LeaderEpochs(recovered.epochs)
        self.producers: ProducerState = recovered.producers
        self.damage_state = damage = DamageState(context, segments, durability, recovered.damage)
        self._checkpoint = checkpoint = RecoveryCheckpoint(
            *(context, segments, durability, epochs, self.producers, damage, recovered.mark, recovered.snapshots),
            is_page_cache=recovered.report.was_page_cache or context.config.flush_mode is FlushMode.PAGE_CACHE,
        )
        self._lineage = lineage = LineageState(
            context, segments, offsets, epochs, damage, checkpoint, recovered.lineage, recovered.gaps
        )
        state = LogState(context, segments, durability, offsets, epochs, self.producers, damage, checkpoint, lineage)
        self._rebuilder = rebuilder = IndexRebuilder(state)
        self._index_check = IndexCheck(state, rebuilder)
        self._restore = SegmentRestore(state)
        self._appender = LogAppender(state)
        self._reader = LogReader(state, rebuilder)
        self._changes = SegmentChanges(state, self._appender)
        self._truncation = Truncation(state, rebuilder, self._changes)
        if not recovered.is_named:
            durability.touch_directory(context.path)
            durability.touch_directory(context.path.rpartition("/")[0])

    @classmethod
    async def open(
        cls,
        *,
        disk: Disk,
        store: StateStore,
        work: Work,
        group_commit: GroupCommit,
        clock: Clock,
        files: FilePool,
        path: str,
        log_id: PartitionId,
        config: LogConfig,
        verify: bool = False,
    ) -> "Log":
        """Open the log in directory `path`, or create it. See `recovery` for its cost.

        `verify` reads and checks everything, also below the recovery point.
        """
        context = LogContext(
            disk=disk, store=store, work=work, clock=clock, files=files, path=path, log_id=log_id, config=config
        )
        recovered = await Recovery(context, verify=verify).run()
        log = cls(context, group_commit, recovered)
        damage, report = recovered.damage, recovered.report
        if damage is not None:
            LOGGER.error("log=%s damaged good_end=%d reason=%s", path, damage.good_end, damage.reason)
        elif report.bytes_truncated:
            LOGGER.warning(
                "log=%s truncated end=%d bytes=%d reason=%s",
                *(path, recovered.end_offset, report.bytes_truncated, report.fault),
            )
        return log

    # State

    @property
    def config(self) -> LogConfig:
        return self.context.config

    @property
    def is_closed(self) -> bool:
        return self.context.is_closed

    @property
    def is_changing(self) -> bool:
        """Whether a truncation is under way."""
        return self.context.is_changing

    @property
    def start_offset(self) -> Offset:
        return self._offsets.start_offset

    @property
    def end_offset(self) -> Offset:
        """The next offset to be written."""
        return Offset(self.segments.end_offset)

    @property
    def durable_end(self) -> Offset:
        """Everything below is on the device."""
        return Offset(self.durability.durable_end)

    @property
    def recovery_point(self) -> Offset:
        """Everything below is on the device and known to be so after a crash."""
        return self._checkpoint.mark.offset

    @property
    def mark(self) -> RecoveryMark:
        """The stored recovery mark."""
        return self._checkpoint.mark

    @property
    def snapshots(self) -> list[int]:
        """Offsets for which a producer snapshot is stored."""
        return self._checkpoint.snapshots

    @property
    def intent(self) -> str | None:
        """The kind of the stored intent, a change of several files in progress; or None. See `stored_state.Intent`."""
        return self._checkpoint.intent

    @property
    def is_page_cache(self) -> bool:
        """Whether the store says that acknowledged records may be on no device."""
        return self._checkpoint.is_page_cache

    @property
    def damaged(self) -> Damage | None:
        return self.damage_state.current

    @property
    def high_watermark(self) -> Offset:
        """The high watermark that replication set last, or the one that was stored before the start."""
        return self._offsets.high_watermark

    def set_high_watermark(self, offset: Offset) -> None:
        self._offsets.set_high_watermark(offset)

    @property
    def size(self) -> int:
        """Bytes in the segment files."""
        return self.segments.size

    @property
    def active_bytes(self) -> int:
        return self.segments.active.size

    def sealed_segments(self) -> list[SegmentInfo]:
        """Oldest first, without the active segment."""
        return list(self.segments.sealed)

    def last_stable_offset(self, high_watermark: Offset) -> Offset:
        """Readers of committed data read below this. Not below the log start, although records of an open transaction
        may be deleted: a reader that begins at the end would be out of range."""
        stable = self.producers.last_stable_offset(high_watermark)
        return min(high_watermark, max(stable, self.start_offset))

    # Leader epochs and lineage

    @property
    def epochs(self) -> EpochHistory:
        return self._epochs.history

    def end_offset_for_epoch(self, epoch: int) -> tuple[Epoch, Offset]:
        """See `EpochHistory.end_offset_for`."""
        return self._epochs.history.end_offset_for(epoch, log_end=self.segments.end_offset)

    def assign_epoch(self, epoch: int) -> None:
        """A leader epoch begins at the log end, before any record of it."""
        latest = self._epochs.history.latest
        if epoch < latest:
            raise FencedLeaderEpochError(f"{self.path}: epoch {epoch} is older than {latest}")
        if self._epochs.assign(epoch, self.segments.end_offset):
            self.durability.touch()

    def forget_empty_epochs(self) -> None:
        """As follower: remove the epochs at the log end that have no record.

        No replica has a record of them, and the next leader may go on with records of older epochs.
        """
        if self._epochs.truncate_from_end(self.segments.end_offset):
            self.durability.touch()

    @property
    def lineage(self) -> Lineage:
        return self._lineage.current

    @property
    def gaps(self) -> bool:
        """Whether offsets may be missing between batches."""
        return self._lineage.has_gaps

    async def allow_gaps(self) -> None:
        """Let offsets be missing between batches from now on: the log is compacted, here or on its leader."""
        await self._lineage.allow_gaps()

    async def take_over_lineage(self, leader: Lineage) -> None:
        """See `LineageState.take_over`."""
        await self._lineage.take_over(leader)

    async def forget_leader(self) -> None:
        """See `LineageState.forget_leader`."""
        await self._lineage.forget_leader()

    async def raise_deletes_end(self, offset: Offset) -> None:
        """See `LineageState.raise_deletes_end`."""
        await self._lineage.raise_deletes_end(offset)

    def limit_lineage_to_end(self) -> None:
        """See `LineageState.limit_to_end`."""
        self._lineage.limit_to_end()

    async def copy_state_of(self, source: "Log") -> None:
        """This log has the batches of `source`, in another directory: take over what batches do not hold."""
        self._epochs.replace(source._epochs.copy())
        self._epochs.unsaved()
        snapshot = source.producers.to_snapshot() if len(source.producers) else b""
        self.producers.replace_with(ProducerState.from_snapshot(snapshot) if snapshot else ProducerState())
        await self._lineage.copy_from(source._lineage)

    # Append

    def append(
        self,
        batch: Buffer,
        *,
        leader_epoch: int,
        is_coordinator: bool = False,
        inspected: RecordRules | None = None,
        inline_bytes_max: int | None = None,
        check_transaction: CheckTransaction | None = None,
        condition: AppendCondition | None = None,
    ) -> AppendInfo:
        """As leader: check the batches, assign offsets and epoch, and write them: all or none.

        `is_coordinator`: the caller is a coordinator of the cluster and may write control batches. The write is in the
        page cache when this returns; `wait_durable(info.last_offset)` resolves when it is on the device. With
        `inline_bytes_max` it raises `NeedsDecodingError` instead of decoding more; for `inspected`,
        `check_transaction` and `condition` see `admission`.
        """
        return self._appender.append(
            batch, leader_epoch, is_coordinator, inspected, inline_bytes_max, check_transaction, condition
        )

    def append_replicated(self, batches: Buffer) -> AppendInfo:
        """As follower: write the leader's batches with their offsets and epochs: all or none.

        They must begin where this log ends; after `allow_gaps` offsets may be missing between them.
        """
        return self._appender.append_replicated(batches)

    def roll(self) -> None:
        """Seal the active segment and begin a new one at the log end. An empty segment stays."""
        self._appender.roll()

    def roll_if_due(self) -> bool:
        """Roll a segment that is old enough although nothing is appended, so that it can expire."""
        return self._appender.roll_if_due()

    # Read

    def read_nowait(self, offset: int, *, bytes_max: int, end: int | None = None) -> Slice | None:
        """As `read`, if everything is in memory; else None."""
        return self._reader.read_nowait(offset, bytes_max, end)

    async def read(self, offset: int, *, bytes_max: int, end: int | None = None) -> Slice:
        """Return whole batches from the one that holds `offset`, at most `bytes_max` bytes but at least one batch.

        Only batches that end below `end` (a high watermark or last stable offset), by default the log end. Raises
        `OffsetOutOfRangeError` outside of [start_offset, end_offset]. Reads from one segment at a time.
        """
        return await self._reader.read(offset, bytes_max, end)

    async def offset_for_timestamp(
        self, timestamp: int, *, end: int | None = None, work: Work | None = None
    ) -> TimestampedOffset | None:
        """Return the first record below `end` with at least this timestamp. `work` decodes a large batch."""
        return await self._reader.first_record(timestamp, end, work or self.work)

    async def offset_of_largest_timestamp(self, *, work: Work | None = None) -> TimestampedOffset | None:
        """Return the first record with the largest timestamp; None if no record has one. `work` as above."""
        return await self._reader.latest_record(work or self.work)

    async def aborted_transactions(self, start: int, end: int) -> list[AbortedTransaction]:
        """Aborted transactions that overlap [start, end), in the order of their markers."""
        return await self._reader.aborted_transactions(start, end)

    async def range_bytes(self, start: int, end: int) -> int:
        """Bytes that the batches of [start, end) take in the files, limited to the log."""
        return await self._reader.range_bytes(start, end)

    # Durability: `Syncable` of group commit

    def wait_durable(self, offset: int) -> "asyncio.Future[None]":
        """Resolves when the record at `offset` (the `last_offset` of an append) is on the device.

        Fails with `StorageError` if a sync fails, with `RecordsTruncatedError` if the record is truncated. With
        `flush.mode=page-cache` it resolves at once.
        """
        assert offset < self.segments.end_offset, f"{self.path}: no record at offset {offset} to wait for"
        if self.context.config.flush_mode is FlushMode.PAGE_CACHE and self.durability.failed is None:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            future.set_result(None)
            return future
        return self.durability.wait(offset)

    def begin_sync(self) -> SyncTicket:
        return self.durability.begin(self.segments.end_offset)

    def end_sync(self, ticket: SyncTicket) -> None:
        self.durability.end(ticket)

    def fail_sync(self, error: StorageError) -> None:
        """Everything past the durable end is suspect from now on, after a restart too."""
        self.durability.fail(error)
        self.damage_state.suspect()

    async def flush(self) -> None:
        """Return when everything that was appended before the call is on the device."""
        await self.durability.flush()

    # Checkpoints

    @property
    def has_news(self) -> bool:
        """Whether a checkpoint would store anything."""
        return self._checkpoint.has_news

    async def checkpoint(self) -> None:
        """See `RecoveryCheckpoint.run`."""
        await self._checkpoint.run()

    async def store_mark(self) -> None:
        """See `RecoveryCheckpoint.store`. The caller holds the lock."""
        await self._checkpoint.store()

    async def clear_page_cache(self) -> None:
        """See `RecoveryCheckpoint.clear_page_cache`."""
        await self._checkpoint.clear_page_cache()

    # Changes of files

    async def truncate(self, offset: int) -> None:
        """Truncate the log to `offset`, or to where the batch that spans it begins. Also repairs a damaged log."""
        await run_to_completion(self._truncation.truncate(offset))

    async def repair(self) -> None:
        """Truncate a damaged log to its good end; the rest is fetched again."""
        if self.damaged is not None:
            await run_to_completion(self._truncation.truncate(self.damaged.good_end))

    async def reset_to(self, offset: int) -> None:
        """Drop everything; the log is empty and starts at `offset`."""
        await run_to_completion(self._truncation.reset_to(offset))

    async def advance_start(self, offset: int) -> None:
        """Delete the records below `offset`, durably. Segments wholly below it go. A closed log stays as it is."""
        await self._changes.advance_start(offset)

    async def expire(self, *, bound: Offset, config: LogConfig | None = None) -> list[ExpiredSegment]:
        """Delete the segments that retention no longer keeps, below `bound`. Returns them with the reasons. `config`:
        go by this one, which the log is to have (`configure`)."""
        return await self._changes.expire(bound, config or self.config)

    async def replace_segments(self, cleaned: list[CleanedSegment], *, generation: int | None = None) -> bool:
        """Replace segments by cleaned ones; a crash at any point does not lose either.

        False, and nothing has changed, if one of the segments is gone, or the log was closed, found damaged or
        truncated meanwhile (`generation` is `durability.generation` when the cleaning began).
        """
        return await run_to_completion(self._changes.replace(cleaned, generation))

    async def remove_deleted(self, now_ms: int) -> int:
        """Remove files that were dropped `file_delete_delay_ms` ago. Returns how many."""
        return await self._changes.remove_deleted(now_ms)

    async def scrub(self, base_offset: int) -> ScrubResult:
        """See `DamageState.scrub`."""
        return await self.damage_state.scrub(base_offset, has_gaps=self._lineage.has_gaps)

    async def check(self, base_offset: int) -> ScrubResult:
        """See `DamageState.check`."""
        return await self.damage_state.check(base_offset, has_gaps=self._lineage.has_gaps)

    async def restore_segment(self, info: SegmentInfo, path: str) -> bool:
        """See `SegmentRestore.install`."""
        return await run_to_completion(self._restore.install(info, path))

    async def check_indexes(self, info: SegmentInfo) -> str | None:
        """See `IndexCheck.check`."""
        return await self._index_check.check(info)

    async def rebuild_index(self, base_offset: int) -> None:
        """Rebuild the index files of a segment."""
        await self._rebuilder.rebuild(base_offset)

    async def mark_damaged(self, damage: Damage) -> None:
        """See `DamageState.record`."""
        await self.damage_state.record(damage)

    def mark_missing(self, offset: int) -> None:
        """The log takes no role until it is truncated to `offset`: later segments were moved to a kept copy.

        In memory only: the next start finds that they are missing.
        """
        self.damage_state.record_in_memory(
            Damage(Offset(offset), "segments past this were moved to a kept copy", is_missing=True)
        )

    async def configure(self, config: LogConfig) -> None:
        """Use these settings from now on."""
        if config.cleanup_compact:
            await self.allow_gaps()
        await self._checkpoint.note_page_cache(config)
        self.context.configure(config)
        self.segments.active.index.configure(config.index_interval_bytes)

    def expire_producers(self) -> int:
        """Forget producers that were silent for `producer_expiry_ms`. Returns how many."""
        return len(self.producers.expire(self.clock.now_ms(), self.config.producer_expiry_ms))

    # Close

    async def close(self) -> None:
        """Sync everything and store a clean stop, so that the next `open` reads nothing."""
        async with self.lock:
            if self.is_closed:
                return
            is_sound = self.damaged is None and self.durability.failure is None
            if is_sound:
                await self.store_mark()
            self.context.close()
            if is_sound:
                assert self.mark.offset == self.segments.end_offset, "an append while the log was closed"
                await self.context.commit({stored.CLEAN: stored.encode_number("clean", self.mark.offset)})
            await self._release()

    async def retire(self) -> None:
        """Release everything without a clean stop: the owner removes or moves the files."""
        async with self.lock:
            self.context.close()
            await self._release()

    async def delete(self) -> None:
        """Remove the log, files and stored state."""
        async with self.lock:
            self.context.close()
            await self._release()
            await self.store.commit(dict.fromkeys(self.store.keys(self.prefix)))
            self.disk.remove_directory(self.path)
            await self.disk.sync_many([], [self.path.rpartition("/")[0]])

    async def _release(self) -> None:
        await self.durability.release()
        self.context.files.discard_directory(self.path)
        await self.damage_state.wait_suspect()

    def validate(self, *, thorough: bool = True) -> None:
        """Assert the invariants; for tests, after every step. Without `thorough` in constant time. Not while a
        truncation is under way, nor of a closed log."""
        end = self.segments.end_offset
        self.segments.validate(thorough=thorough)
        self.durability.validate(log_end=end, thorough=thorough)
        self.epochs.validate(log_end=end, thorough=thorough)
        self.producers.validate(log_end=end, thorough=thorough)
        self.damage_state.validate()
        if thorough:
            self._lineage.validate()
        assert 0 <= self.start_offset <= end, f"start {self.start_offset}, end {end}"
        assert self.segments.first_offset <= self.start_offset, "no segment for the start offset"
        assert self.segments.version >= self.durability.generation, "readers do not see that the log was truncated"
        if self.durability.generation:
            assert self.high_watermark <= end, f"truncated to {end}, and the high watermark is {self.high_watermark}"
        if self.damaged is None:
            self._checkpoint.validate()
            assert self.mark.offset <= self.durability.durable_end <= end, (
                f"recovery point {self.mark.offset}, durable {self.durability.durable_end}, end {end}"
            )
