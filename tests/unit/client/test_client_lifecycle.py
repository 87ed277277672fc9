"""How clients end: closed in a callback, interrupted, dropped without `close`. No call hangs, every record gets its
outcome, and nothing of an ended client stays behind."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing.util
import signal
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest
from support.clusters.waiting import until

import tidelog
from tidelog.client import io_thread
from tidelog.testing import MemoryCluster

WAIT_S = 60.0
T = TypeVar("T")


@pytest.fixture(scope="module")
def cluster() -> Iterator[MemoryCluster]:
    with MemoryCluster(brokers=1) as started:
        with tidelog.Admin(started.bootstrap) as admin:
            admin.create_topic("t", partitions=2)
        yield started


@pytest.mark.parametrize("how", ["on_delivery", "add_done_callback", "with"])
def test_a_delivery_callback_closes_its_producer(cluster: MemoryCluster, how: str) -> None:
    """The callback thread serves all producers: one that waits for itself would stop them all."""
    closed, other_called = threading.Event(), threading.Event()
    producer = tidelog.Producer(cluster.bootstrap)

    def close(*_: object) -> None:
        if how == "with":
            with producer:
                pass
        producer.close()
        closed.set()

    if how == "add_done_callback":
        producer.send("t", b"1").add_done_callback(close)
    else:
        producer.send("t", b"1", on_delivery=close)
    assert closed.wait(WAIT_S)
    with tidelog.Producer(cluster.bootstrap) as other:
        other.send("t", b"2", on_delivery=lambda _error, _metadata: other_called.set())
        other.flush(WAIT_S)
        assert other_called.is_set()


def test_ctrl_c_in_close_gives_every_record_an_outcome(cluster: MemoryCluster) -> None:
    outcomes: list[Exception | None] = []
    producer = tidelog.Producer(cluster.bootstrap)
    producer.send("t", b"1").result(WAIT_S)
    cluster.pause(1)
    try:
        delivery = producer.send("t", b"2", on_delivery=lambda error, _metadata: outcomes.append(error))
        timer = threading.Timer(0.5, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            producer.close()
        timer.join()
        error = delivery.exception(WAIT_S)
        assert isinstance(error, tidelog.errors.ProducerClosedError)
        assert error.was_sent
        until(lambda: outcomes == [error], "its callback has run")
    finally:
        cluster.resume(1)


# Dropped without `close`.


def collected(work: Callable[[], T]) -> T:
    result = work()
    gc.collect()
    return result


def test_a_consumer_that_is_dropped_leaves_its_group(cluster: MemoryCluster) -> None:
    def poll_once() -> None:
        consumer = tidelog.Consumer(cluster.bootstrap, group="dropped", auto_offset_reset="earliest")
        consumer.subscribe("t")
        while not consumer.assignment():
            consumer.poll(0.1)

    with tidelog.Admin(cluster.bootstrap) as admin:
        with pytest.warns(ResourceWarning, match="unclosed consumer"):
            collected(poll_once)
        until(lambda: not admin.describe_group("dropped").members, "it has left")


def test_a_producer_that_is_dropped_delivers_its_records_and_ends(cluster: MemoryCluster) -> None:
    def send() -> tidelog.Delivery:
        return tidelog.Producer(cluster.bootstrap, linger_ms=200).send("t", b"1")

    with pytest.warns(ResourceWarning, match="unclosed producer"):
        delivery = collected(send)
    assert delivery.result(WAIT_S).offset >= 0
    until(lambda: io_thread._current is None, "the IO thread has ended")


@pytest.mark.parametrize("kind", [tidelog.Admin, tidelog.aio.Admin, tidelog.aio.Producer, tidelog.aio.Consumer])
def test_every_client_that_is_dropped_releases_the_io_thread(
    cluster: MemoryCluster, kind: Callable[[str], Any]
) -> None:
    def use() -> None:
        client = kind(cluster.bootstrap)
        if kind is tidelog.Admin:
            client.list_topics()
        elif kind is tidelog.aio.Admin:
            asyncio.run(client.list_topics())
        else:
            asyncio.run(client.partitions_for("t"))

    with pytest.warns(ResourceWarning, match="unclosed"):
        collected(use)
    until(lambda: io_thread._current is None, "the IO thread has ended")


def test_exit_hooks_do_not_accumulate(cluster: MemoryCluster) -> None:
    hooks: list[int] = []
    for _ in range(4):
        with tidelog.Admin(cluster.bootstrap) as admin:
            admin.list_topics()
        hooks.append(len(multiprocessing.util._finalizer_registry))  # type: ignore[attr-defined]
    assert hooks[0] == hooks[-1]


def test_wakeup_of_a_consumer_that_another_thread_closes_raises_nothing(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tidelog.Consumer(cluster.bootstrap) as consumer:
        host = consumer._frontend.host

        def end(job: Coroutine[Any, Any, object]) -> None:
            host.io = None  # as `close` does it
            job.close()
            raise tidelog.errors.ClientClosedError("the thread has ended")

        with monkeypatch.context() as patch:
            io = host.io
            patch.setattr(io, "start", end)
            consumer.wakeup()
        host.io = io


# Callbacks.


def test_an_interceptor_that_exits_skips_no_callback(cluster: MemoryCluster, caplog: pytest.LogCaptureFixture) -> None:
    class Leaving:
        def on_acknowledgement(self, error: Exception | None, metadata: tidelog.RecordMetadata) -> None:
            assert error is None
            raise SystemExit(f"enough of {metadata.topic}")

    called = threading.Event()
    with tidelog.Producer(cluster.bootstrap, interceptors=[Leaving()]) as producer:
        producer.send("t", b"1", on_delivery=lambda _error, _metadata: called.set())
        producer.flush(WAIT_S)
        assert called.is_set()
    assert "enough of t" in caplog.text


def test_an_error_of_a_done_callback_is_logged_whether_the_record_is_done_or_not(
    cluster: MemoryCluster, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_delivery: object) -> None:
        raise RuntimeError("of the program")

    with tidelog.Producer(cluster.bootstrap) as producer:
        delivery = producer.send("t", b"1")
        delivery.result(WAIT_S)
        delivery.add_done_callback(fail)
        bulk = producer.send_many("t", values=[b"1"])
        bulk.result(WAIT_S)
        bulk.add_done_callback(fail)
    assert caplog.text.count("RuntimeError: of the program") == 2


@pytest.mark.parametrize("wrong", [3, "name"])
def test_a_callback_that_is_no_function_is_rejected_on_every_path(cluster: MemoryCluster, wrong: Any) -> None:
    with tidelog.Producer(cluster.bootstrap) as producer:
        producer.send("t", b"1").result(WAIT_S)
        for _ in range(2):  # the second one goes to an open batch
            with pytest.raises(TypeError, match="on_delivery is a function"):
                producer.send("t", b"1", on_delivery=wrong)


def test_a_coroutine_function_is_no_delivery_callback(cluster: MemoryCluster) -> None:
    async def on_delivery(_error: object, _metadata: object) -> None: ...

    async def send() -> None:
        async with tidelog.aio.Producer(cluster.bootstrap) as producer:
            with pytest.raises(TypeError, match="plain function"):
                await producer.send("t", b"1", on_delivery=on_delivery)

    asyncio.run(send())
    with pytest.raises(TypeError, match="plain function"):
        tidelog.aio.Producer(cluster.bootstrap, on_delivery=on_delivery)


def test_callbacks_run_on_the_second_loop_if_the_first_has_stopped(cluster: MemoryCluster) -> None:
    """As in a notebook, or with `run_until_complete`: the first loop is stopped, not closed."""
    called: list[str] = []
    producer = tidelog.aio.Producer(cluster.bootstrap, linger_ms=50)
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    try:
        first.run_until_complete(producer.send("t", b"1", on_delivery=lambda _error, _metadata: called.append("first")))

        async def flush() -> None:
            await producer.send("t", b"2", on_delivery=lambda _error, _metadata: called.append("second"))
            async with asyncio.timeout(WAIT_S):
                await producer.flush()
                assert sorted(called) == ["first", "second"]
                await producer.close()

        second.run_until_complete(flush())
    finally:
        first.close()
        second.close()


# Errors of many records.


def test_an_error_that_many_records_share_collects_no_tracebacks(cluster: MemoryCluster) -> None:
    with tidelog.Producer(cluster.bootstrap, linger_ms=10_000) as producer:
        producer.partitions_for("t")
        deliveries = [producer.send("t", b"1", partition=0) for _ in range(20)]
        producer.close(timeout=0)
    shared = deliveries[0].exception(WAIT_S)
    assert isinstance(shared, tidelog.errors.ProducerClosedError)
    for delivery in deliveries:
        with pytest.raises(tidelog.errors.ProducerClosedError) as raised:
            delivery.result(WAIT_S)
        assert raised.value is not shared
        assert len(traceback.extract_tb(raised.value.__traceback__)) <= 3
    assert shared.__traceback__ is None


# Timeouts.


def test_flush_of_nothing_takes_no_time_and_a_pending_record_is_reported(cluster: MemoryCluster) -> None:
    with tidelog.Producer(cluster.bootstrap, linger_ms=60_000) as producer:
        producer.flush(0)
        producer.send("t", b"1").add_done_callback(lambda _delivery: None)
        with pytest.raises(tidelog.errors.FlushTimeoutError, match="1 records") as raised:
            producer.flush(0)
        assert raised.value.left == 1
        producer.flush(WAIT_S)
        producer.flush(0)
        assert producer.partitions_for("t", timeout=0) == [("t", 0), ("t", 1)]


@pytest.mark.parametrize("wrong", [-1, -0.5, float("nan"), True, "1"])
def test_a_timeout_that_cannot_be_meant_is_rejected(cluster: MemoryCluster, wrong: Any) -> None:
    with (
        tidelog.Producer(cluster.bootstrap) as producer,
        tidelog.Admin(cluster.bootstrap) as admin,
        tidelog.Consumer(cluster.bootstrap) as consumer,
    ):
        calls: list[Callable[[], object]] = [
            lambda: producer.flush(wrong),
            lambda: producer.close(wrong),
            lambda: producer.partitions_for("t", wrong),
            lambda: admin.list_topics(timeout=wrong),
            lambda: consumer.poll(wrong),
            lambda: consumer.close(wrong),
        ]
        for call in calls:
            with pytest.raises(tidelog.errors.InvalidRequestError, match="timeout="):
                call()
