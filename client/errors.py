"""What the client adds to the catalogue: errors that are found on its own side of the network."""

from __future__ import annotations

from collections.abc import Sequence

from tidelog.model.errors import (
    CallTimeoutError,
    ErrorCode,
    TidelogError,
    UnknownTopicOrPartitionError,
    UnreachableError,
)
from tidelog.model.ids import PartitionId


class NoClusterError(UnreachableError):
    """None of the bootstrap addresses answers; `reasons` has one text for each of `addresses`."""

    def __init__(self, addresses: Sequence[str], reasons: Sequence[str]) -> None:
        self.addresses = tuple(addresses)
        self.reasons = tuple(reasons)
        told = "; ".join(f"{where}: {why}" for where, why in zip(addresses, reasons, strict=True))
        super().__init__(f"no cluster at {', '.join(addresses)} ({told})")


class WrongApiError(UnreachableError):
    """Something answers at the address, and it is not Tidelog's gRPC API: to wait does not help."""


class AdvertisedAddressError(UnreachableError):
    """The cluster was found, but a broker cannot be reached where it says it is."""

    def __init__(self, *, broker: int, advertised: str, bootstrap: str, reason: str) -> None:
        super().__init__(
            f"broker {broker} advertises {advertised}, which cannot be reached from here ({reason}), while "
            f"{bootstrap} answers; is the broker down, or advertised.listeners not for this network?",
            node=broker,
        )
        self.advertised = advertised
        self.bootstrap = bootstrap


class UnknownTopicError(UnknownTopicOrPartitionError):
    """The cluster has no topic of this name, also after a short wait."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"there is no topic '{topic}'")
        self.topic = topic


class UnansweredReadError(CallTimeoutError):
    """A request that changes nothing was not answered in time."""

    @property
    def advice(self) -> str:
        return "nothing was changed; ask again, or ask another node"


def as_read_error(error: TidelogError) -> TidelogError:
    """The error of a request that changes nothing: it never says that it may have been carried out."""
    is_timeout = error.code is ErrorCode.REQUEST_TIMED_OUT and not isinstance(error, UnansweredReadError)
    return UnansweredReadError(str(error)) if is_timeout else error


class DeliveryTimeoutError(TidelogError):
    """A batch was not acknowledged in time. `was_sent`: it may be stored, now or later; otherwise it is not."""

    code = ErrorCode.REQUEST_TIMED_OUT

    def __init__(self, message: str, *, was_sent: bool) -> None:
        super().__init__(message)
        self.was_sent = was_sent

    @property
    def advice(self) -> str:
        return super().advice if self.was_sent else "try again; nothing was stored"


class NobodyLeadsError(DeliveryTimeoutError):
    """All the time that a batch had, nobody led its partition: it was not sent to anybody, and is not stored."""

    code = ErrorCode.LEADER_NOT_AVAILABLE

    def __init__(self, message: str) -> None:
        super().__init__(message, was_sent=False)

    @property
    def advice(self) -> str:
        return "`tidelog topics describe` says why; nothing was stored"


class UnknownDeliveryError(TidelogError):
    """An attempt to store a batch ended without an answer, and the log has gone on without it or behind it: to send it
    again could store it twice. It may be stored."""

    code = ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


class WriterClosedError(TidelogError):
    """The writer was closed before the batch was acknowledged. `was_sent` as in `DeliveryTimeoutError`."""

    code = ErrorCode.INVALID_REQUEST

    def __init__(self, message: str, *, was_sent: bool = False) -> None:
        super().__init__(message)
        self.was_sent = was_sent


class ForkedError(TidelogError):
    """Something that belongs to the process that this one was forked from."""

    code = ErrorCode.INVALID_REQUEST


class EndedError(TidelogError):
    """The client was closed by somebody else, or the program was about to end, while a call was under way. A change may
    have been made."""

    code = ErrorCode.INVALID_REQUEST


class BufferFullError(TidelogError):
    """No room for a record within `max_block_ms`: it was not taken, and is not sent."""

    code = ErrorCode.REQUEST_TIMED_OUT


class FlushTimeoutError(TidelogError):
    """Some records were neither acknowledged nor failed in time; they are still on their way. `left` of them."""

    code = ErrorCode.REQUEST_TIMED_OUT

    def __init__(self, message: str, *, left: int) -> None:
        super().__init__(message)
        self.left = left


class SerializationError(TidelogError):
    """A serializer has failed, or gave something else than bytes: the record was not taken."""

    code = ErrorCode.INVALID_RECORD


class OptionError(ValueError):
    """Options that cannot be meant: a name nobody knows, a value out of range, two that contradict each other."""


class BulkError(TidelogError):
    """Some of the records of one `send_many` have failed. `errors` has (partition, how many, why) for each batch
    that did, and `stored` the ranges of those that are stored. The code is that of the first."""

    def __init__(self, message: str, *, errors: Sequence[tuple[int, int, Exception]], stored: Sequence[object]) -> None:
        super().__init__(message)
        self.errors = tuple(errors)
        self.stored = tuple(stored)
        first = self.errors[0][2]
        if isinstance(first, TidelogError):
            self.code = first.code


class TruncatedError(TidelogError):
    """Records that were read are not in the log any more: an unclean election, or a log that lost what it had. What
    the log has now departs at `diverging_offset`; read again from there, or go on knowing it."""

    code = ErrorCode.OFFSET_OUT_OF_RANGE

    def __init__(
        self, topic: str, partition: PartitionId, *, position: int, diverging_epoch: int, diverging_offset: int
    ) -> None:
        super().__init__(
            f"{topic}-{partition.partition}: what was read before offset {position} was replaced from offset "
            f"{diverging_offset} on (epoch {diverging_epoch} ends there)"
        )
        self.topic = topic
        self.partition = partition
        self.position = position
        self.diverging_epoch = diverging_epoch
        self.diverging_offset = diverging_offset


class PositionError(TidelogError):
    """A position outside of the log: before its start (retention, DeleteRecords) or behind its end."""

    code = ErrorCode.OFFSET_OUT_OF_RANGE

    def __init__(self, message: str, *, topic: str, partition: PartitionId, position: int) -> None:
        super().__init__(message)
        self.topic = topic
        self.partition = partition
        self.position = position
