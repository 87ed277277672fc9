"""Routes requests of groups to the shards of this broker, and waits for their replies.

A group belongs to the partition of `__consumer_offsets` that Java's hash of its name gives, and to the broker that
leads it:

    this broker leads it, and has loaded it      the shard
    it is loading it                             COORDINATOR_LOAD_IN_PROGRESS
    another broker leads it                      NOT_COORDINATOR, with that broker
    no broker leads it, too few are in sync      COORDINATOR_NOT_AVAILABLE
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tidelog.coordinator.coordinator import OFFSETS_TOPIC, GroupCoordinator
from tidelog.coordinator.requests import JOIN_EPOCH, Heartbeat, HeartbeatReply, PartitionErrors, TopicsView
from tidelog.coordinator.shard import Shard
from tidelog.metadata.controller_client import ControllerClient
from tidelog.metadata.image import Topic
from tidelog.metadata.tail import MetadataTail
from tidelog.metadata.topics import CreateTopics, NewTopic
from tidelog.model.errors import (
    ErrorCode,
    LeaderNotAvailableError,
    NotEnoughReplicasError,
    NotLeaderError,
    NotLeaderOrFollowerError,
    PolicyViolationError,
    RemoteError,
    RequestTimedOutError,
    StorageError,
    TidelogError,
)
from tidelog.model.group_errors import CoordinatorNotAvailableError, InvalidGroupIdError, NotCoordinatorError
from tidelog.model.ids import PartitionId
from tidelog.services.partition_lookup import Ref

LOGGER = logging.getLogger(__name__)

T = TypeVar("T")

OFFSETS_PER_DECISION = 1_000
"""Offsets committed or deleted by one decision: some 10 ms. A larger request becomes several."""
CREATE_MS = 5_000
"""Wait for the controller to create the offsets topic, and for this broker's image to have it."""


@dataclass(slots=True)
class GroupCounts:
    """For metrics."""

    heartbeats: int = 0
    commits: int = 0
    committed_offsets: int = 0
    rebalances: int = 0
    """Changes of a group's epoch that members got: one for each member."""


def java_hash(text: str) -> int:
    """Java's `String.hashCode`, over UTF-16: every Kafka client finds a group's partition with it."""
    value = 0
    data = text.encode("utf-16-be", "surrogatepass")
    for at in range(0, len(data), 2):
        value = (31 * value + (data[at] << 8 | data[at + 1])) & 0xFFFFFFFF
    return value


def partition_for(group: str, partitions: int) -> int:
    return (java_hash(group) & 0x7FFFFFFF) % partitions


async def group_errors(shard: Shard, work: Awaitable[T]) -> T:
    """Awaits the work; translates errors of the log (NOT_LEADER...) to those of a coordinator (NOT_COORDINATOR...)."""
    try:
        return await work
    except (NotLeaderError, NotLeaderOrFollowerError) as error:
        raise NotCoordinatorError(str(error), coordinator=shard.leader.replica.partition.leader) from error
    except (NotEnoughReplicasError, LeaderNotAvailableError, StorageError) as error:
        raise CoordinatorNotAvailableError(str(error)) from error


def split_in_pieces(partitions: Sequence[PartitionId]) -> list[Sequence[PartitionId]]:
    """Split the partitions into pieces for one decision each; no partition gives one empty piece."""
    starts = range(0, max(1, len(partitions)), OFFSETS_PER_DECISION)
    return [partitions[start : start + OFFSETS_PER_DECISION] for start in starts]


def by_ref(found: Mapping[Ref, PartitionId | TidelogError], errors: PartitionErrors) -> dict[Ref, TidelogError | None]:
    """Return the errors of the partitions that were found, and why the others were not."""
    return {ref: errors[where] if isinstance(where, PartitionId) else where for ref, where in found.items()}


