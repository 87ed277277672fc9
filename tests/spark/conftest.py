"""One Spark session and one cluster of three nodes for all tests of Spark; both start in seconds, not in moments.

Without PySpark or Java the tests are skipped, and say why; with REQUIRE_SPARK=1 they fail instead.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from itertools import count
from typing import TYPE_CHECKING

import pytest

import tidelog
from tidelog.testing import LocalCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MASTER = "local[2,2]"
"""Two attempts for each task: with `local[2]` there is one."""

_numbers = count(1)


def missing() -> str:
    """What is not there, in one line; empty if all is."""
    if importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed: pip install 'tidelog[spark-local]'"
    from tidelog.spark.java import NoJavaError, java_home

    try:
        java_home()
    except NoJavaError as error:
        return str(error)
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "/tests/spark/" in item.path.as_posix()]
    if not here:
        return
    lacking = missing()
    for item in here:
        # One session and one cluster: all of them on one worker of xdist.
        item.add_marker(pytest.mark.xdist_group("spark"))
        if lacking and os.environ.get("REQUIRE_SPARK") != "1":
            item.add_marker(pytest.mark.skip(reason=lacking))


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=3) as running:
        yield running


@pytest.fixture(scope="session")
def bootstrap(cluster: LocalCluster) -> str:
    return cluster.bootstrap


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
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
    }
    session = tidelog.spark.session("tidelog-tests", master=MASTER, conf=conf)
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def admin(bootstrap: str) -> Iterator[tidelog.Admin]:
    with tidelog.Admin(bootstrap) as made:
        yield made


@pytest.fixture(scope="session")
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
