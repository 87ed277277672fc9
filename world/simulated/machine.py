"""Simulated machines on one seed: they boot, are killed, lose power and are paused.

    SimWorld     the run: seed, scheduler, machines; its own loop, for faults and checks, which never dies
    SimMachine   what outlives a process: disks, stores, wall clock, monotonic clock
    SimNode      one incarnation of a process on a machine: its loop, its handles, its random stream

    off --boot--> up --kill (kill -9)-----------> off      the page cache stays; submitted device operations complete
                  up --lose_power(loss)---------> off      unsynced data is lost, as `loss` says
                  up --pause--> paused --resume--> up      SIGSTOP: devices, network and other nodes continue

Death has an order: first the handles (disk, store, transport) fail, then the events are dropped. What still runs on the
node, at most the callback that caused the death, gets `MachineDied` at its next call.

    with SimWorld(seed=7) as world:
        machine = world.machine("a")
        assert world.run(machine.boot(), write_some) == 3          # an async function of the node
        machine.lose_power(Loss.SOME)
        world.run(machine.boot(), read_it_back)

Leaving the `with` reports unhandled failures and closes everything. A node's network handle joins by `SimNode.attach`:
anything with `die()`.
"""

import gc
import random
import sys
import warnings
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Protocol, TypeVar

from tidelog.world.simulated.clock import SimClock
from tidelog.world.simulated.device import Loss
from tidelog.world.simulated.disk import SimDevice, SimDisk
from tidelog.world.simulated.guard import forbid_nondeterminism
from tidelog.world.simulated.loop import SimLoop, SimTask, make_loop
from tidelog.world.simulated.scheduler import MachineDied, NodeDiedError, Scheduler
from tidelog.world.simulated.store import SimStore, SimStoreDevice
from tidelog.world.simulated.work import SimWork

T = TypeVar("T")

RUN_TIMEOUT_S = 3600.0


class Mortal(Protocol):
    """A node's handle to its environment, which fails when the node dies."""

    def die(self) -> None: ...


class SimNode:
    """One incarnation of a process. Created by `SimMachine.boot`."""

    def __init__(self, machine: "SimMachine", loop: SimLoop, incarnation: int) -> None:
        self.machine = machine
        self.name = machine.name
        self.incarnation = incarnation
        self.loop = loop
        self.clock = machine.clock
        scheduler = machine.world.scheduler
        self.random: random.Random = scheduler.random(f"node/{machine.name}/{incarnation}")
        self.work = SimWork(loop, scheduler.random(f"work/{machine.name}"))
        self._handles: list[Mortal] = []
        self._disks: dict[str, SimDisk] = {}
        self._stores: dict[str, SimStore] = {}

    def disk(self, label: str = "data") -> SimDisk:
        if label not in self._disks:
            self._disks[label] = self.attach(SimDisk(self.machine.disk(label), self.loop))
        return self._disks[label]

    def store(self, label: str = "data") -> SimStore:
        if label not in self._stores:
            self._stores[label] = self.attach(SimStore(self.machine.store(label), self.loop))
        return self._stores[label]

    def attach(self, handle: "M") -> "M":
        """Attaches a handle that dies with the node."""
        assert self.is_alive, "a dead node gets no handles"
        self._handles.append(handle)
        return handle

    def spawn(self, coroutine: Coroutine[Any, Any, Any], *, name: str | None = None) -> SimTask:
        return self.loop.create_task(coroutine, name=name)

    def trace(self, text: str) -> None:
        self.machine.world.scheduler.trace(self.name, text)

    @property
    def is_alive(self) -> bool:
        return not self.loop.is_dead

    def die(self) -> None:
        """Handles first, then events; see the module's docstring."""
        for handle in self._handles:
            handle.die()
        self.loop.die()


M = TypeVar("M", bound=Mortal)


