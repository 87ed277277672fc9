"""One task of the sink: Arrow batches into the producer of its worker, until every row is acknowledged."""

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
"""Arrow batches that are not acknowledged yet. The producer's `buffer_memory` bounds their bytes."""
PRODUCERS_MAX = 4
"""That a worker keeps for its next tasks."""
GIVE_UP_S = 30.0
"""How long a task that fails waits for what it has on the wire."""

_producers: dict[tuple[tuple[str, str], ...], TaskProducer] = {}


def write_rows(
    options: SinkOptions,
    batches: Iterable[pyarrow.RecordBatch],
    *,
    producer_of: Callable[[SinkOptions], Any] | None = None,
) -> int:
    """How many rows were written. It returns when every row is acknowledged.

    If one is not, nothing is sent any more (`TaskProducer`), and it raises when nothing is on the wire any more, after
    `GIVE_UP_S` at the latest: Spark begins the next attempt then, and nothing of this one comes behind the first rows
    of that, but for what a broker that was silent so long has still to take. If it is the query that fails Spark does
    not wait, and the next attempt may have begun.
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
    """What came before the sink has failed."""

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
    with contextlib.suppress(TidelogError):  # the error that brought us here tells more
        producer.abandon(timeout_s)


def _producer(options: SinkOptions) -> TaskProducer:
    """That of this worker. Made here, after the worker was forked: gRPC does not live through a fork."""
    from tidelog.spark.sink_producer import TaskProducer

    found = _producers.pop(options.producer, None)
    if found is None:
        while len(_producers) >= PRODUCERS_MAX:
            _producers.pop(next(iter(_producers))).close()
        found = TaskProducer(producer_options(options))
    _producers[options.producer] = found  # last: the one that was used longest ago goes first
    return found
