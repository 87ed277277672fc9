"""A partition that this broker leads: the pure state (`partition.LeaderState`) with its log and those who wait.

    append ----> log end ----> subscriptions are marked, their streams push
    group commit ----> durable end \\
    acks of followers ------------> the high watermark advances ----> producers are answered, readers are woken,
    answers of the controller ---->                                  followers are told

One `Leading` is one leader epoch: it is made when the log is open and the epoch is this incarnation's, and ended, for
good, before anything else is done with the log. No task and no timer belongs to it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from tidelog.log.admission import Look, look_inside
from tidelog.log.config import FlushMode
from tidelog.log.log import Appended, Log, Slice
from tidelog.metadata.image import Partition
from tidelog.metadata.partitions import PartitionState
from tidelog.metadata.topics import INTERNAL_TOPICS
from tidelog.model.errors import (
    DiskFullError,
    InvalidTopicError,
    LeaderNotAvailableError,
    OverloadedError,
    StorageError,
    TidelogError,
    WorkFailedError,
)
from tidelog.model.ids import NO_EPOCH, Offset
from tidelog.replication.deletes import ReplicaDeletes
from tidelog.replication.messages import Ended, Reason, Subscribe
from tidelog.replication.partition import LeaderState
from tidelog.replication.waiting import AckWaiters
from tidelog.world.disk import Buffer

if TYPE_CHECKING:
    from tidelog.replication.leader_stream import LeaderStream
    from tidelog.replication.replica import Replica
    from tidelog.replication.replicas import Replicas


def safe_end(log: Log) -> Offset:
    """What counts as stored: synced, or with `flush.mode=page-cache` just written."""
    return log.end_offset if log.config.flush_mode is FlushMode.PAGE_CACHE else log.durable_end


class Subscription:
    """What one follower has of one partition, as its leader knows it.

    Invariants: the follower's log is a prefix of the leader's up to `next_offset`; `unacked` are the pieces that were
    pushed and are not yet durable there, oldest first, `unacked_bytes` their sum.
    """

    __slots__ = (
        "broker_epoch",
        "follower",
        "is_checked",
        "is_empty",
        "is_over",
        "is_reading",
        "leading",
        "next_offset",
        "number",
        "ready",
        "sent_deletes_end",
        "sent_end",
        "sent_high_watermark",
        "stream",
        "takes_gaps",
        "takes_history",
        "unacked",
        "unacked_bytes",
    )

    def __init__(self, leading: Leading, stream: LeaderStream, asked: Subscribe) -> None:
        self.leading = leading
        self.stream = stream
        self.follower = int(stream.peer)
        self.number = asked.number
        self.broker_epoch = asked.broker_epoch
        self.next_offset = asked.next_offset
        self.takes_gaps = asked.takes_gaps
        self.takes_history = asked.takes_history
        self.sent_deletes_end = -1
        """As it was last sent, with the history; -1 if that was not sent."""
        self.sent_end = asked.next_offset
        """Where the last message ended that was put together for the follower."""
        self.is_empty = asked.last_epoch == NO_EPOCH
        """The follower has no record, and nothing was pushed to it."""
        self.unacked: deque[tuple[int, int]] = deque()
        self.unacked_bytes = 0
        self.sent_high_watermark = -1
        self.ready: Buffer | None = None
        """Batches from `next_offset` on that had to be read from the device."""
        self.is_reading = False
        self.is_checked = False
        """Whether something was pushed, and found to be sound."""
        self.is_over = False

    def pushed(self, next_offset: int, size: int) -> None:
        self.is_empty = False
        self.next_offset = next_offset
        self.unacked.append((next_offset, size))
        self.unacked_bytes += size

    def acked(self, durable_end: int) -> None:
        while self.unacked and self.unacked[0][0] <= durable_end:
            self.unacked_bytes -= self.unacked.popleft()[1]


class Leading:
    """See the module."""

    __slots__ = (
        "_deletes",
        "_first",
        "_host",
        "_shared",
        "acks",
        "is_held",
        "log",
        "replica",
        "state",
        "subscriptions",
    )

    def __init__(self, host: Replicas, replica: Replica, log: Log, state: LeaderState) -> None:
        self._host = host
        self.replica = replica
        self.log = log
        self.state = state
        self.acks = AckWaiters()
        self.is_held = False
        """The log changes its place: no appends for a moment."""
        self.subscriptions: dict[int, Subscription] = {}
        """By follower: the one with the highest number."""
        self._shared: tuple[tuple[int, int, int], Slice | None] | None = None
        self._first: tuple[int, Offset] | None = None
        self._deletes = ReplicaDeletes(host.now_ms())

    @property
    def leader_epoch(self) -> int:
        return self.state.leader_epoch

    @property
    def high_watermark(self) -> Offset:
        return self.state.high_watermark

    @property
    def reachable_isr(self) -> int:
        """Members of the in-sync set that are here or follow over an open stream. Without an active controller the set
        itself cannot shrink, whoever is gone."""
        return sum(member == self._host.me or member in self.subscriptions for member in self.state.isr)

    # Progress.

    def begin(self) -> None:
        """The state knows what this replica has by itself: without followers that is all there is."""
        if self.state.high_watermark != self.replica.high_watermark:
            self._advanced()
        self._host.wakers.wake(self.replica.partition_id)

    def append(
        self,
        batches: Buffer,
        *,
        is_coordinator: bool = False,
        looked: Look | None = None,
        inline_bytes_max: int | None = None,
    ) -> Appended:
        """In the page cache when this returns; all of it or, with an error, nothing. As `Log.append`."""
        if self.is_held:
            raise LeaderNotAvailableError(f"{self.log.path} is being moved to another directory")
        if not is_coordinator and self.replica.topic in INTERNAL_TOPICS:
            raise InvalidTopicError(f"{self.replica.topic} is the cluster's own: only its coordinators write to it")
        before = self.log.end_offset
        try:
            appended = self.log.append(
                batches,
                leader_epoch=self.leader_epoch,
                is_coordinator=is_coordinator,
                looked=looked,
                inline_bytes_max=inline_bytes_max,
            )
        except DiskFullError:
            self._host.upkeep.full_directories.append_refused(self.replica.partition_id)
            raise
        except StorageError as error:
            self._host.write_failed(self.replica, error)
            raise
        if self.log.end_offset > before:
            self.state.appended(self.log.end_offset, self._host.now_ms())
            if self.log.config.flush_mode is FlushMode.PAGE_CACHE:
                self.durable()
            for subscription in self.subscriptions.values():
                subscription.stream.mark(subscription)
        return appended

    async def look_inside(self, batches: bytes, look: Look) -> bytes:
        """What `append` takes with this `look`; meanwhile anything may happen here. `OverloadedError` if it cannot be
        made now."""
        try:
            changed = await (self._host.admission_work or self.log.work).run(look_inside, batches, look)
        except WorkFailedError as error:
            raise OverloadedError(f"the batches could not be looked into: {error}") from error
        return batches if changed is None else changed

    def durable(self) -> None:
        """A group commit has ended."""
        if self.state.durable(safe_end(self.log), self._host.now_ms()):
            self._advanced()

    def acked(self, subscription: Subscription, durable_end: int) -> None:
        assert not subscription.is_over, "an ack of a subscription that is over"
        subscription.acked(durable_end)
        self._deletes.acked(subscription.follower, durable_end)
        now_ms = self._host.now_ms()
        if self.state.acked(subscription.follower, subscription.broker_epoch, Offset(durable_end), now_ms):
            self._advanced()
        if subscription.follower not in self.state.isr:
            self._host.isr_updates.look(self.replica)

    def metadata_changed(self, partition: Partition, min_isr: int) -> None:
        """The same epoch, with another ISR, other replicas or settings."""
        before = self.state.isr
        if self.state.metadata_changed(partition, min_isr, self._host.now_ms()):
            self._advanced()
        self._host.isr_log.changed(self.log.path, self.leader_epoch, before, self.state.isr)
        for subscription in list(self.subscriptions.values()):
            if subscription.follower not in partition.replicas:
                self.drop(subscription, Reason.NOT_LEADER)

    def answered(self, state: PartitionState) -> None:
        """The controller's answer to a change of the ISR."""
        before = self.state.isr
        if self.state.answered(state, self._host.now_ms()):
            self._advanced()
        self._host.isr_log.changed(self.log.path, self.leader_epoch, before, self.state.isr)

    def failed(self, *, may_be_done: bool) -> None:
        """No answer of the controller."""
        if self.state.failed(may_be_done=may_be_done):
            self._advanced()

    def _advanced(self) -> None:
        high_watermark = self.state.high_watermark
        self.replica.high_watermark = high_watermark
        self._host.logs.note_high_watermark(self.replica.partition_id, high_watermark)
        self.acks.advance(high_watermark)
        for subscription in self.subscriptions.values():
            subscription.stream.mark_high_watermark(subscription)
        self._host.wakers.wake(self.replica.partition_id)
        self._host.look_at_start(self.replica)

    # Followers.

    def read_nowait(self, offset: int, bytes_max: int) -> Slice | None:
        """As `Log.read_nowait`. What was appended goes to all followers in the same turn of the loop, as a rule: it is
        read once for them, and forgotten with that turn."""
        key = offset, bytes_max, self.log.end_offset
        if self._shared is not None and self._shared[0] == key:
            return self._shared[1]
        found = self.log.read_nowait(offset, bytes_max=bytes_max)
        if len(self.subscriptions) > 1:
            if self._shared is None:
                asyncio.get_running_loop().call_soon(self._forget_shared)
            self._shared = key, found
        return found

    def _forget_shared(self) -> None:
        self._shared = None

    @property
    def first_offset(self) -> Offset:
        """Where the log of a follower begins that has no record: with the batch that holds the start of ours. As long
        as nobody has read that, it is not known, and taken to begin there."""
        start = self.log.start_offset
        return self._first[1] if self._first is not None and self._first[0] == start else start

    def holds_start(self, base_offset: Offset) -> None:
        """The batch with the start of the log begins before it: records were deleted up to its middle."""
        self._first = self.log.start_offset, base_offset

    def subscribe(self, subscription: Subscription, durable_end: int) -> None:
        """The follower's log is a prefix of ours; from here on it is pushed to. Its word counts as an ack."""
        former = self.subscriptions.get(subscription.follower)
        if former is not None:
            former.is_over = True
            former.stream.forget(former)
        self.subscriptions[subscription.follower] = subscription
        self._deletes.subscribed(
            subscription.follower,
            durable_end,
            has_records=not subscription.is_empty,
            deletes_end=self.log.lineage.deletes_end,
        )
        self.acked(subscription, durable_end)
        subscription.stream.mark(subscription)

    def drop(self, subscription: Subscription, reason: Reason | None, *, epoch: int = -1, offset: int = -1) -> None:
        """No more pushes to this follower; it is told why, unless it knows."""
        subscription.is_over = True
        if self.subscriptions.get(subscription.follower) is subscription:
            del self.subscriptions[subscription.follower]
            self._deletes.left(subscription.follower, self._host.now_ms())
        subscription.stream.forget(subscription)
        if reason is not None:
            subscription.stream.tell(Ended(number=subscription.number, reason=reason, epoch=epoch, offset=offset))

    # Deletes (`replication.deletes`).

    def must_copy(self, follower: int, asked: Subscribe) -> bool:
        """Whether the follower is to be copied from the start. One that may be elected has all that was committed, and
        is never made to drop its log."""
        if follower in self.state.maximal_isr or follower in self.replica.partition.eligible:
            return False
        return self._deletes.must_copy(
            follower,
            has_records=asked.last_epoch != NO_EPOCH,
            next_offset=asked.next_offset,
            deletes_end=self.log.lineage.deletes_end,
        )

    def deletes_bound(self) -> Offset:
        """Tombstones and markers at or past this are not compacted away."""
        others = [replica for replica in self.replica.partition.replicas if replica != self._host.me]
        hold_ms = max(self.log.config.delete_retention_ms, self._host.lag_max_ms())
        return self._deletes.bound(others, log_end=self.log.end_offset, now_ms=self._host.now_ms(), hold_ms=hold_ms)

    def announce_deletes(self) -> None:
        """Followers may remove what the cleaner has removed here."""
        for subscription in self.subscriptions.values():
            if subscription.sent_deletes_end >= 0:
                subscription.stream.tell_history(subscription)

    def end(self, error: TidelogError) -> None:
        """This epoch is over here. Who waits for an ack does not learn what became of the records."""
        for subscription in list(self.subscriptions.values()):
            self.drop(subscription, Reason.NOT_LEADER)
        self.acks.fail(error)
        self._host.wakers.wake(self.replica.partition_id)
