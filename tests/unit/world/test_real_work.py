"""Helper processes: results, errors, deaths, and what becomes of a helper whose parent dies."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import pytest
from support.async_tests import asyncio_test

from tidelog.model.errors import CorruptBatchError, DamagedLogError, WorkFailedError
from tidelog.world.real.work import InlineWork, ProcessWork


def raise_travelling_error() -> None:
    raise CorruptBatchError("batch at 17")


def raise_error_that_does_not_travel() -> None:
    raise DamagedLogError("ends at 17", path="log", good_end=17)


def with_helpers(main: Callable[[ProcessWork], Awaitable[None]]) -> None:
    async def body() -> None:
        work = ProcessWork(processes=1)
        try:
            await main(work)
        finally:
            await work.close()

    asyncio.run(body())


def test_work_runs_in_another_process_and_comes_back() -> None:
    async def main(work: ProcessWork) -> None:
        assert await asyncio.gather(*(work.run(math.sqrt, number * number) for number in range(5))) == [0, 1, 2, 3, 4]
        assert await work.run(os.getpid) != os.getpid()

    with_helpers(main)


def test_errors_come_back_and_one_that_cannot_travel_does_not_break_the_helper() -> None:
    async def main(work: ProcessWork) -> None:
        with pytest.raises(CorruptBatchError, match="batch at 17"):
            await work.run(raise_travelling_error)
        helper = await work.run(os.getpid)
        with pytest.raises((WorkFailedError, DamagedLogError), match="ends at 17"):
            await work.run(raise_error_that_does_not_travel)
        with pytest.raises(WorkFailedError, match="cannot be pickled"):
            await work.run(math.sqrt, lambda: None)
        assert await work.run(os.getpid) == helper

    with_helpers(main)


def test_a_helper_that_dies_is_named_and_replaced() -> None:
    async def main(work: ProcessWork) -> None:
        helper = await work.run(os.getpid)
        with pytest.raises(WorkFailedError, match=r"helper process died while it ran posix\._exit"):
            await work.run(os._exit, 9)
        assert await work.run(os.getpid) not in (helper, os.getpid())

    with_helpers(main)


def test_a_helper_ends_when_its_parent_is_killed() -> None:
    program = (
        "import asyncio, os, time\n"
        "from tidelog.world.real.work import ProcessWork\n"
        "async def main():\n"
        "    print(await ProcessWork().run(os.getpid), flush=True)\n"
        "    time.sleep(60)\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        helper = int(parent.stdout.readline())
        assert is_running(helper)
        parent.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 30
        while is_running(helper):
            assert time.monotonic() < deadline, "the helper outlives its parent"
            os.sched_yield()


def is_running(process_id: int) -> bool:
    """A zombie that nobody has waited for is not."""
    try:
        with open(f"/proc/{process_id}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@asyncio_test
async def test_inline_work_does_the_same() -> None:
    work = InlineWork()
    assert await work.run(math.sqrt, 9) == 3
    with pytest.raises(CorruptBatchError):
        await work.run(raise_travelling_error)
    await work.close()
