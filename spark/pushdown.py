"""Filters of a batch read that narrow down what is fetched. Pure.

    column       what is done                                      does Spark look again?
    partition    other partitions are not read                     no
    offset       ranges are cut                                    no
    timestamp    all before the first record that is as young      yes: times need not rise with offsets
                 is not read

Other columns, and comparisons with anything else than a number or a time, are Spark's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from tidelog.spark.offsets import ReadRange

COMPARISONS = ("=", "<=>", ">", ">=", "<", "<=", "in")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class Narrowing:
    """What the filters taken so far leave over; all of them hold together."""

    partitions: frozenset[int] | None = None
    offset_from: int = 0
    offset_to: int | None = None
    """The first that is not wanted."""
    since_ms: int | None = None

    def take(self, column: str, comparison: str, value: object) -> bool:
        """Whether Spark need not look at this filter any more."""
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
        # A time without a zone is of the session's, which is not known here.
        if comparison not in ("=", "<=>", ">", ">=") or not isinstance(value, datetime) or value.tzinfo is None:
            return
        # Rounded down, exactly; before 1970 no record is, and numbers below 0 are words of the brokers.
        found = max(0, (value - _EPOCH) // timedelta(milliseconds=1))
        self.since_ms = found if self.since_ms is None else max(self.since_ms, found)

    def wants(self, partition: int) -> bool:
        return self.partitions is None or partition in self.partitions

    def narrowed(self, ranges: Iterable[ReadRange]) -> list[ReadRange]:
        """By partition and offset; times are looked up by whoever knows the logs."""
        found = []
        for one in ranges:
            start = max(one.start, self.offset_from)
            end = one.end if self.offset_to is None else min(one.end, self.offset_to)
            if self.wants(one.partition) and start < end:
                found.append(ReadRange(one.topic, one.topic_id, one.partition, start, end, one.epoch))
        return found


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
