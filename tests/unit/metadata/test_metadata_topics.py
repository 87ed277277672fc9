"""Topics: create, delete, grow, trim, describe; names and numbers that are refused leave nothing behind."""

from typing import Any
from uuid import UUID

import pytest
from support.metadata.controller import Cluster

from tidelog.metadata.brokers import Drain
from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.image import NIL
from tidelog.metadata.queries import DescribeBrokers, DescribeTopics, describe_topic, topic_names
from tidelog.metadata.reassignments import GrowInternalTopics, list_reassignments
from tidelog.metadata.topics import (
    AddPartitions,
    AdvanceLogStart,
    CreatedTopic,
    CreateTopics,
    DeleteTopics,
    LogStartAdvance,
    NewPartitions,
    NewTopic,
)
from tidelog.model.errors import ErrorCode, UnknownTopicOrPartitionError


def set_cluster(cluster: Cluster, key: str, value: str) -> None:
    change = ConfigChange(key=key, operation="set", value=value)
    reply = cluster.ask(AlterConfigs(resources=(ResourceChange(resource_type="cluster", changes=(change,)),)))
    assert reply.items[0].error is None, reply.items[0].message


def refused(cluster: Cluster, name: str, *numbers: int, **more: Any) -> CreatedTopic:
    """An outcome that is an error; the image is as it was."""
    before = cluster.image
    created = cluster.create(name, *numbers, **more)
    assert cluster.image is before
    assert created.message
    return created


