"""Produce of the Kafka API against whole brokers: what is stored, what is acknowledged, what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from support.brokers.cluster import NodeId, ReplicationCluster, RunningBroker, batch
from support.brokers.transactions import ScriptedCoordinator
from support.kafka.data_api import BROKERS, DataWorld, produce_request

from tidelog.log.batch import Codec, Record, encode
from tidelog.model.errors import ErrorCode, RemoteError, TransportError
from tidelog.model.group_errors import CoordinatorLoadingError
from tidelog.model.transaction_errors import (
    ConcurrentTransactionsError,
    ProducerFencedError,
    TransactionAbortableError,
)
from tidelog.replication.transaction_verifier import TransactionVerifier
from tidelog.rpc.kafka import produce
from tidelog.rpc.kafka.messages import PRODUCE
from tidelog.rpc.kafka.messages.data import ProduceResponse
from tidelog.rpc.kafka.services import DeferredResponse
from tidelog.services.limits import RequestLimits
from tidelog.services.partition_lookup import PARTITIONS_PER_SLICE as NAMES_PER_SLICE

IDS_SINCE = 13


@pytest.fixture(scope="module")
def world() -> Iterator[DataWorld]:
    with ReplicationCluster(701, brokers=BROKERS) as cluster:
        yield DataWorld(cluster)


def code(row: Any) -> str:
    return next((one.name for one in ErrorCode if one.value.code == row.error_code), "") if row.error_code else ""


def rows_of(response: ProduceResponse) -> list[str]:
    return [code(row) for topic in response.responses for row in topic.partition_responses]


@pytest.mark.requirement("a:C-07")
@pytest.mark.parametrize("version", range(PRODUCE.low, PRODUCE.high + 1))
def test_a_batch_is_stored_as_it_came_in_every_version(world: DataWorld, version: int) -> None:
    name = f"version-{version}"
    where = world.topic(name)
    topic = where.topic_id.bytes if version >= IDS_SINCE else name
    sent = batch(b"a", b"b")
    for base_offset in (0, 2):
        response = world.ask(PRODUCE, produce_request((topic, 0, sent)), version=version)
        (made,) = response.responses
        (row,) = made.partition_responses
        assert (made.name, made.topic_id) == (("", topic) if version >= IDS_SINCE else (name, bytes(16)))
        assert (row.index, row.error_code, row.base_offset, row.log_append_time_ms) == (0, 0, base_offset, -1)
        assert row.log_start_offset == (0 if version >= 5 else -1)
        assert (row.record_errors, row.error_message, response.throttle_time_ms) == ([], None, 0)
        assert response.node_endpoints == []
    stored = world.cluster.fetch(11, where)
    assert stored.high_watermark == 4, "acknowledged by all"
    assert bytes(stored.data)[21 : len(sent)] == sent[21:], "but for offset and epoch"
    assert world.is_idle()


def test_the_append_time_is_returned_where_the_topic_has_it(world: DataWorld) -> None:
    world.topic("stamped", configs={"message.timestamp.type": "LogAppendTime"})
    assert world.produce("stamped", batch(b"x")).log_append_time_ms > 0


@pytest.mark.requirement("a:C-07", "a:C-08")
def test_acks_are_all_one_or_none(world: DataWorld) -> None:
    where = world.topic("acks")
    for acks in (-1, 1):
        assert world.produce("acks", batch(b"x"), acks=acks).error_code == 0
    assert world.ask(PRODUCE, produce_request(("acks", 0, batch(b"none")), acks=0), version=12) is None
    world.cluster.until(lambda: world.cluster.leading(where).high_watermark == 3)
    assert code(world.produce("acks", batch(b"x"), acks=2)) == "INVALID_REQUIRED_ACKS"
    assert world.cluster.log(11, where).end_offset == 3
    assert world.is_idle()


def test_who_gets_no_answer_learns_of_a_refusal_by_the_end_of_its_connection(world: DataWorld) -> None:
    where = world.topic("deaf")
    for named, expected in (
        (("nobody", 0, batch(b"x")), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (("deaf", 0, None), ErrorCode.INVALID_RECORD),
        (("deaf", 0, batch(b"x")[:-1]), ErrorCode.CORRUPT_MESSAGE),
    ):
        with pytest.raises(RemoteError, match=f"{named[0]}-0 .acks=0.: .") as refusal:
            world.ask(PRODUCE, produce_request(named, acks=0), version=9)
        assert refusal.value.code is expected
    assert world.cluster.log(11, where).end_offset == 0
    assert world.is_idle()


def test_a_partition_that_is_led_elsewhere_says_who_leads_and_where(world: DataWorld) -> None:
    where = world.topic("elsewhere")
    epoch = world.cluster.partition(where).leader_epoch
    for version in (9, 10, 12):
        response = world.ask(PRODUCE, produce_request(("elsewhere", 0, batch(b"x"))), version=version, node=12)
        (row,) = response.responses[0].partition_responses
        assert (code(row), row.base_offset) == ("NOT_LEADER_OR_FOLLOWER", -1)
        assert "led by broker 11" in row.error_message
        reported = [(one.node_id, one.host, one.port, one.rack) for one in response.node_endpoints]
        leader = row.current_leader.leader_id, row.current_leader.leader_epoch
        if version < 10:
            assert (leader, reported) == ((-1, -1), [])
        else:
            assert (leader, reported) == ((11, epoch), [(11, "host-11", 9092, None)])


def test_each_partition_fails_by_itself(world: DataWorld) -> None:
    where = world.topic("own")
    broken = bytearray(batch(b"x"))
    broken[-1] ^= 1
    request = produce_request(
        ("nobody", 0, batch(b"x")),
        ("own", 7, batch(b"x")),
        ("own", 0, batch(b"kept")),
        ("own", 0, batch(b"again")),
    )
    assert rows_of(world.ask(PRODUCE, request, version=12)) == [
        "UNKNOWN_TOPIC_OR_PARTITION",
        "UNKNOWN_TOPIC_OR_PARTITION",
        "",
        "INVALID_REQUEST",
    ]
    assert code(world.produce("own", bytes(broken))) == "CORRUPT_MESSAGE"
    assert code(world.produce("own", batch(bytes(2 << 20)))) == "MESSAGE_TOO_LARGE"
    assert world.cluster.values(where) == [b"kept"]
    unknown = produce_request((UUID(int=9).bytes, 0, batch(b"x")), (bytes(16), 0, batch(b"x")))
    assert rows_of(world.ask(PRODUCE, unknown, version=13)) == ["UNKNOWN_TOPIC_ID"] * 2
    assert world.ask(PRODUCE, produce_request(), version=12).responses == []


def test_the_clusters_own_topics_are_not_written_by_clients(world: DataWorld) -> None:
    world.topic("__consumer_offsets")
    row = world.produce("__consumer_offsets", batch(b"x"))
    assert code(row) == "INVALID_TOPIC"
    assert "coordinators" in (row.error_message or "")


def test_records_are_one_batch_of_the_present_format(world: DataWorld) -> None:
    where = world.topic("format")
    old = bytes(16) + b"\x01" + bytes(20)
    for records, expected, said in (
        (None, "INVALID_RECORD", "without"),
        (b"", "INVALID_RECORD", "without"),
        (batch(b"x") + batch(b"y"), "INVALID_RECORD", "exactly one"),
        (old, "INVALID_RECORD", "magic 1"),
        (bytes(60), "INVALID_RECORD", "magic 0"),
        (b"abc", "CORRUPT_MESSAGE", "bytes"),
        (batch(b"x")[:-3], "CORRUPT_MESSAGE", "bytes"),
        (
            batch(b"x", is_transactional=True, producer_id=5, producer_epoch=0, base_sequence=0),
            "INVALID_TXN_STATE",
            "names no transactional id",
        ),
    ):
        row = world.produce("format", records)
        assert code(row) == expected, said
        assert said in (row.error_message or "")
    request = produce_request(("format", 0, batch(b"x")), transactional_id="")
    assert rows_of(world.ask(PRODUCE, request, version=12)) == ["INVALID_REQUEST"], "no id is null, not empty"
    assert world.cluster.log(11, where).end_offset == 0


def test_a_batch_of_a_transaction_is_added_for_new_clients_and_verified_for_old_ones(world: DataWorld) -> None:
    where = world.topic("transactions")
    coordinator = ScriptedCoordinator()
    found = world.cluster.brokers[NodeId(11)]
    found.service.produce.verifier = TransactionVerifier(coordinator, found.replicas.tasks)
    known = coordinator.begin("app", producer_id=5, epoch=0)
    first = batch(b"x", is_transactional=True, producer_id=5, producer_epoch=0, base_sequence=0)
    request = produce_request(("transactions", 0, first), transactional_id="app")
    for error, old, new in (
        (None, "INVALID_TXN_STATE", None),
        (ConcurrentTransactionsError("ending"), "NOT_ENOUGH_REPLICAS", "CONCURRENT_TRANSACTIONS"),
        (CoordinatorLoadingError("loading"), "NOT_ENOUGH_REPLICAS", "NOT_ENOUGH_REPLICAS"),
        (TransportError("broken"), "NOT_ENOUGH_REPLICAS", "NOT_ENOUGH_REPLICAS"),
        (ProducerFencedError("newer"), "INVALID_PRODUCER_EPOCH", "INVALID_PRODUCER_EPOCH"),
        (TransactionAbortableError("aborted"), "TRANSACTION_ABORTABLE", "INVALID_PRODUCER_EPOCH"),
    ):
        coordinator.error = error
        assert rows_of(world.ask(PRODUCE, request, version=11)) == [old]
        if isinstance(error, TransactionAbortableError):
            assert rows_of(world.ask(PRODUCE, request, version=10)) == ["INVALID_TXN_STATE"]
        if new is not None:
            assert rows_of(world.ask(PRODUCE, request, version=12)) == [new]
    assert world.cluster.log(11, where).end_offset == 0
    coordinator.error = None
    assert rows_of(world.ask(PRODUCE, request, version=12)) == [""]
    assert known.partitions == {where}
    assert {(asked.version, asked.verify_only) for asked in coordinator.requests} == {(1, True), (2, False)}


def test_every_codec_is_stored_and_zstd_only_of_who_may_know_it(world: DataWorld) -> None:
    where = world.topic("codecs")
    records = [Record(0, 1_000, b"k", b"v" * 300)]
    for codec in Codec:
        assert world.produce("codecs", encode(records, codec=codec), version=7).error_code == 0
    row = world.produce("codecs", encode(records, codec=Codec.ZSTD), version=6)
    assert code(row) == "UNSUPPORTED_COMPRESSION_TYPE"
    assert world.cluster.values(where) == [b"v" * 300] * len(Codec)


def test_a_repeat_of_a_producer_is_acknowledged_with_its_offset(world: DataWorld) -> None:
    where = world.topic("repeats")
    sent = [batch(bytes([at]), producer_id=77, producer_epoch=0, base_sequence=at) for at in range(7)]
    assert [world.produce("repeats", one).base_offset for one in sent] == list(range(7))
    assert world.produce("repeats", sent[5]).base_offset == 5
    assert code(world.produce("repeats", sent[0])) == "DUPLICATE_SEQUENCE_NUMBER"
    gap = batch(b"x", producer_id=77, producer_epoch=0, base_sequence=20)
    assert code(world.produce("repeats", gap)) == "OUT_OF_ORDER_SEQUENCE_NUMBER"
    fenced = [batch(b"x", producer_id=77, producer_epoch=epoch, base_sequence=0) for epoch in (3, 2)]
    assert [code(world.produce("repeats", one)) for one in fenced] == ["", "INVALID_PRODUCER_EPOCH"]
    assert world.cluster.log(11, where).end_offset == 8


def test_batches_that_must_be_looked_into_elsewhere_come_from_any_buffer(world: DataWorld) -> None:
    where = world.topic("recompressed", configs={"compression.type": "gzip"})
    sent = batch(bytes(300_000))

    frame = bytearray(b"".join(PRODUCE.encode_request(9, produce_request(("recompressed", 0, sent)))))

    async def job(broker: RunningBroker) -> str:
        request = PRODUCE.decode_request(9, memoryview(frame).toreadonly())
        assert isinstance(request.topic_data[0].partition_data[0].records, memoryview), "no copy"
        later = await produce.handle(request, world.context(broker, 9))
        assert isinstance(later, DeferredResponse)
        return code((await later.respond()).responses[0].partition_responses[0])

    assert world.cluster.on_broker(11, job) == ""
    assert world.cluster.values(where) == [bytes(300_000)]


def test_requests_are_appended_in_their_order_and_answered_when_they_are_replicated(world: DataWorld) -> None:
    where = world.topic("order")
    cluster = world.cluster

    async def job(broker: RunningBroker) -> list[int]:
        later = []
        for at in range(5):
            begun = await world.begin(broker, PRODUCE, 12, produce_request(("order", 0, batch(bytes([at])))))
            assert isinstance(begun, DeferredResponse)
            later.append(begun)
            assert cluster.log(11, where).end_offset == at + 1, "appended when the handler has returned"
        assert cluster.leading(where).high_watermark == 0
        answers = [await one.respond() for one in later]
        return [answer.responses[0].partition_responses[0].base_offset for answer in answers]

    assert cluster.on_broker(11, job) == [0, 1, 2, 3, 4]
    assert cluster.values(where) == [bytes([at]) for at in range(5)]
    assert world.is_idle()


def test_a_request_whose_client_is_gone_is_forgotten(world: DataWorld) -> None:
    where = world.topic("gone")

    async def job(broker: RunningBroker) -> None:
        begun = await world.begin(broker, PRODUCE, 12, produce_request(("gone", 0, batch(b"x"))))
        assert isinstance(begun, DeferredResponse)
        assert broker.service.produce.queued_bytes > 0
        begun.abandon()
        second = await world.begin(broker, PRODUCE, 12, produce_request(("gone", 0, batch(b"y"))))
        waiting = asyncio.get_running_loop().create_task(second.respond())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        second.abandon()

    world.cluster.on_broker(11, job)
    assert world.is_idle()
    world.cluster.until(lambda: world.cluster.leading(where).high_watermark == 2)


def test_what_is_not_replicated_in_time_says_so(world: DataWorld) -> None:
    world.topic("slow")
    cluster = world.cluster
    for broker in (12, 13):
        cluster.network.block(NodeId(broker), NodeId(11))
    row = world.produce("slow", batch(b"x"), timeout_ms=300)
    cluster.network.heal()
    assert code(row) == "REQUEST_TIMED_OUT"
    assert row.base_offset == -1
    assert world.is_idle()


def test_a_busy_broker_asks_every_client_to_try_again(world: DataWorld) -> None:
    where = world.topic("busy")
    service = world.cluster.brokers[NodeId(11)].service.produce
    before, service.limits = service.limits, RequestLimits(request_bytes_max=100)

    async def job(broker: RunningBroker) -> str:
        first = await world.begin(broker, PRODUCE, 12, produce_request(("busy", 0, batch(b"x" * 80))))
        answer = await world.answer(broker, PRODUCE, 12, produce_request(("busy", 0, batch(b"y" * 80))))
        assert rows_of(await first.respond()) == [""]
        (refused,) = rows_of(answer)
        return refused

    try:
        assert world.cluster.on_broker(11, job) == "LEADER_NOT_AVAILABLE"
    finally:
        service.limits = before
    assert world.cluster.values(where) == [b"x" * 80]


def test_many_partitions_are_dealt_with_a_few_at_a_time(world: DataWorld) -> None:
    where = world.topic("wide")

    async def job(broker: RunningBroker) -> tuple[list[str], int]:
        asked = produce_request(("wide", 0, batch(b"x")), *(("nobody", at, batch(b"x")) for at in range(2_000)))
        working = asyncio.get_running_loop().create_task(world.answer(broker, PRODUCE, 12, asked))
        turns = 0
        while not working.done():
            await asyncio.sleep(0 if turns < 100 else 0.01)  # replication takes time
            turns += 1
        return rows_of(await working), turns

    codes, turns = world.cluster.on_broker(11, job)
    assert codes == ["", *["UNKNOWN_TOPIC_OR_PARTITION"] * 2_000]
    assert turns >= 2 * 2_000 // NAMES_PER_SLICE
    assert world.cluster.values(where) == [b"x"]
