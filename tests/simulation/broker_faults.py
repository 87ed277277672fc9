"""Faults of the broker runs: those of `nemesis` on brokers and controllers alike, and those that only brokers have.

What a fault may not do: destroy stored data where no other replica is sure to have it. Bits of a partition's files
change on one broker only, in a whole run, and only where two replicas in sync are promised (`min.insync.replicas` 2).
Errors of a disk, after which a broker trusts nothing that it has not marked as durable, strike one broker at a time,
while every partition has all of its replicas in sync.
"""

import errno
from random import Random
from typing import TYPE_CHECKING

from simulation import nemesis as base
from simulation.cluster import Station
from simulation.nemesis import FaultRow, Nemesis, PlanStep, Undo, block, draw_steps, numbered_from, start_of
from tidelog.model.ids import NodeId
from tidelog.world.simulated import Loss

if TYPE_CHECKING:
    from simulation.broker_sim import BrokerSimulation

CALM = 0.2


class BrokerNemesis(Nemesis):
    """Strikes leaders of partitions more often than their share."""

    simulation: "BrokerSimulation"

    def one(self, draw: Random) -> Station:
        leaders = self.simulation.leader_stations()
        kind = draw.random()
        if leaders and kind < 0.4:
            return draw.choice(leaders)
        if kind < 0.85:
            return draw.choice(self.simulation.brokers)
        return draw.choice(self.simulation.stations)

    def running_broker(self, draw: Random) -> Station | None:
        leaders = self.simulation.leader_stations()
        station = draw.choice(leaders if leaders and draw.random() < 0.5 else self.simulation.brokers)
        if station.context is None or station.context.node.loop.is_held:
            return None
        return station if self.simulation.broker(station) is not None else None

    def victim(self, draw: Random) -> Station | None:
        """A broker whose stored data may be harmed now."""
        return self.running_broker(draw) if self.simulation.are_all_in_sync() else None


def fail_disk(nemesis: Nemesis, draw: Random) -> Undo | None:
    assert isinstance(nemesis, BrokerNemesis)
    station = nemesis.victim(draw)
    if station is None or nemesis.simulation.shape.has_weak_topics:
        return None
    nemesis.trace(f"the disk of {station.name} fails")
    return nemesis.simulation.stack.fail_logs(station, draw)


def flip_bit(nemesis: Nemesis, draw: Random) -> Undo | None:
    """A bit of a stored batch changes, under a running broker or while it is down. Or the power is lost everywhere, and
    this one is back before the others: it is eligible to lead, until it has read its log."""
    assert isinstance(nemesis, BrokerNemesis)
    simulation = nemesis.simulation
    station = nemesis.victim(draw)
    if station is None:
        return None
    known = [
        known
        for known in simulation.replica_checker.partitions.values()
        if known.topic.min_isr >= 2
        and not known.topic.is_cached
        and not known.topic.is_grouped
        and simulation.rotten.get(known.partition_id, station) is station
    ]
    if not known:
        return None
    partition = draw.choice(known).partition_id
    what = simulation.stack.flip_in_log(station, partition, draw)
    if what is None:
        return None
    nemesis.trace(f"{station.name}: {what}")
    simulation.rotten[partition] = station
    if draw.random() < 0.3:
        return lambda: None
    if draw.random() < 0.3:
        undo = base.lose_power_everywhere(nemesis, draw)

        def start_first() -> None:
            station.start()
            undo()

        return start_first
    if draw.random() < 0.5:
        station.kill()
    else:
        station.lose_power(draw.choice(list(Loss)))
    return start_of(station)


def stop_in_order(nemesis: Nemesis, draw: Random) -> Undo | None:
    """Controlled shutdown; after a while the process ends, whether it was let go or not."""
    assert isinstance(nemesis, BrokerNemesis)
    station = nemesis.running_broker(draw)
    app = None if station is None else nemesis.simulation.broker(station)
    if station is None or app is None or app.is_stopping:
        return None
    nemesis.trace(f"{station.name} is stopped in order")
    app.context.node.spawn(app.stop())
    loop, waited = nemesis.simulation.world.loop, [0]

    def look() -> None:
        waited[0] += 1
        if station.context is not app.context:
            return
        if app.is_stopped or waited[0] > 30:
            station.kill()
        else:
            loop.call_later(0.1, look)

    look()

    def undo() -> None:
        if station.context is app.context:
            station.kill()
        station.start()

    return undo


