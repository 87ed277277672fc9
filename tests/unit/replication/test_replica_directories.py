"""Log directories that cannot be read or written to: nothing there counts, nothing is recreated that may be needed."""

from __future__ import annotations

import errno
import logging
from uuid import UUID

import pytest
from support.brokers.cluster import NodeId, ReplicationCluster, RunningBroker, batch, orders_cluster

from tidelog.log.directories import DIRECTORY_ID
from tidelog.metadata.image import NIL
from tidelog.metadata.partitions import ElectLeaders
from tidelog.metadata.records import ChangePartition
from tidelog.model.errors import ErrorCode, StorageError
from tidelog.model.ids import PartitionId
from tidelog.replication.startup_report import had_log, lost_replicas
from tidelog.world.simulated import Loss

BROKERS = (11, 12, 13)
VALUES = [b"0", b"1", b"2", b"3", b"4"]


def filled(cluster: ReplicationCluster, *replicas: int, topics: int = 4) -> list[PartitionId]:
    """Topics of one partition, each with the same records, committed on all replicas and checkpointed."""
    min_isr = str(min(2, len(replicas)))
    made = [cluster.topic(f"t{n}", replicas, configs={"min.insync.replicas": min_isr}) for n in range(topics)]
    for partition in made:
        for value in VALUES:
            cluster.write(partition, value)
        cluster.until_equal(partition, *replicas)
    cluster.until(lambda: all(NIL not in cluster.partition(one).directories for one in made))
    cluster.world.run_for(2)
    return made


def in_second(cluster: ReplicationCluster, broker: int, partitions: list[PartitionId]) -> list[PartitionId]:
    """Those whose log lies in the second directory of this broker."""
    logs = cluster.brokers[NodeId(broker)].logs
    found = [partition for partition in partitions if logs.directory_of(partition) is logs.directories[1]]
    assert 0 < len(found) < len(partitions), "some lie there, some do not"
    return found


def is_led(cluster: ReplicationCluster, partition: PartitionId) -> bool:
    return cluster.partition(partition).leader >= 0


# A directory that cannot be read at the start


def test_an_only_replica_in_a_directory_whose_id_cannot_be_read_does_not_lead_from_an_empty_log() -> None:
    with ReplicationCluster(9401, directories=2, brokers=(11, 12)) as cluster:
        partitions = filled(cluster, 11)
        hidden = in_second(cluster, 11, partitions)
        cluster.kill(NodeId(11))
        store = cluster.world.machine("b11").store("logs-1")
        store.flip_bit(DIRECTORY_ID, 8)
        cluster.start_brokers(11)
        found = cluster.brokers[NodeId(11)]
        first, second = found.logs.directories
        assert found.agent.registration.directories == (first.directory_id,), "only what works is registered"
        assert second.directory_id == UUID(int=11 << 16 | 1), "it is known by the id that it was given"
        cluster.until(lambda: not any(is_led(cluster, partition) for partition in hidden))
        cluster.world.run_for(5)
        assert not set(hidden) & set(found.logs.known()), "nothing was made in its place"
        assert all("does not work" in str(cluster.replica(11, partition).open_error) for partition in hidden)
        for partition in set(partitions) - set(hidden):
            assert cluster.values(partition) == VALUES, "the other directory serves"
        cluster.kill(NodeId(11))
        store.flip_bit(DIRECTORY_ID, 8)
        cluster.start_brokers(11)
        names = tuple((f"t{partitions.index(partition)}", 0) for partition in hidden)
        for outcome in cluster.ask(ElectLeaders(kind="unclean", partitions=names)).items:
            assert outcome.error is None, outcome.message
        for partition in hidden:
            assert cluster.values(partition) == VALUES, "the data was there all the time"


