"""The offset document: how far a query has read, as Spark stores it in its checkpoint. Pure.

    {"v": 1,
     "t": {"orders": {"id": "<32 hex digits>", "p": {"0": [120, 4], "1": [87, 4]}}},
     "origin": {"orders": {"id": "...", "p": {"1": [80, 3]}}},      only if a partition needs it
     "initial": true}                                               only in what `initialOffset` returns

Each partition has the next offset to read and a leader epoch that no record before that offset exceeds. Spark compares
documents as text, so topics and partitions are sorted, and unchanged partitions keep their text.

`origin` has the start of the batch that this document ends, for partitions where it differs from the end of the
previous batch: all partitions of the first batch (Spark does not store `initialOffset` and asks again after a restart),
new partitions, and those after an accepted data loss. So two documents alone define what a batch reads, and a replay
reads the same.

    partition                         begins at                        loss
    known                             end of the last batch
    new                               log start
    log start above the mark          log start                        ExpiredRangeError
    log diverges below the mark       where it diverges                TruncationError
    topic has another id              start of the new log             TopicRecreatedError
    topic deleted                     left out                         TopicDeletedError
    topic no longer subscribed        left out                         NotSubscribedError

A log end below the mark (a new leader that lags) means nothing new. Offsets go back only for a truncation that the user
accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tidelog.client.errors import OptionError
from tidelog.spark.errors import (
    DataLossError,
    ExpiredRangeError,
    NotSubscribedError,
    TopicDeletedError,
    TopicRecreatedError,
    TruncationError,
)

VERSION = 1


@dataclass(frozen=True, slots=True)
class Mark:
    """The next offset to read, and a leader epoch that no earlier record exceeds; -1 if unknown."""

    offset: int
    epoch: int = -1


@dataclass(frozen=True, slots=True)
class TopicMarks:
    topic_id: str
    marks: Mapping[int, Mark] = field(default_factory=dict)


Marks = Mapping[str, TopicMarks]


@dataclass(frozen=True, slots=True)
class SourceOffset:
    topics: Marks
    origin: Marks = field(default_factory=dict)
    is_initial: bool = False

    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = {"v": VERSION, "t": _document_of(self.topics)}
        if self.origin:
            document["origin"] = _document_of(self.origin)
        if self.is_initial:
            document["initial"] = True
        return document

    def mark(self, topic: str, partition: int) -> Mark | None:
        known = self.topics.get(topic)
        return None if known is None else known.marks.get(partition)


def _document_of(topics: Marks) -> dict[str, Any]:
    return {
        name: {
            "id": topics[name].topic_id,
            "p": {str(number): [mark.offset, mark.epoch] for number, mark in sorted(topics[name].marks.items())},
        }
        for name in sorted(topics)
    }


def read_document(document: Mapping[str, Any]) -> SourceOffset:
    """Parse a document. Raises OptionError if it belongs to another source or is damaged."""
    version = document.get("v")
    if version != VERSION:
        raise OptionError(
            f"checkpointLocation: its offsets are of version {version!r}, not {VERSION}: it belongs to another source "
            "or to another release; use a new checkpoint"
        )
    try:
        return SourceOffset(
            _marks_of(document["t"]), _marks_of(document.get("origin", {})), bool(document.get("initial", False))
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise OptionError(f"checkpointLocation: its offsets are damaged ({error!r}); use a new checkpoint") from error


def _marks_of(topics: Mapping[str, Any]) -> Marks:
    return {
        name: TopicMarks(
            str(rows["id"]),
            {int(number): Mark(int(offset), int(epoch)) for number, (offset, epoch) in rows["p"].items()},
        )
        for name, rows in topics.items()
    }


@dataclass(frozen=True, slots=True)
class LogState:
    """What a partition's leader reports: log start, readable end and leader epoch.

    `epoch_end` is where the epoch of the query's mark ends; None if unknown.
    """

    start: int
    end: int
    epoch: int
    epoch_end: int | None = None


@dataclass(frozen=True, slots=True)
class TopicState:
    topic_id: str
    logs: Mapping[int, LogState]


Cluster = Mapping[str, TopicState]


@dataclass(frozen=True, slots=True)
class Beginnings:
    """Where the next batch begins. `origin` holds the marks of `topics` that differ from the end of the last batch."""

    topics: Marks
    origin: Marks


def beginnings(
    start: SourceOffset,
    now: Cluster,
    lost: Callable[[DataLossError], None],
    is_subscribed: Callable[[str], bool] = lambda _: True,
) -> Beginnings:
    """Return where the next batch begins. Calls `lost` for each loss: it raises, or the query goes on without the
    data."""
    topics: dict[str, TopicMarks] = {}
    origin: dict[str, TopicMarks] = {}
    for name, known in start.topics.items():
        if name not in now:
            lost(TopicDeletedError(name) if is_subscribed(name) else NotSubscribedError(name))
        elif now[name].topic_id != known.topic_id:
            lost(TopicRecreatedError(name, known_id=known.topic_id, found_id=now[name].topic_id))
    for name, state in now.items():
        before = start.topics.get(name)
        if before is not None and before.topic_id != state.topic_id:
            before = None
        marks: dict[int, Mark] = {}
        moved: dict[int, Mark] = {}
        for number, log in state.logs.items():
            mark = None if before is None else before.marks.get(number)
            marks[number] = begin = _begin(name, number, mark, log, lost)
            if begin != mark or start.is_initial:
                moved[number] = begin
        if before is not None:  # a leaderless partition keeps its mark
            marks |= {number: mark for number, mark in before.marks.items() if number not in state.logs}
        topics[name] = TopicMarks(state.topic_id, marks)
        if moved:
            origin[name] = TopicMarks(state.topic_id, moved)
    return Beginnings(topics, origin)


def _begin(topic: str, partition: int, mark: Mark | None, log: LogState, lost: Callable[[DataLossError], None]) -> Mark:
    if mark is None:
        return Mark(log.start, -1)
    if log.epoch_end is not None and log.epoch_end < mark.offset:
        lost(TruncationError(topic, partition, offset=mark.offset, diverges=log.epoch_end))
        return Mark(max(log.start, log.epoch_end), log.epoch)
    if mark.offset < log.start:
        lost(ExpiredRangeError(topic, partition, offset=mark.offset, start=log.start))
        return Mark(log.start, mark.epoch)
    return mark


def advanced(
    start: SourceOffset, begin: Beginnings, now: Cluster, ends: Mapping[tuple[str, int], int]
) -> SourceOffset | None:
    """Return the document of a batch that reads up to `ends`; None if nothing changes.

    A partition that does not move keeps its mark and epoch: a different text would be a new batch.
    """
    topics: dict[str, TopicMarks] = {}
    for name, rows in begin.topics.items():
        marks = dict(rows.marks)
        for number, mark in rows.marks.items():
            end = ends.get((name, number), mark.offset)
            if end > mark.offset:
                marks[number] = Mark(end, max(mark.epoch, now[name].logs[number].epoch))
        topics[name] = TopicMarks(rows.topic_id, marks)
    made = SourceOffset(topics, begin.origin)
    is_same = not start.is_initial and not begin.origin and dict(made.topics) == dict(start.topics)
    return None if is_same else made


@dataclass(frozen=True, slots=True)
class ReadRange:
    """Offsets [start, end) of a partition. No record in it has a later epoch than `epoch` (-1: unknown)."""

    topic: str
    topic_id: str
    partition: int
    start: int
    end: int
    epoch: int = -1

    @property
    def count(self) -> int:
        return self.end - self.start


def ranges_between(start: SourceOffset, end: SourceOffset) -> list[ReadRange]:
    """Return what a batch reads, by topic and partition."""
    ranges = []
    for name, rows in sorted(end.topics.items()):
        origin = end.origin.get(name)
        known = start.topics.get(name)
        for number, mark in sorted(rows.marks.items()):
            begin = None if origin is None or origin.topic_id != rows.topic_id else origin.marks.get(number)
            if begin is None and known is not None and known.topic_id == rows.topic_id:
                begin = known.marks.get(number)
            if begin is not None and begin.offset < mark.offset:
                ranges.append(ReadRange(name, rows.topic_id, number, begin.offset, mark.offset, mark.epoch))
    return ranges
