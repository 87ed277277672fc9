"""`tidelog.Admin` in the simulator, with real APIs and coordinators: each call, partial failures, time, the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from support.clients.aio_consumer import SameLoopHost
from support.clients.cluster import BOOTSTRAP, BROKERS
from support.clients.consumers import ConsumerWorld
from support.groups.fake_coordinator import FakeGroups

import tidelog
from tidelog.client.admin.aio import Admin
from tidelog.client.admin.calls import AdminClosedError
from tidelog.client.admin.core import AdminCore
from tidelog.client.admin.offset_resets import decode_table, encode_table, plan_reset, read_target
from tidelog.client.admin.values import ConfigResource, NewTopic, Outcomes
from tidelog.client.errors import OptionError
from tidelog.client.record import OffsetAndMetadata, TopicPartition
from tidelog.coordinator.background_work import BackgroundWork
from tidelog.model.errors import (
    CallTimeoutError,
    ErrorCode,
    InvalidRequestError,
    RemoteError,
    TidelogError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
)
from tidelog.model.group_errors import CoordinatorLoadingError, NonEmptyGroupError, NotCoordinatorError
from tidelog.model.ids import NodeId
from tidelog.model.uuids import to_text
from tidelog.rpc.v1 import common_pb2 as common_pb
from tidelog.rpc.v1 import groups_pb2 as groups_pb
from tidelog.world.simulated import SimNode

T = TypeVar("T")


class SimAdmin(Admin):
    """On the client's machine of a world."""

    def __init__(self, world: ConsumerWorld, **options: Any) -> None:
        self._world = world
        super().__init__(list(BOOTSTRAP), **options)

    def _acquire_io(self, _owner: Any) -> Any:
        return SameLoopHost()

    def _new_core(self, _io: Any) -> AdminCore:
        return AdminCore(self._world.new_client(), timeout_ms=self.options.default_api_timeout_ms)


def run(world: ConsumerWorld, job: Callable[[SimAdmin], Awaitable[T]], **options: Any) -> T:
    """An admin client for the length of a job."""

    async def whole(_: SimNode) -> T:
        async with SimAdmin(world, **options) as admin:
            return await job(admin)

    found: T = world.world.run(world.machine, whole, timeout=300)
    return found


async def until(ask: Callable[[], Awaitable[T]], is_so: Callable[[T], bool]) -> None:
    """Ask again until it is so, for 30 s of the world's time."""
    for _ in range(300):
        if is_so(await ask()):
            return
        await asyncio.sleep(0.1)
    raise AssertionError("not in 30 s")


def places(*numbers: int, topic: str = "t") -> list[TopicPartition]:
    return [TopicPartition(topic, number) for number in numbers]


async def change_configs(admin: SimAdmin) -> None:
    # Verify that a topic is compacted, else make it so; a list grows and shrinks, a deleted key has its default.
    topic = ConfigResource("topic", "t")
    if (await admin.describe_config(topic, ["cleanup.policy"]))["cleanup.policy"].value != "compact":
        await admin.alter_config(topic, sets={"cleanup.policy": "compact"}, deletes=["retention.ms"])
    entries = await admin.describe_config(topic)
    assert entries["cleanup.policy"].source == "topic"
    assert entries["retention.ms"].is_default
    await admin.alter_config(topic, appends={"cleanup.policy": "delete"})
    assert (await admin.describe_config(topic))["cleanup.policy"].value == "compact,delete"
    await admin.alter_config(topic, subtracts={"cleanup.policy": "compact"}, validate_only=True)
    await admin.alter_config(("topic", "t"), subtracts={"cleanup.policy": "compact"})
    assert (await admin.describe_config(topic))["cleanup.policy"].value == "delete"
    with pytest.raises(RemoteError) as wrong:
        await admin.alter_config(topic, sets={"retention.ms": "soon"})
    assert wrong.value.code is ErrorCode.INVALID_CONFIG
    with pytest.raises(InvalidRequestError, match="nothing to change"):
        await admin.alter_config(topic)
    # A value that was set for the cluster is not a default.
    await admin.alter_config(
        ConfigResource("cluster"), sets={"log.retention.ms": 777_000, "replica.lag.time.max.ms": 9_000}
    )
    resources = [topic, ConfigResource("broker", str(BROKERS[0])), ConfigResource("topic", "nowhere")]
    several = await admin.describe_configs(resources, partial=True)
    assert list(several.errors) == [resources[2]]
    assert (several[topic]["retention.ms"].value, several[topic]["retention.ms"].is_default) == ("777000", False)
    assert several[resources[1]]["replica.lag.time.max.ms"].source == "cluster"


