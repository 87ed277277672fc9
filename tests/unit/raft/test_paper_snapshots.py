"""Section 7 of the Raft paper: snapshots, sent in pieces, lost, repeated, broken and resumed."""

import pytest
from support.raft.core_cluster import TRANSFER_BYTES, Cluster, Envelope, Stored, data, directory, member, membership_of

from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.config import RaftConfig
from tidelog.raft.effects import HardState, Role
from tidelog.raft.leader import LeaderState
from tidelog.raft.messages import (
    SNAPSHOT_HELD,
    AppendRequest,
    SnapshotAck,
    SnapshotChunk,
    SnapshotId,
    SnapshotInstalled,
    SnapshotTaken,
)
from tidelog.raft.progress import Mode, Progress

KEEP_NOTHING = RaftConfig(kept_behind_snapshot_bytes=0)


def is_chunk(envelope: Envelope) -> bool:
    return isinstance(envelope.message, SnapshotChunk)


def is_ack(envelope: Envelope) -> bool:
    return isinstance(envelope.message, SnapshotAck)


def peer(cluster: Cluster, node: int, of: int = 1) -> Progress:
    leader_state = cluster.core(of).leader_state
    assert isinstance(leader_state, LeaderState)
    return leader_state.peers[NodeId(node)]


def lagging(entries: int = 10, *, config: RaftConfig = KEEP_NOTHING) -> Cluster:
    """Node 3 is down and lags behind a snapshot that node 1, the leader, has taken."""
    cluster = Cluster(3, config=config)
    cluster.elect(1)
    cluster.run(200)
    cluster.crash(3)
    for number in range(entries):
        cluster.propose(1, b"%d" % number)
    cluster.run(200)
    cluster.take_snapshot(1)
    cluster.network.clear()
    cluster.start(3)
    return cluster


def until_chunk(cluster: Cluster, count: int = 1) -> None:
    """Let the transfer run until `count` pieces have been on their way; the last of them is still there."""
    seen = 0
    for _ in range(200):
        if any(map(is_chunk, cluster.network)):
            seen += 1
            if seen == count:
                return
            cluster.deliver(next(filter(is_chunk, cluster.network)))
        elif not cluster.deliver_all(lambda e: not is_chunk(e), most=1000):
            cluster.wait(cluster.config.heartbeat_interval_ms)
            cluster.tick(1)
    raise AssertionError("no piece of a snapshot was sent")


def run_until_equal(cluster: Cluster) -> None:
    cluster.run(2000)
    cluster.assert_all_equal()


def test_each_server_takes_snapshots_by_itself_and_drops_the_entries_before() -> None:
    cluster = Cluster(3, config=KEEP_NOTHING)
    cluster.elect(1)
    for number in range(10):
        cluster.propose(1, b"%d" % number)
    cluster.run(200)
    taken = cluster.take_snapshot(2)
    assert taken == (11, 1)
    assert [cluster.core(node).log.start for node in (1, 2, 3)] == [0, 11, 0]
    assert cluster.nodes[2].disk.start == 11
    cluster.restart(2)
    assert cluster.core(2).commit == 11
    cluster.propose(1, b"more")
    run_until_equal(cluster)


def test_a_tail_of_entries_is_kept_behind_a_snapshot_for_followers_that_lag_a_little() -> None:
    cluster = lagging(config=RaftConfig(kept_behind_snapshot_bytes=10_000))
    assert cluster.core(1).log.start == 0
    cluster.trace.on = True
    cluster.run(500)
    assert not any("snapshot" in line for line in cluster.trace.take())
    cluster.assert_all_equal()


def test_a_snapshot_covers_committed_entries_only() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    cluster.cut(1)
    cluster.propose(1, b"x")
    with pytest.raises(AssertionError, match="committed state only"):
        cluster.step(1, SnapshotTaken(SnapshotId(Offset(2), Epoch(1))))


