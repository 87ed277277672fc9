"""A writer and a reader in the simulator while the network between them and the brokers does its worst."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from support.clients.cluster import BROKERS, CLIENT, ClientWorld

from tidelog.client.admin.core import AdminCore
from tidelog.client.cluster import ClusterClient
from tidelog.client.consumer.reader import Fetched, Reader
from tidelog.client.errors import DeliveryTimeoutError
from tidelog.client.history import Checker, Verdict, parse_value, value_of
from tidelog.client.offsets import EARLIEST, LATEST, list_offsets
from tidelog.client.producer.writer import Acknowledged, Writer, WriterConfig
from tidelog.log.batch import encode_columns
from tidelog.model.ids import NodeId

BATCHES = 400
PARTITIONS = 2


class Run:
    """Numbered batches in, all of them read back, and every step noted for the checker."""

    def __init__(self) -> None:
        self.checker = Checker()
        self.is_written = False
        self.retries = 0
        self.acked = 0

    async def create(self, client: ClusterClient) -> None:
        await AdminCore(client).create_topic("v", partitions=PARTITIONS, replication_factor=3)

    async def write(self, client: ClusterClient) -> None:
        writer = Writer(client, WriterConfig(delivery_timeout_ms=20_000, request_timeout_ms=5_000))
        next_number = [0] * PARTITIONS
        for index in range(BATCHES):
            partition, count = index % PARTITIONS, 1 + index % 3
            first = next_number[partition]
            next_number[partition] += count
            values: list[bytes | None] = [value_of("r", partition, first + at) for at in range(count)]
            facts = {"run": "r", "partition": partition, "first": first, "count": count}
            self.checker.feed({"event": "send", **facts})
            result = await writer.send("v", partition, encode_columns([1_000] * count, [None] * count, values))
            result.add_done_callback(lambda done, facts=facts: self.ended(facts, done))  # type: ignore[misc]
            await asyncio.sleep(0.05)
        await writer.flush()
        self.retries = writer.retries
        await writer.close()
        self.is_written = True

    def ended(self, facts: dict[str, object], done: asyncio.Future[Acknowledged]) -> None:
        error = done.exception()
        if error is None:
            self.acked += 1
            self.checker.feed({"event": "ack", **facts, "offset": done.result().base_offset})
        else:
            was_sent = not isinstance(error, DeliveryTimeoutError) or error.was_sent
            self.checker.feed({"event": "fail", **facts, "was_sent": was_sent})

    async def follow(self, client: ClusterClient) -> None:
        """Read along, through all the faults, and to the end when writing is over."""
        topic = await client.topic("v")
        reader = Reader(client)
        reader.assign_topic(topic, dict.fromkeys(topic.partitions, 0))
        while not self.is_written:
            for piece in await reader.poll(500):
                self.note(piece)
        starts = await list_offsets(client, topic, EARLIEST)
        ends = await list_offsets(client, topic, LATEST)
        while any(reader.position(place) < row.offset for place, row in ends.items()):
            for piece in await reader.poll(500):
                self.note(piece)
        for place, row in ends.items():
            facts = {"partition": place.partition, "start": starts[place].offset, "end": row.offset}
            self.checker.feed({"event": "end", "reader": "c", **facts})
        await reader.close()

    def note(self, piece: Fetched) -> None:
        rows = []
        for record in piece.records():
            found = parse_value(record.value)
            assert found is not None
            assert found[1] == piece.partition.partition
            rows.append([record.offset, found[0], found[2]])
        self.checker.feed({"event": "read", "reader": "c", "partition": piece.partition.partition, "records": rows})

    async def both(self, client: ClusterClient) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.write(client))
            group.create_task(self.follow(client))


def harm(world: ClientWorld, random: Random, run: Run) -> None:
    """One fault at a time, between the client and one broker, or of a whole broker; then a while of peace."""
    broker = NodeId(random.choice(BROKERS))
    network = world.network
    fault = random.randrange(6)
    if fault == 0:
        network.cut_streams(CLIENT, broker)
    elif fault == 1:
        network.silence_streams(CLIENT, broker)
    elif fault == 2:
        network.block(CLIENT, broker)
    elif fault == 3:
        network.block(broker, CLIENT)
    elif fault == 4:
        for other in BROKERS:
            network.cut_streams(CLIENT, NodeId(other))
    else:
        world.kill(broker)
        world.world.run_for(random.uniform(0.1, 3.0))
        world.start_brokers(broker)
    world.world.run_for(random.uniform(0.2, 3.0))
    network.heal()
    world.world.run_for(random.uniform(0.1, 1.0))


@pytest.mark.parametrize("seed", range(6))
def test_nothing_acknowledged_is_lost_doubled_or_moved(seed: int) -> None:
    with ClientWorld(seed) as world:
        run = Run()
        random = Random(seed)
        world.run(run.create)
        task = world.begin(run.both)
        while not task.done() and not run.is_written:
            harm(world, random, run)
        world.network.heal()
        world.finish(task, timeout=200)
        verdict: Verdict = run.checker.verdict()
        assert verdict.anomalies == []
        assert verdict.checked_complete
        assert run.acked > BATCHES / 2, "faults come and go: most of it is stored"
        assert world.failures == []
