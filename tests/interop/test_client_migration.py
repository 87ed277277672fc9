"""A group changes between the classic and the consumer protocol, client by client, while records come in.

Each member notes in its rebalance callbacks what it holds; a partition that two members hold at once fails the test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient
from support.clusters.waiting import until
from support.interop.clients import DEADLINE_S, PEERS, Row, make_topic
from support.interop.members import (
    AioKafkaMember,
    ConfluentConsumerProtocolMember,
    ConfluentMember,
    KafkaPythonMember,
    Member,
    TidelogMember,
    until_committed,
    until_read,
    until_shared,
)

import tidelog
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.interop, pytest.mark.cluster]

PARTITIONS = 6


class Owners:
    """Who holds what, by the callbacks of all members."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: dict[int, object] = {}
        self.overlaps: list[str] = []

    def assigned(self, member: object, partitions: set[int]) -> None:
        with self._lock:
            for number in partitions:
                other = self._owners.get(number)
                if other is not None and other is not member:
                    self.overlaps.append(
                        f"partition {number} of {type(other).__name__} given to {type(member).__name__}"
                    )
                self._owners[number] = member

    def revoked(self, member: object, partitions: set[int]) -> None:
        with self._lock:
            for number in partitions:
                if self._owners.get(number) is member:
                    del self._owners[number]


class _Watched(ConfluentMember):
    """Its callbacks say what it holds. librdkafka gives a partition up when the callback has returned."""

    assignor = ""

    def open(self, cluster: LocalCluster, group: str, topic: str, options: dict[str, Any]) -> None:
        self.owners: Owners = options["owners"]
        if self.assignor:
            options = {**options, "assignor": self.assignor}
        super().open(cluster, group, topic, options)
        self.consumer.subscribe([topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_revoke)

    def _on_assign(self, _: Any, partitions: list[confluent_kafka.TopicPartition]) -> None:
        self.owners.assigned(self, {one.partition for one in partitions})

    def _on_revoke(self, _: Any, partitions: list[confluent_kafka.TopicPartition]) -> None:
        self.owners.revoked(self, {one.partition for one in partitions})

    def close(self) -> None:
        super().close()
        self.owners.revoked(self, set(range(PARTITIONS)))


class Eager(_Watched):
    assignor = "range"


class Cooperative(_Watched):
    assignor = "cooperative-sticky"


class NewProtocol(_Watched):
    protocol = "consumer"


class Load:
    """A producer that goes on until it is stopped; it knows what was stored."""

    def __init__(self, cluster: LocalCluster, topic: str) -> None:
        self.values: set[bytes] = set()
        self._end = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(cluster, topic), daemon=True)
        self._thread.start()

    def _run(self, cluster: LocalCluster, topic: str) -> None:
        try:
            number = 0
            while not self._end.wait(0.05):
                rows = [Row(b"%d" % each, b"key-%d" % each) for each in range(number, number + 20)]
                PEERS["tidelog"].write(cluster, topic, rows)
                self.values |= {row.value for row in rows if row.value is not None}
                number += 20
        except BaseException as error:
            self._error = error

    def stop(self) -> None:
        self._end.set()
        self._thread.join(DEADLINE_S)
        assert self._error is None, self._error


def kind_of(cluster: LocalCluster, group: str) -> str:
    with tidelog.Admin(cluster.bootstrap) as admin:
        return str(admin.describe_group(group).type)


def roll(
    cluster: LocalCluster, name: str, before: list[Callable[..., Member]], after: list[Callable[..., Member]], kind: str
) -> None:
    """One member after the other is stopped, and one of `after` started in its place."""
    topic, group, owners = make_topic(cluster, name, PARTITIONS), name, Owners()
    load = Load(cluster, topic)
    members: list[Member] = [make(cluster, group, topic, owners=owners) for make in before]
    everybody = list(members)
    try:
        until_shared(members, PARTITIONS)
        for make in after:
            members.pop(0).stop()
            members.append(make(cluster, group, topic, owners=owners))
            everybody.append(members[-1])
            until_shared(members, PARTITIONS)
        until(lambda: kind_of(cluster, group) == kind, f"{group} is of the kind {kind}")
        load.stop()
        until_read(everybody, load.values)
        until_committed(cluster, group)
    finally:
        load.stop()
        for member in members:
            member.stop()
    assert not owners.overlaps
    offsets = [(partition, offset) for member in everybody for partition, offset, _ in member.records]
    for partition in range(PARTITIONS):
        seen = sorted({offset for number, offset in offsets if number == partition})
        assert seen == list(range(len(seen))), "no record is passed over"