@pytest.mark.requirement(
    "a:G-02", "a:G-04", "a:G-05", "a:G-10", "a:G-11", "a:G-12", "a:G-13", "a:G-20", "a:G-21", "a:G-22", "a:G-40",
    "a:G-50", "b:I-08",
)  # fmt: skip
def test_topics_and_settings_are_made_looked_at_changed_and_deleted() -> None:
    async def job(admin: SimAdmin) -> None:
        made = await admin.create_topic("t", partitions=3, replication_factor=3, configs={"retention.ms": 5_000})
        assert (made.name, made.partitions, made.replication_factor) == ("t", 3, 3)
        # The numbers are optional; what was not given is the cluster's.
        bare = await admin.create_topic("bare")
        assert bare.partitions >= 1
        assert (await admin.create_topic("only-checked", validate_only=True)).topic_id is None
        await until(lambda: admin.list_topics(), lambda found: {one.name for one in found} == {"t", "bare"})
        described = await admin.describe_topic("t")
        assert described.topic_id == made.topic_id
        assert described.configs == {"retention.ms": "5000"}
        assert [(one.partition, len(one.replicas), one.state) for one in described.partitions] == [
            (number, 3, "online") for number in range(3)
        ]
        assert set(described.partitions[0].replicas) == set(BROKERS)
        with pytest.raises(TopicAlreadyExistsError) as refused:
            await admin.create_topic("t")
        assert refused.value.code is ErrorCode.TOPIC_ALREADY_EXISTS
        assert str(refused.value) == "topic t exists"
        existing = await admin.create_topic("t", partitions=9, if_not_exists=True)
        assert (existing.is_new, existing.topic_id, existing.partitions) == (False, made.topic_id, 3)
        assert (await admin.create_topics(["t"], if_not_exists=True))["t"] == existing
        await admin.delete_topic("nowhere", if_exists=True)
        assert (await admin.delete_topics(["nowhere"], if_exists=True)).succeeded == {"nowhere": None}
        with pytest.raises(RemoteError) as unknown:
            await admin.describe_topic("nowhere")
        assert unknown.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        # Some of several: the total, never fewer.
        grown = await admin.add_partitions({"t": 5, "bare": 0}, partial=True)
        assert grown.succeeded == {"t": 5}
        assert list(grown.errors) == ["bare"]
        assert len((await admin.describe_topic("t")).partitions) == 5
        await change_configs(admin)
        cluster = await admin.describe_cluster()
        assert [broker.id for broker in cluster.brokers] == list(BROKERS)
        assert cluster.cluster_id
        assert cluster.controller in (1, 2, 3)
        quorum = await admin.describe_quorum()
        assert quorum.leader == cluster.controller
        assert sorted(member.node for member in quorum.members if member.is_voter) == [1, 2, 3]
        await admin.delete_topic("bare")
        # A broker may hear of it a little later.
        await until(lambda: admin.list_topics(), lambda found: [one.name for one in found] == ["t"])
        with pytest.raises(RemoteError) as gone:
            await admin.delete_topics(["t", "bare"])
        assert gone.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert "0 others failed, 1 succeeded" in gone.value.__notes__[0]

    with ConsumerWorld(1) as world:
        run(world, job)


@pytest.mark.requirement("a:G-30")
def test_a_call_about_several_raises_the_first_error_or_tells_all_of_them() -> None:
    with ConsumerWorld(2) as world:

        async def job(admin: SimAdmin) -> None:
            found = await admin.create_topics([NewTopic("a", 1, 3), "b", NewTopic("c", 1, 99)], partial=True)
            assert isinstance(found, Outcomes)
            assert set(found.succeeded) == {"a", "b"}
            assert set(found.errors) == {"c"}
            assert set(found) == {"a", "b"}
            assert found["a"].partitions == 1
            with pytest.raises(RemoteError):
                found["c"]
            with pytest.raises(RemoteError) as first:
                found.all()
            assert first.value.code is ErrorCode.INVALID_REPLICATION_FACTOR
            assert "2 succeeded" in first.value.__notes__[0]
            with pytest.raises(RemoteError):
                await admin.create_topics(["d", "a"])
            assert set(await admin.describe_topics()) >= {"a", "b", "d"}
            assert admin.metrics() == {"calls": 3, "failures": 1, "calls_in_progress": 0}

        run(world, job)


