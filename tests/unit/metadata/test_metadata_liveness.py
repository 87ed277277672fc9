"""What must go on whatever stands still: dead brokers are fenced, frozen controllers are left, our errors end us."""

import asyncio
from collections.abc import Callable
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import msgpack
import pytest
from support.async_tests import asyncio_test
from support.metadata.quorum import CONTROLLERS, Quorum

from tidelog.metadata.broker_lifecycle import _decode_beat
from tidelog.metadata.broker_sessions import BrokerSessions, ProbeResult
from tidelog.metadata.brokers import HeartbeatReply
from tidelog.metadata.controller_client import ControllerClient, ControllerClientConfig
from tidelog.metadata.controller_node import HEARTBEATS, ControllerConfig, ControllerNode, encode_beat
from tidelog.metadata.features import METADATA_VERSION, UPGRADE, FeatureChange, UpdateFeatures
from tidelog.metadata.image import Broker
from tidelog.metadata.topics import CreateTopics, NewTopic
from tidelog.model.errors import (
    CallTimeoutError,
    CorruptStateError,
    ErrorCode,
    InvalidRequestError,
    NotLeaderError,
    OverloadedError,
    RaftStoppedError,
    RemoteError,
    TidelogError,
    UnknownOutcomeError,
    UnreachableError,
)
from tidelog.model.ids import NodeId
from tidelog.world.transport import Stream, Transport, decode_error, encode_error


def stall(quorum: Quorum, *nodes: NodeId) -> None:
    for node in nodes:
        quorum.world.machine(f"n{node}").disk().begin_stall()
        quorum.world.machine(f"n{node}").store().begin_stall()


def heal(quorum: Quorum, *nodes: NodeId) -> None:
    for node in nodes:
        quorum.world.machine(f"n{node}").disk().heal()
        quorum.world.machine(f"n{node}").store().heal()


# Sessions.


@pytest.mark.sim
def test_a_broker_that_is_let_in_after_its_session_ended_is_fenced_all_the_same() -> None:
    with Quorum(8) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        active = quorum.active()
        others = [node for node in CONTROLLERS if node != active]
        controller = quorum.controller(active)
        quorum.start_brokers(14, wait=False)
        quorum.world.run_until(lambda: 14 in controller.image.brokers, timeout=5)
        stall(quorum, *others)

        def is_let_in() -> bool:
            found = controller.machine.runtime._speculative.brokers.get(14)
            return found is not None and not found.fenced

        quorum.world.run_until(is_let_in, timeout=5)
        assert controller.image.brokers[14].fenced, "decided, and not committed"
        quorum.kill(NodeId(14))
        quorum.world.run_for(4.0)
        assert controller.is_active
        assert controller.image.brokers[14].fenced
        heal(quorum, *others)
        quorum.world.run_until(lambda: not controller.image.brokers[14].fenced, timeout=5)
        quorum.world.run_until(lambda: controller.image.brokers[14].fenced, timeout=6)
        assert all(controller.image.brokers[broker].is_live for broker in (11, 12, 13))


@pytest.mark.sim
def test_a_stream_that_breaks_is_noticed_while_the_reply_to_its_heartbeat_waits_for_the_commit() -> None:
    with Quorum(9) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        active = quorum.active()
        others = [node for node in CONTROLLERS if node != active]
        controller = quorum.controller(active)
        ended: list[int] = []
        reported = controller.stream_ended

        def note(broker: Broker) -> None:
            ended.append(broker.broker)
            reported(broker)

        controller.stream_ended = note  # type: ignore[method-assign]
        stall(quorum, *others)
        quorum.on(active, lambda node: _begin_change(node))
        quorum.world.run_for(1.0)  # every broker's newest heartbeat waits behind the change
        quorum.kill(NodeId(11))
        quorum.world.run_until(lambda: ended == [11], timeout=1.0)
        assert controller.is_active
        heal(quorum, *others)
        quorum.world.run_until(lambda: controller.image.brokers[11].fenced, timeout=5)


async def _begin_change(node: Any) -> None:
    topic = NewTopic(name="t", partitions=1, replication_factor=3)
    node._spawn(_outcome_of(node.submit(CreateTopics(topics=(topic,)))))


async def _outcome_of(change: Any) -> None:
    try:
        await change
    except TidelogError:
        return


