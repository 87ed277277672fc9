"""A coordinator that does as a test says: the service `Groups` on one broker of the simulator, without a log.

It keeps one group. `script` is what happens to the next calls of a method: an error to raise, or a function of the
request that gives one or None. Without a script members are let in, and hold what `deal` says.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from support.clients.cluster import BROKERS, ClientWorld
from tidelog.model.errors import StreamBrokenError, TidelogError
from tidelog.model.ids import NodeId, PartitionId
from tidelog.rpc.grpc.dispatch import _serve, grpc_context
from tidelog.rpc.grpc.errors import as_message
from tidelog.rpc.grpc.methods import METHODS, Method
from tidelog.rpc.v1 import groups_pb2 as pb
from tidelog.services.context import Api, RequestContext

Script = TidelogError | Callable[[Any], TidelogError | None]


def _context(node: NodeId) -> RequestContext:
    return grpc_context(peer=f"node {node}")


class FakeGroups:
    def __init__(self, world: ClientWorld, *, broker: int = BROKERS[0]) -> None:
        self.broker = broker
        self.scripts: dict[str, deque[Script]] = {}
        self.asked: list[tuple[str, Any]] = []
        """(method, request) of everything that came."""
        self.stored: dict[tuple[str, int], pb.OffsetToCommit] = {}
        self.epoch = 1
        self.is_silent = False
        self._assignment: dict[PartitionId, str] | None = None
        self._streams: list[Callable[[Any], Awaitable[None]]] = []
        for node in BROKERS:
            for method in METHODS.values():
                if method.service == "Groups":
                    transport = world.network.find(NodeId(node))
                    assert transport is not None, "the broker runs"
                    _serve(
                        transport,
                        self,  # type: ignore[arg-type]
                        method,
                        method.wire_name,
                        lambda number: RequestContext(api=Api.GRPC, peer=f"node {number}"),
                    )

    def handler(self, method: Method) -> Callable[..., Awaitable[Any]]:
        return getattr(self, method.handler)  # type: ignore[no-any-return]

    def script(self, method: str, *what: Script) -> None:
        self.scripts.setdefault(method, deque()).extend(what)

    def _next(self, method: str, request: Any) -> None:
        self.asked.append((method, request))
        waiting = self.scripts.get(method)
        if waiting:
            what = waiting.popleft()
            error = what if isinstance(what, TidelogError) else what(request)
            if error is not None:
                raise error

    def requests(self, method: str) -> list[Any]:
        return [request for name, request in self.asked if name == method]

    # What the test does.

    def deal(self, assignment: dict[PartitionId, str]) -> None:
        """Assigns to the member, which learns it at the next heartbeat."""
        self._assignment = assignment

    # The service.

    async def find_coordinator(self, request: Any, _caller: RequestContext) -> Any:
        self._next("find_coordinator", request)
        rows = [pb.Coordinator(group=group, broker=self.broker, host=f"host-{self.broker}", port=9092)
                for group in request.groups]  # fmt: skip
        return pb.FindCoordinatorResponse(coordinators=rows)

    async def heartbeat(self, request: Any, _caller: RequestContext) -> Any:
        self._next("heartbeat", request)
        return self._answer(request)

    def _answer(self, request: Any) -> Any:
        answer = pb.HeartbeatResponse(
            member_id=request.member_id, member_epoch=self.epoch, heartbeat_interval_ms=1_000, session_timeout_ms=45_000
        )
        if self._assignment is not None:
            topics: dict[tuple[str, bytes], list[int]] = {}
            for place, name in sorted(self._assignment.items()):
                topics.setdefault((name, place.topic_id.bytes), []).append(place.partition)
            answer.assignment.SetInParent()
            for (name, topic_id), numbers in topics.items():
                answer.assignment.topics.add(topic=name, topic_id=topic_id, partitions=numbers)
            self._assignment = None
        return answer

    async def membership(self, receive: Any, _caller: RequestContext, send: Any) -> None:
        while (request := await receive()) is not None:
            try:
                self._next("membership", request)
            except StreamBrokenError:
                raise
            except TidelogError as error:
                await send(pb.HeartbeatResponse(error=as_message(error)))
                return
            if self.is_silent:
                await asyncio.sleep(3_600)
            await send(self._answer(request))

    async def commit_offsets(self, request: Any, _caller: RequestContext) -> Any:
        self._next("commit_offsets", request)
        answer = pb.CommitOffsetsResponse()
        for item in request.offsets:
            self.stored[item.topic, item.partition] = item
            answer.offsets.add(topic=item.topic, partition=item.partition)
        return answer

    async def fetch_offsets(self, request: Any, _caller: RequestContext) -> Any:
        self._next("fetch_offsets", request)
        answer = pb.FetchOffsetsResponse()
        for item in request.partitions:
            found = self.stored.get((item.topic, item.partition))
            answer.offsets.add(
                topic=item.topic,
                topic_id=item.topic_id,
                partition=item.partition,
                offset=-1 if found is None else found.offset,
                leader_epoch=-1 if found is None else found.leader_epoch,
            )
        return answer
