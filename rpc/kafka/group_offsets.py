"""OffsetCommit, OffsetFetch and OffsetDelete. Members of both APIs, and programs that are not members, share one set of
offsets.

Topics have names, from version 10 ids. Missing ones:

    commit, delete    UNKNOWN_TOPIC_OR_PARTITION, UNKNOWN_TOPIC_ID
    fetch             no offset (-1), as for a partition without a commit; by id UNKNOWN_TOPIC_ID

Group errors depend on the client's version. STALE_MEMBER_EPOCH exists from version 9 of OffsetCommit, before it is
UNSUPPORTED_VERSION; a member's commit to a missing group is ILLEGAL_GENERATION before, GROUP_ID_NOT_FOUND since. The
retention time of old commits (versions 2 to 4) is ignored: `offsets.retention.minutes` applies.

A fetch with a transient failure (not the coordinator, still loading, another member epoch) has the group's error, as in
Kafka, and lists the requested partitions with UNSTABLE_OFFSET_COMMIT, so that clients retry. Clients read the group's
error. librdkafka (2.16 and before) retries only partitions that the response lists; without them its consumer keeps its
assignment, sends heartbeats and never reads (confluentinc/librdkafka#5586).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast
from uuid import UUID

from tidelog.metadata.image import ClusterImage
from tidelog.model.errors import ErrorCode, TidelogError, UnknownTopicIdError
from tidelog.model.group_errors import CoordinatorNotAvailableError, StaleMemberEpochError, UnstableOffsetError
from tidelog.model.ids import PartitionId
from tidelog.rpc.kafka import messages as apis
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.errors import NONE, code, group_code_of
from tidelog.rpc.kafka.messages import groups as messages
from tidelog.rpc.kafka.services import Context
from tidelog.rpc.kafka.wire import EncodedRows
from tidelog.services.groups import NOT_COMMITTED, Committed, MissingGroupError, OffsetToCommit, by_topic
from tidelog.services.limits import ResponseSize
from tidelog.services.partition_lookup import PartitionRef
from tidelog.world.slicing import sliced

IDS_SINCE = 10
EPOCHS_SINCE = 9
"""OffsetCommit: clients know the errors of consumer groups."""
GROUPS_SINCE = 8
"""OffsetFetch: several groups per request."""
GROUP_ERROR_SINCE = 2
"""OffsetFetch: before this version each partition has the group's error."""
UNSTABLE_SINCE = 7
"""OffsetFetch: clients know UNSTABLE_OFFSET_COMMIT."""
_TRANSIENT = frozenset(
    {
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.STALE_MEMBER_EPOCH,
        ErrorCode.UNKNOWN_MEMBER_ID,
        ErrorCode.ILLEGAL_GENERATION,
        ErrorCode.THROTTLING_QUOTA_EXCEEDED,
    }
)
"""Errors of a fetch that clients retry, here or at another coordinator, after joining again if necessary."""
ROWS_AT_A_TIME = 1_000
GROUPS_AT_A_TIME = 200
BYTES_AT_A_TIME = 16 << 10


def _ref(version: int, named: Any, partition: int) -> PartitionRef:
    return named.topic_id if version >= IDS_SINCE else named.name, partition


# Commit.


async def commit(request: messages.OffsetCommitRequest, context: Context) -> messages.OffsetCommitResponse:
    response = messages.OffsetCommitResponse()
    offsets: dict[PartitionRef, OffsetToCommit] = {}
    rows: list[tuple[PartitionRef, messages.OffsetCommitResponsePartition]] = []
    async for named, partition in sliced(_pairs(request.topics), ROWS_AT_A_TIME):
        ref = _ref(context.version, named, partition.partition_index)
        rows.append((ref, messages.OffsetCommitResponsePartition(partition_index=partition.partition_index)))
        offsets[ref] = OffsetToCommit(
            partition.committed_offset, partition.committed_leader_epoch, partition.committed_metadata or ""
        )
    codes = await _commit(request, context, offsets) if offsets else {}
    remaining = iter(rows)
    for named in request.topics:
        topic = messages.OffsetCommitResponseTopic(name=named.name, topic_id=named.topic_id)
        response.topics.append(topic)
        for ref, row in islice(remaining, len(named.partitions)):
            row.error_code = codes[ref]
            topic.partitions.append(row)
    return response


