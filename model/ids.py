"""Types for the integers and ids of the domain, so that an epoch is never taken for an offset."""

from dataclasses import dataclass
from typing import NewType
from uuid import UUID

NodeId = NewType("NodeId", int)
Epoch = NewType("Epoch", int)
"""A leader epoch of a partition or of the Raft group; -1 is none."""
Offset = NewType("Offset", int)
"""A logical offset; ends are exclusive."""
Position = NewType("Position", int)
"""A byte position in a file."""
TimestampMs = NewType("TimestampMs", int)
ProducerId = NewType("ProducerId", int)
TopicId = NewType("TopicId", UUID)
DirectoryId = NewType("DirectoryId", UUID)

NO_EPOCH = Epoch(-1)
NO_OFFSET = Offset(-1)
NO_TIMESTAMP = TimestampMs(-1)
NO_PRODUCER = ProducerId(-1)


@dataclass(frozen=True, slots=True, order=True)
class PartitionId:
    """A partition of one topic incarnation: a topic made anew under its old name has another topic id."""

    topic_id: TopicId
    partition: int
