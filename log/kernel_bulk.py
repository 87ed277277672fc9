"""What `kernel.py` does, for the interpreter: the same records, worked on column by column. Pure.

Every step over all rows is one call into the interpreter's own C (`map`, `join`, a slice with a step), which is several
times faster than a loop over bytes. Only used where the kernel is not compiled. The contract is that of
`kernel.encode_loop` and `kernel.decode_loop`.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from operator import add
from struct import Struct, pack
from sys import byteorder

from tidelog.model.errors import CorruptBatchError

Bytes = bytes | bytearray
Layout = tuple["array[int]", Bytes, Bytes | None]
RawColumns = tuple["array[int]", "array[int]", Layout, Layout, Layout | None]

_RECORD_BYTES_MIN = 7
_KNOWN_MAX = 65_536
_COUNTED = 16_384


def _corrupt(row: int, what: str) -> CorruptBatchError:
    return CorruptBatchError(f"record {row} of the batch is broken: {what}")


def varint(value: int) -> bytes:
    """`value`, which must fit into 64 bits, as a zigzag varint of 1 to 10 bytes."""
    if value >> 63 not in (0, -1):
        raise OverflowError(f"{value} does not fit into 64 bits")
    raw = (value << 1) ^ (value >> 63)
    out = bytearray()
    while raw > 127:
        out.append(raw & 127 | 128)
        raw >>= 7
    out.append(raw)
    return bytes(out)


_known: dict[int, bytes] = {}
"""Varints by their value, each made once: a look-up costs a tenth of making it."""
_counted: list[bytes] = []
_counted_sizes = bytearray()
"""The varints of 0, 1, 2, ..., which offset deltas are but for compaction, and their sizes; made at the first use."""


def _remember(value: int) -> bytes:
    encoded = _known.get(value)
    if encoded is None:
        encoded = varint(value)
        if len(_known) < _KNOWN_MAX:
            _known[value] = encoded
    return encoded


def _stamp_varints(timestamps: list[int], base_timestamp: int) -> list[bytes]:
    try:
        return [_known[stamp - base_timestamp] for stamp in timestamps]
    except KeyError:
        return [_remember(stamp - base_timestamp) for stamp in timestamps]


def _offset_varints(count: int, deltas: list[int] | None) -> tuple[list[bytes], bytes]:
    """The varints, and the size of each as one byte."""
    if deltas is None and count <= _COUNTED:
        if not _counted:
            _counted.extend(map(varint, range(_COUNTED)))
            _counted_sizes.extend(map(len, _counted))
        return _counted[:count], bytes(_counted_sizes[:count])
    encoded = [_remember(delta) for delta in (range(count) if deltas is None else deltas)]
    return encoded, bytes(map(len, encoded))


def _prefixed(column: list[bytes | None]) -> tuple[list[bytes] | bytes, list[bytes] | None, list[int] | int]:
    """The varint of each row's size, the rows (None: all null), and how many bytes both take in each row.

    A value that is equal in all rows is returned once, not as a list.
    """
    count = len(column)
    try:
        sizes = list(map(len, column))  # type: ignore[arg-type]  # null has no length
    except TypeError:
        if column.count(None) == count:
            return b"\x01", None, 1
        rows = [b"" if row is None else row for row in column]
        prefixes = [b"\x01" if row is None else _remember(len(row)) for row in column]
        return prefixes, rows, list(map(add, map(len, prefixes), map(len, rows)))
    rows = column  # type: ignore[assignment]  # no null in it
    if sizes.count(sizes[0]) == count:
        prefix = _remember(sizes[0])
        return prefix, rows, sizes[0] + len(prefix)
    prefixes = [_remember(size) for size in sizes]
    return prefixes, rows, list(map(add, map(len, prefixes), sizes))


def _add_sizes(one: list[int] | int, other: list[int] | int) -> list[int] | int:
    if isinstance(one, int):
        return one + other if isinstance(other, int) else [one + size for size in other]
    return [size + other for size in one] if isinstance(other, int) else list(map(add, one, other))


def encode_bulk(
    timestamps: list[int],
    keys: list[bytes | None],
    values: list[bytes | None],
    blocks: list[bytes] | None,
    deltas: list[int] | None,
    base_timestamp: int,
    reserve: int,
) -> bytearray:
    """The records after `reserve` zero bytes; see `kernel.encode_loop`."""
    count = len(values)
    for column in (timestamps, keys, blocks, deltas):
        if column is not None and len(column) != count:
            raise ValueError(f"columns of {len(column)} and {count} rows")
    out = bytearray(reserve)
    if count == 0:
        return out
    stamps = _stamp_varints(timestamps, base_timestamp)
    offsets, offset_sizes = _offset_varints(count, deltas)
    key_prefix, key_rows, key_sizes = _prefixed(keys)
    value_prefix, value_rows, value_sizes = _prefixed(values)
    # One byte for the attributes, and the headers: just their count of zero unless there are blocks.
    rest = _add_sizes(key_sizes, value_sizes)
    rest = _add_sizes(rest, 2 if blocks is None else [1 + len(block) for block in blocks])
    # Both sizes are at most 10: all are added at once, as one long integer with 8 bits for each.
    sum_of_sizes = int.from_bytes(bytes(map(len, stamps)), "little") + int.from_bytes(offset_sizes, "little")
    sizes: Sequence[int] = sum_of_sizes.to_bytes(count, "little")
    same = rest if isinstance(rest, int) else 0
    if not isinstance(rest, int):
        sizes = list(map(add, sizes, rest))
    # Length and attributes, and before them the headers of the record before: fewer pieces to join.
    tail = b"\x00" if blocks is None else b""
    starts = {size: tail + varint(size + same) + b"\x00" for size in set(sizes)}
    pieces = [[starts[size] for size in sizes], stamps, offsets]
    pieces += _pieces(count, key_prefix, key_rows, value_prefix, value_rows)
    if blocks is not None:
        pieces.append(blocks)
    joined: list[bytes] = [b""] * (count * len(pieces))
    for number, piece in enumerate(pieces):
        joined[number :: len(pieces)] = piece
    with memoryview(b"".join(joined)) as view:
        out += view[len(tail) :]
    out += tail
    return out


def _pieces(
    count: int,
    key_prefix: list[bytes] | bytes,
    key_rows: list[bytes] | None,
    value_prefix: list[bytes] | bytes,
    value_rows: list[bytes] | None,
) -> Iterator[list[bytes]]:
    """The columns from the key's size to the value; what is the same in all rows is joined before it is repeated."""
    same = b""
    for prefix, rows in ((key_prefix, key_rows), (value_prefix, value_rows)):
        if isinstance(prefix, bytes):
            same += prefix
        else:
            if same:
                yield [same] * count
            same = b""
            yield prefix
        if rows is not None:
            if same:
                yield [same] * count
            same = b""
            yield rows
    if same:
        yield [same] * count


