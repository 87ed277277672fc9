"""The messages of a replication stream. Pure values; `replication.wire` has their bytes.

A follower broker opens a stream to a leader broker, one for replicas in sync and one for those that catch up. Who
follows says where it stands; who leads answers a divergence first and then pushes.

    follower -> leader    Subscribe     a partition, and where its log ends here
                          Subscribes    many of them
                          Unsubscribe   enough of it
                          Acks          what is on this broker's device now, of any number of partitions
    leader -> follower    Histories     what the batches of a log with gaps do not tell, before the first of them
                          Pushed        batches and high watermarks, of any number of partitions
                          Ended         a subscription is over, and why

A subscription has a number that its follower gives once in its life: what belongs to an older one is known by it and
thrown away, on whichever stream it comes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from tidelog.model.ids import PartitionId
from tidelog.world.disk import Buffer

MAIN = "replication"
"""The stream of replicas that are in sync."""
CATCH_UP = "replication-catch-up"
"""The stream of those that are not: what they fetch holds up no acknowledgement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscribe:
    """`next_offset` is the end of the follower's log and `last_epoch` the latest epoch that it knows, -1 for none;
    below `durable_end` it is on the follower's device. `takes_gaps`: offsets may be missing between batches.
    `takes_history`: the follower understands `Histories`, and pushes that name their offset; an older one does not."""

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
    """In the order in which they were made."""

    asked: tuple[Subscribe, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsubscribe:
    number: int


@dataclass(frozen=True, slots=True)
class Ack:
    """Below `durable_end` the follower has synced everything, in the log that the subscription speaks of."""

    number: int
    leader_epoch: int
    durable_end: int


@dataclass(frozen=True, slots=True)
class Acks:
    """`received_bytes` counts the batches that the follower has taken from this stream since it was opened."""

    received_bytes: int
    acks: tuple[Ack, ...]


@dataclass(frozen=True, slots=True)
class History:
    """Of the log that the subscription `number` is to: (epoch, start offset) of each leader epoch, oldest first, and
    where the part begins that has every tombstone and marker (`log.lineage`). Sent before the first batch of a log with
    gaps, and again when `deletes_end` is raised."""

    number: int
    deletes_end: int
    entries: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Histories:
    histories: tuple[History, ...]


NO_PUSH_OFFSET = -1
"""Of a push from a leader that does not name it."""


@dataclass(frozen=True, slots=True)
class Push:
    """Batches that follow those before, perhaps none; `high_watermark` as the leader sees it. `offset` is where the
    follower's log ends before it takes them: a follower of a log with gaps finds by it that a push is missing."""

    number: int
    high_watermark: int
    batches: Buffer
    offset: int = NO_PUSH_OFFSET


@dataclass(frozen=True, slots=True)
class Pushed:
    pushes: Sequence[Push]


class Reason(IntEnum):
    """Why a subscription ended, and what the follower does about it."""

    DIVERGED = 1
    """The logs part: cut to (`epoch`, `offset`), subscribe again."""
    TOO_FAR_BEHIND = 2
    """The leader's log starts at `offset`: begin there, with an empty log."""
    NEEDS_GAPS = 3
    """The leader's log is compacted: allow gaps, subscribe again."""
    NOT_LEADER = 4
    """Another epoch counts; the metadata says which, sooner or later."""
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
