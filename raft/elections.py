"""How a node comes to lead, and whom it helps to: the election timer, pre-votes, votes. A part of the core, and pure.

The election timer runs while the node does not lead: `due_ms` is when it asks for pre-votes if it hears no leader until
then. A node that has won a majority of pre-votes asks for votes in the next epoch; one that has won those leads. A
refusal brings the next try closer than a timeout would, but each try without a leader waits longer than the last. The
only voter has nobody to wait for: it asks at the first tick.

Invariants (numbers as in `core`):
 1. A vote leaves only after it is durable, also the node's own vote for itself; one vote an epoch.
 5. Granting or refusing a pre-vote changes nothing that another node could notice (R3).
 7. Who recovers neither votes nor asks.
- `votes` holds the answers to the question that is asked now, and to no other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.effects import Role
from tidelog.raft.membership import VoterKey
from tidelog.raft.messages import (
    Disconnected,
    PreVoteRequest,
    PreVoteResponse,
    Tick,
    TimeoutNow,
    VoteRequest,
    VoteResponse,
)

if TYPE_CHECKING:
    from tidelog.raft.core import RaftCore

LONG_AGO_MS = -(1 << 60)


class Elections:
    __slots__ = ("_campaigns", "_gone", "contact_ms", "core", "due_ms", "patience_ms", "refusers", "votes")

    def __init__(self, core: RaftCore, now_ms: int) -> None:
        self.core = core
        self.contact_ms = LONG_AGO_MS
        """When the leader was heard last."""
        self.patience_ms = 0
        """The election timeout that was drawn last: drawn anew for each leader and each campaign, not each message."""
        self.due_ms = 0
        self.votes: dict[NodeId, bool] = {}
        self.refusers: set[NodeId] = set()
        """Voters that refused when they were asked last, since there was a leader. To be told, not to decide on."""
        self._campaigns = 0
        """How often it has asked for votes since there was a leader."""
        self._gone: set[NodeId] = set()
        """Peers whose stream broke and that were not heard since: no vote is to be expected of them."""
        self.restart(now_ms)
        if [member.key for member in core.log.membership.voters] == [core.me]:
            self.due_ms = now_ms  # nobody else to hear of first

    # The timer.

    def draw_patience(self) -> int:
        config = self.core.config
        self.patience_ms = self.core.random.randint(config.election_timeout_min_ms, config.election_timeout_max_ms)
        return self.patience_ms

    def restart(self, now_ms: int) -> None:
        self.due_ms = now_ms + self.draw_patience()

    def step_back(self, now_ms: int) -> None:
        """After it gave up leadership: let the others go first."""
        self.contact_ms = LONG_AGO_MS
        self.due_ms = now_ms + self.core.config.election_timeout_max_ms + self.draw_patience()

    def found_leader(self, leader: NodeId) -> None:
        self._campaigns = 0
        self.refusers.clear()
        self._gone.discard(leader)
        self.draw_patience()

    def recovered(self) -> None:
        """It may campaign from now on, and not at once: the leader that restored it is there."""
        self.due_ms = max(self.due_ms, self.contact_ms + self.core.config.election_timeout_min_ms)

    def may_campaign(self) -> bool:
        """A voter may; so may one that is being removed, until that has committed: the others may need its log for it.

        It then asks the voters that remain, and has no vote itself.
        """
        core = self.core
        return core.recovering_until is None and core.log.may_have_voter(core.me, core.commit)

    def on_tick(self, _event: Tick, now_ms: int) -> None:
        core = self.core
        if core.leading is not None:
            core.leading.check_quorum(now_ms)
        elif now_ms >= self.due_ms and self.may_campaign():
            if self._disk_hangs(now_ms):
                self.restart(now_ms)
            else:
                self._ask_for_pre_votes(now_ms)

    def _disk_hangs(self, now_ms: int) -> bool:
        """A node whose disk hangs could not keep a vote, its own or another's: it asks for none and promises none."""
        since = self.core.persist_since_ms
        return since is not None and now_ms - since > self.core.config.election_timeout_max_ms

    def on_disconnected(self, event: Disconnected, now_ms: int) -> None:
        core = self.core
        self._gone.add(event.peer)
        if core.leading is not None:
            core.leading.disconnected(event.peer)
        elif core.role is Role.FOLLOWER and event.peer == core.leader:
            wait = core.random.randint(0, core.config.broken_stream_wait_max_ms)
            core.become(Role.FOLLOWER, None)
            self.contact_ms = LONG_AGO_MS
            self.due_ms = min(self.due_ms, now_ms + wait)

    # Asking.

    def _ask_for_pre_votes(self, now_ms: int) -> None:
        core, me = self.core, self.core.me
        core.become(Role.PRE_CANDIDATE, None)
        self._campaigns += 1
        self.votes = {me.node: True}
        self.restart(now_ms)
        for member in core.log.membership.voters:
            if member.node != me.node:
                core.send(
                    member.node,
                    PreVoteRequest(
                        core.epoch, me.node, me.directory, member.directory, core.log.end, core.log.last_epoch
                    ),
                )
        self._count_votes(now_ms)

    def on_timeout_now(self, message: TimeoutNow, now_ms: int) -> None:
        core = self.core
        if message.epoch == core.epoch and message.sender == core.leader and self.may_campaign():
            self._campaign(now_ms)

    def _campaign(self, now_ms: int) -> None:
        core, me = self.core, self.core.me
        core.stand()
        self.votes = {}
        self.restart(now_ms)
        for member in core.log.membership.voters:
            if member.node == me.node:
                core.send_after_persist(member.node, VoteResponse(core.epoch, me.node, me.directory, granted=True))
            else:
                core.send_after_persist(
                    member.node,
                    VoteRequest(core.epoch, me.node, me.directory, member.directory, core.log.end, core.log.last_epoch),
                )

    def _count_votes(self, now_ms: int) -> None:
        core = self.core
        membership, votes = core.log.membership, self.votes
        granted = sum(1 for member in membership.voters if votes.get(member.node) is True)
        refused = sum(1 for member in membership.voters if votes.get(member.node) is False)
        gone = sum(1 for member in membership.voters if member.node not in votes and member.node in self._gone)
        if granted >= membership.quorum:
            if core.role is Role.PRE_CANDIDATE:
                self._campaign(now_ms)
            else:
                self._campaigns = 0
                self.refusers.clear()
                core.lead(now_ms)
        elif refused:
            # The wait doubles, so that a node that cannot win for long does not spin (R5).
            config = core.config
            doublings = min(max(self._campaigns - 1, 0), 6)
            most = min(config.retry_wait_max_ms << doublings, config.election_timeout_max_ms)
            wait = core.random.randint(config.retry_wait_min_ms, most)
            if refused + gone > len(membership.voters) - membership.quorum:
                core.become(Role.FOLLOWER, None)  # it cannot win this one
                self.votes = {}
            else:
                wait += config.retry_wait_max_ms  # it may win yet, if an answer is only slow
            self.due_ms = min(self.due_ms, now_ms + wait)

    def on_pre_vote_response(self, response: PreVoteResponse, now_ms: int) -> None:
        core = self.core
        self._gone.discard(response.sender)
        if response.epoch > core.epoch and not response.granted:
            core.adopt(response.epoch, None, now_ms)
        elif core.role is Role.PRE_CANDIDATE and self._is_voters(response.sender, response.directory):
            self._note_vote(response.sender, now_ms, granted=response.granted)

    def on_vote_response(self, response: VoteResponse, now_ms: int) -> None:
        core = self.core
        self._gone.discard(response.sender)
        if response.epoch > core.epoch:
            core.adopt(response.epoch, None, now_ms)
        elif (
            response.epoch == core.epoch
            and core.role is Role.CANDIDATE
            and self._is_voters(response.sender, response.directory)
        ):
            self._note_vote(response.sender, now_ms, granted=response.granted)

    def _note_vote(self, voter: NodeId, now_ms: int, *, granted: bool) -> None:
        self.votes[voter] = granted
        if granted:
            self.refusers.discard(voter)
        else:
            self.refusers.add(voter)
        self._count_votes(now_ms)

    def _is_voters(self, node: NodeId, directory: bytes) -> bool:
        return self.core.log.membership.has_voter(VoterKey(node, directory))

    # Answering.

    def _is_up_to_date(self, end: Offset, last_epoch: Epoch) -> bool:
        log = self.core.log
        return (last_epoch, end) >= (log.last_epoch, log.end)

    def _has_leader(self, now_ms: int, asking: NodeId) -> bool:
        """Invariant 5: also the leader that this node believes in may ask (R2)."""
        core = self.core
        if core.role is Role.LEADER:
            return True
        if core.leader is None or core.leader == asking:
            return False
        return now_ms - self.contact_ms < core.config.election_timeout_min_ms

    def on_pre_vote_request(self, request: PreVoteRequest, now_ms: int) -> None:
        core = self.core
        self._gone.discard(request.sender)
        granted = (
            request.to_directory == core.me.directory
            and request.epoch >= core.epoch
            and core.recovering_until is None
            and not self._has_leader(now_ms, request.sender)
            and not self._disk_hangs(now_ms)
            and self._is_up_to_date(request.end, request.last_epoch)
        )
        core.send(request.sender, PreVoteResponse(core.epoch, core.me.node, core.me.directory, granted))

    def on_vote_request(self, request: VoteRequest, now_ms: int) -> None:
        core = self.core
        self._gone.discard(request.sender)
        if request.to_directory != core.me.directory:
            return  # meant for a disk that is not here any more
        if request.epoch > core.epoch:
            core.adopt(request.epoch, None, now_ms)
        candidate = VoterKey(request.sender, request.directory)
        granted = (
            request.epoch == core.epoch
            and core.recovering_until is None
            and core.voted_for in (None, candidate)
            and self._is_up_to_date(request.end, request.last_epoch)
        )
        if granted:
            core.vote_for(candidate)
            core.become(Role.FOLLOWER, core.leader)
            self.restart(now_ms)
        core.send_after_persist(request.sender, VoteResponse(core.epoch, core.me.node, core.me.directory, granted))
