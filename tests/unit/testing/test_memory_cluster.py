"""The cluster in memory, through the public clients."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import tidelog
from tidelog.client import io_thread
from tidelog.client.errors import DeliveryTimeoutError
from tidelog.model.errors import ErrorCode, InvalidConfigError, TidelogError, UnreachableError
from tidelog.testing import ClusterFailedError, MemoryCluster

READY_MS = 100
READY_ATTEMPTS = 20


@pytest.fixture
def cluster() -> Iterator[MemoryCluster]:
    with MemoryCluster(seed=1) as made:
        yield made


@pytest.fixture
def orders(cluster: MemoryCluster) -> MemoryCluster:
    create(cluster)
    return cluster


def create(cluster: MemoryCluster, partitions: int = 1, factor: int = 3, **configs: object) -> None:
    with tidelog.Admin(cluster.bootstrap) as admin:
        admin.create_topic("orders", partitions=partitions, replication_factor=factor, configs=configs)


def values(cluster: MemoryCluster, count: int, *, timeout_s: float = 60) -> list[bytes | None]:
    """At least so many, from the beginning."""
    found: list[bytes | None] = []
    end_s = time.monotonic() + timeout_s
    with tidelog.Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign(consumer.partitions_for("orders"))
        while len(found) < count and time.monotonic() < end_s:
            found += [record.value for record in consumer.poll(0.2)]
        found += [record.value for record in consumer.poll(0.05)]
    return found


def test_a_cluster_is_ready_within_a_tenth_of_a_second() -> None:
    """Of a core; and it waits for nothing. The quickest of several: the first one pays for imports."""
    took: list[tuple[float, float]] = []
    while not took or (min(took)[0] >= READY_MS and len(took) < READY_ATTEMPTS):
        start_s, cpu_s = time.perf_counter(), time.process_time()
        with MemoryCluster(seed=len(took)):
            took.append(((time.process_time() - cpu_s) * 1000, (time.perf_counter() - start_s) * 1000))
    assert min(took)[0] < READY_MS, took
    assert min(wall_ms for _, wall_ms in took) < 10 * READY_MS, took


def test_the_public_clients_work_as_ever(orders: MemoryCluster) -> None:
    with tidelog.Producer(orders.bootstrap) as producer:
        stored = producer.send("orders", b"1", key="k", headers={"h": b"v"}).result(30)
        assert (stored.partition, stored.offset) == (0, 0)
        producer.send_many("orders", values=[b"2", b"3"]).result(30)
    with tidelog.Consumer(orders.bootstrap, group="billing", auto_offset_reset="earliest") as consumer:
        consumer.subscribe(["orders"])
        found: list[bytes | None] = []
        for record in consumer:
            found.append(record.value)
            if len(found) == 3:
                break
        consumer.commit()
    assert found == [b"1", b"2", b"3"]
    with tidelog.Admin(orders.bootstrap) as admin:
        (lag,) = admin.group_lag("billing")
        assert (lag.committed, lag.lag) == (3, 0)
        assert [broker.id for broker in admin.describe_cluster().brokers] == [1, 2, 3]


def test_asyncio_clients_work_too(orders: MemoryCluster) -> None:
    async def whole() -> int:
        async with tidelog.aio.Producer(orders.bootstrap) as producer:
            delivery = await producer.send("orders", b"1")
            return (await delivery).offset

    assert asyncio.run(whole()) == 0


def test_no_socket_is_opened(orders: MemoryCluster) -> None:
    before = sockets()
    with tidelog.Producer(orders.bootstrap) as producer:
        producer.send("orders", b"1").result(30)
        assert sockets() == before


def sockets() -> set[str]:
    with open("/proc/self/net/tcp", encoding="ascii") as file:
        mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if is_open(fd)}
        return {f"socket:[{line.split()[9]}]" for line in file.readlines()[1:]} & mine


def is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_acknowledged_records_survive_the_death_of_their_leader(orders: MemoryCluster) -> None:
    with tidelog.Producer(orders.bootstrap) as producer:
        for number in range(20):
            producer.send("orders", b"%d" % number)
            if number == 10:
                killed = orders.kill_leader("orders")
        producer.flush(60)
    assert orders.leader("orders") not in (killed, None)
    assert killed not in orders.running()
    assert values(orders, 20) == [b"%d" % number for number in range(20)]
    assert orders.restart(killed) == killed
    orders.wait_in_sync("orders")
    assert orders.in_sync("orders") == (1, 2, 3)
    assert any(f"kill broker {killed}" in fault for fault in orders.faults)


def test_synced_records_survive_a_loss_of_power_and_unsynced_ones_do_not(orders: MemoryCluster) -> None:
    with tidelog.Producer(orders.bootstrap) as producer:
        producer.send("orders", b"kept").result(30)
    orders.stall_disk(1, 2, 3)
    with tidelog.Producer(orders.bootstrap, acks=0) as producer:
        producer.send("orders", b"lost")
        producer.flush(30)
        until_appended(orders, 2)
    orders.lose_unsynced()
    assert values(orders, 1) == [b"kept"]
    with tidelog.Producer(orders.bootstrap) as producer:
        assert producer.send("orders", b"after").result(60).offset == 1


def until_appended(cluster: MemoryCluster, end: int) -> None:
    """The leader has it in memory."""

    def is_there() -> bool:
        return any(log.end_offset >= end for one in cluster._nodes.running.values() for log in one.logs.all())

    cluster._until(is_there, f"a log ends at {end}", 30)


def test_a_group_goes_on_after_the_power_was_gone(orders: MemoryCluster) -> None:
    options: dict[str, Any] = {
        "group": "billing",
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
    }
    with tidelog.Producer(orders.bootstrap) as producer, tidelog.Consumer(orders.bootstrap, **options) as consumer:
        consumer.subscribe(["orders"])
        producer.send("orders", b"1").result(30)
        found = read(consumer, 1)
        consumer.commit()
        orders.lose_unsynced(loss="some")
        producer.send("orders", b"2").result(60)
        found += read(consumer, 1)
    assert found == [b"1", b"2"]


def read(consumer: tidelog.Consumer, count: int) -> list[bytes | None]:
    found: list[bytes | None] = []
    end_s = time.monotonic() + 60
    while len(found) < count and time.monotonic() < end_s:
        found += [record.value for record in consumer.poll(0.2)]
    return found


def test_a_paused_leader_is_replaced_and_comes_back(orders: MemoryCluster) -> None:
    leader = orders.leader("orders")
    assert leader is not None
    assert orders.pause(leader) == leader
    with tidelog.Producer(orders.bootstrap, request_timeout_ms=5_000) as producer:
        assert producer.send("orders", b"1").result(60).offset == 0
        assert orders.leader("orders") != leader
        orders.resume(leader)
        orders.wait_in_sync("orders")
        producer.send("orders", b"2").result(60)
    assert values(orders, 2) == [b"1", b"2"]


def test_a_leader_that_is_cut_off_is_replaced(orders: MemoryCluster) -> None:
    leader = orders.leader("orders")
    assert leader is not None
    assert orders.isolate(leader, clients=True) == (leader,)
    with tidelog.Producer(orders.bootstrap, request_timeout_ms=5_000) as producer:
        producer.send("orders", b"1").result(60)
        assert orders.leader("orders") != leader
        orders.heal()
        orders.wait_in_sync("orders")
    assert values(orders, 1) == [b"1"]


def test_a_broker_that_stops_in_order_hands_its_leaderships_over(orders: MemoryCluster) -> None:
    leader = orders.leader("orders")
    assert leader is not None
    assert orders.stop(leader) == leader
    assert orders.leader("orders") not in (leader, None)
    assert orders.restart() == leader


def test_too_few_in_sync_refuse_a_write() -> None:
    with MemoryCluster(seed=3, settings={"min.insync.replicas": 3}) as cluster:
        create(cluster)
        cluster.kill()
        with tidelog.Producer(
            cluster.bootstrap, request_timeout_ms=200, delivery_timeout_ms=500, linger_ms=0
        ) as producer:
            error = producer.send("orders", b"1").exception(60)
    assert isinstance(error, DeliveryTimeoutError) or (
        isinstance(error, TidelogError) and error.code is ErrorCode.NOT_ENOUGH_REPLICAS
    )


def test_a_seed_draws_the_same_victims() -> None:
    def victims(seed: int) -> list[int]:
        with MemoryCluster(brokers=5, seed=seed) as cluster:
            return [cluster.kill(), cluster.pause(), *cluster.isolate(), *cluster.stall_disk()]

    assert victims(7) == victims(7)
    assert len({tuple(victims(seed)) for seed in range(5)}) > 1


def test_wrong_faults_say_what_is_wrong(cluster: MemoryCluster) -> None:
    with pytest.raises(ValueError, match="no broker 9"):
        cluster.kill(9)
    cluster.kill(1)
    with pytest.raises(ValueError, match="does not run"):
        cluster.pause(1)
    with pytest.raises(ValueError, match="'all' or 'some'"):
        cluster.lose_unsynced(loss="none")  # type: ignore[arg-type]
    assert cluster.leader("nothing") is None
    with pytest.raises(InvalidConfigError, match=r"no\.such\.key"), MemoryCluster(settings={"no.such.key": 1}):
        pass
    with pytest.raises(ValueError, match="brokers"):
        MemoryCluster(brokers=0)


def test_one_broker_and_three_controllers() -> None:
    with MemoryCluster(brokers=1, controllers=3, racks=["a"]) as cluster:
        create(cluster, factor=1)
        with tidelog.Producer(cluster.bootstrap) as producer:
            assert producer.send("orders", b"1").result(30).offset == 0
        with tidelog.Admin(cluster.bootstrap) as admin:
            assert admin.describe_cluster().brokers[0].rack == "a"


def test_two_clusters_stand_beside_each_other(orders: MemoryCluster) -> None:
    with MemoryCluster(seed=1) as other, tidelog.Admin(other.bootstrap) as admin:
        assert admin.list_topics() == []
        assert other.bootstrap != orders.bootstrap


def test_clients_of_a_closed_cluster_find_nobody() -> None:
    with MemoryCluster() as cluster:
        create(cluster)
        admin = tidelog.Admin(cluster.bootstrap, default_api_timeout_ms=500)
        consumer = tidelog.Consumer(cluster.bootstrap, default_api_timeout_ms=500)
        consumer.assign([("orders", 0)])
        assert len(admin.list_topics()) == 1
        consumer.poll(0)
    assert not set(cluster.bootstrap.split(",")) & set(io_thread.IN_PROCESS)
    with pytest.raises(TidelogError):
        admin.list_topics()
    admin.close()
    consumer.close(timeout=1.0)
    cluster.close()
    assert not [one for one in threading.enumerate() if one.name == "tidelog-memory"]
    with pytest.raises(UnreachableError):
        cluster.kill()


def test_a_broker_failure_is_reported() -> None:
    with pytest.raises(ClusterFailedError, match="broker 1"), MemoryCluster(brokers=1) as cluster:
        cluster._do(lambda: cluster._nodes._fail(cluster._brokers[0], RuntimeError("our own error")))


def test_waiters_learn_that_their_cluster_has_failed(cluster: MemoryCluster) -> None:
    broken = RuntimeError("an error that nobody handles")

    def fail() -> bool:
        cluster._nodes.world.scheduler.fail("world", "broken", broken)
        return False

    with pytest.raises((UnreachableError, ClusterFailedError)):
        cluster._until(fail, "never", 30)
    with pytest.raises(ClusterFailedError, match="nobody handles"):
        cluster.check()
    cluster._thread.failure = None  # it was the test's


def test_a_forked_child_cannot_use_the_cluster_of_its_parent(cluster: MemoryCluster) -> None:
    create(cluster)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            cluster.leader("orders")
        except UnreachableError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert cluster.leader("orders") is not None
