"""The table of settings: what is taken, what holds, what follows; and the page that is made of it."""

from pathlib import Path
from typing import Any

import pytest
from support.metadata.controller import Cluster

from tidelog.log.batch import Codec, TimestampType
from tidelog.log.config import FlushMode, LogConfig
from tidelog.metadata import configs
from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.config_docs import page
from tidelog.metadata.config_table import BROKER_KEYS, CLUSTER_KEYS, SERVER_KEYS, TABLES, TOPIC_KEYS, Kind, Scope
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.queries import DescribeConfigs
from tidelog.model.errors import ErrorCode, InvalidConfigError, TidelogError

ROOT = Path(__file__).resolve().parents[3]


def change(key: str, operation: str = "set", value: str = "") -> ConfigChange:
    return ConfigChange(key=key, operation=operation, value=value)


def alter(cluster: Cluster, kind: str, name: str, *changes: ConfigChange, **more: Any) -> Any:
    resource = ResourceChange(resource_type=kind, resource=name, changes=changes)
    return cluster.ask(AlterConfigs(resources=(resource,), **more)).items[0]


def topic_value(cluster: Cluster, name: str, key: str) -> Any:
    return configs.topic_config(cluster.image, name, key).value


class TestTable:
    def test_every_default_is_a_value_that_could_be_set(self) -> None:
        for scope, rows in TABLES.items():
            for name, row in rows.items():
                if row.default is None:
                    assert row.default_text, name
                elif row.default != ():
                    assert configs.check(scope, name, configs.as_text(row.default)) == row.default

    def test_names_are_unique_and_descriptions_are_sentences(self) -> None:
        for keys in (TOPIC_KEYS, (*CLUSTER_KEYS, *BROKER_KEYS, *SERVER_KEYS)):
            names = [row.name for row in keys]
            assert len(set(names)) == len(names)
            assert all(row.doc.endswith(".") for row in keys)

    def test_the_defaults_of_a_log_are_those_of_the_log_itself(self) -> None:
        assert configs.log_config(ClusterImage(), "t") == LogConfig()

    def test_the_page_is_current(self) -> None:
        committed = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
        assert committed == page(), "run: python -m tidelog.metadata.config_docs > docs/configuration.md"

    @pytest.mark.parametrize(
        ("key", "value", "says"),
        [
            ("retention.ms", "soon", "retention.ms='soon': an integer from -1 (ms)"),
            ("retention.ms", "-2", "from -1"),
            ("retention.ms", "", "an integer"),
            ("retention.ms", "1_000", "an integer"),
            ("retention.ms", "1.5", "an integer"),
            ("retention.ms", "9223372036854775808", "an integer"),
            ("retention.ms", "9" * 5000, "..."),
            ("segment.bytes", "13", "from 14 to 2147483647 (bytes)"),
            ("segment.bytes", "2147483648", "from 14 to 2147483647 (bytes)"),
            ("min.cleanable.dirty.ratio", "1.1", "a number from 0.0 to 1.0"),
            ("min.cleanable.dirty.ratio", "nan", "a number"),
            ("min.cleanable.dirty.ratio", "half", "a number"),
            ("unclean.leader.election.enable", "yes", "true or false"),
            ("compression.type", "zip", "one of producer, uncompressed, gzip, snappy, lz4, zstd"),
            ("cleanup.policy", "", "a comma-separated list of delete, compact"),
            ("cleanup.policy", "delete,delete", "a comma-separated list"),
            ("cleanup.policy", "compact,keep", "a comma-separated list"),
            ("leader.replication.throttled.replicas", "0:1,1", "partition:broker"),
            ("min.insync.replicas", "0", "from 1"),
            ("flush.mode", "x" * 40_000, "at most 32768"),
        ],
    )
    def test_a_bad_value_is_refused_with_what_is_allowed(self, key: str, value: str, says: str) -> None:
        with pytest.raises(InvalidConfigError) as rejection:
            configs.check(Scope.TOPIC, key, value)
        assert says in str(rejection.value)
        assert len(str(rejection.value)) < 300

    @pytest.mark.parametrize(
        ("scope", "key", "says"),
        [
            (Scope.TOPIC, "retention.mss", "did you mean retention.ms?"),
            (Scope.TOPIC, "cleanup.polici", "did you mean cleanup.policy?"),
            (Scope.TOPIC, "flush.mod", "did you mean flush.mode?"),
            (Scope.TOPIC, "disk.stall.timeout.ms", "it is a cluster and broker config"),
            (Scope.CLUSTER, "log.retention.hour", "did you mean log.retention.hours?"),
            (Scope.CLUSTER, "retention.ms", "its default for all topics is log.retention.ms"),
            (Scope.BROKER, "num.partitions", "it is a cluster config"),
            pytest.param(
                Scope.CLUSTER,
                "log.retention.hours.per.topic",
                "is not a cluster config",
                marks=pytest.mark.requirement("b:B-36"),
            ),
            (Scope.TOPIC, "", "'' is not a topic config"),
            (Scope.TOPIC, "x" * 300, "is not a topic config"),
            (Scope.TOPIC, "a\x00", "is not a topic config"),
        ],
    )
    def test_an_unknown_key_is_refused_with_the_nearest(self, scope: Scope, key: str, says: str) -> None:
        with pytest.raises(InvalidConfigError) as rejection:
            configs.definition(scope, key)
        assert says in str(rejection.value)

    def test_topics_are_not_created_by_accident_unless_it_is_switched_on(self) -> None:
        cluster = Cluster(1)
        assert not configs.cluster_bool(cluster.image, "auto.create.topics.enable")
        alter(cluster, "cluster", "", change("auto.create.topics.enable", "set", "true"))
        assert configs.cluster_bool(cluster.image, "auto.create.topics.enable")


