"""Programs whose calls are cancelled at random points, and what must hold of them all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from random import Random
from typing import Any

from tidelog.client.record import ConsumerRecord, TopicPartition
from tidelog.model.errors import TidelogError

TOPIC = "cut"


async def cut(random: Random, call: Coroutine[Any, Any, Any], *, longest_s: float) -> tuple[bool, Any]:
    """(whether it came to its end, what it gave): cancelled after a number of steps, or a time, or not at all."""
    task = asyncio.get_running_loop().create_task(call)
    choice = random.random()
    if choice < 0.35:
        for _ in range(random.randrange(12)):
            await asyncio.sleep(0)
    elif choice < 0.75:
        await asyncio.sleep(random.random() * longest_s)
    else:
        await asyncio.wait([task], timeout=5)  # there may be nothing left to read
    for _ in range(random.choice((1, 1, 2))):
        task.cancel()
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await asyncio.wait([task])
    return (False, None) if task.cancelled() else (True, task.result())


class Reading:
    """A consumer under such calls. What it is given follows what it was given before, or begins where it was sent to by
    a seek, cut short or not; after an assignment it may also be given again what nobody had committed."""

    def __init__(self, consumer: Any, random: Random, *, partitions: int, longest_s: float, is_member: bool) -> None:
        self.consumer = consumer
        self.random = random
        self.longest_s = longest_s
        self.is_member = is_member
        self.names = [TopicPartition(TOPIC, number) for number in range(partitions)]
        self.next = dict.fromkeys(self.names, 0)
        self.also: dict[TopicPartition, set[int]] = {name: set() for name in self.names}
        self.least: dict[TopicPartition, int] = {}
        """From here on after an assignment, and not behind `next`."""
        self.committed = dict.fromkeys(self.names, 0)
        self.given = 0
        self.ended = 0
        self.wrong: list[str] = []

    def note(self, records: list[ConsumerRecord]) -> None:
        for record in records:
            name = record.topic_partition
            wanted = {self.next[name], *self.also[name]}
            least = self.least.pop(name, None)
            is_again = least is not None and least <= record.offset <= self.next[name]
            if record.offset not in wanted and not is_again:
                self.wrong.append(f"{name}: {record.offset}, not {sorted(wanted)} nor from {least} on")
            self.also[name].clear()
            self.next[name] = record.offset + 1
            self.given += 1

    async def assigned(self, names: list[TopicPartition]) -> None:
        for name in names:
            self.least[name] = min([self.committed[name], *self.also[name], self.next[name]])
        await asyncio.sleep(self.random.random() * self.longest_s / 4)

    async def revoked(self, names: list[TopicPartition]) -> None:
        await asyncio.sleep(self.random.random() * self.longest_s / 4)

    async def begin(self) -> None:
        if self.is_member:
            await self.consumer.subscribe([TOPIC], on_assigned=self.assigned, on_revoked=self.revoked)
        else:
            await self.consumer.assign(self.names)

    async def _cut(self, call: Coroutine[Any, Any, Any]) -> tuple[bool, Any]:
        is_over, found = await cut(self.random, call, longest_s=self.longest_s)
        self.ended += is_over
        return is_over, found

    async def _poll(self) -> None:
        _, records = await self._cut(
            self.consumer.poll(self.random.choice((0, 0.005, 0.2)), self.random.randrange(1, 30))
        )
        self.note(records or [])

    async def _iterate(self) -> None:
        async def some() -> None:
            count = self.random.randrange(1, 20)
            async for record in self.consumer:
                self.note([record])
                count -= 1
                if not count:
                    break

        await self._cut(some())

    async def _commit(self) -> None:
        behind = dict(self.next)
        is_over, _ = await self._cut(self.consumer.commit())
        if is_over:
            for name in await self.consumer.assignment():
                self.committed[name] = min(behind[name], *self.also[name], behind[name])

    async def _seek(self) -> None:
        name = self.random.choice(self.names)
        target = self.random.choice((self.next[name], max(0, self.next[name] - self.random.randrange(20))))
        if name not in await self.consumer.assignment():
            return
        self.also[name].add(target)
        self.committed[name] = min(self.committed[name], target)  # an automatic commit may follow it
        is_over, _ = await self._cut(self.consumer.seek(name, target))
        if is_over:
            self.also[name] = {target}
            self.next[name] = target
            self.least.pop(name, None)

    async def _pause(self) -> None:
        held = sorted(await self.consumer.assignment())
        if held:
            name = self.random.choice(held)
            await self._cut(self.consumer.pause(name))
            await self._poll()
            await self._cut(self.consumer.resume(name))

    async def _ask(self) -> None:
        held = sorted(await self.consumer.assignment())
        if not held:
            return
        name = self.random.choice(held)
        call = self.random.choice(
            (
                self.consumer.position,
                self.consumer.committed,
                self.consumer.end_offsets,
                self.consumer.beginning_offsets,
            )
        )
        if call == self.consumer.committed and not self.is_member:
            return
        await self._cut(call(name))

    async def _leave(self) -> None:
        if self.is_member:
            for name in self.names:
                self.least[name] = min([self.committed[name], *self.also[name], self.next[name]])
        is_over, _ = await self._cut(self.consumer.unsubscribe())
        if is_over or self.random.random() < 0.5:
            await self.consumer.unsubscribe()
            await self._begin_again()

    async def _begin_again(self) -> None:
        if not self.is_member:
            self.next = dict.fromkeys(self.names, 0)  # nothing is remembered for who has no group
            for name in self.names:
                self.also[name].clear()
        await self.begin()
        if self.is_member:
            for name, reported in (await self.consumer.committed(*self.names)).items():
                self.also[name].add(0 if reported is None else reported.offset)

    async def step(self) -> None:
        acts: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (10, self._poll),
            (6, self._iterate),
            (2, self._seek),
            (2, self._pause),
            (2, self._ask),
            (1, self._leave),
        ]
        if self.is_member:
            acts.append((3, self._commit))
        (chosen,) = self.random.choices([act for _, act in acts], [weight for weight, _ in acts])
        try:
            await chosen()
        except TidelogError as error:
            if "nothing to read" in str(error):  # it had been left after all
                await self._begin_again()
                return
            # A seek or a question about what was taken away meanwhile.
            if "not assigned" not in str(error) and "not a member" not in str(error):
                raise

    async def drain(self, ends: dict[TopicPartition, int]) -> None:
        """All that is left, without being cut short."""
        async with asyncio.timeout(120):
            while not await self._is_at(ends):
                await self.consumer.resume(*await self.consumer.assignment())
                self.note(await self.consumer.poll(0.2))

    async def _is_at(self, ends: dict[TopicPartition, int]) -> bool:
        """By its own word: a seek that was cut short may have brought it back."""
        if await self.consumer.assignment() != set(ends):
            return False
        return all([await self.consumer.position(name) == end for name, end in ends.items()])


class Writing:
    """A producer under such calls. Numbers go out in order: what was taken is stored once, what was cut short in `send`
    once or not at all."""

    def __init__(self, producer: Any, random: Random, *, longest_s: float) -> None:
        self.producer = producer
        self.random = random
        self.longest_s = longest_s
        self.numbers = 0
        self.taken: dict[int, Any] = {}
        self.ended = 0

    async def step(self) -> None:
        number, self.numbers = self.numbers, self.numbers + 1
        value = b"%d" % number + b" " * self.random.choice((1, 2_000))
        choice = self.random.random()
        if choice < 0.7:
            is_over, delivery = await self._cut(self.producer.send(TOPIC, value, partition=0))
            if is_over:
                self.taken[number] = delivery
        elif choice < 0.8:
            is_over, _ = await self._cut(self.producer.send_and_wait(TOPIC, value, partition=0))
            if is_over:
                self.taken[number] = None
        elif choice < 0.9:
            is_over, delivery = await self._cut(self.producer.send_many(TOPIC, values=[value], partition=0))
            if is_over:
                self.taken[number] = delivery
        elif self.taken and choice < 0.95:
            await self._cut(
                _awaited(self.random.choice([one for one in self.taken.values() if one is not None] or [_no()]))
            )
        else:
            await self._cut(self.producer.flush())

    async def _cut(self, call: Coroutine[Any, Any, Any]) -> tuple[bool, Any]:
        is_over, found = await cut(self.random, call, longest_s=self.longest_s)
        self.ended += is_over
        return is_over, found

    def check(self, stored: list[bytes]) -> None:
        numbers = [int(value) for value in stored]
        assert numbers == sorted(set(numbers)), "once each, in order"
        assert set(self.taken) <= set(numbers), "what was taken is stored"
        assert set(numbers) <= set(range(self.numbers))


async def _awaited(delivery: Any) -> Any:
    return await delivery


async def _no() -> None:
    """Nothing was taken yet."""
