"""Decides how many offsets the next batch reads. Pure.

    maxOffsetsPerTrigger     records (offsets, gaps included) per batch
    maxBytesPerTrigger       stored (compressed) bytes per batch; exact to about one index interval per partition
    minOffsetsPerTrigger     a batch waits for this many offsets,
    maxTriggerDelay          but not longer than this since the previous batch

A limit is divided in proportion to backlog. Shares are whole offsets and add up to the limit exactly. A partition gets
nothing only if its share is below one offset; then its backlog, and its share, grow. If both maxima are set, the
smaller one of each partition applies. A batch takes at least one offset, so a limit below the record size blocks
nothing.
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
    """Return whether a batch is due. `waited_ms` is the time since the last batch, or since the query started."""
    if available <= 0:
        return False
    return limits.offsets_min is None or available >= limits.offsets_min or waited_ms >= limits.delay_max_ms


def shares(backlog: Mapping[P, int], limit: int) -> dict[P, int]:
    """Divide `limit` in proportion to backlog; no share exceeds its backlog."""
    total = sum(backlog.values())
    if total <= limit:
        return dict(backlog)
    result = {partition: count * limit // total for partition, count in backlog.items()}
    left = limit - sum(result.values())
    by_rest = sorted(backlog, key=lambda partition: backlog[partition] * limit % total, reverse=True)
    for partition in by_rest[:left]:
        result[partition] += 1
    return result


def admitted(backlog: Mapping[P, int], limits: Limits, sizes: Mapping[P, int] | None = None) -> dict[P, int]:
    """Return how many offsets of each partition the next batch takes. `sizes` holds the bytes of each backlog and is
    required with a byte limit. All offsets of a partition count as equally large."""
    counts = {partition: count for partition, count in backlog.items() if count > 0}
    if not counts:
        return {}
    if limits.offsets_max is not None:
        counts = shares(counts, limits.offsets_max)
    if limits.bytes_max is not None:
        assert sizes is not None, "a limit of bytes needs sizes"
        by_bytes = shares({partition: sizes.get(partition, 0) for partition in counts}, limits.bytes_max)
        counts = {
            partition: min(count, _fitting(backlog[partition], sizes.get(partition, 0), by_bytes[partition]))
            for partition, count in counts.items()
        }
    if not any(counts.values()):
        largest = max(counts, key=lambda partition: backlog[partition])
        counts[largest] = 1
    return {partition: count for partition, count in counts.items() if count > 0}


def _fitting(count: int, size: int, share: int) -> int:
    """Return how many of `count` offsets with `size` bytes in total fit in `share` bytes."""
    return count if size <= share else count * share // size