def test_who_is_expected_has_a_full_session_once() -> None:
    sessions = BrokerSessions(0)
    assert sessions.expect(0, 1, 7)
    assert not sessions.expect(100, 1, 7)
    assert not sessions.expect(100, 1, 6), "a former life"
    for now_ms in range(100, 3000, 100):
        assert sessions.tick(now_ms) == ()
    (entry,) = sessions.tick(3000)
    assert (entry.broker, entry.broker_epoch) == (1, 7)
    assert sessions.expect(3100, 1, 7), "until somebody has fenced it"


# Probes.


class ProbeTransport:
    """What a probe needs; notes the addresses that it calls."""

    def __init__(self, end: Callable[[], bytes]) -> None:
        self.addresses: dict[NodeId, str] = {}
        self.end = end

    me = NodeId(99)

    async def call_at(self, node: NodeId, address: str, method: str, request: bytes, *, timeout_ms: int) -> bytes:
        self.addresses[node] = address
        return self.end()


def probed(quorum: Quorum, broker: Broker, end: Callable[[], bytes]) -> tuple[dict[NodeId, str], list[ProbeResult]]:
    active = quorum.active()
    controller = quorum.controller(active)
    transport, answers = ProbeTransport(end), []

    async def probe(node: Any) -> None:
        sessions, kept = node._sessions, node._transport
        original = sessions.probed
        sessions.probed = lambda _now, _broker, _epoch, answer: answers.append(answer)
        node._transport = transport
        try:
            await node._probe(broker)
        finally:
            node._transport, sessions.probed = kept, original

    quorum.on(active, probe)
    assert controller.is_active
    return transport.addresses, answers


def broker_at(number: int, host: str) -> Broker:
    return Broker(number, 3, UUID(int=9), (("CLIENT", "PLAINTEXT", host, 9092),), None, (), ())


@pytest.mark.sim
def test_a_probe_goes_to_the_address_that_a_broker_has_registered_also_if_it_votes() -> None:
    with Quorum(10) as quorum:
        quorum.start()
        same = UUID(int=9).bytes
        assert probed(quorum, broker_at(11, "host"), lambda: same) == (
            {NodeId(11): "host:9092"},
            [ProbeResult.SAME_INCARNATION],
        )
        assert probed(quorum, broker_at(11, "fd00::7"), lambda: same)[0] == {NodeId(11): "[fd00::7]:9092"}
        for node in CONTROLLERS:
            assert probed(quorum, broker_at(int(node), "elsewhere"), lambda: same)[0] == {node: "elsewhere:9092"}


@pytest.mark.sim
def test_only_a_refused_connection_is_taken_for_a_death() -> None:
    def failing(error: TidelogError) -> Callable[[], bytes]:
        def end() -> bytes:
            raise error

        return end

    with Quorum(10) as quorum:
        quorum.start()
        broker = broker_at(11, "host")
        for error, expected in (
            (UnreachableError("refused", node=11, is_refused=True), ProbeResult.REFUSED),
            (UnreachableError("no address", node=11), ProbeResult.SILENT),
            (CallTimeoutError("nothing", node=11), ProbeResult.SILENT),
            (RemoteError("not served", code=ErrorCode.INVALID_REQUEST), ProbeResult.SILENT),
        ):
            assert probed(quorum, broker, failing(error))[1] == [expected], error
        assert probed(quorum, broker, lambda: b"another")[1] == [ProbeResult.OTHER_INCARNATION]


# Controllers that fall silent.


@asyncio_test
async def test_a_controller_that_fell_silent_is_not_asked_while_others_are_known() -> None:
    client = ControllerClient(None, lambda: CONTROLLERS, ControllerClientConfig(avoid_ms=60_000), Random(1))  # type: ignore[arg-type]
    silent = CONTROLLERS[0]
    client.found(silent)
    client.fell_silent(silent)
    assert {client.target() for _ in range(100)} == set(CONTROLLERS[1:])
    client.hint(decode_error(encode_error(NotLeaderError("it leads", leader=silent))))
    assert client.target() == silent, "somebody hears of it: it may only be slow to commit"
    alone = ControllerClient(None, lambda: CONTROLLERS[:1], ControllerClientConfig(), Random(1))  # type: ignore[arg-type]
    alone.fell_silent(silent)
    assert alone.target() == silent, "there is no other"
    soon = ControllerClient(None, lambda: CONTROLLERS, ControllerClientConfig(avoid_ms=0), Random(1))  # type: ignore[arg-type]
    soon.fell_silent(silent)
    assert silent in {soon.target() for _ in range(100)}


