"""Public methods from operations of a core: written once in the core, with arguments and docstring.

    create_topic = blocking(AdminCore.create_topic)        in the threaded client: runs it and waits
    create_topic = awaited(AdminCore.create_topic)         in the asyncio client: a coroutine

    @declared_blocking(AdminCore.create_topic)             in a protocol: the same arguments and result
    def create_topic(self) -> None: ...

A client has `_run`, which runs a call of its core and returns the result, or an awaitable of it.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")
Operation = Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]
Blocking = Callable[Concatenate[Any, P], T]
Awaited = Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]
Declaration = Callable[[Any], None]


def blocking(operation: Operation[P, T]) -> Blocking[P, T]:
    @functools.wraps(operation)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self._run(lambda core: operation(core, *args, **kwargs))
        return result

    return call


def awaited(operation: Operation[P, T]) -> Awaited[P, T]:
    @functools.wraps(operation)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = await self._run(lambda core: operation(core, *args, **kwargs))
        return result

    return call


def declared_blocking(operation: Operation[P, T]) -> Callable[[Declaration], Blocking[P, T]]:
    return lambda method: cast(Blocking[P, T], method)


def declared_awaited(
    operation: Operation[P, T],
) -> Callable[[Declaration], Callable[Concatenate[Any, P], Awaitable[T]]]:
    return lambda method: cast(Callable[Concatenate[Any, P], Awaitable[T]], method)
