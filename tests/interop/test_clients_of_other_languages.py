"""franz-go, sarama, kafka-go and kafkajs write and read through the Kafka API while a node is killed with -9."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from support.clusters.waiting import until
from support.interop.clients import make_topic
from support.interop.programs import Program, is_built, needs

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


def read_all(cluster: LocalCluster, topic: str) -> list[tuple[int, int, int]]:
    """(value, partition, offset) of every record, by our own consumer."""
    with tidelog.Consumer(cluster.bootstrap) as consumer:
        consumer.assign([(topic, partition) for partition in range(3)])
        consumer.seek_to_beginning()
        ends = consumer.end_offsets(*[(topic, partition) for partition in range(3)])
        total = sum(ends.values())
        found: list[tuple[int, int, int]] = []

        def all_read() -> bool:
            for record in consumer.poll(1.0):
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
def runs(harmed: LocalCluster) -> Iterator[dict[str, Run]]:
    """All clients that are here, side by side, through one kill -9 of a node that leads a partition of each."""
    made = {client: Run(harmed, client) for client in CLIENTS if is_built(client)}
    try:
        for client, run in made.items():
            until(lambda run=run: run.has_acknowledged(BEFORE), f"acks of {client}", timeout_s=90)  # type: ignore[misc]
        harmed.kill(2)
        for client, run in made.items():
            until(lambda run=run: run.has_acknowledged(2 * BEFORE), f"acks of {client} without node 2", timeout_s=90)  # type: ignore[misc]
        harmed.start(2)
        yield made
    finally:
        for run in made.values():
            run.end()


@pytest.mark.parametrize("client", [pytest.param(client, marks=needs(client)) for client in CLIENTS])
def test_a_client_keeps_every_acknowledged_record_when_a_node_is_killed(
    harmed: LocalCluster, runs: dict[str, Run], client: str
) -> None:
    run = runs[client]
    acknowledged, consumed = run.producer.wait(TIMEOUT_S), run.consumer.wait(TIMEOUT_S)
    assert sorted(row["value"] for row in acknowledged) == list(range(COUNT))
    stored = read_all(harmed, run.topic)
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

    def done(verb: str, *more: str) -> list[dict[str, Any]]:
        program = Program("kafkajs", verb, cluster.kafka_bootstrap, topic, "reset", *more)
        try:
            return program.wait(TIMEOUT_S)
        finally:
            program.end()

    assert {row["value"] for row in done("consume", "30")} == set(range(30))
    assert {row["partition"] for row in done("reset-offsets")} == {0, 1, 2}
    assert {row["value"] for row in done("consume", "30")} == set(range(30)), "again, from the earliest"
