"""A forwarded request acts for its client on the node that carries it out, and only nodes can forward one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.brokers.cluster import ReplicationCluster, RunningBroker

from tidelog.metadata.brokers import Drain
from tidelog.metadata.controller_client import ControllerClient, ControllerClientConfig
from tidelog.metadata.requests import encode_request
from tidelog.metadata.topics import AdvanceLogStart, CreateTopics, DeleteTopics, NewTopic
from tidelog.model.errors import CallTimeoutError, ErrorCode, InvalidRequestError, RemoteError, TidelogError
from tidelog.model.ids import NodeId
from tidelog.model.principals import Principal
from tidelog.services.authorization import Operation, Resource, ResourceType
from tidelog.services.context import THROTTLE_MS_MAX, Api, RequestContext
from tidelog.services.forwarding import METADATA, Forwarder, decode_forwarded, encode_forwarded
from tidelog.services.guard import Guard
from tidelog.services.log_dirs import DescribeLogDirs
from tidelog.services.metadata_records import MetadataRecords
from tidelog.services.quorum import RemoveVoter
from tidelog.services.quotas import Charge
from tidelog.services.services import Services

ALICE = Principal("User", "alice")
NODE = "Node"


def of_alice(**more: Any) -> RequestContext:
    return RequestContext(Api.KAFKA, ALICE, "SASL", "app-7", "10.1.2.3", "10.1.2.3:4000", **more)


def identity(context: RequestContext) -> tuple[Any, ...]:
    return context.api, context.principal, context.listener, context.client_id, context.client_host


class Hooks:
    """Of every node of the cluster: contexts that other nodes have sent, and what the hooks answer."""

    def __init__(self) -> None:
        self.received: list[tuple[Operation, RequestContext]] = []
        self.charged: list[RequestContext] = []
        self.decided_for: list[tuple[RequestContext, object, object]] = []
        self.denied: set[tuple[str, Operation]] = set()
        """(kind or name of the principal, operation), on the receiving node."""
        self.delay_ms = 0

    def authorize(self, context: RequestContext, operation: Operation, _resource: Resource) -> bool:
        if not context.peer.startswith("node"):
            return True
        self.received.append((operation, context))
        names = {context.principal.kind, context.principal.name}
        return not any((name, operation) in self.denied for name in names)

    def authorize_any(self, context: RequestContext, operation: Operation, kind: ResourceType) -> bool:
        return self.authorize(context, operation, Resource(kind, ""))

    def charge(self, context: RequestContext, _charge: Charge, _amount: int) -> int:
        if not context.peer.startswith("node"):
            return 0
        self.charged.append(context)
        return self.delay_ms

    def decided(self, context: RequestContext, request: object, reply: object) -> None:
        self.decided_for.append((context, request, reply))

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]


HOOKS = Hooks()


@pytest.fixture(scope="module")
def nodes() -> Iterator[ReplicationCluster]:
    with ReplicationCluster(5) as made:
        made.service_options = replace(made.service_options, guard=Guard(HOOKS, HOOKS, HOOKS))
        made.start()
        made.start_brokers(11, 12)
        yield made


@pytest.fixture
def cluster(nodes: ReplicationCluster) -> ReplicationCluster:
    HOOKS.reset()
    return nodes


def call(cluster: ReplicationCluster, job: Any, node: int = 11) -> Any:
    async def run(broker: RunningBroker) -> Any:
        return await job(broker.broker.api)

    return cluster.on_broker(node, run)


async def _ignore(_part: object) -> None:
    return None


CALLS = {
    "metadata log": lambda s, c: s.metadata_records.read(c, MetadataRecords(), _ignore),
    "quorum": lambda s, c: s.quorum.describe(c),
    "log directories of another broker": lambda s, c: s.log_dirs.describe(c, [12], DescribeLogDirs()),
}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_the_receiving_node_authorizes_the_sender_and_then_the_client(cluster: ReplicationCluster, name: str) -> None:
    context = of_alice()
    call(cluster, lambda services: CALLS[name](services, context))
    (first, sender), (second, received) = HOOKS.received[-2:]
    assert (first, second) == (Operation.CLUSTER_ACTION, Operation.DESCRIBE)
    assert (sender.api, sender.principal) == (Api.INTERNAL, Principal(NODE, "11"))
    assert identity(received) == identity(context)
    assert received.peer == "node 11"
    assert [identity(charged) for charged in HOOKS.charged] == [identity(context)]


@pytest.mark.parametrize("name", sorted(CALLS))
@pytest.mark.parametrize("denied", [(NODE, Operation.CLUSTER_ACTION), ("alice", Operation.DESCRIBE)])
def test_the_receiving_node_rejects_a_sender_and_a_client_that_are_not_allowed(
    cluster: ReplicationCluster, name: str, denied: tuple[str, Operation]
) -> None:
    HOOKS.denied = {denied}
    try:
        reply = call(cluster, lambda services: CALLS[name](services, of_alice()))
        code = reply[0].error
    except TidelogError as error:
        code = error.code
    assert code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED


def test_the_controller_knows_for_whom_it_decides(cluster: ReplicationCluster) -> None:
    context = of_alice()
    create = CreateTopics(topics=(NewTopic(name="audited", partitions=1, replication_factor=1),))

    async def job(services: Services) -> None:
        await services.topics.create(context, create)
        await services.topics.delete(context, DeleteTopics(names=("audited", "none")))

    call(cluster, job)
    assert [identity(decided) for decided, _, _ in HOOKS.decided_for] == [identity(context)] * 2
    assert [request for _, request, _ in HOOKS.decided_for] == [create, DeleteTopics(names=("audited", "none"))]
    replies = [reply for _, _, reply in HOOKS.decided_for]
    assert [row.error for row in replies[1].items] == [None, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]  # type: ignore[attr-defined]


@pytest.mark.parametrize("rejection", [None, InvalidRequestError("no")])
def test_a_decision_is_audited_when_its_caller_has_gone(rejection: TidelogError | None) -> None:
    """The caller's time is up, or its client has disconnected, before the decision is committed."""
    decided: list[tuple[object, object]] = []
    change = Drain(broker=1)

    class Auditor:
        def decided(self, _context: RequestContext, request: object, reply: object) -> None:
            decided.append((request, reply))

    class Controller:
        is_active = True

        async def submit(self, _request: object) -> object:
            await committed.wait()
            if rejection is not None:
                raise rejection
            return "drained"

    async def run() -> None:
        cache, transport = SimpleNamespace(controller=Controller()), SimpleNamespace(serve=lambda *_: None, me=1)
        client = ControllerClient(cast(Any, transport), lambda: [NodeId(1)], ControllerClientConfig(), Random(1))
        forwarder = Forwarder(cast(Any, cache), client, cast(Any, transport), Guard(auditor=Auditor()))
        with pytest.raises(CallTimeoutError):
            await forwarder.ask(of_alice(), change, timeout_ms=20)
        caller = asyncio.create_task(forwarder.ask(of_alice(), change, timeout_ms=20_000))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.wait([caller])
        assert decided == []
        committed.set()
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})

    committed = asyncio.Event()
    asyncio.run(run())
    assert decided == [(change, rejection or "drained")] * 2


