"""Brokers under faults, on fixed seeds; and deliberate defects, each of which these runs have to notice."""

from __future__ import annotations

from typing import Any

import pytest
from support.brokers.fault_runs import FaultRun, patched

from tidelog.model.ids import Offset
from tidelog.replication import follower_replica, leader_replica, leader_stream, reconciler
from tidelog.replication.divergence import Continue
from tidelog.replication.follower_replica import FollowerReplica
from tidelog.replication.leader_replica import LeaderReplica
from tidelog.replication.partition import LeaderState
from tidelog.replication.reconciler import Reconciler
from tidelog.replication.replica import now_ms

SEEDS = range(9000, 9006)
CATCHING_SEEDS_MAX = 25


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.requirement("a:U-01", "a:U-02", "a:U-03", "a:U-04", "b:A-20")
def test_nothing_acknowledged_or_read_is_lost_under_faults(seed: int) -> None:
    assert FaultRun(seed).run() > 0, "something was acknowledged"


# Defects, each of a line or two.


def _log_end(log: Any) -> Offset:
    end: Offset = log.end_offset
    return end


_pushed, _append = FollowerReplica.pushed, LeaderReplica.append


def _ack_when_written(self: FollowerReplica, push: Any) -> None:
    _pushed(self, push)
    self.durable()


def _count_when_written(self: LeaderReplica, batches: Any, **more: Any) -> Any:
    appended = _append(self, batches, **more)
    self.durable()
    return appended


def _advance_alone(self: Any) -> bool:
    moved = self.durable_end > self.high_watermark
    self.high_watermark = max(self.high_watermark, self.durable_end)
    return bool(moved)


def _advance_without_min_isr(self: Any) -> bool:
    ends = [self._progress[follower].durable_end for follower in self._maximal]
    if None in ends:
        return False
    least = min([self.durable_end, *ends])
    moved = least > self.high_watermark
    self.high_watermark = max(self.high_watermark, least)
    return bool(moved)


def _advance_over_the_known(self: Any) -> bool:
    ends = [self._progress[follower].durable_end for follower in self._maximal]
    least = min([self.durable_end, *(end for end in ends if end is not None)])
    if len(self._isr) < self._min_isr or least <= self.high_watermark:
        return False
    self.high_watermark = least
    return True


_take_role = Reconciler._take_role


def _keep_epoch(self: Reconciler, replica: Any, log: Any) -> None:
    metadata = self._metadata
    known, is_leader = metadata.image.brokers.get(metadata.me), replica.partition.leader == metadata.me
    if metadata.broker_epoch < 0 and known is not None and is_leader and replica.role is None:
        metadata.broker_epoch = known.broker_epoch
        _take_role(self, replica, log)
        metadata.broker_epoch = -1
        return
    _take_role(self, replica, log)


def _always_prefix(*_: Any, **__: Any) -> Continue:
    return Continue()


def _believe_old_acks(self: LeaderReplica, subscription: Any, durable_end: int) -> None:
    subscription.acked(durable_end)
    end = Offset(max(durable_end, subscription.next_offset))
    if self.state.acked(subscription.follower, subscription.broker_epoch, end, now_ms()):
        self._advanced()


def _joins_at_once(self: Any, follower: int, live_epoch: int | None) -> int | None:
    return live_epoch


def _uncommitted_bound(self: Any) -> Offset:
    return self.log.end_offset  # type: ignore[no-any-return]


DEFECTS: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "a follower acks what it has not synced": (
        (follower_replica, "ackable_end", _log_end),
        (FollowerReplica, "pushed", _ack_when_written),
    ),
    "a leader counts what it has not synced itself": (
        (leader_replica, "ackable_end", _log_end),
        (reconciler, "ackable_end", _log_end),
        (LeaderReplica, "append", _count_when_written),
    ),
    "the high watermark is the leader's own end": ((LeaderState, "_advance", _advance_alone),),
    "min.insync.replicas is ignored": (
        (LeaderState, "_advance", _advance_without_min_isr),
        (LeaderState, "check_acks", lambda self, acks: None),
    ),
    "who has said nothing in this epoch is passed over": ((LeaderState, "_advance", _advance_over_the_known),),
    "a leader epoch is kept across a restart": ((Reconciler, "_take_role", _keep_epoch),),
    "no divergence is ever found": ((leader_stream, "divergence", _always_prefix),),
    "what was pushed counts as acked": ((LeaderReplica, "acked", _believe_old_acks),),
    "a follower joins without having caught up": ((LeaderState, "_epoch_in_sync", _joins_at_once),),
    "readers see what is not replicated": ((LeaderReplica, "high_watermark", property(_uncommitted_bound)),),
}


CATCHING_SEEDS = (17, 122, 0, 3, 53, 11, 0, 0, 30, 0)
"""Of each defect in turn, the seed that has caught it: tried first."""


@pytest.mark.parametrize(("name", "first"), list(zip(DEFECTS, CATCHING_SEEDS, strict=True)))
def test_a_deliberate_defect_is_noticed(name: str, first: int) -> None:
    with patched(*DEFECTS[name]):
        for seed in (first, *range(CATCHING_SEEDS_MAX)):
            try:
                FaultRun(seed).run()
            except Exception:
                return
    pytest.fail(f"{name}: not noticed in {CATCHING_SEEDS_MAX} seeds")
