"""What a consumer gives to its user: records, and the small values that its calls speak in. Pure.

All of them are tuples: a record is made in C from the columns of its batch, a fifth of a microsecond each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

from tidelog.log.columns import Headers


class TopicPartition(NamedTuple):
    """A partition of a topic; a plain tuple of both does as well."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class OffsetAndMetadata(NamedTuple):
    """What is committed: the NEXT offset to read, that of the last record done plus one."""

    offset: int
    metadata: str = ""
    leader_epoch: int = -1
    """Of the last record that was read; -1: not known."""


class OffsetAndTimestamp(NamedTuple):
    """The first record at or after a time."""

    offset: int
    timestamp: int


class ConsumerRecord(NamedTuple):
    """What a consumer gives out."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    """ms since 1970, by the topic's message.timestamp.type."""
    key: Any
    """bytes or None, unless there is a deserializer; so is the value."""
    value: Any
    headers: Headers = ()
    leader_epoch: int = -1

    @property
    def topic_partition(self) -> TopicPartition:
        """Both in one, as calls of a consumer take it."""
        return TopicPartition(self.topic, self.partition)


class GroupMetadata(NamedTuple):
    """Who a consumer is in its group now; the member id is empty and the epoch -1 while it is no member."""

    group: str
    member_id: str
    member_epoch: int
    instance_id: str = ""


_make: Callable[[Iterable[Any]], ConsumerRecord] = partial(tuple.__new__, ConsumerRecord)
"""A record of a tuple of all its fields, unchecked: a third of what the class's own constructor takes."""


def make_records(
    topic: str,
    partition: int,
    leader_epoch: int,
    offsets: Iterable[int],
    timestamps: Iterable[int],
    keys: Iterable[Any],
    values: Iterable[Any],
    headers: Iterable[Headers] | None,
) -> list[ConsumerRecord]:
    rows = zip(
        repeat(topic),
        repeat(partition),
        offsets,
        timestamps,
        keys,
        values,
        repeat(()) if headers is None else headers,
        repeat(leader_epoch),
        strict=False,  # some have no end
    )
    return list(map(_make, rows))
