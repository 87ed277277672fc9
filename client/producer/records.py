"""Producer records as interceptors see them, and header conversion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import Any

from tidelog.client.producer.fast_path import Headers


@dataclass(slots=True)
class ProducerRecord:
    """The arguments of `send`, before serialization. An interceptor may change it or return another."""

    topic: str
    value: Any = None
    key: Any = None
    partition: int | None = None
    headers: Any = None
    timestamp_ms: int | None = None


def check_callback(on_delivery: Any) -> None:
    if not callable(on_delivery):
        raise TypeError(f"on_delivery is a function of (error, metadata), not {on_delivery!r}")
    if iscoroutinefunction(on_delivery):
        raise TypeError("on_delivery is a plain function; nothing awaits a coroutine function: await the delivery")


def headers_of(given: Any) -> Headers | None:
    """Convert a mapping, or (name, value) pairs in order; names may repeat. Values are bytes, str (UTF-8) or None."""
    if not given:
        return None
    pairs = given.items() if isinstance(given, Mapping) else given
    found = []
    for pair in pairs:
        try:
            if isinstance(pair, (str, bytes)):
                raise TypeError("a str is not a (name, value) pair")
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
        name.encode()  # fail here: in the batch it would fail other records too
        found.append((name, value))
    return tuple(found)
