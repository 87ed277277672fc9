"""Runs a coroutine with the core of a client (`ClusterClient`) on the command's own event loop.

For commands that send batches which they have encoded themselves, with a `Writer`: `produce`, `bench --raw` and
`bench failover` say why. All others use `clients.open_admin`, `Producer` and `Consumer`.
"""

import argparse
import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

from tidelog.cli.clients import bootstrap_of, client_errors, timeout_ms
from tidelog.cli.stopping import terminated_in_loop
from tidelog.client.cluster import ClusterClient
from tidelog.client.config import ClientConfig
from tidelog.client.grpc_connections import GrpcConnections
from tidelog.world.real.clock import SystemClock

Job = Callable[[ClusterClient], Awaitable[int]]


def run(options: argparse.Namespace, job: Job) -> int:
    """Runs the job against the cluster of the options. Returns its exit code."""
    return run_at(bootstrap_of(options), job, request_ms=timeout_ms(options))


def run_at(addresses: Sequence[str], job: Job, *, request_ms: int) -> int:
    with client_errors():
        return asyncio.run(_run(addresses, job, request_ms))


async def _run(addresses: Sequence[str], job: Job, request_ms: int) -> int:
    attempt_ms = min(request_ms, ClientConfig().attempt_timeout_ms)
    config = ClientConfig(request_timeout_ms=request_ms, attempt_timeout_ms=attempt_ms)
    cluster = ClusterClient(addresses, GrpcConnections(), random=random.Random(), clock=SystemClock(), config=config)
    with terminated_in_loop():
        try:
            return await job(cluster)
        finally:
            await cluster.close()
