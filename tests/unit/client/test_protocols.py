"""Types of the public clients: options, records and protocols. mypy checks this file; it rejects an unused `ignore`, so
each one proves an error. The tests check the same at run time."""

from __future__ import annotations

import asyncio
from typing import Any, assert_type

import pytest

import tidelog
from tidelog.testing import MockAdmin, MockConsumer, MockProducer


class Order:
    def __init__(self, data: bytes) -> None:
        self.number = int(data)


def send_order(producer: tidelog.ProducerProtocol) -> int:
    return producer.send("orders", b"1", on_delivery=lambda error, metadata: None).result(timeout=1.0).offset


async def send_order_async(producer: tidelog.AsyncProducerProtocol) -> int:
    assert_type(await producer.send_and_wait("orders", b"1"), tidelog.RecordMetadata)
    assert_type(await (await producer.send_many("orders", values=[b"1"])), tidelog.BulkMetadata)
    return (await (await producer.send("orders", b"1"))).offset


def first_number(consumer: tidelog.ConsumerProtocol[str, Order]) -> int:
    return consumer.poll(0)[0].value.number


async def first_number_async(consumer: tidelog.AsyncConsumerProtocol[str, Order]) -> int:
    return (await consumer.poll(0))[0].value.number


def topic_names(admin: tidelog.AdminProtocol) -> list[str]:
    assert_type(admin.list_topics(), list[tidelog.TopicListing])
    return [topic.name for topic in admin.list_topics()]


def test_producers_and_their_mock_satisfy_their_protocols() -> None:
    options: tidelog.ProducerOptions = {"bootstrap": "localhost:1", "linger_ms": 5}
    threaded: tidelog.ProducerProtocol = tidelog.Producer(**options)
    asynchronous: tidelog.AsyncProducerProtocol = tidelog.aio.Producer(**options)
    assert isinstance(threaded, tidelog.ProducerProtocol)
    assert isinstance(asynchronous, tidelog.AsyncProducerProtocol)
    threaded.close()
    with MockProducer() as mock:
        assert send_order(mock) == 0
        assert isinstance(mock, tidelog.ProducerProtocol)


def test_consumers_and_their_mock_satisfy_their_protocols() -> None:
    consumer = tidelog.Consumer("nowhere:1", key_deserializer=bytes.decode, value_deserializer=Order)
    assert isinstance(consumer, tidelog.ConsumerProtocol)
    with pytest.raises(tidelog.TidelogError, match="nothing to read"):
        first_number(consumer)
    consumer.close(0)
    mock = MockConsumer(auto_offset_reset="earliest", key_deserializer=bytes.decode, value_deserializer=Order)
    assert_type(mock, MockConsumer[str, Order])
    mock.add_record("orders", b"42", key=b"k")
    mock.assign([("orders", 0)])
    assert first_number(mock) == 42

    async def check() -> None:
        consumer = tidelog.aio.Consumer("nowhere:1", key_deserializer=bytes.decode, value_deserializer=Order)
        assert isinstance(consumer, tidelog.AsyncConsumerProtocol)
        with pytest.raises(tidelog.TidelogError, match="nothing to read"):
            await first_number_async(consumer)
        await consumer.close(0)

    asyncio.run(check())


def test_admins_and_their_mock_satisfy_their_protocols() -> None:
    real: tidelog.AdminProtocol = tidelog.Admin("localhost:1")
    client: tidelog.AsyncAdminProtocol = tidelog.aio.Admin("localhost:1")
    mock: tidelog.AdminProtocol = MockAdmin()
    assert isinstance(real, tidelog.AdminProtocol)
    assert isinstance(client, tidelog.AsyncAdminProtocol)
    assert isinstance(mock, tidelog.AdminProtocol)
    assert_type(mock.create_topic("orders", if_not_exists=True, timeout=1.0), tidelog.CreatedTopic)
    assert_type(mock.create_topics(["more"], partial=True), tidelog.Outcomes[str, tidelog.CreatedTopic])
    assert topic_names(mock) == ["more", "orders"]
    real.close()


def test_records_have_the_types_of_the_deserializers() -> None:
    record: tidelog.ConsumerRecord[str, Order] = tidelog.ConsumerRecord("t", 0, 1, 2, "k", Order(b"7"))
    assert_type(record.value, Order)
    assert record.value.number == 7


def types_of_consumers() -> None:
    """Not called: mypy checks it."""
    assert_type(tidelog.Consumer("a"), tidelog.Consumer[bytes | None, bytes | None])
    assert_type(tidelog.Consumer("a", group="g"), tidelog.Consumer[bytes | None, bytes | None])
    assert_type(tidelog.Consumer("a", key_deserializer=bytes.decode), tidelog.Consumer[str, bytes | None])
    long = tidelog.serializers.long
    assert_type(tidelog.Consumer("a", value_deserializer=long), tidelog.Consumer[bytes | None, int])
    assert_type(tidelog.aio.Consumer("a"), tidelog.aio.Consumer[bytes | None, bytes | None])
    assert_type(MockConsumer(value_deserializer=Order), MockConsumer[bytes | None, Order])
    named: tidelog.Consumer[str, Any] = tidelog.Consumer("a", key_deserializer="str", value_deserializer="json")
    assert_type(named.poll()[0].key, str)
    options: tidelog.ConsumerOptions = {"group": "g", "value_deserializer": bytes.decode}
    tidelog.Consumer("a", **options)
    tidelog.Consumer("a").commit({("orders", 0): 5})


def wrong_options() -> None:
    """Not called: mypy reports every line."""
    tidelog.Consumer("a", max_pol_records=5)  # type: ignore[call-overload]
    tidelog.Consumer("a", max_poll_records="many")  # type: ignore[call-overload]
    tidelog.Consumer(3)  # type: ignore[call-overload]
    tidelog.aio.Consumer("a", max_pol_records=5)  # type: ignore[call-overload]
    MockConsumer(max_pol_records=5)  # type: ignore[call-overload]
    tidelog.read_arrow("t", max_pol_records=5)  # type: ignore[call-arg]
    tidelog.Producer("a", liner_ms=5)  # type: ignore[call-arg]
    tidelog.aio.Producer("a", liner_ms=5)  # type: ignore[call-arg]
    MockProducer(liner_ms=5)  # type: ignore[call-arg]
    tidelog.Admin("a", request_timeout=5)  # type: ignore[call-arg]
    MockAdmin(request_timeout=5)  # type: ignore[call-arg]


def wrong_names() -> None:
    """Not called: mypy knows every name that the packages export on first use, and no other."""
    from tidelog import Produser  # type: ignore[attr-defined]  # noqa: F401
    from tidelog.testing import MemoryClutser  # type: ignore[attr-defined]  # noqa: F401

    tidelog.Consumr("a")  # type: ignore[attr-defined]


async def signatures_of_the_admins(admin: tidelog.Admin, client: tidelog.aio.Admin) -> None:
    """mypy sees the signatures of the core in both clients; this is not run."""
    assert_type(admin.create_topic("orders", timeout=1.0), tidelog.CreatedTopic)
    assert_type(await client.create_topic("orders", timeout=1.0), tidelog.CreatedTopic)
    admin.create_topic("orders", timeout_ms=1)  # type: ignore[call-arg]
    admin.create_topic(1)  # type: ignore[arg-type]
