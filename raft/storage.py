"""What a Raft member keeps: epoch and vote, its log, its snapshots. Durable before anything that depends on it is said.

Where it is kept, in one disk (a log directory) and its state store:

    store  raft/format     [cluster id, directory id, node id]: written once, see `belonging`
    store  raft/state      epoch, vote, synced end, recovering_until, loss_epoch: one value, so that it changes at once
    store  raft/snapshots  the catalogue: the snapshots that should be there, and their memberships
    store  raft/tail       entries that a cut under way must not lose, see `_keep_tail`
    disk   raft/identity   the format again, as text: tells a lost state store from a directory that is new
    disk   raft/<offset>-<epoch>.snapshot     see `snapshots`
    disk   raft/<label>-0/                    the log, as `log` keeps every log

One entry is one record and one offset. Entries of one epoch that are written together are one record batch, whose
leader epoch is the Raft epoch. The record's key is [kind: 1 byte][epoch: 4 bytes]: the batch's own leader epoch is not
under its CRC, and an epoch that rots would break Raft's proofs.

Rules:

1. `persist` ends with a sync of the log, then one commit of `raft/state` with the new synced end. An entry counts as
   durable only after that.
2. Before the log is cut or dropped, the synced end is lowered durably, together with the epoch that demands it: what
   was acknowledged in the stored epoch is there. So a log that ends below its synced end, or is corrupt below it, has
   lost what was acknowledged: the mark `recovering_until` is stored, in the commit that lowers the synced end, before
   the core exists (design: rules of safety, 6).
3. No vote without memory: a formatted directory whose `raft/state` is missing or unreadable is refused (R11). A wiped
   directory must be formatted anew and has another directory id: it is another voter (R10).
4. A snapshot that fails its checks is set aside and never leads to a deletion (R19). An older one with a complete log
   behind it takes its place; the log is kept back to the second newest snapshot for that. Without one, a member of a
   larger group comes up recovering and gets the state from the leader; a group of one refuses to start.
5. The only voter of a group that has lost synced entries refuses to start: nobody can restore them, and to go on
   without them would be to lose what was acknowledged and not to say so.
6. A snapshot that is newer than the log, or contradicts it, wins as in `RaftCore._on_snapshot_installed`: it is
   committed state, and a crash between its installation and the reset of the log leaves just this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar
from uuid import UUID

from tidelog.log.batch import read_header
from tidelog.log.config import FOREVER_MS, LogConfig
from tidelog.log.files import FilePool
from tidelog.log.group_commit import GroupCommit
from tidelog.log.log import Log
from tidelog.log.opening import proves_damage
from tidelog.model.errors import (
    CorruptBatchError,
    CorruptStateError,
    DamagedLogError,
    DiskFullError,
    StorageError,
    TidelogError,
    UnsupportedMagicError,
    UnsyncedError,
)
from tidelog.model.ids import Epoch, NodeId, Offset, PartitionId, TopicId
from tidelog.raft import belonging
from tidelog.raft.belonging import FORMAT_KEY, ROOT
from tidelog.raft.config import BootState
from tidelog.raft.effects import HardState, Persist
from tidelog.raft.entries import STORED_BYTES_MAX, UnsoundLogError, decode_entries, encode_entries
from tidelog.raft.heard import HEARD_KEY, NOBODY
from tidelog.raft.membership import DIRECTORY_ID_BYTES, Membership, VoterKey
from tidelog.raft.messages import Entry, EntryKind, SnapshotChunk, SnapshotId
from tidelog.raft.snapshots import Snapshot, SnapshotFiles
from tidelog.raft.stored import (
    Change,
    Identity,
    StoredState,
    merge,
    pack_catalogue,
    pack_state,
    pack_tail,
    unpack_catalogue,
    unpack_state,
    unpack_tail,
)
from tidelog.world.clock import Clock
from tidelog.world.disk import Disk
from tidelog.world.store import StateStore
from tidelog.world.work import Work

T = TypeVar("T")

STATE_KEY = b"raft/state"
CATALOGUE_KEY = b"raft/snapshots"
TAIL_KEY = b"raft/tail"

METADATA_LOG = PartitionId(TopicId(UUID(int=1)), 0)
METADATA_LOG_PATH = f"{ROOT}/__cluster_metadata.{UUID(int=1).hex}-0"

FIRST_SNAPSHOT = SnapshotId(Offset(0), Epoch(0))
SNAPSHOTS_KEPT = 2
READ_BYTES = 4 << 20
OPEN_ATTEMPTS_MAX = 6
OPEN_RETRY_S = 0.1
"""Doubles with each attempt: some 3 s altogether."""
CHECKPOINT_BYTES = 8 << 20
"""The log's recovery point moves up at least after so many bytes: what a restart has to scan."""


