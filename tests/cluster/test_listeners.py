"""Several listeners for each protocol, on real nodes: a client gets the addresses of its own listener, and brokers talk
to each other on a listener of their own."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from support.clusters.commands import run, start
from support.clusters.waiting import until
from support.grpc_api.raw_channel import ClusterChannel

import tidelog
from tidelog.rpc.v1 import cluster_pb2
from tidelog.server.local_nodes import free_ports

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

NAMES = ("BETWEEN", "GRPC", "GRPC_OUTSIDE", "KAFKA", "OUTSIDE")
ADVERTISED_HOST = {"GRPC_OUTSIDE": "127.0.0.1", "OUTSIDE": "127.0.0.1"}
"""What is advertised tells listeners apart by host too; the others say localhost."""


@dataclass
class Nodes:
    """Node 1 is broker and controller, node 2 a broker; both list everything."""

    directory: Path
    ports: dict[int, dict[str, int]]
    http: dict[int, int]
    processes: dict[int, subprocess.Popen[bytes]]

    def file(self, number: int) -> Path:
        return self.directory / f"node-{number}.toml"

    def advertised(self, listener: str) -> dict[int, tuple[str, int]]:
        host = ADVERTISED_HOST.get(listener, "localhost")
        return {number: (host, ports[listener]) for number, ports in self.ports.items()}

    def write(self) -> None:
        controller = f"localhost:{self.ports[1]['CONTROLLER']}"
        for number, ports in self.ports.items():
            fields: dict[str, object] = {
                "node.id": number,
                "process.roles": ["broker", "controller"] if number == 1 else ["broker"],
                "log.dirs": [f"data-{number}"],
                "listeners": [f"{name}://localhost:{port}" for name, port in ports.items()],
                "advertised.listeners": [f"{name}://{host}:{ports[name]}" for name, host in ADVERTISED_HOST.items()],
                "inter.broker.listener.name": "BETWEEN",
                "controller.quorum.voters": [f"1@{controller}"],
                "http.listener": f"localhost:{self.http[number]}",
                "default.replication.factor": 2,
            }
            text = "".join(f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in fields.items())
            self.file(number).write_text(text, encoding="utf-8")

    def start(self) -> None:
        cluster_id = "4L6g3nShT-eMCtK--X86sw"
        for number in self.ports:
            more = ["--standalone"] if number == 1 else []
            run("storage", "format", "--config", str(self.file(number)), "--cluster-id", cluster_id, *more)
            with (self.directory / f"node-{number}.log").open("wb") as log:
                command = ("server", "--ends-with-stdin", "--config", str(self.file(number)))
                self.processes[number] = start(*command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        until(lambda: all(self.is_ready(number) for number in self.ports), "both nodes are ready")

    def is_ready(self, number: int) -> bool:
        log = (self.directory / f"node-{number}.log").read_text(encoding="utf-8")
        assert self.processes[number].poll() is None, log
        try:
            with urllib.request.urlopen(f"http://localhost:{self.http[number]}/healthz", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def close(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(timeout=60)
            assert process.stdin is not None
            process.stdin.close()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    ports = free_ports(2 * len(NAMES) + 3)
    first = {name: ports.pop() for name in (*NAMES, "CONTROLLER")}
    second = {name: ports.pop() for name in NAMES}
    found = Nodes(tmp_path_factory.mktemp("nodes"), {1: first, 2: second}, {1: ports.pop(), 2: ports.pop()}, {})
    found.write()
    try:
        found.start()
        yield found
    finally:
        found.close()


@pytest.mark.parametrize("listener", ["GRPC", "GRPC_OUTSIDE"])
@pytest.mark.requirement("a:G-09")
def test_a_grpc_client_gets_the_addresses_of_the_listener_it_connected_to(nodes: Nodes, listener: str) -> None:
    for ports in nodes.ports.values():
        with ClusterChannel(argparse.Namespace(bootstrap=f"localhost:{ports[listener]}")) as channel:
            found = channel.call("Cluster/Metadata", cluster_pb2.MetadataRequest(), cluster_pb2.MetadataResponse)
        assert found.listener == listener
        assert {broker.id: (broker.host, broker.port) for broker in found.brokers} == nodes.advertised(listener)


@pytest.mark.parametrize("listener", ["KAFKA", "OUTSIDE"])
def test_a_kafka_client_gets_the_addresses_of_the_listener_it_connected_to(nodes: Nodes, listener: str) -> None:
    for ports in nodes.ports.values():
        client = AdminClient({"bootstrap.servers": f"localhost:{ports[listener]}"})
        found: Any = client.list_topics(timeout=20)
        reported = {number: (broker.host, broker.port) for number, broker in found.brokers.items()}
        assert reported == nodes.advertised(listener)


def test_records_go_in_by_one_listener_and_out_by_the_other_and_replicas_meet_between_brokers(nodes: Nodes) -> None:
    inside, outside = (f"localhost:{nodes.ports[1][name]}" for name in ("GRPC", "GRPC_OUTSIDE"))
    with tidelog.Admin(inside) as admin:
        admin.create_topics([tidelog.NewTopic("both", partitions=2, replication_factor=2)])
    with tidelog.Producer(inside) as producer:
        for number in range(20):
            producer.send("both", value=str(number).encode(), partition=number % 2)
    with tidelog.Consumer(outside, group="readers", auto_offset_reset="earliest") as consumer:
        consumer.subscribe(["both"])
        values: list[int] = []
        while len(values) < 20:
            values += [int(record.value or b"") for record in consumer.poll(timeout=20)]
    assert sorted(values) == list(range(20))
    # The one partition is led by node 1, the other by node 2: each follows the other at its own listener.
    for number, other in ((1, 2), (2, 1)):
        assert connections(nodes.processes[number].pid, nodes.ports[other]["BETWEEN"]) > 0
    assert connections(nodes.processes[2].pid, nodes.ports[1]["CONTROLLER"]) > 0


def connections(process: int, port: int) -> int:
    """Of a process to a port of this machine, that are established."""
    sockets = set()
    for row in Path(f"/proc/{process}/fd").iterdir():
        try:
            sockets.add(os.readlink(row))
        except FileNotFoundError:
            continue
    found = 0
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            remote, state, inode = int(fields[2].rpartition(":")[2], 16), fields[3], fields[9]
            found += remote == port and state == "01" and f"socket:[{inode}]" in sockets
    return found
