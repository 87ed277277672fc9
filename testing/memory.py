"""`MemoryCluster`: a whole cluster in this process, without ports, files or child processes, with injected faults.

    with MemoryCluster(seed=7) as cluster:
        ...                                   # Producer, Consumer and Admin with cluster.bootstrap, as usual
        cluster.kill_leader("orders")         # kill -9; restart starts it again
        cluster.lose_unsynced()               # power loss: unsynced data is gone

Brokers, controllers, coordinator and the whole public API are production code; disks, network and time are simulated
(`world/simulated`), at real-time speed. Its addresses exist only in this process. All random choices of faults come
from `seed`. Clients are real threads: two runs of a test see the same faults, but not the same interleaving.

Not simulated: gRPC itself, TLS, ports, gRPC's message limits.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Literal, Self, TypeVar

from tidelog.client import io_thread
from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.controller_client import ControllerClient, ControllerClientConfig
from tidelog.metadata.image import ClusterImage, Partition
from tidelog.model.errors import InvalidConfigError, TidelogError
from tidelog.model.ids import NodeId
from tidelog.server.broker import Broker
from tidelog.server.settings_table import Value
from tidelog.testing.memory_connections import MemoryConnections
from tidelog.testing.memory_nodes import LOGS, PORT, MemoryNodes
from tidelog.testing.world_thread import WorldThread
from tidelog.world.simulated import Loss, SimLoop, SimulationError
from tidelog.world.transport import Transport

CONTROLLER = 1_000
"""First controller id. Client ids start at 10,000; brokers are 1, 2, 3."""
CLIENT = 10_000
BROKERS_MAX = 100
FAULTS_MAX = 1_000
DISK_BYTES = 256 << 20
FAULT_TIMEOUT_S = 30.0
LOOK_S = 0.002
SETTINGS: dict[str, object] = {"offsets.topic.num.partitions": 4, "transaction.state.log.num.partitions": 4}
"""Fewer than in production: a broker opens all of them at the first commit."""

T = TypeVar("T")
_names = itertools.count(1)


class ClusterFailedError(Exception):
    """A node failed without an injected fault: a bug in Tidelog, or a full disk."""


class MemoryCluster:
    """Brokers are numbered from 1. Any thread may call its methods, also while clients run."""

    def __init__(
        self,
        brokers: int = 3,
        *,
        controllers: int = 1,
        seed: int = 0,
        settings: Mapping[str, object] | None = None,
        node_settings: Mapping[str, Value] | None = None,
        racks: Sequence[str] = (),
        disk_bytes: int = DISK_BYTES,
    ) -> None:
        """`settings` are the cluster's (`min.insync.replicas`), `node_settings` those of each node's file
        (`authorizer`; docs/node-configuration.md); `racks` has one entry per broker; `disk_bytes` is the
        size of each broker's disk, which is in memory. Faults never affect controllers, so one is enough."""
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
        self._nodes = MemoryNodes(
            seed,
            controllers=tuple(NodeId(CONTROLLER + number) for number in range(controllers)),
            brokers=self._brokers,
            host_of=self._hosts.__getitem__,
            racks=dict(zip(self._brokers, racks, strict=False)),
            disk_bytes=disk_bytes,
            settings=node_settings or {},
            on_failure=self._failed,
        )
        self._random = self._nodes.world.random("faults")
        self._thread = WorldThread(self._nodes.world, on_end=self._ended)
        self.faults: deque[str] = deque(maxlen=FAULTS_MAX)
        """Injected faults, with seconds since creation; the oldest are dropped."""
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
        """Destroy the cluster. Clients that are still open cannot reach it."""
        for address in self._addresses:
            io_thread.IN_PROCESS.pop(address, None)
        self._thread.close()

    def check(self) -> None:
        """Raise ClusterFailedError if a node failed without an injected fault."""
        if self._thread.failure is not None:
            raise ClusterFailedError(f"the cluster stopped: {self._thread.failure}") from self._thread.failure
        if self._failures:
            raise ClusterFailedError("; ".join(self._failures))

    # State.

    @property
    def bootstrap(self) -> str:
        """The bootstrap address for clients of this process."""
        return ",".join(self._addresses)

    @property
    def brokers(self) -> tuple[int, ...]:
        return self._brokers

    def running(self) -> tuple[int, ...]:
        """Brokers whose process runs, paused or not."""
        return self._do(lambda: tuple(one for one in self._brokers if self._nodes.machine(one).node is not None))

    def leader(self, topic: str, partition: int = 0) -> int | None:
        """Return the leader; None if there is no leader or no such partition."""
        found = self._do(lambda: self._partition(topic, partition))
        return None if found is None or found.leader < 0 else found.leader

    def in_sync(self, topic: str, partition: int = 0) -> tuple[int, ...]:
        """Return the in-sync replicas in the controller's metadata."""
        found = self._do(lambda: self._partition(topic, partition))
        return () if found is None else tuple(sorted(found.isr))

    def wait_in_sync(self, topic: str, partition: int = 0, *, timeout: float = FAULT_TIMEOUT_S) -> None:
        """Wait until every replica is in sync, for example before a fault that must lose nothing."""

        def whole() -> bool:
            found = self._partition(topic, partition)
            return found is not None and set(found.isr) == set(found.replicas)

        self._until(whole, f"every replica of {topic}-{partition} is in sync", timeout)

    # Faults. Without a broker argument the seed selects a running one.

    def kill(self, broker: int | None = None) -> int:
        """Send SIGKILL: the page cache survives. Returns the broker."""
        return self._do(lambda: self._kill(self._chosen(broker)))

    def kill_leader(self, topic: str, partition: int = 0) -> int:
        """Kill the leader of the partition; wait for one if there is none. Returns the broker."""
        killed: list[int] = []

        def kill() -> bool:
            found = self._partition(topic, partition)
            if found is not None and NodeId(found.leader) in self._nodes.running:
                killed.append(self._kill(NodeId(found.leader)))
            return bool(killed)

        self._until(kill, f"{topic}-{partition} has a leader", FAULT_TIMEOUT_S)
        return killed[0]

    def restart(self, broker: int | None = None, *, timeout: float = FAULT_TIMEOUT_S) -> int:
        """Start a broker, killing it first if it runs; return when it is unfenced. Without an argument it restarts a
        broker that is down, or else one that the seed selects."""

        def down() -> NodeId:
            already = [one for one in self._brokers if self._nodes.machine(one).node is None]
            chosen = already[0] if broker is None and already else self._chosen(broker, down=True)
            return chosen if chosen in already else self._kill(chosen)

        chosen = self._do(down)
        self._boot([chosen], timeout)
        return chosen

    def stop(self, broker: int | None = None, *, timeout: float = FAULT_TIMEOUT_S) -> int:
        """Shut down cleanly, as by SIGTERM: leaderships move away, then it exits. Returns the broker."""
        stopped: list[NodeId] = []

        def begin() -> NodeId:
            chosen = self._chosen(broker)
            broker_role = self._nodes.running.get(chosen)
            if broker_role is None:
                raise ValueError(f"broker {chosen} is not up yet: wait until it has started")
            self._note(f"stop broker {chosen}")
            task = self._nodes.spawn(chosen, _stop(broker_role), "stop")
            task.add_done_callback(lambda done: stopped.append(self._kill(chosen)))
            return chosen

        chosen = self._do(begin)
        self._until(lambda: bool(stopped), f"broker {chosen} has stopped", timeout)
        return chosen

    def pause(self, broker: int | None = None) -> int:
        """Pause, as by SIGSTOP, until `resume` or `heal`: connections stay open. Returns the broker."""

        def pause() -> NodeId:
            chosen = self._chosen(broker)
            self._note(f"pause broker {chosen}")
            self._nodes.machine(chosen).pause()
            self._paused.add(chosen)
            return chosen

        return self._do(pause)

    def resume(self, broker: int) -> None:
        def resume() -> None:
            chosen = self._known(broker)
            self._note(f"resume broker {chosen}")
            self._nodes.machine(chosen).resume()
            self._paused.discard(chosen)

        self._do(resume)

    def isolate(self, *brokers: int, clients: bool = False) -> tuple[int, ...]:
        """Isolate these brokers from the other brokers and the controllers until `heal`; with `clients` also from
        clients. Packets are lost silently. Without an argument the seed selects a broker. Returns the brokers."""

        def cut() -> tuple[NodeId, ...]:
            chosen = [self._known(one) for one in brokers] or [self._chosen(None)]
            others = [one for one in (*self._brokers, *self._nodes.controllers) if one not in chosen]
            self._note(f"cut off {_describe(chosen)}{', also from clients' if clients else ''}")
            if clients:
                self._cut_from_clients.update(chosen)
                others += self._clients.values()
            for one in chosen:
                for other in others:
                    self._block(one, other)
            return tuple(chosen)

        return self._do(cut)

    def stall_disk(self, *brokers: int) -> tuple[int, ...]:
        """Stall these brokers' disks until `heal`: writes stay in the page cache. Without an argument the seed selects
        a broker. Returns the brokers."""

        def stall() -> tuple[NodeId, ...]:
            chosen = tuple(self._known(one) for one in brokers) or (self._chosen(None),)
            self._note(f"stall the disk of {_describe(chosen)}")
            for one in chosen:
                self._nodes.machine(one).disk(LOGS).begin_stall()
                self._nodes.machine(one).store(LOGS).begin_stall()
            return chosen

        return self._do(stall)

    def lose_unsynced(self, *, loss: Literal["all", "some"] = "all", timeout: float = FAULT_TIMEOUT_S) -> None:
        """Cut the power of all brokers and restore it: unsynced data is lost, with "some" a part that the seed selects.
        Returns when all brokers are unfenced. Controllers stay up."""
        wanted = {"all": Loss.ALL, "some": Loss.SOME}.get(loss)
        if wanted is None:
            raise ValueError(f"loss={loss!r}: 'all' or 'some' of what was not synced")

        def lose_power() -> None:
            self._note(f"lose the power of all brokers, and {loss} of what was not synced")
            for broker in self._brokers:
                self._nodes.running.pop(broker, None)
                self._nodes.machine(broker).lose_power(wanted)
            self._heal()

        self._do(lose_power)
        # No client is connected, so time may run fast: the controller waits for the sessions of all brokers to expire.
        self._thread.hurry(lambda: self._are_fenced(self._brokers), timeout)
        self._boot(self._brokers, timeout)

    def heal(self) -> None:
        """Restore links, disks and paused brokers. Stopped brokers stay down: use `restart`."""

        def heal() -> None:
            self._note("heal")
            self._heal()

        self._do(heal)

    # In the simulated world.

    def _begin(self) -> None:
        for node in (*self._nodes.controllers, *self._brokers):
            self._nodes.boot(node)
        self._nodes.clients.spawn(self._set(), name="settings")

    async def _set(self) -> None:
        """Apply the cluster's settings before clients connect."""
        transport = self._nodes.network.join(self._nodes.clients, NodeId(next(self._client_ids)))
        client = ControllerClient(
            transport, lambda: self._nodes.controllers, ControllerClientConfig(), self._nodes.clients.random
        )
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
        return (self._is_set and (bool(self._refused) or self._are_unfenced(self._brokers))) or bool(self._failures)

    def _are_unfenced(self, brokers: Sequence[NodeId]) -> bool:
        running = self._nodes.running
        return all(one in running and running[one].is_ready for one in brokers)

    def _are_fenced(self, brokers: Sequence[NodeId]) -> bool:
        known = self._image().brokers
        return all(one not in known or known[one].fenced for one in brokers)

    def _image(self) -> ClusterImage:
        active = self._nodes.active_controller
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
            up = [one for one in self._brokers if self._nodes.machine(one).node is not None]
            if not up:
                raise ValueError("no broker runs: restart one first")
            return self._random.choice(up)
        chosen = self._known(broker)
        if not down and self._nodes.machine(chosen).node is None:
            raise ValueError(f"broker {broker} does not run: restart it first")
        return chosen

    def _note(self, fault: str) -> None:
        self.faults.append(f"{time.monotonic() - self._made_s:8.3f} {fault}")

    def _kill(self, broker: NodeId) -> NodeId:
        self._note(f"kill broker {broker}")
        self._nodes.kill(broker)
        self._paused.discard(broker)
        return broker

    def _start(self, brokers: Sequence[NodeId]) -> None:
        self._note(f"start {_describe(brokers)}")
        for broker in brokers:
            self._nodes.boot(broker)

    def _block(self, one: NodeId, other: NodeId) -> None:
        self._nodes.network.block(one, other)
        self._nodes.network.block(other, one)

    def _heal(self) -> None:
        self._cut_from_clients.clear()
        self._nodes.network.heal()
        for broker in self._brokers:
            self._nodes.machine(broker).disk(LOGS).stall.end()
            self._nodes.machine(broker).store(LOGS).stall.end()
        for broker in sorted(self._paused):
            self._nodes.machine(broker).resume()
        self._paused.clear()

    def _failed(self, node: NodeId, error: BaseException) -> None:
        what = f"controller {node}" if node >= CONTROLLER else f"broker {node}"
        self._failures.append(f"{what} has failed: {type(error).__name__}: {error}")

    def _ended(self) -> None:
        for client in list(self._clients):
            client.break_off()
        self._clients.clear()

    # For clients (`memory_connections.ClusterGateway`).

    def post(self, work: Callable[[], None]) -> None:
        self._thread.post(work)

    def node_at(self, address: str) -> NodeId | None:
        return self._addresses.get(address)

    def join(self, client: MemoryConnections) -> tuple[SimLoop, Transport]:
        node = NodeId(next(self._client_ids))
        self._clients[client] = node
        transport = self._nodes.network.join(self._nodes.clients, node)
        for broker in self._cut_from_clients:
            self._block(node, broker)
        return self._nodes.clients.loop, transport

    def leave(self, client: MemoryConnections) -> None:
        if self._clients.pop(client, None) is not None and client.transport is not None:
            self._nodes.clients.spawn(client.transport.close(), name="goodbye")

    # From outside the world.

    def _do(self, work: Callable[[], T]) -> T:
        self.check()
        return self._thread.do(work)

    def _boot(self, brokers: Sequence[NodeId], timeout_s: float) -> None:
        """Start the brokers and wait until they are unfenced. First wait until the controller has fenced them: a
        process that restarts at once waits for the session of its previous incarnation to end."""
        names = _describe(brokers)
        self._until(lambda: self._are_fenced(brokers), f"the controller has fenced {names}", timeout_s)
        self._do(lambda: self._start(brokers))
        self._until(lambda: self._are_unfenced(brokers), f"the controller has unfenced {names}", timeout_s)

    def _until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Wait until the condition holds in the world."""
        end_s = time.monotonic() + timeout_s
        while not self._do(condition):
            if time.monotonic() >= end_s:
                raise TimeoutError(f"not within {timeout_s} s: {what}")
            time.sleep(LOOK_S)


async def _stop(broker: Broker) -> None:
    """Stops as a node process does."""
    await broker.shut_down()
    await broker.close()


def _describe(brokers: Sequence[int]) -> str:
    return f"broker {', '.join(map(str, brokers))}"


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
