from __future__ import annotations

import threading
from typing import Any

import pytest

import tidelog
from tidelog.client.errors import BufferFullError, BulkError, DeliveryTimeoutError, ProducerClosedError
from tidelog.client.producer.partitioners import partition_of
from tidelog.model.errors import RecordTooLargeError, UnknownTopicOrPartitionError
from tidelog.testing import MockProducer


def test_records_are_kept_and_stored_at_once() -> None:
    with MockProducer(partitions=4) as producer:
        first = producer.send("orders", "value", key="k", headers={"trace": b"1"}, timestamp_ms=5)
        producer.send("orders", b"more", key="k")
        assert first.done()
        where = partition_of(b"k", 4)
        assert first.result() == ("orders", where, 0, 5)
        sent = producer.history[0]
        assert (sent.topic, sent.partition, sent.key, sent.value) == ("orders", where, b"k", b"value")
        assert (sent.headers, sent.timestamp_ms, sent.offset) == ((("trace", b"1"),), 5, 0)
        assert producer.history[1].offset == 1
    assert producer.is_closed
    with pytest.raises(ProducerClosedError):
        producer.send("orders", b"late")


def test_records_end_by_hand_in_order() -> None:
    producer = MockProducer(auto_complete=False)
    reported: list[Any] = []
    deliveries = [producer.send("orders", b"%d" % n, on_delivery=lambda *end: reported.append(end)) for n in range(3)]
    assert producer.waiting == 3
    assert not any(one.done() for one in deliveries)
    with pytest.raises(TimeoutError):
        deliveries[0].result(0.01)
    assert producer.complete_next()
    assert deliveries[0].result().offset == 0
    failure = DeliveryTimeoutError("too late", was_sent=True)
    assert producer.fail_next(failure)
    assert deliveries[1].exception() is failure
    assert producer.history[1].offset is None
    producer.flush()
    assert deliveries[2].result().offset == 1  # a record that failed has no offset
    assert [error for error, _ in reported] == [None, failure, None]
    assert not producer.complete_next()
    assert producer.metrics()["records_stored"] == 2
    assert producer.metrics()["records_failed"] == 1


def test_a_thread_that_waits_for_a_delivery_is_woken() -> None:
    producer = MockProducer(auto_complete=False)
    delivery = producer.send("orders", b"x")
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.append(delivery.result(30).offset))
    waiting.start()
    producer.complete_next()
    waiting.join(30)
    assert found == [0]


def test_errors_are_raised_where_the_real_client_raises_them() -> None:
    producer = MockProducer()
    producer.raise_in_send(BufferFullError("no room"))
    with pytest.raises(BufferFullError):
        producer.send("orders", b"x")
    assert producer.history == []
    failure = DeliveryTimeoutError("too late", was_sent=False)
    producer.fail_delivery(failure, times=2)
    assert producer.send("orders", b"x").exception() is failure
    with pytest.raises(BulkError):
        producer.send_many("orders", values=[b"a", b"b"]).result()
    assert producer.send("orders", b"x").result().offset == 1
    with pytest.raises(TypeError, match=r"tidelog\.serializers"):
        producer.send("orders", 7)
    with pytest.raises(RecordTooLargeError):
        producer.send("orders", bytes(2 << 20))
    with pytest.raises(UnknownTopicOrPartitionError):
        producer.send("orders", b"x", partition=1)


def test_many_records_are_taken_one_by_one() -> None:
    producer = MockProducer(partitions=2, value_serializer=tidelog.serializers.json)
    done = producer.send_many("orders", [{"value": {"n": 1}, "partition": 0}, {"value": {"n": 2}, "partition": 1}])
    assert done.result().count == 2
    assert [(one.partition, one.value) for one in producer.history] == [(0, b'{"n":1}'), (1, b'{"n":2}')]
    assert producer.partitions_for("orders") == [("orders", 0), ("orders", 1)]
    producer.clear()
    assert producer.history == []


def test_what_waits_at_a_close_without_time_has_failed() -> None:
    producer = MockProducer(auto_complete=False)
    delivery = producer.send("orders", b"x")
    producer.close(0)
    assert isinstance(delivery.exception(), ProducerClosedError)
