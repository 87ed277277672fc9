"""The checkers of `make chaos`, fed with histories that are sound and with histories that are broken."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
from chaos.tracebacks import unexpected_tracebacks

from tidelog.testing.chaos.checks import AckGaps, CommitOrder, Progress
from tidelog.testing.chaos.history import MemberLog, Tail, WriterLog
from tidelog.testing.chaos.judge import ReadFailedError, judge, read_last
from tidelog.testing.chaos.plan import KINDS, QUIET, QUIET_SHARE, draw
from tidelog.testing.chaos.worker_spec import WorkerSpec

TOPICS = {"events": 1}
STUCK_S, RECOVERY_S = 60.0, 15.0


def progress() -> Progress:
    return Progress(["alone"], TOPICS, stuck_s=STUCK_S, recovery_s=RECOVERY_S)


# Readers that stop.


@pytest.mark.requirement("a:S-10")
def test_reader_is_stuck_when_records_wait_for_too_long_on_a_healthy_cluster() -> None:
    checker = progress()
    checker.read("alone", "member-1", "events", 0, 4)
    checker.acked("events", 0, 9)
    assert checker.tick(STUCK_S - 1, healthy_s=100, at_s=1) == []
    (found,) = checker.tick(2, healthy_s=102, at_s=2)
    assert (found.group, found.reader, found.position, found.log_end) == ("alone", "member-1", 5, 10)
    assert "reader-stuck: group=alone reader=member-1 events-0 position=5 log_end=10" in str(found)
    assert checker.tick(100, healthy_s=202, at_s=3) == [], "it is named once"
    assert checker.stuck == [found]


def test_group_that_was_given_nothing_is_stuck_and_silent() -> None:
    checker = progress()
    checker.acked("events", 0, 0)
    assert checker.silent_groups() == ["alone"]
    (found,) = checker.tick(STUCK_S, healthy_s=1000, at_s=1)
    assert (found.reader, found.position) == ("", 0)


def test_reader_is_not_stuck_while_a_fault_lasts_or_the_cluster_recovers() -> None:
    checker = progress()
    checker.acked("events", 0, 9)
    for _ in range(100):
        assert checker.tick(30, healthy_s=0, at_s=1) == []
        assert checker.tick(10, healthy_s=10, at_s=1) == []


def test_healthy_periods_add_up_until_a_reader_counts_as_stuck() -> None:
    checker = progress()
    checker.acked("events", 0, 9)
    found = [row for _ in range(4) for row in checker.tick(20, healthy_s=RECOVERY_S + 20, at_s=1)]
    assert len(found) == 1


def test_reader_that_goes_on_is_named_as_stuck_and_recovered() -> None:
    checker = progress()
    checker.acked("events", 0, 9)
    assert checker.tick(STUCK_S, healthy_s=100, at_s=1)
    checker.read("alone", "member-1", "events", 0, 9)
    (found,) = checker.stuck
    assert found.has_recovered
    assert str(found).endswith("it went on later")


def test_reader_at_the_end_is_not_stuck() -> None:
    checker = progress()
    checker.acked("events", 0, 9)
    checker.read("alone", "member-1", "events", 0, 9)
    assert checker.tick(1000, healthy_s=1000, at_s=1) == []
    assert checker.behind({("events", 0): 10}) == []
    assert checker.behind({("events", 0): 11}) == ["alone"]


def test_records_that_are_read_again_are_no_progress() -> None:
    checker = progress()
    checker.acked("events", 0, 9)
    checker.read("alone", "member-1", "events", 0, 5)
    checker.tick(STUCK_S - 1, healthy_s=100, at_s=1)
    checker.read("alone", "member-2", "events", 0, 3)
    assert checker.tick(2, healthy_s=100, at_s=2)


# Commits.


def assigned(member: str, at_ms: int) -> dict[str, Any]:
    return {"event": "assigned", "member": member, "partition": 0, "offset": 0, "at_ms": at_ms}


def committed(member: str, offset: int, at_ms: int, began_ms: int | None = None) -> dict[str, Any]:
    event = {"event": "committed", "member": member, "partition": 0, "offset": offset, "at_ms": at_ms}
    return event if began_ms is None else {**event, "began_ms": began_ms}


def commit_order(*events: dict[str, Any]) -> list[str]:
    order = CommitOrder()
    for event in events:
        order.feed(event)
    return order.verdict()


def test_commits_that_rise_are_in_order() -> None:
    assert (
        commit_order(assigned("a", 0), committed("a", 5, 10, 9), committed("a", 5, 20, 19), committed("a", 9, 30)) == []
    )


def test_member_that_takes_its_own_commit_back_is_found() -> None:
    (found,) = commit_order(assigned("a", 0), committed("a", 9, 10, 9), committed("a", 5, 20, 19))
    assert found == "commit-back: partition 0: a committed 5 after a had committed 9"


def test_former_owner_that_commits_behind_the_new_one_is_found() -> None:
    events = assigned("a", 0), assigned("b", 10), committed("b", 9, 20, 19), committed("a", 5, 40, 30)
    assert len(commit_order(*events)) == 1


def test_new_owner_may_commit_records_that_it_was_given_again() -> None:
    assert commit_order(assigned("a", 0), committed("a", 9, 20, 15), assigned("b", 10), committed("b", 5, 30, 25)) == []


def test_late_answer_to_an_earlier_commit_is_no_step_back() -> None:
    events = assigned("a", 0), assigned("b", 10), committed("b", 9, 30, 29), committed("a", 5, 40, 9)
    assert commit_order(*events) == []


def test_commits_in_the_background_have_no_order() -> None:
    assert commit_order(assigned("a", 0), committed("a", 9, 10), committed("a", 5, 20)) == []


# Producers.


def test_longest_gap_is_of_each_producer() -> None:
    gaps = AckGaps()
    for producer, at_ms in [("a", 0), ("b", 100), ("a", 300), ("b", 150), ("a", 310)]:
        gaps.acked(producer, at_ms)
    assert gaps.longest_ms == {"a": 300, "b": 50}


# The whole verdict.


def histories(path: Path) -> list[WorkerSpec]:
    """A producer's ten records, all acknowledged, and a reader that was given all of them."""
    rows = [
        WorkerSpec(role, "tidelog", role, "", TOPICS, history=str(path / f"{role}.jsonl"), group=group)
        for role, group in (("producer", ""), ("reader", "alone"))
    ]
    writer = WriterLog(path / "producer.jsonl", "producer")
    for number in range(10):
        writer.sent("events", 0, number)
        writer.acked("events", 0, number, number, began_ms=0)
    writer.close()
    member = MemberLog(path / "reader.jsonl", "reader")
    member.assigned([("events", 0)])
    member.polled([("events", 0, number, b"producer 0 %d" % number) for number in range(10)])
    member.committed({("events", 0): 10}, began_ms=0)
    member.close()
    write_last(path, [(number, number) for number in range(10)])
    return rows


