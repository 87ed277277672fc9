"""Consumer throughput: `tidelog.Consumer` and confluent-kafka, 100-byte records, both from memory.

Ours reads from a broker process over gRPC. Theirs reads from librdkafka's mock cluster, which runs in C in the client's
process and was filled by its own producer: the minimum that a Kafka broker could cost. That cluster keeps 5 MiB per
partition, hence four partitions and no more records. Both access each record's value, as any program would. The clock
runs from the first record to the last; each round has a new consumer.

- iteration: one record at a time; theirs by `poll` and, faster, by `consume` of many;
- columns: `poll_arrow` against their `consume`, their fastest call.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

from confluent_kafka import Consumer as TheirConsumer
from confluent_kafka import Producer as TheirProducer
from confluent_kafka import TopicPartition as TheirPartition

from bench.brokers_load import client_of, local_cluster, make_topic, run_loop
from bench.harness import Result, at_least
from tidelog.client.consumer.threaded import Consumer
from tidelog.client.producer.writer import Writer
from tidelog.client.record import TopicPartition
from tidelog.log.batch import encode_columns
from tidelog.testing import LocalCluster

PARTITIONS = 4
RECORDS = PARTITIONS * 40_000
VALUE = b"." * 100
BATCH_RECORDS = 5_000
ROUNDS = 5
TOPIC = "consumed"
POLL = "confluent-kafka, poll"
CONSUME = "confluent-kafka, consume(10,000)"


def fill_ours(cluster: LocalCluster) -> None:
    async def fill() -> None:
        async with client_of(cluster) as client:
            await make_topic(client, TOPIC, partitions=PARTITIONS, replicas=1)
            writer = Writer(client)
            batch = encode_columns([1_700_000_000_000] * BATCH_RECORDS, [None] * BATCH_RECORDS, [VALUE] * BATCH_RECORDS)
            for number in range(RECORDS // BATCH_RECORDS):
                await writer.send(TOPIC, number % PARTITIONS, batch)
            await writer.flush()
            await writer.close()

    run_loop(fill())


class Theirs:
    """A producer with a mock cluster, and consumers of it."""

    def __init__(self) -> None:
        quiet = {"log_level": 0}
        self._producer = TheirProducer(
            {
                "test.mock.num.brokers": 1,
                "queue.buffering.max.messages": 2 * RECORDS,
                "queue.buffering.max.kbytes": 1 << 20,
                "linger.ms": 50,
                "batch.num.messages": BATCH_RECORDS,
                **quiet,
            }
        )
        for number in range(RECORDS):
            self._producer.produce(TOPIC, VALUE, partition=number % PARTITIONS)
        assert self._producer.flush(60) == 0, "all of it is stored"
        (broker,) = self._producer.list_topics(timeout=10).brokers.values()
        self._settings = {
            "bootstrap.servers": f"{broker.host}:{broker.port}",
            "group.id": "bench",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",  # a record that is not there any more is no record that was read
            "queued.min.messages": 1_000_000,
            "fetch.message.max.bytes": 1 << 20,
            **quiet,
        }

    def consumer(self) -> TheirConsumer:
        made = TheirConsumer(self._settings)
        made.assign([TheirPartition(TOPIC, number, 0) for number in range(PARTITIONS)])
        return made


def their_poll(theirs: Theirs) -> float:
    consumer = theirs.consumer()
    first = consumer.poll(30)
    assert first is not None, "a record"
    started = time.perf_counter()
    size = len(first.value() or b"")
    poll = consumer.poll
    for _ in range(RECORDS - 1):
        size += len(poll(30).value())  # type: ignore[union-attr,arg-type]  # nothing more in the loop
    spent = time.perf_counter() - started
    assert size == RECORDS * len(VALUE), "all of them"
    consumer.close()
    return spent


def their_consume(theirs: Theirs) -> float:
    consumer = theirs.consumer()
    first = consumer.consume(1, 30)
    started = time.perf_counter()
    count = len(first)
    size = len(first[0].value() or b"")
    while count < RECORDS:
        for message in consumer.consume(min(10_000, RECORDS - count), 30):
            size += len(message.value() or b"")
            count += 1
    spent = time.perf_counter() - started
    assert size == RECORDS * len(VALUE), "all of them"
    consumer.close()
    return spent


def our_consumer(cluster: LocalCluster) -> Consumer[Any, Any]:
    made: Consumer[Any, Any] = Consumer(cluster.bootstrap, auto_offset_reset="earliest")
    made.assign([TopicPartition(TOPIC, number) for number in range(PARTITIONS)])
    return made


def our_iteration(cluster: LocalCluster) -> float:
    with our_consumer(cluster) as consumer:
        records = iter(consumer)
        size = len(next(records).value)
        started = time.perf_counter()
        left = RECORDS - 1
        for record in records:
            size += len(record.value)
            left -= 1
            if not left:
                break
        spent = time.perf_counter() - started
    assert size == RECORDS * len(VALUE), "all of them"
    return spent


def our_polls(cluster: LocalCluster) -> float:
    with our_consumer(cluster) as consumer:
        (first,) = consumer.poll(30, 1)
        size = len(first.value)
        started = time.perf_counter()
        count = 1
        while count < RECORDS:
            for record in consumer.poll(30, 10_000):
                size += len(record.value)
                count += 1
        spent = time.perf_counter() - started
    assert size == RECORDS * len(VALUE), "all of them"
    return spent


def our_columns(cluster: LocalCluster) -> float:
    with our_consumer(cluster) as consumer:
        first = consumer.poll_arrow(30, 1)
        started = time.perf_counter()
        count = first.num_rows
        size = first["value"].nbytes
        while count < RECORDS:
            table = consumer.poll_arrow(30)
            size += table["value"].nbytes
            count += table.num_rows
        spent = time.perf_counter() - started
    assert size >= RECORDS * len(VALUE), "all of them"
    return spent


def best_of(*works: Callable[[], float]) -> list[float]:
    """Return the best of each, in turn; they keep their own clocks. The garbage collector is off for all."""
    best = [float("inf")] * len(works)
    gc.collect()
    gc.disable()
    try:
        for _ in range(ROUNDS):
            for number, work in enumerate(works):
                best[number] = min(best[number], work())
    finally:
        gc.enable()
    return best


def run() -> Iterator[Result]:
    theirs = Theirs()
    with local_cluster(1) as cluster:
        fill_ours(cluster)
        polled, consumed, iterated, by_polls, columns = best_of(
            lambda: their_poll(theirs),
            lambda: their_consume(theirs),
            lambda: our_iteration(cluster),
            lambda: our_polls(cluster),
            lambda: our_columns(cluster),
        )
    unit = "records/s"
    yield Result("confluent-kafka, poll", RECORDS / polled, unit)
    yield Result("confluent-kafka, consume(10,000)", RECORDS / consumed, unit)
    faster = min(polled, consumed)
    yield at_least("iteration", RECORDS / iterated, unit, target=0.3, ratio=polled / iterated, anchor=POLL)
    yield at_least("iteration", RECORDS / iterated, unit, target=0.3, ratio=consumed / iterated, anchor=CONSUME)
    yield Result("poll(max_records=10,000)", RECORDS / by_polls, unit, consumed / by_polls, CONSUME)
    yield at_least("poll_arrow", RECORDS / columns, unit, target=2.0, ratio=faster / columns, anchor=CONSUME)
