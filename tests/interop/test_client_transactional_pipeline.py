"""librdkafka consumes, transforms and produces in transactions while nodes are killed with -9: each record comes out
once, in order, for readers of committed records."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import KafkaException
from support.clusters.waiting import until
from support.interop.clients import DEADLINE_S, leaders, make_topic
from support.interop.reading import read_values

import tidelog
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.interop, pytest.mark.cluster, pytest.mark.timeout(400)]

PARTITIONS = 3
COUNT = 200
"""Records between two kills."""
PER_TRANSACTION = 10
CALL_S = 20.0
WAIT_S = 120.0


class Pipeline:
    """Runs on a thread of its own until `stop`. An error that needs no new producer aborts the transaction; any other
    one is a restart of the program."""

    def __init__(self, bootstrap: str, source: str, target: str, *, name: str) -> None:
        self.name = name
        self.commits = 0
        self.aborts = 0
        self.restarts = 0
        self.error: BaseException | None = None
        self._bootstrap, self._source, self._target = bootstrap, source, target
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), f"{self.name} does not end"
        self.check()

    def check(self) -> None:
        if self.error is not None:
            raise AssertionError(f"{self.name} has failed") from self.error

    def _run(self) -> None:
        try:
            while not self._end.is_set():
                consumer = self._new_consumer()
                try:
                    producer = self._new_producer()
                    while not self._end.is_set():
                        self._pass_on(consumer, producer)
                except KafkaException:
                    self.restarts += 1
                finally:
                    consumer.close()
        except BaseException as error:
            self.error = error

    def _new_consumer(self) -> Any:
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": self._bootstrap,
                "group.id": self.name,
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "reconnect.backoff.max.ms": 500,
                "log_level": 2,
            }
        )
        consumer.subscribe([self._source])
        return consumer

    def _new_producer(self) -> Any:
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": self._bootstrap,
                "transactional.id": self.name,
                "transaction.timeout.ms": 30_000,
                "retry.backoff.ms": 50,
                "reconnect.backoff.max.ms": 500,
                "log_level": 2,
            }
        )
        self._retried(lambda: producer.init_transactions(CALL_S))
        return producer

    def _pass_on(self, consumer: Any, producer: Any) -> None:
        """One transaction."""
        messages = [message for message in consumer.consume(PER_TRANSACTION, 0.2) if message.error() is None]
        if not messages:
            return
        producer.begin_transaction()
        try:
            for message in messages:
                producer.produce(self._target, message.value(), partition=message.partition())
            places = [place for place in consumer.position(consumer.assignment()) if place.offset >= 0]
            group = consumer.consumer_group_metadata()
            self._retried(lambda: producer.send_offsets_to_transaction(places, group, CALL_S))
            self._retried(lambda: producer.commit_transaction(CALL_S))
            self.commits += 1
        except KafkaException as error:
            if not error.args[0].txn_requires_abort():
                raise
            self._retried(lambda: producer.abort_transaction(CALL_S))
            self.aborts += 1
            for place in consumer.committed(consumer.assignment(), CALL_S):
                start = confluent_kafka.OFFSET_BEGINNING if place.offset < 0 else place.offset
                consumer.seek(confluent_kafka.TopicPartition(place.topic, place.partition, start))

    def _retried(self, call: Callable[[], object]) -> None:
        while True:
            try:
                call()
                return
            except KafkaException as error:
                if not error.args[0].retriable() or self._end.is_set():
                    raise


@pytest.mark.requirement("a:H-01", "a:H-03", "a:H-33", "a:T-18", "a:T-19", "a:X3-24", "a:X3-36")
def test_each_record_comes_out_once_and_in_order_through_kills_of_coordinator_and_leader(harmed: LocalCluster) -> None:
    name = "librdkafka-pipeline"
    source = make_topic(harmed, f"{name}-in", PARTITIONS)
    target = make_topic(harmed, f"{name}-out", PARTITIONS)
    sent = 0

    def write() -> None:
        nonlocal sent
        with tidelog.Producer(harmed.bootstrap) as producer:
            for number in range(sent, sent + COUNT):
                producer.send(source, b"%d" % number, partition=number % PARTITIONS)
            producer.flush(DEADLINE_S)
        sent += COUNT

    def coordinator() -> int:
        with tidelog.Admin(harmed.bootstrap) as admin:
            return int(admin.describe_transaction(name).coordinator)

    def leader() -> int:
        return leaders(harmed.ports(1).kafka, target)[0]

    pipeline = Pipeline(harmed.kafka_bootstrap, source, target, name=name)
    try:

        def has_committed(count: int) -> bool:
            pipeline.check()
            return pipeline.commits >= count

        for find in (coordinator, leader):
            before = pipeline.commits
            write()
            until(lambda count=before: has_committed(count + 3), "transactions before the kill", timeout_s=WAIT_S)  # type: ignore[misc]
            victim = find()
            harmed.kill(victim)
            after = pipeline.commits
            until(lambda count=after: has_committed(count + 3), "transactions after the kill", timeout_s=WAIT_S)  # type: ignore[misc]
            harmed.start(victim)
        write()
        wanted = {part: [b"%d" % number for number in range(part, sent, PARTITIONS)] for part in range(PARTITIONS)}
        total = sum(map(len, wanted.values()))

        def is_done() -> bool:
            pipeline.check()
            return sum(map(len, read_values(harmed, target, PARTITIONS).values())) >= total

        until(is_done, f"{total} records of {target}", timeout_s=WAIT_S)
    finally:
        pipeline.stop()
    print(f"{pipeline.commits} commits, {pipeline.aborts} aborts, {pipeline.restarts} restarts")
    assert read_values(harmed, target, PARTITIONS) == wanted
