"""What a broker does from time to time for all of its partitions together: a task for each duty, none for a partition.

lag          followers that fall behind leave the in-sync set
stalls       a group commit that takes longer than `disk.stall.timeout.ms`: the directory is told to the controller,
             which takes its leaderships and in-sync places; told again when it answers
directories  reports failed ones, and where replicas lie (`AssignDirectories`); `full_directories` has those without
             room
retention    every `log.retention.check.interval.ms`; bound by the high watermark and open transactions; then copies of
             what replicas gave up (`log.keeping`) and have again
cleaning     compaction, as long as a log needs it
scrub        sealed segments against their CRCs, slowly (`scrubbing`)
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from tidelog.log.directories import LogDirectory
from tidelog.log.lineage import NOTHING_DELETED
from tidelog.metadata import configs
from tidelog.metadata.partitions import AssignDirectories
from tidelog.model.errors import RemoteError, TransportError
from tidelog.model.ids import DirectoryId, Offset, PartitionId
from tidelog.replication.full_directories import FullDirectories
from tidelog.replication.scrubbing import Scrubbing

if TYPE_CHECKING:
    from tidelog.replication.replicas import Replicas

LOGGER = logging.getLogger(__name__)

LAG_CHECK_MAX_S = 1.0
SETTING_CHECK_S = 1.0
ASSIGNMENTS_PER_REQUEST_MAX = 5_000


class Upkeep:
    """See the module."""

    def __init__(self, host: Replicas) -> None:
        self.scrubbing = Scrubbing(host)
        self.full_directories = FullDirectories(host)
        self._host = host
        self._assignments: dict[PartitionId, DirectoryId] = {}
        self._wake = asyncio.Event()

    def start(self) -> None:
        self._host.logs.deletes_bound_of = self._deletes_bound
        for duty in (self._check_lags, self._check_stalls, self._assign_all, self._expire, self._clean):
            self._host.spawn(duty(), name=duty.__name__.lstrip("_").replace("_", "-"))
        self._host.spawn(self.scrubbing.run(), name="scrub")
        self._host.spawn(self.full_directories.run(), name="full-directories")

    def _setting_ms(self, name: str) -> int:
        value = configs.broker_config(self._host.image, name, self._host.me).value
        assert isinstance(value, int), f"{name} is an integer"
        return value

    # Lag.

    async def _check_lags(self) -> None:
        while True:
            await asyncio.sleep(min(self._host.lag_max_ms() / 4000, LAG_CHECK_MAX_S))
            for replica in list(self._host.all()):
                # Scrubs and cleanings find rot by themselves.
                if replica.role is not None and replica.role.log.damaged is not None:
                    self._host.found_damage(replica)
            for leading in self._host.leaders():
                state = leading.state
                if (len(state.isr) > 1 and state.high_watermark < state.log_end) or state.is_in_doubt:
                    self._host.isr_updates.look(leading.replica)

    # Directories.

    async def _check_stalls(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._host.config.stall_check_ms / 1000)
            limit_s = self._setting_ms("disk.stall.timeout.ms") / 1000
            stalled = tuple(
                directory.directory_id
                for directory in self._host.logs.directories
                if directory.failed is None
                and directory.directory_id is not None
                and (began := directory.group_commit.group_began) is not None
                and loop.time() - began > limit_s
            )
            agent = self._host.agent
            if stalled != agent.stalled_directories:
                LOGGER.error("broker=%d directories that stand still: %s", self._host.me, [str(d) for d in stalled])
                agent.stalled_directories = stalled
                agent.beat_soon()

    def directory_failed(self, directory: LogDirectory) -> None:
        agent = self._host.agent
        failed = directory.directory_id
        # One that was not registered is none of the controller's: nothing lies there, as far as it knows.
        if failed in agent.registration.directories and failed not in agent.failed_directories:
            agent.failed_directories = (*agent.failed_directories, failed)
            agent.beat_soon()

    def assign(self, partition_id: PartitionId, directory: DirectoryId) -> None:
        """The replica lies in this directory, which the metadata does not know."""
        self._assignments[partition_id] = directory
        self._wake.set()

    async def _assign_all(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._assignments:
                if self._host.broker_epoch < 0 or not await self._assign_some():
                    await asyncio.sleep(self._host.config.retry_max_ms / 1000)

    async def _assign_some(self) -> bool:
        some = list(self._assignments.items())[:ASSIGNMENTS_PER_REQUEST_MAX]
        request = AssignDirectories(
            broker=self._host.me,
            broker_epoch=self._host.broker_epoch,
            replicas=tuple((found.topic_id, found.partition, directory) for found, directory in some),
        )
        try:
            reply = await self._host.agent.ask(request)
        except (TransportError, RemoteError) as error:
            LOGGER.info("broker=%d directories are not told yet: %s", self._host.me, error)
            return False
        for (partition_id, directory), outcome in zip(some, reply.items, strict=True):
            if outcome.error is not None:
                LOGGER.warning("broker=%d directory of %s: %s", self._host.me, partition_id, outcome.message)
                replica = self._host.get(partition_id)
                if replica is not None:
                    self._host.unsettle_later(replica)  # a directory that stands still, perhaps
            if self._assignments.get(partition_id) == directory:
                del self._assignments[partition_id]
        return True

    # Housekeeping.

    async def _expire(self) -> None:
        loop = asyncio.get_running_loop()
        last_s = loop.time()
        while True:
            # In small steps: the interval may become shorter meanwhile.
            interval_s = self._setting_ms("log.retention.check.interval.ms") / 1000
            await asyncio.sleep(min(interval_s, SETTING_CHECK_S))
            if loop.time() - last_s < interval_s:
                continue
            last_s = loop.time()
            expired = await self._host.logs.expire()
            for partition_id in expired:
                self._host.wakers.wake(partition_id)
            await self._drop_kept()

    async def _drop_kept(self) -> None:
        """Copies of records that a replica gave up, and that are not needed any more."""
        host = self._host
        for partition_id in list(host.logs.kept.copies):
            if host.broker_epoch >= 0 and partition_id.topic_id not in host.image.topics:
                await host.logs.kept.drop(partition_id)
                continue
            replica = host.get(partition_id)
            if replica is not None and replica.log is not None and host.me in replica.partition.isr:
                await host.logs.kept.drop_covered(replica.log, replica.high_watermark)

    async def _clean(self) -> None:
        while True:
            await asyncio.sleep(self._host.config.cleaner_backoff_ms / 1000)
            is_more = True
            while is_more:
                is_more = await self._host.logs.clean_one() is not None
            for leading in self._host.leaders():
                leading.announce_deletes()

    def _deletes_bound(self, partition_id: PartitionId) -> Offset:
        """What has no role removes no delete that it has not given up before."""
        replica = self._host.get(partition_id)
        if replica is not None and replica.role is not None:
            return replica.role.deletes_bound()
        log = self._host.logs.get(partition_id)
        return NOTHING_DELETED if log is None else log.lineage.deletes_end
