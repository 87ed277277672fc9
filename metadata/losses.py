"""A broker that runs says that some of its replicas have lost data: found damaged by a read, a scrub or an opening.

At registration the same is said in `Register.lost`; the rule is the same (design: safety 5). The replica leaves the
in-sync set and the eligible leaders, and what it led is led by another, or by nobody until an admin decides.

One that was found at the opening of a log after this life of the broker was let in (`metadata.recoveries`) is what it
would have been at registration: the replica is not recovering any more, and may lead uncleanly where its topic allows
that. One that is found later leads only when an admin says so.

Every report raises the leader epoch, even of a partition whose in-sync set the replica was not in. Its leader may be
about to take it back, by what it acknowledged before it lost data: that proposal may be on its way, or be made when
this report is already known there. A leader epoch ends both: proposals of an older one are refused, and in the new one
the leader knows nothing of a follower before it has subscribed anew, with what it has then.

The reply tells each partition epoch in which that holds. The replica may be cut by a broker whose image has come as far
(`replication.repair`); a reply that is lost allows nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from tidelog.metadata.brokers import known_broker
from tidelog.metadata.decision import Context, Decision, Draft, Outcome
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.leadership import recovered, shifted, without
from tidelog.metadata.records import ChangePartition
from tidelog.metadata.topics import find_partition
from tidelog.model.errors import InvalidRequestError, TidelogError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportLost:
    broker: int
    broker_epoch: int
    replicas: tuple[tuple[UUID, int], ...]
    """(topic id, partition)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedLost:
    items: tuple[Outcome, ...]
    partition_epochs: tuple[int, ...]
    """Of each item: from this partition epoch on the replica counts for nothing; -1 where it was refused."""


def report_lost(image: ClusterImage, request: ReportLost, context: Context) -> Decision[ReportedLost]:
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
    # Not even uncleanly: that the rest is worth more than nothing is for an admin to say.
    excluded = () if broker in partition.recovering else (broker,)
    record = shifted(image, topic_id, number, partition, after, new_epoch=True, excluded=excluded, context=context)
    assert record is not None, "the epoch rises"
    return record
