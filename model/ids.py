"""Types for the integers and ids of the domain, so that mypy keeps epochs and offsets apart. Pure."""

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


@dataclass(frozen=True, slots=True, order=True)
class PartitionId:
    """A partition of a topic id. A topic that is deleted and created again gets a new topic id."""

    topic_id: TopicId
    partition: int

    def __hash__(self) -> int:
        # That of the fields, without the call of `UUID.__hash__`: most tables of a broker are by partition.
        return hash((self.topic_id.int, self.partition))
