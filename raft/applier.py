"""Hands committed entries, loaded snapshots and changes of role to the state machine, in the order of the effects.

Little work is done on the spot, much of it in slices, so that heartbeats leave in between. While a snapshot is read
from the disk everything that follows waits in line; it is read again if the helper process that checks it dies.

At every moment that the owner sees, the state machine's state is that of `applied`, whatever waits in line.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from tidelog.model.errors import WorkFailedError
from tidelog.model.ids import Offset
from tidelog.raft.effects import RoleChange
from tidelog.raft.messages import Entry, SnapshotId, entry_bytes
from tidelog.raft.snapshots import SnapshotFiles
from tidelog.raft.state_machine import StateMachine, load_snapshot
from tidelog.raft.waiting import Waiting

LOGGER = logging.getLogger(__name__)

SLICE_ENTRIES = 512
READ_AGAIN_S = 1.0

Commit = tuple[Offset, tuple[Entry, ...]]


class Applier:
    def __init__(
        self,
        machine: StateMachine,
        snapshots: SnapshotFiles,
        waiting: Waiting,
        applied: Offset,
        on_applied: Callable[[], None],
    ) -> None:
        self.applied = applied
        """Everything below has been applied."""
        self.entries = 0
        self.unsaved_bytes = 0
        """Of entries applied since the state was loaded, or since the owner set this to 0: it takes a snapshot then."""
        self._machine = machine
        self._snapshots = snapshots
        self._waiting = waiting
        self._on_applied = on_applied
        self._line: deque[Commit | SnapshotId | RoleChange] = deque()
        self._is_loading = False
        self._wake = asyncio.Event()

    @property
    def is_idle(self) -> bool:
        return not self._line and not self._is_loading

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
        self._line.append(item)
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
            if not self._line:
                self._wake.clear()
                await self._wake.wait()
                continue
            item = self._line.popleft()
            if isinstance(item, SnapshotId):
                await self._load(item)
            elif isinstance(item, RoleChange):
                self._change_role(item)
            else:
                first, entries = item
                self._apply(first, entries[:SLICE_ENTRIES])
                if len(entries) > SLICE_ENTRIES:
                    self._line.appendleft((Offset(first + SLICE_ENTRIES), entries[SLICE_ENTRIES:]))
                await asyncio.sleep(0)

    async def _load(self, snapshot: SnapshotId) -> None:
        # A newer one in line makes this one, and all between them, pointless; its file may be gone already.
        newer = [index for index, item in enumerate(self._line) if isinstance(item, SnapshotId)]
        if newer:
            roles = [item for item in list(self._line)[: newer[-1]] if isinstance(item, RoleChange)]
            rest = list(self._line)[newer[-1] :]
            self._line = deque([*rest[:1], *roles, *rest[1:]])
            return
        self._is_loading = True
        try:
            found = await self._snapshots.read(snapshot)
            await load_snapshot(self._machine, snapshot, found.data)
        except WorkFailedError as error:
            LOGGER.error("snapshot offset=%d could not be read, and is read again: %s", snapshot.offset, error)
            self._line.appendleft(snapshot)
            await asyncio.sleep(READ_AGAIN_S)
            return
        finally:
            self._is_loading = False
        self.applied = snapshot.offset
        self.unsaved_bytes = 0
        self._waiting.applied(snapshot.offset, ())
        self._on_applied()
