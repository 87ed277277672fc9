"""A whole application in the simulator, with error handling, commits and a rebalance listener of its own, while things
go wrong around it: what it has been promised is there in the end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from support.clients.cluster import BOOTSTRAP, BROKERS, SimConnections
from support.clients.consumers import ConsumerWorld, Program
from support.clients.producers import SimProducer

from tidelog.client.cluster import ClusterClient
from tidelog.client.config import ClientConfig
from tidelog.client.consumer.errors import CommitFailedError
from tidelog.client.producer.fast_path import RecordMetadata
from tidelog.client.record import ConsumerRecord, TopicPartition
from tidelog.model.errors import TidelogError
from tidelog.model.ids import NodeId
from tidelog.world.simulated import SimNode
from tidelog.world.simulated.faults import Latency
from tidelog.world.transport import Transport

PARTITIONS, WORKERS, COMMIT_EVERY = 4, 2, 5
POISON, FLAKY = 17, 13
"""Every so many-th order cannot be handled at all, or not at the first attempt."""


class Host:
    """A machine of its own, as `SimProducer` wants it."""

    def __init__(self, machine: SimNode, transport: Transport) -> None:
        self.machine = machine
        self._transport = transport

    def new_client(self, **settings: Any) -> ClusterClient:
        return ClusterClient(
            BOOTSTRAP,
            SimConnections(self._transport),
            random=self.machine.random,
            clock=self.machine.clock,
            config=ClientConfig(**settings),
        )


class Cashier:
    """Sends numbered orders one after the other; a restarted one goes on behind the last that was acknowledged."""

    def __init__(self, shop: Shop, number: int) -> None:
        self.node_id = NodeId(300 + number)
        self._shop = shop
        self._hardware = shop.world.world.machine(f"cashier-{number}")
        machine = self._hardware.boot()
        self._host = Host(machine, shop.world.network.join(machine, self.node_id))
        machine.spawn(self._work())

    async def _work(self) -> None:
        shop = self._shop
        async with SimProducer(self._host, linger_ms=5) as producer:  # type: ignore[arg-type]
            while not shop.is_over:
                number = shop.next_order
                shop.next_order += 1
                shop.sent[number] += 1

                def on_delivery(error: Exception | None, _: RecordMetadata, number: int = number) -> None:
                    (shop.acknowledged if error is None else shop.refused).add(number)

                await producer.send("orders", b"%d" % number, b"customer-%d" % (number % 50), on_delivery=on_delivery)
                await asyncio.sleep(0.02)
            await producer.flush()
        shop.is_closed = True

    def kill(self) -> None:
        self._hardware.kill()
        shop = self._shop
        shop.next_order = min(set(range(shop.next_order)) - shop.acknowledged, default=shop.next_order)


class Worker:
    """Handles orders, commits now and then and before it gives partitions up, and puts away what it cannot handle."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self.program: Program = shop.world.consumer("shop", enable_auto_commit=False, max_poll_records=20)
        consumer = self.program.consumer
        self._host = Host(self.program.machine, consumer._transport)
        self._last: dict[int, int] = {}
        self._tried: set[int] = set()
        self.program.machine.spawn(self._work())

    async def _work(self) -> None:
        consumer = self.program.consumer
        async with SimProducer(self._host) as self._letters:  # type: ignore[arg-type]
            await consumer.subscribe(
                ["orders"], on_assigned=self._assigned, on_revoked=self._revoked, on_lost=self._assigned
            )
            count = 0
            async for record in consumer:
                await self._handle(record)
                count += 1
                if count % COMMIT_EVERY == 0:
                    await self._commit()

    def _assigned(self, names: list[TopicPartition]) -> None:
        for name in names:
            self._last.pop(name.partition, None)

    async def _revoked(self, names: list[TopicPartition]) -> None:
        await self._commit()
        self._assigned(names)

    async def _commit(self) -> None:
        try:
            await self.program.consumer.commit()
        except CommitFailedError:
            self._shop.commits_refused += 1  # others have it now, and handle it again
        except TidelogError as error:
            if not error.retriable:
                raise

    async def _handle(self, record: ConsumerRecord[Any, Any]) -> None:
        before = self._last.get(record.partition)
        if before is not None and record.offset != before + 1:
            self._shop.skips.append((record.partition, before, record.offset))
        self._last[record.partition] = record.offset
        number = int(record.value)
        while True:
            try:
                self._do(number)
                break
            except ConnectionError:
                await asyncio.sleep(0.2)
            except ValueError:
                await self._letters.send_and_wait("dead", record.value)
                break
        self._shop.handled[record.partition, record.offset] += 1
        self._shop.numbers.add(number)

    def _do(self, number: int) -> None:
        if number % POISON == 0:
            raise ValueError(f"order {number} makes no sense")
        if number % FLAKY == 0 and number not in self._tried:
            self._tried.add(number)
            raise ConnectionError("the bank does not answer")


