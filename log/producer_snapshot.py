"""Producer state as bytes: msgpack `["producers", version, {fields}]`. Pure.

    producers   [[id, epoch, coordinator epoch, seen ms, newest offset, run, open offset or nil, [batch, ...]], ...]
                by id; a batch is [last sequence, last offset, offset delta, timestamp], at most five, oldest first
    pending     [[first offset, marker offset], ...] of ended transactions whose marker is not yet replicated
    claim       [offset, producer id] of the newest claim of the partition; missing if there is none

A newer version may add fields, and values at the end of a producer's row: fields are kept and written back, values are
skipped. A version with another meaning gets another number and is rejected. The caller protects the bytes with a CRC;
this module checks that they are consistent, so that a bug or bad bytes give one error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import msgpack

from tidelog.model.errors import CorruptStateError
from tidelog.model.ids import Offset, ProducerId

TYPE = "producers"
VERSION = 1
_ROW_VALUES = 8
_BATCH_VALUES = 4
_BATCHES_MAX = 5
_INT64_MAX = (1 << 63) - 1


class ProducerRow(NamedTuple):
    """One producer. `batches` are (last sequence, last offset, offset delta, timestamp), oldest first."""

    producer_id: ProducerId
    epoch: int
    coordinator_epoch: int
    seen_ms: int
    offset: Offset
    run: int
    open_offset: int | None
    batches: tuple[tuple[int, ...], ...]

    @property
    def last_sequence(self) -> int:
        return self.batches[-1][0] if self.batches else -1


@dataclass(frozen=True, slots=True)
class Snapshot:
    producers: list[ProducerRow]
    pending: list[tuple[int, int]]
    unknown_fields: dict[str, object]
    claim: tuple[int, int] | None = None


def encode_row(row: ProducerRow) -> bytes:
    data = msgpack.packb(row)
    assert isinstance(data, bytes)
    return data


def encode_snapshot(
    rows: Sequence[bytes],
    pending: Sequence[tuple[int, int]],
    unknown_fields: Mapping[str, object],
    *,
    claim: tuple[int, int] | None = None,
) -> bytes:
    """`rows` are those of `encode_row`, by id."""
    packer = msgpack.Packer(autoreset=False)
    packer.pack_array_header(3)
    packer.pack(TYPE)
    packer.pack(VERSION)
    packer.pack_map_header(len(unknown_fields) + 2 + (claim is not None))
    for name, value in unknown_fields.items():
        packer.pack(name)
        packer.pack(value)
    if claim is not None:
        packer.pack("claim")
        packer.pack(claim)
    packer.pack("producers")
    packer.pack_array_header(len(rows))
    head = packer.bytes()
    packer.reset()
    packer.pack("pending")
    packer.pack(pending)
    return b"".join((head, *rows, packer.bytes()))


def decode_snapshot(data: bytes) -> Snapshot:
    """Raises `CorruptStateError` for bytes that no compatible version of `encode_snapshot` writes."""
    try:
        # Lengths inside are bounded by the length of `data`; msgpack checks them before it allocates.
        value = msgpack.unpackb(data)
    except Exception as error:  # msgpack raises ValueError and several other classes for bad bytes
        raise CorruptStateError(f"producer snapshot is not msgpack: {error}") from error
    if not (isinstance(value, list) and len(value) == 3 and value[0] == TYPE and isinstance(value[2], dict)):
        raise CorruptStateError("producer snapshot has another type")
    if value[1] != VERSION:
        raise CorruptStateError(f"producer snapshot has version {value[1]!r}, known is {VERSION}")
    fields: dict[str, object] = dict(value[2])
    producers = [_row(row) for row in _list(fields.pop("producers", None))]
    pending = [_pair(pair) for pair in _list(fields.pop("pending", None))]
    if any(a.producer_id >= b.producer_id for a, b in pairwise(producers)):
        raise CorruptStateError("producer snapshot is not ordered by producer id")
    if any(a[0] >= b[0] or a[1] >= b[1] for a, b in pairwise(pending)):
        raise CorruptStateError("producer snapshot: pending transactions are not in order")
    opened = [row.open_offset for row in producers if row.open_offset is not None]
    if len(set(opened)) != len(opened):
        raise CorruptStateError("producer snapshot: two transactions begin at one offset")
    claim = _claim(fields.pop("claim", None))
    if claim is not None and not any(row.producer_id == claim[1] for row in producers):
        raise CorruptStateError(f"producer snapshot: the claim is of producer {claim[1]}, which it does not have")
    return Snapshot(producers, pending, fields, claim)


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise CorruptStateError("producer snapshot: a list is missing")
    return value


def _int(value: object, *, least: int, most: int = _INT64_MAX) -> int:
    if type(value) is not int or not least <= value <= most:
        raise CorruptStateError(f"producer snapshot: {value!r} is not between {least} and {most}")
    return value


def _pair(value: object) -> tuple[int, int]:
    pair = _list(value)
    if len(pair) < 2:
        raise CorruptStateError("producer snapshot: a pending transaction is incomplete")
    first = _int(pair[0], least=0)
    return first, _int(pair[1], least=first)


def _claim(value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    pair = _list(value)
    if len(pair) < 2:
        raise CorruptStateError("producer snapshot: the claim is incomplete")
    return _int(pair[0], least=0), _int(pair[1], least=0)


def _row(value: object) -> ProducerRow:
    row = _list(value)
    if len(row) < _ROW_VALUES:
        raise CorruptStateError(f"producer snapshot: a row has {len(row)} values, not {_ROW_VALUES}")
    batches = tuple(_batch(batch) for batch in _list(row[7]))
    run = _int(row[5], least=0, most=1 << 30)
    if len(batches) > _BATCHES_MAX or bool(batches) != (run > 0):
        raise CorruptStateError(f"producer snapshot: producer {row[0]!r} has {len(batches)} batches and run {run}")
    offset = _int(row[4], least=0)
    ends = [*(batch[1] for batch in batches), offset]
    if any(before > after for before, after in pairwise(ends)):
        raise CorruptStateError(f"producer snapshot: batches of producer {row[0]!r} are not in the order of the log")
    return ProducerRow(
        ProducerId(_int(row[0], least=0)),
        _int(row[1], least=-1, most=32767),
        _int(row[2], least=-1, most=(1 << 31) - 1),
        _int(row[3], least=-_INT64_MAX - 1),
        Offset(offset),
        run,
        None if row[6] is None else _int(row[6], least=0),
        batches,
    )


def _batch(value: object) -> tuple[int, ...]:
    batch = _list(value)
    if len(batch) < _BATCH_VALUES:
        raise CorruptStateError("producer snapshot: a batch is incomplete")
    last_offset = _int(batch[1], least=0)
    return (
        _int(batch[0], least=0, most=(1 << 31) - 1),
        last_offset,
        _int(batch[2], least=0, most=min(last_offset, (1 << 31) - 1)),
        _int(batch[3], least=-_INT64_MAX - 1),
    )
