"""An idempotent producer of the Kafka API, as Java's and librdkafka's are.

    values --new--> (a sequence, at most five) --unresolved--> acknowledged
                                  ^   '--retriable error, broken connection--> retries, the lowest sequence first
                                  |
    reset: a new producer id, after everything in flight is answered; what is unresolved then is given up

A request has batches of several partitions of one broker, one for each partition; up to five requests of a connection
are in flight. While a partition has something to repeat, only its lowest sequence is sent. With acks=all a leader that
misses an acknowledged batch before the rejected one fails the run; with acks=1 it makes the producer begin again, since
a leader alone may lose records. So it does if only later batches were acknowledged: a new leader takes any sequence of
a producer that it does not know, and may get a later batch before the first one is repeated (Kafka's do the same).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from simulation.broker_checker import Fail, KnownPartition, ReplicaChecker
from simulation.cluster import Context
from simulation.kafka_client import BACKOFF_S, CODES, GONE, REFRESHES, KafkaClient
from tidelog.log.batch import encode_columns
from tidelog.model.errors import ErrorCode, TransportError
from tidelog.rpc.kafka import messages as apis
from tidelog.rpc.kafka.messages.data import (
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from tidelog.rpc.kafka.messages.transactions import InitProducerIdRequest

if TYPE_CHECKING:
    from tidelog.model.ids import NodeId

ACKS_ALL, ACKS_LEADER = -1, 1
IN_FLIGHT_MAX = 5
QUEUED_MAX = 8
PRODUCE_MS = 700
IDS_SINCE = 13
LOST = (ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.UNKNOWN_PRODUCER_ID, ErrorCode.INVALID_PRODUCER_EPOCH)


@dataclass(slots=True, eq=False)
class Batch:
    values: list[bytes]
    sequence: int
    data: bytes
    leader_epoch: int = -1
    """That the client knew when it sent the batch last."""


@dataclass(slots=True, eq=False)
class Queue:
    """One partition."""

    known: KnownPartition
    name: str
    """Of its values."""
    number: int = 0
    sequence: int = 0
    new: deque[list[bytes]] = field(default_factory=deque)
    unresolved: list[Batch] = field(default_factory=list)
    """With a sequence and without an acknowledgement, by sequence."""
    retries: list[Batch] = field(default_factory=list)
    """Those of `unresolved` that are not in flight, by sequence."""
    not_before_s: float = 0.0
    """After an error."""
    acked: dict[int, int] = field(default_factory=dict)
    """Offsets of the last batches that were acknowledged, by sequence."""

    @property
    def busy(self) -> int:
        return len(self.new) + len(self.unresolved)


class KafkaProducer:
    """The program of one machine; its records go to every partition that `partitions` returns."""

    def __init__(
        self,
        checker: ReplicaChecker,
        brokers: list[NodeId],
        draw: Random,
        fail: Fail,
        *,
        pause_s: float,
        acks: int,
        partitions: Callable[[], list[KnownPartition]],
    ) -> None:
        self.is_stopping = False
        self.acks = acks
        self.resets = self.acked = self.retried = 0
        self.most_in_flight = 0
        """Unresolved batches of one partition."""
        self._checker = checker
        self._brokers = brokers
        self._random = draw
        self._fail = fail
        self._pause_s = pause_s
        self._partitions = partitions
        self._lives = 0
        self._queues: dict[KnownPartition, Queue] = {}
        self._in_flight: dict[int, int] = {}
        """Requests by broker."""
        self._producer_id = self._producer_epoch = -1
        self._wants_reset = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.client: KafkaClient | None = None

    @property
    def busy(self) -> int:
        return sum(queue.busy for queue in self._queues.values() if not queue.known.topic.delete_asked)

    async def run(self, context: Context) -> None:
        context.app = self
        self._lives += 1
        self._name = f"{context.station.name}.{self._lives}"
        self.client = KafkaClient(context, self._brokers, self._random, self._fail, client_id=self._name)
        self._queues, self._in_flight, self._tasks = {}, {}, set()
        self._producer_id, self._wants_reset = -1, False
        context.node.spawn(self._write(), name=f"values of {self._name}")
        while True:
            await asyncio.sleep(0.01)
            if self._wants_reset and not any(self._in_flight.values()):
                self._reset()
            if not self.busy:
                continue
            if self._producer_id < 0:
                await self._init()
            names = [queue.known.topic.name for queue in self._queues.values() if queue.busy]
            await self.client.ready(names)
            self._send_ready()

    async def _write(self) -> None:
        while True:
            await asyncio.sleep(self._random.expovariate(1 / self._pause_s))
            partitions = [known for known in self._partitions() if not known.topic.delete_asked]
            if self.is_stopping or not partitions:
                continue
            known = self._random.choice(partitions)
            queue = self._queues.get(known)
            if queue is None:
                name = f"{self._name}.{known.topic.name}.{known.partition_id.partition}"
                queue = self._queues[known] = Queue(known, name)
            for _ in range(self._random.choice((1, 1, 3, 6))):
                if len(queue.new) < QUEUED_MAX:
                    count = self._random.choice((1, 1, 2, 4))
                    values = [b"%s/%d" % (queue.name.encode(), queue.number + at) for at in range(count)]
                    queue.number += count
                    queue.new.append(values)

    async def _init(self) -> None:
        assert self.client is not None
        while self._producer_id < 0:
            request = InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=2**31 - 1)
            try:
                response = await self.client.call(self.client.any_broker(), request)
            except TransportError as error:
                self.client.note(error.code)
                await self.client.pause()
                continue
            if response.error_code:
                self.client.note(CODES[response.error_code])
                await self.client.pause()
                continue
            self._producer_id, self._producer_epoch = response.producer_id, response.producer_epoch

    # Sending.

    def _send_ready(self) -> None:
        assert self.client is not None
        if self._wants_reset or self.client.is_stale:
            return
        by_broker: dict[int, list[tuple[Queue, Batch]]] = {}
        for queue in self._queues.values():
            known = self.client.leader(queue.known.topic.name, queue.known.partition_id.partition)
            if known.node < 0 or queue.known.topic.delete_asked:
                if queue.busy and known.node < 0:
                    self.client.stale()
                continue
            room = IN_FLIGHT_MAX - self._in_flight.get(known.node, 0)
            while room > len(by_broker.get(known.node, ())) and (batch := self._next(queue)) is not None:
                batch.leader_epoch = known.epoch
                by_broker.setdefault(known.node, []).append((queue, batch))
        for node, batches in by_broker.items():
            for request in _requests(batches):
                self._in_flight[node] = self._in_flight.get(node, 0) + 1
                task = self.client.context.node.spawn(self._exchange(node, request))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _next(self, queue: Queue) -> Batch | None:
        """The next batch that may leave, and is in flight from now on."""
        if asyncio.get_running_loop().time() < queue.not_before_s:
            return None
        if queue.retries:
            if queue.retries[0] is not queue.unresolved[0]:
                return None
            return queue.retries.pop(0)
        if not queue.new or len(queue.unresolved) >= IN_FLIGHT_MAX:
            return None
        values = queue.new.popleft()
        data = encode_columns(
            [1_000] * len(values),
            [None] * len(values),
            list(values),
            producer_id=self._producer_id,
            producer_epoch=self._producer_epoch,
            base_sequence=queue.sequence,
        )
        batch = Batch(values, queue.sequence, data)
        queue.sequence += len(values)
        queue.unresolved.append(batch)
        self.most_in_flight = max(self.most_in_flight, len(queue.unresolved))
        return batch

    async def _exchange(self, node: int, batches: list[tuple[Queue, Batch]]) -> None:
        client = self.client
        assert client is not None
        has_ids = client.version_of(apis.PRODUCE) >= IDS_SINCE
        topics: dict[str, TopicProduceData] = {}
        for queue, batch in batches:
            name = queue.known.topic.name
            topic_id = queue.known.topic.topic_id.bytes if has_ids else bytes(16)
            topic = topics.setdefault(name, TopicProduceData(name=name, topic_id=topic_id))
            topic.partition_data.append(
                PartitionProduceData(index=queue.known.partition_id.partition, records=batch.data)
            )
        request = ProduceRequest(acks=self.acks, timeout_ms=PRODUCE_MS, topic_data=list(topics.values()))
        rows: dict[tuple[str, int], Any] = {}
        try:
            response = await client.call(node, request)
            for topic in response.responses:
                name = client.names.get(topic.topic_id, "") if has_ids else topic.name
                rows.update({(name, row.index): row for row in topic.partition_responses})
        except TransportError as error:
            client.note(error.code)
            client.stale()
        finally:
            self._in_flight[node] -= 1
        for queue, batch in batches:
            self._answered(queue, batch, rows.get((queue.known.topic.name, queue.known.partition_id.partition)))

    # Responses.

    def _answered(self, queue: Queue, batch: Batch, row: Any) -> None:
        """`row` is None if there was no response."""
        client = self.client
        assert client is not None
        if batch not in queue.unresolved:
            return  # given up by a reset
        error = None if row is None or not row.error_code else CODES[row.error_code]
        if error is not None:
            client.note(error)
        if row is not None and error in (None, ErrorCode.DUPLICATE_SEQUENCE_NUMBER):
            self._acknowledged(queue, batch, -1 if error is not None else row.base_offset)
        elif error in LOST and batch is queue.unresolved[0] and batch not in queue.retries:
            if self.acks == ACKS_ALL and any(sequence < batch.sequence for sequence in queue.acked):
                self._fail(self._name, f"{queue.known}: what was acknowledged is missing: {row.error_message}")
            self._wants_reset = True
            self._retry(queue, batch)
        elif error in GONE and queue.known.topic.delete_asked:
            queue.new.clear()
            queue.unresolved.clear()
            queue.retries.clear()
        else:
            if error is not None and not error.value.retriable and error not in LOST:
                self._fail(self._name, f"{queue.known}: {error.name}: {row.error_message}")
            if error in REFRESHES:
                client.stale()
                hint = row.current_leader
                if hint.leader_id >= 0:
                    client.learn(
                        queue.known.topic.name, queue.known.partition_id.partition, hint.leader_id, hint.leader_epoch
                    )
            self._retry(queue, batch)

    def _acknowledged(self, queue: Queue, batch: Batch, base_offset: int) -> None:
        queue.unresolved.remove(batch)
        self.acked += 1
        if self.acks == ACKS_ALL:
            self._check_order(queue, batch.sequence, base_offset)
            self._checker.acked(
                self._name, queue.known, batch.values, base_offset=base_offset, leader_epoch=batch.leader_epoch
            )

    def _check_order(self, queue: Queue, sequence: int, base_offset: int) -> None:
        """Offsets rise with the sequences, in whatever order the acknowledgements come."""
        if base_offset < 0:
            return
        queue.acked[sequence] = base_offset
        offsets = [offset for _, offset in sorted(queue.acked.items())]
        if offsets != sorted(set(offsets)):
            self._fail(self._name, f"{queue.known}: offsets do not rise with the sequences: {queue.acked}")
        if len(queue.acked) > 2 * IN_FLIGHT_MAX:
            del queue.acked[min(queue.acked)]

    def _retry(self, queue: Queue, batch: Batch) -> None:
        self.retried += 1
        queue.not_before_s = asyncio.get_running_loop().time() + self._random.expovariate(1 / BACKOFF_S)
        if batch not in queue.retries:
            queue.retries.append(batch)
            queue.retries.sort(key=lambda one: one.sequence)

    def _reset(self) -> None:
        """Begin again with another producer id; the unresolved batches may be stored or not."""
        self._wants_reset = False
        self._producer_id = -1
        self.resets += 1
        for queue in self._queues.values():
            queue.unresolved.clear()
            queue.retries.clear()
            queue.acked.clear()
            queue.sequence = 0


def _requests(batches: list[tuple[Queue, Batch]]) -> list[list[tuple[Queue, Batch]]]:
    """Requests in the order of the batches, each with one batch of a partition at most."""
    requests: list[list[tuple[Queue, Batch]]] = []
    for queue, batch in batches:
        for request in requests:
            if all(other is not queue for other, _ in request):
                request.append((queue, batch))
                break
        else:
            requests.append([(queue, batch)])
    return requests
