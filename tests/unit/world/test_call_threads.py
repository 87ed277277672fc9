"""Threads for calls that block: outcomes, bounds, what becomes of calls that nobody waits for."""

import asyncio
import gc
import os
import threading
import weakref
from pathlib import Path

import pytest
from support.clusters.waiting import until

from tidelog.model.errors import StorageError
from tidelog.world.real.call_threads import CallThreads
from tidelog.world.real.disk import RealDisk

LIMIT_S = 30.0


def named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def test_a_call_has_its_value_or_its_error_and_threads_are_made_one_by_one() -> None:
    threads = CallThreads(3, name="outcome")

    def broken() -> None:
        raise StorageError("no space", path="log")

    async def main() -> None:
        assert await threads.run(divmod, 7, 2) == (3, 1)
        with pytest.raises(StorageError, match="no space"):
            await threads.run(broken)
        assert await threads.run(threading.get_ident) != threading.get_ident()
        assert len(named("outcome")) == 1, "one after the other needs one thread"

    asyncio.run(main())
    threads.close()
    assert named("outcome") == []


def test_calls_run_side_by_side_up_to_the_bound_and_in_order_past_it() -> None:
    threads = CallThreads(2, name="bound")
    gates = [threading.Event() for _ in range(4)]
    begun: list[int] = []

    def call(number: int) -> int:
        begun.append(number)
        assert gates[number].wait(LIMIT_S)
        return number

    async def main() -> None:
        calls = [threads.run(call, number) for number in range(4)]
        async with asyncio.timeout(LIMIT_S):
            while len(begun) < 2:  # noqa: ASYNC110 - a thread tells nobody
                await asyncio.sleep(0.001)
            assert sorted(begun) == [0, 1], "the others wait"
            gates[1].set()
            assert await calls[1] == 1
            for gate in gates:
                gate.set()
            assert await asyncio.gather(*calls) == [0, 1, 2, 3]
        assert begun[2:] == [2, 3]
        assert len(named("bound")) == 2

    asyncio.run(main())
    threads.close()


def test_a_call_that_nobody_waits_for_ends_all_the_same_and_its_thread_goes_on() -> None:
    threads = CallThreads(1, name="left")
    entered, leave, ended = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        entered.set()
        assert leave.wait(LIMIT_S)
        ended.set()

    async def main() -> None:
        waiting = asyncio.ensure_future(threads.run(slow))
        assert entered.wait(LIMIT_S)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())
    leave.set()  # its loop is closed by now
    assert ended.wait(LIMIT_S)

    async def again() -> int:
        return await threads.run(int, "7")

    assert asyncio.run(again()) == 7
    threads.close()


def test_close_waits_for_what_is_under_way() -> None:
    threads = CallThreads(1, name="close")
    leave = threading.Event()
    ended: list[int] = []

    def slow(number: int) -> None:
        assert leave.wait(LIMIT_S)
        ended.append(number)

    async def main() -> None:
        calls = [threads.run(slow, number) for number in range(2)]
        threading.Timer(0.01, leave.set).start()
        threads.close()
        assert ended == [0, 1]
        await asyncio.gather(*calls)

    asyncio.run(main())
    assert named("close") == []


def test_threads_end_with_their_owner() -> None:
    async def main() -> weakref.ref[CallThreads]:
        threads = CallThreads(1, name="forgotten")
        await threads.run(int)
        return weakref.ref(threads)

    gone = asyncio.run(main())
    gc.collect()
    assert gone() is None
    until(lambda: not named("forgotten"), "its thread has ended")


def test_a_group_that_fails_or_is_left_lets_go_of_its_files(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    files = [disk.open(str(number), create=True) for number in range(3)]
    os.close(files[1]._descriptor)
    files[1]._descriptor, writer = os.pipe()

    async def main() -> None:
        with pytest.raises(StorageError, match=r"sync 1: .*EINVAL"):
            await disk.sync_many(files)
        assert [file._pins for file in files] == [0] * 3
        leaving = asyncio.ensure_future(disk.sync_many(files[:1]))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving

    asyncio.run(main())
    disk.close()
    assert files[0]._pins == 0
    os.close(writer)
