"""Tidelog beside Kafka: three nodes each, the same client (confluent-kafka), alternating rounds: `make bench-kafka`.

Tidelog acknowledges after a sync of every in-sync replica, its default. Kafka runs twice: with its defaults, which
acknowledge from the page cache, and with `flush.messages=1`, which syncs each append. Both clusters run all the time; a
round uses one of them. The virtual machines are warmed with `--warm-mb` of traffic first.

    produce      MB/s of 1 KB records with acks=all until the last ack, and CPU seconds of all nodes per GB
    catch up     MB/s of one consumer that reads everything from the start, and the same CPU
    ack          ms from produce() to the delivery callback of records at 200/s, median and 99th percentile
    failover     ms without an ack after kill -9 of the leader of the only partition, at 200/s
    start        s from the first process to a client that sees all nodes
    memory       MB resident, all nodes, at the end
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from bench.brokers_load import cpu_s, resident_bytes
from bench.kafka_cluster import KafkaCluster
from tidelog.testing import LocalCluster

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "bench-kafka.json"
PARTITIONS = 6
VALUE = bytes(range(256)) * 4
RATE_PER_S = 200
LIMIT_S = 120.0
MB = 1_000_000


class Cluster(Protocol):
    @property
    def kafka_bootstrap(self) -> str: ...

    def start_all(self) -> None: ...

    def kill(self, number: int) -> None: ...

    def start(self, number: int) -> None: ...


@dataclass(slots=True)
class Side:
    """One contestant: a cluster, the settings of its topics, and its figures by name, one for each round."""

    name: str
    cluster: Cluster
    pids: Callable[[], list[int]]
    configs: dict[str, str]
    figures: dict[str, list[float]] = field(default_factory=dict)

    def note(self, name: str, value: float) -> None:
        self.figures.setdefault(name, []).append(value)

    def cpu_s(self) -> float:
        return sum(map(cpu_s, self.pids()))

    def create(self, topic: str, partitions: int) -> None:
        admin = AdminClient({"bootstrap.servers": self.cluster.kafka_bootstrap, "log_level": 2})
        new = NewTopic(topic, partitions, 3, config={"min.insync.replicas": "2", **self.configs})
        for future in admin.create_topics([new]).values():
            future.result(30)

    def delete(self, topic: str) -> None:
        admin = AdminClient({"bootstrap.servers": self.cluster.kafka_bootstrap, "log_level": 2})
        for future in admin.delete_topics([topic]).values():
            future.result(30)

    def producer(self, **settings: object) -> Producer:
        return Producer({"bootstrap.servers": self.cluster.kafka_bootstrap, "log_level": 2, "acks": "all", **settings})


def produce(side: Side, topic: str, size_mb: int) -> tuple[float, float]:
    """Return (seconds, CPU seconds of all nodes) for `size_mb` of records until each is acknowledged."""
    failed: list[KafkaError] = []

    def delivered(error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            failed.append(error)

    producer = side.producer(**{"enable.idempotence": True, "queue.buffering.max.messages": 500_000})
    began_s, cpu = time.perf_counter(), side.cpu_s()
    for number in range(size_mb * MB // len(VALUE)):
        while True:
            try:
                producer.produce(topic, VALUE, on_delivery=delivered, partition=number % PARTITIONS)
                break
            except BufferError:
                producer.poll(0.05)
        if number % 1000 == 0:
            producer.poll(0)
    assert producer.flush(LIMIT_S) == 0, "every record is acknowledged in time"
    assert not failed, failed[0]
    return time.perf_counter() - began_s, side.cpu_s() - cpu


def catch_up(side: Side, topic: str, count: int) -> tuple[float, float]:
    """Return (seconds, CPU seconds of all nodes) until one consumer has read `count` records from the start."""
    consumer = Consumer(
        {
            "bootstrap.servers": side.cluster.kafka_bootstrap,
            "log_level": 2,
            "group.id": "bench",
            "enable.auto.commit": False,
        }
    )
    consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    began_s, cpu, left = time.perf_counter(), side.cpu_s(), count
    while left > 0:
        assert time.perf_counter() - began_s < LIMIT_S, "the consumer reads everything in time"
        messages = consumer.consume(10_000, 1.0)
        assert all(message.error() is None for message in messages)
        left -= len(messages)
    spent = time.perf_counter() - began_s, side.cpu_s() - cpu
    consumer.close()
    return spent


def paced(
    side: Side, topic: str, duration_s: float, at_half: Callable[[], None] | None = None
) -> list[tuple[float, float]]:
    """Produce `RATE_PER_S` for a time; return (sent, acknowledged) in seconds of each record. `at_half` runs once."""
    acknowledged: list[tuple[float, float]] = []
    producer = side.producer(**{"linger.ms": 0, "message.timeout.ms": int(LIMIT_S * 1000)})
    began_s = time.perf_counter()
    sent = 0
    while (now_s := time.perf_counter()) - began_s < duration_s:
        if at_half is not None and now_s - began_s > duration_s / 2:
            at_half()
            at_half = None
        if (now_s - began_s) * RATE_PER_S > sent:

            def delivered(error: KafkaError | None, _message: Message, sent_s: float = now_s) -> None:
                assert error is None, error
                acknowledged.append((sent_s, time.perf_counter()))

            producer.produce(topic, VALUE, on_delivery=delivered, partition=0)
            sent += 1
        producer.poll(0.0005)
    assert producer.flush(LIMIT_S) == 0, "every record is acknowledged in time"
    assert len(acknowledged) == sent, "every record is acknowledged"
    return acknowledged


def leader_of(side: Side, topic: str) -> int:
    metadata = AdminClient({"bootstrap.servers": side.cluster.kafka_bootstrap, "log_level": 2}).list_topics(
        topic, timeout=10
    )
    leader: int = metadata.topics[topic].partitions[0].leader
    return leader


def failover_ms(side: Side, topic: str) -> float:
    """Kill the leader of partition 0 under load; return the longest time without an ack after the kill."""
    killed: list[float] = []
    leader = leader_of(side, topic)

    def kill() -> None:
        killed.append(time.perf_counter())
        side.cluster.kill(leader)

    rows = paced(side, topic, 6.0, kill)
    side.cluster.start(leader)
    acks = [killed[0], *sorted(acked for _, acked in rows if acked > killed[0])]
    return max(after - before for before, after in pairwise(acks)) * 1000


def throughput_round(side: Side, topic: str, size_mb: int) -> None:
    side.create(topic, PARTITIONS)
    elapsed_s, cpu = produce(side, topic, size_mb)
    side.note("produce MB/s", size_mb / elapsed_s)
    side.note("produce CPU s/GB", cpu / size_mb * 1000)
    elapsed_s, cpu = catch_up(side, topic, size_mb * MB // len(VALUE))
    side.note("catch-up MB/s", size_mb / elapsed_s)
    side.note("catch-up CPU s/GB", cpu / size_mb * 1000)
    side.delete(topic)


def latency_round(side: Side, topic: str, duration_s: float) -> None:
    side.create(topic, 1)
    paced(side, topic, 1.0)
    ms = sorted((acked - sent) * 1000 for sent, acked in paced(side, topic, duration_s))
    side.note("ack p50 ms", ms[len(ms) // 2])
    side.note("ack p99 ms", ms[len(ms) * 99 // 100])
    side.delete(topic)


def failover_round(side: Side, topic: str) -> None:
    side.create(topic, 1)
    paced(side, topic, 1.0)
    side.note("failover ms", failover_ms(side, topic))
    side.delete(topic)


def run_rounds(sides: list[Side], options: argparse.Namespace) -> None:
    for side in sides:
        side.create("warm", PARTITIONS)
        for _ in range(max(1, options.warm_mb // 200)):
            produce(side, "warm", min(200, options.warm_mb))
        catch_up(side, "warm", min(200, options.warm_mb) * MB // len(VALUE))
        side.delete("warm")
        progress(f"{side.name}: warm")
    for number in range(options.rounds):
        for side in sides if number % 2 == 0 else sides[::-1]:
            throughput_round(side, f"throughput-{number}", options.round_mb)
            latency_round(side, f"latency-{number}", options.latency_s)
            progress(
                f"{side.name}: round {number + 1}: " + ", ".join(f"{k} {v[-1]:.2f}" for k, v in side.figures.items())
            )
    for number in range(options.failovers):
        for side in sides:
            failover_round(side, f"failover-{number}")
            progress(f"{side.name}: failover {side.figures['failover ms'][-1]:.0f} ms")
    for side in sides:
        side.note("memory MB", sum(map(resident_bytes, side.pids())) / MB)


def timed_start(side: Side) -> None:
    began_s = time.perf_counter()
    side.cluster.start_all()
    side.note("start s", time.perf_counter() - began_s)


def rows_of(ours: Side, theirs: list[Side]) -> Iterator[dict[str, object]]:
    """One row for each figure: the median and the spread of each side, and ours as a ratio of each of theirs."""
    for name, values in ours.figures.items():
        row: dict[str, object] = {"figure": name}
        for side in (ours, *theirs):
            known = side.figures.get(name, [])
            row[side.name] = (
                {"median": statistics.median(known), "min": min(known), "max": max(known)} if known else None
            )
        for side in theirs:
            known = side.figures.get(name, [])
            row[f"ratio to {side.name}"] = statistics.median(values) / statistics.median(known) if known else None
        yield row


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def cell(value: object) -> str:
    match value:
        case {"median": float(middle), "min": float(low), "max": float(high)}:
            return f"{middle:.3g} ({low:.3g} to {high:.3g})"
        case float(ratio):
            return f"{ratio:.2f}x"
        case None:
            return "-"
    return str(value)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.against_kafka", description="Tidelog beside Kafka.")
    parser.add_argument("--warm-mb", type=int, default=2_000, help="traffic before the first round, each side")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--round-mb", type=int, default=200)
    parser.add_argument("--latency-s", type=float, default=10.0)
    parser.add_argument("--failovers", type=int, default=3)
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        tidelog = stack.enter_context(LocalCluster(nodes=3, start=False))
        kafka = stack.enter_context(KafkaCluster(3))
        ours = Side("Tidelog, synced", tidelog, lambda: [tidelog.pid(number) for number in (1, 2, 3)], {})
        cached = Side("Kafka", kafka, lambda: kafka.pids, {})
        synced = Side("Kafka, flush.messages=1", kafka, lambda: kafka.pids, {"flush.messages": "1"})
        timed_start(ours)
        timed_start(cached)
        run_rounds([ours, cached, synced], options)
        rows = list(rows_of(ours, [cached, synced]))
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"options": vars(options), "rows": rows}, indent=2) + "\n", encoding="utf-8")
    print(
        f"Python {platform.python_version()}, 1 KB records, {PARTITIONS} partitions, 3 replicas, median (min to max)\n"
    )
    print("| " + " | ".join(rows[0]) + " |\n|" + " --- |" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(map(cell, row.values())) + " |")
    print(f"\nwritten to {RESULTS.relative_to(ROOT)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
