"""`tidelog.Consumer` as a user has it, on real threads, without a cluster: options, errors, closing."""

from __future__ import annotations

import asyncio
import re
import socket
import time

import pytest
from support.async_tests import asyncio_test

import tidelog
from tidelog.client.consumer.arguments import read_partitions, read_times, read_topics
from tidelog.client.consumer.errors import ConsumerClosedError, SubscriptionError
from tidelog.client.errors import NoClusterError, OptionError
from tidelog.client.record import TopicPartition
from tidelog.testing import MemoryCluster


@pytest.fixture
def nowhere() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_the_first_poll_reports_an_unreachable_cluster_without_waiting(nowhere: str) -> None:
    with tidelog.Consumer(nowhere, group="g", bootstrap_wait_ms=0) as consumer:
        consumer.subscribe("t")
        for _ in range(2):
            with pytest.raises(NoClusterError, match=f"no cluster at {nowhere}"):
                consumer.poll(20)
        with pytest.raises(NoClusterError):
            next(iter(consumer))
    with tidelog.Consumer(nowhere, bootstrap_wait_ms=0) as alone, pytest.raises(NoClusterError):
        alone.assign([("t", 0)])


@asyncio_test
async def test_the_same_on_an_event_loop(nowhere: str) -> None:
    async with tidelog.aio.Consumer(nowhere, group="g", bootstrap_wait_ms=0) as consumer:
        await consumer.subscribe("t")
        with pytest.raises(NoClusterError):
            await consumer.poll(20)
    with pytest.raises(ConsumerClosedError):
        await consumer.poll()
    await consumer.close()


def test_a_poll_that_was_cut_short_does_not_stand_in_the_way_of_the_next() -> None:
    """The thread is held while both arrive: it hears of the first, of its end and of the second at once."""

    async def work(bootstrap: str) -> None:
        async with tidelog.aio.Consumer(bootstrap, auto_offset_reset="earliest") as consumer:
            await consumer.assign([("t", 0)])
            assert [record.value for record in await consumer.poll(20)] == [b"1"]
            for _ in range(20):
                consumer._frontend.host.io.call_soon(time.sleep, 0.01)
                first = asyncio.ensure_future(consumer.poll(20))
                await asyncio.sleep(0)
                with pytest.raises(SubscriptionError, match="another task"):
                    await consumer.poll(0)
                first.cancel()
                await asyncio.wait([first])
                assert await consumer.poll(0.001) == []
            assert await consumer.position(("t", 0)) == 1

    with MemoryCluster(brokers=1) as cluster:
        with tidelog.Admin(cluster.bootstrap) as admin:
            admin.create_topic("t", partitions=1)
        with tidelog.Producer(cluster.bootstrap) as producer:
            producer.send("t", value=b"1", partition=0).result(20)
        asyncio.run(work(cluster.bootstrap))


def test_a_closed_consumer_says_so_and_closes_twice(nowhere: str) -> None:
    consumer = tidelog.Consumer(nowhere)
    consumer.close()
    consumer.close()
    consumer.wakeup()
    with pytest.raises(ConsumerClosedError):
        consumer.assignment()


@pytest.mark.requirement("a:E-39", "b:G-01")
def test_options_have_two_spellings_and_wrong_ones_are_named(nowhere: str) -> None:
    with tidelog.Consumer({"bootstrap.servers": nowhere, "group.id": "g", "max.poll.records": "7"}) as consumer:
        assert (consumer.options.group, consumer.options.max_poll_records) == ("g", 7)
        assert consumer.options.bootstrap == (nowhere,)
    with pytest.raises(OptionError, match="max_poll_recordz"):
        tidelog.Consumer(nowhere, max_poll_recordz=1)  # type: ignore[call-overload]
    with pytest.raises(OptionError, match="auto_offset_reset"):
        tidelog.Consumer(nowhere, auto_offset_reset="yesterday")
    with pytest.raises(OptionError, match="value_deserializer"):
        tidelog.Consumer(nowhere, value_deserializer="avro")  # type: ignore[call-overload]
    with pytest.raises(OptionError, match="internal topics"):
        tidelog.Consumer({"bootstrap.servers": nowhere, "exclude.internal.topics": False})


def test_arguments_are_read_as_users_write_them() -> None:
    assert read_topics("a", None) == (("a",), "")
    assert read_topics(["a", "b", "a"], None) == (("a", "b"), "")
    assert read_topics(re.compile("x.*"), None) == ((), "x.*")
    assert read_topics(None, "x.*") == ((), "x.*")
    with pytest.raises(SubscriptionError, match="topic name is text, not 3"):
        read_topics([3], None)  # type: ignore[list-item]
    assert read_partitions([("t", 1), TopicPartition("t", 1)]) == [TopicPartition("t", 1)]
    for wrong in (["t"], [("t", "1")], [("t", True)], [("t", 1, 2)]):
        with pytest.raises(SubscriptionError, match="TopicPartition"):
            read_partitions(wrong)  # type: ignore[arg-type]
    assert read_times({("t", 0): "1s"}, (), (), 5_000) == {TopicPartition("t", 0): 4_000}
    assert read_times(7, [("t", 0)], (), 5_000) == {TopicPartition("t", 0): 7}
