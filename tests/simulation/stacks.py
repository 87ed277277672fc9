"""How Raft nodes of either kind are built, and what a nemesis can do to their disks."""

from random import Random

from simulation.cluster import Context, Program, Station
from simulation.core_node import CoreNode
from simulation.model_disk import ModelDisk
from simulation.nemesis import Undo
from simulation.raft_sim import RaftSimulation, Stack
from simulation.workload import serve_clients
from tidelog.model.ids import Offset
from tidelog.raft.membership import Membership
from tidelog.world.simulated import Latency, Loss
from tidelog.world.simulated.disk import SimDevice
from tidelog.world.simulated.store import SimStoreDevice


class CoreStack:
    """`core_node`: the disk is a model, and so are its faults."""

    def program(self, simulation: RaftSimulation) -> Program:
        shape, checker = simulation.shape, simulation.checker

        async def run(context: Context) -> None:
            disk = self._disk(context.station)
            app = CoreNode(context, disk, shape.raft, checker, shape.snapshot_every)
            app.piece_bytes = shape.piece_bytes
            context.app = app
            serve_clients(context)
            await app.failure

        self._checker = checker
        self._latency = shape.disk_latency
        return run

    def attach(self, station: Station) -> None:
        def died(loss: object) -> None:
            self._checker.died(station.node_id)
            self._disk(station).crash(loss)  # type: ignore[arg-type]

        station.on_death = died

    def _disk(self, station: Station) -> ModelDisk:
        disk = station.durable.get("disk")
        if disk is None:
            draw = station.cluster.world.random(f"disk/{station.name}")
            membership = station.durable.get("founding", Membership())
            disk = station.durable["disk"] = ModelDisk(station.durable["directory"], membership, draw)
            disk.latency = self._latency
        assert isinstance(disk, ModelDisk)
        return disk

    def stall_disk(self, station: Station, *, everything: bool) -> Undo:
        disk = self._disk(station)
        disk.is_stalled = True
        return disk.unstall

    def slow_disk(self, station: Station, latency: Latency) -> Undo:
        disk = self._disk(station)
        disk.latency = latency

        def undo() -> None:
            disk.latency = self._latency

        return undo

    def fill_disk(self, station: Station, draw: Random) -> Undo:
        disk = self._disk(station)
        disk.is_full = True

        def undo() -> None:
            disk.is_full = False

        return undo

    def fail_sync(self, station: Station, draw: Random) -> Undo:
        disk = self._disk(station)
        disk.fails_next = True

        def undo() -> None:
            disk.fails_next = False

        return undo

    def is_suspect(self, station: Station) -> bool:
        disk = self._disk(station)
        return disk.fails_next or disk.is_rotten

    def devices(self, station: Station, draw: Random) -> tuple[SimDevice, SimStoreDevice]:
        raise AssertionError("the disk of this stack is a model")

    def damage(self, station: Station, draw: Random) -> str:
        disk = self._disk(station)
        if disk.synced_end <= disk.start:
            return "nothing to damage"
        offset = Offset(draw.randrange(disk.start, disk.synced_end))
        disk.damage(offset)
        return f"its log is unreadable at {offset} of {disk.synced_end}"

    def rot(self, station: Station, draw: Random, kind: str) -> str | None:
        disk = self._disk(station)
        if kind == "log":
            return None if disk.synced_end <= disk.start else self.damage(station, draw)
        snapshots = [item[0] for item in disk.snapshots if item[0].offset]
        if not snapshots:
            return None
        snapshot = max(snapshots) if kind == "newest snapshot" else draw.choice(snapshots)
        disk.rotten.add(snapshot)
        return f"the snapshot {snapshot.offset}-{snapshot.epoch} rots"

    def is_rotten(self, station: Station) -> bool:
        return station.app is not None and self._disk(station).is_rotten

    def crash_at(self, station: Station, draw: Random, *, is_vote: bool) -> Undo:
        disk = self._disk(station)
        loss = draw.choice(list(Loss))
        disk.writes_left = None if is_vote else draw.randrange(1, 10)
        disk.dies_with_vote = is_vote

        def crash() -> None:
            # It may strike after the fault has ended: the write had begun.
            station.lose_power(loss)
            station.cluster.world.loop.call_later(0.5, station.start)

        disk.on_crash_point = crash

        def undo() -> None:
            disk.writes_left, disk.dies_with_vote = None, False
            station.start()

        return undo


def make_stack(name: str) -> Stack:
    if name == "core":
        return CoreStack()
    from simulation.driver_node import DriverStack

    return DriverStack()
