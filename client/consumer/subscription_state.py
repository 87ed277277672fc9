"""`SubscriptionState`: the assigned partitions of a consumer and its position in each of them. Pure.

A `Position` holds the offsets of one partition. Each of them is the NEXT offset:

    fetch_offset    to fetch from the leader
    consumed        to return to the user
    processed       to process: the user asked for more records after it received everything before this offset
    committed       (`PartitionState`) to read after a restart, as the group coordinator stored it

    committed, processed <= consumed <= fetch_offset

Automatic commits take `processed`: a record that the user still processes is never committed. `commit` takes
`consumed`.

Two threads use a `Position`. The IO loop writes `fetch_offset`; the user's thread writes `consumed` and `processed`. A
seek replaces the whole object, so that a late write by the user's thread changes nothing. A new `fetch_generation`
makes everything fetched before it stale, in the fetcher as in the fetch buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tidelog.client.metadata import TopicInfo
from tidelog.client.record import ConsumerRecord, OffsetAndMetadata, TopicPartition
from tidelog.model.errors import TidelogError
from tidelog.model.ids import PartitionId

UNKNOWN = -1

OffsetAndEpoch = tuple[int, int]
"""The next offset, and the leader epoch of the record before it (-1: unknown)."""


class Position:
    """The position in one partition, from one seek to the next."""

    __slots__ = ("_committed", "_consumed", "_processed", "fetch_epoch", "fetch_generation", "fetch_offset", "record")

    def __init__(self, offset: int, epoch: int = UNKNOWN) -> None:
        self.fetch_offset = offset
        self.fetch_epoch = epoch
        """The leader epoch of the record before `fetch_offset`: lets the leader detect a truncated log."""
        self.fetch_generation = 0
        self.record: ConsumerRecord | None = None
        """The record that the user processes now, if the user iterates."""
        self._consumed: OffsetAndEpoch = (offset, epoch)
        self._processed: OffsetAndEpoch = (offset, epoch)
        self._committed = UNKNOWN

    # One load decides in each of these: the other thread may write between two.

    @property
    def consumed(self) -> OffsetAndEpoch:
        record = self.record
        return self._consumed if record is None else (record.offset + 1, record.leader_epoch)

    @property
    def processed(self) -> OffsetAndEpoch:
        record = self.record
        processed = self._processed if record is None else (record.offset, record.leader_epoch)
        return processed if processed[0] >= self._committed else (self._committed, UNKNOWN)

    def advance(self, offset: int, epoch: int) -> None:
        """Records before `offset` were returned to the user."""
        self._consumed = (offset, epoch)
        self.record = None

    def acknowledge(self) -> None:
        """The user asked for more: it has processed what it received."""
        self._processed = self._consumed = self.consumed
        self.record = None

    def note_commit(self, offset: int) -> None:
        """A commit of a record says that the user has processed it."""
        if self._committed < offset <= self.consumed[0]:
            self._committed = offset

    def drop_fetched(self) -> None:
        """What was fetched and not returned to the user is stale: fetch it again."""
        self.fetch_generation += 1
        offset, epoch = self.consumed
        if offset != self.fetch_offset:
            self.fetch_offset, self.fetch_epoch = offset, epoch


@dataclass(slots=True, eq=False)
class PartitionState:
    """An assigned partition: its position, and whether and from where it is fetched."""

    topic: TopicInfo
    partition: PartitionId
    position: Position | None = None
    """None until the committed offset or `auto_offset_reset` decides it."""
    committed: int = UNKNOWN
    is_paused: bool = False
    pending_assigned_callback: bool = False
    """The user's `on_assigned` has not run yet; nothing is fetched before."""
    pending_revocation: bool = False
    """The partition is about to be revoked; nothing is fetched or returned any more."""
    error: TidelogError | None = None
    """Stops the partition until a seek."""
    is_error_reported: bool = False
    high_watermark: int = UNKNOWN
    """From the last fetch response."""
    is_leaderless: bool = False
    replica: int = UNKNOWN
    """The replica in our rack that the leader named, until `replica_until_s`."""
    replica_until_s: float = 0.0
    failing_since_s: float | None = None
    last_error: TidelogError | None = None
    """Retriable; `failing_since_s` is the time of the first one in a row."""
    name: TopicPartition = field(init=False)

    def __post_init__(self) -> None:
        self.name = TopicPartition(self.topic.name, self.partition.partition)

    @property
    def is_assigned_to_user(self) -> bool:
        """The user knows that it has this partition."""
        return not self.pending_assigned_callback and not self.pending_revocation

    @property
    def is_fetchable(self) -> bool:
        return (
            self.position is not None
            and self.error is None
            and not self.is_paused
            and not self.pending_assigned_callback
            and not self.pending_revocation
        )

    def seek(self, offset: int, epoch: int = UNKNOWN) -> None:
        self._replace(Position(offset, epoch))
        self.clear_error()

    def clear_error(self) -> None:
        self.error = self.last_error = self.failing_since_s = None
        self.is_error_reported = self.is_leaderless = False

    def reset(self) -> None:
        """The position is unknown again."""
        self._replace(None)
        self.clear_error()

    def drop_fetched(self) -> None:
        if self.position is not None:
            self.position.drop_fetched()

    def _replace(self, position: Position | None) -> None:
        self.drop_fetched()
        self.position = position


@dataclass(slots=True)
class SubscriptionState:
    """All assigned partitions. Changed on the IO loop only."""

    partitions: dict[PartitionId, PartitionState] = field(default_factory=dict)
    _ids: dict[TopicPartition, PartitionId] = field(default_factory=dict)

    def __contains__(self, partition: PartitionId) -> bool:
        return partition in self.partitions

    def __iter__(self) -> Iterator[PartitionState]:
        return iter(self.partitions.values())

    def named(self, name: TopicPartition) -> PartitionState | None:
        partition = self._ids.get(name)
        return None if partition is None else self.partitions[partition]

    def add(self, state: PartitionState) -> None:
        assert state.partition not in self.partitions, "a partition is assigned once"
        self.partitions[state.partition] = state
        self._ids[state.name] = state.partition

    def remove(self, partitions: Iterable[PartitionId]) -> list[PartitionState]:
        """Removes those that are assigned and returns them; what was fetched for them is stale."""
        removed = [self.partitions.pop(partition) for partition in partitions if partition in self.partitions]
        for state in removed:
            del self._ids[state.name]
            state.drop_fetched()
        return removed

    def to_commit(self) -> dict[PartitionId, OffsetAndMetadata]:
        """Consumed offsets that are not committed yet."""
        return {
            state.partition: OffsetAndMetadata(offset, "", epoch)
            for state in self
            if state.position is not None
            for offset, epoch in (state.position.consumed,)
            if offset != state.committed
        }

    def to_auto_commit(self, partitions: Iterable[PartitionId] | None = None) -> dict[PartitionId, OffsetAndMetadata]:
        """Processed offsets that are not committed yet."""
        states = self if partitions is None else [self.partitions[p] for p in partitions if p in self.partitions]
        return {
            state.partition: OffsetAndMetadata(offset, "", epoch)
            for state in states
            if state.position is not None
            for offset, epoch in (state.position.processed,)
            if offset != state.committed
        }

    def note_commit(self, offsets: Mapping[PartitionId, OffsetAndMetadata]) -> None:
        """The coordinator stored these."""
        for partition, stored in offsets.items():
            state = self.partitions.get(partition)
            if state is not None:
                state.committed = stored.offset
                if state.position is not None:
                    state.position.note_commit(stored.offset)
