"""A group changes its protocol member by member, by the requests of Kafka clients."""

from __future__ import annotations

import asyncio

from support.groups.cluster import GroupCluster
from support.groups.mixed_model import encode_subscription
from support.kafka.group_api import Classic, GroupApi, codes, commit_of, describe, going_on, joining, name_of, parts

from tidelog.coordinator.consumer_protocol import encode_assignment, parse_assignment
from tidelog.rpc.kafka.messages import groups as messages

pytest_plugins = ["support.kafka.group_fixtures"]

PARTITIONS = 4


class Client(Classic):
    """A classic client that assigns by range, if it leads, and holds what it is assigned."""

    def __init__(self, api: GroupApi, group: str, *, cooperative: bool = False, instance_id: str | None = None) -> None:
        super().__init__(api, group, instance_id=instance_id)
        self.cooperative = cooperative
        self.held: list[int] = []

    async def rejoin(self) -> None:
        """Once: join and sync."""
        if not self.cooperative:
            self.held = []
        owned = {"orders": self.held} if self.cooperative else None
        metadata = encode_subscription(["orders"], owned)
        await self.join(protocols=[messages.JoinGroupRequestProtocol(name="range", metadata=metadata)])
        if self.error:
            return
        members = sorted(one.member_id for one in self.joined.members)
        dealt = [
            messages.SyncGroupRequestAssignment(
                member_id=member_id,
                assignment=encode_assignment({"orders": range(number, PARTITIONS, len(members))}),
            )
            for number, member_id in enumerate(members)
        ]
        request = messages.SyncGroupRequest(
            group_id=self.group,
            generation_id=self.generation,
            member_id=self.member_id,
            group_instance_id=self.instance_id,
            protocol_type="consumer",
            protocol_name="range",
            assignments=dealt,
        )
        response = await self.api.call(request, 5)
        self.error = name_of(response.error_code)
        if not self.error:
            rows = parse_assignment(response.assignment).partitions
            before, self.held = self.held, sorted(number for _, numbers in rows for number in numbers)
            if self.cooperative and set(before) - set(self.held):
                await self.rejoin()

    async def follow(self) -> None:
        """One heartbeat, and what it asks for."""
        error = await self.beat()
        if error == "REBALANCE_IN_PROGRESS":
            await self.rejoin()
        elif error:
            self.member_id, self.generation, self.held = "", -1, []
            await self.rejoin()


async def follow(*members: Client) -> None:
    await asyncio.gather(*(member.follow() for member in members))


def described(api: GroupApi, group: str) -> tuple[str, dict[str, int]]:
    (row,) = api.ask(messages.ConsumerGroupDescribeRequest(group_ids=[group])).groups
    assert row.error_code == 0
    return row.group_state, {one.member_id: one.member_type for one in row.members}


