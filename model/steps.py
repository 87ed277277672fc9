"""Long work in steps: a generator that yields where its caller may do something else, and returns a result.

Whoever has the time runs it with `at_once`; on an event loop each step is a turn of its own.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]


def at_once(steps: Steps[T]) -> T:
    """The result, after all steps."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