def test_a_snapshot_older_than_the_one_there_changes_nothing() -> None:
    cluster = Cluster(1, config=KEEP_NOTHING)
    cluster.elect(1)
    for _ in range(5):
        cluster.propose(1)
    cluster.take_snapshot(1)
    cluster.step(1, SnapshotTaken(SnapshotId(Offset(3), Epoch(1))))
    assert cluster.core(1).log.snapshot == (6, 1)


def test_a_leader_that_has_dropped_what_a_follower_needs_sends_its_snapshot() -> None:
    cluster = lagging()
    cluster.run(500)
    assert cluster.core(3).log.snapshot == (11, 1)
    assert cluster.core(3).log.start == 11
    assert cluster.nodes[3].disk.snapshot.id == (11, 1)
    cluster.propose(1, b"after")
    run_until_equal(cluster)


def test_a_snapshot_brings_the_membership_of_its_offset() -> None:
    cluster = Cluster(3, others=(4,), config=KEEP_NOTHING)
    cluster.elect(1)
    cluster.run(200)
    cluster.crash(3)
    cluster.change(1, add=member(4))
    cluster.run(1000)
    assert len(cluster.core(1).log.membership.voters) == 4
    cluster.take_snapshot(1)
    cluster.propose(1, b"after")
    cluster.start(3)
    cluster.run(1000)
    assert cluster.core(3).log.start > 0
    assert [m.node for m in cluster.core(3).log.membership.voters] == [1, 2, 3, 4]
    cluster.restart(3)
    assert [m.node for m in cluster.core(3).log.membership.voters] == [1, 2, 3, 4]
    run_until_equal(cluster)


def test_a_new_server_is_brought_up_with_a_snapshot_and_then_entries() -> None:
    cluster = Cluster(3, others=(4,), config=KEEP_NOTHING)
    cluster.elect(1)
    for number in range(30):
        cluster.propose(1, b"%d" % number)
    cluster.run(200)
    cluster.take_snapshot(1)
    cluster.propose(1, b"after")
    token = cluster.change(1, add=member(4))
    cluster.run(2000)
    assert cluster.is_committed(token)
    assert cluster.core(4).log.snapshot.offset == 31
    cluster.assert_all_equal()


def test_pieces_are_sent_one_after_the_other_and_each_keeps_the_follower_from_campaigning() -> None:
    cluster = lagging()
    positions = []
    cluster.cut(2)
    cluster.held = {(1, 2)}
    for number in range(1, 6):
        until_chunk(cluster)
        (piece,) = filter(is_chunk, cluster.network)
        assert isinstance(piece.message, SnapshotChunk)
        positions.append(piece.message.position)
        cluster.take(lambda e: isinstance(e.message, AppendRequest))
        cluster.wait(cluster.config.election_timeout_min_ms - 1)
        before = cluster.core(3).deadline_ms
        cluster.deliver(piece)
        assert cluster.core(3).deadline_ms >= before, number
        assert cluster.core(3).role is Role.FOLLOWER
    assert positions == [TRANSFER_BYTES * n for n in range(5)]


@pytest.mark.parametrize("lost", [1, 2, 5], ids=["first", "middle", "last"])
def test_a_lost_piece_is_sent_again(lost: int) -> None:
    cluster = lagging()
    until_chunk(cluster, lost)
    assert len(cluster.take(is_chunk)) == 1
    run_until_equal(cluster)


@pytest.mark.parametrize("lost", [1, 2, 5], ids=["first", "middle", "last"])
def test_a_lost_answer_is_asked_for_again(lost: int) -> None:
    cluster = lagging()
    until_chunk(cluster, lost)
    cluster.deliver(next(filter(is_chunk, cluster.network)))
    assert len(cluster.take(is_ack)) == 1
    run_until_equal(cluster)


def test_repeated_pieces_and_answers_are_harmless_and_do_not_multiply() -> None:
    cluster = lagging()
    sent = 0
    for _ in range(400):
        if not cluster.network:
            break
        envelope = cluster.network[0]
        cluster.deliver(envelope)
        if is_chunk(envelope) or is_ack(envelope):
            sent += 1
            if sent <= 4:
                cluster.network.append(envelope)
                cluster.network.append(envelope)
    assert sent < 40, "every answer to a repeated piece must not bring a new one"
    run_until_equal(cluster)


