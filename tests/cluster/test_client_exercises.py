"""Exercises of the sources about producers, consumers and applications, on real processes.

Those that need faults of brokers stand in test_client_outages.py.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from exercises import HERE, Program, make, records_of
from ledger_process import rows_in
from support.clusters.commands import run
from support.clusters.waiting import DEADLINE_S, until

import tidelog
from tidelog.client.consumer.errors import DeserializationError, SubscriptionError
from tidelog.client.errors import SerializationError
from tidelog.client.producer.partitioners import partition_of
from tidelog.client.record import TopicPartition
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

KILLED_AFTER = 60
"""Acknowledgements of a producer, before it is killed."""


@pytest.mark.requirement("b:EX-07")
def test_larger_batches_are_fewer_requests_and_compression_is_kept_on_disk(
    cluster: LocalCluster, admin: tidelog.Admin
) -> None:
    lines = [f"{number} the quick brown fox jumps over the lazy dog" for number in range(600)]
    figures: dict[str, dict[str, Any]] = {}
    sizes: dict[str, int] = {}
    ways: dict[str, dict[str, Any]] = {
        "single": {"linger_ms": 0, "batch_size": 0},
        "none": {"linger_ms": 100, "batch_size": 4 * 16_384},
    }
    ways |= {codec: {**ways["none"], "compression": codec} for codec in ("gzip", "snappy", "lz4")}
    for name, options in ways.items():
        topic = make(admin, f"batches-{name}")
        with tidelog.Producer(cluster.bootstrap, **options) as producer:
            for line in lines:
                producer.send(topic, line)
            producer.flush(60)
            figures[name] = producer.metrics()
        assert [record.value.decode() for record in records_of(cluster, topic)] == lines
        replicas = [
            row.bytes
            for dirs in admin.describe_log_dirs(topics=[topic]).values()
            for one in dirs
            for row in one.replicas
        ]
        assert len(replicas) == 3
        sizes[name] = max(replicas)
        (file,) = cluster.path(1).rglob(f"{topic}.*-0/*.log")
        dump = run("log", "dump", str(file), "--output", "json")
        codecs = set(_values_of(dump.document, "codec"))
        assert codecs == {name if name in ("gzip", "snappy", "lz4") else "none"}, "as the producer has made it"
    assert figures["single"]["batches"] == 600, "every record is one"
    total = sum(len(line) for line in lines)
    assert total / (4 * 16_384) <= figures["none"]["batches"] <= 20, "filled up to their size"
    for codec in ("gzip", "snappy", "lz4"):
        assert figures[codec]["batches"] <= 20
        assert sizes[codec] < sizes["none"] / 2 < sizes["single"]


def _values_of(document: Any, key: str) -> Iterator[Any]:
    if isinstance(document, dict):
        if key in document:
            yield document[key]
        for inside in document.values():
            yield from _values_of(inside, key)
    elif isinstance(document, list):
        for inside in document:
            yield from _values_of(inside, key)


@pytest.mark.requirement("b:EX-08")
def test_round_robin_gives_each_partition_its_share(cluster: LocalCluster, admin: tidelog.Admin) -> None:
    topic = make(admin, "TopicA", 5)
    with tidelog.Producer(cluster.bootstrap, partitioner="round_robin") as producer:
        for number in range(4_003):
            producer.send(topic, b"%08d" % number)
        producer.flush(60)
    counts = Counter(record.partition for record in records_of(cluster, topic))
    assert sorted(counts) == [0, 1, 2, 3, 4]
    assert set(counts.values()) <= {800, 801}


class InvalidKeyError(Exception):
    pass


@pytest.mark.requirement("b:EX-09")
def test_partitioners_of_ones_own_for_known_users_and_for_bananas(cluster: LocalCluster, admin: tidelog.Admin) -> None:
    users, fruits = make(admin, "users", 4), make(admin, "fruits", 4)
    known = {b"alice": 1, b"bob": 2, b"carol": 3}

    def by_user(_topic: str, key: bytes | None, _value: bytes | None, _count: int) -> int:
        return known.get(key or b"", 0)

    def banana(_topic: str, key: bytes | None, _value: bytes | None, count: int) -> int:
        if key is None:
            raise InvalidKeyError("every record of this topic needs a key")
        return count - 1 if key == b"Banana" else partition_of(key, count - 1)

    with tidelog.Producer(cluster.bootstrap, partitioner=by_user) as producer:
        found = {name: producer.send(users, "v", key=name).result(30).partition for name in ("alice", "bob", "dave")}
        assert found == {"alice": 1, "bob": 2, "dave": 0}
    with tidelog.Producer(cluster.bootstrap, partitioner=banana) as producer:
        assert {producer.send(fruits, "v", key="Banana").result(30).partition for _ in range(5)} == {3}
        others = {producer.send(fruits, "v", key=f"Apple {number}").result(30).partition for number in range(30)}
        assert others == {0, 1, 2}, "the last partition is for bananas"
        with pytest.raises(InvalidKeyError, match="needs a key"):
            producer.send(fruits, "v")
        with pytest.raises(TypeError, match="key_serializer"):
            producer.send(fruits, "v", key=5)
    assert len(records_of(cluster, fruits)) == 35


@pytest.mark.requirement("b:EX-21", "a:X3-33")
def test_assignors_deal_as_in_the_examples(cluster: LocalCluster, admin: tidelog.Admin) -> None:
    make(admin, "T1", 3)
    make(admin, "T2", 3)
    wanted = {
        "range": ({"T1-0", "T1-1", "T2-0", "T2-1"}, {"T1-2", "T2-2"}),
        "roundrobin": ({"T1-0", "T1-2", "T2-1"}, {"T1-1", "T2-0", "T2-2"}),
    }
    for assignor, (first, second) in wanted.items():
        options: dict[str, Any] = {"group": f"dealt-{assignor}", "assignor": assignor}
        with (
            tidelog.Consumer(cluster.bootstrap, group_instance_id="C1", **options) as one,
            tidelog.Consumer(cluster.bootstrap, group_instance_id="C2", **options) as two,
        ):
            for consumer in (one, two):
                consumer.subscribe(["T1", "T2"])

            def is_dealt(
                one: tidelog.Consumer = one,
                two: tidelog.Consumer = two,
                dealt: tuple[set[str], set[str]] = (first, second),
            ) -> bool:
                for consumer in (one, two):
                    consumer.poll(0.05)
                return ({str(name) for name in one.assignment()}, {str(name) for name in two.assignment()}) == dealt

            until(is_dealt, f"{assignor} has dealt", timeout_s=30)


@pytest.mark.requirement("a:X3-10", "b:A-14")
def test_producers_that_are_killed_and_restarted_lose_nothing_acknowledged(
    cluster: LocalCluster, admin: tidelog.Admin, programs: list[Program]
) -> None:
    """Two of them write to one topic; each is killed and goes on behind the last number that it knows of."""
    topic = make(admin, "restarted", 3)
    acknowledged: dict[str, set[int]] = {"a": set(), "b": set()}
    overlaps = Counter[str]()
    running: dict[str, Program] = {}

    def start(name: str) -> None:
        first = max(acknowledged[name], default=-1) + 1
        running[name] = Program("numbers_process.py", cluster.bootstrap, topic, name, str(first))
        programs.append(running[name])

    for name in acknowledged:
        start(name)
    for name in acknowledged:
        until(lambda name=name: len(running[name].lines) > KILLED_AFTER, "numbers are written")  # type: ignore[misc]
        running[name].kill()
        acknowledged[name] |= set(running[name].lines)
        start(name)
    for name in acknowledged:
        until(lambda name=name: len(running[name].lines) > KILLED_AFTER, "numbers are written")  # type: ignore[misc]
        running[name].close()
        acknowledged[name] |= set(running[name].lines)
    found = records_of(cluster, topic)
    for name, numbers in acknowledged.items():
        mine = [record for record in found if record.value.startswith(name.encode())]
        assert len({record.partition for record in mine}) == 1
        stored = [int(record.value.split(b"-")[1]) for record in mine]
        assert numbers <= set(stored), "nothing that was acknowledged is missing"
        assert set(stored) == set(range(max(stored) + 1)), "nor is there a gap"
        # A new process is a new producer: what its predecessor sent and did not hear of stands twice, in runs.
        steps = [after - before for before, after in pairwise(stored)]
        back = [step for step in steps if step != 1]
        assert all(step <= 0 for step in back)
        assert len(back) <= 1, "at the restart"
        overlaps[name] = len(stored) - len(set(stored))
    print(f"stored twice after restarts: {dict(overlaps)}")


@pytest.mark.requirement("b:D-34", "b:J-04", "b:J-05", "b:D-16", "a:E-10", "a:E-52", "b:EX-16")
def test_members_that_join_and_die_keep_their_offsets_with_the_results(
    cluster: LocalCluster, admin: tidelog.Admin, tmp_path: Path
) -> None:
    """Offsets are in the database only; the owner of a partition seeks to its offset there."""
    topic = make(admin, "results", 4)
    with tidelog.Producer(cluster.bootstrap) as producer:
        for number in range(800):
            producer.send(topic, str(number), partition=number % 4)
    file = tmp_path / "results.sqlite"
    command = [sys.executable, str(HERE / "ledger_process.py"), cluster.bootstrap, "results", topic, str(file), "800"]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env={**os.environ, "GRPC_VERBOSITY": "NONE"})

    running = [start()]
    try:
        until(lambda: len(rows_in(file)) > 40, "the first one works")
        running.append(start())  # it joins while the first one is at work
        until(lambda: len(rows_in(file)) > 160, "work goes on")
        running[0].kill()
        until(lambda: len(rows_in(file)) > 300, "the second one works on")
        running[1].kill()  # nobody is left
        running.append(start())
        until(lambda: len(rows_in(file)) >= 800, "all is done")
    finally:
        for process in running:
            process.kill()
            process.wait(10)
    found = rows_in(file)
    assert len(found) == len(set(found)) == 800
    assert {name: offset for name, offset in admin.group_offsets("results").items() if offset} == {}


@pytest.mark.requirement("a:X3-18")
def test_an_application_checks_that_its_topic_is_compacted(admin: tidelog.Admin) -> None:
    def is_compacted(topic: str) -> bool:
        entry = admin.describe_config(("topic", topic), ["cleanup.policy"])["cleanup.policy"]
        return "compact" in entry.value.split(",")

    make(admin, "table", cleanup_policy="compact")
    make(admin, "stream")
    assert is_compacted("table")
    assert not is_compacted("stream")
    admin.alter_config(("topic", "stream"), sets={"cleanup.policy": "compact"})
    until(lambda: is_compacted("stream"), "the correction is seen")
    admin.alter_config(("topic", "table"), deletes=["cleanup.policy"])  # somebody's mistake
    until(lambda: not is_compacted("table"), "the next check tells")


@pytest.mark.requirement("b:O-03")
def test_logs_metrics_and_the_group_show_the_client_id(cluster: LocalCluster, admin: tidelog.Admin) -> None:
    topic = make(admin, "named")
    with tidelog.Producer(cluster.bootstrap, client_id="billing-7") as producer:
        producer.send(topic, "v").result(30)
        assert producer.client_id == "billing-7"
    with tidelog.Consumer(cluster.bootstrap, group="named", client_id="billing-8") as consumer:
        consumer.subscribe([topic])
        until(lambda: consumer.poll(0.1) or consumer.assignment(), "it is a member")
        (member,) = admin.describe_group("named").members
        assert member.client_id == "billing-8"
    code = (
        "import logging, tidelog; logging.basicConfig(); "
        f"tidelog.Producer({cluster.bootstrap!r}, client_id='billing-9', linger_ms=60_000).send({topic!r}, 'late')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "billing-9 was not closed; 1 records are flushed now" in done.stderr


def fill(cluster: LocalCluster, topic: str, count: int, *, partitions: int = 1, first: int = 0) -> None:
    """Numbered records in each partition; one batch in each."""
    with tidelog.Producer(cluster.bootstrap, linger_ms=200) as producer:
        for number in range(first, first + count):
            for partition in range(partitions):
                producer.send(topic, str(number), partition=partition)


def _read(consumer: tidelog.Consumer[Any, Any], count: int) -> list[tidelog.ConsumerRecord[Any, Any]]:
    found: list[tidelog.ConsumerRecord[Any, Any]] = []

    def is_read() -> bool:
        found.extend(consumer.poll(1.0))
        return len(found) >= count

    until(is_read, f"{count} records")
    return found


class Customer(NamedTuple):
    id: int
    name: str | None


class CustomerSerializer:
    """The id, the size of the name, the name; without a name its size is 0."""

    def serialize(self, _topic: str, data: Customer | None) -> bytes | None:
        if data is None:
            return None
        name = (data.name or "").encode()
        return struct.pack(">ii", data.id, len(name)) + name

    def deserialize(self, _topic: str, data: bytes) -> Customer:
        if len(data) < 8:
            raise ValueError(f"{len(data)} bytes are too few")
        number, size = struct.unpack_from(">ii", data)
        return Customer(number, data[8 : 8 + size].decode() or None)


@pytest.mark.requirement("b:EX-10")
def test_a_custom_serializer_round_trips_and_rejects_too_few_bytes(cluster: LocalCluster, admin: tidelog.Admin) -> None:
    topic = make(admin, "typed-customers")
    sent = [Customer(7, "Ann"), Customer(8, None), None, Customer(9, "Zoë")]
    with tidelog.Producer(cluster.bootstrap, value_serializer=CustomerSerializer()) as producer:
        for customer in sent:
            producer.send(topic, customer)
        with pytest.raises(SerializationError, match="of type str"):
            producer.send(topic, "no customer")
    with tidelog.Producer(cluster.bootstrap) as producer:
        producer.send(topic, b"short").result(DEADLINE_S)
    stored = [record.value for record in records_of(cluster, topic)]
    assert [None if value is None else len(value) for value in stored] == [11, 8, None, 12, 5]
    place = TopicPartition(topic, 0)
    with tidelog.Consumer(
        cluster.bootstrap, auto_offset_reset="earliest", value_deserializer=CustomerSerializer()
    ) as consumer:
        consumer.assign([place])
        assert [record.value for record in _read(consumer, 4)] == sent
        with pytest.raises(DeserializationError, match=r"offset 4 .*5 bytes are too few") as raised:
            consumer.poll(30)
        assert (raised.value.partition, raised.value.offset) == (place, 4)


@pytest.mark.requirement("b:EX-19")
def test_a_consumer_without_a_group_takes_what_it_names_and_notices_no_new_partition(
    cluster: LocalCluster, admin: tidelog.Admin
) -> None:
    topic = make(admin, "stand-alone", 2)
    fill(cluster, topic, 5, partitions=2)
    options: dict[str, Any] = {"group": "stand-alone", "auto_offset_reset": "earliest", "enable_auto_commit": False}
    with tidelog.Consumer(cluster.bootstrap, metadata_max_age_ms=100, **options) as consumer:
        names = consumer.partitions_for(topic)
        assert names == [TopicPartition(topic, 0), TopicPartition(topic, 1)]
        consumer.assign(names)
        with pytest.raises(SubscriptionError):
            consumer.subscribe([topic])
        assert len(_read(consumer, 10)) == 10
        consumer.commit()
        kept = {name: row.committed.offset for name, row in admin.group_offsets("stand-alone").items()}
        assert kept == dict.fromkeys(names, 5)
        admin.add_partitions({topic: 3})
        until(lambda: len(consumer.partitions_for(topic)) == 3, "it could know of the third")
        with tidelog.Producer(cluster.bootstrap) as producer:
            until(lambda: len(producer.partitions_for(topic)) == 3, "the producer knows")
            producer.send(topic, b"unread", partition=2).result(DEADLINE_S)
            producer.send(topic, b"read", partition=0).result(DEADLINE_S)
        assert [record.value for record in _read(consumer, 1)] == [b"read"]
        assert consumer.poll(0.6) == []
        assert consumer.assignment() == set(names)
    with tidelog.Consumer(cluster.bootstrap, **options) as again:
        again.assign(names)
        assert [record.value for record in _read(again, 1)] == [b"read"], "it goes on where it had committed"


@pytest.mark.case("C5")
@pytest.mark.requirement("b:EX-14", "b:EX-17")
def test_each_way_to_commit_repeats_or_loses_what_it_may_and_nothing_else(
    cluster: LocalCluster, admin: tidelog.Admin, programs: list[Program]
) -> None:
    """The program is killed with a record in hand, and run again. `before` commits before it handles: at most once.
    Automatic commits are at least once here: they take what the program has come back for, and not what it was given.
    """
    topic, stuck_at, end = make(admin, "ways"), 25, 40
    place = TopicPartition(topic, 0)
    fill(cluster, topic, end)
    ways = ("auto", "sync", "async", "combined", "every", "before")
    first = Program("commits_process.py", cluster.bootstrap, topic, str(stuck_at), str(end))
    programs.append(first)
    until(lambda: len(first.said("stuck")) == 5 and first.said("done") == [["combined"]], "all stand where they shall")

    def committed(way: str) -> int:
        found = admin.group_offsets(f"{topic}-{way}")
        return found[place].committed.offset if place in found else -1

    polled = {way: [tuple(rest) for name, *rest in first.said("polled") if name == way] for way in ways}
    until(lambda: committed("auto") > 0, "auto has committed by itself")
    wanted = {way: polled[way][-1][0] for way in ("sync", "async")}
    wanted |= {"every": stuck_at // 10 * 10, "before": polled["before"][-1][1], "combined": 22}
    for way, offset in wanted.items():
        until(partial(lambda way, offset: committed(way) == offset, way, offset), f"{way} has committed {offset}")
    first.kill()
    wanted["auto"] = committed("auto")
    assert wanted["auto"] in [start for start, _ in polled["auto"]], "the end of an earlier poll, nothing of the last"
    assert {way: committed(way) for way in ways} == wanted, "what was in hand is not committed by dying"
    second = Program("commits_process.py", cluster.bootstrap, topic, "-1", str(end))
    programs.append(second)
    until(lambda: len(second.said("done")) == len(ways), "the rest is handled")
    second.close()
    for way in ways:
        runs = [[offset for name, offset in program.said("handled") if name == way] for program in (first, second)]
        assert runs[1] == list(range(wanted[way], end)), "from the commit on"
        repeated, lost = set(runs[0]) & set(runs[1]), set(range(end)) - set(runs[0]) - set(runs[1])
        if way == "before":
            assert (repeated, lost) == (set(), set(range(stuck_at, wanted[way]))), "at most once"
        else:
            done = 22 if way == "combined" else stuck_at
            assert (repeated, lost) == (set(range(wanted[way], done)), set()), "at least once"
        assert committed(way) == end or way == "every"
