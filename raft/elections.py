"""Elections: the election timer, pre-votes and votes. Pure; owned by the core.

The election timer runs while the node does not lead: at `due_ms` it requests pre-votes unless a leader made contact. A
node with a majority of pre-votes requests votes in the next epoch; one with a majority of votes leads. A rejection
shortens the wait to the next try, but each try without a leader waits longer than the last. A single voter campaigns at
the first tick.

Invariants (numbers as in `core`):
1. A vote is sent only after it is durable, also the node's vote for itself; one vote per epoch.
5. Granting or rejecting a pre-vote changes nothing that another node could notice.
7. A recovering voter neither votes nor campaigns.
- `votes` holds the responses to the current request for votes, and to no other. A pre-vote response does not name its
  request: a late grant may count for a later request of pre-votes. It costs an election at most, since votes decide.
"""

from typing import Protocol

from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.effects import Role
from tidelog.raft.leader import LeaderHost
from tidelog.raft.membership import VoterKey
from tidelog.raft.messages import (
    Disconnected,
    Message,
    PreVoteRequest,
    PreVoteResponse,
    Tick,
    TimeoutNow,
    VoteRequest,
    VoteResponse,
)

LONG_AGO_MS = -(1 << 60)


class Randomness(Protocol):
    """The part of `random.Random` that elections use."""

    def randint(self, a: int, b: int) -> int: ...


class ElectionHost(LeaderHost, Protocol):
    """What `Elections` needs of the core that owns it."""

    random: Randomness
    role: Role
    leader: NodeId | None
    voted_for: VoterKey | None
    recovering_until: Offset | None

    def set_role(self, role: Role, leader: NodeId | None) -> None: ...

    def become_follower(self, epoch: Epoch, leader: NodeId | None, now_ms: int) -> None: ...

    def become_candidate(self) -> None: ...

    def become_leader(self, now_ms: int) -> None: ...

    def vote_for(self, candidate: VoterKey) -> None: ...

    def send_after_persist(self, to: NodeId, message: Message) -> None: ...


