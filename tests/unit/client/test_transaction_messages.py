# ruff: noqa: PT012 - what is tested is how a block ends
"""What a transactional producer tells the program whose call was wrong, or whose transaction has failed: against the
coordinator's real machine and logs in memory."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable

import pytest
from support.async_tests import virtual_time_test
from support.clients.transaction_cluster import TransactionCluster

import tidelog
from tidelog.client.errors import OptionError
from tidelog.model.append_condition import AppendCondition
from tidelog.model.errors import InvalidTransactionStateError
from tidelog.model.transaction_errors import OffsetMismatchError, ProducerFencedError, StaleFencingTokenError

MAYBE = "whether the transaction has committed is not known"


async def rejects(call: Awaitable[object], text: str, kind: type[Exception] = InvalidTransactionStateError) -> None:
    with pytest.raises(kind, match=f"^{re.escape(text)}"):
        await call


@virtual_time_test
async def test_a_call_in_a_wrong_state_names_the_state_and_the_next_call() -> None:
    cluster = TransactionCluster({"t": 1})
    async with cluster.producer(transactional_id="a") as producer:
        await rejects(
            producer.send("t", b"x"), "the record was not taken: call init_transactions first, or use a block"
        )
        await producer.init_transactions()
        await rejects(producer.init_transactions(), "init_transactions: the producer is initialized already;")
        for call in (producer.commit_transaction, producer.abort_transaction):
            await rejects(call(), f"{call.__name__}: no transaction is open; call begin_transaction first")
        await rejects(producer.send("t", b"x"), "the record was not taken: call begin_transaction first")
        await producer.begin_transaction()
        await rejects(
            producer.begin_transaction(), "begin_transaction: a transaction is open; commit or abort it first"
        )
        await producer.send("t", b"x")
        await producer.prepare_transaction()
    async with cluster.producer(transactional_id="a") as producer:
        assert await producer.init_transactions(keep_prepared=True)
        prepared = "a prepared transaction is open: commit or abort it first"
        await rejects(producer.send("t", b"x"), f"the record was not taken: {prepared}")
        await rejects(producer.begin_transaction(), f"begin_transaction: {prepared}")
        await producer.commit_transaction()
        await producer.begin_transaction()
        await producer.abort_transaction()


@virtual_time_test
async def test_offsets_of_a_wrong_kind_say_what_they_are() -> None:
    cluster = TransactionCluster({"t": 1})
    group = tidelog.GroupMetadata("g", "", -1)
    record = tidelog.ConsumerRecord("t", 0, 7, 0, None, b"x" * 1_000_000)
    async with cluster.producer(transactional_id="a") as producer, producer.transaction():
        text = "offsets: a mapping {(topic, partition): next offset to read}, not list"
        await rejects(producer.send_offsets([("t", 0)], group), text, TypeError)  # type: ignore[arg-type]
        text = "t-0: the next offset to read, not the record: record.offset + 1"
        await rejects(producer.send_offsets({("t", 0): record}, group), text, TypeError)  # type: ignore[dict-item]


@virtual_time_test
async def test_a_member_learns_that_only_its_owner_ends_the_transaction() -> None:
    cluster = TransactionCluster({"t": 1})
    async with cluster.producer(transactional_id="job") as owner, cluster.producer() as member:
        await owner.init_transactions()
        await rejects(
            member.leave_transaction(), "leave_transaction: the producer is not a member; call join_transaction"
        )
        await rejects(member.commit_transaction(), "commit_transaction: set transactional_id when you create")
        await member.join_transaction("job")
        text = "this producer is a member of the transaction of 'job', whose owner ends it: call leave_transaction"
        await rejects(member.commit_transaction(), f"commit_transaction: {text}")
        await rejects(
            member.join_transaction("job"), "join_transaction: the producer is a member of a transaction; call"
        )
        await member.leave_transaction()
        await rejects(member.join_transaction("job", label=5), "label=5: must be a str", TypeError)  # type: ignore[arg-type]
        await rejects(member.join_transaction("job", label="x" * 1025), "label: 1025 characters;", ValueError)
        await rejects(
            member.join_transaction("x" * 1025), "transactional_id: 1025 characters; at most 1024", ValueError
        )
        await owner.begin_transaction()
        await rejects(owner.commit_transaction(members=5), "members: a list of the ids that", TypeError)  # type: ignore[arg-type]
        await rejects(owner.commit_transaction(members=["5"]), "members: '5' is not an id that", TypeError)  # type: ignore[list-item]


@pytest.mark.parametrize(("wrong", "text"), [("x" * 1025, "1025 characters; at most 1024"), ("\udcff", "not UTF-8")])
def test_a_transactional_id_that_no_coordinator_takes_is_rejected_at_once(wrong: str, text: str) -> None:
    with pytest.raises(OptionError, match=text) as caught:
        tidelog.Producer("localhost:1", transactional_id=wrong)
    assert len(str(caught.value)) < 200, "it does not repeat the id"


@virtual_time_test
async def test_a_claim_is_rejected_in_a_transaction_and_the_transaction_goes_on() -> None:
    cluster = TransactionCluster({"t": 1})
    async with cluster.producer(transactional_id="a") as producer, producer.transaction():
        text = "claim=True: a claim is no part of a transaction: use a producer without transactional_id"
        await rejects(producer.send("t", b"x", partition=0, claim=True), text, ValueError)
        await producer.send("t", b"y")
    assert cluster.values("t") == [b"y"]


def test_a_condition_that_does_not_hold_says_what_the_writer_can_do() -> None:
    with pytest.raises(OffsetMismatchError, match="the partition ends at 3, not at 0: read to its end, and decide"):
        AppendCondition(expected_offset=0).check(end_offset=3, claim=-1)
    with pytest.raises(
        StaleFencingTokenError, match=r"^fencing token 1: the newest claim is at 2: stop, or claim again$"
    ):
        AppendCondition(fencing_token=1).check(end_offset=3, claim=2)
    with pytest.raises(StaleFencingTokenError, match=r"^fencing token 1: no claim is known: claim again$"):
        AppendCondition(fencing_token=1).check(end_offset=3, claim=-1)


@pytest.mark.parametrize("lost", [0, 1])
@virtual_time_test
async def test_a_fenced_commit_is_in_doubt_only_if_an_answer_was_lost(lost: int) -> None:
    cluster = TransactionCluster({"t": 1})
    async with cluster.producer(transactional_id="a") as old, cluster.producer(transactional_id="a") as new:
        await old.init_transactions()
        cluster.lose("End", times=lost)
        fencing: list[asyncio.Future[bool]] = []

        def fence() -> None:
            fencing.append(asyncio.ensure_future(new.init_transactions()))

        with pytest.raises(ProducerFencedError, match="a newer instance uses it") as caught:
            async with old.transaction():
                await old.send("t", b"x")
                await old.flush()
                if lost:
                    asyncio.get_running_loop().call_later(0.001, fence)
                else:
                    await new.init_transactions()
        await asyncio.gather(*fencing)
        notes = getattr(caught.value, "__notes__", [])
        assert [note[: len(MAYBE)] for note in notes] == [MAYBE] * lost
        assert cluster.values("t") == [b"x"] * lost


@virtual_time_test
async def test_a_fenced_block_has_nothing_to_abort_and_says_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    cluster = TransactionCluster({"t": 1})
    caplog.set_level(logging.WARNING)
    async with cluster.producer(transactional_id="a") as old, cluster.producer(transactional_id="a") as new:
        with pytest.raises(ProducerFencedError) as caught:
            async with old.transaction():
                await new.init_transactions()
                delivery = await old.send("t", b"x")
                await old.flush()
                raise delivery.exception() or AssertionError("not fenced")
    assert getattr(caught.value, "__notes__", []) == []
    assert caplog.messages == []
