"""`read_arrow`: what a topic holds, as one pyarrow table, for pandas, polars and DuckDB.

    orders = tidelog.read_arrow("orders", since="1h")
    orders.to_pandas(); polars.from_arrow(orders); duckdb.sql("select count(*) from orders")

Bounded: it ends at the high watermarks of the moment when it began.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tidelog.client.arrow import NAMES, Part, arrow, schema_of, table_of
from tidelog.client.consumer import Consumer
from tidelog.client.consumer_front import When
from tidelog.client.durations import time_ms
from tidelog.client.record import TopicPartition
from tidelog.model.errors import CallTimeoutError
from tidelog.world.real.clock import SystemClock

if TYPE_CHECKING:
    import pyarrow

BOOTSTRAP = "localhost:9292"
OnRead = Callable[[int, int], None]
STALL_S = 60.0
_POLL_MS = 500


def read_arrow(
    topic: str,
    since: When | None = None,
    until: When | None = None,
    *,
    partitions: Iterable[int] | None = None,
    columns: Sequence[str] | None = None,
    bootstrap: object = BOOTSTRAP,
    **options: Any,
) -> pyarrow.Table:
    """Records of a topic as columns: topic, partition, offset, timestamp, key, value, headers, or only `columns`.

    `since` and `until` are so long ago ("90s", "1h", "2d"), a datetime, ISO 8601 text, or ms since 1970: records whose
    timestamp is at or after the one and before the other. Without them all there is. `partitions` are numbers; without
    them all. Within a partition records stand in their order. `options` are those of a consumer. Needs pyarrow.
    """
    return read_topic(
        topic, since, until, partitions=partitions, columns=columns, bootstrap=bootstrap, on_read=_ignore, **options
    )


def _ignore(_done: int, _total: int) -> None:
    pass


def read_topic(
    topic: str,
    since: When | None,
    until: When | None,
    *,
    partitions: Iterable[int] | None,
    columns: Sequence[str] | None,
    bootstrap: object,
    on_read: OnRead,
    **options: Any,
) -> pyarrow.Table:
    """`read_arrow` that calls `on_read(done, total)`, in offsets, after every poll."""
    chosen = schema_of(columns).names
    now_ms = SystemClock().now_ms()
    bounds = [None if when is None else time_ms(when, now_ms) for when in (since, until)]
    with Consumer(bootstrap, **{"auto_offset_reset": "earliest", **options}) as consumer:
        names = consumer.partitions_for(topic)
        if partitions is not None:
            names = [TopicPartition(topic, number) for number in partitions]
        ends = consumer.end_offsets(*names)
        starts = consumer.beginning_offsets(*names)
        if bounds[0] is not None:
            # Nothing before the first record of that time is as young; what follows may be older, and is left out.
            first = consumer.offsets_for_times(dict.fromkeys(names, bounds[0]))
            starts |= {name: ends[name] if found is None else found.offset for name, found in first.items()}
        parts = _read(consumer, starts, {name: end for name, end in ends.items() if starts[name] < end}, on_read)
    needed = [name for name in NAMES if name in chosen or name == "timestamp"]
    table = table_of(parts, chosen if bounds == [None, None] else needed)
    return _within(table, *bounds).select(chosen)


def _within(table: pyarrow.Table, since_ms: int | None, until_ms: int | None) -> pyarrow.Table:
    if since_ms is None and until_ms is None:
        return table
    pa = arrow()
    from pyarrow import compute

    times = table["timestamp"]
    wanted = compute.is_valid(times)
    if since_ms is not None:
        wanted = compute.and_kleene(wanted, compute.greater_equal(times, pa.scalar(since_ms, times.type)))
    if until_ms is not None:
        wanted = compute.and_kleene(wanted, compute.less(times, pa.scalar(until_ms, times.type)))
    return table.filter(wanted)


def _read(
    consumer: Consumer, starts: dict[TopicPartition, int], ends: dict[TopicPartition, int], on_read: OnRead
) -> list[Part]:
    """From the starts to the ends of these, each partition in one go."""
    consumer.assign(ends)
    for name in ends:
        consumer.seek(name, starts[name])
    found: dict[TopicPartition, list[Part]] = {name: [] for name in ends}
    left = dict(ends)
    total = sum(end - starts[name] for name, end in ends.items())
    moved_s = time.monotonic()
    while left:
        parts = consumer.poll_parts(_POLL_MS)
        if parts:
            moved_s = time.monotonic()
        for topic, number, columns, start, end in parts:
            name = TopicPartition(topic, number)
            cut = min(end, bisect_left(columns.offsets, ends[name]))
            if cut > start:
                found[name].append((topic, number, columns, start, cut))
        on_read(total - sum(max(0, end - consumer.position(name)) for name, end in left.items()), total)
        for name in [name for name, end in left.items() if consumer.position(name) >= end]:
            del left[name]
            consumer.pause(name)
        if left and time.monotonic() - moved_s > STALL_S:
            stuck = ", ".join(f"{name} at {consumer.position(name)} of {end}" for name, end in left.items())
            raise CallTimeoutError(f"nothing came for {STALL_S:.0f} s: {stuck}")
    return [part for name in sorted(found) for part in found[name]]
