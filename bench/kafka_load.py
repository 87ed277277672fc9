"""Load generators of `kafka_api`: for each API the leanest client that checks every response.

Requests are built before the clock starts. The Kafka side is a plain socket: it sends a window of requests, and the
next one for each response. The gRPC side is `grpc.aio` without serializers: concurrent calls, each followed by the
next. Both check the error of every response. Not a benchmark: it has no `run()`.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any

from grpc import aio  # type: ignore[import-untyped]

from bench.brokers_load import LIMIT_S
from tidelog.rpc.kafka.headers import request_frame
from tidelog.rpc.kafka.messages import FETCH, PRODUCE
from tidelog.rpc.kafka.messages.data import (
    FetchPartition,
    FetchRequest,
    FetchTopic,
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from tidelog.rpc.v1 import log_pb2 as pb

PRODUCE_VERSION, FETCH_VERSION = 12, 12
FETCH_BYTES = 1 << 20
IDLE_S = 3.0
TIMEOUT_MS = 30_000
_SIZE_CORRELATION = Struct(">ii")
_PRODUCED_ERROR_AT = 8 + 1 + 1 + 1
"""Tags of the header, count of topics, length of the name; behind the name: count of partitions, index, error."""
_INDEX_ERROR = Struct(">ih")
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@dataclass
class Spent:
    """The cost of one round."""

    requests: int
    wall_s: float
    broker_s: float
    """Processor time of the broker's process, in seconds."""
    client_s: float

    @property
    def rate(self) -> float:
        return self.requests / self.wall_s


def measured(pid: int, requests: int, work: Callable[[], object], *, idle: float = 0.0) -> Spent:
    """`idle` is the fraction of a core that the idle broker uses: it is subtracted."""
    broker_s, client_s, began_s = busy_s(pid), _own_s(), time.perf_counter()
    work()
    wall_s = time.perf_counter() - began_s
    return Spent(requests, wall_s, busy_s(pid) - broker_s - idle * wall_s, _own_s() - client_s)


def idle_part(pid: int) -> float:
    """Return the fraction of a core that the idle broker uses."""
    before_s, began_s = busy_s(pid), time.perf_counter()
    time.sleep(IDLE_S)
    return (busy_s(pid) - before_s) / (time.perf_counter() - began_s)


