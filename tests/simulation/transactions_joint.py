"""Joint transactions: an owner commits batches that members write on other machines, each with a token.

Owner       asks for parts of a batch, chooses one report for each part, and commits their members with the number of
            the batch as token; prepares now and then. After a restart the token says where to go on; sometimes it
            does not ask, and does the batch again
Worker      a member: writes its part of a batch; some attempts are late or repeated, and named by nobody
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from simulation.cluster import Context
from simulation.transactions_clients import (
    CALL_S,
    CLOSE_S,
    GivenUpError,
    Run,
    StationProducer,
    closed,
    committed,
    place_of,
)
from tidelog.model.errors import TidelogError

HASTE = 0.3
"""How often an owner does not wait for the answer to a commit."""
ROWS = 9
"""Of a batch. They do not depend on how many tasks write them."""
FORGETFUL = 0.3
"""How often an owner does a batch again without a look at the token."""


@dataclass(slots=True, eq=False)
class Task:
    """A part of a batch, for the workers."""

    owner: str
    rows: range
    attempts: int
    """How many workers still take it."""
    reports: list[Report] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Report:
    """A worker has written its part, under this member id."""

    attempt: str
    member: int


@dataclass(slots=True, eq=False)
class Attempt:
    """A transaction of the owner."""

    name: str
    members: tuple[int, ...] = ()
    is_prepared: bool = False
    """It may be."""


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
    taken_over: int = 0
    """Prepared transactions of former lives."""
    repeated: int = 0
    """Batches that were done again, and had been committed before."""
    tasks: list[Task] = field(default_factory=list)
    _lives: int = 0
    _transactions: int = 0
    _unknown: list[Attempt] = field(default_factory=list)
    """Attempts of the current batch whose outcome is not known; at most one of them is committed."""

    async def run(self, context: Context) -> None:
        context.app = self
        self.busy = 1
        await self.run_of.are_topics_made()
        while True:
            if self.is_stopping and not self.busy:
                await asyncio.sleep(0.1)
                continue
            self.busy = 1
            try:
                await self._live(context)
            except UnfinishedError:
                context.trace(f"j{self.number}.{self._lives} leaves a prepared transaction")
            except TidelogError as error:
                context.trace(f"j{self.number}.{self._lives} begins again: {error.code.name}: {error}")
                self.run_of.life_ended(f"j{self.number}.{self._lives}", self.owner, error)
            else:
                self.busy = 0
            await asyncio.sleep(0.05 if self.run_of.is_steady else self.draw.uniform(0.02, 1.0))

    @property
    def owner(self) -> str:
        return f"joint-{self.number}"

    async def _live(self, context: Context) -> None:
        self._lives += 1
        run = self.run_of
        producer = StationProducer(
            context, run, transactional_id=self.owner, transaction_timeout_ms=run.transactions.timeout_ms
        )
        keeps = any(attempt.is_prepared for attempt in self._unknown)
        try:
            if await producer.init_transactions(keep_prepared=keeps, timeout=CALL_S):
                await self._take_over(producer)
            is_forgetful = bool(self._unknown) and not self.is_stopping and self.draw.random() < FORGETFUL
            if not is_forgetful:
                self._learn(int(await producer.last_token() or b"0"))
            while not self.is_stopping and (run.is_steady or self.draw.random() >= run.transactions.restless):
                await self._batch(producer)
                await asyncio.sleep(self.draw.uniform(0.0, 0.3))
            if self._unknown:
                self._learn(int(await producer.last_token() or b"0"))
        finally:
            self.tasks.clear()
            await closed(producer.close(timeout=CLOSE_S))

    # Outcomes.

    def _learn(self, stored: int) -> None:
        """No transaction of a former life is open any more: the token tells what became of them."""
        if stored == self.committed_batches + 1 and self._unknown:
            self.run_of.history.tokens_found += 1
            self._was_committed()
        elif stored != self.committed_batches:
            found = f"is {stored}; {self.committed_batches} batches were committed, and {len(self._unknown)} perhaps"
            self.run_of.fail("history", f"the token of {self.owner} {found}")
        for attempt in self._unknown:
            self.run_of.history.end(attempt.name, "aborted")
        self._unknown.clear()

    def _was_committed(self) -> None:
        """One of the attempts."""
        for attempt in self._unknown:
            outcome = "committed" if len(self._unknown) == 1 else "unknown"
            self.run_of.history.end(attempt.name, outcome)
        self._unknown.clear()
        self.committed_batches += 1

    def _ended(self, attempt: Attempt, *, is_committed: bool) -> None:
        self._unknown.remove(attempt)
        self.run_of.history.end(attempt.name, "committed" if is_committed else "aborted")
        if is_committed:
            self._learn(self.committed_batches)  # one of them, and it was this one
            self.committed_batches += 1

    async def _take_over(self, producer: StationProducer) -> None:
        """What a former life has prepared is open, and belongs to this one."""
        attempt = self._unknown[-1]
        if not attempt.is_prepared:
            self.run_of.fail("history", f"{attempt.name} is open again, and was not prepared")
        self.taken_over += 1
        if self.draw.random() < 0.7:
            await self._commit(producer, attempt)
        else:
            await producer.abort_transaction(timeout=CALL_S)
            self._ended(attempt, is_committed=False)

    async def _commit(self, producer: StationProducer, attempt: Attempt) -> None:
        token = b"%d" % (self.committed_batches + 1)
        is_new = await committed(producer, self.draw, self.run_of, attempt.name, members=attempt.members, token=token)
        self._ended(attempt, is_committed=is_new)
        if not is_new:
            self.repeated += 1
            if not self._unknown:
                self.run_of.fail("history", f"{token!r} of {self.owner} is stored, and nobody has committed it")
            self._was_committed()

    # Batches.

    async def _batch(self, producer: StationProducer) -> None:
        run = self.run_of
        self._transactions += 1
        attempt = Attempt(f"j{self.number}.{self._lives}.{self._transactions}")
        await producer.begin_transaction()
        run.watch.writes(f"j{self.number}.{self._lives}", self.owner, producer.identity)
        run.history.begin(attempt.name, self.owner)
        self._unknown.append(attempt)
        tasks = self.tasks[:] = self._new_tasks()
        try:
            async with asyncio.timeout(3 * CALL_S):
                while not all(task.reports for task in tasks):  # noqa: ASYNC110 - on other machines
                    await asyncio.sleep(0.02)
            if not run.is_steady and self.draw.random() < run.transactions.aborts:
                raise GivenUpError
            chosen = [self.draw.choice(task.reports) for task in tasks]
            for report in chosen:
                run.history.part(report.attempt, attempt.name)
            attempt.members = tuple(report.member for report in chosen)
            if self.draw.random() < run.transactions.prepares:
                attempt.is_prepared = True
                await producer.prepare_transaction(timeout=CALL_S)
                if not run.is_steady and self.draw.random() < 0.3:
                    raise UnfinishedError
            await self._commit(producer, attempt)
        except UnfinishedError:
            raise
        except (TidelogError, GivenUpError, TimeoutError) as error:
            try:
                await producer.abort_transaction(timeout=CALL_S)
            except TidelogError as other:
                run.history.end(attempt.name, "unknown")
                raise other from error
            self._ended(attempt, is_committed=False)
        finally:
            self.tasks.clear()

    def _new_tasks(self) -> list[Task]:
        count, first = self.draw.choice((1, 2, 3)), self.committed_batches * ROWS
        bounds = [first + ROWS * at // count for at in range(count + 1)]
        return [Task(self.owner, range(bounds[at], bounds[at + 1]), self.draw.choice((1, 1, 2))) for at in range(count)]


class UnfinishedError(Exception):
    """The program ends, and leaves its prepared transaction to its next life."""


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
            producer = StationProducer(context, self.run_of, **self.run_of.transactions.delivery())
            try:
                while True:
                    await asyncio.sleep(self.draw.uniform(0.01, 0.05))
                    task = self._next()
                    if task is not None:
                        await self._work(producer, task)
            except TidelogError as error:
                context.trace(f"w{self.number}.{self._lives} begins again: {error.code.name}: {error}")
            finally:
                await closed(producer.close(timeout=CLOSE_S))

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
        history.begin_member(attempt)
        for number, row in enumerate(task.rows):
            topic = self.draw.choice(self.run_of.outputs)
            partition = self.draw.randrange(topic.partitions)
            history.send(attempt, number, place_of(topic.name, partition), (batch_place(task.owner), row))
            await producer.send(topic.name, f"{attempt}/{number}".encode(), partition=partition, timestamp_ms=1_000)
            if not self.run_of.is_steady and self.draw.random() < 0.05:
                await asyncio.sleep(self.draw.uniform(0.1, 2.0))
        await producer.leave_transaction(timeout=CALL_S)
        task.reports.append(Report(attempt, member))
