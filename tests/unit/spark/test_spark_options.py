"""Options of the Spark source: spellings, values, and one line for whatever is wrong."""

import pytest

from tidelog.client.errors import OptionError
from tidelog.spark.options import EARLIEST, LATEST, SourceOptions, normalized, source_options

NOW_MS = 1_700_000_000_000


def read(**options: str) -> SourceOptions:
    return read_for(True, options)


def read_for(is_streaming: bool, options: dict[str, str]) -> SourceOptions:
    given = {"bootstrap.servers": "a:9292", "subscribe": "orders"} | {
        key.replace("__", "."): value for key, value in options.items()
    }
    return source_options({k: v for k, v in given.items() if v != "-"}, is_streaming=is_streaming, now_ms=NOW_MS)


def test_a_query_of_the_kafka_source_is_read_as_it_is() -> None:
    found = source_options(
        {
            "KAFKA.Bootstrap.Servers": "a:9292,b:9292",
            "SUBSCRIBE": "orders, payments,orders",
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": "1000",
            "minOffsetsPerTrigger": "10",
            "maxTriggerDelay": "2m",
            "minPartitions": "4",
            "includeHeaders": "TRUE",
            "failOnDataLoss": "false",
            "kafka.group.id": "another application's",
            "groupId": "g",
            "kafka.isolation.level": "read_committed",
            "kafka.client.rack": "r1",
            "kafka.request.timeout.ms": "5000",
            "client.retry.backoff.ms": "50",
            "groupIdPrefix": "ignored",
            "fetchOffset.numRetries": "3",
            "kafkaConsumer.pollTimeoutMs": "512",
            "kafka.fetch.min.bytes": "100000",
            "kafka.max.poll.records": "5",
        },
        is_streaming=True,
        now_ms=NOW_MS,
    )
    assert found.bootstrap == "a:9292,b:9292"
    assert found.subscription.names == ("orders", "payments")
    assert (found.starting.kind, found.starting.number) == ("offsets", EARLIEST)
    assert (found.limits.offsets_max, found.limits.offsets_min, found.limits.delay_max_ms) == (1000, 10, 120_000)
    assert (found.tasks_min, found.include_headers, found.fail_on_data_loss) == (4, True, False)
    assert (found.group, found.is_committed_only, found.rack) == ("g", True, "r1")
    assert (found.target_bytes, found.broker_timeout_ms, found.metadata_max_age_ms) == (32 << 20, 120_000, 10_000)
    assert found.client == (("request.timeout.ms", "5000"), ("retry.backoff.ms", "50"))


def test_a_stream_begins_at_the_end_and_a_batch_at_the_beginning() -> None:
    assert read().starting.number == LATEST
    batch = read_for(False, {})
    assert (batch.starting.number, batch.ending.number) == (EARLIEST, LATEST)


def test_offsets_may_be_given_for_some_partitions_only() -> None:
    found = read(startingOffsets='{"orders": {"0": 23, "1": -2}}').starting
    assert found.places == {"orders": {0: 23, 1: EARLIEST}}
    assert found.number == LATEST


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("1600000000000", 1_600_000_000_000),
        ("2020-09-13T12:26:40+00:00", 1_600_000_000_000),
        ("-2h", NOW_MS - 7_200_000),
        ("90s", NOW_MS - 90_000),
    ],
)
def test_a_time_is_a_number_a_date_or_so_long_ago(text: str, ms: int) -> None:
    assert read(startingTimestamp=text).starting.number == ms


def test_one_time_for_all_comes_before_times_and_times_before_offsets() -> None:
    all_three = {"startingOffsets": "latest", "startingOffsetsByTimestamp": '{"orders": {"0": 5}}'}
    assert read(**all_three).starting.places == {"orders": {0: 5}}
    assert read(**all_three, startingTimestamp="7").starting.number == 7


