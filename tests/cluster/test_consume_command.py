"""`tidelog consume` and other commands that print, on a real node: formats, topics, signals, closed pipes, tables."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import tidelog
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
WAIT_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=1) as cluster:
        with tidelog.Admin(cluster.bootstrap) as admin:
            admin.create_topics([tidelog.NewTopic(name, partitions=2) for name in ("orders-eu", "orders-us")])
            admin.create_topic("numbers", partitions=1)
        with tidelog.Producer(cluster.bootstrap) as producer:
            for number in range(10):
                producer.send("numbers", str(number), key=None if number % 2 else f"k{number}").result()
            headers = {"trace": b"7"}
            producer.send("orders-eu", b"10 \xff\r", key="ada", partition=1, headers=headers, timestamp_ms=5).result()
            producer.send("orders-us", "20", key="ben", partition=0, timestamp_ms=6).result()
        yield cluster


def start(cluster: LocalCluster, *arguments: str, **more: Any) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "TIDELOG_BOOTSTRAP": cluster.bootstrap, **more.pop("env", {})}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.Popen([sys.executable, "-m", "tidelog", *arguments], env=environment, **streams)


def run(cluster: LocalCluster, *arguments: str, code: int = 0, **more: Any) -> tuple[bytes, str]:
    with start(cluster, *arguments, **more) as process:
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == code, (arguments, out, err)
    assert b"Traceback" not in err
    return out, err.decode()


READ_ALL = ("--from-beginning", "--exit-at-end")


def test_a_format_prints_bytes_as_they_are(cluster: LocalCluster) -> None:
    form = r"%t/%p@%o %T [%K]%k=[%S]%v %h 100%%\n\x00"
    out, _ = run(cluster, "consume", "orders-eu", *READ_ALL, "--format", form)
    assert out == b"orders-eu/1@0 5 [3]ada=[5]10 \xff\r trace=7 100%\n\x00"
    out, _ = run(cluster, "consume", "numbers", *READ_ALL, "--format", r"%k[%K]\t")
    assert out.split(b"\t")[:2] == [b"k0[2]", b"null[-1]"]


def test_several_topics_and_patterns_are_read_together(cluster: LocalCluster) -> None:
    out, _ = run(cluster, "consume", "orders-us", "orders-eu", *READ_ALL, "--format", r"%t %k\n")
    assert sorted(out.splitlines()) == [b"orders-eu ada", b"orders-us ben"]
    out, _ = run(cluster, "consume", "--pattern", "orders-.*", *READ_ALL, "--output", "jsonl")
    rows = [json.loads(line) for line in out.splitlines()]
    assert sorted((row["topic"], row["partition"]) for row in rows) == [("orders-eu", 1), ("orders-us", 0)]
    out, _ = run(
        cluster,
        "consume",
        "--pattern",
        "orders-.*",
        "--group",
        "both",
        *READ_ALL,
        "--format",
        r"%t\n",
        "--timeout-ms",
        "9000",
    )
    assert sorted(out.split()) == [b"orders-eu", b"orders-us"]
    out, err = run(cluster, "consume", "--pattern", "orders", *READ_ALL)
    assert (out, err) == (b"", "tidelog: no topic matches 'orders' yet\n"), "a pattern matches whole names"


def test_a_topic_that_is_created_later_is_read_if_it_matches(cluster: LocalCluster) -> None:
    with start(cluster, "consume", "--pattern", "late-.*", "--max-messages", "1") as reading:
        assert reading.stderr is not None
        assert reading.stderr.readline() == b"tidelog: no topic matches 'late-.*' yet\n"
        with tidelog.Admin(cluster.bootstrap) as admin:
            admin.create_topic("late-one", partitions=1)
        with tidelog.Producer(cluster.bootstrap) as producer:
            producer.send("late-one", "here").result()
        out, _ = reading.communicate(timeout=WAIT_S)
    assert (reading.returncode, out) == (0, b"here\n")


def test_the_last_records_of_each_partition_are_asked_for_by_number(cluster: LocalCluster) -> None:
    out, _ = run(cluster, "consume", "numbers", "--last", "3", "--exit-at-end")
    assert out == b"7\n8\n9\n"
    out, _ = run(cluster, "consume", "numbers", "--last", "99", "--exit-at-end")
    assert len(out.splitlines()) == 10
    out, _ = run(cluster, "consume", "orders-eu", "orders-us", "--last", "1", "--exit-at-end", "--format", r"%k\n")
    assert sorted(out.split()) == [b"ada", b"ben"], "of each partition"


def test_an_offset_outside_of_the_log_is_named_with_where_the_log_is(cluster: LocalCluster) -> None:
    _, err = run(cluster, "consume", "numbers", "--partition", "0", "--offset", "11", code=1)
    assert err == (
        "tidelog: --offset 11 is past the end of numbers-0, whose next record gets offset 10 (OFFSET_OUT_OF_RANGE); "
        "--offset latest waits for it\n"
    )
    out, _ = run(cluster, "consume", "numbers", "--partition", "0", "--offset", "10", "--timeout-ms", "300")
    assert out == b"", "the end itself is where the next one will be"
    with tidelog.Admin(cluster.bootstrap) as admin:
        admin.create_topic("trimmed", partitions=1)
    with tidelog.Producer(cluster.bootstrap) as producer:
        producer.send("trimmed", "x").result()
        producer.send("trimmed", "y").result()
    run(cluster, "delete-records", "trimmed", "--partition", "0", "--before", "1", "--yes")
    _, err = run(cluster, "consume", "trimmed", "--partition", "0", "--offset", "0", code=1)
    assert "is before the start of trimmed-0, whose first offset is 1" in err


@pytest.mark.parametrize("group", [[], ["--group", "signalled"]], ids=["alone", "group"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"])
def test_a_signal_closes_the_json_document_and_leaves_the_group(
    cluster: LocalCluster, group: list[str], number: signal.Signals, code: int
) -> None:
    name = f"{number.name}-{len(group)}"
    group = [one.replace("signalled", name) for one in group]
    with start(cluster, "consume", "numbers", "--from-beginning", "--output", "json", *group) as reading:
        assert reading.stdout is not None
        begun = b"".join(reading.stdout.readline() for _ in range(10))  # the last record has no line feed yet
        assert reading.stderr is not None
        reading.send_signal(number)
        out, err = reading.stdout.read(), reading.stderr.read()
    assert reading.wait(WAIT_S) == code, err
    document = json.loads(begun + out)
    assert (document["count"], len(document["records"])) == (10, 10)
    assert err == b"tidelog: 10 records read\n"
    if group:
        with tidelog.Admin(cluster.bootstrap) as admin:
            described = admin.describe_group(name)
            assert len(described.members) == 0, "it has left; nobody waits for its session to end"
            assert sum(row.lag or 0 for row in admin.group_lag(name)) == 0


# Every command, with nobody who reads what it prints.

COMMANDS = [
    ["--help"],
    ["consume", "--help"],
    ["topics", "list"],
    ["topics", "describe"],
    ["topics", "describe", "--output", "json"],
    ["configs", "describe", "--topic", "numbers", "--all"],
    ["consume", "numbers", *READ_ALL],
    ["consume", "numbers", *READ_ALL, "--output", "json"],
    ["consume", "numbers", *READ_ALL, "--group", "gone"],
    ["query", "select * from numbers"],
    ["groups", "list"],
    ["brokers", "list"],
    ["brokers", "describe"],
    ["quorum", "describe"],
    ["metadata", "show"],
    ["metadata", "dump"],
    ["completion", "bash"],
    ["storage", "random-uuid"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_whose_reader_has_gone_is_quiet(cluster: LocalCluster, command: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        with start(cluster, *command, stdout=write) as process:
            _, err = process.communicate(timeout=WAIT_S)
    finally:
        os.close(write)
    assert (process.returncode, err) == (141, b"")


@pytest.mark.parametrize(
    "command", [["topics", "list"], ["consume", "numbers", *READ_ALL], ["brokers", "list"]], ids=" ".join
)
def test_a_command_without_a_stdout_has_no_traceback(cluster: LocalCluster, command: list[str]) -> None:
    with start(cluster, *command, preexec_fn=lambda: os.close(1)) as process:
        _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (0, b"")


# Configs and descriptions.


def test_times_and_sizes_of_configs_may_have_units(cluster: LocalCluster) -> None:
    run(cluster, "topics", "create", "units", "--config", "retention.ms=1h", "--config", "segment.bytes=64MiB")
    run(cluster, "configs", "alter", "--topic", "units", "--set", "retention.ms=7d", "--set", "segment.ms=2w")
    out, _ = run(cluster, "configs", "describe", "--topic", "units", "--output", "json")
    values = {entry["key"]: entry["value"] for entry in json.loads(out)["entries"]}
    assert values == {"retention.ms": "604800000", "segment.bytes": "67108864", "segment.ms": "1209600000"}
    run(cluster, "configs", "alter", "--cluster", "--set", "log.retention.ms=1d")
    out, _ = run(cluster, "configs", "describe", "--cluster", "--output", "json")
    assert {entry["key"]: entry["value"] for entry in json.loads(out)["entries"]}["log.retention.ms"] == "86400000"
    _, err = run(cluster, "topics", "create", "wrong", "--config", "retention.ms=1 fortnight", code=1)
    assert "retention.ms='1 fortnight'" in err


def test_a_description_has_offsets_and_sizes(cluster: LocalCluster) -> None:
    out, _ = run(cluster, "topics", "describe", "numbers", "--output", "json")
    ((partition,),) = [topic["partitions"] for topic in json.loads(out)["topics"]]
    assert (partition["log_start_offset"], partition["end_offset"]) == (0, 10)
    assert partition["bytes"] > 0
    out, _ = run(cluster, "topics", "describe", "numbers")
    headings, row = [line.split() for line in out.decode().splitlines()[1:]]
    assert headings == [
        "partition",
        "leader",
        "epoch",
        "replicas",
        "in",
        "sync",
        "min",
        "start",
        "end",
        "bytes",
        "state",
    ]
    assert row[-4:] == ["0", "10", str(partition["bytes"]), "online"]


def test_tables_fit_a_narrow_terminal(cluster: LocalCluster) -> None:
    for command in (["topics", "describe"], ["brokers", "list"], ["brokers", "describe"], ["quorum", "describe"]):
        out, _ = run(cluster, *command, env={"COLUMNS": "60"})
        assert max(map(len, out.decode().splitlines())) <= 60, out.decode()
