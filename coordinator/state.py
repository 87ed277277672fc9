"""The state of the groups of one partition of `__consumer_offsets`: an immutable value, the replay of its records.
Pure.

Every part of the state has one key. The last record of the key is its value; a tombstone removes it. So a replay of the
whole log, a replay of the compacted log, and the changes that a former leader made all end in the same state.
What is derived (`owners`, `instances`) follows from the values.

Invariants of what decisions write (`validate`; replay of another sequence does not fail, but may violate them):
- `assigned` and `revoking` of all members of a group are disjoint: a partition has at most one owner;
- a consumer group has a GROUP record, and for each MEMBER a CURRENT and a TARGET;
- no group has both a GROUP and a CLASSIC record: a group has one kind;
- targets are disjoint; a member's epoch is not above the group's, and a member in the group's epoch is assigned only
  what its target has (one that joins, or is of the classic protocol, keeps more until it confirms);
- a stored generation of a classic group with members names one of them as leader;
- an instance id names one member;
- all pending offsets of a producer, in all groups, are of one transaction, and of none that its fence has ended; one
  decision can hold the records that end them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from tidelog.coordinator.records import (
    DECISION_BYTES_MAX,
    ClassicValue,
    CurrentValue,
    FenceValue,
    GroupRecord,
    GroupValue,
    Key,
    Kind,
    MemberValue,
    OffsetValue,
    PendingValue,
    TargetValue,
)
from tidelog.model.ids import PartitionId
from tidelog.model.maps import Map, sorted_items

if TYPE_CHECKING:
    from immutables import MapMutation

K = TypeVar("K")
V = TypeVar("V")

_NO_MEMBERS: Map[str, MemberValue] = Map()
_NO_TARGETS: Map[str, TargetValue] = Map()
_NO_CURRENTS: Map[str, CurrentValue] = Map()
_NO_OWNERS: Map[PartitionId, str] = Map()
_NO_INSTANCES: Map[str, str] = Map()
_NO_OFFSETS: Map[PartitionId, OffsetValue] = Map()
_NO_PENDING: Map[PartitionId, PendingValue] = Map()

PENDING_BYTES_MAX = DECISION_BYTES_MAX - (4 << 10)
"""Of the pending offsets of one producer (`PendingOffsets.size`), so that one decision ends them."""
_PENDING_BYTES = 160
"""Bytes of the two records that end a pending offset, without the group's name and the metadata; rounded up."""


@dataclass(frozen=True, slots=True)
class PendingOffsets:
    """The pending offsets of one producer in one group; never empty."""

    offsets: Map[PartitionId, PendingValue] = _NO_PENDING
    size: int = 0
    """Derived: bytes of the records that end them, at most."""


_NO_PRODUCERS: Map[int, PendingOffsets] = Map()
_NO_UNSTABLE: Map[PartitionId, tuple[int, ...]] = Map()


def pending_size(group_id: str, metadata: str) -> int:
    return _PENDING_BYTES + 2 * len(group_id.encode()) + len(metadata.encode())


@dataclass(frozen=True, slots=True)
class Group:
    """A group of any kind: "consumer" if it has `info`, "classic" if it has `classic`, "simple" otherwise."""

    group_id: str
    info: GroupValue | None = None
    members: Map[str, MemberValue] = _NO_MEMBERS
    targets: Map[str, TargetValue] = _NO_TARGETS
    currents: Map[str, CurrentValue] = _NO_CURRENTS
    owners: Map[PartitionId, str] = _NO_OWNERS
    """Derived: partition -> member that is assigned it or is still revoking it."""
    instances: Map[str, str] = _NO_INSTANCES
    """Derived: instance id -> member id."""
    offsets: Map[PartitionId, OffsetValue] = _NO_OFFSETS
    classic: ClassicValue | None = None
    pending: Map[int, PendingOffsets] = _NO_PRODUCERS
    """By producer id."""
    unstable: Map[PartitionId, tuple[int, ...]] = _NO_UNSTABLE
    """Derived: partition -> producers with a pending offset for it, sorted."""

    @property
    def kind(self) -> str:
        if self.info is not None:
            return "consumer"
        return "simple" if self.classic is None else "classic"

    @property
    def epoch(self) -> int:
        if self.info is not None:
            return self.info.epoch
        return 0 if self.classic is None else self.classic.generation

    @property
    def member_count(self) -> int:
        return len(self.members) if self.classic is None else len(self.classic.members)

    @property
    def empty_since_ms(self) -> int:
        """Time since when it has no members; -1 if it has members, or has only offsets."""
        if self.info is not None:
            return self.info.empty_since_ms
        return -1 if self.classic is None else self.classic.empty_since_ms

    @property
    def has_no_records(self) -> bool:
        return (
            self.info is None
            and self.classic is None
            and not (self.members or self.targets or self.currents or self.offsets or self.pending)
        )


