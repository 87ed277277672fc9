"""The explorations of `make explore`, by name, from small to large. Each says what is bounded."""

from __future__ import annotations

from typing import Any

from exploration import partition_model as partition
from exploration import raft_model as raft
from exploration.explorer import Model
from exploration.transaction_model import TransactionModel
from exploration.transaction_state import Budgets as TransactionBudgets


def _raft(*, is_led: bool = False, has_slow_disks: bool = True, is_ordered: bool = True, **left: int) -> Model[Any]:
    budgets = raft.RaftBudgets(**{**dict.fromkeys(vars(raft.RaftBudgets()), 0), **left})
    return raft.RaftModel(budgets, is_led=is_led, has_slow_disks=has_slow_disks, is_ordered=is_ordered)


def _partition(*, brokers: int = 3, **left: int) -> Model[Any]:
    budgets = partition.PartitionBudgets(**{**dict.fromkeys(vars(partition.PartitionBudgets()), 0), **left})
    return partition.PartitionModel(budgets, brokers=brokers)


def _transactions(*, version: int = 2, first_epoch: int = 0, keeps_prepared: bool = False, **left: int) -> Model[Any]:
    budgets = TransactionBudgets(**{**dict.fromkeys(vars(TransactionBudgets()), 0), **left})
    return TransactionModel(budgets, version=version, first_epoch=first_epoch, keeps_prepared=keeps_prepared)


NEARLY_EXHAUSTED = 32_764
"""The next instance has the last epoch but one."""

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
    # Transactions: of one owner, one after the other; late and repeated messages.
    "transactions-two": _transactions(transactions=2),
    "transactions-timeout": _transactions(transactions=2, timeouts=1),
    "transactions-timeout-repeat": _transactions(transactions=1, timeouts=1, repeats=1),
    "transactions-repeats": _transactions(transactions=2, repeats=2),
    "transactions-abort-repeat": _transactions(transactions=2, aborts=1, repeats=1),
    "transactions-operator-loss": _transactions(transactions=2, operators=1, losses=1),
    "transactions-crash": _transactions(transactions=2, crashes=1),
    "transactions-election-crash": _transactions(transactions=1, elections=1, crashes=1, repeats=1),
    "transactions-exhausted": _transactions(transactions=2, timeouts=1, first_epoch=NEARLY_EXHAUSTED),
    # Another instance, members.
    "transactions-instance": _transactions(transactions=1, instances=1),
    "transactions-instance-timeout": _transactions(transactions=1, instances=1, timeouts=1),
    "transactions-prepared": _transactions(transactions=1, prepares=1, instances=1, keeps_prepared=True),
    "transactions-prepared-exhausted": _transactions(
        transactions=1, prepares=1, instances=1, keeps_prepared=True, first_epoch=NEARLY_EXHAUSTED
    ),
    "transactions-member-timeout": _transactions(transactions=1, members=1, timeouts=1),
    "transactions-members-loss": _transactions(transactions=1, members=2, losses=1),
    "transactions-members-crash": _transactions(transactions=2, members=1, crashes=1, repeats=1),
    # Version 1, whose ends keep the epoch.
    "transactions-v1-abort": _transactions(transactions=2, aborts=1, version=1),
    "transactions-v1-repeats": _transactions(transactions=2, repeats=1, version=1),
    "transactions-v1-election-crash": _transactions(transactions=2, elections=1, crashes=1, version=1),
}
