"""A node is killed with -9 while Kafka clients write and read: what was acknowledged stays, and nothing is doubled.

Each client's topic has a partition on every node, so a killed node leads one of each.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import Any

import aiokafka
import confluent_kafka
import pytest
from support.clusters.waiting import until
from support.interop.clients import DEADLINE_S, PEERS, Place, Row, kafka, leaders, make_topic
from support.interop.members import (
    AioKafkaMember,
    ConfluentConsumerProtocolMember,
    ConfluentMember,
    KafkaPythonMember,
    Member,
    until_read,
)

from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.interop, pytest.mark.cluster, pytest.mark.timeout(180)]

PARTITIONS = 3
PAUSE_S = 0.004
KEYS = 30
BEFORE = AFTER = 150
"""Records that each client has acknowledged before the kill, and of those that it has sent after it."""


class Writer:
    """Numbered records, on a thread of its own, until `stop`; an idempotent producer with acks=all."""

    def __init__(self, cluster: LocalCluster, topic: str) -> None:
        self.acknowledged: dict[bytes, Place] = {}
        self.sent = 0
        self.error: BaseException | None = None
        self._cluster, self._topic = cluster, topic
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"writer of {topic}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.write(self._cluster.kafka_bootstrap, self._topic)
        except BaseException as error:
            self.error = error

    def next(self) -> tuple[bytes, bytes]:
        """Value and key."""
        number, self.sent = self.sent, self.sent + 1
        return b"%d" % number, b"key-%d" % (number % KEYS)

    def count_ack(self, value: bytes, partition: int, offset: int) -> None:
        assert value not in self.acknowledged, "acknowledged twice"
        self.acknowledged[value] = (partition, offset)

    def check(self) -> None:
        if self.error is not None:
            raise AssertionError(f"{self._thread.name} has failed") from self.error

    def stop(self) -> None:
        self._end.set()
        self._thread.join(2 * DEADLINE_S)
        assert not self._thread.is_alive(), f"{self._thread.name} does not end"
        self.check()

    def write(self, bootstrap: str, topic: str) -> None:
        raise NotImplementedError


class ConfluentWriter(Writer):
    def write(self, bootstrap: str, topic: str) -> None:
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "message.timeout.ms": 60_000,
                "retry.backoff.ms": 50,
                "reconnect.backoff.max.ms": 500,
                "partitioner": "murmur2_random",
                "log_level": 2,
            }
        )

        def on_delivery(error: Any, message: Any) -> None:
            if error is not None:
                raise confluent_kafka.KafkaException(error)
            self.count_ack(message.value(), message.partition(), message.offset())

        while not self._end.is_set():
            value, key = self.next()
            producer.produce(topic, value, key, on_delivery=on_delivery)
            producer.poll(PAUSE_S)
        assert producer.flush(DEADLINE_S) == 0


class AioKafkaWriter(Writer):
    def write(self, bootstrap: str, topic: str) -> None:
        asyncio.run(self._write(bootstrap, topic))

    async def _write(self, bootstrap: str, topic: str) -> None:
        producer = aiokafka.AIOKafkaProducer(
            bootstrap_servers=bootstrap, enable_idempotence=True, request_timeout_ms=10_000, retry_backoff_ms=50
        )
        await producer.start()
        under_way: list[tuple[bytes, Any]] = []
        try:
            while not self._end.is_set():
                value, key = self.next()
                under_way.append((value, await producer.send(topic, value, key)))
                self._collect(under_way)
                await asyncio.sleep(PAUSE_S)
            async with asyncio.timeout(DEADLINE_S):
                await producer.flush()
            self._collect(under_way)
        finally:
            await producer.stop()
        assert not under_way

    def _collect(self, under_way: list[tuple[bytes, Any]]) -> None:
        for value, future in [one for one in under_way if one[1].done()]:
            done = future.result()
            self.count_ack(value, done.partition, done.offset)
        under_way[:] = [one for one in under_way if not one[1].done()]


class KafkaPythonWriter(Writer):
    def write(self, bootstrap: str, topic: str) -> None:
        producer = kafka.KafkaProducer(
            bootstrap_servers=bootstrap, request_timeout_ms=10_000, retry_backoff_ms=50, reconnect_backoff_max_ms=500
        )
        failed: list[BaseException] = []
        try:
            while not self._end.is_set():
                value, key = self.next()
                future = producer.send(topic, value, key)
                future.add_callback(lambda done, value=value: self.count_ack(value, done.partition, done.offset))
                future.add_errback(failed.append)
                assert not failed, failed
                time.sleep(PAUSE_S)
            producer.flush(DEADLINE_S)
        finally:
            producer.close(DEADLINE_S)
        assert not failed, failed


WRITERS: dict[str, type[Writer]] = {
    "confluent-kafka": ConfluentWriter,
    "aiokafka": AioKafkaWriter,
    "kafka-python": KafkaPythonWriter,
}
READERS: dict[str, type[Member]] = {
    "confluent-classic": ConfluentMember,
    "confluent-consumer": ConfluentConsumerProtocolMember,
    "aiokafka": AioKafkaMember,
    "kafka-python": KafkaPythonMember,
}


class Story:
    """What has happened: one kill, in the middle of everybody's work."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        topics = {name: make_topic(cluster, f"failover-{name}", PARTITIONS) for name in WRITERS}
        self.writers = {name: kind(cluster, topics[name]) for name, kind in WRITERS.items()}
        self.readers = {
            name: kind(cluster, f"failover-{name}", topics["confluent-kafka"]) for name, kind in READERS.items()
        }
        everybody: list[Writer | Member] = [*self.writers.values(), *self.readers.values()]

        def is_going(wanted: dict[str, int], seen: int) -> bool:
            for one in everybody:
                one.check()
            acknowledged = all(len(self.writers[name].acknowledged) >= count for name, count in wanted.items())
            return acknowledged and all(len(one.records) >= seen for one in self.readers.values())

        until(lambda: is_going(dict.fromkeys(WRITERS, BEFORE), BEFORE), "all are at work")
        before = {name: one.sent for name, one in self.writers.items()}
        self.killed = leaders(cluster.ports(1).kafka, topics["confluent-kafka"])[0]
        for topic in topics.values():
            assert self.killed in leaders(cluster.ports(1).kafka, topic).values(), f"it leads a partition of {topic}"
        began_s = time.monotonic()
        cluster.kill(self.killed)
        self.kill_number = before
        until(lambda: is_going({name: count + AFTER for name, count in before.items()}, 0), "all go on")
        self.gap_s = time.monotonic() - began_s
        for writer in self.writers.values():
            writer.stop()
        values = set(self.writers["confluent-kafka"].acknowledged)
        for member in self.readers.values():
            until_read([member], values)
            member.stop()


