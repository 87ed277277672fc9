"""Applies metadata deltas to this broker's partitions, in order and in slices of one event loop turn.

    small delta (`partitions_per_slice`) --> applied when the subscriber returns
    large delta --> first slice at once, the rest in a task, one slice per turn
    delta while that task runs --> waits; waiting deltas merge into one, from the first older image to the last newer

A later change is never applied before an earlier one has finished, and the queue is bounded: two images. A replica
whose slice has not come behaves as if the delta had not arrived yet, which is always possible; its leader epoch guards
everything that it does. Broker epochs must not mix: while a new broker epoch is applied the broker has none, so no role
begins before all roles of the former epoch have ended.

Logs without a replica in the metadata are removed once this broker is unfenced, never before: until then its metadata
may be old.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from tidelog.metadata.delta import ImageDelta, LocalPartition, delta_steps, for_broker_steps
from tidelog.metadata.image import ClusterImage
from tidelog.model.errors import StorageError
from tidelog.model.ids import PartitionId, TopicId
from tidelog.model.steps import Steps
from tidelog.replication import throttle
from tidelog.replication.broker_context import BrokerContext
from tidelog.replication.follower_replica import FollowerReplica
from tidelog.replication.follower_stream import FollowerStreams
from tidelog.replication.isr_updates import IsrUpdates
from tidelog.replication.leader_replica import LeaderReplica, leaders_of
from tidelog.replication.leader_stream import LeaderStreams
from tidelog.replication.replica import Replica
from tidelog.world.slicing import run_in_turns

LOGGER = logging.getLogger(__name__)

T = TypeVar("T")


class MetadataChanges:
    """See the module. Owns the image and the broker epoch that the replicas see, and `replicas`."""

    def __init__(
        self,
        context: BrokerContext,
        replicas: dict[PartitionId, Replica],
        *,
        isr_updates: IsrUpdates,
        leader_streams: LeaderStreams,
        follower_streams: FollowerStreams,
    ) -> None:
        self._context = context
        self._metadata = context.metadata
        self._replicas = replicas
        self._isr_updates = isr_updates
        self._leader_streams = leader_streams
        self._follower_streams = follower_streams
        self._is_busy = False
        self._next: tuple[ClusterImage, ClusterImage] | None = None
        """(older, newer) of the merged deltas that wait."""
        self._has_swept = False

    def metadata_changed(self, delta: ImageDelta, older: ClusterImage, newer: ClusterImage) -> None:
        """Apply a delta, or queue it behind the one in progress. Called by the metadata tail."""
        if self._context.tasks.is_closed:
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
        self._context.tasks.spawn(self._apply_rest(steps), name="metadata")

    async def _apply_rest(self, steps: Steps[None]) -> None:
        await run_in_turns(steps)
        while self._next is not None:
            (older, newer), self._next = self._next, None
            delta = await run_in_turns(delta_steps(older, newer))
            await run_in_turns(self._apply(delta, older, newer))
        self._is_busy = False

    def _apply(self, delta: ImageDelta, older: ClusterImage, newer: ClusterImage) -> Steps[None]:
        metadata = self._metadata
        metadata.image = newer
        work = yield from for_broker_steps(delta, older, metadata.me)
        yield from self._each(work.dropped, lambda gone: self._drop(PartitionId(TopicId(gone[0]), gone[1])))
        mine = newer.brokers.get(metadata.me)
        epoch = mine.broker_epoch if mine and mine.incarnation == self._context.agent.registration.incarnation else -1
        is_reborn = epoch != metadata.broker_epoch
        if is_reborn:
            metadata.broker_epoch = -1
            yield from self._each(list(self._replicas.values()), Replica.end_role)
            metadata.broker_epoch = epoch
        yield from self._each((*work.led, *work.followed, *work.leaderless), self.partition_changed)
        if is_reborn:
            yield from self._each(list(self._replicas.values()), self._context.queue.add)
        if delta.configs:
            yield from self._configs_changed(delta)
        if delta.brokers:
            yield from self._brokers_changed()
        if not self._has_swept and mine is not None and epoch >= 0 and not mine.fenced:
            self._has_swept = True
            orphans: list[PartitionId] = []
            yield from self._each(
                self._context.logs.known(), lambda log_id: orphans.append(log_id) if self._is_orphan(log_id) else None
            )
            if orphans:
                self._context.tasks.spawn(self._sweep(orphans), name="sweep")

    def _each(self, items: Sequence[T], act: Callable[[T], None]) -> Steps[None]:
        """Call `act` for each item, a slice per step. The subject of an item may be gone by its turn."""
        for number, item in enumerate(items):
            if number and number % self._context.config.partitions_per_slice == 0:
                yield
            act(item)

    def partition_changed(self, local: LocalPartition) -> None:
        """Apply the new metadata of a partition of this broker."""
        partition_id, partition = PartitionId(TopicId(local.topic_id), local.number), local.partition
        replica = self._replicas.get(partition_id)
        if replica is None:
            topic = self._metadata.image.topics[partition_id.topic_id].name
            replica = self._replicas[partition_id] = Replica(partition_id, topic, partition)
            self._note_throttles(replica)
        replica.partition = partition
        replica.is_dropped = False
        role = replica.role
        is_same = role is not None and role.leader_epoch == partition.leader_epoch
        is_leader = self._metadata.broker_epoch >= 0 and partition.leader == self._metadata.me
        if is_same and isinstance(role, LeaderReplica) and is_leader:
            role.metadata_changed(partition, self._metadata.min_isr(replica))
            self._isr_updates.check(replica)
        elif is_same and isinstance(role, FollowerReplica) and role.leader == partition.leader:
            self._follower_streams.check_channel(role)
        else:
            replica.end_role()
        self._context.queue.add(replica)
        self._leader_streams.retry_parked(partition_id)

    def _drop(self, partition_id: PartitionId) -> None:
        """Drop the replica: the metadata has none on this broker."""
        replica = self._replicas.get(partition_id)
        if replica is not None:
            replica.end_role()
            replica.is_dropped = True
            self._context.queue.add(replica)
            self._context.wakers.wake(partition_id)

    def remove(self, replica: Replica) -> None:
        """Remove a dropped replica whose log is removed."""
        replica.is_removed = True
        del self._replicas[replica.partition_id]

    def _note_throttles(self, replica: Replica) -> None:
        image, me, number = self._metadata.image, self._metadata.me, replica.partition_id.partition
        replica.is_leader_throttled = throttle.is_named(image, throttle.LEADER, replica.topic, number, me)
        replica.is_follower_throttled = throttle.is_named(image, throttle.FOLLOWER, replica.topic, number, me)

    def _configs_changed(self, delta: ImageDelta) -> Steps[None]:
        image, me = self._metadata.image, self._metadata.me
        topics = {name for kind, name in delta.configs if kind == "topic"}
        everything = any(kind == "cluster" or (kind == "broker" and name == str(me)) for kind, name in delta.configs)
        now_s, lag_max_ms = asyncio.get_running_loop().time(), self._metadata.lag_max_ms()
        self._leader_streams.bucket.set_rate(throttle.rate_of(image, throttle.LEADER, me), now_s)
        self._follower_streams.bucket.set_rate(throttle.rate_of(image, throttle.FOLLOWER, me), now_s)
        yield from self._each(
            [replica for replica in self._replicas.values() if everything or replica.topic in topics],
            lambda replica: self._config_changed(replica, lag_max_ms),
        )

    def _config_changed(self, replica: Replica, lag_max_ms: int) -> None:
        if replica.is_dropped:
            return
        self._note_throttles(replica)
        if isinstance(replica.role, LeaderReplica):
            replica.role.state.set_lag_max(lag_max_ms)
            replica.role.metadata_changed(replica.partition, self._metadata.min_isr(replica))
            self._isr_updates.check(replica)
        self._context.queue.add(replica)

    def _brokers_changed(self) -> Steps[None]:
        """Check partitions whose in-sync set is incomplete: a returned broker may have caught up."""
        yield from self._each(
            [
                leader.replica
                for leader in leaders_of(self._replicas.values())
                if len(leader.state.isr) < len(leader.replica.partition.replicas)
            ],
            self._isr_updates.check,
        )

    def _is_orphan(self, log_id: PartitionId) -> bool:
        """Return whether the log has no replica here: its topic was deleted, or its replica was reassigned, while this
        broker was down."""
        partition = self._metadata.image.partition(log_id.topic_id, log_id.partition)
        is_elsewhere = partition is None or self._metadata.me not in partition.replicas
        return is_elsewhere and self._replicas.get(log_id) is None

    async def _sweep(self, orphans: list[PartitionId]) -> None:
        """Remove the logs, one after the other; those that cannot be removed now, later."""
        me, logs = self._metadata.me, self._context.logs
        while orphans:
            left = []
            for log_id in orphans:
                directory = logs.directory_of(log_id)
                # A replica may have been assigned here meanwhile, or the directory may have failed.
                if directory is None or directory.failed is not None or not self._is_orphan(log_id):
                    continue
                LOGGER.warning("broker=%d removes the log of %s: it has no replica here", me, log_id)
                try:
                    await logs.remove(log_id)
                except StorageError as error:
                    LOGGER.error("broker=%d cannot remove the log of %s now: %s", me, log_id, error)
                    left.append(log_id)
            orphans = left
            if orphans:
                await asyncio.sleep(self._context.config.repair_retry_ms / 1000)
