"""Rot that nobody has read yet: found by the scrub, at its pace, and mended where another replica is in sync."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.brokers.cluster import ReplicationCluster, RunningBroker
from test_replicas import BROKERS

from tidelog.log.segment import SegmentInfo
from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.model.ids import NodeId, PartitionId
from tidelog.replication.replica import Replica, ReplicaConfig
from tidelog.replication.scrubbing import INTERVAL, PIECE_BYTES_MIN, RATE, Scrubbing
from tidelog.replication.segment_repair import SegmentRepair

CONFIG = ReplicaConfig(cleaner_backoff_ms=1_000, scrub_delay_ms=1_000)
RECORDS = 12


def begun(cluster: ReplicationCluster, *brokers: int, **configs: str) -> PartitionId:
    """A topic of small segments, written, most of it sealed and known with its checksums."""
    cluster.start()
    cluster.start_brokers(*brokers)
    orders = cluster.topic("orders", brokers, configs={"segment.bytes": "200", **configs})
    cluster.write_numbers(orders, RECORDS)
    cluster.until_equal(orders, *brokers)
    cluster.until(
        lambda: all(
            len(cluster.log(broker, orders).segments.sealed) > 3
            and all(info.crc is not None for info in cluster.log(broker, orders).segments.sealed)
            for broker in brokers
        )
    )
    return orders


def scrub_of(cluster: ReplicationCluster, broker: int) -> Scrubbing:
    (found,) = [one for one in cluster.brokers.values() if one.replicas.me == broker]
    return found.replicas.background_tasks.scrubbing


def set_config(cluster: ReplicationCluster, **values: int) -> None:
    changes = tuple(
        ConfigChange(key={"interval": INTERVAL, "rate": RATE}[name], operation="set", value=str(value))
        for name, value in values.items()
    )
    (outcome,) = cluster.ask(
        AlterConfigs(resources=(ResourceChange(resource_type="cluster", resource="", changes=changes),))
    ).items
    assert outcome.error is None, outcome.message


def rot(cluster: ReplicationCluster, broker: int, orders: PartitionId, *, at: int = 70) -> int:
    """A byte of the second segment changes; its base offset."""
    log = cluster.log(broker, orders)
    info = log.segments.sealed[1]
    cluster.world.machine(f"b{broker}").disk("logs-0").overwrite(log.segments.file_path(info.base_offset), at, b"\xa5")
    return info.base_offset


def wait_for_cycle(cluster: ReplicationCluster, broker: int) -> None:
    cycles = scrub_of(cluster, broker).cycles
    cluster.until(lambda: scrub_of(cluster, broker).cycles >= cycles + 2, timeout=120)


@pytest.mark.case("S2")
@pytest.mark.parametrize("at", [70, 3], ids=["in a batch", "outside of any batch's CRC"])
def test_rot_of_a_follower_that_nobody_reads_is_found_and_mended_from_the_leader(at: int) -> None:
    with ReplicationCluster(401, replica_config=CONFIG) as cluster:
        orders = begun(cluster, *BROKERS)
        set_config(cluster, interval=2_000)
        wait_for_cycle(cluster, 12)
        assert scrub_of(cluster, 12).faults == 0, "what is sound is found sound"
        assert scrub_of(cluster, 12).segments > 3
        rot(cluster, 12, orders, at=at)
        cluster.until(lambda: scrub_of(cluster, 12).faults == 1, timeout=60)
        cluster.until(lambda: cluster.log(12, orders).damaged is None)
        cluster.until_whole(orders)
        wait_for_cycle(cluster, 12)
        assert scrub_of(cluster, 12).faults == 1, "it is mended"
        assert cluster.values(orders) == [b"%d" % number for number in range(RECORDS)]


@pytest.mark.case("S2")
def test_a_leader_that_finds_rot_gives_up_leading_and_is_mended() -> None:
    with ReplicationCluster(402, replica_config=CONFIG) as cluster:
        orders = begun(cluster, *BROKERS)
        set_config(cluster, interval=2_000)
        leader = cluster.leader(orders)
        rot(cluster, leader, orders)
        cluster.until(lambda: cluster._leader(orders) not in (leader, -1), timeout=60)
        cluster.until_whole(orders)
        assert cluster.values(orders) == [b"%d" % number for number in range(RECORDS)]


def test_the_only_copy_is_reported_and_not_removed() -> None:
    with ReplicationCluster(403, replica_config=CONFIG) as cluster:
        orders = begun(cluster, 11, **{"min.insync.replicas": "1"})
        set_config(cluster, interval=2_000)
        rot(cluster, 11, orders)
        cluster.until(lambda: scrub_of(cluster, 11).faults >= 2, timeout=60)
        assert cluster.log(11, orders).damaged is None
        assert cluster.leader(orders) == 11
        assert cluster.write(orders, b"more").base_offset == RECORDS


def test_the_only_in_sync_replica_keeps_its_place_when_a_restore_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source answers, and dies before it sends its bytes: what only the leader has is not lost with its place."""
    with ReplicationCluster(404, replica_config=CONFIG) as cluster:
        orders = begun(cluster, 11, 12, **{"min.insync.replicas": "1"})
        leader = cluster.leader(orders)
        other = 23 - leader

        async def answered_before(_repair: SegmentRepair, _replica: Replica, _info: SegmentInfo) -> int:
            return other

        monkeypatch.setattr(SegmentRepair, "find_source", answered_before)
        cluster.kill(NodeId(other))
        cluster.until(lambda: cluster.partition(orders).isr == (leader,))
        set_config(cluster, interval=2_000)
        rot(cluster, leader, orders)
        cluster.until(lambda: scrub_of(cluster, leader).unrepairable >= 2, timeout=120)
        assert cluster.log(leader, orders).damaged is None
        assert cluster.leader(orders) == leader
        assert cluster.write(orders, b"more").base_offset == RECORDS


