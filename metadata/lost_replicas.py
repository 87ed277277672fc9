"""Reports of a running broker that replicas have lost data: found damaged by a read, a scrub or an opening. Pure.

`Register.lost` reports the same at registration, with the same effect. The replica leaves the ISR and the eligible
leaders, since a leader that lacks acknowledged records would make the others truncate them; another replica leads what
it led, or none until an admin decides.

A loss found at the opening of a log after the broker was unfenced (`metadata.recovering_replicas`) counts as at
registration: the replica is no longer recovering, and may lead uncleanly where its topic allows that. A replica with a
later loss leads only by an admin's election.

Every report raises the leader epoch, even if the replica was not in the ISR: the leader may be about to add it, by what
it acknowledged before the loss. The new leader epoch fences such proposals, and in it the leader knows nothing of a
follower before it has subscribed again.

The reply has each partition epoch from which that holds. A broker whose image has reached it may truncate the replica
(`replication.repair`); a lost reply allows nothing.
"""

from dataclasses import dataclass
from uuid import UUID

from tidelog.metadata.brokers import known_broker
from tidelog.metadata.decision import Context, Decision, Draft, Outcome
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.partition_changes import build_change, recovered, without
from tidelog.metadata.records import ChangePartition
from tidelog.metadata.topics import find_partition
from tidelog.model.errors import InvalidRequestError, TidelogError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasLost:
    broker: int
    broker_epoch: int
    replicas: tuple[tuple[UUID, int], ...]
    """(topic id, partition)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedLost:
    items: tuple[Outcome, ...]
    partition_epochs: tuple[int, ...]
    """For each item: from this partition epoch on the replica does not count; -1 if rejected."""


def report_lost(image: ClusterImage, request: ReplicasLost, context: Context) -> Decision[ReportedLost]:
    known_broker(image, request.broker, request.broker_epoch)
    draft = Draft(image)
    outcomes, epochs = [], []
    for topic_id, number in request.replicas:
        label = f"{topic_id}-{number}"
        try:
            draft.add([_without(draft.image, request.broker, topic_id, number, context)])
        except TidelogError as error:
            outcomes.append(Outcome(label, error.code, str(error)))
            epochs.append(-1)
            continue
        after = draft.image.partition(topic_id, number)
        assert after is not None, "it was there before, and changed"
        outcomes.append(Outcome(label))
        epochs.append(after.partition_epoch)
    return draft.decide(ReportedLost(items=tuple(outcomes), partition_epochs=tuple(epochs)))


def _without(image: ClusterImage, broker: int, topic_id: UUID, number: int, context: Context) -> ChangePartition:
    topic, partition = find_partition(image, topic_id, number)
    if broker not in partition.replicas:
        raise InvalidRequestError(f"broker {broker} holds no replica of {topic.name}-{number}")
    after = recovered(without(image, topic_id, partition, broker, has_lost_data=True), broker)
    # Not even uncleanly: only an admin may decide that the remaining data is good enough.
    excluded = () if broker in partition.recovering else (broker,)
    record = build_change(image, topic_id, number, partition, after, new_epoch=True, excluded=excluded, context=context)
    assert record is not None, "the epoch rises"
    return record
