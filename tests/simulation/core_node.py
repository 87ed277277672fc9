"""A Raft node as lean as it can be: the core, a shell without tasks, and a modelled disk. Fast, for many seeds.

What it keeps of the real thing: messages pass the network as bytes, on one stream to each peer; persists take time, run
one after the other and merge; a crash leaves what was under way done, undone, or half done. What it leaves out, the
driver, the storage and the log, is simulated by `driver_node` as it is.
"""

import asyncio
import zlib
from collections import deque
from collections.abc import Callable

import msgpack

from simulation.checkers import RaftChecker
from simulation.cluster import Context
from simulation.machine import ChainMachine
from simulation.model_disk import ModelDisk
from tidelog.model.errors import (
    MembershipChangeError,
    NotLeaderError,
    OverloadedError,
    StorageError,
    TidelogError,
    TransportError,
    UnknownOutcomeError,
)
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft import wire
from tidelog.raft.config import RaftConfig
from tidelog.raft.core import RaftCore
from tidelog.raft.effects import Effects, Persist, Rejection, Role, SnapshotPiece
from tidelog.raft.leader import FAR_FUTURE_MS
from tidelog.raft.membership import Member, Membership, VoterKey
from tidelog.raft.messages import (
    ChangeMembership,
    Disconnected,
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
from tidelog.world.simulated.loop import SimFuture, SimLoop
from tidelog.world.simulated.network import SimTransport
from tidelog.world.simulated.streams import SimStream
from tidelog.world.transport import Stream

SERVICE = "raft"
OUTBOX_MAX = 256
RECONNECT_MIN_S = 0.02
RECONNECT_MAX_S = 0.2


class Outgoing:
    """What goes to one peer: a stream, or a wait for one."""

    __slots__ = ("is_connecting", "outbox", "stream")

    def __init__(self) -> None:
        self.stream: SimStream | None = None
        self.is_connecting = False
        self.outbox: deque[bytes] = deque()


class CoreNode:
    """The shell. `propose`, `read`, `change_membership` and `transfer` are what clients and the nemesis use."""

    def __init__(
        self, context: Context, disk: ModelDisk, config: RaftConfig, checker: RaftChecker, snapshot_every: int
    ) -> None:
        self.directory = disk.directory
        self.machine = ChainMachine(context.station.name, checker)
        self._context = context
        self._loop: SimLoop = context.node.loop
        self._transport: SimTransport = context.transport
        self._random = context.node.random
        self._disk = disk
        self._checker = checker
        self._snapshot_every = snapshot_every
        boot, state = disk.boot()
        if boot.snapshot.offset:
            self.machine.load_snapshot(boot.snapshot, state)
        self.core = RaftCore(VoterKey(context.node_id, disk.directory), boot, config, self._random, self._now_ms())
        self.failure: SimFuture = self._loop.create_future()
        self._token = 0
        self._waiting: dict[int, SimFuture] = {}
        self._proposed: dict[Offset, tuple[Epoch, SimFuture]] = {}
        self._reads: list[tuple[Offset, SimFuture]] = []
        self._persists: list[Persist] = []
        self._number = self._done_number = 0
        """Of the last persist that the core asked for, and of the last that is done."""
        self._drop: tuple[int, Offset, Epoch, Membership] | None = None
        """What is to be forgotten once the persist with this number is done: it may be the one that makes it so."""
        self._is_persisting = False
        self._is_pump_due = False
        self._is_snapshotting = False
        self._timer = self._loop.call_later(0.0, self._tick)
        self._due_ms = 0
        self._peers: dict[NodeId, Outgoing] = {}
        self._incoming = bytearray()
        self._incoming_of: SnapshotId | None = None
        checker.born(context.node_id, self.core)
        self._transport.serve_stream(SERVICE, self._serve)

    def _now_ms(self) -> int:
        return int(self._loop.time() * 1000)

    # -- for clients

    async def propose(self, data: bytes) -> Offset:
        offset: Offset = await self._ask(lambda token: Propose(token, data))
        return offset

    async def read(self) -> None:
        """Returns when the state machine has all that was committed when it was called."""
        offset: Offset = await self._ask(ReadIndex)
        if self.machine.offset < offset:
            applied = self._loop.create_future()
            self._reads.append((offset, applied))
            await applied

    async def change_membership(self, *, add: Member | None = None, remove: NodeId | None = None) -> Offset:
        offset: Offset = await self._ask(lambda token: ChangeMembership(token, add, remove))
        return offset

    def transfer(self, target: NodeId | None) -> None:
        self._step(Transfer(target))

    async def _ask(self, make: Callable[[int], Event]) -> Offset:
        self._token += 1
        answer = self._waiting[self._token] = self._loop.create_future()
        self._step(make(self._token))
        offset: Offset = await answer
        return offset

    # -- stepping

    def _step(self, event: Message | Event) -> None:
        self.core.step(event, self._now_ms())
        if not self._is_pump_due:
            self._is_pump_due = True
            self._loop.call_soon(self._pump)

    def _tick(self) -> None:
        self._due_ms = FAR_FUTURE_MS
        now_ms = self._now_ms()
        if now_ms >= self.core.deadline_ms:
            self._step(Tick())
        else:
            self._arm(now_ms)

    def _pump(self) -> None:
        self._is_pump_due = False
        now_ms = self._now_ms()
        effects = self.core.effects(now_ms)
        self._checker.look(self.core.me.node)
        if effects.persist is not None:
            self._number = effects.persist.number
            self._persists.append(effects.persist)
            if not self._is_persisting:
                self._begin_persist()
        for chunk in effects.snapshot_writes:
            self._loop.call_later(self._disk.delay_s(), self._write_chunk, chunk)
        for to, message in effects.messages:
            self._send(to, message)
        if effects.load_snapshot is not None:
            found = self._disk.find_snapshot(effects.load_snapshot)
            assert found is not None, "an installed snapshot is there"
            self.machine.load_snapshot(effects.load_snapshot, found[2])
        if effects.drop_before is not None:
            log = self.core.log
            self._drop = (self._number, log.start, log.start_epoch, log.memberships[0][1])
            self._drop_what_is_due()
        self._answer(effects)
        if effects.committed:
            self._apply(effects)
        for piece in effects.snapshot_reads:
            self._loop.call_later(self._disk.delay_s(), self._read_piece, piece)
        self._arm(now_ms)

    def _arm(self, now_ms: int) -> None:
        """A timer that fires too early costs a look at the deadline: it is only ever moved forward."""
        due_ms = max(self.core.deadline_ms, now_ms + 1)
        if due_ms < self._due_ms:
            self._timer.cancel()
            self._due_ms = due_ms
            # Half a millisecond past it: truncation to whole ones must not make it early.
            self._timer = self._loop.call_at((due_ms + 0.5) / 1000, self._tick)

    def _fail(self, error: TidelogError) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)

    # -- disk

    def _begin_persist(self) -> None:
        persists, self._persists = self._persists, []
        self._is_persisting = True
        try:
            self._disk.begin(persists)
        except StorageError as error:
            self._fail(error)
            return
        number = persists[-1].number
        world_loop = self._context.station.cluster.world.loop

        def complete() -> None:
            if not self._loop.is_dead:
                self._loop.call_soon(self._persisted, number)

        if self._disk.is_crash_point(persists):
            world_loop.call_later(self._disk.delay_s() / 2, self._lose_power)
        # The device works on while the process is paused; it stops with the process's death (see `crash`).
        world_loop.call_later(self._disk.delay_s(), lambda: self._disk.when_it_answers(complete))

    def _lose_power(self) -> None:
        if not self._loop.is_dead:
            assert self._disk.on_crash_point is not None
            self._disk.on_crash_point()

    def _persisted(self, number: int) -> None:
        if self.failure.done():
            return
        try:
            self._disk.finish()
        except StorageError as error:
            self._fail(error)
            return
        self._is_persisting = False
        self._done_number = number
        self._drop_what_is_due()
        if self._persists:
            self._begin_persist()
        self._step(Persisted(number))

    def _drop_what_is_due(self) -> None:
        if self._drop is not None and self._drop[0] <= self._done_number:
            self._disk.drop_before(*self._drop[1:])
            self._drop = None

    # -- answers

    def _answer(self, effects: Effects) -> None:
        for token, offset, epoch in effects.accepted:
            self._proposed[offset] = (epoch, self._waiting.pop(token))
        for token, rejection in effects.rejected:
            _fail_future(self._waiting.pop(token), self._error_of(rejection))
        for token, offset in effects.reads:
            _set(self._waiting.pop(token), offset)
        if effects.role is not None and effects.role.role is not Role.LEADER and self._proposed:
            # An entry that this step also commits is answered by `_apply`; of the rest nobody knows.
            committed_end = effects.committed_from + len(effects.committed) if effects.committed else 0
            for offset in [offset for offset in self._proposed if offset >= committed_end]:
                _fail_future(self._proposed.pop(offset)[1], UnknownOutcomeError("leadership was lost"))

    def _error_of(self, rejection: Rejection) -> TidelogError:
        if rejection is Rejection.NOT_LEADER:
            return NotLeaderError(rejection.value, leader=self.core.leader)
        if rejection in (Rejection.OVERLOADED, Rejection.TRANSFERRING):
            return OverloadedError(rejection.value)
        return MembershipChangeError(rejection.value)

    def _apply(self, effects: Effects) -> None:
        first = effects.committed_from
        self.machine.apply(first, effects.committed)
        if self._proposed:
            for offset in [offset for offset in self._proposed if offset < self.machine.offset]:
                epoch, answer = self._proposed.pop(offset)
                if offset >= first and effects.committed[offset - first].epoch == epoch:
                    _set(answer, offset)
                else:
                    _fail_future(answer, UnknownOutcomeError("another entry took its place"))
        if self._reads:
            due = [read for read in self._reads if read[0] <= self.machine.offset]
            self._reads = [read for read in self._reads if read[0] > self.machine.offset]
            for _, answer in due:
                _set(answer, None)
        behind = self.machine.offset - self.core.log.snapshot.offset
        if behind >= self._snapshot_every and not self._is_snapshotting:
            self.take_snapshot()

    # -- snapshots

    def take_snapshot(self, *, again: bool = False) -> None:
        """With `again` even if there is nothing new: the last one is spoilt."""
        offset = self.machine.offset
        epoch = self.core.log.epoch_before(offset)
        if self._is_snapshotting or epoch is None or offset + again <= self.core.log.snapshot.offset:
            return
        self._is_snapshotting = True
        snapshot, membership = SnapshotId(offset, epoch), self.core.log.membership_at(offset)
        self._loop.call_later(
            self._disk.delay_s() * 4, self._snapshot_taken, snapshot, membership, self.machine.take_snapshot()
        )

    def _snapshot_taken(self, snapshot: SnapshotId, membership: Membership, data: bytes) -> None:
        self._is_snapshotting = False
        if snapshot.offset >= self.core.log.snapshot.offset:
            self._disk.keep_snapshot(snapshot, membership, data)
            self._step(SnapshotTaken(snapshot))

    def _read_piece(self, piece: SnapshotPiece) -> None:
        found = self._disk.find_snapshot(piece.snapshot)
        is_rotten = piece.snapshot in self._disk.rotten
        if found is not None and is_rotten and piece.position == 0:
            # The whole is checked before the first piece leaves: another one is taken instead.
            self._disk.set_aside.add(piece.snapshot)
            self.take_snapshot(again=True)
            found = None
        if found is None:
            self._step(SnapshotRead(piece.peer, piece.snapshot, piece.position, b"", -1))
            return
        body: bytes = msgpack.packb([found[1].encode(), found[2]])
        whole = zlib.crc32(body).to_bytes(4, "big") + body
        if is_rotten:
            whole = whole[:-1] + bytes([whole[-1] ^ 1])
        data = whole[piece.position : piece.position + self.piece_bytes]
        self._step(SnapshotRead(piece.peer, piece.snapshot, piece.position, data, len(whole)))

    piece_bytes = 256

    def _write_chunk(self, chunk: SnapshotChunk) -> None:
        if self._incoming_of != chunk.snapshot or chunk.position == 0:
            self._incoming_of, self._incoming = chunk.snapshot, bytearray()
        if chunk.position != len(self._incoming):
            self._step(SnapshotFailed(chunk.snapshot))
            return
        self._incoming += chunk.data
        if len(self._incoming) < chunk.total_bytes:
            self._step(SnapshotWritten(chunk.snapshot, len(self._incoming)))
            return
        crc, body = int.from_bytes(self._incoming[:4], "big"), bytes(self._incoming[4:])
        self._incoming_of = None
        if zlib.crc32(body) != crc:
            self._step(SnapshotFailed(chunk.snapshot))
            return
        encoded, data = msgpack.unpackb(body)
        membership = Membership.decode(encoded)
        self._disk.keep_snapshot(chunk.snapshot, membership, data)
        self._disk.reset_points[chunk.snapshot.offset] = (chunk.snapshot, membership)
        self._step(SnapshotInstalled(chunk.snapshot, membership))

    # -- peers

    def _send(self, to: NodeId, message: Message) -> None:
        self._checker.left(self.core.me.node, to, message)
        data = wire.encode(message)
        peer = self._peers.get(to)
        if peer is None:
            peer = self._peers[to] = Outgoing()
        if peer.stream is not None:
            try:
                sent = peer.stream.send_nowait(data)
            except TransportError:
                sent = False
            if not sent:
                peer.stream.close()
                peer.stream = None
                self._loop.call_soon(self._step, Disconnected(to))
            return
        if len(peer.outbox) < OUTBOX_MAX:
            peer.outbox.append(data)
        if not peer.is_connecting:
            peer.is_connecting = True
            self._loop.create_task(self._connect(to, peer))

    async def _connect(self, to: NodeId, peer: Outgoing) -> None:
        try:
            stream = await self._transport.open_stream(to, SERVICE)
        except TransportError:
            peer.outbox.clear()
            await asyncio.sleep(self._random.uniform(RECONNECT_MIN_S, RECONNECT_MAX_S))
            peer.is_connecting = False
            self._step(Disconnected(to))
            return
        peer.is_connecting = False
        peer.stream = stream
        stream.drain_to(lambda _: None, lambda: self._outgoing_ended(to, stream))
        outbox, peer.outbox = peer.outbox, deque()
        try:
            for data in outbox:
                stream.send_nowait(data)
        except TransportError:
            return  # broken already; `_outgoing_ended` is on its way

    def _outgoing_ended(self, to: NodeId, stream: SimStream) -> None:
        peer = self._peers[to]
        if peer.stream is stream:
            peer.stream = None
            self._step(Disconnected(to))

    def _received(self, data: bytes) -> None:
        self._step(wire.decode(data))

    async def _serve(self, stream: Stream) -> None:
        assert isinstance(stream, SimStream)
        ended = self._loop.create_future()
        stream.drain_to(self._received, lambda: _set(ended, None))
        await ended
        self._step(Disconnected(stream.peer))


def _set(answer: SimFuture, value: object) -> None:
    if not answer.done():
        answer.set_result(value)


def _fail_future(answer: SimFuture, error: TidelogError) -> None:
    if not answer.done():
        answer.set_exception(error)
