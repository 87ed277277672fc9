"""How a node's doors reach the cluster's state: its own copy for what may lag, the active controller for the rest.

    role            image                     changes and linearizable questions
    controller      its own                   itself while it is active, else the active one
    broker          its tail                  the active controller
    both            its tail                  as a controller

The active controller is found as brokers find it: any controller says who leads. A change whose outcome is not known is
not repeated: the caller hears REQUEST_TIMED_OUT or NETWORK_EXCEPTION and decides. A question is asked again.

A caller that accepts an old answer (`prefer_active`) gets one when this node does not hear from an active controller
and none has answered within STALE_AFTER_S. It comes with its age.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from google.protobuf.message import Message

from tidelog.metadata.broker_side import ControllerClient
from tidelog.metadata.controller import ANSWERS
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.machine import is_question
from tidelog.metadata.requests import decode_reply, decode_request, encode_request
from tidelog.metadata.shell import METHOD, ControllerNode
from tidelog.metadata.tail import MetadataTail
from tidelog.model.errors import (
    CallTimeoutError,
    ErrorCode,
    NotLeaderError,
    RaftStoppedError,
    RemoteError,
    StreamBrokenError,
    StreamClosedError,
    TransportError,
    UnreachableError,
)
from tidelog.model.ids import NodeId, Offset
from tidelog.rpc.door import FORWARDED, Method, Send, decode_response_frame, encode_message
from tidelog.world.transport import Stream, Transport

_NOTHING_DONE = frozenset({ErrorCode.NOT_CONTROLLER, ErrorCode.THROTTLING_QUOTA_EXCEEDED})
_QUESTION_TIMEOUT_MS = 2_000
"""A controller that does not answer a question for so long is left for another."""
STALE_AFTER_S = 0.7
"""How long an active controller is looked for before an old answer is given, where that is allowed."""
STALE_POLL_S = 0.1
FRESH_MS = 3_000
"""A broker's copy of the metadata is not called old below this age: new entries come twice a second as a rule."""

Local = Callable[[ControllerNode], Awaitable[Any]]
Remote = Callable[[NodeId, int], Awaitable[Any]]


