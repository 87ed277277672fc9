"""What both admin clients share: how a user's arguments are read, and how a core is made on the IO thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from tidelog.client import io_thread
from tidelog.client.admin_core import AdminCore
from tidelog.client.admin_values import ConfigResource, NewTopic
from tidelog.client.consumer_front import Partitions, read_partition
from tidelog.client.names import AdminOptions
from tidelog.client.new_cluster import new_cluster
from tidelog.client.offset_resets import decode_table
from tidelog.client.record import OffsetAndMetadata, TopicPartition
from tidelog.model.errors import InvalidRequestError

Where = str | Partitions
"""A topic, with all its partitions, or one partition."""
Scope = Where | Iterable[Where] | None
Resource = ConfigResource | tuple[str, str]


def new_core(host: io_thread.IoThread, options: AdminOptions) -> AdminCore:
    """On the IO thread."""
    return AdminCore(new_cluster(host, options), timeout_ms=options.default_api_timeout_ms)


def read_new_topics(topics: Iterable[NewTopic | str]) -> list[NewTopic]:
    return [NewTopic(topic) if isinstance(topic, str) else topic for topic in topics]


def read_scope(given: Scope) -> list[str | TopicPartition] | None:
    if given is None:
        return None
    if isinstance(given, str):
        return [given]
    if isinstance(given, TopicPartition) or (isinstance(given, tuple) and len(given) == 2 and _is_number(given[1])):
        return [read_partition(given)]  # type: ignore[arg-type]
    return [one if isinstance(one, str) else read_partition(one) for one in given]  # type: ignore[arg-type]


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def read_resource(given: Resource) -> ConfigResource:
    if isinstance(given, ConfigResource):
        return given
    if isinstance(given, tuple) and len(given) == 2:
        return ConfigResource(str(given[0]), str(given[1]))
    raise InvalidRequestError(f"{given!r} has no settings: ConfigResource('topic', name), ('broker', id), ('cluster')")


def read_offsets(offsets: Mapping[Any, int | OffsetAndMetadata]) -> dict[TopicPartition, int | OffsetAndMetadata]:
    return {read_partition(place): told for place, told in offsets.items()}


def read_before(before: Mapping[Any, int | str]) -> dict[TopicPartition, int]:
    """Offsets, or "end"."""
    found: dict[TopicPartition, int] = {}
    for place, offset in before.items():
        name = read_partition(place)
        if offset == "end":
            found[name] = -1
        elif not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
            raise InvalidRequestError(f"{name}: {offset!r} is no offset: a number from 0 on, or 'end'")
        else:
            found[name] = offset
    return found


def read_asked(
    to: Any, to_time: Any, shift_by: int | None, by_duration: Any, from_file: str | PathLike[str] | None
) -> dict[str, Any]:
    """Where to go, as the core takes it; a file is read here."""
    asked = {"to": to, "to_time": to_time, "shift_by": shift_by, "by_duration": by_duration}
    if from_file is not None:
        if to is not None:
            raise InvalidRequestError("to and from_file is given: one of both says where to go")
        asked["to"] = decode_table(Path(from_file).read_text(encoding="utf-8"), where=str(from_file))
    elif isinstance(to, Mapping):
        asked["to"] = {read_partition(place): offset for place, offset in to.items()}
    return asked


def read_members(
    member_ids: Iterable[str], instance_ids: Iterable[str], *, everybody: bool
) -> tuple[list[str], list[str]]:
    """Both empty means all to the coordinator: only if that was said."""
    members, instances = list(member_ids), list(instance_ids)
    if everybody == bool(members or instances):
        raise InvalidRequestError("name members (member_ids, instance_ids), or everybody=True")
    return members, instances
