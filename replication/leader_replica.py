"""A leader replica: the pure state (`partition.LeaderState`), its log, waiting producers and follower subscriptions.

    append ----> log end ----> subscriptions are marked, their streams push
    group commit ----> durable end \\
    acks of followers ------------> the high watermark advances ----> producers get their answers, readers wake up,
    answers of the controller ---->                                  followers receive the high watermark

A `LeaderReplica` serves one leader epoch. It is created when the log is open and the epoch belongs to this incarnation,
and ended before anything else changes the log. It has no task and no timer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from tidelog.log.admission import RecordRules, inspect_records
from tidelog.log.batch import ControlKind, encode_control
from tidelog.log.config import FlushMode
from tidelog.log.log import AppendInfo, Log, Slice
from tidelog.metadata.image import Partition
from tidelog.metadata.partitions import PartitionState
from tidelog.metadata.topics import INTERNAL_TOPICS
from tidelog.model.append_condition import AppendCondition
from tidelog.model.errors import (
    InvalidTopicError,
    LeaderNotAvailableError,
    NotLeaderOrFollowerError,
    OverloadedError,
    StorageError,
    WorkFailedError,
)
from tidelog.model.ids import NO_EPOCH, NO_OFFSET, NodeId, Offset
from tidelog.replication.broker_context import BrokerContext
from tidelog.replication.deletes import ReplicaDeletes
from tidelog.replication.isr_log import IsrLog
from tidelog.replication.messages import Ended, History, Reason, Subscribe
from tidelog.replication.partition import LeaderState
from tidelog.replication.partition_transactions import MarkerAction, PartitionTransactions, ProducerTransaction
from tidelog.replication.replica import Replica, ackable_end, now_ms
from tidelog.replication.transaction_messages import Marker
from tidelog.replication.waiters import AckWaiters
from tidelog.world.disk import Buffer
from tidelog.world.work import Work


class FollowerConnection(Protocol):
    """The stream to one follower broker (`leader_stream.LeaderStream`)."""

    @property
    def peer(self) -> NodeId: ...

    def mark(self, subscription: Subscription) -> None: ...

    def mark_high_watermark(self, subscription: Subscription) -> None: ...

    def send_later(self, message: Ended | History) -> None: ...

    def send_history(self, subscription: Subscription) -> None: ...

    def forget(self, subscription: Subscription) -> None: ...


class LeadershipObserver(Protocol):
    """Notified of every leader epoch that begins or ends on this broker. Returns quickly."""

    def led(self, leader: LeaderReplica) -> None: ...

    def left(self, leader: LeaderReplica) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderEvents:
    """Where the leader replicas of a broker report."""

    check_isr: Callable[[Replica], None]
    """Proposes another in-sync set if the state asks for one (`isr_updates`)."""
    isr_log: IsrLog
    observers: Sequence[LeadershipObserver]


class Subscription:
    """The leader's view of one follower of one partition.

    Invariants (`validate`): the follower's log is a prefix of the leader's up to `next_offset`, and no ack is past it;
    the last ack is what the leader's state counts; `unacked` holds (end, size) of the pushes that are not yet durable
    there, oldest first, `unacked_bytes` their sum.
    """

    __slots__ = (
        "acked_end",
        "broker_epoch",
        "follower",
        "is_checked",
        "is_empty",
        "is_over",
        "is_reading",
        "leader",
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

    def __init__(self, leader: LeaderReplica, stream: FollowerConnection, request: Subscribe) -> None:
        self.leader = leader
        self.stream = stream
        self.follower = int(stream.peer)
        self.number = request.number
        self.broker_epoch = request.broker_epoch
        self.next_offset = request.next_offset
        self.takes_gaps = request.takes_gaps
        self.takes_history = request.takes_history
        self.sent_deletes_end = -1
        """`deletes_end` of the last history sent; -1 if none was sent."""
        self.sent_end = request.next_offset
        """End offset of the last push that was gathered for the follower."""
        self.is_empty = request.last_epoch == NO_EPOCH
        """Whether the follower has no record, and nothing was pushed to it."""
        self.acked_end = NO_OFFSET
        """The follower's durable end by its last ack; -1 before the first."""
        self.unacked: deque[tuple[int, int]] = deque()
        self.unacked_bytes = 0
        self.sent_high_watermark = -1
        self.ready: Buffer | None = None
        """Batches that were read from disk and wait to be pushed."""
        self.is_reading = False
        self.is_checked = False
        """Whether the first pushed batches passed their CRC check."""
        self.is_over = False

    def pushed(self, next_offset: int, size: int) -> None:
        self.is_empty = False
        self.next_offset = next_offset
        self.unacked.append((next_offset, size))
        self.unacked_bytes += size

    def acked(self, durable_end: int) -> None:
        self.acked_end = Offset(durable_end)
        while self.unacked and self.unacked[0][0] <= durable_end:
            self.unacked_bytes -= self.unacked.popleft()[1]

    def validate(self) -> None:
        assert not self.is_over, "an ended subscription is in use"
        assert self.unacked_bytes == sum(size for _, size in self.unacked), "unacked bytes are counted"
        assert not self.unacked or self.unacked[0][0] > self.acked_end, f"unacked, and acked up to {self.acked_end}"
        assert not self.unacked or self.unacked[-1][0] == self.next_offset, "the last push ends at the next offset"
        assert self.next_offset <= self.leader.log.end_offset, "more was pushed than there is"
        known = self.leader.state.progress(self.follower)
        assert self.acked_end <= self.next_offset, f"{self.acked_end} is acked; {self.next_offset} was pushed"
        assert known is None or (known.durable_end, known.broker_epoch) == (self.acked_end, self.broker_epoch), (
            f"broker {self.follower} of epoch {self.broker_epoch} has acked {self.acked_end}, and counts as {known}"
        )