class TestCreate:
    @pytest.mark.requirement("b:I-01", "a:A-07", "b:A-08")
    def test_a_topic_gets_an_id_and_its_partitions_with_leaders(self) -> None:
        cluster = Cluster(3)
        created = cluster.create("orders", 6, 3, configs=(("retention.ms", "1000"),))
        assert (created.error, created.partitions, created.replication_factor) == (None, 6, 3)
        topic = cluster.image.topic_named("orders")
        assert topic is not None
        assert topic.topic_id == created.topic_id != NIL
        assert sorted(topic.partitions) == list(range(6))
        assert all(p.leader == p.replicas[0] and len(p.isr) == 3 for p in topic.partitions.values())
        assert describe_topic(cluster.image, "orders").configs == (("retention.ms", "1000"),)

    @pytest.mark.requirement("a:A-40", "b:B-12", "a:A-44")
    def test_numbers_that_are_not_given_are_the_clusters(self) -> None:
        cluster = Cluster(3)
        created = cluster.create("t")
        assert (created.partitions, created.replication_factor) == (1, 3)
        set_cluster(cluster, "num.partitions", "4")
        set_cluster(cluster, "default.replication.factor", "2")
        created = cluster.create("u")
        assert (created.partitions, created.replication_factor) == (4, 2)

    @pytest.mark.requirement("a:A-44")
    def test_too_few_registered_brokers_for_the_default_factor_is_an_error_and_fenced_ones_count(self) -> None:
        cluster = Cluster(2)
        error = refused(cluster, "t")
        assert error.error is ErrorCode.INVALID_REPLICATION_FACTOR
        assert "2 brokers are registered" in error.message
        cluster.register(2)
        assert cluster.create("t").error is None

    def test_two_replicas_come_with_a_word_about_what_that_means(self) -> None:
        cluster = Cluster(2)
        assert "read-only" in cluster.create("t", 1, 2).message
        assert cluster.create("u", 1, 2, configs=(("min.insync.replicas", "1"),)).message == ""

    def test_a_topic_deleted_and_created_again_has_another_id(self) -> None:
        cluster = Cluster(1)
        first = cluster.create("t", 1, 1).topic_id
        cluster.ask(DeleteTopics(names=("t",)))
        assert cluster.create("t", 1, 1).topic_id != first

    @pytest.mark.parametrize("name", ["a", "A.b_c-9", "x" * 249, "...", "._-"])
    def test_good_names_are_taken(self, name: str) -> None:
        assert Cluster(1).create(name, 1, 1).error is None

    @pytest.mark.requirement("a:N-18")
    @pytest.mark.parametrize(
        "name",
        [
            "",
            ".",
            "..",
            "x" * 250,
            "x" * 300,
            "a b",
            "a/b",
            "a\x00",
            "a\nb",
            "\x7f",
            "\u00e9",
            "\u202e",
            "a:b",
            "a*",
            "\u0661",
        ],
    )
    def test_bad_names_are_refused(self, name: str) -> None:
        assert refused(Cluster(1), name, 1, 1).error is ErrorCode.INVALID_TOPIC

    @pytest.mark.requirement("a:N-18")
    def test_names_that_differ_only_in_dots_and_underscores_collide(self) -> None:
        cluster = Cluster(1)
        cluster.create("a.b_c", 1, 1)
        error = refused(cluster, "a_b.c", 1, 1)
        assert (error.error, "a.b_c" in error.message) == (ErrorCode.INVALID_TOPIC, True)
        cluster.ask(DeleteTopics(names=("a.b_c",)))
        assert cluster.create("a_b.c", 1, 1).error is None

    def test_the_controllers_own_log_is_no_name_for_a_topic(self) -> None:
        assert refused(Cluster(1), "__cluster_metadata", 1, 1).error is ErrorCode.INVALID_TOPIC

    @pytest.mark.parametrize(
        ("numbers", "more", "code"),
        [
            ((0, 1), {}, ErrorCode.INVALID_PARTITIONS),
            ((-2, 1), {}, ErrorCode.INVALID_PARTITIONS),
            ((10_001, 1), {}, ErrorCode.POLICY_VIOLATION),
            ((1, 0), {}, ErrorCode.INVALID_REPLICATION_FACTOR),
            ((1, -5), {}, ErrorCode.INVALID_REPLICATION_FACTOR),
            ((1, 4), {}, ErrorCode.INVALID_REPLICATION_FACTOR),
            ((1, 40_000), {}, ErrorCode.INVALID_REPLICATION_FACTOR),
            ((2, -1), {"assignment": ((0,), (1,))}, ErrorCode.INVALID_REQUEST),
            ((-1, 1), {"assignment": ((0,), (1,))}, ErrorCode.INVALID_REQUEST),
            ((), {"assignment": ((),)}, ErrorCode.INVALID_REPLICA_ASSIGNMENT),
            ((), {"assignment": ((0, 0),)}, ErrorCode.INVALID_REPLICA_ASSIGNMENT),
            ((), {"assignment": ((0, 7),)}, ErrorCode.INVALID_REPLICA_ASSIGNMENT),
            ((), {"assignment": ((0, -1),)}, ErrorCode.INVALID_REPLICA_ASSIGNMENT),
            ((), {"assignment": ((0, 1), (2,))}, ErrorCode.INVALID_REPLICA_ASSIGNMENT),
            ((1, 1), {"configs": (("retention.mss", "1"),)}, ErrorCode.INVALID_CONFIG),
            ((1, 1), {"configs": (("retention.ms", "soon"),)}, ErrorCode.INVALID_CONFIG),
            ((1, 1), {"configs": (("retention.ms", "1"), ("retention.ms", "2"))}, ErrorCode.INVALID_CONFIG),
            ((1, 1), {"configs": (("segment.ms", "5"), ("segment.jitter.ms", "6"))}, ErrorCode.INVALID_CONFIG),
        ],
        ids=str,
    )
    def test_bad_numbers_assignments_and_configs_are_refused(
        self, numbers: tuple[int, ...], more: dict[str, Any], code: ErrorCode
    ) -> None:
        assert refused(Cluster(3), "t", *numbers, **more).error is code

    def test_an_assignment_to_brokers_that_are_all_down_is_refused(self) -> None:
        cluster = Cluster(3)
        cluster.crash(1)
        assert refused(cluster, "t", assignment=((1,),)).error is ErrorCode.INVALID_REPLICA_ASSIGNMENT
        cluster.crash(0)
        cluster.crash(2)
        assert refused(cluster, "t", 1, 1).error is ErrorCode.INVALID_REPLICATION_FACTOR

    def test_an_existing_topic_and_a_name_twice_are_refused_and_the_rest_goes_through(self) -> None:
        cluster = Cluster(1)
        cluster.create("old", 1, 1)
        names = ("old", "twice", "new", "twice")
        request = CreateTopics(topics=tuple(NewTopic(name=n, partitions=1, replication_factor=1) for n in names))
        errors = [topic.error for topic in cluster.ask(request).topics]
        invalid = ErrorCode.INVALID_REQUEST
        assert errors == [ErrorCode.TOPIC_ALREADY_EXISTS, invalid, None, invalid]
        assert topic_names(cluster.image) == ["new", "old"]

    def test_validation_only_says_what_would_happen_and_does_nothing(self) -> None:
        cluster = Cluster(1)
        before = cluster.image
        topics = (NewTopic(name="t", partitions=2, replication_factor=1), NewTopic(name="..", partitions=1))
        good, bad = cluster.ask(CreateTopics(topics=topics, validate_only=True)).topics
        assert (good.error, good.partitions, bad.error) == (None, 2, ErrorCode.INVALID_TOPIC)
        assert cluster.image is before

    @pytest.mark.requirement("a:O-07")
    def test_a_broker_and_the_cluster_take_only_so_many_replicas(self) -> None:
        cluster = Cluster(2)
        set_cluster(cluster, "max.partitions.per.broker", "3")
        assert cluster.create("t", 6, 1).error is None
        assert refused(cluster, "u", 1, 1).error is ErrorCode.POLICY_VIOLATION
        set_cluster(cluster, "max.partitions.per.broker", "100")
        set_cluster(cluster, "max.replicas.per.cluster", "7")
        error = refused(cluster, "u", 1, 2)
        assert (error.error, "8 replicas" in error.message) == (ErrorCode.POLICY_VIOLATION, True)
        assert cluster.create("u", 1, 1).error is None

    def test_defaults_count_against_the_limit_of_a_request(self) -> None:
        cluster = Cluster(1)
        set_cluster(cluster, "num.partitions", "6000")
        topics = (NewTopic(name="a", replication_factor=1), NewTopic(name="b", replication_factor=1))
        reply = cluster.ask(CreateTopics(topics=topics))
        assert [topic.error for topic in reply.topics] == [ErrorCode.POLICY_VIOLATION] * 2


