"""Whole nodes as real processes: start, readiness, signals, kill -9, membership, `tidelog dev`.

Deadlines are generous, since the machine that runs the tests has other things to do; figures come from `bench`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import pytest
from support.clusters.commands import Shell, run, start
from support.clusters.waiting import DEADLINE_S, until
from support.grpc_api.raw_channel import ClusterChannel

from tidelog.cli.main import CommandError
from tidelog.log.batch import encode_columns
from tidelog.metadata.broker_lifecycle import CLEAN_STOP_KEY
from tidelog.rpc.v1 import admin_pb2, cluster_pb2, log_pb2
from tidelog.server.local_nodes import NodeEndedError, free_ports, is_free
from tidelog.testing import LocalCluster
from tidelog.world.real.store import LmdbStore

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


def channel(cluster: LocalCluster, number: int) -> ClusterChannel:
    return ClusterChannel(argparse.Namespace(bootstrap=f"localhost:{cluster.ports(number).grpc}"))


def quorum(cluster: LocalCluster, number: int) -> cluster_pb2.DescribeQuorumResponse:
    with channel(cluster, number) as one:
        return one.call(
            "Cluster/DescribeQuorum", cluster_pb2.DescribeQuorumRequest(), cluster_pb2.DescribeQuorumResponse
        )


def metadata(cluster: LocalCluster, number: int, *topics: str) -> cluster_pb2.MetadataResponse:
    with channel(cluster, number) as one:
        request = cluster_pb2.MetadataRequest(topics=topics)
        return one.call("Cluster/Metadata", request, cluster_pb2.MetadataResponse)


def live(cluster: LocalCluster, number: int) -> list[int]:
    return [broker.id for broker in metadata(cluster, number).brokers]


def create(cluster: LocalCluster, number: int, topic: str, *replicas: int) -> None:
    with channel(cluster, number) as one:
        wanted = admin_pb2.NewTopic(name=topic, assignment=[admin_pb2.Replicas(brokers=replicas)])
        request = admin_pb2.CreateTopicsRequest(topics=[wanted])
        made = one.call("Admin/CreateTopics", request, admin_pb2.CreateTopicsResponse)
    assert not made.topics[0].HasField("error"), made


def produce(cluster: LocalCluster, asked: int, topic: str, *values: bytes) -> int:
    """With acks=all, by way of the leader that node `asked` names; the base offset."""

    def once() -> list[int]:
        (found,) = metadata(cluster, asked, topic).topics
        leader = found.partitions[0].leader
        if leader < 0:
            return []
        batch = encode_columns([0] * len(values), [None] * len(values), list(values))
        item = log_pb2.ProducePartition(topic=topic, partition=0, batches=batch)
        request = log_pb2.ProduceRequest(acks=-1, timeout_ms=5_000, partitions=[item])
        try:
            with channel(cluster, leader) as one:
                (row,) = one.call("Log/Produce", request, log_pb2.ProduceResponse).partitions
        except CommandError:
            return []  # it was the leader, and is gone: the node that was asked has not heard of another one yet
        return [] if row.HasField("error") else [row.base_offset]

    return int(until(once, f"a write to {topic} is acknowledged")[0])


def text_of(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


@contextmanager
def notified(path: Path) -> Iterator[Callable[[str], None]]:
    """A service manager; the function waits until a node has sent it this line."""
    heard: list[str] = []

    def await_line(text: str) -> None:
        while not any(line.startswith(text) for message in heard for line in message.splitlines()):
            heard.append(listener.recv(1000).decode())

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener, pytest.MonkeyPatch.context() as patch:
        listener.bind(str(path))
        listener.settimeout(DEADLINE_S)
        patch.setenv("NOTIFY_SOCKET", str(path))
        patch.setenv("WATCHDOG_USEC", "4000000")
        yield await_line


def check_pages(cluster: LocalCluster) -> None:
    """The pages of a node that is ready."""
    assert json.loads(text_of(f"http://localhost:{cluster.ports(1).http}/healthz")) == {
        "node": 1,
        "state": "ready",
        "waits_for": None,
        "live_brokers": [1],
    }
    figures = text_of(f"http://localhost:{cluster.ports(1).http}/metrics")
    for line in ("tidelog_node_ready 1", "tidelog_controller_active 1", "tidelog_broker_fenced 0"):
        assert line in figures
    resident = re.search(r"tidelog_process_resident_bytes (\d+)", figures)
    assert resident is not None
    print(f"resident: {int(resident[1]) >> 20} MiB")


@pytest.mark.requirement("b:P-01")
def test_one_node_from_start_to_stop_and_again(tmp_path: Path) -> None:
    settings = {"num.partitions": 4}
    with (
        notified(tmp_path / "notify") as await_line,
        LocalCluster(1, data=tmp_path / "one", settings=settings) as cluster,
    ):
        await_line("READY=1")
        await_line("WATCHDOG=1")
        check_pages(cluster)
        create(cluster, 1, "orders", 1)
        assert produce(cluster, 1, "orders", b"a", b"b") == 0
        # What the file says of the cluster is what the cluster begins with.
        shown = run("metadata", "show", "/configs/cluster", "--output", "json", "--bootstrap", cluster.bootstrap)
        assert shown.document["value"]["num.partitions"] == "4"
        epoch = quorum(cluster, 1).epoch
        with socket.create_connection(("localhost", cluster.ports(1).kafka), timeout=DEADLINE_S) as client:
            assert cluster.stop(1) == 0, cluster.log(1)
            assert client.recv(1) == b"", "an idle client is let go"
        await_line("STOPPING=1")
        assert "Traceback" not in cluster.log(1)
        with LmdbStore(cluster.path(1) / "data" / "state", read_only=True) as store:
            stored = store.get(CLEAN_STOP_KEY)
        assert stored is not None
        assert msgpack.unpackb(stored) >= 0
        offline = run("metadata", "show", "/topics/orders/0", "--data", str(cluster.path(1) / "data"))
        assert "leader_epoch" in offline.out
        cluster.start(1)
        assert quorum(cluster, 1).epoch > epoch
        assert produce(cluster, 1, "orders", b"c") == 2


@pytest.mark.requirement("a:B-69", "a:B-71", "a:N-10", "a:O-03")
def test_three_nodes_from_the_first_start_by_a_broken_disk_to_a_second_signal() -> None:
    with LocalCluster(3, start=False, settings={"controlled.shutdown.timeout.ms": 60_000}) as cluster:
        cluster.start(1, wait=False)

        def says() -> bool:
            is_ready, text = cluster.health(1)
            return not is_ready and "waits for 1 more of 3 voters" in text

        until(says, "the health page says whom node 1 waits for")
        until(lambda: "waits for 1 more of 3 voters (2 are needed)" in cluster.log(1), "the log says it")
        cluster.start(2)
        cluster.wait_ready(1)
        cluster.start(3)
        until(lambda: live(cluster, 1) == [1, 2, 3], "all are live")
        create(cluster, 1, "orders", 1, 2, 3)
        assert produce(cluster, 1, "orders", b"before") == 0
        victim = quorum(cluster, 1).leader
        other = 1 if victim != 1 else 2
        # Every write past the first 4 KiB of a file fails from now on, as on a device that is gone.
        resource.prlimit(cluster.pid(victim), resource.RLIMIT_FSIZE, (4096, 4096))
        code = until(lambda: cluster.ended().get(victim), "the node has stopped by itself")
        assert code == 1
        cluster.reap(victim)
        assert produce(cluster, other, "orders", b"after") == 1
        cluster.start(victim)
        assert produce(cluster, victim, "orders", b"all again") == 2
        cluster.kill(2)
        cluster.kill(3)  # no majority: nobody can take the leaderships
        os.kill(cluster.pid(1), signal.SIGTERM)
        until(lambda: "stopping in order; once more" in cluster.log(1), "the first signal is heard")
        assert cluster.stop(1) == 128 + signal.SIGTERM, "the second one stops it at once"


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with LocalCluster(1, data=tmp_path / "one", start=False) as cluster:
        for port in (cluster.ports(1).grpc, cluster.ports(1).kafka):
            with (
                socket.create_server(("127.0.0.1", port)),
                pytest.raises(NodeEndedError, match=f"cannot listen on localhost:{port}: Address already in") as found,
            ):
                cluster.start(1)
            assert "Traceback" not in str(found.value)
            cluster.reap(1)


@pytest.fixture(scope="module")
def one() -> Iterator[LocalCluster]:
    """A single node, with others that come and go."""
    with LocalCluster(1) as made:
        yield made


@contextmanager
def serving(config: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A node of its own file; stopped in order if it runs in the end."""
    with config.with_suffix(".log").open("wb") as log, start("server", "--config", str(config), stderr=log) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(DEADLINE_S)


