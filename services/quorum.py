"""Describes the controller quorum and changes its voters. The active controller answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tidelog.metadata.controller_node import ControllerNode
from tidelog.metadata.decision import Done
from tidelog.metadata.voter_changes import PROBE_RETRY_MS, UNDO_MS
from tidelog.model.admin_errors import InvalidVoterKeyError, VoterNotFoundError
from tidelog.model.errors import InvalidRequestError
from tidelog.model.ids import NodeId
from tidelog.raft.membership import Member, directory_text
from tidelog.raft.status import MemberStatus, RaftStatus
from tidelog.services.authorization import Operation
from tidelog.services.context import RequestContext
from tidelog.services.deadline import Deadline, before_deadline
from tidelog.services.forwarding import ServiceCall
from tidelog.services.node import NodeAccess

NODE_ID_MAX = (1 << 31) - 1
ENDPOINTS_MAX = 16
NAME_LENGTH_MAX = 255
DIRECTORY_ID_BYTES = 16
VOTER_TIMEOUT_MS = 60_000
VOTER_SLACK_MS = PROBE_RETRY_MS + UNDO_MS
"""Added to the timeout of the forwarded call: the controller times out first, and undoes what it has begun."""
_ADDRESS = re.compile(r"(?:\[[0-9a-fA-F:.%]+\]|[^\s\[\]:/]{1,253}):([0-9]{1,5})")

Q = TypeVar("Q")
R = TypeVar("R")
RunOnActive = Callable[[ControllerNode, Q], Coroutine[Any, Any, R]]
Endpoints = tuple[tuple[str, str], ...]
"""(listener, host:port) each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumMember:
    """-1 are numbers that only the leader knows."""

    node: int
    is_voter: bool
    directory_id: bytes = b""
    endpoints: Endpoints = ()
    is_connected: bool = False
    error: str = ""
    log_end_offset: int = -1
    lag: int = -1
    silent_ms: int = -1
    is_recovering: bool = False
    stuck_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumDescription:
    node: int
    role: str
    leader: int
    members: tuple[QuorumMember, ...]
    epoch: int = 0
    high_watermark: int = 0
    log_start_offset: int = 0
    log_end_offset: int = 0
    durable_end_offset: int = 0
    without_leader_ms: int = 0
    observers: tuple[tuple[int, int], ...] = ()
    """(node, offset): nodes that tail the log."""
    snapshot_offset: int = 0
    snapshot_epoch: int = 0
    stale_ms: int | None = None
    """Set if this is the view of one node, without an active controller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeQuorum:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class AddVoter:
    node: int
    directory_id: bytes
    endpoints: Endpoints
    timeout_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveVoter:
    node: int
    directory_id: bytes = b""
    """Empty: any directory."""
    timeout_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateVoter:
    node: int
    endpoints: Endpoints
    directory_id: bytes = b""
    timeout_ms: int = 0


Change = TypeVar("Change", AddVoter, RemoveVoter, UpdateVoter)

DESCRIBE = ServiceCall("quorum/describe", Operation.DESCRIBE, DescribeQuorum, QuorumDescription)
ADD = ServiceCall("quorum/add-voter", Operation.ALTER, AddVoter, Done)
REMOVE = ServiceCall("quorum/remove-voter", Operation.ALTER, RemoveVoter, Done)
UPDATE = ServiceCall("quorum/update-voter", Operation.ALTER, UpdateVoter, Done)


class QuorumService:
    def __init__(self, node: NodeAccess) -> None:
        self._node = node
        if node.cache.controller is not None:
            self._serve(DESCRIBE, _describe)
            self._serve(ADD, _add)
            self._serve(REMOVE, _remove)
            self._serve(UPDATE, _update)

    def _serve(self, call: ServiceCall[Q, R], run: RunOnActive[Q, R]) -> None:
        """Answer forwarded requests; they raise `NotLeaderError` unless this controller is active."""

        async def answer(context: RequestContext, request: Q) -> R:
            return await before_deadline(context, run(self._node.cache.own_active(), request))

        self._node.forwarder.serve(call, answer)

    async def describe(self, context: RequestContext, *, allow_stale: bool = False) -> QuorumDescription:
        """Return the active controller's description. With `allow_stale`: else the view of this node."""
        node = self._node
        node.guard.admit_query(context)
        timeout_ms = node.deadline(context).left_ms()
        asking = self._ask(context, DESCRIBE, DescribeQuorum(), _describe, timeout_ms, is_repeatable=True)
        if not allow_stale:
            return await asking
        description, stale_ms = await node.forwarder.prefer_active(asking)
        if stale_ms is None:
            assert description is not None, "an active controller answered"
            return description
        return replace(self._own_view(stale_ms), stale_ms=stale_ms)

    async def describe_own(self, context: RequestContext) -> QuorumDescription:
        """Return the view of this node's controller."""
        self._node.guard.admit_query(context)
        controller = self._node.cache.controller
        if controller is None:
            raise InvalidRequestError(f"node {self._node.cache.node} is not a controller; ask without `local`")
        return _description(controller.driver.describe())

    def _own_view(self, stale_ms: int) -> QuorumDescription:
        cache = self._node.cache
        if cache.controller is not None:
            return _description(cache.controller.driver.describe())
        # A broker knows only which controllers there are.
        members = tuple(
            QuorumMember(node=node, is_voter=True, error="it does not answer") for node in cache.controllers()
        )
        return QuorumDescription(node=cache.node, role="broker", leader=-1, members=members, without_leader_ms=stale_ms)

    async def add_voter(self, context: RequestContext, request: AddVoter) -> None:
        self._node.guard.admit_change(context)
        _check_voter(request.node, request.directory_id, needs_directory=True)
        _check_endpoints(request.node, request.endpoints)
        await self._change(context, ADD, request, _add)

    async def remove_voter(self, context: RequestContext, request: RemoveVoter) -> None:
        self._node.guard.admit_change(context)
        _check_voter(request.node, request.directory_id)
        await self._change(context, REMOVE, request, _remove)

    async def update_voter(self, context: RequestContext, request: UpdateVoter) -> None:
        self._node.guard.admit_change(context)
        _check_voter(request.node, request.directory_id)
        _check_endpoints(request.node, request.endpoints)
        await self._change(context, UPDATE, request, _update)

    async def _change(
        self, context: RequestContext, call: ServiceCall[Change, Done], request: Change, run: RunOnActive[Change, Done]
    ) -> None:
        if request.timeout_ms < 0:
            raise InvalidRequestError(f"timeout_ms {request.timeout_ms}: at least 0")
        default_ms, max_ms = request.timeout_ms or VOTER_TIMEOUT_MS, self._node.limits.admin_timeout_max_ms
        timeout_ms = Deadline(context, default_ms=min(default_ms, max_ms), max_ms=max_ms).left_ms()
        request = replace(request, timeout_ms=timeout_ms)
        await self._ask(context, call, request, run, timeout_ms + VOTER_SLACK_MS, is_repeatable=False)

    async def _ask(
        self,
        context: RequestContext,
        call: ServiceCall[Q, R],
        request: Q,
        run: RunOnActive[Q, R],
        timeout_ms: int,
        *,
        is_repeatable: bool,
    ) -> R:
        return await self._node.forwarder.to_active(
            context,
            call,
            request,
            lambda controller: run(controller, request),
            is_repeatable=is_repeatable,
            timeout_ms=timeout_ms,
        )


