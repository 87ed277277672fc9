"""Reports replicas whose logs were recovered after this broker was unfenced.

    recovering (marked in the metadata, `metadata.recovering_replicas`)
        its log is being recovered  --> nothing: no role, no subscription; clients get LEADER_NOT_AVAILABLE
        its log is open and sound   --> reported (`ReplicasRecovered`) --mark removed--> leads or follows as usual
        its log is damaged or gone  --> reported (`repair`) --mark removed--> truncated or recreated as any lost replica

A marked replica has no role, whatever its log: the controller must know what it has before it acts in any epoch. A
replica without a mark has no role either until its log is open; it cannot have been elected, and joins an in-sync set
only by its acks.

The marks drive this, not the registration: a report that is lost, or void because this broker registered again, is
repeated while the mark remains.
"""

from __future__ import annotations

import asyncio
import logging

from tidelog.metadata.recovering_replicas import ReplicasRecovered
from tidelog.model.errors import TidelogError
from tidelog.model.ids import PartitionId
from tidelog.replication.broker_context import BrokerContext
from tidelog.replication.replica import Replica

LOGGER = logging.getLogger(__name__)

REPLICAS_PER_REQUEST_MAX = 1_000


class RecoveryReports:
    """See the module. `run` is its task."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context
        self._metadata = context.metadata
        self._to_report: dict[PartitionId, Replica] = {}
        self._wake = asyncio.Event()

    def is_waiting(self, replica: Replica) -> bool:
        """Return whether the log is not open yet; the replica is enqueued when it is. The log of a marked replica is
        opened first: no other broker may lead its partition."""
        logs, partition_id = self._context.logs, replica.partition_id
        if not logs.is_recovering(partition_id):
            return False
        if self._is_marked(replica):
            logs.hurry(partition_id)
        return True

    def is_reported(self, replica: Replica) -> bool:
        """Return whether the controller knows that this log is open and sound; if not, report it."""
        if not self._is_marked(replica):
            return True
        if self._metadata.broker_epoch >= 0:
            self._to_report[replica.partition_id] = replica
            self._wake.set()
        return False

    def _is_marked(self, replica: Replica) -> bool:
        return self._metadata.me in replica.partition.recovering

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._to_report:
                if not await self._report(list(self._to_report.items())[:REPLICAS_PER_REQUEST_MAX]):
                    await asyncio.sleep(self._context.config.repair_retry_ms / 1000)

    async def _report(self, opened: list[tuple[PartitionId, Replica]]) -> bool:
        metadata = self._metadata
        # Do not report replicas that were dropped, unmarked or found damaged since.
        sound = {
            partition_id: replica
            for partition_id, replica in opened
            if not replica.is_removed
            and self._is_marked(replica)
            and replica.log is not None
            and replica.log.damaged is None
        }
        for partition_id, _ in opened:
            if partition_id not in sound:
                del self._to_report[partition_id]
        if not sound:
            return True
        if metadata.broker_epoch < 0:
            return False
        request = ReplicasRecovered(
            broker=metadata.me,
            broker_epoch=metadata.broker_epoch,
            replicas=tuple((partition_id.topic_id, partition_id.partition) for partition_id in sound),
        )
        try:
            await self._context.agent.ask(request)
        except TidelogError as error:
            LOGGER.warning("broker=%d recovered replicas are not reported yet: %s", metadata.me, error)
            return False
        for partition_id, replica in sound.items():
            self._to_report.pop(partition_id, None)
            self._context.queue.add_later(replica)  # a mark that remains then belongs to a later registration
        return True
