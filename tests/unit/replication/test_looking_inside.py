"""Batches whose records a topic wants decoded: large ones are decoded elsewhere, and what happens meanwhile counts."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from support.async_tests import asyncio_test
from support.brokers import data_requests
from support.brokers.cluster import NodeId, ReplicationCluster, batch, values_of
from support.grpc_api.nodes import GrpcCluster, until
from test_replicas import BROKERS

from tidelog.log.admission import NeedsDecodingError, RecordRules, admit, inspect_records, record_rules
from tidelog.log.batch import Codec, encode_columns, read_header
from tidelog.log.config import LogConfig
from tidelog.log.producers import ProducerState
from tidelog.model.errors import ErrorCode, RecordTooLargeError
from tidelog.rpc.v1 import admin_pb2
from tidelog.rpc.v1 import log_pb2 as pb
from tidelog.services.produce import ProduceItem
from tidelog.world.real.work import ProcessWork

GZIP = {"compression.type": "gzip"}
LARGE = bytes(200_000)


def code(result: Any) -> ErrorCode | None:
    return None if result.error is None else result.error.code


def test_what_is_decoded_may_be_sixteen_times_the_largest_message_and_no_more() -> None:
    config = LogConfig(compression=Codec.GZIP, message_bytes_max=1 << 20)
    assert config.inspected_bytes_max == 16 << 20
    assert LogConfig(message_bytes_max=100).inspected_bytes_max == 1 << 20
    assert LogConfig(message_bytes_max=60 << 20).inspected_bytes_max == 64 << 20
    with pytest.raises(RecordTooLargeError):
        inspect_records(batch(bytes(17 << 20), codec=Codec.ZSTD), record_rules(config))


def test_no_more_than_was_allowed_is_decoded_on_the_spot() -> None:
    config = LogConfig(compression=Codec.GZIP)
    producers = ProducerState()

    def taken(data: bytes, inspected: RecordRules | None = None) -> Codec:
        (one,) = admit(
            data,
            config=config,
            producers=producers,
            now_ms=2_000,
            is_coordinator=False,
            inspected=inspected,
            inline_bytes_max=1_000,
        )
        return one.header.codec

    assert taken(batch(bytes(500), codec=Codec.ZSTD)) is Codec.GZIP
    assert taken(batch(LARGE, codec=Codec.GZIP)) is Codec.GZIP, "that needs no look"
    large = batch(LARGE, codec=Codec.ZSTD)
    with pytest.raises(NeedsDecodingError) as needed:
        taken(large)
    changed = inspect_records(large, needed.value.rules)
    assert changed is not None
    assert taken(changed, needed.value.rules) is Codec.GZIP
    two = batch(b"a", codec=Codec.ZSTD) + batch(b"b", codec=Codec.ZSTD)
    with pytest.raises(NeedsDecodingError):
        taken(two)


def test_batches_large_and_small_of_one_stream_keep_their_order_and_get_the_topics_codec() -> None:
    with ReplicationCluster(721, brokers=BROKERS) as cluster:
        orders = cluster.topic("orders", BROKERS, configs=GZIP)
        sent = [batch(LARGE if number % 2 else b"%d" % number, codec=Codec.ZSTD) for number in range(6)]

        async def stream(found: Any) -> list[int]:
            started = [
                await data_requests.start_produce(found.service, [ProduceItem(orders, data)], acks=-1, timeout_ms=5_000)
                for data in sent
            ]
            results = [await one.finish() for one in started]
            return [result[0].base_offset for result in results]

        assert cluster.on_broker(11, stream) == list(range(6))
        stored = bytes(cluster.fetch(11, orders, bytes_max=1 << 20).data)
        assert read_header(stored).codec is Codec.GZIP
        assert values_of(stored) == [LARGE if number % 2 else b"%d" % number for number in range(6)]


def test_the_death_of_a_helper_is_a_retriable_error() -> None:
    with ReplicationCluster(722, brokers=BROKERS) as cluster:
        orders = cluster.topic("orders", BROKERS, configs=GZIP)
        work = cluster.brokers[NodeId(11)].node.work
        work.dying.add("inspect_records")
        refused = cluster.produce(11, orders, batch(LARGE))
        assert code(refused) is ErrorCode.THROTTLING_QUOTA_EXCEEDED
        work.dying.clear()
        assert cluster.produce(11, orders, batch(LARGE)).base_offset == 0


def test_who_leads_no_more_when_the_records_are_decoded_stores_nothing() -> None:
    with ReplicationCluster(723, brokers=BROKERS) as cluster:
        orders = cluster.topic("orders", BROKERS, configs=GZIP)
        cluster.write(orders, b"0")
        found = cluster.brokers[NodeId(11)]

        async def produce(_: Any) -> Any:
            running = asyncio.ensure_future(
                data_requests.produce(found.service, [ProduceItem(orders, batch(LARGE))], acks=1, timeout_ms=5_000)
            )
            await asyncio.sleep(0)
            replica = found.replicas.get(orders)
            assert replica is not None
            replica.end_role()
            return await running

        (result,) = cluster.on_broker(11, produce)
        assert result.error is not None
        assert result.error.retriable
        assert cluster.log(11, orders).end_offset == 1


def test_settings_that_change_meanwhile_count() -> None:
    with ReplicationCluster(724, brokers=BROKERS) as cluster:
        orders = cluster.topic("orders", BROKERS, configs=GZIP)
        cluster.write(orders, b"0")
        log = cluster.log(11, orders)
        looks: list[RecordRules] = []
        leading = cluster.leading(orders)
        look = type(leading).inspect_records

        async def changing(self: Any, batches: bytes, wanted: RecordRules, **more: Any) -> bytes:
            looks.append(wanted)
            if len(looks) == 1:
                log.context.configure(LogConfig(compression=Codec.LZ4))
            return await look(self, batches, wanted, **more)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(type(leading), "inspect_records", changing)
            assert cluster.produce(11, orders, batch(LARGE)).error is None
        assert [one.codec for one in looks] == [Codec.GZIP, Codec.LZ4]
        assert read_header(bytes(cluster.fetch(11, orders, 1).data)).codec is Codec.LZ4


@pytest.mark.parametrize("settings", [GZIP, {"cleanup.policy": "compact"}], ids=["codec", "keys"])
@asyncio_test
async def test_a_small_request_that_decompresses_to_much_does_not_hold_the_loop(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    helpers = ProcessWork(1)
    async with asyncio.timeout(90), GrpcCluster(tmp_path) as cluster:
        await cluster.start_controllers(1)
        node = await cluster.start_broker(11)
        assert node.service is not None
        replicas = node.service.log_directories._replicas
        replicas.admission_work = helpers
        request = admin_pb2.CreateTopicsRequest()
        topic = request.topics.add(name="t", partitions=1, replication_factor=1)
        for key, value in settings.items():
            topic.configs.add(key=key, value=value)
        await cluster.call(11, "Admin", "CreateTopics", request)
        await until(lambda: bool(replicas.leaders()))
        count = 120_000
        data = encode_columns([1_000] * count, [b"k"] * count, [bytes(90)] * count, codec=Codec.ZSTD)
        worst = 0.0

        async def watch() -> None:
            nonlocal worst
            while True:
                began = time.monotonic()
                await asyncio.sleep(0.005)
                worst = max(worst, time.monotonic() - began - 0.005)

        watching = asyncio.create_task(watch())
        produce = pb.ProduceRequest(acks=-1)
        produce.partitions.add(topic="t", partition=0, batches=data)
        answer = await cluster.call(11, "Log", "Produce", produce, timeout_s=60)
        watching.cancel()
        assert not answer.partitions[0].HasField("error"), answer.partitions[0].error.message
        bomb = pb.ProduceRequest(acks=-1)
        bomb.partitions.add(topic="t", partition=0, batches=batch(bytes(30 << 20), codec=Codec.ZSTD))
        refused = await cluster.call(11, "Log", "Produce", bomb, timeout_s=60)
        assert refused.partitions[0].error.name == "MESSAGE_TOO_LARGE"
        # On the loop it is a second and more; other processes share the machine.
        assert worst < 0.4
    await helpers.close()
