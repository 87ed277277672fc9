"""The safety properties of Raft, checked over all cores of a test after every step.

A checker sees what happens (a role, a message that leaves, an entry that commits, a read that is answered) and raises
`AssertionError` at the first step that breaks a property. It draws no randomness and changes nothing.

    election safety       at most one leader an epoch
    vote once             a voter grants at most one candidate an epoch, and the grant is on its disk when it is sent
    durable acks          what a follower acknowledges is on its disk
    leader completeness   a new leader's log holds every entry that was committed in an epoch before its own
    state machine safety  one entry for each committed offset, on every node
    log matching          two logs that agree on the epoch of an offset agree on everything before it
    commit                never falls, in one life of a node
    linearizable reads    a read is answered with at least what was committed anywhere when it was asked
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING
from zlib import crc32

from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.core import RaftCore
from tidelog.raft.effects import Role
from tidelog.raft.messages import AppendResponse, Entry, Message, VoteRequest, VoteResponse

if TYPE_CHECKING:
    from support.raft.core_cluster import Stored


def next_state(state: int, entry: Entry) -> int:
    """The state machine of the tests: a digest of everything applied so far."""
    return crc32(entry.data, crc32(b"%d/%d" % (entry.epoch, entry.kind), state))


class Checker:
    def __init__(self) -> None:
        self.leaders: dict[Epoch, NodeId] = {}
        self.votes: dict[tuple[NodeId, bytes, Epoch], NodeId] = {}
        self.committed: list[Entry] = []
        """Every entry that was ever handed out, by offset; the list only grows."""
        self.commit_epochs: list[Epoch] = []
        """The epoch, by offset, of the node that first handed it out; it was committed in that epoch or before."""
        self.states: list[int] = [0]
        """The state after so many entries."""
        self.commit_known = Offset(0)
        """The largest commit offset that any core ever had."""
        self._commits: dict[NodeId, tuple[RaftCore, Offset]] = {}
        self._asked: dict[int, Offset] = {}
        """Read token: what was committed when it was asked."""

    def after_step(self, core: RaftCore) -> None:
        core.validate()
        if core.role is Role.LEADER:
            known = self.leaders.setdefault(core.epoch, core.me.node)
            assert known == core.me.node, f"two leaders in epoch {core.epoch}: {known} and {core.me.node}"
        before, commit = self._commits.get(core.me.node, (core, Offset(0)))
        assert before is not core or core.commit >= commit, "commit fell"
        self._commits[core.me.node] = (core, core.commit)
        self.commit_known = max(self.commit_known, core.commit)

    def on_leader(self, core: RaftCore) -> None:
        # Votes may come so late that a newer leader has committed meanwhile: what counts is what was before its epoch.
        end = max((at + 1 for at, epoch in enumerate(self.commit_epochs) if epoch < core.epoch), default=0)
        log = core.log
        assert log.end >= end, f"leader {core.me.node} lacks committed entries"
        held = log.entries[: max(end - log.start, 0)]
        assert held == self.committed[log.start : end], f"leader {core.me.node} contradicts what is committed"

    def on_committed(self, first: Offset, entries: Iterable[Entry], epoch: Epoch) -> None:
        for offset, entry in enumerate(entries, first):
            if offset < len(self.committed):
                assert self.committed[offset] == entry, f"two committed entries at offset {offset}"
            else:
                assert offset == len(self.committed), "committed entries leave no hole"
                self.committed.append(entry)
                self.commit_epochs.append(epoch)
                self.states.append(next_state(self.states[-1], entry))

    def on_send(self, core: RaftCore, disk: Stored, to: NodeId, message: Message) -> None:
        epoch, voted_for = disk.hard_state
        if isinstance(message, VoteResponse) and message.granted:
            key = (core.me.node, core.me.directory, message.epoch)
            assert self.votes.setdefault(key, to) == to, f"{core.me.node} votes twice in epoch {message.epoch}"
            assert epoch > message.epoch or (
                epoch == message.epoch and voted_for is not None and voted_for.node == to
            ), "a vote is sent before it is durable"
        elif isinstance(message, VoteRequest):
            key = (core.me.node, core.me.directory, message.epoch)
            assert self.votes.setdefault(key, core.me.node) == core.me.node, "asks for votes, but voted for another"
            assert epoch >= message.epoch, "asks for votes before its own is durable"
        elif isinstance(message, AppendResponse) and not message.rejected and message.epoch == core.epoch:
            assert epoch >= message.epoch, "an epoch is sent before it is durable"
            assert disk.covers(message.match, core.log.epoch_before(message.match)), "an ack of what is not durable"

    def on_read_asked(self, token: int) -> None:
        self._asked[token] = self.commit_known

    def on_read_answered(self, token: int, offset: Offset) -> None:
        assert offset >= self._asked.pop(token), "a stale read"

    def log_matching(self, cores: Iterable[RaftCore]) -> None:
        """Compare all pairs of logs: the last offset where the epochs agree decides for everything before it."""
        logs = [core.log for core in cores]
        for index, one in enumerate(logs):
            for other in logs[index + 1 :]:
                first, end = max(one.start, other.start), min(one.end, other.end)
                if end <= first:
                    continue
                mine = one.entries[first - one.start : end - one.start]
                theirs = other.entries[first - other.start : end - other.start]
                if mine == theirs:
                    continue
                last = max((i for i in range(len(mine)) if mine[i].epoch == theirs[i].epoch), default=-1)
                assert mine[: last + 1] == theirs[: last + 1], "logs that agree on an epoch differ before it"
