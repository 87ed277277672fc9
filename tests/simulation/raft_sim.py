"""One run of a Raft group: seed in, verdict out. First safety under faults, then everything is healed and must go on.

    0 s          the nodes start; clients write and read
    ... plan     faults begin and end (`nemesis`)
    fault_s      all faults end, all nodes start, an operator repairs the membership
    + LEADER_S   by now somebody leads and has committed an entry of its epoch
    + CONVERGE_S by now clients are answered, every voter is whole, and observers have what is committed
    failover     in most runs a minority, with the leader, goes for good: the others must go on, and soon
    end          all are back; clients are answered, and all members have applied what was ever committed

`Stack` is how a node is built, and how its disk is harmed: `core_node` or `driver_node`.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from random import Random
from typing import Protocol

from simulation.checkers import RaftChecker
from simulation.cluster import Cluster, Program, Station
from simulation.more_faults import MORE_FAULTS, draw_more_steps
from simulation.nemesis import Nemesis, Undo, draw_plan
from simulation.observers import OBSERVER_NODES, catch_up_s, observer_program
from simulation.opening_faults import OPENING_FAULTS, draw_opening_steps
from simulation.run_result import Result, Shape, Symptom, draw_shape
from simulation.workload import ClientChecker, Clients
from tidelog.model.errors import CorruptStateError, LostStateError, TidelogError
from tidelog.model.ids import NodeId
from tidelog.raft.effects import Role
from tidelog.raft.membership import DIRECTORY_ID_BYTES, Member, Membership
from tidelog.world.simulated import Latency, MachineDied, SimulationError, SimWorld
from tidelog.world.simulated.disk import SimDevice
from tidelog.world.simulated.store import SimStoreDevice

LEADER_S = 15.0
CONVERGE_S = 60.0
FAILOVER_TIMEOUTS = 6
"""How many of the longest election timeouts a healthy majority may take to find a leader."""
OPERATIONS_AFTER = 6
REPAIR_EVERY_S = 0.25
CLIENT_NODES = (NodeId(101), NodeId(102))
"""Two machines with clients: a partition may leave some on either side."""
REFUSALS = (LostStateError, CorruptStateError)


class Stack(Protocol):
    """How a node of this kind is built, and what can happen to what it stores."""

    def program(self, simulation: "RaftSimulation") -> Program: ...

    def attach(self, station: Station) -> None: ...

    def stall_disk(self, station: Station, *, everything: bool) -> Undo: ...

    def slow_disk(self, station: Station, latency: Latency) -> Undo: ...

    def fill_disk(self, station: Station, draw: Random) -> Undo: ...

    def fail_sync(self, station: Station, draw: Random) -> Undo: ...

    def is_suspect(self, station: Station) -> bool:
        """An error of its disk is to come, after which it may trust nothing that it has not recorded as durable."""
        ...

    def devices(self, station: Station, draw: Random) -> tuple[SimDevice, SimStoreDevice]:
        """A disk of this node and its state store, if they are simulated."""
        ...

    def damage(self, station: Station, draw: Random) -> str: ...

    def rot(self, station: Station, draw: Random, kind: str) -> str | None:
        """Bits of its `log`, of a `snapshot` or of the `newest snapshot` change while it runs; None if it has none."""
        ...

    def is_rotten(self, station: Station) -> bool:
        """It runs on files that have rotted since it started: it shows when they are read, which may be never."""
        ...

    def crash_at(self, station: Station, draw: Random, *, is_vote: bool) -> Undo:
        """Cut its power in the middle of a write soon: with `is_vote`, of the next epoch or vote."""
        ...


class RaftSimulation:
    symptom: Symptom | None = None
    """Of the first failure, unless it is a crash."""
    membership_changes = 0
    look_every_s = 0.0
    """Virtual time between two looks at a condition that has to come true; 0: after every event."""

    def __init__(
        self, world: SimWorld, seed: int, shape: Shape, stack: Stack, *, only: Collection[int] | None = None
    ) -> None:
        self.world = world
        self.seed = seed
        self.shape = shape
        self.stack = stack
        self.checker = RaftChecker(self.fail, world.scheduler.trace)
        self.cluster = Cluster(world)
        self._ids = world.random("ids")
        program = stack.program(self)
        nodes = [NodeId(number) for number in range(1, shape.voters + shape.spares + 1)]
        self.stations = [self.cluster.add(f"n{node}", node, program) for node in nodes]
        for station in self.stations:
            self.new_directory(station)
            stack.attach(station)
        founders = self.stations[: shape.voters]
        self.founding = Membership(tuple(Member(s.node_id, s.durable["directory"]) for s in founders))
        for station in founders:
            station.durable["founding"] = self.founding
        self.clients_checker = ClientChecker(self.checker, self.fail)
        self.clients = [
            Clients(
                self.clients_checker,
                nodes,
                world.random(f"workload/{node}"),
                count=shape.clients,
                pause_s=shape.client_pause_s,
                reads=shape.reads,
                may_only_read=node != CLIENT_NODES[0],
            )
            for node in CLIENT_NODES
        ]
        for node, clients in zip(CLIENT_NODES, self.clients, strict=True):
            self.cluster.add(f"c{node}", node, clients.run)
        watch = observer_program(nodes, self.checker, self.fail)
        self.observers = [self.cluster.add(f"o{node}", node, watch) for node in OBSERVER_NODES[: shape.observers]]
        self.cluster.network.latency = shape.latency
        plan = draw_plan(world.random("faults"), until_s=shape.fault_s)
        plan += draw_more_steps(world.random("more-faults"), plan, until_s=shape.fault_s, observers=shape.observers)
        if shape.stack == "driver":
            plan += draw_opening_steps(world.random("opening"), plan, from_s=0.0, until_s=shape.fault_s)
        self.plan = [step for step in plan if only is None or step.number in only]
        self.nemesis = Nemesis(self, self.plan, (*MORE_FAULTS, *OPENING_FAULTS))

    def fail(self, who: str, what: str) -> None:
        """For checkers."""
        if not self.world.scheduler.failures:
            self.symptom = Symptom.CHECKER
            self.world.scheduler.fail(who, what, None)

    def new_directory(self, station: Station) -> None:
        station.durable["directory"] = self._ids.randbytes(DIRECTORY_ID_BYTES)

    # -- the run

    @property
    def acknowledged(self) -> int:
        return len(self.clients_checker.acknowledged)

    @property
    def reads(self) -> int:
        return self.clients_checker.reads

    @property
    def faults(self) -> dict[str, int]:
        """How often each was done."""
        return self.nemesis.counts

    @property
    def counts(self) -> dict[str, int]:
        """For tests that something was there to check."""
        return {}

    def run(self) -> None:
        for station in self.cluster.stations.values():
            station.start()
        self.world.run_for(self.shape.fault_s)
        self.world.scheduler.trace("nemesis", "all faults end")
        self.nemesis.stop()
        self._restart_rotten()
        self.cluster.heal()
        repair = self.world.loop.create_task(self._repair())
        self._demand("nobody leads", self._is_led, LEADER_S)
        self._demand_operations()
        self._demand("the membership is not whole", self._is_repaired, CONVERGE_S)
        self._demand_observers()
        if self.shape.failover is not None:
            self._fail_over(self.shape.failover)
        for clients in self.clients:
            clients.is_stopping = True
        self._demand_operations()
        self._demand("the membership is not whole", self._is_repaired, CONVERGE_S)
        self._demand("members have not applied what is committed", self._has_converged, CONVERGE_S)
        self._demand_observers()
        repair.cancel()
        self.clients_checker.check_end()

    def _demand_operations(self) -> None:
        for clients in self.clients:
            clients.must_do = OPERATIONS_AFTER
        answered = lambda: all(clients.must_do <= 0 for clients in self.clients)  # noqa: E731
        self._demand("operations are not answered", answered, CONVERGE_S)

    def _demand_observers(self) -> None:
        """Each observer has, in time, all that is committed now."""
        if not self.observers:
            return
        end = len(self.checker.history)

        def have_caught_up() -> bool:
            return all(s.app is not None and s.app.observer.offset >= end for s in self.observers)

        self._demand(f"observers do not get {end} entries", have_caught_up, catch_up_s(len(self.stations)))

    def _restart_rotten(self) -> None:
        """Files that have rotted under a running node are read again before the group may lose anybody else."""
        for station in self.stations:
            if self.stack.is_rotten(station):
                self.world.scheduler.trace("nemesis", f"{station.name} has rotten files and is started again")
                station.kill()

    def _fail_over(self, kind: str) -> None:
        """A minority of the voters, the leader among them, is gone for good: the others must go on without it."""
        leader, membership = self.checker.leader_now(), self.membership()
        if leader is None or membership is None or len(membership.voters) < 3:
            return
        most = (len(membership.voters) - 1) // 2
        others = [member.node for member in membership.voters if member.node != leader[0]]
        gone = [self.cluster.station(node) for node in [leader[0], *others][:most]]
        links = [(s.node_id, o.node_id) for s in gone for o in self.cluster.stations.values() if o is not s]
        self.world.scheduler.trace("nemesis", f"for good: {kind} {[station.name for station in gone]}")
        for station in gone:
            if kind == "kill":
                station.kill()
            elif kind == "pause":
                station.pause()
        if kind == "isolate":
            for source, target in links:
                self.cluster.network.block(source, target)
                self.cluster.network.block(target, source)
        nodes = [station.node_id for station in gone]
        leader_s = FAILOVER_TIMEOUTS * self.shape.raft.election_timeout_max_ms / 1000 + 1.0
        # Two who need each other may have to wait until keep-alive finds that their stream is dead (seed 5613).
        leader_s += self.cluster.network.keepalive.high_s
        # With one entry an append and one append in flight, as some runs have it, a backlog takes a round trip for each
        # of its entries, and the new leader commits nothing of its own before that (seed 20565).
        rest = [self.cluster.station(m.node).app for m in membership.voters if self.cluster.station(m.node) not in gone]
        lag = max((leader[1].log.end - app.machine.offset for app in rest if app is not None), default=0)
        leader_s += lag * 2 * (self.shape.latency.high_s + self.shape.disk_latency.high_s)
        self._demand("nobody leads in the place of who is gone", lambda: self._is_led_without(nodes), leader_s)
        self._demand_operations()
        self._demand_observers()
        self.world.scheduler.trace("nemesis", "they are back")
        self.cluster.heal()

    def _is_led_without(self, gone: list[NodeId]) -> bool:
        leader = self.checker.leader_now()
        return leader is not None and leader[0] not in gone and self._is_led()

    def _demand(self, what: str, condition: Callable[[], bool], timeout_s: float) -> None:
        try:
            self.world.run_until(condition, timeout=timeout_s, every_s=self.look_every_s)
        except SimulationError as error:
            if self.world.scheduler.failures:
                raise
            self.symptom = Symptom.PROGRESS
            states = "; ".join([*map(self._describe, self.stations), *map(_describe_observer, self.observers)])
            raise SimulationError(f"{what} {timeout_s} s after the healing ({error}): {states}") from None

    def _describe(self, station: Station) -> str:
        app = station.app
        if app is None:
            return f"{station.name} down"
        core = app.core
        return (
            f"{station.name} {core.role.value} epoch {core.epoch} leader {core.leader} log {core.log.start}.."
            f"{core.log.end} commit {core.commit} applied {app.machine.offset} "
            f"voters {[m.node for m in core.log.membership.voters]}"
            + (f" recovering to {core.recovering_until}" if core.recovering_until is not None else "")
        )

    def _is_led(self) -> bool:
        leader = self.checker.leader_now()
        return (
            leader is not None
            and leader[1].leader_state is not None
            and leader[1].commit > leader[1].leader_state.epoch_start
        )

    def _is_repaired(self) -> bool:
        return self.is_whole() and self.next_repair() is None

    def _has_converged(self) -> bool:
        leader = self.checker.leader_now()
        if leader is None:
            return False
        end = leader[1].log.end
        members = (*leader[1].log.membership.voters, *leader[1].log.membership.learners)
        return leader[1].commit == end == len(self.checker.history) and all(
            (app := self.cluster.station(member.node).app) is not None and app.machine.offset == end
            for member in members
        )

    # -- membership, as an operator sees it

    @property
    def quorum(self) -> list[Station]:
        """Machines that are voters or may become one."""
        return self.stations

    def membership(self) -> Membership | None:
        """The one in force, if it is committed and its leader is at work."""
        leader = self.checker.leader_now()
        if leader is None:
            return None
        core = leader[1]
        if core.leader_state is None or core.commit <= core.leader_state.epoch_start:
            return None
        if any(station.app is not None and station.app.core.epoch > core.epoch for station in self.quorum):
            return None  # it leads no more and does not know it: another may have changed the membership
        log = core.log
        return log.membership if len(log.memberships) == 1 or log.membership_offset < core.commit else None

    def _is_there(self, member: Member) -> bool:
        station = self.cluster.station(member.node)
        return bool(station.durable.get("directory") == member.directory)

    def is_whole(self) -> bool:
        """Every voter runs with all that it ever promised."""
        membership = self.membership()
        if membership is None:
            return False
        return all(map(self._is_sound, membership.voters))

    def _is_sound(self, member: Member) -> bool:
        station = self.cluster.station(member.node)
        app = station.app
        return (
            self._is_there(member)
            and app is not None
            and app.core.recovering_until is None
            and not self.stack.is_suspect(station)
        )

    def is_changing(self) -> bool:
        """A change of the membership was asked for and may still be made, by a leader that is paused now, too."""
        return any(station.context is not None and station.context.asked for station in self.quorum)

    def is_whole_but(self, node: NodeId) -> bool:
        """All other voters are whole, and a majority."""
        membership = self.membership()
        if membership is None or self.is_changing():
            return False
        others = [member for member in membership.voters if member.node != node]
        return len(others) >= 2 and all(map(self._is_sound, others))

    def can_lose_voter(self) -> bool:
        membership = self.membership()
        return membership is not None and len(membership.voters) >= 3 and not self.is_changing()

    def next_repair(self) -> Member | NodeId | None:
        """A member to add, or one to remove, until all voters exist and there are as many as in the beginning."""
        membership = self.membership()
        if membership is None:
            return None
        for member in (*membership.learners, *membership.voters):
            if not self._is_there(member) and (membership.voter(member.node) is None or len(membership.voters) > 1):
                return member.node
        if membership.learners:
            return None
        if len(membership.voters) < self.shape.voters:
            for station in self.quorum:
                if membership.voter(station.node_id) is None and station.is_up:
                    return Member(station.node_id, station.durable["directory"])
        return None

    async def _repair(self) -> None:
        while True:
            await asyncio.sleep(REPAIR_EVERY_S)
            for station in self.quorum:
                if station.has_refused and isinstance(station.last_error, REFUSALS):
                    # It says that it must not run on what it has: an operator gives it a new disk.
                    self.world.scheduler.trace(station.name, "is given a new disk")
                    self.wipe(station)
            wanted = self.next_repair()
            if isinstance(wanted, Member):
                self._change(add=wanted)
            elif wanted is not None:
                self._change(remove=wanted)

    def _change(
        self, station: Station | None = None, *, add: Member | None = None, remove: NodeId | None = None
    ) -> None:
        leader = self.checker.leader_now()
        if station is None and leader is not None:
            station = self.cluster.station(leader[0])
        if station is None or station.context is None or station.app is None or station.context.node.loop.is_held:
            return
        app, context = station.app, station.context
        context.asked += 1
        what = f"add n{add.node}" if add is not None else f"remove n{remove}"

        async def change() -> None:
            try:
                await app.change_membership(add=add, remove=remove)
            except TidelogError as error:
                self.world.scheduler.trace("operator", f"{what}: {error}")
            else:
                self.membership_changes += 1
                self.world.scheduler.trace("operator", f"{what}: done")
            finally:
                context.asked -= 1

        self.world.scheduler.trace("operator", f"{what}, asks {station.name}")
        station.context.node.spawn(change())

    def operator_adds(self, draw: Random) -> Undo | None:
        membership = self.membership()
        if membership is None:
            return None
        gone = [m.node for m in (*membership.learners, *membership.voters) if not self._is_there(m)]
        if self.is_changing():
            return None
        if gone:
            self._change(remove=gone[0])
            return lambda: None
        candidates = [s for s in self.quorum if membership.voter(s.node_id) is None and s.is_up]
        if not candidates:
            return None
        station = draw.choice(candidates)
        self._change(add=Member(station.node_id, station.durable["directory"]))
        return lambda: None

    def ask_for_any_change(self, draw: Random) -> None:
        """Ask a node that thinks it leads, whatever is under way."""
        leaders = [s for s in self.quorum if s.app is not None and s.app.core.role is Role.LEADER]
        if not leaders:
            return
        station = draw.choice(leaders)
        membership = station.app.core.log.membership
        others = [s for s in self.quorum if membership.voter(s.node_id) is None]
        if others and (len(membership.voters) < 3 or draw.random() < 0.5):
            other = draw.choice(others)
            self._change(station, add=Member(other.node_id, other.durable["directory"]))
        elif len(membership.voters) > 2:
            self._change(station, remove=draw.choice(membership.voters).node)

    def operator_removes(self, draw: Random) -> Undo | None:
        """One voter leaves: any, or the leader. Not while one is missing: a second one would take the majority away."""
        membership, leader = self.membership(), self.checker.leader_now()
        if membership is None or leader is None or not self.is_whole() or len(membership.voters) < 2:
            return None
        if self.is_changing():
            return None
        if len(membership.voters) == 2 and draw.random() < 0.5:
            return None
        node = leader[0] if draw.random() < 0.4 else draw.choice(membership.voters).node
        self._change(remove=node)
        return lambda: None

    def wipe(self, station: Station) -> None:
        """An empty disk, which joins the group: it does not found it again."""
        station.kill()
        station.wipe()
        station.last_error = None
        self.new_directory(station)
        self.stack.attach(station)
        station.start()


def _describe_observer(station: Station) -> str:
    if station.app is None:
        return f"{station.name} down"
    observer = station.app.observer
    return f"{station.name} at {observer.offset} follows {observer.source}, which says {observer.state}"


def run_seed(seed: int, *, stack: str | None = None, only: Collection[int] | None = None) -> Result:
    """One run, and how it ended. Nothing that goes wrong inside of it escapes."""
    if stack == "metadata":
        from simulation.metadata_sim import run_metadata_seed

        return run_metadata_seed(seed, only=only)
    if stack == "brokers":
        from simulation.broker_sim import run_broker_seed

        return run_broker_seed(seed, only=only)
    if stack == "lab":
        from simulation.lab_sim import run_lab_seed

        return run_lab_seed(seed, only=only)
    if stack == "product":
        from simulation.broker_sim import run_product_seed

        return run_product_seed(seed, only=only)
    if stack == "groups":
        from simulation.groups_sim import run_groups_seed

        return run_groups_seed(seed, only=only)
    if stack == "transactions":
        from simulation.transactions_sim import run_transactions_seed

        return run_transactions_seed(seed, only=only)
    from simulation.stacks import make_stack

    shape = draw_shape(seed, stack)
    return run_simulation(
        seed, shape, lambda world: RaftSimulation(world, seed, shape, make_stack(shape.stack), only=only)
    )


@contextmanager
def silent_logs() -> Iterator[None]:
    """What nodes log under faults is meant for operators; the trace tells more."""
    logger = logging.getLogger("tidelog")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def run_simulation(seed: int, shape: Shape, make: Callable[[SimWorld], RaftSimulation]) -> Result:
    """One run, and how it ended. Nothing that goes wrong inside of it escapes."""
    failure: str | None = None
    cause: BaseException | None = None
    world = SimWorld(seed)
    simulation: RaftSimulation | None = None
    try:
        with silent_logs(), world:
            simulation = make(world)
            simulation.run()
    except (Exception, MachineDied) as error:
        failure = f"{type(error).__name__}: {error}" if not isinstance(error, SimulationError) else str(error)
        cause = error.__cause__ if isinstance(error, SimulationError) else error
    assert simulation is not None
    scheduler = world.scheduler
    symptom = None if failure is None else simulation.symptom or Symptom.CRASH
    return Result(
        seed=seed,
        failure=failure,
        virtual_s=scheduler.now_ns / 1e9,
        events=scheduler.events_run,
        digest=scheduler.digest,
        plan=simulation.plan,
        shape=shape,
        acknowledged=simulation.acknowledged,
        reads=simulation.reads,
        elections=simulation.checker.elections,
        faults=simulation.faults,
        counts=simulation.counts,
        coverage=simulation.nemesis.coverage.counts,
        trace=list(scheduler.trace_lines),
        symptom=symptom,
        error=cause if symptom is Symptom.CRASH else None,
    )
