"""Any history of members, networks and topics keeps the promises of a consumer group (`support.groups.model`)."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.groups.model import Model

from tidelog.coordinator import consumer_group, offsets, state
from tidelog.coordinator.records import NO_PARTITIONS

HISTORIES = st.lists(st.integers(0, 1 << 20), max_size=120)


@pytest.mark.case("C6")
@pytest.mark.requirement("a:F-01", "a:F-05", "a:F-13", "a:F-32", "b:H-01")
@given(HISTORIES)
def test_any_history_keeps_the_promises(history: list[int]) -> None:
    Model().run(history)


def histories(count: int, length: int = 150) -> list[list[int]]:
    source = random.Random(9)
    return [[source.randrange(1 << 20) for _ in range(length)] for _ in range(count)]


def run_all(many: list[list[int]]) -> None:
    for history in many:
        Model().run(history)


@pytest.mark.case("C6")
def test_long_histories_keep_the_promises() -> None:
    run_all(histories(25, 300))


# ---- Deliberate defects: a checker that cannot fail is worthless.

Patch = Callable[[pytest.MonkeyPatch], None]


def takes_what_others_hold(patch: pytest.MonkeyPatch) -> None:
    right = consumer_group._reconcile

    def wrong(group: Any, member_id: str) -> Any:
        return right(replace(group, owners=state.Group("").owners), member_id)

    patch.setattr(consumer_group, "_reconcile", wrong)


def believes_old_reports(patch: pytest.MonkeyPatch) -> None:
    right = consumer_group._renew

    def wrong(group: Any, request: Any, limits: Any) -> Any:
        current = group.currents.get(request.member_id)
        if current is not None and request.member_epoch == current.previous_epoch and request.owned is not None:
            request = replace(request, member_epoch=current.epoch)
        return right(group, request, limits)

    patch.setattr(consumer_group, "_renew", wrong)


def revokes_everything(patch: pytest.MonkeyPatch) -> None:
    right = consumer_group._reconcile

    def wrong(group: Any, member_id: str) -> Any:
        before, after = group.currents[member_id], right(group, member_id)
        if after.revoking and not before.revoking:
            return replace(
                after, assigned=NO_PARTITIONS, gained=NO_PARTITIONS, revoking=after.assigned | after.revoking
            )
        return after

    patch.setattr(consumer_group, "_reconcile", wrong)


def does_not_wait_for_reports(patch: pytest.MonkeyPatch) -> None:
    right = consumer_group._move_on

    def wrong(change: Any, member_id: str, *, owned: Any = None) -> None:
        right(change, member_id, owned=frozenset())

    patch.setattr(consumer_group, "_move_on", wrong)


def takes_commits_of_anybody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(offsets, "_stale_epoch_error", lambda *_: None)


def forgets_who_is_away_on_replay(patch: pytest.MonkeyPatch) -> None:
    right = state._Draft._set_current

    def wrong(self: Any, member_id: str, value: Any) -> None:
        before = self.currents.get(member_id)
        if value is not None and before is None and value.epoch == -2:
            value = None
        right(self, member_id, value)

    patch.setattr(state._Draft, "_set_current", wrong)


def never_tells_what_became_free(patch: pytest.MonkeyPatch) -> None:
    right = consumer_group._reconcile

    def wrong(group: Any, member_id: str) -> Any:
        before, after = group.currents[member_id], right(group, member_id)
        return before if before.epoch == group.epoch and after.gained > before.gained else after

    patch.setattr(consumer_group, "_reconcile", wrong)


@pytest.mark.parametrize(
    "defect",
    [
        takes_what_others_hold,
        believes_old_reports,
        revokes_everything,
        does_not_wait_for_reports,
        takes_commits_of_anybody,
        forgets_who_is_away_on_replay,
        never_tells_what_became_free,
    ],
)
def test_deliberate_defects_are_noticed(defect: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    defect(monkeypatch)
    with pytest.raises(AssertionError):
        run_all(histories(400))