class GroupRouter:
    def __init__(self, coordinator: GroupCoordinator, tail: MetadataTail, client: ControllerClient) -> None:
        self.coordinator = coordinator
        self.counts = GroupCounts()
        self.groups_max = 100_000
        """Groups of one shard."""
        self._tail = tail
        self._client = client
        self._creating: asyncio.Future[None] | None = None
        """Of the request in progress; its callers get the error."""

    # For `MemberStream`.

    @property
    def view(self) -> TopicsView:
        return self.coordinator.view

    def now_ms(self) -> int:
        return self.coordinator.now_ms()

    def keep(self, task: asyncio.Task[None]) -> None:
        self.coordinator.tasks.keep(task)

    async def heartbeat(self, request: Heartbeat) -> tuple[Shard, HeartbeatReply]:
        shard = self.shard_of(request.group)
        if request.member_epoch == JOIN_EPOCH:
            self.check_group_count(shard, request.group)
        self.counts.heartbeats += 1
        reply = await self.ask(shard, shard.heartbeat(request))
        self._count_rebalance(request, reply)
        return shard, reply

    async def changes(self, shard: Shard, request: Heartbeat) -> HeartbeatReply:
        """For a member with a stream: what the coordinator sends it without a heartbeat."""
        reply = await self.ask(shard, shard.changes(request))
        self._count_rebalance(request, reply)
        return reply

    def _count_rebalance(self, request: Heartbeat, reply: HeartbeatReply) -> None:
        if request.member_epoch >= JOIN_EPOCH and reply.member_epoch != request.member_epoch:
            self.counts.rebalances += 1

    # Shards.

    def check_name(self, group: str) -> None:
        if not 1 <= len(group) <= self.coordinator.limits.name_length_max:
            raise InvalidGroupIdError(f"a group id has 1 to {self.coordinator.limits.name_length_max} characters")

    def shard_of(self, group: str) -> Shard:
        self.check_name(group)
        topic = self._tail.image.topic_named(OFFSETS_TOPIC)
        if topic is None:
            raise NotCoordinatorError(f"{OFFSETS_TOPIC} does not exist yet: find the group's coordinator first")
        number = partition_for(group, len(topic.partitions))
        shard = self.coordinator.shards.get(number)
        if shard is None:
            leader = topic.partitions[number].leader
            if leader == self.coordinator.me or leader < 0:
                raise CoordinatorNotAvailableError(f"partition {number} of {OFFSETS_TOPIC} has no leader yet")
            raise NotCoordinatorError(f"broker {leader} coordinates group {group!r}", coordinator=leader)
        shard.check()
        return shard

    def check_group_count(self, shard: Shard, group: str) -> None:
        groups = shard.state.groups
        # Also counts classic groups that are not stored yet; some groups count twice.
        count = len(groups) + shard.rounds.groups
        if count >= self.groups_max and group not in groups and shard.rounds.get(group) is None:
            raise PolicyViolationError(f"this coordinator has {count} groups, at most {self.groups_max}")

    async def ask(self, shard: Shard, work: Awaitable[T]) -> T:
        """Returns the reply of a shard; raises `RequestTimedOutError` after `offsets.commit.timeout.ms`."""
        timeout_ms = self.coordinator.commit_timeout_ms
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await group_errors(shard, work)
        except TimeoutError:
            raise RequestTimedOutError(f"not replicated in {timeout_ms} ms; it may be yet") from None

    async def ask_in_pieces(
        self,
        shard: Shard,
        pieces: Sequence[tuple[object, Iterable[PartitionId]]],
        member: tuple[str, str],
        sequence: int,
    ) -> PartitionErrors:
        """Submits (request, its partitions) one after the other; other tasks run in between. An error of all pieces is
        raised, an error of one is the error of its partitions."""
        if len(pieces) == 1:
            errors_of_one: PartitionErrors = await self.ask(shard, shard.submit(pieces[0][0]))
            return errors_of_one

        async def submit(request: object) -> Any:
            shard.check_newest(member, sequence)
            return await self.ask(shard, shard.submit(request))

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
        results: dict[PartitionId, TidelogError | None] = {}
        for (_, partitions), outcome in zip(pieces, outcomes, strict=True):
            if isinstance(outcome, TidelogError):
                results |= dict.fromkeys(partitions, outcome)
            else:
                assert isinstance(outcome, dict), "the reply to its request"
                results |= outcome
        return results

    # The offsets topic.

    async def offsets_topic(self) -> Topic:
        """Creates the topic if it does not exist."""
        return self._tail.image.topic_named(OFFSETS_TOPIC) or await self._create_topic()

    async def _create_topic(self) -> Topic:
        if self._creating is None:
            self._creating = asyncio.get_running_loop().create_future()
            self.coordinator.spawn(self._create(self._creating), name="create-offsets-topic")
        try:
            async with asyncio.timeout(CREATE_MS / 1000):
                await asyncio.shield(self._creating)
                await self._tail.until(lambda image: OFFSETS_TOPIC in image.topic_ids)
        except TimeoutError:
            raise CoordinatorNotAvailableError(
                f"{OFFSETS_TOPIC} does not exist yet, and no controller has created it in {CREATE_MS} ms"
            ) from None
        topic = self._tail.image.topic_named(OFFSETS_TOPIC)
        if topic is None:
            raise CoordinatorNotAvailableError(f"{OFFSETS_TOPIC} was deleted")
        return topic

    async def _create(self, outcome: asyncio.Future[None]) -> None:
        request = CreateTopics(topics=(NewTopic(name=OFFSETS_TOPIC),))
        try:
            async with asyncio.timeout(CREATE_MS / 1000):
                # A repeated request gets TOPIC_ALREADY_EXISTS.
                (created,) = (await self._client.call(request, is_repeatable=True)).topics
            if created.error is not None and created.error is not ErrorCode.TOPIC_ALREADY_EXISTS:
                raise RemoteError(created.message, code=created.error)
            outcome.set_result(None)
        except (TimeoutError, TidelogError) as error:
            reason = str(error) or "no controller answers"
            LOGGER.warning("topic=%s cannot be created: %s", OFFSETS_TOPIC, reason)
            outcome.set_exception(CoordinatorNotAvailableError(f"{OFFSETS_TOPIC} cannot be created: {reason}"))
        finally:
            self._creating = None
            if not outcome.done():
                outcome.set_exception(CoordinatorNotAvailableError("this broker stops"))
            outcome.exception()  # retrieved, so that the loop does not report it if every caller is gone
