"""What is too large for one turn of the event loop: fencing in steps, snapshots read in slices, candidates looked up
once."""

import asyncio
import gc
from collections import defaultdict
from collections.abc import Iterator
from uuid import UUID

import pytest
from support.metadata.controller import Cluster, directory
from support.metadata.quorum import CONTROLLERS, Quorum

from tidelog.log.batch import partition_of
from tidelog.metadata import brokers
from tidelog.metadata.brokers import Drain, Fence, Heartbeat
from tidelog.metadata.controller_node import ControllerConfig
from tidelog.metadata.image import ClusterImage, Partition
from tidelog.metadata.lost_replicas import ReplicasLost
from tidelog.metadata.partition_changes import Candidates, can_serve
from tidelog.metadata.partitions import AlteredPartition, AlterPartition, ElectLeaders, ElectMissingLeaders
from tidelog.metadata.records import CreateTopic
from tidelog.metadata.snapshot import RECORDS_PER_CHUNK, decode_snapshot, snapshot_bytes
from tidelog.metadata.snapshot_loader import SnapshotLoader
from tidelog.metadata.topics import AddPartitions, NewPartitions
from tidelog.model.errors import CorruptStateError, DuplicateBrokerError, ErrorCode
from tidelog.model.ids import NodeId
from tidelog.raft.config import RaftConfig
from tidelog.raft.driver import DriverConfig


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brokers, "DEPARTURES_MAX", 3)


def eight() -> Cluster:
    """Eight partitions that broker 0 leads, one of them all by itself."""
    cluster = Cluster(3)
    cluster.made("t", *[(0, 1, 2)] * 4, *[(0, 2, 1)] * 3)
    cluster.made("alone", (0,))
    return cluster


def led_by(cluster: Cluster, broker: int) -> int:
    return sum(1 for _, _, partition in cluster.image.partitions_on(broker) if partition.leader == broker)


def states(cluster: Cluster) -> list[tuple[object, ...]]:
    return [(number, p.leader, p.leader_epoch, p.isr, p.eligible) for _, number, p in cluster.image.partitions_on(0)]


