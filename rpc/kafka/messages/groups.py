"""Groups and their offsets: the classic protocol, the consumer protocol, and admin requests."""

from __future__ import annotations

from tidelog.rpc.kafka import schema as s
from tidelog.rpc.kafka.messages.metadata import NO_OPERATIONS


@s.struct
class JoinGroupRequestProtocol:
    name: str = s.string()
    metadata: bytes = s.binary()


@s.message(key=11, versions=(0, 9), flexible_since=6)
class JoinGroupRequest:
    group_id: str = s.string()
    session_timeout_ms: int = s.int32()
    rebalance_timeout_ms: int = s.int32(since=1, default=-1)
    member_id: str = s.string()
    group_instance_id: str | None = s.string(since=5, nullable_since=5, default=None)
    protocol_type: str = s.string()
    protocols: list[JoinGroupRequestProtocol] = s.array(JoinGroupRequestProtocol)
    reason: str | None = s.string(since=8, nullable_since=8, default=None)


@s.struct
class JoinGroupResponseMember:
    member_id: str = s.string()
    group_instance_id: str | None = s.string(since=5, nullable_since=5, default=None)
    metadata: bytes = s.binary()


@s.response_to(JoinGroupRequest)
class JoinGroupResponse:
    throttle_time_ms: int = s.int32(since=2)
    error_code: int = s.int16()
    generation_id: int = s.int32(default=-1)
    protocol_type: str | None = s.string(since=7, nullable_since=7, default=None)
    protocol_name: str | None = s.string(nullable_since=7)
    leader: str = s.string()
    skip_assignment: bool = s.boolean(since=9)
    member_id: str = s.string()
    members: list[JoinGroupResponseMember] = s.array(JoinGroupResponseMember)


@s.struct
class SyncGroupRequestAssignment:
    member_id: str = s.string()
    assignment: bytes = s.binary()


@s.message(key=14, versions=(0, 5), flexible_since=4)
class SyncGroupRequest:
    group_id: str = s.string()
    generation_id: int = s.int32()
    member_id: str = s.string()
    group_instance_id: str | None = s.string(since=3, nullable_since=3, default=None)
    protocol_type: str | None = s.string(since=5, nullable_since=5, default=None)
    protocol_name: str | None = s.string(since=5, nullable_since=5, default=None)
    assignments: list[SyncGroupRequestAssignment] = s.array(SyncGroupRequestAssignment)


@s.response_to(SyncGroupRequest)
class SyncGroupResponse:
    throttle_time_ms: int = s.int32(since=1)
    error_code: int = s.int16()
    protocol_type: str | None = s.string(since=5, nullable_since=5, default=None)
    protocol_name: str | None = s.string(since=5, nullable_since=5, default=None)
    assignment: bytes = s.binary()


@s.message(key=12, versions=(0, 4), flexible_since=4)
class HeartbeatRequest:
    group_id: str = s.string()
    generation_id: int = s.int32()
    member_id: str = s.string()
    group_instance_id: str | None = s.string(since=3, nullable_since=3, default=None)


@s.response_to(HeartbeatRequest)
class HeartbeatResponse:
    throttle_time_ms: int = s.int32(since=1)
    error_code: int = s.int16()


@s.struct
class MemberIdentity:
    member_id: str = s.string()
    group_instance_id: str | None = s.string(nullable_since=3, default=None)
    reason: str | None = s.string(since=5, nullable_since=5, default=None)


@s.message(key=13, versions=(0, 5), flexible_since=4)
class LeaveGroupRequest:
    group_id: str = s.string()
    member_id: str = s.string(until=2)
    members: list[MemberIdentity] = s.array(MemberIdentity, since=3)


@s.struct
class MemberResponse:
    member_id: str = s.string()
    group_instance_id: str | None = s.string(nullable_since=3)
    error_code: int = s.int16()


@s.response_to(LeaveGroupRequest)
class LeaveGroupResponse:
    throttle_time_ms: int = s.int32(since=1)
    error_code: int = s.int16()
    members: list[MemberResponse] = s.array(MemberResponse, since=3)


