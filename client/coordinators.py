"""`Coordinators`: caches which broker coordinates a group, or a transactional id, until a broker denies it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import Message

from tidelog.client.cluster import ClusterClient, error_in
from tidelog.client.metadata import address_of
from tidelog.client.remote_errors import with_class
from tidelog.model.errors import ErrorCode, RemoteError, TidelogError, TransportError
from tidelog.rpc.grpc.methods import Method, method_named
from tidelog.rpc.v1 import groups_pb2 as pb
from tidelog.rpc.v1 import transactions_pb2 as transactions

ELSEWHERE = frozenset(
    {ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS}
)
"""Errors that mean: not here, or not now. The request had no effect."""


@dataclass(frozen=True, slots=True)
class Coordinated:
    """What has coordinators."""

    noun: str
    method: Method
    request: Callable[[str, str], Message]
    """Of a name and a listener."""


GROUPS = Coordinated(
    "group",
    method_named("Groups", "FindCoordinator"),
    lambda name, listener: pb.FindCoordinatorRequest(groups=[name], listener=listener),
)
TRANSACTIONS = Coordinated(
    "transactional id",
    method_named("Transactions", "FindCoordinator"),
    lambda name, listener: transactions.FindTransactionCoordinatorRequest(transactional_ids=[name], listener=listener),
)


@dataclass(frozen=True, slots=True)
class CoordinatorInfo:
    node: int
    address: str


def is_retriable(error: TidelogError) -> bool:
    """Return whether another attempt, perhaps at another broker, may succeed."""
    return isinstance(error, TransportError) or error.code in ELSEWHERE or error.retriable


KNOWN_MAX = 1_000
"""Cached names; beyond that the oldest one is dropped."""


class Coordinators:
    def __init__(self, cluster: ClusterClient, kind: Coordinated = GROUPS) -> None:
        self._cluster = cluster
        self._kind = kind
        self._known: dict[str, CoordinatorInfo] = {}
        self.last_error: TidelogError | None = None
        """Why the last `find` is not done yet, or was not."""

    @property
    def noun(self) -> str:
        return self._kind.noun

    def forget(self, name: str) -> None:
        self._known.pop(name, None)

    async def find(self, name: str, *, timeout_ms: int | None = None) -> CoordinatorInfo:
        """Find the coordinator. Raises the last error after the timeout, a permanent one at once."""
        known = self._known.get(name)
        if known is not None:
            return known
        loop = asyncio.get_running_loop()
        end_s = loop.time() + (timeout_ms or self._cluster.config.request_timeout_ms) / 1000
        backoff = self._cluster.backoff()
        request = self._kind.request(name, self._cluster.config.listener)
        while True:
            left_ms = max(1, int((end_s - loop.time()) * 1000))
            answer = await self._cluster.call(
                self._kind.method, request, timeout_ms=left_ms, attempt_ms=self._cluster.config.attempt_timeout_ms
            )
            (row,) = answer.coordinators
            error = error_in(row)
            if error is None:
                coordinator = CoordinatorInfo(row.broker, address_of(row.host, row.port))
                if len(self._known) >= KNOWN_MAX and name not in self._known:
                    del self._known[next(iter(self._known))]
                self._known[name] = coordinator
                self.last_error = None
                return coordinator
            self.last_error = error
            pause_s = backoff.next_s()
            if not is_retriable(error) or loop.time() + pause_s >= end_s:
                raise with_class(RemoteError(f"{self._kind.noun} '{name}': {error}", code=error.code))
            await asyncio.sleep(pause_s)
