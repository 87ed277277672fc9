"""Faults that wait for a state of a transaction, and strike then: what is rare by chance, and is where designs fail.

    strike_decided    an outcome is decided, and markers are on their way: the coordinator goes, or a leader
    strike_marker     a leader loses its followers, and goes when it has a marker that nobody else has
    strike_open       a transaction is open: its coordinator and a client go
    strike_pending    a transaction has pending offsets: the coordinator of the group goes
    lose_answers      a client gets no answers any more; when its commit is decided, it goes

Each looks every few milliseconds for as long as the fault lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import TYPE_CHECKING, TypeVar

from simulation.broker_faults import BrokerNemesis
from simulation.broker_node import BrokerApp
from simulation.cluster import Station
from simulation.nemesis import FaultRow, Nemesis, Undo, block
from simulation.transactions_joint import Owner
from simulation.transactions_workload import Pipeline
from tidelog.coordinator.transactions.queries import all_partitions
from tidelog.coordinator.transactions.records import Status, Transaction
from tidelog.model.ids import NodeId
from tidelog.world.simulated import Loss

if TYPE_CHECKING:
    from simulation.transactions_sim import TransactionsSimulation

T = TypeVar("T")

LOOK_S = 0.003


def simulation_of(nemesis: Nemesis) -> TransactionsSimulation:
    from simulation.transactions_sim import TransactionsSimulation  # it imports this module

    assert isinstance(nemesis, BrokerNemesis)
    assert isinstance(nemesis.simulation, TransactionsSimulation), "the run has transactions"
    return nemesis.simulation


class _Strike:
    """Looks for something, strikes it once, and undoes that at the end of the fault."""

    def __init__(self, nemesis: Nemesis, draw: Random) -> None:
        self.nemesis = nemesis
        self.simulation = simulation_of(nemesis)
        self.draw = draw
        self._undo: list[Undo] = []
        self._is_over = False

    def when(self, find: Callable[[], T | None], strike: Callable[[T], None]) -> Undo:
        def look() -> None:
            if self._is_over or self.nemesis.is_over:
                return
            found = find()
            if found is None:
                self.simulation.world.loop.call_later(LOOK_S, look)
            else:
                strike(found)

        look()
        return self.end

    def end(self) -> None:
        self._is_over = True
        while self._undo:
            self._undo.pop()()

    def block(self, links: list[tuple[NodeId, NodeId]]) -> None:
        self._undo.append(block(self.nemesis, links))

    def take_down(self, station: Station) -> None:
        """Kill it, cut its power, or cut it off from all other brokers and controllers."""
        if self._is_over or self.nemesis.is_over or not station.is_up:
            return
        me, kind = station.node_id, self.draw.choice(("kill", "kill", "power", "strand"))
        self.nemesis.trace(f"{station.name} goes: {kind}")
        if kind == "strand" and station in self.simulation.stations:
            others = [other.node_id for other in self.simulation.stations if other is not station]
            self.block([link for other in others for link in ((me, other), (other, me))])
            return
        if kind == "power":
            station.lose_power(self.draw.choice(list(Loss)))
        else:
            station.kill()
        self._undo.append(station.start)

    def leaders_of(self, transaction: Transaction) -> list[Station]:
        """Of its partitions."""
        image = self.simulation.metadata.image
        partitions = [
            image.partition(each.topic_id, each.partition)
            for each in sorted(all_partitions(transaction), key=lambda each: (each.topic_id.int, each.partition))
        ]
        leaders = [each.leader for each in partitions if each is not None and each.leader >= 0]
        return [self.simulation.cluster.station(NodeId(leader)) for leader in leaders]

    def transactions(self) -> Iterator[tuple[Station, str, Transaction]]:
        """As their coordinators have committed them."""
        for station in self.simulation.brokers:
            app: BrokerApp | None = self.simulation.broker(station)
            for shard in () if app is None else app.broker.transactions.leading_shards():
                yield from ((station, who, one) for who, one in sorted(shard.state.ids.items()))


def strike_decided(nemesis: Nemesis, draw: Random) -> Undo:
    strike = _Strike(nemesis, draw)
    is_coordinator = draw.random() < 0.5
    nemesis.trace(f"{'the coordinator' if is_coordinator else 'a leader'} goes when an outcome is decided")

    def find() -> tuple[Station, Transaction] | None:
        return next(((station, one) for station, _, one in strike.transactions() if one.is_ending), None)

    def hit(found: tuple[Station, Transaction]) -> None:
        coordinator, transaction = found
        leaders = strike.leaders_of(transaction)
        strike.take_down(coordinator if is_coordinator or not leaders else draw.choice(leaders))

    return strike.when(find, hit)


def strike_marker(nemesis: Nemesis, draw: Random) -> Undo:
    strike = _Strike(nemesis, draw)
    simulation = strike.simulation
    struck: list[tuple[Station, str, int]] = []
    """The leader, and the transaction."""

    def find() -> Station | None:
        for coordinator, who, one in strike.transactions():
            if struck and struck[0][1:] == (who, one.number) and one.is_ending:
                return struck[0][0]
            if not struck and one.is_open:
                cut_off(coordinator, who, one)
        return None

    def cut_off(coordinator: Station, who: str, one: Transaction) -> None:
        leaders = strike.leaders_of(one)
        if not leaders:
            return
        leader = draw.choice(leaders)
        others = [each for each in simulation.brokers if each not in (leader, coordinator)]
        struck.append((leader, who, one.number))
        nemesis.trace(f"{leader.name} is cut off from {[each.name for each in others]}")
        me = leader.node_id
        strike.block([link for each in others for link in ((me, each.node_id), (each.node_id, me))])

    def hit(leader: Station) -> None:
        simulation.world.loop.call_later(draw.uniform(0.002, 0.03), strike.take_down, leader)

    nemesis.trace("a leader goes with its marker")
    return strike.when(find, hit)


def strike_open(nemesis: Nemesis, draw: Random) -> Undo:
    strike = _Strike(nemesis, draw)
    client = draw.choice(strike.simulation.struck)
    nemesis.trace(f"{client.name} and a coordinator go when a transaction is open")

    def find() -> Station | None:
        return next((station for station, _, one in strike.transactions() if one.is_open and one.partitions), None)

    def hit(coordinator: Station) -> None:
        strike.take_down(client)
        strike.take_down(coordinator)

    return strike.when(find, hit)


def strike_pending(nemesis: Nemesis, draw: Random) -> Undo:
    strike = _Strike(nemesis, draw)
    nemesis.trace("a coordinator of groups goes when offsets are pending")

    def find() -> Station | None:
        for station in strike.simulation.brokers:
            app = strike.simulation.broker(station)
            if app is not None and any(shard.state.open for shard in app.coordinator.leading_shards()):
                return station
        return None

    return strike.when(find, strike.take_down)


def lose_answers(nemesis: Nemesis, draw: Random) -> Undo | None:
    strike = _Strike(nemesis, draw)
    simulation = strike.simulation
    programs: list[Pipeline | Owner] = [*simulation.pipelines, *simulation.owners, *simulation.owners]
    program = draw.choice(programs)
    client = simulation.cluster.station(NodeId(program.number))
    if not client.is_up:
        return None
    is_blocked = False

    def find() -> str | None:
        """First an open transaction, whose answers are blocked; then its decision."""
        nonlocal is_blocked
        for _, who, one in strike.transactions():
            if who != program.owner:
                continue
            if one.is_open and not is_blocked and (one.partitions or one.members) and draw.random() < 0.1:
                is_blocked = True
                nemesis.trace(f"{client.name} gets no answers from now on")
                strike.block([(station.node_id, client.node_id) for station in simulation.brokers])
            elif is_blocked and one.status in (Status.PREPARE_COMMIT, Status.COMPLETE_COMMIT):
                return who
        return None

    def hit(_who: str) -> None:
        strike.take_down(client)

    nemesis.trace(f"{client.name} gets no answers any more, and goes when its commit is decided")
    return strike.when(find, hit)


STRIKES: tuple[FaultRow, ...] = (
    ("strike_decided", 5, strike_decided),
    ("strike_marker", 4, strike_marker),
    ("strike_open", 3, strike_open),
    ("strike_pending", 4, strike_pending),
    ("lose_answers", 6, lose_answers),
)