class Elections:
    def __init__(self, core: ElectionHost, now_ms: int) -> None:
        self.core = core
        self.contact_ms = LONG_AGO_MS
        """Time of the last contact from the leader."""
        self.timeout_ms = 0
        """The election timeout drawn last: drawn for each leader and each campaign, not for each message."""
        self.due_ms = 0
        self.votes: dict[NodeId, bool] = {}
        self.rejecting_voters: set[NodeId] = set()
        """Voters that rejected the last request since there was a leader. For status only."""
        self._campaigns = 0
        """Campaigns since there was a leader."""
        self._disconnected: set[NodeId] = set()
        """Peers whose stream broke, without contact since: no vote is expected of them."""
        self.restart(now_ms)
        if [member.key for member in core.log.membership.voters] == [core.me]:
            self.due_ms = now_ms  # there is no other voter

    # The timer.

    def draw_timeout(self) -> int:
        config = self.core.config
        self.timeout_ms = self.core.random.randint(config.election_timeout_min_ms, config.election_timeout_max_ms)
        return self.timeout_ms

    def restart(self, now_ms: int) -> None:
        self.due_ms = now_ms + self.draw_timeout()

    def postpone_campaign(self, now_ms: int) -> None:
        """Postpones the next campaign after this node stepped down, so that others campaign first."""
        self.contact_ms = LONG_AGO_MS
        self.due_ms = now_ms + self.core.config.election_timeout_max_ms + self.draw_timeout()

    def found_leader(self, leader: NodeId) -> None:
        self._campaigns = 0
        self.rejecting_voters.clear()
        self._disconnected.discard(leader)
        self.draw_timeout()

    def recovered(self) -> None:
        """Allows campaigns again, but not at once: the leader that restored this voter is there."""
        self.due_ms = max(self.due_ms, self.contact_ms + self.core.config.election_timeout_min_ms)

    def may_campaign(self) -> bool:
        """Whether this node may campaign: a voter may, and one that is being removed until that has committed, since
        the others may need its log. It then requests votes of the remaining voters, and has no vote itself."""
        core = self.core
        return core.recovering_until is None and core.log.may_have_voter(core.me, core.commit)

    def on_tick(self, _event: Tick, now_ms: int) -> None:
        core = self.core
        if core.leader_state is not None:
            core.leader_state.check_quorum(now_ms)
        elif now_ms >= self.due_ms and self.may_campaign():
            if self._is_disk_stalled(now_ms):
                self.restart(now_ms)
            else:
                self._request_pre_votes(now_ms)

    def _is_disk_stalled(self, now_ms: int) -> bool:
        """A node whose disk stalls cannot persist a vote: it requests none and grants none."""
        since = self.core.persist_since_ms
        return since is not None and now_ms - since > self.core.config.election_timeout_max_ms

    def on_disconnected(self, event: Disconnected, now_ms: int) -> None:
        core = self.core
        self._disconnected.add(event.peer)
        if core.leader_state is not None:
            core.leader_state.disconnected(event.peer)
        elif core.role is Role.FOLLOWER and event.peer == core.leader:
            wait = core.random.randint(0, core.config.broken_stream_wait_max_ms)
            core.set_role(Role.FOLLOWER, None)
            self.contact_ms = LONG_AGO_MS
            self.due_ms = min(self.due_ms, now_ms + wait)

    # Requests.

    def _request_pre_votes(self, now_ms: int) -> None:
        core, me = self.core, self.core.me
        core.set_role(Role.PRE_CANDIDATE, None)
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
        core.become_candidate()
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
        rejected = sum(1 for member in membership.voters if votes.get(member.node) is False)
        gone = sum(1 for member in membership.voters if member.node not in votes and member.node in self._disconnected)
        if granted >= membership.quorum:
            if core.role is Role.PRE_CANDIDATE:
                self._campaign(now_ms)
            else:
                self._campaigns = 0
                self.rejecting_voters.clear()
                core.become_leader(now_ms)
        elif rejected:
            # The backoff doubles: a node that cannot win does not disturb the others with requests.
            config = core.config
            doubled = min(max(self._campaigns - 1, 0), 6)
            retry_max_ms = min(config.retry_wait_max_ms << doubled, config.election_timeout_max_ms)
            wait = core.random.randint(config.retry_wait_min_ms, retry_max_ms)
            if rejected + gone > len(membership.voters) - membership.quorum:
                core.set_role(Role.FOLLOWER, None)  # it cannot win this election
                self.votes = {}
            else:
                wait += config.retry_wait_max_ms  # it may still win, if a response is slow
            self.due_ms = min(self.due_ms, now_ms + wait)

    def on_pre_vote_response(self, response: PreVoteResponse, now_ms: int) -> None:
        core = self.core
        self._disconnected.discard(response.sender)
        if response.epoch > core.epoch and not response.granted:
            core.become_follower(response.epoch, None, now_ms)
        elif core.role is Role.PRE_CANDIDATE and self._is_voter(response.sender, response.directory):
            self._note_vote(response.sender, now_ms, granted=response.granted)

    def on_vote_response(self, response: VoteResponse, now_ms: int) -> None:
        core = self.core
        self._disconnected.discard(response.sender)
        if response.epoch > core.epoch:
            core.become_follower(response.epoch, None, now_ms)
        elif (
            response.epoch == core.epoch
            and core.role is Role.CANDIDATE
            and self._is_voter(response.sender, response.directory)
        ):
            self._note_vote(response.sender, now_ms, granted=response.granted)

    def _note_vote(self, voter: NodeId, now_ms: int, *, granted: bool) -> None:
        self.votes[voter] = granted
        if granted:
            self.rejecting_voters.discard(voter)
        else:
            self.rejecting_voters.add(voter)
        self._count_votes(now_ms)

    def _is_voter(self, node: NodeId, directory: bytes) -> bool:
        return self.core.log.membership.has_voter(VoterKey(node, directory))

    # Responses.

    def _is_up_to_date(self, end: Offset, last_epoch: Epoch) -> bool:
        log = self.core.log
        return (last_epoch, end) >= (log.last_epoch, log.end)

    def _has_leader(self, now_ms: int, candidate: NodeId) -> bool:
        """Whether a leader other than the candidate made contact recently (leader stickiness, Raft thesis 6.4).

        The known leader itself may campaign: it may have restarted.
        """
        core = self.core
        if core.role is Role.LEADER:
            return True
        if core.leader is None or core.leader == candidate:
            return False
        return now_ms - self.contact_ms < core.config.election_timeout_min_ms

    def on_pre_vote_request(self, request: PreVoteRequest, now_ms: int) -> None:
        core = self.core
        self._disconnected.discard(request.sender)
        granted = (
            request.to_directory == core.me.directory
            and request.epoch >= core.epoch
            and core.recovering_until is None
            and not self._has_leader(now_ms, request.sender)
            and not self._is_disk_stalled(now_ms)
            and self._is_up_to_date(request.end, request.last_epoch)
        )
        core.send(request.sender, PreVoteResponse(core.epoch, core.me.node, core.me.directory, granted))

    def on_vote_request(self, request: VoteRequest, now_ms: int) -> None:
        core = self.core
        self._disconnected.discard(request.sender)
        if request.to_directory != core.me.directory:
            return  # meant for a directory that this node no longer has
        if request.epoch > core.epoch:
            core.become_follower(request.epoch, None, now_ms)
        candidate = VoterKey(request.sender, request.directory)
        granted = (
            request.epoch == core.epoch
            and core.recovering_until is None
            and core.voted_for in (None, candidate)
            and self._is_up_to_date(request.end, request.last_epoch)
        )
        if granted:
            core.vote_for(candidate)
            core.set_role(Role.FOLLOWER, core.leader)
            self.restart(now_ms)
        core.send_after_persist(request.sender, VoteResponse(core.epoch, core.me.node, core.me.directory, granted))