def test_an_old_piece_that_arrives_late_is_answered_with_what_is_wanted() -> None:
    cluster = lagging()
    until_chunk(cluster, 1)
    (first,) = filter(is_chunk, cluster.network)
    until_chunk(cluster, 3)
    cluster.take(lambda _: True)
    cluster.deliver(first)
    answers = [e.message.wanted for e in cluster.network if isinstance(e.message, SnapshotAck)]
    assert answers == [2 * TRANSFER_BYTES]
    run_until_equal(cluster)
    cluster.deliver(first)
    answers = [e.message.wanted for e in cluster.network if isinstance(e.message, SnapshotAck)]
    assert answers == [SNAPSHOT_HELD]


def test_a_piece_that_arrives_while_the_one_before_is_being_written_waits_for_its_turn() -> None:
    cluster = lagging()
    until_chunk(cluster, 2)
    cluster.slow_disks = {3}
    (piece,) = filter(is_chunk, cluster.network)
    cluster.deliver(piece)
    cluster.deliver(piece)
    assert len(cluster.nodes[3].snapshot_writes) == 1, "one write at a time"
    cluster.slow_disks.clear()
    cluster.persist(3)
    run_until_equal(cluster)


def test_a_transfer_is_resumed_after_a_broken_stream() -> None:
    cluster = lagging()
    until_chunk(cluster, 4)
    cluster.disconnect(1, 3)
    cluster.trace.on = True
    cluster.run(1000)
    lines = [line for line in cluster.trace.take() if line.startswith("1 -> 3 snapshot")]
    assert not any(" 0.." in line for line in lines), "it does not begin again"
    cluster.assert_all_equal()


def test_a_transfer_is_resumed_by_the_next_leader_that_has_the_same_snapshot() -> None:
    cluster = lagging()
    cluster.take_snapshot(2)
    assert cluster.core(1).log.snapshot == cluster.core(2).log.snapshot
    until_chunk(cluster, 4)
    cluster.crash(1)
    cluster.network.clear()
    cluster.trace.on = True
    cluster.run_until(lambda: cluster.leader == 2)
    cluster.run(1500)
    lines = [line for line in cluster.trace.take() if line.startswith("2 -> 3 snapshot")]
    assert len(lines) <= 3, "one piece from the beginning, then from where it was"
    cluster.start(1)
    run_until_equal(cluster)


def test_a_newer_snapshot_takes_the_place_of_the_one_under_way() -> None:
    cluster = lagging()
    until_chunk(cluster, 2)
    cluster.propose(1, b"more")
    cluster.deliver_all(lambda e: e.to == 2 or e.sender == 2)
    newer = cluster.take_snapshot(1)
    run_until_equal(cluster)
    assert cluster.core(3).log.snapshot == newer


def test_a_snapshot_that_arrives_late_does_not_disturb_the_newer_one_under_way() -> None:
    cluster = lagging()
    until_chunk(cluster, 2)
    cluster.deliver_all(lambda e: e.to != 3)
    core = cluster.core(3)
    incoming = core._incoming
    assert incoming is not None
    cluster.nodes[3].disk.install(cluster.nodes[1].disk.snapshots[Offset(0)])
    cluster.step(3, SnapshotInstalled(SnapshotId(Offset(0), Epoch(0)), membership_of(1, 2, 3)))
    assert core._incoming == incoming
    run_until_equal(cluster)


@pytest.mark.case("R19")
def test_a_snapshot_with_a_wrong_crc_starts_again_from_zero_and_nothing_is_deleted() -> None:
    cluster = lagging()
    before = (cluster.log_of(3), cluster.core(3).commit, list(cluster.nodes[3].disk.entries))
    cluster.broken_pieces = {3}
    cluster.trace.on = True
    cluster.run(3000)
    lines = [line for line in cluster.trace.take() if line.startswith("1 -> 3 snapshot") and " 0.." in line]
    assert 2 <= len(lines) <= 10, "again from the beginning, and not without a pause"
    assert (cluster.log_of(3), cluster.core(3).commit, cluster.nodes[3].disk.entries) == before
    assert cluster.nodes[3].disk.snapshot.id.offset == 0
    assert set(cluster.check.leaders) == {1}, "and the leader is not disturbed"
    cluster.broken_pieces.clear()
    run_until_equal(cluster)


