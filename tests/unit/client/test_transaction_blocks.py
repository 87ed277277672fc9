# ruff: noqa: PT012 - what is tested is how a block ends
"""How a block `async with producer.transaction()` ends when its commit does not: against the coordinator's real machine
and logs in memory. `tests/unit/testing/test_mock_transactions_like_the_real.py` has the wrong calls."""

from __future__ import annotations

import asyncio

import pytest
from support.async_tests import virtual_time_test
from support.clients.transaction_cluster import ABORTED, TransactionCluster

from tidelog.client.errors import ProducerClosedError, TransactionAbortedError, TransactionTimeoutError
from tidelog.model.errors import InvalidTransactionStateError
from tidelog.model.transaction_errors import TransactionAbortableError

UNKNOWN = "whether the transaction has committed is not known: call commit_transaction again"


@virtual_time_test
async def test_a_block_whose_records_are_not_acknowledged_in_time_aborts() -> None:
    cluster = TransactionCluster({"t": 1})
    async with cluster.producer(transactional_id="a", max_block_ms=1_000) as producer:
        await producer.init_transactions()
        cluster.hold("Produce")
        with pytest.raises(TransactionAbortableError, match="1 record is not acknowledged") as caught:
            async with producer.transaction():
                pending = await producer.send("t", b"x")
        assert getattr(caught.value, "__notes__", []) == []
        assert isinstance(caught.value.__cause__, TransactionTimeoutError)
        assert isinstance(pending.exception(), TransactionAbortedError)
        cluster.release("Produce")
        async with producer.transaction():
            await producer.send("t", b"next")
        assert cluster.values("t") == [b"next"]


@pytest.mark.parametrize("held", ["Init", "End"])
@virtual_time_test
async def test_a_block_that_could_not_begin_in_time_can_only_be_begun_again(held: str) -> None:
    cluster = TransactionCluster({"t": 1})
    async with cluster.producer(transactional_id="a", max_block_ms=1_000) as producer:
        if held == "End":
            await producer.init_transactions()
            await producer.begin_transaction()
            await producer.send("t", b"aborted")
            cluster.hold(held)
            with pytest.raises(TransactionTimeoutError):
                await producer.abort_transaction()
        else:
            cluster.hold(held)
        with pytest.raises(TransactionAbortableError, match="the transaction has not begun: ") as caught:
            async with producer.transaction():
                raise AssertionError("it has begun")
        assert isinstance(caught.value.__cause__, TransactionTimeoutError)
        cluster.release(held)
        async with producer.transaction():
            await producer.send("t", b"next")
        assert cluster.values("t") == [b"next"]


@pytest.mark.parametrize("held", ["Produce", "End"])
@virtual_time_test
async def test_a_block_whose_commit_is_cancelled_aborts_unless_the_coordinator_was_asked(held: str) -> None:
    cluster = TransactionCluster({"t": 1})
    async with cluster.producer(transactional_id="a") as producer:
        await producer.init_transactions()

        async def work() -> None:
            async with producer.transaction():
                await producer.send("t", b"x")
                if held == "End":
                    await producer.flush()

        cluster.hold(held)
        task = asyncio.ensure_future(work())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            asyncio.get_running_loop().call_later(0.01, cluster.release, held)
            await task
        if held == "End":
            assert caught.value.__notes__ == [UNKNOWN]
            assert await producer.commit_transaction()
        async with producer.transaction():
            await producer.send("t", b"next")
        assert cluster.values("t") == ([b"x", b"next"] if held == "End" else [b"next"])


@virtual_time_test
async def test_a_block_whose_abort_is_cancelled_is_finished_by_the_next() -> None:
    cluster = TransactionCluster({"t": 1})
    async with cluster.producer(transactional_id="a") as producer:

        async def work() -> None:
            async with producer.transaction():
                await producer.send("t", b"x")
                await producer.flush()
                raise KeyError("of the program")

        await producer.init_transactions()
        cluster.hold("End")
        task = asyncio.ensure_future(work())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert isinstance(caught.value.__context__, KeyError)
        cluster.release("End")
        async with producer.transaction():
            await producer.send("t", b"next")
        assert cluster.values("t") == [b"next"]
        assert cluster.values("t", ABORTED) == [b"x"]


@virtual_time_test
async def test_blocks_of_two_tasks_do_not_share_a_transaction() -> None:
    cluster = TransactionCluster({"t": 1})
    async with cluster.producer(transactional_id="a") as producer:

        async def work(value: bytes) -> None:
            async with producer.transaction():
                await producer.send("t", value)
                await asyncio.sleep(1)

        cluster.hold("Init")
        asyncio.get_running_loop().call_later(1, cluster.release, "Init")
        for _ in range(2):  # the first blocks initialize the producer, too
            outcomes = await asyncio.gather(work(b"first"), work(b"second"), return_exceptions=True)
            assert outcomes[0] is None
            assert isinstance(outcomes[1], InvalidTransactionStateError)
            assert str(outcomes[1]) == "begin_transaction: a transaction is open; commit or abort it first"
    assert cluster.values("t") == [b"first"] * 2


@virtual_time_test
async def test_a_producer_that_is_closed_in_a_block_ends_it_with_an_error() -> None:
    cluster = TransactionCluster({"t": 1})
    producer = cluster.producer(transactional_id="a")
    with pytest.raises(ProducerClosedError):
        async with producer.transaction():
            await producer.send("t", b"x")
            await producer.flush()
            await producer.close()
    assert cluster.values("t", ABORTED) == [b"x"]
