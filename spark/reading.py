"""What a task does: read ranges of offsets, and give them out as Arrow batches.

Each range is read to its end, in order, ranges side by side; fetching goes on while Spark takes what was read. A leader
that is lost is looked for as long as the query has patience. What is not as the driver has planned it:

    the log begins after the range's start      ExpiredRangeError, or the rest of the range is read
    the log ends before the range, or records   TruncationError, or what is there is read
      are of a later epoch than it knew
    the topic has another id, or is gone        TopicMadeAnewError, TopicDeletedError, or the range ends here

by `failOnDataLoss`. Offsets that hold no record (compaction, marks of transactions) are passed over.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tidelog.client.cluster import ClusterClient, error_in
from tidelog.client.consumer_settings import reader_config
from tidelog.client.errors import PositionError, TruncatedError
from tidelog.client.fetched import Fetched
from tidelog.client.metadata import TopicInfo
from tidelog.client.reader import Reader, ReaderConfig
from tidelog.model.errors import CallTimeoutError, ErrorCode, TidelogError
from tidelog.model.ids import PartitionId
from tidelog.rpc.door import method_named
from tidelog.rpc.v1 import log_pb2 as pb
from tidelog.spark.access import Access
from tidelog.spark.columns import BYTES, ROWS, ArrowBatches
from tidelog.spark.errors import (
    DataLossError,
    ExpiredRangeError,
    TopicDeletedError,
    TopicMadeAnewError,
    TruncationError,
)
from tidelog.spark.facts import Facts, partition_id
from tidelog.spark.offsets import ReadRange
from tidelog.spark.options import EARLIEST, LATEST, SourceOptions
from tidelog.spark.runs import columns_of

if TYPE_CHECKING:
    import pyarrow

LOGGER = logging.getLogger(__name__)

PARTITION_BYTES = 4 << 20
BUFFER_BYTES = 32 << 20
LOOK_S = 0.3
"""Without news for so long it is looked whether there is anything left to come."""
TAKE_BYTES = 8 << 20
_FOREVER_MS = 1 << 40
_FETCH = method_named("Log", "Fetch")
_GONE = frozenset({ErrorCode.UNKNOWN_TOPIC_ID, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION})


def read_ranges(
    access: Access, options: SourceOptions, ranges: Sequence[ReadRange], schema: pyarrow.Schema
) -> Iterator[Any]:
    """Arrow batches of that schema."""
    task = access.run(_opened(access, options, ranges))
    batches = ArrowBatches(schema)
    try:
        while task.left:
            for piece in access.run(task.pieces()):
                yield from _rows(task, piece, batches)
        yield from batches.rest()
    finally:
        access.run(task.close())


def _rows(task: RangeTask, piece: Fetched, batches: ArrowBatches) -> Iterator[Any]:
    one = task.ranges[piece.partition]
    for columns in columns_of(piece, checks=task.checks, rows_max=ROWS, bytes_max=BYTES):
        task.check_epoch(one, columns.batch.leader_epoch, columns.batch.base_offset)
        start = bisect_left(columns.offsets, max(one.start, piece.position))
        end = bisect_left(columns.offsets, one.end)
        yield from batches.add(one.topic, one.partition, columns, start, end)


async def _opened(access: Access, options: SourceOptions, ranges: Sequence[ReadRange]) -> RangeTask:
    task = RangeTask(access, options, ranges)
    task.begin()
    return task


class RangeReader(Reader):
    """Fetches up to the end of each range, and not past it."""

    def __init__(self, cluster: ClusterClient, config: ReaderConfig, ends: dict[PartitionId, int]) -> None:
        super().__init__(cluster, config)
        self._ends = ends

    def due(self, node: int) -> list[Any]:
        return [place for place in super().due(node) if place.fetch_offset < self._ends[place.partition]]


class RangeTask:
    """On the IO loop, but for `check_epoch`."""

    def __init__(self, access: Access, options: SourceOptions, ranges: Sequence[ReadRange]) -> None:
        self.ranges = {partition_id(one.topic_id, one.partition): one for one in ranges}
        assert len(self.ranges) == len(ranges), "a partition stands in a task once"
        self.left = dict(self.ranges)
        self.checks = access.options.check_crcs
        self._replaced: set[ReadRange] = set()  # of which that was told
        self._options = options
        self._cluster = access.cluster
        self._facts = Facts(self._cluster, options.subscription, is_committed_only=options.is_committed_only)
        config = reader_config(access.options)
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
            patience_ms=options.patience_ms or _FOREVER_MS,
        )
        self._reader = RangeReader(self._cluster, config, {where: one.end for where, one in self.ranges.items()})

    def begin(self) -> None:
        self._reader.add_all(
            (TopicInfo(one.topic, where.topic_id, False, ()), where, one.start, -1)
            for where, one in self.ranges.items()
        )

    async def close(self) -> None:
        await self._reader.close()

    async def pieces(self) -> list[Fetched]:
        """What has come, after a while perhaps nothing."""
        reader = self._reader
        begun_s = asyncio.get_running_loop().time()
        while self.left:
            if (failed := reader.failed_place()) is not None:
                await self._judge(*failed)
                continue
            found = reader.take(TAKE_BYTES)
            for piece in found:
                if piece.next_offset >= self.ranges[piece.partition].end:
                    self._end(piece.partition)
            if found:
                return found
            reader.arrived.clear()
            try:
                async with asyncio.timeout(LOOK_S):
                    await reader.arrived.wait()
            except TimeoutError:
                await self._look_for_gaps()
                await self._look_for_ends()
                if asyncio.get_running_loop().time() - begun_s > self._reader.config.patience_ms / 1000:
                    await self._give_up()
        return []

    def _end(self, where: PartitionId) -> None:
        self.left.pop(where, None)

    # What is not as it was planned.

    def _lost(self, error: DataLossError) -> None:
        if self._options.fail_on_data_loss:
            raise error
        LOGGER.warning("data loss, passed over as failOnDataLoss=false: %s", error)

    def check_epoch(self, one: ReadRange, epoch: int, offset: int) -> None:
        """The driver knows of no later epoch before the range's end: such a record has replaced another."""
        if 0 <= one.epoch < epoch and offset < one.end and one not in self._replaced:
            self._replaced.add(one)
            self._lost(TruncationError(one.topic, one.partition, offset=one.end, departs=offset))

    async def _judge(self, where: PartitionId, error: TidelogError) -> None:
        one = self.ranges[where]
        if where not in self.left:
            return
        if isinstance(error, PositionError):
            await self._outside(where, one, error.position)
        elif isinstance(error, TruncatedError):
            self._lost(TruncationError(one.topic, one.partition, offset=error.position, departs=error.diverging_offset))
            self._reader.seek(where, error.position)
        elif error.code in _GONE:
            known = self._cluster.view.topics.get(one.topic)
            if known is not None and known.topic_id != where.topic_id:
                self._lost(TopicMadeAnewError(one.topic, known_id=one.topic_id, found_id=known.topic_id.hex))
            else:
                self._lost(TopicDeletedError(one.topic))
            self._end(where)
        else:
            raise error

    async def _outside(self, where: PartitionId, one: ReadRange, position: int) -> None:
        place = {(one.topic, one.partition): where}
        start = (await self._facts.offsets(place, EARLIEST))[one.topic, one.partition].offset
        if position < start:
            self._lost(ExpiredRangeError(one.topic, one.partition, offset=position, start=min(start, one.end)))
            if start >= one.end:
                self._end(where)
            else:
                self._reader.seek(where, start)
            return
        end = (await self._facts.offsets(place, LATEST))[one.topic, one.partition].offset
        if end < position:
            self._lost(TruncationError(one.topic, one.partition, offset=one.end, departs=end))
            self._end(where)
        else:  # it was so for a moment: a leader that has just begun
            self._reader.seek(where, position)

    async def _give_up(self) -> None:
        """Nothing has come for too long, and no error either."""
        places = {(one.topic, one.partition): where for where, one in self.left.items()}
        ends = await self._facts.offsets(places, LATEST)
        for where, one in list(self.left.items()):
            end = ends[one.topic, one.partition].offset
            if end >= one.end:
                seconds = self._reader.config.patience_ms // 1000
                raise CallTimeoutError(
                    f"{one.topic}-{one.partition}: nothing came for {seconds} s (brokerTimeoutMs), at offset "
                    f"{self._reader.position(where)} of {one.end}"
                )
            self._lost(TruncationError(one.topic, one.partition, offset=one.end, departs=end))
            self._end(where)

    async def _look_for_ends(self) -> None:
        """A log that is shorter than a range will not have the rest of it, however long the query's patience is. Its
        leader tells the end only when it knows it; what a fetch says may be behind."""
        places = {
            (one.topic, one.partition): where
            for where, one in self.left.items()
            if 0 <= self._reader.high_watermark(where) < one.end
        }
        if not places:
            return
        try:
            ends = await self._facts.offsets(places, LATEST, timeout_ms=2_000)
        except TidelogError as error:
            if not error.retriable:
                raise
            return  # the reader finds out what has become of it
        for place, where in places.items():
            one, end = self.ranges[where], ends[place].offset
            if end < one.end and self._reader.position(where) >= end:
                self._lost(TruncationError(one.topic, one.partition, offset=one.end, departs=end))
                self._end(where)

    async def _look_for_gaps(self) -> None:
        """The last offsets of a range may hold no record any more: then nothing comes, though all is there."""
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
                continue  # the reader finds out what has become of it
            (row,) = answer.partitions
            end = row.last_stable_offset if self._options.is_committed_only else row.high_watermark
            if error_in(row) is None and not row.data and not row.HasField("diverging") and end >= one.end:
                self._end(where)
