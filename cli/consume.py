"""`tidelog consume TOPIC...`: records as they come. Keys of the JSON documents are listed in docs/cli.md.

Without a group it is a `tidelog.Consumer` with assigned partitions; `consume_group` is a member of a group. Every
`READ_TIMEOUT_MS` it asks for the log ends, so that a partition without a leader is an error, not silence.
"""

import argparse
import re
import threading
import time
from collections.abc import Sequence

from tidelog.cli import consume_group
from tidelog.cli.clients import bootstrap_of, client_errors, open_admin, timeout_ms
from tidelog.cli.main import CommandError, UsageError
from tidelog.cli.messages import report
from tidelog.cli.reading import READ_TIMEOUT_MS, Reading
from tidelog.cli.record_format import FormatError, RecordFormat
from tidelog.cli.records import chosen_partitions
from tidelog.client.consumer.threaded import Consumer
from tidelog.client.durations import time_ms
from tidelog.client.errors import LogTruncatedError
from tidelog.client.record import ConsumerRecord, TopicPartition
from tidelog.world.real.clock import SystemClock

DISCOVER_S = 5.0
"""Interval of the search for new topics that match a pattern."""


def timestamp_of(text: str, option: str = "--timestamp") -> int:
    """Milliseconds since 1970, a date and time (without a zone it is UTC, as in the Python API), or an age ("1h")."""
    try:
        return time_ms(int(text) if text.isdecimal() else text, SystemClock().now_ms())
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


def start_offsets(
    consumer: Consumer, places: Sequence[TopicPartition], options: argparse.Namespace
) -> dict[TopicPartition, int]:
    """Where to begin, by the options; a time after the last record is the end."""
    if options.offset is not None and options.offset.isdecimal():
        _check_offset(consumer, places, int(options.offset))
        return dict.fromkeys(places, int(options.offset))
    if options.offset not in (None, "earliest", "latest"):
        raise UsageError(f"--offset {options.offset!r}: a number, earliest or latest")
    if options.last is not None:
        starts, ends = consumer.beginning_offsets(*places), consumer.end_offsets(*places)
        return {place: max(starts[place], ends[place] - options.last) for place in places}
    if options.timestamp is not None:
        at_time = consumer.offsets_for_times(dict.fromkeys(places, timestamp_of(options.timestamp)))
        ends = consumer.end_offsets(*places)
        return {place: ends[place] if row is None else row.offset for place, row in at_time.items()}
    if options.from_beginning or options.offset == "earliest":
        return consumer.beginning_offsets(*places)
    return consumer.end_offsets(*places)


def _check_offset(consumer: Consumer, places: Sequence[TopicPartition], offset: int) -> None:
    """An offset outside of the log is refused: reading would wait for ever, or begin elsewhere."""
    starts, ends = consumer.beginning_offsets(*places), consumer.end_offsets(*places)
    for place in places:
        if offset > ends[place]:
            raise CommandError(
                f"--offset {offset} is past the end of {place}, whose next record gets offset {ends[place]} "
                "(OFFSET_OUT_OF_RANGE); --offset latest waits for it"
            )
        if offset < starts[place]:
            raise CommandError(
                f"--offset {offset} is before the start of {place}, whose first offset is {starts[place]} "
                "(OFFSET_OUT_OF_RANGE); --offset earliest begins there"
            )


class _Assigned(Reading):
    """Reads the partitions that the options name, or those of every topic that matches the pattern."""

    def __init__(self, options: argparse.Namespace, consumer: Consumer) -> None:
        super().__init__(options, consumer)
        self._known: dict[TopicPartition, None] = {}
        self._stopped = threading.Event()
        self._looked_s = self._checked_s = time.monotonic()

    def start(self) -> None:
        topics = self._topics()
        if not topics:
            report(f"no topic matches {self.options.pattern!r} yet")
        starts: dict[TopicPartition, int] = {}
        for topic in topics:
            count = len(self.consumer.partitions_for(topic))
            places = chosen_partitions(topic, count, self.options.partition)
            starts |= start_offsets(self.consumer, places, self.options)
        if self.options.exit_at_end and starts:
            self.ends = self.consumer.end_offsets(*starts)
        self.total = self.options.max_messages or sum(
            max(0, end - starts[place]) for place, end in (self.ends or {}).items()
        )
        self._assign(starts)

    def _topics(self) -> list[str]:
        if self.options.pattern is None:
            return list(dict.fromkeys(self.options.topic))
        pattern = re.compile(self.options.pattern)
        with open_admin(self.options) as admin:
            return [topic.name for topic in admin.list_topics() if pattern.fullmatch(topic.name)]

    def _assign(self, starts: dict[TopicPartition, int]) -> None:
        """Reads these partitions too."""
        self._known |= dict.fromkeys(starts)
        if starts:
            self.consumer.assign(self._known)
        for place, offset in starts.items():
            self.consumer.seek(place, offset)

    def stop(self, number: int) -> None:
        super().stop(number)
        self._stopped.set()

    def poll(self, wait_s: float, records_max: int) -> list[ConsumerRecord]:
        self._look_around()
        if not self._known:
            self._stopped.wait(wait_s)
            return []
        try:
            return super().poll(wait_s, records_max)
        except LogTruncatedError as error:
            report(f"{error}; going on from there")
            self.consumer.seek(error.partition, error.diverging_offset)
            return []

    def _look_around(self) -> None:
        """Finds topics and partitions that were created since, and partitions without a leader, now and then."""
        now_s = time.monotonic()
        if self.options.pattern is not None and not self.options.exit_at_end and now_s - self._looked_s >= DISCOVER_S:
            self._looked_s = now_s
            places = [place for topic in self._topics() for place in self.consumer.partitions_for(topic)]
            if fresh := [place for place in places if place not in self._known]:
                self._assign(self.consumer.beginning_offsets(*fresh))
        if self._known and now_s - self._checked_s >= READ_TIMEOUT_MS / 1000:
            self._checked_s = now_s
            self.consumer.end_offsets(*self._known)

    def is_wanted(self, record: ConsumerRecord) -> bool:
        return not self.ends or record.offset < self.ends[record.topic_partition]


def check_options(options: argparse.Namespace) -> None:
    if bool(options.topic) == (options.pattern is not None):
        raise UsageError("use either names of topics or --pattern REGEX")
    if options.pattern is not None:
        try:
            re.compile(options.pattern)
        except re.error as error:
            raise UsageError(f"--pattern {options.pattern!r}: not a regular expression: {error}") from error
    if options.partition and len(set(options.topic)) != 1:
        raise UsageError("--partition goes with one topic")
    if options.offset is not None and options.offset.isdecimal() and not options.partition and options.group is None:
        raise UsageError("--offset N requires --partition")
    if options.format is not None:
        if options.output != "lines" or options.keys or options.headers or options.offsets:
            raise UsageError("--format cannot be combined with --output, --keys, --headers, --offsets")
        try:
            RecordFormat(options.format)
        except FormatError as error:
            raise UsageError(f"--format: {error}") from error


def run(options: argparse.Namespace) -> int:
    check_options(options)
    if options.group is not None:
        return consume_group.run(options)
    with client_errors():
        consumer = Consumer(
            bootstrap_of(options),
            bootstrap_wait_ms=0,
            client_id="tidelog-consume",
            auto_offset_reset="earliest",
            isolation=options.isolation,
            default_api_timeout_ms=timeout_ms(options),
        )
        return _Assigned(options, consumer).run()
