"""Deliberate defects of the Kafka API and of classic groups, each of a few lines. The clients of the Kafka API in the
simulator have to notice every one."""

from __future__ import annotations

from dataclasses import replace
from struct import Struct
from typing import Any

from simulation.defects import Defect
from tidelog.coordinator import offsets
from tidelog.coordinator.classic_group import ClassicGroup
from tidelog.coordinator.records import GroupRecord, offset_key, sorted_partitions
from tidelog.log.batch import seal
from tidelog.rpc.kafka import produce
from tidelog.rpc.kafka.fetch_sessions import FetchSessions, SessionPartition
from tidelog.services.produce import ACKS_LEADER

Patches = tuple[tuple[Any, str, Any], ...]
_PRODUCER = Struct(">qhi")
_PRODUCER_AT = 43
"""Producer id, epoch and first sequence in a batch."""


def _on(owner: Any, name: str, replacement: Any) -> Patches:
    return ((owner, name, replacement),)


# Groups.


_take_place = ClassicGroup._take_place


def _take_empty_place(self: Any, old: Any, request: Any, out: Any) -> None:
    _take_place(self, old, request, out)
    self.members[request.new_member_id].assignment = b""


def _expire_groups_with_members(state: Any, request: Any) -> Any:
    horizon = request.now_ms - request.retention_ms
    for group_id in sorted(state.groups) if request.groups is None else request.groups:
        group = state.group(group_id)
        if group is None:
            continue
        expired = [partition for partition, value in group.offsets.items() if value.commit_ms <= horizon]
        for partition in sorted_partitions(expired):
            yield GroupRecord(offset_key(group_id, partition), None)


_sync_reply = ClassicGroup._sync_reply


def _reply_with_the_first(self: Any, member: Any) -> Any:
    first = next(iter(self.members.values()))
    return replace(_sync_reply(self, member), assignment=first.assignment)


# Records.

_produce_request = produce._produce_request


def _without_producer(request: Any, version: int) -> Any:
    built = _produce_request(request, version)
    items = []
    for item in built.items:
        batch = bytearray(item.batches)
        _PRODUCER.pack_into(batch, _PRODUCER_AT, -1, -1, -1)
        seal(batch, size=len(batch))
        items.append(replace(item, batches=bytes(batch)))
    return replace(built, items=items)


def _as_leader_alone(request: Any, version: int) -> Any:
    built = _produce_request(request, version)
    return replace(built, acks=ACKS_LEADER) if built.acks < 0 else built


def _keep_the_position(_self: Any, _other: Any) -> None:
    return None


_begin = FetchSessions.begin


def _forget_nothing(
    self: Any, session_id: int, epoch: int, named: Any, forgotten: Any, *, has_ids: bool, now_ms: int
) -> Any:
    return _begin(self, session_id, epoch, named, (), has_ids=has_ids, now_ms=now_ms)


DEFECTS: tuple[Defect, ...] = (
    Defect(
        "kafka_static_place_empty", "groups", "a static member that returns has lost its assignment",
        _on(ClassicGroup, "_take_place", _take_empty_place),
    ),
    Defect(
        "kafka_live_offsets_expire", "groups", "offsets of a group with members expire",
        _on(offsets, "_expired", _expire_groups_with_members),
    ),
    Defect(
        "kafka_sync_of_another", "groups", "every member of a generation gets the assignment of the first one",
        _on(ClassicGroup, "_sync_reply", _reply_with_the_first),
    ),
    Defect(
        "kafka_sequences_unchecked", "brokers", "the Kafka API stores batches without their producer and sequence",
        _on(produce, "_produce_request", _without_producer),
    ),
    Defect(
        "kafka_acks_of_one", "brokers", "the Kafka API acknowledges acks=all when the leader has the records",
        _on(produce, "_produce_request", _as_leader_alone),
    ),
    Defect(
        "kafka_session_keeps_position", "brokers", "a fetch session returns records from where it has read before",
        _on(SessionPartition, "ask", _keep_the_position),
    ),
    Defect(
        "kafka_session_forgets_nothing", "brokers", "a fetch session returns partitions that were forgotten",
        _on(FetchSessions, "begin", _forget_nothing),
    ),
)  # fmt: skip
