"""Errors of the catalogue on the wire of Kafka: its codes are ours already (`model.errors`)."""

from __future__ import annotations

from tidelog.model.errors import ErrorCode, OverloadedError, TidelogError

NONE = 0
MESSAGE_LENGTH_MAX = 1_000
"""Of the sentence beside a code; on the wire it has a length of 16 bits."""


def code(row: ErrorCode | None) -> int:
    """What a message carries; None is success."""
    return NONE if row is None else row.value.code


def code_of(error: TidelogError | None) -> int:
    return NONE if error is None else error.code.value.code


def message_of(error: TidelogError | None) -> str | None:
    """The sentence beside the code, where a message has room for one."""
    return None if error is None else str(error)[:MESSAGE_LENGTH_MAX]


def data_code_of(error: TidelogError | None) -> int:
    """Beside data (Produce, Fetch): a node that is too busy says LEADER_NOT_AVAILABLE. Nothing was done, and every
    client tries again; THROTTLING_QUOTA_EXCEEDED means so for admin calls only, librdkafka gives a record up for it."""
    if isinstance(error, OverloadedError):
        return code(ErrorCode.LEADER_NOT_AVAILABLE)
    return code_of(error)


def group_code_of(error: TidelogError | None) -> int:
    """Of groups: a coordinator that is too busy, or did not hear from its replicas in time, says
    COORDINATOR_NOT_AVAILABLE. Every client looks for it again and repeats; of the others old ones give up."""
    if isinstance(error, OverloadedError) or (error is not None and error.code is ErrorCode.REQUEST_TIMED_OUT):
        return code(ErrorCode.COORDINATOR_NOT_AVAILABLE)
    return code_of(error)
