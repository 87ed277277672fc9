"""Whole Raft members, with storage and streams, on the simulated machine room. For the tests of the driver."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

from tidelog.model.errors import TidelogError
from tidelog.model.ids import NodeId, Offset
from tidelog.raft.config import RaftConfig
from tidelog.raft.directory_identity import FORMAT_KEY
from tidelog.raft.driver import DriverConfig, RaftDriver
from tidelog.raft.effects import Role, RoleChange
from tidelog.raft.membership import Member, Membership
from tidelog.raft.messages import Entry, EntryKind, SnapshotId
from tidelog.raft.state_machine import SnapshotJob
from tidelog.raft.status import RaftStatus
from tidelog.raft.storage import RaftStorage
from tidelog.world.simulated import SimNode, SimWorld
from tidelog.world.simulated.network import SimNetwork, SimTransport

CLUSTER = "cluster"
A, B, C, D = NodeId(1), NodeId(2), NodeId(3), NodeId(4)
SMALL_SNAPSHOTS = DriverConfig(snapshot_bytes=2_000, raft=RaftConfig(kept_behind_snapshot_bytes=0))


def directory(node: NodeId) -> bytes:
    return bytes([node]) * 16


def member(node: NodeId) -> Member:
    return Member(node, directory(node), (("CONTROLLER", f"host{node}:9192"),))


def encode_values(values: tuple[bytes, ...]) -> bytes:
    return b"\n".join(values)


class Values:
    """A list of what was proposed. It checks what it is promised: in order, once, no gaps."""

    def __init__(self) -> None:
        self.values: list[bytes] = []
        self.next = 0
        self.loaded: list[SnapshotId] = []
        self.taken: list[int] = []
        """The offsets at which snapshots were taken."""
        self.roles: list[RoleChange] = []

    def apply(self, first: Offset, entries: Sequence[Entry]) -> None:
        assert first == self.next, f"entries from {first}, expected {self.next}"
        self.next = first + len(entries)
        self.values += [entry.data for entry in entries if entry.kind is EntryKind.DATA]

    def load_snapshot(self, snapshot: SnapshotId, data: bytes) -> None:
        assert snapshot.offset > self.next, "a snapshot brings news"
        self.loaded.append(snapshot)
        self.values = data.split(b"\n") if data else []
        self.next = snapshot.offset

    def take_snapshot(self) -> SnapshotJob:
        self.taken.append(self.next)
        return SnapshotJob(encode_values, (tuple(self.values),))

    def role_changed(self, change: RoleChange) -> None:
        self.roles.append(change)


class Running:
    """One running member: its process, driver and state."""

    def __init__(self, node: SimNode, driver: RaftDriver, values: Values, transport: SimTransport) -> None:
        self.node = node
        self.driver = driver
        self.values = values
        self.transport = transport
        self.failure: BaseException | None = None


class Group:
    """Members by node id; `voters` are the first ones."""

    def __init__(self, seed: int, voters: Sequence[NodeId] = (A, B, C), config: DriverConfig | None = None) -> None:
        self.world = SimWorld(seed)
        self.network = SimNetwork(self.world)
        self.config = config or DriverConfig()
        self.founders = Membership(tuple(member(node) for node in voters))
        self.members: dict[NodeId, Running] = {}

    @contextmanager
    def running(self) -> Iterator[Group]:
        with self.world:
            yield self

    def start(self, *nodes: NodeId, config: DriverConfig | None = None) -> None:
        for node in nodes:
            process = self.world.machine(f"m{node}").boot()
            self.world.run(process, partial(self._boot, node, config or self.config))

    async def _boot(self, node: NodeId, config: DriverConfig, process: SimNode) -> None:
        transport = self.network.join(process, node)
        storage = RaftStorage(
            disk=process.disk(),
            store=process.store(),
            work=process.work,
            clock=process.clock,
            cluster_id=CLUSTER,
            node=node,
        )
        if process.store().get(FORMAT_KEY) is None:
            founders = self.founders if self.founders.voter(node) else Membership()
            await storage.format(directory=directory(node), membership=founders)
        values = Values()
        boot = await storage.open()

        def failed(error: BaseException) -> None:
            found.failure = error

        driver = RaftDriver(
            storage.me,
            storage,
            boot,
            transport,
            values,
            config,
            Random(process.random.random()),
            work=process.work,
            on_failure=failed,
        )
        found = self.members[node] = Running(process, driver, values, transport)
        await transport.start()
        await driver.start()

    def kill(self, node: NodeId) -> None:
        self.members.pop(node)
        self.world.machine(f"m{node}").kill()

    def on(self, node: NodeId, job: Callable[[RaftDriver], Coroutine[Any, Any, Any]], *, timeout: float = 60) -> Any:
        """Run this with the driver of a member, on its process."""
        found = self.members[node]
        return self.world.run(found.node, lambda _: job(found.driver), timeout=timeout)

    def leader(self, *, among: Sequence[NodeId] | None = None, timeout: float = 10) -> NodeId:
        """The leader of the newest epoch that a member has; waits for it."""
        leaders: list[NodeId] = []

        def found() -> bool:
            leaders[:] = [
                node
                for node, one in sorted(self.members.items(), key=lambda row: -row[1].driver.core.epoch)
                if one.driver.core.role is Role.LEADER and (among is None or node in among)
            ]
            return bool(leaders)

        self.world.run_until(found, timeout=timeout)
        return leaders[0]

    def propose(self, node: NodeId, *values: bytes) -> list[Offset]:
        async def job(driver: RaftDriver) -> list[Offset]:
            return [await driver.propose(value) for value in values]

        found: list[Offset] = self.on(node, job)
        return found

    def until_equal(
        self, values: Sequence[bytes], *, among: Sequence[NodeId] | None = None, timeout: float = 20
    ) -> None:
        wanted = list(values)
        nodes = among or list(self.members)
        self.world.run_until(lambda: all(self.members[n].values.values == wanted for n in nodes), timeout=timeout)


def error_of(driver_job: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, TidelogError | None]:
    """The error of the catalogue that this ends with."""

    async def job() -> TidelogError | None:
        try:
            await driver_job
        except TidelogError as error:
            return error
        return None

    return job()


async def describe(driver: RaftDriver) -> RaftStatus:
    return driver.describe()


async def explain_missing_leader(driver: RaftDriver) -> str:
    return driver.explain_missing_leader()
