"""`UserSide`: the half of a consumer that runs where its user is: in his thread, or on his loop.

It decodes and gives out what the core hands over, and runs his callbacks. It is written once, as coroutines that wait
for nothing but the core, by way of `way(job)`:

    tidelog.aio.Consumer    awaits them; `way` brings a job to the IO thread and awaits its end
    tidelog.Consumer        drives them by hand (`drive`): each thing that they wait for is a job, run while the thread
                            stands still

A call may be cut short (Ctrl-C, a cancelled task) at any point; `_settle`, in the next poll, makes both sides agree:

    given out, and not told yet                   told again by the next call, whichever it is
    handed over, and did not arrive               asked for again
    a change that arrived                         its callback is called, if it was not
    a change that was carried out                 confirmed, until it was heard
    a seek, a pause, an assignment                done or not: the partition goes on where the core has it
    leaving the group                             it stays
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tidelog.client.async_consumer import HANDOVER_BYTES, ConsumerCore
from tidelog.client.commits import Offsets, Told
from tidelog.client.consumer_errors import SubscriptionError
from tidelog.client.counts import read_count
from tidelog.client.hand import Deserializer, Hand
from tidelog.client.names import ConsumerOptions
from tidelog.client.rebalance import Change, Handover, Listener, Rebalance
from tidelog.client.record import ConsumerRecord, GroupMetadata, OffsetAndTimestamp, TopicPartition
from tidelog.log.columns import Columns
from tidelog.model.ids import PartitionId

LOGGER = logging.getLogger(__name__)

T = TypeVar("T")
Job = Coroutine[Any, Any, T]
Way = Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]]
_LONG_MS = 3_600_000.0
ARROW_BYTES = 16 << 20


class Asked:
    """A wait for a job, in a coroutine that is driven by hand."""

    __slots__ = ("_job",)

    def __init__(self, job: Coroutine[Any, Any, Any]) -> None:
        self._job = job

    def __await__(self) -> Generator[Coroutine[Any, Any, Any], Any, Any]:
        return (yield self._job)


def drive(work: Coroutine[Any, Any, T], run: Callable[[Coroutine[Any, Any, Any]], Any]) -> T:
    """The result of a coroutine that waits for `Asked` only; `run` does a job and gives its result."""
    try:
        job = work.send(None)
        while True:
            try:
                result = run(job)
            except BaseException as error:
                job = work.throw(error)
            else:
                job = work.send(result)
    except StopIteration as end:
        found: T = end.value
        return found


async def _call(work: Callable[..., T], *arguments: Any, **named: Any) -> T:
    return work(*arguments, **named)


def _task() -> object:
    """That of the caller, if it runs on a loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def deserializer_of(given: Any) -> Deserializer | None:
    """What a user gives, as (topic, bytes) -> value."""
    if given is None:
        return None
    method: Deserializer | None = getattr(given, "deserialize", None)
    return method if method is not None else lambda _topic, data: given(data)


def interceptors_of(interceptors: Sequence[object], name: str) -> list[Callable[..., Any]]:
    """Those of their methods that have this name."""
    return [method for one in interceptors if (method := getattr(one, name, None)) is not None]


