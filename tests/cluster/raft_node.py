"""One member of a Raft group as a process of its own: real disk, LMDB, gRPC. The cluster tests start three of them.

    python raft_node.py NODE DIRECTORY NODE@HOST:PORT,NODE@HOST:PORT,...

It formats an empty directory with all of them as the first voters. What is proposed is kept in a list; clients call
`propose` (answers the offset), `values` (what is applied from an index on) and `describe`. SIGTERM stops it in order:
leadership is handed over first.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from random import SystemRandom

import msgpack
import uvloop

from tidelog.model.ids import NodeId, Offset
from tidelog.raft.driver import DriverConfig, RaftDriver
from tidelog.raft.effects import RoleChange
from tidelog.raft.membership import Member, Membership
from tidelog.raft.messages import Entry, EntryKind, SnapshotId
from tidelog.raft.storage import FORMAT_KEY, RaftStorage
from tidelog.rpc.transport import GrpcTransport
from tidelog.world.real.clock import SystemClock
from tidelog.world.real.disk import RealDisk
from tidelog.world.real.store import LmdbStore
from tidelog.world.real.work import InlineWork

CLUSTER_ID = "cluster-of-the-tests"


class Values:
    """The state: every proposed value, with its offset."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, bytes]] = []

    def apply(self, first: Offset, entries: Sequence[Entry]) -> None:
        self.rows += [(first + i, entry.data) for i, entry in enumerate(entries) if entry.kind is EntryKind.DATA]

    def take_snapshot(self) -> bytes:
        return bytes(msgpack.packb(self.rows))

    def load_snapshot(self, snapshot: SnapshotId, data: bytes) -> None:
        self.rows = [(offset, value) for offset, value in msgpack.unpackb(data)]

    def role_changed(self, change: RoleChange) -> None:
        logging.getLogger("node").info("role=%s epoch=%d leader=%s", change.role.value, change.epoch, change.leader)


def directory_id(node: int) -> bytes:
    return hashlib.sha256(b"directory %d" % node).digest()[:16]


def first_voters(text: str) -> Membership:
    pairs = [part.split("@") for part in text.split(",")]
    return Membership(
        tuple(sorted(Member(NodeId(int(node)), directory_id(int(node)), (("CONTROLLER", at),)) for node, at in pairs))
    )


def serve(transport: GrpcTransport, driver: RaftDriver, values: Values) -> None:
    async def propose(_caller: NodeId, request: bytes) -> bytes:
        return b"%d" % await driver.propose(request)

    async def read(_caller: NodeId, request: bytes) -> bytes:
        return bytes(msgpack.packb(values.rows[int(request) :]))

    async def describe(_caller: NodeId, _request: bytes) -> bytes:
        found = driver.describe()
        connected = [member.node for member in found.members if member.is_connected]
        fields = {"epoch": found.epoch, "role": found.role.value, "leader": found.leader, "connected": connected}
        return bytes(msgpack.packb(fields))

    transport.serve("propose", propose)
    transport.serve("values", read)
    transport.serve("describe", describe)


async def run(node: NodeId, path: Path, voters: Membership) -> int:
    me = voters.voter(node)
    assert me is not None, "the node is one of the voters"
    address = me.endpoints[0][1]
    disk, store = RealDisk(path, create=True), LmdbStore(path / "state")
    storage = RaftStorage(
        disk=disk, store=store, work=InlineWork(), clock=SystemClock(), cluster_id=CLUSTER_ID, node=node
    )
    if store.get(FORMAT_KEY) is None:
        await storage.format(directory=directory_id(node), membership=voters)
    boot = await storage.open()
    transport = GrpcTransport(node, CLUSTER_ID, address)
    values = Values()
    stop = asyncio.Event()
    driver = RaftDriver(
        storage.me,
        storage,
        boot,
        transport,
        values,
        DriverConfig(address=address, snapshot_bytes=256 << 10, report_after_ms=1_000),
        SystemRandom(),
        work=InlineWork(),
        on_failure=lambda _: stop.set(),
    )
    serve(transport, driver, values)
    await transport.start()
    await driver.start()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    logging.getLogger("node").info("ready")
    await stop.wait()
    if driver.failed is None:
        await driver.hand_over(timeout_ms=2_000)
    await driver.close()
    await transport.close()
    await storage.close()
    store.close()
    return 0 if driver.failed is None else 1


def main(arguments: list[str]) -> int:
    node, path, voters = arguments
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s.%(msecs)03d node={node} %(levelname)s %(message)s"
    )
    sys.setswitchinterval(0.0005)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(NodeId(int(node)), Path(path), first_voters(voters)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
