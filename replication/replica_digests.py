"""Digests of ranges of this broker's replicas, for an operator who compares replicas (decision 31).

    request --waits for a place: `CONCURRENT_MAX`, `WAITING_MAX`--> pieces of `PIECE_BYTES`, each: read as a consumer
            reads, digested in a helper process, then a pause: `replica.verify.bytes.per.second`
    ends at the end that was asked for, after `REQUEST_BYTES_MAX` or `REQUEST_S_MAX`, after `UNITS_MAX` of a list, where
            the leader epoch changes, or at a fault

Only bytes below the high watermark are read; nothing changes them but a cleaning and an unclean election. A piece that
files changed under is read again. A fault, or a replica that another one differs from, is passed on to the scrub: it
checks the whole segment with its checksum and repairs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tidelog.log.log import Log
from tidelog.log.range_digests import DigestQuery, RangeSum, ReplicaDigest, digest_batches, unit_parts
from tidelog.model.errors import (
    CorruptBatchError,
    OffsetOutOfRangeError,
    OverloadedError,
    ReplicaNotAvailableError,
    UnsupportedMagicError,
)
from tidelog.model.ids import PartitionId
from tidelog.replication.broker_context import BrokerMetadata
from tidelog.replication.follower_replica import FollowerReplica
from tidelog.replication.leader_replica import LeaderReplica
from tidelog.replication.replica import Replica
from tidelog.replication.throttle import Bucket

RATE = "replica.verify.bytes.per.second"
PIECE_BYTES_MIN, PIECE_BYTES = 64 << 10, 1 << 20
"""What one second allows, within these."""
REQUEST_BYTES_MAX = 2 << 20
"""A request reads about this much, so that it answers soon and the next one shows progress."""
REQUEST_S_MAX = 2.0
"""Then a request returns what it has: with a low rate, others wait behind it, and callers have deadlines."""
CONCURRENT_MAX = 2
WAITING_MAX = 64

_UNREADABLE = CorruptBatchError, UnsupportedMagicError


class ReplicaDigests:
    """See the module."""

    def __init__(
        self,
        metadata: BrokerMetadata,
        find: Callable[[PartitionId], Replica | None],
        scrub_soon: Callable[[PartitionId], None],
    ) -> None:
        self.bytes = 0
        """Bytes digested since the start."""
        self._metadata = metadata
        self._find = find
        self._scrub_soon = scrub_soon
        self._places = asyncio.Semaphore(CONCURRENT_MAX)
        self._requests = 0
        self._bucket: Bucket | None = None

    async def digest(self, partition_id: PartitionId, query: DigestQuery) -> ReplicaDigest:
        """Describe the replica, and digest a range of it. Raises `ReplicaNotAvailableError` without an open one."""
        replica, log = self._open(partition_id)
        if query.start < 0 or log.damaged is not None or query.start < log.start_offset:
            return self._describe(replica, log)
        if query.is_suspect:
            self._scrub_soon(partition_id)
        if self._requests >= CONCURRENT_MAX + WAITING_MAX:
            raise OverloadedError(
                f"broker {self._metadata.me} digests for {self._requests} other requests: retry later"
            )
        self._requests += 1
        try:
            async with self._places:
                replica, log = self._open(partition_id)
                total = await self._digest(replica, log, query)
        finally:
            self._requests -= 1
        if total.fault:
            self._scrub_soon(partition_id)
        return self._describe(replica, log, total)

    def _open(self, partition_id: PartitionId) -> tuple[Replica, Log]:
        replica = self._find(partition_id)
        log = None if replica is None else replica.log
        if replica is None or log is None or log.is_closed or replica.is_dropped:
            raise ReplicaNotAvailableError(f"broker {self._metadata.me} has no open replica of {partition_id}")
        return replica, log

    def _describe(self, replica: Replica, log: Log, total: RangeSum | None = None) -> ReplicaDigest:
        role = replica.role
        is_leader = isinstance(role, LeaderReplica)
        total = total or RangeSum(-1)
        return ReplicaDigest(
            broker=self._metadata.me,
            leader=self._metadata.me if is_leader else role.leader if isinstance(role, FollowerReplica) else -1,
            leader_epoch=role.leader_epoch if role is not None else -1,
            follows=is_leader or (isinstance(role, FollowerReplica) and role.is_accepted and role.stream is not None),
            start_offset=log.start_offset,
            high_watermark=_readable_end(replica, log),
            generation=log.durability.generation,
            has_gaps=log.gaps,
            damage="" if log.damaged is None else log.damaged.reason,
            reached=total.reached,
            epoch=total.epoch,
            count=total.count,
            size=total.size,
            digest=total.digest,
            fault=total.fault,
            units=unit_parts(total.units),
        )

    async def _digest(self, replica: Replica, log: Log, query: DigestQuery) -> RangeSum:
        end = _readable_end(replica, log) if query.end < 0 else min(query.end, _readable_end(replica, log))
        total = RangeSum(query.start)
        now_s = asyncio.get_running_loop().time
        until_s = now_s() + REQUEST_S_MAX
        while total.reached < end and total.size < REQUEST_BYTES_MAX and not total.is_over:
            piece = await self._piece(log, query, total.reached, end)
            if piece is None:
                break  # the log start has passed it: the caller sees the start
            total.add(piece)
            if now_s() > until_s:
                break
        return total

    async def _piece(self, log: Log, query: DigestQuery, offset: int, end: int) -> RangeSum | None:
        bucket = self._throttle()
        now_s = asyncio.get_running_loop().time
        if (wait_s := bucket.wait_s(now_s())) > 0:
            await asyncio.sleep(wait_s)
        bytes_max = min(PIECE_BYTES, max(PIECE_BYTES_MIN, bucket.rate))
        while True:
            version = log.segments.version
            try:
                read = await log.read(offset, bytes_max=bytes_max, end=end)
            except OffsetOutOfRangeError:
                return None
            except _UNREADABLE as error:
                if bytes_max == 1:
                    return RangeSum(offset, fault=f"the batch at offset {offset}: {error}", is_over=True)
                bytes_max = max(1, bytes_max // 16)  # the sound batches before it can be read
                continue
            size = len(read.data)
            bucket.spend(size, now_s())
            self.bytes += size
            if size == 0:
                return RangeSum(end)
            part = DigestQuery(start=offset, end=end, by_record=query.by_record, lists_units=query.lists_units)
            limit = log.config.decompressed_bytes_max
            piece = await log.work.run(digest_batches, bytes(read.data), part, int(read.next_offset), limit)
            if piece.fault and log.segments.version != version and not log.is_closed:
                continue
            return piece

    def _throttle(self) -> Bucket:
        rate, now_s = self._metadata.setting(RATE), asyncio.get_running_loop().time()
        if self._bucket is None:
            self._bucket = Bucket(rate, now_s)
        if self._bucket.rate != rate:
            self._bucket.set_rate(rate, now_s)
        return self._bucket


def _readable_end(replica: Replica, log: Log) -> int:
    return min(replica.high_watermark, log.end_offset)
