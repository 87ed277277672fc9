"""The sink for queries in update mode, which Spark does not allow for Python sinks.

counts.writeStream.outputMode("update").foreachBatch(
    tidelog.spark.foreach_batch({"bootstrap.servers": "localhost:9292", "topic": "counts"})
).start()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def foreach_batch(options: Mapping[str, Any] | None = None, /, **more: Any) -> Callable[[DataFrame, int], None]:
    """Return a function for `foreachBatch` that writes each micro-batch to the log. Takes the options of `writeStream`;
    those that are Python names may be keywords.

    Delivery is at least once, as with the sink: a batch that Spark runs again is written again. Update mode emits each
    row whenever it changes, so a topic with `cleanup.policy=compact` and the query's grouping key holds its state.
    """
    merged = {**(options or {}), **more}

    def write(frame: DataFrame, batch_id: int) -> None:
        frame.write.format("tidelog").options(**merged).mode("append").save()

    return write
