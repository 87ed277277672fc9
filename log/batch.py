"""Record batches: encodes and decodes records or columns, control batches, and recompresses. Pure.

`batch_header.py` has the header and the checks that need no record; its names are exported from here as well.
`columns.py` has the result of decoding; `kernel.py` and `kernel_bulk.py` have the loops.

Decoding takes a batch that has passed `check_batch`. It does not compute the CRC again, but trusts nothing else: any
bytes give records or an error of the catalogue.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import TypedDict, Unpack

from tidelog.log import kernel, kernel_bulk
from tidelog.log.batch_header import (
    BATCH_BYTES_MAX,
    CLAIM_BIT,
    CODEC_MASK,
    CONTROL_BIT,
    DELETE_HORIZON_BIT,
    HEADER,
    HEADER_BYTES,
    LENGTH_PREFIX_BYTES,
    LOG_APPEND_TIME_BIT,
    MAGIC,
    RECORD_BYTES_MIN,
    TRANSACTIONAL_BIT,
    BatchHeader,
    Buffer,
    Codec,
    TimestampType,
    check_batch,
    read_header,
    seal,
    split_batches,
    stamp,
    stamp_append_time,
)
from tidelog.log.columns import BinaryColumn, Columns, Headers, Record
from tidelog.log.compression import compress, decompress
from tidelog.log.kernel import murmur2, partition_of, partitions_of
from tidelog.model.errors import CorruptBatchError, InvalidRecordError, RecordTooLargeError

__all__ = [
    "BATCH_BYTES_MAX",
    "CODEC_MASK",
    "CONTROL_BIT",
    "DELETE_HORIZON_BIT",
    "HEADER",
    "HEADER_BYTES",
    "LENGTH_PREFIX_BYTES",
    "LOG_APPEND_TIME_BIT",
    "MAGIC",
    "RECORD_BYTES_MIN",
    "TRANSACTIONAL_BIT",
    "BatchFields",
    "BatchHeader",
    "BinaryColumn",
    "Buffer",
    "Codec",
    "Columns",
    "ControlKind",
    "ControlMarker",
    "Headers",
    "Record",
    "TimestampType",
    "check_batch",
    "decode",
    "decode_columns",
    "encode",
    "encode_columns",
    "encode_columns_unsealed",
    "encode_control",
    "encode_packed_unsealed",
    "murmur2",
    "parse_control",
    "partition_of",
    "partitions_of",
    "read_header",
    "recompress",
    "seal",
    "split_batches",
    "stamp",
    "stamp_append_time",
    "validate_records",
]

_NO_TIMESTAMP = -1
_ATTRIBUTES = Struct(">h")
_ATTRIBUTES_POSITION = 21
_LENGTH = Struct(">i")
_LENGTH_POSITION = 8
_CONTROL_KEY = Struct(">hh")
_CONTROL_VALUE = Struct(">hi")
_CONTROL_BYTES_MAX = 64 * 1024

encode_records = kernel.encode_loop if kernel.COMPILED else kernel_bulk.encode_bulk
decode_records = kernel.decode_loop if kernel.COMPILED else kernel_bulk.decode_bulk


class BatchFields(TypedDict, total=False):
    """The fields of a batch's header that the caller may set."""

    codec: Codec
    level: int | None
    """Level of the codec; None is its default."""
    base_offset: int
    leader_epoch: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    is_transactional: bool
    is_control: bool
    is_claim: bool
    timestamp_type: TimestampType
    max_timestamp: int | None
    """None: the largest of the records. With log-append time, the time of appending."""
    last_offset_delta: int | None
    """None: that of the last record. Larger where compaction removed the last records."""
    base_timestamp: int | None
    """None: the first record's."""
    delete_horizon_ms: int | None
    """If set, it is the base timestamp, and attribute bit 6 is set."""


def encode(records: Iterable[Record], **fields: Unpack[BatchFields]) -> bytes:
    """A batch of `records`, whose offsets ascend from `base_offset`; gaps are kept."""
    rows = list(records)
    base_offset = fields.get("base_offset", 0)
    has_headers = any(record.headers for record in rows)
    return encode_columns(
        [record.timestamp for record in rows],
        [record.key for record in rows],
        [record.value for record in rows],
        [record.headers for record in rows] if has_headers else None,
        [record.offset - base_offset for record in rows],
        **fields,
    )


