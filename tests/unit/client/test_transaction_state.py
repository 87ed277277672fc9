"""The states of a transactional producer: the whole table, and random walks through it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.client.errors import TransactionAbortedError, TransactionTimeoutError
from tidelog.client.producer.transaction_state import FATAL_CODES, Event, State, TransactionStates
from tidelog.model.errors import ErrorCode, InvalidTransactionStateError, RecordTooLargeError, RemoteError
from tidelog.model.transaction_errors import ProducerFencedError, TransactionAbortableError, TransactionFatalError

S, E = State, Event
OWNER: dict[State, dict[Event, State]] = {
    S.UNINITIALIZED: {E.INITIALIZED: S.READY, E.FENCED: S.FATAL_ERROR},
    S.READY: {E.BEGUN: S.IN_TRANSACTION, E.FENCED: S.FATAL_ERROR},
    S.IN_TRANSACTION: {
        E.ENDING_COMMIT: S.COMMITTING,
        E.ENDING_ABORT: S.ABORTING,
        E.FAILED: S.ABORTABLE_ERROR,
        E.FENCED: S.FATAL_ERROR,
    },
    S.COMMITTING: {
        E.ENDING_COMMIT: S.COMMITTING,
        E.ENDING_ABORT: S.ABORTING,
        E.ENDED: S.READY,
        E.FAILED: S.ABORTABLE_ERROR,
        E.FENCED: S.FATAL_ERROR,
    },
    S.ABORTABLE_ERROR: {E.ENDING_ABORT: S.ABORTING, E.FAILED: S.ABORTABLE_ERROR, E.FENCED: S.FATAL_ERROR},
    S.ABORTING: {E.ENDING_ABORT: S.ABORTING, E.ENDED: S.READY, E.FAILED: S.ABORTING, E.FENCED: S.FATAL_ERROR},
    S.FATAL_ERROR: {E.FAILED: S.FATAL_ERROR, E.FENCED: S.FATAL_ERROR},
}
MEMBER: dict[State, dict[Event, State]] = {
    S.UNINITIALIZED: {E.BEGUN: S.IN_TRANSACTION},
    S.READY: {E.BEGUN: S.IN_TRANSACTION},
    S.IN_TRANSACTION: {E.ENDED: S.READY, E.FAILED: S.ABORTABLE_ERROR},
    S.ABORTABLE_ERROR: {E.ENDED: S.READY, E.FAILED: S.ABORTABLE_ERROR},
}


def in_state(state: State, *, is_member: bool = False) -> TransactionStates:
    states = TransactionStates(is_member=is_member, state=state)
    if state is S.ABORTABLE_ERROR:
        states.error = TransactionAbortableError("x")
    elif state is S.FATAL_ERROR:
        states.error = ProducerFencedError("x")
    return states


@pytest.mark.parametrize("event", [event for event in Event if event not in (E.FAILED, E.FENCED)])
@pytest.mark.parametrize(
    ("state", "is_member"), [*((state, False) for state in OWNER), *((state, True) for state in MEMBER)]
)
def test_every_call_moves_as_the_table_says_or_is_rejected_with_what_to_do(
    state: State, is_member: bool, event: Event
) -> None:
    states = in_state(state, is_member=is_member)
    after = (MEMBER if is_member else OWNER)[state].get(event)
    if after is not None:
        states.move(event)
        assert states.state is after
    else:
        with pytest.raises((InvalidTransactionStateError, TransactionAbortableError, TransactionFatalError)) as caught:
            states.move(event)
        assert states.state is state
        if isinstance(caught.value, InvalidTransactionStateError):
            assert event.value in str(caught.value)
            assert re.search("first|again|already", str(caught.value))
    states.validate()


@pytest.mark.parametrize("state", list(OWNER))
def test_every_failure_moves_an_owner_as_the_table_says(state: State) -> None:
    for error, event in ((RecordTooLargeError("x"), E.FAILED), (ProducerFencedError("x"), E.FENCED)):
        states = in_state(state)
        states.fail(error)
        assert states.state is OWNER[state].get(event, state)
        states.validate()


@pytest.mark.parametrize("state", list(MEMBER))
def test_no_failure_ends_a_member(state: State) -> None:
    for error in (RecordTooLargeError("x"), ProducerFencedError("x")):
        states = in_state(state, is_member=True)
        states.fail(error)
        assert states.state is MEMBER[state].get(E.FAILED, state)
        states.validate()


@pytest.mark.parametrize("code", sorted(FATAL_CODES, key=str))
def test_a_fatal_error_keeps_its_code_and_its_cause(code: ErrorCode) -> None:
    states = in_state(S.IN_TRANSACTION)
    error = RemoteError("why", code=code)
    states.fail(error)
    assert isinstance(states.error, TransactionFatalError)
    assert (states.error.code, states.error.__cause__) == (code, error)
    states.fail(ProducerFencedError("later"))
    assert states.error.code is code, "the first error is the cause of the others"


def test_the_first_failure_of_a_transaction_is_its_error() -> None:
    states = in_state(S.IN_TRANSACTION)
    assert states.fail(RecordTooLargeError("the first"))
    assert not states.fail(TransactionAbortedError("because of it"))
    with pytest.raises(TransactionAbortableError, match="the first"):
        states.move(E.ENDING_COMMIT)
    states.move(E.ENDING_ABORT)
    assert states.error is None


def test_a_commit_that_was_requested_cannot_be_aborted() -> None:
    states = in_state(S.COMMITTING)
    states.may_be_committed = True
    with pytest.raises(InvalidTransactionStateError, match="call commit_transaction again"):
        states.move(E.ENDING_ABORT)
    states.move(E.ENDING_COMMIT)
    assert states.may_be_committed
    states.move(E.ENDED)
    assert not states.may_be_committed


CALLS = st.sampled_from([*(event for event in Event if event not in (E.FAILED, E.FENCED)), "sent"])
FAILURES = st.sampled_from(
    [RecordTooLargeError("x"), TransactionTimeoutError("x"), ProducerFencedError("x"), TransactionAbortableError("x")]
)


@given(st.booleans(), st.lists(st.one_of(CALLS, FAILURES), max_size=40))
def test_every_walk_keeps_the_invariants_and_takes_records_in_a_transaction_only(
    is_member: bool, walk: list[object]
) -> None:
    states = TransactionStates(is_member=is_member)
    has_begun = False
    for step in walk:
        before = states.state
        if step == "sent":
            states.may_be_committed = before is S.COMMITTING or states.may_be_committed
        elif isinstance(step, Event):
            try:
                states.move(step)
            except (InvalidTransactionStateError, TransactionAbortableError, TransactionFatalError):
                assert states.state is before
            else:
                has_begun = step is E.BEGUN or (has_begun and step not in (E.ENDING_COMMIT, E.ENDING_ABORT, E.ENDED))
        elif isinstance(step, Exception):
            states.fail(step)  # type: ignore[arg-type]
            has_begun = has_begun and states.takes_records
        states.validate()
        assert states.takes_records == has_begun
        assert before is not S.FATAL_ERROR or states.state is S.FATAL_ERROR
