"""The Raft core: messages, ticks and disk completions in, effects out. No IO, no clock, no randomness of its own.

State that survives (the shell stores it): epoch, vote, entries, snapshot, the mark of a voter that lost synced data.

Transitions (roles of one node):

    FOLLOWER       --election timeout, or the leader's stream broke-->            PRE_CANDIDATE
    PRE_CANDIDATE  --a majority would vote for it-->   epoch + 1, votes for itself  CANDIDATE
    PRE_CANDIDATE  --a leader is heard, or refused-->                             FOLLOWER / waits, asks again
    CANDIDATE      --a majority voted for it-->        appends a no-op            LEADER
    CANDIDATE      --a leader is heard-->                                         FOLLOWER
    CANDIDATE      --refused or no answer-->           waits a little             PRE_CANDIDATE
    LEADER         --no majority heard for an election timeout, own disk stalled,
                     removed from the voters-->                                   FOLLOWER
    any            --a higher epoch in a message (but for pre-vote requests)-->   FOLLOWER in that epoch
    FOLLOWER       --TimeoutNow from its leader-->     epoch + 1                  CANDIDATE

Invariants, on which the proofs rest:

 1. A vote, and the epoch that it is for, are durable before the message that tells of it leaves; one vote an epoch.
 2. A follower acknowledges only what it has synced, and only what it knows to be equal to its leader's log.
 3. A leader counts itself only for what it has synced; it commits by counting only entries of its own epoch (5.4.2).
 4. Entries below `commit` are never truncated; `commit` never falls; what is handed out as committed is contiguous.
 5. Granting or refusing a pre-vote changes nothing (R3); the leader that a node believes in may ask too (R2).
 6. The membership in force is the last one in the log (or its snapshot), committed or not.
 7. A voter that lost synced data (`recovering_until`) neither votes, nor campaigns, nor counts, until a leader of this
    life has brought it past that offset, or past the first entry of an epoch that began after the loss: either way it
    then holds all that it may ever have acknowledged and that was committed.

Who may lead, and whom this node votes for, is decided in `elections`; what it does while it leads, in `leading`.

`step` changes state, `effects` harvests what is to be done; between two harvests all proposals share one persist and
one append per peer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.config import BootState, RaftConfig
from tidelog.raft.effects import Effects, HardState, Persist, Refusal, Role, RoleChange
from tidelog.raft.elections import Elections
from tidelog.raft.leading import FAR_FUTURE_MS, Leadership
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
from tidelog.raft.view import LogView

if TYPE_CHECKING:
    from random import Random

_NO_EPOCH_YET, _NO_OFFSET = Epoch(0), Offset(0)

# Names of our own: in Python 3.11 each `Role.X` costs a tenth of a microsecond, and it is asked for all the time.
_FOLLOWER, _CANDIDATE, _LEADER = Role.FOLLOWER, Role.CANDIDATE, Role.LEADER


class RaftCore:
    def __init__(self, me: VoterKey, boot: BootState, config: RaftConfig, random: Random, now_ms: int) -> None:
        self.me = me
        self.config = config
        self.random = random
        self.epoch, self.voted_for = boot.hard_state
        self.log = LogView(boot.snapshot, boot.membership, boot.start, boot.start_epoch)
        self.log.append(boot.entries)
        self._durable_epoch = self.epoch
        if self.log.last_epoch > self.epoch:
            # A crash between the sync of entries and the commit of their epoch: no vote of that epoch was ever told.
            self.epoch, self.voted_for = self.log.last_epoch, None
        self.commit = boot.snapshot.offset
        self.recovering_until = boot.recovering_until
        self._loss_epoch = boot.loss_epoch

        self.role = _FOLLOWER
        self.leader: NodeId | None = None
        self.leading: Leadership | None = None
        self.elections = Elections(self, now_ms)
        self._matched = Offset(0)
        """What is known to be equal to the leader's log; a follower acknowledges min(matched, durable)."""
        self._incoming: SnapshotId | None = None
        self._incoming_position = 0
        self._incoming_busy = False

        self.durable_end = self.log.end
        self._handed_over = self.log.end
        """Entries below were given to storage."""
        self._truncate_to: Offset | None = None
        self._reset_to: Offset | None = None
        self._hard_state = boot.hard_state
        """As it was handed to storage last."""
        self._persist_due = self.epoch != self._durable_epoch
        """There is something to persist beside new entries: epoch, vote, a cut, a new beginning, the recovered mark."""
        self._recovered = False
        self._persist_number = 0
        self._persisting: deque[tuple[int, Offset, int, Epoch]] = deque()
        """(number, log end when it is durable, when it was asked for, epoch), oldest first."""
        self._waiting: deque[tuple[int, list[tuple[NodeId, Message]]]] = deque()
        """Messages that must not leave before the persist with this number is durable."""
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

    # The shell's side.

    def step(self, event: Message | Event, now_ms: int) -> None:
        self._handlers[type(event)](event, now_ms)

    def effects(self, now_ms: int) -> Effects:
        """What is to be done now; the state is as if it had been done."""
        leading = self.leading
        if leading is not None:
            leading.flush(now_ms)
        if self._persist_due or self._handed_over != self.log.end:
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
        if self.leading is not None:
            return self.leading.deadline_ms()
        return self.elections.due_ms if self.elections.may_campaign() else FAR_FUTURE_MS

    @property
    def is_voter(self) -> bool:
        return self.log.membership.has_voter(self.me)

    @property
    def persist_since_ms(self) -> int | None:
        """Since when the oldest persist has been under way."""
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
        first = self._handed_over
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
        self._handed_over = end
        self._truncate_to = self._reset_to = None
        self._recovered = False

    def send_after_persist(self, to: NodeId, message: Message) -> None:
        """Send when everything decided so far is durable."""
        self._after_persist.append((to, message))

    def _send_in_durable_epoch(self, to: NodeId, message: Message) -> None:
        """Send at once if our epoch is durable: what the message says of the log is so already."""
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
                    self.step(message, now_ms)  # its own vote counts like any other: once it is durable
                else:
                    self.send(to, message)
        if self.leading is not None:
            if durable > self.commit:
                self.leading.advance_commit(now_ms)
        elif advanced:
            self._ack_due = self.leader is not None
            if self.recovering_until is not None:
                self._check_recovered()

    def _truncate(self, end: Offset) -> None:
        assert end >= self.commit, "a committed entry is never truncated"
        self.log.truncate(end)
        self.durable_end = min(self.durable_end, end)
        if end < self._handed_over:
            self._handed_over = end
            self._truncate_to = end if self._truncate_to is None else min(self._truncate_to, end)
            self._persist_due = True
            self._persisting = deque((n, min(to, end), at, epoch) for n, to, at, epoch in self._persisting)

    # Roles.

    def become(self, role: Role, leader: NodeId | None) -> None:
        if (role, leader) != (self.role, self.leader):
            self._role_changed = True
        self.role, self.leader = role, leader

    def adopt(self, epoch: Epoch, leader: NodeId | None, now_ms: int) -> None:
        """Follow in `epoch`, which is not below ours; `leader` may not be known yet."""
        assert epoch >= self.epoch, "epochs never fall"
        if epoch > self.epoch or leader != self.leader or self.role is not _FOLLOWER:
            self._matched = Offset(0)
            self._probe_seen = 0
            self._ack_due = False
        if epoch > self.epoch:
            self.epoch, self.voted_for = epoch, None
            self._persist_due = self._role_changed = True
        if self.leading is not None:
            self.leading.abandon()
            self.leading = None
        if self.role is not _FOLLOWER:
            self.elections.restart(now_ms)
        self.become(_FOLLOWER, leader)

    def stand(self) -> None:
        """Become a candidate of the next epoch, which has this node's vote."""
        self.epoch = Epoch(self.epoch + 1)
        self.voted_for = self.me
        self._persist_due = self._role_changed = True
        self.become(_CANDIDATE, None)

    def vote_for(self, candidate: VoterKey) -> None:
        assert self.voted_for in (None, candidate), "one vote an epoch"
        if self.voted_for is None:
            self.voted_for = candidate
            self._persist_due = True

    def resign(self, now_ms: int) -> None:
        """Stop leading, and let the others go first."""
        self.adopt(self.epoch, None, now_ms)
        self.elections.step_back(now_ms)

    def lead(self, now_ms: int) -> None:
        """It has won the election."""
        self.become(_LEADER, self.me.node)
        self._role_changed = True
        self.leading = Leadership(self, now_ms)

    # Following.

    def _hear_leader(self, epoch: Epoch, leader: NodeId, now_ms: int) -> None:
        if epoch > self.epoch or self.leader != leader or self.role is not _FOLLOWER:
            assert epoch > self.epoch or self.role is not _LEADER, "two leaders in one epoch"
            self.adopt(epoch, leader, now_ms)
            self.elections.found_leader(leader)
        elections = self.elections
        elections.contact_ms = now_ms
        elections.due_ms = now_ms + elections.patience_ms

    def _on_append_request(self, request: AppendRequest, now_ms: int) -> None:
        if request.epoch < self.epoch:
            self.send(request.sender, self._rejection(request))
            return
        self._hear_leader(request.epoch, request.sender, now_ms)
        log, prev, entries = self.log, request.prev_offset, request.entries
        if prev < log.start:
            # What a snapshot covers is committed, and so equal to the leader's.
            known = min(log.start - prev, len(entries))
            prev, entries = Offset(prev + known), entries[known:]
        elif log.epoch_before(prev) != request.prev_epoch:
            self._send_in_durable_epoch(request.sender, self._rejection(request))
            return
        has_news = bool(entries) and self._take_entries(prev, entries)
        end = prev + len(entries)
        if end > self._matched:
            self._matched = Offset(end)
        if request.commit > self.commit:
            self.advance_commit(min(request.commit, self._matched))
        if request.probe > self._probe_seen:
            self._probe_seen = request.probe
            self._ack_due = True
        if not has_news:
            self._ack_due = True
            if self.recovering_until is not None:
                self._check_recovered()

    def _take_entries(self, prev: Offset, entries: tuple[Entry, ...]) -> bool:
        """Append what is new, after cutting what contradicts it; True if there was any."""
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
        """Invariant 7: is what was lost here again?"""
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
        self._hear_leader(chunk.epoch, chunk.sender, now_ms)
        if chunk.snapshot.offset <= self.commit:
            self.send_after_persist(chunk.sender, self._snapshot_ack(chunk.snapshot, SNAPSHOT_HELD))
            return
        if self._incoming != chunk.snapshot:
            self._incoming, self._incoming_position, self._incoming_busy = chunk.snapshot, 0, False
        if chunk.position != self._incoming_position:
            # Resume where we are: a piece was lost, or the leader does not know how far another leader brought us.
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
        if self.leading is not None:
            return  # elected meanwhile: its log holds all that is committed, and commits it by counting
        if snapshot.offset > self.commit:
            self._out.load_snapshot = snapshot
            if self.log.epoch_before(snapshot.offset) == snapshot.epoch:
                self.log.snapshot = snapshot
            else:
                self.log.reset(snapshot, event.membership)
                self._persisting = deque((n, snapshot.offset, at, e) for n, _, at, e in self._persisting)
                self.durable_end = self._handed_over = self._reset_to = snapshot.offset
                self._truncate_to = None
                self._persist_due = True
            self.commit = self._delivered = snapshot.offset
            self._matched = max(self._matched, snapshot.offset)
        if self.leader is not None:
            self._ack_due = True
            self._check_recovered()
            self.send_after_persist(self.leader, self._snapshot_ack(snapshot, SNAPSHOT_HELD))

    # Leading: the rest is in `Leadership`, which exists only while this node leads.

    def _on_append_response(self, response: AppendResponse, now_ms: int) -> None:
        if response.epoch > self.epoch:
            self.adopt(response.epoch, None, now_ms)
        elif self.leading is not None and response.epoch == self.epoch:
            self.leading.on_append_response(response, now_ms)

    def _on_snapshot_ack(self, ack: SnapshotAck, now_ms: int) -> None:
        if ack.epoch > self.epoch:
            self.adopt(ack.epoch, None, now_ms)
        elif self.leading is not None and ack.epoch == self.epoch:
            self.leading.on_snapshot_ack(ack, now_ms)

    def _on_snapshot_read(self, event: SnapshotRead, now_ms: int) -> None:
        if self.leading is not None:
            self.leading.on_snapshot_read(event, now_ms)

    def _on_propose(self, event: Propose, _now_ms: int) -> None:
        if self.leading is None:
            self._out.refused.append((event.token, Refusal.NOT_LEADER))
        else:
            self.leading.propose(event)

    def _on_change_membership(self, event: ChangeMembership, now_ms: int) -> None:
        if self.leading is None:
            self._out.refused.append((event.token, Refusal.NOT_LEADER))
        else:
            self.leading.change_membership(event, now_ms)

    def _on_read_index(self, event: ReadIndex, _now_ms: int) -> None:
        if self.leading is None:
            self._out.refused.append((event.token, Refusal.NOT_LEADER))
        else:
            self.leading.read_index(event)

    def _on_transfer(self, event: Transfer, now_ms: int) -> None:
        if self.leading is not None:
            self.leading.transfer(event, now_ms)

    def validate(self) -> None:
        """The invariants that can be checked from inside; tests call it after every step."""
        self.log.validate()
        assert self.log.start <= self.log.snapshot.offset <= self.commit <= self.log.end
        assert self.durable_end <= self._handed_over <= self.log.end
        assert self._delivered <= self.commit
        assert self._persist_due or (self._truncate_to, self._reset_to, self._recovered) == (None, None, False)
        assert (self.leading is not None) == (self.role is _LEADER)
        assert self.role is not _LEADER or self.leader == self.me.node
        assert self.recovering_until is None or self.role is _FOLLOWER
        assert self.epoch >= max(self._durable_epoch, self.log.last_epoch)
        if self.leading is not None:
            self.leading.validate()


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
