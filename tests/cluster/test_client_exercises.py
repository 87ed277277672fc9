"""Exercises of the sources about producers, consumers and applications, on real processes.

One cluster of three serves all; each test leaves it whole.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from exercises import HERE, Program, make, records_of
from ledger_process import rows_in
from patience import until

import tidelog
from tidelog.client.errors import DeliveryTimeoutError
from tidelog.client.partitioners import partition_of
from tidelog.model.errors import RecordTooLargeError
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

KILLED_AFTER = 60
"""Acknowledgements of a producer, before it is killed."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=3) as made:
        yield made


@pytest.fixture(scope="module")
def admin(cluster: LocalCluster) -> Iterator[tidelog.Admin]:
    with tidelog.Admin(cluster.bootstrap) as made:
        yield made


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    made: list[Program] = []
    yield made
    for program in made:
        program.end()


@pytest.mark.source("b:EX-07")
def test_larger_batches_are_fewer_requests_and_compression_is_kept_on_disk(
    cluster: LocalCluster, admin: tidelog.Admin
) -> None:
    lines = [f"{number} the quick brown fox jumps over the lazy dog" for number in range(2_000)]
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
        dump = subprocess.run(
            [sys.executable, "-m", "tidelog", "log", "dump", str(file), "--output", "json"],
            capture_output=True, text=True, check=True, timeout=60, env={**os.environ, "PYTHONSAFEPATH": "1"},
        )  # fmt: skip
        codecs = set(_values_of(json.loads(dump.stdout), "codec"))
        assert codecs == {name if name in ("gzip", "snappy", "lz4") else "none"}, "as the producer has made it"
    assert figures["single"]["batches"] == 2_000, "every record is one"
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


@pytest.mark.source("b:EX-08")
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


@pytest.mark.source("b:EX-09")
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


@pytest.mark.source("b:EX-21", "a:X3-33")
def test_assignors_deal_as_in_the_examples(cluster: LocalCluster, admin: tidelog.Admin) -> None:
    make(admin, "T1", 3)
    make(admin, "T2", 3)
    wanted = {
        "range": ({"T1-0", "T1-1", "T2-0", "T2-1"}, {"T1-2", "T2-2"}),
        "roundrobin": ({"T1-0", "T1-2", "T2-1"}, {"T1-1", "T2-0", "T2-2"}),
    }
    for assignor, (first, second) in wanted.items():
        options = {"group": f"dealt-{assignor}", "assignor": assignor}
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
                    consumer.poll(50)
                return ({str(name) for name in one.assignment()}, {str(name) for name in two.assignment()}) == dealt

            until(is_dealt, f"{assignor} has dealt", timeout_s=30)


@pytest.mark.source("a:X3-10", "b:A-14")
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
    for _ in range(2):
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
        assert len(back) <= 2, "once for each restart"
        overlaps[name] = len(stored) - len(set(stored))
    print(f"stored twice after restarts: {dict(overlaps)}")


@pytest.mark.source("a:X3-11", "a:S-04", "a:S-05")
def test_an_application_handles_all_orders_while_brokers_and_it_itself_are_killed(
    cluster: LocalCluster, admin: tidelog.Admin, programs: list[Program]
) -> None:
    orders, dead = make(admin, "orders", 4), make(admin, "dead")
    arguments = ("application_process.py", cluster.bootstrap, "application", orders, dead)
    programs += [Program(*arguments), Program(*arguments)]
    acknowledged: set[int] = set()
    refused: list[Exception] = []
    is_over = threading.Event()

    def produce() -> None:
        with tidelog.Producer(cluster.bootstrap) as producer:
            number = 1
            while not is_over.wait(0.01):

                def told(error: Exception | None, _: tidelog.RecordMetadata, number: int = number) -> None:
                    if error is not None:
                        refused.append(error)
                    else:
                        acknowledged.add(number)

                producer.send(orders, str(number), on_delivery=told, key=f"customer {number % 50}")
                number += 1

    def handled() -> list[tuple[int, int, int]]:
        return [tuple(row) for program in programs for row in program.said("handled")]

    def goes_on() -> None:
        before, wanted = len({row[2] for row in handled()}), len(acknowledged) + 40
        until(lambda: len(acknowledged) > wanted, "orders are taken")
        until(lambda: len({row[2] for row in handled()}) > before + 40, "orders are handled")

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        goes_on()
        leader = admin.describe_topic(orders).partitions[0].leader
        assert leader is not None
        cluster.kill(leader)
        goes_on()
        cluster.start(leader)
        programs[0].kill()
        programs.append(Program(*arguments))
        goes_on()
        other = leader % 3 + 1
        assert cluster.stop(other) == 0
        goes_on()
        cluster.start(other)
        goes_on()
    finally:
        is_over.set()
        thread.join()
    assert refused == []
    until(lambda: acknowledged <= {row[2] for row in handled()}, "all are handled")
    for program in programs[1:]:
        program.close()
    rows = handled()
    stored = records_of(cluster, orders)
    assert {int(record.value) for record in stored} == acknowledged
    assert len(stored) == len(acknowledged), "each once, as the producer is idempotent"
    assert {row[:2] for row in rows} == {(record.partition, record.offset) for record in stored}
    assert len(rows) - len(stored) <= 100, "what was handled since a commit, when one was killed"
    letters = {int(record.value) for record in records_of(cluster, dead)}
    assert letters == {number for number in acknowledged if number % 17 == 0}
    assert {number for program in programs for number in program.said("retry")} >= {
        number for number in acknowledged if number % 13 == 0 and number % 17
    }
    lags = admin.group_lag("application")
    assert sum(row.lag or 0 for row in lags) == 0, "all of it is committed"


