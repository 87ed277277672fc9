"""A log of plain files, for tests of cleaning: appends, rolls, cleans, swaps and reads everything.

It does by hand what an owner of a log does around the cleaner: it keeps the producers' state and the transaction
index, hands both in, and swaps the new files for the old ones. Reading goes through the files only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from crc32c import crc32c

from tidelog.log.batch import (
    BatchHeader,
    Codec,
    ControlKind,
    Record,
    TimestampType,
    check_batch,
    decode,
    encode,
    encode_control,
    parse_control,
    split_batches,
)
from tidelog.log.cleaner import (
    KEY_MAP_NAME,
    CleanedGroup,
    CleanedSegment,
    CleanerLimits,
    CleaningTask,
    checkpoint_after,
    clean_group,
    discard_cleaned,
    map_keys,
)
from tidelog.log.compaction import Checkpoint, CleaningPlan, plan_cleaning
from tidelog.log.config import LogConfig
from tidelog.log.index import decode_offset_entries, decode_time_entries
from tidelog.log.producers import ProducerState
from tidelog.log.segment import CLEANED, INDEX, LOG, SUFFIXES, TIME_INDEX, TRANSACTION_INDEX, SegmentInfo, file_path
from tidelog.log.transactions import AbortedTransaction, TransactionIndex
from tidelog.model.ids import Offset
from tidelog.world.disk import Disk

Pair = tuple[bytes | None, bytes | None]
BYTES_MAX = 1 << 24
COMPACT = LogConfig(cleanup_compact=True, cleanup_delete=False, min_cleanable_dirty_ratio=0.0, delete_retention_ms=1000)


@dataclass(frozen=True)
class StoredBatch:
    header: BatchHeader
    data: bytes


@dataclass(frozen=True, slots=True)
class CleaningResult:
    """`checkpoint` is valid once every segment of `groups` is swapped in."""

    groups: tuple[CleanedGroup, ...]
    checkpoint: Checkpoint
    keys: int

    @property
    def segments(self) -> tuple[CleanedSegment, ...]:
        return tuple(group.segment for group in self.groups if group.segment is not None)


def clean(disk: Disk, task: CleaningTask) -> CleaningResult:
    """Clean the whole plan, without the swaps. On an error no file is left."""
    try:
        mapped = map_keys(disk, task)
        task = replace(task, newest_claim=mapped.newest_claim)
        groups: list[CleanedGroup] = []
        for group in task.plan.groups_below(mapped.end_offset):
            unfinished = groups[-1].unfinished if groups else frozenset()
            groups.append(clean_group(disk, task, group, unfinished))
        disk.remove(f"{task.path}/{KEY_MAP_NAME}")
    except BaseException:
        discard_cleaned(disk, task.path)
        raise
    return CleaningResult(tuple(groups), checkpoint_after(mapped.end_offset, groups), mapped.keys)


class CleanableLog:
    def __init__(self, disk: Disk, path: str = "log", config: LogConfig = COMPACT) -> None:
        self.disk = disk
        self.path = path
        self.config = config
        self.sealed: list[SegmentInfo] = []
        self.active: list[bytes] = []
        self.active_base = Offset(0)
        self.end_offset = Offset(0)
        self.producers = ProducerState()
        self.transactions = TransactionIndex()
        """Of the whole log, as the appends made it; the files have those of their segments."""
        self.checkpoint: Checkpoint | None = None
        self.sequences: dict[int, int] = {}
        disk.make_directory(path)

    # Write

    def append(self, batch: bytes) -> int:
        """Store a batch that was encoded at the end offset."""
        header = check_batch(batch, size_max=BYTES_MAX)
        assert header.base_offset == self.end_offset
        control = parse_control(batch) if header.is_control else None
        completed = self.producers.apply(header, control=control, now_ms=0)
        entry = completed.index_entry() if completed is not None else None
        if entry is not None:
            self.transactions.append(entry)
        self.active.append(batch)
        self.end_offset = header.next_offset
        return header.base_offset

    def put(
        self,
        *pairs: Pair,
        timestamp: int = 0,
        codec: Codec = Codec.NONE,
        producer: int = -1,
        epoch: int = 0,
        transactional: bool = False,
        timestamp_type: TimestampType = TimestampType.CREATE,
        is_claim: bool = False,
    ) -> int:
        """Append one batch; returns its base offset."""
        sequence = self.sequences.get(producer, 0) if producer >= 0 else -1
        base = self.end_offset
        records = [
            Record(base + row, timestamp, key, value, (("row", b"%d" % row),) if row % 2 else ())
            for row, (key, value) in enumerate(pairs)
        ]
        self.sequences[producer] = sequence + len(pairs)
        return self.append(
            encode(
                records,
                codec=codec,
                base_offset=base,
                leader_epoch=3,
                producer_id=producer,
                producer_epoch=epoch if producer >= 0 else -1,
                base_sequence=sequence,
                is_transactional=transactional,
                is_claim=is_claim,
                timestamp_type=timestamp_type,
            )
        )

    def end(self, producer: int, *, is_abort: bool, epoch: int = 0, timestamp: int = 0) -> int:
        """Append the marker that ends the producer's transaction."""
        return self.append(
            encode_control(
                ControlKind.ABORT if is_abort else ControlKind.COMMIT,
                coordinator_epoch=0,
                timestamp=timestamp,
                producer_id=producer,
                producer_epoch=epoch,
                base_offset=self.end_offset,
                leader_epoch=3,
            )
        )

    def roll(self, *, modified_ms: int = 0) -> None:
        """Seal the active segment, if it holds anything."""
        if not self.active:
            return
        data = b"".join(self.active)
        self._write(LOG, data)
        headers = [header for _, header in split_batches(data)]
        largest = max(headers, key=lambda header: header.max_timestamp)
        entries = [entry for entry in self.transactions if self.active_base <= entry.last_offset]
        self._write(TRANSACTION_INDEX, b"".join(_entry_bytes(entry) for entry in entries))
        self.sealed.append(
            SegmentInfo(
                base_offset=self.active_base,
                next_offset=self.end_offset,
                size=len(data),
                largest_timestamp=largest.max_timestamp,
                largest_offset=largest.last_offset,
                first_timestamp=headers[0].max_timestamp,
                modified_ms=modified_ms,
                crc=crc32c(data),
                aborted=len(entries),
            )
        )
        self.active.clear()
        self.active_base = self.end_offset

    def _write(self, suffix: str, data: bytes) -> None:
        file = self.disk.open(file_path(self.path, self.active_base, suffix), create=True)
        if data:
            file.append(data)
        file.close()

    # Clean

    @property
    def bound(self) -> Offset:
        """With everything replicated: the first unstable offset, or the end."""
        unstable = self.producers.first_unstable_offset(self.end_offset)
        return self.end_offset if unstable is None else unstable

    def plan(self, now_ms: int, *, bound: int | None = None, force: bool = False) -> CleaningPlan | None:
        """With `force` also for a log that is not due: as if its last tombstone could go now."""
        checkpoint = self.checkpoint
        if force and checkpoint is not None:
            checkpoint = Checkpoint(checkpoint.first_dirty_offset, waiting_until_ms=now_ms)
        return plan_cleaning(
            self.sealed,
            checkpoint=checkpoint,
            config=self.config,
            now_ms=now_ms,
            log_start=Offset(0),
            bound=self.bound if bound is None else Offset(bound),
        )

    def task(self, plan: CleaningPlan, limits: CleanerLimits | None = None) -> CleaningTask:
        aborted, _ = self.transactions.overlapping(Offset(0), plan.end_offset)
        limits = limits or CleanerLimits(index_interval_bytes=64, chunk_bytes=256)
        return CleaningTask(self.path, plan, tuple(aborted), self.producers.last_batches(), limits)

    def clean(
        self, now_ms: int, *, bound: int | None = None, limits: CleanerLimits | None = None, force: bool = False
    ) -> CleaningResult | None:
        """Plan, clean, swap, keep the checkpoint."""
        plan = self.plan(now_ms, bound=bound, force=force)
        if plan is None:
            return None
        cleaned = clean(self.disk, self.task(plan, limits))
        self.swap(cleaned.segments)
        self.checkpoint = cleaned.checkpoint
        return cleaned

    def swap(self, segments: Sequence[CleanedSegment]) -> None:
        for segment in segments:
            for base in segment.replaces:
                for suffix in SUFFIXES:
                    self.disk.remove(file_path(self.path, base, suffix))
            base = segment.info.base_offset
            for suffix in segment.suffixes:
                name = file_path(self.path, base, suffix)
                self.disk.rename(name + CLEANED, name)
            self.sealed = [info for info in self.sealed if info.base_offset not in segment.replaces]
            self.sealed.append(segment.info)
            self.sealed.sort(key=lambda info: info.base_offset)

    # Read

    def read(self, base: int, suffix: str) -> bytes:
        name = file_path(self.path, base, suffix)
        if not self.disk.exists(name):
            return b""
        file = self.disk.open(name)
        data = file.read(0, file.size)
        file.close()
        return data

    def batches(self) -> Iterator[StoredBatch]:
        """Every batch in the files, checked, and then those of the active segment."""
        for info in self.sealed:
            yield from _split(self.read(info.base_offset, LOG))
        yield from _split(b"".join(self.active))

    def records(self) -> list[Record]:
        """All data records of all producers."""
        return [
            record
            for batch in self.batches()
            if not batch.header.is_control
            for record in decode(batch.data, decompressed_bytes_max=BYTES_MAX)
        ]

    def committed(self) -> list[Record]:
        """What a reader of committed data sees, by the transaction indexes of the files."""
        aborted = [entry for info in self.sealed for entry in self.transaction_entries(info)]
        aborted += [entry for entry in self.transactions if entry.last_offset >= self.active_base]
        return [
            record
            for batch in self.batches()
            if not batch.header.is_control and not _is_aborted(batch.header, aborted)
            for record in decode(batch.data, decompressed_bytes_max=BYTES_MAX)
        ]

    def pairs(self) -> list[tuple[int, bytes | None, bytes | None]]:
        return [(record.offset, record.key, record.value) for record in self.records()]

    def offsets(self) -> list[int]:
        return [record.offset for record in self.records()]

    def transaction_entries(self, info: SegmentInfo) -> list[AbortedTransaction]:
        return list(TransactionIndex.parse(self.read(info.base_offset, TRANSACTION_INDEX)))

    def validate(self) -> None:
        """Files, infos and indexes agree; offsets rise; no file of a cleaning is left over."""
        assert not [name for name in self.disk.list(self.path) if name.endswith(CLEANED)]
        next_offset = 0
        for info in self.sealed:
            assert info.base_offset >= next_offset
            data = self.read(info.base_offset, LOG)
            assert (len(data), crc32c(data)) == (info.size, info.crc)
            batches = list(_split(data))
            for batch in batches:
                assert batch.header.base_offset >= next_offset
                next_offset = batch.header.next_offset
            assert next_offset == info.next_offset, "the last batch tells where the next segment begins"
            assert info.largest_timestamp == max(batch.header.max_timestamp for batch in batches)
            assert info.aborted == len(self.transaction_entries(info))
            self._validate_indexes(info, batches)

    def _validate_indexes(self, info: SegmentInfo, batches: list[StoredBatch]) -> None:
        positions: dict[int, StoredBatch] = {}
        position = 0
        for batch in batches:
            positions[position] = batch
            position += batch.header.size
        offsets = decode_offset_entries(self.read(info.base_offset, INDEX), base_offset=info.base_offset)
        for entry in offsets:
            assert positions[entry.position].header.last_offset == entry.last_offset
        times = decode_time_entries(self.read(info.base_offset, TIME_INDEX), base_offset=info.base_offset)
        for time in times:
            before = [batch.header for batch in batches if batch.header.last_offset <= time.last_offset]
            assert max(header.max_timestamp for header in before) == time.timestamp
        if times:
            assert (times[-1].timestamp, times[-1].last_offset) == (info.largest_timestamp, info.largest_offset)


def _split(data: bytes) -> Iterator[StoredBatch]:
    position = 0
    while position < len(data):
        header = check_batch(data, position, size_max=BYTES_MAX)
        yield StoredBatch(header, data[position : position + header.size])
        position += header.size


def _is_aborted(header: BatchHeader, aborted: Sequence[AbortedTransaction]) -> bool:
    return header.is_transactional and any(
        entry.producer_id == header.producer_id and entry.first_offset <= header.base_offset <= entry.last_offset
        for entry in aborted
    )


def _entry_bytes(entry: AbortedTransaction) -> bytes:
    index = TransactionIndex()
    return index.append(entry)
