"""The controllers' quorum through the public gRPC API, with real connections: a voter that has moved is found again
(R18), and forwarding works between real nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.grpc_api.nodes import GrpcCluster, Node, until

from tidelog.metadata.records import decode_records
from tidelog.model.ids import NodeId
from tidelog.rpc.v1 import admin_pb2, cluster_pb2

pytestmark = pytest.mark.interop


def run(path: Path, job: Callable[[GrpcCluster], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(90), GrpcCluster(path) as cluster:
            await cluster.start_controllers(1, 2, 3)
            await cluster.active()
            await job(cluster)

    asyncio.run(main())


def endpoint(node: Node) -> cluster_pb2.VoterEndpoint:
    return cluster_pb2.VoterEndpoint(listener="CONTROLLER", address=node.address)


async def create(cluster: GrpcCluster, node: int, name: str) -> None:
    topic = admin_pb2.NewTopic(name=name, partitions=1, replication_factor=1)
    answer = await cluster.call(node, "Admin", "CreateTopics", admin_pb2.CreateTopicsRequest(topics=[topic]))
    assert not answer.topics[0].HasField("error"), answer.topics[0].error.message


def end(node: Node) -> int:
    assert node.controller is not None
    return node.controller.driver.core.log.end


@pytest.mark.case("R18")
def test_a_voter_at_a_new_address_is_found_again_once_the_log_says_where(tmp_path: Path) -> None:
    async def job(cluster: GrpcCluster) -> None:
        active = await cluster.active()
        moved = next(number for number in cluster.nodes if number != active.node)
        await cluster.stop(moved)
        await cluster.start_broker(11)
        await create(cluster, 11, "while-away")
        node = await cluster.restart_controller(moved)
        assert end(node) < end(active)

        async def row() -> Any:
            answer = await cluster.call(11, "Cluster", "DescribeQuorum", cluster_pb2.DescribeQuorumRequest())
            return next(member for member in answer.members if member.node == moved)

        before = await row()
        assert not before.is_connected
        assert before.endpoints[0].address != node.address

        request = cluster_pb2.UpdateVoterRequest(node=moved, endpoints=[endpoint(node)])
        await cluster.call(11, "Cluster", "UpdateVoter", request)
        controller = node.controller
        assert controller is not None
        await until(lambda: "while-away" in controller.image.topic_ids)
        after = await row()
        assert after.is_connected
        assert after.endpoints[0].address == node.address
        # It counts: with it and one other the quorum lives without the third.
        third = next(number for number in (1, 2, 3) if number not in (active.node, moved))
        await cluster.stop(third)
        await create(cluster, 11, "with-the-moved-one")
        voter = controller.driver.core.log.membership.voter(NodeId(moved))
        assert voter is not None
        assert voter.endpoints == (("CONTROLLER", node.address),)

    run(tmp_path, job)


def test_a_controller_is_added_to_and_taken_out_of_a_running_quorum(tmp_path: Path) -> None:
    async def job(cluster: GrpcCluster) -> None:
        node = await cluster.start_new_controller(4)
        request = cluster_pb2.AddVoterRequest(node=4, directory_id=bytes([4]) * 16, endpoints=[endpoint(node)])
        active = await cluster.active()
        standby = next(number for number in (1, 2, 3) if number != active.node)
        await cluster.call(standby, "Cluster", "AddVoter", request)
        answer = await cluster.call(standby, "Cluster", "DescribeQuorum", cluster_pb2.DescribeQuorumRequest())
        assert [member.node for member in answer.members if member.is_voter] == [1, 2, 3, 4]
        await cluster.call(standby, "Cluster", "RemoveVoter", cluster_pb2.RemoveVoterRequest(node=4))
        answer = await cluster.call(standby, "Cluster", "DescribeQuorum", cluster_pb2.DescribeQuorumRequest())
        assert [member.node for member in answer.members if member.is_voter] == [1, 2, 3]

    run(tmp_path, job)


def test_the_metadata_log_is_followed_through_a_broker(tmp_path: Path) -> None:
    async def job(cluster: GrpcCluster) -> None:
        await cluster.start_broker(11)
        stream = cluster.stream(11, "Cluster", "MetadataRecords", cluster_pb2.MetadataRecordsRequest(follow=True))
        seen: set[str] = set()
        made = False
        while not {"RegisterBroker", "CreateTopic"} <= seen:
            part = await stream.read()
            for entry in part.entries.entries:
                if entry.kind == cluster_pb2.MetadataEntry.RECORDS:
                    seen |= {type(record).__name__ for record in decode_records(entry.data)}
            if not made:
                made = True
                await create(cluster, 11, "followed")
        stream.cancel()

    run(tmp_path, job)
