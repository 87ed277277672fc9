"""Descriptions of log directories ask few brokers at once; the latest move of a replica counts."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest
from support.async_tests import asyncio_test

from tidelog.model.errors import ErrorCode, StorageError
from tidelog.model.ids import DirectoryId, PartitionId, TopicId
from tidelog.services import log_dirs
from tidelog.services.context import Api, RequestContext
from tidelog.services.deadline import Deadline
from tidelog.services.guard import Guard
from tidelog.services.log_dirs import BrokerLogDirs, DescribeLogDirs, LogDirService, MoveReplicas, ReplicaMove

PARTITION = PartitionId(TopicId(UUID(int=5)), 0)
HOME, A, B = (DirectoryId(UUID(int=number)) for number in (1, 2, 3))
CONTEXT = RequestContext(Api.KAFKA)


class Directories:
    """A replica in HOME. A copy ends when the test says so; an abandoned one takes a moment."""

    def __init__(self) -> None:
        self.at = HOME
        self.log: list[tuple[str, DirectoryId]] = []
        self.may_end = asyncio.Event()
        self.began = asyncio.Event()
        self.error: Exception | None = None

    def directory_at(self, path: str) -> DirectoryId:
        return {"home": HOME, "a": A, "b": B}[path]

    def directory_id_of(self, _partition: PartitionId) -> DirectoryId:
        return self.at

    async def describe(self) -> list[Any]:
        return [SimpleNamespace(directory_id=directory, error=None) for directory in (HOME, A, B)]

    async def move_replica(self, _partition: PartitionId, directory: DirectoryId) -> None:
        if self.at == directory:
            return
        self.log.append(("begin", directory))
        self.began.set()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            self.log.append(("abandoned", directory))
            raise
        if self.error is not None:
            raise self.error
        self.at = directory


class Brokers:
    """Other brokers: they answer after a moment."""

    def __init__(self) -> None:
        self.running = self.most = self.calls = 0
        self.slack_ms = 0

    def serve(self, *_: object) -> None:
        return None

    async def to_broker(
        self, _context: object, broker: int, _call: object, _request: object, *, timeout_ms: int, slack_ms: int = 0
    ) -> Any:
        assert timeout_ms > 0
        self.slack_ms = slack_ms
        self.calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.001)
        self.running -= 1
        return SimpleNamespace(replicas=(), broker=broker)


def service_of(brokers: Brokers, directories: Directories | None) -> LogDirService:
    registered = dict.fromkeys(range(2, 100))
    node = SimpleNamespace(
        forwarder=brokers,
        guard=Guard(),
        cache=SimpleNamespace(node=1, image=SimpleNamespace(brokers=registered)),
        deadline=lambda context: Deadline(context, default_ms=5_000, max_ms=5_000),
    )
    return LogDirService(cast(Any, node), cast(Any, directories))


@pytest.fixture(autouse=True)
def _lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_dirs, "lookup_partition", lambda *_: PARTITION)


def moving(service: LogDirService, *targets: DirectoryId) -> Coroutine[Any, Any, Any]:
    moves = tuple(ReplicaMove(topic="t", partition=0, directory_id=directory) for directory in targets)
    return service.move(CONTEXT, 1, MoveReplicas(replicas=moves))


# Descriptions.


@pytest.mark.parametrize(
    ("named", "calls"), [([2] * 20_000, 1), ([3, 2, 3, 200], 2), (list(range(2, 60)), 58)], ids=["one", "few", "many"]
)
def test_a_description_asks_each_broker_once_and_few_at_a_time(named: list[int], calls: int) -> None:
    async def run() -> tuple[BrokerLogDirs, ...]:
        return await service_of(brokers, None).describe(CONTEXT, named, DescribeLogDirs())

    brokers = Brokers()
    rows = asyncio.run(run())
    assert [row.broker for row in rows] == list(dict.fromkeys(named))
    assert brokers.calls == calls
    assert brokers.most == min(calls, log_dirs.BROKERS_AT_ONCE)


# Moves.


@pytest.mark.parametrize("paths", [("a", "b", "a"), ("a", "b"), ("a", "home"), ("a", "home", "b", "a")], ids="-".join)
@asyncio_test
async def test_a_replica_ends_where_the_latest_request_wants_it(paths: tuple[str, ...]) -> None:
    directories = Directories()
    service = service_of(Brokers(), directories)
    await service.begin_move(CONTEXT, "t", 0, paths[0])
    await directories.began.wait()
    for path in paths[1:]:
        await service.begin_move(CONTEXT, "t", 0, path)
        await asyncio.sleep(0)
    directories.may_end.set()
    last = directories.directory_at(paths[-1])
    (row,) = await moving(service, last)
    assert row.error is None
    assert directories.at == last
    begun = [directory for what, directory in directories.log if what == "begin"]
    assert directories.log[1] == ("abandoned", begun[0]), "one after the other"
    assert not service._moves


@asyncio_test
async def test_a_replaced_move_is_an_error_of_its_row_and_the_new_one_goes_on() -> None:
    directories = Directories()
    service = service_of(Brokers(), directories)
    first, second = asyncio.create_task(moving(service, A)), asyncio.create_task(moving(service, A))
    await directories.began.wait()
    unknown = await moving(service, DirectoryId(UUID(int=77)))
    assert [row.error for row in unknown] == [ErrorCode.INVALID_REQUEST], "it replaces nothing"
    await service.begin_move(CONTEXT, "t", 0, "b")
    for waiting in (first, second):
        (row,) = await waiting
        assert row.error is ErrorCode.INVALID_REQUEST
        assert f"a later request moves the replica to directory {B}" in row.message
    directories.may_end.set()
    rows = await moving(service, B)
    assert (rows[0].error, directories.at) == (None, B)


@asyncio_test
async def test_a_move_that_fails_or_is_closed_is_an_error_of_its_row() -> None:
    directories = Directories()
    service = service_of(Brokers(), directories)
    failing = asyncio.create_task(moving(service, A))
    await directories.began.wait()
    directories.error = StorageError("the disk is gone")
    directories.may_end.set()
    assert [row.error for row in await failing] == [ErrorCode.STORAGE_ERROR]
    directories.may_end.clear()
    directories.began.clear()
    closed = asyncio.create_task(moving(service, A))
    await directories.began.wait()
    await service.close()
    assert [row.error for row in await closed] == [ErrorCode.NETWORK_EXCEPTION]
    assert directories.log[-1] == ("abandoned", A)


def test_a_forwarded_move_times_out_on_the_other_broker_first() -> None:
    async def run() -> None:
        moves = MoveReplicas(replicas=(ReplicaMove(topic="t", partition=0, directory_id=A),))
        await service_of(brokers, None).move(CONTEXT, 2, moves)

    brokers = Brokers()
    asyncio.run(run())
    assert brokers.slack_ms == log_dirs.MOVE_SLACK_MS