class TestInternalTopics:
    def test_they_get_up_to_three_replicas_and_grow_as_brokers_come(self) -> None:
        cluster = Cluster(1)
        created = cluster.create("__consumer_offsets")
        assert (created.partitions, created.replication_factor) == (50, 1)
        assert dict(describe_topic(cluster.image, "__consumer_offsets").configs)["cleanup.policy"] == "compact"
        assert cluster.ask(GrowInternalTopics()).items == ()
        cluster.start(1)
        cluster.start(2)
        grown = cluster.ask(GrowInternalTopics(partitions_max=30))
        assert len(grown.items) == 30
        cluster.ask(GrowInternalTopics())
        assert len(list_reassignments(cluster.image)) == 50
        for number in range(50):
            assert cluster.propose("__consumer_offsets", (0, 1, 2), number).error is None
        assert list_reassignments(cluster.image) == ()
        assert all(len(p.replicas) == 3 for _, _, p in cluster.image.partitions_on(0))
        before = cluster.image
        cluster.ask(GrowInternalTopics())
        assert cluster.image is before

    def test_they_cannot_be_deleted(self) -> None:
        cluster = Cluster(1)
        cluster.create("__transaction_state")
        (outcome,) = cluster.ask(DeleteTopics(names=("__transaction_state",))).items
        assert outcome.error is ErrorCode.INVALID_REQUEST

    @pytest.mark.parametrize("name", ["__consumer_offsets", "__transaction_state"])
    def test_their_partition_count_never_changes(self, name: str) -> None:
        cluster = Cluster(1)
        cluster.create(name, 4, 1)
        before = cluster.image
        (outcome,) = cluster.ask(AddPartitions(topics=(NewPartitions(name=name, total=8),))).items
        assert (outcome.error, cluster.image) == (ErrorCode.INVALID_TOPIC, before)
        assert "hash" in outcome.message

    @pytest.mark.parametrize("policy", ["delete", "compact,delete", "delete, compact"])
    def test_they_are_not_created_with_a_policy_that_deletes_records(self, policy: str) -> None:
        error = refused(Cluster(1), "__consumer_offsets", 4, 1, configs=(("cleanup.policy", policy),))
        assert (error.error, "cleanup.policy" in error.message) == (ErrorCode.INVALID_CONFIG, True)


