"""An observer of the group: a broker that tails the metadata log. It does not vote, and the core does not know it.

    choose a source --> follow from (offset, epoch) --> apply entries as they arrive
          ^                                                 |
          '-- the stream breaks, the source is silent, behind, or without a leader for too long

`offset` never falls: what was applied is committed, so every source has it or will have it. A snapshot is loaded only
if it is ahead.

A source that is down or behind is normal. A source that rejects this observer, or sends unreadable frames, is not: the
source may be at fault, but after several such failures in a row this node is unhealthy. It logs that once, as a warning
with what to do, and keeps it in `unhealthy_reason` until entries were applied, or a source has confirmed that there is
nothing to apply.

    healthy --`unhealthy_after_failures` rejections or unreadable frames in a row--> unhealthy
    unhealthy --progress, or nothing to apply--> healthy
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from tidelog.model.errors import (
    CorruptStateError,
    FencedLeaderEpochError,
    RemoteError,
    TidelogError,
    TransportError,
    WorkFailedError,
)
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.messages import SnapshotId
from tidelog.raft.snapshots import SNAPSHOT_BYTES_MAX, Snapshot, decode_file
from tidelog.raft.state_machine import CommitListener, apply_entries, load_snapshot
from tidelog.raft.tail import SERVICE, TailEntries, TailFenced, TailPiece, TailState, decode_frame, encode_follow
from tidelog.world.transport import Stream, Transport
from tidelog.world.work import Work

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverConfig:
    silence_ms: int = 2_000
    """The observer leaves a source that is silent for this long."""
    stale_ms: int = 1_500
    """Likewise for a source that is behind, or without a leader."""
    retry_min_ms: int = 20
    retry_max_ms: int = 500
    unhealthy_after_failures: int = 6
    """Consecutive rejections or unreadable frames after which this node is unhealthy."""
    unhealthy_retry_max_ms: int = 5_000
    """Like `retry_max_ms`, while unhealthy: each try may transfer a large snapshot."""


def decode_received(data: bytes) -> Snapshot:
    """Decodes a received snapshot; for `Work`."""
    return decode_file(data, path="received")


class RaftObserver:
    """`run` is its task; ends only by cancellation or a bug."""

    def __init__(
        self,
        transport: Transport,
        sources: Callable[[], Sequence[NodeId]],
        machine: CommitListener,
        work: Work,
        config: ObserverConfig,
        random: Random,
        *,
        offset: Offset = Offset(0),  # noqa: B008 - an int with a name
        epoch: Epoch = Epoch(0),  # noqa: B008
    ) -> None:
        """`sources` returns the members to choose from. The machine has the state of `offset`."""
        self.offset = offset
        self.epoch = epoch
        self.source: NodeId | None = None
        """The source, once it has accepted the stream."""
        self.state: TailState | None = None
        """The state of the group as the source reported it."""
        self.changes = 0
        self.failures = 0
        """Consecutive tries that a source rejected, or that ended with an unreadable frame."""
        self.failures_total = 0
        self.unhealthy_reason: str | None = None
        """Why this node cannot follow the log, and what to do about it."""
        self._state_frames = 0
        """Number of state frames from the source."""
        self._transport = transport
        self._sources = sources
        self._machine = machine
        self._work = work
        self._config = config
        self._random = random
        self._turn = random.randrange(1 << 16)
        self._part: tuple[SnapshotId, bytearray] | None = None
        self._stale_since: float | None = None

    async def run(self) -> None:
        wait_ms = self._config.retry_min_ms
        while True:
            sources = list(self._sources())
            if sources:
                self._turn += 1
                before = self.offset
                await self._follow(sources[self._turn % len(sources)])
                if self.offset > before:
                    wait_ms = self._config.retry_min_ms
            await asyncio.sleep(self._random.uniform(wait_ms / 2, wait_ms) / 1000)
            most_ms = (
                self._config.retry_max_ms if self.unhealthy_reason is None else self._config.unhealthy_retry_max_ms
            )
            wait_ms = min(wait_ms * 2, most_ms)

    async def _follow(self, source: NodeId) -> None:
        """Follows a source until it fails, is silent, or is stale."""
        self._part = None
        self._stale_since = None
        self._state_frames = 0
        stream: Stream | None = None
        try:
            async with asyncio.timeout(self._config.silence_ms / 1000):
                stream = await self._transport.open_stream(source, SERVICE)
                await stream.send(encode_follow(self.offset, self.epoch))
            self.source = source
            self.changes += 1
            while not self._is_stale():
                async with asyncio.timeout(self._config.silence_ms / 1000):
                    data = await stream.receive()
                await self._process(data)
            LOGGER.info("source=%d is behind or has no leader: trying another source", source)
        except TimeoutError:
            LOGGER.info("source=%d is silent: trying another source", source)
        except (TransportError, RemoteError) as error:
            LOGGER.info("leaving source=%d: %s", source, error)
        except (FencedLeaderEpochError, CorruptStateError, WorkFailedError) as error:
            LOGGER.info("leaving source=%d: %s", source, error)
            self._failed(source, error)
        finally:
            self.source = None
            if stream is not None:
                stream.close()

    def _failed(self, source: NodeId, error: TidelogError) -> None:
        self.failures += 1
        self.failures_total += 1
        if self.failures < self._config.unhealthy_after_failures:
            return
        is_new = self.unhealthy_reason is None
        self.unhealthy_reason = (
            f"cannot follow the metadata log from offset {self.offset} (node {source}: {error}): {_advice(error)}"
        )
        if is_new:
            LOGGER.warning("after %d tries: %s", self.failures, self.unhealthy_reason)

    def _set_healthy(self) -> None:
        self.failures = 0
        if self.unhealthy_reason is not None:
            self.unhealthy_reason = None
            LOGGER.warning("following the metadata log again, from offset %d", self.offset)

    def _is_stale(self) -> bool:
        if self._stale_since is None:
            return False
        return asyncio.get_running_loop().time() - self._stale_since > self._config.stale_ms / 1000

    async def _process(self, data: bytes) -> None:
        frame = decode_frame(data)
        if isinstance(frame, TailState):
            self.state = frame
            self._state_frames += 1
            # The source sends the first one before it has compared its log with this offset.
            if self._state_frames > 1 and frame.commit == self.offset:
                self._set_healthy()
            if frame.leader is not None and frame.commit >= self.offset:
                self._stale_since = None
            elif self._stale_since is None:
                self._stale_since = asyncio.get_running_loop().time()
        elif isinstance(frame, TailEntries):
            await self._apply(frame)
        elif isinstance(frame, TailFenced):
            raise FencedLeaderEpochError(frame.why)
        else:
            await self._process_chunk(frame)

    async def _apply(self, frame: TailEntries) -> None:
        if frame.first != self.offset or not frame.entries or frame.entries[0].epoch < self.epoch:
            raise CorruptStateError(f"entries from {frame.first} do not continue the log at {self.offset}")
        await apply_entries(self._machine, frame.first, frame.entries)
        self.offset = Offset(frame.first + len(frame.entries))
        self.epoch = frame.entries[-1].epoch
        self._set_healthy()

    async def _process_chunk(self, piece: TailPiece) -> None:
        if piece.position == 0:
            self._part = (piece.snapshot, bytearray())
        if self._part is None or self._part[0] != piece.snapshot or len(self._part[1]) != piece.position:
            raise CorruptStateError(f"the snapshot chunk at {piece.position} does not continue the previous one")
        part = self._part[1]
        part += piece.data
        if len(part) > piece.total_bytes or piece.total_bytes > SNAPSHOT_BYTES_MAX:
            raise CorruptStateError(f"the snapshot exceeds its {piece.total_bytes} bytes")
        if len(part) < piece.total_bytes:
            return
        self._part = None
        received = await self._work.run(decode_received, bytes(part))
        if received.id != piece.snapshot:
            raise CorruptStateError(f"the snapshot {received.id} came as {piece.snapshot}")
        if received.id.offset > self.offset:
            await load_snapshot(self._machine, received.id, received.data)
            self.offset, self.epoch = received.id
            self._set_healthy()


def _advice(error: TidelogError) -> str:
    """Returns what an operator can do."""
    if isinstance(error, FencedLeaderEpochError):
        return (
            "this node's copy of the log is of another group. Check that its controllers are those of its own cluster; "
            "if they are, stop it, move its copy of the metadata away, and start it: it fetches a new copy"
        )
    if isinstance(error, CorruptStateError):
        return (
            "this node cannot read what the controllers send. If it runs an older version, upgrade it; else "
            "check the logs of the controllers for damage"
        )
    return "a helper process of this node died, most likely out of memory: give it more"
