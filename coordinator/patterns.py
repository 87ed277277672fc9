"""Compiles the topic patterns of subscriptions. Pure.

A pattern has RE2's syntax, as in Kafka, and matches the whole name of a topic. RE2 matches in time linear in the name,
so that no pattern of a client can block the event loop; look-around and back-references do not exist in it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import re2

from tidelog.model.group_errors import InvalidPatternError

MEMORY_BYTES_MAX = 1 << 20
"""Of one compiled pattern; a pattern that needs more is rejected."""


@lru_cache(maxsize=64)
def compile_pattern(pattern: str) -> Callable[[str], bool]:
    """Return a function that says whether a topic's whole name matches. Raises `InvalidPatternError`."""
    options = re2.Options()
    options.log_errors = False
    options.never_capture = True
    options.max_mem = MEMORY_BYTES_MAX
    try:
        compiled = re2.compile(pattern.encode(), options)
    except re2.error as error:
        reason = error.args[0] if error.args else error
        text = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise InvalidPatternError(f"pattern {pattern!r} is no RE2 regular expression: {text}") from None

    def matches(name: str) -> bool:
        # Bytes: for text re2 maps every offset back to characters, which costs five times the match.
        return compiled.fullmatch(name.encode()) is not None

    return matches
