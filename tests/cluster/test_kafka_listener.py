"""The Kafka listener of real nodes: its addresses, its wrong doors, its end, and what real clients find first."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from aiokafka.conn import create_conn
from aiokafka.protocol.admin import ApiVersionRequest
from confluent_kafka.admin import AdminClient
from kafka_door import KafkaClient, api_versions
from patience import until

import tidelog
from tidelog.cli.main import main as run_command
from tidelog.rpc.kafka.dispatch import build
from tidelog.rpc.kafka.messages import API_VERSIONS, METADATA
from tidelog.rpc.kafka.messages.metadata import MetadataRequest, MetadataResponse
from tidelog.testing import LocalCluster

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=3) as cluster:
        ports = [cluster.ports(number).kafka for number in (1, 2, 3)]
        until(lambda: all(len(asyncio.run(ask(port))[1].brokers) == 3 for port in ports), "all have heard of all")
        yield cluster


async def ask(port: int) -> tuple[dict[int, tuple[int, int]], MetadataResponse]:
    """What a node serves, and what it tells of the cluster."""
    client = KafkaClient(*await asyncio.open_connection("localhost", port))
    try:
        client.writer.write(api_versions(1))
        _, versions = await client.response(API_VERSIONS, 3)
        client.send(METADATA, 12, 2, MetadataRequest())
        _, metadata = await client.response(METADATA, 12)
    finally:
        client.writer.close()
        await client.writer.wait_closed()
    return {row.api_key: (row.min_version, row.max_version) for row in versions.api_keys}, metadata


@pytest.mark.source("a:C-02", "a:C-05", "a:C-18")
def test_every_node_tells_what_it_serves_and_where_the_kafka_doors_are(cluster: LocalCluster) -> None:
    wanted = {number: ("localhost", cluster.ports(number).kafka) for number in (1, 2, 3)}
    for number in (1, 2, 3):
        served, metadata = asyncio.run(ask(cluster.ports(number).kafka))
        assert served == {key: (row.told_low, row.high) for key, row in build().items()}
        assert {row.node_id: (row.host, row.port) for row in metadata.brokers} == wanted
        assert metadata.cluster_id == cluster.cluster_id
    assert cluster.kafka_bootstrap == ",".join(f"{host}:{port}" for host, port in wanted.values())


@pytest.mark.source("a:C-02")
def test_confluent_kafka_finds_the_cluster(cluster: LocalCluster) -> None:
    client = AdminClient({"bootstrap.servers": cluster.kafka_bootstrap})
    found: Any = client.list_topics(timeout=20)
    assert found.cluster_id == cluster.cluster_id
    wanted = {number: cluster.ports(number).kafka for number in (1, 2, 3)}
    assert {number: broker.port for number, broker in found.brokers.items()} == wanted


@pytest.mark.source("a:C-02")
def test_aiokafka_asks_for_versions(cluster: LocalCluster) -> None:
    async def main() -> dict[int, tuple[int, int]]:
        connection = await create_conn("localhost", cluster.ports(1).kafka)
        try:
            response = await connection.send(ApiVersionRequest())
            return {key: (low, high) for key, low, high in response.api_versions}
        finally:
            await connection.close()

    assert asyncio.run(main()) == {key: (row.told_low, row.high) for key, row in build().items()}


def test_the_wrong_door_is_told_which_is_right(cluster: LocalCluster) -> None:
    port, http = cluster.ports(2).kafka, cluster.ports(2).http
    with socket.create_connection(("localhost", port)) as one:
        one.settimeout(10)
        one.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert f"HTTP is on port {http}".encode() in one.recv(4_096)
    until(lambda: f"speaks HTTP on port {port}, which is for Kafka clients" in cluster.log(2), "the log tells")


@pytest.mark.parametrize("command", [["topics", "list"], ["quorum", "describe"], ["groups", "list"]])
@pytest.mark.parametrize("door", ["kafka", "http"])
def test_our_command_on_another_door_names_the_right_one(
    cluster: LocalCluster, command: list[str], door: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ports = cluster.ports(2)
    wrong = f"localhost:{ports.kafka if door == 'kafka' else ports.http}"
    assert run_command([*command, "--bootstrap", wrong]) == 1
    told = capsys.readouterr().err
    assert f"{wrong} is for {'Kafka clients' if door == 'kafka' else 'HTTP, /metrics and /healthz'}" in told
    assert f"gRPC is on port {ports.grpc}" in told
    assert "tidelog dev" not in told, "something runs there: to start another would not help"


def test_our_clients_on_the_kafka_port_name_the_right_one(cluster: LocalCluster) -> None:
    ports = cluster.ports(1)
    with (
        tidelog.Producer(f"localhost:{ports.kafka}") as producer,
        pytest.raises(tidelog.TidelogError, match=f"is for Kafka clients: gRPC is on port {ports.grpc}"),
    ):
        producer.send("anything", b"x").result(timeout=30)
    until(lambda: f"speaks gRPC (HTTP/2) on port {ports.kafka}, which is" in cluster.log(1), "the log tells")


def test_the_metrics_count_what_kafka_clients_do(cluster: LocalCluster) -> None:
    asyncio.run(ask(cluster.ports(3).kafka))
    with urllib.request.urlopen(f"http://localhost:{cluster.ports(3).http}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    assert values['tidelog_kafka_requests_total{api="ApiVersions"}'] >= 1
    assert values['tidelog_kafka_requests_total{api="Metadata"}'] >= 1
    assert values["tidelog_kafka_bytes_in_total"] > len(api_versions(1))
    assert values["tidelog_kafka_bytes_out_total"] > 50


def test_a_taken_kafka_port_is_named_and_a_stop_is_in_order() -> None:
    with LocalCluster(nodes=1, is_started=False) as cluster:
        with socket.create_server(("127.0.0.1", cluster.ports(1).kafka)):
            cluster.start(1, is_awaited=False)
            until(lambda: cluster.ended() == {1: 1}, "the node ends")
            assert f"cannot listen on localhost:{cluster.ports(1).kafka}: Address already in use" in cluster.log(1)
            cluster.forget(1)
        cluster.start(1)
        with socket.create_connection(("localhost", cluster.ports(1).kafka)) as client:
            client.settimeout(20)
            assert cluster.stop(1) == 0
            assert client.recv(1) == b"", "an idle client is let go"
        assert "Traceback" not in cluster.log(1)
