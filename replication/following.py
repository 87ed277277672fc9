"""A partition that this broker follows: its log, the pure state (`partition.FollowerState`), and its subscription.

    idle --may subscribe--> subscribed --Ended(diverged, too far behind, gaps)--> to be mended --log changed--> idle
                            subscribed --stream breaks, Ended(unreadable, not leader)--> idle, again after a moment

While it is subscribed nothing but pushes changes the end of its log, and what comes under an older number is thrown
away. Changes of the log that take time (`mend`) are done by the one who settles replicas (`settling`), never while
subscribed. The ack of a piece is sent when the group commit that covers it has ended, all acks of a group in one frame.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tidelog.log.config import FlushMode
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
from tidelog.replication.messages import Ack, Ended, Push, Reason, Subscribe
from tidelog.replication.partition import FollowerState

if TYPE_CHECKING:
    from tidelog.replication.follower_stream import FollowerStream
    from tidelog.replication.replica import Replica
    from tidelog.replication.replicas import Replicas

LOGGER = logging.getLogger(__name__)

NO_NUMBER = -1


class Following:
    """See the module. One leader epoch."""

    __slots__ = ("_host", "is_accepted", "is_over", "log", "number", "replica", "state", "stream", "unsound")

    def __init__(self, host: Replicas, replica: Replica, log: Log, state: FollowerState) -> None:
        self._host = host
        self.replica = replica
        self.log = log
        self.state = state
        self.stream: FollowerStream | None = None
        self.number = NO_NUMBER
        """Of the subscription; -1 while there is none."""
        self.unsound: Ended | None = None
        """What the leader said that the log must be brought to before the next subscription."""
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

    def pushed(self, push: Push) -> None:
        """Batches that go on where this log ends, and the leader's high watermark."""
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
            except DiskFullError as error:
                LOGGER.error("log=%s is not written to: %s", self.log.path, error)
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
                try:
                    await log.truncate(end)
                except (CorruptBatchError, UnsupportedMagicError) as error:
                    # Rot in front of the cut hides where it lies. What is sound is found out when it is repaired.
                    LOGGER.error("log=%s cannot be cut at %d: %s", log.path, end, error)
                    self._host.found_rot(self.replica, end)
                    return
            case Reason.TOO_FAR_BEHIND:
                LOGGER.warning("log=%s begins anew at %d, it ended at %d", log.path, ended.offset, log.end_offset)
                await log.reset_to(ended.offset)
            case Reason.NEEDS_GAPS:
                await log.allow_gaps()
        self.state.truncated(log.end_offset, safe_end(log), log_start=log.start_offset)
        self._note()
        self.unsound = None
