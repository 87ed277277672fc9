"""Reads the log as a table: the records between two bounds, fixed when the read is planned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)

from tidelog.client.errors import OptionError
from tidelog.model.errors import TidelogError
from tidelog.spark.options import SourceOptions
from tidelog.spark.pushdown import Narrowing
from tidelog.spark.source import read_task
from tidelog.spark.worker import plain_errors

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_COMPARISONS: dict[type[Filter], str] = {
    EqualTo: "=",
    EqualNullSafe: "<=>",
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
    LessThan: "<",
    LessThanOrEqual: "<=",
    In: "in",
}


class BatchSource(DataSourceReader):
    """Holds options and filters only: Spark pickles it into tasks."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._narrowing = Narrowing()

    def partitions(self) -> list[InputPartition]:
        from tidelog.spark.batch_plan import plan_batch

        with plain_errors(OptionError, TidelogError):
            return [InputPartition(task) for task in plan_batch(self._options, self._narrowing)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_task(self._options, self._schema, partition)


class FilteringBatchSource(BatchSource):
    """Used only with `pushFilters=true`: Spark rejects a reader with this method unless its own setting allows it."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        for one in filters:
            comparison = _COMPARISONS.get(type(one))
            column: tuple[str, ...] = getattr(one, "attribute", ())
            value = getattr(one, "value", None)
            if comparison is None or len(column) != 1 or not self._narrowing.take(column[0], comparison, value):
                yield one
