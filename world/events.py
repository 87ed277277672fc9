"""Events of asyncio, as invariants see them."""

from __future__ import annotations

import asyncio


def is_asleep(event: asyncio.Event) -> bool:
    """Return whether somebody waits for the event and nothing has woken him yet."""
    waiting = vars(event)["_waiters"]
    return bool(waiting) and not event.is_set()
