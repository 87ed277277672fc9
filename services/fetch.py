"""Reads record batches of many partitions for a client.

No reader gets a record at or past the high watermark, from a leader or from a follower; with `READ_COMMITTED` none at
or past the last stable offset. The result for an offset:

    below the log start                               OFFSET_OUT_OF_RANGE
    up to the log end                                 batches below the limit, perhaps none
    past the log end, leader epoch not confirmed      OFFSET_NOT_AVAILABLE: the old leader may have known more
    past the log end                                  OFFSET_OUT_OF_RANGE
    past a follower's high watermark                  OFFSET_NOT_AVAILABLE: ask the leader
    read in an epoch that ends before it              diverging (epoch, end): truncate there

A follower serves readers of its own rack. A leader names to a reader of another rack the in-sync replica of that rack.

Limits: bytes of a response (the request's, and `fetch_bytes_max`), the wait (`fetch_wait_max_ms`), fetches that wait
(`waiting_fetches_max`; one more returns at once with what there is).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from tidelog.log.log import Log, Slice
from tidelog.metadata.partition_changes import can_serve
from tidelog.model.errors import (
    CorruptBatchError,
    DamagedLogError,
    InvalidRequestError,
    NotLeaderOrFollowerError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    TidelogError,
    UnknownLeaderEpochError,
)
from tidelog.model.ids import Offset, PartitionId
from tidelog.replication.follower_replica import FollowerReplica
from tidelog.replication.leader_replica import LeaderReplica
from tidelog.replication.replica import Replica
from tidelog.replication.replicas import Replicas
from tidelog.replication.waiters import Waker
from tidelog.services.authorization import Operation
from tidelog.services.context import RequestContext
from tidelog.services.deadline import ends_at_deadline
from tidelog.services.guard import Guard
from tidelog.services.limits import RequestLimits
from tidelog.services.partition_lookup import (
    PARTITIONS_PER_SLICE,
    REPEATED,
    PartitionLookup,
    PartitionRef,
    check_named,
    find_readable,
    leader_hint,
)
from tidelog.services.quotas import Charge
from tidelog.world.slicing import sliced

READ_UNCOMMITTED, READ_COMMITTED = 0, 1
READS_PER_SLICE = 100
"""Partitions read in one turn of the event loop: some 5 ms."""


@dataclass(frozen=True, slots=True)
class FetchItem:
    partition: PartitionRef
    offset: int
    bytes_max: int = 0
    """0: the broker's default."""
    leader_epoch: int = -1
    last_epoch: int = -1
    """Leader epoch of the last record that was read; -1: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRequest:
    items: Sequence[FetchItem]
    min_bytes: int = 0
    max_bytes: int = 0
    """0: the broker's limit."""
    max_wait_ms: int = 0
    isolation: int = READ_UNCOMMITTED
    rack: str = ""


@dataclass(frozen=True, slots=True)
class FetchResult:
    error: TidelogError | None = None
    data: bytes | memoryview = b""
    high_watermark: int = -1
    """-1 until a new leader has confirmed its epoch: the old leader may have returned a higher one."""
    last_stable: int = -1
    start_offset: int = -1
    leader_epoch: int = -1
    leader: int = -1
    diverging: tuple[int, int] | None = None
    """(epoch, end): the reader's last epoch ends there in this log."""
    preferred_replica: int = -1
    aborted: tuple[tuple[int, int], ...] = ()
    """(producer id, first offset) of aborted transactions in the data."""

    @property
    def ends_wait(self) -> bool:
        return self.error is not None or self.diverging is not None or self.preferred_replica >= 0


class ReadMemory(Protocol):
    """Limits the bytes of all reads at the same time."""

    def take(self, asked: int) -> int:
        """Counts and returns how many bytes the caller may read: at least 1."""
        ...

    def give_back(self, size: int) -> None:
        """Negative for a batch that is larger than the bytes taken for it."""
        ...


def check_isolation(isolation: int) -> None:
    if isolation not in (READ_UNCOMMITTED, READ_COMMITTED):
        raise InvalidRequestError(f"isolation level {isolation}: use 0 (read uncommitted) or 1 (read committed)")


