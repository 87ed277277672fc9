"""A wait that can be interrupted, and the cancellations that it must not take for its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from support.async_tests import inside

from tidelog.rpc.interruption import InterruptedWaitError, Interruption, OperationCancelledError

LIMIT_S = 10


def run(job: Callable[[Interruption], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await job(Interruption())

    asyncio.run(limited())


async def _for_ever() -> None:
    await asyncio.get_running_loop().create_future()


async def _begun(interruption: Interruption, operation: Callable[[], Awaitable[object]]) -> asyncio.Task[object]:
    """A task that waits, and has come that far."""
    task = asyncio.get_running_loop().create_task(interruption.guard(operation))
    await asyncio.sleep(0)
    return task


@inside(run)
async def test_an_outcome_or_an_error_of_the_operation_comes_through(interruption: Interruption) -> None:
    async def double(value: int) -> int:
        await asyncio.sleep(0)
        return 2 * value

    async def fail() -> None:
        raise ValueError("of the operation")

    assert await interruption.guard(double, 21) == 42
    with pytest.raises(ValueError, match="of the operation"):
        await interruption.guard(fail)
    interruption.interrupt()
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


@inside(run)
async def test_a_waiter_is_interrupted_and_goes_on_uncancelled(interruption: Interruption) -> None:
    async def wait_twice() -> int:
        with pytest.raises(InterruptedWaitError):
            await interruption.guard(_for_ever)
        await asyncio.sleep(0)  # a cancellation that was left behind would come out here
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    tasks = [asyncio.get_running_loop().create_task(wait_twice()) for _ in range(3)]
    await asyncio.sleep(0)
    interruption.interrupt()
    assert await asyncio.gather(*tasks) == [0, 0, 0]


@inside(run)
async def test_what_comes_after_an_interruption_is_not_begun(interruption: Interruption) -> None:
    begun: list[bool] = []

    async def operation() -> None:
        begun.append(True)

    interruption.interrupt()
    with pytest.raises(InterruptedWaitError):
        await interruption.guard(operation)
    assert interruption.is_set
    assert begun == []


@inside(run)
async def test_a_task_that_somebody_cancels_is_cancelled(interruption: Interruption) -> None:
    task = await _begun(interruption, _for_ever)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    interruption.interrupt()  # it has forgotten the task


@pytest.mark.parametrize("is_cancelled_first", [True, False])
def test_a_task_that_is_cancelled_and_interrupted_at_once_is_cancelled(is_cancelled_first: bool) -> None:
    async def job(interruption: Interruption) -> None:
        task = await _begun(interruption, _for_ever)
        if is_cancelled_first:
            task.cancel()
        interruption.interrupt()
        if not is_cancelled_first:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelling() == 1, "the other one's stays"

    run(job)


@inside(run)
async def test_a_self_cancelled_operation_is_distinguished(interruption: Interruption) -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait() -> None:
        await future

    task = await _begun(interruption, wait)
    future.cancel()
    with pytest.raises(OperationCancelledError):
        await task
    assert task.cancelling() == 0


@inside(run)
async def test_an_operation_that_ends_in_spite_of_the_interruption_counts(interruption: Interruption) -> None:
    async def stubborn() -> str:
        try:
            await _for_ever()
        except asyncio.CancelledError:
            return "done"
        raise AssertionError("nobody resolves it")

    task = await _begun(interruption, stubborn)
    interruption.interrupt()
    assert await task == "done"
    assert task.cancelling() == 0


@inside(run)
async def test_a_deadline_around_it_stays_a_deadline(interruption: Interruption) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await interruption.guard(_for_ever)
