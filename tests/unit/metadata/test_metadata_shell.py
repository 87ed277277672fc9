"""Controllers as processes: who answers, what survives whom, who is fenced and when."""

import asyncio
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from support.metadata.quorum import ADMIN, CLUSTER, CONTROLLERS, Quorum

from tidelog.metadata.broker_lifecycle import BrokerLifecycle, store_clean_stop
from tidelog.metadata.brokers import Fence, Heartbeat, Register
from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.controller_node import LOCAL_METHOD, METHOD, ControllerConfig
from tidelog.metadata.delta import ImageDelta
from tidelog.metadata.features import supported
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.partitions import AlteredPartition, AlterPartition
from tidelog.metadata.queries import DescribeTopics
from tidelog.metadata.requests import decode_reply, encode_request
from tidelog.metadata.topics import CreateTopics, NewTopic
from tidelog.model.errors import ErrorCode, RemoteError, UnknownOutcomeError
from tidelog.model.ids import NodeId
from tidelog.raft.driver import DriverConfig

pytestmark = pytest.mark.sim


def call(quorum: Quorum, node: NodeId, request: object, method: str = METHOD) -> Any:
    async def job(_: Any) -> Any:
        answer = await quorum.admin_transport.call(node, method, encode_request(request), timeout_ms=2000)
        return decode_reply(answer)

    return quorum.world.run(quorum.admin, job)


@pytest.mark.requirement("a:B-61", "a:B-50", "b:E-01")
def test_a_standby_answers_with_who_leads_and_the_one_that_leads_with_the_change() -> None:
    with Quorum(1) as quorum:
        quorum.start()
        active = quorum.active()
        quorum.start_brokers(11, 12, 13)
        standby = next(node for node in CONTROLLERS if node != active)
        request = CreateTopics(topics=(NewTopic(name="t", partitions=2, replication_factor=3),))
        with pytest.raises(RemoteError) as rejection:
            call(quorum, standby, request)
        assert rejection.value.code is ErrorCode.NOT_CONTROLLER
        assert rejection.value.facts["leader"] == active
        (made,) = call(quorum, active, request).topics
        assert made.error is None
        assert quorum.controller(active).image.topic_named("t") is not None


@pytest.mark.requirement("a:B-60")
def test_the_committed_state_is_a_replay_of_the_log_on_every_controller() -> None:
    with Quorum(2) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        for number in range(5):
            quorum.create(f"t{number}", partitions=3)
        end = quorum.controller(quorum.active()).machine.offset
        quorum.world.run_until(
            lambda: all(quorum.controller(node).machine.offset >= end for node in CONTROLLERS), timeout=5
        )
        for node in CONTROLLERS:
            assert quorum.controller(node).image == quorum.replayed(node)
            assert len(quorum.controller(node).image.topics) == 5


@pytest.mark.requirement("a:B-62", "b:D-27")
def test_a_standby_takes_over_with_everything_and_without_a_reload() -> None:
    with Quorum(3) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        made = quorum.create("kept")
        former = quorum.active()
        quorum.kill(former)
        now_s = quorum.now_s()
        active = quorum.active()
        assert active != former
        assert quorum.now_s() - now_s < 1.0, "a broken stream ends leader contact at once"
        assert quorum.controller(active).image.topic_ids["kept"] == made.topic_id
        assert quorum.create("more").error is None
        assert all(quorum.controller(active).image.brokers[b].is_live for b in (11, 12, 13))


def test_a_question_is_linearizable_at_the_active_one_and_local_anywhere() -> None:
    with Quorum(4) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        quorum.create("seen")
        (found,) = quorum.ask(DescribeTopics(names=("seen",)), is_repeatable=True).topics
        assert found.topic is not None
        standby = next(node for node in CONTROLLERS if node != quorum.active())
        with pytest.raises(RemoteError, match="leads"):
            call(quorum, standby, DescribeTopics())
        quorum.world.run_until(lambda: quorum.controller(standby).image.topic_named("seen") is not None, timeout=5)
        (local,) = call(quorum, standby, DescribeTopics(names=("seen",)), LOCAL_METHOD).topics
        assert local.topic is not None
        with pytest.raises(RemoteError, match="for the active controller"):
            call(quorum, standby, CreateTopics(topics=()), LOCAL_METHOD)


