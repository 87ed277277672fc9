"""The data source as Spark handles it before any cluster is asked: what it imports, pickles and refuses."""

# ruff: noqa: E402 - Spark may not be there

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest
from support.spark.availability import need

from tidelog.client.errors import OptionError, UnknownTopicError
from tidelog.model.errors import CallTimeoutError
from tidelog.spark.errors import ExpiredRangeError
from tidelog.spark.offsets import Mark, SourceOffset, TopicMarks

need("pyspark", by=__name__)

from pyspark.sql import types
from pyspark.sql.datasource import EqualTo, GreaterThan, In, InputPartition, IsNotNull
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows, ReadMinRows

from tidelog.spark.batch_source import BatchSource, FilteringBatchSource
from tidelog.spark.data_source import TidelogDataSource
from tidelog.spark.schema import check_schema
from tidelog.spark.source import StreamSource

GIVEN = {"bootstrap.servers": "localhost:1", "subscribe": "orders"}


def stream(**options: str) -> Any:
    source = TidelogDataSource(GIVEN | options)
    return source.streamReader(source.schema())


def run(code: str) -> str:
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return found.stdout.strip()


HEAVY = "[name for name in ('grpc', 'uvloop', 'pyarrow') if name in sys.modules]"


def test_what_sparks_daemons_load_imports_neither_grpc_nor_arrow() -> None:
    """They fork afterwards, and gRPC does not live through that."""
    assert run(f"import sys, tidelog.spark.data_source, tidelog.spark.sink; print({HEAVY})") == "[]"


def test_a_source_that_is_made_and_not_asked_opens_nothing() -> None:
    """Of a query that Spark refuses at its start the process stays for a while: it must hold nothing."""
    code = f"""
import threading
from tidelog.spark.data_source import TidelogDataSource
source = TidelogDataSource({GIVEN!r})
reader = source.streamReader(source.schema())
print(reader._driver_made, threading.active_count())
"""
    assert run(code) == "None 1"


def test_without_arrow_one_line_names_the_extra() -> None:
    code = f"""
import sys
sys.modules['pyarrow'] = None
from tidelog.spark.data_source import TidelogDataSource
try:
    TidelogDataSource({GIVEN!r})
except ImportError as error:
    print(error)
"""
    assert run(code) == "this needs pyarrow: pip install 'tidelog[spark]'"


def test_what_spark_pickles_holds_nothing_open() -> None:
    source = stream(maxOffsetsPerTrigger="5")
    source._driver_made = object()
    source._initial = {"v": 1}
    again = pickle.loads(pickle.dumps(source))
    assert (again._options, again._schema) == (source._options, source._schema)
    assert (again._driver_made, again._initial) == (None, None)
    assert pickle.loads(pickle.dumps(TidelogDataSource(GIVEN))).options == GIVEN


def test_headers_are_a_column_only_if_asked_for() -> None:
    assert "headers" not in TidelogDataSource(GIVEN).schema().names
    assert TidelogDataSource(GIVEN | {"includeheaders": "true"}).schema().names[-1] == "headers"
    assert TidelogDataSource(GIVEN | {"columns": "value,headers"}).schema().names == ["value", "headers"]


@pytest.mark.parametrize("key", ["endingOffsets", "ENDINGOFFSETS", "kafka.endingOffsets"])
def test_an_end_is_refused_in_streams_only(key: str) -> None:
    source = TidelogDataSource(GIVEN | {key: "latest"})
    assert type(source.reader(source.schema())) is BatchSource
    with pytest.raises(OptionError, match="endingOffsets='latest': a streaming query has no end"):
        source.streamReader(source.schema()).initialOffset()


def test_the_source_announces_its_limits_to_spark() -> None:
    assert stream().getDefaultReadLimit() == ReadAllAvailable()
    assert stream(maxOffsetsPerTrigger="5").getDefaultReadLimit() == ReadMaxRows(5)
    assert stream(maxBytesPerTrigger="5k").getDefaultReadLimit() == ReadMaxBytes(5120)
    assert stream(minOffsetsPerTrigger="5", maxTriggerDelay="2s").getDefaultReadLimit() == ReadMinRows(5)


def test_a_task_of_nothing_reads_nothing() -> None:
    assert list(stream().read(InputPartition(None))) == []


