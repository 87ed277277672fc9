"""Offsets in transactions, on brokers: who is asked when, what a new coordinator knows, and what readers get."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from support.brokers.cluster import NodeId, RunningBroker
from support.groups.cluster import BROKERS, GroupCluster
from test_shell_shards import move_coordinator, replayed

from tidelog.coordinator.requests import OffsetToCommit
from tidelog.model.errors import (
    ErrorCode,
    InvalidProducerEpochError,
    InvalidRequestError,
    InvalidTransactionStateError,
    TidelogError,
)
from tidelog.model.group_errors import (
    CoordinatorLoadingError,
    CoordinatorNotAvailableError,
    NotCoordinatorError,
    UnknownMemberIdError,
)
from tidelog.replication.leader_replica import LeaderReplica
from tidelog.replication.transaction_messages import AddPartitions, AddReply, MarkedPartition, Marker
from tidelog.rpc.v1 import common_pb2 as common
from tidelog.rpc.v1 import groups_pb2 as pb
from tidelog.services.authorization import Operation, Resource, ResourceType
from tidelog.services.context import Api, RequestContext
from tidelog.services.guard import Guard
from tidelog.services.partition_lookup import PartitionLookup
from tidelog.services.transaction_requests import CommitOffsetsInTransaction
from tidelog.services.transactional_offsets import TransactionalOffsets

REQUEST = CommitOffsetsInTransaction(
    transactional_id="tx", producer_id=7, epoch=0, group="billing", offsets={("orders", 0): OffsetToCommit(42)}
)


class Peers:
    """The transaction's coordinator: it answers with `number`, or fails."""

    def __init__(self) -> None:
        self.number = 1
        self.error: TidelogError | None = None
        self.asked: list[AddPartitions] = []

    async def add_partitions(self, request: AddPartitions) -> AddReply:
        self.asked.append(request)
        await asyncio.sleep(0.01)
        if self.error is not None:
            raise self.error
        return AddReply(number=self.number)


def marker_of(leader: LeaderReplica, *, epoch: int = 1, number: int = 1, is_commit: bool = True) -> Marker:
    where = leader.replica.partition_id
    return Marker(
        transactional_id="tx",
        producer_id=7,
        epoch=epoch,
        coordinator_epoch=0,
        is_commit=is_commit,
        is_strict=True,
        number=number,
        partitions=(MarkedPartition(where.topic_id, where.partition, leader.leader_epoch),),
    )


class World:
    def __init__(self, cluster: GroupCluster) -> None:
        self.cluster = cluster
        self.peers = Peers()
        self.guard = Guard()

    def commit(self, request: CommitOffsetsInTransaction = REQUEST, **fields: Any) -> Mapping[Any, TidelogError | None]:
        async def work(broker: RunningBroker) -> Mapping[Any, TidelogError | None]:
            lookup = PartitionLookup(lambda: broker.tail.image, self.guard.authorizer)
            offsets = TransactionalOffsets(broker.groups.router, lookup, self.guard, self.peers)
            return await offsets.commit(RequestContext(Api.GRPC), replace(request, **fields))

        self.cluster.shard("billing")
        return self.cluster.on_broker(self.cluster.coordinator("billing"), work)

    def mark(
        self,
        *,
        is_commit: bool = True,
        epoch: int = 1,
        number: int = 1,
        at: int | None = None,
        leader: LeaderReplica | None = None,
    ) -> None:
        leader = leader or self.cluster.shard("billing").leader
        at = self.cluster.coordinator("billing") if at is None else at
        marker = marker_of(leader, epoch=epoch, number=number, is_commit=is_commit)

        async def work(broker: RunningBroker) -> None:
            await broker.coordinator.write_marker(leader, marker)

        self.cluster.on_broker(at, work)

    def fetch(self, *, require_stable: bool) -> tuple[int, str]:
        request = pb.FetchOffsetsRequest(
            group="billing",
            partitions=[common.TopicPartition(topic="orders", partition=0)],
            require_stable=require_stable,
        )
        (row,) = self.cluster.ask_groups("billing", "FetchOffsets", request).offsets
        return row.offset, row.error.name


@pytest.fixture
def world() -> Any:
    with GroupCluster(seed=77, orders=2) as cluster:
        yield World(cluster)


