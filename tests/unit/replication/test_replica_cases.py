"""Known failures of systems like ours (shared/spec/known-failures.md), on whole brokers in a simulated world."""

import pytest
from support.brokers import data_requests
from support.brokers.cluster import NodeId, ReplicationCluster, batch, orders_cluster
from test_replicas import BROKERS, alter

from tidelog.log.batch import read_header
from tidelog.model.errors import ErrorCode, OffsetNotAvailableError
from tidelog.model.ids import PartitionId
from tidelog.replication.follower_stream import FollowerStream
from tidelog.replication.messages import Ended, Reason
from tidelog.services.data import DataServices
from tidelog.services.produce import ProduceItem
from tidelog.world.simulated import Loss


def isolate(cluster: ReplicationCluster, broker: int) -> None:
    """Cut off from every other node."""
    for other in (*BROKERS, 1, 2, 3):
        if other != broker:
            cluster.network.block(NodeId(broker), NodeId(other))
            cluster.network.block(NodeId(other), NodeId(broker))


@pytest.mark.case("T1")
@pytest.mark.requirement("a:B-15")
def test_t1_a_restarted_follower_that_missed_the_high_watermark_is_elected_and_keeps_the_record() -> None:
    with orders_cluster(101, b"0") as (cluster, orders):
        cluster.until_equal(orders, *BROKERS)
        cluster.write(orders, b"1")
        # At the moment of the acknowledgement the followers have the record and do not know that it is committed.
        assert cluster.replica(12, orders).high_watermark == 1
        for broker in BROKERS:
            cluster.kill(NodeId(broker))
        cluster.start_brokers(12, 13)
        assert cluster.leader(orders) in (12, 13)
        cluster.until(lambda: cluster.leading(orders).state.is_confirmed)
        assert cluster.values(orders) == [b"0", b"1"]


@pytest.mark.case("T2")
@pytest.mark.requirement("a:B-15")
def test_t2_epochs_distinguish_replicas_with_other_records_at_one_offset() -> None:
    with orders_cluster(102, b"0") as (cluster, orders):
        isolate(cluster, 11)
        # The old leader does not know yet: what it takes is on its own device only.
        for value in (b"lost 1", b"lost 2", b"lost 3"):
            assert cluster.produce(11, orders, batch(value), acks=1).error is None
        assert cluster.log(11, orders).end_offset == 4
        cluster.until(lambda: cluster._leader(orders) == 12)
        cluster.write(orders, b"kept 1")
        cluster.network.heal()
        cluster.until_in_sync(orders, *BROKERS)
        cluster.write(orders, b"kept 2")
        cluster.until_equal(orders, *BROKERS)
        for broker in BROKERS:
            assert list(cluster.log(broker, orders).epochs)[-1] == list(cluster.log(12, orders).epochs)[-1]
        assert cluster.values(orders) == [b"0", b"kept 1", b"kept 2"]


@pytest.mark.case("T3")
def test_t3_after_a_fast_double_failover_all_logs_are_the_same() -> None:
    with orders_cluster(103, b"0") as (cluster, orders):
        isolate(cluster, 11)
        assert cluster.produce(11, orders, batch(b"only 11"), acks=1).error is None
        cluster.until(lambda: cluster._leader(orders) == 12)
        isolate(cluster, 12)
        assert cluster.produce(12, orders, batch(b"only 12"), acks=1).error is None
        cluster.until(lambda: cluster.partition(orders).leader != 12, timeout=30)
        cluster.network.heal()
        cluster.until_in_sync(orders, *BROKERS, timeout=60)
        cluster.write(orders, b"last")
        cluster.until_equal(orders, *BROKERS)
        values = {tuple(_all_values(cluster, broker, orders)) for broker in BROKERS}
        assert len(values) == 1
        (found,) = values
        assert found[0] == b"0"
        assert found[-1] == b"last"


