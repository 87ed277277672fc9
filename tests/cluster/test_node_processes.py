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
import sys
import time
import urllib.request
from functools import partial
from pathlib import Path

import msgpack
import pytest
from patience import DEADLINE_S, until

from tidelog.cli.channel import ClusterChannel
from tidelog.cli.main import RefusedError
from tidelog.log.batch import encode_columns
from tidelog.metadata.broker_side import CLEAN_STOP_KEY
from tidelog.rpc.v1 import admin_pb2, cluster_pb2, log_pb2
from tidelog.server.local_nodes import NodeEndedError, free_ports, is_free
from tidelog.testing import LocalCluster
from tidelog.world.real.store import LmdbStore

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

ENVIRONMENT = {**os.environ, "PYTHONSAFEPATH": "1"}


def tidelog(*arguments: str, check: bool = True, timeout_s: float = 90) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "tidelog", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
        timeout=timeout_s,
    )
    assert not check or done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
    return done


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


def create(cluster: LocalCluster, number: int, topic: str, *, replicas: int) -> None:
    with channel(cluster, number) as one:
        wanted = admin_pb2.NewTopic(name=topic, partitions=1, replication_factor=replicas)
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
        except RefusedError:
            return []  # it was the leader, and is gone: the node that was asked has not heard of another one yet
        return [] if row.HasField("error") else [row.base_offset]

    return int(until(once, f"a write to {topic} is acknowledged")[0])


