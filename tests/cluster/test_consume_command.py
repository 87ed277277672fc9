"""`tidelog consume` and other commands that print, on a real node: formats, topics, signals, closed pipes, tables."""

from __future__ import annotations

import json
import os
import signal

import pytest
from support.clusters.commands import Shell

import tidelog
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
WAIT_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def topics(cluster: LocalCluster, admin: tidelog.Admin) -> None:
    kept = {"retention.ms": -1}  # records have timestamps of long ago
    admin.create_topics([tidelog.NewTopic(name, 2, configs=kept) for name in ("orders-eu", "orders-us")])
    admin.create_topic("numbers", partitions=1)
    with tidelog.Producer(cluster.bootstrap) as producer:
        for number in range(10):
            producer.send("numbers", str(number), key=None if number % 2 else f"k{number}").result()
        headers = {"trace": b"7"}
        producer.send("orders-eu", b"10 \xff\r", key="ada", partition=1, headers=headers, timestamp_ms=5).result()
        producer.send("orders-us", "20", key="ben", partition=0, timestamp_ms=6).result()


READ_ALL = ("--from-beginning", "--exit-at-end")


def test_a_format_prints_bytes_as_they_are(shell: Shell) -> None:
    form = r"%t/%p@%o %T [%K]%k=[%S]%v %h 100%%\n\x00"
    out = shell.done("consume", "orders-eu", *READ_ALL, "--format", form).raw
    assert out == b"orders-eu/1@0 5 [3]ada=[5]10 \xff\r trace=7 100%\n\x00"
    out = shell.done("consume", "numbers", *READ_ALL, "--format", r"%k[%K]\t").raw
    assert out.split(b"\t")[:2] == [b"k0[2]", b"null[-1]"]


def test_several_topics_and_patterns_are_read_together(shell: Shell) -> None:
    out = shell.run("consume", "orders-us", "orders-eu", *READ_ALL, "--format", r"%t %k\n")
    assert sorted(out.splitlines()) == ["orders-eu ada", "orders-us ben"]
    out = shell.run("consume", "--pattern", "orders-.*", *READ_ALL, "--output", "jsonl")
    rows = [json.loads(line) for line in out.splitlines()]
    assert sorted((row["topic"], row["partition"]) for row in rows) == [("orders-eu", 1), ("orders-us", 0)]
    as_group = ("--group", "both", "--format", r"%t\n", "--timeout-ms", "30000")
    out = shell.run("consume", "--pattern", "orders-.*", *READ_ALL, *as_group)
    assert sorted(out.split()) == ["orders-eu", "orders-us"]
    out = shell.run("consume", "--pattern", "orders", *READ_ALL)
    assert (out, shell.err) == ("", "tidelog: no topic matches 'orders' yet\n"), "a pattern matches whole names"


def test_a_topic_that_is_created_later_is_read_if_it_matches(shell: Shell, admin: tidelog.Admin) -> None:
    with shell.start("consume", "--pattern", "late-.*", "--max-messages", "1") as reading:
        assert reading.stderr is not None
        assert reading.stderr.readline() == "tidelog: no topic matches 'late-.*' yet\n"
        admin.create_topic("late-one", partitions=1)
        shell.run("produce", "late-one", stdin="here\n")
        out, _ = reading.communicate(timeout=WAIT_S)
    assert (reading.returncode, out) == (0, "here\n")


def test_the_last_records_of_each_partition_are_asked_for_by_number(shell: Shell) -> None:
    out = shell.run("consume", "numbers", "--last", "3", "--exit-at-end")
    assert out == "7\n8\n9\n"
    out = shell.run("consume", "numbers", "--last", "99", "--exit-at-end")
    assert len(out.splitlines()) == 10
    out = shell.run("consume", "orders-eu", "orders-us", "--last", "1", "--exit-at-end", "--format", r"%k\n")
    assert sorted(out.split()) == ["ada", "ben"], "of each partition"


def test_an_offset_outside_of_the_log_is_named_with_where_the_log_is(shell: Shell, admin: tidelog.Admin) -> None:
    shell.run("consume", "numbers", "--partition", "0", "--offset", "11", code=1)
    assert shell.err == (
        "tidelog: --offset 11 is past the end of numbers-0, whose next record gets offset 10 (OFFSET_OUT_OF_RANGE); "
        "--offset latest waits for it\n"
    )
    out = shell.run("consume", "numbers", "--partition", "0", "--offset", "10", "--timeout-ms", "300")
    assert out == "", "the end itself is where the next one will be"
    admin.create_topic("trimmed", partitions=1)
    shell.run("produce", "trimmed", stdin="x\ny\n")
    shell.run("delete-records", "trimmed", "--partition", "0", "--before", "1", "--yes")
    shell.run("consume", "trimmed", "--partition", "0", "--offset", "0", code=1)
    assert "is before the start of trimmed-0, whose first offset is 1" in shell.err