class TestDelete:
    @pytest.mark.requirement("a:N-19", "b:I-03", "a:X3-16")
    def test_after_a_delete_nothing_of_the_topic_is_left(self) -> None:
        cluster = Cluster(2)
        cluster.create("keep", 1, 2)
        before = cluster.image
        created = cluster.create("t.x", 4, 2, configs=(("retention.ms", "5"),))
        assert [item.error for item in cluster.ask(DeleteTopics(names=("t.x",))).items] == [None]
        assert cluster.image == before, "image, indexes and configs are as before"
        assert topic_names(cluster.image) == ["keep"]
        with pytest.raises(UnknownTopicOrPartitionError):
            describe_topic(cluster.image, "t.x")
        (outcome,) = cluster.ask(DeleteTopics(ids=(created.topic_id,))).items
        assert outcome.error is ErrorCode.UNKNOWN_TOPIC_ID

    @pytest.mark.requirement("a:A-31", "b:I-03")
    def test_it_can_be_switched_off(self) -> None:
        cluster = Cluster(1)
        cluster.create("t", 1, 1)
        set_cluster(cluster, "delete.topic.enable", "false")
        assert cluster.refused(DeleteTopics(names=("t",))).code is ErrorCode.TOPIC_DELETION_DISABLED

    @pytest.mark.parametrize("name", ["", "nothing", "..", "x" * 300, "a\x00b"])
    def test_an_unknown_name_is_refused(self, name: str) -> None:
        cluster = Cluster(1)
        before = cluster.image
        (outcome,) = cluster.ask(DeleteTopics(names=(name,))).items
        assert (outcome.error, cluster.image) == (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, before)
        assert "\x00" not in outcome.message
        assert len(outcome.message) < 300

    def test_one_topic_by_name_and_id_at_once_is_refused(self) -> None:
        cluster = Cluster(1)
        topic_id = cluster.create("t", 1, 1).topic_id
        items = cluster.ask(DeleteTopics(names=("t",), ids=(topic_id,))).items
        assert [item.error for item in items] == [ErrorCode.INVALID_REQUEST] * 2
        assert topic_names(cluster.image) == ["t"]

    def test_validation_only_deletes_nothing(self) -> None:
        cluster = Cluster(1)
        cluster.create("t", 1, 1)
        assert cluster.ask(DeleteTopics(names=("t",), validate_only=True)).items[0].error is None
        assert topic_names(cluster.image) == ["t"]


