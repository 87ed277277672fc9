"""`TidelogDataSource`: `format("tidelog")` for batch and streaming reads and writes.

Importing it imports Spark, but neither Arrow nor gRPC: Spark's daemons load it and fork afterwards.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader

from tidelog.client.arrow import MissingExtraError
from tidelog.client.errors import OptionError
from tidelog.model.errors import TidelogError
from tidelog.spark.options import SourceOptions, normalized, source_options
from tidelog.spark.schema import check_schema, source_schema
from tidelog.spark.worker import plain_errors
from tidelog.world.real.clock import SystemClock

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceStreamWriter, DataSourceWriter
    from pyspark.sql.types import StructType


class TidelogDataSource(DataSource):
    """Reads options on use: the same object serves sources and sinks."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        with plain_errors(MissingExtraError):
            if not _is_installed("pyarrow"):
                raise MissingExtraError("this needs pyarrow: pip install 'tidelog[spark]'")

    @classmethod
    def name(cls) -> str:
        return "tidelog"

    def schema(self) -> StructType:
        with plain_errors(OptionError, TidelogError):
            # Streaming or batch is not known yet; ending options are checked later.
            given = {key: value for key, value in normalized(self.options).items() if not key.startswith("ending")}
            return source_schema(source_options(given, is_streaming=True, now_ms=SystemClock().now_ms()))

    def _source_options(self, schema: StructType, *, is_streaming: bool) -> SourceOptions:
        from tidelog.spark.client_cache import client_options

        check_schema(schema)
        options = source_options(self.options, is_streaming=is_streaming, now_ms=SystemClock().now_ms())
        client_options(options)
        return options

    def reader(self, schema: StructType) -> DataSourceReader:
        from tidelog.spark.batch_source import BatchSource, FilteringBatchSource

        with plain_errors(OptionError, TidelogError):
            options = self._source_options(schema, is_streaming=False)
            return (FilteringBatchSource if options.pushes_filters else BatchSource)(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Create the streaming source. Defers option errors to the first call: Spark 4.3 would replace them with its
        own."""
        from tidelog.spark.source import InvalidOptionsSource, StreamSource

        try:
            return StreamSource(self._source_options(schema, is_streaming=True), schema)
        except OptionError as error:
            return InvalidOptionsSource(error)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from tidelog.spark.sink import make_writer

        return make_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        from tidelog.spark.sink import make_stream_writer

        return make_stream_writer(self.options, schema, overwrite)


def _is_installed(module: str) -> bool:
    """Return whether the module is installed, without importing it: this process forks afterwards."""
    try:
        return find_spec(module) is not None
    except ValueError:  # `sys.modules` holds None for it
        return False
