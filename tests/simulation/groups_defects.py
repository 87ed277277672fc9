"""Deliberate defects of consumer groups, each of a few lines: of the coordinator, its loading and its deadlines, and of
the consumer. The simulator has to notice every one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any
from uuid import UUID

from simulation.defects import Defect
from tidelog.client.consumer.fetch_buffer import FetchBuffer
from tidelog.client.consumer.membership import Membership
from tidelog.client.consumer.reconciler import Reconciler
from tidelog.client.consumer.subscription_state import Position
from tidelog.coordinator import consumer_group, offsets, partition_shard
from tidelog.coordinator.coordinator import GroupCoordinator
from tidelog.coordinator.partition_log import PartitionLog
from tidelog.coordinator.partition_shard import PartitionShard
from tidelog.coordinator.records import decode_batch
from tidelog.coordinator.requests import Heartbeat
from tidelog.coordinator.shard import Shard
from tidelog.coordinator.state import apply
from tidelog.log.batch import read_header
from tidelog.model.errors import ErrorCode
from tidelog.model.ids import Offset

Patches = tuple[tuple[Any, str, Any], ...]
READ_BYTES = 1 << 24


def _on(owner: Any, name: str, replacement: Any) -> Patches:
    return ((owner, name, replacement),)


# What counts as decided.


async def _append_without_waiting(self: Any, data: bytes, *, at: Any, epoch: Any) -> None:
    if not self.is_led or epoch != self._leader.leader_epoch or at != self.end_offset:
        raise self._not_led()
    end = Offset(self._leader.append(data, is_coordinator=True).last_offset + 1)
    self._on_commit(at, end)


_submit = PartitionShard.submit


async def _assigned_at_once(self: Any, request: Any, *, is_own: bool = False) -> Any:
    if not isinstance(request, Heartbeat):
        return await _submit(self, request, is_own=is_own)
    self.check()
    _, reply = self.machine.decide(self.runtime._speculative, request, offset=Offset(0))
    self._host.tasks.keep(asyncio.get_running_loop().create_task(_submit(self, request, is_own=is_own)))
    return reply


# Loading.


async def _load_what_is_known(leading: Any, progress: Any, log_format: Any) -> Any:
    state, offset = log_format.empty, leading.log.start_offset
    end = max(offset, leading.log.end_offset - 1)
    while offset < end:
        found = await leading.log.read(offset, bytes_max=READ_BYTES, end=end)
        if not found.data:
            break
        position = 0
        while position < len(found.data):
            state = apply(state, decode_batch(found.data, position))
            header = read_header(found.data, position)
            position += header.size
            offset = header.next_offset
    return state, leading.log.end_offset


async def _start_no_deadlines(_self: Any, _state: Any) -> None:
    """Only lateness shows this: a dead member that stays in its group is right until its session is over, and the
    promise that breaks is that it ends. Which member it is stands in the state that the late run prints."""
    return


def _wait_for_ever(self: Any) -> int:
    """As long as any session. Only lateness shows this: what is promised is a time. The simulation kills one member
    and names it if it is still in its group after that time."""
    return int(self.limits.session_timeout_max_ms)


# Deadlines.


def _detach_only(self: Any, key: Any, stream: Any, *, is_broken: bool) -> None:
    """Only lateness shows this, as with `_wait_for_ever`: the grace is a time, and the late member is named."""
    if self.streams.get(key) is stream:
        del self.streams[key]


def _no_grace(_self: Any) -> int:
    return 0


# Who holds what.


def _anybody_commits(_group: Any, _member_id: str, _member_epoch: int, _instance_id: str = "") -> None:
    return None


_reconcile = consumer_group._reconcile


def _take_over_at_once(group: Any, member_id: str) -> Any:
    current = _reconcile(group, member_id)
    target = group.targets[member_id].partitions
    if current.revoking or current.assigned == target:
        return current
    return replace(
        current,
        epoch=group.epoch,
        previous_epoch=current.epoch if current.epoch != group.epoch else current.previous_epoch,
        assigned=target,
    )


_should_reconnect = Membership._should_reconnect


def _joins_with_what_it_has(self: Any, error: Any) -> bool:
    if error.code not in (ErrorCode.FENCED_MEMBER_EPOCH, ErrorCode.UNKNOWN_MEMBER_ID):
        return _should_reconnect(self, error)
    self.member_id = str(UUID(int=self._cluster.random.getrandbits(128), version=4))
    self.member_epoch = 0
    self._owned, self._names = frozenset(), {}
    return True


# The consumer.

_next_change = Reconciler._next_change


async def _revoke_everything(self: Any) -> Any:
    target, nothing = self._target, dict[Any, str]()
    if target is None or all(state.partition in target for state in self._subscription):
        return await _next_change(self)
    self._target = nothing
    try:
        return await _next_change(self)
    finally:
        if self._target is nothing:
            self._target = target


def _consumed_is_processed(self: Any) -> Any:
    return self.consumed


def _drop_nothing(_self: Any) -> None:
    return None


_assigned = Reconciler.assigned


def _forget_the_position(self: Any, assignment: Any) -> None:
    """Each assignment resets all positions."""
    for state in self._subscription:
        if state.is_fetchable and state.partition in assignment:
            state.reset()
    self._changed()
    _assigned(self, assignment)


DEFECTS: tuple[Defect, ...] = (
    Defect(
        "group_acks_before_commit", "groups",
        "a coordinator answers when a decision is in its log, not when it is committed",
        _on(PartitionLog, "append_at", _append_without_waiting),
    ),
    Defect(
        "assignment_sent_early", "groups", "a member gets its assignment before the decision has committed",
        _on(PartitionShard, "submit", _assigned_at_once),
    ),
    Defect(
        "groups_load_part", "groups", "a new coordinator leaves out the last batch of the log",
        _on(partition_shard, "load", _load_what_is_known),
    ),
    Defect(
        "session_lost_on_move", "groups", "a new coordinator starts no deadlines for the members that it finds",
        _on(Shard, "_start_deadlines", _start_no_deadlines),
    ),
    Defect(
        "session_after_move", "groups", "a new coordinator waits a whole session for members that have had a stream",
        _on(GroupCoordinator, "reconnect_ms", property(_wait_for_ever)), late="is dead, and still in its group",
    ),
    Defect(
        "grace_ignored", "groups", "a member whose stream has broken keeps its whole session",
        _on(Shard, "detach", _detach_only), late="is dead, and still in its group",
    ),
    Defect(
        "no_grace", "groups", "a member whose stream has broken is out at once",
        _on(GroupCoordinator, "grace_ms", property(_no_grace)),
    ),
    Defect(
        "stale_commit_accepted", "groups", "a commit of any member epoch is accepted",
        _on(offsets, "check_commit", _anybody_commits),
    ),
    Defect(
        "handed_over_early", "groups", "a partition is given to its new owner before the old one has let go",
        _on(consumer_group, "_reconcile", _take_over_at_once),
    ),
    Defect(
        "unmoved_revoked", "groups", "a member that has to give up something gives up everything",
        _on(Reconciler, "_next_change", _revoke_everything),
    ),
    Defect(
        "kept_across_fencing", "groups", "a member that was put out joins again and keeps what it holds",
        _on(Membership, "_should_reconnect", _joins_with_what_it_has),
    ),
    Defect(
        "auto_commit_of_current", "groups", "the automatic commit takes in what the program still works on (C5)",
        _on(Position, "processed", property(_consumed_is_processed)),
    ),
    Defect(
        "buffer_kept_when_revoked", "groups", "records of a partition that was revoked are given out",
        _on(FetchBuffer, "_drop_stale", _drop_nothing),
    ),
    Defect(
        "position_forgotten", "groups", "a rebalance puts unmoved partitions back to their committed offset",
        _on(Reconciler, "assigned", _forget_the_position),
    ),
)  # fmt: skip
