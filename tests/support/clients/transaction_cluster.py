"""A broker for transactional producers: logs in memory, and the real machine of the transaction coordinator.

    cluster = TransactionCluster({"t": 2})
    producer = cluster.producer(transactional_id="a")

Markers are written at once, unless `writes_markers` is unset. What fails is scripted by the name of a method:

    cluster.fail("End", error)        the next request is rejected, and has no effect
    cluster.lose("End")               the next request has its effect, and its answer is lost
    cluster.hold("End")               requests wait for `release` before they have an effect
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any
from uuid import UUID

from support.clients.producers import SameLoop
from tidelog.client.cluster import ClusterClient
from tidelog.client.new_cluster import client_config
from tidelog.client.producer.aio import Producer
from tidelog.coordinator.transactions import requests
from tidelog.coordinator.transactions.machine import TransactionMachine
from tidelog.coordinator.transactions.queries import markers_to_write, status_name
from tidelog.coordinator.transactions.requests import ProducerIdNeeded
from tidelog.coordinator.transactions.state import EMPTY
from tidelog.log.batch import decode
from tidelog.log.batch_header import read_header
from tidelog.model.errors import (
    CallTimeoutError,
    InvalidProducerEpochError,
    OutOfOrderSequenceError,
    RemoteError,
    StreamBrokenError,
    TidelogError,
)
from tidelog.model.ids import Offset, PartitionId, TopicId
from tidelog.rpc.grpc.errors import as_message
from tidelog.rpc.grpc.methods import Method
from tidelog.rpc.v1 import cluster_pb2, groups_pb2, log_pb2
from tidelog.rpc.v1 import transactions_pb2 as pb

ADDRESS = "a:1"
OPEN, COMMITTED, ABORTED, PLAIN = "open", "committed", "aborted", "plain"
OFFSETS = PartitionId(TopicId(UUID(int=99)), 0)
"""Stands for the partition of __consumer_offsets in the coordinator's state."""


@dataclass(slots=True)
class StoredBatch:
    producer_id: int
    epoch: int
    sequence: int
    values: list[bytes]
    outcome: str


