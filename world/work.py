"""CPU work that must not hold up the event loop: a function of values, run elsewhere, returning a value.

`fn` is a module-level function and its arguments are picklable; it touches only files that nobody changes meanwhile.
In production it runs in a spawned helper process; in the simulator on the spot, after a virtual delay.

A helper may die in the middle of it: killed for want of memory, or by the function itself. Then the function is run
again from its beginning, so it must be one that can be run twice. If it has lost `ATTEMPTS_MAX` helpers it fails with
`WorkFailedError`, alone: what runs beside it or waits for a helper is run again too and does not notice. No memory and
errors of the system in a helper are `WorkFailedError` too. Such an error says nothing about the values.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")

ATTEMPTS_MAX = 3
"""Helpers that may die of one call."""


class Work(Protocol):
    async def run(self, fn: Callable[..., T], *values: object) -> T: ...
