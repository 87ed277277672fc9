"""What both front doors call: writing to and reading from the partitions of this broker, by topic id.

Errors of a whole request are raised; errors of one partition stand in its result, with a hint where the leader is.
Rules (design, rules of safety 3; reads end at the high watermark for everybody):

    acks=0     answered when it is appended          acks=1    when it is on this broker's device
    acks=-1    when the high watermark has passed it; a duplicate when it has passed the original

Several batches of one item are one append: all are stored, or none, and they are acknowledged when all of them are as
far as asked, what is new and what was stored before.

Bounds: bytes of produce requests that wait (`queued_bytes_max`), fetches that wait (`waiting_fetches_max`; one more is
answered at once with what there is), bytes of an answer (the request's, and `fetch_bytes_max`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import cast

from tidelog.log.admission import Look, NeedsLookError
from tidelog.log.log import Appended, TimestampedOffset
from tidelog.log.producer_snapshot import ProducerRow
from tidelog.metadata.settings import AllocateProducerIdBlock, ProducerIdBlock
from tidelog.metadata.topics import Trim, TrimmedPartition
from tidelog.model.errors import (
    DuplicateSequenceError,
    InvalidRequestError,
    InvalidRequiredAcksError,
    LeaderNotAvailableError,
    LogDirNotFoundError,
    NotLeaderOrFollowerError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    OverloadedError,
    RemoteError,
    ReplicaNotAvailableError,
    RequestTimedOutError,
    StorageError,
    TidelogError,
    WorkFailedError,
)
from tidelog.model.ids import DirectoryId, Offset, PartitionId
from tidelog.replication.fetching import READ_COMMITTED, Fetch, FetchItem, FetchResult, OffsetWatch, ReadMemory
from tidelog.replication.leading import Leading
from tidelog.replication.replica import Replica
from tidelog.replication.replicas import Replicas
from tidelog.replication.serving import find_leading

__all__ = [
    "FetchItem",
    "FetchResult",
    "OffsetWatch",
    "PartitionService",
    "ProduceItem",
    "ProduceResult",
    "Producing",
]

LATEST, EARLIEST, MAX_TIMESTAMP, EARLIEST_LOCAL = -1, -2, -3, -4
ACKS_NONE, ACKS_LEADER, ACKS_ALL = 0, 1, -1
LOOKED_BYTES_INLINE = 64 << 10
LOOKS_INLINE = 8
"""Records are decoded on the spot, where a topic asks for it, in so many items of a request and up to so many bytes
each, decompressed: some 10 ms at most. What is more is decoded elsewhere, while others have their turn."""
LOOKS_MAX = 4
APPENDS_PER_SLICE = 50
"""Of a request, in one turn of the event loop: some 5 ms."""
NEWEST_WAIT_MS = 1_000
"""Of who asks for the record with the largest timestamp, until that is replicated."""
HELD_WAIT_S = 0.01
REPLICAS_PER_SLICE = 500
"""That are told of in one turn of the event loop."""
ROWS_PER_SLICE = 500
"""Producers that are described in one turn of the event loop."""


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    queued_bytes_max: int = 256 << 20
    """`queued.max.request.bytes`: of produce requests that are not answered yet."""
    waiting_fetches_max: int = 10_000
    fetch_bytes_max: int = 55 << 20
    """`fetch.max.bytes` of the broker."""


@dataclass(slots=True)
class ProduceItem:
    """A value, and `ProduceResult` too: nobody changes it. Frozen ones are slow to make, and this is one a batch."""

    partition: PartitionId
    batches: bytes | memoryview
    leader_epoch: int = -1


@dataclass(slots=True)
class ProduceResult:
    error: TidelogError | None = None
    base_offset: int = -1
    append_time_ms: int = -1
    start_offset: int = -1
    leader_epoch: int = -1
    leader: int = -1


@dataclass(frozen=True, slots=True)
class ReplicaSize:
    partition: PartitionId
    size: int
    offset_lag: int
    """Offsets that it is behind the high watermark; of a copy, behind the log that is copied."""
    is_future: bool = False
    """A copy that will take the replica's place in this directory."""


