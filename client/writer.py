"""`Writer`: record batches to partitions, each stored once and in order, or failed with an error that says which.

    send(topic, partition, batch) -> a future        bounded by `buffer_bytes_max`: then it waits
      -> Lane (one for each partition)               order, numbers, what may fly: `lane.py`
      -> Pipe (one for each broker)                  a ProduceStream: requests in order, answers in order
      -> the future's result (`Acknowledged`) or error, after `delivery_timeout_ms` at the latest

A pipe lives while there is something to send. It breaks when its stream breaks, when an answer takes longer than
`request_timeout_ms`, or when one takes longer than `silence_ms` and the metadata says that another broker leads now:
a broker that hangs breaks no stream. Lanes of a broken pipe find the way anew: fresh metadata, a pause, again.

A large batch is a request of its own, with nothing behind it until it is answered: a broker which takes no message of
that size (MESSAGE_TOO_LARGE, which ends the stream) refuses this one batch, which fails as not stored. gRPC does not
always tell why a stream has ended under a write; then it is sent again, and nothing behind it has become doubtful. If
several small batches together were too large, requests are made smaller.

A lane's batches fly to one broker at a time: when the leader has changed, what flies is awaited first.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from tidelog.client.cluster import ClusterClient, error_in
from tidelog.client.errors import DeliveryTimeoutError, NobodyLeadsError, WriterClosedError
from tidelog.client.lane import IN_FLIGHT_MAX, Batch, Failed, Lane, Producer
from tidelog.client.metadata import TopicInfo
from tidelog.client.pipe import Pipe
from tidelog.client.tasks import Tasks
from tidelog.log.batch_header import Buffer, read_header
from tidelog.model.errors import (
    ErrorCode,
    RecordTooLargeError,
    TidelogError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from tidelog.model.ids import PartitionId
from tidelog.rpc.door import method_named
from tidelog.rpc.v1 import log_pb2 as pb

LOGGER = logging.getLogger(__name__)

_INIT = method_named("Log", "InitProducerId")
_MOVED = (ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.FENCED_LEADER_EPOCH)
_PAUSE_MIN_S, _PAUSE_MAX_S = 0.02, 0.15
_SHORT_PAUSES = 100
"""Between two looks for a leader: an election takes a few hundred milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterConfig:
    acks: int = -1
    delivery_timeout_ms: int = 120_000
    request_timeout_ms: int = 30_000
    in_flight_max: int = IN_FLIGHT_MAX
    """Batches of one partition."""
    requests_max: int = 32
    """Unanswered requests of one broker."""
    request_bytes_max: int = 1 << 20
    """Batches of several partitions go out together up to here."""
    batch_bytes_max: int = 60 << 20
    buffer_bytes_max: int = 32 << 20
    """Batches that are not answered yet (`buffer.memory`); one batch may always enter."""
    silence_ms: int = 500

    def __post_init__(self) -> None:
        if self.acks not in (-1, 0, 1):
            raise ValueError(f"acks={self.acks}: -1 (all), 0 or 1")
        if not 1 <= self.in_flight_max <= IN_FLIGHT_MAX:
            raise ValueError(f"in_flight_max={self.in_flight_max}: 1 to {IN_FLIGHT_MAX}")
        if self.delivery_timeout_ms <= 0 or self.request_timeout_ms <= 0:
            raise ValueError("timeouts are above 0 ms")


@dataclass(frozen=True, slots=True)
class Acknowledged:
    topic: str
    partition: PartitionId
    base_offset: int
    """-1 if the log does not say: acks=0, or a repeat of something it had stored long before."""
    count: int
    append_time_ms: int
    """The time that the leader has set, or -1."""


Sent = Batch["asyncio.Future[Acknowledged]"]
WriterLane = Lane["asyncio.Future[Acknowledged]"]


