"""`Watch`: what is new in the topics of a query, told by the brokers. No question is asked while nothing happens.

For the partitions that a broker leads there is one stream, on which it tells their ends as they move. A stream that
breaks, or a partition that has moved, is looked for anew after a pause. Only topics and partitions that are new have to
be looked for: once in `max_age_ms`, with one call of metadata.

    version    rises with whatever may be of interest to a query: compare, and look only then
    ends       where each partition can be read to, as told last; it may be behind
    topics     those of the subscription, as looked up last
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
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


class Watch:
    """Lives on the IO loop; `version` and `failing` may be asked from anywhere."""

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
        self._watched: set[PartitionId] = set()  # on a stream
        self._heard: set[PartitionId] = set()  # that has answered
        self._failing: tuple[float, TidelogError] | None = None
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
        return self._looked_s is not None and all(where in self.ends for where in self.places.values())

    def failing(self) -> tuple[float, TidelogError] | None:
        """For how many seconds something cannot be watched, and why; None if all is well."""
        return None if self._failing is None else (time.monotonic() - self._failing[0], self._failing[1])

    def _note(self, error: TidelogError) -> None:
        since_s = time.monotonic() if self._failing is None else self._failing[0]
        self._failing = (since_s, error)

    # The topics.

    async def _run(self) -> None:
        backoff = self._cluster.backoff()
        while True:
            self._wake.clear()
            try:
                if self._looked_s is None or time.monotonic() >= self._looked_s + self._max_age_s:
                    self._take(await self._look())
                    self._looked_s = time.monotonic()
                    self._told.set()
            except TidelogError as error:
                if not error.retriable:
                    raise
                self._note(error)
            self._open_streams()
            is_whole = self._looked_s is not None and self._watched.issuperset(self.places.values())
            if self._failing is None:
                backoff.reset()
            try:
                async with asyncio.timeout(self._max_age_s if is_whole else backoff.next_s()):
                    await self._wake.wait()
            except TimeoutError:
                pass
            if not self._watched.issuperset(self.places.values()):
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

    # The ends.

    def _open_streams(self) -> None:
        by_leader: dict[int, list[PartitionId]] = {}
        for where in self.places.values():
            if where in self._watched:
                continue
            leader = self._cluster.leader(where)
            if leader is None:
                self._note(
                    RemoteError(f"nobody leads partition {where.partition}", code=ErrorCode.LEADER_NOT_AVAILABLE)
                )
            else:
                by_leader.setdefault(leader.node, []).append(where)
        for node, partitions in sorted(by_leader.items()):
            left = iter(partitions)
            while part := set(islice(left, AT_ONCE)):
                self._watched |= part
                self._tasks.spawn(self._follow(node, part))

    async def _follow(self, node: int, partitions: set[PartitionId]) -> None:
        """One stream, until it ends; then its partitions are not watched."""
        exchange = None
        try:
            exchange = await self._cluster.open_node(node, _WATCH, _request(partitions))
            while partitions:
                self._take_ends(await exchange.receive(), partitions)
        except TidelogError as error:
            self._note(error)
        finally:
            if exchange is not None:
                exchange.close()
            self._watched -= partitions
            self._heard -= partitions
            self._wake.set()

    def _take_ends(self, answer: pb.WatchOffsetsResponse, partitions: set[PartitionId]) -> None:
        for row in answer.partitions:
            where = PartitionId(TopicId(UUID(bytes=row.topic_id)), row.partition)
            error = error_in(row)
            if error is None:
                self.ends[where] = row.last_stable_offset if self._is_committed_only else row.high_watermark
                self._heard.add(where)
            elif where in partitions:
                self._note(error)
                partitions.discard(where)
                self._watched.discard(where)
                self._heard.discard(where)
                self._wake.set()
        if self._heard.issuperset(self.places.values()):
            self._failing = None
        self._changed()


def _request(partitions: Iterable[PartitionId]) -> pb.WatchOffsetsRequest:
    return pb.WatchOffsetsRequest(
        partitions=[
            common.TopicPartition(topic_id=where.topic_id.bytes, partition=where.partition) for where in partitions
        ]
    )
