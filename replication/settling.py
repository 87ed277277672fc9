"""Replicas that are not as they should be, made so: one after the other, each by one settler at a time.

    unsettled --its turn--> dropped: the log is removed
                            its log is being recovered: nothing, it comes again when that is done (`recovering`)
                            log opened, settings, mended, moved, place told, role taken, subscribed, trimmed

Every step looks at what is, so a replica may be unsettled at any time and as often as one likes: while it is being
settled that is noted (`is_again`) and it has another turn. An error of the world ends the turn; the next one comes
after `repair_retry_ms`, and what leads or follows goes on meanwhile with what it has. A few settlers run while
something is unsettled, none otherwise.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from tidelog.log import lineage
from tidelog.log.config import FlushMode
from tidelog.log.doubles import choose, undecided
from tidelog.log.log import Log
from tidelog.log.marking import forget_page_cache
from tidelog.metadata import configs
from tidelog.metadata.image import NIL, Partition
from tidelog.model.errors import DiskFullError, FencedLeaderEpochError, TidelogError
from tidelog.model.ids import NO_EPOCH, DirectoryId, Offset
from tidelog.replication.following import Following
from tidelog.replication.leading import Leading, safe_end
from tidelog.replication.partition import FollowerState, LeaderState
from tidelog.replication.replica import Replica

if TYPE_CHECKING:
    from tidelog.replication.replicas import Replicas

LOGGER = logging.getLogger(__name__)


class Settling:
    """See the module."""

    def __init__(self, host: Replicas) -> None:
        self._host = host
        self._waiting: dict[Replica, None] = {}
        self._settlers = 0

    def __len__(self) -> int:
        """How many wait for their turn."""
        return len(self._waiting)

    def clear(self) -> None:
        self._waiting.clear()

    def add(self, replica: Replica) -> None:
        """It has its turn soon."""
        host = self._host
        if host.is_closed or host.get(replica.partition_id) is not replica:
            return  # a timer of one that was dropped: the partition may be back, with another log
        if replica.is_settling:
            replica.is_again = True
            return
        self._waiting[replica] = None
        if self._settlers < host.config.settlers_max:
            self._settlers += 1
            host.spawn(self._settle_all(), name="settler")

    async def _settle_all(self) -> None:
        host = self._host
        settled = 0
        try:
            while self._waiting:
                replica = next(iter(self._waiting))
                del self._waiting[replica]
                if host.get(replica.partition_id) is not replica:
                    continue
                replica.is_settling = True
                try:
                    await self.settle(replica)
                finally:
                    replica.is_settling = False
                if replica.is_again:
                    replica.is_again = False
                    self._waiting[replica] = None
                settled += 1
                if settled % host.config.partitions_per_slice == 0:
                    await asyncio.sleep(0)  # most have nothing to wait for
        finally:
            self._settlers -= 1

    async def settle(self, replica: Replica) -> None:
        host = self._host
        try:
            if replica.is_dropped:
                await host.moves.stop(replica)
                await self._forget(replica)
                return
            if host.recovering.is_waiting(replica):
                return
            log = replica.log or await self._open(replica)
            if log is None:
                await host.moves.stop(replica)  # there is nothing to move any more
                return
            await self._configure(replica, log)
            if log.damaged is not None and not await host.repair.mend(replica, log):
                return
            if replica.move is not None:
                log = await host.moves.finish(replica, log)
            if replica.role is None and replica.partition.leader == host.me and host.broker_epoch >= 0:
                await self._begin_where_told(replica, log)
                if replica.log is not log or log.damaged is not None:
                    return  # who found that has unsettled it
            # In another directory than the recorded one it would count as what lies there, if it was there before.
            if self._tell_place(replica) and host.recovering.is_settled(replica):
                self._take_role(replica, log)
            await self._follow(replica, log)
            await self._trim(replica, log)
        except TidelogError as error:
            LOGGER.error("broker=%d %s-%d: %s", host.me, replica.topic, replica.partition_id.partition, error)
            directory = host.logs.directory_of(replica.partition_id)
            if directory is not None and directory.failed is not None:
                return  # the whole directory is offline
            # A full disk, or the like. What leads or follows goes on with what it has.
            if isinstance(error, DiskFullError):
                host.upkeep.full_directories.append_refused(replica.partition_id)
            if replica.log is None:
                replica.offline = error
            host.unsettle_later(replica)

    async def _forget(self, replica: Replica) -> None:
        host = self._host
        replica.log = None
        await host.logs.remove(replica.partition_id)
        if replica.is_dropped and host.get(replica.partition_id) is replica:
            host.forget(replica)

    async def _open(self, replica: Replica) -> Log | None:
        host = self._host
        recorded = replica.partition.directory_of(host.me)
        if replica.partition_id in host.logs.doubles and not await self._choose_copy(replica, DirectoryId(recorded)):
            return None
        await host.logs.wait_open(replica.partition_id)
        directory = host.logs.directory_of(replica.partition_id)
        if replica.partition_id in host.logs.failures:
            replica.offline = host.logs.failures[replica.partition_id]
            if directory is not None and directory.failed is not None:
                if directory.directory_id != recorded:
                    host.repair.lost(replica)  # that the directory has failed does not tell of this one
                return None
            if not await host.repair.reopen(replica):
                return None
        elif directory is None and not host.repair.may_begin(replica):
            return None
        working = [d.directory_id for d in host.logs.directories if d.failed is None]
        wanted = DirectoryId(recorded) if recorded != NIL and recorded in working else None
        config = configs.log_config(host.image, replica.topic)
        log = await host.logs.create(replica.partition_id, label=replica.topic, config=config, directory=wanted)
        replica.log, replica.offline = log, None
        replica.high_watermark = host.logs.high_watermark(replica.partition_id)
        return log

    async def _choose_copy(self, replica: Replica, recorded: DirectoryId) -> bool:
        """The log stands in several directories: the one that the metadata has is it. Not before this incarnation is
        registered: older metadata may name the one that it was in before."""
        host = self._host
        if host.broker_epoch < 0:
            return False
        copies = host.logs.doubles[replica.partition_id]
        if choose(copies, recorded) is None:
            replica.offline = undecided(replica.partition_id, copies)
            LOGGER.error("broker=%d %s", host.me, replica.offline)
            host.repair.lost(replica)
            return False
        # An error here may pass, and says nothing about the copy that counts: this is tried again.
        await host.logs.keep(replica.partition_id, recorded)
        return True

    def _tell_place(self, replica: Replica) -> bool:
        """Whether the metadata knows in which directory the log is, or knows of none."""
        host = self._host
        home, recorded = host.logs.directory_of(replica.partition_id), replica.partition.directory_of(host.me)
        if home is None or home.directory_id is None or home.directory_id == recorded:
            return True
        host.upkeep.assign(replica.partition_id, home.directory_id)
        return recorded == NIL

    async def _configure(self, replica: Replica, log: Log) -> None:
        host = self._host
        if host.is_gone(replica):
            return
        config = configs.log_config(host.image, replica.topic)
        if log.config is not config and log.config != config:
            await log.configure(config)
        elif config.cleanup_compact:
            await log.allow_gaps()
        # The registration has reported a loss that the opening of the log found.
        if config.flush_mode is FlushMode.SYNC and log.is_page_cache and log.damaged is None and host.broker_epoch >= 0:
            await forget_page_cache(log)

    def _take_role(self, replica: Replica, log: Log) -> None:
        host = self._host
        partition = replica.partition
        if replica.role is not None or host.broker_epoch < 0 or replica.is_dropped or host.is_closed:
            return
        if host.is_gone(replica):
            return
        if partition.leader == host.me:
            if partition.leader_epoch <= replica.led_epoch:
                # What the controller has answered in this epoch is forgotten: it must not be led twice.
                LOGGER.error("broker=%d has led %s in epoch %d before", host.me, log.path, partition.leader_epoch)
                return
            try:
                log.assign_epoch(partition.leader_epoch)
            except FencedLeaderEpochError as error:
                LOGGER.error("broker=%d cannot lead %s: %s", host.me, log.path, error)
                return
            self._lead(replica, log, partition)
        elif partition.leader >= 0:
            log.forget_empty_epochs()
            state = FollowerState(
                leader=partition.leader,
                leader_epoch=partition.leader_epoch,
                log_end=log.end_offset,
                durable_end=safe_end(log),
                high_watermark=replica.high_watermark,
            )
            replica.role = Following(host, replica, log, state)
            host.wakers.wake(replica.partition_id)

    def _lead(self, replica: Replica, log: Log, partition: Partition) -> None:
        host = self._host
        state = LeaderState(
            me=host.me,
            my_broker_epoch=host.broker_epoch,
            partition=partition,
            min_isr=host.min_isr(replica),
            log_end=log.end_offset,
            durable_end=safe_end(log),
            high_watermark=Offset(min(replica.high_watermark, log.end_offset)),
            now_ms=host.now_ms(),
            lag_max_ms=host.lag_max_ms(),
        )
        replica.led_epoch = partition.leader_epoch
        lineage.limit_to_end(log)
        leading = replica.role = Leading(host, replica, log, state)
        leading.begin()
        host.isr_log.changed(log.path, partition.leader_epoch, frozenset(partition.replicas), state.isr)
        host.led(leading)
        host.isr_updates.look(replica)
        host.retry_parked(replica.partition_id)

    async def _follow(self, replica: Replica, log: Log) -> None:
        """Bring the log to where the leader said, then subscribe."""
        host = self._host
        role = replica.role
        if not isinstance(role, Following):
            return
        if role.unsound is not None:
            await role.mend()
        if log.lineage.leader_epoch not in (NO_EPOCH, role.leader_epoch):
            await lineage.forget_leader(log)
        if not role.is_over and role.stream is None and role.unsound is None and log.damaged is None:
            host.streams.add(role, host.channel(replica))

    async def _begin_where_told(self, replica: Replica, log: Log) -> None:
        """Before it leads: what a former leader has deleted, which was committed, is not shown again. On a full disk it
        is, until there is room. A log that ends below that point (an unclean election) continues behind it: records
        with smaller offsets would be deleted as the former ones were."""
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
            LOGGER.warning("log=%s records that were deleted are shown again: %s", log.path, error)
        if log.start_offset > replica.high_watermark:
            replica.high_watermark = log.start_offset
            self._host.logs.note_high_watermark(replica.partition_id, log.start_offset)

    async def _trim(self, replica: Replica, log: Log) -> None:
        """Records that were deleted by an admin's call are deleted here too."""
        host = self._host
        wanted = min(replica.partition.start_offset, replica.high_watermark, log.end_offset)
        if wanted > log.start_offset and log.damaged is None:
            await log.advance_start(wanted)
            host.wakers.wake(replica.partition_id)
