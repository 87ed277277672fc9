"""The audit of a Raft member's storage and status names what it is there for."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.logs.single_log import Lab, open_log

from simulation.raft_audit import RaftAudit
from simulation.status_check import StatusCheck
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.effects import Role
from tidelog.raft.membership import Member, Membership
from tidelog.raft.messages import Entry, EntryKind, SnapshotId
from tidelog.raft.raft_log import RaftLog
from tidelog.world.simulated import SimNode, SimWorld


def _audit(recovering_until: int | None) -> list[str]:
    findings: list[str] = []
    core: Any = SimpleNamespace(recovering_until=recovering_until)

    async def main(node: SimNode) -> None:
        storage: Any = SimpleNamespace(log=await open_log(node))
        RaftAudit("n1", storage, lambda: core, lambda _who, what: findings.append(what)).began()

    with SimWorld(seed=1) as world:
        Lab(world).run(main)
    return findings


def test_a_member_that_recovers_although_nothing_was_harmed_is_named() -> None:
    assert _audit(None) == []
    assert _audit(7) == ["recovers up to 7, and nothing of what it has stored was harmed"]


def test_a_time_without_a_leader_that_is_not_reported_is_named() -> None:
    findings: list[str] = []
    now = [0.0]
    parts = SimpleNamespace(taken=0, installed=0, rejected=0, failed=0)
    metrics: Any = SimpleNamespace(
        elections=0, leader_changes=1, snapshots_taken=0, snapshots_installed=0, snapshots_rejected=0,
        snapshots_failed=0, messages_sent=0, persist_rounds=0,
    )  # fmt: skip
    driver: Any = SimpleNamespace(
        core=SimpleNamespace(epoch=Epoch(1), role=Role.FOLLOWER, leader=None),
        metrics=metrics,
        _snapshotter=parts,
        _peers=SimpleNamespace(sent=0),
        _persister=SimpleNamespace(rounds=0),
        without_leader_total_ms=lambda: 250,
    )
    metrics.__slots__ = ()
    check = StatusCheck("n1", driver, lambda: now[0], lambda _who, what: findings.append(what))
    check.look()
    now[0], driver.core.leader = 0.25, NodeId(2)
    check.look()
    check._compare_counters()
    driver.without_leader_total_ms = lambda: 0
    with pytest.raises(AssertionError, match="0 ms without a leader, seen 250 ms"):
        check._compare_counters()
    assert findings == []


def test_a_membership_that_outlives_its_entry_is_no_log() -> None:
    first = Membership((Member(NodeId(1), bytes(16)),))
    log = RaftLog(SnapshotId(Offset(0), Epoch(0)), first)
    log.append([Entry(Epoch(1), EntryKind.DATA, b"a"), Entry(Epoch(1), EntryKind.MEMBERSHIP, first.encode())])
    kept = list(log.memberships)
    log.validate(thorough=False)
    log.truncate(Offset(1))
    log.append([Entry(Epoch(2), EntryKind.DATA, b"b")])
    log.validate(thorough=False)
    log.memberships = kept
    with pytest.raises(AssertionError, match="no entry there has one"):
        log.validate(thorough=False)