def test_only_a_reader_that_was_asked_to_takes_filters() -> None:
    def reader(**options: str) -> Any:
        source = TidelogDataSource(GIVEN | options)
        return source.reader(source.schema())

    assert type(reader()) is BatchSource
    filtering = reader(pushfilters="true")
    assert type(filtering) is FilteringBatchSource
    filters = [
        EqualTo(("partition",), 1),
        GreaterThan(("offset",), 5),
        In(("topic",), ("a", "b")),
        IsNotNull(("offset",)),
        EqualTo(("value", "field"), 1),
    ]
    assert list(filtering.pushFilters(filters)) == filters[2:]
    assert pickle.loads(pickle.dumps(filtering))._narrowing == filtering._narrowing


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("value", types.StringType(), "column 'value' is binary, not string"),
        ("headers", types.ArrayType(types.BinaryType()), "column 'headers' is array<struct<key:string,value:binary>>"),
        ("Value", types.BinaryType(), "there is no column 'Value'"),
        ("timestamp", types.TimestampNTZType(), "column 'timestamp' is timestamp, not timestamp_ntz"),
    ],
)
def test_a_schema_that_is_not_the_sources_is_one_line(name: str, kind: Any, words: str) -> None:
    with pytest.raises(OptionError) as error:
        check_schema(types.StructType([types.StructField(name, kind)]))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kafka.linger.ms": "5"}, r"linger.ms belongs to a producer, not to a consumer"),
        ({"kafka.request.timeout.ms": "soon"}, r"request.timeout.ms='soon'"),
        ({"bootstrap.servers": "a b"}, r"bootstrap.servers='a b'"),
        ({"endingTimestamp": "5"}, r"endingTimestamp='5'"),
    ],
)
def test_a_stream_that_cannot_be_says_so_when_it_is_asked_not_when_it_is_made(
    options: dict[str, str], words: str
) -> None:
    found = stream(**options)
    for call in (found.initialOffset, found.getDefaultReadLimit, lambda: found.latestOffset({}, None)):
        with pytest.raises(OptionError, match=words):
            call()
    found.stop()
    source = TidelogDataSource(GIVEN | {key: one for key, one in options.items() if not key.startswith("ending")})
    if "endingTimestamp" not in options:
        with pytest.raises(OptionError, match=words):
            source.reader(source.schema())


class StandIn:
    """A driver that answers as the test sets it."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.client = type("Access", (), {"cluster": type("Cluster", (), {"answered": "localhost:9292"})})

        self.begins = 0

    def initial(self) -> SourceOffset:
        self.begins += 100
        return SourceOffset({"orders": TopicMarks("a" * 32, {0: Mark(self.begins)})}, is_initial=True)

    def report(self, _: object) -> None: ...

    def failing_for(self) -> None: ...

    def remaining(self, _: object) -> str:
        return ""

    def next_offset(self, _: object, *, is_unlimited: bool) -> None:
        if self.error is not None:
            raise self.error


class TestTrouble:
    START = {"v": 1, "t": {"orders": {"id": "a" * 32, "p": {"0": [5, 1]}}}}  # noqa: RUF012

    def source(self, **options: str) -> tuple[StreamSource, StandIn]:
        found, driver = stream(**options), StandIn()
        found._driver_made = driver
        return found, driver

    def test_where_it_begins_does_not_move_while_it_lives(self) -> None:
        source, _ = self.source()
        first = source.initialOffset()
        assert first["t"]["orders"]["p"] == {"0": [100, -1]}
        assert source.initialOffset() == first
        assert source.latestOffset(None, None) == first

    def test_what_may_pass_is_waited_out(self) -> None:
        source, driver = self.source()
        driver.error = CallTimeoutError("no answer")
        assert source.latestOffset(self.START, ReadAllAvailable()) is self.START
        driver.error = None
        assert source.latestOffset(self.START, ReadAllAvailable()) is self.START

    def test_but_not_for_longer_than_the_query_has_patience(self) -> None:
        source, driver = self.source(brokertimeoutms="1")
        driver.error = CallTimeoutError("no answer")
        source.latestOffset(self.START, None)
        source._failing_since_s = 0.0
        with pytest.raises(CallTimeoutError):
            source.latestOffset(self.START, None)

    def test_a_loss_is_reported_at_once(self) -> None:
        source, driver = self.source()
        driver.error = ExpiredRangeError("orders", 0, offset=1, start=5)
        with pytest.raises(ExpiredRangeError):
            source.latestOffset(self.START, None)

    def test_an_unreachable_cluster_is_reported_at_once(self) -> None:
        source, driver = self.source()
        driver.client.cluster.answered = ""  # type: ignore[attr-defined]
        driver.error = UnknownTopicError("orders")
        with pytest.raises(UnknownTopicError):
            source.latestOffset(self.START, None)
