"""The checker of histories of transactions: each anomaly is found, and a good history has none."""

from __future__ import annotations

from typing import Any

import pytest

from tidelog.client.verify import TRANSACTION_KINDS, TransactionChecker, Verdict, check, encode_event

Event = dict[str, Any]


def begin(name: str, owner: str = "etl") -> Event:
    return {"event": "txn-begin", "txn": name, "owner": owner}


def send(name: str, number: int, place: str = "out-0", source: tuple[str, int] | None = None) -> Event:
    return {"event": "txn-send", "txn": name, "number": number, "place": place, "source": source}


def commit(name: str) -> Event:
    return {"event": "txn-commit", "txn": name}


def end(name: str, outcome: str = "committed") -> Event:
    return {"event": "txn-end", "txn": name, "outcome": outcome}


def saw(*records: tuple[int, str, int], place: str = "out-0") -> Event:
    return {"event": "saw", "reader": "r", "place": place, "records": records}


def saw_all(place: str = "out-0") -> Event:
    return {"event": "saw-all", "place": place}


def inside(name: str, *records: tuple[str, int]) -> Event:
    return {"event": "txn-saw", "txn": name, "records": records}


def offsets(name: str, offset: int) -> Event:
    return {"event": "txn-offsets", "txn": name, "group": "g", "offsets": {"in-0": offset}}


def offset(value: int) -> Event:
    return {"event": "offset", "group": "g", "place": "in-0", "offset": value}


def verdict(*events: Event) -> Verdict:
    checker = TransactionChecker(has_requests=any(event["event"] == "txn-commit" for event in events))
    for event in events:
        checker.feed(event)
    return checker.verdict()


def kinds(*events: Event) -> set[str]:
    return {kind for kind, count in verdict(*events).counts.items() if count}


ONE = (begin("a"), send("a", 0), send("a", 1, "out-1"))
"""A transaction with records in two partitions."""
BOTH_READ = (saw((0, "a", 0)), saw((0, "a", 1), place="out-1"), saw_all(), saw_all("out-1"))


def test_a_good_history_has_no_anomaly() -> None:
    found = verdict(
        *(begin("a"), send("a", 0, source=("in-0", 0)), offsets("a", 1), end("a")),
        *(begin("b"), send("b", 0), end("b", "aborted")),
        *(begin("c"), inside("c", ("a", 0)), send("c", 0, source=("in-0", 1)), offsets("c", 2), end("c", "unknown")),
        *(saw((0, "a", 0), (3, "c", 0)), saw_all(), offset(2)),
        {"event": "inputs", "place": "in-0", "start": 0, "end": 2},
    )
    assert found.is_good, found.anomalies
    assert found.checked_complete
    assert (found.sent, found.acknowledged, found.read) == (3, 1, 2)


@pytest.mark.parametrize(
    ("kind", "events"),
    [
        ("aborted-read", (begin("a"), send("a", 0), end("a", "aborted"), saw((0, "a", 0)))),
        ("aborted-read", (begin("a"), send("a", 0), saw((0, "a", 0)), end("a", "aborted"))),
        ("aborted-read", (*ONE, end("a", "aborted"), begin("b", "other"), inside("b", ("a", 0)), end("b"))),
        ("early-read", (*ONE, begin("b", "other"), commit("b"), saw((0, "a", 0)), commit("a"), end("a"))),
        (
            "early-read",
            (*ONE, begin("b", "other"), commit("b"), inside("b", ("a", 0)), commit("a"), end("a"), end("b")),
        ),
        ("torn", (*ONE, end("a", "unknown"), saw((0, "a", 0)), saw_all(), saw_all("out-1"))),
        ("lost", (*ONE, end("a"), saw((0, "a", 0)), saw_all(), saw_all("out-1"))),
        ("lost", (*ONE, end("a"), saw_all())),
        ("duplicated", (begin("a"), send("a", 0), end("a"), saw((0, "a", 0), (1, "a", 0)))),
        ("reordered", (begin("a"), send("a", 0), send("a", 1), end("a"), saw((0, "a", 1), (1, "a", 0)))),
        (
            "late",
            (begin("a"), send("a", 0), end("a"), begin("b"), send("b", 0), end("b"), saw((0, "b", 0), (1, "a", 0))),
        ),
        (
            "late",
            (begin("a"), send("a", 0), begin("b"), send("b", 0), end("b"), saw((0, "b", 0), (1, "a", 0))),
        ),
        (
            "not-once",
            (
                *(begin("a"), send("a", 0, "mid-0"), end("a"), saw((3, "a", 0), place="mid-0")),
                {"event": "inputs", "place": "mid-0", "start": 0, "end": 5},
            ),
        ),
        (
            "circular",
            (
                *(begin("a", "x"), begin("b", "y"), send("a", 0), send("b", 0)),
                *(inside("a", ("b", 0)), inside("b", ("a", 0)), end("a"), end("b"), saw((0, "a", 0), (1, "b", 0))),
            ),
        ),
        (
            "not-once",
            (
                *(begin("a"), send("a", 0, source=("in-0", 0)), send("a", 1, source=("in-0", 0)), end("a")),
                saw((0, "a", 0), (1, "a", 1)),
            ),
        ),
        ("not-once", ({"event": "inputs", "place": "in-0", "start": 0, "end": 1},)),
        ("torn-offset", (*ONE, offsets("a", 1), end("a", "unknown"), saw_all(), saw_all("out-1"), offset(1))),
        ("torn-offset", (*ONE, offsets("a", 1), end("a"), *BOTH_READ, offset(0))),
        ("unexpected", (saw((0, "a", 0)),)),
        ("unexpected", (begin("a"), send("a", 0), send("a", 1), end("a"), saw((0, "a", 0)), saw((0, "a", 1)))),
    ],
)
def test_each_anomaly_is_found(kind: str, events: tuple[Event, ...]) -> None:
    assert kind in kinds(*events)


