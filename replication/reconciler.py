"""Reconciles replicas with the metadata, in passes that `reconciler_queue` runs.

    enqueued --a worker takes it--> dropped: the log is removed
                                    log is being recovered: nothing; enqueued again when it is open (`recovery_reports`)
                                    open log, apply configs, repair, move, report directory, take role, subscribe, trim

Each step inspects the current state. An I/O or network error ends the pass; the next pass runs after `repair_retry_ms`,
and the current role goes on meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from tidelog.log.config import FlushMode
from tidelog.log.duplicate_logs import choose, undecided
from tidelog.log.log import Log
from tidelog.metadata import configs
from tidelog.metadata.image import NIL, Partition
from tidelog.model.errors import DiskFullError, FencedLeaderEpochError, TidelogError
from tidelog.model.ids import NO_EPOCH, DirectoryId, Offset, PartitionId
from tidelog.replication.broker_context import BrokerContext
from tidelog.replication.follower_replica import FollowerReplica
from tidelog.replication.follower_stream import FollowerStreams
from tidelog.replication.leader_replica import LeaderEvents, LeaderReplica
from tidelog.replication.leader_stream import LeaderStreams
from tidelog.replication.moves import Moves
from tidelog.replication.partition import FollowerState, LeaderState
from tidelog.replication.recovery_reports import RecoveryReports
from tidelog.replication.repair import Repair
from tidelog.replication.replica import Replica, ackable_end, now_ms

LOGGER = logging.getLogger(__name__)


class Reconciler:
    """See the module. `assign` reports the directory of a replica to the controller, `remove` forgets a replica."""

    def __init__(
        self,
        context: BrokerContext,
        *,
        leader_events: LeaderEvents,
        leader_streams: LeaderStreams,
        follower_streams: FollowerStreams,
        repair: Repair,
        recovering: RecoveryReports,
        moves: Moves,
        assign: Callable[[PartitionId, DirectoryId], None],
        remove: Callable[[Replica], None],
    ) -> None:
        self._context = context
        self._metadata = context.metadata
        self._logs = context.logs
        self._leader_events = leader_events
        self._leader_streams = leader_streams
        self._follower_streams = follower_streams
        self._repair = repair
        self._recovering = recovering
        self._moves = moves
        self._assign = assign
        self._remove = remove

    async def reconcile(self, replica: Replica) -> None:
        metadata, repair = self._metadata, self._repair
        try:
            if replica.is_dropped:
                await self._moves.abandon(replica)
                await self._forget(replica)
                return
            if self._recovering.is_waiting(replica):
                return
            log = replica.log or await self._open(replica)
            if log is None:
                await self._moves.abandon(replica)  # without a log there is nothing to move
                return
            await self._configure(replica, log)
            if log.damaged is not None and not await repair.repair(replica, log):
                return
            log = await self._moves.finish(replica, log)
            if replica.role is None and replica.partition.leader == metadata.me and metadata.broker_epoch >= 0:
                await self._advance_start_before_leading(replica, log)
            if not self._holds(replica, log) or log.damaged is not None:
                return  # its directory failed, or damage was detected, in one of the steps: it is enqueued
            # In another directory than the recorded one, the controller would count it as the replica recorded there.
            if self._report_directory(replica) and self._recovering.is_reported(replica):
                self._take_role(replica, log)
            await self._follow(replica, log)
            await self._trim(replica, log)
        except TidelogError as error:
            LOGGER.error("broker=%d %s-%d: %s", metadata.me, replica.topic, replica.partition_id.partition, error)
            directory = self._logs.directory_of(replica.partition_id)
            if directory is not None and directory.failed is not None:
                return  # the whole directory is offline
            # A full disk or a similar error. The current role goes on.
            if isinstance(error, DiskFullError):
                self._context.full_directories.append_rejected(replica.partition_id)
            if replica.log is None:
                replica.open_error = error
            self._context.queue.add_later(replica)

    def _holds(self, replica: Replica, log: Log) -> bool:
        """Return whether this is the replica's log, in a directory that works: only such a log has a role."""
        directory = self._logs.directory_of(replica.partition_id)
        if directory is not None and directory.failed is not None and replica.log is log:
            # It failed between the opening of the log and the turn of this pass.
            replica.end_role()
            replica.log, replica.open_error = None, directory.failed
        return replica.log is log

    async def _forget(self, replica: Replica) -> None:
        replica.log = None
        await self._logs.remove(replica.partition_id)
        if replica.is_dropped and not replica.is_removed:
            self._remove(replica)

    async def _open(self, replica: Replica) -> Log | None:
        logs, repair = self._logs, self._repair
        recorded = replica.partition.directory_of(self._metadata.me)
        if replica.partition_id in logs.duplicates and not await self._choose_copy(replica, DirectoryId(recorded)):
            return None
        await logs.wait_open(replica.partition_id)
        directory = logs.directory_of(replica.partition_id)
        if replica.partition_id in logs.failures:
            replica.open_error = logs.failures[replica.partition_id]
            if directory is not None and directory.failed is not None:
                if directory.directory_id != recorded:
                    repair.lost(replica)  # the report of the failed directory does not cover this replica
                return None
            if not await repair.reopen(replica):
                return None
        elif directory is None and not repair.may_begin(replica):
            return None
        working = [d.directory_id for d in logs.directories if d.failed is None]
        wanted = DirectoryId(recorded) if recorded != NIL and recorded in working else None
        config = configs.log_config(self._metadata.image, replica.topic)
        log = await logs.create(replica.partition_id, label=replica.topic, config=config, directory=wanted)
        replica.log, replica.open_error = log, None
        replica.high_watermark = logs.high_watermark(replica.partition_id)
        return log

    async def _choose_copy(self, replica: Replica, recorded: DirectoryId) -> bool:
        """Keep the copy in the directory that the metadata records; return False if there is none. Waits until this
        incarnation is registered: older metadata may name a former directory."""
        if self._metadata.broker_epoch < 0:
            return False
        copies = self._logs.duplicates[replica.partition_id]
        if choose(copies, recorded) is None:
            replica.open_error = undecided(replica.partition_id, copies)
            LOGGER.error("broker=%d %s", self._metadata.me, replica.open_error)
            self._repair.lost(replica)
            return False
        # An error here may be transient and does not concern the kept copy: the next pass retries.
        await self._logs.keep(replica.partition_id, recorded)
        return True

    def _report_directory(self, replica: Replica) -> bool:
        """Report the directory of the log; return whether the metadata has it, or has none."""
        home = self._logs.directory_of(replica.partition_id)
        recorded = replica.partition.directory_of(self._metadata.me)
        if home is None or home.directory_id is None or home.directory_id == recorded:
            return True
        self._assign(replica.partition_id, home.directory_id)
        return recorded == NIL

    async def _configure(self, replica: Replica, log: Log) -> None:
        metadata = self._metadata
        if metadata.is_deleted(replica):
            return
        config = configs.log_config(metadata.image, replica.topic)
        if log.config is not config and log.config != config:
            await log.configure(config)
        elif config.cleanup_compact:
            await log.allow_gaps()
        # The registration has reported a loss that was detected when the log was opened.
        is_sync = config.flush_mode is FlushMode.SYNC
        if is_sync and log.is_page_cache and log.damaged is None and metadata.broker_epoch >= 0:
            await log.clear_page_cache()

    def _take_role(self, replica: Replica, log: Log) -> None:
        partition, me = replica.partition, self._metadata.me
        if replica.role is not None or replica.is_dropped or self._context.tasks.is_closed:
            return
        if self._metadata.broker_epoch < 0 or self._metadata.is_deleted(replica):
            return
        if partition.leader == me:
            if partition.leader_epoch <= replica.led_epoch:
                # The controller's answers in this epoch are forgotten: no epoch is led twice.
                LOGGER.error("broker=%d has led %s in epoch %d before", me, log.path, partition.leader_epoch)
                return
            try:
                log.assign_epoch(partition.leader_epoch)
            except FencedLeaderEpochError as error:
                LOGGER.error("broker=%d cannot lead %s: %s", me, log.path, error)
                return
            self._lead(replica, log, partition)
        elif partition.leader >= 0:
            log.forget_empty_epochs()
            state = FollowerState(
                leader=partition.leader,
                leader_epoch=partition.leader_epoch,
                log_end=log.end_offset,
                durable_end=ackable_end(log),
                high_watermark=replica.high_watermark,
            )
            replica.role = FollowerReplica(self._context, replica, log, state)
            self._context.wakers.wake(replica.partition_id)

    def _lead(self, replica: Replica, log: Log, partition: Partition) -> None:
        metadata = self._metadata
        state = LeaderState(
            me=metadata.me,
            my_broker_epoch=metadata.broker_epoch,
            partition=partition,
            min_isr=metadata.min_isr(replica),
            log_end=log.end_offset,
            durable_end=ackable_end(log),
            high_watermark=Offset(min(replica.high_watermark, log.end_offset)),
            now_ms=now_ms(),
            lag_max_ms=metadata.lag_max_ms(),
        )
        replica.led_epoch = partition.leader_epoch
        log.limit_lineage_to_end()
        leader = replica.role = LeaderReplica(self._context, self._leader_events, replica, log, state)
        leader.begin()
        self._leader_streams.retry_parked(replica.partition_id)

    async def _follow(self, replica: Replica, log: Log) -> None:
        """Change the log as the leader requires, then subscribe."""
        role = replica.role
        if not isinstance(role, FollowerReplica):
            return
        if role.must_change_log:
            await role.change_log()
        if log.lineage.leader_epoch not in (NO_EPOCH, role.leader_epoch):
            await log.forget_leader()
        if not role.is_over and role.stream is None and not role.must_change_log and log.damaged is None:
            self._follower_streams.add(role)

    async def _advance_start_before_leading(self, replica: Replica, log: Log) -> None:
        """Advance the log start before the replica leads: records that a former leader deleted do not reappear. On a
        full disk they do, until space is free. A log that ends below that offset (an unclean election) continues at it:
        records with smaller offsets would be deleted like the former ones."""
        if log.end_offset < replica.partition.start_offset:
            LOGGER.warning(
                "log=%s ends at %d, records below %d were deleted: it continues there",
                log.path,
                log.end_offset,
                replica.partition.start_offset,
            )
            await log.reset_to(replica.partition.start_offset)
        try:
            await log.advance_start(min(replica.partition.start_offset, log.end_offset))
        except DiskFullError as error:
            LOGGER.warning("log=%s deleted records are readable again: %s", log.path, error)
        if log.start_offset > replica.high_watermark:
            replica.high_watermark = log.start_offset
            self._logs.note_high_watermark(replica.partition_id, log.start_offset)

    async def _trim(self, replica: Replica, log: Log) -> None:
        """Advance the log start to the one in the metadata: a DeleteRecords request has moved it."""
        wanted = min(replica.partition.start_offset, replica.high_watermark, log.end_offset)
        if wanted > log.start_offset and log.damaged is None:
            await log.advance_start(wanted)
            self._context.wakers.wake(replica.partition_id)
