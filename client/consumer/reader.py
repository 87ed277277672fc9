"""`Reader`: fetches batches of many partitions, in order within each. No groups, no commits.

    assign({partition: offset})     what to fetch, and from which offset
    poll(timeout_ms) -> [Fetched]   what has arrived; raises the error of a partition after the data before it

Each broker that leads an assigned partition has one long poll, unless `buffer_bytes_max` of data wait for `poll`. The
positions are in the `SubscriptionState`, which a consumer shares with it. States of a partition:

    fetching      a long poll at its leader, or at the replica in our rack that the leader named; that choice holds for
                  `replica_lease_ms`
    leaderless    its leader is unknown or does not answer: refresh the metadata, pause, repeat; an error after
                  `leaderless_timeout_ms`
    stopped       an error that no retry cures, raised once by `poll`; `seek` clears it: `LogTruncatedError` (the log
                  was truncated below the position), `OffsetOutOfRangeError` (the position is outside of the log), ...
    paused        by `pause`

A response that arrives after a `seek`, `pause` or `remove` is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from tidelog.client.cluster import ClusterClient, error_in
from tidelog.client.consumer.fetched import Fetched
from tidelog.client.consumer.subscription_state import PartitionState, Position, SubscriptionState
from tidelog.client.errors import LogTruncatedError, OffsetOutOfRangeError
from tidelog.client.metadata import TopicInfo
from tidelog.client.tasks import Tasks
from tidelog.log.batch_header import read_header
from tidelog.model.errors import (
    CallTimeoutError,
    ErrorCode,
    LeaderNotAvailableError,
    ReplicaNotAvailableError,
    TidelogError,
    UnknownTopicIdError,
)
from tidelog.model.ids import PartitionId
from tidelog.rpc.grpc.methods import PARTITIONS_MAX, method_named
from tidelog.rpc.v1 import log_pb2 as pb

LOGGER = logging.getLogger(__name__)

__all__ = ["Fetched", "Reader", "ReaderConfig"]

_FETCH = method_named("Log", "Fetch")
_PAUSE_MIN_S, _PAUSE_MAX_S = 0.02, 0.15
_SHORT_PAUSES = 100
CHECK_S = 0.5
"""How often a waiting poll checks `leaderless_timeout_ms`."""
_GRACE_MS = 2_000
"""How much longer than `max_wait_ms` a long poll may take; doubles with each timeout in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderConfig:
    min_bytes: int = 1
    max_bytes: int = 16 << 20
    """Of one response."""
    partition_bytes: int = 1 << 20
    max_wait_ms: int = 500
    isolation: int = pb.READ_UNCOMMITTED
    rack: str = ""
    buffer_bytes_max: int = 32 << 20
    request_timeout_ms: int = 30_000
    leaderless_timeout_ms: int = 60_000
    replica_lease_ms: int = 30_000
    """How long to fetch from a replica that the leader named before asking the leader again: a follower that has lost
    its leader may notice late."""


