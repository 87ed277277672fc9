"""`Reader`: batches of many partitions, in order within each, from given positions on. No groups, no commits.

    assign({partition: offset})     what to read, and from where
    poll(timeout_ms) -> [Fetched]   what has arrived; raises the error of a partition once what came before it is read

For each broker that leads an assigned partition one long poll is under way, unless `buffer_bytes_max` of data wait for
`poll`: a program that does not read holds up only itself. States of a partition:

    fetching    a long poll at its leader, or at the replica that the leader has named for our rack; that choice holds
                for `replica_lease_ms`, then the leader is asked anew
    lost        its leader is not known, or does not answer: fresh metadata and a pause, again and again; an error if it
                lasts `patience_ms`
    stopped     an error that does not pass by itself, told once by `poll`; `seek` starts it anew:
                `TruncatedError` (what was read is not in the log any more), `PositionError` (outside of the log), ...
    paused      by `pause`

What was under way when `seek`, `pause` or `assign` came is dropped when it arrives.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tidelog.client.cluster import ClusterClient, error_in
from tidelog.client.errors import PositionError, TruncatedError
from tidelog.client.fetched import Fetched
from tidelog.client.metadata import TopicInfo
from tidelog.client.tasks import Tasks
from tidelog.log.batch_header import read_header
from tidelog.model.errors import (
    CallTimeoutError,
    ErrorCode,
    RemoteError,
    TidelogError,
    UnknownTopicIdError,
)
from tidelog.model.ids import PartitionId
from tidelog.rpc.door import method_named
from tidelog.rpc.v1 import log_pb2 as pb

LOGGER = logging.getLogger(__name__)

__all__ = ["Fetched", "Reader", "ReaderConfig"]

_FETCH = method_named("Log", "Fetch")
_PAUSE_MIN_S, _PAUSE_MAX_S = 0.02, 0.15
_SHORT_PAUSES = 100
LOOK_S = 0.5
"""How often to look whether somebody is lost for too long."""
_GRACE_MS = 2_000
"""How much longer than asked a long poll may take before its broker is given up; doubled each time in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderConfig:
    min_bytes: int = 1
    max_bytes: int = 16 << 20
    """Of one answer."""
    partition_bytes: int = 1 << 20
    max_wait_ms: int = 500
    isolation: int = pb.READ_UNCOMMITTED
    rack: str = ""
    buffer_bytes_max: int = 32 << 20
    request_timeout_ms: int = 30_000
    patience_ms: int = 60_000
    replica_lease_ms: int = 30_000
    """How long a replica that the leader has named is read from before the leader is asked again: a follower that has
    lost its leader may be the last to know."""


class _Place:
    """One assigned partition."""

    __slots__ = (
        "error",
        "failing_s",
        "fetch_offset",
        "generation",
        "high_watermark",
        "is_lost",
        "is_paused",
        "is_told",
        "last_epoch",
        "last_error",
        "partition",
        "position",
        "replica",
        "replica_until_s",
        "topic",
    )

    def __init__(self, topic: TopicInfo, partition: PartitionId, offset: int, epoch: int = -1) -> None:
        self.topic = topic
        self.partition = partition
        self.position = offset
        self.fetch_offset = offset
        self.last_epoch = epoch
        self.high_watermark = -1
        self.generation = 0
        self.is_paused = False
        self.is_lost = False
        self.replica = -1
        self.replica_until_s = 0.0
        self.error: TidelogError | None = None
        self.is_told = False
        self.failing_s: float | None = None
        self.last_error: TidelogError | None = None

    def restart(self, offset: int, epoch: int = -1) -> None:
        self.position = self.fetch_offset = offset
        self.generation += 1
        self.last_epoch = epoch
        self.error = self.last_error = self.failing_s = None
        self.is_told = self.is_lost = False


