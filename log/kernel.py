# cython: language_level=3, annotation_typing=False, boundscheck=False, wraparound=False, initializedcheck=False
"""The hot loops: encode records and packed columns, decode records into columns, murmur2, join CRCs. Pure.

A record, all numbers zigzag varints but for the attributes' one byte:

    length of the rest | attributes = 0 | timestamp delta | offset delta | key size | key | value size | value |
    header count | per header: name size | name | value size | value          a size of -1 means null

One source, two ways to run. If a compiler is available this file is an extension module, with the types of
`kernel.pxd`; otherwise it is interpreted. Loops over bytes are fast when compiled and slow when interpreted, so
`kernel_bulk.py` encodes and decodes with few operations on whole columns where this file is not `COMPILED`. All give
the same bytes and reject the same bytes; tests run all three.

No input is trusted: every count and size is checked against the bytes that are left before anything is read, copied or
allocated. Broken records raise CorruptBatchError.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise

from tidelog.model.errors import CorruptBatchError

try:
    import cython

    COMPILED: bool = cython.compiled
except ImportError:
    COMPILED = False

Bytes = bytes | bytearray
Header = tuple[str, bytes | None]
Layout = tuple["array[int]", Bytes, Bytes | None]
"""A column of byte strings: count + 1 offsets (32 bits) into the data, the data, and unless all are present one byte
per row: 1 present, 0 null. But for that last one it is Arrow's binary layout."""
RawColumns = tuple["array[int]", "array[int]", Layout, Layout, Layout | None]
"""Offsets, timestamps, keys, values, and the headers as encoded (empty: none), or None if no record has any."""
Span = tuple[int, int, int, int, int, int]
"""The records of a batch: from which byte to which, how many; base offset, base timestamp, last offset delta."""

_RECORD_BYTES_MIN = 7


def _corrupt(row: int, what: str) -> CorruptBatchError:
    return CorruptBatchError(f"record {row} of the batch is broken: {what}")


# Varints


def varint(value: int) -> bytes:
    """`value`, which must fit into 64 bits, as a zigzag varint of 1 to 10 bytes."""
    if value >> 63 not in (0, -1):
        raise OverflowError(f"{value} does not fit into 64 bits")
    out = bytearray(10)
    return bytes(out[: _put_varint(out, 0, value)])


def _fits(value: int) -> bool:
    """Whether a sum or difference of two 64-bit numbers fits into 64 bits.

    Compiled they wrap instead, which the caller sees by the sign; so both ways of running notice.
    """
    return -1 <= value >> 63 <= 0


def _varint_size(value: int) -> int:
    raw = (value << 1) ^ (value >> 63)
    size = 1
    while raw > 127:
        raw >>= 7
        size += 1
    return size


def _put_varint(target: bytearray, position: int, value: int) -> int:
    """Write `value` at `position`, where there must be room; the position after it."""
    raw = (value << 1) ^ (value >> 63)
    while raw > 127:
        target[position] = (raw & 127) | 128
        raw >>= 7
        position += 1
    target[position] = raw
    return position + 1


def _put_bytes(target: bytearray, position: int, source: Bytes, start: int, size: int) -> int:
    for i in range(size):
        target[position + i] = source[start + i]
    return position + size


def _read_varint(source: Bytes, position: int, end: int) -> tuple[int, int]:
    """The varint at `position` and the position after it; that is -1 if there is none before `end`."""
    # Small enough to be inlined by the C compiler; most varints have one byte or two.
    if position < end:
        raw = source[position]
        if raw < 128:
            return _unzigzag(raw), position + 1
        if position + 1 < end and source[position + 1] < 128:
            return _unzigzag(raw - 128 + source[position + 1] * 128), position + 2
    return _read_long_varint(source, position, end)


def _read_long_varint(source: Bytes, position: int, end: int) -> tuple[int, int]:
    raw = 0
    shift = 0
    while position < end:
        byte = source[position]
        position += 1
        if shift == 63 and byte > 1:
            return 0, -1
        raw |= (byte & 127) << shift
        if byte < 128:
            return _unzigzag(raw), position
        shift += 7
    return 0, -1