def write_config(path: Path, node: int, role: str, controllers: str = "") -> tuple[Path, int, int]:
    """The file of a further node, its port for other nodes, and that for gRPC clients."""
    ports = free_ports(3)
    path.mkdir(exist_ok=True)
    listener = "CONTROLLER" if role == "controller" else "INTERNAL"
    (path / "node.toml").write_text(
        f'node.id = {node}\nprocess.roles = "{role}"\nlog.dirs = "data"\n{controllers}\n'
        f'listeners = "{listener}://localhost:{ports[0]},GRPC://localhost:{ports[1]}"\n'
        f'http.listener = "localhost:{ports[2]}"\ncontrolled.shutdown.timeout.ms = 1000\n',
        encoding="utf-8",
    )
    return path / "node.toml", ports[0], ports[1]


@pytest.mark.case("R18")
def test_a_controller_joins_votes_and_leaves(one: LocalCluster, tmp_path: Path) -> None:
    config, node, grpc = write_config(tmp_path, 9, "controller")
    shell, where, moved = Shell(one.bootstrap), f"localhost:{node}", f"127.0.0.1:{node}"
    shell.run("storage", "format", "-c", str(config), "-t", one.cluster_id, "--no-initial-controllers")
    (info,) = run("storage", "info", "-c", str(config), "--output", "json").document["directories"]
    nine = ("--node-id", "9", "--directory-id", info["directory_id"], "--endpoint")

    def members() -> dict[int, Any]:
        return {member["node"]: member for member in shell.json("quorum", "describe")["members"]}

    with serving(config):
        until(lambda: not is_free(node), "it listens")
        shell.run("quorum", "add", *nine, where)
        assert members()[9]["is_voter"]
        assert members()[9]["endpoints"] == {"CONTROLLER": where}
        shell.run("quorum", "add", *nine, where, code=1)
        assert "DUPLICATE_VOTER" in shell.err
        shell.run("quorum", "update-voter", *nine, moved)
        assert members()[9]["endpoints"] == {"CONTROLLER": moved}
        # A controller alone answers for the cluster, too.
        assert "fenced: False" in run("metadata", "show", "/brokers/1", "--bootstrap", f"localhost:{grpc}").out
        shell.run("quorum", "remove", "--node-id", "9", "--yes")
        assert list(members()) == [1]


