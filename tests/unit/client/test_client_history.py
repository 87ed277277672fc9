"""The checker of histories: each anomaly is found, and a good history is good."""

from __future__ import annotations

from typing import Any

import pytest

from tidelog.client.history import KINDS, Checker, Verdict, encode_event, parse_value, value_of
from tidelog.model.errors import InvalidRequestError


def send(first: int, count: int = 1, *, run: str = "r", partition: int = 0) -> dict[str, Any]:
    return {"event": "send", "run": run, "partition": partition, "first": first, "count": count}


def ack(first: int, offset: int, count: int = 1, *, run: str = "r", partition: int = 0) -> dict[str, Any]:
    return {"event": "ack", "run": run, "partition": partition, "first": first, "count": count, "offset": offset}


def fail(first: int, *, was_sent: bool) -> dict[str, Any]:
    return {"event": "fail", "run": "r", "partition": 0, "first": first, "count": 1, "was_sent": was_sent}


def read(*records: tuple[int, int], reader: str = "c", run: str = "r", partition: int = 0) -> dict[str, Any]:
    rows = [[offset, run, number] for offset, number in records]
    return {"event": "read", "reader": reader, "partition": partition, "records": rows}


def end(stop: int, *, start: int = 0, reader: str = "c", partition: int = 0) -> dict[str, Any]:
    return {"event": "end", "reader": reader, "partition": partition, "start": start, "end": stop}


def cut(offset: int) -> dict[str, Any]:
    return {"event": "cut", "reader": "c", "partition": 0, "offset": offset}


def check(*events: dict[str, Any]) -> Verdict:
    checker = Checker()
    for event in events:
        checker.feed_line(encode_event(event))
    return checker.verdict()


def found(*events: dict[str, Any]) -> dict[str, int]:
    return {kind: count for kind, count in check(*events).counts.items() if count}


@pytest.mark.requirement("a:N-13")
def test_a_good_history_is_good() -> None:
    events = [send(0, 3), ack(0, 0, 3), send(3), fail(3, was_sent=True), send(4), fail(4, was_sent=False), send(5)]
    verdict = check(*events, read((0, 0), (1, 1)), read((2, 2), (3, 5)), end(4))
    assert verdict.anomalies == []
    assert (verdict.sent, verdict.acknowledged, verdict.refused, verdict.unknown, verdict.read) == (6, 3, 1, 2, 4)
    assert verdict.checked_complete


def test_an_acknowledged_record_that_is_not_there_is_lost_only_where_all_was_read() -> None:
    events = [send(0, 2), ack(0, 0, 2), read((0, 0))]
    assert found(*events) == {}
    assert found(*events, end(1)) == {}
    assert found(*events, end(2)) == {"lost": 1}
    assert found(send(0), ack(0, -1), end(5)) == {"lost": 1}
    assert found(*events, end(2, partition=1)) == {}


def test_what_was_acknowledged_as_replicated_before_the_log_was_seen_to_end_below_it_is_lost() -> None:
    def acked(at_ms: int) -> dict[str, Any]:
        return {**ack(0, 0, 3), "at_ms": at_ms}

    def ended(log_end: int, *, asked_ms: int) -> dict[str, Any]:
        return {**end(log_end), "log_end": log_end, "asked_ms": asked_ms}

    events = [send(0, 3), acked(100), read((0, 0))]
    assert found(*events, ended(1, asked_ms=101)) == {"lost": 2}, "the log ends at 1"
    assert found(*events, read((1, 1), (2, 2)), ended(3, asked_ms=101)) == {}
    assert found(*events, ended(1, asked_ms=99)) == {}, "the end was asked for before: it may have grown since"
    assert found(send(0, 3), ack(0, 0, 3), read((0, 0)), ended(1, asked_ms=101)) == {}, "not acknowledged as replicated"
    assert found(*events, end(1)) == {}, "it has not read to the end"
    seen = read((0, 0), (1, 1), (2, 2), reader="early")
    assert found(send(0, 3), acked(100), seen, read((0, 0)), ended(1, asked_ms=101)) == {"lost": 2}, "read, and gone"
    assert found(send(0), {**ack(0, -1), "at_ms": 1}, read((0, 0)), ended(1, asked_ms=9)) == {}, "no offset known"


def test_one_number_at_two_offsets_is_a_duplicate() -> None:
    assert found(send(0), ack(0, 0), read((0, 0), (1, 0))) == {"duplicated": 1}


def test_a_later_number_at_a_lower_offset_is_a_reordering() -> None:
    assert found(send(0, 3), read((0, 1), (1, 0), (2, 2))) == {"reordered": 1}
    other = {"event": "send", "run": "other", "partition": 0, "first": 0, "count": 1}
    assert found(send(5), other, read((0, 5)), read((1, 0), run="other")) == {}, "runs are not ordered among each other"


def test_a_record_elsewhere_than_acknowledged_is_out_of_place() -> None:
    assert found(send(0), ack(0, 7), read((8, 0))) == {"out-of-place": 1}
    two = [read((0, 0), reader="x"), read((0, 1), reader="y")]
    assert found(send(0, 2), *two) == {"out-of-place": 1}


def test_an_offset_that_comes_again_is_replayed_unless_the_log_was_cut() -> None:
    assert found(send(0, 2), read((0, 0), (1, 1)), read((1, 1))) == {"replayed": 1}
    assert found(send(0, 2), read((0, 0), (1, 1)), cut(1), read((1, 1))) == {}
    assert found(send(0, 2), read((0, 0), (1, 1)), cut(1), read((0, 0))) == {"replayed": 1}


def test_what_nobody_sent_or_what_was_refused_is_unexpected() -> None:
    assert found(read((0, 9))) == {"unexpected": 1}
    assert found(send(0), fail(0, was_sent=False), read((0, 0))) == {"unexpected": 1}
    assert found(send(0), fail(0, was_sent=True), read((0, 0))) == {}


def test_every_kind_has_a_test_above() -> None:
    assert KINDS == ("lost", "duplicated", "reordered", "out-of-place", "replayed", "unexpected")


@pytest.mark.parametrize("line", ["", "7\n", '{"event": "sing", "partition": 0}\n', '{"event": "ack"}\n', "{\n"])
def test_a_line_that_is_no_event_is_reported_with_its_position(line: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"h\.jsonl:3: no line of a history"):
        Checker().feed_line(line, where="h.jsonl:3")


def test_values_carry_run_partition_and_number() -> None:
    assert parse_value(value_of("run", 3, 17)) == ("run", 3, 17)
    for other in (None, b"", b"a b c", b"run 1", b"run 1 2 3", b"\xff 1 2"):
        assert parse_value(other) is None
