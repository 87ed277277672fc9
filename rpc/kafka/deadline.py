"""The time that a request may take as a whole, also if the controller is asked several times for it."""

from __future__ import annotations

import asyncio

from tidelog.model.errors import RequestTimedOutError


class Deadline:
    def __init__(self, timeout_ms: int) -> None:
        self._timeout_ms = timeout_ms
        self._end_s = asyncio.get_running_loop().time() + timeout_ms / 1000

    def left_ms(self) -> int:
        """At least 1; raises `RequestTimedOutError` if the time is up."""
        left_ms = int((self._end_s - asyncio.get_running_loop().time()) * 1000)
        if left_ms < 1:
            raise RequestTimedOutError(
                f"the {self._timeout_ms} ms of this request were over before its turn came: nothing was done about it"
            )
        return left_ms
