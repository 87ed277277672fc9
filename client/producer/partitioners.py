"""Selects the partition of a record that does not name one.

    default          murmur2 of the key modulo partitions, as in the Java client; without a key sticky: one partition
                     with a leader until the batch is sent, then another
    uniform_sticky   sticky for all records, for very uneven keys
    round_robin      each partition in turn
    consistent       CRC-32 of the key, as librdkafka's default; sticky without a key
    fnv1a            FNV-1a of the key, as in librdkafka and Sarama; sticky without a key
    a function       (topic, key, value, partitions) -> partition; key and value are bytes

librdkafka's other names are accepted. `murmur2`, `murmur2_random`: default. `consistent_random`: `consistent`, where an
empty key counts as no key. `fnv1a_random`: `fnv1a`. `random`: uniform_sticky.

Adding partitions moves keys; stored records stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol
from zlib import crc32

from tidelog.log.kernel import murmur2, partition_of, partitions_of

__all__ = ["DIRECT", "NAMES", "Partitioner", "create_partitioner", "fnv1a", "murmur2", "partition_of", "partitions_of"]

NAMES = {
    "default": "default",
    "murmur2": "default",
    "murmur2_random": "default",
    "uniform_sticky": "uniform_sticky",
    "random": "uniform_sticky",
    "round_robin": "round_robin",
    "roundrobin": "round_robin",
    "consistent": "consistent",
    "consistent_random": "consistent_random",
    "fnv1a": "fnv1a",
    "fnv1a_random": "fnv1a",
}
"""All accepted names."""


class Partitioner(Protocol):
    """`state` is an accumulator's `TopicState`: `topic`, `count`, `sticky`, `available`, `turn`."""

    is_users: bool
    """User code, called before the accumulator's lock is taken. Others are called under it."""

    def partition(self, state: Any, key: bytes | None, value: bytes | None) -> int: ...

    def is_sticky(self, key: bytes | None) -> bool:
        """Return whether a record with this key goes to `state.sticky`."""
        ...


class _Direct:
    is_users = False

    def partition(self, state: Any, key: bytes | None, value: bytes | None) -> int:
        return int(state.sticky) if key is None else partition_of(key, state.count)

    def is_sticky(self, key: bytes | None) -> bool:
        return key is None


class _UniformSticky:
    is_users = False

    def partition(self, state: Any, key: bytes | None, value: bytes | None) -> int:
        return int(state.sticky)

    def is_sticky(self, key: bytes | None) -> bool:
        return True


class _Hashed:
    """Hashes the key, modulo the number of partitions. Sticky without a key; librdkafka would hash nothing and fill one
    partition, but no program can rely on which."""

    is_users = False

    def __init__(self, hashed: Callable[[bytes], int], *, is_empty_hashed: bool = True) -> None:
        self._hashed = hashed
        self._is_empty_hashed = is_empty_hashed

    def partition(self, state: Any, key: bytes | None, value: bytes | None) -> int:
        if key is None or not (key or self._is_empty_hashed):
            return int(state.sticky)
        return int(self._hashed(key) % state.count)

    def is_sticky(self, key: bytes | None) -> bool:
        return key is None or not (key or self._is_empty_hashed)


def fnv1a(key: bytes) -> int:
    """Return the 32-bit FNV-1a hash as the absolute value of a signed number, as librdkafka and Sarama do."""
    digest = 0x811C9DC5
    for one in key:
        digest = (digest ^ one) * 0x01000193 & 0xFFFFFFFF
    return digest if digest < 1 << 31 else (1 << 32) - digest


class _RoundRobin:
    is_users = False

    def partition(self, state: Any, key: bytes | None, value: bytes | None) -> int:
        state.turn += 1
        choices = state.available or range(state.count)
        return int(choices[(state.turn - 1) % len(choices)])

    def is_sticky(self, key: bytes | None) -> bool:
        return False


class _Custom:
    is_users = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def partition(self, state: Any, key: bytes | None, value: bytes | None) -> int:
        number = self._function(state.topic, key, value, state.count)
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"the partitioner gave {number!r}, not the number of a partition")
        return number

    def is_sticky(self, key: bytes | None) -> bool:
        return False


DIRECT: Partitioner = _Direct()


def create_partitioner(option: str | Callable[..., Any]) -> Partitioner:
    """Create the partitioner from the option's value."""
    if callable(option):
        return _Custom(option)
    match NAMES[option]:
        case "round_robin":
            return _RoundRobin()
        case "uniform_sticky":
            return _UniformSticky()
        case "consistent":
            return _Hashed(crc32)
        case "consistent_random":
            return _Hashed(crc32, is_empty_hashed=False)
        case "fnv1a":
            return _Hashed(fnv1a)
    return DIRECT
