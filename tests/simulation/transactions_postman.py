"""Late requests of transactions: a call arrives once more, after others, or only when its caller has given it up.

    from clients            Init, End, CommitOffsets, Join, Prepare; a produce request arrives again as a call
    between brokers         AddPartitions, WriteMarkers

Fencing by epoch is for these: what is late must change nothing. Whether it does is seen in the history. This object
only delays, repeats and counts; a request comes up to `LATE_S` late, so that transactions begin and end meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random
from typing import Any

from simulation.cluster import Context, Station
from tidelog.client.connections import Encodable, Exchange
from tidelog.coordinator.transactions.wire import ADD_PARTITIONS, WRITE_MARKERS, decode_markers, decode_written
from tidelog.model.errors import CallTimeoutError, TidelogError
from tidelog.model.ids import NodeId
from tidelog.rpc.grpc.methods import Method, method_named
from tidelog.rpc.v1 import log_pb2, transactions_pb2
from tidelog.world.simulated.network import SimNetwork

LATE_S = 3.0
ONLY_LATE = 0.25
"""How many of the late calls have not arrived in time, too."""
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
    def __init__(self, network: SimNetwork, draw: Random, share: float) -> None:
        self.late: Counter[str] = Counter()
        """Requests that have arrived late, by name."""
        self.refused: Counter[str] = Counter()
        """Those of them that were answered by an error."""
        self.is_over = False
        self._network = network
        self._draw = draw
        self._share = share

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
        self._network.later(delay_s, self._arrive, context, node, method, bytes(request), answer)

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
        """A stream of produce requests, each of which may arrive again as a call."""
        if method is not PRODUCE_STREAM or not self._share:
            return exchange
        return _Carried(exchange, lambda request: self._sent(context, node, request))

    def _sent(self, context: Context, node: NodeId, request: bytes) -> None:
        if self._is_late(PRODUCE.wire_name):
            self._send_late(context, node, PRODUCE.wire_name, request)


class _Carried:
    def __init__(self, exchange: Exchange, on_sent: Any) -> None:
        self._exchange = exchange
        self._on_sent = on_sent

    async def send(self, request: Encodable) -> None:
        self._on_sent(request.SerializeToString())
        await self._exchange.send(request)

    async def receive(self) -> Any:
        return await self._exchange.receive()

    def close(self) -> None:
        self._exchange.close()
