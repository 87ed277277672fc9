"""Which nodes a member has heard from: noted durably, before anything that they say counts."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tidelog.model.ids import NodeId
from tidelog.raft.heard import HEARD_KEY, NOBODY, HeardNodes
from tidelog.world.real.store import LmdbStore


def test_a_store_from_before_there_was_a_note_counts_every_node_as_heard(tmp_path: Path) -> None:
    with LmdbStore(str(tmp_path)) as store:
        heard = HeardNodes(store)
        assert heard.nodes is None
        assert heard.has(NodeId(7))
        asyncio.run(heard.add(NodeId(7)))
        assert store.get(HEARD_KEY) is None


def test_a_note_that_cannot_be_read_counts_all_nodes_as_heard_and_holds_nobody_up(tmp_path: Path) -> None:
    async def work(store: LmdbStore) -> None:
        await store.commit({HEARD_KEY: b"no note"})
        heard = HeardNodes(store)
        assert heard.nodes is None
        assert heard.has(NodeId(7))
        async with asyncio.timeout(5):
            await heard.add(NodeId(7))

    with LmdbStore(str(tmp_path)) as store:
        asyncio.run(work(store))


def test_nodes_that_are_noted_at_once_are_all_there_after_a_restart(tmp_path: Path) -> None:
    async def note(store: LmdbStore) -> None:
        await store.commit({HEARD_KEY: NOBODY})
        heard = HeardNodes(store)
        assert not heard.nodes
        await asyncio.gather(*(heard.add(NodeId(node)) for node in (3, 1, 2, 3)))
        assert heard.nodes == (1, 2, 3)

    with LmdbStore(str(tmp_path)) as store:
        asyncio.run(note(store))
    with LmdbStore(str(tmp_path)) as store:
        again = HeardNodes(store)
        assert again.nodes == (1, 2, 3)
        assert not again.has(NodeId(4))