class Reader:
    """Used on one event loop; one task polls at a time. `close` when done."""

    def __init__(self, cluster: ClusterClient, config: ReaderConfig | None = None) -> None:
        self.cluster = cluster
        self.config = config or ReaderConfig()
        self.buffered_bytes = 0
        self._places: dict[PartitionId, _Place] = {}
        self._pieces: deque[tuple[int, Fetched]] = deque()
        self._sources: dict[int, _Source] = {}
        self.arrived = asyncio.Event()
        """Something is there for `take` or `failed_place`."""
        self._tasks = Tasks(self._task_failed)
        self._failure: BaseException | None = None
        self._finding = False

    # What to read.

    def assign(self, positions: Mapping[PartitionId, int], topics: Mapping[PartitionId, TopicInfo]) -> None:
        """Read these from now on, and nothing else; what is assigned already goes on where it is."""
        for partition in [partition for partition in self._places if partition not in positions]:
            place = self._places.pop(partition)
            place.generation += 1
        for partition, offset in positions.items():
            if partition not in self._places:
                self._places[partition] = _Place(topics[partition], partition, offset)
        self._drop_stale()
        self._wake()

    def assign_topic(self, topic: TopicInfo, positions: Mapping[PartitionId, int]) -> None:
        self.assign(positions, dict.fromkeys(positions, topic))

    def add(self, topic: TopicInfo, partition: PartitionId, offset: int, *, epoch: int = -1) -> None:
        """Read this one too. `epoch` is that of the record before `offset`, if it is known: then a log that has
        another record there is noticed."""
        self.add_all([(topic, partition, offset, epoch)])

    def add_all(self, places: Iterable[tuple[TopicInfo, PartitionId, int, int]]) -> None:
        """The same of many: (topic, partition, offset, epoch)."""
        for topic, partition, offset, epoch in places:
            assert partition not in self._places, "added once"
            self._places[partition] = _Place(topic, partition, offset, epoch)
        self._wake()

    def remove(self, *partitions: PartitionId) -> None:
        """Those that are read now; the others are read no less."""
        for partition in partitions:
            place = self._places.pop(partition, None)
            if place is not None:
                place.generation += 1
        self._drop_stale()

    def seek(self, partition: PartitionId, offset: int, *, epoch: int = -1) -> None:
        """`epoch` as in `add`."""
        self._places[partition].restart(offset, epoch)
        self._drop_stale()
        self._wake()

    def pause(self, *partitions: PartitionId) -> None:
        """Nothing of them is given out until `resume`; they stay where they are."""
        for partition in partitions:
            place = self._places[partition]
            if not place.is_paused:
                place.is_paused = True
                self._rewind(place)
        self._drop_stale()

    def resume(self, *partitions: PartitionId) -> None:
        for partition in partitions:
            self._places[partition].is_paused = False
        self._wake()

    def position(self, partition: PartitionId) -> int:
        """The next offset that `poll` will give."""
        return self._places[partition].position

    @property
    def assigned(self) -> list[PartitionId]:
        return list(self._places)

    def high_watermark(self, partition: PartitionId) -> int:
        """As it was in the last answer; -1 before the first."""
        place = self._places.get(partition)
        return -1 if place is None else place.high_watermark

    def _rewind(self, place: _Place) -> None:
        """Forget what was fetched and not given out; the epoch before it is not known any more."""
        if place.fetch_offset != place.position:
            place.fetch_offset, place.last_epoch = place.position, -1
        place.generation += 1

    def _drop_stale(self) -> None:
        kept = deque(
            (generation, piece)
            for generation, piece in self._pieces
            if piece.partition in self._places and self._places[piece.partition].generation == generation
        )
        if len(kept) != len(self._pieces):
            self._pieces = kept
            self.buffered_bytes = sum(len(piece.data) for _, piece in kept)

    # Out.

    async def poll(self, timeout_ms: int) -> list[Fetched]:
        """What has arrived, at the latest after `timeout_ms`, then perhaps nothing."""
        end_s = self._now_s() + timeout_ms / 1000
        while True:
            if (failed := self.failed_place()) is not None:
                raise failed[1]
            found = self.take()
            left_s = end_s - self._now_s()
            if found or left_s <= 0:
                return found
            self.arrived.clear()
            try:
                async with asyncio.timeout(min(left_s, LOOK_S)):
                    await self.arrived.wait()
            except TimeoutError:
                continue

    def take(self, bytes_max: int | None = None) -> list[Fetched]:
        """What has arrived, up to so many bytes and one piece at least."""
        if self._failure is not None:
            raise self._failure
        pieces: list[Fetched] = []
        size = 0
        while self._pieces and (not pieces or bytes_max is None or size < bytes_max):
            _, piece = self._pieces.popleft()
            pieces.append(piece)
            size += len(piece.data)
            self._places[piece.partition].position = piece.next_offset
        if pieces:
            self.buffered_bytes -= size
            self._wake()
        return pieces

    def failed_place(self) -> tuple[PartitionId, TidelogError] | None:
        """A partition that has stopped, and why: told once, when what came before it was taken, whatever the other
        partitions bring."""
        late_s = self._now_s() - self.config.patience_ms / 1000
        for place in self._places.values():
            if place.error is None and place.failing_s is not None and place.failing_s < late_s:
                place.error = place.last_error
            if place.error is not None and not place.is_told and place.position == place.fetch_offset:
                place.is_told = True
                return place.partition, place.error
        return None

    def failing(self) -> dict[PartitionId, tuple[float, TidelogError]]:
        """Who cannot be read now though it may pass: for how many seconds, and why."""
        now_s = self._now_s()
        return {
            place.partition: (now_s - place.failing_s, place.last_error)
            for place in self._places.values()
            if place.failing_s is not None and place.last_error is not None and place.error is None
        }

    async def close(self) -> None:
        await self._tasks.end()

    # In.

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _task_failed(self, error: BaseException) -> None:
        self._failure = error  # our own: the next poll raises it
        self.arrived.set()

    def _wake(self) -> None:
        """Places have changed: every broker that has something to give is asked."""
        needed = set()
        for place in self._places.values():
            if place.error is None and not place.is_paused and not place.is_lost:
                node = self._node(place)
                if node is None:
                    self._lose(place)
                else:
                    needed.add(node)
        for node in sorted(needed):
            if node not in self._sources:
                source = self._sources[node] = _Source(self, node)
                self._tasks.spawn(source.run())
            self._sources[node].wake.set()

    def _node(self, place: _Place) -> int | None:
        if place.replica >= 0 and place.replica in self.cluster.view.brokers:
            return place.replica
        leader = self.cluster.leader(place.partition)
        return None if leader is None else leader.node

    def due(self, node: int) -> list[_Place]:
        """What to ask this broker for now."""
        if self.buffered_bytes >= self.config.buffer_bytes_max:
            return []
        return [
            place
            for place in self._places.values()
            if place.error is None and not place.is_paused and not place.is_lost and self._node(place) == node
        ]

    def request(self, places: list[_Place]) -> pb.FetchRequest:
        config = self.config
        request = pb.FetchRequest(
            min_bytes=config.min_bytes,
            max_bytes=config.max_bytes,
            max_wait_ms=config.max_wait_ms,
            isolation=config.isolation,  # type: ignore[arg-type]
            rack=config.rack,
        )
        for place in places:
            leader = self.cluster.view.leader(place.partition)
            request.partitions.add(
                topic_id=place.partition.topic_id.bytes,
                partition=place.partition.partition,
                offset=place.fetch_offset,
                max_bytes=config.partition_bytes,
                leader_epoch=None if leader is None else leader.epoch,
                last_epoch=None if place.last_epoch < 0 else place.last_epoch,
            )
        return request

    def answered(self, place: _Place, row: pb.FetchedPartition) -> None:
        """An answer about a place as it is still."""
        error = error_in(row)
        if error is not None:
            self._refused(place, error, row)
            return
        if row.preferred_replica >= 0 and not self._prefer(place, row.preferred_replica):
            return
        place.failing_s = place.last_error = None
        if row.HasField("diverging"):
            place.error = TruncatedError(
                place.topic.name,
                place.partition,
                position=place.fetch_offset,
                diverging_epoch=row.diverging.epoch,
                diverging_offset=row.diverging.end_offset,
            )
            self.arrived.set()
            return
        place.high_watermark = row.high_watermark
        if data := row.data:  # each look at a field of bytes copies it
            self._keep(place, row, data)
        if place.replica >= 0 and self._now_s() >= place.replica_until_s:
            place.replica = -1
            self._wake()

    def _prefer(self, place: _Place, replica: int) -> bool:
        """Read from the replica that the leader has named; False if it is not known: then it is looked for."""
        if replica not in self.cluster.view.brokers:
            unknown = f"the leader names broker {replica} for rack '{self.config.rack}', which is not known here"
            self.failed(place, RemoteError(unknown, code=ErrorCode.REPLICA_NOT_AVAILABLE))
            self._lose(place)
            return False
        if place.replica < 0:
            place.replica = replica
            place.replica_until_s = self._now_s() + self.config.replica_lease_ms / 1000
            self._wake()
        return True

    def _keep(self, place: _Place, row: pb.FetchedPartition, data: bytes) -> None:
        at = 0
        header = None
        while at < len(data):
            header = read_header(data, at)
            at += header.size
        assert header is not None, "data has a batch"
        position, place.fetch_offset = place.fetch_offset, max(place.fetch_offset, header.next_offset)
        place.last_epoch = header.leader_epoch
        piece = Fetched(
            place.topic.name,
            place.partition,
            data,
            position,
            place.fetch_offset,
            row.high_watermark,
            row.last_stable_offset,
            row.start_offset,
            tuple((one.producer_id, one.first_offset) for one in row.aborted),
        )
        self._pieces.append((place.generation, piece))
        self.buffered_bytes += len(data)
        self.arrived.set()

    def _refused(self, place: _Place, error: TidelogError, row: pb.FetchedPartition) -> None:
        was_replica = place.replica >= 0
        place.replica = -1
        if error.code is ErrorCode.OFFSET_OUT_OF_RANGE and not was_replica:
            place.error = PositionError(
                f"{place.topic.name}-{place.partition.partition}: {error}",
                topic=place.topic.name,
                partition=place.partition,
                position=place.fetch_offset,
            )
            self.arrived.set()
        elif error.retriable or was_replica:
            self.failed(place, error)
            if self.cluster.heard(place.partition, row.leader, row.leader_epoch):
                self._wake()
            else:
                self._lose(place)
        else:
            place.error = error
            self.arrived.set()

    def failed(self, place: _Place, error: TidelogError) -> None:
        place.last_error = error
        if place.failing_s is None:
            place.failing_s = self._now_s()

    def unanswered(self, places: list[_Place], error: TidelogError) -> None:
        """A broker did not answer about these."""
        for place in places:
            place.replica = -1
            self.failed(place, error)
            self._lose(place)

    # Who is lost.

    def _lose(self, place: _Place) -> None:
        place.is_lost = True
        if place.failing_s is None:
            place.failing_s = self._now_s()
            nobody = f"nobody leads {place.topic.name}-{place.partition.partition}"
            place.last_error = RemoteError(nobody, code=ErrorCode.LEADER_NOT_AVAILABLE)
        if not self._finding:
            self._finding = True
            self._tasks.spawn(self._find())

    async def _find(self) -> None:
        try:
            looks = 0
            while lost := [place for place in self._places.values() if place.is_lost and place.error is None]:
                looks += 1
                await asyncio.sleep(self._pause_s(looks))
                error = await self.cluster.refresh_quietly(*dict.fromkeys(place.topic.name for place in lost))
                for place in lost:
                    known = self.cluster.view.topics.get(place.topic.name)
                    if error is None and known is not None and known.topic_id != place.partition.topic_id:
                        place.is_lost = False
                        place.error = UnknownTopicIdError(f"'{place.topic.name}' was deleted and made anew")
                        self.arrived.set()
                    elif self._node(place) is not None:
                        place.is_lost = False
                self._wake()
        finally:
            self._finding = False

    def _pause_s(self, looks: int) -> float:
        """Short while it looks like an election, longer when it lasts."""
        longest_s = _PAUSE_MAX_S if looks <= _SHORT_PAUSES else self.cluster.config.retry_backoff_max_ms / 1000
        return _PAUSE_MIN_S + (longest_s - _PAUSE_MIN_S) * self.cluster.random.random()