@s.struct
class OffsetCommitRequestPartition:
    partition_index: int = s.int32()
    committed_offset: int = s.int64()
    committed_leader_epoch: int = s.int32(since=6, default=-1)
    committed_metadata: str | None = s.string(nullable_since=0)


@s.struct
class OffsetCommitRequestTopic:
    name: str = s.string(until=9)
    topic_id: bytes = s.uuid(since=10)
    partitions: list[OffsetCommitRequestPartition] = s.array(OffsetCommitRequestPartition)


@s.message(key=8, versions=(2, 10), flexible_since=8)
class OffsetCommitRequest:
    group_id: str = s.string()
    generation_id_or_member_epoch: int = s.int32(since=1, default=-1)
    member_id: str = s.string(since=1)
    group_instance_id: str | None = s.string(since=7, nullable_since=7, default=None)
    retention_time_ms: int = s.int64(since=2, until=4, default=-1)
    topics: list[OffsetCommitRequestTopic] = s.array(OffsetCommitRequestTopic)


@s.struct
class OffsetCommitResponsePartition:
    partition_index: int = s.int32()
    error_code: int = s.int16()


@s.struct
class OffsetCommitResponseTopic:
    name: str = s.string(until=9)
    topic_id: bytes = s.uuid(since=10)
    partitions: list[OffsetCommitResponsePartition] = s.array(OffsetCommitResponsePartition)


@s.response_to(OffsetCommitRequest)
class OffsetCommitResponse:
    throttle_time_ms: int = s.int32(since=3)
    topics: list[OffsetCommitResponseTopic] = s.array(OffsetCommitResponseTopic)


@s.struct
class OffsetFetchRequestTopic:
    name: str = s.string()
    partition_indexes: list[int] = s.int32_array()


@s.struct
class OffsetFetchRequestTopics:
    name: str = s.string(until=9)
    topic_id: bytes = s.uuid(since=10)
    partition_indexes: list[int] = s.int32_array()


@s.struct
class OffsetFetchRequestGroup:
    group_id: str = s.string()
    member_id: str | None = s.string(since=9, nullable_since=9, default=None)
    member_epoch: int = s.int32(since=9, default=-1)
    topics: list[OffsetFetchRequestTopics] | None = s.array(OffsetFetchRequestTopics, nullable_since=8)


@s.message(key=9, versions=(1, 10), flexible_since=6)
class OffsetFetchRequest:
    """Null topics: all offsets of the group."""

    group_id: str = s.string(until=7)
    topics: list[OffsetFetchRequestTopic] | None = s.array(OffsetFetchRequestTopic, until=7, nullable_since=2)
    groups: list[OffsetFetchRequestGroup] = s.array(OffsetFetchRequestGroup, since=8)
    require_stable: bool = s.boolean(since=7)


@s.struct
class OffsetFetchResponsePartition:
    partition_index: int = s.int32()
    committed_offset: int = s.int64()
    committed_leader_epoch: int = s.int32(since=5, default=-1)
    metadata: str | None = s.string(nullable_since=0)
    error_code: int = s.int16()


@s.struct
class OffsetFetchResponseTopic:
    name: str = s.string()
    partitions: list[OffsetFetchResponsePartition] = s.array(OffsetFetchResponsePartition)


@s.struct
class OffsetFetchResponsePartitions:
    partition_index: int = s.int32()
    committed_offset: int = s.int64()
    committed_leader_epoch: int = s.int32(default=-1)
    metadata: str | None = s.string(nullable_since=8)
    error_code: int = s.int16()


@s.struct
class OffsetFetchResponseTopics:
    name: str = s.string(until=9)
    topic_id: bytes = s.uuid(since=10)
    partitions: list[OffsetFetchResponsePartitions] = s.array(OffsetFetchResponsePartitions)


@s.struct
class OffsetFetchResponseGroup:
    group_id: str = s.string()
    topics: list[OffsetFetchResponseTopics] = s.array(OffsetFetchResponseTopics)
    error_code: int = s.int16()