def _unzigzag(raw: int) -> int:
    half = raw >> 1
    return -half - 1 if raw & 1 else half


# Headers of one record: the block from their count on


def encode_headers(headers: Iterable[Header]) -> bytes:
    """The headers with their count in front. Names are UTF-8; what was not comes back as the bytes it was."""
    parts: list[bytes] = []
    count = 0
    for name, value in headers:
        encoded = name.encode("utf-8", "surrogateescape")
        parts += (varint(len(encoded)), encoded)
        parts += (b"\x01",) if value is None else (varint(len(value)), value)
        count += 1
    return varint(count) + b"".join(parts)


def decode_headers(block: Bytes) -> tuple[Header, ...]:
    """The headers of a block that `decode_records` has checked; an empty block has none."""
    if not block:
        return ()
    end = len(block)
    count, position = _read_varint(block, 0, end)
    headers: list[Header] = []
    for _ in range(count):
        size, position = _read_varint(block, position, end)
        name = block[position : position + size].decode("utf-8", "surrogateescape")
        size, position = _read_varint(block, position + size, end)
        headers.append((name, None if size < 0 else bytes(block[position : position + size])))
        position += max(size, 0)
    return tuple(headers)


def _skip_headers(source: Bytes, position: int, end: int, count: int) -> int:
    """The position after `count` headers, or -1 if they are not well formed before `end`."""
    if count < 0 or count > (end - position) // 2:
        return -1
    for _ in range(count):
        size, position = _read_varint(source, position, end)
        if position < 0 or size < 0 or size > end - position:
            return -1
        size, position = _read_varint(source, position + size, end)
        if position < 0 or size < -1 or size > end - position:
            return -1
        if size > 0:
            position += size
    return position


# Encoding


def _check_lengths(count: int, *columns: Sequence[object] | None) -> None:
    for column in columns:
        if column is not None and len(column) != count:
            raise ValueError(f"columns of {len(column)} and {count} rows")


def encode_loop(
    timestamps: list[int],
    keys: list[bytes | None],
    values: list[bytes | None],
    blocks: list[bytes] | None,
    deltas: list[int] | None,
    base_timestamp: int,
    reserve: int,
) -> bytearray:
    """The records after `reserve` zero bytes. `blocks` are encoded headers, `deltas` default to 0, 1, 2, ...

    All columns have the same length. The order of `deltas` is the caller's duty.
    """
    count = len(values)
    _check_lengths(count, timestamps, keys, blocks, deltas)
    stamp_deltas = array("q", bytes(8 * count))
    sizes = array("q", bytes(8 * count))
    total = reserve
    offset = -1
    for i in range(count):
        stamp = timestamps[i]
        delta = stamp - base_timestamp
        if (stamp >= base_timestamp) != (delta >= 0) or not _fits(delta):
            raise OverflowError("a timestamp delta does not fit into 64 bits")
        stamp_deltas[i] = delta
        offset = i if deltas is None else deltas[i]
        size = 2 + _varint_size(delta) + _varint_size(offset)
        key = keys[i]
        if key is None:
            size += 1
        else:
            size += _varint_size(len(key)) + len(key)
        value = values[i]
        if value is None:
            size += 1
        else:
            size += _varint_size(len(value)) + len(value)
        if blocks is not None:
            block = blocks[i]
            size += len(block) - 1
        sizes[i] = size
        total += size + _varint_size(size)
    out = bytearray(total)
    target = out
    position = reserve
    for i in range(count):
        position = _put_varint(target, position, sizes[i]) + 1
        position = _put_varint(target, position, stamp_deltas[i])
        offset = i if deltas is None else deltas[i]
        position = _put_varint(target, position, offset)
        key = keys[i]
        if key is None:
            position = _put_varint(target, position, -1)
        else:
            position = _put_varint(target, position, len(key))
            position = _put_bytes(target, position, key, 0, len(key))
        value = values[i]
        if value is None:
            position = _put_varint(target, position, -1)
        else:
            position = _put_varint(target, position, len(value))
            position = _put_bytes(target, position, value, 0, len(value))
        if blocks is None:
            position += 1
        else:
            block = blocks[i]
            position = _put_bytes(target, position, block, 0, len(block))
    assert position == total, "both passes agree on the size"
    return out


