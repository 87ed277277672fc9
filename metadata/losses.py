"""A broker that runs says that some of its replicas have lost data: found damaged by a read, a scrub or an opening.

At registration the same is said in `Register.lost`; the rule is the same (design: safety 5). The replica leaves the
in-sync set and the eligible leaders, and what it led is led by another, or by nobody until an admin decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from tidelog.metadata.brokers import known_broker
from tidelog.metadata.decision import Context, Decision, Draft, Outcome
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.leadership import shifted, without
from tidelog.metadata.records import ChangePartition
from tidelog.metadata.topics import Outcomes, find_partition
from tidelog.model.errors import InvalidRequestError, TidelogError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportLost:
    broker: int
    broker_epoch: int
    replicas: tuple[tuple[UUID, int], ...]
    """(topic id, partition)."""


def report_lost(image: ClusterImage, request: ReportLost, _context: Context) -> Decision[Outcomes]:
    known_broker(image, request.broker, request.broker_epoch)
    draft = Draft(image)
    outcomes = []
    for topic_id, number in request.replicas:
        label = f"{topic_id}-{number}"
        try:
            record = _without(draft.image, request.broker, topic_id, number)
        except TidelogError as error:
            outcomes.append(Outcome(label, error.code, str(error)))
            continue
        if record is not None:
            draft.add([record])
        outcomes.append(Outcome(label))
    return draft.decide(Outcomes(items=tuple(outcomes)))


def _without(image: ClusterImage, broker: int, topic_id: UUID, number: int) -> ChangePartition | None:
    topic, partition = find_partition(image, topic_id, number)
    if broker not in partition.replicas:
        raise InvalidRequestError(f"broker {broker} holds no replica of {topic.name}-{number}")
    after = without(image, topic_id, partition, broker, has_lost_data=True)
    # Not even uncleanly: that the rest is worth more than nothing is for an admin to say.
    return shifted(image, topic_id, number, partition, after, excluded=(broker,))