@dataclass(frozen=True, slots=True)
class DirectoryDescription:
    directory_id: DirectoryId | None
    label: str
    error: TidelogError | None
    free_bytes: int
    total_bytes: int
    replicas: tuple[ReplicaSize, ...]
    is_full: bool = False
    """It has no room for appends, and can be read."""


class PartitionService:
    """See the module."""

    def __init__(self, replicas: Replicas, config: ServiceConfig | None = None) -> None:
        self._replicas = replicas
        self.config = config or ServiceConfig()
        self.queued_bytes = 0
        self.waiting_fetches = 0
        self._producer_block: tuple[int, int] = (0, 0)
        self._allocating = asyncio.Lock()

    # Finding.

    def leading(self, partition: PartitionId, leader_epoch: int = -1) -> Leading:
        """The partition as its leader; raises what a client has to know if it is not led here, or in another epoch."""
        return find_leading(self._replicas, partition, leader_epoch)

    # Writing.

    async def produce(self, items: Sequence[ProduceItem], *, acks: int, timeout_ms: int) -> list[ProduceResult]:
        """Append each item, in order; results in the same order, when they are acknowledged as asked or have failed.

        What has timed out may be acknowledged by nobody and stored all the same.
        """
        started = await self.start_produce(items, acks=acks, timeout_ms=timeout_ms)
        return await started.finish()

    async def start_produce(self, items: Sequence[ProduceItem], *, acks: int, timeout_ms: int) -> Producing:
        """As `produce`, but appended when it returns; the time counts from here.

        Others have their turn after every `APPENDS_PER_SLICE` items, and while records are decoded: between two
        requests that are started at the same time there is no order.
        """
        if acks not in (ACKS_NONE, ACKS_LEADER, ACKS_ALL):
            raise InvalidRequiredAcksError(f"acks={acks}: 0, 1 or -1")
        size = sum(len(item.batches) for item in items)
        if self.queued_bytes and self.queued_bytes + size > self.config.queued_bytes_max:
            raise OverloadedError(
                f"{self.queued_bytes} bytes of other requests wait to be stored, at most {self.config.queued_bytes_max}"
            )
        started = Producing(self, items, size, timeout_ms)
        try:
            for number, item in enumerate(items, start=1):
                await started.append(item, acks)
                if number % APPENDS_PER_SLICE == 0 and number < len(items):
                    await asyncio.sleep(0)
        except BaseException:
            started.leave()
            raise
        return started

    def failed(self, partition: PartitionId, error: TidelogError) -> ProduceResult:
        replica = self._replicas.get(partition)
        if replica is None:
            leader = error.leader if isinstance(error, NotLeaderOrFollowerError) else -1
            return ProduceResult(error, leader=leader)
        return ProduceResult(error, leader_epoch=replica.partition.leader_epoch, leader=replica.partition.leader)

    # Reading.

    async def fetch(
        self,
        items: Sequence[FetchItem],
        *,
        min_bytes: int,
        max_bytes: int,
        max_wait_ms: int,
        isolation: int = 0,
        rack: str = "",
        memory: ReadMemory | None = None,
    ) -> list[FetchResult]:
        """Whole batches below the high watermark, in the order of the items: at most `max_bytes`, but at least one
        batch if there is any. Waits up to `max_wait_ms` for `min_bytes`; an error is answered at once.

        `memory` counts what is read until this returns, and says how much it may be; a fetch that waits holds none.
        """
        bytes_max = min(max_bytes, self.config.fetch_bytes_max)
        with closing(
            Fetch(self._replicas, items, bytes_max=bytes_max, isolation=isolation, rack=rack, memory=memory)
        ) as fetch:
            await fetch.read_all()
            is_full = self.waiting_fetches >= self.config.waiting_fetches_max
            if not is_full and max_wait_ms > 0 and not fetch.is_enough(min_bytes):
                self.waiting_fetches += 1
                try:
                    await fetch.wait(min_bytes, max_wait_ms)
                finally:
                    self.waiting_fetches -= 1
            return await fetch.results()

    def watch(self, partitions: Iterable[PartitionId]) -> OffsetWatch:
        """An asynchronous iterator of lists of (partition, high watermark, last stable offset): first all, then those
        that have changed since, however often. Close it."""
        return OffsetWatch(self._replicas, list(partitions))

    # Offsets.

    async def list_offsets(
        self, partition: PartitionId, timestamp: int, *, leader_epoch: int = -1, isolation: int = 0
    ) -> tuple[int, int, int]:
        """(offset, timestamp, leader epoch) of the latest (-1), the earliest (-2), the record with the largest
        timestamp (-3), or the first at or after a time; offset -1 where there is none."""
        leading = self.leading(partition, leader_epoch)
        log = leading.log
        if timestamp in (EARLIEST, EARLIEST_LOCAL):
            return log.start_offset, -1, log.epochs.epoch_for(log.start_offset)
        end = self._confirmed(leading)
        if isolation == READ_COMMITTED:
            end = log.last_stable_offset(end)
        if timestamp == LATEST:
            return end, -1, leading.leader_epoch
        if timestamp == MAX_TIMESTAMP:
            found = await self._sought(leading, log.offset_of_largest_timestamp(work=self._replicas.admission_work))
            if found is not None and found.offset >= end:
                await self._wait_replicated(leading, found.offset + 1)
                if isolation == READ_COMMITTED and found.offset >= log.last_stable_offset(leading.high_watermark):
                    raise OffsetNotAvailableError("the newest record is part of an open transaction")
        elif timestamp >= 0:
            work = self._replicas.admission_work
            found = await self._sought(leading, log.offset_for_timestamp(timestamp, end=end, work=work))
        else:
            raise InvalidRequestError(f"timestamp {timestamp}: -1 latest, -2 earliest, -3 largest, or a time")
        if found is None:
            return -1, -1, -1
        return found.offset, found.timestamp, log.epochs.epoch_for(found.offset)

    @staticmethod
    async def _sought(leading: Leading, search: Awaitable[TimestampedOffset | None]) -> TimestampedOffset | None:
        try:
            found = await search
        except WorkFailedError as error:
            raise OverloadedError(f"the batch could not be looked into: {error}") from error
        if leading.replica.role is not leading:
            # The log may have been cut meanwhile.
            raise NotLeaderOrFollowerError("the leader has changed meanwhile", leader=leading.replica.partition.leader)
        return found

    @staticmethod
    async def _wait_replicated(leading: Leading, end: int) -> None:
        """While others write there is always a record that is not replicated yet, for a moment."""
        if leading.high_watermark >= end:
            return
        reached = leading.acks.wait(end)
        try:
            await asyncio.wait([reached], timeout=NEWEST_WAIT_MS / 1000)
            if not reached.done():
                raise OffsetNotAvailableError(f"the newest record is not replicated in {NEWEST_WAIT_MS} ms")
            reached.result()
        finally:
            if not reached.done():
                leading.acks.forget(reached)

    def _confirmed(self, leading: Leading) -> Offset:
        """The high watermark, once it is known to be behind no acknowledgement of a former leader."""
        if not leading.state.is_confirmed:
            raise OffsetNotAvailableError(
                f"epoch {leading.leader_epoch} is confirmed up to {leading.high_watermark} of "
                f"{leading.state.epoch_start}"
            )
        return leading.high_watermark

    def offset_for_leader_epoch(self, partition: PartitionId, epoch: int, *, leader_epoch: int = -1) -> tuple[int, int]:
        """(the largest epoch at or below this one, where it ends); (-1, -1) for one that is not known."""
        leading = self.leading(partition, leader_epoch)
        high_watermark = self._confirmed(leading)
        known, end = leading.log.end_offset_for_epoch(epoch)
        return known, min(end, high_watermark)

    async def range_bytes(self, partition: PartitionId, start: int, end: int) -> int:
        """Bytes of the batches of [start, end), as far as it can be read."""
        leading = self.leading(partition)
        return await leading.log.range_bytes(start, min(end, leading.high_watermark))

    async def delete_records(self, partition: PartitionId, offset: int) -> int:
        """Records below `offset` (-1: all that can be read) are gone for every replica; returns the new start."""
        leading = self.leading(partition)
        if (offset < 0 and offset != LATEST) or offset > leading.high_watermark:
            end = self._confirmed(leading)  # a new leader may be behind what its clients know
            raise OffsetOutOfRangeError(
                f"records are deleted up to the high watermark {end}, not to {offset}",
                offset=offset,
                start=leading.log.start_offset,
                end=end,
            )
        if offset == LATEST:
            offset = self._confirmed(leading)
        trimmed = TrimmedPartition(
            topic_id=partition.topic_id,
            partition=partition.partition,
            leader_epoch=leading.leader_epoch,
            start_offset=offset,
        )
        request = Trim(broker=self._replicas.me, broker_epoch=self._replicas.broker_epoch, partitions=(trimmed,))
        (outcome,) = (await self._replicas.agent.ask(request)).items
        if outcome.error is not None:
            raise RemoteError(outcome.message, code=outcome.error)
        while True:
            if leading.replica.role is not leading:
                leader = leading.replica.partition.leader
                raise NotLeaderOrFollowerError("the leader has changed meanwhile", leader=leader)
            if not leading.is_held:
                await leading.log.advance_start(offset)
                if leading.log.start_offset >= offset:
                    return leading.log.start_offset
            await asyncio.sleep(HELD_WAIT_S)  # the log changes its place, or was closed for that just now

    # Producers.

    async def init_producer_id(self) -> tuple[int, int]:
        """(id, epoch) that nobody else has."""
        async with self._allocating:
            following, end = self._producer_block
            if following >= end:
                request = AllocateProducerIdBlock(broker=self._replicas.me, broker_epoch=self._replicas.broker_epoch)
                # A block that was given without our knowing is lost, which is fine: there are enough.
                block = await self._replicas.agent.client.call(request, is_repeatable=True)
                assert isinstance(block, ProducerIdBlock), "the answer to a request for producer ids"
                following, end = block.first, block.first + block.count
            self._producer_block = following + 1, end
            return following, 0

    async def producers(self, partition: PartitionId) -> list[ProducerRow]:
        """Those that the log of this broker's replica remembers, by id; a follower's may be behind the leader's."""
        replica = self._replicas.get(partition)
        log = None if replica is None or replica.is_dropped else replica.log
        state = self.leading(partition).log.producers if log is None else log.producers
        found = []
        for number, producer_id in enumerate(state.ids(), start=1):
            row = state.row(producer_id)  # forgotten meanwhile, perhaps
            if row is not None:
                found.append(row)
            if number % ROWS_PER_SLICE == 0:
                await asyncio.sleep(0)
        return found

    # Directories.

    async def log_directories(self) -> list[DirectoryDescription]:
        """With a turn for others every `REPLICAS_PER_SLICE`."""
        found = []
        for directory in self._replicas.logs.directories:
            sizes = []
            # UUIDs are compared by code in Python, their numbers are not.
            partitions = sorted(directory.paths, key=lambda one: (one.topic_id.int, one.partition))
            for number, partition in enumerate(partitions, start=1):
                if number % REPLICAS_PER_SLICE == 0:
                    await asyncio.sleep(0)
                replica, log = self._replicas.get(partition), self._replicas.logs.get(partition)
                if log is not None:
                    lag = max(0, replica.high_watermark - log.end_offset) if replica is not None else 0
                    sizes.append(ReplicaSize(partition, log.size, lag))
            copies = [
                ReplicaSize(partition, move.copied_bytes, move.lag, is_future=True)
                for partition, move in self._replicas.moves.under_way.items()
                if move.target is directory
            ]
            if copies:
                sizes = sorted([*sizes, *copies], key=lambda one: (one.partition.topic_id.int, one.partition.partition))
            found.append(
                DirectoryDescription(
                    directory.directory_id,
                    directory.disk.label,
                    directory.failed,
                    -1 if directory.failed is not None else directory.disk.free_bytes(),
                    -1 if directory.failed is not None else directory.disk.total_bytes(),
                    tuple(sizes),
                    is_full=directory in self._replicas.upkeep.full_directories,
                )
            )
        return found

    def directory_at(self, path: str) -> DirectoryId:
        """Of the log directory with this path."""
        for directory in self._replicas.logs.directories:
            if directory.disk.label == path:
                if directory.failed is not None or directory.directory_id is None:
                    raise StorageError(f"log directory {path} of broker {self._replicas.me} has failed")
                return directory.directory_id
        raise LogDirNotFoundError(f"broker {self._replicas.me} has no log directory {path[:200]!r}")

    def directory_id_of(self, partition: PartitionId) -> DirectoryId | None:
        """Where this broker's replica lies; `ReplicaNotAvailableError` if it has none that is open."""
        self._open_replica(partition)
        directory = self._replicas.logs.directory_of(partition)
        return None if directory is None else directory.directory_id

    def _open_replica(self, partition: PartitionId) -> Replica:
        replica = self._replicas.get(partition)
        if replica is None or replica.log is None or replica.is_dropped:
            raise ReplicaNotAvailableError(f"broker {self._replicas.me} has no open replica of {partition}")
        return replica

    async def move_replica(self, partition: PartitionId, directory: DirectoryId) -> None:
        """Returns when the replica of this broker lies in that directory."""
        replica = self._open_replica(partition)
        known = [d for d in self._replicas.logs.directories if d.directory_id == directory and d.failed is None]
        if not known:
            raise InvalidRequestError(f"broker {self._replicas.me} has no working log directory {directory}")
        if self._replicas.logs.directory_of(partition) is not known[0]:
            await self._replicas.moves.move(replica, directory)


