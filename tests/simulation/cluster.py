"""Machines, the programs that run on them, and a supervisor that starts a program again when it gives up.

    Cluster    the run: world, network, stations by name
    Station    a machine with a node id and a program; it outlives every process that runs the program
    Context    what one process gets: its node (loop, disk, store, clock, randomness), its transport, its station

A program is an async function of its context. It may end in three ways: it is killed with its machine; it raises an
error of the catalogue (a disk that failed, a state that it refuses to run on), which a supervisor answers with a new
start after a while; anything else, an assertion first of all, fails the run.

`Context.app` is where a program puts what checks and clients of its kind want to see; it is gone when the process is.
"""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from simulation.coverage import harmed
from tidelog.model.errors import TidelogError
from tidelog.model.ids import NodeId
from tidelog.world.simulated import Loss, SimMachine, SimNode, SimWorld
from tidelog.world.simulated.network import SimNetwork, SimTransport

RESTART_MIN_S = 0.2
RESTART_MAX_S = 1.5


@dataclass(slots=True)
class Context:
    """The world of one process."""

    station: "Station"
    node: SimNode
    transport: SimTransport
    app: Any = None
    asked: int = 0
    """What an operator asked of this process and has no answer to; it is gone with the process."""

    @property
    def node_id(self) -> NodeId:
        return self.transport.me

    def trace(self, text: str) -> None:
        self.node.trace(text)


Program = Callable[[Context], Coroutine[Any, Any, None]]


class Station:
    """See the module's docstring. Made by `Cluster.add`."""

    def __init__(self, cluster: "Cluster", name: str, node_id: NodeId, program: Program) -> None:
        self.cluster = cluster
        self.name = name
        self.node_id = node_id
        self.program = program
        self.machine: SimMachine = cluster.world.machine(name)
        self.context: Context | None = None
        self.is_held_down = True
        """Down by the nemesis's (or the operator's) will: the supervisor leaves it alone."""
        self.last_error: TidelogError | None = None
        """Why the program last ended by itself."""
        self.has_refused = False
        """It ended before it had begun its work (`Context.app`): starting it again will not help."""
        self.durable: dict[str, Any] = {}
        """What a modelled device keeps through every death; the simulated disk and store have their own."""
        self.on_death: Callable[[Loss | None], None] | None = None
        """Called when a process dies, before anything starts again: with the kind of loss, None for kill -9."""
        self._random = cluster.world.random(f"supervisor/{name}")

    @property
    def is_up(self) -> bool:
        return self.machine.node is not None

    @property
    def app(self) -> Any:
        return None if self.context is None else self.context.app

    def start(self) -> None:
        """Boot the machine if it is down."""
        self.is_held_down = False
        if self.machine.node is not None:
            return
        node = self.machine.boot()
        transport = self.cluster.network.join(node, self.node_id)
        context = self.context = Context(self, node, transport)
        task = node.spawn(self.program(context), name=f"{self.name}.program")
        task.add_done_callback(lambda done: self._ended(context, done))

    def kill(self) -> None:
        """kill -9, and it stays down until `start`."""
        harmed(self)
        self.is_held_down = True
        self._die(None)

    def lose_power(self, loss: Loss) -> None:
        harmed(self)
        self.is_held_down = True
        self._die(loss)

    def pause(self) -> None:
        harmed(self)
        if self.machine.node is not None:
            self.machine.pause()

    def resume(self) -> None:
        self.machine.resume()

    def wipe(self) -> None:
        """Empty disks in the place of the old ones."""
        assert not self.is_up, "disks are swapped while the machine is off"
        self.machine.disk().wipe()
        self.machine.store().wipe()
        self.durable.clear()

    def _die(self, loss: Loss | None) -> None:
        self.context = None
        if loss is None:
            self.machine.kill()
        else:
            self.machine.lose_power(loss)
        if self.on_death is not None:
            self.on_death(loss)

    def _ended(self, context: Context, task: Any) -> None:
        """The program has ended by itself."""
        if self.context is not context:
            return
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, TidelogError):
            self.cluster.world.scheduler.fail(self.name, "the program broke", error)
            return
        self.machine.world.scheduler.trace(self.name, f"the program ended: {error}")
        self.last_error, self.has_refused = error, context.app is None
        self._die(None)
        if not self.is_held_down:
            delay_s = self._random.uniform(RESTART_MIN_S, RESTART_MAX_S)
            self.cluster.world.loop.call_later(delay_s, self._restart)

    def _restart(self) -> None:
        if not self.is_held_down:
            self.start()


class Cluster:
    """All stations of a run, on one network."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self.network = SimNetwork(world)
        self.stations: dict[str, Station] = {}

    def add(self, name: str, node_id: NodeId, program: Program) -> Station:
        assert all(other.node_id != node_id for other in self.stations.values()), "one station a node id"
        station = self.stations[name] = Station(self, name, node_id, program)
        return station

    def station(self, node_id: NodeId) -> Station:
        return next(station for station in self.stations.values() if station.node_id == node_id)

    def heal(self) -> None:
        """Every machine runs, with working disks and a clock of the right rate, on a network that works."""
        self.network.heal()
        for station in self.stations.values():
            station.machine.heal()
            if not station.is_up:
                station.start()
