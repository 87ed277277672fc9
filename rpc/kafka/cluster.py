"""What operators ask of the whole cluster: the quorum, log directories, elections, reassignments.

The active controller answers, except for log directories, which each broker tells of itself: Kafka's tools ask every
broker. An error of a whole request stands in the answer's own error code where its version has one, and in every row
otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TypeVar, cast

from tidelog.metadata import partitions, reassignments
from tidelog.metadata.decision import Outcome
from tidelog.metadata.describe import ListedReassignments, ListReassignments
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.topics import METADATA_TOPIC, Outcomes
from tidelog.model.errors import ErrorCode, InvalidRequestError, TidelogError
from tidelog.replication.service import DirectoryDescription, ReplicaSize
from tidelog.rpc.door_quorum_report import describe_quorum as quorum_of
from tidelog.rpc.kafka import errors
from tidelog.rpc.kafka.deadline import Deadline
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.finding import in_slices, rest
from tidelog.rpc.kafka.messages import (
    ALTER_PARTITION_REASSIGNMENTS,
    DESCRIBE_LOG_DIRS,
    DESCRIBE_QUORUM,
    ELECT_LEADERS,
    LIST_PARTITION_REASSIGNMENTS,
)
from tidelog.rpc.kafka.messages.cluster import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    DescribeLogDirsPartition,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    DescribeLogDirsResult,
    DescribeLogDirsTopic,
    DescribeQuorumRequest,
    DescribeQuorumResponse,
    ElectLeadersRequest,
    ElectLeadersResponse,
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
    OngoingPartitionReassignment,
    OngoingTopicReassignment,
    PartitionResult,
    QuorumListener,
    QuorumNode,
    QuorumPartitionData,
    QuorumReplicaState,
    QuorumTopicData,
    ReassignablePartitionResponse,
    ReassignableTopicResponse,
    ReplicaElectionResult,
)
from tidelog.rpc.kafka.pieces import pieces
from tidelog.rpc.kafka.services import Context
from tidelog.rpc.kafka.wire import ZERO_UUID, EncodedRows
from tidelog.rpc.v1 import cluster_pb2 as pb

ELECTIONS = {0: partitions.PREFERRED, 1: partitions.UNCLEAN}
ROWS_AT_A_TIME = 1_000
PARTITIONS_AT_A_TIME = 1_000
"""That the controller is asked about at once."""
ERROR_SINCE = 1
"""An answer of ElectLeaders has an error of its own."""

T = TypeVar("T")


# DescribeQuorum.


async def describe_quorum(request: DescribeQuorumRequest, context: Context) -> DescribeQuorumResponse:
    """Of the one log that has a quorum: partition 0 of the metadata topic."""
    services = context.services
    found = await quorum_of(services.link, timeout_ms=services.limits.admin_timeout_ms)
    now_ms = services.groups.now_ms()
    response = DescribeQuorumResponse(error_message=None)
    for topic in request.topics:
        rows = [
            _quorum(found, now_ms)
            if (topic.topic_name, partition.partition_index) == (METADATA_TOPIC, 0)
            else _no_quorum(topic.topic_name, partition.partition_index)
            for partition in topic.partitions
        ]
        response.topics.append(QuorumTopicData(topic_name=topic.topic_name, partitions=rows))
    response.nodes = [
        QuorumNode(
            node_id=member.node,
            listeners=[_quorum_listener(endpoint.listener, endpoint.address) for endpoint in member.endpoints],
        )
        for member in found.members
    ]
    return response


def _no_quorum(topic: str, partition: int) -> QuorumPartitionData:
    return QuorumPartitionData(
        partition_index=partition,
        error_code=errors.code(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        error_message=f"{topic[:100]}-{partition} has no quorum; {METADATA_TOPIC}-0 has",
    )


def _quorum(found: pb.DescribeQuorumResponse, now_ms: int) -> QuorumPartitionData:
    members = [(member.is_voter, _replica(found, member, now_ms)) for member in found.members]
    observers = [state for is_voter, state in members if not is_voter]
    # Brokers that tail the log: what they were sent. One that is a member too is told once, as Kafka does.
    known = {member.node for member in found.members}
    observers += [
        QuorumReplicaState(replica_id=observer.node, log_end_offset=observer.offset)
        for observer in found.observers
        if observer.node not in known
    ]
    return QuorumPartitionData(
        partition_index=0,
        error_message=None,
        leader_id=found.leader,
        leader_epoch=found.epoch,
        high_watermark=found.high_watermark,
        current_voters=[state for is_voter, state in members if is_voter],
        observers=observers,
    )


def _replica(found: pb.DescribeQuorumResponse, member: pb.QuorumMember, now_ms: int) -> QuorumReplicaState:
    """-1 are times that the leader does not know: it keeps when it last heard of a member, and how far behind it is."""
    heard_ms = -1 if member.silent_ms < 0 else now_ms - member.silent_ms
    if member.node == found.leader:
        heard_ms = now_ms
    is_caught_up = member.node == found.leader or member.lag == 0
    return QuorumReplicaState(
        replica_id=member.node,
        replica_directory_id=member.directory_id or ZERO_UUID,
        log_end_offset=found.log_end_offset if member.node == found.leader else member.log_end_offset,
        last_fetch_timestamp=heard_ms,
        last_caught_up_timestamp=heard_ms if is_caught_up else -1,
    )


def _quorum_listener(name: str, address: str) -> QuorumListener:
    host, _, port = address.rpartition(":")
    return QuorumListener(name=name, host=host.strip("[]"), port=int(port))


# DescribeLogDirs.


async def describe_log_dirs(request: DescribeLogDirsRequest, context: Context) -> DescribeLogDirsResponse:
    services = context.services
    wanted: dict[str, frozenset[int]] | None = None
    if request.topics is not None:
        wanted = {topic.topic: frozenset(topic.partitions) for topic in request.topics}
    image = services.image
    results = []
    for directory in await services.partitions.log_directories():
        await asyncio.sleep(0)
        results.append(await _directory(image, directory, wanted, context.version))
    return DescribeLogDirsResponse(results=results)


async def _directory(
    image: ClusterImage, found: DirectoryDescription, wanted: dict[str, frozenset[int]] | None, version: int
) -> DescribeLogDirsResult:
    """Replicas of a topic that is gone have no name any more, and are not told."""
    topics = EncodedRows()
    done = 0
    for topic_id, replicas in groupby(found.replicas, key=lambda replica: replica.partition.topic_id):
        topic = image.topics.get(topic_id)
        if topic is None or (wanted is not None and topic.name not in wanted):
            continue
        numbers = None if wanted is None else wanted[topic.name]
        sizes = [_size(one) for one in replicas if not numbers or one.partition.partition in numbers]
        partitions = EncodedRows()
        for first in range(0, len(sizes), ROWS_AT_A_TIME):
            some = sizes[first : first + ROWS_AT_A_TIME]
            partitions.add(len(some), DESCRIBE_LOG_DIRS.encode_rows(version, DescribeLogDirsPartition, some))
            done += len(some)
            if done >= ROWS_AT_A_TIME:
                done = 0
                await asyncio.sleep(0)
        if sizes:
            row = DescribeLogDirsTopic(name=topic.name, partitions=cast("list[DescribeLogDirsPartition]", partitions))
            topics.add(1, DESCRIBE_LOG_DIRS.encode_rows(version, DescribeLogDirsTopic, [row]))
    return DescribeLogDirsResult(
        error_code=errors.code_of(found.error),
        log_dir=found.label,
        topics=cast("list[DescribeLogDirsTopic]", topics),
        total_bytes=found.total_bytes,
        usable_bytes=found.free_bytes,
    )


def _size(replica: ReplicaSize) -> DescribeLogDirsPartition:
    return DescribeLogDirsPartition(
        partition_index=replica.partition.partition,
        partition_size=replica.size,
        offset_lag=replica.offset_lag,
        is_future_key=replica.is_future,
    )


# ElectLeaders.


async def elect_leaders(request: ElectLeadersRequest, context: Context) -> ElectLeadersResponse:
    """With null partitions only those are told that had an election, or should have had one."""
    named = None
    if request.topic_partitions is not None:
        named = [(topic.topic, number) for topic in request.topic_partitions for number in topic.partitions]
    try:
        outcomes = await _elect(request, named, context)
    except TidelogError as error:
        if context.version >= ERROR_SINCE:
            raise
        outcomes = [Outcome("", error.code, str(error))] * len(named or ())
    if named is None:
        # The controller chose them, and labels each `topic-partition`.
        labels = [item.name.rpartition("-") for item in outcomes]
        named = [(topic, int(number)) for topic, _, number in labels]
    response = ElectLeadersResponse()
    for topic, rows in _by_topic(zip(named, outcomes, strict=True)):
        results = [
            PartitionResult(partition_id=number, error_code=errors.code(item.error), error_message=_message(item))
            async for number, item in in_slices(rows)
        ]
        response.replica_election_results.append(ReplicaElectionResult(topic=topic, partition_result=results))
    return response


async def _elect(
    request: ElectLeadersRequest, named: Sequence[tuple[str, int]] | None, context: Context
) -> Sequence[Outcome]:
    kind = ELECTIONS.get(request.election_type)
    if kind is None:
        raise InvalidRequestError(f"there is no election type {request.election_type}")
    if named is not None and not named:
        return ()
    if named is None:
        return await _outcomes(partitions.ElectLeaders(kind=kind, partitions=None), request.timeout_ms, context)
    return await _in_pieces(
        named,
        lambda places: partitions.ElectLeaders(kind=kind, partitions=tuple(named[at] for at in places)),
        request.timeout_ms,
        context,
    )


# Reassignments.


async def alter_reassignments(
    request: AlterPartitionReassignmentsRequest, context: Context
) -> AlterPartitionReassignmentsResponse:
    wanted = tuple(
        reassignments.Reassigned(
            topic=topic.name,
            partition=item.partition_index,
            replicas=None if item.replicas is None else tuple(item.replicas),
        )
        for topic in request.topics
        for item in topic.partitions
    )
    named = [(item.topic, item.partition) for item in wanted]
    outcomes = await _in_pieces(
        named,
        lambda places: reassignments.AlterReassignments(
            partitions=tuple(wanted[at] for at in places), keeps_factor=not request.allow_replication_factor_change
        ),
        request.timeout_ms,
        context,
    )
    return AlterPartitionReassignmentsResponse(
        allow_replication_factor_change=request.allow_replication_factor_change,
        error_message=None,
        responses=[
            ReassignableTopicResponse(
                name=topic,
                partitions=[
                    ReassignablePartitionResponse(
                        partition_index=number, error_code=errors.code(item.error), error_message=_message(item)
                    )
                    async for number, item in in_slices(rows)
                ],
            )
            for topic, rows in _by_topic(zip(named, outcomes, strict=True))
        ],
    )


async def list_reassignments(
    request: ListPartitionReassignmentsRequest, context: Context
) -> ListPartitionReassignmentsResponse:
    named = None
    if request.topics is not None:
        named = tuple((topic.name, number) for topic in request.topics for number in topic.partition_indexes)
    timeout_ms = context.services.limits.admin_timeout(request.timeout_ms)
    reply = await context.services.link.ask(ListReassignments(partitions=named), timeout_ms=timeout_ms)
    assert isinstance(reply, ListedReassignments), "the reply to its question"
    found = (((item.topic, item.partition), item) for item in reply.reassignments)
    return ListPartitionReassignmentsResponse(
        error_message=None,
        topics=[
            OngoingTopicReassignment(
                name=topic,
                partitions=[
                    OngoingPartitionReassignment(
                        partition_index=number,
                        replicas=list(item.replicas),
                        adding_replicas=list(item.adding),
                        removing_replicas=list(item.removing),
                    )
                    for number, item in rows
                ],
            )
            for topic, rows in _by_topic(found)
        ],
    )


async def _in_pieces(
    named: Sequence[tuple[str, int]], question: Callable[[Sequence[int]], object], timeout_ms: int, context: Context
) -> Sequence[Outcome]:
    """One outcome for each partition. An error of the first piece is that of the whole request: nothing is done; an
    error of a later one is that of its partitions."""
    found: dict[int, Outcome] = {}
    deadline = Deadline(context.services.limits.admin_timeout(timeout_ms))
    await rest(len(named))
    for places in pieces(named, PARTITIONS_AT_A_TIME):
        try:
            found |= zip(places, await _outcomes(question(places), deadline.left_ms(), context), strict=True)
        except TidelogError as error:
            if not found:
                raise
            found |= dict.fromkeys(places, Outcome("", error.code, str(error)))
    return [found[at] for at in range(len(named))]


async def _outcomes(question: object, timeout_ms: int, context: Context) -> Sequence[Outcome]:
    services = context.services
    reply = await services.link.ask(question, timeout_ms=services.limits.admin_timeout(timeout_ms))
    assert isinstance(reply, Outcomes), "one outcome for each item"
    return reply.items


def _message(item: Outcome) -> str | None:
    return None if item.error is None else item.message[: errors.MESSAGE_LENGTH_MAX]


def _by_topic(items: Iterable[tuple[tuple[str, int], T]]) -> Iterator[tuple[str, list[tuple[int, T]]]]:
    """Neighbours of one topic, together."""
    for topic, rows in groupby(items, key=lambda item: item[0][0]):
        yield topic, [(number, item) for (_, number), item in rows]


HANDLERS: dict[int, Entry] = {
    DESCRIBE_LOG_DIRS.key: Entry(describe_log_dirs),
    ELECT_LEADERS.key: Entry(elect_leaders),
    ALTER_PARTITION_REASSIGNMENTS.key: Entry(alter_reassignments),
    LIST_PARTITION_REASSIGNMENTS.key: Entry(list_reassignments),
    DESCRIBE_QUORUM.key: Entry(describe_quorum),
}
