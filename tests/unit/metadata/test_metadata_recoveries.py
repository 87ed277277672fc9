"""A broker that registers before its logs are open: what it could be elected for waits until it has said more."""

from typing import Any
from uuid import UUID

import pytest
from support.metadata.controller import Cluster

from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.lost_replicas import ReplicasLost
from tidelog.metadata.partitions import ElectLeaders, ElectMissingLeaders
from tidelog.metadata.queries import DescribeTopics
from tidelog.metadata.reassignments import AlterReassignments, ReassignmentTarget
from tidelog.metadata.records import NO_LEADER
from tidelog.metadata.recovering_replicas import ReplicasRecovered
from tidelog.metadata.snapshot import decode_snapshot, snapshot_bytes
from tidelog.model.errors import ErrorCode, StaleBrokerEpochError


def dark(brokers: int = 3, **configs: str) -> tuple[Cluster, UUID]:
    """A topic on all brokers, which have all gone, 0 first."""
    cluster = Cluster(brokers)
    topic_id = cluster.made("t", tuple(range(brokers)), **configs)
    for broker in range(brokers):
        cluster.crash(broker)
    return cluster, topic_id


def back(cluster: Cluster, broker: int, **more: Any) -> None:
    cluster.start(broker, clean_stop_epoch=-1, **{"is_recovering": True, **more})


def opened(cluster: Cluster, broker: int, *replicas: tuple[UUID, int]) -> Any:
    epoch = cluster.image.brokers[broker].broker_epoch
    return cluster.ask(ReplicasRecovered(broker=broker, broker_epoch=epoch, replicas=replicas))


def lost(cluster: Cluster, broker: int, *replicas: tuple[UUID, int]) -> None:
    epoch = cluster.image.brokers[broker].broker_epoch
    cluster.ask(ReplicasLost(broker=broker, broker_epoch=epoch, replicas=replicas))


def test_an_eligible_replica_whose_log_is_not_open_is_let_in_and_leads_when_it_is() -> None:
    cluster, topic_id = dark()
    back(cluster, 2)
    assert not cluster.image.brokers[2].fenced
    before = cluster.partition("t")
    assert (before.leader, before.isr, before.eligible, before.recovering) == (NO_LEADER, (), (1, 2), (2,))
    cluster.ask(ElectMissingLeaders())
    assert cluster.partition("t").leader == NO_LEADER
    opened(cluster, 2, (topic_id, 0))
    after = cluster.partition("t")
    assert (after.leader, after.isr, after.recovering) == (2, (2,), ())
    assert after.leader_epoch > before.leader_epoch


def test_another_eligible_one_whose_log_is_open_leads_meanwhile() -> None:
    cluster, topic_id = dark()
    back(cluster, 2)
    back(cluster, 1, is_recovering=False)
    assert (cluster.partition("t").leader, cluster.partition("t").recovering) == (1, (2,))
    opened(cluster, 2, (topic_id, 0))
    now = cluster.partition("t")
    assert (now.leader, now.eligible, now.recovering) == (1, (2,), ()), "nobody is put out by who comes later"


def test_a_damaged_one_leaves_and_the_others_stay_eligible_even_if_one_in_sync_is_enough_by_then() -> None:
    cluster, topic_id = dark()
    change = ConfigChange(key="min.insync.replicas", operation="set", value="1")
    back(cluster, 2)
    cluster.ask(AlterConfigs(resources=(ResourceChange(resource_type="topic", resource="t", changes=(change,)),)))
    lost(cluster, 2, (topic_id, 0))
    now = cluster.partition("t")
    assert (now.leader, now.isr, now.eligible, now.recovering) == (NO_LEADER, (), (1,), ())
    back(cluster, 1, is_recovering=False)
    assert cluster.partition("t").leader == 1


def test_a_reassignment_to_it_alone_is_not_complete_before_its_log_is_open() -> None:
    cluster, topic_id = dark()
    back(cluster, 2)
    cluster.ask(AlterReassignments(partitions=(ReassignmentTarget(topic="t", partition=0, replicas=(2,)),)))
    assert set(cluster.partition("t").replicas) == {0, 1, 2}
    assert cluster.partition("t").recovering == (2,)
    opened(cluster, 2, (topic_id, 0))
    assert cluster.propose("t", (2,)).error is None


def test_what_cannot_be_elected_is_not_marked() -> None:
    cluster = Cluster(3)
    cluster.made("t", (0, 1, 2))
    cluster.crash(2)
    before = cluster.partition("t")
    back(cluster, 2)
    assert cluster.partition("t") == before, "not in sync and not eligible: only a leader takes it back"
    assert cluster.propose("t", (0, 1, 2)).error is None


