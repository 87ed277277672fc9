"""Kafka's own transactional producer and `kafka-transactions` against real clusters."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka_tools import TIMEOUT_S, Tools, java_command, needs_tools, running
from support.clusters.waiting import until
from support.interop.reading import read_values

import tidelog
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.interop, pytest.mark.cluster, pytest.mark.timeout(400), needs_tools]

SOURCE = str(Path(__file__).parent / "Transactions.java")
DEADLINE_S = 120.0


@pytest.fixture
def tools(tidelog_cluster: LocalCluster) -> Tools:
    return Tools(tidelog_cluster.kafka_bootstrap)


def java(cluster: LocalCluster, verb: str, *arguments: str) -> list[str]:
    """The lines that it prints."""
    command = [*java_command(SOURCE), verb, cluster.kafka_bootstrap, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{verb} {arguments}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout.split()


def until_committed(cluster: LocalCluster, topic: str, wanted: dict[int, list[bytes]]) -> None:
    """Markers are written shortly after the commit."""
    until(lambda: read_values(cluster, topic, len(wanted)) == wanted, f"the committed records of {topic}")


# Producers.


@pytest.mark.requirement("a:H-02", "a:H-15", "a:H-20", "a:X3-39")
def test_javas_producer_commits_and_aborts(tools: Tools, tidelog_cluster: LocalCluster) -> None:
    tools.create("java-end", partitions=3)
    java(tidelog_cluster, "end", "java-end", "java-end")
    kept = [b"kept-%d" % number for number in range(9) if number % 3 != 1]
    until_committed(tidelog_cluster, "java-end", dict.fromkeys(range(3), kept))
    everything = read_values(tidelog_cluster, "java-end", 3, isolation="read_uncommitted")
    assert {len(rows) for rows in everything.values()} == {9}
    with tidelog.Admin(tidelog_cluster.bootstrap) as admin:
        described = admin.describe_transaction("java-end")
    # Its protocol is version 2: each transaction has had an epoch of its own.
    assert (described.state, described.producer_epoch) == ("CompleteCommit", 9)


@pytest.mark.requirement("a:H-11", "a:H-16", "a:X3-37")
def test_javas_producer_is_fenced_by_a_newer_one(tools: Tools, tidelog_cluster: LocalCluster) -> None:
    tools.create("java-fence")
    (error,) = java(tidelog_cluster, "fence", "java-fence", "java-fence")
    assert error in ("ProducerFencedException", "InvalidProducerEpochException")
    until_committed(tidelog_cluster, "java-fence", {0: [b"kept"]})


@pytest.mark.requirement("a:H-16", "a:H-22", "a:T-20")
def test_javas_producer_goes_on_after_a_timeout(tools: Tools, tidelog_cluster: LocalCluster) -> None:
    """A record tells it, and the abort returns the next epoch. If only the commit tells it, that is fatal, as with
    Kafka."""
    tools.create("java-slow", partitions=2)
    errors = java(tidelog_cluster, "slow", "java-slow", "java-slow")
    assert errors == ["InvalidProducerEpochException", "ProducerFencedException"]
    until_committed(tidelog_cluster, "java-slow", {0: [b"kept"], 1: []})


@pytest.mark.requirement("a:H-40")
def test_the_performance_tool_writes_in_transactions(
    tools: Tools, tidelog_cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    tools.create("java-perf", partitions=3)
    produced = tools.run(
        *("kafka-producer-perf-test", "--topic", "java-perf", "--throughput", "-1"),
        *("--num-records", "20000", "--record-size", "200"),
        *("--transactional-id", "java-perf", "--transaction-duration-ms", "100"),
        *("--command-property", "acks=all", "linger.ms=5"),
    )
    assert any(line.startswith("20000 records sent, ") for line in produced.lines)
    until(
        lambda: sum(map(len, read_values(tidelog_cluster, "java-perf", 3).values())) == 20_000, "all committed records"
    )
    with capsys.disabled():
        print(f"\ntransactions of 100 ms, 200 bytes: {produced.lines[-1]}")


# A pipeline.


@pytest.mark.requirement("a:H-01", "a:H-03", "a:H-14", "a:H-33", "a:X3-24", "a:X3-36")
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_javas_pipeline_passes_each_record_on_once_through_kills(tmp_path: Path, protocol: str) -> None:
    """Of the coordinator's broker, and of the program."""
    with LocalCluster(nodes=3) as cluster:
        tools = Tools(cluster.kafka_bootstrap)
        for topic in ("in", "out"):
            tools.create(topic, partitions=3)
        sent = 0

        def write(count: int) -> None:
            nonlocal sent
            with tidelog.Producer(cluster.bootstrap) as producer:
                for number in range(sent, sent + count):
                    producer.send("in", b"%d" % number, partition=number % 3)
                producer.flush(60)
            sent += count

        def passed_on() -> int:
            return sum(map(len, read_values(cluster, "out", 3).values()))

        command = [*java_command(SOURCE), "copy", cluster.kafka_bootstrap, "copy", "copy", protocol, "in", "out"]

        def until_passed_on(process: subprocess.Popen[bytes], out: Path, count: int) -> None:
            until(lambda: process.poll() is not None or passed_on() >= count, f"{count} records", timeout_s=DEADLINE_S)
            assert process.poll() is None, out.read_text()[-4000:]

        first, second = tmp_path / "first.log", tmp_path / "second.log"
        write(150)
        with running(command, first) as process:
            until_passed_on(process, first, 30)
            with tidelog.Admin(cluster.bootstrap) as admin:
                coordinator = admin.describe_transaction("copy").coordinator
            cluster.kill(coordinator)
            write(150)
            until_passed_on(process, first, 200)
            cluster.start(coordinator)
            write(300)
            until_passed_on(process, first, 320)
            process.send_signal(signal.SIGKILL)
        with running(command, second) as process:
            until_passed_on(process, second, sent)
        wanted = {part: [b"%d" % number for number in range(part, sent, 3)] for part in range(3)}
        assert read_values(cluster, "out", 3) == wanted


