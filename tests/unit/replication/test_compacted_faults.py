"""Brokers with compacted topics under faults, on fixed seeds; and deliberate defects that these runs have to notice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.brokers.compacted_fault_runs import CompactedFaultRun
from support.brokers.fault_runs import patched

from tidelog.replication.deletes import ReplicaDeletes
from tidelog.replication.follower_replica import FollowerReplica

SEEDS = range(9100, 9103)
CATCHING_SEEDS_MAX = 10
_subscribe = FollowerReplica.subscribe


@pytest.mark.parametrize("seed", SEEDS)
def test_no_deleted_key_comes_back_and_no_acknowledged_value_is_lost_under_faults(seed: int) -> None:
    run = CompactedFaultRun(seed)
    assert run.run() > 0, "something was acknowledged"
    assert run.tombstones_gone > 0, "tombstones were compacted away"


def _as_an_older_follower(self: FollowerReplica, *values: Any) -> Any:
    return replace(_subscribe(self, *values), takes_history=False)


DEFECTS: dict[str, tuple[type, str, Any]] = {
    "a replica that missed deletes goes on from its end": (
        ReplicaDeletes,
        "must_copy",
        lambda self, follower, **values: False,
    ),
    "a copy guesses its epochs from the batches": (FollowerReplica, "subscribe", _as_an_older_follower),
}


def _complaint(seed: int) -> str:
    """What a checker says of the run; nothing if none complains."""
    try:
        CompactedFaultRun(seed).run()
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", DEFECTS)
def test_a_deliberate_defect_of_compacted_replicas_is_noticed(name: str) -> None:
    with patched(DEFECTS[name]):
        for seed in range(1, 1 + CATCHING_SEEDS_MAX):
            said = _complaint(seed)
            if any(named in said for named in ("is back", "name other epochs", "were read at")):
                return
    pytest.fail(f"{name}: not noticed in {CATCHING_SEEDS_MAX} seeds")
