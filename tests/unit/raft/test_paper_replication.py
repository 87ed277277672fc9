"""Sections 5.3, 5.4.2 and 5.5 of the Raft paper, with figures 7 and 8: how logs are brought into line, what commits."""

import pytest
from support.raft.core_cluster import Cluster, Stored, data, directory, membership_of

from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.config import RaftConfig
from tidelog.raft.effects import HardState, Rejection, Role
from tidelog.raft.leader import LeaderState
from tidelog.raft.messages import AppendRequest, AppendResponse, EntryKind
from tidelog.raft.progress import Mode

ONE_AT_A_TIME = RaftConfig(append_bytes_max=1)


def disk_with(epochs: list[int], *, voters: int, epoch: int | None = None) -> Stored:
    disk = Stored(membership_of(*range(1, voters + 1)))
    disk.entries = [data(e, f"{e}.{i}") for i, e in enumerate(epochs)]
    disk.hard_state = HardState(Epoch(max([*epochs, 0]) if epoch is None else epoch), None)
    return disk


def epochs_of(cluster: Cluster, node: int) -> list[int]:
    return [entry.epoch for entry in cluster.log_of(node)]


def leadership(cluster: Cluster, node: int) -> LeaderState:
    leader_state = cluster.core(node).leader_state
    assert leader_state is not None
    return leader_state


# 5.3


@pytest.mark.requirement("a:B-61", "b:E-30")
def test_a_proposal_is_appended_by_the_leader_and_sent_to_all_others_in_parallel() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    token = cluster.propose(1, b"x")
    assert cluster.accepted[token] == (1, 1)
    appends = [(e.to, e.message.entries) for e in cluster.network if isinstance(e.message, AppendRequest)]
    assert appends == [(2, (data(1, "x"),)), (3, (data(1, "x"),))]


def test_only_the_leader_takes_proposals() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    token = cluster.propose(2, b"x")
    assert cluster.rejected[token] is Rejection.NOT_LEADER


@pytest.mark.requirement("b:E-30", "b:C-18")
def test_an_entry_commits_when_a_majority_holds_it_and_not_before() -> None:
    cluster = Cluster(5)
    cluster.elect(1)
    cluster.run(200)
    token = cluster.propose(1, b"x")
    cluster.deliver_all(lambda e: e.to in (1, 2))
    assert not cluster.is_committed(token)
    cluster.deliver_all(lambda e: e.to in (1, 3))
    assert cluster.is_committed(token)


def test_a_leader_counts_itself_only_for_what_it_has_synced() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    cluster.slow_disks = {1}
    cluster.cut(1, 3)
    token = cluster.propose(1, b"x")
    cluster.deliver_all()
    assert leadership(cluster, 1).peers[NodeId(2)].match == 2, "it replicates while it writes"
    assert not cluster.is_committed(token)
    cluster.persist(1)
    assert cluster.is_committed(token)


def test_an_entry_commits_without_the_leaders_disk_if_a_majority_of_others_has_synced_it() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    cluster.slow_disks = {1}
    token = cluster.propose(1, b"x")
    cluster.deliver_all()
    assert cluster.is_committed(token)
    assert cluster.core(1).durable_end == 1


def test_a_follower_acknowledges_only_what_it_has_synced() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    cluster.slow_disks = {2, 3}
    token = cluster.propose(1, b"x")
    cluster.deliver_all()
    cluster.run(300)
    assert not cluster.is_committed(token), "heartbeats acknowledge no more than the disk has"
    cluster.persist(3)
    cluster.deliver_all()
    assert cluster.is_committed(token)


def test_the_leader_tells_what_is_committed_and_followers_apply_it_in_log_order() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    for number in range(10):
        cluster.propose(1, b"%d" % number)
    cluster.deliver_all()
    assert cluster.core(2).commit < 11
    cluster.run(150)
    assert [core.commit for core in cluster.cores().values()] == [11, 11, 11]
    assert [e.data for e in cluster.check.committed[1:]] == [b"%d" % number for number in range(10)]
    cluster.assert_all_equal()


