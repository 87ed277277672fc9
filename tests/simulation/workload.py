"""Clients that append to the list and read it, over the network, and the check that their answers are linearizable.

The log is its own witness: `RaftChecker.history` is one order of all writes. What the clients saw is linearizable if
that order fits what they saw, and that is cheap to check as it happens. Every write that was acknowledged has a place
(its offset), every read has a place (how many entries its answer covers), and

- a place is never before the place of anything that was answered before the operation began (`floor`);
- at its place stands what was written, and the read's state is the state after just those entries.

A write that was refused never happened; one whose answer was lost may have, once. Each attempt has its own value.
"""

import asyncio
from collections.abc import Callable
from random import Random
from struct import Struct

from simulation.checkers import RaftChecker
from simulation.cluster import Context
from tidelog.model.errors import ErrorCode, RemoteError, TidelogError, TransportError, UnreachableError
from tidelog.model.ids import NodeId, Offset
from tidelog.raft.messages import EntryKind

PROPOSE = "sim.propose"
READ = "sim.read"
CALL_TIMEOUT_MS = 1500
RETRY_MIN_S = 0.01
RETRY_MAX_S = 0.15
_STATE = Struct(">QI")


def serve_clients(context: Context) -> None:
    """A Raft node answers clients; `context.app` is the node."""

    async def propose(_sender: NodeId, data: bytes) -> bytes:
        offset: Offset = await context.app.propose(data)
        return offset.to_bytes(8, "big")

    async def read(_sender: NodeId, _data: bytes) -> bytes:
        await context.app.read()
        machine = context.app.machine
        return _STATE.pack(machine.offset, machine.chain)

    context.transport.serve(PROPOSE, propose)
    context.transport.serve(READ, read)


class ClientChecker:
    def __init__(self, raft: RaftChecker, fail_run: Callable[[str, str], None]) -> None:
        self._raft = raft
        self._fail = fail_run
        self.floor = 0
        self.acknowledged: dict[Offset, bytes] = {}
        self.refused: dict[bytes, str] = {}
        self.reads = 0
        self.unknown = 0

    def wrote(self, client: str, data: bytes, offset: Offset, floor: int) -> None:
        history = self._raft.history
        if offset < floor:
            self._fail(client, f"its write stands at {offset}, before {floor}, which was answered before it began")
        if offset >= len(history) or history[offset].data != data:
            self._fail(client, f"its write {data!r} is acknowledged at {offset}, where it is not committed")
        self.acknowledged[offset] = data
        self.floor = max(self.floor, offset + 1)

    def read(self, client: str, offset: int, chain: int, floor: int) -> None:
        if offset < floor:
            self._fail(client, f"reads a state of {offset} entries, when {floor} were answered before it began")
        elif offset > len(self._raft.history):
            self._fail(client, f"reads a state of {offset} entries, of which not all are committed")
        elif self._raft.chains[offset] != chain:
            self._fail(client, f"reads another state than that after {offset} entries")
        self.reads += 1
        self.floor = max(self.floor, offset)

    def check_end(self) -> None:
        """Nothing acknowledged is lost, nothing refused is there, nothing is there twice."""
        history = self._raft.history
        for offset, data in self.acknowledged.items():
            if history[offset].data != data:
                self._fail("clients", f"{data!r} was acknowledged at {offset}, where now {history[offset]} stands")
        seen: dict[bytes, int] = {}
        for place, entry in enumerate(history):
            if entry.kind == EntryKind.DATA:
                why = self.refused.get(entry.data)
                if why is not None:
                    self._fail("clients", f"{entry.data!r} was refused ({why}), but stands at {place}")
                if seen.setdefault(entry.data, place) != place:
                    self._fail("clients", f"{entry.data!r} stands at {seen[entry.data]} and again at {place}")


class Clients:
    """The program of the clients' machine: `count` of them, each with one operation at a time."""

    def __init__(
        self,
        checker: ClientChecker,
        nodes: list[NodeId],
        draw: Random,
        *,
        count: int,
        pause_s: float,
        reads: float,
        may_only_read: bool,
    ) -> None:
        self._checker = checker
        self._nodes = nodes
        self._random = draw
        self._count = count
        self._pause_s = pause_s
        self._reads = reads
        self._may_only_read = may_only_read
        self._sequence = 0
        self.is_stopping = False
        self.must_do = 0
        """Operations that are still to be answered before the clients may stop."""

    async def run(self, context: Context) -> None:
        context.app = self
        async with asyncio.TaskGroup() as group:
            for number in range(self._count):
                group.create_task(self._client(context, f"{context.station.name}.{number}"))

    async def _client(self, context: Context, name: str) -> None:
        target = self._random.choice(self._nodes)
        # Who only reads is never stuck in a write that cannot commit: it finds a leader that does not lead any more.
        reads = 1.0 if self._may_only_read and self._random.random() < 0.6 else self._reads
        while True:
            if self.is_stopping and self.must_do <= 0:
                await asyncio.sleep(1.0)
                continue
            if self._random.random() < reads:
                target, done = await self._read(context, name, target)
            else:
                target, done = await self._write(context, name, target)
            if done:
                self.must_do -= 1
                await asyncio.sleep(self._random.expovariate(1 / self._pause_s))
            else:
                await asyncio.sleep(self._random.uniform(RETRY_MIN_S, RETRY_MAX_S))

    async def _write(self, context: Context, name: str, target: NodeId) -> tuple[NodeId, bool]:
        self._sequence += 1
        data = f"{name}.{self._sequence}".encode()
        if self._random.random() < 0.05:
            data += b"." * self._random.randrange(400)
        checker = self._checker
        floor = checker.floor
        try:
            answer = await context.transport.call(target, PROPOSE, data, timeout_ms=CALL_TIMEOUT_MS)
        except UnreachableError as error:
            checker.refused[data] = str(error)
            return self._another(), False
        except TransportError:
            checker.unknown += 1
            return self._another(), False
        except RemoteError as error:
            if error.code in (ErrorCode.NOT_CONTROLLER, ErrorCode.THROTTLING_QUOTA_EXCEEDED):
                checker.refused[data] = str(error)
            else:
                checker.unknown += 1
            return self._after(error), False
        checker.wrote(name, data, Offset(int.from_bytes(answer, "big")), floor)
        return target, True

    async def _read(self, context: Context, name: str, target: NodeId) -> tuple[NodeId, bool]:
        floor = self._checker.floor
        try:
            answer = await context.transport.call(target, READ, b"?", timeout_ms=CALL_TIMEOUT_MS)
        except TransportError:
            return self._another(), False
        except RemoteError as error:
            return self._after(error), False
        offset, chain = _STATE.unpack(answer)
        self._checker.read(name, offset, chain, floor)
        return target, True

    def _after(self, error: TidelogError) -> NodeId:
        leader = getattr(error, "facts", {}).get("leader")
        # A leader that a node names may be long gone: do not always follow.
        if isinstance(leader, int) and self._random.random() < 0.9:
            return NodeId(leader)
        return self._another()

    def _another(self) -> NodeId:
        return self._random.choice(self._nodes)