@pytest.mark.requirement("a:B-52")
def test_an_isolated_controller_answers_neither_changes_nor_questions() -> None:
    with Quorum(5) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        former = quorum.active()
        others = [node for node in CONTROLLERS if node != former]
        for other in others:
            quorum.network.block(former, other)
            quorum.network.block(other, former)

        async def change(controller: Any) -> None:
            with pytest.raises(UnknownOutcomeError):
                await controller.submit(CreateTopics(topics=(NewTopic(name="ghost", replication_factor=1),)))

        quorum.on(former, change)
        assert quorum.controller(former).image.topic_named("ghost") is None
        with pytest.raises(RemoteError, match="does not lead"):
            call(quorum, former, DescribeTopics())
        quorum.active(among=others)
        quorum.create("real")
        quorum.network.heal()
        quorum.world.run_until(lambda: quorum.controller(former).image.topic_named("real") is not None, timeout=20)
        assert quorum.controller(former).image.topic_named("ghost") is None


def test_a_broker_speaks_for_itself_only_and_fencing_is_not_on_request() -> None:
    with Quorum(6) as quorum:
        quorum.start()
        active = quorum.active()
        register = Register(
            cluster_id=CLUSTER,
            broker=11,
            incarnation=UUID(int=5),
            endpoints=(("C", "P", "h", 1),),
            features=supported(),
        )
        for request in (
            register,
            Fence(broker=11, broker_epoch=1),
            Heartbeat(broker=11, broker_epoch=1, metadata_offset=0),
        ):
            with pytest.raises(RemoteError) as rejection:
                call(quorum, active, request)
            assert rejection.value.code is ErrorCode.INVALID_REQUEST
        assert not quorum.controller(active).image.brokers
        assert ADMIN not in quorum.controller(active).image.brokers


@pytest.mark.requirement("b:E-02")
def test_a_killed_broker_is_fenced_at_once_and_its_leaderships_move() -> None:
    with Quorum(7) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13, 14, 15)
        made = quorum.create("t", partitions=10)
        controller = quorum.controller(quorum.active())
        quorum.world.run_for(1.5)
        quorum.kill(NodeId(12))
        began_s = quorum.now_s()
        quorum.world.run_until(lambda: controller.image.brokers[12].fenced, timeout=5)
        assert quorum.now_s() - began_s < 0.5, "refused: not after the session timeout"
        topic = controller.image.topics[made.topic_id]
        assert all(12 not in p.isr and p.leader not in (12, -1) for p in topic.partitions.values())


@pytest.mark.requirement("b:E-21")
def test_a_silent_broker_is_fenced_after_its_session() -> None:
    with Quorum(8) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        controller = quorum.controller(quorum.active())
        quorum.world.run_for(1.0)
        began_s = quorum.now_s()
        quorum.world.machine("b12").pause()
        quorum.world.run_until(lambda: controller.image.brokers[12].fenced, timeout=10)
        assert 2.0 < quorum.now_s() - began_s < 4.5
        quorum.world.machine("b12").resume()
        quorum.world.run_until(lambda: not controller.image.brokers[12].fenced, timeout=10)


def test_a_stream_that_breaks_while_the_broker_lives_fences_nobody() -> None:
    with Quorum(9) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        active = quorum.active()
        controller = quorum.controller(active)
        quorum.world.run_for(1.0)
        epoch = controller.image.brokers[12].broker_epoch
        for _ in range(5):
            quorum.network.cut_streams(active, NodeId(12))
            quorum.world.run_for(0.4)
            assert not controller.image.brokers[12].fenced
        assert controller.image.brokers[12].broker_epoch == epoch


def test_most_brokers_breaking_at_once_is_not_taken_for_their_death() -> None:
    with Quorum(10) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13, 14, 15)
        controller = quorum.controller(quorum.active())
        quorum.world.run_for(1.0)
        for broker in (11, 12, 13):
            quorum.kill(NodeId(broker))
        quorum.world.run_for(1.5)
        fenced = [broker for broker in (12, 13) if controller.image.brokers[broker].fenced]
        assert not fenced, "timeouts only"
        quorum.world.run_until(
            lambda: all(controller.image.brokers[broker].fenced for broker in (11, 12, 13)), timeout=5
        )


def test_a_new_active_controller_fences_who_died_with_the_old_one() -> None:
    with Quorum(11) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        former = quorum.active()
        quorum.kill(NodeId(12))
        quorum.kill(former)
        began_s = quorum.now_s()
        controller = quorum.controller(quorum.active())
        quorum.world.run_until(lambda: controller.image.brokers[12].fenced, timeout=10)
        assert quorum.now_s() - began_s < 2.0
        assert not controller.image.brokers[11].fenced


