"""`STACK=transactions`: some seeds, what they draw, and what the watch over the coordinators notices."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from simulation.campaign import replay_command
from simulation.raft_sim import run_seed
from simulation.run_result import Result
from simulation.transactions_sim import draw_transactions_shape
from simulation.transactions_watch import TransactionsWatch
from tidelog.coordinator.transactions.records import Cause, Status, Transaction
from tidelog.coordinator.transactions.state import TransactionsState
from tidelog.log.batch import ControlKind, encode_control
from tidelog.model.maps import Map

SEEDS = (1, 4, 7)
"""Few, since the suite has to be quick: `make sim STACK=transactions` runs any number."""
HAPPENED = ("committed", "aborted", "unknown", "joint", "timeouts", "coordinator moves", "late Produce refused")


def _run(seed: int) -> Result:
    result = run_seed(seed, stack="transactions")
    if result.failure is not None:
        replay = replay_command(seed, stack="transactions")
        pytest.fail(f"seed {seed}: {result.failure}\nreplay: {replay}", pytrace=False)
    return result


@pytest.mark.requirement("a:H-01", "a:H-02", "a:H-03", "a:H-20", "a:H-33", "a:H-35", "a:X3-36", "a:X3-37")
@pytest.mark.requirement("a:X3-38", "a:X3-39", "a:T-19", "a:T-20", "a:N-14")
@pytest.mark.case("C1")
@pytest.mark.sim
@pytest.mark.timeout(240)
def test_every_input_is_processed_once_and_nothing_stays_open() -> None:
    counts: Counter[str] = Counter()
    for seed in SEEDS:
        result = _run(seed)
        assert result.acknowledged > 0, f"seed {seed}: where nothing was acknowledged nothing was tested"
        counts.update(result.counts)
    assert all(counts[name] for name in HAPPENED), counts


def test_the_seed_draws_what_programs_do() -> None:
    plans = [plan for seed in range(1, 80) if (plan := draw_transactions_shape(seed).transactions) is not None]
    for name in ("workers", "aborts", "restless", "probes", "prepares", "first_epoch", "expiration_ms", "lateness"):
        assert 0 < len([plan for plan in plans if getattr(plan, name)]) < len(plans), name
    for name in ("is_chained", "is_compacted", "deletes", "has_operator", "has_loss"):
        assert {getattr(plan, name) for plan in plans} == {True, False}, name
    assert any(plan.ids < plan.pipelines for plan in plans), "some fence each other"


# The watch.

ONGOING = Transaction(producer_id=7, epoch=3, status=Status.ONGOING, number=5, started_ms=10, timeout_ms=100)
DECIDED = replace(ONGOING, status=Status.PREPARE_COMMIT, epoch=4, previous_producer_id=7, previous_epoch=3)


class _Watched:
    """Coordinators of one partition, one after the other."""

    def __init__(self, *, may_forget: bool = False) -> None:
        self.found: list[str] = []
        self.watch = TransactionsWatch(lambda _who, what: self.found.append(what), may_forget=may_forget)
        self.move()

    def move(self) -> None:
        self._shard: Any = _Shard()

    def commit(self, **ids: Transaction) -> None:
        self._shard.state = TransactionsState(Map(ids))
        transactions = SimpleNamespace(shards={0: self._shard})
        self.watch.look(SimpleNamespace(name="b1", broker=SimpleNamespace(transactions=transactions)))  # type: ignore[arg-type]

    def mark(self, kind: ControlKind, *, epoch: int) -> None:
        data = encode_control(kind, coordinator_epoch=1, timestamp=1, producer_id=7, producer_epoch=epoch)
        self.watch.marked("b1", "out-0", data)  # type: ignore[arg-type]  # its name is enough


class _Shard:
    is_leading = True
    state: TransactionsState


def test_the_watch_accepts_a_life_of_an_id() -> None:
    watched = _Watched()
    watched.commit(etl=ONGOING)
    watched.commit(etl=DECIDED)
    watched.mark(ControlKind.COMMIT, epoch=4)
    watched.move()
    watched.commit(etl=DECIDED)
    watched.commit(etl=replace(DECIDED, status=Status.COMPLETE_COMMIT, started_ms=-1))
    assert watched.found == []
    assert watched.watch.counts["commits"] == 1
    assert watched.watch.counts["markers"] == 1


def test_the_watch_notices_a_decision_that_changes_at_a_move() -> None:
    watched = _Watched()
    watched.commit(etl=DECIDED)
    watched.move()
    watched.commit(etl=replace(DECIDED, status=Status.PREPARE_ABORT, cause=Cause.TIMEOUT))
    assert "a decision has changed" in watched.found[0]


def test_the_watch_notices_what_a_new_coordinator_does_not_know() -> None:
    watched = _Watched()
    watched.commit(etl=ONGOING)
    watched.move()
    watched.commit()
    assert "does not know 'etl'" in watched.found[0]
    forgetful = _Watched(may_forget=True)
    forgetful.commit(etl=replace(ONGOING, status=Status.COMPLETE_ABORT, started_ms=-1))
    forgetful.move()
    forgetful.commit()
    assert forgetful.found == []


def test_the_watch_notices_an_epoch_that_falls_and_a_token_that_is_lost() -> None:
    watched = _Watched()
    watched.commit(etl=replace(ONGOING, last_token=b"7"))
    watched.commit(etl=replace(ONGOING, epoch=2, number=6))
    assert "an epoch has fallen" in watched.found[0]
    assert "a token is lost" in watched.found[1]


def test_the_watch_notices_a_marker_that_nobody_has_decided() -> None:
    watched = _Watched()
    watched.commit(etl=ONGOING)
    watched.mark(ControlKind.COMMIT, epoch=4)
    watched.commit(etl=DECIDED)
    watched.mark(ControlKind.ABORT, epoch=4)
    assert ["nothing was decided" in watched.found[0], "a commit was decided" in watched.found[1]] == [True, True]
