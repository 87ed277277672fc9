"""Runs work inline while a node starts: no client waits yet, and starting a helper process would take longer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tidelog.world.real.work import InlineWork, ProcessWork

T = TypeVar("T")


class StartingWork:
    """Implements `world.work.Work`: inline until `begin_serving`, in helper processes from then on."""

    def __init__(self, helpers: ProcessWork) -> None:
        self._helpers = helpers
        self._inline = InlineWork()
        self._is_serving = False

    def begin_serving(self) -> None:
        self._is_serving = True

    async def run(self, fn: Callable[..., T], *values: object) -> T:
        if self._is_serving:
            return await self._helpers.run(fn, *values)
        return await self._inline.run(fn, *values)
