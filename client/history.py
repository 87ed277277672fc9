"""Histories of numbered records, and the checker that compares them. Pure.

A history is a file of JSON lines. Who writes numbers the records of a partition 0, 1, 2, ... under a run's name, and
puts both into the record; who reads notes what it finds where. A record's value is `<run> <partition> <number>`.

    {"event": "send",  "run", "partition", "first", "count"}               before a batch is sent
    {"event": "ack",   "run", "partition", "first", "count", "offset", "at_ms"}
                                                    acknowledged; offset -1 if it was not told; at_ms, the time, only if
                                                    it is replicated (acks=all): whoever looks later must find it
    {"event": "fail",  "run", "partition", "first", "count", "was_sent"}   was_sent: it may be stored all the same
    {"event": "read",  "reader", "partition", "records": [[offset, run, number], ...]}     in the order of reading
    {"event": "end",   "reader", "partition", "start", "end", "log_end", "asked_ms"}
                                                    it has read all of [start, end); log_end, if it has asked for it at
                                                    the time asked_ms, is where the log ended
    {"event": "cut",   "reader", "partition", "offset"}                    it was told that the log was truncated here

What the checker finds, for each partition:

    lost         acknowledged, inside of what a reader has read completely, and not there; or acknowledged as replicated
                 at an offset that a reader, later, was told to be past the log's end, even if another one had read it
    duplicated   one number at two offsets
    reordered    a number of a run at a higher offset than a later number of it
    out-of-place acknowledged at one offset and found at another, or two readers found different records at one offset
    replayed     a reader was given an offset that is not above the one before
    unexpected   a record that nobody sent, or that was refused before it was sent

A number that was sent and neither acknowledged nor refused may be there once, or not. The times of writers and readers
are compared: their clocks should agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from tidelog.model.errors import InvalidRequestError

KINDS = ("lost", "duplicated", "reordered", "out-of-place", "replayed", "unexpected")
ANOMALIES_MAX = 1_000
"""Of each kind; more of them are only counted."""

Number = tuple[str, int]
"""A run and a number of it."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    kind: str
    partition: int
    what: str


@dataclass(slots=True)
class Verdict:
    """What the checker has found."""

    sent: int = 0
    acknowledged: int = 0
    refused: int = 0
    unknown: int = 0
    """Sent, and neither acknowledged nor refused."""
    read: int = 0
    checked_complete: bool = False
    """A reader has read at least one partition from start to end: only there can a loss be seen."""
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    anomalies: list[Anomaly] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Nothing was found. Whether a loss could have been seen says `checked_complete`."""
        return not any(self.counts.values())

    def copy(self) -> Verdict:
        return replace(self, counts=dict(self.counts), anomalies=list(self.anomalies))

    def found(self, kind: str, partition: int, what: str) -> None:
        self.counts[kind] += 1
        if self.counts[kind] <= ANOMALIES_MAX:
            self.anomalies.append(Anomaly(kind, partition, what))


def value_of(run: str, partition: int, number: int) -> bytes:
    assert " " not in run, "a run's name has no spaces"
    return f"{run} {partition} {number}".encode()


def parse_value(value: bytes | None) -> tuple[str, int, int] | None:
    """(run, partition, number) of a record; None for one that is not ours."""
    parts = (value or b"").split(b" ")
    if len(parts) != 3 or not parts[1].isdigit() or not parts[2].isdigit():
        return None
    try:
        return parts[0].decode(), int(parts[1]), int(parts[2])
    except UnicodeDecodeError:
        return None


def encode_event(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":")) + "\n"


class _Partition:
    """All that is known of one partition."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.sent: set[Number] = set()
        self.acked: dict[Number, int] = {}
        self.acked_ms: dict[Number, int] = {}
        self.refused: set[Number] = set()
        self.at: dict[int, Number] = {}
        self.places: dict[Number, int] = {}
        self.last: dict[str, int] = {}  # reader -> the offset that it read last
        self.complete: list[tuple[int, int]] = []
        self.ends: list[tuple[int, int]] = []  # when it was asked for, and the log's end