def _all_values(cluster: ReplicationCluster, broker: int, partition: PartitionId) -> list[bytes]:
    from support.brokers.cluster import RunningBroker, values_of

    async def read(found: RunningBroker) -> bytes:
        log = found.logs.get(partition)
        assert log is not None
        data, offset = b"", log.start_offset
        while offset < log.end_offset:
            piece = await log.read(offset, bytes_max=1 << 20)
            data, offset = data + bytes(piece.data), piece.next_offset
        return data

    return values_of(cluster.on_broker(broker, read))


@pytest.mark.case("T4")
@pytest.mark.requirement("a:B-31")
def test_t4_a_reader_past_a_truncation_learns_where_its_history_ends() -> None:
    with ReplicationCluster(104, brokers=BROKERS) as cluster:
        orders = cluster.topic("orders", BROKERS, configs={"min.insync.replicas": "1"})
        cluster.write(orders, b"0")
        cluster.until_equal(orders, *BROKERS)
        cluster.kill(NodeId(12))
        cluster.kill(NodeId(13))
        cluster.until_in_sync(orders, 11)
        for value in (b"1", b"2"):
            cluster.write(orders, value)
        read = cluster.fetch(11, orders, 1)
        header = read_header(read.data)
        position, epoch = 3, header.leader_epoch
        cluster.kill(NodeId(11))
        cluster.start_brokers(12, 13)
        cluster.until(lambda: cluster.partition(orders).leader == -1)
        cluster.elect("orders", "unclean")
        leader = cluster.leader(orders)
        cluster.write(orders, b"other 1")
        result = cluster.fetch(leader, orders, position, last_epoch=epoch)
        assert result.error is None
        assert result.diverging == (epoch, 1), "the records at 1 and 2 that it has read are not part of the log"
        # One that does not say its epoch is out of range, not silent.
        error = cluster.fetch(leader, orders, position + 1).error
        assert error is not None
        assert error.code is ErrorCode.OFFSET_OUT_OF_RANGE
        cluster.start_brokers(11)
        cluster.until_whole(orders)
        assert cluster.values(orders) == [b"0", b"other 1"]


@pytest.mark.case("T6")
def test_t6_epochs_without_records_do_not_keep_followers_out() -> None:
    with orders_cluster(106, b"0") as (cluster, orders):
        for _ in range(3):
            leader = cluster.leader(orders)
            cluster.kill(NodeId(leader))
            cluster.until(lambda gone=leader: cluster.partition(orders).leader not in (-1, gone))  # type: ignore[misc]
            cluster.start_brokers(leader)
            cluster.until_in_sync(orders, *BROKERS)
        assert cluster.leading(orders).leader_epoch >= 3
        assert cluster.log(cluster.leader(orders), orders).end_offset == 1, "nothing was written meanwhile"
        cluster.write(orders, b"1")
        cluster.until_equal(orders, *BROKERS)


@pytest.mark.case("T7")
def test_t7_a_lost_epoch_history_after_power_loss_neither_blocks_the_start_nor_diverges() -> None:
    with orders_cluster(107) as (cluster, orders):
        cluster.write_numbers(orders, 4)
        cluster.until_equal(orders, *BROKERS)
        key = cluster.log(12, orders).prefix + b"epochs"
        store = cluster.brokers[NodeId(12)].node.store("logs-0")
        names = [name for name in store.keys(cluster.log(12, orders).prefix) if b"epoch" in name]
        assert names, f"{key!r} or the like is stored"

        async def forget(_: object) -> None:
            await store.commit(dict.fromkeys(names))

        cluster.world.run(cluster.brokers[NodeId(12)].node, forget)
        cluster.lose_power(12, Loss.ALL)
        cluster.start_brokers(12)
        cluster.until_in_sync(orders, *BROKERS)
        cluster.write(orders, b"4")
        cluster.until_equal(orders, *BROKERS)


