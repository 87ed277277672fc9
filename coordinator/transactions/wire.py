"""Calls between brokers in transactions, encoded as calls between services (`metadata.requests`). Pure.

transactions/add-partitions    AddPartitions --> AddReply, by the coordinator of the transactional id
transactions/write-markers     WriteMarkers --> MarkersWritten, by a broker that leads the partitions
transactions/find-open         FindOpen --> FoundOpen, by every broker (`open_search`)
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from uuid import UUID

from tidelog.coordinator.records import sorted_partitions
from tidelog.metadata.requests import decode_message, encode_message
from tidelog.model.errors import InvalidRequestError
from tidelog.model.ids import PartitionId, TopicId
from tidelog.replication.transaction_messages import AddPartitions, AddReply, MarkersWritten, WriteMarkers

ADD_PARTITIONS = "transactions/add-partitions"
WRITE_MARKERS = "transactions/write-markers"
FIND_OPEN = "transactions/find-open"
MESSAGE_BYTES_MAX = 4 << 20
"""Of a request: more than `PARTITIONS_PER_CALL` markers take, and than the partitions of one transaction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _AddPartitions:
    """As `AddPartitions`. New fields are added at the end, with a default."""

    transactional_id: str
    producer_id: int
    epoch: int
    partitions: tuple[tuple[UUID, int], ...]
    version: int = 2
    verify_only: bool = False


def encode_add_partitions(request: AddPartitions) -> bytes:
    partitions = tuple((each.topic_id, each.partition) for each in sorted_partitions(request.partitions))
    named = {field.name: getattr(request, field.name) for field in fields(_AddPartitions)}
    return encode_message(_AddPartitions(**(named | {"partitions": partitions})))


def decode_add_partitions(data: bytes) -> AddPartitions:
    message = decode_message(_AddPartitions, data, bytes_max=MESSAGE_BYTES_MAX)
    named = {field.name: getattr(message, field.name) for field in fields(_AddPartitions)}
    partitions = frozenset(PartitionId(TopicId(topic), number) for topic, number in message.partitions)
    return AddPartitions(**(named | {"partitions": partitions}))


def encode_add_reply(reply: AddReply) -> bytes:
    return encode_message(reply)


def decode_add_reply(data: bytes) -> AddReply:
    return decode_message(AddReply, data)


def encode_markers(request: WriteMarkers) -> bytes:
    return encode_message(request)


def decode_markers(data: bytes) -> WriteMarkers:
    return decode_message(WriteMarkers, data, bytes_max=MESSAGE_BYTES_MAX)


def encode_written(reply: MarkersWritten) -> bytes:
    return encode_message(reply)


def decode_written(data: bytes, request: WriteMarkers) -> MarkersWritten:
    """Raises `InvalidRequestError` for an answer to another request."""
    reply = decode_message(MarkersWritten, data)
    expected = [len(marker.partitions) for marker in request.markers]
    if [len(row) for row in reply.errors] != expected:
        raise InvalidRequestError(f"{expected} partitions were to be marked; the answer has {reply.errors!r:.200}")
    return reply


@dataclass(frozen=True, slots=True, kw_only=True)
class FindOpen:
    producer_id: int
    topic_id: UUID
    partition: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundOpen:
    transactional_id: str = ""
    """Empty: none of this broker's ids has it open."""
    shards: tuple[tuple[int, int], ...] = ()
    """(partition of `__transaction_state`, leader epoch) of all that were searched."""


def encode_find_open(request: FindOpen) -> bytes:
    return encode_message(request)


def decode_find_open(data: bytes) -> FindOpen:
    return decode_message(FindOpen, data)


def encode_found_open(reply: FoundOpen) -> bytes:
    return encode_message(reply)


def decode_found_open(data: bytes) -> FoundOpen:
    return decode_message(FoundOpen, data)
