"""Broken Raft state and broken speculation are named."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.config import BootState, RaftConfig
from tidelog.raft.core import RaftCore
from tidelog.raft.effects import HardState, Role
from tidelog.raft.membership import Member, Membership, VoterKey
from tidelog.raft.messages import Entry, EntryKind, Persisted, SnapshotId, Tick
from tidelog.raft.progress import REPLICATE, SNAPSHOT, Progress
from tidelog.raft.runtime import StateMachineRuntime

DIRECTORY = bytes(16)


def core(*, voters: int = 3, entries: int = 5) -> RaftCore:
    members = tuple(Member(NodeId(number), DIRECTORY) for number in range(1, voters + 1))
    boot = BootState(
        HardState(Epoch(2), None),
        SnapshotId(Offset(0), Epoch(0)),
        Membership(members),
        Offset(0),
        Epoch(0),
        tuple(Entry(Epoch(1), EntryKind.DATA, b"x") for _ in range(entries)),
    )
    return RaftCore(VoterKey(NodeId(1), DIRECTORY), boot, RaftConfig(), random.Random(1), 0)


def elected() -> RaftCore:
    leader = core(voters=1)
    now_ms = 0
    while leader.role is not Role.LEADER:
        now_ms = max(now_ms + 1, leader.deadline_ms)
        leader.step(Tick(), now_ms)
        persist = leader.effects(now_ms).persist
        if persist is not None:
            leader.step(Persisted(persist.number), now_ms)
    return leader


def commit_past_end(broken: RaftCore) -> None:
    broken.commit = Offset(6)


def durable_past_end(broken: RaftCore) -> None:
    broken.durable_end = Offset(6)


def matched_past_end(broken: RaftCore) -> None:
    broken._matched = Offset(6)


def forgotten_vote(broken: RaftCore) -> None:
    broken.voted_for = VoterKey(NodeId(2), DIRECTORY)


def candidate_of_another(broken: RaftCore) -> None:
    broken.role = Role.CANDIDATE


def fallen_epoch(broken: RaftCore) -> None:
    broken.log.append((Entry(Epoch(3), EntryKind.DATA, b"y"),))


BROKEN: tuple[tuple[Callable[[RaftCore], None], str], ...] = (
    (commit_past_end, "commit 6, end 5"),
    (durable_past_end, "durable up to 6 of 5"),
    (matched_past_end, "equals the leader's log up to 6, and ends at 5"),
    (forgotten_vote, "a vote is not to be persisted"),
    (candidate_of_another, "candidate without its own vote"),
    (fallen_epoch, "in epoch 2, behind its log"),
)


@pytest.mark.parametrize(("break_core", "message"), BROKEN, ids=[each.__name__ for each, _ in BROKEN])
@pytest.mark.parametrize("thorough", [True, False])
def test_validate_names_broken_state_of_the_core(
    break_core: Callable[[RaftCore], None], message: str, thorough: bool
) -> None:
    broken = core()
    broken.validate(thorough=thorough)
    break_core(broken)
    with pytest.raises(AssertionError, match=message):
        broken.validate(thorough=thorough)


def test_a_leader_is_valid_and_one_that_did_not_vote_for_itself_is_not() -> None:
    leader = elected()
    leader.validate()
    leader.voted_for = None
    leader._persist_due = True
    with pytest.raises(AssertionError, match="leader without its own vote"):
        leader.validate()


def test_validate_names_a_peer_that_has_more_than_the_leader() -> None:
    peer = Progress(next_offset=Offset(5), directory=DIRECTORY, now_ms=0)
    peer.validate(Offset(5))
    peer.match = Offset(6)
    with pytest.raises(AssertionError, match="match 6, next 5 of a log up to 5"):
        peer.validate(Offset(5))


def test_validate_names_a_peer_in_the_wrong_mode() -> None:
    peer = Progress(next_offset=Offset(5), directory=DIRECTORY, now_ms=0)
    peer.mode = REPLICATE
    peer.sent(Offset(6), 10, 0)
    peer.validate(Offset(6))
    peer.mode = SNAPSHOT
    with pytest.raises(AssertionError, match="appends in flight in snapshot"):
        peer.validate(Offset(6))


def runtime() -> StateMachineRuntime[Any]:
    made: StateMachineRuntime[Any] = StateMachineRuntime(None, None, ("a",))  # type: ignore[arg-type]  # neither acts
    made.validate()
    return made


def test_validate_names_a_follower_that_speculates() -> None:
    broken = runtime()
    broken._speculative = ("a", "b")
    with pytest.raises(AssertionError, match="does not lead has a speculative state"):
        broken.validate()


def test_validate_names_a_leader_whose_speculation_rests_on_nothing() -> None:
    broken = runtime()
    broken.lead(Epoch(1), NodeId(1))
    broken.validate()
    broken._speculative = ("a", "b")
    with pytest.raises(AssertionError, match="is not that of the newest decision"):
        broken.validate()
