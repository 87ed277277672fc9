"""A message that a broker does not take fails one batch and nothing else; a call too many is no such message."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import grpc  # type: ignore[import-untyped]
import pytest
from support.async_tests import asyncio_test
from support.clients.cluster import batch_of
from support.grpc_api.nodes import GrpcCluster, until

from tidelog.client.cluster import ClusterClient
from tidelog.client.grpc_connections import GrpcConnections, _error
from tidelog.client.producer.writer import Acknowledged, Writer, WriterConfig
from tidelog.model.errors import ErrorCode, OverloadedError, RecordTooLargeError, TidelogError, TransportError
from tidelog.rpc.grpc.methods import method_named
from tidelog.rpc.v1 import admin_pb2
from tidelog.services.limits import RequestLimits
from tidelog.world.real.clock import SystemClock

API_BYTES = 2 << 20


@pytest.mark.parametrize(
    ("details", "kind"),
    [
        ("SERVER: Received message larger than max (2000 vs. 1000)", RecordTooLargeError),
        ("CLIENT: Sent message larger than max (4000 vs. 3000)", RecordTooLargeError),
        ("Stream removed (CLIENT: Received message larger than max (5000 vs. 3000))", TransportError),
        ("Concurrent RPC limit exceeded!", OverloadedError),
        ("whatever a later version says", OverloadedError),
    ],
)
def test_grpcs_own_refusals_are_distinguished_by_their_words(details: str, kind: type[TidelogError]) -> None:
    error = _error(grpc.StatusCode.RESOURCE_EXHAUSTED, details, (), "host:1", method_named("Log", "Produce"))
    assert type(error) is kind
    assert error.retriable is (kind is not RecordTooLargeError)


async def topics(cluster: GrpcCluster, port: int, monkeypatch: pytest.MonkeyPatch, *names: str) -> ClusterClient:
    monkeypatch.setattr("tidelog.client.metadata.address_of", lambda *_: f"127.0.0.1:{port}")
    request = admin_pb2.CreateTopicsRequest()
    for name in names:
        made = request.topics.add(name=name, partitions=1, replication_factor=1)
        made.configs.add(key="max.message.bytes", value=str(50 << 20))
    answer = await cluster.call(11, "Admin", "CreateTopics", request)
    assert not any(row.HasField("error") for row in answer.topics), answer
    replicas = cluster.nodes[11].service.produce._replicas  # type: ignore[union-attr]
    await until(lambda: len(replicas.leaders()) == len(names))
    return ClusterClient([f"127.0.0.1:{port}"], GrpcConnections(), random=Random(1), clock=SystemClock())


@pytest.mark.parametrize("size", [API_BYTES + 1_000, 2 * API_BYTES], ids=["refused by the server", "refused by gRPC"])
@asyncio_test
async def test_a_batch_that_is_too_large_fails_alone_and_the_others_are_stored_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    limits = RequestLimits(message_bytes_max=API_BYTES)
    async with asyncio.timeout(60), GrpcCluster(tmp_path, limits=limits) as cluster:
        await cluster.start_controllers(1)
        node = await cluster.start_broker(11)
        client = await topics(cluster, node.port(), monkeypatch, "small", "large")
        writer = Writer(client, WriterConfig(delivery_timeout_ms=20_000))
        await (await writer.send("large", 0, batch_of(b"first")))
        big = await writer.send("large", 0, batch_of(Random(1).randbytes(size)))
        behind = [await writer.send("large", 0, batch_of(b"%d" % number)) for number in range(3)]
        beside = [await writer.send("small", 0, batch_of(b"%d" % number)) for number in range(20)]
        with pytest.raises(TidelogError) as refused:
            await big
        assert refused.value.code is ErrorCode.MESSAGE_TOO_LARGE
        stored = await asyncio.gather(*behind)
        assert [one.base_offset for one in stored] == [1, 2, 3], "nobody had to guess what became of them"
        assert [one.base_offset for one in await asyncio.gather(*beside)] == list(range(20))
        assert writer.retries < 20
        await writer.close()
        await client.close()


@asyncio_test
async def test_many_small_batches_that_are_too_large_together_go_in_smaller_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = RequestLimits(message_bytes_max=100_000)
    async with asyncio.timeout(60), GrpcCluster(tmp_path, limits=limits) as cluster:
        await cluster.start_controllers(1)
        node = await cluster.start_broker(11)
        names = [f"t{number}" for number in range(8)]
        client = await topics(cluster, node.port(), monkeypatch, *names)
        writer = Writer(client, WriterConfig(delivery_timeout_ms=20_000, request_bytes_max=400_000))
        sent: list[asyncio.Future[Acknowledged]] = []
        for _ in range(5):
            sent += [await writer.send(name, 0, batch_of(Random(1).randbytes(60_000))) for name in names]
        stored = await asyncio.gather(*sent)
        assert sorted(one.base_offset for one in stored) == sorted(list(range(5)) * len(names))
        assert writer.sender.request_bytes_max < 400_000
        await writer.close()
        await client.close()
