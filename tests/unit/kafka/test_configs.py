"""DescribeConfigs, AlterConfigs and IncrementalAlterConfigs against whole brokers: every resource, right and wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.kafka.cluster import KafkaCluster

from tidelog.metadata.config_table import INT_MAX, TABLES, Scope
from tidelog.model.errors import ErrorCode
from tidelog.rpc.kafka import configs
from tidelog.rpc.kafka.config_rows import (
    BOOLEAN,
    BROKER_CONFIG,
    CLUSTER_CONFIG,
    DEFAULT_CONFIG,
    DOUBLE,
    INT,
    LIST,
    LONG,
    STRING,
    TOPIC_CONFIG,
)
from tidelog.rpc.kafka.configs import BROKER, BROKER_LOGGER, CLIENT_METRICS, GROUP, TOPIC
from tidelog.rpc.kafka.messages import ALTER_CONFIGS, DESCRIBE_CONFIGS, INCREMENTAL_ALTER_CONFIGS
from tidelog.rpc.kafka.messages.configs import (
    AlterableConfig,
    AlterConfigsRequest,
    AlterConfigsResource,
    DescribeConfigsRequest,
    DescribeConfigsResource,
    IncrementalAlterableConfig,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResource,
)
from tidelog.services.limits import RequestLimits

SET, DELETE, APPEND, SUBTRACT = range(4)
Resource = tuple[int, str]
CLUSTER: Resource = (BROKER, "")


@pytest.fixture(scope="module")
def cluster() -> Iterator[KafkaCluster]:
    """Nobody is killed in it; each test has topics of its own, and puts back what it sets for others."""
    with KafkaCluster(51, configs.HANDLERS, limits=RequestLimits(admin_items_max=3), brokers=(11, 12, 13)) as made:
        yield made


def code_names(rows: list[Any]) -> list[str]:
    names = {code.value.code: code.name for code in ErrorCode}
    return [names[row.error_code] if row.error_code else "" for row in rows]


def describe_all(cluster: KafkaCluster, *resources: Resource, version: int = 4, **more: Any) -> list[Any]:
    keys = more.pop("keys", None)
    wanted = [
        DescribeConfigsResource(resource_type=kind, resource_name=name, configuration_keys=keys)
        for kind, name in resources
    ]
    request = DescribeConfigsRequest(resources=wanted, **more)
    return list(cluster.send(DESCRIBE_CONFIGS, request, version=version).results)


def describe(cluster: KafkaCluster, resource: Resource, **more: Any) -> dict[str, Any]:
    (result,) = describe_all(cluster, resource, **more)
    assert (result.error_code, result.error_message) == (0, None), result.error_message
    assert (result.resource_type, result.resource_name) == resource
    return {row.name: row for row in result.configs}


def alter(cluster: KafkaCluster, resource: Resource, *changes: tuple[str, int, str | None], **more: Any) -> Any:
    """IncrementalAlterConfigs of one resource."""
    version = more.pop("version", None)
    rows = [IncrementalAlterableConfig(name=key, config_operation=op, value=value) for key, op, value in changes]
    item = IncrementalAlterConfigsResource(resource_type=resource[0], resource_name=resource[1], configs=rows)
    request = IncrementalAlterConfigsRequest(resources=[item], **more)
    (row,) = cluster.send(INCREMENTAL_ALTER_CONFIGS, request, version=version).responses
    assert (row.resource_type, row.resource_name) == resource
    return row


def put(cluster: KafkaCluster, resource: Resource, **settings: str | None) -> Any:
    """AlterConfigs of one resource."""
    version = settings.pop("version", None)
    rows = [AlterableConfig(name=key.replace("_", "."), value=value) for key, value in settings.items()]
    item = AlterConfigsResource(resource_type=resource[0], resource_name=resource[1], configs=rows)
    request = AlterConfigsRequest(resources=[item])
    number = None if version is None else int(version)
    (row,) = cluster.send(ALTER_CONFIGS, request, version=number).responses
    return row


def done(row: Any) -> None:
    assert (row.error_code, row.error_message) == (0, None), row.error_message


def synonyms(row: Any) -> list[tuple[str, str | None, int]]:
    return [(one.name, one.value, one.source) for one in row.synonyms]


# DescribeConfigs.


@pytest.mark.parametrize("version", range(1, 5))
def test_a_topic_is_described_with_values_sources_types_and_words(cluster: KafkaCluster, version: int) -> None:
    name = f"reported-{version}"
    cluster.create(name, replication_factor=3)
    done(alter(cluster, (TOPIC, name), ("retention.ms", SET, "1000")))
    found = describe(cluster, (TOPIC, name), version=version, include_documentation=True, include_synonyms=True)
    assert set(found) == set(TABLES[Scope.TOPIC])
    row = found["retention.ms"]
    assert (row.value, row.config_source, row.read_only, row.is_sensitive) == ("1000", TOPIC_CONFIG, False, False)
    assert found["cleanup.policy"].config_source == DEFAULT_CONFIG
    types = {key: found[key].config_type for key in found}
    if version < 3:
        assert set(types.values()) == {0}
        assert all(row.documentation is None or row.documentation == "" for row in found.values())
        return
    assert row.documentation == TABLES[Scope.TOPIC]["retention.ms"].doc
    assert types["retention.ms"] == LONG
    assert types["segment.bytes"] == INT
    assert types["cleanup.policy"] == types["leader.replication.throttled.replicas"] == LIST
    assert types["compression.type"] == STRING
    assert types["unclean.leader.election.enable"] == BOOLEAN
    assert types["min.cleanable.dirty.ratio"] == DOUBLE


def test_every_value_is_one_that_a_program_can_read(cluster: KafkaCluster) -> None:
    """Our words for what holds when nothing is set would break Kafka's own tools, which parse numbers."""
    cluster.create("numbers", replication_factor=3)
    for resource in ((TOPIC, "numbers"), (BROKER, "11"), CLUSTER):
        for row in describe(cluster, resource, include_synonyms=True).values():
            for value in (row.value, *(one.value for one in row.synonyms)):
                if value is not None and row.config_type in (INT, LONG):
                    assert -2 <= int(value) <= ((1 << 63) - 1 if row.config_type == LONG else INT_MAX)
                elif value is not None and row.config_type == BOOLEAN:
                    assert value in ("true", "false")
    found = describe(cluster, (TOPIC, "numbers"))
    assert found["min.insync.replicas"].value == "2"
    assert found["flush.messages"].value == str((1 << 63) - 1)
    assert describe(cluster, CLUSTER)["log.retention.hours"].value is None


