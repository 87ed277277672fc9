"""Replicas whose logs were recovered after this broker was let in: the controller is told when each is open.

    recovering (marked in the metadata, `metadata.recoveries`)
        its log is being recovered  --> nothing: no role, no subscription; clients are told LEADER_NOT_AVAILABLE
        its log is open and sound   --> told (`ReportOpen`) --mark gone--> leads or follows, as any other
        its log is damaged or gone  --> told (`repair`) -----mark gone--> cut or made anew, as any other that lost data

A replica that is marked has no role, whatever its log: what it has must be known to the controller before it acts in
any epoch. One that is not marked has none either until its log is open; it cannot have been elected, and joins an
in-sync set only by what it acknowledges.

The marks are what drives this, not what was said at registration: a report that is lost, or came to nothing because
this broker was registered anew, is made again as long as a mark shows.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from tidelog.metadata.recoveries import ReportOpen
from tidelog.model.errors import RemoteError, TransportError
from tidelog.model.ids import PartitionId

if TYPE_CHECKING:
    from tidelog.replication.replica import Replica
    from tidelog.replication.replicas import Replicas

LOGGER = logging.getLogger(__name__)

REPLICAS_PER_REQUEST_MAX = 1_000


class Recovering:
    """See the module."""

    def __init__(self, host: Replicas) -> None:
        self._host = host
        self._to_report: dict[PartitionId, Replica] = {}
        self._wake = asyncio.Event()

    def start(self) -> None:
        self._host.spawn(self._report_all(), name="recovering")

    def is_waiting(self, replica: Replica) -> bool:
        """Whether its log is not open yet: it is settled again when it is. One that nobody else may lead is opened
        before the others."""
        logs, partition_id = self._host.logs, replica.partition_id
        if not logs.is_recovering(partition_id):
            return False
        if self._is_marked(replica):
            logs.hurry(partition_id)
        return True

    def is_settled(self, replica: Replica) -> bool:
        """Of one whose log is open and sound: whether the controller knows; if not, it is told."""
        if not self._is_marked(replica):
            return True
        if self._host.broker_epoch >= 0:
            self._to_report[replica.partition_id] = replica
            self._wake.set()
        return False

    def _is_marked(self, replica: Replica) -> bool:
        return self._host.me in replica.partition.recovering

    async def _report_all(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._to_report:
                if not await self._report(list(self._to_report.items())[:REPLICAS_PER_REQUEST_MAX]):
                    await asyncio.sleep(self._host.config.repair_retry_ms / 1000)

    async def _report(self, opened: list[tuple[PartitionId, Replica]]) -> bool:
        host = self._host
        # What has been found out since then, or is over, is not told.
        sound = {
            partition_id: replica
            for partition_id, replica in opened
            if host.get(partition_id) is replica
            and self._is_marked(replica)
            and replica.log is not None
            and replica.log.damaged is None
        }
        for partition_id, _ in opened:
            if partition_id not in sound:
                del self._to_report[partition_id]
        if not sound:
            return True
        if host.broker_epoch < 0:
            return False
        request = ReportOpen(
            broker=host.me,
            broker_epoch=host.broker_epoch,
            replicas=tuple((partition_id.topic_id, partition_id.partition) for partition_id in sound),
        )
        try:
            await host.agent.ask(request)
        except (TransportError, RemoteError) as error:
            LOGGER.warning("broker=%d recovered replicas are not told yet: %s", host.me, error)
            return False
        for partition_id, replica in sound.items():
            self._to_report.pop(partition_id, None)
            host.unsettle_later(replica)  # if the mark shows then, it is of a later registration
        return True
