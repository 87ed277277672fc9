"""`STACK=transactions`: some seeds, what they draw, and what the watch over the coordinators notices."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from simulation.broker_checker import KnownPartition, KnownTopic
from simulation.campaign import replay_command
from simulation.raft_sim import run_seed
from simulation.run_result import Result
from simulation.transactions_plan import Trial
from simulation.transactions_sim import draw_transactions_shape
from simulation.transactions_watch import TransactionsWatch
from tidelog.client.record import GroupMetadata
from tidelog.coordinator.records import CurrentValue, FenceValue, GroupRecord, Key, Kind, fence_key
from tidelog.coordinator.state import CoordinatorState, apply
from tidelog.coordinator.transactions.records import Cause, Status, Transaction
from tidelog.coordinator.transactions.state import TransactionsState
from tidelog.log.batch import ControlKind, Record, encode, encode_control
from tidelog.model.ids import PartitionId, TopicId
from tidelog.model.maps import Map

SEEDS = (3, 7)
"""Few, since the suite has to be quick: `make sim STACK=transactions` runs any number."""
HAPPENED = (
    "committed",
    "aborted",
    "unknown",
    "joint",
    "timeouts",
    "coordinator moves",
    "late Produce refused",
    "late WriteMarkers refused",
    "members removed",
    "records failed",
)


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
    for name in ("is_chained", "is_compacted", "deletes", "has_operator"):
        assert {getattr(plan, name) for plan in plans} == {True, False}, name
    for trial in Trial:
        assert {trial in plan.trials for plan in plans} == {True, False}, trial
    assert any(plan.ids < plan.pipelines for plan in plans), "some fence each other"


# The watch.

OUT = PartitionId(TopicId(UUID(int=1)), 0)
GROUPS = PartitionId(TopicId(UUID(int=2)), 0)
ONGOING = Transaction(producer_id=7, epoch=3, status=Status.ONGOING, number=5, started_ms=10, timeout_ms=100)
DECIDED = replace(ONGOING, status=Status.PREPARE_COMMIT, epoch=4, previous_producer_id=7, previous_epoch=3)
COMPLETE = replace(DECIDED, status=Status.COMPLETE_COMMIT, started_ms=-1)
MEMBER = GroupMetadata("etl", "m1", 2)


class _Watched:
    """Coordinators of one partition, one after the other; a partition of outputs; a coordinator of groups."""

    def __init__(self, *, may_forget: bool = False) -> None:
        self.found: list[str] = []
        self.watch = TransactionsWatch(lambda _who, what: self.found.append(what), may_forget=may_forget)
        self._groups: dict[int, Any] = {}
        self._out = KnownPartition(KnownTopic("out", OUT.topic_id, 1, 1), OUT)
        self.move()

    def move(self) -> None:
        self._shard: Any = _Shard()

    def commit(self, **ids: Transaction) -> None:
        self._shard.state = TransactionsState(Map(ids))
        self._look({0: self._shard})

    def _look(self, shards: dict[int, Any]) -> None:
        broker = SimpleNamespace(transactions=SimpleNamespace(shards=shards))
        app: Any = SimpleNamespace(name="b1", broker=broker, coordinator=SimpleNamespace(shards=self._groups))
        self.watch.look(app)

    def groups(self, *records: GroupRecord, epoch: int = 1) -> None:
        """Their coordinator leads in this epoch, and has committed these records."""
        shard = _Shard()
        shard.leader = SimpleNamespace(replica=SimpleNamespace(partition_id=GROUPS), leader_epoch=epoch)
        shard.state = apply(CoordinatorState(), records)
        self._groups = {0: shard}
        self._look({})

    def mark(self, kind: ControlKind, *, epoch: int) -> None:
        fields = {"producer_id": 7, "producer_epoch": epoch, "base_offset": self._out.end}
        self._committed(encode_control(kind, coordinator_epoch=1, timestamp=1, **fields))

    def write(self, *, epoch: int) -> None:
        """A batch of one record, in the transaction of this epoch."""
        self._committed(
            encode(
                [Record(self._out.end, 1, value=b"1")],
                base_offset=self._out.end,
                producer_id=7,
                producer_epoch=epoch,
                base_sequence=0,
                is_transactional=True,
            )
        )

    def _committed(self, data: bytes) -> None:
        self._out.end = self._out.high_watermark = self._out.end + 1
        self.watch.marked("b1", self._out, data)


class _Shard:
    is_leading = True
    state: Any
    leader: Any


def test_the_watch_accepts_a_life_of_an_id() -> None:
    watched = _Watched()
    watched.commit(etl=ONGOING)
    watched.commit(etl=DECIDED)
    watched.mark(ControlKind.COMMIT, epoch=4)
    watched.move()
    watched.commit(etl=DECIDED)
    watched.commit(etl=COMPLETE)
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
    assert ["nothing was decided" in watched.found[0], "a commit was decided" in watched.found[-1]] == [True, True]


def test_the_watch_notices_a_marker_that_ends_the_next_transaction() -> None:
    watched = _Watched()
    watched.commit(etl=ONGOING)
    watched.commit(etl=DECIDED)
    watched.write(epoch=3)
    watched.mark(ControlKind.COMMIT, epoch=4)
    watched.write(epoch=4)
    assert watched.found == []
    watched.mark(ControlKind.COMMIT, epoch=4)
    assert (
        "out-0 at 3: a marker of producer 7, epoch 4, is late: it ends the transaction of epoch 4" in watched.found[0]
    )


def test_the_watch_notices_a_batch_that_comes_after_its_marker() -> None:
    watched = _Watched()
    watched.commit(etl=DECIDED)
    watched.mark(ControlKind.COMMIT, epoch=4)
    watched.write(epoch=3)
    assert "is late: the marker of epoch 4 is before it" in watched.found[0]


def test_the_watch_notices_a_partition_and_a_group_without_their_marker() -> None:
    watched = _Watched()
    decided = replace(DECIDED, partitions=frozenset({OUT, GROUPS}))
    watched.groups()
    watched.commit(etl=replace(ONGOING, partitions=decided.partitions))
    watched.write(epoch=3)
    watched.commit(etl=decided)
    watched.commit(etl=COMPLETE)
    assert [what.partition(" is complete, and ")[2] for what in watched.found] == [
        "out-0 has not committed the marker of producer 7, epoch 4",
        "partition 0 of groups has not committed the marker of producer 7, epoch 4",
    ]
    watched.found.clear()
    watched.mark(ControlKind.COMMIT, epoch=4)
    watched.groups(GroupRecord(fence_key(7), FenceValue(epoch=4)))
    watched.move()
    watched.commit(etl=replace(decided, number=6))
    watched.commit(etl=replace(ONGOING, number=7, epoch=4))
    assert watched.found == []


def test_a_member_is_one_as_long_as_the_newest_coordinator_of_its_group_says_so() -> None:
    watched, key = _Watched(), Key(Kind.CURRENT, "etl", "m1")
    assert watched.watch.is_member(MEMBER), "no coordinator has said anything"
    watched.groups(GroupRecord(key, CurrentValue(epoch=3, previous_epoch=2)))
    assert watched.watch.is_member(MEMBER)
    watched.groups(GroupRecord(key, CurrentValue(epoch=4, previous_epoch=3)), epoch=2)
    assert not watched.watch.is_member(MEMBER)
    watched.groups(GroupRecord(key, CurrentValue(epoch=3, previous_epoch=2)))
    assert not watched.watch.is_member(MEMBER), "that coordinator was replaced"
    watched.watch.offsets_taken("t201.1.1", MEMBER, was_member=True)
    assert watched.found == []
    watched.watch.offsets_taken("t201.1.2", MEMBER, was_member=False)
    assert "which was no member of the group any more" in watched.found[0]


def test_the_watch_notices_two_instances_with_one_epoch() -> None:
    watched = _Watched()
    watched.watch.writes("t201.1", "etl-0", (7, 3))
    watched.watch.writes("t201.1", "etl-0", (7, 3))
    assert watched.found == []
    watched.watch.writes("t202.1", "etl-0", (7, 3))
    assert "as t201.1 does" in watched.found[0]
