"""A barrier at the controller: the same in-sync set again, after which no proposal from before can be taken."""

from __future__ import annotations

from support.metadata.controller import Cluster

from tidelog.model.errors import ErrorCode


def cluster() -> Cluster:
    made = Cluster(3)
    made.made("t", (0, 1, 2))
    made.propose("t", (0, 1))
    return made


def test_a_barrier_raises_the_partition_epoch_and_nothing_else() -> None:
    made = cluster()
    before = made.partition("t")
    state = made.propose("t", (0, 1), is_barrier=True)
    after = made.partition("t")
    assert (state.error, state.isr, state.partition_epoch) == (None, (0, 1), before.partition_epoch + 1)
    assert after.partition_epoch == before.partition_epoch + 1
    assert (after.isr, after.leader, after.leader_epoch) == (before.isr, before.leader, before.leader_epoch)


def test_a_proposal_from_before_a_barrier_is_refused() -> None:
    made = cluster()
    before = made.partition("t").partition_epoch
    made.propose("t", (0, 1), is_barrier=True)
    late = made.propose("t", (0, 1, 2), partition_epoch=before)
    assert late.error is ErrorCode.INVALID_UPDATE_VERSION
    assert late.isr == (0, 1)


def test_a_barrier_on_top_of_another_state_is_refused_and_tells_it() -> None:
    made = cluster()
    state = made.propose("t", (0, 1), is_barrier=True, partition_epoch=0)
    assert (state.error, state.isr) == (ErrorCode.INVALID_UPDATE_VERSION, (0, 1))


def test_a_barrier_that_changes_the_set_raises_the_partition_epoch_once() -> None:
    made = cluster()
    before = made.partition("t").partition_epoch
    assert made.propose("t", (0, 1, 2), is_barrier=True).partition_epoch == before + 1
