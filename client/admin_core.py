"""`AdminCore`: what both admin clients do, on the loop that owns the connections.

Every call has a deadline over all its attempts; when it is over, that is a CallTimeoutError, and a change may have been
made. After `close` has begun no call is taken; those that are under way have until its timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar
from uuid import UUID

from tidelog.client import admin_rows as rows
from tidelog.client.admin import AdminClient, directory_named
from tidelog.client.admin_groups import GroupAdmin, active_error
from tidelog.client.admin_values import (
    ClusterDescription,
    ConfigEntry,
    ConfigResource,
    CreatedTopic,
    GroupDescription,
    GroupList,
    GroupOffset,
    ListedOffset,
    LogDir,
    NewTopic,
    OffsetChange,
    Outcomes,
    PartitionLag,
    QuorumDescription,
    Reassignment,
    TopicDescription,
    TopicListing,
)
from tidelog.client.cluster import ClusterClient
from tidelog.client.durations import time_ms
from tidelog.client.metadata import TopicInfo
from tidelog.client.offset_resets import When, read_target, read_time
from tidelog.client.offsets import LATEST, delete_records
from tidelog.client.record import OffsetAndMetadata, TopicPartition
from tidelog.client.tasks import Ending
from tidelog.model.errors import CallTimeoutError, ErrorCode, InvalidRequestError, TidelogError
from tidelog.model.ids import PartitionId
from tidelog.rpc.v1 import admin_pb2 as pb

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
_WORD_MS = 500
"""The server is told to give up so much earlier, so that its own word arrives in time."""
Topics = Iterable[str | TopicPartition] | None


class AdminClosedError(InvalidRequestError):
    """The admin client was closed; make another one."""


class AdminCore:
    """Used on one loop."""

    def __init__(self, cluster: ClusterClient, *, timeout_ms: int) -> None:
        self.cluster = cluster
        self.groups = GroupAdmin(cluster)
        self.calls = self.failures = 0
        self._timeout_ms = timeout_ms
        self._is_closing = self._is_over = False
        self._under_way: set[asyncio.Task[Any]] = set()
        self._ending = Ending()

    # How calls run.

    async def run(self, what: str, job: Callable[[AdminCore], Coroutine[Any, Any, T]], timeout_ms: int | None) -> T:
        """A call, within its time."""
        if self._is_closing:
            raise AdminClosedError("this admin client was closed")
        task = asyncio.current_task()
        assert task is not None, "on a loop"
        self._under_way.add(task)
        self.calls += 1
        limit_ms = timeout_ms or self._timeout_ms
        try:
            async with asyncio.timeout(limit_ms / 1000):
                return await job(self)
        except TimeoutError:
            self.failures += 1
            raise CallTimeoutError(f"{what}: not done in {limit_ms} ms; a change may have been made") from None
        except asyncio.CancelledError:
            if not self._is_over:
                raise
            task.uncancel()
            self.failures += 1
            raise CallTimeoutError(f"{what}: the admin client was closed; a change may have been made") from None
        except TidelogError:
            self.failures += 1
            raise
        finally:
            self._under_way.discard(task)

    async def close(self, timeout_s: float | None) -> None:
        """Waits for what is under way, and aborts what is left after `timeout_s`; None: waits as long as it takes."""
        self._is_closing = True
        await self._ending.run(lambda: self._close(timeout_s))

    async def _close(self, timeout_s: float | None) -> None:
        waiting = set(self._under_way)
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=timeout_s)
            self._is_over = True
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        await self.cluster.close()

    async def whole(self, job: Coroutine[Any, Any, Outcomes[K, V]], *, partial: bool) -> Outcomes[K, V]:
        """`partial`: errors of single items are told; otherwise the first one is raised."""
        found = await job
        if not partial:
            found.all()
        return found

    def _limit_ms(self, timeout_ms: int | None) -> int:
        return timeout_ms or self._timeout_ms

    def _client(self, timeout_ms: int | None) -> AdminClient:
        limit_ms = self._limit_ms(timeout_ms)
        return AdminClient(self.cluster, timeout_ms=max(1, limit_ms - min(_WORD_MS, limit_ms // 4)))

    # Topics.

    async def create_topics(
        self, topics: Sequence[NewTopic], *, validate_only: bool, timeout_ms: int | None
    ) -> Outcomes[str, CreatedTopic]:
        wanted = [
            pb.NewTopic(
                name=topic.name,
                partitions=topic.partitions,
                replication_factor=topic.replication_factor,
                assignment=[pb.Replicas(brokers=brokers) for brokers in topic.assignment],
                configs=[
                    pb.ConfigPair(key=key, value=rows.config_text(value))
                    for key, value in (topic.configs or {}).items()
                ],
            )
            for topic in topics
        ]
        made = await self._client(timeout_ms).create_topics(wanted, validate_only=validate_only)
        return rows.outcomes((row.name, row, rows.created_topic(row, is_made=not validate_only)) for row in made)

    async def delete_topics(
        self, names: Sequence[str], *, validate_only: bool, timeout_ms: int | None
    ) -> Outcomes[str, None]:
        done = await self._client(timeout_ms).delete_topics(names, validate_only=validate_only)
        return rows.outcomes((row.name, row, None) for row in done)

    async def list_topics(self, *, internal: bool) -> list[TopicListing]:
        return [
            TopicListing(topic.name, topic.topic_id, topic.is_internal, len(topic.partitions))
            for topic in await self.cluster.all_topics()
            if internal or not topic.is_internal
        ]

    async def describe_topics(
        self, names: Sequence[str] | None, *, timeout_ms: int | None
    ) -> Outcomes[str, TopicDescription]:
        found = await self._client(timeout_ms).describe_topics(names)
        return rows.outcomes((row.name, row, rows.topic_description(row)) for row in found)

    async def add_partitions(
        self, totals: Mapping[str, int], *, validate_only: bool, timeout_ms: int | None
    ) -> Outcomes[str, int]:
        wanted = [pb.MorePartitions(topic=name, total=total) for name, total in totals.items()]
        done = await self._client(timeout_ms).add_partitions(wanted, validate_only=validate_only)
        return rows.outcomes((row.name, row, totals[row.name]) for row in done)

    # Settings.

    async def describe_configs(
        self, resources: Sequence[ConfigResource], keys: Sequence[str], *, timeout_ms: int | None
    ) -> Outcomes[ConfigResource, dict[str, ConfigEntry]]:
        wanted = [pb.ConfigResource(type=one.type, name=one.name) for one in resources]
        found = await self._client(timeout_ms).describe_configs(wanted, keys=keys)
        return rows.outcomes(
            (resource, row, rows.config_entries(row)) for resource, row in zip(resources, found, strict=True)
        )

    async def alter_configs(
        self,
        resource: ConfigResource,
        *,
        sets: Mapping[str, object],
        deletes: Sequence[str],
        appends: Mapping[str, object],
        subtracts: Mapping[str, object],
        validate_only: bool,
        timeout_ms: int | None,
    ) -> None:
        kind = pb.ConfigChange
        changes = [
            *(kind(key=key, operation=kind.SET, value=rows.config_text(value)) for key, value in sets.items()),
            *(kind(key=key, operation=kind.DELETE) for key in deletes),
            *(kind(key=key, operation=kind.APPEND, value=rows.config_text(value)) for key, value in appends.items()),
            *(
                kind(key=key, operation=kind.SUBTRACT, value=rows.config_text(value))
                for key, value in subtracts.items()
            ),
        ]
        if not changes:
            raise InvalidRequestError(f"nothing to change of {resource}: give set, delete, append or subtract")
        altered = pb.AlteredConfig(resource=pb.ConfigResource(type=resource.type, name=resource.name), changes=changes)
        (row,) = await self._client(timeout_ms).alter_configs([altered], validate_only=validate_only)
        rows.raise_in(row)

    # Groups.

    async def list_groups(
        self, states: Sequence[str], types: Sequence[str], *, partial: bool, timeout_ms: int | None
    ) -> GroupList:
        return await self.groups.list_groups(states, types, partial=partial, timeout_ms=self._limit_ms(timeout_ms))

    async def describe_groups(
        self, groups: Sequence[str], *, timeout_ms: int | None
    ) -> Outcomes[str, GroupDescription]:
        return await self.groups.describe(list(dict.fromkeys(groups)), timeout_ms=self._limit_ms(timeout_ms))

    async def group_lag(self, group: str, *, timeout_ms: int | None) -> tuple[GroupDescription, list[PartitionLag]]:
        return await self.groups.lag(group, timeout_ms=self._limit_ms(timeout_ms))

    async def group_offsets(
        self, group: str, partitions: Sequence[TopicPartition] | None, *, timeout_ms: int | None
    ) -> dict[TopicPartition, GroupOffset]:
        return await self.groups.offsets(group, partitions, timeout_ms=self._limit_ms(timeout_ms))

    async def alter_group_offsets(
        self, group: str, offsets: Mapping[TopicPartition, int | OffsetAndMetadata], *, timeout_ms: int | None
    ) -> Outcomes[TopicPartition, int]:
        wanted = {
            TopicPartition(*place): OffsetAndMetadata(told) if isinstance(told, int) else OffsetAndMetadata(*told)
            for place, told in offsets.items()
        }
        if not wanted:
            raise InvalidRequestError("no partition is named")
        limit_ms = self._limit_ms(timeout_ms)
        # The coordinator refuses it as well; this one can say who is there.
        await self.groups.check_inactive(group, timeout_ms=limit_ms)
        return await self.groups.alter_offsets(group, wanted, timeout_ms=limit_ms)

    async def reset_group_offsets(
        self, group: str, asked: Mapping[str, Any], topics: Topics, *, dry_run: bool, timeout_ms: int | None
    ) -> list[OffsetChange]:
        """`asked` is what `read_target` takes."""
        target = read_target(now_ms=self.cluster.clock.now_ms(), **asked)
        limit_ms = self._limit_ms(timeout_ms)
        if not dry_run:
            await self.groups.check_inactive(group, timeout_ms=limit_ms)
        changes = await self.groups.plan_reset(group, target, topics, timeout_ms=limit_ms)
        if not dry_run and changes:
            wanted = {change.partition: OffsetAndMetadata(change.after) for change in changes}
            (await self.groups.alter_offsets(group, wanted, timeout_ms=limit_ms)).all()
        return changes

    async def delete_group_offsets(
        self, group: str, topics: Topics, *, timeout_ms: int | None
    ) -> Outcomes[TopicPartition, None]:
        limit_ms = self._limit_ms(timeout_ms)
        places = await self.groups.partitions_of(group, topics, timeout_ms=limit_ms)
        return await self.groups.delete_offsets(group, places, timeout_ms=limit_ms)

    async def delete_groups(self, groups: Sequence[str], *, timeout_ms: int | None) -> Outcomes[str, None]:
        found = await self.groups.delete(list(dict.fromkeys(groups)), timeout_ms=self._limit_ms(timeout_ms))
        errors = {
            group: active_error(group) if error.code is ErrorCode.NON_EMPTY_GROUP else error
            for group, error in found.errors.items()
        }
        return Outcomes(found.done, errors)

    async def remove_members(
        self, group: str, member_ids: Sequence[str], instance_ids: Sequence[str], *, timeout_ms: int | None
    ) -> Outcomes[str, None]:
        return await self.groups.remove_members(group, member_ids, instance_ids, timeout_ms=self._limit_ms(timeout_ms))

    # Records.

    async def _topics(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, PartitionId]:
        """The partitions by name; raises if one is not there."""
        found: dict[TopicPartition, PartitionId] = {}
        for place in places:
            topic = await self.cluster.topic(place.topic)
            if not 0 <= place.partition < len(topic.partitions):
                last = len(topic.partitions) - 1
                raise InvalidRequestError(f"{place}: '{place.topic}' has partitions 0 to {last}")
            found[place] = topic.partitions[place.partition]
        return found

    async def list_offsets(
        self, topics: Topics, at: When, *, timeout_ms: int | None
    ) -> Outcomes[TopicPartition, ListedOffset]:
        if topics is None:
            raise InvalidRequestError("no topic is named")
        limit_ms = self._limit_ms(timeout_ms)
        asked = read_time(at, self.cluster.clock.now_ms())
        places = await self.groups.partitions_of("", topics, timeout_ms=limit_ms)
        found = await self.groups.look_up(places, asked, timeout_ms=limit_ms)
        return Outcomes(
            {place: rows.listed_offset(row) for place, row in found.items() if not isinstance(row, TidelogError)},
            {place: row for place, row in found.items() if isinstance(row, TidelogError)},
        )

    async def delete_records(
        self, before: Mapping[TopicPartition, int], *, timeout_ms: int | None
    ) -> Outcomes[TopicPartition, int]:
        """-1: all that can be read."""
        if not before:
            raise InvalidRequestError("no partition is named")
        known = await self._topics(before)
        topics: dict[str, TopicInfo] = {place.topic: await self.cluster.topic(place.topic) for place in known}
        asked = {known[place]: offset for place, offset in before.items()}
        done = await delete_records(self.cluster, list(topics.values()), asked, timeout_ms=self._limit_ms(timeout_ms))
        outcomes = {place: done[partition] for place, partition in known.items()}
        return Outcomes(
            {place: one for place, one in outcomes.items() if not isinstance(one, TidelogError)},
            {place: one for place, one in outcomes.items() if isinstance(one, TidelogError)},
        )

    async def delete_records_by_time(
        self, topics: Topics, when: When, *, timeout_ms: int | None
    ) -> Outcomes[TopicPartition, int]:
        """What was written before the time; of a partition without a later record all that is there now."""
        if topics is None:
            raise InvalidRequestError("no topic is named")
        try:
            since_ms = max(0, time_ms(when, self.cluster.clock.now_ms()))
        except ValueError as error:
            raise InvalidRequestError(str(error)) from None
        limit_ms = self._limit_ms(timeout_ms)
        places = await self.groups.partitions_of("", topics, timeout_ms=limit_ms)
        # The end first: what is written between the two look-ups is newer, and stays.
        ends = await self.groups.find(places, LATEST, timeout_ms=limit_ms)
        found = await self.groups.find(places, since_ms, timeout_ms=limit_ms)
        before = {place: found[place] if found[place] >= 0 else ends[place] for place in places}
        return await self.delete_records(before, timeout_ms=timeout_ms)

    # Replicas and leaders.

    async def alter_reassignments(
        self,
        targets: Mapping[TopicPartition, Sequence[int] | None],
        *,
        validate_only: bool,
        timeout_ms: int | None,
    ) -> Outcomes[TopicPartition, None]:
        wanted = [
            pb.Reassignment(topic=place[0], partition=place[1], replicas=brokers or ())
            for place, brokers in targets.items()
        ]
        done = await self._client(timeout_ms).alter_reassignments(wanted, validate_only=validate_only)
        return rows.outcomes((TopicPartition(row.topic, row.partition), row, None) for row in done)

    async def list_reassignments(
        self, partitions: Iterable[TopicPartition] | None, *, timeout_ms: int | None
    ) -> list[Reassignment]:
        asked = None if partitions is None else rows.by_topic(partitions)
        return [rows.reassignment(row) for row in await self._client(timeout_ms).list_reassignments(asked)]

    async def elect_leaders(
        self,
        partitions: Iterable[TopicPartition] | None,
        *,
        unclean: bool,
        validate_only: bool,
        timeout_ms: int | None,
    ) -> Outcomes[TopicPartition, None]:
        asked = None if partitions is None else rows.by_topic(partitions)
        if asked is not None and not asked:
            raise InvalidRequestError("no partition is named; None means all of the cluster")
        done = await self._client(timeout_ms).elect_leaders(asked, is_unclean=unclean, validate_only=validate_only)
        return rows.outcomes((TopicPartition(row.topic, row.partition), row, None) for row in done)

    # The cluster.

    async def describe_cluster(self, *, timeout_ms: int | None) -> ClusterDescription:
        return rows.cluster_description(await self._client(timeout_ms).describe_cluster())

    async def describe_quorum(self, *, timeout_ms: int | None) -> QuorumDescription:
        return rows.quorum_description(await self._client(timeout_ms).describe_quorum())

    async def describe_log_dirs(
        self, brokers: Sequence[int], topics: Sequence[str], *, timeout_ms: int | None
    ) -> Outcomes[int, tuple[LogDir, ...]]:
        found = await self._client(timeout_ms).describe_log_dirs(brokers, topics=topics)
        return rows.outcomes((row.broker, row, tuple(map(rows.log_dir, row.directories))) for row in found)

    async def move_replicas(
        self, broker: int, to: Mapping[TopicPartition, UUID | str], *, timeout_ms: int | None
    ) -> Outcomes[TopicPartition, None]:
        client = self._client(timeout_ms)
        working = await client.working_log_dirs(broker)
        wanted = [
            pb.MovedReplica(topic=topic, partition=number, directory_id=directory_named(working, where).bytes)
            for (topic, number), where in to.items()
        ]
        done = await client.move_replicas(broker, wanted)
        return rows.outcomes((TopicPartition(row.topic, row.partition), row, None) for row in done)

    def metrics(self) -> dict[str, float]:
        return {"calls": self.calls, "failures": self.failures, "under_way": len(self._under_way)}
