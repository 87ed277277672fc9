"""Any two logs that a partition's life can bring about find where they part, and cut nothing that both have.

A life is a list of events over four replicas: one is elected and appends in a new epoch (perhaps nothing), a replica
loses its end, one copies from another, the start of a log is trimmed, a history is lost and rebuilt from the records.
Copying is done by comparing the logs themselves, not by `divergence`: that is what is tested against it.
"""

from copy import deepcopy
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from tidelog.log.epochs import EpochHistory
from tidelog.model.ids import Offset
from tidelog.replication.divergence import TooFarBehind, Truncate, Unknown, divergence, epoch_query, truncation_point

REPLICAS = 4


@dataclass
class Replica:
    """`records[at]` is the epoch of offset `start + at`."""

    start: int = 0
    records: list[int] = field(default_factory=list)
    epochs: EpochHistory = field(default_factory=EpochHistory)

    @property
    def end(self) -> int:
        return self.start + len(self.records)

    def at(self, offset: int) -> int | None:
        return self.records[offset - self.start] if self.start <= offset < self.end else None

    def append(self, epoch: int, count: int = 1) -> None:
        if epoch < self.epochs.latest:
            self.epochs.truncate_from_end(self.end)
        self.epochs.assign(epoch, self.end)
        self.records += [epoch] * count

    def cut_to(self, end: int) -> None:
        if end < self.end:
            del self.records[max(0, end - self.start) :]
            self.epochs.truncate_from_end(end)

    def reset(self, start: int) -> None:
        self.start = start
        self.records.clear()
        self.epochs.clear()

    def trim(self, start: int) -> None:
        if self.start < start <= self.end:
            del self.records[: start - self.start]
            self.start = start
            self.epochs.truncate_from_start(start)

    def rebuild(self) -> None:
        self.epochs = EpochHistory()
        for at, epoch in enumerate(self.records):
            self.epochs.assign(epoch, self.start + at)


def shared_end(one: Replica, other: Replica) -> int:
    """Behind the last offset at which both have the same record; 0 if there is none."""
    both = range(max(one.start, other.start), min(one.end, other.end))
    return max((offset + 1 for offset in both if one.at(offset) == other.at(offset)), default=0)


def copy_some(follower: Replica, leader: Replica, count: int) -> None:
    end = shared_end(follower, leader)
    if end > follower.start:
        follower.cut_to(end)
    else:
        follower.reset(leader.start)
    for offset in range(follower.end, min(follower.end + count, leader.end)):
        epoch = leader.at(offset)
        assert epoch is not None
        follower.append(epoch)


Event = tuple[str, int, int, int]
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["lead", "lead", "copy", "copy", "lose", "trim", "rebuild"]),
        st.integers(0, REPLICAS - 1),
        st.integers(0, REPLICAS - 1),
        st.integers(0, 5),
    ),
    max_size=25,
)


def lived(events: list[Event]) -> tuple[list[Replica], int]:
    replicas = [Replica() for _ in range(REPLICAS)]
    epoch = 0
    for kind, one, other, count in events:
        replica = replicas[one]
        if kind == "lead":
            epoch += 1
            replica.append(epoch, count)
        elif kind == "copy" and one != other:
            copy_some(replica, replicas[other], count)
        elif kind == "lose":
            replica.cut_to(max(replica.start, replica.end - count))
        elif kind == "trim":
            replica.trim(replica.start + count)
        elif kind == "rebuild":
            replica.rebuild()
        replica.epochs.validate()
    return replicas, epoch


def reconcile(follower: Replica, leader: Replica) -> bool:
    """Ask until there is nothing to cut; False if the leader is out of date."""
    for _ in range(len(follower.epochs) + 3):
        last_epoch, next_offset = epoch_query(
            follower.epochs, log_start=Offset(follower.start), log_end=Offset(follower.end)
        )
        answer = divergence(
            leader.epochs, Offset(leader.start), Offset(leader.end), last_epoch=last_epoch, next_offset=next_offset
        )
        before = follower.end
        if isinstance(answer, Truncate):
            follower.cut_to(
                truncation_point(
                    follower.epochs, answer, log_start=Offset(follower.start), log_end=Offset(follower.end)
                )
            )
            assert follower.end < before, f"{answer} cuts nothing"
        elif isinstance(answer, TooFarBehind):
            follower.reset(answer.start)
        else:
            return not isinstance(answer, Unknown)
    raise AssertionError(f"no end of it: {follower} and {leader}")


@given(events=EVENTS, is_elected=st.booleans())
def test_two_logs_end_equal_and_nothing_that_both_have_is_cut(events: list[Event], is_elected: bool) -> None:
    replicas, epoch = lived(events)
    for one in range(REPLICAS):
        leader = deepcopy(replicas[one])
        if is_elected:
            leader.append(epoch + 1, 0)
        for other in range(REPLICAS):
            if one == other:
                continue
            before, follower = replicas[other], deepcopy(replicas[other])
            shared = shared_end(before, leader)
            is_known = reconcile(follower, leader)
            assert is_known or not is_elected, "who is elected last knows about every epoch"
            if not is_known:
                assert follower == before, "a leader that is out of date makes nobody cut"
                continue
            assert follower.end >= shared, "something that both have was cut"
            assert leader.start <= follower.end <= leader.end
            for offset in range(max(follower.start, leader.start), follower.end):
                assert follower.at(offset) == leader.at(offset), f"different records at {offset}"


@given(events=EVENTS, count=st.integers(0, 4))
def test_after_it_the_leaders_records_follow_and_the_histories_agree(events: list[Event], count: int) -> None:
    replicas, epoch = lived(events)
    leader, follower = replicas[0], replicas[1]
    leader.append(epoch + 1, count)
    assert reconcile(follower, leader)
    for offset in range(follower.end, leader.end):
        written_in = leader.at(offset)
        assert written_in is not None
        follower.append(written_in)
    follower.epochs.validate()
    for offset in range(max(follower.start, leader.start), leader.end):
        assert follower.at(offset) == leader.at(offset)
        assert follower.epochs.epoch_for(offset) == leader.at(offset), "the history says what the records say"
