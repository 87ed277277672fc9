"""`Membership`: a consumer's place in its group, kept by one stream to the group's coordinator.

    away ----> joining ----> member ----> away           `leave`, or fenced; `start` joins again
                  ^             |
                  '-- (stream breaks, coordinator moves: the same id and epoch, at once) --'

Heartbeats depend on nothing that the user does: they are sent by a task of this loop. What the coordinator says of the
assignment goes to the `Member`, which works towards it in its own time and reports what it holds; each report is a
heartbeat at once.

    the stream's end                             what happens
    broken, silent, NOT_COORDINATOR, loading     find the coordinator, and go on with the same id and epoch
    FENCED_MEMBER_EPOCH, UNKNOWN_MEMBER_ID       `lost`: the partitions belong to others; joins again by `start`
    UNRELEASED_INSTANCE_ID                       for a session the former process may be dead; then it lives: `failed`
    nobody answers, and never has                `failed`; a cluster that was met is waited for
    anything else                                `failed`
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from tidelog.client.cluster import ClusterClient, error_in
from tidelog.client.connections import Exchange
from tidelog.client.coordinators import Coordinators, is_passing
from tidelog.client.errors import NoClusterError
from tidelog.model.errors import CallTimeoutError, ErrorCode, StreamClosedError, TidelogError, TransportError
from tidelog.model.ids import PartitionId, TopicId
from tidelog.rpc.door import method_named
from tidelog.rpc.v1 import groups_pb2 as pb

LOGGER = logging.getLogger(__name__)

_MEMBERSHIP = method_named("Groups", "Membership")
_HEARTBEAT = method_named("Groups", "Heartbeat")
_JOIN, _LEAVE, _STATIC_LEAVE = 0, -1, -2
_FENCED = frozenset({ErrorCode.FENCED_MEMBER_EPOCH, ErrorCode.UNKNOWN_MEMBER_ID})
_SILENCE_S = 3.0
"""A heartbeat is answered at once; a coordinator that leaves one unanswered so long is looked for anew. Twice as long
each time in a row, since a join waits for disks."""
_LEAVE_MS = 2_000
_RELEASE_S = 2.0
_PAUSE_MIN_S, _PAUSE_MAX_S, _PAUSES_SHORT = 0.02, 0.15, 50

Assignment = dict[PartitionId, str]
"""Partitions, and the names of their topics."""


class Member(Protocol):
    """Called on the loop; none of them waits."""

    def told(self, assignment: Assignment) -> None:
        """What to hold: give up the rest, report it, take over what is new."""
        ...

    def lost(self, error: TidelogError) -> None:
        """Out of the group: whatever was held belongs to others."""
        ...

    def failed(self, error: TidelogError) -> None:
        """It will not become a member by trying again."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSettings:
    group: str
    instance_id: str = ""
    rack: str = ""
    client_id: str = ""
    assignor: str = ""
    session_timeout_ms: int = 45_000
    rebalance_timeout_ms: int = 300_000
    heartbeat_interval_ms: int = 0
    """0: as the coordinator says."""


