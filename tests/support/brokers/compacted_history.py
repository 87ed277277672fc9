"""What clients have written to one compacted partition, and what a complete read of it may show. Pure.

latest     the latest record of a key is its latest acknowledged one, or a later one
deleted    a key is absent only if its latest acknowledged record is a tombstone, or if a tombstone was sent whose
           offset is later or unknown
sent       every record was sent by somebody
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from tidelog.log.batch import decode, read_header

Pair = tuple[bytes, bytes | None]
"""A key and its value; None is a tombstone."""


def pairs_of(data: bytes | memoryview) -> dict[int, Pair]:
    """By offset: key and value."""
    pairs: dict[int, Pair] = {}
    position, data = 0, bytes(data)
    while position < len(data):
        header = read_header(data, position)
        for record in decode(data[position : position + header.size], decompressed_bytes_max=1 << 24):
            assert record.key is not None
            pairs[int(record.offset)] = (record.key, record.value)
        position += header.size
    return pairs


class CompactedHistory:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.acked: dict[int, Pair] = {}
        self.latest: dict[bytes, int] = {}
        """By key: the offset of its latest acknowledged record."""
        self._sent: set[Pair] = set()
        self._latest_delete: dict[bytes, int] = {}
        self._unanswered: Counter[bytes] = Counter()
        """By key: tombstones whose offset is not known."""

    def sends(self, pairs: Iterable[Pair]) -> None:
        """Records are sent, once or several times in the same batch."""
        for key, value in pairs:
            self._sent.add((key, value))
            self._unanswered[key] += value is None

    def answered(self, base_offset: int, pairs: Iterable[Pair]) -> Iterator[str]:
        """They are acknowledged. Yields what is wrong with that."""
        for offset, pair in enumerate(pairs, base_offset):
            known = self.acked.setdefault(offset, pair)
            if known != pair:
                yield f"offset {offset} is acknowledged for {known!r} and {pair!r}"
            key, value = pair
            self.latest[key] = max(offset, self.latest.get(key, -1))
            if value is None:
                self._unanswered[key] -= 1
                self._latest_delete[key] = max(offset, self._latest_delete.get(key, -1))

    def lost(self, pairs: Mapping[int, Pair], due: Mapping[bytes, int]) -> Iterator[str]:
        """Acknowledged values that a complete read lacks, and records that nobody sent. `due` is `latest` from before
        the read began."""
        for offset, pair in pairs.items():
            if pair not in self._sent:
                yield f"at {offset} is {pair!r}, which nobody sent"
        seen = _latest_of(pairs)
        for key, offset in due.items():
            is_delete = self.acked[offset][1] is None
            if key not in seen and not (is_delete or self._may_be_deleted(key, offset)):
                yield f"key {key!r}: the latest acknowledged is at {offset}, and there is none"
            elif not is_delete and seen.get(key, offset) < offset and not self._may_be_deleted(key, offset):
                yield f"key {key!r}: the latest acknowledged is at {offset}, the record at {seen[key]} is back"

    def returned(self, pairs: Mapping[int, Pair], due: Mapping[bytes, int]) -> dict[bytes, str]:
        """Deleted keys that a complete read shows with an older value. If the read is not of one moment, a tombstone
        may have gone after the value was read: then the next read does not show the value either."""
        seen = _latest_of(pairs)
        return {
            key: f"key {key!r}: the latest acknowledged is at {offset}, the record at {seen[key]} is back"
            for key, offset in due.items()
            if seen.get(key, offset) < offset and (self.acked[offset][1] is None or self._may_be_deleted(key, offset))
        }

    def _may_be_deleted(self, key: bytes, offset: int) -> bool:
        return self._unanswered[key] > 0 or self._latest_delete.get(key, -1) > offset


def _latest_of(pairs: Mapping[int, Pair]) -> dict[bytes, int]:
    latest: dict[bytes, int] = {}
    for offset, (key, _) in pairs.items():
        latest[key] = max(offset, latest.get(key, -1))
    return latest
