"""Checks card payments by rules: reads a shop's transactions, writes one decision for each.

python examples/spark/fraud.py [HOST:PORT]

Reads the topic `example-transactions`, writes to `example-approvals`, keyed by transaction. A decision takes as long as
a micro-batch; for decisions within milliseconds use a `tidelog.Consumer`.
"""

import json
import sys
import tempfile

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import tidelog
import tidelog.spark

TRANSACTIONS, APPROVALS = "example-transactions", "example-approvals"
AMOUNT_MAX = 2_000
STOLEN = ("card-13", "card-17")
KIND = "id bigint, card string, amount bigint, country string, home string"


def decide(transactions: DataFrame, stolen: DataFrame) -> DataFrame:
    """The first rule that matches sets the reason."""
    reason = (
        f.when(f.col("is_stolen"), "stolen card")
        .when(f.col("amount") <= 0, "no amount")
        .when(f.col("amount") > AMOUNT_MAX, "over the limit")
        .when((f.col("country") != f.col("home")) & (f.col("amount") > AMOUNT_MAX / 4), "far from home")
        .otherwise("")
    )
    joined = transactions.join(f.broadcast(stolen), "card", "left").withColumn(
        "is_stolen", f.coalesce("is_stolen", f.lit(False))
    )
    return joined.withColumn("reason", reason).withColumn("is_approved", f.col("reason") == "")


def payments(count: int) -> list[dict[str, object]]:
    return [
        {
            "id": number,
            "card": f"card-{number % 50}",
            "amount": number * 37 % 2_400 - 20,
            "country": "NO" if number % 5 else "BR",
            "home": "NO",
        }
        for number in range(1, count + 1)
    ]


def main(spark: SparkSession, bootstrap: str, directory: str, count: int = 1_000) -> list[str]:
    with tidelog.Admin(bootstrap) as admin:
        admin.create_topics(
            [tidelog.NewTopic(name, partitions=3) for name in (TRANSACTIONS, APPROVALS)], if_not_exists=True
        )
    with tidelog.Producer(bootstrap) as producer:
        for payment in payments(count):
            producer.send(TRANSACTIONS, json.dumps(payment), key=str(payment["card"]))
    servers = {"bootstrap.servers": bootstrap}
    rows = (
        spark.readStream.format("tidelog")
        .options(**servers, subscribe=TRANSACTIONS, startingOffsets="earliest")
        .load()
        .select(f.from_json(f.col("value").cast("string"), KIND).alias("row"))
        .select("row.*")
    )
    stolen = spark.createDataFrame([(card, True) for card in STOLEN], "card string, is_stolen boolean")
    decided = decide(rows, stolen).selectExpr(
        "CAST(id AS STRING) AS key", "to_json(struct(id, card, amount, is_approved, reason)) AS value"
    )
    query = (
        decided.writeStream.format("tidelog")
        .options(**servers, topic=APPROVALS, checkpointLocation=f"{directory}/fraud")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    # The shop reads the decisions.
    found: dict[str, int] = {}
    answered: list[int] = []
    for value in tidelog.read_arrow(APPROVALS, columns=["value"], bootstrap=bootstrap)["value"].to_pylist():
        row = json.loads(value)
        answered.append(row["id"])
        found[row["reason"] or "approved"] = found.get(row["reason"] or "approved", 0) + 1
    missing = set(range(1, count + 1)) - set(answered)
    lines = [f"{reason}: {number}" for reason, number in sorted(found.items())]
    return [*lines, f"without a decision: {len(missing)}, with two: {len(answered) - len(set(answered))}"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        for line in main(tidelog.spark.session(), sys.argv[1] if sys.argv[1:] else "localhost:9292", temporary):
            print(line)
