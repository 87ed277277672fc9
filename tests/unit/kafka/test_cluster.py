"""DescribeQuorum, DescribeLogDirs, ElectLeaders and reassignments against whole brokers: every version and error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.brokers.cluster import RunningBroker
from support.kafka.cluster import KafkaCluster

from tidelog.metadata.config_changes import SET, AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.controller_node import ControllerNode
from tidelog.metadata.topics import CreateTopics, DeleteTopics, NewTopic
from tidelog.model.errors import ErrorCode, StorageError
from tidelog.model.ids import NodeId, PartitionId, TopicId
from tidelog.raft.status import RaftStatus
from tidelog.rpc.kafka import cluster as handlers
from tidelog.rpc.kafka.messages import (
    ALTER_PARTITION_REASSIGNMENTS,
    DESCRIBE_LOG_DIRS,
    DESCRIBE_QUORUM,
    ELECT_LEADERS,
    LIST_PARTITION_REASSIGNMENTS,
)
from tidelog.rpc.kafka.messages.cluster import (
    AlterPartitionReassignmentsRequest,
    DescribableLogDirTopic,
    DescribeLogDirsRequest,
    DescribeQuorumRequest,
    ElectLeadersRequest,
    ElectLeadersTopicPartitions,
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsTopics,
    QuorumRequestPartitionData,
    QuorumRequestTopicData,
    ReassignablePartition,
    ReassignableTopic,
)
from tidelog.services.limits import RequestLimits

BROKERS = (11, 12, 13)
PREFERRED, UNCLEAN = 0, 1


def code_name(code: int) -> str:
    return {one.value.code: one.name for one in ErrorCode}[code] if code else ""


@pytest.fixture(scope="module")
def cluster() -> Iterator[KafkaCluster]:
    """Nobody is killed in it; each test has topics of its own."""
    with KafkaCluster(61, handlers.HANDLERS, brokers=BROKERS) as made:
        yield made


def place(cluster: KafkaCluster, name: str, *assignment: tuple[int, ...]) -> None:
    (made,) = cluster.ask(CreateTopics(topics=(NewTopic(name=name, assignment=assignment),))).topics
    assert made.error is None, made.message
    cluster.until_same()


# DescribeQuorum.


def quorum(*partitions: int, topic: str = "__cluster_metadata") -> DescribeQuorumRequest:
    rows = [QuorumRequestPartitionData(partition_index=number) for number in partitions]
    return DescribeQuorumRequest(topics=[QuorumRequestTopicData(topic_name=topic, partitions=rows)])


@pytest.mark.requirement("a:C-15")
@pytest.mark.parametrize("version", range(3))
def test_the_quorum_is_described_by_its_leader_through_any_broker(cluster: KafkaCluster, version: int) -> None:
    active = cluster.active()
    for node in BROKERS:
        found = cluster.send(DESCRIBE_QUORUM, quorum(0), version=version, node=node)
        assert found.error_code == 0
        (row,) = found.topics[0].partitions
        core = cluster.controller(active).driver.core
        assert (row.error_code, row.leader_id, row.leader_epoch) == (0, active, core.epoch)
        assert 0 < row.high_watermark <= core.commit
        voters = {voter.replica_id: voter for voter in row.current_voters}
        assert sorted(voters) == [1, 2, 3]
        now_ms = cluster.services[node].groups.coordinator.now_ms()
        for number, voter in voters.items():
            assert voter.log_end_offset > 0
            assert voter.replica_directory_id == (bytes([number]) * 16 if version >= 2 else bytes(16))
            if version >= 1:
                assert 0 <= now_ms - voter.last_fetch_timestamp < 60_000
                caught_up = voter.last_caught_up_timestamp
                assert caught_up == -1 or 0 <= now_ms - caught_up < 60_000
        if version >= 1:
            assert voters[active].last_caught_up_timestamp == voters[active].last_fetch_timestamp != -1
        tailing = {state.replica_id: state.log_end_offset for state in row.observers}
        assert set(tailing) <= set(BROKERS)
        assert all(0 <= offset <= core.log.end for offset in tailing.values())
        assert [one.node_id for one in found.nodes] == ([1, 2, 3] if version >= 2 else [])


def test_brokers_are_observers_of_the_quorum(cluster: KafkaCluster) -> None:
    (row,) = cluster.send(DESCRIBE_QUORUM, quorum(0)).topics[0].partitions
    reports = [cluster.on(node, _report) for node in cluster.controllers]
    assert {node for report in reports for node, _ in report.observers} == set(BROKERS), "each tails some controller"
    leader = next(report for report in reports if report.node == row.leader_id)
    assert [state.replica_id for state in row.observers] == [node for node, _ in leader.observers]


async def _report(controller: ControllerNode) -> RaftStatus:
    return controller.driver.describe()


def test_a_partition_that_has_no_quorum_says_so(cluster: KafkaCluster) -> None:
    found = cluster.send(DESCRIBE_QUORUM, quorum(0, 1))
    assert [code_name(row.error_code) for row in found.topics[0].partitions] == ["", "UNKNOWN_TOPIC_OR_PARTITION"]
    found = cluster.send(DESCRIBE_QUORUM, quorum(0, topic="other"))
    (row,) = found.topics[0].partitions
    assert code_name(row.error_code) == "UNKNOWN_TOPIC_OR_PARTITION"
    assert "__cluster_metadata-0" in row.error_message
    assert cluster.send(DESCRIBE_QUORUM, DescribeQuorumRequest()).topics == []


def test_addresses_of_voters_are_taken_apart() -> None:
    listener = handlers._quorum_listener("CONTROLLER", "[::1]:9093")
    assert (listener.name, listener.host, listener.port) == ("CONTROLLER", "::1", 9093)
    assert handlers._quorum_listener("C", "host.example:1").host == "host.example"


# DescribeLogDirs.


def logs(cluster: KafkaCluster, broker: int) -> list[PartitionId]:
    """Those that lie in its directories."""
    return [one for directory in cluster.brokers[NodeId(broker)].logs.directories for one in directory.paths]


@pytest.mark.parametrize("version", range(1, 5))
def test_a_broker_tells_the_sizes_of_its_own_directories(version: int) -> None:
    with KafkaCluster(62 + version, handlers.HANDLERS, directories=2, brokers=(11, 12)) as cluster:
        place(cluster, "t", (11, 12), (12, 11), (11, 12))
        place(cluster, "other", (12,))
        where = PartitionId(TopicId(cluster.image().topic_ids["t"]), 0)
        cluster.write(where, b"some bytes")
        cluster.world.run_until(lambda: (len(logs(cluster, 11)), len(logs(cluster, 12))) == (3, 4), timeout=10)

        def sizes(node: int, request: DescribeLogDirsRequest) -> dict[tuple[str, int], int]:
            found = cluster.send(DESCRIBE_LOG_DIRS, request, version=version, node=node)
            assert found.error_code == 0
            assert len({result.log_dir for result in found.results}) == 2
            for result in found.results:
                assert result.error_code == 0
                assert (result.total_bytes >= result.usable_bytes > 0) is (version >= 4)
            return {
                (topic.name, row.partition_index): row.partition_size
                for result in found.results
                for topic in result.topics
                for row in topic.partitions
                if (row.offset_lag, row.is_future_key) == (0, False)
            }

        everything = sizes(11, DescribeLogDirsRequest(topics=None))
        assert sorted(everything) == [("t", 0), ("t", 1), ("t", 2)]
        assert everything["t", 0] == cluster.log(11, where).size > 0 == everything["t", 1]
        some = DescribeLogDirsRequest(
            topics=[DescribableLogDirTopic(topic="t", partitions=[1, 7]), DescribableLogDirTopic(topic="nobody")]
        )
        assert sorted(sizes(11, some)) == [("t", 1)]
        assert sorted(sizes(12, DescribeLogDirsRequest(topics=[DescribableLogDirTopic(topic="other")]))) == [
            ("other", 0)
        ]
        assert sizes(12, DescribeLogDirsRequest(topics=[])) == {}


def test_a_directory_that_has_failed_says_so() -> None:
    with KafkaCluster(67, handlers.HANDLERS, directories=2, brokers=(11, 12)) as cluster:
        place(cluster, "t", *[(11, 12)] * 4)
        directory = cluster.brokers[NodeId(11)].logs.directories[1]
        cluster.on_broker(11, _fail_second)
        found = cluster.send(DESCRIBE_LOG_DIRS, DescribeLogDirsRequest(topics=None))
        good, bad = sorted(found.results, key=lambda result: result.error_code)
        assert (bad.log_dir, code_name(bad.error_code)) == (directory.disk.label, "STORAGE_ERROR")
        assert (bad.total_bytes, bad.usable_bytes) == (-1, -1)
        assert (good.error_code, good.usable_bytes > 0) == (0, True)


async def _fail_second(broker: RunningBroker) -> None:
    broker.logs.directories[1].fail(StorageError("a test says so"))


# ElectLeaders.


def elect(cluster: KafkaCluster, kind: int, *named: tuple[str, list[int]], **more: Any) -> list[tuple[str, int, str]]:
    version, node, is_all = more.pop("version", None), more.pop("node", 11), more.pop("all", False)
    rows = [ElectLeadersTopicPartitions(topic=topic, partitions=numbers) for topic, numbers in named]
    request = ElectLeadersRequest(election_type=kind, topic_partitions=None if is_all else rows, **more)
    found = cluster.send(ELECT_LEADERS, request, version=version, node=node)
    assert found.error_code == 0, code_name(found.error_code)
    results = []
    for topic in found.replica_election_results:
        for row in topic.partition_result:
            assert bool(row.error_message) == bool(row.error_code)
            results.append((topic.topic, row.partition_id, code_name(row.error_code)))
    return results


def test_leaders_are_elected_preferred_or_unclean_for_some_or_for_all() -> None:
    with KafkaCluster(71, handlers.HANDLERS, brokers=BROKERS) as cluster:
        change = ConfigChange(key="auto.leader.rebalance.enable", operation=SET, value="false")
        cluster.ask(AlterConfigs(resources=(ResourceChange(resource_type="cluster", changes=(change,)),)))
        place(cluster, "t", *[(13, 11)] * 3, (11, 13))
        place(cluster, "lost", (13,))
        wanted = ("t", [0, 1, 3, 9])
        for version in range(3):
            assert elect(cluster, PREFERRED, wanted, ("nobody", [0]), version=version) == [
                ("t", 0, "ELECTION_NOT_NEEDED"),
                ("t", 1, "ELECTION_NOT_NEEDED"),
                ("t", 3, "ELECTION_NOT_NEEDED"),
                ("t", 9, "UNKNOWN_TOPIC_OR_PARTITION"),
                ("nobody", 0, "UNKNOWN_TOPIC_OR_PARTITION"),
            ]
        assert elect(cluster, PREFERRED, all=True) == []
        assert elect(cluster, PREFERRED) == []
        cluster.kill(NodeId(13))
        cluster.world.run_until(lambda: cluster.image().brokers[13].fenced, timeout=10)
        assert elect(cluster, PREFERRED, ("t", [0])) == [("t", 0, "PREFERRED_LEADER_NOT_AVAILABLE")]
        assert elect(cluster, UNCLEAN, ("t", [0]), ("lost", [0])) == [
            ("t", 0, "ELECTION_NOT_NEEDED"),
            ("lost", 0, "ELIGIBLE_LEADERS_NOT_AVAILABLE"),
        ]
        cluster.start_brokers(13)
        topic = cluster.image().topic_ids["t"]
        cluster.world.run_until(
            lambda: all(13 in cluster.image().topics[topic].partitions[n].isr for n in range(4)), timeout=30
        )
        assert elect(cluster, PREFERRED, ("t", [1])) == [("t", 1, "")]
        assert sorted(elect(cluster, PREFERRED, all=True)) == [("t", 0, ""), ("t", 2, "")]
        cluster.until_same()
        assert [cluster.image().topics[topic].partitions[n].leader for n in range(4)] == [13, 13, 13, 11]


def test_an_election_type_that_is_none_is_refused(cluster: KafkaCluster) -> None:
    place(cluster, "led", (11,))
    rows = [ElectLeadersTopicPartitions(topic="led", partitions=[0])]
    found = cluster.send(ELECT_LEADERS, ElectLeadersRequest(election_type=5, topic_partitions=rows))
    assert code_name(found.error_code) == "INVALID_REQUEST"
    assert elect(cluster, PREFERRED, ("led", [0, 0])) == [("led", 0, "INVALID_REQUEST")] * 2


# Reassignments.


def reassign(cluster: KafkaCluster, topic: str, moves: dict[int, list[int] | None], **more: Any) -> dict[int, str]:
    version = more.pop("version", None)
    rows = [ReassignablePartition(partition_index=number, replicas=replicas) for number, replicas in moves.items()]
    request = AlterPartitionReassignmentsRequest(topics=[ReassignableTopic(name=topic, partitions=rows)], **more)
    found = cluster.send(ALTER_PARTITION_REASSIGNMENTS, request, version=version)
    assert (found.error_code, found.error_message) == (0, None)
    (response,) = found.responses
    assert response.name == topic
    assert all(bool(row.error_message) == bool(row.error_code) for row in response.partitions)
    return {row.partition_index: code_name(row.error_code) for row in response.partitions}


def ongoing(cluster: KafkaCluster, **named: list[int]) -> list[tuple[str, int, list[int], list[int], list[int]]]:
    topics = [ListPartitionReassignmentsTopics(name=topic, partition_indexes=rows) for topic, rows in named.items()]
    request = ListPartitionReassignmentsRequest(topics=topics or None)
    found = cluster.send(LIST_PARTITION_REASSIGNMENTS, request)
    assert (found.error_code, found.error_message) == (0, None)
    return [
        (topic.name, row.partition_index, row.replicas, row.adding_replicas, row.removing_replicas)
        for topic in found.topics
        for row in topic.partitions
    ]


@pytest.mark.parametrize("version", range(2))
def test_replicas_move_and_a_move_that_waits_can_be_listed_and_cancelled(version: int) -> None:
    with KafkaCluster(72 + version, handlers.HANDLERS, brokers=BROKERS) as cluster:
        place(cluster, "t", (11, 12), (12, 11))
        assert reassign(cluster, "t", {0: [12, 13]}, version=version) == {0: ""}
        topic = cluster.image().topic_ids["t"]
        cluster.world.run_until(lambda: cluster.image().topics[topic].partitions[0].replicas == (12, 13), timeout=30)
        assert ongoing(cluster) == []
        cluster.kill(NodeId(13))
        cluster.world.run_until(lambda: cluster.image().brokers[13].fenced, timeout=10)
        assert reassign(cluster, "t", {1: [12, 13]}, version=version) == {1: ""}
        moving = ("t", 1, [12, 11, 13], [13], [11])
        assert ongoing(cluster) == [moving]
        assert ongoing(cluster, t=[1], nobody=[0]) == [moving]
        assert ongoing(cluster, t=[0]) == []
        assert reassign(cluster, "t", {0: None, 1: None}, version=version) == {
            0: "NO_REASSIGNMENT_IN_PROGRESS",
            1: "",
        }
        assert ongoing(cluster) == []
        cluster.until_same()
        assert cluster.image().topics[topic].partitions[1].replicas == (12, 11)


def test_a_reassignment_that_cannot_be_is_refused(cluster: KafkaCluster) -> None:
    place(cluster, "kept", (11, 12))
    for replicas in ([], [11, 11], [11, 77]):
        assert reassign(cluster, "kept", {0: replicas}) == {0: "INVALID_REPLICA_ASSIGNMENT"}
    assert reassign(cluster, "kept", {5: [11]}) == {5: "UNKNOWN_TOPIC_OR_PARTITION"}
    assert reassign(cluster, "nobody", {0: [11]}) == {0: "UNKNOWN_TOPIC_OR_PARTITION"}
    fixed = {"allow_replication_factor_change": False}
    assert reassign(cluster, "kept", {0: [11]}, **fixed) == {0: "INVALID_REPLICATION_FACTOR"}
    assert reassign(cluster, "kept", {0: [11, 12, 13]}, **fixed) == {0: "INVALID_REPLICATION_FACTOR"}
    assert reassign(cluster, "kept", {0: [12, 11]}, **fixed) == {0: ""}
    cluster.until_same()
    assert cluster.image().topic_named("kept").partitions[0].replicas == (12, 11)
    empty = cluster.send(ALTER_PARTITION_REASSIGNMENTS, AlterPartitionReassignmentsRequest())
    assert (empty.error_code, empty.responses) == (0, [])


def test_a_deleted_topic_is_in_no_directory_and_no_list(cluster: KafkaCluster) -> None:
    place(cluster, "short-lived", (11,))
    cluster.ask(DeleteTopics(names=("short-lived",)))
    cluster.until_same()
    found = cluster.send(DESCRIBE_LOG_DIRS, DescribeLogDirsRequest(topics=None))
    assert "short-lived" not in {topic.name for result in found.results for topic in result.topics}


# No controller.


def test_without_a_controller_a_whole_request_says_that_the_time_is_up() -> None:
    with KafkaCluster(75, handlers.HANDLERS, limits=RequestLimits(admin_timeout_ms=300), brokers=(11,)) as cluster:
        for node in list(cluster.controllers):
            cluster.kill(node)
        late = "REQUEST_TIMED_OUT"
        rows = [ElectLeadersTopicPartitions(topic="t", partitions=[0, 1])]
        topics = [ReassignableTopic(name="t", partitions=[ReassignablePartition(replicas=[11])])]
        for api, request in (
            (DESCRIBE_QUORUM, quorum(0)),
            (ELECT_LEADERS, ElectLeadersRequest(topic_partitions=rows, timeout_ms=300)),
            (ALTER_PARTITION_REASSIGNMENTS, AlterPartitionReassignmentsRequest(topics=topics, timeout_ms=300)),
            (LIST_PARTITION_REASSIGNMENTS, ListPartitionReassignmentsRequest(timeout_ms=300)),
        ):
            assert code_name(cluster.send(api, request).error_code) == late, api
        found = cluster.send(ELECT_LEADERS, ElectLeadersRequest(topic_partitions=rows, timeout_ms=300), version=0)
        (topic,) = found.replica_election_results
        assert [code_name(row.error_code) for row in topic.partition_result] == [late, late]
        assert len(cluster.send(DESCRIBE_LOG_DIRS, DescribeLogDirsRequest(topics=None)).results) == 1
