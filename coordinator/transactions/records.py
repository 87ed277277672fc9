"""The records of `__transaction_state`: all that is known of one transactional id is one record. Pure.

    key    msgpack [TRANSACTION, transactional id]
    value  msgpack [TRANSACTION, version, {field id: value}], or null (a tombstone): the id is forgotten

A field id is the position of the field in `Transaction` and never changes: a field is only ever added at the end, with
a default. A reader keeps fields that it does not know (`extra`) and skips kinds that it does not know. A set of
partitions is packed as in the records of groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any

import msgpack

from tidelog.coordinator.records import (
    DECISION_BYTES_MAX,
    NO_PARTITIONS,
    Extra,
    Partitions,
    pack_partitions,
    unpack_partitions,
)
from tidelog.log import batch
from tidelog.log.batch_header import Buffer
from tidelog.model.errors import CorruptStateError, PolicyViolationError
from tidelog.model.ids import NO_TIMESTAMP

NO_EPOCH = -1
NO_PRODUCER = -1
NOBODY = NO_PRODUCER, NO_EPOCH
EPOCH_MAX = 32_767
"""The highest epoch, which only markers carry. A producer id whose owner would reach it is replaced by a new one."""
MEMBER_EPOCH = 0
"""Of every member of a joint transaction: it has a producer id of its own, once."""

CACHED_PARTITIONS_MAX = 16
"""Members with more are packed again with each record: the cache would take too much memory."""

ProducerIdentity = tuple[int, int]
"""(producer id, epoch)."""


class Kind(IntEnum):
    NOTHING = 0
    """The key of a no-op record; it never has a value."""
    TRANSACTION = 1


class Status(IntEnum):
    """Kafka's codes."""

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5


class Cause(IntEnum):
    """Who ended the last transaction."""

    OWNER = 0
    TIMEOUT = 1
    FENCED = 2
    """Another instance has initialized the id."""
    OPERATOR = 3


@dataclass(frozen=True, slots=True)
class Member:
    """A process that writes under a producer id of its own in the owner's transaction, in epoch `MEMBER_EPOCH`."""

    producer_id: int
    label: str = ""
    partitions: Partitions = NO_PARTITIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """A transactional id: its producer, and its transaction that is open, ending, or was the last one."""

    producer_id: int
    epoch: int = 0
    """Of the batches of the open transaction; while the status is PREPARE, that of its markers. The owner uses it if
    there is no `next_producer_id`."""
    status: int = Status.EMPTY
    timeout_ms: int = 0
    updated_ms: int = NO_TIMESTAMP
    started_ms: int = NO_TIMESTAMP
    prepared_ms: int = NO_TIMESTAMP
    """Since when the owner has prepared the open transaction: it outlives the owner."""
    partitions: Partitions = NO_PARTITIONS
    """Of the owner's batches and offsets. Empty once the transaction is complete."""
    members: tuple[Member, ...] = ()
    committed: tuple[int, ...] = ()
    """Producer ids of the members whose records commit, while PREPARE_COMMIT. Sorted."""
    last_token: bytes = b""
    """Of the last transaction that was committed with one."""
    previous_producer_id: int = NO_PRODUCER
    """Of the owner before its last change of producer id or epoch: a repeat of the request that made it is recognized.
    Unset if a new instance made it."""
    previous_epoch: int = NO_EPOCH
    next_producer_id: int = NO_PRODUCER
    """With `next_epoch`, what the owner uses if that is not (`producer_id`, `epoch`): another instance has taken over a
    prepared transaction, or the epoch is exhausted. Replaces them when the transaction is complete."""
    version: int = 2
    """Of the protocol of the transaction: in version 1, its end does not raise the epoch. 2 if it did all the same."""
    cause: int = Cause.OWNER
    number: int = 0
    """Counts the transactions of this id, the open one included."""
    next_epoch: int = NO_EPOCH
    previous_outcome: int = Status.EMPTY
    """COMPLETE_COMMIT or COMPLETE_ABORT if the end of a transaction made the last change of the owner's epoch."""
    extra: Extra = ()
    """Fields of a newer version, kept as they came."""

    @property
    def is_open(self) -> bool:
        return self.status == Status.ONGOING

    @property
    def is_ending(self) -> bool:
        """Whether the outcome is decided, and markers are still to be written."""
        return self.status in (Status.PREPARE_COMMIT, Status.PREPARE_ABORT)

    @property
    def is_prepared(self) -> bool:
        return self.is_open and self.prepared_ms != NO_TIMESTAMP

    @property
    def owner(self) -> ProducerIdentity:
        """What the owner uses next."""
        if self.next_producer_id != NO_PRODUCER:
            return self.next_producer_id, self.next_epoch
        return self.producer_id, self.epoch

    @property
    def previous(self) -> ProducerIdentity:
        return self.previous_producer_id, self.previous_epoch


@dataclass(frozen=True, slots=True)
class TransactionRecord:
    """Sets what is known of an id; None forgets it."""

    transactional_id: str
    value: Transaction | None


