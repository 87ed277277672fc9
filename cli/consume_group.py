"""`tidelog consume TOPIC... --group G`: a member of the group. What was printed is committed; Ctrl-C leaves the group.

Records are given out once they are printed and flushed: each poll says that those of the one before are done, and
automatic commits take only these. SIGTERM does the same as Ctrl-C; a second signal ends it at once, without a goodbye.
"""

import argparse
import time

from tidelog.cli import session, table
from tidelog.cli.channel import bootstrap_of
from tidelog.cli.consume import PATIENCE_MS, POLL_MS, Printer
from tidelog.cli.main import EXIT_OK, WrongCallError
from tidelog.cli.stopping import stop_requested
from tidelog.client.consumer import Consumer
from tidelog.client.consumer_errors import WakeupError
from tidelog.client.record import TopicPartition

COMMIT_MS = 1_000
RECORDS_MAX = 500


def run(options: argparse.Namespace) -> int:
    for name in ("partition", "timestamp", "last"):
        if getattr(options, name) is not None:
            raise WrongCallError(
                f"--{name} does not go with --group: the group says who reads what, and "
                f"`tidelog groups reset-offsets {options.group}` where it begins"
            )
    if options.offset not in (None, "earliest", "latest"):
        raise WrongCallError(
            f"--offset {options.offset!r} does not go with --group: earliest or latest, where it has nothing committed"
        )
    from_start = options.from_beginning or options.offset == "earliest"
    with session.errors_told():
        consumer = Consumer(
            bootstrap_of(options),
            group=options.group,
            client_id="tidelog-consume",
            auto_offset_reset="earliest" if from_start else "latest",
            auto_commit_interval_ms=COMMIT_MS,
            **session.timeout_setting(options, "default_api_timeout_ms"),
        )
        return _Member(options, consumer).run()


class _Member:
    def __init__(self, options: argparse.Namespace, consumer: Consumer) -> None:
        self._options = options
        self._consumer = consumer
        self._count = 0
        self._signal: int | None = None
        self._ends: dict[TopicPartition, int] | None = None  # None: nothing was dealt yet

    def run(self) -> int:
        with self._consumer as consumer:
            topics = list(dict.fromkeys(self._options.topic))
            for topic in topics:
                consumer.partitions_for(topic)  # a missing topic is an error at once
            consumer.subscribe(
                topics or None,
                pattern=self._options.pattern,
                on_assigned=self._assigned,
                on_revoked=self._revoked,
            )
            printer = Printer(self._options)
            with stop_requested(self._stop):
                try:
                    self._read(printer)
                except WakeupError:
                    pass  # a signal: what was printed is committed when the consumer closes
                finally:
                    printer.close(self._count)
        if self._signal is None:
            return EXIT_OK
        session.tell(f"{table.count(self._count, 'record')} read")
        return 128 + self._signal

    def _stop(self, number: int) -> None:
        self._signal = number
        self._consumer.wakeup()

    def _assigned(self, places: list[TopicPartition]) -> None:
        ends = self._consumer.end_offsets(*places) if self._options.exit_at_end and places else {}
        self._ends = {**(self._ends or {}), **ends}

    def _revoked(self, places: list[TopicPartition]) -> None:
        for place in places:
            (self._ends or {}).pop(place, None)

    def _read(self, printer: Printer) -> None:
        begun_s = heard_s = time.monotonic()
        limit_ms = self._options.timeout_ms
        while self._signal is None and not self._is_full and not self._is_at_end():
            left = RECORDS_MAX if self._options.max_messages is None else self._options.max_messages - self._count
            wait_ms = POLL_MS if limit_ms is None else min(POLL_MS, limit_ms)
            records = self._consumer.poll(wait_ms, max_records=min(RECORDS_MAX, left))
            for record in records:
                printer.put(record.topic, record.partition, record)
                self._count += 1
            printer.flush()
            is_joining = self._ends is None and time.monotonic() - begun_s < PATIENCE_MS / 1000
            if records or is_joining:
                heard_s = time.monotonic()
            elif limit_ms is not None and time.monotonic() - heard_s >= limit_ms / 1000:
                return

    @property
    def _is_full(self) -> bool:
        return self._options.max_messages is not None and self._count >= self._options.max_messages

    def _is_at_end(self) -> bool:
        if not self._options.exit_at_end or self._ends is None:
            return False
        return all(self._consumer.position(place) >= end for place, end in self._ends.items())
