"""Maps errors of `model.errors` to Kafka's error codes, which are the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tidelog.model.errors import ErrorCode, OverloadedError, TidelogError

A = TypeVar("A")
B = TypeVar("B")

NONE = 0
MESSAGE_LENGTH_MAX = 1_000
"""Characters of a message; on the wire it has a length of 16 bits."""


def code(row: ErrorCode | None) -> int:
    """Returns the code on the wire; None is success."""
    return NONE if row is None else row.value.code


def code_of(error: TidelogError | None) -> int:
    return NONE if error is None else error.code.value.code


def message_of(error: TidelogError | None) -> str | None:
    """Returns the message beside a code."""
    return None if error is None else str(error)[:MESSAGE_LENGTH_MAX]


def row_message(error: ErrorCode | None, message: str) -> str | None:
    """Returns the message of a row; None for success."""
    return None if error is None else message[:MESSAGE_LENGTH_MAX]


def or_error(make: Callable[[A], B], item: A) -> B | TidelogError:
    try:
        return make(item)
    except TidelogError as error:
        return error


def data_code_of(error: TidelogError | None) -> int:
    """For Produce and Fetch: an overloaded node returns LEADER_NOT_AVAILABLE. Nothing was done, and every client
    retries. THROTTLING_QUOTA_EXCEEDED is for admin requests only: librdkafka drops a record after it."""
    if isinstance(error, OverloadedError):
        return code(ErrorCode.LEADER_NOT_AVAILABLE)
    return code_of(error)


def group_code_of(error: TidelogError | None) -> int:
    """For groups: an overloaded coordinator, or one whose replicas are too slow, returns COORDINATOR_NOT_AVAILABLE.
    Every client finds the coordinator again and retries; old ones give up after other codes."""
    if isinstance(error, OverloadedError) or (error is not None and error.code is ErrorCode.REQUEST_TIMED_OUT):
        return code(ErrorCode.COORDINATOR_NOT_AVAILABLE)
    return code_of(error)


_OF_COORDINATORS = frozenset(
    {
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.UNKNOWN_TOPIC_ID,
    }
)
"""Retriable errors that every transactional client handles."""


def transaction_code_of(error: TidelogError | None, *, knows_fenced: bool = True, knows_abortable: bool = True) -> int:
    """For transactions, as `group_code_of`. Clients stop at other retriable errors (of controllers, of the network):
    they get COORDINATOR_LOAD_IN_PROGRESS, after which all of them retry."""
    if error is None:
        return NONE
    if error.code is ErrorCode.PRODUCER_FENCED and not knows_fenced:
        return code(ErrorCode.INVALID_PRODUCER_EPOCH)
    if error.code is ErrorCode.TRANSACTION_ABORTABLE and not knows_abortable:
        return code(ErrorCode.INVALID_TXN_STATE)
    group_code = group_code_of(error)
    if error.retriable and group_code == code_of(error) and error.code not in _OF_COORDINATORS:
        return code(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
    return group_code
