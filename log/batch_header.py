"""The header of a record batch (Kafka's format, magic 2): read it, check a whole batch, stamp it. No record is decoded.
Pure.

    position  bytes  field
    0         8      base offset           \\  not covered by the CRC: the leader stamps
    8         4      batch length          |  base offset and leader epoch without touching
    12        4      leader epoch          |  the rest
    16        1      magic = 2             |
    17        4      CRC-32C              /   of everything from position 21 to the end
    21        2      attributes               bits 0-2 codec, 3 log-append time, 4 transactional, 5 control,
                                              6 base timestamp is a delete horizon, 7 claim (ours)
    23        4      last offset delta
    27        8      base timestamp
    35        8      max timestamp
    43        8      producer id              -1: none
    51        2      producer epoch
    53        4      base sequence
    57        4      count of records
    61               the records, compressed as a whole if the codec says so

All integers are big endian. The batch length counts what follows it, so a whole batch is 12 bytes longer; `size` here
always means the whole batch. The offsets of a batch are base offset to base offset + last offset delta; compaction
keeps both. A batch has at most, and from a client exactly, last offset delta + 1 records.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct

from crc32c import crc32c

from tidelog.model.errors import (
    CorruptBatchError,
    InvalidRecordError,
    RecordTooLargeError,
    UnsupportedCompressionError,
    UnsupportedMagicError,
)
from tidelog.model.ids import Offset

Buffer = bytes | bytearray | memoryview

HEADER = Struct(">qiibIhiqqqhii")
HEADER_BYTES = 61
LENGTH_PREFIX_BYTES = 12
MAGIC = 2
RECORD_BYTES_MIN = 7
"""Length, attributes, two deltas, two sizes and the header count, each of one byte."""
BATCH_BYTES_MAX = 2**31 - 1

_MAGIC_POSITION = 16
_CRC = Struct(">I")
_CRC_POSITION = 17
_ATTRIBUTES = Struct(">h")
_ATTRIBUTES_POSITION = 21
CRC_START = _ATTRIBUTES_POSITION
"""The CRC covers the batch from here to its end."""
_LENGTH = Struct(">i")
_LENGTH_POSITION = 8
_BASE_OFFSET = Struct(">q")
_LEADER_EPOCH = Struct(">i")
_LEADER_EPOCH_POSITION = 12
_MAX_TIMESTAMP = Struct(">q")
_MAX_TIMESTAMP_POSITION = 35

CODEC_MASK = 0x07
LOG_APPEND_TIME_BIT = 0x08
TRANSACTIONAL_BIT = 0x10
CONTROL_BIT = 0x20
DELETE_HORIZON_BIT = 0x40
CLAIM_BIT = 0x80
"""The record claims the partition: its offset is the fencing token from now on (`ProducerState.claim`)."""

_INT64_MAX = 2**63 - 1
_SEQUENCE_MAX = 2**31 - 1


class Codec(IntEnum):
    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


_CODEC_LAST = int(Codec.ZSTD)


class TimestampType(IntEnum):
    CREATE = 0
    """Each record has the timestamp of its producer."""
    LOG_APPEND = 1
    """All records have the batch's max timestamp, the leader's time of the append."""


@dataclass(slots=True, unsafe_hash=True)
class BatchHeader:
    """The fields of the header; `size` is that of the whole batch, in bytes.

    A value, although it is not frozen: one is created for each batch, and creating a frozen one takes eight times as
    long (2.5 us, a tenth of an append).
    """

    base_offset: int
    size: int
    leader_epoch: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    count: int
    crc: int

    @property
    def last_offset(self) -> Offset:
        return Offset(self.base_offset + self.last_offset_delta)

    @property
    def next_offset(self) -> Offset:
        """The offset after the batch: where the next one starts."""
        return Offset(self.base_offset + self.last_offset_delta + 1)

    @property
    def codec(self) -> Codec:
        bits = self.attributes & CODEC_MASK
        if bits > Codec.ZSTD:
            raise UnsupportedCompressionError(f"codec {bits} does not exist")
        return Codec(bits)

    @property
    def timestamp_type(self) -> TimestampType:
        return TimestampType.LOG_APPEND if self.attributes & LOG_APPEND_TIME_BIT else TimestampType.CREATE

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL_BIT)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL_BIT)

    @property
    def has_producer(self) -> bool:
        return self.producer_id >= 0

    @property
    def delete_horizon_ms(self) -> int | None:
        """When compaction may drop the batch's tombstones and markers; None while no cleaning has seen it."""
        return self.base_timestamp if self.attributes & DELETE_HORIZON_BIT else None

    @property
    def last_sequence(self) -> int:
        """Sequence number of the last record; sequences start again at 0 after 2^31 - 1. -1 without a producer."""
        if self.base_sequence < 0:
            return -1
        return (self.base_sequence + self.last_offset_delta) & _SEQUENCE_MAX


