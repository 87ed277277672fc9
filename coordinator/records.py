"""The records of `__consumer_offsets`: the only way in which the state of groups changes. Pure.

A record has a key, so that the topic compacts: the state is the last value of each key. On disk:

    key    msgpack [kind, group]                      GROUP, CLASSIC
                   [kind, group, member id]           MEMBER, TARGET, CURRENT
                   [kind, group, topic id, partition] OFFSET
                   [kind, group, topic id, partition, producer id] PENDING
                   [kind, producer id]                FENCE
    value  msgpack [kind, version, {field id: value}], or null (a tombstone): the key is deleted

A field id is the position of the field in its class and never changes: a field is only ever added at the end, with a
default. A reader keeps fields that it does not know (`extra`), and skips kinds that it does not know, so that an older
and a newer broker can share a log. A set of partitions is [[topic id, [partition, ...]], ...], sorted.

The values are the state itself (`state.py`): nothing has to be translated on replay.

A `Decision` is what one request changes. All its records are in one record batch, so that they commit atomically; a
batch may hold several whole decisions. `DECISION_BYTES_MAX` bounds one as it is on disk (the log takes 1 MiB of a
coordinator), `RECORDS_BYTES_MAX` before compression.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any, ClassVar, Protocol
from uuid import UUID

import msgpack

from tidelog.log import batch
from tidelog.log.batch_header import Buffer, Codec
from tidelog.model.errors import CorruptStateError, PolicyViolationError
from tidelog.model.ids import NO_TIMESTAMP, PartitionId, TopicId

DECISION_BYTES_MAX = 900 << 10
RECORDS_BYTES_MAX = 32 << 20
_COMPRESS_FROM_BYTES = 16 << 10

Extra = tuple[tuple[int, Any], ...]
Partitions = frozenset[PartitionId]
NO_PARTITIONS: Partitions = frozenset()


class Kind(IntEnum):
    NOTHING = 0
    """The key of a no-op record; it never has a value."""
    GROUP = 1
    MEMBER = 2
    TARGET = 3
    CURRENT = 4
    OFFSET = 5
    CLASSIC = 6
    PENDING = 7
    FENCE = 8


@dataclass(frozen=True, slots=True)
class Key:
    kind: int
    group: str = ""
    """Empty in the key of a fence, which belongs to no group."""
    member_id: str = ""
    partition: PartitionId | None = None
    producer_id: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    KIND: ClassVar[Kind] = Kind.NOTHING
    VERSION: ClassVar[int] = 0

    extra: Extra = ()
    """Fields of a newer version, kept as they came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupValue(Value):
    """A consumer group as a whole. The epoch counts its changes; members reach it one by one."""

    KIND: ClassVar[Kind] = Kind.GROUP

    epoch: int
    assignor: str = "uniform"
    topics_digest: bytes = b""
    """Hash of the subscribed topics when the target was computed; differs if they changed since."""
    empty_since_ms: int = -1
    """-1 while it has members."""
    classic_protocol: str = ""
    """The protocol of the classic group that this group was; its classic members keep using it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberValue(Value):
    """The subscription and settings of a member of a consumer group."""

    KIND: ClassVar[Kind] = Kind.MEMBER

    instance_id: str = ""
    rack: str = ""
    client_id: str = ""
    client_host: str = ""
    topics: tuple[str, ...] = ()
    """Sorted, each once."""
    pattern: str = ""
    assignor: str = ""
    session_timeout_ms: int = 0
    rebalance_timeout_ms: int = 0
    is_streamed: bool = False
    """Whether it sends heartbeats on a stream."""
    classic_protocols: tuple[tuple[str, bytes], ...] = ()
    """Of a member that speaks the classic protocol: (name, its subscription under it), the preferred one first."""

    @property
    def is_classic(self) -> bool:
        return bool(self.classic_protocols)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetValue(Value):
    """The target assignment of a member in the group's epoch."""

    KIND: ClassVar[Kind] = Kind.TARGET

    partitions: Partitions = NO_PARTITIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentValue(Value):
    """The assignment that the coordinator last sent to a member."""

    KIND: ClassVar[Kind] = Kind.CURRENT

    epoch: int
    """The member's epoch: the group's epoch of its last assignment. -2: a static member that is away."""
    previous_epoch: int = -1
    """The epoch before: the member may still have it if the last answer was lost or is in flight."""
    assigned: Partitions = NO_PARTITIONS
    """Partitions assigned to it."""
    revoking: Partitions = NO_PARTITIONS
    """Partitions it must revoke and has not reported as revoked: it still owns them."""
    gained: Partitions = NO_PARTITIONS
    """Partitions of `assigned` that were added in this epoch."""
    is_joining: bool = False
    """The member has joined under this epoch and has not confirmed it, a classic one by its sync, another one by a
    heartbeat. Of a classic member `previous_epoch` is the last that it has synced."""
    declared: Partitions = NO_PARTITIONS
    """What a joining member said that it holds, of what is its own. The rest becomes free when it confirms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetValue(Value):
    KIND: ClassVar[Kind] = Kind.OFFSET

    offset: int
    leader_epoch: int = -1
    metadata: str = ""
    commit_ms: int = -1
    order: int = 0
    """Position among the writes for its partition, while an open transaction has a pending offset for it; 0: there was
    none. A pending offset replaces only what was written before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingValue(Value):
    """An offset that a transaction commits when it commits."""

    KIND: ClassVar[Kind] = Kind.PENDING

    offset: int
    epoch: int
    """Of the producer."""
    number: int
    """Of the transaction, by its coordinator."""
    leader_epoch: int = -1
    metadata: str = ""
    commit_ms: int = -1
    order: int = 0
    """As in `OffsetValue`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceValue(Value):
    """The last marker of a producer. What belongs to a transaction before it is rejected."""

    KIND: ClassVar[Kind] = Kind.FENCE

    epoch: int
    number: int = -1
    coordinator_epoch: int = -1
    updated_ms: int = -1


@dataclass(frozen=True, slots=True)
class ClassicMember:
    """A member of a classic group, as of a generation."""

    member_id: str
    instance_id: str = ""
    client_id: str = ""
    client_host: str = ""
    session_timeout_ms: int = 0
    rebalance_timeout_ms: int = 0
    metadata: bytes = b""
    """Its subscription under the chosen protocol, as it came."""
    assignment: bytes = b""
    epoch: int = -1
    """Of a member that comes from a consumer group: its member epoch there, until it joins the next generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassicValue(Value):
    """A generation of a classic group, as assigned by its leader; without members, the group is empty."""

    KIND: ClassVar[Kind] = Kind.CLASSIC

    generation: int
    protocol_type: str = ""
    protocol: str = ""
    leader: str = ""
    members: tuple[ClassicMember, ...] = ()
    empty_since_ms: int = -1
    topics: tuple[str, ...] = ()
    """Topics of the members' subscriptions, as far as the API server could parse them."""


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """Sets the value of `key`; None removes it."""

    key: Key
    value: Value | None


