"""`Membership`: the membership of a consumer in its group, over one stream to the group coordinator.

    away ----> joining ----> member ----> away           `leave`, or fenced; `start` joins again
                  ^             |
                  '-- (stream breaks, coordinator moves: the same id and epoch, at once) --'

A task of this loop sends the heartbeats, independent of the user. The `Member` receives the assignment, reconciles it
in its own time and reports what it owns; each report is a heartbeat at once.

    the stream ends with                         reaction
    broken, silent, NOT_COORDINATOR, loading     find the coordinator, and continue with the same id and epoch
    FENCED_MEMBER_EPOCH, UNKNOWN_MEMBER_ID       `lost`: the partitions have other owners; `start` joins again
    UNRELEASED_INSTANCE_ID                       retry for one session, since the former process may be dead; `failed`
    no broker has ever answered                  `failed`; a cluster that answered once is waited for
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
from tidelog.client.coordinators import Coordinators, is_retriable
from tidelog.client.errors import NoClusterError
from tidelog.model.errors import CallTimeoutError, ErrorCode, StreamClosedError, TidelogError, TransportError
from tidelog.model.ids import PartitionId, TopicId
from tidelog.rpc.grpc.methods import method_named
from tidelog.rpc.v1 import groups_pb2 as pb

LOGGER = logging.getLogger(__name__)

_MEMBERSHIP = method_named("Groups", "Membership")
_HEARTBEAT = method_named("Groups", "Heartbeat")
_JOIN, _LEAVE, _STATIC_LEAVE = 0, -1, -2
_FENCED = frozenset({ErrorCode.FENCED_MEMBER_EPOCH, ErrorCode.UNKNOWN_MEMBER_ID})
_SILENCE_S = 3.0
"""Time for the response to a heartbeat; then find the coordinator again. Doubles with each timeout in a row, since a
join waits for disks."""
_LEAVE_MS = 2_000
_RELEASE_S = 2.0
_PAUSE_MIN_S, _PAUSE_MAX_S, _PAUSES_SHORT = 0.02, 0.15, 50

Assignment = dict[PartitionId, str]
"""Partitions and the names of their topics."""


class Member(Protocol):
    """Called on the loop. None of these methods waits."""

    def assigned(self, assignment: Assignment) -> None:
        """The target assignment: revoke the rest, report it, assign what is new."""
        ...

    def lost(self, error: TidelogError) -> None:
        """The member was fenced: its partitions have other owners."""
        ...

    def failed(self, error: TidelogError) -> None:
        """No retry can make it a member."""
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
    """0: the coordinator decides."""


class Membership:
    """Implements `group_offsets.Identity`. Used on one loop."""

    def __init__(
        self, cluster: ClusterClient, coordinators: Coordinators, settings: MemberSettings, member: Member
    ) -> None:
        self.settings = settings
        self.member_id = ""
        self.member_epoch = -1
        self.heartbeats = self.joins = 0
        self._cluster = cluster
        self._coordinators = coordinators
        self._member = member
        self._topics: tuple[str, ...] = ()
        self._pattern = ""
        self._owned: frozenset[PartitionId] = frozenset()
        self._names: Assignment = {}
        self._interval_s = (settings.heartbeat_interval_ms or 3_000) / 1000
        self._is_due = False
        self._wake = asyncio.Event()
        self._must_send_all = True
        self._awaiting_since_s: float | None = None
        self._silence_s = _SILENCE_S
        self._running: asyncio.Task[None] | None = None
        self._exchange: Exchange | None = None
        self._unreleased_s: float | None = None
        self._silent_since_s: float | None = None
        self._last_error: TidelogError | None = None

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

    def outage(self) -> tuple[float, str] | None:
        """For how many seconds no coordinator has answered since the first failure, and the last error."""
        if self._running is None or self._silent_since_s is None:
            return None
        error = self._coordinators.last_error or self._cluster.last_error or self._last_error
        return self._now_s() - self._silent_since_s, f"{error or 'no answer yet'}{self._cluster.controller_hint()}"

    # Requests.

    def subscribe(self, topics: Sequence[str], pattern: str) -> None:
        self._topics, self._pattern = tuple(topics), pattern
        self._must_send_all = True
        self._send_soon()

    def report(self, owned: Assignment) -> None:
        """The partitions that the member owns now."""
        self._owned, self._names = frozenset(owned), dict(owned)
        self._must_send_all = True
        self._send_soon()

    def _send_soon(self) -> None:
        self._is_due = True
        self._wake.set()

    def start(self) -> None:
        """Join, unless it runs."""
        if self._running is not None:
            return
        if not self.member_id:
            self.member_id = str(UUID(int=self._cluster.random.getrandbits(128), version=4))
        self.member_epoch = _JOIN
        self._owned, self._names = frozenset(), {}
        self._unreleased_s = self._last_error = None
        self._silent_since_s = self._now_s()
        self._running = asyncio.get_running_loop().create_task(self._run())
        self._running.add_done_callback(self._ended)

    async def leave(self, *, timeout_ms: int = _LEAVE_MS) -> None:
        """Leave the group. After `timeout_ms` the session timeout removes the member."""
        running, exchange = self._running, self._exchange
        was_member = self.member_epoch > 0
        self._running = None
        if running is None:
            return
        request = self._request(_STATIC_LEAVE if self.instance_id else _LEAVE)
        # A `start` meanwhile joins as a new member.
        member_id, self.member_id, self.member_epoch = self.member_id, "", -1
        running.cancel()
        await asyncio.wait([running])
        try:
            # A unary call, since it has a response.
            if was_member or exchange is not None:
                async with asyncio.timeout(timeout_ms / 1000):
                    coordinator = await self._coordinators.find(self.settings.group, timeout_ms=timeout_ms)
                    await self._cluster.call_at(coordinator.address, _HEARTBEAT, request, timeout_ms=timeout_ms)
        except (TidelogError, TimeoutError) as error:
            reason = str(error) or f"no answer in {timeout_ms} ms"
            LOGGER.warning("group=%s member=%s could not leave: %s", self.settings.group, member_id, reason)

    # The task.

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            LOGGER.error("group=%s membership failed", self.settings.group, exc_info=error)
            self._away()
            self._member.failed(error if isinstance(error, TidelogError) else TidelogError(f"membership: {error!r}"))

    def _away(self) -> None:
        self._running = None
        self.member_epoch = -1

    async def _run(self) -> None:
        attempts = 0
        while True:
            try:
                heartbeats = self.heartbeats
                await self._stream()
            except TidelogError as error:
                self._last_error = error
                if self._silent_since_s is None:
                    self._silent_since_s = self._now_s()
                if self.heartbeats > heartbeats:
                    attempts = 0
                attempts += 1
                if not self._should_reconnect(error):
                    return
            await asyncio.sleep(self._pause_s(attempts))

    def _pause_s(self, attempts: int) -> float:
        """None after the first failure, since the coordinator counts the time; short while a coordinator moves; then
        longer."""
        if attempts <= 1:
            return 0.0
        longest_s = _PAUSE_MAX_S if attempts <= _PAUSES_SHORT else self._cluster.config.retry_backoff_max_ms / 1000
        return _PAUSE_MIN_S + (longest_s - _PAUSE_MIN_S) * self._cluster.random.random()

    def _should_reconnect(self, error: TidelogError) -> bool:
        """Whether to reconnect; otherwise the `Member` was notified."""
        group, member = self.settings.group, self.member_id
        if error.code in _FENCED:
            LOGGER.warning("group=%s member=%s was fenced: %s", group, member, error)
            if error.code is ErrorCode.UNKNOWN_MEMBER_ID:
                self.member_id = ""
            was_member = self.member_epoch > 0
            self._away()
            if was_member:
                self._member.lost(error)
                return False
            # It never joined: nothing is lost, so join again at once.
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
        elif is_retriable(error) and (self._cluster.answered or not isinstance(error, NoClusterError)):
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
        """One stream, until it fails."""
        coordinator = await self._coordinators.find(self.settings.group)
        exchange = self._exchange = await self._cluster.connections.open(coordinator.address, _MEMBERSHIP)
        self._must_send_all = True
        self._awaiting_since_s = None
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._send(exchange)), loop.create_task(self._receive(exchange))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # The receiver has the coordinator's error; the sender knows only that it cannot send.
            errors = [task.exception() for task in reversed(tasks) if task.done()]
        finally:
            for task in tasks:
                task.cancel()
            exchange.close()
            self._exchange = None
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled():
                    task.exception()  # retrieved: closing the stream here may fail what still runs
        for error in errors:
            if error is not None:
                raise error
        raise TransportError("the membership stream ended")

    async def _send(self, exchange: Exchange) -> None:
        next_s = self._now_s()
        while True:
            self._wake.clear()
            now_s = self._now_s()
            silent_s = None if self._awaiting_since_s is None else self._awaiting_since_s + self._silence_s
            if silent_s is not None and now_s >= silent_s:
                message = f"no response to a heartbeat in {self._silence_s:.1f} s"
                self._silence_s = min(2 * self._silence_s, max(_SILENCE_S, self.settings.session_timeout_ms / 3000))
                raise CallTimeoutError(message)
            # A join is sent once; nothing follows before its response.
            may_send = self.member_epoch != _JOIN or silent_s is None
            if may_send and (self._is_due or now_s >= next_s):
                self._is_due = False
                await exchange.send(self._request(self.member_epoch))
                now_s = self._now_s()
                next_s = now_s + self._interval_s
                if self._awaiting_since_s is None:
                    self._awaiting_since_s = now_s
                continue
            end_s = next_s if may_send else float("inf")
            end_s = end_s if silent_s is None else min(end_s, silent_s)
            try:
                async with asyncio.timeout(max(0.0, end_s - now_s)):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _request(self, epoch: int) -> pb.HeartbeatRequest:
        settings = self.settings
        request = pb.HeartbeatRequest(
            group=settings.group, member_id=self.member_id, member_epoch=epoch, instance_id=settings.instance_id
        )
        if self._must_send_all and epoch >= 0:
            self._must_send_all = False
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
                response: pb.HeartbeatResponse = await exchange.receive()
            except StreamClosedError as closed:
                raise TransportError("the coordinator ended the stream") from closed
            if (error := error_in(response)) is not None:
                raise error
            self._handle_response(response)

    def _handle_response(self, response: pb.HeartbeatResponse) -> None:
        self._awaiting_since_s = self._unreleased_s = self._silent_since_s = self._last_error = None
        self._silence_s = _SILENCE_S
        self._wake.set()
        self.heartbeats += 1
        if self.member_epoch == _JOIN:
            self.joins += 1
            LOGGER.info(
                "group=%s member=%s joined epoch=%d", self.settings.group, self.member_id, response.member_epoch
            )
        self.member_id = response.member_id or self.member_id
        if response.member_epoch > 0:
            self.member_epoch = response.member_epoch
        if not self.settings.heartbeat_interval_ms and response.heartbeat_interval_ms > 0:
            self._interval_s = response.heartbeat_interval_ms / 1000
        if response.HasField("assignment"):
            self._member.assigned(
                {
                    PartitionId(TopicId(UUID(bytes=topic.topic_id)), number): topic.topic
                    for topic in response.assignment.topics
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