@pytest.mark.usefixtures("small_steps")
class TestLeavingInSteps:
    def test_a_broker_of_many_partitions_is_fenced_in_steps_that_are_valid_each(self) -> None:
        cluster = eight()
        epoch = cluster.image.brokers[0].broker_epoch
        left = []
        while not cluster.image.brokers[0].fenced:
            before = led_by(cluster, 0)
            cluster.ask(Fence(broker=0, broker_epoch=epoch))
            left.append(before - led_by(cluster, 0))
        assert left == [3, 3, 2]
        assert cluster.image.brokers[0].fenced
        assert led_by(cluster, 0) == 0

    def test_the_steps_lead_where_one_decision_would_have_led(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sliced, whole = eight(), eight()
        for _ in range(3):
            sliced.crash(0)
        monkeypatch.setattr(brokers, "DEPARTURES_MAX", 100)
        whole.crash(0)
        assert states(sliced) == states(whole)
        assert sliced.image.brokers[0].fenced

    def test_a_broker_may_stop_when_the_last_step_is_done(self) -> None:
        cluster = eight()
        replies = [cluster.beat(0, wants_shutdown=True) for _ in range(3)]
        assert [reply.may_shut_down for reply in replies] == [False, False, True]
        assert [reply.is_fenced for reply in replies] == [False, False, True]
        assert led_by(cluster, 0) == 0

    def test_who_is_leaving_is_not_taken_back_between_two_steps(self) -> None:
        cluster = eight()
        cluster.crash(0)
        assert cluster.image.brokers[0].is_leaving
        number = next(n for _, n, p in cluster.image.partitions_on(0) if p.leader != 0 and len(p.replicas) == 3)
        assert cluster.propose("t", (0, 1, 2), number).error is ErrorCode.INELIGIBLE_REPLICA
        cluster.crash(0)
        cluster.crash(0)
        assert cluster.image.brokers[0].fenced
        assert cluster.partition("t", number).isr == (1, 2)

    def test_what_a_leaving_broker_is_still_in_may_change_and_it_leads_nothing_new(self) -> None:
        cluster = eight()
        cluster.crash(0)
        number = next(n for _, n, p in cluster.image.partitions_on(0) if p.leader == 0 and len(p.replicas) == 3)
        name = "t"
        after = cluster.propose(name, cluster.partition(name, number).isr[:2], number)
        assert after.error is ErrorCode.NEW_LEADER_ELECTED, "a proposal of the leaving leader itself"
        assert after.leader != 0
        assert len(after.isr) == 2
        (wanted,) = cluster.ask(ElectLeaders(kind="preferred", partitions=((name, number),))).items
        assert wanted.error is ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE

    def test_who_is_leaving_is_fenced_before_it_is_let_in_again(self) -> None:
        cluster = eight()
        cluster.crash(0)
        replies = [cluster.beat(0) for _ in range(3)]
        assert [reply.is_fenced for reply in replies] == [False, True, False]
        assert cluster.image.brokers[0].is_live

    def test_another_process_waits_until_the_one_before_has_left(self) -> None:
        cluster = eight()
        cluster.crash(0)
        with pytest.raises(DuplicateBrokerError, match="leaving"):
            cluster.register(0)
        cluster.crash(0)
        cluster.crash(0)
        cluster.register(0)

    @pytest.mark.sim
    def test_a_new_active_controller_goes_on_with_the_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with Quorum(11) as quorum:
            quorum.start()
            quorum.start_brokers(11, 12, 13)
            quorum.create("t", partitions=30)
            active = quorum.active()
            epoch = quorum.controller(active).image.brokers[11].broker_epoch
            quorum.on(active, lambda node: node.submit(Fence(broker=11, broker_epoch=epoch)))
            assert quorum.controller(active).image.brokers[11].is_leaving
            quorum.kill(NodeId(11))
            quorum.kill(active)
            other = quorum.active()

            def is_fenced() -> bool:
                return bool(quorum.controller(other).image.brokers[11].fenced)

            quorum.world.run_until(is_fenced, timeout=10)
            quorum.controller(other).image.validate()

    @pytest.mark.sim
    def test_the_controller_takes_all_steps_by_itself(self) -> None:
        with Quorum(8) as quorum:
            quorum.start()
            quorum.start_brokers(11, 12, 13)
            quorum.create("t", partitions=30)
            active = quorum.active()

            def is_fenced() -> bool:
                return bool(quorum.controller(active).image.brokers[11].fenced)

            quorum.kill(NodeId(11))
            quorum.world.run_until(is_fenced, timeout=10)
            image = quorum.controller(active).image
            image.validate()
            assert len(list(image.partitions_on(11))) == 30
            assert all(partition.leader in (12, 13) for _, _, partition in image.partitions_on(11))

    @pytest.mark.sim
    def test_a_broker_stops_in_order_though_it_takes_many_steps(self) -> None:
        with Quorum(9) as quorum:
            quorum.start()
            quorum.start_brokers(11, 12, 13)
            quorum.create("t", partitions=30)
            broker = quorum.brokers[NodeId(11)]
            began_s = quorum.now_s()
            quorum.world.run(broker.node, lambda _: broker.agent.shut_down(), timeout=10)
            assert quorum.now_s() - began_s < 2.0, "it does not wait for a whole heartbeat after each step"
            image = quorum.controller(quorum.active()).image
            assert all(partition.leader in (12, 13) for _, _, partition in image.partitions_on(11))

    @pytest.mark.sim
    def test_a_drain_goes_on_when_its_caller_gives_up(self) -> None:
        with Quorum(10) as quorum:
            quorum.start()
            quorum.start_brokers(11, 12, 13)
            quorum.create("t", partitions=30)
            controller = quorum.controller(quorum.active())

            def leads() -> int:
                return sum(partition.leader == 11 for _, _, partition in controller.image.partitions_on(11))

            async def give_up(_: object) -> None:
                before = leads()
                asked = asyncio.create_task(controller.submit(Drain(broker=11)))
                while leads() == before:  # noqa: ASYNC110 - virtual time
                    await asyncio.sleep(0.001)
                asked.cancel()
                await asyncio.wait([asked])
                assert asked.cancelled()
                assert 0 < leads() < before, "some steps are left"

            quorum.on(quorum.active(), give_up)
            quorum.world.run_until(lambda: leads() == 0, timeout=10)


@pytest.mark.usefixtures("small_steps")
class TestOtherSteps:
    def test_leaders_for_a_broker_that_is_let_in_are_found_step_by_step(self) -> None:
        cluster = Cluster(2)
        cluster.made("t", *[(0, 1)] * 8)
        for broker in (1, 0):
            while not cluster.image.brokers[broker].fenced:
                cluster.crash(broker)
        cluster.register(0, clean_stop_epoch=cluster.image.brokers[0].broker_epoch)
        reply = cluster.beat(0)
        assert (reply.is_fenced, reply.has_more) == (False, True)
        assert led_by(cluster, 0) == 3
        found = [cluster.ask(ElectMissingLeaders(broker=0, elections_max=3)) for _ in range(2)]
        assert [(step.elected, step.has_more) for step in found] == [(3, True), (2, False)]
        assert led_by(cluster, 0) == 8
        assert not cluster.beat(0).has_more

    def test_without_a_broker_in_question_leaders_are_found_cleanly_only(self) -> None:
        cluster = Cluster(2)
        damaged = cluster.made("damaged", (0,), unclean_leader_election_enable="true")
        epoch = cluster.image.brokers[0].broker_epoch
        cluster.ask(ReplicasLost(broker=0, broker_epoch=epoch, replicas=((damaged, 0),)))
        assert cluster.ask(ElectMissingLeaders()).elected == 0
        assert cluster.partition("damaged").leader == -1

    @pytest.mark.parametrize("kind", ["stalled_directories", "failed_directories"])
    def test_the_replicas_of_a_directory_that_is_offline_leave_step_by_step(self, kind: str) -> None:
        cluster = Cluster(3)
        cluster.made("t", *[(0, 1, 2)] * 8)
        reported = {kind: (directory(0),)}
        steps: list[bool] = []
        while not steps or steps[-1]:
            steps.append(cluster.beat(0, **reported).has_more)
            assert cluster.image.brokers[0].offline == (directory(0),)
        assert steps == [True, True, False]
        assert all(0 not in partition.isr for _, _, partition in cluster.image.partitions_on(0))
        assert not cluster.beat(0, **reported).has_more

    def test_a_directory_that_runs_again_is_believed_when_all_its_replicas_have_left(self) -> None:
        cluster = Cluster(3)
        cluster.made("t", *[(0, 1, 2)] * 8)
        assert cluster.beat(0, stalled_directories=(directory(0),)).has_more
        number = next(n for n in range(8) if 0 not in cluster.partition("t", n).isr)
        assert cluster.propose("t", (0, 1, 2), number).error is ErrorCode.INELIGIBLE_REPLICA
        for in_sync in (2, 0):
            assert cluster.beat(0).has_more
            assert cluster.image.brokers[0].offline == (directory(0),)
            assert sum(0 in partition.isr for _, _, partition in cluster.image.partitions_on(0)) == in_sync
        assert not cluster.beat(0).has_more
        assert cluster.image.brokers[0].offline == ()

    def test_a_drain_goes_step_by_step_and_its_validation_changes_nothing(self) -> None:
        cluster = Cluster(3)
        cluster.made("t", *[(0, 1, 2)] * 8)
        assert cluster.ask(Drain(broker=0, validate_only=True)).has_more
        assert led_by(cluster, 0) == 8
        replies = [cluster.ask(Drain(broker=0)) for _ in range(3)]
        assert [(reply.leads, reply.has_more) for reply in replies] == [(5, True), (2, True), (0, False)]

    @pytest.mark.sim
    def test_the_controller_takes_the_steps_of_heartbeats_and_drains(self) -> None:
        with Quorum(12) as quorum:
            quorum.start()
            quorum.start_brokers(11, 12, 13)
            quorum.create("t", partitions=30)
            assert quorum.ask(Drain(broker=11, validate_only=True)).has_more
            drained = quorum.ask(Drain(broker=11))
            assert (drained.leads, drained.has_more) == (0, False)
            controller, broker = quorum.controller(quorum.active()), quorum.brokers[NodeId(12)]
            broker.agent.stalled_directories = controller.image.brokers[12].directories
            broker.agent.heartbeat_soon()
            quorum.world.run_until(
                lambda: all(12 not in partition.isr for _, _, partition in controller.image.partitions_on(12)),
                timeout=1.0,
            )


@pytest.mark.parametrize("what", ["let in", "stalled", "drained"])
def test_no_decision_changes_more_than_so_many_of_10000_partitions(what: str) -> None:
    """Their time follows from their number: some 50 ms for 2,500."""
    cluster = Cluster(2)
    cluster.create("t", partitions=10_000, replication_factor=2)
    request: object = Drain(broker=0)
    if what == "stalled":
        epoch = cluster.image.brokers[0].broker_epoch
        request = Heartbeat(
            broker=0, broker_epoch=epoch, metadata_offset=len(cluster.log), stalled_directories=(directory(0),)
        )
    if what == "let in":
        for broker in (1, 0):
            while not cluster.image.brokers[broker].fenced:
                cluster.crash(broker)
        epoch = cluster.register(0, clean_stop_epoch=cluster.image.brokers[0].broker_epoch)
        request = Heartbeat(broker=0, broker_epoch=epoch, metadata_offset=len(cluster.log))
    decision = cluster.decide(request)
    assert decision.reply.has_more
    assert len(decision.records) == brokers.DEPARTURES_MAX + 1


def take_back(cluster: Cluster, broker: int) -> int:
    """Every leader proposes to take the broker back; how often it was."""
    image, by_leader = cluster.image, defaultdict(list)
    for topic_id, number, partition in image.partitions_on(broker):
        if partition.leader not in (-1, broker) and broker not in partition.isr:
            by_leader[partition.leader].append(
                AlteredPartition(
                    topic_id=topic_id,
                    partition=number,
                    leader_epoch=partition.leader_epoch,
                    partition_epoch=partition.partition_epoch,
                    isr=tuple((member, image.brokers[member].broker_epoch) for member in (*partition.isr, broker)),
                )
            )
    taken = 0
    for leader, items in by_leader.items():
        request = AlterPartition(
            broker=leader, broker_epoch=image.brokers[leader].broker_epoch, partitions=tuple(items)
        )
        taken += sum(state.error is None for state in cluster.ask(request).partitions)
    return taken


@pytest.mark.parametrize("how", ["stops", "is fenced"])
def test_a_broker_of_6000_partitions_leaves_in_three_steps_whatever_leaders_do_meanwhile(how: str) -> None:
    cluster = Cluster(3)
    cluster.create("t", partitions=6_000, replication_factor=3)
    steps = 0
    while not cluster.image.brokers[0].fenced:
        steps += 1
        assert steps <= 3
        if how == "stops":
            reply = cluster.beat(0, wants_shutdown=True)
            assert reply.may_shut_down == (steps == 3)
        else:
            cluster.crash(0)
        assert take_back(cluster, 0) == 0
    assert led_by(cluster, 0) == 0
    assert all(0 not in partition.isr for _, _, partition in cluster.image.partitions_on(0))


def situations() -> Iterator[tuple[str, ClusterImage]]:
    cluster = Cluster(2)
    for broker in (2, 3, 4):
        cluster.start(broker, directories=(directory(broker), directory(broker, 1)))
    cluster.made("t", (0, 1, 2), (2, 3, 4), (4, 0, 2))
    yield "all live", cluster.image
    cluster.crash(1)
    yield "one fenced", cluster.image
    cluster.ask(Drain(broker=3))
    yield "one draining", cluster.image
    cluster.beat(2, failed_directories=(directory(2),))
    cluster.beat(4, stalled_directories=(directory(4, 1),))
    yield "directories offline", cluster.image


def check_candidates(name: str, image: ClusterImage) -> None:
    everywhere = [
        Partition(replicas, tuple(directory(b, number) for b in replicas), replicas, replicas[0], 0, 0)
        for replicas in ((0, 1, 2), (2, 3, 4), (4, 0, 9))
        for number in (0, 1)
    ]
    candidates, without_0 = Candidates(image), Candidates(image, excluded=(0,))
    for partition in everywhere:
        for broker in range(10):
            assert candidates.of(partition)(broker) == can_serve(image, partition, broker), (name, broker)
            assert without_0.of(partition)(broker) == (broker != 0 and can_serve(image, partition, broker))
    avoided = candidates.is_avoided
    assert [b for b in range(5) if avoided is not None and avoided(b)] == [
        b for b in range(5) if image.brokers[b].draining and image.brokers[b].is_live
    ]


def test_candidates_are_those_who_can_serve() -> None:
    for name, image in situations():
        check_candidates(name, image)


class TestLoading:
    @pytest.fixture
    def data(self) -> Iterator[bytes]:
        topics = range(1, 5 * RECORDS_PER_CHUNK)
        yield snapshot_bytes(ClusterImage().apply_all(CreateTopic(topic_id=UUID(int=n), name=f"t{n}") for n in topics))
        gc.unfreeze()  # what loading has taken from the collector

    def test_others_have_their_turns_while_a_large_snapshot_is_read(self, data: bytes) -> None:
        async def main() -> tuple[int, bool]:
            loader, turns, is_done = SnapshotLoader(), 0, False

            async def other() -> None:
                nonlocal turns
                while not is_done:
                    turns += 1
                    await asyncio.sleep(0)

            beside = asyncio.ensure_future(other())
            await loader.prepare(data)
            is_done = True
            await beside
            prepared = loader.take(data)
            return turns, prepared == decode_snapshot(data) and prepared is not loader.take(data)

        turns, is_same = asyncio.run(main())
        assert turns >= 4
        assert is_same

    def test_a_small_snapshot_is_read_at_once(self) -> None:
        data = snapshot_bytes(eight().image)
        loader = SnapshotLoader()
        preparing = loader.prepare(data)
        with pytest.raises(StopIteration):
            preparing.send(None)
        assert loader.take(data).image == eight().image

    def test_what_was_prepared_is_given_for_those_bytes_only(self, data: bytes) -> None:
        loader = SnapshotLoader()
        asyncio.run(loader.prepare(data))
        assert loader.take(snapshot_bytes(ClusterImage())).image == ClusterImage()

    @pytest.mark.parametrize("place", [0, 0.5, -1])
    @pytest.mark.case("R19")
    def test_a_damaged_one_is_refused_and_leaves_nothing_behind(self, data: bytes, place: float) -> None:
        damaged = bytearray(data)
        damaged[int(place * len(data)) if place >= 0 else -1] ^= 1
        loader, bad = SnapshotLoader(), bytes(damaged)
        with pytest.raises(CorruptStateError):
            asyncio.run(loader.prepare(bad))
        with pytest.raises(CorruptStateError):
            loader.take(bad)

    @pytest.mark.sim
    def test_controllers_and_brokers_begin_with_a_snapshot_of_several_chunks(self) -> None:
        raft = RaftConfig(kept_behind_snapshot_bytes=0)
        config = ControllerConfig(driver=DriverConfig(raft=raft, snapshot_bytes=20_000))
        with Quorum(10, config) as quorum:
            quorum.start()
            quorum.start_brokers(11, 12, 13)
            for number in range(3):
                quorum.create(f"t{number}", partitions=RECORDS_PER_CHUNK)
            active = quorum.active()
            standby = next(node for node in CONTROLLERS if node != active)
            quorum.world.run_until(
                lambda: (
                    quorum.controller(standby).driver.metrics.snapshots_taken > 0
                    and quorum.controller(active).driver.core.log.start > 0
                ),
                timeout=30,
            )
            quorum.kill(standby)
            quorum.start(standby)
            assert len(quorum.controller(standby).image.topics) > 0, "it began with its snapshot"
            quorum.start_brokers(14)
            assert quorum.brokers[NodeId(14)].tail.loaded == 1
            end = quorum.controller(active).machine.offset
            quorum.world.run_until(lambda: quorum.controller(standby).machine.offset >= end, timeout=10)
            quorum.world.run_until(lambda: quorum.brokers[NodeId(14)].tail.offset >= end, timeout=10)
            topics = quorum.controller(active).image.topics
            assert sum(len(topic.partitions) for topic in topics.values()) == 3 * RECORDS_PER_CHUNK
            assert quorum.controller(standby).image.topics == topics
            assert quorum.brokers[NodeId(14)].tail.image.topics == topics
        gc.unfreeze()


def test_keys_stay_where_they_are_until_a_topic_grows_and_its_old_partitions_stay_for_ever() -> None:
    cluster = Cluster(3)
    cluster.create("t", 4, 3)
    topic_id = cluster.image.topic_ids["t"]
    keys = [b"key %d" % number for number in range(1000)]

    def mapping() -> list[int]:
        return [partition_of(key, len(cluster.image.topics[topic_id].partitions)) for key in keys]

    before, old = mapping(), dict(cluster.image.topics[topic_id].partitions)
    cluster.crash(2)
    cluster.start(2)
    assert mapping() == before, "who leads has no say in where a key goes"
    old = dict(cluster.image.topics[topic_id].partitions)
    cluster.ask(AddPartitions(topics=(NewPartitions(name="t", total=6),)))
    after = mapping()
    moved = sum(1 for one, other in zip(before, after, strict=True) if one != other)
    assert 500 < moved < 900
    assert set(after) == set(range(6))
    now = cluster.image.topics[topic_id].partitions
    assert all(now[number] is partition for number, partition in old.items()), "what was written stays where it is"
