"""Histories of transactions, and the checker of what readers of committed data may see. Pure.

Every record has an identity: the name of its transaction and its number in it. A place is a topic and a partition,
such as `orders-0`. Events are dicts, in the order in which they happened:

    {"event": "txn-begin",   "txn", "owner"}             owner: the transactional id
    {"event": "txn-part",    "txn", "of"}                the records of `txn`, a member, end with those of `of`
    {"event": "txn-send",    "txn", "number", "place", "source"}
                             before a record is sent; source: None, or [place, offset] of what it is made from
    {"event": "txn-saw",     "txn", "records": [[txn, number], ...]}       it has read these
    {"event": "txn-offsets", "txn", "group", "offsets": {place: next offset}}
    {"event": "txn-commit",  "txn"}                      before its commit is requested; see `TransactionChecker`
    {"event": "txn-end",     "txn", "outcome"}           committed, aborted or unknown
    {"event": "saw",         "reader", "place", "records": [[offset, txn, number], ...]}
                             what a reader of committed data got, in its order
    {"event": "saw-all",     "place"}                    readers have read this place from start to end
    {"event": "inputs",      "place", "start", "end"}    at the end: these records were to be processed; of a place that
                                                         transactions write, those that readers have seen
    {"event": "offset",      "group", "place", "offset"}                   at the end: what the group has committed

The checker reports:

    aborted-read   a record of an aborted transaction was read (G1a)
    early-read     a record was read before the commit of its transaction was requested (G1b)
    torn           of one transaction, some records are visible and others are not
    lost           a transaction was committed, and a record of it is not visible
    duplicated     a record is at two offsets
    reordered      a record of a transaction comes before an earlier one of it
    late           a record comes after one of a transaction that began when its own had ended, or after one of a later
                   transaction of its owner (a late message, G0)
    circular       transactions have read from each other in a circle (G1c)
    not-once       a record was processed twice, or not at all
    torn-offset    a group's offset is not where the visible outputs of its transactions are
    unexpected     a record that nobody sent, or two records at one offset
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tidelog.client.history import Anomaly, Verdict

TRANSACTION_KINDS = (
    "aborted-read",
    "early-read",
    "torn",
    "lost",
    "duplicated",
    "reordered",
    "late",
    "circular",
    "not-once",
    "torn-offset",
    "unexpected",
)
TRANSACTION_EVENTS = frozenset(
    {
        *("txn-begin", "txn-part", "txn-send", "txn-saw", "txn-offsets", "txn-commit", "txn-end"),
        *("saw", "saw-all", "inputs", "offset"),
    }
)

Identity = tuple[str, int]
Source = tuple[str, int]


@dataclass(slots=True, eq=False)
class _Transaction:
    name: str
    owner: str
    began: int
    of: str = ""
    """The transaction whose member this one is."""
    is_requested: bool = False
    """Its commit."""
    ended: int | None = None
    outcome: str = "unknown"
    sent: dict[int, tuple[str, Source | None]] = field(default_factory=dict)
    saw: set[str] = field(default_factory=set)
    """Transactions whose records it has read."""
    offsets: dict[tuple[str, str], int] = field(default_factory=dict)


class TransactionChecker:
    """See the module's docstring. `feed` every event, then ask for the `verdict`."""

    def __init__(self, *, has_requests: bool = False) -> None:
        """`has_requests`: the history has a `txn-commit` for every commit; else early reads are not looked for."""
        self._has_requests = has_requests
        self._transactions: dict[str, _Transaction] = {}
        self._visible: dict[str, dict[int, Identity]] = {}
        """By place and offset."""
        self._places: dict[Identity, tuple[str, int]] = {}
        self._complete: set[str] = set()
        self._inputs: dict[str, tuple[int, int]] = {}
        self._group_offsets: dict[tuple[str, str], int] = {}
        self._time = 0
        self._verdict = Verdict(counts=dict.fromkeys(TRANSACTION_KINDS, 0))

    def feed(self, event: Mapping[str, Any]) -> None:
        self._time += 1
        getattr(self, "_feed_" + event["event"].replace("-", "_"))(event)

    @property
    def anomalies(self) -> list[Anomaly]:
        """Those that are certain by now."""
        return self._verdict.anomalies

    def _found(self, kind: str, what: str) -> None:
        self._verdict.found(kind, -1, what)

    # Events.

    def _feed_txn_begin(self, event: Mapping[str, Any]) -> None:
        self._transactions[event["txn"]] = _Transaction(event["txn"], event["owner"], self._time)

    def _feed_txn_part(self, event: Mapping[str, Any]) -> None:
        self._transactions[event["txn"]].of = event["of"]

    def _whole(self, transaction: _Transaction) -> _Transaction:
        """The one whose end is that of this one, too."""
        return self._transactions[transaction.of] if transaction.of else transaction

    def _feed_txn_send(self, event: Mapping[str, Any]) -> None:
        source = event.get("source")
        self._transactions[event["txn"]].sent[event["number"]] = (event["place"], tuple(source) if source else None)
        self._verdict.sent += 1

    def _feed_txn_saw(self, event: Mapping[str, Any]) -> None:
        reader = self._transactions[event["txn"]]
        for name, number in event["records"]:
            reader.saw.add(name)
            self._check_committed(f"transaction {reader.name}", (name, number))

    def _feed_txn_offsets(self, event: Mapping[str, Any]) -> None:
        offsets = self._transactions[event["txn"]].offsets
        for place, offset in event["offsets"].items():
            offsets[event["group"], place] = offset

    def _feed_txn_commit(self, event: Mapping[str, Any]) -> None:
        self._transactions[event["txn"]].is_requested = True

    def _feed_txn_end(self, event: Mapping[str, Any]) -> None:
        transaction = self._transactions[event["txn"]]
        transaction.outcome, transaction.ended = event["outcome"], self._time
        if event["outcome"] == "committed":
            self._verdict.acknowledged += len(transaction.sent)

    def _feed_saw(self, event: Mapping[str, Any]) -> None:
        place, reader = event["place"], event["reader"]
        found = self._visible.setdefault(place, {})
        for offset, name, number in event["records"]:
            identity = name, number
            self._verdict.read += 1
            self._check_committed(f"{reader}, {place} at {offset}", identity)
            if found.setdefault(offset, identity) != identity:
                self._found("unexpected", f"{place} at {offset} is {_show(found[offset])} and {_show(identity)}")
            before = self._places.setdefault(identity, (place, offset))
            if before != (place, offset):
                self._found("duplicated", f"{_show(identity)} is at {before[0]} {before[1]} and at {place} {offset}")

    def _feed_saw_all(self, event: Mapping[str, Any]) -> None:
        self._complete.add(event["place"])
        self._verdict.checked_complete = True

    def _feed_inputs(self, event: Mapping[str, Any]) -> None:
        self._inputs[event["place"]] = (event["start"], event["end"])

    def _feed_offset(self, event: Mapping[str, Any]) -> None:
        self._group_offsets[event["group"], event["place"]] = event["offset"]

    def _check_committed(self, where: str, identity: Identity) -> None:
        transaction = self._transactions.get(identity[0])
        if transaction is None or identity[1] not in transaction.sent:
            self._found("unexpected", f"{where}: {_show(identity)} was sent by nobody")
        elif self._whole(transaction).outcome == "aborted":
            self._found("aborted-read", f"{where}: {_show(identity)} was read, and its transaction is aborted")
        elif self._has_requests and not self._whole(transaction).is_requested:
            self._found("early-read", f"{where}: {_show(identity)} was read, and nobody has asked for its commit yet")

    # The verdict.

    def verdict(self) -> Verdict:
        """Call it once, after the last event."""
        visible = self._visible_transactions()
        for transaction in self._transactions.values():
            whole = self._whole(transaction)
            self._check_whole(transaction, whole.outcome, is_visible=whole.name in visible)
        for place, found in self._visible.items():
            self._check_order(place, [found[offset] for offset in sorted(found)])
        self._check_circles(visible)
        self._check_processed()
        self._check_offsets(visible)
        return self._verdict

    def _visible_transactions(self) -> set[str]:
        """With those of which only members have visible records."""
        seen = {name for name, _ in self._places}
        return seen | {self._transactions[name].of for name in seen if name in self._transactions}

    def _check_whole(self, transaction: _Transaction, outcome: str, *, is_visible: bool) -> None:
        if outcome == "aborted":
            # It may have ended after a reader got its records.
            for number in transaction.sent:
                if (transaction.name, number) in self._places:
                    self._found("aborted-read", f"{_show((transaction.name, number))} is visible, and is aborted")
            return
        missing = [
            number
            for number, (place, _) in transaction.sent.items()
            if place in self._complete and (transaction.name, number) not in self._places
        ]
        if not missing:
            return
        if outcome == "committed":
            self._found("lost", f"{transaction.name} is committed, and its records {missing} are not visible")
        elif is_visible:
            self._found("torn", f"{transaction.name} is visible without its records {missing}")

    def _check_order(self, place: str, found: Iterable[Identity]) -> None:
        last: dict[str, int] = {}
        latest_began: tuple[int, str] = (-1, "")
        latest_of: dict[str, tuple[int, str]] = {}
        """By owner."""
        for name, number in found:
            transaction = self._transactions.get(name)
            if transaction is None:
                continue
            ended = self._whole(transaction).ended
            if last.get(name, -1) > number:
                self._found("reordered", f"{place}: {_show((name, number))} is after {_show((name, last[name]))}")
            last[name] = max(number, last.get(name, -1))
            if ended is not None and latest_began[0] > ended:
                later = f"a record of {latest_began[1]}, which began after the end of {name}"
                self._found("late", f"{place}: {_show((name, number))} is after {later}")
            latest_began = max(latest_began, (transaction.began, name))
            latest = max(latest_of.get(transaction.owner, (-1, "")), (transaction.began, name))
            latest_of[transaction.owner] = latest
            if latest[1] != name:
                self._found("late", f"{place}: {_show((name, number))} is after a record of {latest[1]}, its successor")

    def _check_circles(self, visible: set[str]) -> None:
        """Edges lead from a committed transaction to those whose records it read, and to the one before it of its
        owner. One that did not commit may have read what its successor has written: nobody reads its own records."""
        before: dict[str, str] = {}
        edges: dict[str, set[str]] = {}
        for name, transaction in self._transactions.items():
            if name not in visible and self._whole(transaction).outcome != "committed":
                continue
            edges[name] = set(transaction.saw)
            if transaction.owner in before:
                edges[name].add(before[transaction.owner])
            before[transaction.owner] = name
        for others in edges.values():
            others.intersection_update(edges)
        done: set[str] = set()
        for name in edges:
            circle = _circle_from(name, edges, done)
            if circle:
                self._found("circular", " has read from ".join(circle))
                return

    def _outputs(self) -> dict[Source, list[Identity]]:
        outputs: dict[Source, list[Identity]] = {}
        for name, transaction in self._transactions.items():
            for number, (_, source) in transaction.sent.items():
                if source is not None and (name, number) in self._places:
                    outputs.setdefault(source, []).append((name, number))
        return outputs

    def _check_processed(self) -> None:
        outputs = self._outputs()
        for source, made in sorted(outputs.items()):
            if len(made) > 1:
                names = ", ".join(map(_show, made))
                self._found("not-once", f"{source[0]} at {source[1]} was processed {len(made)} times: {names}")
        for place, (start, end) in self._inputs.items():
            written = self._visible.get(place)
            for offset in range(start, end):
                if (place, offset) not in outputs and (written is None or offset in written):
                    self._found("not-once", f"{place} at {offset} was not processed")

    def _check_offsets(self, visible: set[str]) -> None:
        """A group's offset is the highest that a transaction has committed whose records are visible."""
        highest: dict[tuple[str, str], int] = {}
        for transaction in self._transactions.values():
            if transaction.name in visible or transaction.outcome == "committed":
                for where, offset in transaction.offsets.items():
                    highest[where] = max(offset, highest.get(where, -1))
        for where, offset in self._group_offsets.items():
            if offset != highest.get(where, -1):
                self._found(
                    "torn-offset",
                    f"group {where[0]} has committed {offset} of {where[1]}; visible transactions have "
                    f"{highest.get(where, -1)}",
                )


def _circle_from(start: str, edges: Mapping[str, set[str]], done: set[str]) -> list[str] | None:
    """A circle that can be reached from `start`; `done`: names from which there is none."""
    path: dict[str, None] = {}
    waiting = [(start, iter(sorted(edges[start])))]
    if start in done:
        return None
    path[start] = None
    while waiting:
        name, others = waiting[-1]
        for other in others:
            if other in path:
                names = list(path)
                return [*names[names.index(other) :], other]
            if other not in done:
                path[other] = None
                waiting.append((other, iter(sorted(edges[other]))))
                break
        else:
            waiting.pop()
            del path[name]
            done.add(name)
    return None


def _show(identity: Identity) -> str:
    return f"{identity[0]}/{identity[1]}"
