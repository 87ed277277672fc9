"""Repairs logs that lost data: first the controller removes the replica from the ISR, then the log is truncated.

    damaged --reported to the controller--> out of ISR and eligible leaders
            a sealed segment fails its checksum --> restored byte by byte from another replica (`segment_repair`)
            another broker leads --> truncated to its good end, follows
            elected here after that, uncleanly --> truncated, leads
            no leader --> waits
    proved not to open --the same--> files moved aside, copied again from the leader
    missing, or in a failed directory --the same--> recreated empty, copied again from the leader

Removed records are kept until the replica has them again (`log.kept_copies`). A log that fails to open for a transient
reason is none of these: it is being recovered (`log.log_opener`).

The order matters: a replica that is truncated while it counts as in sync could be elected, and its loss would spread to
all replicas. A leader with a damaged log gives up leadership by the same request. Being out of the in-sync set is not
enough, since the leader may be adding the replica again: it is truncated after an acknowledged report, when the local
metadata has reached that report (`metadata.lost_replicas`).
"""

from __future__ import annotations

import asyncio
import logging

from tidelog.log.damage import Damage
from tidelog.log.log import Log
from tidelog.log.segment import SegmentInfo
from tidelog.metadata.lost_replicas import ReplicasLost
from tidelog.model.errors import StorageError, TidelogError
from tidelog.model.ids import DirectoryId, Offset, PartitionId
from tidelog.replication.broker_context import BrokerContext
from tidelog.replication.replica import Replica
from tidelog.replication.segment_repair import SegmentRepair
from tidelog.replication.startup_report import had_log

LOGGER = logging.getLogger(__name__)

REPLICAS_PER_REQUEST_MAX = 1_000
RESTORE_RETRY_MS_MAX = 60_000
RESTORES_MAX = 2
"""At a time: each occupies a worker of the reconciler for as long as peers take to answer."""
RESTORE_WAIT_S = 1.0


def _is_sound(log: Log) -> bool:
    return log.damaged is None


def _damaged_segment(log: Log, damage: Damage) -> SegmentInfo | None:
    """The sealed segment that may be the damage; None if there is none."""
    for info in log.segments.sealed:
        if damage.segment == info.base_offset:
            return info
        if damage.segment is None and info.base_offset <= damage.good_end < info.next_offset:
            return info
    return None