async def administer_empty_group(admin: SimAdmin) -> None:
    assert (await admin.describe_group("g")).state == "empty"
    assert await admin.alter_group_offsets("g", {TopicPartition("t", 0): 7, TopicPartition("t", 2): 1})
    held = await admin.group_offsets("g")
    assert {place.partition: row.committed.offset for place, row in held.items()} == {0: 7, 1: 10, 2: 1}
    assert list(await admin.group_offsets("g", places(1, 3))) == places(1)
    missing = await admin.alter_group_offsets("g", {TopicPartition("t", 99): 0}, partial=True)
    assert missing.errors[TopicPartition("t", 99)].code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    await admin.delete_group_offsets("g", places(2))
    assert list(await admin.group_offsets("g")) == places(0, 1)
    several = await admin.describe_groups(["g", "nobody"], partial=True)
    assert several.errors["nobody"].code is ErrorCode.GROUP_ID_NOT_FOUND
    assert several["g"].group == "g"
    await admin.delete_group("g")
    with pytest.raises(RemoteError) as gone:
        await admin.delete_group("g")
    assert gone.value.code is ErrorCode.GROUP_ID_NOT_FOUND
    assert not (await admin.list_groups()).groups


@pytest.mark.requirement("a:G-30", "a:G-31", "a:G-32", "a:G-33", "a:G-34", "a:X3-34")
def test_groups_are_listed_described_moved_and_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    with ConsumerWorld(3) as world:
        world.make_topic("t", partitions=4)
        world.fill("t", dict.fromkeys(range(4), 10))
        one = world.consumer("g", client_id="first", enable_auto_commit=False).start("t")
        world.until(lambda: len(one.records) == 40)
        one.run(lambda consumer: consumer.commit({TopicPartition("t", 0): 4, TopicPartition("t", 1): 10}))

        async def active(admin: SimAdmin) -> None:
            (listed,) = (await admin.list_groups()).groups
            assert (listed.group, listed.type, listed.state, listed.members) == ("g", "consumer", "stable", 1)
            assert listed.coordinator in BROKERS
            assert not (await admin.list_groups(states=["empty"])).groups
            described = await admin.describe_group("g")
            (member,) = described.members
            assert (member.client_id, member.topics, described.is_active) == ("first", ("t",), True)
            assert list(member.assignment) == places(0, 1, 2, 3)
            assert described.coordinator == listed.coordinator
            assert described.coordinator_address == f"host-{listed.coordinator}:9092"
            lag = {row.partition.partition: row for row in await admin.group_lag("g")}
            assert [lag[number].lag for number in range(4)] == [6, 0, None, None]
            assert [lag[number].end for number in range(4)] == [10] * 4
            assert {row.client_id for row in lag.values()} == {"first"}
            # Its offsets are its members' while it has any.
            for refused in (
                admin.alter_group_offsets("g", {TopicPartition("t", 0): 0}),
                admin.reset_group_offsets("g", to="earliest"),
                admin.delete_group("g"),
            ):
                with pytest.raises(TidelogError) as error:
                    await refused
                assert error.value.code is ErrorCode.NON_EMPTY_GROUP
                assert "stop them first" in str(error.value)
            with pytest.raises(RemoteError) as subscribed:
                await admin.delete_group_offsets("g", "t")
            assert subscribed.value.code is ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC
            planned = await admin.reset_group_offsets("g", to="earliest", dry_run=True)
            assert [(row.before, row.after) for row in planned] == [(4, 0), (10, 0)]
            # The coordinator itself says the same to a client that did not check first.
            core = admin._host.core
            assert core is not None
            reported = {TopicPartition("t", 0): 0}
            monkeypatch.setattr(core, "_check_inactive", lambda _group: asyncio.sleep(0))
            with pytest.raises(NonEmptyGroupError):
                await admin.alter_group_offsets("g", reported)

        run(world, active)
        one.stop()

        run(world, administer_empty_group)


