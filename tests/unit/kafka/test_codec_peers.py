"""Other people's encoders write the same bytes.

kafka-python has its messages as classes with Kafka's own field names: it reads what we write, value by value, and
writes it again byte for byte. aiokafka's take their fields in the order of the wire.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from support.kafka.message_values import MESSAGES, encode, full, message_class, messages, versions_of

from tidelog.rpc.kafka.headers import read_request_header, read_response_header, request_frame, response_frame
from tidelog.rpc.kafka.messages import API_VERSIONS, APIS
from tidelog.rpc.kafka.messages.versions import ApiVersionsRequest, ApiVersionsResponse
from tidelog.rpc.kafka.schema import DEFAULTS, FIELDS, Kind
from tidelog.rpc.kafka.wire import ZERO_UUID

KAFKA_PYTHON_ROOMS = ("admin", "consumer", "metadata", "producer", "sasl")
AIOKAFKA_ROOMS = ("admin", "commit", "coordination", "fetch", "group", "metadata", "offset", "produce", "transaction")
UNKNOWN_TO_KAFKA_PYTHON = {64, 68, 69}
KAFKA_PYTHON_NAMES = {("TxnOffsetCommitRequest", "generation_id_or_member_epoch"): "generation_id"}
"""Fields that had another name in the definitions of the time."""
AIOKAFKA_DIFFERS = {
    "OffsetRequest_v4",  # it never sends it: its leader epoch has 8 bytes
    "OffsetRequest_v5",
    "CreatePartitionsRequest_v0",  # a tuple more around count and assignment, which the wire does not show
    "CreatePartitionsRequest_v1",
    "DescribeAclsRequest_v2",  # it writes them without tagged fields
    "DescribeAclsResponse_v2",
}


def _members(room: ModuleType) -> list[tuple[str, Any]]:
    return inspect.getmembers(room, inspect.isclass)


def _kafka_python() -> Iterator[tuple[tuple[int, str], Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it reads its tables in a way that newer Pythons deprecate
        rooms = [importlib.import_module(f"kafka.protocol.{room}") for room in KAFKA_PYTHON_ROOMS]
    for room in rooms:
        for name, cls in _members(room):
            if name.endswith(("Request", "Response")) and hasattr(cls, "API_KEY"):
                yield (cls.API_KEY, "request" if cls.is_request() else "response"), cls


def _aiokafka() -> Iterator[tuple[int, str, int, Any]]:
    for room in AIOKAFKA_ROOMS:
        for name, cls in _members(importlib.import_module(f"aiokafka.protocol.{room}")):
            side, _, version = name.rpartition("Re")[2].partition("_v")
            if "_v" not in name or name in AIOKAFKA_DIFFERS:
                continue
            if cls.API_KEY in APIS and APIS[cls.API_KEY].serves(int(version)):
                yield cls.API_KEY, "re" + side, int(version), cls


KAFKA_PYTHON = dict(_kafka_python())
AIOKAFKA = sorted(_aiokafka(), key=lambda one: one[:3])


def _same(ours: Any, theirs: Any, version: int) -> None:
    for one in FIELDS[type(ours)]:
        if not one.within(version):
            continue
        if one.name.endswith("authorized_operations"):  # it has them as a set, or not at all
            continue
        name = KAFKA_PYTHON_NAMES.get((type(ours).__name__, one.name), one.name)
        mine, other = getattr(ours, one.name), getattr(theirs, name)
        if one.kind is Kind.UUID:
            other = ZERO_UUID if other is None else other.bytes
        if one.struct is None or mine is None:
            assert other == mine, one.name
        elif other is None:  # it leaves tagged structs out that are not there
            assert mine == DEFAULTS[one.struct], one.name
        elif one.kind is Kind.ARRAY:
            assert len(other) == len(mine), one.name
            for element, peer in zip(mine, other, strict=True):
                _same(element, peer, version)
        else:
            _same(mine, other, version)


def _read_and_written_again(key: int, side: str, version: int, message: Any) -> None:
    if isinstance(message, ApiVersionsResponse):
        message = replace(message, error_code=0)  # with an error it reads version 0, whichever it asked for
    encoded = encode(key, side, version, message)
    theirs = KAFKA_PYTHON[key, side][version].decode(encoded)
    _same(message, theirs, version)
    theirs.with_header()
    assert bytes(theirs.encode()) == encoded


@pytest.mark.interop
@pytest.mark.parametrize(("key", "side"), [one for one in MESSAGES if one[0] not in UNKNOWN_TO_KAFKA_PYTHON])
def test_kafka_python_reads_the_same_and_writes_the_same_bytes(key: int, side: str) -> None:
    cls = message_class(key, side)
    known = [version for version in versions_of(key) if version <= KAFKA_PYTHON[key, side].max_version]
    assert known, "a version that both know"
    for version in known:
        _read_and_written_again(key, side, version, full(cls))
        _read_and_written_again(key, side, version, cls())

    @settings(max_examples=5)
    @given(messages(cls, known[-1]))
    def any_values(message: Any) -> None:
        _read_and_written_again(key, side, known[-1], message)

    any_values()


@pytest.mark.interop
@pytest.mark.requirement("a:C-01")
@pytest.mark.parametrize("version", [2, 4])
@pytest.mark.parametrize("client_id", ["bench", None])
def test_kafka_python_writes_the_same_request_header(version: int, client_id: str | None) -> None:
    request = KAFKA_PYTHON[18, "request"][version](client_software_name="a", client_software_version="b")
    request.with_header(correlation_id=77, client_id=client_id)
    theirs = bytes(request.encode(header=True, framed=True))
    body = API_VERSIONS.encode_request(
        version, ApiVersionsRequest(client_software_name="a", client_software_version="b")
    )
    assert b"".join(request_frame(API_VERSIONS, version, 77, client_id, body)) == theirs
    header = read_request_header(theirs, 4)
    assert header[:4] == (18, version, 77, client_id)
    assert API_VERSIONS.decode_request(version, theirs, header.body).client_software_name == (
        "a" if version > 2 else ""
    )


@pytest.mark.interop
@pytest.mark.parametrize(("key", "version"), [(18, 0), (18, 4), (3, 8), (3, 12)])
def test_kafka_python_writes_the_same_response_header(key: int, version: int) -> None:
    response = KAFKA_PYTHON[key, "response"][version]()
    response.with_header(correlation_id=-5)
    theirs = bytes(response.encode(header=True, framed=True))
    api = APIS[key]
    assert b"".join(response_frame(api, version, -5, api.encode_response(version, api.response()))) == theirs
    correlation_id, body = read_response_header(api, version, theirs, 4)
    assert correlation_id == -5
    assert api.decode_response(version, theirs, body) == api.response()


@pytest.mark.interop
@pytest.mark.parametrize(("key", "side", "version", "cls"), AIOKAFKA)
def test_aiokafka_writes_the_same_bytes(key: int, side: str, version: int, cls: Any) -> None:
    for message in (full(message_class(key, side)), message_class(key, side)()):
        theirs = cls(*_in_order(message, version, flexible=APIS[key].flexible(version)))
        assert theirs.encode() == encode(key, side, version, message)


def _in_order(message: Any, version: int, *, flexible: bool) -> list[Any]:
    """As aiokafka takes it: the fields as a tuple, tagged ones as a dict at the end."""
    values: list[Any] = []
    for one in FIELDS[type(message)]:
        if not one.within(version):
            continue
        value = getattr(message, one.name)
        if one.kind is Kind.ARRAY and one.struct is not None and value is not None:
            rows = [_in_order(element, version, flexible=flexible) for element in value]
            value = [row[0] if len(row) == 1 else tuple(row) for row in rows]
        values.append(value)
    return [*values, {}] if flexible else values