@pytest.mark.case("T8")
def test_t8_a_late_answer_of_a_former_subscription_cuts_nothing() -> None:
    with orders_cluster(108, b"0") as (cluster, orders):
        old = cluster.following(12, orders).number
        cluster.network.cut_streams(NodeId(11), NodeId(12))
        cluster.until(lambda: cluster.following(12, orders).number > old)
        cluster.write(orders, b"1")
        following = cluster.following(12, orders)
        assert isinstance(following.stream, FollowerStream)
        following.stream._ended(Ended(number=old, reason=Reason.DIVERGED, epoch=0, offset=0))
        cluster.world.run_for(0.5)
        assert cluster.following(12, orders) is following
        assert cluster.log(12, orders).end_offset == 2


@pytest.mark.case("T9")
def test_t9_a_follower_that_ends_before_the_leaders_log_start_resets_its_log_there() -> None:
    with orders_cluster(109, b"0") as (cluster, orders):
        cluster.kill(NodeId(13))
        cluster.until_in_sync(orders, 11, 12)
        for number in range(1, 6):
            cluster.write(orders, b"%d" % number)
        assert cluster.on_broker(11, lambda found: data_requests.delete_records(found.service, orders, 4)) == 4
        cluster.start_brokers(13)
        cluster.until_in_sync(orders, *BROKERS)
        cluster.write(orders, b"6")
        cluster.until_equal(orders, *BROKERS)
        cluster.until(lambda: all(cluster.log(b, orders).start_offset == 4 for b in BROKERS))
        assert cluster.values(orders) == [b"4", b"5", b"6"]


@pytest.mark.case("T10")
@pytest.mark.requirement("a:B-32", "a:T-05")
def test_t10_the_last_replica_that_lost_power_unsynced_is_elected_only_with_all_that_was_acknowledged() -> None:
    with orders_cluster(110, b"0") as (cluster, orders):
        cluster.kill(NodeId(11))
        cluster.until_in_sync(orders, 12, 13)
        cluster.write(orders, b"1")
        cluster.kill(NodeId(12))
        cluster.until_in_sync(orders, 13)
        cluster.until(lambda: 12 in cluster.partition(orders).eligible)
        cluster.lose_power(13, Loss.ALL)
        cluster.start_brokers(11)
        cluster.world.run_for(5)
        assert cluster.partition(orders).leader == -1, "it lacks what was acknowledged after it left"
        cluster.start_brokers(12)
        cluster.start_brokers(13)
        cluster.until_in_sync(orders, *BROKERS)
        assert cluster.values(orders) == [b"0", b"1"]


@pytest.mark.case("T11")
def test_t11_unsynced_bytes_of_one_follower_are_never_counted() -> None:
    with orders_cluster(111, b"0") as (cluster, orders):
        cluster.until_equal(orders, *BROKERS)
        cluster.world.machine("b12").disk("logs-0").begin_stall()
        result = cluster.produce(11, orders, batch(b"1"), timeout_ms=800)
        assert result.error is not None
        assert result.error.code is ErrorCode.REQUEST_TIMED_OUT
        assert cluster.log(12, orders).end_offset == 2, "it has the record"
        assert cluster.log(12, orders).durable_end == 1, "and has not synced it"
        assert cluster.leading(orders).high_watermark == 1
        isolate(cluster, 11)
        lose_power_while_stalled(cluster, 12)
        cluster.start_brokers(12)
        cluster.until(lambda: cluster._leader(orders) in (12, 13))
        cluster.write(orders, b"2")
        left = cluster.values(orders)
        # The record in between was not acknowledged: it stays if the new leader has synced it, and goes if not.
        assert left in ([b"0", b"1", b"2"], [b"0", b"2"])
        cluster.network.heal()
        cluster.until_equal(orders, *BROKERS)
        assert cluster.values(orders) == left


def lose_power_while_stalled(cluster: ReplicationCluster, broker: int) -> None:
    """What the device did not take is lost; it works again afterwards."""
    cluster.lose_power(broker, Loss.ALL)
    cluster.world.machine(f"b{broker}").disk("logs-0").heal()