# Decoding


def _check_count(count: int, size: int) -> None:
    """Before anything is allocated: a record has at least 7 bytes."""
    if count < 0 or count > size // _RECORD_BYTES_MIN:
        raise CorruptBatchError(f"{count} records do not fit into {size} bytes")


def decode_loop(
    data: Bytes, start: int, end: int, count: int, base_offset: int, base_timestamp: int, last_delta: int
) -> RawColumns:
    """The `count` records between `start` and `end` of `data`, which they must fill exactly.

    Offset deltas must rise from record to record, from 0 at the least to `last_delta` at the most.
    """
    return decode_run(data, [(start, end, count, base_offset, base_timestamp, last_delta)])


def decode_run(data: Bytes, spans: list[Span]) -> RawColumns:
    """The same of several batches in `data`, one behind the other in the same columns. Each span begins where the one
    before it ends, or later."""
    origin = spans[0][0] if spans else 0
    count = 0
    before = max(0, origin)
    for start, end, rows, _, _, _ in spans:
        if not before <= start <= end <= len(data) or end - origin >= 2**31:
            raise ValueError(f"records from {start} to {end} of {len(data)} bytes")
        _check_count(rows, end - start)
        before = end
        count += rows
    source = data
    offsets = array("q", bytes(8 * count))
    timestamps = array("q", bytes(8 * count))
    key_ends = array("i", bytes(4 * count + 4))
    value_ends = array("i", bytes(4 * count + 4))
    header_ends = array("i", bytes(4 * count + 4))
    starts = array("i", bytes(12 * count))  # of key, value and headers of each record
    key_present = bytearray(count)
    value_present = bytearray(count)
    offsets_out, timestamps_out, starts_out = offsets, timestamps, starts
    key_to, key_flag = key_ends, key_present
    value_to, value_flag = value_ends, value_present
    header_to = header_ends
    nulls = 0
    row = 0
    for start, end, rows, base_offset, base_timestamp, last_delta in spans:
        position = start
        previous = -1
        for i in range(row, row + rows):
            size, position = _read_varint(source, position, end)
            # A plain number: the compiler takes a name of the module for any object.
            if position < 0 or size < 6 or size > end - position:
                raise _corrupt(i - row, "its length")
            record_end = position + size
            delta, position = _read_varint(source, position + 1, record_end)
            if position < 0:
                raise _corrupt(i - row, "its timestamp")
            stamp = base_timestamp + delta
            if (delta >= 0) != (stamp >= base_timestamp) or not _fits(stamp):
                raise _corrupt(i - row, "its timestamp is out of range")
            timestamps_out[i] = stamp
            delta, position = _read_varint(source, position, record_end)
            if position < 0 or delta <= previous or delta > last_delta:
                raise _corrupt(i - row, "its offset")
            previous = delta
            offsets_out[i] = base_offset + delta
            size, position = _read_varint(source, position, record_end)
            if position < 0 or size < -1 or size > record_end - position:
                raise _corrupt(i - row, "its key")
            starts_out[3 * i] = position - origin
            if size >= 0:
                key_flag[i] = 1
                key_to[i + 1] = key_to[i] + size
                position += size
            else:
                nulls |= 1
                key_to[i + 1] = key_to[i]
            size, position = _read_varint(source, position, record_end)
            if position < 0 or size < -1 or size > record_end - position:
                raise _corrupt(i - row, "its value")
            starts_out[3 * i + 1] = position - origin
            if size >= 0:
                value_flag[i] = 1
                value_to[i + 1] = value_to[i] + size
                position += size
            else:
                nulls |= 2
                value_to[i + 1] = value_to[i]
            header_to[i + 1] = header_to[i]
            if position < record_end and source[position] == 0:
                position += 1
            else:
                starts_out[3 * i + 2] = position - origin
                size, position = _read_varint(source, position, record_end)
                if position >= 0 and size != 0:
                    position = _skip_headers(source, position, record_end, size)
                    header_to[i + 1] += position - origin - starts_out[3 * i + 2]
            if position != record_end:
                raise _corrupt(i - row, "its headers, or its length is not that of its fields")
        if position != end:
            raise CorruptBatchError(f"{end - position} bytes after the last record of the batch")
        row += rows
    return (
        offsets,
        timestamps,
        (key_ends, _gather(source, origin, starts, 0, key_ends, count), key_present if nulls & 1 else None),
        (value_ends, _gather(source, origin, starts, 1, value_ends, count), value_present if nulls & 2 else None),
        (header_ends, _gather(source, origin, starts, 2, header_ends, count), None) if header_ends[count] else None,
    )


