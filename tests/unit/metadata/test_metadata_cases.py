"""Failures that peers of ours are known for, on whole controllers and brokers in the simulated machine room."""

import asyncio
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from support.metadata.quorum import CLUSTER, CONTROLLERS, Quorum

from tidelog.metadata.broker_lifecycle import CLEAN_STOP_KEY, BrokerLifecycle, store_clean_stop
from tidelog.metadata.brokers import Register
from tidelog.metadata.controller_client import ControllerClientConfig
from tidelog.metadata.controller_node import ControllerConfig, ControllerNode
from tidelog.metadata.features import supported
from tidelog.metadata.image import ClusterImage, Partition
from tidelog.metadata.records import ChangeBroker, SetUser, UnknownRecord, decode_records, encode_records
from tidelog.metadata.replay import Replay
from tidelog.metadata.tail import MetadataTail
from tidelog.metadata.topics import CreateTopics, NewTopic
from tidelog.model.errors import ErrorCode, RemoteError, TidelogError
from tidelog.model.ids import NodeId, Offset
from tidelog.raft.driver import DriverConfig
from tidelog.raft.membership import Member, Membership
from tidelog.raft.messages import Entry, EntryKind
from tidelog.raft.storage import RaftStorage
from tidelog.world.simulated import Loss, SimNode
from tidelog.world.simulated.network import SimTransport

pytestmark = pytest.mark.sim
SMALL_SNAPSHOTS = ControllerConfig(driver=DriverConfig(snapshot_bytes=2_000))


def until_equal(quorum: Quorum) -> None:
    """All controllers and all tails have what the active controller has."""

    def equal() -> bool:
        image = quorum.controller(quorum.active()).image
        return all(controller.image == image for _, controller in quorum.controllers.values()) and all(
            broker.tail.image == image for broker in quorum.brokers.values()
        )

    quorum.world.run_until(equal, timeout=60)


def fencings(quorum: Quorum) -> list[int]:
    """Which brokers the log has ever fenced after they were live, in order."""
    entries = quorum.controller(quorum.active()).driver.core.log.entries
    records = [record for e in entries if e.kind is EntryKind.DATA for record in decode_records(e.data)]
    return [record.broker for record in records if isinstance(record, ChangeBroker) and record.fenced is True]