class TestResolution:
    @pytest.mark.requirement("a:A-33", "b:I-05", "b:B-36")
    def test_the_topics_own_value_then_the_clusters_then_the_built_in_one(self) -> None:
        cluster = Cluster(1)
        cluster.made("t", (0,))
        cluster.made("u", (0,))
        assert configs.topic_config(cluster.image, "t", "retention.ms").source == "default"
        alter(cluster, "cluster", "", change("log.retention.ms", "set", "5000"))
        alter(cluster, "topic", "t", change("retention.ms", "set", "7"))
        assert (topic_value(cluster, "t", "retention.ms"), topic_value(cluster, "u", "retention.ms")) == (7, 5000)
        alter(cluster, "topic", "t", change("retention.ms", "delete"))
        assert configs.topic_config(cluster.image, "t", "retention.ms").source == "cluster"

    def test_the_smaller_unit_wins(self) -> None:
        cluster = Cluster(1)
        alter(cluster, "cluster", "", change("log.retention.hours", "set", "2"))
        assert topic_value(cluster, "t", "retention.ms") == 2 * 3600 * 1000
        alter(cluster, "cluster", "", change("log.retention.minutes", "set", "3"))
        assert topic_value(cluster, "t", "retention.ms") == 3 * 60 * 1000
        alter(cluster, "cluster", "", change("log.retention.ms", "set", "4"))
        assert topic_value(cluster, "t", "retention.ms") == 4
        alter(cluster, "cluster", "", change("log.retention.ms", "set", "-1"))
        assert configs.log_config(cluster.image, "t").retention_ms == -1

    def test_a_brokers_own_value_wins_over_the_clusters(self) -> None:
        cluster = Cluster(2)
        key = "disk.stall.timeout.ms"
        assert configs.broker_config(cluster.image, key, 1).value == 2000
        alter(cluster, "cluster", "", change(key, "set", "3000"))
        alter(cluster, "broker", "1", change(key, "set", "4000"))
        found = [configs.broker_config(cluster.image, key, broker) for broker in (0, 1)]
        assert [(entry.value, entry.source) for entry in found] == [(3000, "cluster"), (4000, "broker")]

    def test_every_setting_of_a_log_reaches_it(self) -> None:
        cluster = Cluster(1)
        settings = {
            "cleanup.policy": "compact,delete",
            "compression.type": "zstd",
            "message.timestamp.type": "LogAppendTime",
            "flush.mode": "page-cache",
            "flush.messages": "10",
            "flush.ms": "20",
            "segment.bytes": "1000",
            "retention.bytes": "99",
            "min.cleanable.dirty.ratio": "0.25",
        }
        created = cluster.create("t", 1, 1, configs=tuple(settings.items()))
        assert created.error is None
        config = configs.log_config(cluster.image, "t")
        assert (config.cleanup_compact, config.cleanup_delete, config.compression) == (True, True, Codec.ZSTD)
        assert (config.timestamp_type, config.flush_mode) == (TimestampType.LOG_APPEND, FlushMode.PAGE_CACHE)
        assert (config.flush_messages, config.flush_ms, config.segment_bytes) == (10, 20, 1000)
        assert (config.retention_bytes, config.min_cleanable_dirty_ratio) == (99, 0.25)
        assert configs.log_config(cluster.image, "other") is configs.log_config(cluster.image, "another")

    @pytest.mark.requirement("a:A-51", "b:C-11")
    @pytest.mark.parametrize(("replicas", "least"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
    def test_a_majority_must_be_in_sync_unless_it_was_set(self, replicas: int, least: int) -> None:
        cluster = Cluster(5)
        topic_id = cluster.made("t", tuple(range(replicas)))

        def min_isr() -> int:
            return configs.min_isr(cluster.image, topic_id, cluster.partition("t"))

        assert min_isr() == least
        alter(cluster, "cluster", "", change("min.insync.replicas", "set", "1"))
        assert min_isr() == 1
        alter(cluster, "topic", "t", change("min.insync.replicas", "set", "9"))
        assert min_isr() == replicas, "never more than there are"

    def test_a_description_names_value_source_and_default(self) -> None:
        cluster = Cluster(1)
        cluster.made("t", (0,), retention_ms="5")
        answer = cluster.controller.answer(cluster.image, DescribeConfigs(resource_type="topic", resource="t"))
        rows = {entry.name: entry for entry in answer.entries}
        assert rows.keys() == TABLES[Scope.TOPIC].keys()
        own = rows["retention.ms"]
        assert (own.value, own.source, own.default) == ("5", "topic", "604800000")
        assert rows["min.insync.replicas"].value == "a majority of the replication factor"
        for kind, name in (("broker", "0"), ("cluster", "")):
            question = DescribeConfigs(resource_type=kind, resource=name)
            assert cluster.controller.answer(cluster.image, question).entries


class TestAlter:
    @pytest.mark.requirement("b:I-05", "b:B-36")
    def test_set_delete_append_and_subtract(self) -> None:
        cluster = Cluster(1)
        cluster.made("t", (0,))
        assert alter(cluster, "topic", "t", change("cleanup.policy", "append", "compact")).error is None
        assert topic_value(cluster, "t", "cleanup.policy") == ("delete", "compact")
        alter(cluster, "topic", "t", change("cleanup.policy", "subtract", "delete"))
        assert topic_value(cluster, "t", "cleanup.policy") == ("compact",)
        alter(cluster, "topic", "t", change("cleanup.policy", "append", "compact"))
        assert topic_value(cluster, "t", "cleanup.policy") == ("compact",)
        alter(cluster, "topic", "t", change("cleanup.policy", "delete"))
        assert topic_value(cluster, "t", "cleanup.policy") == ("delete",)
        alter(cluster, "topic", "t", change("leader.replication.throttled.replicas", "append", "0:1,0:2"))
        alter(cluster, "topic", "t", change("leader.replication.throttled.replicas", "subtract", "0:1"))
        assert topic_value(cluster, "t", "leader.replication.throttled.replicas") == ("0:2",)
        assert Kind.REPLICAS is TABLES[Scope.TOPIC]["leader.replication.throttled.replicas"].kind

    @pytest.mark.parametrize(
        ("kind", "name", "entry", "code"),
        [
            ("topic", "nothing", change("retention.ms", "set", "1"), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
            ("topic", "", change("retention.ms", "set", "1"), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
            ("broker", "7", change("disk.stall.timeout.ms", "set", "500"), ErrorCode.BROKER_ID_NOT_REGISTERED),
            ("broker", "00", change("disk.stall.timeout.ms", "set", "500"), ErrorCode.BROKER_ID_NOT_REGISTERED),
            ("broker", "x", change("disk.stall.timeout.ms", "set", "500"), ErrorCode.BROKER_ID_NOT_REGISTERED),
            ("cluster", "c", change("num.partitions", "set", "1"), ErrorCode.INVALID_REQUEST),
            ("client", "c", change("num.partitions", "set", "1"), ErrorCode.INVALID_REQUEST),
            ("topic", "t", change("retention.mss", "set", "1"), ErrorCode.INVALID_CONFIG),
            ("topic", "t", change("retention.mss", "delete"), ErrorCode.INVALID_CONFIG),
            ("topic", "t", change("retention.ms", "set", "x"), ErrorCode.INVALID_CONFIG),
            ("topic", "t", change("retention.ms", "append", "1"), ErrorCode.INVALID_CONFIG),
            ("topic", "t", change("retention.ms", "multiply", "1"), ErrorCode.INVALID_REQUEST),
            ("topic", "t", change("cleanup.policy", "subtract", "delete"), ErrorCode.INVALID_CONFIG),
            ("topic", "t", change("cleanup.policy", "append", "keep"), ErrorCode.INVALID_CONFIG),
            ("topic", "t", change("min.compaction.lag.ms", "set", str(1 << 62)), None),
            ("topic", "t", change("segment.jitter.ms", "set", str(1 << 62)), ErrorCode.INVALID_CONFIG),
            ("cluster", "", change("log.roll.jitter.hours", "set", "1000"), ErrorCode.INVALID_CONFIG),
        ],
        ids=str,
    )
    def test_bad_changes_are_refused(self, kind: str, name: str, entry: ConfigChange, code: ErrorCode | None) -> None:
        cluster = Cluster(1)
        cluster.made("t", (0,))
        before = cluster.image
        outcome = alter(cluster, kind, name, entry)
        assert outcome.error is code
        if code is not None:
            assert cluster.image is before
            assert outcome.message

    def test_one_bad_change_of_a_resource_stops_all_of_it_and_no_other(self) -> None:
        cluster = Cluster(1)
        cluster.made("t", (0,))
        cluster.made("u", (0,))
        good = change("retention.ms", "set", "5")
        resources = (
            ResourceChange(resource_type="topic", resource="t", changes=(good, change("flush.mode", "set", "x"))),
            ResourceChange(resource_type="topic", resource="u", changes=(good,)),
        )
        items = cluster.ask(AlterConfigs(resources=resources)).items
        assert [item.error for item in items] == [ErrorCode.INVALID_CONFIG, None]
        assert topic_value(cluster, "t", "retention.ms") == 7 * 24 * 3600 * 1000
        assert topic_value(cluster, "u", "retention.ms") == 5

    def test_a_key_or_a_resource_twice_is_refused(self) -> None:
        cluster = Cluster(1)
        cluster.made("t", (0,))
        good = change("retention.ms", "set", "5")
        assert alter(cluster, "topic", "t", good, good).error is ErrorCode.INVALID_REQUEST
        resource = ResourceChange(resource_type="topic", resource="t", changes=(good,))
        items = cluster.ask(AlterConfigs(resources=(resource, resource))).items
        assert [item.error for item in items] == [ErrorCode.INVALID_REQUEST] * 2

    def test_a_cluster_default_that_contradicts_a_topics_own_value_is_refused(self) -> None:
        cluster = Cluster(1)
        cluster.made("t", (0,), segment_ms="1000")
        outcome = alter(cluster, "cluster", "", change("log.roll.jitter.ms", "set", "2000"))
        assert outcome.error is ErrorCode.INVALID_CONFIG
        assert outcome.message.startswith("t: segment.jitter.ms=2000: at most segment.ms=1000")

    def test_a_replacement_takes_back_what_it_does_not_name_with_what_follows_from_it(self) -> None:
        cluster = Cluster(3)
        cluster.made("t", (0, 1, 2))

        def put(*changes: ConfigChange) -> Any:
            resource = ResourceChange(resource_type="topic", resource="t", changes=changes, replaces=True)
            return cluster.ask(AlterConfigs(resources=(resource,))).items[0]

        assert put(change("min.insync.replicas", "set", "3"), change("retention.ms", "set", "1")).error is None
        assert cluster.propose("t", (0, 1)).error is None
        assert cluster.partition("t").eligible == (2,), "nothing was acknowledged without it"
        before = cluster.image
        assert put(change("retention.ms", "set", "soon")).error is ErrorCode.INVALID_CONFIG
        assert cluster.image is before
        assert put(change("retention.ms", "set", "2")).error is None
        assert configs.overrides(cluster.image, Scope.TOPIC, "t") == {"retention.ms": "2"}
        assert cluster.partition("t").eligible == (), "two are enough for a write again"
        assert put().error is None
        assert configs.overrides(cluster.image, Scope.TOPIC, "t") == {}

    @pytest.mark.parametrize(
        ("changes", "replaces"),
        [
            ((change("cleanup.policy", "set", "delete"),), False),
            ((change("cleanup.policy", "set", "compact,delete"),), False),
            ((change("cleanup.policy", "append", "delete"),), False),
            ((change("cleanup.policy", "delete"),), False),
            ((change("retention.ms", "set", "5"),), True),
        ],
        ids=str,
    )
    def test_an_internal_topic_stays_compacted(self, changes: tuple[ConfigChange, ...], replaces: bool) -> None:
        cluster = Cluster(1)
        cluster.create("__consumer_offsets", 1, 1)
        alter(cluster, "cluster", "", change("log.cleanup.policy", "set", "compact"))
        before = cluster.image
        resource = ResourceChange(
            resource_type="topic", resource="__consumer_offsets", changes=changes, replaces=replaces
        )
        (outcome,) = cluster.ask(AlterConfigs(resources=(resource,))).items
        assert (outcome.error, cluster.image) == (ErrorCode.INVALID_CONFIG, before)
        assert "only cleanup.policy=compact" in outcome.message

    def test_an_internal_topic_takes_changes_that_keep_its_records(self) -> None:
        cluster = Cluster(1)
        cluster.create("__consumer_offsets", 1, 1)
        keeping = change("cleanup.policy", "set", " compact"), change("segment.bytes", "set", "1000000")
        assert alter(cluster, "topic", "__consumer_offsets", *keeping).error is None
        assert configs.log_config(cluster.image, "__consumer_offsets").segment_bytes == 1_000_000
        alter(cluster, "cluster", "", change("log.cleanup.policy", "set", "delete"))
        assert topic_value(cluster, "__consumer_offsets", "cleanup.policy") == ("compact",)

    def test_the_same_value_again_and_validation_only_log_nothing(self) -> None:
        cluster = Cluster(1)
        cluster.made("t", (0,), retention_ms="5")
        before = cluster.image
        alter(cluster, "topic", "t", change("retention.ms", "set", " 5 "))
        alter(cluster, "topic", "t", change("flush.mode", "delete"))
        alter(cluster, "topic", "t", change("retention.ms", "set", "6"), validate_only=True)
        assert cluster.image is before

    def test_a_question_about_what_does_not_exist_is_refused(self) -> None:
        cluster = Cluster(1)
        for kind, name in (("topic", "x"), ("broker", "9"), ("user", "x")):
            with pytest.raises(TidelogError):
                cluster.controller.answer(cluster.image, DescribeConfigs(resource_type=kind, resource=name))
