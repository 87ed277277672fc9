"""Requests to the group coordinator's pure core, and their replies. Pure.

Both API servers and the shell's own timers use these. A request carries everything that its decision depends on besides
the state: the time, and the topics of the broker's image. One request is one decision: its records commit together.

Errors of a whole request are raised (`model.errors`); errors of one partition are in the reply.
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


@dataclass(frozen=True, slots=True)
class TopicShape:
    topic_id: TopicId
    name: str
    partitions: int
    racks: tuple[frozenset[str], ...] = ()
    """Racks of each partition's replicas; empty if no broker has a rack."""


class TopicsView(Protocol):
    """The topics of one image. Immutable."""

    def by_name(self, name: str) -> TopicShape | None: ...

    def by_id(self, topic_id: TopicId) -> TopicShape | None: ...

    def names(self) -> Iterable[str]:
        """Return the sorted names of all topics that are not internal."""
        ...


# ---- Members of consumer groups


@dataclass(frozen=True, slots=True)
class LiveClassicGroup:
    """Live state of a classic group with members that the log lacks. The group is frozen while a request carries it."""

    stored_generation: int
    """Generation of the group's record in the log."""
    generation: int
    """The latest generation that members received."""
    protocols: Mapping[str, tuple[tuple[str, bytes], ...]]
    """Protocols and subscriptions of the current members. Others in the log have left or expired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Joins, renews, reports or leaves; the epochs are those of `HeartbeatRequest` in groups.proto."""

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
    """None: unchanged, and so for the pattern; on joining None means no subscription."""
    pattern: str | None = None
    assignor: str = ""
    session_timeout_ms: int = 0
    rebalance_timeout_ms: int = 0
    owned: frozenset[PartitionId] | None = None
    """None: as before."""
    is_streamed: bool | None = None
    """Whether it came on a stream. None: unchanged."""
    is_on_behalf: bool = False
    """Whether the coordinator made it in the member's name: it proves nothing about the member."""
    wants_assignment: bool = False
    """Whether the answer has the assignment even if nothing changes: the answer to a change before may be lost."""
    live_classic: LiveClassicGroup | None = None
    """Set if the member joins a classic group with members, which then becomes a consumer group."""


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    member_id: str
    member_epoch: int
    assignment: tuple[PartitionId, ...] | None
    """None: unchanged since the last reply."""
    session_timeout_ms: int
    is_revoking: bool = False
    """The member must revoke partitions: its rebalance timeout runs from this reply."""
    rebalance_timeout_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpireMember:
    """Removes a member whose timer has expired. Does nothing if its epoch has changed since."""

    group: str
    member_id: str
    member_epoch: int
    view: TopicsView
    now_ms: int
    is_rebalance: bool = False
    """The rebalance timeout has expired: does nothing if the member has revoked its partitions. A member gets one
    revocation per epoch, so this cannot be a later one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveMembers:
    """Removes members for an operator; both lists empty: all. The reply is {name as requested: error or None}."""

    group: str
    view: TopicsView
    now_ms: int
    member_ids: tuple[str, ...] = ()
    instance_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshTopics:
    """Makes a new target for one group if its subscribed topics have changed in the image."""

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
class CommitPendingOffsets(CommitOffsets):
    """Commits in the producer's open transaction. The reply is {partition: error or None}.

    Without member id and epoch (-1) it is not fenced by the group's members: older Kafka clients do not send them.
    """

    producer_id: int
    epoch: int
    """Of the producer."""
    number: int | None
    """Of the transaction, by its coordinator, which knows that it writes here. None: the producer is expected to have
    pending offsets here; `UnverifiedTransactionError` if it has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndPendingOffsets:
    """The marker of a transaction: turns its pending offsets into offsets, or drops them. A repeated one changes
    nothing."""

    producer_id: int
    epoch: int
    """See `Marker.epoch`."""
    number: int
    coordinator_epoch: int
    is_commit: bool
    is_strict: bool
    now_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetFences:
    """Forgets producers without pending offsets whose last marker came `retention_ms` ago, a bounded number of them.
    The reply is whether more remain."""

    now_ms: int
    retention_ms: int
    ids: tuple[int, ...] | None = None
    """Of these; None: of all."""


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
    """Expires offsets of groups that were empty for `retention_ms`, and of deleted topics (`gone`). One request expires
    a bounded number; the reply is whether more remain."""

    now_ms: int
    retention_ms: int
    gone: frozenset[TopicId] = frozenset()
    groups: tuple[str, ...] | None = None
    """Groups to scan, in this order; None: all."""


# ---- Questions, answered from the committed state


@dataclass(frozen=True, slots=True)
class Committed:
    """A committed offset; -1 if there is none."""

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
    """The protocol type of a classic group's members; "consumer" for a consumer group."""


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
