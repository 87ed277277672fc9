"""`tidelog.verify`: finds anomalies in recorded histories of writes and reads. Pure.

    checker = tidelog.verify.HistoryChecker()
    for line in open("history.jsonl"):
        checker.feed_line(line)
    verdict = checker.verdict()
    assert verdict.is_good, verdict.anomalies

A history consists of events, as dicts or as lines of JSON (`encode_event`). Writers number the records of each
partition and put run and number into the value (`value_of`, `parse_value`). It checks readers of these kinds, in one
history or alone:

    Checker         readers of whole partitions: see `client.history`
    GroupChecker    members of a consumer group: see `client.group_history`; `GroupRecorder` logs their events

and transactions:

    TransactionChecker    what readers of committed data may see: see `client.transaction_history`

`HistoryChecker` passes each event to the checkers that know it. `tidelog verify` does the same on the command line. A
checker keeps all numbers in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tidelog.client.group_history import GROUP_KINDS, MEMBER_EVENTS, GroupChecker, GroupRecorder
from tidelog.client.history import KINDS, Anomaly, Checker, Verdict, encode_event, parse_value, value_of
from tidelog.client.transaction_history import TRANSACTION_EVENTS, TRANSACTION_KINDS, TransactionChecker
from tidelog.model.errors import InvalidRequestError

__all__ = [
    "GROUP_KINDS",
    "KINDS",
    "TRANSACTION_EVENTS",
    "TRANSACTION_KINDS",
    "Anomaly",
    "Checker",
    "GroupChecker",
    "GroupRecorder",
    "HistoryChecker",
    "TransactionChecker",
    "Verdict",
    "check",
    "encode_event",
    "parse_value",
    "value_of",
]

_WRITER_EVENTS = frozenset({"send", "ack", "fail"})


class HistoryChecker:
    """Checks topics, groups and transactions together. The verdict has the kinds of each that the history has."""

    def __init__(self) -> None:
        self._log = Checker()
        self._group = GroupChecker()
        self._transactions: TransactionChecker | None = None
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
        elif kind in TRANSACTION_EVENTS:
            self._transactions = self._transactions or TransactionChecker()
            self._transactions.feed(event)
        else:
            self._log.feed(dict(event))
            self._has_readers = True

    def verdict(self) -> Verdict:
        verdict = self._log.verdict()
        if self._has_members:
            group = self._group.verdict()
            verdict = _joined(verdict, group) if self._has_readers else group
        if self._transactions is not None:
            transactions = self._transactions.verdict()
            verdict = _joined(verdict, transactions)
            verdict.sent += transactions.sent
            verdict.acknowledged += transactions.acknowledged
        return verdict


def _joined(verdict: Verdict, other: Verdict) -> Verdict:
    """`verdict`, with what the other one has read and found."""
    verdict.read += other.read
    verdict.checked_complete = verdict.checked_complete or other.checked_complete
    for kind, count in other.counts.items():
        verdict.counts[kind] = verdict.counts.get(kind, 0) + count
    verdict.anomalies += other.anomalies
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