# On the active controller.


async def _describe(controller: ControllerNode, _request: DescribeQuorum) -> QuorumDescription:
    await controller.driver.read_index()  # raises unless this controller leads now
    return _description(controller.driver.describe())


async def _add(controller: ControllerNode, request: AddVoter) -> Done:
    member = Member(NodeId(request.node), request.directory_id, request.endpoints)
    await controller.voters.add(member, timeout_ms=request.timeout_ms)
    return Done()


async def _remove(controller: ControllerNode, request: RemoveVoter) -> Done:
    _known_voter(controller, request.node, request.directory_id)
    await controller.voters.remove(NodeId(request.node))
    return Done()


async def _update(controller: ControllerNode, request: UpdateVoter) -> Done:
    known = _known_voter(controller, request.node, request.directory_id)
    member = Member(NodeId(request.node), known.directory, request.endpoints)
    await controller.voters.update(member, timeout_ms=request.timeout_ms)
    return Done()


def _known_voter(controller: ControllerNode, node: int, directory: bytes) -> Member:
    membership = controller.driver.core.log.membership
    member = membership.voter(NodeId(node)) or membership.learner(NodeId(node))
    if member is None:
        voters = ", ".join(str(voter.node) for voter in membership.voters)
        raise VoterNotFoundError(f"node {node} is not a voter; the voters are {voters}")
    if directory and member.directory != directory:
        raise InvalidVoterKeyError(
            f"voter {node} has the directory id {directory_text(member.directory)}, not {directory_text(directory)}"
        )
    return member


