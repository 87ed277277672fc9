"""Admin operations on topics, configs, offsets and records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from tidelog.client.admin import conversions
from tidelog.client.admin.arguments import (
    Resource,
    TopicsOrPartitions,
    read_before,
    read_names,
    read_new_topics,
    read_resource,
    read_scope,
)
from tidelog.client.admin.calls import AdminCalls, change, for_each, query
from tidelog.client.admin.offset_resets import read_time
from tidelog.client.admin.values import (
    ConfigEntry,
    ConfigResource,
    CreatedTopic,
    ListedOffset,
    NewTopic,
    Outcomes,
    TopicDescription,
    TopicListing,
)
from tidelog.client.cluster import error_in
from tidelog.client.consumer.arguments import ByPartition
from tidelog.client.durations import TimeLike, time_ms
from tidelog.client.offsets import EARLIEST, LATEST, FoundOffset, delete_records, list_offsets
from tidelog.client.record import TopicPartition
from tidelog.model.errors import ErrorCode, InvalidRequestError, TidelogError, UnknownTopicOrPartitionError
from tidelog.rpc.v1 import admin_pb2 as pb

NOTHING_NAMED = "no topic and no partition is named: name at least one"


class TopicOperations(AdminCalls):
    @change
    async def create_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        replication_factor: int | None = None,
        configs: Mapping[str, object] | None = None,
        assignment: Iterable[Iterable[int]] = (),
        if_not_exists: bool = False,
        validate_only: bool = False,
        timeout: float | None = None,
    ) -> CreatedTopic:
        """Create a topic. None means the cluster's default. `assignment` lists the brokers of each partition, and
        replaces both numbers. Raises TopicAlreadyExistsError if the topic exists; with `if_not_exists` returns it,
        unchanged. Brokers may learn of the topic a little later."""
        topic = NewTopic(name, partitions, replication_factor, configs, tuple(tuple(row) for row in assignment))
        outcomes = await self.create_topics(
            [topic], if_not_exists=if_not_exists, validate_only=validate_only, partial=True
        )
        return outcomes[name]

    @change
    async def create_topics(
        self,
        topics: Iterable[NewTopic | str],
        *,
        if_not_exists: bool = False,
        validate_only: bool = False,
        partial: bool = False,
        timeout: float | None = None,
    ) -> Outcomes[str, CreatedTopic]:
        """Create several topics."""
        request = pb.CreateTopicsRequest(topics=map(_new_topic, read_new_topics(topics)), validate_only=validate_only)
        response = await self._ask("Admin", "CreateTopics", request, is_change=True)
        outcomes = conversions.outcomes(
            (row.name, error_in(row) or conversions.created_topic(row, is_validated_only=validate_only))
            for row in response.topics
        )
        existing = [name for name, error in outcomes.errors.items() if error.code is ErrorCode.TOPIC_ALREADY_EXISTS]
        if if_not_exists and existing:
            for name, topic in (await self.describe_topics(existing, partial=True)).succeeded.items():
                del outcomes.errors[name]
                outcomes.succeeded[name] = CreatedTopic(
                    name, topic.topic_id, len(topic.partitions), topic.replication_factor, note="", is_new=False
                )
        return conversions.whole(outcomes, partial=partial)

    @change
    async def delete_topic(
        self, name: str, *, if_exists: bool = False, validate_only: bool = False, timeout: float | None = None
    ) -> None:
        """Delete a topic and its records. Raises UNKNOWN_TOPIC_OR_PARTITION if it does not exist, unless
        `if_exists`."""
        outcomes = await self.delete_topics([name], if_exists=if_exists, validate_only=validate_only, partial=True)
        return outcomes[name]

    @change
    async def delete_topics(
        self,
        names: Iterable[str],
        *,
        if_exists: bool = False,
        validate_only: bool = False,
        partial: bool = False,
        timeout: float | None = None,
    ) -> Outcomes[str, None]:
        """Delete several topics."""
        request = pb.DeleteTopicsRequest(topics=read_names(names, "names"), validate_only=validate_only)
        response = await self._ask("Admin", "DeleteTopics", request, is_change=True)
        errors = {row.name: error_in(row) for row in response.topics}
        if if_exists:
            errors = {
                name: None if error is not None and error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION else error
                for name, error in errors.items()
            }
        return conversions.whole(conversions.outcomes(errors.items()), partial=partial)

    @query
    async def list_topics(self, *, internal: bool = False, timeout: float | None = None) -> list[TopicListing]:
        """List topics by name, as the answering broker knows them; with `internal` also those of the cluster
        itself."""
        topics = await self.cluster.all_topics()
        self._note_age(self.cluster.stale_ms)
        return [
            TopicListing(topic.name, topic.topic_id, topic.is_internal, len(topic.partitions))
            for topic in topics
            if internal or not topic.is_internal
        ]

    @query
    async def describe_topic(self, name: str, *, timeout: float | None = None) -> TopicDescription:
        """Return partitions with leader, replicas and ISR."""
        return (await self.describe_topics([name], partial=True))[name]

    @query
    async def describe_topics(
        self,
        names: Iterable[str] | None = None,
        *,
        allow_stale: bool = False,
        partial: bool = False,
        timeout: float | None = None,
    ) -> Outcomes[str, TopicDescription]:
        """Describe these topics, or all. With `allow_stale` a node answers without an active controller, with what it
        knew last; `stale_ms` is the age."""
        named = () if names is None else read_names(names, "names")
        request = pb.DescribeTopicsRequest(topics=named, all_topics=names is None)
        response = await self._ask("Admin", "DescribeTopics", request, allow_stale=allow_stale)
        outcomes = conversions.outcomes(
            (row.name, error_in(row) or conversions.topic_description(row)) for row in response.topics
        )
        return conversions.whole(outcomes, partial=partial)

    @change
    async def add_partitions(
        self,
        totals: Mapping[str, int],
        *,
        validate_only: bool = False,
        partial: bool = False,
        timeout: float | None = None,
    ) -> Outcomes[str, int]:
        """Add partitions to topics: {topic: new total}. The total never decreases. Keys may move to other
        partitions."""
        added = [pb.MorePartitions(topic=name, total=total) for name, total in totals.items()]
        request = pb.AddPartitionsRequest(topics=added, validate_only=validate_only)
        response = await self._ask("Admin", "AddPartitions", request, is_change=True)
        outcomes = conversions.outcomes((row.name, error_in(row) or totals[row.name]) for row in response.topics)
        return conversions.whole(outcomes, partial=partial)

    # Configs.

    @query
    async def describe_config(
        self, resource: Resource, keys: Iterable[str] = (), *, timeout: float | None = None
    ) -> dict[str, ConfigEntry]:
        """Return the configs of ConfigResource("topic", name), ("broker", id), or ConfigResource("cluster"): value,
        source and default of each."""
        return (await self.describe_configs([resource], keys, partial=True))[read_resource(resource)]

    @query
    async def describe_configs(
        self,
        resources: Iterable[Resource],
        keys: Iterable[str] = (),
        *,
        allow_stale: bool = False,
        partial: bool = False,
        timeout: float | None = None,
    ) -> Outcomes[ConfigResource, dict[str, ConfigEntry]]:
        """Return the configs of several resources of any type. `allow_stale` as in `describe_topics`."""
        asked = [read_resource(resource) for resource in resources]
        request = pb.DescribeConfigsRequest(
            resources=[pb.ConfigResource(type=resource.type, name=resource.name) for resource in asked],
            keys=read_names(keys, "keys"),
        )
        response = await self._ask("Admin", "DescribeConfigs", request, allow_stale=allow_stale)
        outcomes = conversions.outcomes(
            (resource, error_in(row) or conversions.config_entries(row))
            for resource, row in zip(asked, response.resources, strict=True)
        )
        return conversions.whole(outcomes, partial=partial)

    @change
    async def alter_config(
        self,
        resource: Resource,
        *,
        sets: Mapping[str, object] | None = None,
        deletes: Iterable[str] = (),
        appends: Mapping[str, object] | None = None,
        subtracts: Mapping[str, object] | None = None,
        validate_only: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Change some configs and leave the others: `sets` values, `deletes` them (back to the default), `appends` to
        and `subtracts` from lists. All changes of a call are made, or none. INVALID_CONFIG names what is wrong."""
        altered = read_resource(resource)
        kind = pb.ConfigChange
        changes = [kind(key=key, operation=kind.DELETE) for key in read_names(deletes, "deletes")]
        for operation, values in ((kind.SET, sets), (kind.APPEND, appends), (kind.SUBTRACT, subtracts)):
            for key, value in (values or {}).items():
                changes.append(kind(key=key, operation=operation, value=conversions.config_text(value)))
        if not changes:
            raise InvalidRequestError(f"nothing to change of {altered}: use sets, deletes, appends or subtracts")
        row = pb.AlteredConfig(resource=pb.ConfigResource(type=altered.type, name=altered.name), changes=changes)
        request = pb.AlterConfigsRequest(resources=[row], validate_only=validate_only)
        response = await self._ask("Admin", "AlterConfigs", request, is_change=True)
        if (error := error_in(response.resources[0])) is not None:
            raise error

    # Offsets and records.

    @query
    async def list_offsets(
        self,
        topics: TopicsOrPartitions,
        *,
        at: Literal["earliest", "latest", "max_timestamp"] | TimeLike = "latest",
        partial: bool = False,
        timeout: float | None = None,
    ) -> Outcomes[TopicPartition, ListedOffset]:
        """Look up an offset in each partition: the log start ("earliest"), the next offset for consumers ("latest"),
        the record with the greatest timestamp ("max_timestamp"), or the first record at or after a time: ms since 1970,
        a datetime, or an age ("1h"). Topics stand for all their partitions."""
        timestamp = read_time(at, self.cluster.clock.now_ms())
        found = await self._look_up(await self._partitions_of(topics), timestamp)
        outcomes = conversions.outcomes(
            (partition, row if isinstance(row, TidelogError) else conversions.listed_offset(row))
            for partition, row in found.items()
        )
        return conversions.whole(outcomes, partial=partial)

    @change
    async def delete_records(
        self,
        before: ByPartition[int | Literal["end"]],
        *,
        partial: bool = False,
        timeout: float | None = None,
    ) -> Outcomes[TopicPartition, int]:
        """Delete the records before an offset of each partition, or all that consumers can read ("end"). Returns the
        new log start offsets."""
        return conversions.whole(await self._delete_records(read_before(before)), partial=partial)

    @change
    async def delete_records_by_time(
        self, topics: TopicsOrPartitions, when: TimeLike, *, partial: bool = False, timeout: float | None = None
    ) -> Outcomes[TopicPartition, int]:
        """Delete the records written before a time: ms since 1970, a datetime, or an age ("7d"). Returns the new log
        start offsets."""
        try:
            timestamp = max(0, time_ms(when, self.cluster.clock.now_ms()))
        except ValueError as error:
            raise InvalidRequestError(str(error)) from None
        partitions = await self._partitions_of(topics)
        # The end first: records written between both lookups are newer, and stay.
        ends = await self._offsets_at(partitions, LATEST)
        starts = await self._offsets_at(partitions, timestamp)
        before = {
            partition: starts[partition] if starts[partition] >= 0 else ends[partition] for partition in partitions
        }
        return conversions.whole(await self._delete_records(before), partial=partial)

    async def _delete_records(self, before: Mapping[TopicPartition, int]) -> Outcomes[TopicPartition, int]:
        """-1: up to the end."""
        if not before:
            raise InvalidRequestError(NOTHING_NAMED)
        topics = {name: await self.cluster.topic(name) for name in dict.fromkeys(row.topic for row in before)}
        ids = {}
        for partition in before:
            known = topics[partition.topic].partitions
            if not 0 <= partition.partition < len(known):
                raise InvalidRequestError(_no_partition(partition, len(known)))
            ids[partition] = known[partition.partition]
        rows = await delete_records(
            self.cluster,
            list(topics.values()),
            {ids[partition]: offset for partition, offset in before.items()},
            timeout_ms=self._remaining_ms(),
        )
        return conversions.outcomes((partition, rows[ids[partition]]) for partition in before)

    async def _partitions_of(self, topics: TopicsOrPartitions) -> list[TopicPartition]:
        scope = read_scope(topics)
        if not scope:
            raise InvalidRequestError(NOTHING_NAMED)
        partitions: set[TopicPartition] = set()
        for item in scope:
            if isinstance(item, str):
                count = len((await self.cluster.topic(item)).partitions)
                partitions.update(TopicPartition(item, number) for number in range(count))
            else:
                partitions.add(item)
        return sorted(partitions)

    async def _look_up(
        self, partitions: Sequence[TopicPartition], timestamp: int
    ) -> dict[TopicPartition, FoundOffset | TidelogError]:
        """Asks each leader on its own: one that does not answer costs only the rows of its partitions."""
        found: dict[TopicPartition, FoundOffset | TidelogError] = {}
        by_topic: dict[str, list[int]] = {}
        for partition in partitions:
            by_topic.setdefault(partition.topic, []).append(partition.partition)
        by_leader: dict[tuple[str, int], list[Any]] = {}
        topics = await for_each(by_topic, self.cluster.topic)
        for (name, numbers), topic in zip(by_topic.items(), topics, strict=True):
            for number in numbers:
                if isinstance(topic, TidelogError):
                    found[TopicPartition(name, number)] = topic
                elif not 0 <= number < len(topic.partitions):
                    partition = TopicPartition(name, number)
                    text = _no_partition(partition, len(topic.partitions))
                    found[partition] = UnknownTopicOrPartitionError(text)
                else:
                    leader = self.cluster.leader(topic.partitions[number])
                    key = (name, -1 if leader is None else leader.node)
                    by_leader.setdefault(key, []).append(topic.partitions[number])

        async def ask(key: tuple[str, int]) -> dict[Any, FoundOffset]:
            topic = await self.cluster.topic(key[0])
            remaining_ms = self._remaining_ms()
            timeout_ms = max(1, remaining_ms - min(100, remaining_ms // 10))
            return await list_offsets(self.cluster, topic, timestamp, partitions=by_leader[key], timeout_ms=timeout_ms)

        for key, rows in zip(by_leader, await for_each(by_leader, ask), strict=True):
            for place in by_leader[key]:
                row = rows if isinstance(rows, TidelogError) else rows[place]
                error = row if isinstance(row, TidelogError) else row.error
                found[TopicPartition(key[0], place.partition)] = error or row
        return {partition: found[partition] for partition in partitions}

    async def _offsets_at(self, partitions: Sequence[TopicPartition], timestamp: int) -> dict[TopicPartition, int]:
        """Raises the first error. -1: no such record."""
        rows = conversions.outcomes((await self._look_up(partitions, timestamp)).items())
        return {partition: row.offset for partition, row in rows.all().items()}

    async def _log_ranges(
        self, partitions: Sequence[TopicPartition]
    ) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
        """(log starts, end offsets). The end first, so that it is never below the start."""
        ends = await self._offsets_at(partitions, LATEST)
        return await self._offsets_at(partitions, EARLIEST), ends


def _new_topic(topic: NewTopic) -> pb.NewTopic:
    return pb.NewTopic(
        name=topic.name,
        partitions=topic.partitions,
        replication_factor=topic.replication_factor,
        assignment=[pb.Replicas(brokers=brokers) for brokers in topic.assignment],
        configs=[
            pb.ConfigPair(key=key, value=conversions.config_text(value)) for key, value in (topic.configs or {}).items()
        ],
    )


def _no_partition(partition: TopicPartition, count: int) -> str:
    return f"{partition}: topic '{partition.topic}' has {count} partitions: use one from 0 to {count - 1}"
