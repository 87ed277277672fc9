"""Values that `tidelog.Admin` takes and returns, and `Outcomes` of calls about several items. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar, overload
from uuid import UUID

from tidelog.client.errors import fresh
from tidelog.client.record import OffsetAndMetadata, TopicPartition
from tidelog.model.errors import TidelogError

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


class Outcomes(Mapping[K, V], Generic[K, V]):
    """The result of a call about several items.

    `succeeded` has the values of items, `errors` the errors of the others. As a mapping it has the items that
    succeeded; `outcomes[item]` of one that failed raises its error. `all()` returns a dict of all values, or
    raises the first error.
    """

    def __init__(self, succeeded: Mapping[K, V], errors: Mapping[K, TidelogError]) -> None:
        self.succeeded = dict(succeeded)
        self.errors = dict(errors)

    def all(self) -> dict[K, V]:
        """Returns all values. Raises the first error, with a note about the other items."""
        for key, first in self.errors.items():
            error = fresh(first)
            if len(self.errors) + len(self.succeeded) > 1:
                rest = f"{len(self.errors) - 1} others failed, {len(self.succeeded)} succeeded"
                error.add_note(f"'{key}' failed; {rest}; pass partial=True for all results")
            raise error
        return dict(self.succeeded)

    def __getitem__(self, key: K) -> V:
        if key in self.errors:
            raise fresh(self.errors[key])
        return self.succeeded[key]

    def __contains__(self, key: object) -> bool:
        return key in self.succeeded

    @overload
    def get(self, key: K, /) -> V | None: ...

    @overload
    def get(self, key: K, /, default: V | T) -> V | T: ...

    def get(self, key: K, /, default: V | T | None = None) -> V | T | None:
        return self.succeeded.get(key, default)

    def __iter__(self) -> Iterator[K]:
        return iter(self.succeeded)

    def __len__(self) -> int:
        return len(self.succeeded)

    def __repr__(self) -> str:
        return f"Outcomes(succeeded={self.succeeded!r}, errors={self.errors!r})"


# Topics.


@dataclass(frozen=True, slots=True)
class NewTopic:
    """A topic to create. None means the cluster's default. `assignment` lists the brokers of each partition, and
    replaces both numbers."""

    name: str
    partitions: int | None = None
    replication_factor: int | None = None
    configs: Mapping[str, object] | None = None
    assignment: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class CreatedTopic:
    name: str
    topic_id: UUID | None
    """None if the request was only validated."""
    partitions: int
    replication_factor: int
    note: str
    """A warning of the controller about the topic; usually empty."""
    is_new: bool = True
    """False: the topic existed before (`if_not_exists`), and has the partitions and replicas that it had."""


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
    """None: the partition has no leader."""
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
    """"online"; "read-only": the ISR is too small for acks=all; "offline": there is no leader."""
    advice: str
    """What brings an offline partition back."""
    partition_epoch: int = -1
    start_offset: int = 0
    """The log start offset that the controller knows; deleted records are below it."""


@dataclass(frozen=True, slots=True)
class TopicDescription:
    name: str
    topic_id: UUID
    is_internal: bool
    replication_factor: int
    configs: Mapping[str, str]
    """The configs set on the topic itself; `describe_configs` returns all effective ones."""
    partitions: tuple[PartitionDescription, ...]


# Configs.


@dataclass(frozen=True, slots=True)
class ConfigResource:
    """A resource that has configs: ConfigResource("topic", "orders"), ("broker", "1"), or ConfigResource("cluster")."""

    type: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.type}:{self.name}" if self.name else self.type


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    key: str
    value: str
    source: str
    """Where the value is set: "topic", "broker", "cluster" or "default"."""
    default: str
    documentation: str
    is_dynamic: bool
    """A change takes effect without a restart."""

    @property
    def is_default(self) -> bool:
        """The value is set nowhere. A value inherited from a broker or the cluster is not a default."""
        return self.source == "default"


# Groups.


@dataclass(frozen=True, slots=True)
class GroupListing:
    group: str
    type: str
    """"consumer", "classic", or "simple" for a group that has only offsets."""
    state: str
    """"empty", "assigning", "reconciling", "stable"; classic groups also "preparing", "completing"."""
    members: int
    coordinator: int


@dataclass(frozen=True, slots=True)
class GroupList:
    """Groups of the brokers that answered. It is complete if `errors` and `loading` are empty."""

    groups: tuple[GroupListing, ...]
    errors: Mapping[int, TidelogError]
    """Brokers that did not answer."""
    loading: Mapping[int, int]
    """Brokers that load groups -> how many partitions of __consumer_offsets they have not loaded."""

    def __iter__(self) -> Iterator[GroupListing]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)


@dataclass(frozen=True, slots=True)
class TransactionListing:
    transactional_id: str
    producer_id: int
    state: str
    """"Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit" or "CompleteAbort"."""
    coordinator: int


@dataclass(frozen=True, slots=True)
class TransactionList:
    """Transactional ids of the brokers that answered. It is complete if `errors` and `loading` are empty."""

    transactions: tuple[TransactionListing, ...]
    errors: Mapping[int, TidelogError]
    """Brokers that did not answer."""
    loading: Mapping[int, int]
    """Brokers that load transactional ids -> how many partitions of __transaction_state they have not loaded."""

    def __iter__(self) -> Iterator[TransactionListing]:
        return iter(self.transactions)

    def __len__(self) -> int:
        return len(self.transactions)


@dataclass(frozen=True, slots=True)
class TransactionMember:
    """A process that has joined the transaction of an owner."""

    producer_id: int
    label: str
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class TransactionDescription:
    transactional_id: str
    coordinator: int
    producer_id: int
    producer_epoch: int
    state: str
    timeout_ms: int
    started_ms: int | None
    """When the open transaction began, ms since 1970; None: none is open."""
    prepared_ms: int | None
    """Since when it is prepared."""
    partitions: tuple[TopicPartition, ...]
    """That its owner has written to, with the partition of `__consumer_offsets` of each group."""
    members: tuple[TransactionMember, ...]
    last_token: bytes
    """Of the last commit that had one; empty: none has."""


@dataclass(frozen=True, slots=True)
class HangingTransaction:
    """A transaction that is open in the log of a partition, and that no coordinator will end. Readers of committed data
    stop at `start_offset`, and compaction and retention do too."""

    partition: TopicPartition
    producer_id: int
    producer_epoch: int
    start_offset: int
    last_timestamp_ms: int
    """Of its last record."""
    coordinator_epoch: int


@dataclass(frozen=True, slots=True)
class MemberDescription:
    member_id: str
    instance_id: str
    """The id of a static member, else empty."""
    client_id: str
    host: str
    rack: str
    epoch: int
    topics: tuple[str, ...]
    """The subscription, with `pattern`."""
    pattern: str
    assignment: tuple[TopicPartition, ...]
    """The partitions that it owns now."""
    target: tuple[TopicPartition, ...]
    """The partitions that the coordinator assigned to it."""


@dataclass(frozen=True, slots=True)
class GroupDescription:
    group: str
    type: str
    state: str
    epoch: int
    """The group epoch; the generation of a classic group."""
    assignment_epoch: int
    assignor: str
    members: tuple[MemberDescription, ...]
    coordinator: int
    coordinator_address: str

    @property
    def is_active(self) -> bool:
        """The group has members, and only they may commit its offsets."""
        return bool(self.members)


@dataclass(frozen=True, slots=True)
class GroupOffset:
    """The committed offset of a partition."""

    committed: OffsetAndMetadata
    commit_time_ms: int
    is_topic_deleted: bool = False
    """The topic was deleted; the offset will expire."""


@dataclass(frozen=True, slots=True)
class ListedOffset:
    """The result of an offset lookup in one partition."""

    offset: int | None
    """None: there is no such record."""
    timestamp: int | None
    """The record's timestamp in ms; None for lookups of "earliest" and "latest"."""
    leader_epoch: int
    """The record's leader epoch; -1: unknown."""


