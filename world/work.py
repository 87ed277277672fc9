"""CPU work that must not hold up the event loop: a function of values, run elsewhere, returning a value.

`fn` is a module-level function and its arguments are picklable; it touches only files that nobody changes meanwhile.
In production it runs in a spawned helper process; in the simulator on the spot, after a virtual delay.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Work(Protocol):
    async def run(self, fn: Callable[..., T], *values: object) -> T: ...