def test_synonyms_tell_everything_that_is_set_and_the_default(cluster: KafkaCluster) -> None:
    cluster.create("chain")
    done(alter(cluster, CLUSTER, ("log.retention.hours", SET, "3"), ("log.retention.ms", SET, "4000")))
    chain = (TOPIC, "chain")
    row = describe(cluster, chain, include_synonyms=True)["retention.ms"]
    assert (row.value, row.config_source) == ("4000", CLUSTER_CONFIG)
    assert synonyms(row) == [
        ("log.retention.ms", "4000", CLUSTER_CONFIG),
        ("log.retention.hours", "3", CLUSTER_CONFIG),
        ("log.retention.ms", "604800000", DEFAULT_CONFIG),
    ]
    done(alter(cluster, chain, ("retention.ms", SET, "5000")))
    row = describe(cluster, chain, include_synonyms=True)["retention.ms"]
    assert synonyms(row)[0] == ("retention.ms", "5000", TOPIC_CONFIG)
    assert describe(cluster, chain)["retention.ms"].synonyms == [], "only if they are asked for"
    done(alter(cluster, CLUSTER, ("log.retention.hours", DELETE, None), ("log.retention.ms", DELETE, None)))


def test_a_broker_is_described_with_all_that_it_goes_by(cluster: KafkaCluster) -> None:
    key = "log.scrub.bytes.per.second"
    done(alter(cluster, CLUSTER, (key, SET, "7"), ("num.partitions", SET, "4")))
    done(alter(cluster, (BROKER, "12"), (key, SET, "9")))
    found = describe(cluster, (BROKER, "12"), include_synonyms=True)
    assert set(found) == set(TABLES[Scope.CLUSTER])
    assert (found[key].value, found[key].config_source, found[key].read_only) == ("9", BROKER_CONFIG, False)
    assert synonyms(found[key]) == [
        (key, "9", BROKER_CONFIG),
        (key, "7", CLUSTER_CONFIG),
        (key, str(10 << 20), DEFAULT_CONFIG),
    ]
    row = found["num.partitions"]
    assert (row.value, row.config_source) == ("4", CLUSTER_CONFIG)
    assert row.read_only, "it is the whole cluster's: it is set for the broker without a name"
    other = describe(cluster, (BROKER, "11"))
    assert (other[key].value, other[key].config_source) == ("7", CLUSTER_CONFIG)
    whole = describe(cluster, CLUSTER)
    assert (whole[key].value, whole[key].read_only) == ("7", False)
    assert not whole["num.partitions"].read_only
    done(alter(cluster, CLUSTER, (key, DELETE, None), ("num.partitions", DELETE, None)))
    done(alter(cluster, (BROKER, "12"), (key, DELETE, None)))


