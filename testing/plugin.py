"""The pytest plugin: fixtures `tidelog_memory` and `tidelog_cluster`.

    def test_orders(tidelog_memory):                          # a new cluster in this process for each test
        with tidelog.Producer(tidelog_memory.bootstrap) as producer: ...

    @pytest.mark.tidelog_memory(brokers=5, settings={"min.insync.replicas": 3})
    def test_five(tidelog_memory): ...                        # made with these arguments of `MemoryCluster`

    def test_real(tidelog_cluster): ...                       # processes of this machine, one cluster for the session

`--tidelog-seed` is what the faults of `tidelog_memory` draw from; a test that fails prints it, and the faults it had.
A `conftest.py` that has a fixture `tidelog_nodes` of its own decides how many nodes `tidelog_cluster` has.

Nothing of Tidelog is imported before a fixture is used.
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
        "--tidelog-seed", type=int, default=0, metavar="N", help="what the faults of tidelog_memory draw from"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "tidelog_memory(**arguments): what MemoryCluster is made with")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    cluster = item.stash.get(_CLUSTER, None)
    if report.failed and cluster is not None:
        told = [f"seed {cluster.seed} (--tidelog-seed={cluster.seed} replays its faults)", *cluster.faults]
        report.sections.append(("tidelog_memory", "\n".join(told)))
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
    """How many nodes `tidelog_cluster` has; for a `conftest.py` to override."""
    return NODES


@pytest.fixture(scope="session")
def tidelog_cluster(tidelog_nodes: int) -> Iterator[LocalCluster]:
    """A cluster of real processes, started at the first use and stopped at the end of the session. Its topics stay
    from test to test: give each test names of its own."""
    from tidelog.testing.cluster import LocalCluster

    with LocalCluster(nodes=tidelog_nodes) as cluster:
        yield cluster
