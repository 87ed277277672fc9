"""What can be asked of the group coordinator's pure core, and what it answers.

Both doors and the shell's own timers speak in these. A request carries all that its decision depends on beside the
state: the time, and the topics as the broker's image shows them. One request is one decision: its records commit
together.

Errors of a whole request are raised (`model.errors`); errors of one partition stand in the reply.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from tidelog.model.errors import TidelogError
from tidelog.model.ids import PartitionId, TopicId

JOIN_EPOCH = 0
LEAVE_EPOCH = -1
STATIC_LEAVE_EPOCH = -2
NO_MEMBER_EPOCH = -1
"""In a commit: of a program that is no member."""


@dataclass(frozen=True, slots=True)
class TopicShape:
    topic_id: TopicId
    name: str
    partitions: int
    racks: tuple[frozenset[str], ...] = ()
    """Of each partition's replicas; empty if no broker has a rack."""


class TopicsView(Protocol):
    """Topics as they are in one image. Immutable."""

    def by_name(self, name: str) -> TopicShape | None: ...

    def by_id(self, topic_id: TopicId) -> TopicShape | None: ...

    def names(self) -> Iterable[str]:
        """Of all topics that are not internal, in order."""
        ...


# ---- Members of consumer groups


@dataclass(frozen=True, slots=True)
class LiveClassicGroup:
    """What the shell knows of a classic group with members beyond the log. The group changes nothing while a request
    that carries this is under way."""

    stored_generation: int
    """Of the record in the log that this belongs to."""
    generation: int
    """The latest that members have heard of."""
    protocols: Mapping[str, tuple[tuple[str, bytes], ...]]
    """Of the members that are in the group now, with their subscriptions. Others in the log have left or expired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Join, go on, report or leave; the epochs are those of `HeartbeatRequest` in groups.proto."""

    group: str
    member_id: str
    member_epoch: int
    view: TopicsView
    now_ms: int
    instance_id: str = ""
    rack: str = ""
    client_id: str = ""
    client_host: str = ""
    topics: tuple[str, ...] | None = None
    """None: as before. So with the pattern; on joining they stand for nothing."""
    pattern: str | None = None
    assignor: str = ""
    session_timeout_ms: int = 0
    rebalance_timeout_ms: int = 0
    owned: frozenset[PartitionId] | None = None
    """None: as before."""
    is_streamed: bool | None = None
    """Whether it came on a stream. None: as before."""
    live_classic: LiveClassicGroup | None = None
    """Set where the member joins a classic group with members, which becomes a consumer group by that."""


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    member_id: str
    member_epoch: int
    assignment: tuple[PartitionId, ...] | None
    """None: as the member was told before."""
    session_timeout_ms: int
    is_revoking: bool = False
    """The member has to give something up: its rebalance timeout runs from when it was told."""
    rebalance_timeout_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpireMember:
    """A timer of the shell has found that a member's time is over. Nothing happens if its epoch has changed since."""

    group: str
    member_id: str
    member_epoch: int
    view: TopicsView
    now_ms: int
    is_rebalance: bool = False
    """It was the time to give something up: nothing happens either if that is done. Within an epoch a member is told
    once what to give up, so that this cannot be something else that it was told later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveMembers:
    """By an operator. Both empty: all of them. The reply is {name as asked: error or None}."""

    group: str
    view: TopicsView
    now_ms: int
    member_ids: tuple[str, ...] = ()
    instance_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshTopics:
    """The image has changed: deal anew where the subscribed topics are not what they were. One group at a time."""

    group: str
    view: TopicsView
    now_ms: int


# ---- Offsets


@dataclass(frozen=True, slots=True)
class OffsetToCommit:
    offset: int
    leader_epoch: int = -1
    metadata: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitOffsets:
    """The reply is {partition: error or None}."""

    group: str
    member_id: str
    member_epoch: int
    """Of a classic member its generation."""
    offsets: Mapping[PartitionId, OffsetToCommit]
    now_ms: int
    instance_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteOffsets:
    """The reply is {partition: error or None}."""

    group: str
    partitions: tuple[PartitionId, ...]
    view: TopicsView
    now_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteGroup:
    group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpireOffsets:
    """Of groups that have been without members for `retention_ms`, and of topics that are gone (`gone`). A bounded part
    of them; the reply tells whether there is more."""

    now_ms: int
    retention_ms: int
    gone: frozenset[TopicId] = frozenset()
    groups: tuple[str, ...] | None = None
    """Those to look at, in this order; None: all."""


# ---- Questions, answered from the committed state


@dataclass(frozen=True, slots=True)
class Committed:
    """An offset as it was committed; offset -1 if there is none."""

    offset: int
    leader_epoch: int = -1
    metadata: str = ""
    commit_ms: int = -1


@dataclass(frozen=True, slots=True)
class GroupSummary:
    group: str
    kind: str
    """"consumer", "classic" or "simple"."""
    state: str
    members: int
    protocol_type: str = ""
    """Of a classic group what its members say; "consumer" of a consumer group."""


@dataclass(frozen=True, slots=True)
class MemberSummary:
    member_id: str
    instance_id: str
    rack: str
    client_id: str
    client_host: str
    member_epoch: int
    topics: tuple[str, ...]
    pattern: str
    assignment: tuple[PartitionId, ...]
    target: tuple[PartitionId, ...]
    is_classic: bool = False
    """It speaks the classic protocol."""


@dataclass(frozen=True, slots=True)
class GroupDetails:
    group: str
    kind: str
    state: str
    epoch: int
    assignment_epoch: int
    assignor: str
    members: tuple[MemberSummary, ...]


PartitionErrors = dict[PartitionId, TidelogError | None]
