"""Offsets and sizes of partitions, as `topics describe` shows them.

A leader that does not answer in time costs the figures of its own partitions, not those of others.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from tidelog.client.admin.threaded import Admin
from tidelog.client.admin.values import ListedOffset, Outcomes, PartitionDescription, TopicDescription
from tidelog.client.record import TopicPartition
from tidelog.model.errors import TidelogError

ASK_S = 2.0
STALE_ASK_S = 0.2
"""Without a quorum the command answers within a second."""

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class PartitionLog:
    """None: unknown."""

    start_offset: int | None
    end_offset: int | None
    """The high watermark: the next offset for consumers."""
    bytes: int | None
    """The size of the leader's replica."""


UNKNOWN = PartitionLog(None, None, None)


def partition_logs(
    admin: Admin,
    topics: Sequence[tuple[TopicDescription, Sequence[PartitionDescription]]],
    *,
    ask_s: float = ASK_S,
) -> dict[TopicPartition, PartitionLog]:
    """Asks the leaders of all these partitions, for `ask_s` seconds."""
    leaders = {
        TopicPartition(topic.name, row.partition): row.leader
        for topic, rows in topics
        for row in rows
        if row.leader is not None
    }
    if not leaders:
        return {}
    names = sorted({partition.topic for partition in leaders})
    with ThreadPoolExecutor(3) as pool:
        starts = pool.submit(_done, lambda: admin.list_offsets(leaders, at="earliest", partial=True, timeout=ask_s))
        ends = pool.submit(_done, lambda: admin.list_offsets(leaders, at="latest", partial=True, timeout=ask_s))
        brokers = sorted(set(leaders.values()))
        directories = _done(lambda: admin.describe_log_dirs(brokers, names, partial=True, timeout=ask_s))
    sizes = {
        (broker, replica.partition): replica.bytes
        for broker, rows in directories.items()
        for directory in rows
        for replica in directory.replicas
    }
    return {
        partition: PartitionLog(
            _offset(starts.result().get(partition)),
            _offset(ends.result().get(partition)),
            sizes.get((leader, partition)),
        )
        for partition, leader in leaders.items()
    }


def _done(ask: Callable[[], Outcomes[K, V]]) -> dict[K, V]:
    try:
        return ask().succeeded
    except TidelogError:
        return {}


def _offset(row: ListedOffset | None) -> int | None:
    return None if row is None else row.offset