@dataclass(frozen=True, slots=True)
class PartitionLag:
    partition: TopicPartition
    committed: int | None
    """The next offset to read; None: nothing is committed."""
    end: int | None
    """The end offset for consumers; None: the lookup failed, see `error`."""
    member_id: str
    """The member that owns the partition; empty: none."""
    client_id: str
    host: str
    metadata: str = ""
    error: TidelogError | None = None

    @property
    def lag(self) -> int | None:
        """Offsets from `committed` to `end`; None if one of them is None."""
        if self.committed is None or self.end is None:
            return None
        return max(0, self.end - self.committed)


@dataclass(frozen=True, slots=True)
class OffsetChange:
    """The reset of one partition."""

    partition: TopicPartition
    before: int | None
    """The offset committed now."""
    after: int
    note: str = ""
    """Why `after` is not the requested offset, as when it is outside of the log."""


# Replicas, brokers, the cluster.


@dataclass(frozen=True, slots=True)
class Reassignment:
    """A reassignment in progress."""

    partition: TopicPartition
    replicas: tuple[int, ...]
    target: tuple[int, ...]
    adding_replicas: tuple[int, ...]
    removing_replicas: tuple[int, ...]
    waiting_for: tuple[int, ...]
    """Replicas of the target that are not in sync yet."""


