"""Moves replicas between log directories: `log.log_move` copies a log in use, the reconciler swaps it.

    requested --copied--> to be finished --reconciled: appends or pushes paused--> swapped, reported to the controller

The role continues with the log in its new directory: leadership does not move.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tidelog.log.log import Log
from tidelog.log.log_move import LogMove
from tidelog.model.errors import (
    CorruptBatchError,
    InvalidRecordError,
    InvalidRequestError,
    NotLeaderOrFollowerError,
    TidelogError,
    UnsupportedMagicError,
)
from tidelog.model.ids import DirectoryId, PartitionId
from tidelog.replication.broker_context import BrokerContext
from tidelog.replication.follower_replica import FollowerReplica
from tidelog.replication.leader_replica import LeaderReplica
from tidelog.replication.repair import Repair
from tidelog.replication.replica import Replica

LOGGER = logging.getLogger(__name__)

_CORRUPTION_ERRORS = CorruptBatchError, InvalidRecordError, UnsupportedMagicError
"""Errors of a copy that prove a corrupt source."""


class Moves:
    """See the module. `assign` reports the new directory of a replica to the controller."""

    def __init__(
        self, context: BrokerContext, repair: Repair, assign: Callable[[PartitionId, DirectoryId], None]
    ) -> None:
        self._context = context
        self._repair = repair
        self._assign = assign
        self.in_progress: dict[PartitionId, LogMove] = {}
        self._copied: dict[Replica, tuple[LogMove, asyncio.Future[None]]] = {}
        """Complete copies that the reconciler swaps in, and their waiters."""

    def is_moving(self, replica: Replica) -> bool:
        return replica.partition_id in self.in_progress or replica in self._copied

    async def move(self, replica: Replica, directory: DirectoryId) -> None:
        """Return when the replica is in that directory. It stays in use, except for a short pause at the end."""
        if self.is_moving(replica):
            raise InvalidRequestError(f"{replica.topic}-{replica.partition_id.partition} is being moved already")
        move = self._context.logs.move(replica.partition_id, directory)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.in_progress[replica.partition_id] = move
        try:
            await self._copy(replica, move)
            self._copied[replica] = move, done
            self._context.queue.add(replica)
            await asyncio.shield(done)
        finally:
            del self.in_progress[replica.partition_id]
            if replica not in self._copied and not move.is_decided:
                await move.abandon()

    async def _copy(self, replica: Replica, move: LogMove) -> None:
        try:
            await move.copy()
        except _CORRUPTION_ERRORS:
            self._context.queue.report_corruption(replica, move.copied_end)
            raise

    async def abandon(self, replica: Replica) -> None:
        """Abandon the move: the replica is dropped, or has no log."""
        copied = self._copied.pop(replica, None)
        if copied is not None:
            move, done = copied
            try:
                await move.abandon()
            finally:
                _resolve(done, NotLeaderOrFollowerError("the replica is gone", leader=replica.partition.leader))

    async def finish(self, replica: Replica, log: Log) -> Log:
        """Swap the logs if a copy is complete; return the current log. The caller has exclusive use of the log."""
        if replica not in self._copied:
            return log
        move, done = self._copied[replica]
        role = replica.role
        if isinstance(role, LeaderReplica):
            role.is_paused = True
        elif isinstance(role, FollowerReplica):
            role.leave()
        try:
            moved = await move.finish()
        except TidelogError as error:
            LOGGER.error("log=%s is not moved: %s", log.path, error)
            _resolve(done, error)
            if not move.is_decided:
                if isinstance(error, _CORRUPTION_ERRORS):
                    self._context.queue.report_corruption(replica, move.copied_end)
                await move.abandon()
                return log
            # The log is complete in neither directory until the next start finishes the move.
            replica.end_role()
            replica.log = None
            if not move.has_home_failed:
                self._repair.lost(replica)  # otherwise the report of the failed directory covers it
            raise
        finally:
            del self._copied[replica]
            if isinstance(role, LeaderReplica):
                role.is_paused = False
        replica.log, replica.open_error = moved, None
        if role is not None:
            role.log = moved
        assert move.target.directory_id is not None, "a working directory has an id"
        self._assign(replica.partition_id, move.target.directory_id)
        _resolve(done, None)
        return moved


def _resolve(done: asyncio.Future[None], error: TidelogError | None) -> None:
    if done.done():
        return  # the caller was cancelled
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
        done.exception()