def test_every_kind_is_tested() -> None:
    parameters = test_each_anomaly_is_found.pytestmark[0].args[1]  # type: ignore[attr-defined]
    assert {kind for kind, _ in parameters} == set(TRANSACTION_KINDS)


def test_what_is_not_known_yet_is_no_anomaly() -> None:
    assert kinds(*ONE, end("a", "unknown"), saw_all(), saw_all("out-1")) == set(), "none of it is visible"
    assert kinds(*ONE, end("a", "unknown"), *BOTH_READ) == set(), "all of it is visible"
    assert kinds(*ONE, end("a"), saw((0, "a", 0))) == set(), "nobody has read out-1 to its end"


def test_offsets_without_a_visible_record_are_no_inputs() -> None:
    first = (begin("a"), send("a", 0, "mid-0"), commit("a"), end("a"), saw((3, "a", 0), place="mid-0"))
    second = (begin("b", "next"), send("b", 0, source=("mid-0", 3)), commit("b"), end("b"), saw((0, "b", 0)))
    assert kinds(*first, *second, {"event": "inputs", "place": "mid-0", "start": 0, "end": 9}) == set()


def test_a_fenced_transaction_that_reads_what_its_successor_wrote_is_in_no_circle() -> None:
    fenced = (begin("a"), send("a", 0), begin("b"), send("b", 0), end("b"), inside("a", ("b", 0)))
    assert kinds(*fenced, end("a", "unknown"), saw((0, "b", 0)), saw_all()) == set()
    assert "circular" in kinds(*fenced, end("a"), saw((0, "b", 0)), saw((1, "a", 0)))


def test_members_end_with_their_owner() -> None:
    def part(name: str, of: str) -> Event:
        return {"event": "txn-part", "txn": name, "of": of}

    both = (begin("a"), begin("m", "m"), send("a", 0), send("m", 0, "out-1"), part("m", "a"))
    all_read = (saw((0, "a", 0)), saw((0, "m", 0), place="out-1"), saw_all(), saw_all("out-1"))
    assert kinds(*both, end("a"), *all_read) == set()
    assert kinds(*both, end("a", "aborted"), saw_all(), saw_all("out-1")) == set()
    assert kinds(*both, end("a"), saw((0, "a", 0)), saw_all(), saw_all("out-1")) == {"lost"}
    assert kinds(*both, end("a", "unknown"), saw((0, "m", 0), place="out-1"), saw_all(), saw_all("out-1")) == {"torn"}
    assert kinds(*both, end("a", "aborted"), saw((0, "m", 0), place="out-1")) == {"aborted-read"}


def test_transactions_that_overlap_may_lie_in_each_other() -> None:
    overlapping = (begin("a", "x"), begin("b", "y"), send("a", 0), send("b", 0), send("a", 1), end("a"), end("b"))
    assert kinds(*overlapping, saw((0, "b", 0), (1, "a", 0), (2, "a", 1)), saw_all()) == set()


def test_a_file_may_have_events_of_all_kinds() -> None:
    plain = {"event": "send", "run": "w", "partition": 0, "first": 0, "count": 1}
    read = {"event": "read", "reader": "r", "partition": 0, "records": [[0, "w", 0]]}
    found = check(encode_event(event) for event in (plain, read, *ONE, end("a", "aborted"), saw((0, "a", 0))))
    assert (found.sent, found.read) == (3, 2)
    assert found.counts["aborted-read"] == 2, "when it was read, and at the end"
    assert not found.counts["lost"]
