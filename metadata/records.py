"""The records of `__cluster_metadata`; the cluster's state changes only by them. Pure.

One Raft entry holds one decision: a list of records that apply together. Encoded, a record is msgpack

    [type: int, version: int, {field id: value}]

Field ids are small ints, fixed by the order of the fields of a class (fields are only added at the end, with a
default). A reader keeps unknown fields (`extra`) and writes them back, and keeps records of unknown types as
`UnknownRecord`, so that an older and a newer node can share a log and a snapshot. New types are written only when
`metadata.version` allows them.

A decision that is too large for one entry is written between `BeginDecision` and `EndDecision`: nothing of it applies
before the end, and a new leader that finds an open one aborts it with `AbortDecision`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, TypeVar, dataclass_transform
from uuid import UUID

import msgpack

from tidelog.model.errors import CorruptStateError
from tidelog.model.steps import Steps, run_steps

NO_LEADER = -1
DECISION_BYTES_MAX = 8 << 20
RECORDS_MAX = 1 << 20
RECORDS_PER_STEP = 250
"""Records decoded, applied or compared in one turn of the event loop: some 5 ms."""

UnknownFields = tuple[tuple[int, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A metadata record; subclasses add fields, all of msgpack's types, UUIDs, or tuples of these."""

    TYPE: ClassVar[int] = -1
    VERSION: ClassVar[int] = 0

    extra: UnknownFields = ()
    """Fields of a newer version, kept unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownRecord(Record):
    """A record of an unknown type, kept unchanged."""

    type: int
    version: int
    fields: bytes


_TYPES: dict[int, type[Record]] = {}
R = TypeVar("R", bound=Record)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def _record(number: int) -> Callable[[type[R]], type[R]]:
    """A dataclass for the records of this type."""

    def register(cls: type[R]) -> type[R]:
        assert number not in _TYPES, "record types are used once, for ever"
        made = dataclass(frozen=True, slots=True, kw_only=True)(cls)
        made.TYPE = number
        _TYPES[number] = made
        return made

    return register


@_record(0)
class NoOp(Record):
    """Changes nothing; keeps the log moving so that tails can distinguish silence from being up to date."""


@_record(1)
class BeginDecision(Record):
    name: str = ""


@_record(2)
class EndDecision(Record):
    pass


@_record(3)
class AbortDecision(Record):
    reason: str = ""


@_record(4)
class FeatureLevel(Record):
    """A feature is at this level from here on; level 0 removes it."""

    name: str
    level: int


@_record(5)
class RegisterBroker(Record):
    """A new incarnation of a broker. It begins fenced; its epoch rises with every incarnation."""

    broker: int
    broker_epoch: int
    incarnation: UUID
    endpoints: tuple[tuple[str, str, str, int], ...] = ()
    """(listener, security protocol, host, port)."""
    rack: str | None = None
    directories: tuple[UUID, ...] = ()
    features: tuple[tuple[str, int, int], ...] = ()
    """(name, lowest level, highest level) that it supports."""


@_record(6)
class UnregisterBroker(Record):
    broker: int
    broker_epoch: int


@_record(7)
class ChangeBroker(Record):
    """None leaves a field unchanged."""

    broker: int
    broker_epoch: int
    fenced: bool | None = None
    in_controlled_shutdown: bool | None = None
    draining: bool | None = None
    offline: tuple[UUID, ...] | None = None
    """Log directories that failed or stall: replicas there neither lead nor are in sync."""
    full: tuple[UUID, ...] | None = None
    """Log directories without space for appends: readable."""


@_record(8)
class CreateTopic(Record):
    topic_id: UUID
    name: str


@_record(9)
class RemoveTopic(Record):
    """The topic and its partitions, configs included."""

    topic_id: UUID


@_record(10)
class CreatePartition(Record):
    topic_id: UUID
    partition: int
    replicas: tuple[int, ...]
    directories: tuple[UUID, ...]
    """The log directory of each replica; the nil UUID until the broker reports it."""
    isr: tuple[int, ...]
    leader: int
    leader_epoch: int = 0
    partition_epoch: int = 0
    eligible: tuple[int, ...] = ()
    """Eligible leader replicas: left the ISR while it was smaller than min.insync.replicas, so they hold everything."""
    adding: tuple[int, ...] = ()
    removing: tuple[int, ...] = ()
    start_offset: int = 0
    target: tuple[int, ...] = ()
    """The target of a reassignment, in order; until it completes, `replicas` is the old list followed by `adding`."""
    recovering: tuple[int, ...] = ()
    """Replicas whose log is not open yet in this incarnation of their broker: neither in sync nor electable."""
    unclean_epoch: int = -1
    """The leader epoch of the last unclean election; -1: there was none."""


@_record(11)
class ChangePartition(Record):
    """None leaves a field unchanged. Every change raises the partition epoch by one; the leader epoch is explicit."""

    topic_id: UUID
    partition: int
    replicas: tuple[int, ...] | None = None
    directories: tuple[UUID, ...] | None = None
    isr: tuple[int, ...] | None = None
    eligible: tuple[int, ...] | None = None
    leader: int | None = None
    leader_epoch: int | None = None
    adding: tuple[int, ...] | None = None
    removing: tuple[int, ...] | None = None
    start_offset: int | None = None
    target: tuple[int, ...] | None = None
    recovering: tuple[int, ...] | None = None
    unclean_epoch: int | None = None


@_record(12)
class SetConfig(Record):
    """One key of one resource; None restores the default."""

    resource_type: str
    """`cluster`, `broker` or `topic`."""
    resource: str
    key: str
    value: str | None


@_record(13)
class SetQuota(Record):
    entity: tuple[tuple[str, str | None], ...]
    """(`user` | `client-id` | `ip`, name or None for the default), sorted."""
    key: str
    value: float | None


@_record(14)
class SetUser(Record):
    """A SCRAM credential; an empty salt removes it."""

    user: str
    mechanism: str
    salt: bytes = b""
    stored_key: bytes = b""
    server_key: bytes = b""
    iterations: int = 0


@_record(15)
class CreateAcl(Record):
    acl_id: UUID
    resource_type: str
    resource: str
    pattern_type: str
    principal: str
    host: str
    operation: str
    permission: str


@_record(16)
class RemoveAcl(Record):
    acl_id: UUID


@_record(17)
class AllocateProducerIds(Record):
    """Producer ids below `next_producer_id` are allocated; the last block went to this broker."""

    broker: int
    broker_epoch: int
    next_producer_id: int


# Coding.


def _names(cls: type[Record]) -> list[str]:
    return [field.name for field in dataclasses.fields(cls) if field.name != "extra"]


_FIELDS: dict[type[Record], list[str]] = {cls: _names(cls) for cls in _TYPES.values()}
_DEFAULTS: dict[type[Record], dict[str, Any]] = {
    cls: {f.name: f.default for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING}
    for cls in _TYPES.values()
}
_UUID_EXT = 1


@lru_cache(maxsize=1 << 16)
def _packed(value: UUID) -> msgpack.ExtType:
    return msgpack.ExtType(_UUID_EXT, value.bytes)


def _pack_default(value: object) -> msgpack.ExtType:
    if isinstance(value, UUID):
        return _packed(value)
    raise TypeError(f"a record cannot hold {type(value).__name__}")


@lru_cache(maxsize=1 << 16)
def _uuid(data: bytes) -> UUID:
    # Equal ids share one object: 100,000 partitions use the same few directories and topics.
    return UUID(bytes=data)


def _unpack_ext(code: int, data: bytes) -> object:
    if code == _UUID_EXT and len(data) == 16:
        return _uuid(data)
    raise ValueError(f"unknown extension {code}")


def _as_list(record: Record) -> list[Any]:
    if isinstance(record, UnknownRecord):
        return [record.type, record.version, _unpack(record.fields)]
    cls = type(record)
    defaults = _DEFAULTS[cls]
    fields: dict[int, Any] = {}
    for number, name in enumerate(_FIELDS[cls]):
        value = getattr(record, name)
        if name not in defaults or value != defaults[name]:
            fields[number] = value
    fields.update(record.extra)
    return [cls.TYPE, cls.VERSION, fields]


def _unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, use_list=False, strict_map_key=False, ext_hook=_unpack_ext)


def encode_records(records: Iterable[Record]) -> bytes:
    """Encodes one decision."""
    return bytes(msgpack.packb([_as_list(record) for record in records], default=_pack_default))


def decode_records(data: bytes) -> tuple[Record, ...]:
    """Decodes the decision of one entry; raises `CorruptStateError`."""
    return run_steps(decode_steps(data))


def decode_steps(data: bytes) -> Steps[tuple[Record, ...]]:
    """`decode_records`, in steps of `RECORDS_PER_STEP`."""
    try:
        raw = _unpack(data)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CorruptStateError(f"metadata records are unreadable: {error}") from error
    if not isinstance(raw, tuple) or len(raw) > RECORDS_MAX:
        raise CorruptStateError("a metadata entry is a list of records")
    records: list[Record] = []
    for at in range(0, len(raw), RECORDS_PER_STEP):
        if at:
            yield
        records += map(_from_raw, raw[at : at + RECORDS_PER_STEP])
    return tuple(records)


def _from_raw(item: Any) -> Record:
    if not (
        isinstance(item, tuple)
        and len(item) == 3
        and isinstance(item[0], int)
        and isinstance(item[1], int)
        and isinstance(item[2], dict)
    ):
        raise CorruptStateError("a metadata record is [type, version, fields]")
    number, version, fields = item
    cls = _TYPES.get(number)
    if cls is None:
        return UnknownRecord(type=number, version=version, fields=msgpack.packb(fields, default=_pack_default))
    names = _FIELDS[cls]
    known: dict[str, Any] = {}
    extra: list[tuple[int, Any]] = []
    for key, value in fields.items():
        if isinstance(key, int) and 0 <= key < len(names):
            known[names[key]] = value
        else:
            extra.append((key, value))
    if extra:
        known["extra"] = tuple(sorted(extra, key=lambda pair: str(pair[0])))
    try:
        return cls(**known)
    except TypeError as error:
        raise CorruptStateError(f"a {cls.__name__} record lacks fields: {error}") from error


def split_decision(records: Sequence[Record], *, name: str, bytes_max: int = DECISION_BYTES_MAX) -> list[bytes]:
    """Returns the entries of one decision: one if it fits, else parts between begin and end."""
    whole = encode_records(records)
    if len(whole) <= bytes_max:
        return [whole]
    entries = [encode_records([BeginDecision(name=name)])]
    part: list[Record] = []
    size = 0
    for record in records:
        length = len(encode_records([record]))
        if part and size + length > bytes_max:
            entries.append(encode_records(part))
            part, size = [], 0
        part.append(record)
        size += length
    entries.append(encode_records(part))
    entries.append(encode_records([EndDecision()]))
    return entries
