"""`tidelog.errors`: every error that a program may meet, in one place.

    try:
        producer.send("orders", b"...").result()
    except tidelog.errors.DeliveryTimeoutError as error:
        ...                                        # `error.was_sent`: it may be stored all the same
    except tidelog.TidelogError as error:
        print(error.code.name, error.retriable, error.advice)

What a broker has refused is a `RemoteError`; its `code` tells what it was (`ErrorCode.TOPIC_ALREADY_EXISTS`), under the
names and numbers of Kafka. Errors that are found on this side of the network have classes of their own, and a code of
the same catalogue. All of them are `TidelogError`s, but for two that are found before anything is tried: `OptionError`,
a ValueError, and `MissingExtraError`, an ImportError.
"""

from tidelog.client.admin_core import AdminClosedError
from tidelog.client.arrow import MissingExtraError
from tidelog.client.consumer_errors import (
    CommitFailedError,
    ConcurrentUseError,
    ConsumerClosedError,
    DeserializationError,
    NoOffsetError,
    SubscriptionError,
    WakeupError,
)
from tidelog.client.errors import (
    AdvertisedAddressError,
    BufferFullError,
    BulkError,
    DeliveryTimeoutError,
    EndedError,
    FlushTimeoutError,
    ForkedError,
    NobodyLeadsError,
    NoClusterError,
    OptionError,
    PositionError,
    SerializationError,
    TruncatedError,
    UnansweredReadError,
    UnknownDeliveryError,
    UnknownTopicError,
    WriterClosedError,
    WrongApiError,
)
from tidelog.model.errors import (
    CallTimeoutError,
    ErrorCode,
    InvalidRequestError,
    RecordTooLargeError,
    RemoteError,
    TidelogError,
    TransportError,
    UnknownTopicOrPartitionError,
    UnreachableError,
)

__all__ = [
    "AdminClosedError",
    "AdvertisedAddressError",
    "BufferFullError",
    "BulkError",
    "CallTimeoutError",
    "CommitFailedError",
    "ConcurrentUseError",
    "ConsumerClosedError",
    "DeliveryTimeoutError",
    "DeserializationError",
    "EndedError",
    "ErrorCode",
    "FlushTimeoutError",
    "ForkedError",
    "InvalidRequestError",
    "MissingExtraError",
    "NoClusterError",
    "NoOffsetError",
    "NobodyLeadsError",
    "OptionError",
    "PositionError",
    "RecordTooLargeError",
    "RemoteError",
    "SerializationError",
    "SubscriptionError",
    "TidelogError",
    "TransportError",
    "TruncatedError",
    "UnansweredReadError",
    "UnknownDeliveryError",
    "UnknownTopicError",
    "UnknownTopicOrPartitionError",
    "UnreachableError",
    "WakeupError",
    "WriterClosedError",
    "WrongApiError",
]
