"""Consumers in groups, in the simulator, with real coordinators: who reads what, who gives up what, and when."""

from __future__ import annotations

import asyncio
import logging

import pytest
from support.clients.cluster import BROKERS
from support.clients.consumers import ConsumerWorld, Program, SimConsumer

from tidelog.client.consumer.errors import CommitFailedError
from tidelog.client.record import ConsumerRecord, OffsetAndMetadata, TopicPartition
from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.model.ids import NodeId

ALL = {TopicPartition("t", number) for number in range(4)}


def shares(*programs: Program) -> list[int]:
    return sorted(len(one.reading) for one in programs)


def until_stable(world: ConsumerWorld, *programs: Program, timeout: float = 30) -> None:
    """All four partitions are read, each by one of them."""

    def is_stable() -> bool:
        read = [name for one in programs for name in one.reading]
        return sorted(read) == sorted(ALL) and max(shares(*programs)) - min(shares(*programs)) <= 1

    world.until(is_stable, timeout=timeout)


def heard(program: Program, what: str) -> list[TopicPartition]:
    return [name for kind, names in program.callbacks if kind == what for name in names]


@pytest.mark.requirement(
    "a:E-01", "a:E-02", "a:F-01", "a:F-02", "a:F-03", "a:F-05", "b:G-02", "b:G-04", "b:H-01", "b:H-02", "b:H-03",
    "b:H-04", "b:H-12", "b:EX-12", "b:A-15",
)  # fmt: skip
def test_members_share_the_partitions_and_those_that_stay_are_never_touched() -> None:
    with ConsumerWorld(1) as world:
        world.make_topic("t", partitions=4)
        world.fill("t", dict.fromkeys(range(4), 5))
        one = world.consumer("g1").start("t")
        until_stable(world, one)
        world.until(lambda: len(one.records) == 20)
        assert shares(one) == [4]
        two = world.consumer("g1").start("t")
        until_stable(world, one, two)
        assert shares(one, two) == [2, 2]
        # Cooperative: what stayed was neither revoked nor assigned again.
        assert len(heard(one, "revoked")) == 2
        assert set(heard(one, "revoked")) == set(heard(two, "assigned"))
        three, four = world.consumer("g1").start("t"), world.consumer("g1").start("t")
        until_stable(world, one, two, three, four)
        five = world.consumer("g1").start("t")
        world.until(lambda: five.callbacks == [("assigned", [])])
        assert shares(one, two, three, four, five) == [0, 1, 1, 1, 1]
        assert not [what for program in (one, two, three, four) for what, _ in program.callbacks if what == "lost"]
        # Another group has all of it, whatever the first one does.
        other = world.consumer("g2").start("t")
        world.until(lambda: len(other.records) == 20)
        # Each new record comes to one member of each group.
        before = sum(len(one.records) for one in (one, two, three, four, five))
        world.fill("t", dict.fromkeys(range(4), 5), first=5)
        world.until(lambda: len(other.records) == 40)
        world.until(lambda: sum(len(one.records) for one in (one, two, three, four, five)) == before + 20)
        # One leaves in order: no waiting for a session.
        at_s = world.now_s()
        four.stop()
        world.until(lambda: five.reading | one.reading | two.reading | three.reading == ALL)
        assert world.now_s() - at_s < 1.5


@pytest.mark.requirement("a:E-04", "a:E-07", "a:F-20", "a:F-22", "a:E-13", "b:H-21", "b:H-23", "b:H-27", "b:EX-14")
def test_the_next_member_goes_on_at_the_committed_offset_which_is_the_next_to_read() -> None:
    with ConsumerWorld(2) as world:
        world.make_topic("t", partitions=1)
        world.fill("t", {0: 30})
        place = TopicPartition("t", 0)
        one = world.consumer("g", enable_auto_commit=False)

        async def read(consumer: SimConsumer) -> None:
            await consumer.subscribe("t")
            assert await consumer.committed(place) == {place: None}
            got = [record async for record in _first(consumer, 10)]
            assert [record.offset for record in got] == list(range(10))
            await consumer.commit()  # in the middle of what was fetched: only what was given out
            assert (await consumer.committed(place))[place] == OffsetAndMetadata(10, "", got[-1].leader_epoch)
            assert await consumer.position(place) == 10
            # What the program names, with a text of its own.
            await consumer.commit({place: OffsetAndMetadata(5_001, "done 5000")})
            assert (await consumer.committed(place))[place] == OffsetAndMetadata(5_001, "done 5000")
            await consumer.commit({place: 7})
            reported = await consumer.group_metadata()
            assert (reported.group, reported.member_epoch) == ("g", 1)
            with pytest.raises(CommitFailedError, match="t-1 is not assigned"):
                await consumer.commit({TopicPartition("t", 1): 1})

        one.run(read)
        one.stop()
        two = world.consumer("g").start("t")
        world.until(lambda: len(two.records) == 23)
        assert [record.offset for record in two.records] == list(range(7, 30))  # 7, 8 and 9 again


