"""Encodes Raft entries as record batches, the stored form. Pure.

One entry is one record; its offset is the Raft offset. A batch holds entries of one epoch, the batch's leader epoch.
The key of a record repeats what the CRC of a batch does not cover:

    key     1 byte kind, 4 bytes epoch, big endian
    value   the entry's data
"""

from collections.abc import Iterator, Sequence
from struct import Struct

from tidelog.log.batch import check_batch, decode, encode_columns
from tidelog.model.errors import TidelogError
from tidelog.model.ids import Epoch, Offset
from tidelog.raft.messages import Entry, EntryKind, entry_bytes

BATCH_BYTES = 1 << 20
BATCH_RECORDS_MAX = 100_000
STORED_BYTES_MAX = 128 << 20
"""Limit of one batch. An entry larger than `BATCH_BYTES` is a batch of its own."""

_KEY = Struct(">BI")
_KINDS = {kind.value: kind for kind in EntryKind}


def encode_entries(first: Offset, entries: Sequence[Entry], *, now_ms: int) -> list[bytes]:
    """Returns the batches of these entries, which begin at offset `first`."""
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


class CorruptEntriesError(TidelogError):
    """The stored bytes are no entries, or not the next ones; the sound ones end at `good_end`."""

    def __init__(self, message: str, *, good_end: Offset) -> None:
        super().__init__(message)
        self.good_end = good_end


def decode_entries(data: bytes, *, first: Offset, last_epoch: Epoch) -> Iterator[tuple[Offset, Entry]]:
    """Yields offset and entry of each record in whole batches, which must continue at `first` with no epoch below
    `last_epoch`. Checks everything; `CorruptEntriesError` says where the sound entries end.

    The first batch may begin before `first`: entries before it are skipped.
    """
    position, expected = 0, first
    is_first = True
    while position < len(data):
        try:
            header = check_batch(data, position, size_max=STORED_BYTES_MAX)
            records = decode(data, position, decompressed_bytes_max=STORED_BYTES_MAX)
        except TidelogError as error:
            raise CorruptEntriesError(f"offset {expected}: {error}", good_end=expected) from error
        is_next = header.base_offset == expected or (is_first and header.base_offset < expected)
        if not is_next or len(records) != header.last_offset_delta + 1 or header.next_offset <= expected:
            raise CorruptEntriesError(
                f"found offsets {header.base_offset} to {header.last_offset}, expected {expected}",
                good_end=expected,
            )
        for record in records:
            key = record.key or b""
            if len(key) != _KEY.size or record.value is None or key[0] not in _KINDS:
                raise CorruptEntriesError(f"offset {record.offset}: the record is no Raft entry", good_end=expected)
            kind, epoch = _KEY.unpack(key)
            if epoch != header.leader_epoch or epoch < last_epoch:
                raise CorruptEntriesError(
                    f"offset {record.offset}: epoch {epoch} in a batch of {header.leader_epoch}, after {last_epoch}",
                    good_end=expected,
                )
            if record.offset >= expected:
                last_epoch = Epoch(epoch)
                yield expected, Entry(last_epoch, _KINDS[kind], bytes(record.value))
                expected = Offset(expected + 1)
        is_first = False
        position += header.size
