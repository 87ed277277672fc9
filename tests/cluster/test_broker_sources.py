"""Exercises of the sources on real processes: a first broker, three brokers, fail-over, recovery time, a moved broker.

One cluster of three serves all but the first; each test leaves it whole.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from patience import until

from tidelog.cli.channel import ClusterChannel
from tidelog.rpc.v1 import admin_pb2, cluster_pb2
from tidelog.server.local_nodes import free_ports
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

NODES = (1, 2, 3)
DELIVERY_TIMEOUT_S = 60
"""After that a writer gives a record up (`delivery.timeout.ms`; 120 s unless it is set)."""


def start(bootstrap: str, *arguments: str, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tidelog", *arguments],
        stdin=more.get("stdin", subprocess.DEVNULL),
        stdout=subprocess.PIPE,
        stderr=more.get("stderr", subprocess.PIPE),
        text=True,
        env={**os.environ, "TIDELOG_BOOTSTRAP": bootstrap, "PYTHONSAFEPATH": "1"},
    )


def run(bootstrap: str, *arguments: str, stdin: str = "") -> str:
    with start(bootstrap, *arguments, stdin=subprocess.PIPE) as process:
        out, err = process.communicate(stdin, timeout=90)
    assert process.returncode == 0, f"{arguments}: {process.returncode}\n{out}\n{err}"
    return out


def ask(bootstrap: str, *arguments: str) -> Any:
    return json.loads(run(bootstrap, *arguments, "--output", "json"))


def partitions(bootstrap: str, topic: str) -> list[admin_pb2.PartitionDescription]:
    with ClusterChannel(argparse.Namespace(bootstrap=bootstrap)) as channel:
        request = admin_pb2.DescribeTopicsRequest(topics=[topic])
        (found,) = channel.call("Admin/DescribeTopics", request, admin_pb2.DescribeTopicsResponse).topics
    return sorted(found.partitions, key=lambda row: row.partition)


def has_leaders(bootstrap: str, topic: str, dead: int) -> bool:
    return all(row.leader not in (-1, dead) for row in partitions(bootstrap, topic))


def controller(bootstrap: str) -> int:
    with ClusterChannel(argparse.Namespace(bootstrap=bootstrap)) as channel:
        request = cluster_pb2.DescribeQuorumRequest()
        return channel.call("Cluster/DescribeQuorum", request, cluster_pb2.DescribeQuorumResponse).leader


def figures(cluster: LocalCluster, node: int) -> dict[str, float]:
    """Numbers without labels of its /metrics."""
    with urllib.request.urlopen(f"http://localhost:{cluster.ports(node).http}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {name: float(value) for name, value in re.findall(r"^tidelog_(\w+) (\S+)$", text, re.MULTILINE)}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=3) as made:
        yield made


@pytest.mark.source("b:EX-01")
def test_a_first_broker_takes_two_messages_and_gives_them_back() -> None:
    with LocalCluster(nodes=1) as one:
        at = one.bootstrap
        said = run(at, "topics", "create", "test", "--partitions", "1", "--replication-factor", "1")
        assert said.startswith("test: ")
        (topic,) = ask(at, "topics", "describe", "test")["topics"]
        assert (topic["name"], topic["replication_factor"]) == ("test", 1)
        (row,) = topic["partitions"]
        assert [row[key] for key in ("partition", "leader", "replicas", "isr")] == [0, 1, [1], [1]]
        run(at, "produce", "test", stdin="Test Message 1\nTest Message 2\n")
        with start(at, "consume", "test", "--from-beginning") as reading:
            assert reading.stdout is not None
            assert [reading.stdout.readline() for _ in range(2)] == ["Test Message 1\n", "Test Message 2\n"]
            reading.send_signal(signal.SIGINT)
            _, err = reading.communicate(timeout=30)
        assert err == "tidelog: 2 records read\n"


@pytest.mark.source("b:EX-03", "b:Q-18", "b:C-02")
def test_three_brokers_share_a_topic_and_give_every_message_once_in_order(cluster: LocalCluster) -> None:
    at = cluster.bootstrap
    brokers = ask(at, "brokers", "list")["brokers"]
    assert sorted(broker["id"] for broker in brokers) == list(NODES)
    run(at, "topics", "create", "shared", "--partitions", "3", "--replication-factor", "3")
    rows = partitions(at, "shared")
    assert sorted(row.leader for row in rows) == list(NODES), "each leads a share"
    assert all(sorted(row.replicas) == list(NODES) for row in rows)
    lines = [json.dumps({"value": f"{part}/{number}", "partition": part}) for number in range(200) for part in range(3)]
    run(at, "produce", "shared", "--input", "json", stdin="\n".join(lines) + "\n")
    found = run(at, "consume", "shared", "--from-beginning", "--max-messages", "600").split()
    for part in range(3):
        mine = [value for value in found if value.startswith(f"{part}/")]
        assert mine == [f"{part}/{number}" for number in range(200)]
    assert len(found) == 600


def acks_in(path: Path) -> int:
    return path.read_text(encoding="utf-8").count('"event":"ack"') if path.exists() else 0


@contextmanager
def verified(cluster: LocalCluster, path: Path, topic: str) -> Iterator[Path]:
    """Numbered records are written with acks=all all the time; in the end each is there, once, in order."""
    at, written, read = cluster.bootstrap, path / "written.jsonl", path / "read.jsonl"
    command = ("verify", "produce", topic, "--rate", "300", "--timeout-ms", str(DELIVERY_TIMEOUT_S * 1000))
    with start(at, *command, "--history", str(written), "--output", "json") as writing:
        try:
            until(lambda: acks_in(written) > 5, "the first acknowledgements")
            yield written
            writing.send_signal(signal.SIGINT)
            out, err = writing.communicate(timeout=90)
        finally:
            writing.kill()
    told = json.loads(out)
    assert (told["failed"], told["acknowledged"]) == (0, told["sent"]), f"{out}\n{err}"
    run(at, "verify", "consume", topic, "--history", str(read), "--output", "json")
    verdict = ask(at, "verify", "check", str(written), str(read))
    assert verdict["is_good"], verdict
    assert verdict["is_complete"], verdict


def goes_on(written: Path) -> None:
    before = acks_in(written)
    until(lambda: acks_in(written) > before + 10, "writing goes on")


@pytest.mark.source("b:EX-04", "b:D-01", "a:M-05", "a:S-03")
def test_fail_over_of_a_leader_and_of_the_active_controller(cluster: LocalCluster, tmp_path: Path) -> None:
    at = cluster.bootstrap
    run(at, "topics", "create", "failover", "--partitions", "2", "--replication-factor", "3")

    def in_sync(nodes: list[int]) -> bool:
        return all(sorted(row.isr) == nodes for row in partitions(at, "failover"))

    def troubles() -> tuple[float, float]:
        found = [figures(cluster, node) for node in NODES if node in alive]
        return (
            sum(row["partitions_under_replicated"] for row in found),
            sum(row["partitions_under_min_isr"] for row in found),
        )

    alive = set(NODES)
    until(lambda: in_sync(list(NODES)), "all are in sync")
    until(lambda: troubles() == (0, 0), "a healthy cluster counts no trouble")
    with verified(cluster, tmp_path, "failover") as written:
        for who in ("leader", "controller"):
            victim = controller(at) if who == "controller" else partitions(at, "failover")[0].leader
            before = partitions(at, "failover")
            cluster.kill(victim)
            alive.discard(victim)
            until(partial(has_leaders, at, "failover", victim), "others lead")
            for old, new in zip(before, partitions(at, "failover"), strict=True):
                assert new.leader in set(old.isr) - {victim}
            goes_on(written)
            until(lambda: in_sync(sorted(alive)), "the dead one is out of sync")
            until(lambda: troubles()[0] > 0, "and that is counted")
            assert troubles()[1] == 0, "two are enough"
            assert controller(at) in alive
            cluster.start(victim)
            alive.add(victim)
            until(lambda: in_sync(list(NODES)), "it is back in sync")
        until(lambda: troubles() == (0, 0), "healthy again")


@pytest.mark.source("a:S-08", "a:X3-12", "b:O-08", "b:EX-32")
def test_after_a_crash_all_partitions_have_leaders_long_before_a_writer_gives_up(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    at = cluster.bootstrap
    run(at, "topics", "create", "recovery", "--partitions", "30", "--replication-factor", "3")
    with verified(cluster, tmp_path, "recovery") as written:
        led = {row.leader for row in partitions(at, "recovery")}
        assert led == set(NODES)
        victim = partitions(at, "recovery")[0].leader
        began_s = time.monotonic()
        cluster.kill(victim)
        until(partial(has_leaders, at, "recovery", victim), "every partition has a leader that lives")
        took_s = time.monotonic() - began_s
        print(f"kill -9 of a broker: all 30 partitions had leaders after {took_s:.2f} s")
        assert took_s < DELIVERY_TIMEOUT_S / 2
        goes_on(written)
        cluster.start(victim)
    until(lambda: all(len(row.isr) == 3 for row in partitions(at, "recovery")), "all are in sync again")


@contextmanager
def broker_nine(cluster: LocalCluster, home: Path) -> Iterator[None]:
    """A broker with the id 9 that lives in `home`, at ports of its own."""
    node, grpc, http = free_ports(3)
    home.mkdir(exist_ok=True)
    voters = ",".join(f"{number}@localhost:{cluster.ports(number).node}" for number in NODES)
    (home / "nine.toml").write_text(
        f'node.id = 9\nprocess.roles = "broker"\nlog.dirs = "data"\ncontroller.quorum.voters = "{voters}"\n'
        f'listeners = "INTERNAL://localhost:{node},GRPC://localhost:{grpc}"\nhttp.listener = "localhost:{http}"\n'
        "controlled.shutdown.timeout.ms = 3000\n",
        encoding="utf-8",
    )
    config = str(home / "nine.toml")
    if not (home / "data").exists():
        run(cluster.bootstrap, "storage", "format", "-c", config, "-t", cluster.cluster_id)
    command = [sys.executable, "-m", "tidelog", "server", "--config", config]

    def is_in() -> bool:
        found = {broker["id"]: broker for broker in ask(cluster.bootstrap, "brokers", "list")["brokers"]}
        return 9 in found and found[9]["state"] == "live" and str(grpc) in found[9]["endpoints"]["GRPC"]

    with (home / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            until(is_in, "broker 9 is let in")
            yield
        finally:
            process.terminate()
            process.wait(30)


@pytest.mark.source("b:I-14", "b:B-04")
def test_a_broker_moves_to_another_place_with_its_id_and_its_partitions(cluster: LocalCluster, tmp_path: Path) -> None:
    at = cluster.bootstrap
    first, second = tmp_path / "first", tmp_path / "second"
    with broker_nine(cluster, first):
        run(at, "topics", "create", "moving", "--replica-assignment", "9")
        run(at, "produce", "moving", stdin="a\nb\n")
    shutil.copytree(first / "data", second / "data")
    shutil.rmtree(first)
    with broker_nine(cluster, second):
        until(lambda: partitions(at, "moving")[0].leader == 9, "it leads what it had")
        run(at, "produce", "moving", stdin="c\n")
        assert run(at, "consume", "moving", "--from-beginning", "--max-messages", "3").split() == ["a", "b", "c"]
        run(at, "topics", "delete", "moving", "--yes")
