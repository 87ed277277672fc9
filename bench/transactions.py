"""Transactions against plain writes: throughput with a commit every 100 ms, and the latency of a commit.

Three nodes, 3 replicas, acks=all, synced; one client process.

- *Throughput*: two `tidelog.Producer`s of the same settings send the same records in turn, for `ROUND_S` each, as fast
  as the producer takes them. One has a transactional id and commits when 100 ms have passed since the transaction
  began; a round ends when its last record is acknowledged, or its last transaction is committed. Their buffers are
  small (`BUFFER_BYTES`): what a large one holds takes longer than 100 ms to be stored. The best round of each side
  counts, and the median over pairs of neighbouring rounds is shown.
- *Latency*: of a commit over 1, 10 and 100 partitions whose records are acknowledged; and of a whole transaction, one
  record for each partition, from begin to the end of its commit. "Back to back" is the second of two without a pause:
  it waits for the markers of the first. The anchor is an idempotent producer's acknowledgement of one record, measured
  in between. Each measurement begins when no transaction is being ended.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

from bench.brokers_load import client_of, local_cluster, make_topic, run_loop
from bench.harness import Result, at_least, at_most
from tidelog.client.admin.threaded import Admin
from tidelog.client.producer.threaded import Producer
from tidelog.testing import LocalCluster

COMMIT_EVERY_S = 0.1
ROUND_S = 0.6
ROUNDS = 30
BUFFER_BYTES = 2 << 20
SIZES = (100, 1000)
THROUGHPUT_PARTITIONS = 6
THROUGHPUT_TARGET = 0.8
COUNTS = (1, 10, 100)
REPEATS, WARM_UP = 50, 5
ONE_PARTITION_TARGET = 4.0
BURST = 200
"""Records between two looks at the clock."""
ANCHOR = "one plain ack"
VALUE = b"." * 100
LOOK_S = 0.005


async def prepare(cluster: LocalCluster) -> None:
    async with client_of(cluster) as client:
        await make_topic(client, "load", partitions=THROUGHPUT_PARTITIONS)
        for count in COUNTS:
            await make_topic(client, f"over-{count}", partitions=count)


# Throughput.


def send_for(producer: Producer, value: bytes, seconds: float) -> int:
    """Send records for this time; return how many."""
    end_s, sent = time.perf_counter() + seconds, 0
    while time.perf_counter() < end_s:
        for _ in range(BURST):
            producer.send("load", value)
        sent += BURST
    return sent


def plain_round(producer: Producer, value: bytes) -> float:
    """Return records a second."""
    began_s = time.perf_counter()
    sent = send_for(producer, value, ROUND_S)
    producer.flush()
    return sent / (time.perf_counter() - began_s)


def transactional_round(producer: Producer, value: bytes) -> tuple[float, float]:
    """Return records and commits a second."""
    began_s = time.perf_counter()
    sent = commits = 0
    while time.perf_counter() - began_s < ROUND_S:
        with producer.transaction():
            sent += send_for(producer, value, COMMIT_EVERY_S)
        commits += 1
    took_s = time.perf_counter() - began_s
    return sent / took_s, commits / took_s


def throughput(bootstrap: str, size: int) -> Iterator[Result]:
    value = bytes(size)
    plain_rates: list[float] = []
    rates: list[float] = []
    commits: list[float] = []
    with (
        Producer(bootstrap, buffer_memory=BUFFER_BYTES) as plain,
        Producer(bootstrap, buffer_memory=BUFFER_BYTES, transactional_id=f"bench-{size}") as transactional,
    ):
        plain_round(plain, value)
        transactional_round(transactional, value)
        for _ in range(ROUNDS):
            gc.collect()
            plain_rates.append(plain_round(plain, value))
            rate, commit_rate = transactional_round(transactional, value)
            rates.append(rate)
            commits.append(commit_rate)
        failed = sum(each.metrics()["records_failed"] for each in (plain, transactional))
    assert failed == 0, f"{failed} records were not stored"
    name = f"a commit every 100 ms, {size}-byte records"
    best = max(rates)
    yield Result(f"plain, {size}-byte records", max(plain_rates), "records/s")
    yield at_least(
        name, best, "records/s", target=THROUGHPUT_TARGET, ratio=best / max(plain_rates), anchor="plain producing"
    )
    pairs = [ours / theirs for ours, theirs in zip(rates, plain_rates, strict=True)]
    yield Result(f"{name}: median", median(rates), "records/s", median(pairs), "the round before it")
    yield Result(f"{name}: commits", median(commits), "commits/s")


# Latency.


@dataclass
class Times:
    """In seconds."""

    commits: list[float] = field(default_factory=list)
    transactions: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Of transactions right after another one."""