def test_keys_can_be_chosen(cluster: KafkaCluster) -> None:
    cluster.create("keys")
    assert set(describe(cluster, (TOPIC, "keys"), keys=["retention.ms", "no.such.key"])) == {"retention.ms"}
    assert set(describe(cluster, (TOPIC, "keys"), keys=[])) == set(TABLES[Scope.TOPIC])


def test_a_group_goes_by_the_clusters_settings(cluster: KafkaCluster) -> None:
    done(alter(cluster, CLUSTER, ("group.consumer.session.timeout.ms", SET, "50000")))
    found = describe(cluster, (GROUP, "readers"), include_synonyms=True)
    row = found["consumer.session.timeout.ms"]
    assert (row.value, row.config_source, row.read_only) == ("50000", CLUSTER_CONFIG, True)
    assert synonyms(row) == [
        ("group.consumer.session.timeout.ms", "50000", CLUSTER_CONFIG),
        ("group.consumer.session.timeout.ms", "45000", DEFAULT_CONFIG),
    ]
    assert found["consumer.heartbeat.interval.ms"].value == "5000"
    assert found["consumer.heartbeat.interval.ms"].config_source == DEFAULT_CONFIG
    done(alter(cluster, CLUSTER, ("group.consumer.session.timeout.ms", DELETE, None)))


def test_resources_that_are_not_there_have_errors_of_their_own(cluster: KafkaCluster) -> None:
    cluster.create("beside")
    rows = describe_all(
        cluster,
        (TOPIC, "beside"),
        (TOPIC, "nobody"),
        (BROKER, "99"),
        (BROKER, "eleven"),
        (BROKER_LOGGER, "11"),
        (CLIENT_METRICS, "m"),
        (GROUP, ""),
        (77, "x"),
    )
    assert code_names(rows) == [
        "",
        "UNKNOWN_TOPIC_OR_PARTITION",
        "BROKER_ID_NOT_REGISTERED",
        "BROKER_ID_NOT_REGISTERED",
        *["INVALID_REQUEST"] * 4,
    ]
    assert all(row.error_message and not row.configs for row in rows[1:])
    assert "log levels" in rows[4].error_message


def test_many_resources_are_described_in_their_order(cluster: KafkaCluster) -> None:
    cluster.create("many")
    many = [(TOPIC, "many"), (TOPIC, "nobody")] * 20
    rows = describe_all(cluster, *many)
    assert [(row.resource_type, row.resource_name) for row in rows] == many
    assert code_names(rows) == ["", "UNKNOWN_TOPIC_OR_PARTITION"] * 20


