"""What must hold after every step of a Raft run. Checks draw no random numbers and change nothing.

    election safety      at most one node, in one life, leads in an epoch
    leader append-only   a leader never overwrites or removes an entry of its log
    log matching         two logs that have an entry of the same offset and epoch are equal up to it
    leader completeness  a leader has every entry that was committed in an earlier epoch
    commit rule          what a leader commits ends with an entry of its epoch, synced by a majority of the voters
    change rule          a leader changes the membership once an entry of its epoch is committed, one change at a time
    state machine safety every node applies the same entry at the same offset, and none that is not committed
    vote once            what leaves as a vote, over all lives of a directory, names one candidate in an epoch
    promises kept        a new incarnation of a directory has the epoch and the log that the last one announced, and all
                         that the last one had synced
    commit               never falls in one life
    recovering           a voter that lost synced data neither votes nor counts

Each node is looked at when an event has run on it, and only what changed is compared: `Shadow` holds what was last seen
of its log. What was ever committed is in `history`, in order; what was ever seen at an offset in an epoch, in `_seen`.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from simulation.machine import ChainMachine, link
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.core import RaftCore
from tidelog.raft.effects import Role
from tidelog.raft.membership import Member, Membership, VoterKey
from tidelog.raft.messages import (
    AppendResponse,
    Entry,
    EntryKind,
    Message,
    PreVoteResponse,
    SnapshotId,
    VoteRequest,
    VoteResponse,
)

VALIDATE_EVERY = 64
"""A core's thorough `validate` looks at its whole log: at each change would cost more than the run."""


class Shadow:
    """What was last seen of one life of a node."""

    __slots__ = ("changes", "commit", "core", "end", "entries", "epoch", "last", "role", "start")

    def __init__(self, core: RaftCore) -> None:
        self.core = core
        self.epoch = Epoch(-1)
        self.role = Role.FOLLOWER
        self.commit = Offset(0)
        self.start = core.log.start
        self.end = Offset(-1)
        self.last: Entry | None = None
        self.entries: list[Entry] = []
        self.changes = 0


class Promise:
    """What the incarnations of one directory have announced to others."""

    __slots__ = ("epoch", "match", "match_epoch", "votes")

    def __init__(self) -> None:
        self.epoch = Epoch(0)
        self.match = Offset(0)
        self.match_epoch = Epoch(0)
        self.votes: dict[Epoch, NodeId] = {}


