"""A record on its way in: what interceptors see, and how headers may be given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidelog.client.hot import Headers


@dataclass(slots=True)
class ProducerRecord:
    """What `send` was given, before it is serialized. An interceptor may change it, or give another."""

    topic: str
    value: Any = None
    key: Any = None
    partition: int | None = None
    headers: Any = None
    timestamp_ms: int | None = None


def headers_of(given: Any) -> Headers | None:
    """A mapping, or pairs of name and value, in order; a name may come again. Values are bytes, str (UTF-8) or None."""
    if not given:
        return None
    pairs = given.items() if isinstance(given, Mapping) else given
    found = []
    for pair in pairs:
        try:
            if isinstance(pair, (str, bytes)):
                raise TypeError("two letters are no pair")
            name, value = pair
        except (TypeError, ValueError):
            raise TypeError(f"headers are a dict, or pairs of name and value; not {pair!r}") from None
        if isinstance(value, str):
            value = value.encode()
        elif isinstance(value, (bytearray, memoryview)):
            value = bytes(value)
        if not isinstance(name, str) or not (value is None or isinstance(value, bytes)):
            raise TypeError(
                f"a header is a str with bytes, str or None, not {type(name).__name__} with {type(value).__name__}"
            )
        name.encode()  # what cannot be would fail in the batch, with the records of others
        found.append((name, value))
    return tuple(found)
