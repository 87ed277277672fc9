"""Three Raft processes on loopback, and a client that speaks to them. For the cluster tests and the failover bench."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
from raft_node import CLUSTER_ID, format_directories

from tidelog.model.errors import RemoteError, TidelogError, TransportError
from tidelog.model.ids import NodeId
from tidelog.rpc.grpc.transport import GrpcTransport
from tidelog.server.local_nodes import free_ports

NODES = (NodeId(1), NodeId(2), NodeId(3))
CLIENT = NodeId(99)
CALL_TIMEOUT_MS = 1_000
RETRY_S = 0.005


class RaftCluster:
    """The processes. `async with` formats their directories, starts the client and ends everything at the end."""

    program = Path(__file__).with_name("raft_node.py")

    def __init__(self, path: Path) -> None:
        self.path = path
        ports = free_ports(len(NODES))
        self.addresses = {node: f"127.0.0.1:{port}" for node, port in zip(NODES, ports, strict=True)}
        self.processes: dict[NodeId, subprocess.Popen[bytes]] = {}
        self.client = GrpcTransport(CLIENT, CLUSTER_ID, "127.0.0.1:0")
        self.leader: NodeId | None = None
        self.acknowledged: dict[int, bytes] = {}

    async def __aenter__(self) -> RaftCluster:
        await format_directories({node: (self.data(node), address) for node, address in self.addresses.items()})
        await self.client.start()
        for node, address in self.addresses.items():
            self.client.set_address(node, address)
        return self

    async def __aexit__(self, *_: object) -> None:
        for node in list(self.processes):
            self.kill(node)
        await self.client.close()

    def data(self, node: NodeId) -> Path:
        return self.path / f"data{node}"

    def move(self, node: NodeId) -> None:
        """From its next start on this node listens elsewhere; the others do not learn of it."""
        self.addresses[node] = f"127.0.0.1:{free_ports(1)[0]}"
        self.client.set_address(node, self.addresses[node])

    def start(self, *nodes: NodeId) -> None:
        for node in nodes or NODES:
            with (self.path / f"{node}.log").open("ab") as log:
                self.processes[node] = subprocess.Popen(
                    [sys.executable, str(self.program), str(node), str(self.data(node)), self.addresses[node]],
                    # Programs import their neighbours, and `make` keeps a program's own folder off the path.
                    env={**os.environ, "PYTHONPATH": str(self.program.parent)},
                    stderr=log,
                    stdout=log,
                )

    def output(self, node: NodeId) -> str:
        return (self.path / f"{node}.log").read_text(encoding="utf-8")

    def kill(self, node: NodeId) -> None:
        process = self.processes.pop(node)
        process.kill()
        process.wait()

    def freeze(self, node: NodeId) -> None:
        os.kill(self.processes[node].pid, signal.SIGSTOP)

    def thaw(self, node: NodeId) -> None:
        os.kill(self.processes[node].pid, signal.SIGCONT)

    async def stop(self, node: NodeId, *, timeout_s: float) -> int:
        """SIGTERM, and the exit code."""
        process = self.processes.pop(node)
        process.terminate()

        async def has_ended() -> bool:
            return process.poll() is not None

        try:
            await self.until(has_ended, timeout_s=timeout_s)
        finally:
            process.kill()
            process.wait()
        return int(process.returncode)

    async def propose(self, value: bytes, *, timeout_s: float, without: NodeId | None = None) -> float:
        """Until it is acknowledged by a leader; returns when that was (`time.monotonic`). A value whose fate is not
        known is proposed again: it may be there twice."""
        order = itertools.cycle([node for node in NODES if node != without])
        target = self.leader if self.leader not in (None, without) else next(order)
        async with asyncio.timeout(timeout_s):
            while True:
                assert target is not None
                try:
                    offset = await self.client.call(target, "propose", value, timeout_ms=CALL_TIMEOUT_MS)
                    self.leader = target
                    self.acknowledged[int(offset)] = value
                    return time.monotonic()
                except RemoteError as error:
                    reported = error.facts.get("leader")
                    target = NodeId(reported) if isinstance(reported, int) and reported != without else next(order)
                except TransportError:
                    target = next(order)
                await asyncio.sleep(RETRY_S)

    async def ask(self, node: NodeId, method: str, request: bytes = b"") -> Any:
        return msgpack.unpackb(await self.client.call(node, method, request, timeout_ms=CALL_TIMEOUT_MS))

    async def values(self, node: NodeId) -> dict[int, bytes]:
        return dict(await self.ask(node, "values", b"0"))

    async def until(self, condition: Callable[[], Any], *, timeout_s: float) -> None:
        """Wait for an async condition."""
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    if await condition():
                        return
                except TidelogError:
                    pass
                await asyncio.sleep(0.02)

    async def until_has(self, node: NodeId, wanted: dict[int, bytes], *, timeout_s: float) -> None:
        """This node has applied these values, each at its offset."""

        async def has_them() -> bool:
            return (await self.values(node)).items() >= wanted.items()

        await self.until(has_them, timeout_s=timeout_s)

    async def until_all_have_all(self, *, timeout_s: float) -> None:
        """Every node has applied every acknowledged value, at its offset."""
        for node in NODES:
            await self.until_has(node, dict(self.acknowledged), timeout_s=timeout_s)

    async def fail_over(self, value: bytes, disable: Callable[[NodeId], None], *, timeout_s: float) -> float:
        """Disable the leader; seconds until another one has acknowledged a proposal."""
        victim = self.leader
        assert victim is not None, "a proposal tells who leads"
        disable(victim)
        began = time.monotonic()
        return await self.propose(value, timeout_s=timeout_s, without=victim) - began
