"""Commits that are decided in pieces, when their caller is gone."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.async_tests import asyncio_test

from tidelog.model.errors import OverloadedError
from tidelog.services.group_router import OFFSETS_PER_DECISION, GroupRouter


@pytest.mark.parametrize("turns", [1, 3, 50])
@asyncio_test
async def test_cancelled_commit_leaves_no_piece_behind(turns: int) -> None:
    submitted = 0

    async def submit(_request: object) -> Any:
        nonlocal submitted
        submitted += 1
        if submitted % 2:
            raise OverloadedError("full")
        await asyncio.Event().wait()

    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
    router = GroupRouter.__new__(GroupRouter)
    router.coordinator = cast(Any, SimpleNamespace(commit_timeout_ms=60_000))
    shard = cast(Any, SimpleNamespace(submit=submit))
    pieces = [(object(), ()) for _ in range(5 * OFFSETS_PER_DECISION // 1_000)]
    task = asyncio.ensure_future(router.ask_in_pieces(shard, pieces, lambda: None))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == {asyncio.current_task()}
    del task
    gc.collect()
    assert not complaints
