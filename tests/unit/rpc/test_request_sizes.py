"""Requests with very many partitions: over the limit they are rejected, below it other tasks run in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tidelog.metadata.image import ClusterImage
from tidelog.model.errors import InvalidRequestError
from tidelog.rpc.grpc.groups import GroupsHandlers
from tidelog.rpc.grpc.log import LogHandlers
from tidelog.rpc.grpc.methods import METHODS, PARTITIONS_MAX, Method, method_named
from tidelog.services.context import INTERNAL
from tidelog.services.fetch import FetchResult
from tidelog.services.groups import Committed
from tidelog.services.limits import RequestLimits
from tidelog.services.offsets import ListedOffset
from tidelog.services.produce import ProduceResult

COUNTED = {
    "Log": {
        "Produce",
        "ProduceStream",
        "Fetch",
        "FetchStream",
        "ListOffsets",
        "OffsetForLeaderEpoch",
        "DeleteRecords",
        "WatchOffsets",
        "RangeBytes",
        "DescribeProducers",
    },
    "Groups": {"CommitOffsets", "FetchOffsets", "DeleteOffsets"},
    "Transactions": {"CommitOffsets"},
    "Admin": {"AlterReassignments", "ListReassignments", "ElectLeaders", "MoveReplicas"},
}
SLICES = PARTITIONS_MAX // 500


def with_rows(method: Method, count: int) -> Any:
    request = method.request()
    rows = getattr(request, method.counted)
    for number in range(count):
        rows.add(partition=number)
    return request


@pytest.mark.parametrize("method", [one for one in METHODS.values() if one.counted], ids=lambda one: one.full_name)
def test_a_request_names_at_most_10000_partitions(method: Method) -> None:
    assert method.name in COUNTED[method.service]
    most = with_rows(method, PARTITIONS_MAX)
    assert method.parse(most.SerializeToString()) == most
    over = with_rows(method, PARTITIONS_MAX + 1)
    with pytest.raises(InvalidRequestError, match="10001 "):
        method.parse(over.SerializeToString())
    assert [len(getattr(part, method.counted)) for part in method.parts(over)] == [PARTITIONS_MAX, 1]
    assert list(method.parts(most)) == [most]


def test_every_request_with_partitions_has_the_limit() -> None:
    counted = {(one.service, one.name) for one in METHODS.values() if one.counted}
    assert counted == {(service, name) for service, names in COUNTED.items() for name in names}


def turns(work: Callable[[], Coroutine[Any, Any, Any]]) -> int:
    """How often other tasks run meanwhile."""
    count = 0

    async def other() -> None:
        nonlocal count
        while True:
            await asyncio.sleep(0)
            count += 1

    async def main() -> None:
        task = asyncio.ensure_future(other())
        await work()
        task.cancel()

    asyncio.run(main())
    return count


class Services:
    """Answers at once, whatever is asked."""

    def __init__(self) -> None:
        self.produce = self
        self.fetch = SimpleNamespace(fetch=self._fetch)
        self.offsets = self
        self.coordinator = SimpleNamespace(me=1)

    async def start(self, _context: Any, request: Any) -> Any:
        async def finish() -> list[ProduceResult]:
            return [ProduceResult()] * len(request.items)

        return SimpleNamespace(finish=finish)

    async def _fetch(self, _context: Any, request: Any, _memory: Any) -> list[FetchResult]:
        return [FetchResult()] * len(request.items)

    async def list_offsets(self, _context: Any, queries: Any, *, isolation: int) -> list[ListedOffset]:
        return [ListedOffset()] * len(queries)

    async def commit_offsets(self, _context: Any, _group: str, offsets: Any, **_: Any) -> dict[Any, None]:
        return dict.fromkeys(offsets)

    async def delete_offsets(self, _context: Any, _group: str, partitions: Any) -> dict[Any, None]:
        return dict.fromkeys(partitions)

    async def fetch_offsets(self, _context: Any, _group: str, partitions: Any, **_: Any) -> dict[Any, Committed]:
        return dict.fromkeys(partitions, Committed(1, 1, "", 1))


@pytest.mark.parametrize(
    ("service", "name"),
    [
        ("Log", "Produce"),
        ("Log", "Fetch"),
        ("Log", "ListOffsets"),
        ("Groups", "CommitOffsets"),
        ("Groups", "FetchOffsets"),
        ("Groups", "DeleteOffsets"),
    ],
)
def test_other_tasks_run_while_a_large_request_is_read_and_answered(service: str, name: str) -> None:
    method, services = method_named(service, name), cast("Any", Services())
    handlers = LogHandlers(services, RequestLimits()) if service == "Log" else GroupsHandlers(services, ClusterImage)
    request = with_rows(method, PARTITIONS_MAX)
    assert turns(lambda: getattr(handlers, method.handler)(request, INTERNAL)) >= 2 * SLICES - 2
