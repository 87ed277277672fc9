"""What `TransactionService` is asked, and what it answers.

Requests of a client go to the broker that coordinates the transactional id; another one raises `NotCoordinatorError`.
`version` is that of the client's protocol (decision 32): 2 for our API and for Kafka clients with `transaction.version`
2.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tidelog.coordinator.requests import OffsetToCommit
from tidelog.coordinator.transactions.queries import STATUS_NAMES
from tidelog.services.partition_lookup import PartitionRef

STATES = frozenset(STATUS_NAMES.values())
"""Names of `TransactionSummary.status`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitTransactions:
    """The reply is `coordinator.transactions.requests.InitReply`, never with `is_ending`: the service waits until the
    transaction before is complete if `waits`, and raises `ConcurrentTransactionsError` otherwise."""

    transactional_id: str
    timeout_ms: int
    producer_id: int = -1
    epoch: int = -1
    keep_prepared: bool = False
    waits: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AddPartitionsToTransaction:
    """Of clients of version 1, and of brokers. The reply has an error or None for each partition, in order; with an
    error of one, nothing is added, and the others have OPERATION_NOT_ATTEMPTED."""

    transactional_id: str
    producer_id: int
    epoch: int
    partitions: Sequence[PartitionRef]
    verify_only: bool = False
    version: int = 1
    is_broker: bool = False
    """It needs the right of brokers (CLUSTER_ACTION), and none to the transactional id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddOffsetsToTransaction:
    """Of clients of version 1: adds the partition of `__consumer_offsets` that has the group."""

    transactional_id: str
    producer_id: int
    epoch: int
    group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitOffsetsInTransaction:
    """Goes to the broker that coordinates the *group*. The reply has an error or None for each partition."""

    transactional_id: str
    producer_id: int
    epoch: int
    group: str
    offsets: Mapping[PartitionRef, OffsetToCommit]
    member_id: str = ""
    member_epoch: int = -1
    """Member epoch, or generation of a classic group; -1 with an empty member id: not fenced."""
    instance_id: str = ""
    version: int = 2
    sequence: int = 0
    """Numbers the requests of a producer in their order; 0: it does not number them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTransaction:
    """The reply is `coordinator.transactions.requests.EndReply`, when the decision is durable on the in-sync
    replicas."""

    transactional_id: str
    producer_id: int
    epoch: int
    is_commit: bool
    version: int = 2
    members: Sequence[int] = ()
    token: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinTransaction:
    """The reply is `coordinator.transactions.requests.JoinReply`."""

    transactional_id: str
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareTransaction:
    transactional_id: str
    producer_id: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HangingTransaction:
    """A transaction that is open in the log of a partition, as DescribeProducers has shown it."""

    partition: PartitionRef
    producer_id: int
    epoch: int
    coordinator_epoch: int
    is_commit: bool = False
    """Rejected: only its coordinator commits a transaction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionFilter:
    """Empty: all. `statuses` are names as in `TransactionSummary.status`."""

    statuses: Sequence[str] = ()
    producer_ids: Collection[int] = ()
    longer_than_ms: int = -1
    """Open for longer than this."""
    pattern: str = ""
    """RE2, of the whole transactional id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionSummary:
    transactional_id: str
    producer_id: int
    status: str
    """Kafka's names: Empty, Ongoing, PrepareCommit, PrepareAbort, CompleteCommit, CompleteAbort."""
    members: Sequence[int] = ()
    """Producer ids of the members of the open transaction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberDetails:
    producer_id: int
    label: str
    partitions: Sequence[tuple[str, int]]
    """(topic, partition), sorted; the topic's id as text if it was deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionDetails:
    transactional_id: str
    coordinator: int
    producer_id: int
    epoch: int
    status: str
    timeout_ms: int
    started_ms: int
    """-1 while none is open."""
    prepared_ms: int
    partitions: Sequence[tuple[str, int]]
    members: Sequence[MemberDetails]
    last_token: bytes
