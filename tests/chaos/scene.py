"""The cluster of a run: three nodes on loopback, each with a log directory that can be full where this machine allows
it, and answers to who leads what.

Faults of the network, of clocks and of hanging disks would be more methods here, and more kinds in `plan`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from harmed_machine import CannotError, SmallDisk
from patience import until
from procedures import controller, is_whole, partitions

import tidelog
from tidelog.coordinator.coordinator import OFFSETS_TOPIC
from tidelog.coordinator.service import partition_for
from tidelog.model.errors import TidelogError
from tidelog.testing import LocalCluster

NODES = (1, 2, 3)
DISK_MIB = 192
READY_S = 180.0
"""Generous: the machine may have other work."""
SETTINGS: dict[str, object] = {"log.dirs": ["disk"], "metadata.log.dir": "metadata"}
CLUSTER_CONFIG = {"offsets.topic.num.partitions": "8"}


class Scene:
    def __init__(self, cluster: LocalCluster, disks: dict[int, SmallDisk], topics: dict[str, int]) -> None:
        self.cluster = cluster
        self.disks = disks
        self.topics = topics

    @property
    def at(self) -> str:
        return self.cluster.bootstrap

    # Who is who.

    def leader(self, pick: int) -> int | None:
        places = [(topic, number) for topic, count in self.topics.items() for number in range(count)]
        topic, number = places[pick % len(places)]
        return self._leader_of(topic, number)

    def coordinator(self, group: str) -> int | None:
        try:
            rows = partitions(self.at, OFFSETS_TOPIC)
        except (TidelogError, AssertionError):
            return None
        leader = rows[partition_for(group, len(rows))].leader if rows else -1
        return leader if leader >= 0 else None

    def controller(self) -> int | None:
        try:
            found = controller(self.at)
        except (TidelogError, AssertionError):
            return None
        return found if found in NODES else None

    def _leader_of(self, topic: str, number: int) -> int | None:
        try:
            leader = partitions(self.at, topic)[number].leader
        except (TidelogError, AssertionError):
            return None
        return leader if leader >= 0 else None

    # How it is.

    def is_whole(self) -> bool:
        """All replicas of all topics are in sync."""
        return all(is_whole(self.at, topic) for topic in self.topics)

    def ends(self) -> dict[tuple[str, int], int]:
        """The end of every partition."""
        with tidelog.Consumer(self.at, default_api_timeout_ms=120_000) as consumer:
            places = [(topic, number) for topic, count in self.topics.items() for number in range(count)]
            found = consumer.end_offsets(*(tidelog.TopicPartition(*place) for place in places))
        return {(one.topic, one.partition): offset for one, offset in found.items()}

    def tracebacks(self) -> list[str]:
        """Nodes whose logs have one: something has happened that nobody expected."""
        return [f"node-{number}" for number in NODES if "Traceback" in self.cluster.log(number)]


@contextmanager
def scene(data: Path, topics: dict[str, int]) -> Iterator[Scene]:
    """A cluster with these topics, in sync. Without root there are no disks to fill."""
    with ExitStack() as stack:
        cluster = LocalCluster(nodes=len(NODES), data=data, settings=SETTINGS, is_started=False)
        disks: dict[int, SmallDisk] = {}
        try:
            for number in NODES:
                path = cluster.path(number) / "disk"
                disks[number] = stack.enter_context(SmallDisk.made(path, size_mib=DISK_MIB))
        except CannotError as error:
            print(f"no full disks in this run: {error}", flush=True)
            disks = {}
        stack.enter_context(cluster)
        cluster.start_all(timeout_s=READY_S)
        with tidelog.Admin(cluster.bootstrap) as admin:
            admin.alter_config(tidelog.ConfigResource("cluster"), sets=CLUSTER_CONFIG)
            for topic, count in topics.items():
                admin.create_topic(
                    topic, partitions=count, replication_factor=len(NODES), configs={"min.insync.replicas": 2}
                )
        made = Scene(cluster, disks, topics)
        until(made.is_whole, "the topics are in sync", timeout_s=READY_S)
        yield made
