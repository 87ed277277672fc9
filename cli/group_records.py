"""Records of `__consumer_offsets` in readable form, for `tidelog log dump --offsets-decoder`."""

from __future__ import annotations

import dataclasses
from base64 import b64encode
from collections.abc import Iterable
from typing import Any

from tidelog.coordinator.records import ClassicMember, Key, Kind, Value, decode_key, decode_value, sorted_partitions
from tidelog.model.errors import TidelogError
from tidelog.model.ids import PartitionId

Row = dict[str, object]


def group_document(key: bytes | None, value: bytes | None) -> Row | None:
    """What a record says: the fields of its key, and those of its value (null: a tombstone). None: it is no record of
    a group that this version knows."""
    try:
        found = None if key is None else decode_key(key)
        if found is None or found.kind == Kind.NOTHING:
            return None
        held = None if value is None else decode_value(value)
    except TidelogError:
        return None
    if value is not None and held is None:
        return None
    return {**_key(found), "value": None if held is None else _value(held)}


def group_text(document: Row) -> tuple[str, str]:
    """Key and value for a person, as `name=value` pairs."""
    fields = {name: value for name, value in document.items() if name not in ("kind", "value")}
    value = document["value"]
    return f"{document['kind']} {_pairs(fields)}", "null" if value is None else _pairs(value)


def _pairs(fields: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in fields.items())


def _key(key: Key) -> Row:
    row: Row = {"kind": Kind(key.kind).name.lower()}
    if key.kind != Kind.FENCE:
        row["group"] = key.group
    if key.member_id:
        row["member_id"] = key.member_id
    if key.partition is not None:
        row["topic_id"] = str(key.partition.topic_id)
        row["partition"] = key.partition.partition
    if key.producer_id >= 0:
        row["producer_id"] = key.producer_id
    return row


def _value(value: Value) -> Row:
    names = [field.name for field in dataclasses.fields(value) if field.name != "extra"]
    return {name: _plain(getattr(value, name)) for name in names}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return b64encode(value).decode("ascii")
    if isinstance(value, frozenset):
        return _partitions(value)
    if isinstance(value, ClassicMember):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value


def _partitions(partitions: Iterable[PartitionId]) -> dict[str, list[int]]:
    """By topic id."""
    found: dict[str, list[int]] = {}
    for each in sorted_partitions(partitions):
        found.setdefault(str(each.topic_id), []).append(each.partition)
    return found
