"""The background work of a shard: reassigns groups whose topics changed, and expires offsets.

    topics_changed    groups subscribed to changed topics get a new target; offsets of deleted topics expire
    expire_offsets    offsets that are older than their retention expire, and so do fences of producers
    forget_deleted    asks the controller whether topics that are not in the metadata are deleted

One task does all of it, one decision at a time, and retries on failure. It ends with the shard.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

from tidelog.coordinator.hosts import GroupShard, ShardHost
from tidelog.coordinator.pending_offsets import is_old_fence
from tidelog.coordinator.requests import ExpireOffsets, ForgetFences, RefreshTopics
from tidelog.model.errors import TidelogError
from tidelog.model.ids import TopicId
from tidelog.world.slicing import sliced

LOGGER = logging.getLogger(__name__)

RETRY_S = 0.5
RETRY_MAX_S = 30.0
SWEEP_GROUPS = 200
"""Groups whose offsets are scanned by one decision."""
FENCES_PER_SLICE = 200
"""Fences scanned in one turn of the event loop, and forgotten by one decision."""


class BackgroundWork:
    """See the module. A shard owns it and ends it."""

    def __init__(self, shard: GroupShard, host: ShardHost) -> None:
        self._shard = shard
        self._host = host
        self._to_refresh: dict[str, None] = {}
        self._gone: dict[TopicId, None] = {}
        self._expiry_is_due = False
        self._fences_are_due = False
        self._old_fences: deque[int] = deque()
        """Producers whose fences are still to be forgotten."""
        self._to_sweep: deque[str] = deque()
        """Groups whose offsets are still to be scanned."""
        self._sweep_gone: frozenset[TopicId] = frozenset()
        self._is_stuck = False
        """Whether the last refresh failed: the next step expires offsets instead."""
        self._task: asyncio.Task[None] | None = None
        self._query: asyncio.Task[None] | None = None

    def end(self) -> None:
        for task in (self._task, self._query):
            if task is not None:
                task.cancel()

    def forget_deleted(self, unknown: list[TopicId]) -> None:
        """Ask the controller which of these topics are deleted. The shard works meanwhile, even if the controller does
        not answer for long."""
        self._query = self._host.spawn(self._query_deleted(unknown), name=f"deleted-topics-{self._shard.number}")

    async def _query_deleted(self, unknown: list[TopicId]) -> None:
        """Expire the offsets of topics that the controller confirms as deleted."""
        wait_s = RETRY_S
        while True:
            try:
                self.topics_changed((), await self._host.deleted_topics(unknown))
                return
            except TidelogError as error:
                LOGGER.warning("broker=%d cannot ask which topics are deleted: %s", self._host.me, error)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RETRY_MAX_S)

    def topics_changed(self, groups: Iterable[str], gone: Iterable[TopicId]) -> None:
        """Refresh these groups, whose topics changed, and expire offsets of deleted topics. Also refreshes groups
        with uncommitted decisions: they are in no index yet, and were decided on the former topics."""
        self._to_refresh.update(dict.fromkeys(groups))
        self._to_refresh.update(self._shard.decided)
        self._gone.update(dict.fromkeys(sorted(gone, key=lambda topic: topic.int)))
        self._start_task()

    def expire_offsets(self) -> None:
        self._expiry_is_due = self._fences_are_due = True
        self._start_task()

    def _start_task(self) -> None:
        has_work = bool(self._to_refresh or self._gone or self._expiry_is_due)
        if has_work and self._task is None and self._shard.is_leading:
            self._task = self._host.spawn(self._work(), name=f"groups-{self._shard.number}")

    async def _work(self) -> None:
        try:
            while self._to_refresh or self._gone or self._expiry_is_due:
                try:
                    await self._work_step()
                except TidelogError as error:
                    self._shard.check()  # raises if the shard has ended
                    LOGGER.info("broker=%d groups of partition %d, retry: %s", self._host.me, self._shard.number, error)
                    await asyncio.sleep(RETRY_S)
        except TidelogError as error:
            LOGGER.info("broker=%d groups of partition %d: %s", self._host.me, self._shard.number, error)
        finally:
            self._task = None

    async def _work_step(self) -> None:
        host = self._host
        if self._to_refresh and not self._is_stuck:
            group = next(iter(self._to_refresh))
            # Before the decision: a topic that changes while this waits for its commit adds the group again.
            del self._to_refresh[group]
            try:
                await self._shard.submit(RefreshTopics(group=group, view=host.view, now_ms=host.now_ms()), is_own=True)
            except TidelogError:
                self._to_refresh[group] = None
                # Expired offsets do not wait for a group that cannot be refreshed.
                self._is_stuck = bool(self._gone or self._expiry_is_due)
                raise
            return
        self._is_stuck = False
        if self._fences_are_due or self._old_fences:
            await self._forget_fences()
            return
        if not self._to_sweep:
            # Uncommitted decisions may have offsets of deleted topics, too.
            self._to_sweep.extend(sorted({*self._shard.state.groups, *self._shard.decided}))
            self._sweep_gone = frozenset(self._gone)
        groups = tuple(islice(self._to_sweep, SWEEP_GROUPS))
        request = ExpireOffsets(
            now_ms=host.now_ms(), retention_ms=host.offsets_retention_ms, gone=self._sweep_gone, groups=groups
        )
        if await self._shard.submit(request, is_own=True):
            return  # these groups have more expired offsets
        for _ in groups:
            self._to_sweep.popleft()
        if not self._to_sweep:
            self._expiry_is_due = False
            for topic in self._sweep_gone:
                del self._gone[topic]

    async def _forget_fences(self) -> None:
        request = ForgetFences(now_ms=self._host.now_ms(), retention_ms=self._host.fences_retention_ms)
        if self._fences_are_due:
            self._fences_are_due = False
            state = self._shard.state
            async for producer_id in sliced(state.fences, FENCES_PER_SLICE):
                if is_old_fence(state, producer_id, request):
                    self._old_fences.append(producer_id)
            return
        ids = tuple(islice(self._old_fences, FENCES_PER_SLICE))
        if await self._shard.submit(replace(request, ids=ids), is_own=True):
            return  # there are more of these
        for _ in ids:
            self._old_fences.popleft()
