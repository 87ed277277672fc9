"""Connections over real gRPC: errors of nodes and of the network, streams, and what a wrong address says."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from random import Random

import pytest
from support.async_tests import asyncio_test
from support.clients.cluster import batch_of
from support.grpc_api.nodes import GrpcCluster

from tidelog.client.admin.core import AdminCore
from tidelog.client.cluster import ClusterClient
from tidelog.client.connections import Exchange
from tidelog.client.errors import AdvertisedAddressError, DeliveryTimeoutError, NoClusterError
from tidelog.client.grpc_connections import GrpcConnections
from tidelog.client.producer.writer import Writer, WriterConfig
from tidelog.model.errors import (
    CallTimeoutError,
    ErrorCode,
    RemoteError,
    StreamBrokenError,
    StreamClosedError,
    UnreachableError,
    UnsupportedVersionError,
)
from tidelog.rpc.grpc.methods import method_named
from tidelog.rpc.v1 import cluster_pb2, log_pb2
from tidelog.world.real.clock import SystemClock

CLUSTER = method_named("Cluster", "DescribeCluster")
PRODUCE = method_named("Log", "Produce")
PRODUCE_STREAM = method_named("Log", "ProduceStream")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cluster_client(address: str) -> ClusterClient:
    return ClusterClient([address], GrpcConnections(), random=Random(1), clock=SystemClock())


@asyncio_test
async def test_nobody_there_is_unreachable_and_names_the_reason() -> None:
    connections = GrpcConnections()
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(UnreachableError, match="refused"):
        await connections.call(address, CLUSTER, cluster_pb2.DescribeClusterRequest(), timeout_ms=5_000)
    exchange = await connections.open(address, PRODUCE_STREAM)
    with pytest.raises(UnreachableError, match="refused"):
        await exchange.receive()
    await connections.close()
    with pytest.raises(UnreachableError, match="closed"):
        await connections.call(address, CLUSTER, cluster_pb2.DescribeClusterRequest(), timeout_ms=5_000)
    client = cluster_client(address)
    with pytest.raises(NoClusterError, match=f"no cluster at {address}"):
        await client.refresh()
    await client.close()


@asyncio_test
async def test_a_port_that_answers_nothing_times_out_and_one_that_speaks_http_is_named() -> None:
    open_writers: list[asyncio.StreamWriter] = []

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_writers.append(writer)
        await reader.read()

    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_writers.append(writer)
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()

    connections = GrpcConnections()
    request = cluster_pb2.DescribeClusterRequest()
    silent = await asyncio.start_server(mute, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    with pytest.raises((CallTimeoutError, UnreachableError)):
        await connections.call(f"127.0.0.1:{port}", CLUSTER, request, timeout_ms=500)
    other = await asyncio.start_server(http, "127.0.0.1", 0)
    port = other.sockets[0].getsockname()[1]
    with pytest.raises(UnreachableError, match=f"127.0.0.1:{port} speaks HTTP, not gRPC"):
        await connections.call(f"127.0.0.1:{port}", CLUSTER, request, timeout_ms=5_000)
    await connections.close()
    for server in (silent, other):
        server.close()
    for writer in open_writers:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@asyncio_test
async def test_errors_of_a_node_come_back_as_they_were(tmp_path: Path) -> None:
    async with GrpcCluster(tmp_path) as cluster:
        await cluster.start_controllers(1)
        await cluster.active()
        address = f"127.0.0.1:{cluster.nodes[1].port()}"
        connections = GrpcConnections()
        found = await connections.call(address, CLUSTER, cluster_pb2.DescribeClusterRequest(), timeout_ms=5_000)
        assert found.node == 1
        with pytest.raises(RemoteError, match="served by brokers") as refused:
            await connections.call(address, PRODUCE, log_pb2.ProduceRequest(), timeout_ms=5_000)
        assert refused.value.code is ErrorCode.UNSUPPORTED_VERSION
        exchange = await connections.open(address, PRODUCE_STREAM)
        with pytest.raises(RemoteError, match="served by brokers"):
            await exchange.receive()
        # The port between nodes speaks gRPC as well, but not this.
        with pytest.raises((UnsupportedVersionError, RemoteError)) as wrong:
            await connections.call(
                cluster.nodes[1].address, CLUSTER, cluster_pb2.DescribeClusterRequest(), timeout_ms=5_000
            )
        assert "9292" in str(wrong.value)
        records = method_named("Cluster", "MetadataRecords")
        stream = await connections.open(address, records, cluster_pb2.MetadataRecordsRequest())
        parts: list[object] = []
        with pytest.raises(StreamClosedError):
            await _all_of(stream, parts)
        assert parts
        following = await connections.open(address, records, cluster_pb2.MetadataRecordsRequest(follow=True))
        waiting = asyncio.create_task(_all_of(following, parts))
        await asyncio.sleep(0.05)
        following.close()
        with pytest.raises(StreamBrokenError, match="closed here"):
            await waiting
        await connections.close()


async def _all_of(exchange: Exchange, parts: list[object]) -> None:
    while True:
        parts.append(await exchange.receive())


@asyncio_test
async def test_an_unreachable_advertised_address_is_reported_with_the_bootstrap_address(tmp_path: Path) -> None:
    async with GrpcCluster(tmp_path) as cluster:
        await cluster.start_controllers(1)
        await cluster.start_broker(11)
        # These brokers advertise a name that leads nowhere.
        bootstrap = f"127.0.0.1:{cluster.nodes[11].port()}"
        client = cluster_client(bootstrap)
        await AdminCore(client).create_topic("orders", partitions=1, replication_factor=1)
        await client.topic("orders")
        with pytest.raises(AdvertisedAddressError) as error:
            await client.call_node(11, PRODUCE, log_pb2.ProduceRequest(), timeout_ms=3_000)
        assert error.value.advertised in str(error.value)
        assert bootstrap in str(error.value)
        assert "advertised.listeners" in str(error.value)
        writer = Writer(client, WriterConfig(delivery_timeout_ms=400))
        result = await writer.send("orders", 0, batch_of(b"x"))
        with pytest.raises(DeliveryTimeoutError, match=r"was not stored.*advertises") as late:
            await result
        assert not late.value.was_sent
        await writer.close()
        await client.close()