@pytest.mark.requirement("a:A-20", "a:T-07", "a:X3-43", "b:B-04", "b:D-22", "b:E-10", "b:I-14")
@pytest.mark.requirement("a:B-55", "a:O-15", "a:X3-42")
def test_a_broker_joins_by_an_address_alone_keeps_its_id_moves_and_is_replaced(
    one: LocalCluster, tmp_path: Path
) -> None:
    def format_node(config: Path) -> None:
        run("storage", "format", "-c", str(config), "-t", one.cluster_id)

    def in_sync() -> list[int]:
        (found,) = metadata(one, 1, "both").topics
        return sorted(found.partitions[0].isr)

    shell, address = Shell(one.bootstrap), f"localhost:{one.ports(1).node}"
    by_address = f'controller.quorum.bootstrap.servers = "{address}"'
    config, node, _ = write_config(tmp_path / "first", 5, "broker", by_address)
    format_node(config)
    with serving(config) as five:
        until(lambda: live(one, 1) == [1, 5], "the broker is let in")
        create(one, 1, "both", 1, 5)
        create(one, 1, "only", 5)
        shell.run("produce", "both", stdin="on two brokers\n")
        shell.run("produce", "only", stdin="a\nb\n")
        twin, *_ = write_config(tmp_path / "twin", 5, "broker", f'controller.quorum.voters = "1@{address}"')
        format_node(twin)
        with serving(twin) as second:
            assert second.wait(DEADLINE_S) == 1
        log = twin.with_suffix(".log").read_text(encoding="utf-8")
        assert f"another process runs as broker 5, at localhost:{node}" in log
        assert live(one, 1) == [1, 5], "the first one was not harmed"
    assert five.returncode == 0
    until(lambda: live(one, 1) == [1], "the broker has left")
    moved, *_ = write_config(tmp_path / "second", 5, "broker", by_address)
    (tmp_path / "first" / "data").rename(tmp_path / "second" / "data")
    with serving(moved) as five:
        until(lambda: in_sync() == [1, 5], "it is back at another place")
        shell.run("produce", "only", stdin="c\n")
        assert shell.run("consume", "only", "--from-beginning", "--max-messages", "3") == "a\nb\nc\n", (
            "it leads what it had"
        )
        five.kill()
    until(lambda: in_sync() == [1], "the lost broker is out of sync")
    shutil.rmtree(tmp_path / "second" / "data")
    format_node(moved)
    with serving(moved):
        until(lambda: in_sync() == [1, 5], "the new one has taken its place")
        shell.run("produce", "both", stdin="again on two\n")


