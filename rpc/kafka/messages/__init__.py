"""Kafka's messages by area, and the APIs in the order of their keys."""

from __future__ import annotations

from typing import Any

from tidelog.rpc.kafka.api import Api
from tidelog.rpc.kafka.messages import (
    admin,
    cluster,
    configs,
    data,
    groups,
    metadata,
    security,
    topics,
    transactions,
    versions,
)

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
SASL_HANDSHAKE = Api(security.SaslHandshakeRequest, security.SaslHandshakeResponse)
API_VERSIONS = Api(versions.ApiVersionsRequest, versions.ApiVersionsResponse)
CREATE_TOPICS = Api(topics.CreateTopicsRequest, topics.CreateTopicsResponse)
DELETE_TOPICS = Api(topics.DeleteTopicsRequest, topics.DeleteTopicsResponse)
DELETE_RECORDS = Api(data.DeleteRecordsRequest, data.DeleteRecordsResponse)
INIT_PRODUCER_ID = Api(transactions.InitProducerIdRequest, transactions.InitProducerIdResponse)
OFFSET_FOR_LEADER_EPOCH = Api(data.OffsetForLeaderEpochRequest, data.OffsetForLeaderEpochResponse)
ADD_PARTITIONS_TO_TXN = Api(transactions.AddPartitionsToTxnRequest, transactions.AddPartitionsToTxnResponse)
ADD_OFFSETS_TO_TXN = Api(transactions.AddOffsetsToTxnRequest, transactions.AddOffsetsToTxnResponse)
END_TXN = Api(transactions.EndTxnRequest, transactions.EndTxnResponse)
WRITE_TXN_MARKERS = Api(transactions.WriteTxnMarkersRequest, transactions.WriteTxnMarkersResponse)
TXN_OFFSET_COMMIT = Api(transactions.TxnOffsetCommitRequest, transactions.TxnOffsetCommitResponse)
DESCRIBE_ACLS = Api(security.DescribeAclsRequest, security.DescribeAclsResponse)
CREATE_ACLS = Api(security.CreateAclsRequest, security.CreateAclsResponse)
DELETE_ACLS = Api(security.DeleteAclsRequest, security.DeleteAclsResponse)
DESCRIBE_CONFIGS = Api(configs.DescribeConfigsRequest, configs.DescribeConfigsResponse)
ALTER_CONFIGS = Api(configs.AlterConfigsRequest, configs.AlterConfigsResponse)
ALTER_REPLICA_LOG_DIRS = Api(admin.AlterReplicaLogDirsRequest, admin.AlterReplicaLogDirsResponse)
DESCRIBE_LOG_DIRS = Api(cluster.DescribeLogDirsRequest, cluster.DescribeLogDirsResponse)
SASL_AUTHENTICATE = Api(security.SaslAuthenticateRequest, security.SaslAuthenticateResponse)
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
DESCRIBE_CLIENT_QUOTAS = Api(admin.DescribeClientQuotasRequest, admin.DescribeClientQuotasResponse)
DESCRIBE_QUORUM = Api(cluster.DescribeQuorumRequest, cluster.DescribeQuorumResponse)
UPDATE_FEATURES = Api(admin.UpdateFeaturesRequest, admin.UpdateFeaturesResponse)
DESCRIBE_CLUSTER = Api(metadata.DescribeClusterRequest, metadata.DescribeClusterResponse)
DESCRIBE_PRODUCERS = Api(data.DescribeProducersRequest, data.DescribeProducersResponse)
UNREGISTER_BROKER = Api(admin.UnregisterBrokerRequest, admin.UnregisterBrokerResponse)
DESCRIBE_TRANSACTIONS = Api(transactions.DescribeTransactionsRequest, transactions.DescribeTransactionsResponse)
LIST_TRANSACTIONS = Api(transactions.ListTransactionsRequest, transactions.ListTransactionsResponse)
CONSUMER_GROUP_HEARTBEAT = Api(groups.ConsumerGroupHeartbeatRequest, groups.ConsumerGroupHeartbeatResponse)
CONSUMER_GROUP_DESCRIBE = Api(groups.ConsumerGroupDescribeRequest, groups.ConsumerGroupDescribeResponse)
LIST_CONFIG_RESOURCES = Api(admin.ListConfigResourcesRequest, admin.ListConfigResourcesResponse)
DESCRIBE_TOPIC_PARTITIONS = Api(metadata.DescribeTopicPartitionsRequest, metadata.DescribeTopicPartitionsResponse)

APIS: dict[int, Api[Any, Any]] = {
    api.key: api for api in sorted((one for one in vars().values() if isinstance(one, Api)), key=lambda api: api.key)
}
