"""A follower replica: its log, the pure state (`partition.FollowerState`) and its subscription to the leader.

    idle --subscribe--> subscribed --Ended(diverged, too far behind, gaps)--> `required_change` --applied--> idle
                        subscribed --History that is not stored yet--> `lineage_to_store` --stored--> idle
                        subscribed --stream breaks, Ended(unreadable, not leader)--> idle, retried after a delay

While it is subscribed only pushes change its log end; messages of an older subscription number are dropped. The
reconciler makes slow changes of the log (`change_log`), never while subscribed. The follower acks a push when the group
commit that covers it has ended; all acks of one group commit share a frame.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from tidelog.log import lineage
from tidelog.log.config import FlushMode
from tidelog.log.lineage import Lineage
from tidelog.log.log import Log
from tidelog.model.errors import (
    CorruptBatchError,
    DamagedLogError,
    DiskFullError,
    InvalidRecordError,
    RecordTooLargeError,
    StorageError,
    UnsupportedCompressionError,
    UnsupportedMagicError,
)
from tidelog.model.ids import NO_OFFSET, Epoch, Offset
from tidelog.replication.broker_context import BrokerContext
from tidelog.replication.divergence import Truncate, epoch_query, truncation_point
from tidelog.replication.messages import NO_PUSH_OFFSET, Ack, Ended, History, Push, Reason, Subscribe
from tidelog.replication.partition import FollowerState
from tidelog.replication.replica import Replica, ackable_end

LOGGER = logging.getLogger(__name__)

NO_NUMBER = -1
_UNACCEPTABLE = (
    CorruptBatchError,
    InvalidRecordError,
    RecordTooLargeError,
    UnsupportedCompressionError,
    UnsupportedMagicError,
)
"""Errors of batches that this log does not append."""


class LeaderConnection(Protocol):
    """The stream to the leader broker on one channel (`follower_stream.FollowerStream`)."""

    service: str
    is_open: bool

    def add(self, follower: FollowerReplica) -> None: ...

    def remove(self, follower: FollowerReplica) -> None: ...

    def acknowledge(self, follower: FollowerReplica) -> None: ...


class FollowerReplica:
    """See the module. Serves one leader epoch.

    Invariants (`validate`): a subscribed replica has a stream and no change of its log due, and knows where its log
    ends; it counts no more as durable than may be acked; its log has no newer epoch than this one.
    """

    __slots__ = (
        "_context",
        "_deletes_end",
        "_informed_number",
        "acked_end",
        "is_accepted",
        "is_over",
        "lineage_to_store",
        "log",
        "number",
        "replica",
        "required_change",
        "state",
        "stream",
    )

    def __init__(self, context: BrokerContext, replica: Replica, log: Log, state: FollowerState) -> None:
        self._context = context
        self.replica = replica
        self.log = log
        self.state = state
        self.stream: LeaderConnection | None = None
        self.number = NO_NUMBER
        """Number of the subscription; -1 without one."""
        self.required_change: Ended | None = None
        """The truncation, reset or gaps that the leader requires before the next subscription."""
        self.lineage_to_store: Lineage | None = None
        """The leader's lineage, which the log stores before the next subscription."""
        self._informed_number = NO_NUMBER
        """Number of the subscription whose history the log has stored."""
        self._deletes_end = lineage.NOTHING_DELETED
        """Below this offset the leader's log may lack tombstones and markers."""
        self.acked_end = NO_OFFSET
        """What the last ack under this number said; -1 before the first."""
        self.is_accepted = False
        """Whether the leader has pushed under this number: then this log is a prefix of the leader's."""
        self.is_over = False

    @property
    def is_connected(self) -> bool:
        """Return whether the stream to the leader is open."""
        return self.stream is not None and self.stream.is_open

    @property
    def leader(self) -> int:
        return self.state.leader

    @property
    def leader_epoch(self) -> int:
        return self.state.leader_epoch

    @property
    def high_watermark(self) -> Offset:
        return self.state.high_watermark

    @property
    def must_change_log(self) -> bool:
        """Return whether `change_log` is due before the next subscription."""
        return self.required_change is not None or self.lineage_to_store is not None

    # Subscribing.

    def join(self, stream: LeaderConnection) -> None:
        """Follow on this stream, which subscribes whenever it is open."""
        self.stream = stream
        stream.add(self)

    def subscribe(self, number: int, broker_epoch: int) -> Subscribe:
        """Return the request for a new subscription. Messages under a former number are void from now on."""
        assert not self.must_change_log, "a log that must change does not subscribe"
        self.number = number
        self.acked_end = NO_OFFSET
        self.is_accepted = False
        self.state.subscribed(number)
        log = self.log
        last_epoch, next_offset = epoch_query(log.epochs, log_start=log.start_offset, log_end=log.end_offset)
        return Subscribe(
            partition=self.replica.partition_id,
            number=number,
            leader_epoch=self.leader_epoch,
            broker_epoch=broker_epoch,
            next_offset=next_offset,
            last_epoch=last_epoch,
            durable_end=ackable_end(log),
            takes_gaps=log.gaps,
            takes_history=True,
        )

    def broken(self) -> None:
        """Note that the stream broke, and the subscription with it."""
        self.number = NO_NUMBER

    def validate(self, *, thorough: bool = True) -> None:
        """Assert the invariants while the role lasts and its log does not change."""
        state, log = self.state, self.log
        state.validate()
        assert log.epochs.latest <= self.leader_epoch, f"follows in {self.leader_epoch}, has {log.epochs.latest}"
        if self.number != NO_NUMBER:
            assert self.stream is not None, "a subscription without a stream"
            assert not self.must_change_log, "subscribed, and the log must change"
            assert state.subscription == self.number, "another subscription counts"
        if self.must_change_log:
            return
        assert state.durable_end <= ackable_end(log), f"{state.durable_end} counts, {ackable_end(log)} may be acked"
        assert not self.is_accepted or state.known_end == log.end_offset, (
            f"the follower knows {state.known_end} of a log up to {log.end_offset}"
        )

    def end(self) -> None:
        self.is_over = True
        self.leave()
        self._context.wakers.wake(self.replica.partition_id)

    def leave(self) -> None:
        """End the subscription."""
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.remove(self)
        self.number = NO_NUMBER

    # Messages of the leader.

    def informed(self, history: History) -> None:
        """Take the leader's epoch history, which its compacted batches do not show. The log stores it before it appends
        any of them. Under the same number a further history only raises `deletes_end`: this log has those deletes."""
        self._deletes_end = max(self._deletes_end, Offset(history.deletes_end))
        leader = Lineage(Offset(history.deletes_end), self.leader_epoch, history.entries)
        if self._informed_number == self.number or self.log.lineage.covers(leader, log_end=self.log.end_offset):
            self._informed_number = self.number
            return
        self.leave()
        self.lineage_to_store = leader
        self._context.queue.add(self.replica)

    def deletes_bound(self) -> Offset:
        """Return the offset from which tombstones and markers are kept: the leader still has them."""
        return max(self.log.lineage.deletes_end, min(self._deletes_end, self.log.end_offset))

    def pushed(self, push: Push) -> None:
        """Append batches at the log end, and take the leader's high watermark."""
        if push.batches and push.offset not in (NO_PUSH_OFFSET, self.log.end_offset):
            wrong = f"batches for offset {push.offset}, but the log ends at {self.log.end_offset}"
            LOGGER.error("log=%s leader=%d sent %s", self.log.path, self.leader, wrong)
            self._resubscribe_later()
            return
        if push.batches:
            try:
                self.log.append_replicated(push.batches)
            except _UNACCEPTABLE as error:
                # Later batches would not fit either. The next subscription names the actual log end. Other partitions
                # of the stream go on, also if the leader is of a version that knows more.
                LOGGER.error("log=%s leader=%d sent invalid batches: %s", self.log.path, self.leader, error)
                self._resubscribe_later()
                return
            except DamagedLogError as error:
                LOGGER.error("log=%s append failed: %s", self.log.path, error)
                self.leave()
                self._context.queue.report_damage(self.replica)
                return
            except StorageError as error:
                if not isinstance(error, DiskFullError):
                    LOGGER.error("log=%s append failed: %s", self.log.path, error)
                self._context.append_failed(self.replica.partition_id, error)
                self._resubscribe_later()
                return
        has_advanced = self.state.pushed(Offset(push.high_watermark), self.log.end_offset)
        if not self.is_accepted:
            self.is_accepted = True
            if self.stream is not None:
                # A sync may have ended without an ack, before the leader accepted the subscription.
                self.stream.acknowledge(self)
        if has_advanced:
            self._advanced()
        if push.batches and self.log.config.flush_mode is FlushMode.PAGE_CACHE:
            self.durable()

    def durable(self) -> None:
        """Note the end of a group commit."""
        if self.must_change_log:
            return  # the log is being changed; its durable end is reported afterwards
        has_advanced = self.state.durable(ackable_end(self.log))
        if self.stream is not None and self.number != NO_NUMBER:
            self.stream.acknowledge(self)
        if has_advanced:
            self._advanced()

    def _advanced(self) -> None:
        self._note()
        if self.replica.is_start_behind():
            self._context.queue.add(self.replica)

    def _note(self) -> None:
        self.replica.high_watermark = self.state.high_watermark
        self._context.logs.note_high_watermark(self.replica.partition_id, self.state.high_watermark)
        self._context.wakers.wake(self.replica.partition_id)

    def ack(self) -> Ack:
        self.acked_end = ackable_end(self.log)
        return Ack(self.number, self.leader_epoch, self.acked_end)

    def ended(self, ended: Ended) -> None:
        """Handle the end of the subscription by the leader."""
        self.leave()
        match ended.reason:
            case Reason.NOT_LEADER | Reason.UNREADABLE:
                self._resubscribe_later()
            case _:
                self.required_change = ended
                self._context.queue.add(self.replica)

    def _resubscribe_later(self) -> None:
        self.leave()
        self._context.queue.add_later(self.replica)

    # Changes of the log.

    async def change_log(self) -> None:
        """Store the leader's lineage, or make the required change. The caller has exclusive use of the log."""
        ended, log = self.required_change, self.log
        assert self.number == NO_NUMBER, "the log of a subscribed replica does not change"
        if self.lineage_to_store is not None:
            await log.take_over_lineage(self.lineage_to_store)
            self.lineage_to_store = None
            self.durable()  # syncs that ended meanwhile
            return
        assert ended is not None, "the leader requires a change"
        match ended.reason:
            case Reason.DIVERGED:
                answer = Truncate(Epoch(ended.epoch), Offset(ended.offset))
                end = truncation_point(log.epochs, answer, log_start=log.start_offset, log_end=log.end_offset)
                LOGGER.warning(
                    "log=%s is truncated from %d to %d: leader=%d has epoch %d up to %d",
                    log.path,
                    log.end_offset,
                    end,
                    self.leader,
                    ended.epoch,
                    ended.offset,
                )
                has_moved = await self._keep(end, committed_end=self.replica.high_watermark)
                try:
                    with _damaged_unless_truncated(log, end, has_moved=has_moved):
                        await log.truncate(end)
                except (CorruptBatchError, UnsupportedMagicError) as error:
                    # Corruption below `end` hides its position. The repair finds the sound part.
                    LOGGER.error("log=%s cannot be truncated at %d: %s", log.path, end, error)
                    self._context.queue.report_corruption(self.replica, end)
                    return
            case Reason.TOO_FAR_BEHIND:
                LOGGER.warning("log=%s is reset to %d, it ended at %d", log.path, ended.offset, log.end_offset)
                has_moved = await self._keep_all(ended.offset)
                with _damaged_unless_truncated(log, log.start_offset, has_moved=has_moved):
                    await log.reset_to(ended.offset)
            case Reason.NEEDS_GAPS:
                await log.allow_gaps()
        self.state.truncated(log.end_offset, ackable_end(log), log_start=log.start_offset)
        self._note()
        self.required_change = None

    async def _keep_all(self, leader_start: int) -> bool:
        """Keep the segments before a reset; return whether any were moved.

        If the leader still has records of this log, the follower copies them again from the start, and this log is the
        only other copy until then. Otherwise the leader has deleted them. An interrupted copy is not kept: it has less
        than the log that was kept when it began."""
        log, partition_id = self.log, self.replica.partition_id
        leader = f"leader {self.leader} of epoch {self.leader_epoch}"
        if log.epochs.latest < self.replica.partition.unclean_epoch:
            first, reason = log.start_offset, f"{leader} does not have them"
        elif leader_start < log.end_offset and not self._is_partial_copy():
            first, reason = (
                Offset(max(leader_start, log.start_offset)),
                f"{leader} makes this replica copy the log from its start",
            )
        else:
            return False
        return await self._context.logs.keep_tail(partition_id, first, reason, is_reset=True)

    def _is_partial_copy(self) -> bool:
        """Return whether the log is an interrupted copy: its `deletes_end` is past its end (`log.lineage`)."""
        is_complete = self.log.end_offset >= self.log.lineage.deletes_end
        return not is_complete and self.replica.partition_id in self._context.logs.kept.copies

    async def _keep(self, offset: int, *, committed_end: int) -> bool:
        """Keep the tail before a truncation at `offset`; return whether segments were moved.

        After an unclean election the tail may be the last copy of committed records. After a clean election the leader
        has everything that was committed."""
        is_unclean = self.log.epochs.latest < self.replica.partition.unclean_epoch
        if not is_unclean and offset >= committed_end:
            return False
        reason = f"leader {self.leader} of epoch {self.leader_epoch} does not have them"
        return await self._context.logs.keep_tail(self.replica.partition_id, offset, reason)


@contextmanager
def _damaged_unless_truncated(log: Log, end: int, *, has_moved: bool) -> Iterator[None]:
    """Mark the log as missing records if its segments were moved and the truncation failed: it must not follow another
    leader as if it had them."""
    generation = log.durability.generation
    try:
        yield
    except BaseException:
        if has_moved and log.durability.generation == generation:
            log.mark_missing(end)
        raise
