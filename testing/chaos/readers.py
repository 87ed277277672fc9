"""Members of groups, each a client behind the same face, and the loop that reads, notes and commits."""

from __future__ import annotations

import asyncio
import logging
import logging.handlers
import threading
import time
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tidelog.testing.chaos.history import MemberLog, Read, TopicPartition, now_ms
from tidelog.testing.chaos.worker_spec import AIOKAFKA, CONSUMER, TIDELOG, WorkerSpec

T = TypeVar("T")

POLL_S = 0.2
COMMIT_S = 1.0
RECORDS_MAX = 500
LOG_BYTES = 30 << 20
"""Of librdkafka's debug output, twice: the older half is dropped."""
DEBUG = "cgrp,topic,metadata,broker"


class ReaderClient(Protocol):
    def poll(self) -> list[Read]:
        """What came, within `POLL_S` if anything did."""
        ...

    def commit(self, offsets: dict[TopicPartition, int]) -> bool:
        """Whether it was stored. Errors that a program lives with are noted; others are raised."""
        ...

    def close(self) -> None: ...


def run_reader(spec: WorkerSpec, is_over: threading.Event) -> None:
    log = MemberLog(Path(spec.history), spec.name)
    client = open_reader(spec, log)
    committed_s = time.monotonic()
    committed: dict[TopicPartition, int] = {}
    while not is_over.is_set():
        log.alive()
        records = client.poll()
        if records:
            log.polled(records)
        if spec.commits_itself or time.monotonic() - committed_s < COMMIT_S:
            continue
        committed_s = time.monotonic()
        offsets = {one: at for one, at in log.positions.items() if committed.get(one) != at}
        began_ms = now_ms()
        if offsets and client.commit(offsets):
            log.committed(offsets, began_ms=began_ms)
            committed |= offsets
    client.close()
    log.close()


def open_reader(spec: WorkerSpec, log: MemberLog) -> ReaderClient:
    if spec.client == TIDELOG:
        return TidelogReader(spec, log)
    if spec.client == AIOKAFKA:
        return AioKafkaReader(spec, log)
    return ConfluentReader(spec, log)


class TidelogReader:
    def __init__(self, spec: WorkerSpec, log: MemberLog) -> None:
        import tidelog
        from tidelog.client.consumer.errors import CommitFailedError

        self._tidelog, self._refused, self._log = tidelog, CommitFailedError, log
        self._consumer = tidelog.Consumer(
            spec.bootstrap,
            group=spec.group,
            auto_offset_reset="earliest",
            enable_auto_commit=spec.commits_itself,
            default_api_timeout_ms=120_000,
        )
        self._consumer.subscribe(
            list(spec.topics),
            on_assigned=lambda names: log.assigned(_pairs(names)),
            on_revoked=lambda names: log.revoked(_pairs(names)),
            on_lost=lambda names: log.revoked(_pairs(names)),
        )

    def poll(self) -> list[Read]:
        records = self._consumer.poll(POLL_S, RECORDS_MAX)
        return [(one.topic, one.partition, one.offset, one.value) for one in records]

    def commit(self, offsets: dict[TopicPartition, int]) -> bool:
        try:
            self._consumer.commit({self._tidelog.TopicPartition(*one): at for one, at in offsets.items()})
        except self._refused as error:
            self._log.error(error)
            return False
        return True

    def close(self) -> None:
        self._consumer.close()


