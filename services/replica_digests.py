"""Digests a range of one replica, for an operator who compares replicas. Forwards to the named broker.

A digest of a record confirms a guess of its value: so the client needs READ on the topic as well as DESCRIBE on the
cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from tidelog.log.range_digests import DigestQuery, ReplicaDigest
from tidelog.model.errors import BrokerNotRegisteredError, InvalidRequestError, ReplicaNotAvailableError
from tidelog.model.ids import NodeId
from tidelog.replication.replica_digests import ReplicaDigests
from tidelog.services.authorization import Operation
from tidelog.services.context import RequestContext
from tidelog.services.forwarding import ServiceCall
from tidelog.services.node import NodeAccess
from tidelog.services.topic_lookup import lookup_partition, lookup_topic

__all__ = ["DigestQuery", "DigestReplica", "ReplicaDigest", "ReplicaDigestService"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestReplica:
    topic_id: UUID
    partition: int
    query: DigestQuery


DIGEST = ServiceCall("replicas/digest", Operation.DESCRIBE, DigestReplica, ReplicaDigest)


class ReplicaDigestService:
    def __init__(self, node: NodeAccess, digests: ReplicaDigests | None) -> None:
        """`digests`: of this node, if it is a broker."""
        self._node = node
        self._digests = digests
        if digests is not None:
            node.forwarder.serve(DIGEST, self._digest)

    async def digest(self, context: RequestContext, broker: int, request: DigestReplica) -> ReplicaDigest:
        """Return the digest of a broker's replica. Raises the error of that broker."""
        node = self._node
        node.guard.admit_query(context)
        topic = lookup_topic(node.cache.image, "", request.topic_id)
        node.guard.authorize_by_id(context, Operation.READ, topic)
        query = request.query
        if query.start < -1 or query.end < -1 or (0 <= query.end < query.start):
            raise InvalidRequestError(f"the range {query.start} to {query.end} is none: offsets from 0 on, or -1")
        if broker == node.cache.node and self._digests is not None:
            return await node.deadline(context).wait(self._digest(context, request))
        if broker == node.cache.node:
            raise InvalidRequestError(f"node {broker} has no replicas: it is not a broker")
        if broker not in node.cache.image.brokers:
            raise BrokerNotRegisteredError(f"broker {broker} is not registered")
        if not node.cache.image.brokers[broker].is_live:
            raise ReplicaNotAvailableError(f"broker {broker} is fenced: it does not run, or cannot reach a controller")
        timeout_ms = node.deadline(context).left_ms()
        return await node.forwarder.to_broker(context, NodeId(broker), DIGEST, request, timeout_ms=timeout_ms)

    async def _digest(self, context: RequestContext, request: DigestReplica) -> ReplicaDigest:
        assert self._digests is not None, "only a broker has replicas"
        partition_id = lookup_partition(self._node.cache.image, "", request.topic_id, request.partition)
        return await self._digests.digest(partition_id, request.query)
