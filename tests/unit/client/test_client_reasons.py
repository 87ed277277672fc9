"""Errors of clients name the reason: the last error, the coordinator, a missing active controller."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, cast

import pytest
from support.async_tests import virtual_time_test
from support.clients.cluster import batch_of
from support.clients.scripted import ScriptedConnections, stale_metadata

from tidelog.client.admin.core import AdminCore
from tidelog.client.cluster import ClusterClient
from tidelog.client.config import ClientConfig
from tidelog.client.errors import DeliveryTimeoutError, QueryTimeoutError
from tidelog.client.producer.writer import Writer, WriterConfig
from tidelog.model.errors import CallTimeoutError, ErrorCode, OverloadedError, RemoteError, UnreachableError
from tidelog.rpc.v1 import admin_pb2, cluster_pb2, groups_pb2

NO_CONTROLLER = "no active controller answered in 269 ms: node 2 at b:2: Connection refused"


def cluster_of(connections: ScriptedConnections) -> ClusterClient:
    config = ClientConfig(retry_backoff_ms=5, retry_backoff_max_ms=10)
    return ClusterClient(("a:1", "b:2"), cast(Any, connections), random=Random(1), clock=cast(Any, None), config=config)


@virtual_time_test
async def test_query_without_a_controller_raises_the_error_of_the_node_and_the_whole_time() -> None:
    def reject(_address: str, request: Any, timeout_ms: int) -> Any:
        assert request.timeout_ms <= timeout_ms, "the node gives up before the client does"
        if len(connections.timeouts_ms) > 2:
            raise CallTimeoutError("a:1, DeleteTopics: no answer in time")
        raise RemoteError(NO_CONTROLLER, code=ErrorCode.REQUEST_TIMED_OUT)

    connections = ScriptedConnections(DeleteTopics=reject)

    admin = AdminCore(cluster_of(connections))
    with pytest.raises(QueryTimeoutError, match=r"gave up after 0\.\d s; the last answer: no active controller"):
        await admin.delete_topics(["t"], validate_only=True, timeout=0.5)
    await admin.close()


@virtual_time_test
async def test_query_that_times_out_names_the_last_error_and_the_missing_controller() -> None:
    cluster = cluster_of(ScriptedConnections(Metadata=stale_metadata))
    admin = AdminCore(cluster)
    await cluster.refresh()
    cluster.connections.answers.clear()  # type: ignore[attr-defined]
    with pytest.raises(QueryTimeoutError) as error:
        await admin.list_topics(timeout=0.2)
    assert str(error.value) == (
        "list_topics: not done in 0.2 s: b:2: Connection refused; a:1 has no contact with an active controller"
    )
    await admin.close()


@virtual_time_test
async def test_unreachable_coordinator_is_named_with_its_group() -> None:
    def find(_address: str, _request: Any, _timeout_ms: int) -> Any:
        row = groups_pb2.Coordinator(group="g1", broker=2, host="b", port=2)
        return groups_pb2.FindCoordinatorResponse(coordinators=[row])

    admin = AdminCore(cluster_of(ScriptedConnections(FindCoordinator=find)))
    with pytest.raises(UnreachableError) as error:
        await admin.describe_group("g1", timeout=3.0)
    expected = "broker 2, the coordinator of group 'g1', is unreachable: b:2: Connection refused"
    assert str(error.value) == expected
    assert error.value.node == 2
    await admin.close()


@virtual_time_test
async def test_record_that_is_not_stored_without_a_controller_says_so() -> None:
    cluster = cluster_of(ScriptedConnections(Metadata=stale_metadata))
    writer = Writer(cluster, WriterConfig(delivery_timeout_ms=1500))
    result = await writer.send("t", 0, batch_of(b"x"))
    with pytest.raises(DeliveryTimeoutError, match=r"; a:1 has no contact with an active controller$"):
        await result
    await writer.close()
    await cluster.close()


@virtual_time_test
async def test_change_that_times_out_names_the_missing_controller_of_an_earlier_answer() -> None:
    async def never(_request: Any) -> None:
        await asyncio.sleep(3_600)

    def describe(_address: str, _request: Any, _timeout_ms: int) -> Any:
        return cluster_pb2.DescribeClusterResponse(cluster_id="c", stale_ms=7_000)

    answers = {"DescribeCluster": describe, "RemoveVoter": lambda _address, request, _timeout_ms: never(request)}
    admin = AdminCore(cluster_of(ScriptedConnections(**answers)))
    await admin.describe_cluster()
    with pytest.raises(CallTimeoutError, match=r"not done in 0\.2 s; a:1 has no contact with an active controller;"):
        await admin.remove_voter(3, timeout=0.2)
    await admin.close()


@pytest.mark.parametrize("is_change", [False, True])
@virtual_time_test
async def test_a_call_that_grpc_itself_refuses_as_one_too_many_is_made_again(is_change: bool) -> None:
    def refuse_twice(_address: str, _request: Any, _timeout_ms: int) -> Any:
        if len(connections.timeouts_ms) <= 2:
            raise OverloadedError("a:1, CreateTopics: Concurrent RPC limit exceeded!")
        response = admin_pb2.CreateTopicsResponse()
        response.topics.add(name="t", topic_id=bytes(16), partitions=1, replication_factor=1)
        return response

    connections = ScriptedConnections(CreateTopics=refuse_twice)
    admin = AdminCore(cluster_of(connections))
    await admin.create_topics(["t"], validate_only=not is_change, timeout=5)
    assert len(connections.timeouts_ms) == 3, "nothing was done: even a change is sent again"
    await admin.close()
