"""Programs with transactions: pipelines, readers of committed data, writers of their input. `transactions_joint` has
the others.

    Pipeline    reads with a group, writes outputs and commits the offsets in one transaction; aborts now and then; two
                machines may have the same transactional id, so that they fence each other
    Reader      reads committed data of all outputs
    InputWriter an idempotent producer

They use the clients that ship, and tell `TransactionHistory` what they do and see. A name of a transaction is
`machine.life.number`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from support.clients.aio_consumer import SameLoopConsumer

from simulation.broker_checker import KnownTopic
from simulation.cluster import Context
from simulation.transactions_checker import parse
from simulation.transactions_clients import (
    CALL_S,
    CLOSE_S,
    Acked,
    GivenUpError,
    Run,
    StationProducer,
    closed,
    committed,
    new_reader,
    place_of,
)
from tidelog.client.record import ConsumerRecord, GroupMetadata, TopicPartition
from tidelog.model.errors import TidelogError

GROUP, SECOND_GROUP = "etl", "etl-of-etl"


@dataclass(eq=False)
class Pipeline:
    run_of: Run
    number: int
    draw: Random
    is_second: bool = False
    """It reads the first output, and writes the others."""
    may_rest: bool = False
    """Another machine has its id too: when all is well, one of them is enough."""
    is_held: bool = False
    """It waits with the next records that it polls."""
    waiting: GroupMetadata | None = None
    """It does, as this member."""
    _lives: int = 0
    _transactions: int = 0

    async def run(self, context: Context) -> None:
        context.app, self.waiting = self, None
        await self.run_of.are_topics_made()
        while not (self.run_of.is_steady and self.may_rest):
            await self._live(context)
            await asyncio.sleep(0.05 if self.run_of.is_steady else self.draw.uniform(0.02, 1.0))
        await asyncio.Event().wait()  # a program that ends is started again

    @property
    def owner(self) -> str:
        return "second" if self.is_second else f"etl-{self.number % self.run_of.transactions.ids}"

    @property
    def _source(self) -> KnownTopic:
        return self.run_of.outputs[0] if self.is_second else self.run_of.input

    @property
    def _targets(self) -> Sequence[KnownTopic]:
        return self.run_of.outputs[1:] if self.is_second else self.run_of.outputs

    @property
    def group(self) -> str:
        return SECOND_GROUP if self.is_second else GROUP

    async def _live(self, context: Context) -> None:
        self._lives += 1
        name, run = f"t{self.number}.{self._lives}", self.run_of
        producer = StationProducer(
            context,
            run,
            transactional_id=self.owner,
            transaction_timeout_ms=run.transactions.timeout_ms,
            **run.transactions.delivery(),
        )
        consumer = new_reader(
            context,
            run,
            group=self.group,
            enable_auto_commit=False,
            session_timeout_ms=run.transactions.session_ms,
            heartbeat_interval_ms=200,
            max_poll_interval_ms=run.transactions.poll_interval_ms,
            client_id=name,
        )
        probe = new_reader(context, run)
        try:
            await consumer.subscribe([self._source.name])
            await probe.assign(partitions_of(run.outputs))
            await producer.init_transactions(timeout=CALL_S)
            while run.is_steady or self.draw.random() >= run.transactions.restless:
                await self._one(producer, consumer, probe, name)
        except TidelogError as error:
            context.trace(f"{name} begins again: {error.code.name}: {error}")
            run.life_ended(name, self.owner, error)
        finally:
            await closed(consumer.close(timeout=CLOSE_S), probe.close(timeout=CLOSE_S), producer.close(timeout=CLOSE_S))

    async def _one(
        self, producer: StationProducer, consumer: SameLoopConsumer, probe: SameLoopConsumer, life: str
    ) -> None:
        records = await consumer.poll(timeout=0.2, max_records=self.draw.choice((1, 3, 20)))
        if not records:
            return
        run, plan = self.run_of, self.run_of.transactions
        self._transactions += 1
        name = f"{life}.{self._transactions}"
        await producer.begin_transaction()
        run.watch.writes(life, self.owner, producer.identity)
        run.history.begin(name, self.owner)
        try:
            identity = await consumer.group_metadata()
            while self.is_held:
                self.waiting = identity
                await asyncio.sleep(0.005)
            self.waiting = None
            await self._process(producer, name, records)
            if not run.is_steady and self.draw.random() < plan.probes:
                run.history.read_inside(name, [parse(record.value) for record in await probe.poll(timeout=0.05)])
            offsets = _next_offsets(records)
            run.history.offsets(
                name, self.group, {place_of(at.topic, at.partition): end for at, end in offsets.items()}
            )
            if not run.is_steady and self.draw.random() < 0.1:
                await asyncio.sleep(self.draw.uniform(0.1, 2.0))
            if self.draw.random() < 0.5:
                identity = await consumer.group_metadata()
            was_member = run.watch.is_member(identity)
            await producer.send_offsets(offsets, identity, timeout=CALL_S)
            run.watch.offsets_taken(name, identity, was_member=was_member)
            if not run.is_steady and self.draw.random() < 0.1:
                await asyncio.sleep(self.draw.uniform(0.1, 1.5) * plan.timeout_ms / 1000)
            if not run.is_steady and self.draw.random() < plan.aborts:
                raise GivenUpError
            await committed(producer, self.draw, run, name)
        except (TidelogError, GivenUpError) as error:
            await self._abort(producer, name, error)
            for at, first in _first_offsets(records).items():
                await consumer.seek(at, first)
            return
        run.history.end(name, "committed")

    async def _process(self, producer: StationProducer, name: str, records: Sequence[ConsumerRecord]) -> None:
        for number, record in enumerate(records):
            topic = self.draw.choice(self._targets)
            partition = self.draw.randrange(topic.partitions)
            source = place_of(record.topic, record.partition), record.offset
            self.run_of.history.send(name, number, place_of(topic.name, partition), source)
            await producer.send(topic.name, f"{name}/{number}".encode(), partition=partition, timestamp_ms=1_000)

    async def _abort(self, producer: StationProducer, name: str, error: BaseException) -> None:
        """An abort is confirmed only if the transaction has not committed."""
        try:
            await producer.abort_transaction(timeout=CALL_S)
        except TidelogError as other:
            self.run_of.history.end(name, "unknown")
            raise other from error
        self.run_of.history.end(name, "aborted")


def _next_offsets(records: Sequence[ConsumerRecord]) -> dict[TopicPartition, int]:
    return {TopicPartition(record.topic, record.partition): record.offset + 1 for record in records}


def _first_offsets(records: Sequence[ConsumerRecord]) -> dict[TopicPartition, int]:
    return {TopicPartition(record.topic, record.partition): record.offset for record in reversed(records)}


def partitions_of(topics: Sequence[KnownTopic]) -> list[TopicPartition]:
    return [TopicPartition(topic.name, number) for topic in topics for number in range(topic.partitions)]


@dataclass(eq=False)
class Reader:
    """Its machine is not struck: it reads each place once, from start to end."""

    run_of: Run
    number: int
    positions: dict[str, int] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    """Of each place, the offset of the last record that was read."""

    async def run(self, context: Context) -> None:
        context.app = self
        run, name = self.run_of, f"r{self.number}"
        await run.are_topics_made()
        consumer, parts = new_reader(context, run), partitions_of(run.outputs)
        await consumer.assign(parts)
        while True:
            try:
                for record in await consumer.poll(timeout=0.3):
                    place = place_of(record.topic, record.partition)
                    self.last[place] = record.offset
                    run.history.saw(name, place, [(record.offset, *parse(record.value))])
                for part in parts:
                    self.positions[place_of(part.topic, part.partition)] = await consumer.position(part)
            except TidelogError as error:
                context.trace(f"{name}: {error.code.name}: {error}")
                await asyncio.sleep(0.1)


class InputWriter:
    """An idempotent producer of numbered records."""

    def __init__(self, run: Run, number: int, draw: Random, pause_s: float, acked: Acked) -> None:
        self.busy = 0
        self.is_stopping = False
        self.number = number
        self._run = run
        self._draw = draw
        self._pause_s = pause_s
        self._acked = acked
        self._lives = 0
        self._sent = 0

    async def run(self, context: Context) -> None:
        context.app = self
        self.busy = 0
        self._lives += 1
        await self._run.are_topics_made()
        producer = StationProducer(context, self._run, delivery_timeout_ms=5_000)
        topic = self._run.input
        while True:
            await asyncio.sleep(self._draw.expovariate(1 / self._pause_s))
            if self.is_stopping:
                continue
            partition, self._sent = self._draw.randrange(topic.partitions), self._sent + 1
            value = f"i{self.number}.{self._lives}/{self._sent}".encode()
            self.busy = 1
            try:
                found = await producer.send_and_wait(topic.name, value, partition=partition, timestamp_ms=1_000)
            except TidelogError as error:
                context.trace(f"an input is not stored, or is: {error.code.name}: {error}")
                self._lives += 1  # it may be stored later, behind the next ones: order is promised to each life
            else:
                self._acked(f"i{self.number}", partition, value, found.offset)
            self.busy = 0
