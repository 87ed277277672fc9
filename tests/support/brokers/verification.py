"""Compares replicas as `Admin.verify_replicas` does, through the services of one broker instead of a client."""

from __future__ import annotations

from tidelog.client.admin.replica_comparison import Comparison, Layout
from tidelog.client.admin.verification import PartitionVerification
from tidelog.log.range_digests import DigestQuery, ReplicaDigest
from tidelog.metadata.records import NO_LEADER
from tidelog.model.errors import UnknownTopicIdError
from tidelog.model.ids import PartitionId
from tidelog.server.broker import Broker
from tidelog.services.context import Api, RequestContext
from tidelog.services.replica_digests import DigestReplica


class BrokerSource:
    """The replicas of a partition as one broker knows and reaches them."""

    def __init__(self, broker: Broker, partition_id: PartitionId) -> None:
        self._broker = broker
        self._id = partition_id

    async def layout(self) -> Layout:
        partition = self._broker.api.image.partition(self._id.topic_id, self._id.partition)
        if partition is None:
            raise UnknownTopicIdError(f"there is no partition {self._id}")
        leader = None if partition.leader == NO_LEADER else partition.leader
        return Layout(leader, partition.leader_epoch, tuple(partition.replicas))

    async def digest(self, broker: int, query: DigestQuery) -> ReplicaDigest:
        request = DigestReplica(topic_id=self._id.topic_id, partition=self._id.partition, query=query)
        return await self._broker.api.replica_digests.digest(RequestContext(Api.GRPC), broker, request)


async def verify(broker: Broker, partition_id: PartitionId, name: str = "orders") -> PartitionVerification:
    return await Comparison(name, partition_id.partition, BrokerSource(broker, partition_id)).run()
