"""Late requests of transactions: a call arrives once more, after others, or only when its caller has given it up.

    from clients            Init, End, CommitOffsets, Join, Prepare; a produce request arrives again as a call
    between brokers         AddPartitions, WriteMarkers

A repeated marker mostly arrives when the producer's next transaction is open in its partition (`has_next`).

Fencing by epoch is for these: what is late must change nothing. Whether it does is seen in the history. This object
only delays, repeats and counts; a request comes up to `LATE_S` late, so that transactions begin and end meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

from simulation.cluster import Context, Station
from tidelog.client.connections import Encodable, Exchange
from tidelog.coordinator.transactions.wire import ADD_PARTITIONS, WRITE_MARKERS, decode_markers, decode_written
from tidelog.model.errors import CallTimeoutError, TidelogError
from tidelog.model.ids import NodeId
from tidelog.replication.transaction_messages import Marker
from tidelog.rpc.grpc.methods import Method, method_named
from tidelog.rpc.v1 import log_pb2, transactions_pb2
from tidelog.world.simulated.network import SimNetwork

LATE_S = 3.0
ONLY_LATE = 0.25
"""How many of the late calls have not arrived in time, too."""
LOOK_S = 0.003
AIMED = 0.7
"""How many of the late markers wait for the next transaction."""
MORE = 3
"""Requests between brokers are rarer than those of clients."""
PRODUCE, PRODUCE_STREAM = method_named("Log", "Produce"), method_named("Log", "ProduceStream")
NAMES = {
    ADD_PARTITIONS: "AddPartitions",
    WRITE_MARKERS: "WriteMarkers",
    PRODUCE.wire_name: "Produce",
    **{
        method_named("Transactions", name).wire_name: name
        for name in ("Init", "End", "CommitOffsets", "Join", "Prepare")
    },
}


class Postman:
    def __init__(
        self, network: SimNetwork, draw: Random, share: float, has_next: Callable[[NodeId, Marker], bool]
    ) -> None:
        self.late: Counter[str] = Counter()
        """Requests that have arrived late, by name."""
        self.refused: Counter[str] = Counter()
        """Those of them that were answered by an error."""
        self.deaf: set[NodeId] = set()
        """Clients that get no answers to produce requests."""
        self.mute: set[NodeId] = set()
        """Clients whose produce requests do not arrive."""
        self.is_over = False
        self._network = network
        self._draw = draw
        self._share = share
        self._has_next = has_next

    def attach(self, station: Station) -> None:
        """All calls of this machine's processes go by this object."""
        program = station.program

        async def carried(context: Context) -> None:
            if self._share:
                self._carry_calls(context)
            await program(context)

        station.program = carried

    def _is_late(self, method: str) -> bool:
        share = self._share * (MORE if method in (ADD_PARTITIONS, WRITE_MARKERS) else 1)
        return not self.is_over and share > 0 and self._draw.random() < share

    def _carry_calls(self, context: Context) -> None:
        transport = context.transport
        call = transport.call

        async def carried(node: NodeId, method: str, request: bytes, *, timeout_ms: int) -> bytes:
            if method not in NAMES or not self._is_late(method):
                return await call(node, method, request, timeout_ms=timeout_ms)
            self._send_late(context, node, method, request)
            if self._draw.random() < ONLY_LATE:
                await asyncio.sleep(timeout_ms / 1000)
                raise CallTimeoutError(f"{method} to node {node}", node=node)
            return await call(node, method, request, timeout_ms=timeout_ms)

        transport.call = carried  # type: ignore[method-assign]

    def _send_late(self, context: Context, node: NodeId, method: str, request: bytes) -> None:
        answer = self._network._loop.create_future()
        answer.add_done_callback(lambda done: self._answered(method, bytes(request), done))
        delay_s = self._draw.uniform(0.0, self._draw.choice((0.1, 0.6, LATE_S)))
        arrive = partial(self._arrive, context, node, method, bytes(request), answer)
        if method == WRITE_MARKERS and self._draw.random() < AIMED:
            self._wait_for_next(node, decode_markers(request).markers, arrive, looks=int(LATE_S / LOOK_S))
        else:
            self._network.later(delay_s, arrive)

    def _wait_for_next(self, node: NodeId, markers: Sequence[Marker], arrive: Callable[[], None], looks: int) -> None:
        if looks and not self.is_over and not any(self._has_next(node, marker) for marker in markers):
            self._network.later(LOOK_S, self._wait_for_next, node, markers, arrive, looks - 1)
        else:
            arrive()

    def _arrive(self, context: Context, node: NodeId, method: str, request: bytes, answer: Any) -> None:
        if not self.is_over:
            self.late[NAMES[method]] += 1
            context.transport._call_arrives(node, method, request, answer)

    def _answered(self, method: str, request: bytes, answer: Any) -> None:
        if answer.cancelled():
            return
        error = answer.exception()
        if error is None and method == PRODUCE.wire_name:
            rows = log_pb2.ProduceResponse.FromString(answer.result()).partitions
            self.refused["Produce"] += any(row.HasField("error") for row in rows)
        elif error is None and method == WRITE_MARKERS:
            written = decode_written(answer.result(), decode_markers(request))
            self.refused["WriteMarkers"] += any(code is not None for row in written.errors for code in row)
        elif error is None and NAMES[method] == "CommitOffsets":
            offsets = transactions_pb2.CommitTransactionOffsetsResponse.FromString(answer.result()).offsets
            self.refused["CommitOffsets"] += any(row.HasField("error") for row in offsets)
        else:
            self.refused[NAMES[method]] += isinstance(error, TidelogError)

    def carry(self, context: Context, node: NodeId, method: Method, exchange: Exchange) -> Exchange:
        """A stream of produce requests, each of which may arrive again as a call, or not at all."""
        if method is not PRODUCE_STREAM:
            return exchange
        me = context.node_id
        return _Carried(exchange, lambda request: self._arrives(context, node, request), lambda: me not in self.deaf)

    def _arrives(self, context: Context, node: NodeId, request: Encodable) -> bool:
        if context.node_id in self.mute:
            return False
        if self._is_late(PRODUCE.wire_name):
            self._send_late(context, node, PRODUCE.wire_name, request.SerializeToString())
        return True


class _Carried:
    def __init__(self, exchange: Exchange, arrives: Callable[[Encodable], bool], is_heard: Callable[[], bool]) -> None:
        self._exchange = exchange
        self._arrives = arrives
        self._is_heard = is_heard

    async def send(self, request: Encodable) -> None:
        if self._arrives(request):
            await self._exchange.send(request)

    async def receive(self) -> Any:
        while True:
            answer = await self._exchange.receive()
            if self._is_heard():
                return answer

    def close(self) -> None:
        self._exchange.close()
