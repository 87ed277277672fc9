"""How fast Spark's rows go into the log: the streaming sink `format("tidelog")`, beside one that drops Arrow batches.

Both are streaming queries of `Trigger.AvailableNow` in one session that take turns; both get the same rows, keys of 8
bytes and values, of the ready-made Arrow source (`spark_ready`), in two tasks. The other side takes each Arrow batch
from Spark and does nothing: the ceiling of any sink in Python. Ours encodes the rows, and a task ends when one broker
has stored all of them on disk (four partitions, one replica, synced as it comes, acks=all). The broker shares the two
cores with Spark.

A figure is rows by the duration of a micro-batch as Spark tells it (`triggerExecution`), the first of each query left
out: the best one of each side, since noise only ever adds, and the middle ones of each round side by side. A round
before those that count warms the JVM up.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.harness import Result
from bench.spark_load import (
    Place,
    beside,
    drop_topic,
    make_topic,
    micro_batches,
    rates,
    ready_options,
    run_with_spark,
    take_turns,
)

ROUNDS = 3
BATCHES = 5
TARGET = 0.5
SIZES = {100: (400_000, 10_000), 1_000: (100_000, 4_000)}
"""Bytes of a value: rows of a micro-batch, and of an Arrow batch of the source."""


def measure_size(place: Place, value_bytes: int) -> Iterator[Result]:
    rows, arrow_rows = SIZES[value_bytes]
    options = ready_options(rows=rows, arrow_rows=arrow_rows, value_bytes=value_bytes, batches=BATCHES)
    frame = place.spark.readStream.format("ready").options(**options).load().select("key", "value")

    def ours() -> list[float]:
        topic = make_topic(place, f"rows-{value_bytes}")
        found = micro_batches(frame, place, "tidelog", {**place.ours, "topic": topic})
        drop_topic(place, topic)
        return rates(found, rows=rows, batches=BATCHES)

    def dropped() -> list[float]:
        return rates(micro_batches(frame, place, "ready", {}), rows=rows, batches=BATCHES)

    found = take_turns(ROUNDS, {"ours": ours, "dropped": dropped})
    what = f"Spark sink, values of {value_bytes:,} bytes"
    yield from beside(what, "dropped", ours=found["ours"], theirs=found["dropped"], target=TARGET)


def measure(place: Place) -> Iterator[Result]:
    for value_bytes in SIZES:
        yield from measure_size(place, value_bytes)


def run() -> Iterator[Result]:
    return run_with_spark(measure)
