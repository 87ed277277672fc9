"""Fixtures of the log tests: a simulated world, one log in it (`lab`), all logs of a node in it (`sim`).

An async test is a process: with `node` on the machine of `lab`; with `host` on that of `site`, else of `sim`.
"""

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.logs.node_logs import RealSite, SimSite, Site
from support.logs.single_log import Lab

from tidelog.world.simulated import SimNode, SimWorld


@pytest.fixture
def world() -> Iterator[SimWorld]:
    with SimWorld(seed=11) as world:
        yield world


@pytest.fixture
def lab(world: SimWorld) -> Lab:
    return Lab(world)


@pytest.fixture
def node(lab: Lab) -> SimNode:
    return lab.machine.boot()


@pytest.fixture
def sim(world: SimWorld) -> SimSite:
    return SimSite(world)


@pytest.fixture(params=["simulated", "real"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    # Real files need real time, which a simulated world forbids while it is open.
    return RealSite(tmp_path) if request.param == "real" else SimSite(request.getfixturevalue("world"))


@pytest.fixture
def host(request: pytest.FixtureRequest) -> Site:
    """The site; its process, which the test gets, exists only while it runs."""
    site: Site = request.getfixturevalue("site" if "site" in request.fixturenames else "sim")
    return site


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    test, values = pyfuncitem.obj, dict(pyfuncitem.funcargs)
    if not inspect.iscoroutinefunction(test):
        return None
    given = {name: values[name] for name in inspect.signature(test).parameters}
    if "node" in given:
        values["lab"].again(lambda _: test(**given))
    else:
        values["host"].run(lambda host: test(**{**given, "host": host}))
    return True