_KINDS = frozenset(int(kind) for kind in Kind)
_CLASSES: dict[int, type[Value]] = {
    cls.KIND: cls
    for cls in (
        GroupValue,
        MemberValue,
        TargetValue,
        CurrentValue,
        OffsetValue,
        ClassicValue,
        PendingValue,
        FenceValue,
    )
}
_FIELDS = {cls: [f.name for f in dataclasses.fields(cls) if f.name != "extra"] for cls in _CLASSES.values()}
_DEFAULTS = {
    cls: {f.name: f.default for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING}
    for cls in _CLASSES.values()
}
_CLASSIC_MEMBER_FIELDS = tuple(f.name for f in dataclasses.fields(ClassicMember))


def group_key(group: str) -> Key:
    return Key(Kind.GROUP, group)


def classic_key(group: str) -> Key:
    return Key(Kind.CLASSIC, group)


def member_key(kind: Kind, group: str, member_id: str) -> Key:
    return Key(kind, group, member_id)


def offset_key(group: str, partition: PartitionId) -> Key:
    return Key(Kind.OFFSET, group, "", partition)


def pending_key(group: str, producer_id: int, partition: PartitionId) -> Key:
    return Key(Kind.PENDING, group, "", partition, producer_id)


def fence_key(producer_id: int) -> Key:
    return Key(Kind.FENCE, producer_id=producer_id)


# ---- Partitions


def sort_key(partition: PartitionId) -> tuple[int, int]:
    """Return a sort key: the order of topic UUID and partition number, and cheaper to compare than a UUID."""
    return partition.topic_id.int, partition.partition


def sorted_partitions(partitions: Iterable[PartitionId]) -> list[PartitionId]:
    return sorted(partitions, key=sort_key)


