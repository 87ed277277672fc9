"""Reading from partitions for a client: one fetch over many of them, and a watch of their high watermarks.

Nothing at or past the high watermark is read, by anybody, from a leader or a follower; with `isolation` 1 nothing at
or past the last stable offset. What a reader is told of an offset:

    below the log's start                           OFFSET_OUT_OF_RANGE
    up to the log's end                             batches below the bound, perhaps none
    past the log's end, epoch not confirmed yet     OFFSET_NOT_AVAILABLE: the old leader may have known more
    past the log's end                              OFFSET_OUT_OF_RANGE
    past a follower's high watermark                OFFSET_NOT_AVAILABLE: ask the leader
    read in an epoch that ends before, here         diverging (epoch, end): what was read there is no part of the log

A follower serves readers of its own rack. A leader names to a reader with a rack the replica in sync of that rack.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from tidelog.log.log import Log, Slice
from tidelog.metadata.leadership import can_serve
from tidelog.model.errors import (
    CorruptBatchError,
    DamagedLogError,
    NotLeaderOrFollowerError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    TidelogError,
    UnknownLeaderEpochError,
)
from tidelog.model.ids import Offset, PartitionId
from tidelog.replication.following import Following
from tidelog.replication.leading import Leading
from tidelog.replication.serving import find_readable
from tidelog.replication.waiting import Waker

if TYPE_CHECKING:
    from tidelog.replication.replica import Replica
    from tidelog.replication.replicas import Replicas

READ_UNCOMMITTED, READ_COMMITTED = 0, 1
READS_PER_SLICE = 100
"""Partitions that are looked at in one turn of the event loop: some 5 ms."""


@dataclass(frozen=True, slots=True)
class FetchItem:
    """`last_epoch` is the leader epoch of the last record that was read, -1 if there is none."""

    partition: PartitionId
    offset: int
    bytes_max: int
    leader_epoch: int = -1
    last_epoch: int = -1


@dataclass(frozen=True, slots=True)
class FetchResult:
    error: TidelogError | None = None
    data: bytes | memoryview = b""
    high_watermark: int = -1
    """-1 while a new leader has not confirmed its epoch: its own may be older than what the last one has told."""
    last_stable: int = -1
    start_offset: int = -1
    leader_epoch: int = -1
    leader: int = -1
    diverging: tuple[int, int] | None = None
    """(epoch, end): in this log the reader's last epoch ends there."""
    preferred_replica: int = -1
    aborted: tuple[tuple[int, int], ...] = ()
    """(producer id, first offset) of aborted transactions among what was read."""

    @property
    def is_news(self) -> bool:
        return self.error is not None or self.diverging is not None or self.preferred_replica >= 0


class ReadMemory(Protocol):
    """What may be held of all that is read at once."""

    def take(self, asked: int) -> int:
        """So much of it may be read, and counts from now on; never nothing."""
        ...

    def give_back(self, size: int) -> None:
        """Negative for a batch that is larger than what was taken for it."""
        ...


