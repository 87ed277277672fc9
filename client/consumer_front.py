"""What both consumers share: how a user's arguments are read, and how a core is made on the IO thread."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta

from tidelog.client import io_thread
from tidelog.client.async_consumer import ConsumerCore
from tidelog.client.consumer_errors import SubscriptionError
from tidelog.client.durations import time_ms
from tidelog.client.hand import Hand
from tidelog.client.names import ConsumerOptions
from tidelog.client.new_cluster import new_cluster
from tidelog.client.record import OffsetAndMetadata, TopicPartition
from tidelog.model.errors import InvalidRequestError

Topics = str | Iterable[str] | re.Pattern[str] | None
When = str | int | float | datetime | timedelta
Partitions = TopicPartition | tuple[str, int]
CLOSE_MS = 30_000
OFFSET_MAX = (1 << 63) - 1


def new_core(host: io_thread.IoThread, options: ConsumerOptions) -> Callable[[Hand], ConsumerCore]:
    def make(hand: Hand) -> ConsumerCore:
        return ConsumerCore(new_cluster(host, options), options, hand)

    return make


def read_topics(topics: Topics, pattern: str | re.Pattern[str] | None) -> tuple[tuple[str, ...], str]:
    """(names, pattern)"""
    if isinstance(topics, re.Pattern):
        if pattern is not None:
            raise SubscriptionError("two patterns; join them with |")
        topics, pattern = None, topics
    names = (topics,) if isinstance(topics, str) else tuple(topics or ())
    if wrong := [name for name in names if not isinstance(name, str) or not name]:
        raise SubscriptionError(f"a topic is a name, not {wrong[0]!r}")
    text = pattern.pattern if isinstance(pattern, re.Pattern) else pattern or ""
    try:
        re.compile(text)
    except re.error as error:
        raise SubscriptionError(f"the pattern '{text}' is no regular expression: {error}") from None
    return tuple(dict.fromkeys(names)), text


def read_partition(given: Partitions) -> TopicPartition:
    if (
        not isinstance(given, tuple)
        or len(given) != 2
        or not isinstance(given[0], str)
        or not isinstance(given[1], int)
        or isinstance(given[1], bool)
    ):
        raise SubscriptionError(f"a partition is TopicPartition(topic, number), not {given!r}")
    return TopicPartition(*given)


def read_partitions(given: Iterable[Partitions]) -> list[TopicPartition]:
    return list(dict.fromkeys(read_partition(one) for one in given))


def read_offset(name: TopicPartition, given: int) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= OFFSET_MAX:
        raise InvalidRequestError(f"{name}: {given!r} is no offset; it is a number from 0 on")
    return given


def read_offsets(
    given: Mapping[TopicPartition, OffsetAndMetadata | int] | None,
) -> dict[TopicPartition, OffsetAndMetadata] | None:
    """Of a commit; None: all that was given out."""
    if given is None:
        return None
    found: dict[TopicPartition, OffsetAndMetadata] = {}
    for place, told in given.items():
        name = read_partition(place)
        made = told if isinstance(told, OffsetAndMetadata) else OffsetAndMetadata(told)
        read_offset(name, made.offset)
        if not isinstance(made.metadata, str):
            raise InvalidRequestError(f"{name}: the metadata of an offset is text, not {made.metadata!r}")
        found[name] = made
    return found


def read_times(
    when: When | Mapping[TopicPartition, When], partitions: Iterable[Partitions], now_ms: int
) -> dict[TopicPartition, int]:
    if isinstance(when, Mapping):
        return {read_partition(name): time_ms(one, now_ms) for name, one in when.items()}
    return dict.fromkeys(read_partitions(partitions), time_ms(when, now_ms))
