"""Kafka's messages, by theme, and the keys that they make up, in the order of their numbers."""

from __future__ import annotations

from typing import Any

from tidelog.rpc.kafka.api import Api
from tidelog.rpc.kafka.messages import cluster, configs, data, groups, metadata, topics, versions

PRODUCE = Api(data.ProduceRequest, data.ProduceResponse)
FETCH = Api(data.FetchRequest, data.FetchResponse)
LIST_OFFSETS = Api(data.ListOffsetsRequest, data.ListOffsetsResponse)
METADATA = Api(metadata.MetadataRequest, metadata.MetadataResponse)
OFFSET_COMMIT = Api(groups.OffsetCommitRequest, groups.OffsetCommitResponse)
OFFSET_FETCH = Api(groups.OffsetFetchRequest, groups.OffsetFetchResponse)
FIND_COORDINATOR = Api(metadata.FindCoordinatorRequest, metadata.FindCoordinatorResponse)
JOIN_GROUP = Api(groups.JoinGroupRequest, groups.JoinGroupResponse)
HEARTBEAT = Api(groups.HeartbeatRequest, groups.HeartbeatResponse)
LEAVE_GROUP = Api(groups.LeaveGroupRequest, groups.LeaveGroupResponse)
SYNC_GROUP = Api(groups.SyncGroupRequest, groups.SyncGroupResponse)
DESCRIBE_GROUPS = Api(groups.DescribeGroupsRequest, groups.DescribeGroupsResponse)
LIST_GROUPS = Api(groups.ListGroupsRequest, groups.ListGroupsResponse)
API_VERSIONS = Api(versions.ApiVersionsRequest, versions.ApiVersionsResponse)
CREATE_TOPICS = Api(topics.CreateTopicsRequest, topics.CreateTopicsResponse)
DELETE_TOPICS = Api(topics.DeleteTopicsRequest, topics.DeleteTopicsResponse)
DELETE_RECORDS = Api(data.DeleteRecordsRequest, data.DeleteRecordsResponse)
INIT_PRODUCER_ID = Api(data.InitProducerIdRequest, data.InitProducerIdResponse)
OFFSET_FOR_LEADER_EPOCH = Api(data.OffsetForLeaderEpochRequest, data.OffsetForLeaderEpochResponse)
DESCRIBE_CONFIGS = Api(configs.DescribeConfigsRequest, configs.DescribeConfigsResponse)
ALTER_CONFIGS = Api(configs.AlterConfigsRequest, configs.AlterConfigsResponse)
DESCRIBE_LOG_DIRS = Api(cluster.DescribeLogDirsRequest, cluster.DescribeLogDirsResponse)
CREATE_PARTITIONS = Api(topics.CreatePartitionsRequest, topics.CreatePartitionsResponse)
DELETE_GROUPS = Api(groups.DeleteGroupsRequest, groups.DeleteGroupsResponse)
ELECT_LEADERS = Api(cluster.ElectLeadersRequest, cluster.ElectLeadersResponse)
INCREMENTAL_ALTER_CONFIGS = Api(configs.IncrementalAlterConfigsRequest, configs.IncrementalAlterConfigsResponse)
ALTER_PARTITION_REASSIGNMENTS = Api(
    cluster.AlterPartitionReassignmentsRequest, cluster.AlterPartitionReassignmentsResponse
)
LIST_PARTITION_REASSIGNMENTS = Api(
    cluster.ListPartitionReassignmentsRequest, cluster.ListPartitionReassignmentsResponse
)
OFFSET_DELETE = Api(groups.OffsetDeleteRequest, groups.OffsetDeleteResponse)
DESCRIBE_QUORUM = Api(cluster.DescribeQuorumRequest, cluster.DescribeQuorumResponse)
DESCRIBE_CLUSTER = Api(metadata.DescribeClusterRequest, metadata.DescribeClusterResponse)
DESCRIBE_PRODUCERS = Api(data.DescribeProducersRequest, data.DescribeProducersResponse)
CONSUMER_GROUP_HEARTBEAT = Api(groups.ConsumerGroupHeartbeatRequest, groups.ConsumerGroupHeartbeatResponse)
CONSUMER_GROUP_DESCRIBE = Api(groups.ConsumerGroupDescribeRequest, groups.ConsumerGroupDescribeResponse)
DESCRIBE_TOPIC_PARTITIONS = Api(metadata.DescribeTopicPartitionsRequest, metadata.DescribeTopicPartitionsResponse)

APIS: dict[int, Api[Any, Any]] = {
    api.key: api
    for api in (
        PRODUCE,
        FETCH,
        LIST_OFFSETS,
        METADATA,
        OFFSET_COMMIT,
        OFFSET_FETCH,
        FIND_COORDINATOR,
        JOIN_GROUP,
        HEARTBEAT,
        LEAVE_GROUP,
        SYNC_GROUP,
        DESCRIBE_GROUPS,
        LIST_GROUPS,
        API_VERSIONS,
        CREATE_TOPICS,
        DELETE_TOPICS,
        DELETE_RECORDS,
        INIT_PRODUCER_ID,
        OFFSET_FOR_LEADER_EPOCH,
        DESCRIBE_CONFIGS,
        ALTER_CONFIGS,
        DESCRIBE_LOG_DIRS,
        CREATE_PARTITIONS,
        DELETE_GROUPS,
        ELECT_LEADERS,
        INCREMENTAL_ALTER_CONFIGS,
        ALTER_PARTITION_REASSIGNMENTS,
        LIST_PARTITION_REASSIGNMENTS,
        OFFSET_DELETE,
        DESCRIBE_QUORUM,
        DESCRIBE_CLUSTER,
        DESCRIBE_PRODUCERS,
        CONSUMER_GROUP_HEARTBEAT,
        CONSUMER_GROUP_DESCRIBE,
        DESCRIBE_TOPIC_PARTITIONS,
    )
}
