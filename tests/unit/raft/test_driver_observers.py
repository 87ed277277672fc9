"""Those who follow the committed log: observers by stream, and tails inside of the process."""

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
from support.raft.members import SMALL_SNAPSHOTS, A, B, C, Group, describe, error_of

from tidelog.model.errors import CorruptStateError, RaftStoppedError, TidelogError
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.driver import RaftDriver
from tidelog.raft.messages import Entry, EntryKind, SnapshotId
from tidelog.raft.observer import ObserverConfig, RaftObserver
from tidelog.raft.snapshots import file_name
from tidelog.world.simulated import SimNode

pytestmark = pytest.mark.sim


@pytest.fixture
def group() -> Iterator[Group]:
    with Group(seed=11).running() as found:
        yield found


class CommitListener:
    """What an observer keeps; it checks that it never moves back."""

    def __init__(self) -> None:
        self.values: list[bytes] = []
        self.next = 0
        self.loaded = 0
        self.unreadable: bytes | None = None
        """A value that this follower does not understand."""

    def apply(self, first: Offset, entries: Sequence[Entry]) -> None:
        assert first == self.next
        if self.unreadable in [entry.data for entry in entries]:
            raise CorruptStateError("a record cannot be read")
        self.next += len(entries)
        self.values += [entry.data for entry in entries if entry.kind is EntryKind.DATA]

    def load_snapshot(self, snapshot: SnapshotId, data: bytes) -> None:
        assert snapshot.offset > self.next
        self.loaded += 1
        self.next = snapshot.offset
        self.values = data.split(b"\n") if data else []


def observe(
    group: Group, sources: Sequence[NodeId], *, offset: int = 0, epoch: int = 0, dying: Sequence[str] = ()
) -> tuple[CommitListener, RaftObserver]:
    process = group.world.machine("broker").boot()
    process.work.dying.update(dying)
    transport = group.network.join(process, NodeId(100))
    follower = CommitListener()
    follower.next = offset
    made: list[RaftObserver] = []

    async def main(_: SimNode) -> None:
        await transport.start()
        made.append(
            RaftObserver(
                transport,
                lambda: sources,
                follower,
                process.work,
                ObserverConfig(),
                process.random,
                offset=Offset(offset),
                epoch=Epoch(epoch),
            )
        )
        process.spawn(made[0].run())

    group.world.run(process, main)
    return follower, made[0]


def has_heard(follower: CommitListener, observer: RaftObserver) -> bool:
    return follower.values[:1] == [b"a"] and observer.state is not None


