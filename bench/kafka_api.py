"""The Kafka API compared with the gRPC API: one broker in its own process, one replica, the same service behind both.

- Small requests (one record of 100 bytes): requests per second with `IN_FLIGHT` in flight on one connection, compared
  with as many concurrent unary gRPC calls on one channel (or fewer, if that is faster); acks=all on both sides, synced
  (the default) and with `flush.mode=page-cache`.
- 1 MiB batches, produced and fetched: processor time of the broker, compared with gRPC's. Memory was used before
  (`brokers_throughput`): fresh pages cost both sides the same, and more than all the rest.
- Stages of a small produce request (`kafka_stages`), in a separate broker.
- confluent-kafka with its defaults and records of 1 KB: no target.

The clients are minimal but check every response (`kafka_load`). Sides alternate, and the best round of each counts.
Processor time depends less on other load than rates do: so the load is reported too, and the target of the rate also
applies to the processor time per request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import uvloop
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from bench.brokers_load import LIMIT_S, ROOT, local_cluster, made_batch
from bench.brokers_throughput import touch_memory
from bench.harness import Result, at_least, at_most
from bench.kafka_load import (
    GrpcCalls,
    KafkaSocket,
    Spent,
    grpc_fetch,
    grpc_produce,
    idle_part,
    kafka_fetch,
    kafka_produce,
    measured,
)
from bench.kafka_stages import STAGES
from tidelog.log.batch import read_header
from tidelog.server.local_nodes import Layout, LocalNodes, Ports, free_ports
from tidelog.testing import LocalCluster

ROUNDS, SMALL_ROUNDS = 8, 15
"""Small rounds are short, so that some are undisturbed on a busy machine."""
IN_FLIGHT, CALLS_AT_ONCE = 100, (16, 100)
SMALL, SMALL_CALLS = 2_000, 400
BATCH_BYTES, BATCHES, BATCHES_IN_FLIGHT, FETCHES_IN_FLIGHT = 1 << 20, 64, 8, 4
MIB = 1 << 20
RECORDS, RECORD_BYTES = 60_000, 1_000
ACKS_ALL = -1
RATE_TARGET, COST_TARGET = 5.0, 0.5
MODES = {"synced": "sync", "cached": "page-cache"}
"""`flush.mode` of each topic."""


def make_topics(bootstrap: str, **modes: str) -> None:
    """Create topics with one partition and one replica; return when each has accepted a record."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    wanted = [NewTopic(name, 1, 1, config={"flush.mode": mode}) for name, mode in modes.items()]
    for made in admin.create_topics(wanted).values():
        made.result(LIMIT_S)
    producer = Producer({"bootstrap.servers": bootstrap})
    for name in modes:
        producer.produce(name, b"first")
    left = producer.flush(LIMIT_S)
    assert left == 0, f"{left} topics have taken no record in {LIMIT_S} s"


class Sides:
    """A connection to each API, and the cost of each round by contestant."""

    def __init__(self, pid: int, kafka_port: int, grpc_port: int) -> None:
        self._pid = pid
        self.idle = idle_part(pid)
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self.kafka = KafkaSocket(kafka_port)
        self.grpc = self._runner.run(_connect(grpc_port))
        self.spent: dict[str, list[Spent]] = {}

    def close(self) -> None:
        self.kafka.close()
        self._runner.run(self.grpc.close())
        self._runner.close()

    def run(self, job: Any) -> Any:
        return self._runner.run(job)

    def call(self, request: bytes, count: int, at_once: int) -> None:
        """Produce over gRPC."""
        self._runner.run(self.grpc.produce(request, count, at_once))

    def take_turn(self, name: str, requests: int, work: Callable[[], object]) -> None:
        self.spent.setdefault(name, []).append(measured(self._pid, requests, work, idle=self.idle))

    def rate(self, *names: str) -> float:
        return max(spent.rate for name in names for spent in self.spent[name])

    def broker_us(self, *names: str) -> float:
        return min(spent.broker_s / spent.requests for name in names for spent in self.spent[name]) * 1e6

    def client_us(self, *names: str) -> float:
        return min(spent.client_s / spent.requests for name in names for spent in self.spent[name]) * 1e6


async def _connect(port: int) -> GrpcCalls:
    return GrpcCalls(port)


# Small requests.


