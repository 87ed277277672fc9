"""Faults of the clients of the Kafka API, on top of the plan of a run, from a random stream of their own."""

from random import Random
from typing import TYPE_CHECKING

from simulation.broker_faults import BrokerNemesis
from simulation.cluster import Station
from simulation.nemesis import FaultRow, Nemesis, PlanStep, Undo, draw_steps, kill_machine, numbered_from, pause_machine

if TYPE_CHECKING:
    from simulation.kafka_workload import KafkaClients

FIRST_KAFKA_STEP = 6_000


def _clients(nemesis: Nemesis) -> "KafkaClients":
    assert isinstance(nemesis, BrokerNemesis)
    kafka = nemesis.simulation.kafka
    assert kafka is not None, "the run has them"
    return kafka


def _station(nemesis: Nemesis, draw: Random) -> Station:
    return draw.choice(_clients(nemesis).stations)


def cut_kafka_client(nemesis: Nemesis, draw: Random) -> Undo:
    """Its connections break now, or are silent from now on; new ones work."""
    station, is_silent = _station(nemesis, draw), draw.random() < 0.4
    nemesis.trace(f"the connections of {station.name} {'are silent' if is_silent else 'break'}")
    act = nemesis.network.silence_streams if is_silent else nemesis.network.cut_streams
    for broker in _clients(nemesis).simulation.brokers:
        if draw.random() < 0.7:
            act(station.node_id, broker.node_id)
    return lambda: None


def kill_kafka_client(nemesis: Nemesis, draw: Random) -> Undo | None:
    return kill_machine(nemesis, _station(nemesis, draw))


def pause_kafka_client(nemesis: Nemesis, draw: Random) -> Undo | None:
    """It reads nothing, and does not know that time goes on."""
    return pause_machine(nemesis, _station(nemesis, draw))


def age_offsets(nemesis: Nemesis, _draw: Random) -> Undo | None:
    """The wall clocks of all brokers jump past the retention of offsets."""
    groups = _clients(nemesis).groups
    if groups is None or not groups.plan.ages:
        return None
    nemesis.trace("the clocks of all brokers jump past the retention of offsets")
    groups.jump()
    return lambda: None


KAFKA_FAULTS: tuple[FaultRow, ...] = (
    ("cut_kafka_client", 4, cut_kafka_client),
    ("kill_kafka_client", 2, kill_kafka_client),
    ("pause_kafka_client", 2, pause_kafka_client),
    ("age_offsets", 2, age_offsets),
)


def draw_kafka_plan(draw: Random, *, from_s: float, until_s: float) -> list[PlanStep]:
    steps = draw_steps(
        draw,
        {name: weight * draw.choice((0, 1, 1, 3)) + 0.1 for name, weight, _ in KAFKA_FAULTS},
        mean_s=draw.choice((1.0, 2.0)),
        first_s=from_s + draw.uniform(0.0, 1.0),
        until_s=until_s,
        least_s=0.1,
        calm=0.4,
        long=("kill_kafka_client", "pause_kafka_client"),
    )
    return numbered_from(FIRST_KAFKA_STEP, steps)
