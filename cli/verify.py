"""`tidelog verify produce|check`: see `client.verify` for the history's form and what is found.

Records are written by `tidelog.aio.Producer`, so that what is checked is what programs rely on: `--batch 1` by `send`,
more by `send_many`, each call of at most `PIECE_RECORDS` one batch. `consume` is in `verify_read` and `verify_group`.
"""

import argparse
import asyncio
import contextlib
import json
import secrets
import sys
from typing import IO, Any

from tidelog.cli import table
from tidelog.cli.clients import bootstrap_of, client_errors, open_admin, timeout_ms, topic_of
from tidelog.cli.exit_codes import EXIT_FAILURE, EXIT_OK
from tidelog.cli.main import UsageError
from tidelog.cli.messages import error_text, report
from tidelog.cli.progress import Progress
from tidelog.cli.stopping import terminated_in_loop
from tidelog.cli.verify_history import History, open_history
from tidelog.client.errors import BulkError, DeliveryTimeoutError, FlushTimeoutError, ProducerClosedError
from tidelog.client.producer.aio import Producer
from tidelog.client.producer.bulk import BulkDelivery
from tidelog.client.producer.fast_path import Delivery
from tidelog.client.verify import HistoryChecker, Verdict, value_of
from tidelog.model.errors import TidelogError
from tidelog.world.real.clock import SystemClock

SHOWN_MAX = 20
PIECE_RECORDS = 1_000
"""Records per call: surely one batch, which is stored as a whole or not at all."""


