# ruff: noqa: PT012 - what is tested is how a block ends
"""Joint transactions of the producer, against the coordinator's real machine and logs in memory."""

from __future__ import annotations

import pytest
from support.async_tests import virtual_time_test
from support.clients.transaction_cluster import ABORTED, OPEN, PLAIN, TransactionCluster

from tidelog.client.record import GroupMetadata
from tidelog.model.errors import ErrorCode, InvalidTransactionStateError, RemoteError
from tidelog.model.transaction_errors import (
    TransactionAbortableError,
)

GROUP = GroupMetadata("g", "member-1", 4)


@virtual_time_test
async def test_only_named_members_commit_with_their_owner() -> None:
    cluster = TransactionCluster({"t": 1})
    owner = cluster.producer(transactional_id="job")
    first, second = cluster.producer(), cluster.producer()
    await owner.init_transactions()
    await owner.begin_transaction()
    await owner.send("t", b"of the owner")
    ids = []
    for member, label in ((first, "task 1"), (second, "task 2")):
        joined = await member.join_transaction("job", label=label)
        await member.send("t", label.encode())
        assert await member.leave_transaction() == joined
        ids.append(joined)
    assert len(cluster.values("t", OPEN)) >= 2
    assert await owner.commit_transaction(members=[ids[0]], token=b"batch 1")
    assert sorted(cluster.values("t")) == [b"of the owner", b"task 1"]
    assert cluster.values("t", ABORTED) == [b"task 2"]
    assert await owner.last_token() == b"batch 1"
    # A member may join again, under another id.
    await owner.begin_transaction()
    again = await first.join_transaction("job")
    assert again not in ids
    await first.send("t", b"again")
    await first.leave_transaction()
    with pytest.raises(InvalidTransactionStateError, match="join_transaction first"):
        await first.send("t", b"outside")
    await owner.commit_transaction(members=[again])
    assert b"again" in cluster.values("t")
    for producer in (owner, first, second):
        await producer.close()


@virtual_time_test
async def test_a_token_that_is_stored_already_commits_nothing_twice() -> None:
    cluster = TransactionCluster({"t": 1})
    async with cluster.producer(transactional_id="job") as owner:
        await owner.init_transactions()
        await owner.begin_transaction()
        await owner.send("t", b"batch 1")
        assert await owner.commit_transaction(token=b"1")
    async with cluster.producer(transactional_id="job") as restarted:
        await restarted.init_transactions()
        assert await restarted.last_token() == b"1"
        await restarted.begin_transaction()
        await restarted.send("t", b"batch 1")
        assert not await restarted.commit_transaction(token=b"1")
        assert cluster.values("t") == [b"batch 1"]
        assert cluster.values("t", ABORTED) == [b"batch 1"]
        await restarted.begin_transaction()
        assert await restarted.commit_transaction(token=b"2"), "a commit of nothing but a token"
        assert await restarted.last_token() == b"2"


@virtual_time_test
async def test_a_transaction_that_has_timed_out_is_not_the_one_that_stored_its_token() -> None:
    cluster = TransactionCluster({"t": 1})
    async with cluster.producer(transactional_id="job") as owner:
        await owner.init_transactions()
        await owner.begin_transaction()
        await owner.send("t", b"first")
        assert await owner.commit_transaction(token=b"1")
        await owner.begin_transaction()
        await owner.send_and_wait("t", b"again")
        cluster.time_out("job")
        assert not await owner.commit_transaction(token=b"1")
        assert (cluster.values("t"), cluster.values("t", ABORTED)) == ([b"first"], [b"again"])
        await owner.begin_transaction()
        assert await owner.commit_transaction(token=b"2"), "it goes on with the epoch of the reply"


@virtual_time_test
async def test_a_lost_answer_of_a_commit_with_a_token_is_a_commit() -> None:
    cluster = TransactionCluster({"t": 1})
    async with cluster.producer(transactional_id="job") as owner:
        await owner.init_transactions()
        await owner.begin_transaction()
        await owner.send("t", b"x")
        cluster.lose("End", times=2)
        assert await owner.commit_transaction(token=b"1")
        assert cluster.values("t") == [b"x"]


@virtual_time_test
async def test_a_prepared_transaction_outlives_its_owner() -> None:
    cluster = TransactionCluster({"t": 1})
    owner = cluster.producer(transactional_id="job")
    await owner.init_transactions()
    await owner.begin_transaction()
    await owner.send("t", b"x")
    await owner.prepare_transaction()
    await owner.prepare_transaction()
    with pytest.raises(InvalidTransactionStateError, match="commit or abort"):
        await owner.send("t", b"y")
    await owner.close()
    assert cluster.values("t", OPEN) == [b"x"]
    async with cluster.producer(transactional_id="job") as successor:
        assert await successor.init_transactions(keep_prepared=True)
        with pytest.raises(InvalidTransactionStateError):
            await successor.send("t", b"y")
        assert await successor.commit_transaction()
        assert cluster.values("t") == [b"x"]
        async with successor.transaction():
            await successor.send("t", b"z")
        assert cluster.values("t") == [b"x", b"z"]


@virtual_time_test
async def test_a_member_whose_record_failed_does_not_return_its_id() -> None:
    cluster = TransactionCluster({"t": 1})
    async with cluster.producer(transactional_id="job") as owner, cluster.producer() as member:
        await owner.init_transactions()
        await owner.begin_transaction()
        await member.join_transaction("job")
        cluster.fail("Produce", RemoteError("over the limit", code=ErrorCode.MESSAGE_TOO_LARGE))
        await member.send("t", b"x")
        with pytest.raises(TransactionAbortableError, match="over the limit"):
            await member.leave_transaction()
        late = await member.join_transaction("job")
        await owner.commit_transaction()
        await member.send("t", b"late")
        with pytest.raises(TransactionAbortableError):
            await member.leave_transaction()
        with pytest.raises(TransactionAbortableError, match="no member"):
            await owner.begin_transaction()
            await owner.commit_transaction(members=[late])
        await owner.abort_transaction()
    assert cluster.values("t") == []


@virtual_time_test
async def test_records_before_a_join_are_no_part_of_the_transaction() -> None:
    cluster = TransactionCluster({"t": 1})
    async with cluster.producer(transactional_id="job") as owner, cluster.producer(linger_ms=1_000) as member:
        await owner.init_transactions()
        await owner.begin_transaction()
        await member.send("t", b"before")
        joined = await member.join_transaction("job")
        await member.send("t", b"inside")
        await member.leave_transaction()
        await owner.commit_transaction(members=[joined])
    assert cluster.values("t", PLAIN) == [b"before"]
    assert cluster.values("t") == [b"inside"]
