"""Generates encoders: one function without loops over fields for each message and version, compiled once. Pure.

An encoder returns a list of consecutive buffers. Record batches stay their own buffers, except small ones: one more
buffer costs the sender more than a copy of `COPIED_BYTES_MAX`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct, pack
from struct import error as struct_error
from typing import Any

from tidelog.rpc.kafka.schema import DEFAULTS, FIELDS, HEADINGS, Field, Kind
from tidelog.rpc.kafka.source import Source
from tidelog.rpc.kafka.wire import (
    ELEMENTS_PER_SLICE,
    ONE_BYTE,
    STRING_BYTES_MAX,
    ZERO_UUID,
    Buffer,
    EncodedRows,
    Records,
    UnencodableError,
    unencodable,
    unsigned_varint,
)

Encode = Callable[[Any], list[Buffer]]
EncodeRows = Callable[[Sequence[Any]], bytes]

COPIED_BYTES_MAX = 1024
INT32S = tuple(Struct(f">{count}i").pack for count in range(8))
"""Arrays of a few numbers: replicas of a partition, mostly."""


def _whole(buffers: Sequence[Buffer]) -> tuple[int, Sequence[Buffer]]:
    """Returns the size of the buffers, and the buffers."""
    return sum(map(len, buffers)), buffers


def _place(parts: list[Buffer], out: list[Buffer], records: Records) -> None:
    """Appends records to `out`: small ones are copied later, large ones are their own parts now."""
    for buffer in (records,) if isinstance(records, (bytes, memoryview)) else records:
        if len(buffer) <= COPIED_BYTES_MAX:
            out.append(buffer)
            continue
        if out:
            parts.append(b"".join(out))
            out.clear()
        parts.append(buffer)


_OBJECTS: dict[str, object] = {
    "COPIED_BYTES_MAX": COPIED_BYTES_MAX,
    "INT32S": INT32S,
    "EncodedRows": EncodedRows,
    "ONE_BYTE": ONE_BYTE,
    "UnencodableError": UnencodableError,
    "ZERO_UUID": ZERO_UUID,
    "join": b"".join,
    "pack": pack,
    "place": _place,
    "unencodable": unencodable,
    "varint": unsigned_varint,
    "whole": _whole,
    "wrong_values": (struct_error, AttributeError, TypeError, UnicodeEncodeError),
}


def encoder(cls: type, version: int, *, is_sliced: bool = False) -> Encode:
    """A sliced encoder is a generator that yields after every `ELEMENTS_PER_SLICE`."""
    heading = HEADINGS[cls]
    title = f"{cls.__name__} v{version}"
    source = Source(dict(_OBJECTS))
    with source.block("def encode(o):"):
        source.line("parts = []")
        source.line("out = []")
        source.line("add = out.append")
        if is_sliced:
            source.line(f"turn = {ELEMENTS_PER_SLICE}")
            with source.block("if o is None:"):
                source.line("yield")  # a generator also where the message has no array
        with source.block("try:"):
            flexible = version >= heading.flexible_since
            _Encoder(source, version, flexible=flexible, title=title, is_sliced=is_sliced).message(cls)
        with source.block("except wrong_values as problem:"):
            source.line(f"raise UnencodableError({f'{title}: '!r} + str(problem)) from problem")
        with source.block("if out:"):
            source.line("parts.append(join(out))")
        source.line("return parts")
    return source.function("encode", f"encoder of {title}")


def rows_encoder(cls: type, version: int, *, flexible: bool) -> EncodeRows:
    """Encodes the structs of an array without their count."""
    title = f"{cls.__name__} v{version}"
    source = Source(dict(_OBJECTS))
    with source.block("def encode(rows):"):
        source.line("out = []")
        source.line("add = out.append")
        with source.block("try:"):
            writer = _Encoder(source, version, flexible=flexible, title=title)
            with source.block("for o in rows:"):
                writer.message(cls)
        with source.block("except wrong_values as problem:"):
            source.line(f"raise UnencodableError({f'{title}: '!r} + str(problem)) from problem")
        source.line("return join(out)")
    return source.function("encode", f"encoder of {title}")


class _Encoder:
    """Writes the lines. `_letters` and `_values` are fixed-width fields to be packed together."""

    def __init__(self, source: Source, version: int, *, flexible: bool, title: str, is_sliced: bool = False) -> None:
        self._source = source
        self._version = version
        self._flexible = flexible
        self._title = title
        self._is_sliced = is_sliced
        self._letters = ""
        self._values: list[str] = []
        self._add = "add"

    def message(self, cls: type) -> None:
        self._struct(cls, "o")
        self._pack()

    def _struct(self, cls: type, holder: str) -> None:
        for one in FIELDS[cls]:
            if one.within(self._version) and one.tag is None:
                self._field(one, f"{holder}.{one.name}")
        if self._flexible:
            self._tags(cls, holder)

    # fixed fields

    def _fixed(self, letter: str, value: str) -> None:
        self._letters += letter
        self._values.append(value)

    def _pack(self) -> None:
        if not self._letters:
            return
        if self._letters.strip("x"):
            pack_, _size = self._source.struct(self._letters, "pack")
            self._source.line(f"{self._add}({pack_}({', '.join(self._values)}))")
        else:
            self._source.line(f"{self._add}({bytes(len(self._letters))!r})")
        self._letters = ""
        self._values = []

    def _pack_with_varint(self, value: str) -> None:
        """Packs the waiting fields and a varint, which mostly has one byte."""
        source = self._source
        if not self._letters:
            source.line(f"{self._add}(ONE_BYTE[{value}] if {value} < 128 else varint({value}))")
            return
        short, _size = source.struct(self._letters + "B", "pack")
        long, _size = source.struct(self._letters, "pack")
        values = ", ".join(self._values)
        with source.block(f"if {value} < 128:"):
            source.line(f"{self._add}({short}({values}{', ' if values else ''}{value}))")
        with source.block("else:"):
            source.line(f"{self._add}({long}({values}) + varint({value}))")
        self._letters = ""
        self._values = []

    # the others

    def _field(self, one: Field, value: str) -> None:
        if one.kind is Kind.UUID:
            self._uuid(one, value)
        elif one.kind.fixed:
            self._fixed(one.kind.value, value)
        elif one.kind is Kind.STRUCT:
            self._nested(one, value)
        elif one.kind is Kind.ARRAY:
            self._array(one, value)
        elif one.kind is Kind.RECORDS:
            self._records(value)
        else:
            self._sized(one.kind, value, nullable=one.nullable(self._version), label=one.name)

    def _uuid(self, one: Field, value: str) -> None:
        source = self._source
        held = source.name("u")
        source.line(f"{held} = {value}")
        with source.block(f"if len({held}) != 16:"):  # `pack` would cut it or fill it up
            source.line(f"unencodable({f'{self._title}: {one.name}: not 16 bytes'!r})")
        self._fixed("16s", held)

    def _length(self, letter: str, length: str) -> None:
        """Writes a length or count that is -1 for null."""
        if self._flexible:
            self._source.line(f"{length} += 1")
            self._pack_with_varint(length)
        else:
            self._fixed(letter, length)

    def _sized(self, kind: Kind, value: str, *, nullable: bool, label: str) -> None:
        source = self._source
        held, length = source.name("s"), source.name("n")
        content = f"{value}.encode()" if kind is Kind.STRING else value
        if nullable:
            source.line(f"{held} = {value}")
            with source.block(f"if {held} is None:"):
                source.line(f"{held} = b''")
                source.line(f"{length} = -1")
            with source.block("else:"):
                if kind is Kind.STRING:
                    source.line(f"{held} = {held}.encode()")
                source.line(f"{length} = len({held})")
        else:
            source.line(f"{held} = {content}")
            source.line(f"{length} = len({held})")
        if kind is Kind.STRING:
            with source.block(f"if {length} > {STRING_BYTES_MAX}:"):
                source.line(f"unencodable({f'{self._title}: {label}: over {STRING_BYTES_MAX} bytes'!r})")
        self._length("h" if kind is Kind.STRING else "i", length)
        self._pack()
        source.line(f"{self._add}({held})")

    def _records(self, value: str) -> None:
        assert self._add == "add", "records are no tagged field"
        source = self._source
        held, length, small = source.name("r"), source.name("n"), source.name("small")
        source.line(f"{held} = {value}")
        with source.block(f"if {held} is None:"):
            source.line(f"{held} = b''")
            source.line(f"{length} = -1")
            source.line(f"{small} = True")
        with source.block("else:"):
            with source.block(f"if type({held}) is bytes or type({held}) is memoryview:"):
                source.line(f"{length} = len({held})")
                source.line(f"{small} = {length} <= COPIED_BYTES_MAX")
            with source.block("else:"):
                source.line(f"{length}, {held} = whole({held})")
                source.line(f"{small} = False")
        self._length("i", length)
        self._pack()
        with source.block(f"if {small}:"):
            source.line(f"add({held})")
        with source.block("else:"):
            source.line(f"place(parts, out, {held})")

    def _nested(self, one: Field, value: str) -> None:
        assert one.struct is not None
        source = self._source
        holder = source.name("o")
        source.line(f"{holder} = {value}")
        if not one.nullable(self._version):
            self._struct(one.struct, holder)
            return
        self._pack()
        with source.block(f"if {holder} is None:"):
            source.line(f"{self._add}(b'\\xff')")
        with source.block("else:"):
            source.line(f"{self._add}(b'\\x01')")
            self._struct(one.struct, holder)
            self._pack()

    def _array(self, one: Field, value: str) -> None:
        source = self._source
        held, count = source.name("a"), source.name("n")
        source.line(f"{held} = {value}")
        if one.nullable(self._version):
            with source.block(f"if {held} is None:"):
                source.line(f"{held} = ()")
                source.line(f"{count} = -1")
            with source.block("else:"):
                source.line(f"{count} = len({held})")
        else:
            source.line(f"{count} = len({held})")
        self._length("i", count)
        self._pack()
        if one.element in (Kind.INT8, Kind.INT64):
            source.line(f"{self._add}(pack(f'>{{len({held})}}{one.element.value}', *{held}))")
            return
        if one.element is Kind.INT32:
            source.line(f"{count} = len({held})")
            short, long = f"INT32S[{count}](*{held})", f"pack(f'>{{{count}}}i', *{held})"
            source.line(f"{self._add}({short} if {count} < {len(INT32S)} else {long})")
            return
        element = source.name("o")
        if one.large:
            with source.block(f"if type({held}) is EncodedRows:"):
                source.line(f"out.extend({held}.parts)")
                source.line(f"{held} = ()")
        with source.block(f"for {element} in {held}:"):
            if self._is_sliced:
                source.line("turn -= 1")
                with source.block("if turn < 0:"):
                    source.line(f"turn = {ELEMENTS_PER_SLICE}")
                    source.line("yield")
            if one.struct is not None:
                self._struct(one.struct, element)
            else:
                self._sized(Kind.STRING, element, nullable=False, label=one.name)
            self._pack()

    def _tags(self, cls: type, holder: str) -> None:
        known = [one for one in FIELDS[cls] if one.tag is not None and one.within(self._version)]
        if not known:
            self._letters += "x"
            return
        source = self._source
        self._pack()
        known.sort(key=lambda one: one.tag or 0)
        given = {one.name: source.name("g") for one in known}
        for one in known:
            source.line(f"{given[one.name]} = {self._differs(one, f'{holder}.{one.name}')}")
        with source.block(f"if {' or '.join(given.values())}:"):
            source.line(f"{self._add}(varint({' + '.join(given.values())}))")
            for one in known:
                with source.block(f"if {given[one.name]}:"):
                    self._tagged(one, f"{holder}.{one.name}")
        with source.block("else:"):
            source.line(f"{self._add}(b'\\0')")

    def _tagged(self, one: Field, value: str) -> None:
        """Encodes the content into its own list first: its size comes before it."""
        source = self._source
        outer, self._add = self._add, source.name("add")
        content = source.name("c")
        source.line(f"{content} = []")
        source.line(f"{self._add} = {content}.append")
        self._field(one, value)
        self._pack()
        self._add = outer
        source.line(f"{content} = join({content})")
        source.line(f"{outer}(varint({one.tag}) + varint(len({content})) + {content})")

    def _differs(self, one: Field, value: str) -> str:
        """Returns an expression: whether a tagged field is written."""
        if one.kind is Kind.ARRAY:
            return f"len({value}) > 0"
        if one.kind is Kind.STRUCT:
            assert one.struct is not None
            default = self._source.hold("default", DEFAULTS[one.struct])
            return f"{value} is not {default} and {value} != {default}"
        if one.default is None:
            return f"{value} is not None"
        return f"{value} != {one.default!r}"
