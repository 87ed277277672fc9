"""The consumer protocol that classic members embed in JoinGroup and SyncGroup: subscriptions and assignments. Pure.

    subscription  version int16 | topics [string] | user data bytes
                  from 1  owned [topic string, [partition int32]]
                  from 2  generation int32
                  from 3  rack string
    assignment    version int16 | [topic string, [partition int32]] | user data bytes

Strings have a length of 16 bits, bytes and arrays one of 32; -1 is null. A reader takes what it knows of a newer
version and ignores the rest. Malformed bytes raise `InvalidRequestError`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tidelog.model.errors import InvalidRequestError

PROTOCOL_TYPE = "consumer"
"""The protocol type of the groups whose members embed this protocol."""
OWNED_SINCE, GENERATION_SINCE, RACK_SINCE = 1, 2, 3

_INT16, _INT32 = struct.Struct(">h"), struct.Struct(">i")

TopicNumbers = tuple[tuple[str, tuple[int, ...]], ...]
"""(topic, its partitions)."""


@dataclass(frozen=True, slots=True)
class Subscription:
    topics: tuple[str, ...]
    owned: TopicNumbers = ()
    """What the member held when it sent this; nothing, if it gives up everything before it joins."""
    rack: str = ""


@dataclass(frozen=True, slots=True)
class Assignment:
    partitions: TopicNumbers
    user_data: bytes = b""


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self, form: struct.Struct) -> int:
        (value,) = form.unpack_from(self._data, self._at)
        self._at += form.size
        return int(value)

    def sized(self, form: struct.Struct) -> bytes | None:
        size = self.number(form)
        if size < 0:
            return None
        if size > len(self._data) - self._at:
            raise ValueError(f"{size} bytes are announced, {len(self._data) - self._at} are left")
        self._at += size
        return self._data[self._at - size : self._at]

    def count(self, item_bytes_min: int) -> int:
        count = max(self.number(_INT32), 0)
        if count * item_bytes_min > len(self._data) - self._at:
            raise ValueError(f"{count} items are announced, {len(self._data) - self._at} bytes are left")
        return count

    def string(self) -> str:
        return (self.sized(_INT16) or b"").decode()

    def topics(self) -> TopicNumbers:
        rows = []
        for _ in range(self.count(_INT16.size + _INT32.size)):
            topic = self.string()
            rows.append((topic, tuple(self.number(_INT32) for _ in range(self.count(_INT32.size)))))
        return tuple(rows)


def parse_subscription(data: bytes) -> Subscription:
    reader = _Reader(data)
    try:
        version = reader.number(_INT16)
        topics = tuple(reader.string() for _ in range(reader.count(_INT16.size)))
        reader.sized(_INT32)
        owned = reader.topics() if version >= OWNED_SINCE else ()
        if version >= GENERATION_SINCE:
            reader.number(_INT32)
        return Subscription(topics, owned, reader.string() if version >= RACK_SINCE else "")
    except (ValueError, struct.error) as error:
        raise InvalidRequestError(f"the subscription of a classic member cannot be read: {error}") from error


def subscribed_topics(data: bytes) -> tuple[str, ...]:
    """Return the topics of a subscription; none for other bytes: members may send what they like."""
    reader = _Reader(data)
    try:
        reader.number(_INT16)
        names = [reader.sized(_INT16) for _ in range(reader.count(_INT16.size))]
        return () if None in names else tuple((name or b"").decode() for name in names)
    except (ValueError, struct.error):
        return ()


def parse_assignment(data: bytes) -> Assignment:
    """No bytes at all are an empty assignment."""
    if not data:
        return Assignment(())
    reader = _Reader(data)
    try:
        reader.number(_INT16)
        return Assignment(reader.topics(), reader.sized(_INT32) or b"")
    except (ValueError, struct.error) as error:
        raise InvalidRequestError(f"the assignment of a classic member cannot be read: {error}") from error


def encode_assignment(partitions: Mapping[str, Iterable[int]]) -> bytes:
    """Version 0, without user data: every version begins so."""
    parts = [_INT16.pack(0), _INT32.pack(len(partitions))]
    for topic in sorted(partitions):
        name, numbers = topic.encode(), sorted(partitions[topic])
        parts += (_INT16.pack(len(name)), name, _INT32.pack(len(numbers)))
        parts += (_INT32.pack(number) for number in numbers)
    parts.append(_INT32.pack(-1))
    return b"".join(parts)
