"""Checks the arguments of a consumer's methods."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tidelog.client.consumer.errors import SubscriptionError
from tidelog.client.consumer.fetch_buffer import Deserializer
from tidelog.client.durations import TimeLike, check_timeout, time_ms
from tidelog.client.record import ConsumerRecord, OffsetAndMetadata, TopicPartition
from tidelog.model.errors import InvalidRequestError

Topics = str | Iterable[str] | re.Pattern[str] | None
PartitionLike = TopicPartition | tuple[str, int]
T = TypeVar("T")
ByPartition = Mapping[Any, T]
"""{partition: value}. A key is a `PartitionLike`; the type cannot say so, as mappings are invariant in their keys."""
CLOSE_S = 30.0
OFFSET_MAX = (1 << 63) - 1


def read_count(count: int | None, default: int) -> int:
    if count is None:
        return default
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidRequestError(f"max_records={count!r}: use a number from 1 on, or None")
    return count


def read_timeout(timeout: float | None, default: float) -> float:
    """Seconds."""
    check_timeout(timeout)
    return default if timeout is None else timeout


def read_deserializer(deserializer: Any) -> Deserializer | None:
    """A user's deserializer as (topic, bytes) -> value."""
    if deserializer is None:
        return None
    method: Deserializer | None = getattr(deserializer, "deserialize", None)
    return method if method is not None else lambda _topic, data: deserializer(data)


def interceptor_methods(interceptors: Sequence[object], name: str) -> list[Callable[..., Any]]:
    return [method for interceptor in interceptors if (method := getattr(interceptor, name, None)) is not None]


def read_topics(topics: Topics, pattern: str | re.Pattern[str] | None) -> tuple[tuple[str, ...], str]:
    """(names, pattern)"""
    if isinstance(topics, re.Pattern):
        if pattern is not None:
            raise SubscriptionError("use one pattern; join two with |")
        topics, pattern = None, topics
    names = (topics,) if isinstance(topics, str) else tuple(topics or ())
    if wrong := [name for name in names if not isinstance(name, str) or not name]:
        raise SubscriptionError(f"a topic name is text, not {wrong[0]!r}")
    text = pattern.pattern if isinstance(pattern, re.Pattern) else pattern or ""
    try:
        re.compile(text)
    except re.error as error:
        raise SubscriptionError(f"'{text}' is not a regular expression: {error}") from None
    return tuple(dict.fromkeys(names)), text


def read_partition(partition: PartitionLike) -> TopicPartition:
    match partition:
        case (str() as topic, int() as number) if not isinstance(number, bool):
            return TopicPartition(topic, number)
    raise SubscriptionError(f"a partition is TopicPartition(topic, number), not {partition!r}")


def read_partitions(partitions: Iterable[PartitionLike]) -> list[TopicPartition]:
    return list(dict.fromkeys(read_partition(partition) for partition in partitions))


def read_offset(name: TopicPartition, offset: int) -> int:
    if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset <= OFFSET_MAX:
        raise InvalidRequestError(f"{name}: {offset!r} is not an offset: use a number from 0 on")
    return offset


def read_offsets(
    offsets: ByPartition[OffsetAndMetadata | int] | None,
) -> dict[TopicPartition, OffsetAndMetadata] | None:
    """Of a commit; None: everything that the user received."""
    if offsets is None:
        return None
    if not isinstance(offsets, Mapping):
        raise TypeError(f"offsets: a mapping {{(topic, partition): next offset to read}}, not {type(offsets).__name__}")
    checked: dict[TopicPartition, OffsetAndMetadata] = {}
    for partition, value in offsets.items():
        name = read_partition(partition)
        if isinstance(value, ConsumerRecord):
            raise TypeError(f"{name}: the next offset to read, not the record: record.offset + 1")
        offset = value if isinstance(value, OffsetAndMetadata) else OffsetAndMetadata(value)
        read_offset(name, offset.offset)
        if not isinstance(offset.metadata, str):
            raise InvalidRequestError(f"{name}: the metadata of an offset is text, not {offset.metadata!r}")
        checked[name] = offset
    return checked


def read_times(
    when: TimeLike | ByPartition[TimeLike],
    partitions: Iterable[PartitionLike],
    assigned: Iterable[TopicPartition],
    now_ms: int,
) -> dict[TopicPartition, int]:
    """Without `partitions` one time is for all that are assigned."""
    names = read_partitions(partitions)
    if not isinstance(when, Mapping):
        return dict.fromkeys(names or assigned, time_ms(when, now_ms))
    if names:
        raise InvalidRequestError("{partition: time} names the partitions: leave the others out")
    return {read_partition(name): time_ms(value, now_ms) for name, value in when.items()}
