"""What the front doors ask about consumer groups. Both call this; neither knows shards or logs.

A group belongs to the partition of `__consumer_offsets` that Java's hash of its name gives, and to the broker that
leads it:

    this broker leads it, and has read it      answered here
    it reads it                                COORDINATOR_LOAD_IN_PROGRESS
    another one leads it                       NOT_COORDINATOR, with who
    nobody leads it, too few are in sync       COORDINATOR_NOT_AVAILABLE

The topic is made by whoever first looks for a coordinator. Questions are answered from what is committed, by a shard
whose epoch is still the one that the metadata shows.

Bounds: requests without an answer (`GroupCoordinator.waiting_max` a shard, then THROTTLING_QUOTA_EXCEEDED), the time
that one waits (`offsets.commit.timeout.ms`, then REQUEST_TIMED_OUT: it may be done), streams, groups of a shard.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from uuid import UUID

from tidelog.coordinator.classic_requests import ClassicDetails, JoinReply, SyncReply
from tidelog.coordinator.coordinator import OFFSETS_TOPIC, GroupCoordinator
from tidelog.coordinator.machine import describe_group, fetch_offsets
from tidelog.coordinator.queries import describe_classic, summary_of
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
    OffsetToCommit,
    PartitionErrors,
    RemoveMembers,
    TopicsView,
)
from tidelog.coordinator.shard import Shard
from tidelog.coordinator.streams import MemberStream, Receive, Send
from tidelog.metadata.broker_side import ControllerClient
from tidelog.metadata.image import ClusterImage, Topic
from tidelog.metadata.tail import MetadataTail
from tidelog.metadata.topics import CreateTopics, NewTopic
from tidelog.model.errors import (
    ErrorCode,
    LeaderNotAvailableError,
    NotEnoughReplicasError,
    NotLeaderError,
    NotLeaderOrFollowerError,
    OverloadedError,
    PolicyViolationError,
    RemoteError,
    RequestTimedOutError,
    StorageError,
    TidelogError,
)
from tidelog.model.group_errors import (
    CoordinatorNotAvailableError,
    InvalidGroupIdError,
    NonEmptyGroupError,
    NotCoordinatorError,
)
from tidelog.model.ids import PartitionId

LOGGER = logging.getLogger(__name__)

T = TypeVar("T")

CREATE_MS = 5_000
"""For the controller, and for this broker to hear of it."""
GROUPS_PER_SLICE = 500
OFFSETS_PER_DECISION = 1_000
"""Offsets that are committed or deleted by one decision: some 10 ms. A larger request becomes several."""
MEMBERS_PER_SLICE = 500
"""And groups, that are told of in one turn of the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupServiceConfig:
    streams_max: int = 20_000
    groups_max: int = 100_000
    """Of one shard."""


@dataclass(slots=True)
class GroupCounts:
    """For metrics."""

    heartbeats: int = 0
    commits: int = 0
    committed_offsets: int = 0
    rebalances: int = 0
    """Changes of a group's epoch, as members were told of them: one for each member that is moved."""


def java_hash(text: str) -> int:
    """Java's `String.hashCode`, over UTF-16: what every client of Kafka takes to find a group's partition."""
    value = 0
    data = text.encode("utf-16-be", "surrogatepass")
    for at in range(0, len(data), 2):
        value = (31 * value + (data[at] << 8 | data[at + 1])) & 0xFFFFFFFF
    return value


def partition_for(group: str, partitions: int) -> int:
    return (java_hash(group) & 0x7FFFFFFF) % partitions


async def _in_words(shard: Shard, work: Awaitable[T]) -> T:
    """What it gives; errors of the log in the words of groups."""
    try:
        return await work
    except (NotLeaderError, NotLeaderOrFollowerError) as error:
        raise NotCoordinatorError(str(error), coordinator=shard.leading.replica.partition.leader) from error
    except (NotEnoughReplicasError, LeaderNotAvailableError, StorageError) as error:
        raise CoordinatorNotAvailableError(str(error)) from error


