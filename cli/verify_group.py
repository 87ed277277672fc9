"""`tidelog verify consume TOPIC --group G`: a group member that logs what it receives; several may run at once.

It commits after each poll, and logs the commit when it is acknowledged. Ctrl-C or SIGTERM ends it cleanly. Without
--follow it ends when no record has come for `IDLE_S`.
"""

import argparse
import contextlib
import json
import secrets
import time
from typing import Any

from tidelog.cli.clients import bootstrap_of, client_errors, timeout_option
from tidelog.cli.exit_codes import EXIT_OK
from tidelog.cli.messages import report
from tidelog.cli.stopping import stop_requested
from tidelog.cli.verify_history import History, numbered, open_history
from tidelog.client.consumer.errors import CommitFailedError, WakeupError
from tidelog.client.consumer.threaded import Consumer
from tidelog.client.record import ConsumerRecord, TopicPartition
from tidelog.client.verify import GroupRecorder
from tidelog.world.real.clock import SystemClock

IDLE_S = 3.0
POLL_S = 0.5


def run(options: argparse.Namespace) -> int:
    with client_errors(), open_history(options.history) as history:
        consumer = Consumer(
            bootstrap_of(options),
            bootstrap_wait_ms=0,
            group=options.group,
            client_id="tidelog-verify",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            **timeout_option(options, "default_api_timeout_ms"),
        )
        return _Member(options, consumer, history).run()


class _Member:
    def __init__(self, options: argparse.Namespace, consumer: Consumer, history: History) -> None:
        self._options = options
        self._consumer = consumer
        self._recorder = GroupRecorder(secrets.token_hex(6), history.put, SystemClock().now_ms)
        self._read = self._foreign = self._refused = 0
        self._is_stopped = False

    def run(self) -> int:
        topic = self._options.topic
        with self._consumer as consumer:
            consumer.partitions_for(topic)  # raises for a missing topic, instead of waiting for it
            consumer.subscribe([topic], on_assigned=self._assigned, on_revoked=self._revoked, on_lost=self._revoked)
            with stop_requested(self._stop), contextlib.suppress(WakeupError):  # a signal ends it
                self._poll_all()
            held = sorted(consumer.assignment())
            self._recorder.drained({place.partition: consumer.position(place) for place in held})
        document: dict[str, Any] = {
            "topic": topic,
            "reader": self._recorder.member,
            "read": self._read,
            "foreign": self._foreign,
        }
        if self._options.output == "json":
            print(json.dumps(document, indent=2))
        else:
            print(f"{self._read} records read, {self._foreign} that are not numbered")
        if self._refused:
            report(f"{self._refused} commits were refused: the group had gone on without this member")
        return EXIT_OK

    def _stop(self, _number: int) -> None:
        self._is_stopped = True
        self._consumer.wakeup()

    def _assigned(self, places: list[TopicPartition]) -> None:
        self._recorder.assigned({place.partition: self._consumer.position(place) for place in places})

    def _revoked(self, places: list[TopicPartition]) -> None:
        self._recorder.revoked(place.partition for place in places)

    def _poll_all(self) -> None:
        heard_s = time.monotonic()
        while not self._is_stopped and (self._options.records is None or self._read < self._options.records):
            records = self._consumer.poll(POLL_S)
            if records:
                heard_s = time.monotonic()
                self._note(records)
            elif not self._options.follow and time.monotonic() - heard_s >= IDLE_S and self._consumer.assignment():
                return

    def _note(self, records: list[ConsumerRecord]) -> None:
        rows, foreign = numbered(records)
        self._foreign += foreign
        for partition, given in rows.items():
            self._recorder.polled(partition, given)
            self._read += len(given)
        offsets = {record.topic_partition: record.offset + 1 for record in records}
        try:
            self._consumer.commit(offsets)
        except CommitFailedError:
            self._refused += 1  # others have the partitions, and read it again
            return
        self._recorder.committed({place.partition: offset for place, offset in offsets.items()})
