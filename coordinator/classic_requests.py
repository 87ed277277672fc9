"""Requests and effects of the rounds of a classic group (`classic_group.py`). Pure.

A request carries a `ticket`, a number by which the shell finds the waiting caller: joins and syncs are answered when
their round is over, often by an event of another member.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidelog.coordinator.limits import GroupLimits
from tidelog.coordinator.records import ClassicMember, ClassicValue
from tidelog.coordinator.requests import TopicsView
from tidelog.model.errors import InvalidRequestError, TidelogError
from tidelog.model.group_errors import RebalanceInProgressError


class GroupMigratedError(RebalanceInProgressError):
    """The group has changed its protocol since the request was dispatched: dispatch it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinGroup:
    """`ClassicRounds` sets `ticket`, `now_ms` and `new_member_id`, the group service what it knows of the client."""

    ticket: int = 0
    now_ms: int = 0
    member_id: str
    """Empty: a new member."""
    new_member_id: str = ""
    """Id for a member that has none; unique."""
    protocol_type: str
    protocols: tuple[tuple[str, bytes], ...]
    """(name, the member's metadata under it), in order of preference."""
    session_timeout_ms: int
    rebalance_timeout_ms: int
    instance_id: str = ""
    client_id: str = ""
    client_host: str = ""
    needs_known_id: bool = True
    """A new dynamic member is given an id first and joins again with it (MEMBER_ID_REQUIRED)."""
    topics: tuple[str, ...] = ()
    """Topics of the member's subscriptions, as far as they can be read (`consumer_protocol.subscribed_topics`)."""


def check_size(request: JoinGroup, limits: GroupLimits) -> None:
    """Raise if what is stored for a member is over its limits."""
    names = (request.member_id, request.instance_id, request.client_id, request.client_host, request.protocol_type)
    longest = max(len(name) for name in (*names, *(name for name, _ in request.protocols)))
    if longest > limits.name_length_max:
        raise InvalidRequestError(f"a name of {longest} characters is over the limit of {limits.name_length_max}")
    if len(request.protocols) > limits.protocols_max:
        raise InvalidRequestError(f"{len(request.protocols)} protocols are over the limit of {limits.protocols_max}")
    if sum(len(metadata) for _, metadata in request.protocols) > limits.classic_metadata_bytes_max:
        raise InvalidRequestError(f"metadata of a member has at most {limits.classic_metadata_bytes_max} bytes")
    if request.rebalance_timeout_ms < 0:
        raise InvalidRequestError(f"a rebalance timeout of {request.rebalance_timeout_ms} ms")


@dataclass(frozen=True, slots=True)
class JoinedMember:
    member_id: str
    instance_id: str
    metadata: bytes


@dataclass(frozen=True, slots=True)
class JoinReply:
    member_id: str
    generation: int
    protocol_type: str
    protocol: str
    leader: str
    members: tuple[JoinedMember, ...] = ()
    """For the leader only: the members of the generation."""
    skip_assignment: bool = False
    """A static leader has returned and nothing has changed: it need not assign again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncGroup:
    """`ClassicRounds` sets `ticket` and `now_ms`."""

    ticket: int = 0
    now_ms: int = 0
    member_id: str
    generation: int
    instance_id: str = ""
    protocol_type: str | None = None
    protocol: str | None = None
    """None: `protocol` is not checked; the same holds for `protocol_type`."""
    assignments: tuple[tuple[str, bytes], ...] = ()
    """From the leader: (member id, assignment)."""


@dataclass(frozen=True, slots=True)
class SyncReply:
    protocol_type: str
    protocol: str
    assignment: bytes
    """The member's own assignment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveGroup:
    """By members, or by an operator in their name. The answer is a tuple of errors or None, in order."""

    ticket: int
    now_ms: int
    members: tuple[tuple[str, str], ...]
    """(member id, instance id); an instance id alone is enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreGeneration:
    """A request to the replicated state machine: stores a generation. The reply is None."""

    group: str
    value: ClassicValue
    now_ms: int


# ---- Requests of classic members of consumer groups to the replicated state machine


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassicJoin:
    """The reply is a `JoinReply`: it comes at once, and its generation is the member's new epoch."""

    group: str
    join: JoinGroup
    view: TopicsView
    now_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassicSync:
    """The reply is a `SyncReply` with what the coordinator has assigned."""

    group: str
    sync: SyncGroup
    view: TopicsView
    now_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Downgrade:
    """A consumer group whose members all speak the classic protocol becomes a classic group, if the policy allows it.
    The reply is None."""

    group: str
    view: TopicsView
    now_ms: int


@dataclass(frozen=True, slots=True)
class ClassicDetails:
    """A classic group as it is now. Unless it is stable, no protocol is shown, and of its members neither metadata nor
    assignments."""

    group: str
    state: str
    protocol_type: str
    protocol: str
    members: tuple[ClassicMember, ...]


@dataclass(frozen=True, slots=True)
class ClassicEffects:
    """The caller submits `store` and passes its outcome to `ClassicGroup.stored`. The answers wait for it; if storing
    fails, its error replaces the successful answers."""

    store: StoreGeneration | None = None
    answers: tuple[tuple[int, JoinReply | SyncReply | tuple[TidelogError | None, ...] | TidelogError | None], ...] = ()
    """(ticket, reply, or the error)."""
