"""A client that starts before its cluster, or outlives an outage of it, waits and says whom it cannot reach."""

import logging
import threading
import time
from collections.abc import Iterator

import pytest
from patience import until

import tidelog
from tidelog.client.errors import NoClusterError
from tidelog.testing import LocalCluster

pytestmark = pytest.mark.cluster


@pytest.fixture
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
        admin.create_topic("orders", partitions=1)
    cluster.kill(1)
    starter = threading.Timer(1.0, lambda: cluster.start(1))
    with (
        tidelog.Producer(cluster.bootstrap) as producer,
        tidelog.Consumer(cluster.bootstrap, group="g", auto_offset_reset="earliest") as consumer,
    ):
        consumer.subscribe("orders")
        assert not list(consumer.poll(200)), "poll keeps its own time limit"
        starter.start()
        producer.send("orders", b"1").result(60)
        records = until(lambda: [record.value for record in consumer.poll(1_000)], "a record", timeout_s=60)
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
    start_s = time.monotonic()
    with (
        tidelog.Admin(f"127.0.0.1:{cluster.ports(1).http}") as admin,
        pytest.raises(NoClusterError, match="HTTP"),
    ):
        admin.list_topics()
    assert time.monotonic() - start_s < 20, "well below bootstrap_wait_ms"
