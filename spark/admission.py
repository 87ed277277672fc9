"""How much of what is there the next batch takes. Pure.

    maxOffsetsPerTrigger     records (offsets, gaps included) of one batch
    maxBytesPerTrigger       bytes as stored, compressed; exact to about an index interval for each partition
    minOffsetsPerTrigger     no batch before so many are there,
    maxTriggerDelay          unless the last one is so long ago

A limit is shared by backlog: who has twice as much waiting gets twice as much. Shares are whole offsets and add up to
the limit exactly; a partition is passed over only if its share is less than one offset, and then its backlog, and with
it its share, grows. Both maxima may be given: the smaller one of each partition counts. A batch takes one offset at
least, so that a limit below the size of a record stops nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

P = TypeVar("P", bound=Hashable)

DELAY_MAX_MS = 15 * 60 * 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    offsets_max: int | None = None
    bytes_max: int | None = None
    offsets_min: int | None = None
    delay_max_ms: int = DELAY_MAX_MS

    @property
    def is_unlimited(self) -> bool:
        return self.offsets_max is None and self.bytes_max is None


def is_due(limits: Limits, available: int, *, waited_ms: int) -> bool:
    """Whether there is a batch to begin. `waited_ms` is the time since the last one, or since the query began."""
    if available <= 0:
        return False
    return limits.offsets_min is None or available >= limits.offsets_min or waited_ms >= limits.delay_max_ms


def shares(backlog: Mapping[P, int], limit: int) -> dict[P, int]:
    """The limit shared out by backlog, none more than it has. Adds up to the smaller of the limit and all there is."""
    total = sum(backlog.values())
    if total <= limit:
        return dict(backlog)
    found = {place: count * limit // total for place, count in backlog.items()}
    left = limit - sum(found.values())
    by_rest = sorted(backlog, key=lambda place: backlog[place] * limit % total, reverse=True)  # stable: ties by order
    for place in by_rest[:left]:
        found[place] += 1
    return found


def admitted(backlog: Mapping[P, int], limits: Limits, sizes: Mapping[P, int] | None = None) -> dict[P, int]:
    """How many offsets of each partition the next batch takes. `sizes` are the bytes of each backlog, needed where
    there is a limit of bytes; offsets are taken to be of one size within a partition."""
    taken = {place: count for place, count in backlog.items() if count > 0}
    if not taken:
        return {}
    if limits.offsets_max is not None:
        taken = shares(taken, limits.offsets_max)
    if limits.bytes_max is not None:
        assert sizes is not None, "a limit of bytes needs sizes"
        by_bytes = shares({place: sizes.get(place, 0) for place in taken}, limits.bytes_max)
        taken = {
            place: min(count, _fitting(backlog[place], sizes.get(place, 0), by_bytes[place]))
            for place, count in taken.items()
        }
    if not any(taken.values()):
        most = max(taken, key=lambda place: backlog[place])
        taken[most] = 1
    return {place: count for place, count in taken.items() if count > 0}


def _fitting(count: int, size: int, share: int) -> int:
    """How many of `count` offsets of `size` bytes are in so many bytes."""
    return count if size <= share else count * share // size
