"""What must hold of every state and step of the transaction coordinator: a checker that cannot fail is worthless."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.transactions.machine import ID, partition, partitions

from tidelog.coordinator.transactions.invariants import check_step, validate
from tidelog.coordinator.transactions.records import EPOCH_MAX, Member, Status, Transaction
from tidelog.coordinator.transactions.state import EMPTY, TransactionsState

OPEN = Transaction(
    producer_id=1, epoch=2, status=Status.ONGOING, started_ms=0, number=1, partitions=frozenset({partition(0)})
)
ENDING = replace(OPEN, status=Status.PREPARE_COMMIT, epoch=3, previous_producer_id=1, previous_epoch=2)
COMPLETE = Transaction(
    producer_id=1, epoch=3, status=Status.COMPLETE_COMMIT, number=1, previous_producer_id=1, previous_epoch=2
)
IDLE = Transaction(producer_id=1, epoch=2, number=1)


@pytest.mark.parametrize(
    "value",
    [
        replace(OPEN, epoch=EPOCH_MAX),
        replace(OPEN, started_ms=-1),
        replace(OPEN, number=0),
        replace(OPEN, committed=(1,)),
        replace(OPEN, version=3),
        replace(OPEN, producer_id=-1),
        replace(OPEN, next_producer_id=4),
        replace(OPEN, next_producer_id=4, next_epoch=0),
        replace(OPEN, members=(Member(1),)),
        replace(OPEN, members=(Member(2), Member(2))),
        replace(OPEN, members=(Member(2),), version=1),
        replace(OPEN, previous_producer_id=4),
        replace(OPEN, previous_producer_id=1, previous_epoch=2),
        replace(ENDING, committed=(7,)),
        replace(ENDING, members=(Member(6), Member(7)), committed=(7, 6)),
        replace(ENDING, status=Status.PREPARE_ABORT, members=(Member(7),), committed=(7,)),
        replace(COMPLETE, partitions=frozenset({partition(0)})),
        replace(COMPLETE, prepared_ms=5),
        replace(COMPLETE, started_ms=5),
        replace(IDLE, next_producer_id=4, next_epoch=0),
    ],
)
def test_a_state_that_breaks_an_invariant_is_noticed(value: Transaction) -> None:
    for sound in (OPEN, ENDING, COMPLETE, IDLE):
        validate(TransactionsState(EMPTY.ids.set(ID, sound)))
    state = TransactionsState(EMPTY.ids.set(ID, value))
    with pytest.raises(AssertionError):
        validate(state)
    validate(state, since=state)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, None),
        (None, OPEN),
        (OPEN, None),
        (ENDING, None),
        (replace(IDLE, last_token=b"x"), None),
        (ENDING, ENDING),
        (ENDING, replace(COMPLETE, status=Status.COMPLETE_ABORT)),
        (ENDING, replace(ENDING, status=Status.PREPARE_ABORT)),
        (ENDING, replace(COMPLETE, epoch=4)),
        (ENDING, replace(COMPLETE, last_token=b"x")),
        (OPEN, COMPLETE),
        (OPEN, IDLE),
        (IDLE, replace(OPEN, number=1)),
        (IDLE, replace(OPEN, number=2, epoch=1)),
        (IDLE, replace(OPEN, number=2, last_token=b"x")),
        (IDLE, replace(IDLE, epoch=1)),
        (IDLE, replace(IDLE, producer_id=4, epoch=0)),
        (IDLE, replace(IDLE, epoch=3, previous_producer_id=1, previous_epoch=1)),
        (OPEN, replace(ENDING, epoch=2, previous_epoch=1)),
        (OPEN, replace(ENDING, partitions=frozenset())),
        (OPEN, replace(ENDING, partitions=frozenset({partition(0), partition(1)}))),
        (OPEN, replace(OPEN, partitions=frozenset({partition(1)}))),
        (OPEN, replace(OPEN, epoch=3, previous_producer_id=1, previous_epoch=2)),
        (OPEN, replace(OPEN, started_ms=5)),
        (replace(OPEN, members=(Member(5),)), OPEN),
        (
            replace(OPEN, members=(Member(5, "", partitions(1)),)),
            replace(OPEN, members=(Member(5, "", partitions(2)),)),
        ),
        (replace(OPEN, prepared_ms=3), replace(OPEN, prepared_ms=3, members=(Member(5),))),
    ],
)
def test_a_step_that_breaks_an_invariant_is_noticed(before: Transaction | None, after: Transaction | None) -> None:
    for sound in ((IDLE, replace(OPEN, number=2)), (OPEN, ENDING), (ENDING, COMPLETE), (IDLE, None), (None, IDLE)):
        check_step(ID, *sound)
    with pytest.raises(AssertionError):
        check_step(ID, before, after)
