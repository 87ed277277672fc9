"""What must hold of consumer groups. Three views: the committed log of the groups, what goes over the wire, and what
members' programs receive.

    replayed = lived      whatever a coordinator shows as committed lies below the high watermark of its log, and is
                          what the records there make (C6)
    one owner             a partition that a member holds, from its `assigned` to the end of its `revoked`, belongs to
                          it in the committed state as long as it is a member; nobody else holds it meanwhile
    decided               what a member is assigned was given to it by a committed record
    unmoved               a partition is revoked only if some committed target of the member lacked it
    inconsistent-offsets  a fetch of offsets never tells less than what was acknowledged before it was asked, nor what
                          no committed record says; a stored offset never lies below an acknowledged one
    ahead                 nothing is committed that the program has not come back for (C5)
    nonmonotonic-poll     within a holding offsets rise
    poll-skip             within a holding none is left out, and it begins where the fetched offset says
    duplicate             no record below the acknowledged offset is given out again; none is stored twice
    expiry                an offset is removed only from a group without members, when its time is over or an operator
                          has asked for it (`kafka_groups_checker`, where runs have that)
    unseen                in the end every stored record was processed by every group
    lost-write            what was acknowledged is stored (`broker_checker`)

A member that is out of its group, or whose process is gone, holds nothing. Checks draw no random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

from simulation.broker_checker import Fail, ReplicaChecker
from tidelog.client.record import TopicPartition
from tidelog.coordinator.hashing import partition_for
from tidelog.coordinator.partition_shard import Phase
from tidelog.coordinator.records import CurrentValue, GroupRecord, Kind, OffsetValue, TargetValue, decode_batch
from tidelog.coordinator.shard import Shard
from tidelog.coordinator.state import EMPTY, CoordinatorState, Group, apply, validate
from tidelog.log.batch import read_header
from tidelog.model.errors import TidelogError
from tidelog.model.ids import PartitionId, TopicId

if TYPE_CHECKING:
    from simulation.broker_node import BrokerApp
    from simulation.kafka_groups_checker import KafkaGroupsChecker

READ_BYTES = 1 << 24


class GivenRecord(Protocol):
    """A record that a program has got, by whichever API."""

    @property
    def topic(self) -> str: ...

    @property
    def partition(self) -> int: ...

    @property
    def offset(self) -> int: ...

    @property
    def value(self) -> Any: ...


@dataclass(slots=True)
class Holding:
    """A partition, from `assigned` to `revoked` or `lost`."""

    next_offset: int = -1
    """-1: nothing was given out yet."""


@dataclass(slots=True, eq=False)
class Life:
    """One consumer, from its making to its end."""

    name: str
    group: str
    is_static: bool
    consumer: Any = None
    holdings: dict[PartitionId, Holding] = field(default_factory=dict)
    fetched: dict[PartitionId, int] = field(default_factory=dict)
    """The committed offset that it got last; 0 where there was none."""
    reached: dict[PartitionId, int] = field(default_factory=dict)
    """Up to where the program is done, over all holdings."""
    is_closing: bool = False
    is_over: bool = False
    lost: int = 0

    @property
    def member_id(self) -> str:
        core = None if self.consumer is None else self.consumer.core
        return "" if core is None or core._membership is None else str(core._membership.member_id)

    def is_current(self, group: Group) -> bool:
        """Whether it works on what the group, of which it is a member, has last given to it."""
        return True


@dataclass(slots=True)
class Replay:
    """The committed records of one partition of the offsets topic, as far as anybody has shown them."""

    end: int = 0
    state: CoordinatorState = EMPTY
    batches: int = 0


class GroupsChecker:
    def __init__(self, replicas: ReplicaChecker, fail: Fail) -> None:
        self.lives: list[Life] = []
        self.replays: dict[int, Replay] = {}
        self.processed: dict[str, dict[PartitionId, set[int]]] = {}
        """By group."""
        self.given_out = self.commits = self.fetches = self.moves = 0
        self.offsets_partitions = 1
        self._replicas = replicas
        self._fail = fail
        self._floor: dict[tuple[str, PartitionId], int] = {}
        """The largest offset whose commit was acknowledged."""
        self._stored: dict[tuple[str, PartitionId], set[int]] = {}
        """Every offset that a committed record has."""
        self._granted: dict[str, set[PartitionId]] = {}
        """What was ever given to a member."""
        self._untargeted: set[tuple[str, PartitionId]] = set()
        """Members and what a target of theirs lacked, since it was last given to them."""
        self._looked: dict[Shard, CoordinatorState] = {}
        self._valid: dict[int, CoordinatorState] = {}
        """The last valid state of each partition of the offsets topic: only what differs from it is validated."""
        self._names: dict[TopicPartition, PartitionId] = {}
        self.find_partitions: Callable[[], None] = lambda: None
        """Adds those that there are by now."""
        self.kafka: KafkaGroupsChecker | None = None
        """In runs with groups of the Kafka API."""

    def add_partition(self, topic: str, partition: PartitionId) -> None:
        self._names[TopicPartition(topic, partition.partition)] = partition

    def group(self, group_id: str) -> Group | None:
        """As it is committed."""
        replay = self.replays.get(partition_for(group_id, self.offsets_partitions))
        return None if replay is None else replay.state.group(group_id)

    def running(self, group_id: str) -> list[Life]:
        return [life for life in self.lives if life.group == group_id and not life.is_over]

    # The coordinators.

    def look(self, app: BrokerApp) -> None:
        for number, shard in app.coordinator.shards.items():
            if shard.phase is not Phase.LEADING:
                continue
            state = shard.state
            if self._looked.get(shard) is not state:
                self._looked[shard] = state
                self._committed(app, number, shard)

    def _committed(self, app: BrokerApp, number: int, shard: Shard) -> None:
        replay = self.replays.setdefault(number, Replay())
        applied = int(shard.runtime.applied)
        if applied > shard.leader.high_watermark:
            self._fail(
                app.name,
                f"groups of partition {number}: shows what is not committed, {applied} of a log that is committed up "
                f"to {shard.leader.high_watermark}",
            )
        while replay.end < applied:
            try:
                found = shard.leader.log.read_nowait(replay.end, bytes_max=READ_BYTES, end=applied)
            except TidelogError as error:
                self._fail(app.name, f"groups of partition {number} cannot be read at {replay.end}: {error}")
                return
            if found is None or not found.data:
                self._fail(app.name, f"groups of partition {number}: {replay.end} to {applied} are not in memory")
                return
            self.feed(number, bytes(found.data))
        if replay.end != applied:
            return  # of a coordinator that is behind another one
        if replay.state != shard.state:
            self._fail(
                app.name,
                f"groups of partition {number} at {applied}: the state is not what its records make: "
                f"{_difference(shard.state, replay.state)}",
            )
        try:
            validate(shard.state, since=self._valid.get(number, EMPTY))
            self._valid[number] = shard.state
        except AssertionError as error:
            self._fail(app.name, f"groups of partition {number} at {applied}: {error}")

    def feed(self, number: int, data: bytes) -> None:
        """Committed batches, in order."""
        replay, position = self.replays[number], 0
        while position < len(data):
            header = read_header(data, position)
            before = replay.state
            records = decode_batch(data, position)
            for at, record in enumerate(records):
                self._note(record)
                if self.kafka is not None:
                    self.kafka.note(before, records, at)
            replay.state = apply(before, records)
            replay.batches += 1
            replay.end = int(header.next_offset)
            position += header.size
            for group_id in sorted({record.key.group for record in records}):
                self._check_owners(group_id, replay.state.group(group_id))

    def _note(self, record: GroupRecord) -> None:
        """Several decisions may share a batch: what lies between them is sent to members as well."""
        key, value = record.key, record.value
        if key.kind == Kind.OFFSET and key.partition is not None and isinstance(value, OffsetValue):
            where = key.group, key.partition
            self._stored.setdefault(where, set()).add(value.offset)
            if value.offset < self._floor.get(where, 0) and not self._is_late(where, value.offset):
                self._fail(
                    key.group,
                    f"inconsistent-offsets: {self._name(key.partition)} of {key.group}: {self._floor[where]} was "
                    f"acknowledged, and then {value.offset} is stored",
                )
        elif key.kind == Kind.CURRENT and isinstance(value, CurrentValue):
            granted = self._granted.setdefault(key.member_id, set())
            group = self.group(key.group)
            for partition in sorted(value.assigned):
                granted.add(partition)
                if group is None or group.owners.get(partition) != key.member_id:
                    self.moves += 1
                    self._untargeted.discard((key.member_id, partition))
        elif key.kind == Kind.TARGET and isinstance(value, TargetValue):
            granted = self._granted.get(key.member_id, set())
            self._untargeted.update((key.member_id, partition) for partition in granted - value.partitions)

    def _is_late(self, where: tuple[str, PartitionId], offset: int) -> bool:
        """A commit of the Kafka API that nobody waits for any more: the protocol does not order it among others."""
        if self.kafka is None or not self.kafka.is_unanswered(where, offset):
            return False
        self._floor[where] = offset
        return True

    def forget_offset(self, group: str, partition: PartitionId) -> None:
        """It has expired, or was deleted."""
        self._floor.pop((group, partition), None)

    def _check_owners(self, group_id: str, group: Group | None) -> None:
        if group is None:
            return
        for life in self.running(group_id):
            member_id = life.member_id
            if member_id not in group.members or not life.is_current(group):
                continue
            for partition in life.holdings:
                owner = group.owners.get(partition)
                if owner != member_id:
                    self._fail(
                        life.name,
                        f"one owner: {group_id} has given {self._name(partition)} to {self._who(owner)}, and "
                        f"{life.name} ({member_id}) has not let go of it",
                    )

    def _who(self, member_id: str | None) -> str:
        names = [life.name for life in self.lives if member_id and life.member_id == member_id]
        return f"{names[0]} ({member_id})" if names else str(member_id)

    def _name(self, partition: PartitionId) -> str:
        known = self._replicas.partitions.get(partition)
        return str(known or partition)

    # The wire.

    def asks_offsets(self, life: Life, partitions: Iterable[PartitionId]) -> dict[PartitionId, int]:
        """Returns the least offsets that must be reported."""
        return {partition: self._floor.get((life.group, partition), 0) for partition in partitions}

    def check_reported_offsets(
        self, life: Life, least: dict[PartitionId, int], reported: dict[PartitionId, int]
    ) -> None:
        for partition, offset in reported.items():
            self.fetches += 1
            life.fetched[partition] = max(0, offset)
            life.reached[partition] = max(life.reached.get(partition, 0), offset)
            if offset >= 0 and offset not in self._stored.get((life.group, partition), ()):
                self._fail(
                    life.name,
                    f"inconsistent-offsets: {self._name(partition)} of {life.group}: {offset} is reported, nobody has "
                    "committed it",
                )
            if max(0, offset) < min(least[partition], self._floor.get((life.group, partition), 0)):
                self._fail(
                    life.name,
                    f"inconsistent-offsets: {self._name(partition)} of {life.group}: {least[partition]} was "
                    f"acknowledged, and then {offset} is reported",
                )

    def commits_offsets(self, life: Life, offsets: dict[PartitionId, int]) -> None:
        """A commit leaves the member."""
        for partition, offset in offsets.items():
            done = life.reached.get(partition, 0)
            if offset > done:
                self._fail(
                    life.name,
                    f"ahead: commits {offset} of {self._name(partition)}, and its program is done up to {done}",
                )

    def acked_offsets(self, life: Life, offsets: dict[PartitionId, int]) -> None:
        for partition, offset in offsets.items():
            self.commits += 1
            key = life.group, partition
            self._floor[key] = max(self._floor.get(key, 0), offset)

    # Members' programs.

    def partitions(self, names: Sequence[TopicPartition]) -> list[PartitionId]:
        if any(name not in self._names for name in names):
            self.find_partitions()
        return [self._names[name] for name in names]

    def assigned(self, life: Life, names: Sequence[TopicPartition]) -> None:
        group = self.group(life.group)
        for partition in self.partitions(names):
            if partition in life.holdings:
                self._fail(life.name, f"{self._name(partition)} is assigned, and was assigned already")
            if partition not in self._granted.get(life.member_id, ()):
                self._fail(life.name, f"decided: {self._name(partition)} is assigned, and nobody has committed that")
            life.holdings[partition] = Holding()
            if group is None or life.member_id not in group.members:
                continue  # it was frozen past its session, and goes on with what it had heard before
            for other in self.running(life.group):
                is_member = other.member_id in group.members and other.is_current(group)
                if other is not life and is_member and partition in other.holdings:
                    self._fail(
                        life.name, f"one owner: {self._name(partition)} is assigned, and {other.name} holds it still"
                    )

    def revoked(self, life: Life, names: Sequence[TopicPartition]) -> None:
        """The callback of the program has ended."""
        group = self.group(life.group)
        for partition in self.partitions(names):
            if life.holdings.pop(partition, None) is None:
                self._fail(life.name, f"{self._name(partition)} is revoked, and was not assigned")
            life.fetched.pop(partition, None)
            is_member = group is not None and life.member_id in group.members
            if is_member and not life.is_closing and (life.member_id, partition) not in self._untargeted:
                self._fail(life.name, f"unmoved: {self._name(partition)} is revoked, and every target had it")

    def lost(self, life: Life, names: Sequence[TopicPartition]) -> None:
        life.lost += 1
        for partition in self.partitions(names):
            if life.holdings.pop(partition, None) is None:
                self._fail(life.name, f"{self._name(partition)} is lost, and was not assigned")
            life.fetched.pop(partition, None)

    def gave(self, life: Life, records: Iterable[GivenRecord]) -> None:
        for record in records:
            self.given_out += 1
            partition = self._names[TopicPartition(record.topic, record.partition)]
            holding = life.holdings.get(partition)
            where = f"{self._name(partition)} of {life.group}"
            if holding is None:
                self._fail(life.name, f"{where}: offset {record.offset} is given out, and the partition is not held")
                return
            if holding.next_offset < 0:
                if record.offset < life.fetched.get(partition, 0):
                    self._fail(
                        life.name,
                        f"duplicate: {where}: {life.fetched.get(partition, 0)} is committed, {record.offset} is given",
                    )
                holding.next_offset = life.fetched.get(partition, 0)
            if record.offset < holding.next_offset:
                self._fail(life.name, f"nonmonotonic-poll: {where}: {record.offset} after {holding.next_offset - 1}")
            elif record.offset > holding.next_offset:
                self._fail(life.name, f"poll-skip: {where}: {record.offset}, and {holding.next_offset} is due")
            holding.next_offset = record.offset + 1
            known = self._replicas.partitions[partition]
            self._replicas._record(life.name, known, record.offset, record.value)

    def done(self, life: Life, records: Iterable[GivenRecord]) -> None:
        """The program has processed them."""
        processed = self.processed.setdefault(life.group, {})
        for record in records:
            partition = self._names[TopicPartition(record.topic, record.partition)]
            processed.setdefault(partition, set()).add(record.offset)
            life.reached[partition] = max(life.reached.get(partition, 0), record.offset + 1)

    def ended(self, life: Life) -> None:
        life.is_over = True
        life.holdings.clear()

    # The end.

    def check_end(self, groups: Iterable[str], ends: dict[PartitionId, int]) -> None:
        for group in groups:
            processed = self.processed.get(group, {})
            for partition, end in ends.items():
                missing = set(range(end)) - processed.get(partition, set())
                if missing:
                    self._fail("end", f"unseen: {self._name(partition)} of {group}: {sorted(missing)[:5]} of {end}")

    def check_replay(self, who: str, number: int, data: bytes, state: CoordinatorState, end: int) -> None:
        """The log of a partition of the offsets topic, against the state that who coordinates it had when it had
        applied everything below `end`."""
        replayed, position = EMPTY, 0
        while position < len(data) and read_header(data, position).base_offset < end:
            replayed = apply(replayed, decode_batch(data, position))
            position += read_header(data, position).size
        if replayed != state:
            self._fail(who, f"groups of partition {number}, replayed: {_difference(state, replayed)}")


def has_all(processed: dict[PartitionId, set[int]], ends: dict[PartitionId, int]) -> bool:
    return all(len(processed.get(partition, ())) >= end for partition, end in ends.items())


def _difference(lived: CoordinatorState, replayed: CoordinatorState) -> str:
    for group_id in sorted({*lived.groups, *replayed.groups}):
        one, other = lived.group(group_id), replayed.group(group_id)
        if one is None or other is None:
            return f"{group_id}: {'not lived' if one is None else 'not replayed'}"
        for name in ("info", "members", "targets", "currents", "owners", "offsets"):
            if getattr(one, name) != getattr(other, name):
                return f"{group_id}: {name} {getattr(one, name)} lived, {getattr(other, name)} replayed"
    return "equal groups"


def topic_partition(topic_id: bytes, number: int) -> PartitionId:
    return PartitionId(TopicId(UUID(bytes=topic_id)), number)
