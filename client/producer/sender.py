"""Sends sealed batches to the leaders of their partitions; each is stored once and in order, or fails.

    add(batch) -> PartitionQueue (one for each partition)    order, sequence numbers, what may be in flight
               -> ProduceStream (one for each broker)        requests in order, responses in order
               -> `on_done(batch)`, in the order of the partition, by the batch's deadline

A stream lives while there is something to send. It breaks when its connection breaks, when a response takes longer than
`request_timeout_ms`, or when one takes longer than `silence_ms` and the metadata names another leader: a broker that
hangs breaks no connection. Queues of a broken stream retry: a backoff, fresh metadata, again.

A large batch is a request of its own, with nothing behind it until it is answered: a broker that rejects its size
(MESSAGE_TOO_LARGE, which ends the stream) fails this one batch, as not stored. gRPC does not always report why a stream
has ended under a write; then the batch is sent again, and nothing behind it is in doubt. If several small batches were
too large together, requests become smaller.

Batches of a queue are in flight to one broker at a time: after a leader change those in flight are awaited first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from tidelog.client.cluster import ClusterClient, error_in
from tidelog.client.errors import DeliveryTimeoutError, NoLeaderError, ProducerClosedError
from tidelog.client.metadata import TopicInfo
from tidelog.client.producer.fast_path import ProducerBatch
from tidelog.client.producer.partition_queue import IN_FLIGHT_MAX, PartitionQueue, ProducerIdAndEpoch, Stored
from tidelog.client.producer.produce_stream import ProduceStream
from tidelog.client.tasks import Tasks
from tidelog.model.errors import ErrorCode, TidelogError, UnknownTopicIdError, UnknownTopicOrPartitionError
from tidelog.model.ids import PartitionId
from tidelog.model.transaction_errors import OffsetMismatchError, StaleFencingTokenError, TransactionAbortableError
from tidelog.rpc.grpc.methods import method_named
from tidelog.rpc.v1 import log_pb2 as pb

LOGGER = logging.getLogger(__name__)

_INIT = method_named("Log", "InitProducerId")
_MOVED = (ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.FENCED_LEADER_EPOCH)
_BACKOFF_MIN_S, _BACKOFF_MAX_S = 0.02, 0.15
_SHORT_BACKOFFS = 100
"""Between two metadata requests: an election takes a few hundred milliseconds."""

Queue = PartitionQueue[ProducerBatch]


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderConfig:
    acks: int = -1
    request_timeout_ms: int = 30_000
    in_flight_max: int = IN_FLIGHT_MAX
    """Batches of one partition."""
    requests_max: int = 32
    """Unanswered requests to one broker."""
    request_bytes_max: int = 1 << 20
    """Batches of several partitions share a request up to here."""
    silence_ms: int = 500

    def __post_init__(self) -> None:
        if self.acks not in (-1, 0, 1):
            raise ValueError(f"acks={self.acks}: -1 (all), 0 or 1")
        if not 1 <= self.in_flight_max <= IN_FLIGHT_MAX:
            raise ValueError(f"in_flight_max={self.in_flight_max}: 1 to {IN_FLIGHT_MAX}")
        if self.request_timeout_ms <= 0:
            raise ValueError("timeouts are above 0 ms")


def _error_of(row: pb.ProducedPartition) -> TidelogError | None:
    error = error_in(row)
    if isinstance(error, OffsetMismatchError):
        error.end_offset = row.end_offset
    elif isinstance(error, StaleFencingTokenError):
        error.claim = row.claim
    return error


class Sender:
    """Used on one event loop. `on_done` gets each batch once, with its `outcome`, and must not call the sender."""

    def __init__(self, cluster: ClusterClient, config: SenderConfig, on_done: Callable[[ProducerBatch], None]) -> None:
        self.cluster = cluster
        self.config = config
        self.retries = 0
        """Attempts that were not the first one of their batch."""
        self.queues: dict[PartitionId, Queue] = {}
        self.streams: dict[int, ProduceStream] = {}
        self.request_bytes_max = config.request_bytes_max
        """Of several batches in one request; lowered when a broker takes less."""
        self.stops_at_failure = False
        """Fail everything that is not in flight with the first batch that fails, and take no more. The log rejects what
        is in flight behind that batch to the same partition."""
        self.last_error: TidelogError | None = None
        self.transactional_id = ""
        """Empty: batches are not part of a transaction."""
        self.transaction: ProducerIdAndEpoch | None = None
        """Of the open transaction, or the last one."""
        self.is_closed = False
        self._on_done = on_done
        self._broker_of: dict[PartitionId, int] = {}  # where a queue's batches are in flight
        self._leaderless: dict[PartitionId, None] = {}
        self._paused: set[PartitionId] = set()  # queues that back off, or wait for a producer id
        self._failures: dict[PartitionId, int] = {}  # failed attempts since the last success
        self._producer: asyncio.Task[ProducerIdAndEpoch] | None = None
        self._tasks = Tasks(self._task_failed)
        self._is_finding_leaders = False
        self._is_view_fresh = False  # the last metadata request for a leader was answered
        self._is_watching_deadlines = False
        self._stop_reason: TidelogError | None = None
        self._answered = asyncio.Event()

    def add(self, topic: TopicInfo, batch: ProducerBatch) -> None:
        """Send an encoded batch, behind those of its partition. Raises if the sender takes none; then `on_done` is not
        called. A batch with an outcome is only reported, in its order."""
        self.check_open()
        queue = self.queue_of(topic, batch.partition)
        queue.add(batch)
        if batch.outcome is not None:
            # Later: the caller of `send` may be on this loop.
            asyncio.get_running_loop().call_soon(self._report, queue)
            return
        self.schedule(queue)
        self._watch_deadlines()

    def queue_of(self, topic: TopicInfo, partition: int) -> Queue:
        if not 0 <= partition < len(topic.partitions):
            raise UnknownTopicOrPartitionError(
                f"topic '{topic.name}' has {len(topic.partitions)} partitions; there is no partition {partition}"
            )
        partition_id = topic.partitions[partition]
        queue = self.queues.get(partition_id)
        if queue is None:
            queue = PartitionQueue(topic.name, partition_id, in_flight_max=self.config.in_flight_max)
            self.queues[partition_id] = queue
        return queue

    def check_open(self) -> None:
        if self.is_closed:
            raise ProducerClosedError("this producer is closed")
        if self._stop_reason is not None:
            raise self._not_sent()

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    # The end.

    async def drain(self, timeout: float) -> None:
        """Send nothing more, and wait for what is in flight for up to `timeout` seconds."""
        self._stop(ProducerClosedError("the program has given up"))
        try:
            async with asyncio.timeout(timeout):
                while any(queue.in_flight for queue in self.queues.values()):
                    self._answered.clear()
                    await self._answered.wait()
        except TimeoutError:
            pass

    async def close(self) -> None:
        """Batches without an outcome fail."""
        self.is_closed = True
        for stream in list(self.streams.values()):
            stream.close()
        await self._tasks.end(*() if self._producer is None else [self._producer])
        self._fail_all("the producer was closed before this was stored")

    def _fail_all(self, message: str) -> None:
        for queue in self.queues.values():
            for batch in queue.pending():
                queue.fail(batch, ProducerClosedError(message, was_sent=batch.was_sent))
            self._report(queue)

    def _task_failed(self, error: BaseException) -> None:
        # A bug: nobody shall wait for an outcome that will not come.
        LOGGER.error("a task of the producer failed", exc_info=error)
        self.is_closed = True
        self._fail_all(f"the producer failed: {error!r}")

    def _stop(self, error: TidelogError) -> None:
        if self._stop_reason is None and not self.is_closed:
            self._stop_reason = error
            for queue in self.queues.values():
                self._fail_unsent(queue)

    def _fail_unsent(self, queue: Queue) -> None:
        for batch in queue.unsent():
            queue.fail(batch, self._not_sent(was_sent=batch.was_sent))
        self._report(queue)

    def _not_sent(self, *, was_sent: bool = False) -> ProducerClosedError:
        what = "not awaited" if was_sent else "not sent"
        return ProducerClosedError(f"{what}, because of an earlier failure: {self._stop_reason}", was_sent=was_sent)

    # Transactions.

    def begin(self, transactional_id: str, producer: ProducerIdAndEpoch) -> None:
        """All batches from now on are part of a transaction. Those before have their outcome."""
        self.transactional_id, self.transaction = transactional_id, producer
        for queue in self.queues.values():
            queue.restart()

    def fail_pending(self, error: TidelogError) -> None:
        """Every batch without an outcome fails, those in flight too; none of them is sent again."""
        for queue in self.queues.values():
            for batch in queue.pending():
                queue.fail(batch, error)
            self._report(queue)

    def _start_in_transaction(self, queue: Queue) -> None:
        if queue.producer is None:
            assert self.transaction is not None, "records are taken in a transaction only"
            queue.start(self.transaction)
            return
        name = f"{queue.topic}-{queue.partition.partition}"
        for batch in queue.pending():
            reason = f"; the last response: {batch.last_error}" if batch.last_error is not None else ""
            queue.fail(batch, TransactionAbortableError(f"{name}: earlier records of the transaction are lost{reason}"))
        asyncio.get_running_loop().call_soon(self._report, queue)

    # Sending.

    def schedule(self, queue: Queue) -> None:
        """A batch of the queue may be ready to send."""
        if self.is_closed or self._stop_reason or not queue.batches or queue.partition in self._paused:
            return
        if queue.needs_producer and self.transactional_id:
            self._start_in_transaction(queue)
        elif queue.needs_producer:
            self._paused.add(queue.partition)
            self._tasks.spawn(self._start_queue(queue))
            return
        leader = self.cluster.leader(queue.partition)
        if leader is None:
            self._find_leader(queue)
            return
        if queue.in_flight and self._broker_of[queue.partition] != leader.node:
            return
        stream = self.streams.get(leader.node)
        if stream is None:
            stream = self.streams[leader.node] = ProduceStream(self, leader.node)
            self._tasks.spawn(stream.run())
        stream.add(queue)

    def next_batch(self, node: int, queue: Queue) -> tuple[ProducerBatch, bytearray] | None:
        """For the stream to a broker: the next batch of the queue, if it goes there, with its bytes."""
        if queue.partition in self._paused or self._stop_reason is not None:
            return None
        leader = self.cluster.leader(queue.partition)
        if leader is None or leader.node != node:
            self.schedule(queue)
            return None
        if queue.in_flight and self._broker_of[queue.partition] != node:
            return None
        now_s = self._now_s()
        batch = queue.next_batch(now_s)
        if batch is None:
            return None
        self.retries += batch.was_sent
        self._broker_of[queue.partition] = node
        batch.leader_epoch = leader.epoch
        return batch, queue.send(batch, now_s)

    # Producer ids.

    async def _start_queue(self, queue: Queue) -> None:
        if queue.producer is not None:
            # A gap: this queue gets another producer id, the others keep theirs. Unless an old leader reported it.
            producer = await self._new_producer()
            error = await self.cluster.refresh_quietly(queue.topic)
            if error is not None:
                self.last_error = error
            queue.learn_epoch(self._known_epoch(queue))
            if queue.needs_producer:
                name = f"{queue.topic}-{queue.partition.partition}"
                LOGGER.info("partition=%s continues with a new producer id after a batch that failed", name)
        else:
            if self._producer is None:
                self._producer = asyncio.get_running_loop().create_task(self._new_producer())
            producer = await asyncio.shield(self._producer)
        self._paused.discard(queue.partition)
        if queue.needs_producer:
            queue.start(producer)
            self._report(queue)
        self.schedule(queue)

    async def _new_producer(self) -> ProducerIdAndEpoch:
        """Retries without a limit: batches have their deadlines."""
        backoff = self.cluster.backoff()
        while True:
            brokers = sorted(self.cluster.view.brokers)
            self.cluster.random.shuffle(brokers)
            for node in brokers:
                try:
                    response = await self.cluster.call_node(
                        node, _INIT, pb.InitProducerIdRequest(), timeout_ms=self.config.request_timeout_ms // 3
                    )
                    return ProducerIdAndEpoch(response.producer_id, response.producer_epoch)
                except TidelogError as error:
                    self.last_error = error
            await asyncio.sleep(backoff.next_s())
            await self.cluster.refresh_quietly()

    # Leaders.

    def _find_leader(self, queue: Queue) -> None:
        self._leaderless[queue.partition] = None
        if not self._is_finding_leaders:
            self._is_finding_leaders = True
            self._tasks.spawn(self._find_leaders())

    async def _find_leaders(self) -> None:
        """Refresh metadata until every leaderless queue has a leader, or is empty."""
        attempts = 0
        try:
            while self._leaderless:
                names = dict.fromkeys(self.queues[partition].topic for partition in self._leaderless)
                error = await self.cluster.refresh_quietly(*names)
                self._is_view_fresh = error is None
                if error is not None:
                    self.last_error = error
                for partition in list(self._leaderless):
                    queue = self.queues[partition]
                    if not queue.batches or self.cluster.leader(partition) is not None:
                        del self._leaderless[partition]
                        self.schedule(queue)
                    elif error is None and self._was_recreated(queue):
                        del self._leaderless[partition]
                        self._fail_recreated(queue)
                if self._leaderless:
                    attempts += 1
                    await asyncio.sleep(self._backoff_s(attempts))
        finally:
            self._is_finding_leaders = False

    def _backoff_s(self, failures: int) -> float:
        """Short for the time of an election, longer after it."""
        if failures > _SHORT_BACKOFFS:
            return self.cluster.config.retry_backoff_max_ms * (0.8 + 0.4 * self.cluster.random.random()) / 1000
        longest_s = _BACKOFF_MAX_S if failures > 1 else 2 * _BACKOFF_MIN_S
        return _BACKOFF_MIN_S + (longest_s - _BACKOFF_MIN_S) * self.cluster.random.random()

    def _was_recreated(self, queue: Queue) -> bool:
        """The topic was deleted and created again. One that is only unknown may still become known."""
        known = self.cluster.view.topics.get(queue.topic)
        return known is not None and known.topic_id != queue.partition.topic_id

    def _fail_recreated(self, queue: Queue) -> None:
        for batch in queue.pending():
            error = f"topic '{queue.topic}' was deleted and created again; this record was sent to the old one"
            queue.fail(batch, UnknownTopicIdError(error))
        self._report(queue)

    def forget_deleted(self) -> None:
        """Drop idle queues of topics that do not exist any more. A queue that is created later for one of them gets
        another producer id, or the epoch of another transaction: under the same the log would take new records for
        repeats."""
        busy = {*self._paused, *self._leaderless}
        for partition, queue in list(self.queues.items()):
            known = self.cluster.view.topics.get(queue.topic)
            exists = known is not None and known.topic_id == partition.topic_id
            is_numbered = queue.producer is not None and queue.producer == self.transaction
            if exists or queue.batches or queue.unreported or partition in busy or is_numbered:
                continue
            del self.queues[partition]
            self._broker_of.pop(partition, None)
            self._failures.pop(partition, None)
            if self._producer is not None and self._producer.done():
                self._producer = None

    # Responses.

    def answered(self, queue: Queue, batch: ProducerBatch, row: pb.ProducedPartition) -> None:
        self._answered.set()
        error = _error_of(row)
        if error is None or error.code is ErrorCode.DUPLICATE_SEQUENCE_NUMBER:
            self._failures.pop(queue.partition, None)
            queue.stored(batch, Stored(row.base_offset if error is None else -1, row.append_time_ms), self._now_s())
            self._report(queue)
            self.schedule(queue)
            return
        self.last_error = error
        self.cluster.learn_leader(queue.partition, row.leader, row.leader_epoch)
        known_epoch = self._known_epoch(queue)
        # A broker that names another leader answered as the leader that it was when the batch was sent.
        answered_epoch = row.leader_epoch if row.leader == self._broker_of[queue.partition] else batch.leader_epoch
        queue.rejected(batch, error, answered_epoch=answered_epoch, known_epoch=known_epoch)
        has_failed = batch.outcome is not None
        self._report(queue)
        if self._stop_reason is not None:
            self._fail_unsent(queue)
            return
        if queue.in_flight:
            return  # the last of them decides how to continue
        has_hint = error.code in _MOVED and known_epoch > batch.leader_epoch
        if has_failed or queue.needs_producer or has_hint:
            self.schedule(queue)
        else:
            self.retry(queue)

    def _known_epoch(self, queue: Queue) -> int:
        leader = self.cluster.view.leader(queue.partition)
        return -1 if leader is None else leader.epoch

    def retry(self, queue: Queue) -> None:
        """After a failed attempt: a backoff, fresh metadata, again."""
        self._answered.set()
        self._report(queue)
        if self._stop_reason is not None:
            self._fail_unsent(queue)
        elif queue.batches and not self.is_closed and queue.partition not in self._paused:
            self._paused.add(queue.partition)
            self._tasks.spawn(self._retry(queue))

    async def _retry(self, queue: Queue) -> None:
        failures = self._failures[queue.partition] = self._failures.get(queue.partition, 0) + 1
        await asyncio.sleep(self._backoff_s(failures))
        error = await self.cluster.refresh_quietly(queue.topic)
        if error is not None:
            self.last_error = error
        elif self._was_recreated(queue):
            self._fail_recreated(queue)
        self._paused.discard(queue.partition)
        self.schedule(queue)

    def _report(self, queue: Queue) -> None:
        for batch in queue.pop_reportable():
            self._on_done(batch)
            if self.stops_at_failure and isinstance(batch.outcome, TidelogError):
                self._stop(batch.outcome)

    # Deadlines.

    def _watch_deadlines(self) -> None:
        if not self._is_watching_deadlines:
            self._is_watching_deadlines = True
            self._tasks.spawn(self._expire_batches())

    async def _expire_batches(self) -> None:
        try:
            while True:
                deadlines = [batch.deadline_s for queue in self.queues.values() for batch in queue.pending()]
                if not deadlines:
                    return
                await asyncio.sleep(max(0.01, min(deadlines) - self._now_s()))
                for queue in list(self.queues.values()):
                    for batch in queue.expired(self._now_s()):
                        queue.fail(batch, self._timed_out(queue, batch))
                    self._report(queue)
                    self.schedule(queue)
        finally:
            self._is_watching_deadlines = False

    def _timed_out(self, queue: Queue, batch: ProducerBatch) -> DeliveryTimeoutError:
        name = f"{queue.topic}-{queue.partition.partition}"
        was_sent, has_leader = batch.may_be_stored or batch.is_in_flight, not self._is_leaderless(queue.partition)
        cause = batch.last_error or self.last_error
        timeout_ms = (batch.deadline_s - batch.opened_s) * 1000
        waited = f"not acknowledged in {timeout_ms:.0f} ms"
        if not has_leader:
            waited = f"{name} has no leader; {waited}"
        elif cause is not None:
            # An earlier attempt may have stored what the last one, by its own words, has not.
            waited += f"; {'the last attempt failed' if was_sent else 'last error'}: {cause}"
        records, verb = ("1 record", "was") if batch.count == 1 else (f"{batch.count} records", "were")
        outcome = "may be stored or not" if was_sent else f"{verb} not stored"
        message = f"{records} to {name} {outcome}: {waited}{self.cluster.controller_hint()}"
        return DeliveryTimeoutError(message, was_sent=was_sent) if was_sent or has_leader else NoLeaderError(message)

    def _is_leaderless(self, partition: PartitionId) -> bool:
        """The cluster reported it, and lately."""
        known = self.cluster.view.leader(partition)
        return partition in self._leaderless and self._is_view_fresh and known is not None and known.node < 0