def _gather(source: Bytes, origin: int, starts: "array[int]", field: int, ends: "array[int]", count: int) -> bytearray:
    """One of the three fields of all records, one behind the other so that that of record i ends at `ends[i + 1]`."""
    out = bytearray(ends[count])
    if not out:
        return out
    piece_from = starts
    piece_to = ends
    target = out
    for i in range(count):
        _put_bytes(target, piece_to[i], source, origin + piece_from[3 * i + field], piece_to[i + 1] - piece_to[i])
    return out


def slice_rows(ends: "array[int]", data: Bytes, present: Bytes | None) -> list[bytes | None]:
    """A column as a list of byte strings."""
    whole = bytes(data)
    bounds = ends.tolist()
    rows: list[bytes | None] = [whole[start:end] for start, end in pairwise(bounds)]
    if present is not None:
        rows = [row if flag else None for row, flag in zip(rows, present, strict=True)]
    return rows


# Murmur2, as Kafka's Java clients place keys


def murmur2(data: bytes) -> int:
    """The hash as Java's signed 32-bit integer."""
    return _murmur2_at(data, 0, len(data))


def _murmur2_at(source: Bytes, start: int, size: int) -> int:
    # Names, not literals: the compiler takes a literal of 32 bits for an object. Sums and products stay in 64 bits.
    factor = 0x5BD1E995
    mask = 0xFFFFFFFF
    mixed = 0x9747B28C
    mixed ^= size
    position = start
    end = start + size
    while position + 4 <= end:
        word = source[position + 3]
        word = word << 8 | source[position + 2]
        word = word << 8 | source[position + 1]
        word = word << 8 | source[position]
        word = word * factor & mask
        word = (word ^ word >> 24) * factor & mask
        mixed = mixed * factor & mask ^ word
        position += 4
    if position < end:
        shift = 0
        while position < end:
            word = source[position]
            mixed ^= word << shift
            shift += 8
            position += 1
        mixed = mixed * factor & mask
    mixed = (mixed ^ mixed >> 13) * factor & mask
    mixed ^= mixed >> 15
    signed = mixed
    return signed - mask - 1 if signed >> 31 else signed


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of a key: the sign bit is dropped, as Java does, so that no hash gives a negative one."""
    assert partitions > 0, "a topic has a partition"
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def partitions_of(keys: list[bytes | None], partitions: int) -> "array[int]":
    """The partition of each key; -1 for null keys, whose place the caller chooses."""
    assert partitions > 0, "a topic has a partition"
    positive = 0x7FFFFFFF
    places = array("i", bytes(4 * len(keys)))
    out = places
    for i in range(len(keys)):
        key = keys[i]
        out[i] = -1 if key is None else (murmur2(key) & positive) % partitions
    return places


# Packed columns: row i is data[ends[i]:ends[i + 1]], 64-bit `ends`. `present` has a byte for each row, 0 for null, or
# is empty if all are there. Without `ends` all are null. The caller has checked that it is so.


def packed_partitions(ends: "array[int]", data: bytes, present: bytes, partitions: int) -> "array[int]":
    """As `partitions_of`, for the keys of a packed column."""
    assert partitions > 0, "a topic has a partition"
    positive = 0x7FFFFFFF
    bounds, flags, source = ends, present, data
    has_nulls = len(present) > 0
    count = len(ends) - 1
    places = array("i", bytes(4 * count))
    out = places
    for i in range(count):
        if has_nulls and flags[i] == 0:
            out[i] = -1
        else:
            out[i] = (_murmur2_at(source, bounds[i], bounds[i + 1] - bounds[i]) & positive) % partitions
    return places


def encode_packed(
    rows: "array[int]",
    stamps: "array[int]",
    key_ends: "array[int]",
    key_data: bytes,
    key_present: bytes,
    value_ends: "array[int]",
    value_data: bytes,
    value_present: bytes,
    reserve: int,
) -> bytearray:
    """As `encode_loop`, of packed columns: the records of these rows, in this order, after `reserve` zero bytes. The
    first one's timestamp is the base."""
    count = len(rows)
    order, times, key_to, value_to = rows, stamps, key_ends, value_ends
    key_from, key_flag, value_from, value_flag = key_data, key_present, value_data, value_present
    has_keys, has_values = len(key_ends) > 0, len(value_ends) > 0
    some_keys, some_values = len(key_present) > 0, len(value_present) > 0
    sizes = array("q", bytes(8 * count))
    body = sizes
    base = times[order[0]] if count else 0
    total = reserve
    for i in range(count):
        row = order[i]
        delta = times[row] - base
        if (times[row] >= base) != (delta >= 0) or not _fits(delta):
            raise OverflowError("a timestamp delta does not fit into 64 bits")
        length = -1
        if has_keys and not (some_keys and key_flag[row] == 0):
            length = key_to[row + 1] - key_to[row]
        size = 2 + _varint_size(delta) + _varint_size(i) + _varint_size(length) + max(0, length)
        length = -1
        if has_values and not (some_values and value_flag[row] == 0):
            length = value_to[row + 1] - value_to[row]
        size += _varint_size(length) + max(0, length)
        body[i] = size
        total += size + _varint_size(size)
    out = bytearray(total)
    target = out
    position = reserve
    for i in range(count):
        row = order[i]
        position = _put_varint(target, position, body[i]) + 1
        position = _put_varint(target, position, times[row] - base)
        position = _put_varint(target, position, i)
        length = -1
        if has_keys and not (some_keys and key_flag[row] == 0):
            length = key_to[row + 1] - key_to[row]
        position = _put_varint(target, position, length)
        if length > 0:
            position = _put_bytes(target, position, key_from, key_to[row], length)
        length = -1
        if has_values and not (some_values and value_flag[row] == 0):
            length = value_to[row + 1] - value_to[row]
        position = _put_varint(target, position, length)
        if length > 0:
            position = _put_bytes(target, position, value_from, value_to[row], length)
        position += 1
    assert position == total, "both passes agree on the size"
    return out