@dataclass(slots=True)
class FakeLog:
    batches: list[StoredBatch] = field(default_factory=list)
    epochs: dict[int, int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return sum(len(batch.values) for batch in self.batches)


class TransactionCluster:
    """Implements `Connections`."""

    def __init__(self, topics: Mapping[str, int]) -> None:
        self.topics = {name: (UUID(int=number + 1), count) for number, (name, count) in enumerate(topics.items())}
        self.logs: dict[PartitionId, FakeLog] = defaultdict(FakeLog)
        self.offsets: dict[tuple[str, str, int], int] = {}
        """Committed ones, by group, topic and partition."""
        self.pending: list[tuple[int, tuple[str, str, int], int]] = []
        self.machine = TransactionMachine()
        self.state = EMPTY
        self.writes_markers = True
        self.group_error: TidelogError | None = None
        self.last_sequence = 0
        """Of the requests with offsets; one producer of a cluster sends them."""
        self.calls: list[str] = []
        self._producer_ids = 1_000
        self._failures: dict[str, deque[TidelogError]] = defaultdict(deque)
        self._lost: Counter[str] = Counter()
        self._held: dict[str, asyncio.Event] = {}

    def producer(self, **options: Any) -> FakeProducer:
        return FakeProducer(self, **options)

    # Scripts.

    def fail(self, method: str, *errors: TidelogError) -> None:
        self._failures[method].extend(errors)

    def lose(self, method: str, times: int = 1) -> None:
        self._lost[method] += times

    def hold(self, method: str) -> None:
        self._held[method] = asyncio.Event()

    def release(self, method: str) -> None:
        self._held.pop(method).set()

    # What there is.

    def values(self, topic: str, outcome: str = COMMITTED) -> list[bytes]:
        topic_id, count = self.topics[topic]
        logs = [self.logs[PartitionId(TopicId(topic_id), number)] for number in range(count)]
        return [value for log in logs for batch in log.batches if batch.outcome == outcome for value in batch.values]

    def status(self, transactional_id: str) -> str:
        return self.ask_machine(transactional_id).status_name

    def ask_machine(self, transactional_id: str) -> Description:
        transaction = self.state.get(transactional_id)
        assert transaction is not None
        return Description(status_name(transaction), transaction.epoch, transaction.last_token)

    # Connections.

    async def call(self, address: str, method: Method, request: Any, *, timeout_ms: int) -> Any:
        assert address == ADDRESS
        self.calls.append(method.name)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._wait(method.name)
        except TimeoutError:
            raise CallTimeoutError("held by the test") from None
        parsed = method.parse(request.SerializeToString())
        try:
            answer = self._answer(method.name, parsed)
        except TidelogError as error:
            raise RemoteError(str(error), code=error.code) from None
        if self._lost[method.name]:
            self._lost[method.name] -= 1
            raise CallTimeoutError("the answer was lost")
        return method.response.FromString(answer.SerializeToString())

    async def _wait(self, name: str) -> None:
        if (held := self._held.get(name)) is not None:
            await held.wait()
        if self._failures[name]:
            raise self._failures[name].popleft()

    async def open(self, address: str, method: Method, request: Any = None) -> FakeExchange:
        assert (address, method.name) == (ADDRESS, "ProduceStream")
        return FakeExchange(self, method)

    async def close(self) -> None: ...

    def _answer(self, name: str, request: Any) -> Any:
        handlers: dict[str, Callable[[Any], Any]] = {
            "Metadata": self._metadata,
            "FindCoordinator": self._find,
            "InitProducerId": lambda _: log_pb2.InitProducerIdResponse(producer_id=self._new_id()),
            "Init": self._init,
            "End": self._end,
            "Join": self._join,
            "Prepare": self._prepare,
            "CommitOffsets": self._commit_offsets,
        }
        return handlers[name](request)

    def _metadata(self, request: cluster_pb2.MetadataRequest) -> cluster_pb2.MetadataResponse:
        answer = cluster_pb2.MetadataResponse(cluster_id="c", metadata_offset=1)
        answer.brokers.add(id=1, host="a", port=1)
        for name in request.topics:
            if name in self.topics:
                topic_id, count = self.topics[name]
                topic = answer.topics.add(name=name, topic_id=topic_id.bytes)
                for number in range(count):
                    topic.partitions.add(partition=number, leader=1, leader_epoch=1)
        return answer

    def _find(self, request: Any) -> Any:
        if isinstance(request, pb.FindTransactionCoordinatorRequest):
            answer: Any = pb.FindTransactionCoordinatorResponse()
            for name in request.transactional_ids:
                answer.coordinators.add(transactional_id=name, broker=1, host="a", port=1)
            return answer
        found = groups_pb2.FindCoordinatorResponse()
        for name in request.groups:
            found.coordinators.add(group=name, broker=1, host="a", port=1)
        return found

    # The coordinator.

    def _new_id(self) -> int:
        self._producer_ids += 1
        return self._producer_ids

    def ask(self, kind: Any, /, **fields: Any) -> Any:
        now_ms = int(asyncio.get_running_loop().time() * 1000)
        request = kind(now_ms=now_ms, **fields)
        try:
            decisions, reply = self.machine.decide(self.state, request, offset=Offset(0))
        except ProducerIdNeeded:
            request = kind(now_ms=now_ms, new_producer_id=self._new_id(), **fields)
            decisions, reply = self.machine.decide(self.state, request, offset=Offset(0))
        self.state = self.machine.apply(self.state, decisions)
        if self.writes_markers:
            self.write_markers()
        return reply

    def write_markers(self) -> None:
        for name, transaction in sorted(self.state.ids.items()):
            if not transaction.is_ending:
                continue
            for marker in markers_to_write(name, transaction, coordinator_epoch=1):
                outcome = COMMITTED if marker.is_commit else ABORTED
                for place in marker.partitions:
                    partition = PartitionId(TopicId(place.topic_id), place.partition)
                    self._mark(partition, marker.producer_id, marker.epoch, outcome)
            now_ms = int(asyncio.get_running_loop().time() * 1000)
            complete = requests.Complete(transactional_id=name, number=transaction.number, now_ms=now_ms)
            decisions, _ = self.machine.decide(self.state, complete, offset=Offset(0))
            self.state = self.machine.apply(self.state, decisions)

    def _mark(self, partition: PartitionId, producer_id: int, epoch: int, outcome: str) -> None:
        if partition == OFFSETS:
            mine = [entry for entry in self.pending if entry[0] == producer_id]
            self.pending = [entry for entry in self.pending if entry[0] != producer_id]
            if outcome == COMMITTED:
                self.offsets |= {place: offset for _, place, offset in mine}
            return
        log = self.logs[partition]
        log.epochs[producer_id] = epoch
        for batch in log.batches:
            if batch.producer_id == producer_id and batch.outcome == OPEN:
                batch.outcome = outcome

    def time_out(self, transactional_id: str) -> None:
        """As if the transaction's time were over."""
        self.ask(requests.Abort, transactional_id=transactional_id)

    def _init(self, request: pb.InitTransactionsRequest) -> pb.InitTransactionsResponse:
        fields: dict[str, Any] = {
            "transactional_id": request.transactional_id,
            "timeout_ms": request.transaction_timeout_ms,
            "keep_prepared": request.keep_prepared,
        }
        reply = self.ask(requests.InitProducer, **fields)
        if reply.is_ending:
            reply = self.ask(requests.InitProducer, **fields)
        answer = pb.InitTransactionsResponse(
            producer_id=reply.producer_id, producer_epoch=reply.epoch, last_token=reply.last_token
        )
        if reply.has_open:
            answer.prepared.producer_id, answer.prepared.producer_epoch = reply.open_producer_id, reply.open_epoch
        return answer

    def _end(self, request: pb.EndTransactionRequest) -> pb.EndTransactionResponse:
        reply = self.ask(
            requests.End,
            transactional_id=request.transactional_id,
            producer_id=request.producer_id,
            epoch=request.producer_epoch,
            is_commit=request.is_commit,
            members=tuple(request.members),
            token=request.token,
        )
        return pb.EndTransactionResponse(
            producer_id=reply.producer_id,
            producer_epoch=reply.epoch,
            was_done=reply.was_done,
            is_earlier=reply.is_earlier,
        )

    def _join(self, request: pb.JoinTransactionRequest) -> pb.JoinTransactionResponse:
        reply = self.ask(requests.Join, transactional_id=request.transactional_id, label=request.label)
        return pb.JoinTransactionResponse(producer_id=reply.producer_id, producer_epoch=reply.epoch)

    def _prepare(self, request: pb.PrepareTransactionRequest) -> pb.PrepareTransactionResponse:
        self.ask(
            requests.Prepare,
            transactional_id=request.transactional_id,
            producer_id=request.producer_id,
            epoch=request.producer_epoch,
        )
        return pb.PrepareTransactionResponse()

    def _add(self, transactional_id: str, producer_id: int, epoch: int, partitions: Iterable[PartitionId]) -> None:
        self.ask(
            requests.AddPartitions,
            transactional_id=transactional_id,
            producer_id=producer_id,
            epoch=epoch,
            partitions=frozenset(partitions),
        )

    def _commit_offsets(self, request: pb.CommitTransactionOffsetsRequest) -> pb.CommitTransactionOffsetsResponse:
        answer = pb.CommitTransactionOffsetsResponse()
        assert request.sequence > self.last_sequence, "each request has the next number, also a repeated one"
        self.last_sequence = request.sequence
        error = self.group_error
        if error is None:
            self._add(request.transactional_id, request.producer_id, request.producer_epoch, [OFFSETS])
        for row in request.offsets:
            answer.offsets.add(
                topic=row.topic, partition=row.partition, error=None if error is None else as_message(error)
            )
            if error is None:
                self.pending.append((request.producer_id, (request.group, row.topic, row.partition), row.offset))
        return answer

    # Logs.

    def append(self, transactional_id: str, row: log_pb2.ProducePartition) -> int:
        partition = PartitionId(TopicId(UUID(bytes=row.topic_id)), row.partition)
        header = read_header(row.batches)
        assert header.is_transactional == bool(transactional_id), "the request says what the batch says"
        log = self.logs[partition]
        producer_id, epoch = header.producer_id, header.producer_epoch
        if epoch < log.epochs.get(producer_id, 0):
            raise InvalidProducerEpochError(f"epoch {epoch} of producer {producer_id} is fenced")
        mine = [one for one in log.batches if (one.producer_id, one.epoch) == (producer_id, epoch)]
        for one in mine:
            if one.sequence == header.base_sequence:
                return 0  # a repeat
        if header.base_sequence != sum(len(one.values) for one in mine):
            raise OutOfOrderSequenceError(f"sequence {header.base_sequence}")
        if transactional_id and not any(one.outcome == OPEN for one in mine):
            self._add(transactional_id, producer_id, epoch, [partition])
        log.epochs[producer_id] = epoch
        values = [record.value or b"" for record in decode(row.batches, decompressed_bytes_max=1 << 20)]
        offset = log.end
        outcome = OPEN if transactional_id else PLAIN
        log.batches.append(StoredBatch(producer_id, epoch, header.base_sequence, values, outcome))
        return offset


@dataclass(frozen=True, slots=True)
class Description:
    status_name: str
    epoch: int
    last_token: bytes


class FakeExchange:
    """A ProduceStream."""

    def __init__(self, cluster: TransactionCluster, method: Method) -> None:
        self._cluster = cluster
        self._method = method
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._is_closed = False

    async def send(self, request: Any) -> None:
        await self._requests.put(self._method.parse(request.SerializeToString()))

    async def receive(self) -> Any:
        request = await self._requests.get()
        if request is None:
            raise StreamBrokenError("closed by the client")
        cluster = self._cluster
        cluster.calls.append("Produce")
        error: TidelogError | None = None
        try:
            await cluster._wait("Produce")
        except TidelogError as failure:
            error = failure
        answer = log_pb2.ProduceResponse()
        for row in request.partitions:
            result = answer.partitions.add(
                topic=row.topic, topic_id=row.topic_id, partition=row.partition, leader=1, leader_epoch=1
            )
            try:
                if error is not None:
                    raise error
                result.base_offset = cluster.append(request.transactional_id, row)
                result.append_time_ms = -1
            except TidelogError as failure:
                result.error.CopyFrom(as_message(failure))
        if cluster._lost["Produce"]:
            cluster._lost["Produce"] -= 1
            raise StreamBrokenError("the answer was lost")
        return answer

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._requests.put_nowait(None)


class FakeProducer(Producer):
    """The asyncio producer, on the loop of its test."""

    def __init__(self, cluster: TransactionCluster, **options: Any) -> None:
        self._cluster_of_test = cluster
        self._now_s = asyncio.get_running_loop().time
        self._clock_ms = lambda: 1_000
        super().__init__(ADDRESS, **options)

    def _acquire(self, owner: object) -> SameLoop:
        return SameLoop(asyncio.get_running_loop())

    def _new_random(self) -> Random:
        return Random(1)

    def _new_cluster(self, io: Any) -> ClusterClient:
        return ClusterClient(
            [ADDRESS],
            self._cluster_of_test,
            random=Random(1),
            clock=_Clock(),
            config=client_config(self._config),
        )


class _Clock:
    def now_ms(self) -> int:
        return 1_000
