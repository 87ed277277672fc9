"""The assignors: the worked examples exactly, balance, few moves, racks, members that read different topics."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest
from support.groups.machine import Topics

from tidelog.coordinator.assignors import Subscriber, assign
from tidelog.coordinator.records import Partitions
from tidelog.model.ids import PartitionId


def subscribers(view: Topics, members: Mapping[str, tuple[str, ...]], **racks: str) -> dict[str, Subscriber]:
    return {
        member_id: Subscriber(tuple(view.shapes[name].topic_id for name in sorted(names)), racks.get(member_id, ""))
        for member_id, names in members.items()
    }


def dealt(
    name: str,
    view: Topics,
    members: Mapping[str, tuple[str, ...]],
    previous: Mapping[str, Partitions] | None = None,
    **racks: str,
) -> dict[str, Partitions]:
    topics = {shape.topic_id: shape for shape in view.shapes.values()}
    made = assign(name, topics, subscribers(view, members, **racks), previous or {})
    read = {name for names in members.values() for name in names}
    together = [partition for partitions in made.values() for partition in partitions]
    assert len(together) == len(set(together))
    assert set(together) == (view.all(*read) if read else set())
    return made


def moves(before: Mapping[str, Partitions], after: Mapping[str, Partitions]) -> int:
    return sum(len(after[member] - before.get(member, frozenset())) for member in after)


BOTH = ("T1", "T2")


@pytest.mark.requirement("a:F-10", "b:H-09", "a:X3-33", "b:EX-21")
def test_range_deals_consecutive_partitions_of_each_topic() -> None:
    view = Topics.of(T1=3, T2=3)
    made = dealt("range", view, {"C1": BOTH, "C2": BOTH})
    assert made["C1"] == {view.part("T1", 0), view.part("T1", 1), view.part("T2", 0), view.part("T2", 1)}
    assert made["C2"] == {view.part("T1", 2), view.part("T2", 2)}


@pytest.mark.requirement("a:F-11", "b:H-10", "a:X3-33", "b:EX-21")
def test_roundrobin_deals_all_partitions_one_by_one() -> None:
    view = Topics.of(T1=3, T2=3)
    made = dealt("roundrobin", view, {"C1": BOTH, "C2": BOTH})
    assert made["C1"] == {view.part("T1", 0), view.part("T1", 2), view.part("T2", 1)}
    assert made["C2"] == {view.part("T1", 1), view.part("T2", 0), view.part("T2", 2)}


@pytest.mark.requirement("b:H-02", "a:F-01", "b:H-01")
@pytest.mark.parametrize("name", ["uniform", "range", "roundrobin"])
@pytest.mark.parametrize(
    ("members", "numbers"), [(1, [4]), (2, [2, 2]), (3, [2, 1, 1]), (4, [1] * 4), (5, [1] * 4 + [0])]
)
def test_four_partitions_scale_over_members_and_the_fifth_is_idle(name: str, members: int, numbers: list[int]) -> None:
    view = Topics.of(t1=4)
    made = dealt(name, view, {f"c{number}": ("t1",) for number in range(members)})
    assert sorted((len(partitions) for partitions in made.values()), reverse=True) == numbers


@pytest.mark.requirement("b:H-05")
def test_ten_partitions_become_five_each_when_a_second_member_comes() -> None:
    view = Topics.of(t=10)
    one = dealt("uniform", view, {"a": ("t",)})
    two = dealt("uniform", view, {"a": ("t",), "b": ("t",)}, one)
    assert [len(two["a"]), len(two["b"])] == [5, 5]
    assert two["a"] < one["a"], "what stays was there before"


@pytest.mark.requirement("a:F-12")
def test_uniform_moves_no_more_than_balance_demands() -> None:
    view = Topics.of(x=17, y=14)
    names = ("x", "y")
    members = {f"m{number}": names for number in range(5)}
    first = dealt("uniform", view, members)
    assert moves(first, dealt("uniform", view, members, first)) == 0
    more = dealt("uniform", view, {**members, "new": names}, first)
    assert sorted(map(len, more.values())) == [5, 5, 5, 5, 5, 6]
    assert moves(first, more) == len(more["new"])
    fewer = dealt("uniform", view, {name: names for name in members if name != "m2"}, first)
    assert moves(first, fewer) == len(first["m2"]), "only what the one had who left"
    assert sorted(map(len, fewer.values())) == [7, 8, 8, 8]


def test_uniform_gives_added_partitions_to_whom_has_least_and_moves_none() -> None:
    before_view = Topics.of(x=4)
    members = dict.fromkeys("abc", ("x",))
    before = dealt("uniform", before_view, members)
    after = dealt("uniform", Topics.of(x=10), members, before)
    assert all(before[name] <= after[name] for name in members)
    assert sorted(map(len, after.values())) == [3, 3, 4]


def test_uniform_forgets_partitions_that_are_gone() -> None:
    before = dealt("uniform", Topics.of(x=4, y=4), {"a": ("x", "y"), "b": ("x", "y")})
    smaller = Topics.of(x=4)
    after = dealt("uniform", smaller, {"a": ("x",), "b": ("x",)}, before)
    assert [len(after["a"]), len(after["b"])] == [2, 2]


@pytest.mark.parametrize("name", ["uniform", "range", "roundrobin"])
def test_nobody_gets_what_it_does_not_read(name: str) -> None:
    view = Topics.of(x=5, y=3, z=1)
    members = {"a": ("x", "y"), "b": ("y",), "c": ("x", "z"), "idle": ()}
    made = dealt(name, view, members)
    for member, names in members.items():
        assert made[member] <= (view.all(*names) if names else set())
    assert dealt(name, view, {}) == {}
    assert dealt(name, view, {"idle": ()}) == {"idle": frozenset()}


def test_uniform_evens_out_through_members_in_between() -> None:
    # a and b share x, b and c share y: c can only relieve a by way of b.
    view = Topics.of(x=4, y=2)
    members = {"a": ("x",), "b": ("x", "y"), "c": ("y",)}
    before = {
        "a": frozenset(view.part("x", number) for number in range(3)),
        "b": frozenset({view.part("x", 3), view.part("y", 0)}),
        "c": frozenset({view.part("y", 1)}),
    }
    made = dealt("uniform", view, members, before)
    assert {name: len(made[name]) for name in members} == {"a": 2, "b": 2, "c": 2}
    assert moves(before, made) == 2


def test_uniform_takes_the_shortest_way() -> None:
    view = Topics.of(x=5, y=1)
    members = {"a": ("x",), "b": ("x", "y"), "c": ("y",)}
    mine = frozenset(view.part("x", number) for number in range(3))
    before = {"a": mine, "b": view.all() - mine}
    made = dealt("uniform", view, members, before)
    assert moves(before, made) == 1
    assert made["c"] == view.all("y")


def test_uniform_with_different_subscriptions_is_sticky_and_balanced() -> None:
    view = Topics.of(x=12, y=6, z=6)
    members = {"a": ("x", "y"), "b": ("x", "y"), "c": ("x", "z"), "d": ("z",)}
    first = dealt("uniform", view, members)
    assert sorted(map(len, first.values())) == [6, 6, 6, 6]
    assert moves(first, dealt("uniform", view, members, first)) == 0
    after = dealt("uniform", view, {**members, "e": ("x",)}, first)
    assert max(map(len, after.values())) - min(map(len, after.values())) <= 1
    assert moves(first, after) <= 2 * len(after["e"])


def test_uniform_prefers_a_replica_in_the_rack_without_hurting_balance() -> None:
    racks = tuple(frozenset({"r1"} if number % 2 else {"r2"}) for number in range(8))
    view = Topics.of({"x": racks}, x=8)
    made = dealt("uniform", view, {"a": ("x",), "b": ("x",)}, a="r1", b="r2")
    assert made["a"] == {view.part("x", number) for number in (1, 3, 5, 7)}
    lonely = dealt("uniform", view, {"a": ("x",), "b": ("x",)}, a="r1", b="r1")
    assert [len(lonely["a"]), len(lonely["b"])] == [4, 4], "balance goes first"
    three = dealt("uniform", view, {"a": ("x",), "b": ("x",), "c": ("x",)}, a="r1", b="r2", c="r9")
    assert sorted(map(len, three.values())) == [2, 3, 3]
    assert all(p.partition % 2 == 1 for p in three["a"])
    assert all(p.partition % 2 == 0 for p in three["b"])


def test_racks_also_count_where_subscriptions_differ() -> None:
    racks = tuple(frozenset({"r1"} if number % 2 else {"r2"}) for number in range(6))
    view = Topics.of({"x": racks}, x=6, y=1)
    made = dealt("uniform", view, {"a": ("x",), "b": ("x",), "c": ("y",)}, a="r1", b="r2")
    assert made["a"] == {view.part("x", number) for number in (1, 3, 5)}


def test_static_members_keep_their_place_in_the_order() -> None:
    view = Topics.of(x=3)
    topics = {shape.topic_id: shape for shape in view.shapes.values()}
    read = (view.shapes["x"].topic_id,)
    made = assign("range", topics, {"zz": Subscriber(read, "", "inst-1"), "aa": Subscriber(read)}, {})
    assert len(made["zz"]) == 2, "the instance id goes before member ids"


def test_dealing_many_partitions_is_fast() -> None:
    """1,000 x 10 well under 50 ms; the bounds here leave room for a busy machine."""
    view = Topics.of(x=500, y=500)
    names = ("x", "y")
    members = {f"m{number}": names for number in range(10)}
    before = dealt("uniform", view, members)
    began = time.perf_counter()
    for name in ("uniform", "range", "roundrobin"):
        dealt(name, view, {**members, "new": names}, before)
    assert time.perf_counter() - began < 0.5
    big = Topics.of(**{f"t{number:03}": 100 for number in range(100)})
    everybody = {f"m{number:03}": tuple(big.shapes) for number in range(100)}
    mixed = {name: tuple(big.shapes)[index % 10 :: 2] for index, name in enumerate(everybody)}
    for crowd in (everybody, mixed):
        before = dealt("uniform", big, crowd)
        began = time.perf_counter()
        dealt("uniform", big, {name: names for name, names in crowd.items() if name != "m050"}, before)
        assert time.perf_counter() - began < 3


def test_the_same_input_gives_the_same_target() -> None:
    view = Topics.of(x=20, y=7)
    forward = {"a": ("x",), "b": ("x", "y"), "c": ("y",)}
    backward = dict(reversed(forward.items()))
    for name in ("uniform", "range", "roundrobin"):
        assert dealt(name, view, forward) == dealt(name, view, backward)


def test_partitions_are_ids_of_the_topic_incarnation() -> None:
    view = Topics.of(x=1)
    assert dealt("range", view, {"a": ("x",)}) == {"a": {PartitionId(view.shapes["x"].topic_id, 0)}}
