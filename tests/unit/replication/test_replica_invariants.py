"""Broken state of a partition's leader and follower, and of a replica's parts, is named."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.async_tests import asyncio_test
from support.brokers.leader_states import TOPIC, ack, leader, partition, wanted, write

from tidelog.model.ids import Offset, PartitionId, TopicId
from tidelog.replication.leader_replica import Subscription
from tidelog.replication.messages import Subscribe
from tidelog.replication.partition import LeaderState, Progress
from tidelog.replication.reconciler_queue import ReconcilerQueue
from tidelog.replication.replica import Replica, ReplicaConfig
from tidelog.replication.waiters import AckWaiters


def led() -> LeaderState:
    state = leader(end=10)
    write(state, 20)
    for follower in (2, 3):
        ack(state, follower, 20)
    state.validate()
    return state


def high_watermark_past_durable_end(state: LeaderState) -> None:
    state.high_watermark = Offset(21)


def unsynced_counts(state: LeaderState) -> None:
    state.durable_end = Offset(21)


def member_forgotten(state: LeaderState) -> None:
    state._maximal = (2,)


def follower_past_end(state: LeaderState) -> None:
    state._progress[2] = replace(state._progress[2], durable_end=Offset(21))


def ack_of_nobody(state: LeaderState) -> None:
    state._progress[2] = Progress(Offset(20), -1, 0, Offset(20), 0)


def proposal_forgotten(state: LeaderState) -> None:
    state._isr = frozenset({1, 2})
    state._count()
    proposal = wanted(state)
    assert proposal is not None
    assert proposal.members == {1, 2, 3}
    state.sent(proposal)
    state._maximal = (2,)


def member_counts_too_long(state: LeaderState) -> None:
    state._isr = frozenset({1, 2})


def follower_without_progress(state: LeaderState) -> None:
    del state._progress[3]


def not_advanced(state: LeaderState) -> None:
    state.high_watermark = Offset(19)


BROKEN: tuple[tuple[Callable[[LeaderState], None], str], ...] = (
    (high_watermark_past_durable_end, "high watermark, durable end, log end"),
    (unsynced_counts, "high watermark, durable end, log end"),
    (member_forgotten, "\\(2,\\) count besides 1; \\[1, 2, 3\\] are or may be in sync"),
    (follower_past_end, "a follower has what we have"),
    (member_counts_too_long, "\\(2, 3\\) count besides 1; \\[1, 2\\] are or may be in sync"),
    (follower_without_progress, "progress of the followers"),
    (not_advanced, "everything below 20 is replicated, not only 19"),
    (ack_of_nobody, "an ack has an incarnation"),
    (proposal_forgotten, "\\(2,\\) count besides 1; \\[1, 2, 3\\] are or may be in sync"),
)


@pytest.mark.parametrize(("break_state", "message"), BROKEN, ids=[each.__name__ for each, _ in BROKEN])
def test_validate_names_broken_state_of_a_leader(break_state: Callable[[LeaderState], None], message: str) -> None:
    state = led()
    break_state(state)
    with pytest.raises(AssertionError, match=message):
        state.validate()


@asyncio_test
async def test_validate_names_a_producer_that_waits_for_what_is_reached() -> None:
    waiters = AckWaiters()
    waiters.wait(5)
    waiters.validate(4)
    with pytest.raises(AssertionError, match="waits for 5; the high watermark is 5"):
        waiters.validate(5)


def subscribed() -> Subscription:
    state = led()
    role: Any = SimpleNamespace(state=state, log=SimpleNamespace(end_offset=20))
    request: Any = SimpleNamespace(number=1, broker_epoch=12, next_offset=20, last_epoch=0)
    request.takes_gaps = request.takes_history = True
    stream: Any = SimpleNamespace(peer=2)
    assert set(vars(request)) <= set(Subscribe.__slots__), "fields of a request"
    subscription = Subscription(role, stream, request)
    subscription.acked(20)
    return subscription


def test_validate_names_an_ack_past_what_was_pushed() -> None:
    subscription = subscribed()
    subscription.validate()
    subscription.next_offset = 15
    with pytest.raises(AssertionError, match="20 is acked; 15 was pushed"):
        subscription.validate()


def test_validate_names_an_ack_that_does_not_count() -> None:
    subscription = subscribed()
    subscription.acked(15)
    with pytest.raises(AssertionError, match="broker 2 of epoch 12 has acked 15, and counts as Progress"):
        subscription.validate()


def test_validate_names_bytes_that_are_not_counted() -> None:
    subscription = subscribed()
    subscription.pushed(20, 100)
    subscription.unacked_bytes = 0
    with pytest.raises(AssertionError, match="unacked bytes are counted"):
        subscription.validate()


def test_validate_names_a_replica_that_waits_for_no_worker() -> None:
    tasks: Any = SimpleNamespace(is_closed=False)
    replica = Replica(PartitionId(TopicId(TOPIC), 0), "orders", partition((1, 2, 3)))
    queue = ReconcilerQueue(tasks, ReplicaConfig())
    queue.validate()
    queue._waiting[replica] = None
    with pytest.raises(AssertionError, match="no worker runs"):
        queue.validate()
