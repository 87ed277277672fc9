"""Options by their names: both spellings, types, ranges, contradictions, and names that are not ours."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import tidelog
from tidelog.client.errors import OptionError
from tidelog.client.option_table import (
    AdminConfig,
    ConsumerConfig,
    ProducerConfig,
    addresses_of,
    read_options,
    spellings_of,
)
from tidelog.log.batch import Codec


def options(first: object = "localhost", **more: Any) -> ProducerConfig:
    return read_options(ProducerConfig, first, more)


@pytest.mark.requirement("a:D-20", "a:D-22", "b:F-03", "b:F-04", "b:F-37", "a:C-18")
def test_both_spellings_mean_the_same() -> None:
    dotted = {
        "bootstrap.servers": "a:9292, b",
        "client.id": "me",
        "linger.ms": "5",
        "enable.idempotence": True,
        "compression.type": "zstd",
        "acks": "all",
        "batch.size": 16_384,
        "max.in.flight.requests.per.connection": 3,
        "delivery.timeout.ms": 60_000,
    }
    found = read_options(ProducerConfig, dotted, {})
    same = options(
        ["a:9292", "b:9292"],
        client_id="me",
        linger_ms=5,
        enable_idempotence="true",
        compression=Codec.ZSTD,
        acks=-1,
        batch_size=16_384,
        max_in_flight=3,
        delivery_timeout_ms=60_000.0,
    )
    assert found == same
    assert found.bootstrap == ("a:9292", "b:9292")
    assert read_options(ProducerConfig, dotted, {"linger_ms": 7}).linger_ms == 7, "keywords win"
    assert options(compression_type="LZ4", max_in_flight_requests_per_connection=1).compression is Codec.LZ4


def test_every_dotted_name_is_read_for_every_client() -> None:
    for kind in (ProducerConfig, ConsumerConfig, AdminConfig):
        known = spellings_of(kind)
        assert len(known) == len({spelling for all_of in known.values() for spelling in all_of[:1]})
        for name, spellings in known.items():
            if name == "bootstrap":
                continue
            default = getattr(read_options(kind, "x", {}), name)
            if default is not None and default != ():
                for spelling in (name, *spellings):
                    assert (
                        getattr(read_options(kind, {"bootstrap.servers": "x", spelling: default}, {}), name) == default
                    )


@pytest.mark.requirement("a:D-28", "a:D-61", "a:D-36", "b:F-38")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"enable_idempotence": True, "acks": 1}, "enable_idempotence needs acks='all', not acks=1"),
        ({"max_in_flight": 6}, "max_in_flight=6: must be from 1 to 5"),
        ({"delivery_timeout_ms": 30_000, "linger_ms": 1}, "delivery_timeout_ms=30000 is less than linger_ms=1"),
        ({"retries": 0}, "there are always retries"),
        ({"compression": "gzip", "compression_level": -5}, "compression_level=-5 is not a level of gzip"),
        ({"retry_backoff_ms": 500, "retry_backoff_max_ms": 100}, "retry_backoff_max_ms=100 is less than"),
        ({"buffer_memory": 1_024, "max_request_size": 4_096}, "max_request_size=4096 exceeds buffer_memory=1024"),
    ],
)
def test_what_contradicts_itself_is_refused_when_the_producer_is_made(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        tidelog.Producer("localhost", **given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"linger": 5}, r"no option 'linger'; did you mean 'linger_ms'\?"),
        ({"linger.sm": 5}, r"no option 'linger.sm'; did you mean 'linger.ms'\?"),
        ({"zzz": 5}, r"no option 'zzz'$"),
        ({"linger_ms": -1}, "linger_ms=-1: must be from 0 to 900,000"),
        ({"batch_size": "many"}, "batch_size='many': must be an integer"),
        ({"batch_size": 1.5}, "must be an integer"),
        ({"batch_size": True}, "must be an integer"),
        ({"acks": 2}, "acks=2: must be 'all', 1 or 0"),
        ({"acks": True}, "'all', 1 or 0"),
        ({"compression.type": "rar"}, "one of none, gzip, snappy, lz4, zstd"),
        ({"enable.idempotence": "maybe"}, "True or False"),
        ({"client_id": 5}, "client_id=5: must be a str"),
        ({"partitioner": "nearest"}, "one of consistent, consistent_random, default, fnv1a"),
        ({"value_serializer": 5}, "a function"),
        ({"interceptors": "my.Class"}, "a list of objects"),
        ({"sasl.mechanism": "PLAIN"}, "not encrypted or authenticated yet"),
        ({"security.protocol": "SSL"}, "not encrypted or authenticated yet"),
        ({"transactional.id": ""}, "transactional_id is empty"),
        ({"transactional.id": "t", "acks": 1}, "transactional_id needs acks='all'"),
        ({"transactional.id": "t", "enable.idempotence": "false"}, "transactional_id needs enable_idempotence"),
        ({"transaction.timeout.ms": 0}, "must be from 1"),
        ({"group.id": "g"}, "group.id belongs to a consumer, not to a producer"),
        ({"rebalance_cb": print}, "pass `subscribe` on_assigned"),
        ({"on_commit": print}, "pass `commit_async` on_commit"),
        ({"default.topic.config": {}}, "beside the other options"),
        ({"enable.partition.eof": True}, "compare `position` with `end_offsets`"),
        ({"enable.auto.offset.store": "false"}, "there is no store_offsets"),
        ({"linger.ms": 1, "linger_ms": 2}, "the same option with two values"),
        ({"batch_size": "many", "acks": 2}, "acks=2: .*; batch_size=.many.: must be an integer"),
    ],
)
def test_what_cannot_be_meant_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        read_options(ProducerConfig, {"bootstrap.servers": "x", **given}, {})


@pytest.mark.parametrize(
    "given",
    [
        {"socket.keepalive.enable": True},
        {"receive.buffer.bytes": -1},
        {"retries": 5},
        {"statistics.interval.ms": 100},
        {"test.mock.num.brokers": 3},
        {"client.dns.lookup": "use_all_dns_ips"},
        {"log_level": 6},
        {"broker.address.family": "v4"},
        {"api.version.request": True},
        {"reconnect.backoff.jitter.ms": 5},
        {"queue.buffering.max.kbytes": 1_024},
        {"queued.max.messages.kbytes": 1_024},
        {"queued.min.messages": 1},
        {"receive.message.max.bytes": 1},
        {"fetch.error.backoff.ms": 1},
        {"group.protocol": "classic"},
        {"error_cb": print},
        {"enabled_events": 1},
        {"offset.store.method": "broker"},
        {"produce.offset.report": True},
    ],
)
def test_options_without_meaning_here_are_ignored_and_reported(
    given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="tidelog"):
        assert read_options(ProducerConfig, {"bootstrap.servers": "x", **given}, {}) == options("x")
    assert f"option {next(iter(given))} has no effect" in caplog.text


def test_plaintext_is_what_there_is() -> None:
    assert read_options(ProducerConfig, {"bootstrap.servers": "x", "security.protocol": "plaintext"}, {}) == options(
        "x"
    )


def test_addresses() -> None:
    assert addresses_of("a,b:1 , [::1]:9292,[::1]") == ("a:9292", "b:1", "[::1]:9292")
    assert addresses_of(["a", "a:9292", "b"]) == ("a:9292", "b:9292")
    for wrong in ("", ",", "a:b", "a:0", "a:70000", "http://a:9292", ["a", 5], 5, "a b"):
        with pytest.raises(ValueError):
            addresses_of(wrong)
    with pytest.raises(OptionError, match="no bootstrap address"):
        read_options(ProducerConfig, None, {})


@pytest.mark.requirement("a:D-31", "a:D-39", "b:F-34")
def test_defaults_are_safe() -> None:
    assert options().retry_backoff_ms == 100
    assert options().acks == -1
    assert options().enable_idempotence is None
    assert options(acks=1).acks == 1
    assert options(acks="all", enable_idempotence=True).max_in_flight == 5


def test_what_is_so_by_nature_may_be_said() -> None:
    given = {"bootstrap.servers": "x", "enable.partition.eof": False, "enable.auto.offset.store": "True"}
    assert read_options(ConsumerConfig, given, {}) == read_options(ConsumerConfig, "x", {})
    assert read_options(ConsumerConfig, {**given, "auto.commit.enable": "false"}, {}).enable_auto_commit is False


def test_options_of_consumers_are_read_and_checked() -> None:
    found = read_options(
        ConsumerConfig, {"bootstrap.servers": "x", "group.id": "g", "auto.offset.reset": "smallest"}, {}
    )
    assert found.group == "g"
    assert found.auto_offset_reset == "earliest"
    assert read_options(ConsumerConfig, "x", {"auto_offset_reset": "by_duration:PT1H30M"}).auto_offset_reset.endswith(
        "M"
    )
    for wrong, said in (
        ({"heartbeat_interval_ms": 50_000}, "must be less than"),
        ({"group_instance_id": "i"}, "set group too"),
        ({"auto_offset_reset": "by_duration:P"}, "earliest, latest, none"),
        ({"isolation": "serializable"}, "one of read_uncommitted, read_committed"),
    ):
        with pytest.raises(OptionError, match=said):
            read_options(ConsumerConfig, "x", wrong)


@pytest.mark.parametrize(
    ("given", "assignor"),
    [
        ("uniform", "uniform"),
        ("cooperative-sticky", "uniform"),
        ("sticky", "uniform"),
        ("range,roundrobin", "range"),
        (" RoundRobin , range", "roundrobin"),
        (["range", "cooperative-sticky"], "range"),
        ("org.apache.kafka.clients.consumer.RangeAssignor", "range"),
        ("org.apache.kafka.clients.consumer.RoundRobinAssignor", "roundrobin"),
        (["org.apache.kafka.clients.consumer.CooperativeStickyAssignor"], "uniform"),
        ("org.apache.kafka.clients.consumer.StickyAssignor,range", "uniform"),
        ("com.example.MyAssignor,range", "range"),
    ],
)
def test_assignors_have_the_names_that_other_clients_give_them(given: Any, assignor: str) -> None:
    for spelling in ("partition.assignment.strategy", "group.remote.assignor", "assignor"):
        assert read_options(ConsumerConfig, "a:1", {spelling: given}).assignor == assignor


@pytest.mark.parametrize("given", ["com.example.MyAssignor", "rack", "", [], [5], 5, ["cooperative"]])
def test_an_assignor_that_is_not_there_is_refused_with_those_that_are(given: Any) -> None:
    with pytest.raises(OptionError, match=r"cooperative-sticky.*, range or roundrobin, or a list"):
        read_options(ConsumerConfig, "a:1", {"partition.assignment.strategy": given})


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("murmur2", "default"),
        ("murmur2_random", "default"),
        ("random", "uniform_sticky"),
        ("consistent", "consistent"),
        ("consistent_random", "consistent_random"),
        ("fnv1a", "fnv1a"),
        ("FNV1A_random", "fnv1a"),
    ],
)
def test_partitioners_have_the_names_that_librdkafka_gives_them(given: str, name: str) -> None:
    assert read_options(ProducerConfig, "a:1", {"partitioner": given}).partitioner == name