def roll(nemesis: Nemesis, draw: Random) -> Undo:
    """Brokers lose power one after the other, each as soon as the one before is back: who was just elected is next."""
    assert isinstance(nemesis, BrokerNemesis)
    loop = nemesis.simulation.world.loop
    state = {"on": True}
    loss = draw.choice(list(Loss))
    nemesis.trace(f"brokers go one after the other, {loss.name}")
    gone: list[Station] = []

    def strike() -> None:
        if not state["on"]:
            return
        for station in gone:
            station.start()
        gone.clear()
        found = nemesis.running_broker(draw)
        if found is not None:
            found.lose_power(loss)
            gone.append(found)
        loop.call_later(draw.uniform(0.1, 1.0), strike)

    strike()

    def undo() -> None:
        state["on"] = False
        for station in gone:
            station.start()

    return undo


def strand_leader(nemesis: Nemesis, draw: Random) -> Undo | None:
    """A leader of partitions does not hear from controllers, or only not from followers, or from neither, while clients
    still reach it; its clock may run slow."""
    assert isinstance(nemesis, BrokerNemesis)
    simulation, leaders = nemesis.simulation, nemesis.simulation.leader_stations()
    if not leaders:
        return None
    station = draw.choice(leaders)
    nodes = [other.node_id for other in simulation.stations if other is not station]
    followers = [other.node_id for other in simulation.brokers if other is not station]
    above = [node for node in simulation.controllers if node != station.node_id]
    some = draw.choice((nodes, followers, above, sorted({*above, draw.choice(followers)})))
    nemesis.trace(f"{station.name} is stranded: no way between it and {some}")
    undo = block(nemesis, [link for node in some for link in ((station.node_id, node), (node, station.node_id))])
    rate = draw.choice((1.0, 1.0, 0.2))
    station.machine.set_clock_rate(rate)

    def end() -> None:
        undo()
        station.machine.set_clock_rate(1.0)

    return end


def lag_then_fail(nemesis: Nemesis, draw: Random) -> Undo | None:
    """One follower is cut off from a leader until it leaves the in-sync set; then the leader goes, and perhaps another
    one, and the one that lagged is back."""
    assert isinstance(nemesis, BrokerNemesis)
    simulation, leaders = nemesis.simulation, nemesis.simulation.leader_stations()
    if not leaders:
        return None
    leader = draw.choice(leaders)
    others = [station for station in simulation.brokers if station is not leader]
    draw.shuffle(others)
    lagging = others[: draw.choice((1, 1, 2))]
    nemesis.trace(f"{[s.name for s in lagging]} lag behind {leader.name}, which then goes")
    links = [(leader.node_id, s.node_id) for s in lagging] + [(s.node_id, leader.node_id) for s in lagging]
    undo = [block(nemesis, links)]
    gone: list[Station] = []

    def strike() -> None:
        if not undo:
            return
        undo.pop()()
        for station in [leader, *others[len(lagging) :]][: draw.choice((1, 1, 2))]:
            if station.is_up and not station.is_held_down:
                if draw.random() < 0.5:
                    station.kill()
                else:
                    station.lose_power(draw.choice(list(Loss)))
                gone.append(station)

    simulation.world.loop.call_later(draw.uniform(0.3, 0.5 + simulation.shape.lag_ms / 600), strike)

    def end() -> None:
        while undo:
            undo.pop()()
        for station in gone:
            station.start()

    return end


def lose_unsynced(nemesis: Nemesis, draw: Random) -> Undo | None:
    """The followers' disks stand still under writes, then these brokers lose all that was not synced, and the leader
    goes: the broker elected now has nothing but what was synced. Or their disks stand still until the leader is alone;
    then its own does, and it loses power."""
    assert isinstance(nemesis, BrokerNemesis)
    simulation, leaders = nemesis.simulation, nemesis.simulation.leader_stations()
    if not leaders:
        return None
    leader = draw.choice(leaders)
    others = [station for station in simulation.brokers if station is not leader and station.is_up]
    is_alone = draw.random() < (0.7 if "weak" in simulation.shape.topics else 0.1)
    losers = [leader] if is_alone else others
    nemesis.trace(f"{[s.name for s in losers]} lose what they do not sync soon; {leader.name} leads")
    loop, gone, undo = simulation.world.loop, list[Station](), list[Undo]()

    def stall() -> None:
        if nemesis.is_over:
            return
        undo.extend(simulation.stack.stall_disk(station, everything=False) for station in losers)
        loop.call_later(draw.uniform(0.05, 0.3), strike)

    def strike() -> None:
        if nemesis.is_over:
            return
        for station in losers:
            if station.is_up:
                station.lose_power(Loss.ALL)
                loop.call_later(0.05, station.start)
        if not is_alone and leader.is_up:
            leader.kill()
            gone.append(leader)
        while undo:
            undo.pop()()

    if is_alone:
        undo.extend(simulation.stack.stall_disk(station, everything=False) for station in others)
        loop.call_later(simulation.shape.stall_ms / 1000 + draw.uniform(0.5, 1.5), stall)
    else:
        stall()

    def end() -> None:
        while undo:
            undo.pop()()
        for station in (*gone, *losers):
            station.start()

    return end


