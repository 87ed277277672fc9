"""A classic group: its leader assigns the partitions, the coordinator runs the rebalance rounds. Pure.

    empty       --join--> preparing (waits briefly for more members)
    preparing   --all have joined, or the timeout has passed--> completing (a new generation; joins are answered)
                --no member is left--> empty
    completing  --the leader has sent the assignment and it is stored--> stable (syncs are answered)
                --a join with changes, a leave, an expired member--> preparing (syncs: REBALANCE_IN_PROGRESS)
    stable      --the same--> preparing (heartbeats: REBALANCE_IN_PROGRESS, so that all members join again)
    any         --the coordinator moves, or the group becomes a consumer group (`close`)--> dead

A group that was a consumer group begins in preparing.

Events in (`classic_requests`, `tick`, `stored`), effects out: answers to waiting requests, and a generation to store.
Only the outcome of a round is stored and, because of its offsets, that an empty group has begun one. A new coordinator
loads the last generation as stable, and its members continue. Time is an argument of each event; `deadline_ms` is when
`tick` is due.

Invariants:
- the leader is the first member that joined, and stays while it is a member;
- members get only their own assignment, after it is stored;
- the protocol is one that all members support: the first choice of most members;
- a member is removed if it sends no heartbeat in its session, or does not join or sync in the longest rebalance timeout
  of the group. A member with a waiting request is alive. Only its session removes a static member;
- every ticket is answered once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from tidelog.coordinator.classic_requests import (
    ClassicEffects,
    GroupMigratedError,
    JoinedMember,
    JoinGroup,
    JoinReply,
    LeaveGroup,
    StoreGeneration,
    SyncGroup,
    SyncReply,
    check_size,
)
from tidelog.coordinator.limits import GroupLimits
from tidelog.coordinator.records import ClassicMember, ClassicValue
from tidelog.coordinator.state import Group
from tidelog.model.errors import InvalidRequestError, TidelogError
from tidelog.model.group_errors import (
    CoordinatorNotAvailableError,
    FencedInstanceIdError,
    GroupFullError,
    IllegalGenerationError,
    InconsistentGroupProtocolError,
    InvalidSessionTimeoutError,
    MemberIdRequiredError,
    RebalanceInProgressError,
    UnknownMemberIdError,
)


class ClassicState(Enum):
    EMPTY = "empty"
    PREPARING = "preparing"
    COMPLETING = "completing"
    STABLE = "stable"
    DEAD = "dead"


@dataclass(slots=True)
class _Member:
    member_id: str
    instance_id: str
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]
    topics: tuple[str, ...]
    expires_ms: int
    assignment: bytes = b""
    epoch: int = -1
    """Its member epoch in the former consumer group, until it joins again."""
    join_ticket: int | None = None
    sync_ticket: int | None = None

    def metadata(self, protocol: str) -> bytes:
        return dict(self.protocols).get(protocol, b"")

    def stored(self, protocol: str, *, is_shown: bool = True) -> ClassicMember:
        """The member as of a generation; metadata and assignment only if they are shown."""
        return ClassicMember(
            self.member_id,
            self.instance_id,
            self.client_id,
            self.client_host,
            self.session_timeout_ms,
            self.rebalance_timeout_ms,
            self.metadata(protocol) if is_shown else b"",
            self.assignment if is_shown else b"",
        )

    @property
    def is_waiting(self) -> bool:
        return self.join_ticket is not None or self.sync_ticket is not None


@dataclass(slots=True)
class _Out:
    """Effects that are being gathered."""

    answers: list[tuple[int, object]] = field(default_factory=list)
    store: StoreGeneration | None = None

    def finish(self) -> ClassicEffects:
        return ClassicEffects(self.store, tuple(self.answers))  # type: ignore[arg-type]  # replies of all requests


class ClassicGroup:
    def __init__(self, group_id: str, limits: GroupLimits, *, stored: Group | None, now_ms: int) -> None:
        """`stored` is the group in the committed state: its last generation continues, with full sessions."""
        self.group_id = group_id
        self.limits = limits
        self.state = ClassicState.EMPTY
        self.generation = 0 if stored is None else stored.epoch
        self.protocol_type = ""
        self.protocol = ""
        self.leader = ""
        self.members: dict[str, _Member] = {}
        """In the order in which they joined."""
        self.pending: dict[str, int] = {}
        """Member ids that were assigned and have not joined yet, with their deadlines."""
        self._round_ends_ms = -1
        self._round_began_ms = -1
        self._is_initial = False
        self._storing = -1
        """The generation being stored; -1 for none."""
        if stored is not None and stored.classic is not None and stored.classic.members:
            self._load(stored.classic, now_ms)

    def _load(self, value: ClassicValue, now_ms: int) -> None:
        self.state = ClassicState.STABLE
        self.protocol_type, self.protocol, self.leader = value.protocol_type, value.protocol, value.leader
        for each in value.members:
            self.members[each.member_id] = _Member(
                each.member_id,
                each.instance_id,
                each.client_id,
                each.client_host,
                each.session_timeout_ms,
                each.rebalance_timeout_ms,
                ((value.protocol, each.metadata),),
                value.topics,
                now_ms + each.session_timeout_ms,
                each.assignment,
                each.epoch,
            )
        if any(each.epoch >= 0 for each in value.members):
            self._prepare(now_ms, _Out())  # it was a consumer group, whose members have no generation in common

    @property
    def deadline_ms(self) -> int | None:
        """When `tick` is due next."""
        times = [member.expires_ms for member in self.members.values() if not member.is_waiting]
        times += self.pending.values()
        # While a generation is on its way to the log, its outcome ends the round, not the time.
        if self._round_ends_ms >= 0 and self._storing < 0:
            times.append(self._round_ends_ms)
        return min(times, default=None)

    def catch_up(self, epoch: int) -> None:
        """Continue generations from the stored epoch: the group may have been a consumer group while it was empty."""
        if self.state is ClassicState.EMPTY and not self.members:
            self.generation = max(self.generation, epoch)

    # Events.

    def join(self, request: JoinGroup) -> ClassicEffects:
        out = _Out()
        try:
            self._join(request, out)
        except TidelogError as error:
            out.answers.append((request.ticket, error))
        return out.finish()

    def sync(self, request: SyncGroup) -> ClassicEffects:
        out = _Out()
        try:
            self._sync(request, out)
        except TidelogError as error:
            out.answers.append((request.ticket, error))
        return out.finish()

    def heartbeat(self, member_id: str, generation: int, now_ms: int, instance_id: str = "") -> None:
        """Renew the member's session; raise if it has to join. It never waits, so it has no ticket."""
        member = self._member(member_id, instance_id, generation)
        member.expires_ms = now_ms + member.session_timeout_ms
        if self.state is ClassicState.PREPARING:
            raise self._joining()

    def leave(self, request: LeaveGroup) -> ClassicEffects:
        out = _Out()
        errors: list[TidelogError | None] = []
        for member_id, instance_id in request.members:
            try:
                self._leave(member_id, instance_id, request.now_ms, out)
                errors.append(None)
            except TidelogError as error:
                errors.append(error)
        self._complete_if_ready(request.now_ms, out)
        out.answers.append((request.ticket, tuple(errors)))
        return out.finish()

    def tick(self, now_ms: int) -> ClassicEffects:
        out = _Out()
        for member_id in [each for each, until_ms in self.pending.items() if until_ms <= now_ms]:
            del self.pending[member_id]
        for member in list(self.members.values()):
            if not member.is_waiting and member.expires_ms <= now_ms:
                self._remove(member, now_ms, out)
        if 0 <= self._round_ends_ms <= now_ms and self._storing < 0:
            if self.state is ClassicState.PREPARING:
                self._complete(now_ms, out)
            else:
                self._drop_silent(now_ms, out)
        self._complete_if_ready(now_ms, out)
        return out.finish()

    def stored(self, generation: int, now_ms: int, error: TidelogError | None = None) -> ClassicEffects:
        """Take the outcome of `store`. A generation that another round has replaced is ignored."""
        out = _Out()
        if self._storing != generation:
            return out.finish()
        self._storing = -1
        if isinstance(error, GroupMigratedError):
            return self.close(error)
        if self.state is not ClassicState.COMPLETING or generation != self.generation:
            return out.finish()
        if error is not None:
            self._answer_syncs(out, error, now_ms)
            for member in self.members.values():
                member.assignment = b""
            self._prepare(now_ms, out)
            self._complete_if_ready(now_ms, out)
            return out.finish()
        self.state = ClassicState.STABLE
        self._round_ends_ms = -1
        for member in self.members.values():
            if member.sync_ticket is not None:
                out.answers.append((member.sync_ticket, self._sync_reply(member)))
                member.sync_ticket = None
                member.expires_ms = now_ms + member.session_timeout_ms
        return out.finish()

    def close(self, error: TidelogError) -> ClassicEffects:
        """End the group on this coordinator; waiting requests get the error."""
        out = _Out()
        for member in self.members.values():
            self._supersede(member, out, error)
        self.members.clear()
        self.pending.clear()
        self.state = ClassicState.DEAD
        self._round_ends_ms = -1
        return out.finish()

    def check_commit(self, member_id: str, generation: int, now_ms: int, instance_id: str = "") -> None:
        """Raise unless this member may commit now; called before `CommitOffsets` of a classic member is submitted."""
        member = self._member(member_id, instance_id, generation)
        if self.state is ClassicState.COMPLETING:
            raise RebalanceInProgressError(f"group {self.group_id!r} waits for the assignment of a new generation")
        member.expires_ms = now_ms + member.session_timeout_ms

    # Joining.

    def _join(self, request: JoinGroup, out: _Out) -> None:
        self._check_join(request)
        if request.instance_id:
            place = self._at_instance(request.instance_id)
            if place is not None and not request.member_id:
                self._take_place(place, request, out)
                return
            if place is not None and place.member_id != request.member_id:
                raise FencedInstanceIdError(
                    f"another member of group {self.group_id!r} has the instance id {request.instance_id!r}"
                )
        member = self.members.get(request.member_id) if request.member_id else None
        if member is not None:
            self._join_again(member, request, out)
        elif request.member_id and request.member_id not in self.pending:
            raise UnknownMemberIdError(f"{request.member_id!r} is no member of group {self.group_id!r}")
        elif not request.member_id and request.needs_known_id and not request.instance_id:
            self.pending[request.new_member_id] = request.now_ms + request.session_timeout_ms
            raise MemberIdRequiredError("join again with this member id", member_id=request.new_member_id)
        else:
            self.pending.pop(request.member_id, None)
            self._add(request, out)

    def _check_join(self, request: JoinGroup) -> None:
        limits = self.limits
        if self.state is ClassicState.DEAD:
            raise CoordinatorNotAvailableError(f"group {self.group_id!r} is not coordinated here any more")
        if not limits.session_timeout_min_ms <= request.session_timeout_ms <= limits.session_timeout_max_ms:
            raise InvalidSessionTimeoutError(
                f"a session timeout of {request.session_timeout_ms} ms is outside of {limits.session_timeout_min_ms}"
                f" to {limits.session_timeout_max_ms} ms"
            )
        check_size(request, limits)
        is_known = request.member_id in self.members or request.member_id in self.pending
        is_new = not is_known and self._at_instance(request.instance_id) is None
        if is_new and len(self.members) + len(self.pending) >= limits.members_max:
            raise GroupFullError(f"group {self.group_id!r} has {limits.members_max} members, the most it may have")
        others = [member for each, member in self.members.items() if each != request.member_id]
        if request.instance_id:
            others = [member for member in others if member.instance_id != request.instance_id]
        known = {name for name, _ in request.protocols}
        if not known or not request.protocol_type:
            raise InconsistentGroupProtocolError("a member names a protocol type and at least one protocol")
        if others and request.protocol_type != self.protocol_type:
            raise InconsistentGroupProtocolError(
                f"group {self.group_id!r} is of the protocol type {self.protocol_type!r}, not {request.protocol_type!r}"
            )
        if others and not known & self._common(others):
            raise InconsistentGroupProtocolError(
                f"the members of group {self.group_id!r} know {sorted(self._common(others))}, none of {sorted(known)}"
            )

    def _add(self, request: JoinGroup, out: _Out) -> None:
        member_id = request.member_id or request.new_member_id
        was_empty = not self.members
        self.members[member_id] = _Member(
            member_id,
            request.instance_id,
            request.client_id,
            request.client_host,
            request.session_timeout_ms,
            request.rebalance_timeout_ms,
            request.protocols,
            request.topics,
            request.now_ms + request.session_timeout_ms,
            join_ticket=request.ticket,
        )
        self.protocol_type = request.protocol_type
        if was_empty:
            self.leader = member_id
        if self.state is ClassicState.PREPARING and self._is_initial:
            longest = self._round_began_ms + self._longest_ms()
            self._round_ends_ms = min(request.now_ms + self.limits.initial_rebalance_delay_ms, longest)
        self._prepare(request.now_ms, out)
        self._complete_if_ready(request.now_ms, out)

    def _join_again(self, member: _Member, request: JoinGroup, out: _Out) -> None:
        is_same = member.protocols == request.protocols or (
            # Loaded from the log: what is known of it is the chosen protocol alone.
            len(member.protocols) == 1
            and dict(request.protocols).get(self.protocol) == member.metadata(self.protocol)
            and self.state is ClassicState.STABLE
        )
        self._supersede(member, out, RebalanceInProgressError("the member has joined again"))
        member.expires_ms = request.now_ms + request.session_timeout_ms
        goes_on = (self.state is ClassicState.COMPLETING and is_same) or (
            self.state is ClassicState.STABLE and is_same and member.member_id != self.leader
        )
        member.protocols, member.topics = request.protocols, request.topics
        member.session_timeout_ms = request.session_timeout_ms
        member.rebalance_timeout_ms = request.rebalance_timeout_ms
        if goes_on:
            # A repeated join with unchanged metadata (the reply was lost, or the client retried): no rebalance.
            out.answers.append((request.ticket, self._join_reply(member)))
            return
        member.join_ticket = request.ticket
        self._prepare(request.now_ms, out)
        self._complete_if_ready(request.now_ms, out)

    def _take_place(self, old: _Member, request: JoinGroup, out: _Out) -> None:
        """Replace a static member that returns under a new id; if it is unchanged, no rebalance follows."""
        self._supersede(old, out, FencedInstanceIdError(f"another member took the instance id {old.instance_id!r}"))
        is_same = old.metadata(self.protocol) == dict(request.protocols).get(self.protocol)
        new = replace(
            old,
            member_id=request.new_member_id,
            client_id=request.client_id,
            client_host=request.client_host,
            session_timeout_ms=request.session_timeout_ms,
            rebalance_timeout_ms=request.rebalance_timeout_ms,
            protocols=request.protocols,
            topics=request.topics,
            expires_ms=request.now_ms + request.session_timeout_ms,
        )
        # The new member keeps the position of the old one: the order of the members stays.
        self.members = {(new if m is old else m).member_id: new if m is old else m for m in self.members.values()}
        was_leader = self.leader == old.member_id
        if was_leader:
            self.leader = new.member_id
        if self.state is ClassicState.STABLE and is_same and self._choose() == self.protocol:
            out.store = self._to_store(request.now_ms)
            out.answers.append((request.ticket, replace(self._join_reply(new), skip_assignment=was_leader)))
            return
        new.join_ticket = request.ticket
        self._prepare(request.now_ms, out)
        self._complete_if_ready(request.now_ms, out)

    def _supersede(self, member: _Member, out: _Out, error: TidelogError) -> None:
        """Fail older waiting requests of the member: it has sent a newer one."""
        for ticket in (member.join_ticket, member.sync_ticket):
            if ticket is not None:
                out.answers.append((ticket, error))
        member.join_ticket = member.sync_ticket = None

    # Rounds.

    def _prepare(self, now_ms: int, out: _Out) -> None:
        """Begin a rebalance: every member has to join again."""
        if self.state is ClassicState.PREPARING:
            return
        if self.state is ClassicState.COMPLETING:
            self._answer_syncs(out, self._joining(), now_ms)
        self._is_initial = self.state is ClassicState.EMPTY
        self.state = ClassicState.PREPARING
        self._storing = -1
        self._round_began_ms = now_ms
        delay_ms = self.limits.initial_rebalance_delay_ms if self._is_initial else self._longest_ms()
        self._round_ends_ms = now_ms + delay_ms
        if self._is_initial:
            # Its offsets must not expire while the first round of a group that was empty for long is under way.
            seen = ClassicValue(generation=self.generation, protocol_type=self.protocol_type, empty_since_ms=now_ms)
            out.store = StoreGeneration(group=self.group_id, value=seen, now_ms=now_ms)

    def _complete_if_ready(self, now_ms: int, out: _Out) -> None:
        """Complete the round once all members have joined; the first round of an empty group waits for its delay."""
        if self.state is not ClassicState.PREPARING:
            return
        is_complete = not self.pending and all(m.join_ticket is not None for m in self.members.values())
        if not self.members or (is_complete and not self._is_initial):
            self._complete(now_ms, out)

    def _complete(self, now_ms: int, out: _Out) -> None:
        """Begin a new generation of the joined members, and of static members that have not joined."""
        for member in list(self.members.values()):
            if member.join_ticket is None and not member.instance_id:
                del self.members[member.member_id]
        joined = [member for member in self.members.values() if member.join_ticket is not None]
        if self.members and not joined:
            # Static members alone, all away: there is nobody to lead. Their sessions decide.
            self._round_ends_ms = now_ms + self._longest_ms()
            return
        self._is_initial = False
        self.generation += 1
        if not self.members:
            self.state = ClassicState.EMPTY
            self.leader = self.protocol = ""
            self._round_ends_ms = -1
            out.store = self._to_store(now_ms)
            return
        if self.leader not in self.members or self.members[self.leader].join_ticket is None:
            self.leader = joined[0].member_id
        self.protocol = self._choose()
        self.state = ClassicState.COMPLETING
        self._round_ends_ms = now_ms + self._longest_ms()
        for member in self.members.values():
            member.assignment, member.epoch = b"", -1
            if member.join_ticket is not None:
                out.answers.append((member.join_ticket, self._join_reply(member)))
                member.join_ticket = None
                member.expires_ms = now_ms + member.session_timeout_ms

    def _drop_silent(self, now_ms: int, out: _Out) -> None:
        """Remove members that have not synced in time."""
        self._round_ends_ms = -1
        silent = [m for m in self.members.values() if m.sync_ticket is None and not m.instance_id]
        for member in silent:
            self._remove(member, now_ms, out)
        self._prepare(now_ms, out)

    def _sync(self, request: SyncGroup, out: _Out) -> None:
        member = self._member(request.member_id, request.instance_id, request.generation)
        for given, ours in ((request.protocol_type, self.protocol_type), (request.protocol, self.protocol)):
            if given is not None and given != ours:
                raise InconsistentGroupProtocolError(f"group {self.group_id!r} uses {ours!r}, not {given!r}")
        if sum(len(assignment) for _, assignment in request.assignments) > self._assignments_bytes_max():
            raise InvalidRequestError("the assignments are too large to be stored; subscribe to fewer topics")
        member.expires_ms = request.now_ms + member.session_timeout_ms
        if self.state is ClassicState.PREPARING:
            raise self._joining()
        if self.state is ClassicState.STABLE:
            out.answers.append((request.ticket, self._sync_reply(member)))
            return
        self._supersede(member, out, RebalanceInProgressError("the member has asked again"))
        member.sync_ticket = request.ticket
        if member.member_id == self.leader and self._storing < 0:
            assignments = dict(request.assignments)
            for each in self.members.values():
                each.assignment = assignments.get(each.member_id, b"")
            self._storing = self.generation
            out.store = self._to_store(request.now_ms)

    def _assignments_bytes_max(self) -> int:
        return self.limits.classic_metadata_bytes_max * 4

    # Leaving.

    def _leave(self, member_id: str, instance_id: str, now_ms: int, out: _Out) -> None:
        if instance_id:
            place = self._at_instance(instance_id)
            if place is None:
                raise UnknownMemberIdError(f"nobody in group {self.group_id!r} has the instance id {instance_id!r}")
            if member_id and place.member_id != member_id:
                raise FencedInstanceIdError(
                    f"another member of group {self.group_id!r} has the instance id {instance_id!r}"
                )
            member_id = place.member_id
        if self.pending.pop(member_id, None) is not None:
            return
        member = self.members.get(member_id)
        if member is None:
            raise UnknownMemberIdError(f"{member_id!r} is no member of group {self.group_id!r}")
        self._remove(member, now_ms, out)

    def _remove(self, member: _Member, now_ms: int, out: _Out) -> None:
        self._supersede(member, out, UnknownMemberIdError(f"{member.member_id!r} was taken out of the group"))
        del self.members[member.member_id]
        if self.leader == member.member_id:
            self.leader = next(iter(self.members), "")
        self._prepare(now_ms, out)

    # Parts.

    def _member(self, member_id: str, instance_id: str, generation: int) -> _Member:
        if self.state is ClassicState.DEAD:
            raise CoordinatorNotAvailableError(f"group {self.group_id!r} is not coordinated here any more")
        place = self._at_instance(instance_id)
        if place is not None and place.member_id != member_id:
            raise FencedInstanceIdError(
                f"another member of group {self.group_id!r} has the instance id {instance_id!r}"
            )
        member = self.members.get(member_id)
        if member is None:
            raise UnknownMemberIdError(f"{member_id!r} is no member of group {self.group_id!r}: join again")
        if generation != self.generation and not 0 <= member.epoch <= generation < self.generation:
            raise IllegalGenerationError(
                f"generation {generation} of group {self.group_id!r} is not the present one, {self.generation}"
            )
        return member

    def _at_instance(self, instance_id: str) -> _Member | None:
        if not instance_id:
            return None
        return next((member for member in self.members.values() if member.instance_id == instance_id), None)

    def _joining(self) -> RebalanceInProgressError:
        return RebalanceInProgressError(f"group {self.group_id!r} makes a new generation: join again")

    def _longest_ms(self) -> int:
        return max((member.rebalance_timeout_ms for member in self.members.values()), default=0)

    def _common(self, members: Iterable[_Member]) -> set[str]:
        return set.intersection(*({name for name, _ in member.protocols} for member in members))

    def _choose(self) -> str:
        common = self._common(self.members.values())
        votes: dict[str, int] = {}
        for member in self.members.values():
            choice = next((name for name, _ in member.protocols if name in common), None)
            if choice is not None:
                votes[choice] = votes.get(choice, 0) + 1
        return min(votes, key=lambda name: (-votes[name], name), default=self.protocol)

    def _answer_syncs(self, out: _Out, error: TidelogError, now_ms: int) -> None:
        for member in self.members.values():
            if member.sync_ticket is not None:
                out.answers.append((member.sync_ticket, error))
                member.sync_ticket = None
                member.expires_ms = now_ms + member.session_timeout_ms

    def _join_reply(self, member: _Member) -> JoinReply:
        members: tuple[JoinedMember, ...] = ()
        if member.member_id == self.leader:
            members = tuple(
                JoinedMember(each.member_id, each.instance_id, each.metadata(self.protocol))
                for each in self.members.values()
            )
        return JoinReply(member.member_id, self.generation, self.protocol_type, self.protocol, self.leader, members)

    def _sync_reply(self, member: _Member) -> SyncReply:
        return SyncReply(self.protocol_type, self.protocol, member.assignment)

    def _to_store(self, now_ms: int) -> StoreGeneration:
        members = tuple(each.stored(self.protocol) for each in self.members.values())
        value = ClassicValue(
            generation=self.generation,
            protocol_type=self.protocol_type,
            protocol=self.protocol,
            leader=self.leader,
            members=members,
            empty_since_ms=-1 if members else now_ms,
            topics=tuple(sorted({topic for each in self.members.values() for topic in each.topics})),
        )
        return StoreGeneration(group=self.group_id, value=value, now_ms=now_ms)
