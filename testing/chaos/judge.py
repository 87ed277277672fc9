"""The verdict on the histories of a run, together with a last, independent reading of every topic."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tidelog.testing.chaos.checks import CommitOrder
from tidelog.testing.chaos.worker_spec import WorkerSpec
from tidelog.verify import KINDS, Checker, GroupChecker, Verdict

LAST_READ_S = 600.0
SHOWN_MAX = 20
"""Anomalies that are shown in words; all are counted."""
MARKS_MAX = 1_000
"""Anomalies of the report."""
_RECORD = re.compile(r"record (\d+) of run (\S+?),?(?: |$)")
WRITER_EVENTS = frozenset({"send", "ack", "fail"})
MEMBER_EVENTS = frozenset({"assigned", "poll", "committed", "revoked"})

Event = dict[str, Any]


def read_events(path: Path) -> Iterator[Event]:
    """The whole lines of a history; a worker that was killed may have left half of one."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


class ReadFailedError(Exception):
    """A topic could not be read to its end."""


def read_last(at: str, topic: str, history: Path) -> None:
    """Reads a topic from start to end by the command, which knows nothing of the run. Raises `ReadFailedError`."""
    try:
        done = _consume(at, topic, history)
    except subprocess.TimeoutExpired as error:
        raise ReadFailedError(f"the last reading of {topic} did not end in {LAST_READ_S:.0f} s") from error
    if done.returncode != 0:
        raise ReadFailedError(f"the last reading of {topic} failed: {done.stderr.strip()[-500:]}")


def _consume(at: str, topic: str, history: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tidelog", "verify", "consume", topic, "--history", str(history)],
        env={**os.environ, "TIDELOG_BOOTSTRAP": at},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=LAST_READ_S,
    )


class Judgement:
    """Counts of anomalies by kind, and the first of them in words."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        self.words: list[str] = []
        self.marks: list[tuple[int | None, str]] = []
        """The same with the time (ms) when the record that they name was acknowledged, if it was."""
        self.acked_ms: dict[tuple[str, int], int] = {}
        """(run and partition of a topic, number) -> when it was acknowledged."""
        self.is_complete = True

    def add(self, where: str, verdict: Verdict) -> None:
        self.is_complete = self.is_complete and verdict.checked_complete
        self.counts.update({kind: count for kind, count in verdict.counts.items() if count})
        for anomaly in verdict.anomalies:
            named = _RECORD.search(anomaly.what)
            topic = where.rpartition(": ")[2]
            place = f"{named[2]}/{topic}-{anomaly.partition}" if named else ""
            at_ms = self.acked_ms.get((place, int(named[1]))) if named else None
            self.say(f"{anomaly.kind}: {where}-{anomaly.partition}: {anomaly.what}", at_ms)

    def add_words(self, kind: str, words: Iterable[str]) -> None:
        for text in words:
            self.counts[kind] += 1
            self.say(text)

    def say(self, text: str, at_ms: int | None = None) -> None:
        if len(self.words) < SHOWN_MAX:
            self.words.append(text)
        if len(self.marks) < MARKS_MAX:
            self.marks.append((at_ms, text))

    @property
    def is_good(self) -> bool:
        return self.is_complete and not any(self.counts.values())


def read_writers(paths: Iterable[Path]) -> dict[str, list[Event]]:
    """What producers have noted, by topic. What was sent and acknowledged is there once, as acknowledged."""
    events: dict[str, list[Event]] = {}
    for path in paths:
        open_sends: dict[tuple[str, int, int], Event] = {}
        for event in read_events(path):
            if event["event"] not in WRITER_EVENTS:
                continue
            key = event["topic"], event["partition"], event["first"]
            if event["event"] == "send":
                open_sends[key] = event
            else:
                open_sends.pop(key, None)
                events.setdefault(event["topic"], []).append(event)
        for event in open_sends.values():
            events.setdefault(event["topic"], []).append(event)
    return events


def judge_log(judgement: Judgement, topic: str, written: Iterable[Event], last: Path) -> None:
    """Every acknowledged record is in the log, once, at its offset, in the order of its producer."""
    checker = Checker()
    for event in written:
        # Times of the command that reads last are of another clock.
        checker.feed({key: value for key, value in event.items() if key != "at_ms"})
    if last.exists():  # otherwise nobody could read it, and the verdict is not complete
        for event in read_events(last):
            checker.feed(event)
    judgement.add(topic, checker.verdict())


def judge_group(
    judgement: Judgement,
    group: str,
    written: dict[str, list[Event]],
    members: Iterable[Path],
    ends: dict[tuple[str, int], int],
) -> None:
    """The group was given all of it, members skipped nothing, commits were kept and did not go back."""
    topics = {topic for topic, _ in ends}
    checkers = {topic: (GroupChecker(), CommitOrder()) for topic in topics}
    for topic, (checker, _) in checkers.items():
        for event in written.get(topic, ()):
            checker.feed(event)
    for path in members:
        for event in read_events(path):
            if event["event"] in MEMBER_EVENTS:
                for judge_of_topic in checkers[event["topic"]]:
                    judge_of_topic.feed(event)
    for (topic, partition), end in ends.items():
        checkers[topic][0].feed({"event": "drained", "partition": partition, "end": end})
    for topic, (checker, order) in sorted(checkers.items()):
        judgement.add(f"{group}: {topic}", checker.verdict())
        judgement.add_words("commit-back", (f"{group}: {topic}: {text}" for text in order.verdict()))


def judge(path: Path, rows: Sequence[WorkerSpec], ends: dict[tuple[str, int], int]) -> Judgement:
    """`path` has the last reading of each topic as `TOPIC-last.jsonl`."""
    judgement = Judgement()
    written = read_writers(Path(spec.history) for spec in rows if spec.role == "producer")
    judgement.acked_ms = {
        (f"{event['run']}/{topic}-{event['partition']}", event["first"]): event["at_ms"]
        for topic, events in written.items()
        for event in events
        if event["event"] == "ack"
    }
    groups: dict[str, list[Path]] = {}
    for spec in rows:
        if spec.role == "reader":
            groups.setdefault(spec.group, []).append(Path(spec.history))
    for topic in rows[0].topics:
        judge_log(judgement, topic, written.get(topic, ()), path / f"{topic}-last.jsonl")
    for group, members in groups.items():
        judge_group(judgement, group, written, members, ends)
    return judgement
