"""Faults on top of the plan of `nemesis`: rot under running nodes, and what befalls observers.

They are steps of the plan as all others, but drawn from a random stream of their own: what a seed meant before there
were any of them, it means still. No step is drawn that the run has no use for.
"""

from collections.abc import Sequence
from random import Random

from simulation.cluster import Station
from simulation.nemesis import FaultRow, Nemesis, PlanStep, Undo, block, start_of
from tidelog.model.ids import NodeId
from tidelog.world.simulated import Loss


def draw_more_steps(draw: Random, plan: Sequence[PlanStep], *, until_s: float, observers: int) -> list[PlanStep]:
    """Faults of `MORE_FAULTS`, on top of a plan and drawn from a stream of their own: the plan stays what it was."""
    steps: list[PlanStep] = []
    stormy = any(step.fault == "storm_of_changes" for step in plan)
    for name, mean_s, _ in MORE_FAULTS:
        # Rot destroys stored data: see `draw_plan` on storms.
        wanted = not stormy and draw.random() < 0.6 if name in ROT else observers > 0
        at_s = draw.uniform(0.5, 2 * mean_s)
        while wanted and at_s < until_s:
            lasts_s = draw.uniform(0.5, 2.0) if name in LONG else 0.05 + draw.expovariate(1.0)
            steps.append(PlanStep(len(plan) + len(steps), at_s, name, lasts_s))
            at_s += draw.expovariate(1 / mean_s)
    return steps


SNAPSHOT_S = 0.4
"""A snapshot is taken within this time, most likely."""


def _observer(nemesis: Nemesis, draw: Random) -> Station | None:
    """One that runs."""
    station = draw.choice(nemesis.simulation.observers)
    return None if station.context is None or station.context.node.loop.is_held else station


def rot(nemesis: Nemesis, draw: Random) -> Undo | None:
    """Bits of what a voter has stored change while it runs. Memory serves most of what it is asked for, so it shows
    when a file is read, or at its next start: when this fault ends, when another one strikes it, at the latest when
    all faults end. Until then it is not whole (`Stack.is_suspect`), and no other voter's data is harmed."""
    station = nemesis.victim(draw)
    if station is None or not _rots(nemesis, station, draw, ("log", "log", "snapshot")):
        return None
    context, restarts = station.context, draw.random() < 0.7

    def undo() -> None:
        if restarts and station.context is context:
            station.kill()
            station.start()

    return undo


def _rots(nemesis: Nemesis, station: Station, draw: Random, kinds: Sequence[str]) -> bool:
    """Harm one of these files of a voter whose data may be harmed now."""
    membership = nemesis.simulation.membership()
    # A node that is no voter would not be missed now, but could become one before anybody knows.
    if station.app is None or membership is None or membership.voter(station.node_id) is None:
        return False
    what = nemesis.simulation.stack.rot(station, draw, draw.choice(kinds))
    if what is not None:
        nemesis.trace(f"{station.name}: {what}")
    return what is not None


def rot_what_is_sent(nemesis: Nemesis, draw: Random) -> Undo | None:
    """A follower is cut off until it lags. When it is back, and an observer begins again, the snapshots that the leader
    would send them rot, for a while also each new one, before or while it is sent: those must be refused, and another
    one be sent."""
    simulation = nemesis.simulation
    leader, membership = simulation.checker.leader_now(), simulation.membership()
    if leader is None or membership is None or not simulation.is_whole() or not simulation.can_lose_voter():
        return None
    lagging = draw.choice([member.node for member in membership.voters if member.node != leader[0]])
    raft = [station.node_id for station in simulation.stations if station.node_id != lagging]
    nemesis.trace(f"n{lagging} is cut off until it needs a snapshot")
    unblock = block(nemesis, [link for node in raft for link in ((node, lagging), (lagging, node))])

    def spoil(node: NodeId, times: int) -> None:
        # Of one node only, and again and again: it is not whole after the first time, the others have to be.
        if nemesis.is_over or not simulation.is_whole_but(node) or not simulation.can_lose_voter():
            return
        _rots(nemesis, simulation.cluster.station(node), draw, ("newest snapshot",))
        if times > 1:
            simulation.world.loop.call_later(draw.uniform(0.0, 0.1), spoil, node, times - 1)

    def bring_back() -> None:
        if nemesis.is_over:
            return  # all links work again
        now = simulation.checker.leader_now()
        if now is not None:
            spoil(now[0], draw.randrange(1, 20))
        unblock()
        observer = _observer(nemesis, draw) if simulation.observers else None
        if observer is not None:
            observer.kill()
            observer.durable.clear()
            observer.start()

    def undo() -> None:
        now = simulation.checker.leader_now()
        station = None if now is None else simulation.cluster.station(now[0])
        if nemesis.is_over or station is None or station.context is None or station.context.node.loop.is_held:
            unblock()
            return
        station.app.take_snapshot()  # so that one is needed, if the log is not kept behind it
        simulation.world.loop.call_later(SNAPSHOT_S, bring_back)

    return undo


def harm_observer(nemesis: Nemesis, draw: Random) -> Undo | None:
    station = _observer(nemesis, draw)
    if station is None:
        return None
    kind = draw.choice(("kill", "kill", "power", "pause"))
    nemesis.trace(f"{kind} {station.name}")
    if kind == "pause":
        station.pause()
        return station.resume
    if kind == "kill":
        station.kill()
    else:
        station.lose_power(draw.choice(list(Loss)))
    return start_of(station)


def change_source(nemesis: Nemesis, draw: Random) -> Undo | None:
    """Whom an observer follows is killed, cut off from it, or only its stream breaks."""
    station = _observer(nemesis, draw)
    source = None if station is None or station.app is None else station.app.observer.source
    if station is None or source is None:
        return None
    kind = draw.choice(("cut", "cut", "block", "kill"))
    nemesis.trace(f"{kind} the source n{source} of {station.name}")
    if kind == "block":
        return block(nemesis, [(source, station.node_id), (station.node_id, source)])
    if kind == "kill":
        target = nemesis.simulation.cluster.station(source)
        target.kill()
        return start_of(target)
    nemesis.network.cut_streams(station.node_id, source)
    return lambda: None


MORE_FAULTS: tuple[FaultRow, ...] = (
    ("rot", 2.5, rot),
    ("rot_what_is_sent", 3.0, rot_what_is_sent),
    ("harm_observer", 4.0, harm_observer),
    ("change_source", 2.0, change_source),
)
"""Name, mean seconds from one to the next, function: see `draw_more_steps`."""

ROT = ("rot", "rot_what_is_sent")
LONG = ("rot_what_is_sent",)
"""What matters is that a follower lags: that takes a while."""
