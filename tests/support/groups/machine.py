"""Groups without a cluster: topics, a machine with its log, and members that follow their assignments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from tidelog.coordinator.limits import GroupLimits
from tidelog.coordinator.machine import GroupMachine
from tidelog.coordinator.records import Decision, GroupRecord, Key, decode_batch
from tidelog.coordinator.requests import (
    CommitOffsets,
    CommitPendingOffsets,
    EndPendingOffsets,
    ExpireMember,
    Heartbeat,
    HeartbeatReply,
    OffsetToCommit,
    RefreshTopics,
    TopicShape,
)
from tidelog.coordinator.state import EMPTY, CoordinatorState, Group, apply, validate
from tidelog.model.errors import PolicyViolationError
from tidelog.model.ids import Offset, PartitionId, TopicId

NO_RACKS: Mapping[str, tuple[frozenset[str], ...]] = {}


def topic_id(number: int) -> TopicId:
    return TopicId(UUID(int=number))


class Topics:
    """A `TopicsView`; a changed one is a new one."""

    def __init__(self, shapes: Iterable[TopicShape] = ()) -> None:
        self.shapes = {shape.name: shape for shape in shapes}

    @classmethod
    def of(cls, racks: Mapping[str, tuple[frozenset[str], ...]] = NO_RACKS, /, **sizes: int) -> Topics:
        return cls(
            TopicShape(topic_id(number), name, partitions, racks.get(name, ()))
            for number, (name, partitions) in enumerate(sizes.items(), 1)
        )

    def by_name(self, name: str) -> TopicShape | None:
        return self.shapes.get(name)

    def by_id(self, topic_id: TopicId) -> TopicShape | None:
        return next((shape for shape in self.shapes.values() if shape.topic_id == topic_id), None)

    def names(self) -> list[str]:
        return sorted(name for name in self.shapes if not name.startswith("__"))

    def all(self, *names: str) -> frozenset[PartitionId]:
        chosen = names or tuple(self.shapes)
        return frozenset(
            PartitionId(self.shapes[name].topic_id, number)
            for name in chosen
            for number in range(self.shapes[name].partitions)
        )

    def part(self, name: str, number: int) -> PartitionId:
        return PartitionId(self.shapes[name].topic_id, number)


@dataclass
class Groups:
    """The machine, its state, and all that it has written. Every decision is coded, and the state checked after it."""

    view: Topics = field(default_factory=Topics)
    limits: GroupLimits = field(default_factory=GroupLimits)
    state: CoordinatorState = EMPTY
    now_ms: int = 1_000_000
    records: list[GroupRecord] = field(default_factory=list)
    batches: list[bytes] = field(default_factory=list)
    last: tuple[GroupRecord, ...] = ()
    """What the last request has written."""

    def __post_init__(self) -> None:
        self.machine = GroupMachine(self.limits)

    def submit(self, request: Any) -> Any:
        decisions, reply = self.machine.decide(self.state, request, offset=Offset(0))
        self.last = tuple(record for each in decisions for record in each.records)
        if decisions:
            self._write(decisions)
        return reply

    def _write(self, decisions: Iterable[Decision]) -> None:
        batches = self.machine.encode(list(decisions))
        assert sum((decode_batch(data) for data in batches), ()) == self.last, "a decision survives its coding"
        assert len({record.key for record in self.last}) == len(self.last), "a decision has each key once"
        self.batches += batches
        self.records += self.last
        self.state = self.machine.apply(self.state, list(decisions))
        validate(self.state)

    def group(self, group_id: str = "g") -> Group:
        group = self.state.group(group_id)
        assert group is not None
        return group

    # Requests, short.

    def heartbeat(self, member_id: str, epoch: int, group: str = "g", **fields: Any) -> HeartbeatReply:
        reply = self.submit(
            Heartbeat(
                group=group, member_id=member_id, member_epoch=epoch, view=self.view, now_ms=self.now_ms, **fields
            )
        )
        assert isinstance(reply, HeartbeatReply)
        return reply

    def join(self, member_id: str, *topics: str, group: str = "g", **fields: Any) -> HeartbeatReply:
        return self.heartbeat(member_id, 0, group, topics=topics, owned=frozenset(), **fields)

    def expire(self, member_id: str, epoch: int, group: str = "g") -> None:
        self.submit(
            ExpireMember(group=group, member_id=member_id, member_epoch=epoch, view=self.view, now_ms=self.now_ms)
        )

    def refresh(self, view: Topics | None = None, group: str = "g") -> None:
        self.view = view or self.view
        self.submit(RefreshTopics(group=group, view=self.view, now_ms=self.now_ms))

    def commit(
        self, offsets: Mapping[PartitionId, int | OffsetToCommit], member_id: str = "", epoch: int = -1, **fields: Any
    ) -> Any:
        wanted = {p: o if isinstance(o, OffsetToCommit) else OffsetToCommit(o) for p, o in offsets.items()}
        return self.submit(
            CommitOffsets(
                group=fields.pop("group", "g"),
                member_id=member_id,
                member_epoch=epoch,
                offsets=wanted,
                now_ms=self.now_ms,
                **fields,
            )
        )

    def pend(
        self,
        offsets: Mapping[PartitionId, int | OffsetToCommit],
        member_id: str = "",
        member_epoch: int = -1,
        *,
        producer: int = 7,
        epoch: int = 0,
        number: int | None = 1,
        **fields: Any,
    ) -> Any:
        """Commits in a transaction."""
        wanted = {p: o if isinstance(o, OffsetToCommit) else OffsetToCommit(o) for p, o in offsets.items()}
        return self.submit(
            CommitPendingOffsets(
                group=fields.pop("group", "g"),
                member_id=member_id,
                member_epoch=member_epoch,
                offsets=wanted,
                now_ms=self.now_ms,
                producer_id=producer,
                epoch=epoch,
                number=number,
                **fields,
            )
        )

    def mark(
        self, *, producer: int = 7, epoch: int = 1, number: int = 1, is_commit: bool = True, **fields: Any
    ) -> None:
        """Writes the marker of a transaction; of version 2, unless `is_strict` says otherwise."""
        self.submit(
            EndPendingOffsets(
                producer_id=producer,
                epoch=epoch,
                number=number,
                coordinator_epoch=fields.pop("coordinator_epoch", 1),
                is_commit=is_commit,
                is_strict=fields.pop("is_strict", True),
                now_ms=self.now_ms,
                **fields,
            )
        )

    # Replays.

    def replayed(self) -> CoordinatorState:
        """From the batches, as a new coordinator reads them."""
        state = EMPTY
        for data in self.batches:
            state = self.machine.replay(state, data)
        return state

    def compacted(self, below: int | None = None) -> CoordinatorState:
        """From a log of which everything below an index is compacted; tombstones go too."""
        end = len(self.records) if below is None else below
        last: dict[Key, int] = {record.key: index for index, record in enumerate(self.records[:end])}
        kept = [r for i, r in enumerate(self.records[:end]) if last[r.key] == i and r.value is not None]
        return apply(EMPTY, kept + self.records[end:])


class Member:
    """A member that follows its assignments, unless a test says otherwise."""

    def __init__(self, groups: Groups, member_id: str, *topics: str, group: str = "g", **fields: Any) -> None:
        self.groups, self.member_id, self.group = groups, member_id, group
        self.epoch = 0
        self.owned: frozenset[PartitionId] = frozenset()
        self.lost: list[PartitionId] = []
        """All that it ever had to give up."""
        self.hear(groups.join(member_id, *topics, group=group, **fields))

    def hear(self, reply: HeartbeatReply) -> HeartbeatReply:
        self.epoch = reply.member_epoch
        if reply.assignment is not None:
            wanted = frozenset(reply.assignment)
            self.lost += self.owned - wanted
            self.owned = wanted
        return reply

    def beat(self, **fields: Any) -> HeartbeatReply:
        return self.hear(self.groups.heartbeat(self.member_id, self.epoch, self.group, **fields))

    def report(self) -> HeartbeatReply:
        return self.beat(owned=self.owned)


def run_until_stable(members: Iterable[Member], rounds_max: int = 50) -> int:
    """Everybody answers until nobody has anything new; how many rounds it took."""
    members = list(members)
    for number in range(rounds_max):
        wrote = 0
        for member in members:
            member.report()
            wrote += len(member.groups.last)
        if not wrote:
            return number
    raise PolicyViolationError(f"no end after {rounds_max} rounds")
