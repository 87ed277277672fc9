"""Partitions as requests name them, and whom to ask for those that are not here: what the data handlers share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar
from uuid import UUID

from tidelog.metadata.image import ClusterImage
from tidelog.metadata.topics import find_topic
from tidelog.model.errors import (
    ErrorCode,
    TidelogError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from tidelog.model.ids import PartitionId, TopicId
from tidelog.rpc.kafka.brokers_view import view_of
from tidelog.rpc.kafka.messages.data import LeaderIdAndEpoch, NodeEndpoint

T = TypeVar("T")
NAMES_PER_SLICE = 500
"""Partitions of a request, or rows of an answer, that are dealt with in one turn of the event loop: some 3 ms."""

PLACES_MAX = 20_000
"""Partitions of the newest image that are remembered by their names."""
_MOVED = (ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.FENCED_LEADER_EPOCH)


class _Places:
    """Partitions that were found in one image, as they were named: clients name the same ones over and over."""

    __slots__ = ("found", "image")

    def __init__(self) -> None:
        self.image: ClusterImage | None = None
        self.found: dict[tuple[str | bytes, int], PartitionId] = {}


_PLACES = _Places()


def find(image: ClusterImage, topic: str | bytes, partition: int) -> PartitionId | TidelogError:
    """A topic is given by its name, or by its id in 16 bytes."""
    places = _PLACES
    if places.image is not image:
        places.image, places.found = image, {}
    known = places.found.get((topic, partition))
    if known is not None:
        return known
    where = _look_up(image, topic, partition)
    if isinstance(where, PartitionId) and len(places.found) < PLACES_MAX:
        places.found[topic, partition] = where
    return where


def _look_up(image: ClusterImage, topic: str | bytes, partition: int) -> PartitionId | TidelogError:
    if isinstance(topic, bytes):
        found = image.topics.get(UUID(bytes=topic))
        if found is None:
            return UnknownTopicIdError(f"there is no topic with id {UUID(bytes=topic)}")
    else:
        try:
            found = find_topic(image, topic)
        except TidelogError as error:
            return error
    if partition not in found.partitions:
        return UnknownTopicOrPartitionError(
            f"topic {found.name} has no partition {partition}; it has {len(found.partitions)}"
        )
    return PartitionId(TopicId(found.topic_id), partition)


async def rest(count: int) -> None:
    """Between two steps of the work on so many names: others have their turn if they are many."""
    if count > NAMES_PER_SLICE:
        await asyncio.sleep(0)


async def in_slices(items: Iterable[T]) -> AsyncIterator[T]:
    """The items, with a turn for others after every `NAMES_PER_SLICE`."""
    for number, item in enumerate(items, start=1):
        yield item
        if number % NAMES_PER_SLICE == 0:
            await asyncio.sleep(0)


def is_moved(error: TidelogError | None) -> bool:
    """Whether the client should be told who leads now."""
    return error is not None and error.code in _MOVED


class Leaders:
    """Those that one answer names, as the metadata knows them."""

    __slots__ = ("_image", "_listener", "_named")

    def __init__(self, image: ClusterImage, listener: str) -> None:
        self._image = image
        self._listener = listener
        self._named: dict[int, None] = {}

    def of(self, where: PartitionId) -> LeaderIdAndEpoch:
        partition = self._image.partition(where.topic_id, where.partition)
        if partition is None:
            return LeaderIdAndEpoch()
        if partition.leader >= 0:
            self._named[partition.leader] = None
        return LeaderIdAndEpoch(leader_id=partition.leader, leader_epoch=partition.leader_epoch)

    def endpoints(self) -> list[NodeEndpoint]:
        """Of all that were named, as far as they can be reached from this listener."""
        if not self._named:
            return []
        places = view_of(self._image, self._listener).places
        found: Iterable[int] = (leader for leader in self._named if leader in places)
        return [
            NodeEndpoint(node_id=one, host=places[one].host, port=places[one].port, rack=places[one].rack)
            for one in found
        ]
