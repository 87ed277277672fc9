"""The delay that quotas give is reported and applied by each API server, and a throttled client holds little.

Real servers and services, with quotas of the test behind them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from grpc import aio  # type: ignore[import-untyped]
from support.async_tests import inside
from support.brokers.cluster import batch
from support.grpc_api.nodes import GrpcCluster, error_of, until
from support.kafka.server import RunningKafkaServer, api_versions, frame, kafka_server, soon

from tidelog.model.errors import ErrorCode
from tidelog.rpc.grpc.methods import method_named
from tidelog.rpc.grpc.throttling import THROTTLE_KEY
from tidelog.rpc.http.server import THROTTLE_HEADER, HttpServer, Page
from tidelog.rpc.kafka.messages import API_VERSIONS, PRODUCE
from tidelog.rpc.kafka.messages.data import PartitionProduceData, ProduceRequest, TopicProduceData
from tidelog.rpc.kafka.shared import READ_BYTES
from tidelog.rpc.v1 import admin_pb2, log_pb2
from tidelog.server.listeners import Address
from tidelog.server.local_nodes import free_ports
from tidelog.services.context import THROTTLE_MS_MAX, RequestContext
from tidelog.services.guard import Guard
from tidelog.services.limits import RequestLimits
from tidelog.services.quotas import Charge

DELAY_MS = 300
DELAY_S = DELAY_MS / 1000
LONG_MS = THROTTLE_MS_MAX


class Delays:
    """Quotas that delay each charge by `delay_ms`."""

    def __init__(self) -> None:
        self.delay_ms = 0
        self.charges = 0

    def charge(self, _context: RequestContext, _charge: Charge, _amount: int) -> int:
        self.charges += 1
        return self.delay_ms


class Timer:
    def __init__(self) -> None:
        self._begun_s = time.monotonic()

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self._begun_s


def run_grpc(
    path: Path, job: Callable[[GrpcCluster, Delays], Awaitable[None]], limits: RequestLimits | None = None
) -> None:
    """One controller and one broker with the topic `t`."""
    delays = Delays()

    async def main() -> None:
        guard = Guard(quotas=delays)
        async with asyncio.timeout(60), GrpcCluster(path, limits=limits, guard=guard) as cluster:
            await cluster.start_controllers(1)
            await cluster.active()
            broker = await cluster.start_broker(11)
            topic = admin_pb2.NewTopic(name="t", partitions=1, replication_factor=1)
            await cluster.call(11, "Admin", "CreateTopics", admin_pb2.CreateTopicsRequest(topics=[topic]))
            assert broker.broker is not None
            replicas = broker.broker.replicas
            await until(lambda: any(True for _ in replicas.leaders()))
            await job(cluster, delays)

    asyncio.run(main())


def run_kafka(path: Path, job: Callable[[RunningKafkaServer, Delays], Awaitable[None]]) -> None:
    async def with_kafka(cluster: GrpcCluster, delays: Delays) -> None:
        broker = cluster.nodes[11].broker
        assert broker is not None
        async with kafka_server(None, services=broker.api) as server:
            await job(server, delays)

    run_grpc(path, with_kafka)


def produce(number: int, value: bytes = b"value", *, acks: int = -1) -> bytes:
    partition = PartitionProduceData(index=0, records=batch(value))
    request = ProduceRequest(
        acks=acks, timeout_ms=5_000, topic_data=[TopicProduceData(name="t", partition_data=[partition])]
    )
    return frame(PRODUCE, 9, number, request)


# Kafka.


@inside(run_kafka, "tmp_path")
async def test_a_kafka_response_reports_the_throttle_at_once_and_its_connection_is_muted(
    server: RunningKafkaServer, delays: Delays
) -> None:
    client, other = await server.client(), await server.client()
    delays.delay_ms = DELAY_MS
    timer = Timer()
    client.writer.write(produce(1))
    _, response = await client.response(PRODUCE, 9)
    assert response.responses[0].partition_responses[0].error_code == 0
    assert response.throttle_time_ms == DELAY_MS
    assert timer.passed_s < DELAY_S
    client.writer.write(api_versions(2))
    other.writer.write(api_versions(3))
    await other.response(API_VERSIONS, 3)
    assert timer.passed_s < DELAY_S, "other connections are read"
    number, _ = await client.response(API_VERSIONS, 3)
    assert number == 2
    assert timer.passed_s >= DELAY_S


@inside(run_kafka, "tmp_path")
async def test_a_write_without_a_response_mutes_its_connection_too(server: RunningKafkaServer, delays: Delays) -> None:
    client = await server.client()
    delays.delay_ms = DELAY_MS
    charges = delays.charges
    timer = Timer()
    client.writer.write(produce(1, acks=0))
    await soon(lambda: delays.charges > charges, "it is charged")
    client.writer.write(api_versions(2))
    await client.response(API_VERSIONS, 3)
    assert timer.passed_s >= DELAY_S - 0.05


@inside(run_kafka, "tmp_path")
async def test_every_kafka_response_with_the_field_reports_the_throttle(
    server: RunningKafkaServer, delays: Delays
) -> None:
    reported = set()
    for served in server.shared.table.values():
        api, version = served.api, served.high
        client = await server.client()
        delays.delay_ms, charges = 7, delays.charges
        client.send(api, version, 1, api.request())
        _, response = await client.response(api, version)
        client.writer.close()
        delays.delay_ms = 0
        if delays.charges > charges and hasattr(response, "throttle_time_ms"):
            assert response.throttle_time_ms == 7, api
            reported.add(api.name)
    assert {"Metadata", "ListGroups", "JoinGroup", "InitProducerId", "DescribeCluster"} <= reported
    assert len(reported) >= 20, sorted(reported)


@inside(run_kafka, "tmp_path")
async def test_a_muted_connection_is_not_read_and_holds_no_memory(server: RunningKafkaServer, delays: Delays) -> None:
    client = await server.client()
    client.writer.write(api_versions(0))
    await client.response(API_VERSIONS, 3)
    delays.delay_ms = LONG_MS
    client.writer.write(produce(1))
    await client.response(PRODUCE, 9)
    read = server.counts.bytes_in
    for number in range(20):
        client.writer.write(produce(number, bytes(500_000)))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await client.answer()
    assert server.counts.bytes_in - read <= READ_BYTES
    assert server.shared.requests.used == 0


@inside(run_kafka, "tmp_path")
async def test_a_request_that_arrives_when_the_mute_begins_is_served(
    server: RunningKafkaServer, delays: Delays
) -> None:
    client = await server.client()
    delays.delay_ms = LONG_MS
    second = produce(2, bytes(100_000))
    client.writer.write(produce(1) + second[:50_000])
    await client.response(PRODUCE, 9)
    client.writer.write(second[50_000:] + api_versions(3))
    number, _ = await client.response(PRODUCE, 9)
    assert number == 2, "it holds memory until it is answered"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await client.answer()


@pytest.mark.parametrize("by_client", [True, False])
def test_a_muted_kafka_connection_ends_at_once(tmp_path: Path, by_client: bool) -> None:
    async def job(server: RunningKafkaServer, delays: Delays) -> None:
        client = await server.client()
        delays.delay_ms = LONG_MS
        client.writer.write(produce(1))
        await client.response(PRODUCE, 9)
        timer = Timer()
        if by_client:
            client.writer.write(produce(2))
            client.writer.transport.abort()
        await server.server.close(grace_s=2)
        await soon(server.holds_nothing, "the server holds nothing")
        assert timer.passed_s < 2

    run_kafka(tmp_path, job)


# gRPC.


def written(tag: int = 0) -> log_pb2.ProduceRequest:
    return log_pb2.ProduceRequest(partitions=[log_pb2.ProducePartition(topic="t", batches=batch(b"v"))], tag=tag)


def wanted(**more: Any) -> log_pb2.FetchRequest:
    return log_pb2.FetchRequest(partitions=[log_pb2.FetchPartition(topic="t")], **more)


def begun(cluster: GrpcCluster, service: str, name: str, request: Any, timeout_s: float = 20) -> Any:
    method = method_named(service, name)
    call = cluster.channel(11).unary_unary(
        method.path,
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=method.response.FromString,
    )
    return call(request, timeout=timeout_s)


async def reported_ms(call: Any) -> int:
    return int(dict(await call.trailing_metadata())[THROTTLE_KEY])


@inside(run_grpc, "tmp_path")
async def test_a_grpc_response_is_delayed_and_reports_it(cluster: GrpcCluster, delays: Delays) -> None:
    delays.delay_ms = DELAY_MS
    for service, name, request in (
        ("Log", "Produce", written()),
        ("Log", "Fetch", wanted()),
        ("Admin", "DescribeTopics", admin_pb2.DescribeTopicsRequest(topics=["t"])),
    ):
        timer = Timer()
        call = begun(cluster, service, name, request)
        response = await call
        assert DELAY_S <= timer.passed_s < 10
        assert await reported_ms(call) == DELAY_MS
        if name == "Produce":
            assert response.throttle_ms == DELAY_MS
        elif name == "Fetch":
            assert response.partitions[0].throttle_ms == DELAY_MS
    delays.delay_ms = 0
    call = begun(cluster, "Log", "Produce", written())
    assert (await call).throttle_ms == 0
    assert THROTTLE_KEY not in dict(await call.trailing_metadata())


@inside(run_grpc, "tmp_path")
async def test_a_grpc_error_is_delayed_and_reports_it(cluster: GrpcCluster, delays: Delays) -> None:
    delays.delay_ms = DELAY_MS
    timer = Timer()
    with pytest.raises(aio.AioRpcError) as raised:
        await begun(cluster, "Admin", "DescribeBrokers", admin_pb2.DescribeBrokersRequest(brokers=[77]))
    assert timer.passed_s >= DELAY_S
    assert error_of(raised.value).code is ErrorCode.BROKER_ID_NOT_REGISTERED
    assert dict(raised.value.trailing_metadata())[THROTTLE_KEY] == str(DELAY_MS)


@inside(run_grpc, "tmp_path")
async def test_a_throttled_grpc_call_can_be_cancelled_and_keeps_its_deadline(
    cluster: GrpcCluster, delays: Delays
) -> None:
    server = cluster.nodes[11].grpc_server
    delays.delay_ms = LONG_MS
    call = begun(cluster, "Log", "Produce", written())
    await until(lambda: server.delayed.count == 1)
    assert server.memory.used == 0, "the request is done"
    call.cancel()
    await until(lambda: (server.delayed.count, server.delayed.bytes, server.responses.used) == (0, 0, 0))
    timer = Timer()
    response = await begun(cluster, "Log", "Produce", written(), timeout_s=1)
    assert not response.partitions[0].HasField("error")
    assert timer.passed_s < 1, "a response that comes too late is none"


def test_delayed_grpc_responses_hold_limited_memory(tmp_path: Path) -> None:
    async def job(cluster: GrpcCluster, delays: Delays) -> None:
        server = cluster.nodes[11].grpc_server
        item = log_pb2.ProducePartition(topic="t", batches=batch(bytes(60_000)))
        await begun(cluster, "Log", "Produce", log_pb2.ProduceRequest(partitions=[item]))
        delays.delay_ms = LONG_MS
        first = begun(cluster, "Log", "Fetch", wanted(min_bytes=1, max_wait_ms=1_000))
        await until(lambda: server.delayed.count == 1)
        assert 60_000 < server.delayed.bytes <= 100_000
        second = begun(cluster, "Log", "Fetch", wanted())
        timer = Timer()
        response = await second
        assert timer.passed_s < 5, "it does not fit, so it is not delayed"
        assert response.partitions[0].throttle_ms == await reported_ms(second) == LONG_MS
        first.cancel()
        await until(lambda: server.delayed.bytes == 0)

    run_grpc(tmp_path, job, RequestLimits(delayed_bytes_max=100_000))


@inside(run_grpc, "tmp_path")
async def test_a_node_that_stops_sends_delayed_responses_at_once(cluster: GrpcCluster, delays: Delays) -> None:
    server = cluster.nodes[11].grpc_server
    delays.delay_ms = LONG_MS
    call = begun(cluster, "Log", "Produce", written())
    await until(lambda: server.delayed.count == 1)
    timer = Timer()
    await server.close(grace_s=5)
    assert not (await call).partitions[0].HasField("error")
    assert timer.passed_s < 5


@inside(run_grpc, "tmp_path")
async def test_the_next_request_of_a_throttled_produce_stream_is_not_read(cluster: GrpcCluster, delays: Delays) -> None:
    delays.delay_ms = DELAY_MS
    stream = cluster.stream(11, "Log", "ProduceStream", None)
    timer = Timer()
    for tag in (1, 2):
        await stream.write(written(tag))
    first = await stream.read()
    assert (first.tag, first.throttle_ms) == (1, DELAY_MS)
    assert timer.passed_s < DELAY_S, "its response is not delayed"
    assert (await stream.read()).tag == 2
    assert timer.passed_s >= DELAY_S
    await stream.done_writing()
    assert await stream.read() is aio.EOF


@inside(run_grpc, "tmp_path")
async def test_the_next_response_of_a_throttled_fetch_stream_is_delayed(cluster: GrpcCluster, delays: Delays) -> None:
    server = cluster.nodes[11].grpc_server
    await begun(cluster, "Log", "Produce", written())
    delays.delay_ms = DELAY_MS
    timer = Timer()
    stream = cluster.stream(11, "Log", "FetchStream", wanted(max_wait_ms=100))
    assert (await stream.read()).partitions[0].throttle_ms == DELAY_MS
    assert timer.passed_s < DELAY_S
    assert server.delayed.bytes == 0
    await stream.read()
    assert timer.passed_s >= DELAY_S
    stream.cancel()
    await until(lambda: server.delayed.count == 0)


# HTTP.


def test_a_throttled_page_is_delayed_and_reports_it() -> None:
    async def charged(context: RequestContext) -> Page:
        Guard(quotas=delays).charge(context)
        return Page(f"{context.api.value} {context.client_host}\n")

    async def main() -> None:
        server = HttpServer(Address("127.0.0.1", free_ports(1)[0]), {"/charged": charged})
        await server.start()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            timer = Timer()
            writer.write(b"GET /charged HTTP/1.1\r\n\r\n")
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            assert DELAY_S <= timer.passed_s < 10
            assert f"{THROTTLE_HEADER}: {DELAY_MS}\r\n" in head
            assert await reader.readline() == b"http 127.0.0.1\n"
            delays.delay_ms = LONG_MS
            writer.write(b"GET /charged HTTP/1.1\r\n\r\n")
            await soon(lambda: delays.charges == 2, "it is charged")
            writer.close()
        finally:
            timer = Timer()
            await server.close()
            assert timer.passed_s < 5

    delays = Delays()
    delays.delay_ms = DELAY_MS
    asyncio.run(main())
