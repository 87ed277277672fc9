"""`GroupAdmin`: groups and their offsets, for those who are no members. Each group is asked of its coordinator.

    answer                                        what happens
    not the coordinator, loading, nobody there    find it anew and ask again, until time is up
    no answer to a question, or to a change that  the same
      may be made twice (offsets)
    no answer to another change (delete, remove)  raised: it may have been made
    an error of the group                         told for the group, not for the others

Offsets of a group belong to its members while it has any: changes are refused with NON_EMPTY_GROUP then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar
from uuid import UUID

from google.protobuf.message import Message

from tidelog.client.admin_values import (
    GroupDescription,
    GroupList,
    GroupListing,
    GroupOffset,
    MemberDescription,
    OffsetChange,
    Outcomes,
    PartitionLag,
)
from tidelog.client.cluster import ClusterClient, error_in
from tidelog.client.coordinators import ELSEWHERE, CoordinatorInfo, Coordinators, is_passing
from tidelog.client.metadata import TopicInfo
from tidelog.client.offset_resets import Table, Target, planned
from tidelog.client.offsets import EARLIEST, LATEST, FoundOffset, list_offsets
from tidelog.client.record import OffsetAndMetadata, TopicPartition
from tidelog.model.errors import (
    ErrorCode,
    InvalidRequestError,
    RemoteError,
    TidelogError,
    UnknownTopicOrPartitionError,
    UnreachableError,
)
from tidelog.model.group_errors import NonEmptyGroupError
from tidelog.rpc.door import Method, method_named
from tidelog.rpc.v1 import common_pb2 as common
from tidelog.rpc.v1 import groups_pb2 as pb

_LIST = method_named("Groups", "ListGroups")
_DESCRIBE = method_named("Groups", "DescribeGroups")
_DELETE = method_named("Groups", "DeleteGroups")
_COMMIT = method_named("Groups", "CommitOffsets")
_FETCH = method_named("Groups", "FetchOffsets")
_DELETE_OFFSETS = method_named("Groups", "DeleteOffsets")
_REMOVE = method_named("Groups", "RemoveMembers")
_ATTEMPT_MS = 5_000
REMEMBERED_MAX = 10_000
AT_ONCE = 16
"""Coordinators or topics that are asked at a time."""

T = TypeVar("T")
R = TypeVar("R")


async def each(items: Iterable[T], job: Callable[[T], Awaitable[R]]) -> list[R]:
    """Of every item, a few at a time."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(item: T) -> R:
        async with gate:
            return await job(item)

    return await asyncio.gather(*(one(item) for item in items))


def _is_undone(error: TidelogError) -> bool:
    """Whether it says for sure that nothing was carried out, and may pass."""
    return isinstance(error, UnreachableError) or error.code in ELSEWHERE