def test_a_crashed_task_of_the_active_controller_stops_the_node_and_another_one_fences() -> None:
    with Quorum(21) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        former = quorum.active()
        bug = ZeroDivisionError("a bug in the sessions")

        def crash(_now_ms: int) -> None:
            raise bug

        sessions = quorum.controller(former)._sessions
        assert sessions is not None
        sessions.tick = crash  # type: ignore[assignment, method-assign]
        quorum.world.run_until(lambda: bool(quorum.failures), timeout=5)
        assert quorum.failures == [bug]
        assert not quorum.controller(former).is_active
        quorum.kill(NodeId(12))
        others = [node for node in CONTROLLERS if node != former]
        controller = quorum.controller(quorum.active(among=others))
        quorum.world.run_until(lambda: controller.image.brokers[12].fenced, timeout=10)


@pytest.mark.requirement("a:B-35")
def test_controlled_shutdown_moves_leaderships_first_and_a_restart_says_that_it_was_clean() -> None:
    with Quorum(12) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        made = quorum.create("t", partitions=6)
        broker = quorum.brokers[NodeId(12)]

        async def stop(process: Any) -> int:
            epoch = await broker.agent.shut_down()
            await store_clean_stop(process.store(), epoch)
            return epoch

        epoch = quorum.world.run(broker.node, stop)
        broker.agent.broker_epoch = None  # a heartbeat was rejected meanwhile: it registers again
        assert quorum.world.run(broker.node, stop) == epoch
        image = quorum.controller(quorum.active()).image
        assert all(p.leader not in (12, -1) for p in image.topics[made.topic_id].partitions.values())
        quorum.kill(NodeId(12))
        quorum.start_brokers(12)
        assert quorum.brokers[NodeId(12)].agent.registration.clean_stop_epoch == epoch
        assert quorum.brokers[NodeId(12)].agent.broker_epoch != epoch


def test_another_process_at_a_live_brokers_address_ends_its_session_at_once_and_has_a_higher_epoch() -> None:
    with Quorum(13) as quorum:
        quorum.start()
        quorum.start_brokers(11)
        quorum.world.machine("b11").pause()
        first = quorum.brokers[NodeId(11)].agent.broker_epoch
        process = quorum.world.machine("twin").boot()

        async def boot(node: Any) -> None:
            await quorum._boot_broker(11, {}, node)

        began_s = quorum.now_s()
        quorum.world.run(process, boot)
        quorum.until_live(11)
        assert quorum.now_s() - began_s < 1.5
        assert first is not None
        assert (quorum.brokers[NodeId(11)].agent.broker_epoch or 0) > first


def test_snapshots_are_taken_and_a_controller_that_was_away_loads_one() -> None:
    config = ControllerConfig(driver=DriverConfig(snapshot_bytes=3_000))
    with Quorum(14, config) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        away = next(node for node in CONTROLLERS if node != quorum.active())
        quorum.kill(away)
        for number in range(30):
            quorum.create(f"t{number}", partitions=4)
        assert quorum.controller(quorum.active()).driver.core.log.snapshot.offset > 0
        quorum.start(away)
        quorum.world.run_until(
            lambda: quorum.controller(away).image == quorum.controller(quorum.active()).image, timeout=20
        )
        assert len(quorum.controller(away).image.topics) == 30


def test_a_decision_larger_than_an_entry_is_one_change() -> None:
    with Quorum(15, ControllerConfig(decision_bytes_max=400)) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        seen: set[int] = set()

        def handed(_delta: ImageDelta, _older: ClusterImage, newer: ClusterImage) -> None:
            seen.update(len(topic.partitions) for topic in newer.topics.values())

        quorum.brokers[NodeId(11)].tail.subscribe(handed)
        quorum.create("large", partitions=40)
        tail = quorum.brokers[NodeId(11)].tail
        quorum.world.run_until(lambda: tail.image.topic_named("large") is not None, timeout=5)
        assert seen == {40}, "all of it at once"
        active = quorum.active()
        assert quorum.controller(active).image == quorum.replayed(active)


def test_the_log_moves_while_brokers_live_and_nothing_happens() -> None:
    with Quorum(16) as quorum:
        quorum.start()
        quorum.start_brokers(11)
        quorum.world.run_for(3.0)
        machine = quorum.controller(quorum.active()).machine
        before = machine.offset
        quorum.world.run_for(10.0)
        assert 5 <= machine.offset - before <= 25