def test_the_last_in_sync_replica_is_not_believed_with_a_directory_that_cannot_be_read() -> None:
    with ReplicationCluster(9500, directories=2, brokers=BROKERS) as cluster:
        partitions = filled(cluster, *BROKERS)
        hidden = in_second(cluster, 11, partitions)
        for broker in (12, 13):
            cluster.kill(NodeId(broker))
            cluster.until(
                lambda gone=broker: all(gone not in cluster.partition(p).isr for p in partitions),  # type: ignore[misc]
                timeout=40,
            )
        cluster.kill(NodeId(11))
        cluster.world.machine("b11").store("logs-1").flip_bit(DIRECTORY_ID, 8)
        cluster.start_brokers(11)
        cluster.until(lambda: all(11 not in cluster.partition(partition).isr for partition in hidden))
        cluster.start_brokers(12, 13)
        for partition in hidden:
            cluster.leader(partition, timeout=60)
            assert cluster.values(partition) == VALUES
            cluster.until_equal(partition, *BROKERS, timeout=60)
            home = cluster.brokers[NodeId(11)].logs.directories[0].directory_id
            assert cluster.partition(partition).directory_of(11) == home, "recreated where it can be written"


@pytest.mark.parametrize("seed", range(9400, 9403))
def test_a_directory_that_could_not_be_listed_once_keeps_its_replicas_for_the_next_start(seed: int) -> None:
    with ReplicationCluster(seed, directories=2, brokers=(11, 12)) as cluster:
        partitions = filled(cluster, 11)
        hidden = in_second(cluster, 11, partitions)
        cluster.kill(NodeId(11))
        cluster.world.machine("b11").disk("logs-1").fail("list", number=errno.EIO, times=1)
        cluster.start_brokers(11)
        cluster.world.run_for(5)
        assert not set(hidden) & set(cluster.brokers[NodeId(11)].logs.known())
        cluster.kill(NodeId(11))
        cluster.start_brokers(11)
        assert set(partitions) == set(cluster.brokers[NodeId(11)].logs.known())
        for partition in hidden:
            cluster.until(lambda one=partition: cluster.replica(11, one).log is not None)  # type: ignore[misc]
            assert cluster.log(11, partition).end_offset == len(VALUES)


def test_of_two_copies_the_recorded_one_is_the_replica_and_the_other_is_set_aside(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ReplicationCluster(9410, directories=2, brokers=BROKERS) as cluster:
        partitions = filled(cluster, *BROKERS)
        hidden = in_second(cluster, 11, partitions)
        cluster.kill(NodeId(11))
        cluster.world.machine("b11").disk("logs-1").fail("list", number=errno.EIO, times=1)
        cluster.start_brokers(11)
        for partition in hidden:
            cluster.until_in_sync(partition, *BROKERS, timeout=60)
            cluster.write(partition, b"new")
            cluster.until_equal(partition, *BROKERS)
        cluster.world.run_for(2)
        names = {partition: cluster.log(11, partition).path for partition in hidden}
        cluster.kill(NodeId(11))
        with caplog.at_level(logging.ERROR):
            cluster.start_brokers(11)
            for partition in hidden:
                cluster.until_in_sync(partition, *BROKERS, timeout=60)
                cluster.until_equal(partition, *BROKERS)
        found = cluster.brokers[NodeId(11)]
        for partition in hidden:
            home = found.logs.directory_of(partition)
            assert home is found.logs.directories[0]
            assert cluster.values(partition) == [*VALUES, b"new"]
            aside = f"{names[partition]}.0.aside"
            assert found.logs.directories[1].disk.exists(f"{aside}/00000000000000000000.log"), "it is kept"
            assert any(aside in record.getMessage() for record in caplog.records), "and named"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EMFILE, errno.ENOSPC])