async def _first(consumer: SimConsumer, count: int):  # type: ignore[no-untyped-def]
    async for record in consumer:
        yield record
        count -= 1
        if not count:
            return


@pytest.mark.requirement("a:E-05", "a:E-06", "b:H-24", "b:H-25", "b:H-26")
def test_commits_without_waiting_keep_their_order_and_call_back_in_the_programs_own_time() -> None:
    with ConsumerWorld(3) as world:
        world.make_topic("t", partitions=1)
        world.fill("t", {0: 10})
        place = TopicPartition("t", 0)
        reported: list[tuple[int, TidelogError | None]] = []

        async def work(consumer: SimConsumer) -> None:
            await consumer.subscribe("t")
            while not await consumer.poll(1.0):
                pass
            for offset in (2_000, 3_000, 4_000):
                await consumer.commit_async(
                    {place: offset}, lambda error, offsets: reported.append((offsets[place].offset, error))
                )
            assert reported == []  # not on a thread of ours
            await consumer.commit({place: 3_500})  # waits, and comes after all of them
            assert reported == [(2_000, None), (3_000, None), (4_000, None)]
            assert (await consumer.committed(place))[place] == OffsetAndMetadata(3_500)
            # What is under way when it closes comes before its goodbye.
            await consumer.commit_async(
                {place: 9}, lambda error, offsets: reported.append((offsets[place].offset, error))
            )
            await consumer.close()
            assert reported[3:] == [(9, None)]

        one = world.consumer("g", enable_auto_commit=False)
        one.run(work)

        async def look(consumer: SimConsumer) -> None:
            assert (await consumer.committed(place))[place] == OffsetAndMetadata(9)

        world.consumer("g").run(look)


@pytest.mark.case("C5")
@pytest.mark.requirement("a:E-31", "a:E-32", "a:E-50", "b:G-26", "b:G-27", "b:H-22")
def test_automatic_commits_take_only_what_the_program_has_come_back_for() -> None:
    """A crash in a handler repeats the record, however long the handler has run."""
    with ConsumerWorld(4) as world:
        world.make_topic("t", partitions=1)
        world.fill("t", {0: 20})
        place = TopicPartition("t", 0)
        stuck = asyncio.Event()

        async def each(record: ConsumerRecord) -> None:
            if record.offset == 7:
                await stuck.wait()

        one = world.consumer("g", auto_commit_interval_ms=500, max_poll_records=5).start("t", each=each)
        world.until(lambda: len(one.records) == 8)
        world.world.run_for(20)  # many intervals, all of it in the handler of record 7
        other = world.consumer("g")
        found = other.run(lambda consumer: consumer.committed(place))[place]
        assert found is not None
        assert found.offset == 7
        one.kill()
        two = world.consumer("g", auto_commit_interval_ms=500).start("t")
        world.until(lambda: len(two.records) == 13)
        assert two.records[0].offset == 7

        async def poll(consumer: SimConsumer) -> None:
            """By polls: the last one's records wait for the next."""
            await consumer.subscribe("t")
            first: list[ConsumerRecord] = []
            while not first:
                first = await consumer.poll(1.0, 4)
            await asyncio.sleep(3)
            # Where it began, and nothing of what was given out.
            assert (await consumer.committed(place))[place].offset == 0  # type: ignore[union-attr]
            second = await consumer.poll(1.0, 4)
            assert [record.offset for record in second] == [4, 5, 6, 7]
            await asyncio.sleep(3)
            assert (await consumer.committed(place))[place].offset == 4  # type: ignore[union-attr]

        world.consumer("by-polls", auto_commit_interval_ms=500).run(poll)


@pytest.mark.requirement("a:E-12", "a:F-07", "b:G-06")
def test_closing_commits_what_was_given_out_but_an_error_in_the_block_does_not() -> None:
    with ConsumerWorld(5) as world:
        world.make_topic("t", partitions=1)
        world.fill("t", {0: 10})
        place = TopicPartition("t", 0)

        async def read(consumer: SimConsumer) -> None:
            async with consumer:
                await consumer.subscribe("t")
                async for record in consumer:
                    if record.offset == 3:
                        break

        async def fail(consumer: SimConsumer) -> None:
            async with consumer:
                await consumer.subscribe("t")
                async for record in consumer:
                    if record.offset == 6:
                        raise ValueError("a handler")

        async def look(consumer: SimConsumer) -> int:
            found = (await consumer.committed(place))[place]
            assert found is not None
            return found.offset

        world.consumer("g").run(read)
        assert world.consumer("g").run(look) == 4
        with pytest.raises(ValueError, match="a handler"):
            world.consumer("g").run(fail)
        assert world.consumer("g").run(look) == 6  # record 6 comes again


