"""Applies committed entries, snapshots and role changes to the state machine, in the order of the effects.

Small batches apply inline, large ones in slices, so that heartbeats are sent in between. While a snapshot is read from
the disk, everything after it waits; the read is retried if the helper process that checks it dies.

At every moment that the owner sees, the state machine has the state of `applied`.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tidelog.model.errors import WorkFailedError
from tidelog.model.ids import Offset
from tidelog.raft.effects import RoleChange
from tidelog.raft.messages import Entry, SnapshotId, entry_bytes
from tidelog.raft.pending_requests import PendingRequests
from tidelog.raft.snapshots import SnapshotFiles
from tidelog.raft.state_machine import StateMachine, load_snapshot

LOGGER = logging.getLogger(__name__)

SLICE_ENTRIES = 512
READ_RETRY_S = 1.0

Commit = tuple[Offset, tuple[Entry, ...]]


@dataclass(eq=False)
class Applier:
    _machine: StateMachine
    _snapshots: SnapshotFiles
    _waiting: PendingRequests
    applied: Offset
    """Everything below has been applied."""
    _on_applied: Callable[[], None]
    entries: int = 0
    unsaved_bytes: int = 0
    """Bytes of entries applied since the last snapshot was loaded or requested; the owner resets it."""
    _queue: deque[Commit | SnapshotId | RoleChange] = field(default_factory=deque)
    _is_loading: bool = False
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_idle(self) -> bool:
        return not self._queue and not self._is_loading

    def load(self, snapshot: SnapshotId) -> None:
        self._put(snapshot)

    def commit(self, first: Offset, entries: tuple[Entry, ...]) -> None:
        if self.is_idle and len(entries) <= SLICE_ENTRIES:
            self._apply(first, entries)
        else:
            self._put((first, entries))

    def role_changed(self, change: RoleChange) -> None:
        if self.is_idle:
            self._change_role(change)
        else:
            self._put(change)

    def _put(self, item: Commit | SnapshotId | RoleChange) -> None:
        self._queue.append(item)
        self._wake.set()

    def _apply(self, first: Offset, entries: tuple[Entry, ...]) -> None:
        assert first == self.applied, f"entries from {first} on, the state is at {self.applied}"
        self._machine.apply(first, entries)
        self.applied = Offset(first + len(entries))
        self.entries += len(entries)
        self.unsaved_bytes += sum(map(entry_bytes, entries))
        self._waiting.applied(first, entries)
        self._on_applied()

    def _change_role(self, change: RoleChange) -> None:
        self._waiting.role_changed(change)
        self._machine.role_changed(change)

    async def run(self) -> None:
        while True:
            if not self._queue:
                self._wake.clear()
                await self._wake.wait()
                continue
            item = self._queue.popleft()
            if isinstance(item, SnapshotId):
                await self._load(item)
            elif isinstance(item, RoleChange):
                self._change_role(item)
            else:
                first, entries = item
                self._apply(first, entries[:SLICE_ENTRIES])
                if len(entries) > SLICE_ENTRIES:
                    self._queue.appendleft((Offset(first + SLICE_ENTRIES), entries[SLICE_ENTRIES:]))
                await asyncio.sleep(0)

    async def _load(self, snapshot: SnapshotId) -> None:
        # A newer queued snapshot makes this one, and everything in between, obsolete; its file may be gone already.
        newer = [index for index, item in enumerate(self._queue) if isinstance(item, SnapshotId)]
        if newer:
            roles = [item for item in list(self._queue)[: newer[-1]] if isinstance(item, RoleChange)]
            rest = list(self._queue)[newer[-1] :]
            self._queue = deque([*rest[:1], *roles, *rest[1:]])
            return
        self._is_loading = True
        try:
            loaded = await self._snapshots.read(snapshot)
            await load_snapshot(self._machine, snapshot, loaded.data)
        except WorkFailedError as error:
            LOGGER.error("snapshot offset=%d could not be read, retrying: %s", snapshot.offset, error)
            self._queue.appendleft(snapshot)
            await asyncio.sleep(READ_RETRY_S)
            return
        finally:
            self._is_loading = False
        self.applied = snapshot.offset
        self.unsaved_bytes = 0
        self._waiting.applied(snapshot.offset, ())
        self._on_applied()