def test_change_of_more_resources_than_the_controller_takes_at_once_is_split(cluster: KafkaCluster) -> None:
    assert cluster.limits.admin_items_max == 3
    names = [f"piece-{number}" for number in range(8)]
    for name in names:
        cluster.create(name)
    wanted = [*names, "nobody", names[0]]
    items = [
        IncrementalAlterConfigsResource(
            resource_type=TOPIC,
            resource_name=name,
            configs=[IncrementalAlterableConfig(name="retention.ms", config_operation=SET, value=str(at))],
        )
        for at, name in enumerate(wanted)
    ]
    rows = cluster.send(INCREMENTAL_ALTER_CONFIGS, IncrementalAlterConfigsRequest(resources=items)).responses
    assert [row.resource_name for row in rows] == wanted
    named_twice = "INVALID_REQUEST"
    assert code_names(rows) == [named_twice, *[""] * 7, "UNKNOWN_TOPIC_OR_PARTITION", named_twice]
    assert describe(cluster, (TOPIC, "piece-7"))["retention.ms"].value == "7"


# IncrementalAlterConfigs.


@pytest.mark.parametrize("version", [0, 1])
def test_settings_are_changed_one_by_one(cluster: KafkaCluster, version: int) -> None:
    name = f"changed-{version}"
    cluster.create(name)
    where = (TOPIC, name)
    done(alter(cluster, where, ("retention.ms", SET, "1"), ("segment.ms", SET, "2"), version=version))
    done(alter(cluster, where, ("retention.ms", DELETE, None), ("cleanup.policy", APPEND, "compact"), version=version))
    found = describe(cluster, where)
    assert found["retention.ms"].config_source == DEFAULT_CONFIG
    assert found["segment.ms"].value == "2"
    assert found["cleanup.policy"].value == "delete,compact"
    done(alter(cluster, where, ("cleanup.policy", SUBTRACT, "delete"), version=version))
    assert describe(cluster, where)["cleanup.policy"].value == "compact"
    done(alter(cluster, where, ("segment.ms", SET, "9"), version=version, validate_only=True))
    assert describe(cluster, where)["segment.ms"].value == "2"


def test_a_change_that_cannot_be_is_refused_with_a_sentence(cluster: KafkaCluster) -> None:
    cluster.create("kept")
    kept = (TOPIC, "kept")
    for where, change, error in (
        (kept, ("no.such.key", SET, "1"), "INVALID_CONFIG"),
        (kept, ("retention.ms", SET, "soon"), "INVALID_CONFIG"),
        (kept, ("retention.ms", APPEND, "1"), "INVALID_CONFIG"),
        (kept, ("retention.ms", SET, None), "INVALID_REQUEST"),
        (kept, ("retention.ms", 9, "1"), "INVALID_REQUEST"),
        ((TOPIC, "nobody"), ("retention.ms", SET, "1"), "UNKNOWN_TOPIC_OR_PARTITION"),
        ((BROKER, "99"), ("log.scrub.bytes.per.second", SET, "1"), "BROKER_ID_NOT_REGISTERED"),
        ((BROKER, "11"), ("num.partitions", SET, "1"), "INVALID_CONFIG"),
        ((BROKER_LOGGER, "11"), ("root", SET, "DEBUG"), "INVALID_REQUEST"),
        ((CLIENT_METRICS, "m"), ("interval.ms", SET, "1"), "INVALID_REQUEST"),
        ((GROUP, "g"), ("consumer.session.timeout.ms", SET, "1"), "INVALID_REQUEST"),
        ((0, "x"), ("a", SET, "1"), "INVALID_REQUEST"),
    ):
        row = alter(cluster, where, change)
        assert code_names([row]) == [error], (where, change)
        assert row.error_message
    assert "group.consumer.session.timeout.ms" in alter(cluster, (GROUP, "g"), ("x", SET, "1")).error_message
    row = alter(cluster, kept, ("retention.ms", SET, "1"), ("retention.ms", SET, "2"))
    assert code_names([row]) == ["INVALID_REQUEST"]
    assert describe(cluster, kept)["retention.ms"].config_source == DEFAULT_CONFIG


