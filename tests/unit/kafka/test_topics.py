"""CreateTopics, DeleteTopics and CreatePartitions against whole brokers: every version, right and wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from support.kafka.cluster import KafkaCluster

from tidelog.metadata.config_changes import DELETE, SET, AlterConfigs, ConfigChange, ResourceChange
from tidelog.model.errors import ErrorCode
from tidelog.rpc.kafka import topics
from tidelog.rpc.kafka.config_rows import CLUSTER_CONFIG, DEFAULT_CONFIG, TOPIC_CONFIG
from tidelog.rpc.kafka.messages import CREATE_PARTITIONS, CREATE_TOPICS, DELETE_TOPICS
from tidelog.rpc.kafka.messages.topics import (
    CreatableReplicaAssignment,
    CreatableTopic,
    CreatableTopicConfig,
    CreatePartitionsAssignment,
    CreatePartitionsRequest,
    CreatePartitionsTopic,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    DeleteTopicState,
)

BROKERS = (11, 12, 13)
KAFKA_CONFIGS = Path(__file__).parents[1] / "metadata" / "kafka_topic_configs.tsv"


@pytest.fixture(scope="module")
def cluster() -> Iterator[KafkaCluster]:
    """Nobody is killed in it; each test has topics of its own."""
    with KafkaCluster(41, topics.HANDLERS, brokers=BROKERS) as made:
        yield made


def topic(
    name: str, *assignment: tuple[int, ...], partitions: int = -1, factor: int = -1, **more: Any
) -> CreatableTopic:
    configs = [CreatableTopicConfig(name=key, value=value) for key, value in more.pop("configs", {}).items()]
    rows = [CreatableReplicaAssignment(partition_index=at, broker_ids=list(row)) for at, row in enumerate(assignment)]
    fields = {"assignments": rows, **more}
    return CreatableTopic(name=name, num_partitions=partitions, replication_factor=factor, configs=configs, **fields)


def create(cluster: KafkaCluster, *wanted: CreatableTopic, node: int = 11, **more: Any) -> list[Any]:
    version = more.pop("version", None)
    request = CreateTopicsRequest(topics=list(wanted), **more)
    return list(cluster.send(CREATE_TOPICS, request, version=version, node=node).topics)


def codes(rows: list[Any]) -> list[str]:
    names = {code.value.code: code.name for code in ErrorCode}
    return [names[row.error_code] if row.error_code else "" for row in rows]


def set_cluster(cluster: KafkaCluster, key: str, value: str | None) -> None:
    change = ConfigChange(key=key, operation=DELETE if value is None else SET, value=value or "")
    request = AlterConfigs(resources=(ResourceChange(resource_type="cluster", changes=(change,)),))
    (outcome,) = cluster.ask(request).items
    assert outcome.error is None, outcome.message
    cluster.until_same()


# CreateTopics.


@pytest.mark.requirement("a:C-04", "a:C-15")
@pytest.mark.parametrize("version", range(2, 8))
def test_topics_are_made_in_every_version_and_this_broker_knows_them_at_once(
    cluster: KafkaCluster, version: int
) -> None:
    name = f"made-{version}"
    (made,) = create(cluster, topic(name, partitions=4, factor=2), version=version, node=12)
    assert (made.name, made.error_code, made.error_message) == (name, 0, None)
    found = cluster.image(12).topic_named(name)
    assert [len(found.partitions[number].replicas) for number in range(4)] == [2, 2, 2, 2]
    assert made.topic_id == (found.topic_id.bytes if version >= 7 else bytes(16))
    assert (made.num_partitions, made.replication_factor) == ((4, 2) if version >= 5 else (-1, -1))
    assert bool(made.configs) == (version >= 5)


def test_topic_is_created_with_every_setting_that_kafka_sends_at_its_default(cluster: KafkaCluster) -> None:
    """MirrorMaker 2 creates a topic with the settings of the source cluster, all of them."""
    rows = [line.split("\t") for line in KAFKA_CONFIGS.read_text(encoding="utf-8").splitlines()]
    settings = {name: default.strip("[]") for name, _, default, _, _, scope in rows if scope == "public"}
    (made,) = create(cluster, topic("mirrored", configs=settings))
    assert (made.error_code, made.error_message) == (0, None)
    assert {name: value for row in made.configs if (name := row.name) in settings for value in [row.value]} == settings


@pytest.mark.parametrize("key", ["preallocate", "remote.storage.enable", "local.retention.ms"])
def test_setting_without_a_meaning_is_refused_with_the_reason(cluster: KafkaCluster, key: str) -> None:
    (row,) = create(cluster, topic("refused", configs={key: "1000" if key.endswith("ms") else "true"}))
    assert codes([row]) == ["INVALID_CONFIG"]
    assert key in row.error_message
    assert "here" in row.error_message


def test_request_for_more_topics_than_the_controller_decides_on_at_once_is_split(cluster: KafkaCluster) -> None:
    most = cluster.limits.admin_items_max
    names = [f"many-{number}" for number in range(most + 50)]
    done = [""] * len(names)
    twice = [topic(name, (11,)) for name in (*names, "twice", "twice")]
    made = create(cluster, *twice, version=4, timeout_ms=60_000)
    assert [row.name for row in made] == [*names, "twice", "twice"]
    assert codes(made) == [*done, "INVALID_REQUEST", "INVALID_REQUEST"], "as in one request"
    rows = [CreatePartitionsTopic(name=name, count=2) for name in names]
    request = CreatePartitionsRequest(topics=rows, validate_only=True, timeout_ms=60_000)
    assert codes(cluster.send(CREATE_PARTITIONS, request).results) == done
    ids = cluster.image().topic_ids
    mixed = [
        DeleteTopicState(name=name) if number % 2 else DeleteTopicState(name=None, topic_id=ids[name].bytes)
        for number, name in enumerate(names)
    ]
    gone = cluster.send(DELETE_TOPICS, DeleteTopicsRequest(topics=mixed, timeout_ms=60_000)).responses
    assert codes(gone) == done
    assert [row.name for row in gone] == names
    cluster.until_same()
    assert not set(names) & set(cluster.image().topic_ids)


def test_the_answer_has_every_setting_of_the_topic_with_its_source(cluster: KafkaCluster) -> None:
    set_cluster(cluster, "log.retention.hours", "2")
    wanted = topic("set", partitions=1, factor=3, configs={"cleanup.policy": "compact", "max.message.bytes": "5000"})
    for validate_only in (True, False):
        (made,) = create(cluster, wanted, validate_only=validate_only)
        rows = {row.name: (row.value, row.config_source) for row in made.configs}
        assert rows["cleanup.policy"] == ("compact", TOPIC_CONFIG)
        assert rows["max.message.bytes"] == ("5000", TOPIC_CONFIG)
        assert rows["retention.ms"] == ("7200000", CLUSTER_CONFIG)
        assert rows["segment.bytes"] == (str(1 << 30), DEFAULT_CONFIG)
        assert rows["min.insync.replicas"] == ("2", DEFAULT_CONFIG), "a majority, as a number"
        assert rows["flush.ms"] == (str((1 << 63) - 1), DEFAULT_CONFIG)
        assert not any(row.read_only or row.is_sensitive for row in made.configs)
        assert ("set" in cluster.image().topic_ids) is not validate_only
    set_cluster(cluster, "log.retention.hours", None)


def test_what_is_left_out_is_the_clusters_default(cluster: KafkaCluster) -> None:
    (made,) = create(cluster, topic("defaults"))
    assert (made.num_partitions, made.replication_factor) == (1, 3)


def test_replicas_can_be_placed_by_hand(cluster: KafkaCluster) -> None:
    (made,) = create(cluster, topic("placed", (13, 11), (12, 13)))
    assert (made.error_code, made.num_partitions, made.replication_factor) == (0, 2, 2)
    found = cluster.image().topic_named("placed")
    assert [found.partitions[number].replicas for number in range(2)] == [(13, 11), (12, 13)]


def _rows(*partitions: tuple[int, list[int]]) -> list[CreatableReplicaAssignment]:
    return [CreatableReplicaAssignment(partition_index=number, broker_ids=ids) for number, ids in partitions]


BAD_TOPICS = {
    "no name": (topic(""), "INVALID_TOPIC"),
    "a name of dots": (topic(".."), "INVALID_TOPIC"),
    "a long name": (topic("a" * 300), "INVALID_TOPIC"),
    "no partitions": (topic("x", partitions=0), "INVALID_PARTITIONS"),
    "no replicas": (topic("x", factor=0), "INVALID_REPLICATION_FACTOR"),
    "too many replicas": (topic("x", factor=4), "INVALID_REPLICATION_FACTOR"),
    "a broker twice": (topic("x", (11, 11)), "INVALID_REPLICA_ASSIGNMENT"),
    "a broker that is not there": (topic("x", (11, 77)), "INVALID_REPLICA_ASSIGNMENT"),
    "no brokers": (topic("x", ()), "INVALID_REPLICA_ASSIGNMENT"),
    "different numbers": (topic("x", (11,), (11, 12)), "INVALID_REPLICA_ASSIGNMENT"),
    "a gap": (topic("x", assignments=_rows((0, [11]), (2, [12]))), "INVALID_REPLICA_ASSIGNMENT"),
    "a partition twice": (topic("x", assignments=_rows((0, [11]), (0, [12]))), "INVALID_REPLICA_ASSIGNMENT"),
    "both numbers and places": (topic("x", (11,), partitions=1, factor=1), "INVALID_REQUEST"),
    "an unknown setting": (topic("x", configs={"no.such.key": "1"}), "INVALID_CONFIG"),
    "a wrong value": (topic("x", configs={"retention.ms": "soon"}), "INVALID_CONFIG"),
    "no value": (topic("x", configs={"retention.ms": None}), "INVALID_CONFIG"),
}


@pytest.mark.parametrize("what", BAD_TOPICS)
def test_a_topic_that_cannot_be_is_refused_with_a_sentence(cluster: KafkaCluster, what: str) -> None:
    wanted, error = BAD_TOPICS[what]
    rows = create(cluster, wanted, topic(f"beside-{list(BAD_TOPICS).index(what)}", factor=1))
    assert codes(rows) == [error, ""], rows[0].error_message
    assert rows[0].error_message
    assert (rows[0].topic_id, rows[0].num_partitions, rows[0].configs) == (bytes(16), -1, [])


def test_a_topic_that_is_there_or_is_named_twice_is_refused(cluster: KafkaCluster) -> None:
    create(cluster, topic("there"))
    assert codes(create(cluster, topic("there"))) == ["TOPIC_ALREADY_EXISTS"]
    assert codes(create(cluster, topic("two-times"), topic("two-times"))) == ["INVALID_REQUEST"] * 2
    assert create(cluster) == []


def test_too_many_partitions_are_refused_for_the_whole_request(cluster: KafkaCluster) -> None:
    rows = create(cluster, topic("vast", partitions=2_000_000_000), topic("small"))
    assert codes(rows) == ["POLICY_VIOLATION"] * 2
    assert "small" not in cluster.image().topic_ids


# DeleteTopics.


def delete(cluster: KafkaCluster, *wanted: str | UUID | DeleteTopicState, version: int = 6) -> list[Any]:
    if version < 6:
        request = DeleteTopicsRequest(topic_names=[str(name) for name in wanted], timeout_ms=1000)
    else:
        states = [
            one
            if isinstance(one, DeleteTopicState)
            else DeleteTopicState(name=one)
            if isinstance(one, str)
            else DeleteTopicState(topic_id=one.bytes)
            for one in wanted
        ]
        request = DeleteTopicsRequest(topics=states, timeout_ms=1000)
    return list(cluster.send(DELETE_TOPICS, request, version=version).responses)


@pytest.mark.parametrize("version", range(1, 7))
def test_topics_are_deleted_by_name_and_this_broker_has_forgotten_them(cluster: KafkaCluster, version: int) -> None:
    create(cluster, topic("gone"))
    rows = delete(cluster, "gone", "never", version=version)
    assert [row.name for row in rows] == ["gone", "never"]
    assert codes(rows) == ["", "UNKNOWN_TOPIC_OR_PARTITION"]
    assert [bool(row.error_message) for row in rows] == [False, version >= 5]
    assert "gone" not in cluster.image().topic_ids


def test_topics_are_deleted_by_id_and_answered_in_the_order_of_the_request(cluster: KafkaCluster) -> None:
    create(cluster, topic("by-id"), topic("by-name"))
    ids = cluster.image().topic_ids
    unknown, by_id = UUID(int=4), ids["by-id"]
    rows = delete(
        cluster, unknown, by_id, "by-name", DeleteTopicState(), DeleteTopicState(name="x", topic_id=by_id.bytes)
    )
    assert codes(rows) == ["UNKNOWN_TOPIC_ID", "", "", "INVALID_REQUEST", "INVALID_REQUEST"]
    assert [row.name for row in rows] == [None, "by-id", "by-name", None, "x"]
    assert [row.topic_id for row in rows[:3]] == [unknown.bytes, by_id.bytes, ids["by-name"].bytes]
    assert not {"by-id", "by-name"} & set(cluster.image().topic_ids)
    assert delete(cluster) == []


def test_deletion_can_be_switched_off(cluster: KafkaCluster) -> None:
    create(cluster, topic("stays"))
    set_cluster(cluster, "delete.topic.enable", "false")
    assert codes(delete(cluster, "stays", "other")) == ["TOPIC_DELETION_DISABLED"] * 2
    assert codes(delete(cluster, "stays", version=3)) == ["TOPIC_DELETION_DISABLED"]
    assert codes(delete(cluster, "stays", version=2)) == ["INVALID_REQUEST"], "that is what old clients know"
    set_cluster(cluster, "delete.topic.enable", None)
    assert codes(delete(cluster, "stays", "stays")) == ["INVALID_REQUEST"] * 2
    assert codes(delete(cluster, "stays")) == [""]


# CreatePartitions.


def grow(cluster: KafkaCluster, name: str, count: int, *brokers: list[int], version: int = 3, **more: Any) -> Any:
    rows = [CreatePartitionsAssignment(broker_ids=ids) for ids in brokers] or None
    wanted = CreatePartitionsTopic(name=name, count=count, assignments=rows)
    request = CreatePartitionsRequest(topics=[wanted], timeout_ms=1000, **more)
    (row,) = cluster.send(CREATE_PARTITIONS, request, version=version).results
    assert row.name == name
    return row


@pytest.mark.parametrize("version", range(4))
def test_a_topic_gets_more_partitions(cluster: KafkaCluster, version: int) -> None:
    name = f"grows-{version}"
    create(cluster, topic(name, (11, 12)))
    assert codes([grow(cluster, name, 3, version=version, validate_only=True)]) == [""]
    assert len(cluster.image().topic_named(name).partitions) == 1
    row = grow(cluster, name, 3, version=version)
    assert (row.error_code, row.error_message) == (0, None)
    row = grow(cluster, name, 5, [13, 11], [12, 13], version=version)
    assert row.error_code == 0, row.error_message
    partitions = cluster.image().topic_named(name).partitions
    assert [partitions[number].replicas for number in (3, 4)] == [(13, 11), (12, 13)]


def test_partitions_are_never_taken_away_and_their_places_must_fit(cluster: KafkaCluster) -> None:
    create(cluster, topic("fixed", (11, 12), (12, 11)))
    for row, error in (
        (grow(cluster, "fixed", 1), "INVALID_PARTITIONS"),
        (grow(cluster, "fixed", 2), "INVALID_PARTITIONS"),
        (grow(cluster, "fixed", 1_000_000), "INVALID_PARTITIONS"),
        (grow(cluster, "fixed", 4, [11, 12]), "INVALID_REPLICA_ASSIGNMENT"),
        (grow(cluster, "fixed", 3, [11]), "INVALID_REPLICA_ASSIGNMENT"),
        (grow(cluster, "fixed", 3, [11, 77]), "INVALID_REPLICA_ASSIGNMENT"),
        (grow(cluster, "nobody", 3), "UNKNOWN_TOPIC_OR_PARTITION"),
    ):
        assert codes([row]) == [error]
        assert row.error_message
    assert cluster.send(CREATE_PARTITIONS, CreatePartitionsRequest(timeout_ms=1)).results == []


# No controller.


def test_without_a_controller_every_row_says_that_the_time_is_up() -> None:
    with KafkaCluster(42, topics.HANDLERS, brokers=(11,)) as cluster:
        for node in list(cluster.controllers):
            cluster.kill(node)
        late = "REQUEST_TIMED_OUT"
        assert codes(create(cluster, topic("a"), topic("x", configs={"a": None}), timeout_ms=300)) == [
            late,
            "INVALID_CONFIG",
        ]
        assert codes(delete(cluster, "a", UUID(int=2))) == [late, late]
        row = grow(cluster, "a", 2)
        assert codes([row]) == [late]
        assert "no active controller answered in 1000 ms" in row.error_message