def test_the_first_offset_of_a_transaction_is_announced_to_its_coordinator(world: World) -> None:
    assert world.commit() == {("orders", 0): None}
    (asked,) = world.peers.asked
    where = world.cluster.shard("billing").leader.replica.partition_id
    assert asked == AddPartitions(
        transactional_id="tx", producer_id=7, epoch=0, partitions=frozenset([where]), version=2
    )
    world.commit(offsets={("orders", 1): OffsetToCommit(1), ("nothing", 0): OffsetToCommit(1)})
    assert len(world.peers.asked) == 1, "it is known to be open"
    world.mark()
    assert world.cluster.committed("billing", ("orders", 0), ("orders", 1)) == {("orders", 0): 42, ("orders", 1): 1}
    world.peers.number = 2
    world.commit(epoch=1)
    assert len(world.peers.asked) == 2


def test_a_delayed_request_does_not_set_the_offsets_of_a_later_one_back(world: World) -> None:
    """Its first attempt waits for the transaction's coordinator while the client, whose connection is broken, sends it
    again, and then the next one."""
    add, answers = world.peers.add_partitions, asyncio.Event()
    partition = ("orders", 0)

    async def first_waits(request: AddPartitions) -> AddReply:
        reply = await add(request)
        if len(world.peers.asked) == 1:
            await answers.wait()
        return reply

    world.peers.add_partitions = first_waits  # type: ignore[method-assign]

    async def work(broker: RunningBroker) -> TidelogError | None:
        lookup = PartitionLookup(lambda: broker.tail.image, world.guard.authorizer)
        offsets = TransactionalOffsets(broker.groups.router, lookup, world.guard, world.peers)

        async def commit(offset: int, sequence: int) -> TidelogError | None:
            request = replace(REQUEST, offsets={partition: OffsetToCommit(offset)}, sequence=sequence)
            return (await offsets.commit(RequestContext(Api.GRPC), request))[partition]

        delayed = asyncio.ensure_future(commit(10, 1))
        await asyncio.sleep(0.1)
        assert await commit(10, 2) is None
        assert await commit(20, 3) is None
        answers.set()
        with pytest.raises(InvalidTransactionStateError, match=r"commit 1 .* was overtaken by its commit 3"):
            await delayed
        with pytest.raises(InvalidTransactionStateError, match="overtaken"):
            await commit(10, 2)
        return await commit(20, 3)

    world.cluster.shard("billing")
    assert world.cluster.on_broker(world.cluster.coordinator("billing"), work) is None
    world.mark()
    assert world.cluster.committed("billing", partition) == {partition: 20}
    world.peers.number = 2
    assert world.commit(epoch=1, sequence=1, offsets={partition: OffsetToCommit(30)}) == {partition: None}
    world.commit(epoch=1, offsets={partition: OffsetToCommit(31)})  # a Kafka client does not number its requests


def test_offsets_of_the_next_transaction_wait_for_the_marker_of_the_one_before(world: World) -> None:
    """The coordinator answers when that transaction is complete: the client need not repeat the request."""
    world.commit()
    leader, add = world.cluster.shard("billing").leader, world.peers.add_partitions
    broker = world.cluster.brokers[NodeId(world.cluster.coordinator("billing"))]

    async def complete(request: AddPartitions) -> AddReply:
        await broker.coordinator.write_marker(leader, marker_of(leader))
        world.peers.number = 2
        return await add(request)

    world.peers.add_partitions = complete  # type: ignore[method-assign]
    assert world.commit(epoch=1, offsets={("orders", 1): OffsetToCommit(5)}) == {("orders", 1): None}
    assert [asked.epoch for asked in world.peers.asked] == [0, 1]
    assert world.cluster.committed("billing", ("orders", 0)) == {("orders", 0): 42}
    world.mark(epoch=2, number=2)
    assert world.cluster.committed("billing", ("orders", 1)) == {("orders", 1): 5}


def test_a_client_of_version_1_has_named_the_group_before(world: World) -> None:
    world.commit(version=1)
    assert world.peers.asked[0].verify_only
    assert world.peers.asked[0].version == 1


def test_a_reader_of_stable_offsets_waits_for_the_marker(world: World) -> None:
    world.cluster.commit("billing", {("orders", 0): 3})
    world.commit()
    assert world.fetch(require_stable=False) == (3, "")
    assert world.fetch(require_stable=True) == (-1, "UNSTABLE_OFFSET_COMMIT")
    every = pb.FetchOffsetsRequest(group="billing", require_stable=True)
    (row,) = world.cluster.ask_groups("billing", "FetchOffsets", every).offsets
    assert row.error.name == "UNSTABLE_OFFSET_COMMIT"
    world.mark(is_commit=False)
    assert world.fetch(require_stable=True) == (3, "")


