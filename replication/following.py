"""A partition that this broker follows: its log, the pure state (`partition.FollowerState`), and its subscription.

    idle --may subscribe--> subscribed --Ended(diverged, too far behind, gaps)--> to be mended --log changed--> idle
                            subscribed --History that is not stored yet--> to be stored --stored--> idle
                            subscribed --stream breaks, Ended(unreadable, not leader)--> idle, again after a moment

While it is subscribed nothing but pushes changes the end of its log, and what comes under an older number is thrown
away. Changes of the log that take time (`mend`) are done by the one who settles replicas (`settling`), never while
subscribed. The ack of a piece is sent when the group commit that covers it has ended, all acks of a group in one frame.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tidelog.log import lineage
from tidelog.log.config import FlushMode
from tidelog.log.keeping import misses_segments
from tidelog.log.lineage import Lineage
from tidelog.log.log import Log
from tidelog.model.errors import (
    CorruptBatchError,
    DamagedLogError,
    DiskFullError,
    InvalidRecordError,
    StorageError,
    UnsupportedMagicError,
)
from tidelog.model.ids import Epoch, Offset
from tidelog.replication.divergence import Truncate, asks, cut
from tidelog.replication.leading import safe_end
from tidelog.replication.messages import NO_PUSH_OFFSET, Ack, Ended, History, Push, Reason, Subscribe
from tidelog.replication.partition import FollowerState

if TYPE_CHECKING:
    from tidelog.replication.follower_stream import FollowerStream
    from tidelog.replication.replica import Replica
    from tidelog.replication.replicas import Replicas

LOGGER = logging.getLogger(__name__)

NO_NUMBER = -1


class Following:
    """See the module. One leader epoch."""

    __slots__ = (
        "_deletes_end",
        "_host",
        "_informed_number",
        "is_accepted",
        "is_over",
        "log",
        "number",
        "replica",
        "state",
        "stream",
        "unsound",
    )

    def __init__(self, host: Replicas, replica: Replica, log: Log, state: FollowerState) -> None:
        self._host = host
        self.replica = replica
        self.log = log
        self.state = state
        self.stream: FollowerStream | None = None
        self.number = NO_NUMBER
        """Of the subscription; -1 while there is none."""
        self.unsound: Ended | Lineage | None = None
        """What the leader said that the log must be brought to, or must store, before the next subscription."""
        self._informed_number = NO_NUMBER
        """The subscription for which the log has stored the leader's history."""
        self._deletes_end = lineage.NOTHING_DELETED
        """The leader has removed deletes below this."""
        self.is_accepted = False
        """Whether the leader has pushed under this number: then our log is a prefix of its own."""
        self.is_over = False

    @property
    def is_connected(self) -> bool:
        """Whether there is a stream to the leader."""
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

    # Subscribing.

    def subscribe(self, number: int, broker_epoch: int) -> Subscribe:
        """What to tell the leader. Everything under a former number is void from here on."""
        assert self.unsound is None, "the log is to be mended first"
        self.number = number
        self.is_accepted = False
        self.state.subscribed(number)
        log = self.log
        last_epoch, next_offset = asks(log.epochs, log_start=log.start_offset, log_end=log.end_offset)
        return Subscribe(
            partition=self.replica.partition_id,
            number=number,
            leader_epoch=self.leader_epoch,
            broker_epoch=broker_epoch,
            next_offset=next_offset,
            last_epoch=last_epoch,
            durable_end=safe_end(log),
            takes_gaps=log.gaps,
            takes_history=True,
        )

    def broken(self) -> None:
        """The stream is gone, and the subscription with it."""
        self.number = NO_NUMBER

    def end(self) -> None:
        self.is_over = True
        self.leave()
        self._host.wakers.wake(self.replica.partition_id)

    def leave(self) -> None:
        """No subscription any more."""
        if self.stream is not None:
            self.stream.remove(self)
        self.number = NO_NUMBER

    # What comes.

    def informed(self, history: History) -> None:
        """What the batches of the leader's log do not tell. It is stored before any of them is taken; when it comes
        again, under the same number, it only says that more deletes are gone, all of which this log has."""
        self._deletes_end = max(self._deletes_end, Offset(history.deletes_end))
        leader = Lineage(Offset(history.deletes_end), self.leader_epoch, history.entries)
        if self._informed_number == self.number or self.log.lineage.covers(leader, log_end=self.log.end_offset):
            self._informed_number = self.number
            return
        self.leave()
        self.unsound = leader
        self._host.unsettle(self.replica)

    def deletes_bound(self) -> Offset:
        """Tombstones and markers at or past this are not compacted away: the leader has them, too."""
        return max(self.log.lineage.deletes_end, min(self._deletes_end, self.log.end_offset))

    def pushed(self, push: Push) -> None:
        """Batches that go on where this log ends, and the leader's high watermark."""
        if push.batches and push.offset not in (NO_PUSH_OFFSET, self.log.end_offset):
            wrong = f"batches that follow offset {push.offset}, the log ends at {self.log.end_offset}"
            LOGGER.error("log=%s leader=%d sent %s", self.log.path, self.leader, wrong)
            self._again_later()
            return
        if push.batches:
            try:
                self.log.append_replicated(push.batches)
            except (InvalidRecordError, CorruptBatchError) as error:
                # What follows would not fit either. The next subscription says where this log really ends.
                LOGGER.error("log=%s leader=%d sent what does not fit: %s", self.log.path, self.leader, error)
                self._again_later()
                return
            except DamagedLogError as error:
                LOGGER.error("log=%s is not written to: %s", self.log.path, error)
                self.leave()
                self._host.found_damage(self.replica)
                return
            except DiskFullError:
                self._host.upkeep.full_directories.append_refused(self.replica.partition_id)
                self._again_later()
                return
            except StorageError as error:
                LOGGER.error("log=%s is not written to: %s", self.log.path, error)
                self._again_later()
                self._host.write_failed(self.replica, error)
                return
        has_advanced = self.state.pushed(Offset(push.high_watermark), self.log.end_offset)
        if not self.is_accepted:
            self.is_accepted = True
            if self.stream is not None:
                # A sync may have ended, unheard, while the leader had not decided yet.
                self.stream.acknowledge(self)
        if has_advanced:
            self._advanced()
        if push.batches and self.log.config.flush_mode is FlushMode.PAGE_CACHE:
            self.durable()

    def durable(self) -> None:
        """A group commit has ended."""
        if self.unsound is not None:
            return  # the log is being changed; what is durable afterwards is told then
        has_advanced = self.state.durable(safe_end(self.log))
        if self.stream is not None and self.number != NO_NUMBER:
            self.stream.acknowledge(self)
        if has_advanced:
            self._advanced()

    def _advanced(self) -> None:
        self._note()
        self._host.look_at_start(self.replica)

    def _note(self) -> None:
        self.replica.high_watermark = self.state.high_watermark
        self._host.logs.note_high_watermark(self.replica.partition_id, self.state.high_watermark)
        self._host.wakers.wake(self.replica.partition_id)

    def ack(self) -> Ack:
        return Ack(self.number, self.leader_epoch, safe_end(self.log))

    def ended(self, ended: Ended) -> None:
        """The leader has ended the subscription."""
        self.leave()
        match ended.reason:
            case Reason.NOT_LEADER | Reason.UNREADABLE:
                self._again_later()
            case _:
                self.unsound = ended
                self._host.unsettle(self.replica)

    def _again_later(self) -> None:
        self.leave()
        self._host.unsettle_later(self.replica)

    # Mending.

    async def mend(self) -> None:
        """Bring the log to where the leader said. Nobody else touches it meanwhile."""
        ended, log = self.unsound, self.log
        assert ended is not None, "nothing to mend"
        assert self.number == NO_NUMBER, "a subscribed log is not changed"
        if isinstance(ended, Lineage):
            await lineage.take_over(log, ended)
            self.unsound = None
            return
        match ended.reason:
            case Reason.DIVERGED:
                answer = Truncate(Epoch(ended.epoch), Offset(ended.offset))
                end = cut(log.epochs, answer, log_start=log.start_offset, log_end=log.end_offset)
                LOGGER.warning(
                    "log=%s is cut from %d to %d: leader=%d has epoch %d to %d",
                    log.path,
                    log.end_offset,
                    end,
                    self.leader,
                    ended.epoch,
                    ended.offset,
                )
                has_moved = await self._keep(end, committed_end=self.replica.high_watermark)
                try:
                    with _damaged_unless_cut(log, end, has_moved=has_moved):
                        await log.truncate(end)
                except (CorruptBatchError, UnsupportedMagicError) as error:
                    # Rot in front of the cut hides where it lies. What is sound is found out when it is repaired.
                    LOGGER.error("log=%s cannot be cut at %d: %s", log.path, end, error)
                    self._host.found_rot(self.replica, end)
                    return
            case Reason.TOO_FAR_BEHIND:
                LOGGER.warning("log=%s begins anew at %d, it ended at %d", log.path, ended.offset, log.end_offset)
                has_moved = await self._keep_all(ended.offset)
                with _damaged_unless_cut(log, log.start_offset, has_moved=has_moved):
                    await log.reset_to(ended.offset)
            case Reason.NEEDS_GAPS:
                await log.allow_gaps()
        self.state.truncated(log.end_offset, safe_end(log), log_start=log.start_offset)
        self._note()
        self.unsound = None

    async def _keep_all(self, leader_start: int) -> bool:
        """Before the log is reset: where its leader still has records that this log has, the log is copied from the
        start, and is the only other copy of them if the leader is lost meanwhile. Otherwise the leader has deleted
        them. A copy that was broken off is not kept: it has less than the log that was kept when it began. Whether
        segments were moved away."""
        log, partition_id = self.log, self.replica.partition_id
        leader = f"leader {self.leader} of epoch {self.leader_epoch}"
        if log.epochs.latest < self.replica.partition.unclean_epoch:
            first, reason = log.start_offset, f"{leader} does not have them"
        elif leader_start < log.end_offset and not self._is_broken_off():
            first, reason = (
                Offset(max(leader_start, log.start_offset)),
                f"{leader} has this replica copied from the start",
            )
        else:
            return False
        return await self._host.logs.keep_tail(partition_id, first, reason, is_reset=True)

    def _is_broken_off(self) -> bool:
        """Whether the log is an incomplete copy: what was deleted in it lies past its end (`log.lineage`)."""
        is_complete = self.log.end_offset >= self.log.lineage.deletes_end
        return not is_complete and self.replica.partition_id in self._host.logs.kept.copies

    async def _keep(self, offset: int, *, committed_end: int) -> bool:
        """Before the log is cut at `offset`: what may have been committed may be the last copy, if this leader or one
        before it was elected uncleanly. After a clean election the leader has everything that was committed. Whether
        segments were moved away."""
        is_unclean = self.log.epochs.latest < self.replica.partition.unclean_epoch
        if not is_unclean and offset >= committed_end:
            return False
        reason = f"leader {self.leader} of epoch {self.leader_epoch} does not have them"
        return await self._host.logs.keep_tail(self.replica.partition_id, offset, reason)


@contextmanager
def _damaged_unless_cut(log: Log, end: int, *, has_moved: bool) -> Iterator[None]:
    """A log whose segments were moved away, and which is not cut, must not follow another leader as if it had them."""
    generation = log.durability.generation
    try:
        yield
    except BaseException:
        if has_moved and log.durability.generation == generation:
            misses_segments(log, end)
        raise
