"""Writes files to a topic and the topic to Parquet: two independent streams, each with a checkpoint.

python examples/spark/files_to_parquet.py [HOST:PORT]
"""

import sys
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

import tidelog
import tidelog.spark

TOPIC = "example-lines"
KIND = "sensor string, celsius double"


def write_files(directory: Path) -> None:
    directory.mkdir(parents=True)
    for day in range(3):
        rows = [f'{{"sensor": "s{number}", "celsius": {day * 10 + number}.5}}' for number in range(4)]
        (directory / f"day-{day}.json").write_text("\n".join(rows) + "\n", encoding="utf-8")


def into_the_log(spark: SparkSession, bootstrap: str, source: Path, checkpoint: Path) -> None:
    rows = spark.readStream.schema(KIND).json(str(source)).selectExpr("sensor AS key", "to_json(struct(*)) AS value")
    query = (
        rows.writeStream.format("tidelog")
        .options(**{"bootstrap.servers": bootstrap}, topic=TOPIC, checkpointLocation=str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def into_parquet(spark: SparkSession, bootstrap: str, target: Path, checkpoint: Path) -> None:
    rows = (
        spark.readStream.format("tidelog")
        .options(**{"bootstrap.servers": bootstrap}, subscribe=TOPIC, startingOffsets="earliest")
        .load()
        .select(f.from_json(f.col("value").cast("string"), KIND).alias("row"), "topic", "partition", "offset")
        .select("row.*", "topic", "partition", "offset")
    )
    query = (
        rows.writeStream.format("parquet")
        .option("path", str(target))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def main(spark: SparkSession, bootstrap: str, directory: str) -> list[str]:
    home = Path(directory)
    with tidelog.Admin(bootstrap) as admin:
        admin.create_topics([tidelog.NewTopic(TOPIC, partitions=2)], if_not_exists=True)
    write_files(home / "in")
    into_the_log(spark, bootstrap, home / "in", home / "files-checkpoint")
    into_parquet(spark, bootstrap, home / "out", home / "log-checkpoint")
    found = spark.read.parquet(str(home / "out")).groupBy("sensor").agg(f.count("*"), f.avg("celsius"))
    return [f"{sensor}: {count} rows, {mean} degrees" for sensor, count, mean in sorted(found.collect())]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        for line in main(tidelog.spark.session(), sys.argv[1] if sys.argv[1:] else "localhost:9292", temporary):
            print(line)
