"""The offset document: how far a query has read, as Spark keeps it in its checkpoint. Pure.

    {"v": 1,
     "t": {"orders": {"id": "<32 hex digits>", "p": {"0": [120, 4], "1": [87, 4]}}},
     "origin": {"orders": {"id": "...", "p": {"1": [80, 3]}}},      only where there is something to say
     "initial": true}                                               only in what `initialOffset` gives

Of each partition the next offset to read and a leader epoch: no record before that offset is of a later epoch. Spark
compares documents as text, so topics and partitions are sorted, and what has not changed stays as it was.

`origin` says where the batch that this document ends begins, of partitions where that is not the end of the batch
before: all of them in the first batch (Spark does not keep what `initialOffset` says, and asks again after a restart),
new partitions, and those where the query has given up on something. So what a batch reads is told by its two documents
alone, and a replay reads the same.

    partition                         begins at                        as a loss
    known                             where the last batch ended
    new                               the log's start
    start past it                     the log's start                  ExpiredRangeError
    log departs before it             where it departs                 TruncationError
    topic has another id              the start of the new log         TopicMadeAnewError
    topic is not there                nowhere, it is left out          TopicDeletedError
    topic is not asked for any more   nowhere, it is left out          NotSubscribedError

An end that lies before the beginning (a new leader that knows less) means that there is nothing new; offsets never go
back but for a truncation that the user has chosen to pass over.
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
    TopicMadeAnewError,
    TruncationError,
)

VERSION = 1


@dataclass(frozen=True, slots=True)
class Mark:
    """The next offset to read, and an epoch that no record before it exceeds; -1: not known."""

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
        made: dict[str, Any] = {"v": VERSION, "t": _document_of(self.topics)}
        if self.origin:
            made["origin"] = _document_of(self.origin)
        if self.is_initial:
            made["initial"] = True
        return made

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
    """Raises OptionError for what is no document of this source: a checkpoint of another one."""
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
    """What the leader of a partition says: where the log begins, where it can be read to, and its epoch.

    `epoch_end` is where the epoch of the query's mark ends there; None: not asked, or the leader cannot say.
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
    """Where the next batch begins. `origin` are those marks of `topics` that differ from the end of the last batch."""

    topics: Marks
    origin: Marks


def beginnings(
    start: SourceOffset,
    now: Cluster,
    lost: Callable[[DataLossError], None],
    is_subscribed: Callable[[str], bool] = lambda _: True,
) -> Beginnings:
    """Where to go on. `lost` is called for each loss: it raises, or the query goes on without."""
    topics: dict[str, TopicMarks] = {}
    origin: dict[str, TopicMarks] = {}
    for name, known in start.topics.items():
        if name not in now:
            lost(TopicDeletedError(name) if is_subscribed(name) else NotSubscribedError(name))
        elif now[name].topic_id != known.topic_id:
            lost(TopicMadeAnewError(name, known_id=known.topic_id, found_id=now[name].topic_id))
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
        if before is not None:  # what has no leader now stays as it is
            marks |= {number: mark for number, mark in before.marks.items() if number not in state.logs}
        topics[name] = TopicMarks(state.topic_id, marks)
        if moved:
            origin[name] = TopicMarks(state.topic_id, moved)
    return Beginnings(topics, origin)


def _begin(topic: str, partition: int, mark: Mark | None, log: LogState, lost: Callable[[DataLossError], None]) -> Mark:
    if mark is None:
        return Mark(log.start, -1)
    if log.epoch_end is not None and log.epoch_end < mark.offset:
        lost(TruncationError(topic, partition, offset=mark.offset, departs=log.epoch_end))
        return Mark(max(log.start, log.epoch_end), log.epoch)
    if mark.offset < log.start:
        lost(ExpiredRangeError(topic, partition, offset=mark.offset, start=log.start))
        return Mark(log.start, mark.epoch)
    return mark


def advanced(
    start: SourceOffset, begin: Beginnings, now: Cluster, ends: Mapping[tuple[str, int], int]
) -> SourceOffset | None:
    """The document of a batch that reads up to `ends`; None if it would say nothing new.

    A partition that does not move keeps its mark, epoch and all: another text would be another batch.
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
    """Offsets [start, end) of a partition, none of whose records is of a later epoch than `epoch` (-1: unknown)."""

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
    """What a batch reads, by topic and partition."""
    found = []
    for name, rows in sorted(end.topics.items()):
        origin = end.origin.get(name)
        known = start.topics.get(name)
        for number, mark in sorted(rows.marks.items()):
            begin = None if origin is None or origin.topic_id != rows.topic_id else origin.marks.get(number)
            if begin is None and known is not None and known.topic_id == rows.topic_id:
                begin = known.marks.get(number)
            if begin is not None and begin.offset < mark.offset:
                found.append(ReadRange(name, rows.topic_id, number, begin.offset, mark.offset, mark.epoch))
    return found
