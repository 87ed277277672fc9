"""Programs log into topics; stream jobs sort the lines by the team that owns the program, store and count them.

python examples/spark/logger.py [HOST:PORT]

    loggers -> example-log-shop, example-log-bank     a `logging.Handler` for each program
    sort    -> example-for-till, example-for-vault    a topic for each team, by the table of owners in a topic
    store   -> files, SQLite, example-log-counts      each batch to all three; the counts go to a topic

Files and SQLite are written by batch number: a batch that Spark runs again after a crash replaces its earlier output.
"""

import json
import logging
import sqlite3
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import tidelog
import tidelog.spark

PROGRAMS = {"example-log-shop": "shop", "example-log-bank": "bank"}
OWNERS, COUNTS = "example-log-owners", "example-log-counts"
TEAMS = {"shop": "till", "bank": "vault"}
KIND = "program string, level string, text string"
TABLE = "CREATE TABLE IF NOT EXISTS counts (batch, topic, level, n, PRIMARY KEY (batch, topic, level))"
EARLIEST = {"startingOffsets": "earliest"}


class TopicHandler(logging.Handler):
    """Writes log records as JSON to a topic, keyed by the logger, so that its lines keep their order."""

    def __init__(self, producer: tidelog.Producer, topic: str) -> None:
        super().__init__()
        self._producer = producer
        self._topic = topic

    def emit(self, record: logging.LogRecord) -> None:
        line = {"program": record.name, "level": record.levelname, "text": record.getMessage()}
        self._producer.send(self._topic, json.dumps(line), key=record.name)


def log_lines(bootstrap: str, count: int) -> None:
    """Logs as two programs would."""
    with tidelog.Producer(bootstrap) as producer:
        for topic, program in PROGRAMS.items():
            logger = logging.getLogger(program)
            logger.setLevel(logging.INFO)
            logger.propagate = False
            handler = TopicHandler(producer, topic)
            logger.addHandler(handler)
            for number in range(count):
                level = logging.ERROR if number % 10 == 9 else logging.WARNING if number % 3 == 2 else logging.INFO
                logger.log(level, "line %d", number)
            logger.removeHandler(handler)
        for program, team in TEAMS.items():
            producer.send(OWNERS, team, key=program)


def stream(spark: SparkSession, bootstrap: str, **options: str) -> DataFrame:
    """Reads the lines of some topics, with the topic of each."""
    rows = spark.readStream.format("tidelog").options(**{"bootstrap.servers": bootstrap}, **EARLIEST, **options).load()
    return rows.select("topic", f.from_json(f.col("value").cast("string"), KIND).alias("line")).select(
        "topic", "line.*"
    )


def sort(spark: SparkSession, bootstrap: str, checkpoint: Path) -> None:
    """Copies lines from the topics of programs to those of their teams."""
    servers = {"bootstrap.servers": bootstrap}
    owners = (
        spark.read.format("tidelog")
        .options(**servers, subscribe=OWNERS)
        .load()
        .selectExpr("CAST(key AS STRING) AS program", "CAST(value AS STRING) AS team")
    )
    lines = stream(spark, bootstrap, subscribe=",".join(PROGRAMS)).drop("topic")
    sorted_out = lines.join(f.broadcast(owners), "program").selectExpr(
        "concat('example-for-', team) AS topic",
        "program AS key",
        "to_json(struct(program, level, text, team)) AS value",
    )
    query = (
        sorted_out.writeStream.format("tidelog")
        .options(**servers, checkpointLocation=str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def storing(bootstrap: str, files: Path, database: Path) -> Callable[[DataFrame, int], None]:
    """Returns a function for `foreachBatch`."""

    def write(batch: DataFrame, number: int) -> None:
        batch.persist()
        batch.write.mode("overwrite").json(str(files / f"batch={number}"))
        counts = batch.groupBy("topic", "level").count()
        rows = [(number, *row) for row in counts.collect()]
        connection = sqlite3.connect(database)
        with connection:
            connection.execute(TABLE)
            connection.executemany("INSERT OR REPLACE INTO counts VALUES (?, ?, ?, ?)", rows)
        connection.close()
        totals = counts.selectExpr("concat(topic, ' ', level) AS key", "CAST(count AS STRING) AS value")
        totals.write.format("tidelog").options(**{"bootstrap.servers": bootstrap}, topic=COUNTS).mode("append").save()
        batch.unpersist()

    return write


def store(spark: SparkSession, bootstrap: str, home: Path) -> None:
    lines = stream(spark, bootstrap, subscribePattern="example-for-.*")
    query = (
        lines.writeStream.foreachBatch(storing(bootstrap, home / "lines", home / "counts.db"))
        .option("checkpointLocation", str(home / "store"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def main(spark: SparkSession, bootstrap: str, directory: str, count: int = 60) -> list[str]:
    home = Path(directory)
    topics = [*PROGRAMS, *(f"example-for-{team}" for team in TEAMS.values()), COUNTS]
    with tidelog.Admin(bootstrap) as admin:
        made = [tidelog.NewTopic(name, partitions=2) for name in topics]
        admin.create_topics(
            [*made, tidelog.NewTopic(OWNERS, partitions=1, configs={"cleanup.policy": "compact"})], if_not_exists=True
        )
    log_lines(bootstrap, count)
    sort(spark, bootstrap, home / "sort")
    store(spark, bootstrap, home)
    with sqlite3.connect(home / "counts.db") as connection:
        rows = connection.execute("SELECT topic, level, sum(n) FROM counts GROUP BY topic, level ORDER BY topic, level")
        return [f"{topic}: {count} {level}" for topic, level, count in rows.fetchall()]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        for line in main(tidelog.spark.session(), sys.argv[1] if sys.argv[1:] else "localhost:9292", temporary):
            print(line)
