"""Clients that start before their cluster, or outlive an outage of it or of a broker: they wait, say whom they cannot
reach, and lose nothing."""

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from exercises import Program, make, records_of
from support.clusters.waiting import until

import tidelog
from tidelog.client.errors import DeliveryTimeoutError, FlushTimeoutError, NoClusterError
from tidelog.model.errors import RecordTooLargeError
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=1) as made:
        yield made


def outages(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record for record in caplog.records if record.name == "tidelog.client"]
    return [record.getMessage() for record in found if record.levelno >= logging.WARNING]


def test_clients_wait_for_a_cluster_that_is_not_there_yet_and_log_it(
    cluster: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    with tidelog.Admin(cluster.bootstrap) as admin:
        admin.create_topic("early", partitions=1)
    cluster.kill(1)
    starter = threading.Timer(1.0, lambda: cluster.start(1))
    with (
        tidelog.Producer(cluster.bootstrap) as producer,
        tidelog.Consumer(cluster.bootstrap, group="g", auto_offset_reset="earliest") as consumer,
    ):
        consumer.subscribe("early")
        assert not list(consumer.poll(0.2)), "poll keeps its own time limit"
        starter.start()
        producer.send("early", b"1").result(60)
        records = until(lambda: [record.value for record in consumer.poll(1.0)], "a record", timeout_s=60)
    starter.join()
    assert records == [b"1"]
    lines = outages(caplog)
    assert any(f"cannot reach {cluster.bootstrap}: " in line and "refused" in line for line in lines), lines
    assert len(lines) <= 6, lines


def test_an_outage_is_logged_at_a_bounded_rate(cluster: LocalCluster, caplog: pytest.LogCaptureFixture) -> None:
    with tidelog.Admin(cluster.bootstrap) as admin:
        admin.create_topic("orders", partitions=1)
    with tidelog.Producer(cluster.bootstrap, delivery_timeout_ms=120_000) as producer:
        producer.send("orders", b"1").result(60)
        cluster.kill(1)
        waiting = producer.send("orders", b"2")
        until(lambda: outages(caplog), "the outage is logged while it lasts", timeout_s=30)
        cluster.start(1)
        assert waiting.result(90).offset == 1
    assert len(outages(caplog)) <= 6, outages(caplog)


def test_a_port_of_another_api_is_an_error_at_once(cluster: LocalCluster) -> None:
    with (
        tidelog.Admin(f"127.0.0.1:{cluster.ports(1).http}") as admin,
        pytest.raises(NoClusterError, match="HTTP"),
    ):
        admin.list_topics()


@pytest.mark.requirement("b:EX-06")
def test_records_are_sent_and_forgotten_waited_for_or_called_back(cluster: LocalCluster) -> None:
    topic = "CustomerCountry"
    with tidelog.Admin(cluster.bootstrap) as admin:
        admin.create_topic(topic, partitions=1)
    reported: list[tuple[Exception | None, tidelog.RecordMetadata]] = []

    def on_delivery(error: Exception | None, metadata: tidelog.RecordMetadata) -> None:
        reported.append((error, metadata))

    options: tidelog.ProducerOptions = {"delivery_timeout_ms": 4_000, "request_timeout_ms": 2_000}
    with tidelog.Producer(cluster.bootstrap, **options) as producer:
        producer.send(topic, "France", key="Precision Products")  # and forgotten
        metadata = producer.send(topic, "France", key="Precision Products").result(30)
        assert (metadata.topic, metadata.partition, metadata.offset) == (topic, 0, 1)
        producer.send(topic, "USA", key="Biomedical Materials", on_delivery=on_delivery)
        producer.flush(30)
        assert [(error, row.offset) for error, row in reported] == [(None, 2)]
        with pytest.raises(RecordTooLargeError, match="max_request_size"):
            producer.send(topic, b"x" * (2 << 20))
        assert producer.metrics()["retries"] == 0
        cluster.kill(1)
        began_s = time.monotonic()
        late = producer.send(topic, "Peru", key="Biomedical Materials", on_delivery=on_delivery)
        with pytest.raises(DeliveryTimeoutError):
            late.result(60)
        assert time.monotonic() - began_s > 3.5
        until(lambda: len(reported) == 2, "the callback is called")
        assert isinstance(reported[1][0], DeliveryTimeoutError)
        cluster.start(1)
        until(lambda: _sends(producer, topic), "the broker is back")
    values = [record.value for record in records_of(cluster, topic)]
    assert values[:3] == [b"France", b"France", b"USA"]
    assert b"Italy" in values


def _sends(producer: tidelog.Producer, topic: str) -> bool:
    try:
        return producer.send(topic, "Italy").result(30).offset >= 3
    except DeliveryTimeoutError:
        return False


def _check_orders(rows: list[tuple[int, int, int]], acknowledged: set[int], stored: list[Any], dead: list[Any]) -> None:
    assert {int(record.value) for record in stored} == acknowledged
    assert len(stored) == len(acknowledged), "each once, as the producer is idempotent"
    assert {row[:2] for row in rows} == {(record.partition, record.offset) for record in stored}
    assert len(rows) - len(stored) <= 100, "what was handled since a commit, when one was killed"
    letters = {int(record.value) for record in dead}
    assert letters == {number for number in acknowledged if number % 17 == 0}


@pytest.mark.requirement("a:X3-11", "a:S-04", "a:S-05")
def test_an_application_handles_all_orders_while_brokers_and_it_itself_are_killed(
    harmed: LocalCluster, programs: list[Program]
) -> None:
    with tidelog.Admin(harmed.bootstrap) as admin:
        orders, dead = make(admin, "orders", 4), make(admin, "dead")
        acknowledged = _handle_orders(harmed, admin, programs, orders, dead)
        assert sum(row.lag or 0 for row in admin.group_lag("application")) == 0, "all of it is committed"
    rows = _handled(programs)
    _check_orders(rows, acknowledged, records_of(harmed, orders), records_of(harmed, dead))
    retried = {number for program in programs for number in program.said("retry")}
    assert retried >= {number for number in acknowledged if number % 13 == 0 and number % 17}


def _handled(programs: list[Program]) -> list[tuple[int, int, int]]:
    return [tuple(row) for program in programs for row in program.said("handled")]


def _handle_orders(
    harmed: LocalCluster, admin: tidelog.Admin, programs: list[Program], orders: str, dead: str
) -> set[int]:
    """All that was acknowledged. It is handled when this returns, and the programs have ended."""
    arguments = ("application_process.py", harmed.bootstrap, "application", orders, dead)
    programs += [Program(*arguments), Program(*arguments)]
    acknowledged: set[int] = set()
    refused: list[Exception] = []
    is_over = threading.Event()

    def produce() -> None:
        with tidelog.Producer(harmed.bootstrap) as producer:
            number = 1
            while not is_over.wait(0.01):

                def on_ack(error: Exception | None, _: tidelog.RecordMetadata, number: int = number) -> None:
                    acknowledged.add(number) if error is None else refused.append(error)

                producer.send(orders, str(number), on_delivery=on_ack, key=f"customer {number % 50}")
                number += 1

    def handled() -> set[int]:
        return {row[2] for row in _handled(programs)}

    def goes_on() -> None:
        before, wanted = len(handled()), len(acknowledged) + 40
        until(lambda: len(acknowledged) > wanted, "orders are taken")
        until(lambda: len(handled()) > before + 40, "orders are handled")

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        goes_on()
        leader = admin.describe_topic(orders).partitions[0].leader
        assert leader is not None
        harmed.kill(leader)
        goes_on()
        harmed.start(leader)
        programs[0].kill()
        programs.append(Program(*arguments))
        goes_on()
        other = leader % 3 + 1
        assert harmed.stop(other) == 0
        goes_on()
        harmed.start(other)
        goes_on()
    finally:
        is_over.set()
        thread.join()
    assert refused == []
    until(lambda: acknowledged <= handled(), "all are handled")
    for program in programs[1:]:
        program.close()
    return acknowledged


@pytest.mark.case("C2")
@pytest.mark.requirement("a:D-60", "a:D-72", "b:F-13")
def test_a_killed_leader_costs_time_and_no_record(harmed: LocalCluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    with tidelog.Admin(harmed.bootstrap) as admin:
        topic = make(admin, "failover", 3)
    with tidelog.Producer(harmed.bootstrap, linger_ms=2) as producer:
        deliveries = []
        for row in range(3_000):
            deliveries.append(producer.send(topic, b"%d" % row, partition=row % 3))
            if row == 800:
                harmed.kill(2)
            if row == 2_000:
                harmed.start(2, wait=False)
            time.sleep(0.001)
        producer.send(topic, b"last", partition=0)
        with pytest.raises(FlushTimeoutError):
            producer.flush(0)
        producer.flush(60)
        assert [one.result().offset for one in deliveries] == [row // 3 for row in range(3_000)]
    harmed.wait_ready(2)
    stored = records_of(harmed, topic)
    for part in range(3):
        values = [record.value for record in stored if record.partition == part]
        assert values == [b"%d" % row for row in range(part, 3_000, 3)] + [b"last"] * (part == 0)
