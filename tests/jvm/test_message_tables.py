"""Our tables of messages say what Kafka's own definitions say, field by field, in every version that we serve.

Kafka's client jar carries its definitions; `KAFKA_CLIENTS_JAR` names the jar.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest

from tidelog.rpc.kafka.messages import APIS
from tidelog.rpc.kafka.schema import FIELDS, Field, Kind
from tidelog.rpc.kafka.wire import ZERO_UUID

JAR = os.environ.get("KAFKA_CLIENTS_JAR")
pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(not JAR, reason="KAFKA_CLIENTS_JAR names no kafka-clients jar; `make interop-jvm` sets it"),
]

Row = tuple[str, str, bool, object, int | None]
"""Path, type, whether null is allowed, default, tag."""

OUR_TYPES = {
    Kind.INT8: "int8",
    Kind.INT16: "int16",
    Kind.UINT16: "uint16",
    Kind.INT32: "int32",
    Kind.INT64: "int64",
    Kind.FLOAT64: "float64",
    Kind.BOOL: "bool",
    Kind.UUID: "uuid",
    Kind.STRING: "string",
    Kind.BYTES: "bytes",
    Kind.RECORDS: "records",
    Kind.STRUCT: "struct",
}


def definition(name: str) -> dict[str, Any]:
    assert JAR is not None
    with zipfile.ZipFile(JAR) as jar:
        text = jar.read(f"common/message/{name}.json").decode()
    loaded: dict[str, Any] = json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))
    return loaded


def covers(versions: str | None, version: int) -> bool:
    if versions is None or versions == "none":
        return False
    low, _, high = versions.rstrip("+").partition("-")
    return int(low) <= version and (versions.endswith("+") or version <= int(high or low))


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def kafka_default(of: dict[str, Any]) -> object:
    """What the field is when nobody sets it; a struct that is not null has no row of its own for this."""
    given, kind = of.get("default"), of["type"]
    if given == "null":
        return None
    if kind.startswith("[]"):
        return ()
    if kind.startswith(("int", "uint")):
        return int(str(given), 0) if given is not None else 0
    if kind == "float64":
        return 0.0
    if kind == "bool":
        return str(given).lower() == "true"
    if kind == "uuid":
        return ZERO_UUID
    if kind == "bytes":
        return b""
    if kind == "string":
        return given or ""
    if kind == "records":
        return None
    return ()


def kafka_rows(
    fields: list[dict[str, Any]], version: int, common: dict[str, list[dict[str, Any]]], path: str = ""
) -> Iterator[Row]:
    for one in fields:
        if not covers(one["versions"], version):
            continue
        kind: str = one["type"]
        inner = one.get("fields") or common.get(kind.removeprefix("[]"))
        shown = re.sub(r"[A-Z]\w*", "struct", kind)
        here = f"{path}.{snake(one['name'])}"
        tag = one["tag"] if covers(one.get("taggedVersions"), version) else None
        yield here, shown, covers(one.get("nullableVersions"), version), kafka_default(one), tag
        if inner is not None:
            yield from kafka_rows(inner, version, common, here)


def our_rows(fields: tuple[Field, ...], version: int, path: str = "") -> Iterator[Row]:
    for one in fields:
        if not one.within(version):
            continue
        if one.kind is Kind.ARRAY:
            assert one.element is not None
            shown = "[]" + OUR_TYPES[one.element]
        else:
            shown = OUR_TYPES[one.kind]
        here = f"{path}.{one.name}"
        yield here, shown, one.nullable(version), one.default, one.tag
        if one.struct is not None:
            yield from our_rows(FIELDS[one.struct], version, here)


@pytest.mark.parametrize("side", ["Request", "Response"])
@pytest.mark.parametrize("key", sorted(APIS))
def test_every_field_is_as_in_kafkas_definition(key: int, side: str) -> None:
    api = APIS[key]
    theirs = definition(api.name + side)
    assert theirs["apiKey"] == key
    flexible = theirs["flexibleVersions"]
    common = {one["name"]: one["fields"] for one in theirs.get("commonStructs", [])}
    ours = FIELDS[api.request if side == "Request" else api.response]
    for version in range(api.low, api.high + 1):
        assert covers(theirs["validVersions"], version), f"Kafka has no {api.name} v{version}"
        assert api.flexible(version) == covers(flexible, version), f"{api.name} v{version}"
        assert list(our_rows(ours, version)) == list(kafka_rows(theirs["fields"], version, common)), version
