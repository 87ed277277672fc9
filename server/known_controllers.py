"""The controllers that a node process knows, and their addresses: first from its file, then from the controllers.

    file: controller.quorum.voters (ids and addresses), controller.quorum.bootstrap.servers (addresses)
      |
      v   at the start, and every REFRESH_S
    call "node-controllers" of any controller -> the voters of its newest membership, with their addresses

The list only grows while the process runs: a removed controller does not answer, or names the leader.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

import grpc  # type: ignore[import-untyped]
import msgpack
from grpc import aio

from tidelog.model.errors import CorruptStateError, TidelogError, WrongClusterError
from tidelog.model.ids import NodeId
from tidelog.raft.membership import Member
from tidelog.rpc.grpc.transport import GrpcTransport, call_unknown

LOGGER = logging.getLogger(__name__)

METHOD = "node-controllers"
REFRESH_S = 30.0
RETRY_S = 0.5
CALL_TIMEOUT_MS = 2_000
CONTROLLERS_MAX = 64

Rows = list[tuple[NodeId, str]]


def encode_rows(members: Iterable[Member]) -> bytes:
    rows = [[member.node, member.endpoints[0][1]] for member in members if member.endpoints]
    return bytes(msgpack.packb(["controllers", 1, rows]))


def decode_rows(data: bytes) -> Rows:
    try:
        kind, _version, rows = msgpack.unpackb(data)
        if kind == "controllers" and len(rows) <= CONTROLLERS_MAX:
            return [(NodeId(int(node)), str(address)) for node, address in rows]
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CorruptStateError(f"a list of controllers cannot be decoded: {error}") from error
    raise CorruptStateError("a response that is not a list of controllers")


class KnownControllers:
    """`run` is its task, on brokers and on controllers with bootstrap servers."""

    def __init__(
        self, transport: GrpcTransport, cluster_id: str, voters: Iterable[tuple[NodeId, str]], bootstrap: Sequence[str]
    ) -> None:
        self._transport = transport
        self._cluster_id = cluster_id
        self._bootstrap = tuple(bootstrap)
        self._addresses: dict[NodeId, str] = {}
        self._turn = 0
        self.learn(voters)

    def nodes(self) -> Sequence[NodeId]:
        return list(self._addresses)

    def learn(self, rows: Iterable[tuple[NodeId, str]]) -> None:
        for node, address in rows:
            if self._addresses.get(node) != address:
                self._addresses[node] = address
                self._transport.set_address(node, address)

    async def run(self) -> None:
        while True:
            is_answered = await self._ask()
            await asyncio.sleep(REFRESH_S if is_answered else RETRY_S)

    async def _ask(self) -> bool:
        """Asks another controller, in turn, and returns whether it named any voters.

        A node does not ask itself. A controller that joins knows no other: it asks the bootstrap servers.
        """
        others = [node for node in self.nodes() if node != self._transport.me]
        self._turn += 1
        if not others and not self._bootstrap:
            return False
        address = "" if others else self._bootstrap[self._turn % len(self._bootstrap)]
        try:
            if others:
                node = others[self._turn % len(others)]
                data = await self._transport.call(node, METHOD, b"?", timeout_ms=CALL_TIMEOUT_MS)
            else:
                data = await call_unknown(
                    self._transport.me, self._cluster_id, address, METHOD, timeout_ms=CALL_TIMEOUT_MS
                )
            rows = decode_rows(data)
        except (TidelogError, aio.AioRpcError) as error:
            level = logging.INFO if _may_pass(error) else logging.WARNING
            LOGGER.log(level, "no list of controllers yet: %s%s", f"{address}: " if address else "", _reason(error))
            return False
        self.learn(rows)
        return bool(rows)


def _may_pass(error: BaseException) -> bool:
    """Returns whether a later attempt may succeed. One to a controller of another cluster never does."""
    if isinstance(error, aio.AioRpcError):
        return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    return not isinstance(error, WrongClusterError)


def _reason(error: BaseException) -> str:
    if isinstance(error, aio.AioRpcError):
        status: grpc.StatusCode = error.code()
        return f"{status.name}: {error.details()}"
    return str(error)
