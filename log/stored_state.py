"""The state of a log in the state store: keys and values. Pure, apart from reading the store.

Keys are `log/<topic id: 16 bytes><partition: 4 bytes, big endian>/<field>`, values msgpack `[type, version, {fields}]`.

    field                   value                                   written
    mark                    RecoveryMark, the recovery point        checkpoint, close, recovery; before a truncation
    start                   log start offset                        when it advances, before files go
    epochs                  epoch history                           with the mark
    segment/<base>          SegmentInfo of a sealed segment         with the first mark past it; when it is cleaned
    producers/<offset>      snapshot of the producers               with a mark; those at rolls are kept for a while
    clean                   the log was closed at this offset       close; deleted by open, before the first write
    suspect                 durable end when a sync failed          at the failure; deleted when recovery truncated
    unsynced                recovery point when its sync failed     by recovery; deleted when it has written again
    damage                  good end, reason, segment               when found at run time; deleted by the repair
    intent                  a change of several files under way     before it; deleted when all files are in place
    gaps                    offsets may be missing between batches  when the log becomes compacted
    cleaner                 where the last cleaning stopped         after a cleaning; deleted by a truncation below
    page-cache              acknowledged records may be unsynced    before the first such one; deleted after a sync
    lineage                 leader's epochs, removed deletes        before batches are appended, before deletes go
    high-watermark          replication's, for the next start       checkpoint; lowered with every truncation
    moved                   a copy from another directory counts    by a move (`log_move`); deleted when renamed

Invariant: the store never describes bytes that are not on the device. A sealed segment's info and a producer snapshot
are committed with a mark at or past their end, and deleted with a mark that is lowered.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar
from uuid import UUID

import msgpack

from tidelog.log.epochs import EpochHistory, sound_entries
from tidelog.log.segment import RecoveryMark, SegmentInfo
from tidelog.model.errors import CorruptStateError
from tidelog.model.ids import Offset, PartitionId, Position, TopicId
from tidelog.world.store import StateStore

T = TypeVar("T")
Writes = dict[bytes, bytes | None]

VERSION = 0

LOG_KEYS = b"log/"
"""Prefix of all keys of logs."""
MARK = b"mark"
START = b"start"
EPOCHS = b"epochs"
SEGMENT = b"segment/"
PRODUCERS = b"producers/"
CLEAN = b"clean"
SUSPECT = b"suspect"
UNSYNCED = b"unsynced"
DAMAGE = b"damage"
INTENT = b"intent"
GAPS = b"gaps"
CLEANER = b"cleaner"
LINEAGE = b"lineage"
HIGH_WATERMARK = b"high-watermark"
PAGE_CACHE = b"page-cache"

RESET, SWAP = "reset", "swap"
"""Kinds of an `Intent`."""


def key_prefix(log_id: PartitionId) -> bytes:
    return LOG_KEYS + log_id.topic_id.bytes + log_id.partition.to_bytes(4, "big") + b"/"


def partition_of(key: bytes) -> PartitionId:
    """The log that a key belongs to."""
    at = len(LOG_KEYS)
    return PartitionId(TopicId(UUID(bytes=key[at : at + 16])), int.from_bytes(key[at + 16 : at + 20], "big"))


def field_of(key: bytes) -> bytes:
    return key[len(LOG_KEYS) + 21 :]


def segment_key(prefix: bytes, base_offset: int) -> bytes:
    return prefix + SEGMENT + base_offset.to_bytes(8, "big")


def producers_key(prefix: bytes, offset: int) -> bytes:
    return prefix + PRODUCERS + offset.to_bytes(8, "big")


@dataclass(frozen=True, slots=True)
class Intent:
    """A change of several files that has begun; recovery finishes it.

    `swap`: the files of `old` segments go, those of `new` (base offset, suffixes) are ready as `.swap`. `reset`: all
    files go.
    """

    kind: str
    old: tuple[int, ...] = ()
    new: tuple[tuple[int, tuple[str, ...]], ...] = ()


@dataclass(slots=True)
class StoredState:
    """The stored state of a log. `lost` names the fields that exist and cannot be read."""

    mark: RecoveryMark | None = None
    start: int | None = None
    epochs: EpochHistory | None = None
    segments: dict[int, SegmentInfo] = field(default_factory=dict)
    producers: dict[int, bytes] = field(default_factory=dict)
    clean: int | None = None
    suspect: int | None = None
    unsynced: int | None = None
    damage: tuple[int, str, int | None] | None = None
    """Good end, reason, base offset of the sealed segment that fails its checksum."""
    intent: Intent | None = None
    gaps: bool = False
    page_cache: bool = False
    high_watermark: int | None = None
    """-1 if it cannot be read."""
    lineage: tuple[int, int, tuple[tuple[int, int], ...]] | None = None
    """As `decode_lineage` returns it."""
    lost: list[str] = field(default_factory=list)

    def high_watermark_below(self, end: int) -> int:
        """The high watermark of a log that ends at `end`; 0 if none is stored."""
        return max(0, min(self.high_watermark or 0, end))


def encode(kind: str, fields: dict[str, object]) -> bytes:
    packed: bytes = msgpack.packb([kind, VERSION, fields])
    return packed


def decode(kind: str, data: bytes) -> dict[str, object]:
    """The fields of a value of this kind; raises `CorruptStateError` for any other value."""
    try:
        value = msgpack.unpackb(data)
        stored_kind, version, fields = value
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CorruptStateError(f"a stored {kind} cannot be read: {error}") from error
    if stored_kind != kind or version != VERSION or not isinstance(fields, dict):
        raise CorruptStateError(f"a stored {kind} is a {stored_kind} of version {version}")
    return fields


def encode_mark(mark: RecoveryMark) -> bytes:
    return encode("mark", {name: getattr(mark, name) for name in RecoveryMark.__slots__})


def decode_mark(data: bytes) -> RecoveryMark:
    fields = decode("mark", data)
    whole = {
        name: _int(fields, name, least=-1) for name in RecoveryMark.__slots__ if name not in ("crc", "has_producers")
    }
    mark = RecoveryMark(
        **whole,  # type: ignore[arg-type]
        crc=None if fields.get("crc") is None else _int(fields, "crc"),
        has_producers=bool(fields.get("has_producers")),
    )
    if mark.base_offset < 0 or mark.offset < mark.base_offset or mark.position < 0:
        raise CorruptStateError(f"a stored mark is invalid: {mark}")
    return mark


def encode_segment(info: SegmentInfo) -> bytes:
    return encode("segment", {name: getattr(info, name) for name in SegmentInfo.__slots__})


def decode_segment(data: bytes) -> SegmentInfo:
    fields = decode("segment", data)
    return SegmentInfo(
        base_offset=Offset(_int(fields, "base_offset")),
        next_offset=Offset(_int(fields, "next_offset")),
        size=Position(_int(fields, "size")),
        largest_timestamp=_int(fields, "largest_timestamp", least=-1),
        largest_offset=_int(fields, "largest_offset", least=-1),
        first_timestamp=_int(fields, "first_timestamp", least=-1),
        modified_ms=_int(fields, "modified_ms"),
        crc=None if fields.get("crc") is None else _int(fields, "crc"),
        aborted=_int(fields, "aborted"),
    )


def encode_epochs(epochs: EpochHistory) -> bytes:
    return encode("epochs", {"entries": [[int(epoch), int(start)] for epoch, start in epochs]})


def decode_epochs(data: bytes) -> EpochHistory:
    return EpochHistory(_pairs(decode("epochs", data).get("entries")))


def _pairs(entries: object) -> list[tuple[int, int]]:
    if not isinstance(entries, list) or not all(
        isinstance(entry, list) and len(entry) == 2 and all(isinstance(part, int) for part in entry)
        for entry in entries
    ):
        raise CorruptStateError("a stored epoch history is no list of pairs")
    pairs = [(int(epoch), int(start)) for epoch, start in entries]
    if not sound_entries(pairs):
        raise CorruptStateError(f"a stored epoch history is out of order: {pairs}")
    return pairs


def encode_lineage(deletes_end: int, leader_epoch: int, entries: tuple[tuple[int, int], ...]) -> bytes:
    pairs = [[int(epoch), int(start)] for epoch, start in entries]
    return encode("lineage", {"deletes_end": int(deletes_end), "leader_epoch": int(leader_epoch), "entries": pairs})


def decode_lineage(data: bytes) -> tuple[int, int, tuple[tuple[int, int], ...]]:
    fields = decode("lineage", data)
    leader_epoch = _int(fields, "leader_epoch", least=-1)
    return _int(fields, "deletes_end"), leader_epoch, tuple(_pairs(fields.get("entries")))


def encode_number(kind: str, value: int) -> bytes:
    return encode(kind, {"value": value})


def decode_number(kind: str, data: bytes) -> int:
    return _int(decode(kind, data), "value")


def encode_high_watermark(offset: int) -> bytes:
    return encode("high-watermark", {"offset": offset})


def _read_high_watermark(store: StateStore, prefix: bytes) -> int | None:
    try:
        data = store.get(prefix + HIGH_WATERMARK)
        return None if data is None else _int(decode("high-watermark", data), "offset")
    except CorruptStateError:
        return -1


def encode_damage(good_end: int, reason: str, segment: int | None = None) -> bytes:
    fields = {"good_end": good_end, "reason": reason}
    return encode("damage", fields if segment is None else {**fields, "segment": segment})


def decode_damage(data: bytes) -> tuple[int, str, int | None]:
    fields = decode("damage", data)
    segment = None if fields.get("segment") is None else _int(fields, "segment")
    return _int(fields, "good_end"), str(fields.get("reason")), segment


def encode_intent(intent: Intent) -> bytes:
    new = [[base, list(suffixes)] for base, suffixes in intent.new]
    return encode("intent", {"kind": intent.kind, "old": list(intent.old), "new": new})


def decode_intent(data: bytes) -> Intent:
    fields = decode("intent", data)
    try:
        new = tuple((int(base), tuple(str(suffix) for suffix in suffixes)) for base, suffixes in fields["new"])  # type: ignore[attr-defined]
        old = tuple(int(base) for base in fields["old"])  # type: ignore[attr-defined]
        return Intent(str(fields["kind"]), old, new)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptStateError(f"a stored intent cannot be read: {error}") from error


def load_state(store: StateStore, log_id: PartitionId) -> StoredState:
    """Read the stored state of a log.

    A value that fails its CRC is added to `lost`; recovery works without it.
    """
    prefix = key_prefix(log_id)
    state = StoredState()
    try:
        values = {key[len(prefix) :]: value for key, value in store.scan(prefix)}
    except CorruptStateError:
        values = _load_singly(store, prefix, state)

    def parse_field(name: bytes, parse: Callable[[bytes], T]) -> T | None:
        data = values.get(name)
        if data is None:
            return None
        try:
            return parse(data)
        except CorruptStateError:
            state.lost.append(name.decode())
            return None

    state.mark = parse_field(MARK, decode_mark)
    state.start = parse_field(START, lambda data: decode_number("start", data))
    state.epochs = parse_field(EPOCHS, decode_epochs)
    state.clean = parse_field(CLEAN, lambda data: decode_number("clean", data))
    state.suspect = parse_field(SUSPECT, lambda data: decode_number("suspect", data))
    state.unsynced = parse_field(UNSYNCED, lambda data: decode_number("unsynced", data))
    state.damage = parse_field(DAMAGE, decode_damage)
    state.intent = parse_field(INTENT, decode_intent)
    state.gaps = GAPS in values
    state.page_cache = PAGE_CACHE in values or PAGE_CACHE.decode() in state.lost
    state.high_watermark = _read_high_watermark(store, prefix)
    state.lineage = parse_field(LINEAGE, decode_lineage)
    for name, data in values.items():
        if name.startswith(SEGMENT):
            try:
                info = decode_segment(data)
                state.segments[info.base_offset] = info
            except CorruptStateError:
                state.lost.append("segment")
        elif name.startswith(PRODUCERS):
            state.producers[int.from_bytes(name[len(PRODUCERS) :], "big")] = data
    return state


def _load_singly(store: StateStore, prefix: bytes, state: StoredState) -> dict[bytes, bytes]:
    """A value of the log fails its CRC: read the others one by one."""
    values: dict[bytes, bytes] = {}
    for key in store.keys(prefix):
        name = key[len(prefix) :]
        try:
            value = store.get(key)
        except CorruptStateError:
            # The cleaner and the owner read theirs themselves.
            if name not in (CLEANER, HIGH_WATERMARK):
                state.lost.append(name.partition(b"/")[0].decode(errors="replace"))
            continue
        if value is not None:
            values[name] = value
    return values


def _int(fields: dict[str, object], name: str, *, least: int = 0) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise CorruptStateError(f"a stored {name} is {value!r}")
    return value