@pytest.mark.requirement("a:G-33")
def test_members_are_taken_out_by_name_and_offsets_of_a_deleted_topic_go_by_its_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A coordinator that has not got round to dropping them: else that moment is too short to be seen.
    heard = BackgroundWork.topics_changed
    monkeypatch.setattr(BackgroundWork, "topics_changed", lambda self, groups, _gone: heard(self, groups, ()))
    with ConsumerWorld(8) as world:
        world.make_topic("t", partitions=2)
        world.make_topic("gone")
        static = world.consumer("g", group_instance_id="static-1").start("t")
        other = world.consumer("g").start("t")
        world.until(lambda: len(static.assignment) == len(other.assignment) == 1)

        async def remove(admin: SimAdmin) -> None:
            members = (await admin.describe_group("g")).members
            (fixed,) = [one for one in members if one.instance_id]
            assert fixed.instance_id == "static-1"
            with pytest.raises(InvalidRequestError, match="all_members=True"):
                await admin.remove_members("g")
            wrong = await admin.remove_members("g", member_ids=["nobody"], partial=True)
            assert wrong.errors["nobody"].code is ErrorCode.UNKNOWN_MEMBER_ID
            assert (await admin.remove_members("g", instance_ids=["static-1"])).succeeded == {"static-1": None}
            assert fixed.member_id not in {one.member_id for one in (await admin.describe_group("g")).members}

        run(world, remove)
        static.kill()
        other.stop()

        async def delete(admin: SimAdmin) -> None:
            topic_id = to_text((await admin.describe_topic("gone")).topic_id)
            await admin.reset_group_offsets("h", to=0, topics=["t", "gone"])
            await admin.delete_topic("gone")
            await until(lambda: admin.group_offsets("h"), lambda held: TopicPartition(topic_id, 0) in held)
            held = await admin.group_offsets("h")
            assert held[TopicPartition(topic_id, 0)].is_topic_deleted
            lag = {row.partition: row for row in await admin.group_lag("h")}
            assert lag[TopicPartition("t", 0)].lag == 0
            assert lag[TopicPartition(topic_id, 0)].lag is None
            assert lag[TopicPartition(topic_id, 0)].error is not None
            moved = await admin.reset_group_offsets("h", to="latest")
            assert [row.partition for row in moved] == places(0, 1)

        run(world, delete)


@pytest.mark.requirement("a:G-34", "a:N-06")
def test_a_group_is_reset_in_every_way(tmp_path: Path) -> None:
    with ConsumerWorld(4) as world:
        world.make_topic("t", partitions=2)
        world.make_topic("other")
        world.fill("t", {0: 10, 1: 10}, timestamp=1_000)  # ms 1000 to 1009
        world.fill("other", {0: 3})

        async def job(admin: SimAdmin) -> None:
            async def reset(**asked: Any) -> dict[int, int]:
                changes = await admin.reset_group_offsets("g", **asked)
                held = await admin.group_offsets("g")
                assert all(held[row.partition].committed.offset == row.after for row in changes)
                return {row.partition.partition: row.after for row in changes}

            # Of a group that does not exist yet, with the topics named.
            with pytest.raises(InvalidRequestError, match="has committed nothing: name the topics"):
                await reset(to="earliest")
            assert await reset(to=3, topics="t") == {0: 3, 1: 3}
            assert await reset(to="latest", topics=places(1)) == {1: 10}
            assert await reset(shift_by=-2) == {0: 1, 1: 8}
            assert await reset(shift_by=5, topics=[TopicPartition("t", 0)]) == {0: 6}
            assert await reset(to_time=1_004, topics=["t"]) == {0: 4, 1: 4}
            assert await reset(to_time=2_000) == {0: 10, 1: 10}
            # The clock of the client has gone on since 1970, and so has the duration.
            core = admin._host.core
            assert core is not None
            ago_ms = core.cluster.clock.now_ms() - 1_007
            assert await reset(by_duration=f"{ago_ms}ms") == {0: 7, 1: 7}
            file = tmp_path / "offsets.csv"
            file.write_text("t,0,2\nt,1,5\n")
            assert await reset(from_file=file) == {0: 2, 1: 5}
            assert await reset(to={TopicPartition("t", 1): 6}) == {1: 6}
            assert await reset(to="earliest") == {0: 0, 1: 0}
            # Outside of the log is its end, and that is reported.
            (change,) = await admin.reset_group_offsets("g", to=50, topics=places(0), dry_run=True)
            assert (change.before, change.after, change.note) == (0, 10, "the log has 0 to 10, not 50")
            with pytest.raises(InvalidRequestError, match="nothing is committed of other-0"):
                await reset(shift_by=1, topics=["other"])
            with pytest.raises(InvalidRequestError, match="to and shift_by exclude each other"):
                await reset(to="latest", shift_by=1)
            with pytest.raises(UnknownTopicOrPartitionError):
                await reset(to="latest", topics=places(7))

        run(world, job)


