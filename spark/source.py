"""The log as a source of Structured Streaming.

Spark makes this object in several processes, and pickles it into tasks: it holds options and a schema, and opens
nothing before it is asked. In the driver's process `Driver` does the work; in a task `read_ranges`.

What Spark does, and what is made of it:

    initialOffset is asked again after a restart      batches carry where they began (`offsets`, "origin")
    latestOffset is asked 75 times a second           answered from memory while nothing is new
    an error there ends the query                     trouble with brokers is waited out, for `brokerTimeoutMs`
    the same offset there ends an AvailableNow run    it is given only when the run's end is reached
    commit comes late, and not for the last batch     latestOffset's `start` is what is done: told to the group
    stop may not come                                 nothing has to be given back
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
from tidelog.spark.worker import plain_errors, settle

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from tidelog.spark.driver import Driver

LOGGER = logging.getLogger(__name__)

LOOK_S = 0.05
"""Between two attempts of a call that Spark has to wait for."""

T = TypeVar("T")


class StreamSource(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._forget()

    def _forget(self) -> None:
        self._driver_made: Driver | None = None
        self._initial: dict[str, Any] | None = None
        self._trouble_s: float | None = None

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
        """The same for the life of this object, whatever happens meanwhile."""
        with plain_errors(OptionError, TidelogError):
            if self._initial is None:
                self._initial = self._patiently(self._driver().initial).document()
            return self._initial

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        with plain_errors(OptionError, TidelogError):
            self._patiently(self._driver().freeze)

    def _patiently(self, job: Callable[[], T]) -> T:
        while True:
            try:
                found = job()
            except TidelogError as error:
                self._bear(error)
                time.sleep(LOOK_S)
            else:
                self._trouble_s = None
                return found

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Which of the limits Spark is told does not matter, as all of them hold: but that there are some does. Spark
        asks without limits for `Trigger.Once`."""
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
                found = self._following(offset, is_unlimited=isinstance(limit, ReadAllAvailable))
                if found is not None:
                    return found.document()
                left = driver.left(offset)
                if not left:
                    return begun
                # A run with an end: "nothing new" would be the end of it.
                if self._is_over(asked_s):
                    raise CallTimeoutError(f"Trigger.AvailableNow: {left}, and {self._why()}")
                time.sleep(LOOK_S)

    def _following(self, offset: SourceOffset, *, is_unlimited: bool) -> SourceOffset | None:
        """None: nothing new, or nothing can be said for now."""
        driver = self._driver()
        try:
            found = driver.following(offset, is_unlimited=is_unlimited)
        except TidelogError as error:
            self._bear(error, is_known=isinstance(error, CallTimeoutError))
            return None
        self._trouble_s = None
        failing = driver.failing_s()
        if failing is not None and self._is_over(time.monotonic() - failing[0]) and not driver.is_frozen:
            raise failing[1]
        return found

    def _why(self) -> str:
        failing = self._driver().failing_s()
        seconds = self._options.patience_ms / 1000
        return f"nothing came for {seconds:g} s (brokerTimeoutMs)" + ("" if failing is None else f": {failing[1]}")

    def _is_over(self, since_s: float) -> bool:
        """Whether the patience is that began then."""
        return bool(self._options.patience_ms) and time.monotonic() - since_s > self._options.patience_ms / 1000

    def _bear(self, error: TidelogError, *, is_known: bool = False) -> None:
        """Raises what will not pass, and what did not for too long. A cluster that was never met is not waited for: its
        address may be wrong. `is_known`: it is not, as a checkpoint has offsets of it and somebody is there, silent."""
        if isinstance(error, DataLossError) or not error.retriable:
            raise error
        if not is_known and not self._driver().access.cluster.answered:
            raise error
        if self._trouble_s is None:
            self._trouble_s = time.monotonic()
            LOGGER.warning("waiting for the cluster: %s", error)
        elif self._is_over(self._trouble_s):
            raise error

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """How far the logs reach, for Spark's progress."""
        return None if self._driver_made is None else self._driver_made.reached()

    # Reading.

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        with plain_errors(OptionError, TidelogError):
            tasks = self._driver().tasks(read_document(start), read_document(end))
            return [InputPartition(task) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_task(self._options, self._schema, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: see above."""

    def stop(self) -> None:
        if self._driver_made is not None:
            self._driver_made.close()


class RefusedSource(DataSourceStreamReader):
    """In the place of a source that cannot be: whatever it is asked first, it says why."""

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
    """The Arrow batches of one task. Spark makes a task of nothing when there is none."""
    if not partition.value:
        return
    from tidelog.spark.access import access
    from tidelog.spark.reading import read_ranges

    settle()
    yield from read_ranges(access(options), options, partition.value, arrow_schema(schema))
