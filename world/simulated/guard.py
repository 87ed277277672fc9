"""Makes real clocks, real randomness and real threads raise while a simulation runs.

Installed once for a run. It is active only while the scheduler runs, and only on its thread, so that a test runner
keeps its clocks. A module of ours that holds such a function by name gets the guarded one, too. `logging` may read the
time: it only prints it.
"""

import asyncio
import asyncio.tasks
import asyncio.threads
import datetime
import gc
import os
import random
import secrets
import sys
import threading
import time
import uuid
from asyncio import events as asyncio_events
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from tidelog.world.simulated.loop import SimLoop

BANNED: tuple[tuple[ModuleType, str], ...] = (
    (uuid, "uuid1"),
    (uuid, "uuid4"),
    (os, "urandom"),
    (secrets, "token_bytes"),
    (secrets, "token_hex"),
    (time, "time"),
    (time, "time_ns"),
    (time, "monotonic"),
    (time, "monotonic_ns"),
    (time, "sleep"),
    (asyncio, "wait_for"),
    (asyncio.tasks, "wait_for"),
    (asyncio, "to_thread"),
    (asyncio.threads, "to_thread"),
    *((random, name) for name in ("random", "randint", "randrange", "choice", "choices", "shuffle", "sample")),
    *((random, name) for name in ("uniform", "getrandbits", "randbytes", "gauss", "expovariate")),
)
ALLOWED_CALLERS = ("logging",)


class NondeterminismError(Exception):
    """Code under simulation used a source that a replay would not reproduce."""


def _is_simulating() -> bool:
    return isinstance(asyncio_events._get_running_loop(), SimLoop)


def _guarded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def banned(*args: Any, **kwargs: Any) -> Any:
        # The running loop is per thread: other threads never see a simulated one.
        if _is_simulating() and sys._getframe(1).f_globals.get("__name__") not in ALLOWED_CALLERS:
            raise NondeterminismError(f"{name} in a simulation")
        return original(*args, **kwargs)

    return banned


class _GuardedDatetimeType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _REAL_DATETIME)


_REAL_DATETIME = datetime.datetime


class _GuardedDatetime(datetime.datetime, metaclass=_GuardedDatetimeType):
    """`datetime.datetime` whose `now` raises in a simulation."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        if _is_simulating():
            raise NondeterminismError("datetime.now in a simulation")
        return _REAL_DATETIME.now(tz)


_lock = threading.Lock()
_depth = 0


@contextmanager
def forbid_nondeterminism() -> Iterator[None]:
    """Active for the length of a run; may be nested. Disables the garbage collector, which would run finalizers at its
    own time."""
    global _depth
    with _lock:
        _depth += 1
        undo = _install() if _depth == 1 else []
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_collecting:
            gc.enable()
        with _lock:
            _depth -= 1
            for module, name, original in reversed(undo):
                setattr(module, name, original)


def _install() -> list[tuple[ModuleType, str, Any]]:
    undo: list[tuple[ModuleType, str, Any]] = []
    replacements: dict[int, Any] = {}
    for module, name in BANNED:
        original = getattr(module, name)
        if id(original) not in replacements:
            replacements[id(original)] = _guarded(f"{module.__name__}.{name}", original)
        undo.append((module, name, original))
        setattr(module, name, replacements[id(original)])
    replacements[id(_REAL_DATETIME)] = _GuardedDatetime
    undo.append((datetime, "datetime", _REAL_DATETIME))
    datetime.datetime = _GuardedDatetime  # type: ignore[misc]
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("tidelog.") and module_name != __name__:
            for name, value in list(vars(module).items()):
                if id(value) in replacements and value is not _GuardedDatetime:
                    undo.append((module, name, value))
                    setattr(module, name, replacements[id(value)])
    return undo
