"""Stores epoch, vote, log and snapshots of a Raft member.

A write is durable before anything that depends on it is sent.

Layout, in one disk (a log directory) and its state store:

    store  raft/format     [cluster id, directory id, node id]: written once, see `directory_identity`
    store  raft/state      epoch, vote, synced end, recovering_until, loss_epoch: one value, so changes are atomic
    store  raft/snapshots  the catalogue: the expected snapshots and their memberships
    store  raft/tail       entries that a running truncation must not lose, see `_keep_tail`
    disk   raft/identity   the format again, as text: distinguishes a lost state store from a new directory
    disk   raft/<offset>-<epoch>.snapshot     see `snapshots`
    disk   raft/<label>-0/                    the log, in the format of `log`

One entry is one record and one offset. Entries of one epoch that are written together are one record batch, whose
leader epoch is the Raft epoch. The record's key is [kind: 1 byte][epoch: 4 bytes]: the batch's leader epoch is not
covered by its CRC, and a corrupt epoch would break Raft's proofs.

Rules:

1. `persist` ends with a sync of the log, then one commit of `raft/state` with the new synced end. An entry counts as
   durable only after that.
2. Before the log is truncated or reset, the synced end is lowered durably, together with the epoch that requires it. So
   a log that ends below its synced end, or is corrupt below it, has lost acknowledged entries: `recovering_until` is
   stored, in the commit that lowers the synced end, before the core exists. Without it, the core could vote for a
   candidate that lacks those entries.
3. A formatted directory whose `raft/state` is missing or unreadable is rejected: it may have voted. A wiped directory
   must be formatted again and has another directory id: it is a different voter.
4. A snapshot that fails its checks is set aside and never leads to a deletion. An older one with a complete log
   after it replaces it; the log is kept back to the second newest snapshot for that. Without one, a member of a larger
   group starts as recovering and gets the state from the leader; a group of one does not start.
5. A single voter that has lost synced entries does not start: no other node can restore them, and starting without
   them would silently lose acknowledged data.
6. A snapshot that is newer than the log, or contradicts it, wins as in `RaftCore._on_snapshot_installed`: it is
   committed state, and a crash between its installation and the reset of the log leaves this state.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar
from uuid import UUID

from tidelog.log.batch import read_header
from tidelog.log.config import FOREVER_MS, LogConfig
from tidelog.log.file_pool import FilePool
from tidelog.log.group_commit import GroupCommit
from tidelog.log.log import Log
from tidelog.log.log_opener import proves_damage
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
from tidelog.raft import directory_identity
from tidelog.raft.config import BootState
from tidelog.raft.directory_identity import FORMAT_KEY, ROOT
from tidelog.raft.effects import HardState, Persist
from tidelog.raft.entries import STORED_BYTES_MAX, CorruptEntriesError, decode_entries, encode_entries
from tidelog.raft.membership import DIRECTORY_ID_BYTES, Membership, VoterKey
from tidelog.raft.messages import Entry, EntryKind, SnapshotChunk, SnapshotId
from tidelog.raft.persistent_state import (
    Identity,
    MergedPersist,
    PersistentState,
    merge,
    pack_catalogue,
    pack_state,
    pack_tail,
    unpack_catalogue,
    unpack_state,
    unpack_tail,
)
from tidelog.raft.seen_peers import NO_PEERS, SEEN_PEERS_KEY
from tidelog.raft.snapshots import Snapshot, SnapshotFiles
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
"""Initial backoff; doubles with each attempt, some 3 s in total."""
CHECKPOINT_BYTES = 8 << 20
"""The log's recovery point advances at least after this many bytes, which bounds the scan at a restart."""


def default_log_config() -> LogConfig:
    """Entries are dropped by snapshot, never by age or size."""
    return LogConfig(
        segment_bytes=64 << 20,
        segment_ms=FOREVER_MS,
        message_bytes_max=STORED_BYTES_MAX,
        retention_ms=-1,
        retention_bytes=-1,
        file_delete_delay_ms=0,
    )


