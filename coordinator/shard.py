"""The groups of one partition of `__consumer_offsets`, while this broker leads it in one leader epoch.

    led --> loading --> leading --> over               a new epoch has a new shard: nothing is carried over
               |
               '--> broken                             the log has records that this version cannot read

While it loads, requests get COORDINATOR_LOAD_IN_PROGRESS. While it leads, decisions are appended to the partition
(`raft.runtime` over `partition_log`); replies rest only on state below the high watermark. When the epoch is over,
speculative state is dropped, waiting requests fail, and member streams end, so that members find the next coordinator.

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
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, Protocol

from tidelog.coordinator.background_work import BackgroundWork
from tidelog.coordinator.classic_rounds import ROUND, ClassicRounds
from tidelog.coordinator.hosts import ShardHost
from tidelog.coordinator.loading import Progress, Turns, load, wait_until_confirmed
from tidelog.coordinator.machine import GroupMachine, members_to_notify
from tidelog.coordinator.partition_log import PartitionLog
from tidelog.coordinator.records import DECISION_BYTES_MAX, Decision, Kind, MemberValue
from tidelog.coordinator.requests import STATIC_LEAVE_EPOCH, ExpireMember, GroupSummary, Heartbeat, HeartbeatReply
from tidelog.coordinator.state import EMPTY, CoordinatorState, Group
from tidelog.coordinator.topics_view import SubscriptionIndex
from tidelog.model.errors import CorruptBatchError, CorruptStateError, DamagedLogError, TidelogError
from tidelog.model.group_errors import (
    CoordinatorLoadingError,
    CoordinatorNotAvailableError,
    NotCoordinatorError,
    StaleMemberEpochError,
    UnknownMemberIdError,
)
from tidelog.model.ids import Epoch, NodeId, Offset, TopicId
from tidelog.model.maps import sorted_items
from tidelog.raft.runtime import StateMachineRuntime
from tidelog.replication.leader_replica import LeaderReplica

LOGGER = logging.getLogger(__name__)

RETRY_S = 0.5
_SESSION, _REBALANCE = "session", "rebalance"

MemberKey = tuple[str, str]
"""(group, member id)."""


class Phase(Enum):
    LOADING = "loading"
    LEADING = "leading"
    BROKEN = "broken"
    OVER = "over"


class StreamHandle(Protocol):
    """The parts of `MemberStream` that a shard uses."""

    def notify(self) -> None: ...

    def end(self, error: TidelogError | None) -> None: ...


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
        self.decided.update({record.key.group: None for each in decisions for record in each.records})
        return decisions, reply

    def encode(self, records: Sequence[Decision]) -> list[bytes]:
        entries = super().encode(records)
        assert len(entries) == 1, "gathered decisions fit one batch"
        self.in_flight = {}
        for record in (record for each in records for record in each.records):
            members = self.in_flight.setdefault(record.key.group, {})
            if record.key.kind == Kind.MEMBER:
                members[record.key.member_id] = None
        return entries


def _has_same_assignments(old: Group | None, new: Group | None) -> bool:
    """Return whether no member can have an assignment change: most commits only have offsets."""
    if old is None or new is None:
        return new is None
    return old.currents is new.currents and old.targets is new.targets and old.info is new.info


def _weigh(decisions: Sequence[Decision]) -> int:
    return sum(decision.size for decision in decisions)


class Shard:
    """See the module. Created when the leader epoch begins; `end` when it is over."""

    def __init__(self, host: ShardHost, leader: LeaderReplica) -> None:
        self.leader = leader
        self.number = leader.replica.partition_id.partition
        self.phase = Phase.LOADING
        self.subscriptions = SubscriptionIndex()
        self.streams: dict[MemberKey, StreamHandle] = {}
        self.machine = _Machine(host)
        self._host = host
        self._load_error = ""
        self._log = PartitionLog(leader, self._committed)
        self.runtime: StateMachineRuntime[CoordinatorState] = StateMachineRuntime(
            self.machine,
            self._log,
            EMPTY,
            waiting_max=host.waiting_max,
            gather_max=min(DECISION_BYTES_MAX, leader.log.config.message_bytes_max),
            weigh=_weigh,
            on_failure=host.failed,
        )
        self.timers = host.timers.new_set(self._due)
        self.rounds = ClassicRounds(self, host)
        self._revoking: dict[MemberKey, int] = {}
        """Epoch in which each member was asked to revoke partitions."""
        self._busy: Counter[MemberKey] = Counter()
        """Heartbeats in progress, by member."""
        self._broken: dict[MemberKey, None] = {}
        """Members in their grace time."""
        self._sequences: dict[MemberKey, int] = {}
        """Sequence number of the last commit of each member that sends them."""
        self.background = BackgroundWork(self, host)
        self._loading = host.spawn(self._load(), name=f"load-groups-{self.number}")

    @property
    def is_leading(self) -> bool:
        return self.phase is Phase.LEADING

    @property
    def state(self) -> CoordinatorState:
        """The committed state."""
        return self.runtime.state

    @property
    def decided(self) -> Mapping[str, None]:
        """Groups with uncommitted decisions."""
        return self.machine.decided

    # Lifecycle.

    async def _load(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            # Without a load slot: this waits as long as too few replicas are in sync.
            await wait_until_confirmed(self.leader)
            began_s = loop.time()
            state, end, records = await self._read_log()
            self.runtime.load(state, end)
            topics = await self._start(state)
        except TidelogError as error:
            if self.phase is Phase.LOADING:
                self.phase, self._load_error = Phase.BROKEN, str(error)
                LOGGER.error("broker=%d groups of partition %d: %s", self._host.me, self.number, error)
            return
        if self.phase is not Phase.LOADING:
            return
        self.runtime.lead(Epoch(self.leader.leader_epoch), self._host.me)
        self.phase = Phase.LEADING
        self._host.loaded(self, loop.time() - began_s, records)
        # Topics may have changed since the last coordinator checked. An unknown topic is deleted, or the last
        # coordinator had newer metadata: it may go on for a moment after it was replaced.
        view = self._host.view
        unknown = sorted((topic for topic in topics if view.by_id(topic) is None), key=lambda topic: topic.int)
        if unknown:
            self.background.forget_deleted(unknown)
        self.background.topics_changed(list(self.subscriptions), ())
        await self._start_deadlines(state)
        await self.rounds.mixed.start(state)

    async def _read_log(self) -> tuple[CoordinatorState, Offset, int]:
        """Return (state, log end, number of records); retry transient errors."""
        while True:
            progress = Progress()
            try:
                # The retry delay is outside of the load slot: other partitions load meanwhile.
                async with self._host.load_slots:
                    return *await load(self.leader, progress), progress.records
            except CorruptStateError:
                raise
            except TidelogError as error:
                if self.phase is not Phase.LOADING:
                    raise
                if isinstance(error, CorruptBatchError | DamagedLogError):
                    self._host.report_corruption(self.leader, self.leader.log.start_offset)
                LOGGER.warning("broker=%d groups of partition %d, retry: %s", self._host.me, self.number, error)
                await asyncio.sleep(RETRY_S)

    async def _start(self, state: CoordinatorState) -> set[TopicId]:
        """Build rounds and index of the loaded groups. Return the topics of their offsets."""
        turns = Turns()
        topics: set[TopicId] = set()
        for group_id in sorted(state.groups):
            group = state.groups[group_id]
            topics.update(partition.topic_id for partition in group.offsets)
            self.subscriptions.put(group_id, group)
            if group.classic is not None and group.classic.members:
                self.rounds.load(group_id)
            await turns.maybe_yield()
        return topics

    async def _start_deadlines(self, state: CoordinatorState) -> None:
        """Start the sessions of loaded members, once the shard leads: before, they could not send heartbeats."""
        turns = Turns()
        for group_id, group in sorted_items(state.groups):
            for member_id in sorted(group.members):
                self._expect((group_id, member_id))
                await turns.maybe_yield()

    def end(self) -> None:
        """End the shard: its leader epoch is over."""
        self.phase = Phase.OVER
        leader = self.leader.replica.partition.leader
        self.runtime.follow(NodeId(leader) if leader >= 0 else None)
        # Tasks, streams and the parts of this shard form cycles that the garbage collector ignores after a load
        # (`gc.freeze`): they must not keep large objects alive.
        self.runtime.load(EMPTY, Offset(0))
        self.subscriptions = SubscriptionIndex()
        self.rounds.end(self._not_coordinator())
        self.timers.clear()
        for stream in list(self.streams.values()):
            stream.end(self._not_coordinator())
        self.background.end()
        self._loading.cancel()

    def _not_coordinator(self) -> NotCoordinatorError:
        leader = self.leader.replica.partition.leader
        who = f"broker {leader} does" if leader >= 0 else "no broker does now"
        return NotCoordinatorError(f"broker {self._host.me} does not coordinate the group; {who}", coordinator=leader)

    def check(self) -> None:
        """Raise the error for the client if this shard cannot answer."""
        if self.phase is Phase.LOADING:
            raise CoordinatorLoadingError(f"the groups of partition {self.number} are being loaded")
        if self.phase is Phase.BROKEN:
            raise CoordinatorNotAvailableError(f"the groups of partition {self.number}: {self._load_error}")
        if self.phase is Phase.OVER or not self._log.is_led:
            raise self._not_coordinator()

    def validate(self, *, thorough: bool = True) -> None:
        """Assert the invariants: only a leading shard decides and has deadlines; with `thorough`, deadlines and what
        else is known in memory are those of members. The groups themselves: `state.validate`."""
        runtime, is_leading = self.runtime, self.phase is Phase.LEADING
        runtime.validate()
        assert runtime.is_leading or not is_leading, "leads, and may not decide"
        assert is_leading or not runtime.is_leading, f"decides while it is {self.phase.value}"
        assert is_leading or not len(self.timers), f"has deadlines while it is {self.phase.value}"
        assert runtime.applied <= self.leader.log.end_offset or not is_leading, "applied more than its log has"
        assert all(count > 0 for count in self._busy.values()), "a heartbeat is in progress that is over"
        self.rounds.validate()
        if not thorough or not is_leading:
            return
        for key in self.timers:
            assert isinstance(key, tuple), "timer keys of a shard are tuples"
            assert key[0] == ROUND or self._member(key[1:]) is not None, f"a deadline of no member: {key}"
        for group_id, group in runtime.speculative.groups.items():
            is_committed = group is self.state.groups.get(group_id)
            assert is_committed or group_id in self.decided, f"{group_id} is decided on, and not among the decided"
        for member_key in (*self._revoking, *self._broken, *self._sequences):
            assert self._member(member_key) is not None, f"something is known of {member_key}, who is no member"

    # Requests.

    async def submit(self, request: object, *, is_own: bool = False) -> Any:
        """Return the reply once everything that it depends on has committed."""
        self.check()
        return await self.runtime.submit(request, is_own=is_own)

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

    def _committed(self, first: Offset, end: Offset) -> None:
        runtime = self.runtime
        if self.phase is not Phase.LEADING or not runtime.is_mine(first, Epoch(self.leader.leader_epoch)):
            return
        before, after = runtime.state, runtime.pending_state
        assert after is not None, "one entry is in flight at a time"
        changed, self.machine.in_flight = self.machine.in_flight, {}
        runtime.committed(end, after, mine=True)
        if not runtime.is_speculating:
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
                self._host.spawn(self._expire(key, epoch), name="expire-member")
        elif self._busy[group, member_id] and (group, member_id) not in self._broken:
            self.renew((group, member_id))
        else:
            current = member_entry[0].currents.get(member_id)
            epoch = STATIC_LEAVE_EPOCH if current is None else current.epoch
            self._host.spawn(self._expire(key, epoch), name="expire-member")

    async def _expire(self, timer: tuple[str, str, str], epoch: int) -> None:
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
