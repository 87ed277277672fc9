"""Producer throughput: `tidelog.Producer` and confluent-kafka, 100-byte records.

One call per record, until the last call has returned ("queueing"): both libraries send in the background meanwhile,
confluent-kafka to its built-in mock cluster, ours to a broker process that syncs to disk. Both buffers hold all
records, so that no call waits for a broker. Bulk is compared with the same calls of confluent-kafka, which has no bulk
call; one of this size wakes our IO thread only at its end, so its queueing figure includes no sending. The time until
all are acknowledged is reported too, without a target; our side has a disk and another process in it.

Contestants alternate; the best of many short rounds counts, so that load on the machine affects some of them, not all.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator

import pyarrow
from confluent_kafka import Producer as TheirProducer

from bench.brokers_load import client_of, local_cluster, make_topic, run_loop
from bench.harness import Result, at_least
from tidelog.client.producer import fast_path
from tidelog.client.producer.threaded import Producer
from tidelog.testing import LocalCluster

RECORDS = 20_000
PARTITIONS = 4
"""As in a topic of the mock cluster."""
ROUNDS = 30
MEMORY = 1 << 30
TOPIC = "records"
QUEUED = "confluent-kafka, queueing"
DELIVERED = "confluent-kafka, to all answered"

Queue = Callable[[], object]


def timed(queue: Queue, finish: Queue) -> tuple[float, float]:
    """Return the seconds until all records are queued, and until all are acknowledged; garbage collection is off."""
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
    """Return the best of each, in turn."""
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
    form = "compiled" if fast_path.COMPILED else "interpreted"
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
