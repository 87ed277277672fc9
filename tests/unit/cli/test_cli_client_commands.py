"""The commands of clients, as far as no cluster is needed: what is wrong with a call, input, plans, histories."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tidelog.cli import main as cli
from tidelog.cli import stdin_chunks
from tidelog.cli.bench_figures import percentile, times_document
from tidelog.cli.bench_raw import made_batch
from tidelog.cli.consume import timestamp_of
from tidelog.cli.elections import loss_lines
from tidelog.cli.main import UsageError
from tidelog.cli.produce import InputError, Line, LineReader
from tidelog.cli.reassign import read_plan
from tidelog.cli.record_printer import record_document, text_of
from tidelog.cli.topics import partition_filter
from tidelog.cli.verify import Stand
from tidelog.client.admin.conversions import topic_description
from tidelog.client.cluster import ClusterClient
from tidelog.client.durations import time_ms
from tidelog.client.grpc_connections import GrpcConnections
from tidelog.client.history import encode_event
from tidelog.client.record import TopicPartition
from tidelog.log.batch import read_header
from tidelog.log.columns import Record
from tidelog.model.errors import ErrorCode
from tidelog.rpc.v1 import admin_pb2 as pb
from tidelog.world.real.clock import SystemClock

NOBODY = "127.0.0.1:1"
RESET = ["groups", "reset-offsets", "g"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["consume", "t", "--offset", "3"], "--offset N requires --partition"),
        (["consume", "t", "--max-messages", "-1"], "argument --max-messages: -1: must be at least 0"),
        (["consume"], "use either names of topics or --pattern REGEX"),
        (["consume", "t", "--pattern", "x"], "use either names of topics or --pattern REGEX"),
        (["consume", "--pattern", "("], "--pattern '(': not a regular expression"),
        (["consume", "a", "b", "--partition", "0"], "--partition goes with one topic"),
        (["consume", "t", "--format", "%q"], "--format: '%q' is not a field; there are %t topic, %p partition"),
        (["consume", "t", "--format", "a%"], "--format: '%' is not a field"),
        (["consume", "t", "--format", "\\q"], "is not an escape; there are \\n, \\t"),
        (["consume", "t", "--format", "%v", "--keys"], "--format cannot be combined with --output"),
        (["consume", "t", "--last", "-1"], "argument --last: -1: must be at least 0"),
        (["consume", "t", "--last", "5", "--group", "g"], "--last does not go with --group"),
        (["topics", "create", "t", "--partitions", "-1"], "argument --partitions: -1: must be at least 1"),
        (["topics", "create", "t", "--partitions", "0"], "argument --partitions: 0: must be at least 1"),
        (["topics", "create", "t", "--partitions", "many"], "argument --partitions: 'many' is not an integer"),
        (["topics", "create", "t", "--replication-factor", "0"], "--replication-factor: 0: must be at least 1"),
        (["topics", "alter", "t", "--partitions", "0"], "argument --partitions: 0: must be at least 1"),
        (["configs", "alter", "--topic", "t"], "nothing to change"),
        (["configs", "alter", "--topic", "t", "--set", "retention.ms"], "--set 'retention.ms': KEY=VALUE"),
        (["configs", "describe", "--broker", "one"], "--broker 'one' is not a broker id"),
        (["topics", "create", "t", "--replica-assignment", "1:x"], "--replica-assignment '1:x'"),
        (["topics", "create", "t", "--replica-assignment", "1:2", "--partitions", "3"], "leave out --partitions"),
        (["delete-records", "t", "--before", "3"], "--before OFFSET requires --partition"),
        (["delete-records", "t", "--before", "soon"], "--before 'soon': use an offset, or 'end'"),
        (["elect-leaders"], "--topic NAME, or --all"),
        (["elect-leaders", "--all", "--partition", "1"], "--partition belongs to a --topic"),
        (["produce", "t", "--input", "json", "--key-separator", ":"], "--key-separator is for lines"),
        (["produce", "t", "--timeout-ms", "0"], "--timeout-ms 0: above 0"),
        (["produce", "t", "--file", "nowhere.bin"], "--file nowhere.bin: No such file or directory"),
        (["produce", "t", "--file", "/"], "--file /: is a directory"),
        (["produce", "t", "--file", "x", "--input", "json"], "--file sends files as they are"),
        (["produce", "t", "--key", "k", "--key-separator", ":"], "--key is the key of every record"),
        (["reassign", "execute", "--plan", "nowhere.json"], "--plan nowhere.json: no such file"),
        (["reassign", "plan", "--brokers", "1,b"], "--brokers '1,b': ids, like 1,2,3"),
        (["verify", "check", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["verify", "produce", "t", "--history", "h", "--rate", "0"], "--rate and --batch are above 0"),
        (["bench", "failover", "--bootstrap", NOBODY], "it kills only nodes that it has started itself"),
        (["bench", "produce", "--seconds", "0"], "are above 0"),
        (["bench", "latency", "--rate", "0"], "--rate 0.0: above 0"),
        (["bench", "produce", "--raw", "--bulk"], "with --raw there is none"),
        (["bench", "consume", "--raw", "--arrow"], "with --raw there is none"),
        (["topics", "list", "--bootstrap", "no port"], "--bootstrap"),
        ([*RESET, "--to-earliest"], "--topic T[:P,P], or --all-topics"),
        ([*RESET, "--topic", "t", "--all-topics", "--to-earliest"], "--topic T[:P,P], or --all-topics"),
        ([*RESET, "--topic", "t"], "no target: use --to-earliest"),
        ([*RESET, "--topic", "t:x", "--to-latest"], "--topic 't:x': write a name, or a name and partitions"),
        ([*RESET, "--topic", "t", "--to-offset", "-1"], "--to-offset -1: from 0 on"),
        ([*RESET, "--topic", "t", "--to-datetime", "soon"], "--to-datetime: 'soon' is not a time"),
        ([*RESET, "--topic", "t", "--by-duration", "soon"], "--by-duration 'soon': write a duration like 90s"),
        ([*RESET, "--from-file", "nowhere.csv"], "--from-file nowhere.csv: no such file"),
        ([*RESET, "--topic", "t", "--to-latest", "--export", "--output", "json"], "leave --output out"),
        ([*RESET, "--to-latest", "--to-earliest"], "not allowed with argument"),
        (["groups", "remove-members", "g"], "--member ID, --instance ID, or --all"),
        (["groups", "remove-members", "g", "--all", "--member", "m"], "--member ID, --instance ID, or --all"),
        (["groups", "delete-offsets", "g"], "--topic T[:P,P], or --all-topics"),
        (["groups", "descrbe"], "did you mean 'describe'?"),
        (["groups", "reset-offsets", "--group", "g"], "--group; the group is an argument without an option"),
        ([*RESET, "--topic", "t", "--to", "earliest"], "--to; use --to-earliest, --to-latest, --to-offset"),
        (["topics", "alter", "t", "--config", "a=b"], "--config; change settings with: tidelog configs alter --topic"),
        (["topics", "create", "--topic", "t"], "--topic; the topic is an argument without an option"),
        (["configs", "alter", "--topic", "t", "--add-config", "a=b"], "--add-config; use --set KEY=VALUE"),
        (
            ["configs", "alter", "--topic", "t", "--set", "retention.ms=1x"],
            "--set retention.ms=1x: an integer (ms), or one with a unit: 90s, 1h, 7d",
        ),
        (
            ["topics", "create", "t", "--config", "segment.bytes=big"],
            "--config segment.bytes=big: an integer (bytes), or one with a unit: 64KiB, 512MiB, 1GiB",
        ),
        (["completion", "bsh"], "did you mean 'bash'?"),
        (["consume", "t", "--group", "g", "--partition", "1"], "--partition does not go with --group"),
        (["consume", "t", "--group", "g", "--offset", "7"], "--offset '7' does not go with --group"),
        (["query", "selekt 1"], 'syntax error at or near "selekt"'),
        (["query", "select offset from t"], 'offset is a word of SQL: as a column write "offset"'),
        (["query", "delete from t"], "a topic cannot be changed by a query"),
        (["query", "create table t as select 1"], "a topic cannot be changed by a query"),
        (["query", "select 1; select 2"], "one SELECT and nothing else"),
        (["query", ""], "one SELECT and nothing else"),
        (["query", "select * from orders.eu"], 'a topic with a dot in its name stands in double quotes: "orders.eu"'),
        (["query", "select 1", "--since", "soon"], "--since: 'soon' is not a time"),
        (["query", "select 1", "--limit", "0"], "--limit 0: 1 at least"),
        (["query", "select 1", "--records-max", "-5"], "--records-max -5: 1 at least"),
        (["query", "select nope"], 'column "nope"'),
        (["query", "select 1 as a, 2 as a", "--output", "json"], "two columns are called 'a'"),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [["topics", "list"], ["consume", "t"], ["brokers", "list"], ["topics", "describe"], ["groups", "list"],
     ["groups", "describe", "g"], ["groups", "delete", "g"], ["consume", "t", "--group", "g"],
     ["verify", "consume", "t", "--group", "g", "--history", "/dev/null"], ["query", "select * from t"]],
)  # fmt: skip
def test_no_cluster_is_one_line_that_says_what_to_do(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command, "--bootstrap", NOBODY]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"tidelog: no cluster at {NOBODY}; start one with: tidelog dev\n"


def test_the_environment_names_the_cluster(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDELOG_BOOTSTRAP", "127.0.0.1:2,127.0.0.1:3")
    assert cli.main(["topics", "list"]) == 1
    assert "no cluster at 127.0.0.1:2, 127.0.0.1:3; start one" in capsys.readouterr().err


# What stdin says.


def reader_of(*arguments: str) -> LineReader:
    return LineReader(cli.parser().parse_args(["produce", "t", *arguments]))


def test_lines_are_values_or_keys_and_values() -> None:
    assert reader_of().read(b"a:b") == Line(b"a:b")
    assert reader_of("--key-separator", ":").read(b"a:b:c") == Line(b"b:c", b"a")
    with_null = reader_of("--key-separator", ":", "--null-marker", "NULL", "--headers", "h=1", "--headers", "h=2")
    assert with_null.read(b"NULL:NULL") == Line(None, None, (("h", b"1"), ("h", b"2")))


def test_objects_have_keys_headers_partitions_and_bytes() -> None:
    reader = reader_of("--input", "json")
    assert reader.read(b'{"value": "v"}') == Line(b"v")
    full = {"value": {"a": 1}, "key": {"base64": "AP8="}, "headers": {"h": None}, "partition": 3, "timestamp": 5}
    assert reader.read(json.dumps(full).encode()) == Line(b'{"a":1}', b"\x00\xff", (("h", None),), 3, 5)
    record = Record(7, 5, b"k", b"\xff", (("h", b"1"), ("h", b"2")))
    again = reader.read(json.dumps(record_document("t", 1, record)).encode())
    assert again == Line(b"\xff", b"k", (("h", b"1"), ("h", b"2")), 1, 5), "what consume prints can be sent again"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 1: invalid JSON"),
        (b"[]", "line 1: an object with value"),
        (b'{"valeu": 1}', "line 1: 'valeu' is none of"),
        (b'{"headers": 3}', "line 1: headers are an object"),
        (b'{"partition": -1}', "line 1: partition must be an integer"),
        (b'{"timestamp": "now"}', "line 1: timestamp must be an integer"),
        (b'{"value": {"base64": "?"}}', "line 1: value is no base64"),
    ],
)
def test_an_object_that_is_no_record_is_reported_with_its_line(line: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        reader_of("--input", "json").read(line)


def test_a_line_without_the_separator_is_reported() -> None:
    reader = reader_of("--key-separator", "::")
    reader.read(b"a::b")
    with pytest.raises(InputError, match=r"line 2 has no key separator '::'"):
        reader.read(b"a:b")


def read_lines(fd: int, write: Callable[[], None]) -> list[bytes]:
    async def job() -> list[bytes]:
        asyncio.get_running_loop().call_later(0.01, write)
        return [line async for rows in stdin_chunks.LineReader(fd).batches() for line in rows]

    return asyncio.run(job())


def test_only_the_line_feed_is_taken_from_a_line_of_a_pipe_or_a_file(tmp_path: Path) -> None:
    source, sink = os.pipe()

    def write() -> None:
        os.write(sink, b"one\r\ntw")
        os.write(sink, b"o\n\n\x00\xff\rlast\r")
        os.close(sink)

    assert read_lines(source, write) == [b"one\r", b"two", b"", b"\x00\xff\rlast\r"]
    os.close(source)
    path = tmp_path / "lines"
    path.write_bytes(b"a\nb\n")
    with path.open("rb") as file:
        assert read_lines(file.fileno(), lambda: None) == [b"a", b"b"]


def test_a_lone_line_of_a_pipe_arrives_while_the_pipe_is_open_and_the_loop_runs() -> None:
    source, sink = os.pipe()

    async def job() -> None:
        reader = stdin_chunks.LineReader(source)
        batches = reader.batches()
        for number in range(3):
            os.write(sink, b"%d\n" % number)
            async with asyncio.timeout(10):
                assert await anext(batches) == [b"%d" % number]
        # Nothing has arrived: the loop must run while the next line is awaited, and `stop` must end the wait.
        os.write(sink, b"half")
        asyncio.get_running_loop().call_later(0.05, reader.stop)
        async with asyncio.timeout(10):
            assert [rows async for rows in batches] == []
        assert reader.incomplete_bytes in (0, 4)

    asyncio.run(job())
    os.close(sink)
    os.close(source)


def test_a_line_that_no_record_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stdin_chunks, "LINE_BYTES_MAX", 10)
    path = tmp_path / "lines"
    path.write_bytes(b"short\n" + b"x" * 11)
    with path.open("rb") as file, pytest.raises(stdin_chunks.LineTooLongError, match="more than 10 bytes"):
        read_lines(file.fileno(), lambda: None)


# What is printed.


def test_bytes_are_text_or_base64() -> None:
    assert (text_of(None), text_of(b"a"), text_of(b"\xff")) == (None, "a", {"base64": "/w=="})


def test_times_are_milliseconds_or_dates(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timestamp_of("1000") == 1000
    assert timestamp_of("1970-01-01T00:00:01Z") == 1000
    assert timestamp_of("1970-01-01T01:00:01+01:00") == 1000
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        assert timestamp_of("1970-01-01T00:00:01") == time_ms("1970-01-01T00:00:01", 0) == 1000
    finally:
        monkeypatch.undo()
        time.tzset()
    with pytest.raises(UsageError, match="yesterday"):
        timestamp_of("yesterday")


@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        ("under_replicated", [1, 2, 3]),
        ("unavailable", [3]),
        ("under_min_isr", [2, 3]),
        ("at_min_isr", [1, 4]),
    ],
)
@pytest.mark.requirement("a:N-02")
def test_filters_of_describe_choose_partitions(option: str, wanted: list[int]) -> None:
    rows = [
        pb.PartitionDescription(partition=0, leader=1, replicas=[1, 2, 3], isr=[1, 2, 3], min_isr=2),
        pb.PartitionDescription(partition=1, leader=1, replicas=[1, 2, 3], isr=[1, 2], min_isr=2),
        pb.PartitionDescription(partition=2, leader=1, replicas=[1, 2, 3], isr=[1], min_isr=2),
        pb.PartitionDescription(partition=3, leader=-1, replicas=[1, 2, 3], isr=[], min_isr=2),
        # It moves: the one that is added is not missed yet.
        pb.PartitionDescription(partition=4, leader=1, replicas=[1, 2, 3], isr=[1, 2], adding_replicas=[3], min_isr=2),
    ]
    names = ("under_replicated", "unavailable", "under_min_isr", "at_min_isr")
    asked = partition_filter(argparse.Namespace(**{name: name == option for name in names}))
    assert asked is not None
    topic = topic_description(pb.TopicDescription(partitions=rows))
    assert [row.partition for row in topic.partitions if asked(row)] == wanted
    assert partition_filter(argparse.Namespace(**dict.fromkeys(names, False))) is None


def test_a_plan_is_read_or_said_to_be_none(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"version": 1, "partitions": [{"topic": "t", "partition": 0, "replicas": [1, 2]}]}')
    assert read_plan(str(path)) == {TopicPartition("t", 0): [1, 2]}
    moved = '{"partitions": [{"topic": "t", "partition": 0, "replicas": [1], "log_dirs": ["/disk-2"]}]}'
    path.write_text(moved.replace("/disk-2", "any"), encoding="utf-8")
    assert len(read_plan(str(path))) == 1, "as Kafka's tool writes it"
    for text, message in (
        ("{", "invalid JSON"),
        ("{}", "no plan"),
        ('{"partitions": []}', "has no partitions"),
        (moved, "brokers move-replicas"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            read_plan(str(path))


def test_a_bad_history_exits_with_1_and_a_good_one_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "history.jsonl"
    events: list[dict[str, object]] = [
        {"event": "ack", "run": "r", "partition": 0, "first": 0, "count": 2, "offset": 0},
        {"event": "read", "reader": "c", "partition": 0, "records": [[0, "r", 0]]},
        {"event": "end", "reader": "c", "partition": 0, "start": 0, "end": 2},
    ]
    path.write_text("".join(map(encode_event, events)))
    assert cli.main(["verify", "check", str(path), "--output", "json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["counts"]["lost"] == 1
    assert document["is_good"] is False
    assert cli.main(["verify", "check", str(path), "--allow", "lost"]) == 0
    assert "good: every acknowledged" in capsys.readouterr().out
    path.write_text("".join(map(encode_event, events[:1])) + '{"event": "re')
    assert cli.main(["verify", "check", str(path)]) == 0
    assert "cut off" in capsys.readouterr().err


def test_a_loss_behind_the_end_of_the_log_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "history.jsonl"
    events: list[dict[str, object]] = [
        {"event": "ack", "run": "r", "partition": 0, "first": 0, "count": 2, "offset": 0, "at_ms": 5},
        {"event": "read", "reader": "c", "partition": 0, "records": [[0, "r", 0]]},
        {"event": "end", "reader": "c", "partition": 0, "start": 0, "end": 1, "log_end": 1, "asked_ms": 6},
    ]
    path.write_text("".join(map(encode_event, events)))
    assert cli.main(["verify", "check", str(path)]) == 1
    assert "record 1 of run r, acknowledged at 1, is past the log's end 1" in capsys.readouterr().out


def test_a_partition_stands_while_it_has_records_and_acknowledges_none() -> None:
    stand = Stand()
    stand.sent(10.0)
    stand.sent(11.0)
    stand.acknowledged(12.0)
    assert stand.longest_s == 2.0
    stand.acknowledged(13.0)
    stand.update(90.0)
    assert stand.longest_s == 2.0, "with nothing to acknowledge it does not stand"
    stand.sent(100.0)
    stand.failed()
    stand.sent(104.0)
    stand.update(109.0)
    assert stand.longest_s == 9.0, "an error is no acknowledgement, and the end of the run does not hide it"


# Figures.


def test_percentiles_are_of_the_sorted_values() -> None:
    values = [number / 1000 for number in range(1, 101)]
    assert times_document(values[::-1]) == {"p50_ms": 51.0, "p95_ms": 96.0, "p99_ms": 100.0, "max_ms": 100.0}
    assert percentile([], 0.5) == 0.0


def test_a_batch_for_the_bench_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    from random import Random

    client = ClusterClient([NOBODY], GrpcConnections(), random=Random(1), clock=SystemClock())
    for record_bytes, batch_bytes in ((100, 1 << 20), (1, 1 << 16), (5_000, 1_000)):
        batch, count = made_batch(client, record_bytes, batch_bytes)
        assert read_header(batch).count == count
        assert len(batch) <= batch_bytes or count == 1
        assert count == 1 or len(batch) > 0.9 * batch_bytes


def test_an_unclean_election_names_who_has_what_may_be_lost() -> None:
    rows = [
        pb.PartitionDescription(partition=0, leader=-1, replicas=[1, 2, 3], eligible_leader_replicas=[2, 3]),
        pb.PartitionDescription(partition=1, leader=2, replicas=[1, 2, 3]),
        pb.PartitionDescription(partition=2, leader=-1, replicas=[1, 2]),
        pb.PartitionDescription(partition=3, leader=-1, replicas=[1, 2]),
    ]
    topic = topic_description(pb.TopicDescription(name="orders", partitions=rows))
    zero, one, two = (TopicPartition("orders", number) for number in range(3))
    sizes = {(zero, 1): 1234, (two, 1): 0, (two, 2): 7}
    assert loss_lines([topic], [zero, one, two], sizes) == [
        "orders-0: broker 2, 3 has every acknowledged record; logs: broker 1 1,234 bytes,"
        " broker 2 does not show its log, broker 3 does not show its log",
        "orders-2: nobody is known to have all of it; logs: broker 1 0 bytes, broker 2 7 bytes",
    ]
    assert len(loss_lines([topic], None, sizes)) == 3


@pytest.mark.parametrize(("text", "rate"), [("50000000", 50_000_000), ("50MB", 50_000_000), ("10MiB", 10 << 20)])
def test_throttle_of_a_reassignment_may_have_a_unit(text: str, rate: int) -> None:
    options = cli.parser().parse_args(["reassign", "execute", "--plan", "plan.json", "--throttle", text])
    assert options.throttle == rate


def test_throttle_of_a_reassignment_with_an_unknown_unit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reassign", "execute", "--plan", "plan.json", "--throttle", "10parsecs"]) == 2
    assert "--throttle: '10parsecs' is not an integer" in capsys.readouterr().err


def test_advice_for_an_unknown_broker_is_a_command_that_exists() -> None:
    assert "`tidelog brokers list`" in ErrorCode.BROKER_ID_NOT_REGISTERED.value.advice
    cli.parser().parse_args(["brokers", "list"])
