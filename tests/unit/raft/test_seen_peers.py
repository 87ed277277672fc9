"""Which nodes a member has heard from: noted durably, before anything that they say counts."""

import asyncio
from pathlib import Path

from tidelog.model.ids import NodeId
from tidelog.raft.seen_peers import NO_PEERS, SEEN_PEERS_KEY, SeenPeers
from tidelog.world.real.store import LmdbStore


def test_a_store_from_before_there_was_a_note_counts_every_node_as_heard(tmp_path: Path) -> None:
    with LmdbStore(str(tmp_path)) as store:
        seen_peers = SeenPeers(store)
        assert seen_peers.nodes is None
        assert seen_peers.has(NodeId(7))
        asyncio.run(seen_peers.add(NodeId(7)))
        assert store.get(SEEN_PEERS_KEY) is None


def test_a_note_that_cannot_be_read_counts_all_nodes_as_heard_and_holds_nobody_up(tmp_path: Path) -> None:
    async def work(store: LmdbStore) -> None:
        await store.commit({SEEN_PEERS_KEY: b"no note"})
        seen_peers = SeenPeers(store)
        assert seen_peers.nodes is None
        assert seen_peers.has(NodeId(7))
        async with asyncio.timeout(5):
            await seen_peers.add(NodeId(7))

    with LmdbStore(str(tmp_path)) as store:
        asyncio.run(work(store))


def test_nodes_that_are_noted_at_once_are_all_there_after_a_restart(tmp_path: Path) -> None:
    async def note(store: LmdbStore) -> None:
        await store.commit({SEEN_PEERS_KEY: NO_PEERS})
        seen_peers = SeenPeers(store)
        assert not seen_peers.nodes
        await asyncio.gather(*(seen_peers.add(NodeId(node)) for node in (3, 1, 2, 3)))
        assert seen_peers.nodes == (1, 2, 3)

    with LmdbStore(str(tmp_path)) as store:
        asyncio.run(note(store))
    with LmdbStore(str(tmp_path)) as store:
        again = SeenPeers(store)
        assert again.nodes == (1, 2, 3)
        assert not again.has(NodeId(4))