def text_of(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


def test_one_node_from_start_to_stop_and_again(tmp_path: Path) -> None:
    with LocalCluster(1, data=tmp_path / "one", settings={"num.partitions": 4}) as cluster:
        ports = cluster.ports(1)
        assert json.loads(text_of(f"http://localhost:{ports.http}/healthz")) == {
            "node": 1,
            "state": "ready",
            "waits_for": None,
        }
        figures = text_of(f"http://localhost:{ports.http}/metrics")
        assert "tidelog_node_ready 1" in figures
        assert "tidelog_controller_active 1" in figures
        assert "tidelog_broker_fenced 0" in figures
        resident = re.search(r"tidelog_process_resident_bytes (\d+)", figures)
        assert resident is not None
        print(f"resident: {int(resident[1]) >> 20} MiB")
        create(cluster, 1, "orders", replicas=1)
        assert produce(cluster, 1, "orders", b"a", b"b") == 0
        # What the file says of the cluster is what the cluster begins with.
        shown = tidelog(
            "metadata", "show", "/configs/cluster", "--output", "json", "--bootstrap", f"localhost:{ports.grpc}"
        )
        assert json.loads(shown.stdout)["value"]["num.partitions"] == "4"
        epoch = quorum(cluster, 1).epoch
        assert cluster.stop(1) == 0, cluster.log(1)
        with LmdbStore(cluster.path(1) / "data" / "state", read_only=True) as store:
            stored = store.get(CLEAN_STOP_KEY)
        assert stored is not None
        assert msgpack.unpackb(stored) >= 0
        offline = tidelog("metadata", "show", "/topics/orders/0", "--data", str(cluster.path(1) / "data"))
        assert "leader_epoch" in offline.stdout
        cluster.start(1)
        assert quorum(cluster, 1).epoch > epoch
        assert produce(cluster, 1, "orders", b"c") == 2


@pytest.mark.source("a:B-60", "a:B-61", "a:B-62", "a:O-14", "a:S-03")
def test_three_nodes_go_on_without_the_active_controller_and_take_it_back() -> None:
    with LocalCluster(3) as cluster:
        create(cluster, 1, "orders", replicas=3)
        assert produce(cluster, 1, "orders", b"before") == 0
        victim = quorum(cluster, 1).leader
        other = 1 if victim != 1 else 2
        began = time.monotonic()
        cluster.kill(victim)
        until(lambda: quorum(cluster, other).leader not in (-1, victim), "another controller leads")
        assert produce(cluster, other, "orders", b"after") == 1
        print(f"kill -9 of the active controller: the next write after {time.monotonic() - began:.2f} s")
        until(lambda: victim not in live(cluster, other), "the dead broker is fenced")
        cluster.start(victim)
        until(lambda: len(live(cluster, other)) == 3, "the broker is back")

        def in_sync() -> bool:
            (found,) = metadata(cluster, other, "orders").topics
            return sorted(found.partitions[0].isr) == [1, 2, 3]

        until(in_sync, "all replicas are in sync again")
        for number in (1, 2, 3):  # a rolling restart
            assert cluster.stop(number) == 0, cluster.log(number)[-3000:]
            cluster.start(number)
            until(in_sync, f"all replicas are in sync after the restart of node {number}")
        assert produce(cluster, 1, "orders", b"last") == 2


def test_a_frozen_active_controller_is_replaced_and_comes_back_as_a_follower() -> None:
    with LocalCluster(3) as cluster:
        victim = quorum(cluster, 1).leader
        other = 1 if victim != 1 else 2
        cluster.freeze(victim)
        until(lambda: quorum(cluster, other).leader not in (-1, victim), "another controller leads")
        until(lambda: victim not in live(cluster, other), "the silent broker is fenced")
        cluster.thaw(victim)
        until(lambda: len(live(cluster, other)) == 3, "the broker is let in again")
        until(lambda: quorum(cluster, victim).leader not in (-1, victim), "it follows")
        cluster.wait_ready(victim)


@pytest.mark.source("a:B-69", "a:B-71")
def test_the_first_node_of_three_says_whom_it_waits_for_and_two_are_enough() -> None:
    with LocalCluster(3, is_started=False) as cluster:
        cluster.start(1, is_awaited=False)

        def says() -> bool:
            is_ready, text = cluster.health(1)
            return not is_ready and "waits for 1 more of 3 voters" in text

        until(says, "the health page says whom node 1 waits for")
        until(lambda: "waits for 1 more of 3 voters (2 are needed)" in cluster.log(1), "the log says it")
        cluster.start(2)
        cluster.wait_ready(1)


@pytest.mark.source("a:N-10", "a:O-03")
def test_a_second_signal_stops_at_once() -> None:
    with LocalCluster(2, settings={"controlled.shutdown.timeout.ms": 60_000}) as cluster:
        cluster.kill(2)  # no majority: nobody can take the leaderships
        pid = cluster.pid(1)
        os.kill(pid, signal.SIGTERM)
        until(lambda: "stopping in order; once more" in cluster.log(1), "the first signal is heard")
        os.kill(pid, signal.SIGTERM)
        began = time.monotonic()
        assert cluster.stop(1) == 128 + signal.SIGTERM
        assert time.monotonic() - began < 10


@pytest.mark.source("b:P-01")
def test_the_service_manager_is_told_when_it_is_so(tmp_path: Path) -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener,
        LocalCluster(1, data=tmp_path / "one", is_started=False) as cluster,
        pytest.MonkeyPatch.context() as patch,
    ):
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(DEADLINE_S)
        patch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        patch.setenv("WATCHDOG_USEC", "4000000")
        cluster.start(1)
        heard = [listener.recv(1000).decode()]
        while "READY=1" not in heard[-1] or "WATCHDOG=1" not in heard:
            heard.append(listener.recv(1000).decode())
            if any("READY=1" in text for text in heard) and "WATCHDOG=1" in heard:
                break
        assert cluster.stop(1) == 0
        while not heard[-1].startswith("STOPPING=1"):
            heard.append(listener.recv(1000).decode())


