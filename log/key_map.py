"""Maps each key of the dirty part of a log to its newest offset, in bounded memory, and its file. Pure.

A key shorter than 16 bytes is stored as it is; a longer one as its 16-byte BLAKE2b digest. The lengths differ, so the
two kinds never collide, and two long keys collide far less often than a disk fails.

The map is filled batch by batch. When a batch would take it past its budget, the map ends before that batch, and the
cleaning ends there too. Keys of that batch that are in the map do no harm: a newer record of them does exist, past the
end, where nothing is removed. The first batch always fits, so that every cleaning makes progress: memory is bounded by
the budget plus the keys of one batch.

The helper process that cleans the next group of segments reads the file. The file never outlives the cleaning:

    entry   1 byte length, 16 bytes key (padded), 8 bytes offset          25 bytes, big endian
    ...
    end     8 bytes number of entries, 8 bytes end offset, 4 bytes CRC-32C of everything before

A wrong map would drop live records, hence the CRC.
"""

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import islice
from struct import Struct

from crc32c import crc32c

from tidelog.model.errors import CorruptStateError
from tidelog.model.ids import Offset

KEY_BYTES = 16
ENTRY_COST_BYTES = 192
"""Memory for an entry: the dict slot while it grows, the key and the offset as objects."""

_ENTRY = Struct(f">B{KEY_BYTES}sq")
_END = Struct(">qqI")
_CHUNK_ENTRIES = 40_000


class KeyMap:
    """`end` is exclusive: the map has every key of the dirty part below it, and nothing at or past it is removed."""

    __slots__ = ("_entries_max", "_offsets", "end", "is_full")

    def __init__(self, *, bytes_max: int, end: Offset) -> None:
        self._entries_max = bytes_max // ENTRY_COST_BYTES
        self._offsets: dict[bytes, int] = {}
        self.end = end
        self.is_full = False

    def __len__(self) -> int:
        return len(self._offsets)

    def add_batch(self, base_offset: Offset, keys: Iterable[bytes | None], offsets: Iterable[int]) -> bool:
        """Add the keys and offsets of a batch, in order. False: no space, and the map ends before this batch."""
        assert not self.is_full, "the map has ended"
        newest = self._offsets
        may_grow = not newest
        for key, offset in zip(keys, offsets, strict=True):
            if key is None:
                continue
            short = _short(key)
            if short not in newest and len(newest) >= self._entries_max and not may_grow:
                self.is_full = True
                self.end = base_offset
                return False
            newest[short] = offset
        return True

    def is_newest(self, key: bytes, offset: int) -> bool:
        """False if the map has a later record of this key."""
        return offset >= self._offsets.get(_short(key), -1)

    def to_chunks(self) -> Iterator[bytes]:
        """The bytes of the file, in chunks of about a megabyte."""
        crc = 0
        entries = iter(self._offsets.items())
        while chunk := b"".join(_ENTRY.pack(len(key), key, offset) for key, offset in islice(entries, _CHUNK_ENTRIES)):
            crc = crc32c(chunk, crc)
            yield chunk
        end = _END.pack(len(self._offsets), self.end, 0)[:-4]
        yield end + crc32c(end, crc).to_bytes(4, "big")

    @classmethod
    def from_bytes(cls, data: bytes, *, path: str = "") -> "KeyMap":
        """The map of a file's bytes; `CorruptStateError` if any bit is wrong."""
        body = len(data) - _END.size
        if body < 0 or body % _ENTRY.size or crc32c(memoryview(data)[:-4]) != int.from_bytes(data[-4:], "big"):
            raise CorruptStateError(f"key map {path} fails its CRC", path=path)
        count, end, _ = _END.unpack_from(data, body)
        if count * _ENTRY.size != body:
            raise CorruptStateError(f"key map {path} has {body // _ENTRY.size} entries, not {count}", path=path)
        key_map = cls(bytes_max=0, end=Offset(end))
        key_map._offsets = {key[:length]: offset for length, key, offset in _ENTRY.iter_unpack(memoryview(data)[:body])}
        key_map.is_full = True
        return key_map


def _short(key: bytes) -> bytes:
    return key if len(key) < KEY_BYTES else blake2b(key, digest_size=KEY_BYTES).digest()
