"""Runs the periodic work of a broker over all of its partitions: one task per duty, none per partition.

lag          removes followers that fall behind from the in-sync set
stalls       reports a directory whose group commit takes longer than `disk.stall.timeout.ms`. The controller moves its
             leaderships and removes its replicas from in-sync sets. Reports again when the commit returns
directories  reports failed directories, and the directory of each replica (`AssignDirectories`); `full_directories`
             tracks those without free space
retention    runs every `log.retention.check.interval.ms`, bounded by the high watermark and open transactions, by the
             config of the topic if it is known; then drops kept copies (`log.kept_copies`) of records that the replica
             has again
cleaning     compacts logs that have their topic's config, until none needs it
scrub        compares sealed segments with their CRCs at a limited rate (`scrubbing`)
"""

from __future__ import annotations

import asyncio
import logging

from tidelog.log.config import LogConfig
from tidelog.log.directories import LogDirectory
from tidelog.log.lineage import NOTHING_DELETED
from tidelog.log.log import Log
from tidelog.metadata import configs
from tidelog.metadata.partitions import AssignDirectories
from tidelog.model.errors import TidelogError
from tidelog.model.ids import DirectoryId, Offset, PartitionId
from tidelog.model.uuids import to_text
from tidelog.replication.broker_context import BrokerContext
from tidelog.replication.isr_updates import IsrUpdates
from tidelog.replication.leader_replica import leaders_of
from tidelog.replication.scrubbing import Scrubbing

LOGGER = logging.getLogger(__name__)

LAG_CHECK_MAX_S = 1.0
SETTING_CHECK_S = 1.0
ASSIGNMENTS_PER_REQUEST_MAX = 5_000


