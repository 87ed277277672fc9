"""A Raft node as in production: driver, storage and log, on the simulated disk, store and network."""

import errno
from collections.abc import Callable
from random import Random
from typing import Any

from simulation.checkers import RaftChecker
from simulation.cluster import Context, Program, Station
from simulation.machine import ChainMachine
from simulation.nemesis import STORE_REFUSALS, Undo
from simulation.raft_audit import RaftAudit
from simulation.raft_sim import RaftSimulation
from simulation.status_check import StatusCheck
from simulation.stored_promises import unstored_promise
from simulation.workload import serve_clients
from tidelog.log.config import FOREVER_MS, LogConfig
from tidelog.model.errors import UnformattedDirectoryError
from tidelog.model.ids import NodeId, Offset
from tidelog.raft.config import BootState
from tidelog.raft.core import RaftCore
from tidelog.raft.driver import DriverConfig, RaftDriver
from tidelog.raft.entries import STORED_BYTES_MAX
from tidelog.raft.membership import Member, Membership
from tidelog.raft.messages import Message
from tidelog.raft.storage import RaftStorage
from tidelog.world.simulated import Latency, Loss
from tidelog.world.simulated.disk import SimDevice
from tidelog.world.simulated.loop import SimFuture
from tidelog.world.simulated.store import SimStoreDevice

CLUSTER_ID = "simulated"
ENTRY_BYTES = 40
"""About what an entry of the workload takes: snapshots are taken by bytes."""


async def open_storage(context: Context, log_config: LogConfig) -> tuple[RaftStorage, BootState]:
    """The storage of this node, formatted if its disk is new."""
    storage = RaftStorage(
        disk=context.node.disk(),
        store=context.node.store(),
        work=context.node.work,
        clock=context.node.clock,
        cluster_id=CLUSTER_ID,
        node=context.node_id,
        log_config=log_config,
    )
    durable = context.station.durable
    try:
        boot = await storage.open()
    except UnformattedDirectoryError:
        await storage.format(directory=durable["directory"], membership=durable.get("founding", Membership()))
        boot = await storage.open()
    return storage, boot


class DriverNode:
    """What clients, checks and the nemesis see of a process; `failure` ends the program."""

    def __init__(self, driver: RaftDriver, machine: ChainMachine, failure: SimFuture) -> None:
        self.driver = driver
        self.machine = machine
        self.failure = failure
        self.directory = driver.me.directory

    @property
    def core(self) -> RaftCore:
        return self.driver.core

    async def propose(self, data: bytes) -> Offset:
        return await self.driver.propose(data)

    async def read(self) -> None:
        await self.driver.wait_applied(await self.driver.read_index())

    async def change_membership(self, *, add: Member | None = None, remove: NodeId | None = None) -> Offset:
        return await self.driver.change_membership(add=add, remove=remove)

    def transfer(self, target: NodeId | None) -> None:
        self.driver.transfer(target)

    def take_snapshot(self) -> None:
        if self.machine.offset > self.core.log.snapshot.offset:
            self.driver._take_snapshot()