def test_a_copy_that_cannot_be_set_aside_for_a_while_does_not_make_the_recorded_one_lost(number: int) -> None:
    with ReplicationCluster(9411, directories=2, brokers=BROKERS) as cluster:
        partitions = filled(cluster, *BROKERS)
        hidden = in_second(cluster, 11, partitions)
        cluster.kill(NodeId(11))
        cluster.world.machine("b11").disk("logs-1").fail("list", number=errno.EIO, times=1)
        cluster.start_brokers(11)
        for partition in hidden:
            cluster.until_in_sync(partition, *BROKERS, timeout=60)
        for broker in (12, 13):
            cluster.kill(NodeId(broker))
            cluster.until(
                lambda gone=broker: all(gone not in cluster.partition(p).isr for p in partitions),  # type: ignore[misc]
                timeout=40,
            )
        cluster.world.run_for(2)
        cluster.kill(NodeId(11))
        cluster.world.machine("b11").disk("logs-1").fail("rename", number=number, times=2 * len(hidden))
        cluster.start_brokers(11)
        for partition in hidden:
            cluster.leader(partition, timeout=60)
            assert cluster.values(partition) == VALUES


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
@pytest.mark.parametrize("operation", ["list", "exists"])
def test_a_directory_is_not_given_up_at_the_start_for_want_of_open_files_or_memory(number: int, operation: str) -> None:
    with ReplicationCluster(9412, directories=2, brokers=(11, 12)) as cluster:
        partitions = filled(cluster, 11)
        hidden = in_second(cluster, 11, partitions)
        cluster.kill(NodeId(11))
        cluster.world.machine("b11").disk("logs-1").fail(operation, number=number, times=5)
        cluster.start_brokers(11)
        assert all(directory.failed is None for directory in cluster.brokers[NodeId(11)].logs.directories)
        for partition in hidden:
            cluster.leader(partition, timeout=60)
            assert cluster.values(partition) == VALUES


def test_two_copies_of_which_the_metadata_names_none_count_for_nothing_and_the_node_runs() -> None:
    with ReplicationCluster(9411, directories=2, brokers=BROKERS) as cluster:
        (orders, *_) = filled(cluster, *BROKERS, topics=1)
        path = cluster.log(11, orders).path
        cluster.kill(NodeId(11))
        node = cluster.world.machine("b11").boot()
        home = next(label for label in ("logs-0", "logs-1") if node.disk(label).exists(path))
        # Under another name it is no other directory that the metadata could tell it by.
        node.disk(home).make_directory(f"x{path}")
        cluster.world.machine("b11").kill()
        cluster.start_brokers(11)
        cluster.until(lambda: "has several copies" in str(cluster.replica(11, orders).open_error))
        assert 11 not in cluster.partition(orders).isr
        cluster.write(orders, b"new")
        cluster.world.run_for(5)
        assert cluster.replica(11, orders).role is None


# What a broker says that it has lost


def test_directories_and_metadata_together_show_which_replicas_are_lost() -> None:
    with ReplicationCluster(9412, directories=2, brokers=BROKERS) as cluster:
        partitions = filled(cluster, *BROKERS)
        found, image = cluster.brokers[NodeId(11)], cluster.image()
        logs = found.logs
        first, second = (directory.directory_id for directory in logs.directories)
        assert first is not None
        assert second is not None
        assert lost_replicas(logs, image, 11) == (), "all are there"
        never = cluster.topic("never", (12,), configs={"min.insync.replicas": "1"})

        def recorded(directory: UUID) -> tuple[tuple[UUID, int], ...]:
            change = ChangePartition(
                topic_id=never.topic_id, partition=0, replicas=(11,), directories=(directory,), isr=(11,)
            )
            return lost_replicas(logs, cluster.image().apply_all([change]), 11)

        reported = ((never.topic_id, 0),)
        assert recorded(NIL) == (), "it was never made"
        assert recorded(first) == (), "nor written to"
        assert recorded(UUID(int=99)) == reported, "it is in a directory that is not here"
        hidden = in_second(cluster, 11, partitions)[0]
        assert had_log(logs, hidden, second), "a log that held something"
        cluster.on_broker(11, _fail_second)
        assert set(recorded(first)) > set(reported), (
            "a directory that was registered does not work: it may have been there"
        )
        lost = {(one.topic_id, 0) for one in in_second(cluster, 11, partitions)}
        assert set(lost_replicas(logs, image, 11)) == lost


async def _fail_second(broker: RunningBroker) -> None:
    broker.logs.directories[1].fail(StorageError("a test says so"))


# A stop that is not clean


