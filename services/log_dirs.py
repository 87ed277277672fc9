"""Describes log directories and moves replicas between those of one broker. Forwards to the named broker.

A move may take hours. It goes on when its client has gone or its time is up; a second request waits for the same move,
and one for another directory replaces it (`replica_moves`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from tidelog.model.errors import BrokerNotRegisteredError, ErrorCode, InvalidRequestError, TidelogError
from tidelog.model.ids import DirectoryId, NodeId
from tidelog.replication.log_directories import LogDir, LogDirectories, LogDirReplica
from tidelog.services.authorization import Operation
from tidelog.services.context import RequestContext
from tidelog.services.deadline import Deadline
from tidelog.services.forwarding import ServiceCall
from tidelog.services.node import NodeAccess
from tidelog.services.replica_moves import ReplicaMoves
from tidelog.services.topic_lookup import lookup_partition
from tidelog.world.slicing import sliced

__all__ = [
    "BrokerLogDirs",
    "DescribeLogDirs",
    "LogDir",
    "LogDirReplica",
    "LogDirService",
    "MoveOutcome",
    "MoveReplicas",
    "ReplicaMove",
]

BROKERS_AT_ONCE = 16
"""Brokers that one request asks at the same time."""
BROKERS_PER_SLICE = 100
MOVE_SLACK_MS = 1_000
"""Added to the timeout of a forwarded move: the other broker times out first, and its rows say that the moves go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerLogDirs:
    """The log directories of one broker, or its error."""

    broker: int
    directories: tuple[LogDir, ...] = ()
    error: ErrorCode | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeLogDirs:
    topics: tuple[str, ...] = ()
    """Empty: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMove:
    topic: str
    partition: int
    directory_id: UUID
    topic_id: UUID | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveReplicas:
    replicas: tuple[ReplicaMove, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveOutcome:
    topic: str
    partition: int
    error: ErrorCode | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveOutcomes:
    replicas: tuple[MoveOutcome, ...]


DESCRIBE = ServiceCall("log-dirs/describe", Operation.DESCRIBE, DescribeLogDirs, BrokerLogDirs)
MOVE = ServiceCall("log-dirs/move", Operation.ALTER, MoveReplicas, MoveOutcomes)


class LogDirService:
    def __init__(self, node: NodeAccess, directories: LogDirectories | None) -> None:
        """`directories`: of this node, if it is a broker."""
        self._node = node
        self._directories = directories
        self._moves = None if directories is None else ReplicaMoves(directories)
        if directories is not None:
            node.forwarder.serve(DESCRIBE, self._serve_describe)
            node.forwarder.serve(MOVE, self._move_all)

    async def close(self) -> None:
        """Cancel the moves in progress."""
        if self._moves is not None:
            await self._moves.close()

    async def describe(
        self, context: RequestContext, brokers: Sequence[int], request: DescribeLogDirs
    ) -> tuple[BrokerLogDirs, ...]:
        """Return one row for each named broker, in order; without names: for each live one."""
        node = self._node
        node.guard.admit_query(context)
        deadline = node.deadline(context)
        ids = list(dict.fromkeys(brokers)) or [broker.broker for broker in node.cache.image.live_brokers()]
        left, rows = sliced(ids, BROKERS_PER_SLICE), dict[int, BrokerLogDirs]()

        async def describe_next() -> None:
            async for broker in left:
                rows[broker] = await self._describe(context, broker, request, deadline)

        await asyncio.gather(*(describe_next() for _ in range(min(BROKERS_AT_ONCE, len(ids)))))
        return tuple(rows[broker] for broker in ids)

    async def describe_own(self, context: RequestContext) -> tuple[LogDir, ...]:
        """Return the log directories of this broker, with copies in progress."""
        self._node.guard.admit_query(context)
        assert self._directories is not None, "only a broker has log directories"
        return await self._directories.describe()

    async def move(self, context: RequestContext, broker: int, request: MoveReplicas) -> tuple[MoveOutcome, ...]:
        """Move replicas of a broker to the directories with these ids. Return when each move has ended."""
        node = self._node
        node.guard.admit_change(context, len(request.replicas))
        if broker == node.cache.node and self._directories is not None:
            return (await self._move_all(context, request)).replicas
        self._check_broker(broker)
        timeout_ms = node.deadline(context).left_ms()
        moving = node.forwarder.to_broker(
            context, NodeId(broker), MOVE, request, timeout_ms=timeout_ms, slack_ms=MOVE_SLACK_MS
        )
        return (await moving).replicas

    async def begin_move(self, context: RequestContext, topic: str, partition: int, path: str) -> None:
        """Begin to move a replica of this broker to the directory with this path, as Kafka does.

        Returns when the move has begun. A move of the replica to another directory ends.
        """
        self._node.guard.admit_change(context)
        assert self._directories is not None, "only a broker has log directories"
        assert self._moves is not None, "only a broker moves replicas"
        partition_id = lookup_partition(self._node.cache.image, topic, None, partition)
        directory = self._directories.directory_at(path)
        is_there = self._directories.directory_id_of(partition_id) == directory
        if not is_there or self._moves.target_of(partition_id) is not None:
            self._moves.start(partition_id, directory)

    async def _serve_describe(self, context: RequestContext, request: DescribeLogDirs) -> BrokerLogDirs:
        return await self._describe(context, self._node.cache.node, request, self._node.deadline(context))

    # Describing.

    async def _describe(
        self, context: RequestContext, broker: int, request: DescribeLogDirs, deadline: Deadline
    ) -> BrokerLogDirs:
        node = self._node
        try:
            if broker == node.cache.node and self._directories is not None:
                own = await deadline.wait(self._directories.describe(frozenset(request.topics)))
                return BrokerLogDirs(broker=broker, directories=own)
            self._check_broker(broker)
            timeout_ms = deadline.left_ms()
            return await node.forwarder.to_broker(context, NodeId(broker), DESCRIBE, request, timeout_ms=timeout_ms)
        except TidelogError as error:
            return BrokerLogDirs(broker=broker, error=error.code, message=str(error))

    def _check_broker(self, broker: int) -> None:
        if broker == self._node.cache.node:
            raise InvalidRequestError(f"node {broker} has no log directories: it is not a broker")
        if broker not in self._node.cache.image.brokers:
            raise BrokerNotRegisteredError(f"broker {broker} is not registered")

    # Moving.

    async def _move_all(self, context: RequestContext, request: MoveReplicas) -> MoveOutcomes:
        deadline = self._node.deadline(context)
        rows = await asyncio.gather(*(self._move(item, deadline) for item in request.replicas))
        return MoveOutcomes(replicas=tuple(rows))

    async def _move(self, item: ReplicaMove, deadline: Deadline) -> MoveOutcome:
        assert self._directories is not None, "only a broker has log directories"
        assert self._moves is not None, "only a broker moves replicas"
        try:
            partition_id = lookup_partition(self._node.cache.image, item.topic, item.topic_id, item.partition)
            directory = DirectoryId(item.directory_id)
            if self._moves.target_of(partition_id) not in (None, directory):
                await _check_works(self._directories, directory)
            moving = self._moves.start(partition_id, directory)
            await deadline.wait(asyncio.shield(moving), "the move goes on")
        except TidelogError as error:
            return MoveOutcome(topic=item.topic, partition=item.partition, error=error.code, message=str(error))
        return MoveOutcome(topic=item.topic, partition=item.partition)


async def _check_works(directories: LogDirectories, directory: DirectoryId) -> None:
    """Raise an error before a request for this directory replaces a move in progress."""
    if not any(row.directory_id == directory and row.error is None for row in await directories.describe()):
        raise InvalidRequestError(f"this broker has no working log directory {directory}")
