"""Declarations of Kafka's messages.

A message is a slotted class whose fields declare their encoding:

    @struct
    class MetadataRequestTopic:
        topic_id: bytes = uuid(since=10)
        name: str | None = string(nullable_since=10)

    @message(key=3, versions=(0, 13), flexible_since=9)
    class MetadataRequest:
        topics: list[MetadataRequestTopic] | None = array(MetadataRequestTopic, nullable_since=1)

    @response_to(MetadataRequest)
    class MetadataResponse: ...

Fields are in the order of the wire. A version has a field from `since` to `until`, both included, if it has the struct
around it; otherwise the decoder leaves it at its default and the encoder skips it. A field with a `tag` is written only
if it differs from its default. From
`flexible_since` on, lengths are varints and every struct ends with tagged fields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from inspect import get_annotations
from typing import Any, TypeVar, dataclass_transform, overload

from tidelog.rpc.kafka.wire import ZERO_UUID

T = TypeVar("T")
NEVER = 1 << 15
"""As `flexible_since`: no version is flexible."""


class Kind(Enum):
    """Type of a field. The value of a fixed-width one is its letter for `struct`."""

    INT8 = "b"
    INT16 = "h"
    UINT16 = "H"
    INT32 = "i"
    INT64 = "q"
    FLOAT64 = "d"
    BOOL = "?"
    UUID = "16s"
    STRING = "string"
    BYTES = "bytes"
    RECORDS = "records"
    STRUCT = "struct"
    ARRAY = "array"

    @property
    def fixed(self) -> bool:
        return self in _FIXED


_FIXED = {Kind.INT8, Kind.INT16, Kind.UINT16, Kind.INT32, Kind.INT64, Kind.FLOAT64, Kind.BOOL, Kind.UUID}


@dataclass(frozen=True, slots=True)
class Field:
    """One field. `struct` is the class of a struct or of an array's elements, `element` the kind of these."""

    kind: Kind
    since: int = 0
    until: int = NEVER
    nullable_since: int = NEVER
    default: object = None
    tag: int | None = None
    element: Kind | None = None
    struct: type | None = None
    name: str = ""
    large: bool = False
    """The array may be an `EncodedRows`."""

    def within(self, version: int) -> bool:
        return self.since <= version <= self.until

    def nullable(self, version: int) -> bool:
        return version >= self.nullable_since


@dataclass(frozen=True, slots=True)
class Heading:
    """Properties of a whole message."""

    key: int
    low: int
    high: int
    flexible_since: int
    slack: int = 0
    """Bytes that may follow the message, since a client in use sends some; Kafka's broker ignores them."""


FIELDS: dict[type, tuple[Field, ...]] = {}
HEADINGS: dict[type, Heading] = {}


# Declarations of fields. They return `Any`: the dataclass puts a value in their place. `_declare` compares them with
# the annotation. `since` and `until` are versions; `until` is the last version with the field.


def _fixed(kind: Kind, *, since: int = 0, until: int = NEVER, default: object = 0, tag: int | None = None) -> Any:
    return Field(kind, since, until, default=default, tag=tag)


int8 = partial(_fixed, Kind.INT8)
int16 = partial(_fixed, Kind.INT16)
uint16 = partial(_fixed, Kind.UINT16)
int32 = partial(_fixed, Kind.INT32)
int64 = partial(_fixed, Kind.INT64)
float64 = partial(_fixed, Kind.FLOAT64, default=0.0)
boolean = partial(_fixed, Kind.BOOL, default=False)
uuid = partial(_fixed, Kind.UUID, default=ZERO_UUID)
"""Sixteen bytes; zeros are none."""


def string(
    *, since: int = 0, until: int = NEVER, nullable_since: int = NEVER, default: str | None = "", tag: int | None = None
) -> Any:
    return Field(Kind.STRING, since, until, nullable_since, default, tag)


def binary(*, since: int = 0, until: int = NEVER) -> Any:
    """Bytes with their length: a copy."""
    return Field(Kind.BYTES, since, until, default=b"")


def records() -> Any:
    """Batches. Of a request a slice of it, neither copied nor decoded; of a response one or several buffers, which a
    decoder returns as one."""
    return Field(Kind.RECORDS, nullable_since=0)