class Repair:
    """See the module. `run` is its task."""

    def __init__(self, context: BrokerContext, segments: SegmentRepair) -> None:
        self._context = context
        self._segments = segments
        self._metadata = context.metadata
        self._to_report: dict[PartitionId, Replica] = {}
        self._reported: dict[PartitionId, tuple[Replica, int]] = {}
        """(replica, partition epoch from which the controller counts the loss) of each acknowledged report."""
        self._restores: dict[PartitionId, int] = {}
        """Failed attempts to restore a damaged segment."""
        self._restoring = 0
        self._truncated: dict[PartitionId, Log] = {}
        """Logs whose segments may have been moved to a kept copy: a restored segment would not make them whole, so that
        only the truncation is left."""
        self._wake = asyncio.Event()

    # Repair.

    async def repair(self, replica: Replica, log: Log) -> bool:
        """Make a damaged log sound; return whether it is now. If not, the replica is enqueued again, later or by a
        metadata change."""
        replica.end_role()
        if not self._may_truncate(replica):
            self.lost(replica)
            return False
        assert log.damaged is not None, "only a damaged log is repaired"
        if self._truncated.get(replica.partition_id) is not log:
            if self._restoring >= RESTORES_MAX:
                self._context.tasks.call_later(RESTORE_WAIT_S, self._context.queue.add, replica)
                return False
            self._restoring += 1
            try:
                must_truncate = await self._must_truncate(replica, log)
            finally:
                self._restoring -= 1
            if replica.log is not log or log.is_closed:
                return False
            if not must_truncate:
                return self._restored(replica, log)
            if not self._may_truncate(replica):  # its leader may have failed meanwhile
                self.lost(replica)
                return False
        if not _is_sound(log):
            await self._truncate(replica, log)
        return True

    def _restored(self, replica: Replica, log: Log) -> bool:
        """Return whether the restored log is sound. If not, it is tried again."""
        partition_id = replica.partition_id
        if _is_sound(log):
            self._reported.pop(partition_id, None)
            self._restores.pop(partition_id, None)
            return True
        attempts = self._restores[partition_id] = self._restores.get(partition_id, 0) + 1
        delay_ms = min(self._context.config.repair_retry_ms << min(attempts, 10), RESTORE_RETRY_MS_MAX)
        self._context.tasks.call_later(delay_ms / 1000, self._context.queue.add, replica)
        return False

    async def _truncate(self, replica: Replica, log: Log) -> None:
        damage, partition_id = log.damaged, replica.partition_id
        assert damage is not None, "only a damaged log is truncated here"
        LOGGER.warning("log=%s is truncated to %d: %s", log.path, damage.good_end, damage.reason)
        self._truncated[partition_id] = log
        await self._context.logs.keep_tail(partition_id, damage.good_end, damage.reason)
        try:
            await log.repair()
        finally:
            if _is_sound(log):  # also if the truncation was not stored completely (`log.truncation`)
                self._reported.pop(partition_id, None)
                self._truncated.pop(partition_id, None)
                replica.high_watermark = Offset(min(replica.high_watermark, log.end_offset))
                self._context.logs.note_high_watermark(partition_id, replica.high_watermark)

    async def _must_truncate(self, replica: Replica, log: Log) -> bool:
        """Return whether only a truncation can make the damaged log sound, and loses nothing. Restores a sealed segment
        that fails its checksum, if that is the damage. If the log is not sound after it, the caller tries again."""
        damage = log.damaged
        assert damage is not None, "the log is damaged"
        info = _damaged_segment(log, damage)
        if info is None or info.crc is None or damage.is_missing:
            return True
        if damage.segment is None:
            version = log.segments.version
            if (await log.check(info.base_offset)).fault is None:
                return log.segments.version == version  # else the check proves nothing: it is repeated
            log.damage_state.found_in(info.base_offset)
        source = await self._segments.find_source(replica, info)
        if source is not None:
            await self._segments.restore(replica, log, info, source)
        elif not await self._segments.combine(replica, log, info):
            if await self._segments.is_sound_elsewhere(replica, info.base_offset):
                return True
            if replica.partition.leader == self._metadata.me:
                return True  # elected uncleanly, although it is known to be damaged
            LOGGER.error(
                "log=%s offsets %d to %d are corrupt, and no other replica has proved a sound copy of them: nothing is"
                " truncated, see docs/operations.md",
                *(log.path, info.base_offset, info.next_offset - 1),
            )
        return False

    def _may_truncate(self, replica: Replica) -> bool:
        """Return whether the replica is known to be out of the ISR, and has a leader to copy from or leads."""
        me, partition = self._metadata.me, replica.partition
        if not self._is_known(replica):
            return False
        if partition.leader == me:
            return True  # elected uncleanly, after the report that excluded it
        return partition.leader >= 0 and me not in partition.isr and me not in partition.eligible

    def _is_known(self, replica: Replica) -> bool:
        """Return whether a report was acknowledged, and the local metadata has reached it."""
        report = self._reported.get(replica.partition_id)
        return report is not None and report[0] is replica and replica.partition.partition_epoch >= report[1]

    async def reopen(self, replica: Replica) -> bool:
        """Replace a log that is proved not to open by an empty one, once the partition does not depend on it. Its files
        are kept under another name."""
        if not self._may_truncate(replica):
            self.lost(replica)
            return False
        LOGGER.error("log of %s cannot be opened, and is kept under another name", replica.partition_id)
        await self._context.logs.give_up(replica.partition_id, f"it cannot be opened: {replica.open_error}")
        self._reported.pop(replica.partition_id, None)
        return True

    def may_begin(self, replica: Replica) -> bool:
        """Return whether a log may be created for a replica without one; if not, a metadata change enqueues it.

        A replica that had a log may be the last copy of the partition, or may be elected as such: it is recreated
        like one that does not open. No log is created by metadata that may be older than this registration, which
        reported the losses, nor without a leader to follow: then the former log is needed. A replica that never had a
        log, and is marked as recovering, is reported as lost: nobody may wait for it.
        """
        metadata, partition = self._metadata, replica.partition
        if metadata.broker_epoch < 0:
            return False
        recorded = DirectoryId(partition.directory_of(metadata.me))
        if not had_log(self._context.logs, replica.partition_id, recorded):
            may = partition.leader >= 0 or metadata.me in partition.isr or metadata.me in partition.eligible
            if may or (metadata.me in partition.recovering and self._is_known(replica)):
                self._reported.pop(replica.partition_id, None)  # a mark that remains belongs to a later registration
            if not may and metadata.me in partition.recovering:
                self.lost(replica)
            return may
        if not self._may_truncate(replica):
            replica.open_error = StorageError(f"its log is gone, or its directory {recorded} does not work")
            self.lost(replica)
            return False
        LOGGER.warning(
            "the log of %s is replaced by an empty one: its directory was %s", replica.partition_id, recorded
        )
        self._reported.pop(replica.partition_id, None)
        return True

    # Reports.

    def lost(self, replica: Replica) -> None:
        """Report to the controller that this replica has lost data."""
        me, partition = self._metadata.me, replica.partition
        if self._is_known(replica) and (me in partition.isr or me in partition.eligible):
            del self._reported[replica.partition_id]  # it is back in the ISR: a new loss must be reported
        report = self._reported.get(replica.partition_id)
        if report is None or report[0] is not replica:
            self._to_report[replica.partition_id] = replica
            self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._to_report:
                if not await self._report(list(self._to_report.items())[:REPLICAS_PER_REQUEST_MAX]):
                    await asyncio.sleep(self._context.config.repair_retry_ms / 1000)

    async def _report(self, lost: list[tuple[PartitionId, Replica]]) -> bool:
        if self._metadata.broker_epoch < 0:
            return False
        request = ReplicasLost(
            broker=self._metadata.me,
            broker_epoch=self._metadata.broker_epoch,
            replicas=tuple((partition_id.topic_id, partition_id.partition) for partition_id, _ in lost),
        )
        try:
            reply = await self._context.agent.ask(request)
        except TidelogError as error:
            LOGGER.warning("broker=%d lost replicas are not reported yet: %s", self._metadata.me, error)
            return False
        for (partition_id, replica), outcome, epoch in zip(lost, reply.items, reply.partition_epochs, strict=True):
            self._to_report.pop(partition_id, None)
            if outcome.error is None:
                self._reported[partition_id] = (replica, epoch)
            self._context.queue.add_later(replica)
        return True
