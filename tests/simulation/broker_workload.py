"""Simple clients of the public API, and an operator: producers, readers, askers of offsets; topics come, move and go.

A `Client` is a machine. All that runs on it shares what it knows of each partition: who leads, in which epoch, and the
largest offset that it was told of, by an acknowledgement or a high watermark. It says the epoch with what it asks, so
that a leader that has been replaced cannot answer it with what is over.

A producer has one batch under way and repeats it until it is answered. With acks=all nothing that it has sent may get
lost, so a leader that misses a batch (OUT_OF_ORDER_SEQUENCE_NUMBER) fails the run. Values are `producer/number`, each
used once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from simulation.broker_checker import Fail, KnownPartition, KnownTopic, ReplicaChecker, is_sound
from simulation.cluster import Context
from tidelog.log.batch import Record, encode
from tidelog.metadata.broker_side import BrokerConfig, ControllerClient
from tidelog.metadata.partitions import ElectLeaders
from tidelog.metadata.reassignments import AlterReassignments, Reassigned
from tidelog.metadata.settings import AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.topics import CreateTopics, DeleteTopics, NewTopic
from tidelog.model.errors import ErrorCode, RemoteError, TidelogError, TransportError
from tidelog.model.ids import DirectoryId, NodeId, PartitionId, TopicId
from tidelog.rpc.door import method_named
from tidelog.rpc.v1 import log_pb2 as pb

if TYPE_CHECKING:
    from simulation.broker_node import BrokerApp
    from simulation.broker_sim import BrokerSimulation
    from tidelog.metadata.image import ClusterImage

ACKS_ALL, ACKS_LEADER = -1, 1
CALL_MS = 900
PRODUCE_MS = 700
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
    told: int = 0
    """The largest offset that it was told to be committed."""
    position: int = 0
    last_epoch: int = -1
    """Of the last record that it read."""
    nearby: int = -1
    """A follower that it was sent to."""


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
        is_leader: Callable[[int, KnownPartition], bool],
        on_rot: Callable[[int, KnownPartition, int], None],
    ) -> None:
        """`is_leader` tells who leads as the quorum has it: what was deleted cannot be known to who was replaced.
        `on_rot` is told of a broker that serves a partition with a wrong CRC, at or past an offset."""
        self._is_leader = is_leader
        self.on_rot = on_rot
        self._checker = checker
        self._brokers = brokers
        self._random = draw
        self._fail = fail
        self._pause_s = pause_s
        self._rack = rack
        self._deletes = deletes
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
        self._views[known] = View()
        if acks is not None:
            self._producers += 1
            producer = Producer(f"{self.name}.{self._producers}")
            self._context.node.spawn(self._produce(known, producer, acks), name=f"producer of {known}")
        self._context.node.spawn(self._consume(known), name=f"reader of {known}")

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
        if not error.retriable and not known.topic.is_unclean:
            self._fail(self.name, f"{known}: {error.name}: {error.message}")
        if error.name not in ("REQUEST_TIMED_OUT", "NOT_ENOUGH_REPLICAS", "OFFSET_NOT_AVAILABLE"):
            view.leader = -1 if not hasattr(row, "leader") or row.leader < 0 else row.leader
        return error.name in GONE and known.topic.delete_asked

    async def _wait(self, least_s: float = 0.0) -> None:
        await asyncio.sleep(least_s + self._random.expovariate(1 / self._pause_s))

    # Writing.

    async def _produce(self, known: KnownPartition, producer: Producer, acks: int) -> None:
        while not known.topic.delete_asked:
            if self.is_stopping:
                return
            await self._wait()
            self.busy += 1
            try:
                if producer.producer_id < 0:
                    await self._init(producer)
                count = self._random.choice((1, 1, 2, 3))
                values = [b"%s/%d" % (producer.name.encode(), producer.number + at) for at in range(count)]
                producer.number += count
                padding = bytes(self._random.choice((0, 0, 30, 100)))
                records = [Record(at, 1_000 + at, padding, value, ()) for at, value in enumerate(values)]
                batch = encode(
                    records,
                    producer_id=producer.producer_id,
                    producer_epoch=producer.producer_epoch,
                    base_sequence=producer.sequence,
                )
                if await self._send(known, batch, values, acks):
                    producer.sequence += count
                else:
                    producer.producer_id = -1  # what became of it is not known: begin anew
            finally:
                self.busy -= 1

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

    async def _send(self, known: KnownPartition, batch: bytes, values: list[bytes], acks: int) -> bool:
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
                    if acks == ACKS_ALL and not known.topic.is_unclean:
                        self._fail(self.name, f"{known}: what was acknowledged is missing: {row.error.message}")
                    return False
                if is_over:
                    view.leader = -1
                elif self._is_over(known, view, row.error, row):
                    return False
            if known.topic.delete_asked:
                return False
            await self._wait(0.03)

    def _acked(self, known: KnownPartition, view: View, row: Any, values: list[bytes], acks: int) -> None:
        self._learn(view, row.leader, row.leader_epoch)
        if acks != ACKS_ALL or known.topic.is_unclean:
            return
        self._checker.acked(self.name, known, values, base_offset=row.base_offset, leader_epoch=row.leader_epoch)
        view.told = max(view.told, row.base_offset + len(values))

    # Reading.

    async def _consume(self, known: KnownPartition) -> None:
        view = self._views[known]
        while not known.topic.delete_asked:
            await self._wait()
            if self._deletes and not self.is_stopping and self._random.random() < self._deletes:
                await self._delete(known, view)
            elif self._random.random() < 0.2:
                await self._ask(known, view)
            else:
                await self._fetch(known, view)

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
        told, target = view.told, view.nearby if is_nearby else self._target(view)
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
            if row.error.name == "OFFSET_OUT_OF_RANGE" and known.topic.is_unclean:
                view.position, view.last_epoch = 0, -1
            elif row.error.name == "OFFSET_OUT_OF_RANGE" and item.offset < row.start_offset <= known.deleting:
                view.position, view.last_epoch = row.start_offset, -1
                return
            self._is_over(known, view, row.error, row)
            return
        self._learn(view, row.leader, row.leader_epoch)
        if row.HasField("diverging"):
            if not known.topic.is_unclean:
                self._fail(self.name, f"{known}: what was read up to {view.position} is not there: {row.diverging}")
            view.position, view.last_epoch = row.diverging.end_offset, row.diverging.epoch
            return
        if row.preferred_replica >= 0:
            view.nearby = row.preferred_replica
            return
        is_leader = target == row.leader
        if is_leader and 0 <= row.high_watermark < told and not known.topic.is_unclean:
            self._fail(self.name, f"{known}: was told of {told}, and then of high watermark {row.high_watermark}")
        if is_leader and not known.topic.is_unclean:
            view.told = max(view.told, row.high_watermark)
        if row.data and not is_sound(row.data):
            # A broker hands out what it has stored; its reader checks it, as every client does.
            self.on_rot(target, known, view.position)
            return
        if row.data:
            view.position, view.last_epoch = self._checker.read(
                self.name, known, view.position, row.data, row.high_watermark
            )

    async def _delete(self, known: KnownPartition, view: View) -> None:
        """Some of what it was told to be committed."""
        if known.topic.is_unclean or view.told == 0:
            return
        offset = self._random.randint(max(0, view.told - 20), view.told)
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
        told, deleted = view.told, known.deleted
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
        elif known.topic.is_unclean:
            return
        elif method is EPOCH_END:
            if (row.epoch != asked.epoch or row.end_offset < position) and position > known.deleting:
                self._fail(self.name, f"{known}: epoch {asked.epoch} was read up to {position}, and ends: {row}")
        elif listed.timestamp == EARLIEST:
            if row.offset > known.deleting or (row.offset < deleted and self._is_leader(target, known)):
                self._fail(self.name, f"{known}: begins at {row.offset}; {deleted} to {known.deleting} was deleted")
        else:
            if row.offset < told:
                self._fail(self.name, f"{known}: was told of {told}, and then that it ends at {row.offset}")
            view.told = max(view.told, row.offset)


@dataclass(slots=True)
class Operator:
    """The program of a machine that makes, moves and removes topics, and elects preferred leaders."""

    simulation: BrokerSimulation
    draw: Random
    fail: Fail
    is_stopping: bool = False
    topics: list[KnownTopic] = field(default_factory=list)
    _number: int = 0

    async def run(self, context: Context) -> None:
        context.app = self
        client = ControllerClient(
            context.transport, lambda: self.simulation.controllers, BrokerConfig(call_timeout_ms=1_500), self.draw
        )
        shape = self.simulation.shape
        settings = {
            "replica.lag.time.max.ms": shape.lag_ms,
            "broker.session.timeout.ms": shape.session_ms,
            "disk.stall.timeout.ms": shape.stall_ms,
            "log.scrub.interval.ms": 1_000,
        }
        changes = tuple(ConfigChange(key=key, operation="set", value=str(value)) for key, value in settings.items())
        await self._ask(
            client, AlterConfigs(resources=(ResourceChange(resource_type="cluster", resource="", changes=changes),))
        )
        for kind in shape.topics:
            await self._create(client, kind)
        while True:
            await asyncio.sleep(self.draw.expovariate(1 / 1.5))
            if self.is_stopping:
                break
            await self._one(client)
        await asyncio.Event().wait()  # a program that ends is started again

    async def _ask(self, client: ControllerClient, request: object) -> Any:
        """Until it is answered; who repeats may find it done."""
        while True:
            try:
                return await client.call(request)
            except (TransportError, RemoteError):
                await asyncio.sleep(self.draw.uniform(0.05, 0.3))

    async def _one(self, client: ControllerClient) -> None:
        kind = self.draw.choices(("create", "delete", "move", "elect", "nothing"), self.simulation.shape.operations)[0]
        moving = [topic for topic in self.topics if not topic.delete_asked]
        if self.simulation.shape.directories > 1 and moving and self.draw.random() < 0.5:
            self._relocate(self.draw.choice(moving))
        if kind == "create" and len(moving) < 4:
            await self._create(client, "churn")
        elif kind == "delete":
            churn = [topic for topic in moving if topic.name.startswith("churn")]
            if churn:
                topic = self.draw.choice(churn)
                topic.delete_asked = True
                await self._try(client, DeleteTopics(names=(topic.name,)))
        elif kind == "move" and moving:
            await self._move(client, self.draw.choice(moving))
        elif kind == "elect" and moving:
            await self._try(client, ElectLeaders(kind="preferred"))

    async def _try(self, client: ControllerClient, request: object) -> Any:
        try:
            return await client.call(request)
        except (TransportError, RemoteError):
            return None

    async def _move(self, client: ControllerClient, topic: KnownTopic) -> None:
        brokers = [int(node) for node in self.simulation.broker_nodes]
        number = self.draw.randrange(topic.partitions)
        partition = self.image.partition(topic.topic_id, number)
        if partition is None:
            return
        replicas = tuple(self.draw.sample(brokers, len(partition.settled)))
        wanted: tuple[int, ...] | None = None if self.draw.random() < 0.15 else replicas
        item = Reassigned(topic=topic.name, partition=number, replicas=wanted)
        await self._try(client, AlterReassignments(partitions=(item,)))

    def _relocate(self, topic: KnownTopic) -> None:
        """A replica moves to the other log directory of its broker, or is asked to."""
        app = self.simulation.broker(self.draw.choice(self.simulation.brokers))
        partition_id = PartitionId(TopicId(topic.topic_id), self.draw.randrange(topic.partitions))
        target = self.draw.randrange(self.simulation.shape.directories)
        if app is None or app.context.node.loop.is_held:
            return
        directory = app.logs.directories[target].directory_id
        assert directory is not None, "an open directory has an id"
        self.simulation.world.scheduler.trace("operator", f"{app.name}: {topic.name} goes to directory {target}")
        app.context.node.spawn(_moved(app, partition_id, directory))

    @property
    def image(self) -> ClusterImage:
        return self.simulation.metadata.image

    async def _create(self, client: ControllerClient, kind: str) -> None:
        self._number += 1
        name = f"{kind}.{self._number}"
        partitions, factor, min_isr = self.draw.choice((1, 1, 2)), 3, 2
        # The records are dated 1970: retention, which a full disk starts at once, would delete them.
        configs = [("segment.bytes", str(self.simulation.shape.segment_bytes)), ("retention.ms", "-1")]
        if kind == "unclean":
            partitions, factor, min_isr = 1, 2, 1
            configs.append(("unclean.leader.election.enable", "true"))
        elif kind == "weak":
            partitions, min_isr = 1, 1
        configs.append(("min.insync.replicas", str(min_isr)))
        topic = NewTopic(name=name, partitions=partitions, replication_factor=factor, configs=tuple(configs))
        while True:
            reply = await self._ask(client, CreateTopics(topics=(topic,)))
            (made,) = reply.topics
            if made.error is None:
                topic_id = made.topic_id
                break
            if made.error is ErrorCode.TOPIC_ALREADY_EXISTS:
                # An earlier attempt was done, and its answer was lost.
                found = self.image.topic_named(name)
                if found is not None:
                    topic_id = found.topic_id
                    break
            await asyncio.sleep(self.draw.uniform(0.05, 0.2))
            if self.is_stopping and kind == "churn":
                return
        known = KnownTopic(name, topic_id, partitions, min_isr)
        self.topics.append(known)
        self.simulation.made(known)


async def _moved(app: BrokerApp, partition_id: PartitionId, directory: DirectoryId) -> None:
    try:
        await app.service.move_replica(partition_id, directory)
    except TidelogError as error:
        app.context.node.trace(f"not moved: {error}")
