"""What the metadata says of this broker's partitions, carried out: in order, and never long in one turn of the loop.

    delta, small (`partitions_per_slice`) --> done when the subscriber returns
    delta, large --> the first slice, then a task: a slice in each turn
    delta while that task runs --> waits; all that wait are one change, from the first older image to the last newer one

So a later change is never seen before an earlier one is done, and what waits is bounded: two images. A replica whose
turn has not come is as if its news had not arrived yet, which can be so at any time; everything that it does is checked
by its leader epoch. The one thing that must not be mixed is the broker's own epoch: while a new one is taken over there
is none, so that no role begins before all former ones have ended.

Logs that the metadata does not know here are removed once this broker has been let in, never before: until then its
metadata may be old.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from tidelog.metadata.delta import ImageDelta, delta_steps, for_broker_steps
from tidelog.metadata.image import ClusterImage
from tidelog.model.ids import PartitionId, TopicId
from tidelog.model.steps import Steps
from tidelog.replication import throttle
from tidelog.replication.leading import Leading

if TYPE_CHECKING:
    from tidelog.replication.replica import Replica
    from tidelog.replication.replicas import Replicas

LOGGER = logging.getLogger(__name__)

T = TypeVar("T")


class Changes:
    """See the module."""

    def __init__(self, host: Replicas) -> None:
        self.image = ClusterImage()
        """What is being carried out, or has been."""
        self._host = host
        self._is_busy = False
        self._next: tuple[ClusterImage, ClusterImage] | None = None
        """What has come meanwhile: from this image to that."""
        self._has_swept = False

    def metadata_changed(self, delta: ImageDelta, older: ClusterImage, newer: ClusterImage) -> None:
        """The subscriber of the metadata's tail."""
        if self._host.is_closed:
            return
        if self._is_busy:
            self._next = (older if self._next is None else self._next[0], newer)
            return
        steps = self._apply(delta, older, newer)
        try:
            next(steps)
        except StopIteration:
            return
        self._is_busy = True
        self._host.spawn(self._go_on(steps), name="metadata")

    async def _go_on(self, steps: Steps[None]) -> None:
        await _in_turns(steps)
        while self._next is not None:
            (older, newer), self._next = self._next, None
            delta = await _in_turns(delta_steps(older, newer))
            await _in_turns(self._apply(delta, older, newer))
        self._is_busy = False

    def _apply(self, delta: ImageDelta, older: ClusterImage, newer: ClusterImage) -> Steps[None]:
        host, self.image = self._host, newer
        work = yield from for_broker_steps(delta, older, host.me)
        yield from self._each(work.dropped, lambda gone: host.drop(PartitionId(TopicId(gone[0]), gone[1])))
        mine = newer.brokers.get(host.me)
        epoch = mine.broker_epoch if mine and mine.incarnation == host.agent.registration.incarnation else -1
        is_reborn = epoch != host.broker_epoch
        if is_reborn:
            host.broker_epoch = -1
            yield from self._each(list(host.all()), host.end_role)
            host.broker_epoch = epoch
        yield from self._each((*work.led, *work.followed, *work.leaderless), host.changed)
        if is_reborn:
            yield from self._each(list(host.all()), host.unsettle)
        if delta.configs:
            yield from self._configs_changed(delta)
        if delta.brokers:
            yield from self._brokers_changed()
        if not self._has_swept and mine is not None and epoch >= 0 and not mine.fenced:
            self._has_swept = True
            yield from self._each(host.logs.known(), self._sweep)

    def _each(self, items: Sequence[T], act: Callable[[T], None]) -> Steps[None]:
        """One after the other, so many in a step. What an item is about may be gone when its turn comes."""
        for number, item in enumerate(items):
            if number and number % self._host.config.partitions_per_slice == 0:
                yield
            act(item)

    def _configs_changed(self, delta: ImageDelta) -> Steps[None]:
        host = self._host
        topics = {name for kind, name in delta.configs if kind == "topic"}
        everything = any(
            kind == "cluster" or (kind == "broker" and name == str(host.me)) for kind, name in delta.configs
        )
        now_s, lag_max_ms = asyncio.get_running_loop().time(), host.lag_max_ms()
        host.leader_bucket.set_rate(throttle.rate_of(self.image, throttle.LEADER, host.me), now_s)
        host.follower_bucket.set_rate(throttle.rate_of(self.image, throttle.FOLLOWER, host.me), now_s)
        yield from self._each(
            [replica for replica in host.all() if everything or replica.topic in topics],
            lambda replica: self._config_changed(replica, lag_max_ms),
        )

    def _config_changed(self, replica: Replica, lag_max_ms: int) -> None:
        if replica.is_dropped:
            return
        self._host.note_throttles(replica)
        if isinstance(replica.role, Leading):
            replica.role.state.set_lag_max(lag_max_ms)
            replica.role.metadata_changed(replica.partition, self._host.min_isr(replica))
            self._host.isr_updates.look(replica)
        self._host.unsettle(replica)

    def _brokers_changed(self) -> Steps[None]:
        """Who has come back may join, if it has caught up."""
        yield from self._each(
            [
                leading.replica
                for leading in self._host.leaders()
                if len(leading.state.isr) < len(leading.replica.partition.replicas)
            ],
            self._host.isr_updates.look,
        )

    def _sweep(self, partition_id: PartitionId) -> None:
        """The log of a topic that was deleted, or of a replica that was moved away, while this broker was down."""
        partition = self.image.partition(partition_id.topic_id, partition_id.partition)
        if self._host.get(partition_id) is None and (partition is None or self._host.me not in partition.replicas):
            LOGGER.warning("broker=%d removes the log of %s: it has no replica here", self._host.me, partition_id)
            self._host.spawn(self._host.remove(partition_id), name="sweep")


async def _in_turns(steps: Steps[T]) -> T:
    """A step in each turn of the event loop."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        await asyncio.sleep(0)
