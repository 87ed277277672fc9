"""Consumer groups and their committed offsets.

Queries are answered from committed state, by a shard whose epoch is still the one in the metadata. The first request
for a coordinator creates the topic `__consumer_offsets`. Errors of a whole request are raised; errors of one partition,
member or group are in its result.

Limits: requests without a reply (`GroupCoordinator.waiting_max` for each shard, then THROTTLING_QUOTA_EXCEEDED), the
wait for a reply (`offsets.commit.timeout.ms`, then REQUEST_TIMED_OUT: it may be done), streams, groups of a shard.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

from tidelog.coordinator.classic_requests import (
    ClassicDetails,
    GroupMigratedError,
    JoinGroup,
    JoinReply,
    SyncGroup,
    SyncReply,
)
from tidelog.coordinator.consumer_protocol import PROTOCOL_TYPE as CONSUMER
from tidelog.coordinator.consumer_protocol import subscribed_topics
from tidelog.coordinator.coordinator import OFFSETS_TOPIC, GroupCoordinator
from tidelog.coordinator.hashing import partition_for
from tidelog.coordinator.machine import describe_group, fetch_offsets
from tidelog.coordinator.mixed_groups import DISPATCHES_MAX
from tidelog.coordinator.partition_shard import coordinator_errors
from tidelog.coordinator.queries import NOT_COMMITTED, describe_classic, summary_of, unstable_partitions
from tidelog.coordinator.records import sorted_partitions
from tidelog.coordinator.requests import (
    JOIN_EPOCH,
    CommitOffsets,
    Committed,
    DeleteGroup,
    DeleteOffsets,
    GroupDetails,
    GroupSummary,
    Heartbeat,
    HeartbeatReply,
    MemberSummary,
    OffsetToCommit,
    RemoveMembers,
)
from tidelog.coordinator.shard import Shard
from tidelog.coordinator.streams import Answer, MemberStream, Send
from tidelog.metadata.controller_client import ControllerClient
from tidelog.metadata.tail import MetadataTail
from tidelog.model.errors import InvalidRequestError, OverloadedError, TidelogError
from tidelog.model.group_errors import (
    CoordinatorNotAvailableError,
    FencedInstanceIdError,
    GroupIdNotFoundError,
    NonEmptyGroupError,
    UnknownMemberIdError,
    UnstableOffsetError,
)
from tidelog.model.ids import PartitionId, TopicId
from tidelog.services.authorization import CLUSTER, Operation, Resource, ResourceType
from tidelog.services.context import RequestContext
from tidelog.services.deadline import ends_at_deadline
from tidelog.services.group_router import GroupCounts, GroupRouter, MissingGroupError, by_ref, kind_of, split_in_pieces
from tidelog.services.guard import Guard
from tidelog.services.partition_lookup import (
    PartitionLookup,
    PartitionRef,
    Ref,
    TopicRef,
    check_named,
)
from tidelog.services.quotas import Charge
from tidelog.services.topic_lookup import read_id
from tidelog.world.slicing import sliced

__all__ = [
    "CLIENT_ID_LENGTH_MAX",
    "JOIN_EPOCH",
    "NOT_COMMITTED",
    "Answer",
    "ClassicDetails",
    "Committed",
    "GroupDetails",
    "GroupService",
    "GroupServiceConfig",
    "GroupSummary",
    "HeartbeatReply",
    "JoinGroup",
    "JoinReply",
    "MemberHeartbeat",
    "MemberSummary",
    "MissingGroupError",
    "OffsetToCommit",
    "SyncGroup",
    "SyncReply",
    "by_topic",
    "check_groups",
    "subscribed_topics",
]

GROUPS_PER_SLICE = 500
TOPICS_PER_SLICE = 1_000
"""Topics of a subscription that are authorized in one turn of the event loop."""
MEMBERS_PER_SLICE = 500
"""Members and groups listed in one turn of the event loop."""
OWNED_MAX = 50_000
"""Partitions that a heartbeat reports as owned."""
CLIENT_ID_LENGTH_MAX = 255
"""Kept characters of a client id: it is part of generated member ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupServiceConfig:
    streams_max: int = 20_000
    groups_max: int = 100_000
    """Groups of one shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberHeartbeat:
    """Joins, continues, reports or leaves; the epochs are those of `HeartbeatRequest` in groups.proto."""

    group: str
    member_id: str
    member_epoch: int
    instance_id: str = ""
    rack: str = ""
    client_id: str = ""
    """Empty: that of the request context."""
    topics: tuple[str, ...] | None = None
    """None: unchanged (in a join: no topics). The same holds for `pattern`."""
    pattern: str | None = None
    assignor: str = ""
    session_timeout_ms: int = 0
    rebalance_timeout_ms: int = 0
    owned: tuple[tuple[TopicRef, Sequence[int]], ...] | None = None
    """(topic, partitions); None: unchanged."""
    needs_member_id: bool = False
    """The service generates the id of a member that has none."""


class GroupService:
    def __init__(
        self,
        coordinator: GroupCoordinator,
        tail: MetadataTail,
        client: ControllerClient,
        config: GroupServiceConfig | None = None,
        *,
        guard: Guard | None = None,
    ) -> None:
        self.streams = 0
        self._router = GroupRouter(coordinator, tail, client)
        self._tail = tail
        self._guard = guard or Guard()
        self._lookup = PartitionLookup(lambda: tail.image, self._guard.authorizer)
        self.config = config or GroupServiceConfig()

    @property
    def config(self) -> GroupServiceConfig:
        return self._config

    @config.setter
    def config(self, config: GroupServiceConfig) -> None:
        self._config = config
        self._router.groups_max = config.groups_max

    @property
    def coordinator(self) -> GroupCoordinator:
        return self._router.coordinator

    @property
    def router(self) -> GroupRouter:
        return self._router

    @property
    def counts(self) -> GroupCounts:
        return self._router.counts

    @property
    def heartbeat_interval_ms(self) -> int:
        return self.coordinator.limits.heartbeat_interval_ms

    def _admit(self, context: RequestContext, operation: Operation, group: str) -> None:
        self._guard.authorize(context, operation, _group(group))
        self._guard.charge(context)

    def _shard(self, context: RequestContext, operation: Operation, group: str) -> Shard:
        self._admit(context, operation, group)
        return self._router.shard_of(group)

    async def _authorize_topics(self, context: RequestContext, topics: Iterable[str]) -> None:
        """A member may describe each topic that it subscribes to by name, as in Kafka."""
        async for topic in sliced(dict.fromkeys(topics), TOPICS_PER_SLICE):
            self._guard.authorize(context, Operation.DESCRIBE, topic)

    # Coordinators.

    @ends_at_deadline
    async def find_coordinators(self, context: RequestContext, groups: Sequence[str]) -> list[int | TidelogError]:
        """Returns the broker of each group, or why there is none. Creates the offsets topic if it does not exist."""
        check_groups(groups)
        errors: dict[str, TidelogError] = {}
        async for group in sliced(groups, GROUPS_PER_SLICE):
            try:
                self._admit(context, Operation.DESCRIBE, group)
                self._router.check_name(group)
            except TidelogError as error:
                errors[group] = error
        if len(errors) == len(set(groups)):
            return [errors[group] for group in groups]
        topic = await self._router.topic.get()
        brokers: list[int | TidelogError] = []
        async for group in sliced(groups, GROUPS_PER_SLICE):
            if group in errors:
                brokers.append(errors[group])
                continue
            leader = topic.partitions[partition_for(group, len(topic.partitions))].leader
            missing = f"the partition of group {group!r} in {OFFSETS_TOPIC} has no leader"
            brokers.append(leader if leader >= 0 else CoordinatorNotAvailableError(missing))
        return brokers

    # Membership.

    @ends_at_deadline
    async def heartbeat(self, context: RequestContext, request: MemberHeartbeat) -> HeartbeatReply:
        """Handles one heartbeat of a member without a stream."""
        self._admit(context, Operation.READ, request.group)
        await self._authorize_topics(context, request.topics or ())
        return (await self._router.heartbeat(self._heartbeat(context, request, is_streamed=False)))[1]

    def _heartbeat(self, context: RequestContext, request: MemberHeartbeat, *, is_streamed: bool) -> Heartbeat:
        member_id = request.member_id
        if not member_id and request.needs_member_id and request.member_epoch == JOIN_EPOCH:
            member_id = str(UUID(int=self.coordinator.random.getrandbits(128), version=4))
        return Heartbeat(
            group=request.group,
            member_id=member_id,
            member_epoch=request.member_epoch,
            view=self.coordinator.view,
            now_ms=self.coordinator.now_ms(),
            instance_id=request.instance_id,
            rack=request.rack,
            client_id=request.client_id or context.client_id[:CLIENT_ID_LENGTH_MAX],
            client_host=context.client_host,
            topics=request.topics,
            pattern=request.pattern,
            assignor=request.assignor,
            session_timeout_ms=request.session_timeout_ms,
            rebalance_timeout_ms=request.rebalance_timeout_ms,
            owned=None if request.owned is None else self._owned(request.owned),
            is_streamed=is_streamed,
        )

    def _owned(self, owned: Sequence[tuple[TopicRef, Sequence[int]]]) -> frozenset[PartitionId]:
        count = sum(len(numbers) for _, numbers in owned)
        if count > OWNED_MAX:
            raise InvalidRequestError(f"a heartbeat reports {count} owned partitions, at most {OWNED_MAX}")
        ids = self._tail.image.topic_ids
        partitions: set[PartitionId] = set()
        for topic, numbers in owned:
            if isinstance(topic, bytes):
                topic_id: UUID | None = read_id(topic, "topic id")
            else:
                topic_id = ids.get(topic)
            if topic_id is not None:  # an unknown topic is assigned to no member, so none waits for it
                partitions.update(PartitionId(TopicId(topic_id), number) for number in numbers)
        return frozenset(partitions)

    @ends_at_deadline
    async def membership(
        self, context: RequestContext, receive: Callable[[], Awaitable[MemberHeartbeat | None]], send: Send
    ) -> None:
        """Serves a member's stream from its first heartbeat to its end."""
        if self.streams >= self.config.streams_max:
            raise OverloadedError(f"{self.streams} members have streams here, at most {self.config.streams_max}")

        async def next_heartbeat() -> Heartbeat | None:
            request = await receive()
            if request is None:
                return None
            self._admit(context, Operation.READ, request.group)
            await self._authorize_topics(context, request.topics or ())
            return self._heartbeat(context, request, is_streamed=True)

        self.streams += 1
        try:
            await MemberStream(self._router, next_heartbeat, send).run()
        finally:
            self.streams -= 1

    @ends_at_deadline
    async def remove_members(
        self, context: RequestContext, group: str, member_ids: Sequence[str], instance_ids: Sequence[str]
    ) -> dict[str, TidelogError | None]:
        """Removes members of either kind of group; all of them if none is named."""
        return await self._remove_members(self._shard(context, Operation.READ, group), group, member_ids, instance_ids)

    async def _remove_members(
        self, shard: Shard, group: str, member_ids: Sequence[str], instance_ids: Sequence[str]
    ) -> dict[str, TidelogError | None]:
        classic = shard.rounds.get(group)
        if classic is not None and classic.members:
            names = [*((name, "") for name in member_ids), *(("", name) for name in instance_ids)]
            names = names or [(member_id, "") for member_id in classic.members]
            errors = await self._router.ask(shard, shard.rounds.leave(group, tuple(names)))
            return {name or instance: error for (name, instance), error in zip(names, errors, strict=True)}
        request = RemoveMembers(
            group=group,
            view=self.coordinator.view,
            now_ms=self.coordinator.now_ms(),
            member_ids=tuple(member_ids),
            instance_ids=tuple(instance_ids),
        )
        removed: dict[str, TidelogError | None] = await self._router.ask(shard, shard.submit(request))
        return removed

    # Classic groups. A join and a sync return when their rebalance is over.

    @ends_at_deadline
    async def join_group(self, context: RequestContext, group: str, request: JoinGroup) -> JoinReply:
        self._admit(context, Operation.READ, group)
        metadata = [data for _, data in request.protocols] if request.protocol_type == CONSUMER else []
        request = replace(
            request,
            client_id=context.client_id[:CLIENT_ID_LENGTH_MAX],
            client_host=context.client_host,
            topics=tuple(sorted({topic for data in metadata for topic in subscribed_topics(data)})),
        )
        await self._authorize_topics(context, request.topics)
        shard = self._router.shard_of(group)
        self._router.check_group_count(shard, group)
        return await coordinator_errors(shard, shard.rounds.join(group, request))

    @ends_at_deadline
    async def sync_group(self, context: RequestContext, group: str, request: SyncGroup) -> SyncReply:
        shard = self._shard(context, Operation.READ, group)
        return await coordinator_errors(shard, shard.rounds.sync(group, request))

    @ends_at_deadline
    async def classic_heartbeat(
        self, context: RequestContext, group: str, *, member_id: str, generation: int, instance_id: str = ""
    ) -> None:
        """Raises REBALANCE_IN_PROGRESS while the group forms a new generation."""
        shard = self._shard(context, Operation.READ, group)
        work = shard.rounds.heartbeat(group, member_id=member_id, generation=generation, instance_id=instance_id)
        await coordinator_errors(shard, work)

    @ends_at_deadline
    async def leave_group(
        self, context: RequestContext, group: str, members: Sequence[tuple[str, str]]
    ) -> Sequence[TidelogError | None]:
        """Removes (member id, instance id) from either kind of group; returns the errors in their order."""
        self._admit(context, Operation.READ, group)
        for _ in range(DISPATCHES_MAX):
            shard = self._router.shard_of(group)
            try:
                if kind_of(shard, group) == CONSUMER:
                    return await self._leave_consumer_group(shard, group, members)
                return await self._router.ask(shard, shard.rounds.leave(group, tuple(members)))
            except GroupMigratedError as error:
                migrated = error  # it changed its protocol meanwhile
        raise migrated

    async def _leave_consumer_group(
        self, shard: Shard, group: str, named: Sequence[tuple[str, str]]
    ) -> Sequence[TidelogError | None]:
        members = {member.member_id: member.instance_id for member in describe_group(shard.state, group).members}
        by_instance = {instance_id: member_id for member_id, instance_id in members.items() if instance_id}
        leaving: list[str | TidelogError] = []
        for named_id, instance_id in named:
            member_id = by_instance.get(instance_id, "") if instance_id else named_id
            if member_id not in members:
                leaving.append(UnknownMemberIdError(f"{instance_id or named_id!r} is no member of group {group!r}"))
            elif instance_id and named_id and named_id != member_id:
                message = f"{member_id!r} has the instance id {instance_id!r} of group {group!r}"
                leaving.append(FencedInstanceIdError(message))
            else:
                leaving.append(member_id)
        found = list(dict.fromkeys(entry for entry in leaving if isinstance(entry, str)))
        removed = await self._remove_members(shard, group, found, ()) if found else {}
        return [removed[entry] if isinstance(entry, str) else entry for entry in leaving]

    # Offsets.

    @ends_at_deadline
    async def commit_offsets(
        self,
        context: RequestContext,
        group: str,
        offsets: Mapping[Ref, OffsetToCommit],
        *,
        member_id: str,
        member_epoch: int,
        instance_id: str = "",
        sequence: int = 0,
        allows_negative: bool = False,
    ) -> dict[Ref, TidelogError | None]:
        """`sequence` numbers a member's requests in their order; 0: it does not number them. Kafka stores negative
        offsets as they come (`allows_negative`)."""
        self._admit(context, Operation.READ, group)
        check_named(list(offsets))
        found = await self._lookup.find_all(context, Operation.READ, offsets, is_change=True)
        for ref, offset in offsets.items():
            if offset.offset < 0 and not allows_negative:
                found[ref] = InvalidRequestError(f"offset {offset.offset}: a committed offset is at least 0")
        named = {where: offsets[ref] for ref, where in found.items() if isinstance(where, PartitionId)}
        if not named:
            return {ref: where for ref, where in found.items() if isinstance(where, TidelogError)}
        shard, now_ms = self._router.shard_of(group), self.coordinator.now_ms()
        self._router.check_group_count(shard, group)
        shard.check_order((group, member_id), sequence)
        shard.rounds.check_commit(group, member_id, member_epoch, instance_id)
        requests = [
            CommitOffsets(
                group=group,
                member_id=member_id,
                member_epoch=member_epoch,
                instance_id=instance_id,
                offsets={partition: named[partition] for partition in piece},
                now_ms=now_ms,
            )
            for piece in split_in_pieces(list(named))
        ]
        pieces = [(request, list(request.offsets)) for request in requests]
        try:
            committed = await self._router.ask_in_pieces(
                shard, pieces, lambda: shard.check_newest((group, member_id), sequence)
            )
        except UnknownMemberIdError as error:
            if kind_of(shard, group) is None:
                raise MissingGroupError(str(error)) from error
            raise
        self.counts.commits += 1
        self.counts.committed_offsets += sum(error is None for error in committed.values())
        return by_ref(found, committed)

    @ends_at_deadline
    async def fetch_offsets(
        self,
        context: RequestContext,
        group: str,
        partitions: Iterable[PartitionRef] | None,
        *,
        member_id: str = "",
        member_epoch: int | None = None,
        require_stable: bool = False,
    ) -> dict[PartitionRef, Committed | TidelogError]:
        """`partitions` None: all offsets of the group whose topics the principal may describe, by `PartitionId`.
        `require_stable`: a partition for which an open transaction has an offset gets `UnstableOffsetError`."""
        self._admit(context, Operation.DESCRIBE, group)
        member = {"member_id": member_id, "member_epoch": member_epoch}
        found: dict[PartitionRef, PartitionId | TidelogError]
        if partitions is None:
            stored = self._router.shard_of(group).state.group(group)
            unstable = stored.unstable if stored is not None and require_stable else ()
            refs: list[PartitionRef] = [] if stored is None else [*sorted_partitions({*stored.offsets, *unstable})]
            every = await self._lookup.find_all(context, Operation.DESCRIBE, refs)
            found = {ref: where for ref, where in every.items() if isinstance(where, PartitionId)}
        else:
            found = await self._lookup.find_all(context, Operation.DESCRIBE, partitions)
        named = [where for where in found.values() if isinstance(where, PartitionId)]
        committed: dict[PartitionId, Committed | TidelogError] = {}
        async for piece in sliced(split_in_pieces(named), 1):
            shard = self._router.shard_of(group)
            committed |= fetch_offsets(shard.state, group, piece, **member)  # type: ignore[arg-type]
            for partition in unstable_partitions(shard.state, group, piece) if require_stable else ():
                message = f"an open transaction commits an offset for partition {partition.partition}: retry"
                committed[partition] = UnstableOffsetError(message)
        return {ref: committed[where] if isinstance(where, PartitionId) else where for ref, where in found.items()}

    @ends_at_deadline
    async def delete_offsets(
        self, context: RequestContext, group: str, partitions: Sequence[PartitionRef]
    ) -> dict[PartitionRef, TidelogError | None]:
        shard, now_ms = self._shard(context, Operation.DELETE, group), self.coordinator.now_ms()
        check_named(partitions)
        self._guard.charge(context, Charge.MUTATIONS, len(partitions))
        found = await self._lookup.find_all(context, Operation.READ, partitions, is_change=True)
        view = self.coordinator.view
        requests = [
            DeleteOffsets(group=group, partitions=tuple(piece), view=view, now_ms=now_ms)
            for piece in split_in_pieces([where for where in found.values() if isinstance(where, PartitionId)])
        ]
        pieces = [(request, request.partitions) for request in requests]
        return by_ref(found, await self._router.ask_in_pieces(shard, pieces, lambda: None))

    # Groups.

    @ends_at_deadline
    async def list_groups(
        self, context: RequestContext, states: Sequence[str] = (), kinds: Sequence[str] = ()
    ) -> tuple[list[GroupSummary], int]:
        """Returns the groups that this broker coordinates and the principal may describe, by name, and how many
        partitions it is still loading. Describe on the cluster is the right to describe all of them here, as in Kafka.

        Other tasks run every `MEMBERS_PER_SLICE`; the groups of one partition are consistent.
        """
        may_see_all = self._guard.allows(context, Operation.DESCRIBE, CLUSTER)
        self._guard.charge(context)
        summaries, seen = [], 0
        for shard in list(self.coordinator.leading_shards()):
            for group_id, group in shard.state.groups.items():
                summary = shard.with_live_state(summary_of(group_id, group))
                is_matching = (not kinds or group.kind in kinds) and (not states or summary.state in states)
                if is_matching and (may_see_all or self._guard.allows(context, Operation.DESCRIBE, _group(group_id))):
                    summaries.append(summary)
                seen += 1 + group.member_count
                if seen >= MEMBERS_PER_SLICE:  # the cost goes with the members, so no `sliced`
                    seen = 0
                    await asyncio.sleep(0)
        return sorted(summaries, key=lambda summary: summary.group), self.coordinator.loading

    def describe_group(self, context: RequestContext, group: str) -> GroupDetails:
        return _details(self._shard(context, Operation.DESCRIBE, group), group)

    def describe_consumer_group(self, context: RequestContext, group: str) -> GroupDetails:
        """Raises `GroupIdNotFoundError` for a group of another kind."""
        shard = self._shard(context, Operation.DESCRIBE, group)
        if kind_of(shard, group) not in (None, CONSUMER):
            raise GroupIdNotFoundError(f"group {group!r} is not a consumer group")
        return _details(shard, group)

    def describe_classic_group(self, context: RequestContext, group: str) -> ClassicDetails:
        """Raises `GroupIdNotFoundError` for an unknown group and for a consumer group."""
        shard = self._shard(context, Operation.DESCRIBE, group)
        return describe_classic(shard.state, group, shard.rounds.get(group))

    @ends_at_deadline
    async def delete_group(self, context: RequestContext, group: str) -> None:
        shard = self._shard(context, Operation.DELETE, group)
        self._guard.charge(context, Charge.MUTATIONS, 1)
        classic = shard.rounds.get(group)
        if classic is not None and classic.members:
            raise NonEmptyGroupError(f"group {group!r} has {len(classic.members)} members")
        await self._router.ask(shard, shard.submit(DeleteGroup(group=group)))

    # Metrics.

    def sizes(self) -> tuple[Counter[str], Counter[str]]:
        """Returns (groups by kind, members by kind) that this broker coordinates."""
        groups: Counter[str] = Counter()
        members: Counter[str] = Counter()
        for shard in self.coordinator.leading_shards():
            for group in shard.state.groups.values():
                groups[group.kind] += 1
                members[group.kind] += group.member_count
        return groups, members


def by_topic(partitions: Iterable[PartitionId]) -> dict[TopicId, list[int]]:
    found: dict[TopicId, list[int]] = {}
    for partition in partitions:
        found.setdefault(partition.topic_id, []).append(partition.partition)
    return found


def _group(name: str) -> Resource:
    return Resource(ResourceType.GROUP, name)


def check_groups(groups: Sequence[str]) -> None:
    if not groups:
        raise InvalidRequestError("the request names no group")


def _details(shard: Shard, group: str) -> GroupDetails:
    details = describe_group(shard.state, group)
    classic = shard.rounds.get(group)
    if classic is None or (details.kind == CONSUMER and not classic.members):
        return details  # generated member ids that nobody uses make no classic group
    return replace(details, state=classic.state.value)
