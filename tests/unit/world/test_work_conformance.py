"""Helper processes that die: the real and the simulated `Work` behave alike."""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tidelog.model.errors import WorkFailedError
from tidelog.world.real.work import ProcessWork
from tidelog.world.simulated import SimNode, SimWorld
from tidelog.world.work import ATTEMPTS_MAX, Work


def run_or_die(counter: str, deaths: int) -> int:
    """Ends its process the first `deaths` times that it runs with this counter; then the number of the run."""
    with open(counter, "ab") as file:
        file.write(b".")
    runs = os.path.getsize(counter)
    if runs <= deaths:
        os._exit(9)
    return runs


def add_one(number: int) -> int:
    return number + 1


def add_slowly(number: int, wait_s: float) -> int:
    time.sleep(wait_s)
    return number + 1


def raise_memory_error() -> None:
    raise MemoryError("no memory in the helper")


def raise_system_error() -> None:
    raise OSError(24, "Too many open files")


Main = Callable[[Work], Coroutine[Any, Any, None]]


class Site(Protocol):
    def run(self, main: Main) -> None: ...

    def dying(self, deaths: int) -> tuple[Callable[..., int], tuple[object, ...]]:
        """A function and its values that end so many helpers before they return."""
        ...


class RealSite:
    def __init__(self, root: Path) -> None:
        self._counter = str(root / "runs")

    def run(self, main: Main) -> None:
        async def body() -> None:
            work = ProcessWork(processes=2)
            try:
                async with asyncio.timeout(120):
                    await main(work)
            finally:
                await work.close()

        asyncio.run(body())

    def dying(self, deaths: int) -> tuple[Callable[..., int], tuple[object, ...]]:
        return run_or_die, (self._counter, deaths)


class SimSite:
    def __init__(self, world: SimWorld) -> None:
        self._world = world
        self._node = world.machine("node").boot()

    def run(self, main: Main) -> None:
        async def body(node: SimNode) -> None:
            await main(node.work)

        self._world.run(self._node, body)

    def dying(self, deaths: int) -> tuple[Callable[..., int], tuple[object, ...]]:
        self._node.work.deaths["add_one"] = deaths
        return add_one, (0,)


@pytest.fixture(params=["simulated", "real"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    if request.param == "real":
        yield RealSite(tmp_path)
        return
    with SimWorld(7) as world:
        yield SimSite(world)


def test_a_call_whose_helper_dies_once_is_run_again(site: Site) -> None:
    async def main(work: Work) -> None:
        fn, values = site.dying(ATTEMPTS_MAX - 1)
        assert await work.run(fn, *values) >= 1

    site.run(main)


def test_a_call_that_ends_every_helper_fails_and_the_next_call_runs(site: Site) -> None:
    async def main(work: Work) -> None:
        fn, values = site.dying(ATTEMPTS_MAX)
        with pytest.raises(WorkFailedError, match="helper process died"):
            await work.run(fn, *values)
        assert await work.run(abs, -4) == 4

    site.run(main)


def test_calls_beside_and_behind_one_that_ends_every_helper_do_not_fail(site: Site) -> None:
    async def main(work: Work) -> None:
        fn, values = site.dying(ATTEMPTS_MAX)
        others = [asyncio.ensure_future(work.run(abs, -number)) for number in range(8)]
        with pytest.raises(WorkFailedError):
            await work.run(fn, *values)
        assert await asyncio.gather(*others) == list(range(8))

    site.run(main)


def test_calls_that_wait_while_a_helper_dies_are_run_once(tmp_path: Path) -> None:
    async def main(work: Work) -> None:
        deadly = asyncio.ensure_future(work.run(run_or_die, str(tmp_path / "deadly"), ATTEMPTS_MAX))
        beside = asyncio.ensure_future(work.run(add_slowly, 1, 0.2))
        behind = [asyncio.ensure_future(work.run(run_or_die, str(tmp_path / f"{n}"), 0)) for n in range(6)]
        with pytest.raises(WorkFailedError):
            await deadly
        assert await beside == 2
        assert sum(await asyncio.gather(*behind)) <= len(behind) + 1, "at most the one beside the death ran twice"

    RealSite(tmp_path).run(main)


@pytest.mark.parametrize("fails", [raise_memory_error, raise_system_error])
def test_an_error_of_the_helpers_own_process_is_work_that_failed(tmp_path: Path, fails: Callable[[], None]) -> None:
    async def main(work: Work) -> None:
        with pytest.raises(WorkFailedError):
            await work.run(fails)

    RealSite(tmp_path).run(main)
