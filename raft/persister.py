"""Carries out persist effects: one at a time, all that wait in one go. One sync is shared by everybody who waits.

On a full disk it tries again until there is room: nothing is told as durable meanwhile, so this member acknowledges
nothing and votes for nobody, and the others go on without it. What waits is bounded; past the bound the member stops.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tidelog.model.errors import DiskFullError
from tidelog.model.ids import Offset
from tidelog.raft.effects import Persist
from tidelog.raft.storage import RaftStorage

LOGGER = logging.getLogger(__name__)

ENTRIES_AT_ONCE_MAX = 50_000
WAITING_BYTES_MAX = 64 << 20
"""Of entries that wait for room on a full disk."""
ROOM_WAIT_S, TOLD_EVERY = 0.25, 40


class Persister:
    """Owns the stored log: nobody else writes to it while `run` runs. Any error of the storage but a full disk ends
    `run`."""

    def __init__(self, storage: RaftStorage, persisted: Callable[[int], None]) -> None:
        self.rounds = 0
        """Each ends with one commit, after one sync of the log if there were entries."""
        self._storage = storage
        self._persisted = persisted
        self._waiting: list[Persist] = []
        self._newest = self._done = 0
        self._drop_before: tuple[int, Offset] | None = None
        """With the number of the last persist that was asked for before it."""
        self._wake = asyncio.Event()

    def put(self, persist: Persist) -> None:
        self._newest = persist.number
        self._waiting.append(persist)
        self._wake.set()

    def drop_before(self, offset: Offset) -> None:
        """Remove entries below `offset` when there is time, after all that was put before: a snapshot may cover entries
        that are not written yet, in the place of others that are not cut yet."""
        self._drop_before = (self._newest, offset)
        self._wake.set()

    async def run(self) -> None:
        while True:
            if self._waiting:
                await self._persist()
            # Also under steady load, or the stored log would grow without bound.
            if self._drop_before is not None and self._drop_before[0] <= self._done:
                offset, self._drop_before = self._drop_before[1], None
                try:
                    await self._storage.drop_before(offset)
                except DiskFullError as error:
                    LOGGER.warning("entries below %d stay until the next snapshot: %s", offset, error)
            elif not self._waiting:
                self._wake.clear()
                await self._wake.wait()

    async def _persist(self) -> None:
        count, entries = 0, 0
        while count < len(self._waiting) and entries < ENTRIES_AT_ONCE_MAX:
            entries += len(self._waiting[count].entries)
            count += 1
        batch = self._waiting[:count]
        del self._waiting[:count]
        await self._persist_with_room(batch)
        self.rounds += 1
        self._done = batch[-1].number
        self._persisted(self._done)

    async def _persist_with_room(self, batch: list[Persist]) -> None:
        """The same batch until it is stored: it may be stored in part, and goes on from there."""
        tries = 0
        while True:
            try:
                await self._storage.persist(batch)
                return
            except DiskFullError as error:
                if tries % TOLD_EVERY == 0:
                    LOGGER.error("this member takes no part until there is room: %s", error)
                tries += 1
                waiting = [*batch, *self._waiting]
                if sum(len(entry.data) for one in waiting for entry in one.entries) > WAITING_BYTES_MAX:
                    raise
            await asyncio.sleep(ROOM_WAIT_S)
