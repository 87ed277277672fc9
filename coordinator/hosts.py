"""The interfaces that the parts of a shard use: the broker's coordinator, the shard itself, and its classic rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from random import Random
from typing import Any, Protocol

from tidelog.coordinator.classic_group import ClassicGroup
from tidelog.coordinator.limits import GroupLimits
from tidelog.coordinator.requests import HeartbeatReply, TopicsView
from tidelog.coordinator.state import CoordinatorState
from tidelog.coordinator.timers import Timers, TimerSet
from tidelog.model.errors import TidelogError
from tidelog.model.ids import NodeId, TopicId
from tidelog.replication.leader_replica import LeaderReplica


class ShardHost(Protocol):
    """The broker's coordinator, as its shards use it."""

    me: NodeId
    timers: Timers
    limits: GroupLimits
    waiting_max: int
    load_slots: asyncio.Semaphore
    random: Random

    @property
    def view(self) -> TopicsView: ...

    def now_ms(self) -> int:
        """Return wall clock time, stored with offsets."""
        ...

    def steady_ms(self) -> int:
        """Return monotonic time close to `now_ms`, for deadlines."""
        ...

    @property
    def grace_ms(self) -> int: ...

    @property
    def reconnect_ms(self) -> int: ...

    @property
    def offsets_retention_ms(self) -> int: ...

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]: ...

    def failed(self, error: BaseException) -> None: ...

    def report_corruption(self, leader: LeaderReplica, offset: int) -> None: ...

    async def deleted_topics(self, topics: Sequence[TopicId]) -> list[TopicId]: ...

    def loaded(self, shard: Any, seconds: float, records: int) -> None: ...


class Rounds(Protocol):
    """`ClassicRounds`, as conversions of groups use it."""

    def get(self, group_id: str) -> ClassicGroup | None: ...

    def has_members(self, group_id: str) -> bool: ...

    def load(self, group_id: str) -> None: ...

    def drop(self, group_id: str, error: TidelogError) -> None: ...

    def thaw(self, group_id: str) -> None: ...

    async def stored(self, group_id: str) -> None: ...


class GroupShard(Protocol):
    """The shard, as its parts use it."""

    number: int
    timers: TimerSet

    @property
    def is_leading(self) -> bool: ...

    @property
    def state(self) -> CoordinatorState: ...

    @property
    def decided(self) -> Mapping[str, None]: ...

    @property
    def rounds(self) -> Rounds: ...

    def check(self) -> None: ...

    def renew(self, key: tuple[str, str]) -> None: ...

    def note_revoking(self, key: tuple[str, str], reply: HeartbeatReply) -> None: ...

    async def submit(self, request: object, *, is_own: bool = False) -> Any: ...
