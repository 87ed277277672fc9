"""Whether somebody sleeps on an event."""

from __future__ import annotations

import asyncio

from support.async_tests import asyncio_test

from tidelog.world.events import is_asleep


@asyncio_test
async def test_who_waits_for_an_event_sleeps_until_it_is_set() -> None:
    event = asyncio.Event()
    assert not is_asleep(event), "nobody waits"
    task = asyncio.create_task(event.wait())
    await asyncio.sleep(0)
    assert is_asleep(event)
    event.set()
    assert not is_asleep(event), "woken, before its turn"
    await task
    event.clear()
    assert not is_asleep(event), "awake"
