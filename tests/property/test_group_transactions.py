"""Any history of commits, transactions, markers and deletions leaves the offsets that a list of all writes gives
(`support.groups.offsets_model`)."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.groups.offsets_model import OffsetsModel

from tidelog.coordinator import machine, offsets, pending_offsets, requests, state
from tidelog.coordinator.records import Kind

HISTORIES = st.lists(st.integers(0, 1 << 20), max_size=120)


@pytest.mark.case("C1", "C6")
@pytest.mark.requirement("a:H-02", "a:H-14")
@given(HISTORIES)
def test_any_history_leaves_the_newest_committed_write(history: list[int]) -> None:
    OffsetsModel().run(history)


def histories(count: int, length: int = 150) -> list[list[int]]:
    source = random.Random(15)
    return [[source.randrange(1 << 20) for _ in range(length)] for _ in range(count)]


def run_all(many: list[list[int]]) -> None:
    for history in many:
        OffsetsModel().run(history)


@pytest.mark.case("C1", "C6")
def test_long_histories_leave_the_newest_committed_write() -> None:
    run_all(histories(25, 400))


# ---- Deliberate defects: a checker that cannot fail is worthless.

Patch = Callable[[pytest.MonkeyPatch], None]


def decides_otherwise(patch: pytest.MonkeyPatch, request: type[Any], change: Callable[[Any], Any]) -> None:
    right = machine.DECISIONS[request]
    patch.setitem(machine.DECISIONS, request, lambda held, asked, limits: right(held, change(asked), limits))


def shows_offsets_before_the_marker(patch: pytest.MonkeyPatch) -> None:
    right = pending_offsets.commit

    def wrong(held: Any, request: Any, limits: Any) -> Any:
        records, reply = right(held, request, limits)
        made, _ = offsets.commit(held, request, limits)
        return records + made, reply

    patch.setitem(machine.DECISIONS, requests.CommitPendingOffsets, wrong)


def commits_what_aborts(patch: pytest.MonkeyPatch) -> None:
    decides_otherwise(patch, requests.EndPendingOffsets, lambda request: replace(request, is_commit=True))


def replaces_newer_commits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(offsets, "next_order", lambda group, partition: 0)


def does_not_number_transactions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pending_offsets, "next_order", lambda group, partition: 1)


def ends_one_group(patch: pytest.MonkeyPatch) -> None:
    right = pending_offsets.end

    def wrong(held: Any, request: Any, limits: Any) -> Any:
        groups = held.open.get(request.producer_id, ())[:1]
        return right(replace(held, open=held.open.set(request.producer_id, groups)), request, limits)

    patch.setitem(machine.DECISIONS, requests.EndPendingOffsets, wrong)


def leaves_no_fence(patch: pytest.MonkeyPatch) -> None:
    right = pending_offsets.end

    def wrong(held: Any, request: Any, limits: Any) -> Any:
        records, reply = right(held, request, limits)
        return [record for record in records if record.key.kind != Kind.FENCE], reply

    patch.setitem(machine.DECISIONS, requests.EndPendingOffsets, wrong)


def takes_late_markers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pending_offsets, "_check_marker", lambda held, request: None)


def does_not_verify(patch: pytest.MonkeyPatch) -> None:
    def wrong(held: Any, request: Any) -> int:
        pending = held.open_transaction(request.producer_id)
        return pending.number if pending is not None else request.number or 0

    patch.setattr(pending_offsets, "_check_producer", wrong)


def expires_what_is_pending(patch: pytest.MonkeyPatch) -> None:
    right = offsets.expire

    def wrong(held: Any, request: Any, limits: Any) -> Any:
        for name, group in list(held.groups.items()):
            blind = replace(group, unstable=state.Group("").unstable)
            held = replace(held, groups=held.groups.set(name, blind))
        return right(held, request, limits)

    patch.setitem(machine.DECISIONS, requests.ExpireOffsets, wrong)


def leaves_pending_offsets_of_deleted_ones(patch: pytest.MonkeyPatch) -> None:
    right = offsets._tombstones_of

    def wrong(group: Any, partition: Any) -> Any:
        return (record for record in right(group, partition) if record.key.kind == Kind.OFFSET)

    patch.setattr(offsets, "_tombstones_of", wrong)


def forgets_producers_with_pending_offsets(patch: pytest.MonkeyPatch) -> None:
    right = state._set_open

    def wrong(producers: Any, producer_id: int, group_id: str, *, is_open: bool) -> None:
        if producer_id != 2 or not is_open:
            right(producers, producer_id, group_id, is_open=is_open)

    patch.setattr(state, "_set_open", wrong)


@pytest.mark.parametrize(
    "defect",
    [
        shows_offsets_before_the_marker,
        commits_what_aborts,
        replaces_newer_commits,
        does_not_number_transactions,
        ends_one_group,
        leaves_no_fence,
        takes_late_markers,
        does_not_verify,
        expires_what_is_pending,
        leaves_pending_offsets_of_deleted_ones,
        forgets_producers_with_pending_offsets,
    ],
)
def test_deliberate_defects_are_noticed(defect: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    defect(monkeypatch)
    with pytest.raises(AssertionError):
        run_all(histories(100))
