"""Any history of a classic group: every request is answered once, nobody gets another's assignment, rounds end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.groups.classic_group import Rounds

from tidelog.coordinator.classic_group import ClassicState
from tidelog.coordinator.classic_requests import JoinReply, SyncReply
from tidelog.coordinator.state import validate
from tidelog.model.errors import OverloadedError

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "join",
                "join",
                "again",
                "again",
                "changed",
                "sync",
                "sync",
                "beat",
                "leave",
                "wait",
                "store",
                "fail",
                "move",
            ]
        ),
        st.integers(0, 1 << 16),
    ),
    max_size=100,
)


class Members:
    """What members know: their last generation, and to which request of whom a ticket belongs."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds
        self.names: dict[str, str] = {}
        """member id -> instance id."""
        self.asked: dict[int, str] = {}
        self.generations: list[int] = []

    def check(self) -> None:
        for ticket, answer in self.rounds.answers.items():
            member_id = self.asked.get(ticket)
            if member_id is None:
                continue
            if isinstance(answer, SyncReply):
                assert answer.assignment in (b"", member_id.encode()), "nobody gets another's assignment"
            elif isinstance(answer, JoinReply):
                assert answer.member_id == member_id
                assert bool(answer.members) == (answer.leader == member_id), "only the leader sees who takes part"
        group = self.rounds.group
        waiting = [m for m in group.members.values() if m.is_waiting]
        open_tickets = set(range(1, self.rounds.tickets + 1)) - set(self.rounds.answers)
        assert {t for m in waiting for t in (m.join_ticket, m.sync_ticket) if t is not None} == open_tickets
        assert (group.state is ClassicState.EMPTY) == (not group.members)
        assert not waiting or group.deadline_ms is not None or self.rounds.stores, "who waits has somebody to wait for"
        assert group.leader in group.members or not group.members
        instances = [m.instance_id for m in group.members.values() if m.instance_id]
        assert len(instances) == len(set(instances))
        self.generations.append(group.generation)
        assert self.generations == sorted(self.generations)
        validate(self.rounds.groups.state)


@pytest.mark.case("C6")
@pytest.mark.requirement("b:H-08", "a:F-35")
@given(STEPS)
def test_any_history_answers_everybody_once(steps: list[tuple[str, int]]) -> None:
    rounds = Rounds()
    rounds.holds_stores = True
    members = Members(rounds)
    for step, number in steps:
        known = sorted(members.names)
        name = known[number % len(known)] if known else ""
        if step == "join" and len(known) < 6:
            instance = f"i{number % 2}" if number % 3 == 0 else ""
            new = f"m{rounds.tickets}"
            members.names[new] = instance
            members.asked[rounds.join(name=new, instance_id=instance)] = new
        elif step in ("again", "changed") and name:
            metadata = b"meta" if step == "again" else str(number).encode()
            members.asked[rounds.join(name, instance_id=members.names[name], metadata=metadata)] = name
        elif step == "sync" and name:
            dealt = {each: each.encode() for each in rounds.group.members} if name == rounds.group.leader else {}
            members.asked[rounds.sync(name, dealt=dealt)] = name
        elif step == "beat" and name:
            rounds.beat(name)
        elif step == "leave" and name and number % 3 == 0:
            rounds.leave((name, ""))
            del members.names[name]
        elif step == "wait":
            rounds.wait((100, 3_000, 11_000, 61_000)[number % 4])
        elif step == "store" and rounds.stores:
            rounds.store()
        elif step == "fail" and rounds.stores:
            rounds.store(OverloadedError("too much"))
        elif step == "move" and number % 5 == 0 and not rounds.stores:
            # The coordinator goes; the next one finds what is stored.
            rounds.take(rounds.group.close(OverloadedError("moved")))
            assert set(range(1, rounds.tickets + 1)) == set(rounds.answers)
            rounds = Rounds(rounds.groups)
            rounds.holds_stores = True
            members = Members(rounds)
            members.names = {each.member_id: each.instance_id for each in rounds.group.members.values()}
        members.check()
    while rounds.stores:
        rounds.store()
    rounds.holds_stores = False
    rounds.wait(200_000)
    assert rounds.group.state is ClassicState.EMPTY, "nobody heartbeats: all sessions end"
    assert set(range(1, rounds.tickets + 1)) == set(rounds.answers)
    assert rounds.groups.replayed() == rounds.groups.state == rounds.groups.compacted()
