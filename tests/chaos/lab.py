"""The cluster of a run: controllers and brokers as processes of their own, each on a host and a disk of its own.

    voters 11 12 13, spare 14        brokers 1 2 3, spare 4        clients        this process
              \\__________________________|____________________________|______________/
                                   the switch (`network`)

Without root there is one host, loopback, and no fault of the network; without FUSE no fault of disks.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.clusters.waiting import until
from support.root_commands import MissingError

import tidelog
from chaos import native_tools
from chaos.lossy_disk import LossyDisk, remove_leftovers
from chaos.network import CLIENTS, Network
from chaos.nodes import Node, Nodes, Place
from chaos.operations import MEMBER_KINDS, SCRATCH, TOPIC_KINDS, Operations
from chaos.strikes import (
    CLOCK_KINDS,
    DISK_KINDS,
    NETWORK_KINDS,
    PROCESS_KINDS,
    ClockStrikes,
    DiskStrikes,
    NetworkStrikes,
    ProcessStrikes,
)
from chaos.tracebacks import unexpected_tracebacks
from tidelog.server.local_nodes import free_ports
from tidelog.testing.chaos.plan import Kind
from tidelog.testing.chaos.target import ClusterView, Strike

BROKERS, SPARE_BROKER = (1, 2, 3), 4
VOTERS, SPARE_CONTROLLER = (11, 12, 13), 14
TOPICS = {"events": 6, "orders": 3}
READY_S = 300.0
PORTS = (9192, 9292, 9392, 9092)
CLUSTER_CONFIG = {"offsets.topic.num.partitions": "8", "transaction.state.log.num.partitions": "8"}
KINDS: Mapping[str, Kind] = {
    **PROCESS_KINDS,
    **DISK_KINDS,
    **NETWORK_KINDS,
    **CLOCK_KINDS,
    **TOPIC_KINDS,
    **MEMBER_KINDS,
}


@dataclass(frozen=True, slots=True)
class LabOptions:
    path: Path
    seed: int
    kinds: Sequence[str] = tuple(KINDS)
    is_small: bool = False
    """Three nodes that are both, on loopback, without spares and without faults of disks and the network."""


class Lab:
    """A target of chaos runs; see `tidelog.testing.chaos.target`."""

    def __init__(self, nodes: Nodes, network: Network | None, kinds: Mapping[str, Kind]) -> None:
        self.topics: Mapping[str, int] = TOPICS
        self.kinds = kinds
        self.strikes: Mapping[str, Strike] = {}
        self.facts: dict[str, object] = {}
        self.cluster = nodes
        brokers = [node for node in nodes.by_number.values() if node.is_broker]
        self.bootstrap = ",".join(f"{node.place.host}:{node.place.grpc_port}" for node in brokers)
        self.kafka_bootstrap = ",".join(f"{node.place.host}:{node.place.kafka_port}" for node in brokers)
        self.operator_bootstrap = self.bootstrap
        self.wrapper: Sequence[str] = () if network is None else network.wrapper(CLIENTS)
        self._disks: DiskStrikes | None = None
        self._network = network

    @property
    def nodes(self) -> Sequence[int]:
        return [node.number for node in self.cluster.running()]

    def arm(self, operations: Operations) -> None:
        self._disks = DiskStrikes(self.cluster)
        self.strikes = {
            **ProcessStrikes(self.cluster).strikes,
            **self._disks.strikes,
            **ClockStrikes(self.cluster).strikes,
            **operations.strikes,
            **({} if self._network is None else NetworkStrikes(self.cluster, self._network).strikes),
        }

    def recover(self) -> list[str]:
        assert self._disks is not None, "it is armed"
        failures = self.cluster.recover(may_end=self._disks.may_end)
        self._disks.may_end = None
        return failures

    def logged_failures(self) -> list[str]:
        if self._network is not None:
            self.facts["packets"] = self._network.counts()
        assert self._disks is not None, "it is armed"
        failed = self._disks.failed
        return [
            f"traceback: in the log of node {number}: {text}"
            for number, node in self.cluster.by_number.items()
            for text in unexpected_tracebacks(node.log(), disk_has_failed=number in failed)
        ]


@contextmanager
def lab(options: LabOptions) -> Iterator[Lab]:
    """A cluster with its topics, in sync. Removes what an earlier run at this path has left."""
    remove_leftovers(options.path)
    if options.path.is_dir() and any(options.path.iterdir()) and not (options.path / "timeline.txt").exists():
        raise SystemExit(f"{options.path} has files that are not of a chaos run: use an empty directory")
    shutil.rmtree(options.path, ignore_errors=True)
    options.path.mkdir(parents=True)
    numbers = BROKERS if options.is_small else (*BROKERS, SPARE_BROKER, *VOTERS, SPARE_CONTROLLER)
    kinds = {name: KINDS[name] for name in options.kinds}
    with ExitStack() as stack:
        network = None if options.is_small else _network(stack, numbers, options.seed, kinds)
        disks = {} if options.is_small else _disks(stack, numbers, options.path, kinds)
        preload = None if options.is_small else _preload(kinds)
        if options.is_small:
            _drop(kinds, (*NETWORK_KINDS, *DISK_KINDS, *CLOCK_KINDS, *MEMBER_KINDS), "")
        places = _places(numbers, network)
        made = [_node(number, options, places[number], disks.get(number)) for number in numbers]
        nodes = Nodes(made, preload=preload)
        nodes.format_all()
        stack.callback(nodes.stop_all)
        for number in numbers:
            if number not in (SPARE_BROKER, SPARE_CONTROLLER):
                nodes.start(number)
        running = Lab(nodes, network, kinds)
        admin = stack.enter_context(tidelog.Admin(running.operator_bootstrap, bootstrap_wait_ms=int(READY_S * 1000)))
        running.arm(Operations(nodes, admin, running.operator_bootstrap))
        _create_topics(running, admin)
        running.facts["kinds"] = sorted(kinds)
        yield running


def _create_topics(running: Lab, admin: tidelog.Admin) -> None:
    failures = running.recover()
    assert not failures, failures
    until(
        lambda: len([row for row in admin.describe_brokers() if not row.is_fenced]) >= 3,
        "three brokers",
        timeout_s=READY_S,
    )
    admin.alter_config(tidelog.ConfigResource("cluster"), sets=CLUSTER_CONFIG)
    for topic, count in {**TOPICS, SCRATCH: 1}.items():
        admin.create_topic(topic, partitions=count, replication_factor=3, configs={"min.insync.replicas": 2})
    with ClusterView(running.operator_bootstrap, TOPICS) as view:
        until(view.is_whole, "the topics are in sync", timeout_s=READY_S)


def _node(number: int, options: LabOptions, place: Place, disk: LossyDisk | None) -> Node:
    is_voter = number in VOTERS or number == SPARE_CONTROLLER
    roles = ("broker", "controller") if options.is_small else ("controller",) if is_voter else ("broker",)
    path = _path(options.path, number)
    return Node(number, roles, place, path, disk, is_first_voter=options.is_small or number in VOTERS)


def _path(path: Path, number: int) -> Path:
    return path / f"node-{number}"


def _places(numbers: Sequence[int], network: Network | None) -> dict[int, Place]:
    if network is not None:
        return {number: Place(network.address(number), *PORTS, network.wrapper(number)) for number in numbers}
    ports = iter(free_ports(4 * len(numbers)))
    return {number: Place("localhost", next(ports), next(ports), next(ports), next(ports)) for number in numbers}


# What this machine can do.


def _network(stack: ExitStack, numbers: Sequence[int], seed: int, kinds: dict[str, Kind]) -> Network | None:
    try:
        return stack.enter_context(Network.made(numbers, seed))
    except MissingError as error:
        _drop(kinds, NETWORK_KINDS, f"no faults of the network, and all nodes on loopback: {error}")
        return None


def _disks(stack: ExitStack, numbers: Sequence[int], path: Path, kinds: dict[str, Kind]) -> dict[int, LossyDisk]:
    disks: dict[int, LossyDisk] = {}
    try:
        for number in numbers:
            made = LossyDisk.made(_path(path, number) / "disk", path / "backing" / str(number))
            disks[number] = stack.enter_context(made)
    except MissingError as error:
        _drop(kinds, DISK_KINDS, f"no faults of disks: {error}")
        return {}
    return disks


def _preload(kinds: dict[str, Kind]) -> Path | None:
    try:
        return native_tools.preload()
    except MissingError as error:
        _drop(kinds, CLOCK_KINDS, f"no jumps of clocks: {error}")
        return None


def _drop(kinds: dict[str, Kind], dropped: Sequence[str] | Mapping[str, Kind], why: str) -> None:
    if why:
        print(why, flush=True)
    for name in dropped:
        kinds.pop(name, None)