def test_a_node_whose_disk_fails_under_its_metadata_stops_and_others_go_on() -> None:
    with LocalCluster(3) as cluster:
        create(cluster, 1, "orders", replicas=3)
        assert produce(cluster, 1, "orders", b"before") == 0
        victim = quorum(cluster, 1).leader
        other = 1 if victim != 1 else 2
        # Every write past the first 4 KiB of a file fails from now on, as on a device that is gone.
        resource.prlimit(cluster.pid(victim), resource.RLIMIT_FSIZE, (4096, 4096))
        code = until(lambda: cluster.ended().get(victim), "the node has stopped by itself")
        assert code == 1
        cluster.forget(victim)
        assert produce(cluster, other, "orders", b"after") == 1
        cluster.start(victim)
        assert produce(cluster, victim, "orders", b"all again") == 2


def test_a_directory_of_another_cluster_is_refused(tmp_path: Path) -> None:
    with LocalCluster(1, data=tmp_path / "one", is_started=False) as cluster:
        meta = cluster.path(1) / "data" / "meta.properties"
        meta.write_text(meta.read_text().replace(cluster.cluster_id, "AAECAwQFBgcICQoLDA0ODw"), encoding="utf-8")
        with pytest.raises(NodeEndedError, match="belongs to node 1 of cluster"):
            cluster.start(1)


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with LocalCluster(1, data=tmp_path / "one", is_started=False) as cluster:
        for port in (cluster.ports(1).node, cluster.ports(1).grpc, cluster.ports(1).http):
            with (
                socket.create_server(("127.0.0.1", port)),
                pytest.raises(NodeEndedError, match=f"cannot listen on localhost:{port}") as found,
            ):
                cluster.start(1)
            assert "Traceback" not in str(found.value)
            cluster.forget(1)


@pytest.mark.case("R18")
def test_a_controller_joins_votes_and_leaves(tmp_path: Path) -> None:
    with LocalCluster(1, data=tmp_path / "one") as cluster:
        node, grpc, http = free_ports(3)
        config = tmp_path / "joins.toml"
        config.write_text(
            'node.id = 9\nprocess.roles = "controller"\nlog.dirs = "nine"\n'
            f'listeners = "CONTROLLER://localhost:{node},GRPC://localhost:{grpc}"\n'
            f'http.listener = "localhost:{http}"\n',
            encoding="utf-8",
        )
        tidelog("storage", "format", "-c", str(config), "-t", cluster.cluster_id, "--no-initial-controllers")
        info = json.loads(tidelog("storage", "info", "-c", str(config), "--output", "json").stdout)
        directory = info["directories"][0]["directory_id"]
        command = [sys.executable, "-m", "tidelog", "server", "--config", str(config)]
        with (tmp_path / "nine.log").open("wb") as log, subprocess.Popen(command, stderr=log, env=ENVIRONMENT) as nine:
            try:
                at = ("--bootstrap", f"localhost:{cluster.ports(1).grpc}")
                where = f"localhost:{node}"
                until(lambda: not is_free(node), "it listens")
                tidelog("quorum", "add", "--node-id", "9", "--directory-id", directory, "--endpoint", where, *at)
                found = json.loads(tidelog("quorum", "describe", "--output", "json", *at).stdout)
                members = {member["node"]: member for member in found["members"]}
                assert members[9]["is_voter"]
                assert members[9]["endpoints"] == {"CONTROLLER": where}
                again = tidelog(
                    *("quorum", "add", "--node-id", "9", "--directory-id", directory, "--endpoint", where, *at),
                    check=False,
                )
                assert again.returncode == 1
                assert "DUPLICATE_VOTER" in again.stderr
                moved = f"127.0.0.1:{node}"
                tidelog(
                    "quorum", "update-voter", "--node-id", "9", "--directory-id", directory, "--endpoint", moved, *at
                )
                found = json.loads(tidelog("quorum", "describe", "--output", "json", *at).stdout)
                assert {m["node"]: m["endpoints"] for m in found["members"]}[9] == {"CONTROLLER": moved}
                # A controller alone answers for the cluster, too.
                shown = tidelog("metadata", "show", "/brokers/1", "--bootstrap", f"localhost:{grpc}")
                assert "fenced: False" in shown.stdout
                tidelog("quorum", "remove", "--node-id", "9", "--yes", *at)
                found = json.loads(tidelog("quorum", "describe", "--output", "json", *at).stdout)
                assert [member["node"] for member in found["members"]] == [1]
            finally:
                nine.terminate()
                nine.wait(30)


