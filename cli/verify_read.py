"""`tidelog verify consume TOPIC`: a `tidelog.Consumer` without a group that logs every record of every partition.

It reads each partition from its start. If a log was truncated below the position, it logs that and continues from
there; any other position outside the log is an error. Without --follow it ends at the log ends of its start. Ctrl-C or
SIGTERM ends it cleanly: received records are logged. `verify_group` is the one with --group.
"""

import argparse
import json
import secrets
import time

from tidelog.cli import verify_group
from tidelog.cli.clients import bootstrap_of, client_errors, timeout_option
from tidelog.cli.exit_codes import EXIT_OK
from tidelog.cli.progress import Progress
from tidelog.cli.reading import READ_TIMEOUT_MS
from tidelog.cli.stopping import raise_for, stop_requested
from tidelog.cli.verify_history import History, numbered, open_history
from tidelog.client.consumer.errors import WakeupError
from tidelog.client.consumer.threaded import Consumer
from tidelog.client.errors import LogTruncatedError
from tidelog.client.record import ConsumerRecord, TopicPartition
from tidelog.model.errors import CallTimeoutError
from tidelog.world.real.clock import SystemClock

POLL_S = 0.5
POLL_RECORDS = 5_000


def run(options: argparse.Namespace) -> int:
    if options.group is not None:
        return verify_group.run(options)
    with client_errors(), open_history(options.history) as history:
        consumer = Consumer(
            bootstrap_of(options),
            bootstrap_wait_ms=0,
            client_id="tidelog-verify",
            auto_offset_reset="none",
            max_poll_records=POLL_RECORDS,
            **timeout_option(options, "default_api_timeout_ms"),
        )
        with consumer:
            return _Reading(options, consumer, history).run()


class _Reading:
    def __init__(self, options: argparse.Namespace, consumer: Consumer, history: History) -> None:
        self._options = options
        self._consumer = consumer
        self._history = history
        self._name = secrets.token_hex(6)
        self._read = self._foreign = 0
        self._signal: int | None = None
        self._starts: dict[TopicPartition, int] = {}
        self._ends: dict[TopicPartition, dict[str, int]] = {}
        """Each log end, and when it was asked for, as history fields; empty with --follow."""
        self._left: list[TopicPartition] = []
        """Partitions that are not read to the end."""

    def run(self) -> int:
        consumer = self._consumer
        places = consumer.partitions_for(self._options.topic)
        self._starts = consumer.beginning_offsets(*places)
        consumer.assign(places)
        for place in places:
            consumer.seek(place, self._starts[place])
        with stop_requested(self._stop):
            try:
                if not self._options.follow:
                    asked_ms = SystemClock().now_ms()
                    ends = consumer.end_offsets(*places)
                    self._ends = {place: {"log_end": ends[place], "asked_ms": asked_ms} for place in places}
                    self._left = places
                self._read_all()
            except WakeupError:
                pass  # a signal ends it
            finally:
                self._report_story()
        if self._signal is not None and not self._options.follow:
            raise_for(self._signal)
        return EXIT_OK

    def _stop(self, number: int) -> None:
        self._signal = number
        self._consumer.wakeup()

    def _read_all(self) -> None:
        heard_s = time.monotonic()
        wanted = sum(end["log_end"] - self._starts[place] for place, end in self._ends.items())
        with Progress("reading", unit="records") as progress:
            while not self._is_over():
                count = self._poll()
                if wanted:
                    progress.show(self._read + self._foreign, min(wanted, self._options.records or wanted))
                if count:
                    heard_s = time.monotonic()
                elif not self._options.follow and time.monotonic() - heard_s > READ_TIMEOUT_MS / 1000:
                    raise CallTimeoutError(f"no more records of {self._options.topic} in {READ_TIMEOUT_MS} ms")

    def _is_over(self) -> bool:
        if self._signal is not None or (self._options.records is not None and self._read >= self._options.records):
            return True
        if self._options.follow:
            return False
        self._left = [place for place in self._left if self._consumer.position(place) < self._ends[place]["log_end"]]
        return not self._left

    def _poll(self) -> int:
        """Return the number of received records, numbered or not. Logs a truncation, and reads again from there."""
        try:
            records = self._consumer.poll(POLL_S)
        except LogTruncatedError as error:
            number, offset = error.partition.partition, error.diverging_offset
            self._history.note("cut", reader=self._name, partition=number, offset=offset)
            self._consumer.seek((self._options.topic, number), offset)
            return 0
        self._note(records)
        return len(records)

    def _note(self, records: list[ConsumerRecord]) -> None:
        rows, foreign = numbered(records)
        self._foreign += foreign
        for partition, given in rows.items():
            self._history.note("read", reader=self._name, partition=partition, records=given)
            self._read += len(given)

    def _report_story(self) -> None:
        for place, start in self._starts.items():
            fields = {"partition": place.partition, "start": start, "end": self._consumer.position(place)}
            self._history.note("end", reader=self._name, **fields, **self._ends.get(place, {}))
        document = {
            "topic": self._options.topic,
            "reader": self._name,
            "read": self._read,
            "foreign": self._foreign,
        }
        if self._options.output == "json":
            print(json.dumps(document, indent=2))
        else:
            print(f"{self._read} records read, {self._foreign} that are not numbered")
