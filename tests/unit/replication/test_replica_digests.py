"""An operator compares replicas by digests while they are used."""

from __future__ import annotations

import asyncio

import pytest
from support.brokers.cluster import NodeId, ReplicationCluster, RunningBroker, batch
from support.brokers.verification import BrokerSource, verify
from test_replicas import BROKERS

from tidelog.client.admin.replica_comparison import Comparison
from tidelog.client.admin.replica_verification import ATTEMPT_S
from tidelog.client.admin.verification import AGREE, DIFFER, UNVERIFIED, PartitionVerification
from tidelog.log import range_digests
from tidelog.log.batch import Record, encode
from tidelog.log.range_digests import DigestQuery, ReplicaDigest, decode_units
from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.config_table import TABLES, Scope
from tidelog.model.errors import RequestTimedOutError
from tidelog.model.ids import PartitionId
from tidelog.replication import replica_digests, scrubbing
from tidelog.replication.replica import ReplicaConfig

CONFIG = ReplicaConfig(cleaner_backoff_ms=1_000, scrub_delay_ms=3_600_000)
RECORDS = 12


def set_configs(cluster: ReplicationCluster, configs: dict[str, int]) -> None:
    changes = tuple(ConfigChange(key=key, operation="set", value=str(value)) for key, value in configs.items())
    cluster.ask(AlterConfigs(resources=(ResourceChange(resource_type="cluster", resource="", changes=changes),)))


def begun(
    cluster: ReplicationCluster, *brokers: int, records: int = RECORDS, min_isr: int = 2, scrubs: bool = False
) -> PartitionId:
    cluster.start()
    cluster.start_brokers(*brokers)
    if not scrubs:
        set_configs(cluster, {scrubbing.RATE: 0})
    orders = cluster.topic("orders", brokers, configs={"segment.bytes": "200", "min.insync.replicas": str(min_isr)})
    cluster.write_numbers(orders, records)
    cluster.until_equal(orders, *brokers)
    cluster.world.run_for(1)
    return orders


def verified(cluster: ReplicationCluster, orders: PartitionId, through: int = 11) -> PartitionVerification:
    return cluster.on_broker(through, lambda found: verify(found.broker, orders), timeout=120)


def write_keys(cluster: ReplicationCluster, orders: PartitionId, keys: list[bytes]) -> None:
    for key in keys:
        data = encode([Record(0, 1_000, key, b"value", ())])
        assert cluster.produce(cluster.leader(orders), orders, data).error is None


def rot(cluster: ReplicationCluster, broker: int, orders: PartitionId, segment: int, at: int) -> int:
    """Flip a bit of a sealed segment; return its base offset."""
    info = cluster.log(broker, orders).segments.sealed[segment]
    path = cluster.log(broker, orders).segments.file_path(info.base_offset)
    cluster.world.machine(f"b{broker}").disk("logs-0").flip_bit(path, at, 2)
    return info.base_offset


def test_sound_replicas_agree_up_to_the_high_watermark() -> None:
    with ReplicationCluster(501, replica_config=CONFIG) as cluster:
        orders = begun(cluster, *BROKERS)
        result = verified(cluster, orders, 13)
        assert (result.state, result.start, result.end) == (AGREE, 0, RECORDS)
        assert dict(result.verified) == dict.fromkeys(BROKERS, RECORDS)
        assert result.bytes == cluster.log(11, orders).size


@pytest.mark.parametrize(
    ("broker", "at"),
    [(11, 3), (12, 9), (11, 13), (12, 13), (11, 70)],
    ids=["base offset", "length", "epoch of the leader", "epoch of a follower", "records"],
)
def test_a_flipped_bit_is_narrowed_down_to_its_batch(broker: int, at: int) -> None:
    with ReplicationCluster(502, replica_config=CONFIG) as cluster:
        orders = begun(cluster, *BROKERS)
        assert cluster.leader(orders) == 11
        base = rot(cluster, broker, orders, 2, at)
        result = verified(cluster, orders, 13)
        assert result.state == DIFFER
        assert result.difference is not None
        assert result.difference.start == base
        assert result.difference.suspects == (broker,)
        assert set(result.difference.replicas) == set(BROKERS)
        assert result.end == base, "what lies before agrees"


