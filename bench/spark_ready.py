"""The benchmarks' own data source `format("ready")`: the minimum that Python can do in Spark, as an anchor.

As a source it yields Arrow batches that are created once per worker and stay in its memory: no broker, no decoding, no
copy. As a sink it drops Arrow batches. Spark's own share, from Python's socket to rows in the JVM and back, is in both;
the rest is ours. Not a benchmark: it has no `run()`. Spark's workers import it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, SupportsTriggerAvailableNow

from tidelog.spark.options import source_options
from tidelog.spark.schema import arrow_schema, source_schema
from tidelog.spark.worker import prepare_worker

KEY_BYTES = 8
ENDLESS = 1 << 60


class ReadySource(DataSource):  # type: ignore[misc]  # what it is made of has no types here
    """Options: batches (micro-batches; none: without end), tasks, rows (of a task), arrow_rows (of an Arrow batch),
    value_bytes."""

    @classmethod
    def name(cls) -> str:
        return "ready"

    def schema(self) -> Any:
        """That of ours."""
        given = {"bootstrap.servers": "nowhere:1", "subscribe": "nothing"}
        return source_schema(source_options(given, is_streaming=True, now_ms=0))

    def streamReader(self, schema: Any) -> ReadyReader:  # noqa: N802 - Spark's name
        return ReadyReader({name: int(value) for name, value in self.options.items()}, schema)

    def streamWriter(self, schema: Any, overwrite: bool) -> DroppingWriter:  # noqa: N802
        return DroppingWriter()


class ReadyReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    def __init__(self, options: dict[str, int], schema: Any) -> None:
        self._options = options
        self._schema = schema

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"batch": 0}

    def getDefaultReadLimit(self) -> ReadAllAvailable:  # noqa: N802
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """It ends by itself."""

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:  # noqa: N802
        return {"batch": min(start["batch"] + 1, self._options.get("batches", ENDLESS))}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition(number) for number in range(self._options["tasks"])]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        prepare_worker()
        given = (self._options[name] for name in ("rows", "arrow_rows", "value_bytes"))
        yield from ready_batches(arrow_schema(self._schema), *given)


@lru_cache(maxsize=2)
def ready_batches(schema: Any, rows: int, arrow_rows: int, value_bytes: int) -> list[Any]:
    """All batches of a task, each in memory of its own. Made once in a worker, which is used again."""
    import pyarrow

    written = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(written, schema) as writer:
        writer.write_batch(one_batch(schema, arrow_rows, value_bytes))
    stored = written.getvalue()
    batches = []
    for start in range(0, rows, arrow_rows):
        (made,) = pyarrow.ipc.open_stream(pyarrow.py_buffer(bytearray(stored)))
        batches.append(made.slice(0, min(arrow_rows, rows - start)))
    return batches


def one_batch(schema: Any, rows: int, value_bytes: int) -> Any:
    import pyarrow

    numbers = [number.to_bytes(KEY_BYTES, "big") for number in range(rows)]
    columns = {
        "key": numbers,
        "value": [(number * (value_bytes // KEY_BYTES + 1))[:value_bytes] for number in numbers],
        "topic": ["a topic"] * rows,
        "partition": [0] * rows,
        "offset": list(range(rows)),
        "timestamp": [1_700_000_000_000_000] * rows,
        "timestampType": [0] * rows,
    }
    return pyarrow.RecordBatch.from_pydict({name: columns[name] for name in schema.names}, schema=schema)


class DroppingWriter(DataSourceStreamArrowWriter):  # type: ignore[misc]
    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        prepare_worker()
        for _ in iterator:
            pass
        return WriterCommitMessage()

    def commit(self, messages: Sequence[Any], batchId: int) -> None:  # noqa: N803 - Spark's name
        """There is nothing."""

    def abort(self, messages: Sequence[Any], batchId: int) -> None:  # noqa: N803
        """There is nothing."""
