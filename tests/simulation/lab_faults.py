"""Faults of `STACK=lab`: those of the brokers' runs, and errors at every call, dying helpers, clocks that jump, calls
that arrive twice, slow machines, empty disks in the place of others.

What a fault may not do is as in `broker_faults`: an error after which a broker trusts nothing that it has not marked as
durable strikes one broker at a time, while every partition has all of its replicas in sync. So do faults that destroy
what a broker has stored, and only where two replicas in sync are promised.
"""

import errno
from collections.abc import Callable
from random import Random
from typing import Any

from support.crashes.strikes import ERRORS, is_sensible

from simulation.broker_faults import BrokerNemesis
from simulation.broker_node import BROKER
from simulation.cluster import Station
from simulation.nemesis import FaultRow, Nemesis, PlanStep, Undo, draw_steps, numbered_from
from tidelog.model.ids import NodeId
from tidelog.world.simulated.disk import SimDevice
from tidelog.world.simulated.store import SimStoreDevice

FIRST_LAB_STEP = 5_000
CONTROLLER = "data"
"""The disk of a controller."""
HARMLESS = {
    errno.ENOSPC: ("append", "create", "make directory", "commit"),
    errno.EDQUOT: ("append", "create", "make directory", "commit"),
    errno.EMFILE: ("open", "create", "list"),
    errno.ENFILE: ("open", "create", "list"),
}
"""Errors that say nothing about the device, and the calls that have them: all brokers may have them at once."""
JUMPS_MS = (1_000, 60_000, 3_600_000, 86_400_000, 365 * 86_400_000, 10 * 365 * 86_400_000)
WORK_KINDS = (
    "aborted_fault", "build_indexes", "check_file", "clean_group", "copy_file", "crc_of_combined",
    "crc_of_piece", "decode_received", "differing_runs", "digest_batches", "empty_directory",
    "file_crc", "first_at", "index_fault", "inspect_records", "map_keys", "read_file",
    "remove_directory", "remove_files", "replace_file", "replay", "rewrite_file", "scan_log",
    "scrub", "snapshot_bytes", "write_combined", "write_piece",
)  # fmt: skip
"""Functions that helper processes run; `test_lab.py` compares them with the product."""
Device = SimDevice | SimStoreDevice


def _lab(nemesis: Nemesis) -> BrokerNemesis:
    assert isinstance(nemesis, BrokerNemesis)
    return nemesis


def _fail_calls(device: Device, number: int, draw: Random, operations: tuple[str, ...] | None, share: float) -> None:
    """Calls of these kinds, of all if None, fail for the drawn share of them."""

    def called(operation: str, _paths: tuple[str, ...]) -> None:
        wanted = is_sensible(number, operation) if operations is None else operation in operations
        if wanted and draw.random() < share:
            device.faults.arm({"read_async": "read"}.get(operation, operation), number=number)

    device.on_call = called


def _devices(station: Station, label: str) -> tuple[SimDevice, SimStoreDevice]:
    return station.machine.disk(label), station.machine.store(label)


def fail_calls(nemesis: Nemesis, draw: Random) -> Undo | None:
    """Any error number at any call of one broker: once, now and then, or every time; until the fault ends."""
    nemesis = _lab(nemesis)
    station = nemesis.victim(draw)
    if station is None or "weak" in nemesis.simulation.shape.topics:
        return None
    stack = nemesis.simulation.stack
    label = draw.choice((*stack.labels, BROKER))
    device, store = _devices(station, label)
    number, share = draw.choice(ERRORS), draw.choice((0.02, 0.2, 1.0))
    nemesis.trace(f"{errno.errorcode[number]} at {share:.0%} of the calls to {label} of {station.name}")
    _fail_calls(device, number, draw, None, share)
    _fail_calls(store, number, draw, None, share)
    # Nobody else's data is harmed meanwhile (`are_all_in_sync`).
    device.fail("of the lab", number=number)

    def undo() -> None:
        device.on_call = store.on_call = None
        device.faults.clear()
        store.faults.clear()
        app = nemesis.simulation.broker(station)
        if app is None or app.has_failed_directory():
            station.kill()
        station.start()

    return undo