class DriverStack:
    """Builds such nodes, and harms the devices under them."""

    def __init__(self) -> None:
        self._checker: RaftChecker | None = None
        self._latency = Latency(0.0002, 0.001)
        self._rotten: dict[NodeId, Context] = {}
        """In which life files of a node have rotted: the next one finds out."""
        self._harmed: set[NodeId] = set()
        """Nodes whose stored bits were changed: they may keep some of them, where nobody reads."""
        self._failed: set[NodeId] = set()
        """Nodes whose disks had an error: at a start they may trust less than they had synced."""

    def program(self, simulation: RaftSimulation) -> Program:
        self._checker = simulation.checker
        self._latency = simulation.shape.disk_latency
        shape = simulation.shape
        log_config = LogConfig(
            segment_bytes=shape.segment_bytes,
            segment_ms=FOREVER_MS,
            message_bytes_max=STORED_BYTES_MAX,
            retention_ms=-1,
            retention_bytes=-1,
            file_delete_delay_ms=0,
        )
        config = DriverConfig(raft=shape.raft, snapshot_bytes=shape.snapshot_every * ENTRY_BYTES)

        async def run(context: Context) -> None:
            storage, boot = await open_storage(context, log_config)
            for note in storage.notes:
                context.trace(note)
            failure = context.node.loop.create_future()
            machine = ChainMachine(context.station.name, simulation.checker)
            driver = RaftDriver(
                storage.me,
                storage,
                boot,
                context.transport,
                machine,
                config,
                context.node.random,
                work=context.node.work,
                on_failure=failure.set_exception,
            )
            audit = self._watch_messages(driver)
            await driver.start()
            context.app = DriverNode(driver, machine, failure)
            context.node.loop.watch(self._watch_node(context, driver, audit))
            serve_clients(context)
            await failure

        return run

    def _watch_node(self, context: Context, driver: RaftDriver, audit: RaftAudit) -> Callable[[], None]:
        """The checks of a process that has started, to be called after each of its events."""
        checker, node, harmed = self._checker, context.node_id, self._harmed
        assert checker is not None
        checker.born(node, driver.core)
        if node not in harmed and node not in self._failed:
            audit.began()
        status = StatusCheck(context.station.name, driver, context.node.loop.time, checker.fail)

        def look() -> None:
            checker.look(node)
            status.look()
            if node not in harmed:
                audit.look()

        return look

    def _watch_messages(self, driver: RaftDriver) -> RaftAudit:
        """Whatever the driver hands to its links has left, as far as promises go. Returns the audit of its storage."""
        peers: Any = driver._peers
        storage = driver._storage
        send, checker, me, harmed = peers.send, self._checker, driver.me.node, self._harmed
        assert checker is not None
        audit = RaftAudit(f"n{me}", storage, lambda: driver.core, checker.fail)

        def watched(node: NodeId, message: Message, now_ms: int) -> None:
            checker.left(me, node, message)
            if (broken := unstored_promise(storage, message)) is not None:
                checker.fail(f"n{me}", broken)
            if me not in harmed:
                audit.left(message)
            send(node, message, now_ms)

        peers.send = watched
        return audit

    # -- devices

    def attach(self, station: Station) -> None:
        def died(_loss: Loss | None) -> None:
            assert self._checker is not None
            self._checker.died(station.node_id)

        def crash() -> None:
            station.lose_power(station.machine.crash_loss)

        station.on_death = died
        station.machine.disk().on_crash_point = crash
        station.machine.store().on_crash_point = crash
        station.machine.disk().sync_latency = station.machine.store().commit_latency = self._latency

    def stall_disk(self, station: Station, *, everything: bool) -> Undo:
        device, store = station.machine.disk(), station.machine.store()
        device.begin_stall(everything=everything)
        store.begin_stall()

        def undo() -> None:
            device.stall.end()
            store.stall.end()

        return undo

    def slow_disk(self, station: Station, latency: Latency) -> Undo:
        device, store = station.machine.disk(), station.machine.store()
        device.sync_latency = store.commit_latency = latency

        def undo() -> None:
            device.sync_latency = store.commit_latency = self._latency

        return undo

    def fill_disk(self, station: Station, draw: Random) -> Undo:
        device, store = station.machine.disk(), station.machine.store()
        device.fill(draw.choice((0, 100, 1000)))
        store.fill(draw.choice(STORE_REFUSALS))

        def undo() -> None:
            device.capacity_bytes = None
            store.fill(0.0)

        return undo

    def fail_sync(self, station: Station, draw: Random) -> Undo:
        device, store = station.machine.disk(), station.machine.store()
        self._failed.add(station.node_id)
        if draw.random() < 0.25:
            store.fail()
        else:
            device.fail(draw.choice(("sync", "sync", "append", "read")), number=errno.EIO)

        def undo() -> None:
            device.faults.clear()
            store.faults.clear()

        return undo

    def is_suspect(self, station: Station) -> bool:
        armed = station.machine.disk().faults._armed or station.machine.store().faults._armed
        return bool(armed) or self.is_rotten(station)

    def rot(self, station: Station, draw: Random, kind: str) -> str | None:
        device, ending = station.machine.disk(), ".log" if kind == "log" else ".snapshot"
        files = [(path, size) for path, size in device.files() if path.endswith(ending) and size]
        if not files or station.context is None:
            return None
        path, size = max(files) if kind == "newest snapshot" else draw.choice(files)
        positions = [draw.randrange(size) for _ in range(draw.choice((1, 1, 3)))]
        for position in positions:
            device.flip_bit(path, position, draw.randrange(8))
        self._rotten[station.node_id] = station.context
        self._harmed.add(station.node_id)
        return f"{path} rots at {positions} of {size}"

    def is_rotten(self, station: Station) -> bool:
        return station.context is not None and self._rotten.get(station.node_id) is station.context

    def devices(self, station: Station, _draw: Random) -> tuple[SimDevice, SimStoreDevice]:
        """A disk of this node, and its state store."""
        return station.machine.disk(), station.machine.store()

    def damage(self, station: Station, draw: Random) -> str:
        device, store = station.machine.disk(), station.machine.store()
        kind = draw.choices((".log", ".snapshot", "index", "store"), (6, 2, 1, 1))[0]
        self._harmed.add(station.node_id)
        if kind == "store":
            if not store.stored:
                return "nothing to damage"
            key = draw.choice(sorted(store.stored))
            store.flip_bit(key, draw.randrange(len(store.stored[key])), draw.randrange(8))
            return f"a bit of {key!r} in the state store is flipped"
        files = [(path, size) for path, size in device.files() if path.endswith(kind) and size]
        if not files:
            return "nothing to damage"
        path, size = draw.choice(files)
        if draw.random() < 0.2:
            end = draw.randrange(size)
            device.cut(path, end)
            return f"{path} of {size} bytes is cut to {end}"
        position = draw.randrange(size)
        device.flip_bit(path, position, draw.randrange(8))
        return f"a bit of {path} is flipped at {position} of {size}"

    def crash_at(self, station: Station, draw: Random, *, is_vote: bool) -> Undo:
        device, store = station.machine.disk(), station.machine.store()
        station.machine.crash_loss = draw.choice(list(Loss))
        if is_vote:
            store.crash_at_commit = 1  # most likely: nothing else is to be written while nobody leads
        elif draw.random() < 0.5:
            device.crash_at_operation = device.operations + draw.randrange(1, 60)
        else:
            store.crash_at_commit = draw.randrange(1, 10)

        def undo() -> None:
            device.crash_at_operation = store.crash_at_commit = None
            station.start()

        return undo
