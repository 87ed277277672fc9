"""`Coordinators`: caches which broker coordinates a group, until a broker denies it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tidelog.client.cluster import ClusterClient, error_in
from tidelog.client.metadata import address_of
from tidelog.client.remote_errors import with_class
from tidelog.model.errors import ErrorCode, RemoteError, TidelogError, TransportError
from tidelog.rpc.grpc.methods import method_named
from tidelog.rpc.v1 import groups_pb2 as pb

_FIND = method_named("Groups", "FindCoordinator")

ELSEWHERE = frozenset(
    {ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS}
)
"""Errors that mean: not here, or not now. The request had no effect."""


@dataclass(frozen=True, slots=True)
class CoordinatorInfo:
    node: int
    address: str


def is_retriable(error: TidelogError) -> bool:
    """Return whether another attempt, perhaps at another broker, may succeed."""
    return isinstance(error, TransportError) or error.code in ELSEWHERE or error.retriable


KNOWN_MAX = 1_000
"""Cached groups; beyond that the oldest one is dropped."""


class Coordinators:
    def __init__(self, cluster: ClusterClient) -> None:
        self._cluster = cluster
        self._known: dict[str, CoordinatorInfo] = {}
        self.last_error: TidelogError | None = None
        """Why the last `find` is not done yet, or was not."""

    def forget(self, group: str) -> None:
        self._known.pop(group, None)

    async def find(self, group: str, *, timeout_ms: int | None = None) -> CoordinatorInfo:
        """Find the coordinator. Raises the last error after the timeout, a permanent one at once."""
        known = self._known.get(group)
        if known is not None:
            return known
        loop = asyncio.get_running_loop()
        end_s = loop.time() + (timeout_ms or self._cluster.config.request_timeout_ms) / 1000
        backoff = self._cluster.backoff()
        request = pb.FindCoordinatorRequest(groups=[group], listener=self._cluster.config.listener)
        while True:
            left_ms = max(1, int((end_s - loop.time()) * 1000))
            answer = await self._cluster.call(
                _FIND, request, timeout_ms=left_ms, attempt_ms=self._cluster.config.attempt_timeout_ms
            )
            (row,) = answer.coordinators
            error = error_in(row)
            if error is None:
                coordinator = CoordinatorInfo(row.broker, address_of(row.host, row.port))
                if len(self._known) >= KNOWN_MAX and group not in self._known:
                    del self._known[next(iter(self._known))]
                self._known[group] = coordinator
                self.last_error = None
                return coordinator
            self.last_error = error
            pause_s = backoff.next_s()
            if not is_retriable(error) or loop.time() + pause_s >= end_s:
                raise with_class(RemoteError(f"group '{group}': {error}", code=error.code))
            await asyncio.sleep(pause_s)