def test_committing_an_entry_commits_all_before_it_also_those_of_earlier_leaders() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    cluster.run(200)
    cluster.cut(3)
    cluster.propose(1, b"of one")
    cluster.deliver_all(lambda e: e.to != 1)
    cluster.crash(1)
    cluster.network.clear()
    cluster.heal()
    cluster.elect(2)
    assert epochs_of(cluster, 2) == [1, 1, 2]
    assert cluster.core(2).commit == 3
    assert cluster.check.committed[1].data == b"of one"


def test_the_leader_repeats_appends_until_all_followers_have_everything() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    cluster.crash(3)
    for number in range(20):
        cluster.propose(1, b"%d" % number)
        cluster.run(300)
    assert len(cluster.check.committed) == 21, "a slow follower does not hold up the rest"
    cluster.start(3)
    cluster.run(300)
    cluster.assert_all_equal()


def test_an_append_that_does_not_follow_on_is_rejected_with_where_the_log_ends() -> None:
    cluster = Cluster(3, disks={2: disk_with([1, 1, 2], voters=3)})
    cluster.step(2, AppendRequest(Epoch(3), NodeId(1), Offset(5), Epoch(2), (), Offset(0), 0))
    cluster.step(2, AppendRequest(Epoch(3), NodeId(1), Offset(3), Epoch(3), (), Offset(0), 0))
    answers = [e.message for e in cluster.network if isinstance(e.message, AppendResponse)]
    assert [(a.rejected, a.match, a.hint_epoch, a.hint_end) for a in answers] == [(True, 5, 2, 3), (True, 3, 2, 3)]


def test_a_leader_never_changes_its_own_entries() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    cluster.cut(1)
    for _ in range(5):
        cluster.propose(1, b"x")
        before = cluster.log_of(1)
        cluster.run(100)
        assert cluster.log_of(1)[: len(before)] == before
    assert cluster.core(1).role is Role.LEADER


FIGURE_7 = {
    "a": [1, 1, 1, 4, 4, 5, 5, 6, 6],
    "b": [1, 1, 1, 4],
    "c": [1, 1, 1, 4, 4, 5, 5, 6, 6, 6, 6],
    "d": [1, 1, 1, 4, 4, 5, 5, 6, 6, 6, 7, 7],
    "e": [1, 1, 1, 4, 4, 4, 4],
    "f": [1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3],
}
FIGURE_7_LEADER = [1, 1, 1, 4, 4, 5, 5, 6, 6, 6]


def figure_7() -> Cluster:
    disks = {
        node: disk_with(epochs, voters=7, epoch=7)
        for node, epochs in enumerate([FIGURE_7_LEADER, *FIGURE_7.values()], 1)
    }
    return Cluster(7, disks=disks)


@pytest.mark.parametrize("follower", list(FIGURE_7))
def test_figure_7_a_follower_with_missing_or_extra_entries_is_brought_into_line(follower: str) -> None:
    cluster = figure_7()
    cluster.elect(1)
    cluster.run(300)
    node = 2 + list(FIGURE_7).index(follower)
    assert epochs_of(cluster, node) == [*FIGURE_7_LEADER, 8]
    assert cluster.log_of(node) == cluster.log_of(1)
    assert cluster.nodes[node].disk.entries == cluster.log_of(1), "on disk as well"
    assert cluster.core(node).commit == 11


@pytest.mark.parametrize(
    ("follower", "rejections"), [("a", 1), ("b", 1), ("c", 0), ("d", 0), ("e", 1), ("f", 1)], ids=list(FIGURE_7)
)
def test_a_conflict_costs_one_round_trip_an_epoch_and_not_one_an_entry(follower: str, rejections: int) -> None:
    cluster = figure_7()
    node = 2 + list(FIGURE_7).index(follower)
    cluster.wait(2000)
    cluster.tick(1)
    cluster.held = {(n, 1) for n in range(2, 8)}
    seen = 0
    while cluster.network:
        envelope = cluster.network[0]
        message = envelope.message
        seen += envelope.sender == node and isinstance(message, AppendResponse) and message.rejected
        cluster.deliver(envelope)
    assert cluster.log_of(node) == cluster.log_of(1)
    assert seen == rejections


