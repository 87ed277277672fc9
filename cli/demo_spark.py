"""`tidelog demo spark`: Spark reads a topic as a stream and writes its result to another one.

    start three nodes -> orders into a topic -> a streaming query: count and sum by shop -> into a topic
      -> read that one back, print it, compare it with what was written

Without PySpark or Java it says what to install and succeeds, unless REQUIRE_SPARK asks for a failure.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import tidelog
from tidelog.cli.demo import NODES, STEP_TIMEOUT_S, DemoFailedError, data_directory, reason
from tidelog.cli.exit_codes import EXIT_OK
from tidelog.cli.main import CommandError, UsageError
from tidelog.spark import foreach_batch, session
from tidelog.spark.java import NoJavaError, java_home
from tidelog.testing import LocalCluster

ORDERS = "orders"
TOTALS = "totals"
SHOPS = ("Bergen", "Lima", "Osaka", "Porto", "Tallinn")
PARTITIONS = 3

say = partial(print, flush=True)

Totals = dict[str, tuple[int, int]]
"""By shop: number of orders, sum of amounts."""


def order(number: int) -> tuple[str, int]:
    """Return the shop and the amount of an order."""
    return SHOPS[number % len(SHOPS)], number * 7 % 90 + 10


def missing() -> str | None:
    """Return what is missing and how to get it; None if nothing is."""
    wanted = []
    if importlib.util.find_spec("pyspark") is None:
        wanted.append("PySpark (make setup-spark, or: pip install 'tidelog[spark-local]')")
    try:
        java_home()
    except NoJavaError as error:
        wanted.append(f"a Java ({error})")
    return " and ".join(wanted) or None


def run(options: argparse.Namespace) -> int:
    if options.records < len(SHOPS):
        raise UsageError(f"--records: at least {len(SHOPS)}")
    say("Now Spark, over the same kind of cluster. This needs PySpark and a Java, 17 or 21.")
    lack = missing()
    if lack is not None:
        if os.environ.get("REQUIRE_SPARK"):
            raise CommandError(f"REQUIRE_SPARK is set, and there is not everything that Spark needs: {lack}")
        say(f"Not shown, for it lacks {lack}.")
        return EXIT_OK
    data = data_directory(options.data)
    began_s = time.monotonic()
    try:
        _run(data, options.records)
    except (KeyboardInterrupt, BrokenPipeError):
        if options.data is None:
            shutil.rmtree(data, ignore_errors=True)
        raise
    except Exception as error:
        first = DemoFailedError(f"{type(error).__name__}: {str(error).splitlines()[0]}") if str(error) else error
        raise CommandError(f"the demo failed: {reason(first)}\nSpark's log: {data}/spark.log") from error
    if options.data is None:
        shutil.rmtree(data, ignore_errors=True)  # Spark's own processes may still be writing their last lines
    kept = "" if options.data is None else f" Its files are in {data}."
    say(f"Done in {time.monotonic() - began_s:.0f} s.{kept}")
    return EXIT_OK


def _run(data: Path, records: int) -> None:
    failure: BaseException | None = None
    with LocalCluster(NODES, data=data / "nodes", start=False) as cluster, _own_log(data / "spark.log"):
        try:
            _report_story(cluster, data, records)
        except BaseException as error:
            failure = error  # raised below: in here the cluster would print all of its logs
    if failure is not None:
        raise failure


@contextlib.contextmanager
def _own_log(path: Path) -> Iterator[None]:
    """Redirect output: Spark and its workers print much, and inherit this process's streams."""
    sys.stderr.flush()
    kept = os.dup(2)
    with path.open("wb") as log:
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


def _report_story(cluster: LocalCluster, data: Path, records: int) -> None:
    cluster.start_all(timeout=STEP_TIMEOUT_S)
    with tidelog.Admin(cluster.bootstrap) as admin:
        admin.create_topic(ORDERS, partitions=PARTITIONS, replication_factor=NODES)
        admin.create_topic(TOTALS, partitions=1, replication_factor=NODES, configs={"cleanup.policy": "compact"})
    wanted = _write(cluster.bootstrap, records)
    say(f"Started three nodes and wrote {records:,} orders of {len(SHOPS)} shops to the topic '{ORDERS}'.")
    began_s = time.monotonic()
    spark = session("tidelog demo", master="local[2]", conf={"spark.ui.enabled": False, "spark.log.level": "ERROR"})
    try:
        say(f"Spark {spark.version} has started after {time.monotonic() - began_s:.0f} s.")
        began_s = time.monotonic()
        rows = _query(spark, cluster.bootstrap, data / "checkpoint")
        say(
            f"A streaming query has read {rows:,} rows in {time.monotonic() - began_s:.0f} s and has written its "
            f"result to the topic '{TOTALS}':"
        )
    finally:
        spark.stop()
    found = _read(cluster.bootstrap)
    for shop, (count, amount) in sorted(found.items()):
        say(f"    {shop:<10}{count:>8,} orders{amount:>12,} in all")
    if found != wanted:
        raise DemoFailedError(f"the result is not what was written: {wanted}")
    say("That is what was written, to the last order.")


def _write(bootstrap: str, records: int) -> Totals:
    totals: Totals = dict.fromkeys(SHOPS, (0, 0))
    keys, values = [], []
    for number in range(records):
        shop, amount = order(number)
        totals[shop] = (totals[shop][0] + 1, totals[shop][1] + amount)
        keys.append(shop)
        values.append(json.dumps({"order": number, "amount": amount}))
    with tidelog.Producer(bootstrap) as producer:
        producer.send_many(ORDERS, keys=keys, values=values).result(STEP_TIMEOUT_S)
    return totals


def _query(spark: Any, bootstrap: str, checkpoint: Path) -> int:
    """Read everything that is there now; return the number of rows."""
    servers = {"bootstrap.servers": bootstrap}
    orders = (
        spark.readStream.format("tidelog")
        .options(**servers, subscribe=ORDERS, startingOffsets="earliest")
        .load()
        .selectExpr("CAST(key AS STRING) AS shop", "CAST(get_json_object(CAST(value AS STRING), '$.amount') AS INT) n")
    )
    totals = orders.groupBy("shop").agg({"*": "count", "n": "sum"})
    rows = totals.selectExpr("shop AS key", "to_json(struct(`count(1)` AS orders, `sum(n)` AS amount)) AS value")
    query = (
        rows.writeStream.outputMode("update")
        .foreachBatch(foreach_batch({**servers, "topic": TOTALS}))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return sum(int(progress["numInputRows"]) for progress in query.recentProgress)


def _read(bootstrap: str) -> Totals:
    """Return the newest row of each shop, as compaction leaves it."""
    found: Totals = {}
    table = tidelog.read_arrow(TOTALS, bootstrap=bootstrap)
    for key, value in zip(table.column("key").to_pylist(), table.column("value").to_pylist(), strict=True):
        row = json.loads(value)
        found[key.decode()] = (row["orders"], row["amount"])
    return found