@pytest.mark.parametrize("group", [[], ["--group", "signalled"]], ids=["alone", "group"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"])
def test_a_signal_closes_the_json_document_and_leaves_the_group(
    shell: Shell, admin: tidelog.Admin, group: list[str], number: signal.Signals, code: int
) -> None:
    name = f"{number.name}-{len(group)}"
    group = [one.replace("signalled", name) for one in group]
    with shell.start("consume", "numbers", "--from-beginning", "--output", "json", *group) as reading:
        assert reading.stdout is not None
        begun = "".join(reading.stdout.readline() for _ in range(10))  # the last record has no line feed yet
        assert reading.stderr is not None
        reading.send_signal(number)
        out, err = reading.stdout.read(), reading.stderr.read()
    assert reading.wait(WAIT_S) == code, err
    document = json.loads(begun + out)
    assert (document["count"], len(document["records"])) == (10, 10)
    assert err == "tidelog: 10 records read\n"
    if group:
        assert admin.describe_group(name).members == (), "it has left; nobody waits for its session to end"
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
def test_a_command_whose_reader_has_gone_is_quiet(shell: Shell, command: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", encoding="utf-8") as gone:
        assert shell.done(*command, code=141, stdout=gone).err == ""


PROCESSES = pytest.mark.parametrize("command", [["--help"], ["consume", "numbers", *READ_ALL]], ids=" ".join)


@PROCESSES
def test_a_process_whose_reader_has_gone_is_quiet(shell: Shell, command: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as gone, shell.start(*command, stdout=gone) as process:
        _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (141, "")


@PROCESSES
def test_a_command_without_a_stdout_has_no_traceback(shell: Shell, command: list[str]) -> None:
    without_stdout = ("sh", "-c", 'exec "$@" >&-', "sh")
    with shell.start(*command, wrapper=without_stdout) as process:
        _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (0, "")


# Configs and descriptions.


def test_times_and_sizes_of_configs_may_have_units(shell: Shell) -> None:
    shell.run("topics", "create", "units", "--config", "retention.ms=1h", "--config", "segment.bytes=64MiB")
    shell.run("configs", "alter", "--topic", "units", "--set", "retention.ms=7d", "--set", "segment.ms=2w")
    out = shell.run("configs", "describe", "--topic", "units", "--output", "json")
    values = {entry["key"]: entry["value"] for entry in json.loads(out)["entries"]}
    assert values == {"retention.ms": "604800000", "segment.bytes": "67108864", "segment.ms": "1209600000"}
    shell.run("configs", "alter", "--cluster", "--set", "log.retention.ms=1d")
    out = shell.run("configs", "describe", "--cluster", "--output", "json")
    assert {entry["key"]: entry["value"] for entry in json.loads(out)["entries"]}["log.retention.ms"] == "86400000"
    shell.run("configs", "alter", "--cluster", "--delete", "log.retention.ms")
    shell.run("topics", "create", "wrong", "--config", "retention.ms=1 fortnight", code=2)
    assert "retention.ms=1 fortnight: an integer (ms), or one with a unit" in shell.err


def test_a_description_has_offsets_and_sizes(shell: Shell) -> None:
    out = shell.run("topics", "describe", "numbers", "--output", "json")
    ((partition,),) = [topic["partitions"] for topic in json.loads(out)["topics"]]
    assert (partition["log_start_offset"], partition["end_offset"]) == (0, 10)
    assert partition["bytes"] > 0
    out = shell.run("topics", "describe", "numbers")
    headings, row = [line.split() for line in out.splitlines()[1:]]
    assert " ".join(headings) == "partition leader epoch replicas in sync min start end bytes state"
    assert row[-4:] == ["0", "10", str(partition["bytes"]), "online"]


def test_tables_fit_a_narrow_terminal(shell: Shell) -> None:
    for command in (["topics", "describe"], ["brokers", "list"], ["brokers", "describe"], ["quorum", "describe"]):
        out = shell.run(*command, COLUMNS="60")
        assert max(map(len, out.splitlines())) <= 60, out