def test_a_replica_that_is_suspected_while_it_is_scrubbed_is_scrubbed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with ReplicationCluster(405, replica_config=ReplicaConfig(scrub_delay_ms=3_600_000)) as cluster:
        orders = begun(cluster, *BROKERS)
        checks = []
        check = Scrubbing._check_replica

        async def suspected_meanwhile(scrubbing: Scrubbing, partition_id: PartitionId) -> None:
            checks.append(partition_id)
            if len(checks) == 1:
                scrubbing.check_soon(partition_id)
            await check(scrubbing, partition_id)

        monkeypatch.setattr(Scrubbing, "_check_replica", suspected_meanwhile)
        scrub_of(cluster, 12).check_soon(orders)
        cluster.until(lambda: len(checks) >= 2, timeout=30)
        cluster.world.run_for(5)
        assert checks == [orders, orders]


def test_only_the_leader_and_replicas_in_sync_prove_a_copy_and_only_by_checksums() -> None:
    """Another one may have records of a former leader: this one would not get its own again from it."""
    with ReplicationCluster(406, replica_config=ReplicaConfig(scrub_delay_ms=3_600_000)) as cluster:
        orders = begun(cluster, *BROKERS)
        leader = cluster.leader(orders)
        follower, other = (broker for broker in BROKERS if broker != leader)
        replica, partition = cluster.replica(follower, orders), cluster.partition(orders)
        known = {"leader": partition.leader, "replicas": partition.replicas, "isr": partition.isr}

        def proves(**changes: Any) -> bool:
            view = SimpleNamespace(
                partition_id=orders,
                partition=SimpleNamespace(**{**known, **changes}),
                high_watermark=replica.high_watermark,
            )

            async def ask(found: RunningBroker) -> bool:
                return await found.replicas.segment_repair.is_sound_elsewhere(cast(Replica, view), 0)

            return cluster.on_broker(follower, ask)

        assert proves()
        assert proves(isr=(follower,)), "the leader"
        assert proves(leader=-1, isr=(follower, other))
        assert not proves(leader=-1, isr=(follower,))
        segments = cluster.log(other, orders).segments
        segments.replace_info(replace(segments.sealed[1], crc=None))
        assert not proves(leader=-1, isr=(follower, other)), "a segment without a checksum proves nothing"


def test_a_rate_of_zero_is_no_scrub_and_another_one_bounds_it() -> None:
    with ReplicationCluster(404, replica_config=CONFIG, brokers=BROKERS) as cluster:
        set_config(cluster, rate=0, interval=1_000)
        orders = cluster.topic("orders", BROKERS, configs={"segment.bytes": "20000"})
        for _ in range(30):
            cluster.write(orders, b"x" * 5_000)
        cluster.until_equal(orders, *BROKERS)
        cluster.until(lambda: all(info.crc is not None for info in cluster.log(11, orders).segments.sealed))
        rot(cluster, 12, orders, at=2_000)
        cluster.world.run_for(30)
        scrub = scrub_of(cluster, 12)
        assert (scrub.bytes, scrub.segments, scrub.faults) == (0, 0, 0)
        set_config(cluster, rate=10_000)
        began = scrub_of(cluster, 11).bytes
        cluster.world.run_for(10)
        read = scrub_of(cluster, 11).bytes - began
        assert 0 < read <= 10 * 10_000 + PIECE_BYTES_MIN + 10_000, f"{read} bytes in ten seconds"
        cluster.until(lambda: scrub.faults == 1, timeout=60)
        cluster.until_whole(orders)


def test_segments_that_go_while_they_are_read_are_no_rot() -> None:
    with ReplicationCluster(405, replica_config=CONFIG) as cluster:
        orders = begun(cluster, *BROKERS)
        # A byte of about a second: each segment is being read when records are deleted.
        set_config(cluster, interval=1_000, rate=100)

        async def shorten(broker: RunningBroker) -> None:
            log = broker.logs.get(orders)
            assert log is not None
            await log.advance_start(log.segments.sealed[0].next_offset)

        for _ in range(4):
            cluster.world.run_for(2)
            cluster.on_broker(12, shorten)
        set_config(cluster, rate=1_000_000)
        wait_for_cycle(cluster, 12)
        scrub = scrub_of(cluster, 12)
        assert (scrub.faults, scrub.errors) == (0, 0)
        assert cluster.log(12, orders).damaged is None


def test_an_empty_sealed_segment_is_sound() -> None:
    info = SimpleNamespace(base_offset=0, size=0, crc=0)

    async def no_fault(_info: object) -> None:
        return None

    log = SimpleNamespace(
        is_closed=False,
        damaged=None,
        check_indexes=no_fault,
        segments=SimpleNamespace(sealed=[info], file_path=lambda *_: "0.log"),
    )
    scrubbing = Scrubbing(
        cast("Any", SimpleNamespace(metadata=SimpleNamespace(setting=None))), Random(1), cast("Any", None)
    )
    asyncio.run(scrubbing._check(cast("Any", None), cast("Any", log), cast("Any", info)))
    assert (scrubbing.segments, scrubbing.faults) == (1, 0)
