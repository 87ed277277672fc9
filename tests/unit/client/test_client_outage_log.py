"""What a client logs about addresses that it cannot reach, and when it says that an outage is over."""

from __future__ import annotations

import asyncio
import logging
from random import Random
from typing import Any, cast

import pytest
from support.async_tests import asyncio_test

from tidelog.client.cluster import ClusterClient
from tidelog.client.config import ClientConfig
from tidelog.model.errors import UnreachableError
from tidelog.rpc.grpc.methods import method_named
from tidelog.rpc.v1 import cluster_pb2 as pb


class Addresses:
    """Connections to addresses that refuse, until a test says otherwise."""

    def __init__(self) -> None:
        self.is_up = False
        self.attempts = 0
        self.have_failed = asyncio.Event()

    async def call(self, address: str, *_request: object, timeout_ms: int) -> pb.MetadataResponse:
        self.attempts += 1
        if self.attempts == 10:
            self.have_failed.set()
        if not self.is_up:
            raise UnreachableError(f"{address}: connection refused")
        return pb.MetadataResponse()

    async def close(self) -> None: ...


def client_of(connections: Addresses, *addresses: str) -> ClusterClient:
    config = ClientConfig(bootstrap_wait_ms=30_000, retry_backoff_ms=1, retry_backoff_max_ms=2)
    return ClusterClient(addresses, cast(Any, connections), random=Random(1), clock=cast(Any, None), config=config)


def test_outage_of_several_bootstrap_addresses_ends_when_one_answers(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        connections = Addresses()
        client = client_of(connections, "a:1", "b:2")
        for _ in range(2):
            connections.is_up, connections.attempts = False, 0
            connections.have_failed.clear()
            asking = asyncio.ensure_future(client.call(method_named("Cluster", "Metadata"), pb.MetadataRequest()))
            await connections.have_failed.wait()
            connections.is_up = True
            await asking
            assert not client._outages, "nothing is out of reach any more"

    with caplog.at_level(logging.INFO, "tidelog.client"):
        asyncio.run(main())
    begins = [record for record in caplog.records if "cannot reach a:1, b:2: connection refused" in record.getMessage()]
    ends = [record for record in caplog.records if "answers again" in record.getMessage()]
    assert (len(begins), len(ends)) == (2, 2), "each outage has its own lines"


@asyncio_test
async def test_caller_that_is_cancelled_while_it_waits_for_a_cluster_ends_at_once() -> None:
    connections = Addresses()
    client = client_of(connections, "a:1")
    waiting = asyncio.ensure_future(client.refresh("orders"))
    await connections.have_failed.wait()
    waiting.cancel()
    async with asyncio.timeout(5):
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await client.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
