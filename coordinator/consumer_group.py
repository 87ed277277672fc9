"""Consumer groups: members report what they read and own; the coordinator assigns partitions. Pure.

State of a group (`state.Group`): its epoch, which counts changes of membership, subscriptions and topics; a target for
each member, made by the assignor with that epoch; and what each member was sent (`CurrentValue`):

    assigned   partitions it may use                         } the member owns both: no other member has them
    revoking   partitions it must revoke, until it reports   }
    epoch      the group's epoch when its assignment last changed; `previous_epoch`: the one before

Transitions of a member, on a heartbeat that carries its epoch (`_reconcile`):

    target lacks something of it    epoch := group's;  assigned := own & target;  revoking := own - target
    revoking, reports owned without it                 revoking := {}: others can have it
    revoking nothing, and something of its target is free
                                    epoch := group's;  assigned |= what is free
    otherwise                       nothing: no record

So a member revokes first and takes over then; partitions that are not free yet follow as soon as they are
(`members_to_notify`). A member with an unchanged target keeps its epoch: a change in a group of a thousand members
costs one record per affected member.

Why a late report frees nothing: a revocation always has a new epoch. A report counts only with that epoch, so its
member has received that answer and all answers before it: no earlier assignment can still be in flight. On a stream
answers and heartbeats cross; a heartbeat with the previous epoch gets the full assignment again and changes nothing.
So a member is never more than one epoch behind the last one sent.

A join may be late, too: its connection has broken, and the member has joined again on another one and owns partitions
since then. So what a known member had and does not get back becomes free only with the next heartbeat of the member
under the new epoch of that join (`is_joining`), which proves that it has the answer. A heartbeat with the previous
epoch proves that the member lives and knows of no such join: from then on only its report counts.

Duties of a member: it applies answers in order; a heartbeat carries the epoch of the last applied answer; `owned` is
everything that it owns at that moment, including partitions it is revoking; after it has applied an answer it takes
over nothing that only an older one assigned. After a reconnect it sends `owned`; after FENCED_MEMBER_EPOCH or
UNKNOWN_MEMBER_ID it revokes everything and joins.

Invariants (`state.validate`, and the property tests):
- a partition has at most one owner: it is assigned only while free, and freed only by a report or a confirmed join as
  above, by a leave, or by the removal of the member;
- a partition in a member's old and new target is never revoked;
- when all members answer, each reaches its target, and every subscribed partition has an owner.

Members of the classic protocol live in a consumer group too (`classic_members`), while the group changes from one
protocol to the other (`migration`).

Static members: a member that leaves with epoch -2 is away. It owns nothing, but keeps its target until its session
expires; a member that joins with the same instance id inherits it, without a change for the others. Partitions that a
new target takes from a member that is away are free at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tidelog.coordinator.assignors import ASSIGNORS
from tidelog.coordinator.classic_members import is_pending
from tidelog.coordinator.classic_requests import GroupMigratedError
from tidelog.coordinator.group_change import (
    BORN,
    MEMBER_KINDS,
    GroupChange,
    Records,
    needs_new_target,
    next_epoch,
    replace_static_member,
    retarget,
)
from tidelog.coordinator.limits import GroupLimits
from tidelog.coordinator.migration import upgrade_records
from tidelog.coordinator.patterns import compile_pattern
from tidelog.coordinator.records import (
    NO_PARTITIONS,
    CurrentValue,
    Kind,
    MemberValue,
    Partitions,
    TargetValue,
    sorted_partitions,
)
from tidelog.coordinator.requests import (
    JOIN_EPOCH,
    LEAVE_EPOCH,
    STATIC_LEAVE_EPOCH,
    ExpireMember,
    Heartbeat,
    HeartbeatReply,
    RefreshTopics,
    RemoveMembers,
    TopicsView,
)
from tidelog.coordinator.state import CoordinatorState, Group
from tidelog.coordinator.subscriptions import Resolver, group_digest
from tidelog.model.errors import InvalidRequestError, TidelogError
from tidelog.model.group_errors import (
    FencedInstanceIdError,
    FencedMemberEpochError,
    GroupFullError,
    GroupIdNotFoundError,
    InvalidGroupIdError,
    InvalidPatternError,
    InvalidSessionTimeoutError,
    UnknownMemberIdError,
    UnreleasedInstanceIdError,
    UnsupportedAssignorError,
)

_EMPTY_MEMBER = MemberValue()


# ---- Requests


def heartbeat(state: CoordinatorState, request: Heartbeat, limits: GroupLimits) -> tuple[Records, HeartbeatReply]:
    _check(request, limits)
    group = state.group(request.group) or Group(request.group)
    if request.member_epoch == JOIN_EPOCH:
        return _join(group, request, limits)
    if group.classic is not None and group.classic.members:
        raise UnknownMemberIdError(f"{request.member_id!r} is no member of classic group {request.group!r}: join it")
    if request.member_epoch in (LEAVE_EPOCH, STATIC_LEAVE_EPOCH):
        return _leave(group, request)
    return _renew(group, request, limits)


def expire_member(state: CoordinatorState, request: ExpireMember, limits: GroupLimits) -> tuple[Records, None]:
    group = state.group(request.group)
    current = None if group is None else group.currents.get(request.member_id)
    if group is None or current is None or current.epoch != request.member_epoch:
        return [], None
    is_classic = group.members[request.member_id].is_classic
    if request.is_rebalance and not (is_pending(group, request.member_id) if is_classic else current.revoking):
        return [], None  # its report arrived before the timer fired
    return _without(group, [request.member_id], request.view, request.now_ms), None


def remove_members(
    state: CoordinatorState, request: RemoveMembers, limits: GroupLimits
) -> tuple[Records, dict[str, TidelogError | None]]:
    group = state.group(request.group)
    if group is None:
        raise GroupIdNotFoundError(f"there is no group {request.group!r} here")
    if group.classic is not None and group.classic.members:
        raise GroupMigratedError(f"the members of group {request.group!r} are of the classic protocol")
    if not request.member_ids and not request.instance_ids:
        names = {member_id: member_id for member_id in sorted(group.members)}
    else:
        names = {name: name if name in group.members else "" for name in request.member_ids}
        names |= {name: group.instances.get(name, "") for name in request.instance_ids}
    reply: dict[str, TidelogError | None] = {
        name: None if member_id else UnknownMemberIdError(f"{name!r} is no member of group {request.group!r}")
        for name, member_id in names.items()
    }
    leaving = sorted({member_id for member_id in names.values() if member_id})
    return _without(group, leaving, request.view, request.now_ms) if leaving else [], reply


def refresh_topics(state: CoordinatorState, request: RefreshTopics, limits: GroupLimits) -> tuple[Records, None]:
    group = state.group(request.group)
    if group is None or group.info is None or not group.members:
        return [], None
    resolver = Resolver(request.view)
    if group_digest(group.members, resolver) == group.info.topics_digest:
        return [], None
    change = GroupChange(group)
    retarget(change, resolver)
    return change.records, None


def members_to_notify(before: CoordinatorState, after: CoordinatorState, group_id: str) -> tuple[str, ...]:
    """Return the sorted members for which a heartbeat on `after` would change something: partitions to revoke, or
    partitions that became free for them. Empty if the group is the same as `before`."""
    group = after.group(group_id)
    if group is None or group is before.group(group_id):
        return ()
    return tuple(sorted(member_id for member_id in group.currents if has_changes(group, member_id)))


def has_changes(group: Group, member_id: str) -> bool:
    """Return whether a heartbeat of the member would change something."""
    current, target = group.currents.get(member_id), group.targets.get(member_id)
    if current is None or target is None or current.epoch == STATIC_LEAVE_EPOCH or group.members[member_id].is_classic:
        return False
    if target.partitions is current.assigned and not current.revoking:
        return False
    return _reconcile(group, member_id) is not current


# ---- Join, heartbeat, leave


def _check(request: Heartbeat, limits: GroupLimits) -> None:
    """Validate a heartbeat without its group."""
    if not request.group or len(request.group) > limits.name_length_max:
        raise InvalidGroupIdError(f"a group id has 1 to {limits.name_length_max} characters")
    if not request.member_id:
        raise InvalidRequestError("a heartbeat names its member: choose an id, a random UUID, before joining")
    for name in (request.member_id, request.instance_id, request.rack, request.client_id, request.client_host):
        if len(name) > limits.name_length_max:
            raise InvalidRequestError(f"a name of {len(name)} characters is over the limit of {limits.name_length_max}")
    if request.member_epoch < STATIC_LEAVE_EPOCH:
        raise InvalidRequestError(f"there is no member epoch {request.member_epoch}")
    if request.member_epoch == JOIN_EPOCH and request.owned:
        raise InvalidRequestError("a joining member owns nothing: revoke your partitions first")
    if request.member_epoch == STATIC_LEAVE_EPOCH and not request.instance_id:
        raise InvalidRequestError("only a member with an instance id can leave for a while (epoch -2)")
    if request.topics is not None and sum(map(len, request.topics)) > limits.subscription_bytes_max:
        raise InvalidRequestError(
            f"the names of a subscription have at most {limits.subscription_bytes_max} characters; use a pattern"
        )
    if request.pattern:
        if len(request.pattern) > limits.pattern_length_max:
            raise InvalidPatternError(f"a pattern has at most {limits.pattern_length_max} characters")
        compile_pattern(request.pattern)
    if request.assignor and request.assignor not in ASSIGNORS:
        raise UnsupportedAssignorError(f"no assignor {request.assignor!r}; there are {', '.join(sorted(ASSIGNORS))}")
    session = request.session_timeout_ms
    if session and not limits.session_timeout_min_ms <= session <= limits.session_timeout_max_ms:
        raise InvalidSessionTimeoutError(
            f"a session timeout of {session} ms is outside of {limits.session_timeout_min_ms}"
            f" to {limits.session_timeout_max_ms} ms"
        )
    if request.rebalance_timeout_ms < 0:
        raise InvalidRequestError(f"a rebalance timeout of {request.rebalance_timeout_ms} ms")


def _join(group: Group, request: Heartbeat, limits: GroupLimits) -> tuple[Records, HeartbeatReply]:
    """Add a new member, replace a static member that is away, or restart a known member; it owns nothing.

    A join converts a classic group with members to a consumer group. It replaces a classic member with the same
    instance id whether that is away or not: the classic protocol cannot express it."""
    member_id = request.member_id
    value = _requested_value(request, _EMPTY_MEMBER, limits)
    before: MemberValue | None
    change = GroupChange(group)
    if group.classic is not None and group.classic.members:
        change.add(upgrade_records(group, group.classic, request, limits))
        group = change.group
    may_be_late = False
    former_id = group.instances.get(request.instance_id) if request.instance_id else None
    if former_id is not None and former_id != member_id:
        if group.currents[former_id].epoch != STATIC_LEAVE_EPOCH and not group.members[former_id].is_classic:
            raise UnreleasedInstanceIdError(
                f"member {former_id!r} lives under the instance id {request.instance_id!r} of group {group.group_id!r}"
            )
        is_there = member_id in group.members
        before = replace_static_member(change, former_id, member_id, value)
        if is_there:
            before = None  # its own former partitions need a new target
    elif member_id in group.members:
        before = group.members[member_id]
        may_be_late = group.currents[member_id].epoch != STATIC_LEAVE_EPOCH
        change.add(_rejoin(change, member_id, value))
    else:
        if len(group.members) >= limits.members_max:
            raise GroupFullError(f"group {group.group_id!r} has {len(group.members)} members, the most it may have")
        before = None
        change.add(
            (
                change.put(Kind.MEMBER, member_id, value),
                change.put(Kind.TARGET, member_id, TargetValue()),
                change.put(Kind.CURRENT, member_id, BORN),
            )
        )
    if before is None or needs_new_target(group, before, value, change.group):
        retarget(change, Resolver(request.view))
    _free_partitions(change, member_id, may_be_late=may_be_late)
    _move_on(change, member_id)
    return change.records, _reply(change.group, member_id, sends_assignment=True)


def _rejoin(change: GroupChange, member_id: str, value: MemberValue) -> Records:
    """Restart a known member: the answer to its join was lost, or it was fenced and revoked everything."""
    group = change.group
    records: Records = []
    if value != group.members[member_id]:
        records.append(change.put(Kind.MEMBER, member_id, value))
    current = group.currents[member_id]
    if current.epoch == STATIC_LEAVE_EPOCH:
        records.append(change.put(Kind.CURRENT, member_id, replace(current, epoch=group.epoch)))
    return records


def _free_partitions(change: GroupChange, member_id: str, *, may_be_late: bool) -> None:
    """Free the partitions that a joining member had and that are not in its target; if the join may be late, only when
    the member confirms it."""
    current, target = change.group.currents[member_id], change.group.targets[member_id].partitions
    own = current.assigned | current.revoking
    leaving = own - target
    if not leaving or (current.is_joining and leaving == current.revoking):
        return
    if may_be_late and current.epoch == change.group.epoch:
        next_epoch(change)
    began = CurrentValue(
        epoch=change.group.epoch,
        previous_epoch=current.epoch if may_be_late else -1,
        assigned=own & target,
        revoking=leaving if may_be_late else NO_PARTITIONS,
        is_joining=may_be_late,
        extra=current.extra,
    )
    change.add([change.put(Kind.CURRENT, member_id, began)])


def _renew(group: Group, request: Heartbeat, limits: GroupLimits) -> tuple[Records, HeartbeatReply]:
    member_id = request.member_id
    before, current = _member(group, request)
    held = current.assigned | current.revoking
    is_behind = request.member_epoch != current.epoch
    if is_behind and (
        request.member_epoch != current.previous_epoch or not (request.owned is None or request.owned <= held)
    ):
        raise FencedMemberEpochError(
            f"member {member_id!r} of group {group.group_id!r} comes with epoch {request.member_epoch};"
            f" its epoch is {current.epoch}"
        )
    change = GroupChange(group)
    value = _requested_value(request, before, limits)
    if value is not before:
        change.add([change.put(Kind.MEMBER, member_id, value)])
        if needs_new_target(group, before, value, change.group):
            retarget(change, Resolver(request.view))
    if not is_behind:
        is_confirmed = current.is_joining and not request.is_on_behalf
        _move_on(change, member_id, owned=NO_PARTITIONS if is_confirmed and request.owned is None else request.owned)
    elif current.is_joining:
        change.add([change.put(Kind.CURRENT, member_id, replace(current, is_joining=False))])
    after = change.group.currents[member_id]
    sends_assignment = (
        is_behind
        or request.wants_assignment
        or bool(after.revoking)
        or after.assigned != current.assigned
        or (request.owned is not None and request.owned != after.assigned)
    )
    return change.records, _reply(change.group, member_id, sends_assignment=sends_assignment)


def _leave(group: Group, request: Heartbeat) -> tuple[Records, HeartbeatReply]:
    member_id = request.member_id
    _, current = _member(group, request)
    reply = HeartbeatReply(member_id, request.member_epoch, None, 0)
    if request.member_epoch == LEAVE_EPOCH:
        return _without(group, [member_id], request.view, request.now_ms), reply
    if current.epoch == STATIC_LEAVE_EPOCH:
        return [], reply
    change = GroupChange(group)
    kept = current.assigned & group.targets[member_id].partitions
    away = CurrentValue(epoch=STATIC_LEAVE_EPOCH, assigned=kept, extra=current.extra)
    change.add([change.put(Kind.CURRENT, member_id, away)])
    return change.records, reply


def _member(group: Group, request: Heartbeat) -> tuple[MemberValue, CurrentValue]:
    """Return the member of a heartbeat; raise if the group does not have it."""
    if request.instance_id:
        former_id = group.instances.get(request.instance_id)
        if former_id is not None and former_id != request.member_id:
            raise FencedInstanceIdError(
                f"another member has taken the place of {request.member_id!r} under the instance id"
                f" {request.instance_id!r} of group {group.group_id!r}"
            )
    member, current = group.members.get(request.member_id), group.currents.get(request.member_id)
    is_other = member is not None and (
        member.is_classic or bool(request.instance_id and member.instance_id != request.instance_id)
    )
    if member is None or current is None or is_other:
        raise UnknownMemberIdError(f"{request.member_id!r} is no member of group {group.group_id!r}: join (epoch 0)")
    return member, current


def _requested_value(request: Heartbeat, before: MemberValue, limits: GroupLimits) -> MemberValue:
    """Return the member's new value; fields that the heartbeat leaves out are unchanged. `before` if all are."""
    values: dict[str, Any] = {
        "instance_id": before.instance_id or request.instance_id,
        "rack": request.rack or before.rack,
        "client_id": request.client_id or before.client_id,
        "client_host": request.client_host or before.client_host,
        "topics": before.topics if request.topics is None else tuple(sorted(set(request.topics))),
        "pattern": before.pattern if request.pattern is None else request.pattern,
        "assignor": request.assignor or before.assignor,
        "session_timeout_ms": request.session_timeout_ms or before.session_timeout_ms or limits.session_timeout_ms,
        "rebalance_timeout_ms": (
            request.rebalance_timeout_ms or before.rebalance_timeout_ms or limits.rebalance_timeout_ms
        ),
        "is_streamed": before.is_streamed if request.is_streamed is None else request.is_streamed,
    }
    # Nearly every heartbeat only renews the session: `replace` would cost more than all the rest of it.
    if all(getattr(before, name) == value for name, value in values.items()):
        return before
    return replace(before, **values)


