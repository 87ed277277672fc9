"""OffsetCommit, OffsetFetch, OffsetDelete: how far groups have read. Members of either door, and programs that are no
members, share one set of offsets.

Topics are named, from version 10 on by their ids. What there is not:

    commit, delete    UNKNOWN_TOPIC_OR_PARTITION, UNKNOWN_TOPIC_ID
    fetch             no offset (-1), as of a partition that was never committed; by id UNKNOWN_TOPIC_ID

Errors of a group as clients know them: STALE_MEMBER_EPOCH is told from version 9 of a commit on, before it is
UNSUPPORTED_VERSION; a commit of a member of a group that is not there is ILLEGAL_GENERATION before, GROUP_ID_NOT_FOUND
since. There are no transactions, so an offset is stable as soon as it is there (`require_stable`). The retention time
of old commits (versions 2 to 4) is not heeded: offsets live as `offsets.retention.minutes` says.

A fetch that fails for now (not the coordinator, it reads its groups, a member's epoch is another) has the error of the
group, as in Kafka, and names the partitions that were asked for, each with UNSTABLE_OFFSET_COMMIT: ask again. Clients
heed the error of the group. librdkafka (2.16 and before) asks again only for partitions that an answer names; without
them its consumer holds its assignment, sends heartbeats and never reads (confluentinc/librdkafka#5586).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast
from uuid import UUID

from tidelog.coordinator.queries import NOT_COMMITTED
from tidelog.coordinator.requests import Committed, OffsetToCommit
from tidelog.metadata.image import ClusterImage, Topic
from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.model.group_errors import CoordinatorNotAvailableError, StaleMemberEpochError, UnknownMemberIdError
from tidelog.model.ids import PartitionId, TopicId
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.errors import NONE, code, group_code_of
from tidelog.rpc.kafka.finding import rest
from tidelog.rpc.kafka.groups import Room, by_topic
from tidelog.rpc.kafka.messages import OFFSET_COMMIT, OFFSET_DELETE, OFFSET_FETCH
from tidelog.rpc.kafka.messages import groups as messages
from tidelog.rpc.kafka.services import Context
from tidelog.rpc.kafka.wire import ZERO_UUID, EncodedRows

IDS_SINCE = 10
EPOCHS_SINCE = 9
"""OffsetCommit: its clients know the errors of consumer groups."""
GROUPS_SINCE = 8
"""OffsetFetch: several groups in one request."""
GROUP_ERROR_SINCE = 2
"""OffsetFetch: before, an error of the group stands in each partition."""
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
"""A fetch that fails so is sent again, here or to another coordinator, by a client that has joined again if it must."""
ROWS_AT_A_TIME = 1_000
GROUPS_AT_A_TIME = 200
BYTES_AT_A_TIME = 16 << 10


def _topic(image: ClusterImage, version: int, name: str, topic_id: bytes) -> Topic | None:
    if version >= IDS_SINCE:
        return image.topics.get(UUID(bytes=topic_id))
    return image.topic_named(name)


def _unknown(version: int) -> int:
    return code(ErrorCode.UNKNOWN_TOPIC_ID if version >= IDS_SINCE else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)


# Commit.


async def commit(request: messages.OffsetCommitRequest, context: Context) -> messages.OffsetCommitResponse:
    image, version = context.services.groups.image, context.version
    response = messages.OffsetCommitResponse()
    offsets: dict[PartitionId, OffsetToCommit] = {}
    asked: list[tuple[PartitionId, messages.OffsetCommitResponsePartition]] = []
    done = 0
    for named in request.topics:
        topic = _topic(image, version, named.name, named.topic_id)
        told = messages.OffsetCommitResponseTopic(name=named.name, topic_id=named.topic_id)
        response.topics.append(told)
        for partition in named.partitions:
            row = messages.OffsetCommitResponsePartition(partition_index=partition.partition_index)
            told.partitions.append(row)
            if topic is None:
                row.error_code = _unknown(version)
            elif partition.partition_index not in topic.partitions:
                row.error_code = code(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            else:
                where = PartitionId(TopicId(topic.topic_id), partition.partition_index)
                asked.append((where, row))
                offsets[where] = OffsetToCommit(
                    partition.committed_offset, partition.committed_leader_epoch, partition.committed_metadata or ""
                )
            done += 1
            if done % ROWS_AT_A_TIME == 0:
                await asyncio.sleep(0)
    if asked:
        codes = await _commit(request, context, offsets)
        for where, row in asked:
            row.error_code = codes[where]
    return response


async def _commit(
    request: messages.OffsetCommitRequest, context: Context, offsets: Mapping[PartitionId, OffsetToCommit]
) -> dict[PartitionId, int]:
    try:
        done = await context.services.groups.commit_offsets(
            request.group_id,
            offsets,
            member_id=request.member_id,
            member_epoch=request.generation_id_or_member_epoch,
            instance_id=request.group_instance_id or "",
        )
    except TidelogError as error:
        return dict.fromkeys(offsets, _commit_code(error, request, context))
    return {where: _commit_code(error, request, context) for where, error in done.items()}


def _commit_code(error: TidelogError | None, request: messages.OffsetCommitRequest, context: Context) -> int:
    if isinstance(error, StaleMemberEpochError) and context.version < EPOCHS_SINCE:
        return code(ErrorCode.UNSUPPORTED_VERSION)
    if isinstance(error, UnknownMemberIdError) and request.generation_id_or_member_epoch >= 0:
        try:
            is_there = context.services.groups.kind_of(request.group_id) is not None
        except TidelogError:
            return group_code_of(error)  # it is another's group by now
        if not is_there:
            newer = context.version >= EPOCHS_SINCE
            return code(ErrorCode.GROUP_ID_NOT_FOUND if newer else ErrorCode.ILLEGAL_GENERATION)
    return group_code_of(error)


# Fetch.


@dataclass(slots=True)
class _Row:
    """A topic in an answer."""

    name: str
    topic_id: bytes
    partitions: Sequence[tuple[int, Committed]]
    error_code: int = NONE


async def fetch(request: messages.OffsetFetchRequest, context: Context) -> messages.OffsetFetchResponse:
    room = Room()
    if context.version >= GROUPS_SINCE:
        rows = EncodedRows()
        for number, one in enumerate(request.groups, start=1):
            told = await _group(one, context, room)
            data = OFFSET_FETCH.encode_rows(context.version, messages.OffsetFetchResponseGroup, [told])
            room.count(len(data))
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
    told = await _group(group, context, room)
    response = messages.OffsetFetchResponse(error_code=told.error_code)
    if told.error_code and context.version < GROUP_ERROR_SINCE:
        response.topics = [_failed(topic, told.error_code) for topic in topics or ()]
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
        for topic in told.topics
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
    request: messages.OffsetFetchRequestGroup, context: Context, room: Room
) -> messages.OffsetFetchResponseGroup:
    told = messages.OffsetFetchResponseGroup(group_id=request.group_id)
    try:
        room.enter()
        rows = await _fetched(request, context)
    except TidelogError as error:
        told.error_code = _fetch_code(error)
        if error.code not in _TRANSIENT or context.version < UNSTABLE_SINCE:
            return told
        rows = list(_unstable(request))
    done = 0
    for row in rows:
        topic = messages.OffsetFetchResponseTopics(name=row.name, topic_id=row.topic_id)
        told.topics.append(topic)
        for number, held in row.partitions:
            topic.partitions.append(
                messages.OffsetFetchResponsePartitions(
                    partition_index=number,
                    committed_offset=held.offset,
                    committed_leader_epoch=held.leader_epoch,
                    metadata=held.metadata,
                    error_code=row.error_code,
                )
            )
            done += 1
            if done % ROWS_AT_A_TIME == 0:
                await asyncio.sleep(0)
    return told


def _unstable(request: messages.OffsetFetchRequestGroup) -> Iterator[_Row]:
    """Nothing is known of these partitions now: ask again."""
    for topic in request.topics or ():
        none = [(number, NOT_COMMITTED) for number in topic.partition_indexes]
        yield _Row(topic.name, topic.topic_id, none, code(ErrorCode.UNSTABLE_OFFSET_COMMIT))


async def _fetched(request: messages.OffsetFetchRequestGroup, context: Context) -> list[_Row]:
    groups, version = context.services.groups, context.version
    image = groups.image
    member_id = request.member_id or ""
    if request.topics is None:
        return list(
            _all(
                image,
                groups.fetch_offsets(request.group_id, None, member_id=member_id, member_epoch=request.member_epoch),
            )
        )
    topics = [(_topic(image, version, named.name, named.topic_id), named) for named in request.topics]
    wanted = list(_wanted(topics))
    held: dict[PartitionId, Committed] = {}
    for first in range(0, max(1, len(wanted)), ROWS_AT_A_TIME):
        some = wanted[first : first + ROWS_AT_A_TIME]
        held |= groups.fetch_offsets(request.group_id, some, member_id=member_id, member_epoch=request.member_epoch)
        await rest(len(wanted))
    rows = []
    for topic, named in topics:
        if topic is None:
            none = [(number, NOT_COMMITTED) for number in named.partition_indexes]
            rows.append(_Row(named.name, named.topic_id, none, _unknown(version) if version >= IDS_SINCE else NONE))
        else:
            topic_id = TopicId(topic.topic_id)
            found = [(number, held[PartitionId(topic_id, number)]) for number in named.partition_indexes]
            rows.append(_Row(topic.name, topic_id.bytes, found))
    return rows


def _wanted(topics: Iterable[tuple[Topic | None, messages.OffsetFetchRequestTopics]]) -> Iterator[PartitionId]:
    for topic, named in topics:
        if topic is not None:
            topic_id = TopicId(topic.topic_id)
            yield from (PartitionId(topic_id, number) for number in named.partition_indexes)


def _all(image: ClusterImage, held: Mapping[PartitionId, Committed]) -> Iterator[_Row]:
    """Offsets of a topic that is gone have no name to be told by, and are about to expire."""
    for topic_id, numbers in by_topic(held).items():
        topic = image.topics.get(topic_id)
        if topic is not None:
            found = [(number, held[PartitionId(topic_id, number)]) for number in numbers]
            yield _Row(topic.name, topic_id.bytes, found)


def _fetch_code(error: TidelogError) -> int:
    """Older clients repeat an OffsetFetch after NOT_COORDINATOR, and not after COORDINATOR_NOT_AVAILABLE."""
    if isinstance(error, CoordinatorNotAvailableError):
        return code(ErrorCode.NOT_COORDINATOR)
    return group_code_of(error)


# Delete.


async def delete(request: messages.OffsetDeleteRequest, context: Context) -> messages.OffsetDeleteResponse:
    groups = context.services.groups
    response = messages.OffsetDeleteResponse()
    asked: list[tuple[PartitionId, messages.OffsetDeleteResponsePartition]] = []
    for named in request.topics:
        topic = _topic(groups.image, context.version, named.name, ZERO_UUID)
        told = messages.OffsetDeleteResponseTopic(name=named.name)
        response.topics.append(told)
        for partition in named.partitions:
            row = messages.OffsetDeleteResponsePartition(partition_index=partition.partition_index)
            told.partitions.append(row)
            if topic is None or partition.partition_index not in topic.partitions:
                row.error_code = code(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            else:
                asked.append((PartitionId(TopicId(topic.topic_id), partition.partition_index), row))
    try:
        done = await groups.delete_offsets(request.group_id, list(dict.fromkeys(where for where, _ in asked)))
    except TidelogError as error:
        return messages.OffsetDeleteResponse(error_code=group_code_of(error))
    for where, row in asked:
        row.error_code = group_code_of(done[where])
    return response


HANDLERS: dict[int, Entry] = {
    OFFSET_COMMIT.key: Entry(commit),
    OFFSET_FETCH.key: Entry(fetch),
    OFFSET_DELETE.key: Entry(delete),
}
