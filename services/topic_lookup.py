"""Finds topics and partitions in an image, by name or by id, for services and API servers. Pure."""

from __future__ import annotations

from uuid import UUID

from tidelog.metadata.image import ClusterImage, Topic
from tidelog.metadata.topics import METADATA_TOPIC, check_name, find_topic
from tidelog.model.errors import InvalidRequestError, UnknownTopicIdError, UnknownTopicOrPartitionError
from tidelog.model.ids import PartitionId, TopicId

ID_BYTES = 16

_EMPTY = ClusterImage()


def read_id(data: bytes, what: str) -> UUID:
    """Raises `InvalidRequestError` unless it has 16 bytes."""
    if len(data) != ID_BYTES:
        raise InvalidRequestError(f"{what}: {len(data)} bytes, an id has {ID_BYTES}")
    return UUID(bytes=data)


def topic_with_id(image: ClusterImage, topic_id: UUID) -> Topic:
    topic = image.topics.get(topic_id)
    if topic is None:
        raise UnknownTopicIdError(f"there is no topic with id {topic_id}")
    return topic


def lookup_topic(image: ClusterImage, name: str, topic_id: UUID | None = None) -> Topic:
    """By its id if one is given, else by its name. Raises UNKNOWN_TOPIC_ID, UNKNOWN_TOPIC_OR_PARTITION, or
    INVALID_TOPIC for a name that no topic can have."""
    if topic_id is not None:
        return topic_with_id(image, topic_id)
    topic = image.topic_named(name)
    if topic is None and name != METADATA_TOPIC:
        check_name(_EMPTY, name)
    return find_topic(image, name) if topic is None else topic


def lookup_partition(image: ClusterImage, name: str, topic_id: UUID | None, partition: int) -> PartitionId:
    topic = lookup_topic(image, name, topic_id)
    partition_id = partition_in(topic, partition)
    if isinstance(partition_id, UnknownTopicOrPartitionError):
        raise partition_id
    return partition_id


def partition_in(topic: Topic, number: int) -> PartitionId | UnknownTopicOrPartitionError:
    """Returns the error, for callers that look up many and raise none."""
    if number not in topic.partitions:
        return UnknownTopicOrPartitionError(
            f"topic {topic.name} has no partition {number}; it has {len(topic.partitions)}"
        )
    return PartitionId(TopicId(topic.topic_id), number)