@pytest.mark.source("b:D-34", "b:J-04", "b:D-16")
def test_members_that_join_and_die_keep_their_offsets_with_the_results(
    cluster: LocalCluster, admin: tidelog.Admin, tmp_path: Path
) -> None:
    """Offsets are in the database only; whoever is assigned a partition seeks to what stands there."""
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
        running.append(start())
        until(lambda: len(rows_in(file)) >= 800, "all is done")
    finally:
        for process in running:
            process.kill()
            process.wait(10)
    found = rows_in(file)
    assert len(found) == len(set(found)) == 800
    assert {name: offset for name, offset in admin.group_offsets("results").items() if offset} == {}


@pytest.mark.source("a:X3-18")
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


@pytest.mark.source("b:O-03")
def test_a_client_id_is_told_in_figures_in_logs_and_in_the_group(cluster: LocalCluster, admin: tidelog.Admin) -> None:
    topic = make(admin, "named")
    with tidelog.Producer(cluster.bootstrap, client_id="billing-7") as producer:
        producer.send(topic, "v").result(30)
        assert producer.metrics()["client_id"] == "billing-7"
    with tidelog.Consumer(cluster.bootstrap, group="named", client_id="billing-8") as consumer:
        consumer.subscribe([topic])
        until(lambda: consumer.poll(100) or consumer.assignment(), "it is a member")
        (member,) = admin.describe_group("named").members
        assert member.client_id == "billing-8"
    code = (
        "import logging, tidelog; logging.basicConfig(); "
        f"tidelog.Producer({cluster.bootstrap!r}, client_id='billing-9', linger_ms=60_000).send({topic!r}, 'late')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert "billing-9 was not closed; 1 records are flushed now" in run.stderr


@pytest.mark.source("b:EX-06")
def test_records_are_sent_and_forgotten_waited_for_or_called_back(cluster: LocalCluster, admin: tidelog.Admin) -> None:
    """The last one: it stops all brokers."""
    topic = make(admin, "CustomerCountry")
    told: list[tuple[Exception | None, tidelog.RecordMetadata]] = []

    def on_delivery(error: Exception | None, metadata: tidelog.RecordMetadata) -> None:
        told.append((error, metadata))

    options = {"delivery_timeout_ms": 4_000, "request_timeout_ms": 2_000}
    with tidelog.Producer(cluster.bootstrap, **options) as producer:
        producer.send(topic, "France", key="Precision Products")  # and forgotten
        metadata = producer.send(topic, "France", key="Precision Products").result(30)
        assert (metadata.topic, metadata.partition, metadata.offset) == (topic, 0, 1)
        producer.send(topic, "USA", key="Biomedical Materials", on_delivery=on_delivery)
        producer.flush(30)
        assert [(error, row.offset) for error, row in told] == [(None, 2)]
        began_s = time.monotonic()
        with pytest.raises(RecordTooLargeError, match="max_request_size"):
            producer.send(topic, b"x" * (2 << 20))
        assert time.monotonic() - began_s < 1, "at once"
        assert producer.metrics()["retries"] == 0
        for number in (1, 2, 3):
            cluster.kill(number)
        began_s = time.monotonic()
        late = producer.send(topic, "Peru", key="Biomedical Materials", on_delivery=on_delivery)
        with pytest.raises(DeliveryTimeoutError):
            late.result(30)
        assert 3.5 < time.monotonic() - began_s < 10
        until(lambda: len(told) == 2, "the callback is told")
        assert isinstance(told[1][0], DeliveryTimeoutError)
        cluster.start_all()
        until(lambda: _sends(producer, topic), "brokers are back")
    values = [record.value for record in records_of(cluster, topic)]
    assert values[:3] == [b"France", b"France", b"USA"]
    assert b"Italy" in values


def _sends(producer: tidelog.Producer, topic: str) -> bool:
    try:
        return producer.send(topic, "Italy").result(30).offset >= 3
    except DeliveryTimeoutError:
        return False
