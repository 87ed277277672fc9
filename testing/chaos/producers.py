"""Idempotent producers with acks=all, each a client behind the same face, and the loop that numbers and notes records.

A producer numbers the records of each partition 0, 1, 2, ... and names the partition itself: so the order is known.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol

from tidelog.testing.chaos.history import WriterLog, now_ms
from tidelog.testing.chaos.worker_spec import AIOKAFKA, TIDELOG, WorkerSpec
from tidelog.verify import value_of

TICK_S = 0.05
WAITING_MAX = 2_000
"""Records without an answer; then the producer waits. librdkafka and aiokafka are never at their own limits so."""
DELIVERY_MS = 300_000
"""Longer than any fault: a record that fails is worth a look."""

Delivered = Callable[[int, object], None]
"""(offset, error): one of them counts, the error if there is one."""


class CommandError(Exception):
    """The client has not taken the record: nothing was sent."""


class ProducerClient(Protocol):
    waiting: int

    def send(self, topic: str, partition: int, key: bytes, value: bytes, delivered: Delivered) -> None:
        """Raises `CommandError`."""
        ...

    def wait(self, seconds: float) -> None:
        """Time passes, and deliveries are reported."""
        ...

    def close(self) -> None:
        """Flushes."""
        ...


def run_producer(spec: WorkerSpec, is_over: threading.Event) -> None:
    log = WriterLog(Path(spec.history), spec.name)
    client = open_producer(spec)
    numbers = {(topic, partition): 0 for topic, count in spec.topics.items() for partition in range(count)}
    places = cycle(list(numbers))
    began_s, sent = time.monotonic(), 0
    while not is_over.is_set():
        log.alive()
        while sent < (time.monotonic() - began_s) * spec.rate and client.waiting < WAITING_MAX:
            topic, partition = next(places)
            number = numbers[topic, partition]
            numbers[topic, partition] += 1
            _send(spec, log, client, topic, partition, number)
            sent += 1
        client.wait(TICK_S)
    client.close()
    log.close()


def _send(spec: WorkerSpec, log: WriterLog, client: ProducerClient, topic: str, partition: int, number: int) -> None:
    began_ms = now_ms()

    def delivered(offset: int, error: object) -> None:
        if error is None:
            log.acked(topic, partition, number, offset, began_ms=began_ms)
        else:
            log.failed(topic, partition, number, error, was_sent=True)

    log.sent(topic, partition, number)
    try:
        key = f"{spec.name}/{partition}".encode()
        client.send(topic, partition, key, value_of(spec.name, partition, number), delivered)
    except CommandError as error:
        log.failed(topic, partition, number, error, was_sent=False)


def open_producer(spec: WorkerSpec) -> ProducerClient:
    if spec.client == TIDELOG:
        return TidelogProducer(spec)
    if spec.client == AIOKAFKA:
        return AioKafkaProducer(spec)
    return ConfluentProducer(spec)


class TidelogProducer:
    def __init__(self, spec: WorkerSpec) -> None:
        import tidelog
        from tidelog.model.errors import TidelogError

        self._refused = TidelogError
        self._producer = tidelog.Producer(spec.bootstrap, delivery_timeout_ms=DELIVERY_MS, linger_ms=5)
        self._lock = threading.Lock()
        self.waiting = 0

    def send(self, topic: str, partition: int, key: bytes, value: bytes, delivered: Delivered) -> None:
        def report(error: Exception | None, metadata: Any) -> None:
            delivered(-1 if error is not None else metadata.offset, error)
            with self._lock:
                self.waiting -= 1

        with self._lock:
            self.waiting += 1
        try:
            self._producer.send(topic, value, key, partition=partition, on_delivery=report)
        except self._refused as error:
            with self._lock:
                self.waiting -= 1
            raise CommandError(str(error)) from error

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        self._producer.close()


class ConfluentProducer:
    def __init__(self, spec: WorkerSpec) -> None:
        import confluent_kafka

        config = {
            "bootstrap.servers": spec.bootstrap,
            "client.id": spec.name,
            "enable.idempotence": True,
            "acks": "all",
            "message.timeout.ms": DELIVERY_MS,
            "linger.ms": 5,
            "log_level": 3,
        }
        self._producer = confluent_kafka.Producer(config)
        self.waiting = 0

    def send(self, topic: str, partition: int, key: bytes, value: bytes, delivered: Delivered) -> None:
        def report(error: Any, message: Any) -> None:
            self.waiting -= 1
            delivered(-1 if error is not None else message.offset(), error)

        try:
            self._producer.produce(topic, value, key, partition, on_delivery=report)
        except BufferError as error:
            raise CommandError(str(error)) from error
        self.waiting += 1

    def wait(self, seconds: float) -> None:
        self._producer.poll(seconds)

    def close(self) -> None:
        self._producer.flush()


class AioKafkaProducer:
    def __init__(self, spec: WorkerSpec) -> None:
        self._runner = asyncio.Runner()
        self._producer = self._runner.run(self._start(spec))
        self.waiting = 0

    async def _start(self, spec: WorkerSpec) -> Any:
        import aiokafka

        producer = aiokafka.AIOKafkaProducer(
            bootstrap_servers=spec.bootstrap,
            client_id=spec.name,
            enable_idempotence=True,
            acks="all",
            request_timeout_ms=DELIVERY_MS,
            linger_ms=5,
        )
        await producer.start()
        return producer

    def send(self, topic: str, partition: int, key: bytes, value: bytes, delivered: Delivered) -> None:
        def report(future: asyncio.Future[Any]) -> None:
            self.waiting -= 1
            error = future.exception()
            delivered(-1 if error is not None else future.result().offset, error)

        future = self._runner.run(self._producer.send(topic, value, key, partition=partition))
        self.waiting += 1
        future.add_done_callback(report)

    def wait(self, seconds: float) -> None:
        self._runner.run(asyncio.sleep(seconds))

    def close(self) -> None:
        self._runner.run(self._producer.stop())
        self._runner.close()