_NO_GROUPS: Map[str, Group] = Map()
_NO_OPEN: Map[int, tuple[str, ...]] = Map()
_NO_FENCES: Map[int, FenceValue] = Map()


@dataclass(frozen=True, slots=True)
class CoordinatorState:
    groups: Map[str, Group] = _NO_GROUPS
    open: Map[int, tuple[str, ...]] = _NO_OPEN
    """Derived: producer -> groups in which it has pending offsets, sorted."""
    fences: Map[int, FenceValue] = _NO_FENCES
    """By producer id."""

    def group(self, group_id: str) -> Group | None:
        return self.groups.get(group_id)

    def open_transaction(self, producer_id: int) -> PendingValue | None:
        """Return a pending offset of the producer, which has the epoch and number of all of them; None: it has none."""
        groups = self.open.get(producer_id)
        if not groups:
            return None
        return next(iter(self.groups[groups[0]].pending[producer_id].offsets.values()))


EMPTY = CoordinatorState()


def apply(state: CoordinatorState, records: Iterable[GroupRecord]) -> CoordinatorState:
    """Return the state after these records. Never raises, whatever the sequence."""
    changed: dict[str, _Draft] = {}
    fences = _Parts(state.fences)
    for record in records:
        if record.key.kind == Kind.FENCE:
            _set_fence(fences, record)
            continue
        group_id = record.key.group
        draft = changed.get(group_id)
        if draft is None:
            draft = changed[group_id] = _Draft(state.groups.get(group_id) or Group(group_id))
        draft.apply(record)
    if not changed:
        return state if fences.finish() is state.fences else replace(state, fences=fences.finish())
    groups = state.groups.mutate()
    producers = _Parts(state.open)
    for group_id, draft in changed.items():
        group = draft.finish()
        for producer_id in draft.touched_producers:
            _set_open(producers, producer_id, group_id, is_open=producer_id in group.pending)
        if group.has_no_records:
            groups.pop(group_id, None)
        else:
            groups[group_id] = group
    return CoordinatorState(groups.finish(), producers.finish(), fences.finish())


def apply_to_group(group: Group, records: Iterable[GroupRecord]) -> Group:
    """Return the group after these records, all of which belong to it."""
    draft = _Draft(group)
    for record in records:
        assert record.key.group == group.group_id, "records of one group"
        draft.apply(record)
    return draft.finish()


class _Parts(Generic[K, V]):
    """One map of a group, copied on the first write; the same object if nothing was written (copy on write)."""

    __slots__ = ("_before", "_copy")

    def __init__(self, before: Map[K, V]) -> None:
        self._before = before
        self._copy: MapMutation[K, V] | None = None

    def get(self, key: K) -> V | None:
        return (self._before if self._copy is None else self._copy).get(key)

    def put(self, key: K, value: V) -> None:
        if self._copy is None:
            self._copy = self._before.mutate()
        self._copy[key] = value

    def drop(self, key: K) -> None:
        if self._copy is None:
            if key not in self._before:
                return
            self._copy = self._before.mutate()
        self._copy.pop(key, None)

    def finish(self) -> Map[K, V]:
        return self._before if self._copy is None else self._copy.finish()


def _set_fence(fences: _Parts[int, FenceValue], record: GroupRecord) -> None:
    if isinstance(record.value, FenceValue):
        fences.put(record.key.producer_id, record.value)
    else:
        fences.drop(record.key.producer_id)


def _set_open(producers: _Parts[int, tuple[str, ...]], producer_id: int, group_id: str, *, is_open: bool) -> None:
    groups = producers.get(producer_id) or ()
    if (group_id in groups) == is_open:
        return
    if is_open:
        producers.put(producer_id, tuple(sorted((*groups, group_id))))
    elif len(groups) == 1:
        producers.drop(producer_id)
    else:
        producers.put(producer_id, tuple(each for each in groups if each != group_id))


