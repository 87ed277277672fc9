"""A `LeaderState` and the events of its partition, in the units of the tests of its rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

from tidelog.metadata.image import Partition
from tidelog.metadata.partitions import PartitionState
from tidelog.model.ids import Offset
from tidelog.replication.partition import IsrProposal, LeaderState

LAG_MS = 1000
BROKER_EPOCHS = {1: 11, 2: 12, 3: 13, 4: 14}
TOPIC = UUID(int=7)


def partition(isr: tuple[int, ...], *, replicas: tuple[int, ...] = (1, 2, 3), epoch: int = 0, **more: Any) -> Partition:
    fields: dict[str, Any] = {"leader": 1, "leader_epoch": 5, **more}
    return Partition(replicas, tuple(UUID(int=b) for b in replicas), isr, partition_epoch=epoch, **fields)


def leader(isr: tuple[int, ...] = (1, 2, 3), *, min_isr: int = 2, end: int = 0, **more: Any) -> LeaderState:
    """Broker 1 leads, its log is synced to `end`, nothing is known to be committed."""
    of = {name: more.pop(name) for name in ("replicas", "eligible") if name in more}
    fields: dict[str, Any] = {
        "log_end": Offset(end),
        "durable_end": Offset(end),
        "high_watermark": Offset(0),
        "now_ms": 0,
        "lag_max_ms": LAG_MS,
        **more,
    }
    return LeaderState(me=1, my_broker_epoch=11, partition=partition(isr, **of), min_isr=min_isr, **fields)


def write(state: LeaderState, end: int, now_ms: int = 0) -> bool:
    state.appended(Offset(end), now_ms)
    return state.durable(Offset(end), now_ms)


def ack(state: LeaderState, follower: int, end: int, now_ms: int = 0, *, broker_epoch: int | None = None) -> bool:
    moved = state.acked(
        follower, BROKER_EPOCHS[follower] if broker_epoch is None else broker_epoch, Offset(end), now_ms
    )
    state.validate()
    return moved


def live(*gone: int, **renewed: int) -> Callable[[int], int | None]:
    epochs = {**BROKER_EPOCHS, **{int(name[1:]): epoch for name, epoch in renewed.items()}}
    return lambda broker: None if broker in gone else epochs[broker]


def wanted(state: LeaderState, now_ms: int = 0, *, by: Callable[[int], int | None] | None = None) -> IsrProposal | None:
    proposal = state.next_proposal(by or live(), now_ms)
    state.validate()
    return proposal


def members(proposal: IsrProposal | None) -> set[int] | None:
    return None if proposal is None else set(proposal.members)


def propose(state: LeaderState, now_ms: int = 0, *, by: Callable[[int], int | None] | None = None) -> IsrProposal:
    proposal = wanted(state, now_ms, by=by)
    assert proposal is not None
    state.sent(proposal)
    state.validate()
    return proposal


def answer(state: LeaderState, isr: tuple[int, ...], *, epoch: int, now_ms: int = 0, **more: Any) -> bool:
    fields: dict[str, Any] = {"leader": 1, "leader_epoch": 5, "min_isr": state.min_isr, **more}
    said = PartitionState(topic_id=TOPIC, partition=0, isr=isr, partition_epoch=epoch, **fields)
    moved = state.answered(said, now_ms)
    state.validate()
    return moved


def changed(state: LeaderState, after: Partition, *, min_isr: int = 2, now_ms: int = 0) -> bool:
    moved = state.metadata_changed(after, min_isr, now_ms)
    state.validate()
    return moved
