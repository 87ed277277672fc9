"""A lane: the batches on their way to one partition, in order. Pure.

Each batch is numbered (producer id, epoch, sequence) when it is first sent, and keeps its number until it is answered
for good: the log takes a repeat for what it is. What may fly:

    the lane                                     may be in flight
    new, or after a reset (nothing acked yet)    one batch: a log takes any sequence of a producer that it does not
                                                 know, so nothing may overtake the first
    flowing (the last answer was good)           up to five, in order: so many a log remembers
    recovering (an attempt has failed)           nothing new until all in flight are answered; then the first alone

What becomes of a batch:

    answer                                       what happens
    stored, or DUPLICATE_SEQUENCE_NUMBER         acknowledged
    not retriable                                fails; those behind it meet a gap
    retriable, or no answer at all               again, under its number
    OUT_OF_ORDER, while others were in flight    again: the one before has failed, and was in flight with it
    OUT_OF_ORDER, of a leader that has been      again, under its number: a leader of the past does not know what its
      succeeded (a newer epoch is known)           successors have, so that it says nothing of a gap
    OUT_OF_ORDER, alone                          there is a gap before it: `needs_producer`, unless `learned` tells of
                                                 a newer leader before there is one

With a new producer the lane is numbered from 0. A batch of which an attempt went unanswered is not numbered anew, as
the log could not see that it is the same: it fails, with an error that says so. So nothing is stored twice, nothing
overtakes, and every batch ends in an acknowledgement or an error.

Invariants (`validate`): the numbered batches are a prefix; those in flight are numbered; at most `in_flight_max` fly.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from struct import Struct
from typing import Generic, TypeVar

from tidelog.client.errors import UnknownDeliveryError
from tidelog.log.batch_header import seal
from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.model.ids import PartitionId

SEQUENCES = 1 << 31
IN_FLIGHT_MAX = 5
IDLE_MS_MAX = 600_000
"""After so long without traffic the log may have forgotten the producer: the first batch flies alone again."""
_PRODUCER = Struct(">qhi")
_PRODUCER_POSITION = 43

NEVER_STORED = frozenset(
    {
        ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
        ErrorCode.UNKNOWN_PRODUCER_ID,
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.UNKNOWN_LEADER_EPOCH,
        ErrorCode.THROTTLING_QUOTA_EXCEEDED,
        ErrorCode.MESSAGE_TOO_LARGE,
        ErrorCode.INVALID_RECORD,
        ErrorCode.INVALID_TIMESTAMP,
        ErrorCode.INVALID_REQUEST,
        ErrorCode.INVALID_REQUIRED_ACKS,
        ErrorCode.CORRUPT_MESSAGE,
        ErrorCode.UNSUPPORTED_COMPRESSION_TYPE,
        ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT,
        ErrorCode.POLICY_VIOLATION,
    }
)
"""Refusals that come before a batch is appended. Any other error may come after: leadership lost while it waited."""
_GAP = (ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.UNKNOWN_PRODUCER_ID)

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Producer:
    id: int
    epoch: int


class Batch(Generic[R]):
    """One record batch on its way. `result` is its owner's, and not looked at here."""

    __slots__ = (
        "count",
        "data",
        "deadline_ms",
        "is_flying",
        "is_over",
        "is_unknown",
        "last_error",
        "leader_epoch",
        "numbered",
        "result",
        "was_sent",
    )

    def __init__(self, data: bytes | bytearray, *, count: int, deadline_ms: int, result: R) -> None:
        assert count > 0, "a batch has records"
        self.data = data
        self.count = count
        self.deadline_ms = deadline_ms
        self.result = result
        self.numbered: bytearray | None = None
        self.was_sent = False
        self.is_flying = False
        self.is_unknown = False
        """An attempt went unanswered, or was answered by an error that may come after the batch was stored."""
        self.is_over = False
        """Its owner was told how it ended; it stays in the lane only while it flies."""
        self.last_error: TidelogError | None = None
        self.leader_epoch = -1
        """Of the leader that it was last sent to; its owner sets it."""


@dataclass(frozen=True, slots=True)
class Failed(Generic[R]):
    batch: Batch[R]
    error: TidelogError


def number(data: bytes | bytearray, producer: Producer, sequence: int) -> bytearray:
    """The batch with producer and sequence, under a fresh CRC. What was numbered before may be in use: it is left."""
    made = bytearray(data)
    _PRODUCER.pack_into(made, _PRODUCER_POSITION, producer.id, producer.epoch, sequence)
    seal(made, size=len(made))
    return made


