"""A file whose tests need settings, or change a cluster for good, has a `cluster` of its own."""

from collections.abc import Iterator

import pytest
from exercises import Program
from support.clusters.shared import admin, cluster, harmed, pytest_runtest_teardown, pytest_sessionfinish, shell

__all__ = ["admin", "cluster", "harmed", "pytest_runtest_teardown", "pytest_sessionfinish", "shell"]


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    made: list[Program] = []
    yield made
    for program in made:
        program.end()