@pytest.mark.source("a:B-55", "a:O-15", "a:X3-42")
def test_a_new_broker_under_an_old_id_takes_the_place_of_the_lost_one() -> None:
    with LocalCluster(4) as cluster:
        with channel(cluster, 1) as one:
            wanted = admin_pb2.NewTopic(name="orders", assignment=[admin_pb2.Replicas(brokers=[1, 4])])
            request = admin_pb2.CreateTopicsRequest(topics=[wanted])
            made = one.call("Admin/CreateTopics", request, admin_pb2.CreateTopicsResponse)
        assert not made.topics[0].HasField("error"), made

        def in_sync() -> list[int]:
            (found,) = metadata(cluster, 1, "orders").topics
            return sorted(found.partitions[0].isr)

        assert produce(cluster, 1, "orders", b"a", b"b") == 0
        cluster.kill(4)
        shutil.rmtree(cluster.path(4) / "data")
        until(lambda: in_sync() == [1], "the lost broker is out of sync")
        tidelog("storage", "format", "-c", str(cluster.path(4) / "node.toml"), "-t", cluster.cluster_id)
        cluster.start(4)
        until(lambda: in_sync() == [1, 4], "the new one has taken its place")
        assert produce(cluster, 1, "orders", b"c") == 2


def second_of_its_id(cluster: LocalCluster, path: Path) -> subprocess.CompletedProcess[str]:
    """A broker 5 of its own directory, run to its end."""
    node, grpc, http = free_ports(3)
    config = path / "twin.toml"
    config.write_text(
        'node.id = 5\nprocess.roles = "broker"\nlog.dirs = "twin"\n'
        f'controller.quorum.voters = "1@localhost:{cluster.ports(1).node}"\n'
        f'listeners = "INTERNAL://localhost:{node},GRPC://localhost:{grpc}"\nhttp.listener = "localhost:{http}"\n',
        encoding="utf-8",
    )
    tidelog("storage", "format", "-c", str(config), "-t", cluster.cluster_id)
    return tidelog("server", "--config", str(config), check=False)


@pytest.mark.source("a:A-20", "a:T-07", "a:X3-43", "b:B-04", "b:D-22", "b:E-10", "b:EX-03")
def test_a_broker_finds_its_controllers_by_an_address_alone_and_a_second_of_its_id_is_refused(tmp_path: Path) -> None:
    with LocalCluster(1, data=tmp_path / "one") as cluster:
        node, grpc, http = free_ports(3)
        config = tmp_path / "broker.toml"
        config.write_text(
            'node.id = 5\nprocess.roles = "broker"\nlog.dirs = "five"\n'
            f'controller.quorum.bootstrap.servers = "localhost:{cluster.ports(1).node}"\n'
            f'listeners = "INTERNAL://localhost:{node},GRPC://localhost:{grpc}"\nhttp.listener = "localhost:{http}"\n',
            encoding="utf-8",
        )
        tidelog("storage", "format", "-c", str(config), "-t", cluster.cluster_id)
        command = [sys.executable, "-m", "tidelog", "server", "--config", str(config)]
        with (tmp_path / "five.log").open("wb") as log, subprocess.Popen(command, stderr=log, env=ENVIRONMENT) as five:
            try:
                until(lambda: live(cluster, 1) == [1, 5], "the broker is let in")
                create(cluster, 1, "orders", replicas=2)
                assert produce(cluster, 1, "orders", b"on two brokers") == 0
                self_willed = second_of_its_id(cluster, tmp_path)
                assert self_willed.returncode == 1, self_willed.stderr
                assert f"another process lives as broker 5, at localhost:{node}" in self_willed.stderr
                assert live(cluster, 1) == [1, 5], "the first one was not harmed"
            finally:
                five.terminate()
                assert five.wait(30) == 0
        until(lambda: live(cluster, 1) == [1], "the broker has left")


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


