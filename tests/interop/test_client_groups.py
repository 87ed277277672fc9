"""Groups of each client: shares, joining and leaving, committed offsets, static members."""

from __future__ import annotations

import pytest
from support.clusters.waiting import until
from support.interop.clients import fill, make_topic
from support.interop.members import (
    AioKafkaMember,
    ConfluentConsumerProtocolMember,
    ConfluentMember,
    KafkaPythonMember,
    Member,
    until_committed,
    until_read,
    until_shared,
)

import tidelog
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.interop, pytest.mark.cluster]

PARTITIONS = 4
KINDS = {
    "confluent-classic": ConfluentMember,
    "confluent-consumer": ConfluentConsumerProtocolMember,
    "aiokafka": AioKafkaMember,
    "kafka-python": KafkaPythonMember,
}
every_kind = pytest.mark.parametrize("name", KINDS)


@pytest.mark.requirement("b:U-02")
@every_kind
def test_members_come_and_go_and_every_record_is_read_once(name: str, cluster: LocalCluster) -> None:
    topic, group, kind = make_topic(cluster, f"shares-{name}", PARTITIONS), f"group-{name}", KINDS[name]
    values = fill(cluster, topic, range(200))
    members: list[Member] = [kind(cluster, group, topic)]
    try:
        until_shared(members, PARTITIONS)
        until_read(members, values)
        until_committed(cluster, group)
        members.append(kind(cluster, group, topic))
        until_shared(members, PARTITIONS)
        values |= fill(cluster, topic, range(200, 400))
        until_read(members, values)
        assert all(len(member.held) == 2 for member in members)
        assert members[1].records, "the second has its share"
        until_committed(cluster, group)
        members[0].stop()
        until_shared(members[1:], PARTITIONS)
        values |= fill(cluster, topic, range(400, 500))
        until_read(members, values)
        until_committed(cluster, group)
    finally:
        for member in members:
            member.stop()
    read = [value for member in members for _, _, value in member.records]
    assert sorted(read) == sorted(values), "what was committed is not read again"  # type: ignore[type-var]

    late = fill(cluster, topic, range(500, 520))
    last = kind(cluster, group, topic)
    try:
        until_read([last], late)
    finally:
        last.stop()
    assert {value for _, _, value in last.records} == late, "it goes on where the group has stopped"


@pytest.mark.requirement("b:U-02")
@every_kind
def test_a_static_member_comes_back_to_its_partitions(name: str, cluster: LocalCluster) -> None:
    topic, group, kind = make_topic(cluster, f"static-{name}", PARTITIONS), f"static-{name}", KINDS[name]
    one: Member = kind(cluster, group, topic, instance="one")
    two: Member = kind(cluster, group, topic, instance="two")
    try:
        until_shared([one, two], PARTITIONS)
        own, changes = two.held, len(one.history)
        two.stop()
        values = fill(cluster, topic, range(100))
        two = kind(cluster, group, topic, instance="two")
        until(lambda: two.held == own, "it has its own partitions again", timeout_s=20)
        until_read([one, two], values)
        assert len(one.history) == changes, "nobody else has noticed"
    finally:
        one.stop()
        two.stop()
    with tidelog.Admin(cluster.bootstrap) as admin:
        described = admin.describe_group(group)
        assert {member.instance_id for member in described.members} <= {"one", "two"}