def read_header(buffer: Buffer, position: int = 0) -> BatchHeader:
    """The header at `position`; checks bounds, magic and the signs of its numbers, not the CRC.

    The records need not be there: 61 bytes are enough.
    """
    available = len(buffer) - position
    if available > _MAGIC_POSITION and buffer[position + _MAGIC_POSITION] != MAGIC:
        magic = buffer[position + _MAGIC_POSITION]
        if magic in (0, 1):
            raise UnsupportedMagicError(f"message format {magic} is not taken: use record batches of magic 2")
        raise UnsupportedMagicError(f"message format {magic} does not exist")
    if available < HEADER_BYTES:
        raise CorruptBatchError(f"{available} bytes cannot hold the header of a batch ({HEADER_BYTES} bytes)")
    (
        base_offset,
        length,
        leader_epoch,
        _magic,
        crc,
        attributes,
        last_offset_delta,
        base_timestamp,
        max_timestamp,
        producer_id,
        producer_epoch,
        base_sequence,
        count,
    ) = HEADER.unpack_from(buffer, position)
    size = length + LENGTH_PREFIX_BYTES
    if size < HEADER_BYTES:
        raise CorruptBatchError(f"a batch length of {length} is too small for a header")
    if base_offset < 0 or last_offset_delta < 0 or count < 0 or base_offset > _INT64_MAX - 1 - last_offset_delta:
        raise CorruptBatchError(
            f"base offset {base_offset}, last offset delta {last_offset_delta} and count {count} are no batch's"
        )
    if count > last_offset_delta + 1:
        raise CorruptBatchError(f"{count} records do not fit into {last_offset_delta + 1} offsets")
    return BatchHeader(
        base_offset=base_offset,
        size=size,
        leader_epoch=leader_epoch,
        attributes=attributes,
        last_offset_delta=last_offset_delta,
        base_timestamp=base_timestamp,
        max_timestamp=max_timestamp,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        count=count,
        crc=crc,
    )


def check_batch(buffer: Buffer, position: int = 0, *, size_max: int, from_client: bool = False) -> BatchHeader:
    """Check the batch at `position` as far as possible without decoding a record, in one pass over its bytes.

    Raises CorruptBatchError (length, CRC, impossible numbers), UnsupportedMagicError, UnsupportedCompressionError,
    RecordTooLargeError (over `size_max` bytes, compressed) and, for a batch `from_client`, InvalidRecordError: its
    count must be positive and fill the offsets, a producer needs epoch and sequence, and control is not allowed.
    """
    header = read_header(buffer, position)
    if header.size > size_max:
        raise RecordTooLargeError(f"a batch of {header.size} bytes is over the limit of {size_max}")
    end = position + header.size
    if end > len(buffer):
        raise CorruptBatchError(f"a batch of {header.size} bytes ends after {len(buffer) - position}")
    view = memoryview(buffer)
    crc = crc32c(view[position + CRC_START : end])
    if crc != header.crc:
        raise CorruptBatchError(f"CRC-32C is {crc:#010x}, the batch says {header.crc:#010x}")
    codec = header.attributes & CODEC_MASK
    if codec > _CODEC_LAST:
        raise UnsupportedCompressionError(f"codec {codec} does not exist")
    if codec == 0 and header.count * RECORD_BYTES_MIN > header.size - HEADER_BYTES:
        raise CorruptBatchError(f"{header.count} records do not fit into {header.size - HEADER_BYTES} bytes")
    if from_client:
        _check_client(header)
    return header


def _check_client(header: BatchHeader) -> None:
    if header.count == 0:
        raise InvalidRecordError("a batch without records")
    if header.last_offset_delta != header.count - 1:
        raise InvalidRecordError(f"last offset delta {header.last_offset_delta} with {header.count} records")
    if header.attributes & CONTROL_BIT:
        raise InvalidRecordError("control batches are written by the cluster, not by clients")
    if header.producer_id < 0:
        if header.attributes & TRANSACTIONAL_BIT:
            raise InvalidRecordError("a transactional batch without a producer id")
    elif header.producer_epoch < 0 or header.base_sequence < 0:
        raise InvalidRecordError(
            f"producer id {header.producer_id} with epoch {header.producer_epoch} and sequence {header.base_sequence}"
        )
    if header.attributes & CLAIM_BIT and (
        header.count != 1 or header.producer_id < 0 or header.attributes & TRANSACTIONAL_BIT
    ):
        raise InvalidRecordError("a claim is one record of an idempotent producer, and no part of a transaction")


def split_batches(buffer: Buffer, position: int = 0) -> Iterator[tuple[int, BatchHeader]]:
    """Position and header of each whole batch from `position` on; stops before an incomplete batch.

    Does not check CRCs. Bytes that cannot be the beginning of a batch raise as in `read_header`.
    """
    end = len(buffer)
    while end - position > _MAGIC_POSITION:
        if end - position < HEADER_BYTES:
            length = _LENGTH.unpack_from(buffer, position + _LENGTH_POSITION)[0]
            if buffer[position + _MAGIC_POSITION] == MAGIC and length + LENGTH_PREFIX_BYTES >= HEADER_BYTES:
                return
        header = read_header(buffer, position)
        if header.size > end - position:
            return
        yield position, header
        position += header.size


def stamp(batch: bytearray | memoryview, *, base_offset: int, leader_epoch: int, position: int = 0) -> None:
    """Set base offset and leader epoch of the batch at `position`. The CRC does not cover them."""
    _BASE_OFFSET.pack_into(batch, position, base_offset)
    _LEADER_EPOCH.pack_into(batch, position + _LEADER_EPOCH_POSITION, leader_epoch)


def stamp_append_time(batch: bytearray | memoryview, timestamp_ms: int, *, position: int = 0) -> None:
    """Change the batch at `position` to log-append time: all records have `timestamp_ms`. Updates the CRC."""
    header = read_header(batch, position)
    attributes = header.attributes | LOG_APPEND_TIME_BIT
    _ATTRIBUTES.pack_into(batch, position + _ATTRIBUTES_POSITION, attributes)
    _MAX_TIMESTAMP.pack_into(batch, position + _MAX_TIMESTAMP_POSITION, timestamp_ms)
    seal(batch, position=position, size=header.size)


def seal(batch: bytearray | memoryview, *, size: int, position: int = 0) -> None:
    """Write the CRC of the `size` bytes of batch at `position`, whose other fields are final."""
    with memoryview(batch) as view:
        crc = crc32c(view[position + CRC_START : position + size])
    _CRC.pack_into(batch, position + _CRC_POSITION, crc)
