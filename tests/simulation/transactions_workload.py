"""Programs with transactions: pipelines, joint transactions, readers of committed data.

    Pipeline    reads the input with a group, writes outputs and commits the offsets in one transaction; aborts now and
                then; two machines may have the same transactional id, so that they fence each other
    Owner       commits batches, each written by members on other machines, with a token; after a restart the token says
                where to go on
    Worker      a member: writes its part of a batch; some attempts are late or repeated, and named by nobody
    Reader      reads committed data of all outputs

They use the clients that ship, and tell `TransactionHistory` what they do and see. A name of a transaction is
`machine.life.number`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from support.clients.aio_consumer import SameLoopConsumer
from support.clients.producers import SameLoop

from simulation.broker_checker import KnownTopic
from simulation.cluster import Context
from simulation.groups_node import Connections
from simulation.groups_workload import new_cluster
from simulation.transactions_checker import TransactionHistory, parse
from simulation.transactions_plan import TransactionsPlan
from tidelog.client.cluster import ClusterClient
from tidelog.client.errors import TransactionTimeoutError
from tidelog.client.producer.aio import Producer
from tidelog.client.record import ConsumerRecord, TopicPartition
from tidelog.model.errors import TidelogError

GROUP = "etl"
CALL_S = 2.0
CLOSE_S = 1.0
REPEATS_MAX = 20
"""Of a commit whose answer is missing, while all is well or not; then its outcome stays unknown."""


class Run(Protocol):
    """What programs need of the simulation."""

    history: TransactionHistory
    is_steady: bool
    bootstrap: tuple[str, ...]

    @property
    def transactions(self) -> TransactionsPlan: ...

    @property
    def input(self) -> KnownTopic: ...

    @property
    def outputs(self) -> Sequence[KnownTopic]: ...

    async def are_topics_made(self) -> None: ...


class StationProducer(Producer):
    """The asyncio producer on the machine of a run."""

    def __init__(self, context: Context, bootstrap: Sequence[str], **options: Any) -> None:
        self._context = context
        self._now_s = context.node.loop.time
        self._clock_ms = context.node.clock.now_ms
        super().__init__(list(bootstrap), **options)

    def _acquire(self, owner: object) -> SameLoop:
        return SameLoop(asyncio.get_running_loop())

    def _new_random(self) -> Random:
        return self._context.node.random

    def _new_cluster(self, io: Any) -> ClusterClient:
        return new_cluster(self._context, list(self._config.bootstrap), Connections(self._context.transport))


def place_of(topic: str, partition: int) -> str:
    return f"{topic}-{partition}"


@dataclass(eq=False)
class Pipeline:
    run_of: Run
    number: int
    draw: Random
    is_over: bool = False
    _lives: int = 0
    _transactions: int = 0

    async def run(self, context: Context) -> None:
        context.app = self
        await self.run_of.are_topics_made()
        while True:
            await self._live(context)
            await asyncio.sleep(0.05 if self.run_of.is_steady else self.draw.uniform(0.02, 1.0))

    @property
    def _owner(self) -> str:
        return f"etl-{self.number % self.run_of.transactions.ids}"

    async def _live(self, context: Context) -> None:
        self._lives += 1
        name, run = f"t{self.number}.{self._lives}", self.run_of
        producer = StationProducer(
            context,
            run.bootstrap,
            transactional_id=self._owner,
            transaction_timeout_ms=run.transactions.timeout_ms,
            max_block_ms=int(CALL_S * 1000),
            delivery_timeout_ms=3_000,
            request_timeout_ms=1_500,
            linger_ms=0,
        )
        consumer = SameLoopConsumer(
            new_cluster(context, run.bootstrap, Connections(context.transport)),
            group=GROUP,
            isolation="read_committed",
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            session_timeout_ms=3_000,
            heartbeat_interval_ms=300,
            fetch_max_wait_ms=300,
            request_timeout_ms=2_000,
            client_id=name,
        )
        try:
            await consumer.subscribe([run.input.name])
            await producer.init_transactions(timeout=CALL_S)
            while run.is_steady or self.draw.random() >= run.transactions.restless:
                await self._one(producer, consumer, name)
        except TidelogError as error:
            context.trace(f"{name} begins again: {error.code.name}: {error}")
        finally:
            await _closed(consumer.close(timeout=CLOSE_S), producer.close(timeout=CLOSE_S))

    async def _one(self, producer: StationProducer, consumer: SameLoopConsumer, life: str) -> None:
        records = await consumer.poll(timeout=0.2, max_records=self.draw.choice((1, 3, 20)))
        if not records:
            return
        history, self._transactions = self.run_of.history, self._transactions + 1
        name = f"{life}.{self._transactions}"
        await producer.begin_transaction()
        history.begin(name, self._owner)
        try:
            await self._process(producer, name, records)
            offsets = _next_offsets(records)
            history.offsets(name, GROUP, {place_of(at.topic, at.partition): end for at, end in offsets.items()})
            await producer.send_offsets(offsets, await consumer.group_metadata(), timeout=CALL_S)
            if not self.run_of.is_steady and self.draw.random() < 0.1:
                await asyncio.sleep(self.draw.uniform(0.1, 1.5) * self.run_of.transactions.timeout_ms / 1000)
            if not self.run_of.is_steady and self.draw.random() < self.run_of.transactions.aborts:
                raise GivenUpError
            await committed(producer, self.draw, self.run_of)
        except (TidelogError, GivenUpError) as error:
            await self._ended_badly(producer, name, error)
            for at, first in _first_offsets(records).items():
                await consumer.seek(at, first)
            return
        history.end(name, "committed")

    async def _process(self, producer: StationProducer, name: str, records: Sequence[ConsumerRecord]) -> None:
        for number, record in enumerate(records):
            topic = self.draw.choice(self.run_of.outputs)
            partition = self.draw.randrange(topic.partitions)
            source = place_of(record.topic, record.partition), record.offset
            self.run_of.history.send(name, number, place_of(topic.name, partition), source)
            await producer.send(topic.name, f"{name}/{number}".encode(), partition=partition, timestamp_ms=1_000)

    async def _ended_badly(self, producer: StationProducer, name: str, error: BaseException) -> None:
        """Aborted for certain if the abort is confirmed, and no commit was requested."""
        is_open = isinstance(error, GivenUpError) or not isinstance(error, TransactionTimeoutError)
        try:
            await producer.abort_transaction(timeout=CALL_S)
        except TidelogError as other:
            self.run_of.history.end(name, "unknown")
            raise other from error
        self.run_of.history.end(name, "aborted" if is_open else "unknown")


class GivenUpError(Exception):
    """The program aborts."""


async def committed(producer: StationProducer, draw: Random, run: Run, **how: Any) -> bool:
    """Repeats a commit without an answer: the outcome is known at the end, or the last error is raised."""
    for attempt in range(REPEATS_MAX + 1):
        try:
            timeout = CALL_S if run.is_steady else draw.choice((0.05, 0.5, CALL_S))
            return await producer.commit_transaction(timeout=timeout, **how)
        except TransactionTimeoutError:
            if attempt == REPEATS_MAX:
                raise
    raise AssertionError("the last attempt raises")


async def _closed(*closings: Any) -> None:
    for closing in closings:
        try:
            await closing
        except TidelogError:
            continue  # what it could not end is ended by timeouts; the next life says how


def _next_offsets(records: Sequence[ConsumerRecord]) -> dict[TopicPartition, int]:
    return {TopicPartition(record.topic, record.partition): record.offset + 1 for record in records}


def _first_offsets(records: Sequence[ConsumerRecord]) -> dict[TopicPartition, int]:
    return {TopicPartition(record.topic, record.partition): record.offset for record in reversed(records)}


@dataclass(slots=True, eq=False)
class Task:
    """A part of a batch, for the workers."""

    owner: str
    batch: int
    rows: range
    attempts: int
    """How many workers still take it."""
    reports: list[Report] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker has written, under which member id."""

    attempt: str
    member: int
    sent: tuple[tuple[int, str, tuple[str, int]], ...]
    """(number, place, source)."""


