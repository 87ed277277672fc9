"""Shared by the Spark benchmarks: a session, a filled topic, queries, and the durations of micro-batches.

Not a benchmark: it has no `run()`. It imports PySpark only if Spark and Java are installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.brokers_load import LIMIT_S, ROOT, local_cluster
from bench.harness import Result, at_least
from tidelog.testing import LocalCluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TASKS = 2
"""Tasks per micro-batch on every side: one per core."""
MASTER = f"local[{TASKS}]"
_numbers = itertools.count(1)


def missing() -> str:
    """Return what is missing to run Spark, in one line; empty if nothing is."""
    if importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed: make setup-spark"
    from tidelog.spark.java import NoJavaError, java_home

    try:
        java_home()
    except NoJavaError as error:
        return str(error)
    return ""


@dataclass
class Place:
    """The environment of a benchmark."""

    spark: SparkSession
    cluster: LocalCluster
    home: Path
    loads: list[float] = field(default_factory=list)

    def fresh(self, name: str) -> str:
        """A directory, for a checkpoint, or a topic."""
        return f"{name}-{next(_numbers)}"

    @property
    def ours(self) -> dict[str, str]:
        return {"bootstrap.servers": self.cluster.bootstrap}


def run_with_spark(measure: Callable[[Place], Iterator[Result]]) -> Iterator[Result]:
    """Yield the results, and the load of the machine meanwhile. Without Spark yield one line and no result."""
    name = measure.__module__.rpartition(".")[2]
    if lacking := missing():
        print(f"{name}: not run: {lacking}", flush=True)
        return
    with local_cluster(1) as cluster, session() as (spark, home):
        place = Place(spark, cluster, home, [os.getloadavg()[0]])
        for result in measure(place):
            place.loads.append(os.getloadavg()[0])
            yield result
    yield Result(f"{name}: load of the machine meanwhile, least", min(place.loads), "processes")
    yield Result(f"{name}: load of the machine meanwhile, most", max(place.loads), "processes")


@contextlib.contextmanager
def session() -> Iterator[tuple[SparkSession, Path]]:
    """That of `tidelog.spark.session()`, with `format("ready")`."""
    # Workers import `bench`, and inherit the environment of the JVM, which inherits this one.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    import tidelog.spark
    from bench.spark_ready import ReadySource

    with tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="bench-spark-") as path:
        conf = {
            "spark.ui.enabled": False,
            "spark.sql.warehouse.dir": f"{path}/warehouse",
            "spark.sql.session.timeZone": "UTC",
            "spark.driver.memory": "2g",
        }
        spark = tidelog.spark.session("tidelog-bench", master=MASTER, conf=conf)
        try:
            spark.sparkContext.setLogLevel("OFF")  # workers that are ended with their query are no news here
            spark.dataSource.register(ReadySource)
            yield spark, Path(path)
        finally:
            spark.stop()


# Topics.


def make_topic(place: Place, name: str, partitions: int = 2 * TASKS) -> str:
    import tidelog

    fresh = place.fresh(name)
    with tidelog.Admin(place.cluster.bootstrap) as admin:
        admin.create_topic(fresh, partitions=partitions)
    return fresh


def drop_topic(place: Place, name: str) -> None:
    import tidelog

    with tidelog.Admin(place.cluster.bootstrap) as admin:
        admin.delete_topic(name)


def fill(place: Place, topic: str, *, rows: int, value_bytes: int, partitions: int = 2 * TASKS) -> None:
    """By a producer as it comes, the same number into each partition."""
    import pyarrow

    import tidelog
    from bench.spark_ready import one_batch

    schema = pyarrow.schema([("key", pyarrow.binary()), ("value", pyarrow.binary())])
    step = 10_000
    assert rows % (partitions * step) == 0, "whole steps"
    table = pyarrow.Table.from_batches([one_batch(schema, step, value_bytes)])
    with tidelog.Producer(place.cluster.bootstrap) as producer:
        for number in range(rows // step):
            producer.send_many(topic, table, partition=number % partitions)
        producer.flush(LIMIT_S)


# Queries.


def micro_batches(frame: DataFrame, place: Place, sink: str, options: dict[str, str]) -> list[dict[str, Any]]:
    """Runs all there is, and gives the progress of each micro-batch."""
    checkpoint = str(place.home / place.fresh("checkpoint"))
    writing = frame.writeStream.format(sink).options(**options).option("checkpointLocation", checkpoint)
    query = writing.trigger(availableNow=True).start()
    assert query.awaitTermination(2 * LIMIT_S), "the query ends"
    return [as_dict(one) for one in query.recentProgress]


def as_dict(progress: Any) -> dict[str, Any]:
    """Some versions of Spark give an object."""
    found: dict[str, Any] = progress if isinstance(progress, dict) else progress.jsonValue()
    return found


def ready_options(*, rows: int, arrow_rows: int, value_bytes: int, batches: int | None = None) -> dict[str, str]:
    """Of `format("ready")`: micro-batches of so many rows."""
    given = {"tasks": TASKS, "rows": rows // TASKS, "arrow_rows": arrow_rows, "value_bytes": value_bytes}
    if batches is not None:
        given["batches"] = batches
    return {name: str(value) for name, value in given.items()}


def took_ms(progress: dict[str, Any]) -> int:
    return int(progress["durationMs"]["triggerExecution"])


def rates(progress: list[dict[str, Any]], *, rows: int, batches: int) -> list[float]:
    """Rows a second of each micro-batch but the first; all of them have so many rows."""
    found = [one for one in progress if one["numInputRows"]]
    assert [one["numInputRows"] for one in found] == [rows] * batches, "micro-batches of one size"
    return [rows / took_ms(one) * 1000 for one in found[1:]]


def take_turns(rounds: int, contestants: dict[str, Callable[[], list[float]]]) -> dict[str, list[list[float]]]:
    """What each has given, by rounds. There is one round more: the first warms up."""
    found: dict[str, list[list[float]]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, work in contestants.items():
            values = work()
            if number:
                found[name].append(values)
    return found


def beside(
    what: str, other: str, *, ours: list[list[float]], theirs: list[list[float]], target: float
) -> Iterator[Result]:
    """Our rate beside theirs: of the best micro-batches, and of the middle ones of neighbours."""
    best, ceiling = max(map(max, ours)), max(map(max, theirs))
    yield Result(f"{what}: {other}", ceiling, "rows/s")
    yield at_least(what, best, "rows/s", target=target, ratio=best / ceiling, anchor=f"{other}, best micro-batches")
    middles, others = list(map(median, ours)), list(map(median, theirs))
    ratio = median(one / another for one, another in zip(middles, others, strict=True))
    yield Result(f"{what}: middle", median(middles), "rows/s", ratio, f"{other}, middle of rounds, side by side")
