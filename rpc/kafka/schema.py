"""What Kafka's messages are declared with.

A message is a slotted class whose fields say how they look on the wire:

    @struct
    class MetadataRequestTopic:
        topic_id: bytes = uuid(since=10)
        name: str | None = string(nullable_since=10)

    @message(key=3, versions=(0, 13), flexible_since=9)
    class MetadataRequest:
        topics: list[MetadataRequestTopic] | None = array(MetadataRequestTopic, nullable_since=1)

    @response_to(MetadataRequest)
    class MetadataResponse: ...

Fields stand in the order of the wire. A version carries a field from `since` to `until`, both included, as far as it
carries the struct around it; a version that does not carry it leaves it at its default when it is decoded and passes
over it when it is encoded. A field with a `tag` is written only when it differs from its default. From
`flexible_since` on, lengths are varints and every struct ends with tagged fields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from inspect import get_annotations
from typing import Any, TypeVar, cast, dataclass_transform, overload

from tidelog.rpc.kafka.wire import ZERO_UUID, Buffer, Records

T = TypeVar("T")
NEVER = 1 << 15
"""As `flexible_since`: no version is flexible."""


class Kind(Enum):
    """What a field holds. The value of a fixed one is its letter for `struct`."""

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
    """The structs of an array may be given as `EncodedRows`."""

    def within(self, version: int) -> bool:
        return self.since <= version <= self.until

    def nullable(self, version: int) -> bool:
        return version >= self.nullable_since


@dataclass(frozen=True, slots=True)
class Heading:
    """What is true of a whole message."""

    key: int
    low: int
    high: int
    flexible_since: int
    slack: int = 0
    """Bytes that may stand behind it, where a client in use leaves some; the broker of Kafka looks at none."""


FIELDS: dict[type, tuple[Field, ...]] = {}
HEADINGS: dict[type, Heading] = {}


def _fixed(
    kind: Kind, since: int, until: int | None, default: object, tag: int | None
) -> Any:  # the dataclass puts a value in its place
    return Field(kind, since, NEVER if until is None else until, default=default, tag=tag)


def int8(*, since: int = 0, until: int | None = None, default: int = 0, tag: int | None = None) -> int:
    return cast(int, _fixed(Kind.INT8, since, until, default, tag))


def int16(*, since: int = 0, until: int | None = None, default: int = 0, tag: int | None = None) -> int:
    return cast(int, _fixed(Kind.INT16, since, until, default, tag))


def uint16(*, since: int = 0, until: int | None = None, default: int = 0, tag: int | None = None) -> int:
    return cast(int, _fixed(Kind.UINT16, since, until, default, tag))


def int32(*, since: int = 0, until: int | None = None, default: int = 0, tag: int | None = None) -> int:
    return cast(int, _fixed(Kind.INT32, since, until, default, tag))


def int64(*, since: int = 0, until: int | None = None, default: int = 0, tag: int | None = None) -> int:
    return cast(int, _fixed(Kind.INT64, since, until, default, tag))


def float64() -> float:
    return cast(float, _fixed(Kind.FLOAT64, 0, None, 0.0, None))


def boolean(*, since: int = 0, until: int | None = None, default: bool = False, tag: int | None = None) -> bool:
    return cast(bool, _fixed(Kind.BOOL, since, until, default, tag))


def uuid(*, since: int = 0, until: int | None = None, tag: int | None = None) -> bytes:
    """Sixteen bytes; zeros are none."""
    return cast(bytes, _fixed(Kind.UUID, since, until, ZERO_UUID, tag))


@overload
def string(*, since: int = 0, until: int | None = None, default: str = "", tag: int | None = None) -> str: ...
@overload
def string(
    *,
    nullable_since: int,
    since: int = 0,
    until: int | None = None,
    default: str | None = "",
    tag: int | None = None,
) -> str | None: ...
def string(
    *,
    since: int = 0,
    until: int | None = None,
    nullable_since: int = NEVER,
    default: str | None = "",
    tag: int | None = None,
) -> Any:
    return Field(Kind.STRING, since, NEVER if until is None else until, nullable_since, default, tag)


def binary(*, since: int = 0, until: int | None = None) -> bytes:
    """Bytes with their length, of the message's own: a copy."""
    return cast(bytes, Field(Kind.BYTES, since, NEVER if until is None else until, default=b""))


