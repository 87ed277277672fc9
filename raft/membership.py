"""The voter set as a value, changed by one voter at a time. Pure.

A voter is a node *and* the directory that holds its vote and log. A node with an empty or swapped disk has another
directory id and is a different voter, even with the same node id: its former votes are unknown (as in KIP-853).

A membership is a log entry of its own kind. It is in force as soon as the entry is in a node's log, committed or not;
when truncation removes the entry, the one before is in force again. Learners receive the log and do not count. Two
consecutive memberships differ by at most one voter, so that any two majorities of them overlap.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass

import msgpack

from tidelog.model.errors import CorruptStateError
from tidelog.model.ids import NodeId

DIRECTORY_ID_BYTES = 16
VOTERS_MAX = 15


def directory_text(directory: bytes) -> str:
    """Returns a directory id as text: 22 characters, as Kafka writes it."""
    return base64.urlsafe_b64encode(directory).decode().rstrip("=")


@dataclass(frozen=True, slots=True, order=True)
class VoterKey:
    """The identity of a voter: node and directory."""

    node: NodeId
    directory: bytes


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """A voter or learner with its endpoints: (listener name, host:port) pairs."""

    node: NodeId
    directory: bytes
    endpoints: tuple[tuple[str, str], ...] = ()

    @property
    def key(self) -> VoterKey:
        return VoterKey(self.node, self.directory)


@dataclass(frozen=True, slots=True)
class Membership:
    """Voters and learners, each sorted by node id; a node is at most one of them."""

    voters: tuple[Member, ...] = ()
    learners: tuple[Member, ...] = ()

    @property
    def quorum(self) -> int:
        return len(self.voters) // 2 + 1

    def voter(self, node: NodeId) -> Member | None:
        return next((member for member in self.voters if member.node == node), None)

    def learner(self, node: NodeId) -> Member | None:
        return next((member for member in self.learners if member.node == node), None)

    def has_voter(self, key: VoterKey) -> bool:
        member = self.voter(key.node)
        return member is not None and member.directory == key.directory

    def has_room_for(self, node: NodeId) -> bool:
        """Whether one more learner fits: every learner may become a voter."""
        return self.learner(node) is not None or len(self.voters) + len(self.learners) < VOTERS_MAX

    def with_learner(self, member: Member) -> Membership:
        return Membership(self.voters, _put(self.learners, member))

    def with_voter(self, member: Member) -> Membership:
        """Promotes a learner, or changes the endpoints of a voter."""
        return Membership(_put(self.voters, member), _without(self.learners, member.node))

    def with_endpoints(self, member: Member) -> Membership | None:
        """Changes the endpoints of a voter or learner; returns None if this node and directory is neither."""
        if self.has_voter(member.key):
            return Membership(_put(self.voters, member), self.learners)
        known = self.learner(member.node)
        return self.with_learner(member) if known is not None and known.key == member.key else None

    def without(self, node: NodeId) -> Membership:
        return Membership(_without(self.voters, node), _without(self.learners, node))

    def is_one_step_from(self, other: Membership) -> bool:
        """Whether at most one voter was added or removed; only then do all majorities of the two overlap."""
        mine, theirs = {member.key for member in self.voters}, {member.key for member in other.voters}
        return len(mine ^ theirs) <= 1

    def encode(self) -> bytes:
        members = [[[m.node, m.directory, list(m.endpoints)] for m in group] for group in (self.voters, self.learners)]
        return bytes(msgpack.packb(["membership", 1, {"voters": members[0], "learners": members[1]}]))

    @classmethod
    def decode(cls, data: bytes) -> Membership:
        try:
            kind, _version, fields = msgpack.unpackb(data, strict_map_key=False)
            groups = [fields["voters"], fields["learners"]]
            voters, learners = (tuple(sorted(_member(raw) for raw in group)) for group in groups)
        except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
            raise CorruptStateError(f"a membership entry is unreadable: {error}") from error
        nodes = {member.node for member in (*voters, *learners)}
        if kind != "membership" or len(nodes) < len(voters) + len(learners) or len(nodes) > VOTERS_MAX:
            raise CorruptStateError(f"not a membership entry of at most {VOTERS_MAX} distinct members")
        return cls(voters, learners)


def _member(raw: list[object]) -> Member:
    node, directory, endpoints = raw
    if type(node) is not int or node < 0 or not isinstance(directory, bytes) or len(directory) != DIRECTORY_ID_BYTES:
        raise ValueError("a member is a node id, a directory id of 16 bytes, and endpoints")
    if not isinstance(endpoints, list):
        raise ValueError("endpoints are a list")
    return Member(NodeId(node), directory, tuple((str(name), str(address)) for name, address in endpoints))


def _put(members: tuple[Member, ...], member: Member) -> tuple[Member, ...]:
    return tuple(sorted((*_without(members, member.node), member)))


def _without(members: tuple[Member, ...], node: NodeId) -> tuple[Member, ...]:
    return tuple(member for member in members if member.node != node)