class Stand:
    """How long a partition was stalled: records were sent, and none was acknowledged."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._since_s: float | None = None
        self._waiting = 0

    def sent(self, now_s: float) -> None:
        self._waiting += 1
        if self._since_s is None:
            self._since_s = now_s

    def acknowledged(self, now_s: float) -> None:
        self._waiting -= 1
        self.update(now_s)
        self._since_s = now_s if self._waiting else None

    def failed(self) -> None:
        """The stall lasts until the next acknowledgement."""
        self._waiting -= 1

    def update(self, now_s: float) -> None:
        if self._since_s is not None:
            self.longest_s = max(self.longest_s, now_s - self._since_s)


class NumberedWriter:
    """Writes numbered records to the partitions in turn, and logs the outcome of each."""

    def __init__(
        self,
        producer: Producer,
        topic: str,
        partitions: int,
        history: History,
        *,
        is_replicated: bool,
    ) -> None:
        self._producer = producer
        self._topic = topic
        self._next = [0] * partitions
        self._turn = 0
        self._history = history
        self._is_replicated = is_replicated
        self.run = secrets.token_hex(6)
        self.sent = self.acknowledged = self.failed = 0
        self.longest_gap_s = 0.0
        """Longest time between two acknowledgements."""
        self._acked_s: float | None = None
        self._stands = [Stand() for _ in range(partitions)]
        self.last_error: TidelogError | None = None

    async def write(self, count: int) -> None:
        partition = self._turn
        self._turn = (self._turn + 1) % len(self._next)
        for start in range(0, count, PIECE_RECORDS):
            await self._write(partition, min(PIECE_RECORDS, count - start))

    async def _write(self, partition: int, count: int) -> None:
        first = self._next[partition]
        self._next[partition] += count
        values = [value_of(self.run, partition, first + index) for index in range(count)]
        self._history.note("send", run=self.run, partition=partition, first=first, count=count)
        self.sent += count
        self._stands[partition].sent(asyncio.get_running_loop().time())
        delivery: Delivery | BulkDelivery
        try:
            if count == 1:
                delivery = await self._producer.send(self._topic, values[0], partition=partition)
            else:
                delivery = await self._producer.send_many(self._topic, values=values, partition=partition)
        except TidelogError as error:
            self._failed(partition, first, count, error, is_sure=True)  # the producer has not taken it
            return
        delivery.add_done_callback(lambda done: self._done(partition, first, count, done))

    def _done(self, partition: int, first: int, count: int, delivery: Delivery | BulkDelivery) -> None:
        error = delivery.exception()
        if isinstance(error, BulkError):
            ((_, failed, error),) = error.errors
            assert failed == count, "it was one batch"
        if error is not None:
            assert isinstance(error, TidelogError), f"an error of the catalogue, not {error!r}"
            # Only these errors prove that nothing was sent; after any other the records may be stored.
            is_sure = isinstance(error, DeliveryTimeoutError | ProducerClosedError) and not error.was_sent
            self._failed(partition, first, count, error, is_sure=is_sure)
            return
        fields = {"run": self.run, "partition": partition, "first": first, "count": count}
        if self._is_replicated:
            fields["at_ms"] = SystemClock().now_ms()
        self._history.note("ack", **fields, offset=_offset_of(delivery))
        self.acknowledged += count
        now_s = asyncio.get_running_loop().time()
        self._stands[partition].acknowledged(now_s)
        if self._acked_s is not None:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self._acked_s)
        self._acked_s = now_s

    def _failed(self, partition: int, first: int, count: int, error: TidelogError, *, is_sure: bool) -> None:
        fields = {"run": self.run, "partition": partition, "first": first, "count": count}
        self._history.note("fail", **fields, was_sent=not is_sure, error=error.code.name)
        self.failed += count
        self.last_error = error
        self._stands[partition].failed()

    def longest_stand(self) -> tuple[int, float]:
        """Return the partition with the longest stall, and its seconds."""
        now_s = asyncio.get_running_loop().time()
        for stand in self._stands:
            stand.update(now_s)
        return max(enumerate(stand.longest_s for stand in self._stands), key=lambda row: row[1])


def _offset_of(delivery: Delivery | BulkDelivery) -> int:
    """Return the offset of the first record of a stored batch."""
    if isinstance(delivery, BulkDelivery):
        (stored,) = delivery.result().ranges
        return stored.first_offset
    return int(delivery.result().offset)


def _producer(options: argparse.Namespace) -> Producer:
    return Producer(
        bootstrap_of(options),
        client_id="tidelog-verify",
        acks=options.acks,
        request_timeout_ms=min(timeout_ms(options), options.timeout_ms),
        delivery_timeout_ms=options.timeout_ms,
        max_block_ms=options.timeout_ms,
    )


def run_produce(options: argparse.Namespace) -> int:
    if options.rate <= 0 or options.batch < 1:
        raise UsageError("--rate and --batch are above 0")
    with open_admin(options) as admin:
        partitions = len(topic_of(admin, options.topic).partitions)  # a producer would create it
    with client_errors(), open_history(options.history) as history:
        return asyncio.run(_produce(options, partitions, history))


async def _produce(options: argparse.Namespace, partitions: int, history: History) -> int:
    producer = _producer(options)
    is_replicated = options.acks in ("all", "-1")
    numbered = NumberedWriter(producer, options.topic, partitions, history, is_replicated=is_replicated)
    with terminated_in_loop():
        try:
            await _write_all(options, numbered)
            await producer.flush()
        except asyncio.CancelledError:
            # Ctrl-C ends the run; batches in flight are still logged.
            if options.records is not None:
                raise
            with contextlib.suppress(FlushTimeoutError):
                await producer.flush(options.timeout_ms / 1000)
        finally:
            await producer.close(0)
    worst, stood_s = numbered.longest_stand()
    document = {
        "topic": options.topic,
        "run": numbered.run,
        "sent": numbered.sent,
        "acknowledged": numbered.acknowledged,
        "failed": numbered.failed,
        "retries": producer.metrics()["retries"],
        "longest_gap_ms": round(numbered.longest_gap_s * 1000),
        "longest_partition_gap_ms": round(stood_s * 1000),
        "longest_gap_partition": worst,
    }
    if options.output == "json":
        print(json.dumps(document, indent=2))
    else:
        print(", ".join(f"{key.replace('_', ' ')} {value}" for key, value in document.items()))
    if numbered.last_error is not None:
        report(f"{numbered.failed} records failed; the last: {error_text(numbered.last_error)}")
    return EXIT_OK if numbered.failed == 0 else EXIT_FAILURE


async def _write_all(options: argparse.Namespace, numbered: NumberedWriter) -> None:
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    with Progress("writing", unit="records") as progress:
        while options.records is None or numbered.sent < options.records:
            left = options.batch if options.records is None else min(options.batch, options.records - numbered.sent)
            writing = asyncio.ensure_future(numbered.write(left))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await writing  # what has begun gets its outcome
                raise
            if options.records is not None:
                progress.show(numbered.sent, options.records)
            ahead_s = start_s + numbered.sent / options.rate - loop.time()
            if ahead_s > 0:
                await asyncio.sleep(ahead_s)


def run_check(options: argparse.Namespace) -> int:
    checker = HistoryChecker()
    for path in options.history:
        try:
            with open(path, encoding="utf-8") as file:
                _feed(checker, file, path)
        except FileNotFoundError as error:
            raise UsageError(f"{path}: no such file") from error
    verdict = checker.verdict()
    bad = {kind: count for kind, count in verdict.counts.items() if count and kind not in options.allow}
    if options.output == "json":
        print(json.dumps(check_document(verdict, is_good=not bad), indent=2))
    else:
        _print_verdict(verdict, bad)
    if not verdict.checked_complete:
        report("nobody has read a partition to its end: a loss could not be seen")
    return EXIT_FAILURE if bad else EXIT_OK


def _feed(checker: HistoryChecker, file: IO[str], path: str) -> None:
    for number, line in enumerate(file, start=1):
        if not line.endswith("\n"):
            report(f"{path}:{number}: the last line is cut off, and left out")
            return
        checker.feed_line(line, where=f"{path}:{number}")


def check_document(verdict: Verdict, *, is_good: bool) -> dict[str, Any]:
    return {
        "is_good": is_good,
        "sent": verdict.sent,
        "acknowledged": verdict.acknowledged,
        "refused": verdict.refused,
        "unknown": verdict.unknown,
        "read": verdict.read,
        "is_complete": verdict.checked_complete,
        "counts": verdict.counts,
        "anomalies": [{"kind": one.kind, "partition": one.partition, "what": one.what} for one in verdict.anomalies],
    }


def _print_verdict(verdict: Verdict, bad: dict[str, int]) -> None:
    print(
        f"{verdict.sent} sent, {verdict.acknowledged} acknowledged, {verdict.refused} refused, {verdict.unknown} of "
        f"unknown outcome, {verdict.read} read"
    )
    print(", ".join(f"{kind} {count}" for kind, count in verdict.counts.items()))
    if verdict.anomalies:
        rows = [[one.kind, one.partition, one.what] for one in verdict.anomalies[:SHOWN_MAX]]
        table.write(sys.stdout, ["kind", "partition", "what"], rows, right=["partition"])
        if len(verdict.anomalies) > SHOWN_MAX:
            print(f"... and {sum(verdict.counts.values()) - SHOWN_MAX} more")
    print(
        table.red("BAD", sys.stdout) if bad else "good: every acknowledged record is there once, in order, in its place"
    )
