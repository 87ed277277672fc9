"""Faults of the runs with transactions: those of the brokers, those that strike clients and coordinators, those that
wait for a state of a transaction (`transactions_strikes`). Late and repeated requests: `transactions_postman`."""

from __future__ import annotations

from random import Random

from simulation import broker_faults
from simulation.cluster import Station
from simulation.nemesis import FaultRow, Nemesis, PlanStep, Undo, block, draw_steps, start_of
from simulation.transactions_strikes import STRIKES, simulation_of

CALM = 0.25


def _client(nemesis: Nemesis, draw: Random) -> Station:
    return draw.choice(simulation_of(nemesis).struck)


def kill_client(nemesis: Nemesis, draw: Random) -> Undo | None:
    station = _client(nemesis, draw)
    if not station.is_up:
        return None
    nemesis.trace(f"kill {station.name}")
    station.kill()
    return start_of(station)


def pause_client(nemesis: Nemesis, draw: Random) -> Undo | None:
    """Long enough for its transaction to be aborted, mostly; when it goes on it does not know."""
    station = _client(nemesis, draw)
    if not station.is_up or station.machine.node.loop.is_held:  # type: ignore[union-attr]
        return None
    nemesis.trace(f"pause {station.name}")
    station.pause()
    return station.resume


def cut_off_client(nemesis: Nemesis, draw: Random) -> Undo:
    me = _client(nemesis, draw).node_id
    brokers = [station.node_id for station in simulation_of(nemesis).brokers]
    some = draw.sample(brokers, draw.choice((1, len(brokers), len(brokers))))
    ways = draw.choice(("both", "both", "to", "from"))
    links = [(me, other) for other in some if ways != "from"] + [(other, me) for other in some if ways != "to"]
    nemesis.trace(f"client {me} is cut off from {sorted(some)}, {ways}")
    undo = block(nemesis, links)
    if draw.random() < 0.7:
        for other in some:
            nemesis.network.cut_streams(me, other)
    return undo


def kill_coordinator(nemesis: Nemesis, draw: Random) -> Undo | None:
    """With or without a client that dies at the same time."""
    stations = [station for station in simulation_of(nemesis).coordinators() if station.is_up]
    if not stations:
        return None
    gone = [draw.choice(stations)]
    if draw.random() < 0.3:
        gone.append(_client(nemesis, draw))
    nemesis.trace(f"kill the coordinator {' and '.join(one.name for one in gone)}")
    for one in gone:
        one.kill()

    def undo() -> None:
        for one in gone:
            one.start()

    return undo


def strand_coordinator(nemesis: Nemesis, draw: Random) -> Undo | None:
    """Clients reach it, controllers and followers do not, or only controllers: it is replaced and does not know."""
    stations = simulation_of(nemesis).coordinators()
    if not stations:
        return None
    station, simulation = draw.choice(stations), simulation_of(nemesis)
    me = station.node_id
    nodes = [other.node_id for other in simulation.stations if other is not station]
    above = [node for node in simulation.controllers if node != me]
    some = draw.choice((nodes, nodes, above))
    nemesis.trace(f"the coordinator {station.name} is stranded: no way between it and {some}")
    return block(nemesis, [link for node in some for link in ((me, node), (node, me))])


TRANSACTION_FAULTS: tuple[FaultRow, ...] = (
    ("kill_client", 5, kill_client),
    ("pause_client", 5, pause_client),
    ("cut_off_client", 4, cut_off_client),
    ("kill_tx_coordinator", 5, kill_coordinator),
    ("strand_tx_coordinator", 5, strand_coordinator),
    *STRIKES,
)
FAULTS: tuple[FaultRow, ...] = (
    *(row for row in broker_faults.FAULTS if row[0] != "flip_bit"),
    *TRANSACTION_FAULTS,
)
LONG = (*broker_faults.LONG, "pause_client", "cut_off_client", "strand_tx_coordinator", *(name for name, *_ in STRIKES))


def draw_transactions_plan(draw: Random, *, from_s: float, until_s: float) -> list[PlanStep]:
    weights = {name: weight * draw.choice((0, 1, 1, 4)) for name, weight, _ in FAULTS}
    for name, weight, _ in TRANSACTION_FAULTS:
        weights[name] = 2 * weight * draw.choice((0, 1, 1, 4))
    weights["kill_client"] += 1
    first_s = from_s + draw.uniform(0.0, 0.5)
    return draw_steps(
        draw,
        weights,
        mean_s=draw.choice((0.25, 0.6)),
        first_s=first_s,
        until_s=until_s,
        least_s=0.1,
        calm=CALM,
        long=LONG,
    )
