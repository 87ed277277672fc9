"""`Watch`: what is new in the topics of a query, told by the brokers. No question is asked while nothing happens.

For the partitions that a broker leads there is a stream, on which it tells their ends as they move. A stream that
breaks, or a partition that has moved, is looked for anew after a pause. A broker that is cut off does not know that it
leads no more, and its stream stays open: so each look at the topics compares who leads with who is listened to. Only
topics and partitions that are new have to be looked for: once in `max_age_ms`, with one call of metadata, each time at
another broker, as the one that is asked may be the one that is cut off.

    version    rises with whatever may be of interest to a query: compare, and look only then
    ends       where each partition can be read to, as told last; it may be behind
    topics     those of the subscription, as looked up last; nothing before `has_looked`
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from uuid import UUID

from tidelog.client.cluster import ClusterClient, error_in
from tidelog.client.metadata import TopicInfo
from tidelog.client.tasks import Tasks
from tidelog.model.errors import ErrorCode, RemoteError, TidelogError
from tidelog.model.ids import PartitionId, TopicId
from tidelog.rpc.door import method_named
from tidelog.rpc.v1 import common_pb2 as common
from tidelog.rpc.v1 import log_pb2 as pb
from tidelog.spark.facts import AT_ONCE, Place

LOGGER = logging.getLogger(__name__)

_WATCH = method_named("Log", "WatchOffsets")

Topics = dict[str, TopicInfo]
Trouble = tuple[float, TidelogError]
"""Since when, by `time.monotonic`, and what was told last."""


@dataclass(slots=True, eq=False)
class _Stream:
    node: int
    epochs: dict[PartitionId, int]
    """Of the leader as it was known when the stream was opened. A partition is on one stream only."""
    task: asyncio.Task[None] | None = None


class Watch:
    """Lives on the IO loop; `version` and `failing` may be read from anywhere."""

    def __init__(
        self,
        cluster: ClusterClient,
        look: Callable[[], Awaitable[Topics]],
        places: Callable[[Topics], dict[Place, PartitionId]],
        *,
        is_committed_only: bool,
        max_age_ms: int,
    ) -> None:
        self.version = 0
        self.topics: Topics = {}
        self.places: dict[Place, PartitionId] = {}
        self.ends: dict[PartitionId, int] = {}
        self.failure: BaseException | None = None
        """Of its own: the query has to end."""
        self._cluster = cluster
        self._look = look
        self._places = places
        self._is_committed_only = is_committed_only
        self._max_age_s = max_age_ms / 1000
        self._looked_s: float | None = None
        self._streams: list[_Stream] = []
        self._watched: dict[PartitionId, _Stream] = {}
        self._heard: set[PartitionId] = set()  # on a stream that has answered
        # Two troubles, as they end by themselves: a look by a look, a stream when all partitions have told their end.
        self._blind: Trouble | None = None
        self._deaf: Trouble | None = None
        self._wake = asyncio.Event()
        self._told = asyncio.Event()
        self._tasks = Tasks(self._failed)

    def start(self) -> None:
        self._tasks.spawn(self._run())

    async def close(self) -> None:
        await self._tasks.end()

    def _failed(self, error: BaseException) -> None:
        self.failure = error
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        self._told.set()

    async def ready(self, timeout_s: float) -> bool:
        """Whether every partition has told its end, after so long at most."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.failure is None and not self._is_ready():
                    self._told.clear()
                    await self._told.wait()
        except TimeoutError:
            return False
        return True

    def _is_ready(self) -> bool:
        return self.has_looked and all(where in self.ends for where in self.places.values())

    @property
    def has_looked(self) -> bool:
        """Whether `topics` says anything: before, that a topic is not there means nothing."""
        return self._looked_s is not None

    def failing(self) -> tuple[float, TidelogError] | None:
        """For how many seconds something cannot be watched, and why; None if all is well."""
        troubles = [one for one in (self._blind, self._deaf) if one is not None]
        if not troubles:
            return None
        since_s, error = min(troubles, key=lambda one: one[0])
        return time.monotonic() - since_s, error

    def _note(self, error: TidelogError) -> None:
        self._deaf = _since(self._deaf, error)

    # The topics.

    async def _run(self) -> None:
        backoff = self._cluster.backoff()
        while True:
            self._wake.clear()
            try:
                if self._looked_s is None or time.monotonic() >= self._looked_s + self._max_age_s:
                    if self._looked_s is not None:
                        self._cluster.ask_another()
                    self._take(await self._look())
                    self._looked_s = time.monotonic()
                    self._blind = None
                    self._told.set()
            except TidelogError as error:
                if not error.retriable:
                    raise
                self._blind = _since(self._blind, error)
            self._open_streams()
            self._settle()
            is_whole = self._blind is None and self.has_looked and self._is_watched()
            if self._blind is None and self._deaf is None:
                backoff.reset()
            try:
                async with asyncio.timeout(self._max_age_s if is_whole else backoff.next_s()):
                    await self._wake.wait()
            except TimeoutError:
                pass
            if not self._is_watched():
                # A stream has ended: its broker is gone, or does not lead any more.
                await asyncio.sleep(backoff.next_s())
                error_found = await self._cluster.refresh_quietly(*self.topics)
                if error_found is not None:
                    self._note(error_found)

    def _take(self, topics: Topics) -> None:
        places = self._places(topics)
        if places != self.places or topics.keys() != self.topics.keys():
            self._changed()
        self.topics, self.places = topics, places
        wanted = set(places.values())
        for gone in [where for where in self.ends if where not in wanted]:
            del self.ends[gone]
        for gone in [where for where in self._watched if where not in wanted]:
            self._leave(gone)

    def _is_watched(self) -> bool:
        return self._watched.keys() >= set(self.places.values())

    def _settle(self) -> None:
        if self._heard.issuperset(self.places.values()):
            self._deaf = None

    # The ends.

    def _open_streams(self) -> None:
        """For what is on none, and for what is led by another, or anew, than the stream is from.

        Streams of the same broker that are no larger are taken in: however often new topics are found, few are open.
        """
        for where, stream in list(self._watched.items()):
            known = self._cluster.view.leader(where)
            if known is not None and (known.node != stream.node or known.epoch > stream.epochs[where]):
                self._leave(where)
        by_leader: dict[int, dict[PartitionId, int]] = {}
        for where in self.places.values():
            if where in self._watched:
                continue
            leader = self._cluster.leader(where)
            if leader is None:
                self._note(
                    RemoteError(f"nobody leads partition {where.partition}", code=ErrorCode.LEADER_NOT_AVAILABLE)
                )
            else:
                by_leader.setdefault(leader.node, {})[where] = leader.epoch
        for node, epochs in sorted(by_leader.items()):
            for stream in sorted(self._streams, key=lambda one: len(one.epochs)):
                if stream.node == node and len(stream.epochs) <= len(epochs) <= AT_ONCE - len(stream.epochs):
                    epochs |= stream.epochs
                    self._end(stream)
            left = iter(epochs.items())
            while part := dict(islice(left, AT_ONCE)):
                stream = _Stream(node, part)
                self._streams.append(stream)
                self._watched |= dict.fromkeys(part, stream)
                stream.task = self._tasks.spawn(self._follow(stream))

    def _leave(self, where: PartitionId) -> None:
        """What its stream still tells of it counts no more."""
        stream = self._watched.pop(where)
        del stream.epochs[where]
        self._heard.discard(where)
        if not stream.epochs:
            self._end(stream)

    def _end(self, stream: _Stream) -> None:
        stream.epochs = {}
        self._streams.remove(stream)
        if stream.task is not None:
            stream.task.cancel()

    async def _follow(self, stream: _Stream) -> None:
        """Until it ends; then its partitions are not watched."""
        exchange = None
        try:
            exchange = await self._cluster.open_node(stream.node, _WATCH, _request(stream.epochs))
            while stream.epochs:
                self._take_ends(await exchange.receive(), stream)
        except TidelogError as error:
            self._note(error)
        finally:
            if exchange is not None:
                exchange.close()
            stream.task = None
            for where in list(stream.epochs):
                self._leave(where)
            self._wake.set()

    def _take_ends(self, answer: pb.WatchOffsetsResponse, stream: _Stream) -> None:
        for row in answer.partitions:
            where = PartitionId(TopicId(UUID(bytes=row.topic_id)), row.partition)
            if where not in stream.epochs:
                continue  # it is watched elsewhere by now
            error = error_in(row)
            if error is None:
                self.ends[where] = row.last_stable_offset if self._is_committed_only else row.high_watermark
                self._heard.add(where)
            else:
                self._note(error)
                self._leave(where)
                self._wake.set()
        self._settle()
        self._changed()


def _since(trouble: Trouble | None, error: TidelogError) -> Trouble:
    return time.monotonic() if trouble is None else trouble[0], error


def _request(partitions: Iterable[PartitionId]) -> pb.WatchOffsetsRequest:
    return pb.WatchOffsetsRequest(
        partitions=[
            common.TopicPartition(topic_id=where.topic_id.bytes, partition=where.partition) for where in partitions
        ]
    )