def test_a_log_that_differs_in_many_epochs_is_backed_up_an_epoch_at_a_time() -> None:
    mine = [1] * 10 + [3] * 10 + [5] * 10 + [7] * 10
    theirs = [1] * 10 + [2] * 10 + [4] * 10 + [6] * 30
    cluster = Cluster(3, disks={1: disk_with(mine, voters=3), 2: disk_with(theirs, voters=3, epoch=7)})
    cluster.crash(3)
    cluster.wait(2000)
    cluster.tick(1)
    rejections = 0
    while cluster.network:
        envelope = cluster.network[0]
        rejections += isinstance(envelope.message, AppendResponse) and envelope.message.rejected
        cluster.deliver(envelope)
    assert cluster.log_of(2) == cluster.log_of(1)
    assert rejections <= 4


def test_a_stale_append_neither_shortens_a_log_nor_changes_it() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    cluster.cut(1, 3)
    old = [cluster.propose(1, b"%d" % n) for n in range(3)]
    early = [e for e in cluster.network if e.to == 2]
    cluster.deliver_all()
    before = cluster.log_of(2)
    for envelope in reversed(early):
        cluster.deliver(envelope)
    assert cluster.log_of(2) == before
    assert all(map(cluster.is_committed, old))


def test_appends_may_arrive_in_any_order_and_more_than_once() -> None:
    cluster = Cluster(3, config=ONE_AT_A_TIME)
    cluster.elect(1)
    cluster.run(200)
    tokens = [cluster.propose(1, b"%d" % n) for n in range(8)]
    appends = cluster.take(lambda e: isinstance(e.message, AppendRequest))
    for envelope in [*reversed(appends), *appends]:
        cluster.deliver(envelope)
    cluster.run(300)
    assert all(map(cluster.is_committed, tokens))
    cluster.assert_all_equal()


# 5.4.2


def figure_8() -> Cluster:
    """Figure 8 (c) before it begins: S1 and S2 hold an entry of epoch 2, S5 another of epoch 3 at the same offset."""
    logs = [[1, 2], [1, 2], [1], [1], [1, 3]]
    disks = {node: disk_with(epochs, voters=5, epoch=3) for node, epochs in enumerate(logs, 1)}
    cluster = Cluster(5, disks=disks, config=ONE_AT_A_TIME)
    cluster.crash(5)
    cluster.wait(2000)
    cluster.tick(1)
    cluster.deliver_all(lambda e: not isinstance(e.message, AppendRequest))
    assert (cluster.leader, cluster.core(1).epoch) == (1, 4)
    return cluster


def replicate_up_to(cluster: Cluster, node: int, end: int) -> None:
    """Let node 1 replicate to `node` until that holds `end` entries, and no further."""
    peer = leadership(cluster, 1).peers[NodeId(node)]
    for _ in range(4):
        cluster.wait(cluster.config.heartbeat_interval_ms)
        cluster.tick(1)
        cluster.deliver_all(
            lambda e: (e.to == node and e.sender == 1 and _fits(e.message, end)) or (e.sender == node and e.to == 1)
        )
        cluster.network.clear()
    assert peer.match == end


def _fits(message: object, end: int) -> bool:
    return isinstance(message, AppendRequest) and message.prev_offset + len(message.entries) <= end


def test_figure_8_an_entry_of_an_older_epoch_is_not_committed_by_counting_and_may_be_overwritten() -> None:
    cluster = figure_8()
    replicate_up_to(cluster, 2, 2)
    replicate_up_to(cluster, 3, 2)
    leader_state = leadership(cluster, 1)
    assert [leader_state.peers[NodeId(node)].match for node in (2, 3)] == [2, 2], (
        "the entry of epoch 2 is on a majority"
    )
    assert cluster.core(1).commit == 0, "and still not committed"
    # (d): S1 crashes, S5 wins and overwrites it everywhere.
    cluster.crash(1)
    cluster.network.clear()
    cluster.start(5)
    cluster.wait(5000)
    cluster.tick(5)
    cluster.deliver_all()  # it learns the epoch of the others
    cluster.elect(5)
    cluster.run(300)
    assert epochs_of(cluster, 2)[:2] == [1, 3]
    assert epochs_of(cluster, 3)[:2] == [1, 3]


