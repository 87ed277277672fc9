"""The explorations of `make explore`, by name, from small to large. Each says what is bounded."""

from __future__ import annotations

from typing import Any

from exploration import partition_model as partition
from exploration import raft_model as raft
from exploration.explorer import Model


def _raft(*, is_led: bool = False, has_slow_disks: bool = True, is_ordered: bool = True, **left: int) -> Model[Any]:
    budgets = raft.Budgets(**{**dict.fromkeys(vars(raft.Budgets()), 0), **left})
    return raft.RaftModel(budgets, is_led=is_led, has_slow_disks=has_slow_disks, is_ordered=is_ordered)


def _partition(*, brokers: int = 3, **left: int) -> Model[Any]:
    budgets = partition.Budgets(**{**dict.fromkeys(vars(partition.Budgets()), 0), **left})
    return partition.PartitionModel(budgets, brokers=brokers)


EXPLORATIONS: dict[str, Model[Any]] = {
    # One election with everything that can happen to it.
    "raft-election-crash": _raft(timeouts=1, crashes=1),
    "raft-election-proposal-loss": _raft(timeouts=1, proposals=1, losses=1),
    "raft-election-repeat": _raft(timeouts=1, proposals=1, repeats=1, is_ordered=False),
    "raft-election-break": _raft(timeouts=1, breaks=1),
    # A leader with a committed entry, and what may come between it and the next.
    "raft-led-crash": _raft(is_led=True, proposals=1, crashes=1),
    "raft-led-beat-loss": _raft(is_led=True, proposals=1, beats=1, losses=1),
    "raft-led-takeover": _raft(is_led=True, timeouts=1, proposals=1, has_slow_disks=False),
    "raft-led-takeover-crash": _raft(is_led=True, timeouts=1, proposals=1, crashes=1, has_slow_disks=False),
    "raft-led-takeover-slow-disks": _raft(is_led=True, timeouts=1, proposals=1),
    # Rivals.
    "raft-two-elections": _raft(timeouts=2, has_slow_disks=False),
    "raft-two-elections-unordered": _raft(timeouts=2, has_slow_disks=False, is_ordered=False),
    "raft-two-elections-crash": _raft(timeouts=2, crashes=1, has_slow_disks=False),
    "raft-two-elections-slow-disks": _raft(timeouts=2),
    # Replicas of a partition.
    "partition-crash": _partition(brokers=2, appends=1, crashes=1),
    "partition-append-fence": _partition(brokers=2, appends=1, fences=1),
    "partition-lag": _partition(brokers=2, appends=1, waits=1, lost_answers=1),
    "partition-three-fence": _partition(appends=1, fences=1),
    "partition-three-crash": _partition(appends=1, crashes=1),
    "partition-three-wipe": _partition(appends=1, wipes=1),
    "partition-three-min-isr": _partition(appends=1, configs=1, fences=1),
    "partition-three-all": _partition(appends=2, crashes=1, fences=1, waits=1, lost_answers=1),
}
