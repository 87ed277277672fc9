"""The transaction coordinator's machine holds in the small explorations, and its defects are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from exploration import transaction_model
from exploration.campaign import EXPLORATIONS, NEARLY_EXHAUSTED
from exploration.explorer import Bounds, ViolationError, explore
from exploration.transaction_model import TransactionModel
from exploration.transaction_state import Budgets
from tidelog.coordinator.transactions import ending, identities, initializing, machine, opening, queries, records
from tidelog.coordinator.transactions.records import EPOCH_MAX, NO_EPOCH, NO_PRODUCER, Status
from tidelog.coordinator.transactions.requests import Complete, InitProducer

SMALL = [
    "transactions-two",
    "transactions-timeout",
    "transactions-abort-repeat",
    "transactions-exhausted",
    "transactions-instance-timeout",
    "transactions-prepared-exhausted",
    "transactions-members-crash",
    "transactions-v1-election-crash",
]


@pytest.mark.case("C1")
@pytest.mark.requirement("a:H-30", "a:H-33", "a:H-35", "a:T-19", "a:T-20", "b:J-10")
@pytest.mark.parametrize("name", SMALL)
def test_transactions_hold_in_every_order_of_a_few_events(name: str) -> None:
    report = explore(EXPLORATIONS[name], Bounds(states_max=400, progress_every=20))
    assert report.is_complete or report.states >= 400
    assert report.progress_checks >= 10


def model(**left: int) -> TransactionModel:
    return TransactionModel(Budgets(**{**dict.fromkeys(vars(Budgets()), 0), **left}))


Patch = Callable[[pytest.MonkeyPatch], None]


def ends_keep_the_epoch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ending, "raised", lambda owner, _: owner)


def aborts_of_nothing_keep_the_epoch(patch: pytest.MonkeyPatch) -> None:
    right = ending._ended_nothing
    patch.setattr(
        ending, "_ended_nothing", lambda before, request: before if not request.is_commit else right(before, request)
    )


def new_instances_keep_the_epoch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(initializing, "raised", lambda owner, _: owner)


def all_members_commit(patch: pytest.MonkeyPatch) -> None:
    right = queries.markers_to_write

    def wrong(transactional_id: str, transaction: Any, *, coordinator_epoch: int) -> Any:
        markers = right(transactional_id, transaction, coordinator_epoch=coordinator_epoch)
        is_commit = transaction.status == Status.PREPARE_COMMIT
        return tuple(replace(marker, is_commit=is_commit) for marker in markers)

    patch.setattr(transaction_model, "markers_to_write", wrong)


def commits_members_of_earlier_transactions(patch: pytest.MonkeyPatch) -> None:
    right = ending._ended

    def wrong(before: Any, request: Any) -> Any:
        members = {each.producer_id for each in before.members}
        return right(before, replace(request, members=tuple(m for m in request.members if m in members)))

    patch.setattr(ending, "_ended", wrong)


def named_members_are_not_stored(patch: pytest.MonkeyPatch) -> None:
    right = records._pack
    patch.setattr(records, "_pack", lambda name, value: [] if name == "committed" else right(name, value))


def repeated_ends_are_done_whatever_the_outcome(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ending, "_repeated", lambda before, request, outcome: ending._reply(before, was_done=True))


def repeated_ends_are_forgotten_when_another_transaction_is_open(patch: pytest.MonkeyPatch) -> None:
    right = opening._begun
    patch.setattr(
        opening, "_begun", lambda *args, **named: replace(right(*args, **named), previous_outcome=0, last_token=b"")
    )


def new_instances_abort_what_is_committed(patch: pytest.MonkeyPatch) -> None:
    right = initializing.init_producer

    def wrong(state: Any, request: Any, limits: Any) -> Any:
        before = state.get(request.transactional_id)
        if before.status == Status.PREPARE_COMMIT:
            state = type(state)(state.ids.set(request.transactional_id, replace(before, status=Status.ONGOING)))
        return right(state, request, limits)

    patch.setitem(machine.DECISIONS, InitProducer, wrong)


def partitions_are_added_while_the_transaction_ends(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(opening, "_check_not_ending", lambda before, _: None)


def completes_whatever_transaction_is_ending(patch: pytest.MonkeyPatch) -> None:
    right = ending.complete

    def wrong(state: Any, request: Any, limits: Any) -> Any:
        return right(state, replace(request, number=state.get(request.transactional_id).number), limits)

    patch.setitem(machine.DECISIONS, Complete, wrong)


def a_taken_over_transaction_keeps_its_owner(patch: pytest.MonkeyPatch) -> None:
    right = initializing._with_new_owner

    def wrong(before: Any, request: Any, previous: Any) -> Any:
        after = right(before, request, previous)
        return replace(after, next_producer_id=NO_PRODUCER, next_epoch=NO_EPOCH) if before.is_open else after

    patch.setattr(initializing, "_with_new_owner", wrong)


def exhausted_epochs_begin_at_zero(patch: pytest.MonkeyPatch) -> None:
    def wrong(owner: Any, _: int) -> Any:
        return (owner[0], owner[1] + 1) if owner[1] + 1 < EPOCH_MAX else (owner[0], 0)

    for module in (identities, ending, initializing):
        patch.setattr(module, "raised", wrong)


def late_members_may_add(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ending, "_completed", _keeps_members(ending._completed))
    patch.setattr(opening, "_check_member", lambda before, request: None)


def _keeps_members(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda before, now_ms: replace(
        right(before, now_ms), members=tuple(replace(each, partitions=frozenset()) for each in before.members)
    )


ONE: dict[str, Any] = {"partitions": 1}
DEFECTS: list[tuple[Patch, TransactionModel, str]] = [
    (ends_keep_the_epoch, model(transactions=2, aborts=1), "hangs"),
    (aborts_of_nothing_keep_the_epoch, model(transactions=2, aborts=1), "gets the other marker"),
    (new_instances_keep_the_epoch, model(transactions=1, instances=1), "fatal for B"),
    (all_members_commit, model(transactions=1, members=1), "m0 in partition 1 gets the other marker"),
    (commits_members_of_earlier_transactions, model(transactions=1, members=1, timeouts=1), "m0 commits, torn"),
    (named_members_are_not_stored, model(transactions=1, members=1, crashes=1), "the replay of the records"),
    (repeated_ends_are_done_whatever_the_outcome, model(transactions=1, timeouts=1), "was reported as committed"),
    (
        repeated_ends_are_forgotten_when_another_transaction_is_open,
        model(transactions=1, members=1, losses=1),
        "fatal for A",
    ),
    (new_instances_abort_what_is_committed, replace(model(transactions=1, instances=1), **ONE), "an outcome changes"),
    (
        partitions_are_added_while_the_transaction_ends,
        replace(model(transactions=2), **ONE),
        "a batch of A2 is in the transaction A1",
    ),
    (completes_whatever_transaction_is_ending, replace(model(transactions=2, repeats=1), **ONE), "A2 hangs"),
    (
        a_taken_over_transaction_keeps_its_owner,
        replace(model(transactions=1, prepares=1, instances=1, aborts=1), keeps_prepared=True, **ONE),
        "fatal for B",
    ),
    (exhausted_epochs_begin_at_zero, replace(model(transactions=2), first_epoch=NEARLY_EXHAUSTED), "hangs"),
    (late_members_may_add, model(transactions=1, members=1), "m0 commits, torn"),
]


@pytest.mark.parametrize(("defect", "where", "what"), DEFECTS)
def test_a_defect_of_the_coordinator_is_found(
    defect: Patch, where: TransactionModel, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the properties of clients and partitions: the machine's own assertions are off."""
    monkeypatch.setattr(machine, "check_step", lambda *_: None)
    monkeypatch.setattr(transaction_model, "validate", lambda _: None)
    defect(monkeypatch)
    with pytest.raises(ViolationError, match=what):
        explore(where, Bounds(states_max=6_000, progress_every=2))


def test_a_defect_of_leaders_is_found() -> None:
    """A marker that comes between question and answer of version 1 voids the answer."""
    where = replace(model(transactions=2, repeats=1), version=1, checks_answers=False)
    with pytest.raises(ViolationError, match="gets the other marker"):
        explore(where, Bounds(states_max=6_000, progress_every=2))
