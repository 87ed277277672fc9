"""Reports the log ends of replicas that only an unclean election can elect (`metadata.log_ends`).

Reports every half second each open log whose partition has no leader, or whose replica is not in sync and whose topic
allows unclean elections. A healthy cluster has none, and sends nothing. A failed report is not repeated: the next one
is newer. A damaged log is reported with its good end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from itertools import islice
from uuid import UUID

from tidelog.log.log import Log
from tidelog.metadata.configs import is_unclean_allowed
from tidelog.metadata.partitions import LOG_ENDS_PER_REQUEST_MAX, ReportLogEnds
from tidelog.metadata.records import NO_LEADER
from tidelog.model.errors import TidelogError
from tidelog.replication.broker_context import BrokerContext
from tidelog.replication.replica import Replica, ackable_end

LOGGER = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.5
REPORT_TIMEOUT_S = 2.0


def log_end(log: Log) -> tuple[int, int]:
    """Return (epoch of the last durable record, end offset of the durable log)."""
    end = ackable_end(log) if log.damaged is None else min(log.damaged.good_end, ackable_end(log))
    return int(log.epochs.epoch_for(end - 1)), int(end)


class LogEndReports:
    """See the module. `run` is its task."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context
        self._metadata = context.metadata

    async def run(self) -> None:
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            replicas = iter(list(self._context.replicas.values()))
            while part := list(islice(replicas, LOG_ENDS_PER_REQUEST_MAX)):
                ends = tuple(self._ends(part))
                if self._metadata.broker_epoch >= 0 and ends and not await self._report(ends):
                    break
                await asyncio.sleep(0)

    def _ends(self, replicas: list[Replica]) -> Iterator[tuple[UUID, int, int, int]]:
        for replica in replicas:
            if replica.log is not None and self._needs_report(replica):
                epoch, end = log_end(replica.log)
                yield replica.partition_id.topic_id, replica.partition_id.partition, epoch, end

    def _needs_report(self, replica: Replica) -> bool:
        partition, metadata = replica.partition, self._metadata
        if metadata.is_deleted(replica):
            return False  # the topic is deleted; its replica will be dropped
        if partition.leader == NO_LEADER:
            return True
        return metadata.me not in partition.isr and is_unclean_allowed(metadata.image, replica.partition_id.topic_id)

    async def _report(self, ends: tuple[tuple[UUID, int, int, int], ...]) -> bool:
        me, broker_epoch = self._metadata.me, self._metadata.broker_epoch
        request = ReportLogEnds(broker=me, broker_epoch=broker_epoch, replicas=ends)
        try:
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                await self._context.agent.ask(request)
        except (TidelogError, TimeoutError) as error:
            # Also of a controller of a version without this request.
            LOGGER.debug("broker=%d log ends are not reported: %s", me, error)
            return False
        return True