@pytest.mark.requirement("a:G-32", "a:G-60")
def test_offsets_are_listed_by_end_by_time_and_by_the_greatest_time() -> None:
    with ConsumerWorld(6) as world:
        world.make_topic("t", partitions=3)
        world.fill("t", {0: 10, 1: 5}, timestamp=1_000)

        async def job(admin: SimAdmin) -> None:
            zero, one, two = places(0, 1, 2)

            async def offsets(at: Any, topics: Any = "t") -> dict[TopicPartition, tuple[int | None, int | None]]:
                found = await admin.list_offsets(topics, at=at)
                assert all(row.leader_epoch >= 0 for row in found.succeeded.values() if row.offset)
                return {place: (row.offset, row.timestamp) for place, row in found.items()}

            assert await offsets("latest") == {zero: (10, None), one: (5, None), two: (0, None)}
            assert {place: row.offset for place, row in (await admin.list_offsets("t")).items()} == {
                zero: 10,
                one: 5,
                two: 0,
            }
            await admin.delete_records({zero: 3})
            assert await offsets("earliest", [zero, ("t", 1)]) == {zero: (3, None), one: (0, None)}
            assert await offsets(1_004) == {zero: (4, 1_004), one: (4, 1_004), two: (None, None)}
            assert await offsets(1_005) == {zero: (5, 1_005), one: (None, None), two: (None, None)}
            assert await offsets("max_timestamp") == {zero: (9, 1_009), one: (4, 1_004), two: (None, None)}
            missing = await admin.list_offsets([zero, ("t", 9)], partial=True)
            assert set(missing.succeeded) == {zero}
            assert missing.errors[TopicPartition("t", 9)].code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            with pytest.raises(UnknownTopicOrPartitionError):
                await admin.list_offsets([("t", 9)])
            with pytest.raises(InvalidRequestError, match="or one of earliest, latest, max_timestamp"):
                await admin.list_offsets("t", at="newest")
            with pytest.raises(InvalidRequestError, match="no topic and no partition is named"):
                await admin.list_offsets(None)
            with pytest.raises(InvalidRequestError, match="no topic and no partition is named"):
                await admin.list_offsets([])

        run(world, job)


@pytest.mark.requirement("a:G-60", "a:G-61", "a:G-62", "a:G-63")
def test_records_are_deleted_leaders_elected_and_replicas_moved() -> None:
    with ConsumerWorld(5) as world:
        world.make_topic("t", partitions=2)
        world.fill("t", {0: 10, 1: 10}, timestamp=1_000)

        async def job(admin: SimAdmin) -> None:
            zero, one = places(0, 1)
            assert (await admin.delete_records({zero: 3})).succeeded == {zero: 3}
            # By time: what is older than the first record at or after it; without one all that is there.
            assert (await admin.delete_records_by_time("t", 1_005)).succeeded == {zero: 5, one: 5}
            assert (await admin.delete_records_by_time([one], 5_000)).succeeded == {one: 10}
            assert (await admin.delete_records({zero: "end"})).succeeded == {zero: 10}
            beyond = await admin.delete_records({zero: 99}, partial=True)
            assert beyond.errors[zero].code is ErrorCode.OFFSET_OUT_OF_RANGE
            with pytest.raises(InvalidRequestError, match="has 2 partitions: use one from 0 to 1"):
                await admin.delete_records({TopicPartition("t", 9): 1})
            # Leaders are the preferred ones already.
            healthy = await admin.elect_leaders(places(0, 1), partial=True)
            assert {error.code for error in healthy.errors.values()} == {ErrorCode.ELECTION_NOT_NEEDED}
            assert not (await admin.elect_leaders()).errors
            with pytest.raises(InvalidRequestError, match="None means all"):
                await admin.elect_leaders([])
            # The first of the list is the preferred leader; nothing under way cannot be cancelled.
            before = (await admin.describe_topic("t")).partitions[0].replicas
            turned = tuple(reversed(before))
            with pytest.raises(RemoteError) as none:
                await admin.alter_reassignments({zero: None})
            assert none.value.code is ErrorCode.NO_REASSIGNMENT_IN_PROGRESS
            await admin.alter_reassignments({zero: turned})
            await until(lambda: admin.list_reassignments([zero]), lambda found: not found)
            assert (await admin.describe_topic("t")).partitions[0].replicas == turned
            await admin.elect_leaders([zero])
            assert (await admin.describe_topic("t")).partitions[0].leader == turned[0]

        run(world, job)