QUICKSTART = """broker.id={node}
log.dirs={path}/kafka{node}-logs
listeners=PLAINTEXT://localhost:{kafka},CONTROLLER://localhost:{controller},GRPC://localhost:{grpc}
http.listener=localhost:{http}
process.roles=broker,controller
controller.quorum.voters={voters}
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,GRPC:PLAINTEXT
controlled.shutdown.timeout.ms=2000
num.network.threads=3
"""


API_VERSIONS_KEY, PRODUCE_KEY = 18, 0


def kafka_keys(port: int) -> set[int]:
    """The requests that a listener offers, asked as any Kafka client asks first: ApiVersions, version 0. None of
    them if nobody listens."""
    request = struct.pack("!hhih", API_VERSIONS_KEY, 0, 77, -1)
    try:
        connection = socket.create_connection(("localhost", port), timeout=10)
    except ConnectionRefusedError:
        return set()
    with connection, connection.makefile("rb") as answer:
        connection.sendall(struct.pack("!i", len(request)) + request)
        (size,) = struct.unpack("!i", answer.read(4))
        body = answer.read(size)
    correlation_id, error, count = struct.unpack_from("!ihi", body)
    assert (correlation_id, error, size) == (77, 0, 10 + 6 * count)
    return {struct.unpack_from("!hhh", body, 10 + 6 * row)[0] for row in range(count)}