_FIELDS = [field.name for field in dataclasses.fields(Transaction) if field.name != "extra"]
_DEFAULTS = {
    field.name: field.default for field in dataclasses.fields(Transaction) if field.default is not dataclasses.MISSING
}


def encode_key(transactional_id: str) -> bytes:
    return bytes(msgpack.packb([int(Kind.TRANSACTION), transactional_id]))


def _pack_member(member: Member) -> tuple[int, str, list[Any]]:
    return member.producer_id, member.label, pack_partitions(member.partitions)


_pack_cached = lru_cache(maxsize=1 << 14)(_pack_member)
"""A record has all members, and most of them did not change."""


def _pack(name: str, value: Any) -> Any:
    if name == "partitions":
        return pack_partitions(value)
    if name == "members":
        return [
            (_pack_cached if len(member.partitions) <= CACHED_PARTITIONS_MAX else _pack_member)(member)
            for member in value
        ]
    return list(value) if isinstance(value, tuple) else value


def encode_value(value: Transaction) -> bytes:
    fields: dict[int, Any] = {}
    for number, name in enumerate(_FIELDS):
        field = getattr(value, name)
        if name not in _DEFAULTS or field != _DEFAULTS[name]:
            fields[number] = _pack(name, int(field) if isinstance(field, IntEnum) else field)
    fields.update(value.extra)
    return bytes(msgpack.packb([int(Kind.TRANSACTION), 0, fields]))


def _unpack(name: str, raw: Any) -> Any:
    if name == "partitions":
        return unpack_partitions(raw)
    if name == "members":
        return tuple(Member(_int(pid), _text(label), unpack_partitions(parts)) for pid, label, parts in raw)
    if name == "committed":
        return tuple(map(_int, raw))
    if name == "last_token":
        if not isinstance(raw, bytes):
            raise ValueError("a token is bytes")
        return raw
    return _int(raw)


def _int(value: Any) -> int:
    if not isinstance(value, int):
        raise ValueError(f"{value!r} is no number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def decode_record(raw_key: bytes | None, raw_value: bytes | None) -> TransactionRecord | None:
    """Return the record; None for a no-op, and for a kind that this version does not know."""
    if raw_key is None:
        raise CorruptStateError("a transaction record has no key")
    try:
        kind, *parts = msgpack.unpackb(raw_key, use_list=False)
        if _int(kind) != Kind.TRANSACTION:
            return None
        (transactional_id,) = parts
        value = None if raw_value is None else _decode_value(raw_value)
        return TransactionRecord(_text(transactional_id), value)
    except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
        raise CorruptStateError(f"a transaction record cannot be read: {error}") from error


def _decode_value(data: bytes) -> Transaction:
    kind, _, fields = msgpack.unpackb(data, use_list=False, strict_map_key=False)
    if kind != Kind.TRANSACTION:
        raise ValueError(f"kind {kind!r} stands under the key of a transaction")
    known: dict[str, Any] = {}
    extra: list[tuple[int, Any]] = []
    for number, raw in fields.items():
        if 0 <= _int(number) < len(_FIELDS):
            known[_FIELDS[number]] = _unpack(_FIELDS[number], raw)
        else:
            extra.append((number, raw))
    value = Transaction(**known, extra=tuple(sorted(extra, key=lambda pair: pair[0])))
    Status(value.status), Cause(value.cause), Status(value.previous_outcome)  # raise ValueError for unknown codes
    return value


# ---- Decisions and batches


@dataclass(frozen=True, slots=True)
class Decision:
    """The records of one request, which commit together; created by `decision`."""

    records: tuple[TransactionRecord, ...]
    now_ms: int
    rows: tuple[tuple[bytes, bytes | None], ...]
    """The records, encoded."""
    size: int
    """Bytes of the rows."""


def decision(records: Iterable[TransactionRecord], now_ms: int = NO_TIMESTAMP) -> Decision:
    """Encode the records; `PolicyViolationError` if one batch cannot hold them."""
    records = tuple(records)
    rows = tuple(
        (encode_key(record.transactional_id), None if record.value is None else encode_value(record.value))
        for record in records
    )
    size = sum(len(key) + (0 if value is None else len(value)) + 16 for key, value in rows)
    if size > DECISION_BYTES_MAX:
        raise PolicyViolationError(f"a transaction of {size} bytes is over the limit of {DECISION_BYTES_MAX}")
    return Decision(records, now_ms, rows, size)


def empty_entry() -> bytes:
    """A batch that changes nothing."""
    return batch.encode_columns([NO_TIMESTAMP], [bytes(msgpack.packb([int(Kind.NOTHING)]))], [None])


def decode_batch(data: Buffer, position: int = 0) -> tuple[TransactionRecord, ...]:
    """Return the records of the batch at `position` that this version knows; none of a control batch.

    `CorruptStateError` or an error of the batch for bytes that are neither.
    """
    if batch.read_header(data, position).is_control:
        return ()
    columns = batch.decode_columns(data, position, decompressed_bytes_max=2 * DECISION_BYTES_MAX)
    decoded = map(decode_record, columns.keys, columns.values)
    return tuple(record for record in decoded if record is not None)
