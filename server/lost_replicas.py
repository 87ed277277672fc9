"""Which of its replicas a broker has lost: what it tells with its registration (design: rules of safety, 5). Pure.

A replica is lost if its log does not open or is damaged, or if the metadata says that it is in one of our directories
and there is none. One whose directory the metadata does not know yet was never made: nothing is lost.
"""

from __future__ import annotations

from collections.abc import Collection
from uuid import UUID

from tidelog.metadata.image import NIL, ClusterImage
from tidelog.model.ids import PartitionId, TopicId


def find_lost(
    image: ClusterImage,
    me: int,
    *,
    directories: Collection[UUID],
    present: Collection[PartitionId],
    bad: Collection[PartitionId],
) -> tuple[tuple[UUID, int], ...]:
    """(topic id, partition) each, in order. `present`: logs that are there; `bad`: those that cannot be used as they
    are; `directories`: ours that work."""
    lost = {(log_id.topic_id, log_id.partition) for log_id in bad}
    for topic_id, number, partition in image.partitions_on(me):
        recorded = partition.directory_of(me)
        is_here = PartitionId(TopicId(topic_id), number) in present
        if recorded != NIL and recorded in directories and not is_here:
            lost.add((TopicId(topic_id), number))
    return tuple(sorted((UUID(int=topic_id.int), number) for topic_id, number in lost))
