"""`Watch`: follows the topics of a query. Brokers push changes; an idle query sends no requests.

One stream per leader reports its partitions' ends as they move. A broken stream, or a partition that has moved, is
reopened after a backoff. An isolated broker does not know that it lost leadership, and its stream stays open: each
metadata refresh compares the leaders with the streams. New topics and partitions are found by one metadata request per
`max_age_ms`, each time to another broker, as one broker may be the isolated one.

    version    increases with every change that concerns the query
    ends       the last reported readable end of each partition; may lag
    topics     the subscribed topics by the last metadata; empty before `has_topics`
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
from tidelog.rpc.grpc.methods import method_named
from tidelog.rpc.v1 import common_pb2 as common
from tidelog.rpc.v1 import log_pb2 as pb
from tidelog.spark.metadata_queries import AT_ONCE, Place

LOGGER = logging.getLogger(__name__)

_WATCH = method_named("Log", "WatchOffsets")

Topics = dict[str, TopicInfo]
Failure = tuple[float, TidelogError]
"""Start time by `time.monotonic`, and the last error."""


@dataclass(slots=True, eq=False)
class _Stream:
    node: int
    epochs: dict[PartitionId, int]
    """Leader epochs when the stream was opened. A partition is on one stream only."""
    task: asyncio.Task[None] | None = None


class Watch:
    """Lives on the IO loop; `version` and `failing` may be read from any thread."""

    def __init__(
        self,
        cluster: ClusterClient,
        list_topics: Callable[[], Awaitable[Topics]],
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
        """An internal failure, which must end the query."""
        self._cluster = cluster
        self._list_topics = list_topics
        self._places = places
        self._is_committed_only = is_committed_only
        self._max_age_s = max_age_ms / 1000
        self._refreshed_s: float | None = None
        self._streams: list[_Stream] = []
        self._watched: dict[PartitionId, _Stream] = {}
        self._reported: set[PartitionId] = set()  # partitions whose stream has answered
        # Separate failures, as they clear separately: metadata by the next refresh, streams when every partition has
        # reported its end.
        self._metadata_failure: Failure | None = None
        self._stream_failure: Failure | None = None
        self._wake = asyncio.Event()
        self._updated = asyncio.Event()
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
        self._updated.set()

    async def ready(self, timeout_s: float) -> bool:
        """Wait until every partition has reported its end. Return False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.failure is None and not self._is_ready():
                    self._updated.clear()
                    await self._updated.wait()
        except TimeoutError:
            return False
        return True

    def _is_ready(self) -> bool:
        return self.has_topics and all(where in self.ends for where in self.places.values())

    @property
    def has_topics(self) -> bool:
        """Whether `topics` is filled: before, a missing topic proves nothing."""
        return self._refreshed_s is not None

    def failing(self) -> tuple[float, TidelogError] | None:
        """Return for how many seconds something could not be watched, and why; None if all is well."""
        failures = [one for one in (self._metadata_failure, self._stream_failure) if one is not None]
        if not failures:
            return None
        since_s, error = min(failures, key=lambda one: one[0])
        return time.monotonic() - since_s, error

    def _record_failure(self, error: TidelogError) -> None:
        self._stream_failure = _since(self._stream_failure, error)

    # Topics.

    async def _run(self) -> None:
        backoff = self._cluster.backoff()
        while True:
            self._wake.clear()
            try:
                if self._refreshed_s is None or time.monotonic() >= self._refreshed_s + self._max_age_s:
                    if self._refreshed_s is not None:
                        self._cluster.ask_another()
                    self._apply_topics(await self._list_topics())
                    self._refreshed_s = time.monotonic()
                    self._metadata_failure = None
                    self._updated.set()
            except TidelogError as error:
                if not error.retriable:
                    raise
                self._metadata_failure = _since(self._metadata_failure, error)
            self._open_streams()
            self._clear_stream_failure()
            is_complete = self._metadata_failure is None and self.has_topics and self._is_watched()
            if self._metadata_failure is None and self._stream_failure is None:
                backoff.reset()
            try:
                async with asyncio.timeout(self._max_age_s if is_complete else backoff.next_s()):
                    await self._wake.wait()
            except TimeoutError:
                pass
            if not self._is_watched():
                # A stream has ended: its broker is gone or no longer leads.
                await asyncio.sleep(backoff.next_s())
                error_found = await self._cluster.refresh_quietly(*self.topics)
                if error_found is not None:
                    self._record_failure(error_found)

    def _apply_topics(self, topics: Topics) -> None:
        places = self._places(topics)
        if places != self.places or topics.keys() != self.topics.keys():
            self._changed()
        self.topics, self.places = topics, places
        subscribed = set(places.values())
        for gone in [where for where in self.ends if where not in subscribed]:
            del self.ends[gone]
        for gone in [where for where in self._watched if where not in subscribed]:
            self._unwatch(gone)

    def _is_watched(self) -> bool:
        return self._watched.keys() >= set(self.places.values())

    def _clear_stream_failure(self) -> None:
        if self._reported.issuperset(self.places.values()):
            self._stream_failure = None

    # Ends.

    def _open_streams(self) -> None:
        """Open streams for partitions that have none, or whose leader or leader epoch has changed.

        Merges streams of the same broker that are not larger: the number of streams stays small as topics are added.
        """
        for where, stream in list(self._watched.items()):
            known = self._cluster.view.leader(where)
            if known is not None and (known.node != stream.node or known.epoch > stream.epochs[where]):
                self._unwatch(where)
        by_leader: dict[int, dict[PartitionId, int]] = {}
        for where in self.places.values():
            if where in self._watched:
                continue
            leader = self._cluster.leader(where)
            if leader is None:
                self._record_failure(
                    RemoteError(f"partition {where.partition} has no leader", code=ErrorCode.LEADER_NOT_AVAILABLE)
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

    def _unwatch(self, where: PartitionId) -> None:
        """Stop watching the partition; later reports of its stream are ignored."""
        stream = self._watched.pop(where)
        del stream.epochs[where]
        self._reported.discard(where)
        if not stream.epochs:
            self._end(stream)

    def _end(self, stream: _Stream) -> None:
        stream.epochs = {}
        self._streams.remove(stream)
        if stream.task is not None:
            stream.task.cancel()

    async def _follow(self, stream: _Stream) -> None:
        """Receive until the stream ends, then stop watching its partitions."""
        exchange = None
        try:
            exchange = await self._cluster.open_node(stream.node, _WATCH, _request(stream.epochs))
            while stream.epochs:
                self._apply_ends(await exchange.receive(), stream)
        except TidelogError as error:
            self._record_failure(error)
        finally:
            if exchange is not None:
                exchange.close()
            stream.task = None
            for where in list(stream.epochs):
                self._unwatch(where)
            self._wake.set()

    def _apply_ends(self, answer: pb.WatchOffsetsResponse, stream: _Stream) -> None:
        for row in answer.partitions:
            where = PartitionId(TopicId(UUID(bytes=row.topic_id)), row.partition)
            if where not in stream.epochs:
                continue  # another stream watches it now
            error = error_in(row)
            if error is None:
                self.ends[where] = row.last_stable_offset if self._is_committed_only else row.high_watermark
                self._reported.add(where)
            else:
                self._record_failure(error)
                self._unwatch(where)
                self._wake.set()
        self._clear_stream_failure()
        self._changed()


def _since(failure: Failure | None, error: TidelogError) -> Failure:
    return time.monotonic() if failure is None else failure[0], error


def _request(partitions: Iterable[PartitionId]) -> pb.WatchOffsetsRequest:
    return pb.WatchOffsetsRequest(
        partitions=[
            common.TopicPartition(topic_id=where.topic_id.bytes, partition=where.partition) for where in partitions
        ]
    )
