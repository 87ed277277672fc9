"""Errors of consumers that are found on this side of the network. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tidelog.client.record import TopicPartition
from tidelog.model.errors import ErrorCode, InvalidRequestError, TidelogError


class WakeupError(TidelogError):
    """`wakeup` was called: nothing is wrong, and nothing was lost."""

    code = ErrorCode.REQUEST_TIMED_OUT


class ConsumerClosedError(InvalidRequestError):
    """The consumer was closed; make another one."""


class ConcurrentUseError(InvalidRequestError):
    """Two threads use one consumer at the same time; only `wakeup` and `metrics` may be called from another one."""


class SubscriptionError(InvalidRequestError):
    """`subscribe` and `assign` together, a subscription without a group, or a call for a partition that is not
    assigned."""


class CommitFailedError(TidelogError):
    """The offsets were not committed: the group has given the partitions to others, or has gone on without this
    member. What was read since the last commit is read again by their new owners."""

    code = ErrorCode.FENCED_MEMBER_EPOCH


class NoOffsetError(TidelogError):
    """No committed offset, or one outside of the log, while `auto_offset_reset` is "none"."""

    code = ErrorCode.OFFSET_OUT_OF_RANGE

    def __init__(self, message: str, *, partitions: Sequence[TopicPartition]) -> None:
        super().__init__(message)
        self.partitions = tuple(partitions)


class DeserializationError(TidelogError):
    """A deserializer failed. The position stays at this record: `seek` to `offset + 1` to pass over it."""

    code = ErrorCode.INVALID_RECORD

    def __init__(self, message: str, *, partition: TopicPartition, offset: int) -> None:
        super().__init__(message)
        self.partition = partition
        self.offset = offset
