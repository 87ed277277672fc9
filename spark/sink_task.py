"""A task of the sink: sends Arrow batches with the worker's producer until every row is acknowledged."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from tidelog.model.errors import TidelogError
from tidelog.spark.sink_columns import tables_of
from tidelog.spark.sink_options import SinkOptions, producer_options

if TYPE_CHECKING:
    import pyarrow

    from tidelog.spark.sink_producer import TaskProducer

DELIVERIES_MAX = 64
"""Unacknowledged Arrow batches. The producer's `buffer_memory` bounds their bytes."""
PRODUCERS_MAX = 4
"""Producers that a worker caches for its next tasks."""
GIVE_UP_S = 30.0
"""How long a failed task waits for requests in flight, in seconds."""

_producers: dict[tuple[tuple[str, str], ...], TaskProducer] = {}


def write_rows(
    options: SinkOptions,
    batches: Iterable[pyarrow.RecordBatch],
    *,
    producer_of: Callable[[SinkOptions], Any] | None = None,
) -> int:
    """Write all rows and return their number, once every row is acknowledged.

    After a failure nothing more is sent (`TaskProducer`); it raises when nothing is in flight, after `GIVE_UP_S` at the
    latest. Spark then starts the next attempt, and no row of this one follows the first rows of that one, except from a
    broker that was silent for so long. If the query fails, Spark does not wait, and the next attempt may have started.
    """
    producer = (producer_of or _producer)(options)
    waiting: deque[Any] = deque()
    rows = 0
    given = iter(batches)
    try:
        while (batch := _next(given)) is not None:
            now_ms = int(time.time() * 1000)
            for topic, table in tables_of(batch, topic=options.topic, now_ms=now_ms, has_headers=options.has_headers):
                waiting.append(producer.send_many(topic, table))
                rows += table.num_rows
                while waiting and (len(waiting) >= DELIVERIES_MAX or waiting[0].done()):
                    waiting.popleft().result()
        while waiting:
            waiting.popleft().result()
    except _QueryFailedError as failure:
        _give_up(options, producer, 0.0)
        raise failure.error from None
    except BaseException:
        _give_up(options, producer, GIVE_UP_S)
        raise
    return rows


class _QueryFailedError(Exception):
    """A stage before the sink has failed."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def _next(batches: Iterator[pyarrow.RecordBatch]) -> pyarrow.RecordBatch | None:
    try:
        return next(batches, None)
    except BaseException as error:
        raise _QueryFailedError(error) from error


def _give_up(options: SinkOptions, producer: Any, timeout_s: float) -> None:
    _producers.pop(options.producer, None)
    with contextlib.suppress(TidelogError):  # the first error says more
        producer.abandon(timeout_s)


def _producer(options: SinkOptions) -> TaskProducer:
    """Return this worker's producer. Created after the fork: gRPC does not survive one."""
    from tidelog.spark.sink_producer import TaskProducer

    producer = _producers.pop(options.producer, None)
    if producer is None:
        while len(_producers) >= PRODUCERS_MAX:
            _producers.pop(next(iter(_producers))).close()
        producer = TaskProducer(producer_options(options))
    _producers[options.producer] = producer  # most recently used last
    return producer
