"""Checks that the quorum does not know a voter yet, before its directory is formatted or first started.

A voter that has lost its disk must not vote again under its old directory id: it has forgotten its votes and what it
has acknowledged. A random id is always safe, since nobody counts it. An id that is given (`--initial-controllers`) or
follows from the node id (`controller.quorum.voters`) is safe only the first time. So the other controllers are asked:

    answer                                                   format with first voters
    nobody answers                                           done, with a warning: the first start of a cluster is so
    they know this voter, and no leader was ever elected     done: the cluster is being started
    all others answer, and none has ever heard from it       done: it is the last one to be started
    a majority answers, and has never heard from it, nor     done: it is one of the last ones to be started. Those that
    from any that does not answer                            do not answer are too few to have elected a leader
    they know this node, anything else                       rejected
    they have a leader, and do not know this node            rejected: it joins with --no-initial-controllers

Another directory of the same node that is formatted is the same proof as an answer: the node was there before.

The same is asked when a directory is started for the first time, since nobody may have answered when it was formatted.
Then one controller that has heard from this voter is enough to reject it, and nobody else has to answer.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from uuid import UUID

from grpc import aio  # type: ignore[import-untyped]

from tidelog.metadata.voter_changes import IDENTITY, ControllerIdentity
from tidelog.model.errors import CorruptStateError, WrongDirectoryError
from tidelog.model.ids import NodeId
from tidelog.raft.membership import directory_text
from tidelog.rpc.grpc.transport import call_unknown
from tidelog.server.config import NodeConfig
from tidelog.server.controller import ControllerRole
from tidelog.server.storage import LOST_VOTER, Voters, read_meta, replace_voter

ASK_TIMEOUT_S = 2.0


class KnownVoterError(WrongDirectoryError):
    """The directory must not be formatted as a first voter: the quorum knows this node."""

    @property
    def advice(self) -> str:
        return "a node that has forgotten its votes must not vote again under its old directory id"


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of the other controllers."""

    asked: tuple[str, ...]
    found: tuple[tuple[str, ControllerIdentity], ...]
    """(address, identity) of those that answered."""


async def ask_controllers(
    config: NodeConfig, cluster_id: str, voters: Voters, *, timeout_s: float = ASK_TIMEOUT_S
) -> Answers:
    """Ask all other controllers of the file and the first voters, concurrently."""
    rows = [*config.voters, *((node, address) for node, address, _ in voters.members)]
    named = [*(address for node, address in rows if node != config.node), *config.bootstrap]
    own = {address for node, address in rows if node == config.node} | {str(config.own.advertised)}
    asked = tuple(address for address in dict.fromkeys(named) if address not in own)
    answers = await asyncio.gather(*(_ask(config.node, cluster_id, address, timeout_s) for address in asked))
    found = tuple((address, one) for address, one in zip(asked, answers, strict=True) if one is not None)
    return Answers(asked, tuple(row for row in found if row[1].node != config.node))


async def _ask(me: NodeId, cluster_id: str, address: str, timeout_s: float) -> ControllerIdentity | None:
    """Return the identity; None if no controller of this cluster answers."""
    try:
        return ControllerIdentity.decode(
            await call_unknown(me, cluster_id, address, IDENTITY, timeout_ms=int(timeout_s * 1000))
        )
    except (aio.AioRpcError, CorruptStateError):
        return None


def check_first_voters(config: NodeConfig, cluster_id: str, voters: Voters, answers: Answers) -> None:
    """Raises `KnownVoterError` if a directory with these first voters could vote twice, or found a second quorum."""
    if not voters.members:
        return
    wanted = next((directory for node, _, directory in voters.members if node == config.node), None)
    for path in config.directories:
        if path != config.metadata_dir and os.path.isdir(path) and read_meta(path) is not None:
            raise KnownVoterError(
                f"{config.metadata_dir} is to hold the vote of node {config.node}, and {path} says that this node was "
                f"formatted before: a voter whose disk is lost must not come back under an id that it had. "
                f"{replace_voter(config, cluster_id)}",
                path=config.metadata_dir,
            )
    check_answers(config, cluster_id, wanted, answers, needs_all=True)