@dataclass(frozen=True, slots=True)
class BrokerDescription:
    """The last four fields are known to `describe_brokers` only."""

    id: int
    epoch: int
    endpoints: Mapping[str, str]
    """Listener -> "host:port"."""
    rack: str
    is_fenced: bool
    is_draining: bool = False
    replicas: int = 0
    preferred_leaderships: int = 0
    """Partitions whose preferred leader it is."""
    offline_directories: tuple[UUID, ...] = ()


@dataclass(frozen=True, slots=True)
class DrainedBroker:
    """The partitions and replicas that are left on a draining broker."""

    partitions_led: int
    """Partitions that no other broker can lead."""
    replicas: int


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    cluster_id: str
    controller: int | None
    """The active controller; None if the answering node knows none."""
    brokers: tuple[BrokerDescription, ...]
    version: str
    """The version of the answering node."""


@dataclass(frozen=True, slots=True)
class QuorumMember:
    node: int
    directory_id: UUID | None
    endpoints: Mapping[str, str]
    is_voter: bool
    is_connected: bool
    log_end_offset: int
    """-1: unknown. Only the active controller knows it, `lag`, `last_response_age_ms` and `lag_age_ms`."""
    lag: int
    error: str
    last_response_age_ms: int = -1
    """Time since its last answer to the leader."""
    lag_age_ms: int = -1
    """Time since its log end advanced, while it lags."""
    is_recovering: bool = False


@dataclass(frozen=True, slots=True)
class QuorumDescription:
    leader: int | None
    epoch: int
    high_watermark: int
    members: tuple[QuorumMember, ...]
    observers: Mapping[int, int]
    """Broker -> the metadata offset that it has read."""
    node: int = -1
    """The node that answered, and its own role and log."""
    role: str = ""
    log_start_offset: int = 0
    log_end_offset: int = 0
    durable_end_offset: int = 0
    without_leader_ms: int = 0
    snapshot_offset: int = 0
    snapshot_epoch: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaSize:
    partition: TopicPartition
    bytes: int
    lag: int
    """Offsets behind the high watermark."""


@dataclass(frozen=True, slots=True)
class LogDir:
    directory_id: UUID | None
    path: str
    usable_bytes: int | None
    """None: unknown."""
    replicas: tuple[ReplicaSize, ...]
    error: TidelogError | None
    """Why the directory is offline."""
    is_full: bool = False


@dataclass(frozen=True, slots=True)
class Feature:
    name: str
    level: int
    level_min: int
    level_max: int
    """The levels that every node supports."""


@dataclass(frozen=True, slots=True)
class MetadataSnapshot:
    end_offset: int
    epoch: int
    data: bytes


@dataclass(frozen=True, slots=True)
class MetadataEntry:
    """One entry of the metadata log. `kind` is "no-op", "records" or "membership"."""

    offset: int
    epoch: int
    kind: str
    data: bytes


@dataclass(frozen=True, slots=True)
class MetadataLog:
    """The committed metadata log: a snapshot, if the log does not start at 0, and the entries after it."""

    snapshot: MetadataSnapshot | None
    entries: tuple[MetadataEntry, ...]
