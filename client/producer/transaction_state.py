"""The states of a transactional producer, owner or member. Pure.

    state             INITIALIZED  BEGUN            ENDING_COMMIT  ENDING_ABORT  ENDED  FAILED           FENCED
    UNINITIALIZED     READY        IN_TRANSACTION*  -              -             -      -                FATAL_ERROR
    READY             -            IN_TRANSACTION   -              -             -      -                FATAL_ERROR
    IN_TRANSACTION    -            -                COMMITTING     ABORTING      READY* ABORTABLE_ERROR  FATAL_ERROR
    COMMITTING        -            -                COMMITTING     ABORTING**    READY  ABORTABLE_ERROR  FATAL_ERROR
    ABORTABLE_ERROR   -            -                -              ABORTING      READY* ABORTABLE_ERROR  FATAL_ERROR
    ABORTING          -            -                -              ABORTING      READY  ABORTING         FATAL_ERROR
    FATAL_ERROR       -            -                -              -             -      FATAL_ERROR      FATAL_ERROR

    INITIALIZED   the coordinator has registered this instance
    BEGUN         the program has begun a transaction, or a member has joined one
    ENDING_*      the program asks for an end
    ENDED         the coordinator has decided it; a member has left
    FAILED        a record or a request has failed: this transaction cannot commit
    FENCED        an error that ends this producer: a newer instance, no authorization, ...

"-" is rejected (a call), or changes nothing (FAILED, of a transaction that has ended).

*   Members only: a member needs no initialization of its own, and leaves without an end. It has no COMMITTING, ABORTING
    and FATAL_ERROR: whatever its error is, it may join again.
**  Only before the first commit request is sent. After it the outcome is unknown until it is answered: then the same
    commit is repeated, and the coordinator answers with what it has decided.

Records are taken in IN_TRANSACTION only. The error is kept in ABORTABLE_ERROR and FATAL_ERROR, and no other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from tidelog.client.errors import fresh
from tidelog.model.errors import ErrorCode, InvalidTransactionStateError, TidelogError
from tidelog.model.transaction_errors import TransactionAbortableError, TransactionFatalError


class State(Enum):
    UNINITIALIZED = "uninitialized"
    READY = "ready"
    IN_TRANSACTION = "in a transaction"
    COMMITTING = "committing"
    ABORTABLE_ERROR = "in a transaction that has failed"
    ABORTING = "aborting"
    FATAL_ERROR = "ended by an error"


class Event(Enum):
    INITIALIZED = "init_transactions"
    BEGUN = "begin_transaction"
    ENDING_COMMIT = "commit_transaction"
    ENDING_ABORT = "abort_transaction"
    ENDED = "ended"
    FAILED = "failed"
    FENCED = "fenced"


_S, _E = State, Event
_TABLE: dict[tuple[State, Event], State] = {
    (_S.UNINITIALIZED, _E.INITIALIZED): _S.READY,
    (_S.READY, _E.BEGUN): _S.IN_TRANSACTION,
    (_S.IN_TRANSACTION, _E.ENDING_COMMIT): _S.COMMITTING,
    (_S.IN_TRANSACTION, _E.ENDING_ABORT): _S.ABORTING,
    (_S.IN_TRANSACTION, _E.FAILED): _S.ABORTABLE_ERROR,
    (_S.COMMITTING, _E.ENDING_COMMIT): _S.COMMITTING,
    (_S.COMMITTING, _E.ENDED): _S.READY,
    (_S.COMMITTING, _E.FAILED): _S.ABORTABLE_ERROR,
    (_S.ABORTABLE_ERROR, _E.ENDING_ABORT): _S.ABORTING,
    (_S.ABORTABLE_ERROR, _E.FAILED): _S.ABORTABLE_ERROR,
    (_S.ABORTING, _E.ENDING_ABORT): _S.ABORTING,
    (_S.ABORTING, _E.ENDED): _S.READY,
    (_S.ABORTING, _E.FAILED): _S.ABORTING,
    (_S.FATAL_ERROR, _E.FAILED): _S.FATAL_ERROR,
    **{(state, _E.FENCED): _S.FATAL_ERROR for state in State},
}
_MEMBER_TABLE: dict[tuple[State, Event], State] = {
    (_S.UNINITIALIZED, _E.BEGUN): _S.IN_TRANSACTION,
    (_S.READY, _E.BEGUN): _S.IN_TRANSACTION,
    (_S.IN_TRANSACTION, _E.ENDED): _S.READY,
    (_S.IN_TRANSACTION, _E.FAILED): _S.ABORTABLE_ERROR,
    (_S.ABORTABLE_ERROR, _E.ENDED): _S.READY,
    (_S.ABORTABLE_ERROR, _E.FAILED): _S.ABORTABLE_ERROR,
}

_ADVICE = {
    State.UNINITIALIZED: "the producer is not initialized; call init_transactions first",
    State.READY: "no transaction is open; call begin_transaction first",
    State.IN_TRANSACTION: "a transaction is open; commit or abort it first",
    State.COMMITTING: "the last commit was not confirmed: call commit_transaction again with the same arguments",
    State.ABORTING: "call abort_transaction again: the last abort was not confirmed",
}
_MEMBER_ADVICE = {
    State.UNINITIALIZED: "the producer is not a member; call join_transaction first",
    State.READY: "the producer is not a member; call join_transaction first",
    State.IN_TRANSACTION: "the producer is a member of a transaction; call leave_transaction first",
}

PREPARED = "a prepared transaction is open: commit or abort it first"

FATAL_CODES = frozenset(
    {
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.INVALID_PRODUCER_ID_MAPPING,
        ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
        ErrorCode.UNSUPPORTED_VERSION,
    }
)
"""Of the coordinator. A partition's leader may report INVALID_PRODUCER_EPOCH for a transaction that has timed out: the
abort tells a newer instance from it."""


def is_fatal(error: TidelogError) -> bool:
    return isinstance(error, TransactionFatalError) or error.code in FATAL_CODES


def as_fatal(error: TidelogError) -> TransactionFatalError:
    if isinstance(error, TransactionFatalError):
        return error
    fatal = TransactionFatalError(str(error), code=error.code)
    fatal.__cause__ = error
    return fatal


def as_abortable(error: TidelogError) -> TransactionAbortableError:
    if isinstance(error, TransactionAbortableError):
        return error
    abortable = TransactionAbortableError(f"the transaction cannot commit: {error}")
    abortable.__cause__ = error
    return abortable


@dataclass(slots=True)
class TransactionStates:
    """See the module."""

    is_member: bool = False
    state: State = State.UNINITIALIZED
    error: TransactionAbortableError | TransactionFatalError | None = None
    may_be_committed: bool = field(default=False)
    """A commit request has been sent, and no answer has come."""
    is_prepared: bool = False
    """The open transaction is prepared: it takes no records, and can only be ended."""

    @property
    def takes_records(self) -> bool:
        return self.state is State.IN_TRANSACTION

    def move(self, event: Event) -> None:
        """Raises the producer's error, or InvalidTransactionStateError."""
        after = self._after(event)
        if after is None:
            raise self.rejection(event.value)
        if event in (Event.BEGUN, Event.ENDED, Event.INITIALIZED):
            self.may_be_committed = False
        if after not in (State.ABORTABLE_ERROR, State.FATAL_ERROR):
            self.error = None
        self.state = after

    def _after(self, event: Event) -> State | None:
        if self.state is State.COMMITTING and event is Event.ENDING_ABORT:
            return None if self.may_be_committed else State.ABORTING
        return (_MEMBER_TABLE if self.is_member else _TABLE).get((self.state, event))

    def rejection(self, call: str) -> TidelogError:
        """Why the call is rejected now."""
        if self.error is not None:
            return fresh(self.error)
        advice = (_MEMBER_ADVICE if self.is_member else _ADVICE)[self.state]
        if call == Event.INITIALIZED.value and self.state is State.READY:
            advice = "the producer is initialized already; call begin_transaction"
        elif self.is_prepared and self.state is State.IN_TRANSACTION:
            advice = PREPARED
        return InvalidTransactionStateError(f"{call}: {advice}")

    def fail(self, error: TidelogError) -> bool:
        """A record or a request has failed for good. True: the state has changed."""
        before = self.state
        if is_fatal(error) and not self.is_member:
            if before is not State.FATAL_ERROR:
                self.move(Event.FENCED)
                self.error = as_fatal(error)
        elif self._after(Event.FAILED) is not None:
            self.move(Event.FAILED)
            if self.state is State.ABORTABLE_ERROR and before is not State.ABORTABLE_ERROR:
                self.may_be_committed = False  # the coordinator has decided, or was never asked
                self.error = as_abortable(error)
        return self.state is not before

    def validate(self) -> None:
        has_error = self.state in (State.ABORTABLE_ERROR, State.FATAL_ERROR)
        assert (self.error is not None) == has_error, "an error belongs to a state of error"
        assert not self.may_be_committed or self.state in (State.COMMITTING, State.FATAL_ERROR), "of an open commit"
        if self.is_member:
            assert self.state in {state for state, _ in _MEMBER_TABLE}, "only an owner ends a transaction"
