"""Deliberate defects that only a run with a part of the product that `product_shape` draws can show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simulation.defects import Defect
from tidelog.log import retention
from tidelog.log.housekeeping_scheduler import HousekeepingScheduler
from tidelog.services import partition_lookup
from tidelog.services.topic_lookup import topic_with_id

Patches = tuple[tuple[Any, str, Any], ...]


def _on(owner: Any, name: str, replacement: Any) -> Patches:
    return ((owner, name, replacement),)


# Retention.


async def _expire_all(self: Any, log: Any, config: Any, *, is_full: bool) -> Any:
    """Whatever is committed."""
    segments = await log.expire(bound=log.end_offset, config=config)
    log.expire_producers()
    return segments


_reason = retention._reason


def _half_as_long(segment: Any, *, config: Any, **more: Any) -> Any:
    return _reason(segment, config=replace(config, retention_ms=config.retention_ms // 2), **more)


def _own_size_counts(segment: Any, *, bytes_left: int, **more: Any) -> Any:
    return _reason(segment, bytes_left=bytes_left + segment.size, **more)


# Topics and brokers.

_names: dict[Any, str] = {}


def _namesake(image: Any, topic_id: Any) -> Any:
    """Once there was a topic with this id: the one that has its name now."""
    if topic_id in image.topics:
        _names[topic_id] = image.topics[topic_id].name
    found = image.topic_named(_names.get(topic_id, ""))
    return topic_with_id(image, topic_id) if found is None else found


DEFECTS: tuple[Defect, ...] = (
    Defect(
        "retention_of_uncommitted", "product", "retention deletes what is not committed",
        _on(HousekeepingScheduler, "_expire", _expire_all),
    ),
    Defect(
        "retention_halved", "product", "segments expire after half of retention.ms",
        _on(retention, "_reason", _half_as_long),
    ),
    Defect(
        "retention_bytes_missed", "product", "a segment counts as what is left when it is gone",
        _on(retention, "_reason", _own_size_counts),
    ),
    Defect(
        "namesake_served", "product", "the id of a deleted topic means the topic that has its name now",
        _on(partition_lookup, "topic_with_id", _namesake),
    ),
)  # fmt: skip
