"""What a shard does that no client asks for: it deals groups again whose topics have changed, and expires offsets.

    topics_changed    groups that look at changed topics are dealt again; offsets of deleted topics expire
    expire_offsets    offsets that are older than their retention expire
    forget_deleted    topics of offsets that are not in the metadata: the controller is asked whether they are deleted

One task works on all of it, one decision at a time, and tries again what fails. It ends with the shard.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

from tidelog.coordinator.requests import ExpireOffsets, RefreshTopics
from tidelog.model.errors import TidelogError
from tidelog.model.ids import TopicId

if TYPE_CHECKING:
    from tidelog.coordinator.shard import Shard, ShardHost

LOGGER = logging.getLogger(__name__)

RETRY_S = 0.5
RETRY_MAX_S = 30.0
SWEEP_GROUPS = 200
"""Groups whose offsets are scanned by one decision."""


class BackgroundWork:
    """See the module. Belongs to a shard, and ends with it."""

    def __init__(self, shard: Shard, host: ShardHost) -> None:
        self._shard = shard
        self._host = host
        self._to_refresh: dict[str, None] = {}
        self._gone: dict[TopicId, None] = {}
        self._expiry_is_due = False
        self._to_sweep: deque[str] = deque()
        """Groups whose offsets are still to be looked at."""
        self._sweep_gone: frozenset[TopicId] = frozenset()
        self._is_stuck = False
        """The last refresh has failed: now the offsets."""
        self._upkeep: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None

    def end(self) -> None:
        for task in (self._upkeep, self._asking):
            if task is not None:
                task.cancel()

    def forget_deleted(self, unknown: list[TopicId]) -> None:
        """Ask the controller which of these topics are deleted. The shard does its work meanwhile, however long the
        controller does not answer."""
        self._asking = self._host.spawn(self._ask_and_forget(unknown), name=f"deleted-topics-{self._shard.number}")

    async def _ask_and_forget(self, unknown: list[TopicId]) -> None:
        """The offsets of deleted topics go, as soon as the controller says that they are deleted."""
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
        """These groups look at topics that are not what they were; these topics are no more. What has been decided and
        has not committed is in no index yet, and was decided on topics as they were."""
        self._to_refresh.update(dict.fromkeys(groups))
        self._to_refresh.update(self._shard.machine.decided)
        self._gone.update(dict.fromkeys(sorted(gone, key=lambda topic: topic.int)))
        self._keep_up()

    def expire_offsets(self) -> None:
        self._expiry_is_due = True
        self._keep_up()

    def _keep_up(self) -> None:
        has_work = bool(self._to_refresh or self._gone or self._expiry_is_due)
        if has_work and self._upkeep is None and self._shard.is_leading:
            self._upkeep = self._host.spawn(self._do_upkeep(), name=f"groups-{self._shard.number}")

    async def _do_upkeep(self) -> None:
        try:
            while self._to_refresh or self._gone or self._expiry_is_due:
                try:
                    await self._upkeep_step()
                except TidelogError as error:
                    self._shard.check()  # over: this ends here
                    LOGGER.info("broker=%d groups of partition %d, again: %s", self._host.me, self._shard.number, error)
                    await asyncio.sleep(RETRY_S)
        except TidelogError as error:
            LOGGER.info("broker=%d groups of partition %d: %s", self._host.me, self._shard.number, error)
        finally:
            self._upkeep = None

    async def _upkeep_step(self) -> None:
        host = self._host
        if self._to_refresh and not self._is_stuck:
            group = next(iter(self._to_refresh))
            # Before it is decided: a topic that changes while this waits for its commit brings the group back.
            del self._to_refresh[group]
            try:
                await self._shard.submit(RefreshTopics(group=group, view=host.view, now_ms=host.now_ms()), is_own=True)
            except TidelogError:
                self._to_refresh[group] = None
                # What has to be forgotten does not wait for a group that cannot be dealt.
                self._is_stuck = bool(self._gone or self._expiry_is_due)
                raise
            return
        self._is_stuck = False
        if not self._to_sweep:
            # What has been decided and has not committed may be of topics that are gone, too.
            self._to_sweep.extend(sorted({*self._shard.state.groups, *self._shard.machine.decided}))
            self._sweep_gone = frozenset(self._gone)
        groups = tuple(islice(self._to_sweep, SWEEP_GROUPS))
        request = ExpireOffsets(
            now_ms=host.now_ms(), retention_ms=host.offsets_retention_ms, gone=self._sweep_gone, groups=groups
        )
        if await self._shard.submit(request, is_own=True):
            return  # there is more of these
        for _ in groups:
            self._to_sweep.popleft()
        if not self._to_sweep:
            self._expiry_is_due = False
            for topic in self._sweep_gone:
                del self._gone[topic]
