"""Compares an open log with its files: what it says of them must be what a reader of the bytes finds.

    batches      follow each other without a hole from the first segment to the log end, in the segments and with the
                 bytes that the log says
    epochs       the history names for each batch the epoch that is stored in it
    producers    are those that a replay of the batches makes; none is from past the end
    segments     sizes, checksums, timestamps, time index and names of files (`segment_audit`)
    index        an entry names the last offset of the batch at its position; so do the hints of readers
    store        is what the log says (`store_audit`); the stored recovery point is on the device, byte for byte by its
                 CRC

An audit continues where the last one of the same log stopped, and begins again after a truncation or a cleaning. Not
while the log changes, nor of a damaged one or one whose disk has failed.
"""

from __future__ import annotations

from bisect import bisect_right

from crc32c import crc32c

from simulation.log_walk import Found, LogWalk, image_of, index_image
from simulation.segment_audit import SegmentAudit
from simulation.store_audit import StoreAudit
from tidelog.log.index import OFFSET_ENTRY_BYTES, decode_offset_entries
from tidelog.log.log import Log
from tidelog.log.log_scan import apply_batch
from tidelog.log.producers import ProducerState
from tidelog.log.segment import RecoveryMark


def can_audit(log: Log) -> bool:
    return not (log.is_closed or log.is_changing or log.damaged is not None or log.durability.failure is not None)


class LogAudit:
    """Of one open log. `run` asserts."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self._walk = LogWalk(log, durable=False)
        self._begin()

    def _begin(self) -> None:
        self._walk.restart()
        self._is_whole = self._walk.offset == 0
        self._producers = ProducerState()
        self._positions: dict[int, dict[int, int]] = {}
        """By segment: position -> last offset of the batch."""
        self._indexed: dict[int, int] = {}
        """By segment: bytes of its index that were compared."""
        self._known_producers = -1
        """How many the log had when they were compared last."""
        self._segments = SegmentAudit(self.log)
        self._store = StoreAudit(self.log)
        self._mark: RecoveryMark | None = None
        """That was compared last."""
        self._names: tuple[int, ...] = ()
        """What the segments were when the names of files were compared last."""

    @property
    def is_stale(self) -> bool:
        return self._walk.is_stale

    def run(self) -> int:
        """Returns the number of batches that were read."""
        if self._walk.is_stale:
            self._begin()
        count, log = 0, self.log
        expected = self._walk.offset
        for found in self._walk.batches(int(log.end_offset)):
            self._check_batch(found, expected)
            expected = int(found.header.next_offset)
            count += 1
        if not log.gaps:
            assert self._walk.offset == log.end_offset, f"ends at {log.end_offset}, its files at {self._walk.offset}"
        if count or len(log.producers) != self._known_producers:
            self._check_producers()
            self._known_producers = len(log.producers)
        self._segments.check()
        self._check_index()
        self._check_hints()
        self._check_store()
        self._check_names()
        return count

    def _check_batch(self, found: Found, expected: int) -> None:
        log, header = self.log, found.header
        base = int(header.base_offset)
        assert base == expected or (log.gaps and base > expected), f"a batch at {base} where {expected} is due"
        epoch = log.epochs.epoch_for(max(base, log.start_offset))
        if header.next_offset > log.start_offset:
            assert epoch == header.leader_epoch, f"{base} is of epoch {header.leader_epoch}; the history says {epoch}"
        self._positions.setdefault(found.segment, {})[found.position] = int(header.last_offset)
        aborted = apply_batch(self._producers, header, found.data, 0)
        self._segments.add(found, is_abort=aborted is not None)

    def _check_producers(self) -> None:
        log, replayed = self.log, {row.producer_id: row for row in self._producers.rows()}
        if log.gaps:
            return
        for row in log.producers.rows():
            known = replayed.get(row.producer_id)
            if known is None:
                assert not self._is_whole, f"knows producer {row.producer_id}, of whom it has nothing"
                assert row.offset < self._first_read, f"knows producer {row.producer_id} from {row.offset}"
                continue
            assert (row.epoch, row.offset, row.open_offset is None) == (
                known.epoch,
                known.offset,
                known.open_offset is None,
            ), f"has {row}, its batches make {known}"
            kept = min(len(row.batches), len(known.batches))
            assert kept or not known.batches, f"has no batch of {row}, its batches make {known}"
            assert not kept or row.batches[-kept:] == known.batches[-kept:], f"has {row}, its batches make {known}"

    @property
    def _first_read(self) -> int:
        return min(self._positions, default=int(self.log.segments.first_offset))

    def _check_index(self) -> None:
        log, active = self.log, self.log.segments.active
        for base, positions in self._positions.items():
            is_active = base == active.base_offset
            image, start = index_image(log, base), self._indexed.get(base, 0)
            if not is_active and len(image) - len(image) % OFFSET_ENTRY_BYTES == start:
                continue  # a sealed segment, all of whose index was compared
            data = bytes(image)
            if is_active:
                if len(data) < active.index_bytes:
                    continue  # lost: a read rebuilds it
                data = data[: active.index_bytes] + bytes(active.index.offsets or b"")
            for entry in decode_offset_entries(data[start:], base_offset=base):
                at = positions.get(entry.position)
                assert at == entry.last_offset, f"the index of {base} has {entry}, where the batch ends at {at}"
            self._indexed[base] = len(data) // OFFSET_ENTRY_BYTES * OFFSET_ENTRY_BYTES
        first = log.segments.first_offset
        for base in [base for base in self._positions if base < first]:
            del self._positions[base]

    def _check_hints(self) -> None:
        """Where readers begin without a search."""
        log = self.log
        for offset, (base, position) in (log.segments._hints or {}).items():
            there = self._positions.get(base, {})
            assert offset <= log.end_offset, f"a read at {offset} would begin at {position} of {base}, past the end"
            assert position in there or position == log.segments.info(base).size, (
                f"a read at {offset} would begin at {position} of segment {base}, where no batch begins"
            )

    def _check_store(self) -> None:
        self._store.check()
        mark = self._store.mark()
        if mark is not None and mark is not self._mark:
            self._check_mark(mark)
            self._mark = mark

    def _check_names(self) -> None:
        segments = self.log.segments
        state = (segments.version, int(segments.first_offset), int(segments.active.base_offset))
        if state != self._names and not self.log.lock.locked():
            self._segments.check_names()
            self._names = state

    def _check_mark(self, mark: RecoveryMark) -> None:
        log = self.log
        assert mark.offset <= log.durable_end, f"the stored recovery point {mark.offset} is past {log.durable_end}"
        bases = [int(info.base_offset) for info in log.segments.sealed]
        if mark.base_offset not in (*bases, log.segments.active.base_offset):
            at = bisect_right(bases, mark.base_offset)
            assert at == 0 or log.gaps, f"the stored recovery point is in the segment {mark.base_offset}, of {bases}"
            return
        image = image_of(log, mark.base_offset, durable=True)
        assert len(image) >= mark.position, (
            f"{len(image)} bytes are on the device, {mark.position} are stored as synced"
        )
        if mark.crc is not None:
            assert crc32c(bytes(image[: mark.position])) == mark.crc, f"other bytes than at the mark {mark.offset}"
