"""The snapshot work of a member: take them, receive them, read them out for peers. One task writes at a time.

A helper process that dies (`WorkFailedError`: it ran out of memory, say) ends nothing, nor does a full disk. What was
done is done again later:

    taking      `is_taking` falls, and the state of then is taken after a wait that doubles (`wait_s`)
    receiving   the core asks for the snapshot again, from its beginning
    checking    who asked is told that there is none now, and asks again after a while

A file that fails its check is set aside, and a new one is taken: nobody is sent a spoilt snapshot (R19).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tidelog.model.errors import CorruptStateError, DiskFullError, StorageError, WorkFailedError
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

FAILED_WAIT_MIN_S, FAILED_WAIT_MAX_S = 1.0, 300.0
"""After a snapshot that could not be taken; it doubles."""


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
        self.failed = 0
        """How often a helper process died over a snapshot, or there was no room for one."""
        self.is_taking = False
        self._storage = storage
        self._work = work
        self._post = post
        self._line: deque[SnapshotChunk | Take] = deque()
        self._wake = asyncio.Event()
        self._retake: Callable[[], None] | None = None
        self._checking = asyncio.Lock()
        self._failures = 0
        """Snapshots that could not be taken, since the last one that could."""
        self._next_s = 0.0

    def start(self, retake: Callable[[], None]) -> None:
        """`retake` takes a snapshot of the state as it is, when `wait_s` have passed: the last one is spoilt, or could
        not be taken."""
        self._retake = retake

    def wait_s(self) -> float:
        """How long the next one has to wait, since the last one could not be taken."""
        return max(0.0, self._next_s - asyncio.get_running_loop().time())

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
        try:
            data = state if isinstance(state, bytes) else await self._work.run(state.encode, *state.values)
        except WorkFailedError as error:
            self._not_taken(take.id, error)
            return
        newest = self._storage.snapshots.ids[-1] if self._storage.snapshots.ids else None
        # One that was received meanwhile may be newer: then this one is of no use.
        if newest is None or newest <= take.id:
            try:
                await self._storage.write_snapshot(take.id, take.membership, data)
            except DiskFullError as error:
                self._not_taken(take.id, error)
                return
            self.taken += 1
            LOGGER.info("snapshot taken offset=%d epoch=%d bytes=%d", take.id.offset, take.id.epoch, len(data))
            self._post(SnapshotTaken(take.id))
        self._failures = 0
        self.is_taking = False

    def _not_taken(self, snapshot: SnapshotId, error: WorkFailedError | DiskFullError) -> None:
        """Nothing is lost by it but room: the log is not cut meanwhile."""
        wait_s = min(FAILED_WAIT_MIN_S * 2.0 ** min(self._failures, 16), FAILED_WAIT_MAX_S)
        self.failed += 1
        self._failures += 1
        self._next_s = asyncio.get_running_loop().time() + wait_s
        LOGGER.error(
            "snapshot not taken offset=%d epoch=%d failures=%d: %s; the log grows until one is; again in %.0f s",
            *(snapshot.offset, snapshot.epoch, self._failures, error, wait_s),
        )
        self.is_taking = False
        self._take_again()

    def _take_again(self) -> None:
        assert self._retake is not None, "start first"
        self._retake()

    async def _write(self, chunk: SnapshotChunk) -> None:
        try:
            outcome = await self._storage.write_piece(chunk)
        except CorruptStateError as error:
            self.refused += 1
            LOGGER.warning("snapshot from node=%d refused: %s", chunk.sender, error)
            self._post(SnapshotFailed(chunk.snapshot))
            return
        except (WorkFailedError, DiskFullError) as error:
            self.failed += 1
            LOGGER.error("snapshot from node=%d could not be kept, and is asked for again: %s", chunk.sender, error)
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
        if piece.position == 0 and piece.snapshot in snapshots.ids and not await self.check(piece.snapshot):
            self._post(_gone(piece))
            return
        found = await snapshots.read_piece(piece.snapshot, piece.position)
        if found is None:
            self._post(_gone(piece))
        else:
            data, size = found
            self._post(SnapshotRead(piece.peer, piece.snapshot, piece.position, data, size))

    async def check(self, snapshot: SnapshotId) -> bool:
        """Whether it may be sent. A spoilt one is set aside, and another is taken in its place.

        One at a time: of two that find the same file spoilt, the later would set aside what the other has had taken.
        """
        async with self._checking:
            return await self._is_sound(snapshot)

    async def _is_sound(self, snapshot: SnapshotId) -> bool:
        snapshots = self._storage.snapshots
        if snapshot not in snapshots.ids:
            return False
        try:
            await snapshots.check(snapshot)
        except WorkFailedError as error:
            self.failed += 1
            LOGGER.error("snapshot offset=%d could not be checked, and is not sent: %s", snapshot.offset, error)
            return False
        except CorruptStateError as error:
            if snapshot in snapshots.ids:
                kept = await snapshots.set_aside(snapshot)
                LOGGER.error("%s; kept as %s, and a new one is taken", error, kept)
                self._take_again()
            return False
        except StorageError:
            if snapshot in snapshots.ids:
                raise
            # It was replaced by a newer one while it was read; who asked is told that it is gone.
        return True


def _gone(piece: SnapshotPiece) -> SnapshotRead:
    """The core takes this as: start again, after a while, with the snapshot that you have then."""
    return SnapshotRead(NodeId(piece.peer), piece.snapshot, piece.position, b"", -1)