class Lane(Generic[R]):
    """See the module. Times are milliseconds of one clock that only goes forward."""

    def __init__(self, topic: str, partition: PartitionId, *, in_flight_max: int = IN_FLIGHT_MAX) -> None:
        assert 1 <= in_flight_max <= IN_FLIGHT_MAX, "a log remembers five batches of a producer"
        self.topic = topic
        self.partition = partition
        self.batches: deque[Batch[R]] = deque()
        self.producer: Producer | None = None
        self.flying = 0
        self.resets = 0
        self._in_flight_max = in_flight_max
        self._next_sequence = 0
        self._is_flowing = False
        self._has_gap = False
        self._gap_epoch = -1
        """The leader epoch of whoever spoke of the gap."""
        self._active_ms = 0

    @property
    def needs_producer(self) -> bool:
        """Give it one by `start`."""
        return bool(self.batches) and self.flying == 0 and (self.producer is None or self._has_gap)

    def start(self, producer: Producer) -> list[Failed[R]]:
        """A producer of its own, or the first; what cannot be numbered anew has failed."""
        assert self.flying == 0, "no number changes in flight"
        failed = []
        for batch in list(self.batches):
            if batch.numbered is None:
                continue
            batch.numbered = None
            if batch.is_unknown:
                self._end(batch)
                reason = f"; its last answer: {batch.last_error}" if batch.last_error is not None else ""
                error = UnknownDeliveryError(
                    f"{self.topic}-{self.partition.partition}: {batch.count} records may be stored or not, and cannot "
                    f"be sent again without the danger of storing them twice{reason}"
                )
                failed.append(Failed(batch, error))
        self.resets += self.producer is not None
        self.producer = producer
        self._next_sequence = 0
        self._is_flowing = self._has_gap = False
        return failed

    def add(self, batch: Batch[R]) -> None:
        self.batches.append(batch)

    def next_batch(self, now_ms: int) -> Batch[R] | None:
        """The batch to send now; `took_off` when it is sent."""
        if self.producer is None or self._has_gap or self.flying >= self._in_flight_max:
            return None
        if self.flying and not self._is_flowing:
            return None
        if not self.flying and now_ms - self._active_ms > IDLE_MS_MAX:
            self._is_flowing = False
        for batch in self.batches:
            if not batch.is_flying:
                return batch
        return None

    def next_size(self) -> int:
        """Bytes of the first batch that does not fly; 0 if there is none."""
        return next((len(batch.data) for batch in self.batches if not batch.is_flying), 0)

    def took_off(self, batch: Batch[R], now_ms: int) -> bytearray:
        """It is being sent; what to send."""
        assert self.producer is not None
        assert not batch.is_flying, "it flies once at a time"
        if batch.numbered is None:
            batch.numbered = batch.data = number(batch.data, self.producer, self._next_sequence)
            self._next_sequence = (self._next_sequence + batch.count) % SEQUENCES
        batch.is_flying = batch.was_sent = True
        self.flying += 1
        self._active_ms = now_ms
        return batch.numbered

    def stored(self, batch: Batch[R], now_ms: int) -> bool:
        """The log has it; whether its owner is still to be told."""
        self._landed(batch)
        was_open = not batch.is_over
        # An answer that overtook a failure says nothing: what failed before it is sent alone first.
        self._is_flowing = self._is_flowing or (self.flying == 0 and self.batches[0] is batch)
        self._end(batch)
        self._active_ms = now_ms
        return was_open

    def refused(
        self, batch: Batch[R], error: TidelogError, *, answered_epoch: int = -1, known_epoch: int = -1
    ) -> Failed[R] | None:
        """An answer with an error; what its owner has to be told, if it is over. The epochs are those of the leader
        that answered, and of the newest that is known."""
        was_alone = self.flying == 1 and self.batches[0] is batch
        self._landed(batch)
        self._is_flowing = False
        if error.code not in NEVER_STORED:
            batch.is_unknown = True
        batch.last_error = error
        if batch.is_over:
            self._end(batch)
            return None
        if error.code in _GAP:
            if was_alone and known_epoch <= answered_epoch:
                self._has_gap, self._gap_epoch = True, answered_epoch
            return None
        if error.retriable:
            return None
        self._end(batch)
        return Failed(batch, error)

    def learned(self, known_epoch: int) -> None:
        """The newest leader epoch that is known: if it is newer than who spoke of a gap, nothing is known of one."""
        if known_epoch > self._gap_epoch:
            self._has_gap = False

    def lost(self, batch: Batch[R], error: TidelogError, *, was_carried: bool) -> None:
        """No answer will come. `was_carried`: it may have arrived."""
        self._landed(batch)
        self._is_flowing = False
        batch.is_unknown = batch.is_unknown or was_carried
        batch.last_error = error
        if batch.is_over:
            self._end(batch)

    def expire(self, now_ms: int) -> list[Batch[R]]:
        """Batches whose time is up; their owners are to be told."""
        over = [batch for batch in self.batches if not batch.is_over and batch.deadline_ms <= now_ms]
        for batch in over:
            self._give_up(batch)
        return over

    def abandon(self) -> list[Batch[R]]:
        """All of them: the topic is gone, or the writer is closed."""
        over = [batch for batch in self.batches if not batch.is_over]
        for batch in over:
            self._give_up(batch)
        return over

    def ground(self) -> list[Batch[R]]:
        """Those that do not fly: nothing more is sent."""
        over = [batch for batch in self.batches if not batch.is_flying and not batch.is_over]
        for batch in over:
            self._end(batch)
        return over

    def _give_up(self, batch: Batch[R]) -> None:
        batch.is_over = True
        if not batch.is_flying:
            self._end(batch)

    def _landed(self, batch: Batch[R]) -> None:
        assert batch.is_flying, "an answer belongs to what flies"
        batch.is_flying = False
        self.flying -= 1

    def _end(self, batch: Batch[R]) -> None:
        batch.is_over = True
        self.batches.remove(batch)

    def validate(self) -> None:
        assert self.flying == sum(batch.is_flying for batch in self.batches) <= self._in_flight_max, "what flies"
        numbered = [batch.numbered is not None for batch in self.batches]
        assert numbered == sorted(numbered, reverse=True), "the numbered are a prefix"
        assert all(batch.numbered is not None for batch in self.batches if batch.is_flying), "what flies has a number"
        assert all(batch.is_flying for batch in self.batches if batch.is_over), "who is over stays only while it flies"
