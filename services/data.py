"""The services of a broker for its clients' data: produce, fetch and offsets over its replicas."""

from __future__ import annotations

from tidelog.replication.log_directories import LogDirectories
from tidelog.replication.replicas import Replicas
from tidelog.replication.transaction_messages import TransactionPeers
from tidelog.replication.transaction_verifier import TransactionVerifier
from tidelog.services.fetch import FetchService
from tidelog.services.guard import Guard
from tidelog.services.limits import RequestLimits
from tidelog.services.offsets import OffsetService
from tidelog.services.partition_lookup import PartitionLookup
from tidelog.services.produce import ProduceService


class DataServices:
    def __init__(
        self,
        replicas: Replicas,
        limits: RequestLimits | None = None,
        guard: Guard | None = None,
        peers: TransactionPeers | None = None,
    ) -> None:
        """`peers` reach the transaction coordinators."""
        limits, guard = limits or RequestLimits(), guard or Guard()
        lookup = PartitionLookup(lambda: replicas.image, guard.authorizer)
        verifier = None if peers is None else TransactionVerifier(peers, replicas.tasks)
        self.produce = ProduceService(replicas, lookup, limits, guard, verifier)
        self.fetch = FetchService(replicas, lookup, limits, guard)
        self.offsets = OffsetService(replicas, lookup, limits, guard)
        self.log_directories = LogDirectories(replicas)