class Fetch:
    """One request. `read_all`, then perhaps `wait`, then `results`; `close` on every way out.

    While it waits it knows how much there is to read of each partition, and holds none of it: `results` reads again
    what was dropped. Invariant: `_taken` is what the memory counts for it, the data in `_results` and the read that is
    under way.
    """

    def __init__(
        self,
        replicas: Replicas,
        items: Sequence[FetchItem],
        *,
        bytes_max: int,
        isolation: int,
        rack: str,
        memory: ReadMemory | None = None,
    ) -> None:
        self._replicas = replicas
        self._items = items
        self._bytes_max = bytes_max
        self._isolation = isolation
        self._rack = rack
        self._memory = memory
        self._taken = 0
        self._results: list[FetchResult] = [FetchResult()] * len(items)
        self._sizes: dict[int, int] = {}
        """Bytes of those that had any when they were read last, held or dropped."""
        self._read_bytes = 0
        """Their sum."""
        self._unfilled: dict[int, int] = {}
        """By how much partitions stay below their own limits whose next batch does not fit under it. It counts as if
        it were read: no wait would bring it."""
        self._is_capped = False
        """Whether that is so of the last read."""
        self._is_news = False
        self._is_full = False
        """There is more than fits into the answer."""
        self._room = bytes_max
        """Of the whole answer; less when the memory has given less."""
        self._has_waited = False
        """Whether reading has let others run while nothing was watched."""
        self._waker: Waker | None = None
        self._by_partition: dict[PartitionId, list[int]] = {}
        for at, item in enumerate(items):
            self._by_partition.setdefault(item.partition, []).append(at)

    async def results(self) -> list[FetchResult]:
        dropped = sorted(at for at in self._sizes if not self._results[at].data)
        if dropped:
            for at in dropped:
                self._read_bytes -= self._sizes.pop(at)
            await self._read_some(dropped)
        return self._results

    def is_enough(self, min_bytes: int) -> bool:
        there = self._read_bytes + sum(self._unfilled.values())
        return self._is_news or self._is_full or there >= min(min_bytes, self._bytes_max)

    async def read_all(self) -> None:
        if len(self._items) > READS_PER_SLICE:
            self._watch()  # others have their turn in between
        await self._read_some(range(len(self._items)))

    async def wait(self, min_bytes: int, max_wait_ms: int) -> None:
        """Until there is enough, or it has taken too long. Only partitions with news are read again."""
        waker = self._watch()
        try:
            async with asyncio.timeout(max_wait_ms / 1000):
                if self._has_waited:
                    await self.read_all()  # something may have come while the device was read
                while not self.is_enough(min_bytes):
                    for at in self._sizes:
                        self._drop(at)
                    await waker.wait()
                    await self._read_some([at for partition in waker.take() for at in self._by_partition[partition]])
        except TimeoutError:
            return

    def close(self) -> None:
        self._give_back(self._taken)
        if self._waker is not None:
            self._replicas.wakers.remove(self._waker, self._by_partition)
            self._waker = None

    def _watch(self) -> Waker:
        if self._waker is None:
            self._waker = Waker()
            self._replicas.wakers.add(self._waker, self._by_partition)
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
        for number, at in enumerate(places, start=1):
            await self._read(at)
            if number % READS_PER_SLICE == 0 and number < len(places):
                await asyncio.sleep(0)

    async def _read(self, at: int) -> None:
        self._drop(at)
        others = self._read_bytes - self._sizes.get(at, 0)
        self._is_capped = False
        try:
            result = await self._read_one(self._items[at], self._room - others, is_first=others == 0)
        except TidelogError as error:
            result = self._failed(self._items[at], error)
        self._read_bytes = others + len(result.data)
        if result.data:
            self._sizes[at] = len(result.data)
        else:
            self._sizes.pop(at, None)
        if self._is_capped:
            self._unfilled[at] = max(0, self._items[at].bytes_max - len(result.data))
        else:
            self._unfilled.pop(at, None)
        self._results[at] = result
        self._is_news = self._is_news or result.is_news

    async def _read_one(self, item: FetchItem, room: int, *, is_first: bool) -> FetchResult:
        replica, role = find_readable(self._replicas, item.partition, item.leader_epoch, self._rack)
        log = role.log
        self._check_offset(item, role)
        high_watermark = role.high_watermark
        stable = log.last_stable_offset(high_watermark)
        is_told = isinstance(role, Following) or role.state.is_confirmed
        result = FetchResult(
            high_watermark=high_watermark if is_told else -1,
            last_stable=stable if is_told else -1,
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
        found = await self._within_memory(replica, role, item, room, bound)
        if len(found.data) > room and not is_first:
            self._is_full = True
            self._give_back(len(found.data))
            return result
        aborted: tuple[tuple[int, int], ...] = ()
        if self._isolation == READ_COMMITTED and found.data:
            self._has_waited = self._has_waited or self._waker is None
            overlapping = await log.aborted_transactions(item.offset, found.next_offset)
            aborted = tuple((one.producer_id, one.first_offset) for one in overlapping)
        return replace(result, data=_held(found.data), aborted=aborted)

    async def _within_memory(
        self, replica: Replica, role: Leading | Following, item: FetchItem, room: int, bound: Offset
    ) -> Slice:
        """What is found is counted by the memory."""
        wanted = max(1, min(room, item.bytes_max))
        taken = self._take(wanted)
        size = 0
        try:
            found = await self._batches(replica, role, item.offset, taken, bound)
            size = len(found.data)
        finally:
            self._give_back(taken - size)
        if taken < wanted:
            self._room -= room - taken  # what is left of it is for the others
        if found.data and found.next_offset < bound:
            if taken < wanted or room <= item.bytes_max:
                self._is_full = True
            else:
                self._is_capped = True
        return found

    async def _batches(
        self, replica: Replica, role: Leading | Following, offset: int, bytes_max: int, bound: Offset
    ) -> Slice:
        log = role.log
        try:
            found = log.read_nowait(offset, bytes_max=bytes_max, end=bound)
            if found is None:
                self._has_waited = self._has_waited or self._waker is None
                found = await log.read(offset, bytes_max=bytes_max, end=bound)
        except (CorruptBatchError, DamagedLogError):
            self._replicas.found_rot(replica, offset)
            raise
        if replica.role is not role:
            # The log may have been cut under the read.
            raise NotLeaderOrFollowerError("the role has changed meanwhile", leader=replica.partition.leader)
        return found

    def _check_offset(self, item: FetchItem, role: Leading | Following) -> None:
        log = role.log
        if item.offset < log.start_offset or item.offset < 0:
            raise self._out_of_range(item, role)
        if isinstance(role, Following) and item.offset > role.high_watermark:
            raise OffsetNotAvailableError(f"this follower has committed records up to {role.high_watermark}")
        if item.offset > log.end_offset and item.last_epoch < 0:
            if isinstance(role, Leading) and not role.state.is_confirmed:
                raise OffsetNotAvailableError("the leader has not confirmed its epoch yet")
            raise self._out_of_range(item, role)

    def _out_of_range(self, item: FetchItem, role: Leading | Following) -> OffsetOutOfRangeError:
        start, end = role.log.start_offset, role.high_watermark
        return OffsetOutOfRangeError(
            f"offset {item.offset} is outside of {start} to {end}", offset=item.offset, start=start, end=end
        )

    def _preferred(self, replica: Replica, role: Leading | Following, offset: int) -> int:
        """The replica that this reader should go to, -1 to stay."""
        if not self._rack or not isinstance(role, Leading):
            return -1
        image, me = self._replicas.image, self._replicas.me
        own = image.brokers.get(me)
        if own is not None and own.rack == self._rack:
            return -1
        for broker in replica.partition.replicas:
            found = image.brokers.get(broker)
            progress = role.state.progress(broker)
            if (
                broker != me
                and found is not None
                and found.rack == self._rack
                and broker in role.state.isr
                and can_serve(image, replica.partition, broker)
                and progress is not None
                and progress.durable_end is not None
                and progress.durable_end >= offset
            ):
                return broker
        return -1

    def _failed(self, item: FetchItem, error: TidelogError) -> FetchResult:
        replica = self._replicas.get(item.partition)
        if replica is None:
            leader = error.leader if isinstance(error, NotLeaderOrFollowerError) else -1
            return FetchResult(error, leader=leader)
        log, role = replica.log, replica.role
        is_told = isinstance(role, Leading) and role.state.is_confirmed
        return FetchResult(
            error,
            high_watermark=replica.high_watermark if is_told else -1,
            start_offset=-1 if log is None else log.start_offset,
            leader_epoch=replica.partition.leader_epoch,
            leader=replica.partition.leader,
        )


def _held(data: bytes | memoryview) -> bytes | memoryview:
    """A view holds all that was read. One that has most of it is cheaper than a copy; of another the rest, which the
    memory does not count, is let go."""
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


class OffsetWatch:
    """High watermarks as they change; see `PartitionService.watch`."""

    def __init__(self, replicas: Replicas, partitions: list[PartitionId]) -> None:
        self._replicas = replicas
        self._partitions = partitions
        self._waker = Waker()
        self._known: dict[PartitionId, tuple[int, int]] = {}
        self._is_closed = False
        replicas.wakers.add(self._waker, partitions)
        for partition in partitions:
            self._waker.wake(partition)

    def __aiter__(self) -> OffsetWatch:
        return self

    async def __anext__(self) -> list[tuple[PartitionId, int, int]]:
        while not self._is_closed:
            await self._waker.wait()
            if changes := self._changes():
                return changes
        raise StopAsyncIteration

    def _changes(self) -> list[tuple[PartitionId, int, int]]:
        """Those that have changed; a partition that is not served here has -1 and -1."""
        changes = []
        for partition in self._waker.take():
            replica = self._replicas.get(partition)
            now = (-1, -1)
            if replica is not None and isinstance(replica.role, Leading):
                if not replica.role.state.is_confirmed:
                    continue  # what the last leader has told may be ahead; it is woken again when this is confirmed
                high_watermark = replica.role.high_watermark
                now = high_watermark, replica.role.log.last_stable_offset(high_watermark)
            if self._known.get(partition) != now:
                self._known[partition] = now
                changes.append((partition, *now))
        return changes

    def close(self) -> None:
        self._is_closed = True
        self._replicas.wakers.remove(self._waker, self._partitions)