def test_the_deadline_travels_and_the_delay_of_the_other_node_comes_back(cluster: ReplicationCluster) -> None:
    HOOKS.delay_ms = 70

    async def job(services: Services) -> int:
        context = of_alice(deadline_s=asyncio.get_running_loop().time() + 3)
        await services.log_dirs.describe(context, [12], DescribeLogDirs())
        return context.throttle_ms

    async def left_s(_: RunningBroker) -> float:
        (received,) = HOOKS.charged
        assert received.deadline_s is not None
        return received.deadline_s - asyncio.get_running_loop().time()

    assert call(cluster, job) == 70
    assert 2 < cluster.on_broker(12, left_s) < 3, "each node has a clock of its own"


def test_a_voter_change_carries_its_client(cluster: ReplicationCluster) -> None:
    HOOKS.denied = {("alice", Operation.ALTER)}
    with pytest.raises(RemoteError, match="User:alice may not Alter Cluster"):
        call(cluster, lambda services: services.quorum.remove_voter(of_alice(), RemoveVoter(node=3)))


# What other bytes do.


def forwarded(cluster: ReplicationCluster, data: bytes) -> RemoteError:
    """What the active controller says to bytes from a node."""

    active = cluster.active()

    async def ask(_: Any) -> bytes:
        return await cluster.admin_transport.call(active, METADATA, data, timeout_ms=5_000)

    with pytest.raises(RemoteError) as raised:
        cluster.world.run(cluster.admin, ask)
    return raised.value


@pytest.mark.parametrize("data", [b"", b"\0\0\0\x09short", b"\0\0\0\x01\xc1", b"\0\0\0\x01\x80"])
def test_a_request_without_a_readable_context_is_rejected(cluster: ReplicationCluster, data: bytes) -> None:
    assert forwarded(cluster, data).code is ErrorCode.INVALID_REQUEST
    assert HOOKS.charged == []


def test_only_requests_of_clients_are_forwarded(cluster: ReplicationCluster) -> None:
    request = AdvanceLogStart(broker=11, broker_epoch=1, partitions=())
    error = forwarded(cluster, encode_forwarded(of_alice(), encode_request(request), timeout_ms=1_000))
    assert error.code is ErrorCode.INVALID_REQUEST
    assert "AdvanceLogStart is not a request of clients" in str(error)
    assert HOOKS.decided_for == []


def test_an_unknown_api_is_rejected() -> None:
    data = encode_forwarded(of_alice(), b"", timeout_ms=0)
    context, body = decode_forwarded(NodeId(4), data)
    assert (identity(context), context.deadline_s, body) == (identity(of_alice()), None, b"")
    with pytest.raises(InvalidRequestError, match="knows no API 'kafkb'"):
        decode_forwarded(NodeId(4), data.replace(b"kafka", b"kafkb"))


def test_one_request_delays_its_client_for_a_limited_time() -> None:
    context = of_alice()
    context.throttle(10)
    context.throttle(5)
    assert context.throttle_ms == 10
    context.throttle(10**9)
    assert context.throttle_ms == THROTTLE_MS_MAX
