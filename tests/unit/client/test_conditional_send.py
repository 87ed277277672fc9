"""`expected_offset`, `fencing_token` and `claim` of the producers, against a whole cluster and in the mock."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator

import pytest

import tidelog
from tidelog.testing import MemoryCluster, MockProducer

ORDERS = "orders"


@pytest.fixture(scope="module")
def cluster() -> Iterator[MemoryCluster]:
    with MemoryCluster(seed=17) as cluster:
        yield cluster


@pytest.fixture
def topic(cluster: MemoryCluster, request: pytest.FixtureRequest) -> str:
    name = str(request.node.name)[:200]
    with tidelog.Admin(cluster.bootstrap) as admin:
        admin.create_topic(name, partitions=1)
    return name


def test_a_record_is_stored_at_the_expected_offset_or_not_at_all(cluster: MemoryCluster, topic: str) -> None:
    with tidelog.Producer(cluster.bootstrap) as producer:
        assert producer.send(topic, b"a", partition=0, expected_offset=0).result(30).offset == 0
        for _ in range(3):
            with pytest.raises(tidelog.errors.OffsetMismatchError) as mismatch:
                producer.send(topic, b"b", partition=0, expected_offset=0).result(30)
            assert mismatch.value.end_offset == 1
            assert not mismatch.value.retriable
            assert pickle.loads(pickle.dumps(mismatch.value)).end_offset == 1
        assert producer.send(topic, b"b", partition=0, expected_offset=1).result(30).offset == 1
        assert producer.send(topic, b"plain", partition=0).result(30).offset == 2


def test_conditional_records_keep_their_place_among_others(cluster: MemoryCluster, topic: str) -> None:
    with tidelog.Producer(cluster.bootstrap, linger_ms=50) as producer:
        sent = [producer.send(topic, b"%d" % number, partition=0) for number in range(3)]
        sent.append(producer.send(topic, b"3", partition=0, expected_offset=3))
        sent += [producer.send(topic, b"%d" % number, partition=0) for number in range(4, 6)]
        assert [delivery.result(30).offset for delivery in sent] == list(range(6))


def test_records_behind_an_unmet_condition_are_stored_in_order(cluster: MemoryCluster, topic: str) -> None:
    with tidelog.Producer(cluster.bootstrap) as producer:
        producer.send(topic, b"0", partition=0).result(30)
        wrong = producer.send(topic, b"x", partition=0, expected_offset=9)
        behind = [producer.send(topic, b"%d" % number, partition=0) for number in range(1, 4)]
        assert isinstance(wrong.exception(30), tidelog.errors.OffsetMismatchError)
        assert [delivery.result(30).offset for delivery in behind] == [1, 2, 3]


def test_many_records_are_one_batch_or_nothing(cluster: MemoryCluster, topic: str) -> None:
    with tidelog.Producer(cluster.bootstrap, batch_size=1_000) as producer:
        done = producer.send_many(topic, values=[bytes(100)] * 50, partition=0, expected_offset=0).result(30)
        assert [(part.partition, part.first_offset, part.count) for part in done.ranges] == [(0, 0, 50)]
        with pytest.raises(tidelog.errors.BulkError, match="the partition ends at 50, not at 7"):
            producer.send_many(topic, values=[b"x"] * 5, partition=0, expected_offset=7).result(30)
        with pytest.raises(tidelog.errors.RecordTooLargeError, match="one batch"):
            producer.send_many(topic, values=[bytes(600_000)] * 3, partition=0, expected_offset=50)
        assert producer.send(topic, b"y", partition=0, expected_offset=50).result(30).offset == 50


def test_a_claim_fences_the_writer_before(cluster: MemoryCluster, topic: str) -> None:
    with tidelog.Producer(cluster.bootstrap) as first, tidelog.Producer(cluster.bootstrap) as second:
        token = first.send(topic, b"mine", partition=0, claim=True).result(30).offset
        first.send(topic, b"a", partition=0, fencing_token=token).result(30)
        newer = second.send(topic, b"mine now", partition=0, claim=True, expected_offset=2).result(30).offset
        with pytest.raises(tidelog.errors.StaleFencingTokenError) as stale:
            first.send(topic, b"b", partition=0, fencing_token=token).result(30)
        assert stale.value.claim == newer
        second.send(topic, b"c", partition=0, fencing_token=newer).result(30)


def test_the_asyncio_producer_has_the_same(cluster: MemoryCluster, topic: str) -> None:
    async def job() -> None:
        async with tidelog.aio.Producer(cluster.bootstrap) as producer:
            metadata = await producer.send_and_wait(topic, b"a", partition=0, expected_offset=0, claim=True)
            delivery = await producer.send(topic, b"b", partition=0, fencing_token=metadata.offset, expected_offset=1)
            assert (await delivery).offset == 1
            with pytest.raises(tidelog.errors.OffsetMismatchError):
                await producer.send_and_wait(topic, b"b", partition=0, expected_offset=1)
            many = await producer.send_many(topic, values=[b"c", b"d"], partition=0, expected_offset=2)
            assert (await many).count == 2

    asyncio.run(job())


def test_wrong_arguments_are_rejected_at_once(cluster: MemoryCluster, topic: str) -> None:
    with tidelog.Producer(cluster.bootstrap) as producer:
        with pytest.raises(TypeError, match="pass partition="):
            producer.send(topic, b"a", expected_offset=0)
        with pytest.raises(ValueError, match="from 0 on"):
            producer.send(topic, b"a", partition=0, expected_offset=-1)
        with pytest.raises(TypeError, match="fencing_token is an int"):
            producer.send(topic, b"a", partition=0, fencing_token="3")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="claim is True or False"):
            producer.send(topic, b"a", partition=0, claim=1)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="pass partition="):
            producer.send_many(topic, values=[b"a"], expected_offset=0)
    with (
        tidelog.Producer(cluster.bootstrap, acks=1) as producer,
        pytest.raises(ValueError, match="use acks='all'"),
    ):
        producer.send(topic, b"a", partition=0, expected_offset=0)


def test_the_mock_checks_conditions_when_it_stores() -> None:
    mock = MockProducer(auto_complete=False)
    first = mock.send(ORDERS, b"a", partition=0, expected_offset=0, claim=True)
    late = mock.send(ORDERS, b"b", partition=0, expected_offset=0)
    many = mock.send_many(ORDERS, values=[b"c", b"d"], partition=0, expected_offset=1)
    fenced = mock.send(ORDERS, b"e", partition=0, fencing_token=5)
    mock.complete_all()
    assert first.result().offset == 0
    mismatch = late.exception()
    assert isinstance(mismatch, tidelog.errors.OffsetMismatchError)
    assert mismatch.end_offset == 1
    assert many.result().count == 2
    stale = fenced.exception()
    assert isinstance(stale, tidelog.errors.StaleFencingTokenError)
    assert stale.claim == 0
    assert mock.send(ORDERS, b"f", partition=0, fencing_token=0).done() is False
    with pytest.raises(TypeError, match="pass partition="):
        mock.send(ORDERS, b"a", expected_offset=0)