@pytest.mark.requirement("a:E-08", "a:F-30", "a:F-31", "a:F-32", "a:F-32b", "b:G-14", "b:H-28", "b:EX-15")
def test_the_new_owner_hears_of_a_partition_after_the_old_one_has_given_it_up_and_nothing_is_repeated() -> None:
    with ConsumerWorld(6) as world:
        world.make_topic("t", partitions=4)
        world.fill("t", dict.fromkeys(range(4), 200))
        events: list[tuple[float, str, str, TopicPartition]] = []
        programs = [world.consumer("g", enable_auto_commit=False, max_poll_records=10) for _ in range(3)]

        def begin(number: int) -> None:
            program = programs[number]

            async def assigned(names: list[TopicPartition]) -> None:
                events.extend((world.now_s(), f"p{number}", "assigned", name) for name in names)

            async def revoked(names: list[TopicPartition]) -> None:
                await asyncio.sleep(0.7)  # the work of giving up
                await program.consumer.commit()  # all that was given out is processed: it is noted below
                events.extend((world.now_s(), f"p{number}", "revoked", name) for name in names)

            async def work() -> None:
                await program.consumer.subscribe(["t"], on_assigned=assigned, on_revoked=revoked)
                async for record in program.consumer:
                    program.records.append(record)
                    await asyncio.sleep(0.005)

            program.task = program.machine.spawn(work())

        for number in range(3):
            begin(number)
            world.world.run_for(1.2)
        world.until(lambda: sum(len(one.records) for one in programs) >= 800, timeout=60)
        owner: dict[TopicPartition, str] = {}
        for _, who, what, name in sorted(events, key=lambda event: event[0]):
            if what == "assigned":
                assert name not in owner, f"{name} was assigned to {who} while {owner.get(name)} had it"
                owner[name] = who
            else:
                assert owner.pop(name) == who
        assert len([event for event in events if event[2] == "revoked"]) >= 2
        given = sorted((one.partition, one.offset) for program in programs for one in program.records)
        assert given == [(partition, offset) for partition in range(4) for offset in range(200)]


@pytest.mark.requirement("a:F-07", "b:H-06")
def test_a_killed_members_partitions_flow_elsewhere_within_three_seconds() -> None:
    with ConsumerWorld(7) as world:
        world.make_topic("t", partitions=4)
        one, two = world.consumer("g").start("t"), world.consumer("g").start("t")
        until_stable(world, one, two)
        one.kill()
        at_s = world.now_s()
        world.until(lambda: two.reading == ALL)
        assert 1.5 < world.now_s() - at_s < 3


@pytest.mark.requirement("a:E-25", "a:E-26", "b:G-23", "b:G-24")
def test_a_handler_that_takes_long_keeps_its_partitions_and_a_revocation_waits_for_it() -> None:
    with ConsumerWorld(8) as world:
        world.make_topic("t", partitions=4)
        world.fill("t", dict.fromkeys(range(4), 3))
        hurry = asyncio.Event()

        async def each(record: ConsumerRecord) -> None:
            if record.offset == 1:
                await hurry.wait()

        one = world.consumer("g", session_timeout_ms=6_000, heartbeat_interval_ms=1_000).start("t", each=each)
        until_stable(world, one)
        world.until(lambda: bool(one.records and one.records[-1].offset == 1))
        epoch = one.run(lambda consumer: consumer.group_metadata()).member_epoch
        world.world.run_for(24)  # four sessions
        assert one.run(lambda consumer: consumer.group_metadata()).member_epoch == epoch
        assert [what for what, _ in one.callbacks] == ["assigned"]
        two = world.consumer("g").start("t")
        world.world.run_for(10)
        assert [what for what, _ in one.callbacks] == ["assigned"]
        assert two.reading == set()  # its share is being worked on
        hurry.set()
        until_stable(world, one, two)
        assert len(heard(one, "revoked")) == 2
        world.until(lambda: len({(r.partition, r.offset) for p in (one, two) for r in p.records}) == 12)
        # Commits are automatic: what was handled before it was given up is not handled again.
        assert len(one.records) + len(two.records) == 12