class ConfluentReader:
    """librdkafka, under the protocol that is the client's name."""

    def __init__(self, spec: WorkerSpec, log: MemberLog) -> None:
        import confluent_kafka

        self._kafka, self._log = confluent_kafka, log
        config: dict[str, Any] = {
            "bootstrap.servers": spec.bootstrap,
            "client.id": spec.name,
            "group.id": spec.group,
            "group.protocol": "consumer" if spec.client == CONSUMER else "classic",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": spec.commits_itself,
            "auto.commit.interval.ms": 1_000,
            "error_cb": log.error,
            "on_commit": self._committed,
            "debug": DEBUG,
            "logger": file_logger(spec.client_log),
        }
        self._consumer = confluent_kafka.Consumer(config)
        self._consumer.subscribe(
            list(spec.topics),
            on_assign=lambda _, names: log.assigned(_pairs(names)),
            on_revoke=lambda _, names: log.revoked(_pairs(names)),
            on_lost=lambda _, names: log.revoked(_pairs(names)),
        )
        self._commits_itself = spec.commits_itself

    def _committed(self, error: Any, partitions: Any) -> None:
        if error is not None:
            self._log.error(f"commit: {error}")
        elif self._commits_itself:
            stored = {(one.topic, one.partition): one.offset for one in partitions if one.error is None}
            self._log.committed({one: offset for one, offset in stored.items() if offset >= 0})

    def poll(self) -> list[Read]:
        read: list[Read] = []
        for one in self._consumer.consume(RECORDS_MAX, POLL_S):
            error = one.error()
            if error is not None:
                self._log.error(error)
                continue
            read.append((one.topic(), one.partition(), one.offset(), one.value()))  # type: ignore[arg-type]
        return read

    def commit(self, offsets: dict[TopicPartition, int]) -> bool:
        wanted = [self._kafka.TopicPartition(*one, at) for one, at in offsets.items()]
        try:
            stored = self._consumer.commit(offsets=wanted, asynchronous=False)
        except self._kafka.KafkaException as error:
            self._log.error(f"commit: {error}")
            return False
        return all(one.error is None for one in stored or ())

    def close(self) -> None:
        self._consumer.close()


class AioKafkaReader:
    def __init__(self, spec: WorkerSpec, log: MemberLog) -> None:
        import aiokafka
        import aiokafka.errors

        self._aiokafka, self._log = aiokafka, log
        self._runner = asyncio.Runner()
        # The group may have no coordinator yet, or the node that is asked first may be down.
        self._consumer = self._run(self._start(spec))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    async def _start(self, spec: WorkerSpec) -> Any:
        log = self._log

        class Listener(self._aiokafka.ConsumerRebalanceListener):  # type: ignore[misc, name-defined]
            def on_partitions_revoked(self, revoked: Iterable[Any]) -> None:
                log.revoked(_pairs(revoked))

            def on_partitions_assigned(self, assigned: Iterable[Any]) -> None:
                log.assigned(_pairs(assigned))

        consumer = self._aiokafka.AIOKafkaConsumer(
            bootstrap_servers=spec.bootstrap,
            client_id=spec.name,
            group_id=spec.group,
            auto_offset_reset="earliest",
            enable_auto_commit=spec.commits_itself,
            session_timeout_ms=10_000,
            heartbeat_interval_ms=1_000,
            metadata_max_age_ms=10_000,
        )
        await consumer.start()
        consumer.subscribe(list(spec.topics), listener=Listener())
        return consumer

    def poll(self) -> list[Read]:
        work = self._consumer.getmany(timeout_ms=int(POLL_S * 1000), max_records=RECORDS_MAX)
        found = self._run(work)
        return [(one.topic, one.partition, one.offset, one.value) for rows in found.values() for one in rows]

    def commit(self, offsets: dict[TopicPartition, int]) -> bool:
        wanted = {self._aiokafka.TopicPartition(*one): at for one, at in offsets.items()}
        try:
            self._run(self._consumer.commit(wanted))
        except (self._aiokafka.errors.KafkaError, self._aiokafka.errors.IllegalStateError) as error:
            self._log.error(f"commit: {error!r}")
            return False
        return True

    def close(self) -> None:
        try:
            self._run(self._consumer.stop())
        finally:
            self._runner.close()


def _pairs(partitions: Iterable[Any]) -> list[TopicPartition]:
    return [(one.topic, one.partition) for one in partitions]


def file_logger(path: str) -> logging.Logger:
    logger = logging.getLogger("librdkafka")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    return logger
