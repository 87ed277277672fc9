"""`tidelog.verify`: checkers of recorded histories. What was written and read goes in, anomalies come out. Pure.

    checker = tidelog.verify.HistoryChecker()
    for line in open("history.jsonl"):
        checker.feed_line(line)
    verdict = checker.verdict()
    assert verdict.is_good, verdict.anomalies

A history is events, as dicts or as lines of JSON (`encode_event`). Writers number the records of each partition and put
run and number into the value (`value_of`, `parse_value`). Two kinds of readers can be checked, in one history or alone:

    Checker         who reads whole partitions: `client.history` has its events and what is found
    GroupChecker    members of a consumer group: see `client.group_history`; `GroupRecorder` notes them

`HistoryChecker` gives each event to those that know it. `tidelog verify` is the same as commands. A checker keeps all
numbers in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tidelog.client.group_history import GROUP_KINDS, MEMBER_EVENTS, GroupChecker, GroupRecorder
from tidelog.client.history import KINDS, Anomaly, Checker, Verdict, encode_event, parse_value, value_of
from tidelog.model.errors import InvalidRequestError

__all__ = [
    "GROUP_KINDS",
    "KINDS",
    "Anomaly",
    "Checker",
    "GroupChecker",
    "GroupRecorder",
    "HistoryChecker",
    "Verdict",
    "check",
    "encode_event",
    "parse_value",
    "value_of",
]

_WRITER_EVENTS = frozenset({"send", "ack", "fail"})


class HistoryChecker:
    """Of topics and groups together; the verdict has the kinds of both, those of groups only if there are members."""

    def __init__(self) -> None:
        self._log = Checker()
        self._group = GroupChecker()
        self._has_members = self._has_readers = False

    def feed_line(self, line: str, *, where: str = "") -> None:
        """A line of a history; `InvalidRequestError` says what is wrong with it."""
        try:
            self.feed(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequestError(f"{where}: no line of a history: {error!r}") from error

    def feed(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind in _WRITER_EVENTS:
            self._log.feed(dict(event))
            self._group.feed(event)
        elif kind in MEMBER_EVENTS:
            self._has_members = True
            self._group.feed(event)
        else:
            self._log.feed(dict(event))
            self._has_readers = True

    def verdict(self) -> Verdict:
        found = self._log.verdict()
        if not self._has_members:
            return found
        group = self._group.verdict()
        if not self._has_readers:
            return group
        found.read += group.read
        found.checked_complete = found.checked_complete or group.checked_complete
        for kind, count in group.counts.items():
            found.counts[kind] = found.counts.get(kind, 0) + count
        found.anomalies += group.anomalies
        return found


def check(history: Iterable[str | Mapping[str, Any]]) -> Verdict:
    """The verdict on events, or lines of them."""
    checker = HistoryChecker()
    for number, event in enumerate(history, start=1):
        if isinstance(event, str):
            checker.feed_line(event, where=f"line {number}")
        else:
            checker.feed(event)
    return checker.verdict()
