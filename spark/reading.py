"""A task of a read: fetches ranges of offsets and yields them as Arrow batches.

Ranges are read in offset order and in parallel; prefetching continues while Spark consumes. A lost leader is retried
for `brokerTimeoutMs`. If the log differs from the driver's plan, `failOnDataLoss` decides between an error and reading
on:

    log start after the range's start           ExpiredRangeError, or the rest of the range is read
    log end before the range's end, or records  TruncationError, or the existing records are read
      of a later epoch than planned
    topic recreated or deleted                  TopicRecreatedError, TopicDeletedError, or the range ends

Offsets without a record (compaction, transaction markers) are skipped.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tidelog.client.cluster import ClusterClient, error_in
from tidelog.client.consumer.fetched import Fetched
from tidelog.client.consumer.reader import Reader, ReaderConfig
from tidelog.client.consumer.settings import reader_config
from tidelog.client.errors import LogTruncatedError, OffsetOutOfRangeError
from tidelog.client.metadata import TopicInfo
from tidelog.model.errors import CallTimeoutError, ErrorCode, TidelogError
from tidelog.model.ids import PartitionId
from tidelog.rpc.grpc.methods import method_named
from tidelog.rpc.v1 import log_pb2 as pb
from tidelog.spark.batch_coalescing import columns_of
from tidelog.spark.client_cache import CachedClient
from tidelog.spark.columns import BYTES, ROWS, ArrowBatches
from tidelog.spark.errors import (
    DataLossError,
    ExpiredRangeError,
    TopicDeletedError,
    TopicRecreatedError,
    TruncationError,
)
from tidelog.spark.metadata_queries import MetadataQueries, partition_id
from tidelog.spark.offsets import ReadRange
from tidelog.spark.options import EARLIEST, LATEST, SourceOptions

if TYPE_CHECKING:
    import pyarrow

LOGGER = logging.getLogger(__name__)

PARTITION_BYTES = 4 << 20
BUFFER_BYTES = 32 << 20
CHECK_S = 0.3
"""Seconds without data before the task checks whether any is left."""
TAKE_BYTES = 8 << 20
_FOREVER_MS = 1 << 40
_FETCH = method_named("Log", "Fetch")
_GONE = frozenset({ErrorCode.UNKNOWN_TOPIC_ID, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION})


def read_ranges(
    client: CachedClient, options: SourceOptions, ranges: Sequence[ReadRange], schema: pyarrow.Schema
) -> Iterator[Any]:
    """Yield Arrow batches of `schema`."""
    task = client.run(_opened(client, options, ranges))
    batches = ArrowBatches(schema)
    try:
        while task.left:
            for piece in client.run(task.pieces()):
                yield from _rows(task, piece, batches)
        yield from batches.rest()
    finally:
        client.run(task.close())


def _rows(task: RangeTask, piece: Fetched, batches: ArrowBatches) -> Iterator[Any]:
    one = task.ranges[piece.partition]
    for columns in columns_of(piece, checks=task.checks, rows_max=ROWS, bytes_max=BYTES):
        task.check_epoch(one, columns.batch.leader_epoch, columns.batch.base_offset)
        start = bisect_left(columns.offsets, max(one.start, piece.fetch_offset))
        end = bisect_left(columns.offsets, one.end)
        yield from batches.add(one.topic, one.partition, columns, start, end)


async def _opened(client: CachedClient, options: SourceOptions, ranges: Sequence[ReadRange]) -> RangeTask:
    task = RangeTask(client, options, ranges)
    task.begin()
    return task


class RangeReader(Reader):
    """Fetches up to the end of each range and not past it."""

    def __init__(self, cluster: ClusterClient, config: ReaderConfig, ends: dict[PartitionId, int]) -> None:
        super().__init__(cluster, config)
        self._ends = ends

    def due(self, node: int) -> list[Any]:
        return [
            state
            for state in super().due(node)
            if state.position is not None and state.position.fetch_offset < self._ends[state.partition]
        ]


class RangeTask:
    """Runs on the IO loop, except `check_epoch`."""

    def __init__(self, client: CachedClient, options: SourceOptions, ranges: Sequence[ReadRange]) -> None:
        self.ranges = {partition_id(one.topic_id, one.partition): one for one in ranges}
        assert len(self.ranges) == len(ranges), "a task has one range per partition"
        self.left = dict(self.ranges)
        self.checks = client.options.check_crcs
        self._replaced: set[ReadRange] = set()  # ranges whose truncation was reported
        self._options = options
        self._cluster = client.cluster
        self._queries = MetadataQueries(
            self._cluster, options.subscription, is_committed_only=options.is_committed_only
        )
        config = reader_config(client.options)
        given = dict(options.client)
        config = ReaderConfig(
            min_bytes=1,
            max_bytes=config.max_bytes,
            partition_bytes=config.partition_bytes if "max.partition.fetch.bytes" in given else PARTITION_BYTES,
            max_wait_ms=config.max_wait_ms,
            isolation=pb.READ_COMMITTED if options.is_committed_only else pb.READ_UNCOMMITTED,
            rack=options.rack,
            buffer_bytes_max=config.buffer_bytes_max if "prefetch.bytes" in given else BUFFER_BYTES,
            request_timeout_ms=config.request_timeout_ms,
            leaderless_timeout_ms=options.broker_timeout_ms or _FOREVER_MS,
        )
        self._reader = RangeReader(self._cluster, config, {where: one.end for where, one in self.ranges.items()})

    def begin(self) -> None:
        topics = {where: TopicInfo(one.topic, where.topic_id, False, ()) for where, one in self.ranges.items()}
        self._reader.assign({where: one.start for where, one in self.ranges.items()}, topics)

    async def close(self) -> None:
        await self._reader.close()

    async def pieces(self) -> list[Fetched]:
        """Return fetched pieces; empty once all ranges are done."""
        reader = self._reader
        begun_s = asyncio.get_running_loop().time()
        while self.left:
            if (failed := reader.next_error()) is not None and failed.error is not None:
                await self._handle_error(failed.partition, failed.error)
                continue
            pieces = reader.take(TAKE_BYTES)
            for piece in pieces:
                if piece.next_offset >= self.ranges[piece.partition].end:
                    self._end(piece.partition)
            if pieces:
                return pieces
            reader.arrived.clear()
            try:
                async with asyncio.timeout(CHECK_S):
                    await reader.arrived.wait()
            except TimeoutError:
                await self._skip_gaps()
                await self._check_ends()
                if asyncio.get_running_loop().time() - begun_s > self._reader.config.leaderless_timeout_ms / 1000:
                    await self._give_up()
        return []

    def _end(self, where: PartitionId) -> None:
        self.left.pop(where, None)

    # Differences from the plan.

    def _lost(self, error: DataLossError) -> None:
        if self._options.fail_on_data_loss:
            raise error
        LOGGER.warning("data loss ignored, as failOnDataLoss=false: %s", error)

    def check_epoch(self, one: ReadRange, epoch: int, offset: int) -> None:
        """Report a truncation if a record has a later epoch than the driver knew: it replaced another record."""
        if 0 <= one.epoch < epoch and offset < one.end and one not in self._replaced:
            self._replaced.add(one)
            self._lost(TruncationError(one.topic, one.partition, offset=one.end, diverges=offset))

    async def _handle_error(self, where: PartitionId, error: TidelogError) -> None:
        one = self.ranges[where]
        if where not in self.left:
            return
        if isinstance(error, OffsetOutOfRangeError):
            await self._outside(where, one, error.position)
        elif isinstance(error, LogTruncatedError):
            self._lost(
                TruncationError(one.topic, one.partition, offset=error.position, diverges=error.diverging_offset)
            )
            self._reader.seek(where, error.position)
        elif error.code in _GONE:
            known = self._cluster.view.topics.get(one.topic)
            if known is not None and known.topic_id != where.topic_id:
                self._lost(TopicRecreatedError(one.topic, known_id=one.topic_id, found_id=known.topic_id.hex))
            else:
                self._lost(TopicDeletedError(one.topic))
            self._end(where)
        else:
            raise error

    async def _outside(self, where: PartitionId, one: ReadRange, position: int) -> None:
        place = {(one.topic, one.partition): where}
        start = (await self._queries.offsets(place, EARLIEST))[one.topic, one.partition].offset
        if position < start:
            self._lost(ExpiredRangeError(one.topic, one.partition, offset=position, start=min(start, one.end)))
            if start >= one.end:
                self._end(where)
            else:
                self._reader.seek(where, start)
            return
        end = (await self._queries.offsets(place, LATEST))[one.topic, one.partition].offset
        if end < position:
            self._lost(TruncationError(one.topic, one.partition, offset=one.end, diverges=end))
            self._end(where)
        else:  # transient: the leader was just elected
            self._reader.seek(where, position)

    async def _give_up(self) -> None:
        """Raise after `brokerTimeoutMs` without data or errors."""
        places = {(one.topic, one.partition): where for where, one in self.left.items()}
        ends = await self._queries.offsets(places, LATEST)
        for where, one in list(self.left.items()):
            end = ends[one.topic, one.partition].offset
            if end >= one.end:
                seconds = self._reader.config.leaderless_timeout_ms // 1000
                raise CallTimeoutError(
                    f"{one.topic}-{one.partition}: no data for {seconds} s (brokerTimeoutMs), at offset "
                    f"{self._reader.position(where)} of {one.end}"
                )
            self._lost(TruncationError(one.topic, one.partition, offset=one.end, diverges=end))
            self._end(where)

    async def _check_ends(self) -> None:
        """End ranges above the log end: the rest will never come. Asks the leader, as the end in a fetch response may
        lag."""
        places = {
            (one.topic, one.partition): where
            for where, one in self.left.items()
            if 0 <= self._reader.high_watermark(where) < one.end
        }
        if not places:
            return
        try:
            ends = await self._queries.offsets(places, LATEST, timeout_ms=2_000)
        except TidelogError as error:
            if not error.retriable:
                raise
            return  # the reader handles the error
        for place, where in places.items():
            one, end = self.ranges[where], ends[place].offset
            if end < one.end and self._reader.position(where) >= end:
                self._lost(TruncationError(one.topic, one.partition, offset=one.end, diverges=end))
                self._end(where)

    async def _skip_gaps(self) -> None:
        """End ranges whose last offsets hold no records: a fetch of them returns nothing."""
        for where, one in list(self.left.items()):
            if self._reader.high_watermark(where) < one.end:
                continue
            leader = self._cluster.leader(where)
            if leader is None:
                continue
            request = pb.FetchRequest(isolation=pb.READ_COMMITTED if self._options.is_committed_only else 0)  # type: ignore[arg-type]
            request.partitions.add(
                topic_id=where.topic_id.bytes, partition=where.partition, offset=self._reader.position(where)
            )
            try:
                answer = await self._cluster.call_node(leader.node, _FETCH, request, timeout_ms=2_000)
            except TidelogError:
                continue  # the reader handles the error
            (row,) = answer.partitions
            end = row.last_stable_offset if self._options.is_committed_only else row.high_watermark
            if error_in(row) is None and not row.data and not row.HasField("diverging") and end >= one.end:
                self._end(where)
