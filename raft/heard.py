"""Which nodes this member has ever heard from, in the state store.

A vote or an acknowledgement counts only where it was received, and the node that sent it is noted durably before its
first message is taken. So a node that no other voter has noted has never counted: its directory may be formatted under
the id that the membership has for it. A store without the note, or with one that cannot be read, knows nothing: all may
have been heard.
"""

from __future__ import annotations

import asyncio
import logging

from tidelog.model.errors import CorruptStateError
from tidelog.model.ids import NodeId
from tidelog.raft.stored import pack, unpack
from tidelog.world.store import StateStore

LOGGER = logging.getLogger(__name__)

HEARD_KEY = b"raft/heard"
NOBODY = pack("heard", [])
"""What formatting writes."""


class HeardNodes:
    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._nodes: frozenset[NodeId] | None = None
        self._is_read = False
        self._lock = asyncio.Lock()

    @property
    def nodes(self) -> tuple[NodeId, ...] | None:
        """None if it was not noted from the beginning, or cannot be read."""
        self._read()
        return None if self._nodes is None else tuple(sorted(self._nodes))

    def _read(self) -> None:
        if self._is_read:
            return
        try:
            stored = self._store.get(HEARD_KEY)
            self._nodes = None if stored is None else frozenset(NodeId(node) for node in unpack("heard", stored))
        except CorruptStateError as error:
            LOGGER.warning("the note of nodes that were heard cannot be read, so all count as heard: %s", error)
            self._nodes = None
        self._is_read = True

    def has(self, node: NodeId) -> bool:
        self._read()
        return self._nodes is None or node in self._nodes

    async def add(self, node: NodeId) -> None:
        """Returns when it is durable."""
        if self.has(node):
            return
        async with self._lock:  # two at once would each write a set without the other
            nodes = (self._nodes or frozenset()) | {node}
            await self._store.commit({HEARD_KEY: pack("heard", sorted(nodes))})
            self._nodes = nodes
