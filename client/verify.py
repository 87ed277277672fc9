"""`tidelog.verify`: finds anomalies in recorded histories of writes and reads. Pure.

    checker = tidelog.verify.HistoryChecker()
    for line in open("history.jsonl"):
        checker.feed_line(line)
    verdict = checker.verdict()
    assert verdict.is_good, verdict.anomalies

A history consists of events, as dicts or as lines of JSON (`encode_event`). Writers number the records of each
partition and put run and number into the value (`value_of`, `parse_value`). It checks two kinds of readers, in one
history or alone:

    Checker         readers of whole partitions: see `client.history`
    GroupChecker    members of a consumer group: see `client.group_history`; `GroupRecorder` logs their events

`HistoryChecker` passes each event to the checkers that know it. `tidelog verify` does the same on the command line. A
checker keeps all numbers in memory.
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
    """Checks topics and groups together. The verdict has the kinds of both, those of groups only if there are
    members."""

    def __init__(self) -> None:
        self._log = Checker()
        self._group = GroupChecker()
        self._has_members = self._has_readers = False

    def feed_line(self, line: str, *, where: str = "") -> None:
        """Feed one line of a history. Raises `InvalidRequestError` for a malformed one."""
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
        verdict = self._log.verdict()
        if not self._has_members:
            return verdict
        group = self._group.verdict()
        if not self._has_readers:
            return group
        verdict.read += group.read
        verdict.checked_complete = verdict.checked_complete or group.checked_complete
        for kind, count in group.counts.items():
            verdict.counts[kind] = verdict.counts.get(kind, 0) + count
        verdict.anomalies += group.anomalies
        return verdict


def check(history: Iterable[str | Mapping[str, Any]]) -> Verdict:
    """Return the verdict on events, or on lines of them."""
    checker = HistoryChecker()
    for number, event in enumerate(history, start=1):
        if isinstance(event, str):
            checker.feed_line(event, where=f"line {number}")
        else:
            checker.feed(event)
    return checker.verdict()
