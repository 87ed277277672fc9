"""One partition's log: append, read, cut, make durable. The shell around the parts of this package.

    segments     which files there are and where an offset lies       durability   what is on the device, who waits
    epochs       leader epochs and where they start                    producers    who may append what, transactions
    admission    what a leader lets in                                 reading      plans of reads
    recovery     opening                                               surgery      cutting, dropping, swapping files
    marking      what is stored so that recovery reads little          doubts       failed syncs, rot

Owner's duties, in the place of locks:

1. One owner per log. Appends are synchronous and come from the owner only; it starts no append while a `truncate` or
   `reset_to` of its own is under way.
2. It calls `checkpoint` at least every second while there is traffic, and `reap` now and then.
3. It never reads past, nor deletes or compacts at or past, the bounds that replication sets: they are handed in.
4. After `fail_sync` the log takes no more appends; the owner gives the directory up.

Invariants (`validate`): start_offset <= end_offset; mark.offset <= durable_end <= end_offset, unless damaged; the
store never speaks of bytes that are not on the device (see `checkpoint`).
"""

import asyncio
import logging
from collections.abc import Callable

from tidelog.log import appending, doubts, lineage, marking, seeking, surgery
from tidelog.log import checkpoint as stored
from tidelog.log.admission import Look
from tidelog.log.appending import Appended
from tidelog.log.checkpoint import key_prefix
from tidelog.log.cleaner import CleanedSegment
from tidelog.log.config import FlushMode, LogConfig
from tidelog.log.durability import Durability
from tidelog.log.epochs import EpochHistory
from tidelog.log.files import FilePool, Steps, T, run_async, run_nowait
from tidelog.log.group_commit import GroupCommit, SyncTicket
from tidelog.log.producers import ProducerState
from tidelog.log.reading import IndexFaultError, Slice, TimestampedOffset, aborted_steps, range_steps, read_steps
from tidelog.log.recovered import Damage, Recovered, RecoveryReport
from tidelog.log.recovery import Recovery
from tidelog.log.scan import ScrubResult
from tidelog.log.segment import RecoveryMark, SegmentInfo
from tidelog.log.segments import Segments
from tidelog.log.transactions import AbortedTransaction
from tidelog.model.errors import (
    FULL_ADVICE,
    CorruptBatchError,
    DamagedLogError,
    DiskFullError,
    FencedLeaderEpochError,
    OffsetOutOfRangeError,
    StorageError,
)
from tidelog.model.ids import Epoch, Offset, PartitionId
from tidelog.world.clock import Clock
from tidelog.world.disk import Buffer, Disk
from tidelog.world.store import StateStore
from tidelog.world.work import Work

__all__ = ["Appended", "Damage", "Log", "RecoveryReport", "SegmentInfo", "Slice", "TimestampedOffset"]

LOGGER = logging.getLogger(__name__)

IDLE_SYNC_MS = 30_000
"""With page-cache: a log that was quiet for so long is synced, so that it holds no open file."""


