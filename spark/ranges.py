"""From ranges of offsets to tasks of Spark. Pure.

A Python task has a fixed cost of some 30 ms, so small ranges are bundled and large ones split:

    bytes in all / targetBytesPerTask    tasks, one at least, unless more are asked for by
    minPartitions                        at least so many tasks, as long as there are records to give them
    maxRecordsPerPartition               no task has more offsets

Ranges of one leader stand together where they can, so that a task talks to few brokers. A partition's offsets stand in
one task in their order, or are split at offsets: Spark keeps no order between tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tidelog.spark.offsets import ReadRange

TASKS_MAX = 10_000
"""Of one batch, whatever is asked for."""
_SLIVER = 0.1
"""A piece of a range that is less than this part of a task is not cut off."""


def plan_tasks(
    ranges: Sequence[ReadRange],
    sizes: Mapping[tuple[str, int], int],
    *,
    leaders: Mapping[tuple[str, int], int] | None = None,
    target_bytes: int,
    tasks_min: int = 1,
    records_max: int | None = None,
) -> list[tuple[ReadRange, ...]]:
    """The ranges of each task. `sizes` are bytes by (topic, partition); what is missing counts as nothing."""
    wanted = [one for one in ranges if one.count > 0]
    if not wanted:
        return []
    leaders = leaders or {}
    ordered = sorted(wanted, key=lambda one: (leaders.get((one.topic, one.partition), -1), one.topic, one.partition))
    records = sum(one.count for one in ordered)
    total_bytes = sum(sizes.get((one.topic, one.partition), 0) for one in ordered)
    count = min(max(1, tasks_min, -(-total_bytes // target_bytes)), records, TASKS_MAX)
    if records_max is None:
        return _cut(ordered, _weights(ordered, sizes), count)
    each = max(min(records_max, -(-records // count)), -(-records // TASKS_MAX))
    return _cut_by_offsets(ordered, each)


def _weights(ranges: Sequence[ReadRange], sizes: Mapping[tuple[str, int], int]) -> list[int]:
    """By bytes where all are known, otherwise by offsets."""
    found = [sizes.get((one.topic, one.partition), 0) for one in ranges]
    return found if all(found) else [one.count for one in ranges]


def _cut_by_offsets(ranges: Sequence[ReadRange], each: int) -> list[tuple[ReadRange, ...]]:
    """Tasks of so many offsets; the last has what is left."""
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
    """All ranges in a row, cut into `count` parts of the same weight; a cut that would leave a sliver of a range moves
    to the range's edge."""
    share = sum(weights) / count
    tasks: list[list[ReadRange]] = [[] for _ in range(count)]
    before = 0.0  # the weight of the ranges passed
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