@pytest.mark.parametrize("is_repeatable", [True, False])
@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize(
    ("error", "is_repeated"),
    [
        (NotLeaderError("it leads no more"), "always"),
        (RaftStoppedError("it stops"), "always"),
        (OverloadedError("10000 requests are pending"), "always"),
        (UnknownOutcomeError("it may be done"), "if repeatable"),
        (InvalidRequestError("no"), "never"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, TidelogError) else "",
)
def test_the_own_controller_is_retried_as_another_one(
    error: TidelogError, is_repeated: str, is_own: bool, is_repeatable: bool
) -> None:
    config = ControllerClientConfig(retry_min_ms=1, retry_max_ms=1)
    client = ControllerClient(cast("Transport", SimpleNamespace(me=NodeId(9))), lambda: CONTROLLERS, config, Random(1))
    own = cast("ControllerNode", SimpleNamespace(is_active=True)) if is_own else None
    answers = [error if is_own else decode_error(encode_error(error))] * 2

    def answer() -> str:
        if answers:
            raise answers.pop()
        return "done"

    async def run(_controller: ControllerNode) -> str:
        return answer()

    async def send(_target: NodeId, _timeout_ms: int) -> str:
        return answer()

    async def main() -> str:
        return await client.retry(send, is_repeatable=is_repeatable, timeout_ms=5_000, own=own, run=run)

    if is_repeated == "always" or (is_repeated == "if repeatable" and is_repeatable):
        assert asyncio.run(main()) == "done"
    else:
        with pytest.raises(TidelogError) as failure:
            asyncio.run(main())
        assert failure.value.code is error.code


@pytest.mark.sim
@pytest.mark.case("R17")
def test_a_connection_that_is_never_answered_is_given_up_after_the_silence_that_is_allowed() -> None:
    with Quorum(12) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        active = quorum.active()
        agent = quorum.brokers[NodeId(11)].agent
        opened: list[tuple[float, NodeId]] = []
        open_stream = agent._transport.open_stream

        async def frozen_open(node: NodeId, service: str) -> Stream:
            if service == HEARTBEATS:
                opened.append((quorum.now_s(), node))
                if node == active:
                    await asyncio.sleep(3600)  # its socket takes the connection, the process does not run
            return await open_stream(node, service)

        agent._transport.open_stream = frozen_open  # type: ignore[method-assign]
        quorum.world.machine(f"n{active}").pause()
        other = quorum.active(among=[node for node in CONTROLLERS if node != active])
        quorum.world.run_until(lambda: agent.client.leader == other and opened[-1][1] == other, timeout=12)
        to_frozen = [at for at, node in opened if node == active]
        assert all(later - at >= 2.0 for at, later in pairwise(to_frozen))
        quorum.world.run_for(5.0)
        assert not agent.is_fenced
        quorum.world.machine(f"n{active}").resume()


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", bytes(msgpack.packb(7)), bytes(msgpack.packb([0, 1, b"rubbish"])), bytes(msgpack.packb([0, 1, 5]))],
)
def test_a_reply_to_a_heartbeat_that_means_nothing_is_known_as_such(data: bytes) -> None:
    with pytest.raises(CorruptStateError):
        _decode_beat(data)


def test_a_reply_to_a_heartbeat_is_read_and_its_refusal_is_raised() -> None:
    reply = HeartbeatReply(is_fenced=False, may_shut_down=False, is_caught_up=True)
    assert _decode_beat(encode_beat(reply)) == reply
    with pytest.raises(RemoteError) as rejection:
        _decode_beat(encode_beat(NotLeaderError("node 2 leads", leader=2)))
    assert rejection.value.facts["leader"] == 2


class Rubbish:
    """A stream whose frames arrive as something else."""

    def __init__(self, stream: Stream, spoilt: list[NodeId]) -> None:
        self._stream = stream
        self._spoilt = spoilt
        self.peer = stream.peer
        self.send, self.close = stream.send, stream.close

    async def receive(self) -> bytes:
        await self._stream.receive()
        self._spoilt.append(self.peer)
        return b"\xc1"


