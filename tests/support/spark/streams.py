"""Streaming queries of a real Spark as tests want them: a sink that remembers, and never longer than a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import tidelog
from support.clusters.waiting import until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

RUN_S = 120.0
ATTEMPTS = 5
TOO_SLOW = "Python worker failed to connect back"
"""Spark gives the process of a source ten seconds to start, which is not enough on a machine that is busy; nothing was
read then."""

Row = tuple[int, int, str]
"""Partition, offset, value."""


class Sunk:
    """What a query has given out, batch by batch."""

    def __init__(self) -> None:
        self.batches: list[list[Row]] = []

    def __call__(self, frame: DataFrame, _number: int) -> None:
        rows = frame.selectExpr("partition", "offset", "cast(value as string)").collect()
        self.batches.append([tuple(row) for row in rows])

    @property
    def rows(self) -> list[Row]:
        return [row for batch in self.batches for row in batch]

    @property
    def values(self) -> list[int]:
        return sorted(int(value) for *_, value in self.rows)

    @property
    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.batches]

    def offsets(self, partition: int) -> list[int]:
        """As they came."""
        return [offset for number, offset, _ in self.rows if number == partition]


def wait_for(query: StreamingQuery, condition: Callable[[], Any], what: str) -> None:
    """Until it holds; a query that has failed meanwhile raises its error."""

    def holds() -> bool:
        if not query.isActive and (error := query.exception()) is not None:
            raise error
        return bool(condition())

    until(holds, what, timeout_s=RUN_S)


def run_to_end(start: Callable[[], StreamingQuery]) -> StreamingQuery:
    """Of a query that has an end."""
    for _ in range(ATTEMPTS):
        query = start()
        try:
            assert query.awaitTermination(RUN_S), "it has not ended"
            return query
        except Exception as error:
            if TOO_SLOW not in str(error):
                raise
        finally:
            query.stop()
    pytest.fail(f"{ATTEMPTS} times: {TOO_SLOW}")


class Stream:
    """Queries of one checkpoint."""

    def __init__(self, spark: SparkSession, checkpoint: Path, **options: str) -> None:
        self._spark = spark
        self._checkpoint = checkpoint
        self._options = options

    def start(self, sink: Any, more: dict[str, str], *, now: bool) -> StreamingQuery:
        options = {key.replace("__", "."): value for key, value in (self._options | more).items()}
        frame = self._spark.readStream.format("tidelog").options(**options).load()
        writer = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(self._checkpoint))
        return (writer.trigger(availableNow=True) if now else writer.trigger(processingTime="0 seconds")).start()

    def run(self, sink: Any, **more: str) -> StreamingQuery:
        """To the end of what is there."""
        return run_to_end(lambda: self.start(sink, more, now=True))

    def running(self, sink: Any, **more: str) -> StreamingQuery:
        """Without an end, once it has had a batch or has found that there is none."""
        for _ in range(ATTEMPTS):
            query = self.start(sink, more, now=False)
            try:
                wait_for(query, lambda: _has_looked(query), "a first look")  # noqa: B023 - called here only
                return query
            except Exception as error:
                if TOO_SLOW not in str(error):
                    raise
        pytest.fail(f"{ATTEMPTS} times: {TOO_SLOW}")


def _has_looked(query: StreamingQuery) -> bool:
    return query.lastProgress is not None or query.status["message"] == "Waiting for data to arrive"


def send(producer: tidelog.Producer, topic: str, numbers: range, *, partition: int = 0, size: int = 0) -> None:
    values = [str(number).ljust(size) for number in numbers]
    producer.send_many(topic, values=values, partition=partition).result(60)


def message_of(error: BaseException) -> str:
    """What Spark makes of an error of ours: without a trace."""
    text = str(error)
    assert "Traceback" not in text, text
    return text


class Producing:
    """Numbers to partitions in turn, until it is stopped."""

    def __init__(self, bootstrap: str, topic: str, partitions: int) -> None:
        self._bootstrap = bootstrap
        self._topic = topic
        self._partitions = partitions
        self._is_over = threading.Event()
        self.sent = 0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with tidelog.Producer(self._bootstrap) as producer:
            while not self._is_over.wait(0.05):
                numbers = range(self.sent, self.sent + 50)
                send(producer, self._topic, numbers, partition=self.sent // 50 % self._partitions, size=200)
                self.sent += 50

    def __enter__(self) -> Producing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
