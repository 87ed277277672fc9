"""The half of `MockAdmin` that is about groups, offsets and records: what the test says of them, and what a cluster
would refuse. Its other half is `mock_admin`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from os import PathLike
from typing import Any, Literal, TypeVar

from tidelog.client.admin_core import AdminClosedError
from tidelog.client.admin_front import Scope, read_asked, read_before, read_members, read_offsets, read_scope
from tidelog.client.admin_values import (
    GroupDescription,
    GroupList,
    GroupListing,
    GroupOffset,
    ListedOffset,
    MemberDescription,
    OffsetChange,
    Outcomes,
    PartitionLag,
)
from tidelog.client.consumer_front import Partitions, When, read_partition, read_partitions
from tidelog.client.durations import time_ms
from tidelog.client.offset_resets import Target, planned, read_target, read_time
from tidelog.client.offsets import EARLIEST, LATEST, MAX_TIMESTAMP
from tidelog.client.record import OffsetAndMetadata, TopicPartition
from tidelog.model.errors import (
    ErrorCode,
    InvalidRequestError,
    OffsetOutOfRangeError,
    RemoteError,
    TidelogError,
    UnknownTopicOrPartitionError,
)
from tidelog.model.group_errors import GroupIdNotFoundError, GroupSubscribedError, NonEmptyGroupError
from tidelog.testing.mock_metadata import MockMetadata

K = TypeVar("K")
V = TypeVar("V")


class _Group:
    def __init__(self) -> None:
        self.offsets: dict[TopicPartition, GroupOffset] = {}
        self.members: list[MemberDescription] = []


class MockAdminGroups:
    """State, and the calls about groups, offsets and records."""

    def __init__(self, metadata: MockMetadata) -> None:
        self.calls: list[str] = []
        """Names of the methods that were called, in order."""
        self._metadata = metadata
        self._groups: dict[str, _Group] = {}
        self._ends: dict[TopicPartition, tuple[int, int]] = {}
        self._times: dict[TopicPartition, list[tuple[int, int]]] = {}
        self._errors: dict[str, deque[Exception]] = {}
        self._failures = 0
        self._is_closed = False

    # What a test does with it.

    def set_offsets(
        self, partition: Partitions, *, start: int = 0, end: int, times: Iterable[tuple[int, int]] = ()
    ) -> None:
        """What the log of a partition has; `times` are (timestamp, offset) for look-ups by time, in order."""
        place = self._known(read_partition(partition))
        if not 0 <= start <= end:
            raise ValueError(f"{place}: a log from {start} to {end}")
        self._ends[place] = (start, end)
        self._times[place] = sorted(times)

    def add_group(
        self,
        group: str,
        offsets: Mapping[Any, int | OffsetAndMetadata] | None = None,
        *,
        members: Mapping[str, Iterable[Partitions]] | None = None,
    ) -> None:
        """A group with these offsets, and members (id -> the partitions that it holds), or a change of one."""
        found = self._groups.setdefault(group, _Group())
        for place, told in read_offsets(offsets or {}).items():
            committed = OffsetAndMetadata(told) if isinstance(told, int) else told
            found.offsets[self._known(place)] = GroupOffset(committed, _now_ms())
        if members is not None:
            found.members = [_member(name, read_partitions(held)) for name, held in members.items()]

    # Groups, as the real one.

    def list_groups(
        self,
        *,
        states: Iterable[str] = (),
        types: Iterable[str] = (),
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> GroupList:
        self._called("list_groups")
        wanted, kinds = set(states), set(types)
        found = (
            GroupListing(name, "consumer", _state(group), len(group.members), 1)
            for name, group in sorted(self._groups.items())
        )
        rows = (one for one in found if (not wanted or one.state in wanted) and (not kinds or one.type in kinds))
        return GroupList(tuple(rows), {}, {})

    def describe_group(self, group: str, *, timeout_ms: int | None = None) -> GroupDescription:
        self._called("describe_group")
        return self._description(group)

    def describe_groups(
        self, groups: Iterable[str], *, partial: bool = False, timeout_ms: int | None = None
    ) -> Outcomes[str, GroupDescription]:
        self._called("describe_groups")
        return self._whole(each(groups, self._description), partial)

    def _description(self, name: str) -> GroupDescription:
        group = self._group(name)
        return GroupDescription(
            name, "consumer", _state(group), 1, 1, "uniform", tuple(group.members), 1, "broker-1.mock:9292"
        )

    def group_lag(self, group: str, *, timeout_ms: int | None = None) -> list[PartitionLag]:
        self._called("group_lag")
        found = self._group(group)
        holders = {place: one for one in found.members for place in one.assignment}
        rows = []
        for place in sorted({*found.offsets, *holders}):
            known, holder = found.offsets.get(place), holders.get(place)
            rows.append(
                PartitionLag(
                    partition=place,
                    committed=None if known is None else known.committed.offset,
                    end=self._log(place)[1],
                    member_id="" if holder is None else holder.member_id,
                    client_id="" if holder is None else holder.client_id,
                    host="" if holder is None else holder.host,
                    metadata="" if known is None else known.committed.metadata,
                )
            )
        return rows

    def group_offsets(
        self, group: str, partitions: Iterable[Partitions] | None = None, *, timeout_ms: int | None = None
    ) -> dict[TopicPartition, GroupOffset]:
        self._called("group_offsets")
        known = self._groups[group].offsets if group in self._groups else {}
        wanted = sorted(known) if partitions is None else read_partitions(partitions)
        return {place: known[place] for place in wanted if place in known}

    def alter_group_offsets(
        self,
        group: str,
        offsets: Mapping[TopicPartition, int | OffsetAndMetadata],
        *,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[TopicPartition, int]:
        self._called("alter_group_offsets")
        wanted = read_offsets(offsets)
        if not wanted:
            raise InvalidRequestError("no partition is named")
        self._check_inactive(group)

        def alter(place: TopicPartition) -> int:
            self._known(place)
            self.add_group(group, {place: wanted[place]})
            return self._groups[group].offsets[place].committed.offset

        return self._whole(each(wanted, alter), partial)

    def reset_group_offsets(
        self,
        group: str,
        *,
        to: Literal["earliest", "latest"] | int | Mapping[TopicPartition, int] | None = None,
        to_time: When | None = None,
        shift_by: int | None = None,
        by_duration: str | timedelta | None = None,
        from_file: str | PathLike[str] | None = None,
        topics: Scope = None,
        dry_run: bool = False,
        timeout_ms: int | None = None,
    ) -> list[OffsetChange]:
        self._called("reset_group_offsets")
        target = read_target(now_ms=_now_ms(), **read_asked(to, to_time, shift_by, by_duration, from_file))
        scope = read_scope(topics)
        if not dry_run:
            self._check_inactive(group)
        known = self._groups[group].offsets if group in self._groups else {}
        places = self._places(scope) if scope is not None else sorted(target.table or known)
        changes = planned(
            target,
            places,
            committed={place: one.committed for place, one in known.items()},
            starts={place: self._log(place)[0] for place in places},
            ends={place: self._log(place)[1] for place in places},
            found={place: self._found(place, target) for place in places},
        )
        if not dry_run and changes:
            self.add_group(group, {change.partition: change.after for change in changes})
        return changes

    def delete_group_offsets(
        self, group: str, topics: Scope, *, partial: bool = False, timeout_ms: int | None = None
    ) -> Outcomes[TopicPartition, None]:
        self._called("delete_group_offsets")
        found = self._group(group)
        held = {place.topic for one in found.members for place in one.assignment}

        def delete(place: TopicPartition) -> None:
            if place.topic in held:
                raise GroupSubscribedError(f"members of '{group}' read '{place.topic}'")
            found.offsets.pop(place, None)

        return self._whole(each(self._places(read_scope(topics) or []), delete), partial)

    def delete_group(self, group: str, *, timeout_ms: int | None = None) -> None:
        self._called("delete_group")
        self._delete_group(group)

    def delete_groups(
        self, groups: Iterable[str], *, partial: bool = False, timeout_ms: int | None = None
    ) -> Outcomes[str, None]:
        self._called("delete_groups")
        return self._whole(each(groups, self._delete_group), partial)

    def _delete_group(self, group: str) -> None:
        self._group(group)
        self._check_inactive(group)
        del self._groups[group]

    def remove_members(
        self,
        group: str,
        *,
        member_ids: Iterable[str] = (),
        instance_ids: Iterable[str] = (),
        everybody: bool = False,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[str, None]:
        self._called("remove_members")
        members, instances = read_members(member_ids, instance_ids, everybody=everybody)
        found = self._group(group)
        wanted = [*members, *instances] or [one.member_id for one in found.members]

        def remove(name: str) -> None:
            gone = [one for one in found.members if name in (one.member_id, one.instance_id)]
            if not gone:
                raise RemoteError(f"'{group}' has no member '{name}'", code=ErrorCode.UNKNOWN_MEMBER_ID)
            found.members.remove(gone[0])

        return self._whole(each(wanted, remove), partial)

    # Records.

    def list_offsets(
        self,
        topics: Scope,
        *,
        at: Literal["earliest", "latest", "max_timestamp"] | When = "latest",
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[TopicPartition, ListedOffset]:
        self._called("list_offsets")
        asked = read_time(at, _now_ms())

        def listed(place: TopicPartition) -> ListedOffset:
            start, end = self._log(place)
            if asked in (EARLIEST, LATEST):
                return ListedOffset(start if asked == EARLIEST else end, None, -1)
            there = [(stamp, offset) for stamp, offset in self._times.get(place, ()) if start <= offset < end]
            if asked == MAX_TIMESTAMP:
                found = max(there, key=lambda row: (row[0], -row[1]), default=None)
            else:
                found = next((row for row in there if row[0] >= asked), None)
            return ListedOffset(None, None, -1) if found is None else ListedOffset(found[1], found[0], -1)

        return self._whole(each(self._places(read_scope(topics) or []), listed), partial)

    def delete_records(
        self,
        before: Mapping[TopicPartition, int | Literal["end"]],
        *,
        partial: bool = False,
        timeout_ms: int | None = None,
    ) -> Outcomes[TopicPartition, int]:
        self._called("delete_records")
        return self._whole(self._trim(read_before(before)), partial)

    def delete_records_by_time(
        self, topics: Scope, when: When, *, partial: bool = False, timeout_ms: int | None = None
    ) -> Outcomes[TopicPartition, int]:
        self._called("delete_records_by_time")
        target = Target(time_ms=max(0, time_ms(when, _now_ms())))
        places = self._places(read_scope(topics) or [])
        return self._whole(self._trim({place: self._found(place, target) for place in places}), partial)

    def _trim(self, before: Mapping[TopicPartition, int]) -> Outcomes[TopicPartition, int]:
        if not before:
            raise InvalidRequestError("no partition is named")

        def trim(place: TopicPartition) -> int:
            start, end = self._log(self._known(place))
            wanted = end if before[place] < 0 else before[place]
            if wanted > end:
                raise OffsetOutOfRangeError(
                    f"{place} ends at {end}, before {wanted}", offset=wanted, start=start, end=end
                )
            self._ends[place] = (max(start, wanted), end)
            return self._ends[place][0]

        return each(before, trim)

    # Within.

    def _called(self, method: str) -> None:
        if self._is_closed:
            raise AdminClosedError("this admin client was closed")
        self.calls.append(method)
        waiting = self._errors.get(method)
        if waiting:
            self._failures += 1
            raise waiting.popleft()

    def _whole(self, found: Outcomes[K, V], partial: bool) -> Outcomes[K, V]:
        if not partial:
            found.all()
        return found

    def _known(self, place: TopicPartition) -> TopicPartition:
        topic = self._metadata.image.topic_named(place.topic)
        if topic is None or place.partition not in topic.partitions:
            raise UnknownTopicOrPartitionError(f"there is no partition {place}")
        return place

    def _places(self, scope: Iterable[str | TopicPartition]) -> list[TopicPartition]:
        """Partitions, and all of those topics that are named whole."""
        found: dict[TopicPartition, None] = {}
        for one in scope:
            if isinstance(one, TopicPartition):
                found[self._known(one)] = None
                continue
            topic = self._metadata.image.topic_named(one)
            if topic is None:
                raise UnknownTopicOrPartitionError(f"there is no topic '{one}'")
            found.update(dict.fromkeys(TopicPartition(one, number) for number in sorted(topic.partitions)))
        return list(found)

    def _log(self, place: TopicPartition) -> tuple[int, int]:
        return self._ends.get(self._known(place), (0, 0))

    def _found(self, place: TopicPartition, target: Target) -> int:
        """What a look-up by the target's time gives; -1: no such record."""
        start, end = self._log(place)
        if target.time_ms is None or target.time_ms < 0:
            return start if target.time_ms == EARLIEST else end
        later = (offset for stamp, offset in self._times.get(place, ()) if stamp >= target.time_ms)
        return next((offset for offset in later if start <= offset < end), -1)

    def _group(self, name: str) -> _Group:
        found = self._groups.get(name)
        if found is None:
            raise GroupIdNotFoundError(f"there is no group '{name}'")
        return found

    def _check_inactive(self, group: str) -> None:
        if group in self._groups and self._groups[group].members:
            count = len(self._groups[group].members)
            raise NonEmptyGroupError(f"group '{group}' has {count} members: stop them first")


def each(keys: Iterable[K], job: Callable[[K], V]) -> Outcomes[K, V]:
    done: dict[K, V] = {}
    errors: dict[K, TidelogError] = {}
    for key in keys:
        try:
            done[key] = job(key)
        except TidelogError as error:
            errors[key] = error
    return Outcomes(done, errors)


def _member(name: str, held: list[TopicPartition]) -> MemberDescription:
    topics = tuple(sorted({place.topic for place in held}))
    return MemberDescription(name, "", name, "mock", "", 1, topics, "", tuple(held), tuple(held))


def _state(group: _Group) -> str:
    return "stable" if group.members else "empty"


def _now_ms() -> int:
    return int(time.time() * 1000)