def timed(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def send_to_all(producer: Producer, count: int) -> None:
    producer.begin_transaction()
    for partition in range(count):
        producer.send(f"over-{count}", VALUE, partition=partition)


def whole(producer: Producer, count: int) -> None:
    send_to_all(producer, count)
    producer.commit_transaction()


def wait_until_quiet(admin: Admin) -> None:
    """Until all markers of all transactions are written."""
    while admin.list_transactions(states=("PrepareCommit", "PrepareAbort")).transactions:
        time.sleep(LOOK_S)


def measure(admin: Admin, producer: Producer, count: int, times: Times) -> None:
    wait_until_quiet(admin)
    send_to_all(producer, count)
    producer.flush()
    times.commits.append(timed(producer.commit_transaction))
    wait_until_quiet(admin)
    times.transactions.append(timed(lambda: whole(producer, count)))
    times.seconds.append(timed(lambda: whole(producer, count)))


def latency(bootstrap: str) -> Iterator[Result]:
    acks: list[float] = []
    times = {count: Times() for count in COUNTS}
    with ExitStack() as stack:
        admin = stack.enter_context(Admin(bootstrap))
        plain = stack.enter_context(Producer(bootstrap, linger_ms=0))
        owners = {
            count: stack.enter_context(Producer(bootstrap, linger_ms=0, transactional_id=f"over-{count}"))
            for count in COUNTS
        }
        for owner in owners.values():
            owner.init_transactions()
        for number in range(WARM_UP + REPEATS):
            if number == WARM_UP:
                acks.clear()
                times = {count: Times() for count in COUNTS}
            for count, owner in owners.items():
                wait_until_quiet(admin)
                acks.append(timed(lambda: plain.send("over-1", VALUE, partition=0).result(30)))
                measure(admin, owner, count, times[count])
    ack_ms = median(acks) * 1000
    yield Result("ack of one record, plain", ack_ms, "ms")
    yield from latencies("commit", {count: row.commits for count, row in times.items()}, ack_ms)
    yield from latencies("whole transaction", {count: row.transactions for count, row in times.items()}, ack_ms)
    yield from latencies(
        "whole transaction, back to back", {count: row.seconds for count, row in times.items()}, ack_ms
    )


def latencies(name: str, by_count: dict[int, list[float]], ack_ms: float) -> Iterator[Result]:
    one_ms = median(by_count[COUNTS[0]]) * 1000
    for count, times in by_count.items():
        value_ms = median(times) * 1000
        over = f"{name}, {count} partition{'s' if count > 1 else ''}"
        ratio = value_ms / ack_ms
        if count == 1 and name == "commit":
            yield at_most(over, value_ms, "ms", target=ONE_PARTITION_TARGET, ratio=ratio, anchor=ANCHOR)
        else:
            yield Result(over, value_ms, "ms", ratio, ANCHOR)
        if count > 1:
            growth = value_ms / one_ms
            yield at_most(f"{over}: growth", value_ms, "ms", target=count, ratio=growth, anchor="1 partition")


def run() -> Iterator[Result]:
    with local_cluster(3) as cluster:
        run_loop(prepare(cluster))
        yield from latency(cluster.bootstrap)
        for size in SIZES:
            yield from throughput(cluster.bootstrap, size)