def test_a_classic_group_is_upgraded_and_downgraded_member_by_member(cluster: GroupCluster, api: GroupApi) -> None:
    eager, cooperative = Client(api, "roll"), Client(api, "roll", cooperative=True)

    async def begin() -> None:
        await asyncio.gather(eager.rejoin(), cooperative.rejoin())

    api.run(begin)
    assert sorted(eager.held + cooperative.held) == [0, 1, 2, 3]
    first = eager.held[0]
    assert api.run(lambda: eager.commit(4, partition=first)) == ""

    # Up: a consumer joins, and gets its share from those who give it up.
    consumer = api.ask(joining("roll"))
    assert (consumer.error_code, consumer.assignment.topic_partitions) == (0, [])
    assert describe(api, "roll").group_state == "Dead"
    state, types = described(api, "roll")
    assert (state, types) == (
        "Reconciling",
        {eager.member_id: 0, cooperative.member_id: 0, consumer.member_id: 1},
    )
    (listed,) = [one for one in api.ask(messages.ListGroupsRequest()).groups if one.group_id == "roll"]
    assert (listed.group_type, listed.protocol_type) == ("consumer", "consumer")
    holds: list[int] = []

    def is_shared() -> bool:
        nonlocal consumer, holds
        api.run(lambda: follow(eager, cooperative))
        answer = api.ask(going_on("roll", consumer))
        assert answer.error_code == 0
        consumer.member_epoch = answer.member_epoch
        if answer.assignment is not None:
            holds = parts(answer) if answer.assignment.topic_partitions else []
            api.ask(going_on("roll", consumer, topic_partitions=answer.assignment.topic_partitions))
        held = [*eager.held, *cooperative.held, *holds]
        assert len(held) == len(set(held)), "a partition has one owner"
        return len(held) == PARTITIONS and bool(holds)

    api.until(is_shared)
    assert described(api, "roll")[0] == "Stable"
    assert cluster.committed("roll") == {("orders", first): 4}, "offsets are those of the group"
    assert api.run(lambda: cooperative.commit(5, partition=cooperative.held[0])) == ""
    commit = commit_of("roll", {("orders", holds[0]): 6})
    commit.member_id, commit.generation_id_or_member_epoch = consumer.member_id, consumer.member_epoch
    assert codes(api.ask(commit, 9)) == [""]
    assert api.run(lambda: eager.commit(7, partition=holds[0])) == "REBALANCE_IN_PROGRESS"

    # Down: the consumer leaves, the others make a generation of their own.
    assert api.ask(going_on("roll", consumer, member_epoch=-1)).error_code == 0
    api.until(lambda: describe(api, "roll").group_state == "PreparingRebalance")
    assert api.run(lambda: cooperative.commit(8, partition=cooperative.held[0])) == "", "with what it knows"
    for _ in range(3):
        api.run(lambda: follow(eager, cooperative))
    assert sorted(eager.held + cooperative.held) == [0, 1, 2, 3]
    assert eager.generation == cooperative.generation
    assert describe(api, "roll").group_state == "Stable"
    assert api.run(eager.leave) == ""
    assert api.run(cooperative.leave) == ""
    api.until(lambda: describe(api, "roll").group_state == "Empty")


def test_a_classic_member_joins_and_leaves_a_consumer_group(api: GroupApi) -> None:
    consumer = api.ask(joining("visit"))
    guest = Client(api, "visit")
    api.run(guest.rejoin)
    assert (guest.error, guest.joined.leader, guest.held) == ("", "", [])
    assert described(api, "visit")[1] == {consumer.member_id: 1, guest.member_id: 0}
    answer = api.ask(going_on("visit", consumer))
    api.ask(going_on("visit", answer, topic_partitions=answer.assignment.topic_partitions))
    api.run(guest.follow)
    assert sorted(parts(answer) + guest.held) == [0, 1, 2, 3]
    assert api.run(lambda: guest.beat(generation_id=guest.generation + 100)) == "ILLEGAL_GENERATION"
    assert api.run(lambda: guest.beat(member_id=consumer.member_id)) == "UNKNOWN_MEMBER_ID"
    assert api.run(guest.leave) == ""
    assert parts(api.ask(going_on("visit", answer))) == [0, 1, 2, 3]
    assert api.ask(going_on("visit", answer, member_epoch=-1)).error_code == 0


def test_static_members_change_their_protocol_under_their_instance_ids(api: GroupApi) -> None:
    old = Client(api, "static", instance_id="slot")
    api.run(old.rejoin)
    assert old.held == [0, 1, 2, 3]
    # A static classic member is stopped without a word: the new one has its place at once.
    new = api.ask(joining("static", instance_id="slot"))
    assert parts(new) == [0, 1, 2, 3]
    assert api.run(old.beat) == "FENCED_INSTANCE_ID"
    # And back.
    assert api.ask(going_on("static", new, member_epoch=-2, instance_id="slot")).error_code == 0
    back = Client(api, "static", instance_id="slot")
    for _ in range(4):
        api.run(back.rejoin)
        if back.held:
            break
    assert back.held == [0, 1, 2, 3]
    api.until(lambda: describe(api, "static").group_state in ("PreparingRebalance", "Stable"))
    api.run(back.follow)
    assert describe(api, "static").group_state == "Stable"
    assert api.run(back.leave) == ""


def test_a_group_of_another_kind_of_clients_is_not_converted(api: GroupApi) -> None:
    worker = Classic(api, "connect")

    async def begin() -> None:
        await worker.join(protocol_type="connect")
        worker.joined.protocol_type = "connect"

    api.run(begin)
    refused = api.ask(joining("connect"))
    assert name_of(refused.error_code) == "GROUP_ID_NOT_FOUND"
    assert "connect" in refused.error_message
    assert api.run(worker.leave) == ""
