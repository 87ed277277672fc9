"""Where a consumer goes on, as the sources have it, in the simulator: what is lost, what comes twice, what is
reported."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from support.clients.consumers import ConsumerWorld, Program, SimConsumer
from support.clients.producers import SimProducer
from support.clients.records import each, some, stored
from support.groups.fake_coordinator import FakeGroups

from tidelog.client.cluster import ClusterClient
from tidelog.client.consumer.errors import NoOffsetForPartitionError
from tidelog.client.offsets import delete_records
from tidelog.client.record import ConsumerRecord, OffsetAndMetadata, TopicPartition
from tidelog.coordinator.records import OffsetValue, decode_key, decode_value
from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.model.group_errors import CoordinatorLoadingError
from tidelog.model.ids import NodeId, PartitionId
from tidelog.world.simulated.faults import Latency

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


def commit_and_die(world: ConsumerWorld, offset: int, *, after: int) -> None:
    """A member that has been given so many records, says `offset`, and is killed."""
    one = world.consumer("g", enable_auto_commit=False)

    async def work(consumer: SimConsumer) -> None:
        async for record in each(consumer, "t"):
            if record.offset == after - 1:
                break
        await consumer.commit({T0: offset})

    one.run(work)
    one.kill()


@pytest.mark.requirement("a:C-14")
def test_committed_offsets_are_records_of_a_topic() -> None:
    with ConsumerWorld(63) as world:
        world.make_topic("t")
        world.fill("t", {0: 10})
        commit_and_die(world, 7, after=7)

        async def look(client: ClusterClient) -> list[tuple[str, PartitionId | None, int]]:
            rows = [record for records in (await stored(client, "__consumer_offsets")).values() for record in records]
            pairs = [(decode_key(row.key), decode_value(row.value)) for row in rows if row.key and row.value]
            return [
                (key.group, key.partition, value.offset)
                for key, value in pairs
                if key and isinstance(value, OffsetValue)
            ]

        (place,) = world.run(lambda client: client.topic("t")).partitions
        assert world.run(look) == [("g", place, 7)]


@pytest.mark.requirement("a:T-11", "b:D-14")
@pytest.mark.parametrize(("offset", "wanted"), [(4, range(4, 20)), (10, range(10, 20)), (15, range(15, 20))])
def test_what_is_committed_too_early_is_missed_and_what_too_late_comes_again(offset: int, wanted: range) -> None:
    with ConsumerWorld(64) as world:
        world.make_topic("t")
        world.fill("t", {0: 20})
        commit_and_die(world, offset, after=10)
        two = world.consumer("g").start("t")
        world.until(lambda: bool(two.records and two.records[-1].offset == 19))
        assert [record.offset for record in two.records] == list(wanted)


@pytest.mark.requirement("a:T-12", "b:D-17")
def test_a_committed_offset_that_retention_has_passed_is_reset_as_the_program_says() -> None:
    with ConsumerWorld(65) as world:
        world.make_topic("t")
        world.fill("t", {0: 20})
        commit_and_die(world, 5, after=5)

        async def age(client: ClusterClient) -> None:
            topic = await client.topic("t")
            await delete_records(client, [topic], {topic.partitions[0]: 12})

        world.run(age)

        async def none(consumer: SimConsumer) -> None:
            await consumer.subscribe("t")
            with pytest.raises(NoOffsetForPartitionError, match="outside of the log, and auto_offset_reset is 'none'"):
                await some(consumer, 1)
            await consumer.close()

        world.consumer("g", auto_offset_reset="none").run(none)

        async def latest(consumer: SimConsumer) -> None:
            await consumer.subscribe("t")
            while not await consumer.assignment():
                await consumer.poll(0.1)
            await consumer.poll(2.0)
            assert await consumer.position(T0) == 20
            await consumer._close(10, is_processed=False)

        world.consumer("g", auto_offset_reset="latest", enable_auto_commit=False).run(latest)
        two = world.consumer("g", auto_offset_reset="earliest").start("t")
        world.until(lambda: len(two.records) == 8, timeout=30)
        assert [record.offset for record in two.records] == list(range(12, 20))


def killed_after(world: ConsumerWorld, seconds: float, start: Callable[[], Program]) -> Program:
    one = start()
    world.until(lambda: bool(one.records), timeout=30)
    world.world.run_for(seconds)
    one.kill()
    return one


@pytest.mark.requirement("b:D-13")
def test_a_crash_between_automatic_commits_repeats_what_was_handled_since_the_last() -> None:
    """A rebalance alone repeats nothing: what is given up is committed first."""
    with ConsumerWorld(66) as world:
        world.make_topic("t")
        world.fill("t", {0: 200})

        async def work(_: ConsumerRecord) -> None:
            await asyncio.sleep(0.1)

        def start() -> Program:
            return world.consumer("g", auto_commit_interval_ms=5_000).start("t", each=work)

        one = killed_after(world, 8.0, start)  # 3 s after the first commit, about
        found = world.consumer("g").run(lambda consumer: consumer.committed(T0))[T0]
        assert found is not None
        two = start()
        world.until(lambda: bool(two.records), timeout=30)
        assert two.records[0].offset == found.offset
        repeated = len(one.records) - found.offset
        assert 20 <= repeated <= 45, "10 a second"
        two.stop()
        last = two.records[-1].offset
        three = start()
        world.until(lambda: bool(three.records), timeout=30)
        assert three.records[0].offset in (last, last + 1), "at most the one in hand"


@pytest.mark.requirement("b:D-36", "b:J-01", "b:J-02", "b:J-03")
@pytest.mark.parametrize("is_saved_first", [True, False], ids=["at most once", "at least once"])
def test_a_crash_between_saving_and_processing_loses_or_repeats(is_saved_first: bool) -> None:
    with ConsumerWorld(67) as world:
        world.make_topic("t")
        world.fill("t", {0: 30})
        processed: list[int] = []

        async def work(program: Program, *, crashes_at: int) -> None:
            async for record in each(program.consumer, "t"):
                program.records.append(record)
                steps: list[Callable[[], object]] = [
                    lambda record=record: program.consumer.commit({T0: record.offset + 1}),  # type: ignore[misc]
                    lambda record=record: processed.append(record.offset),  # type: ignore[misc]
                ]
                for number, step in enumerate(steps if is_saved_first else reversed(steps)):
                    if number and record.offset == crashes_at:
                        await asyncio.Event().wait()  # here it dies
                    done = step()
                    if done is not None:
                        await done  # type: ignore[misc]

        one = world.consumer("g", enable_auto_commit=False)
        one.task = one.machine.spawn(work(one, crashes_at=11))
        world.until(lambda: len(one.records) == 12)
        world.world.run_for(2)
        one.kill()
        two = world.consumer("g", enable_auto_commit=False)
        two.task = two.machine.spawn(work(two, crashes_at=-1))
        world.until(lambda: bool(processed) and processed[-1] == 29, timeout=30)
        if is_saved_first:
            assert processed == [*range(11), *range(12, 30)], "11 is lost, and nothing comes twice"
        else:
            assert processed == [*range(12), *range(11, 30)], "11 comes twice, and nothing is lost"


@pytest.mark.requirement("b:D-15", "b:O-04")
def test_a_commit_that_failed_is_counted_and_never_stored_after_a_later_one() -> None:
    with ConsumerWorld(68) as world:
        world.make_topic("t")
        world.fill("t", {0: 5})
        fake = FakeGroups(world)
        (place,) = world.run(lambda client: client.topic("t")).partitions
        fake.deal({place: "t"})
        reported: list[tuple[int, ErrorCode | None]] = []

        def callback(error: TidelogError | None, offsets: dict[TopicPartition, OffsetAndMetadata]) -> None:
            reported.append((offsets[T0].offset, None if error is None else error.code))

        one = world.consumer("g", enable_auto_commit=False)

        async def work(consumer: SimConsumer) -> None:
            await consumer.subscribe("t")
            await some(consumer, 5)
            world.network.slow_down(NodeId(fake.broker), one.node_id, Latency(0.5, 0.5))
            fake.script("commit_offsets", CoordinatorLoadingError("loading"))
            await consumer.commit_async({T0: 2_000}, callback)
            await asyncio.sleep(0.1)
            await consumer.commit_async({T0: 3_000}, callback)  # the answer to the first is still on its way
            while len(reported) < 2:
                await consumer.poll(0.1)
            assert reported == [(2_000, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS), (3_000, None)]
            await consumer.poll(3.0)
            assert [row.offsets[0].offset for row in fake.requests("commit_offsets")] == [2_000, 3_000], "not again"
            assert fake.stored["t", 0].offset == 3_000
            figures = consumer.metrics()
            assert figures["commit_failures"] == 1
            await consumer.close()

        one.run(work)


@pytest.mark.requirement("b:D-18")
def test_a_record_that_is_larger_than_a_fetch_is_read_all_the_same() -> None:
    with ConsumerWorld(69) as world:
        world.make_topic("t", partitions=2)

        async def write(_: ClusterClient) -> None:
            async with SimProducer(world) as producer:
                for size in (10, 200_000, 10):
                    await producer.send_and_wait("t", b"x" * size, partition=0)

        world.run(write)
        world.fill("t", {1: 3})

        async def read(consumer: SimConsumer) -> None:
            await consumer.assign([T0, T1])
            found = await some(consumer, 6)
            assert [len(record.value) for record in found if record.partition == 0] == [10, 200_000, 10]
            assert [record.offset for record in found if record.partition == 1] == [0, 1, 2]
            await consumer.close()

        world.consumer(max_partition_fetch_bytes=1_000, fetch_max_bytes=1_000).run(read)


@pytest.mark.requirement("a:X3-35")
def test_offsets_of_an_empty_group_expire_and_those_of_members_do_not() -> None:
    with ConsumerWorld(70) as world:
        world.make_topic("t")
        world.fill("t", {0: 5})
        for key, value in (("offsets.retention.minutes", "1"), ("offsets.retention.check.interval.ms", "1000")):
            setting = ConfigChange(key=key, operation="set", value=value)
            change = ResourceChange(resource_type="cluster", changes=(setting,))
            (done,) = world.ask(AlterConfigs(resources=(change,))).items
            assert done.error is None, done
        one = world.consumer("g", enable_auto_commit=False)

        async def read(consumer: SimConsumer) -> None:
            await consumer.subscribe("t")
            await some(consumer, 5)
            await consumer.commit()

        one.run(read)
        asker = world.consumer("g")

        def committed() -> int | None:
            found = asker.run(lambda consumer: consumer.committed(T0))[T0]
            return None if found is None else found.offset

        world.world.run_for(80)
        assert committed() == 5, "it has a member, which has committed nothing for longer than that"
        one.stop()
        world.world.run_for(50)
        assert committed() == 5
        world.world.run_for(15)
        assert committed() is None