def test_a_single_replica_is_checked_by_its_checksums() -> None:
    with ReplicationCluster(503, replica_config=CONFIG) as cluster:
        orders = begun(cluster, 11, min_isr=1)
        assert verified(cluster, orders).state == AGREE
        base = rot(cluster, 11, orders, 3, 66)
        result = verified(cluster, orders)
        assert result.difference is not None
        assert (result.difference.start, result.difference.suspects) == (base, (11,))
        assert "Nothing is removed" in result.difference.advice


def test_an_offline_replica_is_named_and_the_others_are_compared() -> None:
    with ReplicationCluster(504, replica_config=CONFIG) as cluster:
        orders = begun(cluster, *BROKERS)
        cluster.kill(NodeId(13))
        result = verified(cluster, orders)
        assert result.state == UNVERIFIED
        assert list(result.unverified) == [13]
        assert dict(result.verified) == {11: RECORDS, 12: RECORDS}


def test_deleted_records_do_not_differ() -> None:
    with ReplicationCluster(505, replica_config=CONFIG) as cluster:
        orders = begun(cluster, *BROKERS, records=3)
        cluster.write(orders, *[b"v%d" % at for at in range(10)])
        cluster.write(orders, b"last")

        async def shorten(found: RunningBroker) -> None:
            log = found.logs.get(orders)
            assert log is not None
            await log.advance_start(3 + found.replicas.me % 10)  # in the middle of a batch, on each replica elsewhere

        for broker in BROKERS:
            cluster.on_broker(broker, shorten)
        result = verified(cluster, orders)
        assert (result.state, result.start, result.end) == (AGREE, 6, 14)


def test_long_logs_are_compared_in_ranges_at_the_configured_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_digests, "PIECE_BYTES", 10_000)
    monkeypatch.setattr(replica_digests, "REQUEST_BYTES_MAX", 20_000)
    with ReplicationCluster(506, replica_config=CONFIG, brokers=BROKERS) as cluster:
        set_configs(cluster, {replica_digests.RATE: 100_000, scrubbing.RATE: 0})
        orders = cluster.topic("orders", BROKERS, configs={"segment.bytes": "90000"})
        for _ in range(60):
            cluster.write(orders, b"x" * 9_000)
        cluster.until_equal(orders, *BROKERS)
        began_s = cluster.now_s()
        assert verified(cluster, orders).state == AGREE
        assert cluster.now_s() - began_s > 60 * 9_000 / 100_000 - 2
        info = cluster.log(12, orders).segments.sealed[-1]
        path = cluster.log(12, orders).segments.file_path(info.base_offset)
        cluster.world.machine("b12").disk("logs-0").flip_bit(path, info.size - 20, 0)
        result = verified(cluster, orders)
        assert result.difference is not None
        assert result.difference.start == info.next_offset - 1


class ImpatientSource(BrokerSource):
    """Its calls have the deadline of the Admin API's."""

    async def digest(self, broker: int, query: DigestQuery) -> ReplicaDigest:
        try:
            async with asyncio.timeout(ATTEMPT_S):
                return await super().digest(broker, query)
        except TimeoutError as error:
            raise RequestTimedOutError("no answer in time") from error


def test_replicas_are_compared_at_the_lowest_rate_although_calls_have_deadlines() -> None:
    rate = 64 << 10
    assert TABLES[Scope.CLUSTER][replica_digests.RATE].least == rate
    with ReplicationCluster(516, replica_config=CONFIG, brokers=BROKERS) as cluster:
        set_configs(cluster, {replica_digests.RATE: rate, scrubbing.RATE: 0})
        orders = cluster.topic("orders", BROKERS)
        for _ in range(20):
            cluster.write(orders, b"x" * 100_000)
        cluster.until_equal(orders, *BROKERS)

        async def run(found: RunningBroker) -> PartitionVerification:
            return await Comparison("orders", 0, ImpatientSource(found.broker, orders)).run()

        began_s = cluster.now_s()
        result = cluster.on_broker(11, run, timeout=600)
        assert (result.state, result.end) == (AGREE, 20), result
        assert cluster.now_s() - began_s > 20 * 100_000 / rate - 10


