"""The simulated network: calls and streams between nodes, and their faults.

The unit of fault is the stream. Inside of one, messages arrive in order, each once; between two streams, and between
streams and calls, there is no order.

    open    --cut-------------->  broken      a suffix of what is in flight is lost; each end learns of it a bit later
    open    --a link is blocked->  silent     nothing arrives, no end is notified; senders stop at a full window
    silent  --unblocked-------->  open        what waited arrives late (retransmission), or the stream is cut
    silent  --keep-alive------->  broken      each end finds out on its own, after seconds
    open    --a process dies--->  broken      at the peer, after a moment, a suffix lost; or silent, as when power goes
    open    --close------------>  closed      the peer reads what was sent before, then `StreamClosedError`

A link is one direction between two nodes: a one-way partition blocks one of the two. Calls have no connection: request
and response are lost one by one, by a blocked link or by the draw (`loss`). A node that does not run refuses
connections; one whose machine is off (or that died silently) does not respond.

All payloads are `bytes`: nodes encode and decode their messages as on a real network.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from tidelog.model.errors import (
    CallTimeoutError,
    TidelogError,
    UnreachableError,
)
from tidelog.model.ids import NodeId
from tidelog.world.simulated.faults import Latency
from tidelog.world.simulated.loop import SimFuture, SimLoop, SimTask
from tidelog.world.simulated.machine import SimNode, SimWorld
from tidelog.world.simulated.scheduler import NS_PER_SECOND, MachineDied, SimHandle
from tidelog.world.simulated.streams import Connection, SimStream
from tidelog.world.transport import CallHandler, StreamHandler, decode_error, encode_error

Link = tuple[NodeId, NodeId]


class SimNetwork:
    """The network between the nodes of one run. The nemesis uses its attributes and the methods under "faults"."""

    def __init__(self, world: SimWorld) -> None:
        self.latency = Latency(0.0002, 0.001, spike_probability=0.01, spike_s=0.01)
        self.notice_latency = Latency(0.0005, 0.02)
        """Until an end learns that its stream was cut."""
        self.keepalive = Latency(3.0, 6.0)
        """Until an end learns that its stream is silent."""
        self.connect_timeout = Latency(1.0, 2.0)
        self.loss = 0.0
        """Probability of losing a request or a response of a call."""
        self.silent_death_probability = 0.3
        self.repeat_probability = 0.5
        """Probability that a silent stream continues when its link works again; else it is cut."""
        self.repeat_call: Callable[[NodeId, NodeId], float | None] | None = None
        """Seconds after which a call arrives a second time; None if it does not."""
        self.window_bytes = 1 << 22
        self.on_send: Callable[[NodeId, NodeId, bytes], None] | None = None
        """Called with every stream message that is sent."""
        self.messages = 0
        self._loop: SimLoop = world.loop
        self._context = Context()
        self.scheduler = world.scheduler
        self.random = world.random("network")
        self._transports: dict[NodeId, SimTransport] = {}
        self._silent_dead: dict[NodeId, bool] = {}
        self._blocked: dict[Link, int] = {}
        self._block_number = 0
        self._slow: dict[Link, Latency] = {}
        self._connections: dict[int, Connection] = {}
        self._connection_number = 0

    def join(self, node: SimNode, node_id: NodeId) -> "SimTransport":
        """Returns the transport of this incarnation; it dies with the node."""
        transport = node.attach(SimTransport(self, node_id, node.loop))
        self._transports[node_id] = transport
        # Peers of the last incarnation learn that there is a new one.
        for connection in self._of(lambda end: end.me == node_id and end.transport is not transport):
            connection.cut()
        self._silent_dead.pop(node_id, None)
        return transport

    # -- faults

    def block(self, source: NodeId, target: NodeId) -> None:
        """Blocks the link from `source` to `target`."""
        if (source, target) in self._blocked:
            return
        self._block_number += 1
        number = self._blocked[source, target] = self._block_number
        for connection in self._between(source, target):
            self._watch(connection, lambda: self._blocked.get((source, target)) == number)

    def unblock(self, source: NodeId, target: NodeId) -> None:
        if self._blocked.pop((source, target), None) is None:
            return
        for connection in self._between(source, target):
            connection.unblocked()

    def slow_down(self, source: NodeId, target: NodeId, latency: Latency) -> None:
        self._slow[source, target] = latency

    def cut_streams(self, one: NodeId, other: NodeId) -> None:
        for connection in self._between(one, other):
            connection.cut()

    def silence_streams(self, one: NodeId, other: NodeId) -> None:
        """Silences the streams that are open now; new ones work."""
        for connection in self._between(one, other):
            connection.is_silenced = True
            self._watch(connection, lambda: True)

    def heal(self) -> None:
        """Restores all links and latencies. A silenced stream stays silent until keep-alive finds it."""
        for source, target in list(self._blocked):
            self.unblock(source, target)
        self._slow.clear()
        self.loss = 0.0
        self.repeat_call = None

    def is_blocked(self, source: NodeId, target: NodeId) -> bool:
        return (source, target) in self._blocked

    def has_silent_streams(self) -> bool:
        """Whether a stream is silent and one of its ends has not noticed yet."""
        return any(connection.is_silenced for connection in self._connections.values())

    # -- for transports and connections

    def delay_s(self, source: NodeId, target: NodeId) -> float:
        return self._slow.get((source, target), self.latency).draw(self.random)

    def later(self, delay_s: float, callback: Callable[..., object], *args: object) -> None:
        """Like the world's `call_later`, but faster, since it is half of all events. Uses the true time."""
        scheduler = self.scheduler
        handle = SimHandle(self._loop, callback, args, self._context, 0.0, True)
        scheduler.add_timer(scheduler.now_ns + int(delay_s * NS_PER_SECOND), handle)

    def draw(self) -> float:
        return self.random.random()

    def draw_count(self, most: int) -> int:
        """Returns a number from 0 to `most`."""
        return self.random.randrange(most + 1)

    def passes(self, source: NodeId, target: NodeId) -> bool:
        """Whether a request or response that is sent now arrives."""
        return not self.is_blocked(source, target) and not (self.loss and self.random.random() < self.loss)

    def find(self, node: NodeId) -> "SimTransport | None":
        """Returns the transport that listens at this node, if its process runs."""
        transport = self._transports.get(node)
        return transport if transport is not None and not transport.is_dead else None

    def is_mute(self, node: NodeId) -> bool:
        """Whether the node is down in a way that does not refuse connections."""
        return node in self._silent_dead

    def connect(self, opener: "SimTransport", acceptor: "SimTransport") -> Connection:
        self._connection_number += 1
        connection = Connection(self, self._connection_number, opener, acceptor)
        self._connections[self._connection_number] = connection
        return connection

    def forget(self, number: int) -> None:
        self._connections.pop(number, None)

    def died(self, transport: "SimTransport") -> None:
        if self.scheduler.closed:
            return
        silent = self.random.random() < self.silent_death_probability
        if silent:
            self._silent_dead[transport.me] = True
        for connection in self._of(lambda end: end.transport is transport):
            if silent:
                connection.is_silenced = True
                connection.lose_suffix()
                self._watch(connection, lambda: True)
            else:
                connection.cut()

    def _watch(self, connection: Connection, is_still_silent: Callable[[], bool]) -> None:
        """Keep-alive: each end gives up a stream that stays silent, or whose other end has done so."""

        def check(end: SimStream, other: SimStream) -> None:
            if is_still_silent() or other.is_over:
                end.broke()

        first, second = connection.ends
        self.later(self.keepalive.draw(self.random), check, first, second)
        self.later(self.keepalive.draw(self.random), check, second, first)

    def _of(self, matches: Callable[[SimStream], bool]) -> list[Connection]:
        return [c for c in list(self._connections.values()) if matches(c.ends[0]) or matches(c.ends[1])]

    def _between(self, one: NodeId, other: NodeId) -> list[Connection]:
        wanted = {one, other}
        return [c for c in list(self._connections.values()) if {c.ends[0].me, c.ends[1].me} == wanted]


