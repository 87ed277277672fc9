"""Simple clients of the public API: producers, readers, askers of offsets.

A `Client` is a machine. All that runs on it shares what it knows of each partition: who leads, in which epoch, and the
largest offset that it has learned, by an acknowledgement or a high watermark. It says the epoch with what it asks, so
that a leader that has been replaced cannot answer it with what is over.

A producer has one batch under way and repeats it until it is answered. With acks=all nothing that it has sent may get
lost, so a leader that misses a batch (OUT_OF_ORDER_SEQUENCE_NUMBER) fails the run. Values are `producer/number`, each
used once.

In a compacted topic records have one of a few keys, and with acks=all every third is a tombstone. Its readers read it
from the start to the end again and again, as a program does that builds a table (`compacted_reads`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from support.brokers.compacted_history import pairs_of

from simulation.broker_checker import Fail, KnownPartition, ReplicaChecker, is_sound
from simulation.cluster import Context
from simulation.compacted_reads import TableRead
from tidelog.log.batch import Record, encode
from tidelog.model.errors import RemoteError, TransportError
from tidelog.model.ids import NodeId
from tidelog.rpc.grpc.methods import method_named
from tidelog.rpc.v1 import log_pb2 as pb

ACKS_ALL, ACKS_LEADER = -1, 1
CALL_MS = 900
PRODUCE_MS = 700
DELETES = 0.35
"""Of the records of a compacted topic."""
FETCHES_MAX = 200
"""Of one read of a whole partition."""
STOPPING_PAUSE_S = 0.02
"""Between the fetches of a reader that is only to reach the end."""
RESETS = ("OUT_OF_ORDER_SEQUENCE_NUMBER", "UNKNOWN_PRODUCER_ID", "INVALID_PRODUCER_EPOCH")
GONE = ("UNKNOWN_TOPIC_ID", "UNKNOWN_TOPIC_OR_PARTITION")
LATEST, EARLIEST = -1, -2
PRODUCE, FETCH = method_named("Log", "Produce"), method_named("Log", "Fetch")
LIST_OFFSETS, EPOCH_END = method_named("Log", "ListOffsets"), method_named("Log", "OffsetForLeaderEpoch")
DELETE_RECORDS = method_named("Log", "DeleteRecords")
INIT_PRODUCER_ID = method_named("Log", "InitProducerId")


@dataclass(slots=True)
class View:
    """What one client machine knows of a partition."""

    leader: int = -1
    epoch: int = -1
    known_end: int = 0
    """The end of what it knows to be committed."""
    position: int = 0
    last_epoch: int = -1
    """Of the last record that it read."""
    nearby: int = -1
    """A follower that it was sent to."""
    table: TableRead | None = None
    """Of a compacted partition."""


@dataclass(slots=True)
class Producer:
    name: str
    producer_id: int = -1
    producer_epoch: int = -1
    sequence: int = 0
    number: int = 0


class Client:
    """The program of one client machine."""

    def __init__(
        self,
        checker: ReplicaChecker,
        brokers: list[NodeId],
        draw: Random,
        fail: Fail,
        *,
        pause_s: float,
        rack: str,
        deletes: float,
        keys: int,
        is_leader: Callable[[int, KnownPartition], bool],
        on_rot: Callable[[int, KnownPartition, int], None],
    ) -> None:
        """`is_leader` tells who leads as the quorum has it: what was deleted cannot be known to who was replaced.
        `on_rot` is called for a broker that serves a partition with a wrong CRC, at or past an offset."""
        self._is_leader = is_leader
        self.on_rot = on_rot
        self._checker = checker
        self._brokers = brokers
        self._random = draw
        self._fail = fail
        self._pause_s = pause_s
        self._rack = rack
        self._deletes = deletes
        self._keys = keys
        self._views: dict[KnownPartition, View] = {}
        self._context: Context | None = None
        self._producers = 0
        self.is_stopping = False
        self.busy = 0
        """Batches without an answer."""
        self.producer_ids: set[int] = set()
        self.errors: dict[str, int] = {}

    async def run(self, context: Context) -> None:
        self._context = context
        context.app = self
        await asyncio.Event().wait()

    @property
    def name(self) -> str:
        assert self._context is not None
        return self._context.station.name

    def add(self, known: KnownPartition, acks: int | None) -> None:
        """Work on this partition from now on: write, unless `acks` is None, and read."""
        assert self._context is not None, "the machine runs"
        self._views[known] = View(table=None if known.history is None else TableRead(known, self._fail))
        if acks is not None:
            self._producers += 1
            producer = Producer(f"{self.name}.{self._producers}")
            self._checker.writers[producer.name.encode()] = known
            self._context.node.spawn(self._produce(known, producer, acks), name=f"producer of {known}")
        self._context.node.spawn(self._consume(known), name=f"reader of {known}")

    def views(self) -> list[View]:
        return list(self._views.values())

    def has_read(self, known: KnownPartition, end: int) -> bool:
        return known not in self._views or self._views[known].position >= end

    # One request.

    async def _call(self, node: int, method: Any, request: Any) -> Any:
        """The response, or None."""
        assert self._context is not None
        try:
            data = await self._context.transport.call(
                NodeId(node), method.wire_name, request.SerializeToString(), timeout_ms=CALL_MS
            )
        except (TransportError, RemoteError) as error:
            self._note(error.code.name)
            return None
        return method.response.FromString(data)

    def _note(self, name: str) -> None:
        self.errors[name] = self.errors.get(name, 0) + 1

    def _target(self, view: View) -> int:
        if view.leader in self._brokers and self._random.random() < 0.95:
            return view.leader
        return int(self._random.choice(self._brokers))

    def _learn(self, view: View, leader: int, epoch: int) -> None:
        if epoch >= view.epoch:
            view.epoch = epoch
            view.leader = leader if leader >= 0 else view.leader

    def _is_over(self, known: KnownPartition, view: View, error: Any, row: Any) -> bool:
        """Take an error of a partition; True if there is nothing left to do for it."""
        self._note(error.name)
        if hasattr(row, "leader"):
            self._learn(view, row.leader, row.leader_epoch)
        if error.name == "INVALID_TIMESTAMP" and self._checker.clocks_jump:
            return True  # the next batch has the time of then
        if not error.retriable and not known.is_unclean:
            self._fail(self.name, f"{known}: {error.name}: {error.message}")
        if error.name not in ("REQUEST_TIMED_OUT", "NOT_ENOUGH_REPLICAS", "OFFSET_NOT_AVAILABLE"):
            view.leader = -1 if not hasattr(row, "leader") or row.leader < 0 else row.leader
        return error.name in GONE and known.topic.delete_asked

    async def _wait(self, least_s: float = 0.0) -> None:
        await asyncio.sleep(least_s + self._random.expovariate(1 / self._pause_s))

    # Writing.

    async def _produce(self, known: KnownPartition, producer: Producer, acks: int) -> None:
        assert self._context is not None
        while not known.topic.is_left():
            if self.is_stopping:
                return
            await self._wait()
            self.busy += 1
            try:
                if producer.producer_id < 0:
                    await self._init(producer)
                count = self._random.choice((1, 1, 2, 3))
                values: list[Any] = [b"%s/%d" % (producer.name.encode(), producer.number + at) for at in range(count)]
                producer.number += count
                padding = bytes(self._random.choice((0, 0, 30, 100)))
                # Retention goes by time; compaction, which a change of configs may begin, must find no key twice.
                first_ms = self._context.node.clock.now_ms() if known.topic.is_retained else 1_000
                pairs = [(value if known.topic.is_retained else padding, value) for value in values]
                if known.history is not None:
                    values = pairs = self._keyed(values, padding, may_delete=acks == ACKS_ALL)
                    known.history.sends(values)
                batch = encode(
                    [Record(at, first_ms + at, key, value, ()) for at, (key, value) in enumerate(pairs)],
                    producer_id=producer.producer_id,
                    producer_epoch=producer.producer_epoch,
                    base_sequence=producer.sequence,
                )
                self._checker.sent(known, values)
                if await self._send(known, batch, values, acks):
                    producer.sequence += count
                else:
                    producer.producer_id = -1  # what became of it is not known: begin again
            finally:
                self.busy -= 1

    def _keyed(self, values: list[bytes], padding: bytes, *, may_delete: bool) -> list[tuple[bytes, bytes | None]]:
        """Records of a compacted topic. What only its leader has acknowledged may get lost, so it deletes nothing."""
        draw = self._random
        return [
            (
                b"k%d" % draw.randrange(self._keys),
                None if may_delete and draw.random() < DELETES else value + b"/" + padding,
            )
            for value in values
        ]

    async def _init(self, producer: Producer) -> None:
        while True:
            node = int(self._random.choice(self._brokers))
            found = await self._call(node, INIT_PRODUCER_ID, pb.InitProducerIdRequest())
            if found is not None:
                break
            await self._wait(0.03)
        if found.producer_id in self.producer_ids:
            self._fail(self.name, f"producer id {found.producer_id} is given twice")
        self.producer_ids.add(found.producer_id)
        producer.producer_id, producer.producer_epoch, producer.sequence = found.producer_id, found.producer_epoch, 0

    async def _send(self, known: KnownPartition, batch: bytes, values: list[Any], acks: int) -> bool:
        """Until it is acknowledged (True), or it cannot be (False)."""
        view = self._views[known]
        while True:
            item = pb.ProducePartition(
                topic_id=known.topic.topic_id.bytes, partition=known.partition_id.partition, batches=batch
            )
            if view.epoch >= 0 and self._random.random() < 0.5:
                item.leader_epoch = view.epoch
            request = pb.ProduceRequest(partitions=[item], acks=acks, timeout_ms=PRODUCE_MS)
            response = await self._call(self._target(view), PRODUCE, request)
            if response is None:
                view.leader = -1
            else:
                (row,) = response.partitions
                if not row.HasField("error"):
                    self._acked(known, view, row, values, acks)
                    return True
                if row.error.name == "DUPLICATE_SEQUENCE_NUMBER":
                    if acks == ACKS_ALL:
                        self._checker.acked(self.name, known, values, base_offset=-1, leader_epoch=row.leader_epoch)
                    return True
                is_over = row.leader_epoch < view.epoch  # a leader that does not know yet that it is replaced
                if row.error.name in RESETS and not is_over:
                    if acks == ACKS_ALL and not known.is_unclean:
                        self._fail(self.name, f"{known}: what was acknowledged is missing: {row.error.message}")
                    return False
                if is_over:
                    view.leader = -1
                elif self._is_over(known, view, row.error, row):
                    return False
            if known.topic.delete_asked:
                return False
            await self._wait(0.03)

    def _acked(self, known: KnownPartition, view: View, row: Any, values: list[Any], acks: int) -> None:
        self._learn(view, row.leader, row.leader_epoch)
        if acks != ACKS_ALL or known.is_unclean:
            return
        self._checker.acked(self.name, known, values, base_offset=row.base_offset, leader_epoch=row.leader_epoch)
        view.known_end = max(view.known_end, row.base_offset + len(values))

    # Reading.

    async def _consume(self, known: KnownPartition) -> None:
        view = self._views[known]
        while not known.topic.is_left():
            await (asyncio.sleep(STOPPING_PAUSE_S) if self.is_stopping else self._wait())
            if view.table is not None and not self.is_stopping and self._random.random() < 0.3:
                await self._read_table(known, view, view.table)
            elif self._deletes and not self.is_stopping and self._random.random() < self._deletes:
                await self._delete(known, view)
            elif self._random.random() < 0.2:
                await self._ask(known, view)
            else:
                await self._fetch(known, view)

    async def _read_table(self, known: KnownPartition, view: View, table: TableRead) -> None:
        """From the start to the end; again at once if a deleted key was there."""
        while True:
            view.position, view.last_epoch = 0, -1
            table.begin()
            for _ in range(FETCHES_MAX):
                before = view.position
                await self._fetch(known, view)
                if table.is_complete:
                    break
                if view.position == before:
                    await self._wait(0.03)
            if not table.is_in_doubt or self.is_stopping:
                return

    async def _fetch(self, known: KnownPartition, view: View) -> None:
        item = pb.FetchPartition(
            topic_id=known.topic.topic_id.bytes,
            partition=known.partition_id.partition,
            offset=view.position,
            max_bytes=self._random.choice((1, 300, 1 << 20)),
        )
        if view.epoch >= 0:
            item.leader_epoch = view.epoch
        if view.last_epoch >= 0:
            item.last_epoch = view.last_epoch
        is_nearby = view.nearby >= 0
        known_end, target = view.known_end, view.nearby if is_nearby else self._target(view)
        view.nearby = -1
        rack = self._rack if is_nearby or self._random.random() < 0.2 else ""
        request = pb.FetchRequest(
            partitions=[item], min_bytes=1, max_wait_ms=self._random.choice((0, 100, 400)), max_bytes=1 << 20, rack=rack
        )
        response = await self._call(target, FETCH, request)
        if response is None:
            view.leader = -1
            return
        (row,) = response.partitions
        if row.HasField("error"):
            if row.error.name == "OFFSET_OUT_OF_RANGE" and known.is_unclean:
                view.position, view.last_epoch = max(0, row.start_offset), -1
            elif row.error.name == "OFFSET_OUT_OF_RANGE" and item.offset < row.start_offset <= known.deleting:
                view.position, view.last_epoch = row.start_offset, -1
                return
            self._is_over(known, view, row.error, row)
            return
        self._learn(view, row.leader, row.leader_epoch)
        if row.HasField("diverging"):
            if not known.is_unclean:
                self._fail(self.name, f"{known}: what was read up to {view.position} is not there: {row.diverging}")
            view.position, view.last_epoch = row.diverging.end_offset, row.diverging.epoch
            return
        if row.preferred_replica >= 0:
            view.nearby = row.preferred_replica
            return
        is_leader = target == row.leader
        if is_leader and 0 <= row.high_watermark < known_end and not known.is_unclean:
            self._fail(self.name, f"{known}: learned of {known_end}, and then of high watermark {row.high_watermark}")
        if is_leader and not known.is_unclean:
            view.known_end = max(view.known_end, row.high_watermark)
        if row.data and not is_sound(row.data):
            # A broker hands out what it has stored; its reader checks it, as every client does.
            self.on_rot(target, known, view.position)
            return
        if row.data:
            view.position, view.last_epoch = self._checker.read(
                self.name, known, view.position, row.data, row.high_watermark
            )
        if view.table is not None:
            view.table.took(self.name, pairs_of(row.data), view.position, row.high_watermark)

    async def _delete(self, known: KnownPartition, view: View) -> None:
        """Reads some of what it knows to be committed."""
        topic = known.topic
        if known.is_unclean or topic.is_compacted or topic.is_grouped or view.known_end == 0:
            return
        offset = self._random.randint(max(0, view.known_end - 20), view.known_end)
        known.deleting = max(known.deleting, offset)
        named = pb.DeleteRecordsPartition(
            topic_id=known.topic.topic_id.bytes, partition=known.partition_id.partition, before_offset=offset
        )
        target = self._target(view)
        was_leader = self._is_leader(target, known)
        response = await self._call(target, DELETE_RECORDS, pb.DeleteRecordsRequest(partitions=[named]))
        if response is None:
            view.leader = -1
            return
        (row,) = response.partitions
        is_leader = was_leader and self._is_leader(target, known)
        if row.HasField("error") and row.error.name == "OFFSET_OUT_OF_RANGE" and not is_leader:
            view.leader = -1  # of a former epoch: the request does not say which one it means
        elif row.HasField("error"):
            self._is_over(known, view, row.error, None)
        elif not offset <= row.start_offset <= known.deleting:
            self._fail(self.name, f"{known}: is deleted up to {row.start_offset}, where {offset} was asked for")
        else:
            known.deleted = max(known.deleted, offset)

    async def _ask(self, known: KnownPartition, view: View) -> None:
        """Where it begins and ends; or where an epoch ends."""
        names: dict[str, Any] = {
            "topic_id": known.topic.topic_id.bytes,
            "partition": known.partition_id.partition,
        }
        if view.epoch >= 0:
            names["leader_epoch"] = view.epoch
        known_end, deleted = view.known_end, known.deleted
        if self._random.random() < 0.3 and view.last_epoch >= 0:
            asked = pb.EpochPartition(epoch=view.last_epoch, **names)
            method, request = EPOCH_END, pb.OffsetForLeaderEpochRequest(partitions=[asked])
        else:
            timestamp = self._random.choice((LATEST, LATEST, LATEST, EARLIEST))
            listed = pb.ListOffsetsPartition(timestamp=timestamp, **names)
            method, request = LIST_OFFSETS, pb.ListOffsetsRequest(partitions=[listed])  # type: ignore[assignment]
        position, target = view.position, self._target(view)
        if not self._is_leader(target, known):
            deleted = 0
        response = await self._call(target, method, request)
        if response is None:
            view.leader = -1
            return
        (row,) = response.partitions
        if row.HasField("error"):
            self._is_over(known, view, row.error, None)
        elif known.is_unclean:
            return
        elif method is EPOCH_END:
            if (row.epoch != asked.epoch or row.end_offset < position) and position > known.deleting:
                self._fail(self.name, f"{known}: epoch {asked.epoch} was read up to {position}, and ends: {row}")
        elif listed.timestamp == EARLIEST:
            if row.offset > known.deleting or (row.offset < deleted and self._is_leader(target, known)):
                self._fail(self.name, f"{known}: begins at {row.offset}; {deleted} to {known.deleting} was deleted")
        else:
            if row.offset < known_end:
                self._fail(self.name, f"{known}: learned of {known_end}, and then that it ends at {row.offset}")
            view.known_end = max(view.known_end, row.offset)
