"""Writes the markers of ended transactions to the partitions that this broker leads.

A marker is answered when it is replicated, or when what it would end or fence is so already. It is no write of a
client: it needs no `min.insync.replicas` in sync and is charged to no quota, and waits until the partition has enough
replicas. A marker that is not replicated in `WAIT_S` gets REQUEST_TIMED_OUT: the coordinator repeats it, which changes
nothing and waits on.

    the leader epoch is not this broker's                   FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH
    it leads no such partition                              NOT_LEADER_OR_FOLLOWER, UNKNOWN_TOPIC_ID
    the log moves to another directory, or fails            LEADER_NOT_AVAILABLE, STORAGE_ERROR
    the marker is late, or its coordinator is replaced      see `partition_transactions`

A partition of `__consumer_offsets` has no control batches: its group shard takes the marker (`GroupMarkers`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from tidelog.metadata.image import ClusterImage
from tidelog.metadata.topics import INTERNAL_TOPICS
from tidelog.model.errors import (
    ErrorCode,
    FencedLeaderEpochError,
    InvalidTopicError,
    NotLeaderOrFollowerError,
    TidelogError,
    UnknownLeaderEpochError,
    UnknownTopicIdError,
)
from tidelog.model.group_errors import CoordinatorNotAvailableError
from tidelog.model.ids import PartitionId, TopicId
from tidelog.replication.leader_replica import LeaderReplica
from tidelog.replication.replica import Replica
from tidelog.replication.transaction_messages import MarkedPartition, Marker, MarkersWritten, WriteMarkers
from tidelog.world.slicing import sliced

WAIT_S = 1.0
MARKERS_PER_SLICE = 100
"""Markers appended in one turn of the event loop: some 5 ms."""
OFFSETS_TOPIC = "__consumer_offsets"


class GroupMarkers(Protocol):
    async def write_marker(self, leader: LeaderReplica, marker: Marker) -> None:
        """End the producer's pending offsets in this partition of `__consumer_offsets`; return when that is replicated.
        A repeat changes nothing. Raise an error of the catalogue; the caller limits the wait."""
        ...


class LeaderMarkers:
    """Implements `MarkerReceiver`."""

    def __init__(
        self,
        find: Callable[[PartitionId], Replica | None],
        image: Callable[[], ClusterImage],
        groups: GroupMarkers | None = None,
    ) -> None:
        self._find = find
        self._image = image
        self.groups = groups

    async def write_markers(self, request: WriteMarkers) -> MarkersWritten:
        """Return when each marker is replicated, or has failed; no later than `WAIT_S` after all are appended."""
        pairs = [(marker, marked) for marker in request.markers for marked in marker.partitions]
        outcomes: list[_Outcome] = []
        try:
            async for marker, marked in sliced(pairs, MARKERS_PER_SLICE):
                outcomes.append(self._begin(marker, marked))
            waits = [outcome.wait for outcome in outcomes if outcome.wait is not None]
            if waits:
                await asyncio.wait(waits, timeout=WAIT_S)
            codes = iter([outcome.code() for outcome in outcomes])
        finally:
            for outcome in outcomes:
                outcome.forget()
        return MarkersWritten(errors=tuple(tuple(next(codes) for _ in marker.partitions) for marker in request.markers))

    def _begin(self, marker: Marker, marked: MarkedPartition) -> _Outcome:
        try:
            leader = self._leader(marked)
            topic = leader.replica.topic
            if topic == OFFSETS_TOPIC:
                if self.groups is None:
                    raise CoordinatorNotAvailableError("this broker has no group coordinator yet")
                return _Outcome(wait=asyncio.ensure_future(self.groups.write_marker(leader, marker)))
            if topic in INTERNAL_TOPICS:
                raise InvalidTopicError(f"{topic} is no part of a transaction")
            end = leader.append_marker(marker)
            if leader.high_watermark >= end:
                return _Outcome()
            return _Outcome(wait=leader.acks.wait(end), leader=leader)
        except TidelogError as error:
            return _Outcome(error=error.code)

    def _leader(self, marked: MarkedPartition) -> LeaderReplica:
        partition_id = PartitionId(TopicId(marked.topic_id), marked.partition)
        replica = self._find(partition_id)
        if replica is None or replica.is_dropped:
            if marked.topic_id not in self._image().topics:
                raise UnknownTopicIdError(f"topic {marked.topic_id} is not known here")
            raise NotLeaderOrFollowerError("this broker holds no replica of it", leader=-1)
        role, known = replica.role, replica.partition.leader_epoch
        if marked.leader_epoch < known:
            raise FencedLeaderEpochError(f"leader epoch {marked.leader_epoch} is over, it is {known}")
        if marked.leader_epoch > known:
            raise UnknownLeaderEpochError(f"leader epoch {marked.leader_epoch} is not known here, it is {known}")
        if not isinstance(role, LeaderReplica) or role.state.is_superseded:
            raise NotLeaderOrFollowerError("this broker does not lead it", leader=replica.partition.leader)
        return role


class _Outcome:
    """One marker for one partition: failed, done, or waiting."""

    __slots__ = ("error", "leader", "wait")

    def __init__(
        self,
        *,
        error: ErrorCode | None = None,
        wait: asyncio.Future[None] | None = None,
        leader: LeaderReplica | None = None,
    ) -> None:
        self.error = error
        self.wait = wait
        self.leader = leader
        """Whose high watermark it waits for."""

    def code(self) -> ErrorCode | None:
        if self.wait is None:
            return self.error
        if not self.wait.done():
            return ErrorCode.REQUEST_TIMED_OUT
        if self.wait.cancelled():
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        error = self.wait.exception()
        if error is not None and not isinstance(error, TidelogError):
            raise error
        return None if error is None else error.code

    def forget(self) -> None:
        if self.wait is None:
            return
        if self.leader is None:
            # The caller may have been cancelled: nobody else looks at how it ends.
            self.wait.add_done_callback(_retrieve)
            self.wait.cancel()
        elif not self.wait.done():
            self.leader.acks.forget(self.wait)


def _retrieve(wait: asyncio.Future[None]) -> None:
    error = None if wait.cancelled() else wait.exception()
    if error is not None and not isinstance(error, TidelogError):
        raise error
