"""A broker's copy of the cluster metadata: committed records from any controller, kept on disk, published as deltas.

    controllers --raft-tail--> RaftObserver --> MetadataTail --> image, and subscribers(delta, older, newer) in order
                                                    |
                                                    v     in `path` of the disk
                                <offset>-<epoch>.snapshot  the image up to an offset (the format of `raft.snapshots`)
                                <offset>.tail              entries from there on: frames of length, CRC-32C, msgpack
                                                           [offset, epoch, kind, data]; written, not synced

A restart reads the newest sound snapshot and the frames that continue it, and fetches only what is new. What a power
loss takes from the tail files is fetched again; a damaged file ends the read and is no error: every controller has it
all. A snapshot is taken in the background when there are many frames after the last one.

On a full disk the copy falls behind and the image does not: frames without space, and all that follow, are not written
until there is space for a snapshot.

Large decisions are decoded, applied and compared in slices before they are visible (`prepare`): the image changes at
once, with the last slice. Subscribers run on the event loop and return quickly; an exception of one stops the tail (a
bug).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from random import Random
from struct import Struct

import msgpack
from crc32c import crc32c

from tidelog.metadata.delta import ImageDelta, delta_between, delta_steps
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.records import Record, decode_records, decode_steps
from tidelog.metadata.replay import Replay
from tidelog.metadata.snapshot import snapshot_bytes
from tidelog.metadata.snapshot_loader import SnapshotLoader
from tidelog.model.errors import CorruptStateError, DiskFullError, WorkFailedError
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.model.steps import Steps
from tidelog.raft.membership import Membership
from tidelog.raft.messages import Entry, EntryKind, SnapshotId
from tidelog.raft.observer import ObserverConfig, RaftObserver
from tidelog.raft.snapshots import SnapshotFiles
from tidelog.raft.tail import TailState
from tidelog.world.disk import Disk, File
from tidelog.world.slicing import run_in_turns
from tidelog.world.transport import Transport
from tidelog.world.work import Work

LOGGER = logging.getLogger(__name__)

SNAPSHOT_BYTES = 4 << 20
SPACE_RETRY_MIN_S, SPACE_RETRY_MAX_S = 1.0, 30.0
"""Backoff after a snapshot without space; doubles."""
SMALL_BYTES = 16 << 10
"""Entries up to this size, some 150 records, are applied in one turn."""
_FRAME = Struct(">II")

Subscriber = Callable[[ImageDelta, ClusterImage, ClusterImage], None]


def encode_entry(offset: Offset, entry: Entry) -> bytes:
    payload: bytes = msgpack.packb([offset, entry.epoch, int(entry.kind), entry.data])
    return _FRAME.pack(len(payload), crc32c(payload)) + payload


def decode_entries(data: bytes) -> tuple[list[tuple[Offset, Entry]], int]:
    """Returns the sound frames from the beginning, and their size."""
    entries: list[tuple[Offset, Entry]] = []
    position = 0
    while position + _FRAME.size <= len(data):
        length, crc = _FRAME.unpack_from(data, position)
        payload = data[position + _FRAME.size : position + _FRAME.size + length]
        # A power loss may leave zeros, which look like an empty frame with a valid CRC.
        if length == 0 or len(payload) < length or crc32c(payload) != crc:
            break
        offset, epoch, kind, value = msgpack.unpackb(payload)
        entries.append((Offset(offset), Entry(Epoch(epoch), EntryKind(kind), value)))
        position += _FRAME.size + length
    return entries, position


def _records_of(entry: Entry) -> tuple[Record, ...]:
    return decode_records(entry.data) if entry.kind is EntryKind.DATA else ()


@dataclass(frozen=True, slots=True)
class _Prepared:
    entries: Sequence[Entry]
    older: ClusterImage
    replay: Replay
    delta: ImageDelta


class MetadataTail:
    """`open`, then `run` is its task. Implements `raft.state_machine.CommitListener`."""

    def __init__(
        self,
        *,
        disk: Disk,
        path: str,
        transport: Transport,
        sources: Callable[[], Sequence[NodeId]],
        work: Work,
        random: Random,
        config: ObserverConfig | None = None,
        snapshot_bytes: int = SNAPSHOT_BYTES,
    ) -> None:
        """`sources` returns the controllers to choose from."""
        self._disk = disk
        self._path = path
        self._work = work
        self._snapshot_bytes = snapshot_bytes
        self._files = SnapshotFiles(disk, work, path)
        self._replay = Replay(ClusterImage())
        self._loader = SnapshotLoader()
        self._prepared: _Prepared | None = None
        self._subscribers: list[Subscriber] = []
        self._tail: File | None = None
        self._bytes = 0
        self._is_behind = False
        self._changed = asyncio.Event()
        self.offset = Offset(0)
        """Everything below is in `image`."""
        self.epoch = Epoch(0)
        self.fetched = 0
        """Entries fetched since `open`."""
        self.loaded = 0
        """Snapshots fetched since `open`."""
        self._current_s: float | None = None
        """When it last had everything that its source knew as committed."""
        self._noted: TailState | None = None
        self._observer = RaftObserver(transport, sources, self, work, config or ObserverConfig(), random)

    @property
    def image(self) -> ClusterImage:
        return self._replay.image

    @property
    def leader(self) -> NodeId | None:
        """The active controller, as its source reports it."""
        return None if self._observer.state is None else self._observer.state.leader

    @property
    def unhealthy_reason(self) -> str | None:
        """Why this broker cannot follow the controllers, and what to do; None while it can."""
        return self._observer.unhealthy_reason

    def subscribe(self, subscriber: Subscriber) -> None:
        """Subscribes to every change from now on; called at once with one delta for the present image, unless it is
        empty."""
        empty = ClusterImage()
        if self.offset > 0:
            subscriber(delta_between(empty, self.image), empty, self.image)
        self._subscribers.append(subscriber)

    def stale_ms(self) -> int | None:
        """Time since it last had everything that its source knew as committed; None if it never had."""
        self._note_current()
        if self._current_s is None:
            return None
        return int((asyncio.get_running_loop().time() - self._current_s) * 1000)

    def _note_current(self, *, has_news: bool = False) -> None:
        """Notes a report of the source that this copy is current: staleness is counted from the time of the report."""
        state = self._observer.state
        is_current_report = has_news or state is not self._noted
        self._noted = state
        if is_current_report and state is not None and state.leader is not None and self.offset >= state.commit:
            self._current_s = asyncio.get_running_loop().time()

    async def until(self, condition: Callable[[ClusterImage], bool]) -> None:
        """Returns when the condition holds for the image."""
        while not condition(self.image):
            self._changed.clear()
            await self._changed.wait()

    # Life cycle.

    async def open(self) -> None:
        """Reads what the last incarnation has stored."""
        self._disk.make_directory(self._path)
        await self._disk.sync_many([], [""])
        self._files.open()
        for snapshot in reversed(list(self._files.ids)):
            try:
                found = await self._files.read(snapshot)
                await self._loader.prepare(found.data)
                state = self._loader.take(found.data)
            except CorruptStateError as error:
                LOGGER.warning("%s: set aside as %s", error, await self._files.set_aside(snapshot))
                continue
            self._replay = Replay(state.image, state.pending)
            self.offset, self.epoch = snapshot
            break
        self._read_tails()
        self._observer.offset, self._observer.epoch = self.offset, self.epoch

    def _tails(self) -> list[tuple[Offset, str]]:
        names = [name for name in self._disk.list(self._path) if name.endswith(".tail")]
        return sorted((Offset(int(name.removesuffix(".tail"))), f"{self._path}/{name}") for name in names)

    def _read_tails(self) -> None:
        for _, path in self._tails():
            with closing(self._disk.open(path)) as file:
                entries, _ = decode_entries(file.read(0, file.size))
            for offset, entry in entries:
                if offset == self.offset:
                    self._apply(_records_of(entry), entry)
        # New frames go to a new file: the last one may end in the middle of a frame.
        for first, path in self._tails():
            if first >= self.offset:
                self._disk.remove(path)

    async def run(self) -> None:
        """Follows the controllers; ends by cancellation, or raises a disk error or a bug."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._observer.run())
                group.create_task(self._watch())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def _watch(self) -> None:
        wait_s = SPACE_RETRY_MIN_S / 2
        while True:
            await asyncio.sleep(0.1)
            self._note_current()
            if self._bytes >= self._snapshot_bytes or self._is_behind:
                await self._take_snapshot()
                wait_s = min(2 * wait_s, SPACE_RETRY_MAX_S) if self._is_behind else SPACE_RETRY_MIN_S / 2
                if self._is_behind:
                    await asyncio.sleep(wait_s)

    def close(self) -> None:
        if self._tail is not None:
            self._tail.close()
            self._tail = None
        self._files.close()

    # From the observer.

    async def prepare(self, first: Offset, entries: Sequence[Entry]) -> None:
        assert first == self.offset, f"entries from {first} on an image at {self.offset}"
        self._prepared = None
        if self._replay.is_open or sum(len(entry.data) for entry in entries) > SMALL_BYTES:
            self._prepared = await run_in_turns(self._prepare(entries))

    def _prepare(self, entries: Sequence[Entry]) -> Steps[_Prepared]:
        """Computes what `apply` will publish, without changing the visible image."""
        pending = self._replay.pending
        replay = Replay(self.image, None if pending is None else tuple(pending))
        # The topics of a large decision are in earlier calls: then everything is compared.
        named: list[Record] | None = None if replay.is_open else []
        for entry in entries:
            if entry.kind is EntryKind.DATA:
                records = yield from decode_steps(entry.data)
                yield from replay.apply_steps(records)
                if named is not None:
                    named += records
        delta = yield from delta_steps(self.image, replay.image, named)
        return _Prepared(entries, self.image, replay, delta)

    def apply(self, first: Offset, entries: Sequence[Entry]) -> None:
        assert first == self.offset, f"entries from {first} on an image at {self.offset}"
        older = self.image
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared.entries is entries and prepared.older is older:
            self._write_entries(first, entries)
            self._replay = prepared.replay
            self.offset, self.epoch = Offset(first + len(entries)), entries[-1].epoch
            self.fetched += len(entries)
            self._publish(older, None, prepared.delta)
            return
        # Decoded before anything is stored: every later start would fail on an unreadable entry.
        decoded = [_records_of(entry) for entry in entries]
        self._write_entries(first, entries)
        was_open = self._replay.is_open
        for records, entry in zip(decoded, entries, strict=True):
            self._apply(records, entry)
        self.fetched += len(entries)
        self._publish(older, None if was_open else [record for records in decoded for record in records])

    def _apply(self, records: tuple[Record, ...], entry: Entry) -> None:
        if records:
            self._replay.apply(records)
        self.offset, self.epoch = Offset(self.offset + 1), entry.epoch

    async def prepare_snapshot(self, data: bytes) -> None:
        await self._loader.prepare(data)

    def load_snapshot(self, snapshot: SnapshotId, data: bytes) -> None:
        loaded = self._loader.take(data)
        older = self.image
        self._replay = Replay(loaded.image, loaded.pending)
        self.offset, self.epoch = snapshot
        self.loaded += 1
        self._end_tail()
        self._bytes = self._snapshot_bytes  # the frames before it are obsolete: a snapshot is due
        self._publish(older, None)

    def _publish(self, older: ClusterImage, records: list[Record] | None, delta: ImageDelta | None = None) -> None:
        newer = self.image
        self._note_current(has_news=True)
        if newer is not older:
            if delta is None:
                delta = delta_between(older, newer, records)
            for subscriber in self._subscribers:
                subscriber(delta, older, newer)
        self._changed.set()

    # The disk.

    def _write_entries(self, first: Offset, entries: Sequence[Entry]) -> None:
        self._write(first, [encode_entry(Offset(first + number), entry) for number, entry in enumerate(entries)])

    def _write(self, first: Offset, frames: list[bytes]) -> None:
        if self._is_behind:
            return
        try:
            if self._tail is None:
                path = f"{self._path}/{first:020d}.tail"
                self._disk.remove(path)
                self._tail = self._disk.open(path, create=True)
            self._tail.append(*frames)
        except DiskFullError as error:
            LOGGER.error("the metadata copy falls behind at offset=%d: %s", first, error)
            self._end_tail()
            self._is_behind = True
            return
        self._bytes += sum(map(len, frames))

    def _end_tail(self) -> None:
        if self._tail is not None:
            self._tail.close()
            self._tail = None

    async def _take_snapshot(self) -> None:
        snapshot = SnapshotId(self.offset, self.epoch)
        pending = self._replay.pending
        was_behind, self._is_behind = self._is_behind, False  # later frames continue the snapshot
        self._bytes = 0
        self._end_tail()
        try:
            data = await self._work.run(snapshot_bytes, self.image, None if pending is None else tuple(pending))
        except WorkFailedError as error:
            # The frames stay. The next attempt follows when they have grown by half.
            self._bytes += self._snapshot_bytes // 2
            self._is_behind |= was_behind
            LOGGER.error("metadata snapshot not taken offset=%d, retrying later: %s", snapshot.offset, error)
            return
        try:
            await self._files.write(snapshot, Membership(), data)
        except DiskFullError as error:
            if not was_behind:
                LOGGER.error("metadata snapshot not taken offset=%d, retrying later: %s", snapshot.offset, error)
            # No later frame may follow a gap in the file: write none until the next snapshot.
            self._end_tail()
            self._is_behind = True
            return
        if was_behind:
            LOGGER.info("the metadata copy is complete again at offset=%d", snapshot.offset)
        await self._files.remove([known for known in self._files.ids if known < snapshot])
        for first, path in self._tails():
            if first < snapshot.offset:
                self._disk.remove(path)