def test_deleting_what_nobody_can_set_changes_nothing(cluster: KafkaCluster) -> None:
    """Kafka's tool for reassignments clears its throttle of moves between directories together with the others."""
    where = (BROKER, "11")
    done(alter(cluster, where, ("leader.replication.throttled.rate", SET, "7")))
    keys = ("leader.replication.throttled.rate", "replica.alter.log.dirs.io.max.bytes.per.second")
    done(alter(cluster, where, *((key, DELETE, None) for key in keys)))
    assert describe(cluster, where)[keys[0]].config_source == DEFAULT_CONFIG
    row = alter(cluster, (BROKER, "99"), (keys[1], DELETE, None))
    assert code_names([row]) == ["BROKER_ID_NOT_REGISTERED"]


def test_one_bad_resource_does_not_keep_the_others_from_being_changed(cluster: KafkaCluster) -> None:
    cluster.create("good-one")
    cluster.create("good-two")
    change = [IncrementalAlterableConfig(name="retention.ms", value="77")]
    wanted = [(TOPIC, "good-one"), (GROUP, "g"), (TOPIC, "nobody"), (TOPIC, "good-two")]
    items = [IncrementalAlterConfigsResource(resource_type=k, resource_name=n, configs=change) for k, n in wanted]
    request = IncrementalAlterConfigsRequest(resources=items)
    rows = cluster.send(INCREMENTAL_ALTER_CONFIGS, request).responses
    assert [(row.resource_type, row.resource_name) for row in rows] == wanted
    assert code_names(rows) == ["", "INVALID_REQUEST", "UNKNOWN_TOPIC_OR_PARTITION", ""]
    assert describe(cluster, wanted[0])["retention.ms"].value == "77"
    assert describe(cluster, wanted[3])["retention.ms"].value == "77"
    twice = IncrementalAlterConfigsRequest(resources=[items[0], items[0]])
    assert code_names(cluster.send(INCREMENTAL_ALTER_CONFIGS, twice).responses) == ["INVALID_REQUEST"] * 2


# AlterConfigs.


@pytest.mark.parametrize("version", range(3))
def test_the_old_call_replaces_all_that_was_set(cluster: KafkaCluster, version: int) -> None:
    name = f"replaced-{version}"
    cluster.create(name)
    where = (TOPIC, name)
    done(put(cluster, where, retention_ms="1", segment_ms="2", version=str(version)))
    done(put(cluster, where, segment_ms="3", version=str(version)))
    found = describe(cluster, where)
    assert {key: row.value for key, row in found.items() if row.config_source == TOPIC_CONFIG} == {"segment.ms": "3"}
    refused = put(cluster, where, segment_ms="soon", version=str(version))
    assert code_names([refused]) == ["INVALID_CONFIG"]
    assert describe(cluster, where)["segment.ms"].value == "3", "a refused change changes nothing"
    done(put(cluster, where, version=str(version)))
    assert all(row.config_source == DEFAULT_CONFIG for row in describe(cluster, where).values())


def test_the_old_call_refuses_what_has_no_value(cluster: KafkaCluster) -> None:
    cluster.create("null")
    row = put(cluster, (TOPIC, "null"), retention_ms=None)
    assert code_names([row]) == ["INVALID_REQUEST"]
    assert "delete it" in row.error_message
    assert code_names([put(cluster, (GROUP, "g"), a="1")]) == ["INVALID_REQUEST"]


# No controller.


def test_without_a_controller_every_row_says_that_the_time_is_up() -> None:
    with KafkaCluster(52, configs.HANDLERS, limits=RequestLimits(admin_timeout_ms=300), brokers=(11,)) as cluster:
        for node in list(cluster.controllers):
            cluster.kill(node)
        late = "REQUEST_TIMED_OUT"
        assert code_names(describe_all(cluster, (TOPIC, "t"), CLUSTER)) == [late, late]
        assert code_names(describe_all(cluster, (BROKER_LOGGER, "11"))) == ["INVALID_REQUEST"], "no need to ask for it"
        assert code_names([alter(cluster, CLUSTER, ("num.partitions", SET, "1"))]) == [late]
        assert code_names([put(cluster, CLUSTER, num_partitions="1")]) == [late]
