"""Groups change their protocol on a simulated cluster, while coordinators move, members die and requests wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.async_tests import inside
from support.brokers.cluster import RunningBroker
from support.groups.cluster import BROKERS, GroupCluster
from support.groups.mixed_model import encode_subscription

from tidelog.coordinator.classic_requests import JoinReply
from tidelog.coordinator.consumer_protocol import encode_assignment, parse_assignment
from tidelog.coordinator.limits import GroupLimits
from tidelog.coordinator.mixed_groups import MixedGroups
from tidelog.coordinator.requests import OffsetToCommit
from tidelog.coordinator.state import CoordinatorState, Group, validate
from tidelog.model.errors import RequestTimedOutError, TidelogError, UnknownOutcomeError
from tidelog.model.group_errors import (
    CoordinatorNotAvailableError,
    GroupFullError,
    IllegalGenerationError,
    MemberIdRequiredError,
    NotCoordinatorError,
    RebalanceInProgressError,
    UnknownMemberIdError,
)
from tidelog.model.ids import NodeId, PartitionId, TopicId
from tidelog.model.maps import Map
from tidelog.services.context import INTERNAL
from tidelog.services.groups import GroupService, JoinGroup, MemberHeartbeat, SyncGroup

GROUP = "legacy"
PARTITIONS = 4
Job = Callable[[GroupService], Coroutine[Any, Any, Any]]


class Client:
    """A classic client; an eager one gives up everything before it joins."""

    def __init__(self, *, cooperative: bool = False, **fields: Any) -> None:
        self.cooperative = cooperative
        self.fields: dict[str, Any] = {"session_timeout_ms": 10_000, "rebalance_timeout_ms": 20_000, **fields}
        self.member_id = ""
        self.generation = -1
        self.held: list[int] = []

    async def join(self, service: GroupService) -> JoinReply:
        if not self.cooperative:
            self.held = []
        metadata = encode_subscription(["orders"], {"orders": self.held} if self.cooperative else None)
        fields = {"protocol_type": "consumer", "protocols": (("range", metadata),), **self.fields}
        try:
            reply = await service.join_group(INTERNAL, GROUP, JoinGroup(member_id=self.member_id, **fields))
        except MemberIdRequiredError as given:
            reply = await service.join_group(INTERNAL, GROUP, JoinGroup(member_id=given.member_id, **fields))
        self.member_id, self.generation = reply.member_id, reply.generation
        return reply

    async def sync(self, service: GroupService, joined: JoinReply) -> None:
        names = sorted(member.member_id for member in joined.members)
        dealt = tuple(
            (name, encode_assignment({"orders": range(number, PARTITIONS, len(names))}))
            for number, name in enumerate(names)
        )
        reply = await service.sync_group(
            INTERNAL,
            GROUP,
            SyncGroup(member_id=self.member_id, generation=joined.generation, assignments=dealt),
        )
        rows = parse_assignment(reply.assignment).partitions
        before, self.held = self.held, sorted(number for _, numbers in rows for number in numbers)
        if self.cooperative and set(before) - set(self.held):
            await self.rejoin(service)

    async def rejoin(self, service: GroupService) -> None:
        await self.sync(service, await self.join(service))

    async def beat(self, service: GroupService) -> None:
        await service.classic_heartbeat(INTERNAL, GROUP, member_id=self.member_id, generation=self.generation)

    async def follow(self, service: GroupService) -> None:
        try:
            await self.beat(service)
        except RebalanceInProgressError:
            await self.rejoin(service)

    async def commit(self, service: GroupService, topic: TopicId, offset: int) -> TidelogError | None:
        done = await service.commit_offsets(
            INTERNAL,
            GROUP,
            {PartitionId(topic, self.held[0]): OffsetToCommit(offset)},
            member_id=self.member_id,
            member_epoch=self.generation,
        )
        return next(iter(done.values()))


def new_consumer(service: GroupService) -> MemberHeartbeat:
    return MemberHeartbeat(
        group=GROUP,
        member_id="new",
        member_epoch=0,
        topics=("orders",),
        owned=(),
    )


def on(cluster: GroupCluster, broker: int, job: Job) -> Any:
    async def work(found: RunningBroker) -> Any:
        return await job(found.groups)

    return cluster.on_broker(broker, work, timeout=120)


def run(seed: int, job: Callable[[GroupCluster, int], None], **more: Any) -> None:
    with GroupCluster(seed=seed, offsets_partitions=1, **more, orders=PARTITIONS) as cluster:
        cluster.shard(GROUP)
        job(cluster, cluster.coordinator(GROUP))


async def begin(service: GroupService, *clients: Client) -> None:
    await asyncio.gather(*(client.rejoin(service) for client in clients))


def eventually(cluster: GroupCluster, condition: Callable[[], bool]) -> None:
    """For one that asks the cluster itself."""
    end_s = cluster.now_s() + 60
    while not condition():
        assert cluster.now_s() < end_s, "not within 60 s"
        cluster.world.run_for(0.3)


def until_shared(cluster: GroupCluster, clients: list[Client], members: list[Any]) -> None:
    """Everybody heartbeats until each partition has one owner; never has one two."""

    def is_shared() -> bool:
        broker = cluster.coordinator(GROUP)
        for client in clients:
            on(cluster, broker, client.follow)
        held = [number for client in clients for number in client.held]
        held += [number for member in members for _, number in member.owned]
        assert len(held) == len(set(held)), f"{[client.held for client in clients]} {[one.owned for one in members]}"
        shares = [len(client.held) for client in clients] + [len(member.owned) for member in members]
        return len(held) == PARTITIONS and min(shares) >= PARTITIONS // len(shares)

    eventually(cluster, is_shared)


def fail_over(cluster: GroupCluster, leader: int) -> int:
    cluster.kill(NodeId(leader))
    offsets = cluster.image().topic_ids["__consumer_offsets"]

    def has_moved() -> bool:
        found = cluster.image().partition(offsets, 0)
        return found is not None and found.leader not in (leader, -1)

    cluster.until(has_moved, timeout=30)
    cluster.shard(GROUP)
    return cluster.coordinator(GROUP)


@inside(partial(run, 1))
def test_a_group_is_upgraded_and_downgraded_with_members_on_streams(cluster: GroupCluster, leader: int) -> None:
    """A `tidelog` consumer joins classic clients, and leaves them; committed offsets stay."""
    eager, cooperative = Client(), Client(cooperative=True)
    on(cluster, leader, lambda service: begin(service, eager, cooperative))
    topic = TopicId(cluster.image().topic_ids["orders"])
    first = eager.held[0]
    assert on(cluster, leader, lambda service: eager.commit(service, topic, 5)) is None
    ours = cluster.member(GROUP, "orders")
    assert cluster.describe(GROUP).type == "consumer"
    until_shared(cluster, [eager, cooperative], [ours])
    assert cluster.commit(GROUP, {("orders", sorted(ours.owned)[0][1]): 6}, member=ours) == [""]
    assert on(cluster, leader, lambda service: cooperative.commit(service, topic, 7)) is None
    shard = cluster.shard(GROUP)
    assert shard.rounds.get(GROUP) is None
    ours.leave()
    eventually(cluster, lambda: cluster.describe(GROUP).type == "classic")
    assert shard.rounds.get(GROUP) is not None
    for _ in range(3):

        async def follow(service: GroupService) -> None:
            await asyncio.gather(eager.follow(service), cooperative.follow(service))

        on(cluster, leader, follow)
    assert sorted(eager.held + cooperative.held) == [0, 1, 2, 3]
    assert eager.generation == cooperative.generation
    assert cluster.committed(GROUP)["orders", first] in (5, 6, 7)
    validate(shard.state)


@pytest.mark.case("C6")
@inside(partial(run, 2))
def test_coordinators_move_in_the_middle_of_each_conversion(cluster: GroupCluster, leader: int) -> None:
    eager, cooperative = Client(), Client(cooperative=True)
    on(cluster, leader, lambda service: begin(service, eager, cooperative))
    ours = cluster.member(GROUP, "orders")
    state = cluster.shard(GROUP).state
    heir = fail_over(cluster, leader)
    assert cluster.shard(GROUP).state.group(GROUP) == state.group(GROUP), "replay makes the same state"
    until_shared(cluster, [eager, cooperative], [ours])
    cluster.start_brokers(leader)
    # The last consumer leaves while the policy forbids a downgrade; the next coordinator carries it out.
    cluster.set_cluster("group.consumer.migration.policy", "upgrade")
    ours.leave()
    until_shared(cluster, [eager, cooperative], [])
    assert cluster.describe(GROUP).type == "consumer"
    cluster.set_cluster("group.consumer.migration.policy", "downgrade")
    eventually(cluster, lambda: cluster.describe(GROUP).type == "classic")
    state = cluster.shard(GROUP).state
    last = fail_over(cluster, heir)
    assert cluster.shard(GROUP).state.group(GROUP) == state.group(GROUP)
    assert cluster.describe(GROUP).state == "preparing", "a downgraded group begins with a rebalance"

    async def follow(service: GroupService) -> None:
        await asyncio.gather(eager.follow(service), cooperative.follow(service))

    for _ in range(3):
        on(cluster, last, follow)
    assert sorted(eager.held + cooperative.held) == [0, 1, 2, 3]


@inside(partial(run, 3))
def test_joins_that_wait_for_a_round_are_answered_by_the_consumer_group(cluster: GroupCluster, leader: int) -> None:
    one, two, third = Client(), Client(), Client()
    on(cluster, leader, lambda service: begin(service, one, two))

    async def work(service: GroupService) -> None:
        waiting = asyncio.ensure_future(third.rejoin(service))
        again = asyncio.ensure_future(one.rejoin(service))
        await asyncio.sleep(0.5)
        assert not waiting.done(), "the round waits for the other one"
        reply = await service.heartbeat(INTERNAL, new_consumer(service))
        assert reply.member_epoch > 0
        await waiting
        await again
        members = {member.member_id for member in service.describe_group(INTERNAL, GROUP).members}
        assert members == {one.member_id, two.member_id, third.member_id, "new"}

    on(cluster, leader, work)


@inside(partial(run, 4))
def test_an_upgrade_that_is_refused_leaves_the_rounds_as_they_were(cluster: GroupCluster, leader: int) -> None:
    cluster.set_cluster("group.consumer.max.size", "2")
    one, two = Client(), Client()
    on(cluster, leader, lambda service: begin(service, one, two))

    async def work(service: GroupService) -> None:
        request = new_consumer(service)
        for _ in range(2):
            with pytest.raises(GroupFullError):
                await service.heartbeat(INTERNAL, request)
            await one.beat(service)
        assert service.describe_group(INTERNAL, GROUP).state == "stable"

    on(cluster, leader, work)
    cluster.world.run_for(12)
    assert cluster.describe(GROUP).state == "empty", "sessions go on to count"


@inside(partial(run, 5))
def test_requests_that_wait_for_a_conversion_hear_that_the_coordinator_has_gone(
    cluster: GroupCluster, leader: int
) -> None:
    one = Client()
    on(cluster, leader, lambda service: begin(service, one))
    shard = cluster.shard(GROUP)
    # Nobody else is in sync any more: the conversion cannot commit.
    for broker in list(cluster.brokers):
        if broker != leader:
            cluster.kill(broker)

    async def work(found: RunningBroker) -> None:
        upgrade = asyncio.ensure_future(found.groups.heartbeat(INTERNAL, new_consumer(found.groups)))
        await asyncio.sleep(0.1)
        assert shard.rounds.mixed.is_frozen(GROUP)
        await one.beat(found.groups)
        join = asyncio.ensure_future(one.join(found.groups))
        await asyncio.sleep(0.1)
        assert not join.done(), "it would change the rounds"
        shard.leader.replica.end_role()
        with pytest.raises(UnknownOutcomeError):
            await upgrade
        with pytest.raises(NotCoordinatorError):
            await join
        assert not shard.rounds.mixed.is_frozen(GROUP)

    cluster.on_broker(leader, work)


@inside(partial(run, 8))
def test_an_upgrade_that_cannot_be_stored_leaves_a_classic_group_and_succeeds_later(
    cluster: GroupCluster, leader: int
) -> None:
    one = Client(session_timeout_ms=120_000)
    on(cluster, leader, lambda service: begin(service, one))
    shard = cluster.shard(GROUP)
    others = [broker for broker in list(cluster.brokers) if broker != leader]
    for broker in others:
        cluster.kill(broker)
    cluster.until(lambda: len(shard.leader.replica.partition.isr) == 1, timeout=60)

    async def refused(service: GroupService) -> None:
        with pytest.raises((CoordinatorNotAvailableError, RequestTimedOutError)):
            await service.heartbeat(INTERNAL, new_consumer(service))
        await one.beat(service)
        assert service.describe_group(INTERNAL, GROUP).kind == "classic"

    on(cluster, leader, refused)
    cluster.start_brokers(*others)

    async def upgrade(service: GroupService) -> None:
        with suppress(CoordinatorNotAvailableError, RequestTimedOutError):
            await service.heartbeat(INTERNAL, new_consumer(service))

    def is_upgraded() -> bool:
        on(cluster, leader, upgrade)
        return cluster.describe(GROUP).type == "consumer"

    eventually(cluster, is_upgraded)
    assert not shard.rounds.mixed.is_frozen(GROUP)
    on(cluster, leader, one.follow)


@inside(partial(run, 6))
def test_a_classic_member_of_a_consumer_group_is_removed_when_it_is_silent_or_does_not_join(
    cluster: GroupCluster, leader: int
) -> None:
    silent, slow = Client(), Client(session_timeout_ms=100_000, rebalance_timeout_ms=8_000)
    on(cluster, leader, lambda service: begin(service, silent, slow))
    ours = [cluster.member(GROUP, "orders") for _ in range(2)]

    async def only_beat(service: GroupService) -> None:
        for _ in range(7):
            with pytest.raises(RebalanceInProgressError):
                await slow.beat(service)
            await asyncio.sleep(1)

    on(cluster, leader, only_beat)
    assert len(cluster.describe(GROUP).members) == 4
    eventually(cluster, lambda: len(cluster.describe(GROUP).members) == 2)
    cluster.until(lambda: sum(len(member.owned) for member in ours) == PARTITIONS)

    async def is_gone(service: GroupService) -> None:
        with pytest.raises(UnknownMemberIdError):
            await slow.beat(service)

    on(cluster, leader, is_gone)


@inside(partial(run, 7))
def test_a_consumer_that_dies_leaves_classic_members_a_classic_group(cluster: GroupCluster, leader: int) -> None:
    one = Client(session_timeout_ms=60_000)
    ours = cluster.member(GROUP, "orders")
    on(cluster, leader, one.rejoin)
    until_shared(cluster, [one], [ours])
    ours.kill()
    eventually(cluster, lambda: cluster.describe(GROUP).type == "classic")
    until_shared(cluster, [one], [])


class Storm:
    """Classic clients, members on streams and coordinators come, go and die."""

    def __init__(self, cluster: GroupCluster, seed: int) -> None:
        self.cluster = cluster
        self.random = Random(seed)
        self.clients: list[Client] = []
        self.members: list[Any] = []
        self.kinds: set[str] = set()

    def step(self) -> None:
        cluster, choice = self.cluster, self.random.random()
        if choice < 0.15 and len(self.clients) < 3:
            self.clients.append(Client(cooperative=self.random.random() < 0.5))
        elif choice < 0.3 and len(self.members) < 2:
            member = cluster.member(GROUP, "orders", join=False)
            member.begin()
            self.members.append(member)
        elif choice < 0.4 and self.members:
            self.members.pop().kill()
        elif choice < 0.5 and self.clients:
            self.clients.pop(0)  # without a word: its session ends
        elif choice < 0.65 and len(cluster.brokers) == len(BROKERS):
            cluster.kill(NodeId(cluster.coordinator(GROUP)))
        elif len(cluster.brokers) < len(BROKERS):
            cluster.start_brokers(*(broker for broker in BROKERS if NodeId(broker) not in cluster.brokers), wait=False)
        self.follow()
        cluster.world.run_for(self.random.choice((0.05, 0.5, 2.0)))
        self.check()

    def follow(self) -> None:
        """All clients at once; what they cannot do now they do in the next step."""

        async def one(service: GroupService, client: Client) -> None:
            try:
                async with asyncio.timeout(4):
                    await (client.follow(service) if client.generation >= 0 else client.rejoin(service))
            except (UnknownMemberIdError, IllegalGenerationError):
                client.member_id, client.generation, client.held = "", -1, []
            except (TidelogError, TimeoutError):
                pass

        async def work(found: RunningBroker) -> None:
            await asyncio.gather(*(one(found.groups, client) for client in self.clients))

        self.cluster.on_broker(self.cluster.coordinator(GROUP), work, timeout=120)

    def check(self) -> None:
        state = self.cluster.shard(GROUP).state
        validate(state)
        group = state.group(GROUP)
        if group is not None:
            protocols = {member.is_classic for member in group.members.values()}
            self.kinds.add("mixed" if len(protocols) > 1 else group.kind)

    def heal(self) -> None:
        cluster = self.cluster
        missing = [broker for broker in BROKERS if NodeId(broker) not in cluster.brokers]
        if missing:
            cluster.start_brokers(*missing)
        if not self.clients:
            self.clients.append(Client())

        def is_shared() -> bool:
            self.follow()
            held = [number for client in self.clients for number in client.held]
            held += [number for member in self.members for _, number in member.owned]
            return sorted(held) == list(range(PARTITIONS))

        eventually(cluster, is_shared)


@pytest.mark.parametrize("seed", range(4))
def test_a_storm_over_a_mixed_group_ends_with_one_owner_for_each_partition(seed: int) -> None:
    with GroupCluster(seed=100 + seed, offsets_partitions=1, orders=PARTITIONS) as cluster:
        cluster.set_cluster("group.initial.rebalance.delay.ms", "100")
        storm = Storm(cluster, seed)
        for _ in range(30):
            storm.step()
        storm.heal()
        storm.check()
        assert "mixed" in storm.kinds


def test_shard_with_many_groups_looks_for_downgrades_in_turns() -> None:
    """With 100,000 groups, which a shard may have, one turn took 400 ms."""
    names = [f"group-{number}" for number in range(20_000)]
    state = CoordinatorState(Map({name: Group(name) for name in names}))
    shard, host = SimpleNamespace(state=state, rounds=None), SimpleNamespace(limits=GroupLimits())
    turns = 0

    async def main() -> None:
        nonlocal turns
        task = asyncio.ensure_future(MixedGroups(cast(Any, shard), cast(Any, host)).start(state))
        while not task.done():
            turns += 1
            await asyncio.sleep(0)
        await task

    asyncio.run(main())
    assert turns > 3
