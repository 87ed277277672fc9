"""Raft entries as record batches, the form in which they are stored. Pure.

One entry is one record; its offset is the Raft offset. A batch holds entries of one epoch, which is the batch's leader
epoch. The key of a record says again what the CRC of a batch does not cover:

    key     1 byte kind, 4 bytes epoch, big endian
    value   the entry's data
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct

from tidelog.log.batch import check_batch, decode, encode_columns
from tidelog.model.errors import TidelogError
from tidelog.model.ids import Epoch, Offset
from tidelog.raft.messages import Entry, EntryKind, entry_bytes

BATCH_BYTES = 1 << 20
BATCH_RECORDS_MAX = 100_000
STORED_BYTES_MAX = 128 << 20
"""Of one batch. An entry larger than `BATCH_BYTES` is a batch of its own."""

_KEY = Struct(">BI")
_KINDS = {kind.value: kind for kind in EntryKind}


def encode_entries(first: Offset, entries: Sequence[Entry], *, now_ms: int) -> list[bytes]:
    """The batches of these entries, which begin at offset `first`."""
    batches: list[bytes] = []
    start = 0
    while start < len(entries):
        epoch, size, end = entries[start].epoch, 0, start
        while end < len(entries) and entries[end].epoch == epoch and end - start < BATCH_RECORDS_MAX:
            size += entry_bytes(entries[end])
            if size > BATCH_BYTES and end > start:
                break
            end += 1
        run = entries[start:end]
        batches.append(
            encode_columns(
                [now_ms] * len(run),
                [_KEY.pack(entry.kind, entry.epoch) for entry in run],
                [entry.data for entry in run],
                base_offset=first + start,
                leader_epoch=epoch,
            )
        )
        start = end
    return batches


class UnsoundLogError(TidelogError):
    """Stored bytes that are no entries, or not the next ones; `good_end` is where the sound ones end."""

    def __init__(self, message: str, *, good_end: Offset) -> None:
        super().__init__(message)
        self.good_end = good_end


def decode_entries(data: bytes, *, first: Offset, last_epoch: Epoch) -> Iterator[tuple[Offset, Entry]]:
    """Offset and entry of each record in whole batches, which must continue at `first` with no epoch below
    `last_epoch`. Everything is checked; `UnsoundLogError` says where the sound ones end.

    The first batch may begin before `first`: what lies before it is left out.
    """
    position, expected = 0, first
    is_first = True
    while position < len(data):
        try:
            header = check_batch(data, position, size_max=STORED_BYTES_MAX)
            records = decode(data, position, decompressed_bytes_max=STORED_BYTES_MAX)
        except TidelogError as error:
            raise UnsoundLogError(f"offset {expected}: {error}", good_end=expected) from error
        starts_well = header.base_offset == expected or (is_first and header.base_offset < expected)
        if not starts_well or len(records) != header.last_offset_delta + 1 or header.next_offset <= expected:
            raise UnsoundLogError(
                f"offsets {header.base_offset} to {header.last_offset} stand where {expected} is expected",
                good_end=expected,
            )
        for record in records:
            key = record.key or b""
            if len(key) != _KEY.size or record.value is None or key[0] not in _KINDS:
                raise UnsoundLogError(f"offset {record.offset}: a record that is no entry", good_end=expected)
            kind, epoch = _KEY.unpack(key)
            if epoch != header.leader_epoch or epoch < last_epoch:
                raise UnsoundLogError(
                    f"offset {record.offset}: epoch {epoch} in a batch of {header.leader_epoch}, after {last_epoch}",
                    good_end=expected,
                )
            if record.offset >= expected:
                last_epoch = Epoch(epoch)
                yield expected, Entry(last_epoch, _KINDS[kind], bytes(record.value))
                expected = Offset(expected + 1)
        is_first = False
        position += header.size
