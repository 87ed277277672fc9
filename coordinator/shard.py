"""One partition of `__consumer_offsets` that this broker leads, in one leader epoch: its groups.

    led --> loading --> leading --> over               a new epoch is a new shard: nothing is carried over
               |
               '--> broken                             the log holds what this version cannot read: an operator's case

While it loads, requests hear COORDINATOR_LOAD_IN_PROGRESS. While it leads, decisions are appended to the partition
(`world.replicated` over `partition_log`); what is told to anybody is below the high watermark. When the epoch is over
speculation is dropped, whoever waits is told, and the streams of members end, so that they look for the next one.

After each commit, for each group that it has changed: members with news are asked for on their streams, timers and
streams of members that are gone end, and the index of subscriptions follows.

Deadlines (`timers`), all in memory:

    session      since the member's own last heartbeat. It does not end while a heartbeat of the member waits for its
                 answer
    grace        instead of the session, when a dynamic member's stream has broken without a goodbye. What of it still
                 waits for an answer renews nothing
    reconnect    instead of the session, when a dynamic member that had a stream has none here: the coordinator is a new
                 one, or has ended the stream. Counted from when requests are answered
    rebalance    since the member was told to give something up
    round        of a classic group (`classic_rounds`)

Every member has the first, second or third: one that the log shows gets it with the commit, whoever waited for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Hashable, Iterable, Sequence
from dataclasses import replace
from enum import Enum
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from tidelog.coordinator.background_work import BackgroundWork
from tidelog.coordinator.classic_rounds import ROUND, ClassicRounds
from tidelog.coordinator.loading import Progress, Turns, confirmed, load
from tidelog.coordinator.machine import GroupMachine, pending_news, timeouts
from tidelog.coordinator.partition_log import PartitionLog
from tidelog.coordinator.records import DECISION_BYTES_MAX, Decision, Kind, MemberValue
from tidelog.coordinator.requests import (
    STATIC_LEAVE_EPOCH,
    ExpireMember,
    GroupSummary,
    Heartbeat,
    HeartbeatReply,
    TopicsView,
)
from tidelog.coordinator.state import EMPTY, CoordinatorState, Group
from tidelog.coordinator.timers import Timers
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
from tidelog.replication.leading import Leading
from tidelog.world.replicated import ReplicatedMachine

if TYPE_CHECKING:
    from tidelog.coordinator.limits import GroupLimits
    from tidelog.coordinator.streams import MemberStream

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


class ShardHost(Protocol):
    """What a shard needs of the broker's coordinator."""

    me: NodeId
    timers: Timers
    limits: GroupLimits
    waiting_max: int
    load_slots: asyncio.Semaphore
    random: Random

    @property
    def view(self) -> TopicsView: ...

    def now_ms(self) -> int:
        """Of the wall: what is stored with offsets."""
        ...

    def steady_ms(self) -> int:
        """About the same, and never jumps: what deadlines are counted in."""
        ...

    @property
    def grace_ms(self) -> int: ...

    @property
    def reconnect_ms(self) -> int: ...

    @property
    def offsets_retention_ms(self) -> int: ...

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]: ...

    def failed(self, error: BaseException) -> None: ...

    def found_rot(self, leading: Leading, offset: int) -> None: ...

    async def deleted_topics(self, topics: Sequence[TopicId]) -> list[TopicId]: ...

    def loaded(self, shard: Shard, seconds: float, records: int) -> None: ...


class _Machine(GroupMachine):
    """Decides on topics as they are now, however long a request has waited; remembers which groups are changed by what
    has not committed."""

    def __init__(self, host: ShardHost) -> None:
        super().__init__(host.limits)
        self.under_way: dict[str, dict[str, None]] = {}
        """By the append under way, with the members of each that have come, changed or gone."""
        self.decided: dict[str, None] = {}
        """Since nothing was under way last."""
        self._host = host

    def decide(self, state: CoordinatorState, request: Any, *, offset: Offset) -> tuple[Sequence[Decision], Any]:
        if getattr(request, "view", self._host.view) is not self._host.view:
            request = replace(request, view=self._host.view)
        decisions, reply = super().decide(state, request, offset=offset)
        self.decided.update({record.key.group: None for each in decisions for record in each.records})
        return decisions, reply

    def encode(self, records: Sequence[Decision]) -> list[bytes]:
        entries = super().encode(records)
        assert len(entries) == 1, "what is gathered together fits one batch"
        self.under_way = {}
        for record in (record for each in records for record in each.records):
            members = self.under_way.setdefault(record.key.group, {})
            if record.key.kind == Kind.MEMBER:
                members[record.key.member_id] = None
        return entries


