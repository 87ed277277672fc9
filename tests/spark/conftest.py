"""One Spark session and one cluster of three nodes for all tests of Spark; both start in seconds, not in moments.

Without PySpark or Java the tests are skipped, and say why; with REQUIRE_SPARK=1 they fail instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import TYPE_CHECKING

import pytest
from support.spark.availability import is_required, missing

import tidelog
from tidelog.testing import LocalCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MASTER = "local[2,2]"
"""Two attempts for each task: with `local[2]` there is one."""
JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Half of the time of a Java that lives for a minute goes into compiling what it will not run often enough."""

_numbers = count(1)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First of all: `--dist worksteal` deals the tests out in halves and steals from the end, so that those that
    stand at the beginning stay on one worker. On two there would be two sessions and two clusters."""
    here = [item for item in items if "/tests/spark/" in item.path.as_posix()]
    if not here:
        return
    items[:] = here + [item for item in items if "/tests/spark/" not in item.path.as_posix()]
    lacking = missing()
    for item in here:
        if lacking and not is_required():
            item.add_marker(pytest.mark.skip(reason=lacking))


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """Each node in a rack of its own, `rack-1` to `rack-3`."""
    with LocalCluster(nodes=3, start=False) as made:
        for number in (1, 2, 3):
            with (made.path(number) / "node.toml").open("a", encoding="utf-8") as file:
                file.write(f'"broker.rack" = "rack-{number}"\n')
        made.start_all()
        yield made


@pytest.fixture(scope="session")
def bootstrap(cluster: LocalCluster) -> str:
    return cluster.bootstrap


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """It serves Spark Connect as well, at a free port (`connect`): that saves another Java."""
    lacking = missing()
    assert not lacking, lacking
    import tidelog.spark

    home = tmp_path_factory.mktemp("spark")
    conf = {
        "spark.ui.enabled": "false",
        "spark.sql.warehouse.dir": str(home / "warehouse"),
        "spark.local.dir": str(home / "local"),
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": JAVA,
        "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
        "spark.connect.grpc.binding.port": "0",
        "spark.connect.grpc.binding.address": "localhost",
    }
    session = tidelog.spark.session("tidelog-tests", master=MASTER, conf=conf)
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture(scope="module")
def admin(bootstrap: str) -> Iterator[tidelog.Admin]:
    with tidelog.Admin(bootstrap) as made:
        yield made


@pytest.fixture(scope="module")
def producer(bootstrap: str) -> Iterator[tidelog.Producer]:
    with tidelog.Producer(bootstrap) as made:
        yield made


@pytest.fixture
def topic(admin: tidelog.Admin) -> Callable[..., str]:
    """A function that makes a topic of a new name: topic(partitions=2, config={...})."""

    def make(name: str = "t", partitions: int = 1, **more: object) -> str:
        fresh = f"{name}-{next(_numbers)}"
        admin.create_topic(fresh, partitions=partitions, **more)  # type: ignore[arg-type]
        return fresh

    return make
