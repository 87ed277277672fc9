"""Kafka's consoles, verifiable clients and group tools against a real cluster, with both group protocols."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from kafka_tools import Tools, needs_tools
from support.clusters.waiting import until

from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.interop, pytest.mark.cluster, pytest.mark.timeout(300), needs_tools]

PARSED = [
    *("--reader-property", "parse.key=true", "--reader-property", "key.separator=:"),
    *("--reader-property", "parse.headers=true", "--reader-property", "headers.delimiter=|"),
]
PRINTED = [
    word
    for name in ("print.key", "print.headers", "print.offset", "print.partition")
    for word in ("--formatter-property", f"{name}=true")
]


@pytest.fixture
def tools(tidelog_cluster: LocalCluster) -> Tools:
    return Tools(tidelog_cluster.kafka_bootstrap)


@pytest.mark.requirement("a:N-03", "a:N-04")
def test_the_consoles_carry_keys_headers_and_nulls_from_the_beginning_and_from_an_offset(tools: Tools) -> None:
    tools.create("said")
    lines = "a:1,b:2|key1:hello\na:3|key2:wörld\nNULL|key3:NULL\n"
    tools.run(
        *("kafka-console-producer", "--topic", "said", *PARSED, "--reader-property", "null.marker=NULL"), stdin=lines
    )
    read = tools.run(
        *("kafka-console-consumer", "--topic", "said", "--from-beginning", "--max-messages", "3"),
        *(*PRINTED, "--formatter-property", "null.literal=NIL"),
    )
    assert read.lines == [
        "Partition:0\tOffset:0\ta:1,b:2\tkey1\thello",
        "Partition:0\tOffset:1\ta:3\tkey2\twörld",
        "Partition:0\tOffset:2\tNO_HEADERS\tkey3\tNIL",
    ]
    one = ("--topic", "said", "--partition", "0", "--offset", "1", "--max-messages", "1")
    assert tools.run("kafka-console-consumer", *one).lines == ["wörld"]


@pytest.mark.requirement("a:N-04", "a:N-06")
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_group_is_listed_described_moved_and_deleted(tools: Tools, tmp_path: Path, protocol: str) -> None:
    topic, group = f"heard-{protocol}", f"ears-{protocol}"
    tools.create(topic, partitions=2)
    tools.run("kafka-console-producer", "--topic", topic, stdin="one\ntwo\nthree\n")
    consume = (
        *("kafka-console-consumer", "--topic", topic, "--group", group, "--from-beginning"),
        *("--command-property", f"group.protocol={protocol}"),
    )
    groups = ("kafka-consumer-groups", "--group", group)
    out = tmp_path / "heard"
    with tools.started(*consume, out=out) as process:
        until(lambda: {"one", "two", "three"} <= set(out.read_text().split()), "the consumer has read all")
        (member,) = tools.run(*groups, "--describe", "--members", "--verbose").table()
        assert member[0] == group
        assert f"{topic}:0,1" in " ".join(member) or f"{topic}(0,1)" in " ".join(member)
        (state,) = tools.run(*groups, "--describe", "--state").table()
        assert state[0] == group
        assert state[-2:] == ["Stable", "1"]
        live = tools.run(*groups, "--reset-offsets", "--topic", topic, "--to-earliest", "--execute")
        assert "Assignments can only be reset if the group" in live.out
        busy = tools.run(*groups, "--delete")
        assert "GroupNotEmptyException" in busy.out + busy.err
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)

    def lag() -> list[tuple[str, str]]:
        found = tools.run(*groups, "--describe", "--offsets").table()
        return [(row[2], row[5]) for row in found if row[:2] == [group, topic]]

    assert {("0", "0"), ("1", "0")} >= set(lag()) != set()
    listed = [line.split() for line in tools.run("kafka-consumer-groups", "--list", "--type").lines]
    assert [group, protocol.capitalize()] in listed
    assert group in tools.run("kafka-groups", "--list").out

    ends = tools.end_offsets(topic)
    earliest = tools.run(*groups, "--reset-offsets", "--topic", topic, "--to-earliest", "--execute").table()
    assert sorted(row[2:] for row in earliest) == [["0", "0"], ["1", "0"]]
    assert sorted(lag()) == [(str(partition), str(end)) for partition, end in sorted(ends.items())]
    again = tools.run(*consume, "--max-messages", "3")
    assert sorted(again.lines[-3:]) == ["one", "three", "two"]
    dated = tools.run(
        *groups, "--reset-offsets", "--all-topics", "--to-datetime", "2021-03-31T04:03:00.000", "--execute"
    ).table()
    assert [row[3] for row in dated if row[0] == group] == ["0", "0"]
    latest = tools.run(*groups, "--reset-offsets", "--topic", topic, "--to-latest", "--dry-run").table()
    assert {int(row[2]): int(row[3]) for row in latest if row[0] == group} == ends

    deleted = tools.run(*groups, "--delete-offsets", "--topic", topic).out
    assert deleted.count("Successful") == 2
    assert "was successful" in tools.run(*groups, "--delete").out
    assert group not in tools.run("kafka-consumer-groups", "--list").lines


@pytest.mark.requirement("a:N-13")
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_the_verifiable_consumer_reads_every_record_acknowledged_to_the_verifiable_producer(
    tools: Tools, protocol: str
) -> None:
    topic = f"verified-{protocol}"
    tools.create(topic, partitions=3)
    sent = tools.run("kafka-verifiable-producer", "--topic", topic, "--max-messages", "2000", "--acks", "-1")
    events = [json.loads(line) for line in sent.lines]
    reported = {event["name"]: event for event in events}
    assert (reported["tool_data"]["sent"], reported["tool_data"]["acked"]) == (2000, 2000)
    acked = {(event["partition"], event["offset"]): event["value"] for event in events if event.get("value")}
    assert sorted(map(int, acked.values())) == list(range(2000))
    read = tools.run(
        *("kafka-verifiable-consumer", "--topic", topic, "--group-id", topic, "--reset-policy", "earliest"),
        *("--max-messages", "2000", "--verbose", "--group-protocol", protocol),
    )
    records = [event for event in map(json.loads, read.lines) if event["name"] == "record_data"]
    assert {(row["partition"], row["offset"]): row["value"] for row in records} == acked
    commits = [event for event in map(json.loads, read.lines) if event["name"] == "offsets_committed"]
    assert commits
    assert all(event["success"] for event in commits)