class SimTransport:
    """The transport of one incarnation. Implements `world.transport.Transport`."""

    def __init__(self, network: SimNetwork, me: NodeId, loop: SimLoop) -> None:
        self.network = network
        self.me = me
        self.loop = loop
        self.is_dead = False
        self._is_closed = False
        self._handlers: dict[int, SimTask] = {}
        self._methods: dict[str, CallHandler] = {}
        self._services: dict[str, StreamHandler] = {}

    async def start(self) -> None:
        self.check_alive("start")

    async def close(self) -> None:
        """Breaks streams, cancels handlers, refuses calls."""
        if self._is_closed:
            return
        self._is_closed = True
        for connection in self.network._of(lambda end: end.transport is self):
            for end in connection.ends:
                if end.transport is self:
                    end.broke()
            connection.cut()
        tasks = [task for task in self._handlers.values() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def die(self) -> None:
        if not self.is_dead:
            self.is_dead = True
            self.network.died(self)

    def set_address(self, node: NodeId, address: str) -> None:
        """Does nothing: simulated nodes are found by id."""

    def serve(self, method: str, handler: CallHandler) -> None:
        self._methods[method] = handler

    def serve_stream(self, service: str, handler: StreamHandler) -> None:
        self._services[service] = handler

    def check_alive(self, action: str) -> None:
        if self.is_dead:
            raise MachineDied(f"{action} after death")

    def run_handler(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        """Runs a handler on this node; an error outside of the catalogue fails the run, because nobody retrieves it."""
        task = self.loop.create_task(coroutine, name=name)
        self._handlers[task.sequence] = task
        task.add_done_callback(self._handler_done)

    def _handler_done(self, task: "asyncio.Task[Any]") -> None:
        assert isinstance(task, SimTask)
        del self._handlers[task.sequence]

    # -- calls

    async def call_at(self, node: NodeId, address: str, method: str, request: bytes, *, timeout_ms: int) -> bytes:
        return await self.call(node, method, request, timeout_ms=timeout_ms)

    async def call(self, node: NodeId, method: str, request: bytes, *, timeout_ms: int) -> bytes:
        self.check_alive("call")
        answer = self.loop.create_future()
        timer = self.loop.call_later(
            timeout_ms / 1000, _resolve, answer, CallTimeoutError(f"{method} to node {node}", node=node)
        )
        network = self.network
        if network.passes(self.me, node):
            network.later(network.delay_s(self.me, node), self._call_arrives, node, method, bytes(request), answer)
            again_s = None if network.repeat_call is None else network.repeat_call(self.me, node)
            if again_s is not None:
                nobody = self.loop.create_future()
                nobody.set_result(b"")
                network.later(again_s, self._call_arrives, node, method, bytes(request), nobody)
        try:
            data: bytes = await answer
        finally:
            timer.cancel()
        return data

    def _call_arrives(self, node: NodeId, method: str, request: bytes, answer: SimFuture) -> None:
        network = self.network
        target = network.find(node)
        if target is None or target._is_closed:
            if not network.is_mute(node):
                self._answer(node, answer, _refusal(node))
            return
        handler = target._methods.get(method)
        if handler is None:
            self._answer(node, answer, UnreachableError(f"node {node} does not serve {method}", node=node))
            return
        target.run_handler(self._serve(target, handler, request, answer), f"{method} from {self.me}")

    async def _serve(self, target: "SimTransport", handler: CallHandler, request: bytes, answer: SimFuture) -> None:
        try:
            result: bytes | TidelogError = await handler(self.me, request)
        except TidelogError as error:
            result = decode_error(encode_error(error))
        self._answer(target.me, answer, result)

    def _answer(self, node: NodeId, answer: SimFuture, result: "bytes | TidelogError") -> None:
        """Sends the result from `node`; it arrives at the caller, or is lost."""
        network = self.network
        if network.passes(node, self.me):
            network.later(network.delay_s(node, self.me), _resolve, answer, result)

    # -- streams

    async def open_stream(self, node: NodeId, service: str) -> SimStream:
        self.check_alive("open a stream")
        opened = self.loop.create_future()
        network = self.network
        timeout_s = network.connect_timeout.draw(network.random)
        error = CallTimeoutError(f"node {node} does not respond", node=node)
        timer = self.loop.call_later(timeout_s, _resolve, opened, error)
        if not network.is_blocked(self.me, node):
            network.later(network.delay_s(self.me, node), self._open_arrives, node, service, opened)
        try:
            stream: SimStream = await opened
        finally:
            timer.cancel()
        return stream

    def _open_arrives(self, node: NodeId, service: str, opened: SimFuture) -> None:
        network = self.network
        target = network.find(node)
        if network.is_blocked(node, self.me) or self.is_dead:
            return
        back_s = network.delay_s(node, self.me)
        if target is None or target._is_closed:
            if not network.is_mute(node):
                refused = _refusal(node)
                network.later(back_s, _resolve, opened, refused)
            return
        handler = target._services.get(service)
        if handler is None:
            network.later(
                back_s, _resolve, opened, UnreachableError(f"node {node} does not serve {service}", node=node)
            )
            return
        connection = network.connect(self, target)
        target.run_handler(_serve_stream(handler, connection.ends[1]), f"{service} from {self.me}")
        network.later(back_s, _opened, opened, connection)


async def _serve_stream(handler: StreamHandler, stream: SimStream) -> None:
    try:
        await handler(stream)
    except (TidelogError, asyncio.CancelledError):
        stream.connection.cut()
    else:
        stream.close()


def _refusal(node: NodeId) -> UnreachableError:
    return UnreachableError(f"node {node} refuses the connection", node=node, is_refused=True)


def _opened(opened: SimFuture, connection: Connection) -> None:
    if opened.done():
        connection.cut()  # the caller is gone
    else:
        opened.set_result(connection.ends[0])


def _resolve(answer: SimFuture, result: "bytes | TidelogError") -> None:
    if answer.done():
        return
    if isinstance(result, TidelogError):
        answer.set_exception(result)
    else:
        answer.set_result(result)