def _pairs(topics: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    return ((topic, partition) for topic in topics for partition in topic.partitions)


async def _commit(
    request: messages.OffsetCommitRequest, context: Context, offsets: Mapping[PartitionRef, OffsetToCommit]
) -> dict[PartitionRef, int]:
    errors: Mapping[PartitionRef, TidelogError | None]
    try:
        errors = await context.services.groups.commit_offsets(
            context.request,
            request.group_id,
            offsets,
            member_id=request.member_id,
            member_epoch=request.generation_id_or_member_epoch,
            instance_id=request.group_instance_id or "",
            allows_negative=True,
        )
    except TidelogError as error:
        errors = dict.fromkeys(offsets, error)
    return {ref: _commit_code(error, request, context) for ref, error in errors.items()}


def _commit_code(error: TidelogError | None, request: messages.OffsetCommitRequest, context: Context) -> int:
    if isinstance(error, StaleMemberEpochError) and context.version < EPOCHS_SINCE:
        return code(ErrorCode.UNSUPPORTED_VERSION)
    if isinstance(error, MissingGroupError) and request.generation_id_or_member_epoch >= 0:
        return code(ErrorCode.GROUP_ID_NOT_FOUND if context.version >= EPOCHS_SINCE else ErrorCode.ILLEGAL_GENERATION)
    return group_code_of(error)


# Fetch.


@dataclass(slots=True)
class _Row:
    """A topic in a response."""

    name: str
    topic_id: bytes
    partitions: Sequence[tuple[int, Committed, int]]
    """(number, offset, error code)."""


async def fetch(request: messages.OffsetFetchRequest, context: Context) -> messages.OffsetFetchResponse:
    size = ResponseSize("groups")
    if context.version >= GROUPS_SINCE:
        rows = EncodedRows()
        for number, one in enumerate(request.groups, start=1):
            group_response = await _group(one, context, size, require_stable=request.require_stable)
            data = apis.OFFSET_FETCH.encode_rows(context.version, messages.OffsetFetchResponseGroup, [group_response])
            size.add(len(data))
            rows.add(1, data)
            if number % GROUPS_AT_A_TIME == 0 or len(data) > BYTES_AT_A_TIME:
                await asyncio.sleep(0)
        return messages.OffsetFetchResponse(groups=cast("list[messages.OffsetFetchResponseGroup]", rows))
    topics = (
        None
        if request.topics is None
        else [
            messages.OffsetFetchRequestTopics(name=one.name, partition_indexes=one.partition_indexes)
            for one in request.topics
        ]
    )
    group = messages.OffsetFetchRequestGroup(group_id=request.group_id, topics=topics)
    group_response = await _group(group, context, size, require_stable=request.require_stable)
    response = messages.OffsetFetchResponse(error_code=group_response.error_code)
    if group_response.error_code and context.version < GROUP_ERROR_SINCE:
        response.topics = [_failed(topic, group_response.error_code) for topic in topics or ()]
        return response
    response.topics = [
        messages.OffsetFetchResponseTopic(
            name=topic.name,
            partitions=[
                messages.OffsetFetchResponsePartition(
                    partition_index=row.partition_index,
                    committed_offset=row.committed_offset,
                    committed_leader_epoch=row.committed_leader_epoch,
                    metadata=row.metadata,
                    error_code=row.error_code,
                )
                for row in topic.partitions
            ],
        )
        for topic in group_response.topics
    ]
    return response


def _failed(topic: messages.OffsetFetchRequestTopics, error_code: int) -> messages.OffsetFetchResponseTopic:
    return messages.OffsetFetchResponseTopic(
        name=topic.name,
        partitions=[
            messages.OffsetFetchResponsePartition(partition_index=number, committed_offset=-1, error_code=error_code)
            for number in topic.partition_indexes
        ],
    )


async def _group(
    request: messages.OffsetFetchRequestGroup, context: Context, size: ResponseSize, *, require_stable: bool
) -> messages.OffsetFetchResponseGroup:
    response = messages.OffsetFetchResponseGroup(group_id=request.group_id)
    try:
        size.check()
        rows = await _committed(request, context, require_stable=require_stable)
    except TidelogError as error:
        response.error_code = _fetch_code(error)
        if error.code not in _TRANSIENT or context.version < UNSTABLE_SINCE:
            return response
        rows = list(_unstable(request))
    partitions = ((row, *partition) for row in rows for partition in row.partitions)
    topics = {id(row): messages.OffsetFetchResponseTopics(name=row.name, topic_id=row.topic_id) for row in rows}
    response.topics = list(topics.values())
    async for row, number, committed, error_code in sliced(partitions, ROWS_AT_A_TIME):
        topics[id(row)].partitions.append(
            messages.OffsetFetchResponsePartitions(
                partition_index=number,
                committed_offset=committed.offset,
                committed_leader_epoch=committed.leader_epoch,
                metadata=committed.metadata,
                error_code=error_code,
            )
        )
    return response


def _unstable(request: messages.OffsetFetchRequestGroup) -> Iterator[_Row]:
    """Report the partitions as unstable: the client retries."""
    for topic in request.topics or ():
        unstable = code(ErrorCode.UNSTABLE_OFFSET_COMMIT)
        yield _Row(
            topic.name, topic.topic_id, [(number, NOT_COMMITTED, unstable) for number in topic.partition_indexes]
        )


async def _committed(
    request: messages.OffsetFetchRequestGroup, context: Context, *, require_stable: bool
) -> list[_Row]:
    version, image = context.version, context.services.image
    refs = None
    if request.topics is not None:
        refs = [_ref(version, topic, number) for topic in request.topics for number in topic.partition_indexes]
    committed = await context.services.groups.fetch_offsets(
        context.request,
        request.group_id,
        refs,
        member_id=request.member_id or "",
        member_epoch=request.member_epoch,
        require_stable=require_stable,
    )
    if request.topics is None:
        return list(_all(image, committed))
    rows = []
    for topic in request.topics:
        results = [(number, committed[_ref(version, topic, number)]) for number in topic.partition_indexes]
        name, topic_id = topic.name, topic.topic_id
        if version >= IDS_SINCE:
            known = image.topics.get(UUID(bytes=topic_id))
            name = name if known is None else known.name
        is_unknown = any(isinstance(result, UnknownTopicIdError) for _, result in results)
        error_code = code(ErrorCode.UNKNOWN_TOPIC_ID) if is_unknown else NONE
        rows.append(_Row(name, topic_id, [_partition(number, result, error_code) for number, result in results]))
    return rows


def _partition(number: int, result: Committed | TidelogError, error_code: int = NONE) -> tuple[int, Committed, int]:
    if isinstance(result, Committed):
        return number, result, error_code
    if isinstance(result, UnstableOffsetError):
        error_code = code(ErrorCode.UNSTABLE_OFFSET_COMMIT)
    return number, NOT_COMMITTED, error_code


def _all(image: ClusterImage, committed: Mapping[PartitionRef, Committed | TidelogError]) -> Iterator[_Row]:
    """Skip deleted topics: they have no name, and their offsets expire soon."""
    partitions = [ref for ref in committed if isinstance(ref, PartitionId)]
    for topic_id, numbers in by_topic(partitions).items():
        topic = image.topics.get(topic_id)
        if topic is not None:
            found = [(number, committed[PartitionId(topic_id, number)]) for number in numbers]
            shown = [each for each in found if isinstance(each[1], Committed | UnstableOffsetError)]
            yield _Row(topic.name, topic_id.bytes, [_partition(number, result) for number, result in shown])


def _fetch_code(error: TidelogError) -> int:
    """Older clients retry an OffsetFetch after NOT_COORDINATOR, but not after COORDINATOR_NOT_AVAILABLE."""
    if isinstance(error, CoordinatorNotAvailableError):
        return code(ErrorCode.NOT_COORDINATOR)
    return group_code_of(error)


# Delete.


async def delete(request: messages.OffsetDeleteRequest, context: Context) -> messages.OffsetDeleteResponse:
    response = messages.OffsetDeleteResponse()
    refs: list[PartitionRef] = [
        (topic.name, partition.partition_index) for topic in request.topics for partition in topic.partitions
    ]
    try:
        errors = await context.services.groups.delete_offsets(context.request, request.group_id, refs)
    except TidelogError as error:
        return messages.OffsetDeleteResponse(error_code=group_code_of(error))
    for topic in request.topics:
        rows = [
            messages.OffsetDeleteResponsePartition(
                partition_index=partition.partition_index,
                error_code=group_code_of(errors[topic.name, partition.partition_index]),
            )
            for partition in topic.partitions
        ]
        response.topics.append(messages.OffsetDeleteResponseTopic(name=topic.name, partitions=rows))
    return response


HANDLERS: dict[int, Entry] = {
    apis.OFFSET_COMMIT.key: Entry(commit),
    apis.OFFSET_FETCH.key: Entry(fetch),
    apis.OFFSET_DELETE.key: Entry(delete),
}
