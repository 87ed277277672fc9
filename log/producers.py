"""The producers of a log: their sequences, their open transactions and their last batches.

For each producer id: its epoch, its last five batches (sequences, offsets, timestamp) and the first offset of its
open transaction. All of it follows from the log alone: `apply` is called for every batch that is stored, by the
leader after an append, by a follower after replication, by recovery on replay, and alone changes the state; `check`
decides what a client may append and changes nothing. So a replica that becomes leader knows what the old one knew.

The result of `check` for a batch with producer id, epoch e and first sequence s, where the log has epoch E, next
sequence N and the last five batches:

    producer unknown                        accept any sequence (below)
    e < E                                   InvalidProducerEpochError: a newer producer has this id
    e > E and s = 0                         accept: a new epoch begins at 0
    e > E and s != 0                        OutOfOrderSequenceError
    e = E, equal to one of the last five    Duplicate, with the offsets of the original
    e = E, s = N                            accept; after 2^31 - 1 comes 0
    e = E, stored before the last five      DuplicateSequenceError
    e = E, anything else (gap, overlap)     OutOfOrderSequenceError
    accepted, but not transactional while   InvalidTransactionStateError
      the producer's transaction is open

An unknown producer is new, expired, or was evicted (`producers_max`). The log cannot distinguish these, and a producer
may be idle for a day, so it is accepted at any sequence, as in Kafka; duplicates over that gap are not detected. A
client treats DUPLICATE_SEQUENCE_NUMBER as an acknowledgement, so it is returned only for batches that are provably in
the log: within the run of sequences that was stored without a gap since the epoch began or the producer became known.
Everything else is out of order.

After compaction a replay may find fewer than five batches of a producer, never less than its last one: the cleaner
keeps the header of each active producer's last batch. Expiry is by time, not by the log, so a replay may know
producers that the live state has dropped, never the other way round.

The newest claim of the partition is kept with its producer, which then neither expires nor is evicted.

Pure: no clock, no disk. The owner checks one batch at a time, and applies it before it checks the next.
"""

from array import array
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice, pairwise

from tidelog.log.batch import BatchHeader, ControlMarker
from tidelog.log.batch_header import CLAIM_BIT, TRANSACTIONAL_BIT
from tidelog.log.producer_snapshot import ProducerRow, decode_snapshot, encode_row, encode_snapshot
from tidelog.log.transactions import CompletedTransaction
from tidelog.model.errors import (
    DuplicateSequenceError,
    InvalidProducerEpochError,
    InvalidRecordError,
    InvalidTransactionStateError,
    OutOfOrderSequenceError,
    TransactionCoordinatorFencedError,
)
from tidelog.model.ids import Offset, ProducerId

SEQUENCES = 1 << 31
"""Sequences are 0 to 2^31 - 1, then 0 again."""
BATCHES_KEPT = 5
PRODUCERS_MAX = 10_000
"""Producers kept in one log; past that the least recently active sixteenth is evicted. Ids are not checked against
those that were assigned, so this bounds what a client can make a log keep and store."""
PENDING_MAX = 1024
"""Completed transactions whose marker may not be replicated yet; past that the older half is merged into one."""