class Log:
    """See the module. Made by `open`; ends with `close` (clean), `delete`, or the process."""

    __slots__ = (
        "clock",
        "config",
        "damaged",
        "deleted",
        "disk",
        "durability",
        "epochs",
        "epochs_changed",
        "files",
        "gaps",
        "group_commit",
        "has_rolled",
        "high_watermark",
        "intent",
        "is_changing",
        "is_closed",
        "is_page_cache",
        "lineage",
        "lock",
        "log_id",
        "mark",
        "path",
        "pending_infos",
        "pending_snapshots",
        "prefix",
        "producers",
        "report",
        "segments",
        "snapshots",
        "start_offset",
        "store",
        "suspect_task",
        "work",
    )

    def __init__(
        self,
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
        recovered: Recovered,
    ) -> None:
        self.disk = disk
        self.store = store
        self.work = work
        self.group_commit = group_commit
        self.clock = clock
        self.files = files
        self.path = path
        self.log_id = log_id
        self.config = config
        self.prefix = key_prefix(log_id)
        self.segments = Segments(files, path, recovered.sealed, recovered.active, recovered.end_offset)
        self.durability = Durability(files, recovered.end_offset)
        self.epochs: EpochHistory = recovered.epochs
        self.producers: ProducerState = recovered.producers
        self.start_offset = Offset(recovered.start_offset)
        self.high_watermark = Offset(recovered.high_watermark)
        self.damaged: Damage | None = recovered.damage
        self.report: RecoveryReport = recovered.report
        self.gaps = recovered.gaps
        # Whether the store says that acknowledged records may be on no device; see `marking`.
        self.is_page_cache = recovered.report.was_page_cache or config.flush_mode is FlushMode.PAGE_CACHE
        self.lineage = recovered.lineage
        # The stored recovery point; sealed segments and snapshots that wait to be stored with the next one.
        self.mark: RecoveryMark = recovered.mark
        self.snapshots: list[int] = recovered.snapshots
        self.pending_infos: dict[int, SegmentInfo] = {}
        self.pending_snapshots: dict[int, bytes] = {}
        self.epochs_changed = False
        self.has_rolled = False
        # The kind of a change of files that is done, and that the store still speaks of; see `surgery`.
        self.intent: str | None = None
        # Files that were renamed away, and when they may be removed.
        self.deleted: list[tuple[int, str]] = []
        # Checkpoints and changes of files, one at a time; appends and reads go on meanwhile.
        self.lock = asyncio.Lock()
        self.is_changing = False
        self.is_closed = False
        self.suspect_task: asyncio.Task[None] | None = None
        if not recovered.is_named:
            self.durability.touch_directory(path)
            self.durability.touch_directory(path.rpartition("/")[0])

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
        """Open the log in directory `path`, or make it. See `recovery` for what that costs and finds.

        `verify` reads and checks everything, also what lies below the recovery point.
        """
        recovery = Recovery(
            disk=disk, store=store, work=work, clock=clock, path=path, log_id=log_id, config=config, verify=verify
        )
        recovered = await recovery.run()
        log = cls(
            disk=disk,
            store=store,
            work=work,
            group_commit=group_commit,
            clock=clock,
            files=files,
            path=path,
            log_id=log_id,
            config=config,
            recovered=recovered,
        )
        if recovered.damage is not None:
            LOGGER.error(
                "log=%s damaged good_end=%d reason=%s", path, recovered.damage.good_end, recovered.damage.reason
            )
        elif recovered.report.bytes_cut:
            LOGGER.warning(
                "log=%s cut end=%d bytes=%d reason=%s",
                path,
                recovered.end_offset,
                recovered.report.bytes_cut,
                recovered.report.cut_reason,
            )
        return log

    # Where it stands

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
        return self.mark.offset

    @property
    def size(self) -> int:
        """Bytes in the segment files."""
        return self.segments.size

    @property
    def active_bytes(self) -> int:
        return self.segments.active.size

    def sealed_segments(self) -> list[SegmentInfo]:
        """Oldest first. The active segment is not among them."""
        return list(self.segments.sealed)

    def end_offset_for_epoch(self, epoch: int) -> tuple[Epoch, Offset]:
        """See `EpochHistory.end_offset_for`."""
        return self.epochs.end_offset_for(epoch, log_end=self.segments.end_offset)

    def assign_epoch(self, epoch: int) -> None:
        """A leader epoch begins at the log's end, before anything was written in it."""
        if epoch < self.epochs.latest:
            raise FencedLeaderEpochError(f"{self.path}: epoch {epoch}, the log knows {self.epochs.latest}")
        if self.epochs.assign(epoch, self.segments.end_offset):
            self.epochs_changed = True
            self.group_commit.touch(self)

    def forget_empty_epochs(self) -> None:
        """As follower: epochs at the log's end that nothing was written in. Nobody has a record of them, and the next
        leader may go on with records of older ones."""
        if self.epochs.truncate_from_end(self.segments.end_offset):
            self.epochs_changed = True
            self.group_commit.touch(self)

    def last_stable_offset(self, high_watermark: Offset) -> Offset:
        """Readers of committed data read below this."""
        unstable = self.producers.first_unstable_offset(high_watermark)
        return high_watermark if unstable is None else min(high_watermark, unstable)

    # Appending

    def append(
        self,
        batch: Buffer,
        *,
        leader_epoch: int,
        is_coordinator: bool = False,
        looked: Look | None = None,
        inline_bytes_max: int | None = None,
    ) -> Appended:
        """As leader: check the batches, give them offsets and epoch, write them. All of them or none.

        `is_coordinator`: the caller is a part of the cluster and may write control batches. The write is in the page
        cache when this returns; `wait_durable(appended.last_offset)` says when it is safe. With `inline_bytes_max` it
        raises `NeedsLookError` instead of decoding more than that; for `looked` see `admission`.
        """
        return appending.append(self, batch, leader_epoch, is_coordinator, looked, inline_bytes_max)

    def append_replicated(self, batches: Buffer) -> Appended:
        """As follower: the leader's batches as they are, offsets and epochs too. All of them or none.

        They must go on where this log ends; after `allow_gaps` offsets may be missing between them.
        """
        return appending.append_replicated(self, batches)

    async def allow_gaps(self) -> None:
        """From now on offsets may be missing between batches, for ever: the log is compacted, here or on its leader.

        Stored before the first gap is written: recovery would take it for a torn end otherwise.
        """
        if not self.gaps:
            await self.store.commit(lineage.gaps_writes(self))
            self.gaps = True

    def roll(self) -> None:
        """Seal the active segment and begin a new one at the log's end. An empty segment stays."""
        if self.segments.active.size:
            self.check_writable()
            appending.roll(self)

    def roll_if_due(self) -> bool:
        """Roll a segment that is old enough although nothing is appended, so that it can expire."""
        active, now_ms = self.segments.active, self.clock.now_ms()
        newest = now_ms if active.first_timestamp >= 0 else -1
        if not active.is_due(self.config, max_timestamp=newest, now_ms=now_ms, log_number=self.number):
            return False
        self.roll()
        return True

    @property
    def number(self) -> int:
        """Tells this log from others, the same every time: for the jitter of rolls."""
        return self.log_id.topic_id.int + self.log_id.partition

    def check_writable(self) -> None:
        assert not self.is_closed, f"{self.path} is closed"
        assert not self.is_changing, f"{self.path}: an append while the log is cut"
        if self.damaged is not None:
            raise DamagedLogError(
                f"{self.path} is damaged: {self.damaged.reason}", path=self.path, good_end=self.damaged.good_end
            )
        failed = self.durability.failed or self.group_commit.failed
        if failed is not None:
            raise StorageError(f"{self.path}: a sync has failed: {failed}", path=self.path)
        if self.intent == surgery.RESET:
            # A crash would carry it out again, and what is written now with it.
            raise DiskFullError(f"{self.path} was emptied, which is still to be stored; {FULL_ADVICE}", path=self.path)

    # Reading

    def read_nowait(self, offset: int, *, bytes_max: int, end: int | None = None) -> Slice | None:
        """As `read`, if everything is in memory; else None."""
        bound = self.read_bound(offset, end)
        if offset >= bound:
            return Slice(b"", Offset(offset), Offset(offset))
        try:
            return run_nowait(read_steps(self.segments, self.config, offset, bytes_max, bound))
        except IndexFaultError:
            return None

    async def read(self, offset: int, *, bytes_max: int, end: int | None = None) -> Slice:
        """Whole batches from the one that holds `offset`, at most `bytes_max` bytes but at least one batch.

        Only batches that end below `end` (a high watermark or last stable offset), by default the log's end. Raises
        `OffsetOutOfRangeError` outside of [start_offset, end_offset]. One segment at a time.
        """
        found = self.read_nowait(offset, bytes_max=bytes_max, end=end)
        if found is not None:
            return found

        def plan() -> Steps[Slice]:
            return read_steps(self.segments, self.config, offset, bytes_max, self.read_bound(offset, end))

        return await self.look(plan)

    async def offset_for_timestamp(
        self, timestamp: int, *, end: int | None = None, work: Work | None = None
    ) -> TimestampedOffset | None:
        """The first record with a timestamp at or after this one, below `end`. Decodes a batch or a few: a large one
        elsewhere, by `work` if that is given."""
        return await seeking.first_record(self, timestamp, end, work or self.work)

    async def offset_of_largest_timestamp(self, *, work: Work | None = None) -> TimestampedOffset | None:
        """The first record with the largest timestamp; None if no record has one. `work` as above."""
        return await seeking.latest_record(self, work or self.work)

    async def aborted_transactions(self, start: int, end: int) -> list[AbortedTransaction]:
        """Aborted transactions that overlap [start, end), in the order of their markers."""
        return await self.look(lambda: aborted_steps(self.segments, start, end))

    async def range_bytes(self, start: int, end: int) -> int:
        """How many bytes the batches of [start, end) take in the files; clipped to what there is."""
        start, end = max(start, self.start_offset), min(end, self.segments.end_offset)
        return await self.look(lambda: range_steps(self.segments, self.config, start, end)) if start < end else 0

    async def look(self, plan: Callable[[], Steps[T]]) -> T:
        """Carry out a plan; anew if the files changed meanwhile, or after an index was rebuilt."""
        rebuilt: set[int] = set()
        while True:
            version = self.segments.version
            try:
                result = await run_async(plan())
            except IndexFaultError as fault:
                if fault.base_offset in rebuilt and self.segments.version == version:
                    raise CorruptBatchError(f"{self.path}: {fault}, although it was rebuilt") from fault
                await surgery.rebuild_indexes(self, fault)
                rebuilt.add(fault.base_offset)
                continue
            except (CorruptBatchError, StorageError):
                if self.segments.version == version:
                    raise
                continue
            if self.segments.version == version:
                return result

    def read_bound(self, offset: int, end: int | None) -> int:
        bound = self.segments.end_offset if end is None else min(end, self.segments.end_offset)
        if not self.start_offset <= offset <= self.segments.end_offset:
            raise OffsetOutOfRangeError(
                f"{self.path}: offset {offset} is outside of {self.start_offset} to {self.segments.end_offset}",
                offset=offset,
                start=self.start_offset,
                end=self.segments.end_offset,
            )
        if self.damaged is not None:
            if offset >= self.damaged.good_end and offset < bound:
                raise DamagedLogError(
                    f"{self.path} is damaged: {self.damaged.reason}", path=self.path, good_end=self.damaged.good_end
                )
            bound = min(bound, self.damaged.good_end)
        return bound

    # Durability: the `Dirty` of group commit

    def wait_durable(self, offset: int) -> "asyncio.Future[None]":
        """Resolves when the record at `offset` (the `last_offset` of an append) is on the device.

        Fails with `StorageError` if a sync fails, with `RecordsTruncatedError` if the record is cut. With
        `flush.mode=page-cache` it resolves at once: being written is enough there.
        """
        assert offset < self.segments.end_offset, f"{self.path}: nothing at offset {offset} to wait for"
        if self.config.flush_mode is FlushMode.PAGE_CACHE and self.durability.failed is None:
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
        if self.suspect_task is None and not self.is_closed and self.damaged is None:
            self.suspect_task = asyncio.get_running_loop().create_task(doubts.store_suspect(self))

    async def flush(self) -> None:
        """Everything that was appended before the call is on the device when it returns."""
        await self.group_commit.flush(self)

    # Checkpoints

    async def checkpoint(self) -> None:
        """Bring the stored recovery point up to the log's end of this moment, syncing if need be.

        With page-cache only if a sync is due: after a roll, by the topic's flush settings, or after a quiet while. With
        many producers only now and then (`marking.is_worth_it`).
        """
        async with self.lock:
            is_early = self.config.flush_mode is FlushMode.PAGE_CACHE and not self._checkpoint_is_due()
            if is_early or not marking.is_worth_it(self):
                await self._store_epochs()
                return
            await self.store_mark()

    def _checkpoint_is_due(self) -> bool:
        now_ms = self.clock.now_ms()
        return (
            self.has_rolled
            or self.durability.is_settled
            or appending.flush_is_due(self, now_ms)
            or now_ms - self.segments.active.modified_ms >= IDLE_SYNC_MS
        )

    async def _store_epochs(self) -> None:
        if self.epochs_changed and self.damaged is None and not self.is_closed:
            self.epochs_changed = False
            try:
                await self.store.commit({self.prefix + stored.EPOCHS: stored.encode_epochs(self.epochs)})
            except BaseException:
                self.epochs_changed = True
                raise

    @property
    def has_news(self) -> bool:
        """Whether a checkpoint would store anything."""
        return marking.has_news(self)

    async def store_mark(self) -> None:
        """Sync, then commit the recovery point with all that it vouches for. The lock is held."""
        await marking.store_mark(self)

    # Changes of files: see `surgery`

    async def truncate(self, offset: int) -> None:
        """Cut the log to end at `offset`, or where the batch that spans it begins. Also repairs a damaged log."""
        await surgery.to_the_end(surgery.truncate(self, offset))

    async def repair(self) -> None:
        """Cut a damaged log to its good end; the rest is fetched again."""
        if self.damaged is not None:
            await surgery.to_the_end(surgery.truncate(self, self.damaged.good_end))

    async def reset_to(self, offset: int) -> None:
        """Drop everything; the log is empty and starts at `offset`."""
        await surgery.to_the_end(surgery.reset_to(self, offset))

    async def advance_start(self, offset: int) -> None:
        """Records below `offset` are deleted: durably when this returns. Segments wholly below it go. A log that is
        closed stays as it is."""
        await surgery.advance_start(self, offset)

    async def delete_segments(self, bases: list[Offset] | list[int]) -> None:
        """Drop these sealed segments, the oldest ones of the log. The start offset advances durably first."""
        await surgery.delete_segments(self, [int(base) for base in bases])

    async def replace_segments(self, cleaned: list[CleanedSegment], *, generation: int | None = None) -> bool:
        """Put cleaned segments in the place of those that they replace, whatever crashes on the way.

        False, and nothing has changed, if one of those is gone meanwhile, or the log was closed, found damaged, or
        cut (`generation` is `durability.generation` when the cleaning began).
        """
        return await surgery.to_the_end(surgery.replace_segments(self, cleaned, generation))

    async def reap(self, now_ms: int) -> int:
        """Remove files that were dropped `file_delete_delay_ms` ago. Returns how many."""
        return await surgery.reap(self, now_ms)

    async def scrub(self, base_offset: int) -> ScrubResult:
        """Check a sealed segment against the CRC of its file. A segment that fails makes the log damaged."""
        return await doubts.scrub(self, base_offset)

    async def mark_damaged(self, damage: Damage) -> None:
        """Rot was found at run time: close the log to appends, durably, until its owner repairs it."""
        await doubts.mark_damaged(self, damage)

    async def configure(self, config: LogConfig) -> None:
        """Other settings from now on."""
        if config.cleanup_compact:
            await self.allow_gaps()
        await marking.note_page_cache(self, config)
        self.config = config
        self.segments.active.index.interval_bytes = config.index_interval_bytes

    def expire_producers(self) -> int:
        """Forget producers that were silent for `producer_expiry_ms`. Returns how many."""
        return len(self.producers.expire(self.clock.now_ms(), self.config.producer_expiry_ms))

    # The end

    async def close(self) -> None:
        """Sync everything and store a clean stop, so that the next `open` reads nothing."""
        async with self.lock:
            if self.is_closed:
                return
            sound = self.damaged is None and self.durability.failed is None and self.group_commit.failed is None
            if sound:
                await self.store_mark()
            self.is_closed = True
            if sound:
                assert self.mark.offset == self.segments.end_offset, "an append while the log was closed"
                clean = stored.encode_number("clean", self.mark.offset)
                await self.store.commit({self.prefix + stored.CLEAN: clean})
            await self._release()

    async def retire(self) -> None:
        """Let go of everything without a clean stop: the owner removes or moves the files."""
        async with self.lock:
            self.is_closed = True
            await self._release()

    async def delete(self) -> None:
        """Remove the log, files and stored state."""
        async with self.lock:
            self.is_closed = True
            await self._release()
            keys = self.store.keys(self.prefix)
            await self.store.commit(dict.fromkeys(keys))
            self.disk.remove_directory(self.path)
            await self.disk.sync_many([], [self.path.rpartition("/")[0]])

    async def _release(self) -> None:
        await self.group_commit.release(self)
        self.durability.release_all()
        self.files.discard_directory(self.path)
        if self.suspect_task is not None:
            await self.suspect_task

    def validate(self) -> None:
        """Assert the invariants; for tests, after every step."""
        self.segments.validate()
        self.durability.validate()
        self.epochs.validate()
        self.producers.validate()
        end = self.segments.end_offset
        assert 0 <= self.start_offset <= end, f"start {self.start_offset}, end {end}"
        assert self.segments.first_offset <= self.start_offset, "no segment for the start offset"
        assert self.epochs.latest_start <= end, "an epoch begins past the end"
        if self.damaged is None:
            assert self.mark.offset <= self.durability.durable_end <= end, (
                f"recovery point {self.mark.offset}, durable {self.durability.durable_end}, end {end}"
            )
