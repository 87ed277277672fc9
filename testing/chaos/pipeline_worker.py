"""A worker of a pipeline: consumes, transforms and produces, and commits outputs and offsets in one transaction.

    poll -> begin -> an output for each input -> offsets -> commit          one in `ABORTS` gives up and aborts instead
    the transaction cannot commit -> abort, and read the same inputs again
    a newer instance has its transactional id -> it ends with `EXIT_FENCED`

Each client is behind the same face (`PipelineClient`). A call without an answer is repeated until there is one. Between
two transactions nothing is open, so partitions are assigned and revoked only there (in `poll`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Protocol, TypeVar

from tidelog.testing.chaos.history import Read, TopicPartition, TransactionLog, output_of, place_of
from tidelog.testing.chaos.worker_spec import CONFLUENT, EXIT_FENCED, TIDELOG, WorkerSpec

T = TypeVar("T")

POLL_S = 0.2
RECORDS_MAX = 100
"""Inputs of a transaction."""
ABORTS = 0.05
"""Share of the transactions that the worker gives up."""
TRANSACTION_TIMEOUT_MS = {TIDELOG: 10_000, CONFLUENT: 60_000}
"""A worker that is frozen for longer than the first goes on after its transaction was aborted. In version 1 of the
protocol, which librdkafka has, this ends the client as fenced: so it has a timeout that nothing exceeds."""
SESSION_MS = 6_000
CALL_S = 10.0


class AbortableError(Exception):
    """The transaction cannot commit: abort it."""


class FencedError(Exception):
    """A newer instance has the transactional id."""


class GivenUpError(Exception):
    """The worker gives up a transaction that could commit."""


class PipelineClient(Protocol):
    """Calls of a transaction raise `AbortableError` and `FencedError`; any other error ends the worker."""

    def poll(self) -> list[Read]: ...

    def begin(self) -> None: ...

    def send(self, topic: str, partition: int, value: bytes) -> None: ...

    def send_offsets(self, offsets: Mapping[TopicPartition, int]) -> None: ...

    def commit(self) -> None: ...

    def abort(self) -> None: ...

    def rewind(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Read from these offsets on, of partitions that are still assigned."""
        ...

    def close(self) -> None: ...


def run_pipeline(spec: WorkerSpec, is_over: threading.Event) -> int:
    """Return the exit code."""
    log = TransactionLog(Path(spec.history), spec.name)
    client = open_pipeline(spec, log)
    log.note("ready")
    worker = _Worker(spec, log, client)
    code = 0
    try:
        while not is_over.is_set():
            log.alive()
            worker.step()
    except FencedError as error:
        log.note("fenced", what=str(error))
        code = EXIT_FENCED
    client.close()
    log.close()
    return code


def open_pipeline(spec: WorkerSpec, log: TransactionLog) -> PipelineClient:
    return TidelogPipeline(spec, log) if spec.client == TIDELOG else ConfluentPipeline(spec, log)


class _Worker:
    def __init__(self, spec: WorkerSpec, log: TransactionLog, client: PipelineClient) -> None:
        self._spec, self._log, self._client = spec, log, client
        self._draw = Random(spec.name)
        self._places = [(topic, number) for topic, count in spec.outputs.items() for number in range(count)]
        self._count = 0

    def step(self) -> None:
        """At most one transaction."""
        inputs = self._client.poll()
        if not inputs:
            return
        self._count += 1
        name = f"{self._spec.name}.{self._count}"
        self._log.begin(name, self._spec.transactional_id)
        self._client.begin()
        try:
            self._process(name, inputs)
            if self._draw.random() < ABORTS:
                raise GivenUpError("given up")
            self._client.commit()
        except (AbortableError, GivenUpError) as error:
            self._log.error(f"{name}: {error}")
            self._client.abort()
            self._log.ended(name, "aborted")
            self._client.rewind(_first_offsets(inputs))
            return
        self._log.ended(name, "committed")

    def _process(self, name: str, inputs: Sequence[Read]) -> None:
        for number, (topic, partition, offset, _) in enumerate(inputs):
            place = self._draw.choice(self._places)
            self._log.sending(name, number, place_of(*place), (place_of(topic, partition), offset))
            self._client.send(*place, output_of(name, number))
        offsets = {(topic, partition): offset + 1 for topic, partition, offset, _ in inputs}
        self._log.offsets(name, self._spec.group, {place_of(*one): offset for one, offset in offsets.items()})
        self._client.send_offsets(offsets)


def _first_offsets(inputs: Sequence[Read]) -> dict[TopicPartition, int]:
    return {(topic, partition): offset for topic, partition, offset, _ in reversed(inputs)}


