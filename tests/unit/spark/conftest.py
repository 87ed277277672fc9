"""Workers of Spark keep their clients from task to task; a test's end with it, or the IO thread would never end."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _clients_end() -> Iterator[None]:
    yield
    from tidelog.spark import client_cache, sink_task

    while client_cache._open:
        client_cache._open.popitem()[1].close()
    while sink_task._producers:
        sink_task._producers.popitem()[1].close()