def test_a_new_coordinator_knows_pending_offsets_and_fences(world: World) -> None:
    world.commit()
    move_coordinator(world.cluster, "billing")
    assert world.fetch(require_stable=True) == (-1, "UNSTABLE_OFFSET_COMMIT")
    world.commit(offsets={("orders", 1): OffsetToCommit(5)})
    assert len(world.peers.asked) == 1, "the transaction is known to be open"
    world.mark()
    world.mark()
    assert world.fetch(require_stable=True) == (42, "")
    assert world.cluster.shard("billing").state == replayed(world.cluster, "billing")
    world.cluster.start_brokers(*{11, 12, 13}.difference(map(int, world.cluster.brokers)))
    move_coordinator(world.cluster, "billing")
    with pytest.raises(InvalidProducerEpochError):
        world.commit()
    assert len(world.peers.asked) == 1, "an epoch that is fenced here needs no answer"


def test_an_answer_that_a_marker_overtakes_is_void(world: World) -> None:
    """The marker of the transaction comes while its coordinator's answer is on the way."""
    add = world.peers.add_partitions

    async def slow(request: AddPartitions) -> AddReply:
        reply = await add(request)
        await asyncio.sleep(1)
        return reply

    world.peers.add_partitions = slow  # type: ignore[method-assign]
    world.mark(epoch=0, number=1)
    with pytest.raises(InvalidTransactionStateError):
        world.commit()
    world.peers.number = 2
    assert world.commit() == {("orders", 0): None}


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (NotCoordinatorError("moved", coordinator=11), CoordinatorLoadingError),
        (CoordinatorNotAvailableError("none"), CoordinatorLoadingError),
        (InvalidTransactionStateError("not open"), InvalidTransactionStateError),
        (InvalidProducerEpochError("fenced"), InvalidProducerEpochError),
    ],
)
def test_a_rejection_of_the_coordinator_leaves_nothing(
    world: World, error: TidelogError, seen: type[TidelogError]
) -> None:
    world.peers.error = error
    with pytest.raises(seen):
        world.commit()
    assert world.fetch(require_stable=True) == (-1, "")
    assert not world.cluster.shard("billing").state.open


def test_members_fence_before_the_coordinator_is_asked_for_their_classic_group(world: World) -> None:
    with pytest.raises(UnknownMemberIdError):
        world.commit(member_id="nobody", member_epoch=3)
    assert world.fetch(require_stable=True) == (-1, "")


@pytest.mark.parametrize(
    "fields", [{"transactional_id": ""}, {"producer_id": -1}, {"epoch": -1}, {"offsets": {}}], ids=str
)
def test_a_request_without_its_parts_is_rejected(world: World, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        world.commit(**fields)
    assert not world.peers.asked


def test_the_transactional_id_the_group_and_the_topics_are_authorized(world: World) -> None:
    class Denies:
        def __init__(self, operation: Operation, resource: Resource) -> None:
            self.denied = operation, resource

        def authorize(self, context: RequestContext, operation: Operation, resource: Resource) -> bool:
            return (operation, resource) != self.denied

        def authorize_any(self, context: RequestContext, operation: Operation, kind: ResourceType) -> bool:
            return True

    for operation, kind, name, code in (
        (Operation.WRITE, ResourceType.TRANSACTIONAL_ID, "tx", ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED),
        (Operation.READ, ResourceType.GROUP, "billing", ErrorCode.GROUP_AUTHORIZATION_FAILED),
    ):
        world.guard = Guard(Denies(operation, Resource(kind, name)))
        with pytest.raises(TidelogError) as failure:
            world.commit()
        assert failure.value.code is code
    world.guard = Guard(Denies(Operation.READ, Resource(ResourceType.TOPIC, "orders")))
    (error,) = world.commit().values()
    assert error is not None
    assert error.code is ErrorCode.TOPIC_AUTHORIZATION_FAILED
    assert not world.peers.asked


def test_a_marker_for_a_shard_that_is_not_here_is_to_be_repeated(world: World) -> None:
    world.commit()
    leader = world.cluster.shard("billing").leader
    former = world.cluster.coordinator("billing")
    other = next(node for node in BROKERS if node != former)
    with pytest.raises(CoordinatorNotAvailableError):
        world.mark(at=other, leader=leader)
    world.mark()
    assert world.fetch(require_stable=True) == (42, "")


def test_fences_are_forgotten_with_time(world: World) -> None:
    world.cluster.set_cluster("offsets.retention.check.interval.ms", "1000")
    world.mark()
    shard = world.cluster.shard("billing")
    assert shard.state.fences
    world.cluster.set_cluster("producer.id.expiration.ms", "2000")
    world.cluster.until(lambda: not shard.state.fences, timeout=30)
