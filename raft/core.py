"""The Raft core: messages, ticks and disk completions in, effects out. No IO, no clock, no randomness of its own. Pure.

Persistent state (the driver stores it): epoch, vote, entries, snapshot, and `recovering_until` of a voter that lost
synced data.

Transitions (roles of one node):

    FOLLOWER       --election timeout, or the leader's stream broke-->            PRE_CANDIDATE
    PRE_CANDIDATE  --a majority would vote for it-->   epoch + 1, votes for itself  CANDIDATE
    PRE_CANDIDATE  --contact from a leader, or rejected-->                        FOLLOWER / retries after a backoff
    CANDIDATE      --a majority voted for it-->        appends a no-op            LEADER
    CANDIDATE      --contact from a leader-->                                     FOLLOWER
    CANDIDATE      --rejected or no response-->        after a backoff            PRE_CANDIDATE
    LEADER         --no contact to a majority for an election timeout, own disk stalled,
                     removed from the voters-->                                   FOLLOWER
    any            --a higher epoch in a message (but for pre-vote requests)-->   FOLLOWER in that epoch
    FOLLOWER       --TimeoutNow from its leader-->     epoch + 1                  CANDIDATE

Invariants, on which the proofs rest:

1. A vote and its epoch are durable before the message that grants it is sent; one vote per epoch.
2. A follower acknowledges only what it has synced, and only what it knows to be equal to its leader's log.
3. A leader counts itself only for what it has synced; it commits by counting only entries of its own epoch (5.4.2).
4. Entries below `commit` are never truncated; `commit` never falls; `Effects.committed` is contiguous.
5. Granting or rejecting a pre-vote changes no state of the voter. A follower also grants one to its own leader, which
   may have restarted.
6. The membership in force is the last one in the log (or its snapshot), committed or not.
7. A voter that lost synced data (`recovering_until`) neither votes, nor campaigns, nor counts, until a leader has
   replicated to it past that offset since this start, or past the first entry of an epoch that began after the loss:
   either way it then holds everything that it may have acknowledged and that was committed.

`elections` decides on candidacy and votes, `leader` does what a leader does.

`step` changes state, `effects` returns what is to be done; between two calls of `effects` all proposals share one
persist and one append per peer.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.config import BootState, RaftConfig
from tidelog.raft.effects import Effects, HardState, Persist, Rejection, Role, RoleChange
from tidelog.raft.elections import Elections, Randomness
from tidelog.raft.leader import FAR_FUTURE_MS, LeaderState
from tidelog.raft.membership import VoterKey
from tidelog.raft.messages import (
    SNAPSHOT_HELD,
    AppendRequest,
    AppendResponse,
    ChangeMembership,
    Disconnected,
    Entry,
    Event,
    Message,
    Persisted,
    PreVoteRequest,
    PreVoteResponse,
    Propose,
    ReadIndex,
    SnapshotAck,
    SnapshotChunk,
    SnapshotFailed,
    SnapshotId,
    SnapshotInstalled,
    SnapshotRead,
    SnapshotTaken,
    SnapshotWritten,
    Tick,
    TimeoutNow,
    Transfer,
    VoteRequest,
    VoteResponse,
)
from tidelog.raft.raft_log import RaftLog

_NO_EPOCH_YET, _NO_OFFSET = Epoch(0), Offset(0)

# Local aliases: in Python 3.11 each `Role.X` costs a tenth of a microsecond, on the hot path.
_FOLLOWER, _CANDIDATE, _LEADER = Role.FOLLOWER, Role.CANDIDATE, Role.LEADER


class RaftCore:
    def __init__(self, me: VoterKey, boot: BootState, config: RaftConfig, random: Randomness, now_ms: int) -> None:
        self.me = me
        self.config = config
        self.random = random
        self.epoch, self.voted_for = boot.hard_state
        self.log = RaftLog(boot.snapshot, boot.membership, boot.start, boot.start_epoch)
        self.log.append(boot.entries)
        self._durable_epoch = self.epoch
        if self.log.last_epoch > self.epoch:
            # A crash between the sync of entries and the commit of their epoch: no vote of that epoch was sent.
            self.epoch, self.voted_for = self.log.last_epoch, None
        self.commit = boot.snapshot.offset
        self.recovering_until = boot.recovering_until
        self._loss_epoch = boot.loss_epoch

        self.role = _FOLLOWER
        self.leader: NodeId | None = None
        self.leader_state: LeaderState | None = None
        self.elections = Elections(self, now_ms)
        self._matched = Offset(0)
        """The log is known to equal the leader's below this; a follower acknowledges min(matched, durable)."""
        self._incoming: SnapshotId | None = None
        self._incoming_position = 0
        self._incoming_busy = False

        self.durable_end = self.log.end
        self._submitted_end = self.log.end
        """Entries below were submitted to storage."""
        self._truncate_to: Offset | None = None
        self._reset_to: Offset | None = None
        self._hard_state = boot.hard_state
        """As it was last submitted to storage."""
        self._persist_due = self.epoch != self._durable_epoch
        """There is something to persist beside new entries: epoch, vote, a truncation, a reset, the end of a
        recovery."""
        self._recovered = False
        self._persist_number = 0
        self._persisting: deque[tuple[int, Offset, int, Epoch]] = deque()
        """(number, log end when it is durable, when it was submitted, epoch), oldest first."""
        self._waiting: deque[tuple[int, list[tuple[NodeId, Message]]]] = deque()
        """Messages that wait until the persist with this number is durable."""
        self._after_persist: list[tuple[NodeId, Message]] = []
        self._ack_due = False
        self._probe_seen = 0
        self._delivered = self.commit
        self._role_changed = False
        self._out = Effects()
        self._handlers: dict[type, Callable[[Any, int], None]] = {
            **{kind: getattr(self, name) for kind, name in _HANDLERS.items()},
            **{kind: getattr(self.elections, name) for kind, name in _ELECTION_HANDLERS.items()},
        }

    # For the driver.

    def step(self, event: Message | Event, now_ms: int) -> None:
        self._handlers[type(event)](event, now_ms)

    def effects(self, now_ms: int) -> Effects:
        """Returns what is to be done now; the state is as if it had been done."""
        leader_state = self.leader_state
        if leader_state is not None:
            leader_state.flush(now_ms)
        if self._persist_due or self._submitted_end != self.log.end:
            self._harvest_persist(now_ms)
        if self._ack_due and self.epoch == self._durable_epoch:
            self._ack_due = False
            if self.leader is not None and self.role is _FOLLOWER:
                self.send(self.leader, self._append_ack())
        if self._after_persist:
            self._release_after_persist()
        out = self._out
        self._out = Effects()
        if self._delivered < self.commit:
            first = self._delivered - self.log.start
            out.committed_from = self._delivered
            out.committed = tuple(self.log.entries[first : self.commit - self.log.start])
            self._delivered = self.commit
        if self._role_changed:
            self._role_changed = False
            out.role = RoleChange(self.role, self.epoch, self.leader)
        return out

    @property
    def deadline_ms(self) -> int:
        """When the next `Tick` is due."""
        if self.leader_state is not None:
            return self.leader_state.deadline_ms()
        return self.elections.due_ms if self.elections.may_campaign() else FAR_FUTURE_MS

    @property
    def is_voter(self) -> bool:
        return self.log.membership.has_voter(self.me)

    @property
    def persist_since_ms(self) -> int | None:
        """When the oldest pending persist was submitted."""
        return self._persisting[0][2] if self._persisting else None

    def send(self, to: NodeId, message: Message) -> None:
        self._out.messages.append((to, message))

    @property
    def out(self) -> Effects:
        return self._out

    # Persistence.

    def _harvest_persist(self, now_ms: int) -> None:
        end = self.log.end
        if self._persist_due:
            self._persist_due = False
            self._hard_state = HardState(self.epoch, self.voted_for)
        self._persist_number += 1
        first = self._submitted_end
        self._out.persist = Persist(
            self._persist_number,
            self._hard_state,
            self._reset_to,
            self._truncate_to,
            first,
            tuple(self.log.entries[first - self.log.start :]),
            self._recovered,
        )
        self._persisting.append((self._persist_number, end, now_ms, self.epoch))
        self._submitted_end = end
        self._truncate_to = self._reset_to = None
        self._recovered = False

    def send_after_persist(self, to: NodeId, message: Message) -> None:
        """Sends when everything decided so far is durable."""
        self._after_persist.append((to, message))

    def _send_in_durable_epoch(self, to: NodeId, message: Message) -> None:
        """Sends at once if the epoch is durable: what the message says of the log holds already."""
        if self.epoch == self._durable_epoch:
            self.send(to, message)
        else:
            self._after_persist.append((to, message))

    def _release_after_persist(self) -> None:
        if self._persisting:
            self._waiting.append((self._persisting[-1][0], self._after_persist))
        else:
            self._out.messages.extend(self._after_persist)
        self._after_persist = []

    def _on_persisted(self, event: Persisted, now_ms: int) -> None:
        durable = self.durable_end
        while self._persisting and self._persisting[0][0] <= event.number:
            _, durable, _, self._durable_epoch = self._persisting.popleft()
        advanced = durable > self.durable_end
        self.durable_end = durable
        while self._waiting and self._waiting[0][0] <= event.number:
            for to, message in self._waiting.popleft()[1]:
                if to == self.me.node:
                    self.step(message, now_ms)  # its own vote counts once it is durable, like any other
                else:
                    self.send(to, message)
        if self.leader_state is not None:
            if durable > self.commit:
                self.leader_state.advance_commit(now_ms)
        elif advanced:
            self._ack_due = self.leader is not None
            if self.recovering_until is not None:
                self._check_recovered()

    def _truncate(self, end: Offset) -> None:
        assert end >= self.commit, "a committed entry is never truncated"
        self.log.truncate(end)
        self.durable_end = min(self.durable_end, end)
        if end < self._submitted_end:
            self._submitted_end = end
            self._truncate_to = end if self._truncate_to is None else min(self._truncate_to, end)
            self._persist_due = True
            self._persisting = deque((n, min(to, end), at, epoch) for n, to, at, epoch in self._persisting)

    # Roles.

    def set_role(self, role: Role, leader: NodeId | None) -> None:
        if (role, leader) != (self.role, self.leader):
            self._role_changed = True
        self.role, self.leader = role, leader

    def become_follower(self, epoch: Epoch, leader: NodeId | None, now_ms: int) -> None:
        """Becomes a follower in `epoch`, which is not below the current one; `leader` is None if unknown."""
        assert epoch >= self.epoch, "epochs never fall"
        if epoch > self.epoch or leader != self.leader or self.role is not _FOLLOWER:
            self._matched = Offset(0)
            self._probe_seen = 0
            self._ack_due = False
        if epoch > self.epoch:
            self.epoch, self.voted_for = epoch, None
            self._persist_due = self._role_changed = True
        if self.leader_state is not None:
            self.leader_state.abandon()
            self.leader_state = None
        if self.role is not _FOLLOWER:
            self.elections.restart(now_ms)
        self.set_role(_FOLLOWER, leader)

    def become_candidate(self) -> None:
        """Becomes a candidate of the next epoch and votes for itself."""
        self.epoch = Epoch(self.epoch + 1)
        self.voted_for = self.me
        self._persist_due = self._role_changed = True
        self.set_role(_CANDIDATE, None)

    def vote_for(self, candidate: VoterKey) -> None:
        assert self.voted_for in (None, candidate), "one vote an epoch"
        if self.voted_for is None:
            self.voted_for = candidate
            self._persist_due = True

    def resign(self, now_ms: int) -> None:
        """Steps down, and postpones its own next campaign."""
        self.become_follower(self.epoch, None, now_ms)
        self.elections.postpone_campaign(now_ms)

    def become_leader(self, now_ms: int) -> None:
        """Starts to lead: the node has won the election."""
        self.set_role(_LEADER, self.me.node)
        self._role_changed = True
        self.leader_state = LeaderState(self, now_ms)

    # Following.

    def _note_leader_contact(self, epoch: Epoch, leader: NodeId, now_ms: int) -> None:
        if epoch > self.epoch or self.leader != leader or self.role is not _FOLLOWER:
            assert epoch > self.epoch or self.role is not _LEADER, "two leaders in one epoch"
            self.become_follower(epoch, leader, now_ms)
            self.elections.found_leader(leader)
        elections = self.elections
        elections.contact_ms = now_ms
        elections.due_ms = now_ms + elections.timeout_ms

    def _on_append_request(self, request: AppendRequest, now_ms: int) -> None:
        if request.epoch < self.epoch:
            self.send(request.sender, self._rejection(request))
            return
        self._note_leader_contact(request.epoch, request.sender, now_ms)
        log, prev, entries = self.log, request.prev_offset, request.entries
        if prev < log.start:
            # What a snapshot covers is committed, and so equal to the leader's log.
            known = min(log.start - prev, len(entries))
            prev, entries = Offset(prev + known), entries[known:]
        elif log.epoch_before(prev) != request.prev_epoch:
            self._send_in_durable_epoch(request.sender, self._rejection(request))
            return
        has_new = bool(entries) and self._append_entries(prev, entries)
        end = prev + len(entries)
        if end > self._matched:
            self._matched = Offset(end)
        if request.commit > self.commit:
            self.advance_commit(min(request.commit, self._matched))
        if request.probe > self._probe_seen:
            self._probe_seen = request.probe
            self._ack_due = True
        if not has_new:
            self._ack_due = True
            if self.recovering_until is not None:
                self._check_recovered()

    def _append_entries(self, prev: Offset, entries: tuple[Entry, ...]) -> bool:
        """Appends new entries, after truncating conflicting ones; returns True if there were any."""
        log = self.log
        known = min(len(entries), log.end - prev)
        for index in range(known):
            offset = prev + index
            if offset >= log.start and log.entries[offset - log.start].epoch != entries[index].epoch:
                self._truncate(Offset(offset))
                known = index
                break
        if known == len(entries):
            return False
        log.append(entries[known:] if known else entries)
        return True

    def _rejection(self, request: AppendRequest) -> AppendResponse:
        hint_epoch, hint_end = self.log.end_of_epoch(request.prev_epoch)
        return AppendResponse(
            self.epoch,
            self.me.node,
            self.me.directory,
            request.prev_offset,
            True,
            hint_epoch,
            min(hint_end, request.prev_offset),
            request.probe if request.epoch == self.epoch else 0,
            self.recovering_until is None,
        )

    def _append_ack(self) -> AppendResponse:
        match = min(self._matched, self.durable_end)
        return AppendResponse(
            self.epoch,
            self.me.node,
            self.me.directory,
            match,
            False,
            _NO_EPOCH_YET,
            _NO_OFFSET,
            self._probe_seen,
            self.recovering_until is None,
        )

    def advance_commit(self, commit: Offset) -> None:
        if commit > self.commit:
            assert commit <= self.log.end, "what is committed is in the log"
            self.commit = commit

    def _check_recovered(self) -> None:
        """Ends the recovery of lost data (invariant 7) if the log holds it again."""
        if self.recovering_until is None or self.leader is None:
            return
        synced = min(self._matched, self.durable_end)
        in_newer_epoch = self.log.epoch_before(synced) == self.epoch > self._loss_epoch
        if synced >= self.recovering_until or in_newer_epoch:
            self.recovering_until = None
            self._recovered = self._persist_due = True
            self.elections.recovered()
            self._ack_due = True

    # Snapshots.

    def _on_snapshot_taken(self, event: SnapshotTaken, _now_ms: int) -> None:
        if event.snapshot.offset <= self.log.snapshot.offset:
            return
        assert event.snapshot.offset <= self.commit, "a snapshot holds committed state only"
        assert self.log.epoch_before(event.snapshot.offset) == event.snapshot.epoch, "a snapshot names its last epoch"
        self.log.snapshot = event.snapshot
        before = self.log.start
        if self.log.drop_behind(self.config.kept_behind_snapshot_bytes) > before:
            self._out.drop_before = self.log.start

    def _on_snapshot_chunk(self, chunk: SnapshotChunk, now_ms: int) -> None:
        if chunk.epoch < self.epoch:
            self.send(chunk.sender, self._snapshot_ack(chunk.snapshot, 0))
            return
        self._note_leader_contact(chunk.epoch, chunk.sender, now_ms)
        if chunk.snapshot.offset <= self.commit:
            self.send_after_persist(chunk.sender, self._snapshot_ack(chunk.snapshot, SNAPSHOT_HELD))
            return
        if self._incoming != chunk.snapshot:
            self._incoming, self._incoming_position, self._incoming_busy = chunk.snapshot, 0, False
        if chunk.position != self._incoming_position:
            # Resume from this position: a chunk was lost, or the leader does not know how far another leader got.
            self.send_after_persist(chunk.sender, self._snapshot_ack(chunk.snapshot, self._incoming_position))
        elif not self._incoming_busy:
            self._incoming_busy = True
            self._out.snapshot_writes.append(chunk)

    def _snapshot_ack(self, snapshot: SnapshotId, wanted: int) -> SnapshotAck:
        return SnapshotAck(self.epoch, self.me.node, self.me.directory, snapshot, wanted)

    def _on_snapshot_written(self, event: SnapshotWritten, _now_ms: int) -> None:
        if event.snapshot != self._incoming:
            return
        self._incoming_busy = False
        self._incoming_position = event.wanted
        if self.leader is not None:
            self.send_after_persist(self.leader, self._snapshot_ack(event.snapshot, event.wanted))

    def _on_snapshot_failed(self, event: SnapshotFailed, now_ms: int) -> None:
        self._on_snapshot_written(SnapshotWritten(event.snapshot, 0), now_ms)

    def _on_snapshot_installed(self, event: SnapshotInstalled, _now_ms: int) -> None:
        snapshot = event.snapshot
        if snapshot == self._incoming:
            self._incoming, self._incoming_busy = None, False
        if self.leader_state is not None:
            return  # elected meanwhile: its log holds everything committed, and commits it by counting
        if snapshot.offset > self.commit:
            self._out.load_snapshot = snapshot
            if self.log.epoch_before(snapshot.offset) == snapshot.epoch:
                self.log.snapshot = snapshot
            else:
                self.log.reset(snapshot, event.membership)
                self._persisting = deque((n, snapshot.offset, at, e) for n, _, at, e in self._persisting)
                self.durable_end = self._submitted_end = self._reset_to = snapshot.offset
                self._truncate_to = None
                self._persist_due = True
            self.commit = self._delivered = snapshot.offset
            self._matched = max(self._matched, snapshot.offset)
        if self.leader is not None:
            self._ack_due = True
            self._check_recovered()
            self.send_after_persist(self.leader, self._snapshot_ack(snapshot, SNAPSHOT_HELD))

    # Leading: `LeaderState` exists only while this node leads.

    def _on_append_response(self, response: AppendResponse, now_ms: int) -> None:
        if response.epoch > self.epoch:
            self.become_follower(response.epoch, None, now_ms)
        elif self.leader_state is not None and response.epoch == self.epoch:
            self.leader_state.on_append_response(response, now_ms)

    def _on_snapshot_ack(self, ack: SnapshotAck, now_ms: int) -> None:
        if ack.epoch > self.epoch:
            self.become_follower(ack.epoch, None, now_ms)
        elif self.leader_state is not None and ack.epoch == self.epoch:
            self.leader_state.on_snapshot_ack(ack, now_ms)

    def _on_snapshot_read(self, event: SnapshotRead, now_ms: int) -> None:
        if self.leader_state is not None:
            self.leader_state.on_snapshot_read(event, now_ms)

    def _on_propose(self, event: Propose, _now_ms: int) -> None:
        if self.leader_state is None:
            self._out.rejected.append((event.token, Rejection.NOT_LEADER))
        else:
            self.leader_state.propose(event)

    def _on_change_membership(self, event: ChangeMembership, now_ms: int) -> None:
        if self.leader_state is None:
            self._out.rejected.append((event.token, Rejection.NOT_LEADER))
        else:
            self.leader_state.change_membership(event, now_ms)

    def _on_read_index(self, event: ReadIndex, _now_ms: int) -> None:
        if self.leader_state is None:
            self._out.rejected.append((event.token, Rejection.NOT_LEADER))
        else:
            self.leader_state.read_index(event)

    def _on_transfer(self, event: Transfer, now_ms: int) -> None:
        if self.leader_state is not None:
            self.leader_state.transfer(event, now_ms)

    def validate(self, *, thorough: bool = True) -> None:
        """Asserts the invariants that the core alone can check; tests call it after every step. Without `thorough` in
        constant time, but for the peers and what is being persisted."""
        log = self.log
        log.validate(thorough=thorough)
        assert log.start <= log.snapshot.offset <= self.commit <= log.end, (
            f"start {log.start}, snapshot {log.snapshot.offset}, commit {self.commit}, end {log.end}"
        )
        assert self.durable_end <= self._submitted_end <= log.end, f"durable up to {self.durable_end} of {log.end}"
        assert self._matched <= log.end, f"equals the leader's log up to {self._matched}, and ends at {log.end}"
        assert self._delivered <= self.commit, "what is not committed was delivered"
        assert self._persist_due or (self._truncate_to, self._reset_to, self._recovered) == (None, None, False), (
            "a change of the log is not to be persisted"
        )
        assert self._persist_due or self._hard_state == (self.epoch, self.voted_for), "a vote is not to be persisted"
        assert (self.leader_state is not None) == (self.role is _LEADER), "leader state is a leader's"
        assert self.role is not _LEADER or self.leader == self.me.node, "a leader knows itself"
        if self.role is _LEADER or self.role is _CANDIDATE:
            assert self.voted_for == self.me, f"{self.role.value} without its own vote"
        assert self.recovering_until is None or self.role is _FOLLOWER, "a recovering voter follows"
        assert self.epoch >= max(self._durable_epoch, log.last_epoch), f"in epoch {self.epoch}, behind its log"
        assert not self._persisting or self._persisting[-1][1] == self._submitted_end, (
            "the newest persist ends elsewhere"
        )
        if self.leader_state is not None:
            self.leader_state.validate(thorough=thorough)


_HANDLERS: dict[type, str] = {
    AppendRequest: "_on_append_request",
    AppendResponse: "_on_append_response",
    SnapshotChunk: "_on_snapshot_chunk",
    SnapshotAck: "_on_snapshot_ack",
    Propose: "_on_propose",
    ChangeMembership: "_on_change_membership",
    ReadIndex: "_on_read_index",
    Transfer: "_on_transfer",
    Persisted: "_on_persisted",
    SnapshotTaken: "_on_snapshot_taken",
    SnapshotRead: "_on_snapshot_read",
    SnapshotWritten: "_on_snapshot_written",
    SnapshotInstalled: "_on_snapshot_installed",
    SnapshotFailed: "_on_snapshot_failed",
}

_ELECTION_HANDLERS: dict[type, str] = {
    PreVoteRequest: "on_pre_vote_request",
    PreVoteResponse: "on_pre_vote_response",
    VoteRequest: "on_vote_request",
    VoteResponse: "on_vote_response",
    TimeoutNow: "on_timeout_now",
    Tick: "on_tick",
    Disconnected: "on_disconnected",
}