def encode_columns(
    timestamps: Sequence[int],
    keys: Sequence[bytes | None],
    values: Sequence[bytes | None],
    headers: Sequence[Iterable[tuple[str, bytes | None]]] | BinaryColumn | None = None,
    offset_deltas: Sequence[int] | None = None,
    **fields: Unpack[BatchFields],
) -> bytes:
    """A batch of the records in these columns of equal length: the bulk form of `encode`.

    `keys` and `values` are lists of bytes, or the columns of a decoded batch; `headers` may be its `header_blocks`.
    `offset_deltas` ascend from the base offset; the default is 0, 1, 2, ... Raises RecordTooLargeError if the batch
    would not fit into 2 GiB, and ValueError or OverflowError for invalid columns.
    """
    return _sealed(encode_columns_unsealed(timestamps, keys, values, headers, offset_deltas, **fields))


def encode_columns_unsealed(
    timestamps: Sequence[int],
    keys: Sequence[bytes | None],
    values: Sequence[bytes | None],
    headers: Sequence[Iterable[tuple[str, bytes | None]]] | BinaryColumn | None = None,
    offset_deltas: Sequence[int] | None = None,
    **fields: Unpack[BatchFields],
) -> bytearray:
    """As `encode_columns`, without the CRC: for a producer, which sets its id and sequence before it calls `seal`."""
    count = len(values)
    last_delta = _last_delta(count, offset_deltas, fields.get("last_offset_delta"))
    horizon = fields.get("delete_horizon_ms")
    base_timestamp = fields.get("base_timestamp") if horizon is None else horizon
    if base_timestamp is None:
        base_timestamp = timestamps[0] if count else _NO_TIMESTAMP
    max_timestamp = fields.get("max_timestamp")
    if max_timestamp is None:
        max_timestamp = max(timestamps) if count else _NO_TIMESTAMP
    batch = encode_records(
        timestamps if isinstance(timestamps, list) else list(timestamps),
        _rows(keys),
        _rows(values),
        _blocks(headers),
        offset_deltas if offset_deltas is None or isinstance(offset_deltas, list) else list(offset_deltas),
        base_timestamp,
        HEADER_BYTES,
    )
    return _with_header(batch, count, last_delta, base_timestamp, max_timestamp, fields)


def encode_packed_unsealed(
    rows: "array[int]",
    timestamps: "array[int]",
    keys: tuple["array[int]", bytes, bytes],
    values: tuple["array[int]", bytes, bytes],
    **fields: Unpack[BatchFields],
) -> bytearray:
    """A batch, without the CRC, of these rows of packed columns (see `kernel.py`), in this order; no object is created
    for a record. It is fast only where the kernel is compiled."""
    batch = kernel.encode_packed(rows, timestamps, *keys, *values, HEADER_BYTES)
    newest = fields.get("max_timestamp")
    if newest is None:
        newest = max(map(timestamps.__getitem__, rows))
    return _with_header(batch, len(rows), len(rows) - 1, timestamps[rows[0]], newest, fields)


def _sealed(batch: bytearray) -> bytes:
    seal(batch, size=len(batch))
    return bytes(batch)


def _with_header(
    batch: bytearray, count: int, last_delta: int, base_timestamp: int, max_timestamp: int, fields: BatchFields
) -> bytearray:
    """Compress the records behind the space for the header, and write the header; its CRC is not set."""
    codec = Codec(fields.get("codec", Codec.NONE))
    if codec is not Codec.NONE and count:
        with memoryview(batch) as view:
            body = compress(codec, view[HEADER_BYTES:], fields.get("level"))
        del batch[HEADER_BYTES:]
        batch += body
    if len(batch) > BATCH_BYTES_MAX:
        raise RecordTooLargeError(f"the records take {len(batch)} bytes, more than a batch can hold")
    HEADER.pack_into(
        batch,
        0,
        fields.get("base_offset", 0),
        len(batch) - LENGTH_PREFIX_BYTES,
        fields.get("leader_epoch", -1),
        MAGIC,
        0,
        _attributes(fields),
        last_delta,
        base_timestamp,
        max_timestamp,
        fields.get("producer_id", -1),
        fields.get("producer_epoch", -1),
        fields.get("base_sequence", -1),
        count,
    )
    return batch


