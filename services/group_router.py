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
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tidelog.coordinator.coordinator import GroupCoordinator
from tidelog.coordinator.partition_shard import coordinator_errors
from tidelog.coordinator.requests import JOIN_EPOCH, Heartbeat, HeartbeatReply, PartitionErrors, TopicsView
from tidelog.coordinator.shard import Shard
from tidelog.metadata.controller_client import ControllerClient
from tidelog.metadata.tail import MetadataTail
from tidelog.model.errors import (
    PolicyViolationError,
    RequestTimedOutError,
    TidelogError,
)
from tidelog.model.group_errors import InvalidGroupIdError, UnknownMemberIdError
from tidelog.model.ids import PartitionId
from tidelog.services.internal_topics import InternalTopic
from tidelog.services.partition_lookup import Ref

T = TypeVar("T")

OFFSETS_PER_DECISION = 1_000
"""Offsets committed or deleted by one decision: some 10 ms. A larger request becomes several."""


class MissingGroupError(UnknownMemberIdError):
    """A member commits to a group that does not exist."""


def kind_of(shard: Shard, group: str) -> str | None:
    """Return the kind of the group; None if it does not exist."""
    stored, classic = shard.state.group(group), shard.rounds.get(group)
    if classic is not None and (classic.members or stored is None):
        return "classic"
    return None if stored is None else stored.kind


@dataclass(slots=True)
class GroupCounts:
    """For metrics."""

    heartbeats: int = 0
    commits: int = 0
    committed_offsets: int = 0
    rebalances: int = 0
    """Changes of a group's epoch that members got: one for each member."""


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
        self.topic = InternalTopic(coordinator, tail, client)

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
        return self.coordinator.shard_of(group)

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
                return await coordinator_errors(shard, work)
        except TimeoutError:
            raise RequestTimedOutError(f"not replicated in {timeout_ms} ms; it may be yet") from None

    async def ask_in_pieces(
        self,
        shard: Shard,
        pieces: Sequence[tuple[object, Iterable[PartitionId]]],
        check: Callable[[], None],
    ) -> PartitionErrors:
        """Submits (request, its partitions) one after the other; other tasks run in between. An error of all pieces is
        raised, an error of one is the error of its partitions. `check` raises if a later request has overtaken these.
        """
        if len(pieces) == 1:
            errors_of_one: PartitionErrors = await self.ask(shard, shard.submit(pieces[0][0]))
            return errors_of_one

        async def submit(request: object) -> Any:
            check()
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