def pack_partitions(partitions: Iterable[PartitionId]) -> list[Any]:
    topics: dict[TopicId, list[int]] = {}
    last: TopicId | None = None
    numbers: list[int] = []
    for each in partitions:
        # Most sets are of few topics: hashing a UUID for each partition would be most of the work.
        if each.topic_id is not last:
            last = each.topic_id
            numbers = topics.setdefault(last, [])
        numbers.append(each.partition)
    return [[topic.bytes, sorted(topics[topic])] for topic in sorted(topics, key=lambda topic: topic.int)]


@lru_cache(maxsize=1 << 14)
def _topic_id(data: bytes) -> TopicId:
    if not isinstance(data, bytes):  # `UUID` asserts it
        raise ValueError(f"{data!r} is no topic id")
    return TopicId(UUID(bytes=data))


def unpack_partitions(raw: Any) -> Partitions:
    return frozenset(PartitionId(_topic_id(topic), _int(number)) for topic, numbers in raw for number in numbers)


def _int(value: Any) -> int:
    if not isinstance(value, int):
        raise ValueError(f"{value!r} is no number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _producer(value: Any) -> int:
    if _int(value) < 0:
        raise ValueError(f"{value} is no producer id")
    return int(value)


# ---- Coding


def encode_key(key: Key) -> bytes:
    parts: list[Any] = [int(key.kind)]
    if key.kind not in (Kind.NOTHING, Kind.FENCE):
        parts.append(key.group)
    if key.partition is not None:
        parts += (key.partition.topic_id.bytes, key.partition.partition)
    if key.producer_id >= 0:
        parts.append(key.producer_id)
    if key.member_id:
        parts.append(key.member_id)
    return bytes(msgpack.packb(parts))


def decode_key(data: bytes) -> Key | None:
    """None: of a kind that this version does not know."""
    try:
        parts = msgpack.unpackb(data, use_list=False)
        if not isinstance(parts, tuple):
            raise ValueError("a list of parts is needed")
        kind = _int(parts[0])
        if kind not in _KINDS:
            return None
        if kind == Kind.OFFSET:
            _, group, topic, partition = parts
            return offset_key(_text(group), PartitionId(_topic_id(topic), _int(partition)))
        if kind == Kind.PENDING:
            _, group, topic, partition, producer_id = parts
            return pending_key(_text(group), _producer(producer_id), PartitionId(_topic_id(topic), _int(partition)))
        if kind == Kind.FENCE:
            _, producer_id = parts
            return fence_key(_producer(producer_id))
        group, member_id = (*parts[1:3], "", "")[:2]
        return Key(kind) if kind == Kind.NOTHING else Key(kind, _text(group), _text(member_id))
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise CorruptStateError(f"the key of a group record cannot be read: {error}") from error


def _pack_field(value: Any) -> Any:
    if isinstance(value, frozenset):
        return pack_partitions(value)
    if isinstance(value, tuple) and value and isinstance(value[0], ClassicMember):
        return [[getattr(member, name) for name in _CLASSIC_MEMBER_FIELDS] for member in value]
    return value


def encode_value(value: Value) -> bytes:
    cls = type(value)
    defaults = _DEFAULTS[cls]
    fields: dict[int, Any] = {}
    for number, name in enumerate(_FIELDS[cls]):
        field = getattr(value, name)
        if name not in defaults or field != defaults[name]:
            fields[number] = _pack_field(field)
    fields.update(value.extra)
    return bytes(msgpack.packb([int(cls.KIND), cls.VERSION, fields]))


def _unpack_field(cls: type[Value], name: str, raw: Any) -> Any:
    default = _DEFAULTS[cls].get(name)
    if isinstance(default, frozenset):
        return unpack_partitions(raw)
    if cls is ClassicValue and name == "members":
        return tuple(ClassicMember(*member[: len(_CLASSIC_MEMBER_FIELDS)]) for member in raw)
    if name == "classic_protocols":
        return tuple((str(protocol), bytes(metadata)) for protocol, metadata in raw)
    if default is not None and type(raw) is not type(default):
        raise ValueError(f"{name} is {type(raw).__name__}")
    return raw if default is not None else _int(raw)


def decode_value(data: bytes) -> Value | None:
    """None: of a kind that this version does not know."""
    try:
        kind, _, fields = msgpack.unpackb(data, use_list=False, strict_map_key=False)
        cls = _CLASSES.get(kind)
        if cls is None:
            return None
        names = _FIELDS[cls]
        known: dict[str, Any] = {}
        extra: list[tuple[int, Any]] = []
        for number, raw in fields.items():
            if 0 <= _int(number) < len(names):
                known[names[number]] = _unpack_field(cls, names[number], raw)
            else:
                extra.append((number, raw))
        return cls(**known, extra=tuple(sorted(extra, key=lambda pair: pair[0])))
    except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
        raise CorruptStateError(f"the value of a group record cannot be read: {error}") from error


# ---- Decisions and batches


class EncodedDecision(Protocol):
    """A `Decision`, of groups or of transactions."""

    @property
    def now_ms(self) -> int: ...

    @property
    def rows(self) -> Sequence[tuple[bytes, bytes | None]]: ...

    @property
    def size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Decision:
    """The records of one request, which commit together; created by `decision`."""

    records: tuple[GroupRecord, ...]
    now_ms: int
    rows: tuple[tuple[bytes, bytes | None], ...]
    """The records, encoded."""
    size: int
    """Bytes of the rows."""


def decision(records: Iterable[GroupRecord], now_ms: int = NO_TIMESTAMP) -> Decision:
    """Encodes the records; `PolicyViolationError` if one batch cannot hold them."""
    records = tuple(records)
    rows = tuple(
        (encode_key(record.key), None if record.value is None else encode_value(record.value)) for record in records
    )
    size = sum(len(key) + (0 if value is None else len(value)) + 16 for key, value in rows)
    if size > RECORDS_BYTES_MAX:
        raise PolicyViolationError(f"a change of {size} bytes is over the limit of {RECORDS_BYTES_MAX} of one decision")
    made = Decision(records, now_ms, rows, size)
    if size > DECISION_BYTES_MAX:
        packed = len(encode_batch([made]))
        if packed > DECISION_BYTES_MAX:
            raise PolicyViolationError(
                f"a change of {packed} bytes is over the limit of {DECISION_BYTES_MAX} of one decision"
            )
    return made


def encode_batch(decisions: Sequence[EncodedDecision]) -> bytes:
    """Encode decisions as one record batch without a producer; the log sets base offset and leader epoch."""
    size = sum(each.size for each in decisions)
    return batch.encode_columns(
        [each.now_ms for each in decisions for _ in each.rows],
        [key for each in decisions for key, _ in each.rows],
        [value for each in decisions for _, value in each.rows],
        codec=Codec.ZSTD if size >= _COMPRESS_FROM_BYTES else Codec.NONE,
    )


def encode_entries(decisions: Sequence[EncodedDecision]) -> list[bytes]:
    """Encode decisions in order into as few batches as the limit allows; a decision is never split."""
    entries: list[bytes] = []
    gathered: list[EncodedDecision] = []
    size = 0
    for each in decisions:
        if gathered and size + each.size > DECISION_BYTES_MAX:
            entries.append(encode_batch(gathered))
            gathered, size = [], 0
        gathered.append(each)
        size += each.size
    if gathered:
        entries.append(encode_batch(gathered))
    return entries


def empty_entry() -> bytes:
    """A batch that changes nothing."""
    return encode_batch([decision([GroupRecord(Key(Kind.NOTHING), None)])])


def decode_batch(data: Buffer, position: int = 0) -> tuple[GroupRecord, ...]:
    """The records of the batch at `position` that this version knows; none of a control batch.

    `CorruptStateError` or an error of the batch for bytes that are neither.
    """
    if batch.read_header(data, position).is_control:
        return ()
    columns = batch.decode_columns(data, position, decompressed_bytes_max=2 * RECORDS_BYTES_MAX)
    decoded = map(decode_record, columns.keys, columns.values)
    return tuple(record for record in decoded if record is not None)


def decode_record(raw_key: bytes | None, raw_value: bytes | None) -> GroupRecord | None:
    """Return the record; None for a no-op, and for a kind that this version does not know."""
    if raw_key is None:
        raise CorruptStateError("a group record has no key")
    key = decode_key(raw_key)
    if key is None or key.kind == Kind.NOTHING:
        return None
    value = None if raw_value is None else decode_value(raw_value)
    if raw_value is not None and value is None:
        return None
    if value is not None and key.kind != value.KIND:
        raise CorruptStateError(f"a {value.KIND.name} stands under the key of a {Kind(key.kind).name}")
    return GroupRecord(key, value)
