"""Decodes the batches of a fetch response into columns, many batches per call.

A producer's batch may hold a hundred rows; building its columns costs more than decoding the rows. Consecutive batches
of the same kind are decoded into the same columns, up to the size of an Arrow batch:

    uncompressed, create time, same leader epoch      coalesced
    any other                                         decoded alone
    control batches                                   skipped

Responses with aborted transactions are decoded batch by batch (`Fetched.batches`); so is everything if the kernel is
not compiled.
"""

from __future__ import annotations

from collections.abc import Iterator

from tidelog.client.consumer.fetched import DECOMPRESSED_BYTES_MAX, Fetched
from tidelog.log import kernel
from tidelog.log.batch import decode_columns
from tidelog.log.batch_header import (
    BATCH_BYTES_MAX,
    HEADER_BYTES,
    TRANSACTIONAL_BIT,
    BatchHeader,
    check_batch,
    read_header,
)
from tidelog.log.columns import BinaryColumn, Columns
from tidelog.model.errors import CorruptBatchError

IS_HERE = kernel.COMPILED


def columns_of(piece: Fetched, *, checks: bool, rows_max: int, bytes_max: int) -> Iterator[Columns]:
    """Yield columns in offset order; the first may begin before the piece's `fetch_offset`. `Columns.batch` is the
    header of the first coalesced batch."""
    if piece.aborted or not IS_HERE:
        yield from piece.batches(checks=checks)
        return
    data = piece.data
    run = BatchRun(data)
    at = 0
    while at < len(data):
        header = check_batch(data, at, size_max=BATCH_BYTES_MAX) if checks else read_header(data, at)
        if at + header.size > len(data):
            raise CorruptBatchError(f"a batch of {header.size} bytes ends after {len(data) - at}")
        if not header.is_control:
            if not run.takes(header):
                yield from run.decoded()
            if run.takes(header):
                run.add(header, at)
            else:
                yield decode_columns(data, at, decompressed_bytes_max=DECOMPRESSED_BYTES_MAX)
            if run.rows >= rows_max or run.bytes >= bytes_max:
                yield from run.decoded()
        at += header.size
    yield from run.decoded()


class BatchRun:
    """Batches of `data` to decode together."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._clear()

    def _clear(self) -> None:
        self.rows = self.bytes = 0
        self._first: BatchHeader | None = None
        self._next_offset = 0
        self._spans: list[kernel.Span] = []

    def takes(self, header: BatchHeader) -> bool:
        """Return whether the batch can join the run."""
        if header.attributes & ~TRANSACTIONAL_BIT or header.max_timestamp < 0:
            return False
        first = self._first
        return first is None or (first.leader_epoch == header.leader_epoch and header.base_offset >= self._next_offset)

    def add(self, header: BatchHeader, at: int) -> None:
        self._first = self._first or header
        self._next_offset = header.next_offset
        self.rows += header.count
        self.bytes += header.size
        span = at + HEADER_BYTES, at + header.size
        self._spans.append((*span, header.count, header.base_offset, header.base_timestamp, header.last_offset_delta))

    def decoded(self) -> Iterator[Columns]:
        """Yield the decoded run, if any, and clear it."""
        first, spans = self._first, self._spans
        self._clear()
        if first is not None:
            offsets, timestamps, keys, values, headers = kernel.decode_run(self._data, spans)
            blocks = None if headers is None else BinaryColumn(*headers)
            yield Columns(first, offsets, timestamps, BinaryColumn(*keys), BinaryColumn(*values), blocks)