def fail_calls_everywhere(nemesis: Nemesis, draw: Random) -> Undo:
    """No space, or no more open files, on some or all machines: brokers and controllers."""
    nemesis = _lab(nemesis)
    stations = nemesis.simulation.stations
    victims = draw.sample(stations, draw.choice((1, 2, len(stations))))
    number, share = draw.choice(tuple(HARMLESS)), draw.choice((0.1, 0.5, 1.0))
    nemesis.trace(f"{errno.errorcode[number]} at {share:.0%} of the calls of {[s.name for s in victims]}")
    devices: list[Device] = []
    for station in victims:
        labels = nemesis.simulation.stack.labels if station in nemesis.simulation.brokers else (CONTROLLER,)
        for label in labels:
            devices += _devices(station, label)
    for device in devices:
        if device.on_call is None:
            _fail_calls(device, number, draw, HARMLESS[number], share)
    hooks = {id(device): device.on_call for device in devices}

    def undo() -> None:
        for device in devices:
            if device.on_call is hooks[id(device)]:
                device.on_call = None

    return undo


def fail_controller_calls(nemesis: Nemesis, draw: Random) -> Undo | None:
    """Any error number at any call of one controller. Its process ends where it cannot go on, and starts again."""
    nemesis = _lab(nemesis)
    simulation = nemesis.simulation
    station = simulation.cluster.station(draw.choice(simulation.controllers))
    if not station.is_up or not simulation.is_whole() or not simulation.can_lose_voter():
        return None
    device, store = _devices(station, CONTROLLER)
    number, share = draw.choice(ERRORS), draw.choice((0.02, 0.2, 1.0))
    nemesis.trace(f"{errno.errorcode[number]} at {share:.0%} of the calls to {CONTROLLER} of {station.name}")
    _fail_calls(device, number, draw, None, share)
    _fail_calls(store, number, draw, None, share)
    # No other voter is harmed meanwhile (`is_whole`).
    device.fail("of the lab", number=number)

    def undo() -> None:
        device.on_call = store.on_call = None
        device.faults.clear()
        store.faults.clear()
        station.start()

    return undo


def remount_read_only(nemesis: Nemesis, draw: Random) -> Undo | None:
    """The system remounts a disk of one broker: nothing can be written."""
    nemesis = _lab(nemesis)
    station = nemesis.victim(draw)
    if station is None or "weak" in nemesis.simulation.shape.topics:
        return None
    device = station.machine.disk(draw.choice(nemesis.simulation.stack.labels))
    nemesis.trace(f"a disk of {station.name} is read-only")
    device.is_read_only = True
    device.fail("of the lab")

    def undo() -> None:
        device.is_read_only = False
        device.faults.clear()
        app = nemesis.simulation.broker(station)
        if app is None or app.has_failed_directory():
            station.kill()
        station.start()

    return undo


def kill_helpers(nemesis: Nemesis, draw: Random) -> Undo:
    """The functions of some kinds kill their helper processes: once, a few times, or until the fault ends."""
    nemesis = _lab(nemesis)
    kinds = draw.sample(WORK_KINDS, draw.choice((1, 3, len(WORK_KINDS))))
    times = draw.choice((1, 4, None))
    victims = draw.sample(nemesis.simulation.stations, draw.choice((1, 2, len(nemesis.simulation.stations))))
    nemesis.trace(f"helpers of {[s.name for s in victims]} die in {kinds}, {times or 'every'} times")
    works: list[Any] = []
    for station in victims:
        node = station.machine.node
        if node is not None:
            works.append(node.work)
            if times is None:
                node.work.dying.update(kinds)
            else:
                node.work.deaths.update(dict.fromkeys(kinds, times))

    def undo() -> None:
        for work in works:
            work.dying.clear()
            work.deaths.clear()

    return undo


def jump_clock(nemesis: Nemesis, draw: Random) -> Undo:
    """Wall clocks jump by a second to ten years, on one, some or all machines, and are corrected later. Deleted keys
    live for a time by that clock: it goes back only where a run reads compacted topics."""
    nemesis = _lab(nemesis)
    stations = list(nemesis.simulation.cluster.stations.values())
    victims = draw.sample(stations, draw.choice((1, 1, 3, len(stations))))
    by_ms = draw.choice(JUMPS_MS) * draw.choice((1, -1))
    if nemesis.simulation.shape.compaction is not None:
        by_ms = -abs(by_ms)
    nemesis.trace(f"the clocks of {[s.name for s in victims]} jump by {by_ms} ms")
    nemesis.simulation.replica_checker.clocks_jump = True
    for station in victims:
        station.machine.clock.jump(by_ms)

    def undo() -> None:
        for station in victims:
            station.machine.clock.jump(-by_ms)

    return undo


