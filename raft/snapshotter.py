"""The snapshot work of a member: take them, receive them, read them out for peers. One task writes at a time."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tidelog.model.errors import CorruptStateError, StorageError
from tidelog.model.ids import NodeId
from tidelog.raft.effects import SnapshotPiece
from tidelog.raft.membership import Membership
from tidelog.raft.messages import (
    Event,
    SnapshotChunk,
    SnapshotFailed,
    SnapshotId,
    SnapshotInstalled,
    SnapshotRead,
    SnapshotTaken,
    SnapshotWritten,
)
from tidelog.raft.snapshots import Snapshot
from tidelog.raft.state_machine import SnapshotJob
from tidelog.raft.storage import RaftStorage
from tidelog.world.work import Work

LOGGER = logging.getLogger(__name__)


class Take(NamedTuple):
    """A state to be stored as a snapshot."""

    id: SnapshotId
    membership: Membership
    state: bytes | SnapshotJob


class Snapshotter:
    """`run` is its task. Outcomes are events for the core, given to `post`."""

    def __init__(self, storage: RaftStorage, work: Work, post: Callable[[Event], None]) -> None:
        self.taken = 0
        self.installed = 0
        self.refused = 0
        self.is_taking = False
        self._storage = storage
        self._work = work
        self._post = post
        self._line: deque[SnapshotChunk | Take] = deque()
        self._wake = asyncio.Event()
        self._retake: Callable[[], None] | None = None
        self._rotten: list[SnapshotPiece] = []

    def start(self, retake: Callable[[], None]) -> None:
        """`retake` takes a snapshot of the state as it is: one that was to be sent is spoilt."""
        self._retake = retake

    def write(self, chunk: SnapshotChunk) -> None:
        self._line.append(chunk)
        self._wake.set()

    def take(self, take: Take) -> None:
        assert not self.is_taking, "one snapshot is taken at a time"
        self.is_taking = True
        self._line.append(take)
        self._wake.set()

    async def run(self) -> None:
        while True:
            if not self._line:
                self._wake.clear()
                await self._wake.wait()
                continue
            item = self._line.popleft()
            if isinstance(item, Take):
                await self._take(item)
            else:
                await self._write(item)

    async def _take(self, take: Take) -> None:
        state = take.state
        data = state if isinstance(state, bytes) else await self._work.run(state.encode, *state.values)
        newest = self._storage.snapshots.ids[-1] if self._storage.snapshots.ids else None
        # One that was received meanwhile may be newer: then this one is of no use.
        if newest is None or newest <= take.id:
            await self._storage.write_snapshot(take.id, take.membership, data)
            self.taken += 1
            LOGGER.info("snapshot taken offset=%d epoch=%d bytes=%d", take.id.offset, take.id.epoch, len(data))
            self._post(SnapshotTaken(take.id))
        self.is_taking = False
        for piece in self._rotten:
            self._post(_gone(piece))
        self._rotten.clear()

    async def _write(self, chunk: SnapshotChunk) -> None:
        try:
            outcome = await self._storage.write_piece(chunk)
        except CorruptStateError as error:
            self.refused += 1
            LOGGER.warning("snapshot from node=%d refused: %s", chunk.sender, error)
            self._post(SnapshotFailed(chunk.snapshot))
            return
        if isinstance(outcome, Snapshot):
            self.installed += 1
            LOGGER.info("snapshot installed offset=%d epoch=%d", outcome.id.offset, outcome.id.epoch)
            self._post(SnapshotInstalled(outcome.id, outcome.membership))
        else:
            self._post(SnapshotWritten(chunk.snapshot, outcome))

    async def read(self, piece: SnapshotPiece) -> None:
        """Read a piece for a peer. The first one of a transfer checks the whole: a spoilt file is never sent."""
        snapshots = self._storage.snapshots
        if piece.position == 0 and piece.snapshot in snapshots.ids and not await self._is_sound(piece.snapshot):
            self._rotten.append(piece)
            assert self._retake is not None, "start first"
            self._retake()
            return
        found = await snapshots.read_piece(piece.snapshot, piece.position)
        if found is None:
            self._post(_gone(piece))
        else:
            data, size = found
            self._post(SnapshotRead(piece.peer, piece.snapshot, piece.position, data, size))

    async def _is_sound(self, snapshot: SnapshotId) -> bool:
        try:
            await self._storage.snapshots.read(snapshot)
        except CorruptStateError as error:
            if snapshot in self._storage.snapshots.ids:
                kept = await self._storage.snapshots.set_aside(snapshot)
                LOGGER.error("%s; kept as %s, and a new one is taken", error, kept)
            return False
        except StorageError:
            if snapshot in self._storage.snapshots.ids:
                raise
            # It was replaced by a newer one while it was read; who asked is told that it is gone.
        return True


def _gone(piece: SnapshotPiece) -> SnapshotRead:
    """The core takes this as: start again with the snapshot that you have now."""
    return SnapshotRead(NodeId(piece.peer), piece.snapshot, piece.position, b"", -1)
