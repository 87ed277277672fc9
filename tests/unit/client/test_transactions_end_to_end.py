# ruff: noqa: PT012 - what is tested is how a block ends
"""Transactions through the public clients, against a cluster in memory: what each reader sees, and what a program meets
that ends in the middle."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.clients.committed import COMMITTED, UNCOMMITTED, hang, new_topic, send_one, state_of, values
from support.clusters import commands
from support.clusters.waiting import until

import tidelog
from tidelog.errors import (
    ProducerFencedError,
    TransactionAbortableError,
    TransactionFatalError,
)
from tidelog.testing import MemoryCluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[MemoryCluster]:
    with MemoryCluster(brokers=3, seed=15) as started:
        yield started


@pytest.fixture
def topic(cluster: MemoryCluster) -> str:
    return new_topic(cluster)


# What readers see.


@pytest.mark.requirement("a:D-42", "a:H-01", "a:H-02", "a:H-18", "a:H-20", "b:J-07", "b:J-08", "b:EX-38", "a:X3-39")
def test_each_level_returns_what_it_promises_while_transactions_are_open_and_after_their_ends(
    cluster: MemoryCluster, topic: str
) -> None:
    def both() -> tuple[list[bytes], list[bytes]]:
        return values(cluster.bootstrap, topic), values(cluster.bootstrap, topic, UNCOMMITTED)

    with (
        tidelog.Producer(cluster.bootstrap) as plain,
        tidelog.Producer(cluster.bootstrap, transactional_id=topic) as producer,
    ):
        producer.init_transactions()
        plain.send(topic, b"plain-1", partition=0).result(30)
        producer.begin_transaction()
        producer.send(topic, b"bob: -10", partition=0).result(30)
        producer.send(topic, b"alice: +10", partition=1).result(30)
        plain.send(topic, b"plain-2", partition=0).result(30)
        assert both() == ([b"plain-1"], [b"plain-1", b"bob: -10", b"plain-2", b"alice: +10"])
        producer.commit_transaction()
        everything = [b"plain-1", b"bob: -10", b"plain-2", b"alice: +10"]
        until(lambda: both() == (everything, everything), "the transaction is visible as a whole")
        producer.begin_transaction()
        send_one(producer, topic, b"aborted")
        producer.flush()
        producer.abort_transaction()
        until(lambda: values(cluster.bootstrap, topic) == everything, "nothing of it is visible")
        assert values(cluster.bootstrap, topic, UNCOMMITTED).count(b"aborted") == 2


@pytest.mark.requirement("a:H-20", "a:H-23", "a:X3-39")
def test_every_reader_of_the_client_skips_aborted_transactions(cluster: MemoryCluster, topic: str) -> None:
    """An ordinary consumer: the only thing to do is its option."""
    wanted: dict[str, list[bytes]] = {COMMITTED: [], UNCOMMITTED: []}
    with tidelog.Producer(cluster.bootstrap, transactional_id=topic) as producer:
        for number in range(6):
            is_committed = number % 2 == 0
            value = b"%d" % number
            with tidelog_abort(None if is_committed else KeyError), producer.transaction():
                producer.send(topic, value, partition=0)
                producer.flush()
                if not is_committed:
                    raise KeyError
            wanted[UNCOMMITTED].append(value)
            wanted[COMMITTED] += [value] * is_committed
    for isolation, expected in wanted.items():
        until(lambda level=isolation, all_=expected: values(cluster.bootstrap, topic, level) == all_, isolation)  # type: ignore[misc]
        assert asyncio.run(read_async(cluster, topic, isolation, len(expected))) == expected
        table = tidelog.read_arrow(topic, bootstrap=cluster.bootstrap, isolation=isolation)  # type: ignore[arg-type]
        assert table["value"].to_pylist() == expected
        assert group_values(cluster, topic, isolation, len(expected)) == expected
        named = (topic, "--bootstrap", cluster.bootstrap, "--isolation", isolation)
        assert commands.run("consume", "--from-beginning", "--exit-at-end", *named).raw.split() == expected
        counted = commands.run("query", f"select count(*) n from {named[0]}", *named[1:], "--output", "json")
        assert counted.document["rows"] == [{"n": len(expected)}]
    assert tidelog.read_arrow(topic, bootstrap=cluster.bootstrap).num_rows == 6, "read_uncommitted is the default"


def tidelog_abort(kind: type[BaseException] | None) -> Any:
    return pytest.raises(kind) if kind else threading.Lock()


async def read_async(cluster: MemoryCluster, topic: str, isolation: Any, wanted: int) -> list[bytes | None]:
    found: list[bytes | None] = []
    async with tidelog.aio.Consumer(cluster.bootstrap, isolation=isolation) as consumer:
        await consumer.assign([(topic, 0)])
        await consumer.seek_to_beginning()
        while len(found) < wanted:
            found += [record.value for record in await consumer.poll(1)]
        found += [record.value for record in await consumer.poll(0.05)]
    return found


def group_values(cluster: MemoryCluster, topic: str, isolation: Any, wanted: int) -> list[bytes | None]:
    options: dict[str, Any] = {"group": f"{topic}-{isolation}", "auto_offset_reset": "earliest"}
    found: list[bytes | None] = []
    with tidelog.Consumer(cluster.bootstrap, isolation=isolation, **options) as consumer:
        consumer.subscribe([topic])
        end_s = time.monotonic() + 60
        while len(found) < wanted and time.monotonic() < end_s:
            found += [record.value for record in consumer.poll(0.2)]
        found += [record.value for record in consumer.poll(0.05)]
    return found


@pytest.mark.requirement("a:X3-38", "a:T-20", "a:V-09", "b:EX-38")
def test_an_open_transaction_holds_back_later_records_until_its_timeout_aborts_it(
    cluster: MemoryCluster, topic: str
) -> None:
    with (
        tidelog.Producer(cluster.bootstrap) as plain,
        tidelog.Producer(cluster.bootstrap, transactional_id=topic, transaction_timeout_ms=1_500) as producer,
    ):
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"open", partition=0).result(30)
        plain.send(topic, b"later", partition=0).result(30)
        assert values(cluster.bootstrap, topic) == []
        until(lambda: values(cluster.bootstrap, topic) == [b"later"], "the timeout aborts")
        assert values(cluster.bootstrap, topic, UNCOMMITTED) == [b"open", b"later"]
        with pytest.raises(TransactionAbortableError, match="was aborted"):
            producer.commit_transaction()
        producer.abort_transaction()
        with producer.transaction():
            producer.send(topic, b"next", partition=0)
    until(lambda: values(cluster.bootstrap, topic) == [b"later", b"next"], "the producer goes on")


@pytest.mark.requirement("a:H-40", "a:V-09")
def test_the_cost_of_a_transaction_is_one_marker_for_each_partition_whatever_its_records(
    cluster: MemoryCluster, topic: str
) -> None:
    places = [tidelog.TopicPartition(topic, number) for number in (0, 1)]

    def ends() -> list[int]:
        with tidelog.Consumer(cluster.bootstrap) as consumer:
            found = consumer.end_offsets(*places)
        return [found[place] for place in places]

    with tidelog.Producer(cluster.bootstrap, transactional_id=topic) as producer:
        written = [0, 0]
        for count in (1, 10, 1_000):
            with producer.transaction():
                for partition in (0, 1):
                    producer.send_many(topic, values=[b"x"] * count, partition=partition)
            written = [before + count + 1 for before in written]
            until(lambda wanted=tuple(written): ends() == [*wanted], f"one marker after {count} records")  # type: ignore[misc]
        with producer.transaction():
            producer.send(topic, b"x", partition=0)
        until(lambda: ends() == [written[0] + 2, written[1]], "no marker in a partition without records")


# A program that ends, or is replaced.


@pytest.mark.requirement("a:T-18", "a:H-03", "a:H-10", "a:X3-36", "a:X3-37")
def test_a_crash_between_output_and_commit_leaves_neither_and_its_successor_fences_it(
    cluster: MemoryCluster, topic: str
) -> None:
    source, group = new_topic(cluster), f"group-of-{topic}"
    with tidelog.Producer(cluster.bootstrap) as plain:
        plain.send_many(source, values=[b"%d" % number for number in range(20)], partition=0).result(30)

    def process(consumer: tidelog.Consumer, producer: tidelog.Producer, *, is_crash: bool = False) -> int:
        records = consumer.poll(1, 10)
        if not records:
            return 0
        producer.begin_transaction()
        for record in records:
            producer.send(topic, record.value, partition=record.offset % 2)
        producer.send_offsets({(source, 0): records[-1].offset + 1}, consumer.group_metadata())
        producer.flush()
        if not is_crash:
            producer.commit_transaction()
        return len(records)

    options: dict[str, Any] = {"group": group, "auto_offset_reset": "earliest", "enable_auto_commit": False}
    zombie = tidelog.Producer(cluster.bootstrap, transactional_id=topic)
    zombie.init_transactions()
    with tidelog.Consumer(cluster.bootstrap, **options) as consumer:
        consumer.subscribe([source])
        until(lambda: process(consumer, zombie), "the first records")
        until(lambda: process(consumer, zombie, is_crash=True), "the records of the crash")
    assert len(values(cluster.bootstrap, topic)) == 10
    with (
        tidelog.Producer(cluster.bootstrap, transactional_id=topic) as producer,
        tidelog.Consumer(cluster.bootstrap, **options) as consumer,
    ):
        producer.init_transactions()
        with pytest.raises(ProducerFencedError):
            zombie.commit_transaction()
        consumer.subscribe([source])
        until(lambda: process(consumer, producer), "what the crash has left")
        assert consumer.committed((source, 0))[tidelog.TopicPartition(source, 0)] == tidelog.OffsetAndMetadata(20)
    zombie.close()
    until(lambda: len(values(cluster.bootstrap, topic)) == 20, "all of it")
    assert sorted(values(cluster.bootstrap, topic), key=int) == [b"%d" % number for number in range(20)], "once"


@pytest.mark.requirement("a:H-35", "a:X3-37", "a:F-34", "a:H-17")
def test_a_consumer_that_was_evicted_cannot_commit_in_a_transaction(cluster: MemoryCluster, topic: str) -> None:
    group = f"group-of-{topic}"
    with (
        tidelog.Admin(cluster.bootstrap) as admin,
        tidelog.Producer(cluster.bootstrap, transactional_id=topic) as producer,
        tidelog.Consumer(cluster.bootstrap, group=group, enable_auto_commit=False) as consumer,
    ):
        consumer.subscribe([topic])
        until(lambda: consumer.poll(0.1) or consumer.assignment(), "an assignment")
        metadata = consumer.group_metadata()
        with producer.transaction():
            producer.send_offsets({(topic, 0): 0}, metadata)
        admin.remove_members(group, member_ids=[metadata.member_id])
        with pytest.raises(TransactionAbortableError) as failure, producer.transaction():
            producer.send(topic, b"output", partition=0)
            producer.send_offsets({(topic, 0): 7}, metadata)
        assert isinstance(failure.value.__cause__, tidelog.TidelogError)
        assert values(cluster.bootstrap, topic) == []
        assert [row.committed.offset for row in admin.group_offsets(group).values()] == [0]


@pytest.mark.requirement("a:X3-37")
@pytest.mark.parametrize("isolation", [COMMITTED, UNCOMMITTED])
def test_the_next_owner_of_a_partition_waits_for_offsets_of_an_open_transaction(
    cluster: MemoryCluster, topic: str, isolation: Any
) -> None:
    """Otherwise it would begin at the offset before, and process records twice."""
    group = f"group-of-{topic}-{isolation}"
    options: dict[str, Any] = {"group": group, "auto_offset_reset": "earliest", "enable_auto_commit": False}
    place = tidelog.TopicPartition(topic, 0)
    with (
        tidelog.Producer(cluster.bootstrap) as plain,
        tidelog.Producer(cluster.bootstrap, transactional_id=group) as producer,
    ):
        plain.send_many(topic, values=[b"%d" % number for number in range(4)], partition=0).result(30)
        with tidelog.Consumer(cluster.bootstrap, **options) as former:
            former.subscribe([topic])
            until(lambda: former.poll(0.1), "the first records")
            producer.init_transactions()
            producer.begin_transaction()
            producer.send_offsets({place: 3}, former.group_metadata())
        with tidelog.Consumer(cluster.bootstrap, isolation=isolation, **options) as consumer:
            consumer.subscribe([topic])
            until(lambda: consumer.poll(0.1) or consumer.assignment(), "an assignment")
            assert consumer.poll(0.5) == [], "the outcome is not known yet"
            producer.commit_transaction()
            assert [record.value for record in until(lambda: consumer.poll(0.2), "records")] == [b"3"]


class Interrupted(tidelog.Producer):
    """Ctrl-C reaches the thread when the transaction has begun, before the block has."""

    def _enter_transaction(self, block: object) -> None:
        super()._enter_transaction(block)
        raise KeyboardInterrupt


def test_ctrl_c_at_the_begin_of_a_block_leaves_no_transaction_open(cluster: MemoryCluster, topic: str) -> None:
    with Interrupted(cluster.bootstrap, transactional_id=topic) as producer:
        with pytest.raises(KeyboardInterrupt), producer.transaction():
            raise AssertionError("the block does not begin")
        producer.begin_transaction()
        producer.send(topic, b"kept")
        producer.commit_transaction()
    until(lambda: values(cluster.bootstrap, topic) == [b"kept"], "the next transaction is its own")


def test_a_task_that_is_cancelled_at_any_moment_of_a_block_commits_all_or_nothing(
    cluster: MemoryCluster, topic: str
) -> None:
    done = asyncio.run(cancel_blocks(cluster, topic))
    found = values(cluster.bootstrap, topic)
    assert b"last" in found
    counts = {value: found.count(value) for value in found if value != b"last"}
    assert set(counts.values()) <= {3}
    assert {b"%d" % number for number in done} <= set(counts)


async def cancel_blocks(cluster: MemoryCluster, topic: str) -> set[int]:
    """Blocks of three records, cancelled later and later. Returns those that ended before."""
    done: set[int] = set()
    async with tidelog.aio.Producer(cluster.bootstrap, transactional_id=topic) as producer:
        await producer.init_transactions()

        async def work(number: int) -> None:
            async with producer.transaction():
                for _ in range(3):
                    await producer.send(topic, b"%d" % number)
                    await asyncio.sleep(0)

        for number in range(40):
            task = asyncio.create_task(work(number))
            await asyncio.sleep(0.0004 * number)
            task.cancel()
            try:
                await task
                done.add(number)
            except asyncio.CancelledError as error:
                if getattr(error, "__notes__", ()):  # whether it has committed is not known
                    await producer.commit_transaction()
        async with producer.transaction():
            await producer.send(topic, b"last")
    return done


def test_records_of_other_threads_are_part_of_the_open_transaction(cluster: MemoryCluster, topic: str) -> None:
    with tidelog.Producer(cluster.bootstrap, transactional_id=topic) as producer:
        with pytest.raises(KeyError), producer.transaction():
            thread = threading.Thread(target=send_one, args=(producer, topic, b"of another thread"))
            thread.start()
            thread.join(30)
            raise KeyError
        with producer.transaction():
            producer.send(topic, b"kept")
    until(lambda: values(cluster.bootstrap, topic) == [b"kept"], "the thread's records are aborted, too")


def test_a_topic_that_is_deleted_in_a_transaction_does_not_hold_it_up(cluster: MemoryCluster, topic: str) -> None:
    other = new_topic(cluster)
    with (
        tidelog.Admin(cluster.bootstrap) as admin,
        tidelog.Producer(cluster.bootstrap, transactional_id=topic) as producer,
    ):
        with producer.transaction():
            for name in (topic, other):
                producer.send(name, b"1", partition=0).result(30)
            admin.delete_topic(other)
            until(lambda: other not in [one.name for one in admin.list_topics()], "it is deleted")
        with producer.transaction():
            producer.send(topic, b"2", partition=0)
    until(lambda: values(cluster.bootstrap, topic) == [b"1", b"2"], "the next transaction")


def test_records_of_an_open_transaction_may_be_deleted_and_readers_stay_within_the_log(
    cluster: MemoryCluster, topic: str
) -> None:
    place = tidelog.TopicPartition(topic, 0)
    with (
        tidelog.Admin(cluster.bootstrap) as admin,
        tidelog.Producer(cluster.bootstrap, transactional_id=topic) as producer,
        tidelog.Consumer(cluster.bootstrap, isolation=COMMITTED, auto_offset_reset="none") as consumer,
    ):
        with producer.transaction():
            for value in (b"deleted", b"deleted, too"):
                producer.send(topic, value, partition=0).result(30)
            admin.delete_records({place: 2})
            consumer.assign([place])
            assert consumer.beginning_offsets(place) == consumer.end_offsets(place) == {place: 2}
            consumer.seek_to_end()
            assert consumer.poll(0.2) == [], "an open transaction"
            producer.send(topic, b"kept", partition=0)
        assert [record.value for record in until(lambda: consumer.poll(0.2), "the record that is left")] == [b"kept"]


def test_a_producer_whose_id_has_expired_ends_and_a_new_one_goes_on() -> None:
    settings = {
        "transactional.id.expiration.ms": 500,
        "transaction.remove.expired.transaction.cleanup.interval.ms": 100,
    }
    with MemoryCluster(brokers=1, settings=settings) as cluster, tidelog.Admin(cluster.bootstrap) as admin:
        topic = new_topic(cluster, factor=1)

        def write(producer: tidelog.Producer, value: bytes) -> None:
            with producer.transaction():
                producer.send(topic, value, partition=0)

        with tidelog.Producer(cluster.bootstrap, transactional_id="a") as idle:
            write(idle, b"1")
            until(lambda: not admin.list_transactions().transactions, "the id has expired")
            with pytest.raises(TransactionFatalError):
                write(idle, b"x")
        with tidelog.Producer(cluster.bootstrap, transactional_id="a") as producer:
            write(producer, b"2")
        until(lambda: values(cluster.bootstrap, topic) == [b"1", b"2"], "the new one goes on")


# Joint transactions.


def test_members_commit_with_their_owner_if_it_names_them(cluster: MemoryCluster, topic: str) -> None:
    with (
        tidelog.Producer(cluster.bootstrap, transactional_id=topic) as owner,
        tidelog.Producer(cluster.bootstrap) as task_1,
        tidelog.Producer(cluster.bootstrap) as task_2,
    ):
        owner.init_transactions()
        named = []
        for member, label in ((task_1, "task 1"), (task_2, "task 2")):
            member.join_transaction(topic, label=label)
            send_one(member, topic, label.encode())
            named.append(member.leave_transaction())
        owner.begin_transaction()
        with tidelog.Admin(cluster.bootstrap) as admin:
            described = admin.describe_transaction(topic)
            assert {member.label: len(member.partitions) for member in described.members} == {"task 1": 2, "task 2": 2}
        assert owner.commit_transaction(members=[named[0]], token=b"batch 7")
        until(lambda: values(cluster.bootstrap, topic) == [b"task 1"] * 2, "the named member's records")
        # The same batch again, as after a restart of the engine.
        owner.begin_transaction()
        task_1.join_transaction(topic)
        send_one(task_1, topic, b"again")
        assert not owner.commit_transaction(members=[task_1.leave_transaction()], token=b"batch 7")
        assert owner.last_token() == b"batch 7"
    until(lambda: state_of(cluster, topic) == "CompleteAbort", "the repetition is aborted")
    assert values(cluster.bootstrap, topic) == [b"task 1"] * 2


def test_a_member_of_an_earlier_attempt_cannot_be_committed(cluster: MemoryCluster, topic: str) -> None:
    with (
        tidelog.Producer(cluster.bootstrap, transactional_id=topic) as owner,
        tidelog.Producer(cluster.bootstrap) as task,
    ):
        owner.init_transactions()
        task.join_transaction(topic)
        send_one(task, topic, b"first attempt")
        old = task.leave_transaction()
        owner.begin_transaction()
        owner.abort_transaction()
        owner.begin_transaction()
        owner.send(topic, b"x")
        with pytest.raises(TransactionAbortableError):
            owner.commit_transaction(members=[old], token=b"1")
        owner.abort_transaction()
        assert owner.last_token() == b""
    assert values(cluster.bootstrap, topic) == []


def test_a_prepared_transaction_outlives_its_owner_and_is_ended_by_the_next(cluster: MemoryCluster, topic: str) -> None:
    with tidelog.Producer(cluster.bootstrap, transactional_id=topic) as first:
        first.init_transactions()
        first.begin_transaction()
        send_one(first, topic, b"prepared")
        first.prepare_transaction()
    assert values(cluster.bootstrap, topic) == []
    with tidelog.Producer(cluster.bootstrap, transactional_id=topic) as second:
        assert second.init_transactions(keep_prepared=True)
        assert second.commit_transaction(token=b"1")
    until(lambda: values(cluster.bootstrap, topic) == [b"prepared"] * 2, "the next owner commits it")


def test_a_member_whose_owner_aborts_gets_the_error_of_its_records(cluster: MemoryCluster, topic: str) -> None:
    with (
        tidelog.Producer(cluster.bootstrap, transactional_id=topic) as owner,
        tidelog.Producer(cluster.bootstrap) as task,
    ):
        owner.init_transactions()
        task.join_transaction(topic)
        task.send(topic, b"x", partition=0).result(30)
        owner.begin_transaction()
        owner.abort_transaction()
        until(lambda: state_of(cluster, topic) != "PrepareAbort", "the markers are written")
        late = task.send(topic, b"late", partition=0)
        assert isinstance(late.exception(30), tidelog.TidelogError)
        with pytest.raises(TransactionAbortableError):
            task.leave_transaction()
    assert values(cluster.bootstrap, topic) == []


# Hanging transactions.


def test_a_hanging_transaction_is_found_by_admin_and_command(cluster: MemoryCluster, topic: str) -> None:
    with (
        tidelog.Admin(cluster.bootstrap) as admin,
        tidelog.Producer(cluster.bootstrap, transactional_id=topic) as producer,
        tidelog.Producer(cluster.bootstrap) as plain,
    ):
        producer.init_transactions()
        producer.begin_transaction()
        send_one(producer, topic, b"open, and known to its coordinator")
        producer.flush()
        assert admin.find_hanging_transactions([topic], open_for=0) == []
        offset = hang(cluster, topic, b"hanging")
        plain.send(topic, b"held back", partition=0).result(30)
        producer.commit_transaction()
        (found,) = until(lambda: admin.find_hanging_transactions([topic], open_for=0), "it hangs")
        assert (found.partition, found.start_offset) == (tidelog.TopicPartition(topic, 0), offset)
        assert (found.producer_id, found.producer_epoch) == (999_999, 0)
        assert admin.find_hanging_transactions([topic], open_for="15m") == [], "it is younger than that"
        assert b"held back" not in values(cluster.bootstrap, topic)
    named = ("--topic", topic, "--bootstrap", cluster.bootstrap)
    done = commands.run("transactions", "find-hanging", "--open-for", "0s", "--output", "json", *named, code=1)
    assert [row["start_offset"] for row in done.document["hanging"]] == [offset]
    assert commands.run("transactions", "find-hanging", *named).err == "tidelog: no transaction hangs\n"