@s.response_to(OffsetFetchRequest)
class OffsetFetchResponse:
    throttle_time_ms: int = s.int32(since=3)
    topics: list[OffsetFetchResponseTopic] = s.array(OffsetFetchResponseTopic, until=7)
    error_code: int = s.int16(since=2, until=7)
    groups: list[OffsetFetchResponseGroup] = s.array(OffsetFetchResponseGroup, since=8, large=True)


@s.struct
class OffsetDeleteRequestPartition:
    partition_index: int = s.int32()


@s.struct
class OffsetDeleteRequestTopic:
    name: str = s.string()
    partitions: list[OffsetDeleteRequestPartition] = s.array(OffsetDeleteRequestPartition)


@s.message(key=47, versions=(0, 0))
class OffsetDeleteRequest:
    group_id: str = s.string()
    topics: list[OffsetDeleteRequestTopic] = s.array(OffsetDeleteRequestTopic)


@s.struct
class OffsetDeleteResponsePartition:
    partition_index: int = s.int32()
    error_code: int = s.int16()


@s.struct
class OffsetDeleteResponseTopic:
    name: str = s.string()
    partitions: list[OffsetDeleteResponsePartition] = s.array(OffsetDeleteResponsePartition)


@s.response_to(OffsetDeleteRequest)
class OffsetDeleteResponse:
    error_code: int = s.int16()
    throttle_time_ms: int = s.int32()
    topics: list[OffsetDeleteResponseTopic] = s.array(OffsetDeleteResponseTopic)


@s.message(key=16, versions=(0, 5), flexible_since=3)
class ListGroupsRequest:
    states_filter: list[str] = s.string_array(since=4)
    types_filter: list[str] = s.string_array(since=5)


@s.struct
class ListedGroup:
    group_id: str = s.string()
    protocol_type: str = s.string()
    group_state: str = s.string(since=4)
    group_type: str = s.string(since=5)


@s.response_to(ListGroupsRequest)
class ListGroupsResponse:
    throttle_time_ms: int = s.int32(since=1)
    error_code: int = s.int16()
    groups: list[ListedGroup] = s.array(ListedGroup, large=True)


@s.message(key=15, versions=(0, 6), flexible_since=5)
class DescribeGroupsRequest:
    groups: list[str] = s.string_array()
    include_authorized_operations: bool = s.boolean(since=3)


@s.struct
class DescribedGroupMember:
    member_id: str = s.string()
    group_instance_id: str | None = s.string(since=4, nullable_since=4, default=None)
    client_id: str = s.string()
    client_host: str = s.string()
    member_metadata: bytes = s.binary()
    member_assignment: bytes = s.binary()


@s.struct
class DescribedGroup:
    error_code: int = s.int16()
    error_message: str | None = s.string(since=6, nullable_since=6, default=None)
    group_id: str = s.string()
    group_state: str = s.string()
    protocol_type: str = s.string()
    protocol_data: str = s.string()
    members: list[DescribedGroupMember] = s.array(DescribedGroupMember)
    authorized_operations: int = s.int32(since=3, default=NO_OPERATIONS)


@s.response_to(DescribeGroupsRequest)
class DescribeGroupsResponse:
    throttle_time_ms: int = s.int32(since=1)
    groups: list[DescribedGroup] = s.array(DescribedGroup, large=True)


@s.message(key=42, versions=(0, 3), flexible_since=2)
class DeleteGroupsRequest:
    groups_names: list[str] = s.string_array()


@s.struct
class DeletableGroupResult:
    group_id: str = s.string()
    error_code: int = s.int16()
    error_message: str | None = s.string(since=3, nullable_since=3, default=None)


@s.response_to(DeleteGroupsRequest)
class DeleteGroupsResponse:
    throttle_time_ms: int = s.int32()
    results: list[DeletableGroupResult] = s.array(DeletableGroupResult)


@s.struct
class ConsumerGroupHeartbeatTopicPartitions:
    topic_id: bytes = s.uuid()
    partitions: list[int] = s.int32_array()


