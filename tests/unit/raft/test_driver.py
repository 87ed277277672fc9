"""The driver: whole members, with storage and streams, on the simulated machine room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

import pytest

from tidelog.model.errors import (
    MembershipChangeError,
    NotLeaderError,
    OverloadedError,
    RaftStoppedError,
    RecordTooLargeError,
    TidelogError,
    UnknownOutcomeError,
)
from tidelog.model.ids import NodeId, Offset
from tidelog.raft.core import RaftConfig
from tidelog.raft.driver import DriverConfig, RaftDriver
from tidelog.raft.effects import Role, RoleChange
from tidelog.raft.membership import Member, Membership
from tidelog.raft.messages import Entry, EntryKind, SnapshotId
from tidelog.raft.observer import ObserverConfig, RaftObserver
from tidelog.raft.peers import LinkConfig
from tidelog.raft.report import RaftReport
from tidelog.raft.snapshots import file_name
from tidelog.raft.state_machine import SnapshotJob
from tidelog.raft.storage import FORMAT_KEY, RaftStorage
from tidelog.world.simulated import Loss, SimNode, SimWorld
from tidelog.world.simulated.network import SimNetwork, SimTransport

pytestmark = pytest.mark.sim

CLUSTER = "cluster"
A, B, C, D = NodeId(1), NodeId(2), NodeId(3), NodeId(4)
SMALL_SNAPSHOTS = DriverConfig(snapshot_bytes=2_000, raft=RaftConfig(kept_behind_snapshot_bytes=0))


def directory(node: NodeId) -> bytes:
    return bytes([node]) * 16


def member(node: NodeId) -> Member:
    return Member(node, directory(node), (("CONTROLLER", f"host{node}:9192"),))


def encode_values(values: tuple[bytes, ...]) -> bytes:
    return b"\n".join(values)


class Values:
    """A list of what was proposed. It checks what it is promised: in order, once, no gaps."""

    def __init__(self) -> None:
        self.values: list[bytes] = []
        self.next = 0
        self.loaded: list[SnapshotId] = []
        self.roles: list[RoleChange] = []

    def apply(self, first: Offset, entries: Sequence[Entry]) -> None:
        assert first == self.next, f"entries from {first}, expected {self.next}"
        self.next = first + len(entries)
        self.values += [entry.data for entry in entries if entry.kind is EntryKind.DATA]

    def load_snapshot(self, snapshot: SnapshotId, data: bytes) -> None:
        assert snapshot.offset > self.next, "a snapshot brings news"
        self.loaded.append(snapshot)
        self.values = data.split(b"\n") if data else []
        self.next = snapshot.offset

    def take_snapshot(self) -> SnapshotJob:
        return SnapshotJob(encode_values, (tuple(self.values),))

    def role_changed(self, change: RoleChange) -> None:
        self.roles.append(change)


class Running:
    """One running member: its process, driver and state."""

    def __init__(self, node: SimNode, driver: RaftDriver, values: Values, transport: SimTransport) -> None:
        self.node = node
        self.driver = driver
        self.values = values
        self.transport = transport
        self.failure: BaseException | None = None


class Group:
    """Members by node id; `voters` are the first ones."""

    def __init__(self, seed: int, voters: Sequence[NodeId] = (A, B, C), config: DriverConfig | None = None) -> None:
        self.world = SimWorld(seed)
        self.network = SimNetwork(self.world)
        self.config = config or DriverConfig()
        self.founders = Membership(tuple(member(node) for node in voters))
        self.members: dict[NodeId, Running] = {}

    def start(self, *nodes: NodeId, config: DriverConfig | None = None) -> None:
        for node in nodes:
            process = self.world.machine(f"m{node}").boot()
            self.world.run(process, partial(self._boot, node, config or self.config))

    async def _boot(self, node: NodeId, config: DriverConfig, process: SimNode) -> None:
        transport = self.network.join(process, node)
        storage = RaftStorage(
            disk=process.disk(),
            store=process.store(),
            work=process.work,
            clock=process.clock,
            cluster_id=CLUSTER,
            node=node,
        )
        if process.store().get(FORMAT_KEY) is None:
            founders = self.founders if self.founders.voter(node) else Membership()
            await storage.format(directory=directory(node), membership=founders)
        values = Values()
        boot = await storage.open()

        def failed(error: BaseException) -> None:
            found.failure = error

        driver = RaftDriver(
            storage.me,
            storage,
            boot,
            transport,
            values,
            config,
            Random(process.random.random()),
            work=process.work,
            on_failure=failed,
        )
        found = self.members[node] = Running(process, driver, values, transport)
        await transport.start()
        await driver.start()

    def kill(self, node: NodeId) -> None:
        self.members.pop(node)
        self.world.machine(f"m{node}").kill()

    def on(self, node: NodeId, job: Callable[[RaftDriver], Coroutine[Any, Any, Any]], *, timeout: float = 60) -> Any:
        """Run this with the driver of a member, on its process."""
        found = self.members[node]
        return self.world.run(found.node, lambda _: job(found.driver), timeout=timeout)

    def leader(self, *, among: Sequence[NodeId] | None = None, timeout: float = 10) -> NodeId:
        """The leader of the newest epoch that a member has; waits for it."""
        leaders: list[NodeId] = []

        def found() -> bool:
            leaders[:] = [
                node
                for node, one in sorted(self.members.items(), key=lambda row: -row[1].driver.core.epoch)
                if one.driver.core.role is Role.LEADER and (among is None or node in among)
            ]
            return bool(leaders)

        self.world.run_until(found, timeout=timeout)
        return leaders[0]

    def propose(self, node: NodeId, *values: bytes) -> list[Offset]:
        async def job(driver: RaftDriver) -> list[Offset]:
            return [await driver.propose(value) for value in values]

        found: list[Offset] = self.on(node, job)
        return found

    def until_equal(
        self, values: Sequence[bytes], *, among: Sequence[NodeId] | None = None, timeout: float = 20
    ) -> None:
        wanted = list(values)
        nodes = among or list(self.members)
        self.world.run_until(lambda: all(self.members[n].values.values == wanted for n in nodes), timeout=timeout)


@pytest.fixture
def group() -> Iterator[Group]:
    found = Group(seed=11)
    with found.world:
        yield found


def error_of(driver_job: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, TidelogError | None]:
    """The error of the catalogue that this ends with."""

    async def job() -> TidelogError | None:
        try:
            await driver_job
        except TidelogError as error:
            return error
        return None

    return job()


# Proposals.


def test_proposals_are_applied_everywhere_in_one_order(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    offsets = group.propose(leader, b"a", b"b", b"c")
    assert offsets == [1, 2, 3], "offset 0 is the no-op of the epoch"
    assert group.members[leader].values.values == [b"a", b"b", b"c"], "answered when applied"
    group.until_equal([b"a", b"b", b"c"])


def test_a_group_of_one_commits_alone() -> None:
    group = Group(seed=2, voters=[A])
    with group.world:
        group.start(A)
        assert group.leader() == A
        group.propose(A, b"a")
        group.until_equal([b"a"])


def test_who_does_not_lead_says_who_does(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")
    follower = next(node for node in (A, B, C) if node != leader)
    error = group.on(follower, lambda driver: error_of(driver.propose(b"b")))
    assert isinstance(error, NotLeaderError)
    assert error.leader == leader
    assert error.retriable
    error = group.on(follower, lambda driver: error_of(driver.read_index()))
    assert isinstance(error, NotLeaderError)


def test_proposals_that_wait_together_share_a_sync(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"first")
    before = group.members[leader].driver.metrics.persist_rounds

    async def many(driver: RaftDriver) -> int:
        await asyncio.gather(*(driver.propose(b"%d" % number) for number in range(256)))
        return driver.metrics.persist_rounds

    assert group.on(leader, many) - before <= 256 / 16
    assert group.members[leader].values.values[1:] == [b"%d" % number for number in range(256)]


def test_too_many_proposals_are_refused_and_not_queued() -> None:
    group = Group(seed=3, config=DriverConfig(waiting_max=10))
    with group.world:
        group.start(A, B, C)
        leader = group.leader()

        async def flood(driver: RaftDriver) -> list[Any]:
            return await asyncio.gather(*(driver.propose(b"x") for _ in range(15)), return_exceptions=True)

        answers = group.on(leader, flood)
        assert sum(isinstance(answer, OverloadedError) for answer in answers) == 5
        assert sum(isinstance(answer, int) for answer in answers) == 10


def test_a_proposal_over_the_limit_is_refused(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    large = bytes(group.config.entry_bytes_max + 1)
    assert isinstance(group.on(leader, lambda driver: error_of(driver.propose(large))), RecordTooLargeError)
    group.propose(leader, large[:-1])
    group.until_equal([large[:-1]])


def test_a_proposal_of_a_leader_that_is_cut_off_has_an_unknown_outcome(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")
    others = [node for node in (A, B, C) if node != leader]
    for other in others:
        group.network.block(leader, other)
        group.network.block(other, leader)
    error = group.on(leader, lambda driver: error_of(driver.propose(b"lost")))
    assert isinstance(error, UnknownOutcomeError)
    successor = group.leader(among=others)
    group.propose(successor, b"b")
    group.network.heal()
    group.until_equal([b"a", b"b"])


def test_a_read_index_covers_what_was_answered_before(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    (offset,) = group.propose(leader, b"a")

    async def read(driver: RaftDriver) -> Offset:
        found = await driver.read_index()
        await driver.applied(found)
        return found

    assert group.on(leader, read) > offset


@pytest.mark.case("R6")
def test_a_leader_that_is_cut_off_does_not_answer_reads(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")
    others = [node for node in (A, B, C) if node != leader]
    for other in others:
        group.network.block(leader, other)
        group.network.block(other, leader)
    error = group.on(leader, lambda driver: error_of(driver.read_index()))
    assert isinstance(error, NotLeaderError)
    assert group.members[leader].driver.core.role is not Role.LEADER


# Failure.


def test_a_killed_leader_is_replaced_at_once_because_its_streams_break(group: Group) -> None:
    group.network.silent_death_probability = 0.0
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")
    began = group.world.scheduler.now_ns
    group.kill(leader)
    group.leader(timeout=0.49)
    passed_s = (group.world.scheduler.now_ns - began) / 1e9
    assert passed_s < 0.49, "no election timeout was waited for"


@pytest.mark.source("a:B-62")
@pytest.mark.source("a:B-63")
def test_a_standby_takes_over_with_the_state_that_it_has(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a", b"b")
    group.until_equal([b"a", b"b"])
    standby = {node: one.values for node, one in group.members.items() if node != leader}
    group.kill(leader)
    successor = group.leader()
    assert standby[successor].values == [b"a", b"b"], "it had applied everything before it led"
    assert standby[successor].loaded == [], "nothing was loaded anew"
    group.propose(successor, b"c")


@pytest.mark.source("a:B-70")
@pytest.mark.source("b:EX-02")
@pytest.mark.parametrize("voters", [(A, B, C), (A, B, C, D, NodeId(5))])
def test_a_minority_may_be_down_and_a_majority_may_not(voters: tuple[NodeId, ...]) -> None:
    group = Group(seed=3, voters=voters)
    with group.world:
        group.start(*voters)
        group.propose(group.leader(), b"all")
        assert sum(one.driver.core.role is Role.LEADER for one in group.members.values()) == 1
        for _ in range(len(voters) // 2):
            group.kill(next(node for node in voters if node in group.members))
        group.propose(group.leader(), b"a majority")
        leader = group.leader()
        group.kill(next(node for node in voters if node in group.members and node != leader))
        error = group.on(leader, lambda driver: error_of(driver.propose(b"a minority")))
        assert isinstance(error, UnknownOutcomeError), "it resigned: nothing commits without a majority"
        group.world.run_for(5)
        assert all(one.values.values == [b"all", b"a majority"] for one in group.members.values())


@pytest.mark.source("b:E-34")
@pytest.mark.source("b:O-06")
def test_a_member_describes_itself_and_the_leader_describes_the_others(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")
    group.until_equal([b"a"])
    group.world.run_for(1)
    reports: dict[NodeId, RaftReport] = {node: group.on(node, describe) for node in (A, B, C)}
    assert [report.role is Role.LEADER for node, report in reports.items()] == [node == leader for node in reports]
    assert {(report.leader, report.commit, report.log_end) for report in reports.values()} == {(leader, 2, 2)}
    others = [member for member in reports[leader].members if member.node != leader]
    assert [(member.is_connected, member.lag, member.counts) for member in others] == [(True, 0, True)] * 2
    metrics = group.members[leader].driver.metrics
    assert (metrics.proposals, metrics.proposals_committed) == (1, 1)
    assert metrics.messages_received > 0 < metrics.messages_sent


@pytest.mark.source("b:E-04")
def test_after_an_outage_of_the_quorum_leadership_is_handed_over_as_ever(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"before")
    for node in (A, B, C):
        if node != leader:
            group.kill(node)
    group.world.run_for(10)
    group.start(*(node for node in (A, B, C) if node not in group.members))
    leader = group.leader()
    group.propose(leader, b"after")
    assert group.on(leader, lambda driver: driver.hand_over(timeout_ms=5000)) is True
    successor = group.leader(among=[node for node in (A, B, C) if node != leader])
    group.propose(successor, b"handed over")
    group.until_equal([b"before", b"after", b"handed over"])


def test_members_come_back_with_all_that_was_answered(group: Group) -> None:
    group.start(A, B, C)
    wanted = [b"%d" % number for number in range(30)]
    for number in range(0, 30, 10):
        leader = group.leader()
        group.propose(leader, *wanted[number : number + 10])
        for node in (A, B, C):
            group.members.pop(node)
            group.world.machine(f"m{node}").lose_power(Loss.SOME)
        group.start(A, B, C)
    group.leader()
    group.until_equal(wanted)


@pytest.mark.case("R12")
def test_a_leader_with_a_stalled_disk_gives_up_its_leadership(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")
    group.world.machine(f"m{leader}").disk().begin_stall()
    group.world.machine(f"m{leader}").store().begin_stall()
    others = [node for node in (A, B, C) if node != leader]
    proposal = group.members[leader].node.spawn(error_of(group.members[leader].driver.propose(b"b")))
    successor = group.leader(among=others, timeout=10)
    assert successor != leader
    group.propose(successor, b"c")
    group.world.machine(f"m{leader}").heal()
    group.world.run_until(lambda: proposal.done() and group.members[leader].driver.core.leader == successor, timeout=10)
    values = group.members[successor].values.values
    assert values[0] == b"a"
    assert values[-1] == b"c"
    group.until_equal(values)


def test_a_failed_sync_stops_the_member_and_the_others_go_on(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")
    group.world.machine(f"m{leader}").disk().fail("sync")
    error = group.on(leader, lambda driver: error_of(driver.propose(b"b")))
    assert isinstance(error, UnknownOutcomeError | RaftStoppedError)
    group.world.run_until(lambda: group.members[leader].failure is not None, timeout=5)
    error = group.on(leader, lambda driver: error_of(driver.propose(b"c")))
    assert isinstance(error, RaftStoppedError)
    others = [node for node in (A, B, C) if node != leader]
    successor = group.leader(among=others)
    group.propose(successor, b"d")
    assert group.members[successor].values.values[-1] == b"d"


def test_closing_answers_everybody_who_waits(group: Group) -> None:
    group.start(A, B)
    leader = group.leader()
    other = B if leader == A else A
    group.kill(other)

    async def job(driver: RaftDriver) -> list[Any]:
        waiting = [
            asyncio.ensure_future(error_of(driver.propose(b"a"))),
            asyncio.ensure_future(error_of(driver.applied(Offset(1000)))),
            asyncio.ensure_future(error_of(driver.next_role())),
        ]
        await asyncio.sleep(0.01)
        await driver.close()
        return await asyncio.gather(*waiting)

    answers = group.on(leader, job)
    assert isinstance(answers[0], RaftStoppedError | UnknownOutcomeError)
    assert isinstance(answers[1], RaftStoppedError)


def test_leadership_is_handed_over_before_an_orderly_stop(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")
    assert group.on(leader, lambda driver: driver.hand_over(timeout_ms=2_000)) is True
    successor = group.leader(among=[node for node in (A, B, C) if node != leader])
    group.propose(successor, b"b")
    group.until_equal([b"a", b"b"])


def test_a_leader_that_nobody_can_relieve_says_so(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    others = [node for node in (A, B, C) if node != leader]
    group.propose(leader, b"a")
    for other in others:
        group.world.machine(f"m{other}").disk().begin_stall()
        group.world.machine(f"m{other}").store().begin_stall()

    async def hand_over(driver: RaftDriver) -> tuple[bool, bool]:
        waiting = asyncio.ensure_future(error_of(driver.propose(b"nobody has it")))
        await asyncio.sleep(0.01)
        gave_up = await driver.hand_over(timeout_ms=600)
        waiting.cancel()
        return gave_up, driver.core.role is Role.LEADER

    gave_up, still_leads = group.on(leader, hand_over)
    assert gave_up is not still_leads


def test_a_member_alone_says_whom_it_waits_for(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    group.start(A)
    group.world.run_for(5)
    text = group.on(A, waits_for)
    assert "waits for 1 more of 3 voters (2 are needed)" in text
    assert "node 2 at host2:9192" in text
    assert "node 3 at host3:9192" in text
    assert any("node 2 at host2:9192" in record.getMessage() for record in caplog.records), "it is in the log"


async def describe(driver: RaftDriver) -> RaftReport:
    return driver.describe()


async def waits_for(driver: RaftDriver) -> str:
    return driver.waits_for()


# Snapshots.


def test_snapshots_are_taken_and_a_restart_begins_with_one() -> None:
    group = Group(seed=4, config=SMALL_SNAPSHOTS)
    with group.world:
        group.start(A, B, C)
        leader = group.leader()
        wanted = [b"%050d" % number for number in range(100)]
        group.propose(leader, *wanted)
        group.world.run_until(
            lambda: all(m.driver.metrics.snapshots_taken > 1 for m in group.members.values()), timeout=20
        )
        assert group.members[leader].driver.core.log.start > 0, "the log behind it is gone"
        for node in (A, B, C):
            group.kill(node)
        group.start(A, B, C)
        assert all(one.values.loaded for one in group.members.values())
        group.leader()
        group.until_equal(wanted)


def test_an_old_state_is_put_into_a_snapshot_though_it_is_small() -> None:
    group = Group(seed=4, config=DriverConfig(snapshot_age_ms=5_000))
    with group.world:
        group.start(A, B, C)
        group.propose(group.leader(), b"a")
        group.world.run_for(7)
        assert [one.driver.metrics.snapshots_taken for one in group.members.values()] == [1, 1, 1]


def test_a_member_that_was_away_too_long_gets_a_snapshot() -> None:
    group = Group(seed=5, config=SMALL_SNAPSHOTS)
    with group.world:
        group.start(A, B, C)
        leader = group.leader()
        away = next(node for node in (A, B, C) if node != leader)
        group.propose(leader, b"first")
        group.kill(away)
        wanted = [b"first", *(b"%050d" % number for number in range(100))]
        group.propose(leader, *wanted[1:])
        group.start(away)
        group.until_equal(wanted)
        assert group.members[away].driver.metrics.snapshots_installed >= 1


@pytest.mark.case("R19")
def test_a_spoilt_snapshot_is_never_sent_and_a_new_one_is_taken() -> None:
    group = Group(seed=6, config=SMALL_SNAPSHOTS)
    with group.world:
        group.start(A, B, C)
        leader = group.leader()
        away = next(node for node in (A, B, C) if node != leader)
        group.kill(away)
        wanted = [b"%050d" % number for number in range(100)]
        group.propose(leader, *wanted)
        group.world.run_for(1)
        device = group.world.machine(f"m{leader}").disk()
        newest = group.members[leader].driver.core.log.snapshot
        device.flip_bit(f"raft/{file_name(newest)}", 100)
        group.world.run_for(3)  # what was read before is too old to be sent
        group.start(away)
        group.until_equal(wanted)
        assert group.members[away].driver.metrics.snapshots_refused == 0
        assert f"raft/{file_name(newest)}.corrupt" in dict(device.files())


# Membership.


def test_a_voter_is_added_catches_up_and_votes() -> None:
    group = Group(seed=7, config=SMALL_SNAPSHOTS)
    with group.world:
        group.start(A, B, C)
        leader = group.leader()
        wanted = [b"%050d" % number for number in range(100)]
        group.propose(leader, *wanted)
        group.start(D)
        group.on(leader, lambda driver: driver.change_membership(add=member(D)))
        assert group.members[leader].driver.core.log.membership.voter(D) is not None
        group.until_equal(wanted)
        error = group.on(leader, lambda driver: error_of(driver.change_membership(add=member(D))))
        assert isinstance(error, MembershipChangeError)
        rows = group.on(leader, describe).members
        assert [row.node for row in rows if row.is_voter] == [A, B, C, D]


def test_a_removed_leader_hands_over_and_the_rest_goes_on(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")
    group.on(leader, lambda driver: driver.change_membership(remove=leader))
    others = [node for node in (A, B, C) if node != leader]
    successor = group.leader(among=others)
    group.propose(successor, b"b")
    assert group.members[successor].driver.core.log.membership.voter(leader) is None
    group.until_equal([b"a", b"b"], among=others)


# Bounds.


def test_a_peer_that_does_not_read_is_cut_off_and_catches_up_later() -> None:
    config = DriverConfig(link=LinkConfig(queue_messages_max=50, frame_bytes=1))
    group = Group(seed=8, config=config)
    with group.world:
        group.network.window_bytes = 4_000
        group.start(A, B, C)
        leader = group.leader()
        slow = next(node for node in (A, B, C) if node != leader)
        group.propose(leader, b"first")
        group.world.machine(f"m{slow}").pause()
        wanted = [b"first", *(b"%0200d" % number for number in range(300))]
        group.propose(leader, *wanted[1:])
        link = group.members[leader].driver._peers.links[slow]
        assert len(link._queue) <= 50
        group.world.machine(f"m{slow}").resume()
        group.until_equal(wanted)


# Observers.


class Follower:
    """What an observer keeps; it checks that it never moves back."""

    def __init__(self) -> None:
        self.values: list[bytes] = []
        self.next = 0
        self.loaded = 0

    def apply(self, first: Offset, entries: Sequence[Entry]) -> None:
        assert first == self.next
        self.next += len(entries)
        self.values += [entry.data for entry in entries if entry.kind is EntryKind.DATA]

    def load_snapshot(self, snapshot: SnapshotId, data: bytes) -> None:
        assert snapshot.offset > self.next
        self.loaded += 1
        self.next = snapshot.offset
        self.values = data.split(b"\n") if data else []


def observe(group: Group, sources: Sequence[NodeId]) -> tuple[Follower, RaftObserver]:
    process = group.world.machine("broker").boot()
    transport = group.network.join(process, NodeId(100))
    follower = Follower()
    made: list[RaftObserver] = []

    async def main(_: SimNode) -> None:
        await transport.start()
        made.append(RaftObserver(transport, lambda: sources, follower, process.work, ObserverConfig(), process.random))
        process.spawn(made[0].run())

    group.world.run(process, main)
    return follower, made[0]


def has_heard(follower: Follower, observer: RaftObserver) -> bool:
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


@pytest.mark.source("b:E-31")
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


def test_the_same_seed_gives_the_same_run() -> None:
    def run() -> str:
        group = Group(seed=21, config=SMALL_SNAPSHOTS)
        with group.world:
            group.start(A, B, C)
            leader = group.leader()
            group.propose(leader, *(b"%050d" % number for number in range(60)))
            group.kill(leader)
            group.propose(group.leader(), b"last")
            return group.world.digest

    assert run() == run()