def strike_on_proposal(nemesis: Nemesis, draw: Random) -> Undo | None:
    """A leader that has just proposed another in-sync set does not hear the answer, nor from the follower that it is
    about; a moment later it goes."""
    assert isinstance(nemesis, BrokerNemesis)
    simulation, loop = nemesis.simulation, nemesis.simulation.world.loop
    undo: list[Undo] = []
    gone: list[Station] = []
    kind = draw.choice(("both", "both", "follower"))

    def look() -> None:
        if nemesis.is_over or undo or gone:
            return
        for station in simulation.brokers:
            app = simulation.broker(station)
            for leading in [] if app is None else app.replicas.leaders():
                proposal = leading.state._inflight
                about = None if proposal is None else proposal.members ^ leading.state.isr
                if about:
                    strike(station, about)
                    return
        loop.call_later(0.002, look)

    def strike(station: Station, about: frozenset[int]) -> None:
        nemesis.trace(f"{station.name} has proposed an in-sync set; it does not hear of {sorted(about)}")
        me = station.node_id
        links = [link for other in about if other != me for link in ((me, NodeId(other)), (NodeId(other), me))]
        if kind == "both":
            links += [(node, me) for node in simulation.controllers if node != me]
        undo.append(block(nemesis, links))
        loop.call_later(draw.uniform(0.1, 0.6), end_of, station)

    def end_of(station: Station) -> None:
        while undo:
            undo.pop()()
        if station.is_up and not nemesis.is_over:
            station.kill()
            gone.append(station)

    look()

    def end() -> None:
        while undo:
            undo.pop()()
        for station in gone:
            station.start()

    return end


def double_failover(nemesis: Nemesis, draw: Random) -> Undo | None:
    """One replica in sync hears nothing of the other brokers for a moment, in which the leader goes, and then the next
    one: it leads, without what the two may have acknowledged."""
    assert isinstance(nemesis, BrokerNemesis)
    simulation, leaders = nemesis.simulation, nemesis.simulation.leader_stations()
    if not leaders:
        return None
    first = draw.choice(leaders)
    last = draw.choice([station for station in simulation.brokers if station is not first])
    nemesis.trace(f"{last.name} hears nothing, {first.name} goes, and who leads then")
    others = [station.node_id for station in simulation.brokers if station is not last]
    undo = [block(nemesis, [link for node in others for link in ((node, last.node_id), (last.node_id, node))])]
    loop, gone = simulation.world.loop, list[Station]()

    def go(station: Station) -> None:
        if nemesis.is_over or station is last or not station.is_up or station.is_held_down:
            return
        station.kill()
        gone.append(station)

    def go_next() -> None:
        for station in simulation.leader_stations():
            go(station)
        while undo:
            undo.pop()()

    after_s = draw.uniform(0.05, 0.3)
    loop.call_later(after_s, go, first)
    loop.call_later(after_s + draw.uniform(0.05, 0.5), go_next)

    def end() -> None:
        while undo:
            undo.pop()()
        for station in gone:
            station.start()

    return end


def fail_opening(nemesis: Nemesis, draw: Random) -> Undo | None:
    """Brokers restart, and for a while their logs cannot be opened: helper processes die, files or memory are short."""
    assert isinstance(nemesis, BrokerNemesis)
    simulation = nemesis.simulation
    number = draw.choice((errno.EMFILE, errno.ENFILE, errno.ENOMEM))
    victims = draw.sample(simulation.brokers, draw.choice((1, 1, 2, len(simulation.brokers))))
    devices = [station.machine.disk(draw.choice(simulation.stack.labels)) for station in victims]
    nemesis.trace(f"{[station.name for station in victims]} restart, and cannot open logs: {errno.errorcode[number]}")
    for station, device in zip(victims, devices, strict=True):
        if draw.random() < 0.5:
            station.kill()
        else:
            station.lose_power(draw.choice(list(Loss)))
        if draw.random() < 0.6:
            device.fail(draw.choice(("open", "size")), number=number, times=draw.choice((1, 3, 20, 200)))
        station.start()
        node = station.machine.node
        if node is not None and draw.random() < 0.6:
            node.work.deaths["scan_log"] = draw.choice((1, 3, 10, 40))

    def undo() -> None:
        for station, device in zip(victims, devices, strict=True):
            device.faults.clear()
            if station.machine.node is not None:
                station.machine.node.work.deaths.clear()
            station.start()

    return undo


OPENING_FAULTS: tuple[FaultRow, ...] = (("fail_opening", 0, fail_opening),)
"""Drawn apart from the others: the plans of the seeds stay what they were."""
FIRST_OPENING_STEP = 1_000


