"""Digests of a range of a log, to compare replicas (decision 31). Pure.

The unit of a digest is a batch, of a log without gaps: its bytes as stored, with base offset and leader epoch. With
`by_record` it is a record: two replicas of a compacted log are cleaned at different times, so only records that both
keep can be compared.

    unit      BLAKE2b of 16 bytes
    range     sum of its units modulo 2^128: ranges that follow each other can be added

A unit belongs to the range that has its last offset. A range ends where the leader epoch changes, and one of which the
units are listed after `UNITS_MAX` of them, also within a batch of records. Sums find accidents;
they do not resist somebody who chooses the contents.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import Struct

from tidelog.log.batch import BatchHeader, check_batch, decode_columns
from tidelog.log.log_scan import BATCH_BYTES_MAX
from tidelog.model.errors import TidelogError

DIGEST_BYTES = 16
UNITS_PER_PART = 2_000
UNITS_MAX = 20_000
"""Of one list: 560 KB."""
_MODULUS = 1 << (8 * DIGEST_BYTES)
_UNIT = Struct(f">qi{DIGEST_BYTES}s")
_RECORD = Struct(">qqiqhh")
_SIZE = Struct(">i")
_STABLE_ATTRIBUTES = 0x30
"""Transactional and control: cleaning changes the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestQuery:
    """Digest the range [start, end) of one replica; with `start` -1 describe the replica only.

    `end` -1: up to the high watermark. `is_suspect`: another replica differs here, so check this one on the disk, too.
    """

    start: int = -1
    end: int = -1
    by_record: bool = False
    lists_units: bool = False
    is_suspect: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDigest:
    """One replica, and the digest of [start, `reached`) of it. Brokers send it to each other: new fields are added at
    the end, with a default.

    `reached` is below the end that was asked for if the range or the list is long, if the epoch changes there, or if
    `fault` says why the bytes there cannot be read. `generation` changes when the log is truncated or reset.
    """

    broker: int
    leader: int
    leader_epoch: int
    follows: bool
    """The leader has confirmed that this log is a prefix of its own. True for the leader."""
    start_offset: int
    high_watermark: int
    generation: int
    has_gaps: bool
    damage: str = ""
    """The log is known to be damaged, and waits for its repair."""
    reached: int = -1
    epoch: int = -1
    count: int = 0
    size: int = 0
    digest: bytes = b""
    fault: str = ""
    units: tuple[bytes, ...] = ()
    """With `lists_units`, up to `UNITS_MAX`; see `decode_units`. In parts that fit a message between nodes."""


@dataclass(slots=True)
class RangeSum:
    """The digest of a range so far, up to `reached`."""

    reached: int
    epoch: int = -1
    count: int = 0
    size: int = 0
    total: int = 0
    fault: str = ""
    is_over: bool = False
    """The range ends here: by a fault, or since the epoch changes."""
    units: bytearray = field(default_factory=bytearray)

    @property
    def units_left(self) -> int:
        """Units that fit into the list."""
        return UNITS_MAX - len(self.units) // _UNIT.size

    @property
    def digest(self) -> bytes:
        return self.total.to_bytes(DIGEST_BYTES, "big")

    def add(self, other: "RangeSum") -> None:
        """Append the range that follows."""
        if self.count and other.count and other.epoch != self.epoch:
            self.is_over = True
            return
        if self.units and self.units_left < len(other.units) // _UNIT.size:
            self.is_over = True  # the next request lists them
            return
        self.epoch = other.epoch if other.count else self.epoch
        self.reached, self.fault, self.is_over = other.reached, other.fault, other.is_over
        self.count += other.count
        self.size += other.size
        self.total = (self.total + other.total) % _MODULUS
        self.units += other.units

    def add_unit(self, offset: int, epoch: int, digest: bytes, *, is_listed: bool) -> None:
        self.count += 1
        self.total = (self.total + int.from_bytes(digest, "big")) % _MODULUS
        if is_listed:
            self.units += _UNIT.pack(offset, epoch, digest)


