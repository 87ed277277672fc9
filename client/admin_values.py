"""What `tidelog.Admin` answers: small values without behaviour, and `Outcomes` for calls about several items. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar
from uuid import UUID

from tidelog.client.record import OffsetAndMetadata, TopicPartition
from tidelog.model.errors import TidelogError

K = TypeVar("K")
V = TypeVar("V")


class Outcomes(Mapping[K, V], Generic[K, V]):
    """How a call about several items ended.

    `done` has those that went well, `errors` those that did not. As a mapping it has all of them: to look at one that
    failed raises its error. `all()` is a dict of everything, or raises the first error.
    """

    def __init__(self, done: Mapping[K, V], errors: Mapping[K, TidelogError]) -> None:
        self.done = dict(done)
        self.errors = dict(errors)

    def all(self) -> dict[K, V]:
        """Everything; raises the first error, with a note of how the others ended."""
        for key, error in self.errors.items():
            if len(self.done) + len(self.errors) > 1:
                others = f"{len(self.errors) - 1} others failed, {len(self.done)} went well"
                error.add_note(f"of {key}; {others}: partial=True tells all of it")
            raise error
        return dict(self.done)

    def __getitem__(self, key: K) -> V:
        if key in self.errors:
            raise self.errors[key]
        return self.done[key]

    def __iter__(self) -> Iterator[K]:
        yield from self.done
        yield from self.errors

    def __len__(self) -> int:
        return len(self.done) + len(self.errors)

    def __repr__(self) -> str:
        return f"Outcomes(done={self.done!r}, errors={self.errors!r})"


# Topics.


@dataclass(frozen=True, slots=True)
class NewTopic:
    """A topic to create. What is None is the cluster's default; `assignment` is [brokers of partition 0, ...] instead
    of the two numbers."""

    name: str
    partitions: int | None = None
    replication_factor: int | None = None
    configs: Mapping[str, object] | None = None
    assignment: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class CreatedTopic:
    name: str
    topic_id: UUID | None
    """None if it was only checked."""
    partitions: int
    replication_factor: int
    note: str
    """What its owner should know although it was created; often empty."""


@dataclass(frozen=True, slots=True)
class TopicListing:
    name: str
    topic_id: UUID
    is_internal: bool
    partitions: int


@dataclass(frozen=True, slots=True)
class PartitionDescription:
    partition: int
    leader: int | None
    """None: nobody leads."""
    leader_epoch: int
    replicas: tuple[int, ...]
    """The preferred leader first."""
    isr: tuple[int, ...]
    eligible_leader_replicas: tuple[int, ...]
    offline_replicas: tuple[int, ...]
    adding_replicas: tuple[int, ...]
    removing_replicas: tuple[int, ...]
    min_isr: int
    state: str
    """"online"; "read-only": too few are in sync for acks=all; "offline": nobody leads."""
    advice: str
    """What would bring it back, if it is offline."""


@dataclass(frozen=True, slots=True)
class TopicDescription:
    name: str
    topic_id: UUID
    is_internal: bool
    replication_factor: int
    configs: Mapping[str, str]
    """What was set on the topic itself; `describe_configs` tells all that applies."""
    partitions: tuple[PartitionDescription, ...]


# Settings.


@dataclass(frozen=True, slots=True)
class ConfigResource:
    """What has settings: ConfigResource("topic", "orders"), ("broker", "1"), ("cluster")."""

    type: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.type}:{self.name}" if self.name else self.type


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    key: str
    value: str
    source: str
    """Where the value comes from: "topic", "broker", "cluster" or "default"."""
    default: str
    documentation: str
    is_dynamic: bool
    """Takes effect without a restart."""

    @property
    def is_default(self) -> bool:
        """Nobody has set it: a value that is inherited from a broker or the cluster is none."""
        return self.source == "default"


# Groups.


@dataclass(frozen=True, slots=True)
class GroupListing:
    group: str
    type: str
    """"consumer", "classic", or "simple" where there are only offsets."""
    state: str
    """"empty", "assigning", "reconciling", "stable"; of a classic group also "preparing", "completing"."""
    members: int
    coordinator: int


@dataclass(frozen=True, slots=True)
class GroupList:
    """Groups of the brokers that have answered. It is complete if `errors` and `loading` are empty."""

    groups: tuple[GroupListing, ...]
    errors: Mapping[int, TidelogError]
    """Brokers that did not answer."""
    loading: Mapping[int, int]
    """Brokers that have just begun to coordinate: so many parts of the groups are missing."""

    def __iter__(self) -> Iterator[GroupListing]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)


@dataclass(frozen=True, slots=True)
class MemberDescription:
    member_id: str
    instance_id: str
    """Of a static member, else empty."""
    client_id: str
    host: str
    rack: str
    epoch: int
    topics: tuple[str, ...]
    """What it has subscribed to; so with `pattern`."""
    pattern: str
    assignment: tuple[TopicPartition, ...]
    """What it holds now."""
    target: tuple[TopicPartition, ...]
    """What it shall hold."""


@dataclass(frozen=True, slots=True)
class GroupDescription:
    group: str
    type: str
    state: str
    epoch: int
    """Counts the group's changes; of a classic group its generation."""
    assignment_epoch: int
    assignor: str
    members: tuple[MemberDescription, ...]
    coordinator: int
    coordinator_address: str

    @property
    def is_active(self) -> bool:
        """Whether it has members: then its offsets are theirs alone."""
        return bool(self.members)