class Reader:
    """Used on one event loop; one task polls at a time. `close` when done."""

    def __init__(
        self,
        cluster: ClusterClient,
        config: ReaderConfig | None = None,
        subscription: SubscriptionState | None = None,
    ) -> None:
        self.cluster = cluster
        self.config = config or ReaderConfig()
        self.buffered_bytes = 0
        self.arrived = asyncio.Event()
        """Set when `take` or `next_error` has something."""
        self._subscription = SubscriptionState() if subscription is None else subscription
        self._pieces: deque[Fetched] = deque()
        self._sources: dict[int, _Source] = {}
        self._tasks = Tasks(self._task_failed)
        self._failure: BaseException | None = None
        self._is_finding_leaders = False

    # Assignment.

    def assign(self, offsets: Mapping[PartitionId, int], topics: Mapping[PartitionId, TopicInfo]) -> None:
        """Fetch these partitions and no others; those that are assigned already keep their positions."""
        self._subscription.remove([partition for partition in self.assigned if partition not in offsets])
        for partition, offset in offsets.items():
            if partition not in self._subscription:
                self._add(topics[partition], partition, offset)
        self.update()

    def assign_topic(self, topic: TopicInfo, offsets: Mapping[PartitionId, int]) -> None:
        self.assign(offsets, dict.fromkeys(offsets, topic))

    def add(self, topic: TopicInfo, partition: PartitionId, offset: int, *, epoch: int = -1) -> None:
        """Fetch this partition too. `epoch` is the leader epoch of the record before `offset`, if it is known: then a
        truncated log is detected."""
        self._add(topic, partition, offset, epoch)
        self.update()

    def _add(self, topic: TopicInfo, partition: PartitionId, offset: int, epoch: int = -1) -> None:
        state = PartitionState(topic, partition)
        state.seek(offset, epoch)
        self._subscription.add(state)

    def remove(self, *partitions: PartitionId) -> None:
        self._subscription.remove(partitions)
        self.update()

    def seek(self, partition: PartitionId, offset: int, *, epoch: int = -1) -> None:
        """`epoch` as in `add`."""
        self._subscription.partitions[partition].seek(offset, epoch)
        self.update()

    def pause(self, *partitions: PartitionId) -> None:
        """`poll` returns nothing of them until `resume`; they keep their positions."""
        for partition in partitions:
            state = self._subscription.partitions[partition]
            if not state.is_paused:
                state.is_paused = True
                state.drop_fetched()
        self.update()

    def resume(self, *partitions: PartitionId) -> None:
        for partition in partitions:
            self._subscription.partitions[partition].is_paused = False
        self.update()

    def position(self, partition: PartitionId) -> int:
        """The next offset that `poll` returns."""
        position = self._subscription.partitions[partition].position
        assert position is not None, "`add` sets it"
        return position.consumed[0]

    @property
    def assigned(self) -> list[PartitionId]:
        return list(self._subscription.partitions)

    def high_watermark(self, partition: PartitionId) -> int:
        """From the last response; -1 before the first."""
        state = self._subscription.partitions.get(partition)
        return -1 if state is None else state.high_watermark

    def update(self) -> None:
        """The subscription has changed: drop stale data and ask every broker that leads a fetchable partition."""
        fresh = deque(piece for piece in self._pieces if not piece.is_stale)
        if len(fresh) != len(self._pieces):
            self._pieces = fresh
            self.buffered_bytes = sum(len(piece.data) for piece in fresh)
        self._wake()

    # Out.

    async def poll(self, timeout_ms: int) -> list[Fetched]:
        """What has arrived, or nothing after `timeout_ms`."""
        end_s = self._now_s() + timeout_ms / 1000
        while True:
            if (failed := self.next_error()) is not None:
                assert failed.error is not None, "it has one"
                raise failed.error
            pieces = self.take()
            left_s = end_s - self._now_s()
            if pieces or left_s <= 0:
                return pieces
            self.arrived.clear()
            try:
                async with asyncio.timeout(min(left_s, CHECK_S)):
                    await self.arrived.wait()
            except TimeoutError:
                continue

    def take(self, bytes_max: int | None = None, *, is_consumed: bool = True) -> list[Fetched]:
        """What has arrived, up to `bytes_max` and at least one piece. `is_consumed`: advances the positions."""
        if self._failure is not None:
            raise self._failure
        pieces: list[Fetched] = []
        size = 0
        while self._pieces and (not pieces or bytes_max is None or size < bytes_max):
            piece = self._pieces.popleft()
            pieces.append(piece)
            size += len(piece.data)
            if is_consumed and piece.position is not None:
                piece.position.advance(piece.next_offset, -1)
        if pieces:
            self.buffered_bytes -= size
            self._wake()
        return pieces

    def next_error(self) -> PartitionState | None:
        """A partition that has stopped, once for each error and after the user received the data before it."""
        late_s = self._now_s() - self.config.leaderless_timeout_ms / 1000
        for state in self._subscription:
            if state.error is None and state.failing_since_s is not None and state.failing_since_s < late_s:
                state.error = state.last_error
            position = state.position
            if state.error is None or state.is_error_reported or position is None:
                continue
            if position.consumed[0] == position.fetch_offset:
                state.is_error_reported = True
                return state
        return None

    def failing(self) -> dict[PartitionState, float]:
        """Partitions that cannot be fetched now, though a retry may succeed, and for how many seconds."""
        now_s = self._now_s()
        return {
            state: now_s - state.failing_since_s
            for state in self._subscription
            if state.failing_since_s is not None and state.error is None
        }

    async def close(self) -> None:
        await self._tasks.end()

    # In.

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _task_failed(self, error: BaseException) -> None:
        self._failure = error  # our own bug: the next `take` raises it
        self.arrived.set()

    def _wake(self) -> None:
        nodes = set()
        for state in self._subscription:
            if state.is_fetchable and not state.is_leaderless:
                node = self._node(state)
                if node is None:
                    self._lose_leader(state)
                else:
                    nodes.add(node)
        for node in sorted(nodes):
            if node not in self._sources:
                source = self._sources[node] = _Source(self, node)
                self._tasks.spawn(source.run())
            self._sources[node].wake.set()

    def _node(self, state: PartitionState) -> int | None:
        if state.replica >= 0 and state.replica in self.cluster.view.brokers:
            return state.replica
        leader = self.cluster.leader(state.partition)
        return None if leader is None else leader.node

    def due(self, node: int) -> list[PartitionState]:
        """The partitions to fetch from this broker now."""
        if self.buffered_bytes >= self.config.buffer_bytes_max:
            return []
        return [
            state
            for state in self._subscription
            if state.is_fetchable and not state.is_leaderless and self._node(state) == node
        ]

    def request(self, states: list[PartitionState]) -> pb.FetchRequest:
        config = self.config
        request = pb.FetchRequest(
            min_bytes=config.min_bytes,
            max_bytes=config.max_bytes,
            max_wait_ms=config.max_wait_ms,
            isolation=config.isolation,  # type: ignore[arg-type]
            rack=config.rack,
        )
        for state in states:
            leader = self.cluster.view.leader(state.partition)
            position = state.position
            assert position is not None, "only fetchable partitions are due"
            request.partitions.add(
                topic_id=state.partition.topic_id.bytes,
                partition=state.partition.partition,
                offset=position.fetch_offset,
                max_bytes=config.partition_bytes,
                leader_epoch=None if leader is None else leader.epoch,
                last_epoch=None if position.fetch_epoch < 0 else position.fetch_epoch,
            )
        return request

    def handle_response(self, state: PartitionState, position: Position, row: pb.FetchedPartition) -> None:
        """`position` is still the partition's, and nothing was dropped since the request."""
        error = error_in(row)
        if error is not None:
            self._handle_error(state, position, error, row)
            return
        if row.preferred_replica >= 0 and not self._prefer(state, row.preferred_replica):
            return
        state.failing_since_s = state.last_error = None
        if row.HasField("diverging"):
            state.error = LogTruncatedError(
                state.name,
                position=position.fetch_offset,
                diverging_epoch=row.diverging.epoch,
                diverging_offset=row.diverging.end_offset,
            )
            self.arrived.set()
            return
        state.high_watermark = row.high_watermark
        if data := row.data:  # each access of a bytes field copies it
            self._keep(state, position, row, data)
        if state.replica >= 0 and self._now_s() >= state.replica_until_s:
            state.replica = -1
            self._wake()

    def _prefer(self, state: PartitionState, replica: int) -> bool:
        """Fetches from the replica that the leader named. False if its address is unknown: refresh the metadata."""
        if replica not in self.cluster.view.brokers:
            message = f"the leader names broker {replica} for rack '{self.config.rack}', but its address is unknown"
            self._fail(state, ReplicaNotAvailableError(message))
            self._lose_leader(state)
            return False
        if state.replica < 0:
            state.replica = replica
            state.replica_until_s = self._now_s() + self.config.replica_lease_ms / 1000
            self._wake()
        return True

    def _keep(self, state: PartitionState, position: Position, row: pb.FetchedPartition, data: bytes) -> None:
        at = 0
        header = None
        while at < len(data):
            header = read_header(data, at)
            at += header.size
        assert header is not None, "data has a batch"
        fetch_offset, position.fetch_offset = position.fetch_offset, max(position.fetch_offset, header.next_offset)
        position.fetch_epoch = header.leader_epoch
        piece = Fetched(
            state.topic.name,
            state.partition,
            data,
            fetch_offset,
            position.fetch_offset,
            row.high_watermark,
            row.last_stable_offset,
            row.start_offset,
            tuple((transaction.producer_id, transaction.first_offset) for transaction in row.aborted),
            position,
            position.fetch_generation,
        )
        self._pieces.append(piece)
        self.buffered_bytes += len(data)
        self.arrived.set()

    def _handle_error(
        self, state: PartitionState, position: Position, error: TidelogError, row: pb.FetchedPartition
    ) -> None:
        was_replica = state.replica >= 0
        state.replica = -1
        if error.code is ErrorCode.OFFSET_OUT_OF_RANGE and not was_replica:
            state.error = OffsetOutOfRangeError(
                f"{state.name}: {error}", partition=state.name, position=position.fetch_offset
            )
            self.arrived.set()
        elif error.retriable or was_replica:
            self._fail(state, error)
            if self.cluster.learn_leader(state.partition, row.leader, row.leader_epoch):
                self._wake()
            else:
                self._lose_leader(state)
        else:
            state.error = error
            self.arrived.set()

    def _fail(self, state: PartitionState, error: TidelogError) -> None:
        state.last_error = error
        if state.failing_since_s is None:
            state.failing_since_s = self._now_s()

    def handle_failure(self, states: list[PartitionState], error: TidelogError) -> None:
        """A broker did not answer about these."""
        for state in states:
            state.replica = -1
            self._fail(state, error)
            self._lose_leader(state)

    # Leaders.

    def _lose_leader(self, state: PartitionState) -> None:
        state.is_leaderless = True
        if state.failing_since_s is None:
            self._fail(state, LeaderNotAvailableError(f"{state.name} has no leader"))
        if not self._is_finding_leaders:
            self._is_finding_leaders = True
            self._tasks.spawn(self._find_leaders())

    async def _find_leaders(self) -> None:
        try:
            attempts = 0
            while leaderless := [state for state in self._subscription if state.is_leaderless and state.error is None]:
                attempts += 1
                await asyncio.sleep(self._pause_s(attempts))
                error = await self.cluster.refresh_quietly(*dict.fromkeys(state.topic.name for state in leaderless))
                for state in leaderless:
                    known = self.cluster.view.topics.get(state.topic.name)
                    if error is None and known is not None and known.topic_id != state.partition.topic_id:
                        state.is_leaderless = False
                        state.error = UnknownTopicIdError(f"topic '{state.topic.name}' was deleted and created again")
                        self.arrived.set()
                    elif self._node(state) is not None:
                        state.is_leaderless = False
                self._wake()
        finally:
            self._is_finding_leaders = False

    def _pause_s(self, attempts: int) -> float:
        """Short as long as an election takes, then longer."""
        longest_s = _PAUSE_MAX_S if attempts <= _SHORT_PAUSES else self.cluster.config.retry_backoff_max_ms / 1000
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
            states = reader.due(self._node)
            if not states:
                self.wake.clear()
                await self.wake.wait()
                continue
            # The broker serves the first one first. If there are too many for a request, the next ones have their turn.
            self._turn = (self._turn + (1 if len(states) <= PARTITIONS_MAX else PARTITIONS_MAX)) % len(states)
            states = (states[self._turn :] + states[: self._turn])[:PARTITIONS_MAX]
            fetches = [(state, state.position, state.position.fetch_generation) for state in states if state.position]
            try:
                response = await reader.cluster.call_node(
                    self._node,
                    _FETCH,
                    reader.request(states),
                    timeout_ms=min(
                        reader.config.max_wait_ms + self._grace_ms,
                        reader.config.request_timeout_ms + reader.config.max_wait_ms,
                    ),
                )
            except TidelogError as error:
                if isinstance(error, CallTimeoutError):
                    self._grace_ms = min(2 * self._grace_ms, reader.config.request_timeout_ms)
                fresh = [state for state, position, generation in fetches if position.fetch_generation == generation]
                reader.handle_failure(fresh, error)
                continue
            self._grace_ms = _GRACE_MS
            for (state, position, generation), row in zip(fetches, response.partitions, strict=True):
                if position.fetch_generation == generation:
                    reader.handle_response(state, position, row)
