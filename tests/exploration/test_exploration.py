"""The explorer visits what there is and finds what is wrong; the cores hold in the small explorations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.brokers import partition_defects
from support.raft.core_cluster import Cluster

from exploration import partition_model, raft_model
from exploration.campaign import EXPLORATIONS
from exploration.explorer import Bounds, ViolationError, explore, replay
from exploration.toy import LockModel
from tidelog.raft.core import RaftCore
from tidelog.raft.effects import HardState
from tidelog.raft.elections import Elections
from tidelog.raft.leader import LeaderState
from tidelog.replication import partition


def test_the_explorer_visits_every_state_of_a_toy_once() -> None:
    """Two nodes, no restart. Nobody asks: 1. One asks: its request, the grant, the lock: 3 for each node. Both ask:
    each request is on its way or refused: 4."""
    report = explore(LockModel(nodes=2, restarts_max=0, is_symmetric=False))
    assert (report.states, report.is_complete) == (11, True)
    assert explore(LockModel(nodes=2, restarts_max=0)).states == 7, "of two states that are mirror images one is kept"


def test_a_symmetric_key_hides_no_reachable_state() -> None:
    whole, merged = explore(LockModel(is_symmetric=False)), explore(LockModel())
    assert whole.is_complete
    assert merged.is_complete
    assert merged.states < whole.states <= 6 * merged.states
    assert merged.depth == whole.depth


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_the_explorer_finds_the_known_bug_of_a_toy_by_the_shortest_path(is_symmetric: bool) -> None:
    explore(LockModel(is_symmetric=is_symmetric))
    model = LockModel(forgets_grants=True, is_symmetric=is_symmetric)
    with pytest.raises(ViolationError, match="hold the lock") as found:
        explore(model)
    assert len(found.value.path) == 7
    with pytest.raises(AssertionError, match="hold the lock"):
        replay(model, found.value.path)


def test_bounds_end_a_search_and_the_report_says_so() -> None:
    for bounds in (Bounds(states_max=20), Bounds(depth_max=3), Bounds(seconds_max=0)):
        report = explore(LockModel(), bounds)
        assert not report.is_complete
        assert 1 < report.states < 162


def test_keys_of_raft_states_have_every_field_of_a_core() -> None:
    """A field that no key has could differ between two states that are taken for one."""
    cluster = Cluster(3)
    cluster.elect(1)
    core = cluster.core(1)
    leader = core.leader_state
    assert leader is not None
    for instance in (core, core.elections, leader, leader.peers[next(iter(leader.peers))]):
        assert set(vars(instance)) == set(raft_model.FIELDS[type(instance).__name__]), type(instance).__name__


SMALL = [
    "raft-election-crash",
    "raft-election-proposal-loss",
    "raft-led-takeover",
    "partition-crash",
    "partition-three-fence",
]


@pytest.mark.parametrize("name", SMALL)
def test_cores_hold_in_every_order_of_a_few_events(name: str) -> None:
    report = explore(EXPLORATIONS[name], Bounds(states_max=400, progress_every=50))
    assert report.states >= 100
    assert report.progress_checks > 0


def _every_log_is_up_to_date(_: Elections, _end: int, _epoch: int) -> bool:
    return True


def _older_epochs_commit_by_counting(_: LeaderState, _offset: int) -> bool:
    return True


def _votes_are_not_stored(core: RaftCore, now_ms: int) -> None:
    _HARVEST(core, now_ms)
    persist = core.out.persist
    assert persist is not None
    core.out.persist = persist._replace(hard_state=HardState(persist.hard_state.epoch, None))


def _acks_are_sent_before_the_sync(core: RaftCore) -> Any:
    return _ACK(core)._replace(match=core._matched)


_HARVEST, _ACK = RaftCore._harvest_persist, RaftCore._append_ack
RAFT_DEFECTS: list[tuple[type, str, Callable[..., Any], str]] = [
    (Elections, "_is_up_to_date", _every_log_is_up_to_date, "raft-led-takeover"),
    (RaftCore, "_harvest_persist", _votes_are_not_stored, "raft-election-crash"),
    (RaftCore, "_append_ack", _acks_are_sent_before_the_sync, "raft-led-beat-loss"),
]


@pytest.mark.parametrize(("owner", "method", "defect", "name"), RAFT_DEFECTS)
def test_a_defect_of_raft_is_found(
    owner: type, method: str, defect: Callable[..., Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, defect)
    with pytest.raises(ViolationError):
        explore(EXPLORATIONS[name], Bounds(states_max=20_000))


@pytest.mark.parametrize(
    ("defect", "event"),
    [
        (partition_defects.OwnDurableEndIsTheLogEnd, "crashes"),
        (partition_defects.NewLeaderCommitsItsWholeLog, "fences"),
        (partition_defects.MinIsrIsIgnored, "crashes"),
        (partition_defects.PendingRemovalsDoNotCount, "waits"),
    ],
)
def test_a_defect_of_replication_is_found(defect: type[partition.LeaderState], event: str) -> None:
    """Two replicas, one record and one event of this kind are enough."""
    left = {**dict.fromkeys(vars(partition_model.PartitionBudgets()), 0), "appends": 1, event: 1}
    model = partition_model.PartitionModel(partition_model.PartitionBudgets(**left), brokers=2, leader_type=defect)
    with pytest.raises(ViolationError, match="lacks what is committed") as found:
        explore(model, Bounds(states_max=6_000))
    assert len(found.value.path) <= 7
