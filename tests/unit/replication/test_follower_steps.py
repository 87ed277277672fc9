"""Single steps of a follower: batches that it cannot append, a stored lineage, a failing directory, orphaned logs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from support.brokers.cluster import NodeId, ReplicationCluster, RunningBroker, batch
from test_replicas import BROKERS

from tidelog.log.config import LogConfig
from tidelog.log.lineage import Lineage
from tidelog.log.log import Log
from tidelog.log.logs import Logs
from tidelog.model.errors import (
    CorruptBatchError,
    InvalidRecordError,
    RecordTooLargeError,
    StorageError,
    TidelogError,
    UnsupportedCompressionError,
    UnsupportedMagicError,
)
from tidelog.model.ids import Offset, PartitionId, TopicId
from tidelog.replication.follower_replica import NO_NUMBER, FollowerReplica
from tidelog.replication.messages import Push
from tidelog.replication.reconciler import Reconciler
from tidelog.replication.replica import Replica


@pytest.fixture
def cluster() -> Iterator[ReplicationCluster]:
    with ReplicationCluster(420, directories=2, brokers=BROKERS) as made:
        yield made
        assert made.failures == []


def following(cluster: ReplicationCluster, partition: PartitionId) -> FollowerReplica:
    """On broker 12, with one record that is durable there."""
    cluster.write(partition, b"0")
    cluster.until_equal(partition, *BROKERS)
    replica = cluster.brokers[NodeId(12)].replicas.get(partition)
    assert replica is not None
    role = replica.role
    assert isinstance(role, FollowerReplica)
    return role


@pytest.mark.parametrize(
    "error",
    [
        InvalidRecordError("no record"),
        CorruptBatchError("a wrong checksum"),
        UnsupportedMagicError("magic 9"),
        UnsupportedCompressionError("codec 7"),
        RecordTooLargeError("a batch over the limit"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_batch_that_a_follower_cannot_check_ends_its_own_subscription_only(
    cluster: ReplicationCluster, error: TidelogError, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = following(cluster, cluster.topic("orders", BROKERS))

    async def push(_: RunningBroker) -> None:
        def refuse(self: Log, batches: Any) -> Any:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(Log, "append_replicated", refuse)
            role.pushed(Push(number=role.number, offset=role.log.end_offset, high_watermark=1, batches=batch(b"1")))
        assert (role.stream, role.number) == (None, NO_NUMBER)

    cluster.on_broker(12, push)
    cluster.until(lambda: role.stream is not None)


def test_a_sync_that_ends_while_a_lineage_is_stored_counts_afterwards(
    cluster: ReplicationCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = following(cluster, cluster.topic("orders", BROKERS))

    async def mend(_: RunningBroker) -> None:
        role.leave()
        role.lineage_to_store = Lineage(Offset(0), role.leader_epoch)
        role.state.durable_end = role.state.high_watermark = Offset(0)

        async def store(self: Log, lineage: Lineage) -> None:
            role.durable()
            assert role.state.durable_end == 0, "the log is being changed"

        monkeypatch.setattr(Log, "take_over_lineage", store)
        await role.change_log()
        assert (role.state.durable_end, role.state.high_watermark) == (1, 1)

    cluster.on_broker(12, mend)


def test_a_replica_whose_directory_fails_while_it_is_reconciled_gets_no_role(
    cluster: ReplicationCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = cluster.topic("orders", BROKERS)
    role = following(cluster, orders)
    replica, logs = role.replica, cluster.brokers[NodeId(12)].logs
    configure, roles = Reconciler._configure, []

    async def configure_and_fail(self: Reconciler, reconciled: Replica, log: Log) -> None:
        await configure(self, reconciled, log)
        directory = logs.directory_of(orders)
        assert directory is not None
        if reconciled is replica and directory.failed is None:
            directory.fail(StorageError("the device is gone"))

    take_role = Reconciler._take_role

    def record(self: Reconciler, reconciled: Replica, log: Log) -> None:
        take_role(self, reconciled, log)
        if reconciled is replica:
            roles.append(reconciled.role)

    monkeypatch.setattr(Reconciler, "_configure", configure_and_fail)
    monkeypatch.setattr(Reconciler, "_take_role", record)

    async def reconcile(found: RunningBroker) -> None:
        replica.end_role()
        found.replicas.queue.add(replica)

    cluster.on_broker(12, reconcile)
    cluster.until(lambda: replica.log is None and replica.open_error is not None)
    cluster.world.run_for(1)
    assert (replica.role, replica.log) == (None, None)
    assert not any(roles), "a closed log has no role"


def test_logs_without_a_replica_are_removed_one_after_the_other_and_again_after_an_error(
    cluster: ReplicationCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = cluster.topic("orders", BROKERS)
    following(cluster, orders)
    orphans = [PartitionId(TopicId(UUID(int=77)), number) for number in range(4)]
    remove, errors, running, most = Logs.remove, [StorageError("not now")] * 2, 0, 0

    async def remove_or_fail(self: Logs, log_id: PartitionId) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            if errors:
                raise errors.pop()
            await remove(self, log_id)
        finally:
            running -= 1

    async def sweep(found: RunningBroker) -> None:
        for log_id in orphans:
            await found.logs.create(log_id, label="gone", config=LogConfig())
        monkeypatch.setattr(Logs, "remove", remove_or_fail)
        await found.replicas._changes._sweep([*orphans, orders])
        assert not set(found.logs.known()) & set(orphans)
        assert orders in found.logs.known(), "it has a replica here"

    cluster.on_broker(12, sweep)
    assert (errors, most) == ([], 1)