class QuorumLink:
    """One for a node. At least one of `controller` and `tail` is given."""

    def __init__(
        self,
        *,
        cluster_id: str,
        transport: Transport,
        client: ControllerClient,
        controller: ControllerNode | None = None,
        tail: MetadataTail | None = None,
        brokers: Transport | None = None,
    ) -> None:
        """`brokers` knows brokers by their registrations; `transport` knows controllers."""
        assert controller is not None or tail is not None, "a node is a controller or has a tail"
        self.cluster_id = cluster_id
        self.controller = controller
        self._transport = transport
        self._client = client
        self._tail = tail
        self._brokers = brokers
        self._made_s: float | None = None

    @property
    def me(self) -> NodeId:
        return self._transport.me

    @property
    def image(self) -> ClusterImage:
        """This node's copy. A broker serves by its tail, so that is what it tells, even if it is a controller as well
        and that one is ahead."""
        if self._tail is not None:
            return self._tail.image
        assert self.controller is not None, "a node is a controller or has a tail"
        return self.controller.image

    @property
    def metadata_offset(self) -> int:
        """Everything below is in `image`."""
        if self._tail is not None:
            return self._tail.offset
        assert self.controller is not None, "a node is a controller or has a tail"
        return self.controller.machine.offset

    @property
    def metadata_epoch(self) -> int:
        """Of the last entry in `image`, on a node with a tail."""
        assert self._tail is not None, "only brokers have a tail"
        return self._tail.epoch

    def stale_ms(self) -> int | None:
        """How old this node's copy is, if it does not hear from an active controller; None if it does."""
        if self.controller is not None:
            driver = self.controller.driver
            if driver.hears_leader():
                return None
            return self._age_ms(driver.describe().without_leader_ms)
        age_ms = self._age_ms(None)
        return None if self._client.leader is not None or age_ms < FRESH_MS else age_ms

    def _age_ms(self, without_leader_ms: int | None) -> int:
        tail_ms = None if self._tail is None else self._tail.stale_ms()
        known = [age for age in (tail_ms, without_leader_ms) if age is not None]
        if known:
            return max(known)
        # It has never had all that there is in this life: what it read from its disk is older than this.
        now_s = asyncio.get_running_loop().time()
        if self._made_s is None:
            self._made_s = now_s
        return max(FRESH_MS, int((now_s - self._made_s) * 1000))

    async def prefer_active(self, asking: Coroutine[Any, Any, Any]) -> tuple[Any, int | None]:
        """(the answer of an active controller, None), or (None, age of this node's copy in ms) if there is none."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        task = loop.create_task(asking)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=STALE_POLL_S)
                if not task.done() and loop.time() - begun_s >= STALE_AFTER_S:
                    stale_ms = self.stale_ms()
                    if stale_ms is not None:
                        return None, stale_ms
            return task.result(), None
        except TransportError:
            return None, self.stale_ms() or 0
        finally:
            task.cancel()

    async def ask_or_recall(self, question: object, *, timeout_ms: int) -> tuple[Any, int | None]:
        """The active controller's reply and None; else the reply of this node's copy, and its age in ms."""
        reply, stale_ms = await self.prefer_active(self.ask(question, timeout_ms=timeout_ms))
        return (reply, None) if stale_ms is None else (self.recall(question), stale_ms)

    def recall(self, question: object) -> Any:
        """The reply of this node's copy, which may be old."""
        return ANSWERS[type(question)](self.image, question)

    def controllers(self) -> Sequence[NodeId]:
        """Those that this node knows of."""
        return self._client.known()

    async def until(self, condition: Callable[[ClusterImage], bool]) -> None:
        """Returns when this node's copy is so."""
        if self._tail is not None:
            await self._tail.until(condition)
            return
        assert self.controller is not None, "a node is a controller or has a tail"
        while not condition(self.controller.image):
            await self.controller.driver.applied(Offset(self.controller.driver.applied_offset + 1))

    @property
    def active(self) -> int:
        """The active controller as far as it is known here; -1 if it is not."""
        if self.controller is not None:
            leader = self.controller.driver.core.leader
        else:
            # Who answered last; a tail hears of a new leader only when its source says so.
            leader = self._client.leader or (None if self._tail is None else self._tail.leader)
        return -1 if leader is None else leader

    async def ask(self, request: object, *, timeout_ms: int) -> Any:
        """The active controller's reply to a request or question of `metadata.requests`; raises its refusal."""
        data = encode_request(request)
        # The checks of the wire hold for everybody, and also where there is no wire.
        checked = decode_request(data)
        is_asking = is_question(checked)

        async def local(controller: ControllerNode) -> Any:
            return await (controller.ask(checked) if is_asking else controller.submit(checked))

        async def remote(target: NodeId, call_ms: int) -> Any:
            return decode_reply(await self._transport.call(target, METHOD, data, timeout_ms=call_ms))

        return await self._reach(local, remote, is_repeatable=is_asking, timeout_ms=timeout_ms)

    async def forward(
        self, method: Method, request: Message, local: Local, *, is_repeatable: bool, timeout_ms: int
    ) -> Any:
        """The active controller's answer to a call of the public API: `local`, if that is this node."""
        data = request.SerializeToString()

        async def remote(target: NodeId, call_ms: int) -> Any:
            name = FORWARDED + method.wire_name
            return method.response.FromString(await self._transport.call(target, name, data, timeout_ms=call_ms))

        return await self._reach(local, remote, is_repeatable=is_repeatable, timeout_ms=timeout_ms)

    async def forward_to(self, node: NodeId, method: Method, request: Message, *, timeout_ms: int) -> Any:
        """The answer of one node, a broker, at the address that it has registered."""
        name, data = FORWARDED + method.wire_name, request.SerializeToString()
        broker = self.image.brokers.get(node)
        if self._brokers is None and self.controller is not None and broker is not None:
            address = self.controller.broker_address(broker)
            data = await self._transport.call_at(node, address, name, data, timeout_ms=timeout_ms)
        else:
            data = await (self._brokers or self._transport).call(node, name, data, timeout_ms=timeout_ms)
        return method.response.FromString(data)

    async def _reach(self, local: Local, remote: Remote, *, is_repeatable: bool, timeout_ms: int) -> Any:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_ms / 1000
        attempt = 0
        why = "no controller is known"
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    try:
                        if self.controller is not None and self.controller.is_active:
                            return await local(self.controller)
                        target = self._target()
                        if target is not None:
                            call_ms = max(1, int((deadline - loop.time()) * 1000))
                            if is_repeatable:
                                call_ms = min(call_ms, _QUESTION_TIMEOUT_MS)
                            answer = await remote(target, call_ms)
                            self._client.found(target)
                            return answer
                    except (NotLeaderError, RaftStoppedError) as error:
                        why = str(error)
                    except TransportError as error:
                        why = str(error)
                        self._client.hint(error)
                        if not is_repeatable and not isinstance(error, UnreachableError):
                            raise
                    except RemoteError as error:
                        may_repeat = is_repeatable and error.code is ErrorCode.REQUEST_TIMED_OUT
                        if error.code not in _NOTHING_DONE and not may_repeat:
                            raise
                        why = str(error)
                        self._client.hint(error)
                    attempt += 1
                    await self._client.pause(attempt)
        except TimeoutError:
            raise CallTimeoutError(f"no answer of an active controller in {timeout_ms} ms: {why}") from None

    def _target(self) -> NodeId | None:
        """Another controller to ask; None if none is known, or if it would be this node, which does not lead yet."""
        target = None
        if self.controller is not None and self.controller.driver.hears_leader():
            target = self.controller.driver.core.leader
        if target is None:
            target = self._client.target()
        return None if target == self.me else target

    async def relay(self, method: Method, request: Message, send: Send, *, timeout_ms: int) -> None:
        """Hand on the responses of some controller to a call that any of them answers; `timeout_ms` is for finding one.
        Raises `TransportError` if it breaks off."""
        stream = await self._open(FORWARDED + method.wire_name, encode_message(request), timeout_ms=timeout_ms)
        try:
            while True:
                try:
                    frame = await stream.receive()
                except StreamClosedError:
                    return
                except StreamBrokenError as error:
                    raise TransportError(f"the controller is gone: {error}", node=stream.peer) from error
                await send(decode_response_frame(method, frame))
        finally:
            stream.close()

    async def _open(self, service: str, first: bytes, *, timeout_ms: int) -> Stream:
        attempt = 0
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                while True:
                    target = self._target()
                    if target is not None:
                        try:
                            stream = await self._transport.open_stream(target, service)
                            await stream.send(first)
                            return stream
                        except (TransportError, RemoteError) as error:
                            self._client.hint(error)
                    attempt += 1
                    await self._client.pause(attempt)
        except TimeoutError:
            raise CallTimeoutError(f"no controller was reached in {timeout_ms} ms") from None