class FetchService:
    def __init__(self, replicas: Replicas, lookup: PartitionLookup, limits: RequestLimits, guard: Guard) -> None:
        self.limits = limits
        self.waiting_fetches = 0
        self._replicas = replicas
        self._lookup = lookup
        self._guard = guard

    @ends_at_deadline
    async def fetch(
        self, context: RequestContext, request: FetchRequest, memory: ReadMemory | None = None
    ) -> list[FetchResult]:
        """Returns whole batches, in the order of the items: at most `max_bytes`, but at least one batch if there is
        one. Waits up to `max_wait_ms` for `min_bytes`; an error ends the wait. A deadline before that is
        REQUEST_TIMED_OUT.

        `memory` limits and counts the data until this returns; a fetch that waits holds none.
        """
        check_named(request.items)
        check_isolation(request.isolation)
        max_wait_ms = min(request.max_wait_ms, self.limits.fetch_wait_max_ms)
        with (
            closing(Fetch(self._replicas, self._lookup, context, request, self.limits, memory)) as fetch,
            self._charged(context, fetch),
        ):
            await fetch.find_all()
            await fetch.read_all()
            has_slot = self.waiting_fetches < self.limits.waiting_fetches_max
            if has_slot and max_wait_ms > 0 and not fetch.is_enough(request.min_bytes):
                self.waiting_fetches += 1
                try:
                    await fetch.wait(request.min_bytes, max_wait_ms)
                finally:
                    self.waiting_fetches -= 1
            return await fetch.results()

    @contextmanager
    def _charged(self, context: RequestContext, fetch: Fetch) -> Iterator[None]:
        """Charge what was read; also for a fetch that fails or ends by its deadline."""
        try:
            yield
        finally:
            self._guard.charge(context, Charge.FETCH_BYTES, fetch.read_bytes)


