"""The client of the active controller. It holds the only retry loop for requests to controllers, of this
node and of others.

Any controller names the active one. A controller that does not answer (it may be frozen, with open sockets) is avoided
for `avoid_ms`, unless another controller names it: then it leads, and may only be slow to commit. A broker that avoided
it would be fenced.

    answer                                       a repeatable request    any other request
    NOT_CONTROLLER, THROTTLING_QUOTA_EXCEEDED    is sent again           is sent again: nothing was done
    unreachable                                  is sent again           is sent again: nothing was done
    no answer, a broken connection,
      REQUEST_TIMED_OUT                          is sent again           fails with this error: the outcome is unknown
    any other error                              fails with it           fails with it
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from tidelog.metadata.controller_node import METHOD, ControllerNode
from tidelog.metadata.requests import decode_reply, encode_request
from tidelog.model.errors import (
    CallTimeoutError,
    ErrorCode,
    RemoteError,
    TidelogError,
    TransportError,
    UnreachableError,
)
from tidelog.model.ids import NodeId
from tidelog.world.transport import Transport

_NOTHING_DONE = frozenset({ErrorCode.NOT_CONTROLLER, ErrorCode.THROTTLING_QUOTA_EXCEEDED})

T = TypeVar("T")
SendTo = Callable[[NodeId, int], Awaitable[T]]
"""Sends the request to a controller; the int is the timeout in ms."""
RunOn = Callable[[ControllerNode], Awaitable[T]]
"""Runs the request on the controller of this node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerClientConfig:
    heartbeat_ms: int = 500
    silence_ms: int = 2_000
    """A broker leaves a controller that does not answer a heartbeat for this long."""
    avoid_ms: int = 1_000
    """Time for which a controller that did not answer is not asked, unless another one names it as the active one."""
    call_timeout_ms: int = 2_000
    """Timeout of one attempt."""
    retry_min_ms: int = 20
    """Initial backoff; doubles with each retry, up to `retry_max_ms`."""
    retry_max_ms: int = 500


