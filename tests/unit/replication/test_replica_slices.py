"""Changes of many partitions at once: in slices, in order, and the same in the end."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from support.brokers.cluster import NodeId, ReplicationCluster, RunningBroker
from test_replicas import BROKERS

from tidelog.metadata.delta import LocalPartition, delta_between
from tidelog.metadata.topics import DeleteTopics
from tidelog.model.ids import PartitionId
from tidelog.model.maps import Map
from tidelog.replication.leader_replica import LeaderReplica
from tidelog.replication.metadata_changes import MetadataChanges
from tidelog.replication.replica import ReplicaConfig
from tidelog.replication.replicas import Replicas

SLICE = 4
PARTITIONS = 60
CONFIG = ReplicaConfig(cleaner_backoff_ms=1_000, partitions_per_slice=SLICE)


def started(seed: int) -> ReplicationCluster:
    return ReplicationCluster(seed, replica_config=CONFIG)


def places(orders: PartitionId) -> list[PartitionId]:
    return [PartitionId(orders.topic_id, number) for number in range(PARTITIONS)]


class Watched:
    """How many partitions a broker takes news of in one turn of its event loop, and of which epochs, in order."""

    def __init__(self, broker: RunningBroker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.turns: list[int] = []
        self.epochs: dict[int, list[int]] = {}
        self._is_open = False
        watched, taken = broker.replicas._changes, MetadataChanges.partition_changed

        def changed(changes: MetadataChanges, local: LocalPartition) -> None:
            if changes is watched:
                self._note(local)
            taken(changes, local)

        monkeypatch.setattr(MetadataChanges, "partition_changed", changed)

    def _note(self, local: LocalPartition) -> None:
        if not self._is_open:
            self._is_open = True
            self.turns.append(0)
            asyncio.get_running_loop().call_soon(self._close)
        self.turns[-1] += 1
        self.epochs.setdefault(local.number, []).append(local.partition.partition_epoch)

    def _close(self) -> None:
        self._is_open = False


def test_a_large_topic_is_taken_a_slice_in_each_turn_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    with started(501) as cluster:
        cluster.start()
        cluster.start_brokers(*BROKERS)
        watched = Watched(cluster.brokers[NodeId(12)], monkeypatch)
        orders = cluster.topic("orders", partitions=PARTITIONS)
        cluster.until(lambda: len(watched.epochs) == PARTITIONS)
        assert max(watched.turns) <= SLICE
        assert sum(watched.turns) >= PARTITIONS
        cluster.until_in_sync(orders, *BROKERS)
        cluster.write(orders, b"a")
        assert cluster.values(orders) == [b"a"]
        cluster.check()


def test_what_comes_while_a_large_change_is_taken_is_seen_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The topic is made, its leaders die and it is deleted, as fast as the controller decides."""
    with started(502) as cluster:
        cluster.start()
        cluster.start_brokers(*BROKERS)
        watched = Watched(cluster.brokers[NodeId(13)], monkeypatch)
        orders = cluster.topic("orders", partitions=PARTITIONS, wait=False)
        kept = cluster.topic("kept", BROKERS, wait=False)
        cluster.kill(NodeId(11))
        cluster.until(lambda: cluster.partition(orders).leader not in (11, -1))
        (outcome,) = cluster.ask(DeleteTopics(names=("orders",))).items
        assert outcome.error is None, outcome.message
        both = [cluster.brokers[NodeId(broker)].replicas for broker in (12, 13)]
        cluster.until(lambda: all(one.get(place) is None for one in both for place in places(orders)))
        assert all(epochs == sorted(epochs) for epochs in watched.epochs.values()), "never back in time"
        assert cluster.leader(kept) in (12, 13)
        cluster.write(kept, b"a")
        cluster.check()


def test_a_broker_that_starts_takes_all_of_its_partitions_in_slices_and_leads_again() -> None:
    with started(503) as cluster:
        cluster.start()
        cluster.start_brokers(11)
        orders = cluster.topic("orders", partitions=PARTITIONS, factor=1, configs={"min.insync.replicas": "1"})
        cluster.write(orders, b"a")
        cluster.kill(NodeId(11))
        cluster.start_brokers(11)
        replicas = cluster.brokers[NodeId(11)].replicas
        cluster.until(lambda: all(isinstance(_role(replicas, place), LeaderReplica) for place in places(orders)))
        assert replicas.broker_epoch >= 0
        assert all(
            _role(replicas, place).leader_epoch == cluster.partition(place).leader_epoch for place in places(orders)
        ), "of this incarnation, each one"
        assert cluster.values(orders) == [b"a"]
        cluster.check()


def test_changes_that_wait_are_one_change_from_the_first_to_the_last_image() -> None:
    with started(504) as cluster:
        cluster.start()
        cluster.start_brokers(*BROKERS)
        before = cluster.image()
        orders = cluster.topic("orders", partitions=PARTITIONS)
        between = cluster.image()
        (outcome,) = cluster.ask(DeleteTopics(names=("orders",))).items
        assert outcome.error is None
        cluster.until(lambda: orders.topic_id not in cluster.image().topics)
        cluster.world.run_for(5)
        after = cluster.image()

        async def replay(broker: RunningBroker) -> None:
            """The same once more, all at once: made, deleted and made again before the first slice has ended."""
            changes = broker.replicas._changes
            for older, newer in ((before, between), (between, after), (after, between), (between, after)):
                changes.metadata_changed(delta_between(older, newer), older, newer)
            assert changes._is_busy
            assert changes._next == (between, after), "two images, however many changes"

        cluster.on_broker(12, replay)
        replicas = cluster.brokers[NodeId(12)].replicas
        cluster.until(lambda: not replicas._changes._is_busy)
        assert replicas.image is after
        cluster.until(lambda: all(replicas.get(place) is None for place in places(orders)))


def test_a_topic_that_is_deleted_while_its_logs_are_opened_is_led_by_nobody() -> None:
    """Its replicas are dropped a slice at a time; those whose turn has not come are reconciled meanwhile."""
    with started(505) as cluster:
        cluster.start()
        cluster.start_brokers(11)
        orders = cluster.topic("orders", partitions=PARTITIONS, factor=1, configs={"min.insync.replicas": "1"})
        replicas = cluster.brokers[NodeId(11)].replicas
        cluster.until(lambda: all(isinstance(_role(replicas, place), LeaderReplica) for place in places(orders)))

        async def delete(broker: RunningBroker) -> None:
            image = replicas.image
            opened = [replica for place in places(orders) if (replica := replicas.get(place)) is not None]
            for replica in opened:
                replica.end_role()
                replica.led_epoch = -1  # as if its log was opened just now
            after = replace(image, topics=image.topics.delete(orders.topic_id), topic_ids=Map())
            replicas._changes.metadata_changed(delta_between(image, after), image, after)
            waiting = [replica for replica in opened if not replica.is_dropped]
            assert waiting, "the others' turn has not come"
            await asyncio.gather(*(replicas._reconciler.reconcile(replica) for replica in waiting))
            assert all(replica.role is None for replica in opened)
            replicas.status()

        cluster.on_broker(11, delete)
        cluster.until(lambda: not any(replicas.get(place) for place in places(orders)))


def _role(replicas: Replicas, place: PartitionId) -> Any:
    replica = replicas.get(place)
    return None if replica is None else replica.role
