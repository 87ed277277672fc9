"""Follows a group from outside: a broker that tails the metadata log. Does not vote, is not known to the core.

    choose a source --> follow from (offset, epoch) --> apply as it comes
          ^                                                 |
          '-- the stream breaks, falls silent, or the source is behind us or without a leader for too long

`offset` never falls: what was applied is committed, so every source has it or will have it. A snapshot is taken only if
it is ahead.

A source that is away or behind is nothing unusual. One that refuses us, or sends what cannot be read here, is: it may
be that source alone, but if several tries in a row end so, this node is in trouble, and that seldom passes by itself.
It is said once, as a warning with what to do, and stands in `trouble` until something was applied, or a source has
confirmed that there is nothing to apply.

    well --`trouble_tries` refused or unreadable in a row--> trouble --progress, or nothing to apply--> well
"""

from __future__ import annotations

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
from tidelog.raft.state_machine import Follower, apply_entries, load_snapshot
from tidelog.raft.tail import SERVICE, TailEntries, TailFenced, TailPiece, TailState, decode_frame, encode_follow
from tidelog.world.transport import Stream, Transport
from tidelog.world.work import Work

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverConfig:
    silence_ms: int = 2_000
    """A source that says nothing for so long is left."""
    stale_ms: int = 1_500
    """So is one that has been behind us, or without a leader, for so long."""
    retry_min_ms: int = 20
    retry_max_ms: int = 500
    trouble_tries: int = 6
    """So many tries in a row that end with a refusal, or with something unreadable, are trouble."""
    trouble_retry_max_ms: int = 5_000
    """As `retry_max_ms`, while in trouble: what is sent each time may be a large snapshot."""


def decode_received(data: bytes) -> Snapshot:
    """For `Work`."""
    return decode_file(data, path="received")


class RaftObserver:
    """`run` is its task, and ends only by cancellation or by an error of our own."""

    def __init__(
        self,
        transport: Transport,
        sources: Callable[[], Sequence[NodeId]],
        machine: Follower,
        work: Work,
        config: ObserverConfig,
        random: Random,
        *,
        offset: Offset = Offset(0),  # noqa: B008 - an int with a name
        epoch: Epoch = Epoch(0),  # noqa: B008
    ) -> None:
        """`sources` are the members that may be asked, at any time. The machine's state is that of `offset`."""
        self.offset = offset
        self.epoch = epoch
        self.source: NodeId | None = None
        """Whom it follows, once that one has answered."""
        self.state: TailState | None = None
        """The group as the source sees it."""
        self.changes = 0
        self.failures = 0
        """Tries in a row that a source refused, or that ended with something unreadable."""
        self.failures_total = 0
        self.trouble: str | None = None
        """Why the log cannot be followed, and what to do about it."""
        self._alive = 0
        """How often the source has described the group."""
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
            most_ms = self._config.retry_max_ms if self.trouble is None else self._config.trouble_retry_max_ms
            wait_ms = min(wait_ms * 2, most_ms)

    async def _follow(self, source: NodeId) -> None:
        """Until this source is of no more use."""
        self._part = None
        self._stale_since = None
        self._alive = 0
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
                await self._take(data)
            LOGGER.info("source=%d is behind or has no leader: another one is tried", source)
        except TimeoutError:
            LOGGER.info("source=%d is silent: another one is tried", source)
        except (TransportError, RemoteError) as error:
            LOGGER.info("source=%d is left: %s", source, error)
        except (FencedLeaderEpochError, CorruptStateError, WorkFailedError) as error:
            LOGGER.info("source=%d is left: %s", source, error)
            self._failed(source, error)
        finally:
            self.source = None
            if stream is not None:
                stream.close()

    def _failed(self, source: NodeId, error: TidelogError) -> None:
        self.failures += 1
        self.failures_total += 1
        if self.failures < self._config.trouble_tries:
            return
        is_news = self.trouble is None
        self.trouble = (
            f"the log cannot be followed from offset {self.offset} on (node {source}: {error}): {_advice(error)}"
        )
        if is_news:
            LOGGER.warning("after %d tries %s", self.failures, self.trouble)

    def _well(self) -> None:
        self.failures = 0
        if self.trouble is not None:
            self.trouble = None
            LOGGER.warning("the log is followed again, from offset %d on", self.offset)

    def _is_stale(self) -> bool:
        if self._stale_since is None:
            return False
        return asyncio.get_running_loop().time() - self._stale_since > self._config.stale_ms / 1000

    async def _take(self, data: bytes) -> None:
        frame = decode_frame(data)
        if isinstance(frame, TailState):
            self.state = frame
            self._alive += 1
            # The first one comes before the source has compared its log with ours.
            if self._alive > 1 and frame.commit == self.offset:
                self._well()
            if frame.leader is not None and frame.commit >= self.offset:
                self._stale_since = None
            elif self._stale_since is None:
                self._stale_since = asyncio.get_running_loop().time()
        elif isinstance(frame, TailEntries):
            await self._apply(frame)
        elif isinstance(frame, TailFenced):
            raise FencedLeaderEpochError(frame.why)
        else:
            await self._take_piece(frame)

    async def _apply(self, frame: TailEntries) -> None:
        if frame.first != self.offset or not frame.entries or frame.entries[0].epoch < self.epoch:
            raise CorruptStateError(f"entries from {frame.first} on do not continue what ends at {self.offset}")
        await apply_entries(self._machine, frame.first, frame.entries)
        self.offset = Offset(frame.first + len(frame.entries))
        self.epoch = frame.entries[-1].epoch
        self._well()

    async def _take_piece(self, piece: TailPiece) -> None:
        if piece.position == 0:
            self._part = (piece.snapshot, bytearray())
        if self._part is None or self._part[0] != piece.snapshot or len(self._part[1]) != piece.position:
            raise CorruptStateError(f"a piece of a snapshot at {piece.position} that does not continue another")
        part = self._part[1]
        part += piece.data
        if len(part) > piece.total_bytes or piece.total_bytes > SNAPSHOT_BYTES_MAX:
            raise CorruptStateError(f"a snapshot of {piece.total_bytes} bytes does not end there")
        if len(part) < piece.total_bytes:
            return
        self._part = None
        found = await self._work.run(decode_received, bytes(part))
        if found.id != piece.snapshot:
            raise CorruptStateError(f"the snapshot {found.id} came as {piece.snapshot}")
        if found.id.offset > self.offset:
            await load_snapshot(self._machine, found.id, found.data)
            self.offset, self.epoch = found.id
            self._well()


def _advice(error: TidelogError) -> str:
    """For an operator."""
    if isinstance(error, FencedLeaderEpochError):
        return (
            "this node's copy of the log is not of this group. Check that it asks the controllers of its own cluster; "
            "if it does, stop it, move its copy of the metadata away, and start it: it is fetched anew"
        )
    if isinstance(error, CorruptStateError):
        return (
            "this node cannot read what it is sent. If it runs an older version than the controllers, upgrade it; else "
            "look into the logs of the controllers for damage"
        )
    return "a helper process of this node died, most likely for want of memory: give it more"
