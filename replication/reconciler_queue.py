"""Replicas that wait for the reconciler: a few workers, and one worker at a time per replica.

A replica may be enqueued at any time and any number of times. One that is enqueued while a worker reconciles it gets
another pass. Workers run only while replicas wait; at most `reconcilers_max`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from tidelog.log.log import Damage, Log
from tidelog.model.errors import StorageError
from tidelog.model.ids import Offset
from tidelog.replication.replica import Replica, ReplicaConfig
from tidelog.replication.tasks import ReplicaTasks

LOGGER = logging.getLogger(__name__)

Reconcile = Callable[[Replica], Coroutine[Any, Any, None]]


class ReconcilerQueue:
    """See the module. `serve` sets what the workers call."""

    def __init__(self, tasks: ReplicaTasks, config: ReplicaConfig) -> None:
        self._tasks = tasks
        self._config = config
        self._reconcile: Reconcile | None = None
        self._waiting: dict[Replica, None] = {}
        self._reconciling: dict[Replica, bool] = {}
        """Replicas that a worker has taken; whether they were enqueued since."""
        self._workers = 0

    def serve(self, reconcile: Reconcile) -> None:
        self._reconcile = reconcile

    def clear(self) -> None:
        self._waiting.clear()

    def validate(self) -> None:
        """Assert that each worker has at most one replica, and that a replica that waits has a worker to come."""
        assert len(self._reconciling) <= self._workers <= self._config.reconcilers_max, (
            f"{self._workers} workers have {len(self._reconciling)} replicas"
        )
        assert not self._waiting.keys() & self._reconciling.keys(), "a replica waits that a worker has"
        assert self._workers or not self._waiting or self._tasks.is_closed, "a replica waits, and no worker runs"

    def add(self, replica: Replica) -> None:
        """Enqueue the replica."""
        if self._tasks.is_closed or replica.is_removed:
            return
        if replica in self._reconciling:
            self._reconciling[replica] = True
            return
        self._waiting[replica] = None
        if self._workers < self._config.reconcilers_max:
            self._workers += 1
            self._tasks.spawn(self._work(), name="reconciler")

    def add_later(self, replica: Replica) -> None:
        """Enqueue the replica after `repair_retry_ms`."""
        self._tasks.call_later(self._config.repair_retry_ms / 1000, self.add, replica)

    async def _work(self) -> None:
        assert self._reconcile is not None, "the queue is served"
        reconciled = 0
        try:
            while self._waiting:
                replica = next(iter(self._waiting))
                del self._waiting[replica]
                if replica.is_removed:
                    continue
                self._reconciling[replica] = False
                try:
                    await self._reconcile(replica)
                finally:
                    needs_another_pass = self._reconciling.pop(replica)
                if needs_another_pass:
                    self._waiting[replica] = None
                reconciled += 1
                if reconciled % self._config.partitions_per_slice == 0:
                    await asyncio.sleep(0)  # most passes never wait
        finally:
            self._workers -= 1

    # Damage: `Repair` truncates the log.

    def report_damage(self, replica: Replica) -> None:
        """End the role of a replica with a damaged log, and enqueue it."""
        replica.end_role()
        self.add(replica)

    def report_corruption(self, replica: Replica, offset: int) -> None:
        """Mark the log as damaged: a batch at or past `offset` is corrupt."""
        log = replica.log
        if log is not None and log.damaged is None:
            self._tasks.spawn(self._mark(replica, log, offset), name="mark-damaged")

    async def _mark(self, replica: Replica, log: Log, offset: int) -> None:
        try:
            await log.mark_damaged(Damage(Offset(offset), "a batch cannot be read"))
        except StorageError as error:
            LOGGER.error("log=%s damage is not stored: %s", log.path, error)
        self.report_damage(replica)
