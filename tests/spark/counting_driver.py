"""A query that reads a topic and makes a line of each batch, while tasks fail: the first of each batch, and others by
chance, once each. As a program it is a Spark driver of its own, with executors of their own, to be killed.

counting_driver.py BOOTSTRAP TOPIC CHECKPOINT OUT
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tidelog.spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

MASTER = "local-cluster[1,2,512]"
BATCH = 400
JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""As in conftest.py."""


def count(
    spark: SparkSession, bootstrap: str, topic: str, checkpoint: str, out: Path, *, now: bool = False
) -> StreamingQuery:
    """Started; `now`: to the end of what is there."""

    # Within this function it goes to the workers by value: they cannot import this module.
    def fail_once(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None, "it runs in a task"
        is_failing = context.attemptNumber() == 0 and (context.partitionId() == 0 or random.random() < 0.33)
        for batch in batches:
            yield batch
            if is_failing:
                raise RuntimeError("a task that fails on purpose, after it has read")

    def write(batch: Any, number: int) -> None:
        rows = [(row.partition, row.offset, bytes(row.value).decode()) for row in batch.collect()]
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps([number, rows]) + "\n")

    options = {
        "bootstrap.servers": bootstrap,
        "subscribe": topic,
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": str(BATCH),
        "minPartitions": "3",
    }
    frame = spark.readStream.format("tidelog").options(**options).load().select("partition", "offset", "value")
    writer = frame.mapInArrow(fail_once, frame.schema).writeStream.foreachBatch(write)
    writer = writer.option("checkpointLocation", checkpoint)
    return (writer.trigger(availableNow=True) if now else writer).start()


def main(bootstrap: str, topic: str, checkpoint: str, out: Path) -> None:
    conf = {
        "spark.ui.enabled": False,
        "spark.executor.memory": "512m",
        "spark.driver.extraJavaOptions": JAVA,
        "spark.executor.extraJavaOptions": JAVA,
    }
    spark = tidelog.spark.session("counting", master=MASTER, conf=conf)
    spark.sparkContext.setLogLevel("FATAL")
    spark.dataSource.register(tidelog.spark.TidelogDataSource)  # by hand, as where the package is not installed
    count(spark, bootstrap, topic, checkpoint, out).awaitTermination()


if __name__ == "__main__":
    _, given_bootstrap, given_topic, given_checkpoint, given_out = sys.argv
    main(given_bootstrap, given_topic, given_checkpoint, Path(given_out))
