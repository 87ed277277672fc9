"""A node under ten times the clients that it allows, and under clients that take all they can get: its memory stays
bounded, a well-behaved client is served meanwhile, and when they are gone nothing of them is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from support.async_tests import uvloop_test
from support.kafka.server import KafkaClient, frame, soon

import tidelog
from tidelog.rpc.kafka.messages import FETCH, METADATA
from tidelog.rpc.kafka.messages.data import FetchPartition, FetchRequest, FetchTopic
from tidelog.rpc.kafka.messages.metadata import MetadataRequest, MetadataRequestTopic
from tidelog.testing import LocalCluster

pytestmark = pytest.mark.cluster

MIB = 1 << 20
CONNECTIONS_MAX = 150
REQUESTS_MAX = 64 * MIB
TOPIC_BYTES = 24 * MIB
NAMES = 333_333
GROWTH_MAX = 450 * MIB
"""Requests in memory (64 MiB), one response of metadata (128 MiB), fetched data (the fetch limit), and what the
allocator keeps of them."""
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    settings = {"max.connections": CONNECTIONS_MAX, "queued.max.request.bytes": REQUESTS_MAX}
    with LocalCluster(1, settings=settings) as cluster:
        with tidelog.Admin(cluster.bootstrap) as admin:
            admin.create_topics([tidelog.NewTopic(name, partitions=1) for name in ("large", "small")])
        with tidelog.Producer(cluster.bootstrap) as producer:
            producer.send_many("large", values=[bytes(MIB - 1_000)] * (TOPIC_BYTES // MIB)).result()
            producer.send("small", b"first").result()
        yield cluster


class Attackers:
    """Kafka connections of clients that mean no good; all are closed at the end."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._port = cluster.ports(1).kafka
        self._clients: list[KafkaClient] = []
        self.closed = 0
        """Connections that the node closed at once."""

    async def connect(self) -> KafkaClient | None:
        try:
            client = KafkaClient(*await asyncio.open_connection("127.0.0.1", self._port))
        except ConnectionError:
            self.closed += 1
            return None
        self._clients.append(client)
        return client

    async def crowd(self) -> None:
        """Ten times as many connections as are allowed; they say nothing."""
        for _ in range(10 * CONNECTIONS_MAX):
            await self.connect()
        await asyncio.sleep(0)
        self.closed += sum(client.reader.at_eof() for client in self._clients)

    async def announce(self) -> None:
        """Requests of 32 MiB of which only the size comes."""
        for _ in range(20):
            client = await self.connect()
            if client is not None:
                client.writer.write((32 * MIB).to_bytes(4, "big"))

    async def read_slowly(self) -> None:
        """Fetches of everything, again and again, whose answers nobody reads."""
        part = FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=2**31 - 1)
        request = FetchRequest(
            max_wait_ms=0, max_bytes=2**31 - 1, topics=[FetchTopic(topic="large", partitions=[part])]
        )
        for number in range(40):
            client = await self.connect()
            if client is not None:
                client.writer.transport.pause_reading()  # type: ignore[attr-defined]
                for again in range(10):
                    client.send(FETCH, 11, 10 * number + again, request)

    async def ask_for_a_million_topics(self) -> None:
        """In three requests that come at once; each is answered, or ends its connection."""
        topics = [MetadataRequestTopic(name=f"topic-{number}") for number in range(NAMES)]
        data = frame(METADATA, 8, 1, MetadataRequest(topics=topics, allow_auto_topic_creation=False))
        clients = [await self.connect() for _ in range(3)]
        await asyncio.gather(*(self._answered(client, data) for client in clients if client is not None))

    async def _answered(self, client: KafkaClient, data: bytes) -> None:
        client.writer.write(data)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionResetError):
            async with asyncio.timeout(DEADLINE_S):
                size = int.from_bytes(await client.reader.readexactly(4), "big")
                await client.reader.readexactly(size)

    def close(self) -> None:
        for client in self._clients:
            client.writer.transport.abort()


def resident(pid: int) -> int:
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Served:
    """What the well-behaved client got while the others were there."""

    def __init__(self) -> None:
        self.records = 0
        self.slowest_s = 0.0
        self.largest = 0


@asynccontextmanager
async def well_behaved_client(cluster: LocalCluster) -> AsyncIterator[Served]:
    """Writes one record after the other, acks=all, and notes how long each takes and how large the node is."""
    served, is_over = Served(), asyncio.Event()
    pid = cluster.pid(1)

    async def write() -> None:
        async with tidelog.aio.Producer(cluster.bootstrap) as producer:
            while not is_over.is_set():
                begun_s = time.monotonic()
                async with asyncio.timeout(DEADLINE_S):
                    await (await producer.send("small", b"%d" % served.records))
                served.records += 1
                served.slowest_s = max(served.slowest_s, time.monotonic() - begun_s)
                served.largest = max(served.largest, resident(pid))

    writing = asyncio.ensure_future(write())
    try:
        yield served
        is_over.set()
        await writing
    finally:
        writing.cancel()


@pytest.mark.parametrize("attack", ["crowd", "announce", "read_slowly", "ask_for_a_million_topics"])
@uvloop_test
async def test_a_node_under_attack_serves_others_in_bounded_memory(attack: str, cluster: LocalCluster) -> None:
    before = resident(cluster.pid(1))
    async with well_behaved_client(cluster) as served:
        attackers = Attackers(cluster)
        try:
            await getattr(attackers, attack)()
            wanted = served.records + 20
            await soon(lambda: served.records >= wanted, "records are stored", timeout_s=DEADLINE_S)
        finally:
            attackers.close()
    assert served.largest - before < GROWTH_MAX, f"{(served.largest - before) / MIB:.0f} MiB more"
    if attack == "crowd":
        assert attackers.closed > 0, "the node takes no more connections than it is allowed"
    grown = (served.largest - before) / MIB
    print(f"{attack}: {served.records} records, slowest {served.slowest_s:.3f} s, {grown:.0f} MiB more")
    await _serves_kafka_clients(cluster)
    is_ready(cluster)


async def _serves_kafka_clients(cluster: LocalCluster) -> None:
    """As soon as the node has seen that the others are gone."""
    clients = Attackers(cluster)
    codes: list[int] = []
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not codes:
                client = await clients.connect()
                if client is not None:
                    client.send(METADATA, 8, 1, MetadataRequest(topics=[MetadataRequestTopic(name="small")]))
                    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionResetError):
                        _, answer = await client.response(METADATA, 8)
                        codes = [topic.error_code for topic in answer.topics]
    finally:
        clients.close()
    assert codes == [0]


def is_ready(cluster: LocalCluster) -> None:
    url = f"http://127.0.0.1:{cluster.ports(1).http}/healthz"
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as response:
        assert response.status == 200
    assert not cluster.ended()
    errors = [line for line in cluster.log(1).splitlines() if "ERROR" in line or "Traceback" in line]
    assert not errors, errors[0]
