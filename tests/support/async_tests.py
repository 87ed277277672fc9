"""Decorators of tests that are coroutines: each runs in an event loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from inspect import Parameter, Signature
from typing import Any, ParamSpec

import uvloop

from tidelog.world.simulated import SimWorld

P = ParamSpec("P")
AsyncTest = Callable[P, Coroutine[Any, Any, None]]


def asyncio_test(test: AsyncTest[P]) -> Callable[P, None]:
    @wraps(test)
    def run(*args: P.args, **fields: P.kwargs) -> None:
        asyncio.run(test(*args, **fields))

    return run


def uvloop_test(test: AsyncTest[P]) -> Callable[P, None]:
    @wraps(test)
    def run(*args: P.args, **fields: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test(*args, **fields))

    return run


def virtual_time_test(test: AsyncTest[P]) -> Callable[P, None]:
    """On a simulated machine: timeouts cost nothing, and a slow machine does not shorten what happens before them."""

    @wraps(test)
    def run(*args: P.args, **fields: P.kwargs) -> None:
        with SimWorld(seed=1) as world:
            world.run(world.machine("test").boot(), lambda _: test(*args, **fields), timeout=7_200)

    return run


def inside(run: Callable[..., object], *fixtures: str) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """A test that `run` calls: it gets the values of these fixtures, then the test, and passes what the test takes."""

    def decorate(job: Callable[..., object]) -> Callable[..., None]:
        def test(**values: Any) -> None:
            run(*(values[name] for name in fixtures), job)

        test.__name__, test.__qualname__, test.__doc__ = job.__name__, job.__qualname__, job.__doc__
        test.__module__ = job.__module__
        parameters = [Parameter(name, Parameter.KEYWORD_ONLY) for name in fixtures]
        test.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return test

    return decorate