class Shop:
    def __init__(self, world: ConsumerWorld) -> None:
        self.world = world
        self.is_over = self.is_closed = False
        self.next_order = 0
        self.sent: Counter[int] = Counter()
        self.acknowledged: set[int] = set()
        self.refused: set[int] = set()
        self.numbers: set[int] = set()
        self.handled: Counter[tuple[int, int]] = Counter()
        self.skips: list[tuple[int, int, int]] = []
        self.commits_refused = 0
        world.make_topic("orders", partitions=PARTITIONS)
        world.make_topic("dead")
        self.cashiers = [Cashier(self, 1)]
        self.workers = [Worker(self) for _ in range(WORKERS)]
        self.goes_on()

    def goes_on(self) -> None:
        """Orders are taken and handled."""
        orders, handled = len(self.acknowledged), len(self.handled)
        self.world.until(lambda: len(self.acknowledged) > orders + 30 and len(self.handled) > handled + 30, timeout=120)

    def clients(self) -> list[NodeId]:
        return [self.cashiers[-1].node_id, *(worker.program.node_id for worker in self.workers)]


def leader_killed(shop: Shop) -> None:
    place = shop.world.run(lambda client: client.topic("orders")).partitions[0]
    leader = shop.world.leader(place)
    shop.world.kill(NodeId(leader))
    shop.goes_on()
    shop.world.start_brokers(leader)


def brokers_restarted(shop: Shop) -> None:
    for broker in BROKERS:
        shop.world.kill(NodeId(broker))
        shop.world.world.run_for(2)
        shop.world.start_brokers(broker)
        shop.goes_on()


def one_broker_out_of_reach(shop: Shop) -> None:
    for client in shop.clients():
        shop.world.network.block(client, NodeId(BROKERS[0]))
        shop.world.network.block(NodeId(BROKERS[0]), client)
    shop.world.world.run_for(15)
    shop.world.network.heal()


def long_way(shop: Shop) -> None:
    for client in shop.clients():
        for broker in BROKERS:
            shop.world.network.slow_down(client, NodeId(broker), Latency(0.2, 0.5))
            shop.world.network.slow_down(NodeId(broker), client, Latency(0.2, 0.5))
    shop.goes_on()
    shop.world.network.heal()


def disk_full(shop: Shop) -> None:
    machine = shop.world.world.machine(f"b{BROKERS[1]}")
    machine.disk("logs-0").fill()
    shop.goes_on()
    shop.world.kill(NodeId(BROKERS[1]))
    machine.heal()
    shop.world.start_brokers(BROKERS[1])


def disk_hangs(shop: Shop) -> None:
    machine = shop.world.world.machine(f"b{BROKERS[1]}")
    machine.disk("logs-0").begin_stall()
    shop.goes_on()
    machine.heal()


def consumers_restarted(shop: Shop) -> None:
    for number in range(WORKERS):
        worker = shop.workers.pop(0)
        if number % 2:
            worker.program.run(lambda consumer: consumer.close())
        worker.program.kill()
        shop.workers.append(Worker(shop))
        shop.goes_on()


def producers_restarted(shop: Shop) -> None:
    for number in range(3):
        for broker in BROKERS:  # the last answers do not reach it
            shop.world.network.block(NodeId(broker), shop.cashiers[-1].node_id)
        shop.world.world.run_for(0.5)
        shop.cashiers[-1].kill()
        shop.cashiers.append(Cashier(shop, 2 + number))
        shop.goes_on()


CONDITIONS = (
    leader_killed,
    brokers_restarted,
    one_broker_out_of_reach,
    long_way,
    disk_full,
    disk_hangs,
    consumers_restarted,
    producers_restarted,
)


@pytest.mark.requirement("a:X3-11", "a:S-04", "a:S-05")
@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.__name__)
def test_an_application_handles_all_that_was_acknowledged(condition: Callable[[Shop], None]) -> None:
    with ConsumerWorld(80) as world:
        shop = Shop(world)
        condition(shop)
        shop.goes_on()
        shop.is_over = True
        world.until(lambda: shop.is_closed, timeout=120)
        assert shop.refused == set(), "the time for a delivery is longer than any of this"
        assert shop.acknowledged == set(range(shop.next_order))
        world.until(lambda: shop.acknowledged <= shop.numbers, timeout=60)
        assert shop.skips == [], "within one ownership nothing is passed over"
        asker = world.consumer("shop")
        names = [TopicPartition("orders", number) for number in range(PARTITIONS)]

        for worker in shop.workers:
            worker.program.run(lambda consumer: consumer.commit())
        ends = asker.run(lambda consumer: consumer.end_offsets(*names))
        committed = asker.run(lambda consumer: consumer.committed(*names))
        assert {name: None if one is None else one.offset for name, one in committed.items()} == ends

        stored = sum(ends.values())
        again = sum(shop.sent.values()) - shop.next_order
        assert stored - shop.next_order <= again, "only what a restarted producer has sent again is there twice"
        assert (again > 0) == (condition is producers_restarted)
        assert len(shop.handled) == stored
        repeated = sum(shop.handled.values()) - stored
        # Who cannot reach the coordinator handles on, and cannot commit; the others of the group begin before that.
        most = 1_000 if condition is one_broker_out_of_reach else COMMIT_EVERY * PARTITIONS * WORKERS
        assert repeated <= most, "what was handled since a commit, at most"

        async def letters(consumer: Any) -> set[int]:
            await consumer.assign([TopicPartition("dead", 0)])
            found: set[int] = set()
            end = (await consumer.end_offsets(TopicPartition("dead", 0)))[TopicPartition("dead", 0)]
            while await consumer.position(TopicPartition("dead", 0)) < end:
                found |= {int(record.value) for record in await consumer.poll(1.0)}
            return found

        assert world.consumer().run(letters) == {number for number in shop.acknowledged if number % POISON == 0}
