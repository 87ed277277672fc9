"""A group changes its protocol while it has members: each transition of `migration` and `classic_members`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.groups.classic_group import Rounds
from support.groups.machine import Groups, Member, Topics
from support.groups.mixed_model import encode_subscription

from tidelog.coordinator import classic_members
from tidelog.coordinator.classic_group import ClassicState
from tidelog.coordinator.classic_requests import (
    ClassicJoin,
    ClassicSync,
    Downgrade,
    GroupMigratedError,
    JoinGroup,
    JoinReply,
    SyncGroup,
)
from tidelog.coordinator.consumer_protocol import encode_assignment, parse_assignment
from tidelog.coordinator.limits import GroupLimits
from tidelog.coordinator.machine import describe_group, summary_of
from tidelog.coordinator.requests import ExpireMember, LiveClassicGroup
from tidelog.model.errors import TidelogError, UnsupportedVersionError
from tidelog.model.group_errors import (
    FencedInstanceIdError,
    GroupFullError,
    IllegalGenerationError,
    InconsistentGroupProtocolError,
    InvalidSessionTimeoutError,
    MemberIdRequiredError,
    RebalanceInProgressError,
    UnknownMemberIdError,
    UnreleasedInstanceIdError,
)

RANGE = "range"


class Mixed:
    """The machine, and classic clients of it."""

    def __init__(self, **limits: Any) -> None:
        self.groups = Groups(view=Topics.of(t=4), limits=GroupLimits(**limits))
        self.rounds = Rounds(self.groups)

    def numbers(self, partitions: Any) -> list[int]:
        return sorted(partition.partition for partition in partitions)

    def parts(self, *numbers: int) -> frozenset[Any]:
        return frozenset(self.groups.view.part("t", number) for number in numbers)

    # A classic group.

    def classic(self, dealt: dict[str, list[int]], owned: dict[str, list[int]] | None = None, **fields: Any) -> None:
        """A stable group; the keys of `dealt` are its members."""
        owned = owned or {}
        for name in dealt:
            said = {"t": owned[name]} if name in owned else None
            self.rounds.join(name=name, protocols=((RANGE, encode_subscription(["t"], said)),), **fields)
        self.rounds.wait(3_000)
        self.deal(dealt)

    def deal(self, dealt: dict[str, list[int]], user_data: bytes = b"") -> None:
        leader = self.rounds.group.leader
        for name in dealt:
            if name != leader:
                self.rounds.sync(name)
        data = {name: encode_assignment({"t": numbers}) for name, numbers in dealt.items()}
        if user_data:
            data = {name: one[:-4] + len(user_data).to_bytes(4, "big") + user_data for name, one in data.items()}
        self.rounds.sync(leader, dealt=data)
        assert self.rounds.group.state is ClassicState.STABLE

    def live(self) -> LiveClassicGroup:
        stored, held = self.groups.state.group("g"), self.rounds.group
        generation = -1 if stored is None or stored.classic is None else stored.classic.generation
        protocols = {member.member_id: member.protocols for member in held.members.values()}
        return LiveClassicGroup(generation, held.generation, protocols)

    def upgrade(self, member_id: str = "new", **fields: Any) -> Member:
        return Member(self.groups, member_id, "t", live_classic=self.live(), **fields)

    # Classic members of a consumer group.

    def join(self, member_id: str, owned: list[int] | None = None, **fields: Any) -> JoinReply:
        metadata = encode_subscription(fields.pop("topics", ["t"]), None if owned is None else {"t": owned})
        plain: dict[str, Any] = {
            "protocol_type": "consumer",
            "protocols": ((RANGE, metadata),),
            "session_timeout_ms": 10_000,
            "rebalance_timeout_ms": 60_000,
            "new_member_id": "given",
            "needs_known_id": False,
        }
        join = JoinGroup(ticket=0, now_ms=0, member_id=member_id, **(plain | fields))
        reply = self.groups.submit(ClassicJoin(group="g", join=join, view=self.groups.view, now_ms=1))
        assert isinstance(reply, JoinReply)
        assert (reply.leader, reply.members) == ("", ()), "the coordinator assigns"
        return reply

    def sync(self, member_id: str, generation: int, **fields: Any) -> list[int]:
        sync = SyncGroup(ticket=0, now_ms=0, member_id=member_id, generation=generation, **fields)
        reply = self.groups.submit(ClassicSync(group="g", sync=sync, view=self.groups.view, now_ms=1))
        return sorted(number for _, numbers in parse_assignment(reply.assignment).partitions for number in numbers)

    def beat(self, member_id: str, generation: int, instance_id: str = "") -> None:
        group = self.groups.state.group("g")
        classic_members.heartbeat(group, "g", member_id, instance_id, generation)

    def rejoin(self, member_id: str, owned: list[int] | None = None, **fields: Any) -> tuple[int, list[int]]:
        generation = self.join(member_id, owned, **fields).generation
        return generation, self.sync(member_id, generation)

    def downgrade(self) -> None:
        self.groups.submit(Downgrade(group="g", view=self.groups.view, now_ms=1))
        assert self.groups.replayed() == self.groups.state == self.groups.compacted()


# ---- Upgrade


def test_a_consumer_that_joins_a_classic_group_makes_it_a_consumer_group() -> None:
    mixed = Mixed()
    mixed.classic({"a": [0, 1], "b": [2, 3]}, session_timeout_ms=9_000, rebalance_timeout_ms=70_000)
    generation = mixed.groups.group().epoch
    new = mixed.upgrade()
    group = mixed.groups.group()
    assert (group.kind, group.classic, sorted(group.members)) == ("consumer", None, ["a", "b", "new"])
    assert group.epoch == generation + 1
    assert new.owned == frozenset(), "everything is owned by others"
    for name, numbers in (("a", [0, 1]), ("b", [2, 3])):
        current, member = group.currents[name], group.members[name]
        assert (current.epoch, mixed.numbers(current.assigned)) == (generation, numbers)
        assert (member.topics, member.session_timeout_ms, member.rebalance_timeout_ms) == (("t",), 9_000, 70_000)
        assert member.classic_protocols == ((RANGE, encode_subscription(["t"])),)
    assert mixed.groups.replayed() == mixed.groups.state == mixed.groups.compacted()
    summary = summary_of("g", mixed.groups.group())
    assert (summary.kind, summary.members) == ("consumer", 3)
    types = {one.member_id: one.is_classic for one in describe_group(mixed.groups.state, "g").members}
    assert types == {"a": True, "b": True, "new": False}


def test_an_eager_member_gives_up_with_its_sync_and_not_with_its_join() -> None:
    mixed = Mixed()
    mixed.classic({"a": [0, 1, 2, 3]})
    new = mixed.upgrade()
    generation = mixed.groups.group().currents["a"].epoch
    with pytest.raises(RebalanceInProgressError):
        mixed.beat("a", generation)
    joined = mixed.join("a")
    assert joined.generation > generation
    new.report()
    assert new.owned == frozenset(), "a join may be late: it gives nothing away"
    with pytest.raises(RebalanceInProgressError):
        mixed.beat("a", generation)
    mixed.beat("a", joined.generation)
    kept = mixed.sync("a", joined.generation)
    assert len(kept) == 2
    mixed.beat("a", joined.generation)
    new.report()
    assert sorted(kept + mixed.numbers(new.owned)) == [0, 1, 2, 3]
    assert mixed.sync("a", joined.generation) == kept, "a repeated sync gets the same answer"


def test_a_cooperative_member_keeps_what_it_has_and_gives_up_with_its_next_join() -> None:
    mixed = Mixed()
    mixed.classic({"a": [0, 1, 2, 3]}, {"a": []})
    new = mixed.upgrade()
    first, kept = mixed.rejoin("a", [0, 1, 2, 3])
    assert len(kept) == 2
    given_up = [number for number in range(4) if number not in kept]
    new.report()
    assert new.owned == frozenset(), "the member is giving it up"
    with pytest.raises(RebalanceInProgressError):
        mixed.beat("a", first)
    assert mixed.groups.commit({mixed.groups.view.part("t", given_up[0]): 5}, "a", first) == {
        mixed.groups.view.part("t", given_up[0]): None
    }, "its last position"
    second, now = mixed.rejoin("a", kept)
    assert (second > first, now) == (True, kept)
    new.report()
    assert mixed.numbers(new.owned) == given_up
    mixed.beat("a", second)


def test_what_a_cooperative_member_gives_up_in_a_classic_round_is_its_own_until_it_joins_again() -> None:
    """The leader has taken 3 from a, and has given it to nobody yet: a may still hold it."""
    mixed = Mixed()
    mixed.classic({"a": [0, 1, 2], "b": []}, {"a": [0, 1, 2, 3], "b": []})
    mixed.upgrade()
    assert mixed.numbers(mixed.groups.group().currents["a"].revoking) == [3]
    generation = mixed.groups.group().currents["a"].epoch
    with pytest.raises(RebalanceInProgressError):
        mixed.beat("a", generation)
    mixed.rejoin("a", [0, 1, 2])
    assert mixed.parts(3) & set(mixed.groups.group().owners) == frozenset()


def test_members_that_have_left_in_memory_are_not_converted() -> None:
    mixed = Mixed()
    mixed.classic({"a": [0, 1], "b": [2, 3]})
    mixed.rounds.leave(("b", ""))
    assert mixed.groups.group().member_count == 2, "the log does not know it yet"
    new = mixed.upgrade()
    assert sorted(mixed.groups.group().members) == ["a", "new"]
    assert mixed.numbers(new.owned) == [2, 3], "what b held is free"


def test_a_member_that_waits_for_its_sync_in_a_round_is_asked_to_join_again() -> None:
    mixed = Mixed()
    mixed.classic({"a": [0, 1, 2, 3]})
    before = mixed.rounds.group.generation
    mixed.rounds.join(name="b", protocols=((RANGE, encode_subscription(["t"])),))
    mixed.rounds.join("a", protocols=((RANGE, encode_subscription(["t"])),))
    assert (mixed.rounds.group.state, mixed.rounds.group.generation) == (ClassicState.COMPLETING, before + 1)
    mixed.upgrade()
    group = mixed.groups.group()
    assert (sorted(group.members), group.epoch) == (["a", "new"], before + 2)
    with pytest.raises(RebalanceInProgressError):
        mixed.sync("a", before + 1)
    with pytest.raises(UnknownMemberIdError):
        mixed.sync("b", before + 1)
    with pytest.raises(IllegalGenerationError):
        mixed.beat("a", before - 1)


@pytest.mark.parametrize("policy", ["disabled", "downgrade"])
def test_a_group_is_not_upgraded_if_the_policy_forbids_it(policy: str) -> None:
    mixed = Mixed(migration_policy=policy)
    mixed.classic({"a": [0, 1, 2, 3]})
    before = mixed.groups.state
    with pytest.raises(InconsistentGroupProtocolError, match=policy):
        mixed.upgrade()
    assert mixed.groups.state is before


def test_groups_that_cannot_be_converted_are_refused_by_name() -> None:
    def refused(error: type[TidelogError], match: str) -> None:
        before = mixed.groups.state
        with pytest.raises(error, match=match):
            mixed.upgrade()
        assert mixed.groups.state is before

    mixed = Mixed()
    mixed.classic({"a": [0]}, protocol_type="connect")
    refused(InconsistentGroupProtocolError, "connect")
    mixed = Mixed()
    mixed.classic({"a": [0, 1], "b": [1, 2]})
    refused(InconsistentGroupProtocolError, "share a partition")
    mixed = Mixed()
    mixed.rounds.stable("a")
    refused(InconsistentGroupProtocolError, "cannot be read")
    for protocol in ("by-weight", RANGE):
        mixed = Mixed()
        mixed.rounds.join(name="a", protocols=((protocol, encode_subscription(["t"])),))
        mixed.rounds.wait(3_000)
        mixed.deal({"a": [0]}, user_data=b"memory of the assignor")
        if protocol == RANGE:
            mixed.upgrade()
        else:
            refused(UnsupportedVersionError, "custom assignor, 'by-weight'")
    mixed = Mixed(members_max=1)
    mixed.classic({"a": [0, 1, 2, 3]})
    refused(GroupFullError, "1 members")


def test_an_upgrade_on_older_rounds_is_dispatched_again() -> None:
    mixed = Mixed()
    mixed.classic({"a": [0, 1, 2, 3]})
    with pytest.raises(GroupMigratedError):
        Member(mixed.groups, "new", "t", live_classic=replace(mixed.live(), stored_generation=0))
    with pytest.raises(GroupMigratedError):
        Member(mixed.groups, "new", "t")


def test_a_consumer_of_a_group_that_is_classic_again_must_join() -> None:
    mixed = Mixed()
    mixed.classic({"a": [0, 1, 2, 3]})
    for epoch in (3, -1):
        with pytest.raises(UnknownMemberIdError):
            mixed.groups.heartbeat("old", epoch)


# ---- Classic members


def mixed_group() -> tuple[Mixed, Member]:
    """A consumer group with one member."""
    mixed = Mixed()
    one = Member(mixed.groups, "one", "t")
    assert mixed.numbers(one.owned) == [0, 1, 2, 3]
    return mixed, one


def test_a_classic_member_joins_a_consumer_group() -> None:
    mixed, one = mixed_group()
    with pytest.raises(MemberIdRequiredError) as asked:
        mixed.join("", needs_known_id=True)
    assert asked.value.member_id == "given"
    generation, got = mixed.rejoin("given")
    assert got == [], "the other one holds everything"
    mixed.beat("given", generation)
    one.beat()
    one.report()
    with pytest.raises(RebalanceInProgressError):
        mixed.beat("given", generation)
    again, got = mixed.rejoin("given", [])
    assert sorted(got + mixed.numbers(one.owned)) == [0, 1, 2, 3]
    part = mixed.groups.view.part("t", got[0])
    assert mixed.groups.commit({part: 9}, "given", again) == {part: None}
    with pytest.raises(IllegalGenerationError):
        mixed.groups.commit({part: 9}, "given", generation)
    taken = mixed.groups.view.part("t", mixed.numbers(one.owned)[0])
    (error,) = mixed.groups.commit({taken: 9}, "given", again).values()
    assert isinstance(error, RebalanceInProgressError)


def test_every_join_has_a_generation_of_its_own_and_leaves_others_alone() -> None:
    mixed, one = mixed_group()
    generations = [mixed.join("x").generation for _ in range(3)]
    assert len(set(generations)) == 3
    with pytest.raises(IllegalGenerationError):
        mixed.sync("x", generations[0])
    mixed.sync("x", generations[2])
    one.report()
    epoch = one.epoch
    mixed.rejoin("x")
    one.report()
    assert one.epoch == epoch


def test_between_join_and_sync_a_member_commits_with_its_last_generation() -> None:
    mixed = Mixed()
    mixed.classic({"a": [0, 1, 2, 3]}, {"a": []})
    mixed.upgrade()
    first, kept = mixed.rejoin("a", [0, 1, 2, 3])
    part = mixed.groups.view.part("t", kept[0])
    second = mixed.join("a", kept).generation
    mixed.join("a", kept)
    assert mixed.groups.commit({part: 1}, "a", first) == {part: None}
    third = mixed.join("a", kept).generation
    assert mixed.sync("a", third) == kept
    for old in (first, second):
        with pytest.raises(IllegalGenerationError):
            mixed.groups.commit({part: 1}, "a", old)


def test_a_member_that_was_removed_gives_up_before_it_joins_again() -> None:
    mixed = Mixed()
    mixed.classic({"a": [0, 1, 2, 3]}, {"a": []})
    new = mixed.upgrade()
    generation = mixed.groups.group().currents["a"].epoch
    mixed.groups.expire("a", generation)
    new.report()
    assert mixed.numbers(new.owned) == [0, 1, 2, 3]
    with pytest.raises(UnknownMemberIdError):
        mixed.beat("a", generation)
    with pytest.raises(UnknownMemberIdError):
        mixed.join("a", [0, 1, 2, 3])
    assert mixed.rejoin("a", [])[1] == []


def test_a_member_that_does_not_join_or_sync_in_time_is_removed() -> None:
    mixed = Mixed()
    mixed.classic({"a": [0, 1, 2, 3]})
    mixed.upgrade()

    def expire(member_id: str) -> None:
        epoch = mixed.groups.group().currents[member_id].epoch
        request = ExpireMember(
            group="g", member_id=member_id, member_epoch=epoch, view=mixed.groups.view, now_ms=1, is_rebalance=True
        )
        mixed.groups.submit(request)

    _, kept = mixed.rejoin("a")
    assert kept, "it has nothing to do now"
    expire("a")
    assert "a" in mixed.groups.group().members
    mixed.join("a")
    expire("a")
    assert sorted(mixed.groups.group().members) == ["new"]


def test_a_join_that_does_not_fit_a_consumer_group_is_refused() -> None:
    mixed, one = mixed_group()
    cases: list[tuple[dict[str, Any], type[TidelogError]]] = [
        ({"protocol_type": "connect"}, InconsistentGroupProtocolError),
        ({"protocols": ()}, InconsistentGroupProtocolError),
        ({"protocols": ((RANGE, b"?"),)}, InconsistentGroupProtocolError),
        ({"session_timeout_ms": 1}, InvalidSessionTimeoutError),
    ]
    for fields, error in cases:
        before = mixed.groups.state
        with pytest.raises(error):
            mixed.join("x", **fields)
        assert mixed.groups.state is before
    with pytest.raises(UnknownMemberIdError):
        mixed.join("one")
    generation = mixed.join("x").generation
    for wrong in ({"protocol": "sticky"}, {"protocol_type": "connect"}):
        with pytest.raises(InconsistentGroupProtocolError):
            mixed.sync("x", generation, **wrong)
    with pytest.raises(UnknownMemberIdError):
        mixed.beat("one", one.epoch)
    with pytest.raises(UnknownMemberIdError):
        mixed.groups.heartbeat("x", generation)


# ---- Static members


def test_a_classic_member_takes_the_place_of_a_consumer_under_its_instance_id() -> None:
    mixed = Mixed()
    Member(mixed.groups, "one", "t", instance_id="i")
    mixed.groups.heartbeat("one", -2, instance_id="i")
    reply = mixed.join("", instance_id="i")
    assert reply.member_id == "given"
    assert mixed.sync("given", reply.generation, instance_id="i") == [0, 1, 2, 3]
    assert dict(mixed.groups.group().instances) == {"i": "given"}
    with pytest.raises(FencedInstanceIdError):
        mixed.groups.heartbeat("one", 1, instance_id="i")
    with pytest.raises(FencedInstanceIdError):
        mixed.beat("one", 1, "i")
    with pytest.raises(FencedInstanceIdError):
        mixed.join("one", instance_id="i")


def test_a_consumer_takes_the_place_of_a_classic_member_under_its_instance_id() -> None:
    mixed = Mixed()
    mixed.classic({"a": [0, 1, 2, 3]}, instance_id="i")
    new = mixed.upgrade(instance_id="i")
    assert mixed.numbers(new.owned) == [0, 1, 2, 3], "with all that it held"
    assert sorted(mixed.groups.group().members) == ["new"]
    with pytest.raises(FencedInstanceIdError):
        mixed.beat("a", 1, "i")
    with pytest.raises(UnreleasedInstanceIdError):
        Member(mixed.groups, "other", "t", instance_id="i")


# ---- Downgrade


def test_a_consumer_group_of_classic_members_becomes_a_classic_group_that_rebalances() -> None:
    mixed, one = mixed_group()
    part = mixed.groups.view.part("t", 1)
    mixed.groups.commit({part: 7}, "one", one.epoch)
    generation, _ = mixed.rejoin("x")
    mixed.downgrade()
    assert mixed.groups.group().kind == "consumer", "one of its members is a consumer"
    mixed.groups.heartbeat("one", -1)
    generation, got = mixed.rejoin("x")
    assert got == [0, 1, 2, 3]
    epoch = mixed.groups.group().epoch
    mixed.downgrade()
    group = mixed.groups.group()
    assert (group.kind, group.epoch, len(group.members), group.offsets[part].offset) == ("classic", epoch, 0, 7)
    assert group.classic is not None
    (member,) = group.classic.members
    assert (member.member_id, member.epoch) == ("x", generation)
    assert parse_assignment(member.assignment).partitions == (("t", (0, 1, 2, 3)),)
    assert mixed.groups.commit({part: 8}, "x", generation) == {part: None}
    # The rounds: everybody joins the next generation, with what it knows.
    rounds = Rounds(mixed.groups)
    assert rounds.group.state.value == "preparing"
    assert isinstance(rounds.beat("x", generation), RebalanceInProgressError)
    assert isinstance(rounds.beat("x", generation - 1), IllegalGenerationError)
    rounds.group.check_commit("x", generation, 1)
    ticket = rounds.join("x", protocols=((RANGE, encode_subscription(["t"])),))
    assert rounds.joined(ticket).generation == epoch + 1
    rounds.sync("x", dealt={"x": encode_assignment({"t": [0, 1, 2, 3]})})
    assert rounds.group.state is ClassicState.STABLE
    with pytest.raises(IllegalGenerationError):
        mixed.groups.commit({part: 9}, "x", generation)
    assert mixed.groups.commit({part: 9}, "x", epoch + 1) == {part: None}


def test_a_member_between_join_and_sync_goes_through_a_downgrade() -> None:
    mixed, _ = mixed_group()
    first, _ = mixed.rejoin("x", [])
    joined = mixed.join("x", []).generation
    mixed.groups.heartbeat("one", -1)
    mixed.downgrade()
    assert mixed.groups.commit({}, "x", first) == {}
    rounds = Rounds(mixed.groups)
    ticket = rounds.sync("x", joined)
    assert isinstance(rounds.answers[ticket], RebalanceInProgressError)


def test_a_group_that_was_downgraded_and_not_dealt_yet_is_upgraded_with_what_its_members_own() -> None:
    mixed, _ = mixed_group()
    mixed.rejoin("x")
    mixed.groups.heartbeat("one", -1)
    generation, got = mixed.rejoin("x")
    mixed.downgrade()
    mixed.rounds = Rounds(mixed.groups)
    new = mixed.upgrade()
    assert new.owned == frozenset()
    current = mixed.groups.group().currents["x"]
    assert (current.epoch, mixed.numbers(current.assigned)) == (generation, got)


@pytest.mark.parametrize("policy", ["disabled", "upgrade"])
def test_a_group_is_not_downgraded_if_the_policy_forbids_it(policy: str) -> None:
    mixed = Mixed(migration_policy=policy)
    one = Member(mixed.groups, "one", "t")
    mixed.rejoin("x")
    mixed.groups.heartbeat("one", -1)
    mixed.downgrade()
    assert mixed.groups.group().kind == "consumer"
    assert mixed.rejoin("x")[1] == mixed.numbers(one.owned), "the coordinator goes on to assign"


def test_a_group_whose_classic_members_share_no_protocol_stays_a_consumer_group() -> None:
    mixed, _ = mixed_group()
    metadata = encode_subscription(["t"])
    mixed.rejoin("x", protocols=((RANGE, metadata), ("sticky", metadata)))
    mixed.rejoin("y", protocols=(("other", metadata),))
    mixed.groups.heartbeat("one", -1)
    mixed.downgrade()
    assert mixed.groups.group().kind == "consumer"
    mixed.rejoin("y", protocols=(("sticky", metadata),))
    mixed.downgrade()
    classic = mixed.groups.group().classic
    assert classic is not None
    assert classic.protocol == "sticky"
