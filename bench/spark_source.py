"""How fast Spark gets records of the log: `format("tidelog")` into `format("noop")`, beside a ready-made Arrow source.

Both are streaming queries of `Trigger.AvailableNow` in one session, with the same schema (seven columns, keys of 8
bytes), the same rows in each micro-batch and in each of its two tasks; they take turns. The other side (`spark_ready`)
has its Arrow batches in its workers' memory, as large as ours are: the ceiling of any source in Python. Ours reads a
topic of four partitions from one broker, which shares the two cores with Spark: what the broker takes is part of it.

A figure is rows by the duration of a micro-batch as Spark tells it (`triggerExecution`), the first of each query left
out: the best one of each side, since noise only ever adds, and the middle ones of each round side by side. A round
before those that count warms the JVM up.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.harness import Result
from bench.spark_load import (
    TASKS,
    Place,
    beside,
    fill,
    make_topic,
    micro_batches,
    rates,
    ready_options,
    run_with_spark,
    take_turns,
)

ROUNDS = 3
BATCHES = 6
TARGET = 0.6
SIZES = {100: (600_000, 10_000), 1_000: (160_000, 4_000)}
"""Bytes of a value: rows of a micro-batch, and of an Arrow batch of the ready-made source, as large as ours are."""


def measure_size(place: Place, value_bytes: int) -> Iterator[Result]:
    rows, arrow_rows = SIZES[value_bytes]
    topic = make_topic(place, f"values-{value_bytes}")
    fill(place, topic, rows=rows * BATCHES, value_bytes=value_bytes)

    def ours() -> list[float]:
        options = {
            **place.ours,
            "subscribe": topic,
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": str(rows),
            "targetBytesPerTask": "1g",
            "minPartitions": str(TASKS),
        }
        frame = place.spark.readStream.format("tidelog").options(**options).load()
        return rates(micro_batches(frame, place, "noop", {}), rows=rows, batches=BATCHES)

    def ready() -> list[float]:
        options = ready_options(rows=rows, arrow_rows=arrow_rows, value_bytes=value_bytes, batches=BATCHES)
        frame = place.spark.readStream.format("ready").options(**options).load()
        return rates(micro_batches(frame, place, "noop", {}), rows=rows, batches=BATCHES)

    found = take_turns(ROUNDS, {"ours": ours, "ready": ready})
    what = f"Spark source to noop, values of {value_bytes:,} bytes"
    yield from beside(what, "ready-made Arrow", ours=found["ours"], theirs=found["ready"], target=TARGET)


def measure(place: Place) -> Iterator[Result]:
    for value_bytes in SIZES:
        yield from measure_size(place, value_bytes)


def run() -> Iterator[Result]:
    return run_with_spark(measure)