def test_a_stop_whose_last_sync_failed_is_not_reported_as_clean() -> None:
    with ReplicationCluster(9008, brokers=(11, 12)) as cluster:
        configs = {"flush.mode": "page-cache", "min.insync.replicas": "1"}
        orders = cluster.topic("orders", (11,), configs=configs)
        for value in VALUES:
            cluster.write(orders, value)
        assert cluster.log(11, orders).durable_end == 0, "nothing is synced yet"
        disk = cluster.world.machine("b11").disk("logs-0")
        disk.fail("sync", number=errno.EIO, times=1_000)
        cluster.stop(11)
        cluster.world.machine("b11").lose_power(Loss.ALL)
        disk.heal()
        cluster.start_brokers(11)
        assert cluster.brokers[NodeId(11)].agent.registration.clean_stop_epoch == -1
        cluster.world.run_for(5)
        assert not is_led(cluster, orders), "what was acknowledged is gone: that is for an admin to decide"


def test_a_stop_whose_logs_were_all_synced_is_reported_as_clean() -> None:
    with ReplicationCluster(9009, brokers=(11, 12)) as cluster:
        configs = {"flush.mode": "page-cache", "min.insync.replicas": "1"}
        orders = cluster.topic("orders", (11,), configs=configs)
        for value in VALUES:
            cluster.write(orders, value)
        cluster.stop(11)
        cluster.world.machine("b11").lose_power(Loss.ALL)
        cluster.start_brokers(11)
        assert cluster.brokers[NodeId(11)].agent.registration.clean_stop_epoch > 0
        cluster.leader(orders)
        assert cluster.values(orders) == VALUES


# A device that takes no writes


@pytest.mark.parametrize("kind", ["EIO", "EROFS"])
def test_a_leader_whose_appends_fail_gives_its_directory_up_and_another_leads(kind: str) -> None:
    with orders_cluster(9300, b"0") as (cluster, orders):
        cluster.until_equal(orders, *BROKERS)
        cluster.world.run_for(3)  # no checkpoint is due any more
        first = cluster.leader(orders)
        disk = cluster.world.machine(f"b{first}").disk("logs-0")
        if kind == "EROFS":
            disk.is_read_only = True
        else:
            disk.fail("append", number=errno.EIO, times=10**6)
        result = cluster.produce(first, orders, batch(b"refused"))
        assert result.error is not None
        assert result.error.code is ErrorCode.STORAGE_ERROR
        assert kind in str(cluster.brokers[NodeId(first)].logs.directories[0].failed)
        cluster.until(lambda: cluster.partition(orders).leader not in (-1, first), timeout=10)
        assert first not in cluster.partition(orders).isr
        cluster.write(orders, b"1")
        assert cluster.values(orders) == [b"0", b"1"]


def test_a_follower_whose_append_fails_gives_its_directory_up_until_it_starts_again() -> None:
    with orders_cluster(9301, b"0") as (cluster, orders):
        cluster.until_equal(orders, *BROKERS)
        follower = next(broker for broker in BROKERS if broker != cluster.leader(orders))
        cluster.world.machine(f"b{follower}").disk("logs-0").fail("append", number=errno.EIO, times=1)
        cluster.write(orders, b"1")
        cluster.until(lambda: follower not in cluster.partition(orders).isr)
        assert "EIO" in str(cluster.brokers[NodeId(follower)].logs.directories[0].failed)
        cluster.write(orders, b"2")
        cluster.kill(NodeId(follower))
        cluster.start_brokers(follower)
        cluster.until_whole(orders)


def test_each_replica_reports_a_directory_that_fails_before_the_metadata_knows_its_replicas() -> None:
    """With several directories the controller learns the place of a new replica from its broker, a moment later."""
    with ReplicationCluster(9302, directories=2, brokers=BROKERS) as cluster:
        for broker in cluster.brokers.values():
            broker.replicas._reconciler._assign = lambda partition_id, directory: None
        orders = cluster.topic("orders", BROKERS)
        cluster.write(orders, b"0")
        cluster.until_equal(orders, *BROKERS)
        leader = cluster.leader(orders)
        assert cluster.partition(orders).directory_of(leader) == NIL
        logs = cluster.brokers[NodeId(leader)].logs
        home = logs.directory_of(orders)
        assert home is not None
        number = logs.directories.index(home)
        cluster.world.machine(f"b{leader}").disk(f"logs-{number}").fail("append", number=errno.EIO, times=1)
        assert cluster.produce(leader, orders, batch(b"refused")).error is not None
        cluster.until(lambda: leader not in cluster.partition(orders).isr)
        cluster.write(orders, b"1")
