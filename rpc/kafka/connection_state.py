"""States of a connection, and the group of all connections of a broker."""

from enum import Enum
from typing import Protocol, TypeVar

ConnectionT = TypeVar("ConnectionT", contravariant=True)


class State(Enum):
    OPEN = "open"
    DRAINING = "draining"
    HALF_CLOSED = "half-closed"
    CLOSED = "closed"


class Group(Protocol[ConnectionT]):
    """All connections of a broker; the server implements it."""

    def enter(self, connection: ConnectionT, /) -> bool:
        """Returns False if there are too many."""
        ...

    def leave(self, connection: ConnectionT, /) -> None: ...

    def port_of(self, listener: str) -> int: ...
