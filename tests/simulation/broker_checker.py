"""What must hold of replicated partitions. Two views: what clients are answered, and what replicas hold.

    one leader       a leader epoch of a partition is led by one incarnation of one broker
    high watermark   as a role sees it, it never moves back; a leader that has confirmed its epoch is not behind an
                     acks=all acknowledgement of this or an earlier epoch; a client never gets an older one than it,
                     or an acknowledgement that it got, knew when it asked
    damage           a damaged log is cut only when its replica is neither in sync nor eligible, or elected after that
    open             who is elected cleanly has its log open; who is marked as recovering neither leads nor follows
    equal            replicas have, below their high watermarks, the same batches byte for byte
    deleted          a log begins where somebody has asked for it, and never before the start that was answered
    committed        whatever two clients read at an offset is the same, and lies below its high watermark
    acknowledged     with acks=all: readable at the offset that was returned, exactly once, in the order of its producer
    once             no value of an idempotent producer is stored twice, whatever its acks
    epochs           replicas name the same epoch for every offset
    compacted        replicas keep some of the same records: whatever two of them, or two clients, have at an offset is
                     the same. Every replica, and every complete read (`compacted_reads`), has of each key the latest
                     acknowledged record or a later one; a key is gone only if it was deleted, and does not come back

Where a topic allows unclean election the promises are weaker: there only the first, and that replicas end equal, hold.
Checks draw no random numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

from support.brokers.compacted_history import CompactedHistory, Pair, pairs_of

from simulation.metadata_checker import MetadataChecker
from simulation.product_shape import RETAINED_PREFIXES
from simulation.replica_shadow import ReplicaShadows
from tidelog.log.batch import check_batch, decode, read_header
from tidelog.log.log import Log
from tidelog.metadata.image import ClusterImage, Partition
from tidelog.metadata.partition_changes import can_serve
from tidelog.model.errors import TidelogError
from tidelog.model.ids import PartitionId, TopicId
from tidelog.raft.messages import Entry
from tidelog.replication.leader_replica import LeaderReplica

if TYPE_CHECKING:
    from simulation.broker_node import BrokerApp
    from tidelog.replication.replica import Replica

Fail = Callable[[str, str], None]
Content = bytes | Pair
"""Of a record: its value; in a compacted topic its key and value."""
LARGEST = 1 << 24
UNCLEAN_PREFIX, COMPACTED_PREFIX, GROUPED_PREFIX = "unclean", "compacted", "grouped"
"""Names of topics that allow unclean election, that are compacted, that consumer groups read, begin so."""


@dataclass(slots=True, eq=False)
class KnownTopic:
    """A topic as its maker knows it."""

    name: str
    topic_id: UUID
    partitions: int
    min_isr: int
    delete_asked: bool = False
    is_cached: bool = False
    """Its records may be acknowledged before they are synced (`flush.mode=page-cache`)."""
    tries_left: int = 0
    """How often clients go on with it when it is deleted."""

    def is_left(self) -> bool:
        """Whether a client that is about to send a request gives the topic up; each question counts."""
        if self.delete_asked and self.tries_left:
            self.tries_left -= 1
            return False
        return self.delete_asked

    @property
    def is_retained(self) -> bool:
        return self.name.startswith(RETAINED_PREFIXES)

    @property
    def is_unclean(self) -> bool:
        return self.name.startswith(UNCLEAN_PREFIX)

    @property
    def is_compacted(self) -> bool:
        return self.name.startswith(COMPACTED_PREFIX)

    @property
    def is_grouped(self) -> bool:
        return self.name.startswith(GROUPED_PREFIX)


@dataclass(slots=True, eq=False)
class KnownPartition:
    """One partition, as clients and replicas together have shown it."""

    topic: KnownTopic
    partition_id: PartitionId
    records: list[Content | None] = field(default_factory=list)
    """By offset, as clients have read them; None where nobody has. Of a compacted topic also as replicas have them."""
    acked: dict[int, Content] = field(default_factory=dict)
    """By offset: acknowledged with acks=all."""
    stored: set[Content] = field(default_factory=set)
    """Acknowledged with acks=all as a duplicate, without an offset."""
    history: CompactedHistory | None = None
    """Of a compacted topic."""
    floor: int = 0
    """The end of what was acknowledged with acks=all."""
    floor_epoch: int = -1
    batches: list[tuple[int, bytes]] = field(default_factory=list)
    """What replicas have shown below their high watermarks: base offset and bytes, without gaps from 0 on."""
    end: int = 0
    """Of `batches`."""
    high_watermark: int = 0
    """The highest that a replica has had; what lies between `end` and it has not been read yet."""
    deleting: int = 0
    """Records below may be deleted: somebody has asked for it."""
    deleted: int = 0
    """Records below are: a client has got that answer."""
    sent_s: dict[Content, float] = field(default_factory=dict)
    """By value: when it was sent first."""
    first_at: dict[Content, int] = field(default_factory=dict)
    """By value: the first offset at which replicas have shown it."""
    is_forgiven: bool = False
    """An operator has had a leader elected that may lack records."""

    @property
    def is_unclean(self) -> bool:
        return self.is_forgiven or self.topic.is_unclean

    def __str__(self) -> str:
        return f"{self.topic.name}-{self.partition_id.partition}"


def sound_batches(data: bytes | memoryview) -> Iterator[tuple[int, int, bytes]]:
    """(base offset, next offset, bytes) of whole batches, up to the first that its CRC does not fit."""
    position, data = 0, bytes(data)
    while position < len(data):
        try:
            header = check_batch(data, position, size_max=LARGEST)
        except TidelogError:
            return
        yield int(header.base_offset), int(header.next_offset), data[position : position + header.size]
        position += header.size


def _from_offset(data: bytes, start: int) -> bytes:
    """The batches that have records from `start` on."""
    return b"".join(batch for _, following, batch in sound_batches(data) if following > start)


def is_sound(data: bytes) -> bool:
    """Whether the CRC of every batch fits."""
    return sum(len(batch) for _, _, batch in sound_batches(data)) == len(data)


def records_of(data: bytes, *, is_compacted: bool = False) -> list[tuple[int, Any, int]]:
    """(offset, content, leader epoch) of all records."""
    found: list[tuple[int, Any, int]] = []
    position = 0
    while position < len(data):
        header = read_header(data, position)
        records = decode(data, position, decompressed_bytes_max=LARGEST)
        epoch = int(header.leader_epoch)
        if header.is_control:
            found += [(int(record.offset), b"marker/%d" % record.offset, epoch) for record in records]
        elif is_compacted:
            found += [(int(record.offset), (record.key, record.value), epoch) for record in records]
        else:
            found += [(int(record.offset), record.value or b"", epoch) for record in records]
        position += header.size
    return found


class ClusterChecker(MetadataChecker):
    """As its base, but where a topic allows it, or an operator asks for it, a leader may come from outside of the
    in-sync set."""

    def __init__(self, history: list[Entry], fail: Fail, on_unclean: Callable[[UUID, int], None]) -> None:
        """`on_unclean` is called with a topic and a partition for which such an election was asked, when it is done."""
        super().__init__(history, fail)
        self.asked_unclean: set[tuple[UUID, int]] = set()
        """(topic, partition)."""
        self._on_unclean = on_unclean
        self.on_unassigned: Callable[[int, PartitionId], None] = lambda _broker, _partition_id: None
        """Called with a broker that is no replica of a partition any more."""

    def _check_partition(
        self, newer: ClusterImage, topic_id: UUID, number: int, before: Partition | None, now: Partition
    ) -> None:
        topic = self.image.topics.get(topic_id)
        self._check_drained(newer, f"{topic_id}-{number}", before, now)
        for broker in () if before is None else sorted(set(before.replicas).difference(now.replicas)):
            self.on_unassigned(broker, PartitionId(TopicId(topic_id), number))
        is_asked = (topic_id, number) in self.asked_unclean
        if is_asked and before is not None and now.unclean_epoch > before.unclean_epoch:
            self._on_unclean(topic_id, number)
        if before is not None and topic is not None and (is_asked or topic.name.startswith(UNCLEAN_PREFIX)):
            if now.partition_epoch <= before.partition_epoch or now.leader_epoch < before.leader_epoch:
                self._fail("log", f"{topic_id}-{number}: epochs do not rise from {before} to {now}")
            return
        super()._check_partition(newer, topic_id, number, before, now)

    def _check_drained(self, image: ClusterImage, who: str, before: Partition | None, now: Partition) -> None:
        """Who is drained gets no new partition, and leads nothing new that another replica in sync can lead."""
        drained = {number for number, broker in image.brokers.items() if broker.draining}
        if before is None and drained.intersection(now.replicas):
            self._fail("log", f"{who} is placed on {now.replicas}, of which {sorted(drained)} are drained")
        if before is None or now.leader == before.leader or now.leader not in drained:
            return
        able = [broker for broker in now.isr if broker not in drained and can_serve(image, now, broker)]
        if able:
            self._fail("log", f"{who}: broker {now.leader}, which is drained, is elected; {able} could lead")


class ReplicaChecker:
    """Looks at a broker after each of its events; what has not changed since costs next to nothing."""

    def __init__(self, fail: Fail, committed: Callable[[PartitionId], Partition | None]) -> None:
        """`committed` gives a partition as the newest committed metadata have it."""
        self._committed = committed
        self.partitions: dict[PartitionId, KnownPartition] = {}
        self.acknowledged = 0
        self.reads = 0
        self.compared = 0
        self.compacted_away = 0
        """Records that replicas of compacted topics do not have any more at the end."""
        self.now_s: Callable[[], float] = lambda: 0.0
        """True time."""
        self.expiry_s = 0.0
        """After so long a log may forget an idle producer, and store twice what it repeats; 0: never."""
        self.clocks_jump = False
        """The wall clocks of this run jump: a record may be too far from the clock of its broker to be taken."""
        self.writers: dict[bytes, KnownPartition] = {}
        """Where the producers of a name write; not of all clients."""
        self.repeated = 0
        """Values that were stored again after that."""
        self._fail = fail
        self._leaders: dict[tuple[PartitionId, int], tuple[LeaderReplica, str]] = {}
        """Of each leader epoch: the one role that leads it, and on which broker."""
        self._compared: dict[tuple[str, int, PartitionId], tuple[Log, int]] = {}
        self.on_committed: Callable[[str, KnownPartition, bytes], None] = lambda _who, _known, _batch: None
        """Called with each batch of a partition when a replica first shows it as committed."""
        self.shadows = ReplicaShadows(fail, committed, self.partitions)
        self._damaged: dict[Replica, Log] = {}
        """Replicas whose logs were damaged when they were looked at last."""

    def add(self, topic: KnownTopic, *, first: int = 0) -> list[KnownPartition]:
        """Its partitions from `first` on: all, or those that were added."""
        made = []
        for number in range(first, topic.partitions):
            partition_id = PartitionId(topic.topic_id, number)  # type: ignore[arg-type]
            made.append(KnownPartition(topic, partition_id, history=CompactedHistory() if topic.is_compacted else None))
            self.partitions[partition_id] = made[-1]
        return made

    # What replicas hold.

    def look(self, app: BrokerApp) -> None:
        if app.logs.recovering:
            self._check_recovering(app)
        looked = app.looked
        known = looked.get
        for replica in app.replicas.all():
            role = replica.role
            if role is None:  # as of every replica whose log is damaged
                if replica.log is not None and (replica.log.damaged is not None or self._damaged):
                    self._check_damage(app, replica, replica.log)
                continue
            state = role.state
            high_watermark, durable_end = state.high_watermark, state.durable_end
            before = known(replica)  # by identity: a partition's id takes long to hash
            if before is None or before[0] is not role or before[1] != high_watermark:
                looked[replica] = (role, high_watermark, durable_end)
                self._changed(app, replica, before)
            elif before[2] != durable_end:
                looked[replica] = (role, high_watermark, durable_end)
                self.shadows.note_announced(app, replica)

    def _check_recovering(self, app: BrokerApp) -> None:
        """Logs that are not open yet: the controller must not have elected them, in this life of the broker."""
        image, me = app.tail.image, app.agent.broker
        mine = image.brokers.get(me)
        if mine is None or mine.incarnation != app.agent.registration.incarnation:
            return
        for partition_id, known in self.partitions.items():
            if known.is_unclean or not app.logs.is_recovering(partition_id):
                continue
            partition = image.partition(partition_id.topic_id, partition_id.partition)
            if partition is not None and me in (partition.leader, *partition.isr):
                self._fail(app.name, f"{known} is elected or in sync here, and its log is not open: {partition}")

    def _check_damage(self, app: BrokerApp, replica: Replica, log: Log) -> None:
        """A damaged log that is cut has less than was acknowledged: its replica must not count as one that has it."""
        if log.damaged is not None:
            self._damaged[replica] = log
            return
        known, me = self.partitions.get(replica.partition_id), app.agent.broker
        if self._damaged.pop(replica, None) is not log or known is None or known.is_unclean:
            return
        partition = self._committed(replica.partition_id)
        if partition is None or (partition.leader == me and partition.unclean_epoch == partition.leader_epoch):
            return
        if me in (partition.leader, *partition.isr, *partition.eligible):
            self._fail(app.name, f"{known} was damaged and is cut to {log.end_offset}, and counts: {partition}")

    def _changed(self, app: BrokerApp, replica: Replica, before: tuple[object, int, int] | None) -> None:
        role = replica.role
        assert role is not None
        known = self.partitions.get(replica.partition_id)
        if role.log.durable_end > role.log.end_offset:
            self._fail(app.name, f"{known} counts as synced up to {role.log.durable_end}, and ends before that")
        try:
            role.state.validate()
        except AssertionError as error:
            self._fail(app.name, f"{known}: {error}")
            return
        self.shadows.look(app, replica)
        if app.agent.broker in replica.partition.recovering:
            self._fail(app.name, f"{known} has a role, and is marked as recovering: {replica.partition}")
        if isinstance(role, LeaderReplica):
            led, by = self._leaders.setdefault((replica.partition_id, role.leader_epoch), (role, app.name))
            if led is not role:
                self._fail(app.name, f"{known} is led in epoch {role.leader_epoch}, which {by} has led before")
            if before is not None and before[0] is role and before[1] > role.high_watermark:
                self._fail(
                    app.name, f"the high watermark of {known} moves back from {before[1]}: {role.high_watermark}"
                )
        if known is None or known.is_unclean:
            return
        if isinstance(role, LeaderReplica):
            self._check_floor(app, known, role)
            self.shadows.advanced(app, role)
        if before is None or before[0] is not role:
            self._check_in_sync(app, known, role.log)
        self._compare(app, known, role.log, role.high_watermark)

    def _check_floor(self, app: BrokerApp, known: KnownPartition, role: LeaderReplica) -> None:
        state = role.state
        if state.is_confirmed and role.leader_epoch >= known.floor_epoch and state.high_watermark < known.floor:
            self._fail(
                app.name,
                f"{known} is led in epoch {role.leader_epoch} and confirmed up to {state.high_watermark}, but "
                f"{known.floor} was acknowledged in epoch {known.floor_epoch}",
            )

    def _check_in_sync(self, app: BrokerApp, known: KnownPartition, log: Log) -> None:
        """A replica that is in sync when it takes a role has all that was acknowledged."""
        partition = self._committed(known.partition_id)
        end = log.end_offset if known.topic.is_cached else log.durable_end
        if partition is not None and app.agent.broker in partition.isr and end < known.floor:
            self._fail(app.name, f"{known} is in sync here and ends at {end}; {known.floor} was acknowledged")

    def _compare(self, app: BrokerApp, known: KnownPartition, log: Log, end: int) -> None:
        """What this replica has newly come to know as committed."""
        known.high_watermark = max(known.high_watermark, end)
        key = (app.name, app.context.node.incarnation, known.partition_id)
        compared_log, start = self._compared.get(key, (log, 0))
        if compared_log is not log:
            start = 0
        if known.deleting:
            start = max(start, log.start_offset)
        if start >= end or log.is_changing or log.is_closed or log.start_offset > start:
            return
        try:
            found = log.read_nowait(start, bytes_max=LARGEST, end=end)
        except TidelogError:
            return  # rot; what it serves is checked where it is served
        if found is None:
            return  # not in memory: another time, or at the end
        for base, following, batch in sound_batches(found.data):
            if known.history is None:
                self.compare_batch(app.name, known, base, following, batch)
            else:
                self.compare_records(app.name, known, batch)
            start = following
        self._compared[key] = (log, start)

    def compare_batch(self, who: str, known: KnownPartition, base: int, following: int, batch: bytes) -> None:
        self.compared += 1
        if base == known.end or known.end < base <= known.deleting:
            known.batches.append((base, batch))
            known.end = following
            self.on_committed(who, known, batch)
            self._check_once(who, known, batch)
            return
        if base > known.end:
            self._fail(
                who, f"{known}: a batch at {base} is committed, and nobody has had what lies from {known.end} on"
            )
            return
        at = bisect_left(known.batches, (base, b""))
        there = known.batches[at] if at < len(known.batches) else None
        if base < known.deleting and there is not None and there[0] != base:
            # When the others were looked at, they did not have it any more.
            before = read_header(known.batches[at - 1][1]).next_offset if at else 0
            if before <= base and following <= there[0]:
                known.batches.insert(at, (base, batch))
                return
        if there != (base, batch):
            self._fail(who, f"{known}: its batch at {base} is not the one that another replica has")

    def _check_once(self, who: str, known: KnownPartition, batch: bytes) -> None:
        """Of a batch that has just been committed: whether any of it was stored before."""
        for offset, value, _ in records_of(batch):
            first = known.first_at.setdefault(value, offset)
            if first == offset:
                continue
            # A replica that was copied after its producer's records were deleted does not know the producer.
            if first >= known.deleting and not self._may_repeat(known, value):
                self._fail(who, f"{known}: {value!r} is stored at {first} and again at {offset}")
            self.repeated += 1

    def _may_repeat(self, known: KnownPartition, value: Content) -> bool:
        """It was sent so long ago that its producer may be forgotten."""
        return 0 < self.expiry_s <= self.now_s() - known.sent_s.get(value, 0.0)

    def sent(self, known: KnownPartition, values: Sequence[Content]) -> None:
        """Records are about to be sent for the first time."""
        for value in values:
            known.sent_s[value] = self.now_s()

    def compare_records(self, who: str, known: KnownPartition, data: bytes) -> None:
        """Those of a compacted log, whose batches lose records on each replica at its own time."""
        self.compared += 1
        for offset, pair in pairs_of(data).items():
            self._record(who, known, offset, pair)

    # What clients are answered.

    def acked(
        self, who: str, known: KnownPartition, values: Sequence[Any], *, base_offset: int, leader_epoch: int
    ) -> None:
        """An acknowledgement of acks=all; `base_offset` is -1 where a duplicate was reported."""
        self.acknowledged += 1
        if base_offset < 0:
            known.stored.update(values)
            return
        for wrong in () if known.history is None else known.history.answered(base_offset, values):
            self._fail(who, f"{known}: {wrong}")
        for offset, value in enumerate(values, base_offset):
            if known.acked.setdefault(offset, value) != value:
                self._fail(who, f"{known}: offset {offset} was acknowledged for {known.acked[offset]!r} and {value!r}")
            self._record(who, known, offset, value)
        end = base_offset + len(values)
        if end > known.floor:
            known.floor = end
        known.floor_epoch = max(known.floor_epoch, leader_epoch)

    def read(self, who: str, known: KnownPartition, offset: int, data: bytes, high_watermark: int) -> tuple[int, int]:
        """What a fetch from `offset` on has brought; the next offset, and the epoch of the last record."""
        self.reads += 1
        expected, epoch = offset, -1
        for at, value, batch_epoch in records_of(data, is_compacted=known.topic.is_compacted):
            epoch = batch_epoch
            if at < offset:
                continue  # the first batch begins before what was asked for
            if known.is_unclean:
                expected = at + 1
                continue
            if at < expected or (at > expected and not known.topic.is_compacted):
                self._fail(who, f"{known}: offset {at} is read where {expected} is due")
            if 0 <= high_watermark <= at:
                self._fail(who, f"{known}: offset {at} is read, past the high watermark {high_watermark}")
            self._record(who, known, at, value)
            expected = at + 1
        if known.topic.is_compacted:
            for *_, batch in sound_batches(data):  # the last one may have lost its records
                header = read_header(batch)
                expected, epoch = int(header.next_offset), int(header.leader_epoch)
        return expected, epoch

    def _record(self, who: str, known: KnownPartition, offset: int, value: Content) -> None:
        if known.is_unclean:
            return
        writes_to = self.writers.get(value.partition(b"/")[0], known) if isinstance(value, bytes) else known
        if writes_to is not known:
            self._fail(who, f"{known}: {value!r} at {offset} was written to {writes_to}")
        records = known.records
        while len(records) <= offset:
            records.append(None)
        if records[offset] is None:
            records[offset] = value
        elif records[offset] != value:
            self._fail(who, f"{known}: offset {offset} is {value!r}, and was {records[offset]!r}")

    # The end.

    def check_end(self, known: KnownPartition, logs: dict[str, bytes], *, start: int) -> None:
        """The logs of all replicas, as a whole; all begin at `start`."""
        if not known.deleted <= start <= known.deleting and not known.is_forgiven:
            self._fail("end", f"{known}: begins at {start}; {known.deleted} to {known.deleting} was deleted")
        if known.history is not None:
            self._check_compacted(known, known.history, logs)
            return
        if known.topic.is_retained:  # each replica deletes its oldest segments at its own time
            logs = {name: _from_offset(data, start) for name, data in logs.items()}
        data = next(iter(logs.values()))
        for name, other in logs.items():
            if other != data:
                self._fail(name, f"{known}: its log of {len(other)} bytes is not that of {next(iter(logs))}")
        stored = {offset: value for offset, value, _ in records_of(data)}
        values = list(stored.values())
        if len(set(values)) != len(values) and not self.expiry_s:  # else `_check_once` has seen when
            twice = sorted(value for value in set(values) if values.count(value) > 1)
            self._fail("end", f"{known}: {twice[:3]} are stored twice")
        if known.is_unclean:
            return
        for base, following, batch in sound_batches(data):
            self.compare_batch("end", known, base, following, batch)
        for offset, value in sorted(known.acked.items()):
            found = stored.get(offset)
            if found != value and (found is not None or offset >= start):
                self._fail("end", f"{known}: {value!r} was acknowledged at {offset}, where {found!r} is")
        for offset, read in enumerate(known.records):
            found = stored.get(offset)
            if read is not None and found != read and (found is not None or offset >= start):
                self._fail("end", f"{known}: {read!r} was read at {offset}, and is not there")
        missing = known.stored - set(values)
        if missing and not start:
            self._fail("end", f"{known}: {sorted(missing)[:3]} were acknowledged as duplicates and are not stored")
        self._check_order(known, list(dict.fromkeys(values)))

    def _check_compacted(self, known: KnownPartition, history: CompactedHistory, logs: dict[str, bytes]) -> None:
        for name, data in logs.items():
            self.compare_records(name, known, data)
            pairs = pairs_of(data)
            self.compacted_away += len(known.records) - len(pairs)
            for wrong in (
                *history.lost(pairs, history.latest),
                *history.returned(pairs, history.latest).values(),
            ):
                self._fail(name, f"{known}: {wrong}")
        values = [pair[1] for pair in known.records if pair is not None and isinstance(pair[1], bytes)]
        if len(set(values)) != len(values):
            twice = sorted(value for value in set(values) if values.count(value) > 1)
            self._fail("end", f"{known}: {twice[:3]} were stored twice")
        self._check_order(known, values)

    def _check_order(self, known: KnownPartition, values: Sequence[bytes]) -> None:
        """Values are `producer/number`, perhaps with a slash and more: those of a producer come in order. A leader that
        has forgotten a producer takes any sequence: what overtook the batch ahead of it is stored first."""
        if self.expiry_s and known.topic.name.startswith("piped"):
            return
        last: dict[bytes, int] = {}
        for value in values:
            producer, number = value.split(b"/")[:2]
            if int(number) <= last.get(producer, -1):
                self._fail("end", f"{known}: {value!r} comes after {last[producer]}")
            last[producer] = int(number)
