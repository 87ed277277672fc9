"""Offsets and producers of the partitions that this broker leads.

Errors of a whole request are raised. Each partition has a result in the order of the request: a value, or the error of
that partition. A partition that the request names twice is rejected each time.

Limits: partitions of a request that are worked on at the same time (`PARTITIONS_AT_ONCE`), the wait for replication
(`NEWEST_WAIT_MS`), the timeout of a request (`admin_timeout_max_ms`), producers of a response (`PRODUCERS_MAX`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tidelog.log.log import TimestampedOffset
from tidelog.metadata import configs
from tidelog.metadata.broker_lifecycle import REGISTER_AGAIN
from tidelog.metadata.topics import INTERNAL_TOPICS, AdvanceLogStart, LogStartAdvance
from tidelog.model.errors import (
    InvalidRequestError,
    InvalidTopicError,
    NotLeaderOrFollowerError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    OverloadedError,
    PolicyViolationError,
    RemoteError,
    TidelogError,
    UnsupportedVersionError,
    WorkFailedError,
)
from tidelog.model.ids import Offset, PartitionId
from tidelog.replication.leader_replica import LeaderReplica
from tidelog.replication.replicas import Replicas
from tidelog.replication.waiters import Waker
from tidelog.services.authorization import CLUSTER, Operation, ResourceType
from tidelog.services.context import RequestContext
from tidelog.services.deadline import Deadline, before_deadline
from tidelog.services.fetch import READ_COMMITTED, READ_UNCOMMITTED, check_isolation
from tidelog.services.guard import Guard
from tidelog.services.limits import RequestLimits
from tidelog.services.partition_lookup import (
    PARTITIONS_PER_SLICE,
    REPEATED,
    PartitionLookup,
    PartitionRef,
    check_named,
    find_leader,
    repeated,
)
from tidelog.services.quotas import Charge
from tidelog.world.slicing import sliced

LATEST, EARLIEST, MAX_TIMESTAMP, EARLIEST_LOCAL = -1, -2, -3, -4
LATEST_TIERED, EARLIEST_PENDING_UPLOAD = -5, -6
"""Special timestamps of ListOffsets. No log is tiered, so the last two have no offset."""
PARTITIONS_AT_ONCE = 16
NEWEST_WAIT_MS = 1_000
"""Wait until the record with the largest timestamp is replicated."""
HELD_WAIT_S = 0.01
PRODUCERS_MAX = 100_000
"""Producers in one response."""
PRODUCERS_PER_SLICE = 500


class _Named(Protocol):
    @property
    def partition(self) -> PartitionRef: ...


Item = TypeVar("Item", bound=_Named)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OffsetQuery:
    """Asks for the first offset at or after `timestamp`, or for one of the timestamps with a meaning."""

    partition: PartitionRef
    timestamp: int
    leader_epoch: int = -1


@dataclass(frozen=True, slots=True)
class ListedOffset:
    """-1: there is none."""

    offset: int = -1
    timestamp: int = -1
    leader_epoch: int = -1


@dataclass(frozen=True, slots=True)
class EpochQuery:
    """Asks where `epoch` ends."""

    partition: PartitionRef
    epoch: int
    leader_epoch: int = -1


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """The largest known epoch at or below the one asked for, and its end offset; -1: none is known."""

    epoch: int = -1
    end_offset: int = -1


@dataclass(frozen=True, slots=True)
class RecordDeletion:
    """Deletes the records below `before_offset`; -1: all below the high watermark."""

    partition: PartitionRef
    before_offset: int


@dataclass(frozen=True, slots=True)
class OffsetRange:
    partition: PartitionRef
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class PartitionQuery:
    partition: PartitionRef


@dataclass(frozen=True, slots=True)
class ProducerState:
    """What a log remembers of a producer. -1 for what it does not know."""

    producer_id: int
    epoch: int
    last_sequence: int
    last_timestamp: int
    coordinator_epoch: int
    transaction_start_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InitProducerId:
    """Of a producer without a transactional id."""

    producer_id: int = -1
    producer_epoch: int = -1


class OffsetService:
    def __init__(self, replicas: Replicas, lookup: PartitionLookup, limits: RequestLimits, guard: Guard) -> None:
        self._replicas = replicas
        self._lookup = lookup
        self._limits = limits
        self._guard = guard

    async def _each(
        self,
        context: RequestContext,
        operation: Operation,
        items: Sequence[Item],
        work: Callable[[PartitionId, Item], Coroutine[Any, Any, T]],
    ) -> list[T | TidelogError]:
        """Work on each item; a deadline that passes is the error of the items that are not done."""
        check_named(items)
        if operation is Operation.DELETE:
            self._guard.charge(context, Charge.MUTATIONS, len(items))
        else:
            self._guard.charge(context)

        async def run(item: Item) -> T | TidelogError:
            partition = self._lookup.find_or_error(context, operation, item.partition)
            if isinstance(partition, TidelogError):
                return partition
            try:
                return await before_deadline(context, work(partition, item))
            except TidelogError as error:
                return error

        if len(items) == 1:
            return [await run(items[0])]
        twice = repeated(item.partition for item in items)
        results: list[T | TidelogError] = [InvalidRequestError(REPEATED)] * len(items)
        remaining = iter(enumerate(items))

        async def run_some() -> None:
            async for at, item in sliced(remaining, PARTITIONS_PER_SLICE // PARTITIONS_AT_ONCE):
                if item.partition not in twice:
                    results[at] = await run(item)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(PARTITIONS_AT_ONCE, len(items))):
                group.create_task(run_some())
        return results

    def _leader(self, partition: PartitionId, leader_epoch: int = -1) -> LeaderReplica:
        return find_leader(self._replicas, partition, leader_epoch)

    # Offsets.

    async def list_offsets(
        self, context: RequestContext, queries: Sequence[OffsetQuery], *, isolation: int = READ_UNCOMMITTED
    ) -> list[ListedOffset | TidelogError]:
        """The latest offset is the high watermark, with `READ_COMMITTED` the last stable offset."""
        check_isolation(isolation)

        async def list_offset(partition: PartitionId, query: OffsetQuery) -> ListedOffset:
            return await self._list_offset(partition, query, isolation)

        return await self._each(context, Operation.DESCRIBE, queries, list_offset)

    async def _list_offset(self, partition: PartitionId, query: OffsetQuery, isolation: int) -> ListedOffset:
        leader, timestamp = self._leader(partition, query.leader_epoch), query.timestamp
        log = leader.log
        if timestamp in (LATEST_TIERED, EARLIEST_PENDING_UPLOAD):
            return ListedOffset()
        if timestamp in (EARLIEST, EARLIEST_LOCAL):
            return ListedOffset(log.start_offset, -1, log.epochs.epoch_for(log.start_offset))
        end = self._confirmed(leader)
        if isolation == READ_COMMITTED:
            end = log.last_stable_offset(end)
        if timestamp == LATEST:
            return ListedOffset(end, -1, leader.leader_epoch)
        work = self._replicas.admission_work
        if timestamp == MAX_TIMESTAMP:
            record = await self._search(leader, log.offset_of_largest_timestamp(work=work))
            if record is not None and record.offset >= end:
                await self._wait_replicated(leader, record.offset + 1)
                if isolation == READ_COMMITTED and record.offset >= log.last_stable_offset(leader.high_watermark):
                    raise OffsetNotAvailableError("the newest record is part of an open transaction")
        elif timestamp >= 0:
            record = await self._search(leader, log.offset_for_timestamp(timestamp, end=end, work=work))
        else:
            raise UnsupportedVersionError(
                f"timestamp {timestamp}: use -1 latest, -2 earliest, -3 largest, or a time in ms"
            )
        if record is None:
            return ListedOffset()
        return ListedOffset(record.offset, record.timestamp, log.epochs.epoch_for(record.offset))

    @staticmethod
    async def _search(leader: LeaderReplica, search: Awaitable[TimestampedOffset | None]) -> TimestampedOffset | None:
        try:
            record = await search
        except WorkFailedError as error:
            raise OverloadedError(f"the batch could not be decoded: {error}") from error
        _check_still_leads(leader)  # the log may have been truncated meanwhile
        return record

    @staticmethod
    async def _wait_replicated(leader: LeaderReplica, end: int) -> None:
        """Wait until the high watermark has reached `end`.

        While producers write, the record with the largest timestamp is usually not replicated yet.
        """
        if leader.high_watermark >= end:
            return
        reached = leader.acks.wait(end)
        try:
            await asyncio.wait([reached], timeout=NEWEST_WAIT_MS / 1000)
            if not reached.done():
                raise OffsetNotAvailableError(f"the newest record is not replicated in {NEWEST_WAIT_MS} ms")
            reached.result()
        finally:
            if not reached.done():
                leader.acks.forget(reached)

    def _confirmed(self, leader: LeaderReplica) -> Offset:
        """Returns the high watermark when it is at or past every acknowledgement of former leaders."""
        if not leader.state.is_confirmed:
            raise OffsetNotAvailableError(
                f"leader epoch {leader.leader_epoch} is confirmed up to {leader.high_watermark} of "
                f"{leader.state.epoch_start}"
            )
        return leader.high_watermark

    async def offset_for_leader_epoch(
        self, context: RequestContext, queries: Sequence[EpochQuery]
    ) -> list[EpochEnd | TidelogError]:
        async def epoch_end(partition: PartitionId, query: EpochQuery) -> EpochEnd:
            leader = self._leader(partition, query.leader_epoch)
            high_watermark = self._confirmed(leader)
            epoch, end = leader.log.end_offset_for_epoch(query.epoch)
            return EpochEnd(epoch, min(end, high_watermark))

        return await self._each(context, Operation.DESCRIBE, queries, epoch_end)

    async def range_bytes(self, context: RequestContext, ranges: Sequence[OffsetRange]) -> list[int | TidelogError]:
        """Returns the bytes of the batches of [start, end) below the high watermark."""

        async def size(partition: PartitionId, query: OffsetRange) -> int:
            if not 0 <= query.start <= query.end:
                raise InvalidRequestError(f"offsets {query.start} to {query.end} are no range")
            leader = self._leader(partition)
            return await leader.log.range_bytes(Offset(query.start), min(Offset(query.end), leader.high_watermark))

        return await self._each(context, Operation.DESCRIBE, ranges, size)

    # Deletion.

    async def delete_records(
        self, context: RequestContext, deletions: Sequence[RecordDeletion]
    ) -> list[int | TidelogError]:
        """Deletes the records of every replica; returns the new log start offsets."""
        deadline = self._deadline(context)

        async def delete(partition: PartitionId, deletion: RecordDeletion) -> int:
            return await deadline.wait(self._delete_records(partition, deletion.before_offset))

        return await self._each(context, Operation.DELETE, deletions, delete)

    def _deadline(self, context: RequestContext) -> Deadline:
        limits = self._limits
        return Deadline(context, default_ms=limits.admin_timeout_ms, max_ms=limits.admin_timeout_max_ms)

    async def _delete_records(self, partition: PartitionId, before_offset: int) -> int:
        leader = self._leader(partition)
        self._check_deletable(leader.replica.topic)
        if (before_offset < 0 and before_offset != LATEST) or before_offset > leader.high_watermark:
            end = self._confirmed(leader)  # clients may know a higher one of the former leader
            raise OffsetOutOfRangeError(
                f"records are deleted up to the high watermark {end}, not to {before_offset}",
                offset=before_offset,
                start=leader.log.start_offset,
                end=end,
            )
        if before_offset == LATEST:
            before_offset = self._confirmed(leader)
        advance = LogStartAdvance(
            topic_id=partition.topic_id,
            partition=partition.partition,
            leader_epoch=leader.leader_epoch,
            start_offset=before_offset,
        )
        request = AdvanceLogStart(
            broker=self._replicas.me, broker_epoch=self._replicas.broker_epoch, partitions=(advance,)
        )
        try:
            (outcome,) = (await self._replicas.agent.ask(request)).items
        except RemoteError as error:
            if error.code not in REGISTER_AGAIN:
                raise
            raise NotLeaderOrFollowerError(f"this broker has to register again: {error}", leader=-1) from error
        if outcome.error is not None:
            raise RemoteError(outcome.message, code=outcome.error)
        while True:
            _check_still_leads(leader)
            if not leader.is_paused:
                await leader.log.advance_start(before_offset)
                if leader.log.start_offset >= before_offset:
                    return leader.log.start_offset
            await asyncio.sleep(HELD_WAIT_S)  # the log moves to another directory, or was closed for that just now

    def _check_deletable(self, topic: str) -> None:
        if topic in INTERNAL_TOPICS:
            raise InvalidTopicError(f"the records of {topic} are the cluster's own state: they are not deleted")
        if not configs.log_config(self._replicas.image, topic).cleanup_delete:
            raise PolicyViolationError(
                f"topic {topic} has cleanup.policy=compact: its records are deleted only with the policy delete"
            )

    # Producers.

    async def init_producer_id(self, context: RequestContext, request: InitProducerId) -> tuple[int, int]:
        """Returns a new producer id and its epoch, also to a client that has one: nothing depends on the id of a
        producer without a transactional id. Needs the right to write to any topic, or IdempotentWrite, as in Kafka."""
        if not self._guard.authorizer.authorize_any(context, Operation.WRITE, ResourceType.TOPIC):
            self._guard.authorize(context, Operation.IDEMPOTENT_WRITE, CLUSTER)
        self._guard.charge(context)
        if (request.producer_id < 0) != (request.producer_epoch < 0):
            raise InvalidRequestError("a producer id and its epoch come together")
        return await self._deadline(context).wait(self._replicas.producer_ids.next(), "no controller allocated ids"), 0

    async def describe_producers(
        self, context: RequestContext, partitions: Sequence[PartitionQuery]
    ) -> list[list[ProducerState] | TidelogError]:
        """Returns the producers that the log of this broker's replica remembers, by id. A follower may lag behind."""
        count = 0

        async def describe(partition: PartitionId, _query: PartitionQuery) -> list[ProducerState]:
            nonlocal count
            states = await self._producers(partition)
            if count + len(states) > PRODUCERS_MAX:
                raise InvalidRequestError(f"more than {PRODUCERS_MAX} producers in one response: name fewer partitions")
            count += len(states)
            return states

        return await self._each(context, Operation.READ, partitions, describe)

    async def _producers(self, partition: PartitionId) -> list[ProducerState]:
        replica = self._replicas.get(partition)
        log = None if replica is None or replica.is_dropped else replica.log
        producers = self._leader(partition).log.producers if log is None else log.producers
        states = []
        async for producer_id in sliced(producers.ids(), PRODUCERS_PER_SLICE):
            row = producers.row(producer_id)
            if row is not None:  # it may expire meanwhile
                states.append(
                    ProducerState(
                        producer_id=row.producer_id,
                        epoch=row.epoch,
                        last_sequence=row.last_sequence,
                        last_timestamp=row.batches[-1][3] if row.batches else -1,
                        coordinator_epoch=row.coordinator_epoch,
                        transaction_start_offset=-1 if row.open_offset is None else row.open_offset,
                    )
                )
        return states

    # Watches.

    async def watch(
        self, context: RequestContext, refs: Iterable[PartitionRef]
    ) -> tuple[list[PartitionId | TidelogError], OffsetWatch]:
        """Returns each partition or its error, and a watch of those without an error. Close the watch."""
        self._guard.charge(context)
        found = [
            self._lookup.find_or_error(context, Operation.DESCRIBE, ref)
            async for ref in sliced(refs, PARTITIONS_PER_SLICE)
        ]
        check_named(found)
        partitions = [entry for entry in found if isinstance(entry, PartitionId)]
        return found, OffsetWatch(self._replicas, context, partitions)