class SimMachine:
    """Created by `SimWorld.machine`."""

    def __init__(self, world: "SimWorld", name: str) -> None:
        self.world = world
        self.name = name
        self.clock = SimClock(world.scheduler)
        self.node: SimNode | None = None
        self.incarnations = 0
        self.crash_loss = Loss.SOME
        self._rate = 1.0
        # Monotonic clocks of two machines differ; this finds code that compares them.
        self._monotonic_start_s = float(world.scheduler.random("clock").randrange(1_000, 100_000))
        self._disks: dict[str, SimDevice] = {}
        self._stores: dict[str, SimStoreDevice] = {}

    def disk(self, label: str = "data") -> SimDevice:
        """Returns the device; created empty on first use."""
        if label not in self._disks:
            stream = self.world.scheduler.random(f"disk/{self.name}/{label}")
            device = self._disks[label] = SimDevice(self.world.loop, f"{self.name}:{label}", stream)
            device.on_crash_point = self._crash_here
        return self._disks[label]

    def store(self, label: str = "data") -> SimStoreDevice:
        if label not in self._stores:
            stream = self.world.scheduler.random(f"store/{self.name}/{label}")
            device = self._stores[label] = SimStoreDevice(self.world.loop, f"{self.name}:{label}", stream)
            device.on_crash_point = self._crash_here
        return self._stores[label]

    def boot(self) -> SimNode:
        assert self.node is None, f"{self.name} is up"
        self.incarnations += 1
        scheduler = self.world.scheduler
        start_s = self._monotonic_start_s + scheduler.now_ns / 1e9
        loop = make_loop(scheduler, f"{self.name}.{self.incarnations}", start_s=start_s, rate=self._rate)
        self.node = SimNode(self, loop, self.incarnations)
        scheduler.trace(self.name, f"boot {self.incarnations}")
        return self.node

    def kill(self) -> None:
        """kill -9: the page cache stays, synced or not."""
        self._end_node("kill")

    def lose_power(self, loss: Loss) -> None:
        """Also loses the page cache of a machine that is down already."""
        self._end_node(f"lose power, {loss.name}")
        for _, device in sorted(self._disks.items()):
            device.lose_power(loss)

    def pause(self) -> None:
        assert self.node is not None, f"{self.name} is down"
        self.world.scheduler.trace(self.name, "pause")
        self.node.loop.pause()

    def resume(self) -> None:
        if self.node is not None:
            self.world.scheduler.trace(self.name, "resume")
            self.node.loop.resume()

    def set_clock_rate(self, rate: float) -> None:
        """Sets the rate of both clocks: `loop.time()` and the wall clock."""
        self.world.scheduler.trace(self.name, f"clock rate {rate}")
        self._rate = rate
        self.clock.set_rate(rate)
        if self.node is not None:
            self.node.loop.set_rate(rate)

    def heal(self) -> None:
        """Heals all devices and resumes the process; damage stays."""
        for _, device in sorted(self._disks.items()):
            device.heal()
        for _, store in sorted(self._stores.items()):
            store.heal()
        self.set_clock_rate(1.0)
        self.resume()

    def _end_node(self, why: str) -> None:
        self.world.scheduler.trace(self.name, why)
        if self.node is not None:
            self.node.die()
            self.node = None
            for _, store in sorted(self._stores.items()):
                store.end_of_process()

    def _crash_here(self) -> None:
        self.lose_power(self.crash_loss)


class SimWorld:
    """See the module's docstring."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.scheduler = Scheduler(seed)
        self.loop = make_loop(self.scheduler, "world")
        self.machines: dict[str, SimMachine] = {}
        self._guard = ExitStack()

    def __enter__(self) -> "SimWorld":
        self._guard.enter_context(forbid_nondeterminism())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.check()
        finally:
            self.close()
            self._guard.close()

    def machine(self, name: str) -> SimMachine:
        if name not in self.machines:
            self.machines[name] = SimMachine(self, name)
        return self.machines[name]

    def random(self, name: str) -> random.Random:
        return self.scheduler.random(name)

    @property
    def digest(self) -> str:
        return self.scheduler.digest

    def run(
        self, node: SimNode, main: Callable[[SimNode], Coroutine[Any, Any, T]], *, timeout: float = RUN_TIMEOUT_S
    ) -> T:
        """Runs everything until this function has returned on this node; returns its result or raises its error. Raises
        `NodeDiedError` if the node dies first."""
        task = node.spawn(main(node))
        self.run_until(lambda: task.done() or not node.is_alive, timeout=timeout)
        if not task.done() or (not task.cancelled() and isinstance(task.exception(), MachineDied)):
            raise NodeDiedError(f"{node.name} died before it was done")
        result: T = task.result()
        return result

    def run_for(self, seconds: float) -> None:
        self.scheduler.run_for(seconds)

    def run_until(self, condition: Callable[[], bool], *, timeout: float = RUN_TIMEOUT_S, every_s: float = 0.0) -> None:
        self.scheduler.run_until(condition, timeout=timeout, every_s=every_s)

    def check(self) -> None:
        """Raises the failures that nobody handled."""
        for loop in self.scheduler.loops:
            loop.report_untaken_errors()
        self.scheduler.raise_failures()

    def close(self) -> None:
        """Closes all coroutines, after all checks, with every handle dead."""
        if self.scheduler.closed:
            return
        self.scheduler.closed = True
        for machine in self.machines.values():
            if machine.node is not None:
                machine.node.die()
                machine.node = None
        hook = sys.unraisablehook
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sys.unraisablehook = lambda _: None
            try:
                for loop in self.scheduler.loops:
                    loop.die()
                for loop in self.scheduler.loops:
                    loop.bury()
                self.scheduler.clear()
                # Everything that the run created is in the youngest generation: the collector was off.
                gc.collect(0)
            finally:
                sys.unraisablehook = hook