@pytest.mark.requirement("a:G-30")
def test_a_list_of_groups_tells_which_brokers_are_missing_from_it() -> None:
    with ConsumerWorld(6) as world:
        world.make_topic("t")
        for name in ("g1", "g2", "g3", "g4"):
            run(world, lambda admin, name=name: admin.reset_group_offsets(name, to="latest", topics="t"))  # type: ignore[misc]
        whole = run(world, lambda admin: admin.list_groups())
        assert [one.group for one in whole] == ["g1", "g2", "g3", "g4"]
        assert {one.type for one in whole} == {"simple"}
        lost = whole.groups[0].coordinator

        async def without_one(admin: SimAdmin) -> None:
            await admin.list_groups()  # it knows the brokers
            world.kill(NodeId(lost))
            found = await admin.list_groups(partial=True)
            assert list(found.errors) == [lost]
            assert [one.group for one in found] == [one.group for one in whole if one.coordinator != lost]
            # A listing of all groups waits for the next coordinator.
            again = await admin.list_groups(timeout=60)
            assert [one.group for one in again] == ["g1", "g2", "g3", "g4"]
            assert lost not in {one.coordinator for one in again}
            assert (await admin.describe_group("g1")).coordinator != lost

        run(world, without_one)


@pytest.mark.requirement("a:G-03", "a:G-06", "a:G-08")
def test_every_call_ends_in_its_time_and_closing_aborts_what_is_late() -> None:
    with ConsumerWorld(7) as world:

        async def job(admin: SimAdmin) -> None:
            await admin.list_topics()
            world.cut_off()
            loop = asyncio.get_running_loop()
            start_s = loop.time()
            with pytest.raises(CallTimeoutError, match=r"create_topic: not done in 0\.7 s; a change may have"):
                await admin.create_topic("t", timeout=0.7)
            assert loop.time() - start_s == pytest.approx(0.7, abs=0.05)
            late = asyncio.ensure_future(admin.describe_cluster())
            await asyncio.sleep(0.1)
            await admin.close(timeout=2)
            assert loop.time() - start_s == pytest.approx(2.8, abs=0.2)
            with pytest.raises(CallTimeoutError, match="describe_cluster: the admin client was closed"):
                await late
            with pytest.raises(AdminClosedError):
                await admin.list_topics()
            await admin.close()  # nothing

        run(world, job)


def test_options_are_read_when_it_is_made_and_nothing_is_connected() -> None:
    with pytest.raises(OptionError, match="linger_ms belongs to a producer, not to an admin"):
        tidelog.Admin("localhost:9292", linger_ms=5)  # type: ignore[call-arg]
    admin = tidelog.Admin({"bootstrap.servers": "localhost:1", "default.api.timeout.ms": 500})
    assert admin.options.default_api_timeout_ms == 500
    assert admin.metrics()["calls"] == 0
    admin.close()
    with pytest.raises(AdminClosedError):
        admin.list_topics()
    with tidelog.Admin("localhost:1") as admin, pytest.raises(InvalidRequestError, match="all_members=True"):
        admin.remove_members("g")


