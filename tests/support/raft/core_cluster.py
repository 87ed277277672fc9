"""Pure Raft cores in one process, with every message, every disk write and every millisecond in the test's hand.

Nothing happens by itself: messages wait in `network` until they are delivered or dropped, time moves by `run` or
`wait`, and the disks of nodes in `slow_disks` finish a write only when `persist` says so (all others at once). What was
persisted is kept in `Stored`, so that a node can crash, lose what was under way, and start again. The `Checker` looks
on at every step.

    cluster = Cluster(3)
    cluster.elect(1)
    cluster.propose(1, b"x")
    cluster.cut(1, 2)
    cluster.run(1000)
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

import msgpack

from support.raft.core_invariants import Checker, next_state
from support.raft.core_trace import Trace
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.config import BootState, RaftConfig
from tidelog.raft.core import RaftCore
from tidelog.raft.effects import Effects, HardState, Persist, Rejection, Role, SnapshotPiece
from tidelog.raft.membership import Member, Membership, VoterKey
from tidelog.raft.messages import (
    ChangeMembership,
    Disconnected,
    Entry,
    EntryKind,
    Event,
    Message,
    Persisted,
    Propose,
    ReadIndex,
    SnapshotChunk,
    SnapshotFailed,
    SnapshotId,
    SnapshotInstalled,
    SnapshotRead,
    SnapshotTaken,
    SnapshotWritten,
    Tick,
    Transfer,
)

TRANSFER_BYTES = 64
NO_SNAPSHOT = SnapshotId(Offset(0), Epoch(0))
NOTHING_VOTED = HardState(Epoch(0), None)


def directory(node: int, life: int = 0) -> bytes:
    """The directory id of a node; a wiped disk gets that of its next life."""
    return bytes([life]) * 8 + node.to_bytes(8, "big")


def key(node: int, life: int = 0) -> VoterKey:
    return VoterKey(NodeId(node), directory(node, life))


def member(node: int, life: int = 0) -> Member:
    return Member(NodeId(node), directory(node, life))


def membership_of(*voters: int, learners: Iterable[int] = ()) -> Membership:
    return Membership(tuple(map(member, voters)), tuple(map(member, learners)))


def data(epoch: int, text: str | bytes = b"") -> Entry:
    return Entry(Epoch(epoch), EntryKind.DATA, text.encode() if isinstance(text, str) else text)


@dataclass(frozen=True)
class StoredSnapshot:
    id: SnapshotId
    membership: Membership
    state: int

    def encode(self, *, filler: int = 150) -> bytes:
        """A body of some pieces, and its CRC."""
        body: bytes = msgpack.packb([*self.id, self.membership.encode(), self.state, b"." * filler])
        return body + crc32(body).to_bytes(4, "big")

    @classmethod
    def decode(cls, raw: bytes) -> StoredSnapshot | None:
        """None if the CRC does not hold."""
        if len(raw) < 4 or crc32(raw[:-4]) != int.from_bytes(raw[-4:], "big"):
            return None
        offset, epoch, membership, state, _ = msgpack.unpackb(raw[:-4])
        return cls(SnapshotId(Offset(offset), Epoch(epoch)), Membership.decode(membership), state)


class Drop(NamedTuple):
    """Entries below may go: queued behind the persists, as storage must."""

    start: Offset


@dataclass
class Stored:
    """What one directory holds, and what storage makes of it when a node starts."""

    membership: Membership
    """In force at `start`."""
    hard_state: HardState = NOTHING_VOTED
    snapshot: StoredSnapshot = field(init=False)
    snapshots: dict[Offset, StoredSnapshot] = field(default_factory=dict)
    start: Offset = NO_SNAPSHOT.offset
    start_epoch: Epoch = NO_SNAPSHOT.epoch
    entries: list[Entry] = field(default_factory=list)
    synced_end: Offset = NO_SNAPSHOT.offset
    recovering_until: Offset | None = None
    loss_epoch: Epoch = NO_SNAPSHOT.epoch

    def __post_init__(self) -> None:
        self.install(StoredSnapshot(NO_SNAPSHOT, self.membership, 0))

    @property
    def end(self) -> Offset:
        return Offset(self.start + len(self.entries))

    def epoch_before(self, offset: Offset) -> Epoch | None:
        if offset == self.start:
            return self.start_epoch
        return self.entries[offset - self.start - 1].epoch if self.start < offset <= self.end else None

    def covers(self, offset: Offset, epoch: Epoch | None) -> bool:
        """Whether a crash now would leave everything below `offset` here, as log or as snapshot."""
        if offset <= self.snapshot.id.offset:
            return True
        return offset <= self.end and self.epoch_before(offset) == epoch

    def install(self, snapshot: StoredSnapshot) -> None:
        self.snapshots[snapshot.id.offset] = snapshot
        if snapshot.id.offset >= max(self.snapshots):
            self.snapshot = snapshot

    def write_log(self, persist: Persist, count: int | None = None) -> None:
        """The part of a persist that touches the log; only so many entries of it if a crash interrupts it."""
        if persist.reset_to is not None:
            base = self.snapshots[persist.reset_to]
            self.start, self.start_epoch, self.membership = base.id.offset, base.id.epoch, base.membership
            self.entries.clear()
        elif persist.truncate_to is not None:
            del self.entries[persist.truncate_to - self.start :]
        assert persist.first == self.end, (
            f"persist {persist.number} begins at {persist.first}, the log ends at {self.end}"
        )
        self.entries.extend(persist.entries[:count])
        self.synced_end = min(self.synced_end, self.end)

    def write(self, persist: Persist) -> None:
        self.write_log(persist)
        self.hard_state = persist.hard_state
        self.synced_end = self.end
        if persist.recovered:
            self.recovering_until = None

    def drop_before(self, start: Offset) -> None:
        if start <= self.start:
            return
        assert start <= self.end, "what is dropped was written before"
        epoch = self.epoch_before(start)
        assert epoch is not None
        gone = self.entries[: start - self.start]
        for entry in gone:
            if entry.kind == EntryKind.MEMBERSHIP:
                self.membership = Membership.decode(entry.data)
        del self.entries[: start - self.start]
        self.start, self.start_epoch = start, epoch

    def lose_after(self, end: Offset) -> None:
        """Synced entries from `end` on are gone (bit rot, a lying disk): the voter finds that out when it starts."""
        assert self.start <= end < self.synced_end
        if self.recovering_until is None or self.recovering_until < self.synced_end:
            self.recovering_until = self.synced_end
        self.loss_epoch = self.hard_state.epoch
        del self.entries[end - self.start :]
        self.synced_end = end

    def boot(self) -> BootState:
        snapshot = self.snapshot
        if self.epoch_before(snapshot.id.offset) != snapshot.id.epoch:
            # The snapshot is ahead of the log, or the log contradicts it: the log is reset to it.
            self.start, self.start_epoch = snapshot.id.offset, snapshot.id.epoch
            self.membership = snapshot.membership
            self.entries.clear()
            self.synced_end = self.end
        self.synced_end = self.end  # recovery ends with a sync of what it kept
        return BootState(
            self.hard_state,
            snapshot.id,
            self.membership,
            self.start,
            self.start_epoch,
            tuple(self.entries),
            self.recovering_until,
            self.loss_epoch,
        )


class Envelope(NamedTuple):
    sender: int
    to: int
    message: Message


Where = Callable[[Envelope], bool]


class Node:
    """One core with its disk, its state machine and what is under way in its shell."""

    def __init__(self, me: VoterKey, disk: Stored) -> None:
        self.me = me
        self.disk = disk
        self.core: RaftCore | None = None
        self.queue: deque[Persist | Drop] = deque()
        self.snapshot_writes: deque[SnapshotChunk] = deque()
        self.snapshot_reads: deque[SnapshotPiece] = deque()
        self.partial = bytearray()
        self.partial_id: SnapshotId | None = None
        self.applied = Offset(0)
        self.state = 0

    @property
    def is_busy(self) -> bool:
        return bool(self.queue or self.snapshot_writes or self.snapshot_reads)


class Cluster:
    def __init__(
        self,
        voters: int | Iterable[int] = 3,
        *,
        others: Iterable[int] = (),
        config: RaftConfig | None = None,
        seed: int = 1,
        disks: dict[int, Stored] | None = None,
    ) -> None:
        """`others` are nodes that belong to no membership yet; `disks` replaces the empty disks of some nodes."""
        ids = list(range(1, voters + 1)) if isinstance(voters, int) else list(voters)
        self.config = config or RaftConfig()
        self.random = random.Random(seed)
        self.now_ms = 0
        self.check = Checker()
        self.trace = Trace()
        self.nodes: dict[int, Node] = {}
        self.network: list[Envelope] = []
        self.cuts: set[tuple[int, int]] = set()
        self.held: set[tuple[int, int]] = set()
        self.slow_disks: set[int] = set()
        self.frozen: set[int] = set()
        self.broken_pieces: set[int] = set()
        """Nodes that receive the pieces of a snapshot with a bit flipped."""
        self.tokens = 0
        self.accepted: dict[int, tuple[Offset, Epoch]] = {}
        self.rejected: dict[int, Rejection] = {}
        self.reads: dict[int, Offset] = {}
        for node in ids:
            self.add_node(node, (disks or {}).get(node) or Stored(membership_of(*ids)))
        for node in others:
            self.add_node(node, (disks or {}).get(node) or Stored(Membership()))

    # Nodes.

    def add_node(self, node: int, disk: Stored, life: int = 0) -> None:
        self.nodes[node] = Node(key(node, life), disk)
        self.start(node)

    def start(self, node: int) -> None:
        at = self.nodes[node]
        assert at.core is None, "it runs already"
        boot = at.disk.boot()
        at.core = RaftCore(at.me, boot, self.config, random.Random(self.random.getrandbits(64)), self.now_ms)
        at.state, at.applied = at.disk.snapshot.state, at.disk.snapshot.id.offset
        self.trace.add(f"{node} starts: epoch {boot.hard_state.epoch}, log {boot.start}..{at.core.log.end}")
        self._pump(node)

    def crash(self, node: int, *, torn: int | None = None) -> None:
        """What is not durable is gone; of the first write under way, `torn` entries may have come through."""
        at = self.nodes[node]
        assert at.core is not None, "it is down already"
        if torn is not None:
            writes = [item for item in at.queue if isinstance(item, Persist)]
            if writes:
                at.disk.write_log(writes[0], torn)
        at.core = None
        at.queue.clear()
        at.snapshot_writes.clear()
        at.snapshot_reads.clear()
        at.partial, at.partial_id = bytearray(), None
        self.trace.add(f"{node} crashes")

    def restart(self, node: int) -> None:
        self.crash(node)
        self.start(node)

    def core(self, node: int) -> RaftCore:
        core = self.nodes[node].core
        assert core is not None, f"{node} is down"
        return core

    def cores(self) -> dict[int, RaftCore]:
        return {node: at.core for node, at in self.nodes.items() if at.core is not None}

    @property
    def leader(self) -> int | None:
        """The leader of the newest epoch, if it leads."""
        leader_state = [core for core in self.cores().values() if core.role is Role.LEADER]
        return max(leader_state, key=lambda core: core.epoch).me.node if leader_state else None

    # Steps.

    def step(self, node: int, event: Message | Event) -> None:
        core = self.core(node)
        core.step(event, self.now_ms)
        self.check.after_step(core)
        self._pump(node)

    def _pump(self, node: int) -> None:
        """Carry out effects until there are none; a disk that is not slow finishes at once."""
        at = self.nodes[node]
        while at.core is not None:
            core = at.core
            self._carry_out(at, core, core.effects(self.now_ms))
            self.check.after_step(core)
            if node in self.slow_disks or not at.is_busy:
                return
            while at.is_busy and at.core is core:
                self._finish_one(node)

    def _carry_out(self, at: Node, core: RaftCore, out: Effects) -> None:
        node = at.me.node
        self.trace.effects(node, out)
        if out.persist is not None:
            at.queue.append(out.persist)
        at.snapshot_writes.extend(out.snapshot_writes)
        for to, message in out.messages:
            self.check.on_send(core, at.disk, to, message)
            self.network.append(Envelope(node, to, message))
        if out.load_snapshot is not None:
            loaded = at.disk.snapshots[out.load_snapshot.offset]
            at.state, at.applied = loaded.state, loaded.id.offset
            assert self.check.states[at.applied] == at.state, "a snapshot holds what was committed"
        if out.drop_before is not None:
            at.queue.append(Drop(out.drop_before))
        if out.committed:
            assert out.committed_from == at.applied, "what is committed is handed out without holes"
            self.check.on_committed(out.committed_from, out.committed, core.epoch)
            for entry in out.committed:
                at.state = next_state(at.state, entry)
            at.applied = Offset(at.applied + len(out.committed))
        if out.role is not None and out.role.role is Role.LEADER:
            self.check.on_leader(core)
        for token, offset, epoch in out.accepted:
            self.accepted[token] = (offset, epoch)
        self.rejected.update(out.rejected)
        for token, offset in out.reads:
            self.check.on_read_answered(token, offset)
            self.reads[token] = offset
        at.snapshot_reads.extend(out.snapshot_reads)

    # Disks.

    def persist(self, node: int, count: int | None = None) -> None:
        """Finish what the slow disk of a node has under way: the first `count` pieces of work, or all of it."""
        at = self.nodes[node]
        while at.is_busy and count != 0:
            self._finish_one(node)
            self._pump(node)
            count = None if count is None else count - 1

    def _finish_one(self, node: int) -> None:
        at = self.nodes[node]
        event: Event | None = None
        if at.queue:
            work = at.queue.popleft()
            if isinstance(work, Drop):
                at.disk.drop_before(work.start)
            else:
                at.disk.write(work)
                self.trace.add(f"{node} synced #{work.number}: log ends at {at.disk.end}")
                event = Persisted(work.number)
        elif at.snapshot_writes:
            event = self._write_piece(at, at.snapshot_writes.popleft())
        else:
            event = self._read_piece(at, at.snapshot_reads.popleft())
        if event is not None and at.core is not None:
            at.core.step(event, self.now_ms)
            self.check.after_step(at.core)

    def _write_piece(self, at: Node, chunk: SnapshotChunk) -> Event:
        if at.partial_id != chunk.snapshot or chunk.position == 0:
            at.partial, at.partial_id = bytearray(), chunk.snapshot
        assert len(at.partial) >= chunk.position, "pieces arrive without holes"
        piece = chunk.data
        if at.me.node in self.broken_pieces and piece:
            piece = bytes([piece[0] ^ 1]) + piece[1:]
        at.partial[chunk.position :] = piece
        if len(at.partial) < chunk.total_bytes:
            return SnapshotWritten(chunk.snapshot, len(at.partial))
        snapshot = StoredSnapshot.decode(bytes(at.partial))
        at.partial, at.partial_id = bytearray(), None
        if snapshot is None or snapshot.id != chunk.snapshot:
            return SnapshotFailed(chunk.snapshot)
        at.disk.install(snapshot)
        return SnapshotInstalled(snapshot.id, snapshot.membership)

    def _read_piece(self, at: Node, piece: SnapshotPiece) -> Event:
        if piece.snapshot != at.disk.snapshot.id:
            return SnapshotRead(piece.peer, piece.snapshot, piece.position, b"", -1)
        raw = at.disk.snapshot.encode()
        found = raw[piece.position : piece.position + TRANSFER_BYTES]
        return SnapshotRead(piece.peer, piece.snapshot, piece.position, found, len(raw))

    def take_snapshot(self, node: int, offset: int | None = None) -> SnapshotId:
        """The state machine's owner stores a snapshot of what is applied; entries behind it may go."""
        at, core = self.nodes[node], self.core(node)
        end = at.applied if offset is None else Offset(offset)
        epoch = core.log.epoch_before(end)
        assert epoch is not None, "a snapshot is taken of what is in the log"
        taken = StoredSnapshot(SnapshotId(end, epoch), core.log.membership_at(end), self.check.states[end])
        at.disk.install(taken)
        self.step(node, SnapshotTaken(taken.id))
        return taken.id

    # Network.

    def cut(self, *pair: int, one_way: bool = False) -> None:
        """No messages between two nodes; with one node, between it and all others."""
        others = pair[1:] or tuple(node for node in self.nodes if node != pair[0])
        for other in others:
            self.cuts.add((pair[0], other))
            if not one_way:
                self.cuts.add((other, pair[0]))

    def heal(self) -> None:
        self.cuts.clear()

    def take(self, where: Where) -> list[Envelope]:
        """Remove matching messages from the network and hand them over: to drop, or to deliver later."""
        taken = [envelope for envelope in self.network if where(envelope)]
        self.network = [envelope for envelope in self.network if not where(envelope)]
        return taken

    def deliver(self, envelope: Envelope) -> None:
        """Deliver one message, in the network or taken from it."""
        if envelope in self.network:
            self.network.remove(envelope)
        if (envelope.sender, envelope.to) in self.cuts or envelope.to not in self.cores():
            return
        self.trace.delivery(envelope.sender, envelope.to, envelope.message)
        self.step(envelope.to, envelope.message)

    def deliver_all(self, where: Where | None = None, *, most: int = 100_000) -> int:
        """Deliver in order until nothing (that matches) is left; returns how many."""
        count = 0
        while True:
            ready = next(
                (e for e in self.network if (e.sender, e.to) not in self.held and (where is None or where(e))), None
            )
            if ready is None:
                return count
            self.deliver(ready)
            count += 1
            assert count < most, "the cores never fall silent"

    # Time.

    def tick(self, node: int) -> None:
        self.step(node, Tick())

    def wait(self, ms: int) -> None:
        """Time passes, and nobody notices yet."""
        self.now_ms += ms

    def run(self, ms: int, until: Callable[[], bool] | None = None) -> bool:
        """Time passes, ticks come when they are due, messages arrive at once; True as soon as `until` holds."""
        end = self.now_ms + ms
        while True:
            self.deliver_all()
            if until is not None and until():
                return True
            due = min((c.deadline_ms for n, c in self.cores().items() if n not in self.frozen), default=end + 1)
            if due > end:
                self.now_ms = end
                return until is None
            self.now_ms = max(self.now_ms, due)
            for node, core in self.cores().items():
                if node not in self.frozen and core.deadline_ms <= self.now_ms:
                    self.tick(node)
                    assert core.deadline_ms > self.now_ms, f"{node} asks for a tick again and again"

    def run_until(self, condition: Callable[[], bool], ms: int = 10_000) -> None:
        assert self.run(ms, condition), f"did not happen within {ms} ms"

    # What tests do again and again.

    def elect(self, node: int) -> None:
        """Let `node` be the first to lose patience, and everything be delivered."""
        self.wait(self.config.election_timeout_max_ms)
        self.now_ms = max(self.now_ms, self.core(node).deadline_ms)
        self.tick(node)
        self.deliver_all()
        assert self.leader == node, f"{node} does not lead, {self.leader} does"

    def token(self) -> int:
        self.tokens += 1
        return self.tokens

    def propose(self, node: int, payload: bytes = b"x") -> int:
        token = self.token()
        self.step(node, Propose(token, payload))
        return token

    def read(self, node: int) -> int:
        token = self.token()
        self.check.on_read_asked(token)
        self.step(node, ReadIndex(token))
        return token

    def change(self, node: int, *, add: Member | None = None, remove: int | None = None) -> int:
        token = self.token()
        self.step(node, ChangeMembership(token, add, None if remove is None else NodeId(remove)))
        return token

    def transfer(self, node: int, target: int | None = None) -> None:
        self.step(node, Transfer(None if target is None else NodeId(target)))

    def disconnect(self, one: int, other: int) -> None:
        """The stream between two nodes breaks, and both notice; what was in it is lost."""
        pair = {one, other}
        self.take(lambda e: {e.sender, e.to} == pair)
        for node, peer in ((one, other), (other, one)):
            if node in self.cores():
                self.step(node, Disconnected(NodeId(peer)))

    def log_of(self, node: int) -> list[Entry]:
        return list(self.core(node).log.entries)

    def is_committed(self, token: int) -> bool:
        """Whether an accepted proposal has committed as what it was."""
        offset, epoch = self.accepted[token]
        return offset < len(self.check.committed) and self.check.committed[offset].epoch == epoch

    def assert_all_equal(self) -> None:
        """Every live node holds the same log end, commit and state."""
        ends = {node: (core.log.end, core.commit, self.nodes[node].state) for node, core in self.cores().items()}
        assert len(set(ends.values())) == 1, f"nodes differ: {ends}"
        self.check.log_matching(self.cores().values())
