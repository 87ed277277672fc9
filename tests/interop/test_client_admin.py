"""The administration of other clients: topics, settings, groups, records, replicas, and the cluster itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiokafka
import aiokafka.admin
import pytest
from confluent_kafka import (
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    ConsumerGroupType,
    ElectionType,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from support.clusters.waiting import until
from support.interop.clients import (
    DEADLINE_S,
    admin_of,
    confluent,
    fill,
    kafka,
    make_topic,
    needs_kcat,
    only,
    run_kcat,
    until_heard,
)
from support.interop.members import ConfluentConsumerProtocolMember, ConfluentMember, Member, until_read, until_shared

import tidelog
from tidelog.rpc.kafka.dispatch import build
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.interop, pytest.mark.cluster]


@pytest.mark.requirement("a:C-04", "b:U-02")
def test_confluent_makes_changes_and_deletes_topics(cluster: LocalCluster) -> None:
    admin, name = admin_of(cluster), "admin-confluent"
    only(admin.create_topics([confluent.NewTopic(name, 2, 3, config={"retention.ms": "3600000"})]))
    with pytest.raises(KafkaException) as refused:
        only(admin.create_topics([confluent.NewTopic(name, 2, 3)]))
    assert refused.value.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS
    with pytest.raises(KafkaException) as refused:
        only(admin.create_topics([confluent.NewTopic("admin-wide", 1, 9)]))
    assert refused.value.args[0].code() == KafkaError.INVALID_REPLICATION_FACTOR

    only(admin.create_partitions([confluent.NewPartitions(name, 4)]))
    until_heard(cluster, name, 4)
    listed = admin.list_topics(name, timeout=DEADLINE_S).topics[name]
    assert (listed.error, len(listed.partitions)) == (None, 4)
    described = only(admin.describe_topics(TopicCollection([name])))
    assert (described.name, len(described.partitions), described.is_internal) == (name, 4, False)
    with tidelog.Admin(cluster.bootstrap) as ours:
        topic_id = ours.describe_topic(name).topic_id.int
    halves = (described.topic_id.get_most_significant_bits(), described.topic_id.get_least_significant_bits())
    assert topic_id == halves[0] % (1 << 64) << 64 | halves[1] % (1 << 64)
    assert all(len(one.replicas) == len(one.isr) == 3 for one in described.partitions)

    resource = confluent.ConfigResource(confluent.ConfigResource.Type.TOPIC, name)
    assert only(admin.describe_configs([resource]))["retention.ms"].value == "3600000"
    change = confluent.ConfigResource(
        confluent.ConfigResource.Type.TOPIC,
        name,
        incremental_configs=[
            confluent.ConfigEntry("retention.ms", "7200000", incremental_operation=confluent.AlterConfigOpType.SET),
            confluent.ConfigEntry(
                "cleanup.policy", "compact", incremental_operation=confluent.AlterConfigOpType.APPEND
            ),
        ],
    )
    only(admin.incremental_alter_configs([change]))

    def is_changed() -> bool:
        now = only(admin.describe_configs([resource]))
        policies = set(now["cleanup.policy"].value.split(","))
        return now["retention.ms"].value == "7200000" and policies == {"compact", "delete"}

    until(is_changed, "it is changed")
    soon = confluent.ConfigEntry("retention.ms", "soon", incremental_operation=confluent.AlterConfigOpType.SET)
    wrong = confluent.ConfigResource(confluent.ConfigResource.Type.TOPIC, name, incremental_configs=[soon])
    with pytest.raises(KafkaException) as refused:
        only(admin.incremental_alter_configs([wrong]))
    assert refused.value.args[0].code() == KafkaError.INVALID_CONFIG

    broker = only(admin.describe_configs([confluent.ConfigResource(confluent.ConfigResource.Type.BROKER, "1")]))
    assert broker["group.initial.rebalance.delay.ms"].value == "0"

    only(admin.delete_topics([name]))
    until(lambda: name not in admin.list_topics(timeout=DEADLINE_S).topics, "it is gone")
    with pytest.raises(KafkaException) as refused:
        only(admin.delete_topics([name]))
    assert refused.value.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART


@pytest.mark.requirement("b:U-02")
def test_confluent_asks_for_offsets_deletes_records_and_elects(cluster: LocalCluster) -> None:
    admin = admin_of(cluster)
    topic = make_topic(cluster, "admin-records", 1)
    fill(cluster, topic, range(100))
    place = TopicPartition(topic, 0)
    assert only(admin.list_offsets({place: confluent.OffsetSpec.latest()})).offset == 100
    assert only(admin.list_offsets({place: confluent.OffsetSpec.earliest()})).offset == 0
    assert 0 <= only(admin.list_offsets({place: confluent.OffsetSpec.max_timestamp()})).offset < 100
    assert only(admin.delete_records([TopicPartition(topic, 0, 40)])).low_watermark == 40
    assert only(admin.list_offsets({place: confluent.OffsetSpec.earliest()})).offset == 40
    elected = admin.elect_leaders(ElectionType.PREFERRED, [place]).result(DEADLINE_S)
    assert elected[place] is None or elected[place].code() == KafkaError.ELECTION_NOT_NEEDED

    found = admin.describe_cluster().result(DEADLINE_S)
    assert found.cluster_id == cluster.cluster_id
    assert {node.id: node.port for node in found.nodes} == {n: cluster.ports(n).kafka for n in (1, 2, 3)}
    assert found.controller.id in (1, 2, 3)


@pytest.mark.requirement("b:U-02")
@pytest.mark.parametrize("kind", [ConfluentMember, ConfluentConsumerProtocolMember], ids=["classic", "consumer"])
def test_confluent_looks_after_groups(kind: type[ConfluentMember], cluster: LocalCluster) -> None:
    admin, group = admin_of(cluster), f"admin-{kind.protocol}"
    topic = make_topic(cluster, group, 2)
    values = fill(cluster, topic, range(60))
    member: Member = kind(cluster, group, topic)
    wanted = ConsumerGroupType.CLASSIC if kind.protocol == "classic" else ConsumerGroupType.CONSUMER
    try:
        until_shared([member], 2)
        until_read([member], values)
        listed = admin.list_consumer_groups().result(DEADLINE_S)
        assert not listed.errors
        (row,) = [one for one in listed.valid if one.group_id == group]
        assert (row.state, row.type) == (ConsumerGroupState.STABLE, wanted)
        described = only(admin.describe_consumer_groups([group]))
        assert (described.state, described.type, described.group_id) == (ConsumerGroupState.STABLE, wanted, group)
        (only_member,) = described.members
        assert {(one.topic, one.partition) for one in only_member.assignment.topic_partitions} == {
            (topic, 0),
            (topic, 1),
        }
        assert only_member.client_id == "rdkafka"
        assert described.coordinator.id in (1, 2, 3)
        with pytest.raises(KafkaException) as refused:
            only(admin.delete_consumer_groups([group]))
        assert refused.value.args[0].code() == KafkaError.NON_EMPTY_GROUP
    finally:
        member.stop()

    def committed() -> dict[int, int]:
        found = only(admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)]))
        return {one.partition: one.offset for one in found.topic_partitions}

    assert sum(committed().values()) == 60
    until(lambda: only(admin.describe_consumer_groups([group])).state == ConsumerGroupState.EMPTY, "it is empty")
    back = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0, 3), TopicPartition(topic, 1, 4)])
    only(admin.alter_consumer_group_offsets([back]))
    assert committed() == {0: 3, 1: 4}
    again: Member = kind(cluster, group, topic)
    try:
        until(lambda: len(again.records) >= 60 - 7, "it reads again what comes after")
    finally:
        again.stop()
    assert min(offset for partition, offset, _ in again.records if partition == 0) == 3
    only(admin.delete_consumer_groups([group]))
    assert group not in {one.group_id for one in admin.list_consumer_groups().result(DEADLINE_S).valid}


@pytest.mark.requirement("a:N-11", "a:C-02", "b:U-02")
def test_kafka_python_administers(cluster: LocalCluster) -> None:
    admin = kafka.admin.KafkaAdminClient(bootstrap_servers=cluster.kafka_bootstrap)
    name = "admin-python"
    try:
        served = admin.api_versions()
        assert {key: tuple(row) for key, row in _versions(served).items()} == {
            key: (row.advertised_low, row.high) for key, row in build().items()
        }
        admin.create_topics({name: {"num_partitions": 2, "replication_factor": 3}}, wait_for_metadata=True)
        until(lambda: name in admin.list_topics(), "every broker has heard of it")
        admin.create_partitions({name: 3})
        until_heard(cluster, name, 3)
        assert len(admin.describe_topics([name])[0]["partitions"]) == 3
        (row,) = admin.describe_topic_partitions([name])["topics"]
        assert len(row["partitions"]) == 3
        fill(cluster, name, range(30))
        place = kafka.TopicPartition(name, 0)
        (producer,) = admin.describe_producers([place])[place].active_producers
        assert (producer.producer_epoch, producer.last_sequence >= 0) == (0, True)

        resource = kafka.admin.ConfigResource("topic", name, {"retention.ms": "1234567"})
        admin.alter_configs([resource])
        asked = [kafka.admin.ConfigResource("topic", name)]

        def retention() -> Any:
            return admin.describe_configs(asked, config_filter="all")["topic"][name]["retention.ms"]["value"]

        until(lambda: retention() == "1234567", "it is changed")
        admin.reset_configs([kafka.admin.ConfigResource("topic", name, ["retention.ms"])])
        until(lambda: retention() == "604800000", "it is back at the default")

        spec = kafka.admin.OffsetSpec.LATEST
        end = admin.list_partition_offsets({place: spec})[place].offset
        assert end > 0
        admin.delete_records({place: end})
        assert admin.list_partition_offsets({place: kafka.admin.OffsetSpec.EARLIEST})[place].offset == end

        _administer_group(admin, name)
        assert admin.describe_cluster()["cluster_id"] == cluster.cluster_id
        quorum = admin.describe_metadata_quorum()
        assert quorum["topics"][0]["partitions"][0]["leader_id"] in (1, 2, 3)
        assert len(admin.describe_log_dirs([name])) == 3
        assert admin.list_partition_reassignments() == {}
        assert admin.alter_partition_reassignments({place: [3, 2, 1]}) == {place: None}
        until(lambda: not admin.list_partition_reassignments(), "it is moved")
        admin.elect_leaders(0, {name: [0]}, raise_errors=False)
        until(lambda: _leader(admin, name) == 3, "the first of the new replicas leads")
        admin.delete_topics([name])
        until(lambda: name not in admin.list_topics(), "it is gone")
    finally:
        admin.close()


def _administer_group(admin: Any, name: str) -> None:
    group = "admin-python"
    both = {kafka.TopicPartition(name, number): kafka.OffsetAndMetadata(number, "", -1) for number in (1, 2)}
    admin.alter_group_offsets(group, both)
    found = admin.list_group_offsets({group: None})[group]
    assert {one.partition: row.offset for one, row in found.items()} == {1: 1, 2: 2}
    admin.reset_group_offsets(group, {kafka.TopicPartition(name, 1): kafka.admin.OffsetSpec.EARLIEST})
    admin.delete_group_offsets(group, [kafka.TopicPartition(name, 2)])
    found = admin.list_group_offsets({group: None})[group]
    assert {one.partition: row.offset for one, row in found.items()} == {1: 0}
    assert group in {one["group_id"] for one in admin.list_groups()}
    assert admin.describe_groups([group])[group]["group_state"] == "Empty"
    admin.delete_groups([group])
    assert group not in {one["group_id"] for one in admin.list_groups()}


def _versions(served: dict[Any, Any]) -> dict[int, tuple[int, int]]:
    return {int(key): (row[0], row[1]) for key, row in served.items()}


def _leader(admin: Any, name: str) -> int:
    rows = admin.describe_topics([name])[0]["partitions"]
    found: int = next(row["leader_id"] for row in rows if row["partition_index"] == 0)
    return found


@pytest.mark.requirement("b:U-02")
def test_aiokafka_administers(cluster: LocalCluster) -> None:
    asyncio.run(administer_with_aiokafka(cluster))


async def administer_with_aiokafka(cluster: LocalCluster) -> None:
    name = "admin-aiokafka"
    admin = aiokafka.admin.AIOKafkaAdminClient(bootstrap_servers=cluster.kafka_bootstrap)
    await admin.start()

    async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                if await condition():
                    return
                await asyncio.sleep(0.05)

    async def partitions() -> int:
        return len((await admin.describe_topics([name]))[0]["partitions"])

    async def is_gone() -> bool:
        return name not in await admin.list_topics()

    async def has_three() -> bool:
        return await partitions() == 3

    async def is_changed() -> bool:
        (reported,) = await admin.describe_configs([resource])
        return any("retention.ms" in str(row) and "7654321" in str(row) for row in reported.resources)

    try:
        made = await admin.create_topics([aiokafka.admin.NewTopic(name, 2, 3)])
        assert [row[1] for row in made.topic_errors] == [0]
        await admin.create_partitions({name: aiokafka.admin.NewPartitions(3)})
        await eventually(has_three)
        resource = aiokafka.admin.config_resource.ConfigResource(
            aiokafka.admin.config_resource.ConfigResourceType.TOPIC, name, {"retention.ms": "7654321"}
        )
        await admin.alter_configs([resource])
        await eventually(is_changed)
        assert (await admin.describe_cluster())["cluster_id"] == cluster.cluster_id
        fill(cluster, name, range(30))
        place = aiokafka.TopicPartition(name, 0)
        deleted = await admin.delete_records({place: aiokafka.admin.RecordsToDelete(before_offset=1)})
        assert deleted == {place: 1}
        with tidelog.Admin(cluster.bootstrap) as ours:
            ours.alter_group_offsets(name, {tidelog.TopicPartition(name, 1): 5})
        assert (name, "") in [(row[0], "") for row in await admin.list_consumer_groups()]
        found = await admin.list_consumer_group_offsets(name)
        assert {one.partition: row.offset for one, row in found.items()} == {1: 5}
        (described,) = await admin.describe_consumer_groups([name])
        assert described.groups[0][2] == "Empty"
        await admin.delete_topics([name])
        await eventually(is_gone)
    finally:
        await admin.close()


@needs_kcat
@pytest.mark.requirement("a:C-05", "a:N-11")
def test_kcat_lists_the_cluster(cluster: LocalCluster) -> None:
    topic = make_topic(cluster, "admin-kcat", 2)
    said = run_kcat(cluster, "-L", "-t", topic)
    assert "3 brokers:" in said
    assert f'topic "{topic}" with 2 partitions:' in said
    for number in (1, 2, 3):
        assert f"broker {number} at localhost:{cluster.ports(number).kafka}" in said
