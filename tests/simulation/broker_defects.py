"""Deliberate defects of replicated partitions, each of a line or two. The simulator has to notice every one.

Some of those that other stacks have are switched on here as well: what checks consumer groups and the membership of the
quorum must not be blind where they are parts of a whole cluster.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simulation.defects import DEFECTS as RAFT_DEFECTS
from simulation.defects import Defect
from simulation.groups_defects import DEFECTS as GROUPS_DEFECTS
from tidelog.log import housekeeping
from tidelog.log.key_map import KeyMap
from tidelog.metadata import partition_changes
from tidelog.model.ids import Epoch, Offset, PartitionId
from tidelog.replication import follower_replica, leader_replica, leader_stream, startup_report
from tidelog.replication.deletes import ReplicaDeletes
from tidelog.replication.divergence import Continue, Truncate
from tidelog.replication.follower_replica import FollowerReplica
from tidelog.replication.leader_replica import LeaderReplica, Subscription
from tidelog.replication.messages import Ack
from tidelog.replication.metadata_changes import MetadataChanges
from tidelog.replication.partition import LeaderState
from tidelog.replication.reconciler import Reconciler
from tidelog.replication.recovery_reports import RecoveryReports
from tidelog.replication.repair import Repair
from tidelog.server import broker
from tidelog.services import fetch, produce
from tidelog.services.fetch import Fetch
from tidelog.services.offsets import OffsetService
from tidelog.services.partition_lookup import find_leader, find_readable

Patches = tuple[tuple[Any, str, Any], ...]


def _on(owner: Any, name: str, replacement: Any) -> Patches:
    return ((owner, name, replacement),)


# What counts as stored.


def _end_of_log(log: Any) -> Any:
    return log.end_offset


_append = LeaderReplica.append


def _durable_at_once(self: Any, batches: Any, **more: Any) -> Any:
    appended = _append(self, batches, **more)
    self.durable()
    return appended


_pushed = Subscription.pushed


def _count_when_pushed(self: Any, next_offset: int, size: int) -> None:
    _pushed(self, next_offset, size)
    self.leader.acked(self, next_offset)


_following_pushed = FollowerReplica.pushed


def _ack_when_pushed(self: Any, push: Any) -> None:
    _following_pushed(self, push)
    if push.batches and self.stream is not None and self.number >= 0:
        self.stream.acknowledge(self)


def _end_ack(self: Any) -> Any:
    return Ack(self.number, self.leader_epoch, self.log.end_offset)


# The high watermark.


def _without_followers(self: Any) -> bool:
    if self.durable_end <= self.high_watermark:
        return False
    self.high_watermark = self.durable_end
    return True


_appended = LeaderState.appended


def _from_log_end(self: Any, end: Any, now_ms: int) -> None:
    _appended(self, end, now_ms)
    if self.high_watermark > 0:  # the first record is acknowledged: a run in which none is proves nothing
        self.durable_end = self.high_watermark = end


def _whatever_min_isr(self: Any) -> bool:
    ends = [self.durable_end, *(self._progress[follower].durable_end for follower in self._maximal)]
    if self._is_superseded or None in ends or min(ends) <= self.high_watermark:
        return False
    self.high_watermark = min(ends)
    return True


def _unheard_passed_over(self: Any) -> bool:
    if self._is_superseded or len(self._isr) < self._min_isr or self._eligible:
        return False
    heard = [known.durable_end for follower, known in self._progress.items() if follower in self._maximal]
    least = min([self.durable_end, *(end for end in heard if end is not None)])
    if least <= self.high_watermark:
        return False
    self.high_watermark = least
    return True


def _check_no_acks(_self: Any, _acks: int) -> None:
    return None


def _proposed_at_once(self: Any) -> None:
    counted = self._isr if self._inflight is None else self._inflight.members
    self._maximal = tuple(sorted(counted & self._progress.keys()))


def _committed_only(self: Any) -> None:
    self._maximal = tuple(sorted(self._isr & self._progress.keys()))


def _joins_at_once(self: Any, follower: int, live_epoch: int | None) -> int | None:
    known = self._progress[follower]
    return live_epoch if follower not in self._lagging and known.durable_end is not None else None


def _confirmed(_self: Any) -> bool:
    return True


# Epochs.

_partition_changed = MetadataChanges.partition_changed


def _take_the_role_again(self: Any, local: Any) -> None:
    """Whatever the metadata says of a partition that is led here ends the role; the next one leads the same epoch."""
    replica = self._replicas.get(PartitionId(local.topic_id, local.number))
    if replica is not None and isinstance(replica.role, LeaderReplica):
        replica.end_role()
        replica.led_epoch = -1
    _partition_changed(self, local)


_metadata_changed = MetadataChanges.metadata_changed


def _former_life(self: Any, delta: Any, older: Any, newer: Any) -> None:
    mine, agent = newer.brokers.get(self._metadata.me), self._context.agent
    if mine is not None and agent.broker_epoch is None:
        agent.registration = replace(agent.registration, incarnation=mine.incarnation)
    _metadata_changed(self, delta, older, newer)


def _read_in_any_epoch(replicas: Any, partition: Any, _leader_epoch: int, rack: str) -> Any:
    return find_readable(replicas, partition, -1, rack)


def _lead_in_any_epoch(replicas: Any, partition: Any, _leader_epoch: int = -1) -> Any:
    return find_leader(replicas, partition, -1)


# Logs that part.


def _never_parts(_epochs: Any, _start: Any, log_end: Any, *, last_epoch: int, next_offset: int) -> Any:
    return Continue() if next_offset <= log_end else Truncate(Epoch(last_epoch), log_end)


_follow = Reconciler._follow


async def _cut_to_high_watermark(self: Any, replica: Any, log: Any) -> None:
    role = replica.role
    is_sound = log.damaged is None
    is_idle = isinstance(role, FollowerReplica) and role.stream is None and not role.must_change_log and is_sound
    if is_idle and log.end_offset > role.high_watermark >= log.start_offset:
        await log.truncate(role.high_watermark)
        role.state.truncated(log.end_offset, log.durable_end, log_start=log.start_offset)
    await _follow(self, replica, log)


# The start of a broker.


async def _all_open_already(agent: Any, logs: Any, *, grace_ms: int) -> None:
    await startup_report.add_losses(agent, logs, grace_ms=grace_ms)
    agent.registration = replace(agent.registration, is_recovering=False)


def _truncate_untold(self: Any, _replica: Any) -> bool:
    return bool(self._metadata.broker_epoch >= 0)


def _role_while_marked(_self: Any, _replica: Any) -> bool:
    return True


# Compacted topics.

_plan_cleaning = housekeeping.plan


def _clean_uncommitted(log: Any, *, bound: Any, deletes_bound: Any = None) -> Any:
    return _plan_cleaning(log, bound=log.end_offset, deletes_bound=deletes_bound)


def _keep_oldest(self: Any, key: bytes, offset: int) -> bool:
    return bool(offset <= self._offsets.get(key, offset))


def _never_copies(_self: Any, _follower: int, **_more: Any) -> bool:
    return False


_subscribe = FollowerReplica.subscribe


def _without_history(self: Any, number: int, broker_epoch: int) -> Any:
    return replace(_subscribe(self, number, broker_epoch), takes_history=False)


# Answers.


def _duplicate_at_once(self: Any, batches: Any, **more: Any) -> Any:
    before = self.log.end_offset
    appended = _append(self, batches, **more)
    return appended if self.log.end_offset > before else replace(appended, last_offset=Offset(-1))


def _latest_is_log_end(_self: Any, found: Any) -> Any:
    return found.log.end_offset


_batches = Fetch._batches


async def _past_high_watermark(self: Any, replica: Any, role: Any, offset: int, bytes_max: int, _bound: Any) -> Any:
    return await _batches(self, replica, role, offset, bytes_max, role.log.end_offset)


def _always_unclean(_image: Any, _topic_id: Any) -> bool:
    return True


SHARED = ("groups_load_part", "handed_over_early", "several_changes", "membership_at_commit")

DEFECTS: tuple[Defect, ...] = (
    *(
        replace(defect, name=f"{defect.name}_here", stack="brokers")
        for defect in (*RAFT_DEFECTS, *GROUPS_DEFECTS)
        if defect.name in SHARED
    ),
    Defect(
        "unsynced_follower_counted", "brokers", "a follower counts as soon as something was pushed to it",
        _on(Subscription, "pushed", _count_when_pushed),
    ),
    Defect(
        "follower_acks_before_sync", "brokers", "a follower acks what it has not synced",
        (
            *_on(FollowerReplica, "pushed", _ack_when_pushed),
            *_on(FollowerReplica, "ack", _end_ack),
            *_on(follower_replica, "ackable_end", _end_of_log),
        ),
    ),
    Defect(
        "leader_unsynced", "brokers", "a leader counts what it has not synced itself",
        (*_on(leader_replica, "ackable_end", _end_of_log), *_on(LeaderReplica, "append", _durable_at_once)),
    ),
    Defect(
        "high_watermark_of_leader_alone", "brokers", "the high watermark is what the leader has synced",
        _on(LeaderState, "_advance", _without_followers),
    ),
    Defect(
        "high_watermark_from_log_end", "brokers", "the high watermark is where the leader's log ends",
        _on(LeaderState, "appended", _from_log_end),
    ),
    Defect(
        "min_isr_ignored", "brokers", "writes are acknowledged by fewer than min.insync.replicas",
        ((LeaderState, "_advance", _whatever_min_isr), (LeaderState, "check_acks", _check_no_acks)),
    ),
    Defect(
        "shrink_at_once", "brokers", "who is to leave the in-sync set does not count while the controller decides",
        _on(LeaderState, "_count", _proposed_at_once),
    ),
    Defect(
        "joiner_not_counted", "brokers", "who is to join the in-sync set does not count before the answer has come",
        _on(LeaderState, "_count", _committed_only),
    ),
    Defect(
        "joins_too_early", "brokers", "a follower joins the in-sync set whatever it has",
        _on(LeaderState, "_epoch_in_sync", _joins_at_once),
    ),
    Defect(
        "served_before_confirmed", "brokers", "a new leader tells offsets before it has confirmed its epoch",
        _on(LeaderState, "is_confirmed", property(_confirmed)),
    ),
    Defect(
        "unheard_passed_over", "brokers", "a follower in sync that has said nothing in this epoch counts as having all",
        _on(LeaderState, "_advance", _unheard_passed_over),
    ),
    Defect(
        "epoch_led_twice", "brokers", "a leader whose role has ended leads the same epoch again",
        _on(MetadataChanges, "partition_changed", _take_the_role_again),
    ),
    Defect(
        "epoch_kept_across_restart", "brokers", "a broker that starts again goes on as the incarnation that it was",
        _on(MetadataChanges, "metadata_changed", _former_life),
    ),
    Defect(
        "client_epoch_ignored", "brokers", "a leader answers clients that know a newer epoch than its own",
        (*_on(fetch, "find_readable", _read_in_any_epoch), *_on(produce, "find_leader", _lead_in_any_epoch)),
    ),
    Defect(
        "divergence_not_checked", "brokers", "a follower goes on from its end, whatever it has",
        _on(leader_stream, "divergence", _never_parts),
    ),
    Defect(
        "cut_to_high_watermark", "brokers", "a follower begins by cutting its log to its high watermark",
        _on(Reconciler, "_follow", _cut_to_high_watermark),
    ),
    Defect(
        "recovering_not_reported", "brokers", "a broker registers as if all of its logs were open",
        _on(broker, "add_losses", _all_open_already),
    ),
    Defect(
        "damage_not_reported", "brokers", "a log found damaged after its broker was unfenced is cut, and not reported",
        _on(Repair, "_may_truncate", _truncate_untold),
    ),
    Defect(
        "role_while_recovering", "brokers", "a replica acts before the controller knows that its log is open",
        _on(RecoveryReports, "is_reported", _role_while_marked),
    ),
    Defect(
        "duplicate_at_once", "brokers", "a duplicate is acknowledged although its original is not replicated",
        _on(LeaderReplica, "append", _duplicate_at_once),
    ),
    Defect(
        "latest_is_log_end", "brokers", "the latest offset is where the leader's log ends",
        _on(OffsetService, "_confirmed", _latest_is_log_end),
    ),
    Defect(
        "read_past_high_watermark", "brokers", "readers are given all that the leader has",
        _on(Fetch, "_batches", _past_high_watermark),
    ),
    Defect(
        "elected_outside_isr", "brokers", "any live replica may lead",
        _on(partition_changes, "is_unclean_allowed", _always_unclean),
    ),
    Defect(
        "cleaned_uncommitted", "brokers", "a record that is not committed yet takes the place of one that is",
        _on(housekeeping, "plan", _clean_uncommitted),
    ),
    Defect(
        "oldest_kept", "brokers", "a cleaning keeps an older record of a key instead of the newest",
        _on(KeyMap, "is_newest", _keep_oldest),
    ),
    Defect(
        "missed_deletes_ignored", "brokers", "a replica that was away while tombstones went goes on from its end",
        _on(ReplicaDeletes, "must_copy", _never_copies),
    ),
    Defect(
        "copied_epochs_guessed", "brokers", "a replica of a compacted log takes its epochs from the batches alone",
        _on(FollowerReplica, "subscribe", _without_history),
    ),
)  # fmt: skip
