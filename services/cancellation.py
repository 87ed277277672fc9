"""Tells a request that was cancelled from one that waited for something that was cancelled."""

from __future__ import annotations

import asyncio


def foreign_cancellation(error: asyncio.CancelledError) -> RuntimeError:
    """Return the error of a request that ends because something that it waited for was cancelled: its client waits for
    a response. Raise `error` if the current task itself was cancelled."""
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise error
    return RuntimeError("cancelled by what it waited for")