def records() -> Buffer | None:
    """Batches: a slice of the request, never a copy, never looked into."""
    return cast("Buffer | None", Field(Kind.RECORDS, nullable_since=0))


def stored_records() -> Records | None:
    """Batches of an answer, in one buffer or several; a decoder gives one."""
    return cast("Records | None", Field(Kind.RECORDS, nullable_since=0))


def _array(
    element: Kind,
    of: type | None,
    since: int,
    until: int | None,
    nullable_since: int,
    default: object,
    tag: int | None,
    *,
    large: bool = False,
) -> Any:
    assert default is None or default == (), "an array is empty or null by default"
    last = NEVER if until is None else until
    return Field(Kind.ARRAY, since, last, nullable_since, default, tag, element=element, struct=of, large=large)


@overload
def array(
    of: type[T],
    *,
    since: int = 0,
    until: int | None = None,
    default: tuple[()] = (),
    tag: int | None = None,
    large: bool = False,
) -> list[T]: ...
@overload
def array(
    of: type[T], *, nullable_since: int, since: int = 0, until: int | None = None, default: tuple[()] | None = ()
) -> list[T] | None: ...
def array(
    of: type[T],
    *,
    since: int = 0,
    until: int | None = None,
    nullable_since: int = NEVER,
    default: tuple[()] | None = (),
    tag: int | None = None,
    large: bool = False,
) -> Any:
    """Of structs. Those of a `large` one may be encoded bit by bit, before the message that they stand in."""
    return _array(Kind.STRUCT, of, since, until, nullable_since, default, tag, large=large)


@overload
def int32_array(*, since: int = 0, until: int | None = None) -> list[int]: ...
@overload
def int32_array(
    *, nullable_since: int, since: int = 0, until: int | None = None, default: tuple[()] | None = ()
) -> list[int] | None: ...
def int32_array(
    *, since: int = 0, until: int | None = None, nullable_since: int = NEVER, default: tuple[()] | None = ()
) -> Any:
    return _array(Kind.INT32, None, since, until, nullable_since, default, None)


def int8_array(*, since: int = 0) -> list[int]:
    return cast("list[int]", _array(Kind.INT8, None, since, None, NEVER, (), None))


@overload
def string_array(*, since: int = 0, until: int | None = None) -> list[str]: ...
@overload
def string_array(
    *, nullable_since: int, since: int = 0, until: int | None = None, default: tuple[()] | None = ()
) -> list[str] | None: ...
def string_array(
    *, since: int = 0, until: int | None = None, nullable_since: int = NEVER, default: tuple[()] | None = ()
) -> Any:
    return _array(Kind.STRING, None, since, until, nullable_since, default, None)


def nested(of: type[T], *, since: int = 0, tag: int | None = None) -> T:
    """A struct. A tagged one is frozen: all that are at their default are one object."""
    return cast(T, Field(Kind.STRUCT, since, default=(), tag=tag, struct=of))


def nested_or_null(of: type[T], *, since: int = 0) -> T | None:
    """A struct that is null by default."""
    return cast("T | None", Field(Kind.STRUCT, since, nullable_since=since, struct=of))


DEFAULTS: dict[type, object] = {}
"""The one object of a frozen struct with every field at its default."""


def _declare(cls: type[T], *, frozen: bool) -> type[T]:
    """The class as a dataclass of what its fields hold, and its entry in `FIELDS`."""
    declared: list[Field] = []
    for name in get_annotations(cls):
        given = cls.__dict__.get(name)
        assert isinstance(given, Field), f"{cls.__name__}.{name} is not declared with a field"
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
    """The answer to a request: of the same key and versions."""

    def declare(cls: type[T]) -> type[T]:
        made = _declare(cls, frozen=False)
        HEADINGS[made] = HEADINGS[request]
        return made

    return declare