def test_the_marks_of_a_former_life_are_over() -> None:
    cluster, topic_id = dark()
    back(cluster, 2)
    cluster.crash(2)
    assert cluster.partition("t").recovering == (2,)
    former = cluster.image.brokers[2].broker_epoch
    back(cluster, 2, is_recovering=False)
    assert (cluster.partition("t").leader, cluster.partition("t").recovering) == (2, ())
    cluster.crash(2)
    back(cluster, 2)
    rejection = cluster.refused(ReplicasRecovered(broker=2, broker_epoch=former, replicas=((topic_id, 0),)))
    assert isinstance(rejection, StaleBrokerEpochError)
    assert cluster.partition("t").recovering == (2,)


def test_a_replica_that_is_marked_stays_so_over_a_fence_and_a_snapshot() -> None:
    cluster, _ = dark()
    back(cluster, 2)
    cluster.crash(2)
    assert not cluster.beat(2).is_fenced
    assert (cluster.partition("t").leader, cluster.partition("t").recovering) == (NO_LEADER, (2,))
    assert decode_snapshot(snapshot_bytes(cluster.image)).image == cluster.image


def test_an_unclean_election_chooses_a_replica_that_is_open_or_has_reported_its_loss() -> None:
    cluster, topic_id = dark(unclean_leader_election_enable="true")
    assert cluster.partition("t").eligible == (1, 2)
    back(cluster, 0)
    assert (cluster.partition("t").leader, cluster.partition("t").recovering) == (NO_LEADER, (0,))
    lost(cluster, 0, (topic_id, 0))
    now = cluster.partition("t")
    assert (now.leader, now.isr, now.recovering) == (0, (0,), ()), "as if it had been reported at registration"


@pytest.mark.parametrize("kind", ["preferred", "unclean"])
def test_no_election_by_an_admin_chooses_it(kind: str) -> None:
    cluster, _ = dark()
    back(cluster, 2)
    (outcome,) = cluster.ask(ElectLeaders(kind=kind, partitions=(("t", 0),))).items
    assert outcome.error is not None
    assert cluster.partition("t").leader == NO_LEADER


def test_a_report_is_repeated_at_will_and_answers_for_what_is_gone() -> None:
    cluster, topic_id = dark()
    back(cluster, 2)
    opened(cluster, 2, (topic_id, 0), (topic_id, 0))
    before = cluster.image
    (found, gone) = opened(cluster, 2, (topic_id, 0), (UUID(int=7), 0)).items
    assert (found.error, gone.error) == (None, ErrorCode.UNKNOWN_TOPIC_ID)
    assert cluster.image == before


def test_requests_learn_that_the_log_is_being_recovered() -> None:
    cluster, _ = dark()
    back(cluster, 2)
    (found,) = cluster.controller.answer(cluster.image, DescribeTopics(names=("t",))).topics
    assert "broker 2 recovers its log" in found.topic.partitions[0].advice


def test_a_replica_of_a_leaderless_partition_is_marked_though_it_is_not_eligible() -> None:
    cluster, topic_id = dark()
    back(cluster, 0)
    now = cluster.partition("t")
    assert (now.leader, now.recovering) == (NO_LEADER, (0,))
    assert 0 not in now.eligible
    opened(cluster, 0, (topic_id, 0))
    assert cluster.partition("t").recovering == ()


def test_an_unclean_election_is_refused_by_name_while_a_live_replica_recovers_what_would_be_lost() -> None:
    cluster, _ = dark()
    back(cluster, 0, is_recovering=False)
    back(cluster, 2)
    (refused,) = cluster.ask(ElectLeaders(kind="unclean", partitions=(("t", 0),))).items
    assert refused.error is ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE
    assert "broker 2 recovers its log" in refused.message
    assert cluster.partition("t").leader == NO_LEADER
    cluster.crash(2)
    (done,) = cluster.ask(ElectLeaders(kind="unclean", partitions=(("t", 0),))).items
    assert done.error is None, "the admin has stopped it first"
    assert cluster.partition("t").leader == 0


def test_an_unclean_election_is_recorded_with_its_epoch_and_a_clean_one_is_not() -> None:
    cluster, topic_id = dark()
    back(cluster, 0, is_recovering=False)
    assert cluster.partition("t").unclean_epoch == -1
    cluster.ask(ElectLeaders(kind="unclean", partitions=(("t", 0),)))
    elected = cluster.partition("t")
    assert (elected.leader, elected.unclean_epoch) == (0, elected.leader_epoch)
    cluster.crash(0)
    back(cluster, 0, is_recovering=False)
    later = cluster.partition("t")
    assert later.leader_epoch > later.unclean_epoch == elected.unclean_epoch
    again = decode_snapshot(snapshot_bytes(cluster.image, None)).image
    assert again.topics[topic_id].partitions[0] == later
