"""Replicas that fail, lag, restart and are fenced in any order lose nothing that a high watermark ever covered.

`support.brokers.partition_cores` has the events and what is checked after each. The deliberate defects show that the
checks can fail.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from hypothesis.strategies import SearchStrategy
from support.brokers.partition_cores import LAG_MS, Cores
from support.brokers.partition_defects import (
    DoubtIsForgotten,
    FormerIncarnationsAreProposed,
    JoinsAtTheHighWatermarkAlone,
    MinIsrIsIgnored,
    NewLeaderCommitsItsWholeLog,
    OwnDurableEndIsTheLogEnd,
    PendingAdditionsDoNotCount,
    PendingRemovalsDoNotCount,
    RefusalEndsAllDoubt,
    SilentFollowersAreCountedAsCaughtUp,
    StaleMetadataCounts,
)

from tidelog.replication.partition import LeaderState

BROKERS = st.integers(0, 4)
COUNTS = st.integers(1, 4)


def event(name: str, **arguments: SearchStrategy[int]) -> Any:
    """The rule for an event of one broker: a method of `Cores` with its number and these arguments."""

    def step(self: "ReplicasOfOnePartition", broker: int, **values: int) -> None:
        getattr(self.cores, name)(self.pick(broker), *(values[key] for key in arguments))

    step.__name__ = name
    return rule(broker=BROKERS, **arguments)(step)  # type: ignore[call-overload]


class ReplicasOfOnePartition(RuleBasedStateMachine):
    """A leader and one to four followers, and the controller."""

    cores: Cores

    @initialize(brokers=st.integers(2, 5))
    def begin(self, brokers: int) -> None:
        self.cores = Cores(brokers)

    def pick(self, broker: int) -> int:
        return broker % len(self.cores.members)

    append = event("append", count=COUNTS)
    sync = event("sync", count=COUNTS)
    subscribe = event("subscribe")
    push = event("push", count=COUNTS)
    send_ack = event("send_ack")
    ack_arrives = event("ack_arrives")
    propose = event("propose")
    answer_arrives = event("answer_arrives")
    call_fails = event("call_fails")
    deliver = event("deliver", count=st.integers(1, 3))
    crash = event("crash", kept=st.integers(0, 3), known=st.integers(0, 5))
    wipe = event("wipe")
    fence = event("fence")
    start = event("start")

    @rule(broker=BROKERS)
    def replicate(self, broker: int) -> None:
        replicate(self.cores, self.pick(broker))

    @rule(number=st.integers(0, 3))
    def take(self, number: int) -> None:
        self.cores.take(number)

    @rule(number=st.integers(0, 3))
    def lose(self, number: int) -> None:
        self.cores.lose(number)

    @rule(ms=st.integers(1, 2 * LAG_MS))
    def wait(self, ms: int) -> None:
        self.cores.now_ms += ms

    @rule(least=st.integers(1, 3))
    def configure(self, least: int) -> None:
        self.cores.configure(least)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "cores"):
            self.cores.check()

    def teardown(self) -> None:
        if hasattr(self, "cores"):
            self.cores.run_until_stable()


def replicate(cores: Cores, broker: int) -> None:
    """A follower as it is on a good day: everything that there is, synced and acked."""
    if cores.subscribe(broker) or cores.subscribe(broker):
        cores.push(broker, 100)
        cores.sync(broker, 100)
        cores.send_ack(broker)
        cores.ack_arrives(broker)
        cores.ack_arrives(broker)


@pytest.mark.requirement("a:U-02", "a:U-03", "a:B-10", "a:B-30")
def test_no_order_of_events_loses_what_was_committed() -> None:
    run_state_machine_as_test(ReplicasOfOnePartition)


WALKS_MAX = 1000
STEPS = 200


def walk(seed: int, leader_type: type[LeaderState] = LeaderState) -> Cores:
    """A history drawn from one seed, with quiet stretches in which things get done."""
    draw = random.Random(seed)
    cores = Cores(draw.choice((2, 3, 3, 4)), leader_type=leader_type)
    events: list[tuple[int, Callable[[int], object]]] = [
        (8, lambda b: cores.append(leading(cores, b), draw.randint(1, 3))),
        (4, lambda b: cores.sync(b, draw.randint(1, 4))),
        (8, lambda b: cores.sync(leading(cores, b), draw.randint(1, 9))),
        (3, cores.subscribe),
        (5, lambda b: cores.push(b, draw.randint(1, 4))),
        (5, cores.send_ack),
        (5, cores.ack_arrives),
        (12, lambda b: replicate(cores, b)),
        (10, lambda b: cores.propose(leading(cores, b))),
        (5, lambda _: cores.take(draw.randint(0, 3))),
        (6, lambda b: cores.answer_arrives(leading(cores, b))),
        (2, lambda b: cores.call_fails(leading(cores, b))),
        (1, cores.lose),
        (4, lambda b: cores.deliver(b, draw.randint(1, 3))),
        (6, lambda b: cores.deliver(leading(cores, b), draw.randint(1, 3))),
        (1, lambda b: cores.crash(b, draw.randint(0, 3), draw.randint(0, 5))),
        (1, cores.wipe),
        (2, cores.fence),
        (6, cores.start),
        (2, lambda _: wait(cores, draw.randint(1, LAG_MS))),
        (1, lambda _: cores.configure(draw.randint(1, 3))),
    ]
    weights = [weight for weight, _ in events]
    for _ in range(STEPS):
        ((_, event),) = draw.choices(events, weights)
        event(draw.randrange(len(cores.members)))
        cores.check()
    cores.run_until_stable()
    return cores


def leading(cores: Cores, broker: int) -> int:
    """The next broker from this one on that thinks it leads; itself, if none does."""
    count = len(cores.members)
    around = [(broker + step) % count for step in range(count)]
    return next((b for b in around if cores.members[b].leading is not None), broker)


def wait(cores: Cores, ms: int) -> None:
    cores.now_ms += ms


def test_walks_lose_nothing_and_get_somewhere() -> None:
    lengths = [len(walk(seed).committed) for seed in range(60)]
    assert sum(lengths) > 60 * 10, f"too little is committed to prove anything: {lengths}"


def joining(leader_type: type[LeaderState]) -> Cores:
    """0 leads, 1 is in sync, 2 was fenced and is live again with everything; the proposal to take it in is out."""
    cores = Cores(3, leader_type=leader_type)
    replicate(cores, 1)
    cores.fence(2)
    cores.start(2)
    for broker in range(3):
        cores.deliver(broker, 10)
    cores.append(0, 5)
    cores.sync(0, 5)
    replicate(cores, 1)
    replicate(cores, 2)
    cores.check()
    assert len(cores.committed) == 5
    cores.propose(0)
    assert len(cores.network) == 1
    return cores


def go_on_without_2(cores: Cores) -> None:
    cores.append(0, 5)
    cores.sync(0, 5)
    replicate(cores, 1)
    cores.check()


def a_proposal_arrives_after_its_copy_was_refused(leader_type: type[LeaderState]) -> None:
    cores = joining(leader_type)
    cores.call_fails(0)
    cores.fence(2)
    cores.propose(0)
    assert len(cores.network) == 2
    cores.take(1)
    cores.answer_arrives(0)
    go_on_without_2(cores)
    cores.start(2)
    cores.take(0)
    cores.check()
    cores.run_until_stable()


def an_answer_overtakes_the_metadata(leader_type: type[LeaderState]) -> None:
    cores = joining(leader_type)
    cores.configure(1)
    cores.take(0)
    cores.answer_arrives(0)
    cores.deliver(0, 1)
    go_on_without_2(cores)
    cores.run_until_stable()


@pytest.mark.case("T1")
def test_a_restart_that_forgot_the_high_watermark_and_is_elected_then_has_the_record() -> None:
    cores = Cores(2)
    cores.append(0, 5)
    cores.sync(0, 5)
    replicate(cores, 1)
    cores.check()
    assert (len(cores.committed), cores.members[1].high_watermark) == (5, 0), "only the leader knows"
    cores.crash(1, 0, 5)
    cores.start(1)
    cores.deliver(0, 10)
    cores.subscribe(1)
    cores.crash(0, 0, 5)
    cores.fence(0)
    cores.deliver(1, 10)
    cores.check()
    assert cores.members[1].leading is not None
    assert (len(cores.members[1].records), len(cores.committed)) == (5, 5)
    cores.run_until_stable()


@pytest.mark.case("T11")
def test_what_one_node_lost_unsynced_was_never_counted() -> None:
    """A has 100, B has 100 and synced 75 of them, C has 75: B loses power while A is cut off, and B or C leads."""
    cores = Cores(3)
    cores.append(0, 100)
    cores.sync(0, 100)
    for broker in (1, 2):
        cores.subscribe(broker)
        cores.push(broker, 75)
        cores.sync(broker, 75)
    cores.push(1, 25)
    for broker in (1, 2):
        cores.send_ack(broker)
        cores.ack_arrives(broker)
        cores.ack_arrives(broker)
    cores.check()
    assert len(cores.members[1].records) == 100
    assert len(cores.committed) == 75
    cores.crash(1, 0, 100)
    cores.start(1)
    cores.fence(0)
    for broker in (1, 2):
        cores.deliver(broker, 10)
    cores.check()
    (leader,) = [member for member in cores.members[1:] if member.leading is not None]
    assert len(leader.records) == 75
    cores.run_until_stable()


@pytest.mark.parametrize(
    ("history", "defect"),
    [
        (a_proposal_arrives_after_its_copy_was_refused, RefusalEndsAllDoubt),
        (an_answer_overtakes_the_metadata, StaleMetadataCounts),
    ],
)
def test_a_rare_order_of_events_loses_nothing_and_tells_a_defect(
    history: Callable[[type[LeaderState]], None], defect: type[LeaderState]
) -> None:
    history(LeaderState)
    with pytest.raises(AssertionError, match="2 may be elected, and lacks what is committed"):
        history(defect)


@pytest.mark.parametrize(
    ("defect", "seed"),
    [
        (PendingAdditionsDoNotCount, 22),
        (PendingRemovalsDoNotCount, 116),
        (DoubtIsForgotten, 22),
        (MinIsrIsIgnored, 1),
        (OwnDurableEndIsTheLogEnd, 1),
        (SilentFollowersAreCountedAsCaughtUp, 60),
        (JoinsAtTheHighWatermarkAlone, 188),
        (FormerIncarnationsAreProposed, 19),
        (NewLeaderCommitsItsWholeLog, 3),
    ],
)
def test_a_deliberate_defect_is_noticed(defect: type[LeaderState], seed: int) -> None:
    """`seed` is one that shows it; after a change of the events, others are tried."""
    for chosen in (seed, *range(WALKS_MAX)):
        try:
            walk(chosen, defect)
        except AssertionError:
            return
    pytest.fail(f"{defect.__name__} went unnoticed in {WALKS_MAX} walks")
