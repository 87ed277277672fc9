"""How fast a program gets rid of its records: `tidelog.Producer` beside confluent-kafka, 100-byte records.

One by one, by the call that a program makes for each record, until the last call has returned ("queueing"): both
libraries send in the background meanwhile, confluent-kafka to the mock cluster that it has inside of itself, ours to a
broker process that syncs to disk. Room for all records on both sides, so that nobody waits for a broker. Bulk against
the same calls of confluent-kafka, which has no other; a call of this size wakes our IO thread only at its end, so that
its queueing figure has no sending in it. To all answered is told as well, without a target, and is what to compare
work by; though the one side has a disk and another process to answer, and the other has neither.

Contestants take turns; the best of many short rounds counts, so that a busy machine hits some of them, not all.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator

import pyarrow
from confluent_kafka import Producer as TheirProducer

from bench.brokers_load import client_of, local_cluster, make_topic, run_loop
from bench.harness import Result, at_least
from tidelog.client import hot
from tidelog.client.producer import Producer
from tidelog.testing import LocalCluster

RECORDS = 20_000
PARTITIONS = 4
"""As many as a topic of the mock cluster has."""
ROUNDS = 30
MEMORY = 1 << 30
TOPIC = "records"
QUEUED = "confluent-kafka, queueing"
DELIVERED = "confluent-kafka, to all answered"

Queue = Callable[[], object]


def timed(queue: Queue, finish: Queue) -> tuple[float, float]:
    """Seconds until all is queued, and until all is answered; no garbage is collected in between."""
    gc.collect()
    gc.disable()
    try:
        began_s = time.perf_counter()
        queue()
        queued_s = time.perf_counter() - began_s
        finish()
        return queued_s, time.perf_counter() - began_s
    finally:
        gc.enable()


def contest(*sides: tuple[Queue, Queue]) -> list[tuple[float, float]]:
    """The best of each, by turns."""
    best = [(float("inf"), float("inf"))] * len(sides)
    for _ in range(ROUNDS):
        for number, (queue, finish) in enumerate(sides):
            found = timed(queue, finish)
            best[number] = (min(best[number][0], found[0]), min(best[number][1], found[1]))
    return best


async def prepare(cluster: LocalCluster) -> None:
    async with client_of(cluster) as client:
        await make_topic(client, TOPIC, partitions=PARTITIONS, replicas=1)


def run() -> Iterator[Result]:
    values = [b"%06d" % row + b"." * 94 for row in range(RECORDS)]
    keys = [b"customer-%06d" % row for row in range(RECORDS)]
    table = pyarrow.table({"value": pyarrow.array(values, pyarrow.binary())})
    theirs = TheirProducer(
        {
            "bootstrap.servers": "mock",
            "test.mock.num.brokers": 3,
            "log_level": 0,
            "queue.buffering.max.messages": 10 * RECORDS,
            "queue.buffering.max.kbytes": MEMORY >> 10,
        }
    )
    with local_cluster(1) as cluster:
        run_loop(prepare(cluster))
        with Producer(cluster.bootstrap, buffer_memory=MEMORY) as ours:
            theirs.produce(TOPIC, b"first")
            theirs.flush()
            ours.send(TOPIC, b"first").result(30)

            def one_by_one(send: Callable[..., object]) -> Queue:
                def work() -> None:
                    for value in values:
                        send(TOPIC, value)

                return work

            def with_keys(send: Callable[..., object]) -> Queue:
                def work() -> None:
                    for value, key in zip(values, keys, strict=True):
                        send(TOPIC, value, key)

                return work

            plain, their_plain, keyed, their_keyed, bulk, bulk_keyed, columns = contest(
                (one_by_one(ours.send), ours.flush),
                (one_by_one(theirs.produce), theirs.flush),
                (with_keys(ours.send), ours.flush),
                (with_keys(theirs.produce), theirs.flush),
                (lambda: ours.send_many(TOPIC, values=values), ours.flush),
                (lambda: ours.send_many(TOPIC, values=values, keys=keys), ours.flush),
                (lambda: ours.send_many(TOPIC, table), ours.flush),
            )
            failed = ours.metrics()["records_failed"]
    assert failed == 0, f"{failed} records were not stored"
    form = "compiled" if hot.COMPILED else "interpreted"
    for name, mine, other, target in (
        (f"produce, one by one, {form}", plain, their_plain, 0.3),
        (f"produce, one by one with a key, {form}", keyed, their_keyed, 0.2),
        ("produce, send_many of lists", bulk, their_plain, 2.0),
        ("produce, send_many of lists with keys", bulk_keyed, their_keyed, 2.0),
        ("produce, send_many of a pyarrow table", columns, their_plain, 2.0),
    ):
        yield at_least(name, RECORDS / mine[0], "records/s", target=target, ratio=other[0] / mine[0], anchor=QUEUED)
        yield Result(f"{name}: to all answered", RECORDS / mine[1], "records/s", other[1] / mine[1], DELIVERED)
    yield Result("confluent-kafka, queueing", RECORDS / their_plain[0], "records/s")
    yield Result("confluent-kafka, queueing with a key", RECORDS / their_keyed[0], "records/s")
