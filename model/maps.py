"""The persistent map. This module hides the library that implements it. Pure.

A persistent map is a value: `set` and `delete` return a new map that shares structure with the old one. Its iteration
order depends on hashes, so code that must be deterministic iterates `sorted_items`, or uses ints and UUIDs as keys,
whose hashes are equal in all processes.
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
    """Applies many changes, faster than one by one; None removes a key."""
    mutable = values.mutate()
    for key, value in changes:
        if value is None:
            mutable.pop(key, None)
        else:
            mutable[key] = value
    return mutable.finish()


def without(values: "Map[K, V]", key: K) -> "Map[K, V]":
    """Returns the map without the key, whether or not it has it."""
    return values.delete(key) if key in values else values
