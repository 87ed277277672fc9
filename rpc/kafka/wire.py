"""Primitives of Kafka's encoding. Pure.

    unsigned varint   7 bits a byte, low ones first, the high bit says that more follow; 5 bytes at most
    tagged fields     count, then per field: tag, size, content; tags rise; count, tag and size are varints
    compact length    length + 1 as a varint; 0 is null

Wrong input raises `MalformedError`, a wrong message of our own `UnencodableError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

Buffer = bytes | memoryview
Records = bytes | memoryview | Sequence[bytes | memoryview]
"""Stored batches: one buffer, or several consecutive ones."""

ZERO_UUID = bytes(16)
STRING_BYTES_MAX = 0x7FFF
ELEMENT_BYTES, NUMBER_BYTES = 200, 36
"""Rough memory of a struct or string, and of a number, in an array."""
ELEMENTS_MAX = 200_000
"""Elements of all arrays of structs and strings of one request. Limits its memory to some 40 MiB, and the work that is
not sliced: a byte of input may cost a hundred bytes of objects. Clients need far fewer: a broker has 14,000 partitions
(`max.partitions.per.broker`)."""
NUMBERS_MAX = 50_000
"""Numbers of all arrays of one request: partitions, or replicas."""
ELEMENTS_PER_SLICE, NUMBERS_PER_SLICE = 500, 20_000
"""Of a large message, in one turn of the event loop: some 2 ms."""
RESPONSE_ELEMENTS_MAX = 100_000
RESPONSE_NUMBERS_MAX = 1 << 22
"""For responses, which only tests and tools decode."""

ONE_BYTE = tuple(bytes([value]) for value in range(128))
"""Varints of one byte."""

_VARINT_BITS_MAX = 32


class EncodedRows:
    """Structs of a large array, already encoded (`Api.encode_rows`); replaces its list."""

    __slots__ = ("_count", "parts")

    def __init__(self) -> None:
        self._count = 0
        self.parts: list[Buffer] = []

    def __len__(self) -> int:
        return self._count

    def add(self, count: int, encoded: Buffer) -> None:
        self._count += count
        self.parts.append(encoded)


class MalformedError(Exception):
    """The bytes are no message of the type and version in their header."""


class UnencodableError(Exception):
    """A message cannot be encoded in a version; the text names the wrong value."""


def malformed(what: str) -> NoReturn:
    raise MalformedError(what)


def unencodable(what: str) -> NoReturn:
    raise UnencodableError(what)


def unsigned_varint(value: int) -> bytes:
    if value < 128:
        return ONE_BYTE[value]
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: Buffer, position: int) -> tuple[int, int]:
    """Returns the value and the position after it. Raises `IndexError` if the data ends too soon."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
        if shift >= _VARINT_BITS_MAX:
            raise MalformedError("a varint is longer than 5 bytes")
    if value >> _VARINT_BITS_MAX:
        raise MalformedError("a varint has more than 32 bits")
    return value, position


def read_tag(data: Buffer, position: int, end: int, last: int) -> tuple[int, int, int]:
    """Returns the tag, the position of its content and the position after it. `last` is the previous tag or -1."""
    tag, position = read_varint(data, position)
    if tag <= last:
        raise MalformedError(f"tag {tag} follows tag {last}: tags must rise")
    size, position = read_varint(data, position)
    if size > end - position:
        raise MalformedError(f"tag {tag} has {size} bytes where {end - position} are left")
    return tag, position, position + size


def skip_tags(data: Buffer, position: int, end: int) -> int:
    """Skips unknown tagged fields without memory."""
    count, position = read_varint(data, position)
    last = -1
    for _ in range(count):
        last, _content, position = read_tag(data, position, end, last)
    return position