def test_lists_of_units_are_short_and_lead_to_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch may have many records: its list ends within it, and the next one begins there."""
    monkeypatch.setattr(range_digests, "UNITS_MAX", 3)
    lengths: list[int] = []
    with ReplicationCluster(517, replica_config=CONFIG) as cluster:
        cluster.start()
        cluster.start_brokers(*BROKERS)
        set_configs(cluster, {scrubbing.RATE: 0})
        configs = {"cleanup.policy": "compact", "segment.bytes": "300"}
        orders = cluster.topic("orders", BROKERS, configs=configs)
        for first in range(0, 60, 10):
            records = [Record(at, 1_000, b"k%d" % (first + at), b"value", ()) for at in range(10)]
            assert cluster.produce(cluster.leader(orders), orders, encode(records)).error is None
        cluster.until_in_sync(orders, *BROKERS)
        cluster.world.run_for(2)
        info = cluster.log(13, orders).segments.sealed[0]
        path = cluster.log(13, orders).segments.file_path(info.base_offset)
        cluster.world.machine("b13").disk("logs-0").flip_bit(path, info.size - 20, 0)

        class Counted(BrokerSource):
            async def digest(self, broker: int, query: DigestQuery) -> ReplicaDigest:
                answer = await super().digest(broker, query)
                lengths.append(len(decode_units(answer.units)))
                return answer

        async def run(found: RunningBroker) -> PartitionVerification:
            return await Comparison("orders", 0, Counted(found.broker, orders)).run()

        result = cluster.on_broker(11, run, timeout=120)
        assert result.difference is not None, result
        assert result.difference.suspects == (13,)
        assert result.difference.start == info.next_offset - 10, "the batch whose checksum is wrong"
        assert max(lengths) == 3


def test_a_leader_change_meanwhile_is_no_difference() -> None:
    with ReplicationCluster(507, replica_config=CONFIG) as cluster:
        orders = begun(cluster, *BROKERS)
        results = []

        async def run(found: object) -> None:
            results.append(await verify(cluster.brokers[NodeId(13)].broker, orders))

        cluster.brokers[NodeId(13)].node.spawn(run(None))
        cluster.kill(NodeId(11))
        cluster.until(lambda: bool(results), timeout=60)
        assert results[0].state == UNVERIFIED
        assert set(results[0].unverified) <= {11, -1}
        assert results[0].difference is None


def test_replicas_of_a_compacted_topic_agree_where_both_keep_the_record() -> None:
    with ReplicationCluster(508, replica_config=CONFIG) as cluster:
        cluster.start()
        cluster.start_brokers(*BROKERS)
        set_configs(cluster, {scrubbing.RATE: 0})
        configs = {"cleanup.policy": "compact", "segment.bytes": "300", "min.cleanable.dirty.ratio": "0.01"}
        orders = cluster.topic("orders", BROKERS, configs=configs)
        write_keys(cluster, orders, [b"kept%d" % number for number in range(8)])
        write_keys(cluster, orders, [b"k%d" % (number % 2) for number in range(20)])
        cluster.until_in_sync(orders, *BROKERS)
        cluster.world.run_for(10)
        cluster.kill(NodeId(12))
        write_keys(cluster, orders, [b"k%d" % (number % 2) for number in range(20)])
        cluster.world.run_for(5)
        cluster.start_brokers(12)
        cluster.until_in_sync(orders, *BROKERS)
        assert len({cluster.log(broker, orders).size for broker in BROKERS}) > 1, "they are cleaned at different times"
        result = verified(cluster, orders)
        assert (result.state, result.by_record, result.end) == (AGREE, True, 48), result
        info = cluster.log(13, orders).segments.sealed[0]
        path = cluster.log(13, orders).segments.file_path(info.base_offset)
        cluster.world.machine("b13").disk("logs-0").flip_bit(path, 14, 0)  # the leader epoch: no CRC covers it
        result = verified(cluster, orders)
        assert result.difference is not None
        assert result.difference.suspects == (13,)


def test_a_fault_is_passed_to_the_scrub_which_repairs_it() -> None:
    with ReplicationCluster(509, replica_config=ReplicaConfig(cleaner_backoff_ms=1_000, scrub_delay_ms=100)) as cluster:
        orders = begun(cluster, *BROKERS, scrubs=True)
        cluster.world.run_for(5)  # the first cycle is over, the next one is a week away
        rot(cluster, 12, orders, 1, 13)
        assert verified(cluster, orders).state == DIFFER
        cluster.world.run_for(5)
        cluster.until_whole(orders)
        assert verified(cluster, orders).state == AGREE
        assert cluster.produce(cluster.leader(orders), orders, batch(b"more")).error is None
