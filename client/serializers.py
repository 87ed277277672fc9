"""Serializers for a producer's `value_serializer` and a consumer's `value_deserializer`.

    tidelog.Producer("localhost:9292", value_serializer=tidelog.serializers.json)
    tidelog.Consumer("localhost:9292", value_deserializer=tidelog.serializers.json)

`dump` converts an object to bytes, `load` converts back. None stays None both ways: a null value is a tombstone.
Any function from an object to bytes works too, and so does an object with `serialize(topic, data)`, as in Kafka.
"""

from __future__ import annotations

import json as _json
from collections.abc import Callable
from struct import Struct
from typing import Any, Generic, TypeVar, cast
from uuid import UUID

from tidelog.client.errors import SerializationError

__all__ = ["Serializer", "double", "integer", "json", "long", "plain", "string", "uuid"]

T = TypeVar("T")
_INTEGER, _LONG, _DOUBLE = Struct(">i"), Struct(">q"), Struct(">d")


class Serializer(Generic[T]):
    """A named pair of functions, as a producer's serializer and a consumer's deserializer."""

    def __init__(self, name: str, dump: Callable[[Any], bytes], load: Callable[[bytes], T]) -> None:
        self.name = name
        self._dump = dump
        self._load = load

    def dump(self, data: T | None) -> bytes | None:
        return None if data is None else self._dump(data)

    def load(self, data: bytes | None) -> T | None:
        return None if data is None else self._load(data)

    def serialize(self, topic: str, data: T | None) -> bytes | None:
        return self.dump(data)

    def deserialize(self, topic: str, data: bytes | None) -> T:
        return cast(T, self.load(data))  # a consumer does not call it for null

    def __repr__(self) -> str:
        return f"tidelog.serializers.{self.name}"


def _plain(data: Any) -> bytes:
    return bytes(data) if isinstance(data, (bytes, bytearray, memoryview)) else _wrong(data, "bytes")


def _text(data: Any) -> bytes:
    return data.encode() if isinstance(data, str) else _wrong(data, "str")


def _wrong(data: Any, expected: str) -> bytes:
    raise TypeError(f"expected {expected}, got {type(data).__name__}")


def _packed(form: Struct) -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    return form.pack, lambda data: form.unpack(data)[0]


plain = Serializer("plain", _plain, bytes)
"""Bytes, unchanged."""
string = Serializer("string", _text, bytes.decode)
"""str as UTF-8."""
json: Serializer[Any] = Serializer("json", lambda data: _json.dumps(data, separators=(",", ":")).encode(), _json.loads)
"""Anything that Python's json accepts, as UTF-8."""
integer: Serializer[int] = Serializer("integer", *_packed(_INTEGER))
"""32 bits, big endian, as Kafka's IntegerSerializer."""
long: Serializer[int] = Serializer("long", *_packed(_LONG))
"""64 bits, big endian, as Kafka's LongSerializer."""
double: Serializer[float] = Serializer("double", *_packed(_DOUBLE))
uuid = Serializer("uuid", lambda data: str(data).encode(), lambda data: UUID(data.decode()))
"""UUID as text, as Kafka's UUIDSerializer."""

Dump = Callable[[str, Any, str], bytes | None]


def dumper(given: Any) -> Dump | None:
    """Wrap a user's serializer as (topic, data, what) -> bytes. Its failures raise SerializationError."""
    if given is None:
        return None
    method = getattr(given, "serialize", None)

    def dump(topic: str, data: Any, what: str) -> bytes | None:
        try:
            made = given(data) if method is None else method(topic, data)
        except Exception as failure:
            raise SerializationError(
                f"{given!r} cannot serialize the {what}, of type {type(data).__name__}: {failure}"
            ) from failure
        if made is None or type(made) is bytes:
            return made
        if isinstance(made, (bytearray, memoryview)):
            return bytes(made)
        if isinstance(made, str):
            return _encoded(made, what, given)
        raise SerializationError(f"{given!r} returned {type(made).__name__} for the {what}; it must return bytes")

    return dump


def _encoded(text: str, what: str, given: Any) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise SerializationError(f"{given!r} returned text for the {what} that UTF-8 cannot hold: {error}") from error


def as_bytes(data: Any, what: str) -> bytes | None:
    """Convert without a serializer: bytes, str as UTF-8, and None."""
    if data is None or type(data) is bytes:
        return data
    if isinstance(data, str):
        return data.encode()
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    near = {int: "long", float: "double", UUID: "uuid"}.get(type(data), "json")
    raise TypeError(
        f"a {what} is bytes, str or None, not {type(data).__name__}: set {what}_serializer=tidelog.serializers.{near}"
    )
