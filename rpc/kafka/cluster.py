"""Requests about the whole cluster: quorum, log directories, elections, reassignments.

Translates to the services. The active controller answers, except for log directories: Kafka's tools ask each broker for
its own. An error of a whole request is the response's error code where its version has one, else that of every row.
"""

from __future__ import annotations

import asyncio
from itertools import groupby
from typing import cast

from tidelog.metadata import partitions, reassignments
from tidelog.metadata.decision import Outcome
from tidelog.metadata.topics import METADATA_TOPIC
from tidelog.model.errors import ErrorCode, InvalidRequestError, TidelogError
from tidelog.rpc.kafka import errors
from tidelog.rpc.kafka import messages as apis
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.messages import cluster as messages
from tidelog.rpc.kafka.services import Context
from tidelog.rpc.kafka.wire import ZERO_UUID, EncodedRows
from tidelog.services.log_dirs import LogDir, LogDirReplica
from tidelog.services.partition_lookup import PARTITIONS_PER_SLICE
from tidelog.services.quorum import QuorumDescription, QuorumMember
from tidelog.services.replicas import PartitionOutcome
from tidelog.world.slicing import sliced

ELECTIONS = {0: partitions.PREFERRED, 1: partitions.UNCLEAN}
ROWS_AT_A_TIME = 1_000
ERROR_SINCE = 1
"""Responses of ElectLeaders have an error code of their own from this version on."""


# DescribeQuorum.


async def describe_quorum(request: messages.DescribeQuorumRequest, context: Context) -> messages.DescribeQuorumResponse:
    """Of the one log that has a quorum: partition 0 of the metadata topic."""
    quorum = await context.services.quorum.describe(context.request)
    now_ms = context.services.groups.coordinator.now_ms()
    response = messages.DescribeQuorumResponse(error_message=None)
    for topic in request.topics:
        rows = [
            _quorum(quorum, now_ms)
            if (topic.topic_name, partition.partition_index) == (METADATA_TOPIC, 0)
            else _no_quorum(topic.topic_name, partition.partition_index)
            for partition in topic.partitions
        ]
        response.topics.append(messages.QuorumTopicData(topic_name=topic.topic_name, partitions=rows))
    response.nodes = [
        messages.QuorumNode(
            node_id=member.node,
            listeners=[_quorum_listener(name, address) for name, address in member.endpoints],
        )
        for member in quorum.members
    ]
    return response


