"""What a member makes of every answer of a coordinator, by one that answers as the test says."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from support.clients.consumers import ConsumerWorld, SimConsumer
from support.groups.fake_coordinator import FakeGroups

from tidelog.client.consumer.errors import CommitFailedError
from tidelog.client.record import TopicPartition
from tidelog.model.errors import ErrorCode, OverloadedError, RemoteError, StreamBrokenError, TidelogError
from tidelog.model.group_errors import (
    CoordinatorLoadingError,
    CoordinatorNotAvailableError,
    FencedMemberEpochError,
    GroupFullError,
    NotCoordinatorError,
    StaleMemberEpochError,
    UnknownMemberIdError,
)
from tidelog.model.ids import PartitionId

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


@pytest.fixture
def world() -> Iterator[ConsumerWorld]:
    with ConsumerWorld(31) as made:
        made.make_topic("t", partitions=2)
        made.fill("t", {0: 5, 1: 5})
        yield made


def places(world: ConsumerWorld) -> tuple[PartitionId, ...]:
    return world.run(lambda client: client.topic("t")).partitions


@pytest.mark.parametrize(
    "error",
    [
        StreamBrokenError("cut"),
        NotCoordinatorError("moved"),
        CoordinatorLoadingError("loading"),
        CoordinatorNotAvailableError("nobody"),
    ],
    ids=lambda error: error.code.name,
)
def test_a_member_goes_on_with_the_same_id_and_epoch_when_its_coordinator_moves_or_its_stream_breaks(
    world: ConsumerWorld, error: TidelogError
) -> None:
    fake = FakeGroups(world)
    first, second = places(world)
    fake.deal({first: "t", second: "t"})
    one = world.consumer("g").start("t")
    world.until(lambda: one.reading == {T0, T1})
    world.until(lambda: len(one.records) == 10)
    fake.epoch = 7
    count = len(fake.requests("membership"))
    world.until(lambda: len(fake.requests("membership")) > count + 1)  # it has heard of epoch 7
    fake.broker = 12
    fake.script("membership", error)
    count = len(fake.asked)
    world.until(lambda: any(name == "find_coordinator" for name, _ in fake.asked[count:]))
    world.until(lambda: bool([1 for name, _ in fake.asked[count + 1 :] if name == "membership"]))
    (again,) = [request for name, request in fake.asked[count + 1 :] if name == "membership"][:1]
    joined = fake.requests("membership")[0]
    assert (joined.member_epoch, again.member_epoch, again.member_id) == (0, 7, joined.member_id)
    # A coordinator that may know nothing yet gets everything.
    assert list(again.subscription.topics) == ["t"]
    assert [list(topic.partitions) for topic in again.owned.topics] == [[0, 1]]
    world.world.run_for(3)
    assert one.callbacks == [("assigned", [T0, T1])]
    assert len(one.records) == 10


@pytest.mark.parametrize("error", [FencedMemberEpochError("fenced"), UnknownMemberIdError("unknown")])
def test_a_fenced_member_loses_its_partitions_and_joins_again(world: ConsumerWorld, error: TidelogError) -> None:
    fake = FakeGroups(world)
    first, second = places(world)
    fake.deal({first: "t", second: "t"})
    one = world.consumer("g").start("t")
    world.until(lambda: len(one.records) == 10)
    world.world.run_for(2)
    fake.script("membership", error)
    fake.deal({first: "t"})
    world.until(lambda: one.reading == {T0})
    assert [what for what, _ in one.callbacks] == ["assigned", "lost", "assigned"]
    joins = [request for request in fake.requests("membership") if request.member_epoch == 0]
    assert len(joins) == 2
    # Under its own id while the coordinator may know it, so that no ghost is left; under a new one if it does not.
    is_same = error.code is ErrorCode.FENCED_MEMBER_EPOCH
    assert (joins[0].member_id == joins[1].member_id) is is_same
    assert not joins[1].owned.topics


def test_an_answer_that_does_not_come_is_not_waited_for_forever(world: ConsumerWorld) -> None:
    fake = FakeGroups(world)
    first, second = places(world)
    fake.deal({first: "t", second: "t"})
    one = world.consumer("g").start("t")
    world.until(lambda: one.reading == {T0, T1})
    fake.is_silent = True
    count = len(fake.requests("find_coordinator"))
    world.until(lambda: len(fake.requests("find_coordinator")) > count, timeout=10)
    fake.is_silent = False
    count = len(fake.requests("membership"))
    world.until(lambda: len(fake.requests("membership")) >= count + 3)
    assert [what for what, _ in one.callbacks] == ["assigned"]


def test_an_error_that_will_not_pass_is_raised_by_every_poll_until_the_next_subscribe(world: ConsumerWorld) -> None:
    fake = FakeGroups(world)
    fake.script("membership", GroupFullError("the group is full"))

    async def work(consumer: SimConsumer) -> None:
        await consumer.subscribe("t")
        for _ in range(2):
            with pytest.raises(RemoteError, match="full") as raised:
                await consumer.poll(60)
            assert raised.value.code is ErrorCode.GROUP_MAX_SIZE_REACHED
        await consumer.subscribe("t")
        fake.deal(dict.fromkeys(places_of, "t"))
        while not await consumer.poll(5.0):
            pass
        await consumer.close()

    places_of = places(world)
    world.consumer("g").run(work)
    # The goodbye is a call with an answer.
    assert [request.member_epoch for request in fake.requests("heartbeat")] == [-1]


def test_commits_are_repeated_where_that_helps_and_refused_where_it_does_not(world: ConsumerWorld) -> None:
    fake = FakeGroups(world)
    first, second = places(world)
    fake.deal({first: "t", second: "t"})

    async def work(consumer: SimConsumer) -> None:
        await consumer.subscribe("t")
        got = 0
        while got < 10:
            got += len(await consumer.poll(5.0))
        fake.script(
            "commit_offsets",
            NotCoordinatorError("moved"),
            CoordinatorLoadingError("loading"),
            StaleMemberEpochError("older"),
            OverloadedError("busy"),
        )
        await consumer.commit()
        assert len(fake.requests("commit_offsets")) == 5
        assert {key: item.offset for key, item in fake.stored.items()} == {("t", 0): 5, ("t", 1): 5}
        # What is stored is not sent again.
        await consumer.commit()
        assert len(fake.requests("commit_offsets")) == 5
        fake.script("commit_offsets", FencedMemberEpochError("fenced"))
        with pytest.raises(CommitFailedError, match="removed this member"):
            await consumer.commit({T0: 1})
        # Without waiting: one attempt, and the error is raised.
        reported: list[TidelogError | None] = []
        fake.script("commit_offsets", CoordinatorLoadingError("loading"))
        count = len(fake.requests("commit_offsets"))
        await consumer.commit_async({T0: 2}, lambda error, _offsets: reported.append(error))
        await consumer.commit({T1: 3})
        assert [error.code for error in reported if error is not None] in ([], [ErrorCode.COORDINATOR_LOAD_IN_PROGRESS])
        sent = fake.requests("commit_offsets")[count:]
        assert sent[0].offsets[0].offset == 2
        assert {key: item.offset for key, item in fake.stored.items()}["t", 1] == 3
        await consumer.close()

    world.consumer("g", enable_auto_commit=False).run(work)


def test_positions_wait_for_a_coordinator_that_is_still_loading(world: ConsumerWorld) -> None:
    fake = FakeGroups(world)
    first, second = places(world)
    fake.deal({first: "t", second: "t"})
    fake.script("fetch_offsets", *[CoordinatorLoadingError("loading")] * 3)
    one = world.consumer("g").start("t")
    world.until(lambda: len(one.records) == 10)
    asked = fake.requests("fetch_offsets")
    assert len(asked) >= 4
    # A member's question carries its epoch: a deposed coordinator cannot tell something old.
    assert all(request.HasField("member_epoch") and request.member_epoch == 1 for request in asked)


def test_a_partition_assigned_back_during_its_revocation_is_acquired_again(world: ConsumerWorld) -> None:
    fake = FakeGroups(world)
    first, second = places(world)
    fake.deal({first: "t", second: "t"})
    one = world.consumer("g").start("t")
    world.until(lambda: len(one.records) == 10)
    fake.deal({first: "t"})
    world.until(lambda: one.callbacks[-2:] == [("revoked", [T1]), ("assigned", [])])
    assert one.reading == {T0}
    world.world.run_for(0.1)
    owned = [request for request in fake.requests("membership") if request.HasField("owned")][-1]
    assert [list(topic.partitions) for topic in owned.owned.topics] == [[0]]
    fake.deal({first: "t", second: "t"})
    world.until(lambda: one.reading == {T0, T1})
    world.until(lambda: one.callbacks[-1] == ("assigned", [T1]))
    # It was committed before it was given up, so nothing comes twice.
    world.world.run_for(2)
    assert len(one.records) == 10


@pytest.mark.requirement("a:E-33", "a:E-34", "b:G-28", "b:G-29")
def test_a_member_says_what_it_is_and_how_it_wants_partitions_dealt(world: ConsumerWorld) -> None:
    fake = FakeGroups(world)
    first, second = places(world)
    fake.deal({first: "t", second: "t"})
    one = world.consumer(
        "g",
        client_id="billing-1",
        client_rack="r1",
        group_instance_id="a",
        session_timeout_ms=9_000,
        heartbeat_interval_ms=500,
        max_poll_interval_ms=70_000,
        **{"partition.assignment.strategy": "range"},
    ).start("t")
    world.until(lambda: one.reading == {T0, T1})
    joined = fake.requests("membership")[0]
    assert (joined.assignor, joined.client_id, joined.rack, joined.instance_id) == ("range", "billing-1", "r1", "a")
    assert (joined.session_timeout_ms, joined.rebalance_timeout_ms) == (9_000, 72_000)
    count, at_s = len(fake.requests("membership")), world.now_s()
    world.world.run_for(5)
    assert 8 <= len(fake.requests("membership")) - count <= 12  # two a second, from then on with little in them
    assert world.now_s() > at_s
    assert not fake.requests("membership")[-1].HasField("subscription")
    one.stop()
    assert [request.member_epoch for request in fake.requests("heartbeat")] == [-2]  # it will be back


@pytest.mark.requirement("a:E-28")
def test_a_call_that_gets_no_answer_ends_after_the_time_of_the_api(world: ConsumerWorld) -> None:
    fake = FakeGroups(world)
    first, second = places(world)
    fake.deal({first: "t", second: "t"})
    one = world.consumer("g", default_api_timeout_ms=4_000, enable_auto_commit=False).start("t")
    world.until(lambda: len(one.records) == 10)
    fake.script("commit_offsets", *[CoordinatorLoadingError("loading")] * 1_000)

    async def commit(consumer: SimConsumer) -> None:
        with pytest.raises(RemoteError, match="loading"):
            await consumer.commit()

    at_s = world.now_s()
    one.run(commit)
    assert 2 < world.now_s() - at_s < 5


def test_member_without_a_coordinator_warns_with_the_last_error(
    world: ConsumerWorld, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeGroups(world)
    fake.script("find_coordinator", *[CoordinatorNotAvailableError("no active controller answered")] * 10_000)
    world.consumer("g").start("t")
    world.world.run_for(4)
    warnings = [record.getMessage() for record in caplog.records if "no coordinator" in record.getMessage()]
    assert warnings == [], "a coordinator may take some seconds"
    world.world.run_for(16)
    warnings = [record.getMessage() for record in caplog.records if "no coordinator" in record.getMessage()]
    assert len(warnings) == 1
    assert re.match(r"group g: no coordinator for \d s: .*no active controller answered; trying again", warnings[0])
    fake.scripts.clear()
    world.until(lambda: fake.requests("membership") != [])
    caplog.clear()
    world.world.run_for(60)
    assert not [record for record in caplog.records if "no coordinator" in record.getMessage()]


def test_member_that_cannot_leave_says_why(world: ConsumerWorld, caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeGroups(world)
    first, second = places(world)
    fake.deal({first: "t", second: "t"})
    one = world.consumer("g").start("t")
    world.until(lambda: one.reading == {T0, T1})
    fake.script("heartbeat", *[StreamBrokenError("cut")] * 10)
    fake.script("find_coordinator", *[CoordinatorNotAvailableError("nobody")] * 10_000)
    one.stop()
    (warning,) = [record.getMessage() for record in caplog.records if "could not leave" in record.getMessage()]
    assert warning.partition("could not leave: ")[2]