async def check_first_start(config: NodeConfig, cluster_id: str, controller: ControllerRole) -> None:
    """Raises `KnownVoterError` if this directory was never started and the quorum has heard from its voter before."""
    seen_peers = controller.node.driver.seen_peers
    if seen_peers.nodes != ():
        return
    members = controller.boot_membership.voters
    own = next((UUID(bytes=member.directory) for member in members if member.node == config.node), None)
    rows = tuple((member.node, member.endpoints[0][1], None) for member in members if member.endpoints)
    answers = await ask_controllers(config, cluster_id, Voters(rows))
    if own is not None:
        check_answers(config, cluster_id, own, answers, needs_all=False)
    await seen_peers.add(config.node)


def check_answers(
    config: NodeConfig, cluster_id: str, wanted: UUID | None, answers: Answers, *, needs_all: bool
) -> None:
    """Raises `KnownVoterError`. `wanted` is the directory id that this node is to vote with; None: a new one.
    `needs_all`: all other voters have to say that they never heard from it, not only those that answer."""
    elected = [(address, one) for address, one in answers.found if one.epoch > 0 or one.leads]
    if not elected:
        return
    address, newest = max(elected, key=lambda row: (row[1].epoch, row[1].log_end))
    known = next((directory for node, directory, _ in newest.members if node == config.node), None)
    if wanted is not None and wanted.bytes == known:
        others = [node for node, _, votes in newest.members if votes and node != config.node]
        answered = {one.node: one for _, one in answers.found}
        is_heard = any(not one.has_never_seen(config.node) for one in answered.values())
        silent = [node for node in others if node not in answered]
        if not is_heard and (not needs_all or not silent or _never_ran(config.node, others, silent, answered)):
            return
    voting = ", ".join(str(node) for node, _, votes in newest.members if votes)
    if known is None:
        raise KnownVoterError(
            f"cluster {cluster_id} has a quorum already (node {newest.node} at {address} says that {voting} vote), and "
            f"node {config.node} is not part of it: format it with --no-initial-controllers instead, start it, and run "
            f"`tidelog quorum add --node-id {config.node} --directory-id ID --endpoint {config.own.advertised}`",
            path=config.metadata_dir,
        )
    raise KnownVoterError(
        f"the quorum of cluster {cluster_id} has voter {config.node} with directory id {directory_text(known)} already "
        f"(node {newest.node} at {address} says so{_silent_note(newest, config.node, answers)}): a voter whose disk is "
        f"lost must not come back under an id that it had. {replace_voter(config, cluster_id)}",
        path=config.metadata_dir,
    )


def _never_ran(
    me: NodeId, others: list[NodeId], silent: list[NodeId], answered: dict[NodeId, ControllerIdentity]
) -> bool:
    """Whether those that do not answer cannot have counted a vote or an acknowledgement of this node: to lead, one of
    them needs a vote of those that answer, and those have received messages only from each other."""
    voters = len(others) + 1
    seen_peers = {node for one in answered.values() for node in (() if one.seen_peers is None else one.seen_peers)}
    is_minority = len(silent) + 1 < voters // 2 + 1
    return is_minority and seen_peers <= answered.keys() and all(one.has_never_seen(me) for one in answered.values())


def _silent_note(newest: ControllerIdentity, me: NodeId, answers: Answers) -> str:
    answered = {one.node for _, one in answers.found}
    silent = [str(node) for node, _, votes in newest.members if votes and node != me and node not in answered]
    return f"; {', '.join(silent)} did not answer" if silent else ""


def unknown_note(config: NodeConfig, voters: Voters, answers: Answers) -> str | None:
    """Return a note if no controller answered and this voter may have had its directory id before."""
    own = next((directory for node, _, directory in voters.members if node == config.node), None)
    if own is None or not answers.asked or answers.found:
        return None
    return (
        f"none of the other controllers answers ({', '.join(answers.asked)}), as at the first start of a cluster. "
        f"If its disk was lost, do not start this node: {LOST_VOTER}"
    )
