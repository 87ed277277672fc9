"""A group under faults, in the simulator: every record is handled, in order, and none is skipped by a commit."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from support.clients.cluster import BROKERS
from support.clients.consumers import ConsumerWorld, Program

from tidelog.client.consumer.errors import CommitFailedError
from tidelog.client.record import ConsumerRecord, TopicPartition
from tidelog.model.errors import TidelogError
from tidelog.model.ids import NodeId

PARTITIONS, RECORDS = 6, 60


class Member:
    """Handles one record after the other and commits it; notes what it did, also what nobody may hear of any more."""

    def __init__(self, world: ConsumerWorld, handled: list[tuple[int, int]], *, is_auto: bool) -> None:
        self.program: Program = world.consumer(
            "g", enable_auto_commit=is_auto, auto_commit_interval_ms=200, max_poll_records=7
        )
        self._handled = handled
        self._mine: dict[int, int] = {}
        self.skips: list[str] = []

        async def work() -> None:
            consumer = self.program.consumer
            await consumer.subscribe(["t"], on_assigned=self._begin, on_revoked=self._forget, on_lost=self._forget)
            async for record in consumer:
                self._note(record)
                await asyncio.sleep(0.01)
                if is_auto:
                    continue
                try:
                    await consumer.commit()
                except CommitFailedError:
                    continue  # others have it now
                except TidelogError as error:
                    if not error.retriable:
                        raise

        self.program.task = self.program.machine.spawn(work())

    def _begin(self, names: list[TopicPartition]) -> None:
        for name in names:
            self._mine.pop(name.partition, None)

    def _forget(self, names: list[TopicPartition]) -> None:
        self._begin(names)

    def _note(self, record: ConsumerRecord) -> None:
        """int-poll-skip and int-nonmonotonic-poll: within one ownership offsets follow each other."""
        before = self._mine.get(record.partition)
        if before is not None and record.offset != before + 1:
            self.skips.append(f"{record.partition}: {record.offset} after {before}")
        self._mine[record.partition] = record.offset
        self._handled.append((record.partition, record.offset))


@pytest.mark.parametrize("is_auto", [False, True], ids=["commit", "auto-commit"])
@pytest.mark.parametrize("seed", range(3))
def test_a_group_handles_every_record_whatever_happens_to_it(seed: int, is_auto: bool) -> None:
    with ConsumerWorld(100 + seed) as world:
        random = Random(seed)
        world.make_topic("t", partitions=PARTITIONS)
        handled: list[tuple[int, int]] = []
        members = [Member(world, handled, is_auto=is_auto) for _ in range(3)]
        dead: list[Member] = []
        for round_ in range(6):
            world.fill("t", dict.fromkeys(range(PARTITIONS), RECORDS // 6), first=round_ * (RECORDS // 6))
            fault = random.randrange(5)
            if fault == 0:
                victim = members.pop(random.randrange(len(members)))
                victim.program.kill()
                dead.append(victim)
                members.append(Member(world, handled, is_auto=is_auto))
            elif fault == 1:
                victim = random.choice(members)
                victim.program.cut_off()
                world.world.run_for(random.uniform(0.5, 6))
                world.network.heal()
            elif fault == 2:
                broker = NodeId(random.choice(BROKERS))
                world.kill(broker)
                world.world.run_for(random.uniform(0.5, 4))
                world.start_brokers(broker)
            elif fault == 3:
                for member in members:
                    for broker_id in BROKERS:
                        world.network.cut_streams(member.program.node_id, NodeId(broker_id))
            else:
                victim = members.pop(0)
                victim.program.stop()
                dead.append(victim)
                members.append(Member(world, handled, is_auto=is_auto))
            world.world.run_for(random.uniform(0.2, 2))
        wanted = {(partition, offset) for partition in range(PARTITIONS) for offset in range(RECORDS)}
        world.until(lambda: wanted <= set(handled), timeout=90)
        assert [skip for member in [*members, *dead] for skip in member.skips] == []

        # What is committed was handled: nobody who begins now misses anything.
        asker = world.consumer("g")  # no member: a question of its own

        def is_committed() -> bool:
            names = [TopicPartition("t", number) for number in range(PARTITIONS)]
            found = asker.run(lambda consumer: consumer.committed(*names))
            return all(one is not None and one.offset == RECORDS for one in found.values())

        for _ in range(40):
            if is_committed():
                break
            world.world.run_for(0.5)
        assert is_committed()
