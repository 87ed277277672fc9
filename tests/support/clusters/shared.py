"""Fixtures and hooks for a `conftest.py`: one cluster of three nodes for all tests that have topics and groups of
their own and harm no node, and one for those that kill nodes and leave it whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import tidelog
from support.clusters.commands import Shell
from tidelog.testing import LocalCluster

QUICK_GROUPS = {
    "group.initial.rebalance.delay.ms": "0",
    "group.consumer.heartbeat.interval.ms": "300",
    "group.min.session.timeout.ms": "1000",
    "offsets.topic.num.partitions": "4",
}


def prepared(cluster: LocalCluster) -> Iterator[LocalCluster]:
    """Groups of this cluster do not wait for long; in the end no node has met what it did not expect."""
    with tidelog.Admin(cluster.bootstrap) as admin:
        admin.alter_config(tidelog.ConfigResource("cluster"), sets=QUICK_GROUPS)
    yield cluster
    for number in (1, 2, 3):
        assert "Traceback" not in cluster.log(number), f"the log of node {number}"


class SharedCluster:
    """Runs from the first test that needs it until a test follows of a folder whose tests do not."""

    FOLDERS = ("cluster", "interop")

    def __init__(self) -> None:
        self._running = ExitStack()
        self._cluster: LocalCluster | None = None

    def started(self) -> LocalCluster:
        if self._cluster is None:
            self._cluster = self._running.enter_context(LocalCluster(nodes=3))
        return self._cluster

    def stop(self) -> None:
        self._running.close()
        self._cluster = None


SHARED, HARMED = SharedCluster(), SharedCluster()


@pytest.hookimpl(trylast=True)  # after the fixtures of the test's file have ended
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path.parent.name not in SharedCluster.FOLDERS:
        pytest_sessionfinish()


def pytest_sessionfinish() -> None:
    SHARED.stop()
    HARMED.stop()


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    yield from prepared(SHARED.started())


@pytest.fixture(scope="module")
def harmed() -> Iterator[LocalCluster]:
    """Nodes of this one may be killed and stopped; all of them run again when the file has ended."""
    cluster = HARMED.started()
    try:
        yield from prepared(cluster)
    finally:
        cluster.start_all()


@pytest.fixture(scope="module")
def shell(cluster: LocalCluster) -> Shell:
    return Shell(cluster.bootstrap)


@pytest.fixture(scope="module")
def admin(cluster: LocalCluster) -> Iterator[tidelog.Admin]:
    with tidelog.Admin(cluster.bootstrap) as made:
        yield made