def write_last(path: Path, found: list[tuple[int, int]]) -> None:
    """(offset, number) of what the last reader has found."""
    records = [[offset, "producer", number] for offset, number in found]
    events = [
        {"event": "read", "reader": "last", "partition": 0, "records": records},
        {"event": "end", "reader": "last", "partition": 0, "start": 0, "end": 20},
    ]
    (path / "events-last.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")


def rewrite(path: Path, change: Any) -> None:
    """Each event of a reader's history as `change` returns it; None leaves it out."""
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    changed = [event for event in map(change, events) if event is not None]
    path.write_text("".join(json.dumps(event) + "\n" for event in changed), encoding="utf-8")


def counts(path: Path, rows: list[WorkerSpec]) -> dict[str, int]:
    return {kind: count for kind, count in judge(path, rows, {("events", 0): 10}).counts.items() if count}


def test_sound_histories_are_good(tmp_path: Path) -> None:
    rows = histories(tmp_path)
    judgement = judge(tmp_path, rows, {("events", 0): 10})
    assert judgement.is_good
    assert counts(tmp_path, rows) == {}


@pytest.mark.parametrize(
    ("found", "kinds"),
    [
        ([(number, number) for number in range(9)], {"lost": 1}),
        ([*((number, number) for number in range(10)), (10, 9)], {"duplicated": 1}),
        ([*((number, number) for number in range(8)), (8, 9), (9, 8)], {"reordered": 1, "out-of-place": 2}),
        ([*((number, number) for number in range(10)), (10, 77)], {"unexpected": 1}),
    ],
)
def test_broken_log_is_found(tmp_path: Path, found: list[tuple[int, int]], kinds: dict[str, int]) -> None:
    rows = histories(tmp_path)
    write_last(tmp_path, found)
    assert counts(tmp_path, rows) == kinds


@pytest.mark.requirement("a:S-10")
def test_record_that_a_group_was_not_given_is_found(tmp_path: Path) -> None:
    rows = histories(tmp_path)

    def without_fifth(event: dict[str, Any]) -> dict[str, Any]:
        records = [row for row in event.get("records", ()) if row[0] != 5]
        return {**event, "records": records} if records else event

    rewrite(tmp_path / "reader.jsonl", without_fifth)
    assert counts(tmp_path, rows) == {"lost-write": 1, "poll-skip": 1}


