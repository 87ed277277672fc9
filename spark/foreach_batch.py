"""The sink of queries in update mode, which Spark allows to no sink written in Python.

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
    """A function for `foreachBatch` that writes each micro-batch to the log. Options as of `writeStream`; those that
    are Python names may be keywords.

    At least once, as the sink itself: a batch that Spark runs again is written again. Update mode gives out each row
    as often as it changes, so that a topic with `cleanup.policy=compact`, keyed as the query groups, keeps its state.
    """
    given = {**(options or {}), **more}

    def write(frame: DataFrame, batch_id: int) -> None:
        frame.write.format("tidelog").options(**given).mode("append").save()

    return write
