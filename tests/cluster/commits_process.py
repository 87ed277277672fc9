"""A program that reads a partition in every way to commit, for a test that kills it:

    python commits_process.py BOOTSTRAP TOPIC STUCK_AT END

A thread and a group for each way. Each thing that happens is a line of JSON, [what, [way, ...]]:

    polled  [way, first offset, the next after the last]
    handled [way, offset]
    stuck   [way, offset]: with STUCK_AT in hand, for ever; -1: nowhere
    done    [way]: END was reached, or the way that closes in the middle has done so

A line on stdin ends it.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import tidelog
from tidelog.client.record import TopicPartition

POLL_RECORDS = 10
CLOSES_AT = 22
"""Where the combined way stops in order: in the middle of what a poll gave."""
AUTO_MS, AUTO_S = 101, 0.6
"""How often commits are automatic, and how long that way takes from poll to poll: several times as long."""
WAYS = ("auto", "sync", "async", "combined", "every", "before")


def say(what: str, *details: object) -> None:
    sys.stdout.write(json.dumps([what, details]) + "\n")
    sys.stdout.flush()


class Way:
    def __init__(self, name: str, bootstrap: str, topic: str, *, stuck_at: int, end: int) -> None:
        self.name, self.stuck_at, self.end = name, stuck_at, end
        self.place = TopicPartition(topic, 0)
        options: dict[str, Any] = {"enable_auto_commit": False}
        if name == "auto":
            options = {"enable_auto_commit": True, "auto_commit_interval_ms": AUTO_MS}
        self.consumer = tidelog.Consumer(
            bootstrap, group=f"{topic}-{name}", auto_offset_reset="earliest", max_poll_records=POLL_RECORDS,
            **options,
        )  # fmt: skip

    def run(self) -> None:
        with self.consumer as consumer:
            consumer.subscribe([self.place.topic])
            commit: dict[str, Callable[[], None]] = {"sync": consumer.commit, "async": consumer.commit_async}
            while not self.work(commit.get(self.name)):
                pass
        say("done", self.name)

    def work(self, commit: Callable[[], None] | None) -> bool:
        """One poll; whether it was the last."""
        consumer = self.consumer
        records = consumer.poll(1.0)
        if not records:
            return False
        say("polled", self.name, records[0].offset, records[-1].offset + 1)
        if self.name == "before":
            consumer.commit()
        if self.name == "combined":
            return self.combined(record.offset for record in records)
        for record in records:
            self.handle(record.offset)
            if self.name == "every" and (record.offset + 1) % POLL_RECORDS == 0:
                consumer.commit({self.place: record.offset + 1})
        if commit is not None:
            commit()
        if self.name == "auto":
            time.sleep(AUTO_S)
        return records[-1].offset + 1 == self.end

    def combined(self, offsets: Iterable[int]) -> bool:
        """Without waiting while it goes well, and waiting for the last one."""
        for offset in offsets:
            self.handle(offset)
            if offset + 1 in (CLOSES_AT, self.end):
                self.consumer.commit({self.place: offset + 1})
                return True
        self.consumer.commit_async()
        return False

    def handle(self, offset: int) -> None:
        if offset == self.stuck_at and self.name != "combined":
            say("stuck", self.name, offset)
            threading.Event().wait()
        say("handled", self.name, offset)


def main(bootstrap: str, topic: str, stuck_at: str, end: str) -> None:
    ways = [Way(name, bootstrap, topic, stuck_at=int(stuck_at), end=int(end)) for name in WAYS]
    threads = [threading.Thread(target=way.run, daemon=True) for way in ways]
    for thread in threads:
        thread.start()
    sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
