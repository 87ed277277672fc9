"""The groups of one partition of `__consumer_offsets`, while this broker leads it (`partition_shard`).

Member streams end with the shard, so that members find the next coordinator.

After each commit, for each changed group: members with changes are notified on their streams, timers and streams of
removed members end, and the subscription index is updated.

Deadlines (`timers`), all in memory:

    session      since the member's own last heartbeat. It does not expire while a heartbeat of the member waits for its
                 answer
    grace        instead of the session, when a dynamic member's stream broke without a leave. Its requests that still
                 wait renew nothing
    reconnect    instead of the session, when a dynamic member that had a stream has none here: the coordinator is new,
                 or has ended the stream. Counted from when requests are answered
    rebalance    since the member was asked to revoke partitions
    round        of a classic group (`classic_rounds`)

Every member has one of the first three: a member in the log gets it with the commit, even if its caller is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from tidelog.coordinator.background_work import BackgroundWork
from tidelog.coordinator.classic_rounds import ROUND, ClassicRounds
from tidelog.coordinator.consumer_group import has_changes
from tidelog.coordinator.hosts import ShardHost
from tidelog.coordinator.loading import LogFormat, Turns
from tidelog.coordinator.machine import GroupMachine, members_to_notify
from tidelog.coordinator.partition_shard import RETRY_S, PartitionShard, Phase
from tidelog.coordinator.records import Decision, GroupRecord, Kind, MemberValue, decode_record
from tidelog.coordinator.requests import STATIC_LEAVE_EPOCH, ExpireMember, GroupSummary, Heartbeat, HeartbeatReply
from tidelog.coordinator.state import EMPTY, CoordinatorState, Group, apply
from tidelog.coordinator.topics_view import SubscriptionIndex
from tidelog.model.errors import InvalidTransactionStateError, TidelogError
from tidelog.model.group_errors import NotCoordinatorError, StaleMemberEpochError, UnknownMemberIdError
from tidelog.model.ids import Offset, TopicId
from tidelog.model.maps import sorted_items
from tidelog.replication.leader_replica import LeaderReplica

LOGGER = logging.getLogger(__name__)

GROUPS: LogFormat[CoordinatorState, GroupRecord] = LogFormat(EMPTY, decode_record, apply)
"""A partition of `__consumer_offsets`."""
_SESSION, _REBALANCE = "session", "rebalance"

PENDING_SEQUENCES_MAX = 10_000
"""Producers whose last commit in a transaction has its number kept."""

MemberKey = tuple[str, str]
"""(group, member id)."""
PendingKey = tuple[str, int]
"""(transactional id, producer id)."""


class StreamHandle(Protocol):
    """The parts of `MemberStream` that a shard uses."""

    def notify(self) -> None: ...

    def end(self, error: TidelogError | None) -> None: ...

    def validate(self) -> None: ...

    @property
    def is_notified(self) -> bool: ...


class _Machine(GroupMachine):
    """Decides with the current topics, however long a request waited; tracks the groups that uncommitted decisions
    change."""

    def __init__(self, host: ShardHost) -> None:
        super().__init__(host.limits)
        self.in_flight: dict[str, dict[str, None]] = {}
        """Groups that the append in flight changes, with their added, changed or removed members."""
        self.decided: dict[str, None] = {}
        """Groups with decisions since nothing was in flight last."""
        self._host = host

    def decide(self, state: CoordinatorState, request: Any, *, offset: Offset) -> tuple[Sequence[Decision], Any]:
        if getattr(request, "view", self._host.view) is not self._host.view:
            request = replace(request, view=self._host.view)
        decisions, reply = super().decide(state, request, offset=offset)
        self.decided.update(
            {record.key.group: None for each in decisions for record in each.records if record.key.group}
        )
        return decisions, reply

    def encode(self, records: Sequence[Decision]) -> list[bytes]:
        entries = super().encode(records)
        assert len(entries) == 1, "gathered decisions fit one batch"
        self.in_flight = {}
        for record in (record for each in records for record in each.records if record.key.group):
            members = self.in_flight.setdefault(record.key.group, {})
            if record.key.kind == Kind.MEMBER:
                members[record.key.member_id] = None
        return entries


def _has_same_assignments(old: Group | None, new: Group | None) -> bool:
    """Return whether no member can have an assignment change: most commits only have offsets."""
    if old is None or new is None:
        return new is None
    return old.currents is new.currents and old.targets is new.targets and old.info is new.info


class Shard(PartitionShard[CoordinatorState]):
    """See the module."""

    CONTENTS = "groups"
    SUBJECT = "group"

    def __init__(self, host: ShardHost, leader: LeaderReplica) -> None:
        self.subscriptions = SubscriptionIndex()
        self.streams: dict[MemberKey, StreamHandle] = {}
        self.machine = _Machine(host)
        super().__init__(host, leader, self.machine, GROUPS)
        self._host = host
        self.rounds = ClassicRounds(self, host)
        self._revoking: dict[MemberKey, int] = {}
        """Epoch in which each member was asked to revoke partitions."""
        self._busy: Counter[MemberKey] = Counter()
        """Heartbeats in progress, by member."""
        self._broken: dict[MemberKey, None] = {}
        """Members in their grace time."""
        self._sequences: dict[MemberKey, int] = {}
        """Sequence number of the last commit of each member that sends them."""
        self._pending_sequences: OrderedDict[PendingKey, tuple[int, int]] = OrderedDict()
        """Epoch and sequence number of the last commit of each producer in a transaction, the newest at the end."""
        self._expiring: Counter[tuple[str, str, str]] = Counter()
        """Deadlines that have passed, and are being acted on."""
        self._has_deadlines = False
        """Whether the sessions of loaded members have started."""
        self._loaded_topics: set[TopicId] = set()
        """Of the offsets that were loaded, until the shard leads."""
        self.background = BackgroundWork(self, host)

    @property
    def size(self) -> int:
        return len(self.state.groups)

    @property
    def decided(self) -> Mapping[str, None]:
        """Groups with uncommitted decisions."""
        return self.machine.decided

    # Lifecycle.

    async def _prepare(self, state: CoordinatorState) -> None:
        """Build rounds and index of the loaded groups."""
        turns = Turns()
        for group_id in sorted(state.groups):
            group = state.groups[group_id]
            self._loaded_topics.update(partition.topic_id for partition in (*group.offsets, *group.unstable))
            self.subscriptions.put(group_id, group)
            if group.classic is not None and group.classic.members:
                self.rounds.load(group_id)
            await turns.maybe_yield()

    async def _begin(self, state: CoordinatorState) -> None:
        # Topics may have changed since the last coordinator checked. An unknown topic is deleted, or the last
        # coordinator had newer metadata: it may go on for a moment after it was replaced.
        view = self._host.view
        topics, self._loaded_topics = self._loaded_topics, set()
        unknown = sorted((topic for topic in topics if view.by_id(topic) is None), key=lambda topic: topic.int)
        if unknown:
            self.background.forget_deleted(unknown)
        self.background.topics_changed(list(self.subscriptions), ())
        await self._start_deadlines(state)
        await self.rounds.mixed.start(state)

    async def _start_deadlines(self, state: CoordinatorState) -> None:
        """Start the sessions of loaded members, once the shard leads: before, they could not send heartbeats."""
        turns = Turns()
        for group_id, group in sorted_items(state.groups):
            for member_id in sorted(group.members):
                self._expect((group_id, member_id))
                await turns.maybe_yield()
        self._has_deadlines = True

    def _close(self, error: NotCoordinatorError) -> None:
        self.subscriptions = SubscriptionIndex()
        self.rounds.end(error)
        for stream in list(self.streams.values()):
            stream.end(error)
        self.background.end()

    def validate(self, *, thorough: bool = True) -> None:
        """As `PartitionShard.validate`; with `thorough`, deadlines and what else is known in memory are those of
        members. The groups themselves: `state.validate`."""
        super().validate(thorough=thorough)
        assert all(count > 0 for count in self._busy.values()), "a heartbeat is in progress that is over"
        self.rounds.validate()
        if not thorough or not self.is_leading:
            return
        for key in self.timers:
            assert isinstance(key, tuple), "timer keys of a shard are tuples"
            assert key[0] == ROUND or self._member(key[1:]) is not None, f"a deadline of no member: {key}"
        self._validate_deadlines()
        self.subscriptions.validate(self.state.groups)
        for group_id, group in self.runtime.speculative.groups.items():
            is_committed = group is self.state.groups.get(group_id)
            assert is_committed or group_id in self.decided, f"{group_id} is decided on, and not among the decided"
        for member_key in (*self._revoking, *self._broken, *self._sequences):
            assert self._member(member_key) is not None, f"something is known of {member_key}, who is no member"

    def _validate_deadlines(self) -> None:
        """Every member has a deadline, no later than its session; who was asked to revoke partitions has another one,
        and who would get another assignment is about to hear of it."""
        assert self._loading is not None, "has been started"
        now_s = self._loading.get_loop().time()
        for group_id, group in self.state.groups.items() if self._has_deadlines else ():
            for member_id, member in group.members.items():
                session = _SESSION, group_id, member_id
                at_s = self.timers.at(session)
                assert at_s is not None or self._expiring[session], f"{session} has no deadline"
                longest_s = max(member.session_timeout_ms / 1000, RETRY_S) + 0.001  # floats
                assert at_s is None or at_s - now_s <= longest_s, f"{session} ends in {at_s - now_s} s"
        for key in self._revoking:
            timer = _REBALANCE, *key
            assert self.timers.at(timer) is not None or self._expiring[timer], f"{key} may revoke for ever"
        for key, stream in self.streams.items():
            stream.validate()
            changed = self.state.group(key[0])
            if changed is not None and key[0] not in self.decided and has_changes(changed, key[1]):
                assert stream.is_notified, f"{key} is not notified of its changes"

    # Requests.

    async def heartbeat(self, request: Heartbeat) -> HeartbeatReply:
        """Handle a heartbeat of the member itself."""
        key = request.group, request.member_id
        self._broken.pop(key, None)
        self.renew(key)
        self._busy[key] += 1
        try:
            reply = await self.rounds.mixed.consumer_heartbeat(request)
        finally:
            self._busy[key] -= 1
            if not self._busy[key]:
                del self._busy[key]
        self.renew(key)
        self.note_revoking(key, reply)
        return reply

    async def changes(self, request: Heartbeat) -> HeartbeatReply:
        """Make a heartbeat in the name of a member, to send it its changes. It does not renew the session."""
        reply: HeartbeatReply = await self.submit(request, is_own=True)
        self.note_revoking((request.group, request.member_id), reply)
        return reply

    def _member(self, key: MemberKey) -> tuple[Group, MemberValue] | None:
        """Return (group, member), or None if it is no member."""
        group = self.state.group(key[0])
        member = None if group is None else group.members.get(key[1])
        return None if group is None or member is None else (group, member)

    def check_order(self, key: MemberKey, sequence: int) -> None:
        """Raise for a commit that a later one of the same member has overtaken. Commits are decided on arrival, so this
        is the order of the log. Member epochs reject commits that were sent to another shard."""
        if not sequence or self._member(key) is None:
            return
        last = self._sequences.get(key, 0)
        if sequence <= last:
            raise StaleMemberEpochError(f"commit {sequence} of member {key[1]} comes after its commit {last}")
        self._sequences[key] = sequence

    def check_newest(self, key: MemberKey, sequence: int) -> None:
        """Raise if a later commit of the same member has arrived since."""
        if sequence and self._sequences.get(key, sequence) != sequence:
            raise StaleMemberEpochError(f"commit {sequence} of member {key[1]} was overtaken by a later one")

    def check_pending_order(self, producer: PendingKey, epoch: int, sequence: int) -> None:
        """As `check_order`, for commits in transactions."""
        if not sequence:
            return
        last_epoch, last = self._pending_sequences.pop(producer, (-1, 0))
        newest = max(last, sequence) if epoch == last_epoch else sequence
        self._pending_sequences[producer] = (last_epoch, last) if epoch < last_epoch else (epoch, newest)
        if len(self._pending_sequences) > PENDING_SEQUENCES_MAX:
            self._pending_sequences.popitem(last=False)
        self.check_newest_pending(producer, epoch, sequence)

    def check_newest_pending(self, producer: PendingKey, epoch: int, sequence: int) -> None:
        """As `check_newest`: the coordinator of the transaction was asked since. It ignores other epochs."""
        last_epoch, last = self._pending_sequences.get(producer, (-1, 0))
        if sequence and epoch == last_epoch and sequence < last:
            raise InvalidTransactionStateError(
                f"commit {sequence} of producer {producer[1]} in a transaction was overtaken by its commit {last}"
            )

    def with_live_state(self, summary: GroupSummary) -> GroupSummary:
        """Return the summary with the live state and member count of a classic group, which the log lacks."""
        classic = self.rounds.get(summary.group)
        if classic is None or (summary.kind == "consumer" and not classic.members):
            return summary
        return replace(summary, state=classic.state.value, members=len(classic.members))

    # Streams.

    def attach(self, key: MemberKey, stream: StreamHandle) -> None:
        """Use this stream for the member from now on."""
        former = self.streams.get(key)
        self.streams[key] = stream
        self._broken.pop(key, None)
        self.renew(key)
        if former is not None and former is not stream:
            former.end(None)
        found = self._member(key)
        if found is not None and has_changes(found[0], key[1]):
            stream.notify()  # others have joined with the same commit, or since

    def detach(self, key: MemberKey, stream: StreamHandle, *, is_broken: bool) -> None:
        """Remove the member's stream. `is_broken`: the member's side ended it without a leave."""
        if self.streams.get(key) is not stream:
            return
        del self.streams[key]
        member_entry = self._member(key)
        if member_entry is None or member_entry[1].instance_id or self.phase is not Phase.LEADING:
            return
        if is_broken:
            self._broken[key] = None
        wait_ms = self._host.grace_ms if is_broken else self._host.reconnect_ms
        due_s = asyncio.get_running_loop().time() + wait_ms / 1000
        before_s = self.timers.at((_SESSION, *key))
        self.timers.set((_SESSION, *key), due_s if before_s is None else min(due_s, before_s))

    # Commits.

    def _state_changed(self, before: CoordinatorState, after: CoordinatorState) -> None:
        changed, self.machine.in_flight = self.machine.in_flight, {}
        if not self.runtime.is_speculating:
            self.machine.decided.clear()
        for group_id, members in changed.items():
            self._group_changed(group_id, members, before, after)

    def _group_changed(
        self, group_id: str, members: Iterable[str], before: CoordinatorState, after: CoordinatorState
    ) -> None:
        """Update timers, index and streams. `members` may have been added, changed or removed."""
        old, new = before.group(group_id), after.group(group_id)
        for member_id in members:
            if new is not None and member_id in new.members:
                self._expect((group_id, member_id))
            else:
                self._member_gone((group_id, member_id))
        if (old is None) != (new is None) or (old is not None and new is not None and old.members is not new.members):
            self.subscriptions.put(group_id, new)
        self.rounds.mixed.group_changed(group_id, old, new)
        if self.streams and not _has_same_assignments(old, new):
            for member_id in members_to_notify(before, after, group_id):
                stream = self.streams.get((group_id, member_id))
                if stream is not None:
                    stream.notify()

    def _member_gone(self, key: MemberKey) -> None:
        self.timers.cancel((_SESSION, *key))
        self.timers.cancel((_REBALANCE, *key))
        self._revoking.pop(key, None)
        self._broken.pop(key, None)
        self._sequences.pop(key, None)
        stream = self.streams.get(key)
        if stream is not None:
            stream.end(UnknownMemberIdError(f"member {key[1]} is not in group {key[0]} any more"))

    # Deadlines.

    def renew(self, key: MemberKey) -> None:
        """Renew the member's session."""
        member_entry = self._member(key)
        if member_entry is not None and self.phase is Phase.LEADING and key not in self._broken:
            due_s = asyncio.get_running_loop().time() + member_entry[1].session_timeout_ms / 1000
            self.timers.set((_SESSION, *key), due_s)

    def _expect(self, key: MemberKey) -> None:
        """Start the session of a member in the log that has no deadline yet."""
        member_entry = self._member(key)
        if member_entry is None or self.phase is not Phase.LEADING or self.timers.at((_SESSION, *key)) is not None:
            return
        member = member_entry[1]
        wait_ms = member.session_timeout_ms
        if member.is_streamed and not member.instance_id:
            wait_ms = min(wait_ms, self._host.reconnect_ms)
        self.timers.set((_SESSION, *key), asyncio.get_running_loop().time() + wait_ms / 1000)

    def note_revoking(self, key: MemberKey, reply: HeartbeatReply) -> None:
        if not reply.is_revoking or self._member(key) is None or self.phase is not Phase.LEADING:
            self._revoking.pop(key, None)
            self.timers.cancel((_REBALANCE, *key))
        elif self._revoking.get(key) != reply.member_epoch:
            self._revoking[key] = reply.member_epoch
            due_s = asyncio.get_running_loop().time() + reply.rebalance_timeout_ms / 1000
            self.timers.set((_REBALANCE, *key), due_s)

    def _due(self, key: Hashable) -> None:
        assert isinstance(key, tuple), "timer keys of a shard are tuples"
        if key[0] == ROUND:
            self.rounds.due(key[1])
            return
        what, group, member_id = key
        member_entry = self._member((group, member_id))
        if member_entry is None:
            return
        if what == _REBALANCE:
            epoch = self._revoking.pop((group, member_id), None)
            if epoch is not None:
                self._start_expiry(key, epoch)
        elif self._busy[group, member_id] and (group, member_id) not in self._broken:
            self.renew((group, member_id))
        else:
            current = member_entry[0].currents.get(member_id)
            epoch = STATIC_LEAVE_EPOCH if current is None else current.epoch
            self._start_expiry(key, epoch)

    def _start_expiry(self, timer: tuple[str, str, str], epoch: int) -> None:
        self._expiring[timer] += 1
        self._host.spawn(self._expire(timer, epoch), name="expire-member")

    async def _expire(self, timer: tuple[str, str, str], epoch: int) -> None:
        try:
            await self._expire_member(timer, epoch)
        finally:
            self._expiring[timer] -= 1
            if not self._expiring[timer]:
                del self._expiring[timer]

    async def _expire_member(self, timer: tuple[str, str, str], epoch: int) -> None:
        what, group, member_id = timer
        is_rebalance = what == _REBALANCE
        if self.timers.at(timer) is not None:
            return  # a heartbeat or another revocation has set the deadline again
        LOGGER.info("group=%s member=%s epoch=%d: its %s has timed out", group, member_id, epoch, what)
        request = ExpireMember(
            group=group,
            member_id=member_id,
            member_epoch=epoch,
            view=self._host.view,
            now_ms=self._host.now_ms(),
            is_rebalance=is_rebalance,
        )
        try:
            await self.submit(request, is_own=True)
        except TidelogError as error:
            LOGGER.warning("group=%s member=%s is not removed yet: %s", group, member_id, error)
            if self.phase is Phase.LEADING and self.timers.at(timer) is None:
                if is_rebalance:
                    self._revoking[group, member_id] = epoch
                self.timers.set(timer, asyncio.get_running_loop().time() + RETRY_S)
            return
        if not is_rebalance and self.timers.at(timer) is None and self._member((group, member_id)) is not None:
            # Its epoch has changed meanwhile. Requests of its broken stream do not renew the session.
            if (group, member_id) in self._broken:
                self.timers.set(timer, asyncio.get_running_loop().time() + RETRY_S)
            else:
                self.renew((group, member_id))
