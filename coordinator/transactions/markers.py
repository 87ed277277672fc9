"""What the coordinator asks the leaders of partitions when a transaction ends. Pure.

`epoch` of a marker is that of the record in PREPARE (a member's: `MEMBER_EPOCH` + 1). A strict marker (version 2,
members) is above the epoch of the batches that it ends: the leader rejects it, with INVALID_PRODUCER_EPOCH, if the open
transaction has that epoch already. Of another marker the leader compares `number` with the coordinator's last answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from tidelog.model.errors import ErrorCode


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
