"""Values of Kafka's messages for tests: hypothesis draws any message that a version can carry."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import strategies as st

from tidelog.rpc.kafka.messages import APIS
from tidelog.rpc.kafka.schema import DEFAULTS, FIELDS, Field, Kind

SIDES = ("request", "response")
MESSAGES = [(key, side) for key in sorted(APIS) for side in SIDES]
_INTS = {
    Kind.INT8: (-(1 << 7), (1 << 7) - 1),
    Kind.INT16: (-(1 << 15), (1 << 15) - 1),
    Kind.UINT16: (0, (1 << 16) - 1),
    Kind.INT32: (-(1 << 31), (1 << 31) - 1),
    Kind.INT64: (-(1 << 63), (1 << 63) - 1),
}
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.just("x" * 130) | st.just("é" * 64)
_BYTES = st.binary(max_size=8) | st.just(bytes(127)) | st.just(bytes(range(256)) * 8)


def versions_of(key: int) -> range:
    return range(APIS[key].low, APIS[key].high + 1)


def encode(key: int, side: str, version: int, message: Any) -> bytes:
    api = APIS[key]
    parts = (api.encode_request if side == "request" else api.encode_response)(version, message)
    return b"".join(parts)


def decode(key: int, side: str, version: int, data: bytes | memoryview, offset: int = 0) -> Any:
    api = APIS[key]
    return (api.decode_request if side == "request" else api.decode_response)(version, data, offset)


def message_class(key: int, side: str) -> type:
    made: type = getattr(APIS[key], side)
    return made


@cache
def messages(cls: type, version: int) -> st.SearchStrategy[Any]:
    """Messages with anything in the fields that the version carries, and defaults in the others."""
    carried = {one.name: _values(one, version) for one in FIELDS[cls] if one.within(version)}
    drawn = st.builds(cls, **carried)
    if cls in DEFAULTS:
        return drawn | st.just(DEFAULTS[cls])
    return drawn


def _values(one: Field, version: int) -> st.SearchStrategy[Any]:
    drawn: st.SearchStrategy[Any]
    if one.kind is Kind.ARRAY:
        assert one.element is not None
        element = messages(one.struct, version) if one.struct is not None else _plain(one.element)
        drawn = st.lists(element, max_size=2)
    elif one.kind is Kind.STRUCT:
        assert one.struct is not None
        drawn = messages(one.struct, version)
    else:
        drawn = _plain(one.kind)
    if one.tag is not None and one.kind.fixed:
        drawn = drawn | st.just(one.default)
    return st.none() | drawn if one.nullable(version) else drawn


def _plain(kind: Kind) -> st.SearchStrategy[Any]:
    if kind in _INTS:
        return st.integers(*_INTS[kind])
    if kind is Kind.FLOAT64:
        return st.floats(allow_nan=False)
    if kind is Kind.BOOL:
        return st.booleans()
    if kind is Kind.UUID:
        return st.binary(min_size=16, max_size=16)
    return _TEXT if kind is Kind.STRING else _BYTES


def full(cls: type) -> Any:
    """Every field with a value that is not its default."""
    values: dict[str, Any] = {}
    for one in FIELDS[cls]:
        match one.kind:
            case Kind.ARRAY if one.struct is not None:
                values[one.name] = [full(one.struct), full(one.struct)]
            case Kind.ARRAY:
                values[one.name] = ["first", "second"] if one.element is Kind.STRING else [7, -7]
            case Kind.STRUCT:
                assert one.struct is not None
                values[one.name] = full(one.struct)
            case Kind.STRING:
                values[one.name] = f"the {one.name}"
            case Kind.BYTES | Kind.RECORDS:
                values[one.name] = b"some " + one.name.encode()
            case Kind.UUID:
                values[one.name] = bytes(range(16))
            case Kind.BOOL:
                values[one.name] = not one.default
            case _:
                values[one.name] = 101
    return cls(**values)


def as_carried(message: Any, version: int) -> Any:
    """The message as it arrives: what the version does not carry is at its default."""
    values: dict[str, Any] = {}
    for one in FIELDS[type(message)]:
        if not one.within(version):
            continue
        value = getattr(message, one.name)
        if one.struct is None:
            values[one.name] = value
        elif one.kind is Kind.ARRAY:
            values[one.name] = [as_carried(element, version) for element in value]
        else:
            values[one.name] = as_carried(value, version)
    return type(message)(**values)
