"""Deliberate defects of the metadata quorum, each of a line or two. The simulator has to notice every one."""

import asyncio
from dataclasses import replace
from typing import Any

import msgpack

from simulation.defects import Defect
from tidelog.metadata import brokers, lost_replicas, partition_changes, partitions, tail
from tidelog.metadata.controller_node import ControllerNode
from tidelog.metadata.decision import Decision
from tidelog.metadata.delta import ImageDelta, delta_between
from tidelog.metadata.records import AbortDecision, BeginDecision, ChangePartition, EndDecision, decode_records
from tidelog.metadata.replay import Replay
from tidelog.metadata.snapshot import snapshot_bytes
from tidelog.metadata.state_machine import MetadataStateMachine
from tidelog.metadata.tail import MetadataTail
from tidelog.metadata.topics import find_partition
from tidelog.model.errors import FencedLeaderEpochError, TidelogError
from tidelog.model.ids import Epoch, Offset
from tidelog.raft.effects import Role
from tidelog.raft.messages import Entry, EntryKind, SnapshotId
from tidelog.raft.runtime import StateMachineRuntime
from tidelog.raft.state_machine import SnapshotJob


def _on(owner: Any, name: str, replacement: Any) -> tuple[tuple[Any, str, Any], ...]:
    return ((owner, name, replacement),)


# Decisions.


def _check_leader_epoch_only(topic: Any, partition: Any, broker: int, item: Any) -> None:
    if item.leader_epoch != partition.leader_epoch or partition.leader != broker:
        raise FencedLeaderEpochError("another leader epoch")


_check_isr = partitions._check_isr


def _check_isr_of_any_epoch(image: Any, topic: Any, partition: Any, item: Any) -> None:
    now = tuple((member, image.brokers[member].broker_epoch) for member, _ in item.isr)
    _check_isr(image, topic, partition, replace(item, isr=now))


def _always_unclean(_image: Any, _topic_id: Any) -> bool:
    return True


def _stays_in_sync(_image: Any, _broker: int, _context: Any) -> list[Any]:
    return []


_register = brokers.register


def _register_in_the_same_epoch(image: Any, request: Any, context: Any, *, cluster_id: str) -> Any:
    decision = _register(image, request, context, cluster_id=cluster_id)
    known = image.brokers.get(request.broker)
    if known is None or not decision.records:
        return decision
    first: Any = decision.records[0]
    first = replace(first, broker_epoch=known.broker_epoch)
    return Decision((first, *decision.records[1:]), brokers.Registered(broker_epoch=known.broker_epoch))


def _report_in_the_same_epoch(image: Any, broker: int, topic_id: Any, number: int, _context: Any) -> Any:
    _, partition = find_partition(image, topic_id, number)
    after = partition_changes.without(image, topic_id, partition, broker, has_lost_data=True)
    record = partition_changes.build_change(image, topic_id, number, partition, after, excluded=(broker,))
    return record or ChangePartition(topic_id=topic_id, partition=number)


def _serves_until_fenced(image: Any, _partition: Any, broker: int) -> bool:
    return broker in image.brokers and not image.brokers[broker].fenced


# The runtime.

_flush = StateMachineRuntime._flush


def _answer_before_commit(self: Any) -> None:
    for waiter in [waiter for batch in self._batches for waiter in batch.waiters]:
        waiter.answer()
    _flush(self)


_follow, _lead = StateMachineRuntime.follow, StateMachineRuntime.lead


def _follow_with_speculation(self: Any, leader: Any) -> None:
    if self.epoch is not None:
        self.kept = self._speculative
    _follow(self, leader)


def _lead_with_speculation(self: Any, epoch: Any, me: Any, *, is_torn: bool = False) -> None:
    _lead(self, epoch, me, is_torn=is_torn)
    self._speculative = getattr(self, "kept", self._speculative)


def _lead_on_torn(self: Any, epoch: Any, me: Any, *, is_torn: bool = False) -> None:
    _lead(self, epoch, me, is_torn=False)


_role_changed = MetadataStateMachine.role_changed


def _lead_before_own_epoch(self: Any, change: Any) -> None:
    _role_changed(self, change)
    if change.role is Role.LEADER and self._elected is not None:
        self._elected = None
        self.runtime.lead(change.epoch, self.me, is_torn=self.is_torn)
        self._notify_role(True)


async def _ask_without_index(self: Any, question: object) -> Any:
    await asyncio.sleep(0)
    return self.machine.decider.answer(self.image, question)


def _show_early(self: Any, records: Any) -> Any:
    whole = [r for r in records if not isinstance(r, BeginDecision | EndDecision | AbortDecision)]
    self.image = self.image.apply_all(whole)
    return self.image


