"""Random schedules over pure cores: whatever the network, the disks and the operators do, Raft's properties hold, and
when they stop doing it the cluster works again.

One seed is one run. `RAFT_CORE_SEEDS=n` runs n of them, from `RAFT_CORE_FIRST`; a failure names its seed.
"""

import os
import random
import time
from collections.abc import Callable
from heapq import heapify, heappop, heappush

import pytest
from support.raft.core_cluster import Cluster, Envelope, Stored, member

from tidelog.model.ids import NodeId, Offset
from tidelog.raft.config import RaftConfig
from tidelog.raft.core import RaftCore
from tidelog.raft.membership import Membership
from tidelog.raft.messages import EntryKind

BUDGET_S = 10.0
POOL = 6


class Schedule:
    """One seeded run: first faults, then healing, then the demand for progress."""

    def __init__(self, seed: int, *, steps: int = 1000) -> None:
        self.random = draw = random.Random(seed)
        self.steps = steps
        voters = draw.choice([1, 2, 3, 3, 3, 4, 5])
        config = RaftConfig(
            append_bytes_max=draw.choice([60, 200, 1 << 20]),
            inflight_bytes_max=draw.choice([100, 500, 8 << 20]),
            inflight_messages_max=draw.choice([1, 3, 64]),
            uncommitted_bytes_max=draw.choice([300, 1 << 20]),
            kept_behind_snapshot_bytes=draw.choice([0, 100, 4 << 20]),
        )
        others = range(voters + 1, POOL + 1)
        self.cluster = Cluster(voters, others=others, config=config, seed=draw.getrandbits(32))
        self.cluster.slow_disks = set(self.cluster.nodes)
        self.lives = dict.fromkeys(self.cluster.nodes, 0)
        self.ordered = draw.random() < 0.6
        self.loss = draw.choice([0.0, 0.01, 0.1])
        self.repeats = draw.choice([0.0, 0.02, 0.1])
        self.late = draw.choice([0.0, 0.01, 0.1])
        self.churn = draw.random() < 0.6
        self.losses_of_data = draw.random() < 0.3
        self.stuck_disks: set[int] = set()
        self.io_due_ms: dict[int, int] = {}
        self.wires: list[tuple[int, int, Envelope]] = []
        """(arrival, sequence, message): what is on its way, as a heap."""
        self.sequence = 0
        self.last_arrival: dict[tuple[int, int], int] = {}
        disaster = draw.choice([0.0, 1.0, 3.0, 8.0])
        self.actions: list[tuple[Callable[[], None], float]] = [
            (self.propose, 20),
            (self.read, 3),
            (self.transfer, 0.5),
            (self.take_snapshot, 2),
            (self.change_membership, 2 if self.churn else 0),
            (self.crash, 0.5 * disaster),
            (self.start, 1.5 * disaster),
            (self.partition, 0.4 * disaster),
            (self.topple_the_leader, 0.7 * disaster),
            (self.hold_back, 0.3 * disaster),
            (self.break_stream, 0.5 * disaster),
            (self.stick_disk, 0.3 * disaster),
            (self.break_pieces, 0.2 * disaster),
            (self.lose_data, 0.5 * disaster if self.losses_of_data else 0),
            (self.rest, 60),
        ]

    def run(self) -> None:
        actions, weights = zip(*self.actions, strict=True)
        for number in range(self.steps):
            self.let_time_pass()
            self.random.choices(actions, weights)[0]()
            if number % 100 == 0:
                self.cluster.check.log_matching(self.cluster.cores().values())
        self.heal_and_demand_progress()

    def rest(self) -> None:
        """Nothing happens but time."""

    # Time, network and disks.

    def let_time_pass(self) -> None:
        cluster = self.cluster
        cluster.wait(self.random.choice([1, 1, 5, 5, 20, 80]))
        self.collect()
        while self.wires and self.wires[0][0] <= cluster.now_ms:
            _, _, envelope = heappop(self.wires)
            if (envelope.sender, envelope.to) in cluster.held:
                heappush(self.wires, (cluster.now_ms + 300, self.next_sequence(), envelope))
            else:
                cluster.deliver(envelope)
                self.collect()
        for node in list(cluster.cores()):
            if node not in self.stuck_disks and self.io_due_ms.get(node, 0) <= cluster.now_ms:
                cluster.persist(node, self.random.choice([1, 1, 3]))
                self.io_due_ms[node] = cluster.now_ms + self.random.choice([0, 3, 10, 40])
        for node, core in cluster.cores().items():
            if core.deadline_ms <= cluster.now_ms:
                cluster.tick(node)
                assert core.deadline_ms > cluster.now_ms, "it asks for a tick again and again"

    def next_sequence(self) -> int:
        self.sequence += 1
        return self.sequence

    def collect(self) -> None:
        """Give each new message its fate: lost, repeated, late, or in time."""
        draw, now_ms = self.random, self.cluster.now_ms
        for envelope in self.cluster.network:
            if draw.random() < self.loss:
                continue
            for _ in range(2 if draw.random() < self.repeats else 1):
                arrival = now_ms + draw.choice([0, 1, 2, 10])
                if draw.random() < self.late:
                    arrival += draw.randint(10, 1500)
                elif self.ordered:
                    link = (envelope.sender, envelope.to)
                    arrival = max(arrival, self.last_arrival.get(link, 0))
                    self.last_arrival[link] = arrival
                heappush(self.wires, (arrival, self.next_sequence(), envelope))
        self.cluster.network.clear()

    # Faults.

    def any_core(self) -> RaftCore | None:
        cores = list(self.cluster.cores().values())
        return self.random.choice(cores) if cores else None

    def leader_or_any(self) -> int | None:
        if self.random.random() < 0.1:
            core = self.any_core()
            return None if core is None else core.me.node
        return self.cluster.leader

    def propose(self) -> None:
        node = self.leader_or_any()
        if node is not None:
            for _ in range(self.random.choice([1, 1, 5])):
                self.cluster.propose(node, b"%d" % self.cluster.tokens + b"." * self.random.choice([0, 10, 90]))

    def read(self) -> None:
        node = self.leader_or_any()
        if node is not None:
            self.cluster.read(node)

    def transfer(self) -> None:
        node = self.leader_or_any()
        if node is not None:
            self.cluster.transfer(node, self.random.choice([None, *self.cluster.nodes]))

    def take_snapshot(self) -> None:
        core = self.any_core()
        if core is not None and self.cluster.nodes[core.me.node].applied > core.log.snapshot.offset:
            self.cluster.take_snapshot(core.me.node)

    def memberships(self) -> list[Membership]:
        """Every membership that is, or may come to be, in force anywhere: in cores, in logs on disk, in snapshots."""
        known: list[Membership] = []
        for at in self.cluster.nodes.values():
            known += [at.disk.membership, at.disk.snapshot.membership]
            known += [Membership.decode(e.data) for e in at.disk.entries if e.kind == EntryKind.MEMBERSHIP]
            if at.core is not None:
                known += [membership for _, membership in at.core.log.memberships]
        return known

    def is_mentioned(self, node: int) -> bool:
        return any(m.voter(NodeId(node)) or m.learner(NodeId(node)) for m in self.memberships())

    def change_membership(self) -> None:
        cluster = self.cluster
        node = self.leader_or_any()
        if node is None:
            return
        membership = cluster.core(node).log.membership
        other = self.random.choice(list(cluster.nodes))
        if self.random.random() < 0.55:
            is_up = other in cluster.cores()
            if is_up and self.random.random() < 0.3 and not self.is_mentioned(other):
                self.wipe(other)
            cluster.change(node, add=member(other, self.lives[other]))
        elif len(membership.voters) > 3 or not self.any_recovering():
            cluster.change(node, remove=other)

    def wipe(self, node: int) -> None:
        """A node that is no member comes back with an empty disk."""
        cluster = self.cluster
        cluster.crash(node)
        del cluster.nodes[node]
        self.lives[node] += 1
        cluster.add_node(node, Stored(Membership()), self.lives[node])

    def crash(self) -> None:
        core = self.any_core()
        if core is not None:
            node = core.me.node
            torn = self.random.choice([None, 0, 1, 3])
            self.cluster.persist(node, self.random.choice([0, 0, 1]))
            self.cluster.crash(node, torn=torn)
            if self.random.random() < 0.5:
                self.cluster.start(node)

    def start(self) -> None:
        down = [node for node, at in self.cluster.nodes.items() if at.core is None]
        if down:
            self.cluster.start(self.random.choice(down))

    def partition(self) -> None:
        cluster = self.cluster
        cluster.heal()
        kind = self.random.random()
        nodes = list(cluster.nodes)
        if kind < 0.3:
            return
        if kind < 0.6:
            cluster.cut(self.random.choice(nodes))
        elif kind < 0.8:
            cluster.cut(self.random.choice(nodes), one_way=True)
        else:
            side = [node for node in nodes if self.random.random() < 0.5]
            cluster.cuts = {(a, b) for a in nodes for b in nodes if (a in side) != (b in side)}

    def topple_the_leader(self) -> None:
        """Cut it off, or kill it: what it has just written is on a few nodes, or on none."""
        cluster = self.cluster
        leader = cluster.leader
        if leader is None:
            return
        if self.random.random() < 0.5:
            cluster.heal()
            cluster.cut(leader)
        else:
            cluster.crash(leader, torn=self.random.choice([None, 0, 1]))

    def hold_back(self) -> None:
        """Some links stand still, and what is in them arrives much later."""
        held = self.cluster.held
        if held:
            held.clear()
        else:
            nodes = list(self.cluster.nodes)
            held.update((a, b) for a in nodes for b in nodes if self.random.random() < 0.3)

    def break_stream(self) -> None:
        pair = self.random.sample(list(self.cluster.nodes), 2)
        self.collect()
        self.wires = [item for item in self.wires if not {item[2].sender, item[2].to} <= set(pair)]
        heapify(self.wires)
        self.cluster.disconnect(*pair)

    def stick_disk(self) -> None:
        if self.stuck_disks:
            self.stuck_disks.clear()
        else:
            self.stuck_disks = {self.random.choice(list(self.cluster.nodes))}

    def break_pieces(self) -> None:
        broken = self.cluster.broken_pieces
        if broken:
            broken.clear()
        else:
            broken.add(self.random.choice(list(self.cluster.nodes)))

    def any_recovering(self) -> bool:
        return any(at.disk.recovering_until is not None for at in self.cluster.nodes.values())

    def lose_data(self) -> None:
        """One voter of at least three loses synced entries; the next not before it has recovered."""
        cluster = self.cluster
        fewest = min(len(membership.voters) for membership in self.memberships() if membership.voters)
        core = self.any_core()
        if core is None or self.any_recovering() or fewest < 3:
            return
        node = core.me.node
        cluster.crash(node)
        disk = cluster.nodes[node].disk
        first = max(disk.start, disk.snapshot.id.offset)
        if first < disk.synced_end:
            disk.lose_after(Offset(self.random.randint(first, disk.synced_end - 1)))
        cluster.start(node)

    # Healing.

    def heal_and_demand_progress(self) -> None:
        cluster = self.cluster
        cluster.heal()
        cluster.network += [envelope for _, _, envelope in sorted(self.wires)]
        cluster.held.clear()
        cluster.broken_pieces.clear()
        cluster.slow_disks.clear()
        for node, at in cluster.nodes.items():
            if at.core is None:
                cluster.start(node)
            cluster.persist(node)
        cluster.run(3000)
        assert self.has_stable_leader(), "no leader within three seconds of the end of faults"
        leader = cluster.leader
        assert leader is not None
        token = cluster.propose(leader, b"last")
        read = cluster.read(leader)
        cluster.run(5000)
        assert cluster.leader is not None
        assert token in cluster.accepted, "refused, though nothing is wrong any more"
        assert cluster.is_committed(token), "not committed, though nothing is wrong any more"
        assert read in cluster.reads, "a read is not answered, though nothing is wrong any more"
        self.assert_members_agree()

    def has_stable_leader(self) -> bool:
        leader = self.cluster.leader
        return leader is not None and self.cluster.core(leader).commit == self.cluster.core(leader).log.end

    def assert_members_agree(self) -> None:
        cluster = self.cluster
        leader = cluster.leader
        assert leader is not None
        core = cluster.core(leader)
        membership = core.log.membership
        assert not [m for m in membership.learners if m.directory == cluster.nodes[m.node].me.directory], (
            "a learner that is up has become a voter"
        )
        for voter in membership.voters:
            node = cluster.nodes[voter.node]
            assert node.core is not None
            assert node.me.directory == voter.directory
            assert (node.core.log.end, node.core.commit) == (core.log.end, core.commit), f"{voter.node} is behind"
            assert node.state == cluster.nodes[leader].state, f"{voter.node} has another state"
            assert node.core.recovering_until is None, f"{voter.node} never recovered"
        cluster.check.log_matching(cluster.cores().values())


