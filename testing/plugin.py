"""The pytest plugin: fixtures `tidelog_memory` and `tidelog_cluster`.

    def test_orders(tidelog_memory):                          # a new cluster in this process for each test
        with tidelog.Producer(tidelog_memory.bootstrap) as producer: ...

    @pytest.mark.tidelog_memory(brokers=5, settings={"min.insync.replicas": 3})
    def test_five(tidelog_memory): ...                        # with these arguments of `MemoryCluster`

    def test_real(tidelog_cluster): ...                       # processes on this machine, one cluster per session

`--tidelog-seed` seeds the faults of `tidelog_memory`; a failing test prints it with its faults. Override the fixture
`tidelog_nodes` in a `conftest.py` to set the number of nodes of `tidelog_cluster`.

Tidelog is imported when a fixture is used.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tidelog.testing.cluster import LocalCluster
    from tidelog.testing.memory import MemoryCluster

NODES = 3
_CLUSTER = pytest.StashKey["MemoryCluster"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("tidelog").addoption(
        "--tidelog-seed", type=int, default=0, metavar="N", help="seed for the faults that tidelog_memory injects"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "tidelog_memory(**arguments): arguments of MemoryCluster")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    cluster = item.stash.get(_CLUSTER, None)
    if report.failed and cluster is not None:
        lines = [f"seed {cluster.seed} (--tidelog-seed={cluster.seed} replays its faults)", *cluster.faults]
        report.sections.append(("tidelog_memory", "\n".join(lines)))
    return report


@pytest.fixture
def tidelog_memory(request: pytest.FixtureRequest) -> Iterator[MemoryCluster]:
    """A cluster of three brokers in this process, without ports; a new one for each test."""
    from tidelog.testing.memory import MemoryCluster

    marker = request.node.get_closest_marker("tidelog_memory")
    arguments: dict[str, Any] = {"seed": request.config.getoption("--tidelog-seed")}
    if marker is not None:
        arguments |= marker.kwargs
    with MemoryCluster(**arguments) as cluster:
        request.node.stash[_CLUSTER] = cluster
        yield cluster


@pytest.fixture(scope="session")
def tidelog_nodes() -> int:
    """The number of nodes of `tidelog_cluster`; override it in a `conftest.py`."""
    return NODES


@pytest.fixture(scope="session")
def tidelog_cluster(tidelog_nodes: int) -> Iterator[LocalCluster]:
    """A cluster of real processes, started on first use and stopped at the end of the session. Topics persist between
    tests: give each test its own names."""
    from tidelog.testing.cluster import LocalCluster

    with LocalCluster(nodes=tidelog_nodes) as cluster:
        yield cluster
