"""`read_arrow` reads a topic into one pyarrow table, for pandas, polars and DuckDB.

    orders = tidelog.read_arrow("orders", since="1h", bootstrap="localhost:9292")
    orders.to_pandas(); polars.from_arrow(orders); duckdb.sql("select count(*) from orders")

The read is bounded: it ends at the high watermarks taken when it starts. It commits nothing.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Unpack

from tidelog.client.arrow import NAMES, Part, arrow, schema_of, table_of
from tidelog.client.consumer.threaded import Consumer
from tidelog.client.durations import TimeLike, check_timeout, time_ms
from tidelog.client.errors import CallTimeoutError
from tidelog.client.options import PlainConsumerOptions
from tidelog.client.record import TopicPartition
from tidelog.world.real.clock import SystemClock

if TYPE_CHECKING:
    import pyarrow

OnRead = Callable[[int, int], None]
TIMEOUT_S = 60.0
_POLL_S = 0.5


def read_arrow(
    topic: str,
    since: TimeLike | None = None,
    until: TimeLike | None = None,
    *,
    partitions: Iterable[int] | None = None,
    columns: Sequence[str] | None = None,
    timeout: float = TIMEOUT_S,
    **options: Unpack[PlainConsumerOptions],
) -> pyarrow.Table:
    """Return records of a topic as columns: topic, partition, offset, timestamp, key, value, headers, or only
    `columns`.

    `since` (inclusive) and `until` (exclusive) bound the record timestamps: a duration ago ("90s", "1h", "2d"), a
    datetime, ISO 8601 text, or ms since 1970. The default is everything. `partitions` are partition numbers; the
    default is all. Records of a partition keep their order. Raises CallTimeoutError if no record comes for `timeout`
    seconds. `options` are those of a consumer; `bootstrap` is needed. Needs pyarrow.
    """
    return read_topic(
        topic, since, until, partitions=partitions, columns=columns, timeout=timeout, on_read=_ignore, **options
    )


def _ignore(_done: int, _total: int) -> None:
    pass


def read_topic(
    topic: str,
    since: TimeLike | None,
    until: TimeLike | None,
    *,
    partitions: Iterable[int] | None,
    columns: Sequence[str] | None,
    timeout: float,
    on_read: OnRead,
    **options: Unpack[PlainConsumerOptions],
) -> pyarrow.Table:
    """Like `read_arrow`; calls `on_read(done, total)`, in offsets, after every poll."""
    chosen = schema_of(columns).names
    now_ms = SystemClock().now_ms()
    bounds = [None if when is None else time_ms(when, now_ms) for when in (since, until)]
    check_timeout(timeout)
    chosen_options: PlainConsumerOptions = {"auto_offset_reset": "earliest", **options, "enable_auto_commit": False}
    with Consumer(**chosen_options) as consumer:
        names = consumer.partitions_for(topic)
        if partitions is not None:
            names = [TopicPartition(topic, number) for number in partitions]
        ends = consumer.end_offsets(*names)
        starts = consumer.beginning_offsets(*names)
        if bounds[0] is not None:
            # All records before the first recent one are too old; later ones may be too, and are filtered.
            first = consumer.offsets_for_times(dict.fromkeys(names, bounds[0]))
            starts |= {name: ends[name] if found is None else found.offset for name, found in first.items()}
        ends = {name: end for name, end in ends.items() if starts[name] < end}
        parts = _read(consumer, starts, ends, timeout, on_read)
    needed = [name for name in NAMES if name in chosen or name == "timestamp"]
    table = table_of(parts, chosen if bounds == [None, None] else needed)
    return _within(table, *bounds).select(chosen)


def _within(table: pyarrow.Table, since_ms: int | None, until_ms: int | None) -> pyarrow.Table:
    if since_ms is None and until_ms is None:
        return table
    pa = arrow()
    from pyarrow import compute

    times = table["timestamp"]
    mask = compute.is_valid(times)
    if since_ms is not None:
        mask = compute.and_kleene(mask, compute.greater_equal(times, pa.scalar(since_ms, times.type)))
    if until_ms is not None:
        mask = compute.and_kleene(mask, compute.less(times, pa.scalar(until_ms, times.type)))
    return table.filter(mask)


def _read(
    consumer: Consumer,
    starts: dict[TopicPartition, int],
    ends: dict[TopicPartition, int],
    timeout: float,
    on_read: OnRead,
) -> list[Part]:
    """Read each partition from its start to its end offset."""
    consumer.assign(ends)
    for name in ends:
        consumer.seek(name, starts[name])
    parts_of: dict[TopicPartition, list[Part]] = {name: [] for name in ends}
    left = dict(ends)
    total = sum(end - starts[name] for name, end in ends.items())
    moved_s = time.monotonic()
    while left:
        parts = consumer._poll_parts(_POLL_S)
        if parts:
            moved_s = time.monotonic()
        for topic, number, columns, start, end in parts:
            name = TopicPartition(topic, number)
            cut = min(end, bisect_left(columns.offsets, ends[name]))
            if cut > start:
                parts_of[name].append((topic, number, columns, start, cut))
        on_read(total - sum(max(0, end - consumer.position(name)) for name, end in left.items()), total)
        for name in [name for name, end in left.items() if consumer.position(name) >= end]:
            del left[name]
            consumer.pause(name)
        if left and time.monotonic() - moved_s > timeout:
            stuck = ", ".join(f"{name} at {consumer.position(name)} of {end}" for name, end in left.items())
            raise CallTimeoutError(f"no data for {timeout:g} s: {stuck}")
    return [part for name in sorted(parts_of) for part in parts_of[name]]