@pytest.mark.requirement("b:U-02")
@pytest.mark.parametrize("is_upgrade", [True, False], ids=["upgrade", "downgrade"])
@pytest.mark.parametrize("classic", [Eager, Cooperative], ids=["eager", "cooperative"])
def test_a_group_of_librdkafka_clients_changes_its_protocol_in_a_rolling_restart(
    classic: type[Member], is_upgrade: bool, cluster: LocalCluster
) -> None:
    if is_upgrade:
        roll(cluster, f"upgrade-{classic.__name__}", [classic] * 3, [NewProtocol] * 3, "consumer")
    else:
        roll(cluster, f"downgrade-{classic.__name__}", [NewProtocol] * 3, [classic] * 3, "classic")


@pytest.mark.requirement("b:U-02")
@pytest.mark.parametrize("kind", [AioKafkaMember, KafkaPythonMember], ids=["aiokafka", "kafka-python"])
def test_python_clients_of_the_classic_protocol_are_replaced_by_consumers_and_come_back(
    kind: type[Member], cluster: LocalCluster
) -> None:
    name = f"python-{kind.__name__}"
    topic = make_topic(cluster, name, PARTITIONS)
    load = Load(cluster, topic)
    members: list[Member] = [kind(cluster, name, topic), kind(cluster, name, topic)]
    everybody = list(members)
    try:
        until_shared(members, PARTITIONS)
        for make in (ConfluentConsumerProtocolMember, ConfluentConsumerProtocolMember, kind, kind):
            members.pop(0).stop()
            members.append(make(cluster, name, topic))
            everybody.append(members[-1])
            until_shared(members, PARTITIONS)
        until(lambda: kind_of(cluster, name) == "classic", "it is a classic group again")
        load.stop()
        until_read(everybody, load.values)
        until_committed(cluster, name)
    finally:
        load.stop()
        for member in members:
            member.stop()


@pytest.mark.requirement("a:C-16", "b:U-02")
def test_tidelog_consumers_and_classic_kafka_clients_share_a_group(cluster: LocalCluster) -> None:
    name = "ours-and-classic"
    topic, owners = make_topic(cluster, name, PARTITIONS), Owners()
    load = Load(cluster, topic)
    members: list[Member] = [TidelogMember(cluster, name, topic)]
    try:
        until_shared(members, PARTITIONS)
        members += [
            Eager(cluster, name, topic, owners=owners),
            Cooperative(cluster, name, topic, owners=owners),
        ]
        until_shared(members, PARTITIONS)
        admin = AdminClient({"bootstrap.servers": cluster.kafka_bootstrap})
        found = admin.describe_consumer_groups([name], request_timeout=DEADLINE_S)[name].result()
        assert len(found.members) == 3
        members[0].stop()
        until_shared(members[1:], PARTITIONS)
        load.stop()
        until_read(members, load.values)
        until_committed(cluster, name)
    finally:
        load.stop()
        for member in members:
            member.stop()
    assert not owners.overlaps


def kill_coordinator(cluster: LocalCluster, group: str, kind: str) -> int:
    """Of a group that is of this kind; which node it was."""
    until(lambda: kind_of(cluster, group) == kind, f"the group is of the kind {kind}")
    with tidelog.Admin(cluster.bootstrap) as admin:
        node = int(admin.describe_group(group).coordinator)
    cluster.kill(node)
    return node


@pytest.mark.timeout(180)
def test_the_coordinator_is_killed_while_a_group_changes_its_protocol(harmed: LocalCluster) -> None:
    """Once while members of both protocols share it, once when it has just become a classic group again."""
    cluster, name = harmed, "killed-coordinator"
    topic, owners = make_topic(cluster, name, PARTITIONS), Owners()
    load = Load(cluster, topic)
    members: list[Member] = [Cooperative(cluster, name, topic, owners=owners) for _ in range(2)]
    everybody = list(members)
    try:
        until_shared(members, PARTITIONS)
        members.append(NewProtocol(cluster, name, topic, owners=owners))
        everybody.append(members[-1])
        node = kill_coordinator(cluster, name, "consumer")
        until_shared(members, PARTITIONS, timeout_s=2 * DEADLINE_S)
        cluster.start(node)
        members.pop().stop()
        node = kill_coordinator(cluster, name, "classic")
        until_shared(members, PARTITIONS, timeout_s=2 * DEADLINE_S)
        cluster.start(node)
        load.stop()
        until_read(everybody, load.values)
        until_committed(cluster, name)
    finally:
        load.stop()
        for member in members:
            member.stop()
    assert not owners.overlaps
