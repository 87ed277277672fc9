"""Names and ids as they come through the front doors: checked, and looked up in an image."""

from __future__ import annotations

from typing import Protocol
from uuid import UUID

from tidelog.metadata.image import ClusterImage, Topic
from tidelog.metadata.topics import find_topic
from tidelog.model.errors import InvalidRequestError, UnknownTopicIdError, UnknownTopicOrPartitionError
from tidelog.model.ids import PartitionId, TopicId

ID_BYTES = 16


class NamesPartition(Protocol):
    """Any message with these fields."""

    topic: str
    topic_id: bytes
    partition: int


def read_id(data: bytes, what: str) -> UUID:
    """`InvalidRequestError` unless it is 16 bytes."""
    if len(data) != ID_BYTES:
        raise InvalidRequestError(f"{what}: {len(data)} bytes, an id has {ID_BYTES}")
    return UUID(bytes=data)


def topic_of(image: ClusterImage, *, name: str, topic_id: bytes) -> Topic:
    """By its id if there is one, else by its name."""
    if not topic_id:
        return find_topic(image, name)
    found = image.topics.get(read_id(topic_id, "topic id"))
    if found is None:
        raise UnknownTopicIdError(f"there is no topic with id {UUID(bytes=topic_id)}")
    return found


def partition_of(image: ClusterImage, named: NamesPartition) -> PartitionId:
    topic = topic_of(image, name=named.topic, topic_id=named.topic_id)
    if named.partition not in topic.partitions:
        raise UnknownTopicOrPartitionError(
            f"topic {topic.name} has no partition {named.partition}; it has {len(topic.partitions)}"
        )
    return PartitionId(TopicId(topic.topic_id), named.partition)