class UserSide:
    def __init__(
        self,
        make_core: Callable[[Hand], ConsumerCore],
        options: ConsumerOptions,
        way: Way,
        now_s: Callable[[], float],
    ) -> None:
        self.options = options
        self.hand = Hand(
            deserializer_of(options.key_deserializer),
            deserializer_of(options.value_deserializer),
            checks=options.check_crcs,
            interceptors=interceptors_of(options.interceptors, "on_consume"),
        )
        self.core = make_core(self.hand)
        self.core.hear_commits(interceptors_of(options.interceptors, "on_commit"))
        self._way = way
        self._now_s = now_s
        self._listener = Listener()
        self._untold: dict[PartitionId, tuple[int, int]] = {}
        self._in_doubt: set[PartitionId] = set()  # the core may have them elsewhere than the hand
        self._due: Rebalance | None = None  # has arrived; its callback was not called yet
        self._carried: Rebalance | None = None  # its callback was called; to be confirmed
        self._is_leaving = self._has_told = False
        self.is_in_callback = self._is_gathering = False
        self.callback_task: object = None

    def now_ms(self) -> int:
        return self.core.cluster.clock.now_ms()

    async def _ask(self, job: Callable[[], Job[T]]) -> T:
        """A job of the core, on its own thread; its user is present meanwhile."""
        found: T = await self._way(self.core.visited(job))
        return found

    async def _do(self, work: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """A call of the core that does not wait."""
        return await self._ask(lambda: _call(work, *arguments, **named))

    async def _tell(self, job: Callable[[dict[PartitionId, tuple[int, int]]], Job[T]]) -> T:
        """A job that gets what was given out and not told yet."""
        self._untold |= self.hand.marks()
        marks = dict(self._untold)
        found: T = await self._ask(lambda: job(marks))
        for partition, mark in marks.items():
            if self._untold.get(partition) == mark:
                del self._untold[partition]
        return found

    def _drop(self, partitions: Iterable[PartitionId]) -> None:
        gone = set(partitions)
        self.hand.drop(gone)
        for partition in gone:
            self._untold.pop(partition, None)
        self._in_doubt -= gone

    def _doubt(self, partitions: Iterable[PartitionId]) -> None:
        """Before the core moves these: until `_drop` has dropped what the hand has of them."""
        self._in_doubt.update(partitions)
        self.hand.attention = True

    async def _settle(self) -> None:
        """After a call that was cut short. It may be cut short itself."""
        await self._stay()
        if self._in_doubt:
            doubtful = frozenset(self._in_doubt)
            await self._tell(lambda marks: _call(self.core.rewind, doubtful, marks))
            self._drop(doubtful)
        if self._carried is not None:
            await self._confirm()
        if self._due is not None:
            await self._carry_out(self._due)

    async def _stay(self) -> None:
        """If leaving was cut short."""
        if self._is_leaving:
            self._doubt(await self._do(lambda: set(self.core.positions.held)))
            await self._do(self.core.stay, is_told=self._has_told)
            self._is_leaving = self._has_told = False

    # What to read.

    async def subscribe(self, topics: Sequence[str], pattern: str, listener: Listener) -> None:
        await self._stay()
        announces = listener.on_assigned is not None
        await self._ask(lambda: self.core.subscribe(topics, pattern, announces=announces))
        self._listener = listener

    async def assign(self, partitions: Sequence[TopicPartition]) -> None:
        await self._settle()
        before = await self._do(lambda: set(self.core.positions.held))
        self._doubt(before)
        await self._tell(lambda marks: self._assign(marks, partitions))
        self._drop(before - await self._do(lambda: set(self.core.positions.held)))
        self._in_doubt -= before  # what stays was not moved

    async def _assign(self, marks: Any, partitions: Sequence[TopicPartition]) -> None:
        self.core.positions.note(marks)
        await self.core.assign(partitions)

    async def unsubscribe(self) -> None:
        await self._leave(is_done=True, timeout_ms=self.options.default_api_timeout_ms)
        await self._ask(self.core.unsubscribed)
        self._is_leaving = self._has_told = False
        self._listener = Listener()

    async def _leave(self, *, is_done: bool, timeout_ms: int) -> None:
        self._is_leaving = True
        rebalance = await self._tell(lambda marks: self.core.leaving(marks, is_done=is_done, timeout_ms=timeout_ms))
        held = await self._do(lambda: set(self.core.positions.held))
        try:
            if rebalance is not None and not self._has_told:
                self._has_told = True
                await self._call_back(rebalance)
        finally:
            self._drop(held)

    # Out.

    async def poll(self, timeout_ms: float, max_records: int | None) -> list[ConsumerRecord]:
        count = read_count(max_records, self.options.max_poll_records)
        return await self._gather(timeout_ms, lambda: self.hand.take(count)) or []

    async def poll_columns(
        self, timeout_ms: float, max_records: int | None
    ) -> list[tuple[str, int, Columns, int, int]]:
        count = read_count(max_records, 1 << 62)
        found = await self._gather(timeout_ms, lambda: self.hand.take_columns(count), bytes_max=ARROW_BYTES)
        return found or []

    async def fill(self, timeout_ms: float | None = None) -> bool:
        """Until `hand.rows` has records; False if it has none when time is up. Without a limit: however long."""
        found = bool(await self._gather(timeout_ms, self.hand.load))
        self.hand.is_one_by_one = True
        return found

    async def _gather(
        self, timeout_ms: float | None, take: Callable[[], T], *, bytes_max: int = HANDOVER_BYTES
    ) -> T | None:
        if self.is_in_callback:
            raise SubscriptionError("a rebalance callback cannot poll: return from it first")
        if self._is_gathering:
            raise SubscriptionError("another task polls this consumer: one at a time, or a consumer for each")
        self._is_gathering = True
        try:
            await self._settle()
            return await self._gather_alone(timeout_ms, take, bytes_max)
        finally:
            self._is_gathering = False

    async def _gather_alone(self, timeout_ms: float | None, take: Callable[[], T], bytes_max: int) -> T | None:
        self.run_ended_commits()
        end_s = self._now_s() + (_LONG_MS if timeout_ms is None else timeout_ms) / 1000
        while True:
            if self.hand.attention:
                await self._attend()
            if found := take():
                return found
            left_ms = _LONG_MS if timeout_ms is None else max(0.0, (end_s - self._now_s()) * 1000)
            handed = await self._tell(
                lambda marks, left_ms=left_ms: self.core.poll(  # type: ignore[misc]
                    left_ms, marks, received=self.hand.received, bytes_max=bytes_max
                )
            )
            self._arrived(handed)
            self.run_ended_commits()
            if self._due is not None:
                await self._carry_out(self._due)
            elif not handed.pieces and timeout_ms is not None:
                return None

    def _arrived(self, handed: Handover) -> None:
        """Nothing else comes before it: what has arrived is not asked for again."""
        if handed.rebalance is None:
            self.hand.put(handed.pieces, handed.number)
        else:
            hand = self.hand
            hand.received, self._due = handed.number, handed.rebalance

    async def _attend(self) -> None:
        """Carry out what is due before anything more is given out."""
        while self.hand.attention:
            self.hand.attention = False
            self.run_ended_commits()
            handed = await self._tell(lambda marks: self.core.next_change(marks, received=self.hand.received))
            if handed is None:
                continue
            self._arrived(handed)
            if self._due is not None:
                await self._carry_out(self._due)
            else:
                self.hand.attention = True

    async def _carry_out(self, rebalance: Rebalance) -> None:
        if rebalance.change is not Change.ASSIGNED:
            self._drop(rebalance.partitions)
        self._due, self._carried = None, rebalance
        try:
            await self._call_back(rebalance)
        finally:
            await self._confirm()

    async def _call_back(self, rebalance: Rebalance) -> None:
        callback = self._listener.callback(rebalance.change)
        if callback is None:
            return
        self.is_in_callback, self.callback_task = True, _task()
        try:
            waiting = callback(list(rebalance.names))
            if inspect.isawaitable(waiting):
                await waiting
        finally:
            self.is_in_callback, self.callback_task = False, None

    async def _confirm(self) -> None:
        await self._do(self.core.finished, self._carried)
        self._carried = None
        self.hand.attention = True  # there may be more

    def run_ended_commits(self) -> None:
        """Callbacks of commits, in the user's own thread."""
        ended = self.core.ended_commits
        while ended:
            ended.popleft()()

    def _close_interceptors(self) -> None:
        for close in interceptors_of(self.options.interceptors, "close"):
            try:
                close()
            except Exception:
                LOGGER.exception("an interceptor failed: close")

    # Positions.

    async def commit(self, offsets: Offsets | None, timeout_ms: int | None) -> None:
        await self._tell(lambda marks: self.core.commit(marks, offsets, timeout_ms=timeout_ms))
        self.run_ended_commits()

    async def commit_once(self, offsets: Offsets | None, told: Told | None) -> None:
        await self._tell(lambda marks: self.core.commit_once(marks, offsets, told))

    async def position(self, name: TopicPartition) -> int:
        return await self._tell(lambda marks: self.core.position(name, marks))

    async def seek(self, name: TopicPartition, offset: int, leader_epoch: int) -> None:
        held = await self._do(self.core.held, name)
        self._doubt([held.partition])
        await self._do(self.core.seek, name, offset, epoch=leader_epoch)
        self._drop([held.partition])

    async def seek_to(self, names: Sequence[TopicPartition], where: str | int) -> None:
        chosen = list(names) or sorted(await self._do(self.core.assignment))
        places = [(await self._do(self.core.held, name)).partition for name in chosen]
        self._doubt(places)
        await self._ask(lambda: self.core.seek_to(chosen, where))
        self._drop(places)

    async def seek_to_times(self, times: Mapping[TopicPartition, int]) -> None:
        for name, time_ms in times.items():
            await self.seek_to([name], time_ms)

    async def pause(self, names: Sequence[TopicPartition]) -> None:
        held = [await self._do(self.core.held, name) for name in names]
        self._doubt(one.partition for one in held)
        await self._tell(lambda marks: _call(self.core.pause, names, marks))
        self._drop([one.partition for one in held])

    async def resume(self, names: Sequence[TopicPartition]) -> None:
        await self._do(self.core.resume, names)

    # Questions.

    async def assignment(self) -> set[TopicPartition]:
        return await self._do(self.core.assignment)

    async def paused(self) -> set[TopicPartition]:
        return await self._do(self.core.paused)

    async def group_metadata(self) -> GroupMetadata:
        return await self._do(self.core.group_metadata)

    async def committed(self, names: Sequence[TopicPartition]) -> Any:
        return await self._ask(lambda: self.core.committed(names))

    async def ends(self, names: Sequence[TopicPartition], *, is_start: bool) -> dict[TopicPartition, int]:
        return await self._ask(lambda: self.core.lookups.ends(names, is_start=is_start))

    async def times(self, times: Mapping[TopicPartition, int]) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        return await self._ask(lambda: self.core.lookups.times(times))

    async def partitions_for(self, topic: str) -> list[TopicPartition]:
        return await self._ask(lambda: self.core.lookups.partitions_for(topic))

    async def metrics(self) -> dict[str, float]:
        found = await self._do(self.core.metrics)
        return {"records_consumed": self.hand.records, "bytes_consumed": self.hand.bytes, **found}

    # The end.

    async def close(self, timeout_ms: int, *, is_done: bool) -> None:
        """`is_done`: all that was given out is processed, and is committed if commits are automatic."""
        end_s = self._now_s() + timeout_ms / 1000
        try:
            await self._leave(is_done=is_done, timeout_ms=timeout_ms)
        finally:
            left_ms = max(1, int((end_s - self._now_s()) * 1000))
            try:
                await self._ask(lambda: self.core.close(timeout_ms=left_ms))
                self.run_ended_commits()
            finally:
                self._close_interceptors()