def _last_delta(count: int, offset_deltas: Sequence[int] | None, wanted: int | None) -> int:
    if offset_deltas is None:
        last = count - 1
    else:
        previous = last = -1
        for last in offset_deltas:
            if last <= previous:
                raise ValueError(f"offset delta {last} after {previous}")
            previous = last
    if wanted is None:
        if count == 0:
            raise ValueError("a batch without records needs last_offset_delta")
        return last
    if wanted < last:
        raise ValueError(f"last offset delta {wanted} where the last record has {last}")
    return wanted


def _rows(column: Sequence[bytes | None]) -> list[bytes | None]:
    if isinstance(column, list):
        return column
    return column.to_list() if isinstance(column, BinaryColumn) else list(column)


def _blocks(headers: Sequence[Iterable[tuple[str, bytes | None]]] | BinaryColumn | None) -> list[bytes] | None:
    if headers is None:
        return None
    if isinstance(headers, BinaryColumn):
        return [block or b"\x00" for block in headers.to_list()]
    return [kernel.encode_headers(row) for row in headers]


def _attributes(fields: BatchFields) -> int:
    attributes = int(fields.get("codec", Codec.NONE))
    if fields.get("timestamp_type", TimestampType.CREATE) is TimestampType.LOG_APPEND:
        attributes |= LOG_APPEND_TIME_BIT
    if fields.get("is_transactional", False):
        attributes |= TRANSACTIONAL_BIT
    if fields.get("is_control", False):
        attributes |= CONTROL_BIT
    if fields.get("is_claim", False):
        attributes |= CLAIM_BIT
    if fields.get("delete_horizon_ms") is not None:
        attributes |= DELETE_HORIZON_BIT
    return attributes


def decode(buffer: Buffer, position: int = 0, *, decompressed_bytes_max: int) -> list[Record]:
    """The records of the batch at `position`, one object each; errors as in `decode_columns`."""
    return decode_columns(buffer, position, decompressed_bytes_max=decompressed_bytes_max).to_list()


def decode_columns(buffer: Buffer, position: int = 0, *, decompressed_bytes_max: int) -> Columns:
    """The records of the batch at `position` as columns.

    Raises CorruptBatchError, UnsupportedMagicError, UnsupportedCompressionError, or RecordTooLargeError if the records
    are more than `decompressed_bytes_max` bytes before compression.
    """
    header = read_header(buffer, position)
    data, start, end = _body(buffer, position, header, decompressed_bytes_max)
    offsets, timestamps, keys, values, headers = decode_records(
        data, start, end, header.count, header.base_offset, header.base_timestamp, header.last_offset_delta
    )
    if header.timestamp_type is TimestampType.LOG_APPEND:
        timestamps = array("q", [header.max_timestamp]) * header.count
    return Columns(
        header,
        offsets,
        timestamps,
        BinaryColumn(*keys),
        BinaryColumn(*values),
        None if headers is None else BinaryColumn(*headers),
    )


def _body(buffer: Buffer, position: int, header: BatchHeader, bytes_max: int) -> tuple[bytes, int, int]:
    """The records of the batch as decompressed bytes, and their start and end in them."""
    start, end = position + HEADER_BYTES, position + header.size
    if end > len(buffer):
        raise CorruptBatchError(f"a batch of {header.size} bytes ends after {len(buffer) - position}")
    codec = header.codec
    if codec is not Codec.NONE and end > start:
        limit = min(bytes_max, BATCH_BYTES_MAX)
        body = decompress(codec, memoryview(buffer)[start:end], bytes_max=limit)
        return body, 0, len(body)
    if end - start > bytes_max:
        raise RecordTooLargeError(f"records of {end - start} bytes are over the limit of {bytes_max}")
    if isinstance(buffer, bytes):
        return buffer, start, end
    return bytes(memoryview(buffer)[start:end]), 0, end - start


def validate_records(
    buffer: Buffer, position: int = 0, *, decompressed_bytes_max: int, needs_keys: bool = False
) -> Columns:
    """Decode the batch, for a log that inspects records: `needs_keys` (a compacted topic) rejects null keys.

    Raises InvalidRecordError for those, otherwise as `decode_columns`, and returns the same.
    """
    columns = decode_columns(buffer, position, decompressed_bytes_max=decompressed_bytes_max)
    if needs_keys and columns.keys.null_count:
        raise InvalidRecordError(f"{columns.keys.null_count} records without a key on a compacted topic")
    return columns


