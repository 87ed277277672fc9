"""Long computations in steps: a generator that yields where its caller may run something else, and returns a result.
Pure.

`run_steps` runs all steps at once. On an event loop each step is a turn of its own (`world.slicing.run_in_turns`).
"""

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]


def run_steps(steps: Steps[T]) -> T:
    """Runs all steps; returns the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