@dataclass(frozen=True, slots=True)
class GroupOffset:
    """What a group has committed of a partition."""

    committed: OffsetAndMetadata
    commit_time_ms: int
    is_topic_gone: bool = False
    """The topic was deleted; what was committed of it expires."""


@dataclass(frozen=True, slots=True)
class ListedOffset:
    """Where a partition has what was asked for."""

    offset: int | None
    """None: there is no such record."""
    timestamp: int | None
    """Of that record, in ms; None where none was looked for (earliest, latest)."""
    leader_epoch: int
    """Of that record; -1: not known."""


@dataclass(frozen=True, slots=True)
class PartitionLag:
    partition: TopicPartition
    committed: int | None
    """The next offset to read; None if the group has none."""
    end: int | None
    """The end of what can be read; None if it could not be found out: see `error`."""
    member_id: str
    """Who holds it; empty: nobody."""
    client_id: str
    host: str
    metadata: str = ""
    error: TidelogError | None = None

    @property
    def lag(self) -> int | None:
        """How many offsets the group is behind; None if one of both is not known."""
        if self.committed is None or self.end is None:
            return None
        return max(0, self.end - self.committed)


@dataclass(frozen=True, slots=True)
class OffsetChange:
    """One row of a plan that moves a group."""

    partition: TopicPartition
    before: int | None
    """What is committed now."""
    after: int
    note: str = ""
    """Why it is not what was asked for, as when the log does not reach so far."""


# Replicas, brokers, the cluster.


@dataclass(frozen=True, slots=True)
class Reassignment:
    """A move that is under way."""

    partition: TopicPartition
    replicas: tuple[int, ...]
    target: tuple[int, ...]
    adding_replicas: tuple[int, ...]
    removing_replicas: tuple[int, ...]
    waiting_for: tuple[int, ...]
    """Replicas of the target that are not in sync yet."""


@dataclass(frozen=True, slots=True)
class BrokerDescription:
    id: int
    epoch: int
    endpoints: Mapping[str, str]
    """Listener -> "host:port"."""
    rack: str
    is_fenced: bool


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    cluster_id: str
    controller: int | None
    """The active one; None if nobody is, as far as is known."""
    brokers: tuple[BrokerDescription, ...]
    version: str
    """Of the node that has answered."""


@dataclass(frozen=True, slots=True)
class QuorumMember:
    node: int
    directory_id: UUID | None
    endpoints: Mapping[str, str]
    is_voter: bool
    is_connected: bool
    log_end_offset: int
    lag: int
    error: str


@dataclass(frozen=True, slots=True)
class QuorumDescription:
    leader: int | None
    epoch: int
    high_watermark: int
    members: tuple[QuorumMember, ...]
    observers: Mapping[int, int]
    """Broker -> the offset that it has come to."""


@dataclass(frozen=True, slots=True)
class ReplicaSize:
    partition: TopicPartition
    bytes: int
    lag: int
    """How many offsets it is behind the high watermark."""


@dataclass(frozen=True, slots=True)
class LogDir:
    directory_id: UUID | None
    path: str
    usable_bytes: int | None
    """None if that is not known."""
    replicas: tuple[ReplicaSize, ...]
    error: TidelogError | None
    """Why it is offline."""
