"""Reports to the active controller where logs end that only an unclean election can elect (`metadata.log_ends`).

Every half second, of each open log whose partition has no leader, or that is not in sync where its topic allows unclean
elections. In a healthy cluster there are none, and nothing is sent. A report that fails is not repeated: the next round
sends a newer one. A damaged log is reported with its good end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING
from uuid import UUID

from tidelog.log.log import Log
from tidelog.metadata.configs import is_unclean_allowed
from tidelog.metadata.partitions import LOG_ENDS_PER_REQUEST_MAX, ReportLogEnds
from tidelog.metadata.records import NO_LEADER
from tidelog.model.errors import RemoteError, TransportError
from tidelog.replication.leading import safe_end

if TYPE_CHECKING:
    from tidelog.replication.replica import Replica
    from tidelog.replication.replicas import Replicas

LOGGER = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.5
REPORT_TIMEOUT_S = 2.0


def log_end(log: Log) -> tuple[int, int]:
    """(epoch of the last durable record, where it ends)."""
    end = safe_end(log) if log.damaged is None else min(log.damaged.good_end, safe_end(log))
    return int(log.epochs.epoch_for(end - 1)), int(end)


class LogEndReports:
    """See the module."""

    def __init__(self, host: Replicas) -> None:
        self._host = host

    def start(self) -> None:
        self._host.spawn(self._report_all(), name="log-end-reports")

    async def _report_all(self) -> None:
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            replicas = iter(list(self._host.all()))
            while part := list(islice(replicas, LOG_ENDS_PER_REQUEST_MAX)):
                ends = tuple(self._ends(part))
                if self._host.broker_epoch >= 0 and ends and not await self._report(ends):
                    break
                await asyncio.sleep(0)

    def _ends(self, replicas: list[Replica]) -> Iterator[tuple[UUID, int, int, int]]:
        for replica in replicas:
            if replica.log is not None and self._is_wanted(replica):
                epoch, end = log_end(replica.log)
                yield replica.partition_id.topic_id, replica.partition_id.partition, epoch, end

    def _is_wanted(self, replica: Replica) -> bool:
        partition, host = replica.partition, self._host
        topic_id = replica.partition_id.topic_id
        if topic_id not in host.image.topics:
            return False  # it is deleted, and the replica is about to go
        if partition.leader == NO_LEADER:
            return True
        return host.me not in partition.isr and is_unclean_allowed(host.image, topic_id)

    async def _report(self, ends: tuple[tuple[UUID, int, int, int], ...]) -> bool:
        host = self._host
        request = ReportLogEnds(broker=host.me, broker_epoch=host.broker_epoch, replicas=ends)
        try:
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                await host.agent.ask(request)
        except (
            TransportError,
            RemoteError,
            TimeoutError,
        ) as error:  # also a controller of a version that does not know it
            LOGGER.debug("broker=%d log ends are not reported: %s", host.me, error)
            return False
        return True
