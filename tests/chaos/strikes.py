"""Faults of processes, disks, clocks and the network of a run. Operations of an administrator are in `operations`."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from chaos.lossy_disk import LossyDisk
from chaos.network import CLIENTS, CUT, LinkFault, Network
from chaos.nodes import Nodes
from tidelog.testing.chaos.plan import FREEZE, ISOLATE, KILL, KINDS, RESTART, Fault, Kind
from tidelog.testing.chaos.target import Stage, Strike

PROCESS_KINDS: Mapping[str, Kind] = {
    KILL: KINDS[KILL],
    FREEZE: KINDS[FREEZE],
    RESTART: KINDS[RESTART],
    "rolling-restart": Kind(1, (0.1, 1.0), has_node=False),
}
DISK_KINDS: Mapping[str, Kind] = {
    "power-loss": Kind(5, (0.5, 8.0)),
    "blackout": Kind(2, (0.5, 3.0), has_node=False, loses_majority=True),
    "full-disk": Kind(2, (2.0, 15.0)),
    "stalled-disk": Kind(2, (1.0, 12.0)),
    "slow-disk": Kind(1, (5.0, 20.0)),
    "failing-disk": Kind(2, (1.0, 5.0)),
}
NETWORK_KINDS: Mapping[str, Kind] = {
    ISOLATE: KINDS[ISOLATE],
    "cut-from-controllers": Kind(2, (3.0, 20.0)),
    "cut-from-brokers": Kind(2, (3.0, 20.0)),
    "cut-from-clients": Kind(1, (3.0, 15.0)),
    "cut-one-way": Kind(3, (2.0, 20.0)),
    "bridge": Kind(2, (3.0, 20.0)),
    "bad-network": Kind(3, (10.0, 40.0), has_node=False),
    "bad-links": Kind(2, (10.0, 40.0)),
}
CLOCK_KINDS: Mapping[str, Kind] = {"clock-jump": Kind(2, (5.0, 20.0))}
JUMPS_S = (-86_400.0, -3_600.0, -30.0, 30.0, 3_600.0, 86_400.0)


class ProcessStrikes:
    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self.strikes: Mapping[str, Strike] = {
            KILL: self._kill,
            FREEZE: self._freeze,
            RESTART: self._restart,
            "rolling-restart": self._rolling_restart,
        }

    def _kill(self, node: int, fault: Fault, stage: Stage) -> None:
        self._nodes.kill(node)
        stage.wait(fault.seconds)
        self._nodes.start(node)

    def _freeze(self, node: int, fault: Fault, stage: Stage) -> None:
        self._nodes.pause(node)
        try:
            stage.wait(fault.seconds)
        finally:
            self._nodes.resume(node)

    def _restart(self, node: int, fault: Fault, stage: Stage) -> None:
        stage.detail(f"exit code {self._nodes.stop(node)}")
        stage.wait(fault.seconds)
        self._nodes.start(node)

    def _rolling_restart(self, _node: int, fault: Fault, stage: Stage) -> None:
        for node in self._nodes.running():
            self._nodes.stop(node.number)
            stage.wait(fault.seconds)
            self._nodes.start(node.number)
            for failure in self._nodes.recover(may_end=None):
                stage.detail(failure)


class DiskStrikes:
    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self.may_end: int | None = None
        """A node whose disk has failed may end by itself."""
        self.failed: set[int] = set()
        """Nodes whose disk has failed in this run."""
        self.strikes: Mapping[str, Strike] = {
            "power-loss": self._power_loss,
            "blackout": self._blackout,
            "full-disk": self._full,
            "stalled-disk": self._stalled,
            "slow-disk": self._slow,
            "failing-disk": self._failing,
        }

    def _power_loss(self, node: int, fault: Fault, stage: Stage) -> None:
        self._nodes.kill(node)
        self._lose(node, fault, stage)
        stage.wait(fault.seconds)
        self._nodes.start(node)

    def _blackout(self, _node: int, fault: Fault, stage: Stage) -> None:
        """All nodes lose power at once."""
        struck = [node.number for node in self._nodes.running()]
        for number in struck:
            self._nodes.pause(number)  # no node sees another one die
        for number in struck:
            self._nodes.kill(number)
        for number in struck:
            self._lose(number, fault, stage)
        stage.wait(fault.seconds)
        for number in struck:
            self._nodes.start(number)

    def _lose(self, number: int, fault: Fault, stage: Stage) -> None:
        lost = self._disk(number).lose_power(fault.pick + number if fault.pick % 2 else None)
        how = "some of what was" if fault.pick % 2 else "all that was"
        stage.detail(f"node {number} lost {how} not synced: {lost['writes']} writes, {lost['names']} names")

    def _full(self, node: int, fault: Fault, stage: Stage) -> None:
        self._disturb(node, "full", fault, stage)

    def _stalled(self, node: int, fault: Fault, stage: Stage) -> None:
        self._disturb(node, f"stall {('s', 'ws', 'wsn')[fault.pick % 3]}", fault, stage)

    def _slow(self, node: int, fault: Fault, stage: Stage) -> None:
        self._disturb(node, f"slow {(20, 100, 400)[fault.pick % 3]}", fault, stage)

    def _failing(self, node: int, fault: Fault, stage: Stage) -> None:
        """Errors, and then a restart without what was not synced, as after a disk was replugged."""
        self.may_end = node
        self.failed.add(node)
        self._disturb(node, f"fail {('s', 'w', 'ws', 'n', 'r')[fault.pick % 5]}", fault, stage)
        self._nodes.kill(node)
        self._lose(node, fault, stage)
        self._nodes.start(node)

    def _disturb(self, node: int, command: str, fault: Fault, stage: Stage) -> None:
        disk = self._disk(node)
        stage.detail(f"disk: {command}")
        disk.command(command)
        try:
            stage.wait(fault.seconds)
        finally:
            disk.command("go")

    def _disk(self, number: int) -> LossyDisk:
        disk = self._nodes[number].disk
        assert disk is not None, "these faults are drawn only with disks"
        return disk


class ClockStrikes:
    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self.strikes: Mapping[str, Strike] = {"clock-jump": self._jump}

    def _jump(self, node: int, fault: Fault, stage: Stage) -> None:
        """And back."""
        ahead_s = JUMPS_S[fault.pick % len(JUMPS_S)]
        stage.detail(f"{ahead_s:+.0f} s")
        self._nodes.set_clock(node, ahead_s)
        try:
            stage.wait(fault.seconds)
        finally:
            self._nodes.set_clock(node, 0.0)


class NetworkStrikes:
    def __init__(self, nodes: Nodes, network: Network) -> None:
        self._nodes, self._network = nodes, network
        self.strikes: Mapping[str, Strike] = {
            ISOLATE: self._isolate,
            "cut-from-controllers": self._from_controllers,
            "cut-from-brokers": self._from_brokers,
            "cut-from-clients": self._from_clients,
            "cut-one-way": self._one_way,
            "bridge": self._bridge,
            "bad-network": self._bad_network,
            "bad-links": self._bad_links,
        }

    def _isolate(self, node: int, fault: Fault, stage: Stage) -> None:
        self._network.between([node], [*self._others(node), CLIENTS], CUT)
        self._wait_and_clear(fault, stage)

    def _from_controllers(self, node: int, fault: Fault, stage: Stage) -> None:
        others = [one.number for one in self._nodes.running() if one.is_controller]
        self._network.between([node], others, CUT)
        self._wait_and_clear(fault, stage)

    def _from_brokers(self, node: int, fault: Fault, stage: Stage) -> None:
        others = [one.number for one in self._nodes.running() if one.is_broker]
        self._network.between([node], others, CUT)
        self._wait_and_clear(fault, stage)

    def _from_clients(self, node: int, fault: Fault, stage: Stage) -> None:
        self._network.between([node], [CLIENTS], CUT)
        self._wait_and_clear(fault, stage)

    def _one_way(self, node: int, fault: Fault, stage: Stage) -> None:
        is_deaf = fault.pick % 2 == 0
        stage.detail("hears nobody" if is_deaf else "is heard by nobody")
        for other in [*self._others(node), CLIENTS]:
            self._network.set_link(*((other, node) if is_deaf else (node, other)), CUT)
        self._wait_and_clear(fault, stage)

    def _bridge(self, node: int, fault: Fault, stage: Stage) -> None:
        """Two nodes of one role do not reach each other; every other node reaches both."""
        roles = self._nodes[node].roles
        peers = [one.number for one in self._nodes.running() if one.roles == roles and one.number != node]
        peer = peers[fault.pick % len(peers)]
        stage.detail(f"{node} and {peer} do not reach each other")
        self._network.between([node], [peer], CUT)
        self._wait_and_clear(fault, stage)

    def _bad_network(self, _node: int, fault: Fault, stage: Stage) -> None:
        hosts = [*(one.number for one in self._nodes.running()), CLIENTS]
        self._degrade(hosts, hosts, fault, stage)

    def _bad_links(self, node: int, fault: Fault, stage: Stage) -> None:
        self._degrade([node], [*self._others(node), CLIENTS], fault, stage)

    def _degrade(self, some: list[int], others: list[int], fault: Fault, stage: Stage) -> None:
        random = Random(fault.pick)
        bad = LinkFault(
            loss=random.choice((0.0, 0.01, 0.05)),
            delay_ms=random.choice((0.0, 5.0, 40.0)),
            jitter_ms=random.choice((0.0, 10.0, 40.0)),
            double=random.choice((0.0, 0.02)),
            early=random.choice((0.0, 0.05)),
        )
        stage.detail(
            f"loss {bad.loss:.0%}, delay {bad.delay_ms:.0f} ms, jitter {bad.jitter_ms:.0f} ms, "
            f"doubled {bad.double:.0%}, out of order {bad.early:.0%}"
        )
        self._network.between(some, others, bad)
        self._wait_and_clear(fault, stage)

    def _others(self, node: int) -> list[int]:
        return [one.number for one in self._nodes.running() if one.number != node]

    def _wait_and_clear(self, fault: Fault, stage: Stage) -> None:
        try:
            stage.wait(fault.seconds)
        finally:
            self._network.clear()
