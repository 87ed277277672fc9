"""The interfaces that the parts of a shard use: the broker's coordinator, the shard itself, and its classic rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Protocol

from tidelog.coordinator.classic_group import ClassicGroup
from tidelog.coordinator.limits import GroupLimits
from tidelog.coordinator.partition_shard import PartitionHost
from tidelog.coordinator.requests import HeartbeatReply, TopicsView
from tidelog.coordinator.state import CoordinatorState
from tidelog.coordinator.timers import TimerSet
from tidelog.model.errors import TidelogError
from tidelog.model.ids import TopicId


class ShardHost(PartitionHost, Protocol):
    """The broker's group coordinator, as its shards use it."""

    limits: GroupLimits
    random: Random

    @property
    def view(self) -> TopicsView: ...

    def steady_ms(self) -> int:
        """Return monotonic time close to `now_ms`, for deadlines."""
        ...

    @property
    def grace_ms(self) -> int: ...

    @property
    def reconnect_ms(self) -> int: ...

    @property
    def offsets_retention_ms(self) -> int: ...

    @property
    def fences_retention_ms(self) -> int: ...

    async def deleted_topics(self, topics: Sequence[TopicId]) -> list[TopicId]: ...


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