@pytest.mark.case("T11")
def test_t11_a_follower_that_loses_power_and_one_that_is_behind_do_not_decide_without_the_leader() -> None:
    """A=100, B=100, C=75, all of it acknowledged by A and B; B loses power while A is cut off. C must not lead at 75,
    neither alone nor with B: B has what it acknowledged, and leads."""
    with orders_cluster(1110) as (cluster, orders):
        values = [b"%d" % number for number in range(110)]
        cluster.write(orders, *values[:75])
        cluster.until_equal(orders, *BROKERS)
        cluster.network.block(NodeId(11), NodeId(13))
        cluster.network.block(NodeId(13), NodeId(11))
        acknowledged = cluster.produce(11, orders, batch(*values[75:100]), timeout_ms=50_000)
        assert acknowledged.error is None, "the two that are in sync have it on disk"
        assert set(cluster.partition(orders).isr) == {11, 12}
        cluster.world.machine("b12").disk("logs-0").begin_stall()
        late = cluster.produce(11, orders, batch(*values[100:]), timeout_ms=800)
        assert late.error is not None
        assert [cluster.log(broker, orders).end_offset for broker in BROKERS] == [110, 110, 75]
        isolate(cluster, 11)
        lose_power_while_stalled(cluster, 12)
        seen: set[int] = set()
        for _ in range(300):
            cluster.world.run_for(0.1)
            seen.add(cluster.partition(orders).leader)
        assert cluster.partition(orders).leader == -1, "who is behind leads nothing"
        assert 13 not in seen
        assert cluster.log(13, orders).end_offset == 75
        cluster.start_brokers(12)
        assert cluster.leader(orders) == 12
        assert cluster.log(12, orders).end_offset == 100, "what it had acknowledged was on its disk"
        assert cluster.write(orders, b"after").base_offset == 100
        cluster.until_in_sync(orders, 12, 13)
        assert cluster.values(orders) == [*values[:100], b"after"]
        cluster.network.heal()
        cluster.until_equal(orders, *BROKERS)
        assert cluster.values(orders) == [*values[:100], b"after"], (
            "the former leader has given up what nobody else had"
        )


@pytest.mark.case("T12")
@pytest.mark.requirement("a:B-09", "a:B-11", "a:U-04", "a:U-10", "a:X3-28", "b:A-19", "b:C-09")
def test_t12_nobody_sees_a_record_that_is_not_replicated_acks_1_included() -> None:
    with orders_cluster(112, b"0") as (cluster, orders):
        for broker in (12, 13):
            cluster.network.block(NodeId(broker), NodeId(11))
        result = cluster.produce(11, orders, batch(b"1"), acks=1)
        assert (result.error, result.base_offset) == (None, 1)
        fetched = cluster.fetch(11, orders, 1, max_wait_ms=500)
        assert (fetched.error, fetched.data, fetched.high_watermark) == (None, b"", 1)
        latest = cluster.on_broker(11, lambda found: data_requests.list_offsets(found.service, orders, -1))
        assert latest[0] == 1
        cluster.network.heal()
        cluster.until(lambda: cluster.leading(orders).high_watermark == 2)
        assert cluster.values(orders) == [b"0", b"1"]


@pytest.mark.case("T13")
def test_t13_a_new_leader_tells_no_offsets_before_it_has_confirmed_its_epoch() -> None:
    with orders_cluster(113, b"0") as (cluster, orders):
        cluster.until_equal(orders, *BROKERS)
        cluster.write(orders, b"1")
        cluster.network.block(NodeId(13), NodeId(12))
        cluster.network.block(NodeId(12), NodeId(13))
        cluster.kill(NodeId(11))
        assert cluster.leader(orders) == 12
        assert not cluster.leading(orders).state.is_confirmed

        async def latest(service: DataServices) -> int:
            return (await data_requests.list_offsets(service, orders, -1))[0]

        with pytest.raises(OffsetNotAvailableError):
            cluster.on_broker(12, lambda found: latest(found.service))
        with pytest.raises(OffsetNotAvailableError):
            cluster.on_broker(12, lambda found: data_requests.offset_for_leader_epoch(found.service, orders, 0))
        waiting = cluster.fetch(12, orders, 2)
        assert (waiting.error, waiting.data) == (None, b""), "a reader that saw offset 1 is not sent away"
        beyond = cluster.fetch(12, orders, 3).error
        assert beyond is not None
        assert beyond.code is ErrorCode.OFFSET_NOT_AVAILABLE
        cluster.network.heal()
        cluster.until(lambda: cluster.leading(orders).state.is_confirmed)
        assert cluster.on_broker(12, lambda found: latest(found.service)) == 2