class _Source:
    """The long polls of one broker, one after the other."""

    def __init__(self, reader: Reader, node: int) -> None:
        self._reader = reader
        self._node = node
        self._turn = 0
        self._grace_ms = _GRACE_MS
        self.wake = asyncio.Event()

    async def run(self) -> None:
        reader = self._reader
        while True:
            places = reader.due(self._node)
            if not places:
                self.wake.clear()
                await self.wake.wait()
                continue
            self._turn = (self._turn + 1) % len(places)
            places = places[self._turn :] + places[: self._turn]  # the first is served first: each in turn
            generations = [place.generation for place in places]
            try:
                response = await reader.cluster.call_node(
                    self._node,
                    _FETCH,
                    reader.request(places),
                    timeout_ms=min(
                        reader.config.max_wait_ms + self._grace_ms,
                        reader.config.request_timeout_ms + reader.config.max_wait_ms,
                    ),
                )
            except TidelogError as error:
                if isinstance(error, CallTimeoutError):
                    self._grace_ms = min(2 * self._grace_ms, reader.config.request_timeout_ms)
                left = [place for place, was in zip(places, generations, strict=True) if place.generation == was]
                reader.unanswered(left, error)
                continue
            self._grace_ms = _GRACE_MS
            for place, generation, row in zip(places, generations, response.partitions, strict=True):
                if place.generation == generation and not place.is_paused:
                    reader.answered(place, row)