class GroupAdmin:
    """Used on one loop. `timeout_ms` of each call bounds all its attempts."""

    def __init__(self, cluster: ClusterClient) -> None:
        self._cluster = cluster
        self._coordinators = Coordinators(cluster)
        self._found = 0

    # How a coordinator is asked.

    async def _ask(
        self, group: str, method: Method, request: Message, timeout_ms: int, *, is_repeatable: bool = True
    ) -> tuple[CoordinatorInfo, Any]:
        """Who coordinates the group, and its answer."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_ms / 1000
        backoff = self._cluster.backoff()
        self._found += 1
        if self._found >= REMEMBERED_MAX:  # forget them all: a bound on what is remembered
            self._found, self._coordinators = 0, Coordinators(self._cluster)
        while True:
            left_ms = max(1, int((end_s - loop.time()) * 1000))
            where = await self._coordinators.find(group, timeout_ms=left_ms)
            try:
                answer = await self._cluster.connections.call(
                    where.address, method, request, timeout_ms=min(left_ms, _ATTEMPT_MS) if is_repeatable else left_ms
                )
                error = self._elsewhere_in(answer)
            except TidelogError as caught:
                error = caught
            if error is None:
                return where, answer
            if not (is_passing(error) if is_repeatable else _is_undone(error)):
                raise error
            self._coordinators.forget(group)
            pause_s = backoff.next_s()
            if loop.time() + pause_s >= end_s:
                raise error
            await asyncio.sleep(pause_s)

    def _elsewhere_in(self, answer: Any) -> TidelogError | None:
        """The coordinator has moved: of one group that is said of all rows, or of none."""
        rows = [row for field, rows in answer.ListFields() if field.is_repeated for row in rows]
        if rows and "error" in rows[0].DESCRIPTOR.fields_by_name:
            error = error_in(rows[0])
            if error is not None and error.code in ELSEWHERE:
                return error
        return None

    # Groups.

    async def list_groups(
        self, states: Sequence[str], types: Sequence[str], *, partial: bool, timeout_ms: int
    ) -> GroupList:
        """Every broker is asked. `partial`: once; what is missing is told. Otherwise until all have answered."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_ms / 1000
        backoff = self._cluster.backoff()
        request = pb.ListGroupsRequest(states=states, types=types)
        while True:
            await self._cluster.refresh()
            brokers = sorted(self._cluster.view.brokers)
            left_ms = max(1, int((end_s - loop.time()) * 1000))
            answers = await each(brokers, lambda node, ms=left_ms: self._listed(node, request, ms))  # type: ignore[misc]
            by_broker = dict(zip(brokers, answers, strict=True))
            errors = {node: one for node, one in by_broker.items() if isinstance(one, TidelogError)}
            good = {node: one for node, one in by_broker.items() if not isinstance(one, TidelogError)}
            loading = {node: one.loading for node, one in good.items() if one.loading}
            rows: dict[str, GroupListing] = {}
            for node, one in good.items():
                for row in one.groups:
                    # A coordinator that has just moved may be in two answers; one line is enough.
                    rows[row.group] = GroupListing(row.group, row.type, row.state, row.members, node)
            found = GroupList(tuple(rows[name] for name in sorted(rows)), errors, loading)
            if partial or not (errors or loading):
                return found
            pause_s = backoff.next_s()
            first = next(iter(errors.values()), None)
            if (first is not None and not is_passing(first)) or loop.time() + pause_s >= end_s:
                if first is not None:
                    raise first
                told = ", ".join(map(str, loading))
                raise RemoteError(f"brokers {told} load groups", code=ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
            await asyncio.sleep(pause_s)

    async def _listed(self, node: int, request: pb.ListGroupsRequest, timeout_ms: int) -> Any:
        try:
            return await self._cluster.call_node(node, _LIST, request, timeout_ms=min(timeout_ms, _ATTEMPT_MS))
        except TidelogError as error:
            return error

    async def describe(self, groups: Sequence[str], *, timeout_ms: int) -> Outcomes[str, GroupDescription]:
        async def one(group: str) -> GroupDescription | TidelogError:
            try:
                where, answer = await self._ask(group, _DESCRIBE, pb.DescribeGroupsRequest(groups=[group]), timeout_ms)
            except TidelogError as error:
                return error
            (row,) = answer.groups
            return error_in(row) or _description(row, where)

        return _outcomes(groups, await each(groups, one))

    async def delete(self, groups: Sequence[str], *, timeout_ms: int) -> Outcomes[str, None]:
        async def one(group: str) -> TidelogError | None:
            request = pb.DeleteGroupsRequest(groups=[group])
            try:
                _, answer = await self._ask(group, _DELETE, request, timeout_ms, is_repeatable=False)
            except TidelogError as error:
                return error
            return error_in(answer.groups[0])

        return _outcomes(groups, await each(groups, one))

    async def remove_members(
        self, group: str, member_ids: Sequence[str], instance_ids: Sequence[str], *, timeout_ms: int
    ) -> Outcomes[str, None]:
        """Both empty: all of them."""
        request = pb.RemoveMembersRequest(group=group, member_ids=member_ids, instance_ids=instance_ids)
        _, answer = await self._ask(group, _REMOVE, request, timeout_ms, is_repeatable=False)
        return _outcomes([row.name for row in answer.members], [error_in(row) for row in answer.members])

    # Offsets.

    async def offsets(
        self, group: str, partitions: Sequence[TopicPartition] | None = None, *, timeout_ms: int
    ) -> dict[TopicPartition, GroupOffset]:
        """What is committed, of these or of all; without those that have nothing. A topic that is gone goes by its
        id."""
        request = pb.FetchOffsetsRequest(group=group, partitions=_named(partitions or ()))
        _, answer = await self._ask(group, _FETCH, request, timeout_ms)
        found: dict[TopicPartition, GroupOffset] = {}
        for row in answer.offsets:
            if (error := error_in(row)) is not None:
                raise error
            if row.offset >= 0:
                told = OffsetAndMetadata(row.offset, row.metadata, row.leader_epoch)
                name = row.topic or str(UUID(bytes=row.topic_id))
                place = TopicPartition(name, row.partition)
                found[place] = GroupOffset(told, row.commit_time_ms, is_topic_gone=not row.topic)
        return dict(sorted(found.items()))

    async def alter_offsets(
        self, group: str, offsets: Mapping[TopicPartition, OffsetAndMetadata], *, timeout_ms: int
    ) -> Outcomes[TopicPartition, int]:
        request = pb.CommitOffsetsRequest(group=group, member_id="", member_epoch=-1)
        for place, told in offsets.items():
            request.offsets.add(
                topic=place.topic,
                partition=place.partition,
                offset=told.offset,
                leader_epoch=told.leader_epoch,
                metadata=told.metadata,
            )
        try:
            _, answer = await self._ask(group, _COMMIT, request, timeout_ms)
        except RemoteError as error:
            raise self._judged(group, error) from error
        rows: list[int | TidelogError] = []
        for told, row in zip(offsets.values(), answer.offsets, strict=True):
            failure = error_in(row)
            rows.append(told.offset if failure is None else self._judged(group, failure))
        return _outcomes(list(offsets), rows)

    def _judged(self, group: str, error: TidelogError) -> TidelogError:
        if error.code is not ErrorCode.UNKNOWN_MEMBER_ID:
            return error
        return active_error(group)

    async def delete_offsets(
        self, group: str, partitions: Sequence[TopicPartition], *, timeout_ms: int
    ) -> Outcomes[TopicPartition, None]:
        request = pb.DeleteOffsetsRequest(group=group, partitions=_named(partitions))
        _, answer = await self._ask(group, _DELETE_OFFSETS, request, timeout_ms)
        return _outcomes(partitions, [error_in(row) for row in answer.offsets])

    # Lag.

    async def lag(self, group: str, *, timeout_ms: int) -> tuple[GroupDescription, list[PartitionLag]]:
        """The group, and each partition that it has committed or holds."""
        described = await self.describe([group], timeout_ms=timeout_ms)
        description = described[group]
        committed = await self.offsets(group, timeout_ms=timeout_ms)
        holders = {place: member for member in description.members for place in member.assignment}
        places = sorted({*committed, *holders})
        ends = await self._find(places, LATEST, timeout_ms=timeout_ms)
        rows = []
        for place in places:
            end, holder, told = ends[place], holders.get(place), committed.get(place)
            rows.append(
                PartitionLag(
                    partition=place,
                    committed=None if told is None else told.committed.offset,
                    end=None if isinstance(end, TidelogError) else end,
                    member_id="" if holder is None else holder.member_id,
                    client_id="" if holder is None else holder.client_id,
                    host="" if holder is None else holder.host,
                    metadata="" if told is None else told.committed.metadata,
                    error=end if isinstance(end, TidelogError) else None,
                )
            )
        return description, rows

    async def _find(
        self, places: Sequence[TopicPartition], timestamp: int, *, timeout_ms: int
    ) -> dict[TopicPartition, int | TidelogError]:
        found = await self.look_up(places, timestamp, timeout_ms=timeout_ms)
        return {place: row if isinstance(row, TidelogError) else row.offset for place, row in found.items()}

    async def look_up(
        self, places: Sequence[TopicPartition], timestamp: int, *, timeout_ms: int
    ) -> dict[TopicPartition, FoundOffset | TidelogError]:
        """What the leaders answer; errors of a topic or a partition stand in its rows."""
        by_topic: dict[str, list[TopicPartition]] = {}
        for place in places:
            by_topic.setdefault(place.topic, []).append(place)

        async def ask(name: str) -> dict[TopicPartition, FoundOffset | TidelogError]:
            try:
                topic = await self._cluster.topic(name)
                return await self._look_up_in(topic, by_topic[name], timestamp, timeout_ms)
            except TidelogError as error:
                return dict.fromkeys(by_topic[name], error)

        found: dict[TopicPartition, FoundOffset | TidelogError] = {}
        for rows in await each(by_topic, ask):
            found |= rows
        return found

    async def _look_up_in(
        self, topic: TopicInfo, places: Sequence[TopicPartition], timestamp: int, timeout_ms: int
    ) -> dict[TopicPartition, FoundOffset | TidelogError]:
        count = len(topic.partitions)
        there = [topic.partitions[place.partition] for place in places if 0 <= place.partition < count]
        rows: dict[Any, FoundOffset] = {}
        if there:
            rows = await list_offsets(self._cluster, topic, timestamp, partitions=there, timeout_ms=timeout_ms)
        by_number = {place.partition: row.error or row for place, row in rows.items()}
        missing = f"'{topic.name}' has partitions 0 to {count - 1}"
        return {
            place: by_number.get(place.partition, UnknownTopicOrPartitionError(f"{place}: {missing}"))
            for place in places
        }

    async def find(
        self, places: Sequence[TopicPartition], timestamp: int, *, timeout_ms: int
    ) -> dict[TopicPartition, int]:
        """As the leaders tell; raises the first error."""
        found = await self._find(places, timestamp, timeout_ms=timeout_ms)
        good: dict[TopicPartition, int] = {}
        for place, row in found.items():
            if isinstance(row, TidelogError):
                raise row
            good[place] = row
        return good

    # Resets.

    async def partitions_of(
        self, group: str, topics: Iterable[str | TopicPartition] | None, *, timeout_ms: int
    ) -> list[TopicPartition]:
        """All partitions of topics that are named, those partitions that are named; None: what the group has of topics
        that are there."""
        if topics is None:
            held = await self.offsets(group, timeout_ms=timeout_ms)
            found = [place for place, one in held.items() if not one.is_topic_gone]
            if not found:
                raise InvalidRequestError(f"group '{group}' has committed nothing: name the topics")
            return found
        places: dict[TopicPartition, None] = {}
        for item in topics:
            if isinstance(item, str):
                topic = await self._cluster.topic(item)
                places.update({TopicPartition(item, place.partition): None for place in topic.partitions})
            else:
                places[TopicPartition(*item)] = None
        if not places:
            raise InvalidRequestError("no topic and no partition is named")
        return sorted(places)

    async def plan_reset(
        self, group: str, target: Target, topics: Iterable[str | TopicPartition] | None, *, timeout_ms: int
    ) -> list[OffsetChange]:
        """What would be committed; nothing is changed."""
        if target.table is not None and topics is None:
            places = sorted(target.table)
        else:
            places = await self.partitions_of(group, topics, timeout_ms=timeout_ms)
            if target.table is not None:
                places = [place for place in places if place in target.table]
        committed = await self.offsets(group, timeout_ms=timeout_ms)
        # The end first: what is written between the two look-ups is neither passed over nor taken for older.
        ends = await self.find(places, LATEST, timeout_ms=timeout_ms)
        starts = await self.find(places, EARLIEST, timeout_ms=timeout_ms)
        found: Table = {}
        if target.time_ms is not None:
            asked = {EARLIEST: starts, LATEST: ends}.get(target.time_ms)
            found = await self.find(places, target.time_ms, timeout_ms=timeout_ms) if asked is None else asked
        return planned(
            target,
            places,
            committed={place: one.committed for place, one in committed.items()},
            starts=starts,
            ends={place: max(end, starts[place], found.get(place, -1)) for place, end in ends.items()},
            found=found,
        )

    async def check_inactive(self, group: str, *, timeout_ms: int) -> None:
        """Raises NON_EMPTY_GROUP if it has members. The coordinator checks again when offsets are changed."""
        described = await self.describe([group], timeout_ms=timeout_ms)
        error = described.errors.get(group)
        if error is not None:
            if error.code is ErrorCode.GROUP_ID_NOT_FOUND:
                return  # it has no members
            raise error
        if described[group].is_active:
            raise active_error(group, described[group])


def active_error(group: str, description: GroupDescription | None = None) -> NonEmptyGroupError:
    told = ""
    if description is not None:
        hosts = sorted({member.host or member.client_id for member in description.members})
        told = f" ({len(description.members)}, on {', '.join(hosts[:5])})"
    return NonEmptyGroupError(
        f"group '{group}' has active members{told}: stop them first, its offsets are theirs while they run"
    )


def _named(partitions: Iterable[TopicPartition]) -> list[common.TopicPartition]:
    return [common.TopicPartition(topic=place[0], partition=place[1]) for place in partitions]


def _outcomes(keys: Sequence[T], rows: Sequence[R | TidelogError]) -> Outcomes[T, R]:
    done: dict[T, R] = {}
    errors: dict[T, TidelogError] = {}
    for key, row in zip(keys, rows, strict=True):
        if isinstance(row, TidelogError):
            errors[key] = row
        else:
            done[key] = row
    return Outcomes(done, errors)


def _places(partitions: pb.Partitions) -> tuple[TopicPartition, ...]:
    return tuple(
        sorted(
            TopicPartition(topic.topic or str(UUID(bytes=topic.topic_id)), number)
            for topic in partitions.topics
            for number in topic.partitions
        )
    )


def _description(row: pb.GroupDescription, where: CoordinatorInfo) -> GroupDescription:
    return GroupDescription(
        group=row.group,
        type=row.type,
        state=row.state,
        epoch=row.epoch,
        assignment_epoch=row.assignment_epoch,
        assignor=row.assignor,
        members=tuple(
            MemberDescription(
                member_id=member.member_id,
                instance_id=member.instance_id,
                client_id=member.client_id,
                host=member.client_host,
                rack=member.rack,
                epoch=member.member_epoch,
                topics=tuple(member.topics),
                pattern=member.pattern,
                assignment=_places(member.assignment),
                target=_places(member.target),
            )
            for member in row.members
        ),
        coordinator=where.node,
        coordinator_address=where.address,
    )