def digest_batches(data: bytes, query: DigestQuery, next_offset: int, bytes_max: int) -> RangeSum:
    """Digest the batches in `data`, which were read from `query.start` on and end below `query.end`.

    `next_offset` is where the batches after `data` begin. Runs in a helper process.
    """
    result = RangeSum(query.start)
    position = 0
    view = memoryview(data)
    while position < len(data):
        try:
            header = check_batch(data, position, size_max=BATCH_BYTES_MAX)
            _check_place(header, result.reached, query)
            if result.count and header.leader_epoch != result.epoch:
                result.is_over = True
                return result
            batch = view[position : position + header.size]
            cut = _digest_batch(result, header, batch, query, bytes_max)
            if cut is not None:
                result.epoch, result.reached, result.is_over = header.leader_epoch, cut, True
                return result
        except TidelogError as error:
            result.fault, result.is_over = f"the batch at offset {result.reached}: {error}", True
            return result
        result.epoch = header.leader_epoch
        result.size += header.size
        result.reached = header.next_offset
        position += header.size
    result.reached = max(result.reached, next_offset)
    return result


def _check_place(header: BatchHeader, expected: int, query: DigestQuery) -> None:
    """No CRC covers the base offset."""
    is_first = expected == query.start
    fits = header.base_offset >= expected if query.by_record else header.base_offset == expected
    if not fits and not (is_first and header.base_offset <= expected <= header.last_offset):
        raise _MisplacedError(f"it says that it begins at {header.base_offset}")


class _MisplacedError(TidelogError):
    pass


def _digest_batch(
    result: RangeSum, header: BatchHeader, batch: memoryview, query: DigestQuery, bytes_max: int
) -> int | None:
    """Add a batch; return the offset of the first unit that the list has no place for."""
    listed = query.lists_units
    if listed and not result.units_left:
        return result.reached
    if not query.by_record:
        digest = blake2b(batch, digest_size=DIGEST_BYTES).digest()
        result.add_unit(header.base_offset, header.leader_epoch, digest, is_listed=listed)
        return None
    for offset, digest in list(_records(header, batch, bytes_max)):
        if offset >= query.start:
            if listed and not result.units_left:
                return offset
            result.add_unit(offset, header.leader_epoch, digest, is_listed=listed)
    return None


def _records(header: BatchHeader, batch: memoryview, bytes_max: int) -> Iterator[tuple[int, bytes]]:
    columns = decode_columns(batch, decompressed_bytes_max=bytes_max)
    blocks = columns.header_blocks
    headers = [None] * len(columns) if blocks is None else blocks.to_list()
    keys, values = columns.keys.to_list(), columns.values.to_list()
    rows = zip(columns.offsets, columns.timestamps, keys, values, headers, strict=True)
    attributes = header.attributes & _STABLE_ATTRIBUTES
    for offset, timestamp, key, value, block in rows:
        hashed = blake2b(digest_size=DIGEST_BYTES)
        hashed.update(
            _RECORD.pack(offset, timestamp, header.leader_epoch, header.producer_id, header.producer_epoch, attributes)
        )
        for part in (key, value, block):
            hashed.update(_SIZE.pack(-1 if part is None else len(part)))
            hashed.update(part or b"")
        yield offset, hashed.digest()


@dataclass(frozen=True, slots=True)
class Unit:
    offset: int
    """The base offset of a batch, or the offset of a record."""
    epoch: int
    digest: bytes


def unit_parts(units: bytes | bytearray) -> tuple[bytes, ...]:
    size = UNITS_PER_PART * _UNIT.size
    return tuple(bytes(units[at : at + size]) for at in range(0, len(units), size))


def decode_units(parts: Sequence[bytes]) -> list[Unit]:
    return [Unit(*row) for part in parts for row in _UNIT.iter_unpack(part)]