def _without(group: Group, leaving: Iterable[str], view: TopicsView, now_ms: int) -> Records:
    change = GroupChange(group)
    change.add(change.put(kind, member_id, None) for member_id in leaving for kind in MEMBER_KINDS)
    retarget(change, Resolver(view), now_ms=now_ms)
    return change.records


# ---- Reconciliation with the target


def _move_on(change: GroupChange, member_id: str, *, owned: Partitions | None = None) -> None:
    """Reconcile the member with its target; `owned` is its report with the current epoch."""
    group = change.group
    before = group.currents[member_id]
    if before.revoking and owned is not None and not before.revoking & owned:
        before = replace(before, revoking=NO_PARTITIONS, is_joining=False)
        change.add([change.put(Kind.CURRENT, member_id, before)])
    after = _reconcile(change.group, member_id)
    if after is not before:
        change.add([change.put(Kind.CURRENT, member_id, after)])


def _reconcile(group: Group, member_id: str) -> CurrentValue:
    """Return the member's next assignment; the same object if nothing changes."""
    current, target = group.currents[member_id], group.targets[member_id].partitions
    if current.epoch == JOIN_EPOCH:
        current = replace(current, epoch=group.epoch, previous_epoch=-1)
    own = current.assigned | current.revoking
    if not current.assigned <= target or current.revoking & target:
        assert group.epoch > current.epoch, "a target changes only with the epoch"
        leaving = own - target
        current = replace(
            current,
            epoch=group.epoch,
            previous_epoch=current.epoch,
            assigned=own & target,
            revoking=leaving,
            gained=NO_PARTITIONS,
        )
    if current.revoking or len(current.assigned) == len(target):
        return current
    owners = group.owners
    free = frozenset(partition for partition in target - current.assigned if partition not in owners)
    if not free:
        return current
    is_new_epoch = group.epoch != current.epoch
    assigned = current.assigned | free
    return replace(
        current,
        epoch=group.epoch,
        previous_epoch=current.epoch if is_new_epoch else current.previous_epoch,
        assigned=target if len(assigned) == len(target) else assigned,
        gained=free if is_new_epoch else current.gained | free,
    )


def _reply(group: Group, member_id: str, *, sends_assignment: bool) -> HeartbeatReply:
    member, current = group.members[member_id], group.currents[member_id]
    return HeartbeatReply(
        member_id,
        current.epoch,
        tuple(sorted_partitions(current.assigned)) if sends_assignment else None,
        member.session_timeout_ms,
        is_revoking=bool(current.revoking),
        rebalance_timeout_ms=member.rebalance_timeout_ms,
    )
