"""What a handler of the Kafka door works with: the services that the gRPC doors call as well, and who asks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from tidelog.coordinator.service import GroupService
from tidelog.metadata.image import ClusterImage
from tidelog.replication.service import PartitionService
from tidelog.rpc.admin_door import AdminDoor
from tidelog.rpc.cluster_door import ClusterDoor
from tidelog.rpc.door_auto_create import AutoCreate
from tidelog.rpc.door_log_dirs import LogDirs
from tidelog.rpc.door_quorum import QuorumLink
from tidelog.rpc.kafka.config_rows import NodeSetting
from tidelog.rpc.kafka.fetch_sessions import FetchSessions
from tidelog.rpc.limits import DoorLimits, ResponseMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaServices:
    """Of one broker; the same objects stand behind its gRPC door."""

    partitions: PartitionService
    groups: GroupService
    link: QuorumLink
    auto_create: AutoCreate
    cluster: ClusterDoor
    admin: AdminDoor
    log_dirs: LogDirs
    limits: DoorLimits
    fetch_sessions: FetchSessions
    version: str = ""
    """Of this software."""
    node_settings: tuple[NodeSetting, ...] = ()
    """What this node runs with, by its own file and environment."""

    @property
    def image(self) -> ClusterImage:
        """This broker's copy of the metadata, at this moment."""
        return self.link.image


class AnswerMemory:
    """The part of the `ResponseMemory` that one connection has; a `ReadMemory` for its fetches.

    `queued` are the bytes of answers that its client has not taken, `reading` those of fetches under way. Together they
    stay below `fetch_bytes_max`, but for `fetch_bytes_min` (or one batch) of each fetch: a client that asks much and
    reads nothing takes no more of the node than one that asks once.
    """

    __slots__ = ("_limits", "_responses", "queued", "reading")

    def __init__(self, responses: ResponseMemory, limits: DoorLimits) -> None:
        self._responses = responses
        self._limits = limits
        self.queued = 0
        self.reading = 0

    def take(self, asked: int) -> int:
        limits = self._limits
        left = limits.fetch_bytes_max - self.queued - self.reading
        taken = self._responses.take(min(asked, max(limits.fetch_bytes_min, left)))
        self.reading += taken
        return taken

    def give_back(self, size: int) -> None:
        self.reading -= size
        self._responses.give_back(size)

    def set_queued(self, size: int) -> None:
        self._responses.give_back(self.queued - size)
        self.queued = size


@dataclass(slots=True, eq=False, kw_only=True)
class Origin:
    """A connection, as its requests know it."""

    listener: str
    """Its name: of its endpoints the client is told."""
    peer: str
    """host:port."""
    host: str
    memory: AnswerMemory
    """For `PartitionService.fetch`."""
    state: dict[str, Any] = field(default_factory=dict)
    """What handlers keep for the life of the connection; small, each of them bounds its own."""


@dataclass(slots=True, eq=False)
class Context:
    """One request: who asks, how, and what answers it."""

    services: KafkaServices
    connection: Origin
    version: int
    correlation_id: int
    client_id: str | None

    @property
    def listener(self) -> str:
        return self.connection.listener

    @property
    def peer(self) -> str:
        return self.connection.peer

    @property
    def client_host(self) -> str:
        return self.connection.host

    @property
    def memory(self) -> AnswerMemory:
        return self.connection.memory


def _nothing() -> None:
    pass


@dataclass(slots=True, eq=False)
class Later:
    """What a handler returns to have the next request of its connection begun: `answer` makes the response meanwhile.

    `leave` is called once on every way out, also if `answer` was never begun or was cancelled. `soon` stands in for
    `answer` where nothing but the end of a wait is waited for: it needs no task.
    """

    answer: Callable[[], Coroutine[Any, Any, Any]]
    leave: Callable[[], None] = _nothing
    soon: Soon | None = None


@dataclass(slots=True, eq=False)
class Soon:
    """`on_done` takes what is called when the wait is over, once, in a later turn of the loop, and never after `leave`;
    then `make` gives the response. Not for an api with `on_stop`: it cannot be cancelled."""

    on_done: Callable[[Callable[[], None]], None]
    make: Callable[[], Any]


Handle = Callable[[Any, Context], Awaitable[Any]]
"""(request, context) -> a response, `Later`, or None where the protocol has no answer (Produce with acks=0)."""
