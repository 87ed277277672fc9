"""CPU work off the event loop: runs a function of values elsewhere and returns its result.

`fn` is a module-level function and its arguments are picklable; it reads only files that nothing changes meanwhile.
Production runs it in a spawned helper process, the simulator inline after a virtual delay.

A helper may die: out of memory, or killed by the function itself. The function then runs again from its beginning, so
it must be repeatable. A function that has lost `ATTEMPTS_MAX` helpers fails with `WorkFailedError`, alone: functions
beside it run again, too, and do not notice. A lack of memory and system errors in a helper are `WorkFailedError`, too.
Such an error says nothing about the values.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")

ATTEMPTS_MAX = 3
"""Helpers that one call may lose."""


class Work(Protocol):
    async def run(self, fn: Callable[..., T], *values: object) -> T: ...