class Witness:
    """Remembers what was committed."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}

    def look(self, quorum: Quorum) -> None:
        for _, controller in quorum.controllers.values():
            log = controller.driver.core.log
            for number, entry in enumerate(log.entries[: controller.machine.offset - log.start], log.start):
                assert self.entries.setdefault(number, entry) == entry, "what is committed stays"

    def replayed(self, end: int) -> ClusterImage:
        """The image that the first `end` entries make, from the beginning."""
        replay = Replay(ClusterImage())
        for number in range(end):
            if self.entries[number].kind is EntryKind.DATA:
                replay.apply(decode_records(self.entries[number].data))
        return replay.image

    def check(self, quorum: Quorum) -> None:
        self.look(quorum)
        for _, controller in quorum.controllers.values():
            assert controller.image == self.replayed(controller.machine.offset)
        for broker in quorum.brokers.values():
            assert broker.tail.image == self.replayed(broker.tail.offset)


def _has(found: list[UUID], wanted: int) -> bool:
    return len(found) >= wanted


@pytest.mark.case("R13")
@pytest.mark.parametrize("seed", range(4))
def test_controllers_killed_under_load_neither_skip_nor_repeat_what_they_had_applied(seed: int) -> None:
    with Quorum(100 + seed, SMALL_SNAPSHOTS) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        acknowledged: list[UUID] = []
        witness = Witness()

        async def load(_: Any) -> None:
            for number in range(1000):
                topic = NewTopic(name=f"t{number}", partitions=2, replication_factor=2)
                try:
                    (made,) = (await quorum.client.call(CreateTopics(topics=(topic,)))).topics
                except TidelogError:
                    continue
                if made.error is None:
                    acknowledged.append(made.topic_id)

        task = quorum.admin.spawn(load(None))
        for wanted in (8, 16, 24):
            quorum.world.run_until(partial(_has, acknowledged, wanted), timeout=60)
            witness.look(quorum)
            for node in CONTROLLERS:
                quorum.kill(node)
            quorum.start()
        task.cancel()
        quorum.world.run_for(3.0)
        until_equal(quorum)
        for node in CONTROLLERS:
            started_from = quorum.controller(node).driver.core.log.snapshot.offset
            assert started_from > 0, "a snapshot and a rest"
        witness.check(quorum)
        assert set(acknowledged) <= set(quorum.controller(quorum.active()).image.topics)


@pytest.mark.case("R14")
def test_nodes_that_are_upgraded_rolled_back_and_upgraded_again_do_not_diverge() -> None:
    """While a newer version leads, it writes what this one does not know; this one restarts from snapshots of it."""
    with Quorum(110, SMALL_SNAPSHOTS, tail_bytes=1_000) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        witness = Witness()
        for number in range(3):
            newer = encode_records(
                [
                    UnknownRecord(type=200, version=1, fields=bytes([0x81, 0, number])),
                    SetUser(user=f"u{number}", mechanism="m", salt=b"s", iterations=1, extra=((9, number),)),
                ]
            )

            async def write(controller: ControllerNode, data: bytes = newer) -> None:
                await controller.driver.propose(data)

            quorum.on(quorum.active(), write)
            for topic in range(6):
                quorum.create(f"t{number}.{topic}", partitions=4)
            witness.look(quorum)
            for node in CONTROLLERS:
                quorum.kill(node)
                quorum.start(node)
                quorum.active()
            for broker in (11, 12, 13):
                quorum.kill(NodeId(broker))
                quorum.start_brokers(broker)
        until_equal(quorum)
        image = quorum.controller(quorum.active()).image
        assert [record.fields[2] for record in image.unknown] == [0, 1, 2]
        assert len(image.unknown_fields) == 3, "the fields that only the newer version knows"
        assert len(image.topics) == 18
        witness.check(quorum)


@pytest.mark.case("R17")
@pytest.mark.parametrize("pause_s", [1.0, 4.0, 30.0])
def test_a_controller_that_was_held_up_fences_no_broker_that_lives(pause_s: float) -> None:
    """The only one, so that nobody takes over: heartbeats have waited, streams have broken."""
    only = CONTROLLERS[0]
    with Quorum(120, founders=(only,)) as quorum:
        quorum.start(only)
        quorum.start_brokers(11, 12, 13, 14)
        quorum.world.machine(f"n{only}").pause()
        quorum.world.run_for(pause_s)
        quorum.world.machine(f"n{only}").resume()
        quorum.world.run_for(8.0)
        assert fencings(quorum) == []
        quorum.create("t", replication_factor=3)


@pytest.mark.case("R17")
def test_a_flood_of_requests_fences_no_broker() -> None:
    """It lasts longer than a session, and nothing commits meanwhile: heartbeats count when they arrive."""
    with Quorum(121, ControllerConfig(waiting_max=50)) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        outcomes: list[object] = []

        async def flood(number: int) -> None:
            topics = tuple(NewTopic(name=f"t{number}.{n}", partitions=8, replication_factor=3) for n in range(5))
            try:
                outcomes.append(await quorum.controller(active).submit(CreateTopics(topics=topics)))
            except TidelogError as error:
                outcomes.append(error.code)

        active = quorum.active()
        process, _ = quorum.controllers[active]
        slow = [quorum.world.machine(f"n{node}") for node in CONTROLLERS if node != active]
        for machine in slow:
            machine.disk().begin_stall()
            machine.store().begin_stall()
        began_s = quorum.now_s()
        for number in range(400):
            process.spawn(flood(number))
            quorum.world.run_for(0.012)
        assert quorum.now_s() - began_s > 4.5, "a session is 3 s"
        for machine in slow:
            machine.disk().heal()
            machine.store().heal()
        quorum.world.run_until(lambda: len(outcomes) == 400, timeout=60)
        assert ErrorCode.THROTTLING_QUOTA_EXCEEDED in outcomes, "more than wait may were asked"
        quorum.world.run_for(8.0)
        assert quorum.active() == active
        assert fencings(quorum) == []


@pytest.mark.case("R19")
@pytest.mark.parametrize("seed", range(3))
def test_a_minority_with_a_spoilt_snapshot_costs_nothing_and_deletes_nothing(seed: int) -> None:
    with Quorum(130 + seed, SMALL_SNAPSHOTS) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        for number in range(12):
            quorum.create(f"t{number}", partitions=4)
        node = CONTROLLERS[seed % 3]
        quorum.world.run_until(lambda: quorum.controller(node).driver.core.log.snapshot.offset > 0, timeout=20)
        quorum.kill(node)
        device = quorum.world.machine(f"n{node}").disk()
        spoilt = [(path, size) for path, size in device.files() if path.endswith(".snapshot")]
        assert spoilt
        for path, size in spoilt:
            device.flip_bit(path, size // 2, 1)
        quorum.start(node)
        quorum.create("after")
        until_equal(quorum)
        assert len(quorum.controller(node).image.topics) == 13
        kept = [path for path, _ in device.files() if path.endswith(".corrupt")]
        assert len(kept) == len(spoilt), "what is spoilt is set aside, for a person to look at"


def _partition(quorum: Quorum, topic_id: UUID) -> Partition:
    found = quorum.controller(quorum.active()).image.topics[topic_id].partitions[0]
    assert isinstance(found, Partition)
    return found


@pytest.mark.case("T10")
def test_the_last_replica_is_not_elected_after_it_lost_what_was_not_synced() -> None:
    with Quorum(140) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        configs = (("flush.mode", "page-cache"), ("min.insync.replicas", "2"))
        topic = NewTopic(name="t", assignment=((11, 12, 13),), configs=configs)
        (made,) = quorum.ask(CreateTopics(topics=(topic,))).topics
        assert made.error is None, made.message

        def until_isr(*isr: int) -> None:
            quorum.world.run_until(lambda: _partition(quorum, made.topic_id).isr == isr, timeout=20)

        quorum.kill(NodeId(11))
        until_isr(12, 13)
        stopping = quorum.brokers[NodeId(12)]

        async def stop(process: SimNode) -> None:
            await store_clean_stop(process.store(), await stopping.agent.shut_down())

        quorum.world.run(stopping.node, stop)
        quorum.kill(NodeId(12))
        until_isr(13)
        assert _partition(quorum, made.topic_id).eligible == (12,)
        del quorum.brokers[NodeId(13)]
        quorum.world.machine("b13").lose_power(Loss.ALL)
        until_isr()
        quorum.start_brokers(13)
        assert _partition(quorum, made.topic_id).leader == -1, "13 may have lost what was acknowledged"
        quorum.start_brokers(11)
        assert _partition(quorum, made.topic_id).leader == -1, "11 had left before that was written"
        quorum.start_brokers(12)
        quorum.world.run_until(lambda: _partition(quorum, made.topic_id).leader == 12, timeout=20)


def _epoch(agent: BrokerLifecycle) -> int | None:
    return agent.broker_epoch


def _twin(quorum: Quorum, broker: int, process: SimNode) -> tuple[BrokerLifecycle, MetadataTail]:
    """Another process that was given the same node id, at an address of its own."""
    transport = process.attach(SimTransport(quorum.network, NodeId(broker), process.loop))
    tail = MetadataTail(
        disk=process.disk(),
        path="metadata",
        transport=transport,
        sources=lambda: CONTROLLERS,
        work=process.work,
        random=process.random,
    )
    registration = Register(
        cluster_id=CLUSTER,
        broker=broker,
        incarnation=UUID(int=process.random.getrandbits(128), version=4),
        endpoints=(("CLIENT", "PLAINTEXT", "elsewhere", 9092),),
        directories=(UUID(int=78),),
        features=supported(),
    )
    return BrokerLifecycle(
        registration, transport, tail, lambda: CONTROLLERS, ControllerClientConfig(), process.random
    ), tail


def test_a_second_process_with_a_brokers_id_is_refused_while_the_first_lives_and_let_in_after_it() -> None:
    with Quorum(150) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        made = quorum.create("t", partitions=6)
        first = quorum.brokers[NodeId(11)]
        process = quorum.world.machine("twin").boot()
        agent, tail = _twin(quorum, 11, process)

        async def ask_once(_: SimNode) -> Any:
            return await agent.client.call(agent.registration)

        with pytest.raises(RemoteError, match="live as another process at host-11:9092") as rejection:
            quorum.world.run(process, ask_once)
        assert rejection.value.code is ErrorCode.DUPLICATE_BROKER_REGISTRATION

        async def live(_: SimNode) -> None:
            await tail.open()
            process.spawn(tail.run())
            process.spawn(agent.run())

        epoch = _epoch(first.agent)
        quorum.world.run(process, live)
        quorum.world.run_for(15.0)
        assert _epoch(agent) is None, "it asks again and again, and is refused as long as the first one lives"
        assert (_epoch(first.agent), first.agent.is_fenced) == (epoch, False), "which goes on undisturbed"
        assert fencings(quorum) == []
        leads = [p.leader for p in quorum.controller(quorum.active()).image.topics[made.topic_id].partitions.values()]
        assert 11 in leads
        quorum.kill(NodeId(11))
        quorum.world.run_until(lambda: _epoch(agent) is not None and not agent.is_fenced, timeout=20)
        assert epoch is not None
        assert (_epoch(agent) or 0) > epoch
        partitions = quorum.controller(quorum.active()).image.topics[made.topic_id].partitions.values()
        assert all(11 not in partition.isr for partition in partitions), "it has other disks: it is in sync nowhere"


def test_the_second_process_stays_out_when_controllers_change() -> None:
    with Quorum(151) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        first = quorum.brokers[NodeId(11)]
        epoch = _epoch(first.agent)
        process = quorum.world.machine("twin").boot()
        agent, tail = _twin(quorum, 11, process)

        async def live(_: SimNode) -> None:
            await tail.open()
            process.spawn(agent.run())
            await asyncio.sleep(1.0)

        quorum.world.run(process, live)
        for _ in range(3):
            former = quorum.active()
            quorum.kill(former)
            quorum.active(among=[node for node in CONTROLLERS if node != former])
            quorum.world.run_for(4.0)
            quorum.start(former)
        assert _epoch(agent) is None
        assert (_epoch(first.agent), first.agent.is_fenced) == (epoch, False)


def test_a_controller_that_may_not_campaign_tells_tails_of_no_leader_that_it_does_not_hear() -> None:
    """A voter came back with an empty disk and was then removed. It asks nobody for votes, so it would name its last
    leader for as long as the streams stand, and brokers would stay with what it had then."""
    node = NodeId(4)
    with Quorum(160) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        active, machine = quorum.active(), quorum.world.machine("n4")

        async def format_it(process: SimNode) -> None:
            storage = RaftStorage(
                disk=process.disk(),
                store=process.store(),
                work=process.work,
                clock=process.clock,
                cluster_id=CLUSTER,
                node=node,
            )
            await storage.format(directory=b"its first disk..", membership=Membership())

        quorum.world.run(machine.boot(), format_it)
        machine.kill()
        quorum.start(node)

        async def add(controller: ControllerNode) -> None:
            await controller.driver.change_membership(add=Member(node, b"its first disk.."))

        quorum.on(active, add)
        quorum.kill(node)
        machine.disk().wipe()
        machine.store().wipe()
        quorum.start(node)
        driver = quorum.controller(node).driver
        quorum.world.run_until(lambda: driver.core.leader == active, timeout=20)
        assert quorum.on(node, _reported_leader) == active

        async def remove(controller: ControllerNode) -> None:
            await controller.driver.change_membership(remove=node)

        quorum.on(active, remove)
        quorum.world.run_for(2.0)
        assert driver.core.leader == active, "it still believes in a leader, which does not talk to it any more"
        assert quorum.on(node, _reported_leader) is None
        assert all(quorum.on(member, _reported_leader) == active for member in CONTROLLERS), "members do hear one"


async def _reported_leader(controller: ControllerNode) -> NodeId | None:
    return controller.driver._tails._state().leader


def test_a_broker_that_cannot_read_how_it_stopped_counts_as_one_that_did_not_stop_cleanly() -> None:
    with Quorum(170) as quorum:
        quorum.start()
        quorum.start_brokers(11)
        agent = quorum.brokers[NodeId(11)].agent

        async def stop(process: SimNode) -> int:
            epoch = await agent.shut_down()
            await store_clean_stop(process.store(), epoch)
            return epoch

        epoch = quorum.world.run(quorum.brokers[NodeId(11)].node, stop)
        quorum.kill(NodeId(11))
        quorum.start_brokers(11)
        assert quorum.brokers[NodeId(11)].agent.registration.clean_stop_epoch == epoch
        quorum.kill(NodeId(11))
        quorum.world.machine("b11").store().flip_bit(CLEAN_STOP_KEY, 4)
        quorum.start_brokers(11)
        assert quorum.brokers[NodeId(11)].agent.registration.clean_stop_epoch == -1


@pytest.mark.parametrize("free_bytes", [0, 100, 300, 600])
@pytest.mark.parametrize("has_room", [True, False])
def test_a_tail_on_a_full_disk_goes_on_in_memory_and_its_copy_is_whole_with_room(
    free_bytes: int, has_room: bool
) -> None:
    with Quorum(171) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        machine = quorum.world.machine("spare")
        last = Offset(0)

        def is_served(image: ClusterImage) -> bool:
            return len(image.live_brokers()) == 3

        async def follow(process: SimNode) -> None:
            nonlocal last
            _, tail = _twin(quorum, 21, process)
            await tail.open()
            machine.disk().fill(free_bytes)
            process.spawn(tail.run())
            await tail.until(is_served)
            await asyncio.sleep(5)
            if has_room:
                machine.disk().heal()
                await asyncio.sleep(10)
            last = tail.offset

        quorum.world.run(machine.boot(), follow, timeout=60)
        machine.kill()
        machine.disk().heal()
        process = machine.boot()
        _, tail = _twin(quorum, 21, process)

        async def follow_again(_: SimNode) -> None:
            await tail.open()
            assert (tail.offset == last) == has_room, "the copy is whole, or ends before what found no room"
            process.spawn(tail.run())
            await tail.until(is_served)

        quorum.world.run(process, follow_again, timeout=20)


def test_an_entry_that_cannot_be_read_is_not_kept_for_the_next_life() -> None:
    with Quorum(172) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        broker = quorum.brokers[NodeId(11)]

        async def spoil(_: SimNode) -> None:
            offset = broker.tail.offset
            with pytest.raises(TidelogError):
                broker.tail.apply(offset, [Entry(broker.tail.epoch, EntryKind.DATA, b"\xc1 is no msgpack")])
            assert broker.tail.offset == offset

        quorum.world.run(broker.node, spoil)
        quorum.kill(NodeId(11))
        quorum.start_brokers(11)
        quorum.create("t")
        until_equal(quorum)
