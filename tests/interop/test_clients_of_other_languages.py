"""franz-go, sarama, kafka-go and kafkajs write and read through the Kafka API while a node is killed with -9."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from interop_clients import make_topic
from interop_programs import Program, is_built, needs
from patience import until

import tidelog
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.interop, pytest.mark.cluster, pytest.mark.timeout(400)]

COUNT = 600
BEFORE = 150
"""Records that are acknowledged before the kill."""
TIMEOUT_S = 150.0

CLIENTS = ("franz", "sarama", "kafka-go", "kafkajs")
NOT_IDEMPOTENT = frozenset({"kafka-go", "kafkajs"})
"""They may store a record twice, and must not lose one."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=3) as made:
        yield made


def read_all(cluster: LocalCluster, topic: str) -> list[tuple[int, int, int]]:
    """(value, partition, offset) of every record, by our own consumer."""
    with tidelog.Consumer(cluster.bootstrap) as consumer:
        consumer.assign([(topic, partition) for partition in range(3)])
        consumer.seek_to_beginning()
        ends = consumer.end_offsets(*[(topic, partition) for partition in range(3)])
        total = sum(ends.values())
        found: list[tuple[int, int, int]] = []

        def all_read() -> bool:
            for record in consumer.poll(1_000):
                assert record.value is not None
                found.append((int(record.value), record.partition, record.offset))
            return len(found) >= total

        until(all_read, f"{total} records of {topic}", timeout_s=60)
    return found


class Run:
    """One client's producer and consumer, and what they printed."""

    def __init__(self, cluster: LocalCluster, client: str) -> None:
        self.topic = make_topic(cluster, f"killed-{client}")
        bootstrap = cluster.kafka_bootstrap
        self.producer = Program(client, "produce", bootstrap, self.topic, str(COUNT))
        self.consumer = Program(client, "consume", bootstrap, self.topic, f"group-{client}", str(COUNT))

    def has_acknowledged(self, count: int) -> bool:
        self.producer.check()
        return len(self.producer.rows) >= count

    def end(self) -> None:
        self.producer.end()
        self.consumer.end()


@pytest.fixture(scope="module")
def runs(cluster: LocalCluster) -> Iterator[dict[str, Run]]:
    """All clients that are here, side by side, through one kill -9 of a node that leads a partition of each."""
    made = {client: Run(cluster, client) for client in CLIENTS if is_built(client)}
    try:
        for client, run in made.items():
            until(lambda run=run: run.has_acknowledged(BEFORE), f"acks of {client}", timeout_s=90)  # type: ignore[misc]
        cluster.kill(2)
        for client, run in made.items():
            until(lambda run=run: run.has_acknowledged(2 * BEFORE), f"acks of {client} without node 2", timeout_s=90)  # type: ignore[misc]
        cluster.start(2)
        yield made
    finally:
        for run in made.values():
            run.end()


@pytest.mark.parametrize("client", [pytest.param(client, marks=needs(client)) for client in CLIENTS])
def test_a_client_keeps_every_acknowledged_record_when_a_node_is_killed(
    cluster: LocalCluster, runs: dict[str, Run], client: str
) -> None:
    run = runs[client]
    acknowledged, consumed = run.producer.wait(TIMEOUT_S), run.consumer.wait(TIMEOUT_S)
    assert sorted(row["value"] for row in acknowledged) == list(range(COUNT))
    stored = read_all(cluster, run.topic)
    counts = Counter(value for value, _, _ in stored)
    assert set(counts) == set(range(COUNT)), "an acknowledged record is lost"
    if client not in NOT_IDEMPOTENT:
        assert max(counts.values()) == 1, "a record is stored twice"
        rows = {(row["value"], row["partition"], row["offset"]) for row in acknowledged}
        assert rows == set(stored), "a record is not where its producer was answered"
    assert {row["value"] for row in consumed} == set(range(COUNT))
    assert {(row["value"], row["partition"], row["offset"]) for row in consumed} <= set(stored)


@needs("kafkajs")
def test_kafkajs_resets_the_offsets_of_a_group_to_the_earliest(cluster: LocalCluster) -> None:
    topic = make_topic(cluster, "reset-by-kafkajs")
    with tidelog.Producer(cluster.bootstrap) as producer:
        for number in range(30):
            producer.send(topic, b"%d" % number, key=b"key-%d" % number)
        producer.flush(60)
    for attempt in range(2):
        reader = Program("kafkajs", "consume", cluster.kafka_bootstrap, topic, "reset", "30")
        try:
            assert {row["value"] for row in reader.wait(TIMEOUT_S)} == set(range(30)), f"reading {attempt}"
        finally:
            reader.end()
        reset = Program("kafkajs", "reset-offsets", cluster.kafka_bootstrap, topic, "reset")
        try:
            assert {row["partition"] for row in reset.wait(TIMEOUT_S)} == {0, 1, 2}
        finally:
            reset.end()


@needs("franz")
def test_kadm_describes_more_than_a_thousand_groups_at_once(cluster: LocalCluster) -> None:
    topic = make_topic(cluster, "many-groups", partitions=1)
    with tidelog.Admin(cluster.bootstrap) as admin:
        for number in range(1_200):
            admin.alter_group_offsets(f"many-{number:04}", {tidelog.TopicPartition(topic, 0): 0})
    groups = Program("kadm", "groups", cluster.kafka_bootstrap)
    try:
        names = {row["group"] for row in groups.wait(TIMEOUT_S)}
    finally:
        groups.end()
    assert names >= {f"many-{number:04}" for number in range(1_200)}
