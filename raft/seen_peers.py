"""The nodes from which this member has ever received a message, in the state store.

A vote or an acknowledgement counts only where it is received, and its sender is stored durably before its first message
is processed. So a node that no other voter has stored has never counted: its directory may be formatted under the id
that the membership has for it. A missing or unreadable value means that any node may have been seen.
"""

import asyncio
import logging

from tidelog.model.errors import CorruptStateError
from tidelog.model.ids import NodeId
from tidelog.raft.persistent_state import pack, unpack
from tidelog.world.store import StateStore

LOGGER = logging.getLogger(__name__)

SEEN_PEERS_KEY = b"raft/heard"
NO_PEERS = pack("heard", [])
"""The value that formatting writes."""


class SeenPeers:
    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._nodes: frozenset[NodeId] | None = None
        self._is_read = False
        self._lock = asyncio.Lock()

    @property
    def nodes(self) -> tuple[NodeId, ...] | None:
        """None if the value was not kept from the beginning, or is unreadable."""
        self._read()
        return None if self._nodes is None else tuple(sorted(self._nodes))

    def _read(self) -> None:
        if self._is_read:
            return
        try:
            stored = self._store.get(SEEN_PEERS_KEY)
            self._nodes = None if stored is None else frozenset(NodeId(node) for node in unpack("heard", stored))
        except CorruptStateError as error:
            LOGGER.warning("the stored set of seen peers is unreadable, so all nodes count as seen: %s", error)
            self._nodes = None
        self._is_read = True

    def has(self, node: NodeId) -> bool:
        self._read()
        return self._nodes is None or node in self._nodes

    async def add(self, node: NodeId) -> None:
        """Adds a node; returns when that is durable."""
        if self.has(node):
            return
        async with self._lock:  # two concurrent writes would each miss the other's node
            nodes = (self._nodes or frozenset()) | {node}
            await self._store.commit({SEEN_PEERS_KEY: pack("heard", sorted(nodes))})
            self._nodes = nodes
