"""Replicas whose logs are opened after their broker was let in: not to be elected before that is done.

    registration, not all logs open --> recovering --log open and sound (`ReportOpen`)--> as any other
                                            |     --log damaged or gone (`ReportLost`)--> out of everything (`losses`)
                                            '-----the next life of the broker registers--> marked anew, or not

A registration takes its broker out of every in-sync set. From then on it can be elected only as an eligible leader, or
uncleanly where the topic allows that, or by an admin where nobody leads: exactly those replicas are marked
(`metadata.brokers`), by the controller's own image, so nothing rests on what the broker knows at that time. Any other
gets back into an in-sync set only by what it acknowledges to a leader, for which its log has to be open.

A mark changes nothing else: the replica stays an eligible leader, and others that are eligible may be elected
meanwhile. An election that chose it would lose nothing by itself, since it serves nothing before its log is open and
its loss is told. But the election can make the others count for nothing (`elections.led_by`: where one in sync is
enough, nobody is eligible any more; a reassignment to the new leader alone would be complete), and they may be what is
needed then. And it would keep out another one whose log is open already.

An admin's unclean election is refused, by name, while a marked replica of a live broker may hold what it would lose
(`partitions`). It may choose one that is not marked and whose log is not open yet (it registered while somebody led):
that one leads when it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from tidelog.metadata.brokers import known_broker
from tidelog.metadata.decision import Context, Decision, Draft, Outcome
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.leadership import recovered, shifted
from tidelog.metadata.topics import Outcomes, find_partition
from tidelog.model.errors import TidelogError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOpen:
    """The logs of these replicas are open and sound."""

    broker: int
    broker_epoch: int
    replicas: tuple[tuple[UUID, int], ...]
    """(topic id, partition)."""


def report_open(image: ClusterImage, request: ReportOpen, context: Context) -> Decision[Outcomes]:
    """They may be elected from now on, and are where a leader is missing. To be repeated at will."""
    known_broker(image, request.broker, request.broker_epoch)
    draft = Draft(image)
    outcomes = []
    for topic_id, number in request.replicas:
        label = f"{topic_id}-{number}"
        try:
            _, partition = find_partition(draft.image, topic_id, number)
        except TidelogError as error:
            outcomes.append(Outcome(label, error.code, str(error)))
            continue
        outcomes.append(Outcome(label))
        if request.broker in partition.recovering:
            after = recovered(partition, request.broker)
            record = shifted(draft.image, topic_id, number, partition, after, context=context)
            assert record is not None, "the mark goes"
            draft.add([record])
    return draft.decide(Outcomes(items=tuple(outcomes)))