def test_figure_8_an_entry_of_the_own_epoch_on_a_majority_commits_everything_before_it() -> None:
    cluster = figure_8()
    cluster.deliver_all(lambda e: {e.sender, e.to} <= {1, 2, 3})
    cluster.run_until(lambda: cluster.core(1).commit == 3, 300)
    # (e): S5 cannot win any more.
    cluster.crash(1)
    cluster.network.clear()
    cluster.start(5)
    cluster.now_ms = cluster.core(5).deadline_ms + 5000
    for _ in range(3):
        cluster.wait(1000)
        cluster.tick(5)
        cluster.deliver_all()
        assert cluster.leader != 5
    cluster.run_until(lambda: cluster.leader in (2, 3))
    assert epochs_of(cluster, cluster.leader or 0)[:3] == [1, 2, 4]


# 5.5


def test_a_repeated_append_has_no_further_effect() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    cluster.propose(1, b"x")
    (append,) = [e for e in cluster.network if e.to == 2]
    cluster.deliver_all()
    persists = cluster.core(2)._persist_number
    for _ in range(3):
        cluster.deliver(append)
    assert cluster.core(2)._persist_number == persists
    assert len(cluster.log_of(2)) == 2


def test_a_follower_that_crashes_before_it_answers_gets_the_append_again() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    cluster.cut(1, 3)
    token = cluster.propose(1, b"x")
    cluster.slow_disks = {2}
    cluster.deliver_all()
    cluster.crash(2)
    cluster.slow_disks.clear()
    cluster.start(2)
    cluster.run(300)
    assert cluster.is_committed(token)


# Pipelining and flow control.


def test_appends_are_pipelined_without_waiting_for_answers() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    for number in range(10):
        cluster.propose(1, b"%d" % number)
    assert len([e for e in cluster.network if e.to == 2]) == 10


@pytest.mark.parametrize(
    ("config", "most_messages", "most_bytes"),
    [
        (RaftConfig(inflight_messages_max=4), 4, 1 << 40),
        (RaftConfig(inflight_bytes_max=1000, append_bytes_max=300), 1 << 40, 1300),
    ],
    ids=["messages", "bytes"],
)
def test_what_is_in_flight_to_a_silent_follower_is_bounded(
    config: RaftConfig, most_messages: int, most_bytes: int
) -> None:
    cluster = Cluster(3, config=config)
    cluster.elect(1)
    cluster.held = {(1, 2)}
    tokens = []
    for _ in range(100):
        tokens.append(cluster.propose(1, b"x" * 100))
        cluster.deliver_all()
    sent = [e.message for e in cluster.network if e.to == 2 and isinstance(e.message, AppendRequest)]
    assert 1 < len(sent) <= most_messages
    assert sum(len(entry.data) + 32 for message in sent for entry in message.entries) <= most_bytes
    assert all(map(cluster.is_committed, tokens)), "the others are not held up"
    cluster.held.clear()
    cluster.run(500)
    cluster.assert_all_equal()


def test_uncommitted_bytes_are_bounded_and_counted_over_changes_of_leader() -> None:
    cluster = Cluster(3, config=RaftConfig(uncommitted_bytes_max=1000))
    cluster.elect(1)
    cluster.deliver_all()
    cluster.cut(1)
    tokens = [cluster.propose(1, b"x" * 100) for _ in range(20)]
    taken = [token for token in tokens if token in cluster.accepted]
    assert 5 <= len(taken) < 10
    assert {cluster.rejected[token] for token in tokens[len(taken) :]} == {Rejection.OVERLOADED}
    cluster.heal()
    cluster.deliver_all()
    cluster.run(300)
    assert all(map(cluster.is_committed, taken))
    assert leadership(cluster, 1).uncommitted_bytes == 0
    assert cluster.propose(1, b"x" * 100) in cluster.accepted
    # A new leader counts what it finds, and validate() compares after every step.
    cluster.crash(1)
    cluster.run_until(lambda: cluster.leader is not None)
    cluster.run(200)
    assert leadership(cluster, cluster.leader or 0).uncommitted_bytes == 0