def _array(
    element: Kind,
    of: type | None = None,
    *,
    since: int = 0,
    until: int = NEVER,
    nullable_since: int = NEVER,
    default: tuple[()] | None = (),
    tag: int | None = None,
    large: bool = False,
) -> Any:
    """A `large` array of structs may be encoded in slices before its message."""
    return Field(Kind.ARRAY, since, until, nullable_since, default, tag, element=element, struct=of, large=large)


array = partial(_array, Kind.STRUCT)
int32_array = partial(_array, Kind.INT32)
int8_array = partial(_array, Kind.INT8)
int64_array = partial(_array, Kind.INT64)
string_array = partial(_array, Kind.STRING)


def nested(of: type, *, since: int = 0, tag: int | None = None) -> Any:
    """A struct. A tagged one is frozen: all with default values are one object."""
    return Field(Kind.STRUCT, since, default=(), tag=tag, struct=of)


def nested_or_null(of: type, *, since: int = 0) -> Any:
    """A struct that is null by default."""
    return Field(Kind.STRUCT, since, nullable_since=since, struct=of)


_ANNOTATIONS = {
    Kind.INT8: "int",
    Kind.INT16: "int",
    Kind.UINT16: "int",
    Kind.INT32: "int",
    Kind.INT64: "int",
    Kind.FLOAT64: "float",
    Kind.BOOL: "bool",
    Kind.UUID: "bytes",
    Kind.STRING: "str",
    Kind.BYTES: "bytes",
}


def _annotation(one: Field) -> str | None:
    """Return the type that a field of this kind must be declared with; None for records, which have several."""
    if one.kind is Kind.RECORDS:
        return None
    if one.struct is not None:
        inner = one.struct.__name__
    else:
        inner = _ANNOTATIONS[one.element or one.kind]
    whole = f"list[{inner}]" if one.kind is Kind.ARRAY else inner
    return whole if one.nullable_since == NEVER else f"{whole} | None"


DEFAULTS: dict[type, object] = {}
"""The one object of a frozen struct with every field at its default."""


def _declare(cls: type[T], *, frozen: bool) -> type[T]:
    """Makes the class a dataclass and adds it to `FIELDS`."""
    declared: list[Field] = []
    for name, annotation in get_annotations(cls).items():
        given = cls.__dict__.get(name)
        assert isinstance(given, Field), f"{cls.__name__}.{name} is not declared with a field"
        expected = _annotation(given)
        assert expected in (annotation, None), f"{cls.__name__}.{name} is declared as {annotation}, not {expected}"
        one = replace(given, name=name)
        declared.append(one)
        setattr(cls, name, _held(one))
    if cls.__doc__ is None:
        cls.__doc__ = cls.__name__  # else the dataclass writes one, which takes longer than all the rest
    made = dataclass(slots=True, kw_only=True, frozen=frozen)(cls)
    FIELDS[made] = tuple(declared)
    if frozen:
        DEFAULTS[made] = made()
    return made


def _held(one: Field) -> Any:
    if one.kind is Kind.ARRAY and one.default is not None:
        return field(default_factory=list)
    if one.kind is Kind.STRUCT and one.default is not None:
        assert one.struct is not None
        shared = DEFAULTS.get(one.struct)
        if shared is None:
            assert one.tag is None, f"{one.name}: the struct of a tagged field is frozen"
            return field(default_factory=one.struct)
        return field(default=shared)
    return field(default=one.default)


@overload
def struct(cls: type[T]) -> type[T]: ...
@overload
def struct(*, frozen: bool) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(kw_only_default=True)
def struct(cls: type[T] | None = None, *, frozen: bool = False) -> type[T] | Callable[[type[T]], type[T]]:
    """A part of a message."""
    if cls is not None:
        return _declare(cls, frozen=frozen)
    return lambda given: _declare(given, frozen=frozen)


@dataclass_transform(kw_only_default=True)
def message(
    *, key: int, versions: tuple[int, int], flexible_since: int = NEVER, slack: int = 0
) -> Callable[[type[T]], type[T]]:
    """A request, in the versions that are served."""

    def declare(cls: type[T]) -> type[T]:
        made = _declare(cls, frozen=False)
        HEADINGS[made] = Heading(key, versions[0], versions[1], flexible_since, slack)
        return made

    return declare


@dataclass_transform(kw_only_default=True)
def response_to(request: type) -> Callable[[type[T]], type[T]]:
    """The response to a request: of the same key and versions."""

    def declare(cls: type[T]) -> type[T]:
        made = _declare(cls, frozen=False)
        HEADINGS[made] = HEADINGS[request]
        return made

    return declare
