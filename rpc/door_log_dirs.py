"""Log directories of this broker at the front door: sizes, and moving replicas between them.

A move may take hours. It goes on when its client has gone or its time is up; asking again waits for the same one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from tidelog.metadata.image import ClusterImage
from tidelog.model.errors import CallTimeoutError, TidelogError
from tidelog.model.ids import DirectoryId, PartitionId
from tidelog.replication.service import REPLICAS_PER_SLICE, DirectoryDescription, PartitionService
from tidelog.rpc.door_topics import partition_of, read_id
from tidelog.rpc.errors import as_message
from tidelog.rpc.v1 import admin_pb2 as pb
from tidelog.rpc.v1 import common_pb2 as common

LOGGER = logging.getLogger(__name__)


class LogDirs:
    def __init__(self, service: PartitionService) -> None:
        self._service = service
        self._moves: dict[tuple[PartitionId, DirectoryId], asyncio.Task[None]] = {}

    async def close(self) -> None:
        """Give up the moves that are under way."""
        moves = list(self._moves.values())
        for task in moves:
            task.cancel()
        await asyncio.gather(*moves, return_exceptions=True)

    async def describe(self, image: ClusterImage, topics: frozenset[str]) -> list[pb.LogDir]:
        """`topics` empty: of all."""
        return [await _directory(image, topics, found) for found in await self._service.log_directories()]

    def begin_move(self, where: PartitionId, path: str) -> None:
        """Moves the replica to the directory with this path, as Kafka does: it goes on after this call, which raises
        only what is known at once. A move to another directory ends; if the replica is there already that is all."""
        directory = self._service.directory_at(path)
        present = self._service.directory_id_of(where)
        former = [
            task for (partition, target), task in self._moves.items() if partition == where and target != directory
        ]
        for task in former:
            task.cancel()
        if present != directory or (where, directory) in self._moves:
            self._start(where, directory, after=former)

    async def move(
        self, image: ClusterImage, replicas: Sequence[pb.MovedReplica], *, timeout_ms: int
    ) -> list[common.PartitionOutcome]:
        """All at once; each is answered when it is moved, or has failed."""
        return list(await asyncio.gather(*(self._moved(image, item, timeout_ms) for item in replicas)))

    async def _moved(self, image: ClusterImage, item: pb.MovedReplica, timeout_ms: int) -> common.PartitionOutcome:
        row = common.PartitionOutcome(topic=item.topic, partition=item.partition)
        try:
            where = partition_of(image, item)
            directory = DirectoryId(read_id(item.directory_id, "directory id"))
            moving = self._start(where, directory)
            async with asyncio.timeout(timeout_ms / 1000):
                await asyncio.shield(moving)
        except TimeoutError:
            late = CallTimeoutError(f"not moved in {timeout_ms} ms; it goes on")
            row.error.CopyFrom(as_message(late))
        except TidelogError as error:
            row.error.CopyFrom(as_message(error))
        return row

    def _start(
        self, where: PartitionId, directory: DirectoryId, *, after: Sequence[asyncio.Task[None]] = ()
    ) -> asyncio.Task[None]:
        async def move() -> None:
            if after:
                await asyncio.wait(after)
            await self._service.move_replica(where, directory)

        key = (where, directory)
        if key not in self._moves:
            task = asyncio.get_running_loop().create_task(move())
            self._moves[key] = task
            task.add_done_callback(lambda done: self._ended(key, done))
        return self._moves[key]

    def _ended(self, key: tuple[PartitionId, DirectoryId], task: asyncio.Task[None]) -> None:
        del self._moves[key]
        if not task.cancelled() and task.exception() is not None:
            LOGGER.warning("%s was not moved to %s: %s", *key, task.exception())


async def _directory(image: ClusterImage, topics: frozenset[str], found: DirectoryDescription) -> pb.LogDir:
    row = pb.LogDir(
        directory_id=b"" if found.directory_id is None else found.directory_id.bytes,
        path=found.label,
        error=None if found.error is None else as_message(found.error),
        usable_bytes=found.free_bytes,
        is_full=found.is_full,
    )
    for number, replica in enumerate(found.replicas, start=1):
        if number % REPLICAS_PER_SLICE == 0:
            await asyncio.sleep(0)
        topic = image.topics.get(replica.partition.topic_id)
        name = "" if topic is None else topic.name
        if not replica.is_future and (not topics or name in topics):
            row.replicas.add(
                topic=name,
                topic_id=replica.partition.topic_id.bytes,
                partition=replica.partition.partition,
                bytes=replica.size,
                lag=replica.offset_lag,
            )
    return row
