"""Transactions of `MockProducer`: what a program with a mock sees is what it sees with a cluster."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import tidelog
from tidelog.errors import (
    InvalidTransactionStateError,
    ProducerFencedError,
    TransactionAbortableError,
    TransactionAbortedError,
    TransactionFatalError,
    TransactionTimeoutError,
)
from tidelog.testing import MockConsumer, MockProducer, SentRecord

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
GROUP = tidelog.GroupMetadata("g", "m", 1)


def values(records: list[SentRecord]) -> list[bytes | None]:
    return [record.value for record in records]


def test_a_block_commits_its_records_and_offsets() -> None:
    with MockProducer(transactional_id="t") as producer:
        with producer.transaction():
            producer.send("orders", b"1")
            producer.send_offsets({("in", 0): 5}, GROUP)
            assert producer.committed == []
            assert producer.offsets == {}
        assert values(producer.committed) == [b"1"]
        assert producer.offsets == {"g": {tidelog.TopicPartition("in", 0): tidelog.OffsetAndMetadata(5)}}
        with pytest.raises(InvalidTransactionStateError, match="begin_transaction first"):
            producer.send("orders", b"2")
        assert values(producer.history) == [b"1"]


def test_the_pipeline_of_the_examples_runs_with_mocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["consume_transform_produce.py"])
    pipeline = runpy.run_path(str(EXAMPLES / "consume_transform_produce.py"))
    consumer = MockConsumer(
        group="g", auto_offset_reset="earliest", enable_auto_commit=False, isolation="read_committed"
    )
    source, target = pipeline["SOURCE"], pipeline["TARGET"]
    consumer.add_topic(source, partitions=2)
    for number in range(4):
        consumer.add_record(source, b"%d" % number, partition=number % 2)
    consumer.subscribe([source])
    with consumer, MockProducer(transactional_id="t") as producer:
        records = consumer.poll(1)
        producer.raise_in_commit(TransactionAbortableError("the group has moved"))
        with pytest.raises(TransactionAbortableError):
            pipeline["process"](records, consumer, producer)
        assert producer.committed == []
        assert producer.offsets == {}
        pipeline["rewind"](consumer)
        again = consumer.poll(1)
        assert again == records
        pipeline["process"](again, consumer, producer)
        assert values(producer.committed) == [b"invoice of " + (record.value or b"") for record in records]
        assert {record.topic for record in producer.committed} == {target}
        offsets = {tidelog.TopicPartition(source, number): tidelog.OffsetAndMetadata(2) for number in (0, 1)}
        assert producer.offsets == {"g": offsets}


def test_an_exception_in_a_block_aborts_it() -> None:
    def run(producer: MockProducer) -> None:
        with producer.transaction():
            producer.send("orders", b"1")
            raise KeyError("x")

    with MockProducer(transactional_id="t", auto_complete=False) as producer:
        with pytest.raises(KeyError):
            run(producer)
        assert values(producer.aborted) == [b"1"]
        assert isinstance(producer.aborted[0].delivery.exception(), TransactionAbortedError)
        assert producer.committed == []


def test_a_failed_record_fails_the_commit() -> None:
    with MockProducer(transactional_id="t") as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.fail_delivery(tidelog.errors.RecordTooLargeError("over the limit"))
        producer.send("orders", b"1")
        with pytest.raises(TransactionAbortableError, match="over the limit"):
            producer.commit_transaction()
        with pytest.raises(TransactionAbortableError):
            producer.send("orders", b"2")
        producer.abort_transaction()
        with producer.transaction():
            producer.send("orders", b"3")
        assert values(producer.committed) == [b"3"]


def test_a_test_can_fence_the_producer() -> None:
    with MockProducer(transactional_id="t") as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.fail_transaction(ProducerFencedError("a newer instance"))
        with pytest.raises(ProducerFencedError):
            producer.commit_transaction()
        with pytest.raises(TransactionFatalError):
            producer.abort_transaction()


def test_a_commit_that_is_not_answered_is_repeated() -> None:
    with MockProducer(transactional_id="t") as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send("orders", b"1")
        producer.raise_in_commit(TransactionTimeoutError("no answer"))
        with pytest.raises(TransactionTimeoutError):
            producer.commit_transaction(token=b"1")
        with pytest.raises(InvalidTransactionStateError, match="commit_transaction again"):
            producer.abort_transaction()
        assert producer.commit_transaction(token=b"1")
        assert values(producer.committed) == [b"1"]
        assert producer.last_token() == b"1"
        producer.begin_transaction()
        producer.send("orders", b"1")
        assert not producer.commit_transaction(token=b"1")
        assert values(producer.aborted) == [b"1"]


def test_members_join_and_leave() -> None:
    with MockProducer() as member:
        first = member.join_transaction("job", label="task 1")
        member.send("orders", b"1")
        assert member.leave_transaction() == first
        with pytest.raises(InvalidTransactionStateError, match="join_transaction first"):
            member.send("orders", b"2")
        assert member.join_transaction("job") != first
        member.fail_transaction(tidelog.errors.RecordTooLargeError("over the limit"))
        with pytest.raises(TransactionAbortableError):
            member.leave_transaction()
        assert values(member.committed) == [b"1"]
    with MockProducer(transactional_id="job") as owner:
        with pytest.raises(InvalidTransactionStateError):
            owner.join_transaction("job")
        owner.init_transactions()
        owner.begin_transaction()
        owner.prepare_transaction()
        with pytest.raises(InvalidTransactionStateError):
            owner.send("orders", b"3")
        owner.commit_transaction(members=[first])
        assert owner.members == [(first,)]
