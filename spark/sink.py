"""The sink: writes rows of Spark to the log, in batches and in streams.

    driver, before a job          checks options and columns; the first time also the cluster and the topic
    each task                     Arrow batches -> record batches of the idempotent producer; the task ends when all
                                  in-sync replicas have acknowledged every row
    driver, after all tasks       does nothing

Delivery is at least once. A row is stored when its task has ended, and producer retries add no duplicates. But Spark
runs a failed task again, and also a micro-batch whose end it did not record: rows that the first attempt had stored are
stored again. In each partition these are a prefix of the task's rows; all rows follow in order (`sink_producer`). Rows
of concurrent attempts interleave: with `spark.speculation`, an isolated but running executor, or requests that stay in
flight after the query failed or for longer than an attempt waits.

Exactly once needs a transaction that the tasks of a batch share. The names exist already: each message has the owner,
the batch and the attempt (`worker.Attempt`), and `commit` receives those of the winners.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from tidelog.client.errors import OptionError
from tidelog.model.errors import TidelogError
from tidelog.spark.sink_columns import check_columns
from tidelog.spark.sink_options import SinkOptions, producer_options, read_sink_options
from tidelog.spark.sink_task import write_rows
from tidelog.spark.worker import Attempt, attempt, plain_errors, prepare_worker

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

CHECKED_MAX = 1_000

_checked: dict[SinkOptions, None] = {}
"""Options whose cluster and topic were checked. Each micro-batch plans again and is not checked again: the bootstrap
address may be down while the other brokers serve the query, and tasks detect a deleted topic.
"""


@dataclass(frozen=True)
class Stored(WriterCommitMessage):
    """What a task has written."""

    attempt: Attempt
    rows: int


def make_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> BatchSink:
    """Create the sink for `df.write`. Raises OptionError or a cluster error, in one line."""
    with plain_errors(OptionError, TidelogError):
        if overwrite:
            raise OptionError("mode('overwrite'): a log is append-only; use mode('append'), or delete the topic first")
        return BatchSink(_ready(options, schema))


def make_stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> StreamSink:
    """Create the sink for `df.writeStream`. With `overwrite` (complete mode) each micro-batch appends the whole
    result."""
    with plain_errors(OptionError, TidelogError):
        return StreamSink(_ready(options, schema))


class BatchSink(DataSourceArrowWriter):
    def __init__(self, options: SinkOptions) -> None:
        self.options = options

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> Stored:
        return _stored(self.options, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Do nothing: tasks end only when all their rows are stored."""

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Do nothing: stored rows stay."""


class StreamSink(DataSourceStreamArrowWriter):
    def __init__(self, options: SinkOptions) -> None:
        self.options = options

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> Stored:
        return _stored(self.options, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Do nothing: tasks end only when all their rows are stored."""

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Do nothing: stored rows stay. Spark also calls this for a committed batch whose commit it did not record."""


def _stored(options: SinkOptions, batches: Iterator[pyarrow.RecordBatch]) -> Stored:
    prepare_worker()
    me = attempt()
    return Stored(me, write_rows(options, batches))


# Checks before a job.


def _ready(given: Mapping[str, str], schema: StructType) -> SinkOptions:
    options = read_sink_options(given)
    check_columns(schema, topic=options.topic)
    if options not in _checked:
        check_cluster(options)
        while len(_checked) >= CHECKED_MAX:
            del _checked[next(iter(_checked))]
        _checked[options] = None
    return options


def check_cluster(options: SinkOptions) -> None:
    """Check that the cluster answers and the topic exists. Asking for the topic creates it if the cluster allows
    that."""
    if options.topic is None:
        from tidelog.client.admin.threaded import Admin

        with Admin({"bootstrap.servers": options.bootstrap}) as admin:
            admin.describe_cluster()
        return
    from tidelog.client.producer.threaded import Producer
    from tidelog.model.errors import UnknownTopicOrPartitionError

    with Producer(producer_options(options)) as producer:
        try:
            producer.partitions_for(options.topic)
        except UnknownTopicOrPartitionError as error:
            raise OptionError(f"topic={options.topic}: {error}") from None
