"""Errors that the client itself finds, in addition to the catalogue."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar

from tidelog.client.record import TopicPartition
from tidelog.model import errors
from tidelog.model.errors import (
    ErrorCode,
    LeaderNotAvailableError,
    TidelogError,
    UnknownTopicOrPartitionError,
    UnreachableError,
)


class NoClusterError(UnreachableError):
    """None of the bootstrap addresses answers; `reasons` has one text for each of `addresses`."""

    def __init__(self, addresses: Sequence[str], reasons: Sequence[str]) -> None:
        self.addresses = tuple(addresses)
        self.reasons = tuple(reasons)
        details = "; ".join(f"{address}: {reason}" for address, reason in zip(addresses, reasons, strict=True))
        super().__init__(f"no cluster at {', '.join(addresses)} ({details})")


class WrongApiError(UnreachableError):
    """The address belongs to another API than Tidelog's gRPC API; waiting does not help."""


class AdvertisedAddressError(UnreachableError):
    """The cluster was found, but a broker cannot be reached at the address that it advertises. `advertised` is that
    address, `bootstrap` the one that answers."""

    def __init__(self, *, broker: int, advertised: str, bootstrap: str, reason: str) -> None:
        super().__init__(
            f"broker {broker} advertises {advertised}, which cannot be reached from here ({reason}), while "
            f"{bootstrap} answers; is the broker down, or advertised.listeners not for this network?",
            node=broker,
        )
        self.advertised = advertised
        self.bootstrap = bootstrap


class UnknownTopicError(UnknownTopicOrPartitionError):
    """The cluster has no `topic` of this name, also after a short wait."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"there is no topic '{topic}'")
        self.topic = topic


class CallTimeoutError(errors.CallTimeoutError, TimeoutError):
    """The call was not done in time; a change may have been made. `node` is the broker that did not answer; -1: no
    single one."""


class QueryTimeoutError(CallTimeoutError):
    """A request that changes nothing was not answered in time."""

    @property
    def advice(self) -> str:
        return "nothing was changed; ask again, or ask another node"


E = TypeVar("E", bound=Exception)


def fresh(error: E) -> E:
    """A copy to raise: an error that is raised again and again, or in several threads, collects their tracebacks, which
    keep their frames alive."""
    copied = copy.copy(error)
    copied.__cause__ = error.__cause__
    if notes := getattr(error, "__notes__", None):
        copied.__notes__ = list(notes)
    return copied


def as_timeout(error: errors.CallTimeoutError) -> CallTimeoutError:
    """What a client raises: also a `TimeoutError`."""
    return error if isinstance(error, CallTimeoutError) else CallTimeoutError(str(error), node=error.node)


def as_read_error(error: TidelogError) -> TidelogError:
    """The error of a request that changes nothing: it never says that it may have been carried out."""
    is_timeout = error.code is ErrorCode.REQUEST_TIMED_OUT and not isinstance(error, QueryTimeoutError)
    return QueryTimeoutError(str(error)) if is_timeout else error


class DeliveryTimeoutError(TidelogError, TimeoutError):
    """A batch was not acknowledged in time. `was_sent`: it may be stored, now or later; otherwise it is not."""

    code = ErrorCode.REQUEST_TIMED_OUT

    def __init__(self, message: str, *, was_sent: bool) -> None:
        super().__init__(message)
        self.was_sent = was_sent

    @property
    def advice(self) -> str:
        return super().advice if self.was_sent else "try again; nothing was stored"


class NoLeaderError(DeliveryTimeoutError, LeaderNotAvailableError):
    """The partition had no leader until the delivery timeout: the batch was not sent, and is not stored."""

    code = ErrorCode.LEADER_NOT_AVAILABLE

    def __init__(self, message: str) -> None:
        super().__init__(message, was_sent=False)

    @property
    def advice(self) -> str:
        return "`tidelog topics describe` says why; nothing was stored"


class TransactionTimeoutError(CallTimeoutError):
    """A call of a transaction was not answered in time. Call the same method again, with the same arguments: it
    continues, or returns what was decided meanwhile."""

    @property
    def advice(self) -> str:
        return "call the same method again, with the same arguments"


class TransactionAbortedError(TidelogError):
    """The transaction of this record was aborted, or has failed, before the record was acknowledged. No reader of
    committed data gets it."""

    code = ErrorCode.TRANSACTION_ABORTABLE


class DeliveryOutcomeUnknownError(TidelogError):
    """An attempt to store a batch went unanswered, and the log has advanced since: sending it again could store it
    twice. It may be stored."""

    code = ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


class ProducerClosedError(TidelogError):
    """The producer was closed before the batch was acknowledged. `was_sent`: it may be stored."""

    code = ErrorCode.INVALID_REQUEST

    def __init__(self, message: str, *, was_sent: bool = False) -> None:
        super().__init__(message)
        self.was_sent = was_sent


class ForkedError(TidelogError):
    """An object of the parent process was used in a forked child."""

    code = ErrorCode.INVALID_REQUEST


class ClientClosedError(TidelogError):
    """The client was closed, or the program ended, during the call. A change may have been made."""

    code = ErrorCode.INVALID_REQUEST


class BufferFullError(TidelogError, TimeoutError):
    """`buffer_memory` was full for `max_block_ms`: the record was not queued."""

    code = ErrorCode.REQUEST_TIMED_OUT


class FlushTimeoutError(TidelogError, TimeoutError):
    """`left` records were neither stored nor failed in time; they are still pending."""

    code = ErrorCode.REQUEST_TIMED_OUT

    def __init__(self, message: str, *, left: int) -> None:
        super().__init__(message)
        self.left = left


class SerializationError(TidelogError):
    """A serializer failed, or returned something other than bytes: the record was not queued."""

    code = ErrorCode.INVALID_RECORD


class OptionError(ValueError):
    """An option has an unknown name or a value out of range, or two options contradict each other."""


class BulkError(TidelogError):
    """Some records of one `send_many` failed. `errors` has (partition, count, error) for each batch that failed
    (partition -1: records that were not queued, whose partitions were not chosen), and `stored` the ranges that are
    stored. The code is that of the first error."""

    def __init__(self, message: str, *, errors: Sequence[tuple[int, int, Exception]], stored: Sequence[object]) -> None:
        super().__init__(message)
        self.errors = tuple(errors)
        self.stored = tuple(stored)
        first = self.errors[0][2]
        if isinstance(first, TidelogError):
            self.code = first.code


class LogTruncatedError(TidelogError):
    """Records of `partition` before `position` that were read are not in the log any more: an unclean election, or a
    log that lost records. The log differs from `diverging_offset` on, where `diverging_epoch` ends; seek there."""

    code = ErrorCode.OFFSET_OUT_OF_RANGE

    def __init__(
        self, partition: TopicPartition, *, position: int, diverging_epoch: int, diverging_offset: int
    ) -> None:
        super().__init__(
            f"{partition}: what was read before offset {position} was replaced from offset {diverging_offset} on "
            f"(epoch {diverging_epoch} ends there)"
        )
        self.partition = partition
        self.position = position
        self.diverging_epoch = diverging_epoch
        self.diverging_offset = diverging_offset


class OffsetOutOfRangeError(TidelogError):
    """An offset is outside of the log: before its start (retention, `delete_records`) or behind its end. A consumer
    sets `partition` and `position`, the offset that it tried to read; else they are None and -1."""

    code = ErrorCode.OFFSET_OUT_OF_RANGE

    def __init__(self, message: str, *, partition: TopicPartition | None = None, position: int = -1) -> None:
        super().__init__(message)
        self.partition = partition
        self.position = position