class Checker:
    """Feed it events, in the order of each file; then `verdict`."""

    def __init__(self) -> None:
        self._partitions: dict[int, _Partition] = {}
        self._verdict = Verdict()

    def feed_line(self, line: str, *, where: str = "") -> None:
        """A line of a history; `InvalidRequestError` says what is wrong with it."""
        try:
            event = json.loads(line)
            self.feed(event)
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequestError(f"{where}: no line of a history: {error!r}") from error

    def feed(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind not in _FEEDS:
            raise ValueError(f"no such event: {kind!r}")
        number = int(event["partition"])
        partition = self._partitions.setdefault(number, _Partition(number))
        _FEEDS[kind](self, partition, event)

    def _numbers(self, event: dict[str, Any]) -> list[Number]:
        first, count = int(event["first"]), int(event["count"])
        return [(str(event["run"]), number) for number in range(first, first + count)]

    def _send(self, partition: _Partition, event: dict[str, Any]) -> None:
        partition.sent.update(self._numbers(event))

    def _ack(self, partition: _Partition, event: dict[str, Any]) -> None:
        base = int(event["offset"])
        for index, number in enumerate(self._numbers(event)):
            partition.sent.add(number)
            partition.acked[number] = base + index if base >= 0 else -1
            if "at_ms" in event:
                partition.acked_ms[number] = int(event["at_ms"])

    def _fail(self, partition: _Partition, event: dict[str, Any]) -> None:
        partition.sent.update(self._numbers(event))
        if not event["was_sent"]:
            partition.refused.update(self._numbers(event))

    def _read(self, partition: _Partition, event: dict[str, Any]) -> None:
        reader = str(event["reader"])
        for offset, run, number in event["records"]:
            self._verdict.read += 1
            last = partition.last.get(reader, -1)
            if offset <= last:
                self._verdict.found("replayed", partition.number, f"{reader} was given {offset} after {last}")
            partition.last[reader] = offset
            found = (str(run), int(number))
            before = partition.at.setdefault(int(offset), found)
            if before != found:
                what = f"offset {offset} was {_told(before)} and then {_told(found)}"
                self._verdict.found("out-of-place", partition.number, what)
            place = partition.places.setdefault(found, int(offset))
            if place != offset:
                self._verdict.found("duplicated", partition.number, f"{_told(found)} at {place} and at {offset}")

    def _end(self, partition: _Partition, event: dict[str, Any]) -> None:
        partition.complete.append((int(event["start"]), int(event["end"])))
        if "log_end" in event:
            partition.ends.append((int(event["asked_ms"]), int(event["log_end"])))
        self._verdict.checked_complete = True

    def _cut(self, partition: _Partition, event: dict[str, Any]) -> None:
        reader, offset = str(event["reader"]), int(event["offset"])
        partition.last[reader] = min(partition.last.get(reader, -1), offset - 1)

    def verdict(self) -> Verdict:
        """On what was fed up to now; it may be asked for more than once."""
        verdict = self._verdict.copy()
        for _, partition in sorted(self._partitions.items()):
            self._judge(partition, verdict)
        return verdict

    def _judge(self, partition: _Partition, verdict: Verdict) -> None:
        verdict.sent += len(partition.sent)
        verdict.acknowledged += len(partition.acked)
        verdict.refused += len(partition.refused - partition.acked.keys())
        verdict.unknown += len(partition.sent - partition.acked.keys() - partition.refused)
        for number, offset in partition.acked.items():
            place = partition.places.get(number)
            if (log_end := _end_before(partition, number, offset)) is not None:
                what = f"{_told(number)}, acknowledged at {offset}, is past the log's end {log_end}"
                verdict.found("lost", partition.number, what)
            elif place is None:
                if _covers(partition.complete, offset):
                    verdict.found("lost", partition.number, f"{_told(number)}, acknowledged at {offset}")
            elif offset >= 0 and place != offset:
                what = f"{_told(number)}, acknowledged at {offset}, is at {place}"
                verdict.found("out-of-place", partition.number, what)
        highest: dict[str, Number] = {}
        for offset in sorted(partition.at):
            run, value = found = partition.at[offset]
            before = highest.get(run)
            if before is not None and value < before[1]:
                verdict.found("reordered", partition.number, f"{_told(found)} at {offset}, after {_told(before)}")
            if before is None or value > before[1]:
                highest[run] = found
            if found not in partition.sent:
                verdict.found("unexpected", partition.number, f"{_told(found)} at {offset} was not sent")
            elif found in partition.refused and found not in partition.acked:
                verdict.found("unexpected", partition.number, f"{_told(found)} at {offset} was refused")


_FEEDS = {
    "send": Checker._send,
    "ack": Checker._ack,
    "fail": Checker._fail,
    "read": Checker._read,
    "end": Checker._end,
    "cut": Checker._cut,
}


def _covers(ranges: Iterable[tuple[int, int]], offset: int) -> bool:
    """An acknowledgement without an offset is covered by any complete read."""
    return any(offset < 0 or start <= offset < end for start, end in ranges)


def _end_before(partition: _Partition, number: Number, offset: int) -> int | None:
    """The log's end as it was told after this acknowledgement, if it is not past the record."""
    at_ms = partition.acked_ms.get(number)
    if at_ms is None or offset < 0:
        return None
    return next((end for asked_ms, end in partition.ends if asked_ms > at_ms and end <= offset), None)


def _told(number: Number) -> str:
    return f"record {number[1]} of run {number[0]}"