def _pieces(offsets: Mapping[PartitionId, OffsetToCommit]) -> list[Mapping[PartitionId, OffsetToCommit]]:
    if len(offsets) <= OFFSETS_PER_DECISION:
        return [offsets]
    rows = list(offsets.items())
    return [dict(rows[first : first + OFFSETS_PER_DECISION]) for first in range(0, len(rows), OFFSETS_PER_DECISION)]


class GroupService:
    """See the module."""

    def __init__(
        self,
        coordinator: GroupCoordinator,
        tail: MetadataTail,
        client: ControllerClient,
        config: GroupServiceConfig | None = None,
    ) -> None:
        self.coordinator = coordinator
        self.config = config or GroupServiceConfig()
        self.counts = GroupCounts()
        self.streams = 0
        self._tail = tail
        self._client = client
        self._creating: asyncio.Task[None] | None = None

    # What doors build requests with.

    @property
    def image(self) -> ClusterImage:
        return self._tail.image

    @property
    def view(self) -> TopicsView:
        return self.coordinator.view

    def now_ms(self) -> int:
        return self.coordinator.now_ms()

    def new_member_id(self) -> str:
        return str(UUID(int=self.coordinator.random.getrandbits(128), version=4))

    @property
    def heartbeat_interval_ms(self) -> int:
        return self.coordinator.limits.heartbeat_interval_ms

    def keep(self, task: asyncio.Task[None]) -> None:
        self.coordinator.keep(task)

    # Finding.

    async def find_coordinators(self, groups: Sequence[str]) -> list[int | TidelogError]:
        """The broker of each group, or why there is none now. Makes the topic if it is not there."""
        for group in groups:
            self.check_name(group)
        topic = self.image.topic_named(OFFSETS_TOPIC) or await self._create_topic()
        found: list[int | TidelogError] = []
        for number, group in enumerate(groups, start=1):
            if number % GROUPS_PER_SLICE == 0:
                await asyncio.sleep(0)
            leader = topic.partitions[partition_for(group, len(topic.partitions))].leader
            found.append(
                leader
                if leader >= 0
                else CoordinatorNotAvailableError(f"the partition of group {group!r} in {OFFSETS_TOPIC} has no leader")
            )
        return found

    async def _create_topic(self) -> Topic:
        if self._creating is None:
            self._creating = self.coordinator.spawn(self._create(), name="create-offsets-topic")
        try:
            async with asyncio.timeout(CREATE_MS / 1000):
                await self._tail.until(lambda image: OFFSETS_TOPIC in image.topic_ids)
        except TimeoutError:
            raise CoordinatorNotAvailableError(
                f"{OFFSETS_TOPIC} is not there yet, and no controller has made it in {CREATE_MS} ms"
            ) from None
        topic = self.image.topic_named(OFFSETS_TOPIC)
        if topic is None:
            raise CoordinatorNotAvailableError(f"{OFFSETS_TOPIC} was deleted")
        return topic

    async def _create(self) -> None:
        request = CreateTopics(topics=(NewTopic(name=OFFSETS_TOPIC),))
        try:
            async with asyncio.timeout(CREATE_MS / 1000):
                # A repeat finds that it exists.
                (made,) = (await self._client.call(request, is_repeatable=True)).topics
            if made.error is not None and made.error is not ErrorCode.TOPIC_ALREADY_EXISTS:
                raise RemoteError(made.message, code=made.error)
        except (TimeoutError, TidelogError) as error:
            LOGGER.warning("%s cannot be made: %s", OFFSETS_TOPIC, error or "no controller answers")
        finally:
            self._creating = None

    def check_name(self, group: str) -> None:
        if not 1 <= len(group) <= self.coordinator.limits.name_length_max:
            raise InvalidGroupIdError(f"a group id has 1 to {self.coordinator.limits.name_length_max} characters")

    def shard_of(self, group: str) -> Shard:
        """The shard that answers for this group; raises where else to go, or that it is too early."""
        self.check_name(group)
        topic = self.image.topic_named(OFFSETS_TOPIC)
        if topic is None:
            raise NotCoordinatorError(f"{OFFSETS_TOPIC} is not there yet: find the group's coordinator first")
        number = partition_for(group, len(topic.partitions))
        shard = self.coordinator.shards.get(number)
        if shard is None:
            leader = topic.partitions[number].leader
            if leader == self.coordinator.me or leader < 0:
                raise CoordinatorNotAvailableError(f"partition {number} of {OFFSETS_TOPIC} is not led yet")
            raise NotCoordinatorError(f"broker {leader} coordinates group {group!r}", coordinator=leader)
        shard.check()
        return shard

    async def _ask(self, shard: Shard, work: Awaitable[T]) -> T:
        """The reply of a shard, in time, in the words of groups."""
        timeout_ms = self.coordinator.commit_timeout_ms
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await _in_words(shard, work)
        except TimeoutError:
            raise RequestTimedOutError(f"not replicated in {timeout_ms} ms; it may be yet") from None

    async def submit(self, group: str, request: object) -> Any:
        shard = self.shard_of(group)
        return await self._ask(shard, shard.submit(request))

    def _check_room(self, shard: Shard, group: str) -> None:
        groups = shard.state.groups
        # Of classic groups also those of which nothing is stored yet; some count twice.
        count = len(groups) + shard.rounds.groups
        if count >= self.config.groups_max and group not in groups and shard.rounds.get(group) is None:
            raise PolicyViolationError(f"this coordinator has {count} groups, at most {self.config.groups_max}")

    # Membership.

    async def heartbeat(self, request: Heartbeat) -> HeartbeatReply:
        """One heartbeat without a stream."""
        return (await self.heartbeat_of(replace(request, is_streamed=False)))[1]

    async def heartbeat_of(self, request: Heartbeat) -> tuple[Shard, HeartbeatReply]:
        shard = self.shard_of(request.group)
        if request.member_epoch == JOIN_EPOCH:
            self._check_room(shard, request.group)
        self.counts.heartbeats += 1
        reply = await self._ask(shard, shard.heartbeat(request))
        self._count_move(request, reply)
        return shard, reply

    async def news_of(self, shard: Shard, request: Heartbeat) -> HeartbeatReply:
        """For a member on a stream: what it shall be told by itself."""
        reply = await self._ask(shard, shard.news(request))
        self._count_move(request, reply)
        return reply

    def _count_move(self, request: Heartbeat, reply: HeartbeatReply) -> None:
        if request.member_epoch >= JOIN_EPOCH and reply.member_epoch != request.member_epoch:
            self.counts.rebalances += 1

    async def membership(self, receive: Receive, send: Send) -> None:
        """A member's stream, from its first heartbeat to its end."""
        if self.streams >= self.config.streams_max:
            raise OverloadedError(f"{self.streams} members have streams here, at most {self.config.streams_max}")
        self.streams += 1
        try:
            await MemberStream(self, receive, send).run()
        finally:
            self.streams -= 1

    async def remove_members(
        self, group: str, member_ids: Sequence[str], instance_ids: Sequence[str]
    ) -> dict[str, TidelogError | None]:
        shard = self.shard_of(group)
        classic = shard.rounds.get(group)
        if classic is not None and classic.members:
            names = [*((name, "") for name in member_ids), *(("", name) for name in instance_ids)]
            names = names or [(member_id, "") for member_id in classic.members]
            errors = await self._ask(shard, shard.rounds.leave(group, tuple(names)))
            return {name or instance: error for (name, instance), error in zip(names, errors, strict=True)}
        request = RemoveMembers(
            group=group,
            view=self.view,
            now_ms=self.now_ms(),
            member_ids=tuple(member_ids),
            instance_ids=tuple(instance_ids),
        )
        removed: dict[str, TidelogError | None] = await self._ask(shard, shard.submit(request))
        return removed

    # Classic groups, for the Kafka door. A join and a sync are answered when their round is over.

    async def join_group(
        self,
        group: str,
        *,
        member_id: str,
        protocol_type: str,
        protocols: tuple[tuple[str, bytes], ...],
        session_timeout_ms: int,
        rebalance_timeout_ms: int,
        instance_id: str = "",
        client_id: str = "",
        client_host: str = "",
        needs_known_id: bool = True,
        topics: tuple[str, ...] = (),
    ) -> JoinReply:
        """`topics`: what the member reads, as far as the door can tell from its subscription."""
        shard = self.shard_of(group)
        self._check_room(shard, group)
        return await _in_words(
            shard,
            shard.rounds.join(
                group,
                member_id=member_id,
                protocol_type=protocol_type,
                protocols=protocols,
                session_timeout_ms=session_timeout_ms,
                rebalance_timeout_ms=rebalance_timeout_ms,
                instance_id=instance_id,
                client_id=client_id,
                client_host=client_host,
                needs_known_id=needs_known_id,
                topics=topics,
            ),
        )

    async def sync_group(
        self,
        group: str,
        *,
        member_id: str,
        generation: int,
        instance_id: str = "",
        protocol_type: str | None = None,
        protocol: str | None = None,
        assignments: tuple[tuple[str, bytes], ...] = (),
    ) -> SyncReply:
        shard = self.shard_of(group)
        return await _in_words(
            shard,
            shard.rounds.sync(
                group,
                member_id=member_id,
                generation=generation,
                instance_id=instance_id,
                protocol_type=protocol_type,
                protocol=protocol,
                assignments=assignments,
            ),
        )

    async def classic_heartbeat(self, group: str, *, member_id: str, generation: int, instance_id: str = "") -> None:
        """Raises REBALANCE_IN_PROGRESS while the group makes a new generation."""
        shard = self.shard_of(group)
        work = shard.rounds.heartbeat(group, member_id=member_id, generation=generation, instance_id=instance_id)
        await _in_words(shard, work)

    async def leave_group(self, group: str, members: Sequence[tuple[str, str]]) -> tuple[TidelogError | None, ...]:
        """(member id, instance id) of each; the errors are in their order."""
        shard = self.shard_of(group)
        return await self._ask(shard, shard.rounds.leave(group, tuple(members)))

    # Offsets.

    async def commit_offsets(
        self,
        group: str,
        offsets: Mapping[PartitionId, OffsetToCommit],
        *,
        member_id: str,
        member_epoch: int,
        instance_id: str = "",
        sequence: int = 0,
    ) -> PartitionErrors:
        """`sequence`: of a member's requests, in their order; 0 if it does not count them."""
        shard = self.shard_of(group)
        self._check_room(shard, group)
        shard.check_order((group, member_id), sequence)
        shard.rounds.check_commit(group, member_id, member_epoch, instance_id)
        now_ms = self.now_ms()
        requests = [
            CommitOffsets(
                group=group,
                member_id=member_id,
                member_epoch=member_epoch,
                instance_id=instance_id,
                offsets=some,
                now_ms=now_ms,
            )
            for some in _pieces(offsets)
        ]
        if len(requests) == 1:
            done: PartitionErrors = await self._ask(shard, shard.submit(requests[0]))
        else:
            done = await self._in_pieces(
                shard, [(request, list(request.offsets)) for request in requests], (group, member_id), sequence
            )
        self.counts.commits += 1
        self.counts.committed_offsets += sum(error is None for error in done.values())
        return done

    def fetch_offsets(
        self,
        group: str,
        partitions: Iterable[PartitionId] | None,
        *,
        member_id: str = "",
        member_epoch: int | None = None,
    ) -> dict[PartitionId, Committed]:
        """None: all that the group has."""
        shard = self.shard_of(group)
        return fetch_offsets(shard.state, group, partitions, member_id=member_id, member_epoch=member_epoch)

    async def delete_offsets(self, group: str, partitions: Sequence[PartitionId]) -> PartitionErrors:
        shard, now_ms = self.shard_of(group), self.now_ms()
        pieces = [
            tuple(partitions[first : first + OFFSETS_PER_DECISION])
            for first in range(0, max(1, len(partitions)), OFFSETS_PER_DECISION)
        ]
        requests = [DeleteOffsets(group=group, partitions=some, view=self.view, now_ms=now_ms) for some in pieces]
        if len(requests) == 1:
            done: PartitionErrors = await self._ask(shard, shard.submit(requests[0]))
            return done
        return await self._in_pieces(shard, [(request, request.partitions) for request in requests], (group, ""), 0)

    async def _in_pieces(
        self,
        shard: Shard,
        pieces: Sequence[tuple[object, Iterable[PartitionId]]],
        member: tuple[str, str],
        sequence: int,
    ) -> PartitionErrors:
        """One after the other, with a turn for others in between; each is decided as soon as it is submitted. What
        refuses all of them is raised, what refuses one is the error of its partitions."""

        async def submit(request: object) -> Any:
            shard.check_newest(member, sequence)
            return await self._ask(shard, shard.submit(request))

        running: list[asyncio.Task[Any]] = []
        try:
            for request, _ in pieces:
                running.append(asyncio.ensure_future(submit(request)))
                await asyncio.sleep(0)
            outcomes = await asyncio.gather(*running, return_exceptions=True)
        except asyncio.CancelledError:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            raise
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        unexpected = [error for error in errors if not isinstance(error, TidelogError)]
        if errors and (unexpected or len(errors) == len(outcomes)):
            raise (unexpected or errors)[0]
        done: dict[PartitionId, TidelogError | None] = {}
        for (_, named), outcome in zip(pieces, outcomes, strict=True):
            if isinstance(outcome, TidelogError):
                done |= dict.fromkeys(named, outcome)
            else:
                assert isinstance(outcome, dict), "the reply to its request"
                done |= outcome
        return done

    # Groups.

    async def list_groups(
        self, states: Sequence[str] = (), kinds: Sequence[str] = ()
    ) -> tuple[list[GroupSummary], int]:
        """Those that this broker coordinates, by name; and of how many partitions it does not know them yet.

        Others have a turn every `MEMBERS_PER_SLICE`; of one partition all groups are as they were at one moment.
        """
        found, seen = [], 0
        for shard in list(self.coordinator.leading_shards()):
            for group_id, group in shard.state.groups.items():
                summary = shard.as_it_is(summary_of(group_id, group))
                if (not kinds or group.kind in kinds) and (not states or summary.state in states):
                    found.append(summary)
                seen += 1 + group.member_count
                if seen >= MEMBERS_PER_SLICE:
                    seen = 0
                    await asyncio.sleep(0)
        return sorted(found, key=lambda summary: summary.group), self.coordinator.loading

    def describe_group(self, group: str) -> GroupDetails:
        shard = self.shard_of(group)
        details = describe_group(shard.state, group)
        classic = shard.rounds.get(group)
        if classic is None or (details.kind == "consumer" and not classic.members):
            return details  # ids that were given out and not used make no classic group
        return replace(details, state=classic.state.value)

    def kind_of(self, group: str) -> str | None:
        """As in `GroupSummary`; None of a group that is not there."""
        shard = self.shard_of(group)
        found, held = shard.state.group(group), shard.rounds.get(group)
        if held is not None and (held.members or found is None):
            return "classic"
        return None if found is None else found.kind

    def describe_classic(self, group: str) -> ClassicDetails:
        """`GroupIdNotFoundError` of a group that is not there, or is a consumer group."""
        shard = self.shard_of(group)
        return describe_classic(shard.state, group, shard.rounds.get(group))

    async def delete_group(self, group: str) -> None:
        classic = self.shard_of(group).rounds.get(group)
        if classic is not None and classic.members:
            raise NonEmptyGroupError(f"group {group!r} has {len(classic.members)} members")
        await self.submit(group, DeleteGroup(group=group))

    # Counting.

    def sizes(self) -> tuple[Counter[str], Counter[str]]:
        """(groups by kind, members by kind) of what this broker coordinates."""
        groups: Counter[str] = Counter()
        members: Counter[str] = Counter()
        for shard in self.coordinator.leading_shards():
            for group in shard.state.groups.values():
                groups[group.kind] += 1
                members[group.kind] += group.member_count
        return groups, members
