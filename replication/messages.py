"""The messages of a replication stream; `replication.wire` encodes them. Pure.

A follower broker opens two streams to a leader broker: one for in-sync replicas and one for those that catch up. The
follower sends its log end; the leader resolves divergence first and then pushes.

    follower -> leader    Subscribe     a partition, and the follower's log end
                          Subscribes    several of them
                          Unsubscribe   ends a subscription
                          Acks          durable ends of any number of partitions
    leader -> follower    Histories     epoch histories of logs with gaps, before their first batch
                          Pushed        batches and high watermarks of any number of partitions
                          Ended         the end of a subscription, with its reason

A follower uses each subscription number once in its incarnation. Messages of an older number are recognized by it and
dropped, on any stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from tidelog.model.ids import PartitionId
from tidelog.world.disk import Buffer

MAIN = "replication"
"""The stream of in-sync replicas."""
CATCH_UP = "replication-catch-up"
"""The stream of all other replicas: their catch-up delays no acknowledgement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscribe:
    """`next_offset` is the end of the follower's log, `last_epoch` the epoch of its last record (-1: none), and
    `durable_end` its synced end. `takes_gaps`: offsets may be missing between batches. `takes_history`: the follower
    understands `Histories` and pushes with an offset; an older version does not."""

    partition: PartitionId
    number: int
    leader_epoch: int
    broker_epoch: int
    next_offset: int
    last_epoch: int
    durable_end: int
    takes_gaps: bool = False
    takes_history: bool = False


@dataclass(frozen=True, slots=True)
class Subscribes:
    """Subscriptions in the order of their creation."""

    requests: tuple[Subscribe, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsubscribe:
    number: int


@dataclass(frozen=True, slots=True)
class Ack:
    """The follower has synced its log of this subscription below `durable_end`."""

    number: int
    leader_epoch: int
    durable_end: int


@dataclass(frozen=True, slots=True)
class Acks:
    """`received_bytes` counts the bytes of batches that the follower received on this stream."""

    received_bytes: int
    acks: tuple[Ack, ...]


@dataclass(frozen=True, slots=True)
class History:
    """The epoch history of a subscription's log: (epoch, start offset) of each leader epoch, oldest first. From
    `deletes_end` on the log has every tombstone and marker (`log.lineage`). Sent before the first batch of a log with
    gaps, and again when `deletes_end` advances."""

    number: int
    deletes_end: int
    entries: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Histories:
    histories: tuple[History, ...]


NO_PUSH_OFFSET = -1
"""Offset of a push from a leader of an older version."""


@dataclass(frozen=True, slots=True)
class Push:
    """The next batches, possibly none, and the leader's high watermark. `offset` is the follower's log end before it
    appends them: with gaps in the log a follower detects a missing push by it."""

    number: int
    high_watermark: int
    batches: Buffer
    offset: int = NO_PUSH_OFFSET


@dataclass(frozen=True, slots=True)
class Pushed:
    pushes: Sequence[Push]


class Reason(IntEnum):
    """Why a subscription ended, and what the follower does next."""

    DIVERGED = 1
    """The logs diverge: truncate to (`epoch`, `offset`), subscribe again."""
    TOO_FAR_BEHIND = 2
    """The leader's log starts at `offset`: reset the log to it."""
    NEEDS_GAPS = 3
    """The leader's log is compacted: allow gaps, subscribe again."""
    NOT_LEADER = 4
    """Another leader epoch is current; the metadata will show it."""
    UNREADABLE = 5
    """The leader cannot read its log there; try again later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    number: int
    reason: Reason
    epoch: int = -1
    offset: int = -1


FromFollower = Subscribe | Subscribes | Unsubscribe | Acks
FromLeader = Pushed | Ended | Histories
