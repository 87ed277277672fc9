"""Plans of reassignments: off a broker, onto new ones, evenly, and with every partition on as many racks as before."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.metadata.controller import Cluster

from tidelog.metadata.brokers import Drain, Unregister
from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.partitions import ElectLeaders
from tidelog.metadata.queries import describe_topic
from tidelog.metadata.reassignment_planner import plan_reassignments
from tidelog.metadata.reassignments import AlterReassignments, list_reassignments
from tidelog.metadata.topics import AddPartitions, DeleteTopics, NewPartitions
from tidelog.model.errors import (
    BrokerNotRegisteredError,
    ErrorCode,
    InvalidReplicationFactorError,
    UnknownTopicOrPartitionError,
)


def execute(cluster: Cluster, **options: object) -> int:
    """Plan, run, and let every new replica catch up; how many partitions moved."""
    plan = plan_reassignments(cluster.image, **options)  # type: ignore[arg-type]
    assert all(item.error is None for item in cluster.ask(AlterReassignments(partitions=plan)).items)
    for moving in list_reassignments(cluster.image):
        state = cluster.propose(moving.topic, moving.replicas, moving.partition)
        assert state.error in (None, ErrorCode.NEW_LEADER_ELECTED)
    assert list_reassignments(cluster.image) == ()
    return len(plan)


@pytest.mark.requirement("a:O-11", "a:O-16", "b:I-06", "b:I-10")
def test_new_brokers_get_their_share_and_no_more_moves_than_that_takes() -> None:
    cluster = Cluster(3)
    cluster.create("t", 12, 3)
    for broker in (3, 4, 5):
        cluster.start(broker)
    plan = plan_reassignments(cluster.image)
    moved = sum(len(set(item.replicas or ()) - {0, 1, 2}) for item in plan)
    assert moved == 18
    execute(cluster)
    assert [cluster.image.replica_count(broker) for broker in range(6)] == [6] * 6
    assert plan_reassignments(cluster.image) == (), "an even cluster needs no plan"


@pytest.mark.requirement("b:I-06", "a:O-16")
def test_a_broker_is_emptied_and_can_then_be_forgotten() -> None:
    cluster = Cluster(5, racks={broker: f"r{broker % 2}" for broker in range(5)})
    cluster.create("t", 20, 2)
    racks = {broker: cluster.image.brokers[broker].rack for broker in range(5)}
    cluster.ask(Drain(broker=4))
    execute(cluster)
    assert cluster.image.replica_count(4) == 0
    topic = cluster.image.topic_named("t")
    assert topic is not None
    assert all(len({racks[broker] for broker in p.replicas}) == 2 for p in topic.partitions.values())
    counts = [cluster.image.replica_count(broker) for broker in range(4)]
    assert max(counts) - min(counts) <= 1
    cluster.stop(4)
    cluster.ask(Unregister(broker=4))


def test_a_plan_for_one_topic_leaves_the_others_where_they_are() -> None:
    cluster = Cluster(4)
    cluster.made("a", (0, 1), (0, 1))
    cluster.made("b", (0, 1), (0, 1))
    plan = plan_reassignments(cluster.image, topics=["a"], brokers=[2, 3])
    assert {item.topic for item in plan} == {"a"}
    assert Counter(broker for item in plan for broker in item.replicas or ()) == {2: 2, 3: 2}
    execute(cluster, topics=["a"], brokers=[2, 3])
    assert cluster.partition("b").replicas == (0, 1)


def test_racks_are_not_given_up_for_evenness() -> None:
    cluster = Cluster(4, racks={0: "a", 1: "b", 2: "b", 3: "b"})
    cluster.made("t", *[(0, 1)] * 6)
    execute(cluster)
    assert cluster.image.replica_count(0) == 6
    assert [cluster.image.replica_count(broker) for broker in (1, 2, 3)] == [2, 2, 2]


def per_broker(cluster: Cluster, name: str) -> tuple[Counter[int], Counter[int]]:
    topic = cluster.image.topic_named(name)
    assert topic is not None
    replicas = Counter(broker for partition in topic.partitions.values() for broker in partition.replicas)
    return replicas, Counter(partition.preferred for partition in topic.partitions.values())


def test_a_new_broker_gets_its_share_of_every_topic_and_of_its_leaders() -> None:
    cluster = Cluster(3)
    cluster.create("__consumer_offsets", 50, 3)
    cluster.create("orders", 12, 3)
    cluster.create("payments", 4, 3)
    cluster.create("audit", 1, 3)
    cluster.start(3)
    execute(cluster)
    for name, partitions in (("orders", 12), ("payments", 4), ("__consumer_offsets", 50)):
        replicas, leaders = per_broker(cluster, name)
        assert max(replicas.values()) - min(replicas[broker] for broker in range(4)) <= 1, (name, replicas)
        assert max(leaders.values()) - min(leaders[broker] for broker in range(4)) <= 1, (name, leaders)
        assert replicas.total() == 3 * partitions
    assert plan_reassignments(cluster.image) == ()


def test_a_plan_for_one_topic_spreads_that_topic_whatever_else_the_brokers_hold() -> None:
    cluster = Cluster(3)
    cluster.create("big", 30, 3)
    cluster.start(3)
    cluster.made("filler", *[(3,)] * 90)
    cluster.made("orders", *[(0, 1, 2)] * 4)
    execute(cluster, topics=["orders"])
    replicas, leaders = per_broker(cluster, "orders")
    assert replicas == {0: 3, 1: 3, 2: 3, 3: 3}
    assert leaders == {0: 1, 1: 1, 2: 1, 3: 1}


def test_leaders_of_many_small_topics_are_spread_over_all_brokers() -> None:
    cluster = Cluster(3)
    for number in range(9):
        cluster.made(f"small{number}", (0, 1, 2))
    execute(cluster)
    leaders = Counter(cluster.partition(f"small{number}").preferred for number in range(9))
    assert leaders == {0: 3, 1: 3, 2: 3}


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_plans_level_every_topic_keep_replicas_distinct_and_are_final(data: st.DataObject) -> None:
    brokers = data.draw(st.integers(2, 6))
    racks = {broker: data.draw(st.sampled_from(["a", "b", None])) for broker in range(brokers)}
    cluster = Cluster(brokers, racks={broker: rack for broker, rack in racks.items() if rack is not None})
    for number in range(data.draw(st.integers(1, 4))):
        chosen = st.permutations(range(brokers)).map(lambda order: tuple(order[: 1 + len(order) // 2]))
        cluster.made(f"t{number}", *data.draw(st.lists(chosen, min_size=1, max_size=8)))
    before = {topic.name: topic.partitions for topic in cluster.image.topics.values()}
    plan = plan_reassignments(cluster.image)
    for item in plan:
        assert item.replicas is not None
        old = before[item.topic][item.partition].replicas
        assert len(set(item.replicas)) == len(item.replicas) == len(old)
        assert len({racks[b] for b in item.replicas}) >= len({racks[b] for b in old})
    execute(cluster)
    assert plan_reassignments(cluster.image) == ()
    if len(set(racks.values())) == 1:
        for name in before:
            replicas, _ = per_broker(cluster, name)
            assert max(replicas.values()) - min(replicas[broker] for broker in range(brokers)) <= 1


def test_bad_plans_are_refused() -> None:
    cluster = Cluster(3)
    cluster.made("t", (0, 1))
    with pytest.raises(BrokerNotRegisteredError):
        plan_reassignments(cluster.image, brokers=[0, 9])
    with pytest.raises(InvalidReplicationFactorError):
        plan_reassignments(cluster.image, brokers=[0])
    with pytest.raises(UnknownTopicOrPartitionError):
        plan_reassignments(cluster.image, topics=["nothing"])


@pytest.mark.requirement("b:EX-35")
def test_the_daily_work_of_an_operator_from_create_to_delete() -> None:
    cluster = Cluster(4)
    cluster.made("t", (0, 1))
    assert describe_topic(cluster.image, "t").partitions[0].leader == 0
    cluster.ask(AddPartitions(topics=(NewPartitions(name="t", total=2),)))
    change = ConfigChange(key="retention.ms", operation="set", value="1000")
    cluster.ask(AlterConfigs(resources=(ResourceChange(resource_type="topic", resource="t", changes=(change,)),)))
    assert describe_topic(cluster.image, "t").configs == (("retention.ms", "1000"),)
    execute(cluster, topics=["t"], brokers=[2, 3])
    assert set(cluster.partition("t").replicas) == {2, 3}
    preferred = cluster.partition("t").preferred
    cluster.crash(preferred)
    cluster.start(preferred)
    cluster.propose("t", (2, 3))
    assert cluster.partition("t").leader != preferred
    assert cluster.ask(ElectLeaders(kind="preferred", partitions=(("t", 0),))).items[0].error is None
    assert cluster.partition("t").leader == preferred
    cluster.ask(DeleteTopics(names=("t",)))
    assert "t" not in cluster.image.topic_ids