class BackgroundTasks:
    """See the module."""

    def __init__(self, context: BrokerContext, isr_updates: IsrUpdates, scrubbing: Scrubbing) -> None:
        self.scrubbing = scrubbing
        self._context = context
        self._metadata = context.metadata
        self._isr_updates = isr_updates
        self._assignments: dict[PartitionId, DirectoryId] = {}
        self._wake = asyncio.Event()
        context.logs.housekeeping.config_of = self._config_of

    def start(self) -> None:
        spawn = self._context.tasks.spawn
        for duty in (self._check_lags, self._check_stalls, self._assign_all, self._expire, self._clean):
            spawn(duty(), name=duty.__name__.lstrip("_").replace("_", "-"))
        spawn(self.scrubbing.run(), name="scrub")
        spawn(self._context.full_directories.run(), name="full-directories")

    # Lag.

    async def _check_lags(self) -> None:
        while True:
            await asyncio.sleep(min(self._metadata.lag_max_ms() / 4000, LAG_CHECK_MAX_S))
            for replica in list(self._context.replicas.values()):
                # Scrubs and cleanings mark a log as damaged without a call to `report_damage`.
                if replica.role is not None and replica.role.log.damaged is not None:
                    self._context.queue.report_damage(replica)
            for leader in leaders_of(self._context.replicas.values()):
                state = leader.state
                if (len(state.isr) > 1 and state.high_watermark < state.log_end) or state.has_unresolved_proposal:
                    self._isr_updates.check(leader.replica)

    # Directories.

    async def _check_stalls(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._context.config.stall_check_ms / 1000)
            limit_s = self._metadata.setting("disk.stall.timeout.ms") / 1000
            stalled = tuple(
                directory.directory_id
                for directory in self._context.logs.directories
                if directory.failed is None
                and directory.directory_id is not None
                and (began := directory.group_commit.group_began) is not None
                and loop.time() - began > limit_s
            )
            agent = self._context.agent
            if stalled != agent.stalled_directories:
                LOGGER.error("broker=%d stalled directories: %s", self._metadata.me, ", ".join(map(to_text, stalled)))
                agent.stalled_directories = stalled
                agent.heartbeat_soon()

    def directory_failed(self, directory: LogDirectory) -> None:
        agent = self._context.agent
        failed = directory.directory_id
        # The controller knows only registered directories: no replica is recorded in any other.
        if failed in agent.registration.directories and failed not in agent.failed_directories:
            agent.failed_directories = (*agent.failed_directories, failed)
            agent.heartbeat_soon()

    def assign(self, partition_id: PartitionId, directory: DirectoryId) -> None:
        """Report to the controller that the replica is in this directory."""
        self._assignments[partition_id] = directory
        self._wake.set()

    async def _assign_all(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._assignments:
                if self._metadata.broker_epoch < 0 or not await self._assign_some():
                    await asyncio.sleep(self._context.config.retry_max_ms / 1000)

    async def _assign_some(self) -> bool:
        some = list(self._assignments.items())[:ASSIGNMENTS_PER_REQUEST_MAX]
        request = AssignDirectories(
            broker=self._metadata.me,
            broker_epoch=self._metadata.broker_epoch,
            replicas=tuple(
                (partition_id.topic_id, partition_id.partition, directory) for partition_id, directory in some
            ),
        )
        try:
            reply = await self._context.agent.ask(request)
        except TidelogError as error:
            LOGGER.info("broker=%d replica directories are not reported yet: %s", self._metadata.me, error)
            return False
        for (partition_id, directory), outcome in zip(some, reply.items, strict=True):
            if outcome.error is not None:
                LOGGER.warning("broker=%d directory of %s: %s", self._metadata.me, partition_id, outcome.message)
                replica = self._context.replicas.get(partition_id)
                if replica is not None:
                    self._context.queue.add_later(replica)  # the directory may be stalled
            if self._assignments.get(partition_id) == directory:
                del self._assignments[partition_id]
        return True

    # Housekeeping.

    def _config_of(self, log: Log) -> LogConfig | None:
        """Return the config of the log's topic, in metadata that include this broker's registration. A log is opened
        with older metadata, which may lack the topic: by the defaults its records could go."""
        metadata = self._metadata
        topic = metadata.image.topics.get(log.log_id.topic_id)
        if topic is None or metadata.broker_epoch < 0:
            return None
        return configs.log_config(metadata.image, topic.name)

    async def _expire(self) -> None:
        loop = asyncio.get_running_loop()
        last_s = loop.time()
        while True:
            # Sleep in small steps: the setting may become shorter meanwhile.
            interval_s = self._metadata.setting("log.retention.check.interval.ms") / 1000
            await asyncio.sleep(min(interval_s, SETTING_CHECK_S))
            if loop.time() - last_s < interval_s:
                continue
            last_s = loop.time()
            expired = await self._context.logs.housekeeping.expire()
            for partition_id in expired:
                self._context.wakers.wake(partition_id)
            await self._drop_kept()

    async def _drop_kept(self) -> None:
        """Drop kept copies of records that the replica, or the cluster, no longer needs."""
        kept, metadata = self._context.logs.kept, self._metadata
        for partition_id in list(kept.copies):
            if metadata.broker_epoch >= 0 and partition_id.topic_id not in metadata.image.topics:
                await kept.drop(partition_id)
                continue
            replica = self._context.replicas.get(partition_id)
            if replica is not None and replica.log is not None and metadata.me in replica.partition.isr:
                await kept.drop_covered(replica.log, replica.high_watermark)

    async def _clean(self) -> None:
        while True:
            await asyncio.sleep(self._context.config.cleaner_backoff_ms / 1000)
            is_more = True
            while is_more:
                is_more = await self._context.logs.housekeeping.clean_one(self._deletes_bound) is not None
            for leader in leaders_of(self._context.replicas.values()):
                leader.announce_deletes()

    def _deletes_bound(self, partition_id: PartitionId) -> Offset:
        """Return the offset from which a log keeps its tombstones and markers. A replica without a role keeps all that
        it still has."""
        replica = self._context.replicas.get(partition_id)
        if replica is not None and replica.role is not None:
            return replica.role.deletes_bound()
        log = self._context.logs.get(partition_id)
        return NOTHING_DELETED if log is None else log.lineage.deletes_end