def test_a_lost_append_is_found_by_the_next_heartbeat() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    cluster.run(200)
    token = cluster.propose(1, b"x")
    assert len(cluster.take(lambda e: isinstance(e.message, AppendRequest))) == 2
    cluster.run(cluster.config.heartbeat_interval_ms * 2)
    assert cluster.is_committed(token)


def test_a_broken_stream_makes_the_leader_probe_before_it_pipelines_again() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    cluster.run(200)
    for _ in range(5):
        cluster.propose(1, b"x")
    cluster.disconnect(1, 2)
    assert leadership(cluster, 1).peers[NodeId(2)].mode is Mode.PROBE
    cluster.run(300)
    assert leadership(cluster, 1).peers[NodeId(2)].mode is Mode.REPLICATE
    cluster.assert_all_equal()


def test_a_stale_rejection_changes_nothing() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    for _ in range(5):
        cluster.propose(1, b"x")
    cluster.deliver_all()
    peer = leadership(cluster, 1).peers[NodeId(2)]
    before = (peer.mode, peer.match, peer.next)
    cluster.step(
        1,
        AppendResponse(Epoch(1), NodeId(2), directory(2), Offset(3), True, Epoch(0), Offset(0), 0, True),
    )
    assert (peer.mode, peer.match, peer.next) == before


def test_a_truncation_overtakes_the_persists_of_what_it_cuts() -> None:
    """Entries whose write is under way are cut: when that write is done, they are not taken for durable."""
    cluster = Cluster(3, disks={2: disk_with([1], voters=3)})
    cluster.slow_disks = {2}

    def append(epoch: int, sender: int, *entries: tuple[int, str]) -> AppendRequest:
        made = tuple(data(e, text) for e, text in entries)
        return AppendRequest(Epoch(epoch), NodeId(sender), Offset(1), Epoch(1), made, Offset(0), 0)

    cluster.step(2, append(2, 1, (2, "a"), (2, "b"), (2, "c")))
    cluster.step(2, append(3, 3, (3, "z")))
    core = cluster.core(2)
    assert (core.log.end, core.durable_end) == (2, 1)
    cluster.persist(2, 1)
    assert core.durable_end == 1, "what was written is not what the log says now"
    assert cluster.nodes[2].disk.end == 4
    cluster.persist(2, 1)
    assert core.durable_end == 2
    assert cluster.nodes[2].disk.entries == cluster.log_of(2)
    acks = [e.message for e in cluster.network if isinstance(e.message, AppendResponse) and not e.message.rejected]
    assert [(ack.epoch, ack.match) for ack in acks] == [(3, 2)]


def test_the_first_entry_of_an_epoch_is_a_no_op() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    assert [entry.kind for entry in cluster.log_of(1)] == [EntryKind.NO_OP]
    assert cluster.check.committed == cluster.log_of(1)


def test_an_old_ack_does_not_make_a_probing_leader_send_its_whole_window_again() -> None:
    cluster = Cluster(3)
    cluster.elect(1)
    cluster.run(200)
    for _ in range(5):
        cluster.propose(1, b"x")
    cluster.deliver_all(lambda e: e.to == 2)
    (old, *_) = [e for e in cluster.network if e.sender == 2]
    cluster.network.clear()
    cluster.disconnect(1, 2)
    peer = leadership(cluster, 1).peers[NodeId(2)]
    assert (peer.mode, peer.match, peer.next) == (Mode.PROBE, 1, 6)
    cluster.deliver(old)
    assert (peer.mode, peer.match, peer.next) == (Mode.PROBE, 2, 6), "it proves nothing about offset 6"
    assert [e for e in cluster.network if e.to == 2] == []
    cluster.run(200)
    cluster.assert_all_equal()
