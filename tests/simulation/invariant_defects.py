"""Deliberate defects that an invariant, an audit or a shadow names, most of them at the first event that shows them.

Others would notice some of these too, but only after a loss of power in the right moment, or never: a replica that is
wrong is masked by those that are right.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simulation.defects import Defect
from tidelog.coordinator import consumer_group
from tidelog.log.durability import Durability
from tidelog.log.epochs import EpochHistory
from tidelog.log.producers import ProducerState
from tidelog.model.ids import Offset
from tidelog.raft import storage
from tidelog.raft.persistent_state import pack_state
from tidelog.replication.leader_replica import LeaderReplica


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


SOUND_ENTRIES, SOUND_EPOCHS = 20, 8
"""Something is to be acknowledged before these defects show."""

STORAGE: Any = storage
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
)  # fmt: skip
