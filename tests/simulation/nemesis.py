"""A plan of faults, drawn from the seed before the run begins, and how each of them is done and undone.

A plan is a list of steps: when, what, for how long. About a quarter of the time nothing is wrong. Each step draws what
it needs (which node, which links) from a random stream of its own, so that a plan with some steps left out does the
rest as before: that is what shrinking a failing plan rests on.

What a fault may not do: destroy stored data of a second voter before the first is whole again (`is_whole`). No
protocol survives the loss of a majority; everything else, power lost everywhere at once included, must be survived.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from simulation.cluster import Station
from simulation.coverage import Coverage
from tidelog.model.ids import NodeId
from tidelog.raft.effects import Role
from tidelog.world.simulated import Latency, Loss

if TYPE_CHECKING:
    from simulation.raft_sim import RaftSimulation

Undo = Callable[[], None]
CALM = 0.25
STORE_REFUSALS = (0.0, 0.5, 1.0)
"""How many commits the state store of a full disk refuses: what is left of its reserve."""


@dataclass(frozen=True, slots=True)
class PlanStep:
    number: int
    at_s: float
    fault: str
    duration_s: float

    def __str__(self) -> str:
        return f"#{self.number} {self.fault} at {self.at_s:.2f} s for {self.duration_s:.2f} s"


def draw_plan(draw: Random, *, until_s: float) -> list[PlanStep]:
    """Faults in turn, now and then two at once, none for about a quarter of the time."""
    # Each run has its favourites: rare combinations need the same few faults again and again.
    weights = {name: weight * draw.choice((0, 1, 1, 1, 4)) for name, weight, _ in FAULTS}
    if draw.random() < 0.5:
        # An operator who asks for changes without looking must not do so while stored data is being destroyed: each is
        # survived, but a voter that was wiped and one that was removed are two of three.
        weights["storm_of_changes"] = 0
    else:
        weights.update(dict.fromkeys(DESTRUCTIVE, 0))
    if not any(weights.values()):
        weights["kill"] = 1
    mean_s = draw.choice((0.4, 1.0, 2.0))
    first_s = draw.uniform(0.5, 2.0)
    return draw_steps(
        draw, weights, mean_s=mean_s, first_s=first_s, until_s=until_s, least_s=0.05, calm=CALM, long=LONG
    )


def draw_steps(
    draw: Random,
    weights: dict[str, float],
    *,
    mean_s: float,
    first_s: float,
    until_s: float,
    least_s: float,
    calm: float,
    long: tuple[str, ...],
) -> list[PlanStep]:
    """Faults by weight, one or two at a time; none for the share `calm` of the time. Those of `long` mostly last."""
    names = list(weights)
    steps: list[PlanStep] = []
    at_s = first_s
    while at_s < until_s:
        duration_s = least_s + draw.expovariate(1 / mean_s)
        if draw.random() >= calm:
            for _ in range(draw.choice((1, 1, 1, 2))):
                name = draw.choices(names, list(weights.values()))[0]
                lasts_s = duration_s * draw.uniform(0.5, 1.5)
                if name in long and draw.random() < 0.7:
                    lasts_s = max(lasts_s, draw.uniform(1.0, 4.0))
                steps.append(PlanStep(len(steps), at_s, name, lasts_s))
        at_s += duration_s
    return steps


def numbered_from(first: int, steps: Sequence[PlanStep]) -> list[PlanStep]:
    """Steps that come on top of another plan: each has a random stream by its number."""
    return [replace(step, number=first + step.number) for step in steps]


class Nemesis:
    def __init__(self, simulation: "RaftSimulation", plan: Sequence[PlanStep], more: Sequence["FaultRow"] = ()) -> None:
        """`more` are faults that the plan may name besides those of `FAULTS`."""
        self.simulation = simulation
        self.network = simulation.cluster.network
        self.plan = plan
        self.is_over = False
        self.counts: dict[str, int] = {}
        self.coverage = Coverage(simulation.cluster.stations.values)
        self._traced: list[str] = []
        """By the fault that is beginning."""
        self._undo: dict[int, Undo] = {}
        self._functions = {name: function for name, _, function in (*FAULTS, *more)}
        loop = simulation.world.loop
        for step in plan:
            loop.call_later(step.at_s, self._begin, step)

    def add(self, more: Sequence["FaultRow"]) -> None:
        """Faults that the plan may name besides those given."""
        self._functions.update({name: function for name, _, function in more})

    def _begin(self, step: PlanStep) -> None:
        # Not a shared stream: see the module's docstring.
        draw = Random(f"{self.simulation.seed}/fault/{step.number}")
        self._traced.clear()
        with self.coverage.striking(step.fault) as strike:
            undo = self._functions[step.fault](self, draw)
        if undo is None:
            return
        self.coverage.begun(strike, self._traced)
        self.counts[step.fault] = self.counts.get(step.fault, 0) + 1
        self._undo[step.number] = undo
        self.simulation.world.loop.call_later(step.duration_s, self._end, step)

    def _end(self, step: PlanStep) -> None:
        undo = self._undo.pop(step.number, None)
        if undo is not None:
            self.trace(f"end of {step.fault}")
            undo()

    def stop(self) -> None:
        """All that is wrong is undone, and nothing that was to come later comes."""
        self.is_over = True
        for number in sorted(self._undo):
            self._undo.pop(number)()

    def trace(self, text: str) -> None:
        self._traced.append(text)
        self.coverage.named(text)
        self.simulation.world.scheduler.trace("nemesis", text)

    # -- whom

    def one(self, draw: Random) -> Station:
        """Any Raft node; the leader more often than its share."""
        leader = self.simulation.checker.leader_now()
        if leader is not None and draw.random() < 0.4:
            return self.simulation.cluster.station(leader[0])
        return draw.choice(self.simulation.stations)

    def one_running(self, draw: Random) -> Station | None:
        station = self.one(draw)
        return station if station.is_up and not station.machine.node.loop.is_held else None  # type: ignore[union-attr]

    def everybody(self) -> list[NodeId]:
        return [station.node_id for station in self.simulation.cluster.stations.values()]

    def victim(self, draw: Random) -> Station | None:
        """A node whose stored data may be harmed now: all others are whole, and are a majority without it."""
        if not self.simulation.is_whole() or not self.simulation.can_lose_voter():
            return None
        station = self.one(draw)
        return station if station.is_up else None


def start_of(station: Station) -> Undo:
    return station.start


def kill_machine(nemesis: Nemesis, station: Station | None) -> Undo | None:
    if station is None or not station.is_up:
        return None
    nemesis.trace(f"kill {station.name}")
    station.kill()
    return start_of(station)


def pause_machine(nemesis: Nemesis, station: Station | None) -> Undo | None:
    """When it goes on, it does not know that time has passed."""
    if station is None or not station.is_up or station.machine.node.loop.is_held:  # type: ignore[union-attr]
        return None
    nemesis.trace(f"pause {station.name}")
    station.pause()
    return station.resume


def kill(nemesis: Nemesis, draw: Random) -> Undo | None:
    return kill_machine(nemesis, nemesis.one_running(draw))


def lose_power(nemesis: Nemesis, draw: Random) -> Undo | None:
    station = nemesis.one_running(draw)
    if station is None:
        return None
    loss = draw.choice(list(Loss))
    nemesis.trace(f"{station.name} loses power, {loss.name}")
    station.lose_power(loss)
    return start_of(station)


def lose_power_everywhere(nemesis: Nemesis, draw: Random) -> Undo:
    loss = draw.choice(list(Loss))
    nemesis.trace(f"power is lost everywhere, {loss.name}")
    gone = [station for station in nemesis.simulation.stations if station.is_up]
    for station in gone:
        station.lose_power(loss)

    def undo() -> None:
        for station in gone:
            delay_s = draw.uniform(0.0, 0.5)
            nemesis.simulation.world.loop.call_later(delay_s, station.start)

    return undo


def crash_soon(nemesis: Nemesis, draw: Random) -> Undo | None:
    """The power goes in the middle of what the node is about to write."""
    station = nemesis.one_running(draw)
    if station is None:
        return None
    nemesis.trace(f"{station.name} will lose power while it writes")
    return nemesis.simulation.stack.crash_at(station, draw, is_vote=False)


def crash_in_election(nemesis: Nemesis, draw: Random) -> Undo | None:
    """The leader goes, and the power of another node with the first vote that it writes."""
    leader = nemesis.simulation.checker.leader_now()
    if leader is None:
        return None
    station = nemesis.simulation.cluster.station(leader[0])
    others = [other for other in nemesis.simulation.stations if other is not station and other.is_up]
    if not station.is_up or not others:
        return None
    voter = draw.choice(others)
    nemesis.trace(f"kill {station.name}; {voter.name} will lose power while it votes")
    station.kill()
    crash = nemesis.simulation.stack.crash_at(voter, draw, is_vote=True)

    def undo() -> None:
        crash()
        station.start()

    return undo


def pause(nemesis: Nemesis, draw: Random) -> Undo | None:
    return pause_machine(nemesis, nemesis.one_running(draw))


def partition(nemesis: Nemesis, draw: Random) -> Undo:
    """Two sides that do not hear each other."""
    nodes = nemesis.everybody()
    draw.shuffle(nodes)
    cut = draw.randrange(1, len(nodes))
    one, other = nodes[:cut], nodes[cut:]
    nemesis.trace(f"partition {sorted(one)} from {sorted(other)}")
    return block(nemesis, [(a, b) for a in one for b in other] + [(b, a) for a in one for b in other])


def isolate(nemesis: Nemesis, draw: Random) -> Undo:
    """One Raft node, the leader by preference, alone with or without its clients."""
    station = nemesis.one(draw)
    others = [node for node in nemesis.everybody() if node != station.node_id]
    if draw.random() < 0.5:
        others = [node for node in others if any(s.node_id == node for s in nemesis.simulation.stations)]
    rate = draw.choice((1.0, 0.1))
    nemesis.trace(f"isolate {station.name} from {others}, its clock at {rate}")
    unblock = block(nemesis, [(station.node_id, o) for o in others] + [(o, station.node_id) for o in others])
    if rate != 1.0:
        # It takes long to find out that it does not lead any more.
        station.machine.set_clock_rate(rate)

    def undo() -> None:
        unblock()
        if rate != 1.0:
            station.machine.set_clock_rate(1.0)

    return undo


def one_way(nemesis: Nemesis, draw: Random) -> Undo:
    """What one node says does not arrive, or it does not hear."""
    station = nemesis.one(draw)
    others = [node for node in nemesis.everybody() if node != station.node_id]
    some = draw.sample(others, draw.randrange(1, len(others) + 1))
    hears = draw.random() < 0.5
    nemesis.trace(f"{'nobody hears' if hears else 'no word reaches'} {station.name}: {sorted(some)}")
    return block(nemesis, [(station.node_id, o) if hears else (o, station.node_id) for o in some])


def bridge(nemesis: Nemesis, draw: Random) -> Undo | None:
    """Two nodes that do not reach each other, while everybody else reaches both."""
    stations = nemesis.simulation.stations
    if len(stations) < 3:
        return None
    one, other = draw.sample(stations, 2)
    nemesis.trace(f"no way between {one.name} and {other.name}")
    return block(nemesis, [(one.node_id, other.node_id), (other.node_id, one.node_id)])


def block(nemesis: Nemesis, links: list[tuple[NodeId, NodeId]]) -> Undo:
    mine = [link for link in links if not nemesis.network.is_blocked(*link)]
    for link in mine:
        nemesis.network.block(*link)

    def undo() -> None:
        for link in mine:
            nemesis.network.unblock(*link)

    return undo


def delay(nemesis: Nemesis, draw: Random) -> Undo:
    """Some links are slow."""
    nodes = nemesis.everybody()
    most_s = draw.choice((0.02, 0.1, 0.4))
    latency = Latency(most_s / 4, most_s)
    links = [(a, b) for a in nodes for b in nodes if a != b and draw.random() < 0.4]
    nemesis.trace(f"up to {most_s} s on {len(links)} links")
    return _slow(nemesis, links, latency)


def reorder(nemesis: Nemesis, draw: Random) -> Undo:
    """Each message takes its own time: streams and calls overtake each other by far."""
    nodes = nemesis.everybody()
    most_s = draw.choice((0.05, 0.3, 0.8))
    nemesis.trace(f"anything between 0 and {most_s} s on all links")
    return _slow(nemesis, [(a, b) for a in nodes for b in nodes if a != b], Latency(0.0, most_s))


def _slow(nemesis: Nemesis, links: list[tuple[NodeId, NodeId]], latency: Latency) -> Undo:
    for source, target in links:
        nemesis.network.slow_down(source, target, latency)

    def undo() -> None:
        for source, target in links:
            nemesis.network.slow_down(source, target, nemesis.network.latency)

    return undo


def lose_calls(nemesis: Nemesis, draw: Random) -> Undo:
    network = nemesis.network
    network.loss = draw.choice((0.05, 0.3, 0.7))
    nemesis.trace(f"{network.loss:.0%} of calls are lost")

    def undo() -> None:
        network.loss = 0.0

    return undo


def cut_streams(nemesis: Nemesis, draw: Random) -> Undo:
    """Streams break, again and again."""
    nodes = nemesis.everybody()
    loop = nemesis.simulation.world.loop
    state = {"on": True}
    nemesis.trace("streams are cut")

    def cut() -> None:
        if state["on"]:
            one, other = draw.sample(nodes, 2)
            nemesis.network.cut_streams(one, other)
            loop.call_later(draw.uniform(0.01, 0.3), cut)

    cut()
    return lambda: state.update(on=False)


def silence_streams(nemesis: Nemesis, draw: Random) -> Undo | None:
    """The streams of one node that are open now carry nothing any more, and do not say so."""
    station = nemesis.one(draw)
    others = [node for node in nemesis.everybody() if node != station.node_id]
    some = draw.sample(others, draw.randrange(1, len(others) + 1))
    nemesis.trace(f"streams of {station.name} with {sorted(some)} fall silent")
    for other in some:
        nemesis.network.silence_streams(station.node_id, other)
    return lambda: None


def clock_rate(nemesis: Nemesis, draw: Random) -> Undo:
    station = nemesis.one(draw)
    rate = draw.choice((0.25, 0.5, 0.8, 1.25, 2.0, 4.0))
    nemesis.trace(f"the clock of {station.name} runs at {rate}")
    station.machine.set_clock_rate(rate)

    def undo() -> None:
        station.machine.set_clock_rate(1.0)

    return undo


def stall_disk(nemesis: Nemesis, draw: Random) -> Undo:
    station = nemesis.one(draw)
    everything = draw.random() < 0.2
    nemesis.trace(f"the disk of {station.name} stalls")
    return nemesis.simulation.stack.stall_disk(station, everything=everything)


def slow_disk(nemesis: Nemesis, draw: Random) -> Undo:
    station = nemesis.one(draw)
    most_s = draw.choice((0.02, 0.1, 0.5))
    nemesis.trace(f"the disk of {station.name} takes up to {most_s} s")
    return nemesis.simulation.stack.slow_disk(station, Latency(most_s / 10, most_s))


def fill_disk(nemesis: Nemesis, draw: Random) -> Undo:
    station = nemesis.one(draw)
    nemesis.trace(f"the disk of {station.name} is full")
    return nemesis.simulation.stack.fill_disk(station, draw)


def fail_sync(nemesis: Nemesis, draw: Random) -> Undo | None:
    """Where it strikes while a node recovers, the node may trust less than it had synced: that is a loss of data."""
    station = nemesis.victim(draw)
    if station is None:
        return None
    nemesis.trace(f"the next sync of {station.name} fails")
    return nemesis.simulation.stack.fail_sync(station, draw)


def flip_bit(nemesis: Nemesis, draw: Random) -> Undo | None:
    """A byte of what one node has stored is another one when it starts again."""
    station = nemesis.victim(draw)
    if station is None:
        return None
    station.kill()
    what = nemesis.simulation.stack.damage(station, draw)
    nemesis.trace(f"{station.name}: {what}")
    return start_of(station)


def wipe(nemesis: Nemesis, draw: Random) -> Undo | None:
    """A node comes back with an empty disk: another voter, whatever its id says."""
    station = nemesis.victim(draw)
    if station is None:
        return None
    nemesis.trace(f"wipe {station.name}")
    station.kill()
    nemesis.simulation.wipe(station)
    return start_of(station)


def add_member(nemesis: Nemesis, draw: Random) -> Undo | None:
    return nemesis.simulation.operator_adds(draw)


def remove_member(nemesis: Nemesis, draw: Random) -> Undo | None:
    return nemesis.simulation.operator_removes(draw)


def storm_of_changes(nemesis: Nemesis, draw: Random) -> Undo:
    """Asks every node that thinks it leads for membership changes, several at once, as soon as it leads."""
    loop = nemesis.simulation.world.loop
    state = {"on": True}
    nemesis.trace("a storm of membership changes")

    def ask() -> None:
        if state["on"]:
            nemesis.simulation.ask_for_any_change(draw)
            loop.call_later(draw.uniform(0.002, 0.05), ask)

    ask()
    return lambda: state.update(on=False)


def lag_then_harm(nemesis: Nemesis, draw: Random) -> Undo | None:
    """One voter is cut off until it lags. Then it is back, another one is harmed, and the leader is cut off: what was
    committed without the first may be known to none of those that are left but the one that was harmed."""
    simulation = nemesis.simulation
    leader, membership = simulation.checker.leader_now(), simulation.membership()
    if leader is None or membership is None or len(membership.voters) < 3 or not simulation.is_whole():
        return None
    others = [member.node for member in membership.voters if member.node != leader[0]]
    draw.shuffle(others)
    lagging, harmed = others[: len(others) // 2], simulation.cluster.station(others[-1])
    raft = [station.node_id for station in simulation.stations]
    nemesis.trace(f"{lagging} lag, then {harmed.name} is harmed and n{leader[0]} is cut off")
    undo = [block(nemesis, [(a, b) for node in lagging for x in raft if x != node for a, b in ((node, x), (x, node))])]

    def harm() -> None:
        if not undo:
            return
        undo.pop()()
        links = [(a, b) for x in raft if x != leader[0] for a, b in ((leader[0], x), (x, leader[0]))]
        undo.append(block(nemesis, links))
        kind = draw.choice(("power", "power", "damage", "wipe", "kill"))
        nemesis.trace(f"{harmed.name}: {kind}")
        if not harmed.is_up:
            return
        may_destroy = simulation.is_whole_but(harmed.node_id)
        if kind == "power":
            harmed.lose_power(draw.choice(list(Loss)))
        elif kind == "wipe" and may_destroy:
            simulation.wipe(harmed)
        else:
            harmed.kill()
            if kind == "damage" and may_destroy:
                nemesis.trace(f"{harmed.name}: {simulation.stack.damage(harmed, draw)}")
        simulation.world.loop.call_later(draw.uniform(0.0, 0.3), harmed.start)

    simulation.world.loop.call_later(draw.uniform(0.05, 0.6), harm)

    def end() -> None:
        while undo:
            undo.pop()()
        harmed.start()

    return end


def transfer(nemesis: Nemesis, draw: Random) -> Undo | None:
    leader = nemesis.simulation.checker.leader_now()
    if leader is None:
        return None
    station = nemesis.simulation.cluster.station(leader[0])
    if station.app is None or station.app.core.role is not Role.LEADER:
        return None
    target = draw.choice([None, *(s.node_id for s in nemesis.simulation.stations)])
    nemesis.trace(f"transfer from {station.name} to {target}")
    station.app.transfer(target)
    return lambda: None


def snapshot(nemesis: Nemesis, draw: Random) -> Undo | None:
    station = nemesis.one_running(draw)
    if station is None or station.app is None:
        return None
    nemesis.trace(f"{station.name} takes a snapshot")
    station.app.take_snapshot()
    return lambda: None


FaultRow = tuple[str, float, Callable[[Nemesis, Random], Undo | None]]

FAULTS: tuple[FaultRow, ...] = (
    ("kill", 3, kill),
    ("lose_power", 4, lose_power),
    ("lose_power_everywhere", 1, lose_power_everywhere),
    ("crash_soon", 3, crash_soon),
    ("crash_in_election", 2, crash_in_election),
    ("pause", 2, pause),
    ("partition", 3, partition),
    ("isolate", 3, isolate),
    ("one_way", 2, one_way),
    ("bridge", 1, bridge),
    ("delay", 2, delay),
    ("reorder", 2, reorder),
    ("lose_calls", 1, lose_calls),
    ("cut_streams", 2, cut_streams),
    ("silence_streams", 1, silence_streams),
    ("clock_rate", 1, clock_rate),
    ("stall_disk", 1, stall_disk),
    ("slow_disk", 2, slow_disk),
    ("fill_disk", 1, fill_disk),
    ("fail_sync", 1, fail_sync),
    ("flip_bit", 2, flip_bit),
    ("wipe", 1, wipe),
    ("add_member", 2, add_member),
    ("remove_member", 2, remove_member),
    ("storm_of_changes", 2, storm_of_changes),
    ("lag_then_harm", 4, lag_then_harm),
    ("transfer", 2, transfer),
    ("snapshot", 1, snapshot),
)

DESTRUCTIVE = ("flip_bit", "wipe", "lag_then_harm", "fail_sync")
LONG = ("lag_then_harm", "isolate", "partition")
"""What matters is what happens after the others have elected somebody: that takes a while."""