class _Draft:
    """A group that is being changed: one copy of a map for all the records of a batch."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.info = group.info
        self.classic = group.classic
        self.members = _Parts(group.members)
        self.targets = _Parts(group.targets)
        self.currents = _Parts(group.currents)
        self.owners = _Parts(group.owners)
        self.instances = _Parts(group.instances)
        self.offsets = _Parts(group.offsets)
        self.pending = _Parts(group.pending)
        self.unstable = _Parts(group.unstable)
        self.touched_producers: dict[int, None] = {}
        """Producers whose pending offsets were set or dropped."""

    def apply(self, record: GroupRecord) -> None:
        key, value = record.key, record.value
        if key.kind == Kind.OFFSET:
            assert key.partition is not None, "the key of an offset names its partition"
            if isinstance(value, OffsetValue):
                self.offsets.put(key.partition, value)
            else:
                self.offsets.drop(key.partition)
        elif key.kind == Kind.PENDING:
            self._set_pending(key, value if isinstance(value, PendingValue) else None)
        elif key.kind == Kind.CURRENT:
            self._set_current(key.member_id, value if isinstance(value, CurrentValue) else None)
        elif key.kind == Kind.TARGET:
            if isinstance(value, TargetValue):
                self.targets.put(key.member_id, value)
            else:
                self.targets.drop(key.member_id)
        elif key.kind == Kind.MEMBER:
            self._set_member(key.member_id, value if isinstance(value, MemberValue) else None)
        elif key.kind == Kind.GROUP:
            self.info = value if isinstance(value, GroupValue) else None
        elif key.kind == Kind.CLASSIC:
            self.classic = value if isinstance(value, ClassicValue) else None

    def _set_pending(self, key: Key, value: PendingValue | None) -> None:
        partition, producer_id = key.partition, key.producer_id
        assert partition is not None, "the key of a pending offset names its partition"
        held = self.pending.get(producer_id) or PendingOffsets()
        former = held.offsets.get(partition)
        if former is None and value is None:
            return
        self.touched_producers[producer_id] = None
        producers = self.unstable.get(partition) or ()
        size = held.size if former is None else held.size - pending_size(key.group, former.metadata)
        if value is not None:
            size += pending_size(key.group, value.metadata)
            self.pending.put(producer_id, PendingOffsets(held.offsets.set(partition, value), size))
            if former is None:
                self.unstable.put(partition, tuple(sorted((*producers, producer_id))))
            return
        if len(held.offsets) == 1:
            self.pending.drop(producer_id)
        else:
            self.pending.put(producer_id, PendingOffsets(held.offsets.delete(partition), size))
        if len(producers) == 1:
            self.unstable.drop(partition)
        else:
            self.unstable.put(partition, tuple(each for each in producers if each != producer_id))

    def _set_member(self, member_id: str, value: MemberValue | None) -> None:
        before = self.members.get(member_id)
        if before is not None and before.instance_id and self.instances.get(before.instance_id) == member_id:
            self.instances.drop(before.instance_id)
        if value is None:
            self.members.drop(member_id)
            return
        self.members.put(member_id, value)
        if value.instance_id:
            self.instances.put(value.instance_id, member_id)

    def _set_current(self, member_id: str, value: CurrentValue | None) -> None:
        before = self.currents.get(member_id)
        after = frozenset[PartitionId]() if value is None else value.assigned | value.revoking
        if before is not None:
            for partition in (before.assigned | before.revoking) - after:
                # In the middle of replaying a compacted log, another member may have it already.
                if self.owners.get(partition) == member_id:
                    self.owners.drop(partition)
        if value is None:
            self.currents.drop(member_id)
            return
        self.currents.put(member_id, value)
        for partition in after:
            if self.owners.get(partition) != member_id:
                self.owners.put(partition, member_id)

    def finish(self) -> Group:
        return Group(
            self.group.group_id,
            info=self.info,
            members=self.members.finish(),
            targets=self.targets.finish(),
            currents=self.currents.finish(),
            owners=self.owners.finish(),
            instances=self.instances.finish(),
            offsets=self.offsets.finish(),
            classic=self.classic,
            pending=self.pending.finish(),
            unstable=self.unstable.finish(),
        )


def validate(state: CoordinatorState, *, since: CoordinatorState = EMPTY) -> None:
    """Asserts the invariants of the module's docstring, of the groups that differ from those in `since`."""
    if state.groups is since.groups and state.fences is since.fences:
        return
    for group_id, group in sorted_items(state.groups):
        if group is not since.groups.get(group_id):
            assert group.group_id == group_id, f"{group.group_id} is known as {group_id}"
            validate_group(group)
            for producer_id in group.pending:
                assert group_id in state.open.get(producer_id, ()), f"{group_id}: {producer_id} has pending offsets"
    for producer_id in sorted(state.open):
        _validate_producer(state, producer_id)


