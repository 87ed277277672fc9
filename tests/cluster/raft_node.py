"""One member of a Raft group as a process of its own: real disk, LMDB, gRPC. The cluster tests start three of them.

    python raft_node.py NODE DIRECTORY HOST:PORT

`format_directories` prepares the directories first, as an operator would: each voter gets a random directory id, which
only its own store and the first membership hold. What is proposed is kept in a list; clients call `propose` (answers
the offset), `values` (what is applied from an index on) and `describe`. SIGTERM stops it in order: leadership is handed
over first.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from random import SystemRandom
from typing import Any

import msgpack
import uvloop

from tidelog.model.ids import NodeId, Offset
from tidelog.raft.driver import DriverConfig, RaftDriver
from tidelog.raft.effects import RoleChange
from tidelog.raft.membership import DIRECTORY_ID_BYTES, Member, Membership
from tidelog.raft.messages import Entry, EntryKind, SnapshotId
from tidelog.raft.storage import RaftStorage
from tidelog.rpc.grpc.transport import GrpcTransport
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


def make_storage(node: NodeId, disk: RealDisk, store: LmdbStore) -> RaftStorage:
    return RaftStorage(disk=disk, store=store, work=InlineWork(), clock=SystemClock(), cluster_id=CLUSTER_ID, node=node)


async def format_directories(nodes: Mapping[NodeId, tuple[Path, str]]) -> None:
    """New directories for these nodes, (directory, address) each, as the first voters of a group."""
    voters = {
        node: Member(node, secrets.token_bytes(DIRECTORY_ID_BYTES), (("CONTROLLER", address),))
        for node, (_, address) in sorted(nodes.items())
    }
    for node, (path, _) in nodes.items():
        disk, store = RealDisk(path, create=True), LmdbStore(path / "state")
        storage = make_storage(node, disk, store)
        await storage.format(directory=voters[node].directory, membership=Membership(tuple(voters.values())))
        await storage.close()
        store.close()
        disk.close()


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


async def run(node: NodeId, path: Path, address: str) -> int:
    disk, store = RealDisk(path), LmdbStore(path / "state")
    storage = make_storage(node, disk, store)
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
        await driver.step_down(timeout_ms=2_000)
    await driver.close()
    await transport.close()
    await storage.close()
    store.close()
    disk.close()
    return 0 if driver.failed is None else 1


def main(arguments: list[str], run: Callable[[NodeId, Path, str], Coroutine[Any, Any, int]] = run) -> int:
    node, path, address = arguments
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s.%(msecs)03d node={node} %(levelname)s %(message)s"
    )
    sys.setswitchinterval(0.0005)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(NodeId(int(node)), Path(path), address))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
