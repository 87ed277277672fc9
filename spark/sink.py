"""The sink: rows of Spark into the log, in batches and in streams.

    on the driver, before a job starts     options and columns are checked; at the first one the cluster and the topic
    in each task                           Arrow batches -> record batches of the idempotent producer; the task ends
                                           when every row is acknowledged by all in-sync replicas
    on the driver, after all tasks         nothing is left to do

At least once. A row is there when its task has ended, and the retries of the producer add none. But Spark runs a task
again that has failed, and a micro-batch again whose end it has not noted: what such a task had stored already is stored
again. In each partition that is a beginning of the task's rows, and then all of them in their order (`sink_producer`).
Two attempts that write at the same time mix: those of `spark.speculation`, of an executor that is cut off but lives,
and the requests that an attempt has on the wire when the query fails before it, or has there for longer than it waits.

For exactly once the cluster needs a transaction that the tasks of a batch share. Its names are here already: each
message tells the owner, the batch and the attempt (`worker.Attempt`), and `commit` gets those of the winners.
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
from tidelog.spark.worker import Attempt, attempt, plain_errors, settle

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

CHECKED_MAX = 1_000

_checked: dict[SinkOptions, None] = {}
"""Those for which the cluster and the topic were there. Each micro-batch plans anew, and is not checked again: by the
address that it was given alone a client may not find a cluster whose other brokers serve the query well, and what has
become of the topic the tasks find out."""


@dataclass(frozen=True)
class Stored(WriterCommitMessage):
    """What a task has written."""

    attempt: Attempt
    rows: int


def make_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> BatchSink:
    """For `df.write`. Raises OptionError or an error of the cluster, in one line."""
    with plain_errors(OptionError, TidelogError):
        if overwrite:
            raise OptionError("mode('overwrite'): a log is appended to; give mode('append'), or delete the topic first")
        return BatchSink(_ready(options, schema))


def make_stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> StreamSink:
    """For `df.writeStream`. With `overwrite` (complete mode) each micro-batch appends the whole result."""
    with plain_errors(OptionError, TidelogError):
        return StreamSink(_ready(options, schema))


class BatchSink(DataSourceArrowWriter):
    def __init__(self, options: SinkOptions) -> None:
        self.options = options

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> Stored:
        return _stored(self.options, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """All rows are stored: tasks end no sooner."""

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """What was stored stays."""


class StreamSink(DataSourceStreamArrowWriter):
    def __init__(self, options: SinkOptions) -> None:
        self.options = options

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> Stored:
        return _stored(self.options, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """All rows are stored: tasks end no sooner."""

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """What was stored stays. Also called for a batch that was committed, if its commit was not noticed."""


def _stored(options: SinkOptions, batches: Iterator[pyarrow.RecordBatch]) -> Stored:
    settle()
    me = attempt()
    return Stored(me, write_rows(options, batches))


# Before a job.


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
    """The cluster answers and the topic is there, or is made by asking for it where the cluster allows that."""
    if options.topic is None:
        from tidelog.client.admin_facade import Admin

        with Admin({"bootstrap.servers": options.bootstrap}) as admin:
            admin.describe_cluster()
        return
    from tidelog.client.producer import Producer
    from tidelog.model.errors import UnknownTopicOrPartitionError

    with Producer(producer_options(options)) as producer:
        try:
            producer.partitions_for(options.topic)
        except UnknownTopicOrPartitionError as error:
            raise OptionError(f"topic={options.topic}: {error}") from None