class Fetch:
    """Reads for one request. Call `find_all`, `read_all`, perhaps `wait`, then `results`; `close` in every case.

    A waiting fetch knows the size of what it has read and drops the data: `results` reads it again. Invariant: `_taken`
    is what the memory counts for this fetch: the data in `_results` and the read in progress.
    """

    def __init__(
        self,
        replicas: Replicas,
        lookup: PartitionLookup,
        context: RequestContext,
        request: FetchRequest,
        limits: RequestLimits,
        memory: ReadMemory | None,
    ) -> None:
        self._replicas = replicas
        self._lookup = lookup
        self._context = context
        self._items = items = request.items
        self._bytes_max = bytes_max = limits.fetch_bytes(request.max_bytes)
        self._partition_bytes_default = limits.partition_fetch_bytes
        self._isolation = request.isolation
        self._rack = request.rack
        self._memory = memory
        self._taken = 0
        self._results: list[FetchResult] = [FetchResult()] * len(items)
        self._sizes: dict[int, int] = {}
        """Bytes of the last read of each item that had data, held or dropped."""
        self.read_bytes = 0
        """Their sum."""
        self._unused_bytes: dict[int, int] = {}
        """Bytes that items left unused because their next batch does not fit. They count towards the minimum: waiting
        would not help."""
        self._is_capped = False
        """Whether the last read stayed below the item's own limit."""
        self._ends_wait = False
        self._is_full = False
        """There is more data than the response holds."""
        self._room = bytes_max
        """Bytes of the whole response; less if the memory gave less."""
        self._has_yielded = False
        """Whether other tasks ran during a read while nothing was watched."""
        self._waker: Waker | None = None
        self._indexes: dict[PartitionId, int] = {}
        """Index of each partition's item."""
        self._partitions: list[PartitionId | None] = []

    async def find_all(self) -> None:
        if len(self._items) <= PARTITIONS_PER_SLICE:
            for item in self._items:
                self._find(item)
        else:
            async for item in sliced(self._items, PARTITIONS_PER_SLICE):
                self._find(item)

    def _find(self, item: FetchItem) -> None:
        at = len(self._partitions)
        partition = self._lookup.find_or_error(self._context, Operation.READ, item.partition)
        if isinstance(partition, TidelogError):
            self._results[at] = FetchResult(partition)
            self._ends_wait = True
            self._partitions.append(None)
            return
        if partition in self._indexes:
            raise InvalidRequestError(REPEATED)
        self._indexes[partition] = at
        self._partitions.append(partition)

    async def results(self) -> list[FetchResult]:
        dropped = sorted(at for at in self._sizes if not self._results[at].data)
        if dropped:
            for at in dropped:
                self.read_bytes -= self._sizes.pop(at)
            await self._read_some(dropped)
        return self._results

    def is_enough(self, min_bytes: int) -> bool:
        size = self.read_bytes + sum(self._unused_bytes.values())
        return self._ends_wait or self._is_full or size >= min(min_bytes, self._bytes_max)

    async def read_all(self) -> None:
        if len(self._items) > READS_PER_SLICE:
            self._watch()  # other tasks run in between
        await self._read_some(range(len(self._items)))

    async def wait(self, min_bytes: int, max_wait_ms: int) -> None:
        """Returns when there is enough data, or after `max_wait_ms`. Reads only partitions again that have changed."""
        waker = self._watch()
        try:
            async with asyncio.timeout(max_wait_ms / 1000):
                if self._has_yielded:
                    await self.read_all()  # a partition may have changed during a disk read
                while not self.is_enough(min_bytes):
                    for at in self._sizes:
                        self._drop(at)
                    await waker.wait()
                    await self._read_some([self._indexes[partition] for partition in waker.take()])
        except TimeoutError:
            return

    def close(self) -> None:
        self._give_back(self._taken)
        if self._waker is not None:
            self._replicas.wakers.remove(self._waker, self._indexes)
            self._waker = None

    def _watch(self) -> Waker:
        if self._waker is None:
            self._waker = Waker()
            self._replicas.wakers.add(self._waker, self._indexes)
        return self._waker

    # Memory.

    def _take(self, size: int) -> int:
        taken = size if self._memory is None else self._memory.take(size)
        self._taken += taken
        return taken

    def _give_back(self, size: int) -> None:
        if self._memory is not None:
            self._memory.give_back(size)
        self._taken -= size

    def _drop(self, at: int) -> None:
        result = self._results[at]
        if result.data:
            self._results[at] = replace(result, data=b"", aborted=())
            self._give_back(len(result.data))

    # Reading.

    async def _read_some(self, places: Sequence[int]) -> None:
        self._is_full = False
        self._room = self._bytes_max
        if len(places) <= READS_PER_SLICE:
            for at in places:
                await self._read(at)
        else:
            async for at in sliced(places, READS_PER_SLICE):
                await self._read(at)

    async def _read(self, at: int) -> None:
        partition = self._partitions[at]
        if partition is None:
            return
        self._drop(at)
        others = self.read_bytes - self._sizes.get(at, 0)
        self._is_capped = False
        try:
            result = await self._read_item(partition, self._items[at], self._room - others, is_first=others == 0)
        except TidelogError as error:
            result = self._failed(partition, error)
        self.read_bytes = others + len(result.data)
        if result.data:
            self._sizes[at] = len(result.data)
        else:
            self._sizes.pop(at, None)
        if self._is_capped:
            self._unused_bytes[at] = max(0, self._item_bytes_max(self._items[at]) - len(result.data))
        else:
            self._unused_bytes.pop(at, None)
        self._results[at] = result
        self._ends_wait = self._ends_wait or result.ends_wait

    def _item_bytes_max(self, item: FetchItem) -> int:
        return item.bytes_max if item.bytes_max > 0 else self._partition_bytes_default

    async def _read_item(self, partition: PartitionId, item: FetchItem, room: int, *, is_first: bool) -> FetchResult:
        replica, role = find_readable(self._replicas, partition, item.leader_epoch, self._rack)
        log = role.log
        self._check_offset(item, role)
        high_watermark = role.high_watermark
        stable = log.last_stable_offset(high_watermark)
        is_known = isinstance(role, FollowerReplica) or role.state.is_confirmed
        result = FetchResult(
            high_watermark=high_watermark if is_known else -1,
            last_stable=stable if is_known else -1,
            start_offset=log.start_offset,
            leader_epoch=replica.partition.leader_epoch,
            leader=replica.partition.leader,
        )
        diverging = _diverging(item, log)
        if diverging is not None:
            return replace(result, diverging=diverging)
        preferred = self._preferred(replica, role, item.offset)
        if preferred >= 0:
            return replace(result, preferred_replica=preferred)
        bound = stable if self._isolation == READ_COMMITTED else high_watermark
        if item.offset >= bound:
            return result
        if room <= 0 and not is_first:
            self._is_full = True
            return result
        read = await self._within_memory(replica, role, item, room, bound)
        if len(read.data) > room and not is_first:
            self._is_full = True
            self._give_back(len(read.data))
            return result
        aborted: tuple[tuple[int, int], ...] = ()
        if self._isolation == READ_COMMITTED and read.data:
            aborted = await self._aborted(replica, role, item, read)
        return replace(result, data=_held(read.data), aborted=aborted)

    async def _within_memory(
        self, replica: Replica, role: LeaderReplica | FollowerReplica, item: FetchItem, room: int, bound: Offset
    ) -> Slice:
        """The memory counts what is read."""
        item_bytes_max = self._item_bytes_max(item)
        requested = max(1, min(room, item_bytes_max))
        taken = self._take(requested)
        size = 0
        try:
            read = await self._batches(replica, role, item.offset, taken, bound)
            size = len(read.data)
        finally:
            self._give_back(taken - size)
        if taken < requested:
            self._room -= room - taken  # the rest is for the other items
        if read.data and read.next_offset < bound:
            if taken < requested or room <= item_bytes_max:
                self._is_full = True
            else:
                self._is_capped = True
        return read

    async def _batches(
        self, replica: Replica, role: LeaderReplica | FollowerReplica, offset: int, bytes_max: int, bound: Offset
    ) -> Slice:
        log = role.log
        try:
            read = log.read_nowait(offset, bytes_max=bytes_max, end=bound)
            if read is None:
                self._has_yielded = self._has_yielded or self._waker is None
                read = await log.read(offset, bytes_max=bytes_max, end=bound)
        except (CorruptBatchError, DamagedLogError):
            self._replicas.report_corruption(replica, offset)
            raise
        _check_role(replica, role, end=read.next_offset)
        return read

    async def _aborted(
        self, replica: Replica, role: LeaderReplica | FollowerReplica, item: FetchItem, read: Slice
    ) -> tuple[tuple[int, int], ...]:
        self._has_yielded = self._has_yielded or self._waker is None
        try:
            overlapping = await role.log.aborted_transactions(item.offset, read.next_offset)
            # A segment that was dropped meanwhile has taken its aborted transactions with it.
            self._check_offset(item, role)
            _check_role(replica, role, end=read.next_offset)
        except TidelogError:
            self._give_back(len(read.data))
            raise
        return tuple((transaction.producer_id, transaction.first_offset) for transaction in overlapping)

    def _check_offset(self, item: FetchItem, role: LeaderReplica | FollowerReplica) -> None:
        log = role.log
        if item.offset < log.start_offset or item.offset < 0:
            raise self._out_of_range(item, role)
        if isinstance(role, FollowerReplica) and item.offset > role.high_watermark:
            raise OffsetNotAvailableError(f"this follower has committed records up to {role.high_watermark}")
        if item.offset > log.end_offset and item.last_epoch < 0:
            if isinstance(role, LeaderReplica) and not role.state.is_confirmed:
                raise OffsetNotAvailableError("the leader has not confirmed its epoch yet")
            raise self._out_of_range(item, role)

    def _out_of_range(self, item: FetchItem, role: LeaderReplica | FollowerReplica) -> OffsetOutOfRangeError:
        start, end = role.log.start_offset, role.high_watermark
        return OffsetOutOfRangeError(
            f"offset {item.offset} is outside of {start} to {end}", offset=item.offset, start=start, end=end
        )

    def _preferred(self, replica: Replica, role: LeaderReplica | FollowerReplica, offset: int) -> int:
        """Returns the replica that this reader should fetch from; -1: this one."""
        if not self._rack or not isinstance(role, LeaderReplica):
            return -1
        image, me = self._replicas.image, self._replicas.me
        own = image.brokers.get(me)
        if own is not None and own.rack == self._rack:
            return -1
        for broker in replica.partition.replicas:
            registered = image.brokers.get(broker)
            progress = role.state.progress(broker)
            if (
                broker != me
                and registered is not None
                and registered.rack == self._rack
                and broker in role.state.isr
                and can_serve(image, replica.partition, broker)
                and progress is not None
                and progress.durable_end is not None
                and progress.durable_end >= offset
            ):
                return broker
        return -1

    def _failed(self, partition: PartitionId, error: TidelogError) -> FetchResult:
        leader, leader_epoch = leader_hint(self._replicas, partition)
        replica = self._replicas.get(partition)
        if replica is None:
            return FetchResult(error, leader=leader, leader_epoch=leader_epoch)
        log, role = replica.log, replica.role
        is_confirmed = isinstance(role, LeaderReplica) and role.state.is_confirmed
        return FetchResult(
            error,
            high_watermark=replica.high_watermark if is_confirmed else -1,
            start_offset=-1 if log is None else log.start_offset,
            leader_epoch=leader_epoch,
            leader=leader,
        )


def _check_role(replica: Replica, role: LeaderReplica | FollowerReplica, *, end: Offset) -> None:
    """Raise if the log may have been truncated since it was read up to `end`."""
    if replica.role is not role or role.log.end_offset < end:
        raise NotLeaderOrFollowerError("the replica's role changed", leader=replica.partition.leader)


def _held(data: bytes | memoryview) -> bytes | memoryview:
    """Copies a view that is less than 3/4 of the buffer it keeps alive: the memory counts the view only."""
    if isinstance(data, bytes) or len(data) * 4 >= memoryview(data.obj).nbytes * 3:
        return data
    return bytes(data)


def _diverging(item: FetchItem, log: Log) -> tuple[int, int] | None:
    if item.last_epoch < 0:
        return None
    epoch, end = log.end_offset_for_epoch(item.last_epoch)
    if epoch < 0:
        raise UnknownLeaderEpochError(f"epoch {item.last_epoch} is not known here")
    return (epoch, end) if epoch < item.last_epoch or end < item.offset else None