class TidelogPipeline:
    def __init__(self, spec: WorkerSpec, log: TransactionLog) -> None:
        import tidelog
        from tidelog.client import errors
        from tidelog.model.errors import ErrorCode, TidelogError
        from tidelog.model.transaction_errors import TransactionFatalError

        self._tidelog, self._log = tidelog, log
        self._timeout, self._fatal, self._any = errors.TransactionTimeoutError, TransactionFatalError, TidelogError
        self._fenced = ErrorCode.PRODUCER_FENCED
        self._producer = tidelog.Producer(
            spec.bootstrap,
            transactional_id=spec.transactional_id,
            transaction_timeout_ms=TRANSACTION_TIMEOUT_MS[TIDELOG],
            max_block_ms=int(CALL_S * 1000),
            linger_ms=5,
        )
        self._consumer = tidelog.Consumer(
            spec.bootstrap,
            group=spec.group,
            isolation="read_committed",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=SESSION_MS,
            default_api_timeout_ms=120_000,
        )
        self._call(self._producer.init_transactions)
        self._consumer.subscribe(list(spec.topics))

    def _call(self, call: Callable[[], T], *, repeats: bool = True) -> T:
        while True:
            try:
                return call()
            except self._timeout as error:
                if not repeats:
                    raise AbortableError(str(error)) from error
                self._log.error(f"repeated: {error}")
            except self._fatal as error:
                if error.code is self._fenced:
                    raise FencedError(str(error)) from error
                raise
            except self._any as error:
                raise AbortableError(f"{error.code.name}: {error}") from error

    def poll(self) -> list[Read]:
        records = self._consumer.poll(POLL_S, RECORDS_MAX)
        return [(one.topic, one.partition, one.offset, one.value) for one in records]

    def begin(self) -> None:
        self._call(self._producer.begin_transaction)

    def send(self, topic: str, partition: int, value: bytes) -> None:
        self._call(lambda: self._producer.send(topic, value, partition=partition))

    def send_offsets(self, offsets: Mapping[TopicPartition, int]) -> None:
        named = {self._tidelog.TopicPartition(*one): offset for one, offset in offsets.items()}
        # After a timeout it is not known whether the transaction has them: it has failed.
        self._call(lambda: self._producer.send_offsets(named, self._consumer.group_metadata()), repeats=False)

    def commit(self) -> None:
        self._call(self._producer.commit_transaction)

    def abort(self) -> None:
        self._call(self._producer.abort_transaction)

    def rewind(self, offsets: Mapping[TopicPartition, int]) -> None:
        assigned = self._consumer.assignment()
        for one, offset in offsets.items():
            partition = self._tidelog.TopicPartition(*one)
            if partition in assigned:
                self._consumer.seek(partition, offset)

    def close(self) -> None:
        self._consumer.close()
        self._producer.close()


class ConfluentPipeline:
    """librdkafka, with its classic group protocol."""

    def __init__(self, spec: WorkerSpec, log: TransactionLog) -> None:
        import confluent_kafka

        self._kafka, self._log = confluent_kafka, log
        codes = confluent_kafka.KafkaError
        self._fenced = {codes._FENCED, codes.PRODUCER_FENCED, codes.INVALID_PRODUCER_EPOCH}
        common = {"bootstrap.servers": spec.bootstrap, "client.id": spec.name, "log_level": 3}
        self._producer = confluent_kafka.Producer(
            {
                **common,
                "transactional.id": spec.transactional_id,
                "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS[CONFLUENT],
                "linger.ms": 5,
            }
        )
        self._consumer = confluent_kafka.Consumer(
            {
                **common,
                "group.id": spec.group,
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "session.timeout.ms": SESSION_MS,
                "heartbeat.interval.ms": 1_000,
            }
        )
        self._call(lambda: self._producer.init_transactions(CALL_S))
        self._consumer.subscribe(list(spec.topics))

    def _call(self, call: Callable[[], T]) -> T:
        while True:
            try:
                return call()
            except BufferError:
                self._producer.poll(POLL_S)
            except self._kafka.KafkaException as failure:
                error = failure.args[0]
                if error.code() in self._fenced and (error.fatal() or not error.txn_requires_abort()):
                    raise FencedError(str(error)) from failure
                if error.txn_requires_abort():
                    raise AbortableError(str(error)) from failure
                if not error.retriable():
                    raise
                self._log.error(f"repeated: {error}")

    def poll(self) -> list[Read]:
        read: list[Read] = []
        for one in self._consumer.consume(RECORDS_MAX, POLL_S):
            error = one.error()
            if error is not None:
                self._log.error(error)
                continue
            read.append((one.topic(), one.partition(), one.offset(), one.value()))  # type: ignore[arg-type]
        return read

    def begin(self) -> None:
        self._call(self._producer.begin_transaction)

    def send(self, topic: str, partition: int, value: bytes) -> None:
        self._call(lambda: self._producer.produce(topic, value, partition=partition))

    def send_offsets(self, offsets: Mapping[TopicPartition, int]) -> None:
        named = [self._kafka.TopicPartition(*one, offset) for one, offset in offsets.items()]
        group: Any = self._consumer.consumer_group_metadata()
        self._call(lambda: self._producer.send_offsets_to_transaction(named, group, CALL_S))

    def commit(self) -> None:
        self._call(lambda: self._producer.commit_transaction(CALL_S))

    def abort(self) -> None:
        self._call(lambda: self._producer.abort_transaction(CALL_S))

    def rewind(self, offsets: Mapping[TopicPartition, int]) -> None:
        assigned = {(one.topic, one.partition) for one in self._consumer.assignment()}
        for one, offset in offsets.items():
            if one in assigned:
                self._consumer.seek(self._kafka.TopicPartition(*one, offset))

    def close(self) -> None:
        self._consumer.close()
        self._producer.purge()
