"""The group coordinator's pure state machine: requests in, decisions and replies out. Pure.

    machine = GroupMachine(GroupLimits(...))
    decisions, reply = machine.decide(state, request, offset=...)     raises the rejection; changes nothing
    state = machine.apply(state, decisions)
    entries = machine.encode(decisions)                               record batches for the log
    state = machine.replay(state, batch)                              one batch of the log, on every replica

It runs in `raft.runtime.StateMachineRuntime`, whose "records" are whole `records.Decision`s here: one for a request
that changes something, none for one that does not. So an entry is cut between decisions only, and one is atomic.

Requests and their replies (requests.py, and `classic_requests.StoreGeneration`):

    Heartbeat        HeartbeatReply
    ExpireMember     None
    RemoveMembers    {name as asked: error or None}
    RefreshTopics    None
    CommitOffsets    {partition: error or None}
    CommitPendingOffsets    {partition: error or None}
    EndPendingOffsets       None
    ForgetFences     bool: there is more
    DeleteOffsets    {partition: error or None}
    DeleteGroup      None
    ExpireOffsets    bool: there is more
    StoreGeneration  None
    ClassicJoin      JoinReply
    ClassicSync      SyncReply
    Downgrade        None

Duties of the shell for members on streams: after each commit that has changed a group (compare `state.group(id)` before
and after with `is`), for each member of `members_to_notify(before, after, group)` that has a stream here it submits,
with `is_own`, a `Heartbeat` in the member's name: `member_epoch` is the last one that *the member itself has sent* on
this stream, and nothing but group, member id, instance id, view and time is set. It sends the reply on the stream if
`assignment` is not None or the epoch differs from the last one sent. The epoch must be the member's own last one:
`consumer_group` gives no new assignment to a member that has not confirmed the epoch before.
A member without a stream gets the changes with its next heartbeat.

The shell owns the timers: `session_timeout_ms` of a reply restarts with each heartbeat of the member itself (not with
those in its name); if a reply has `is_revoking`, `rebalance_timeout_ms` runs from the first such reply of that epoch
until one without it. When a timer expires, the shell submits `ExpireMember` with the epoch of that reply
(`is_rebalance` for the second). A new coordinator starts the session timers of all members.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tidelog.coordinator import classic_members, consumer_group, migration, offsets, pending_offsets
from tidelog.coordinator.classic_requests import ClassicJoin, ClassicSync, Downgrade, StoreGeneration
from tidelog.coordinator.consumer_group import members_to_notify
from tidelog.coordinator.limits import GroupLimits
from tidelog.coordinator.queries import describe_group, fetch_offsets, summary_of
from tidelog.coordinator.records import Decision, decision, decode_batch, empty_entry, encode_entries
from tidelog.coordinator.requests import (
    JOIN_EPOCH,
    CommitOffsets,
    CommitPendingOffsets,
    DeleteGroup,
    DeleteOffsets,
    EndPendingOffsets,
    ExpireMember,
    ExpireOffsets,
    ForgetFences,
    Heartbeat,
    RefreshTopics,
    RemoveMembers,
)
from tidelog.coordinator.state import CoordinatorState, apply
from tidelog.log.batch_header import Buffer
from tidelog.model.errors import PolicyViolationError
from tidelog.model.group_errors import GroupFullError
from tidelog.model.ids import NO_TIMESTAMP, Offset

__all__ = ["GroupMachine", "describe_group", "fetch_offsets", "members_to_notify", "summary_of"]

Decide = Callable[[CoordinatorState, Any, GroupLimits], tuple[Iterable[Any], Any]]

DECISIONS: dict[type[Any], Decide] = {
    Heartbeat: consumer_group.heartbeat,
    ExpireMember: consumer_group.expire_member,
    RemoveMembers: consumer_group.remove_members,
    RefreshTopics: consumer_group.refresh_topics,
    CommitOffsets: offsets.commit,
    CommitPendingOffsets: pending_offsets.commit,
    EndPendingOffsets: pending_offsets.end,
    ForgetFences: pending_offsets.forget_fences,
    DeleteOffsets: offsets.delete,
    DeleteGroup: offsets.delete_group,
    ExpireOffsets: offsets.expire,
    StoreGeneration: migration.store_generation,
    ClassicJoin: classic_members.join,
    ClassicSync: classic_members.sync,
    Downgrade: migration.downgrade,
}


class GroupMachine:
    def __init__(self, limits: GroupLimits | None = None) -> None:
        self.limits = limits or GroupLimits()

    def decide(self, state: CoordinatorState, request: Any, *, offset: Offset) -> tuple[Sequence[Decision], Any]:
        """Return the decision of a request (none if nothing changes) and its reply; raise the error of a rejection."""
        decide = DECISIONS.get(type(request))
        assert decide is not None, f"no decision for {type(request).__name__}"
        records, reply = decide(state, request, self.limits)
        records = tuple(records)
        if not records:
            return (), reply
        try:
            return (decision(records, getattr(request, "now_ms", NO_TIMESTAMP)),), reply
        except PolicyViolationError as error:
            is_join = isinstance(request, Heartbeat) and request.member_epoch == JOIN_EPOCH
            if is_join or isinstance(request, ClassicJoin):
                raise GroupFullError(f"group {request.group!r} cannot take another member: {error}") from error
            raise

    def apply(self, state: CoordinatorState, records: Sequence[Decision]) -> CoordinatorState:
        return apply(state, (record for each in records for record in each.records))

    def encode(self, records: Sequence[Decision]) -> list[bytes]:
        return encode_entries(records)

    def abort(self) -> bytes:
        return empty_entry()

    def replay(self, state: CoordinatorState, data: Buffer, position: int = 0) -> CoordinatorState:
        """Return the state after the batch at `position`; raises `CorruptStateError` or an error of the batch."""
        return apply(state, decode_batch(data, position))
