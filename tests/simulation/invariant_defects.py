"""Deliberate defects that an invariant, an audit or a shadow names, most of them at the first event that shows them.

Others would notice some of these too, but only after a loss of power in the right moment, or never: a replica that is
wrong is masked by those that are right.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simulation.defects import Defect
from tidelog.coordinator import consumer_group, shard
from tidelog.coordinator.shard import Shard
from tidelog.coordinator.streams import MemberStream
from tidelog.coordinator.timers import TimerSet
from tidelog.coordinator.topics_view import SubscriptionIndex
from tidelog.log.durability import Durability
from tidelog.log.epochs import EpochHistory
from tidelog.log.producers import ProducerState
from tidelog.model.ids import Offset
from tidelog.raft import storage
from tidelog.raft.driver import RaftDriver
from tidelog.raft.persistent_state import pack_state
from tidelog.replication.follower_stream import FollowerStream
from tidelog.replication.leader_replica import LeaderReplica
from tidelog.replication.leader_stream import LeaderStream, LeaderStreams
from tidelog.replication.partition import LeaderState


def _keep_epochs(_self: Any, _offset: int) -> bool:
    return False


def _keep_producers(_self: Any, _other: Any) -> None:
    return None


_begin = Durability.begin


def _skip_the_newest_file(self: Any, end: int) -> Any:
    """The newest file may be that of a new segment, or an index."""
    ticket = _begin(self, end)
    ticket.files = ticket.files[:-1] if len(ticket.files) > 1 else ticket.files
    return ticket


_touch_directory = Durability.touch_directory


def _sync_no_names(self: Any, path: str) -> None:
    """The bytes are on the device, the name of a new file is not."""
    if self.durable_end <= SOUND_ENTRIES:
        _touch_directory(self, path)


def _sync_names_only(self: Any, end: int) -> Any:
    ticket = _begin(self, end)
    ticket.files = [] if end > SOUND_ENTRIES else ticket.files
    return ticket


_role_changed = RaftDriver._role_changed


def _count_no_election(self: Any, change: Any, now_ms: int) -> None:
    _role_changed(self, change, now_ms)
    self._metrics.elections = 0


_leader_acked = LeaderReplica.acked


def _count_what_was_pushed(self: Any, subscription: Any, _durable_end: int) -> None:
    _leader_acked(self, subscription, subscription.next_offset)


def _store_a_low_end(state: Any) -> bytes:
    lowered = replace(state, synced_end=Offset(state.synced_end - 1))
    return pack_state(lowered if state.synced_end > SOUND_ENTRIES else state)


_reconcile = consumer_group._reconcile


def _keep_revoked(group: Any, member_id: str) -> Any:
    after = _reconcile(group, member_id)
    if not after.revoking or after is group.currents[member_id] or group.epoch < SOUND_EPOCHS:
        return after
    return replace(after, assigned=after.assigned | after.revoking, revoking=frozenset())


_state_acked = LeaderState.acked
_metadata_changed = LeaderState.metadata_changed


def _keep_the_highest_ack(self: Any, follower: int, broker_epoch: int, durable_end: Any, now_ms: int) -> bool:
    known = self._progress.get(follower)
    highest = durable_end if known is None or known.durable_end is None else max(known.durable_end, durable_end)
    return _state_acked(self, follower, broker_epoch, min(highest, self._log_end), now_ms)


def _end_linger_asleep(self: Any) -> None:
    self._is_lingering = False


def _acknowledge_asleep(self: Any, follower: Any) -> None:
    self._to_ack[follower] = None


def _install_without_a_look(self: Any, partition: Any, min_isr: int, now_ms: int) -> bool:
    """What the new in-sync set makes possible waits for the next ack."""
    before = self.high_watermark
    _metadata_changed(self, partition, min_isr, now_ms)
    self.high_watermark = before
    return False


def _notify_asleep(self: Any) -> None:
    self._has_changes = True


def _expect_late(self: Any, key: tuple[str, str]) -> None:
    """As if a member had all of its session to find the new coordinator."""
    found, timer = self._member(key), ("session", *key)
    if found is not None and self.is_leading and self.timers.at(timer) is None:
        self.timers.set(timer, self._loading.get_loop().time() + found[1].session_timeout_ms / 1000)


def _park_for_ever(_self: Any, _partition_id: Any, _stream: Any) -> None:
    return None


def _mark_the_high_watermark(self: Any, subscription: Any) -> None:
    self.mark_high_watermark(subscription)


def _notify_nobody(_before: Any, _after: Any, _group_id: str) -> tuple[str, ...]:
    return ()


_set_deadline = TimerSet.set


def _revoke_for_ever(self: Any, key: Any, at_s: float) -> None:
    if key[0] != "rebalance":
        _set_deadline(self, key, at_s)


def _index_nothing(_self: Any, _group_id: str, _group: Any) -> None:
    return None


SOUND_ENTRIES, SOUND_EPOCHS = 20, 8
"""Something is to be acknowledged before these defects show."""

STORAGE: Any = storage
SHARD: Any = shard
CONSUMER_GROUP: Any = consumer_group

DEFECTS: tuple[Defect, ...] = (
    Defect(
        "epochs_not_truncated", "brokers", "a truncation leaves the epochs of what it removes",
        ((EpochHistory, "truncate_from_end", _keep_epochs),),
    ),
    Defect(
        "producers_not_truncated", "brokers", "a truncation leaves the producers as they were",
        ((ProducerState, "replace_with", _keep_producers),),
    ),
    Defect(
        "file_not_synced", "brokers", "a group commit leaves one of several files out",
        ((Durability, "begin", _skip_the_newest_file),),
    ),
    Defect(
        "names_not_synced", "brokers", "no sync has the directory of a new file",
        ((Durability, "touch_directory", _sync_no_names),),
    ),
    Defect(
        "entries_not_synced", "driver", "entries are acknowledged after a sync that had only names",
        ((Durability, "begin", _sync_names_only),),
    ),
    Defect(
        "elections_not_counted", "driver", "the counter of elections stays 0",
        ((RaftDriver, "_role_changed", _count_no_election),),
    ),
    Defect(
        "pushed_counts_at_ack", "brokers", "with any ack, all that was pushed to the follower counts",
        ((LeaderReplica, "acked", _count_what_was_pushed),),
    ),
    Defect(
        "synced_end_stored_low", "driver", "the synced end that is stored is one below what is acknowledged",
        ((STORAGE, "pack_state", _store_a_low_end),),
    ),
    Defect(
        "revoked_kept", "groups", "a member keeps what its new target does not have",
        ((CONSUMER_GROUP, "_reconcile", _keep_revoked),),
    ),
    Defect(
        "highest_ack_kept", "brokers", "a follower counts with its highest ack, although a later one is lower",
        ((LeaderState, "acked", _keep_the_highest_ack),),
    ),
    Defect(
        "smaller_set_unused", "brokers", "a smaller in-sync set advances the high watermark with the next ack only",
        ((LeaderState, "metadata_changed", _install_without_a_look),),
    ),
    Defect(
        "high_watermark_left_behind", "brokers", "nobody is woken to send a high watermark that has lingered",
        ((LeaderStream, "_linger_ended", _end_linger_asleep),),
    ),
    Defect(
        "ack_left_behind", "brokers", "nobody is woken to send an ack",
        ((FollowerStream, "acknowledge", _acknowledge_asleep),),
    ),
    Defect(
        "change_left_behind", "groups", "nobody is woken to tell a member of its changes",
        ((MemberStream, "notify", _notify_asleep),),
    ),
    Defect(
        "reconnect_takes_a_session", "groups", "a member with a stream has its session to find the next coordinator",
        ((Shard, "_expect", _expect_late),),
    ),
    Defect(
        "parked_for_ever", "brokers", "a subscription that came before the leader knew waits for ever",
        ((LeaderStreams, "park", _park_for_ever),),
    ),
    Defect(
        "push_left_behind", "brokers", "after an ack or an append only the high watermark is sent",
        ((LeaderStream, "mark", _mark_the_high_watermark),),
    ),
    Defect(
        "nobody_notified", "groups", "members hear of their changes with their next heartbeat only",
        ((SHARD, "members_to_notify", _notify_nobody),),
    ),
    Defect(
        "revokes_for_ever", "groups", "a member has no deadline to give up what it was asked for",
        ((TimerSet, "set", _revoke_for_ever),),
    ),
    Defect(
        "subscriptions_not_indexed", "groups", "no group is found by the topics that it reads",
        ((SubscriptionIndex, "put", _index_nothing),),
    ),
)  # fmt: skip
