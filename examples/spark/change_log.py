"""Turns a change log into a table: the newest value of each key of a compacted topic, without deleted keys.

python examples/spark/change_log.py [HOST:PORT]
"""

import sys
import tempfile

from pyspark.sql import DataFrame, SparkSession

import tidelog
import tidelog.spark

TOPIC = "example-customers"


def current(changes: DataFrame) -> DataFrame:
    """Returns the table as of the newest change. A key is always in one partition, so its offsets order its changes."""
    newest = changes.groupBy("key").agg({"offset": "max"}).withColumnRenamed("max(offset)", "offset")
    return (
        changes.join(newest, ["key", "offset"])
        .where("value IS NOT NULL")  # null deletes the key
        .selectExpr("CAST(key AS STRING) AS name", "CAST(value AS STRING) AS city")
    )


def main(spark: SparkSession, bootstrap: str, directory: str) -> list[str]:
    with tidelog.Admin(bootstrap) as admin:
        compacted = tidelog.NewTopic(TOPIC, partitions=2, configs={"cleanup.policy": "compact"})
        admin.create_topics([compacted], if_not_exists=True)
    with tidelog.Producer(bootstrap) as producer:
        for name, city in [("ada", "Oslo"), ("ben", "Lima"), ("ada", "Rome"), ("cleo", "Bern"), ("ben", None)]:
            producer.send(TOPIC, city, key=name)
    changes = (
        spark.read.format("tidelog")
        .options(**{"bootstrap.servers": bootstrap, "subscribe": TOPIC, "startingOffsets": "earliest"})
        .load()
    )
    path = f"{directory}/customers"
    current(changes).write.mode("overwrite").parquet(path)
    return [f"{row.name} lives in {row.city}" for row in spark.read.parquet(path).orderBy("name").collect()]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        for line in main(tidelog.spark.session(), sys.argv[1] if sys.argv[1:] else "localhost:9292", temporary):
            print(line)