@pytest.mark.case("T14")
@pytest.mark.requirement("a:T-22")
def test_t14_offsets_are_not_given_twice_after_a_loss_of_power() -> None:
    with ReplicationCluster(114, brokers=(11,)) as cluster:
        orders = cluster.topic("orders", [11], configs={"min.insync.replicas": "1"})
        offsets = []
        for round_number in range(4):
            for acks in (1, -1):
                result = cluster.write(orders, b"%d/%d" % (round_number, acks), acks=acks)
                offsets.append(result.base_offset)
            cluster.lose_power(11, Loss.ALL)
            cluster.start_brokers(11)
        assert offsets == list(range(8))
        assert cluster.values(orders) == [b"%d/%d" % (n, acks) for n in range(4) for acks in (1, -1)]


@pytest.mark.case("T15")
def test_t15_reads_after_a_restart_skip_nothing_between_files_and_memory() -> None:
    with ReplicationCluster(115, brokers=BROKERS) as cluster:
        orders = cluster.topic("orders", BROKERS, configs={"segment.bytes": "1048576"})
        written = []
        for number in range(12):
            written.append(b"%d-" % number + bytes(300_000))
            cluster.write(orders, written[-1])
        cluster.kill(NodeId(11))
        cluster.world.machine("b11").disk("logs-0").evict()
        cluster.start_brokers(11)
        cluster.until_in_sync(orders, *BROKERS)
        for number in range(12, 15):
            written.append(b"%d-" % number + bytes(300_000))
            cluster.write(orders, written[-1])
        cluster.until_equal(orders, *BROKERS)
        assert cluster.values(orders) == written
        assert _all_values(cluster, 11, orders) == written


@pytest.mark.case("T16")
@pytest.mark.requirement("a:T-03", "a:T-15", "a:B-19")
def test_t16_a_batch_that_is_repeated_after_a_failover_is_stored_once() -> None:
    with orders_cluster(116) as (cluster, orders):
        producer, epoch = cluster.on_broker(11, lambda found: data_requests.init_producer_id(found.service))
        one = batch(b"0", producer_id=producer, producer_epoch=epoch, base_sequence=0)
        two = batch(b"1", producer_id=producer, producer_epoch=epoch, base_sequence=1)
        assert cluster.produce(11, orders, one).base_offset == 0
        # The second is replicated, and the leader dies before it can answer.
        cluster.brokers[NodeId(11)].node.spawn(
            data_requests.produce(
                cluster.brokers[NodeId(11)].service, [ProduceItem(orders, two)], acks=-1, timeout_ms=5000
            )
        )
        cluster.until(lambda: all(cluster.log(broker, orders).durable_end == 2 for broker in (12, 13)))
        cluster.kill(NodeId(11))
        leader = cluster.leader(orders)
        again = cluster.produce(leader, orders, two, timeout_ms=20_000)
        assert (again.error, again.base_offset) == (None, 1)
        assert cluster.values(orders) == [b"0", b"1"]


@pytest.mark.case("T17")
def test_t17_the_end_of_a_replicated_partition_is_its_end() -> None:
    with orders_cluster(117) as (cluster, orders):
        cluster.write_numbers(orders, 7)
        cluster.kill(NodeId(11))
        leader = cluster.leader(orders)
        cluster.until(lambda: cluster.leading(orders).state.is_confirmed)
        found = cluster.on_broker(leader, lambda broker: data_requests.list_offsets(broker.service, orders, -1))
        assert found[0] == 7
        empty = cluster.fetch(leader, orders, found[0])
        assert (empty.error, empty.data) == (None, b"")


