"""Describes the log directories of a broker and moves replicas between them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from uuid import UUID

from tidelog.log.directories import LogDirectory, log_order
from tidelog.model.admin_errors import LogDirNotFoundError
from tidelog.model.errors import ErrorCode, InvalidRequestError, ReplicaNotAvailableError, StorageError
from tidelog.model.ids import DirectoryId, PartitionId
from tidelog.replication.replica import Replica
from tidelog.replication.replicas import Replicas
from tidelog.world.slicing import sliced

REPLICAS_PER_SLICE = 500
"""Replicas described in one turn of the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogDirReplica:
    """Brokers send it to each other, as they do `LogDir`: new fields are added at the end, with a default."""

    topic: str
    """Empty if the topic is deleted."""
    topic_id: UUID
    partition: int
    size: int
    offset_lag: int
    """Offsets behind the high watermark; of a copy, behind the log that is copied."""
    is_future: bool
    """A copy in progress that will replace the replica in another directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogDir:
    directory_id: UUID | None
    path: str
    error: ErrorCode | None
    message: str
    total_bytes: int
    usable_bytes: int
    is_full: bool
    """It has no space for appends; reads go on."""
    replicas: tuple[LogDirReplica, ...]


class LogDirectories:
    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    async def describe(self, topics: Collection[str] = ()) -> tuple[LogDir, ...]:
        """Describe all directories, with the replicas of these topics; none named: all."""
        return tuple([await self._describe(directory, topics) for directory in self._replicas.logs.directories])

    async def _describe(self, directory: LogDirectory, topics: Collection[str]) -> LogDir:
        copies = {
            partition: move for partition, move in self._replicas.moves.in_progress.items() if move.target is directory
        }
        rows = []
        async for partition in sliced(sorted({*directory.paths, *copies}, key=log_order), REPLICAS_PER_SLICE):
            topic = self._replicas.image.topics.get(partition.topic_id)
            name, move = "" if topic is None else topic.name, copies.get(partition)
            if topics and name not in topics:
                continue
            if partition in directory.paths and (log := self._replicas.logs.get(partition)) is not None:
                replica = self._replicas.get(partition)
                lag = max(0, replica.high_watermark - log.end_offset) if replica is not None else 0
                rows.append(_row(name, partition, log.size, lag, is_future=False))
            if move is not None:
                rows.append(_row(name, partition, move.copied_bytes, move.lag, is_future=True))
        failed = directory.failed
        return LogDir(
            directory_id=directory.directory_id,
            path=directory.disk.label,
            error=None if failed is None else failed.code,
            message="" if failed is None else str(failed),
            total_bytes=-1 if failed is not None else directory.disk.total_bytes(),
            usable_bytes=-1 if failed is not None else directory.disk.free_bytes(),
            is_full=directory in self._replicas.full_directories,
            replicas=tuple(rows),
        )

    def directory_at(self, path: str) -> DirectoryId:
        """Returns the id of the log directory with this path."""
        for directory in self._replicas.logs.directories:
            if directory.disk.label == path:
                if directory.failed is not None or directory.directory_id is None:
                    raise StorageError(f"log directory {path} of broker {self._replicas.me} has failed")
                return directory.directory_id
        raise LogDirNotFoundError(f"broker {self._replicas.me} has no log directory {path[:200]!r}")

    def directory_id_of(self, partition: PartitionId) -> DirectoryId | None:
        """Returns the directory of this broker's replica; raises `ReplicaNotAvailableError` if no replica is open."""
        self._open_replica(partition)
        directory = self._replicas.logs.directory_of(partition)
        return None if directory is None else directory.directory_id

    def _open_replica(self, partition: PartitionId) -> Replica:
        replica = self._replicas.get(partition)
        if replica is None or replica.log is None or replica.is_dropped:
            raise ReplicaNotAvailableError(f"broker {self._replicas.me} has no open replica of {partition}")
        return replica

    async def move_replica(self, partition: PartitionId, directory: DirectoryId) -> None:
        """Returns when the replica is in that directory."""
        replica = self._open_replica(partition)
        known = [d for d in self._replicas.logs.directories if d.directory_id == directory and d.failed is None]
        if not known:
            raise InvalidRequestError(f"broker {self._replicas.me} has no working log directory {directory}")
        if self._replicas.logs.directory_of(partition) is not known[0]:
            await self._replicas.moves.move(replica, directory)


def _row(name: str, partition: PartitionId, size: int, lag: int, *, is_future: bool) -> LogDirReplica:
    topic_id, number = partition.topic_id, partition.partition
    return LogDirReplica(
        topic=name, topic_id=topic_id, partition=number, size=size, offset_lag=lag, is_future=is_future
    )
