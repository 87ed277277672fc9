"""Waiting for real processes: until a condition holds, never longer than a deadline."""

import time
from collections.abc import Callable
from typing import TypeVar

from tidelog.model.errors import TidelogError

T = TypeVar("T")

DEADLINE_S = 60.0
LOOK_S = 0.02


def until(condition: Callable[[], T], what: str, *, timeout_s: float = DEADLINE_S) -> T:
    """The condition's value once it is true; errors of the catalogue mean: not yet."""
    end_s = time.monotonic() + timeout_s
    last: object = None
    while time.monotonic() < end_s:
        try:
            found = condition()
            if found:
                return found
            last = found
        except TidelogError as error:
            last = error
        time.sleep(LOOK_S)
    raise AssertionError(f"not within {timeout_s} s: {what}; last: {last}")
