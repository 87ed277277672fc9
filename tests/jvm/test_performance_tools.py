"""Kafka's performance tools against a real cluster; one of them goes on while a leader is killed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kafka_tools import Ran, Tools, needs_tools
from support.clusters.waiting import until

from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.interop, pytest.mark.cluster, pytest.mark.timeout(300), needs_tools]

RECORDS = 50_000
RECORD_BYTES = 500
NUMBERED = 20_000
SENT = re.compile(r"^(\d+) records sent", re.MULTILINE)
"""One line for each time that it reports."""


@pytest.fixture
def tools(tidelog_cluster: LocalCluster) -> Tools:
    return Tools(tidelog_cluster.kafka_bootstrap)


def figures(ran: Ran) -> dict[str, str]:
    """The consumer tool's row under its headings."""
    head, row = (line for line in ran.lines if "," in line)
    return dict(zip(head.split(", "), row.split(", "), strict=True))


@pytest.mark.requirement("a:N-15")
@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_the_performance_tools_write_read_and_report(
    tools: Tools, capsys: pytest.CaptureFixture[str], codec: str
) -> None:
    topic = f"fast-{codec}"
    tools.create(topic, partitions=3)
    produced = tools.run(
        *("kafka-producer-perf-test", "--topic", topic, "--throughput", "-1"),
        *("--num-records", str(RECORDS), "--record-size", str(RECORD_BYTES)),
        *("--command-property", "acks=all", "linger.ms=5", "batch.size=65536", f"compression.type={codec}"),
    )
    assert produced.lines[-1].startswith(f"{RECORDS} records sent, ")
    assert produced.err == ""
    assert sum(tools.end_offsets(topic).values()) == RECORDS
    consumed = tools.run(
        *("kafka-consumer-perf-test", "--topic", topic, "--num-records", str(RECORDS), "--timeout", "60000"),
        *("--group", topic),
    )
    found = figures(consumed)
    assert int(found["data.consumed.in.nMsg"]) == RECORDS
    assert float(found["data.consumed.in.MB"]) == pytest.approx(RECORDS * RECORD_BYTES / 2**20, rel=0.001)
    with capsys.disabled():
        print(f"\n{codec}, {RECORD_BYTES} bytes, acks=all: {produced.lines[-1]}")
        print(f"{codec}: read {found['nMsg.sec']} records/s in all, {found['fetch.nMsg.sec']} once assigned")


def test_end_to_end_latency(tools: Tools, capsys: pytest.CaptureFixture[str]) -> None:
    tools.create("round")
    done = tools.run(
        *("kafka-e2e-latency", "--topic", "round", "--num-records", "200", "--producer-acks", "all"),
        *("--record-size", "100"),
    )
    assert tools.end_offsets("round") == {0: 200}
    (reported,) = [line for line in done.lines if line.startswith("Percentiles")]
    with capsys.disabled():
        print(f"\nwrite, then read, one at a time: {reported}")


@pytest.mark.requirement("a:D-60", "a:D-63")
def test_an_idempotent_java_producer_neither_loses_nor_repeats_while_its_leader_is_killed(
    tools: Tools, tidelog_cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tools.create("numbered")
    leader = int(tools.describe("numbered")[0]["Leader"])
    out = tmp_path / "produced"
    with tools.started(
        *("kafka-producer-perf-test", "--topic", "numbered", "--payload-monotonic", "--throughput", "2000"),
        *("--num-records", str(NUMBERED), "--reporting-interval", "500"),
        *("--command-property", "acks=all", "enable.idempotence=true", "max.in.flight.requests.per.connection=5"),
        out=out,
    ) as process:
        until(lambda: sum(map(int, SENT.findall(out.read_text()))) > NUMBERED / 10, "the producer is under way")
        tidelog_cluster.kill(leader)
        assert process.poll() is None, "it is still writing"
        assert process.wait(timeout=120) == 0
    text = out.read_text()
    tidelog_cluster.start(leader)
    last = text.strip().splitlines()[-1]
    assert last.startswith(f"{NUMBERED} records sent, ")
    (row,) = tools.describe("numbered")
    assert int(row["Leader"]) != leader
    assert tools.end_offsets("numbered") == {0: NUMBERED}
    whole = ("--topic", "numbered", "--partition", "0", "--offset", "earliest", "--max-messages", str(NUMBERED))
    read = tools.run("kafka-console-consumer", *whole)
    assert read.lines == [str(number) for number in range(NUMBERED)], "each once, in the order of sending"
    until(lambda: not tools.run("kafka-topics", "--describe", "--under-replicated-partitions").lines, "all in sync")
    with capsys.disabled():
        print(f"\n2000 records/s, the leader killed with -9: {last}")