def test_files_of_offsets_go_both_ways_and_name_a_wrong_line() -> None:
    table = {TopicPartition("b.c", 1): 5, TopicPartition("a", 0): 7}
    text = encode_table(table)
    assert text == "a,0,7\nb.c,1,5\n"
    assert decode_table(text, where="f") == table
    assert decode_table('"a",0,7\r\n\n', where="f") == {TopicPartition("a", 0): 7}
    for wrong in ("a,0\n", "a,x,7\n", "a,0,-1\n", ",0,1\n", "a,0,1,2\n"):
        with pytest.raises(InvalidRequestError, match=r"f:1: .* is not topic,partition,offset"):
            decode_table(wrong, where="f")
    with pytest.raises(InvalidRequestError, match="f:2: a-0 is there twice"):
        decode_table("a,0,1\na,0,2\n", where="f")
    with pytest.raises(InvalidRequestError, match="f: has no line"):
        decode_table("\n", where="f")


def test_a_plan_stays_inside_of_the_log() -> None:
    place = TopicPartition("t", 0)
    facts: dict[str, Any] = {"starts": {place: 5}, "ends": {place: 20}, "found": {place: -1}}

    def after(committed: int | None = 10, **asked: Any) -> int:
        held = {} if committed is None else {place: OffsetAndMetadata(committed)}
        (row,) = plan_reset(read_target(now_ms=1_000_000, **asked), [place], committed=held, **facts)
        return row.after

    assert after(to=1) == 5
    assert after(to=100) == 20
    assert after(shift_by=-100) == 5
    assert after(shift_by=3) == 13
    assert after(to_time=999) == 20
    assert after(None, to={place: 7}) == 7
    asked: list[dict[str, Any]] = [{"to": "soon"}, {"to": -1}, {"to": True}, {"to": {place: -1}}, {"to": {}}, {}]
    asked += [{"by_duration": "long"}, {"to_time": "when"}]
    for wrong in asked:
        with pytest.raises(InvalidRequestError):
            read_target(now_ms=0, **wrong)


class ScriptedGroups(FakeGroups):
    """A coordinator that loads, moves and dies as a test says."""

    loading = 0

    async def list_groups(self, request: Any, _caller: Any) -> Any:
        self._next("list_groups", request)
        answer = groups_pb.ListGroupsResponse(loading=self.loading)
        self.loading = max(0, self.loading - 1)
        answer.groups.add(group="g", type="consumer", state="stable", members=1)
        return answer

    async def delete_groups(self, request: Any, _caller: Any) -> Any:
        self._next("delete_groups", request)
        if self.is_silent:
            await asyncio.sleep(3_600)
        return groups_pb.DeleteGroupsResponse(groups=[common_pb.Outcome(name=name) for name in request.groups])


def test_loading_brokers_are_waited_for_or_reported() -> None:
    with ConsumerWorld(9) as world:
        fake = ScriptedGroups(world)

        async def job(admin: SimAdmin) -> None:
            fake.loading = 3
            some = await admin.list_groups(partial=True)
            assert sum(some.loading.values()) == 3 + 2 + 1
            assert not some.errors
            fake.loading = 2
            assert not (await admin.list_groups()).loading
            fake.loading = 1_000
            with pytest.raises(CoordinatorLoadingError) as late:
                await admin.list_groups(timeout=2)
            assert late.value.code is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS

        run(world, job)


def test_a_change_is_sent_again_only_if_it_was_surely_not_begun() -> None:
    with ConsumerWorld(10) as world:
        fake = ScriptedGroups(world)

        async def job(admin: SimAdmin) -> None:
            # The coordinator has moved, or loads: nothing was done.
            fake.script("delete_groups", NotCoordinatorError("elsewhere"), CoordinatorLoadingError("loading"))
            await admin.delete_group("g")
            assert len(fake.requests("delete_groups")) == 3
            assert len(fake.requests("find_coordinator")) == 3
            # No answer: it may have been deleted.
            fake.is_silent = True
            with pytest.raises(CallTimeoutError, match="a change may have been made"):
                await admin.delete_group("g", timeout=20)
            assert len(fake.requests("delete_groups")) == 4
            # An error of the group is its answer.
            fake.is_silent = False
            fake.script("delete_groups", NonEmptyGroupError("it has members"))
            with pytest.raises(TidelogError) as refused:
                await admin.delete_group("g")
            assert refused.value.code is ErrorCode.NON_EMPTY_GROUP
            assert len(fake.requests("delete_groups")) == 5

        run(world, job)