def draw_opening_plan(draw: Random, *, from_s: float, until_s: float) -> list[PlanStep]:
    """In a third of the runs, one to three times."""
    if draw.random() > 0.35:
        return []
    times_s = sorted(draw.uniform(from_s, until_s) for _ in range(draw.choice((1, 2, 3))))
    return [
        PlanStep(FIRST_OPENING_STEP + at, at_s, "fail_opening", draw.uniform(0.5, 4.0))
        for at, at_s in enumerate(times_s)
    ]


FIRST_PRODUCT_STEP = 3_000


def draw_product_plan(draw: Random, *, from_s: float, until_s: float) -> list[PlanStep]:
    """Where records are acknowledged before they are synced, the power goes everywhere, once in most runs."""
    if draw.random() > 0.7:
        return []
    at_s = draw.uniform(from_s, until_s)
    return [PlanStep(FIRST_PRODUCT_STEP, at_s, "lose_power_everywhere", draw.uniform(0.1, 1.0))]


def wipe_controller(nemesis: Nemesis, draw: Random) -> Undo | None:
    """A controller that is no broker comes back with an empty disk: another voter, whatever its id says."""
    assert isinstance(nemesis, BrokerNemesis)
    simulation = nemesis.simulation
    stations = [station for station in simulation.quorum if station not in simulation.brokers and station.is_up]
    if not stations or not simulation.is_whole() or not simulation.can_lose_voter():
        return None
    station = draw.choice(stations)
    nemesis.trace(f"wipe {station.name}")
    simulation.wipe(station)
    return start_of(station)


CONTROLLER_FAULTS: tuple[FaultRow, ...] = (("wipe_controller", 1, wipe_controller),)
MEMBERSHIP_STEPS = {"add_member": 3, "remove_member": 3, "storm_of_changes": 2, "transfer": 1}
FIRST_MEMBERSHIP_STEP = 2_000


def draw_membership_plan(draw: Random, *, from_s: float, until_s: float) -> list[PlanStep]:
    """Controllers come and go, on top of the plan. As in `draw_plan`, who asks for changes without looking does not do
    so while stored data is being destroyed."""
    weights: dict[str, float] = {name: weight * draw.choice((1, 1, 4)) for name, weight in MEMBERSHIP_STEPS.items()}
    if draw.random() < 0.5:
        del weights["storm_of_changes"]
        weights["wipe_controller"] = draw.choice((1, 4))
    mean_s, first_s = draw.choice((0.4, 1.0)), from_s + draw.uniform(0.0, 0.5)
    steps = draw_steps(draw, weights, mean_s=mean_s, first_s=first_s, until_s=until_s, least_s=0.1, calm=0.2, long=())
    return numbered_from(FIRST_MEMBERSHIP_STEP, steps)


FAULTS: tuple[FaultRow, ...] = (
    ("kill", 3, base.kill),
    ("lose_power", 4, base.lose_power),
    ("lose_power_everywhere", 2, base.lose_power_everywhere),
    ("crash_soon", 3, base.crash_soon),
    ("pause", 3, base.pause),
    ("partition", 2, base.partition),
    ("isolate", 2, base.isolate),
    ("one_way", 2, base.one_way),
    ("bridge", 3, base.bridge),
    ("delay", 1, base.delay),
    ("reorder", 2, base.reorder),
    ("lose_calls", 1, base.lose_calls),
    ("cut_streams", 2, base.cut_streams),
    ("silence_streams", 1, base.silence_streams),
    ("clock_rate", 1, base.clock_rate),
    ("stall_disk", 2, base.stall_disk),
    ("slow_disk", 2, base.slow_disk),
    ("fill_disk", 1, base.fill_disk),
    ("fail_disk", 1, fail_disk),
    ("flip_bit", 2, flip_bit),
    ("stop_in_order", 2, stop_in_order),
    ("roll", 2, roll),
    ("strand_leader", 3, strand_leader),
    ("lag_then_fail", 3, lag_then_fail),
    ("lose_unsynced", 4, lose_unsynced),
    ("strike_on_proposal", 3, strike_on_proposal),
    ("double_failover", 4, double_failover),
)

LONG = (
    "isolate", "partition", "bridge", "strand_leader", "lag_then_fail", "roll", "stall_disk", "lose_unsynced",
    "strike_on_proposal", "double_failover",
)  # fmt: skip
"""What matters is what happens after the others have noticed."""


def draw_broker_plan(draw: Random, *, from_s: float, until_s: float) -> list[PlanStep]:
    """Faults in turn, now and then two at once, none for about a fifth of the time."""
    weights = {name: weight * draw.choice((0, 1, 1, 1, 4)) for name, weight, _ in FAULTS}
    mean_s = draw.choice((0.4, 0.8, 1.5))
    first_s = from_s + draw.uniform(0.0, 0.5)
    return draw_steps(draw, weights, mean_s=mean_s, first_s=first_s, until_s=until_s, least_s=0.1, calm=CALM, long=LONG)
