"""Requests to the transaction coordinator's machine, and its replies. Pure.

    request         reply              from
    InitProducer    InitReply          the owner: a new instance, or one that recovers from an error
    AddPartitions   AddReply           a partition's leader, a group's shard, or a client of version 1
    Join            JoinReply          a process that becomes a member
    Prepare         None               the owner
    End             EndReply           the owner
    Abort           bool: it was open  an operator
    Complete        bool: it completed    the shell, when all markers are replicated
    TimeOut         bool: it was aborted  the shell, at `queries.due_ms`
    ForgetIdle      bool: there is more    the shell

`version` is that of the client's protocol: 2 raises the epoch with every end.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidelog.coordinator.transactions.records import NO_EPOCH, NO_PRODUCER
from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.replication.transaction_messages import AddPartitions, AddReply

__all__ = [
    "Abort",
    "AddPartitions",
    "AddReply",
    "Complete",
    "End",
    "EndReply",
    "ForgetIdle",
    "InitProducer",
    "InitReply",
    "Join",
    "JoinReply",
    "Prepare",
    "ProducerIdNeeded",
    "TimeOut",
]


class ProducerIdNeeded(TidelogError):  # noqa: N818
    """The decision needs a new producer id: submit the request again with `new_producer_id`. For the shell only; to the
    runtime it is a rejection, since a decision may be repeated on another state."""

    code = ErrorCode.COORDINATOR_NOT_AVAILABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class InitProducer:
    transactional_id: str
    timeout_ms: int
    now_ms: int
    producer_id: int = NO_PRODUCER
    """With `epoch`, of an instance that recovers: it goes on only if nobody has replaced it."""
    epoch: int = NO_EPOCH
    keep_prepared: bool = False
    """Take over a prepared transaction instead of aborting it."""
    new_producer_id: int = NO_PRODUCER
    """A new id, if the caller has one; see `ProducerIdNeeded`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitReply:
    producer_id: int = NO_PRODUCER
    epoch: int = NO_EPOCH
    is_ending: bool = False
    """A transaction is being ended: repeat the request when it is complete. Nothing else is set."""
    has_open: bool = False
    """With `keep_prepared`: a prepared transaction is open, and belongs to this instance now."""
    open_producer_id: int = NO_PRODUCER
    open_epoch: int = NO_EPOCH
    """Of its batches."""
    last_token: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    transactional_id: str
    now_ms: int
    label: str = ""
    new_producer_id: int = NO_PRODUCER


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinReply:
    producer_id: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    transactional_id: str
    producer_id: int
    epoch: int
    now_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    transactional_id: str
    producer_id: int
    epoch: int
    is_commit: bool
    now_ms: int
    version: int = 2
    members: tuple[int, ...] = ()
    """Producer ids of the members to commit; those of all other members abort."""
    token: bytes = b""
    new_producer_id: int = NO_PRODUCER


@dataclass(frozen=True, slots=True, kw_only=True)
class EndReply:
    """What the owner uses from now on."""

    producer_id: int
    epoch: int
    was_done: bool = False
    """The token, or the repeated request, was stored before: nothing has changed."""
    is_earlier: bool = False
    """With `was_done`: the token is that of an earlier transaction. The sender's is open, if this is its identity, or
    was aborted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    transactional_id: str
    now_ms: int
    new_producer_id: int = NO_PRODUCER


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    transactional_id: str
    number: int
    now_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeOut:
    """Aborts transaction `number` if it is still open and its time is over."""

    transactional_id: str
    number: int
    now_ms: int
    new_producer_id: int = NO_PRODUCER


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetIdle:
    """Forgets ids without an open transaction that nobody has used for `expiration_ms`, and that have no token."""

    now_ms: int
    expiration_ms: int
    ids: tuple[str, ...] | None = None
    """Of these; None: of all."""
