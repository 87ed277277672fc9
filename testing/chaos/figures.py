"""Throughput, latency and standstills of a run, from the histories of its clients. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

Window = tuple[int, int]
"""From and until, in ms."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Of the acknowledgements in one second, in ms."""

    median: float
    p99: float
    worst: float


@dataclass(slots=True)
class Gap:
    """The longest time without an acknowledgement; time without a majority does not count."""

    seconds: float = 0.0
    began_s: float = 0.0
    """Since the run began."""


@dataclass(slots=True)
class Figures:
    acknowledged: dict[str, list[int]] = field(default_factory=dict)
    """Records in each second of the run, by producer."""
    read: dict[str, list[int]] = field(default_factory=dict)
    """The same by group."""
    latencies: list[Latency | None] = field(default_factory=list)
    """Of each second; None: nothing was acknowledged."""
    gap: Gap = field(default_factory=Gap)
    """Of any write."""
    partition_gap: Gap = field(default_factory=Gap)
    """Of the partition that stood still for longest."""
    gap_partition: str = ""

    @property
    def seconds(self) -> int:
        return len(self.latencies)

    def latency(self) -> Latency | None:
        """The median over the seconds of the median, the 99th percentile over the seconds of p99, and the worst."""
        found = [one for one in self.latencies if one is not None]
        if not found:
            return None
        return Latency(
            percentile(sorted(one.median for one in found), 0.5),
            percentile(sorted(one.p99 for one in found), 0.99),
            max(one.worst for one in found),
        )


def percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def longest_gap(times_ms: Sequence[int], windows: Iterable[Window], began_ms: int) -> Gap:
    """`times_ms` ascend. `windows` do not overlap; their time is taken off a gap that holds them."""
    left_out = sorted(windows)
    gap = Gap()
    for before, after in pairwise(times_ms):
        if (after - before) / 1000 <= gap.seconds:
            continue
        lost_ms = sum(max(0, min(after, end) - max(before, begin)) for begin, end in left_out)
        seconds = (after - before - lost_ms) / 1000
        if seconds > gap.seconds:
            gap = Gap(seconds, (before - began_ms) / 1000)
    return gap


class FigureCounter:
    """Feed the events of all histories, then call `figures`. `began_ms` is the begin of the run, `ended_ms` the end of
    its faults: what came later is left out."""

    def __init__(self, began_ms: int, ended_ms: int) -> None:
        self._began_ms = began_ms
        self._seconds = max(1, (ended_ms - began_ms) // 1000)
        self._figures = Figures()
        self._took: list[list[float]] = [[] for _ in range(self._seconds)]
        self._acks: dict[str, list[int]] = defaultdict(list)

    def feed(self, name: str, event: Mapping[str, Any]) -> None:
        """`name` is the producer, or the group."""
        kind = event["event"]
        if kind not in ("ack", "poll") or "at_ms" not in event:
            return
        second = (event["at_ms"] - self._began_ms) // 1000
        if not 0 <= second < self._seconds:
            return
        if kind == "poll":
            self._row(self._figures.read, name)[second] += len(event["records"])
            return
        self._row(self._figures.acknowledged, name)[second] += event["count"]
        self._acks[f"{event['topic']}-{event['partition']}"].append(event["at_ms"])
        if "took_ms" in event:
            self._took[second].append(event["took_ms"])

    def _row(self, rows: dict[str, list[int]], name: str) -> list[int]:
        return rows.setdefault(name, [0] * self._seconds)

    def figures(self, majority_lost: Sequence[Window]) -> Figures:
        figures = self._figures
        for took in self._took:
            took.sort()
            latency = Latency(percentile(took, 0.5), percentile(took, 0.99), took[-1]) if took else None
            figures.latencies.append(latency)
        everything = sorted(at_ms for times in self._acks.values() for at_ms in times)
        figures.gap = longest_gap(everything, majority_lost, self._began_ms)
        for partition, times in sorted(self._acks.items()):
            gap = longest_gap(sorted(times), majority_lost, self._began_ms)
            if gap.seconds > figures.partition_gap.seconds:
                figures.partition_gap, figures.gap_partition = gap, partition
        return figures