ROWS = 3
"""Of a task."""


def batch_place(owner: str) -> str:
    return f"rows of {owner}"


@dataclass(eq=False)
class Owner:
    run_of: Run
    number: int
    draw: Random
    is_stopping: bool = False
    busy: int = 0
    committed_batches: int = 0
    """As the last token says."""
    tasks: list[Task] = field(default_factory=list)
    _lives: int = 0

    async def run(self, context: Context) -> None:
        context.app = self
        self.busy = 1
        await self.run_of.are_topics_made()
        while True:
            if self.is_stopping and not self.busy:
                await asyncio.sleep(0.1)
                continue
            try:
                await self._live(context)
            except TidelogError as error:
                context.trace(f"j{self.number}.{self._lives} begins again: {error.code.name}: {error}")
            await asyncio.sleep(0.05 if self.run_of.is_steady else self.draw.uniform(0.02, 1.0))

    @property
    def owner(self) -> str:
        return f"joint-{self.number}"

    async def _live(self, context: Context) -> None:
        self._lives += 1
        run = self.run_of
        producer = StationProducer(
            context,
            run.bootstrap,
            transactional_id=self.owner,
            transaction_timeout_ms=run.transactions.timeout_ms,
            max_block_ms=int(CALL_S * 1000),
            delivery_timeout_ms=3_000,
            request_timeout_ms=1_500,
        )
        self.busy = 1
        try:
            await producer.init_transactions(timeout=CALL_S)
            token = await producer.last_token()
            found = int(token or b"0")
            if found > self.committed_batches:
                run.history.tokens_found += 1
            elif found < self.committed_batches:
                raise AssertionError(
                    f"the token of {self.owner} is {found}, and {self.committed_batches} was committed"
                )
            self.committed_batches = found
            while not self.is_stopping and (run.is_steady or self.draw.random() >= run.transactions.restless):
                await self._batch(producer)
                await asyncio.sleep(self.draw.uniform(0.0, 0.3))
        finally:
            self.tasks.clear()
            await _closed(producer.close(timeout=CLOSE_S))
        self.busy = 0

    async def _batch(self, producer: StationProducer) -> None:
        run, batch = self.run_of, self.committed_batches
        name = f"j{self.number}.{self._lives}.{batch}"
        await producer.begin_transaction()
        run.history.begin(name, self.owner)
        count = self.draw.choice((1, 2, 3))
        first = batch * 3 * ROWS
        # The rows of a batch do not depend on how many tasks write them.
        bounds = [first + 3 * ROWS * at // count for at in range(count + 1)]
        tasks = [
            Task(self.owner, batch, range(bounds[at], bounds[at + 1]), self.draw.choice((1, 1, 2)))
            for at in range(count)
        ]
        self.tasks[:] = tasks
        try:
            async with asyncio.timeout(3 * CALL_S):
                while not all(task.reports for task in tasks):  # noqa: ASYNC110 - on other machines
                    await asyncio.sleep(0.02)
            if not run.is_steady and self.draw.random() < run.transactions.aborts:
                raise GivenUpError
            chosen = [self.draw.choice(task.reports) for task in tasks]
            for report in chosen:
                run.history.part(report.attempt, name)
            members = [report.member for report in chosen]
            await committed(producer, self.draw, run, members=members, token=b"%d" % (batch + 1))
        except (TidelogError, GivenUpError, TimeoutError) as error:
            self.tasks.clear()
            outcome = "unknown" if isinstance(error, TransactionTimeoutError) else "aborted"
            try:
                await producer.abort_transaction(timeout=CALL_S)
            except TidelogError as other:
                run.history.end(name, "unknown")
                raise other from error
            run.history.end(name, outcome)
            if outcome == "unknown":
                raise
            return
        self.tasks.clear()
        run.history.end(name, "committed")
        self.committed_batches = batch + 1


@dataclass(eq=False)
class Worker:
    """Its process lives on its own; who it works for knows nothing of how it ends."""

    run_of: Run
    number: int
    draw: Random
    owners: Sequence[Owner]
    _lives: int = 0
    _attempts: int = 0

    async def run(self, context: Context) -> None:
        context.app = self
        await self.run_of.are_topics_made()
        while True:
            self._lives += 1
            producer = StationProducer(
                context, self.run_of.bootstrap, max_block_ms=int(CALL_S * 1000), delivery_timeout_ms=3_000
            )
            try:
                while True:
                    await asyncio.sleep(self.draw.uniform(0.01, 0.05))
                    task = self._next()
                    if task is not None:
                        await self._work(producer, task)
            except TidelogError as error:
                context.trace(f"w{self.number}.{self._lives} begins again: {error.code.name}: {error}")
            finally:
                await _closed(producer.close(timeout=CLOSE_S))

    def _next(self) -> Task | None:
        waiting = [task for owner in self.owners for task in owner.tasks if task.attempts or not task.reports]
        if not waiting:
            return None
        task = self.draw.choice(waiting)
        task.attempts = max(0, task.attempts - 1)
        return task

    async def _work(self, producer: StationProducer, task: Task) -> None:
        self._attempts += 1
        history, attempt = self.run_of.history, f"w{self.number}.{self._lives}.{self._attempts}"
        member = await producer.join_transaction(task.owner, label=attempt, timeout=CALL_S)
        history.begin(attempt, attempt)
        sent = []
        for number, row in enumerate(task.rows):
            topic = self.draw.choice(self.run_of.outputs)
            partition = self.draw.randrange(topic.partitions)
            source = batch_place(task.owner), row
            sent.append((number, place_of(topic.name, partition), source))
            history.send(attempt, *sent[-1])
            await producer.send(topic.name, f"{attempt}/{number}".encode(), partition=partition, timestamp_ms=1_000)
            if not self.run_of.is_steady and self.draw.random() < 0.05:
                await asyncio.sleep(self.draw.uniform(0.1, 2.0))
        await producer.leave_transaction(timeout=CALL_S)
        task.reports.append(Report(attempt, member, tuple(sent)))


@dataclass(eq=False)
class Reader:
    """Reads committed data of all outputs, again and again from the start after its machine has died."""

    run_of: Run
    number: int
    positions: dict[str, int] = field(default_factory=dict)
    _lives: int = 0

    async def run(self, context: Context) -> None:
        context.app = self
        self.positions = {}
        self._lives += 1
        run = self.run_of
        await run.are_topics_made()
        consumer = SameLoopConsumer(
            new_cluster(context, run.bootstrap, Connections(context.transport)),
            isolation="read_committed",
            auto_offset_reset="earliest",
            fetch_max_wait_ms=300,
            request_timeout_ms=2_000,
        )
        name = f"r{self.number}.{self._lives}"
        parts = [TopicPartition(topic.name, number) for topic in run.outputs for number in range(topic.partitions)]
        await consumer.assign(parts)
        while True:
            try:
                for record in await consumer.poll(timeout=0.3):
                    place = place_of(record.topic, record.partition)
                    run.history.saw(name, place, [(record.offset, *parse(record.value))])
                for part in parts:
                    self.positions[place_of(part.topic, part.partition)] = await consumer.position(part)
            except TidelogError as error:
                context.trace(f"{name}: {error.code.name}: {error}")
                await asyncio.sleep(0.1)


class InputWriter:
    """An idempotent producer of numbered records."""

    def __init__(
        self, run: Run, number: int, draw: Random, pause_s: float, acked: Callable[[str, int, bytes, int], None]
    ) -> None:
        """`acked` is called with the writer's name, a partition of the input, a value and its offset."""
        self.busy = 0
        self.is_stopping = False
        self._run = run
        self.number = number
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
        producer = StationProducer(context, self._run.bootstrap, delivery_timeout_ms=5_000, request_timeout_ms=1_500)
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
            else:
                self._acked(f"i{self.number}", partition, value, found.offset)
            self.busy = 0