def test_an_observer_follows_from_any_member(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")
    for source in (A, B, C):
        follower, observer = observe(group, [source])
        group.world.run_until(partial(has_heard, follower, observer), timeout=5)
        assert observer.state is not None
        assert observer.state.leader == leader
        described = group.on(source, describe)
        assert [row[0] for row in described.observers] == [100]
        group.world.machine("broker").kill()
        group.world.run_for(8)


@pytest.mark.requirement("b:E-31")
def test_an_observer_changes_its_source_and_never_moves_back(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    follower, observer = observe(group, [A, B, C])
    wanted: list[bytes] = []
    for number in range(6):
        value = b"%d" % number
        leader = group.leader()
        group.propose(leader, value)
        wanted.append(value)
        group.world.run_until(lambda: follower.values == wanted, timeout=20)
        source = observer.source
        assert source is not None
        group.kill(source)
        group.start(source)
    assert observer.changes > 3


def test_an_observer_leaves_a_source_that_is_cut_off_from_the_group(group: Group) -> None:
    group.start(A, B, C)
    group.propose(group.leader(), b"a")
    follower, observer = observe(group, [A, B, C])
    group.world.run_until(lambda: follower.values == [b"a"], timeout=5)
    source = observer.source
    assert source is not None
    others = [node for node in (A, B, C) if node != source]
    for other in others:
        group.network.block(source, other)
        group.network.block(other, source)
    group.world.run_until(lambda: observer.source in others, timeout=30)
    group.propose(group.leader(among=others), b"b")
    group.world.run_until(lambda: follower.values == [b"a", b"b"], timeout=20)


def test_an_observer_begins_with_a_snapshot_when_the_entries_are_gone() -> None:
    group = Group(seed=9, config=SMALL_SNAPSHOTS)
    with group.world:
        group.start(A, B, C)
        wanted = [b"%050d" % number for number in range(100)]
        group.propose(group.leader(), *wanted)
        group.world.run_for(2)
        follower, _ = observe(group, [A, B, C])
        group.world.run_until(lambda: follower.values == wanted, timeout=10)
        assert follower.loaded == 1


def test_a_tail_inside_of_the_process_gives_the_same(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a", b"b")

    async def follow(driver: RaftDriver) -> list[bytes]:
        tail = driver.tail(Offset(0), driver.core.log.start_epoch)
        found: list[bytes] = []
        while len(found) < 2:
            item = await tail.next()
            assert not isinstance(item, SnapshotId)
            found += [entry.data for entry in item.entries if entry.kind is EntryKind.DATA]
        return found

    assert group.on(leader, follow) == [b"a", b"b"]


def test_a_waiting_tail_is_notified_when_its_member_stops(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")

    async def stop(driver: RaftDriver) -> TidelogError | None:
        tail = driver.tail(driver.core.commit, driver.core.epoch)
        waiting = asyncio.ensure_future(error_of(tail.next()))
        await asyncio.sleep(0.01)
        await driver.close()
        assert isinstance(await error_of(tail.next()), RaftStoppedError), "also one that asks later"
        assert driver.describe().observers == ()
        return await waiting

    assert isinstance(group.on(leader, stop, timeout=5), RaftStoppedError)


def test_a_tail_that_is_closed_is_forgotten(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")

    async def close(driver: RaftDriver) -> TidelogError | None:
        kept = driver.tail(driver.core.commit, driver.core.epoch)
        closed = driver.tail(driver.core.commit, driver.core.epoch)
        waiting = asyncio.ensure_future(error_of(closed.next()))
        await asyncio.sleep(0.01)
        assert len(driver.describe().observers) == 2
        closed.close()
        closed.close()
        assert len(driver.describe().observers) == 1
        await driver.propose(b"b")
        found = await kept.next()
        assert not isinstance(found, SnapshotId)
        assert [entry.data for entry in found.entries] == [b"b"], "the other one goes on"
        kept.close()
        assert driver.describe().observers == ()
        return await waiting

    assert isinstance(group.on(leader, close, timeout=5), RaftStoppedError)


def test_an_observer_that_goes_leaves_no_tail_behind(group: Group) -> None:
    group.start(A, B, C)
    group.propose(group.leader(), b"a")
    follower, _ = observe(group, [A])
    group.world.run_until(lambda: follower.values == [b"a"], timeout=10)
    assert len(group.on(A, describe).observers) == 1
    group.world.machine("broker").kill()
    group.world.run_until(lambda: group.members[A].driver._tails.describe() == (), timeout=30)


def has_all(follower: CommitListener, wanted: list[bytes]) -> bool:
    return follower.values == wanted


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        row.getMessage() for row in caplog.records if row.name == "tidelog.raft.observer" and row.levelname == "WARNING"
    ]


@pytest.mark.case("R19")
@pytest.mark.parametrize("spoilt", [(A,), (A, B, C)], ids=["one", "all"])
def test_a_spoilt_snapshot_is_never_sent_to_an_observer(spoilt: tuple[NodeId, ...]) -> None:
    group = Group(seed=9, config=SMALL_SNAPSHOTS)
    with group.world:
        group.start(A, B, C)
        wanted = [b"%050d" % number for number in range(100)]
        group.propose(group.leader(), *wanted)
        group.world.run_for(2)
        for node in spoilt:
            newest = group.members[node].driver.core.log.snapshot
            group.world.machine(f"m{node}").disk().flip_bit(f"raft/{file_name(newest)}", 100)
        group.world.run_for(3)  # what was read before is too old to be sent
        # The only source, and the first of three: it is left at once, or serves when it has taken a new one.
        for sources in ([A], [A, B, C]):
            follower, observer = observe(group, sources)
            group.world.run_until(partial(has_all, follower, wanted), timeout=10)
            assert (observer.failures_total, follower.loaded) == (0, 1)
            group.world.machine("broker").kill()
        assert all(one.driver.failed is None for one in group.members.values())
        files = dict(group.world.machine(f"m{A}").disk().files())
        assert [path for path in files if path.endswith(".corrupt")], "it is kept, and another one was taken"


def test_an_observer_goes_to_another_source_while_one_cannot_check_its_snapshot() -> None:
    group = Group(seed=9, config=SMALL_SNAPSHOTS)
    with group.world:
        group.start(A, B, C)
        wanted = [b"%050d" % number for number in range(100)]
        group.propose(group.leader(), *wanted)
        group.world.run_for(2)
        for node in (A, B):
            group.members[node].node.work.dying.add("check_file")
        follower, _ = observe(group, [A, B, C])
        group.world.run_until(lambda: follower.values == wanted, timeout=5)
        assert all(one.driver.failed is None for one in group.members.values())


def test_an_observer_of_another_log_says_so_once_with_what_to_do(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")
    _, observer = observe(group, [A, B, C], offset=1, epoch=77)
    group.world.run_until(lambda: observer.unhealthy_reason is not None, timeout=20)
    group.world.run_for(60)
    assert observer.unhealthy_reason is not None
    assert "is of another group" in observer.unhealthy_reason
    assert observer.offset == 1
    assert 15 < observer.failures == observer.failures_total < 40, "tried on, and not without a pause"
    (said,) = warnings(caplog)
    assert "after 6 tries: cannot follow the metadata log from offset 1" in said
    assert "move its copy of the metadata away" in said


def test_an_observer_that_cannot_read_an_entry_says_so_until_it_can(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")
    follower, observer = observe(group, [A, B, C])
    group.world.run_until(lambda: follower.values == [b"a"], timeout=10)
    follower.unreadable = b"new"
    group.propose(leader, b"new")
    group.world.run_until(lambda: observer.unhealthy_reason is not None, timeout=20)
    group.world.run_for(30)
    (said,) = warnings(caplog)
    assert "a record cannot be read" in said
    assert "upgrade it" in said
    follower.unreadable = None
    group.world.run_until(lambda: follower.values == [b"a", b"new"], timeout=20)
    assert (observer.unhealthy_reason, observer.failures) == (None, 0)
    assert "following the metadata log again" in warnings(caplog)[-1]
    assert len(warnings(caplog)) == 2


def test_an_observer_whose_helper_dies_is_in_trouble_until_it_lives() -> None:
    group = Group(seed=9, config=SMALL_SNAPSHOTS)
    with group.world:
        group.start(A, B, C)
        wanted = [b"%050d" % number for number in range(100)]
        group.propose(group.leader(), *wanted)
        group.world.run_for(2)
        follower, observer = observe(group, [A, B, C], dying=["decode_received"])
        group.world.run_until(lambda: observer.unhealthy_reason is not None, timeout=30)
        assert observer.unhealthy_reason is not None
        assert "out of memory" in observer.unhealthy_reason
        broker = group.world.machine("broker").node
        assert broker is not None
        broker.work.dying.clear()
        group.world.run_until(lambda: follower.values == wanted, timeout=30)
        assert observer.unhealthy_reason is None


def test_an_observer_with_nothing_to_apply_is_well_again_when_a_source_confirms_it(group: Group) -> None:
    group.start(A, B, C)
    group.propose(group.leader(), b"a")
    _, observer = observe(group, [A])
    group.world.run_until(lambda: observer.offset == group.members[A].driver.core.commit, timeout=10)
    observer.failures, observer.unhealthy_reason = 9, "six sources rejected it, one after the other"
    group.world.run_until(lambda: observer.unhealthy_reason is None and observer.failures == 0, timeout=5)
