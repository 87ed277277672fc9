"""How a node learns where the controllers are, over real gRPC on loopback."""

import asyncio
import logging
from collections.abc import Callable

import pytest
from support.async_tests import asyncio_test

from tidelog.model.ids import NodeId
from tidelog.raft.membership import Member
from tidelog.rpc.grpc.transport import GrpcTransport
from tidelog.server.known_controllers import METHOD, KnownControllers, encode_rows

VOTER, JOINING = NodeId(1), NodeId(8)
DEADLINE_S = 30


async def start(node: NodeId, cluster_id: str, voters: list[NodeId]) -> GrpcTransport:
    """A controller that answers with these voters, each at the address of this one."""
    transport = GrpcTransport(node, cluster_id, "127.0.0.1:0")

    async def answer(_peer: NodeId, _request: bytes) -> bytes:
        endpoints = (("CONTROLLER", f"127.0.0.1:{transport.port}"),)
        return encode_rows(Member(voter, bytes(16), endpoints) for voter in voters)

    transport.serve(METHOD, answer)
    await transport.start()
    return transport


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - what changes is a list
            await asyncio.sleep(0.05)


async def join(voter: GrpcTransport, condition: Callable[[KnownControllers], bool]) -> None:
    """Runs a controller of cluster `c` that knows itself and a bootstrap server, until the condition holds."""
    joining = await start(JOINING, "c", [])
    own = [(JOINING, f"127.0.0.1:{joining.port}")]
    known = KnownControllers(joining, "c", own, [f"127.0.0.1:{voter.port}"])
    task = asyncio.create_task(known.run())
    try:
        await until(lambda: condition(known))
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await joining.close()
        await voter.close()


@asyncio_test
async def test_controller_that_knows_only_itself_asks_the_bootstrap_servers() -> None:
    await join(await start(VOTER, "c", [VOTER]), lambda known: VOTER in known.nodes())


@asyncio_test
async def test_bootstrap_server_of_another_cluster_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def is_warned(known: KnownControllers) -> bool:
        assert known.nodes() == [JOINING], "nothing is learned from another cluster"
        return any(
            record.levelno == logging.WARNING
            and "127.0.0.1:" in record.getMessage()
            and "this is node 1 of cluster other, you are of c" in record.getMessage()
            for record in caplog.records
        )

    await join(await start(VOTER, "other", [VOTER]), is_warned)
