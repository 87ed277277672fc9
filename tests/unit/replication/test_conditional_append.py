"""Conditional appends: the expected offset and the fencing token, checked by the leader against its log."""

from __future__ import annotations

import pytest
from support.brokers import data_requests
from support.brokers.cluster import NodeId, ReplicationCluster, RunningBroker, batch, orders_cluster

from tidelog.model.append_condition import AppendCondition
from tidelog.model.errors import ErrorCode
from tidelog.model.ids import PartitionId
from tidelog.model.transaction_errors import OffsetMismatchError, StaleFencingTokenError
from tidelog.services.produce import ProduceItem, ProduceResult


def produce(
    cluster: ReplicationCluster,
    orders: PartitionId,
    data: bytes,
    *,
    expected_offset: int = -1,
    fencing_token: int = -1,
    acks: int = -1,
) -> ProduceResult:
    condition = AppendCondition(expected_offset=expected_offset, fencing_token=fencing_token)

    async def job(found: RunningBroker) -> list[ProduceResult]:
        return await data_requests.produce(found.service, [ProduceItem(orders, data, condition=condition)], acks=acks)

    (result,) = cluster.on_broker(cluster.leader(orders), job)
    return result


def numbered(value: bytes, producer: int, sequence: int = 0, *, is_claim: bool = False) -> bytes:
    return batch(value, producer_id=producer, producer_epoch=0, base_sequence=sequence, is_claim=is_claim)


def code(result: ProduceResult) -> ErrorCode | None:
    return None if result.error is None else result.error.code


def test_a_batch_is_stored_only_at_the_expected_offset() -> None:
    with orders_cluster(751, b"before") as (cluster, orders):
        for wrong in (0, 2):
            result = produce(cluster, orders, batch(b"x"), expected_offset=wrong)
            assert isinstance(result.error, OffsetMismatchError)
            assert result.error.end_offset == 1
            assert not result.error.retriable
        assert produce(cluster, orders, batch(b"x", b"y"), expected_offset=1).base_offset == 1
        assert cluster.values(orders) == [b"before", b"x", b"y"]


def test_a_repeated_batch_is_acknowledged_whatever_the_log_has_become() -> None:
    with orders_cluster(752) as (cluster, orders):
        first = numbered(b"a", 7)
        assert produce(cluster, orders, first, expected_offset=0).base_offset == 0
        cluster.write(orders, b"of another")
        assert produce(cluster, orders, first, expected_offset=0).base_offset == 0
        assert code(produce(cluster, orders, numbered(b"b", 7, 1), expected_offset=1)) is ErrorCode.OFFSET_MISMATCH
        assert produce(cluster, orders, numbered(b"b", 7, 1), expected_offset=2).base_offset == 2, "the same sequence"


def test_a_newer_claim_fences_the_writer_of_the_older_one() -> None:
    with orders_cluster(753) as (cluster, orders):
        none = produce(cluster, orders, batch(b"x"), fencing_token=0)
        assert isinstance(none.error, StaleFencingTokenError)
        assert none.error.claim == -1
        older = produce(cluster, orders, numbered(b"mine", 7, is_claim=True)).base_offset
        assert produce(cluster, orders, numbered(b"a", 7, 1), fencing_token=older).error is None
        newer = produce(cluster, orders, numbered(b"mine now", 8, is_claim=True), expected_offset=2).base_offset
        fenced = produce(cluster, orders, numbered(b"b", 7, 2), fencing_token=older)
        assert isinstance(fenced.error, StaleFencingTokenError)
        assert fenced.error.claim == newer == 2
        assert code(produce(cluster, orders, numbered(b"b", 7, 2), fencing_token=9)) is ErrorCode.STALE_FENCING_TOKEN
        assert produce(cluster, orders, numbered(b"c", 8, 1), fencing_token=newer).error is None
        again = numbered(b"a", 7, 1)
        assert produce(cluster, orders, again, fencing_token=older).base_offset == 1, "stored before"
        assert produce(cluster, orders, batch(b"any"), fencing_token=-1).error is None, "who does not ask is not fenced"
        both = produce(cluster, orders, numbered(b"d", 7, 2), fencing_token=older, expected_offset=0)
        assert code(both) is ErrorCode.STALE_FENCING_TOKEN


def test_a_claim_outlives_a_failover_and_a_restart() -> None:
    with orders_cluster(754) as (cluster, orders):
        token = produce(cluster, orders, numbered(b"mine", 7, is_claim=True)).base_offset
        cluster.until_whole(orders)
        cluster.kill(NodeId(cluster.leader(orders)))
        cluster.until(lambda: cluster.leading(orders).state.is_confirmed)
        assert code(produce(cluster, orders, numbered(b"x", 8), fencing_token=token + 1)) is (
            ErrorCode.STALE_FENCING_TOKEN
        )
    with ReplicationCluster(755, brokers=(11,)) as cluster:
        orders = cluster.topic("orders", (11,))
        token = produce(cluster, orders, numbered(b"mine", 7, is_claim=True)).base_offset
        for stop in (cluster.kill, lambda node: cluster.stop(int(node))):
            stop(NodeId(11))
            cluster.start_brokers(11)
            assert cluster.leading(orders).log.producers.claim == token
            assert code(produce(cluster, orders, batch(b"x"), fencing_token=token + 1)) is (
                ErrorCode.STALE_FENCING_TOKEN
            )


@pytest.mark.parametrize(("acks", "expected"), [(0, "INVALID_REQUIRED_ACKS"), (1, "INVALID_REQUIRED_ACKS")])
def test_a_condition_needs_all_acks(acks: int, expected: str) -> None:
    with orders_cluster(756) as (cluster, orders):
        result = produce(cluster, orders, batch(b"x"), expected_offset=0, acks=acks)
        assert result.error is not None
        assert result.error.code.name == expected
        assert cluster.leading(orders).log.end_offset == 0


def test_a_condition_is_of_one_batch() -> None:
    with orders_cluster(757) as (cluster, orders):
        both = batch(b"x") + batch(b"y")
        assert code(produce(cluster, orders, both, expected_offset=0)) is ErrorCode.INVALID_RECORD
        assert cluster.leading(orders).log.end_offset == 0


@pytest.mark.parametrize(
    "wrong",
    [
        batch(b"a", b"b", producer_id=7, producer_epoch=0, base_sequence=0, is_claim=True),
        batch(b"a", is_claim=True),
        batch(b"a", producer_id=7, producer_epoch=0, base_sequence=0, is_claim=True, is_transactional=True),
    ],
)
def test_a_claim_is_one_record_of_an_idempotent_producer_outside_of_transactions(wrong: bytes) -> None:
    with orders_cluster(758) as (cluster, orders):
        assert code(produce(cluster, orders, wrong)) is ErrorCode.INVALID_RECORD
        assert cluster.leading(orders).log.producers.claim == -1