@pytest.mark.parametrize(("text", "size"), [("1000", 1000), ("16m", 16 << 20), ("2 GB", 2 << 30), ("64KiB", 64 << 10)])
def test_sizes_have_units(text: str, size: int) -> None:
    assert read(maxBytesPerTrigger=text).limits.bytes_max == size


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"maxOffsetsPerTrigger": "many"}, ["maxOffsetsPerTrigger='many'", "an integer, 1 or more"]),
        ({"maxOffsetsPerTrigger": "0"}, ["maxOffsetsPerTrigger='0'"]),
        ({"maxBytesPerTrigger": "16 parsecs"}, ["maxBytesPerTrigger='16 parsecs'", "a size"]),
        ({"maxTriggerDelay": "soon"}, ["maxTriggerDelay='soon'", "a span"]),
        ({"failOnDataLoss": "perhaps"}, ["failOnDataLoss='perhaps'", "true, false"]),
        ({"startingOffsets": "yesterday"}, ["startingOffsets='yesterday'", "earliest, latest"]),
        ({"startingOffsets": "{"}, ["startingOffsets='{'", "no JSON"]),
        ({"startingOffsets": '{"orders": {"0": -3}}'}, ["startingOffsets", "-3"]),
        ({"startingTimestamp": "noon"}, ["startingTimestamp='noon'", "ISO 8601"]),
        ({"startingOffsetsByTimestampStrategy": "guess"}, ["startingOffsetsByTimestampStrategy='guess'"]),
        ({"isolation__level": "serializable"}, ["isolation.level='serializable'"]),
        ({"subscribe": " , "}, ["subscribe=' , '"]),
        ({"subscribe": "-", "subscribePattern": "("}, ["subscribePattern='('", "not a regular expression"]),
        ({"subscribe": "-", "assign": '{"orders": []}'}, ["assign=", "as JSON"]),
        ({"subscribe": "-", "assign": '{"orders": ["x"]}'}, ["assign="]),
        ({"subscribe": "-"}, ["one of subscribe, subscribePattern and assign", "none"]),
        ({"subscribePattern": "o.*"}, ["one of subscribe", "subscribe='orders' and subscribePattern='o.*'"]),
        ({"bootstrap__servers": "-"}, ["bootstrap.servers is missing"]),
        ({"maxOffsetPerTrigger": "5"}, ["maxoffsetpertrigger", "'5'", "did you mean 'maxOffsetsPerTrigger'"]),
        ({"endingOffsets": "latest"}, ["endingOffsets='latest'", "batch"]),
        ({"auto__offset__reset": "earliest"}, ["auto.offset.reset='earliest'", "startingOffsets"]),
        ({"columns": "key,wert"}, ["columns='key,wert'", "timestampType"]),
        ({"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"}, ["minOffsetsPerTrigger='9'", "'8'"]),
        ({"kafka__subscribe": "others"}, ["subscribe is given twice", "'orders'", "'others'"]),
    ],
)
def test_what_is_wrong_is_one_line_with_option_and_value(options: dict[str, str], words: list[str]) -> None:
    with pytest.raises(OptionError) as error:
        read(**options)
    text = str(error.value)
    assert "\n" not in text
    assert [word for word in words if word not in text] == []


def test_a_batch_cannot_end_where_the_log_begins() -> None:
    with pytest.raises(OptionError, match="endingOffsets cannot be earliest"):
        read_for(False, {"endingOffsets": "earliest"})
    with pytest.raises(OptionError, match="endingOffsets"):
        read_for(False, {"endingOffsets": '{"orders": {"0": -2}}'})


def test_a_pattern_takes_in_whole_names() -> None:
    found = read(subscribe="-", subscribePattern="orders-.*").subscription
    assert [name for name in ("orders-1", "orders", "my-orders-1") if found.takes(name)] == ["orders-1"]
    assert found.names == ()


def test_assigned_partitions_are_those_that_are_read() -> None:
    found = read(subscribe="-", assign='{"orders": [2, 0], "b": ["1"]}').subscription
    assert found.numbers("orders", 5) == (0, 2)
    assert found.numbers("b", 5) == (1,)
    assert found.names == ("orders", "b")


def test_columns_are_spelled_as_they_are_called() -> None:
    assert read(columns="TIMESTAMPTYPE, key").columns == ("timestampType", "key")


def test_prefixes_change_nothing() -> None:
    assert normalized({"kafka.client.linger.ms": "1", "client.id": "x", "Kafka.Client.Rack": "r"}) == {
        "linger.ms": "1",
        "client.id": "x",
        "client.rack": "r",
    }