@pytest.mark.requirement("a:O-01", "a:O-02", "a:O-10", "a:N-09", "a:N-10")
def test_the_quick_start_of_the_notes_brings_up_three_nodes_one_by_one(tmp_path: Path) -> None:
    ports = free_ports(12)
    rows = [ports[4 * n : 4 * n + 4] for n in range(3)]
    voters = ",".join(f"{n + 1}@localhost:{row[1]}" for n, row in enumerate(rows))
    cluster_id = run("storage", "random-uuid").out.strip()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, (kafka, controller, grpc, http) in enumerate(rows, 1):
            text = QUICKSTART.format(
                node=number, path=tmp_path, kafka=kafka, controller=controller, grpc=grpc, http=http, voters=voters
            )
            (tmp_path / f"server{number}.properties").write_text(text, encoding="utf-8")
            run("storage", "format", "-t", cluster_id, "-c", str(tmp_path / f"server{number}.properties"))
        for number in (1, 2, 3):
            path = str(tmp_path / f"server{number}.properties")
            with (tmp_path / f"{number}.log").open("wb") as log:
                processes.append(start("server", "--config", path, stdout=log, stderr=log))

        def is_complete() -> bool:
            done = run("quorum", "describe", "--output", "json", "--bootstrap", f"localhost:{rows[0][2]}", code=None)
            members = done.document["members"] if done.code == 0 else []
            return len(members) == 3 and all(member["lag"] < 10 for member in members)

        until(is_complete, "three voters follow each other")
        said = (tmp_path / "1.log").read_text(encoding="utf-8")
        assert "ignored unknown settings: num.network.threads" in said
        for kafka, *_ in rows:
            keys = until(partial(kafka_keys, kafka), "the PLAINTEXT listener answers")
            assert PRODUCE_KEY in keys, "it speaks Kafka's protocol"
    finally:
        for process in processes:
            process.terminate()
        codes = [process.wait(30) for process in processes]
    assert codes == [0, 0, 0]


class TestDev:
    def offset(self) -> int:
        """Where the usual ports are free."""
        for offset in range(10_000 + os.getpid() % 1000 * 10, 40_000, 10):
            held: list[socket.socket] = []
            try:
                held += [socket.create_server(("127.0.0.1", port + offset)) for port in (9092, 9192, 9292, 9392)]
                return offset
            except OSError:
                continue
            finally:
                for one in held:
                    one.close()
        raise AssertionError("no free ports")

    def until_notified(self, process: subprocess.Popen[str]) -> list[str]:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or not lines[-1].startswith("Ctrl-C"):
            line = process.stdout.readline()
            assert line, "".join(lines) + (process.stderr.read() if process.stderr else "")
            lines.append(line)
        return lines

    def test_it_tells_its_addresses_and_stops_quietly(self, tmp_path: Path) -> None:
        offset = self.offset()
        data = tmp_path / "data"
        with start("dev", "--data", str(data), "--port-offset", str(offset), text=True) as process:
            try:
                lines = self.until_notified(process)
                text = "".join(lines)
                print(lines[0])
                assert re.match(r"Tidelog [\d.]+: 1 node ready in [\d.]+ s\n", lines[0])
                assert f"gRPC   localhost:{9292 + offset}\n" in text
                assert f"Kafka  localhost:{9092 + offset}\n" in text
                assert f"{data} (kept)" in text
                assert sum(line.startswith(("  tidelog ", "  echo ")) for line in lines) == 3
                second = run("dev", "--data", str(data), "--port-offset", str(offset), code=1)
                assert f"is in use by process {process.pid} (tidelog dev)" in second.err
                third = run("dev", "--ephemeral", "--port-offset", str(offset), code=1)
                assert f"port {9192 + offset} (nodes, of node 1) is taken; --port-offset N" in third.err
            finally:
                process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
            assert process.stderr is not None
            assert process.stderr.read() == "stopping...\n"
        assert "stopped in order" in (data / "node-1" / "node.log").read_text(encoding="utf-8")

    def test_its_nodes_do_not_outlive_it(self, tmp_path: Path) -> None:
        with start("dev", "--data", str(tmp_path / "d"), "--port-offset", str(self.offset()), text=True) as process:
            self.until_notified(process)
            process.kill()
        log = tmp_path / "d" / "node-1" / "node.log"
        until(lambda: "stopped in order" in log.read_text(encoding="utf-8"), "the node has ended, in order")
