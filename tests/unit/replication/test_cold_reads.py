"""Reads from disk for a follower: each that waits is carried out, whenever the readers of a stream end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tidelog.replication import leader_stream
from tidelog.replication.leader_stream import LeaderStream


def test_a_read_that_is_enqueued_as_the_last_reader_ends_is_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last act of a reader wakes the sender, which enqueues the next read before the reader's task is done."""
    monkeypatch.setattr(leader_stream, "_check_first", lambda *_: None)

    async def main() -> list[str]:
        read: list[str] = []
        is_marked = asyncio.Event()
        context = SimpleNamespace(config=SimpleNamespace(cold_reads_max=1), tasks=SimpleNamespace(check=lambda _: None))
        stream = LeaderStream(cast("Any", SimpleNamespace(context=context)), cast("Any", SimpleNamespace(peer=2)))

        def subscription(name: str) -> Any:
            async def read_log(_offset: int, *, bytes_max: int) -> Any:
                read.append(name)
                return SimpleNamespace(data=b"")

            leader = SimpleNamespace(log=SimpleNamespace(read=read_log))
            return SimpleNamespace(is_over=False, is_reading=False, ready=None, leader=leader)

        async def send() -> None:
            await is_marked.wait()
            stream._read_later(second, 0, 1)

        stream._note_read = lambda *_: None  # type: ignore[method-assign]
        stream.mark = lambda subscription: is_marked.set()  # type: ignore[method-assign]
        second = subscription("second")
        sender = asyncio.ensure_future(send())
        await asyncio.sleep(0)
        stream._read_later(subscription("first"), 0, 1)
        await sender
        for _ in range(5):
            await asyncio.sleep(0)
        assert second.is_reading is bool(stream._to_read)
        return read

    assert asyncio.run(main()) == ["first", "second"]
