"""Logs that have lost data: out of the in-sync set first, mended after that.

    damaged --told to the controller--> out of ISR and eligible leaders
            led by another --> cut to its good end, follows      elected here after that, uncleanly --> cut, leads
            no leader --> waits
    cannot be opened, by proof --the same--> moved away and fetched as a whole
    gone, or in a directory that does not work --the same--> made anew, fetched as a whole

What is cut or moved away is kept until the replica has it again (`log.keeping`). A log that cannot be opened for a
reason that may pass is none of these: it is being recovered (`log.opening`).

The order matters: a replica that is cut while it counts as in sync could be elected, and take what it lost from
everybody. A leader whose log is damaged gives up leading by the same request. That this replica is in no in-sync set is
not enough, since its leader may be taking it back: it is cut after a report that was acknowledged, when the metadata
here has come as far as that report (`metadata.losses`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from tidelog.log.log import Damage, Log
from tidelog.metadata.losses import ReportLost
from tidelog.model.errors import RemoteError, StorageError, TransportError
from tidelog.model.ids import DirectoryId, Offset, PartitionId
from tidelog.replication.announcing import had_log

if TYPE_CHECKING:
    from tidelog.replication.replica import Replica
    from tidelog.replication.replicas import Replicas

LOGGER = logging.getLogger(__name__)

REPLICAS_PER_REQUEST_MAX = 1_000


def _is_sound(log: Log) -> bool:
    return log.damaged is None


class Repair:
    """See the module."""

    def __init__(self, host: Replicas) -> None:
        self._host = host
        self._to_report: dict[PartitionId, Replica] = {}
        self._reported: dict[PartitionId, tuple[Replica, int]] = {}
        """Of which replica, and the partition epoch from which on the loss counts, as the controller told."""
        self._wake = asyncio.Event()

    def start(self) -> None:
        self._host.spawn(self._report_all(), name="repair")

    # Finding.

    def found_rot(self, replica: Replica, offset: int) -> None:
        """The batch at `offset` is not what was written."""
        log = replica.log
        if log is not None and log.damaged is None:
            self._host.spawn(self._mark(replica, log, offset), name="rot")

    async def _mark(self, replica: Replica, log: Log, offset: int) -> None:
        try:
            await log.mark_damaged(Damage(Offset(offset), "a batch cannot be read"))
        except StorageError as error:
            LOGGER.error("log=%s damage is not stored: %s", log.path, error)
        self._host.found_damage(replica)

    # Mending.

    async def mend(self, replica: Replica, log: Log) -> bool:
        """True if the log is sound now; False: it is settled again when the metadata has changed."""
        self._host.end_role(replica)
        if not self._may_cut(replica):
            self.lost(replica)
            return False
        assert log.damaged is not None, "only a damaged log is mended"
        LOGGER.warning("log=%s is cut to %d: %s", log.path, log.damaged.good_end, log.damaged.reason)
        await self._host.logs.keep_tail(replica.partition_id, log.damaged.good_end, log.damaged.reason)
        try:
            await log.repair()
        finally:
            if _is_sound(log):  # also if that could not be stored to the end (`log.surgery`)
                self._reported.pop(replica.partition_id, None)
                replica.high_watermark = Offset(min(replica.high_watermark, log.end_offset))
                self._host.logs.note_high_watermark(replica.partition_id, replica.high_watermark)
        return True

    def _may_cut(self, replica: Replica) -> bool:
        """Whether this replica counts for nothing any more, and there is a leader to fetch from, or it is to lead with
        what it has."""
        me, partition = self._host.me, replica.partition
        if not self._is_known(replica):
            return False
        if partition.leader == me:
            return True  # elected after the report, which excluded it: uncleanly
        return partition.leader >= 0 and me not in partition.isr and me not in partition.eligible

    def _is_known(self, replica: Replica) -> bool:
        """Whether a report was acknowledged, and the metadata here has come as far."""
        told = self._reported.get(replica.partition_id)
        return told is not None and told[0] is replica and replica.partition.partition_epoch >= told[1]

    async def reopen(self, replica: Replica) -> bool:
        """A log that is proved not to open: once nothing hangs on it any more, its files are kept under another name
        and an empty log takes its place."""
        if not self._may_cut(replica):
            self.lost(replica)
            return False
        LOGGER.error("log of %s cannot be opened, and is kept under another name", replica.partition_id)
        await self._host.logs.give_up(replica.partition_id, f"it cannot be opened: {replica.offline}")
        self._reported.pop(replica.partition_id, None)
        return True

    def may_begin(self, replica: Replica) -> bool:
        """Whether a log may be made for a replica that has none here; if not, it is settled again when the metadata
        has changed.

        One that had a log may be all that is left of the partition, or may be elected as what it was: it begins anew
        like one that does not open. Nothing begins by metadata that may be older than this registration, which has
        told what is lost, nor where there is nobody to follow: what is needed then is the log that was.
        """
        host, partition = self._host, replica.partition
        if host.broker_epoch < 0:
            return False
        recorded = DirectoryId(partition.directory_of(host.me))
        if not had_log(host.logs, replica.partition_id, recorded):
            return partition.leader >= 0 or host.me in partition.isr or host.me in partition.eligible
        if not self._may_cut(replica):
            replica.offline = StorageError(f"its log is gone, or its directory {recorded} does not work")
            self.lost(replica)
            return False
        LOGGER.warning(
            "the log of %s is replaced by an empty one: its directory was %s", replica.partition_id, recorded
        )
        self._reported.pop(replica.partition_id, None)
        return True

    # Telling.

    def lost(self, replica: Replica) -> None:
        """The controller is to know that this replica has lost data."""
        me, partition = self._host.me, replica.partition
        if self._is_known(replica) and (me in partition.isr or me in partition.eligible):
            del self._reported[replica.partition_id]  # it counts again: what was told is over
        told = self._reported.get(replica.partition_id)
        if told is None or told[0] is not replica:
            self._to_report[replica.partition_id] = replica
            self._wake.set()

    async def _report_all(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._to_report:
                if not await self._report(list(self._to_report.items())[:REPLICAS_PER_REQUEST_MAX]):
                    await asyncio.sleep(self._host.config.repair_retry_ms / 1000)

    async def _report(self, lost: list[tuple[PartitionId, Replica]]) -> bool:
        if self._host.broker_epoch < 0:
            return False
        request = ReportLost(
            broker=self._host.me,
            broker_epoch=self._host.broker_epoch,
            replicas=tuple((partition_id.topic_id, partition_id.partition) for partition_id, _ in lost),
        )
        try:
            reply = await self._host.agent.ask(request)
        except (TransportError, RemoteError) as error:
            LOGGER.warning("broker=%d lost replicas are not told yet: %s", self._host.me, error)
            return False
        for (partition_id, replica), outcome, epoch in zip(lost, reply.items, reply.partition_epochs, strict=True):
            self._to_report.pop(partition_id, None)
            if outcome.error is None:
                self._reported[partition_id] = (replica, epoch)
            self._host.unsettle_later(replica)
        return True
