"""A Spark driver of its own, to be killed: it reads a topic, a third of its tasks fail once, and each batch is a line.

counting_driver.py MASTER BOOTSTRAP TOPIC CHECKPOINT OUT
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tidelog.spark


def fail_sometimes(batches: Iterator[Any]) -> Iterator[Any]:
    from pyspark import TaskContext

    context = TaskContext.get()
    is_failing = context is not None and context.attemptNumber() == 0 and random.random() < 0.33
    for batch in batches:
        yield batch
        if is_failing:
            raise RuntimeError("a task that was told to fail, after it has read")


def main(master: str, bootstrap: str, topic: str, checkpoint: str, out: Path) -> None:
    conf = {"spark.ui.enabled": False, "spark.task.maxFailures": 8, "spark.executor.memory": "512m"}
    spark = tidelog.spark.session("counting", master=master, conf=conf)
    spark.sparkContext.setLogLevel("FATAL")
    spark.dataSource.register(tidelog.spark.TidelogDataSource)
    options = {
        "bootstrap.servers": bootstrap,
        "subscribe": topic,
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": "400",
        "minPartitions": "4",
    }
    frame = spark.readStream.format("tidelog").options(**options).load().select("partition", "offset", "value")

    def write(batch: Any, number: int) -> None:
        rows = [(row.partition, row.offset, bytes(row.value).decode()) for row in batch.collect()]
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps([number, rows]) + "\n")

    mapped = frame.mapInArrow(fail_sometimes, frame.schema)
    query = mapped.writeStream.foreachBatch(write).option("checkpointLocation", checkpoint).start()
    query.awaitTermination()


if __name__ == "__main__":
    _, given_master, given_bootstrap, given_topic, given_checkpoint, given_out = sys.argv
    main(given_master, given_bootstrap, given_topic, given_checkpoint, Path(given_out))
