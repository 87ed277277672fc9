"""The simulated network: what a stream and a call promise, and what a fault does to them."""

import asyncio
from collections.abc import Iterator

import pytest

from tidelog.model.errors import (
    CallTimeoutError,
    ErrorCode,
    NotLeaderError,
    RemoteError,
    StreamBrokenError,
    StreamClosedError,
    UnreachableError,
)
from tidelog.model.ids import NodeId
from tidelog.world.simulated import Latency, SimNode, SimulationError, SimWorld
from tidelog.world.simulated.network import SimNetwork, SimTransport
from tidelog.world.transport import Stream

ONE, TWO = NodeId(1), NodeId(2)


class Pair:
    """Two nodes; the second one keeps what its streams bring."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self.network = SimNetwork(world)
        self.network.silent_death_probability = 0.0
        self.nodes: dict[NodeId, SimNode] = {}
        self.transports: dict[NodeId, SimTransport] = {}
        self.received: list[bytes] = []
        self.ends: list[str] = []
        for node_id in (ONE, TWO):
            self.boot(node_id)

    def boot(self, node_id: NodeId) -> None:
        node = self.nodes[node_id] = self.world.machine(f"n{node_id}").boot()
        transport = self.transports[node_id] = self.network.join(node, node_id)
        transport.serve_stream("keep", self.keep)
        transport.serve("double", self.double)
        transport.serve("refuse", self.refuse)

    async def keep(self, stream: Stream) -> None:
        try:
            while True:
                self.received.append(await stream.receive())
        except (StreamBrokenError, StreamClosedError) as error:
            self.ends.append(type(error).__name__)

    async def double(self, _sender: NodeId, request: bytes) -> bytes:
        return request * 2

    async def refuse(self, _sender: NodeId, _request: bytes) -> bytes:
        raise NotLeaderError("ask the other one", leader=7)

    def open(self, source: NodeId = ONE, target: NodeId = TWO) -> Stream:
        return self.world.run(self.nodes[source], lambda _: self.transports[source].open_stream(target, "keep"))

    def send(self, stream: Stream, *messages: bytes) -> None:
        async def run(_: SimNode) -> None:
            for message in messages:
                await stream.send(message)

        self.world.run(self.nodes[ONE], run)

    def call(self, method: str, request: bytes = b"ab", timeout_ms: int = 1000) -> bytes:
        run = lambda _: self.transports[ONE].call(TWO, method, request, timeout_ms=timeout_ms)  # noqa: E731
        return self.world.run(self.nodes[ONE], run)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with SimWorld(seed=11) as world:
        yield Pair(world)


def messages(count: int) -> list[bytes]:
    return [f"{number}".encode() for number in range(count)]


def test_a_stream_keeps_its_order_whatever_each_message_takes(pair: Pair) -> None:
    pair.network.latency = Latency(0.0, 0.5)
    pair.send(pair.open(), *messages(50))
    pair.world.run_for(2.0)
    assert pair.received == messages(50)


def test_two_streams_have_no_order_between_them(pair: Pair) -> None:
    pair.network.latency = Latency(0.0, 0.5)
    first, second = pair.open(), pair.open()
    for number in range(20):
        pair.send(first, f"a{number}".encode())
        pair.send(second, f"b{number}".encode())
    pair.world.run_for(2.0)
    sent = [f"{name}{number}".encode() for number in range(20) for name in "ab"]
    assert sorted(pair.received) == sorted(sent)
    assert pair.received != sent


def test_a_cut_stream_loses_a_suffix_and_both_ends_hear_of_it(pair: Pair) -> None:
    pair.network.latency = Latency(0.1, 0.2)
    stream = pair.open()
    pair.send(stream, *messages(30))
    pair.network.cut_streams(ONE, TWO)
    pair.world.run_for(1.0)
    assert pair.received == messages(30)[: len(pair.received)]
    assert pair.ends == ["StreamBrokenError"]
    with pytest.raises(StreamBrokenError):
        pair.send(stream, b"more")


def test_a_stream_that_is_closed_delivers_what_was_sent_before(pair: Pair) -> None:
    stream = pair.open()
    pair.send(stream, *messages(5))
    stream.close()
    pair.world.run_for(1.0)
    assert pair.received == messages(5)
    assert pair.ends == ["StreamClosedError"]
    with pytest.raises(StreamBrokenError):
        pair.send(stream, b"more")


def test_a_blocked_link_is_silent_in_one_direction_and_what_waited_comes_late(pair: Pair) -> None:
    pair.network.repeat_probability = 1.0
    there, back = pair.open(), pair.open(TWO, ONE)
    pair.network.block(ONE, TWO)
    pair.send(there, b"late")

    async def answer(_: SimNode) -> None:
        await back.send(b"heard")

    pair.world.run(pair.nodes[TWO], answer)
    pair.world.run_for(1.0)
    assert pair.received == [b"heard"]
    pair.network.unblock(ONE, TWO)
    pair.world.run_for(1.0)
    assert pair.received == [b"heard", b"late"]
    assert pair.ends == []


@pytest.mark.parametrize("is_cut", [False, True])
def test_what_a_block_catches_under_way_keeps_its_place(pair: Pair, is_cut: bool) -> None:
    """Seed 34 (brokers): what was sent into a blocked link came before what had left before the block."""
    pair.network.repeat_probability = 1.0
    pair.network.latency = Latency(0.0, 0.5)
    stream = pair.open()
    for number in range(0, 40, 4):
        some = messages(40)[number : number + 4]
        pair.send(stream, *some[:2])
        pair.network.block(ONE, TWO)
        pair.world.run_for(0.1)
        pair.send(stream, *some[2:])
        pair.world.run_for(0.1)
        if is_cut and number == 20:
            pair.network.cut_streams(ONE, TWO)
            pair.network.unblock(ONE, TWO)
            break
        pair.network.unblock(ONE, TWO)
        pair.world.run_for(0.05)
    pair.world.run_for(3.0)
    assert pair.received == messages(40)[: len(pair.received)]
    assert is_cut or len(pair.received) == 40


def test_a_stream_that_stays_silent_is_given_up_at_both_ends(pair: Pair) -> None:
    stream = pair.open()
    pair.network.block(TWO, ONE)
    pair.world.run_for(10.0)
    assert pair.ends == ["StreamBrokenError"]
    with pytest.raises(StreamBrokenError):
        pair.send(stream, b"more")


def test_a_silenced_stream_does_not_keep_a_new_one_from_working(pair: Pair) -> None:
    old = pair.open()
    pair.network.silence_streams(ONE, TWO)
    pair.send(old, b"lost")
    pair.send(pair.open(), b"heard")
    pair.world.run_for(1.0)
    assert pair.received == [b"heard"]


def test_the_network_knows_of_a_silenced_stream_until_both_ends_have_noticed(pair: Pair) -> None:
    pair.open()
    assert not pair.network.has_silent_streams()
    pair.network.silence_streams(ONE, TWO)
    assert pair.network.has_silent_streams()
    pair.world.run_for(2.9)
    assert pair.network.has_silent_streams(), "keep-alive takes 3 s at least"
    pair.world.run_for(3.2)
    assert not pair.network.has_silent_streams()


def test_a_sender_waits_while_the_window_is_full(pair: Pair) -> None:
    pair.network.window_bytes = 10
    stream = pair.open()
    pair.nodes[TWO].loop.pause()
    sending = pair.nodes[ONE].spawn(stream.send(bytes(10)))
    pair.world.run_for(1.0)
    assert sending.done()
    waiting = pair.nodes[ONE].spawn(stream.send(bytes(1)))
    pair.world.run_for(1.0)
    assert not waiting.done()
    pair.nodes[TWO].loop.resume()
    pair.world.run_for(1.0)
    assert waiting.done()
    assert pair.received == [bytes(10), bytes(1)]


def test_the_streams_of_a_killed_node_break_at_its_peers_and_connections_are_refused(pair: Pair) -> None:
    stream = pair.open()
    pair.world.machine("n2").kill()
    pair.world.run_for(0.5)
    with pytest.raises(StreamBrokenError):
        pair.send(stream, b"more")
    with pytest.raises(UnreachableError):
        pair.open()
    with pytest.raises(UnreachableError):
        pair.call("double")


def test_a_silent_death_is_found_by_keep_alive_or_by_the_next_life(pair: Pair) -> None:
    pair.network.silent_death_probability = 1.0
    stream = pair.open()
    pair.world.machine("n2").kill()
    pair.world.run_for(0.5)
    pair.send(stream, b"into the dark")
    with pytest.raises(CallTimeoutError):
        pair.open()
    pair.boot(TWO)
    pair.world.run_for(0.5)
    with pytest.raises(StreamBrokenError):
        pair.send(stream, b"more")
    assert pair.call("double") == b"abab"


def test_who_breaks_off_while_the_peer_cannot_hear_it_is_heard_of_with_the_next_message(pair: Pair) -> None:
    """Found by a seed: one end gave up by keep-alive, then the link worked again, and the other went on for ever."""
    stream = pair.open()
    (connection,) = pair.network._connections.values()
    connection.ends[1].broke()
    pair.send(stream, b"anybody there?")
    pair.world.run_for(0.5)
    with pytest.raises(StreamBrokenError):
        pair.send(stream, b"more")


def test_a_call_is_answered_lost_or_refused(pair: Pair) -> None:
    assert pair.call("double") == b"abab"
    pair.network.loss = 1.0
    with pytest.raises(CallTimeoutError):
        pair.call("double", timeout_ms=50)
    pair.network.heal()
    with pytest.raises(UnreachableError):
        pair.call("unknown method")


def test_an_error_of_the_catalogue_reaches_the_caller_with_its_facts(pair: Pair) -> None:
    with pytest.raises(RemoteError) as raised:
        pair.call("refuse")
    assert raised.value.code is ErrorCode.NOT_CONTROLLER
    assert raised.value.facts == {"leader": 7}


def test_cancelling_a_receive_breaks_the_stream(pair: Pair) -> None:
    stream = pair.open()
    receiving = pair.nodes[ONE].spawn(stream.receive())
    pair.world.run_for(0.1)
    receiving.cancel()
    pair.world.run_for(0.5)
    assert pair.ends == ["StreamBrokenError"]


def test_closing_a_transport_ends_its_streams_and_handlers(pair: Pair) -> None:
    stream = pair.open()
    pair.world.run(pair.nodes[TWO], lambda _: pair.transports[TWO].close())
    pair.world.run_for(0.5)
    with pytest.raises(StreamBrokenError):
        pair.send(stream, b"more")
    with pytest.raises(UnreachableError):
        pair.open()


def test_an_error_of_our_own_in_a_handler_fails_the_run() -> None:
    async def breaks(_sender: NodeId, _request: bytes) -> bytes:
        raise AssertionError("our own error")

    async def ask(pair: Pair) -> None:
        with pytest.raises(CallTimeoutError):
            await pair.transports[ONE].call(TWO, "break", b"", timeout_ms=100)
        await asyncio.sleep(0)

    with pytest.raises(SimulationError, match="our own error"), SimWorld(seed=12) as world:  # noqa: PT012
        pair = Pair(world)
        pair.transports[TWO].serve("break", breaks)
        world.run(pair.nodes[ONE], lambda _: ask(pair))
