"""`tidelog consume TOPIC... --group G`: a member of the group. What was printed is committed; Ctrl-C leaves the group.

Records count as processed once they are printed and flushed: each poll says that those of the one before are done, and
automatic commits take only these.
"""

import argparse
import time

from tidelog.cli.clients import bootstrap_of, client_errors, timeout_option
from tidelog.cli.main import UsageError
from tidelog.cli.reading import READ_TIMEOUT_MS, Reading
from tidelog.client.consumer.threaded import Consumer
from tidelog.client.record import TopicPartition

COMMIT_MS = 1_000


def run(options: argparse.Namespace) -> int:
    for name in ("partition", "timestamp", "last"):
        if getattr(options, name) is not None:
            raise UsageError(
                f"--{name} does not go with --group: the coordinator assigns partitions; use "
                f"`tidelog groups reset-offsets {options.group}` for the start"
            )
    if options.offset not in (None, "earliest", "latest"):
        raise UsageError(
            f"--offset {options.offset!r} does not go with --group: earliest or latest, where it has nothing committed"
        )
    from_start = options.from_beginning or options.offset == "earliest"
    with client_errors():
        consumer = Consumer(
            bootstrap_of(options),
            bootstrap_wait_ms=0,
            group=options.group,
            client_id="tidelog-consume",
            auto_offset_reset="earliest" if from_start else "latest",
            auto_commit_interval_ms=COMMIT_MS,
            isolation=options.isolation,
            **timeout_option(options, "default_api_timeout_ms"),
        )
        return _Member(options, consumer).run()


class _Member(Reading):
    records_max = 500

    def start(self) -> None:
        self.ends = None
        self._begun_s = time.monotonic()
        topics = list(dict.fromkeys(self.options.topic))
        for topic in topics:
            self.consumer.partitions_for(topic)  # a missing topic is an error at once
        self.consumer.subscribe(
            topics or None, pattern=self.options.pattern, on_assigned=self._assigned, on_revoked=self._revoked
        )

    def _assigned(self, places: list[TopicPartition]) -> None:
        ends = self.consumer.end_offsets(*places) if self.options.exit_at_end and places else {}
        self.ends = {**(self.ends or {}), **ends}

    def _revoked(self, places: list[TopicPartition]) -> None:
        for place in places:
            (self.ends or {}).pop(place, None)

    def is_waiting(self) -> bool:
        """It has not joined yet."""
        return self.ends is None and time.monotonic() - self._begun_s < READ_TIMEOUT_MS / 1000