def recompress(
    buffer: Buffer,
    codec: Codec,
    position: int = 0,
    *,
    decompressed_bytes_max: int,
    level: int | None = None,
    needs_keys: bool = False,
) -> bytes:
    """The batch at `position` with its records under another codec; other fields stay. Checks the records as
    `validate_records` does."""
    columns = validate_records(buffer, position, decompressed_bytes_max=decompressed_bytes_max, needs_keys=needs_keys)
    header = columns.batch
    data, start, end = _body(buffer, position, header, decompressed_bytes_max)
    batch = bytearray(memoryview(buffer)[position : position + HEADER_BYTES])
    # A batch that compaction has emptied has no records to compress.
    batch += compress(codec, memoryview(data)[start:end], level) if header.count else b""
    if len(batch) > BATCH_BYTES_MAX:
        raise RecordTooLargeError(f"the records take {len(batch)} bytes, more than a batch can hold")
    _LENGTH.pack_into(batch, _LENGTH_POSITION, len(batch) - LENGTH_PREFIX_BYTES)
    _ATTRIBUTES.pack_into(batch, _ATTRIBUTES_POSITION, header.attributes & ~CODEC_MASK | codec)
    seal(batch, size=len(batch))
    return bytes(batch)


class ControlKind(IntEnum):
    """The kind of a control record; the first two end a transaction, the others belong to Raft logs."""

    UNKNOWN = -1
    ABORT = 0
    COMMIT = 1
    LEADER_CHANGE = 2
    SNAPSHOT_HEADER = 3
    SNAPSHOT_FOOTER = 4
    KRAFT_VERSION = 5
    KRAFT_VOTERS = 6


@dataclass(frozen=True, slots=True)
class ControlMarker:
    """A control record. `coordinator_epoch` is that of the coordinator that ended the transaction, else -1."""

    kind: ControlKind
    coordinator_epoch: int = -1

    @property
    def is_abort(self) -> bool:
        return self.kind is ControlKind.ABORT

    @property
    def ends_transaction(self) -> bool:
        return self.kind in (ControlKind.ABORT, ControlKind.COMMIT)


def encode_control(
    kind: ControlKind,
    *,
    coordinator_epoch: int,
    timestamp: int,
    producer_id: int,
    producer_epoch: int,
    base_offset: int = 0,
    leader_epoch: int = -1,
) -> bytes:
    """The batch that ends a transaction: one record.

    key: version i16 = 0 | kind i16          value: version i16 = 0 | coordinator epoch i32
    """
    assert kind in (ControlKind.ABORT, ControlKind.COMMIT), "only transactions have markers of this form"
    return encode_columns(
        [timestamp],
        [_CONTROL_KEY.pack(0, kind)],
        [_CONTROL_VALUE.pack(0, coordinator_epoch)],
        base_offset=base_offset,
        leader_epoch=leader_epoch,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        is_transactional=True,
        is_control=True,
    )


def parse_control(buffer: Buffer, position: int = 0) -> ControlMarker | None:
    """The content of the control batch at `position`; None if compaction has left only its header.

    A newer version may have more fields at the end; an unknown kind is UNKNOWN, to be skipped. Raises CorruptBatchError
    for anything else.
    """
    if not read_header(buffer, position).is_control:
        raise CorruptBatchError("not a control batch")
    columns = decode_columns(buffer, position, decompressed_bytes_max=_CONTROL_BYTES_MAX)
    if not len(columns):
        return None
    key, value = columns.keys[0], columns.values[0]
    if key is None or len(key) < _CONTROL_KEY.size:
        raise CorruptBatchError("a control record without version and kind")
    version, number = _CONTROL_KEY.unpack_from(key)
    if version < 0:
        raise CorruptBatchError(f"a control record of version {version}")
    if number not in (ControlKind.ABORT, ControlKind.COMMIT):
        known = number in ControlKind.__members__.values()
        return ControlMarker(ControlKind(number) if known else ControlKind.UNKNOWN)
    if value is None or len(value) < _CONTROL_VALUE.size:
        raise CorruptBatchError("the end of a transaction without a coordinator epoch")
    return ControlMarker(ControlKind(number), _CONTROL_VALUE.unpack_from(value)[1])