_RUN_MAX = SEQUENCES // 2
"""Half of the sequence space: behind is stored, ahead is a gap."""
_STRIDE = 4
_NO_EPOCH = -1


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The batch was stored before, at these offsets. It may be acknowledged once `last_offset` is replicated."""

    base_offset: Offset
    last_offset: Offset
    timestamp: int


@dataclass(frozen=True, slots=True)
class LastBatch:
    """The newest batch of a producer: `offset` is its last offset in this epoch, or None if the epoch began with a
    marker and has no data yet. The cleaner keeps the header of that batch."""

    offset: Offset | None
    epoch: int


class _Producer:
    """`batches` holds up to five of (last sequence, last offset, offset delta, timestamp), oldest first, of `epoch`.

    `run` counts the sequences up to the last one that are stored without a gap; `seen_ms` is for expiry; `offset` is
    that of the newest batch or marker.
    """

    __slots__ = ("batches", "coordinator_epoch", "epoch", "offset", "run", "seen_ms")

    def __init__(self) -> None:
        self.epoch = _NO_EPOCH
        self.coordinator_epoch = _NO_EPOCH
        self.seen_ms = -1
        self.offset = -1
        self.run = 0
        self.batches = array("q")

    @property
    def next_sequence(self) -> int:
        return (self.batches[-_STRIDE] + 1) % SEQUENCES if self.batches else 0

    @property
    def kept_sequences(self) -> int:
        """Number of sequences in the kept batches, from the first of the oldest to the last of the newest."""
        return (self.next_sequence - self.batches[0] + self.batches[2]) % SEQUENCES if self.batches else 0

    def find(self, header: BatchHeader) -> Duplicate | None:
        last_sequence = (header.base_sequence + header.last_offset_delta) % SEQUENCES
        batches = self.batches
        for at in range(0, len(batches), _STRIDE):
            if batches[at] == last_sequence and batches[at + 2] == header.last_offset_delta:
                last = batches[at + 1]
                return Duplicate(Offset(last - batches[at + 2]), Offset(last), batches[at + 3])
        return None

    def add(self, header: BatchHeader) -> None:
        span = header.last_offset_delta + 1
        follows = bool(self.batches) and header.base_sequence == self.next_sequence
        self.run = min(self.run + span, _RUN_MAX) if follows else min(span, _RUN_MAX)
        last_sequence = (header.base_sequence + header.last_offset_delta) % SEQUENCES
        if len(self.batches) >= BATCHES_KEPT * _STRIDE:
            del self.batches[: len(self.batches) - (BATCHES_KEPT - 1) * _STRIDE]
        self.batches.extend((last_sequence, header.last_offset, header.last_offset_delta, header.max_timestamp))

    def enter_epoch(self, epoch: int) -> None:
        # A stored batch may have an older epoch: its leader had expired the newer one. The log is authoritative.
        if epoch != self.epoch:
            self.epoch = epoch
            self.run = 0
            del self.batches[:]


class ProducerState:
    """See the module. Invariants: `_open` is ordered by first offset; its producers, and that of the claim, are all in
    `_producers`; `_pending` (first offset, marker offset) rises strictly in both; `_producers` is ordered by newest
    offset, and the last one is below the log end; a producer has its row of a snapshot in `_packed`, as it is now, or
    is in `_unpacked`."""

    __slots__ = (
        *("_claim", "_open", "_packed", "_pending", "_producers", "_producers_max", "_unknown_fields", "_unpacked"),
    )

    def __init__(self, *, producers_max: int = PRODUCERS_MAX) -> None:
        assert producers_max > 0
        self._claim: tuple[int, int] | None = None
        """Offset of the newest claim, and its producer."""
        self._producers: OrderedDict[int, _Producer] = OrderedDict()
        self._packed: dict[int, bytes] = {}
        self._unpacked: dict[int, None] = {}
        # Offsets only rise, so insertion order is offset order, and the first entry is the earliest.
        self._open: OrderedDict[int, int] = OrderedDict()
        self._pending: list[tuple[int, int]] = []
        self._producers_max = producers_max
        self._unknown_fields: dict[str, object] = {}

    def __len__(self) -> int:
        return len(self._producers)

    def replace_with(self, other: "ProducerState") -> None:
        """Take over the state of `other`, which the caller gives up: after a truncation or a move of the log."""
        for name in self.__slots__:
            setattr(self, name, getattr(other, name))

    # Checks

    def check(self, header: BatchHeader) -> Duplicate | None:
        """Whether a client may append this batch: None if it may, a `Duplicate` if it is stored, else raises an error
        of the table above. Changes nothing."""
        if header.producer_id < 0:
            if header.attributes & TRANSACTIONAL_BIT:
                raise InvalidRecordError("a transactional batch must carry a producer id")
            return None
        if header.base_sequence < 0 or header.producer_epoch < 0:
            raise InvalidRecordError(
                f"producer {header.producer_id}: epoch {header.producer_epoch}, sequence {header.base_sequence}:"
                " a batch with a producer id needs both"
            )
        producer = self._producers.get(header.producer_id)
        if producer is not None:
            if header.producer_epoch == producer.epoch:
                duplicate = producer.find(header)
                if duplicate is not None:
                    return duplicate
            self._check_epoch(producer, header)
            self._check_sequence(producer, header)
        if not header.is_transactional and header.producer_id in self._open:
            raise InvalidTransactionStateError(
                f"producer {header.producer_id} has an open transaction since offset {self._open[header.producer_id]};"
                " the batch is not part of one"
            )
        return None

    def check_marker(self, header: BatchHeader, control: ControlMarker) -> None:
        """Whether a transaction coordinator may append this marker. Raises `InvalidProducerEpochError` for an older
        producer epoch and `TransactionCoordinatorFencedError` for a replaced coordinator. Changes nothing."""
        producer = self._producers.get(header.producer_id)
        if producer is None:
            return
        self._check_epoch(producer, header)
        if control.coordinator_epoch < producer.coordinator_epoch:
            raise TransactionCoordinatorFencedError(
                f"producer {header.producer_id}: marker of coordinator epoch {control.coordinator_epoch},"
                f" but {producer.coordinator_epoch} has written before"
            )

    @staticmethod
    def _check_epoch(producer: _Producer, header: BatchHeader) -> None:
        if header.producer_epoch < producer.epoch:
            raise InvalidProducerEpochError(
                f"producer {header.producer_id}: epoch {header.producer_epoch} is older than {producer.epoch}"
            )

    @staticmethod
    def _check_sequence(producer: _Producer, header: BatchHeader) -> None:
        sequence = header.base_sequence
        if header.producer_epoch > producer.epoch:
            if sequence != 0:
                raise OutOfOrderSequenceError(
                    f"producer {header.producer_id}: new epoch {header.producer_epoch} begins at sequence {sequence},"
                    " must be 0"
                )
            return
        expected = producer.next_sequence
        behind = (expected - sequence) % SEQUENCES
        if behind == 0:
            return
        span = header.last_offset_delta + 1
        if behind <= producer.run and behind - span >= producer.kept_sequences:
            oldest = producer.batches[1] - producer.batches[2]
            raise DuplicateSequenceError(
                f"producer {header.producer_id}: sequence {sequence} is older than the last {BATCHES_KEPT} batches;"
                f" it is stored below offset {oldest}",
                below_offset=oldest,
            )
        raise OutOfOrderSequenceError(f"producer {header.producer_id}: sequence {sequence}, expected {expected}")

    # Changes

    def apply(
        self, header: BatchHeader, *, now_ms: int, control: ControlMarker | None = None
    ) -> CompletedTransaction | None:
        """Apply a batch that is in the log, in offset order, without a check: the log is authoritative.

        `control` is the result of `parse_control` for a control batch; None for data, and for a control batch that
        compaction has emptied. Returns the transaction that a marker has ended, if one was open. `now_ms` dates the
        producer for expiry: the time of the append, or of the recovery. The timestamps of the batch do not: a client
        that sends old data would be expired at once, and its duplicate stored twice.
        """
        if not header.has_producer:
            return None
        producer = self._producers.get(header.producer_id)
        if producer is None:
            self._make_room()
            producer = self._producers[header.producer_id] = _Producer()
        else:
            self._producers.move_to_end(header.producer_id)
        self._packed.pop(header.producer_id, None)
        self._unpacked[header.producer_id] = None
        producer.enter_epoch(header.producer_epoch)
        producer.seen_ms = now_ms
        producer.offset = header.last_offset
        if control is not None and control.ends_transaction:
            producer.coordinator_epoch = control.coordinator_epoch
            return self._complete(header, is_abort=control.is_abort)
        if header.is_control:
            return None
        if header.base_sequence >= 0:
            producer.add(header)
        if header.attributes & CLAIM_BIT:
            self._claim = header.base_offset, header.producer_id
        if header.is_transactional and header.producer_id not in self._open:
            self._open[header.producer_id] = header.base_offset
        return None

    def _complete(self, header: BatchHeader, *, is_abort: bool) -> CompletedTransaction | None:
        first = self._open.pop(header.producer_id, None)
        if first is None:
            return None
        marker = header.base_offset
        while self._pending and self._pending[-1][0] >= first:
            # The later marker stays longer and covers more: it replaces both.
            self._pending.pop()
        self._pending.append((first, marker))
        if len(self._pending) > PENDING_MAX:
            # The old ones are most likely replicated. Merged they hold back more, never less.
            half = PENDING_MAX // 2
            self._pending[:half] = [(self._pending[0][0], self._pending[half - 1][1])]
        stable = marker + 1 if not self._open else next(iter(self._open.values()))
        return CompletedTransaction(
            ProducerId(header.producer_id), Offset(first), Offset(marker), Offset(stable), is_aborted=is_abort
        )

    def _make_room(self) -> None:
        if len(self._producers) < self._producers_max:
            return
        idle = (producer_id for producer_id in self._producers if not self._is_kept(producer_id))
        over = len(self._producers) - self._producers_max
        for producer_id in list(islice(idle, max(1, self._producers_max // 16, over))):
            self._forget(producer_id)

    def _is_kept(self, producer_id: int) -> bool:
        return producer_id in self._open or (self._claim is not None and self._claim[1] == producer_id)

    def _forget(self, producer_id: int) -> None:
        del self._producers[producer_id]
        self._packed.pop(producer_id, None)
        self._unpacked.pop(producer_id, None)

    def expire(self, now_ms: int, expiration_ms: int) -> list[ProducerId]:
        """Forget the producers that were last seen `expiration_ms` ago or earlier, except those with an open
        transaction, whose end would be unknown, and that of the claim. Returns their ids, sorted."""
        expired = sorted(
            pid for pid, p in self._producers.items() if p.seen_ms <= now_ms - expiration_ms and not self._is_kept(pid)
        )
        for producer_id in expired:
            self._forget(producer_id)
        return [ProducerId(producer_id) for producer_id in expired]

    def forget_replicated(self, high_watermark: Offset) -> None:
        """Forget transactions whose marker is below the high watermark: it stays replicated, even if a later caller has
        an older high watermark."""
        replicated = 0
        for _, marker in self._pending:
            if marker >= high_watermark:
                break
            replicated += 1
        del self._pending[:replicated]

    # Queries

    @property
    def claim(self) -> int:
        """Offset of the newest claim of the partition, its fencing token; -1 if none is known."""
        return -1 if self._claim is None else self._claim[0]

    @property
    def first_open_offset(self) -> Offset | None:
        """First offset of the earliest open transaction."""
        return Offset(next(iter(self._open.values()))) if self._open else None

    def first_unstable_offset(self, high_watermark: Offset) -> Offset | None:
        """First offset of the earliest transaction that is open, or whose marker is not below the high watermark: such
        a marker may still be truncated. The last stable offset is the smaller of this and the high watermark; cleaning
        and deletion stop there too. Implies `forget_replicated`."""
        self.forget_replicated(high_watermark)
        first = self.first_open_offset
        if not self._pending:
            return first
        pending = Offset(self._pending[0][0])
        return pending if first is None else min(first, pending)

    def last_stable_offset(self, high_watermark: Offset) -> Offset:
        """Readers of committed data read below this."""
        unstable = self.first_unstable_offset(high_watermark)
        return high_watermark if unstable is None else min(high_watermark, unstable)

    def last_batches(self) -> dict[int, LastBatch]:
        """The newest batch of each producer, for the cleaner."""
        return {
            pid: LastBatch(Offset(p.batches[-_STRIDE + 1]) if p.batches else None, p.epoch)
            for pid, p in self._producers.items()
        }

    def epoch_of(self, producer_id: int) -> int:
        """Epoch of its newest batch or marker; -1 for an unknown producer. Of an open transaction, it is its epoch."""
        producer = self._producers.get(producer_id)
        return _NO_EPOCH if producer is None else producer.epoch

    def coordinator_epoch_of(self, producer_id: int) -> int:
        """Coordinator epoch of its newest marker; -1 if there is none."""
        producer = self._producers.get(producer_id)
        return _NO_EPOCH if producer is None else producer.coordinator_epoch

    def newest_offset_of(self, producer_id: int) -> int:
        """Last offset of its newest batch or marker; -1 for an unknown producer."""
        producer = self._producers.get(producer_id)
        return -1 if producer is None else producer.offset

    def open_offset(self, producer_id: int) -> int | None:
        """First offset of its open transaction."""
        return self._open.get(producer_id)

    def open_rows(self) -> list[ProducerRow]:
        """The producers with an open transaction, in the order of its first offset."""
        return [self._row(producer_id) for producer_id in self._open]

    def rows(self) -> list[ProducerRow]:
        """All producers, by id: for snapshots and `log dump`."""
        return [self._row(pid) for pid in sorted(self._producers)]

    def ids(self) -> list[int]:
        """All ids, sorted. With `row`, for callers that describe many producers a few at a time."""
        return sorted(self._producers)

    def row(self, producer_id: int) -> ProducerRow | None:
        return self._row(producer_id) if producer_id in self._producers else None

    def _row(self, pid: int) -> ProducerRow:
        p = self._producers[pid]
        return ProducerRow(
            ProducerId(pid),
            p.epoch,
            p.coordinator_epoch,
            p.seen_ms,
            Offset(p.offset),
            p.run,
            self._open.get(pid),
            tuple(tuple(p.batches[at : at + _STRIDE]) for at in range(0, len(p.batches), _STRIDE)),
        )

    def validate(self, *, log_end: int | None = None, thorough: bool = True) -> None:
        """Assert the invariants, in a log that ends at `log_end`; without `thorough` only those of the newest producer
        and transaction. For tests."""
        if log_end is not None:
            newest = next(reversed(self._producers.values()), None)
            if newest is not None:
                assert newest.offset < log_end, f"a producer's batch at {newest.offset}, past the end {log_end}"
            opened = next(reversed(self._open.values()), None)
            assert opened is None or opened < log_end, f"a transaction at {opened}, past the end {log_end}"
            assert not self._pending or self._pending[-1][1] < log_end, f"a marker past the end: {self._pending[-1]}"
            assert self.claim < log_end, f"a claim at {self.claim}, past the end {log_end}"
        if not thorough:
            return
        offsets = [producer.offset for producer in self._producers.values()]
        assert offsets == sorted(offsets), "producers are not in the order of their newest batches"
        firsts = list(self._open.values())
        assert firsts == sorted(set(firsts))
        assert all(pid in self._producers for pid in self._open)
        assert self._claim is None or self._claim[1] in self._producers, "the producer of the claim is forgotten"
        assert all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(self._pending))
        assert len(self._pending) <= PENDING_MAX
        assert self._producers.keys() == self._packed.keys() | self._unpacked.keys()
        assert not self._packed.keys() & self._unpacked.keys()
        assert all(packed == encode_row(self._row(pid)) for pid, packed in self._packed.items())
        for producer in self._producers.values():
            assert len(producer.batches) % _STRIDE == 0
            assert len(producer.batches) <= BATCHES_KEPT * _STRIDE
            assert bool(producer.batches) == (producer.run > 0)
            last_offsets = list(producer.batches[1::_STRIDE])
            assert last_offsets == sorted(last_offsets), "batches of a producer are not in the order of the log"
            assert not last_offsets or last_offsets[-1] <= producer.offset, "a batch after the newest one"

    # Snapshots

    def pack(self, count: int) -> int:
        """Encode up to `count` rows that changed since the last snapshot. Returns how many are left.

        A caller that must not block encodes a few at a time before it takes the snapshot.
        """
        for producer_id in list(islice(self._unpacked, count)):
            del self._unpacked[producer_id]
            self._packed[producer_id] = encode_row(self._row(producer_id))
        return len(self._unpacked)

    def to_snapshot(self) -> bytes:
        """The state as bytes, deterministic; see `producer_snapshot`. The caller stores the offset and a CRC."""
        self.pack(len(self._unpacked))
        rows = [self._packed[producer_id] for producer_id in sorted(self._producers)]
        return encode_snapshot(rows, self._pending, self._unknown_fields, claim=self._claim)

    @classmethod
    def from_snapshot(cls, data: bytes, *, producers_max: int = PRODUCERS_MAX) -> "ProducerState":
        """The state of a snapshot; raises `CorruptStateError` for other bytes. Fields of a newer version are kept."""
        snapshot = decode_snapshot(data)
        state = cls(producers_max=producers_max)
        state._unknown_fields = snapshot.unknown_fields
        state._pending = list(snapshot.pending)
        state._claim = snapshot.claim
        opened: list[tuple[int, int]] = []
        for row in sorted(snapshot.producers, key=lambda row: row.offset):
            state._unpacked[row.producer_id] = None
            producer = state._producers[row.producer_id] = _Producer()
            producer.epoch = row.epoch
            producer.coordinator_epoch = row.coordinator_epoch
            producer.seen_ms = row.seen_ms
            producer.offset = row.offset
            producer.run = row.run
            for batch in row.batches:
                producer.batches.extend(batch)
            if row.open_offset is not None:
                opened.append((row.open_offset, row.producer_id))
        for first, producer_id in sorted(opened):
            state._open[producer_id] = first
        return state
