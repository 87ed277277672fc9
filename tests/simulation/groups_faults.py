"""Faults of the runs with consumer groups: those of the brokers, and those that strike members and coordinators.

Bits of stored batches do not change in what groups read: a consumer notices by the CRC, and what becomes of it is for
the other topics of the brokers' runs.
"""

from random import Random
from typing import TYPE_CHECKING

from simulation import broker_faults
from simulation.broker_faults import BrokerNemesis
from simulation.cluster import Station
from simulation.consumer_groups import ConsumerGroups
from simulation.nemesis import (
    FaultRow,
    Nemesis,
    PlanStep,
    Undo,
    block,
    draw_steps,
    kill_machine,
    numbered_from,
    pause_machine,
)

if TYPE_CHECKING:
    from simulation.broker_sim import BrokerSimulation

CALM = 0.25
FIRST_GROUP_STEP = 3_000
"""Of the steps that come on top of another plan."""


def _simulation(nemesis: Nemesis) -> "BrokerSimulation":
    assert isinstance(nemesis, BrokerNemesis)
    return nemesis.simulation


def _groups(nemesis: Nemesis) -> ConsumerGroups:
    groups = _simulation(nemesis).groups
    assert groups is not None, "the run has groups"
    return groups


def _member(nemesis: Nemesis, draw: Random) -> Station:
    return draw.choice(_groups(nemesis).all_stations)


def kill_member(nemesis: Nemesis, draw: Random) -> Undo | None:
    return kill_machine(nemesis, _member(nemesis, draw))


def pause_member(nemesis: Nemesis, draw: Random) -> Undo | None:
    """Long enough to be put out, mostly; when it goes on it does not know."""
    return pause_machine(nemesis, _member(nemesis, draw))


def cut_off_member(nemesis: Nemesis, draw: Random) -> Undo:
    """From all brokers, or from some, or one way; they may notice at once, so that it is put out while it works on."""
    me = _member(nemesis, draw).node_id
    brokers = [station.node_id for station in _simulation(nemesis).brokers]
    some = draw.sample(brokers, draw.choice((1, len(brokers), len(brokers))))
    ways = draw.choice(("both", "both", "to", "from"))
    links = [(me, other) for other in some if ways != "from"] + [(other, me) for other in some if ways != "to"]
    nemesis.trace(f"member {me} is cut off from {sorted(some)}, {ways}")
    undo = block(nemesis, links)
    if draw.random() < 0.7:
        for other in some:
            nemesis.network.cut_streams(me, other)
    return undo


def cut_member_streams(nemesis: Nemesis, draw: Random) -> Undo:
    """The streams of one member break now; it may come back at once."""
    me = _member(nemesis, draw).node_id
    nemesis.trace(f"the streams of member {me} break")
    for station in _simulation(nemesis).brokers:
        nemesis.network.cut_streams(me, station.node_id)
    return lambda: None


def clock_of_member(nemesis: Nemesis, draw: Random) -> Undo:
    station = _member(nemesis, draw)
    station.machine.set_clock_rate(draw.choice((0.25, 0.5, 2.0, 4.0)))

    def undo() -> None:
        station.machine.set_clock_rate(1.0)

    return undo


def kill_coordinator(nemesis: Nemesis, draw: Random) -> Undo | None:
    """With or without a member that dies at the same time."""
    station = _groups(nemesis).coordinator_station(draw)
    if station is None or not station.is_up:
        return None
    gone = [station]
    if draw.random() < 0.4:
        gone.append(_member(nemesis, draw))
    nemesis.trace(f"kill the coordinator {' and '.join(one.name for one in gone)}")
    for one in gone:
        one.kill()

    def undo() -> None:
        for one in gone:
            one.start()

    return undo


def strand_coordinator(nemesis: Nemesis, draw: Random) -> Undo | None:
    """Members reach it, controllers and followers do not, or only controllers: it is replaced and does not know."""
    station = _groups(nemesis).coordinator_station(draw)
    if station is None:
        return None
    me, simulation = station.node_id, _simulation(nemesis)
    nodes = [other.node_id for other in simulation.stations if other is not station]
    above = [node for node in simulation.controllers if node != me]
    some = draw.choice((nodes, nodes, above))
    nemesis.trace(f"the coordinator {station.name} is stranded: no way between it and {some}")
    return block(nemesis, [link for node in some for link in ((me, node), (node, me))])


def expel_member(nemesis: Nemesis, draw: Random) -> Undo | None:
    """An operator removes a member that lives: it hears of it, and joins again."""
    station = _member(nemesis, draw)
    what = _groups(nemesis).expel(station)
    if what is None:
        return None
    nemesis.trace(what)
    return lambda: None


GROUP_FAULTS: tuple[FaultRow, ...] = (
    ("kill_member", 5, kill_member),
    ("pause_member", 5, pause_member),
    ("cut_off_member", 4, cut_off_member),
    ("cut_member_streams", 2, cut_member_streams),
    ("clock_of_member", 1, clock_of_member),
    ("kill_coordinator", 5, kill_coordinator),
    ("strand_coordinator", 5, strand_coordinator),
    ("expel_member", 3, expel_member),
)
FAULTS: tuple[FaultRow, ...] = (
    *(row for row in broker_faults.FAULTS if row[0] != "flip_bit"),
    *GROUP_FAULTS,
)
LONG = (*broker_faults.LONG, "pause_member", "cut_off_member", "strand_coordinator")


def draw_groups_plan(draw: Random, *, from_s: float, until_s: float) -> list[PlanStep]:
    weights = {name: weight * draw.choice((0, 1, 1, 4)) for name, weight, _ in FAULTS}
    for name, weight, _ in GROUP_FAULTS:
        weights[name] = 2 * weight * draw.choice((0, 1, 1, 4))
    weights["kill_member"] += 1
    mean_s = draw.choice((0.6, 1.2))
    first_s = from_s + draw.uniform(0.0, 0.5)
    return draw_steps(draw, weights, mean_s=mean_s, first_s=first_s, until_s=until_s, least_s=0.1, calm=CALM, long=LONG)


def draw_group_steps(draw: Random, *, from_s: float, until_s: float) -> list[PlanStep]:
    """On top of the plan of the brokers."""
    weights = {name: weight * draw.choice((0, 1, 1, 4)) for name, weight, _ in GROUP_FAULTS}
    weights["kill_member"] += 1
    first_s = from_s + draw.uniform(0.0, 1.0)
    steps = draw_steps(
        draw,
        weights,
        mean_s=draw.choice((1.0, 2.0)),
        first_s=first_s,
        until_s=until_s,
        least_s=0.1,
        calm=0.5,
        long=LONG,
    )
    return numbered_from(FIRST_GROUP_STEP, steps)
