"""Replicas whose logs open after their broker was unfenced: not electable before that. Pure.

    registration, not all logs open --> recovering --log open and sound (`ReplicasRecovered`)--> as any other
                                            |     --log damaged or gone (`ReplicasLost`)--> out of ISR and eligible
                                            '-----the next incarnation registers--> marked again, or not

A registration removes its broker from every ISR. After it, the broker can be elected only as an eligible leader,
uncleanly where the topic allows that, or by an admin where there is no leader: exactly those replicas are marked
(`metadata.brokers`), by the controller's image alone. Any other replica rejoins an ISR only by acknowledging to a
leader, for which its log has to be open.

A mark changes nothing else: the replica stays an eligible leader, and other eligible replicas may be elected meanwhile.
Electing a marked replica would lose nothing by itself, since it serves nothing before its log is open and its loss is
reported. But it can make the others count for nothing (`elections.led_by`: where one in sync is enough, no replica
stays eligible; a reassignment to the new leader alone would complete), and they may be needed then. It would also keep
out a replica whose log is open.

An admin's unclean election is rejected, with the broker's name, while a marked replica of a live broker may hold more
data (`partitions`). It may elect an unmarked replica whose log is not open yet (it registered while there was a
leader): that one leads once it is.
"""

from dataclasses import dataclass
from uuid import UUID

from tidelog.metadata.brokers import known_broker
from tidelog.metadata.decision import Context, Decision, Draft, Outcomes, each
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.partition_changes import build_change, recovered
from tidelog.metadata.topics import find_partition


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasRecovered:
    """The logs of these replicas are open and sound."""

    broker: int
    broker_epoch: int
    replicas: tuple[tuple[UUID, int], ...]
    """(topic id, partition)."""


def report_recovered(image: ClusterImage, request: ReplicasRecovered, context: Context) -> Decision[Outcomes]:
    """Makes the replicas electable, and elects them where a leader is missing. Repeatable."""
    known_broker(image, request.broker, request.broker_epoch)
    draft = Draft(image)

    def recover(replica: tuple[UUID, int]) -> None:
        _, partition = find_partition(draft.image, *replica)
        if request.broker in partition.recovering:
            after = recovered(partition, request.broker)
            record = build_change(draft.image, *replica, partition, after, context=context)
            assert record is not None, "the mark goes"
            draft.add([record])

    outcomes = each(request.replicas, lambda replica: f"{replica[0]}-{replica[1]}", recover, duplicate=None)
    return draft.decide(outcomes)
