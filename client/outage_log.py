"""Logs addresses that a client cannot reach: each at once, then at a bounded rate until it answers again."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

LOGGER = logging.getLogger("tidelog.client")

REPEAT_S = 30.0
ADDRESSES_MAX = 1_024


@dataclass(slots=True)
class _Outage:
    began_s: float
    logged_s: float
    failures: int = 1


class OutageLog:
    """Used on one event loop, one for each client."""

    def __init__(self) -> None:
        self._outages: dict[str, _Outage] = {}

    def __bool__(self) -> bool:
        """Whether anything is known to be out of reach."""
        return bool(self._outages)

    def failed(self, address: str, reason: str, *, key: str = "") -> None:
        """An attempt to reach this address failed; the client tries again. `key` names what is out of reach where its
        address varies, as that of a whole cluster does."""
        now_s = asyncio.get_running_loop().time()
        outage = self._outages.get(key or address)
        if outage is None:
            if len(self._outages) >= ADDRESSES_MAX:
                del self._outages[next(iter(self._outages))]
            self._outages[key or address] = _Outage(now_s, now_s)
            LOGGER.warning("cannot reach %s: %s; trying again", address, reason)
            return
        outage.failures += 1
        if now_s - outage.logged_s >= REPEAT_S:
            outage.logged_s = now_s
            LOGGER.warning(
                "cannot reach %s for %d s, %d attempts: %s; trying again",
                *(address, now_s - outage.began_s, outage.failures, reason),
            )

    def answered(self, address: str, *, key: str = "") -> None:
        outage = self._outages.pop(key or address, None)
        if outage is not None:
            LOGGER.info("%s answers again after %d s", address, asyncio.get_running_loop().time() - outage.began_s)
