"""Ends the waits of a request at its deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from tidelog.model.errors import RequestTimedOutError
from tidelog.services.context import RequestContext

S = TypeVar("S")
T = TypeVar("T")
P = ParamSpec("P")


class Deadline:
    """The time that a request may take as a whole, also if it sends several requests to the controller."""

    def __init__(self, context: RequestContext, *, default_ms: int, max_ms: int) -> None:
        """`default_ms` applies to a request without a deadline."""
        now_s = asyncio.get_running_loop().time()
        if context.deadline_s is None:
            self.end_s = now_s + default_ms / 1000
        else:
            self.end_s = min(context.deadline_s, now_s + max_ms / 1000)
        self.timeout_ms = max(0, round((self.end_s - now_s) * 1000))

    def left_ms(self, most_ms: int | None = None) -> int:
        """Return at least 1; raise `RequestTimedOutError` if the time is up."""
        left_ms = round((self.end_s - asyncio.get_running_loop().time()) * 1000)
        if left_ms < 1:
            raise RequestTimedOutError(
                f"the {self.timeout_ms} ms of this request ended before its turn: nothing was done about it"
            )
        return left_ms if most_ms is None else min(left_ms, most_ms)

    async def wait(self, work: Awaitable[T], outcome: str = "it may be done yet") -> T:
        """Return what the work returns; raise `RequestTimedOutError` at the deadline, with the outcome."""
        try:
            async with asyncio.timeout_at(self.end_s):
                return await work
        except TimeoutError:
            raise RequestTimedOutError(f"not done in {self.timeout_ms} ms; {outcome}") from None


def deadline_after(timeout_ms: int, deadline_s: float | None = None) -> float | None:
    """Return the earlier of a deadline and the end of a timeout that begins now; 0 or below is no timeout."""
    if timeout_ms <= 0:
        return deadline_s
    end_s = asyncio.get_running_loop().time() + timeout_ms / 1000
    return end_s if deadline_s is None else min(end_s, deadline_s)


def before_deadline(context: RequestContext, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
    """Return what the work returns; raise `RequestTimedOutError` at the deadline of the request, if it has one."""
    if context.deadline_s is None:
        return work
    return Deadline(context, default_ms=0, max_ms=_NO_LIMIT_MS).wait(work)


def ends_at_deadline(
    method: Callable[Concatenate[S, RequestContext, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, RequestContext, P], Coroutine[Any, Any, T]]:
    """A method of a service that waits without a limit of its own: it fails at the deadline of the request."""

    @wraps(method)
    def run(service: S, context: RequestContext, /, *args: P.args, **named: P.kwargs) -> Coroutine[Any, Any, T]:
        return before_deadline(context, method(service, context, *args, **named))

    return run


_NO_LIMIT_MS = 1 << 40
