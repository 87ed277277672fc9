"""Clients that are used as they should not be: by several at once, closed under somebody's hands, from callbacks that
end the thread. Every call ends, with a result or with an error that says what is wrong."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.async_tests import asyncio_test
from support.clusters.waiting import until

import tidelog
from tidelog.client import io_thread
from tidelog.client.consumer.errors import ConcurrentUseError, ConsumerClosedError
from tidelog.client.errors import ProducerClosedError
from tidelog.model.errors import InvalidRequestError, TidelogError
from tidelog.testing import MemoryCluster

WAIT_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[MemoryCluster]:
    with MemoryCluster(brokers=1) as made:
        with tidelog.Admin(made.bootstrap) as admin:
            admin.create_topic("t", partitions=2)
        yield made


@pytest.fixture
def keeper(cluster: MemoryCluster) -> Iterator[tidelog.Admin]:
    """Somebody else who uses the IO thread all the time."""
    with tidelog.Admin(cluster.bootstrap) as admin:
        admin.list_topics()
        yield admin
        assert "t" in {topic.name for topic in admin.list_topics()}, "it works still"


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def ended(thread: threading.Thread) -> bool:
    thread.join(WAIT_S)
    return not thread.is_alive()


def test_another_thread_may_look_at_the_metrics_of_a_consumer_that_polls(cluster: MemoryCluster) -> None:
    with tidelog.Consumer(cluster.bootstrap, group="metrics") as consumer:
        consumer.subscribe("t")
        thread, found = in_thread(lambda: consumer.poll(60))
        until(lambda: consumer.metrics()["polls"] >= 1, "it polls")
        assert not found
        consumer.wakeup()
        assert ended(thread)
    assert consumer.metrics()["polls"] >= 1


def test_a_consumer_cannot_be_closed_by_another_thread_and_goes_on(
    cluster: MemoryCluster, keeper: tidelog.Admin
) -> None:
    with tidelog.Consumer(cluster.bootstrap) as consumer:
        consumer.assign([("t", 0)])
        thread, found = in_thread(lambda: consumer.poll(60))
        until(lambda: consumer.metrics()["polls"] >= 1, "it polls")
        with pytest.raises(ConcurrentUseError, match="another thread uses this consumer"):
            consumer.close()
        assert thread.is_alive()
        consumer.wakeup()
        assert ended(thread)
        assert isinstance(found[0], tidelog.errors.WakeupError)
        assert consumer.assignment() == {("t", 0)}


@pytest.mark.parametrize("with_others", [True, False])
@asyncio_test
async def test_a_task_that_reads_hears_that_another_one_has_closed_the_consumer(
    cluster: MemoryCluster, with_others: bool
) -> None:
    other = tidelog.aio.Admin(cluster.bootstrap)
    if with_others:
        await other.list_topics()
    consumer = tidelog.aio.Consumer(cluster.bootstrap, group="closed")
    await consumer.subscribe("t")

    async def read() -> None:
        async for _ in consumer:
            pass

    reading = asyncio.create_task(read())
    while consumer.metrics()["polls"] < 1:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)
    await consumer.close()
    with pytest.raises(ConsumerClosedError):
        async with asyncio.timeout(WAIT_S):
            await reading
    core = consumer._frontend.host.core
    assert core is not None
    assert core._membership is not None
    assert not core._membership.is_running, "it has not joined again"
    await other.close()


@asyncio_test
async def test_closing_by_two_tasks_at_once_ends_it_once(cluster: MemoryCluster, keeper: tidelog.Admin) -> None:
    for _ in range(3):
        consumer = tidelog.aio.Consumer(cluster.bootstrap, group="twice")
        await consumer.subscribe("t")
        await consumer.poll(0.01)
        await asyncio.gather(consumer.close(), consumer.close())
        producer = tidelog.aio.Producer(cluster.bootstrap)
        await producer.send("t", b"1")
        await asyncio.gather(producer.close(), producer.close(), producer.close())
        admin = tidelog.aio.Admin(cluster.bootstrap)
        await admin.list_topics()
        first = asyncio.create_task(admin.close())
        await asyncio.sleep(0)
        await admin.close()
        assert first.done(), "the second one waits for the first"
        assert keeper.list_topics()


def test_threads_that_close_one_producer_together_end_it_once(cluster: MemoryCluster, keeper: tidelog.Admin) -> None:
    closed: list[int] = []

    class Counting:
        def close(self) -> None:
            closed.append(1)

    for _ in range(3):
        closed.clear()
        producer = tidelog.Producer(cluster.bootstrap, interceptors=[Counting()])
        delivery = producer.send("t", b"1")

        def close(producer: tidelog.Producer = producer, delivery: tidelog.Delivery = delivery) -> bool:
            producer.close()
            return delivery.done()

        threads = [in_thread(close) for _ in range(4)]
        assert all(ended(thread) for thread, _ in threads)
        assert [found for _, found in threads] == [[True]] * 4, "each of them waits for the end"
        assert delivery.result(0).offset >= 0
        assert closed == [1]


def test_a_producer_that_is_closed_under_the_hands_of_its_senders_ends_every_call(cluster: MemoryCluster) -> None:
    for attempt in range(6):
        producer = tidelog.Producer(cluster.bootstrap, buffer_memory=2 << 20)

        def send(producer: tidelog.Producer = producer) -> list[Any]:
            deliveries = []
            try:
                while True:
                    deliveries.append(producer.send("t", b"x" * 1_000))
            except ProducerClosedError:
                return deliveries

        threads = [in_thread(send) for _ in range(4)]
        if attempt % 2:
            time.sleep(0.05)
        producer.close(timeout=0)
        for thread, found in threads:
            assert ended(thread), "send has ended"
            assert isinstance(found[0], list), repr(found[0])
            for delivery in found[0]:
                assert delivery.exception(WAIT_S) is None or isinstance(delivery.exception(0), ProducerClosedError)


def test_a_waiting_call_fails_when_the_thread_ends() -> None:
    """The last release ends it, though another client may just be asking for something."""

    class Owner:
        def at_exit(self, deadline_s: float) -> None: ...
        def forked(self) -> None: ...

    owner = Owner()
    host = io_thread.acquire(owner)

    async def long() -> None:
        await asyncio.sleep(3_600)

    thread, found = in_thread(lambda: host.run(long()))
    host.call_soon(time.sleep, 0.3)  # so that the next job arrives, and is not begun
    late, output = in_thread(lambda: host.run(long()))
    until(lambda: len(host._jobs) == 2, "both wait")
    host.release(owner)
    assert ended(thread)
    assert ended(late)
    assert isinstance(found[0], TidelogError), repr(found[0])
    assert isinstance(output[0], TidelogError), repr(output[0])
    with pytest.raises(TidelogError, match="closed"):
        host.run(long())


def test_a_callback_that_ends_its_thread_ends_nothing_else(
    cluster: MemoryCluster, caplog: pytest.LogCaptureFixture
) -> None:
    def leave(_error: object, _metadata: object) -> None:
        sys.exit("enough")

    reported: list[object] = []
    with tidelog.Producer(cluster.bootstrap) as producer:
        for _ in range(3):
            producer.send("t", b"1", on_delivery=leave)
            producer.send("t", b"2", on_delivery=lambda error, _: reported.append(error))
            producer.flush(WAIT_S)
    assert reported == [None] * 3
    assert "a callback failed" in caplog.text


def test_a_commit_callback_that_fails_costs_no_record(cluster: MemoryCluster) -> None:
    """What was handed over while it was called is given out all the same."""
    with tidelog.Admin(cluster.bootstrap) as admin:
        admin.create_topic("callbacks", partitions=1)
    with tidelog.Producer(cluster.bootstrap) as producer:
        for number in range(30):
            producer.send("callbacks", b"%d" % number).result(WAIT_S)

    def fail() -> None:
        raise RuntimeError("of the program")

    values: list[bytes | None] = []
    failures = 0
    with tidelog.Consumer(
        cluster.bootstrap, group="callbacks", auto_offset_reset="earliest", max_partition_fetch_bytes=1
    ) as consumer:
        consumer.subscribe("callbacks")
        core = consumer._frontend.host.core
        assert core is not None
        put = consumer._frontend.buffer.put

        def put_while_a_commit_ends(pieces: Any) -> None:
            put(pieces)
            core._commits._callbacks.append(fail)
            core._set_attention()

        consumer._frontend.buffer.put = put_while_a_commit_ends  # type: ignore[method-assign]
        end_s = time.monotonic() + WAIT_S
        while len(values) < 30 and time.monotonic() < end_s:
            try:
                values += [record.value for record in consumer.poll(0.2)]
            except RuntimeError:
                failures += 1
        core._commits._callbacks.clear()
    assert failures > 0
    assert values == [b"%d" % number for number in range(30)]


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "7"])
def test_a_number_of_records_that_cannot_be_meant_is_refused(cluster: MemoryCluster, wrong: Any) -> None:
    with tidelog.Consumer(cluster.bootstrap) as consumer:
        consumer.assign([("t", 0)])
        with pytest.raises(InvalidRequestError, match="max_records"):
            consumer.poll(0, wrong)
        with pytest.raises(InvalidRequestError, match="max_records"):
            consumer._poll_parts(0, wrong)


@pytest.mark.parametrize("wrong", [1.5, True, "7", None, -1, 1 << 63])
def test_an_offset_that_cannot_be_meant_is_refused_and_harms_nothing(cluster: MemoryCluster, wrong: Any) -> None:
    with tidelog.Consumer(cluster.bootstrap, group="offsets", enable_auto_commit=False) as consumer:
        consumer.assign([("t", 0)])
        calls: list[Callable[[], None]] = [
            lambda: consumer.seek(("t", 0), wrong),
            lambda: consumer.commit({("t", 0): wrong}),
            lambda: consumer.commit_async({("t", 0): wrong}),
            lambda: consumer.commit({("t", 0): tidelog.OffsetAndMetadata(wrong)}),
        ]
        for call in calls:
            with pytest.raises(InvalidRequestError, match=r"t-0: .* offset"):
                call()
        consumer.poll(0)
        assert consumer.committed(("t", 0)) == {("t", 0): None}