def test_the_session_timeout_is_the_clusters_and_takes_effect_without_a_restart() -> None:
    with Quorum(17) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        change = ConfigChange(key="broker.session.timeout.ms", operation="set", value="9000")
        (outcome,) = quorum.ask(
            AlterConfigs(resources=(ResourceChange(resource_type="cluster", changes=(change,)),))
        ).items
        assert outcome.error is None, outcome.message
        controller = quorum.controller(quorum.active())
        quorum.world.run_for(1.0)
        quorum.world.machine("b12").pause()
        quorum.world.run_for(6.0)
        assert not controller.image.brokers[12].fenced
        quorum.world.run_until(lambda: controller.image.brokers[12].fenced, timeout=6)


def test_a_controller_that_stops_in_order_hands_over() -> None:
    with Quorum(18) as quorum:
        quorum.start()
        former = quorum.active()

        async def close(controller: Any) -> None:
            await controller.close(step_down_ms=3000)
            await asyncio.sleep(0)

        quorum.on(former, close)
        quorum.kill(former)
        assert quorum.active() != former
        assert not quorum.failures


def test_one_controller_alone_is_a_quorum_and_comes_back_with_everything() -> None:
    only = CONTROLLERS[0]
    with Quorum(19, founders=(only,)) as quorum:
        quorum.start(only)
        quorum.start_brokers(11)
        quorum.create("t", replication_factor=1)
        quorum.kill(only)
        quorum.start(only)
        assert quorum.active() == only
        quorum.create("u", replication_factor=1)
        assert sorted(quorum.controller(only).image.topic_ids) == ["t", "u"]
        assert quorum.controller(only).image == quorum.replayed(only)


async def _ask(agent: BrokerLifecycle, request: object, _node: object) -> Any:
    return await agent.ask(request)


def _rejoin(quorum: Quorum, topic: str) -> None:
    """The leaders take broker 11 back into every in-sync set, as replication would."""
    image = quorum.controller(quorum.active()).image
    topic_id = image.topic_ids[topic]
    for leader in (12, 13):
        agent = quorum.brokers[NodeId(leader)].agent
        assert agent.broker_epoch is not None
        mine = {number: p for number, p in image.topics[topic_id].partitions.items() if p.leader == leader}
        items = tuple(
            AlteredPartition(
                topic_id=topic_id,
                partition=number,
                leader_epoch=partition.leader_epoch,
                partition_epoch=partition.partition_epoch,
                isr=tuple((member, image.brokers[member].broker_epoch) for member in partition.replicas),
            )
            for number, partition in sorted(mine.items())
        )
        request = AlterPartition(broker=leader, broker_epoch=agent.broker_epoch, partitions=items)
        reply = quorum.world.run(quorum.brokers[NodeId(leader)].node, partial(_ask, agent, request))
        assert [state.error for state in reply.partitions] == [None] * len(items)


def _set_cluster(quorum: Quorum, key: str, value: str) -> None:
    change = ConfigChange(key=key, operation="set", value=value)
    quorum.ask(AlterConfigs(resources=(ResourceChange(resource_type="cluster", changes=(change,)),)))


@pytest.mark.requirement("a:A-28", "a:A-29", "a:B-14")
def test_the_controller_gives_leaderships_back_at_intervals_if_it_is_allowed_to() -> None:
    with Quorum(21) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        quorum.create("t", partitions=9)
        active = quorum.active()

        def led() -> int:
            image = quorum.controller(active).image
            return sum(1 for _, _, partition in image.partitions_on(11) if partition.leader == 11)

        assert led() == 3
        quorum.kill(NodeId(11))
        quorum.world.run_until(lambda: led() == 0, timeout=10)
        _set_cluster(quorum, "auto.leader.rebalance.enable", "false")
        _set_cluster(quorum, "leader.imbalance.check.interval.seconds", "20")
        quorum.start_brokers(11)
        _rejoin(quorum, "t")
        quorum.world.run_for(45)
        assert led() == 0, "switched off"
        _set_cluster(quorum, "leader.imbalance.check.interval.seconds", "300")
        _set_cluster(quorum, "auto.leader.rebalance.enable", "true")
        quorum.world.run_for(45)
        assert led() == 0, "five minutes have not passed"
        _set_cluster(quorum, "leader.imbalance.check.interval.seconds", "5")
        quorum.world.run_until(lambda: led() == 3, timeout=6)
