"""`AdminCalls`: runs admin operations within their time, and sends their requests where they belong.

Operations are methods decorated with `query` or `change`. Each takes `timeout` in seconds over all attempts:

    time is up in a query      QueryTimeoutError: nothing was changed
    time is up in a change     CallTimeoutError: it may have been made
    `close` began before       AdminClosedError
    `close` gives up waiting   as if time was up

Requests to any node are repeated by `ClusterClient.call`; a change only if it was surely not started. Requests about a
group or a transactional id go to its coordinator:

    response                                       action
    NOT_COORDINATOR, loading, unreachable          find the coordinator again and retry, until time is up
    no answer to a query or an idempotent change   the same
    no answer to another change                    raised: the change may have been made
    an error of the group                          the error of this group, not of others
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Concatenate, ParamSpec, TypeVar

from google.protobuf.message import Message

from tidelog.client.cluster import SLACK_MS, ClusterClient, error_in, server_timeout_ms
from tidelog.client.connections import call_in_parts
from tidelog.client.coordinators import ELSEWHERE, TRANSACTIONS, CoordinatorInfo, Coordinators, is_retriable
from tidelog.client.durations import check_timeout
from tidelog.client.errors import CallTimeoutError, QueryTimeoutError
from tidelog.client.tasks import Ending
from tidelog.model.errors import ErrorCode, InvalidRequestError, TidelogError, UnreachableError
from tidelog.rpc.grpc.methods import method_named

ATTEMPT_MS = 5_000
CONCURRENT_MAX = 16
"""Coordinators or leaders that one operation asks at a time."""

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S", bound="AdminCalls")
Operation = Callable[Concatenate[S, P], Coroutine[Any, Any, T]]

_deadline_s: ContextVar[float | None] = ContextVar("_deadline_s", default=None)
"""Loop time when the running operation ends. An operation that calls another one shares its deadline with it."""


_ages_ms: ContextVar[list[int]] = ContextVar("_ages_ms")
"""Of the stale answers that the running operation got."""


class AdminClosedError(InvalidRequestError):
    """The admin client is closed; create another one."""


def _operation(method: Operation[S, P, T], *, is_change: bool) -> Operation[S, P, T]:
    @functools.wraps(method)
    async def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if _deadline_s.get() is not None:
            return await method(self, *args, **kwargs)
        timeout: Any = kwargs.get("timeout")
        return await self._run(method.__name__, method(self, *args, **kwargs), timeout, is_change=is_change)

    return run


def query(method: Operation[S, P, T]) -> Operation[S, P, T]:
    """An operation that changes nothing."""
    return _operation(method, is_change=False)


def change(method: Operation[S, P, T]) -> Operation[S, P, T]:
    return _operation(method, is_change=True)


@contextmanager
def deadline_of_call(timeout_s: float) -> Iterator[None]:
    """Requests of an operation that takes long end after this time, each."""
    before_s = _deadline_s.get()
    end_s = asyncio.get_running_loop().time() + timeout_s
    token = _deadline_s.set(end_s if before_s is None else min(before_s, end_s))
    try:
        yield
    finally:
        _deadline_s.reset(token)


async def for_each(items: Iterable[T], job: Callable[[T], Awaitable[R]]) -> list[R | TidelogError]:
    """Runs the job for every item, `CONCURRENT_MAX` at a time. The result of a job that fails is its error."""
    gate = asyncio.Semaphore(CONCURRENT_MAX)

    async def run(item: T) -> R | TidelogError:
        async with gate:
            try:
                return await job(item)
            except TidelogError as error:
                return error

    return await asyncio.gather(*(run(item) for item in items))


class AdminCalls:
    """Used on one loop."""

    def __init__(self, cluster: ClusterClient, *, timeout_ms: int | None = None) -> None:
        self.cluster = cluster
        self.calls = self.failures = 0
        self.stale_ms: int | None = None
        """Age of the oldest answer in the last operation by a node that did not hear from an active controller; None
        if there was none."""
        self._timeout_ms = timeout_ms or cluster.config.request_timeout_ms
        self._coordinators = {"Groups": Coordinators(cluster), "Transactions": Coordinators(cluster, TRANSACTIONS)}
        self._is_closing = self._is_over = False
        self._running: set[asyncio.Task[Any]] = set()
        self._ending = Ending()

    async def _run(self, name: str, job: Coroutine[Any, Any, T], timeout: float | None, *, is_change: bool) -> T:
        try:
            check_timeout(timeout)
            if self._is_closing:
                raise AdminClosedError("this admin client is closed")
        except InvalidRequestError:
            job.close()
            raise
        task = asyncio.current_task()
        assert task is not None, "runs on a loop"
        self._running.add(task)
        self.calls += 1
        timeout_s = self._timeout_ms / 1000 if timeout is None else timeout
        token = _deadline_s.set(asyncio.get_running_loop().time() + timeout_s)
        ages_ms: list[int] = []
        _ages_ms.set(ages_ms)
        try:
            async with asyncio.timeout(timeout_s):
                result = await job
            self.stale_ms = max(ages_ms, default=None)
            return result
        except asyncio.CancelledError:
            if not self._is_over:
                raise
            task.uncancel()
            self.failures += 1
            raise _timed_out(f"{name}: the admin client was closed", is_change=is_change) from None
        except TidelogError as error:
            self.failures += 1
            if error.code is ErrorCode.REQUEST_TIMED_OUT and not isinstance(error, CallTimeoutError):
                raise _timed_out(f"{name}: {error}", is_change=is_change) from error
            raise
        except TimeoutError:
            self.failures += 1
            what = f"{name}: not done in {timeout_s:g} s{self.cluster.reason_text()}"
            raise _timed_out(what, is_change=is_change) from None
        finally:
            _deadline_s.reset(token)
            self._running.discard(task)

    async def close(self, timeout: float | None = None) -> None:
        """Waits for running operations, and aborts those that run after `timeout` seconds; None: waits for all."""
        self._is_closing = True
        await self._ending.run(lambda: self._close(timeout))

    async def _close(self, timeout_s: float | None) -> None:
        if running := set(self._running):
            _, late = await asyncio.wait(running, timeout=timeout_s)
            self._is_over = True
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        await self.cluster.close()

    def metrics(self) -> dict[str, float]:
        return {"calls": self.calls, "failures": self.failures, "calls_in_progress": len(self._running)}

    def _remaining_ms(self) -> int:
        deadline_s = _deadline_s.get()
        assert deadline_s is not None, "an operation runs"
        return max(1, int((deadline_s - asyncio.get_running_loop().time()) * 1000))

    # Any node.

    async def _ask(
        self, service: str, name: str, request: Any, *, is_change: bool = False, allow_stale: bool = False
    ) -> Any:
        """Sends the request to any node; the nodes forward it to the active controller."""
        fields = request.DESCRIPTOR.fields_by_name
        remaining_ms = self._remaining_ms()
        has_timeout = "timeout_ms" in fields
        if has_timeout:
            request.timeout_ms = server_timeout_ms(remaining_ms)
        if allow_stale:
            request.allow_stale = True
        is_repeatable = not is_change or ("validate_only" in fields and request.validate_only)
        # A query that no node answers ends a little early, with an error that names them.
        timeout_ms = remaining_ms - min(100, remaining_ms // 10) if is_repeatable else remaining_ms + SLACK_MS
        method = method_named(service, name)
        response = await call_in_parts(
            method,
            request,
            lambda part: self.cluster.call(
                method,
                part,
                timeout_ms=max(1, timeout_ms),
                is_repeatable=is_repeatable,
                sets_timeout=has_timeout and is_repeatable,
            ),
        )
        if "stale_ms" in response.DESCRIPTOR.fields_by_name:
            self.cluster.note_age(response)
            self._note_age(self.cluster.stale_ms)
        return response

    def _note_age(self, stale_ms: int | None) -> None:
        if stale_ms is not None:
            _ages_ms.get().append(stale_ms)

    # The coordinator of a group or a transactional id.

    async def _ask_coordinator(
        self, key: str, name: str, request: Message, *, is_repeatable: bool = True, service: str = "Groups"
    ) -> tuple[CoordinatorInfo, Any]:
        """Returns the coordinator and its response."""
        method = method_named(service, name)
        coordinators = self._coordinators[service]
        backoff = self.cluster.backoff()
        failure: TidelogError | None = None
        while True:
            remaining_ms = self._remaining_ms()
            try:
                coordinator = await coordinators.find(key, timeout_ms=remaining_ms)
            except TidelogError as caught:
                raise failure or caught from caught
            try:
                timeout_ms = min(remaining_ms, ATTEMPT_MS) if is_repeatable else remaining_ms
                call = functools.partial(self.cluster.call_at, coordinator.address, method, timeout_ms=timeout_ms)
                response = await call_in_parts(method, request, call)
                error = _moved_in(response)
            except TidelogError as caught:
                error = caught
            if error is None:
                return coordinator, response
            may_retry = is_retriable(error) if is_repeatable else _is_not_started(error)
            pause_s = backoff.next_s()
            failure = error
            if isinstance(error, UnreachableError):
                who = f"broker {coordinator.node}, the coordinator of {coordinators.noun} '{key}'"
                failure = UnreachableError(f"{who}, is unreachable: {error}", node=coordinator.node)
            if not may_retry or pause_s * 1000 >= self._remaining_ms():
                raise failure
            coordinators.forget(key)
            await asyncio.sleep(pause_s)


def _timed_out(what: str, *, is_change: bool) -> TidelogError:
    if is_change:
        return CallTimeoutError(f"{what}; a change may have been made")
    return QueryTimeoutError(what)


def _is_not_started(error: TidelogError) -> bool:
    """The error says that nothing was done, and a retry may succeed."""
    return isinstance(error, UnreachableError) or error.code in ELSEWHERE


def _moved_in(response: Any) -> TidelogError | None:
    """NOT_COORDINATOR and the like. A coordinator returns it for all rows of a group, or for none."""
    rows = [row for field, rows in response.ListFields() if field.is_repeated for row in rows]
    if rows and "error" in rows[0].DESCRIPTOR.fields_by_name:
        error = error_in(rows[0])
        if error is not None and error.code in ELSEWHERE:
            return error
    return None
