"""Which partition a record goes to, if it does not say so itself.

    default          murmur2 of the key over all partitions, where any other client puts it; without a key it sticks to
                     one partition that has a leader until the batch goes, then to another
    uniform_sticky   as without a key, for all records: for keys that are very uneven
    round_robin      one after the other
    consistent       CRC-32 of the key, where librdkafka puts it if nothing is said; without a key it sticks
    fnv1a            FNV-1a of the key, where librdkafka and Sarama put it by this name; without a key it sticks
    a function       (topic, key, value, partitions) -> partition; key and value as bytes

librdkafka's other names are taken too. `murmur2`, `murmur2_random`: default. `consistent_random`: `consistent`, where
an empty key is none. `fnv1a_random`: `fnv1a`. `random`: uniform_sticky.

Adding partitions moves keys: records that are stored stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol
from zlib import crc32

from tidelog.log.kernel import murmur2, partition_of, partitions_of

__all__ = ["DIRECT", "NAMES", "Partitioner", "fnv1a", "made_from", "murmur2", "partition_of", "partitions_of"]

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
"""By every name that is taken."""


class Partitioner(Protocol):
    """`place` is an accumulator's: `topic`, `count`, `sticky`, `available`, `turn`."""

    is_users: bool
    """User's code: called before the accumulator's lock is taken. Others are called under it."""

    def partition(self, place: Any, key: bytes | None, value: bytes | None) -> int: ...

    def is_sticky(self, key: bytes | None) -> bool:
        """Whether such a record goes where `place.sticky` says."""
        ...


class _Direct:
    is_users = False

    def partition(self, place: Any, key: bytes | None, value: bytes | None) -> int:
        return int(place.sticky) if key is None else partition_of(key, place.count)

    def is_sticky(self, key: bytes | None) -> bool:
        return key is None


class _UniformSticky:
    is_users = False

    def partition(self, place: Any, key: bytes | None, value: bytes | None) -> int:
        return int(place.sticky)

    def is_sticky(self, key: bytes | None) -> bool:
        return True


class _Hashed:
    """A hash of the key, modulo the number of partitions. Without a key it sticks, also where librdkafka hashes nothing
    and so fills one partition: no program can rely on which."""

    is_users = False

    def __init__(self, hashed: Callable[[bytes], int], *, is_empty_hashed: bool = True) -> None:
        self._hashed = hashed
        self._is_empty_hashed = is_empty_hashed

    def partition(self, place: Any, key: bytes | None, value: bytes | None) -> int:
        if key is None or not (key or self._is_empty_hashed):
            return int(place.sticky)
        return int(self._hashed(key) % place.count)

    def is_sticky(self, key: bytes | None) -> bool:
        return key is None or not (key or self._is_empty_hashed)


def fnv1a(key: bytes) -> int:
    """32 bits, read as a signed number, without its sign: as librdkafka and Sarama have it."""
    found = 0x811C9DC5
    for one in key:
        found = (found ^ one) * 0x01000193 & 0xFFFFFFFF
    return found if found < 1 << 31 else (1 << 32) - found


class _RoundRobin:
    is_users = False

    def partition(self, place: Any, key: bytes | None, value: bytes | None) -> int:
        place.turn += 1
        choices = place.available or range(place.count)
        return int(choices[(place.turn - 1) % len(choices)])

    def is_sticky(self, key: bytes | None) -> bool:
        return False


class _Custom:
    is_users = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def partition(self, place: Any, key: bytes | None, value: bytes | None) -> int:
        found = self._function(place.topic, key, value, place.count)
        if isinstance(found, bool) or not isinstance(found, int):
            raise TypeError(f"the partitioner gave {found!r}, not the number of a partition")
        return found

    def is_sticky(self, key: bytes | None) -> bool:
        return False


DIRECT: Partitioner = _Direct()


def made_from(wanted: str | Callable[..., Any]) -> Partitioner:
    """Of an option's value."""
    if callable(wanted):
        return _Custom(wanted)
    match NAMES[wanted]:
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
