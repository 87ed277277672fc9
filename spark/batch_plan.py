"""Plans a batch read: resolves its bounds to offsets, applies its filters and splits the ranges into tasks."""

from __future__ import annotations

import logging

from tidelog.client.errors import OptionError
from tidelog.spark.client_cache import cached_client
from tidelog.spark.driver import resolve, tasks_of
from tidelog.spark.errors import DataLossError
from tidelog.spark.metadata_queries import MetadataQueries, partition_id
from tidelog.spark.offsets import ReadRange
from tidelog.spark.options import SourceOptions
from tidelog.spark.pushdown import Narrowing

LOGGER = logging.getLogger(__name__)


def plan_batch(options: SourceOptions, narrowing: Narrowing) -> list[tuple[ReadRange, ...]]:
    """Return the ranges of each task. Raises OptionError for bounds outside the logs or in the wrong order."""
    client = cached_client(options)
    queries = MetadataQueries(client.cluster, options.subscription, is_committed_only=options.is_committed_only)
    return client.run(_plan(queries, options, narrowing))


async def _plan(queries: MetadataQueries, options: SourceOptions, narrowing: Narrowing) -> list[tuple[ReadRange, ...]]:
    def lost(error: DataLossError) -> None:
        if options.fail_on_data_loss:
            raise error
        LOGGER.warning("data loss ignored, as failOnDataLoss=false: %s", error)

    starts = await resolve(queries, options, options.starting, lost=lost)
    ends = await resolve(queries, options, options.ending, lost=lost)
    ranges = []
    for name, rows in ends.items():
        begin = starts.get(name)
        if begin is None or begin.topic_id != rows.topic_id:
            continue  # created, or recreated, between the two queries
        for number, end in rows.marks.items():
            start = begin.marks.get(number)
            if start is None:
                continue
            is_asked_for = number in options.ending.places.get(name, {})
            if start.offset > end.offset and is_asked_for:
                raise OptionError(
                    f"{options.ending.option}: {name}-{number} is to be read from offset {start.offset} to {end.offset}"
                )
            ranges.append(ReadRange(name, rows.topic_id, number, start.offset, end.offset, max(start.epoch, end.epoch)))
    return await tasks_of(queries, options, await _narrowed(queries, narrowing, ranges), {})


async def _narrowed(queries: MetadataQueries, narrowing: Narrowing, ranges: list[ReadRange]) -> list[ReadRange]:
    left = narrowing.narrowed(ranges)
    if narrowing.since_ms is None or not left:
        return left
    places = {(one.topic, one.partition): partition_id(one.topic_id, one.partition) for one in left}
    first = await queries.offsets(places, narrowing.since_ms)
    narrowed = []
    for one in left:
        offset = first[one.topic, one.partition].offset
        start = one.end if offset < 0 else max(one.start, offset)
        if start < one.end:
            narrowed.append(ReadRange(one.topic, one.topic_id, one.partition, start, one.end, one.epoch))
    return narrowed