class TestAddPartitions:
    @pytest.mark.requirement("b:I-04", "a:A-40", "a:X3-16")
    def test_the_total_is_given_and_what_there_was_stays(self) -> None:
        cluster = Cluster(3)
        cluster.create("t", 2, 2)
        before = [cluster.partition("t", number) for number in range(2)]
        assert cluster.ask(AddPartitions(topics=(NewPartitions(name="t", total=5),))).items[0].error is None
        assert [cluster.partition("t", number) for number in range(2)] == before
        assert all(len(cluster.partition("t", number).replicas) == 2 for number in range(5))

    def test_new_partitions_can_be_assigned_by_hand(self) -> None:
        cluster = Cluster(3)
        cluster.create("t", 1, 2)
        more = NewPartitions(name="t", total=3, assignment=((2, 1), (0, 2)))
        cluster.ask(AddPartitions(topics=(more,)))
        assert [cluster.partition("t", number).replicas for number in (1, 2)] == [(2, 1), (0, 2)]

    @pytest.mark.requirement("a:N-20", "a:A-40", "b:B-12")
    @pytest.mark.parametrize("total", [2, 1, 0, -1, 3, 100_001])
    def test_fewer_as_many_or_far_too_many_is_refused(self, total: int) -> None:
        self.refused(NewPartitions(name="t", total=total), ErrorCode.INVALID_PARTITIONS)

    @pytest.mark.parametrize(
        ("more", "code"),
        [
            (NewPartitions(name="nothing", total=9), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
            (NewPartitions(name="t", total=10_004), ErrorCode.POLICY_VIOLATION),
            (NewPartitions(name="t", total=5, assignment=((0, 1),)), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
            (NewPartitions(name="t", total=4, assignment=((0,),)), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
            (NewPartitions(name="t", total=4, assignment=((0, 0),)), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
            (NewPartitions(name="t", total=4, assignment=((0, 9),)), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        ],
        ids=str,
    )
    def test_other_bad_requests_are_refused(self, more: NewPartitions, code: ErrorCode) -> None:
        self.refused(more, code)

    def refused(self, more: NewPartitions, code: ErrorCode) -> None:
        cluster = Cluster(3)
        cluster.create("t", 3, 2)
        before = cluster.image
        (outcome,) = cluster.ask(AddPartitions(topics=(more,))).items
        assert (outcome.error, cluster.image) == (code, before)
        twice = cluster.ask(AddPartitions(topics=(more, more))).items
        assert [item.error for item in twice] == [ErrorCode.INVALID_REQUEST] * 2

    def test_some_topics_may_succeed_and_others_fail(self) -> None:
        cluster = Cluster(1)
        cluster.create("a", 1, 1)
        topics = (NewPartitions(name="a", total=2), NewPartitions(name="b", total=2))
        errors = [item.error for item in cluster.ask(AddPartitions(topics=topics)).items]
        assert errors == [None, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
        assert cluster.partition("a", 1).leader == 0


class TestTrim:
    def trim(self, cluster: Cluster, offset: int, **more: Any) -> Any:
        partition = cluster.partition("t")
        fields = {"topic_id": cluster.image.topic_ids["t"], "partition": 0, "leader_epoch": partition.leader_epoch}
        item = LogStartAdvance(**{**fields, "start_offset": offset, **more})
        epoch = cluster.image.brokers[0].broker_epoch
        return cluster.ask(AdvanceLogStart(broker=0, broker_epoch=epoch, partitions=(item,))).items[0]

    def test_the_start_offset_is_kept_and_only_grows(self) -> None:
        cluster = Cluster(2)
        cluster.made("t", (0, 1))
        assert self.trim(cluster, 100).error is None
        before = cluster.image
        assert self.trim(cluster, 50).error is None
        assert cluster.image is before
        assert cluster.partition("t").start_offset == 100
        cluster.crash(0)
        assert (cluster.partition("t").leader, cluster.partition("t").start_offset) == (1, 100)

    def test_only_the_leader_of_this_epoch_may(self) -> None:
        cluster = Cluster(2)
        cluster.made("t", (0, 1))
        assert self.trim(cluster, 5, leader_epoch=7).error is ErrorCode.FENCED_LEADER_EPOCH
        assert self.trim(cluster, -1).error is ErrorCode.INVALID_REQUEST
        assert self.trim(cluster, 5, partition=1).error is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert self.trim(cluster, 5, topic_id=UUID(int=5)).error is ErrorCode.UNKNOWN_TOPIC_ID
        stale = AdvanceLogStart(broker=0, broker_epoch=0, partitions=())
        assert cluster.refused(stale).code is ErrorCode.STALE_BROKER_EPOCH


class TestDescribe:
    @pytest.mark.requirement("b:I-02", "a:A-07")
    def test_leader_replicas_and_in_sync_set_of_each_partition(self) -> None:
        cluster = Cluster(3)
        cluster.made("t", (0, 1, 2), (1, 2, 0))
        cluster.crash(1)
        topic = describe_topic(cluster.image, "t")
        rows = [(p.leader, p.replicas, p.isr, p.offline_replicas, p.state) for p in topic.partitions]
        assert rows == [
            (0, (0, 1, 2), (0, 2), (1,), "online"),
            (2, (1, 2, 0), (2, 0), (1,), "online"),
        ]
        assert topic.replication_factor == 3
        cluster.crash(2)
        assert [p.state for p in describe_topic(cluster.image, "t").partitions] == ["read-only", "read-only"]

    def test_an_unknown_topic_has_an_error_beside_known_ones(self) -> None:
        cluster = Cluster(1)
        cluster.made("t", (0,))
        known, unknown = cluster.controller.answer(cluster.image, DescribeTopics(names=("t", "u"))).topics
        assert (known.topic.name, unknown.error) == ("t", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        every = cluster.controller.answer(cluster.image, DescribeTopics())
        assert [topic.name for topic in every.topics] == ["t"]

    def test_brokers_with_their_load(self) -> None:
        cluster = Cluster(2)
        cluster.made("t", (0, 1), (0, 1))
        cluster.ask(Drain(broker=1))
        cluster.crash(1)
        rows = cluster.controller.answer(cluster.image, DescribeBrokers()).brokers
        reported = [(b.broker, b.is_fenced, b.is_draining, b.replicas, b.preferred_for) for b in rows]
        assert reported == [(0, False, False, 2, 2), (1, True, True, 2, 0)]
