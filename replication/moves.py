"""Replicas that change their log directory: copied by `log.moving` while they are used, swapped when they are settled.

    asked --copied--> to be finished --settled: appends held, or no subscription--> swapped, told to the controller

The role goes on with the log in its new place: nobody else has to lead for that.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from tidelog.log.log import Log
from tidelog.model.errors import (
    CorruptBatchError,
    InvalidRecordError,
    InvalidRequestError,
    NotLeaderOrFollowerError,
    TidelogError,
    UnsupportedMagicError,
)
from tidelog.model.ids import DirectoryId, PartitionId
from tidelog.replication.following import Following
from tidelog.replication.leading import Leading

if TYPE_CHECKING:
    from tidelog.log.moving import LogMove
    from tidelog.replication.replica import Replica
    from tidelog.replication.replicas import Replicas

LOGGER = logging.getLogger(__name__)

_ROT = CorruptBatchError, InvalidRecordError, UnsupportedMagicError
"""A copy refuses what its source has: that is not what was written."""


class Moves:
    """See the module."""

    def __init__(self, host: Replicas) -> None:
        self._host = host
        self.under_way: dict[PartitionId, LogMove] = {}

    async def move(self, replica: Replica, directory: DirectoryId) -> None:
        """Returns when the replica lies in that directory. It is used meanwhile, but for a moment at the end."""
        if replica.is_moving:
            raise InvalidRequestError(f"{replica.topic}-{replica.partition_id.partition} is being moved already")
        move = self._host.logs.move(replica.partition_id, directory)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        replica.is_moving = True
        self.under_way[replica.partition_id] = move
        try:
            await self._copy(replica, move)
            replica.move = move, done
            self._host.unsettle(replica)
            await asyncio.shield(done)
        finally:
            del self.under_way[replica.partition_id]
            replica.is_moving = replica.move is not None
            if replica.move is None and not move.is_decided:
                await move.abandon()

    async def _copy(self, replica: Replica, move: LogMove) -> None:
        try:
            await move.copy()
        except _ROT:
            self._host.found_rot(replica, move.copied_end)
            raise

    async def stop(self, replica: Replica) -> None:
        """The replica is about to go, or has no log any more."""
        if replica.move is not None:
            (move, done), replica.move = replica.move, None
            replica.is_moving = False
            try:
                await move.abandon()
            finally:
                _tell(done, NotLeaderOrFollowerError("the replica is gone", leader=replica.partition.leader))

    async def finish(self, replica: Replica, log: Log) -> Log:
        """While nobody else touches the log. Returns the one that counts."""
        assert replica.move is not None, "there is something to finish"
        move, done = replica.move
        role = replica.role
        if isinstance(role, Leading):
            role.is_held = True
        elif isinstance(role, Following):
            role.leave()
        try:
            moved = await move.finish()
        except TidelogError as error:
            LOGGER.error("log=%s is not moved: %s", log.path, error)
            _tell(done, error)
            if not move.is_decided:
                if isinstance(error, _ROT):
                    self._host.found_rot(replica, move.copied_end)
                await move.abandon()
                return log
            # It is in neither place as it should be, until the next start has ended the move.
            self._host.end_role(replica)
            replica.log = None
            self._host.repair.lost(replica)
            raise
        finally:
            replica.move = None
            replica.is_moving = False
            if isinstance(role, Leading):
                role.is_held = False
        replica.log, replica.offline = moved, None
        if role is not None:
            role.log = moved
        assert move.target.directory_id is not None, "a directory that works has an id"
        self._host.upkeep.assign(replica.partition_id, move.target.directory_id)
        _tell(done, None)
        return moved


def _tell(done: asyncio.Future[None], error: TidelogError | None) -> None:
    if done.done():
        return  # whoever asked is gone
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
        done.exception()
