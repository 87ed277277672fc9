"""Stores the recovery point of a log: first the sync, then one commit of the recovery mark with all that it covers.

    write waiting index entries -> take the mark -> sync -> commit {mark, epochs, sealed segments, producers}

The mark is taken before the sync and stored after it, so the store never describes bytes that are not on the device.
Appends go on meanwhile; they belong to the next mark.

A mark needs a snapshot of all producers. With many of them a mark is stored only when it pays (`_is_worth_storing`);
until then recovery reads a little more. Their rows are encoded `PACKED_PER_SLICE` at a time before the mark is taken.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tidelog.log import stored_state as stored
from tidelog.log.config import FlushMode, LogConfig
from tidelog.log.damage import DamageState
from tidelog.log.durability import Durability
from tidelog.log.epochs import LeaderEpochs
from tidelog.log.index_files import write_index_entries
from tidelog.log.log_context import LogContext
from tidelog.log.log_scan import file_crc
from tidelog.log.producers import ProducerState
from tidelog.log.segment import RecoveryMark, SegmentInfo
from tidelog.log.segments import Segments
from tidelog.log.stored_state import Writes
from tidelog.model.errors import CorruptStateError

SNAPSHOTS_KEPT = 4
"""Producer snapshots kept at the newest rolls, beside the one at the log start: a truncation replays from one."""
PRODUCERS_FEW = 500
PRODUCER_BYTES = 64
"""About what a producer takes in a snapshot."""
SNAPSHOT_RATIO = 8
WAIT_MS_MAX = 10_000
PACKED_PER_SLICE = 500
"""Takes about 3 ms."""
IDLE_SYNC_MS = 30_000
"""With page-cache: a log without appends for this long is synced, so that it holds no open file."""


@dataclass(slots=True, eq=False)
class RecoveryCheckpoint:
    """Owns what the store knows of the log: the mark, the producer snapshots, and what waits for the next mark.

    `mark` is the stored recovery mark. `intent` is the kind of a change of files that is done and synced while the
    store still names it. `is_page_cache` is True while the store says that acknowledged records may be on no device.

    Invariants (`validate`): the mark lies in a segment that exists and is not past the durable end; no snapshot is past
    the mark; infos wait only of segments that exist.
    """

    _context: LogContext
    _segments: Segments
    _durability: Durability
    _epochs: LeaderEpochs
    _producers: ProducerState
    _damage: DamageState
    mark: RecoveryMark
    snapshots: list[int]
    is_page_cache: bool
    intent: str | None = None
    _has_rolled: bool = False
    # Sealed segments and snapshots that are stored with the next mark.
    _pending_infos: dict[int, SegmentInfo] = field(default_factory=dict)
    _pending_snapshots: dict[int, bytes] = field(default_factory=dict)

    def validate(self) -> None:
        """Assert the invariants of the class. The log is not damaged: its mark may be past its end otherwise."""
        mark, segments = self.mark, self._segments
        durable_end = self._durability.durable_end
        assert mark.base_offset <= mark.offset <= durable_end, f"{mark} of a log that is durable up to {durable_end}"
        assert segments.first_offset <= mark.base_offset <= segments.active.base_offset, (
            f"no segment of the mark: {mark}"
        )
        if mark.base_offset == segments.active.base_offset:
            assert mark.position <= segments.active.size, f"{mark} is past the {segments.active.size} bytes there are"
        assert all(segments.info(base).next_offset == info.next_offset for base, info in self._pending_infos.items()), (
            "the info of a segment waits that is gone"
        )
        assert self.snapshots == sorted(set(self.snapshots)), f"snapshots do not rise: {self.snapshots}"
        assert not self.snapshots or self.snapshots[-1] <= mark.offset, f"a snapshot past {mark}: {self.snapshots}"

    # Changes of the log

    def segment_sealed(self, info: SegmentInfo) -> None:
        self._pending_infos[info.base_offset] = info
        self._pending_snapshots[info.next_offset] = self._snapshot()
        self._has_rolled = True

    def info_changed(self, info: SegmentInfo) -> None:
        """The info of a sealed segment differs from the stored one. Until it is stored, each start finds that again."""
        self._pending_infos[info.base_offset] = info

    def segments_dropped(self, dropped: Iterable[SegmentInfo]) -> None:
        for info in dropped:
            self._pending_infos.pop(info.base_offset, None)

    def truncated(self, base_offset: int, end: int) -> None:
        """The log ends at `end`, in the segment `base_offset`."""
        self._pending_infos = {base: info for base, info in self._pending_infos.items() if base < base_offset}
        self._pending_snapshots = {at: data for at, data in self._pending_snapshots.items() if at <= end}

    def lowered(self, mark: RecoveryMark) -> None:
        """A truncation has stored this mark."""
        kept = {at for at in self.snapshots if at <= mark.offset} | ({mark.offset} if mark.has_producers else set())
        self.mark = mark
        self.snapshots = sorted(kept)

    def reset(self, mark: RecoveryMark) -> None:
        """The log is empty, and the store has this mark and no snapshot."""
        self.mark = mark
        self.snapshots = []
        self._pending_infos, self._pending_snapshots = {}, {}

    def covers(self, bases: Iterable[int]) -> bool:
        """Whether the store knows these sealed segments, and the mark is past all of them."""
        return not any(base in self._pending_infos or base >= self.mark.base_offset for base in bases)

    def intent_done(self, kind: str) -> None:
        self.intent = kind

    async def clear_intent(self) -> None:
        """Delete the stored intent of a change that is done and synced."""
        if self.intent is not None:
            await self._context.commit({stored.INTENT: None})
            self.intent = None

    # Snapshots of the producers

    def has_snapshot_at(self, offset: int) -> bool:
        return offset in self._pending_snapshots or offset in self.snapshots

    def snapshot_at(self, offset: int) -> tuple[bytes | None, bool]:
        """The producers at this offset, which has a snapshot, and whether it can be read."""
        if offset in self._pending_snapshots:
            return self._pending_snapshots[offset], True
        snapshot = self.stored_snapshot(offset)
        return snapshot, snapshot is not None

    def stored_snapshot(self, offset: int) -> bytes | None:
        """The producers stored for `offset`, empty if there were none; None if missing or unreadable."""
        try:
            data = self._context.store.get(stored.producers_key(self._context.prefix, offset))
            if data:
                ProducerState.from_snapshot(data)
        except CorruptStateError:
            return None
        return data

    def newest_snapshot(self, offset: int, first: int) -> tuple[int, bytes | None]:
        """Where a replay to past `offset` begins, and the producers there: none at the `first` offset of the log."""
        for at in reversed(self.snapshots):
            if at <= offset and (snapshot := self.stored_snapshot(at)) is not None:
                return at, snapshot or None
        return first, None

    def _snapshot(self) -> bytes:
        """The producers now; empty if there are none."""
        return self._producers.to_snapshot() if len(self._producers) else b""

    # Page cache

    async def note_page_cache(self, config: LogConfig) -> None:
        """Store, before the log acknowledges records that it has not synced, that it does so (`clear_page_cache`).

        A topic may change to `flush.mode=sync` and the power may fail before its records are synced. The settings do
        not show then that acknowledged records may be lost; this field does (`replication.startup_report`).
        """
        if config.flush_mode is FlushMode.PAGE_CACHE and not self.is_page_cache:
            await self._context.commit({stored.PAGE_CACHE: stored.encode_number("page-cache", 1)})
            self.is_page_cache = True

    async def clear_page_cache(self) -> None:
        """The log syncs what it acknowledges from now on: sync what it acknowledged before, and delete the field.

        The caller makes sure that the controller knows of a loss that the last opening found.
        """
        assert self._context.config.flush_mode is FlushMode.SYNC, "the log still acknowledges without a sync"
        if self.is_page_cache:
            await self._durability.flush()
            await self._context.commit({stored.PAGE_CACHE: None})
            self.is_page_cache = False

    # Checkpoints

    @property
    def has_news(self) -> bool:
        """Whether the stored state lags behind the log."""
        segments, active = self._segments, self._segments.active
        return (
            self.mark.offset != segments.end_offset
            or self.mark.base_offset != active.base_offset
            or bool(active.index.offsets or active.index.times or active.aborted)
            or not (self._durability.is_clean or self._is_blank())
            or bool(self._pending_infos or self._pending_snapshots)
            or self._epochs.is_unsaved
            or self.intent is not None
        )

    async def run(self) -> None:
        """Move the stored recovery point to the current log end, with a sync if needed.

        With page-cache only if a sync is due: after a roll, by the topic's flush settings, or after a quiet while.
        """
        async with self._context.lock:
            is_early = self._context.config.flush_mode is FlushMode.PAGE_CACHE and not self._is_due()
            if is_early or not self._is_worth_storing():
                await self._store_epochs()
            else:
                await self.store()

    async def store(self) -> None:
        """Move the stored recovery point to the current log end. The caller holds the lock of the log."""
        if self._damage.current is not None or self._context.is_closed or not self.has_news:
            return
        had_rolled, had_unsaved_epochs = self._has_rolled, self._epochs.is_unsaved
        try:
            await self._store()
        except BaseException:
            # Also when a stop cancels it: what was not stored is still to be stored.
            self._has_rolled |= had_rolled
            if had_unsaved_epochs:
                self._epochs.unsaved()
            raise

    async def _store(self) -> None:
        await self._compute_crcs()
        await self._pack_producers()
        context, segments, durability = self._context, self._segments, self._durability
        write_index_entries(context.path, segments, durability)
        producers = self._snapshot()
        mark = segments.active.mark(segments.end_offset, has_producers=bool(producers))
        epochs = stored.encode_epochs(self._epochs.history) if self._epochs.is_unsaved else None
        self._epochs.saved()
        self._has_rolled = False
        if not durability.is_clean and not self._is_blank():
            await durability.flush()
        assert durability.durable_end >= mark.offset, "the sync did not cover what was written before it"
        infos = {base: info for base, info in self._pending_infos.items() if info.next_offset <= mark.offset}
        snapshots = {at: data for at, data in self._pending_snapshots.items() if at <= mark.offset}
        if producers:
            snapshots[mark.offset] = producers
        writes: Writes = {context.prefix + stored.MARK: stored.encode_mark(mark)}
        if self.intent is not None:
            writes[context.prefix + stored.INTENT] = None  # the change itself is done and synced
        if epochs is not None:
            writes[context.prefix + stored.EPOCHS] = epochs
        for base, info in infos.items():
            writes[stored.segment_key(context.prefix, base)] = stored.encode_segment(info)
        kept = self._choose_snapshots(snapshots, mark, writes)
        await context.store.commit(writes)
        self.intent = None
        self.mark = mark
        self.snapshots = kept
        for base in infos:
            self._pending_infos.pop(base, None)
        for at in snapshots:
            self._pending_snapshots.pop(at, None)

    async def _store_epochs(self) -> None:
        if self._epochs.is_unsaved and self._damage.current is None and not self._context.is_closed:
            self._epochs.saved()
            try:
                await self._context.commit({stored.EPOCHS: stored.encode_epochs(self._epochs.history)})
            except BaseException:
                self._epochs.unsaved()
                raise

    def _is_due(self) -> bool:
        now_ms = self._context.clock.now_ms()
        return (
            self._has_rolled
            or self._durability.is_clean
            or self._durability.is_flush_due(self._context.config, now_ms)
            or now_ms - self._segments.active.modified_ms >= IDLE_SYNC_MS
        )

    def _is_worth_storing(self) -> bool:
        """With many producers only after a roll, after enough appends to outweigh their snapshot, or after a while."""
        count, mark, active = len(self._producers), self.mark, self._segments.active
        if count <= PRODUCERS_FEW or self._has_rolled or mark.base_offset != active.base_offset:
            return True
        written = active.size - mark.position
        waited_ms = self._context.clock.now_ms() - mark.modified_ms
        return written >= SNAPSHOT_RATIO * PRODUCER_BYTES * count or not 0 <= waited_ms < WAIT_MS_MAX

    def _is_blank(self) -> bool:
        """Nothing was ever written, so there is nothing to sync.

        The log's directory entry is synced with its first records. A blank log whose entry is lost is created again.
        """
        segments, durability = self._segments, self._durability
        return (
            segments.end_offset == 0
            and segments.active.size == 0
            and not segments.sealed
            and durability.generation == 0
            and durability.has_only_names
        )

    def _choose_snapshots(self, fresh: dict[int, bytes], mark: RecoveryMark, writes: Writes) -> list[int]:
        """Add snapshots to the write set and drop old ones: those at the newest rolls stay, and the mark's."""
        prefix = self._context.prefix
        bases = [view.base_offset for view in self._segments.from_offset(self._segments.first_offset)]
        rolls = [base for base in bases if base <= mark.offset]
        keep = {*rolls[:1], *rolls[-SNAPSHOTS_KEPT:]}
        if mark.has_producers:
            keep.add(mark.offset)
        for at, data in fresh.items():
            if at in keep:
                writes[stored.producers_key(prefix, at)] = data
        for at in self.snapshots:
            if at not in keep:
                writes[stored.producers_key(prefix, at)] = None
        return sorted({*self.snapshots, *fresh} & keep)

    async def _pack_producers(self) -> None:
        # Appends change some again meanwhile: their rows are encoded with the snapshot.
        for _ in range(len(self._producers) // PACKED_PER_SLICE):
            if not self._producers.pack(PACKED_PER_SLICE):
                return
            await asyncio.sleep(0)

    async def _compute_crcs(self) -> None:
        """A segment that was truncated while it was active has no running CRC: compute it after it was sealed."""
        context = self._context
        for base, info in list(self._pending_infos.items()):
            if info.crc is not None:
                continue
            crc = await context.work.run(file_crc, context.disk, self._segments.file_path(base), info.size)
            self._pending_infos[base] = replace(info, crc=crc)
            self._segments.replace_info(self._pending_infos[base])