def repeat_calls(nemesis: Nemesis, draw: Random) -> Undo:
    """Calls arrive a second time, at once or seconds later: after the next election, and after the caller has gone."""
    nemesis = _lab(nemesis)
    network = nemesis.network
    share, most_s = draw.choice((0.1, 0.5)), draw.choice((0.01, 1.0, 6.0))
    nemesis.trace(f"{share:.0%} of the calls arrive again within {most_s} s")

    def repeated(_source: NodeId, _target: NodeId) -> float | None:
        return draw.uniform(0.0, most_s) if draw.random() < share else None

    network.repeat_call = repeated

    def undo() -> None:
        if network.repeat_call is repeated:
            network.repeat_call = None

    return undo


def slow_node(nemesis: Nemesis, draw: Random) -> Undo:
    """A machine has no processor time for most of the time."""
    nemesis = _lab(nemesis)
    station, share = nemesis.one(draw), draw.choice((0.5, 0.9, 0.97))
    nemesis.trace(f"{station.name} runs {1 - share:.0%} of the time")
    loop, state = nemesis.simulation.world.loop, {"on": True}

    def stop() -> None:
        node = station.machine.node
        if state["on"] and node is not None:
            node.loop.pause("no processor time")
            loop.call_later(0.02 * share, go_on, node.loop)
        elif state["on"]:
            loop.call_later(0.02, stop)

    def go_on(held: Any) -> None:
        held.resume("no processor time")
        loop.call_later(0.02 * (1 - share), stop)

    stop()
    return lambda: state.update(on=False)


def _replace_disks(
    nemesis: Nemesis, draw: Random, what: str, change: Callable[[BrokerNemesis, Station, str], None]
) -> Undo | None:
    nemesis = _lab(nemesis)
    simulation = nemesis.simulation
    station = nemesis.victim(draw)
    if station is None or not set(simulation.shape.topics) <= {"plain", "compacted"} or simulation.rotten:
        return None
    label = draw.choice(simulation.stack.labels)
    nemesis.trace(f"{station.name}: {label} {what}")
    station.kill()
    change(nemesis, station, label)
    station.start()
    return lambda: None


def wipe_disk(nemesis: Nemesis, draw: Random) -> Undo | None:
    """A broker returns with an empty disk in the place of one: another directory id."""

    def wipe(_nemesis: BrokerNemesis, station: Station, label: str) -> None:
        for device in _devices(station, label):
            device.wipe()
        station.durable[f"disks/{label}"] = station.durable.get(f"disks/{label}", 0) + 1

    return _replace_disks(nemesis, draw, "is replaced by an empty disk", wipe)


LAB_FAULTS: tuple[FaultRow, ...] = (
    ("fail_calls", 4, fail_calls),
    ("fail_calls_everywhere", 2, fail_calls_everywhere),
    ("fail_controller_calls", 2, fail_controller_calls),
    ("remount_read_only", 2, remount_read_only),
    ("kill_helpers", 3, kill_helpers),
    ("jump_clock", 3, jump_clock),
    ("repeat_calls", 3, repeat_calls),
    ("slow_node", 2, slow_node),
    ("wipe_disk", 2, wipe_disk),
)


def draw_lab_plan(draw: Random, *, from_s: float, until_s: float) -> list[PlanStep]:
    weights = {name: weight * draw.choice((0, 1, 1, 4)) for name, weight, _ in LAB_FAULTS}
    weights["fail_calls"] += 1
    mean_s, first_s = draw.choice((0.3, 0.8, 1.5)), from_s + draw.uniform(0.0, 0.5)
    steps = draw_steps(draw, weights, mean_s=mean_s, first_s=first_s, until_s=until_s, least_s=0.1, calm=0.2, long=())
    return numbered_from(FIRST_LAB_STEP, steps)
