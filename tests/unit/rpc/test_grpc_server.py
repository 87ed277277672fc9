"""The gRPC API server on a real loop: status and details, limits, deadlines, cancellation, health, reflection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc import aio  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2  # type: ignore[import-untyped]
from support.async_tests import inside
from support.brokers.cluster import batch, values_of
from support.grpc_api.nodes import STATUS, GrpcCluster, error_of, until

from tidelog.model.errors import ErrorCode, TransportError
from tidelog.rpc.grpc.methods import METHODS, method_named
from tidelog.rpc.grpc.server import GrpcServer, Listener
from tidelog.rpc.v1 import admin_pb2, cluster_pb2, common_pb2, log_pb2
from tidelog.services.limits import RequestLimits

WATCHED = log_pb2.WatchOffsetsRequest(partitions=[common_pb2.TopicPartition(topic="t")])
SMALL = RequestLimits(message_bytes_max=200_000, request_bytes_max=300_000, request_wait_ms=300)


def run(path: Path, job: Callable[[GrpcCluster], Awaitable[None]], limits: RequestLimits | None = None) -> None:
    """One controller and one broker with the topic `t`."""

    async def main() -> None:
        async with asyncio.timeout(60), GrpcCluster(path, limits=limits) as cluster:
            await cluster.start_controllers(1)
            await cluster.active()
            broker = await cluster.start_broker(11)
            topic = admin_pb2.NewTopic(name="t", partitions=1, replication_factor=1)
            made = await cluster.call(11, "Admin", "CreateTopics", admin_pb2.CreateTopicsRequest(topics=[topic]))
            assert not made.topics[0].HasField("error"), made.topics[0].error.message
            tail = broker.tail
            assert tail is not None
            await until(lambda: "t" in tail.image.topic_ids)
            await job(cluster)

    asyncio.run(main())


def written(*values: bytes, **more: Any) -> log_pb2.ProduceRequest:
    item = log_pb2.ProducePartition(topic="t", batches=batch(*values))
    return log_pb2.ProduceRequest(partitions=[item], **more)


def wanted(offset: int = 0, **more: Any) -> log_pb2.FetchRequest:
    return log_pb2.FetchRequest(partitions=[log_pb2.FetchPartition(topic="t", offset=offset)], **more)


async def produced(cluster: GrpcCluster, *values: bytes) -> None:
    """Written, however long it takes until the partition is led."""
    async with asyncio.timeout(20):
        while True:
            (done,) = (await cluster.call(11, "Log", "Produce", written(*values))).partitions
            if not done.HasField("error"):
                return
            assert done.error.retriable, done.error.message
            await asyncio.sleep(0.02)


async def failure(call: Awaitable[Any]) -> aio.AioRpcError:
    with pytest.raises(aio.AioRpcError) as raised:
        await call
    return raised.value


@pytest.mark.requirement("a:C-04")
@inside(run, "tmp_path")
async def test_records_go_in_and_come_out(cluster: GrpcCluster) -> None:
    await produced(cluster, b"a", b"b")
    found = await cluster.call(11, "Log", "Fetch", wanted(min_bytes=1, max_wait_ms=5_000))
    assert values_of(found.partitions[0].data) == [b"a", b"b"]
    meta = await cluster.call(1, "Cluster", "Metadata", cluster_pb2.MetadataRequest(all_topics=True))
    assert [(broker.id, broker.host, broker.port) for broker in meta.brokers] == [(11, "grpc", 11)]
    assert meta.topics[0].partitions[0].leader == 11


@inside(run, "tmp_path")
async def test_an_error_is_a_status_a_sentence_and_the_catalogues_row_in_the_trailing_metadata(
    cluster: GrpcCluster,
) -> None:
    error = await failure(cluster.call(11, "Log", "Produce", log_pb2.ProduceRequest()))
    assert error.code() is STATUS.INVALID_ARGUMENT
    assert "partition" in error.details()
    exact = error_of(error)
    assert (exact.code, exact.retriable) == (ErrorCode.INVALID_REQUEST, False)
    assert str(exact) == error.details()

    request = admin_pb2.DescribeBrokersRequest(brokers=[77])
    error = await failure(cluster.call(1, "Admin", "DescribeBrokers", request))
    assert error.code() is STATUS.NOT_FOUND
    assert error_of(error).code is ErrorCode.BROKER_ID_NOT_REGISTERED

    stream = cluster.stream(1, "Cluster", "MetadataRecords", cluster_pb2.MetadataRecordsRequest(from_offset=10**9))
    error = await failure(stream.read())
    assert error.code() is STATUS.OUT_OF_RANGE
    assert error_of(error).facts["offset"] == 10**9

    error = await failure(cluster.call(1, "Log", "Fetch", wanted()))
    assert error.code() is STATUS.UNIMPLEMENTED
    assert "controller only" in error.details()


@inside(run, "tmp_path")
async def test_an_unknown_method_is_answered_with_the_purpose_of_this_listener(cluster: GrpcCluster) -> None:
    channel = cluster.channel(11)
    for path, word, status in (
        ("/tidelog.v1.Log/NoSuch", "this version has no method", STATUS.UNIMPLEMENTED),
        ("/tidelog.node.Call/raft", "listener is for clients", STATUS.INVALID_ARGUMENT),
        ("/helloworld.Greeter/SayHello", "gRPC API of Tidelog", STATUS.UNIMPLEMENTED),
    ):
        error = await failure(channel.unary_unary(path)(b"", timeout=5))
        assert error.code() is status
        assert word in error.details()
    method = method_named("Log", "Fetch")
    error = await failure(channel.unary_unary(method.path)(b"\xff\xff\xff", timeout=5))
    assert error.code() is STATUS.INVALID_ARGUMENT
    assert "FetchRequest" in error.details()
    empty = channel.stream_unary(method.path)(iter(()))
    error = await failure(empty)
    assert error.code() is STATUS.INVALID_ARGUMENT


@inside(lambda tmp_path, job: run(tmp_path, job, SMALL), "tmp_path")
async def test_a_message_over_the_limit_is_refused_with_both_numbers(cluster: GrpcCluster) -> None:
    error = await failure(cluster.call(11, "Log", "Produce", written(b"x" * 300_000)))
    assert error.code() is STATUS.RESOURCE_EXHAUSTED
    assert error_of(error).code is ErrorCode.MESSAGE_TOO_LARGE
    assert "200000" in error.details()
    # Beyond the slack gRPC does not even read it.
    error = await failure(cluster.call(11, "Log", "Produce", written(b"x" * 3_000_000)))
    assert error.code() is STATUS.RESOURCE_EXHAUSTED
    assert str(200_000 + (1 << 20)) in error.details()
    stream = cluster.stream(11, "Log", "ProduceStream", None)
    await stream.write(written(b"x" * 300_000))
    error = await failure(stream.read())
    assert error_of(error).code is ErrorCode.MESSAGE_TOO_LARGE
    # Nothing is held after that, and the server goes on.
    await produced(cluster, b"small")
    memory = cluster.nodes[11].grpc_server.memory
    await until(lambda: memory.used == 0)


@inside(lambda tmp_path, job: run(tmp_path, job, SMALL), "tmp_path")
async def test_requests_wait_while_the_memory_is_full_and_are_refused_after_a_while(cluster: GrpcCluster) -> None:
    await produced(cluster, b"a")
    memory = cluster.nodes[11].grpc_server.memory
    held = await memory.enter()
    held.count(300_000)
    error = await failure(cluster.call(11, "Log", "Produce", written(b"b")))
    assert error.code() is STATUS.RESOURCE_EXHAUSTED
    assert error_of(error).code is ErrorCode.THROTTLING_QUOTA_EXCEEDED
    assert error_of(error).retriable
    assert "queued.max.request.bytes" in error.details()
    assert memory.rejected == 1
    waiting = asyncio.create_task(_as_task(cluster.call(11, "Log", "Produce", written(b"c"))))
    await until(lambda: memory.waiting == 1)
    held.leave()
    assert not (await waiting).partitions[0].HasField("error")
    found = await cluster.call(11, "Log", "Fetch", wanted())
    assert values_of(found.partitions[0].data) == [b"a", b"c"]


def test_clients_that_do_not_send_what_they_began_hold_up_nobody(tmp_path: Path) -> None:
    limits = RequestLimits(reading_max=2, slow_read_ms=50)

    async def job(cluster: GrpcCluster) -> None:
        await produced(cluster, b"a")
        path = method_named("Log", "Produce").path
        idle = [cluster.channel(11).stream_unary(path)(timeout=30) for _ in range(4)]
        memory = cluster.nodes[11].grpc_server.memory
        await until(lambda: memory.reading == 2 and memory.waiting == 2)
        await produced(cluster, b"b")
        for call in idle[:2]:
            error = await failure(call)
            assert error.code() is STATUS.RESOURCE_EXHAUSTED
            assert error_of(error).code is ErrorCode.THROTTLING_QUOTA_EXCEEDED
        for call in idle[2:]:
            call.cancel()
        await until(lambda: (memory.used, memory.reading, memory.waiting) == (0, 0, 0))

    run(tmp_path, job, limits)


def test_a_flood_of_requests_is_answered_or_throttled_and_the_memory_stays_bounded(tmp_path: Path) -> None:
    limits = RequestLimits(request_bytes_max=400_000, message_bytes_max=200_000, reading_max=2, request_wait_ms=2_000)

    async def job(cluster: GrpcCluster) -> None:
        await produced(cluster, b"first")
        memory = cluster.nodes[11].grpc_server.memory
        most = 0
        refusals: set[ErrorCode] = set()

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, memory.used)
                await asyncio.sleep(0)

        async def flood(number: int) -> bool:
            try:
                answer = await cluster.call(11, "Log", "Produce", written(b"%d" % number * 30_000))
            except aio.AioRpcError as error:
                refusals.add(error_of(error).code)
                return False
            return not answer.partitions[0].HasField("error")

        watching = asyncio.create_task(watch())
        done = await asyncio.gather(*(flood(number) for number in range(100, 200)))
        watching.cancel()
        assert any(done)
        assert refusals <= {ErrorCode.THROTTLING_QUOTA_EXCEEDED}
        assert 0 < most <= 400_000 + 2 * 200_000
        await until(lambda: memory.used == 0)
        await produced(cluster, b"last")
        found = await cluster.call(11, "Log", "Fetch", wanted(max_bytes=50 << 20))
        end = found.partitions[0].high_watermark
        assert end >= 2 + sum(done)

    run(tmp_path, job, limits)


async def _as_task(call: Awaitable[Any]) -> Any:
    return await call


def test_what_a_slow_client_has_not_taken_makes_the_next_fetches_smaller(tmp_path: Path) -> None:
    limits = RequestLimits(response_bytes_max=100_000, fetch_bytes_min=10_000)

    async def job(cluster: GrpcCluster) -> None:
        for number in range(8):
            await produced(cluster, bytes([number]) * 9_000)
        responses = cluster.nodes[11].grpc_server.responses
        whole = await cluster.call(11, "Log", "Fetch", wanted())
        assert len(whole.partitions[0].data) > 70_000
        await until(lambda: responses.used == 0)
        responses.used += 95_000
        less = await cluster.call(11, "Log", "Fetch", wanted())
        assert 9_000 < len(less.partitions[0].data) < 12_000

    run(tmp_path, job, limits)


@inside(run, "tmp_path")
async def test_a_deadline_and_a_cancelled_call_end_what_waits_for_them(cluster: GrpcCluster) -> None:
    await produced(cluster, b"a")
    service = cluster.nodes[11].service
    assert service is not None
    slow = wanted(1, min_bytes=1, max_wait_ms=60_000)
    error = await failure(cluster.call(11, "Log", "Fetch", slow, timeout_s=0.3))
    assert error.code() is STATUS.DEADLINE_EXCEEDED
    await until(lambda: service.fetch.waiting_fetches == 0)

    running = asyncio.create_task(_as_task(cluster.call(11, "Log", "Fetch", slow)))
    await until(lambda: service.fetch.waiting_fetches == 1)
    running.cancel()
    await until(lambda: service.fetch.waiting_fetches == 0)

    stream = cluster.stream(11, "Log", "FetchStream", slow)
    await until(lambda: service.fetch.waiting_fetches == 1)
    stream.cancel()
    await until(lambda: service.fetch.waiting_fetches == 0)

    tails = cluster.nodes[1].controller
    assert tails is not None
    watch = cluster.stream(1, "Cluster", "MetadataRecords", cluster_pb2.MetadataRecordsRequest(follow=True))
    await watch.read()
    assert 1 in [node for node, _ in tails.driver.describe().observers]
    watch.cancel()
    await until(lambda: 1 not in [node for node, _ in tails.driver.describe().observers])
    memory = cluster.nodes[11].grpc_server.memory
    await until(lambda: memory.used == 0)


@inside(run, "tmp_path")
async def test_a_stream_without_news_lives_on_the_pings_of_its_client(cluster: GrpcCluster) -> None:
    """A client that pings too often is disconnected at the third ping: within seconds here, in half a minute by
    the interval of our own client."""
    await produced(cluster, b"a")
    options = [("grpc.keepalive_time_ms", 1_100), ("grpc.http2.max_pings_without_data", 0)]
    method = method_named("Log", "WatchOffsets")
    async with aio.insecure_channel(f"localhost:{cluster.nodes[11].port()}", options=options) as channel:
        opened = channel.unary_stream(method.path, lambda asked: asked.SerializeToString())
        watch = opened(WATCHED)
        await watch.read()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(4.5):
                await watch.read()
    assert cluster.nodes[11].grpc_server.requests["Log", "WatchOffsets"] == 1


@inside(run, "tmp_path")
async def test_a_produce_stream_is_a_pipeline(cluster: GrpcCluster) -> None:
    await produced(cluster, b"first")
    stream = cluster.stream(11, "Log", "ProduceStream", None)
    for number in range(100):
        await stream.write(written(b"%d" % number, tag=number))
    await stream.done_writing()
    answers = [answer async for answer in stream]
    assert [answer.tag for answer in answers] == list(range(100))
    assert [answer.partitions[0].base_offset for answer in answers] == list(range(1, 101))
    found = await cluster.call(11, "Log", "Fetch", wanted(1))
    assert values_of(found.partitions[0].data) == [b"%d" % number for number in range(100)]
    memory = cluster.nodes[11].grpc_server.memory
    await until(lambda: memory.used == 0)


@inside(run, "tmp_path")
async def test_a_client_that_breaks_off_its_produce_stream_leaves_nothing_behind(cluster: GrpcCluster) -> None:
    await produced(cluster, b"first")
    grpc_server = cluster.nodes[11].grpc_server
    stream = cluster.stream(11, "Log", "ProduceStream", None)
    for number in range(10):
        await stream.write(written(b"%d" % number))
    assert (await stream.read()).partitions[0].base_offset == 1
    stream.cancel()
    await until(lambda: grpc_server.memory.used == 0 and grpc_server.responses.used == 0)
    await produced(cluster, b"last")


@inside(run, "tmp_path")
async def test_a_node_that_stops_sends_those_away_who_wait_and_answers_those_who_produce(cluster: GrpcCluster) -> None:
    await produced(cluster, b"a")
    service = cluster.nodes[11].service
    assert service is not None
    producing = cluster.stream(11, "Log", "ProduceStream", None)
    await producing.write(written(b"b", tag=7))
    assert (await producing.read()).tag == 7
    slow = wanted(2, min_bytes=1, max_wait_ms=60_000)
    polling = asyncio.create_task(_as_task(cluster.call(11, "Log", "Fetch", slow)))
    pushed = cluster.stream(11, "Log", "FetchStream", slow)
    watching = cluster.stream(11, "Log", "WatchOffsets", WATCHED)
    await until(lambda: service.fetch.waiting_fetches == 2)
    assert (await watching.read()).partitions[0].high_watermark >= 1
    loop = asyncio.get_running_loop()
    began = loop.time()
    await cluster.nodes[11].grpc_server.close(grace_s=10)
    assert loop.time() - began < 5
    for call in (polling, _end_of(pushed), _end_of(watching)):
        error = await failure(call)
        assert error.code() is STATUS.UNAVAILABLE
        assert error_of(error).retriable
    assert await producing.code() is STATUS.OK


async def _end_of(stream: Any) -> None:
    while await stream.read() is not aio.EOF:
        pass


def test_a_client_of_another_protocol_is_disconnected_and_the_server_goes_on(tmp_path: Path) -> None:
    kafka = bytes.fromhex("0000001a00120003000000010008") + b"consumer" + b"\0" * 8
    others = [kafka, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40)]

    async def job(cluster: GrpcCluster) -> None:
        for first in others:
            reader, writer = await asyncio.open_connection("127.0.0.1", cluster.nodes[11].port())
            writer.write(first)
            async with asyncio.timeout(10):
                while await reader.read(1_000):
                    pass
            writer.close()
        await produced(cluster, b"still here")

    run(tmp_path, job)


@inside(run, "tmp_path")
async def test_the_health_service_tells_of_the_node_and_of_each_service(cluster: GrpcCluster) -> None:
    async def status(node: int, service: str) -> Any:
        check = cluster.channel(node).unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        return (await check(health_pb2.HealthCheckRequest(service=service), timeout=5)).status

    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert await status(11, "") == serving
    assert await status(11, "tidelog.v1.Log") == serving
    assert await status(1, "tidelog.v1.Cluster") == serving
    assert await status(1, "tidelog.v1.Log") == not_serving
    assert (await failure(status(11, "no.such.Service"))).code() is STATUS.NOT_FOUND
    await cluster.nodes[11].grpc_server.set_serving(False)
    assert await status(11, "") == not_serving
    assert await status(11, "tidelog.v1.Log") == not_serving


@inside(run, "tmp_path")
async def test_reflection_tells_the_whole_api(cluster: GrpcCluster) -> None:
    ask = cluster.channel(11).stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
    services = {method.full_name.partition("/")[0] for method in METHODS.values()}
    requests += [reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in sorted(services)]
    answers = [answer async for answer in ask(iter(requests), timeout=5)]
    listed = {row.name for row in answers[0].list_services_response.service}
    assert listed >= services | {"grpc.health.v1.Health"}
    found = set()
    for answer in answers[1:]:
        for data in answer.file_descriptor_response.file_descriptor_proto:
            file = FileDescriptorProto.FromString(data)
            for service in file.service:
                found |= {f"{file.package}.{service.name}/{method.name}" for method in service.method}
    assert found >= set(METHODS)


@pytest.mark.requirement("a:G-09")
@inside(run, "tmp_path")
async def test_each_listener_tells_its_own_endpoints_and_a_taken_port_is_named(cluster: GrpcCluster) -> None:
    node = await cluster.start_broker(12, listeners=("GRPC", "OUTSIDE"))
    method = method_named("Cluster", "Metadata")
    for listener, host in (("GRPC", "grpc"), ("OUTSIDE", "outside")):
        async with aio.insecure_channel(f"127.0.0.1:{node.port(listener)}") as channel:
            data = await channel.unary_unary(method.path)(b"", timeout=5)
        found = cluster_pb2.MetadataResponse.FromString(data)
        assert found.listener == listener
        assert (12, host, 12) in [(broker.id, broker.host, broker.port) for broker in found.brokers]
    taken = f"127.0.0.1:{node.port()}"
    second = GrpcServer(node.grpc_server.handlers, [Listener(name="GRPC", address=taken)], RequestLimits())
    with pytest.raises(TransportError, match=taken):
        await second.start()


def test_responses_of_every_service_count_until_their_clients_have_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    count = GrpcServer._count_response

    def record(server: GrpcServer, context: Any, size: int) -> None:
        counted.append(size)
        count(server, context, size)

    async def job(cluster: GrpcCluster) -> None:
        counted.clear()
        response = await cluster.call(11, "Cluster", "Metadata", cluster_pb2.MetadataRequest(all_topics=True))
        assert counted == [response.ByteSize()]
        await until(lambda: cluster.nodes[11].grpc_server.responses.used == 0)

    monkeypatch.setattr(GrpcServer, "_count_response", record)
    run(tmp_path, job)


@pytest.mark.parametrize("defect", [KeyError("a bug"), asyncio.CancelledError()])
def test_an_internal_error_of_a_handler_is_logged_and_returned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, defect: BaseException
) -> None:
    """A CancelledError is one too if nobody has cancelled the call: its client would get no status at all."""

    async def job(cluster: GrpcCluster) -> None:
        async def broken(*_: object) -> None:
            raise defect

        handlers = type(cluster.nodes[11].grpc_server.handlers.cluster)
        monkeypatch.setattr(handlers, "describe_cluster", broken)
        monkeypatch.setattr(handlers, "metadata_records", broken)
        unary = cluster.call(11, "Cluster", "DescribeCluster", cluster_pb2.DescribeClusterRequest(), timeout_s=5)
        stream = cluster.stream(11, "Cluster", "MetadataRecords", cluster_pb2.MetadataRecordsRequest())
        for call, name in ((unary, "DescribeCluster"), (stream.read(), "MetadataRecords")):
            async with asyncio.timeout(5):
                error = await failure(call)
            assert error.code() is STATUS.INTERNAL
            assert error_of(error).code is ErrorCode.UNKNOWN_SERVER_ERROR
            assert any(name in record.message and record.exc_info for record in caplog.records)

    run(tmp_path, job)
