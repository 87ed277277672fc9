"""Executes persist effects: all pending ones at once, with one shared sync.

On a full disk it retries until there is space. Meanwhile nothing is reported as durable, so this member acknowledges
nothing and votes for nobody, and the others continue without it. Pending bytes are bounded; past the bound the member
stops.
"""

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
"""Limit of entries that wait for space on a full disk."""
SPACE_RETRY_S, LOG_EVERY = 0.25, 40


class Persister:
    """Owns the stored log: nothing else writes to it while `run` runs. Any storage error but a full disk ends `run`."""

    def __init__(self, storage: RaftStorage, persisted: Callable[[int], None]) -> None:
        self.rounds = 0
        """Each ends with one commit, after one sync of the log if there were entries."""
        self._storage = storage
        self._persisted = persisted
        self._waiting: list[Persist] = []
        self._newest = self._done = 0
        self._drop_before: tuple[int, Offset] | None = None
        """With the number of the last persist that was submitted before it."""
        self._wake = asyncio.Event()

    def put(self, persist: Persist) -> None:
        self._newest = persist.number
        self._waiting.append(persist)
        self._wake.set()

    def drop_before(self, offset: Offset) -> None:
        """Removes entries below `offset`, after all effects that were put before: a snapshot may cover entries that are
        not written yet, in place of others that are not truncated yet."""
        self._drop_before = (self._newest, offset)
        self._wake.set()

    async def run(self) -> None:
        while True:
            if self._waiting:
                await self._persist()
            # Under steady load, too, or the stored log would grow without bound.
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
        await self._persist_with_retries(batch)
        self.rounds += 1
        self._done = batch[-1].number
        self._persisted(self._done)

    async def _persist_with_retries(self, batch: list[Persist]) -> None:
        """Retries the same batch until it is stored; a partly stored batch continues where it stopped."""
        tries = 0
        while True:
            try:
                await self._storage.persist(batch)
                if tries:
                    LOGGER.info("this member takes part again: there is space after %d attempts", tries)
                return
            except DiskFullError as error:
                if tries % LOG_EVERY == 0:
                    LOGGER.error("this member does not take part until there is space: %s", error)
                tries += 1
                waiting = [*batch, *self._waiting]
                if sum(len(entry.data) for persist in waiting for entry in persist.entries) > WAITING_BYTES_MAX:
                    raise
            await asyncio.sleep(SPACE_RETRY_S)
