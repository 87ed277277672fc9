"""Records as columns, for bulk clients and Spark: no Python object for each record. Pure.

A `BinaryColumn` has Arrow's layout for variable-size binary, so that a later conversion copies nothing:

    pyarrow.Array.from_buffers(pyarrow.binary(), len(column), [validity, ends, data])

with the three buffers of `column.arrow_buffers()`. This module does not import pyarrow.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tidelog.log import kernel
from tidelog.log.batch_header import BatchHeader

Headers = tuple[tuple[str, bytes | None], ...]
_BINARY_DIGITS = bytes([ord("0")]) + bytes([ord("1")]) * 255


@dataclass(frozen=True, slots=True)
class Record:
    """One record; `timestamp` in ms since 1970. Header names that are not UTF-8 have the invalid bytes as
    surrogates."""

    offset: int
    timestamp: int
    key: bytes | None = None
    value: bytes | None = None
    headers: Headers = ()


class BinaryColumn(Sequence[bytes | None]):
    """A column of byte strings, some of which may be null. Immutable.

    Row i is data[ends[i]:ends[i + 1]]: `ends` has one entry more than there are rows and begins with 0. `present` has
    one byte for each row, 0 for null; it is None if no row is null.
    """

    __slots__ = ("data", "ends", "present")

    def __init__(self, ends: "array[int]", data: bytes | bytearray, present: bytes | bytearray | None = None) -> None:
        self.ends = ends
        self.data = data
        self.present = present

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, row):  # type: ignore[no-untyped-def]  # both overloads of Sequence
        if isinstance(row, slice):
            return self.to_list()[row]
        if row < 0:
            row += len(self)
        if not 0 <= row < len(self):
            raise IndexError(row)
        if self.present is not None and not self.present[row]:
            return None
        return bytes(self.data[self.ends[row] : self.ends[row + 1]])

    def __iter__(self) -> Iterator[bytes | None]:
        return iter(self.to_list())

    @property
    def null_count(self) -> int:
        return 0 if self.present is None else self.present.count(0)

    def to_list(self) -> list[bytes | None]:
        return kernel.slice_rows(self.ends, self.data, self.present)

    def validity(self) -> bytes | None:
        """Arrow's bitmap: bit i % 8 of byte i // 8 is set if row i is not null. None if no row is."""
        if self.present is None:
            return None
        if not self.present:
            return b""
        digits = bytes(self.present).translate(_BINARY_DIGITS)[::-1]
        return int(digits, 2).to_bytes((len(self) + 7) // 8, "little")

    def arrow_buffers(self) -> tuple[bytes | None, "array[int]", bytes | bytearray]:
        """Validity bitmap, offsets (int32) and data, for `pyarrow.Array.from_buffers`."""
        return self.validity(), self.ends, self.data


@dataclass(frozen=True, slots=True)
class Columns:
    """The records of one batch. `offsets` and `timestamps` are arrays of 64-bit integers (buffers, for Arrow).

    `header_blocks` has the encoded headers of each record, an empty row for none; it is None if no record has headers.
    `headers()` decodes them.
    """

    batch: BatchHeader
    offsets: "array[int]"
    timestamps: "array[int]"
    keys: BinaryColumn
    values: BinaryColumn
    header_blocks: BinaryColumn | None

    def __len__(self) -> int:
        return len(self.offsets)

    def headers(self) -> list[Headers] | None:
        """The headers of each record; None if no record has any."""
        if self.header_blocks is None:
            return None
        return [kernel.decode_headers(block or b"") for block in self.header_blocks.to_list()]

    def to_list(self) -> list[Record]:
        """The same as one object for each record."""
        headers = self.headers()
        rows = zip(self.offsets, self.timestamps, self.keys.to_list(), self.values.to_list(), strict=True)
        if headers is None:
            return [Record(offset, timestamp, key, value) for offset, timestamp, key, value in rows]
        return [Record(*row, block) for row, block in zip(rows, headers, strict=True)]