@pytest.mark.sim
def test_a_broker_leaves_a_controller_whose_replies_it_cannot_read_and_goes_on() -> None:
    with Quorum(13) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        quorum.start_brokers(14, wait=False)
        broker = quorum.brokers[NodeId(14)]
        assert broker.agent.broker_epoch is None, "it has no stream yet"
        spoilt: list[NodeId] = []
        open_stream = broker.agent._transport.open_stream

        async def opened(node: NodeId, service: str) -> Stream:
            stream = await open_stream(node, service)
            return Rubbish(stream, spoilt) if service == HEARTBEATS and len(spoilt) < 2 else stream

        broker.agent._transport.open_stream = opened  # type: ignore[method-assign]
        quorum.world.run_until(lambda: len(spoilt) == 2, timeout=20)
        quorum.until_live(14)
        quorum.world.run_for(6.0)
        assert broker.main is not None
        assert not broker.main.done(), "the agent goes on"
        assert not broker.agent.is_fenced


# Our own errors, and room for what the controller does by itself.


@pytest.mark.sim
def test_an_error_of_ours_between_decision_and_commit_ends_the_controller() -> None:
    with Quorum(14) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        active = quorum.active()
        controller = quorum.controller(active)

        def broken(records: Any) -> list[bytes]:
            raise RuntimeError("cannot encode")

        controller.machine.decider.encode = broken  # type: ignore[method-assign]
        ends: list[str] = []

        async def ask(node: Any) -> None:
            try:
                await node.submit(CreateTopics(topics=(NewTopic(name="t", partitions=1, replication_factor=1),)))
            except TidelogError as error:
                ends.append(type(error).__name__)

        quorum.on(active, ask, timeout=5)
        assert ends
        quorum.world.run_until(lambda: controller.driver.failed is not None, timeout=1)
        assert "cannot encode" in str(controller.driver.failed)
        assert not controller.is_active
        assert [str(failure) for failure in quorum.failures] == ["cannot encode"]
        quorum.active(among=[node for node in CONTROLLERS if node != active])


@pytest.mark.sim
def test_a_flooded_controller_still_fences_who_dies() -> None:
    with Quorum(15, ControllerConfig(waiting_max=20)) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        active = quorum.active()
        process, controller = quorum.controllers[active]
        others = [node for node in CONTROLLERS if node != active]
        stall(quorum, *others)
        codes: list[ErrorCode] = []

        async def ask(number: int) -> None:
            try:
                topic = NewTopic(name=f"t{number}", partitions=1, replication_factor=1)
                await controller.submit(CreateTopics(topics=(topic,)))
            except TidelogError as error:
                codes.append(error.code)

        for number in range(40):
            process.spawn(ask(number))
        quorum.world.run_for(0.1)
        assert codes.count(ErrorCode.THROTTLING_QUOTA_EXCEEDED) >= 20, "there is no more room for others"
        quorum.kill(NodeId(11))
        quorum.world.run_until(lambda: controller.machine.runtime._speculative.brokers[11].fenced, timeout=1)
        heal(quorum, *others)
        quorum.world.run_until(lambda: controller.image.brokers[11].fenced, timeout=5)


# Feature levels.


def upgrade(level: int) -> UpdateFeatures:
    return UpdateFeatures(changes=(FeatureChange(name=METADATA_VERSION, level=level, kind=UPGRADE),))


def newer(quorum: Quorum, *nodes: NodeId) -> None:
    """These controllers and all brokers are of a version that also knows level 2."""
    for node in nodes:
        decider = quorum.controller(node).machine.decider
        decider._controller.features[METADATA_VERSION] = (1, 2)
        decider.own_levels = decider._controller.levels()


@pytest.mark.sim
def test_a_level_is_raised_only_when_every_controller_says_that_it_can_read_it() -> None:
    with Quorum(16) as quorum:
        quorum.start()
        quorum.start_brokers(11, features=((METADATA_VERSION, 1, 2),))
        active = quorum.active()
        older, other = [node for node in CONTROLLERS if node != active]
        newer(quorum, active, other)
        (outcome,) = quorum.ask(upgrade(2)).items
        assert outcome.error is ErrorCode.FEATURE_UPDATE_FAILED
        assert f"controller {older} supports 1 to 1" in outcome.message
        quorum.kill(older)
        with pytest.raises(RemoteError, match=f"controller {older} does not report") as rejection:
            quorum.ask(upgrade(2))
        assert rejection.value.code is ErrorCode.FEATURE_UPDATE_FAILED
        assert quorum.controller(quorum.active()).image.features[METADATA_VERSION] == 1
        quorum.start(older)
        newer(quorum, older)
        (outcome,) = quorum.ask(upgrade(2)).items
        assert outcome.error is None, outcome.message
        assert quorum.controller(quorum.active()).image.features[METADATA_VERSION] == 2
