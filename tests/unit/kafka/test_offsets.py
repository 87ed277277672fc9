"""Offsets and producers of the Kafka API against whole brokers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from support.brokers.cluster import NodeId, ReplicationCluster, batch
from support.brokers.transactions import append_open, transactional
from support.kafka.data_api import BROKERS, DataWorld

from tidelog.log.batch import Codec, ControlKind, Record, encode, encode_columns, encode_control
from tidelog.log.read_plans import DECODED_BYTES_INLINE, first_at
from tidelog.model.errors import ErrorCode, InvalidRequestError, TransportError, WorkFailedError
from tidelog.replication.partition import LeaderState
from tidelog.replication.producer_ids import ProducerIds
from tidelog.rpc.kafka.messages import (
    DELETE_RECORDS,
    DESCRIBE_PRODUCERS,
    INIT_PRODUCER_ID,
    LIST_OFFSETS,
    OFFSET_FOR_LEADER_EPOCH,
)
from tidelog.rpc.kafka.messages.data import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsTopic,
    DescribeProducersRequest,
    DescribeProducersTopicRequest,
    ListOffsetsPartition,
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsTopic,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
)
from tidelog.rpc.kafka.messages.transactions import InitProducerIdRequest
from tidelog.services.limits import RequestLimits
from tidelog.services.offsets import OffsetService

T = TypeVar("T")
LATEST, EARLIEST, LARGEST, EARLIEST_LOCAL, TIERED, PENDING_UPLOAD = -1, -2, -3, -4, -5, -6


@pytest.fixture(scope="module")
def world() -> Iterator[DataWorld]:
    with ReplicationCluster(703, brokers=BROKERS) as cluster:
        yield DataWorld(cluster)


def code(row: Any) -> str:
    return next((one.name for one in ErrorCode if one.value.code == row.error_code), "") if row.error_code else ""


def timed(*timestamps: int, **fields: Any) -> bytes:
    return encode([Record(at, time, b"k", b"v" * 20, ()) for at, time in enumerate(timestamps)], **fields)


def listed(
    world: DataWorld, name: str, timestamp: int, *, partition: int = 0, epoch: int = -1, version: int = 11, **more: Any
) -> ListOffsetsPartitionResponse:
    node = more.pop("node", 11)
    asked = ListOffsetsPartition(partition_index=partition, current_leader_epoch=epoch, timestamp=timestamp)
    request = ListOffsetsRequest(
        replica_id=more.pop("replica_id", -1), topics=[ListOffsetsTopic(name=name, partitions=[asked])], **more
    )
    response = world.ask(LIST_OFFSETS, request, version=version, node=node)
    ((row,),) = [topic.partitions for topic in response.topics]
    assert (response.throttle_time_ms, response.topics[0].name, row.partition_index) == (0, name, partition)
    assert isinstance(row, ListOffsetsPartitionResponse)
    return row


def found(row: ListOffsetsPartitionResponse) -> tuple[int, int]:
    assert row.error_code == 0, code(row)
    return row.offset, row.timestamp


# ListOffsets.


@pytest.mark.parametrize("version", range(LIST_OFFSETS.low, LIST_OFFSETS.high + 1))
def test_offsets_are_found_by_time_and_by_their_place_in_every_version(world: DataWorld, version: int) -> None:
    name = f"listed-{version}"
    where = world.topic(name)
    for times in ((100, 300), (200, 400), (350,)):
        assert world.produce(name, timed(*times)).error_code == 0
    epoch = world.cluster.partition(where).leader_epoch

    def at(timestamp: int) -> tuple[int, int]:
        row = listed(world, name, timestamp, version=version)
        known = epoch if row.offset >= 0 else -1
        assert row.leader_epoch == (known if version >= 4 else -1)
        return found(row)

    assert at(LATEST) == (5, -1)
    assert at(EARLIEST) == (0, -1)
    assert [at(time) for time in (0, 101, 301, 400, 401)] == [(0, 100), (1, 300), (3, 400), (3, 400), (-1, -1)]
    for timestamp, since, expected in (
        (LARGEST, 7, (3, 400)),
        (EARLIEST_LOCAL, 8, (0, -1)),
        (TIERED, 9, (-1, -1)),
        (PENDING_UPLOAD, 11, (-1, -1)),
    ):
        if version >= since:
            assert at(timestamp) == expected
        else:
            assert code(listed(world, name, timestamp, version=version)) == "UNSUPPORTED_VERSION"
    assert code(listed(world, name, -7, version=version)) == "UNSUPPORTED_VERSION"


def test_a_reader_of_committed_data_sees_where_that_ends(world: DataWorld) -> None:
    where = world.topic("stable")
    world.produce("stable", batch(b"x"))

    async def job(broker: Any) -> None:
        leading = broker.replicas.leader_of(where)
        append_open(leading, transactional(b"open", 5, 0), 5, 0)

    world.cluster.on_broker(11, job)
    world.cluster.until(lambda: world.cluster.leading(where).high_watermark == 2)
    assert listed(world, "stable", LATEST).offset == 2
    assert listed(world, "stable", LATEST, isolation_level=1).offset == 1
    assert code(listed(world, "stable", LATEST, isolation_level=2)) == "INVALID_REQUEST"


def test_leader_epochs_are_compared(world: DataWorld) -> None:
    where = world.topic("fenced")
    epoch = world.cluster.partition(where).leader_epoch
    for timestamp in (LATEST, EARLIEST, TIERED, 5):
        assert listed(world, "fenced", timestamp, epoch=epoch).error_code == 0
        assert code(listed(world, "fenced", timestamp, epoch=epoch + 1)) == "UNKNOWN_LEADER_EPOCH"
        assert code(listed(world, "fenced", timestamp, node=12)) == "NOT_LEADER_OR_FOLLOWER"


def test_a_leader_that_has_not_confirmed_its_epoch_asks_for_patience(
    world: DataWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.topic("unsure")
    monkeypatch.setattr(LeaderState, "is_confirmed", property(lambda _: False))
    assert code(listed(world, "unsure", LATEST, version=5)) == "OFFSET_NOT_AVAILABLE"
    assert code(listed(world, "unsure", LATEST, version=4)) == "LEADER_NOT_AVAILABLE", "as old clients know it"
    assert listed(world, "unsure", EARLIEST, version=4).offset == 0


def test_each_partition_has_its_own_answer(world: DataWorld) -> None:
    where = world.topic("rows")

    def rows(limits: RequestLimits | None = None, **more: Any) -> list[str]:
        named = [("rows", 0), ("rows", 9), ("nobody", 0), ("twice", 0), ("twice", 0)]
        topics = [
            ListOffsetsTopic(name=name, partitions=[ListOffsetsPartition(partition_index=number, timestamp=LATEST)])
            for name, number in named
        ]
        request = ListOffsetsRequest(topics=topics, **{"replica_id": -1, **more})
        answer = DataWorld(world.cluster, limits).ask(LIST_OFFSETS, request)
        return [code(row) for topic in answer.topics for row in topic.partitions]

    unknown = "UNKNOWN_TOPIC_OR_PARTITION"
    assert rows() == ["", unknown, unknown, "INVALID_REQUEST", "INVALID_REQUEST"]
    assert rows(replica_id=12) == rows(replica_id=0) == rows(), "a client, whatever it says"
    assert rows(replica_id=-2)[0] == ""
    assert world.cluster.log(11, where).end_offset == 0


class _Elsewhere:
    """Work that remembers what it was asked, and fails on demand."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.meanwhile: Callable[[], None] = lambda: None
        self.is_broken = False

    async def run(self, fn: Callable[..., T], *values: Any) -> T:
        await asyncio.sleep(0.01)
        self.asked.append(len(values[0]))
        self.meanwhile()
        if self.is_broken:
            raise WorkFailedError("the helper died")
        return fn(*values)


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
def test_large_batches_are_searched_where_that_holds_up_nobody(
    world: DataWorld, monkeypatch: pytest.MonkeyPatch, codec: Codec
) -> None:
    name = f"searched-{codec.name.lower()}"
    where = world.topic(name)
    count = 6_000

    def large(first: int) -> bytes:
        return encode_columns(range(first, first + count), [b"k"] * count, [bytes(60)] * count, codec=codec)

    for first in (1_000, 10_000):
        assert world.produce(name, large(first)).error_code == 0
    assert world.produce(name, timed(20_000)).error_code == 0
    work = _Elsewhere()
    monkeypatch.setattr(world.cluster.brokers[NodeId(11)].replicas, "admission_work", work)
    assert found(listed(world, name, 1_500)) == (500, 1_500)
    assert found(listed(world, name, 10_000 + count - 1)) == (2 * count - 1, 10_000 + count - 1)
    assert len(work.asked) == 2
    assert found(listed(world, name, LARGEST)) == (2 * count, 20_000)
    assert len(work.asked) == 2, "a small batch is decoded on the spot"
    work.is_broken = True
    assert code(listed(world, name, 1_500)) == "THROTTLING_QUOTA_EXCEEDED"
    work.is_broken = False
    world.cluster.check()
    assert 60 * count > DECODED_BYTES_INLINE

    # Files change while the batch is decoded: the search begins again.
    log = world.cluster.log(11, where)
    before = len(work.asked)
    waits = iter([log.segments.changed])
    work.meanwhile = lambda: next(waits, lambda: None)()
    assert found(listed(world, name, 1_500)) == (500, 1_500)
    assert len(work.asked) == before + 2


