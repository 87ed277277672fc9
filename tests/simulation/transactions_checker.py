"""What must hold of transactions: `tidelog.verify.TransactionChecker` on what programs do and see, and the log.

    open at the end    when all is well, no partition has an open transaction, and its readers reach its end
    aborted-read ...   see `client.transaction_history`; an anomaly that shows at once fails the run at once

Checks draw no random numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from simulation.broker_checker import Fail
from tidelog.client.transaction_history import TransactionChecker


class TransactionHistory:
    """The programs report here, in the order in which things happen."""

    def __init__(self, fail: Fail) -> None:
        self.committed = self.aborted = self.unknown = self.joint = 0
        self.tokens_found = self.inside = 0
        """Commits that a later life has found by their token; records that transactions have read."""
        self._checker = TransactionChecker(has_requests=True)
        self._fail = fail
        self._found = 0
        self._unnamed: dict[str, None] = {}
        """Members that no owner has named so far."""

    def begin(self, name: str, owner: str) -> None:
        self._feed({"event": "txn-begin", "txn": name, "owner": owner})

    def begin_member(self, name: str) -> None:
        self._unnamed[name] = None
        self.begin(name, name)

    def part(self, name: str, of: str) -> None:
        """The commit of `of` is going to name this member."""
        self.joint += 1
        self._unnamed.pop(name, None)
        self._feed({"event": "txn-part", "txn": name, "of": of})

    def send(self, name: str, number: int, place: str, source: tuple[str, int] | None) -> None:
        self._feed({"event": "txn-send", "txn": name, "number": number, "place": place, "source": source})

    def offsets(self, name: str, group: str, offsets: Mapping[str, int]) -> None:
        self._feed({"event": "txn-offsets", "txn": name, "group": group, "offsets": offsets})

    def read_inside(self, name: str, records: Iterable[tuple[str, int]]) -> None:
        records = list(records)
        self.inside += len(records)
        self._feed({"event": "txn-saw", "txn": name, "records": records})

    def commit(self, name: str) -> None:
        """Its commit is about to be requested."""
        self._feed({"event": "txn-commit", "txn": name})

    def end(self, name: str, outcome: str) -> None:
        setattr(self, outcome, getattr(self, outcome) + 1)
        self._feed({"event": "txn-end", "txn": name, "outcome": outcome})

    def saw(self, reader: str, place: str, records: list[tuple[int, str, int]]) -> None:
        self._feed({"event": "saw", "reader": reader, "place": place, "records": records})

    def _feed(self, event: dict[str, Any]) -> None:
        self._checker.feed(event)
        self._report(self._checker.anomalies)

    def finish(self, places: Iterable[str], inputs: Mapping[str, int], offsets: Mapping[tuple[str, str], int]) -> None:
        """`places` were read to their ends; all of `inputs` (place: records) are processed; `offsets` are the groups'
        (group, place), as they are stored."""
        for name in self._unnamed:
            self._checker.feed({"event": "txn-end", "txn": name, "outcome": "aborted"})
        for place in places:
            self._checker.feed({"event": "saw-all", "place": place})
        for place, end in inputs.items():
            self._checker.feed({"event": "inputs", "place": place, "start": 0, "end": end})
        for (group, place), offset in offsets.items():
            self._checker.feed({"event": "offset", "group": group, "place": place, "offset": offset})
        self._report(self._checker.verdict().anomalies)

    def _report(self, anomalies: list[Any]) -> None:
        if len(anomalies) > self._found:
            self._found = len(anomalies)
            self._fail("history", f"{anomalies[-1].kind}: {anomalies[-1].what}")


def parse(value: bytes) -> tuple[str, int]:
    """(transaction, number) of a record: `m201.1.7/3`."""
    name, _, number = value.partition(b"/")
    return name.decode(), int(number)