# CRC-32C


CRC_JOIN_BYTES_MAX = (1 << 24) - 1


def _crc_product(left: int, right: int) -> int:
    """The product of two polynomials over GF(2), modulo that of CRC-32C. Reflected: bit 31 stands for x^0."""
    polynomial = 0x82F63B78
    product = 0
    bit = 0x80000000
    while bit:
        if left & bit:
            product ^= right
        odd = right & 1
        right >>= 1
        if odd:
            right ^= polynomial
        bit >>= 1
    return product


def _crc_powers(squarings: int) -> tuple[int, ...]:
    """x^(2^squarings * i) for i from 0 to 255: what a CRC is multiplied by when i times as many bits follow."""
    factor = 0x40000000  # x
    for _ in range(squarings):
        factor = _crc_product(factor, factor)
    power = 0x80000000  # 1
    powers = [power]
    for _ in range(255):
        power = _crc_product(power, factor)
        powers.append(power)
    return tuple(powers)


_CRC_POWERS = (_crc_powers(3), _crc_powers(11), _crc_powers(19))
"""For each byte of a number of bytes, lowest first."""


def crc_join(head: int, tail: int, size: int) -> int:
    """The CRC-32C of two pieces of bytes, one behind the other, from the CRC of each; the second has `size` bytes.

    Compiled it costs as much as the CRC of some 3 KiB, whatever the size.
    """
    if size < 0 or size >> 24:
        raise OverflowError(f"{size} bytes are too many to be joined")
    head = _crc_product(head, _CRC_POWERS[0][size & 255])
    head = _crc_product(head, _CRC_POWERS[1][size >> 8 & 255])
    head = _crc_product(head, _CRC_POWERS[2][size >> 16])
    return head ^ tail
