"""What goes in and out of the rounds of a classic group (`classic_group.py`).

A request carries a `ticket`, a number by which the shell finds who waits for the answer: joins and syncs are answered
when their round is over, often by what another member does.
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
    ticket: int
    now_ms: int
    member_id: str
    """Empty: a new member."""
    new_member_id: str
    """What to call a member that has no id yet; unique, made by the shell."""
    protocol_type: str
    protocols: tuple[tuple[str, bytes], ...]
    """(name, the member's metadata under it), the most liked first."""
    session_timeout_ms: int
    rebalance_timeout_ms: int
    instance_id: str = ""
    client_id: str = ""
    client_host: str = ""
    needs_known_id: bool = True
    """A new dynamic member is given an id first and joins again with it (MEMBER_ID_REQUIRED)."""
    topics: tuple[str, ...] = ()
    """What the member reads, as far as the door can tell."""


def check_size(request: JoinGroup, limits: GroupLimits) -> None:
    """What a member asks to be kept of it is bounded."""
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
    """For the leader alone: who takes part."""
    skip_assignment: bool = False
    """A static leader is back and nothing has changed: it need not deal again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncGroup:
    ticket: int
    now_ms: int
    member_id: str
    generation: int
    instance_id: str = ""
    protocol_type: str | None = None
    protocol: str | None = None
    """Checked if given."""
    assignments: tuple[tuple[str, bytes], ...] = ()
    """From the leader: (member id, what it shall do)."""


@dataclass(frozen=True, slots=True)
class SyncReply:
    protocol_type: str
    protocol: str
    assignment: bytes
    """The member's own, nobody else's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassicHeartbeat:
    """The answer is None."""

    ticket: int
    now_ms: int
    member_id: str
    generation: int
    instance_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveGroup:
    """By members, or by an operator in their name. The answer is a tuple of errors or None, in order."""

    ticket: int
    now_ms: int
    members: tuple[tuple[str, str], ...]
    """(member id, instance id); an instance id alone is enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreGeneration:
    """To the replicated machine. The reply is None."""

    group: str
    value: ClassicValue
    now_ms: int


# ---- Classic members of consumer groups, to the replicated machine


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
    """What there is to `store` is submitted, and its outcome goes to `ClassicGroup.stored`. The answers here wait for
    it; those that are no errors turn into its error if it fails."""

    store: StoreGeneration | None = None
    answers: tuple[tuple[int, JoinReply | SyncReply | tuple[TidelogError | None, ...] | TidelogError | None], ...] = ()
    """(ticket, reply, or the error)."""
