"""Groups clicks into sessions with `transformWithState`: after half an hour without a click a new session begins.

python examples/spark/sessions.py [HOST:PORT]

Reads the topic `example-clicks`, writes to `example-sessions`. Needs `tidelog[spark-local]` and pandas.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import tidelog
import tidelog.spark

CLICKS, SESSIONS = "example-clicks", "example-sessions"
AWAY_MS = 30 * 60_000
MINUTE_MS = 60_000


class Sessions(StatefulProcessor):  # type: ignore[misc]  # of a package without types here
    """Stores the start of a visitor's session, its last click and the number of clicks."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.open = handle.getValueState("open", "began_ms bigint, last_ms bigint, clicks int")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        began_ms, last_ms, clicks = self.open.get() if self.open.exists() else (-1, -1, 0)
        for at_ms in sorted(int(row.at.timestamp() * 1000) for row in rows):
            if clicks and at_ms - last_ms > AWAY_MS:
                yield Row(visitor=key[0], began_ms=began_ms, ended_ms=last_ms, clicks=clicks)
                clicks = 0
            if not clicks:
                began_ms = at_ms
            last_ms, clicks = max(last_ms, at_ms), clicks + 1
        self.open.update((began_ms, last_ms, clicks))
        for due_ms in list(self.handle.listTimers()):
            self.handle.deleteTimer(due_ms)
        self.handle.registerTimer(last_ms + AWAY_MS)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:  # noqa: N802, N803
        """The watermark has passed the end of the session: no further click can belong to it."""
        began_ms, last_ms, clicks = self.open.get()
        self.open.clear()
        yield Row(visitor=key[0], began_ms=began_ms, ended_ms=last_ms, clicks=clicks)


def sessions(clicks: DataFrame) -> DataFrame:
    """Takes rows with visitor and at; emits a session when it is over."""
    return (
        clicks.withWatermark("at", "1 minute")
        .groupBy("visitor")
        .transformWithState(
            Sessions(), "visitor string, began_ms bigint, ended_ms bigint, clicks int", "append", "eventTime"
        )
    )


def write_clicks(bootstrap: str) -> None:
    """Returns clicks of two visitors over two hours; the last one advances the watermark."""
    minutes = {"ada": (1, 5, 20, 70, 75), "ben": (10, 35, 60, 85)}
    clicks = sorted((minute, who) for who, all_minutes in minutes.items() for minute in all_minutes)
    with tidelog.Producer(bootstrap) as producer:
        for minute, who in [*clicks, (240, "late-owl")]:
            producer.send(CLICKS, json.dumps({"minute": minute}), key=who, timestamp_ms=minute * MINUTE_MS)


def main(spark: SparkSession, bootstrap: str, directory: str) -> list[str]:
    with tidelog.Admin(bootstrap) as admin:
        admin.create_topics([tidelog.NewTopic(name, partitions=2) for name in (CLICKS, SESSIONS)], if_not_exists=True)
    write_clicks(bootstrap)
    servers = {"bootstrap.servers": bootstrap}
    clicks = spark.readStream.format("tidelog").options(**servers, subscribe=CLICKS, startingOffsets="earliest").load()
    found = sessions(clicks.selectExpr("CAST(key AS STRING) AS visitor", "timestamp AS at"))
    rows = found.selectExpr("visitor AS key", "to_json(struct(began_ms, ended_ms, clicks)) AS value")
    query = (
        rows.writeStream.format("tidelog")
        .options(**servers, topic=SESSIONS, checkpointLocation=f"{directory}/sessions")
        .outputMode("append")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    lines = []
    for row in tidelog.read_arrow(SESSIONS, bootstrap=bootstrap).to_pylist():
        session = json.loads(row["value"])
        began, ended = session["began_ms"] // MINUTE_MS, session["ended_ms"] // MINUTE_MS
        lines.append(f"{row['key'].decode()}: {session['clicks']} clicks from minute {began} to {ended}")
    return sorted(lines)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        for line in main(tidelog.spark.session(), sys.argv[1] if sys.argv[1:] else "localhost:9292", temporary):
            print(line)
