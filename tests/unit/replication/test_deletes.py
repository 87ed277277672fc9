"""Which deletes a leader keeps for its replicas, and which replicas it has copied from the start."""

from __future__ import annotations

from tidelog.model.ids import Offset
from tidelog.replication.deletes import ReplicaDeletes

HOLD_MS = 100
LOG_END = Offset(500)


def bound(deletes: ReplicaDeletes, *followers: int, now_ms: int) -> int:
    return deletes.bound(followers, log_end=LOG_END, now_ms=now_ms, hold_ms=HOLD_MS)


def test_a_leader_without_followers_keeps_no_delete_for_anybody() -> None:
    assert bound(ReplicaDeletes(0), now_ms=0) == LOG_END


def test_a_follower_that_was_not_heard_of_holds_everything_for_a_while() -> None:
    deletes = ReplicaDeletes(1_000)
    assert bound(deletes, 2, now_ms=1_000) == 0
    assert bound(deletes, 2, now_ms=1_000 + HOLD_MS - 1) == 0
    assert bound(deletes, 2, now_ms=1_000 + HOLD_MS) == LOG_END


def test_a_subscribed_follower_holds_what_it_has_not_acknowledged_however_long_it_takes() -> None:
    deletes = ReplicaDeletes(0)
    deletes.subscribed(2, 40, has_records=True, deletes_end=0)
    assert bound(deletes, 2, now_ms=10 * HOLD_MS) == 40
    deletes.acked(2, 70)
    assert bound(deletes, 2, now_ms=10 * HOLD_MS) == 70
    deletes.acked(2, 60)
    assert bound(deletes, 2, now_ms=10 * HOLD_MS) == 60, "an ack may say less than the one before"


def test_a_follower_that_has_left_holds_for_a_while_and_one_that_is_not_assigned_not_at_all() -> None:
    deletes = ReplicaDeletes(0)
    deletes.subscribed(2, 40, has_records=True, deletes_end=0)
    deletes.subscribed(3, 90, has_records=True, deletes_end=0)
    deletes.left(2, 1_000)
    assert bound(deletes, 2, 3, now_ms=1_000 + HOLD_MS - 1) == 40
    assert bound(deletes, 2, 3, now_ms=1_000 + HOLD_MS) == 90
    assert bound(deletes, 3, now_ms=1_000) == 90
    deletes.left(2, 2_000)
    assert bound(deletes, 2, 3, now_ms=2_000) == 90, "it had left before"


def test_a_replica_with_records_that_ends_below_what_is_gone_is_copied() -> None:
    deletes = ReplicaDeletes(0)
    assert deletes.must_copy(2, has_records=True, next_offset=99, deletes_end=100)
    assert not deletes.must_copy(2, has_records=True, next_offset=100, deletes_end=100)
    assert not deletes.must_copy(2, has_records=False, next_offset=0, deletes_end=100)


def test_a_copy_that_breaks_off_goes_on_unless_more_deletes_have_gone() -> None:
    deletes = ReplicaDeletes(0)
    deletes.subscribed(2, 0, has_records=False, deletes_end=100)
    deletes.left(2, 10)
    assert not deletes.must_copy(2, has_records=True, next_offset=50, deletes_end=100)
    deletes.subscribed(2, 50, has_records=True, deletes_end=100)
    deletes.left(2, 20)
    assert deletes.must_copy(2, has_records=True, next_offset=50, deletes_end=120)
    assert not deletes.must_copy(2, has_records=True, next_offset=120, deletes_end=120)


def test_a_copy_from_another_leader_is_begun_again() -> None:
    """Each replica cleans on its own: what one had not cleaned yet, the copy may have from it, and not its delete."""
    first = ReplicaDeletes(0)
    first.subscribed(2, 0, has_records=False, deletes_end=100)
    assert ReplicaDeletes(10).must_copy(2, has_records=True, next_offset=50, deletes_end=100)