@s.message(key=68, versions=(0, 1), flexible_since=0)
class ConsumerGroupHeartbeatRequest:
    """A null field says that nothing has changed since the last heartbeat. `member_epoch`: 0 joins, -1 leaves, -2 is a
    static member that comes back."""

    group_id: str = s.string()
    member_id: str = s.string()
    member_epoch: int = s.int32()
    instance_id: str | None = s.string(nullable_since=0, default=None)
    rack_id: str | None = s.string(nullable_since=0, default=None)
    rebalance_timeout_ms: int = s.int32(default=-1)
    subscribed_topic_names: list[str] | None = s.string_array(nullable_since=0, default=None)
    subscribed_topic_regex: str | None = s.string(since=1, nullable_since=1, default=None)
    server_assignor: str | None = s.string(nullable_since=0, default=None)
    topic_partitions: list[ConsumerGroupHeartbeatTopicPartitions] | None = s.array(
        ConsumerGroupHeartbeatTopicPartitions, nullable_since=0, default=None
    )


@s.struct
class ConsumerGroupHeartbeatAssignment:
    topic_partitions: list[ConsumerGroupHeartbeatTopicPartitions] = s.array(ConsumerGroupHeartbeatTopicPartitions)


@s.response_to(ConsumerGroupHeartbeatRequest)
class ConsumerGroupHeartbeatResponse:
    """A null assignment has not changed since the last response."""

    throttle_time_ms: int = s.int32()
    error_code: int = s.int16()
    error_message: str | None = s.string(nullable_since=0, default=None)
    member_id: str | None = s.string(nullable_since=0, default=None)
    member_epoch: int = s.int32()
    heartbeat_interval_ms: int = s.int32()
    assignment: ConsumerGroupHeartbeatAssignment | None = s.nested_or_null(ConsumerGroupHeartbeatAssignment)


@s.message(key=69, versions=(0, 1), flexible_since=0)
class ConsumerGroupDescribeRequest:
    group_ids: list[str] = s.string_array()
    include_authorized_operations: bool = s.boolean()


@s.struct
class ConsumerGroupDescribeTopicPartitions:
    topic_id: bytes = s.uuid()
    topic_name: str = s.string()
    partitions: list[int] = s.int32_array()


@s.struct
class ConsumerGroupDescribeAssignment:
    topic_partitions: list[ConsumerGroupDescribeTopicPartitions] = s.array(ConsumerGroupDescribeTopicPartitions)


@s.struct
class ConsumerGroupDescribeMember:
    """`member_type`: -1 unknown, 0 classic, 1 consumer."""

    member_id: str = s.string()
    instance_id: str | None = s.string(nullable_since=0, default=None)
    rack_id: str | None = s.string(nullable_since=0, default=None)
    member_epoch: int = s.int32()
    client_id: str = s.string()
    client_host: str = s.string()
    subscribed_topic_names: list[str] = s.string_array()
    subscribed_topic_regex: str | None = s.string(nullable_since=0, default=None)
    assignment: ConsumerGroupDescribeAssignment = s.nested(ConsumerGroupDescribeAssignment)
    target_assignment: ConsumerGroupDescribeAssignment = s.nested(ConsumerGroupDescribeAssignment)
    member_type: int = s.int8(since=1, default=-1)


@s.struct
class ConsumerGroupDescribedGroup:
    error_code: int = s.int16()
    error_message: str | None = s.string(nullable_since=0, default=None)
    group_id: str = s.string()
    group_state: str = s.string()
    group_epoch: int = s.int32()
    assignment_epoch: int = s.int32()
    assignor_name: str = s.string()
    members: list[ConsumerGroupDescribeMember] = s.array(ConsumerGroupDescribeMember)
    authorized_operations: int = s.int32(default=NO_OPERATIONS)


@s.response_to(ConsumerGroupDescribeRequest)
class ConsumerGroupDescribeResponse:
    throttle_time_ms: int = s.int32()
    groups: list[ConsumerGroupDescribedGroup] = s.array(ConsumerGroupDescribedGroup, large=True)
