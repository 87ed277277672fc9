"""The Kafka listener of real nodes: its addresses, clients of other protocols, and what it counts."""

from __future__ import annotations

import asyncio
import socket
import urllib.request

import pytest
from support.clusters.commands import run
from support.clusters.waiting import until
from support.kafka.server import KafkaClient, api_versions

import tidelog
from tidelog.rpc.kafka.dispatch import build
from tidelog.rpc.kafka.messages import API_VERSIONS, METADATA
from tidelog.rpc.kafka.messages.metadata import MetadataRequest, MetadataResponse
from tidelog.testing import LocalCluster

pytestmark = pytest.mark.cluster


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


@pytest.mark.requirement("a:C-02", "a:C-05", "a:C-18")
def test_every_node_reports_what_it_serves_and_its_kafka_listeners(cluster: LocalCluster) -> None:
    wanted = {number: ("localhost", cluster.ports(number).kafka) for number in (1, 2, 3)}
    for number in (1, 2, 3):
        served, metadata = asyncio.run(ask(cluster.ports(number).kafka))
        assert served == {key: (row.advertised_low, row.high) for key, row in build().items()}
        assert {row.node_id: (row.host, row.port) for row in metadata.brokers} == wanted
        assert metadata.cluster_id == cluster.cluster_id
    assert cluster.kafka_bootstrap == ",".join(f"{host}:{port}" for host, port in wanted.values())


def test_a_client_on_the_wrong_listener_learns_the_right_one(cluster: LocalCluster) -> None:
    port, http = cluster.ports(2).kafka, cluster.ports(2).http
    with socket.create_connection(("localhost", port)) as one:
        one.settimeout(10)
        one.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert f"HTTP is on port {http}".encode() in one.recv(4_096)
    until(lambda: f"speaks HTTP on port {port}, which is for Kafka clients" in cluster.log(2), "the log tells")


@pytest.mark.parametrize("command", [["topics", "list"], ["quorum", "describe"], ["groups", "list"]])
@pytest.mark.parametrize("protocol", ["kafka", "http"])
def test_our_command_on_another_listener_names_the_right_one(
    cluster: LocalCluster, command: list[str], protocol: str
) -> None:
    ports = cluster.ports(2)
    wrong = f"localhost:{ports.kafka if protocol == 'kafka' else ports.http}"
    output = run(*command, "--bootstrap", wrong, code=1).err
    assert f"{wrong} is for {'Kafka clients' if protocol == 'kafka' else 'HTTP, /metrics and /healthz'}" in output
    assert f"gRPC is on port {ports.grpc}" in output
    assert "tidelog dev" not in output, "something runs there: to start another would not help"


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