def measure_small(sides: Sides, topic: str) -> Iterator[Result]:
    batch = made_batch(1, record_bytes=100)
    frames = kafka_produce(topic, 0, batch, ACKS_ALL, IN_FLIGHT)
    call = grpc_produce(topic, 0, batch, ACKS_ALL)
    ours, theirs = f"{topic} small", [f"{topic} small, {at_once} calls" for at_once in CALLS_AT_ONCE]
    for _ in range(SMALL_ROUNDS):
        sides.take_turn(ours, SMALL, lambda: sides.kafka.produce(frames, SMALL, IN_FLIGHT, topic))
        for name, at_once in zip(theirs, CALLS_AT_ONCE, strict=True):
            sides.take_turn(name, SMALL_CALLS, partial(sides.call, call, SMALL_CALLS, at_once))
    rate, other = sides.rate(ours), sides.rate(*theirs)
    what = f"Kafka API, small produce requests, {topic}"
    yield at_least(
        what, rate, "requests/s", target=RATE_TARGET, ratio=rate / other, anchor=f"unary gRPC, {other:,.0f}/s"
    )
    cost, other = sides.broker_us(ours), sides.broker_us(*theirs)
    yield at_most(
        f"{what}: broker",
        cost,
        "us each",
        target=1 / RATE_TARGET,
        ratio=cost / other,
        anchor=f"unary gRPC, {other:,.0f} us",
    )
    cost, other = sides.client_us(ours), sides.client_us(*theirs)
    yield Result(f"{what}: client", cost, "us each", cost / other, f"unary gRPC, {other:,.0f} us")


# Large batches.


def measure_large(sides: Sides, topic: str) -> Iterator[Result]:
    batch = made_batch(BATCH_BYTES, record_bytes=RECORD_BYTES)
    mib = len(batch) / MIB
    frames = kafka_produce(topic, 0, batch, ACKS_ALL, BATCHES_IN_FLIGHT)
    call = grpc_produce(topic, 0, batch, ACKS_ALL)
    ours, theirs = f"{topic} large", f"{topic} large, gRPC"
    for _ in range(ROUNDS):
        touch_memory(BATCHES * len(batch))
        sides.take_turn(ours, BATCHES, lambda: sides.kafka.produce(frames, BATCHES, BATCHES_IN_FLIGHT, topic))
        touch_memory(BATCHES * len(batch))
        sides.take_turn(theirs, BATCHES, partial(sides.call, call, BATCHES, BATCHES_IN_FLIGHT))
    yield _cost(f"Kafka API, 1 MiB produced, {topic}: broker", sides, ours, theirs, mib)


def measure_fetch(sides: Sides, topic: str) -> Iterator[Result]:
    """Measure a topic that has one first record and large batches only."""
    batch = made_batch(BATCH_BYTES, record_bytes=RECORD_BYTES)
    records = read_header(batch).last_offset_delta + 1
    sides.kafka.produce(kafka_produce(topic, 0, batch, ACKS_ALL, 1), BATCHES, 1, topic)
    offsets = [1 + number * records for number in range(BATCHES)]
    frames, calls = kafka_fetch(topic, 0, offsets), [grpc_fetch(topic, 0, offset) for offset in offsets]
    ours, theirs = f"{topic} fetch", f"{topic} fetch, gRPC"
    for _ in range(ROUNDS):
        sides.take_turn(ours, BATCHES, lambda: sides.kafka.fetch(frames, BATCHES, FETCHES_IN_FLIGHT))
        sides.take_turn(theirs, BATCHES, lambda: sides.run(sides.grpc.fetch(calls, BATCHES, FETCHES_IN_FLIGHT)))
    yield _cost("Kafka API, 1 MiB fetched: broker", sides, ours, theirs, len(batch) / MIB)


def _cost(name: str, sides: Sides, ours: str, theirs: str, mib: float) -> Result:
    cost_ms, other_ms = (sides.broker_us(one) / 1000 / mib for one in (ours, theirs))
    return at_most(
        name, cost_ms, "ms", target=COST_TARGET, ratio=cost_ms / other_ms, anchor=f"unary gRPC, {other_ms:.2f} ms"
    )


# Stages.


