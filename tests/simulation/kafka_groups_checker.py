"""What must hold of groups whose members speak the Kafka API, beside the properties of `groups_checker`.

generation       of a classic group, each partition has one owner in a generation, and a member gets what the
                 committed record of that generation says
zombie           a commit of a member that was replaced, or of a former generation, is refused
static           a static member that returns in its session has its assignment, in the same generation
expiry           an offset is removed only from a group without members: when the group has been empty and the
                 offset unchanged for the retention time, or when somebody has asked for it
late             a commit whose sender has given it up may still be stored: the protocol does not order connections.
                 It may be lower than a later one of the same member, but not of another generation
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from simulation.groups_checker import GroupsChecker, Holding, Life
from tidelog.coordinator.consumer_protocol import parse_assignment
from tidelog.coordinator.records import ClassicValue, GroupRecord, Kind
from tidelog.coordinator.state import CoordinatorState, Group, apply
from tidelog.model.errors import ErrorCode
from tidelog.model.ids import PartitionId

if TYPE_CHECKING:
    from simulation.broker_checker import Fail

CLASSIC, CONSUMER = "classic", "consumer"
RETENTION_MS = 60_000


@dataclass(slots=True, eq=False)
class KafkaLife(Life):
    """One consumer of the Kafka API, from its making to its end."""

    protocol: str = CLASSIC
    instance_id: str = ""
    own_id: str = ""
    generation: int = -1
    """Or its member epoch."""
    committed: dict[PartitionId, int] = field(default_factory=dict)

    @property
    def member_id(self) -> str:
        return self.own_id

    def is_current(self, group: Group) -> bool:
        """A classic member that has not heard of its next generation, or epoch, holds what it had before."""
        current = group.currents.get(self.own_id)
        return self.protocol == CONSUMER or (current is not None and current.epoch == self.generation)


@dataclass(slots=True, eq=False)
class SentCommit:
    """Without a response so far."""

    life: KafkaLife
    member_id: str
    generation: int
    offsets: dict[PartitionId, int]
    is_replaced: bool
    """Somebody else had its place, or there was a later generation, when it was sent."""


class KafkaGroupsChecker:
    def __init__(self, groups: GroupsChecker, fail: Fail, now_ms: Callable[[], int]) -> None:
        """`now_ms` is the latest wall-clock time of any broker."""
        self.zombies = self.generations = self.expired = self.deleted = self.conversions = 0
        self.asked: set[str] = set()
        """Groups of which somebody has asked to delete offsets."""
        self._groups = groups
        self._fail = fail
        self._now_ms = now_ms
        self._assigned: dict[tuple[str, int], dict[str, frozenset[tuple[str, int]]]] = {}
        """By group and generation: what the committed record gives to each member."""
        self._owners: dict[tuple[str, int, PartitionId], str] = {}
        """By group, generation and partition: the member, or its instance id."""
        self._sent: list[SentCommit] = []

    # The log.

    def note(self, before: CoordinatorState, records: Sequence[GroupRecord], at: int) -> None:
        """One of the records of a committed batch, which changes the state `before`."""
        key, value = records[at].key, records[at].value
        if key.kind == Kind.CLASSIC and isinstance(value, ClassicValue) and value.members:
            self.generations += 1
            self._assigned[key.group, value.generation] = {
                member.member_id: frozenset(
                    (topic, number)
                    for topic, numbers in parse_assignment(member.assignment).partitions
                    for number in numbers
                )
                for member in value.members
            }
        elif key.kind in (Kind.CLASSIC, Kind.GROUP) and value is None:
            former = before.group(key.group)
            self.conversions += former is not None and former.member_count > 0  # of the other kind from now on
        elif key.kind == Kind.OFFSET and key.partition is not None and value is None:
            self._removed(key.group, key.partition, apply(before, records[:at]).group(key.group))

    def _removed(self, group_id: str, partition: PartitionId, group: Group | None) -> None:
        if group is None or partition not in group.offsets:
            return
        what = f"expiry: the offset {group.offsets[partition].offset} of {partition.partition} of {group_id} is removed"
        if group.member_count:
            self._fail(group_id, f"{what}, and the group has {group.member_count} members")
        horizon = self._now_ms() - RETENTION_MS
        if group_id in self.asked:
            self.deleted += 1
        elif max(group.empty_since_ms, group.offsets[partition].commit_ms) > horizon:
            self._fail(group_id, f"{what} before its time")
        else:
            self.expired += 1
        self._groups.forget_offset(group_id, partition)

    # Members.

    def joined(self, life: KafkaLife, partitions: Sequence[PartitionId], names: Iterable[tuple[str, int]]) -> None:
        """A classic member has got its assignment."""
        group = self._groups.group(life.group)
        stored = self._assigned.get((life.group, life.generation), {}).get(life.member_id)
        if stored is not None and stored != frozenset(names):
            self._fail(life.name, f"generation {life.generation}: has got {sorted(names)}, {sorted(stored)} is stored")
        is_consumer = group is not None and life.member_id in group.members
        if stored is None and not is_consumer and partitions:
            self._fail(life.name, f"generation {life.generation}: has got {sorted(names)}, and nothing is stored")
        for partition in partitions:
            owner = life.instance_id or life.member_id
            if stored is not None:
                first = self._owners.setdefault((life.group, life.generation, partition), owner)
                if first != owner:
                    what = f"one owner: generation {life.generation} gives {partition.partition} to {first}"
                    self._fail(life.name, f"{what} and to {owner}")
            life.holdings[partition] = Holding()

    def revoked(self, life: KafkaLife) -> None:
        """A classic member gives up, or has lost, all that it had."""
        life.holdings.clear()
        life.fetched.clear()

    # Commits.

    def sends(self, life: KafkaLife, offsets: dict[PartitionId, int]) -> SentCommit:
        self._groups.commits_offsets(life, offsets)
        sent = SentCommit(
            life, life.member_id, life.generation, offsets, is_replaced(self._groups.group(life.group), life)
        )
        self._sent.append(sent)
        return sent

    def answered(self, sent: SentCommit, codes: dict[PartitionId, ErrorCode | None]) -> None:
        self._sent.remove(sent)
        done = {partition: offset for partition, offset in sent.offsets.items() if codes[partition] is None}
        if sent.is_replaced:
            self.zombies += 1
            if done:
                what = f"zombie: its commit in generation {sent.generation} is accepted"
                self._fail(sent.life.name, f"{what}, and {sent.member_id} was replaced before")
        self._groups.acked_offsets(sent.life, done)

    def is_unanswered(self, where: tuple[str, PartitionId], offset: int) -> bool:
        group = self._groups.group(where[0])
        for sent in self._sent:
            if sent.life.group != where[0] or sent.offsets.get(where[1]) != offset or sent.is_replaced:
                continue
            classic = None if group is None else group.classic
            if classic is None or classic.generation <= sent.generation or any(m.epoch >= 0 for m in classic.members):
                return True
        return False


def is_replaced(group: Group | None, life: KafkaLife) -> bool:
    """Whether the committed log says so: then no coordinator may accept a commit of it that is sent from now on."""
    if group is None or not life.own_id:
        return False
    if group.classic is not None:
        for member in group.classic.members:
            if member.member_id == life.member_id:
                present = member.epoch if member.epoch >= 0 else group.classic.generation
                return life.generation < present
        return True
    current = group.currents.get(life.member_id)
    if current is None:
        return group.info is not None
    return 0 <= life.generation < (current.previous_epoch if current.previous_epoch >= 0 else current.epoch)
