r"""`consume --format`: how one record is printed, in kcat's notation. Pure.

    %t topic     %p partition     %o offset     %T timestamp (ms since 1970)
    %k key       %v value         %h headers (name=value,...)
    %K bytes of the key           %S bytes of the value         -1 for null
    %% a percent sign             \n \t \r \0 \\ \xNN           escapes

%s is %v, as in kcat. Keys and values are printed byte for byte, null as `null`. Nothing is added after a record.
"""

import re
from collections.abc import Callable
from typing import Protocol

from tidelog.log.columns import Headers


class PrintedRecord(Protocol):
    @property
    def offset(self) -> int: ...
    @property
    def timestamp(self) -> int: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def value(self) -> bytes | None: ...
    @property
    def headers(self) -> Headers: ...


Part = Callable[[str, int, PrintedRecord], bytes]


class FormatError(ValueError):
    """A format with a field or an escape that does not exist."""


def bytes_or_null(data: bytes | None) -> bytes:
    return b"null" if data is None else data


def headers_text(headers: Headers) -> str:
    return ",".join(
        f"{name}={'null' if value is None else value.decode(errors='backslashreplace')}" for name, value in headers
    )


def _number(value: int) -> bytes:
    return str(value).encode()


def _size(data: bytes | None) -> bytes:
    return _number(-1 if data is None else len(data))


_FIELDS: dict[str, Part] = {
    "t": lambda topic, partition, record: topic.encode(),
    "p": lambda topic, partition, record: _number(partition),
    "o": lambda topic, partition, record: _number(record.offset),
    "T": lambda topic, partition, record: _number(record.timestamp),
    "k": lambda topic, partition, record: bytes_or_null(record.key),
    "v": lambda topic, partition, record: bytes_or_null(record.value),
    "s": lambda topic, partition, record: bytes_or_null(record.value),
    "h": lambda topic, partition, record: headers_text(record.headers).encode(),
    "K": lambda topic, partition, record: _size(record.key),
    "S": lambda topic, partition, record: _size(record.value),
}
_ESCAPES = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}
_TOKEN = re.compile(r"%(?P<field>.?)|\\(?:x(?P<hex>[0-9a-fA-F]{2})|(?P<escape>.?))|(?P<text>[^%\\]+)", re.DOTALL)
KNOWN = "%t topic, %p partition, %o offset, %T timestamp, %k key, %v value, %h headers, %K and %S sizes, %%"


class RecordFormat:
    """A format that was checked once and is applied to each record."""

    def __init__(self, template: str) -> None:
        self._parts: list[bytes | Part] = []
        for token in _TOKEN.finditer(template):
            self._parts.append(_part(token))

    def apply(self, topic: str, partition: int, record: PrintedRecord) -> bytes:
        return b"".join(part if isinstance(part, bytes) else part(topic, partition, record) for part in self._parts)


def _part(token: re.Match[str]) -> bytes | Part:
    if token["text"] is not None:
        return token["text"].encode()
    if token["hex"] is not None:
        return bytes.fromhex(token["hex"])
    if token["escape"] is not None:
        if token["escape"] not in _ESCAPES:
            raise FormatError(f"{token[0]!r} is not an escape; there are \\n, \\t, \\r, \\0, \\\\ and \\xNN")
        return _ESCAPES[token["escape"]]
    if token["field"] == "%":
        return b"%"
    if token["field"] not in _FIELDS:
        raise FormatError(f"{token[0]!r} is not a field; there are {KNOWN}")
    return _FIELDS[token["field"]]
