"""Deliberate defects of replicated partitions, each of a line or two. The simulator has to notice every one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simulation import broker_node
from simulation.defects import Defect
from tidelog.metadata import leadership
from tidelog.model.ids import Epoch, Offset, PartitionId
from tidelog.replication import announcing, fetching, following, leader_stream, leading, service
from tidelog.replication.changes import Changes
from tidelog.replication.divergence import Continue, Truncate
from tidelog.replication.fetching import Fetch
from tidelog.replication.following import Following
from tidelog.replication.leading import Leading, Subscription
from tidelog.replication.messages import Ack
from tidelog.replication.partition import LeaderState
from tidelog.replication.recovering import Recovering
from tidelog.replication.repair import Repair
from tidelog.replication.replicas import Replicas
from tidelog.replication.service import PartitionService
from tidelog.replication.serving import find_leading, find_readable
from tidelog.replication.settling import Settling

Patches = tuple[tuple[Any, str, Any], ...]


def _on(owner: Any, name: str, replacement: Any) -> Patches:
    return ((owner, name, replacement),)


# What counts as stored.


def _end_of_log(log: Any) -> Any:
    return log.end_offset


_append = Leading.append


def _durable_at_once(self: Any, batches: Any, **more: Any) -> Any:
    appended = _append(self, batches, **more)
    self.durable()
    return appended


_pushed = Subscription.pushed


def _count_when_pushed(self: Any, next_offset: int, size: int) -> None:
    _pushed(self, next_offset, size)
    self.leading.acked(self, next_offset)


_following_pushed = Following.pushed


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


def _joins_at_once(self: Any, follower: int, lives_as: int | None) -> int | None:
    known = self._progress[follower]
    return lives_as if follower not in self._lagging and known.durable_end is not None else None


def _confirmed(_self: Any) -> bool:
    return True


# Epochs.

_changed = Replicas.changed


def _take_the_role_again(self: Any, local: Any) -> None:
    """Whatever the metadata says of a partition that is led here ends the role; the next one leads the same epoch."""
    replica = self.get(PartitionId(local.topic_id, local.number))
    if replica is not None and isinstance(replica.role, Leading):
        self.end_role(replica)
        replica.led_epoch = -1
    _changed(self, local)


_metadata_changed = Changes.metadata_changed


def _former_life(self: Any, delta: Any, older: Any, newer: Any) -> None:
    mine, agent = newer.brokers.get(self._host.me), self._host.agent
    if mine is not None and agent.broker_epoch is None:
        agent.registration = replace(agent.registration, incarnation=mine.incarnation)
    _metadata_changed(self, delta, older, newer)


def _read_in_any_epoch(replicas: Any, partition: Any, _leader_epoch: int, rack: str) -> Any:
    return find_readable(replicas, partition, -1, rack)


def _lead_in_any_epoch(replicas: Any, partition: Any, _leader_epoch: int = -1) -> Any:
    return find_leading(replicas, partition, -1)


# Logs that part.


def _never_parts(_epochs: Any, _start: Any, log_end: Any, *, last_epoch: int, next_offset: int) -> Any:
    return Continue() if next_offset <= log_end else Truncate(Epoch(last_epoch), log_end)


_follow = Settling._follow


async def _cut_to_high_watermark(self: Any, replica: Any, log: Any) -> None:
    role = replica.role
    is_idle = isinstance(role, Following) and role.stream is None and role.unsound is None and log.damaged is None
    if is_idle and log.end_offset > role.high_watermark >= log.start_offset:
        await log.truncate(role.high_watermark)
        role.state.truncated(log.end_offset, log.durable_end, log_start=log.start_offset)
    await _follow(self, replica, log)


# The start of a broker.


async def _all_open_already(agent: Any, logs: Any, *, grace_ms: int) -> None:
    await announcing.announce(agent, logs, grace_ms=grace_ms)
    agent.registration = replace(agent.registration, is_recovering=False)


def _cut_untold(self: Any, _replica: Any) -> bool:
    return bool(self._host.broker_epoch >= 0)


def _role_while_marked(_self: Any, _replica: Any) -> bool:
    return True


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


DEFECTS: tuple[Defect, ...] = (
    Defect(
        "unsynced_follower_counted", "brokers", "a follower counts as soon as something was pushed to it",
        _on(Subscription, "pushed", _count_when_pushed),
    ),
    Defect(
        "follower_acks_before_sync", "brokers", "a follower acks what it has not synced",
        (
            *_on(Following, "pushed", _ack_when_pushed),
            *_on(Following, "ack", _end_ack),
            *_on(following, "safe_end", _end_of_log),
        ),
    ),
    Defect(
        "leader_unsynced", "brokers", "a leader counts what it has not synced itself",
        (*_on(leading, "safe_end", _end_of_log), *_on(Leading, "append", _durable_at_once)),
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
        _on(Replicas, "changed", _take_the_role_again),
    ),
    Defect(
        "epoch_kept_across_restart", "brokers", "a broker that starts again goes on as the incarnation that it was",
        _on(Changes, "metadata_changed", _former_life),
    ),
    Defect(
        "client_epoch_ignored", "brokers", "a leader answers clients that know a newer epoch than its own",
        (*_on(fetching, "find_readable", _read_in_any_epoch), *_on(service, "find_leading", _lead_in_any_epoch)),
    ),
    Defect(
        "divergence_not_checked", "brokers", "a follower goes on from its end, whatever it has",
        _on(leader_stream, "divergence", _never_parts),
    ),
    Defect(
        "cut_to_high_watermark", "brokers", "a follower begins by cutting its log to its high watermark",
        _on(Settling, "_follow", _cut_to_high_watermark),
    ),
    Defect(
        "recovering_not_told", "brokers", "a broker registers as if all of its logs were open",
        _on(broker_node, "announce", _all_open_already),
    ),
    Defect(
        "damage_not_told", "brokers", "a log that is found damaged after its broker was let in is cut, and not told",
        _on(Repair, "_may_cut", _cut_untold),
    ),
    Defect(
        "role_while_recovering", "brokers", "a replica acts before the controller knows that its log is open",
        _on(Recovering, "is_settled", _role_while_marked),
    ),
    Defect(
        "duplicate_at_once", "brokers", "a duplicate is acknowledged although its original is not replicated",
        _on(Leading, "append", _duplicate_at_once),
    ),
    Defect(
        "latest_is_log_end", "brokers", "the latest offset is where the leader's log ends",
        _on(PartitionService, "_confirmed", _latest_is_log_end),
    ),
    Defect(
        "read_past_high_watermark", "brokers", "readers are given all that the leader has",
        _on(Fetch, "_batches", _past_high_watermark),
    ),
    Defect(
        "elected_outside_isr", "brokers", "any live replica may lead",
        _on(leadership, "is_unclean_allowed", _always_unclean),
    ),
)  # fmt: skip
