"""The sink's options: names of Kafka's connector, errors in one line."""

from __future__ import annotations

import pytest

from tidelog.client.errors import OptionError
from tidelog.spark.sink_options import BATCH_SIZE, producer_options, read_sink_options

SERVERS = {"bootstrap.servers": "localhost:9292"}


def test_a_query_for_kafka_moves_over() -> None:
    found = read_sink_options(
        {
            "kafka.bootstrap.servers": "a:9292,b:9292",
            "topic": "orders",
            "checkpointlocation": "/somewhere",
            "kafka.compression.type": "zstd",
            "kafka.acks": "all",
            "includeheaders": "TRUE",
        }
    )
    assert (found.topic, found.has_headers, found.bootstrap) == ("orders", True, "a:9292,b:9292")
    assert producer_options(found) == {
        "bootstrap.servers": "a:9292,b:9292",
        "compression.type": "zstd",
        "acks": "all",
        "batch.size": str(BATCH_SIZE),
    }


def test_names_are_taken_in_any_case_and_behind_either_prefix() -> None:
    one = read_sink_options({"Kafka.Bootstrap.Servers": "a:1", "client.linger.ms": "5", "client.id": "me"})
    assert dict(one.producer) == {"bootstrap.servers": "a:1", "linger.ms": "5", "client.id": "me"}
    assert producer_options(read_sink_options({**SERVERS, "batch.size": "1000"}))["batch.size"] == "1000"


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        ({}, "no bootstrap address: set bootstrap.servers='host:9292'"),
        ({**SERVERS, "topic": " "}, "topic is empty: set the name of a topic"),
        ({**SERVERS, "includeheaders": "maybe"}, "includeHeaders=maybe: true or false"),
        ({**SERVERS, "delivery": "exactly-once"}, "delivery=exactly-once: the sink does not write in transactions yet"),
        ({**SERVERS, "delivery": "perhaps"}, "delivery=perhaps: at-least-once"),
        ({**SERVERS, "kafka.acks": "1"}, "kafka.acks=1: the sink stores every row at least once"),
        ({**SERVERS, "linger.ms": "soon"}, "linger.ms='soon': must be a number"),
        ({**SERVERS, "lingr.ms": "5"}, "no option 'lingr.ms'; did you mean 'linger.ms'?"),
        ({**SERVERS, "kafka.key.serializer": "x"}, "kafka.key.serializer: cast the column instead"),
        ({**SERVERS, "kafka.bootstrap.servers": "other:1"}, "given twice, with two values"),
        ({**SERVERS, "kafka.sasl.mechanism": "PLAIN"}, "connections are not encrypted or authenticated yet"),
        ({**SERVERS, "kafka.transactional.id": "x"}, "the sink does not write in transactions yet"),
    ],
)
def test_a_wrong_option_is_named_in_one_line(given: dict[str, str], reported: str) -> None:
    with pytest.raises(OptionError) as caught:
        read_sink_options(given)
    assert reported in str(caught.value)
    assert "\n" not in str(caught.value)
