"""The decision of a move may be stored or not when its commit fails: no acknowledged record depends on which."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import pytest
from support.brokers.cluster import NodeId, ReplicationCluster, batch
from test_replica_moves import homes, id_of

from tidelog.log.log_move import LEAVING, MOVED
from tidelog.model.errors import TidelogError
from tidelog.model.ids import PartitionId
from tidelog.world.simulated.store import SimStore


@contextmanager
def failing_decision(*, is_withdrawn: bool = True) -> Iterator[None]:
    """The commit of `moved` fails with EIO, stored or not, and its store with it; and so does the one that withdraws
    the decision, unless `is_withdrawn`."""
    commit = SimStore.commit
    failed: list[bool] = []

    async def fail(self: SimStore, writes: Mapping[bytes, bytes | None]) -> None:
        names = [key for key, value in writes.items() if value is not None]
        is_decision = any(key.endswith(MOVED) for key in names)
        if is_decision or (failed and not is_withdrawn and any(key.endswith(LEAVING) for key in names)):
            failed.append(is_decision)
            self._device.faults.arm("commit")
        await commit(self, writes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimStore, "commit", fail)
        yield
    assert failed == [True] if is_withdrawn else [True, False]


def move_in_vain(cluster: ReplicationCluster, broker: int, orders: PartitionId) -> None:
    home, other = homes(cluster, broker, orders)
    replica = cluster.replica(broker, orders)
    cluster.until(lambda: replica.partition.directory_of(NodeId(broker)) == home.directory_id)
    with suppress(TidelogError):
        cluster.on_broker(broker, lambda found: found.service.log_directories.move_replica(orders, id_of(other)))


def write_some(cluster: ReplicationCluster, orders: PartitionId) -> list[bytes]:
    """Returns the values that were acknowledged."""
    values = [b"after %d" % number for number in range(5)]
    return [value for value in values if cluster.produce(11, orders, batch(value)).error is None]


@pytest.mark.parametrize("seed", range(601, 607))
@pytest.mark.parametrize("is_withdrawn", [True, False])
def test_acknowledged_records_survive_a_move_whose_decision_failed(seed: int, is_withdrawn: bool) -> None:
    with ReplicationCluster(seed, directories=2, brokers=(11, 12, 13)) as cluster:
        orders = cluster.topic("orders", (11,))
        cluster.write(orders, b"before")
        with failing_decision(is_withdrawn=is_withdrawn):
            move_in_vain(cluster, 11, orders)
        acknowledged = [b"before", *write_some(cluster, orders)]
        cluster.kill(NodeId(11))
        cluster.start_brokers(11)
        cluster.leader(orders)
        cluster.until(lambda: cluster.leading(orders).state.is_confirmed)
        assert cluster.values(orders) == acknowledged


@pytest.mark.parametrize("seed", range(603, 609))
def test_a_replica_whose_move_failed_is_not_elected_with_less(seed: int) -> None:
    with ReplicationCluster(seed, directories=2, brokers=(11, 12)) as cluster:
        orders = cluster.topic("orders", (11, 12), configs={"min.insync.replicas": "1"})
        cluster.write(orders, b"before")
        cluster.until_in_sync(orders, 11, 12)
        with failing_decision():
            move_in_vain(cluster, 12, orders)
        cluster.until_in_sync(orders, 11, 12)
        acknowledged = [b"before", *write_some(cluster, orders)]
        cluster.until_in_sync(orders, 11, 12)
        cluster.kill(NodeId(11))
        cluster.kill(NodeId(12))
        cluster.start_brokers(12)
        cluster.until(lambda: cluster.partition(orders).leader == 12)
        cluster.until(lambda: cluster.leading(orders).state.is_confirmed)
        assert cluster.values(orders) == acknowledged