@pytest.mark.requirement("a:F-33", "a:E-27", "b:G-05", "b:EX-22")
def test_who_does_not_poll_leaves_the_group_says_why_and_joins_again_with_the_next_poll(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    with ConsumerWorld(9) as world:
        world.make_topic("t", partitions=4)
        world.fill("t", dict.fromkeys(range(4), 3))
        stuck = asyncio.Event()

        async def each(record: ConsumerRecord) -> None:
            if not stuck.is_set():
                await stuck.wait()

        one = world.consumer("g", max_poll_interval_ms=8_000).start("t", each=each)
        world.until(lambda: len(one.records) == 1)
        at_s = world.now_s()
        world.world.run_for(3)
        two = world.consumer("g").start("t")
        world.until(lambda: two.reading == ALL)
        assert 8 < world.now_s() - at_s < 12
        assert "max_poll_interval_ms is 8000" in caplog.text
        with pytest.raises(CommitFailedError, match="max_poll_interval_ms"):
            one.run(lambda consumer: consumer.commit())
        with pytest.raises(CommitFailedError, match="max_poll_interval_ms"):  # nothing would fence its offsets
            one.run(lambda consumer: consumer.group_metadata())
        assert [what for what, _ in one.callbacks] == ["assigned"]
        stuck.set()
        until_stable(world, one, two)
        assert [what for what, _ in one.callbacks][:3] == ["assigned", "lost", "assigned"]
        world.until(lambda: len({(r.partition, r.offset) for p in (one, two) for r in p.records}) == 12)
        # Only the record in hand is handled twice: the rest of what was fetched was dropped.
        assert len(one.records) + len(two.records) == 13


@pytest.mark.requirement("a:E-11", "b:G-07", "b:EX-18")
def test_wakeup_ends_a_poll_or_the_next_one() -> None:
    from tidelog.client.consumer.errors import WakeupError

    with ConsumerWorld(10) as world:
        world.make_topic("t", partitions=1)
        one = world.consumer("g")

        async def work(consumer: SimConsumer) -> None:
            await consumer.subscribe("t")
            asyncio.get_running_loop().call_later(2, consumer.wakeup)
            with pytest.raises(WakeupError):
                await consumer.poll(60)
            assert await consumer.poll(0.1) == []
            consumer.wakeup()
            with pytest.raises(WakeupError):
                await consumer.poll(0)
            await consumer.close()

        one.run(work)


def test_a_partitioned_member_loses_its_partitions_and_joins_again() -> None:
    with ConsumerWorld(11) as world:
        world.make_topic("t", partitions=4)
        world.fill("t", dict.fromkeys(range(4), 5))
        one, two = world.consumer("g").start("t"), world.consumer("g").start("t")
        until_stable(world, one, two)
        before = one.run(lambda consumer: consumer.group_metadata()).member_id
        one.cut_off()
        world.until(lambda: two.reading == ALL, timeout=60)
        world.network.heal()
        until_stable(world, one, two, timeout=60)
        held = one.reading
        assert [what for what, names in one.callbacks if names][-2:] == ["lost", "assigned"]
        assert len(heard(one, "lost")) == 2
        assert set(one.callbacks[-1][1]) == held
        assert one.run(lambda consumer: consumer.group_metadata()).member_id != before


@pytest.mark.requirement("a:F-06")
def test_a_coordinator_that_dies_costs_the_members_nothing() -> None:
    with ConsumerWorld(12) as world:
        world.make_topic("t", partitions=4)
        one, two = world.consumer("g").start("t"), world.consumer("g").start("t")
        until_stable(world, one, two)
        ids = [one.consumer.core._identity().member_id, two.consumer.core._identity().member_id]
        held = [one.reading, two.reading]
        where = one.run(lambda consumer: consumer.core._coordinators.find("g"))
        world.kill(NodeId(where.node))
        world.world.run_for(15)
        assert [one.reading, two.reading] == held
        assert "lost" not in [what for program in (one, two) for what, _ in program.callbacks]
        assert [one.consumer.core._identity().member_id, two.consumer.core._identity().member_id] == ids
        one.run(lambda consumer: consumer.commit({next(iter(one.reading)): 0}))
        moved = one.run(lambda consumer: consumer.core._coordinators.find("g"))
        assert moved.node != where.node
        assert moved.node in BROKERS


@pytest.mark.requirement("a:F-08", "a:F-09", "a:E-36")
def test_a_static_member_that_comes_back_has_its_partitions_and_nobody_else_noticed() -> None:
    with ConsumerWorld(13) as world:
        world.make_topic("t", partitions=4)
        static = {"group_instance_id": "a", "session_timeout_ms": 8_000}
        one = world.consumer("g", **static).start("t")
        two = world.consumer("g", group_instance_id="b").start("t")
        until_stable(world, one, two)
        had, reported = one.reading, len(two.callbacks)
        one.stop()
        world.world.run_for(5)
        again = world.consumer("g", **static).start("t")
        world.until(lambda: again.reading == had)
        assert len(two.callbacks) == reported
        # Another one under its name while it lives.
        twin = world.consumer("g", **static)

        async def join(consumer: SimConsumer) -> None:
            await consumer.subscribe("t")
            while True:
                await consumer.poll(1.0)

        with pytest.raises(TidelogError) as refused:
            twin.run(join)
        assert refused.value.code in (ErrorCode.UNRELEASED_INSTANCE_ID, ErrorCode.FENCED_INSTANCE_ID)
        assert again.reading == had
        # Killed, it keeps its place for the session, without regard to the grace; a member of its
        # name waits.
        again.kill()
        world.world.run_for(5)
        assert two.reading == ALL - had
        third = world.consumer("g", **static).start("t")
        world.until(lambda: len(third.reading) == 2, timeout=30)


@pytest.mark.requirement("a:E-01", "b:G-03", "b:EX-20", "b:H-04")
def test_a_pattern_takes_in_topics_that_are_made_later() -> None:
    with ConsumerWorld(14) as world:
        world.make_topic("test.one")
        world.make_topic("other")
        one = world.consumer("g")

        async def work() -> None:
            await one.consumer.subscribe(pattern="test.*", **one.listener())
            async for record in one.consumer:
                one.records.append(record)

        one.task = one.machine.spawn(work())
        world.until(lambda: one.reading == {TopicPartition("test.one", 0)})
        world.make_topic("test.two", partitions=2)
        at_s = world.now_s()
        world.until(lambda: len(one.reading) == 3)
        assert world.now_s() - at_s < 5
        world.fill("test.two", {0: 2, 1: 2})
        world.until(lambda: len(one.records) == 4)


def test_seeking_when_partitions_are_assigned_begins_there() -> None:
    """Offsets that are kept elsewhere."""
    with ConsumerWorld(15) as world:
        world.make_topic("t", partitions=4)
        world.fill("t", dict.fromkeys(range(4), 10))
        one = world.consumer("g")
        kept = {TopicPartition("t", number): 2 + number for number in range(4)}

        async def assigned(names: list[TopicPartition]) -> None:
            for name in names:
                await one.consumer.seek(name, kept[name])

        async def work() -> None:
            await one.consumer.subscribe(["t"], on_assigned=assigned)
            async for record in one.consumer:
                one.records.append(record)
                kept[record.topic_partition] = record.offset + 1

        one.task = one.machine.spawn(work())
        world.until(lambda: len(one.records) == 40 - 2 - 3 - 4 - 5)
        firsts: dict[int, int] = {}
        for record in one.records:
            firsts.setdefault(record.partition, record.offset)
        assert firsts == {0: 2, 1: 3, 2: 4, 3: 5}


@pytest.mark.requirement("a:E-51")
def test_a_record_that_fails_is_tried_again_while_its_partition_is_paused() -> None:
    """Commit the last success, keep the rest, pause, try again; polling on keeps the membership."""
    with ConsumerWorld(16) as world:
        world.make_topic("t", partitions=2)
        world.fill("t", {0: 6, 1: 6})
        place = TopicPartition("t", 0)
        one = world.consumer("g", enable_auto_commit=False, max_poll_interval_ms=6_000)
        done: list[tuple[int, int]] = []

        async def work(consumer: SimConsumer) -> None:
            await consumer.subscribe("t")
            kept: list[ConsumerRecord] = []
            attempts = 0
            while len(done) < 12:
                for record in await consumer.poll(0.5):
                    if record.topic_partition == place and (kept or record.offset == 2):
                        kept.append(record)
                    else:
                        done.append((record.partition, record.offset))
                if kept and not await consumer.paused():
                    await consumer.pause(place)
                    await consumer.commit({place: kept[0].offset})
                if kept:
                    attempts += 1
                    if attempts > 30:  # 15 s: longer than a member may be silent
                        done.extend((record.partition, record.offset) for record in kept)
                        await consumer.commit({place: kept[-1].offset + 1})
                        await consumer.seek(place, kept[-1].offset + 1)
                        kept = []
                        await consumer.resume(place)
            assert (await consumer.group_metadata()).member_epoch == 1
            await consumer.close()

        one.run(work)
        assert sorted(done) == [(partition, offset) for partition in range(2) for offset in range(6)]
        assert one.consumer.core.poll_interval_exceeded == 0
