"""Splits ranges of offsets into Spark tasks. Pure.

A Python task has a fixed cost of about 30 ms, so small ranges are bundled and large ones split:

    total bytes / targetBytesPerTask     number of tasks, at least one, unless raised by
    minPartitions                        minimum number of tasks, while there are enough records
    maxRecordsPerPartition               maximum offsets per task

Ranges of one leader are adjacent where possible, so a task talks to few brokers. A partition's offsets are ordered
within a task; Spark keeps no order between tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tidelog.spark.offsets import ReadRange

TASKS_MAX = 10_000
"""Upper limit per batch, whatever the options say."""
_SLIVER = 0.1
"""A range is not cut if the piece would be smaller than this fraction of a task."""


def plan_tasks(
    ranges: Sequence[ReadRange],
    sizes: Mapping[tuple[str, int], int],
    *,
    leaders: Mapping[tuple[str, int], int] | None = None,
    target_bytes: int,
    tasks_min: int = 1,
    records_max: int | None = None,
) -> list[tuple[ReadRange, ...]]:
    """Return the ranges of each task. `sizes` are bytes by (topic, partition); missing ones count as 0."""
    nonempty = [one for one in ranges if one.count > 0]
    if not nonempty:
        return []
    leaders = leaders or {}
    ordered = sorted(nonempty, key=lambda one: (leaders.get((one.topic, one.partition), -1), one.topic, one.partition))
    records = sum(one.count for one in ordered)
    total_bytes = sum(sizes.get((one.topic, one.partition), 0) for one in ordered)
    count = min(max(1, tasks_min, -(-total_bytes // target_bytes)), records, TASKS_MAX)
    if records_max is None:
        return _cut(ordered, _weights(ordered, sizes), count)
    each = max(min(records_max, -(-records // count)), -(-records // TASKS_MAX))
    return _cut_by_offsets(ordered, each)


def _weights(ranges: Sequence[ReadRange], sizes: Mapping[tuple[str, int], int]) -> list[int]:
    """Weigh ranges by bytes if all sizes are known, otherwise by offsets."""
    known = [sizes.get((one.topic, one.partition), 0) for one in ranges]
    return known if all(known) else [one.count for one in ranges]


def _cut_by_offsets(ranges: Sequence[ReadRange], each: int) -> list[tuple[ReadRange, ...]]:
    """Cut into tasks of `each` offsets; the last has the remainder."""
    tasks: list[list[ReadRange]] = [[]]
    room = each
    for rest in ranges:
        while rest.count > 0:
            if room == 0:
                tasks.append([])
                room = each
            piece = replace(rest, end=min(rest.end, rest.start + room))
            tasks[-1].append(piece)
            room -= piece.count
            rest = replace(rest, start=piece.end)
    return [tuple(task) for task in tasks]


def _cut(ranges: Sequence[ReadRange], weights: Sequence[int], count: int) -> list[tuple[ReadRange, ...]]:
    """Cut the sequence of ranges into `count` tasks of equal weight. A cut that would leave a sliver of a range moves
    to the range's edge."""
    share = sum(weights) / count
    tasks: list[list[ReadRange]] = [[] for _ in range(count)]
    before = 0.0  # weight of the ranges so far
    for one, weight in zip(ranges, weights, strict=True):
        density = weight / one.count
        at = one.start
        task = int(before / share + _SLIVER)
        while at < one.end:
            left_weight = before + weight - (task + 1) * share
            cut = one.end
            if left_weight > _SLIVER * share and task < count - 1:
                cut = min(one.end, max(at + 1, one.end - round(left_weight / density)))
            tasks[min(task, count - 1)].append(replace(one, start=at, end=cut))
            at = cut
            task += 1
        before += weight
    return [tuple(task) for task in tasks if task]