def test_a_snapshot_that_contradicts_the_log_replaces_all_of_it() -> None:
    cluster = lagging()
    cluster.crash(3)
    disk = cluster.nodes[3].disk
    disk.hard_state = HardState(Epoch(2), None)
    disk.entries = [*disk.entries[:1], *(data(2, "never committed") for _ in range(12))]
    cluster.start(3)
    assert cluster.core(3).log.end == 13
    cluster.run(5000)
    assert cluster.core(3).log.start == 11
    assert cluster.nodes[3].disk.start == 11
    assert all(entry.data != b"never committed" for entry in cluster.log_of(3))
    run_until_equal(cluster)


def test_a_snapshot_of_what_the_log_holds_keeps_the_entries_after_it() -> None:
    disk = Stored(membership_of(1, 2, 3))
    disk.entries = [data(1, str(n)) for n in range(8)]
    disk.hard_state = HardState(Epoch(1), None)
    cluster = Cluster(3, disks={2: disk})
    for entry in disk.entries[:5]:
        cluster.check.on_committed(Offset(len(cluster.check.committed)), [entry], Epoch(1))
    snapshot = SnapshotId(Offset(5), Epoch(1))
    taken = type(disk.snapshot)(snapshot, membership_of(1, 2, 3), cluster.check.states[5])
    disk.install(taken)
    cluster.step(2, SnapshotInstalled(snapshot, membership_of(1, 2, 3)))
    core = cluster.core(2)
    assert (core.log.end, core.commit, core.log.snapshot) == (8, 5, snapshot)


def test_a_crash_between_the_installation_and_the_reset_of_the_log_loses_nothing() -> None:
    cluster = lagging()
    until_chunk(cluster, 5)
    cluster.slow_disks = {3}
    cluster.deliver_all(is_chunk)
    cluster.persist(3, 1)
    assert cluster.nodes[3].disk.snapshot.id == (11, 1)
    assert cluster.nodes[3].disk.start == 0, "the log still is the old one"
    cluster.crash(3)
    cluster.slow_disks.clear()
    cluster.start(3)
    assert (cluster.core(3).log.start, cluster.core(3).commit) == (11, 11)
    run_until_equal(cluster)


def test_a_snapshot_that_is_whole_only_after_the_node_was_elected_is_not_loaded() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    cluster.cut(1)
    for _ in range(3):
        cluster.propose(1, b"x")
    core = cluster.core(1)
    assert (core.commit, core.log.end) == (1, 4)
    cluster.step(1, SnapshotInstalled(SnapshotId(Offset(3), Epoch(1)), membership_of(1, 2, 3)))
    assert core.commit == 1, "a leader commits by counting"
    core.validate()


def test_a_leader_learns_from_an_answer_of_a_newer_epoch_and_ignores_those_of_other_directories() -> None:
    cluster = lagging()
    until_chunk(cluster, 2)
    snapshot = cluster.core(1).log.snapshot
    before = peer(cluster, 3).position
    cluster.step(1, SnapshotAck(Epoch(1), NodeId(3), directory(3, 1), snapshot, SNAPSHOT_HELD))
    assert (peer(cluster, 3).mode, peer(cluster, 3).position) == (Mode.SNAPSHOT, before)
    cluster.step(1, SnapshotAck(Epoch(7), NodeId(3), directory(3), snapshot, 0))
    assert (cluster.core(1).role, cluster.core(1).epoch) == (Role.FOLLOWER, 7)


def test_a_piece_of_an_old_leader_is_refused() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    cluster.step(2, SnapshotChunk(Epoch(0), NodeId(3), SnapshotId(Offset(9), Epoch(0)), 0, b"x", 1))
    (answer,) = (e.message for e in cluster.network if isinstance(e.message, SnapshotAck))
    assert answer.epoch == 1
    assert cluster.core(2).leader == 1