@dataclass(slots=True)
class _PersistProgress:
    """The progress of `persist`: on a full disk it stops, and continues when it is called again."""

    persists: Sequence[Persist]
    change: MergedPersist
    is_truncated: bool = False
    has_written: bool = False
    tail: tuple[Offset, Sequence[Entry]] | None = None
    """What the truncation also removes, see `_keep_tail`: first offset and entries."""


class RaftStorage:
    """One member's storage. `format` once per directory, `open` once per process.

    One task at a time calls `persist` and `drop_before`; one other task writes snapshots.
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
        """`files` and `group_commit` are passed if other logs share the disk; otherwise `on_failure` is called for a
        failed sync."""
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
        self._state = PersistentState(HardState(Epoch(0), None), Offset(0))
        self._is_detached = False
        self._bytes_since_checkpoint = 0
        self._progress: _PersistProgress | None = None
        self.snapshots = SnapshotFiles(disk, work, ROOT)
        self.me = VoterKey(node, bytes(DIRECTORY_ID_BYTES))
        self.boot_data = b""
        """The state of the snapshot that `open` chose; the driver drops it after loading."""
        self.notes: list[str] = []
        """Messages for the operator about what `open` found and repaired."""

    # Formatting.

    async def format(self, *, directory: bytes, membership: Membership) -> None:
        """Formats an empty directory. `directory` is a new random id; `membership` the first voters, or an empty one
        for a node that joins a running group. Rejects a directory that is formatted, or was and lost its store."""
        assert len(directory) == DIRECTORY_ID_BYTES, "a directory id has 16 bytes"
        directory_identity.check_unformatted(self.disk, self.store)
        identity = Identity(self.cluster_id, directory, self.node)
        self.disk.make_directory(ROOT)
        await self.disk.sync_many([], [""])
        await self.snapshots.write(FIRST_SNAPSHOT, membership, b"")
        state = PersistentState(HardState(Epoch(0), None), Offset(0))
        await self.store.commit(
            {
                FORMAT_KEY: directory_identity.pack_identity(identity),
                STATE_KEY: pack_state(state),
                CATALOGUE_KEY: pack_catalogue({FIRST_SNAPSHOT: membership}),
                SEEN_PEERS_KEY: NO_PEERS,
            }
        )
        await directory_identity.write_identity(self.disk, identity)

    # Opening.

    async def open(self) -> BootState:
        """Checks and repairs the storage; returns the state to start from. All of it is durable."""
        identity = await directory_identity.check_identity(
            self.disk, self.store, cluster_id=self.cluster_id, node=self.node
        )
        self.me = VoterKey(self.node, identity.directory)
        self._state = self._read_state()
        catalogue = self._read_catalogue()
        self.snapshots.open()
        self._log = log = await self._retried(self._open_log)
        await self._restore_tail(log)
        snapshot = await self._choose_snapshot(log, catalogue)
        if snapshot is None:
            return await self._boot_without_state(catalogue)
        if snapshot.id not in catalogue and snapshot.id != FIRST_SNAPSHOT:
            # Received or taken by a process that failed before it could rely on it. The log may restart after it.
            await self.snapshots.name_again(snapshot.id)
            await self._catalogue(snapshot.id, snapshot.membership)
        entries, sound_end = await self._read_entries(log, snapshot.id)
        await self._reconcile(log, snapshot, entries, sound_end, max(catalogue).offset)
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

    def _read_state(self) -> PersistentState:
        stored = directory_identity.read(self.disk, self.store, STATE_KEY)
        if stored is None:
            raise directory_identity.lost(self.disk, "its epoch and vote are gone")
        try:
            return unpack_state(stored)
        except CorruptStateError as error:
            raise directory_identity.lost(self.disk, str(error)) from error

    def _read_catalogue(self) -> dict[SnapshotId, Membership]:
        stored = directory_identity.read(self.disk, self.store, CATALOGUE_KEY)
        if stored is None:
            raise directory_identity.lost(self.disk, "its catalogue of snapshots is gone")
        return unpack_catalogue(stored)

    async def _retried(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Retries an operation unless its error proves damage. Data is never given up for an error that may be
        transient: the last error is raised, and the node does not start."""
        for number in range(OPEN_ATTEMPTS_MAX - 1):
            try:
                return await attempt()
            except TidelogError as error:
                if proves_damage(error) or isinstance(error, UnsyncedError):
                    raise
                self.notes.append(f"retried: {error}")
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
        """Returns the newest sound snapshot that the log continues, or that is newer than the log; None if there is
        none."""
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
            # The log holds every entry. Their memberships replace the newest known one, which is right where they hold
            # none.
            return Snapshot(FIRST_SNAPSHOT, catalogue[max(catalogue)], b"")
        return None

    async def _boot_without_state(self, catalogue: dict[SnapshotId, Membership]) -> BootState:
        """Starts without a sound snapshot and without a complete log: only a leader may have the state."""
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
        self.notes.append(f"the state up to {until} is lost here; this voter does not count until a leader restores it")
        self._is_detached = True
        # Nothing is removed: the log stays until a leader has sent what replaces it.
        await self._commit(
            replace(state, synced_end=Offset(0), recovering_until=Offset(until), loss_epoch=state.hard_state.epoch)
        )
        return BootState(
            state.hard_state, FIRST_SNAPSHOT, membership, Offset(0), Epoch(0), (), Offset(until), state.hard_state.epoch
        )

    async def _read_entries(self, log: Log, snapshot: SnapshotId) -> tuple[list[Entry], Offset | None]:
        """Returns the entries from the snapshot on, and where the sound part of the log ends; None if the log
        contradicts the snapshot: the snapshot is committed, so none of the log's entries from there on ever was."""
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
        except CorruptEntriesError as error:
            self.notes.append(f"the log is not sound: {error}")
            at = error.good_end
        return entries, at

    async def _read_batches(self, log: Log, at: Offset, end: Offset) -> bytes:
        """Returns batches from `at` on: many or, if one of them is invalid, one."""
        for bytes_max in (READ_BYTES, 1):
            try:
                read = await log.read(at, bytes_max=bytes_max, end=end)
                if read.data:
                    return bytes(read.data)
            except (CorruptBatchError, UnsupportedMagicError) as error:
                self.notes.append(f"the log is unreadable from {at}: {error}")
        raise CorruptEntriesError(f"offset {at}: no batch", good_end=at)

    async def _reconcile(
        self, log: Log, chosen: Snapshot, entries: list[Entry], sound_end: Offset | None, catalogued: Offset
    ) -> None:
        """Makes state, snapshot and log agree. Stores a loss of synced data before any file changes.

        `catalogued` is the offset of the newest catalogued snapshot, sound or not: a received one is acknowledged as
        soon as it is stored, before the log restarts after it.
        """
        state, snapshot = self._state, chosen.id
        trusted_end = max(state.synced_end, snapshot.offset)
        if sound_end is not None and sound_end > trusted_end:
            # Never acknowledged. After a failed sync it may be readable, and yet never reach the device.
            del entries[trusted_end - snapshot.offset :]
            sound_end = trusted_end
        end = snapshot.offset if sound_end is None else max(sound_end, snapshot.offset)
        epoch = max(state.hard_state.epoch, snapshot.epoch, entries[-1].epoch if entries else Epoch(0))
        wanted = replace(state, synced_end=end)
        if epoch > state.hard_state.epoch:
            # A crash between the sync of the log and the commit: that epoch was entered, and no message sent in it.
            wanted = replace(wanted, hard_state=HardState(epoch, None))
        # Entries that contradict a snapshot were never committed: they are no loss, even if synced.
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
            await self._truncate_at_start(log, end, snapshot.offset, entries)
        if wanted != self._state:
            await self._commit(wanted)

    def _check_can_recover(self, membership: Membership, end: Offset, until: Offset) -> None:
        """Rejects a single voter: no leader could restore the lost entries, and it would wait for ever (rule 5)."""
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

    async def _truncate_at_start(self, log: Log, end: Offset, first: Offset, entries: Sequence[Entry]) -> None:
        """Truncates the log at start. `entries` from offset `first` on are what it must hold up to `end`: those that
        shared a batch with removed entries are written again, and all of them where corruption before the truncation
        point hides it."""
        try:
            if log.damaged is None:
                await self._keep_tail(log, end, self._state.hard_state)
            await log.truncate(end)
        except (CorruptBatchError, UnsupportedMagicError, DamagedLogError) as error:
            self.notes.append(
                f"the log cannot be truncated at {end} ({error}): entries from {first} on are written again"
            )
            await log.reset_to(first)
        if log.end_offset < first:
            await log.reset_to(first)
        if log.end_offset < end:
            self._append(log.end_offset, entries[log.end_offset - first :])
            await log.wait_durable(end - 1)
        if directory_identity.read(self.disk, self.store, TAIL_KEY) is not None:
            await self.store.commit({TAIL_KEY: None})

    # Running.

    @property
    def synced_end(self) -> Offset:
        return self._state.synced_end

    @property
    def log_start(self) -> Offset:
        """Start of the stored log, which may be before that of the core's log."""
        return self.log.start_offset

    @property
    def log(self) -> Log:
        assert self._log is not None, "open first"
        return self._log

    def validate(self) -> None:
        """Asserts rules 1 and 2: what the stored synced end promises is on the device."""
        durable_end, synced_end = self.log.durable_end, self._state.synced_end
        assert synced_end <= durable_end, f"synced up to {synced_end} is stored, the log is durable up to {durable_end}"

    async def _commit(self, state: PersistentState, more: Mapping[bytes, bytes | None] | None = None) -> None:
        await self.store.commit({STATE_KEY: pack_state(state), **(more or {})})
        self._state = state

    async def persist(self, persists: Sequence[Persist]) -> None:
        """Executes these effects, in order, as one; durable when this returns.

        `DiskFullError`: there was no space, and nothing of it counts yet. Call it again with the same effects, before
        any others, when there may be space. Any other error is final: the state on disk is unknown then, and the node
        has to stop.
        """
        if self._progress is None:
            self._progress = _PersistProgress(persists, merge(persists))
        assert self._progress.persists is persists, "effects that found no space come first"
        progress, change, log = self._progress, self._progress.change, self.log
        if not progress.is_truncated:
            await self._truncate_for(progress)
            progress.is_truncated = True
        if progress.tail is not None:
            self._append_rest(progress, *progress.tail)
        if change.entries:
            self._append_rest(progress, change.first, change.entries)
        if change.entries or progress.tail is not None:
            await log.wait_durable(log.end_offset - 1)
        recovering = None if change.recovered else self._state.recovering_until
        wanted = replace(
            self._state,
            hard_state=change.hard_state,
            synced_end=Offset(change.first + len(change.entries)) if not self._is_detached else Offset(0),
            recovering_until=recovering,
        )
        if progress.tail is not None:
            await self._commit(wanted, {TAIL_KEY: None})
        elif wanted != self._state:
            await self._commit(wanted)
        self._progress = None
        if self._bytes_since_checkpoint >= CHECKPOINT_BYTES:
            with suppress(DiskFullError):  # retried with the next effects
                await log.checkpoint()
                self._bytes_since_checkpoint = 0

    async def _truncate_for(self, progress: _PersistProgress) -> None:
        """Truncates or resets the log for the effects. If it fails without space, it is repeatable."""
        change, log, state = progress.change, self.log, self._state
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
                progress.tail = await self._keep_tail(log, change.truncate_to, change.hard_state)
            if change.truncate_to < log.end_offset or log.intent is not None:
                await log.truncate(change.truncate_to)

    def _append_rest(self, progress: _PersistProgress, first: Offset, entries: Sequence[Entry]) -> None:
        """Appends those of the entries from `first` on that an earlier try has not appended."""
        there = self.log.end_offset - first
        assert there == 0 or progress.has_written, f"entries at {first} do not continue a log that ends {there} later"
        progress.has_written = True
        self._append(self.log.end_offset, entries[there:])

    def _append(self, first: Offset, entries: Sequence[Entry]) -> None:
        log = self.log
        assert first == log.end_offset, f"entries at {first} do not continue a log that ends at {log.end_offset}"
        for batch in encode_entries(first, entries, now_ms=self._clock.now_ms()):
            log.append_replicated(batch)
            self._bytes_since_checkpoint += len(batch)

    async def _keep_tail(self, log: Log, end: Offset, hard_state: HardState) -> tuple[Offset, Sequence[Entry]] | None:
        """Lowers the synced end to `end`, durably. The log truncates whole batches: the same commit stores entries
        below `end` that share a batch with removed ones; they return to the log after the truncation or, after a crash,
        by `_restore_tail`."""
        kept: list[Entry] = []
        first = end
        if log.start_offset < end < log.end_offset:
            data = bytes((await log.read(end - 1, bytes_max=1)).data)
            header = read_header(data)
            if header.next_offset > end:
                first = Offset(max(header.base_offset, log.start_offset))
                decoded = decode_entries(data[: header.size], first=first, last_epoch=Epoch(0))
                kept = [entry for offset, entry in decoded if offset < end]
        state = replace(self._state, hard_state=hard_state, synced_end=min(self._state.synced_end, end))
        if kept:
            await self._commit(state, {TAIL_KEY: pack_tail(first, kept)})
        elif state != self._state:
            await self._commit(state)
        return (first, kept) if kept else None

    async def _restore_tail(self, log: Log) -> None:
        """Writes back entries that a crash after a truncation left in the state store."""
        stored = directory_identity.read(self.disk, self.store, TAIL_KEY)
        if stored is None:
            return
        first, entries = unpack_tail(stored)
        end = log.end_offset
        if log.damaged is None and first <= end < first + len(entries):
            self._append(end, entries[end - first :])
            await log.wait_durable(log.end_offset - 1)
        await self.store.commit({TAIL_KEY: None})

    async def drop_before(self, offset: Offset) -> None:
        """Drops entries below `offset`, which a snapshot covers, but keeps them back to the second newest snapshot if
        there are two."""
        ids = self.snapshots.ids
        kept = min(offset, ids[-min(len(ids), SNAPSHOTS_KEPT)].offset) if ids else Offset(0)
        if kept > self.log.start_offset and not self._is_detached:
            await self.log.advance_start(kept)
            await self.log.remove_deleted(self._clock.now_ms())

    # Snapshots.

    async def write_snapshot(self, snapshot: SnapshotId, membership: Membership, data: bytes) -> None:
        """Stores a snapshot that was taken here; removes all older ones but one."""
        await self.snapshots.write(snapshot, membership, data)
        await self._catalogue(snapshot, membership)

    async def write_chunk(self, chunk: SnapshotChunk) -> int | Snapshot:
        """Like `SnapshotFiles.write_chunk`; a complete snapshot is in the catalogue when this returns."""
        outcome = await self.snapshots.write_chunk(chunk)
        if isinstance(outcome, Snapshot):
            await self._catalogue(outcome.id, outcome.membership)
        return outcome

    async def _catalogue(self, snapshot: SnapshotId, membership: Membership) -> None:
        catalogue = self._read_catalogue()
        catalogue[snapshot] = membership
        # Snapshots that were set aside do not count: the sound ones stay.
        kept = [known for known in sorted(catalogue) if known in self.snapshots.ids][-SNAPSHOTS_KEPT:]
        await self.store.commit({CATALOGUE_KEY: pack_catalogue({known: catalogue[known] for known in kept})})
        old = [known for known in self.snapshots.ids if known < kept[0]]
        if old:
            await self.snapshots.remove(old)

    async def close(self) -> None:
        """Closes log and files. No operation may be running."""
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
