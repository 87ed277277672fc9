"""The states of a connection (`connection`), and the group of all connections that it belongs to."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tidelog.rpc.kafka.connection import Connection


class State(Enum):
    OPEN = "open"
    DRAINING = "draining"
    DEAF = "deaf"
    CLOSED = "closed"


class Group(Protocol):
    """All connections of a broker: the listeners' side."""

    def enter(self, connection: Connection) -> bool:
        """False: there are too many."""
        ...

    def leave(self, connection: Connection) -> None: ...

    def port_of(self, listener: str) -> int: ...