def _validate_producer(state: CoordinatorState, producer_id: int) -> None:
    groups = state.open[producer_id]
    assert groups == tuple(sorted(set(groups))), f"producer {producer_id}: {groups} are not sorted"
    held = {group_id: state.groups[group_id].pending.get(producer_id) for group_id in groups}
    values = [value for pending in held.values() if pending is not None for value in pending.offsets.values()]
    assert None not in held.values(), f"producer {producer_id} has nothing pending in one of {groups}"
    assert len({(value.epoch, value.number) for value in values}) == 1, f"producer {producer_id}: two transactions"
    size = sum(pending.size for pending in held.values() if pending is not None)
    assert size <= PENDING_BYTES_MAX, f"producer {producer_id}: {size} bytes are pending"
    fence = state.fences.get(producer_id)
    if fence is not None:
        assert values[0].epoch >= fence.epoch, f"producer {producer_id}: an offset of a fenced epoch is pending"
        assert values[0].number > fence.number, f"producer {producer_id}: an offset of an ended transaction is pending"


def validate_group(group: Group) -> None:
    group_id = group.group_id
    assert not group.has_no_records, f"{group_id}: a group of nothing"
    assert group.info is None or group.classic is None, f"{group_id}: of two kinds"
    assert set(group.members) == set(group.targets) == set(group.currents), f"{group_id}: half a member"
    if group.members:
        assert group.info is not None, f"{group_id}: members of no group"
        assert group.info.empty_since_ms == -1, f"{group_id}: has members and is empty"
    owners: dict[PartitionId, str] = {}
    for member_id, current in sorted_items(group.currents):
        _validate_current(group, member_id, current)
        for partition in current.assigned | current.revoking:
            assert partition not in owners, f"{group_id}: {partition} has two owners"
            owners[partition] = member_id
    assert dict(group.owners) == owners, f"{group_id}: owners are not those of its members"
    seen: set[PartitionId] = set()
    for member_id, target in sorted_items(group.targets):
        assert not seen & target.partitions, f"{group_id}/{member_id}: a partition in two targets"
        seen |= target.partitions
    named = {value.instance_id: member_id for member_id, value in group.members.items() if value.instance_id}
    assert dict(group.instances) == named, f"{group_id}: instances are not those of its members"
    if group.classic is not None and group.classic.members:
        names = [member.member_id for member in group.classic.members]
        assert len(set(names)) == len(names), f"{group_id}: a member twice in {names}"
        assert group.classic.leader in (*names, ""), f"{group_id}: its leader is no member"
        assert group.classic.empty_since_ms == -1, f"{group_id}: has members and is empty"
    _validate_pending(group)


def _validate_pending(group: Group) -> None:
    unstable: dict[PartitionId, tuple[int, ...]] = {}
    for producer_id in sorted(group.pending):
        pending = group.pending[producer_id]
        who = f"{group.group_id}/{producer_id}"
        assert pending.offsets, f"{who}: pending offsets of nothing"
        size = sum(pending_size(group.group_id, value.metadata) for value in pending.offsets.values())
        assert pending.size == size, f"{who}: pending offsets of {size} bytes, not of {pending.size}"
        for partition in pending.offsets:
            unstable[partition] = (*unstable.get(partition, ()), producer_id)
    assert dict(group.unstable) == unstable, f"{group.group_id}: unstable partitions are not those of its producers"


def _validate_current(group: Group, member_id: str, current: CurrentValue) -> None:
    who, target = f"{group.group_id}/{member_id}", group.targets[member_id].partitions
    assert not current.assigned & current.revoking, f"{who}: holds and gives up"
    assert current.gained <= current.assigned, f"{who}: gained what it has not"
    assert current.epoch <= group.epoch, f"{who}: ahead of its group"
    assert current.previous_epoch <= group.epoch, f"{who}: was ahead of its group"
    if current.epoch == group.epoch and not (current.is_joining or group.members[member_id].is_classic):
        assert current.assigned <= target, f"{who}: in the newest epoch it keeps what its target lacks"
        assert not current.revoking & target, f"{who}: in the newest epoch it gives up what its target has"
