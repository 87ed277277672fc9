"""Requests to the controller in pieces: it decides on a request in one turn, so a large one is split. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def pieces(names: Sequence[Hashable], size: int) -> list[list[int]]:
    """The places of all items, in pieces of at least one and about `size` at most. Items of the same name stay in one
    piece, so that the controller sees that they are named twice."""
    if len(names) <= size:
        return [list(range(len(names)))] if names else []
    places: dict[Hashable, list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(name, []).append(place)
    found: list[list[int]] = [[]]
    for same in places.values():
        if found[-1] and len(found[-1]) + len(same) > size:
            found.append([])
        found[-1] += same
    return found