class RaftChecker:
    """Given every core after its steps, every message as it leaves, and every apply."""

    def __init__(self, fail: Callable[[str, str], None], trace: Callable[[str, str], None]) -> None:
        self.fail = fail
        self._trace = trace
        self.history: list[Entry] = []
        """Everything that any node ever took for committed, by offset."""
        self.chains: list[int] = [0]
        """The state machine's chain after each prefix of `history`."""
        self._committed_in: list[Epoch] = []
        """In which epoch each of them was first known to be committed; it never falls."""
        self.leaders: dict[Epoch, tuple[NodeId, int]] = {}
        self._seen: dict[tuple[Offset, Epoch], tuple[Entry, Epoch]] = {}
        self._shadows: dict[NodeId, Shadow] = {}
        self._promises: dict[tuple[NodeId, bytes], Promise] = {}
        self._former: dict[VoterKey, RaftCore] = {}
        """The last life of each directory, as it was when it ended."""
        self.elections = 0

    # -- lives

    def born(self, node: NodeId, core: RaftCore) -> None:
        """A new life: it must have what the last one promised, or say that it has lost it."""
        self._shadows[node] = Shadow(core)
        promise = self._promise(core.me.node, core.me.directory)
        if core.epoch < promise.epoch:
            self.fail(f"n{node}", f"starts in epoch {core.epoch}, but has announced {promise.epoch}")
        vote = promise.votes.get(core.epoch)
        if vote is not None and (core.voted_for is None or core.voted_for.node != vote):
            self.fail(f"n{node}", f"has forgotten its vote for {vote} in epoch {core.epoch}")
        if core.epoch == promise.match_epoch and core.recovering_until is None and core.log.end < promise.match:
            self.fail(f"n{node}", f"has acknowledged up to {promise.match} and starts with {core.log.end}")
        self._check_synced(node, core)
        self.look(node)

    def died(self, node: NodeId) -> None:
        shadow = self._shadows.pop(node, None)
        if shadow is not None:
            self._former[shadow.core.me] = shadow.core

    def _check_synced(self, node: NodeId, core: RaftCore) -> None:
        """What the last life of this directory had synced, and had not given up when it ended, is there, or is known to
        be lost. A minority's log may be wrong for long without a wrong commit."""
        former = self._former.pop(core.me, None)
        if former is None or core.recovering_until is not None:
            return
        end, log, was = former.durable_end, core.log, former.log
        if log.end < end:
            self.fail(f"n{node}", f"had synced up to {end} and starts with {log.end}")
            return
        for offset in range(max(log.start, was.start), end):
            if log.entries[offset - log.start] != was.entries[offset - was.start]:
                self.fail(f"n{node}", f"starts with another entry at {offset} than it had synced")
                return

    def _promise(self, node: NodeId, directory: bytes) -> Promise:
        promise = self._promises.get((node, directory))
        if promise is None:
            promise = self._promises[node, directory] = Promise()
        return promise

    # -- messages

    def left(self, sender: NodeId, receiver: NodeId, message: Message) -> None:
        """A message leaves."""
        kind = type(message)
        if kind is AppendResponse:
            self._append_response(sender, message)  # type: ignore[arg-type]
        elif kind is VoteResponse:
            if message.granted:  # type: ignore[union-attr]
                self._voted(sender, message.directory, message.epoch, receiver)  # type: ignore[union-attr]
        elif kind is VoteRequest:
            self._voted(sender, message.directory, message.epoch, sender)  # type: ignore[union-attr]
        elif kind is PreVoteResponse and message.granted:  # type: ignore[union-attr]
            self._check_not_recovering(sender, "grants a pre-vote")

    def _append_response(self, sender: NodeId, response: AppendResponse) -> None:
        if response.counts:
            self._check_not_recovering(sender, "counts")
        if response.rejected:
            return  # promises nothing: an epoch that is not durable yet may refuse an older one
        promise = self._promise(sender, response.directory)
        promise.epoch = max(promise.epoch, response.epoch)
        if response.counts:
            if response.epoch > promise.match_epoch:
                promise.match_epoch, promise.match = response.epoch, response.match
            elif response.match > promise.match:
                promise.match = response.match

    def _voted(self, voter: NodeId, directory: bytes, epoch: Epoch, candidate: NodeId) -> None:
        self._check_not_recovering(voter, "votes")
        promise = self._promise(voter, directory)
        promise.epoch = max(promise.epoch, epoch)
        before = promise.votes.setdefault(epoch, candidate)
        if before != candidate:
            self.fail(f"n{voter}", f"votes for {candidate} in epoch {epoch}, after {before}")

    def _check_not_recovering(self, node: NodeId, what: str) -> None:
        shadow = self._shadows.get(node)
        if shadow is not None and shadow.core.recovering_until is not None:
            self.fail(f"n{node}", f"{what} while it recovers what it had synced up to {shadow.core.recovering_until}")

    # -- cores

    def look(self, node: NodeId) -> None:
        """After an event on this node."""
        shadow = self._shadows.get(node)
        if shadow is None:
            return
        core = shadow.core
        log = core.log
        entries = log.entries
        last = entries[-1] if entries else None
        if (
            last is shadow.last
            and core.commit == shadow.commit
            and core.epoch == shadow.epoch
            and core.role is shadow.role
            and log.start == shadow.start
        ):
            return
        self._look_closer(node, shadow, core)

    def _look_closer(self, node: NodeId, shadow: Shadow, core: RaftCore) -> None:
        shadow.changes += 1
        if core.epoch < shadow.epoch:
            self.fail(f"n{node}", f"falls from epoch {shadow.epoch} to {core.epoch}")
        still_leads = core.role is Role.LEADER and shadow.role is Role.LEADER and core.epoch == shadow.epoch
        seen_end = shadow.end
        if core.log.start != shadow.start or shadow.changes == 1:
            self._check_first_membership(node, core)
        self._compare_logs(node, shadow, core, is_append_only=still_leads)
        if core.role is Role.LEADER and not still_leads:
            self._new_leader(node, core)
        if core.commit != shadow.commit:
            if still_leads and core.commit > shadow.commit:
                self._check_commit_rule(node, core, seen_end)
            self._committed(node, shadow, core)
        if core.role is not shadow.role or core.epoch != shadow.epoch:
            self._trace(f"n{node}", f"{core.role.value} in epoch {core.epoch}, log {core.log.start}..{core.log.end}")
        shadow.epoch, shadow.role = core.epoch, core.role
        try:
            core.validate(thorough=shadow.changes % VALIDATE_EVERY == 0)
        except AssertionError as error:
            self.fail(f"n{node}", f"Invariant of the Raft core: {error}")

    def _check_first_membership(self, node: NodeId, core: RaftCore) -> None:
        """A log that does not begin at 0 begins with the membership that was in force there."""
        start, first = core.log.start, core.log.memberships[0][1]
        known = [entry for entry in self.history[:start] if entry.kind is EntryKind.MEMBERSHIP]
        if len(self.history) >= start and known and first != Membership.decode(known[-1].data):
            voters = [member.node for member in first.voters]
            self.fail(f"n{node}", f"begins its log at {start} with the voters {voters}, which are not those of then")

    def _compare_logs(self, node: NodeId, shadow: Shadow, core: RaftCore, *, is_append_only: bool) -> None:
        log = core.log
        known, start = shadow.entries, shadow.start
        if log.start != start:
            if log.start > start:
                del known[: log.start - start]
            else:
                known.clear()
            start = log.start
        entries = log.entries
        same = min(len(known), len(entries))
        # What is equal by identity at one place is equal before it: a log is only ever cut and appended to.
        while same and known[same - 1] is not entries[same - 1]:
            same -= 1
        if is_append_only and same < len(known):
            self.fail(f"n{node}", f"leads in epoch {core.epoch} and changes its log at {start + same}")
        del known[same:]
        epoch = entries[same - 1].epoch if same else log.start_epoch
        for index in range(same, len(entries)):
            entry = entries[index]
            self._appended(node, Offset(start + index), entry, epoch)
            if is_append_only and entry.kind == EntryKind.MEMBERSHIP:
                self._check_change_rule(node, core, Offset(start + index))
            epoch = entry.epoch
            known.append(entry)
        shadow.start, shadow.last = start, (entries[-1] if entries else None)

    def _appended(self, node: NodeId, offset: Offset, entry: Entry, epoch_before: Epoch) -> None:
        seen = self._seen.get((offset, entry.epoch))
        if seen is None:
            self._seen[offset, entry.epoch] = (entry, epoch_before)
        elif seen[0] != entry or seen[1] != epoch_before:
            self.fail(
                f"n{node}",
                f"log matching: at {offset} in epoch {entry.epoch}: {entry} after {epoch_before}, elsewhere {seen}",
            )

    def _new_leader(self, node: NodeId, core: RaftCore) -> None:
        self.elections += 1
        life = (node, id(core))
        before = self.leaders.setdefault(core.epoch, life)
        if before != life:
            self.fail(f"n{node}", f"leads in epoch {core.epoch}, as n{before[0]} did")
        if core.recovering_until is not None:
            self.fail(f"n{node}", "leads while it recovers")
        self._check_complete(node, core)

    def _check_complete(self, node: NodeId, core: RaftCore) -> None:
        """Leader completeness; by log matching the last entry that it must have speaks for all before it."""
        # The late winner of an older epoch need not have what a newer one has committed meanwhile.
        end = Offset(bisect_left(self._committed_in, core.epoch))
        if not end:
            return
        epoch = self.history[end - 1].epoch
        log = core.log
        if log.start > end:
            return  # its snapshot covers it; `_committed` has compared that
        if log.end < end or log.epoch_before(end) != epoch:
            self.fail(
                f"n{node}",
                f"leads in epoch {core.epoch} with a log up to {log.end} (epoch {log.epoch_before(end)} before {end}), "
                f"but {end} entries are committed in older epochs, the last one an entry of {epoch}",
            )

    def _committed(self, node: NodeId, shadow: Shadow, core: RaftCore) -> None:
        was, now = shadow.commit, core.commit
        shadow.commit = now
        if now < was:
            self.fail(f"n{node}", f"commit falls from {was} to {now}")
            return
        log, history = core.log, self.history
        first = max(was, log.start)
        if first > len(history):
            self.fail(f"n{node}", f"takes {first} entries for committed, of which nobody knows")
            return
        if first > was:
            self._check_snapshot(node, SnapshotId(log.start, log.start_epoch))
        grew = False
        for offset in range(first, now):
            entry = log.entries[offset - log.start]
            if offset < len(history):
                if history[offset] is not entry and history[offset] != entry:
                    self.fail(f"n{node}", f"commits {entry} at {offset}, elsewhere {history[offset]}")
                    return
            else:
                grew = True
                history.append(entry)
                self._committed_in.append(core.epoch)
                self.chains.append(link(self.chains[-1], entry))
        if grew:
            for other, other_shadow in self._shadows.items():
                leader = other_shadow.core
                if leader.role is Role.LEADER and leader.epoch > core.epoch:
                    self._check_complete(other, leader)

    def _check_commit_rule(self, node: NodeId, core: RaftCore, seen_end: Offset) -> None:
        log, end = core.log, core.commit
        epoch = log.epoch_before(end)
        if epoch != core.epoch:
            self.fail(f"n{node}", f"leads in epoch {core.epoch} and commits up to {end}, which ends in epoch {epoch}")
        in_force = len(log.memberships) - 1
        while in_force and log.memberships[in_force][0] >= max(end, seen_end):
            # Appended since the last look, behind what is committed: a round may count first and append then.
            if self._has_quorum(log.memberships[in_force][1], end, epoch):
                return
            in_force -= 1
        membership = log.memberships[in_force][1]
        # A membership that this very commit brings into the past was in force when its entry was counted.
        if not self._has_quorum(membership, end, epoch):
            voters = [member.node for member in membership.voters]
            self.fail(f"n{node}", f"commits up to {end}, which too few of the voters {voters} have")

    def _has_quorum(self, membership: Membership, end: Offset, epoch: Epoch | None) -> bool:
        having = sum(1 for member in membership.voters if self._may_have(member, end, epoch))
        return having >= membership.quorum

    def _may_have(self, member: Member, end: Offset, epoch: Epoch | None) -> bool:
        """Has it synced this entry? Who is down, was wiped or has lost data may have acknowledged it before."""
        shadow = self._shadows.get(member.node)
        if shadow is None or shadow.core.me.directory != member.directory:
            return True
        core = shadow.core
        if core.recovering_until is not None or core.log.start >= end:
            return True
        return core.log.epoch_before(end) == epoch and core.durable_end >= end

    def _check_change_rule(self, node: NodeId, core: RaftCore, offset: Offset) -> None:
        """The leader has just appended a membership."""
        assert core.leader_state is not None
        if core.commit <= core.leader_state.epoch_start:
            self.fail(f"n{node}", f"changes the membership at {offset} before it has committed anything in its epoch")
        at = [earlier for earlier, _ in core.log.memberships[1:] if earlier < offset]
        if at and at[-1] >= core.commit:
            self.fail(f"n{node}", f"changes the membership at {offset}, when the change at {at[-1]} is not committed")

    def _check_snapshot(self, node: NodeId, snapshot: SnapshotId) -> None:
        end = snapshot.offset
        if not end:
            return
        if end > len(self.history) or self.history[end - 1].epoch != snapshot.epoch:
            self.fail(f"n{node}", f"has a snapshot {snapshot} of what was not committed so")

    # -- state machines

    def applied(self, machine: ChainMachine, first: Offset, entries: Sequence[Entry]) -> None:
        self._look_at(machine)
        end = first + len(entries)
        if end > len(self.history):
            self.fail(machine.name, f"applies up to {end}, but only {len(self.history)} entries are committed")
        elif self.chains[end] != machine.chain:
            self.fail(machine.name, f"has another state than the others after {end} entries")

    def loaded(self, machine: ChainMachine, snapshot: SnapshotId) -> None:
        self._look_at(machine)
        self._check_snapshot_state(machine)

    def misplaced(self, machine: ChainMachine, first: Offset) -> None:
        self.fail(machine.name, f"applies entries from {first} on a state of {machine.offset} entries")

    def _check_snapshot_state(self, machine: ChainMachine) -> None:
        end = machine.offset
        if end > len(self.history):
            self.fail(machine.name, f"loads a state of {end} entries, but only {len(self.history)} are committed")
        elif self.chains[end] != machine.chain:
            self.fail(machine.name, f"loads another state than the others have after {end} entries")

    def _look_at(self, machine: ChainMachine) -> None:
        """An apply may run in the step that commits: the core comes first."""
        node = _node_of(machine.name)
        if node is not None:
            self.look(node)

    # -- the end

    def leader_now(self) -> tuple[NodeId, RaftCore] | None:
        """The leader with the highest epoch, if anybody leads."""
        leader_state = [(s.core.epoch, node) for node, s in self._shadows.items() if s.core.role is Role.LEADER]
        if not leader_state:
            return None
        node = max(leader_state)[1]
        return node, self._shadows[node].core


def _node_of(name: str) -> NodeId | None:
    return NodeId(int(name[1:])) if name[:1] == "n" and name[1:].isdigit() else None
