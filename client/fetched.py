"""`Fetched`: whole batches of one partition, as a broker gave them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tidelog.log.batch import decode_columns, parse_control
from tidelog.log.batch_header import BATCH_BYTES_MAX, check_batch, read_header
from tidelog.log.columns import Columns, Record
from tidelog.model.ids import PartitionId

DECOMPRESSED_BYTES_MAX = 1 << 30


@dataclass(frozen=True, slots=True)
class Fetched:
    """Whole batches of one partition. The first may begin before `position`: those records are not asked for."""

    topic: str
    partition: PartitionId
    data: bytes
    position: int
    next_offset: int
    high_watermark: int
    last_stable: int
    start_offset: int
    aborted: tuple[tuple[int, int], ...] = ()
    """(producer id, first offset) of each aborted transaction in the data; only where committed records were asked
    for."""

    def batches(self, *, checks: bool = True) -> Iterator[Columns]:
        """Checked and decoded, without control batches and what was aborted; the first may begin before `position`.
        Without `checks` CRCs are not looked at."""
        at = 0
        ahead = sorted(self.aborted, key=lambda one: one[1], reverse=True)
        aborting: set[int] = set()
        while at < len(self.data):
            header = check_batch(self.data, at, size_max=BATCH_BYTES_MAX) if checks else read_header(self.data, at)
            while ahead and ahead[-1][1] <= header.last_offset:
                aborting.add(ahead.pop()[0])
            if header.is_control:
                if aborting and (marker := parse_control(self.data, at)) is not None and marker.is_abort:
                    aborting.discard(header.producer_id)
            elif not (header.is_transactional and header.producer_id in aborting):
                yield decode_columns(self.data, at, decompressed_bytes_max=DECOMPRESSED_BYTES_MAX)
            at += header.size

    def records(self) -> Iterator[Record]:
        for columns in self.batches():
            for record in columns.to_list():
                if record.offset >= self.position:
                    yield record
