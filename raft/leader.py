"""The state and actions of a leader: progress of the peers, commits, reads, membership changes, leadership transfer.
Pure.

Invariants:
- A leader only appends to its log, and only entries of its own epoch.
- `commit` advances to the largest offset that a majority of voters has synced, and only if the last entry below it is
  of this epoch. The leader counts itself for what it has synced, and not at all when it is not a voter.
- One membership change at a time, and each is one step from the one in force. None before an entry of this epoch has
  committed: without that rule, changes of two leaders can form disjoint majorities (Ongaro, raft-dev, 2015).
- A read returns the commit offset at its arrival (or later), after a majority has responded to a heartbeat that was
  sent after its arrival.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.config import RaftConfig
from tidelog.raft.effects import Effects, Rejection, SnapshotPiece
from tidelog.raft.membership import Member, Membership, VoterKey
from tidelog.raft.messages import (
    SNAPSHOT_HELD,
    AppendRequest,
    AppendResponse,
    ChangeMembership,
    Entry,
    EntryKind,
    Message,
    Propose,
    ReadIndex,
    SnapshotAck,
    SnapshotChunk,
    SnapshotRead,
    TimeoutNow,
    Transfer,
    entry_bytes,
)
from tidelog.raft.progress import PROBE, REPLICATE, SNAPSHOT, Progress
from tidelog.raft.raft_log import RaftLog

FAR_FUTURE_MS = 1 << 60


class _Append(NamedTuple):
    request: AppendRequest
    end: Offset
    size: int


class LeaderHost(Protocol):
    """What a `LeaderState` needs of the core that owns it."""

    me: VoterKey
    config: RaftConfig
    epoch: Epoch
    commit: Offset
    durable_end: Offset
    log: RaftLog

    @property
    def leader_state(self) -> LeaderState | None: ...

    @property
    def out(self) -> Effects: ...

    @property
    def persist_since_ms(self) -> int | None: ...

    @property
    def is_voter(self) -> bool: ...

    def send(self, to: NodeId, message: Message) -> None: ...

    def advance_commit(self, commit: Offset) -> None: ...

    def resign(self, now_ms: int) -> None: ...


class LeaderState:
    def __init__(self, core: LeaderHost, now_ms: int) -> None:
        self.core = core
        self.since_ms = now_ms
        self._check_ms = now_ms + core.config.election_timeout_max_ms
        """Time of the next check for a majority; appends and reads do not postpone it."""
        self.peers: dict[NodeId, Progress] = {}
        self.probe = 0
        self._appends: dict[Offset, _Append] = {}
        """Appends of this flush by their first offset: peers at the same offset share one, which is encoded once."""
        self.uncommitted_bytes = sum(map(entry_bytes, core.log.entries[core.commit - core.log.start :]))
        self._confirmed: dict[NodeId, int] = {}
        """The newest probe round that each peer has confirmed."""
        self._reads: deque[tuple[int, Offset, int]] = deque()
        """(probe round, offset, token) of reads that wait for a majority."""
        self._new_reads: list[int] = []
        self._promotions: dict[NodeId, tuple[Offset, int]] = {}
        """Learner -> (end of its catch-up round, start of the round)."""
        self._change_token: tuple[int, NodeId] | None = None
        self._transfer: tuple[NodeId, int] | None = None
        self._timeout_sent = False
        self.epoch_start = self._append(EntryKind.NO_OP, b"")
        self._sync_peers(now_ms)

    # Peers.

    def _sync_peers(self, now_ms: int) -> None:
        """Updates the progress table to the membership in force."""
        core = self.core
        membership = core.log.membership
        members = {m.node: m for m in (*membership.voters, *membership.learners) if m.node != core.me.node}
        for node in [node for node in self.peers if node not in members]:
            del self.peers[node]
            self._promotions.pop(node, None)
        for node, member in members.items():
            known = self.peers.get(node)
            if known is None or known.directory != member.directory:
                self._promotions.pop(node, None)
                # Before the entry that was just appended: a peer whose log agrees so far takes it in the first round.
                self.peers[node] = Progress(
                    next_offset=Offset(core.log.end - 1), directory=member.directory, now_ms=now_ms
                )
                self.peers[node].sent_ms = now_ms - core.config.heartbeat_interval_ms
        if self._reads:
            self._answer_reads()  # with fewer voters, the confirmations may be a majority

    def flush(self, now_ms: int) -> None:
        """Sends each peer what is due: entries, a chunk of a snapshot, or a heartbeat."""
        core = self.core
        if self._new_reads and core.commit > self.epoch_start:
            self.probe += 1
            self._reads.extend((self.probe, core.commit, token) for token in self._new_reads)
            self._new_reads.clear()
            self._answer_reads()
        self._appends.clear()
        end = core.log.end
        quiet_since_ms = now_ms - core.config.heartbeat_interval_ms
        for node, peer in self.peers.items():
            is_idle = peer.mode is REPLICATE and peer.next == end and peer.probe == self.probe
            if not is_idle or peer.sent_ms <= quiet_since_ms:
                self._send_to(node, peer, end, now_ms)

    def _send_to(self, node: NodeId, peer: Progress, end: Offset, now_ms: int) -> None:
        core, config = self.core, self.core.config
        if peer.paused and now_ms - peer.asked_ms >= config.election_timeout_min_ms:
            peer.paused = False  # the response is lost; retry
        if peer.mode is not SNAPSHOT and peer.next < core.log.start:
            peer.to_snapshot(core.log.snapshot)
        if peer.mode is SNAPSHOT:
            if not peer.paused:
                peer.paused = True
                peer.asked_ms = now_ms
                assert peer.snapshot is not None
                core.out.snapshot_reads.append(SnapshotPiece(node, peer.snapshot, peer.position))
        else:
            while peer.next < end and peer.has_room(
                bytes_max=config.inflight_bytes_max, messages_max=config.inflight_messages_max
            ):
                append = self._appends.get(peer.next) or self._make_append(peer.next)
                core.send(node, append.request)
                peer.sent_ms, peer.probe = now_ms, self.probe
                peer.sent(append.end, append.size, now_ms)
        if now_ms - peer.sent_ms >= config.heartbeat_interval_ms or peer.probe < self.probe:
            self._send_heartbeat(node, peer, now_ms)

    def _make_append(self, first: Offset) -> _Append:
        """Returns the append that begins at `first`, with as many entries as one message takes."""
        core = self.core
        entries, size = core.log.sized_slice(first, core.config.append_bytes_max)
        prev_epoch = core.log.epoch_before(first)
        assert prev_epoch is not None, "what is sent is in the log"
        request = AppendRequest(core.epoch, core.me.node, first, prev_epoch, entries, core.commit, self.probe)
        append = self._appends[first] = _Append(request, Offset(first + len(entries)), size)
        return append

    def _send_heartbeat(self, node: NodeId, peer: Progress, now_ms: int) -> None:
        """Sends an append without entries."""
        core = self.core
        prev = peer.snapshot.offset if peer.mode is SNAPSHOT and peer.snapshot is not None else peer.next
        prev_epoch = core.log.epoch_before(prev)
        if prev_epoch is None:  # the snapshot in transfer is older than the log's start
            prev, prev_epoch = core.log.start, core.log.start_epoch
        peer.sent_ms = now_ms
        peer.probe = self.probe
        core.send(node, AppendRequest(core.epoch, core.me.node, prev, prev_epoch, (), core.commit, self.probe))

    def on_append_response(self, response: AppendResponse, now_ms: int) -> None:
        core = self.core
        peer = self.peers.get(response.sender)
        if peer is None or response.directory != peer.directory:
            return
        peer.active_ms = now_ms
        counts_again = response.counts and not peer.counts
        peer.counts = response.counts
        if response.rejected:
            self._rejected(peer, response)
        else:
            if peer.mode is PROBE and response.match >= peer.next:
                # Only a response that proves agreement at `next`: a stale one would resend the whole window.
                peer.to_replicate()
            elif peer.mode is SNAPSHOT and response.match >= core.log.start:
                peer.to_probe(response.match)
            has_advanced = peer.acked(response.match)
            if has_advanced or response.match >= core.commit:
                peer.advanced_ms = now_ms
            if (has_advanced and response.match > core.commit) or counts_again:
                self.advance_commit(now_ms)
                if core.leader_state is not self:
                    return
            if self._transfer is not None:
                self._check_transfer()
            if core.log.membership.learners:
                self._check_promotion(response.sender, now_ms)
        if response.probe and self._reads:
            self._confirmed[response.sender] = max(self._confirmed.get(response.sender, 0), response.probe)
            self._answer_reads()

    def _rejected(self, peer: Progress, response: AppendResponse) -> None:
        if peer.mode is SNAPSHOT:
            return
        if not response.counts:
            peer.match = Offset(0)  # it has lost what it had acknowledged
        elif response.match <= peer.match or (peer.mode is PROBE and response.match != peer.next):
            return  # a stale response
        _, own_end = self.core.log.end_of_epoch(response.hint_epoch)
        peer.to_probe(min(response.hint_end, own_end, max(Offset(response.match - 1), Offset(0))))

    def disconnected(self, node: NodeId) -> None:
        peer = self.peers.get(node)
        if peer is None:
            return
        if peer.mode is SNAPSHOT:
            peer.paused = False
        else:
            peer.to_probe(peer.next)

    # Commit.

    def _synced_by(self, member: Member) -> Offset:
        core = self.core
        if member.node == core.me.node:
            return core.durable_end if member.directory == core.me.directory else Offset(0)
        peer = self.peers.get(member.node)
        return peer.match if peer is not None and peer.counts else Offset(0)

    def advance_commit(self, now_ms: int) -> None:
        core = self.core
        voters = core.log.membership.voters
        synced = sorted(map(self._synced_by, voters))
        majority = synced[(len(voters) - 1) // 2]  # of 2n+1, n+1 have at least the middle one; of 2n, n+1 the lower
        if majority <= core.commit or not self._may_commit(majority):
            return
        was = core.commit
        core.advance_commit(majority)
        start = core.log.start
        self.uncommitted_bytes -= sum(map(entry_bytes, core.log.entries[was - start : majority - start]))
        self._after_commit(was, now_ms)

    def _may_commit(self, offset: Offset) -> bool:
        """Only entries of this epoch commit by counting; older ones commit with them (section 5.4.2, figure 8)."""
        return self.core.log.epoch_before(offset) == self.core.epoch

    def _after_commit(self, was: Offset, now_ms: int) -> None:
        core = self.core
        at = core.log.membership_offset
        if was <= at < core.commit and len(core.log.memberships) > 1 and not core.is_voter:
            # Removed: send the commit to the others, then resign.
            for node, peer in self.peers.items():
                if peer.mode is REPLICATE:
                    self._send_heartbeat(node, peer, now_ms)
            core.resign(now_ms)

    # Time.

    def deadline_ms(self) -> int:
        config = self.core.config
        last_beat = min((peer.sent_ms for peer in self.peers.values()), default=FAR_FUTURE_MS)
        stalls = self.core.persist_since_ms
        stalled = FAR_FUTURE_MS if stalls is None else stalls + config.disk_stall_timeout_ms
        check = self._check_ms if self.peers else FAR_FUTURE_MS
        return min(last_beat + config.heartbeat_interval_ms, stalled, check)

    def check_quorum(self, now_ms: int) -> None:
        """Steps down after an election timeout without contact to a majority (check quorum), or when its disk stalls:
        another voter may be able to commit."""
        core, config = self.core, self.core.config
        self._check_ms = now_ms + config.heartbeat_interval_ms
        if self._transfer is not None and now_ms >= self._transfer[1]:
            self._transfer = None
        stalled_since = core.persist_since_ms
        if stalled_since is not None and now_ms - stalled_since >= config.disk_stall_timeout_ms:
            core.resign(now_ms)
            return
        timeout = config.election_timeout_max_ms
        if now_ms - self.since_ms < timeout:
            return
        reachable = 0
        for member in core.log.membership.voters:
            if member.node == core.me.node:
                reachable += 1
            else:
                peer = self.peers.get(member.node)
                reachable += peer is not None and now_ms - peer.active_ms < timeout
        if reachable < core.log.membership.quorum:
            core.resign(now_ms)

    def abandon(self) -> None:
        """Leadership ends: fails everything that waits for a response."""
        rejected = self.core.out.rejected
        rejected.extend((token, Rejection.NOT_LEADER) for token in self._new_reads)
        rejected.extend((token, Rejection.NOT_LEADER) for _, _, token in self._reads)
        if self._change_token is not None:
            rejected.append((self._change_token[0], Rejection.UNKNOWN))

    # Proposals.

    def _append(self, kind: EntryKind, data: bytes) -> Offset:
        log = self.core.log
        offset = log.end
        entry = Entry(self.core.epoch, kind, data)
        log.append((entry,))
        self.uncommitted_bytes += entry_bytes(entry)
        return offset

    def propose(self, event: Propose) -> None:
        out = self.core.out
        if self._transfer is not None:
            out.rejected.append((event.token, Rejection.TRANSFERRING))
        elif (event.at is not None and event.at != self.core.log.end) or event.epoch not in (None, self.core.epoch):
            out.rejected.append((event.token, Rejection.MOVED))
        elif self.uncommitted_bytes + len(event.data) > self.core.config.uncommitted_bytes_max:
            out.rejected.append((event.token, Rejection.OVERLOADED))
        else:
            out.accepted.append((event.token, self._append(EntryKind.DATA, event.data), self.core.epoch))

    # Reads.

    def read_index(self, event: ReadIndex) -> None:
        self._new_reads.append(event.token)

    def _answer_reads(self) -> None:
        core = self.core
        membership = core.log.membership
        rounds = sorted(
            self.probe if member.node == core.me.node else self._confirmed.get(member.node, 0)
            for member in membership.voters
        )
        confirmed = rounds[len(rounds) - membership.quorum]
        while self._reads and self._reads[0][0] <= confirmed:
            _, offset, token = self._reads.popleft()
            core.out.reads.append((token, offset))

    # Membership.

    def _change_rejection(self) -> Rejection | None:
        core = self.core
        if core.commit <= self.epoch_start:
            return Rejection.NOT_READY
        in_force = core.log.membership_offset
        if len(core.log.memberships) > 1 and in_force >= core.commit:
            return Rejection.CHANGE_IN_PROGRESS
        if self._transfer is not None:
            return Rejection.TRANSFERRING
        return None

    def change_membership(self, event: ChangeMembership, now_ms: int) -> None:
        core = self.core
        membership = core.log.membership
        rejection = self._change_rejection()
        target: Membership | None = None
        if rejection is None and event.add is not None:
            known = membership.voter(event.add.node)
            if self._change_token is not None:
                rejection = Rejection.CHANGE_IN_PROGRESS
            elif known is None and not membership.has_room_for(event.add.node):
                rejection = Rejection.TOO_MANY_MEMBERS
            elif known is None:
                target = membership.with_learner(event.add)
            elif known.directory == event.add.directory and known.endpoints != event.add.endpoints:
                target = membership.with_voter(event.add)
            else:
                rejection = Rejection.ALREADY_MEMBER
        elif rejection is None and event.remove is not None:
            if membership.voter(event.remove) is None and membership.learner(event.remove) is None:
                rejection = Rejection.UNKNOWN_MEMBER
            elif membership.voter(event.remove) is not None and len(membership.voters) == 1:
                rejection = Rejection.LAST_VOTER
            elif not self._has_quorum(membership.without(event.remove), now_ms):
                rejection = Rejection.NO_QUORUM_LEFT
            else:
                target = membership.without(event.remove)
                self._reject_pending_add(event.remove)
        elif rejection is None and event.update is not None:
            target = membership.with_endpoints(event.update)
        if target is None:
            core.out.rejected.append((event.token, rejection or Rejection.UNKNOWN_MEMBER))
            return
        offset = self._change_to(target, now_ms)
        if event.add is not None and target.learner(event.add.node) is not None:
            self._change_token = (event.token, event.add.node)  # completes when the learner is promoted
        else:
            core.out.accepted.append((event.token, offset, core.epoch))

    def _reject_pending_add(self, removed: NodeId) -> None:
        """Fails the pending addition of a removed learner."""
        if self._change_token is not None and self._change_token[1] == removed:
            self.core.out.rejected.append((self._change_token[0], Rejection.UNKNOWN_MEMBER))
            self._change_token = None

    def _has_quorum(self, membership: Membership, now_ms: int) -> bool:
        """Whether a majority of these voters is reachable and sound: no removal leaves a group that cannot commit."""
        core = self.core
        sound = 0
        for member in membership.voters:
            peer = self.peers.get(member.node)
            if member.node == core.me.node:
                sound += 1
            elif peer is not None and peer.counts:
                sound += now_ms - peer.active_ms < core.config.election_timeout_max_ms
        return sound >= membership.quorum

    def _change_to(self, target: Membership, now_ms: int) -> Offset:
        assert target.is_one_step_from(self.core.log.membership), "one voter at a time"
        offset = self._append(EntryKind.MEMBERSHIP, target.encode())
        self._sync_peers(now_ms)
        return offset

    def _check_promotion(self, node: NodeId, now_ms: int) -> None:
        """Promotes a learner that has caught up within a short round."""
        core = self.core
        learner = core.log.membership.learner(node)
        if learner is None:
            return
        peer = self.peers[node]
        round_end, began_ms = self._promotions.setdefault(node, (core.log.end, now_ms))
        if peer.match < round_end or not peer.counts:
            return
        if now_ms - began_ms > core.config.election_timeout_min_ms:
            self._promotions[node] = (core.log.end, now_ms)
        elif self._change_rejection() is None:
            del self._promotions[node]
            offset = self._change_to(core.log.membership.with_voter(learner), now_ms)
            if self._change_token is not None and self._change_token[1] == node:
                core.out.accepted.append((self._change_token[0], offset, core.epoch))
                self._change_token = None

    # Transfer.

    def transfer(self, event: Transfer, now_ms: int) -> None:
        core = self.core
        voters = [m.node for m in core.log.membership.voters if m.node in self.peers and self.peers[m.node].counts]
        if event.target is not None:
            voters = [node for node in voters if node == event.target]
        if not voters or self._transfer is not None:
            return
        target = max(voters, key=lambda node: (self.peers[node].match, node))
        self._transfer = (target, now_ms + core.config.election_timeout_max_ms)
        self._timeout_sent = False
        self._check_transfer()

    def _check_transfer(self) -> None:
        """Starts the target's election once it has the whole log: no write in flight is lost."""
        core = self.core
        if self._transfer is None or self._timeout_sent:
            return
        target = self._transfer[0]
        if target in self.peers and self.peers[target].match == core.log.end:
            self._timeout_sent = True
            core.send(target, TimeoutNow(core.epoch, core.me.node))

    # Snapshots to peers.

    def on_snapshot_read(self, event: SnapshotRead, now_ms: int) -> None:
        peer = self.peers.get(event.peer)
        if peer is None or peer.mode is not SNAPSHOT or peer.snapshot != event.snapshot:
            return
        if event.total_bytes < 0:  # it is gone: a newer one has replaced it, or is about to
            if event.snapshot == self.core.log.snapshot:
                peer.position, peer.asked_ms = 0, now_ms  # still paused: requested again later, not at once
            else:
                peer.to_snapshot(self.core.log.snapshot)
            return
        peer.sent_ms = now_ms
        core = self.core
        core.send(
            event.peer,
            SnapshotChunk(core.epoch, core.me.node, event.snapshot, event.position, event.data, event.total_bytes),
        )

    def on_snapshot_ack(self, ack: SnapshotAck, now_ms: int) -> None:
        peer = self.peers.get(ack.sender)
        if peer is None or ack.directory != peer.directory:
            return
        peer.active_ms = now_ms
        if peer.mode is not SNAPSHOT or peer.snapshot != ack.snapshot:
            return
        if ack.wanted == SNAPSHOT_HELD:
            peer.to_probe(max(peer.match, ack.snapshot.offset))
        elif ack.wanted != peer.position:  # a repeated response must not cause a repeated chunk, or they never end
            peer.position = ack.wanted
            # Restart from the beginning: the CRC was wrong, or the peer lost what it had. Not at once, or a snapshot
            # that never arrives whole is sent without a pause.
            peer.paused = ack.wanted == 0

    def validate(self, *, thorough: bool = True) -> None:
        core = self.core
        assert self.epoch_start <= core.log.end, "the epoch begins in the log"
        for node, peer in self.peers.items():
            assert node != core.me.node, "a leader is no peer of its own"
            peer.validate(core.log.end)
        if not thorough:
            return
        own = core.log.entries[self.epoch_start - core.log.start :] if self.epoch_start >= core.log.start else []
        assert all(entry.epoch == core.epoch for entry in own), "a leader appends only entries of its epoch"
        uncommitted = core.log.entries[core.commit - core.log.start :]
        assert self.uncommitted_bytes == sum(map(entry_bytes, uncommitted)), "uncommitted bytes are counted"