# Checks and descriptions.


def _check_voter(node: int, directory: bytes, *, needs_directory: bool = False) -> None:
    if not 0 <= node <= NODE_ID_MAX:
        raise InvalidRequestError(f"node id {node}: use 0 to {NODE_ID_MAX}")
    if (directory or needs_directory) and (len(directory) != DIRECTORY_ID_BYTES or not any(directory)):
        raise InvalidRequestError(f"voter {node}: a directory id has {DIRECTORY_ID_BYTES} bytes, not all of them 0")


def _check_endpoints(node: int, endpoints: Endpoints) -> None:
    if not 1 <= len(endpoints) <= ENDPOINTS_MAX:
        raise InvalidRequestError(f"voter {node}: 1 to {ENDPOINTS_MAX} endpoints, not {len(endpoints)}")
    if len({listener for listener, _ in endpoints}) != len(endpoints):
        raise InvalidRequestError(f"voter {node}: a listener is named twice")
    for listener, address in endpoints:
        match = _ADDRESS.fullmatch(address)
        if not (0 < len(listener) <= NAME_LENGTH_MAX and listener.isprintable()):
            raise InvalidRequestError(f"voter {node}: a listener's name has 1 to {NAME_LENGTH_MAX} characters")
        if match is None or not 0 < int(match[1]) < 65536:
            raise InvalidRequestError(f"voter {node}: {address[:NAME_LENGTH_MAX]!r} is not host:port")


def _description(report: RaftStatus) -> QuorumDescription:
    return QuorumDescription(
        node=report.node,
        role=report.role.value,
        leader=-1 if report.leader is None else report.leader,
        epoch=report.epoch,
        high_watermark=report.commit,
        log_start_offset=report.log_start,
        log_end_offset=report.log_end,
        durable_end_offset=report.durable_end,
        without_leader_ms=report.without_leader_ms,
        members=tuple(map(_member, report.members)),
        observers=report.observers,
        snapshot_offset=report.snapshot.offset,
        snapshot_epoch=report.snapshot.epoch,
    )


def _member(member: MemberStatus) -> QuorumMember:
    return QuorumMember(
        node=member.node,
        directory_id=member.directory,
        endpoints=member.endpoints,
        is_voter=member.is_voter,
        is_connected=member.is_connected,
        error=member.error or "",
        log_end_offset=-1 if member.match is None else member.match,
        lag=-1 if member.lag is None else member.lag,
        silent_ms=-1 if member.silent_ms is None else member.silent_ms,
        is_recovering=not member.counts,
        stuck_ms=member.stuck_ms or 0,
    )
