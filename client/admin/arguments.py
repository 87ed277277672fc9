"""Reads the arguments of admin operations. Raises InvalidRequestError for one that makes no sense."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any
from uuid import UUID

from tidelog.client.admin.offset_resets import decode_table
from tidelog.client.admin.values import ConfigResource, LogDir, NewTopic
from tidelog.client.consumer import arguments as consumer_arguments
from tidelog.client.consumer.arguments import PartitionLike, read_partition
from tidelog.client.record import OffsetAndMetadata, TopicPartition
from tidelog.model.errors import InvalidRequestError
from tidelog.model.uuids import to_text

TopicsOrPartitions = str | PartitionLike | Iterable[str | PartitionLike] | None
"""Topics, each with all its partitions, and single partitions."""
Resource = ConfigResource | tuple[str, str]


def read_names(names: Iterable[str], argument: str) -> list[str]:
    """Names without duplicates. TypeError for a single str, whose letters would be names."""
    checked = list(dict.fromkeys(() if isinstance(names, str) else names))
    if isinstance(names, str) or not all(isinstance(name, str) for name in checked):
        raise TypeError(f"{argument}={names!r}: use a list of str")
    return checked


def read_new_topics(topics: Iterable[NewTopic | str]) -> list[NewTopic]:
    if isinstance(topics, str):
        raise TypeError(f"topics={topics!r}: use a list, or create_topic for one topic")
    return [NewTopic(topic) if isinstance(topic, str) else topic for topic in topics]


def read_scope(scope: TopicsOrPartitions) -> list[str | TopicPartition] | None:
    if scope is None:
        return None
    if isinstance(scope, str):
        return [scope]
    if isinstance(scope, TopicPartition) or (isinstance(scope, tuple) and len(scope) == 2 and _is_int(scope[1])):
        return [read_partition(scope)]  # type: ignore[arg-type]
    return [item if isinstance(item, str) else read_partition(item) for item in scope]  # type: ignore[arg-type]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def read_resource(resource: Resource) -> ConfigResource:
    if isinstance(resource, ConfigResource):
        return resource
    if isinstance(resource, tuple) and len(resource) == 2:
        return ConfigResource(str(resource[0]), str(resource[1]))
    raise InvalidRequestError(
        f"{resource!r} is not a resource: use ConfigResource('topic', name), ConfigResource('broker', id) or "
        "ConfigResource('cluster')"
    )


def read_offsets(offsets: Mapping[Any, int | OffsetAndMetadata]) -> dict[TopicPartition, OffsetAndMetadata]:
    return consumer_arguments.read_offsets(offsets) or {}


def read_before(before: Mapping[Any, int | str]) -> dict[TopicPartition, int]:
    """Offsets; -1 for "end"."""
    offsets: dict[TopicPartition, int] = {}
    for key, offset in before.items():
        partition = read_partition(key)
        if offset == "end":
            offsets[partition] = -1
        elif not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
            raise InvalidRequestError(f"{partition}: {offset!r} is not an offset: use a number from 0 on, or 'end'")
        else:
            offsets[partition] = offset
    return offsets


def read_reset(
    to: Any, to_time: Any, shift_by: int | None, by_duration: Any, from_file: str | PathLike[str] | None
) -> dict[str, Any]:
    """Returns the arguments of `read_target`. Reads `from_file`."""
    if from_file is not None:
        if to is not None:
            raise InvalidRequestError("to and from_file exclude each other: use one of them")
        to = decode_table(Path(from_file).read_text(encoding="utf-8"), where=str(from_file))
    elif isinstance(to, Mapping):
        to = {read_partition(partition): offset for partition, offset in to.items()}
    return {"to": to, "to_time": to_time, "shift_by": shift_by, "by_duration": by_duration}


def read_members(
    member_ids: Iterable[str], instance_ids: Iterable[str], *, all_members: bool
) -> tuple[list[str], list[str]]:
    """Two empty lists mean all members to the coordinator: only `all_members` gives them."""
    members, instances = read_names(member_ids, "member_ids"), read_names(instance_ids, "instance_ids")
    if all_members == bool(members or instances):
        raise InvalidRequestError("name members (member_ids, instance_ids), or all_members=True")
    return members, instances


def online_log_dir(directories: Iterable[LogDir], directory: UUID | str) -> UUID:
    """Returns the id of an online log directory, named by id (UUID or its 22 characters) or by path."""
    online = {row.path: row.directory_id for row in directories if row.directory_id is not None and row.error is None}
    known = {**{str(uuid): uuid for uuid in online.values()}, **{to_text(uuid): uuid for uuid in online.values()}}
    directory_id = {**known, **online}.get(str(directory).rstrip("/") or "/")
    if directory_id is None:
        raise InvalidRequestError(
            f"the broker has no online log directory {str(directory)!r}: use one of {', '.join(sorted(online))}"
        )
    return directory_id