class LeaderReplica:
    """See the module.

    Invariants (`validate`): the state knows the log end, and no more as durable than the log has synced; the log has no
    newer epoch than this one; waiting producers wait past the high watermark; one subscription for each follower.
    """

    __slots__ = (
        "_check_plain",
        "_context",
        "_deletes",
        "_events",
        "_first",
        "_shared",
        "acks",
        "is_paused",
        "log",
        "replica",
        "state",
        "subscriptions",
        "transactions",
    )

    def __init__(
        self, context: BrokerContext, events: LeaderEvents, replica: Replica, log: Log, state: LeaderState
    ) -> None:
        self._context = context
        self._events = events
        self.replica = replica
        self.log = log
        self.state = state
        self.transactions = PartitionTransactions(lambda: self.log.producers)
        self._check_plain = partial(self.transactions.check, None)
        self.acks = AckWaiters()
        self.is_paused = False
        """Whether appends are rejected while the log moves to another directory."""
        self.subscriptions: dict[int, Subscription] = {}
        """By follower: its subscription with the highest number."""
        self._shared: tuple[tuple[int, int, int], Slice | None] | None = None
        self._first: tuple[int, Offset] | None = None
        self._deletes = ReplicaDeletes(now_ms())

    @property
    def leader_epoch(self) -> int:
        return self.state.leader_epoch

    @property
    def high_watermark(self) -> Offset:
        return self.state.high_watermark

    @property
    def reachable_isr(self) -> int:
        """Count the in-sync members that are this broker or follow over an open stream. Without a controller the
        in-sync set itself cannot shrink."""
        return sum(member == self._context.metadata.me or member in self.subscriptions for member in self.state.isr)

    # Progress.

    def begin(self) -> None:
        """Begin the leader epoch. Without followers the state has advanced the high watermark already."""
        replica = self.replica
        if self.state.high_watermark != replica.high_watermark:
            self._advanced()
        self._context.wakers.wake(replica.partition_id)
        self._log_isr(frozenset(replica.partition.replicas))
        for observer in self._events.observers:
            observer.led(self)
        self._events.check_isr(replica)

    def append(
        self,
        batches: Buffer,
        *,
        is_coordinator: bool = False,
        inspected: RecordRules | None = None,
        inline_bytes_max: int | None = None,
        transaction: ProducerTransaction | None = None,
        condition: AppendCondition | None = None,
    ) -> AppendInfo:
        """Append all batches to the page cache, or raise and append none. As `Log.append`. Batches of a transaction
        need the `transaction` and may raise `UnverifiedError`."""
        if self.is_paused:
            raise LeaderNotAvailableError(f"{self.log.path} is being moved to another directory")
        if not is_coordinator and self.replica.topic in INTERNAL_TOPICS:
            raise InvalidTopicError(f"{self.replica.topic} is an internal topic: only coordinators write to it")
        before = self.log.end_offset
        try:
            appended = self.log.append(
                batches,
                leader_epoch=self.leader_epoch,
                is_coordinator=is_coordinator,
                inspected=inspected,
                inline_bytes_max=inline_bytes_max,
                check_transaction=(
                    self._check_plain if transaction is None else partial(self.transactions.check, transaction)
                ),
                condition=condition,
            )
        except StorageError as error:
            self._context.append_failed(self.replica.partition_id, error)
            raise
        if self.log.end_offset > before:
            self.state.appended(self.log.end_offset, now_ms())
            if self.log.config.flush_mode is FlushMode.PAGE_CACHE:
                self.durable()
            for subscription in self.subscriptions.values():
                subscription.stream.mark(subscription)
        return appended

    def append_marker(self, marker: Marker) -> Offset:
        """End or fence the producer's transaction here. It is done when everything below the returned offset is
        replicated. A repeat changes nothing and returns the same; a late marker raises."""
        if self.is_paused:
            raise LeaderNotAvailableError(f"{self.log.path} is being moved to another directory")
        if self.transactions.decide(marker) is MarkerAction.NOTHING:
            return Offset(self.log.producers.newest_offset_of(marker.producer_id) + 1)
        control = encode_control(
            ControlKind.COMMIT if marker.is_commit else ControlKind.ABORT,
            coordinator_epoch=marker.coordinator_epoch,
            timestamp=self.log.clock.now_ms(),
            producer_id=marker.producer_id,
            producer_epoch=marker.epoch,
        )
        return Offset(self.append(control, is_coordinator=True).last_offset + 1)

    async def inspect_records(self, batches: bytes, rules: RecordRules, *, work: Work | None = None) -> bytes:
        """Return batches that `append` accepts with `inspected=rules`. The replica may change or end meanwhile. Raises
        `OverloadedError` if the worker fails. `work` decodes them; None: the work queue of the log does."""
        try:
            changed = await (work or self.log.work).run(inspect_records, batches, rules)
        except WorkFailedError as error:
            raise OverloadedError(f"the batches could not be inspected: {error}") from error
        return batches if changed is None else changed

    def durable(self) -> None:
        """Note the end of a group commit."""
        if self.state.durable(ackable_end(self.log), now_ms()):
            self._advanced()

    def acked(self, subscription: Subscription, durable_end: int) -> None:
        assert not subscription.is_over, "an ended subscription takes no acks"
        subscription.acked(durable_end)
        self._deletes.acked(subscription.follower, durable_end)
        if self.state.acked(subscription.follower, subscription.broker_epoch, Offset(durable_end), now_ms()):
            self._advanced()
        if subscription.follower not in self.state.isr:
            self._events.check_isr(self.replica)

    def metadata_changed(self, partition: Partition, min_isr: int) -> None:
        """Take another ISR, other replicas or settings of the same leader epoch."""
        before = self.state.isr
        if self.state.metadata_changed(partition, min_isr, now_ms()):
            self._advanced()
        self._log_isr(before)
        for subscription in list(self.subscriptions.values()):
            if subscription.follower not in partition.replicas:
                self.drop(subscription, Reason.NOT_LEADER)

    def answered(self, state: PartitionState) -> None:
        """Take the controller's answer to a proposed ISR."""
        before = self.state.isr
        if self.state.answered(state, now_ms()):
            self._advanced()
        self._log_isr(before)

    def failed(self, *, may_be_done: bool) -> None:
        """Note that the controller did not answer a proposal."""
        if self.state.failed(may_be_done=may_be_done):
            self._advanced()

    def _log_isr(self, before: frozenset[int]) -> None:
        self._events.isr_log.changed(self.log.path, self.leader_epoch, before, self.state.isr)

    def _advanced(self) -> None:
        high_watermark = self.state.high_watermark
        self.replica.high_watermark = high_watermark
        self._context.logs.note_high_watermark(self.replica.partition_id, high_watermark)
        self.acks.advance(high_watermark)
        for subscription in self.subscriptions.values():
            subscription.stream.mark_high_watermark(subscription)
        self._context.wakers.wake(self.replica.partition_id)
        if self.replica.is_start_behind():
            self._context.queue.add(self.replica)

    # Followers.

    def read_nowait(self, offset: int, bytes_max: int) -> Slice | None:
        """As `Log.read_nowait`, cached for one turn of the event loop: an append usually goes to all followers in the
        same turn."""
        key = offset, bytes_max, self.log.end_offset
        if self._shared is not None and self._shared[0] == key:
            return self._shared[1]
        read_slice = self.log.read_nowait(offset, bytes_max=bytes_max)
        if len(self.subscriptions) > 1:
            if self._shared is None:
                asyncio.get_running_loop().call_soon(self._forget_shared)
            self._shared = key, read_slice
        return read_slice

    def _forget_shared(self) -> None:
        self._shared = None

    @property
    def first_offset(self) -> Offset:
        """Return where the log of an empty follower begins: at the batch that contains this log's start. Until that
        batch is read, it is assumed to begin at the log start."""
        start = self.log.start_offset
        return self._first[1] if self._first is not None and self._first[0] == start else start

    def note_first_batch(self, base_offset: Offset) -> None:
        """Note that the batch with the log start begins before it: records were deleted up to its middle."""
        self._first = self.log.start_offset, base_offset

    def subscribe(self, subscription: Subscription, durable_end: int) -> None:
        """Push to the follower from now on: its log is a prefix of this one. Its durable end counts as an ack."""
        assert subscription.follower not in self.subscriptions, "the stream drops a former subscription first"
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
        """End the subscription; send the reason to the follower unless it is None."""
        subscription.is_over = True
        if self.subscriptions.get(subscription.follower) is subscription:
            del self.subscriptions[subscription.follower]
            self._deletes.left(subscription.follower, now_ms())
        subscription.stream.forget(subscription)
        if reason is not None:
            subscription.stream.send_later(Ended(number=subscription.number, reason=reason, epoch=epoch, offset=offset))

    # Deletes (`replication.deletes`).

    def must_copy(self, follower: int, request: Subscribe) -> bool:
        """Return whether the follower must copy the log from its start. A replica that may be elected has everything
        that was committed, and never drops its log."""
        if follower in self.state.maximal_isr or follower in self.replica.partition.eligible:
            return False
        return self._deletes.must_copy(
            follower,
            has_records=request.last_epoch != NO_EPOCH,
            next_offset=request.next_offset,
            deletes_end=self.log.lineage.deletes_end,
        )

    def deletes_bound(self) -> Offset:
        """Return the offset from which tombstones and markers are kept."""
        others = [replica for replica in self.replica.partition.replicas if replica != self._context.metadata.me]
        hold_ms = max(self.log.config.delete_retention_ms, self._context.metadata.lag_max_ms())
        return self._deletes.bound(others, log_end=self.log.end_offset, now_ms=now_ms(), hold_ms=hold_ms)

    def announce_deletes(self) -> None:
        """Send followers the new `deletes_end`: they may remove what the cleaner removed here."""
        for subscription in self.subscriptions.values():
            if subscription.sent_deletes_end >= 0:
                subscription.stream.send_history(subscription)

    def validate(self, *, thorough: bool = True) -> None:
        """Assert the invariants while the role lasts."""
        state, log = self.state, self.log
        state.validate()
        assert state.log_end == log.end_offset, f"the leader knows {state.log_end} of a log up to {log.end_offset}"
        assert state.durable_end <= ackable_end(log), f"{state.durable_end} counts, {ackable_end(log)} may be acked"
        assert self.replica.high_watermark == state.high_watermark, "the replica has another high watermark"
        assert log.epochs.latest == self.leader_epoch, (
            f"leads in {self.leader_epoch}, the log is in {log.epochs.latest}"
        )
        self.acks.validate(state.high_watermark, thorough=thorough)
        if thorough:
            self.transactions.validate()
        for follower, subscription in self.subscriptions.items():
            assert subscription.follower == follower, "a subscription of another follower"
            assert subscription.leader is self, "a subscription to another leader epoch"
            subscription.validate()

    def end(self) -> None:
        """End the leader epoch. Waiting producers get an error: the outcome of their records is unknown."""
        replica = self.replica
        for subscription in list(self.subscriptions.values()):
            self.drop(subscription, Reason.NOT_LEADER)
        where = f"{replica.topic}-{replica.partition_id.partition}"
        self.acks.fail(NotLeaderOrFollowerError(f"{where} is not led here any more", leader=replica.partition.leader))
        self.transactions.end()
        self._context.wakers.wake(replica.partition_id)
        for observer in self._events.observers:
            observer.left(self)


def leaders_of(replicas: Iterable[Replica]) -> list[LeaderReplica]:
    return [replica.role for replica in replicas if isinstance(replica.role, LeaderReplica)]
