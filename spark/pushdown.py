"""Filters of a batch read that narrow the fetched ranges. Pure.

    column       effect                                            does Spark filter again?
    partition    other partitions are not read                     no
    offset       ranges are cut                                    no
    timestamp    records before the first recent enough one        yes: timestamps need not rise with offsets
                 are not read

Spark evaluates filters on other columns, and comparisons with anything but a number or a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from tidelog.spark.offsets import ReadRange

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class Narrowing:
    """The conjunction of all filters taken so far."""

    partitions: frozenset[int] | None = None
    offset_from: int = 0
    offset_to: int | None = None
    """Exclusive."""
    since_ms: int | None = None

    def take(self, column: str, comparison: str, value: object) -> bool:
        """Apply the filter if possible. Return whether Spark can drop it."""
        if column == "timestamp":
            self._take_time(comparison, value)
            return False
        if column not in ("partition", "offset"):
            return False
        if comparison == "in":
            numbers = value if isinstance(value, (tuple, list)) else ()
            if column != "partition" or not numbers or not all(_is_number(one) for one in numbers):
                return False
            self._only(frozenset(numbers))
            return True
        if not _is_number(value):
            return False
        assert isinstance(value, int), "a number"
        if column == "partition":
            if comparison not in ("=", "<=>"):
                return False
            self._only(frozenset({value}))
            return True
        low, high = {
            "=": (value, value + 1),
            "<=>": (value, value + 1),
            ">": (value + 1, None),
            ">=": (value, None),
            "<": (0, value),
            "<=": (0, value + 1),
        }[comparison]
        self.offset_from = max(self.offset_from, low)
        if high is not None:
            self.offset_to = high if self.offset_to is None else min(self.offset_to, high)
        return True

    def _only(self, numbers: frozenset[int]) -> None:
        self.partitions = numbers if self.partitions is None else self.partitions & numbers

    def _take_time(self, comparison: str, value: object) -> None:
        # A time without a zone is in the session's zone, which is not known here.
        if comparison not in ("=", "<=>", ">", ">=") or not isinstance(value, datetime) or value.tzinfo is None:
            return
        # Floor, exactly. No record predates 1970, and brokers reserve negative numbers.
        since_ms = max(0, (value - _EPOCH) // timedelta(milliseconds=1))
        self.since_ms = since_ms if self.since_ms is None else max(self.since_ms, since_ms)

    def wants(self, partition: int) -> bool:
        return self.partitions is None or partition in self.partitions

    def narrowed(self, ranges: Iterable[ReadRange]) -> list[ReadRange]:
        """Cut the ranges by partition and offset. The planner looks timestamps up."""
        narrowed = []
        for one in ranges:
            start = max(one.start, self.offset_from)
            end = one.end if self.offset_to is None else min(one.end, self.offset_to)
            if self.wants(one.partition) and start < end:
                narrowed.append(ReadRange(one.topic, one.topic_id, one.partition, start, end, one.epoch))
        return narrowed


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
