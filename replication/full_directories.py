"""Tracks log directories without room for appends, and frees what retention allows.

    has room --append rejected (DiskFullError)--> full --free space, and no rejection for `QUIET_S`--> has room

While a directory is full:
- The controller knows it by the heartbeats: others lead what lies there, if they can, and `describe` shows it.
- Retention of its logs runs at once, and then every `RETENTION_S`; files that it drops are removed without their delay.
- One log line reports the change to full, one the change back.

A full directory can be read, and a small append may still fit: the state is a report, it rejects nothing by itself.
"""

from __future__ import annotations

import asyncio
import logging

from tidelog.log.directories import LogDirectory
from tidelog.log.logs import Logs
from tidelog.metadata.broker_lifecycle import BrokerLifecycle
from tidelog.model.errors import DISK_FULL_ADVICE, StorageError
from tidelog.model.ids import PartitionId
from tidelog.replication.waiters import Wakers

LOGGER = logging.getLogger(__name__)

CHECK_S = 1.0
QUIET_S = 5.0
RETENTION_S = 5.0
ROOM_BYTES_MIN = 1 << 20
"""Free space below which a directory stays full, even if nobody appends."""


class FullDirectories:
    """See the module. `run` is its task."""

    def __init__(self, agent: BrokerLifecycle, logs: Logs, wakers: Wakers) -> None:
        self._agent = agent
        self._logs = logs
        self._wakers = wakers
        self._rejected_s: dict[LogDirectory, float] = {}
        """Full directories, with the time of the last rejected append."""
        self._wake = asyncio.Event()

    def __contains__(self, directory: LogDirectory) -> bool:
        return directory in self._rejected_s

    def append_rejected(self, partition_id: PartitionId) -> None:
        """An append of this replica, leader or follower, found no room."""
        directory = self._logs.directory_of(partition_id)
        if directory is None or directory.has_failed():
            return
        is_new = directory not in self._rejected_s
        self._rejected_s[directory] = asyncio.get_running_loop().time()
        if is_new:
            LOGGER.error(
                "directory=%s is full: its %d replicas take no appends, others lead them if they can; %s",
                *(directory.disk.label, len(directory.paths), DISK_FULL_ADVICE),
            )
            self._report()
            self._wake.set()

    def _report(self) -> None:
        agent = self._agent
        known = agent.registration.directories
        full = {directory.directory_id for directory in self._rejected_s}
        agent.full_directories = tuple(directory_id for directory_id in known if directory_id in full)
        agent.heartbeat_soon()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            retention_s = -RETENTION_S
            while self._rejected_s:
                if loop.time() - retention_s >= RETENTION_S:
                    retention_s = loop.time()
                    await self._free_space()
                await asyncio.sleep(CHECK_S)
                self._check_room(loop.time())

    async def _free_space(self) -> None:
        for directory in list(self._rejected_s):
            expired = await self._logs.housekeeping.expire(directory=directory)
            for partition_id in expired:
                self._wakers.wake(partition_id)
            if expired:
                LOGGER.warning(
                    "directory=%s retention freed segments of %d full replicas", directory.disk.label, len(expired)
                )

    def _check_room(self, now_s: float) -> None:
        for directory, rejected_s in list(self._rejected_s.items()):
            if directory.has_failed():
                has_room = True  # `Replicas._directory_failed` reports it
            elif now_s - rejected_s < QUIET_S:
                has_room = False
            else:
                try:
                    has_room = directory.disk.free_bytes() >= ROOM_BYTES_MIN
                except StorageError as error:
                    LOGGER.warning("directory=%s free space is unknown: %s", directory.disk.label, error)
                    has_room = False
            if has_room:
                del self._rejected_s[directory]
                if not directory.has_failed():
                    LOGGER.warning("directory=%s has room again", directory.disk.label)
                self._report()