# kafka-transactions.


@pytest.fixture
def open_transaction(tools: Tools, tidelog_cluster: LocalCluster, tmp_path: Path) -> Iterator[str]:
    """The topic and transactional id of a program that has one open."""
    name = "java-open"
    tools.create(name)
    out = tmp_path / "open.log"
    command = [*java_command(SOURCE), "open", tidelog_cluster.kafka_bootstrap, name, name]
    with running(command, out) as process:
        until(lambda: "open" in out.read_text() or process.poll() is not None, "the open transaction")
        assert process.poll() is None, out.read_text()
        yield name


def test_transactions_are_listed_and_described(
    tools: Tools, tidelog_cluster: LocalCluster, open_transaction: str
) -> None:
    name = open_transaction
    listed = {row[0]: row for row in tools.run("kafka-transactions", "list").table()}
    with tidelog.Admin(tidelog_cluster.bootstrap) as admin:
        known = admin.describe_transaction(name)
    assert listed[name] == [name, str(known.coordinator), str(known.producer_id), "Ongoing"]
    pattern = ("--transactional-id-pattern", "java-op.*")
    by_pattern = tools.run("kafka-transactions", "list", *pattern).table()
    assert [row[0] for row in by_pattern] == [name]
    assert name in {row[0] for row in tools.run("kafka-transactions", "list", "--duration-filter", "1").table()}
    day_ms = str(24 * 3_600_000)
    assert tools.run("kafka-transactions", "list", "--duration-filter", day_ms).table() == []
    described = tools.run("kafka-transactions", "describe", "--transactional-id", name)
    (row,) = described.table()
    assert row[:6] == [
        str(known.coordinator),
        name,
        str(known.producer_id),
        str(known.producer_epoch),
        "Ongoing",
        "600000",
    ]
    assert row[-1] == f"{name}-0"
    producers = tools.run("kafka-transactions", "describe-producers", "--topic", name, "--partition", "0").table()
    ((producer_id, epoch, coordinator_epoch, _, _, start),) = producers
    assert (producer_id, epoch, start) == (str(known.producer_id), str(known.producer_epoch), "0")
    assert coordinator_epoch == "-1"
    # It is open, and its coordinator knows it.
    hanging = ("find-hanging", "--topic", name, "--max-transaction-timeout", "0")
    assert tools.run("kafka-transactions", *hanging).table() == []
    refused = tools.run(
        *("kafka-transactions", "abort", "--topic", name, "--partition", "0", "--start-offset", "0"), exit_code=1
    )
    assert "in an invalid state" in refused.out + refused.err
    tools.run("kafka-transactions", "forceTerminateTransaction", "--transactionalId", name)
    until(lambda: tools.run("kafka-transactions", "list", *pattern).table()[0][-1] != "Ongoing", "the end of it")


def test_a_hanging_transaction_is_found_and_aborted(tmp_path: Path) -> None:
    """Its coordinator has lost the partition of `__transaction_state` with all of its replicas."""
    with LocalCluster(nodes=1) as cluster:
        tools = Tools(cluster.kafka_bootstrap)
        with tidelog.Admin(cluster.bootstrap) as admin:
            sets = {"transaction.state.log.num.partitions": "1"}
            admin.alter_config(tidelog.ConfigResource("cluster"), sets=sets)
        tools.create("hung", replicas=1)
        out = tmp_path / "open.log"
        command = [*java_command(SOURCE), "open", cluster.kafka_bootstrap, "hung", "hung"]
        with running(command, out) as process:
            until(lambda: "open" in out.read_text() or process.poll() is not None, "the open transaction")
            assert process.poll() is None, out.read_text()
            process.send_signal(signal.SIGKILL)
        cluster.kill(1)
        (lost,) = (cluster.path(1) / "data").glob("__transaction_state.*-0")
        shutil.rmtree(lost)
        cluster.start(1)
        with tidelog.Admin(cluster.bootstrap) as admin:
            # It is offline, unless the log was so new that no checkpoint has named it: then it is empty already.
            admin.elect_leaders([("__transaction_state", 0)], unclean=True, partial=True)
        with tidelog.Producer(cluster.bootstrap) as producer:
            producer.send("hung", b"behind").result(60)

        def hanging() -> list[list[str]]:
            return tools.run(
                *("kafka-transactions", "find-hanging", "--topic", "hung", "--max-transaction-timeout", "0")
            ).table()

        (row,) = until(hanging, "the hanging transaction")
        assert row[:2] == ["hung", "0"]
        assert read_values(cluster, "hung", 1) == {0: []}
        tools.run(*("kafka-transactions", "abort", "--topic", "hung", "--partition", "0", "--start-offset", "0"))
        assert hanging() == []
        assert read_values(cluster, "hung", 1) == {0: [b"behind"]}
