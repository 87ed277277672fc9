"""What compaction leaves of each batch. Pure: a batch goes in, the batch as it is to be stored comes out, or nothing.

A record goes when a later record has its key; when it has no key (only a topic that was not always compacted holds
such); when its transaction was aborted; or when it is a tombstone (a key with no value) whose time is over and that no
replica needs any more (`deletes_bound`). What
stays keeps its offset, its place and its timestamp. A batch that loses records is encoded again with the same
codec and header: base offset, last offset delta, producer id, epoch and sequence, leader epoch, so offsets and
sequences still tell what was there. A batch that loses none is kept byte for byte.

A tombstone must be seen by a reader that started before the cleaning, so it stays for `delete.retention.ms` from the
first cleaning that has seen it. That moment is kept where Kafka keeps it, in the batch: attribute bit 6 is set and the
base timestamp is the time from which its tombstones may go (timestamps of records are relative to the base, and stay
what they are). Any reader of the format reads such a batch; a replica that copies it, or Kafka's own tools, know what
it means; and no state beside the log can get lost or disagree.

Transactions. Records of aborted ones go at once. A marker stays as long as a batch of its transaction was there when
this cleaning came by, then for `delete.retention.ms` more by the same horizon, so that no reader finds data without
its end.

A batch left without records is dropped, except where its header still says something, and then the bare header stays:
- the last batch of an active producer: it holds the last sequence and epoch, for a replica that rebuilds its state
- the last batch of a cleaned segment: the file itself then tells the offset where the next one begins
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

from tidelog.log.batch import Columns, decode_columns, encode_columns, parse_control
from tidelog.log.batch_header import BatchHeader, Buffer, TimestampType
from tidelog.log.key_map import KeyMap
from tidelog.log.producers import LastBatch
from tidelog.log.transactions import AbortedTransaction


class BatchFilter:
    """Filters the batches of a log from its start up, in order. Counters and `settle_at_ms` add up over all of them.

    `unfinished` are the producers whose transactional batches have been seen and whose marker has not: it is what one
    group of segments hands to the next. `settle_at_ms` is the latest horizon of a tombstone or marker that waits.
    """

    __slots__ = (
        "_aborted",
        "_decompressed_bytes_max",
        "_delete_retention_ms",
        "_deletes_bound",
        "_keys",
        "_last_batches",
        "_now_ms",
        "aborted_here",
        "deletes_end",
        "keyless",
        "records_kept",
        "records_read",
        "settle_at_ms",
        "unfinished",
        "waiting_from",
    )

    def __init__(
        self,
        keys: KeyMap,
        *,
        aborted: Iterable[AbortedTransaction],
        last_batches: Mapping[int, LastBatch],
        unfinished: Iterable[int],
        now_ms: int,
        delete_retention_ms: int,
        deletes_bound: int,
        decompressed_bytes_max: int,
    ) -> None:
        self._keys = keys
        self._aborted = AbortedRanges(aborted)
        self._last_batches = last_batches
        self._now_ms = now_ms
        self._delete_retention_ms = delete_retention_ms
        self._deletes_bound = deletes_bound
        self._decompressed_bytes_max = decompressed_bytes_max
        self.unfinished = set(unfinished)
        self.aborted_here: list[AbortedTransaction] = []
        """Aborted transactions whose marker was kept and whose data was there: the new transaction index."""
        self.settle_at_ms: int | None = None
        self.waiting_from: int | None = None
        """Where the first batch ends whose tombstones or marker wait."""
        self.deletes_end = 0
        """Tombstones and markers below this may have been removed; all others were kept."""
        self.records_read = 0
        self.records_kept = 0
        self.keyless = 0

    def filter(self, header: BatchHeader, batch: Buffer, *, is_last_of_segment: bool) -> Buffer | None:
        """The batch as it is to be stored: itself, a smaller one, a bare header, or None."""
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
        if kept is None and (is_last_of_segment or self._is_last_of_producer(header)):
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
        """Which records stay, and whether a tombstone is among them."""
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
        """Keep a batch whose tombstones or marker wait for their horizon; the first time, write that into it."""
        horizon = header.delete_horizon_ms
        is_marked = horizon is not None
        if horizon is None:
            horizon = self._now_ms + self._delete_retention_ms
        self.settle_at_ms = horizon if self.settle_at_ms is None else max(self.settle_at_ms, horizon)
        if self.waiting_from is None:
            self.waiting_from = header.next_offset
        if is_marked and len(rows) == len(columns):
            return batch
        return _rebuild(columns, rows, horizon)

    def _is_last_of_producer(self, header: BatchHeader) -> bool:
        last = self._last_batches.get(header.producer_id) if header.has_producer else None
        if last is None:
            return False
        if last.offset is not None:
            return header.last_offset == last.offset
        return header.is_control and header.producer_epoch == last.epoch


class AbortedRanges:
    """Looks up whether a batch belongs to an aborted transaction: by producer, then by offset."""

    __slots__ = ("_by_producer",)

    def __init__(self, aborted: Iterable[AbortedTransaction]) -> None:
        self._by_producer: dict[int, list[AbortedTransaction]] = {}
        for entry in sorted(aborted, key=lambda entry: entry.first_offset):
            self._by_producer.setdefault(entry.producer_id, []).append(entry)

    def covers(self, header: BatchHeader) -> bool:
        """Is this batch of data part of an aborted transaction?"""
        return header.is_transactional and self._find(header) is not None

    def ending_at(self, marker: BatchHeader) -> AbortedTransaction | None:
        """The aborted transaction that this marker has ended."""
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
        timestamp_type=header.timestamp_type,
        max_timestamp=header.max_timestamp,
        last_offset_delta=header.last_offset_delta,
    )


def _rebuild(columns: Columns, rows: Sequence[int], horizon_ms: int | None) -> bytes:
    """The batch with these of its records only, and with this delete horizon, if any."""
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
        timestamp_type=header.timestamp_type,
        max_timestamp=header.max_timestamp if is_append_time else None,
        last_offset_delta=header.last_offset_delta,
        base_timestamp=header.base_timestamp,
        delete_horizon_ms=horizon_ms,
    )
