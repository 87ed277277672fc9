"""Transactional producers of other people's clients: commit, abort, fencing, time-outs, offsets of groups."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import aiokafka
import confluent_kafka
import pytest
from confluent_kafka import KafkaError, KafkaException
from support.clusters.waiting import until
from support.interop.clients import DEADLINE_S, kafka, make_topic
from support.interop.reading import Isolation, read_values

import tidelog
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.interop, pytest.mark.cluster, pytest.mark.timeout(180)]

PARTITIONS = 3
COMMITTED: Isolation = "read_committed"
UNCOMMITTED: Isolation = "read_uncommitted"


def confluent_producer(cluster: LocalCluster, transactional_id: str, **more: Any) -> Any:
    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": cluster.kafka_bootstrap,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": 30_000,
            "linger.ms": 5,
            "log_level": 2,
            **more,
        }
    )
    producer.init_transactions(DEADLINE_S)
    return producer


def produce(producer: Any, topic: str, *values: bytes) -> None:
    for number, value in enumerate(values):
        producer.produce(topic, value, partition=number % PARTITIONS)


@contextlib.contextmanager
def confluent_consumer(cluster: LocalCluster, isolation: Isolation, **more: Any) -> Iterator[Any]:
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": cluster.kafka_bootstrap,
            "group.id": "unused",
            "isolation.level": isolation,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            **more,
        }
    )
    try:
        yield consumer
    finally:
        consumer.close()


def read_by_confluent(cluster: LocalCluster, topic: str, isolation: Isolation) -> list[bytes]:
    """Up to the end that the isolation level shows, sorted."""
    with confluent_consumer(cluster, isolation) as consumer:
        consumer.assign([confluent_kafka.TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
        values: list[bytes] = []
        ended: set[int] = set()

        def is_read() -> bool:
            message = consumer.poll(0.5)
            if message is None:
                return False
            if message.error() is None:
                values.append(message.value())
                ended.discard(message.partition())
            else:
                assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
                ended.add(message.partition())
            return len(ended) == PARTITIONS

        until(is_read, f"the end of {topic}", timeout_s=DEADLINE_S)
        return sorted(values)


def read_by_tidelog(cluster: LocalCluster, topic: str, isolation: Isolation) -> list[bytes]:
    return sorted(
        value for rows in read_values(cluster, topic, PARTITIONS, isolation=isolation).values() for value in rows
    )


def until_shown(cluster: LocalCluster, topic: str, committed: list[bytes], everything: list[bytes]) -> None:
    """To readers of each isolation level, of librdkafka and of Tidelog; soon after the end of a transaction, when its
    markers are written."""
    for read in (read_by_confluent, read_by_tidelog):
        until(lambda read=read: read(cluster, topic, COMMITTED) == committed, f"committed records of {topic}")  # type: ignore[misc]
        assert read(cluster, topic, UNCOMMITTED) == everything


def error_of(work: Callable[[], object]) -> Any:
    with pytest.raises(KafkaException) as raised:
        work()
    return raised.value.args[0]


# confluent-kafka (librdkafka).


@pytest.mark.requirement("a:H-02", "a:H-18", "a:H-20", "a:U-06", "a:X3-39", "b:EX-38")
def test_librdkafka_commits_and_aborts(cluster: LocalCluster) -> None:
    topic = make_topic(cluster, "librdkafka-transactions", PARTITIONS)
    producer = confluent_producer(cluster, "librdkafka-1")
    for number in range(9):
        producer.begin_transaction()
        produce(producer, topic, *(b"%d-%d" % (number, part) for part in range(PARTITIONS)))
        if number % 3 == 2:
            producer.flush(DEADLINE_S)
            producer.abort_transaction(DEADLINE_S)
        else:
            producer.commit_transaction(DEADLINE_S)
    everything = sorted(b"%d-%d" % (number, part) for number in range(9) for part in range(PARTITIONS))
    committed = [value for value in everything if int(value.split(b"-")[0]) % 3 != 2]
    until_shown(cluster, topic, committed, everything)


@pytest.mark.requirement("a:H-10", "a:H-11", "a:H-16", "a:X3-37", "a:D-42")
def test_librdkafka_fences_an_older_instance(cluster: LocalCluster) -> None:
    topic = make_topic(cluster, "librdkafka-fenced", PARTITIONS)
    old = confluent_producer(cluster, "librdkafka-2")
    old.begin_transaction()
    produce(old, topic, b"lost")
    old.flush(DEADLINE_S)
    new = confluent_producer(cluster, "librdkafka-2")
    error = error_of(lambda: old.commit_transaction(DEADLINE_S))
    assert error.fatal(), error
    assert error.code() == KafkaError._FENCED, error
    new.begin_transaction()
    produce(new, topic, b"kept")
    new.commit_transaction(DEADLINE_S)
    until_shown(cluster, topic, [b"kept"], [b"kept", b"lost"])


@pytest.mark.requirement("a:H-22", "a:T-20", "a:X3-38")
def test_librdkafka_hears_of_a_timeout_and_the_next_instance_goes_on(cluster: LocalCluster) -> None:
    """It knows the older protocol only, in which the epoch after a timeout is that of a newer instance."""
    topic = make_topic(cluster, "librdkafka-slow", PARTITIONS)
    producer = confluent_producer(cluster, "librdkafka-3", **{"transaction.timeout.ms": 1_500})
    producer.begin_transaction()
    produce(producer, topic, b"lost")
    producer.flush(DEADLINE_S)
    with confluent_consumer(cluster, COMMITTED) as consumer:
        consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
        with tidelog.Producer(cluster.bootstrap) as other:
            other.send(topic, b"behind", partition=0).result(DEADLINE_S)
        with tidelog.Admin(cluster.bootstrap) as admin:
            until(lambda: admin.describe_transaction("librdkafka-3").state == "CompleteAbort", "the abort")
        seen: list[bytes] = []

        def is_read() -> bool:
            message = consumer.poll(0.5)
            if message is not None and message.error() is None:
                seen.append(message.value())
            return bool(seen)

        until(is_read, "what stands behind the transaction", timeout_s=DEADLINE_S)
        assert seen == [b"behind"]
    error = error_of(lambda: producer.commit_transaction(DEADLINE_S))
    assert error.fatal() or error.txn_requires_abort(), error
    producer = confluent_producer(cluster, "librdkafka-3")
    producer.begin_transaction()
    produce(producer, topic, b"kept")
    producer.commit_transaction(DEADLINE_S)
    until_shown(cluster, topic, [b"behind", b"kept"], [b"behind", b"kept", b"lost"])


@pytest.mark.requirement("a:H-14", "a:H-17")
def test_librdkafka_commits_offsets_of_a_group_with_its_records(cluster: LocalCluster) -> None:
    source = make_topic(cluster, "librdkafka-source", PARTITIONS)
    target = make_topic(cluster, "librdkafka-target", PARTITIONS)
    group = "librdkafka-group"
    with tidelog.Producer(cluster.bootstrap) as writer:
        for number in range(30):
            writer.send(source, b"%02d" % number, partition=number % PARTITIONS)
        writer.flush(DEADLINE_S)
    producer = confluent_producer(cluster, "librdkafka-4")
    with confluent_consumer(cluster, COMMITTED, **{"group.id": group, "enable.partition.eof": False}) as consumer:
        consumer.subscribe([source])
        seen: list[Any] = []
        producer.begin_transaction()

        def is_read() -> bool:
            seen.extend(message for message in consumer.consume(30, 0.5) if message.error() is None)
            return len(seen) >= 30

        until(is_read, "all of the source", timeout_s=DEADLINE_S)
        for message in seen:
            producer.produce(target, message.value(), partition=message.partition())
        places = consumer.position(consumer.assignment())
        producer.send_offsets_to_transaction(places, consumer.consumer_group_metadata(), DEADLINE_S)
        until_committed(cluster, group, {})
        producer.commit_transaction(DEADLINE_S)
    until_committed(cluster, group, dict.fromkeys(range(PARTITIONS), 10))
    wanted = [b"%02d" % number for number in range(30)]
    until_shown(cluster, target, wanted, wanted)


# aiokafka.


def aiokafka_producer(cluster: LocalCluster, transactional_id: str) -> Any:
    return aiokafka.AIOKafkaProducer(bootstrap_servers=cluster.kafka_bootstrap, transactional_id=transactional_id)


def test_aiokafka_commits_aborts_and_is_fenced(cluster: LocalCluster) -> None:
    topic = make_topic(cluster, "aiokafka-transactions", PARTITIONS)
    asyncio.run(_commit_abort_and_fence(cluster, topic))
    kept = [*(b"kept-%d" % number for number in range(PARTITIONS)), b"newer"]
    until_shown(cluster, topic, kept, sorted([*kept, b"aborted", b"open"]))


async def _commit_abort_and_fence(cluster: LocalCluster, topic: str) -> None:
    producer = aiokafka_producer(cluster, "aiokafka-1")
    newer = aiokafka_producer(cluster, "aiokafka-1")
    try:
        async with asyncio.timeout(3 * DEADLINE_S):
            await producer.start()
            async with producer.transaction():
                for number in range(PARTITIONS):
                    await producer.send(topic, b"kept-%d" % number, partition=number)
            with contextlib.suppress(LookupError):
                async with producer.transaction():
                    await producer.send_and_wait(topic, b"aborted", partition=0)
                    raise LookupError
            await producer.begin_transaction()
            await producer.send_and_wait(topic, b"open", partition=1)
            await newer.start()
            with pytest.raises(aiokafka.errors.ProducerFenced):
                await producer.commit_transaction()
            async with newer.transaction():
                await newer.send(topic, b"newer", partition=2)
    finally:
        await newer.stop()
        with contextlib.suppress(aiokafka.errors.KafkaError):
            await producer.stop()


def test_aiokafka_commits_offsets_of_a_group_and_reads_committed_records(cluster: LocalCluster) -> None:
    source = make_topic(cluster, "aiokafka-source", PARTITIONS)
    target = make_topic(cluster, "aiokafka-target", PARTITIONS)
    asyncio.run(_consume_and_produce(cluster, source, target))
    wanted = [b"%d" % number for number in range(6)]
    until_shown(cluster, target, wanted, wanted)
    # The first six were aborted, and each transaction ends with a marker.
    until_committed(cluster, "aiokafka-group", dict.fromkeys(range(PARTITIONS), 5))


def until_committed(cluster: LocalCluster, group: str, wanted: dict[int, int]) -> None:
    """Offsets of a transaction are visible when its markers are written, shortly after the commit."""
    with tidelog.Admin(cluster.bootstrap) as admin:

        def committed() -> dict[int, int | None]:
            return {place.partition: row.committed.offset for place, row in admin.group_offsets(group).items()}

        until(lambda: committed() == wanted, f"the offsets of {group}")


async def _consume_and_produce(cluster: LocalCluster, source: str, target: str) -> None:
    group = "aiokafka-group"
    producer = aiokafka_producer(cluster, "aiokafka-2")
    consumer = aiokafka.AIOKafkaConsumer(
        source,
        bootstrap_servers=cluster.kafka_bootstrap,
        isolation_level=COMMITTED,
        group_id=group,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    try:
        async with asyncio.timeout(3 * DEADLINE_S):
            await producer.start()
            await consumer.start()
            for is_commit in (False, True):
                await producer.begin_transaction()
                for number in range(6):
                    await producer.send(source, b"%d" % number, partition=number % PARTITIONS)
                await (producer.commit_transaction() if is_commit else producer.abort_transaction())
            read: list[bytes] = []
            offsets: dict[Any, int] = {}
            async with producer.transaction():
                while len(read) < 6:
                    message = await consumer.getone()
                    read.append(message.value)
                    offsets[aiokafka.TopicPartition(message.topic, message.partition)] = message.offset + 1
                    await producer.send(target, message.value, partition=message.partition)
                await producer.send_offsets_to_transaction(offsets, group)
            assert sorted(read) == [b"%d" % number for number in range(6)]
    finally:
        await consumer.stop()
        await producer.stop()


# kafka-python.


def test_kafka_python_commits_and_aborts(cluster: LocalCluster) -> None:
    topic = make_topic(cluster, "kafka-python-transactions", PARTITIONS)
    producer = kafka.KafkaProducer(bootstrap_servers=cluster.kafka_bootstrap, transactional_id="kafka-python-1")
    try:
        producer.init_transactions()
        for number in range(4):
            producer.begin_transaction()
            for part in range(PARTITIONS):
                producer.send(topic, b"%d-%d" % (number, part), partition=part)
            if number % 2:
                producer.flush(DEADLINE_S)
                producer.abort_transaction()
            else:
                producer.commit_transaction()
    finally:
        producer.close(DEADLINE_S)
    everything = sorted(b"%d-%d" % (number, part) for number in range(4) for part in range(PARTITIONS))
    committed = [value for value in everything if int(value.split(b"-")[0]) % 2 == 0]
    until_shown(cluster, topic, committed, everything)
