"""Completed and aborted transactions of one log, and the `.txnindex` file that lists the aborted ones. Pure.

A transaction of a producer opens with its first transactional batch in this log and ends with a control record (the
marker), commit or abort. Readers of committed data read below the last stable offset and skip the batches of aborted
transactions; the index lists those without reading the log.

Kafka's layout, 34 bytes for each aborted transaction, big endian, ordered by `last_offset`:

    0       2               10              18              26              34
    +-------+---------------+---------------+---------------+---------------+
    | ver=0 | producer id   | first offset  | last offset   | last stable   |
    +-------+---------------+---------------+---------------+---------------+

`last offset` is the offset of the abort marker. `last stable` is the last stable offset once the marker was there: a
look-up that ends at or below it needs no later entry, since nothing later can overlap it.

An entry is in the index of the segment that has the marker; its data may be in earlier segments.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct

from tidelog.model.errors import CorruptStateError
from tidelog.model.ids import Offset, ProducerId

_ENTRY = Struct(">hqqqq")
ENTRY_BYTES = _ENTRY.size
VERSION = 0


@dataclass(frozen=True, slots=True)
class AbortedTransaction:
    """`last_offset` is the marker's offset; every batch of this producer in [first_offset, last_offset] is aborted."""

    producer_id: ProducerId
    first_offset: Offset
    last_offset: Offset
    last_stable_offset: Offset


@dataclass(frozen=True, slots=True)
class CompletedTransaction:
    """A transaction whose marker is in the log at `last_offset`; `last_stable_offset` is the one after the marker."""

    producer_id: ProducerId
    first_offset: Offset
    last_offset: Offset
    last_stable_offset: Offset
    is_aborted: bool

    def index_entry(self) -> AbortedTransaction | None:
        """Its entry of the transaction index; None if it was committed."""
        if not self.is_aborted:
            return None
        return AbortedTransaction(self.producer_id, self.first_offset, self.last_offset, self.last_stable_offset)


class TransactionIndex:
    """The aborted transactions of one segment, in memory as the bytes of its file.

    Invariant: entries are strictly ordered by `last_offset`. No IO: the owner appends what `append` returns to the
    file, and truncates the file to `size` after `truncate`.
    """

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = bytearray()

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview, *, path: str = "") -> "TransactionIndex":
        """The index of a file's bytes; raises `CorruptStateError` if they are incomplete or out of order."""
        index = cls()
        if len(data) % ENTRY_BYTES:
            raise CorruptStateError(
                f"transaction index {path}: {len(data)} bytes is no whole number of entries", path=path
            )
        last = -1
        for position, entry in enumerate(_ENTRY.iter_unpack(data)):
            version, producer_id, first, end, stable = entry
            if version != VERSION or producer_id < 0 or not 0 <= first <= end or end <= last or stable < 0:
                raise CorruptStateError(f"transaction index {path}: entry {position} is not sound: {entry}", path=path)
            last = end
        index._data += data
        return index

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self._data)

    def __len__(self) -> int:
        return len(self._data) // ENTRY_BYTES

    def __iter__(self) -> Iterator[AbortedTransaction]:
        for _, producer_id, first, last, stable in _ENTRY.iter_unpack(self._data):
            yield AbortedTransaction(ProducerId(producer_id), Offset(first), Offset(last), Offset(stable))

    def to_bytes(self) -> bytes:
        return bytes(self._data)

    def append(self, entry: AbortedTransaction) -> bytes:
        """Add an entry; returns its bytes for the file. Markers are appended in the order of the log."""
        assert entry.last_offset > self._last_offset(len(self) - 1), "aborted transactions are indexed in marker order"
        data = encode_entry(entry)
        self._data += data
        return data

    def overlapping(self, start: Offset, end: Offset) -> tuple[list[AbortedTransaction], bool]:
        """Aborted transactions with an offset in [start, end), and whether later segments cannot have more.

        The second value is True once an entry shows that the log was stable up to `end`; else the caller searches the
        index of the next segment too.
        """
        found: list[AbortedTransaction] = []
        for at in range(self._first_ending_at_or_after(start), len(self)):
            entry = self._entry(at)
            if entry.first_offset < end:
                found.append(entry)
            if entry.last_stable_offset >= end:
                return found, True
        return found, False

    def truncate(self, offset: Offset) -> None:
        """Drop the transactions whose marker is at or past `offset`: the log no longer holds it."""
        del self._data[self._first_ending_at_or_after(offset) * ENTRY_BYTES :]

    def _first_ending_at_or_after(self, offset: Offset) -> int:
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self._last_offset(middle) < offset:
                low = middle + 1
            else:
                high = middle
        return low

    def _last_offset(self, at: int) -> int:
        return -1 if at < 0 else self._entry(at).last_offset

    def _entry(self, at: int) -> AbortedTransaction:
        _, producer_id, first, last, stable = _ENTRY.unpack_from(self._data, at * ENTRY_BYTES)
        return AbortedTransaction(ProducerId(producer_id), Offset(first), Offset(last), Offset(stable))


def encode_entry(entry: AbortedTransaction) -> bytes:
    """The 34 bytes of one entry."""
    return _ENTRY.pack(VERSION, entry.producer_id, entry.first_offset, entry.last_offset, entry.last_stable_offset)
