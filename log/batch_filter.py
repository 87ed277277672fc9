"""Filters batches for compaction. Pure: takes a batch, returns the batch to store, or nothing.

A record is removed if a later record has its key; if it has no key (only in a topic that was not always compacted); if
its transaction was aborted; or if it is a tombstone (a key without a value) whose time is over and that no replica
needs any more (`deletes_bound`). Remaining records keep offset, order and timestamp. A batch that loses records is
encoded again with the same codec and header: base offset, last offset delta, producer id, epoch and sequence, leader
epoch. A batch that loses none is kept byte for byte.

A reader that started before the cleaning must see a tombstone, so it stays for `delete.retention.ms` from the first
cleaning that has seen it. As in Kafka that time is in the batch: attribute bit 6 is set and the base timestamp is the
time from which its tombstones may go (timestamps of records are relative to the base and do not change). Every reader
of the format reads such a batch, replicas and Kafka's tools understand it, and no state beside the log can be lost or
disagree.

Transactions: records of aborted ones are removed at once. A marker stays as long as this cleaning found a batch of its
transaction, then for `delete.retention.ms` more, so that no reader finds data without its end.

A batch without records is dropped, except where its header is still needed; then the bare header stays:
- the last batch of an active producer: it has the last sequence and epoch, for a replica that rebuilds its state;
- a claim, until the cleaning has seen a newer one: an older claim that stays must not be the newest of the log;
- the last batch of a cleaned segment: the file then shows the offset where the next one begins.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

from tidelog.log.batch import Columns, decode_columns, encode_columns, parse_control
from tidelog.log.batch_header import CLAIM_BIT, BatchHeader, Buffer, TimestampType
from tidelog.log.key_map import KeyMap
from tidelog.log.producers import LastBatch
from tidelog.log.transactions import AbortedTransaction


class BatchFilter:
    """Filters the batches of a log in order, from its start. Counters and `waiting_until_ms` add up over all of them.

    `unfinished` are the producers with transactional batches whose marker was not seen yet; one group of segments
    passes it to the next. `waiting_until_ms` is the latest horizon of a waiting tombstone or marker.
    """

    def __init__(
        self,
        keys: KeyMap,
        *,
        aborted: Iterable[AbortedTransaction],
        last_batches: Mapping[int, LastBatch],
        newest_claim: int,
        unfinished: Iterable[int],
        now_ms: int,
        delete_retention_ms: int,
        deletes_bound: int,
        decompressed_bytes_max: int,
    ) -> None:
        self._keys = keys
        self._aborted = AbortedRanges(aborted)
        self._last_batches = last_batches
        self._newest_claim = newest_claim
        self._now_ms = now_ms
        self._delete_retention_ms = delete_retention_ms
        self._deletes_bound = deletes_bound
        self._decompressed_bytes_max = decompressed_bytes_max
        self.unfinished = set(unfinished)
        self.aborted_here: list[AbortedTransaction] = []
        """The new transaction index: aborted transactions whose marker was kept and whose data existed."""
        self.waiting_until_ms: int | None = None
        self.waiting_from: int | None = None
        """End of the first batch whose tombstones or marker wait for their removal."""
        self.deletes_end = 0
        """Tombstones and markers below this may have been removed; all others were kept."""
        self.records_read = 0
        self.records_kept = 0
        self.keyless = 0

    def filter(self, header: BatchHeader, batch: Buffer, *, is_last_of_segment: bool) -> Buffer | None:
        """The batch to store: itself, a smaller one, a bare header, or None."""
        self.records_read += header.count
        if header.is_control:
            kept = self._filter_control(header, batch)
        else:
            if header.is_transactional:
                self.unfinished.add(header.producer_id)
            if header.base_offset >= self._keys.end:
                self.records_kept += header.count
                return batch
            kept = None if self._aborted.covers(header) else self._filter_data(header, batch)
        if kept is None and (is_last_of_segment or self._is_claim(header) or self._is_last_of_producer(header)):
            return batch if header.count == 0 else empty_batch(header)
        return kept

    def _filter_data(self, header: BatchHeader, batch: Buffer) -> Buffer | None:
        if header.count == 0:
            return None
        columns = decode_columns(batch, decompressed_bytes_max=self._decompressed_bytes_max)
        rows, has_tombstone = self._choose_rows(header, columns)
        if not rows:
            return None
        self.records_kept += len(rows)
        if has_tombstone:
            return self._wait(header, batch, columns, rows)
        return batch if len(rows) == len(columns) else _rebuild(columns, rows, header.delete_horizon_ms)

    def _choose_rows(self, header: BatchHeader, columns: Columns) -> tuple[list[int], bool]:
        """The records that stay, and whether a tombstone is among them."""
        keeps_tombstones = not self._is_over(header)
        present = columns.values.present
        is_newest = self._keys.is_newest
        rows: list[int] = []
        has_tombstone = False
        for row, (key, offset) in enumerate(zip(columns.keys.to_list(), columns.offsets, strict=True)):
            if key is None:
                self.keyless += 1
            elif is_newest(key, offset):
                if present is None or present[row]:
                    rows.append(row)
                elif keeps_tombstones:
                    rows.append(row)
                    has_tombstone = True
                else:
                    self.deletes_end = max(self.deletes_end, offset + 1)
        return rows, has_tombstone

    def _is_over(self, header: BatchHeader) -> bool:
        """Whether the tombstones or the marker of this batch may go."""
        horizon = header.delete_horizon_ms
        return horizon is not None and self._now_ms >= horizon and header.next_offset <= self._deletes_bound

    def _filter_control(self, header: BatchHeader, batch: Buffer) -> Buffer | None:
        if header.count == 0:
            return None
        marker = parse_control(batch)
        if marker is None or not marker.ends_transaction:
            self.records_kept += header.count
            return batch
        had_data = header.producer_id in self.unfinished
        self.unfinished.discard(header.producer_id)
        is_past_end = header.base_offset >= self._keys.end
        if marker.is_abort and (had_data or is_past_end):
            entry = self._aborted.ending_at(header)
            if entry is not None:
                self.aborted_here.append(entry)
        if not (had_data or is_past_end) and self._is_over(header):
            self.deletes_end = max(self.deletes_end, header.next_offset)
            return None
        self.records_kept += header.count
        if had_data or is_past_end:
            return batch
        columns = decode_columns(batch, decompressed_bytes_max=self._decompressed_bytes_max)
        return self._wait(header, batch, columns, range(len(columns)))

    def _wait(self, header: BatchHeader, batch: Buffer, columns: Columns, rows: Sequence[int]) -> Buffer:
        """Keep a batch whose tombstones or marker wait for their horizon; the first time, write the horizon into it."""
        horizon = header.delete_horizon_ms
        is_marked = horizon is not None
        if horizon is None:
            horizon = self._now_ms + self._delete_retention_ms
        self.waiting_until_ms = horizon if self.waiting_until_ms is None else max(self.waiting_until_ms, horizon)
        if self.waiting_from is None:
            self.waiting_from = header.next_offset
        if is_marked and len(rows) == len(columns):
            return batch
        return _rebuild(columns, rows, horizon)

    def _is_claim(self, header: BatchHeader) -> bool:
        return bool(header.attributes & CLAIM_BIT) and header.base_offset >= self._newest_claim

    def _is_last_of_producer(self, header: BatchHeader) -> bool:
        last = self._last_batches.get(header.producer_id) if header.has_producer else None
        if last is None:
            return False
        if last.offset is not None:
            return header.last_offset == last.offset
        return header.is_control and header.producer_epoch == last.epoch


class AbortedRanges:
    """Finds whether a batch belongs to an aborted transaction: by producer, then by offset."""

    __slots__ = ("_by_producer",)

    def __init__(self, aborted: Iterable[AbortedTransaction]) -> None:
        self._by_producer: dict[int, list[AbortedTransaction]] = {}
        for entry in sorted(aborted, key=lambda entry: entry.first_offset):
            self._by_producer.setdefault(entry.producer_id, []).append(entry)

    def covers(self, header: BatchHeader) -> bool:
        """Whether this data batch is part of an aborted transaction."""
        return header.is_transactional and self._find(header) is not None

    def ending_at(self, marker: BatchHeader) -> AbortedTransaction | None:
        """The aborted transaction that this marker ended."""
        entry = self._find(marker)
        return entry if entry is not None and entry.last_offset == marker.base_offset else None

    def _find(self, header: BatchHeader) -> AbortedTransaction | None:
        # The transactions of one producer do not overlap, so the last that begins at or before it decides.
        entries = self._by_producer.get(header.producer_id, [])
        at = bisect_right(entries, header.base_offset, key=lambda entry: entry.first_offset) - 1
        return entries[at] if at >= 0 and header.base_offset <= entries[at].last_offset else None


def empty_batch(header: BatchHeader) -> bytes:
    """The batch without its records: offsets, producer, sequence, largest timestamp; no codec, no base timestamp."""
    return encode_columns(
        [],
        [],
        [],
        base_offset=header.base_offset,
        leader_epoch=header.leader_epoch,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
        is_transactional=header.is_transactional,
        is_control=header.is_control,
        is_claim=bool(header.attributes & CLAIM_BIT),
        timestamp_type=header.timestamp_type,
        max_timestamp=header.max_timestamp,
        last_offset_delta=header.last_offset_delta,
    )


def _rebuild(columns: Columns, rows: Sequence[int], horizon_ms: int | None) -> bytes:
    """The batch with only these records, and with this delete horizon, if any."""
    header = columns.batch
    is_append_time = header.timestamp_type is TimestampType.LOG_APPEND
    keys, values, headers = columns.keys.to_list(), columns.values.to_list(), columns.headers()
    return encode_columns(
        [columns.timestamps[row] for row in rows],
        [keys[row] for row in rows],
        [values[row] for row in rows],
        None if headers is None else [headers[row] for row in rows],
        offset_deltas=[columns.offsets[row] - header.base_offset for row in rows],
        codec=header.codec,
        base_offset=header.base_offset,
        leader_epoch=header.leader_epoch,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
        is_transactional=header.is_transactional,
        is_control=header.is_control,
        is_claim=bool(header.attributes & CLAIM_BIT),
        timestamp_type=header.timestamp_type,
        max_timestamp=header.max_timestamp if is_append_time else None,
        last_offset_delta=header.last_offset_delta,
        base_timestamp=header.base_timestamp,
        delete_horizon_ms=horizon_ms,
    )