def busy_s(pid: int) -> float:
    """Processor time of the threads that a process has now, to the nanosecond; `stat` counts in ticks of 10 ms."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # ended meanwhile
            total += int((thread / "schedstat").read_text(encoding="ascii").split()[0])
    return total / 1e9


def _own_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# Requests.


def kafka_produce(topic: str, partition: int, batch: bytes, acks: int, count: int) -> list[bytes]:
    """Return frames with the correlation ids 0 to `count` - 1."""
    rows = [PartitionProduceData(index=partition, records=batch)]
    request = ProduceRequest(
        acks=acks, timeout_ms=TIMEOUT_MS, topic_data=[TopicProduceData(name=topic, partition_data=rows)]
    )
    body = PRODUCE.encode_request(PRODUCE_VERSION, request)
    return [b"".join(request_frame(PRODUCE, PRODUCE_VERSION, number, "bench", body)) for number in range(count)]


def kafka_fetch(topic: str, partition: int, offsets: Sequence[int]) -> list[bytes]:
    """Return one request per offset, without a session."""
    frames = []
    for number, offset in enumerate(offsets):
        wanted = FetchPartition(partition=partition, fetch_offset=offset, partition_max_bytes=FETCH_BYTES)
        request = FetchRequest(
            max_wait_ms=0, min_bytes=1, max_bytes=FETCH_BYTES, topics=[FetchTopic(topic=topic, partitions=[wanted])]
        )
        body = FETCH.encode_request(FETCH_VERSION, request)
        frames.append(b"".join(request_frame(FETCH, FETCH_VERSION, number, "bench", body)))
    return frames


def grpc_produce(topic: str, partition: int, batch: bytes, acks: int) -> bytes:
    request = pb.ProduceRequest(acks=acks, timeout_ms=TIMEOUT_MS)
    request.partitions.add(topic=topic, partition=partition, batches=batch)
    return request.SerializeToString()


def grpc_fetch(topic: str, partition: int, offset: int) -> bytes:
    request = pb.FetchRequest(max_wait_ms=0, min_bytes=1, max_bytes=FETCH_BYTES)
    request.partitions.add(topic=topic, partition=partition, offset=offset, max_bytes=FETCH_BYTES)
    return request.SerializeToString()


# The Kafka side.


class KafkaSocket:
    """One connection; responses arrive in the order of the requests."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("localhost", port), timeout=LIMIT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(4 << 20)

    def close(self) -> None:
        self._socket.close()

    def produce(self, frames: Sequence[bytes], count: int, window: int, topic: str) -> None:
        """Send `count` requests, the frames in turn, `window` in flight; raises if one is rejected."""
        error_at = _PRODUCED_ERROR_AT + len(topic)

        def check(answer: memoryview) -> None:
            _, error = _INDEX_ERROR.unpack_from(answer, error_at)
            assert error == 0, f"a produce request was refused: error {error}"

        self._pipeline(frames, count, window, check)

    def fetch(self, frames: Sequence[bytes], count: int, window: int) -> int:
        """Return the bytes of all responses."""
        total = 0

        def check(answer: memoryview) -> None:
            nonlocal total
            assert len(answer) > FETCH_BYTES // 2, f"an answer of {len(answer)} bytes has no data"
            total += len(answer)

        self._pipeline(frames, count, window, check)
        return total

    def _pipeline(self, frames: Sequence[bytes], count: int, window: int, check: Callable[[memoryview], None]) -> None:
        sent = received = have = 0
        view = memoryview(self._buffer)
        while received < count:
            more = min(count - sent, window - (sent - received))
            if more > 0:
                at = sent % len(frames)
                run = frames[at : at + more]
                self._socket.sendall(b"".join(run) if len(run) > 1 else run[0])
                sent += len(run)
                if len(run) < more:
                    continue
            arrived = self._socket.recv_into(view[have:])
            assert arrived, "the broker has closed the connection"
            have += arrived
            at = 0
            while have - at >= _SIZE_CORRELATION.size:
                size, number = _SIZE_CORRELATION.unpack_from(view, at)
                end = at + 4 + size
                if have < end:
                    break
                assert number == received % len(frames), "answers come in order"
                check(view[at:end])
                received += 1
                at = end
            if at:
                view[: have - at] = bytes(view[at:have])
                have -= at


# The gRPC side.


class GrpcCalls:
    """One channel with concurrent calls."""

    def __init__(self, port: int) -> None:
        self._channel = aio.insecure_channel(f"localhost:{port}", options=_OPTIONS)
        self._produce = self._channel.unary_unary("/tidelog.v1.Log/Produce")
        self._fetch = self._channel.unary_unary("/tidelog.v1.Log/Fetch")

    async def close(self) -> None:
        await self._channel.close()

    async def produce(self, request: bytes, count: int, at_once: int) -> None:
        def check(answer: bytes) -> None:
            (row,) = pb.ProduceResponse.FromString(answer).partitions
            assert not row.HasField("error"), f"a produce request was refused: {row.error}"

        await self._call(self._produce, [request], count, at_once, check)

    async def fetch(self, requests: Sequence[bytes], count: int, at_once: int) -> int:
        total = 0

        def check(answer: bytes) -> None:
            nonlocal total
            assert len(answer) > FETCH_BYTES // 2, f"an answer of {len(answer)} bytes has no data"
            total += len(answer)

        await self._call(self._fetch, requests, count, at_once, check)
        return total

    async def _call(
        self, method: Any, requests: Sequence[bytes], count: int, at_once: int, check: Callable[[bytes], None]
    ) -> None:
        left = iter(range(count))

        async def one_after_another() -> None:
            for number in left:
                check(await method(requests[number % len(requests)]))

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(one_after_another())
