"""Cluster metadata for clients, from this node's copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from uuid import UUID

from tidelog.metadata.decision import Outcome
from tidelog.metadata.image import ClusterImage, Topic
from tidelog.model.errors import InvalidRequestError, TidelogError
from tidelog.services.authorization import Operation
from tidelog.services.context import RequestContext
from tidelog.services.guard import Guard
from tidelog.services.node import NodeAccess
from tidelog.services.topic_lookup import lookup_topic, read_id
from tidelog.services.topics import TopicService
from tidelog.world.slicing import sliced

LISTENER_LENGTH_MAX = 255
BROKERS_SHOWN = 3
TOPICS_PER_SLICE = 1_000
"""Topics authorized in one turn of the event loop: some ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataQuery:
    create: tuple[str, ...] = ()
    """Topics to create if they are unknown and the cluster allows it."""
    listener: str = ""
    """Return the endpoints of this listener; empty: of the listener of the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterMetadata:
    """The cluster at one moment, as far as the principal may describe it."""

    context: RequestContext
    guard: Guard
    cluster_id: str
    image: ClusterImage
    metadata_offset: int
    controller: int
    listener: str
    stale_ms: int | None
    creation_errors: Mapping[str, Outcome]

    def find(self, name: str, topic_id: UUID | None = None) -> Topic | Outcome:
        """Return the topic, by its id if one is given, or why there is none: nothing tells whether a topic exists that
        the principal may not describe."""
        try:
            if topic_id is None:
                self.guard.authorize(self.context, Operation.DESCRIBE, name)
            topic = lookup_topic(self.image, name, topic_id)
            if topic_id is not None:
                self.guard.authorize_by_id(self.context, Operation.DESCRIBE, topic)
        except TidelogError as error:
            creation_error = self.creation_errors.get(name) if topic_id is None else None
            return creation_error or Outcome(name, error.code, str(error))
        return topic

    def find_all(
        self, names: Iterable[str], topic_ids: Iterable[bytes]
    ) -> Iterator[tuple[str, bytes, Topic | Outcome]]:
        """Return (name, id, topic or error) of each name and then of each id, once, however often they are named."""
        for name in dict.fromkeys(names):
            yield name, b"", self.find(name)
        for topic_id in dict.fromkeys(topic_ids):
            yield "", topic_id, self.find("", read_id(topic_id, "topic id"))

    async def topics(self) -> Iterable[Topic]:
        """Return all topics that the principal may describe."""
        if self.guard.allows_all:
            return self.image.topics.values()
        allows, context = self.guard.allows, self.context
        return [
            topic
            async for topic in sliced(self.image.topics.values(), TOPICS_PER_SLICE)
            if allows(context, Operation.DESCRIBE, topic.name)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDescription:
    cluster_id: str
    controller: int
    node: int
    version: str
    metadata_offset: int
    stale_ms: int | None
    image: ClusterImage
    """For its brokers."""


class ClusterService:
    def __init__(self, node: NodeAccess, topics: TopicService, *, version: str = "") -> None:
        self._node = node
        self._topics = topics
        self._version = version

    @property
    def broker_addresses(self) -> str:
        """The addresses of some brokers, for error messages."""
        brokers = self._node.cache.image.live_brokers()[:BROKERS_SHOWN]
        addresses = [f"{host}:{port} ({name})" for broker in brokers for name, _, host, port in broker.endpoints]
        return f"brokers are at {', '.join(addresses)}" if addresses else "no broker is live"

    async def metadata(self, context: RequestContext, query: MetadataQuery) -> ClusterMetadata:
        """Return this node's copy; `ClusterMetadata.find` authorizes each topic."""
        cache, guard = self._node.cache, self._node.guard
        guard.charge(context)
        listener = _check_listener(cache.image, query.listener) or context.listener
        errors = await self._topics.auto_create(context, query.create) if query.create else {}
        return ClusterMetadata(
            context=context,
            guard=guard,
            cluster_id=cache.cluster_id,
            image=cache.image,
            metadata_offset=cache.metadata_offset,
            controller=cache.active_controller,
            listener=listener,
            stale_ms=cache.stale_ms(),
            creation_errors=errors,
        )

    async def describe(self, context: RequestContext) -> ClusterDescription:
        cache = self._node.cache
        self._node.guard.admit_query(context)
        return ClusterDescription(
            cluster_id=cache.cluster_id,
            controller=cache.active_controller,
            node=cache.node,
            version=self._version,
            metadata_offset=cache.metadata_offset,
            stale_ms=cache.stale_ms(),
            image=cache.image,
        )


def _check_listener(image: ClusterImage, listener: str) -> str:
    names = {endpoint[0] for broker in image.live_brokers() for endpoint in broker.endpoints}
    if listener and names and listener not in names:
        raise InvalidRequestError(
            f"no broker has a listener {listener[:LISTENER_LENGTH_MAX]!r}; use one of: {', '.join(sorted(names))}"
        )
    return listener
