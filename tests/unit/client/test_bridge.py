"""Jobs of a core that run for a plain thread, for another event loop and for the core's own."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from support.async_tests import asyncio_test

from tidelog.client.bridge import Bridge, call_user, wait, wait_async
from tidelog.client.errors import ClientClosedError
from tidelog.model.errors import CallTimeoutError

LONG_S = 30.0


@pytest.fixture
def bridge() -> Iterator[Bridge]:
    loop = asyncio.new_event_loop()
    made = Bridge(loop)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield made
    loop.call_soon_threadsafe(loop.stop)
    thread.join(LONG_S)
    loop.close()


async def answer(value: int) -> int:
    await asyncio.sleep(0)
    return value


async def fail() -> None:
    raise KeyError("a job's error")


async def until_set(event: threading.Event) -> None:
    async with asyncio.timeout(LONG_S):
        while not event.is_set():  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.001)


class Hanging:
    """A job that ends only by cancellation."""

    def __init__(self) -> None:
        self.is_running = threading.Event()
        self.is_cancelled = threading.Event()

    async def run(self) -> None:
        try:
            self.is_running.set()
            await asyncio.sleep(LONG_S)
        finally:
            self.is_cancelled.set()


def test_thread_gets_the_result_and_the_error_of_a_job(bridge: Bridge) -> None:
    assert bridge.run(answer(5)) == 5
    with pytest.raises(KeyError, match="a job's error"):
        bridge.run(fail())


def test_coroutine_gets_the_result_and_the_error_of_a_job(bridge: Bridge) -> None:
    async def main() -> None:
        assert await bridge.run_async(answer(5)) == 5
        with pytest.raises(KeyError, match="a job's error"):
            await bridge.run_async(fail())

    asyncio.run(main())
    bridge.run(main())  # on the bridge's own loop


def test_timeout_cancels_the_job(bridge: Bridge) -> None:
    hanging = Hanging()
    with pytest.raises(CallTimeoutError, match=r"not done in 0\.01 s"):
        bridge.run(hanging.run(), timeout=0.01)
    assert hanging.is_cancelled.wait(LONG_S)

    async def main() -> None:
        hanging = Hanging()
        with pytest.raises(CallTimeoutError, match=r"not done in 0\.01 s"):
            await bridge.run_async(hanging.run(), timeout=0.01)
        await until_set(hanging.is_cancelled)

    asyncio.run(main())


def test_timeout_error_of_a_job_is_not_the_callers(bridge: Bridge) -> None:
    async def job() -> None:
        raise TimeoutError("the job's own")

    with pytest.raises(TimeoutError, match="the job's own"):
        bridge.run(job(), timeout=LONG_S)
    with pytest.raises(TimeoutError, match="the job's own"):
        asyncio.run(bridge.run_async(job(), timeout=LONG_S))


def test_ctrl_c_ends_the_wait_and_cancels_the_job(bridge: Bridge) -> None:
    hanging = Hanging()

    def interrupt() -> None:
        hanging.is_running.wait(LONG_S)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        bridge.run(hanging.run())
    assert hanging.is_cancelled.wait(LONG_S)


@asyncio_test
async def test_cancelled_caller_cancels_the_job(bridge: Bridge) -> None:
    hanging = Hanging()
    task = asyncio.create_task(bridge.run_async(hanging.run()))
    await until_set(hanging.is_running)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_set(hanging.is_cancelled)


def test_callers_learn_that_the_bridge_has_ended(bridge: Bridge) -> None:
    hanging = Hanging()

    def end() -> None:
        hanging.is_running.wait(LONG_S)
        bridge.loop.call_soon_threadsafe(bridge.end)

    threading.Thread(target=end).start()
    with pytest.raises(ClientClosedError):
        bridge.run(hanging.run())
    with pytest.raises(ClientClosedError):
        bridge.run(answer(1))
    with pytest.raises(ClientClosedError):
        asyncio.run(bridge.run_async(answer(1)))


def test_user_code_runs_on_the_waiting_thread(bridge: Bridge) -> None:
    threads: list[int] = []

    def callback(value: int) -> int:
        threads.append(threading.get_ident())
        return bridge.run(answer(value + 1))  # calls nest

    async def job() -> Any:
        return await call_user(callback, 1) + await call_user(callback, 10)

    assert bridge.run(job()) == 13
    assert threads == [threading.get_ident()] * 2


def test_user_code_runs_in_the_waiting_task(bridge: Bridge) -> None:
    tasks: list[object] = []

    async def callback(value: int) -> int:
        tasks.append(asyncio.current_task())
        return await bridge.run_async(answer(value + 1))

    async def job() -> Any:
        return await call_user(callback, 1)

    async def main() -> None:
        assert await bridge.run_async(job()) == 2
        assert tasks == [asyncio.current_task()]

    asyncio.run(main())
    tasks.clear()
    bridge.run(main())


@pytest.mark.parametrize("is_async", [False, True])
def test_error_of_user_code_goes_through_the_job(bridge: Bridge, is_async: bool) -> None:
    is_cleaned_up = threading.Event()

    def callback() -> None:
        raise KeyError("a callback's error")

    async def job() -> None:
        try:
            await call_user(callback)
        finally:
            is_cleaned_up.set()

    with pytest.raises(KeyError, match="a callback's error"):
        asyncio.run(bridge.run_async(job())) if is_async else bridge.run(job())
    assert is_cleaned_up.is_set()


def test_ctrl_c_in_user_code_cancels_the_job(bridge: Bridge) -> None:
    is_cancelled = threading.Event()

    def callback() -> None:
        raise KeyboardInterrupt

    async def job() -> None:
        try:
            await call_user(callback)
        except asyncio.CancelledError:
            is_cancelled.set()
            raise

    with pytest.raises(KeyboardInterrupt):
        bridge.run(job())
    assert is_cancelled.wait(LONG_S)
    assert bridge.run(answer(1)) == 1, "the loop runs on"


def test_user_code_cannot_be_called_after_the_call(bridge: Bridge) -> None:
    tasks: list[asyncio.Task[Any]] = []
    has_ended = threading.Event()

    async def later() -> None:
        await until_set(has_ended)
        await call_user(lambda: None)

    async def job() -> None:
        tasks.append(asyncio.create_task(later()))

    async def outcome() -> None:
        with suppress(asyncio.CancelledError):
            await tasks[0]

    bridge.run(job())
    has_ended.set()
    with pytest.raises(RuntimeError, match="has ended"):
        bridge.run(outcome())


def test_signal_ends_a_wait_and_a_timeout_unregisters_it() -> None:
    signals: list[Callable[[], object]] = []

    def register(call: Callable[[], object]) -> bool:
        signals.append(call)
        return True

    assert not wait(register, signals.remove, 0.001)
    assert signals == []
    threading.Timer(0.01, lambda: signals[0]()).start()
    assert wait(register, signals.remove, LONG_S)
    assert wait(lambda _: False, signals.remove, LONG_S), "nothing to wait for"

    async def main() -> None:
        signals.clear()
        threading.Timer(0.01, lambda: signals[0]()).start()
        await wait_async(register, signals.remove)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await wait_async(register, signals.remove)
        assert len(signals) == 1

    asyncio.run(main())