def _no_quorum(topic: str, partition: int) -> messages.QuorumPartitionData:
    return messages.QuorumPartitionData(
        partition_index=partition,
        error_code=errors.code(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        error_message=f"{topic[:100]}-{partition} has no quorum; {METADATA_TOPIC}-0 has",
    )


def _quorum(quorum: QuorumDescription, now_ms: int) -> messages.QuorumPartitionData:
    members = [(member.is_voter, _replica(quorum, member, now_ms)) for member in quorum.members]
    observers = [state for is_voter, state in members if not is_voter]
    # Brokers that tail the log. A node that is a member too has one row, as in Kafka.
    known = {member.node for member in quorum.members}
    observers += [
        messages.QuorumReplicaState(replica_id=node, log_end_offset=offset)
        for node, offset in quorum.observers
        if node not in known
    ]
    return messages.QuorumPartitionData(
        partition_index=0,
        error_message=None,
        leader_id=quorum.leader,
        leader_epoch=quorum.epoch,
        high_watermark=quorum.high_watermark,
        current_voters=[state for is_voter, state in members if is_voter],
        observers=observers,
    )


def _replica(quorum: QuorumDescription, member: QuorumMember, now_ms: int) -> messages.QuorumReplicaState:
    """The leader knows when it last heard of a member and its lag; times that it does not know are -1."""
    heard_ms = -1 if member.silent_ms < 0 else now_ms - member.silent_ms
    if member.node == quorum.leader:
        heard_ms = now_ms
    is_caught_up = member.node == quorum.leader or member.lag == 0
    return messages.QuorumReplicaState(
        replica_id=member.node,
        replica_directory_id=member.directory_id or ZERO_UUID,
        log_end_offset=quorum.log_end_offset if member.node == quorum.leader else member.log_end_offset,
        last_fetch_timestamp=heard_ms,
        last_caught_up_timestamp=heard_ms if is_caught_up else -1,
    )


def _quorum_listener(name: str, address: str) -> messages.QuorumListener:
    host, _, port = address.rpartition(":")
    return messages.QuorumListener(name=name, host=host.strip("[]"), port=int(port))


# DescribeLogDirs.


async def describe_log_dirs(
    request: messages.DescribeLogDirsRequest, context: Context
) -> messages.DescribeLogDirsResponse:
    partitions: dict[str, frozenset[int]] | None = None
    if request.topics is not None:
        partitions = {topic.topic: frozenset(topic.partitions) for topic in request.topics}
    results = []
    for directory in await context.services.log_dirs.describe_own(context.request):
        await asyncio.sleep(0)
        results.append(await _directory(directory, partitions, context.version))
    return messages.DescribeLogDirsResponse(results=results)


async def _directory(
    directory: LogDir, named: dict[str, frozenset[int]] | None, version: int
) -> messages.DescribeLogDirsResult:
    """Replicas of a deleted topic have no name, and no row."""
    topics = EncodedRows()
    done = 0
    for name, replicas in groupby(directory.replicas, key=lambda replica: replica.topic):
        if not name or (named is not None and name not in named):
            continue
        numbers = None if named is None else named[name]
        sizes = [_size(replica) for replica in replicas if not numbers or replica.partition in numbers]
        partitions = EncodedRows()
        for first in range(0, len(sizes), ROWS_AT_A_TIME):
            some = sizes[first : first + ROWS_AT_A_TIME]
            partitions.add(
                len(some), apis.DESCRIBE_LOG_DIRS.encode_rows(version, messages.DescribeLogDirsPartition, some)
            )
            done += len(some)
            if done >= ROWS_AT_A_TIME:
                done = 0
                await asyncio.sleep(0)
        if sizes:
            row = messages.DescribeLogDirsTopic(
                name=name, partitions=cast("list[messages.DescribeLogDirsPartition]", partitions)
            )
            topics.add(1, apis.DESCRIBE_LOG_DIRS.encode_rows(version, messages.DescribeLogDirsTopic, [row]))
    return messages.DescribeLogDirsResult(
        error_code=errors.code(directory.error),
        log_dir=directory.path,
        topics=cast("list[messages.DescribeLogDirsTopic]", topics),
        total_bytes=directory.total_bytes,
        usable_bytes=directory.usable_bytes,
    )


def _size(replica: LogDirReplica) -> messages.DescribeLogDirsPartition:
    return messages.DescribeLogDirsPartition(
        partition_index=replica.partition,
        partition_size=replica.size,
        offset_lag=replica.offset_lag,
        is_future_key=replica.is_future,
    )


# ElectLeaders.


async def elect_leaders(request: messages.ElectLeadersRequest, context: Context) -> messages.ElectLeadersResponse:
    """Null partitions: only partitions with an election, or that should have had one, have a row."""
    names = None
    if request.topic_partitions is not None:
        names = tuple((topic.topic, number) for topic in request.topic_partitions for number in topic.partitions)
    try:
        elect = partitions.ElectLeaders(kind=_election(request.election_type), partitions=names)
        service = context.services.replicas
        rows = await service.elect_leaders(context.request, elect)
    except TidelogError as error:
        if context.version >= ERROR_SINCE:
            raise
        failed = Outcome("", error.code, str(error))
        rows = tuple(PartitionOutcome(topic=topic, partition=number, outcome=failed) for topic, number in names or ())
    response = messages.ElectLeadersResponse()
    for topic, same in groupby(rows, key=lambda row: row.topic):
        results = [
            messages.PartitionResult(
                partition_id=row.partition,
                error_code=errors.code(row.outcome.error),
                error_message=errors.row_message(row.outcome.error, row.outcome.message),
            )
            async for row in sliced(same, PARTITIONS_PER_SLICE)
        ]
        response.replica_election_results.append(messages.ReplicaElectionResult(topic=topic, partition_result=results))
    return response


def _election(election_type: int) -> str:
    kind = ELECTIONS.get(election_type)
    if kind is None:
        raise InvalidRequestError(f"there is no election type {election_type}")
    return kind


# Reassignments.


async def alter_reassignments(
    request: messages.AlterPartitionReassignmentsRequest, context: Context
) -> messages.AlterPartitionReassignmentsResponse:
    targets = tuple(
        reassignments.ReassignmentTarget(
            topic=topic.name,
            partition=item.partition_index,
            replicas=None if item.replicas is None else tuple(item.replicas),
        )
        for topic in request.topics
        for item in topic.partitions
    )
    alter = reassignments.AlterReassignments(
        partitions=targets, keeps_factor=not request.allow_replication_factor_change
    )
    service = context.services.replicas
    rows = await service.alter_reassignments(context.request, alter)
    return messages.AlterPartitionReassignmentsResponse(
        allow_replication_factor_change=request.allow_replication_factor_change,
        error_message=None,
        responses=[
            messages.ReassignableTopicResponse(
                name=topic,
                partitions=[
                    messages.ReassignablePartitionResponse(
                        partition_index=row.partition,
                        error_code=errors.code(row.outcome.error),
                        error_message=errors.row_message(row.outcome.error, row.outcome.message),
                    )
                    async for row in sliced(same, PARTITIONS_PER_SLICE)
                ],
            )
            for topic, same in groupby(rows, key=lambda row: row.topic)
        ],
    )


async def list_reassignments(
    request: messages.ListPartitionReassignmentsRequest, context: Context
) -> messages.ListPartitionReassignmentsResponse:
    names = None
    if request.topics is not None:
        names = tuple((topic.name, number) for topic in request.topics for number in topic.partition_indexes)
    service = context.services.replicas
    reply = await service.list_reassignments(context.request, names)
    return messages.ListPartitionReassignmentsResponse(
        error_message=None,
        topics=[
            messages.OngoingTopicReassignment(
                name=topic,
                partitions=[
                    messages.OngoingPartitionReassignment(
                        partition_index=item.partition,
                        replicas=list(item.replicas),
                        adding_replicas=list(item.adding),
                        removing_replicas=list(item.removing),
                    )
                    for item in same
                ],
            )
            for topic, same in groupby(reply.rows, key=lambda item: item.topic)
        ],
    )


HANDLERS: dict[int, Entry] = {
    apis.DESCRIBE_LOG_DIRS.key: Entry(describe_log_dirs),
    apis.ELECT_LEADERS.key: Entry(elect_leaders),
    apis.ALTER_PARTITION_REASSIGNMENTS.key: Entry(alter_reassignments),
    apis.LIST_PARTITION_REASSIGNMENTS.key: Entry(list_reassignments),
    apis.DESCRIBE_QUORUM.key: Entry(describe_quorum),
}
