"""Counts views in windows of ten minutes. Data that is at most five minutes late counts, later data does not.

python examples/spark/late_counts.py [HOST:PORT]

Reads the topic `example-views`, writes to `example-view-counts`.
"""

import sys
import tempfile

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import tidelog
import tidelog.spark

VIEWS, COUNTS = "example-views", "example-view-counts"
MINUTE_MS = 60_000
BATCH = 3
"""Records of a micro-batch, so that each row below is one; the watermark moves from batch to batch."""

STORY = (
    (1, 8, 12),  # the newest is minute 12: the watermark is minute 7
    (9, 12, 13),  # minute 9 is late, but its window is still open
    (26, 27, 27),  # the watermark is minute 22,
    (29, 29, 29),  # and with the next batch the windows 0 and 10 are closed
    (5, 19, 28),  # minute 5 and minute 19 are too late
    (60, 60, 60),  # closes the window 20
)


def counts(views: DataFrame) -> DataFrame:
    """Emits a window when it is closed."""
    return (
        views.withWatermark("at", "5 minutes")
        .groupBy(f.window("at", "10 minutes").alias("window"))
        .count()
        .selectExpr("CAST(unix_millis(window.start) AS STRING) AS key", "CAST(count AS STRING) AS value")
    )


def main(spark: SparkSession, bootstrap: str, directory: str) -> list[str]:
    with tidelog.Admin(bootstrap) as admin:
        admin.create_topics([tidelog.NewTopic(name, partitions=1) for name in (VIEWS, COUNTS)], if_not_exists=True)
    with tidelog.Producer(bootstrap) as producer:
        for minute in (minute for batch in STORY for minute in batch):
            producer.send(VIEWS, "seen", timestamp_ms=minute * MINUTE_MS)
    servers = {"bootstrap.servers": bootstrap}
    views = (
        spark.readStream.format("tidelog")
        .options(**servers, subscribe=VIEWS, startingOffsets="earliest", maxOffsetsPerTrigger=str(BATCH))
        .load()
        .selectExpr("timestamp AS at")
    )
    query = (
        counts(views)
        .writeStream.format("tidelog")
        .options(**servers, topic=COUNTS, checkpointLocation=f"{directory}/late")
        .outputMode("append")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    found = tidelog.read_arrow(COUNTS, columns=["key", "value"], bootstrap=bootstrap).to_pylist()
    return [
        f"minutes {int(row['key']) // MINUTE_MS} to {int(row['key']) // MINUTE_MS + 9}: {int(row['value'])} views"
        for row in sorted(found, key=lambda row: int(row["key"]))
    ]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        for line in main(tidelog.spark.session(), sys.argv[1] if sys.argv[1:] else "localhost:9292", temporary):
            print(line)
