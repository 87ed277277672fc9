"""What brokers ask each other in transactions, and who answers. Pure.

    AddPartitions   the leader of a partition, or the shard of a group --> the coordinator of the transactional id
    WriteMarkers    the coordinator --> the leaders of the transaction's partitions, when it ends

The leader side (this package) and group shards use `TransactionPeers`, which `coordinator.transactions.peers`
implements: it finds the coordinator, here or on another broker. The leader side implements `MarkerReceiver`.

`epoch` of a marker is that of the record in PREPARE (a member's: `MEMBER_EPOCH` + 1). A strict marker (version 2,
members) is above the epoch of the batches that it ends: the leader rejects it, with INVALID_PRODUCER_EPOCH, if the open
transaction has that epoch already. Of another marker the leader compares `number` with the coordinator's last answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from tidelog.model.errors import ErrorCode
from tidelog.model.ids import NO_TIMESTAMP, PartitionId


@dataclass(frozen=True, slots=True, kw_only=True)
class AddPartitions:
    """`producer_id` is the owner's, or a member's with epoch 0."""

    transactional_id: str
    producer_id: int
    epoch: int
    partitions: frozenset[PartitionId]
    now_ms: int = NO_TIMESTAMP
    """Set by the coordinator."""
    version: int = 2
    verify_only: bool = False
    """Add nothing: reject partitions that are not in the open transaction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddReply:
    number: int
    """Of the open transaction, for `LeaderReplica.transactions`."""


@dataclass(frozen=True, slots=True)
class MarkedPartition:
    topic_id: UUID
    partition: int
    leader_epoch: int
    """As the coordinator knows it: a request that arrives after a change of the leader is rejected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    transactional_id: str
    producer_id: int
    epoch: int
    coordinator_epoch: int
    is_commit: bool
    is_strict: bool
    number: int
    partitions: tuple[MarkedPartition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteMarkers:
    """All to partitions that one broker leads."""

    markers: tuple[Marker, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkersWritten:
    """Sent when each marker is replicated, or has failed."""

    errors: tuple[tuple[ErrorCode | None, ...], ...]
    """For each marker and partition, in order; None: written, now or before."""


class TransactionPeers(Protocol):
    async def add_partitions(self, request: AddPartitions) -> AddReply:
        """Returns when the partitions are in the coordinator's committed record. Finds the coordinator and retries
        for a limited time; raises an error of the catalogue."""
        ...


class MarkerReceiver(Protocol):
    async def write_markers(self, request: WriteMarkers) -> MarkersWritten:
        """Returns when each marker is replicated, or has failed. Raises nothing of its own."""
        ...
