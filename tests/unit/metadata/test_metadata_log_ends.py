"""An unclean election elects the live replica with the best log that is known."""

from uuid import UUID

import pytest
from support.metadata.controller import Cluster

from tidelog.metadata import log_ends
from tidelog.metadata.log_ends import REPORT_AGE_MAX_MS, UNKNOWN, LogEnds
from tidelog.metadata.partitions import LOG_ENDS_PER_REQUEST_MAX, ElectLeaders, ReportLogEnds, lacks_log_ends
from tidelog.metadata.records import NO_LEADER
from tidelog.model.errors import ErrorCode

TOPIC = UUID(int=7)
ELECTION = ElectLeaders(kind="unclean", partitions=(("t", 0),))


def report(cluster: Cluster, broker: int, epoch: int, end: int) -> None:
    topic_id, broker_epoch = cluster.image.topic_ids["t"], cluster.image.brokers[broker].broker_epoch
    replicas = ((topic_id, 0, epoch, end),)
    cluster.ask(ReportLogEnds(broker=broker, broker_epoch=broker_epoch, replicas=replicas))


def leaderless(**configs: str) -> Cluster:
    """Brokers 1, 2 and 3 are live, and only broker 0, which is not, was in sync."""
    cluster = Cluster(4)
    cluster.made("t", (0, 1, 2, 3), min_insync_replicas="1", **configs)
    for broker in (1, 2, 3):
        cluster.crash(broker)
    for broker in (1, 2, 3):
        cluster.start(broker)
    return cluster


@pytest.mark.parametrize(
    ("ends", "leader"),
    [
        ({}, 1),
        ({1: (3, 10), 2: (3, 30), 3: (3, 20)}, 2),
        ({1: (3, 10), 2: (3, 30), 3: (4, 5)}, 3),  # a later epoch is better than a longer log
        ({1: (3, 10), 2: (3, 10), 3: (3, 10)}, 1),
        ({3: (-1, 0)}, 3),  # an empty log is better than one that is not known
        ({1: (3, 10), 2: (2, 99)}, 1),
    ],
)
def test_an_unclean_election_chooses_the_highest_last_epoch_and_then_the_longest_log(
    ends: dict[int, tuple[int, int]], leader: int
) -> None:
    cluster = leaderless()
    cluster.crash(0)
    assert cluster.partition("t").leader == NO_LEADER
    for broker, (epoch, end) in ends.items():
        report(cluster, broker, epoch, end)
    (outcome,) = cluster.ask(ELECTION).items
    assert outcome.error is None
    after = cluster.partition("t")
    assert (after.leader, after.isr) == (leader, (leader,))
    assert after.unclean_epoch == after.leader_epoch


def test_an_automatic_unclean_election_chooses_the_longest_log_too() -> None:
    cluster = leaderless(unclean_leader_election_enable="true")
    for broker, end in ((1, 10), (2, 30), (3, 20)):
        report(cluster, broker, 0, end)
    cluster.crash(0)
    assert cluster.partition("t").leader == 2


def test_a_clean_election_does_not_look_at_log_ends() -> None:
    cluster = Cluster(3)
    cluster.made("t", (0, 1, 2), unclean_leader_election_enable="true")
    report(cluster, 2, 9, 1000)
    cluster.crash(0)
    assert cluster.partition("t").leader == 1


def test_a_replica_that_is_not_live_is_not_elected_for_its_log() -> None:
    cluster = leaderless()
    report(cluster, 3, 9, 1000)
    cluster.crash(0)
    cluster.crash(3)
    cluster.ask(ELECTION)
    assert cluster.partition("t").leader == 1


def test_a_report_of_a_former_life_of_the_broker_does_not_count() -> None:
    cluster = leaderless()
    cluster.crash(0)
    report(cluster, 3, 9, 1000)
    former = cluster.image.brokers[3].broker_epoch
    cluster.crash(3)
    cluster.start(3)
    cluster.ask(ELECTION)
    assert cluster.partition("t").leader == 1
    rejection = cluster.refused(ReportLogEnds(broker=3, broker_epoch=former, replicas=()))
    assert rejection.code is ErrorCode.STALE_BROKER_EPOCH


def test_a_report_of_too_many_replicas_is_refused() -> None:
    cluster = Cluster(1)
    replicas = tuple((TOPIC, number, 0, 0) for number in range(LOG_ENDS_PER_REQUEST_MAX + 1))
    epoch = cluster.image.brokers[0].broker_epoch
    rejection = cluster.refused(ReportLogEnds(broker=0, broker_epoch=epoch, replicas=replicas))
    assert rejection.code is ErrorCode.INVALID_REQUEST


def test_an_election_lacks_log_ends_until_every_live_replica_has_reported() -> None:
    cluster = leaderless()
    assert not lacks_log_ends(cluster.image, ELECTION, cluster.context()), "somebody leads"
    cluster.crash(0)
    for election in (ELECTION, ElectLeaders(kind="unclean")):
        assert lacks_log_ends(cluster.image, election, cluster.context())
    assert not lacks_log_ends(cluster.image, ElectLeaders(kind="preferred"), cluster.context())
    unknown = ElectLeaders(kind="unclean", partitions=(("no such topic", 0), ("t", 9)))
    assert not lacks_log_ends(cluster.image, unknown, cluster.context())
    for broker in (1, 2, 3):
        assert lacks_log_ends(cluster.image, ELECTION, cluster.context())
        report(cluster, broker, 0, 10)
    assert not lacks_log_ends(cluster.image, ELECTION, cluster.context())


def test_reports_expire_and_are_limited_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_ends, "REPORTS_MAX", 2)
    ends = LogEnds()
    ends.report(1, 5, ((TOPIC, 0, 3, 40), (TOPIC, 1, 3, 41), (TOPIC, 2, 3, 42)), now_ms=0)
    assert len(ends) == 2
    assert ends.get(TOPIC, 0, 1, 5, now_ms=REPORT_AGE_MAX_MS) == (3, 40)
    assert ends.get(TOPIC, 0, 1, 6, now_ms=0) == UNKNOWN
    assert ends.get(TOPIC, 2, 1, 5, now_ms=0) == UNKNOWN
    assert ends.get(TOPIC, 0, 1, 5, now_ms=REPORT_AGE_MAX_MS + 1) == UNKNOWN
    ends.report(1, 5, ((TOPIC, 2, 3, 50),), now_ms=REPORT_AGE_MAX_MS + 1)
    assert ends.get(TOPIC, 2, 1, 5, now_ms=REPORT_AGE_MAX_MS + 1) == (3, 50)
    ends.clear()
    assert len(ends) == 0