def test_end_that_a_group_was_not_given_is_found(tmp_path: Path) -> None:
    rows = histories(tmp_path)
    rewrite(
        tmp_path / "reader.jsonl",
        lambda event: {**event, "records": event["records"][:8]} if "records" in event else event,
    )
    assert counts(tmp_path, rows) == {"unseen": 2}


def test_lost_commit_is_found(tmp_path: Path) -> None:
    rows = histories(tmp_path)
    event = {"event": "assigned", "member": "reader", "topic": "events", "partition": 0, "offset": 4, "at_ms": 1 << 60}
    with (tmp_path / "reader.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")
    assert counts(tmp_path, rows) == {"lost-commit": 1}


def test_log_that_was_not_read_to_its_end_is_no_good_run(tmp_path: Path) -> None:
    rows = histories(tmp_path)
    rewrite(tmp_path / "events-last.jsonl", lambda event: None if event["event"] == "end" else event)
    assert not judge(tmp_path, rows, {("events", 0): 10}).is_good


def test_log_that_nobody_could_read_is_no_good_run(tmp_path: Path) -> None:
    rows = histories(tmp_path)
    (tmp_path / "events-last.jsonl").unlink()
    assert not judge(tmp_path, rows, {("events", 0): 10}).is_good


def test_reading_of_a_cluster_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ReadFailedError, match="the last reading of events failed"):
        read_last("localhost:1", "events", tmp_path / "history.jsonl")


# Histories.


def test_member_notes_an_assignment_with_its_first_record(tmp_path: Path) -> None:
    path = tmp_path / "member.jsonl"
    member = MemberLog(path, "member")
    member.assigned([("events", 0), ("events", 1)])
    member.polled([("events", 0, 7, b"run 0 7")])
    member.revoked([("events", 0), ("events", 1)])
    member.close()
    assert member.positions == {}
    events = [(event["event"], event.get("partition")) for event in Tail(path).events()]
    assert events == [("assigned", 0), ("poll", 0), ("revoked", 0), ("revoked", 1), ("end", None)]


def test_tail_leaves_a_line_that_is_not_complete(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    tail = Tail(path)
    assert list(tail.events()) == []
    path.write_text('{"event": "alive"}\n{"event": ', encoding="utf-8")
    assert [event["event"] for event in tail.events()] == ["alive"]
    with path.open("a", encoding="utf-8") as file:
        file.write('"end"}\n')
    assert [event["event"] for event in tail.events()] == ["end"]


# Logs of nodes.

CHAIN = """12:00 ERROR raft stops
Traceback (most recent call last):
  File "disk.py", line 1, in fdatasync
OSError: [Errno 5] Input/output error

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "persister.py", line 2, in run
    await self._persist()
tidelog.model.errors.StorageError: sync raft: Input/output error (EIO)
12:01 INFO goes on
"""


def test_traceback_of_a_failed_disk_is_expected_on_that_node_only() -> None:
    assert unexpected_tracebacks(CHAIN, disk_has_failed=True) == []
    assert len(unexpected_tracebacks(CHAIN, disk_has_failed=False)) == 2


def test_other_traceback_is_a_failure_on_every_node() -> None:
    log = CHAIN + 'Traceback (most recent call last):\n  File "a.py", line 1\nKeyError: 7\n'
    assert unexpected_tracebacks(log, disk_has_failed=True) == ["KeyError: 7"]


# The plan.


def test_plan_is_the_same_for_the_same_seed() -> None:
    first, second, other = (list(islice(draw(Random(seed)), 50)) for seed in (1, 1, 2))
    assert first == second
    assert first != other


def test_plan_has_every_kind_and_about_a_quarter_of_quiet_time() -> None:
    faults = list(islice(draw(Random(7)), 2_000))
    kinds = Counter(fault.kind for fault in faults)
    assert set(kinds) == {*KINDS, QUIET}
    quiet_s = sum(fault.seconds for fault in faults if fault.kind == QUIET)
    busy_s = sum(fault.seconds + fault.pause_s for fault in faults if fault.kind != QUIET)
    assert abs(quiet_s / (quiet_s + busy_s) - QUIET_SHARE) < 0.05


def test_plan_without_quiet_time_has_short_pauses_if_it_should() -> None:
    faults = list(islice(draw(Random(7), quiet_share=0.0, pause_s=(0.5, 2.0)), 500))
    assert QUIET not in {fault.kind for fault in faults}
    assert 0.5 <= min(fault.pause_s for fault in faults) < max(fault.pause_s for fault in faults) <= 2.0


def test_plan_has_only_the_kinds_that_are_asked_for() -> None:
    faults = islice(draw(Random(7), {"freeze": KINDS["freeze"]}), 200)
    assert {fault.kind for fault in faults} == {"freeze", QUIET}
