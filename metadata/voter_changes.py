"""Changes of the voters, executed by the active controller.

    add       probe the endpoints --> learner --> caught up, it votes
                  |                      '-- timeout, or unreachable: the learner is removed again
                  '-- no answer, or another node answers: rejected, nothing was proposed
    update    probe the new endpoints --> the log has the endpoints of the voter
    remove    no probe: the removed node may be gone

A probe calls the endpoint itself, not the address that the transport has for the node, and requests the node's
identity. An endpoint is valid if the intended node answers there, with the intended directory.

A change continues if its caller is cancelled, and ends by its own deadline: completed or undone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import msgpack

from tidelog.model.admin_errors import DuplicateVoterError
from tidelog.model.errors import (
    CorruptStateError,
    InvalidRequestError,
    MembershipChangeError,
    NotLeaderError,
    RaftStoppedError,
    RemoteError,
    TidelogError,
    TransportError,
    UnknownOutcomeError,
    UnreachableError,
    WrongClusterError,
)
from tidelog.model.ids import NodeId, Offset
from tidelog.raft.driver import RaftDriver
from tidelog.raft.effects import Role
from tidelog.raft.membership import DIRECTORY_ID_BYTES, VOTERS_MAX, Member, directory_text
from tidelog.world.transport import Transport

LOGGER = logging.getLogger(__name__)

IDENTITY = "metadata-identity"
PROBE_ADDRESS = "metadata-look-at"
"""Call to another voter: it probes an address and returns the identity of the controller there."""
PROBE_MS = 2_000
PROBE_RETRY_MS = 5_000
"""Time a node may refuse connections before it counts as unreachable: it may have just started."""
PROBE_WAIT_S = 0.2
UNDO_MS = 5_000
"""Retry time for the removal of a learner after a failed addition."""
UNDO_WAIT_S = 0.1


@dataclass(frozen=True, slots=True)
class ControllerIdentity:
    """The identity of a controller, and the voters and learners that it knows."""

    node: NodeId
    directory: bytes
    epoch: int
    log_end: int
    leads: bool
    members: tuple[tuple[NodeId, bytes, bool], ...]
    """(node, directory, whether it votes)."""
    seen_peers: tuple[NodeId, ...] | None = None
    """Nodes whose messages it has ever processed; None if unknown."""

    def has_never_seen(self, node: NodeId) -> bool:
        """Whether no vote and no acknowledgement of this node was ever counted here."""
        return self.seen_peers is not None and node not in self.seen_peers

    def encode(self) -> bytes:
        fields = {
            "node": self.node,
            "directory": self.directory,
            "epoch": self.epoch,
            "log_end": self.log_end,
            "leads": self.leads,
            "members": [list(row) for row in self.members],
            "heard": None if self.seen_peers is None else list(self.seen_peers),
        }
        return bytes(msgpack.packb(["identity", 1, fields]))

    @classmethod
    def decode(cls, data: bytes) -> ControllerIdentity:
        try:
            kind, _version, fields = msgpack.unpackb(data)
            members = tuple((NodeId(int(node)), bytes(key), bool(votes)) for node, key, votes in fields["members"])
            found = cls(
                node=NodeId(int(fields["node"])),
                directory=bytes(fields["directory"]),
                epoch=int(fields["epoch"]),
                log_end=int(fields["log_end"]),
                leads=bool(fields["leads"]),
                members=members,
                seen_peers=None if fields["heard"] is None else tuple(NodeId(int(node)) for node in fields["heard"]),
            )
        except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
            raise CorruptStateError(f"the identity of a controller cannot be read: {error}") from error
        if kind != "identity" or len(found.directory) != DIRECTORY_ID_BYTES or len(members) > VOTERS_MAX:
            raise CorruptStateError("the identity of a controller cannot be read")
        return found


def identity_of(driver: RaftDriver) -> ControllerIdentity:
    core = driver.core
    membership = core.log.membership
    return ControllerIdentity(
        node=driver.me.node,
        directory=driver.me.directory,
        epoch=core.epoch,
        log_end=core.log.end,
        leads=core.role is Role.LEADER,
        members=(
            *((member.node, member.directory, True) for member in membership.voters),
            *((member.node, member.directory, False) for member in membership.learners),
        ),
        seen_peers=driver.seen_peers.nodes,
    )


class VoterChanges:
    """The voter changes of one controller. Only the active controller executes them; the driver of another rejects
    them."""

    def __init__(self, driver: RaftDriver, transport: Transport) -> None:
        self._driver = driver
        self._transport = transport
        self._tasks: set[asyncio.Task[None]] = set()
        transport.serve(IDENTITY, self._serve)
        transport.serve(PROBE_ADDRESS, self._serve_probe_address)

    async def _serve(self, _sender: NodeId, _data: bytes) -> bytes:
        return identity_of(self._driver).encode()

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def add(self, member: Member, *, timeout_ms: int) -> None:
        """Adds a voter; returns when it votes. Raises `DuplicateVoterError`, `MembershipChangeError` if nothing was
        changed in the end, and `UnknownOutcomeError` if this controller stopped leading meanwhile."""
        if self._driver.core.log.membership.voter(member.node) is not None:
            raise DuplicateVoterError(f"node {member.node} is a voter already")
        await self._run_shielded(self._add(member, timeout_ms))

    async def update(self, member: Member, *, timeout_ms: int) -> None:
        """Updates the endpoints of a voter or learner; returns when the log has them."""
        await self._run_shielded(self._update(member, timeout_ms))

    async def remove(self, node: NodeId) -> None:
        await self._driver.change_membership(remove=node)

    async def _run_shielded(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            LOGGER.warning("a change of the voters failed: %s", error)

    # Adding.

    async def _add(self, member: Member, timeout_ms: int) -> None:
        deadline_s = asyncio.get_running_loop().time() + timeout_ms / 1000
        found = await self._probe(member, timeout_ms)
        if found.leads:
            raise MembershipChangeError(
                f"node {member.node} leads a quorum of its own: it was formatted with first voters. Format it with "
                "--no-initial-controllers, in an empty directory, and add it with its new directory id"
            )
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._driver.change_membership(add=member)
        except TimeoutError:
            if not await self._undo(member):
                return
            raise MembershipChangeError(
                f"node {member.node} did not catch up in {timeout_ms / 1000:g} s: it was removed again, and the voters "
                "are as before. See the node's log, and give it more time with --timeout"
            ) from None
        except MembershipChangeError as error:
            membership = self._driver.core.log.membership
            if membership.learner(member.node) is None and membership.voter(member.node) is None:
                raise MembershipChangeError(f"node {member.node} was not added: {error}") from error
            raise

    async def _undo(self, member: Member) -> bool:
        """Removes the learner; returns False if it is a voter by now, so that there is nothing to undo."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + UNDO_MS / 1000
        why = "no time left"
        while loop.time() < end_s:
            membership = self._driver.core.log.membership
            learner = membership.learner(member.node)
            try:
                if membership.has_voter(member.key):
                    await self._driver.wait_applied(Offset(self._driver.core.log.membership_offset + 1))
                    return False
                if learner is None or learner.key != member.key:
                    return True
                async with asyncio.timeout_at(end_s):
                    await self._driver.change_membership(remove=member.node)
                return True
            except MembershipChangeError as error:
                why = str(error)
            except (NotLeaderError, RaftStoppedError) as error:
                why = str(error)
                break
            except TimeoutError:
                break
            await asyncio.sleep(UNDO_WAIT_S)
        raise UnknownOutcomeError(
            f"node {member.node} did not catch up in time and could not be removed again ({why}): it receives "
            f"the log and does not count. Run `tidelog quorum remove --node-id {member.node}` when a majority of the "
            "voters is up"
        )

    # Endpoints.

    async def _update(self, member: Member, timeout_ms: int) -> None:
        driver = self._driver
        membership = driver.core.log.membership
        if member in (membership.voter(member.node), membership.learner(member.node)):
            # Nothing to change, but it may not be committed yet.
            await driver.wait_applied(Offset(driver.core.log.membership_offset + 1))
            return
        await self._probe(member, timeout_ms)
        await driver.change_membership(update=member)

    async def _probe(self, member: Member, timeout_ms: int) -> ControllerIdentity:
        """Checks that every endpoint that the cluster would use answers as this member; raises
        `MembershipChangeError`."""
        assert member.endpoints, "a member has endpoints"
        used = dict.fromkeys([self._driver.endpoint(member.endpoints), member.endpoints[0][1]])
        for address in used:
            try:
                found = await self._identity_at(member.node, address, timeout_ms)
            except MembershipChangeError:
                if member.node != self._driver.me.node:
                    raise
                # The advertised name of this node may resolve only on others.
                seen_by_another = await self._ask_another(member.node, address)
                if seen_by_another is None:
                    raise
                found = seen_by_another
            if found.directory != member.directory:
                raise MembershipChangeError(
                    f"node {member.node} at {address} has the directory id {directory_text(found.directory)}, not "
                    f"{directory_text(member.directory)}: nothing was changed. Check it on that machine with "
                    "`tidelog storage info`"
                )
        return found

    async def _identity_at(self, node: NodeId, address: str, timeout_ms: int) -> ControllerIdentity:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + min(timeout_ms, PROBE_RETRY_MS) / 1000
        while True:
            try:
                return await self._ask_identity(node, address, min(timeout_ms, PROBE_MS))
            except UnreachableError as error:
                if loop.time() + PROBE_WAIT_S >= end_s:
                    raise MembershipChangeError(
                        f"{_reason(error, node, address)}: nothing was changed. Start the node first, or correct "
                        "--endpoint: it is the address of the node's controller listener"
                    ) from error
            await asyncio.sleep(PROBE_WAIT_S)

    async def _ask_another(self, node: NodeId, address: str) -> ControllerIdentity | None:
        """Asks another voter who answers at the address."""
        question = bytes(msgpack.packb([node, address]))
        for voter in self._driver.core.log.membership.voters:
            if voter.node != self._driver.me.node:
                try:
                    data = await self._transport.call(voter.node, PROBE_ADDRESS, question, timeout_ms=2 * PROBE_MS)
                    return ControllerIdentity.decode(data)
                except TidelogError as error:
                    LOGGER.info("peer=%d cannot probe %s: %s", voter.node, address, error)
        return None

    async def _serve_probe_address(self, _sender: NodeId, data: bytes) -> bytes:
        try:
            node, address = msgpack.unpackb(data)
            return (await self._ask_identity(NodeId(int(node)), str(address), PROBE_MS)).encode()
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise InvalidRequestError(f"the request has no node and address to probe: {error}") from error

    async def _ask_identity(self, node: NodeId, address: str, timeout_ms: int) -> ControllerIdentity:
        try:
            data = await self._transport.call_at(node, address, IDENTITY, b"?", timeout_ms=timeout_ms)
            return ControllerIdentity.decode(data)
        except WrongClusterError as error:
            raise MembershipChangeError(f"{error}: nothing was changed. Correct --endpoint or --node-id") from error
        except UnreachableError:
            raise
        except (TransportError, RemoteError, CorruptStateError) as error:
            raise MembershipChangeError(
                f"{address} does not answer as a controller ({_reason(error, node, address)}): nothing was changed. "
                "--endpoint is the address of the node's controller listener, 9192 as a rule"
            ) from error


def _reason(error: TidelogError, node: NodeId, address: str) -> str:
    """`error` with the node and its address, once. The transport may cut its text inside of parentheses."""
    prefix, text = f"node {node} at {address}", str(error)
    text = text.removesuffix(")") if text.count(")") > text.count("(") else text
    return text if prefix in text else f"{prefix}: {text}"