@pytest.fixture(scope="module")
def story(harmed: LocalCluster) -> Story:
    return Story(harmed)


@pytest.mark.requirement("b:U-02")
@pytest.mark.parametrize("name", WRITERS)
def test_nothing_acknowledged_is_lost_and_nothing_is_doubled(name: str, story: Story) -> None:
    writer = story.writers[name]
    assert len(writer.acknowledged) == writer.sent, "each record was acknowledged, some after other attempts"
    found = PEERS["tidelog"].read(story.cluster, f"failover-{name}", PARTITIONS, writer.sent)
    values = {place: row.value for place, row in found.items()}
    counted = Counter(values.values())
    assert [value for value, count in counted.items() if count > 1] == [], "no duplicates"
    assert {value: place for place, value in values.items()} == writer.acknowledged, "acknowledged offsets"
    _check_order(found)


def _check_order(found: dict[Place, Row]) -> None:
    for partition in range(PARTITIONS):
        last: dict[bytes | None, int] = {}
        for _, row in sorted((place[1], row) for place, row in found.items() if place[0] == partition):
            assert row.value is not None
            assert int(row.value) > last.get(row.key, -1), "records of one key are in the order of sending"
            last[row.key] = int(row.value)


@pytest.mark.requirement("b:U-02")
@pytest.mark.parametrize("name", READERS)
def test_readers_go_on_and_have_read_everything(name: str, story: Story) -> None:
    writer, member = story.writers["confluent-kafka"], story.readers[name]
    places = {value: (partition, offset) for partition, offset, value in member.records}
    assert {value: places[value] for value in writer.acknowledged} == writer.acknowledged
    assert max(map(int, writer.acknowledged)) > story.kill_number["confluent-kafka"] + AFTER // 2