def default_log_config() -> LogConfig:
    """Entries go by snapshot, never by age or size."""
    return LogConfig(
        segment_bytes=64 << 20,
        segment_ms=FOREVER_MS,
        message_bytes_max=STORED_BYTES_MAX,
        retention_ms=-1,
        retention_bytes=-1,
        file_delete_delay_ms=0,
    )


@dataclass(slots=True)
class _Begun:
    """How far `persist` has come: on a full disk it stops where it is, and goes on when it is called again."""

    persists: Sequence[Persist]
    change: Change
    is_cut: bool = False
    has_written: bool = False
    tail: tuple[Offset, Sequence[Entry]] | None = None
    """What the cut takes along, see `_keep_tail`: where it begins, and the entries."""


class RaftStorage:
    """One member's storage. `format` once in the life of a directory, `open` once in the life of a process.

    One task at a time calls `persist` and `drop_before`; snapshots are written by one other task.
    """

    def __init__(
        self,
        *,
        disk: Disk,
        store: StateStore,
        work: Work,
        clock: Clock,
        cluster_id: str,
        node: NodeId,
        log_config: LogConfig | None = None,
        files: FilePool | None = None,
        group_commit: GroupCommit | None = None,
        on_failure: Callable[[StorageError], None] | None = None,
    ) -> None:
        """`files` and `group_commit` are the disk's, where it is shared with other logs; `on_failure` hears of a
        failed sync where it is not."""
        self.disk = disk
        self.store = store
        self.cluster_id = cluster_id
        self.node = node
        self._work = work
        self._clock = clock
        self._log_config = log_config or default_log_config()
        self._files = files or FilePool(disk)
        self._group_commit = group_commit or GroupCommit(disk, on_failure=on_failure or (lambda _: None))
        self._owns = (files is None, group_commit is None)
        self._log: Log | None = None
        self._state = StoredState(HardState(Epoch(0), None), Offset(0))
        self._is_detached = False
        self._bytes_since_checkpoint = 0
        self._begun: _Begun | None = None
        self.snapshots = SnapshotFiles(disk, work, ROOT)
        self.me = VoterKey(node, bytes(DIRECTORY_ID_BYTES))
        self.commits = 0
        self.entries_stored = 0
        self.boot_data = b""
        """The state of the snapshot that `open` chose; whoever loads it may drop it."""
        self.notes: list[str] = []
        """What opening found and did that an operator should know, as sentences."""

    # Formatting.

    async def format(self, *, directory: bytes, membership: Membership) -> None:
        """Prepare an empty directory. `directory` is a new random id; `membership` the first voters, or an empty one
        for a node that is added to a running group. Refuses one that is formatted, or was and lost its store."""
        assert len(directory) == DIRECTORY_ID_BYTES, "a directory id has 16 bytes"
        belonging.check_unformatted(self.disk, self.store)
        identity = Identity(self.cluster_id, directory, self.node)
        self.disk.make_directory(ROOT)
        await self.disk.sync_many([], [""])
        await self.snapshots.write(FIRST_SNAPSHOT, membership, b"")
        state = StoredState(HardState(Epoch(0), None), Offset(0))
        await self.store.commit(
            {
                FORMAT_KEY: belonging.pack_identity(identity),
                STATE_KEY: pack_state(state),
                CATALOGUE_KEY: pack_catalogue({FIRST_SNAPSHOT: membership}),
                HEARD_KEY: NOBODY,
            }
        )
        await belonging.write_identity(self.disk, identity)

    # Opening.

    async def open(self) -> BootState:
        """Check, repair, and say what to start from. All that is returned is durable."""
        identity = await belonging.check_identity(self.disk, self.store, cluster_id=self.cluster_id, node=self.node)
        self.me = VoterKey(self.node, identity.directory)
        self._state = self._read_state()
        catalogue = self._read_catalogue()
        self.snapshots.open()
        self._log = log = await self._retried(self._open_log)
        await self._restore_tail(log)
        snapshot = await self._choose_snapshot(log, catalogue)
        if snapshot is None:
            return await self._boot_without_state(catalogue)
        entries, sound_end = await self._read_entries(log, snapshot.id)
        await self._settle(log, snapshot, entries, sound_end, max(catalogue).offset)
        self.boot_data = snapshot.data
        hard_state, state = self._state.hard_state, self._state
        return BootState(
            hard_state,
            snapshot.id,
            snapshot.membership,
            snapshot.id.offset,
            snapshot.id.epoch,
            tuple(entries),
            state.recovering_until,
            state.loss_epoch,
        )

    def _read_state(self) -> StoredState:
        stored = belonging.read(self.disk, self.store, STATE_KEY)
        if stored is None:
            raise belonging.lost(self.disk, "its epoch and vote are gone")
        try:
            return unpack_state(stored)
        except CorruptStateError as error:
            raise belonging.lost(self.disk, str(error)) from error

    def _read_catalogue(self) -> dict[SnapshotId, Membership]:
        stored = belonging.read(self.disk, self.store, CATALOGUE_KEY)
        if stored is None:
            raise belonging.lost(self.disk, "its catalogue of snapshots is gone")
        return unpack_catalogue(stored)

    async def _retried(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The result of an attempt; others follow a failed one, unless that proves damage. Nothing is given up for an
        error that may pass: the last one is raised, and the node does not start."""
        for number in range(OPEN_ATTEMPTS_MAX - 1):
            try:
                return await attempt()
            except TidelogError as error:
                if proves_damage(error) or isinstance(error, UnsyncedError):
                    raise
                self.notes.append(f"tried again: {error}")
            await asyncio.sleep(OPEN_RETRY_S * 2**number)
        return await attempt()

    async def _open_log(self) -> Log:
        return await Log.open(
            disk=self.disk,
            store=self.store,
            work=self._work,
            group_commit=self._group_commit,
            clock=self._clock,
            files=self._files,
            path=METADATA_LOG_PATH,
            log_id=METADATA_LOG,
            config=self._log_config,
        )

    async def _choose_snapshot(self, log: Log, catalogue: dict[SnapshotId, Membership]) -> Snapshot | None:
        """The newest sound snapshot that the log continues, or that the log ends before; None if there is none."""
        for snapshot in sorted({*catalogue, *self.snapshots.ids}, reverse=True):
            if snapshot.offset < log.start_offset:
                break
            if snapshot not in self.snapshots.ids:
                self.notes.append(f"snapshot {snapshot.offset}-{snapshot.epoch} is missing")
                continue
            try:
                return await self._retried(partial(self.snapshots.read, snapshot))
            except CorruptStateError as error:
                kept = await self.snapshots.set_aside(snapshot)
                self.notes.append(f"{error}; kept as {kept}")
        if log.start_offset == 0 and catalogue:
            # Entries from the very first on are all that there is to know. Their memberships replace the newest known
            # one, which is right where they hold none.
            return Snapshot(FIRST_SNAPSHOT, catalogue[max(catalogue)], b"")
        return None

    async def _boot_without_state(self, catalogue: dict[SnapshotId, Membership]) -> BootState:
        """No sound snapshot and no complete log: a leader has the state, or nobody has."""
        newest = max(catalogue)
        membership = catalogue[newest]
        if not any(member.node != self.node for member in membership.voters):
            raise CorruptStateError(
                f"{self.disk.label}: no sound snapshot ({'; '.join(self.notes)}), and no other voter to get one from. "
                "Nothing was removed; put a copy of the file back.",
                path=self.disk.label,
            )
        state = self._state
        until = max(state.synced_end, newest.offset, state.recovering_until or 0)
        self.notes.append(f"the state up to {until} is lost here; this voter does not count until a leader restored it")
        self._is_detached = True
        # Nothing is removed: the log stays as it is until a leader has sent what replaces it.
        await self._commit(
            replace(state, synced_end=Offset(0), recovering_until=Offset(until), loss_epoch=state.hard_state.epoch)
        )
        return BootState(
            state.hard_state, FIRST_SNAPSHOT, membership, Offset(0), Epoch(0), (), Offset(until), state.hard_state.epoch
        )

    async def _read_entries(self, log: Log, snapshot: SnapshotId) -> tuple[list[Entry], Offset | None]:
        """Entries from the snapshot on, and where the sound part of the log ends; None if the log contradicts the
        snapshot, which is committed: then none of its entries from there on ever was."""
        end = log.end_offset if log.damaged is None else min(log.end_offset, log.damaged.good_end)
        if log.damaged is not None:
            self.notes.append(f"the log is damaged at {log.damaged.good_end}: {log.damaged.reason}")
        at = Offset(min(end, max(log.start_offset, snapshot.offset - 1)))
        last_epoch = snapshot.epoch if at >= snapshot.offset else Epoch(0)
        entries: list[Entry] = []
        try:
            while at < end:
                data = await self._read_batches(log, at, end)
                for offset, entry in decode_entries(data, first=at, last_epoch=last_epoch):
                    if offset == snapshot.offset - 1 and entry.epoch != snapshot.epoch:
                        self.notes.append(f"the log contradicts the snapshot at {snapshot.offset}, which is newer")
                        return [], None
                    if offset >= snapshot.offset:
                        entries.append(entry)
                    at, last_epoch = Offset(offset + 1), entry.epoch
        except UnsoundLogError as error:
            self.notes.append(f"the log is not sound: {error}")
            at = error.good_end
        return entries, at

    async def _read_batches(self, log: Log, at: Offset, end: Offset) -> bytes:
        """Batches from `at` on, many or, where one of them makes no sense, one."""
        for bytes_max in (READ_BYTES, 1):
            try:
                found = await log.read(at, bytes_max=bytes_max, end=end)
                if found.data:
                    return bytes(found.data)
            except (CorruptBatchError, UnsupportedMagicError) as error:
                self.notes.append(f"the log cannot be read from {at}: {error}")
        raise UnsoundLogError(f"offset {at}: no batch", good_end=at)

    async def _settle(
        self, log: Log, chosen: Snapshot, entries: list[Entry], sound_end: Offset | None, catalogued: Offset
    ) -> None:
        """Make state, snapshot and log agree, and note a loss of what was synced, before any file is touched.

        `catalogued` is where the newest snapshot of the catalogue ends, sound or not: one that a leader sent is
        acknowledged as soon as it is there, before the log begins anew behind it.
        """
        state, snapshot = self._state, chosen.id
        trusted_end = max(state.synced_end, snapshot.offset)
        if sound_end is not None and sound_end > trusted_end:
            # Never acknowledged. After a failed sync it may read well, and yet never reach the device.
            del entries[trusted_end - snapshot.offset :]
            sound_end = trusted_end
        end = snapshot.offset if sound_end is None else max(sound_end, snapshot.offset)
        epoch = max(state.hard_state.epoch, snapshot.epoch, entries[-1].epoch if entries else Epoch(0))
        wanted = replace(state, synced_end=end)
        if epoch > state.hard_state.epoch:
            # A crash between the sync of the log and the commit: that epoch was entered, and nothing said in it.
            wanted = replace(wanted, hard_state=HardState(epoch, None))
        # Entries that contradict a snapshot were never committed: it is no loss that they were synced.
        acknowledged = max(catalogued, state.synced_end if sound_end is not None else Offset(0))
        if end < acknowledged:
            until = Offset(max(acknowledged, state.recovering_until or 0))
            self.notes.append(f"synced entries from {end} to {acknowledged} are lost: recovering until {until}")
            wanted = replace(wanted, recovering_until=until, loss_epoch=epoch)
        if wanted.recovering_until is not None:
            self._check_can_recover(_membership_in_force(chosen, entries), end, wanted.recovering_until)
        needs_reset = sound_end is None or sound_end < snapshot.offset
        if end < log.end_offset or needs_reset:
            await self._commit(replace(wanted, synced_end=min(end, state.synced_end)))
        if needs_reset:
            await log.reset_to(snapshot.offset)
        elif log.damaged is not None or end < log.end_offset:
            await self._cut(log, end, snapshot.offset, entries)
        if wanted != self._state:
            await self._commit(wanted)

    def _check_can_recover(self, membership: Membership, end: Offset, until: Offset) -> None:
        """A leader restores what was lost. The only voter can have none: it would wait for ever (rule 5)."""
        if [member.key for member in membership.voters] != [self.me]:
            return
        raise CorruptStateError(
            f"{self.disk.label}: synced entries from {end} to {until} are lost ({'; '.join(self.notes)}), and node "
            f"{self.node} is the only voter, as far as it can read: no other has them. Put back a copy of the whole "
            "directory, log and state store together. Or, if voters were added that the lost entries named: remove "
            "this voter from their group, empty the directory, format it with --no-initial-controllers and add the "
            "node with its new directory id.",
            path=self.disk.label,
        )

    async def _cut(self, log: Log, end: Offset, first: Offset, entries: Sequence[Entry]) -> None:
        """Cut the log at start-up. `entries` from offset `first` on are what it shall hold up to `end`: those that
        shared a batch with what goes are written again, and all of them where rot in front of the cut hides it."""
        try:
            if log.damaged is None:
                await self._keep_tail(log, end, self._state.hard_state)
            await log.truncate(end)
        except (CorruptBatchError, UnsupportedMagicError, DamagedLogError) as error:
            self.notes.append(
                f"the log cannot be cut at {end} ({error}): what is known from {first} on is written anew"
            )
            await log.reset_to(first)
        if log.end_offset < first:
            await log.reset_to(first)
        if log.end_offset < end:
            self._append(log.end_offset, entries[log.end_offset - first :])
            await log.wait_durable(end - 1)
        if belonging.read(self.disk, self.store, TAIL_KEY) is not None:
            await self.store.commit({TAIL_KEY: None})

    # Running.

    @property
    def synced_end(self) -> Offset:
        return self._state.synced_end

    @property
    def log_start(self) -> Offset:
        """Where the stored log begins, which may be before what the core holds."""
        return self.log.start_offset

    @property
    def log(self) -> Log:
        assert self._log is not None, "open first"
        return self._log

    async def _commit(self, state: StoredState, more: Mapping[bytes, bytes | None] | None = None) -> None:
        self.commits += 1
        await self.store.commit({STATE_KEY: pack_state(state), **(more or {})})
        self._state = state

    async def persist(self, persists: Sequence[Persist]) -> None:
        """Carry out these effects, in order, as one; durable when this returns.

        `DiskFullError`: there was no room, and nothing of it counts yet. The same effects, before any others, are to be
        given again when there may be room. Any other error is final: what is on the disk is not known then, and the
        node has to stop.
        """
        if self._begun is None:
            self._begun = _Begun(persists, merge(persists))
        assert self._begun.persists is persists, "what found no room comes first"
        begun, change, log = self._begun, self._begun.change, self.log
        if not begun.is_cut:
            await self._cut_for(begun)
            begun.is_cut = True
        if begun.tail is not None:
            self._append_rest(begun, *begun.tail)
        if change.entries:
            self._append_rest(begun, change.first, change.entries)
        if change.entries or begun.tail is not None:
            await log.wait_durable(log.end_offset - 1)
        recovering = None if change.recovered else self._state.recovering_until
        wanted = replace(
            self._state,
            hard_state=change.hard_state,
            synced_end=Offset(change.first + len(change.entries)) if not self._is_detached else Offset(0),
            recovering_until=recovering,
        )
        if begun.tail is not None:
            await self._commit(wanted, {TAIL_KEY: None})
        elif wanted != self._state:
            await self._commit(wanted)
        self._begun = None
        if self._bytes_since_checkpoint >= CHECKPOINT_BYTES:
            with suppress(DiskFullError):  # the next one comes with the next effects
                await log.checkpoint()
                self._bytes_since_checkpoint = 0

    async def _cut_for(self, begun: _Begun) -> None:
        """Drop what the effects drop. If it fails for want of room it may be done again, whatever was done of it."""
        change, log, state = begun.change, self.log, self._state
        reset_to = change.reset_to
        if self._is_detached and (reset_to is not None or change.truncate_to is not None or change.entries):
            cut = reset_to if reset_to is not None else change.truncate_to
            reset_to = change.first if cut is None else cut
        if reset_to is not None:
            await self._commit(replace(state, hard_state=change.hard_state, synced_end=min(state.synced_end, reset_to)))
            await log.reset_to(reset_to)
            self._is_detached = False
        elif change.truncate_to is not None:
            if change.truncate_to < log.end_offset:
                begun.tail = await self._keep_tail(log, change.truncate_to, change.hard_state)
            if change.truncate_to < log.end_offset or log.intent is not None:
                await log.truncate(change.truncate_to)

    def _append_rest(self, begun: _Begun, first: Offset, entries: Sequence[Entry]) -> None:
        """Those of the entries from `first` on that are not in the log yet: some may be, from a try before."""
        there = self.log.end_offset - first
        assert there == 0 or begun.has_written, f"entries at {first} do not continue a log that ends {there} later"
        begun.has_written = True
        self._append(self.log.end_offset, entries[there:])

    def _append(self, first: Offset, entries: Sequence[Entry]) -> None:
        log = self.log
        assert first == log.end_offset, f"entries at {first} do not continue a log that ends at {log.end_offset}"
        for batch in encode_entries(first, entries, now_ms=self._clock.now_ms()):
            log.append_replicated(batch)
            self._bytes_since_checkpoint += len(batch)
        self.entries_stored += len(entries)

    async def _keep_tail(self, log: Log, end: Offset, hard_state: HardState) -> tuple[Offset, Sequence[Entry]] | None:
        """Lower the synced end to `end`, durably. The log cuts whole batches: entries below `end` that share one with
        it go into the same commit, and back into the log after the cut; or after a crash, by `_restore_tail`."""
        kept: list[Entry] = []
        first = end
        if log.start_offset < end < log.end_offset:
            data = bytes((await log.read(end - 1, bytes_max=1)).data)
            header = read_header(data)
            if header.next_offset > end:
                first = Offset(max(header.base_offset, log.start_offset))
                found = decode_entries(data[: header.size], first=first, last_epoch=Epoch(0))
                kept = [entry for offset, entry in found if offset < end]
        state = replace(self._state, hard_state=hard_state, synced_end=min(self._state.synced_end, end))
        if kept:
            await self._commit(state, {TAIL_KEY: pack_tail(first, kept)})
        elif state != self._state:
            await self._commit(state)
        return (first, kept) if kept else None

    async def _restore_tail(self, log: Log) -> None:
        """A crash came between a cut and what was to be written back: write it now."""
        stored = belonging.read(self.disk, self.store, TAIL_KEY)
        if stored is None:
            return
        first, entries = unpack_tail(stored)
        end = log.end_offset
        if log.damaged is None and first <= end < first + len(entries):
            self._append(end, entries[end - first :])
            await log.wait_durable(log.end_offset - 1)
        await self.store.commit({TAIL_KEY: None})

    async def drop_before(self, offset: Offset) -> None:
        """Entries below `offset` are in a snapshot. They are kept back to the second newest one, if there are two."""
        ids = self.snapshots.ids
        kept = min(offset, ids[-min(len(ids), SNAPSHOTS_KEPT)].offset) if ids else Offset(0)
        if kept > self.log.start_offset and not self._is_detached:
            await self.log.advance_start(kept)
            await self.log.reap(self._clock.now_ms())

    # Snapshots.

    async def write_snapshot(self, snapshot: SnapshotId, membership: Membership, data: bytes) -> None:
        """Store a snapshot that was taken here; older ones but one go."""
        await self.snapshots.write(snapshot, membership, data)
        await self._catalogue(snapshot, membership)

    async def write_piece(self, chunk: SnapshotChunk) -> int | Snapshot:
        """As `SnapshotFiles.write_piece`; a snapshot that is whole is in the catalogue when this returns."""
        outcome = await self.snapshots.write_piece(chunk)
        if isinstance(outcome, Snapshot):
            await self._catalogue(outcome.id, outcome.membership)
        return outcome

    async def _catalogue(self, snapshot: SnapshotId, membership: Membership) -> None:
        catalogue = self._read_catalogue()
        catalogue[snapshot] = membership
        # Those that were set aside do not count: what is left of the sound ones stays.
        kept = [known for known in sorted(catalogue) if known in self.snapshots.ids][-SNAPSHOTS_KEPT:]
        await self.store.commit({CATALOGUE_KEY: pack_catalogue({known: catalogue[known] for known in kept})})
        old = [known for known in self.snapshots.ids if known < kept[0]]
        if old:
            await self.snapshots.remove(old)

    async def close(self) -> None:
        """Close in order. Nothing may be under way."""
        self.snapshots.close()
        if self._log is not None:
            await self._log.close()
        owns_files, owns_commit = self._owns
        if owns_commit:
            await self._group_commit.close()
        if owns_files:
            self._files.close()


def _membership_in_force(snapshot: Snapshot, entries: Sequence[Entry]) -> Membership:
    for entry in reversed(entries):
        if entry.kind is EntryKind.MEMBERSHIP:
            return Membership.decode(entry.data)
    return snapshot.membership
