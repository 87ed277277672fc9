"""`MemoryCluster`: a whole cluster in this process, without ports, files or child processes, and with faults.

    with MemoryCluster(seed=7) as cluster:
        ...                                   # Producer, Consumer and Admin of cluster.bootstrap, as always
        cluster.kill_leader("orders")         # kill -9; restart brings it back
        cluster.lose_unsynced()               # the power goes: what no disk had synced is gone

Brokers, controllers, coordinator and the whole public API are those of production; disks, network and time are
simulated (`world/simulated`), at the pace of the real clock. Clients find it by addresses that exist in this process
only. Whatever a fault draws comes from `seed`. The clients themselves are real threads: two runs of a test see the same
faults, not the same interleaving.

Not simulated: gRPC itself, TLS, ports, the limits that gRPC's server puts on messages.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Literal, Self, TypeVar

from tidelog.client import io_thread
from tidelog.metadata.broker_side import BrokerConfig, ControllerClient
from tidelog.metadata.image import ClusterImage, Partition
from tidelog.metadata.settings import AlterConfigs, ConfigChange, ResourceChange
from tidelog.model.errors import InvalidConfigError, TidelogError
from tidelog.model.ids import NodeId
from tidelog.testing.memory_connections import MemoryConnections
from tidelog.testing.memory_nodes import LOGS, PORT, Room
from tidelog.testing.world_thread import WorldThread
from tidelog.world.simulated import Loss, SimLoop, SimulationError
from tidelog.world.transport import Transport

CONTROLLER = 1_000
"""Ids of controllers begin here, those of clients at 10,000; brokers are 1, 2, 3."""
CLIENT = 10_000
BROKERS_MAX = 100
FAULTS_TOLD_MAX = 1_000
DISK_BYTES = 256 << 20
FAULT_TIMEOUT_S = 30.0
LOOK_S = 0.002
SETTINGS: dict[str, object] = {"offsets.topic.num.partitions": 4}
"""Fewer than in production: a broker of a test opens them all at the first commit."""

T = TypeVar("T")
_names = itertools.count(1)


class ClusterFailedError(Exception):
    """A node of the cluster has failed by itself, which no fault asked for: an error of Tidelog, or a full disk."""


class MemoryCluster:
    """Brokers are numbered from 1 on. Its methods may be called from any thread, also while clients work."""

    def __init__(
        self,
        brokers: int = 3,
        *,
        controllers: int = 1,
        seed: int = 0,
        settings: Mapping[str, object] | None = None,
        racks: Sequence[str] = (),
        disk_bytes: int = DISK_BYTES,
    ) -> None:
        """`settings` are the cluster's (`min.insync.replicas`); `racks` one for each broker; `disk_bytes` is the size
        of each broker's disk, which is memory here. No fault touches controllers, so one is enough."""
        if not 1 <= brokers <= BROKERS_MAX or not 1 <= controllers <= 5:
            raise ValueError(f"1 to {BROKERS_MAX} brokers and 1 to 5 controllers, not {brokers} and {controllers}")
        if racks and len(racks) != brokers:
            raise ValueError(f"{len(racks)} racks for {brokers} brokers: one for each")
        self.seed = seed
        self.name = f"memory-{next(_names)}"
        self._brokers = tuple(NodeId(number) for number in range(1, brokers + 1))
        self._hosts = {broker: f"broker-{broker}.{self.name}.tidelog" for broker in self._brokers}
        self._addresses = {f"{host}:{PORT}": broker for broker, host in self._hosts.items()}
        self._settings = {"default.replication.factor": min(3, brokers), **SETTINGS, **(settings or {})}
        self._room = Room(
            seed,
            controllers=tuple(NodeId(CONTROLLER + number) for number in range(controllers)),
            brokers=self._brokers,
            host_of=self._hosts.__getitem__,
            racks=dict(zip(self._brokers, racks, strict=False)),
            disk_bytes=disk_bytes,
            on_failure=self._failed,
        )
        self._random = self._room.world.random("faults")
        self._thread = WorldThread(self._room.world, on_end=self._ended)
        self.faults: deque[str] = deque(maxlen=FAULTS_TOLD_MAX)
        """What was done to it, with when, in seconds since it was made; the oldest are forgotten."""
        self._made_s = time.monotonic()
        self._failures: list[str] = []
        self._clients: dict[MemoryConnections, NodeId] = {}
        self._client_ids = itertools.count(CLIENT)
        self._cut_from_clients: set[NodeId] = set()
        self._paused: set[NodeId] = set()
        self._refused: list[str] = []
        self._is_set = False

    def __enter__(self) -> Self:
        try:
            self._thread.start(self._begin, self._is_up)
        except SimulationError as error:
            raise ClusterFailedError("; ".join(self._failures) or str(error)) from error
        if self._failures or self._refused:
            self.close()
            self.check()
            raise InvalidConfigError("; ".join(self._refused))
        for address in self._addresses:
            io_thread.IN_PROCESS[address] = lambda: MemoryConnections(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if error is None:
            self.check()

    def close(self) -> None:
        """Everything of it is gone. Clients that are still open find nobody."""
        for address in self._addresses:
            io_thread.IN_PROCESS.pop(address, None)
        self._thread.close()

    def check(self) -> None:
        """Raises ClusterFailedError if a node has failed by itself."""
        if self._thread.failure is not None:
            raise ClusterFailedError(f"the cluster stopped: {self._thread.failure}") from self._thread.failure
        if self._failures:
            raise ClusterFailedError("; ".join(self._failures))

    # What it is.

    @property
    def bootstrap(self) -> str:
        """What clients of this process take as their address."""
        return ",".join(self._addresses)

    @property
    def brokers(self) -> tuple[int, ...]:
        return self._brokers

    def running(self) -> tuple[int, ...]:
        """Brokers whose process runs, paused or not."""
        return self._do(lambda: tuple(one for one in self._brokers if self._room.machine(one).node is not None))

    def leader(self, topic: str, partition: int = 0) -> int | None:
        """Who leads it now; None: nobody, or there is no such partition."""
        found = self._do(lambda: self._partition(topic, partition))
        return None if found is None or found.leader < 0 else found.leader

    def in_sync(self, topic: str, partition: int = 0) -> tuple[int, ...]:
        """Its in-sync replicas, as the controller knows them."""
        found = self._do(lambda: self._partition(topic, partition))
        return () if found is None else tuple(sorted(found.isr))

    def wait_in_sync(self, topic: str, partition: int = 0, *, timeout_s: float = FAULT_TIMEOUT_S) -> None:
        """Until every replica is in sync, as before a fault that shall cost nothing."""

        def whole() -> bool:
            found = self._partition(topic, partition)
            return found is not None and set(found.isr) == set(found.replicas)

        self._until(whole, f"every replica of {topic}-{partition} is in sync", timeout_s)

    # Faults. Where no broker is named, the seed draws one of those that run.

    def kill(self, broker: int | None = None) -> int:
        """kill -9: what was written to the page cache stays. Who it was."""
        return self._do(lambda: self._kill(self._chosen(broker)))

    def kill_leader(self, topic: str, partition: int = 0) -> int:
        """kill -9 of whoever leads it, waiting for a leader if there is none yet. Who it was."""
        killed: list[int] = []

        def kill() -> bool:
            found = self._partition(topic, partition)
            if found is not None and NodeId(found.leader) in self._room.running:
                killed.append(self._kill(NodeId(found.leader)))
            return bool(killed)

        self._until(kill, f"{topic}-{partition} has a leader", FAULT_TIMEOUT_S)
        return killed[0]

    def restart(self, broker: int | None = None, *, timeout_s: float = FAULT_TIMEOUT_S) -> int:
        """Start a broker, killing it first if it runs; returns when it is let in. Without a number it is one that is
        down, or else one that the seed draws."""

        def down() -> NodeId:
            already = [one for one in self._brokers if self._room.machine(one).node is None]
            chosen = already[0] if broker is None and already else self._chosen(broker, down=True)
            return chosen if chosen in already else self._kill(chosen)

        chosen = self._do(down)
        self._boot([chosen], timeout_s)
        return chosen

    def stop(self, broker: int | None = None, *, timeout_s: float = FAULT_TIMEOUT_S) -> int:
        """As SIGTERM: leaderships move away, then it ends. Who it was."""
        stopped: list[NodeId] = []

        def begin() -> NodeId:
            chosen = self._chosen(broker)
            found = self._room.running.get(chosen)
            if found is None:
                raise ValueError(f"broker {chosen} is not up yet")
            self._note(f"stop broker {chosen}")
            task = found.node.spawn(found.stop())
            task.add_done_callback(lambda done: stopped.append(self._kill(chosen)))
            return chosen

        chosen = self._do(begin)
        self._until(lambda: bool(stopped), f"broker {chosen} has stopped", timeout_s)
        return chosen

    def pause(self, broker: int | None = None) -> int:
        """As SIGSTOP, until `resume` or `heal`: nobody is told, its connections stay open. Who it was."""

        def pause() -> NodeId:
            chosen = self._chosen(broker)
            self._note(f"pause broker {chosen}")
            self._room.machine(chosen).pause()
            self._paused.add(chosen)
            return chosen

        return self._do(pause)

    def resume(self, broker: int) -> None:
        def resume() -> None:
            chosen = self._known(broker)
            self._note(f"resume broker {chosen}")
            self._room.machine(chosen).resume()
            self._paused.discard(chosen)

        self._do(resume)

    def partition(self, *brokers: int, clients: bool = False) -> tuple[int, ...]:
        """Cut these brokers off from the other brokers and from the controllers, until `heal`; `clients`: from clients
        too. Without a number the seed draws one. Nobody is told: packets are lost. Who it was."""

        def cut() -> tuple[NodeId, ...]:
            chosen = [self._known(one) for one in brokers] or [self._chosen(None)]
            others = [one for one in (*self._brokers, *self._room.controllers) if one not in chosen]
            self._note(f"cut off {_told(chosen)}{', also from clients' if clients else ''}")
            if clients:
                self._cut_from_clients.update(chosen)
                others += self._clients.values()
            for one in chosen:
                for other in others:
                    self._block(one, other)
            return tuple(chosen)

        return self._do(cut)

    def stall_disk(self, *brokers: int) -> tuple[int, ...]:
        """Their disks finish no write, until `heal`: what arrives stays in the page cache. Without a number the seed
        draws one. Who it was."""

        def stall() -> tuple[NodeId, ...]:
            chosen = tuple(self._known(one) for one in brokers) or (self._chosen(None),)
            self._note(f"stall the disk of {_told(chosen)}")
            for one in chosen:
                self._room.machine(one).disk(LOGS).begin_stall()
                self._room.machine(one).store(LOGS).begin_stall()
            return chosen

        return self._do(stall)

    def lose_unsynced(self, *, loss: Literal["all", "some"] = "all", timeout_s: float = FAULT_TIMEOUT_S) -> None:
        """The power of all brokers goes and comes back: what was not synced is lost, or of it what the seed draws
        ("some"). Returns when all brokers are let in again. Controllers stay up."""
        wanted = {"all": Loss.ALL, "some": Loss.SOME}.get(loss)
        if wanted is None:
            raise ValueError(f"loss={loss!r}: 'all' or 'some' of what was not synced")

        def strike() -> None:
            self._note(f"lose the power of all brokers, and {loss} of what was not synced")
            for broker in self._brokers:
                self._room.running.pop(broker, None)
                self._room.machine(broker).lose_power(wanted)
            self._mend()

        self._do(strike)
        # Nobody is there, so nobody minds: the controller waits for the sessions of brokers that all went at once.
        self._thread.hurry(lambda: self._are_fenced(self._brokers), timeout_s)
        self._boot(self._brokers, timeout_s)

    def heal(self) -> None:
        """Links, disks and paused brokers work again. Brokers that are down stay down: `restart`."""

        def heal() -> None:
            self._note("heal")
            self._mend()

        self._do(heal)

    # In the world.

    def _begin(self) -> None:
        for node in (*self._room.controllers, *self._brokers):
            self._room.boot(node)
        self._room.clients.spawn(self._set(), name="settings")

    async def _set(self) -> None:
        """The cluster's settings, before anybody comes."""
        transport = self._room.network.join(self._room.clients, NodeId(next(self._client_ids)))
        client = ControllerClient(transport, lambda: self._room.controllers, BrokerConfig(), self._room.clients.random)
        changes = tuple(
            ConfigChange(key=key, operation="set", value=_text(value)) for key, value in self._settings.items()
        )
        resource = ResourceChange(resource_type="cluster", changes=changes)
        try:
            (done,) = (await client.call(AlterConfigs(resources=(resource,)), is_repeatable=True)).items
            if done.error is not None:
                self._refused.append(done.message)
        except TidelogError as error:
            self._refused.append(str(error))
        self._is_set = True

    def _is_up(self) -> bool:
        return (self._is_set and (bool(self._refused) or self._are_let_in(self._brokers))) or bool(self._failures)

    def _are_let_in(self, brokers: Sequence[NodeId]) -> bool:
        running = self._room.running
        return all(one in running and running[one].is_let_in for one in brokers)

    def _are_fenced(self, brokers: Sequence[NodeId]) -> bool:
        known = self._image().brokers
        return all(one not in known or known[one].fenced for one in brokers)

    def _image(self) -> ClusterImage:
        active = self._room.active
        return ClusterImage() if active is None else active.image

    def _partition(self, topic: str, partition: int) -> Partition | None:
        image = self._image()
        topic_id = image.topic_ids.get(topic)
        return None if topic_id is None else image.partition(topic_id, partition)

    def _known(self, broker: int) -> NodeId:
        if NodeId(broker) not in self._brokers:
            raise ValueError(f"there is no broker {broker}: they are 1 to {len(self._brokers)}")
        return NodeId(broker)

    def _chosen(self, broker: int | None, *, down: bool = False) -> NodeId:
        if broker is None:
            up = [one for one in self._brokers if self._room.machine(one).node is not None]
            if not up:
                raise ValueError("no broker runs: restart one first")
            return self._random.choice(up)
        chosen = self._known(broker)
        if not down and self._room.machine(chosen).node is None:
            raise ValueError(f"broker {broker} does not run: restart it first")
        return chosen

    def _note(self, fault: str) -> None:
        self.faults.append(f"{time.monotonic() - self._made_s:8.3f} {fault}")

    def _kill(self, broker: NodeId) -> NodeId:
        self._note(f"kill broker {broker}")
        self._room.kill(broker)
        self._paused.discard(broker)
        return broker

    def _start(self, brokers: Sequence[NodeId]) -> None:
        self._note(f"start {_told(brokers)}")
        for broker in brokers:
            self._room.boot(broker)

    def _block(self, one: NodeId, other: NodeId) -> None:
        self._room.network.block(one, other)
        self._room.network.block(other, one)

    def _mend(self) -> None:
        self._cut_from_clients.clear()
        self._room.network.heal()
        for broker in self._brokers:
            self._room.machine(broker).disk(LOGS).stall.end()
            self._room.machine(broker).store(LOGS).stall.end()
        for broker in sorted(self._paused):
            self._room.machine(broker).resume()
        self._paused.clear()

    def _failed(self, node: NodeId, error: BaseException) -> None:
        what = f"controller {node}" if node >= CONTROLLER else f"broker {node}"
        self._failures.append(f"{what} has failed: {type(error).__name__}: {error}")

    def _ended(self) -> None:
        for client in list(self._clients):
            client.break_off()
        self._clients.clear()

    # For clients (`memory_connections.Shore`).

    def post(self, work: Callable[[], None]) -> None:
        self._thread.post(work)

    def node_at(self, address: str) -> NodeId | None:
        return self._addresses.get(address)

    def join(self, client: MemoryConnections) -> tuple[SimLoop, Transport]:
        node = NodeId(next(self._client_ids))
        self._clients[client] = node
        transport = self._room.network.join(self._room.clients, node)
        for broker in self._cut_from_clients:
            self._block(node, broker)
        return self._room.clients.loop, transport

    def leave(self, client: MemoryConnections) -> None:
        if self._clients.pop(client, None) is not None and client.transport is not None:
            self._room.clients.spawn(client.transport.close(), name="goodbye")

    # From outside.

    def _do(self, work: Callable[[], T]) -> T:
        self.check()
        return self._thread.do(work)

    def _boot(self, brokers: Sequence[NodeId], timeout_s: float) -> None:
        """Start them and wait until they are let in. Not before the controller has seen them go: a process that comes
        back at once is kept waiting until the session of its former life has ended."""
        told = _told(brokers)
        self._until(lambda: self._are_fenced(brokers), f"the controller has fenced {told}", timeout_s)
        self._do(lambda: self._start(brokers))
        self._until(lambda: self._are_let_in(brokers), f"the controller has let in {told}", timeout_s)

    def _until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Looks in the world, waits out here."""
        end_s = time.monotonic() + timeout_s
        while not self._do(condition):
            if time.monotonic() >= end_s:
                raise TimeoutError(f"not within {timeout_s} s: {what}")
            time.sleep(LOOK_S)


def _told(brokers: Sequence[int]) -> str:
    return f"broker {', '.join(map(str, brokers))}"


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