def _is_as_dealt(old: Group | None, new: Group | None) -> bool:
    """Whether nothing has changed that a member could have to hear of: most commits are of offsets."""
    if old is None or new is None:
        return new is None
    return old.currents is new.currents and old.targets is new.targets and old.info is new.info


def _weigh(decisions: Sequence[Decision]) -> int:
    return sum(decision.size for decision in decisions)


class Shard:
    """See the module. Made when the epoch begins; `end` when it is over."""

    def __init__(self, host: ShardHost, leading: Leading) -> None:
        self.leading = leading
        self.number = leading.replica.partition_id.partition
        self.phase = Phase.LOADING
        self.subscriptions = SubscriptionIndex()
        self.streams: dict[MemberKey, MemberStream] = {}
        self.machine = _Machine(host)
        self._host = host
        self._trouble = ""
        self._log = PartitionLog(leading, self._committed)
        self.replicated: ReplicatedMachine[CoordinatorState] = ReplicatedMachine(
            self.machine,
            self._log,
            EMPTY,
            waiting_max=host.waiting_max,
            gather_max=min(DECISION_BYTES_MAX, leading.log.config.message_bytes_max),
            weigh=_weigh,
            on_failure=host.failed,
        )
        self.timers = host.timers.new_set(self._due)
        self.rounds = ClassicRounds(self, host)
        self._revoking: dict[MemberKey, int] = {}
        """In which epoch the member was told to give something up."""
        self._busy: Counter[MemberKey] = Counter()
        """Heartbeats that wait for their answer."""
        self._broken: dict[MemberKey, None] = {}
        """Members in their grace."""
        self._sequences: dict[MemberKey, int] = {}
        """Of the last commit of each member that counts them."""
        self.background = BackgroundWork(self, host)
        self._loading = host.spawn(self._load(), name=f"load-groups-{self.number}")

    @property
    def is_leading(self) -> bool:
        return self.phase is Phase.LEADING

    @property
    def state(self) -> CoordinatorState:
        """What is committed."""
        return self.replicated.state

    # Life.

    async def _load(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            # Without a place among those that read: it may take as long as too few replicas are in sync.
            await confirmed(self.leading)
            began_s = loop.time()
            state, end, records = await self._read_log()
            self.replicated.load(state, end)
            topics = await self._start(state)
        except TidelogError as error:
            if self.phase is Phase.LOADING:
                self.phase, self._trouble = Phase.BROKEN, str(error)
                LOGGER.error("broker=%d groups of partition %d: %s", self._host.me, self.number, error)
            return
        if self.phase is not Phase.LOADING:
            return
        self.replicated.lead(Epoch(self.leading.leader_epoch), self._host.me)
        self.phase = Phase.LEADING
        self._host.loaded(self, loop.time() - began_s, records)
        # What has become of topics since the last coordinator looked. A topic that is not known here is deleted, or the
        # last coordinator had newer metadata than this one has: it may go on for a moment after it was replaced.
        view = self._host.view
        unknown = sorted((topic for topic in topics if view.by_id(topic) is None), key=lambda topic: topic.int)
        if unknown:
            self.background.forget_deleted(unknown)
        self.background.topics_changed(list(self.subscriptions), ())
        await self._start_deadlines(state)
        await self.rounds.mixed.start(state)

    async def _read_log(self) -> tuple[CoordinatorState, Offset, int]:
        """Until it is read, or cannot be: (state, where the log ends, how many records it has)."""
        while True:
            progress = Progress()
            try:
                # A log that cannot be read now does not keep the others waiting.
                async with self._host.load_slots:
                    return *await load(self.leading, progress), progress.records
            except CorruptStateError:
                raise
            except TidelogError as error:
                if self.phase is not Phase.LOADING:
                    raise
                if isinstance(error, CorruptBatchError | DamagedLogError):
                    self._host.found_rot(self.leading, self.leading.log.start_offset)
                LOGGER.warning("broker=%d groups of partition %d, again: %s", self._host.me, self.number, error)
                await asyncio.sleep(RETRY_S)

    async def _start(self, state: CoordinatorState) -> set[TopicId]:
        """Rounds and index of what was loaded. Returns the topics that there are offsets of."""
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
        """Of the members that were loaded. Not before it leads: who could not be heard is not late."""
        turns = Turns()
        for one in timeouts(state):
            self._expect((one.group, one.member_id))
            await turns.maybe_yield()

    def end(self) -> None:
        """The epoch is over here."""
        self.phase = Phase.OVER
        leader = self.leading.replica.partition.leader
        self.replicated.follow(NodeId(leader) if leader >= 0 else None)
        # Tasks, streams and the parts of this shard hold each other, and after a load the collector does not look at
        # them any more (`gc.freeze`): what is large must not hang on them.
        self.replicated.load(EMPTY, Offset(0))
        self.subscriptions = SubscriptionIndex()
        self.rounds.end(self._not_coordinator())
        self.timers.clear()
        for stream in list(self.streams.values()):
            stream.end(self._not_coordinator())
        self.background.end()
        self._loading.cancel()

    def _not_coordinator(self) -> NotCoordinatorError:
        leader = self.leading.replica.partition.leader
        who = f"broker {leader} does" if leader >= 0 else "nobody does now"
        return NotCoordinatorError(f"broker {self._host.me} does not coordinate the group; {who}", coordinator=leader)

    def check(self) -> None:
        """Raises what whoever asks has to know if this shard cannot answer."""
        if self.phase is Phase.LOADING:
            raise CoordinatorLoadingError(f"the groups of partition {self.number} are being read")
        if self.phase is Phase.BROKEN:
            raise CoordinatorNotAvailableError(f"the groups of partition {self.number}: {self._trouble}")
        if self.phase is Phase.OVER or not self._log.is_led:
            raise self._not_coordinator()

    # Requests.

    async def submit(self, request: object, *, is_own: bool = False) -> Any:
        """The reply, when everything that it rests on has committed."""
        self.check()
        return await self.replicated.submit(request, is_own=is_own)

    async def heartbeat(self, request: Heartbeat) -> HeartbeatReply:
        """Of the member itself."""
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

    async def news(self, request: Heartbeat) -> HeartbeatReply:
        """A heartbeat in the name of a member: what it shall be told. Its session goes on."""
        reply: HeartbeatReply = await self.submit(request, is_own=True)
        self.note_revoking((request.group, request.member_id), reply)
        return reply

    def _member(self, key: MemberKey) -> tuple[Group, MemberValue] | None:
        """With its group; None if it is no member."""
        group = self.state.group(key[0])
        member = None if group is None else group.members.get(key[1])
        return None if group is None or member is None else (group, member)

    def check_order(self, key: MemberKey, sequence: int) -> None:
        """Raises for a commit that a later one of the same member has overtaken. A commit is decided as soon as it has
        come, so that this is the order of the log. What was sent to another shard is refused by epochs."""
        if not sequence or self._member(key) is None:
            return
        last = self._sequences.get(key, 0)
        if sequence <= last:
            raise StaleMemberEpochError(f"commit {sequence} of member {key[1]} comes after its commit {last}")
        self._sequences[key] = sequence

    def check_newest(self, key: MemberKey, sequence: int) -> None:
        """Raises if a later commit of the same member has come since this one."""
        if sequence and self._sequences.get(key, sequence) != sequence:
            raise StaleMemberEpochError(f"commit {sequence} of member {key[1]} was overtaken by a later one")

    def as_it_is(self, summary: GroupSummary) -> GroupSummary:
        """With what the rounds of a classic group know and the log does not."""
        classic = self.rounds.get(summary.group)
        if classic is None or (summary.kind == "consumer" and not classic.members):
            return summary
        return replace(summary, state=classic.state.value, members=len(classic.members))

    # Streams.

    def attach(self, key: MemberKey, stream: MemberStream) -> None:
        """The member speaks on this stream from now on."""
        former = self.streams.get(key)
        self.streams[key] = stream
        self._broken.pop(key, None)
        self.renew(key)
        if former is not None and former is not stream:
            former.end(None)

    def detach(self, key: MemberKey, stream: MemberStream, *, is_broken: bool) -> None:
        """`is_broken`: the member's side has ended it, without a goodbye."""
        if self.streams.get(key) is not stream:
            return
        del self.streams[key]
        found = self._member(key)
        if found is None or found[1].instance_id or self.phase is not Phase.LEADING:
            return
        if is_broken:
            self._broken[key] = None
        wait_ms = self._host.grace_ms if is_broken else self._host.reconnect_ms
        due_s = asyncio.get_running_loop().time() + wait_ms / 1000
        before_s = self.timers.at((_SESSION, *key))
        self.timers.set((_SESSION, *key), due_s if before_s is None else min(due_s, before_s))

    # Commits.

    def _committed(self, first: Offset, end: Offset) -> None:
        replicated = self.replicated
        if self.phase is not Phase.LEADING or not replicated.is_mine(first, Epoch(self.leading.leader_epoch)):
            return
        before, after = replicated.state, replicated.promised
        assert after is not None, "one entry is under way at a time"
        changed, self.machine.under_way = self.machine.under_way, {}
        replicated.committed(end, after, mine=True)
        if not replicated.is_speculating:
            self.machine.decided.clear()
        for group_id, members in changed.items():
            self._group_changed(group_id, members, before, after)

    def _group_changed(
        self, group_id: str, members: Iterable[str], before: CoordinatorState, after: CoordinatorState
    ) -> None:
        """`members`: those that may have come, changed or gone."""
        old, new = before.group(group_id), after.group(group_id)
        for member_id in members:
            if new is not None and member_id in new.members:
                self._expect((group_id, member_id))
            else:
                self._member_gone((group_id, member_id))
        if (old is None) != (new is None) or (old is not None and new is not None and old.members is not new.members):
            self.subscriptions.put(group_id, new)
        self.rounds.mixed.group_changed(group_id, old, new)
        if self.streams and not _is_as_dealt(old, new):
            for member_id in pending_news(before, after, group_id):
                stream = self.streams.get((group_id, member_id))
                if stream is not None:
                    stream.tell_news()

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
        """The member lives."""
        found = self._member(key)
        if found is not None and self.phase is Phase.LEADING and key not in self._broken:
            due_s = asyncio.get_running_loop().time() + found[1].session_timeout_ms / 1000
            self.timers.set((_SESSION, *key), due_s)

    def _expect(self, key: MemberKey) -> None:
        """The log shows the member: if nobody counts its time yet, it has to be heard of."""
        found = self._member(key)
        if found is None or self.phase is not Phase.LEADING or self.timers.at((_SESSION, *key)) is not None:
            return
        member = found[1]
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
        assert isinstance(key, tuple), "the keys of this shard"
        if key[0] == ROUND:
            self.rounds.due(key[1])
            return
        what, group, member_id = key
        found = self._member((group, member_id))
        if found is None:
            return
        if what == _REBALANCE:
            epoch = self._revoking.pop((group, member_id), None)
            if epoch is not None:
                self._host.spawn(self._expire(key, epoch), name="expire-member")
        elif self._busy[group, member_id] and (group, member_id) not in self._broken:
            self.renew((group, member_id))
        else:
            current = found[0].currents.get(member_id)
            epoch = STATIC_LEAVE_EPOCH if current is None else current.epoch
            self._host.spawn(self._expire(key, epoch), name="expire-member")

    async def _expire(self, timer: tuple[str, str, str], epoch: int) -> None:
        what, group, member_id = timer
        is_rebalance = what == _REBALANCE
        if self.timers.at(timer) is not None:
            return  # it was heard of, or told something else, since the deadline passed
        LOGGER.info("group=%s member=%s epoch=%d: its %s is over", group, member_id, epoch, what)
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
            LOGGER.warning("group=%s member=%s is not put out yet: %s", group, member_id, error)
            if self.phase is Phase.LEADING and self.timers.at(timer) is None:
                if is_rebalance:
                    self._revoking[group, member_id] = epoch
                self.timers.set(timer, asyncio.get_running_loop().time() + RETRY_S)
            return
        if not is_rebalance and self.timers.at(timer) is None and self._member((group, member_id)) is not None:
            # It was led on meanwhile. What its broken stream had left on the way is no sign of life.
            if (group, member_id) in self._broken:
                self.timers.set(timer, asyncio.get_running_loop().time() + RETRY_S)
            else:
                self.renew((group, member_id))
