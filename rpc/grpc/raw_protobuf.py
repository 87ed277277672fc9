"""Builds protobuf messages around a payload with one copy of the data.

A field may be anywhere in a message, so a row is the encoded row without its payload, followed by the payload.
"""

from __future__ import annotations

Payload = bytes | bytearray | memoryview


def tag(field: int) -> bytes:
    """Returns the tag of a field below 16 that is a message or bytes."""
    return bytes([field << 3 | 2])


def row(row_tag: bytes, head: bytes, payload_tag: bytes, payload: Payload) -> tuple[Payload, ...]:
    """Returns the parts of a row of a repeated field: `head` is the row without its payload."""
    before = payload_tag + _varint(len(payload)) if payload else b""
    return (row_tag, _varint(len(head) + len(before) + len(payload)), head, before, payload)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
