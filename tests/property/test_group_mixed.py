"""Any history of a group whose members speak both protocols keeps the promises of a group
(`support.groups.mixed_model`)."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.groups.mixed_model import MixedModel

from tidelog.coordinator import classic_members, machine, migration, offsets
from tidelog.coordinator.classic_requests import ClassicJoin
from tidelog.coordinator.consumer_protocol import parse_subscription
from tidelog.coordinator.records import NO_PARTITIONS, CurrentValue
from tidelog.coordinator.state import Group

HISTORIES = st.lists(st.integers(0, 1 << 20), max_size=120)


@pytest.mark.case("C6")
@given(HISTORIES)
def test_any_history_of_both_protocols_keeps_the_promises(history: list[int]) -> None:
    MixedModel().run(history)


def histories(count: int, length: int = 150) -> list[list[int]]:
    source = random.Random(24)
    return [[source.randrange(1 << 20) for _ in range(length)] for _ in range(count)]


def run_all(many: list[list[int]]) -> None:
    for history in many:
        MixedModel().run(history)


@pytest.mark.case("C6")
def test_long_histories_of_both_protocols_convert_groups_and_keep_the_promises() -> None:
    upgrades = downgrades = 0
    for history in histories(60, 300):
        model = MixedModel()
        model.run(history)
        upgrades, downgrades = upgrades + model.upgrades, downgrades + model.downgrades
    assert min(upgrades, downgrades) > 5, "the histories convert groups"


# ---- Deliberate defects: a checker that cannot fail is worthless.

Patch = Callable[[pytest.MonkeyPatch], None]


def gives_away_with_the_join(patch: pytest.MonkeyPatch) -> None:
    """What a join does not declare is free at once, though the join may be late."""
    right = classic_members.join

    def wrong(state: Any, request: Any, limits: Any) -> Any:
        records, reply = right(state, request, limits)
        made = []
        for record in records:
            value = record.value
            if isinstance(value, CurrentValue) and value.is_joining:
                value = replace(value, assigned=value.assigned & value.declared, revoking=NO_PARTITIONS)
                record = replace(record, value=value)
            made.append(record)
        return made, reply

    patch.setitem(machine.DECISIONS, ClassicJoin, wrong)


def takes_what_others_hold(patch: pytest.MonkeyPatch) -> None:
    right = classic_members._after_sync

    def wrong(group: Any, member_id: str) -> Any:
        return right(replace(group, owners=Group("").owners), member_id)

    patch.setattr(classic_members, "_after_sync", wrong)


def forgets_what_is_given_up_while_it_upgrades(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(migration, "_subscription", lambda _, member: replace(parse_subscription(member.metadata), owned=()))


def upgrades_without_assignments(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(migration, "_assigned", lambda *_: NO_PARTITIONS)


def believes_members_that_were_removed(patch: pytest.MonkeyPatch) -> None:
    right = classic_members.join

    def wrong(state: Any, request: Any, limits: Any) -> Any:
        group = state.group("g")
        if group is not None and request.join.member_id not in group.members:
            request = replace(request, join=replace(request.join, member_id=""))
        return right(state, request, limits)

    patch.setitem(machine.DECISIONS, ClassicJoin, wrong)


def never_asks_for_a_join(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(classic_members, "needs_join", lambda *_: False)


def takes_commits_of_anybody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(offsets, "_stale_epoch_error", lambda *_: None)


@pytest.mark.parametrize(
    "defect",
    [
        gives_away_with_the_join,
        takes_what_others_hold,
        forgets_what_is_given_up_while_it_upgrades,
        upgrades_without_assignments,
        believes_members_that_were_removed,
        never_asks_for_a_join,
        takes_commits_of_anybody,
    ],
)
def test_deliberate_defects_of_mixed_groups_are_noticed(defect: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    defect(monkeypatch)
    with pytest.raises(AssertionError):
        run_all(histories(600, 200))
