"""The persistent map: the one place that knows which library gives it.

A persistent map is a value: `set` and `delete` return a new map that shares all but a path with the old one. Its
iteration order depends on hashes, so code that must be replayable iterates `sorted_items`, or keys by ints and UUIDs
whose hashes do not change between processes.
"""

from collections.abc import Iterable
from typing import Any, TypeVar

from immutables import Map

K = TypeVar("K")
V = TypeVar("V")

__all__ = ["Map", "sorted_items", "updated", "without"]


def sorted_items(values: "Map[Any, V]") -> list[tuple[Any, V]]:
    """Items in key order, the same in every process."""
    return sorted(values.items(), key=lambda item: item[0])


def updated(values: "Map[K, V]", changes: Iterable[tuple[K, V | None]]) -> "Map[K, V]":
    """Many changes at once, cheaper than one by one; None removes."""
    mutable = values.mutate()
    for key, value in changes:
        if value is None:
            mutable.pop(key, None)
        else:
            mutable[key] = value
    return mutable.finish()


def without(values: "Map[K, V]", key: K) -> "Map[K, V]":
    """The map without a key that it may or may not have."""
    return values.delete(key) if key in values else values
