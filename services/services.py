"""The services of one node.

Which image of the metadata a request uses: `Services.image`, what this node's tail has read, read once. Only the data
services use `Replicas.image`, which is the same or a little older: the replicas follow it, so a partition that it names
has its replica, and a client of a newer one gets an error that it retries. Groups are routed by `Services.image` to
shards that begin with `Replicas.image`, with the same effect.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidelog.metadata.image import ClusterImage
from tidelog.services.acls import AclService
from tidelog.services.cluster import ClusterService
from tidelog.services.configs import ConfigService
from tidelog.services.data import DataServices
from tidelog.services.groups import GroupService
from tidelog.services.guard import Guard
from tidelog.services.limits import RequestLimits
from tidelog.services.log_dirs import LogDirService
from tidelog.services.metadata_cache import MetadataCache
from tidelog.services.metadata_records import MetadataRecordService
from tidelog.services.quorum import QuorumService
from tidelog.services.replica_digests import ReplicaDigestService
from tidelog.services.replicas import ReplicaService
from tidelog.services.topics import TopicService
from tidelog.services.transactions import TransactionService


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """API servers call these. A controller without the role `broker` has no others."""

    cache: MetadataCache
    guard: Guard
    """For what a client may do, where a response says so."""
    limits: RequestLimits
    topics: TopicService
    configs: ConfigService
    cluster: ClusterService
    quorum: QuorumService
    replicas: ReplicaService
    log_dirs: LogDirService
    replica_digests: ReplicaDigestService
    metadata_records: MetadataRecordService
    acls: AclService

    @property
    def image(self) -> ClusterImage:
        """This node's copy of the metadata, at this moment."""
        return self.cache.image

    async def close(self) -> None:
        await self.log_dirs.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerServices(Services):
    data: DataServices
    groups: GroupService
    transactions: TransactionService
