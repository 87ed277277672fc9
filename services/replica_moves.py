"""Moves replicas between the log directories of this broker: one desired directory for each partition, and one task
that works towards it.

    request for                          running move                 its waiters
    another partition                    goes on                      wait on
    the same partition and directory     goes on                      wait on, and so does the new one
    the same partition, elsewhere        ends; its copy is deleted    INVALID_REQUEST: replaced by a later request

The latest request counts, however quickly requests follow each other: a move begins when the one before has ended.
"""

from __future__ import annotations

import asyncio
import logging

from tidelog.model.errors import InvalidRequestError, ReplicaNotAvailableError, TransportError
from tidelog.model.ids import DirectoryId, PartitionId
from tidelog.replication.log_directories import LogDirectories

LOGGER = logging.getLogger(__name__)


class _Target:
    """A directory that a replica shall be in, until it is there or a later request names another one."""

    def __init__(self, partition: PartitionId, directory: DirectoryId) -> None:
        self.directory = directory
        self.reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._partition = partition

    def end(self, error: BaseException | None) -> None:
        if error is None:
            self.reached.set_result(None)
            return
        LOGGER.warning("partition=%s was not moved to directory=%s: %s", self._partition, self.directory, error)
        self.reached.set_exception(error)
        self.reached.exception()  # nobody has to wait for it


class _Move:
    """`target` changes; `task` works towards it by one `step` after the other."""

    def __init__(self, target: _Target) -> None:
        self.target = target
        self.task: asyncio.Task[None] | None = None
        self.step: asyncio.Task[None] | None = None

    def end_step(self) -> None:
        """Cancel the step once: a second time would interrupt the deletion of its copy."""
        if self.step is not None and not self.step.cancelling():
            self.step.cancel()


class ReplicaMoves:
    def __init__(self, directories: LogDirectories) -> None:
        self._directories = directories
        self._moves: dict[PartitionId, _Move] = {}

    def __len__(self) -> int:
        """Partitions that are being moved."""
        return len(self._moves)

    def target_of(self, partition: PartitionId) -> DirectoryId | None:
        """Return where the replica is being moved to; None if it is not being moved."""
        move = self._moves.get(partition)
        return None if move is None else move.target.directory

    def start(self, partition: PartitionId, directory: DirectoryId) -> asyncio.Future[None]:
        """Begin to move the replica to this directory. Return a future, to be shielded, of the end of the move."""
        move = self._moves.get(partition)
        if move is None:
            move = self._moves[partition] = _Move(_Target(partition, directory))
            move.task = asyncio.get_running_loop().create_task(self._run(partition, move))
        elif move.target.directory != directory:
            old, move.target = move.target, _Target(partition, directory)
            message = f"a later request moves the replica to directory {directory}, not to {old.directory}"
            old.end(InvalidRequestError(message))
            move.end_step()
        return move.target.reached

    async def _run(self, partition: PartitionId, move: _Move) -> None:
        target: _Target | None = None
        error: BaseException | None = None
        while target is not move.target:  # another one may be desired meanwhile
            target = move.target
            work = self._directories.move_replica(partition, target.directory)
            move.step = step = asyncio.get_running_loop().create_task(work)
            try:
                await asyncio.wait([step])
            except asyncio.CancelledError:
                move.end_step()
                await asyncio.wait([step])
                raise
            interrupted = ReplicaNotAvailableError(f"the move of {partition} was interrupted; ask again")
            error = interrupted if step.cancelled() else step.exception()
        del self._moves[partition]
        move.target.end(error)

    async def close(self) -> None:
        """Cancel the moves in progress."""
        moves = list(self._moves.values())
        self._moves.clear()
        tasks = [move.task for move in moves if move.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for move in moves:
            if not move.target.reached.done():
                move.target.end(TransportError("this node is stopping; the move does not go on"))
