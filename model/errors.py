"""The one catalogue of errors: Kafka's names and codes, whether to retry, and what to do about it.

An error of the world (bytes from outside, a disk, a peer) is a `TidelogError` with facts as attributes; an error of
our own is an `assert`. `ErrorCode` is the row of the catalogue, an exception class is a row that Python code catches
by name. The Kafka door sends `code`, gRPC sends name and message.
"""

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """One row of the catalogue."""

    code: int
    retriable: bool
    advice: str


class ErrorCode(Enum):
    """Kafka's error names; the value is the row. Rows are added as the parts that raise them are built."""

    UNKNOWN_SERVER_ERROR = ErrorRow(-1, False, "look into the server's log")
    OFFSET_OUT_OF_RANGE = ErrorRow(1, False, "read between the log's start and end offset")
    CORRUPT_MESSAGE = ErrorRow(2, True, "send the batch again; if it repeats, the sender's encoder or memory is broken")
    INVALID_FETCH_SIZE = ErrorRow(4, False, "ask for at least one byte")
    MESSAGE_TOO_LARGE = ErrorRow(10, False, "send smaller batches or raise max.message.bytes of the topic")
    INVALID_TIMESTAMP = ErrorRow(32, False, "send timestamps inside message.timestamp.before/after.max.ms")
    UNSUPPORTED_FOR_MESSAGE_FORMAT = ErrorRow(43, False, "use record batches of magic 2 (any client since 2017)")
    OUT_OF_ORDER_SEQUENCE_NUMBER = ErrorRow(45, False, "a batch before this one is missing; resend from it")
    DUPLICATE_SEQUENCE_NUMBER = ErrorRow(46, False, "the batch is older than the last five; it was stored before")
    INVALID_PRODUCER_EPOCH = ErrorRow(47, False, "a newer producer with this id is at work; stop this one")
    INVALID_TXN_STATE = ErrorRow(48, False, "begin a transaction first")
    STORAGE_ERROR = ErrorRow(56, True, "look at the disk; its partitions are led elsewhere meanwhile")
    UNKNOWN_PRODUCER_ID = ErrorRow(59, False, "ask for a new producer id")
    FENCED_LEADER_EPOCH = ErrorRow(74, True, "refresh metadata: a newer leader epoch exists")
    UNKNOWN_LEADER_EPOCH = ErrorRow(75, True, "this replica has not heard of that epoch yet; retry")
    UNSUPPORTED_COMPRESSION_TYPE = ErrorRow(76, False, "use none, gzip, snappy, lz4 or zstd")
    INVALID_RECORD = ErrorRow(87, False, "the records of the batch are not well formed for this topic")


class TidelogError(Exception):
    """An error of the world. `code` is its row in the catalogue; the message says what is wrong."""

    code: ErrorCode = ErrorCode.UNKNOWN_SERVER_ERROR

    @property
    def retriable(self) -> bool:
        return self.code.value.retriable

    @property
    def advice(self) -> str:
        return self.code.value.advice


class CorruptBatchError(TidelogError):
    """Bytes that are not a whole, sound record batch: length, CRC, counts or structure are wrong."""

    code = ErrorCode.CORRUPT_MESSAGE


class UnsupportedMagicError(TidelogError):
    """A message set of magic 0 or 1, or of a magic that does not exist."""

    code = ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT


class UnsupportedCompressionError(TidelogError):
    code = ErrorCode.UNSUPPORTED_COMPRESSION_TYPE


class RecordTooLargeError(TidelogError):
    """A batch over its limit, or one that would decompress past its limit."""

    code = ErrorCode.MESSAGE_TOO_LARGE


class InvalidRecordError(TidelogError):
    """Sound bytes that this log does not take: a null key on a compacted topic, a count of zero, ..."""

    code = ErrorCode.INVALID_RECORD


class InvalidTimestampError(TidelogError):
    code = ErrorCode.INVALID_TIMESTAMP


class OffsetOutOfRangeError(TidelogError):
    """An offset outside of the log; `start` and `end` say what there is."""

    code = ErrorCode.OFFSET_OUT_OF_RANGE

    def __init__(self, message: str, *, offset: int, start: int, end: int) -> None:
        super().__init__(message)
        self.offset = offset
        self.start = start
        self.end = end


class OutOfOrderSequenceError(TidelogError):
    code = ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


class DuplicateSequenceError(TidelogError):
    """A repeat of a batch that is older than the five that are remembered."""

    code = ErrorCode.DUPLICATE_SEQUENCE_NUMBER


class InvalidProducerEpochError(TidelogError):
    code = ErrorCode.INVALID_PRODUCER_EPOCH


class InvalidTransactionStateError(TidelogError):
    code = ErrorCode.INVALID_TXN_STATE


class FencedLeaderEpochError(TidelogError):
    code = ErrorCode.FENCED_LEADER_EPOCH


class StorageError(TidelogError):
    """A disk or state store did not do what it was asked; `path` says where."""

    code = ErrorCode.STORAGE_ERROR

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class DiskFullError(StorageError):
    """No space left: nothing of the write was kept."""


class CorruptStateError(StorageError):
    """A value of the state store fails its CRC."""


class DamagedLogError(StorageError):
    """A log that ends below, or is corrupt below, what was recorded as synced; `good_end` is what can be trusted."""

    def __init__(self, message: str, *, path: str, good_end: int) -> None:
        super().__init__(message, path=path)
        self.good_end = good_end
