# ruff: noqa: PT012 - what is tested is how a block ends
"""Transactions of the producer, against the coordinator's real machine and logs in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from support.async_tests import virtual_time_test
from support.clients.transaction_cluster import ABORTED, OPEN, PLAIN, TransactionCluster

from tidelog.client.errors import TransactionAbortedError, TransactionTimeoutError
from tidelog.client.producer.fast_path import ProducerBatch
from tidelog.client.producer.transaction_state import State
from tidelog.client.record import GroupMetadata
from tidelog.model.errors import ErrorCode, InvalidTransactionStateError, RecordTooLargeError, RemoteError
from tidelog.model.group_errors import UnknownMemberIdError
from tidelog.model.transaction_errors import (
    ConcurrentTransactionsError,
    ProducerFencedError,
    TransactionAbortableError,
    TransactionFatalError,
)

GROUP = GroupMetadata("g", "member-1", 4)


def state_of(producer: object) -> State:
    core = producer._host.core  # type: ignore[attr-defined]
    assert core is not None
    core.transactions.states.validate()
    state: State = core.transactions.states.state
    return state


@virtual_time_test
async def test_a_block_commits_its_records_and_its_offsets_together() -> None:
    cluster = TransactionCluster({"t": 2})
    async with cluster.producer(transactional_id="a") as producer:
        async with producer.transaction():
            for number in range(20):
                await producer.send("t", f"{number}", key=f"{number}")
            await producer.send_offsets({("t", 1): 9}, GROUP)
            await producer.flush()
            assert len(cluster.values("t", OPEN)) == 20
            assert cluster.offsets == {}
        assert sorted(cluster.values("t"), key=int) == [b"%d" % number for number in range(20)]
        assert cluster.offsets == {("g", "t", 1): 9}
        assert state_of(producer) is State.READY
        async with producer.transaction():
            await producer.send("t", b"next")
        assert b"next" in cluster.values("t")
    assert cluster.calls.count("Init") == 1


@virtual_time_test
async def test_an_exception_in_a_block_aborts_and_sends_nothing_afterwards() -> None:
    cluster = TransactionCluster({"t": 1})
    async with cluster.producer(transactional_id="a", linger_ms=60_000, delivery_timeout_ms=200_000) as producer:
        stored = queued = None
        with pytest.raises(KeyError):
            async with producer.transaction():
                stored = await producer.send("t", b"stored")
                await producer.flush()
                queued = await producer.send("t", b"queued")
                raise KeyError("of the program")
        assert stored is not None
        assert queued is not None
        assert (await stored).offset == 0
        assert isinstance(queued.exception(), TransactionAbortedError)
        assert cluster.values("t", ABORTED) == [b"stored"]
        async with producer.transaction():
            await producer.send("t", b"later")
        assert cluster.values("t") == [b"later"]
        assert b"queued" not in [value for kind in (OPEN, ABORTED, PLAIN) for value in cluster.values("t", kind)]


@virtual_time_test
async def test_a_batch_in_flight_at_the_abort_is_fenced_and_never_part_of_the_next_transaction() -> None:
    cluster = TransactionCluster({"t": 2})
    async with cluster.producer(transactional_id="a") as producer:
        await producer.init_transactions()
        await producer.begin_transaction()
        await producer.send("t", b"first", partition=0)
        await producer.flush()
        cluster.hold("Produce")
        late = [await producer.send("t", b"late", partition=number) for number in (0, 1)]
        await asyncio.sleep(0.1)
        await producer.abort_transaction()
        assert all(isinstance(one.exception(), TransactionAbortedError) for one in late)
        await producer.begin_transaction()
        kept = [await producer.send("t", b"kept", partition=number) for number in (0, 1)]
        await asyncio.sleep(0.1)
        cluster.release("Produce")
        for one in kept:
            await one
        await producer.commit_transaction()
        assert cluster.values("t") == [b"kept", b"kept"]
        assert b"late" not in cluster.values("t", OPEN)


@virtual_time_test
async def test_a_failed_record_fails_the_transaction_and_the_block_aborts_it() -> None:
    cluster = TransactionCluster({"t": 2})
    async with cluster.producer(transactional_id="a") as producer:
        cluster.fail("Produce", RemoteError("over the limit", code=ErrorCode.MESSAGE_TOO_LARGE))
        with pytest.raises(TransactionAbortableError, match="over the limit"):
            async with producer.transaction():
                failed = await producer.send("t", b"x", partition=0)
                with pytest.raises(RemoteError):
                    await failed
                assert state_of(producer) is State.ABORTABLE_ERROR
                with pytest.raises(TransactionAbortableError):
                    await producer.send("t", b"y", partition=1)
                with pytest.raises(TransactionAbortableError):
                    await producer.send_many("t", values=[b"y"], partition=1)
        assert state_of(producer) is State.READY
        async with producer.transaction():
            await producer.send("t", b"z", partition=0)
        assert cluster.values("t") == [b"z"]


@virtual_time_test
async def test_a_thread_that_knows_of_a_failed_record_sends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = TransactionCluster({"t": 1})
    async with cluster.producer(transactional_id="a") as producer:
        await producer.init_transactions()
        await producer.begin_transaction()
        core = producer._host.core
        assert core is not None
        accumulator = core.accumulator
        finish, rejections = accumulator.finish, []

        def finish_and_look(batch: ProducerBatch) -> list[Callable[[], object]]:
            """From here on another thread may have the outcome."""
            rejections.append(accumulator.rejection)
            return finish(batch)

        monkeypatch.setattr(accumulator, "finish", finish_and_look)
        cluster.fail("Produce", RemoteError("over the limit", code=ErrorCode.MESSAGE_TOO_LARGE))
        with pytest.raises(RemoteError):
            await (await producer.send("t", b"x"))
        assert [type(error) for error in rejections] == [TransactionAbortableError]
        await producer.abort_transaction()


@virtual_time_test
async def test_a_record_that_is_refused_at_once_is_an_error_of_the_program() -> None:
    cluster = TransactionCluster({"t": 1})
    async with cluster.producer(transactional_id="a", max_request_size=200) as producer:
        with pytest.raises(RecordTooLargeError):
            async with producer.transaction():
                await producer.send("t", b"fits")
                await producer.send("t", bytes(300))
        assert cluster.values("t") == []
        assert state_of(producer) is State.READY


@pytest.mark.parametrize("method", ["Init", "End", "CommitOffsets", "Produce"])
@virtual_time_test
async def test_lost_answers_are_asked_for_again_and_change_nothing_twice(method: str) -> None:
    cluster = TransactionCluster({"t": 1})
    cluster.lose(method, times=3)
    async with cluster.producer(transactional_id="a") as producer:
        for number in range(3):
            async with producer.transaction():
                await producer.send("t", b"%d" % number)
                await producer.send_offsets({("t", 0): number}, GROUP)
        assert cluster.values("t") == [b"0", b"1", b"2"]
        assert cluster.offsets == {("g", "t", 0): 2}
        assert cluster.pending == []


@virtual_time_test
async def test_retriable_errors_of_the_coordinator_are_retried() -> None:
    cluster = TransactionCluster({"t": 1})
    moved = [
        RemoteError("no", code=code)
        for code in (
            ErrorCode.NOT_COORDINATOR,
            ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
            ErrorCode.CONCURRENT_TRANSACTIONS,
            ErrorCode.THROTTLING_QUOTA_EXCEEDED,
        )
    ]
    for method in ("Init", "CommitOffsets", "End", "Produce"):
        cluster.fail(method, *moved)
    async with cluster.producer(transactional_id="a") as producer:
        async with producer.transaction():
            await producer.send("t", b"x")
            await producer.send_offsets({("t", 0): 1}, GROUP)
        assert cluster.values("t") == [b"x"]


@virtual_time_test
async def test_the_next_transaction_waits_until_the_markers_of_the_last_are_written() -> None:
    cluster = TransactionCluster({"t": 1})
    async with cluster.producer(transactional_id="a") as producer:
        async with producer.transaction():
            await producer.send("t", b"1")
        cluster.writes_markers = False
        async with producer.transaction():
            await producer.send("t", b"2")
        assert cluster.status("a") == "PrepareCommit"
        await producer.begin_transaction()
        waiting = await producer.send("t", b"3")
        await asyncio.sleep(1)
        assert not waiting.done()
        cluster.writes_markers = True
        cluster.write_markers()
        await waiting
        await producer.commit_transaction()
        assert cluster.values("t") == [b"1", b"2", b"3"]


@virtual_time_test
async def test_a_newer_instance_fences_the_older_one_for_good() -> None:
    cluster = TransactionCluster({"t": 1})
    old, new = cluster.producer(transactional_id="a"), cluster.producer(transactional_id="a")
    await old.init_transactions()
    await old.begin_transaction()
    await old.send("t", b"old")
    await old.flush()
    await new.init_transactions()
    assert cluster.values("t", ABORTED) == [b"old"]
    with pytest.raises(ProducerFencedError):
        await old.commit_transaction()
    assert state_of(old) is State.FATAL_ERROR
    for call in (old.begin_transaction, old.abort_transaction, old.commit_transaction):
        with pytest.raises(TransactionFatalError):
            await call()
    with pytest.raises(ProducerFencedError):
        await old.send("t", b"more")
    async with new.transaction():
        await new.send("t", b"new")
    assert cluster.values("t") == [b"new"]
    await old.close()
    await new.close()


@virtual_time_test
async def test_a_fenced_block_raises_its_error_and_notes_that_the_abort_failed_too() -> None:
    cluster = TransactionCluster({"t": 1})
    async with cluster.producer(transactional_id="a") as old, cluster.producer(transactional_id="a") as new:
        with pytest.raises(ValueError, match="of the program") as caught:
            async with old.transaction():
                await new.init_transactions()
                raise ValueError("of the program")
        assert "abort of the transaction failed too" in caught.value.__notes__[0]


@virtual_time_test
async def test_a_transaction_that_timed_out_is_aborted_and_the_next_one_succeeds() -> None:
    cluster = TransactionCluster({"t": 1})
    async with cluster.producer(transactional_id="a") as producer:
        with pytest.raises(TransactionAbortableError):
            async with producer.transaction():
                await producer.send("t", b"slow")
                await producer.flush()
                cluster.time_out("a")
        assert cluster.values("t", ABORTED) == [b"slow"]
        with pytest.raises(TransactionAbortableError):
            async with producer.transaction():
                await producer.send("t", b"1")
                await producer.flush()
                cluster.time_out("a")
                await producer.send("t", b"2")
                await producer.flush()
        async with producer.transaction():
            await producer.send("t", b"quick")
        assert cluster.values("t") == [b"quick"]


@virtual_time_test
async def test_a_commit_that_is_not_answered_can_only_be_repeated() -> None:
    cluster = TransactionCluster({"t": 1})
    async with cluster.producer(transactional_id="a", max_block_ms=1_000) as producer:
        cluster.lose("End", times=100)
        with pytest.raises(TransactionTimeoutError) as caught:
            async with producer.transaction():
                await producer.send("t", b"x")
        assert isinstance(caught.value, TimeoutError)
        assert cluster.values("t") == [b"x"], "the answers were lost, not the commit"
        assert state_of(producer) is State.COMMITTING
        for call in (producer.begin_transaction, producer.abort_transaction):
            with pytest.raises(InvalidTransactionStateError, match="call commit_transaction again"):
                await call()
        with pytest.raises(InvalidTransactionStateError, match="same members and token"):
            await producer.commit_transaction(token=b"another")
        with pytest.raises(InvalidTransactionStateError):
            await producer.send("t", b"y")
        cluster.lose("End", times=-cluster._lost["End"])
        assert await producer.commit_transaction()
        async with producer.transaction():
            await producer.send("t", b"z")
        assert cluster.values("t") == [b"x", b"z"]


@pytest.mark.parametrize("is_answered", [False, True])
@virtual_time_test
async def test_a_cancelled_commit_is_repeated_and_commits_once(is_answered: bool) -> None:
    cluster = TransactionCluster({"t": 1})
    async with cluster.producer(transactional_id="a") as producer:
        await producer.init_transactions()
        await producer.begin_transaction()
        await producer.send("t", b"x")
        if is_answered:
            cluster.lose("End")
        else:
            cluster.hold("End")
        commit = asyncio.ensure_future(producer.commit_transaction())
        await asyncio.sleep(0.01)  # before the first retry
        assert cluster.calls.count("End") == 1
        commit.cancel()
        with pytest.raises(asyncio.CancelledError):
            await commit
        assert state_of(producer) is State.COMMITTING
        if not is_answered:
            cluster.release("End")
        assert await producer.commit_transaction()
        assert cluster.values("t") == [b"x"]


@virtual_time_test
async def test_a_commit_that_was_cancelled_before_its_request_can_still_be_aborted() -> None:
    cluster = TransactionCluster({"t": 1})
    async with cluster.producer(transactional_id="a") as producer:
        await producer.init_transactions()
        await producer.begin_transaction()
        cluster.hold("Produce")
        await producer.send("t", b"x")
        with pytest.raises(TransactionTimeoutError, match="1 record is"):
            await producer.commit_transaction(timeout=1)
        assert state_of(producer) is State.COMMITTING
        await producer.abort_transaction()
        cluster.release("Produce")
        assert "End" in cluster.calls
        assert cluster.values("t") == []


@virtual_time_test
async def test_an_abort_that_is_not_answered_is_finished_by_the_next_block() -> None:
    cluster = TransactionCluster({"t": 1})
    async with cluster.producer(transactional_id="a", max_block_ms=1_000) as producer:
        cluster.lose("End", times=100)
        with pytest.raises(KeyError) as caught:
            async with producer.transaction():
                await producer.send("t", b"x")
                await producer.flush()
                raise KeyError("of the program")
        assert "abort" in caught.value.__notes__[0]
        assert state_of(producer) is State.ABORTING
        cluster.lose("End", times=-cluster._lost["End"])
        async with producer.transaction():
            await producer.send("t", b"y")
        assert cluster.values("t") == [b"y"]
        assert cluster.values("t", ABORTED) == [b"x"]


@virtual_time_test
async def test_offsets_of_a_member_that_was_removed_fail_the_transaction() -> None:
    cluster = TransactionCluster({"t": 1})
    async with cluster.producer(transactional_id="a") as producer:
        cluster.group_error = UnknownMemberIdError("the group does not know member-1")
        with pytest.raises(TransactionAbortableError, match="member-1"):
            async with producer.transaction():
                await producer.send("t", b"x")
                await producer.send_offsets({("t", 0): 1}, GROUP)
        assert cluster.values("t") == []
        assert cluster.offsets == {}


@virtual_time_test
async def test_offsets_that_are_not_confirmed_fail_the_transaction() -> None:
    """It is not known whether the transaction has them: committed without them it would be read twice."""
    cluster = TransactionCluster({"t": 1})
    async with cluster.producer(transactional_id="a") as producer:
        await producer.init_transactions()
        await producer.begin_transaction()
        cluster.hold("CommitOffsets")
        sending = asyncio.ensure_future(producer.send_offsets({("t", 0): 1}, GROUP))
        await asyncio.sleep(1)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        with pytest.raises(TransactionAbortableError, match="cancelled"):
            await producer.commit_transaction()
        await producer.abort_transaction()
        await producer.begin_transaction()
        with pytest.raises(TransactionAbortableError):
            await producer.send_offsets({("t", 0): 1}, GROUP, timeout=1)
        assert state_of(producer) is State.ABORTABLE_ERROR
        await producer.abort_transaction()
        assert cluster.offsets == {}


@virtual_time_test
async def test_an_empty_transaction_ends_and_leaves_nothing_open() -> None:
    cluster = TransactionCluster({"t": 1})
    async with cluster.producer(transactional_id="a") as producer:
        for _ in range(3):
            async with producer.transaction():
                pass
        assert cluster.status("a") == "Empty"


@virtual_time_test
async def test_close_aborts_what_is_open() -> None:
    cluster = TransactionCluster({"t": 1})
    producer = cluster.producer(transactional_id="a")
    await producer.init_transactions()
    await producer.begin_transaction()
    await producer.send("t", b"x")
    await producer.flush()
    await producer.close()
    assert cluster.values("t", ABORTED) == [b"x"]
    assert cluster.status("a") == "CompleteAbort"


@virtual_time_test
async def test_close_does_not_wait_for_a_coordinator_that_is_away() -> None:
    cluster = TransactionCluster({"t": 1})
    producer = cluster.producer(transactional_id="a")
    await producer.init_transactions()
    await producer.begin_transaction()
    await producer.send("t", b"x")
    await producer.flush()
    cluster.hold("End")
    before_s = asyncio.get_running_loop().time()
    await producer.close()
    assert asyncio.get_running_loop().time() - before_s < 10
    assert cluster.values("t", OPEN) == [b"x"], "the coordinator aborts it after its timeout"


@virtual_time_test
async def test_calls_in_a_wrong_state_say_what_to_do_and_change_nothing() -> None:
    cluster = TransactionCluster({"t": 1})
    async with cluster.producer() as plain:
        for call in (plain.init_transactions, plain.begin_transaction, plain.commit_transaction, plain.last_token):
            with pytest.raises(InvalidTransactionStateError, match="set transactional_id"):
                await call()
        with pytest.raises(InvalidTransactionStateError, match="join_transaction first"):
            await plain.leave_transaction()
    async with cluster.producer(transactional_id="a") as producer:
        with pytest.raises(InvalidTransactionStateError, match="call init_transactions first"):
            await producer.begin_transaction()
        with pytest.raises(InvalidTransactionStateError, match="call init_transactions first"):
            await producer.send("t", b"x")
        await producer.init_transactions()
        with pytest.raises(InvalidTransactionStateError):
            await producer.init_transactions()
        for call in (producer.commit_transaction, producer.abort_transaction, producer.prepare_transaction):
            with pytest.raises(InvalidTransactionStateError, match="call begin_transaction first"):
                await call()
        with pytest.raises(InvalidTransactionStateError):
            await producer.send_offsets({("t", 0): 1}, GROUP)
        with pytest.raises(InvalidTransactionStateError, match="owns transactional id"):
            await producer.join_transaction("b")
        await producer.begin_transaction()
        with pytest.raises(InvalidTransactionStateError, match="commit or abort it first"):
            await producer.begin_transaction()
        with pytest.raises(TypeError):
            await producer.send_offsets({("t", 0): 1}, "g")  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            await producer.commit_transaction(token="text")  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            await producer.commit_transaction(members=["x"])  # type: ignore[list-item]
        await producer.send("t", b"x")
        await producer.commit_transaction()
    assert cluster.values("t") == [b"x"]


@virtual_time_test
async def test_errors_are_of_three_classes() -> None:
    """What to do is in the class: repeat the call, abort, or close."""
    assert issubclass(TransactionTimeoutError, TimeoutError)
    assert TransactionTimeoutError("x").retriable
    assert not TransactionAbortableError("x").retriable
    assert issubclass(ProducerFencedError, TransactionFatalError)
    assert not issubclass(TransactionAbortableError, TransactionFatalError)
    assert ConcurrentTransactionsError("x").retriable