@dataclass(eq=False)
class ControllerClient:
    """Sends requests to the active controller."""

    _transport: Transport
    _controllers: Callable[[], Sequence[NodeId]]
    _config: ControllerClientConfig
    _random: Random
    _leader: NodeId | None = None
    _silent: tuple[NodeId, float] | None = None
    """The controller that did not answer last, and until when it is avoided."""

    @property
    def leader(self) -> NodeId | None:
        """The active controller, as far as the last answers say."""
        return self._leader

    def known(self) -> Sequence[NodeId]:
        return self._controllers()

    def target(self) -> NodeId | None:
        """Return the controller for the next attempt; None if none is known."""
        if self._leader is not None:
            return self._leader
        known = list(self._controllers())
        others = [node for node in known if not self._is_avoided(node)]
        return self._random.choice(others or known) if known else None

    def _is_avoided(self, node: NodeId) -> bool:
        return self._silent is not None and self._silent[0] == node and self._silent[1] > _now_s()

    def fell_silent(self, node: NodeId) -> None:
        """Avoid a controller that accepted a request or a connection and does not answer."""
        self._silent = (node, _now_s() + self._config.avoid_ms / 1000)
        self._leader = None

    def hint(self, error: TidelogError) -> None:
        """Take over the leader that an error names; any other error means: try another controller."""
        leader = error.facts.get("leader") if isinstance(error, RemoteError) else None
        # A named leader may have stopped long ago, so the same name twice in a row does not count.
        is_known = isinstance(leader, int) and leader in self._controllers() and leader != self._leader
        self._leader = NodeId(leader) if is_known and isinstance(leader, int) else None

    def found(self, node: NodeId) -> None:
        self._leader = node

    async def pause(self, attempt: int) -> None:
        wait_ms = min(self._config.retry_min_ms << min(attempt, 10), self._config.retry_max_ms)
        await asyncio.sleep(self._random.uniform(wait_ms / 2, wait_ms) / 1000)

    async def call(self, request: object, *, is_repeatable: bool = False) -> Any:
        """Return the reply of the active controller, however long it takes to find one.

        Raises the controller's error (`RemoteError`). Where the outcome is not known and the request is not
        repeatable: `TransportError`, or a `RemoteError` with REQUEST_TIMED_OUT.
        """
        data = encode_request(request)

        async def send(target: NodeId, timeout_ms: int) -> Any:
            return decode_reply(await self._transport.call(target, METHOD, data, timeout_ms=timeout_ms))

        return await self.retry(send, is_repeatable=is_repeatable)

    async def retry(
        self,
        send: SendTo[T],
        *,
        is_repeatable: bool,
        timeout_ms: int | None = None,
        own: ControllerNode | None = None,
        run: RunOn[T] | None = None,
    ) -> T:
        """Try until the active controller has answered, by the table of the module.

        `own` is the controller of this node: while it is active, `run` replaces `send`. Raises `CallTimeoutError` after
        `timeout_ms`; None: there is no limit.
        """
        attempts = _Attempts(self, send, is_repeatable=is_repeatable, own=own, run=run)
        reply: T
        if timeout_ms is None:
            reply = await attempts.run(None)
            return reply
        deadline_s = _now_s() + timeout_ms / 1000
        try:
            async with asyncio.timeout_at(deadline_s):
                reply = await attempts.run(deadline_s)
                return reply
        except TimeoutError:
            raise CallTimeoutError(
                f"no active controller answered in {timeout_ms} ms: {attempts.last_problem}"
            ) from None

    def attempt_timeout_ms(self, deadline_s: float | None, *, is_repeatable: bool) -> int:
        """A request that is not repeatable gets all of the time that is left: there is no second attempt."""
        if deadline_s is None:
            return self._config.call_timeout_ms
        left_ms = max(1, int((deadline_s - _now_s()) * 1000))
        return min(left_ms, self._config.call_timeout_ms) if is_repeatable else left_ms

    def other_target(self, own: ControllerNode | None) -> NodeId | None:
        """Return another node's controller; None if none is known, or if it would be this node, which does not lead."""
        target = own.driver.core.leader if own is not None and own.driver.has_leader_contact() else None
        if target is None:
            target = self.target()
        return None if own is not None and target == self._transport.me else target


class _Attempts:
    """The attempts of one request."""

    def __init__(
        self,
        client: ControllerClient,
        send: SendTo[Any],
        *,
        is_repeatable: bool,
        own: ControllerNode | None,
        run: RunOn[Any] | None,
    ) -> None:
        self.last_problem = "no controller is known"
        self._client = client
        self._send = send
        self._is_repeatable = is_repeatable
        self._own = own
        self._run = run

    async def run(self, deadline_s: float | None) -> Any:
        attempt = 0
        while True:
            target: NodeId | None = None
            try:
                if self._run is not None and self._own is not None and self._own.is_active:
                    return await self._run(self._own)
                target = self._client.other_target(self._own)
                if target is not None:
                    timeout_ms = self._client.attempt_timeout_ms(deadline_s, is_repeatable=self._is_repeatable)
                    reply = await self._send(target, timeout_ms)
                    self._client.found(target)
                    return reply
            except TidelogError as error:
                self.last_problem = str(error)
                may_repeat = self._may_repeat(error)
                if target is not None:
                    self._note(error, target, may_repeat=may_repeat)
                if not may_repeat:
                    raise
                if attempt == 0 and isinstance(error, RemoteError) and self._client.leader is not None:
                    attempt += 1
                    continue  # the controller that was just named
            attempt += 1
            await self._client.pause(attempt)

    def _may_repeat(self, error: TidelogError) -> bool:
        if isinstance(error, TransportError):
            return self._is_repeatable or isinstance(error, UnreachableError)
        return error.code in _NOTHING_DONE or (self._is_repeatable and error.code is ErrorCode.REQUEST_TIMED_OUT)

    def _note(self, error: TidelogError, target: NodeId, *, may_repeat: bool) -> None:
        if may_repeat or isinstance(error, TransportError):  # an active controller's rejection names no leader
            self._client.hint(error)
        if isinstance(error, CallTimeoutError):
            self._client.fell_silent(target)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