class Writer:
    """Used on one event loop. `close` when done; `flush` waits for what was sent."""

    def __init__(self, cluster: ClusterClient, config: WriterConfig | None = None) -> None:
        self.cluster = cluster
        self.config = config or WriterConfig()
        self.buffered_bytes = 0
        self.retries = 0
        """Attempts that were not the first one of their batch."""
        self._lanes: dict[PartitionId, WriterLane] = {}
        self._topics: dict[PartitionId, TopicInfo] = {}
        self._at: dict[PartitionId, int] = {}  # where a lane's batches fly
        self.pipes: dict[int, Pipe] = {}
        self._lost: dict[PartitionId, None] = {}  # lanes that look for their leader
        self._resting: set[PartitionId] = set()  # lanes that pause, or wait for a producer
        self._failures: dict[PartitionId, int] = {}  # attempts in vain since the last good one
        self._producer: asyncio.Task[Producer] | None = None
        self._tasks = Tasks(self._task_failed)
        self._finding = False
        self._is_view_fresh = False  # the last look for a leader was answered
        self._sweeping = False
        self._entrance = asyncio.Lock()
        self._room = asyncio.Event()
        self._is_closed = False
        self.stops_at_failure = False
        """For who wants nothing stored behind a batch that was not: with the first one that fails all that does not fly
        fails too, and nothing is taken any more. What flies behind it to the same partition the log refuses."""
        self._stopped: TidelogError | None = None
        self._landed = asyncio.Event()
        self.last_error: TidelogError | None = None
        self.request_bytes_max = self.config.request_bytes_max
        """Of several batches in one request; lowered when a broker takes less."""

    # In.

    async def send(self, topic: str, partition: int, batch: Buffer) -> asyncio.Future[Acknowledged]:
        """Takes one encoded batch; batches of one partition are stored in the order in which `send` is called. Raises
        if the topic is not there and not created by the first batch to it (`ClusterClient.topic`), if the batch is too
        large, or if there was no room for it in time."""
        header = read_header(batch)
        if header.size != len(batch):
            raise ValueError(f"one whole batch at a time: {len(batch)} bytes, the batch has {header.size}")
        if header.size > self.config.batch_bytes_max:
            raise RecordTooLargeError(f"a batch of {header.size} bytes, at most {self.config.batch_bytes_max}")
        deadline_s = self._now_s() + self.config.delivery_timeout_ms / 1000
        async with self._entrance:
            self._check_open()
            lane = await self._lane(topic, partition)
            await self._wait_for_room(len(batch), deadline_s)
            self._check_open()
            return self._add(lane, bytes(batch), header.count, deadline_s)

    def put(
        self, topic: TopicInfo, partition: int, batch: bytes, *, count: int, deadline_s: float
    ) -> asyncio.Future[Acknowledged]:
        """`send` for a caller who knows the topic, bounds what it hands over, and counts the time by itself: nothing is
        awaited. Raises if there is no such partition, or if the writer is closed."""
        self._check_open()
        if not 0 <= partition < len(topic.partitions):
            raise _no_partition(topic, partition)
        return self._add(self._lane_at(topic, partition), batch, count, deadline_s)

    def _add(self, lane: WriterLane, data: bytes, count: int, deadline_s: float) -> asyncio.Future[Acknowledged]:
        result: asyncio.Future[Acknowledged] = asyncio.get_running_loop().create_future()
        result.add_done_callback(_looked_at)
        lane.add(Batch(data, count=count, deadline_ms=int(deadline_s * 1000), result=result))
        self.buffered_bytes += len(data)
        self._kick(lane)
        self._start_sweeping()
        return result

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _now_ms(self) -> int:
        return int(self._now_s() * 1000)

    def _check_open(self) -> None:
        if self._is_closed:
            raise WriterClosedError("the writer is closed")
        if self._stopped is not None:
            raise self._not_sent()

    async def _lane(self, topic: str, partition: int) -> WriterLane:
        info = await self.cluster.topic(topic, may_create=True)
        if not 0 <= partition < len(info.partitions):
            await self.cluster.refresh(topic)  # it may have got more
            info = await self.cluster.topic(topic)
        if not 0 <= partition < len(info.partitions):
            raise _no_partition(info, partition)
        return self._lane_at(info, partition)

    def _lane_at(self, info: TopicInfo, partition: int) -> WriterLane:
        where = info.partitions[partition]
        lane = self._lanes.get(where)
        if lane is None:
            lane = self._lanes[where] = Lane(info.name, where, in_flight_max=self.config.in_flight_max)
            self._topics[where] = info
        return lane

    async def _wait_for_room(self, size: int, deadline_s: float) -> None:
        while self.buffered_bytes and self.buffered_bytes + size > self.config.buffer_bytes_max:
            self._room.clear()
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._room.wait()
            except TimeoutError:
                waited = f"no room for {size} bytes in {self.config.delivery_timeout_ms} ms"
                raise DeliveryTimeoutError(waited + self._because(), was_sent=False) from None
            self._check_open()

    async def flush(self) -> None:
        """Until everything that was sent before has a result or an error."""
        waiting = [batch.result for lane in self._lanes.values() for batch in lane.batches if not batch.is_over]
        if waiting:
            await asyncio.wait(waiting)

    async def land(self, timeout_s: float) -> None:
        """Nothing is sent any more. What flies is waited for, so long at most: `close` leaves it to itself."""
        self._stop(WriterClosedError("whoever sent it has given up"))
        try:
            async with asyncio.timeout(timeout_s):
                while any(lane.flying for lane in self._lanes.values()):
                    self._landed.clear()
                    await self._landed.wait()
        except TimeoutError:
            pass

    def _stop(self, error: TidelogError) -> None:
        if self._stopped is None and not self._is_closed:
            self._stopped = error
            for lane in self._lanes.values():
                self._ground(lane)

    def _ground(self, lane: WriterLane) -> None:
        for batch in lane.ground():
            self._finish(batch, self._not_sent(was_sent=batch.was_sent))

    def _not_sent(self, *, was_sent: bool = False) -> WriterClosedError:
        what = "not waited for" if was_sent else "not sent"
        return WriterClosedError(f"{what}, for something has failed before: {self._stopped}", was_sent=was_sent)

    async def close(self, *, is_flushed: bool = True) -> None:
        """What is not acknowledged then fails."""
        try:
            if is_flushed and not self._is_closed:
                await self.flush()
        finally:
            self._is_closed = True
            self._room.set()
            for pipe in list(self.pipes.values()):
                pipe.close()
            await self._tasks.end(*() if self._producer is None else [self._producer])
            for lane in self._lanes.values():
                for batch in lane.abandon():
                    error = WriterClosedError("the writer was closed before this was stored", was_sent=batch.was_sent)
                    self._finish(batch, error)

    # Out.

    def _kick(self, lane: WriterLane) -> None:
        """Something of it may be able to fly."""
        if self._is_closed or self._stopped or not lane.batches or lane.partition in self._resting:
            return
        if lane.needs_producer:
            self._resting.add(lane.partition)
            self._tasks.spawn(self._give_producer(lane, is_fresh=lane.producer is not None))
            return
        leader = self.cluster.leader(lane.partition)
        if leader is None:
            self._look_for(lane)
            return
        if lane.flying and self._at[lane.partition] != leader.node:
            return
        pipe = self.pipes.get(leader.node)
        if pipe is None:
            pipe = self.pipes[leader.node] = Pipe(self, leader.node)
            self._tasks.spawn(pipe.run())
        pipe.add(lane)

    def fly(self, node: int, lane: WriterLane) -> tuple[Sent, bytearray] | None:
        """For a pipe: the next batch of the lane, if it is to be sent there, as it goes out."""
        if lane.partition in self._resting or self._stopped is not None:
            return None
        leader = self.cluster.leader(lane.partition)
        if leader is None or leader.node != node:
            self._kick(lane)
            return None
        if lane.flying and self._at[lane.partition] != node:
            return None
        batch = lane.next_batch(self._now_ms())
        if batch is None:
            return None
        self.retries += batch.was_sent
        self._at[lane.partition] = node
        batch.leader_epoch = leader.epoch
        return batch, lane.took_off(batch, self._now_ms())

    def _task_failed(self, error: BaseException) -> None:
        # Our own error: nobody shall wait for what will not come.
        LOGGER.error("a task of the writer failed", exc_info=error)
        self._is_closed = True
        for lane in self._lanes.values():
            for batch in lane.abandon():
                self._finish(batch, WriterClosedError(f"the writer failed: {error!r}", was_sent=batch.was_sent))

    # Producers.

    async def _give_producer(self, lane: WriterLane, *, is_fresh: bool) -> None:
        if is_fresh:
            # A gap: the numbers of this lane end here, those of the others go on. Unless a leader of the past said so.
            producer = await self._new_producer()
            error = await self.cluster.refresh_quietly(lane.topic)
            if error is not None:
                self.last_error = error
            lane.learned(self._known_epoch(lane))
            if lane.needs_producer:
                LOGGER.warning("topic=%s partition=%d numbers anew", lane.topic, lane.partition.partition)
        else:
            if self._producer is None:
                self._producer = asyncio.get_running_loop().create_task(self._new_producer())
            producer = await asyncio.shield(self._producer)
        self._resting.discard(lane.partition)
        if lane.needs_producer:
            for failed in lane.start(producer):
                self.fail(failed)
        self._kick(lane)

    async def _new_producer(self) -> Producer:
        """However long it takes: batches have their own deadlines."""
        backoff = self.cluster.backoff()
        while True:
            brokers = sorted(self.cluster.view.brokers)
            self.cluster.random.shuffle(brokers)
            for node in brokers:
                try:
                    answer = await self.cluster.call_node(
                        node, _INIT, pb.InitProducerIdRequest(), timeout_ms=self.config.request_timeout_ms // 3
                    )
                    return Producer(answer.producer_id, answer.producer_epoch)
                except TidelogError as error:
                    self.last_error = error
            await asyncio.sleep(backoff.next_s())
            await self.cluster.refresh_quietly()

    # The way.

    def _look_for(self, lane: WriterLane) -> None:
        self._lost[lane.partition] = None
        if not self._finding:
            self._finding = True
            self._tasks.spawn(self._find())

    async def _find(self) -> None:
        """Fresh metadata until every lost lane has found its leader, or is empty."""
        looks = 0
        try:
            while self._lost:
                names = dict.fromkeys(self._lanes[partition].topic for partition in self._lost)
                error = await self.cluster.refresh_quietly(*names)
                self._is_view_fresh = error is None
                if error is not None:
                    self.last_error = error
                for partition in list(self._lost):
                    lane = self._lanes[partition]
                    leader = self.cluster.leader(partition)
                    if not lane.batches or leader is not None:
                        del self._lost[partition]
                        self._kick(lane)
                    elif error is None and self._is_gone(partition):
                        del self._lost[partition]
                        self._give_up(lane)
                if self._lost:
                    looks += 1
                    await asyncio.sleep(self._pause_s(looks))
        finally:
            self._finding = False

    def _pause_s(self, failures: int) -> float:
        """Short while it looks like an election, longer when it lasts."""
        if failures > _SHORT_PAUSES:
            return self.cluster.config.retry_backoff_max_ms * (0.8 + 0.4 * self.cluster.random.random()) / 1000
        longest_s = _PAUSE_MAX_S if failures > 1 else 2 * _PAUSE_MIN_S
        return _PAUSE_MIN_S + (longest_s - _PAUSE_MIN_S) * self.cluster.random.random()

    def _is_gone(self, partition: PartitionId) -> bool:
        """Its topic was made anew; one that is only unknown may be heard of yet, until the deadline."""
        known = self.cluster.view.topics.get(self._topics[partition].name)
        return known is not None and known.topic_id != partition.topic_id

    def forget_gone(self) -> None:
        """Lanes of topics that are not there any more, and that have nothing on its way. Whoever gets a lane there
        again must not begin its numbers anew under the same producer: the log would take new records for repeats."""
        busy = {*self._resting, *self._lost}
        for partition, lane in list(self._lanes.items()):
            known = self.cluster.view.topics.get(lane.topic)
            is_there = known is not None and known.topic_id == partition.topic_id
            if is_there or lane.batches or partition in busy:
                continue
            del self._lanes[partition], self._topics[partition]
            self._at.pop(partition, None)
            self._failures.pop(partition, None)
            if self._producer is not None and self._producer.done():
                self._producer = None

    def _give_up(self, lane: WriterLane) -> None:
        for batch in lane.abandon():
            error = UnknownTopicIdError(f"'{lane.topic}' was deleted and made anew; this was sent to the old one")
            self._finish(batch, error)

    # Answers.

    def answered(self, lane: WriterLane, batch: Sent, row: pb.ProducedPartition) -> None:
        self._landed.set()
        error = error_in(row)
        if error is None or error.code is ErrorCode.DUPLICATE_SEQUENCE_NUMBER:
            self._failures.pop(lane.partition, None)
            if lane.stored(batch, self._now_ms()):
                offset = row.base_offset if error is None else -1
                self._finish(batch, Acknowledged(lane.topic, lane.partition, offset, batch.count, row.append_time_ms))
            self._kick(lane)
            return
        self.last_error = error
        self.cluster.heard(lane.partition, row.leader, row.leader_epoch)
        known_epoch = self._known_epoch(lane)
        # A broker that names another leader has answered as what it was when the batch was sent to it.
        answered_epoch = row.leader_epoch if row.leader == self._at[lane.partition] else batch.leader_epoch
        failed = lane.refused(batch, error, answered_epoch=answered_epoch, known_epoch=known_epoch)
        if failed is not None:
            self.fail(failed)
        if self._stopped is not None:
            self._ground(lane)
            return
        if lane.flying:
            return  # the last of them decides how to go on
        has_hint = error.code in _MOVED and known_epoch > batch.leader_epoch
        if failed is not None or lane.needs_producer or has_hint:
            self._kick(lane)
        else:
            self.go_on(lane)

    def _known_epoch(self, lane: WriterLane) -> int:
        leader = self.cluster.view.leader(lane.partition)
        return -1 if leader is None else leader.epoch

    def go_on(self, lane: WriterLane) -> None:
        """After an attempt in vain: a pause, fresh metadata, again."""
        self._landed.set()
        if self._stopped is not None:
            self._ground(lane)
            return
        if lane.batches and not self._is_closed and lane.partition not in self._resting:
            self._resting.add(lane.partition)
            self._tasks.spawn(self._go_on(lane))

    async def _go_on(self, lane: WriterLane) -> None:
        failures = self._failures[lane.partition] = self._failures.get(lane.partition, 0) + 1
        await asyncio.sleep(self._pause_s(failures))
        error = await self.cluster.refresh_quietly(lane.topic)
        if error is not None:
            self.last_error = error
        elif self._is_gone(lane.partition):
            self._give_up(lane)
        self._resting.discard(lane.partition)
        self._kick(lane)

    def fail(self, failed: Failed[asyncio.Future[Acknowledged]]) -> None:
        self._finish(failed.batch, failed.error)

    def _finish(self, batch: Sent, outcome: Acknowledged | TidelogError) -> None:
        self.buffered_bytes -= len(batch.data)
        self._room.set()
        if batch.result.done():  # cancelled by its owner
            return
        if isinstance(outcome, Acknowledged):
            batch.result.set_result(outcome)
        else:
            batch.result.set_exception(outcome)
            if self.stops_at_failure:
                self._stop(outcome)

    # Deadlines.

    def _start_sweeping(self) -> None:
        if not self._sweeping:
            self._sweeping = True
            self._tasks.spawn(self._sweep())

    async def _sweep(self) -> None:
        try:
            while True:
                deadlines = [b.deadline_ms for lane in self._lanes.values() for b in lane.batches if not b.is_over]
                if not deadlines:
                    return
                await asyncio.sleep(max(0.01, min(deadlines) / 1000 - self._now_s()))
                for lane in list(self._lanes.values()):
                    for batch in lane.expire(self._now_ms()):
                        self._finish(batch, self._timed_out(lane, batch))
                    self._kick(lane)
        finally:
            self._sweeping = False

    def _because(self) -> str:
        return f"; last: {self.last_error}" if self.last_error is not None else ""

    def _timed_out(self, lane: WriterLane, batch: Sent) -> DeliveryTimeoutError:
        where = f"{lane.topic}-{lane.partition.partition}"
        was_sent, is_led = batch.is_unknown or batch.is_flying, not self._is_leaderless(lane.partition)
        because = f": {batch.last_error}" if batch.last_error else self._because()
        waited = f"not acknowledged in {self.config.delivery_timeout_ms} ms{because if is_led else ''}"
        records, verb = ("1 record", "was") if batch.count == 1 else (f"{batch.count} records", "were")
        outcome = "may be stored or not" if was_sent else f"{verb} not stored"
        message = f"{records} to {where} {outcome}: {'' if is_led else f'nobody leads {where}; '}{waited}"
        return DeliveryTimeoutError(message, was_sent=was_sent) if was_sent or is_led else NobodyLeadsError(message)

    def _is_leaderless(self, partition: PartitionId) -> bool:
        """Whether the cluster says so, and has said it lately."""
        known = self.cluster.view.leader(partition)
        return partition in self._lost and self._is_view_fresh and known is not None and known.node < 0


def _no_partition(topic: TopicInfo, partition: int) -> UnknownTopicOrPartitionError:
    return UnknownTopicOrPartitionError(
        f"'{topic.name}' has {len(topic.partitions)} partitions from 0 on, there is no {partition}"
    )


def _looked_at(result: asyncio.Future[Acknowledged]) -> None:
    """Nobody has to wait for each of many results; whoever does sees the error all the same."""
    if not result.cancelled():
        result.exception()
