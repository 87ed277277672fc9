"""Takes snapshots, receives them, and reads them for peers. One task writes at a time.

A helper process that dies (`WorkFailedError`: out of memory, for example) is not fatal, nor is a full disk. The work is
retried later:

    taking      `is_taking` falls, and the state of then is taken after a backoff (`wait_s`)
    receiving   the core requests the snapshot again, from its beginning
    checking    the requester gets none now, and retries later

A file that fails its check is set aside, and a new one is taken: no peer gets a corrupt snapshot.
"""

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
"""Backoff after a snapshot that could not be taken; doubles."""


class SnapshotRequest(NamedTuple):
    """A state to be stored as a snapshot."""

    id: SnapshotId
    membership: Membership
    state: bytes | SnapshotJob


class Snapshotter:
    """`run` is its task. Outcomes are events for the core, given to `post`."""

    def __init__(self, storage: RaftStorage, work: Work, post: Callable[[Event], None]) -> None:
        self.taken = 0
        self.installed = 0
        self.rejected = 0
        self.failed = 0
        """Times a helper process died over a snapshot, or there was no space for one."""
        self.is_taking = False
        self._storage = storage
        self._work = work
        self._post = post
        self._queue: deque[SnapshotChunk | SnapshotRequest] = deque()
        self._wake = asyncio.Event()
        self._retake: Callable[[], None] | None = None
        self._checking = asyncio.Lock()
        self._failures = 0
        """Failed snapshots since the last successful one."""
        self._next_s = 0.0

    def start(self, retake: Callable[[], None]) -> None:
        """`retake` asks the driver for a new snapshot after `wait_s`, because the last one is corrupt or could not be
        taken."""
        self._retake = retake

    def wait_s(self) -> float:
        """Remaining backoff before the next snapshot."""
        return max(0.0, self._next_s - asyncio.get_running_loop().time())

    def write(self, chunk: SnapshotChunk) -> None:
        self._queue.append(chunk)
        self._wake.set()

    def take(self, take: SnapshotRequest) -> None:
        assert not self.is_taking, "one snapshot is taken at a time"
        self.is_taking = True
        self._queue.append(take)
        self._wake.set()

    async def run(self) -> None:
        while True:
            if not self._queue:
                self._wake.clear()
                await self._wake.wait()
                continue
            item = self._queue.popleft()
            if isinstance(item, SnapshotRequest):
                await self._take(item)
            else:
                await self._write(item)

    async def _take(self, take: SnapshotRequest) -> None:
        state = take.state
        try:
            data = state if isinstance(state, bytes) else await self._work.run(state.encode, *state.values)
        except WorkFailedError as error:
            self._not_taken(take.id, error)
            return
        newest = self._storage.snapshots.ids[-1] if self._storage.snapshots.ids else None
        # A received snapshot may be newer: then this one is obsolete.
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
        """Backs off after a failed snapshot. Meanwhile the log is not truncated, which costs only disk space."""
        wait_s = min(FAILED_WAIT_MIN_S * 2.0 ** min(self._failures, 16), FAILED_WAIT_MAX_S)
        self.failed += 1
        self._failures += 1
        self._next_s = asyncio.get_running_loop().time() + wait_s
        LOGGER.error(
            "snapshot not taken offset=%d epoch=%d failures=%d: %s; the log grows until one is; retry in %.0f s",
            *(snapshot.offset, snapshot.epoch, self._failures, error, wait_s),
        )
        self.is_taking = False
        self._take_again()

    def _take_again(self) -> None:
        assert self._retake is not None, "start first"
        self._retake()

    async def _write(self, chunk: SnapshotChunk) -> None:
        try:
            outcome = await self._storage.write_chunk(chunk)
        except CorruptStateError as error:
            self.rejected += 1
            LOGGER.warning("snapshot from node=%d rejected: %s", chunk.sender, error)
            self._post(SnapshotFailed(chunk.snapshot))
            return
        except (WorkFailedError, DiskFullError) as error:
            self.failed += 1
            LOGGER.error("snapshot from node=%d could not be stored, requesting it again: %s", chunk.sender, error)
            self._post(SnapshotFailed(chunk.snapshot))
            return
        if isinstance(outcome, Snapshot):
            self.installed += 1
            LOGGER.info("snapshot installed offset=%d epoch=%d", outcome.id.offset, outcome.id.epoch)
            self._post(SnapshotInstalled(outcome.id, outcome.membership))
        else:
            self._post(SnapshotWritten(chunk.snapshot, outcome))

    async def read(self, piece: SnapshotPiece) -> None:
        """Reads a chunk for a peer. The first chunk of a transfer checks the whole file."""
        snapshots = self._storage.snapshots
        if piece.position == 0 and piece.snapshot in snapshots.ids and not await self.check(piece.snapshot):
            self._post(_gone(piece))
            return
        chunk = await snapshots.read_chunk(piece.snapshot, piece.position)
        if chunk is None:
            self._post(_gone(piece))
        else:
            data, size = chunk
            self._post(SnapshotRead(piece.peer, piece.snapshot, piece.position, data, size))

    async def check(self, snapshot: SnapshotId) -> bool:
        """Whether the snapshot may be sent. A corrupt one is set aside, and another is taken.

        One at a time: of two that find the same file corrupt, the later one would set aside the replacement.
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
            LOGGER.error("snapshot offset=%d could not be checked and is not sent: %s", snapshot.offset, error)
            return False
        except CorruptStateError as error:
            if snapshot in snapshots.ids:
                kept = await snapshots.set_aside(snapshot)
                LOGGER.error("%s; kept as %s, taking a new one", error, kept)
                self._take_again()
            return False
        except StorageError:
            if snapshot in snapshots.ids:
                raise
            # A newer one replaced it during the read; the requester learns that it is gone.
        return True


def _gone(piece: SnapshotPiece) -> SnapshotRead:
    """Tells the core that the snapshot is gone: the transfer starts again later, with the newest one."""
    return SnapshotRead(NodeId(piece.peer), piece.snapshot, piece.position, b"", -1)