def _check_still_leads(leader: LeaderReplica) -> None:
    if leader.replica.role is not leader:
        raise NotLeaderOrFollowerError("the leader changed", leader=leader.replica.partition.leader)


@dataclass(frozen=True, slots=True)
class WatchedOffset:
    """-1 for a partition that this broker does not lead."""

    partition: PartitionId
    high_watermark: int
    last_stable: int


class OffsetWatch:
    """Iterates over lists of changes: first of all partitions, then of those whose offsets changed since."""

    def __init__(self, replicas: Replicas, context: RequestContext, partitions: list[PartitionId]) -> None:
        self._replicas = replicas
        self._context = context
        self._partitions = partitions
        self._waker = Waker()
        self._sent: dict[PartitionId, tuple[int, int]] = {}
        self._is_closed = False
        replicas.wakers.add(self._waker, partitions)
        for partition in partitions:
            self._waker.wake(partition)

    def __aiter__(self) -> OffsetWatch:
        return self

    async def __anext__(self) -> list[WatchedOffset]:
        while not self._is_closed:
            await before_deadline(self._context, self._waker.wait())
            if changes := await self._changes():
                return changes
        raise StopAsyncIteration

    async def _changes(self) -> list[WatchedOffset]:
        changes = []
        async for partition in sliced(self._waker.take(), PARTITIONS_PER_SLICE):
            replica = self._replicas.get(partition)
            offsets = (-1, -1)
            if replica is not None and isinstance(replica.role, LeaderReplica):
                if not replica.role.state.is_confirmed:
                    continue  # the former leader may have sent a higher one; the confirmation wakes the watch again
                high_watermark = replica.role.high_watermark
                offsets = high_watermark, replica.role.log.last_stable_offset(high_watermark)
            if self._sent.get(partition) != offsets:
                self._sent[partition] = offsets
                changes.append(WatchedOffset(partition, *offsets))
        return changes

    def close(self) -> None:
        self._is_closed = True
        self._replicas.wakers.remove(self._waker, self._partitions)
