"""Loops in slices."""

import asyncio

from tidelog.world.slicing import sliced


def test_other_tasks_run_after_every_slice_and_all_items_come_in_order() -> None:
    async def run() -> tuple[list[int], list[int]]:
        items: list[int] = []
        turns: list[int] = []

        async def watch() -> None:
            while len(items) < 7:
                turns.append(len(items))
                await asyncio.sleep(0)

        watching = asyncio.ensure_future(watch())
        async for item in sliced(range(7), 3):
            items.append(item)  # noqa: PERF401 - as it comes
        await watching
        return items, turns

    items, turns = asyncio.run(run())
    assert items == list(range(7))
    assert turns == [3, 6]


def test_a_loop_over_nothing_ends_at_once() -> None:
    async def run() -> list[int]:
        return [item async for item in sliced(range(0), 3)]

    assert asyncio.run(run()) == []
