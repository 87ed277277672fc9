"""One group, two APIs: members of Kafka clients and of ours share partitions and offsets."""

from __future__ import annotations

import asyncio

import aiokafka
import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient
from support.interop.clients import DEADLINE_S, KCAT, fill, kafka, make_topic, needs_kcat, run_kcat
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

PARTITIONS = 4


def read_once(cluster: LocalCluster, kind: type[Member], group: str, topic: str, wanted: set[bytes]) -> None:
    """A member reads exactly these, commits and leaves."""
    member = kind(cluster, group, topic)
    try:
        until_read([member], wanted)
    finally:
        member.stop()
    assert sorted(value for _, _, value in member.records if value is not None) == sorted(wanted), kind.__name__


@pytest.mark.requirement("b:U-02")
def test_members_of_both_apis_share_one_group(cluster: LocalCluster) -> None:
    topic, group = make_topic(cluster, "mixed", PARTITIONS), "mixed"
    values = fill(cluster, topic, range(100))
    members: list[Member] = [TidelogMember(cluster, group, topic)]
    try:
        until_shared(members, PARTITIONS)
        until_read(members, values)
        until_committed(cluster, group)
        members.append(ConfluentConsumerProtocolMember(cluster, group, topic))
        until_shared(members, PARTITIONS)
        assert [len(member.held) for member in members] == [2, 2]
        values |= fill(cluster, topic, range(100, 300))
        until_read(members, values)
        assert members[1].records, "the Kafka client has its share"

        with tidelog.Admin(cluster.bootstrap) as admin:
            ours = admin.describe_group(group)
        theirs = AdminClient({"bootstrap.servers": cluster.kafka_bootstrap})
        described = theirs.describe_consumer_groups([group], request_timeout=DEADLINE_S)[group].result()
        assert described.state == confluent_kafka.ConsumerGroupState.STABLE
        assert {one.member_id for one in described.members} == {one.member_id for one in ours.members}
        shares = [{place.partition for place in one.assignment.topic_partitions} for one in described.members]
        assert sorted(map(len, shares)) == [2, 2]
        assert set.union(*shares) == set(range(PARTITIONS))

        until_committed(cluster, group)
        members[0].stop()
        until_shared(members[1:], PARTITIONS)
        values |= fill(cluster, topic, range(300, 400))
        until_read(members, values)
        until_committed(cluster, group)
        members.append(TidelogMember(cluster, group, topic))
        until_shared(members[1:], PARTITIONS)
        members[1].stop()
        until_shared(members[2:], PARTITIONS)
    finally:
        for member in members:
            member.stop()
    read = [value for member in members for _, _, value in member.records]
    assert len(read) == len(set(read)) == 400


@pytest.mark.requirement("b:U-02")
@pytest.mark.parametrize(
    "kind",
    [ConfluentMember, ConfluentConsumerProtocolMember, AioKafkaMember, KafkaPythonMember],
    ids=["confluent-classic", "confluent-consumer", "aiokafka", "kafka-python"],
)
def test_a_member_continues_where_a_member_of_the_other_api_stopped(kind: type[Member], cluster: LocalCluster) -> None:
    name = f"relay-{kind.__name__}"
    topic = make_topic(cluster, name, PARTITIONS)
    read_once(cluster, TidelogMember, name, topic, fill(cluster, topic, range(50)))
    read_once(cluster, kind, name, topic, fill(cluster, topic, range(50, 100)))
    read_once(cluster, TidelogMember, name, topic, fill(cluster, topic, range(100, 150)))


def test_all_clients_report_the_same_committed_offsets(cluster: LocalCluster) -> None:
    topic, group = make_topic(cluster, "offsets-alike", 2), "offsets-alike"
    fill(cluster, topic, range(50))
    with tidelog.Admin(cluster.bootstrap) as admin:
        places = [tidelog.TopicPartition(topic, number) for number in range(2)]
        admin.alter_group_offsets(group, {places[0]: tidelog.OffsetAndMetadata(7, "seven"), places[1]: 9})

    config = {"bootstrap.servers": cluster.kafka_bootstrap, "group.id": group}
    consumer = confluent_kafka.Consumer(config)
    try:
        asked = [confluent_kafka.TopicPartition(topic, number) for number in range(2)]
        assert [one.offset for one in consumer.committed(asked, timeout=DEADLINE_S)] == [7, 9]
    finally:
        consumer.close()

    python = kafka.KafkaConsumer(bootstrap_servers=cluster.kafka_bootstrap, group_id=group)
    try:
        found = python.committed(kafka.TopicPartition(topic, 0), metadata=True)
        assert (found.offset, found.metadata) == (7, "seven")
    finally:
        python.close()

    async def ask() -> int | None:
        consumer = aiokafka.AIOKafkaConsumer(bootstrap_servers=cluster.kafka_bootstrap, group_id=group)
        await consumer.start()
        try:
            place = aiokafka.TopicPartition(topic, 1)
            consumer.assign([place])
            committed: int | None = await consumer.committed(place)
            return committed
        finally:
            await consumer.stop()

    assert asyncio.run(ask()) == 9


@needs_kcat
def test_kcat_reads_as_a_member_of_a_group(cluster: LocalCluster) -> None:
    assert KCAT is not None
    topic, group = make_topic(cluster, "kcat-group", 2), "kcat-group"
    values = fill(cluster, topic, range(20))
    said = run_kcat(cluster, "-c", "20", "-q", "-X", "auto.offset.reset=earliest", "-G", group, topic)
    assert {line.encode() for line in said.split()} == values
    until_committed(cluster, group)