def run_seed(seed: int) -> Schedule:
    schedule = Schedule(seed)
    try:
        schedule.run()
    except BaseException as error:
        error.add_note(f"seed {seed}: RAFT_CORE_SEEDS=1 RAFT_CORE_FIRST={seed} pytest tests/property/test_raft_core.py")
        raise
    return schedule


@pytest.mark.timeout(3600)
@pytest.mark.requirement("b:E-32", "b:C-18", "a:B-60")
@pytest.mark.case("R15")
def test_safety_holds_under_any_schedule_and_progress_returns_when_faults_end() -> None:
    """Without RAFT_CORE_SEEDS as many seeds as fit into the budget, and at least ten."""
    first, wanted = int(os.environ.get("RAFT_CORE_FIRST", "1")), os.environ.get("RAFT_CORE_SEEDS")
    began = time.monotonic()
    committed = elections = count = 0
    while count < int(wanted) if wanted else count < 10 or time.monotonic() - began < BUDGET_S:
        schedule = run_seed(first + count)
        committed += len(schedule.cluster.check.committed)
        elections += len(schedule.cluster.check.leaders)
        count += 1
    # A schedule that commits nothing and elects nobody proves nothing.
    assert committed > 20 * count, f"only {committed} entries in {count} runs"
    assert elections >= count
