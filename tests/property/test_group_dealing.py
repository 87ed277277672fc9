"""Any topics, members and last target: everything is dealt once, evenly, and with as few moves as that allows."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.groups.machine import Topics

from tidelog.coordinator.assignors import ASSIGNORS, Subscriber, assign
from tidelog.coordinator.records import Partitions
from tidelog.coordinator.requests import TopicShape
from tidelog.model.ids import TopicId

NAMES = ("a", "b", "c")
RACKS = st.sampled_from(["", "r1", "r2"])


@st.composite
def views(draw: st.DrawFn) -> Topics:
    sizes = {name: draw(st.integers(1, 9)) for name in NAMES}
    racks = {}
    if draw(st.booleans()):
        racks = {
            name: tuple(frozenset(draw(st.sets(st.sampled_from(["r1", "r2", "r3"]), max_size=2))) for _ in range(size))
            for name, size in sizes.items()
        }
    return Topics.of(racks, **sizes)


def reading(view: Topics, names: frozenset[str]) -> tuple[TopicId, ...]:
    return tuple(view.shapes[name].topic_id for name in sorted(names))


def shapes(view: Topics) -> dict[TopicId, TopicShape]:
    return {shape.topic_id: shape for shape in view.shapes.values()}


def check_whole(view: Topics, members: dict[str, Subscriber], made: dict[str, Partitions]) -> None:
    together = [partition for partitions in made.values() for partition in partitions]
    assert len(together) == len(set(together))
    read = {topic for member in members.values() for topic in member.topics}
    assert set(together) == {partition for partition in view.all() if partition.topic_id in read}
    for member_id, partitions in made.items():
        assert {partition.topic_id for partition in partitions} <= set(members[member_id].topics)


def kept(before: dict[str, Partitions], after: dict[str, Partitions]) -> int:
    return sum(len(after[member_id] & before.get(member_id, frozenset())) for member_id in after)


CROWDS = st.lists(
    st.dictionaries(
        st.sampled_from("uvwxyz"), st.tuples(st.frozensets(st.sampled_from(NAMES), min_size=1), RACKS), min_size=1
    ),
    min_size=2,
    max_size=4,
)


@pytest.mark.requirement("a:F-12")
@given(views(), views(), CROWDS)
def test_uniform_with_equal_subscriptions_is_even_and_moves_the_least(
    first: Topics, second: Topics, crowds: list[dict[str, tuple[frozenset[str], str]]]
) -> None:
    target: dict[str, Partitions] = {}
    for view, crowd in zip([first, second] * 2, crowds, strict=False):
        read = reading(view, next(iter(crowd.values()))[0])
        members = {member_id: Subscriber(read, rack) for member_id, (_, rack) in crowd.items()}
        made = assign("uniform", shapes(view), members, target)
        check_whole(view, members, made)
        counts = [len(partitions) for partitions in made.values()]
        assert max(counts) - min(counts) <= 1
        share, extra = divmod(sum(counts), len(counts))
        valid = {partition for partition in view.all() if partition.topic_id in read}
        old = [len(target.get(member_id, frozenset()) & valid) for member_id in members]
        most = sum(min(count, share) for count in old) + min(extra, sum(count > share for count in old))
        assert kept(target, made) == most, "nothing moves that could stay"
        assert assign("uniform", shapes(view), members, made) == made
        target = made


@given(views(), views(), CROWDS)
def test_any_assignor_deals_everything_to_those_who_read_it(
    first: Topics, second: Topics, crowds: list[dict[str, tuple[frozenset[str], str]]]
) -> None:
    for name in sorted(ASSIGNORS):
        target: dict[str, Partitions] = {}
        for view, crowd in zip([first, second] * 2, crowds, strict=False):
            members = {member_id: Subscriber(reading(view, names), rack) for member_id, (names, rack) in crowd.items()}
            made = assign(name, shapes(view), members, target)
            check_whole(view, members, made)
            assert assign(name, shapes(view), members, made) == made, "dealt again, nothing moves"
            if name == "uniform":
                check_even(members, made)
            target = made


def check_even(members: dict[str, Subscriber], made: dict[str, Partitions]) -> None:
    """Nobody has two more than one who could relieve it, directly or through others."""
    takers = {
        giver: {taker for taker, member in members.items() if {p.topic_id for p in made[giver]} & set(member.topics)}
        for giver in members
    }
    for giver in members:
        reached, waiting = {giver}, [giver]
        while waiting:
            new = takers[waiting.pop()] - reached
            reached |= new
            waiting += new
        assert min(len(made[taker]) for taker in reached) >= len(made[giver]) - 1


@given(views(), st.integers(1, 12))
def test_range_gives_neighbours_and_roundrobin_turns(view: Topics, count: int) -> None:
    read = reading(view, frozenset(NAMES))
    members = {f"m{number:02}": Subscriber(read) for number in range(count)}
    ranges = assign("range", shapes(view), members, {})
    for shape in view.shapes.values():
        numbers = [sorted(p.partition for p in ranges[m] if p.topic_id == shape.topic_id) for m in sorted(members)]
        assert [n for mine in numbers for n in mine] == list(range(shape.partitions)), (
            "in the order of the members, without gaps"
        )
        assert all(len(one) >= len(next_one) >= len(one) - 1 for one, next_one in pairwise(numbers))
    turns = assign("roundrobin", shapes(view), members, {})
    counts = [len(turns[member_id]) for member_id in sorted(members)]
    assert all(one >= next_one >= one - 1 for one, next_one in pairwise(counts))
