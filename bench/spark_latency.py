"""What our source adds to a micro-batch of few records, compared with a minimal Python source.

Two streaming queries into `format("noop")` alternate in one session of `tidelog.spark.session()`; each starts its next
micro-batch when the last one has ended. Meanwhile a producer in this process writes a record every `PAUSE_S` to each of
two partitions, in both turns, so that each of our micro-batches has some: our source asks the leader for the log end,
plans, fetches over gRPC and decodes, all in one task. The other one (`spark_ready`) also has one task, which yields one
prepared Arrow batch of one row. One broker shares the two cores with Spark.

A figure is the median duration of a micro-batch by Spark's `triggerExecution`, after `WARM` of each query and a whole
round; the difference within a round is what our source adds. The median round counts. If rounds differ by more than
that, the machine was too busy: so the minimum and the maximum are reported too, and the difference of the lower
quartiles of all micro-batches, which other load disturbs less.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from statistics import median, quantiles
from typing import TYPE_CHECKING

from bench.brokers_load import LIMIT_S
from bench.harness import Result, at_most
from bench.spark_load import Place, as_dict, make_topic, run_with_spark, take_turns, took_ms

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ROUNDS = 4
WARM, MEASURED = 15, 45
PAUSE_S = 0.02
PARTITIONS = 2
VALUE_BYTES = 100
TARGET_MS = 30.0


@contextmanager
def trickle(place: Place, topic: str) -> Iterator[None]:
    """Records come, one after the other."""
    import tidelog

    is_over = threading.Event()

    def write() -> None:
        with tidelog.Producer(place.cluster.bootstrap) as producer:
            while not is_over.wait(PAUSE_S):
                for partition in range(PARTITIONS):
                    producer.send(topic, b"." * VALUE_BYTES, partition=partition)

    thread = threading.Thread(target=write, name="trickle")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def durations_ms(place: Place, frame: DataFrame) -> list[float]:
    """Of the micro-batches that had rows."""
    checkpoint = str(place.home / place.fresh("checkpoint"))
    query = frame.writeStream.format("noop").option("checkpointLocation", checkpoint).start()
    deadline_s = time.monotonic() + LIMIT_S
    try:
        while (last := query.lastProgress) is None or as_dict(last)["batchId"] < WARM + MEASURED:
            assert time.monotonic() < deadline_s, "micro-batches go on"
            assert query.exception() is None, f"{query.exception()}"
            time.sleep(0.1)
        found = [as_dict(one) for one in query.recentProgress]
    finally:
        query.stop()
    return [took_ms(one) for one in found if one["batchId"] >= WARM and one["numInputRows"]]


def measure(place: Place) -> Iterator[Result]:
    topic = make_topic(place, "trickle", PARTITIONS)
    mine = {**place.ours, "subscribe": topic, "startingOffsets": "latest"}
    minimal = {"tasks": "1", "rows": "1", "arrow_rows": "1", "value_bytes": str(VALUE_BYTES)}
    with trickle(place, topic):
        found = take_turns(
            ROUNDS,
            {
                "ours": lambda: durations_ms(place, place.spark.readStream.format("tidelog").options(**mine).load()),
                "minimal": lambda: durations_ms(
                    place, place.spark.readStream.format("ready").options(**minimal).load()
                ),
            },
        )
    ours, others = (list(map(median, found[name])) for name in ("ours", "minimal"))
    added = [one - other for one, other in zip(ours, others, strict=True)]
    what = "Spark micro-batch of few records"
    yield Result(f"{what}: minimal source", median(others), "ms")
    yield Result(f"{what}: ours", median(ours), "ms")
    yield at_most(f"{what}: added", median(added), "ms", target=TARGET_MS, anchor="minimal source, side by side")
    yield Result(f"{what}: added, least of any round", min(added), "ms")
    yield Result(f"{what}: added, most of any round", max(added), "ms")
    quick, others_quick = (quantiles(chain(*found[name]), n=4)[0] for name in ("ours", "minimal"))
    yield Result(f"{what}: added to the quickest quarter", quick - others_quick, "ms")


def run() -> Iterator[Result]:
    return run_with_spark(measure)