@pytest.mark.case("R12")
@pytest.mark.case("S5")
@pytest.mark.requirement("a:T-29")
def test_r12_a_leader_whose_disk_stands_still_gives_its_leaderships_up() -> None:
    with orders_cluster(212, b"0") as (cluster, orders):
        cluster.until_equal(orders, *BROKERS)
        cluster.world.machine("b11").disk("logs-0").begin_stall()
        began_s = cluster.now_s()
        assert cluster.produce(11, orders, batch(b"1"), timeout_ms=100).error is not None
        cluster.until(lambda: cluster._leader(orders) not in (None, 11))
        assert cluster.now_s() - began_s < 2.0 + 1.0, "disk.stall.timeout.ms and a moment"
        assert not cluster.brokers[NodeId(11)].agent.is_fenced, "its heartbeats go on"
        cluster.until(lambda: 11 not in cluster.partition(orders).isr)
        cluster.write(orders, b"2")
        cluster.world.machine("b11").disk("logs-0").heal()
        cluster.until_whole(orders)
        assert cluster.values(orders)[-1] == b"2"


@pytest.mark.case("S3")
@pytest.mark.requirement("a:T-29")
def test_s3_a_full_disk_refuses_writes_and_others_lead_until_there_is_room() -> None:
    with orders_cluster(203, b"0") as (cluster, orders):
        cluster.world.machine("b11").disk("logs-0").fill()
        result = cluster.produce(11, orders, batch(b"1"))
        assert result.error is not None
        assert result.error.code is ErrorCode.STORAGE_ERROR
        assert "space" in str(result.error).lower()
        assert cluster.values(orders) == [b"0"]
        cluster.until(lambda: cluster._leader(orders) not in (None, 11))
        cluster.write(orders, b"1")
        cluster.world.machine("b11").disk("logs-0").heal()
        cluster.until_in_sync(orders, *BROKERS)
        # Whether its write waited for the full one, and was repeated, is a matter of milliseconds.
        assert list(dict.fromkeys(cluster.values(orders))) == [b"0", b"1"]


@pytest.mark.case("S3")
def test_s3_a_follower_with_a_full_disk_leaves_the_in_sync_set_and_comes_back() -> None:
    with orders_cluster(204, b"0") as (cluster, orders):
        alter(cluster, "cluster", "", replica_lag_time_max_ms="2000")
        cluster.world.machine("b12").disk("logs-0").fill()
        result = cluster.produce(11, orders, batch(b"1"), timeout_ms=30_000)
        assert result.error is None
        cluster.until_in_sync(orders, 11, 13)
        cluster.world.machine("b12").disk("logs-0").heal()
        cluster.until_whole(orders)


@pytest.mark.case("S4")
@pytest.mark.requirement("a:T-29")
def test_s4_a_failed_sync_takes_the_directory_offline_and_acknowledges_nothing() -> None:
    with ReplicationCluster(205, directories=2, brokers=BROKERS) as cluster:
        first = cluster.topic("first", BROKERS)
        cluster.write(first, b"0")
        second = cluster.topic("second", BROKERS)
        cluster.write(second, b"0")
        logs = cluster.brokers[NodeId(11)].logs
        home, other = logs.directory_of(first), logs.directory_of(second)
        assert home is not None
        assert home is not other
        cluster.world.machine("b11").disk(f"logs-{logs.directories.index(home)}").fail("sync")
        result = cluster.produce(11, first, batch(b"1"))
        assert result.error is not None, "what is not stored is not acknowledged"
        cluster.until(lambda: cluster._leader(first) == 12)
        cluster.write(first, b"2")
        assert cluster.leader(second) == 11, "the other directory goes on"
        cluster.write(second, b"1")
        assert cluster.brokers[NodeId(11)].replicas.status().offline == 1
        cluster.until(lambda: 11 not in cluster.partition(first).isr)
        cluster.kill(NodeId(11))
        cluster.start_brokers(11)
        cluster.until_in_sync(first, *BROKERS)
        cluster.until_equal(first, *BROKERS)
        assert cluster.values(first)[-1] == b"2"
