"""What seeds of `STACK=groups` have found, each in the smallest form that shows it."""

import asyncio
from collections.abc import AsyncIterator
from random import Random
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from support.clients.consumers import ConsumerWorld, Program, SimConsumer

from simulation import groups_workload
from simulation.groups_checker import Life
from simulation.groups_workload import Member, MemberPlan
from tidelog.client.consumer.errors import WakeupError
from tidelog.client.group_offsets import GroupOffsets, Nobody
from tidelog.client.record import OffsetAndMetadata, TopicPartition
from tidelog.coordinator.limits import GroupLimits
from tidelog.coordinator.requests import Heartbeat, TopicShape
from tidelog.coordinator.shard import _Machine
from tidelog.coordinator.state import EMPTY
from tidelog.model.errors import CallTimeoutError, ErrorCode, TidelogError
from tidelog.model.group_errors import UnknownMemberIdError
from tidelog.model.ids import Offset, PartitionId, TopicId
from tidelog.rpc.grpc.errors import coded
from tidelog.rpc.v1 import groups_pb2 as pb

TOPIC = TopicId(UUID(int=7))


class Topics:
    """One topic with so many partitions."""

    def __init__(self, partitions: int) -> None:
        self._shape = TopicShape(TOPIC, "t", partitions)

    def by_name(self, name: str) -> TopicShape | None:
        return self._shape if name == "t" else None

    def by_id(self, topic_id: TopicId) -> TopicShape | None:
        return self._shape if topic_id == TOPIC else None

    def names(self) -> list[str]:
        return ["t"]


def test_a_topic_that_grows_while_a_join_waits_is_dealt_as_it_is() -> None:
    """Seed 33: the group joined with two partitions, and the third came before that had committed. No index had the
    group yet, so nobody assigned it again."""
    host: Any = SimpleNamespace(limits=GroupLimits(), view=Topics(2))
    machine = _Machine(host)
    join = Heartbeat(group="g", member_id="m", member_epoch=0, view=host.view, now_ms=0, topics=("t",))
    decisions, reply = machine.decide(EMPTY, join, offset=Offset(0))
    assert len(reply.assignment) == 2
    assert list(machine.decided) == ["g"], "to be looked at again if topics change before it commits"
    host.view = Topics(3)
    decisions, reply = machine.decide(EMPTY, join, offset=Offset(0))
    assert decisions
    assert len(reply.assignment) == 3, "as topics are when it is decided, not as they were when it was asked"


def _poll_until_called_back(program: Program, count: int) -> None:
    async def poll(consumer: SimConsumer) -> None:
        while len(program.callbacks) < count:
            await consumer.poll(0.1)

    program.run(poll)


def _remove(world: ConsumerWorld, member_id: str) -> None:
    """By the coordinator of the group."""
    for broker in (11, 12, 13):
        try:
            world.api(broker, "Groups", "RemoveMembers", pb.RemoveMembersRequest(group="g", member_ids=[member_id]))
        except TidelogError:
            continue
        return
    raise AssertionError("nobody coordinates the group")


def test_a_member_that_is_put_out_while_it_holds_nothing_joins_again_by_itself() -> None:
    """Seed 1015: there was nothing to tell its program, which waited in one long poll, and so nobody joined again."""
    with ConsumerWorld(1) as world:
        world.make_topic("t", partitions=1)
        one = world.consumer("g").start("t")
        world.until(lambda: len(one.reading) == 1)
        two = world.consumer("g").start("t")
        world.until(lambda: two.callbacks == [("assigned", [])])
        membership = two.consumer.core._membership
        assert membership is not None
        before = membership.member_id
        _remove(world, before)
        world.until(lambda: membership.is_member and membership.member_id != before, timeout=20)


def test_callbacks_hear_nothing_of_what_was_taken_away_before_they_heard_of_it() -> None:
    """Seeds 11 and 21: given and taken away again between two polls, or given just before the consumer was closed; its
    program learned of its revocation, and never of its assignment. A loss in the same way is not reported either."""
    with ConsumerWorld(1) as world:
        world.make_topic("t", partitions=1)
        one = world.consumer("g")
        one.run(lambda consumer: consumer.subscribe(["t"], **one.listener()))
        _poll_until_called_back(one, 1)
        (held,) = one.consumer.core.subscription
        mine, other = {held.partition: "t"}, {PartitionId(held.partition.topic_id, 1): "t"}

        async def give_and_take(consumer: SimConsumer) -> None:
            consumer.core.reconciler.assigned({**mine, **other})
            consumer.core.reconciler.assigned(mine)
            await consumer.poll(0)

        one.run(give_and_take)
        assert [what for what, names in one.callbacks if names] == ["assigned"]

        async def give_and_close(consumer: SimConsumer) -> None:
            consumer.core.reconciler.assigned({**mine, **other})
            await consumer.close(timeout=1.0)

        one.run(give_and_close)
        assert [(what, len(names)) for what, names in one.callbacks if names] == [("assigned", 1), ("revoked", 1)]


