"""`Reading`: polls a consumer and prints its records until the options or a signal end it.

Ctrl-C or SIGTERM ends it cleanly: the JSON document is closed, the consumer too. A second signal ends it at once.
"""

import argparse
import io
import select
import sys
import time
from typing import TextIO

from tidelog.cli import table
from tidelog.cli.exit_codes import EXIT_OK
from tidelog.cli.messages import report
from tidelog.cli.progress import Progress
from tidelog.cli.record_printer import Printer
from tidelog.cli.stopping import stop_requested
from tidelog.client.consumer.errors import WakeupError
from tidelog.client.consumer.threaded import Consumer
from tidelog.client.record import ConsumerRecord, TopicPartition

POLL_MS = 500
READ_TIMEOUT_MS = 15_000


def check_reader(output: TextIO) -> None:
    """Raises BrokenPipeError if nobody reads this pipe any more: without a record to write, a command would wait on."""
    try:
        descriptor = output.fileno()
    except io.UnsupportedOperation:
        return  # not a file: a program that calls the command captures its output
    poller = select.poll()
    poller.register(descriptor, 0)
    if any(events & select.POLLERR for _, events in poller.poll(0)):
        raise BrokenPipeError


class Reading:
    """`start`, `poll`, `is_wanted` and `is_waiting` are for the two ways to read: with and without a group."""

    records_max = 5_000
    """Records of one poll."""

    def __init__(self, options: argparse.Namespace, consumer: Consumer) -> None:
        self.options = options
        self.consumer = consumer
        self.ends: dict[TopicPartition, int] | None = {}
        """Log ends with --exit-at-end; None before partitions are assigned."""
        self.total = 0
        """Number of records for the progress bar, if it is known."""
        self.signal: int | None = None
        self._count = 0

    def run(self) -> int:
        with self.consumer:
            self.start()
            printer = Printer(self.options)
            with stop_requested(self.stop):
                try:
                    self._read(printer)
                except WakeupError:
                    pass  # a signal
                finally:
                    printer.close(self._count)
        if self.signal is None:
            return EXIT_OK
        report(f"{table.count(self._count, 'record')} read")
        return 128 + self.signal

    def stop(self, number: int) -> None:
        self.signal = number
        self.consumer.wakeup()

    def start(self) -> None:
        """Assigns or subscribes."""
        raise NotImplementedError

    def poll(self, wait_s: float, records_max: int) -> list[ConsumerRecord]:
        return self.consumer.poll(wait_s, max_records=records_max)

    def is_wanted(self, record: ConsumerRecord) -> bool:
        return True

    def is_waiting(self) -> bool:
        """Silence does not count for --timeout-ms yet."""
        return False

    def _read(self, printer: Printer) -> None:
        limit_ms, count_max = self.options.timeout_ms, self.options.max_messages
        wait_s = (POLL_MS if limit_ms is None else min(POLL_MS, limit_ms)) / 1000
        heard_s = time.monotonic()
        with Progress("reading", unit="records") as progress:
            while self.signal is None and (count_max is None or self._count < count_max) and not self._is_at_end():
                left = self.records_max if count_max is None else count_max - self._count
                records = self.poll(wait_s, min(self.records_max, left))
                for record in records:
                    if self.is_wanted(record):
                        printer.put(record.topic, record.partition, record)
                        self._count += 1
                printer.flush()
                if self.total and not sys.stdout.isatty():
                    progress.show(self._count, self.total)
                if not records:
                    check_reader(sys.stdout)
                if records or self.is_waiting():
                    heard_s = time.monotonic()
                elif limit_ms is not None and time.monotonic() - heard_s >= limit_ms / 1000:
                    return

    def _is_at_end(self) -> bool:
        if not self.options.exit_at_end or self.ends is None:
            return False
        return all(self.consumer.position(place) >= end for place, end in self.ends.items())
