"""Which partition a record goes to, if it does not say so itself.

    default          murmur2 of the key over all partitions, where any other client puts it; without a key it sticks to
                     one partition that has a leader until the batch goes, then to another
    uniform_sticky   as without a key, for all records: for keys that are very uneven
    round_robin      one after the other
    a function       (topic, key, value, partitions) -> partition; key and value as bytes

Adding partitions moves keys: records that are stored stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tidelog.log.kernel import murmur2, partition_of, partitions_of

__all__ = ["DIRECT", "NAMES", "Partitioner", "made_from", "murmur2", "partition_of", "partitions_of"]

NAMES = {
    "default": "default",
    "murmur2": "default",
    "murmur2_random": "default",
    "uniform_sticky": "uniform_sticky",
    "round_robin": "round_robin",
    "roundrobin": "round_robin",
}
"""By every name that is taken; `murmur2_random` is librdkafka's for the same."""


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
    return DIRECT