def test_partitions_lost_during_the_assignment_callback_are_reported_lost_after_it() -> None:
    with ConsumerWorld(1) as world:
        world.make_topic("t", partitions=1)
        one = world.consumer("g")

        async def subscribe(consumer: SimConsumer) -> None:
            async def assigned(names: list[Any]) -> None:
                one.callbacks.append(("assigned", names))
                if names and len(one.callbacks) <= 2:
                    consumer.core.reconciler.lost(UnknownMemberIdError("put out"))

            await consumer.subscribe(["t"], **{**one.listener(), "on_assigned": assigned})

        one.run(subscribe)
        _poll_until_called_back(one, 2)
        assert [what for what, names in one.callbacks if names][:2] == ["assigned", "lost"]


class FewRecords:
    """A consumer that is iterated: three records, and then none until it is woken. The first commit fails."""

    def __init__(self) -> None:
        self.options = SimpleNamespace(client_id="m")
        self.commits: list[int] = []
        self.waits = asyncio.Event()
        self.has_committed = asyncio.Event()
        self._given = 0
        self._woken = asyncio.Event()

    def wakeup(self) -> None:
        self._woken.set()

    async def __aiter__(self) -> AsyncIterator[int]:
        while self._given < 3:
            self._given += 1
            yield self._given
        self.waits.set()
        await self._woken.wait()
        self._woken.clear()
        raise WakeupError("woken")

    async def commit(self, _offsets: Any, *, timeout: float) -> None:
        assert timeout > 0
        self.commits.append(self._given)
        if len(self.commits) == 1:
            raise CallTimeoutError("nobody coordinates the group")
        self.has_committed.set()


def test_a_member_that_iterates_commits_what_is_left_when_no_more_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 421648292: it commits every four records, had three in hand when the faults ended, and no other one came
    before the writers stopped: the simulator's own program left its group behind, not the cluster."""
    monkeypatch.setattr(groups_workload, "WAKE_S", 0.01)
    plan = MemberPlan(group="g", is_static=False, is_auto=False, is_iterating=True, pattern="", restless=0, slow=0)
    checker: Any = SimpleNamespace(gave=lambda *_: None, done=lambda *_: None)
    groups: Any = SimpleNamespace(checker=checker, trace=lambda *_: None)

    async def scenario() -> list[int]:
        member = Member(groups, 1, plan, Random(1))
        consumer: Any = FewRecords()
        member.life = Life("m1.1", "g", is_static=False, consumer=consumer)
        context: Any = SimpleNamespace(node=SimpleNamespace(loop=asyncio.get_running_loop()))
        async with asyncio.timeout(10):
            program = asyncio.create_task(member._iterate(member.life, consumer))
            await consumer.waits.wait()
            member.is_steady = True
            assert not consumer.commits, "it waits for the fourth"
            member.finish(context)
            await consumer.has_committed.wait()
            program.cancel()
        return list(consumer.commits)

    assert asyncio.run(scenario()) == [3, 3], "again after a commit that failed"


def test_a_commit_that_is_refused_holds_up_no_other_of_the_same_request() -> None:
    """Seed 5011: a `commit_async` of a partition that others have by now went out with the `commit` of the next one. It
    was to be tried once, and was tried until its own minute was over, and the program waited with it."""
    gone, mine = PartitionId(TOPIC, 0), PartitionId(TOPIC, 1)
    names = {place: TopicPartition("t", place.partition) for place in (gone, mine)}
    asked: list[list[int]] = []
    first = asyncio.Event()

    async def call(_address: str, _method: Any, request: Any, *, timeout_ms: int) -> Any:
        assert timeout_ms > 0
        asked.append([row.partition for row in request.offsets])
        await first.wait()  # until the two others wait behind it
        answer = pb.CommitOffsetsResponse()
        for row in request.offsets:
            reported = answer.offsets.add(partition=row.partition)
            if row.partition == gone.partition and len(asked) > 1:
                reported.error.CopyFrom(coded(ErrorCode.STALE_MEMBER_EPOCH, "others have it"))
        return answer

    async def find(_group: str, *, timeout_ms: int) -> Any:
        assert timeout_ms > 0
        return SimpleNamespace(address="b")

    cluster: Any = SimpleNamespace(call_at=call, backoff=lambda: SimpleNamespace(next_s=lambda: 0.01))
    coordinators: Any = SimpleNamespace(find=find, forget=lambda _group: None)

    async def scenario() -> None:
        offsets = GroupOffsets(cluster, coordinators, "g", Nobody)
        one = OffsetAndMetadata(1, "", -1)
        offsets.commit({mine: one}, names, timeout_ms=3_000)
        await asyncio.sleep(0)
        once = offsets.commit({gone: one}, names, timeout_ms=60_000, is_once=True)
        waited = offsets.commit({mine: one}, names, timeout_ms=3_000)
        first.set()
        async with asyncio.timeout(10):
            await waited
            with pytest.raises(TidelogError, match="others have it"):
                await once

    asyncio.run(scenario())
    assert asked == [[1], [0, 1]], "once"
