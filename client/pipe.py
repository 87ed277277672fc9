"""A pipe of the writer: the ProduceStream to one broker, with requests in order and answers in order (see `writer`)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidelog.client.connections import Exchange
from tidelog.client.produce_frame import ProduceFrame
from tidelog.model.errors import CallTimeoutError, ErrorCode, StreamClosedError, TidelogError, UnreachableError
from tidelog.model.ids import PartitionId
from tidelog.rpc.door import method_named
from tidelog.rpc.v1 import log_pb2 as pb

if TYPE_CHECKING:
    from tidelog.client.writer import Sent, Writer, WriterLane

_STREAM = method_named("Log", "ProduceStream")
_OVERHEAD = 64 << 10
"""Of a request, beside its batches."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that is not answered yet; `size` is that of its message."""

    sent_s: float
    batches: list[tuple[WriterLane, Sent]]
    size: int


class Pipe:
    """A ProduceStream to one broker. `ready` are the lanes that may have something to send, in turn."""

    def __init__(self, writer: Writer, node: int) -> None:
        self._writer = writer
        self._node = node
        self._ready: dict[PartitionId, WriterLane] = {}
        self._wake = asyncio.Event()
        self._unanswered: deque[_Asked] = deque()
        self._exchange: Exchange | None = None
        self._error: TidelogError | None = None

    def add(self, lane: WriterLane) -> None:
        self._ready[lane.partition] = lane
        self._wake.set()

    def close(self, error: TidelogError | None = None) -> None:
        self._error = self._error or error
        if self._exchange is not None:
            self._exchange.close()

    async def run(self) -> None:
        """Until the stream breaks; then what was not answered is lost, and all lanes look for their way."""
        writer = self._writer
        error: TidelogError
        try:
            self._exchange = await writer.cluster.open_node(self._node, _STREAM)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._receive(self._exchange))
                group.create_task(self._watch())
                await self._send(self._exchange)
            raise AssertionError("a pipe ends by an error")
        except* TidelogError as found:
            error = _first(found)
        finally:
            if self._exchange is not None:
                self._exchange.close()
            if writer.pipes.get(self._node) is self:
                del writer.pipes[self._node]
        self._lose(error)

    def _lose(self, error: TidelogError) -> None:
        error = self._error or error
        if isinstance(error, UnreachableError):
            error = self._writer.cluster.unreachable(self._node, error)
        self._writer.last_error = error
        lanes = dict(self._ready)
        was_carried = not isinstance(error, UnreachableError)
        refused = self._too_large() if error.code is ErrorCode.MESSAGE_TOO_LARGE else None
        for asked in self._unanswered:
            if asked is refused:
                was_carried = False  # neither it nor anything behind it was read
            for lane, batch in asked.batches:
                lanes[lane.partition] = lane
                if asked is refused and len(asked.batches) == 1:
                    failed = lane.refused(batch, error)
                    if failed is not None:
                        self._writer.fail(failed)
                else:
                    lane.lost(batch, error, was_carried=was_carried)
        self._unanswered.clear()
        for lane in lanes.values():
            self._writer.go_on(lane)

    def _too_large(self) -> _Asked | None:
        """The largest of the requests that are under way: if any is over a limit, this one is."""
        if not self._unanswered:
            return None
        asked = max(self._unanswered, key=lambda one: one.size)
        if len(asked.batches) > 1:
            self._writer.request_bytes_max = max(1, min(self._writer.request_bytes_max, asked.size) // 2)
        return asked

    def _is_held_up(self) -> bool:
        """What was sent last is large, and not answered."""
        return bool(self._unanswered) and self._unanswered[-1].size > self._writer.config.request_bytes_max + _OVERHEAD

    async def _send(self, exchange: Exchange) -> None:
        config = self._writer.config
        while True:
            while not self._ready or len(self._unanswered) >= config.requests_max or self._is_held_up():
                self._wake.clear()
                await self._wake.wait()
            request = ProduceFrame(acks=config.acks, timeout_ms=config.request_timeout_ms)
            batches: list[tuple[WriterLane, Sent]] = []
            limit = self._writer.request_bytes_max
            for lane in list(self._ready.values()):
                if batches and request.size + lane.next_size() > limit:
                    break
                flight = self._writer.fly(self._node, lane)
                # It goes behind the others; what it cannot send now is kicked by an answer.
                del self._ready[lane.partition]
                if flight is None:
                    continue
                batch, data = flight
                self._ready[lane.partition] = lane
                request.add(lane.topic, lane.partition, data)
                batches.append((lane, batch))
                if request.size >= limit:
                    break
            if batches:
                self._unanswered.append(_Asked(asyncio.get_running_loop().time(), batches, request.message_bytes))
                await exchange.send(request)

    async def _receive(self, exchange: Exchange) -> None:
        while True:
            response: pb.ProduceResponse = await exchange.receive()
            self._writer.cluster.reached(self._node)
            if not self._unanswered or len(response.partitions) != len(self._unanswered[0].batches):
                raise StreamClosedError("an answer to nothing that was asked")
            asked = self._unanswered.popleft()
            self._wake.set()
            for (lane, batch), row in zip(asked.batches, response.partitions, strict=True):
                self._writer.answered(lane, batch, row)

    async def _watch(self) -> None:
        """Notice that nobody answers: a broker that hangs breaks nothing."""
        writer, config = self._writer, self._writer.config
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(config.silence_ms / 1000)
            if not self._unanswered:
                continue
            asked = self._unanswered[0]
            silent_ms = (loop.time() - asked.sent_s) * 1000
            if silent_ms < config.silence_ms:
                continue
            if silent_ms > config.request_timeout_ms + config.silence_ms:
                raise CallTimeoutError(f"broker {self._node} has not answered in {silent_ms:.0f} ms", node=self._node)
            await writer.cluster.refresh_quietly(*dict.fromkeys(lane.topic for lane, _ in asked.batches))
            if self._unanswered and self._unanswered[0] is asked and self._has_moved(asked.batches):
                raise CallTimeoutError(f"broker {self._node} is silent, and leads no more", node=self._node)

    def _has_moved(self, batches: Sequence[tuple[WriterLane, Sent]]) -> bool:
        leaders = [self._writer.cluster.view.leader(lane.partition) for lane, _ in batches]
        return any(leader is not None and leader.node not in (self._node, -1) for leader in leaders)


def _first(error: BaseException) -> TidelogError:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, TidelogError)
    return error