@pytest.mark.source("a:O-01", "a:O-02", "a:O-10", "a:N-09", "a:N-10")
def test_the_quick_start_of_the_notes_brings_up_three_nodes_one_by_one(tmp_path: Path) -> None:
    ports = free_ports(12)
    rows = [ports[4 * n : 4 * n + 4] for n in range(3)]
    voters = ",".join(f"{n + 1}@localhost:{row[1]}" for n, row in enumerate(rows))
    cluster_id = tidelog("storage", "random-uuid").stdout.strip()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, (kafka, controller, grpc, http) in enumerate(rows, 1):
            text = QUICKSTART.format(
                node=number, path=tmp_path, kafka=kafka, controller=controller, grpc=grpc, http=http, voters=voters
            )
            (tmp_path / f"server{number}.properties").write_text(text, encoding="utf-8")
            tidelog("storage", "format", "-t", cluster_id, "-c", str(tmp_path / f"server{number}.properties"))
        for number in (1, 2, 3):
            path = str(tmp_path / f"server{number}.properties")
            with (tmp_path / f"{number}.log").open("wb") as log:
                command = [sys.executable, "-m", "tidelog", "server", "--config", path]
                processes.append(subprocess.Popen(command, stderr=log, env=ENVIRONMENT))

        def is_complete() -> bool:
            done = tidelog(
                "quorum", "describe", "--output", "json", "--bootstrap", f"localhost:{rows[0][2]}", check=False
            )
            if done.returncode != 0:
                return False
            members = json.loads(done.stdout)["members"]
            return len(members) == 3 and all(member["lag"] < 10 for member in members)

        until(is_complete, "three voters follow each other")
        said = (tmp_path / "1.log").read_text(encoding="utf-8")
        assert "ignored, since they mean nothing here: num.network.threads" in said
        for kafka, *_ in rows:
            keys = until(partial(kafka_keys, kafka), "the PLAINTEXT listener answers")
            assert PRODUCE_KEY in keys, "it speaks Kafka's protocol"
    finally:
        for process in processes:
            process.terminate()
        codes = [process.wait(30) for process in processes]
    assert codes == [0, 0, 0]


class TestDev:
    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tidelog", "dev", *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)

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

    def until_told(self, process: subprocess.Popen[str]) -> list[str]:
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
        with self.start("--data", str(data), "--port-offset", str(offset)) as process:
            try:
                lines = self.until_told(process)
                text = "".join(lines)
                print(lines[0])
                assert re.match(r"Tidelog [\d.]+: 1 node ready in [\d.]+ s\n", lines[0])
                assert f"gRPC   localhost:{9292 + offset}\n" in text
                assert f"Kafka  localhost:{9092 + offset}\n" in text
                assert f"{data} (kept)" in text
                assert sum(line.startswith(("  tidelog ", "  echo ")) for line in lines) == 3
                second = tidelog("dev", "--data", str(data), "--port-offset", str(offset), check=False)
                assert second.returncode == 1
                assert f"is in use by process {process.pid} (tidelog dev)" in second.stderr
                third = tidelog("dev", "--ephemeral", "--port-offset", str(offset), check=False)
                assert third.returncode == 1
                assert f"port {9192 + offset} (nodes, of node 1) is taken; --port-offset N" in third.stderr
            finally:
                process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
            assert process.stderr is not None
            assert process.stderr.read() == "stopping...\n"
        assert "stopped in order" in (data / "node-1" / "node.log").read_text(encoding="utf-8")

    def test_its_nodes_do_not_outlive_it(self, tmp_path: Path) -> None:
        with self.start("--data", str(tmp_path / "d"), "--port-offset", str(self.offset())) as process:
            self.until_told(process)
            process.kill()
        log = tmp_path / "d" / "node-1" / "node.log"
        until(lambda: "stopped in order" in log.read_text(encoding="utf-8"), "the node has ended, in order")
