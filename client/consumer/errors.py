"""Errors that a consumer raises itself. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tidelog.client.record import TopicPartition
from tidelog.model.errors import ErrorCode, InvalidRequestError, TidelogError


class WakeupError(TidelogError):
    """`wakeup` was called. Nothing is lost; poll again."""

    code = ErrorCode.REQUEST_TIMED_OUT


class ConsumerClosedError(InvalidRequestError):
    """The consumer is closed: create another one."""


class ConcurrentUseError(InvalidRequestError):
    """Two threads use one consumer at the same time; only `wakeup` and `metrics` are thread-safe."""


class SubscriptionError(InvalidRequestError):
    """`subscribe` together with `assign`, a subscription without a group, or a partition that is not assigned."""


class CommitFailedError(TidelogError):
    """The offsets were not committed: this consumer is not a member any more, or the partitions have other owners. They
    read the records since the last commit again."""

    code = ErrorCode.FENCED_MEMBER_EPOCH


class NoOffsetForPartitionError(TidelogError):
    """`auto_offset_reset` is "none", and there is no committed offset in the log. `partitions` names them: seek."""

    code = ErrorCode.OFFSET_OUT_OF_RANGE

    def __init__(self, message: str, *, partitions: Sequence[TopicPartition]) -> None:
        super().__init__(message)
        self.partitions = tuple(partitions)


class DeserializationError(TidelogError):
    """A deserializer failed. The position stays at this record: `seek` to `offset + 1` to skip it. `partition` and
    `offset` name the record; `__cause__` is the deserializer's error."""

    code = ErrorCode.INVALID_RECORD

    def __init__(self, message: str, *, partition: TopicPartition, offset: int) -> None:
        super().__init__(message)
        self.partition = partition
        self.offset = offset

    @classmethod
    def of(cls, part: str, partition: TopicPartition, offset: int, cause: Exception) -> DeserializationError:
        """`part` is "key" or "value"."""
        error = cls(
            f"the {part} of {partition} at offset {offset} cannot be deserialized ({type(cause).__name__}: {cause}); "
            f"seek to {offset + 1} to skip it",
            partition=partition,
            offset=offset,
        )
        error.__cause__ = cause
        return error