class Producing:
    """A produce request whose items are appended, or refused one by one. `finish` waits for it, `leave` gives it up."""

    __slots__ = (
        "_call",
        "_deadline_s",
        "_items",
        "_left",
        "_looks",
        "_results",
        "_service",
        "_size",
        "_timeout_ms",
        "_timer",
        "_waits",
    )

    def __init__(self, service: PartitionService, items: Sequence[ProduceItem], size: int, timeout_ms: int) -> None:
        self._service = service
        self._items = items
        self._size = size
        self._timeout_ms = timeout_ms
        self._deadline_s = asyncio.get_running_loop().time() + timeout_ms / 1000
        self._looks = 0
        self._results: list[ProduceResult] = []
        self._waits: dict[int, tuple[Leading, asyncio.Future[None], TidelogError | None]] = {}
        self._call: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._left = 0
        service.queued_bytes += size

    async def append(self, item: ProduceItem, acks: int) -> None:
        """The next item."""
        batches = item.batches
        looked: Look | None = None
        for _ in range(LOOKS_MAX):
            try:
                self._append(item, batches, looked, acks)
                return
            except NeedsLookError as needed:
                looked = needed.look
            try:
                batches = await self._look_inside(item, looked)
            except TidelogError as error:
                self._results.append(self._service.failed(item.partition, error))
                return
        refusal = LeaderNotAvailableError("the settings of the topic change faster than a batch can be looked into")
        self._results.append(self._service.failed(item.partition, refusal))

    async def _look_inside(self, item: ProduceItem, look: Look) -> bytes:
        leading = self._service.leading(item.partition, item.leader_epoch)
        try:
            async with asyncio.timeout_at(self._deadline_s):
                return await leading.look_inside(bytes(item.batches), look)
        except TimeoutError:
            raise RequestTimedOutError(f"not looked into in {self._timeout_ms} ms; it is not stored") from None

    def _append(self, item: ProduceItem, batches: bytes | memoryview, looked: Look | None, acks: int) -> None:
        """All of it in one turn of the event loop: whatever has changed while records were decoded is noticed."""
        at = len(self._results)
        try:
            leading = self._service.leading(item.partition, item.leader_epoch)
            leading.state.check_acks(acks)
            inline_bytes_max = LOOKED_BYTES_INLINE if self._looks < LOOKS_INLINE else 0
            self._looks += leading.log.config.looks_inside
            appended = leading.append(batches, looked=looked, inline_bytes_max=inline_bytes_max)
        except DuplicateSequenceError as error:
            self._results.append(self._service.failed(item.partition, error))
            # Clients take it for an acknowledgement: it has to wait like one.
            if acks == ACKS_ALL and leading.high_watermark < error.below_offset:
                self._waits[at] = leading, leading.acks.wait(error.below_offset), error
            elif acks == ACKS_LEADER:
                self._waits[at] = leading, leading.log.wait_durable(error.below_offset - 1), error
        except TidelogError as error:
            self._results.append(self._service.failed(item.partition, error))
        else:
            self._results.append(_stored(leading, appended))
            if acks == ACKS_ALL and leading.high_watermark <= appended.last_offset:
                self._waits[at] = leading, leading.acks.wait(appended.last_offset + 1), None
            elif acks == ACKS_LEADER:
                self._waits[at] = leading, leading.log.wait_durable(appended.last_offset), None

    # Waiting.

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to wait for."""
        for _, future, _ in self._waits.values():  # noqa: SIM110
            if not future.done():
                return False
        return True

    def on_done(self, call: Callable[[], None]) -> None:
        """`call` is called once, when nothing is left to wait for or the time is over, in a later turn of the loop;
        not after `leave`. For who needs no task to wait in: then `results`."""
        assert self._call is None, "one waits for it"
        loop = asyncio.get_running_loop()
        self._call = call
        self._timer = loop.call_at(self._deadline_s, self._end_wait)
        for _, future, _ in self._waits.values():
            if not future.done():
                self._left += 1
                future.add_done_callback(self._one_done)
        if self._left == 0:
            loop.call_soon(self._end_wait)

    def _one_done(self, _future: asyncio.Future[None]) -> None:
        self._left -= 1
        if self._left == 0:
            self._end_wait()

    def _end_wait(self) -> None:
        call = self._call
        self._stop_waiting()
        if call is not None:
            call()

    def _stop_waiting(self) -> None:
        self._call = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def finish(self) -> list[ProduceResult]:
        try:
            waiting = [future for _, future, _ in self._waits.values() if not future.done()]
            if waiting:
                left_s = self._deadline_s - asyncio.get_running_loop().time()
                await asyncio.wait(waiting, timeout=max(0.0, left_s))
            return self.results()
        finally:
            self.leave()

    def results(self) -> list[ProduceResult]:
        """Of all items; what is not acknowledged by now has timed out."""
        try:
            for at, (_, future, refusal) in self._waits.items():
                error: TidelogError | None = refusal
                if not future.done():
                    error = RequestTimedOutError(f"not replicated in {self._timeout_ms} ms; it may be yet")
                elif future.exception() is not None:
                    error = cast(TidelogError, future.exception())
                if error is not None:
                    self._results[at] = self._service.failed(self._items[at].partition, error)
            return self._results
        finally:
            self.leave()

    def leave(self) -> None:
        """Nobody waits for it any more. Idempotent."""
        self._stop_waiting()
        for leading, future, _ in self._waits.values():
            if not future.done():
                leading.acks.forget(future)
        self._waits = {}
        self._service.queued_bytes -= self._size
        self._size = 0


def _stored(leading: Leading, appended: Appended) -> ProduceResult:
    log = leading.log
    return ProduceResult(None, appended.base_offset, appended.append_time, log.start_offset, leading.leader_epoch)
