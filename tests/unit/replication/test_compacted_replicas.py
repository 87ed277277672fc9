"""Replicas of a compacted topic, on whole brokers in a simulated world: what compaction has removed on some of them is
neither kept nor brought back by the others (decision 0019)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from support.brokers.cluster import CONTROLLERS, NodeId, ReplicationCluster, RunningBroker
from test_replicas import BROKERS

from tidelog.coordinator.requests import Committed, OffsetToCommit
from tidelog.log import housekeeping
from tidelog.log.batch import Record, decode, encode, read_header
from tidelog.log.compaction import CleaningPlan
from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.reassignments import AlterReassignments, ReassignmentTarget
from tidelog.model.errors import TidelogError
from tidelog.model.ids import PartitionId, TopicId
from tidelog.services.context import INTERNAL

RETENTION_S = 1
COMPACT = {
    "cleanup.policy": "compact",
    "segment.bytes": "3000",
    "min.cleanable.dirty.ratio": "0.01",
    "min.insync.replicas": "1",
    "delete.retention.ms": str(1000 * RETENTION_S),
}
LAG_MAX_S = 4
"""A replica that was away for longer holds no tombstones any more."""


def pair(key: bytes, value: bytes | None) -> bytes:
    return encode([Record(0, 1_000, key, value, ())])


def put(cluster: ReplicationCluster, partition: PartitionId, key: bytes, value: bytes | None) -> None:
    assert cluster.produce(cluster.leader(partition), partition, pair(key, value)).error is None


def fill(cluster: ReplicationCluster, partition: PartitionId, name: bytes, count: int = 60) -> None:
    """Enough to seal the segments before it."""
    for number in range(count):
        put(cluster, partition, name + b"%d" % number, b"w" * 60)


def records(cluster: ReplicationCluster, broker: int, partition: PartitionId) -> dict[int, tuple[bytes, bytes | None]]:
    async def read(_: RunningBroker) -> dict[int, tuple[bytes, bytes | None]]:
        log = cluster.log(broker, partition)
        found: dict[int, tuple[bytes, bytes | None]] = {}
        offset = log.start_offset
        while offset < log.end_offset:
            piece = await log.read(offset, bytes_max=1 << 20)
            position = 0
            while position < len(piece.data):
                header = read_header(piece.data, position)
                whole = bytes(piece.data[position : position + header.size])
                for record in decode(whole, decompressed_bytes_max=1 << 24):
                    assert record.key is not None
                    found[int(record.offset)] = (record.key, record.value)
                position += header.size
            offset = piece.next_offset
        return found

    return cluster.on_broker(broker, read)


def latest(cluster: ReplicationCluster, broker: int, partition: PartitionId, key: bytes) -> bytes | None:
    """What a reader of the whole log takes for the value of the key; None if it has none."""
    value = None
    for _, (found, newer) in sorted(records(cluster, broker, partition).items()):
        if found == key:
            value = newer
    return value


def has_tombstone(cluster: ReplicationCluster, broker: int, partition: PartitionId, key: bytes) -> bool:
    return any(pair == (key, None) for pair in records(cluster, broker, partition).values())


def until_read(cluster: ReplicationCluster, condition: Callable[[], bool], timeout: float = 120) -> None:
    """As `until`, for a condition that reads logs."""
    end_s = cluster.now_s() + timeout
    while not condition():
        assert cluster.now_s() < end_s, f"not so in {timeout} s"
        cluster.world.run_for(1)
        cluster.check()


def shorten_lag(cluster: ReplicationCluster) -> None:
    change = ConfigChange(key="replica.lag.time.max.ms", operation="set", value=str(1000 * LAG_MAX_S))
    resource = ResourceChange(resource_type="cluster", resource="", changes=(change,))
    assert cluster.ask(AlterConfigs(resources=(resource,))).items[0].error is None


def lead_with(cluster: ReplicationCluster, partition: PartitionId, broker: int) -> None:
    """The others are killed, and this one leads."""
    for other in BROKERS:
        if other != broker:
            cluster.kill(NodeId(other))
    cluster.until(lambda: cluster._leader(partition) == broker, timeout=60)


def test_a_copy_of_a_compacted_log_truncates_records_that_were_never_committed() -> None:
    with ReplicationCluster(31, brokers=BROKERS) as cluster:
        topic = cluster.topic("keys", (11, 12), configs=COMPACT)
        fill(cluster, topic, b"base", 40)
        cluster.until_equal(topic, 11, 12)
        for other in (*CONTROLLERS, NodeId(12), NodeId(13)):
            cluster.network.block(NodeId(11), other)
            cluster.network.block(other, NodeId(11))
        for number in range(5):
            cluster.produce(11, topic, pair(b"phantom%d" % number, b"never committed"), acks=1)
        assert cluster.log(11, topic).end_offset == 45
        cluster.until(lambda: cluster.brokers[NodeId(12)].replicas.leader_of(topic) is not None, timeout=40)
        cluster.kill(NodeId(11))
        cluster.network.heal()
        for number in range(10):
            put(cluster, topic, b"hot", b"%d" % number)
        fill(cluster, topic, b"later")
        put(cluster, topic, b"hot", b"newest")
        fill(cluster, topic, b"end")
        until_read(cluster, lambda: not any(40 <= offset < 50 for offset in records(cluster, 12, topic)))
        reassigned = ReassignmentTarget(topic="keys", partition=0, replicas=(11, 12, 13))
        assert cluster.ask(AlterReassignments(partitions=(reassigned,))).items[0].error is None
        cluster.until(lambda: 13 in cluster.partition(topic).isr, timeout=60)
        assert list(cluster.log(13, topic).epochs) == list(cluster.log(12, topic).epochs)
        cluster.kill(NodeId(12))
        cluster.until(lambda: cluster._leader(topic) == 13, timeout=40)
        cluster.start_brokers(11)
        cluster.until(lambda: 11 in cluster.partition(topic).isr, timeout=60)
        keys = [key for key, _ in records(cluster, 11, topic).values()]
        assert not [key for key in keys if key.startswith(b"phantom")]


def test_a_crash_right_after_the_copy_loses_no_epoch_that_compaction_had_erased() -> None:
    with ReplicationCluster(32, brokers=BROKERS) as cluster:
        topic = cluster.topic("keys", (11, 12), configs=COMPACT)
        fill(cluster, topic, b"base", 40)
        cluster.until_equal(topic, 11, 12)
        cluster.kill(NodeId(11))
        cluster.until(lambda: cluster._leader(topic) == 12, timeout=40)
        for number in range(10):
            put(cluster, topic, b"hot", b"%d" % number)
        cluster.start_brokers(11)
        cluster.until_in_sync(topic, 11, 12)
        cluster.kill(NodeId(12))
        cluster.until(lambda: cluster._leader(topic) == 11, timeout=40)
        put(cluster, topic, b"hot", b"newest")
        fill(cluster, topic, b"end")
        until_read(cluster, lambda: not any(40 <= offset < 50 for offset in records(cluster, 11, topic)))
        epochs = list(cluster.log(11, topic).epochs)
        assert len(epochs) >= 3
        reassigned = ReassignmentTarget(topic="keys", partition=0, replicas=(11, 13))
        cluster.ask(AlterReassignments(partitions=(reassigned,)))
        cluster.until(lambda: 13 in cluster.partition(topic).isr, timeout=60)
        cluster.lose_power(13)
        cluster.start_brokers(13)
        cluster.until(lambda: cluster.replica(13, topic).log is not None)
        assert list(cluster.log(13, topic).epochs) == epochs


def away_while_deleted(cluster: ReplicationCluster, *, away_s: float) -> PartitionId:
    """Broker 13 has the key; it is deleted while 13 is away, and the others compact meanwhile."""
    cluster.start()
    cluster.start_brokers(*BROKERS)
    shorten_lag(cluster)
    topic = cluster.topic("keys", BROKERS, configs=COMPACT)
    put(cluster, topic, b"gone", b"value")
    put(cluster, topic, b"stays", b"value")
    cluster.until_equal(topic, *BROKERS)
    cluster.kill(NodeId(13))
    put(cluster, topic, b"gone", None)
    fill(cluster, topic, b"a")
    cluster.world.run_for(away_s)
    fill(cluster, topic, b"b")
    return topic


def test_a_replica_that_missed_the_whole_life_of_a_tombstone_is_copied_from_the_start() -> None:
    with ReplicationCluster(42) as cluster:
        topic = away_while_deleted(cluster, away_s=4 * LAG_MAX_S)
        until_read(cluster, lambda: not has_tombstone(cluster, 11, topic, b"gone"))
        until_read(cluster, lambda: not has_tombstone(cluster, 12, topic, b"gone"))
        cluster.start_brokers(13)
        cluster.until_in_sync(topic, *BROKERS, timeout=60)
        cluster.until_equal(topic, *BROKERS)
        assert cluster.log(13, topic).lineage.deletes_end >= 3
        assert latest(cluster, 13, topic, b"gone") is None
        lead_with(cluster, topic, 13)
        cluster.start_brokers(11, 12)
        cluster.until_in_sync(topic, *BROKERS, timeout=60)
        assert {latest(cluster, broker, topic, b"gone") for broker in BROKERS} == {None}
        assert {latest(cluster, broker, topic, b"stays") for broker in BROKERS} == {b"value"}


def test_the_copy_knows_which_deletes_it_never_saw_and_has_the_next_replica_copied_too() -> None:
    with ReplicationCluster(43) as cluster:
        topic = away_while_deleted(cluster, away_s=4 * LAG_MAX_S)
        until_read(cluster, lambda: not has_tombstone(cluster, 11, topic, b"gone"))
        cluster.start_brokers(14)
        reassigned = ReassignmentTarget(topic="keys", partition=0, replicas=(14, 11, 12, 13))
        cluster.ask(AlterReassignments(partitions=(reassigned,)))
        cluster.until(lambda: 14 in cluster.partition(topic).isr, timeout=60)
        for broker in (11, 12):
            cluster.kill(NodeId(broker))
        cluster.until(lambda: cluster._leader(topic) == 14, timeout=60)
        cluster.start_brokers(13)
        cluster.until(lambda: 13 in cluster.partition(topic).isr, timeout=60)
        assert latest(cluster, 13, topic, b"gone") is None


def test_tombstones_outlive_a_replica_that_is_away_for_a_short_while() -> None:
    with ReplicationCluster(44) as cluster:
        topic = away_while_deleted(cluster, away_s=0)
        cluster.start_brokers(13)
        cluster.until_in_sync(topic, *BROKERS, timeout=60)
        assert cluster.log(13, topic).durability.generation == 0, "its log was neither cut nor reset"
        until_read(cluster, lambda: not has_tombstone(cluster, 11, topic, b"gone"))
        assert {latest(cluster, broker, topic, b"gone") for broker in BROKERS} == {None}


def test_a_replica_that_never_comes_back_does_not_hold_tombstones_for_ever() -> None:
    with ReplicationCluster(45) as cluster:
        topic = away_while_deleted(cluster, away_s=0)
        until_read(cluster, lambda: not has_tombstone(cluster, 11, topic, b"gone"))
        until_read(cluster, lambda: not has_tombstone(cluster, 12, topic, b"gone"))


def test_a_follower_removes_no_tombstone_that_its_leader_still_keeps() -> None:
    with ReplicationCluster(46, brokers=BROKERS) as cluster:
        topic = cluster.topic("keys", BROKERS, configs=COMPACT)
        put(cluster, topic, b"gone", b"value")
        put(cluster, topic, b"gone", None)
        fill(cluster, topic, b"a")
        cluster.until_equal(topic, *BROKERS)
        for broker in (12, 13):
            bound = cluster.following(broker, topic).deletes_bound()
            assert bound <= cluster.log(11, topic).lineage.deletes_end
        until_read(cluster, lambda: not has_tombstone(cluster, 11, topic, b"gone"))
        for broker in (12, 13):
            until_read(cluster, lambda broker=broker: not has_tombstone(cluster, broker, topic, b"gone"))  # type: ignore[misc]
            assert cluster.log(broker, topic).lineage.deletes_end <= cluster.log(11, topic).lineage.deletes_end


def test_an_idle_log_whose_tombstones_must_stay_is_not_cleaned_again_and_again() -> None:
    with ReplicationCluster(47, brokers=BROKERS) as cluster:
        topic = cluster.topic("keys", BROKERS, configs={**COMPACT, "delete.retention.ms": "3600000"})
        put(cluster, topic, b"gone", None)
        fill(cluster, topic, b"a")
        cluster.kill(NodeId(13))
        cluster.world.run_for(40)
        log = cluster.log(11, topic)
        checkpoint = housekeeping.cleaner_checkpoint(log)
        assert checkpoint is not None
        assert checkpoint.waiting_until_ms is not None

        async def plan(_: RunningBroker) -> CleaningPlan | None:
            bound = cluster.leading(topic).deletes_bound()
            return housekeeping.plan(log, bound=log.end_offset, deletes_bound=bound)

        assert cluster.on_broker(11, plan) is None


def test_a_push_that_goes_on_elsewhere_than_the_log_ends_is_not_taken() -> None:
    with ReplicationCluster(48, brokers=BROKERS) as cluster:
        topic = cluster.topic("keys", BROKERS, configs=COMPACT)
        fill(cluster, topic, b"a", 5)
        cluster.until_equal(topic, *BROKERS)

        async def lose_one(_: RunningBroker) -> None:
            # A batch that the leader takes for sent and that never was.
            for subscription in cluster.leading(topic).subscriptions.values():
                subscription.sent_end += 1

        cluster.on_broker(11, lose_one)
        put(cluster, topic, b"next", b"value")
        cluster.until_equal(topic, *BROKERS)
        assert {latest(cluster, broker, topic, b"next") for broker in BROKERS} == {b"value"}


@pytest.mark.parametrize("away_s", [0, 4 * LAG_MAX_S])
def test_the_offsets_of_a_deleted_group_do_not_come_back(away_s: float) -> None:
    with ReplicationCluster(49, brokers=BROKERS) as cluster:
        shorten_lag(cluster)
        change = ConfigChange(key="offsets.topic.num.partitions", operation="set", value="1")
        resource = ResourceChange(resource_type="cluster", resource="", changes=(change,))
        cluster.ask(AlterConfigs(resources=(resource,)))
        data = cluster.topic("orders", BROKERS)
        cluster.on_broker(11, lambda found: found.groups.find_coordinators(INTERNAL, ["g"]))
        cluster.until(lambda: cluster.image().topic_named("__consumer_offsets") is not None)
        topic = cluster.image().topic_named("__consumer_offsets")
        assert topic is not None
        offsets = PartitionId(TopicId(topic.topic_id), 0)
        changes = tuple(
            ConfigChange(key=key, operation="set", value=value)
            for key, value in COMPACT.items()
            if key not in ("cleanup.policy", "min.insync.replicas")
        )
        named = ResourceChange(resource_type="topic", resource="__consumer_offsets", changes=changes)
        assert cluster.ask(AlterConfigs(resources=(named,))).items[0].error is None

        def call(job: Callable[[RunningBroker], Coroutine[Any, Any, Any]]) -> Any:
            for _ in range(200):
                try:
                    return cluster.on_broker(cluster.leader(offsets), job)
                except TidelogError:
                    cluster.world.run_for(0.1)
            raise AssertionError("no coordinator in 20 s")

        def commit(group: str, offset: int) -> None:
            wanted = {data: OffsetToCommit(offset)}
            call(lambda found: found.groups.commit_offsets(INTERNAL, group, wanted, member_id="", member_epoch=-1))

        async def fetch(found: RunningBroker) -> int:
            committed = (await found.groups.fetch_offsets(INTERNAL, "g", [data]))[data]
            assert isinstance(committed, Committed)
            return committed.offset

        commit("g", 4711)
        cluster.until_equal(offsets, *BROKERS)
        away = next(broker for broker in (13, 12, 11) if broker != cluster.leader(offsets))
        cluster.kill(NodeId(away))
        call(lambda found: found.groups.delete_group(INTERNAL, "g"))
        for _ in range(2):
            for number in range(100):
                commit("other", number)
            cluster.world.run_for(away_s)
        cluster.start_brokers(away)
        cluster.until_in_sync(offsets, *BROKERS, timeout=60)
        lead_with(cluster, offsets, away)
        cluster.start_brokers(*(broker for broker in BROKERS if broker != away))
        cluster.until_in_sync(offsets, *BROKERS, timeout=60)
        assert call(fetch) == -1
