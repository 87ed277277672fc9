"""The service Cluster against whole controllers and brokers: metadata, the quorum, the metadata log."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from support.grpc_api.simulated_nodes import CONTROLLERS, ApiCluster

from tidelog import __version__
from tidelog.cli.quorum import describe_document
from tidelog.client.admin.conversions import quorum_description
from tidelog.metadata.controller_node import ControllerConfig, ControllerNode
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.records import decode_records
from tidelog.metadata.replay import Replay
from tidelog.metadata.snapshot import decode_snapshot
from tidelog.model.errors import ErrorCode, RemoteError, TidelogError
from tidelog.model.ids import NodeId
from tidelog.raft.config import RaftConfig
from tidelog.raft.driver import DriverConfig
from tidelog.raft.membership import Member, Membership, directory_text
from tidelog.rpc.v1 import admin_pb2, log_pb2
from tidelog.rpc.v1 import cluster_pb2 as pb


def ask(quorum: ApiCluster, node: int, name: str, request: Any) -> Any:
    return quorum.api(node, "Cluster", name, request)


def refused(quorum: ApiCluster, node: int, name: str, request: Any) -> RemoteError:
    with pytest.raises(RemoteError, match=r".") as refusal:
        ask(quorum, node, name, request)
    return refusal.value


def until_known(quorum: ApiCluster, topic: str) -> None:
    tails = [broker.tail for broker in quorum.brokers.values()]
    quorum.world.run_until(lambda: all(topic in tail.image.topic_ids for tail in tails), timeout=10)


def standby(quorum: ApiCluster) -> NodeId:
    active = quorum.active()
    return next(node for node in quorum.controllers if node != active)


# Metadata.


@pytest.mark.requirement("a:C-05")
def test_metadata_tells_live_brokers_leaders_and_epochs_on_a_node_of_any_role() -> None:
    with ApiCluster(1, brokers=()) as quorum:
        quorum.start_brokers(11, 12, rack="r1")
        made = quorum.create("orders", partitions=2, replication_factor=2)
        until_known(quorum, "orders")
        request = pb.MetadataRequest(topics=["orders", "nobody"], topic_ids=[made.topic_id.bytes, UUID(int=3).bytes])
        for node in (quorum.active(), 11):
            found = ask(quorum, node, "Metadata", request)
            assert (found.cluster_id, found.controller, found.listener) == ("cluster", quorum.active(), "CLIENT")
            assert [(b.id, b.host, b.port, b.rack) for b in found.brokers] == [
                (11, "host-11", 9092, "r1"),
                (12, "host-12", 9092, "r1"),
            ]
            by_name, unknown, by_id, unknown_id = found.topics
            assert by_name == by_id
            assert by_name.topic_id == made.topic_id.bytes
            assert unknown.error.name == "UNKNOWN_TOPIC_OR_PARTITION"
            assert unknown_id.error.name == "UNKNOWN_TOPIC_ID"
            for row in by_name.partitions:
                assert row.leader == row.replicas[0]
                assert sorted(row.isr) == [11, 12]
                assert not row.offline_replicas
                assert not row.HasField("error")
        quorum.kill(NodeId(12))
        quorum.world.run_until(lambda: quorum.brokers[NodeId(11)].tail.image.brokers[12].fenced, timeout=10)
        found = ask(quorum, 11, "Metadata", pb.MetadataRequest(all_topics=True))
        assert [broker.id for broker in found.brokers] == [11]
        assert all(list(row.offline_replicas) == [12] for row in found.topics[0].partitions)
        assert all(row.leader == 11 and row.leader_epoch >= 0 for row in found.topics[0].partitions)


@pytest.mark.requirement("a:G-09")
def test_endpoints_are_those_of_the_listener_that_is_asked_for() -> None:
    endpoints = (("CLIENT", "PLAINTEXT", "inside", 1), ("OUTSIDE", "SSL", "outside.example", 2))
    with ApiCluster(2, brokers=()) as quorum:
        quorum.start_brokers(11, endpoints=endpoints)
        quorum.start_brokers(12)
        quorum.create("t", partitions=2, replication_factor=1)
        until_known(quorum, "t")
        found = ask(quorum, 12, "Metadata", pb.MetadataRequest(all_topics=True))
        assert [(b.id, b.host) for b in found.brokers] == [(11, "inside"), (12, "host-12")]
        found = ask(quorum, 12, "Metadata", pb.MetadataRequest(all_topics=True, listener="OUTSIDE"))
        assert [(b.id, b.host, b.port) for b in found.brokers] == [(11, "outside.example", 2)]
        errors = {row.leader: row.error.name for row in found.topics[0].partitions}
        assert errors == {11: "", 12: "LISTENER_NOT_FOUND"}
        refusal = refused(quorum, 12, "Metadata", pb.MetadataRequest(listener="NOWHERE"))
        assert refusal.code is ErrorCode.INVALID_REQUEST
        assert "OUTSIDE" in str(refusal)


@pytest.mark.requirement("b:O-07", "a:B-18")
def test_a_partition_that_nobody_leads_says_so() -> None:
    with ApiCluster(3, brokers=(11, 12)) as quorum:
        made = quorum.create("lost", partitions=2, replication_factor=1)
        until_known(quorum, "lost")
        quorum.kill(NodeId(12))
        quorum.world.run_until(lambda: quorum.brokers[NodeId(11)].tail.image.brokers[12].fenced, timeout=10)
        found = ask(quorum, 11, "Metadata", pb.MetadataRequest(topic_ids=[made.topic_id.bytes]))
        rows = {tuple(row.replicas): row for row in found.topics[0].partitions}
        assert rows[(12,)].leader == -1
        assert rows[(12,)].error.name == "LEADER_NOT_AVAILABLE"
        assert not rows[(11,)].HasField("error")
        asked = admin_pb2.DescribeTopicsRequest(topics=["lost"])
        (described,) = quorum.api(11, "Admin", "DescribeTopics", asked).topics
        states = {tuple(row.replicas): (row.state, row.leader, list(row.isr)) for row in described.partitions}
        assert states == {(11,): ("online", 11, [11]), (12,): ("offline", -1, [])}
        assert all(("elect-leaders" in row.advice) == (row.state == "offline") for row in described.partitions)


def test_the_cluster_is_described_with_every_endpoint_and_fenced_brokers() -> None:
    with ApiCluster(4, brokers=(11, 12)) as quorum:
        quorum.kill(NodeId(12))
        quorum.world.run_until(lambda: quorum.brokers[NodeId(11)].tail.image.brokers[12].fenced, timeout=10)
        found = ask(quorum, 11, "DescribeCluster", pb.DescribeClusterRequest())
        assert (found.cluster_id, found.node, found.controller) == ("cluster", 11, quorum.active())
        assert [(b.id, b.is_fenced, b.endpoints[0].host) for b in found.brokers] == [
            (11, False, "host-11"),
            (12, True, "host-12"),
        ]
        assert found.metadata_offset > 0
        assert found.version == __version__


# The quorum.


def test_the_active_controller_describes_the_quorum_through_any_node() -> None:
    with ApiCluster(5, brokers=(11,)) as quorum:
        active = quorum.active()
        for node in (active, standby(quorum), 11):
            found = ask(quorum, node, "DescribeQuorum", pb.DescribeQuorumRequest())
            assert (found.node, found.role, found.leader) == (active, "leader", active)
            assert [(m.node, m.is_voter, m.directory_id) for m in found.members] == [
                (member, True, bytes([member]) * 16) for member in CONTROLLERS
            ]
            assert all(member.lag >= 0 and not member.is_recovering for member in found.members)
            assert found.high_watermark > 0
        local = ask(quorum, standby(quorum), "DescribeQuorum", pb.DescribeQuorumRequest(local=True))
        assert (local.node, local.role) == (standby(quorum), "follower")
        assert all(member.lag == -1 for member in local.members)
        refusal = refused(quorum, 11, "DescribeQuorum", pb.DescribeQuorumRequest(local=True))
        assert refusal.code is ErrorCode.INVALID_REQUEST


def endpoint(address: str = "host:9192", listener: str = "CONTROLLER") -> pb.VoterEndpoint:
    return pb.VoterEndpoint(listener=listener, address=address)


def membership(quorum: ApiCluster) -> Membership:
    return quorum.controller(quorum.active()).driver.core.log.membership


def test_a_controller_is_added_through_a_broker_and_removed_through_a_standby() -> None:
    with ApiCluster(6, brokers=(11,)) as quorum:
        quorum.start(NodeId(4))
        directory = bytes([4]) * 16
        request = pb.AddVoterRequest(node=4, directory_id=directory, endpoints=[endpoint()])
        ask(quorum, 11, "AddVoter", request)
        assert [member.node for member in membership(quorum).voters] == [1, 2, 3, 4]
        assert refused(quorum, 11, "AddVoter", request).code is ErrorCode.DUPLICATE_VOTER
        removal = pb.RemoveVoterRequest(node=4, directory_id=bytes([9]) * 16)
        assert refused(quorum, 11, "RemoveVoter", removal).code is ErrorCode.INVALID_VOTER_KEY
        removal.directory_id = directory
        asked = next(node for node in (1, 2, 3) if node != quorum.active())
        ask(quorum, asked, "RemoveVoter", removal)
        assert [member.node for member in membership(quorum).voters] == [1, 2, 3]
        assert refused(quorum, asked, "RemoveVoter", removal).code is ErrorCode.VOTER_NOT_FOUND


NEW = bytes([4]) * 16


def adding(**fields: Any) -> pb.AddVoterRequest:
    return pb.AddVoterRequest(**{"node": 4, "directory_id": NEW, "endpoints": [endpoint()], **fields})


def test_a_voter_that_does_not_answer_is_refused_before_anything_is_proposed() -> None:
    with ApiCluster(12, brokers=()) as quorum:
        before = membership(quorum)
        refusal = refused(quorum, standby(quorum), "AddVoter", adding())
        assert refusal.code is ErrorCode.INVALID_REQUEST
        assert "node 4 at host:9192" in str(refusal)
        assert "nothing was changed. Start the node first, or correct --endpoint" in str(refusal)
        assert membership(quorum) is before


def test_a_voter_with_another_directory_than_was_said_is_refused() -> None:
    with ApiCluster(13, brokers=()) as quorum:
        quorum.start(NodeId(4))
        before = membership(quorum)
        refusal = refused(quorum, quorum.active(), "AddVoter", adding(directory_id=bytes([5]) * 16))
        has, said = directory_text(NEW), directory_text(bytes([5]) * 16)
        assert f"node 4 at host:9192 has the directory id {has}, not {said}: nothing was changed" in str(refusal)
        assert membership(quorum) is before


def test_an_endpoint_of_a_voter_where_nobody_answers_is_refused() -> None:
    with ApiCluster(14, brokers=()) as quorum:
        target = standby(quorum)
        asked = next(node for node in CONTROLLERS if node not in (target, quorum.active()))
        before = membership(quorum)
        quorum.kill(target)
        request = pb.UpdateVoterRequest(node=target, endpoints=[endpoint("typo:9192")])
        assert "nothing was changed" in str(refused(quorum, asked, "UpdateVoter", request))
        assert membership(quorum) is before


@pytest.mark.parametrize("ends", ["while it is added", "before it is added again"])
def test_a_voter_that_does_not_catch_up_is_removed_again_and_further_changes_are_possible(ends: str) -> None:
    with ApiCluster(15, brokers=()) as quorum:
        quorum.start(NodeId(4))
        active = quorum.active()
        before = membership(quorum)
        answers: list[BaseException] = []

        async def add(controller: ControllerNode) -> None:
            try:
                await controller.voters.add(Member(NodeId(4), NEW, (("CONTROLLER", "host:9192"),)), timeout_ms=3_000)
            except TidelogError as error:
                answers.append(error)

        process, controller = quorum.controllers[active]
        task = process.spawn(add(controller))
        quorum.world.run_until(lambda: membership(quorum).learner(NodeId(4)) is not None, timeout=10)
        quorum.kill(NodeId(4))  # it has answered the probe, and is gone
        if ends == "while it is added":
            task.cancel()  # the caller is gone, and the change ends by its own deadline
        quorum.world.run_until(lambda: membership(quorum) == before, timeout=10)
        if ends != "while it is added":
            quorum.world.run_until(task.done, timeout=10)
            assert "node 4 did not catch up in 3 s: it was removed again, and the voters are as before" in str(answers)
        quorum.start(NodeId(4))
        ask(quorum, active, "AddVoter", adding())
        assert [member.node for member in membership(quorum).voters] == [1, 2, 3, 4]


def test_a_voter_that_is_gone_is_removed_while_a_majority_of_the_others_is_there() -> None:
    with ApiCluster(16, brokers=()) as quorum:
        quorum.start(NodeId(4))
        ask(quorum, quorum.active(), "AddVoter", adding())
        quorum.kill(NodeId(4))
        quorum.world.run_until(lambda: bool(quorum.active()), timeout=20)
        ask(quorum, quorum.active(), "RemoveVoter", pb.RemoveVoterRequest(node=4))
        assert [member.node for member in membership(quorum).voters] == [1, 2, 3]


@pytest.mark.case("R18")
@pytest.mark.parametrize("role", ["active", "standby", "broker"])
def test_the_endpoints_of_a_voter_are_corrected_in_the_log(role: str) -> None:
    with ApiCluster(7, brokers=(11,)) as quorum:
        node = {"active": quorum.active(), "standby": standby(quorum), "broker": 11}[role]
        target = standby(quorum)
        request = pb.UpdateVoterRequest(node=target, endpoints=[endpoint("new.example:9192"), endpoint("b:1", "B")])
        ask(quorum, node, "UpdateVoter", request)
        found = membership(quorum).voter(target)
        assert found is not None
        assert found.endpoints == (("CONTROLLER", "new.example:9192"), ("B", "b:1"))
        assert found.directory == bytes([target]) * 16
        assert len(membership(quorum).voters) == 3
        at = quorum.controller(quorum.active()).driver.core.log.membership_offset
        ask(quorum, node, "UpdateVoter", request)  # again: nothing to do
        assert quorum.controller(quorum.active()).driver.core.log.membership_offset == at
        described = ask(quorum, 11, "DescribeQuorum", pb.DescribeQuorumRequest())
        (row,) = [member for member in described.members if member.node == target]
        assert [(e.listener, e.address) for e in row.endpoints] == [("CONTROLLER", "new.example:9192"), ("B", "b:1")]
        # The next leader has it, too.
        quorum.kill(quorum.active())
        quorum.active()
        assert membership(quorum).voter(target) == found


BAD_VOTERS: list[tuple[dict[str, Any], ErrorCode]] = [
    ({"node": 9, "endpoints": [endpoint()]}, ErrorCode.VOTER_NOT_FOUND),
    ({"node": 1, "directory_id": bytes([8]) * 16, "endpoints": [endpoint()]}, ErrorCode.INVALID_VOTER_KEY),
    ({"node": -1, "endpoints": [endpoint()]}, ErrorCode.INVALID_REQUEST),
    ({"node": 1, "directory_id": b"short", "endpoints": [endpoint()]}, ErrorCode.INVALID_REQUEST),
    ({"node": 1, "directory_id": bytes(16), "endpoints": [endpoint()]}, ErrorCode.INVALID_REQUEST),
    ({"node": 1}, ErrorCode.INVALID_REQUEST),
    ({"node": 1, "endpoints": [endpoint("no-port")]}, ErrorCode.INVALID_REQUEST),
    ({"node": 1, "endpoints": [endpoint("host:0")]}, ErrorCode.INVALID_REQUEST),
    ({"node": 1, "endpoints": [endpoint("host:70000")]}, ErrorCode.INVALID_REQUEST),
    ({"node": 1, "endpoints": [endpoint("a b:1")]}, ErrorCode.INVALID_REQUEST),
    ({"node": 1, "endpoints": [endpoint("http://host:1")]}, ErrorCode.INVALID_REQUEST),
    ({"node": 1, "endpoints": [endpoint(listener="")]}, ErrorCode.INVALID_REQUEST),
    ({"node": 1, "endpoints": [endpoint(listener="a\nb")]}, ErrorCode.INVALID_REQUEST),
    ({"node": 1, "endpoints": [endpoint(), endpoint("other:1")]}, ErrorCode.INVALID_REQUEST),
    ({"node": 1, "endpoints": [endpoint(listener=f"L{n}") for n in range(17)]}, ErrorCode.INVALID_REQUEST),
]


def test_a_voter_that_cannot_be_is_refused_and_the_quorum_stays_as_it_is() -> None:
    with ApiCluster(8, brokers=()) as quorum:
        quorum.active()
        before = membership(quorum)
        for fields, code in BAD_VOTERS:
            refusal = refused(quorum, 1, "UpdateVoter", pb.UpdateVoterRequest(**fields))
            assert refusal.code is code, fields
        lacking = pb.AddVoterRequest(node=7, endpoints=[endpoint()])
        assert refused(quorum, 1, "AddVoter", lacking).code is ErrorCode.INVALID_REQUEST
        assert membership(quorum) == before
        ipv6 = pb.UpdateVoterRequest(node=1, endpoints=[endpoint("[::1]:9192")])
        ask(quorum, 1, "UpdateVoter", ipv6)


def test_the_only_voter_is_not_removed() -> None:
    with ApiCluster(9, founders=(NodeId(1),)) as quorum:
        quorum.start(NodeId(1))
        quorum.active()
        assert refused(quorum, 1, "RemoveVoter", pb.RemoveVoterRequest(node=1)).code is ErrorCode.INVALID_REQUEST
        assert len(membership(quorum).voters) == 1


def test_a_voter_that_stays_behind_is_not_called_good() -> None:
    with ApiCluster(17, brokers=()) as quorum:
        behind = standby(quorum)
        quorum.kill(behind)
        quorum.start_brokers(11)
        quorum.world.run_for(8)
        found = ask(quorum, quorum.active(), "DescribeQuorum", pb.DescribeQuorumRequest())
        document = describe_document(quorum_description(found))
        states = {member["node"]: member["state"] for member in document["members"]}
        stuck_ms = {member.node: member.stuck_ms for member in found.members}
        assert stuck_ms.pop(behind) > 5_000
        assert states.pop(behind) != "good"
        assert set(states.values()) == {"good"}
        assert max(stuck_ms.values()) < 1_000


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, "good"),
        ({"lag": 3, "stuck_ms": 20_000}, "behind by 3 entries for 20 s: see its log"),
        ({"silent_ms": 9_000}, "silent for 9 s"),
        ({"is_recovering": True}, "recovers"),
        ({"error": "refused"}, "refused"),
        ({"lag": -1}, "connected"),
    ],
)
def test_the_state_of_a_member_is_said_in_words(fields: dict[str, Any], state: str) -> None:
    response = pb.DescribeQuorumResponse(members=[pb.QuorumMember(node=1, directory_id=NEW, **fields)])
    (member,) = describe_document(quorum_description(response))["members"]
    assert member["state"] == state
    assert member["log_end_offset"] == (-1 if "error" in fields else 0), "a dead voter's log is not known"


# Without a quorum.


def lose_quorum(quorum: ApiCluster) -> NodeId:
    """Only one controller is left, and it knows that it hears nobody; the one that is left."""
    left = standby(quorum)
    quorum.world.run_until(lambda: "orders" in quorum.controller(left).image.topic_ids, timeout=20)
    for node in [node for node in quorum.controllers if node != left]:
        quorum.kill(node)
    driver = quorum.controller(left).driver
    quorum.world.run_until(lambda: driver.core.leader is None, timeout=20)
    quorum.world.run_for(6)
    return left


@pytest.mark.parametrize("role", ["controller", "broker"])
def test_a_node_without_a_quorum_answers_reads_with_what_it_knows_and_says_how_old_it_is(role: str) -> None:
    with ApiCluster(20, brokers=(11,)) as quorum:
        quorum.create("orders", replication_factor=1)
        until_known(quorum, "orders")
        left = lose_quorum(quorum)
        asked = int(left) if role == "controller" else 11
        questions: list[tuple[str, str, Any]] = [
            ("Cluster", "DescribeQuorum", pb.DescribeQuorumRequest(allow_stale=True)),
            ("Cluster", "Metadata", pb.MetadataRequest(topics=["orders"])),
            ("Cluster", "DescribeCluster", pb.DescribeClusterRequest()),
            ("Admin", "DescribeBrokers", admin_pb2.DescribeBrokersRequest(allow_stale=True)),
            ("Admin", "DescribeTopics", admin_pb2.DescribeTopicsRequest(all_topics=True, allow_stale=True)),
            ("Admin", "ListReassignments", admin_pb2.ListReassignmentsRequest(allow_stale=True)),
            ("Admin", "DescribeFeatures", admin_pb2.DescribeFeaturesRequest(allow_stale=True)),
        ]
        for service, name, request in questions:
            answer = quorum.api(asked, service, name, request, timeout_s=1.0)
            assert answer.HasField("stale_ms"), name
            assert answer.stale_ms > 1_000, name
        described = quorum.api(asked, "Admin", "DescribeTopics", questions[4][2], timeout_s=1.0)
        assert [topic.name for topic in described.topics] == ["orders"]
        members = quorum.api(asked, "Cluster", "DescribeQuorum", questions[0][2], timeout_s=1.0).members
        assert [member.node for member in members] == [1, 2, 3]
        request = admin_pb2.DescribeBrokersRequest(timeout_ms=1_000)
        with pytest.raises(RemoteError, match="no active controller answered"):
            quorum.api(asked, "Admin", "DescribeBrokers", request, timeout_s=5.0)


def test_the_metadata_log_is_shown_by_a_node_without_a_quorum() -> None:
    with ApiCluster(21, brokers=(11,)) as quorum:
        quorum.create("orders", replication_factor=1)
        until_known(quorum, "orders")
        left = lose_quorum(quorum)
        request = pb.MetadataRecordsRequest(allow_stale=True)
        for asked in (int(left), 11):
            if asked == 11:
                quorum.kill(left)
            first, *parts = quorum.api_stream(asked, "Cluster", "MetadataRecords", request, timeout_s=2.0)
            assert first.stale_ms > 1_000
            assert "orders" in replayed(parts)[0].topic_ids


def test_a_node_with_a_quorum_does_not_call_its_answers_old() -> None:
    with ApiCluster(22, brokers=(11,)) as quorum:
        for asked in (quorum.active(), standby(quorum), 11):
            request = admin_pb2.DescribeBrokersRequest(allow_stale=True)
            assert not quorum.api(asked, "Admin", "DescribeBrokers", request).HasField("stale_ms")
            described = ask(quorum, asked, "DescribeQuorum", pb.DescribeQuorumRequest(allow_stale=True))
            assert (described.HasField("stale_ms"), described.role) == (False, "leader")
            assert not ask(quorum, asked, "Metadata", pb.MetadataRequest()).HasField("stale_ms")


# The metadata log.


def replayed(parts: list[pb.MetadataRecordsResponse]) -> tuple[ClusterImage, int, int]:
    """The image that they make, the offset that it is at, and how many snapshots there were."""
    replay, offset, snapshots, data = Replay(ClusterImage()), 0, 0, b""
    for part in parts:
        if part.HasField("snapshot"):
            data += part.snapshot.data
            if part.snapshot.is_last:
                found, data = decode_snapshot(data), b""
                replay, offset, snapshots = Replay(found.image, found.pending), part.snapshot.end_offset, snapshots + 1
        for entry in part.entries.entries:
            assert entry.offset == offset, "no gap"
            offset += 1
            if entry.kind == pb.MetadataEntry.RECORDS:
                replay.apply(decode_records(entry.data))
    return replay.image, offset, snapshots


@pytest.mark.parametrize("role", ["active", "standby", "broker"])
def test_the_committed_metadata_log_is_read_from_its_beginning(role: str) -> None:
    with ApiCluster(10, brokers=(11,)) as quorum:
        quorum.create("t", partitions=3, replication_factor=1)
        node = {"active": quorum.active(), "standby": standby(quorum), "broker": 11}[role]
        quorum.world.run_until(lambda: all("t" in c.image.topic_ids for _, c in quorum.controllers.values()), timeout=9)
        parts = quorum.api_stream(node, "Cluster", "MetadataRecords", pb.MetadataRecordsRequest())
        image, offset, snapshots = replayed(parts)
        assert snapshots == 0
        assert offset > 3
        assert "t" in image.topic_ids
        assert image == quorum.replayed(quorum.active())
        kinds = {entry.kind for part in parts for entry in part.entries.entries}
        assert pb.MetadataEntry.NO_OP in kinds
        rest = quorum.api_stream(node, "Cluster", "MetadataRecords", pb.MetadataRecordsRequest(from_offset=offset - 1))
        assert rest[0].entries.entries[0].offset == offset - 1


@pytest.mark.parametrize("role", ["active", "broker"])
def test_entries_that_are_gone_come_as_a_snapshot_and_the_rest_follows_as_it_commits(role: str) -> None:
    config = ControllerConfig(driver=DriverConfig(raft=RaftConfig(kept_behind_snapshot_bytes=0), snapshot_bytes=2_000))
    with ApiCluster(11, config=config, brokers=(11,)) as quorum:
        for number in range(30):
            quorum.create(f"t{number}", partitions=1, replication_factor=1)
        log = quorum.controller(quorum.active()).driver.core.log
        quorum.world.run_until(lambda: log.start > 0, timeout=20)
        node = quorum.active() if role == "active" else 11
        request = pb.MetadataRecordsRequest(follow=True)
        parts = quorum.api_stream(node, "Cluster", "MetadataRecords", request, count=3)
        image, offset, snapshots = replayed(parts)
        assert snapshots == 1
        assert len(image.topic_ids) == 30
        assert offset > parts[0].snapshot.end_offset


def test_an_offset_that_is_not_there_is_refused() -> None:
    with ApiCluster(12, brokers=()) as quorum:
        quorum.active()
        quorum.world.run_until(lambda: quorum.controller(NodeId(1)).driver.core.commit > 0, timeout=20)
        for offset, code in ((-1, ErrorCode.INVALID_REQUEST), (10**9, ErrorCode.OFFSET_OUT_OF_RANGE)):
            with pytest.raises(RemoteError) as refusal:
                quorum.api_stream(1, "Cluster", "MetadataRecords", pb.MetadataRecordsRequest(from_offset=offset))
            assert refusal.value.code is code
        end = refusal.value.facts["end"]
        assert isinstance(end, int)
        assert end > 0


def test_a_reader_that_leaves_is_forgotten() -> None:
    with ApiCluster(13, brokers=()) as quorum:
        active = quorum.active()
        request = pb.MetadataRecordsRequest(follow=True)
        quorum.api_stream(active, "Cluster", "MetadataRecords", request, count=1)

        async def observers(controller: ControllerNode) -> list[NodeId]:
            return [node for node, _ in controller.driver.describe().observers]

        until_s = quorum.now_s() + 5
        while active in quorum.on(active, observers):
            assert quorum.now_s() < until_s, "it does not learn that the reader is gone"
            quorum.world.run_for(0.1)


def test_the_log_service_of_a_controller_says_where_brokers_are() -> None:
    with ApiCluster(14, brokers=(11,)) as quorum:
        with pytest.raises(RemoteError, match="host-11:9092") as refusal:
            quorum.api(quorum.active(), "Log", "Fetch", log_pb2.FetchRequest())
        assert refusal.value.code is ErrorCode.UNSUPPORTED_VERSION
