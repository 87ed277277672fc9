"""`Fetched`: whole batches of one partition, as a broker sent them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tidelog.client.consumer.subscription_state import Position
from tidelog.log.batch import decode_columns, parse_control
from tidelog.log.batch_header import BATCH_BYTES_MAX, check_batch, read_header
from tidelog.log.columns import Columns, Record
from tidelog.model.ids import PartitionId

DECOMPRESSED_BYTES_MAX = 1 << 30


@dataclass(frozen=True, slots=True)
class Fetched:
    """Whole batches of one partition. The first may begin before `fetch_offset`: skip those records."""

    topic: str
    partition: PartitionId
    data: bytes
    fetch_offset: int
    next_offset: int
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    aborted: tuple[tuple[int, int], ...] = ()
    """(producer id, first offset) of each aborted transaction in the data; only with read_committed."""
    position: Position | None = None
    """The position that it was fetched for."""
    fetch_generation: int = 0

    @property
    def is_stale(self) -> bool:
        return self.position is not None and self.position.fetch_generation != self.fetch_generation

    def batches(self, *, checks: bool = True) -> Iterator[Columns]:
        """Decodes the batches, without control batches and aborted ones. Without `checks` it skips the CRCs."""
        at = 0
        ahead = sorted(self.aborted, key=lambda transaction: transaction[1], reverse=True)
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
                if record.offset >= self.fetch_offset:
                    yield record