# Decoding. Records of one shape (the sizes of all their fields are equal) stand at equal distances, so byte number p of
# each of them is a slice with a step: a whole run of them is checked and read by a few slices. Where a run ends,
# records are read one by one.

_RUN_MIN = 8
_RUN_MAX = 1024
_GROUP = 64
_HIGH = bytes(range(128, 256))
_EVEN = bytes(range(0, 256, 2))
# First and second byte of the varints of offset deltas, from each delta on; they come again after 64 and 8,192 deltas.
# Of each there are two: without and with the bit that says that a byte follows.
_DELTA_FIRST = [bytes((delta << 1) & 127 | bit for delta in range(64)) * (_RUN_MAX // 64 + 1) for bit in (0, 128)]
_DELTA_SECOND = [bytes((delta >> 6) & 127 | bit for delta in range(8192)) for bit in (0, 128)]


class _Rows:
    """The columns while they grow. A size of -1 is null. The bytes of all other fields are in the parts, in order."""

    __slots__ = ("blocks", "key_parts", "key_sizes", "spans", "timestamps", "value_parts", "value_sizes")

    def __init__(self) -> None:
        self.timestamps = array("q")
        self.spans: list[tuple[int, int]] = []
        """First and last of the offset deltas that follow each other."""
        self.key_sizes: list[int] = []
        self.key_parts: list[bytes] = []
        self.value_sizes: list[int] = []
        self.value_parts: list[bytes] = []
        self.blocks: dict[int, bytes] = {}


def _long_varint(body: bytes, position: int) -> tuple[int, int]:
    """The varint at `position` before its zigzag is undone, and the position after it. IndexError past the end."""
    raw = 0
    for shift in range(0, 64, 7):
        byte = body[position]
        position += 1
        raw |= (byte & 127) << shift
        if byte < 128:
            if raw >= 2**64:
                break
            return raw, position
    raise CorruptBatchError("a varint of more than 64 bits")


def decode_bulk(
    data: Bytes, start: int, end: int, count: int, base_offset: int, base_timestamp: int, last_delta: int
) -> RawColumns:
    """The records between `start` and `end` as columns; see `kernel.decode_loop`."""
    if not 0 <= start <= end <= len(data) or end - start >= 2**31:
        raise ValueError(f"records from {start} to {end} of {len(data)} bytes")
    # Before anything is allocated.
    if count < 0 or count > (end - start) // _RECORD_BYTES_MIN:
        raise CorruptBatchError(f"{count} records do not fit into {end - start} bytes")
    rows = _Rows()
    try:
        # Nothing behind the records, so that a read past them is an error; what is before them does no harm.
        _read_rows(bytes(data[:end]), start, count, base_timestamp, last_delta, rows)
    except IndexError:
        raise CorruptBatchError("the records run past the end of the batch") from None
    except OverflowError:
        raise CorruptBatchError("a timestamp of the batch is out of range") from None
    offsets = array("q")
    for first, last in rows.spans:
        # By way of `pack`, which is faster at integers than the array is.
        offsets.frombytes(pack(f"{last - first + 1}q", *range(base_offset + first, base_offset + last + 1)))
    headers = None
    if rows.blocks:
        blocks = [rows.blocks.get(row, b"") for row in range(count)]
        headers = _layout(list(map(len, blocks)), blocks)
    keys = _layout(rows.key_sizes, rows.key_parts)
    return offsets, rows.timestamps, keys, _layout(rows.value_sizes, rows.value_parts), headers


def _layout(sizes: list[int], parts: list[bytes]) -> Layout:
    count = len(sizes)
    nulls = sizes.count(-1)
    if nulls == count:
        return array("i", bytes(4 * count + 4)), b"", bytes(count) if count else None
    present = None
    if nulls:
        present = bytes([size >= 0 for size in sizes])
        sizes = [max(size, 0) for size in sizes]
    size = sizes[0]
    if size and sizes.count(size) == count:
        ends: Iterable[int] = range(0, count * size + 1, size)
    else:
        ends = accumulate(sizes, initial=0)
    return array("i", pack(f"{count + 1}i", *ends)), b"".join(parts), present


def _read_rows(body: bytes, position: int, count: int, base_timestamp: int, last_delta: int, rows: _Rows) -> None:
    """Read all rows from `position` to the end.

    A read past the body is an IndexError; one past its record is noticed at the record's end.
    """
    timestamps, key_sizes, value_sizes = rows.timestamps, rows.key_sizes, rows.value_sizes
    key_parts, value_parts = rows.key_parts, rows.value_parts
    row = try_run_at = 0
    end = len(body)
    span_start = 0
    previous = -1
    while row < count:
        begin = position
        raw = body[position]
        position += 1
        if raw > 127:
            raw, position = _long_varint(body, begin)
        stamp_at = position + 1
        record_end = position + (raw >> 1)
        if raw & 1 or record_end > end:
            raise _corrupt(row, "its length")
        raw = body[stamp_at]
        offset_at = stamp_at + 1
        if raw > 127:
            raw, offset_at = _long_varint(body, stamp_at)
        timestamps.append(base_timestamp + (-(raw >> 1) - 1 if raw & 1 else raw >> 1))
        raw = body[offset_at]
        key_size_at = offset_at + 1
        if raw > 127:
            raw, key_size_at = _long_varint(body, offset_at)
        delta = raw >> 1
        if raw & 1 or delta <= previous or delta > last_delta:
            raise _corrupt(row, "its offset")
        if delta != previous + 1:
            if previous >= span_start:
                rows.spans.append((span_start, previous))
            span_start = delta
        raw = body[key_size_at]
        key_at = key_size_at + 1
        if raw > 127:
            raw, key_at = _long_varint(body, key_size_at)
        if raw & 1:
            key_end = key_at if raw == 1 else end + 1
            key_sizes.append(-1)
        else:
            key_end = key_at + (raw >> 1)
            key_sizes.append(raw >> 1)
            key_parts.append(body[key_at:key_end])
        raw = body[key_end]
        value_at = key_end + 1
        if raw > 127:
            raw, value_at = _long_varint(body, key_end)
        if raw & 1:
            value_end = value_at if raw == 1 else end + 1
            value_sizes.append(-1)
        else:
            value_end = value_at + (raw >> 1)
            value_sizes.append(raw >> 1)
            value_parts.append(body[value_at:value_end])
        raw = body[value_end]
        position = value_end + 1
        if raw:
            position = _read_block(body, value_end, record_end, row, rows.blocks)
        if position != record_end:
            raise _corrupt(row, "its length is not that of its fields")
        row += 1
        previous = delta
        if row >= try_run_at and not raw:
            shape = (begin, stamp_at, offset_at, key_size_at, key_at, key_end, value_at, value_end, record_end)
            taken = _read_run(body, shape, min(count - row, last_delta - delta), delta, base_timestamp, rows)
            row += taken
            previous += taken
            position += taken * (record_end - begin)
            if not taken:
                try_run_at = row + _RUN_MIN
    if position != end:
        raise CorruptBatchError(f"{end - position} bytes after the last record of the batch")
    if count:
        rows.spans.append((span_start, previous))


def _read_block(body: bytes, position: int, record_end: int, row: int, blocks: dict[int, bytes]) -> int:
    """Check the headers at `position`, keep them as they are, and give the position after them."""
    raw, after = _long_varint(body, position)
    past = len(body)
    if raw:
        if raw & 1 or raw >> 1 > (record_end - after) // 2:
            raise _corrupt(row, "its count of headers")
        for _ in range(raw >> 1):
            size, after = _long_varint(body, after)
            # An odd number is a negative size: never right for a name, and only as -1 for a value.
            after += past if size & 1 else size >> 1
            size, after = _long_varint(body, after)
            after += (0 if size == 1 else past) if size & 1 else size >> 1
        blocks[row] = body[position:after]
    return after


def _read_run(body: bytes, shape: tuple[int, ...], limit: int, delta: int, base_timestamp: int, rows: _Rows) -> int:
    """Read the records that follow the one of this shape if they have it too; how many (all that were tried or 0).

    The bytes that say sizes must be the same in all of them, the offset deltas must count on from `delta`, and the
    timestamp deltas must be of equal width: everything else is left to the reading one by one.
    """
    begin, stamp_at, offset_at, key_size_at, key_at, key_end, value_at, value_end, record_end = shape
    step = record_end - begin
    width = key_size_at - offset_at
    # All varints of the run must be as wide as this one and share all bytes but the first two.
    same_width = (63 if width == 1 else 8191 | delta) - delta
    taken = min(_RUN_MAX, limit, same_width, (len(body) - record_end) // step)
    if taken < _RUN_MIN:
        return 0
    stop = record_end + taken * step
    fixed = chain(
        range(begin, stamp_at), range(key_size_at, key_at), range(key_end, value_at), range(value_end, record_end)
    )
    for at in fixed:
        if body[at + step : stop : step] != body[at : at + 1] * taken:
            return 0
    for at, expected in zip(range(offset_at, key_size_at), _delta_bytes(delta + 1, width, taken), strict=True):
        if body[at + step : stop : step] != expected:
            return 0
    stamps = _stamp_run([body[at + step : stop : step] for at in range(stamp_at, offset_at)], base_timestamp)
    if stamps is None:
        return 0
    rows.timestamps += stamps
    key_size, value_size = rows.key_sizes[-1], rows.value_sizes[-1]
    rows.key_sizes += [key_size] * taken
    rows.value_sizes += [value_size] * taken
    records = memoryview(body)[record_end:stop]
    if key_size > 0:
        rows.key_parts.append(_cut(records, key_at - begin, key_size, step))
    if value_size > 0:
        rows.value_parts.append(_cut(records, value_at - begin, value_size, step))
    return taken


def _delta_bytes(first: int, width: int, count: int) -> list[bytes]:
    """The bytes of `count` varints of offset deltas from `first` on, `width` bytes each: all first bytes, ..."""
    columns = [_DELTA_FIRST[width > 1][first % 64 : first % 64 + count]]
    if width > 1:
        columns.append(_DELTA_SECOND[width > 2][first % 8192 : first % 8192 + count])
    for number in range(2, width):
        byte = (first << 1 >> 7 * number) & 127
        columns.append(bytes([byte | 128 if number < width - 1 else byte]) * count)
    return columns


def _stamp_run(columns: list[bytes], base_timestamp: int) -> "array[int] | None":
    """The timestamps whose deltas have these first bytes, second bytes, ...; None if they are not of equal width.

    All are added at once, as one long integer with 64 bits for each: no sum may pass 63 bits or be negative.
    """
    if not columns[-1].isascii() or len(columns) > 8 or not 0 <= base_timestamp < 2**62:
        return None
    for column in columns[:-1]:
        if column.translate(None, _HIGH):
            return None
    count = len(columns[0])
    spread = bytearray(8 * count)
    for number, column in enumerate(columns):
        spread[number::8] = column
    packed = int.from_bytes(spread, "little")
    # Each byte has seven significant bits: close the gaps between them.
    numbers = sum((packed & _repeated(0x7F << 8 * number, count)) >> number for number in range(len(columns)))
    if columns[0].translate(None, _EVEN):
        # Some are negative: undo zigzag for each one separately.
        raws = array("Q", numbers.to_bytes(8 * count, "little"))
        _to_native(raws)
        return array("q", [base_timestamp + ((raw >> 1) ^ -(raw & 1)) for raw in raws])
    numbers = (numbers >> 1) + base_timestamp * _repeated(1, count)
    stamps = array("q", numbers.to_bytes(8 * count, "little"))
    _to_native(stamps)
    return stamps


@lru_cache(maxsize=64)
def _repeated(number: int, count: int) -> int:
    return int.from_bytes(number.to_bytes(8, "little") * count, "little")


def _to_native(numbers: "array[int]") -> None:
    if byteorder == "big":
        numbers.byteswap()


def _cut(records: memoryview, at: int, size: int, step: int) -> bytes:
    """`size` bytes at `at` of each record, all records `step` bytes long, one behind the other."""
    whole = len(records) - len(records) % (step * _GROUP)
    parts = chain.from_iterable(_cutter(at, size, step, _GROUP).iter_unpack(records[:whole])) if whole else ()
    return b"".join(chain(parts, chain.from_iterable(_cutter(at, size, step, 1).iter_unpack(records[whole:]))))


@lru_cache(maxsize=64)
def _cutter(at: int, size: int, step: int, count: int) -> Struct:
    return Struct(f"{at}x{size}s{step - at - size}x" * count)
