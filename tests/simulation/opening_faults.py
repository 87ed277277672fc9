"""Power that is lost while a node opens its files, once or a few times in a row: recovery has to survive itself.

Steps come on top of another plan and are drawn from a random stream of their own.
"""

from collections.abc import Sequence
from random import Random

from simulation.cluster import Station
from simulation.nemesis import FaultRow, Nemesis, PlanStep, Undo
from tidelog.world.simulated import Loss

SHARE = 0.5
"""Of the runs."""
MEAN_S = 2.5
PAUSE_S = 0.05
"""From a crash to the next start."""


def draw_opening_steps(draw: Random, plan: Sequence[PlanStep], *, from_s: float, until_s: float) -> list[PlanStep]:
    """Behind those of `plan`, which stays what it was."""
    steps: list[PlanStep] = []
    first = max((step.number for step in plan), default=-1) + 1
    wanted, at_s = draw.random() < SHARE, from_s + draw.uniform(0.5, 2 * MEAN_S)
    while wanted and at_s < until_s:
        steps.append(PlanStep(first + len(steps), at_s, "crash_while_opening", draw.uniform(0.5, 2.0)))
        at_s += draw.expovariate(1 / MEAN_S)
    return steps


def crash_while_opening(nemesis: Nemesis, draw: Random) -> Undo | None:
    """A node loses power, and again at one of the first changes that its next start makes, up to three times."""
    station = nemesis.one_running(draw)
    if station is None or nemesis.simulation.stack.is_suspect(station):
        return None
    nemesis.trace(f"{station.name} loses power, and again while it starts")
    device, store = nemesis.simulation.stack.devices(station, draw)
    loop, state = nemesis.simulation.world.loop, {"left": draw.choice((1, 1, 2, 3)), "on": True}

    def strike() -> None:
        station.lose_power(draw.choice(list(Loss)))
        state["left"] -= 1
        station.machine.crash_loss = draw.choice(list(Loss))
        if draw.random() < 0.6:
            device.crash_at_operation = device.operations + draw.randrange(1, 25)
        else:
            store.crash_at_commit = draw.randrange(1, 4)
        start(station)

    def start(station: Station) -> None:
        if state["on"]:
            station.start()
            loop.call_later(PAUSE_S, look)

    def look() -> None:
        if not state["on"]:
            return
        if station.is_up:
            loop.call_later(PAUSE_S, look)
        elif state["left"] > 0:
            strike()
        else:
            start(station)

    def undo() -> None:
        state["on"] = False
        device.crash_at_operation = store.crash_at_commit = None
        station.start()

    strike()
    return undo


OPENING_FAULTS: tuple[FaultRow, ...] = (("crash_while_opening", 1, crash_while_opening),)