@contextlib.contextmanager
def staged_node(out: Path) -> Iterator[LocalNodes]:
    with tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="bench-stages-") as path:
        nodes = LocalNodes(Path(path), Layout.fresh([Ports(*free_ports(4))]))
        nodes.prepare()
        command = [sys.executable, "-m", "bench.kafka_stages", "node.toml", str(out)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with (nodes.path(1) / "node.log").open("ab") as log:
            nodes.processes[1] = subprocess.Popen(
                command, cwd=nodes.path(1), env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        try:
            nodes.wait_ready()
            yield nodes
        finally:
            nodes.stop_all()


def stage_seconds(pid: int, out: Path) -> dict[str, float]:
    """Return the seconds of each stage since the last call."""
    out.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR1)
    deadline_s = time.monotonic() + LIMIT_S
    while not out.exists():
        assert time.monotonic() < deadline_s, "the node does not report its stages"
        time.sleep(0.01)
    found: dict[str, float] = json.loads(out.read_text(encoding="utf-8"))
    return found


def measure_stages() -> Iterator[Result]:
    topic = "synced"
    with tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="bench-stages-out-") as place:
        out = Path(place) / "stages.json"
        with staged_node(out) as nodes:
            make_topics(nodes.kafka_bootstrap, **MODES)
            pid = nodes.pid(1)
            connection = KafkaSocket(nodes.ports(1).kafka)
            frames = kafka_produce(topic, 0, made_batch(1, record_bytes=100), ACKS_ALL, IN_FLIGHT)
            rounds = []
            for _ in range(ROUNDS + 1):
                stage_seconds(pid, out)
                spent = measured(pid, SMALL, lambda: connection.produce(frames, SMALL, IN_FLIGHT, topic))
                rounds.append((spent.broker_s, stage_seconds(pid, out)))
            connection.close()
    total_s, stages = min(rounds[1:], key=lambda one: one[0])
    what = "Kafka API, time of a small produce request"
    yield Result(f"{what}, with clocks around its stages", total_s / SMALL * 1e6, "us")
    for stage in STAGES:
        yield Result(f"{what}: {stage}", stages[stage] / SMALL * 1e6, "us", stages[stage] / total_s, "all of it")
    rest_s = total_s - sum(stages.values())
    rest = "event loop, handler, sync, kernel's part of the socket"
    yield Result(f"{what}: {rest}", rest_s / SMALL * 1e6, "us", rest_s / total_s, "all of it")


# A client with its defaults.


def produce_records(bootstrap: str, topic: str) -> None:
    failed: list[Any] = []

    def delivered(error: Any, _message: Any) -> None:
        if error is not None:
            failed.append(error)

    producer = Producer({"bootstrap.servers": bootstrap})
    value = Random(RECORD_BYTES).randbytes(RECORD_BYTES)
    for _ in range(RECORDS):
        while True:
            try:
                producer.produce(topic, value, on_delivery=delivered)
                break
            except BufferError:
                producer.poll(0.1)
    left = producer.flush(LIMIT_S)
    assert left == 0, f"{left} records are not delivered in {LIMIT_S} s"
    assert not failed, f"{len(failed)} records have failed: {failed[0]}"


def consume_records(bootstrap: str, topic: str) -> None:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "bench", "enable.auto.commit": False})
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        read = 0
        while read < RECORDS:
            messages = consumer.consume(1_000, timeout=LIMIT_S)
            assert messages, f"no more than {read} of {RECORDS} records came in {LIMIT_S} s"
            for message in messages:
                if message.error() is not None:
                    raise KafkaException(message.error())
            read += len(messages)
    finally:
        consumer.close()


def measure_peer(pid: int, bootstrap: str) -> Iterator[Result]:
    make_topics(bootstrap, peer="sync")
    megabytes = RECORDS * RECORD_BYTES / 1e6
    for what, work in (("produces", produce_records), ("consumes", consume_records)):
        rounds = [measured(pid, RECORDS, partial(work, bootstrap, "peer")) for _ in range(3)]
        best = min(rounds, key=lambda one: one.wall_s)
        cost_ms = min(one.broker_s for one in rounds) * 1000 / megabytes
        name = f"Kafka API, confluent-kafka {what} records of 1 KB"
        yield Result(name, megabytes / best.wall_s, "MB/s")
        yield Result(f"{name}: broker", cost_ms, "ms/MB")


def measure(cluster: LocalCluster) -> Iterator[Result]:
    pid, ports = cluster.pid(1), cluster.ports(1)
    make_topics(cluster.kafka_bootstrap, **MODES, stored="sync")
    sides = Sides(pid, ports.kafka, ports.grpc)
    yield Result("Kafka API, a broker without requests (not counted below)", sides.idle * 100, "% of a core")
    try:
        for topic in MODES:
            yield from measure_small(sides, topic)
        for topic in MODES:
            yield from measure_large(sides, topic)
        yield from measure_fetch(sides, "stored")
    finally:
        sides.close()
    yield from measure_peer(pid, cluster.kafka_bootstrap)


def run() -> Iterator[Result]:
    loads = [os.getloadavg()[0]]
    with local_cluster(1) as cluster:
        for result in measure(cluster):
            loads.append(os.getloadavg()[0])
            yield result
    yield from measure_stages()
    loads.append(os.getloadavg()[0])
    yield Result("Kafka API, load of the machine meanwhile, least", min(loads), "processes")
    yield Result("Kafka API, load of the machine meanwhile, most", max(loads), "processes")
