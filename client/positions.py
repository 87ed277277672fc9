"""`Positions`: where a consumer stands in each of its partitions. Pure.

Of each partition four offsets, each of them the NEXT to read:

    offset       what the user will be given next
    processed    what the user has come back for: everything before it was given out, and then more was asked for
    stored       what is committed, as far as is known here
    (the reader's own, which is further on by what was fetched ahead)

Auto-commit takes `processed`, never more: a record that the user still works on is not committed behind his back.
`commit` takes `offset`, since the user says himself that he is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tidelog.client.metadata import TopicInfo
from tidelog.client.record import OffsetAndMetadata, TopicPartition
from tidelog.model.errors import TidelogError
from tidelog.model.ids import PartitionId

UNKNOWN = -1

Marks = Mapping[PartitionId, tuple[int, int]]
"""(next offset, leader epoch of the record before it) of partitions in which something was given out."""


@dataclass(slots=True, eq=False)
class Held:
    """A partition that the consumer holds."""

    topic: TopicInfo
    partition: PartitionId
    offset: int = UNKNOWN
    epoch: int = UNKNOWN
    processed: int = UNKNOWN
    stored: int = UNKNOWN
    is_announced: bool = True
    """The user's callback has heard of it; nothing is read before that."""
    is_paused: bool = False
    is_read: bool = False
    """The reader has it."""
    error: TidelogError | None = None
    """Why it is not read, until `place` says where to go on."""

    @property
    def name(self) -> TopicPartition:
        return TopicPartition(self.topic.name, self.partition.partition)

    def place(self, offset: int, *, epoch: int = UNKNOWN) -> None:
        self.offset = self.processed = offset
        self.epoch = epoch
        self.error = None


@dataclass(slots=True)
class Positions:
    held: dict[PartitionId, Held] = field(default_factory=dict)
    _names: dict[TopicPartition, PartitionId] = field(default_factory=dict)
    _given: set[PartitionId] = field(default_factory=set)

    def __contains__(self, partition: PartitionId) -> bool:
        return partition in self.held

    def __iter__(self) -> Iterator[Held]:
        return iter(self.held.values())

    def named(self, name: TopicPartition) -> Held | None:
        found = self._names.get(name)
        return None if found is None else self.held[found]

    def add(self, held: Held) -> None:
        assert held.partition not in self.held, "held once"
        self.held[held.partition] = held
        self._names[held.name] = held.partition

    def remove(self, partitions: Iterable[PartitionId]) -> list[Held]:
        gone = [self.held.pop(partition) for partition in partitions if partition in self.held]
        for held in gone:
            self._names.pop(held.name, None)
            self._given.discard(held.partition)
        return gone

    def note(self, marks: Marks) -> None:
        """What was given out. Marks of what is not held any more say nothing."""
        for partition, (offset, epoch) in marks.items():
            held = self.held.get(partition)
            if held is not None and offset > held.offset >= 0:
                held.offset, held.epoch = offset, epoch
                self._given.add(partition)

    def done_up_to(self, held: Held, offset: int, epoch: int) -> None:
        """The user works on the record at `offset`."""
        if offset > held.offset >= 0:
            held.offset, held.epoch = offset, epoch
            self._given.add(held.partition)
        if held.offset >= offset > held.processed >= 0:
            held.processed = offset

    def came_back(self) -> None:
        """The user asks for more: what was given out is done."""
        for partition in self._given:
            held = self.held[partition]
            held.processed = held.offset
        self._given.clear()

    def to_commit(self) -> dict[PartitionId, OffsetAndMetadata]:
        """Of what was given out, all that is not stored yet."""
        return {
            held.partition: OffsetAndMetadata(held.offset, "", held.epoch)
            for held in self
            if held.offset >= 0 and held.offset != held.stored
        }

    def to_auto_commit(self, partitions: Iterable[PartitionId] | None = None) -> dict[PartitionId, OffsetAndMetadata]:
        """Of what is processed, all that is not stored yet."""
        chosen = self if partitions is None else [self.held[one] for one in partitions if one in self.held]
        return {
            held.partition: OffsetAndMetadata(
                held.processed, "", held.epoch if held.processed == held.offset else UNKNOWN
            )
            for held in chosen
            if held.processed >= 0 and held.processed != held.stored
        }

    def committed(self, offsets: Mapping[PartitionId, OffsetAndMetadata]) -> None:
        for partition, told in offsets.items():
            held = self.held.get(partition)
            if held is not None:
                held.stored = told.offset
                # Who commits a record says that he is done with it.
                held.processed = max(held.processed, min(told.offset, held.offset))
