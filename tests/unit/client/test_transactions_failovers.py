"""Transactions through the public clients when coordinators and leaders end, against a cluster in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.clients.committed import coordinator_of, new_topic, send_one, state_of, values
from support.clusters.waiting import until

import tidelog
from tidelog.coordinator.hashing import partition_for
from tidelog.errors import TransactionAbortedError
from tidelog.testing import MemoryCluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[MemoryCluster]:
    with MemoryCluster(brokers=3, seed=17) as started:
        yield started


@pytest.fixture
def topic(cluster: MemoryCluster) -> str:
    return new_topic(cluster)


def test_a_coordinator_that_is_killed_with_an_open_transaction_is_replaced(cluster: MemoryCluster, topic: str) -> None:
    with tidelog.Producer(cluster.bootstrap, transactional_id=topic) as producer:
        with producer.transaction():
            producer.send(topic, b"before", partition=0).result(30)
            killed = kill_coordinator(cluster, topic)
            producer.send(topic, b"after", partition=1).result(60)
        cluster.restart(killed)
        with producer.transaction():
            producer.send(topic, b"next", partition=0)
    until(lambda: sorted(values(cluster.bootstrap, topic)) == [b"after", b"before", b"next"], "both transactions")


@pytest.mark.requirement("a:X3-36")
@pytest.mark.parametrize("end", ["commit_transaction", "abort_transaction"])
def test_a_coordinator_that_is_killed_while_it_decides_has_decided_once(
    cluster: MemoryCluster, topic: str, end: str
) -> None:
    with tidelog.Producer(cluster.bootstrap, transactional_id=topic) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        send_one(producer, topic, b"1")
        producer.flush()
        coordinator = coordinator_of(cluster, topic)
        cluster.stall_disk(coordinator)
        errors: list[BaseException] = []
        thread = threading.Thread(target=run_noting, args=(getattr(producer, end), errors))
        thread.start()
        until(lambda: state_of(cluster, topic) == "Ongoing" and thread.is_alive(), "nothing is decided")
        cluster.kill(coordinator)
        cluster.heal()
        thread.join(60)
        assert not thread.is_alive()
        assert errors == []
        cluster.restart(coordinator)
        with producer.transaction():
            send_one(producer, topic, b"2")
    wanted = [b"1", b"2"] if end == "commit_transaction" else [b"2"]
    until(lambda: values(cluster.bootstrap, topic) == wanted * 2, "once, in order")


def run_noting(call: Any, errors: list[BaseException]) -> None:
    try:
        call()
    except BaseException as error:
        errors.append(error)


def kill_coordinator(cluster: MemoryCluster, transactional_id: str) -> int:
    return cluster.kill(coordinator_of(cluster, transactional_id))


@pytest.mark.requirement("a:H-33", "a:T-19", "a:H-30", "a:H-31", "a:H-32", "b:J-09")
def test_the_next_coordinator_writes_the_markers_of_a_decision() -> None:
    with MemoryCluster(brokers=5, seed=16) as cluster:
        whole = new_topic(cluster, factor=3)
        with (
            tidelog.Producer(cluster.bootstrap, transactional_id="a") as producer,
            tidelog.Admin(cluster.bootstrap) as admin,
        ):
            producer.init_transactions()
            assert "__transaction_state" in [topic.name for topic in admin.list_topics(internal=True)]
            coordinator = coordinator_of(cluster, "a")
            partitions = len(admin.describe_topic("__transaction_state").partitions)
            assert coordinator == cluster.leader("__transaction_state", partition_for("a", partitions))
            other = next(broker for broker in cluster.brokers if broker != coordinator)
            admin.create_topic("alone", assignment=[[other]])
            producer.begin_transaction()
            send_one(producer, whole, b"1")
            producer.send("alone", b"1")
            producer.flush()
            cluster.kill(other)
            producer.commit_transaction()
            assert state_of(cluster, "a") == "PrepareCommit", "the marker of 'alone' cannot be written"
            cluster.kill(coordinator)
            until(lambda: coordinator_of(cluster, "a") != coordinator, "another coordinator")
            assert state_of(cluster, "a") == "PrepareCommit"
            cluster.restart(other)
            until(lambda: state_of(cluster, "a") == "CompleteCommit", "the next one finishes it")
            with producer.transaction():
                producer.send("alone", b"2")
        until(lambda: values(cluster.bootstrap, "alone") == [b"1", b"2"], "the markers are there")
        assert values(cluster.bootstrap, whole) == [b"1", b"1"]


@pytest.mark.requirement("a:X3-36")
def test_a_leader_that_is_killed_in_a_transaction_loses_nothing_of_it(cluster: MemoryCluster, topic: str) -> None:
    with tidelog.Producer(cluster.bootstrap, transactional_id=topic) as producer:
        with producer.transaction():
            for number in range(100):
                producer.send(topic, b"%d" % number, partition=0)
                if number == 50:
                    producer.flush()
                    cluster.wait_in_sync(topic)
                    killed = cluster.kill_leader(topic)
        until(lambda: values(cluster.bootstrap, topic) == [b"%d" % number for number in range(100)], "each once")
        cluster.restart(killed)


@pytest.mark.requirement("a:X3-36")
def test_a_transaction_survives_the_loss_of_the_power_of_all_brokers(cluster: MemoryCluster, topic: str) -> None:
    with tidelog.Producer(cluster.bootstrap, transactional_id=topic) as producer:
        with producer.transaction():
            send_one(producer, topic, b"committed")
        producer.begin_transaction()
        send_one(producer, topic, b"open")
        producer.flush()
        cluster.lose_unsynced()
        assert values(cluster.bootstrap, topic) == [b"committed"] * 2
        producer.commit_transaction()
    until(lambda: values(cluster.bootstrap, topic) == [b"committed", b"open"] * 2, "the open one goes on")


@pytest.mark.requirement("a:H-12")
def test_begin_asks_nobody(cluster: MemoryCluster, topic: str) -> None:
    with tidelog.Producer(cluster.bootstrap, transactional_id=topic) as producer:
        producer.init_transactions()
        cluster.isolate(*cluster.brokers, clients=True)
        start_s = time.monotonic()
        producer.begin_transaction()
        took_s = time.monotonic() - start_s
        cluster.heal()
        assert took_s < 1
        assert state_of(cluster, topic) == "Empty"
        delivery = producer.send(topic, b"1")
        producer.abort_transaction()
        error = delivery.exception(30)
        assert error is None or isinstance(error, TransactionAbortedError)
