"""A reader of committed data: all partitions from their start, without a group. It notes what it gets, in its order."""

from __future__ import annotations

import threading
from pathlib import Path

from tidelog.testing.chaos.history import Read, TransactionLog
from tidelog.testing.chaos.worker_spec import TIDELOG, WorkerSpec

POLL_S = 0.2
RECORDS_MAX = 500


def run_committed_reader(spec: WorkerSpec, is_over: threading.Event) -> None:
    log = TransactionLog(Path(spec.history), spec.name)
    client = TidelogCommitted(spec) if spec.client == TIDELOG else ConfluentCommitted(spec, log)
    while not is_over.is_set():
        log.alive()
        records = client.poll()
        if records:
            log.saw(records)
    client.close()
    log.close()


class TidelogCommitted:
    def __init__(self, spec: WorkerSpec) -> None:
        import tidelog

        self._consumer = tidelog.Consumer(
            spec.bootstrap, isolation="read_committed", auto_offset_reset="earliest", default_api_timeout_ms=120_000
        )
        self._consumer.assign([(topic, number) for topic, count in spec.topics.items() for number in range(count)])

    def poll(self) -> list[Read]:
        records = self._consumer.poll(POLL_S, RECORDS_MAX)
        return [(one.topic, one.partition, one.offset, one.value) for one in records]

    def close(self) -> None:
        self._consumer.close()


class ConfluentCommitted:
    def __init__(self, spec: WorkerSpec, log: TransactionLog) -> None:
        import confluent_kafka

        self._log = log
        self._consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": spec.bootstrap,
                "client.id": spec.name,
                "group.id": spec.name,  # librdkafka demands one; it is not joined
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "log_level": 3,
            }
        )
        self._consumer.assign(
            [
                confluent_kafka.TopicPartition(topic, number, 0)
                for topic, count in spec.topics.items()
                for number in range(count)
            ]
        )

    def poll(self) -> list[Read]:
        read: list[Read] = []
        for one in self._consumer.consume(RECORDS_MAX, POLL_S):
            error = one.error()
            if error is not None:
                self._log.error(error)
                continue
            read.append((one.topic(), one.partition(), one.offset(), one.value()))  # type: ignore[arg-type]
        return read

    def close(self) -> None:
        self._consumer.close()