def _snapshot_without_open_decision(self: Any) -> SnapshotJob:
    return SnapshotJob(snapshot_bytes, (self._replay.image, None))


# The tail.

_take_snapshot = MetadataTail._take_snapshot


async def _name_snapshot_wrongly(self: Any) -> None:
    write = self._files.write

    async def misnamed(snapshot: SnapshotId, *rest: Any) -> None:
        await write(SnapshotId(Offset(snapshot.offset + 1), snapshot.epoch), *rest)

    self._files.write = misnamed
    try:
        await _take_snapshot(self)
    finally:
        self._files.write = write


def _frames_unchecked(data: bytes) -> tuple[list[tuple[Offset, Entry]], int]:
    found: list[tuple[Offset, Entry]] = []
    position = 0
    while position + 8 < len(data):
        length = int.from_bytes(data[position : position + 4], "big")
        try:
            offset, epoch, kind, value = msgpack.unpackb(data[position + 8 : position + 8 + length])
            found.append((Offset(offset), Entry(Epoch(epoch), EntryKind(kind), value)))
            decode_records(value)
        except (ValueError, TypeError, TidelogError, msgpack.UnpackException):
            break
        position += 8 + length
    return found, position


def _without_partitions(older: Any, newer: Any, records: Any = None) -> ImageDelta:
    return delta_between(older, newer, [])


DEFECTS: tuple[Defect, ...] = (
    Defect(
        "isr_without_epoch", "metadata", "an ISR is taken whatever partition epoch it was proposed for",
        _on(partitions, "_check_epochs", _check_leader_epoch_only),
    ),
    Defect(
        "isr_of_former_life", "metadata", "an ISR is taken whatever incarnation its members were seen in",
        _on(partitions, "_check_isr", _check_isr_of_any_epoch),
    ),
    Defect(
        "leader_outside_isr", "metadata", "any live replica may lead",
        _on(partition_changes, "is_unclean_allowed", _always_unclean),
    ),
    Defect(
        "fenced_in_sync", "metadata", "a broker that is fenced stays in its ISRs",
        _on(brokers, "leave_all_isrs", _stays_in_sync),
    ),
    Defect(
        "same_broker_epoch", "metadata", "a new incarnation gets the epoch of the last one",
        _on(brokers, "register", _register_in_the_same_epoch),
    ),
    Defect(
        "loss_in_the_same_epoch", "metadata", "what a leader knew of a replica counts after its loss was reported",
        _on(lost_replicas, "_without", _report_in_the_same_epoch),
    ),
    Defect(
        "leaving_taken_back", "metadata", "a broker that is leaving is taken into ISRs until it is fenced",
        _on(partitions, "can_serve", _serves_until_fenced),
    ),
    Defect(
        "reply_before_commit", "metadata", "a change is answered when it is decided",
        _on(StateMachineRuntime, "_flush", _answer_before_commit),
    ),
    Defect(
        "speculation_kept", "metadata", "a leader goes on from what it had decided before it lost leadership",
        (
            (StateMachineRuntime, "follow", _follow_with_speculation),
            (StateMachineRuntime, "lead", _lead_with_speculation),
        ),
    ),
    Defect(
        "stale_controller", "metadata", "a controller decides before it has applied what former ones committed",
        _on(MetadataStateMachine, "role_changed", _lead_before_own_epoch),
    ),
    Defect(
        "torn_decision", "metadata", "a large decision without its end is not aborted",
        _on(StateMachineRuntime, "lead", _lead_on_torn),
    ),
    Defect(
        "read_without_index", "metadata", "a question is answered by a controller that may not lead any more",
        _on(ControllerNode, "ask", _ask_without_index),
    ),
    Defect(
        "decision_shows_early", "metadata", "the parts of a large decision show before its end",
        _on(Replay, "apply", _show_early),
    ),
    Defect(
        "snapshot_without_open_decision", "metadata", "a snapshot forgets the decision that is open",
        _on(MetadataStateMachine, "take_snapshot", _snapshot_without_open_decision),
    ),
    Defect(
        "tail_snapshot_misnamed", "metadata", "a broker's snapshot says that it has more than it has",
        _on(MetadataTail, "_take_snapshot", _name_snapshot_wrongly),
    ),
    Defect(
        "tail_frames_unchecked", "metadata", "a broker believes what it finds on its disk",
        _on(tail, "decode_entries", _frames_unchecked),
    ),
    Defect(
        "delta_without_partitions", "metadata", "subscribers are not notified of partitions",
        _on(tail, "delta_between", _without_partitions),
    ),
)  # fmt: skip
