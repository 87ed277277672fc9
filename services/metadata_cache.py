"""This node's copy of the cluster's metadata, and how old it is.

role            image
controller      what its controller has applied
broker          what its tail has read
both            what its tail has read: a broker serves by its tail, even if its controller is ahead
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from tidelog.metadata.controller_client import ControllerClient
from tidelog.metadata.controller_node import ControllerNode
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.tail import MetadataTail
from tidelog.model.ids import NodeId, Offset
from tidelog.services.deadline import Deadline

SEE_MS = 500
FRESH_MS = 3_000
"""A broker's copy is not stale below this age: new entries arrive twice a second as a rule."""


class MetadataCache:
    """One for each node. At least one of `controller` and `tail` is given."""

    def __init__(
        self,
        *,
        cluster_id: str,
        node: NodeId,
        client: ControllerClient,
        controller: ControllerNode | None = None,
        tail: MetadataTail | None = None,
    ) -> None:
        assert controller is not None or tail is not None, "a node is a controller or has a tail"
        self.cluster_id = cluster_id
        self.node = node
        self.controller = controller
        self._client = client
        self._tail = tail
        self._created_s: float | None = None

    @property
    def image(self) -> ClusterImage:
        if self._tail is not None:
            return self._tail.image
        assert self.controller is not None, "a node is a controller or has a tail"
        return self.controller.image

    @property
    def metadata_offset(self) -> int:
        """`image` holds all entries below this offset."""
        if self._tail is not None:
            return self._tail.offset
        assert self.controller is not None, "a node is a controller or has a tail"
        return self.controller.machine.offset

    @property
    def metadata_epoch(self) -> int:
        """The epoch of the last entry in `image`; only on a node with a tail."""
        assert self._tail is not None, "only brokers have a tail"
        return self._tail.epoch

    @property
    def active_controller(self) -> int:
        """The active controller, as far as this node knows; -1 if it does not."""
        if self.controller is not None:
            leader = self.controller.driver.core.leader
        else:
            # The controller client learns a new leader before the tail, which knows it only from its source.
            leader = self._client.leader or (None if self._tail is None else self._tail.leader)
        return -1 if leader is None else leader

    def own_active(self) -> ControllerNode:
        """Return the controller of this node; raises `NotLeaderError` unless it is active."""
        assert self.controller is not None, "only controllers are asked"
        if not self.controller.is_active:
            raise self.controller.machine.runtime.not_leader()
        return self.controller

    def controllers(self) -> Sequence[NodeId]:
        """The controllers that this node knows."""
        return self._client.known()

    def stale_ms(self) -> int | None:
        """Return the age of this copy if no active controller updates it; None if one does."""
        if self.controller is not None:
            driver = self.controller.driver
            if driver.has_leader_contact():
                return None
            return self._age_ms(driver.describe().without_leader_ms)
        age_ms = self._age_ms(None)
        return None if self._client.leader is not None or age_ms < FRESH_MS else age_ms

    def _age_ms(self, without_leader_ms: int | None) -> int:
        tail_ms = None if self._tail is None else self._tail.stale_ms()
        ages_ms = [age for age in (tail_ms, without_leader_ms) if age is not None]
        if ages_ms:
            return max(ages_ms)
        # This incarnation has never caught up: what it read from its disk is older than the process.
        now_s = asyncio.get_running_loop().time()
        if self._created_s is None:
            self._created_s = now_s
        return max(FRESH_MS, int((now_s - self._created_s) * 1000))

    async def until(self, condition: Callable[[ClusterImage], bool]) -> None:
        """Return when the image of this node meets the condition."""
        if self._tail is not None:
            await self._tail.until(condition)
            return
        assert self.controller is not None, "a node is a controller or has a tail"
        while not condition(self.controller.image):
            await self.controller.driver.wait_applied(Offset(self.controller.driver.applied_offset + 1))

    async def until_seen(self, condition: Callable[[ClusterImage], bool], deadline: Deadline) -> None:
        """Wait up to SEE_MS until this node sees a change. It is done, so a deadline that passes is no error."""
        end_s = min(deadline.end_s, asyncio.get_running_loop().time() + SEE_MS / 1000)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(end_s):
                await self.until(condition)
