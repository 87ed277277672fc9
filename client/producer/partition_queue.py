"""The queue of one partition: its batches from sealing to the delivery report, in order. Pure.

A batch (`fast_path.ProducerBatch`) is in one queue from its first record on, and nothing of it is copied on the way:

    state       where it is                                    bytes
    open        `TopicBuffers.open[partition]`; takes records  `limit` reserved of `buffer_memory`
    sealed      `batches`, not in flight                       its size
    in flight   `batches`, with producer id, epoch, sequence   its size
    ended       `unreported`, while an earlier one has not     its size, until its callbacks have run
    done        nowhere; its Delivery has the outcome          none

`deadline_s` (`delivery_timeout_ms` after the first record) ends a batch in every state.

Sequence numbers. A batch gets producer id, epoch and sequence when it is first sent. They are written into its header,
and then its CRC is computed, once. It keeps them until it has ended: a log recognizes a repeated batch by them.

    queue                                          batches that may be in flight
    new, or after a reset (nothing acked yet)      one: a log takes any sequence of a producer that it does not know,
                                                   so nothing may overtake the first
    flowing (the last response was a success)      up to five, in order: a log remembers that many
    recovering (an attempt has failed)             none until all in flight are answered; then the first alone

Responses:

    response                                       transition
    stored, or DUPLICATE_SEQUENCE_NUMBER           ended, stored
    not retriable                                  ended, failed; those behind it meet a gap
    its condition is not met                       the same; if none is numbered behind it, the next gets its sequence
    retriable, or connection lost                  sealed; sent again with the same sequence
    OUT_OF_ORDER, with others in flight            sealed: the one before it failed while both were in flight
    OUT_OF_ORDER, from a leader of an old epoch    sealed: an old leader does not know what its successors have
    OUT_OF_ORDER, alone in flight                  a gap: `needs_producer`, unless `learn_epoch` reports a newer leader

A transaction has its own epoch, and a transactional producer gets no new id in the middle of one: a gap fails the
transaction (`sender`). With the next transaction each queue begins again as a new one (`restart`).

A new producer id starts at sequence 0. A batch that may be stored (an attempt went unanswered) cannot get new numbers,
as the log could not recognize it: it fails with DeliveryOutcomeUnknownError. So nothing is stored twice or out of
order, and every batch ends.

Invariants (`validate`): batches with a sequence are a prefix; batches in flight have one; at most `in_flight_max` are
in flight; a batch with an outcome stays in `batches` only while it is in flight.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from struct import Struct
from typing import Any, Generic, Protocol, TypeVar

from tidelog.client.errors import DeliveryOutcomeUnknownError
from tidelog.log.batch_header import TRANSACTIONAL_BIT, seal
from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.model.ids import PartitionId

SEQUENCES = 1 << 31
IN_FLIGHT_MAX = 5
IDLE_S_MAX = 600.0
"""After so long without traffic the log may have forgotten the producer: the first batch goes alone again."""
_PRODUCER = Struct(">qhi")
_PRODUCER_POSITION = 43
_ATTRIBUTES_POSITION = 22
"""Of the low byte."""

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
        ErrorCode.OFFSET_MISMATCH,
        ErrorCode.STALE_FENCING_TOKEN,
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.INVALID_TXN_STATE,
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.TRANSACTION_ABORTABLE,
    }
)
"""Rejections before the append. Any other error may come after it: leadership lost while the batch was replicated."""
_UNMET = (ErrorCode.OFFSET_MISMATCH, ErrorCode.STALE_FENCING_TOKEN)
_GAP = (ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.UNKNOWN_PRODUCER_ID)


@dataclass(frozen=True, slots=True)
class ProducerIdAndEpoch:
    id: int
    epoch: int
    is_transactional: bool = False


@dataclass(frozen=True, slots=True)
class Stored:
    """The outcome of a batch that the log has."""

    base_offset: int
    """-1 if the log does not say: acks=0, or a repeat of a batch that it stored long before."""
    append_time_ms: int
    """The time that the leader has set, or -1."""


class Batch(Protocol):
    """What a queue needs of a `fast_path.ProducerBatch`."""

    count: int
    data: bytearray
    deadline_s: float
    sequence: int
    is_in_flight: bool
    was_sent: bool
    may_be_stored: bool
    last_error: Any
    outcome: Any


B = TypeVar("B", bound=Batch)


class PartitionQueue(Generic[B]):
    """See the module. Times are seconds of one monotonic clock."""

    def __init__(self, topic: str, partition: PartitionId, *, in_flight_max: int = IN_FLIGHT_MAX) -> None:
        assert 1 <= in_flight_max <= IN_FLIGHT_MAX, "a log remembers five batches of a producer"
        self.topic = topic
        self.partition = partition
        self.batches: deque[B] = deque()
        self.unreported: deque[B] = deque()
        """In order; the first without an outcome holds up those behind it."""
        self.producer: ProducerIdAndEpoch | None = None
        self.in_flight = 0
        self.resets = 0
        self._in_flight_max = in_flight_max
        self._next_sequence = 0
        self._is_flowing = False
        self._has_gap = False
        self._gap_epoch = -1
        """Epoch of the leader that reported the gap."""
        self._active_s = 0.0

    @property
    def needs_producer(self) -> bool:
        """`start` it with a producer id."""
        return bool(self.batches) and self.in_flight == 0 and (self.producer is None or self._has_gap)

    def start(self, producer: ProducerIdAndEpoch) -> list[B]:
        """Begin at sequence 0 of this producer. Returns batches that fail, as they cannot get new numbers."""
        assert self.in_flight == 0, "no number changes in flight"
        failed = []
        for batch in list(self.batches):
            if batch.sequence < 0:
                continue
            batch.sequence = -1
            if batch.may_be_stored:
                reason = f"; the last response: {batch.last_error}" if batch.last_error is not None else ""
                batch.outcome = DeliveryOutcomeUnknownError(
                    f"{self.topic}-{self.partition.partition}: {batch.count} records may be stored or not, and sending "
                    f"them again could store them twice{reason}"
                )
                self.batches.remove(batch)
                failed.append(batch)
        self.resets += self.producer is not None
        self.producer = producer
        self._next_sequence = 0
        self._is_flowing = self._has_gap = False
        return failed

    def restart(self) -> None:
        """A transaction begins: `start` comes before the next batch, when the last of the one before is answered."""
        assert not self.pending(), "a transaction begins when all records of the one before have their outcome"
        self.producer = None
        self._has_gap = False

    def add(self, batch: B) -> None:
        """A sealed batch. One that has failed already is only reported, in its order."""
        if batch.outcome is None:
            self.batches.append(batch)
        self.unreported.append(batch)

    def next_batch(self, now_s: float) -> B | None:
        """The batch to send now; call `send` with it."""
        if self.producer is None or self._has_gap or self.in_flight >= self._in_flight_max:
            return None
        if self.in_flight and not self._is_flowing:
            return None
        if not self.in_flight and now_s - self._active_s > IDLE_S_MAX:
            self._is_flowing = False
        for batch in self.batches:
            if not batch.is_in_flight:
                return batch
        return None

    def next_size(self) -> int:
        """Bytes of the first batch that is not in flight; 0 if there is none."""
        return next((len(batch.data) for batch in self.batches if not batch.is_in_flight), 0)

    def send(self, batch: B, now_s: float) -> bytearray:
        """Mark it in flight and return what to send."""
        assert self.producer is not None
        assert not batch.is_in_flight, "it is in flight once at a time"
        if batch.sequence < 0:
            self._number(batch, self.producer)
        batch.is_in_flight = batch.was_sent = True
        self.in_flight += 1
        self._active_s = now_s
        return batch.data

    def _number(self, batch: B, producer: ProducerIdAndEpoch) -> None:
        if batch.was_sent:
            batch.data = bytearray(batch.data)  # a connection may still hold the bytes of the last attempt
        batch.sequence = self._next_sequence
        self._next_sequence = (self._next_sequence + batch.count) % SEQUENCES
        _PRODUCER.pack_into(batch.data, _PRODUCER_POSITION, producer.id, producer.epoch, batch.sequence)
        if producer.is_transactional:
            batch.data[_ATTRIBUTES_POSITION] |= TRANSACTIONAL_BIT
        seal(batch.data, size=len(batch.data))

    # Responses.

    def stored(self, batch: B, outcome: Stored, now_s: float) -> None:
        """The log has it."""
        is_first = self.batches[0] is batch
        self._answered(batch)
        # A response that overtook a failure says nothing: the failed batch is sent alone first.
        self._is_flowing = self._is_flowing or (self.in_flight == 0 and is_first)
        self._active_s = now_s
        self._end(batch, outcome)

    def rejected(self, batch: B, error: TidelogError, *, answered_epoch: int = -1, known_epoch: int = -1) -> None:
        """The epochs are those of the leader that answered, and of the newest leader that is known."""
        was_alone = self.in_flight == 1 and self.batches[0] is batch
        self._answered(batch)
        self._is_flowing = False
        if error.code not in NEVER_STORED:
            batch.may_be_stored = True
        batch.last_error = error
        if batch.outcome is None and error.code in _GAP:
            if was_alone and known_epoch <= answered_epoch:
                self._has_gap, self._gap_epoch = True, answered_epoch
        elif batch.outcome is not None or not error.retriable:
            if error.code in _UNMET and not batch.may_be_stored:
                self._take_back(batch)
            self._end(batch, error)

    def _take_back(self, batch: B) -> None:
        """The log rejected the newest sequence for a reason of its own, and never had it: it goes on from there."""
        if (batch.sequence + batch.count) % SEQUENCES == self._next_sequence:
            self._next_sequence = batch.sequence

    def lost(self, batch: B, error: TidelogError, *, was_carried: bool) -> None:
        """No response will come. `was_carried`: the batch may have arrived."""
        self._answered(batch)
        self._is_flowing = False
        batch.may_be_stored = batch.may_be_stored or was_carried
        batch.last_error = error
        if batch.outcome is not None:
            self._end(batch, error)

    def learn_epoch(self, known_epoch: int) -> None:
        """The newest leader epoch that is known. A gap that an older leader reported is none."""
        if known_epoch > self._gap_epoch:
            self._has_gap = False

    # Other ends.

    def expired(self, now_s: float) -> list[B]:
        """Batches whose deadline is over; `fail` them."""
        return [batch for batch in self.batches if batch.outcome is None and batch.deadline_s <= now_s]

    def unsent(self) -> list[B]:
        """Batches that are not in flight; `fail` them to send nothing more."""
        return [batch for batch in self.batches if not batch.is_in_flight]

    def pending(self) -> list[B]:
        """All batches without an outcome."""
        return [batch for batch in self.batches if batch.outcome is None]

    def fail(self, batch: B, error: TidelogError) -> None:
        """End it. One that is in flight keeps its slot until it is answered."""
        if batch.is_in_flight:
            batch.outcome = error
        else:
            self._end(batch, error)

    def pop_reportable(self) -> list[B]:
        """Ended batches with none before them that has not ended."""
        reportable = []
        while self.unreported and self.unreported[0].outcome is not None:
            reportable.append(self.unreported.popleft())
        return reportable

    def _answered(self, batch: B) -> None:
        assert batch.is_in_flight, "a response belongs to a batch in flight"
        batch.is_in_flight = False
        self.in_flight -= 1

    def _end(self, batch: B, outcome: Stored | TidelogError) -> None:
        if batch.outcome is None:
            batch.outcome = outcome
        self.batches.remove(batch)

    def validate(self) -> None:
        in_flight = sum(batch.is_in_flight for batch in self.batches)
        assert self.in_flight == in_flight <= self._in_flight_max, "the count of batches in flight"
        numbered = [batch.sequence >= 0 for batch in self.batches]
        assert numbered == sorted(numbered, reverse=True), "batches with a sequence are a prefix"
        assert all(batch.sequence >= 0 for batch in self.batches if batch.is_in_flight), "in flight with a sequence"
        assert all(batch.is_in_flight for batch in self.batches if batch.outcome is not None), "ended, but in flight"
