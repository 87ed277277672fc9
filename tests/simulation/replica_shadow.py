"""A shadow of each replica: what it alone has acknowledged as durable, so that replicas cannot mask each other.

    synced        a group commit has ended: the shadow takes the batches up to the new durable end from the *device*, as
                  a loss of power would leave it. If they are not there, the replica counts what it has not synced
    reopened      the log of a new incarnation must have everything that the shadow has
    truncated     a replica in sync must not give up what is committed: another copy of it proves nothing here
    advanced      a high watermark: what the leader counts was announced by each follower in this leader epoch, and
                  each member that the controller has in sync has everything below it on its own device

Excused are losses that the protocol ordered or that a fault explains: a truncation that was under way when the process
died, a log that was found damaged, whose bits were flipped, that was removed, also while nobody looked and by a move of
the partition to other brokers and back, or whose disk was wiped; and what lies below the log start.
Logs with gaps are compared by their ends. A log in the page cache is shadowed as far as it is synced.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from simulation.log_walk import LogWalk, device_of
from tidelog.log.batch import read_header
from tidelog.log.config import FlushMode
from tidelog.log.log import Log
from tidelog.metadata.image import Partition
from tidelog.model.ids import PartitionId
from tidelog.replication.follower_replica import FollowerReplica
from tidelog.replication.leader_replica import LeaderReplica
from tidelog.replication.replica import Replica
from tidelog.replication.replicas import Replicas

if TYPE_CHECKING:
    from simulation.broker_checker import KnownPartition
    from simulation.broker_node import BrokerApp

Fail = Callable[[str, str], None]


class Batch(NamedTuple):
    end: int
    epoch: int
    crc: int


@dataclass(slots=True, eq=False)
class Shadow:
    """Of one replica, over all its incarnations."""

    replica: Replica
    walk: LogWalk
    end: int = 0
    """What the replica counts as durable."""
    batches: dict[int, Batch] = field(default_factory=dict)
    """By base offset; of a log without gaps."""
    announced: dict[int, int] = field(default_factory=dict)
    """Leader epoch -> the highest durable end of this replica as a follower in it."""
    root: object = None
    """Of the device as it was: a wiped one has another."""
    was_truncated_unseen: bool = False
    """A process of the broker truncated the log, and ended before the shadow looked at that."""
    was_unassigned: bool = False
    """The broker was no replica of the partition for a while: it may have removed the log, and created another one."""

    def __post_init__(self) -> None:
        self.root = device_of(self.log).root

    @property
    def log(self) -> Log:
        return self.walk.log


class ReplicaShadows:
    def __init__(
        self,
        fail: Fail,
        committed: Callable[[PartitionId], Partition | None],
        partitions: dict[PartitionId, KnownPartition],
    ) -> None:
        self.compared = self.excused = 0
        """Logs of new incarnations: with everything of their shadow, and those of which something may be gone."""
        self.is_rotten: Callable[[str, PartitionId], bool] = lambda _name, _partition: False
        self._fail = fail
        self._committed = committed
        self._partitions = partitions
        self._shadows: dict[tuple[int, PartitionId], Shadow] = {}
        self._running: dict[int, Replicas] = {}
        """By broker, of the process that has begun last."""

    def begin_process(self, broker: int, replicas: Replicas) -> None:
        """Note what the process before this one truncated without being looked at."""
        for replica in self._running[broker].all() if broker in self._running else ():
            shadow, log = self._shadows.get((broker, replica.partition_id)), replica.log
            if shadow is None or log is None:
                continue
            seen = shadow.walk.generation if log is shadow.log else 0
            shadow.was_truncated_unseen |= log.durability.generation > seen or log.is_changing or _is_ordered(replica)
        self._running[broker] = replicas

    def unassigned(self, broker: int, partition_id: PartitionId) -> None:
        """The broker is no replica of the partition any more, as the metadata are committed."""
        shadow = self._shadows.get((broker, partition_id))
        if shadow is not None:
            shadow.was_unassigned = True

    def attach(self, app: BrokerApp) -> None:
        """Follow the group commits of a broker."""
        for directory in app.logs.directories:
            group_commit = directory.group_commit
            synced = group_commit.on_synced
            assert synced is not None, "the replicas follow the group commits"

            def look(logs: list[Log], synced: Callable[[list[Log]], None] = synced) -> None:  # type: ignore[assignment]
                synced(logs)
                for log in logs:
                    replica = app.replicas.get(log.log_id)
                    if replica is not None and replica.log is log:
                        self.look(app, replica)

            group_commit.on_synced = look  # type: ignore[assignment]

    # -- one replica

    def look(self, app: BrokerApp, replica: Replica) -> None:
        """After a group commit, a new role, or a new high watermark."""
        log, role, key = replica.log, replica.role, (app.agent.broker, replica.partition_id)
        if log is None or role is None or log.is_changing or log.is_closed or log.damaged is not None:
            return
        if self.is_rotten(app.name, replica.partition_id):
            self._shadows.pop(key, None)
            return
        shadow = self._shadows.get(key)
        if shadow is None:
            shadow = self._shadows[key] = Shadow(replica, LogWalk(log, durable=True))
        elif shadow.log is not log:
            shadow = self._shadows[key] = self._reopened(app, shadow, replica, log)
        elif shadow.walk.is_stale:
            self._changed(app, shadow)
        self._extend(app, shadow, log.durable_end)
        self.note_announced(app, replica)

    def note_announced(self, app: BrokerApp, replica: Replica) -> None:
        """After an event that changed the durable end of a role: the same event may have sent it to the leader."""
        shadow, role = self._shadows.get((app.agent.broker, replica.partition_id)), replica.role
        if shadow is not None and isinstance(role, FollowerReplica):
            end = int(role.state.durable_end)
            shadow.announced[role.leader_epoch] = max(end, shadow.announced.get(role.leader_epoch, 0))

    def _extend(self, app: BrokerApp, shadow: Shadow, end: int) -> None:
        walk, gaps = shadow.walk, shadow.log.gaps
        for found in walk.batches(end):
            if not gaps:
                header = found.header
                shadow.batches[header.base_offset] = Batch(header.next_offset, header.leader_epoch, header.crc)
        if walk.offset < end and not gaps:
            self._fail(
                app.name,
                f"{self._name(shadow)} counts as synced up to {end}, and its device has batches up to {walk.offset}",
            )
        shadow.end = end

    def _reopened(self, app: BrokerApp, before: Shadow, replica: Replica, log: Log) -> Shadow:
        """The log of a new incarnation, or in another directory."""
        shadow = Shadow(replica, LogWalk(log, durable=True), announced=before.announced)
        self._extend(app, shadow, log.durable_end)
        self._committed(replica.partition_id)  # so that `unassigned` was called for all that is committed
        if _may_have_lost(before, log):
            self.excused += 1
            return shadow
        self.compared += 1
        if shadow.end < before.end and shadow.end >= log.start_offset:
            self._fail(
                app.name,
                f"{self._name(before)} has acknowledged up to {before.end}, and is opened with {shadow.end}",
            )
        self._compare(app, before, shadow)
        return shadow

    def _compare(self, app: BrokerApp, before: Shadow, now: Shadow) -> None:
        if before.log.gaps or now.log.gaps:
            return
        start = int(now.log.start_offset)
        for base, batch in before.batches.items():
            if batch.end > start and now.batches.get(base) != batch:
                self._fail(
                    app.name,
                    f"{self._name(before)} has acknowledged {batch} at {base}, where {now.batches.get(base)} is now",
                )
                return

    def _changed(self, app: BrokerApp, shadow: Shadow) -> None:
        """The log was truncated, reset or cleaned, or has dropped segments, in the same life."""
        before, start = shadow.batches, int(shadow.log.start_offset)
        shadow.walk.restart()
        shadow.batches = {}
        self._extend(app, shadow, int(shadow.log.durable_end))
        known = self._partitions.get(shadow.replica.partition_id)
        if known is None or known.topic.is_unclean or shadow.log.gaps:
            return
        lost = [base for base, batch in before.items() if batch.end > start and shadow.batches.get(base) != batch]
        partition = self._committed(shadow.replica.partition_id)
        if not lost or partition is None or app.agent.broker not in (*partition.isr, *partition.eligible):
            return
        if _is_committed(known, min(lost), before[min(lost)].crc):
            self._fail(app.name, f"{self._name(shadow)} is in sync, and gives up what is committed from {min(lost)} on")

    # -- a leader

    def advanced(self, app: BrokerApp, role: LeaderReplica) -> None:
        """A leader has raised its high watermark, or has begun with it."""
        state, partition_id = role.state, role.replica.partition_id
        if role.log.config.flush_mode is FlushMode.PAGE_CACHE:
            return
        for follower in sorted(state.maximal_isr):
            known, shadow = state.progress(follower), self._shadows.get((follower, partition_id))
            if known is None or known.durable_end is None or shadow is None:
                continue
            announced = shadow.announced.get(role.leader_epoch, -1)
            if known.durable_end > announced:
                self._fail(
                    app.name,
                    f"{self._name(shadow)} counts broker {follower} as durable up to {known.durable_end}, which has "
                    f"announced {announced} in epoch {role.leader_epoch}",
                )
        partition = self._committed(partition_id)
        if partition is None or partition.leader_epoch != role.leader_epoch or not state.is_confirmed:
            return
        for member in partition.isr:
            shadow = self._shadows.get((member, partition_id))
            if shadow is None or _is_excused(shadow) or shadow.log.is_page_cache:
                continue  # with page-cache, and right after, it announces what it has written
            if shadow.end < state.high_watermark:
                self._fail(
                    app.name,
                    f"{self._name(shadow)} is committed up to {state.high_watermark}; broker {member} is in sync, and "
                    f"has {shadow.end} on its device",
                )

    def _name(self, shadow: Shadow) -> str:
        known = self._partitions.get(shadow.replica.partition_id)
        return shadow.log.path if known is None else str(known)


def _is_committed(known: KnownPartition, base: int, crc: int) -> bool:
    """Whether replicas have shown this batch below a high watermark, and nobody has asked to delete it."""
    at = bisect_left(known.batches, (base, b""))
    there = known.batches[at] if at < len(known.batches) else None
    return base >= known.deleting and there is not None and there[0] == base and read_header(there[1]).crc == crc


def _is_excused(shadow: Shadow) -> bool:
    return shadow.log.damaged is not None or shadow.log.is_changing


def _may_have_lost(before: Shadow, log: Log) -> bool:
    """Whether the last life was losing something when it ended, by the order of its leader or by damage; or this one
    was truncated before it was looked at."""
    replica, former = before.replica, before.log
    is_removed = replica.is_dropped or replica.is_removed or replica.log is not former or before.was_unassigned
    is_wiped = device_of(former).root is not before.root
    was_truncated = before.was_truncated_unseen or log.durability.generation > 0
    return is_removed or is_wiped or was_truncated or _is_excused(before) or _is_ordered(replica)


def _is_ordered(replica: Replica) -> bool:
    """Whether the leader has ordered a truncation that has not ended."""
    return isinstance(replica.role, FollowerReplica) and replica.role.required_change is not None
