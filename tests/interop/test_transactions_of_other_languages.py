"""Transactional producers of franz-go, sarama and kafkajs through the Kafka API, while a node is killed with -9."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.clusters.waiting import until
from support.interop.clients import make_topic
from support.interop.programs import Program, is_built, needs
from support.interop.reading import read_values

from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.interop, pytest.mark.cluster, pytest.mark.timeout(400)]

COUNT = 400
BEFORE = 100
"""Records that are committed before the kill."""
TIMEOUT_S = 150.0

CLIENTS = ("franz", "sarama", "kafkajs")


class Run:
    def __init__(self, cluster: LocalCluster, client: str) -> None:
        self.topic = make_topic(cluster, f"transactions-{client}")
        self.producer = Program(client, "transact", cluster.kafka_bootstrap, self.topic, str(COUNT))

    def has_committed(self, count: int) -> bool:
        self.producer.check()
        return len(self.producer.rows) >= count


@pytest.fixture(scope="module")
def runs(harmed: LocalCluster) -> Iterator[dict[str, Run]]:
    """All clients that are here, side by side, through one kill -9 of a node."""
    made = {client: Run(harmed, client) for client in CLIENTS if is_built(client)}
    try:
        for client, run in made.items():
            until(lambda run=run: run.has_committed(BEFORE), f"commits of {client}", timeout_s=90)  # type: ignore[misc]
        harmed.kill(2)
        for client, run in made.items():
            until(lambda run=run: run.has_committed(2 * BEFORE), f"commits of {client} without node 2", timeout_s=90)  # type: ignore[misc]
        harmed.start(2)
        yield made
    finally:
        for run in made.values():
            run.producer.end()


@pytest.mark.requirement("a:H-23", "a:U-06")
@pytest.mark.parametrize("client", [pytest.param(client, marks=needs(client)) for client in CLIENTS])
def test_a_client_commits_each_record_once_and_shows_no_aborted_one_when_a_node_is_killed(
    harmed: LocalCluster, runs: dict[str, Run], client: str
) -> None:
    run = runs[client]
    committed = run.producer.wait(TIMEOUT_S)
    assert [row["value"] for row in committed] == list(range(COUNT))
    partitions = [[int(value) for value in rows] for rows in read_values(harmed, run.topic, 3).values()]
    assert sorted(value for rows in partitions for value in rows) == list(range(COUNT))
    assert all(rows == sorted(rows) for rows in partitions), "in the order of sending"
    everything = read_values(harmed, run.topic, 3, isolation="read_uncommitted")
    assert any(int(value) < 0 for rows in everything.values() for value in rows), "some were aborted"
