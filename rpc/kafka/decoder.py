"""Generates decoders: one function without loops over fields for each message and version, compiled once. Pure.

`MetadataRequest`, version 1, becomes (shortened):

    def decode(data, pos):
        end = len(data)
        room, numbers = 200000, 50000
        o1 = new(MetadataRequest)
        n2, = unpack(data, pos)
        pos += 4
        if n2 < 0: ...null or malformed
        room -= n2
        if room < 0 or n2 * 2 > end - pos: malformed(...)
        o1.topics = a3 = []
        for _ in range(n2):
            ...

Consecutive fixed-width fields are unpacked together with the length, count or first byte of a varint after them.
`unpack` and `data[pos]` raise when the data ends; a slice does not, so every length is compared with `end` first, and
every count with the fewest bytes that so many elements can have.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct, unpack_from
from struct import error as struct_error
from typing import Any

from tidelog.rpc.kafka.schema import DEFAULTS, FIELDS, HEADINGS, Field, Kind
from tidelog.rpc.kafka.source import Source
from tidelog.rpc.kafka.wire import (
    ELEMENT_BYTES,
    ELEMENTS_PER_SLICE,
    NUMBER_BYTES,
    NUMBERS_PER_SLICE,
    STRING_BYTES_MAX,
    Buffer,
    MalformedError,
    malformed,
    read_tag,
    read_varint,
    skip_tags,
)

Decode = Callable[[Buffer, int], Any]

INT32S = tuple(Struct(f">{count}i").unpack_from for count in range(8))
"""Arrays of a few numbers: replicas of a partition, mostly."""
RARE_NUMBERS = {Kind.INT8: 1, Kind.INT64: 8}
"""Elements of other arrays of numbers, and their bytes."""

_OBJECTS: dict[str, object] = {
    "INT32S": INT32S,
    "MalformedError": MalformedError,
    "malformed": malformed,
    "memoryview": memoryview,
    "new": object.__new__,
    "read_tag": read_tag,
    "read_varint": read_varint,
    "skip_tags": skip_tags,
    "short_data": (struct_error, IndexError),
    "unpack_from": unpack_from,
}


def decoder(cls: type, version: int, *, elements_max: int, numbers_max: int, is_sliced: bool = False) -> Decode:
    """Takes the data and the position of the message, which must reach to the end, but for its slack. It may have so
    many structs and strings in arrays, and so many numbers.

    A sliced one is a generator: it stops after every `ELEMENTS_PER_SLICE`, and returns the message and about the bytes
    of its objects.
    """
    heading = HEADINGS[cls]
    title = f"{cls.__name__} v{version}"
    source = Source(dict(_OBJECTS))
    with source.block("def decode(data, pos):"):
        source.line("end = len(data)")
        source.line(f"room, numbers = {elements_max}, {numbers_max}")
        if is_sliced:
            source.line(f"turn = {ELEMENTS_PER_SLICE}")
            with source.block("if not data:"):
                source.line("yield")  # a generator also where the message has no array
        if _has_records(cls, version):
            source.line("view = data if type(data) is memoryview else memoryview(data)")
        with source.block("try:"):
            flexible = version >= heading.flexible_since
            _Decoder(source, version, flexible=flexible, title=title, is_sliced=is_sliced).message(cls)
        with source.block("except short_data:"):
            source.line(f"raise MalformedError({f'{title}: the data ends too soon'!r}) from None")
        with source.block("except UnicodeDecodeError as problem:"):
            source.line(f"raise MalformedError({f'{title}: a string is not UTF-8: '!r} + problem.reason) from None")
        with source.block(f"if pos + {heading.slack} < end:" if heading.slack else "if pos != end:"):
            source.line(f"malformed({f'{title}: bytes left behind the message: '!r} + str(end - pos))")
        if is_sliced:
            cost = f"({elements_max} - room) * {ELEMENT_BYTES} + ({numbers_max} - numbers) * {NUMBER_BYTES}"
            source.line(f"return o1, {cost}")
        else:
            source.line("return o1")
    return source.function("decode", f"decoder of {title}")


def _has_records(cls: type, version: int) -> bool:
    return any(
        one.kind is Kind.RECORDS or (one.struct is not None and _has_records(one.struct, version))
        for one in FIELDS[cls]
        if one.within(version)
    )


def least_bytes(cls: type, version: int, *, flexible: bool) -> int:
    """Returns the fewest bytes of a struct."""
    total = 1 if flexible else 0
    for one in FIELDS[cls]:
        if one.within(version) and one.tag is None:
            total += _least(one, version, flexible=flexible)
    return total


_FIXED_BYTES = {kind: Struct(">" + kind.value).size for kind in Kind if kind.fixed}


def _least(one: Field, version: int, *, flexible: bool) -> int:
    if one.kind.fixed:
        return _FIXED_BYTES[one.kind]
    if one.kind is Kind.STRUCT:
        assert one.struct is not None
        return 1 if one.nullable(version) else least_bytes(one.struct, version, flexible=flexible)
    if flexible:
        return 1
    return 2 if one.kind is Kind.STRING else 4


class _Decoder:
    """Writes the lines. `_letters` and `_targets` are fixed-width fields to be unpacked together."""

    def __init__(self, source: Source, version: int, *, flexible: bool, title: str, is_sliced: bool = False) -> None:
        self._source = source
        self._version = version
        self._flexible = flexible
        self._title = title
        self._is_sliced = is_sliced
        self._letters = ""
        self._targets: list[str] = []

    def message(self, cls: type) -> None:
        holder = self._struct(cls)
        assert holder == "o1", "the message is the first object"
        self._unpack()

    def _struct(self, cls: type) -> str:
        """Decodes a new object into a variable."""
        if cls in DEFAULTS:
            return self._frozen(cls)
        source = self._source
        holder = source.name("o")
        source.line(f"{holder} = new({source.class_name(cls)})")
        for one in FIELDS[cls]:
            if not one.within(self._version) or one.tag is not None:
                source.line(f"{holder}.{one.name} = {self._default(one)}")
            else:
                self._field(one, f"{holder}.{one.name}")
        if self._flexible:
            self._tags(cls, lambda one: f"{holder}.{one.name}")
        return holder

    def _frozen(self, cls: type) -> str:
        """Creates frozen objects by their constructor, from local variables."""
        source = self._source
        locals_ = {one.name: source.name("f") for one in FIELDS[cls]}
        for one in FIELDS[cls]:
            if not one.within(self._version) or one.tag is not None:
                source.line(f"{locals_[one.name]} = {self._default(one)}")
            else:
                self._field(one, locals_[one.name])
        if self._flexible:
            self._tags(cls, lambda one: locals_[one.name])
        self._unpack()
        holder = source.name("o")
        given = ", ".join(f"{name}={local}" for name, local in locals_.items())
        source.line(f"{holder} = {source.class_name(cls)}({given})")
        return holder

    def _default(self, one: Field) -> str:
        if one.kind is Kind.ARRAY:
            return "None" if one.default is None else "[]"
        if one.kind is Kind.STRUCT and one.default is not None:
            assert one.struct is not None
            if one.struct in DEFAULTS:
                return self._source.hold("default", DEFAULTS[one.struct])
            return f"{self._source.class_name(one.struct)}()"
        return repr(one.default)

    # fixed fields

    def _fixed(self, letter: str, target: str) -> None:
        self._letters += letter
        self._targets.append(target)

    def _unpack(self) -> None:
        """Unpacks all waiting fields; afterwards `pos` is right."""
        if not self._targets:
            return
        source = self._source
        if self._letters == "B":
            source.line(f"{self._targets[0]} = data[pos]")
            source.line("pos += 1")
        else:
            unpack, size = source.struct(self._letters, "unpack_from")
            source.line(f"{', '.join(self._targets)}{',' if len(self._targets) == 1 else ''} = {unpack}(data, pos)")
            source.line(f"pos += {size}")
        self._letters = ""
        self._targets = []

    # the others

    def _field(self, one: Field, target: str) -> None:
        if one.kind.fixed:
            self._fixed(one.kind.value, target)
        elif one.kind is Kind.STRUCT:
            self._nested(one, target)
        elif one.kind is Kind.ARRAY:
            self._array(one, target)
        else:
            self._sized(one.kind, target, nullable=one.nullable(self._version), label=one.name)

    def _length(self, letter: str) -> str:
        """Reads a length or count into a variable; -1 is null."""
        source = self._source
        length = source.name("n")
        if not self._flexible:
            self._fixed(letter, length)
            self._unpack()
            return length
        self._fixed("B", length)
        self._unpack()
        with source.block(f"if {length} > 127:"):
            source.line(f"{length}, pos = read_varint(data, pos - 1)")
        source.line(f"{length} -= 1")
        return length

    def _null(self, length: str, target: str, *, nullable: bool) -> str:
        """Writes the lines for null, where it is allowed; returns `if` or `elif` for the next test."""
        if not nullable:
            return "if"
        source = self._source
        with source.block(f"if {length} == -1:"):
            source.line(f"{target} = None")
        return "elif"

    def _malformed(self, label: str, what: str, value: str) -> None:
        self._source.line(f"malformed({f'{self._title}: {label}: {what}: '!r} + str({value}))")

    def _sized(self, kind: Kind, target: str, *, nullable: bool, label: str) -> None:
        source = self._source
        length = self._length("h" if kind is Kind.STRING else "i")
        word = self._null(length, target, nullable=nullable)
        too_long = f" or {length} > {STRING_BYTES_MAX}" if kind is Kind.STRING and self._flexible else ""
        with source.block(f"{word} {length} < 0 or {length} > end - pos{too_long}:"):
            self._malformed(label, "no length that can be", length)
        with source.block("else:"):
            stop = source.name("stop")
            source.line(f"{stop} = pos + {length}")
            if kind is Kind.STRING:
                source.line(f"{target} = str(data[pos:{stop}], 'utf-8')")
            elif kind is Kind.BYTES:
                source.line(f"{target} = bytes(data[pos:{stop}])")
            else:
                source.line(f"{target} = view[pos:{stop}]")
            source.line(f"pos = {stop}")

    def _nested(self, one: Field, target: str) -> None:
        assert one.struct is not None
        source = self._source
        if not one.nullable(self._version):
            source.line(f"{target} = {self._struct(one.struct)}")
            return
        marker = source.name("n")
        self._fixed("b", marker)
        self._unpack()
        with source.block(f"if {marker} < 0:"):
            source.line(f"{target} = None")
        with source.block("else:"):
            holder = self._struct(one.struct)
            self._unpack()
            source.line(f"{target} = {holder}")

    def _array(self, one: Field, target: str) -> None:
        source = self._source
        count = self._length("i")
        word = self._null(count, target, nullable=one.nullable(self._version))
        if one.element in RARE_NUMBERS:
            letter, size = one.element.value, RARE_NUMBERS[one.element]
            with source.block(f"{word} {count} < 0 or {count} * {size} > end - pos or {count} > numbers:"):
                self._malformed(one.name, "no count that can be", count)
            with source.block("else:"):
                source.line(f"numbers -= {count}")
                source.line(f"{target} = list(unpack_from(f'>{{{count}}}{letter}', data, pos))")
                source.line(f"pos += {count} * {size}")
            return
        if one.element is Kind.INT32:
            with source.block(f"{word} {count} < 0 or {count} * 4 > end - pos or {count} > numbers:"):
                self._malformed(one.name, "no count that can be", count)
            with source.block("else:"):
                source.line(f"numbers -= {count}")
                if self._is_sliced:
                    self._many_numbers(target, count)
                    return
                short, long = f"INT32S[{count}](data, pos)", f"unpack_from(f'>{{{count}}}i', data, pos)"
                source.line(f"{target} = list({short} if {count} < {len(INT32S)} else {long})")
                source.line(f"pos += {count} * 4")
            return
        if one.element is Kind.STRUCT:
            assert one.struct is not None
            least = least_bytes(one.struct, self._version, flexible=self._flexible)
        else:
            least = 1 if self._flexible else 2
        with source.block(f"{word} {count} < 0 or {count} * {least} > end - pos or {count} > room:"):
            self._malformed(one.name, "no count that can be", count)
        with source.block("else:"):
            items = source.name("a")
            source.line(f"room -= {count}")
            source.line(f"{target} = {items} = []")
            with source.block(f"for _ in range({count}):"):
                if self._is_sliced:
                    source.line("turn -= 1")
                    with source.block("if turn < 0:"):
                        source.line(f"turn = {ELEMENTS_PER_SLICE}")
                        source.line("yield")
                if one.struct is not None:
                    holder = self._struct(one.struct)
                    self._unpack()
                    source.line(f"{items}.append({holder})")
                else:
                    element = source.name("s")
                    self._sized(Kind.STRING, element, nullable=False, label=one.name)
                    source.line(f"{items}.append({element})")

    def _many_numbers(self, target: str, count: str) -> None:
        source = self._source
        items, some = source.name("a"), source.name("n")
        source.line(f"{target} = {items} = []")
        with source.block(f"while {count} > 0:"):
            source.line(f"{some} = min({count}, {NUMBERS_PER_SLICE})")
            source.line(f"{items}.extend(unpack_from(f'>{{{some}}}i', data, pos))")
            source.line(f"pos += {some} * 4")
            source.line(f"{count} -= {some}")
            with source.block(f"if {some} == {NUMBERS_PER_SLICE}:"):
                source.line("yield")

    def _tags(self, cls: type, target: Callable[[Field], str]) -> None:
        """Reads the tagged fields at the end of a struct; skips unknown ones."""
        source = self._source
        known = [one for one in FIELDS[cls] if one.tag is not None and one.within(self._version)]
        count = source.name("t")
        self._fixed("B", count)
        self._unpack()
        with source.block(f"if {count}:"):
            if not known:
                source.line("pos = skip_tags(data, pos - 1, end)")
                return
            tag, stop = source.name("tag"), source.name("stop")
            source.line(f"{count}, pos = read_varint(data, pos - 1)")
            source.line(f"{tag} = -1")
            with source.block(f"for _ in range({count}):"):
                source.line(f"{tag}, pos, {stop} = read_tag(data, pos, end, {tag})")
                for number, one in enumerate(known):
                    with source.block(f"{'elif' if number else 'if'} {tag} == {one.tag}:"):
                        self._field(one, target(one))
                        self._unpack()
                with source.block("else:"):
                    source.line(f"pos = {stop}")
                with source.block(f"if pos != {stop}:"):
                    self._malformed(cls.__name__, "a tagged field has not the size that it says", tag)
