"""The streaming source of Structured Streaming.

Spark creates this object in several processes and pickles it into tasks: it holds options and a schema and opens
nothing before its first call. `Driver` does the work in the driver's process, `read_ranges` in a task.

What Spark does, and how the source handles it:

    calls initialOffset again after a restart         batches carry their start (`offsets`, "origin")
    calls latestOffset 75 times a second              answered from memory while nothing is new
    ends the query on an error there                  transient broker errors are retried for `brokerTimeoutMs`
    ends an AvailableNow run on an unchanged offset   returned only when the run's end is reached
    calls commit late, and not for the last batch     latestOffset's `start` is finished: committed to the group
    may not call stop                                 nothing needs an explicit release
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from tidelog.client.errors import OptionError
from tidelog.model.errors import CallTimeoutError, TidelogError
from tidelog.spark.errors import DataLossError
from tidelog.spark.offsets import SourceOffset, read_document
from tidelog.spark.options import SourceOptions
from tidelog.spark.schema import arrow_schema
from tidelog.spark.worker import plain_errors, prepare_worker

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from tidelog.spark.driver import Driver

LOGGER = logging.getLogger(__name__)

RETRY_S = 0.05
"""Seconds between two attempts of a call that blocks Spark."""

T = TypeVar("T")


class StreamSource(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._forget()

    def _forget(self) -> None:
        self._driver_made: Driver | None = None
        self._initial: dict[str, Any] | None = None
        self._failing_since_s: float | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_schema": self._schema}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def _driver(self) -> Driver:
        if self._driver_made is None:
            from tidelog.spark.driver import Driver

            self._driver_made = Driver(self._options)
        return self._driver_made

    # Offsets.

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the same offset for the lifetime of this object."""
        with plain_errors(OptionError, TidelogError):
            if self._initial is None:
                self._initial = self._retry(self._driver().initial).document()
            return self._initial

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        with plain_errors(OptionError, TidelogError):
            self._retry(self._driver().freeze)

    def _retry(self, job: Callable[[], T]) -> T:
        while True:
            try:
                result = job()
            except TidelogError as error:
                self._raise_or_wait(error)
                time.sleep(RETRY_S)
            else:
                self._failing_since_s = None
                return result

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return any limit that applies: the driver applies all of them. Spark passes no limit for `Trigger.Once`."""
        limits = self._options.limits
        if limits.offsets_max is not None:
            return ReadMaxRows(limits.offsets_max)
        if limits.bytes_max is not None:
            return ReadMaxBytes(limits.bytes_max)
        if limits.offsets_min is not None:
            return ReadMinRows(limits.offsets_min)
        return ReadAllAvailable()

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, Any]:  # noqa: N802
        with plain_errors(OptionError, TidelogError):
            begun = self.initialOffset() if start is None else start
            offset = read_document(begun)
            driver = self._driver()
            driver.report(offset)
            asked_s = time.monotonic()
            while True:
                end = self._next_offset(offset, is_unlimited=isinstance(limit, ReadAllAvailable))
                if end is not None:
                    return end.document()
                left = driver.remaining(offset)
                if not left:
                    return begun
                # "Nothing new" would end a run with a target.
                if self._is_over(asked_s):
                    raise CallTimeoutError(f"Trigger.AvailableNow: {left}, and {self._why()}")
                time.sleep(RETRY_S)

    def _next_offset(self, offset: SourceOffset, *, is_unlimited: bool) -> SourceOffset | None:
        """Return the next batch; None if there is nothing new, or the cluster cannot answer now."""
        driver = self._driver()
        try:
            end = driver.next_offset(offset, is_unlimited=is_unlimited)
        except TidelogError as error:
            self._raise_or_wait(error, is_known=isinstance(error, CallTimeoutError))
            return None
        self._failing_since_s = None
        failing = driver.failing_for()
        if failing is not None and self._is_over(time.monotonic() - failing[0]) and not driver.is_frozen:
            raise failing[1]
        return end

    def _why(self) -> str:
        failing = self._driver().failing_for()
        seconds = self._options.broker_timeout_ms / 1000
        return f"no data for {seconds:g} s (brokerTimeoutMs)" + ("" if failing is None else f": {failing[1]}")

    def _is_over(self, since_s: float) -> bool:
        """Return whether `brokerTimeoutMs` has passed since then."""
        return (
            bool(self._options.broker_timeout_ms)
            and time.monotonic() - since_s > self._options.broker_timeout_ms / 1000
        )

    def _raise_or_wait(self, error: TidelogError, *, is_known: bool = False) -> None:
        """Raise permanent errors, and transient ones that last too long. A cluster that never answered is not waited
        for: the address may be wrong. `is_known`: a checkpoint has its offsets and a broker accepts connections, but
        stays silent."""
        if isinstance(error, DataLossError) or not error.retriable:
            raise error
        if not is_known and not self._driver().client.cluster.answered:
            raise error
        if self._failing_since_s is None:
            self._failing_since_s = time.monotonic()
            LOGGER.warning("waiting for the cluster: %s", error)
        elif self._is_over(self._failing_since_s):
            raise error

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return the log ends, for Spark's progress report."""
        return None if self._driver_made is None else self._driver_made.log_ends()

    # Reading.

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        with plain_errors(OptionError, TidelogError):
            tasks = self._driver().tasks(read_document(start), read_document(end))
            return [InputPartition(task) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_task(self._options, self._schema, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: latestOffset commits."""

    def stop(self) -> None:
        if self._driver_made is not None:
            self._driver_made.close()


class InvalidOptionsSource(DataSourceStreamReader):
    """Stands in for a source with wrong options: every method raises the error."""

    def __init__(self, error: OptionError) -> None:
        self._text = str(error)

    def _refuse(self) -> NoReturn:
        with plain_errors(OptionError):
            raise OptionError(self._text)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        self._refuse()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        self._refuse()

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, Any]:  # noqa: N802
        self._refuse()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        self._refuse()

    def read(self, partition: InputPartition) -> Iterator[Any]:
        self._refuse()


def read_task(options: SourceOptions, schema: StructType, partition: InputPartition) -> Iterator[Any]:
    """Yield the Arrow batches of one task. Spark creates an empty task if there is none."""
    if not partition.value:
        return
    from tidelog.spark.client_cache import cached_client
    from tidelog.spark.reading import read_ranges

    prepare_worker()
    yield from read_ranges(cached_client(options), options, partition.value, arrow_schema(schema))