class Membership:
    """Implements `group_offsets.Identity`. Used on one loop."""

    def __init__(
        self, cluster: ClusterClient, coordinators: Coordinators, settings: MemberSettings, member: Member
    ) -> None:
        self.settings = settings
        self.member_id = ""
        self.member_epoch = -1
        self.heartbeats = self.joins = 0
        self.last_answer_s = float("-inf")
        self._cluster = cluster
        self._coordinators = coordinators
        self._member = member
        self._topics: tuple[str, ...] = ()
        self._pattern = ""
        self._owned: frozenset[PartitionId] = frozenset()
        self._names: Assignment = {}
        self._interval_s = (settings.heartbeat_interval_ms or 3_000) / 1000
        self._is_due = False
        self._look = asyncio.Event()
        self._must_tell_all = True
        self._unanswered_s: float | None = None
        self._silence_s = _SILENCE_S
        self._running: asyncio.Task[None] | None = None
        self._exchange: Exchange | None = None
        self._unreleased_s: float | None = None

    @property
    def instance_id(self) -> str:
        return self.settings.instance_id

    @property
    def is_running(self) -> bool:
        return self._running is not None

    @property
    def is_member(self) -> bool:
        return self.member_epoch > 0

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    # What the consumer says.

    def subscribe(self, topics: Sequence[str], pattern: str) -> None:
        self._topics, self._pattern = tuple(topics), pattern
        self._must_tell_all = True
        self._speak()

    def report(self, owned: Assignment) -> None:
        """What is held now."""
        self._owned, self._names = frozenset(owned), dict(owned)
        self._must_tell_all = True
        self._speak()

    def _speak(self) -> None:
        self._is_due = True
        self._look.set()

    def start(self) -> None:
        """Join, if it is not under way."""
        if self._running is not None:
            return
        if not self.member_id:
            self.member_id = str(UUID(int=self._cluster.random.getrandbits(128), version=4))
        self.member_epoch = _JOIN
        self._owned, self._names = frozenset(), {}
        self._unreleased_s = None
        self._running = asyncio.get_running_loop().create_task(self._run())
        self._running.add_done_callback(self._ended)

    async def leave(self, *, timeout_ms: int = _LEAVE_MS) -> None:
        """Say goodbye and be no member any more; what cannot be said in time is left to the session's end."""
        running, exchange = self._running, self._exchange
        was_member = self.member_epoch > 0
        self._running = None
        if running is None:
            return
        goodbye = self._request(_STATIC_LEAVE if self.instance_id else _LEAVE)
        # Whoever joins again meanwhile is somebody else.
        member_id, self.member_id, self.member_epoch = self.member_id, "", -1
        running.cancel()
        await asyncio.wait([running])
        try:
            # A stream cannot be trusted with one more message that nobody answers; a call has an answer.
            if was_member or exchange is not None:
                async with asyncio.timeout(timeout_ms / 1000):
                    coordinator = await self._coordinators.find(self.settings.group, timeout_ms=timeout_ms)
                    await self._cluster.connections.call(
                        coordinator.address, _HEARTBEAT, goodbye, timeout_ms=timeout_ms
                    )
        except (TidelogError, TimeoutError) as error:
            LOGGER.warning(
                "group=%s member=%s could not say goodbye: %s", self.settings.group, member_id, error or "no time"
            )

    # The task.

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            LOGGER.error("group=%s the membership failed", self.settings.group, exc_info=error)
            self._away()
            self._member.failed(error if isinstance(error, TidelogError) else TidelogError(f"membership: {error!r}"))

    def _away(self) -> None:
        self._running = None
        self.member_epoch = -1

    async def _run(self) -> None:
        attempts = 0
        while True:
            try:
                answers = self.heartbeats
                await self._stream()
            except TidelogError as error:
                if self.heartbeats > answers:
                    attempts = 0
                attempts += 1
                if not self._goes_on(error):
                    return
            await asyncio.sleep(self._pause_s(attempts))

    def _pause_s(self, attempts: int) -> float:
        """Short while it looks like a coordinator that moves, longer when it lasts; none after a first break, as the
        coordinator counts the time."""
        if attempts <= 1:
            return 0.0
        longest_s = _PAUSE_MAX_S if attempts <= _PAUSES_SHORT else self._cluster.config.retry_backoff_max_ms / 1000
        return _PAUSE_MIN_S + (longest_s - _PAUSE_MIN_S) * self._cluster.random.random()

    def _goes_on(self, error: TidelogError) -> bool:
        """Whether to try again by itself; otherwise the member has been told."""
        group, member = self.settings.group, self.member_id
        if error.code in _FENCED:
            LOGGER.warning("group=%s member=%s is out of the group: %s", group, member, error)
            if error.code is ErrorCode.UNKNOWN_MEMBER_ID:
                self.member_id = ""
            was_member = self.member_epoch > 0
            self._away()
            if was_member:
                self._member.lost(error)
                return False
            # It was never let in: nothing is lost, so nobody has to hear of it first.
            self.member_id = self.member_id or str(UUID(int=self._cluster.random.getrandbits(128), version=4))
            self.member_epoch = _JOIN
            self._running = asyncio.current_task()
            return True
        if error.code is ErrorCode.UNRELEASED_INSTANCE_ID:
            if self._unreleased_s is None:
                self._unreleased_s = self._now_s()
                LOGGER.warning("group=%s member=%s waits: %s", group, member, error)
            if self._now_s() - self._unreleased_s < self.settings.session_timeout_ms / 1000 + _RELEASE_S:
                return True
        elif is_passing(error) and (self._cluster.answered or not isinstance(error, NoClusterError)):
            self._coordinators.forget(group)
            LOGGER.info("group=%s member=%s reconnects: %s", group, member, error)
            return True
        was_member = self.member_epoch > 0
        self._away()
        if was_member:
            self._member.lost(error)
        self._member.failed(error)
        return False

    async def _stream(self) -> None:
        """One stream, until it ends by an error."""
        coordinator = await self._coordinators.find(self.settings.group)
        exchange = self._exchange = await self._cluster.connections.open(coordinator.address, _MEMBERSHIP)
        self._must_tell_all = True
        self._unanswered_s = None
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._send(exchange)), loop.create_task(self._receive(exchange))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            exchange.close()
            self._exchange = None
            await asyncio.wait(tasks)
            errors = [None if task.cancelled() else task.exception() for task in tasks]
        # The receiver knows what the coordinator said; the sender only that it cannot send.
        for error in reversed(errors):
            if error is not None:
                raise error
        raise TransportError("the stream of the membership has ended")

    async def _send(self, exchange: Exchange) -> None:
        next_s = self._now_s()
        while True:
            self._look.clear()
            now_s = self._now_s()
            silent_s = None if self._unanswered_s is None else self._unanswered_s + self._silence_s
            if silent_s is not None and now_s >= silent_s:
                told = f"no answer to a heartbeat in {self._silence_s:.1f} s"
                self._silence_s = min(2 * self._silence_s, max(_SILENCE_S, self.settings.session_timeout_ms / 3000))
                raise CallTimeoutError(told)
            # A join is sent once: until it is answered there is nothing to add.
            may_send = self.member_epoch != _JOIN or silent_s is None
            if may_send and (self._is_due or now_s >= next_s):
                self._is_due = False
                await exchange.send(self._request(self.member_epoch))
                now_s = self._now_s()
                next_s = now_s + self._interval_s
                if self._unanswered_s is None:
                    self._unanswered_s = now_s
                continue
            end_s = next_s if may_send else float("inf")
            end_s = end_s if silent_s is None else min(end_s, silent_s)
            try:
                async with asyncio.timeout(max(0.0, end_s - now_s)):
                    await self._look.wait()
            except TimeoutError:
                continue

    def _request(self, epoch: int) -> pb.HeartbeatRequest:
        settings = self.settings
        request = pb.HeartbeatRequest(
            group=settings.group, member_id=self.member_id, member_epoch=epoch, instance_id=settings.instance_id
        )
        if self._must_tell_all and epoch >= 0:
            self._must_tell_all = False
            request.rack = settings.rack
            request.client_id = settings.client_id
            request.subscription.topics.extend(self._topics)
            request.subscription.pattern = self._pattern
            request.assignor = settings.assignor
            request.session_timeout_ms = settings.session_timeout_ms
            request.rebalance_timeout_ms = settings.rebalance_timeout_ms
            request.owned.CopyFrom(_partitions(self._names))
        return request

    async def _receive(self, exchange: Exchange) -> None:
        while True:
            try:
                answer: pb.HeartbeatResponse = await exchange.receive()
            except StreamClosedError as closed:
                raise TransportError("the coordinator has ended the stream") from closed
            if (error := error_in(answer)) is not None:
                raise error
            self._answered(answer)

    def _answered(self, answer: pb.HeartbeatResponse) -> None:
        self._unanswered_s = self._unreleased_s = None
        self._silence_s = _SILENCE_S
        self._look.set()
        self.last_answer_s = self._now_s()
        self.heartbeats += 1
        if self.member_epoch == _JOIN:
            self.joins += 1
            LOGGER.info("group=%s member=%s joined epoch=%d", self.settings.group, self.member_id, answer.member_epoch)
        self.member_id = answer.member_id or self.member_id
        if answer.member_epoch > 0:
            self.member_epoch = answer.member_epoch
        if not self.settings.heartbeat_interval_ms and answer.heartbeat_interval_ms > 0:
            self._interval_s = answer.heartbeat_interval_ms / 1000
        if answer.HasField("assignment"):
            self._member.told(
                {
                    PartitionId(TopicId(UUID(bytes=topic.topic_id)), number): topic.topic
                    for topic in answer.assignment.topics
                    for number in topic.partitions
                }
            )


def _partitions(owned: Assignment) -> pb.Partitions:
    topics: dict[tuple[str, bytes], list[int]] = {}
    for partition in sorted(owned):
        topics.setdefault((owned[partition], partition.topic_id.bytes), []).append(partition.partition)
    return pb.Partitions(
        topics=[
            pb.TopicPartitions(topic=name, topic_id=topic_id, partitions=numbers)
            for (name, topic_id), numbers in topics.items()
        ]
    )
