"""What other clients ask of a cluster beside records: many groups, settings, users, access rules."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from importlib import import_module

import aiokafka
import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition
from support.clusters.waiting import until
from support.interop.clients import DEADLINE_S, admin_of, confluent, kafka, make_topic, only
from support.interop.programs import Program, needs

from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.interop, pytest.mark.cluster]

GROUPS = 1_200
SASL = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "PLAIN"}
QUICKLY_S = 20.0


@pytest.fixture(scope="module")
def crowd(cluster: LocalCluster) -> Iterator[list[str]]:
    """The names of more than a thousand groups with an offset."""
    make_topic(cluster, "crowded", 1)
    admin = admin_of(cluster)
    names = [f"crowd-{number}" for number in range(GROUPS)]
    place = TopicPartition("crowded", 0, 1)
    left = list(names)

    def commit_hundred() -> bool:
        """A coordinator that is still reading its groups refuses some of them, in their rows."""
        some = left[:100]
        futures = [
            future
            for name in some
            for future in admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(name, [place])]).values()
        ]
        done = [future.result(DEADLINE_S) for future in futures]
        stored = {row.group_id for row in done if all(one.error is None for one in row.topic_partitions)}
        left[:] = [name for name in left if name not in stored]
        return not left

    until(commit_hundred, "all groups have an offset")
    yield names
    for first in range(0, GROUPS, 100):
        for future in admin.delete_consumer_groups(names[first : first + 100], request_timeout=DEADLINE_S).values():
            future.result(DEADLINE_S)


def test_group_tools_see_more_than_a_thousand_groups(cluster: LocalCluster, crowd: list[str]) -> None:
    """kafka-python finds the coordinators of all groups by one request."""
    admin = admin_of(cluster)
    listed = {group.group_id for group in admin.list_consumer_groups().result(DEADLINE_S).valid}
    assert set(crowd) <= listed
    described = admin.describe_consumer_groups(crowd, request_timeout=DEADLINE_S)
    assert [described[name].result(DEADLINE_S).group_id for name in crowd] == crowd
    client = kafka.KafkaAdminClient(bootstrap_servers=cluster.kafka_bootstrap)
    try:
        found = client.describe_groups(crowd)
    finally:
        client.close()
    assert len(found) == GROUPS


@needs("franz")
def test_kadm_describes_more_than_a_thousand_groups_at_once(cluster: LocalCluster, crowd: list[str]) -> None:
    groups = Program("kadm", "groups", cluster.kafka_bootstrap)
    try:
        assert {row["group"] for row in groups.wait(2 * DEADLINE_S)} >= set(crowd)
    finally:
        groups.end()


def test_topic_takes_the_settings_of_kafka_without_a_meaning_here(cluster: LocalCluster) -> None:
    settings = {
        "preallocate": "false",
        "remote.storage.enable": "false",
        "local.retention.ms": "-2",
        "local.retention.bytes": "-2",
        "compression.type": "zstd",
        "compression.zstd.level": "9",
        "compression.gzip.level": "-1",
        "compression.lz4.level": "9",
    }
    admin = admin_of(cluster)
    only(admin.create_topics([confluent.NewTopic("mirrored", 1, 3, config=settings)]))
    shown = only(admin.describe_configs([confluent.ConfigResource("topic", "mirrored")]))
    assert {name: shown[name].value for name in settings} == settings
    with pytest.raises(KafkaException) as refused:
        only(admin.create_topics([confluent.NewTopic("tiered", 1, 3, config={"remote.storage.enable": "true"})]))
    assert refused.value.args[0].code() == KafkaError.INVALID_CONFIG
    assert "tiered storage" in refused.value.args[0].str()


def test_access_rules_are_disabled_and_brokers_show_their_own_settings(cluster: LocalCluster) -> None:
    admin = admin_of(cluster)
    names = import_module("kafka.admin")
    everything = names.ACLFilter(
        "User:*",
        "*",
        names.ACLOperation.ANY,
        names.ACLPermissionType.ANY,
        names.ResourcePattern(names.ResourceType.TOPIC, "x"),
    )
    client = kafka.KafkaAdminClient(bootstrap_servers=cluster.kafka_bootstrap)
    try:
        with pytest.raises(kafka.errors.SecurityDisabledError, match="no authorizer"):
            client.describe_acls(everything)
    finally:
        client.close()
    for number in (1, 2, 3):
        shown = only(admin.describe_configs([confluent.ConfigResource("broker", str(number))]))
        assert (shown["node.id"].value, shown["log.dirs"].value) == (str(number), str(cluster.path(number) / "data"))
        assert shown["log.dirs"].source == confluent.ConfigSource.STATIC_BROKER_CONFIG.value
    described = admin.describe_cluster(include_authorized_operations=True).result(DEADLINE_S)
    assert len(described.authorized_operations) == 7


def test_client_with_sasl_is_refused_at_once(cluster: LocalCluster) -> None:
    began_s = time.monotonic()
    errors: list[KafkaError] = []
    admin = admin_of(
        cluster,
        **{
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "u",
            "sasl.password": "p",
            "error_cb": errors.append,
        },
    )
    while not errors:
        assert time.monotonic() - began_s < QUICKLY_S, "confluent heard nothing"
        admin.poll(0.1)
    assert errors[0].code() == KafkaError._AUTHENTICATION

    async def connect() -> None:
        client = aiokafka.AIOKafkaProducer(
            bootstrap_servers=cluster.kafka_bootstrap, sasl_plain_username="u", sasl_plain_password="p", **SASL
        )
        try:
            async with asyncio.timeout(QUICKLY_S):
                await client.start()
        finally:
            await client.stop()

    with pytest.raises(aiokafka.errors.KafkaError):
        asyncio.run(connect())
