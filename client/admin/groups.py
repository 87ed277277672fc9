"""Admin operations on groups and their offsets. Each group is asked of its coordinator.

Only members commit offsets of a group that has members: changes are rejected with NON_EMPTY_GROUP then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from datetime import timedelta
from os import PathLike
from typing import Any, Literal

from tidelog.client.admin import conversions
from tidelog.client.admin.arguments import TopicsOrPartitions, read_members, read_names, read_offsets, read_reset
from tidelog.client.admin.calls import ATTEMPT_MS, change, for_each, query
from tidelog.client.admin.offset_resets import Target, plan_reset, read_target
from tidelog.client.admin.topics import NOTHING_NAMED, TopicOperations
from tidelog.client.admin.values import (
    GroupDescription,
    GroupList,
    GroupListing,
    GroupOffset,
    OffsetChange,
    Outcomes,
    PartitionLag,
)
from tidelog.client.cluster import error_in
from tidelog.client.consumer.arguments import ByPartition, PartitionLike, read_partitions
from tidelog.client.coordinators import is_retriable
from tidelog.client.durations import TimeLike
from tidelog.client.offsets import EARLIEST, LATEST
from tidelog.client.record import OffsetAndMetadata, TopicPartition
from tidelog.model.errors import ErrorCode, InvalidRequestError, RemoteError, TidelogError
from tidelog.model.group_errors import CoordinatorLoadingError, NonEmptyGroupError
from tidelog.rpc.grpc.methods import method_named
from tidelog.rpc.v1 import common_pb2 as common
from tidelog.rpc.v1 import groups_pb2 as pb

_LIST = method_named("Groups", "ListGroups")


class GroupOperations(TopicOperations):
    @query
    async def list_groups(
        self,
        *,
        states: Iterable[str] = (),
        types: Iterable[str] = (),
        partial: bool = False,
        timeout: float | None = None,
    ) -> GroupList:
        """List the groups of all brokers, or those in these states ("empty", "stable", ...) and of these types.
        Retries until all brokers have answered. With `partial` asks each once; `errors` has those that did not
        answer, `loading` those that load groups."""
        request = pb.ListGroupsRequest(states=read_names(states, "states"), types=read_names(types, "types"))
        backoff = self.cluster.backoff()
        while True:
            groups = await self._list_groups(request)
            if partial or not (groups.errors or groups.loading):
                return groups
            pause_s = backoff.next_s()
            first = next(iter(groups.errors.values()), None)
            if (first is not None and not is_retriable(first)) or pause_s * 1000 >= self._remaining_ms():
                if first is not None:
                    raise first
                brokers = ", ".join(map(str, groups.loading))
                raise CoordinatorLoadingError(f"brokers {brokers} load groups")
            await asyncio.sleep(pause_s)

    async def _list_groups(self, request: pb.ListGroupsRequest) -> GroupList:
        await self.cluster.refresh()
        brokers = sorted(self.cluster.view.brokers)
        timeout_ms = min(self._remaining_ms(), ATTEMPT_MS)
        responses = conversions.outcomes(
            zip(
                brokers,
                await for_each(
                    brokers, lambda broker: self.cluster.call_node(broker, _LIST, request, timeout_ms=timeout_ms)
                ),
                strict=True,
            )
        )
        # A coordinator that has just moved may be in two responses; the group is listed once.
        rows = {
            row.group: GroupListing(row.group, row.type, row.state, row.members, broker)
            for broker, response in responses.succeeded.items()
            for row in response.groups
        }
        loading = {broker: response.loading for broker, response in responses.succeeded.items() if response.loading}
        return GroupList(tuple(rows[name] for name in sorted(rows)), responses.errors, loading)

    @query
    async def describe_group(self, group: str, *, timeout: float | None = None) -> GroupDescription:
        """Return state, coordinator, and members with host and assignment. GROUP_ID_NOT_FOUND if it does not exist."""
        coordinator, response = await self._ask_coordinator(
            group, "DescribeGroups", pb.DescribeGroupsRequest(groups=[group])
        )
        (row,) = response.groups
        if (error := error_in(row)) is not None:
            raise error
        return conversions.group_description(row, coordinator)

    @query
    async def describe_groups(
        self, groups: Iterable[str], *, partial: bool = False, timeout: float | None = None
    ) -> Outcomes[str, GroupDescription]:
        """Describe several groups."""
        names = read_names(groups, "groups")
        rows = await for_each(names, self.describe_group)
        return conversions.whole(conversions.outcomes(zip(names, rows, strict=True)), partial=partial)

    @query
    async def group_lag(self, group: str, *, timeout: float | None = None) -> list[PartitionLag]:
        """Return the lag in each partition that the group has committed or owns."""
        description = await self.describe_group(group)
        committed = await self.group_offsets(group)
        owners = {partition: member for member in description.members for partition in member.assignment}
        partitions = sorted({*committed, *owners})
        ends = await self._look_up(partitions, LATEST)
        rows = []
        for partition in partitions:
            end, owner, offset = ends[partition], owners.get(partition), committed.get(partition)
            rows.append(
                PartitionLag(
                    partition=partition,
                    committed=None if offset is None else offset.committed.offset,
                    end=None if isinstance(end, TidelogError) else end.offset,
                    member_id="" if owner is None else owner.member_id,
                    client_id="" if owner is None else owner.client_id,
                    host="" if owner is None else owner.host,
                    metadata="" if offset is None else offset.committed.metadata,
                    error=end if isinstance(end, TidelogError) else None,
                )
            )
        return rows

    @query
    async def group_offsets(
        self, group: str, partitions: Iterable[PartitionLike] | None = None, *, timeout: float | None = None
    ) -> dict[TopicPartition, GroupOffset]:
        """Return committed offsets of these partitions, or of all; partitions without one are left out. A deleted
        topic is named by its id."""
        asked = [] if partitions is None else read_partitions(partitions)
        if partitions is not None and not asked:
            return {}  # to the coordinator an empty list means all
        request = pb.FetchOffsetsRequest(group=group, partitions=_named(asked))
        _, response = await self._ask_coordinator(group, "FetchOffsets", request)
        offsets: dict[TopicPartition, GroupOffset] = {}
        for row in response.offsets:
            if (error := error_in(row)) is not None:
                raise error
            if row.offset >= 0:
                partition = TopicPartition(conversions.topic_name(row.topic, row.topic_id), row.partition)
                committed = OffsetAndMetadata(row.offset, row.metadata, row.leader_epoch)
                offsets[partition] = GroupOffset(committed, row.commit_time_ms, is_topic_deleted=not row.topic)
        return dict(sorted(offsets.items()))

    @change
    async def alter_group_offsets(
        self,
        group: str,
        offsets: ByPartition[int | OffsetAndMetadata],
        *,
        partial: bool = False,
        timeout: float | None = None,
    ) -> Outcomes[TopicPartition, int]:
        """Commit offsets of a group without members: {partition: next offset to read}. NON_EMPTY_GROUP while it has
        members. A program that keeps state of its own (counts, windows) has to reset it, too."""
        committed = read_offsets(offsets)
        if not committed:
            raise InvalidRequestError(NOTHING_NAMED)
        # The coordinator rejects it as well; this error names the members.
        await self._check_inactive(group)
        return conversions.whole(await self._commit(group, committed), partial=partial)

    @change
    async def reset_group_offsets(
        self,
        group: str,
        *,
        to: Literal["earliest", "latest"] | int | ByPartition[int] | None = None,
        to_time: TimeLike | None = None,
        shift_by: int | None = None,
        by_duration: str | timedelta | None = None,
        from_file: str | PathLike[str] | None = None,
        topics: TopicsOrPartitions = None,
        dry_run: bool = False,
        timeout: float | None = None,
    ) -> list[OffsetChange]:
        """Reset the offsets of a group without members, and return the changes; `dry_run` only returns them.

        Give one target: `to` ("earliest", "latest", an offset, or {partition: offset}), `to_time` (the first record at
        or after it), `shift_by` (this many offsets; negative: back), `by_duration` (this long ago), or `from_file`
        (lines of topic,partition,offset). `topics` are topics and partitions; None: all that the group has committed.
        An offset outside of the log becomes its start or end. NON_EMPTY_GROUP while the group has members.
        """
        arguments = read_reset(to, to_time, shift_by, by_duration, from_file)
        target = read_target(now_ms=self.cluster.clock.now_ms(), **arguments)
        if not dry_run:
            await self._check_inactive(group)
        changes = await self._plan_reset(group, target, topics)
        if changes and not dry_run:
            committed = {change.partition: OffsetAndMetadata(change.after) for change in changes}
            (await self._commit(group, committed)).all()
        return changes

    @change
    async def delete_group_offsets(
        self, group: str, topics: TopicsOrPartitions, *, partial: bool = False, timeout: float | None = None
    ) -> Outcomes[TopicPartition, None]:
        """Delete committed offsets of these topics or partitions. GROUP_SUBSCRIBED_TO_TOPIC while members consume
        them."""
        partitions = await self._partitions_of(topics)
        request = pb.DeleteOffsetsRequest(group=group, partitions=_named(partitions))
        _, response = await self._ask_coordinator(group, "DeleteOffsets", request)
        outcomes = conversions.outcomes(zip(partitions, map(error_in, response.offsets), strict=True))
        return conversions.whole(outcomes, partial=partial)

    @change
    async def delete_group(self, group: str, *, timeout: float | None = None) -> None:
        """Delete a group with its offsets. NON_EMPTY_GROUP while it has members."""
        request = pb.DeleteGroupsRequest(groups=[group])
        _, response = await self._ask_coordinator(group, "DeleteGroups", request, is_repeatable=False)
        error = error_in(response.groups[0])
        if error is not None:
            raise active_group_error(group) if error.code is ErrorCode.NON_EMPTY_GROUP else error

    @change
    async def delete_groups(
        self, groups: Iterable[str], *, partial: bool = False, timeout: float | None = None
    ) -> Outcomes[str, None]:
        """Delete several groups."""
        names = read_names(groups, "groups")
        rows = await for_each(names, self.delete_group)
        return conversions.whole(conversions.outcomes(zip(names, rows, strict=True)), partial=partial)

    @change
    async def remove_members(
        self,
        group: str,
        *,
        member_ids: Iterable[str] = (),
        instance_ids: Iterable[str] = (),
        all_members: bool = False,
        partial: bool = False,
        timeout: float | None = None,
    ) -> Outcomes[str, None]:
        """Remove members, by member id or by the instance id of static ones, as if they had left. A running member
        joins again. `all_members` removes all."""
        members, instances = read_members(member_ids, instance_ids, all_members=all_members)
        request = pb.RemoveMembersRequest(group=group, member_ids=members, instance_ids=instances)
        _, response = await self._ask_coordinator(group, "RemoveMembers", request, is_repeatable=False)
        return conversions.whole(
            conversions.outcomes((row.name, error_in(row)) for row in response.members), partial=partial
        )

    # Parts of operations.

    async def _commit(
        self, group: str, offsets: Mapping[TopicPartition, OffsetAndMetadata]
    ) -> Outcomes[TopicPartition, int]:
        request = pb.CommitOffsetsRequest(group=group, member_id="", member_epoch=-1)
        for partition, offset in offsets.items():
            request.offsets.add(
                topic=partition.topic,
                partition=partition.partition,
                offset=offset.offset,
                leader_epoch=offset.leader_epoch,
                metadata=offset.metadata,
            )
        try:
            _, response = await self._ask_coordinator(group, "CommitOffsets", request)
        except RemoteError as error:
            raise _commit_error(group, error) from error
        results: list[Any] = []
        for offset, row in zip(offsets.values(), response.offsets, strict=True):
            error_of_row = error_in(row)
            results.append(offset.offset if error_of_row is None else _commit_error(group, error_of_row))
        return conversions.outcomes(zip(offsets, results, strict=True))

    async def _plan_reset(self, group: str, target: Target, topics: TopicsOrPartitions) -> list[OffsetChange]:
        committed = await self.group_offsets(group)
        if topics is not None:
            partitions = await self._partitions_of(topics)
            if target.table is not None:
                partitions = [partition for partition in partitions if partition in target.table]
        elif target.table is not None:
            partitions = sorted(target.table)
        else:
            partitions = [partition for partition, offset in committed.items() if not offset.is_topic_deleted]
            if not partitions:
                raise InvalidRequestError(f"group '{group}' has committed nothing: name the topics")
        starts, ends = await self._log_ranges(partitions)
        found: dict[TopicPartition, int] = {}
        if target.time_ms is not None:
            known = {EARLIEST: starts, LATEST: ends}.get(target.time_ms)
            found = await self._offsets_at(partitions, target.time_ms) if known is None else known
        return plan_reset(
            target,
            partitions,
            committed={partition: offset.committed for partition, offset in committed.items()},
            starts=starts,
            ends={partition: max(end, starts[partition], found.get(partition, -1)) for partition, end in ends.items()},
            found=found,
        )

    async def _check_inactive(self, group: str) -> None:
        """Raises NON_EMPTY_GROUP if it has members. The coordinator checks it again with the change."""
        try:
            description = await self.describe_group(group)
        except TidelogError as error:
            if error.code is ErrorCode.GROUP_ID_NOT_FOUND:
                return
            raise
        if description.is_active:
            raise active_group_error(group, description)


def active_group_error(group: str, description: GroupDescription | None = None) -> NonEmptyGroupError:
    members = ""
    if description is not None:
        hosts = sorted({member.host or member.client_id for member in description.members})
        members = f" ({len(description.members)}, on {', '.join(hosts[:5])})"
    return NonEmptyGroupError(
        f"group '{group}' has active members{members}: stop them first, only they commit its offsets while they run"
    )


def _commit_error(group: str, error: TidelogError) -> TidelogError:
    return active_group_error(group) if error.code is ErrorCode.UNKNOWN_MEMBER_ID else error


def _named(partitions: Iterable[TopicPartition]) -> list[common.TopicPartition]:
    return [common.TopicPartition(topic=partition.topic, partition=partition.partition) for partition in partitions]
