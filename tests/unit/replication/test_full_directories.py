"""A log directory without room: it is reported as full, retention frees what it may, and room ends the state."""

import logging

import pytest
from support.brokers.cluster import ReplicationCluster, batch, orders_cluster

from tidelog.metadata.queries import describe_topic
from tidelog.model.errors import ErrorCode

BROKERS = (11, 12, 13)


def full_directories(cluster: ReplicationCluster, broker: int) -> bool:
    return bool(cluster.image().brokers[broker].full)


def test_a_full_directory_makes_its_partition_read_only_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with ReplicationCluster(301, brokers=BROKERS) as cluster:
        orders = cluster.topic("orders", (11,))
        cluster.write(orders, b"0")
        cluster.world.machine("b11").disk("logs-0").fill()
        with caplog.at_level(logging.WARNING, logger="tidelog"):
            for _ in range(40):
                result = cluster.produce(11, orders, batch(b"1"))
                assert result.error is not None
                assert result.error.code is ErrorCode.STORAGE_ERROR
        lines = [record.getMessage() for record in caplog.records if "full" in record.getMessage()]
        assert len(lines) == 1, lines
        cluster.until(lambda: full_directories(cluster, 11))
        (partition,) = describe_topic(cluster.image(), "orders").partitions
        assert partition.state == "read-only"
        assert "log directory of broker 11 is full: make room" in partition.advice
        (described,) = cluster.on_broker(11, lambda found: found.service.log_directories.describe())
        assert described.is_full
        assert described.error is None, "it can be read"
        cluster.world.machine("b11").disk("logs-0").heal()
        cluster.until(lambda: not full_directories(cluster, 11), timeout=20)
        (partition,) = describe_topic(cluster.image(), "orders").partitions
        assert (partition.state, partition.advice) == ("online", "")
        assert cluster.produce(11, orders, batch(b"1")).error is None


def test_a_follower_with_a_full_disk_writes_one_line_however_long_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    with orders_cluster(302, b"0") as (cluster, orders):
        with caplog.at_level(logging.ERROR, logger="tidelog"):
            cluster.world.machine("b12").disk("logs-0").fill()
            assert cluster.produce(11, orders, batch(b"1"), timeout_ms=30_000).error is None
            cluster.world.run_for(30)
        about = [r.getMessage() for r in caplog.records if "logs-0" in r.getMessage() or "orders" in r.getMessage()]
        assert len([line for line in about if "is full" in line]) == 1
        assert len(about) <= 2, about
        cluster.until(lambda: full_directories(cluster, 12))


def test_a_full_follower_leaves_the_in_sync_set_at_once_and_joins_when_it_has_room() -> None:
    with orders_cluster(305, b"0") as (cluster, orders):
        cluster.world.machine("b12").disk("logs-0").fill()
        start_s = cluster.world.scheduler.now_ns / 1e9
        assert cluster.produce(11, orders, batch(b"1"), timeout_ms=30_000).error is None
        assert cluster.world.scheduler.now_ns / 1e9 - start_s < 4, "well below replica.lag.time.max.ms"
        assert 12 not in cluster.partition(orders).isr
        for number in range(20):
            assert cluster.produce(11, orders, batch(b"%d" % number), timeout_ms=1_000).error is None
        assert 12 not in cluster.partition(orders).isr
        cluster.world.machine("b12").disk("logs-0").heal()
        cluster.until_in_sync(orders, *BROKERS, timeout=30)


def test_a_former_leader_with_a_full_disk_does_not_join_the_in_sync_set() -> None:
    with orders_cluster(306, b"0") as (cluster, orders):
        cluster.world.machine("b11").disk("logs-0").fill()
        assert cluster.produce(11, orders, batch(b"1")).error is not None
        cluster.until(lambda: cluster._leader(orders) not in (None, 11))
        cluster.world.run_for(3)
        assert 11 not in cluster.partition(orders).isr
        leader = cluster.leader(orders)
        assert cluster.produce(leader, orders, batch(b"2"), timeout_ms=1_000).error is None


def test_followers_that_are_all_full_stay_in_sync_down_to_the_minimum() -> None:
    with ReplicationCluster(307, brokers=BROKERS) as cluster:
        orders = cluster.topic("orders", BROKERS, configs={"min.insync.replicas": "2"})
        cluster.write(orders, b"0")
        for broker in (12, 13):
            cluster.world.machine(f"b{broker}").disk("logs-0").fill()
        assert cluster.produce(11, orders, batch(b"1"), timeout_ms=3_000).error is not None
        assert len(cluster.partition(orders).isr) >= 2
        for broker in (12, 13):
            cluster.world.machine(f"b{broker}").disk("logs-0").heal()
        cluster.until_in_sync(orders, *BROKERS, timeout=30)


def test_size_retention_frees_space_at_once_when_the_disk_is_full() -> None:
    with ReplicationCluster(303, brokers=BROKERS) as cluster:
        configs = {"segment.bytes": "4000", "retention.bytes": "4000", "file.delete.delay.ms": "3600000"}
        orders = cluster.topic("orders", (11,), configs=configs)
        for number in range(60):
            cluster.write(orders, b"%d" % number + b"x" * 300)
        cluster.world.run_for(3)  # the recovery point moves every second
        for number in range(20):
            cluster.write(orders, b"%d" % number + b"x" * 300)
        log = cluster.log(11, orders)
        assert log.mark.offset < log.segments.active.base_offset, "some of it lies past the recovery point"
        assert log.start_offset == 0, "the regular round of retention is minutes away"
        device = cluster.world.machine("b11").disk("logs-0")
        device.fill()
        used = device.used_bytes
        assert cluster.produce(11, orders, batch(b"y" * 300)).error is not None
        cluster.until(lambda: log.start_offset > 0 and device.used_bytes < used - 4000, timeout=5)
        cluster.until(lambda: cluster.produce(11, orders, batch(b"y" * 300)).error is None, timeout=30)


def test_a_preferred_leader_with_a_full_disk_does_not_get_its_leadership_back() -> None:
    with orders_cluster(304, b"0") as (cluster, orders):
        cluster.world.machine("b11").disk("logs-0").fill()
        assert cluster.produce(11, orders, batch(b"1")).error is not None
        cluster.until(lambda: cluster._leader(orders) not in (None, 11))
        cluster.world.run_for(20)
        assert full_directories(cluster, 11), "nothing has made room"
        assert cluster._leader(orders) != 11
        cluster.world.machine("b11").disk("logs-0").heal()
        cluster.until_in_sync(orders, *BROKERS)
