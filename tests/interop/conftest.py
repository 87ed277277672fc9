"""What other implementations leave behind is theirs to answer for, here and in the tests that come after.

kafka-python forgets the socket of a connection that was refused. The garbage collector tells of it whenever it comes
by, which may be in somebody else's test: so it comes by when a file of these tests ends.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clusters.shared import cluster, harmed, pytest_runtest_teardown, pytest_sessionfinish

__all__ = ["cluster", "harmed", "pytest_runtest_teardown", "pytest_sessionfinish"]

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"))


@pytest.fixture(scope="module", autouse=True)
def sockets_of_others() -> Iterator[None]:
    yield
    gc.collect()
