"""Histories of numbered records, and the checker that compares them. Pure.

A history is a file of JSON lines. A writer numbers the records of each partition 0, 1, 2, ... under a run name and puts
both into the record; a reader logs which record it finds at which offset. A record's value is
`<run> <partition> <number>`.

    {"event": "send",  "run", "partition", "first", "count"}               before a batch is sent
    {"event": "ack",   "run", "partition", "first", "count", "offset", "at_ms"}
                                                    acknowledged; offset -1 if unknown; at_ms (time) only if replicated
                                                    (acks=all): every later reader must find it
    {"event": "fail",  "run", "partition", "first", "count", "was_sent"}   was_sent: it may be stored nevertheless
    {"event": "read",  "reader", "partition", "records": [[offset, run, number], ...]}     in reading order
    {"event": "end",   "reader", "partition", "start", "end", "log_end", "asked_ms"}
                                                    the reader has read all of [start, end); log_end, if present, is
                                                    the log end offset at the time asked_ms
    {"event": "cut",   "reader", "partition", "offset"}                    the reader was notified of a truncation here

The checker reports, for each partition:

    lost         acknowledged, within a completely read range, and missing; or acknowledged as replicated at an offset
                 that is past a log end reported later, even if another reader had read it
    duplicated   one number at two offsets
    reordered    a number of a run at a higher offset than a later number of the run
    out-of-place acknowledged at one offset and found at another, or two readers found different records at one offset
    replayed     a reader received an offset that is not above the previous one
    unexpected   a record that nobody sent, or that was rejected before it was sent

A number that was sent but neither acknowledged nor rejected may be stored once or not at all. The checker compares
times of writers and readers: their clocks should agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from tidelog.model.errors import InvalidRequestError

KINDS = ("lost", "duplicated", "reordered", "out-of-place", "replayed", "unexpected")
ANOMALIES_MAX = 1_000
"""Per kind; further ones are only counted."""

Number = tuple[str, int]
"""A run and a number in it."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    kind: str
    partition: int
    what: str


@dataclass(slots=True)
class Verdict:
    """The checker's result."""

    sent: int = 0
    acknowledged: int = 0
    refused: int = 0
    unknown: int = 0
    """Sent, but neither acknowledged nor rejected."""
    read: int = 0
    checked_complete: bool = False
    """A reader has read at least one partition from start to end: a loss is visible only there."""
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    anomalies: list[Anomaly] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """No anomaly was found. `checked_complete` says whether a loss would have been visible."""
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
    """Return (run, partition, number) of a record; None for a foreign one."""
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
    """Everything known about one partition."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.sent: set[Number] = set()
        self.acked: dict[Number, int] = {}
        self.acked_ms: dict[Number, int] = {}
        self.refused: set[Number] = set()
        self.at: dict[int, Number] = {}
        self.places: dict[Number, int] = {}
        self.last: dict[str, int] = {}  # reader -> last offset read
        self.complete: list[tuple[int, int]] = []
        self.ends: list[tuple[int, int]] = []  # request time, log end offset


class Checker:
    """Feed events in the order of each file, then call `verdict`."""

    def __init__(self) -> None:
        self._partitions: dict[int, _Partition] = {}
        self._verdict = Verdict()

    def feed_line(self, line: str, *, where: str = "") -> None:
        """Feed one line of a history. Raises `InvalidRequestError` for a malformed one."""
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
            record = (str(run), int(number))
            before = partition.at.setdefault(int(offset), record)
            if before != record:
                what = f"offset {offset} was {_describe(before)} and then {_describe(record)}"
                self._verdict.found("out-of-place", partition.number, what)
            known_offset = partition.places.setdefault(record, int(offset))
            if known_offset != offset:
                self._verdict.found(
                    "duplicated", partition.number, f"{_describe(record)} at {known_offset} and at {offset}"
                )

    def _end(self, partition: _Partition, event: dict[str, Any]) -> None:
        partition.complete.append((int(event["start"]), int(event["end"])))
        if "log_end" in event:
            partition.ends.append((int(event["asked_ms"]), int(event["log_end"])))
        self._verdict.checked_complete = True

    def _cut(self, partition: _Partition, event: dict[str, Any]) -> None:
        reader, offset = str(event["reader"]), int(event["offset"])
        partition.last[reader] = min(partition.last.get(reader, -1), offset - 1)

    def verdict(self) -> Verdict:
        """Return the verdict on all events so far. You may call it repeatedly."""
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
            found_offset = partition.places.get(number)
            if (log_end := _end_before(partition, number, offset)) is not None:
                what = f"{_describe(number)}, acknowledged at {offset}, is past the log's end {log_end}"
                verdict.found("lost", partition.number, what)
            elif found_offset is None:
                if _covers(partition.complete, offset):
                    verdict.found("lost", partition.number, f"{_describe(number)}, acknowledged at {offset}")
            elif offset >= 0 and found_offset != offset:
                what = f"{_describe(number)}, acknowledged at {offset}, is at {found_offset}"
                verdict.found("out-of-place", partition.number, what)
        highest: dict[str, Number] = {}
        for offset in sorted(partition.at):
            run, value = record = partition.at[offset]
            before = highest.get(run)
            if before is not None and value < before[1]:
                verdict.found(
                    "reordered", partition.number, f"{_describe(record)} at {offset}, after {_describe(before)}"
                )
            if before is None or value > before[1]:
                highest[run] = record
            if record not in partition.sent:
                verdict.found("unexpected", partition.number, f"{_describe(record)} at {offset} was not sent")
            elif record in partition.refused and record not in partition.acked:
                verdict.found("unexpected", partition.number, f"{_describe(record)} at {offset} was refused")


_FEEDS = {
    "send": Checker._send,
    "ack": Checker._ack,
    "fail": Checker._fail,
    "read": Checker._read,
    "end": Checker._end,
    "cut": Checker._cut,
}


def _covers(ranges: Iterable[tuple[int, int]], offset: int) -> bool:
    """Return whether a complete read covers the offset; any one covers an unknown offset."""
    return any(offset < 0 or start <= offset < end for start, end in ranges)


def _end_before(partition: _Partition, number: Number, offset: int) -> int | None:
    """Return a log end reported after this acknowledgement that is not past the record; None if there is none."""
    at_ms = partition.acked_ms.get(number)
    if at_ms is None or offset < 0:
        return None
    return next((end for asked_ms, end in partition.ends if asked_ms > at_ms and end <= offset), None)


def _describe(number: Number) -> str:
    return f"record {number[1]} of run {number[0]}"
