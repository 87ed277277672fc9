"""The ProduceStream of a sender to one broker: requests in order, responses in order (see `sender`)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tidelog.client.cluster import ClusterClient
from tidelog.client.connections import Exchange
from tidelog.client.producer.fast_path import ProducerBatch
from tidelog.client.producer.partition_queue import PartitionQueue
from tidelog.client.producer.produce_frame import ProduceFrame
from tidelog.model.errors import (
    CallTimeoutError,
    ErrorCode,
    StreamClosedError,
    TidelogError,
    UnreachableError,
    first_error,
)
from tidelog.model.ids import PartitionId
from tidelog.rpc.grpc.methods import PARTITIONS_MAX, method_named
from tidelog.rpc.v1 import log_pb2 as pb

_STREAM = method_named("Log", "ProduceStream")
_OVERHEAD = 64 << 10
"""Bytes of a request beside its batches."""

Queue = PartitionQueue[ProducerBatch]


class StreamConfig(Protocol):
    """What a stream needs of a `SenderConfig`."""

    @property
    def acks(self) -> int: ...
    @property
    def request_timeout_ms(self) -> int: ...
    @property
    def requests_max(self) -> int: ...
    @property
    def request_bytes_max(self) -> int: ...
    @property
    def silence_ms(self) -> int: ...


class StreamOwner(Protocol):
    """What a stream needs of a `Sender`."""

    cluster: ClusterClient
    streams: dict[int, ProduceStream]
    request_bytes_max: int
    last_error: TidelogError | None
    transactional_id: str

    @property
    def config(self) -> StreamConfig: ...

    def next_batch(self, node: int, queue: Queue) -> tuple[ProducerBatch, bytearray] | None: ...

    def answered(self, queue: Queue, batch: ProducerBatch, row: pb.ProducedPartition) -> None: ...

    def retry(self, queue: Queue) -> None: ...


@dataclass(frozen=True, slots=True)
class _Request:
    """A request that is not answered yet; `size` is that of its message."""

    sent_s: float
    batches: list[tuple[Queue, ProducerBatch]]
    size: int


class ProduceStream:
    """`_ready` are the queues that may have a batch to send, in turn."""

    def __init__(self, sender: StreamOwner, node: int) -> None:
        self._sender = sender
        self._node = node
        self._ready: dict[PartitionId, Queue] = {}
        self._wake = asyncio.Event()
        self._unanswered: deque[_Request] = deque()
        self._exchange: Exchange | None = None

    def add(self, queue: Queue) -> None:
        self._ready[queue.partition] = queue
        self._wake.set()

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()

    async def run(self) -> None:
        """Until the stream breaks; then unanswered batches are lost, and all queues retry."""
        sender = self._sender
        error: TidelogError
        try:
            self._exchange = await sender.cluster.open_node(self._node, _STREAM)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._receive(self._exchange))
                group.create_task(self._watch())
                await self._send(self._exchange)
            raise AssertionError("a stream ends by an error")
        except* TidelogError as errors:
            first = first_error(errors)
            assert isinstance(first, TidelogError)
            error = first
        finally:
            if self._exchange is not None:
                self._exchange.close()
            if sender.streams.get(self._node) is self:
                del sender.streams[self._node]
        self._lose(error)

    def _lose(self, error: TidelogError) -> None:
        if isinstance(error, UnreachableError):
            error = self._sender.cluster.unreachable(self._node, error)
        self._sender.last_error = error
        queues = dict(self._ready)
        was_carried = not isinstance(error, UnreachableError)
        rejected = self._too_large() if error.code is ErrorCode.MESSAGE_TOO_LARGE else None
        for request in self._unanswered:
            if request is rejected:
                was_carried = False  # the broker read neither it nor anything behind it
            for queue, batch in request.batches:
                queues[queue.partition] = queue
                if request is rejected and len(request.batches) == 1:
                    queue.rejected(batch, error)
                else:
                    queue.lost(batch, error, was_carried=was_carried)
        self._unanswered.clear()
        for queue in queues.values():
            self._sender.retry(queue)

    def _too_large(self) -> _Request | None:
        """The largest unanswered request: if any is over a limit, this one is."""
        if not self._unanswered:
            return None
        request = max(self._unanswered, key=lambda unanswered: unanswered.size)
        if len(request.batches) > 1:
            self._sender.request_bytes_max = max(1, min(self._sender.request_bytes_max, request.size) // 2)
        return request

    def _is_held_up(self) -> bool:
        """The last request is large, and not answered."""
        return bool(self._unanswered) and self._unanswered[-1].size > self._sender.config.request_bytes_max + _OVERHEAD

    async def _send(self, exchange: Exchange) -> None:
        config = self._sender.config
        while True:
            while not self._ready or len(self._unanswered) >= config.requests_max or self._is_held_up():
                self._wake.clear()
                await self._wake.wait()
            frame = ProduceFrame(
                acks=config.acks,
                timeout_ms=config.request_timeout_ms,
                transactional_id=self._sender.transactional_id,
            )
            batches: list[tuple[Queue, ProducerBatch]] = []
            limit = self._sender.request_bytes_max
            for queue in list(self._ready.values()):
                if batches and frame.size + queue.next_size() > limit:
                    break
                ready = self._sender.next_batch(self._node, queue)
                # The queue goes behind the others; one without a ready batch is scheduled by a response.
                del self._ready[queue.partition]
                if ready is None:
                    continue
                batch, data = ready
                self._ready[queue.partition] = queue
                frame.add(queue.topic, queue.partition, data, batch.condition)
                batches.append((queue, batch))
                if frame.size >= limit or frame.count >= PARTITIONS_MAX:
                    break
            if batches:
                self._unanswered.append(_Request(asyncio.get_running_loop().time(), batches, frame.message_bytes))
                await exchange.send(frame)

    async def _receive(self, exchange: Exchange) -> None:
        while True:
            response: pb.ProduceResponse = await exchange.receive()
            self._sender.cluster.reached(self._node)
            if not self._unanswered or len(response.partitions) != len(self._unanswered[0].batches):
                raise StreamClosedError("a response that fits no request")
            request = self._unanswered.popleft()
            self._wake.set()
            for (queue, batch), row in zip(request.batches, response.partitions, strict=True):
                self._sender.answered(queue, batch, row)

    async def _watch(self) -> None:
        """Notice a broker that does not answer: one that hangs breaks no connection."""
        sender, config = self._sender, self._sender.config
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(config.silence_ms / 1000)
            if not self._unanswered:
                continue
            request = self._unanswered[0]
            silent_ms = (loop.time() - request.sent_s) * 1000
            if silent_ms < config.silence_ms:
                continue
            if silent_ms > config.request_timeout_ms + config.silence_ms:
                raise CallTimeoutError(f"broker {self._node} has not answered in {silent_ms:.0f} ms", node=self._node)
            await sender.cluster.refresh_quietly(*dict.fromkeys(queue.topic for queue, _ in request.batches))
            if self._unanswered and self._unanswered[0] is request and self._has_moved(request.batches):
                raise CallTimeoutError(f"broker {self._node} is silent, and leads no more", node=self._node)

    def _has_moved(self, batches: Sequence[tuple[Queue, ProducerBatch]]) -> bool:
        leaders = [self._sender.cluster.view.leader(queue.partition) for queue, _ in batches]
        return any(leader is not None and leader.node not in (self._node, -1) for leader in leaders)