def test_a_batch_whose_largest_time_is_gone_is_passed_over(world: DataWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compaction may leave a header that tells of a record that it has taken out."""
    world.topic("emptied")
    count = 6_000
    data = encode_columns([1_000] * count, [b"k"] * count, [bytes(60)] * count, max_timestamp=7_000)
    assert world.produce("emptied", data).error_code == 0
    assert world.produce("emptied", timed(6_000)).error_code == 0
    work = _Elsewhere()
    monkeypatch.setattr(world.cluster.brokers[NodeId(11)].replicas, "admission_work", work)
    assert found(listed(world, "emptied", 5_000)) == (count, 6_000)
    assert found(listed(world, "emptied", 6_500)) == (-1, -1)
    assert found(listed(world, "emptied", LARGEST)) == (-1, -1)
    assert len(work.asked) == 3
    assert first_at(data, 1_000, 17, 1 << 24) is not None


def test_a_search_of_a_former_leader_is_not_answered(world: DataWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    where = world.topic("former")
    count = 6_000
    world.produce("former", encode_columns([1_000] * count, [b"k"] * count, [bytes(60)] * count))
    replica = world.cluster.replica(11, where)
    leading = replica.role
    work = _Elsewhere()
    monkeypatch.setattr(world.cluster.brokers[NodeId(11)].replicas, "admission_work", work)
    work.meanwhile = lambda: setattr(replica, "role", None)
    try:
        assert code(listed(world, "former", 1_000)) == "NOT_LEADER_OR_FOLLOWER"
    finally:
        replica.role = leading


def test_the_newest_record_is_waited_for_until_it_is_replicated(world: DataWorld) -> None:
    where = world.topic("newest")
    cluster = world.cluster
    world.produce("newest", timed(100))
    times = iter((200, 300))

    async def job(broker: Any) -> ListOffsetsPartitionResponse:
        broker.replicas.leader_of(where).append(timed(next(times)))
        asked = ListOffsetsPartition(partition_index=0, timestamp=LARGEST)
        topics = [ListOffsetsTopic(name="newest", partitions=[asked])]
        answer = await world.answer(broker, LIST_OFFSETS, 11, ListOffsetsRequest(replica_id=-1, topics=topics))
        row: ListOffsetsPartitionResponse = answer.topics[0].partitions[0]
        return row

    assert found(cluster.on_broker(11, job)) == (1, 200)
    assert cluster.leading(where).high_watermark == 2
    for broker in (12, 13):
        cluster.network.block(NodeId(broker), NodeId(11))
    late = cluster.on_broker(11, job)
    cluster.network.heal()
    assert code(late) == "OFFSET_NOT_AVAILABLE"
    assert len(cluster.leading(where).acks) == 0, "nobody waits"


# OffsetForLeaderEpoch.


@pytest.mark.parametrize("version", range(OFFSET_FOR_LEADER_EPOCH.low, OFFSET_FOR_LEADER_EPOCH.high + 1))
def test_epochs_tell_where_they_end(world: DataWorld, version: int) -> None:
    name = f"ends-{version}"
    where = world.topic(name)
    world.produce(name, batch(b"a", b"b"))
    epoch = world.cluster.partition(where).leader_epoch

    def end(asked: int, *, known: int = -1, topic: str = name, **more: Any) -> tuple[str, int, int]:
        one = OffsetForLeaderPartition(partition=0, current_leader_epoch=known, leader_epoch=asked)
        request = OffsetForLeaderEpochRequest(topics=[OffsetForLeaderTopic(topic=topic, partitions=[one])], **more)
        response = world.ask(OFFSET_FOR_LEADER_EPOCH, request, version=version)
        ((row,),) = [topic.partitions for topic in response.topics]
        assert row.partition == 0
        return code(row), row.leader_epoch, row.end_offset

    assert end(epoch) == ("", epoch, 2)
    assert end(epoch, known=epoch) == ("", epoch, 2)
    assert end(epoch + 5) == ("", -1, -1), "not known"
    assert end(epoch, known=epoch + 1) == ("UNKNOWN_LEADER_EPOCH", -1, -1)
    assert end(epoch, topic="nobody") == ("UNKNOWN_TOPIC_OR_PARTITION", -1, -1)
    if version >= 3:
        assert end(epoch, replica_id=12) == ("", epoch, 2), "a client, whatever it says"


# DeleteRecords.


def deleted(world: DataWorld, name: str, offset: int, *, version: int = 2, timeout_ms: int = 5_000) -> Any:
    topic = DeleteRecordsTopic(name=name, partitions=[DeleteRecordsPartition(partition_index=0, offset=offset)])
    response = world.ask(DELETE_RECORDS, DeleteRecordsRequest(topics=[topic], timeout_ms=timeout_ms), version=version)
    ((row,),) = [topic.partitions for topic in response.topics]
    return row


@pytest.mark.parametrize("version", range(DELETE_RECORDS.low, DELETE_RECORDS.high + 1))
def test_records_are_deleted_up_to_an_offset(world: DataWorld, version: int) -> None:
    name = f"deleted-{version}"
    world.topic(name)
    for value in (b"a", b"b", b"c"):
        world.produce(name, batch(value))
    row = deleted(world, name, 1, version=version)
    assert (code(row), row.low_watermark) == ("", 1)
    assert listed(world, name, EARLIEST).offset == 1
    beyond = deleted(world, name, 9, version=version)
    assert (code(beyond), beyond.low_watermark) == ("OFFSET_OUT_OF_RANGE", -1)
    assert deleted(world, name, -1, version=version).low_watermark == 3
    assert listed(world, name, EARLIEST).offset == 3
    assert code(deleted(world, "nobody", 0, version=version)) == "UNKNOWN_TOPIC_OR_PARTITION"


def test_a_deletion_takes_no_longer_than_its_time(world: DataWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.topic("unanswered")

    async def never(*_: Any) -> int:
        await asyncio.sleep(3_600)
        return 0

    monkeypatch.setattr(OffsetService, "_delete_records", never)
    began_s = world.cluster.now_s()
    row = deleted(world, "unanswered", 0, timeout_ms=700)
    assert (code(row), row.low_watermark) == ("REQUEST_TIMED_OUT", -1)
    assert 0.6 < world.cluster.now_s() - began_s < 2


# Producers.


def described(world: DataWorld, *named: tuple[str, int], node: int = 11) -> list[Any]:
    topics = [DescribeProducersTopicRequest(name=name, partition_indexes=[number]) for name, number in named]
    response = world.ask(DESCRIBE_PRODUCERS, DescribeProducersRequest(topics=topics), node=node)
    return [row for topic in response.topics for row in topic.partitions]


def test_the_producers_of_a_partition_are_described(world: DataWorld) -> None:
    where = world.topic("writers")
    assert described(world, ("writers", 0))[0].active_producers == []
    world.produce("writers", batch(b"a", b"b", producer_id=30, producer_epoch=2, base_sequence=0))

    async def job(broker: Any) -> None:
        leading = broker.replicas.leader_of(where)
        append_open(leading, transactional(b"open", 20, 1), 20, 1)
        marker = encode_control(
            ControlKind.ABORT, coordinator_epoch=4, timestamp=1_000, producer_id=25, producer_epoch=0
        )
        leading.append(marker, is_coordinator=True)

    world.cluster.on_broker(11, job)
    (row,) = described(world, ("writers", 0))
    reported = [
        (
            one.producer_id,
            one.producer_epoch,
            one.last_sequence,
            one.last_timestamp,
            one.coordinator_epoch,
            one.current_txn_start_offset,
        )
        for one in row.active_producers
    ]
    assert reported == [(20, 1, 0, 1_000, -1, 2), (25, 0, -1, -1, 4, -1), (30, 2, 1, 1_001, -1, -1)]


def test_follower_lists_the_producers_that_its_own_log_knows(world: DataWorld) -> None:
    where = world.topic("replicated-writers")
    world.produce("replicated-writers", batch(b"a", producer_id=40, producer_epoch=3, base_sequence=0))
    world.cluster.until_equal(where, *BROKERS)
    for node in BROKERS:
        (row,) = described(world, ("replicated-writers", 0), node=node)
        assert (code(row), [one.producer_id for one in row.active_producers]) == ("", [40])
    world.cluster.topic("led-alone", (11,))
    world.cluster.until(lambda: "led-alone" in world.cluster.brokers[NodeId(12)].tail.image.topic_ids)
    (row,) = described(world, ("led-alone", 0), node=12)
    assert (code(row), row.active_producers) == ("NOT_LEADER_OR_FOLLOWER", [])


def test_leaders_describe_their_producers_up_to_a_limit(world: DataWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.topic("two-writers")
    for producer in (1, 2):
        world.produce("two-writers", batch(b"x", producer_id=producer, producer_epoch=0, base_sequence=0))
    rows = described(world, ("two-writers", 5), ("nobody", 0))
    assert [code(row) for row in rows] == ["UNKNOWN_TOPIC_OR_PARTITION"] * 2
    assert all(row.error_message for row in rows)
    monkeypatch.setattr("tidelog.services.offsets.PRODUCERS_MAX", 1)
    (row,) = described(world, ("two-writers", 0))
    assert (code(row), row.active_producers) == ("INVALID_REQUEST", [])


def test_many_producers_are_described_a_few_at_a_time(world: DataWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    where = world.topic("crowd")

    async def job(broker: Any) -> list[int]:
        leading = broker.replicas.leader_of(where)
        for producer in range(1_200):
            leading.append(batch(b"x", producer_id=producer, producer_epoch=0, base_sequence=0))
        describing = asyncio.get_running_loop().create_task(broker.service.offsets._producers(where))
        turns = 0
        while not describing.done():
            await asyncio.sleep(0)
            turns += 1
            if turns == 1:
                leading.log.producers._forget(1_100)  # it has expired meanwhile
        assert turns > 2
        return [row.producer_id for row in await describing]

    assert world.cluster.on_broker(11, job) == [at for at in range(1_200) if at != 1_100]


def producer_id(world: DataWorld, version: int, transactional_id: str | None = None, **more: Any) -> Any:
    request = InitProducerIdRequest(transactional_id=transactional_id, transaction_timeout_ms=60_000, **more)
    return world.ask(INIT_PRODUCER_ID, request, version=version)


def test_producer_ids_are_given_once(world: DataWorld) -> None:
    versions = range(INIT_PRODUCER_ID.low, INIT_PRODUCER_ID.high + 1)
    answers = [producer_id(world, version) for version in versions]
    assert all((one.error_code, one.producer_epoch) == (0, 0) for one in answers)
    ids = [one.producer_id for one in answers]
    again = producer_id(world, 5, producer_id=ids[0], producer_epoch=3)
    assert len({*ids, again.producer_id}) == len(ids) + 1, "who had one gets another"
    assert min(ids) >= 0


def test_a_producer_id_and_its_epoch_come_together(world: DataWorld) -> None:
    assert code(producer_id(world, 5, producer_id=4)) == "INVALID_REQUEST"
    assert code(producer_id(world, 5, producer_epoch=4)) == "INVALID_REQUEST"


def test_without_a_controller_a_producer_tries_again(world: DataWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(_: ProducerIds) -> int:
        raise TransportError("nobody answers")

    async def hanging(_: ProducerIds) -> int:
        await asyncio.sleep(3_600)
        return 1

    async def refusing(_: ProducerIds) -> int:
        raise InvalidRequestError("no")

    quick = DataWorld(world.cluster, RequestLimits(admin_timeout_ms=200))
    for outcome, expected in (
        (failing, "COORDINATOR_LOAD_IN_PROGRESS"),
        (hanging, "COORDINATOR_LOAD_IN_PROGRESS"),
        (refusing, "INVALID_REQUEST"),
    ):
        monkeypatch.setattr(ProducerIds, "next", outcome)
        answer = producer_id(quick, 5)
        assert (code(answer), answer.producer_id) == (expected, -1)
