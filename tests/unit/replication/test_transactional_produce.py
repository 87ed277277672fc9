"""Batches of transactions through the produce service, with a coordinator that answers, waits or fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from support.brokers import data_requests
from support.brokers.cluster import NodeId, ReplicationCluster, RunningBroker, batch, orders_cluster
from support.brokers.transactions import ScriptedCoordinator, marker_of, transactional
from test_replica_moves import homes, id_of

from tidelog.model.errors import (
    CallTimeoutError,
    ErrorCode,
    InvalidRequiredAcksError,
    InvalidTransactionStateError,
    NotLeaderOrFollowerError,
    TidelogError,
    TransportError,
)
from tidelog.model.group_errors import CoordinatorLoadingError, NotCoordinatorError
from tidelog.model.ids import PartitionId
from tidelog.model.transaction_errors import ConcurrentTransactionsError, ProducerFencedError
from tidelog.replication.marker_receiver import LeaderMarkers
from tidelog.replication.transaction_messages import WriteMarkers
from tidelog.replication.transaction_verifier import TransactionVerifier
from tidelog.services.produce import ProduceItem, ProduceResult


@contextmanager
def transactional_cluster(seed: int) -> Iterator[tuple[ReplicationCluster, PartitionId, ScriptedCoordinator]]:
    with orders_cluster(seed) as (cluster, orders):
        coordinator = ScriptedCoordinator()
        for found in cluster.brokers.values():
            connect(found, coordinator)
        yield cluster, orders, coordinator


def connect(found: RunningBroker, coordinator: ScriptedCoordinator) -> None:
    found.service.produce.verifier = TransactionVerifier(coordinator, found.replicas.tasks)


def produce(
    cluster: ReplicationCluster,
    orders: PartitionId,
    data: bytes,
    *,
    transactional_id: str | None = "app",
    version: int = 2,
    acks: int = -1,
    timeout_ms: int = 5_000,
) -> ProduceResult:
    async def job(found: RunningBroker) -> list[ProduceResult]:
        return await data_requests.produce(
            found.service,
            [ProduceItem(orders, data)],
            transactional_id=transactional_id,
            transaction_version=version,
            acks=acks,
            timeout_ms=timeout_ms,
        )

    (result,) = cluster.on_broker(cluster.leader(orders), job)
    return result


def code(result: ProduceResult) -> ErrorCode | None:
    return None if result.error is None else result.error.code


def test_the_coordinator_is_asked_once_for_each_partition_and_transaction() -> None:
    with transactional_cluster(701) as (cluster, orders, coordinator):
        coordinator.begin("app", producer_id=7, epoch=3)
        for sequence in range(3):
            assert produce(cluster, orders, transactional(b"%d" % sequence, 7, 3, sequence)).error is None
        (asked,) = coordinator.requests
        assert (asked.transactional_id, asked.producer_id, asked.epoch) == ("app", 7, 3)
        assert asked.partitions == {orders}
        assert (asked.version, asked.verify_only) == (2, False)
        assert cluster.log(cluster.leader(orders), orders).producers.open_offset(7) == 0


def test_a_client_of_version_1_must_have_added_the_partition() -> None:
    with transactional_cluster(702) as (cluster, orders, coordinator):
        known = coordinator.begin("app", producer_id=7, epoch=3)
        first = transactional(b"a", 7, 3)
        assert code(produce(cluster, orders, first, version=1)) is ErrorCode.INVALID_TXN_STATE
        known.partitions.add(orders)
        assert produce(cluster, orders, first, version=1).error is None
        assert [(asked.version, asked.verify_only) for asked in coordinator.requests] == [(1, True)] * 2


def test_a_repeated_batch_is_acknowledged_after_the_transaction_without_a_question() -> None:
    with transactional_cluster(703) as (cluster, orders, coordinator):
        coordinator.begin("app", producer_id=7, epoch=3)
        data = transactional(b"a", 7, 3)
        assert produce(cluster, orders, data).base_offset == 0
        coordinator.error = ProducerFencedError("nobody may write")
        assert produce(cluster, orders, data).base_offset == 0
        assert len(coordinator.requests) == 1


@pytest.mark.parametrize(
    ("transactional_id", "data", "expected"),
    [
        ("other", transactional(b"v", 7, 3), ErrorCode.INVALID_PRODUCER_ID_MAPPING),
        ("app", transactional(b"v", 7, 2), ErrorCode.INVALID_TXN_STATE),
        ("app", transactional(b"v", 8, 3), ErrorCode.INVALID_PRODUCER_ID_MAPPING),
        (None, transactional(b"v", 7, 3), ErrorCode.INVALID_TXN_STATE),
    ],
)
def test_a_batch_of_no_open_transaction_gets_its_error_and_nothing_changes(
    transactional_id: str | None, data: bytes, expected: ErrorCode
) -> None:
    with transactional_cluster(704) as (cluster, orders, coordinator):
        coordinator.begin("app", producer_id=7, epoch=3)
        coordinator.begin("other", producer_id=9, epoch=0)
        assert code(produce(cluster, orders, data, transactional_id=transactional_id)) is expected
        assert cluster.log(cluster.leader(orders), orders).end_offset == 0


def test_batches_that_do_not_fit_the_open_transaction_get_their_errors() -> None:
    with transactional_cluster(705) as (cluster, orders, coordinator):
        coordinator.begin("app", producer_id=7, epoch=3)
        assert produce(cluster, orders, transactional(b"a", 7, 3)).error is None
        plain = batch(b"plain", producer_id=7, producer_epoch=3, base_sequence=1)
        assert code(produce(cluster, orders, plain, transactional_id=None)) is ErrorCode.INVALID_TXN_STATE
        assert code(produce(cluster, orders, plain)) is ErrorCode.INVALID_TXN_STATE
        older = transactional(b"late", 7, 2)
        assert code(produce(cluster, orders, older)) is ErrorCode.INVALID_PRODUCER_EPOCH
        newer = transactional(b"of no transaction", 7, 4)
        assert code(produce(cluster, orders, newer)) is ErrorCode.INVALID_TXN_STATE
        foreign = produce(cluster, orders, transactional(b"b", 7, 3, 1), transactional_id="other")
        assert code(foreign) is ErrorCode.INVALID_PRODUCER_ID_MAPPING
        assert [asked.epoch for asked in coordinator.requests] == [3, 4]
        assert produce(cluster, orders, batch(b"plain"), transactional_id=None).error is None, "others go on"


@pytest.mark.case("C1")
def test_a_batch_of_the_next_transaction_is_stored_when_the_marker_of_the_one_before_is_here() -> None:
    """The coordinator answers when that transaction is complete: the client need not repeat its batch."""
    with transactional_cluster(710) as (cluster, orders, coordinator):
        coordinator.begin("app", producer_id=7, epoch=3)
        assert produce(cluster, orders, transactional(b"a", 7, 3)).error is None
        coordinator.begin("app", producer_id=7, epoch=4, number=2)
        leader, at = cluster.leading(orders), cluster.leader(orders)

        async def job(found: RunningBroker) -> ProduceResult:
            coordinator.hold()
            coordinator.was_asked.clear()
            item = ProduceItem(orders, transactional(b"b", 7, 4))
            work = data_requests.produce(found.service, [item], transactional_id="app", acks=-1, timeout_ms=5_000)
            producing = asyncio.ensure_future(work)
            await coordinator.was_asked.wait()
            markers = LeaderMarkers(found.replicas.get, lambda: found.replicas.image)
            await markers.write_markers(WriteMarkers(markers=(marker_of(leader, 7, 4),)))
            coordinator.release()
            return (await producing)[0]

        assert cluster.on_broker(at, job).error is None
        assert len(coordinator.requests) == 2, "the marker of the transaction before voids no answer about this one"


def test_a_leader_that_still_has_a_complete_transaction_open_stores_nothing_of_the_next_one() -> None:
    """It was replaced, and does not know it: the marker went to its successor."""
    with transactional_cluster(711) as (cluster, orders, coordinator):
        coordinator.begin("app", producer_id=7, epoch=3)
        assert produce(cluster, orders, transactional(b"a", 7, 3)).error is None
        coordinator.begin("app", producer_id=7, epoch=4, number=2)
        early = produce(cluster, orders, transactional(b"b", 7, 4))
        assert code(early) is ErrorCode.CONCURRENT_TRANSACTIONS
        assert early.error is not None
        assert early.error.retriable
        assert cluster.log(cluster.leader(orders), orders).end_offset == 1


def test_a_request_names_its_transactional_id_or_none() -> None:
    with transactional_cluster(706) as (cluster, orders, _), pytest.raises(TidelogError, match="is empty"):
        produce(cluster, orders, transactional(b"v", 7, 3), transactional_id="")


def test_a_broker_without_coordinators_rejects_transactions() -> None:
    with orders_cluster(707) as (cluster, orders):
        for found in cluster.brokers.values():
            found.service.produce.verifier = None
        with pytest.raises(TidelogError) as refused:
            produce(cluster, orders, transactional(b"v", 7, 3))
        assert refused.value.code is ErrorCode.UNSUPPORTED_VERSION


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConcurrentTransactionsError("ending"), ErrorCode.CONCURRENT_TRANSACTIONS),
        (CoordinatorLoadingError("loading"), ErrorCode.COORDINATOR_LOAD_IN_PROGRESS),
        (NotCoordinatorError("moved"), ErrorCode.COORDINATOR_NOT_AVAILABLE),
        (TransportError("broken"), ErrorCode.COORDINATOR_NOT_AVAILABLE),
        (CallTimeoutError("late"), ErrorCode.COORDINATOR_NOT_AVAILABLE),
        (NotLeaderOrFollowerError("of its own partition", leader=-1), ErrorCode.COORDINATOR_NOT_AVAILABLE),
    ],
)
def test_an_error_of_the_coordinator_that_may_pass_is_retriable(error: TidelogError, expected: ErrorCode) -> None:
    with transactional_cluster(708) as (cluster, orders, coordinator):
        coordinator.begin("app", producer_id=7, epoch=3)
        coordinator.error = error
        data = transactional(b"a", 7, 3)
        result = produce(cluster, orders, data)
        assert code(result) is expected
        assert result.error is not None
        assert result.error.retriable
        coordinator.error = None
        assert produce(cluster, orders, data).base_offset == 0


def test_a_final_error_of_the_coordinator_is_that_of_the_batch() -> None:
    with transactional_cluster(709) as (cluster, orders, coordinator):
        coordinator.error = ProducerFencedError("a newer instance")
        assert code(produce(cluster, orders, transactional(b"a", 7, 3))) is ErrorCode.PRODUCER_FENCED


def test_a_coordinator_that_does_not_answer_ends_the_wait_at_the_timeout() -> None:
    with transactional_cluster(710) as (cluster, orders, coordinator):
        coordinator.begin("app", producer_id=7, epoch=3)
        coordinator.hold()
        data = transactional(b"a", 7, 3)
        assert code(produce(cluster, orders, data, timeout_ms=300)) is ErrorCode.COORDINATOR_NOT_AVAILABLE
        assert cluster.log(cluster.leader(orders), orders).end_offset == 0
        coordinator.release()
        assert produce(cluster, orders, data).error is None
        assert len(coordinator.requests) == 1, "the question that was left to the coordinator"


def test_questions_of_one_producer_share_a_request_while_one_is_on_its_way() -> None:
    with ReplicationCluster(711, brokers=(11,)) as cluster:
        many = cluster.topic("many", partitions=5, factor=1)
        places = [PartitionId(many.topic_id, number) for number in range(5)]
        coordinator = ScriptedCoordinator()
        coordinator.begin("app", producer_id=7, epoch=3)
        connect(cluster.brokers[NodeId(11)], coordinator)
        coordinator.hold()

        async def job(found: RunningBroker) -> list[list[ProduceResult]]:
            def items(*numbers: int) -> Sequence[ProduceItem]:
                return [ProduceItem(places[number], transactional(b"v", 7, 3)) for number in numbers]

            async def send(*numbers: int) -> list[ProduceResult]:
                return await data_requests.produce(found.service, items(*numbers), transactional_id="app")

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(send(0, 1))]
                await coordinator.was_asked.wait()
                tasks += [group.create_task(send(*numbers)) for numbers in ((1, 2), (2, 3), (3, 4))]
                for _ in range(10):
                    await asyncio.sleep(0)
                coordinator.release()
            return [task.result() for task in tasks]

        for results in cluster.on_broker(11, job):
            assert [result.error for result in results] == [None, None]
        first, second = coordinator.requests
        assert first.partitions == {places[0], places[1]}
        assert second.partitions == {places[2], places[3], places[4]}


@pytest.mark.case("C1")
def test_a_marker_that_arrives_before_the_answer_is_used_has_the_coordinator_asked_again() -> None:
    with transactional_cluster(712) as (cluster, orders, coordinator):
        coordinator.begin("app", producer_id=7, epoch=3)
        coordinator.hold()
        leader = cluster.leading(orders)

        async def job(found: RunningBroker) -> list[ProduceResult]:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(
                    data_requests.produce(
                        found.service, [ProduceItem(orders, transactional(b"late", 7, 3))], transactional_id="app"
                    )
                )
                await coordinator.was_asked.wait()
                # The transaction has ended meanwhile. In version 1 the epoch stays: only the marker tells.
                leader.append_marker(marker_of(leader, 7, 3, is_strict=False))
                coordinator.scripted = [None, InvalidTransactionStateError("the transaction has ended")]
                coordinator.release()
            return task.result()

        (result,) = cluster.on_broker(cluster.leader(orders), job)
        assert code(result) is ErrorCode.INVALID_TXN_STATE
        assert len(coordinator.requests) == 2
        assert leader.log.producers.open_offset(7) is None


@pytest.mark.parametrize("acks", [0, 1])
def test_a_batch_of_a_transaction_needs_all_acks(acks: int) -> None:
    """Else a failover loses it, and the transaction is committed without it."""
    with transactional_cluster(715) as (cluster, orders, coordinator):
        coordinator.begin("app", producer_id=7, epoch=3)
        with pytest.raises(InvalidRequiredAcksError, match="-1"):
            produce(cluster, orders, transactional(b"a", 7, 3), acks=acks)
        assert cluster.leading(orders).log.end_offset == 0
        assert coordinator.requests == []


def test_the_next_leader_continues_an_open_transaction_from_its_log_alone() -> None:
    with transactional_cluster(713) as (cluster, orders, coordinator):
        coordinator.begin("app", producer_id=7, epoch=3)
        assert produce(cluster, orders, transactional(b"a", 7, 3)).error is None
        cluster.until_whole(orders)
        cluster.kill(NodeId(cluster.leader(orders)))
        coordinator.error = TransportError("no coordinator")
        cluster.until(lambda: cluster.leading(orders).state.is_confirmed)
        result = produce(cluster, orders, transactional(b"b", 7, 3, 1), timeout_ms=30_000)
        assert result.error is None
        (row,) = cluster.leading(orders).transactions.open_transactions()
        assert (row.producer_id, row.epoch, row.first_offset, row.transactional_id) == (7, 3, 0, "")


def test_a_log_that_has_moved_to_another_directory_still_knows_the_open_transaction() -> None:
    with ReplicationCluster(714, brokers=(11,), directories=2) as cluster:
        orders = cluster.topic("orders", factor=1)
        coordinator = ScriptedCoordinator()
        coordinator.begin("app", producer_id=7, epoch=3)
        found = cluster.brokers[NodeId(11)]
        connect(found, coordinator)
        assert produce(cluster, orders, transactional(b"a", 7, 3)).error is None
        leader = cluster.leading(orders)
        former = leader.log
        _, other = homes(cluster, 11, orders)
        cluster.on_broker(11, lambda found: found.service.log_directories.move_replica(orders, id_of(other)))
        cluster.until(lambda: leader.log is not former)
        assert produce(cluster, orders, transactional(b"b", 7, 3, 1)).error is None

        async def end(_: RunningBroker) -> None:
            leader.append_marker(marker_of(leader, 7, 4))

        cluster.on_broker(11, end)
        assert leader.log.producers.open_offset(7) is None
        assert len(coordinator.requests) == 1
        leader.validate()
