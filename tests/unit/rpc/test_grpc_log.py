"""The service Log against whole brokers: batches in and out, offsets, streams, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest
from support.brokers import data_requests
from support.brokers.cluster import RunningBroker, batch, orders_cluster, values_of
from support.grpc_api.simulated_nodes import ApiCluster

from tidelog.log.batch import read_header
from tidelog.log.batch_header import stamp
from tidelog.model.errors import ErrorCode, OffsetOutOfRangeError, RemoteError, TidelogError
from tidelog.model.ids import NodeId
from tidelog.rpc.grpc.admin import AdminHandlers
from tidelog.rpc.grpc.cluster import ClusterHandlers
from tidelog.rpc.grpc.groups import GroupsHandlers
from tidelog.rpc.grpc.log import LogHandlers, fetch_response
from tidelog.rpc.grpc.methods import METHODS, decode_response_frame, encode_message, method_named
from tidelog.rpc.grpc.transactions import TransactionsHandlers
from tidelog.rpc.v1 import admin_pb2
from tidelog.rpc.v1 import common_pb2 as common
from tidelog.rpc.v1 import log_pb2 as pb
from tidelog.services.context import INTERNAL
from tidelog.services.fetch import FetchResult
from tidelog.services.fetch_stream import end_of
from tidelog.services.limits import RequestLimits
from tidelog.world.simulated import SimNode

BROKERS = (11, 12, 13)


class World:
    """One cluster for the module; each test has a topic of its own, which broker 11 leads."""

    def __init__(self, cluster: ApiCluster) -> None:
        self.cluster = cluster

    def ask(self, name: str, request: Any, *, node: int = 11) -> Any:
        return self.cluster.api(node, "Log", name, request)

    def refused(self, name: str, request: Any, *, node: int = 11) -> RemoteError:
        with pytest.raises(RemoteError, match=r".") as refusal:
            self.ask(name, request, node=node)
        return refusal.value

    def topic(self, name: str) -> bytes:
        """Its id."""
        made = self.cluster.topic(name, (11, 12, 13))
        brokers = self.cluster.brokers.values()
        self.cluster.world.run_until(lambda: all(name in broker.tail.image.topic_ids for broker in brokers), timeout=10)
        return made.topic_id.bytes

    def produce(self, name: str, *values: bytes, node: int = 11, **more: Any) -> pb.ProducedPartition:
        item = pb.ProducePartition(topic=name, batches=batch(*values), **more)
        (done,) = self.ask("Produce", pb.ProduceRequest(partitions=[item]), node=node).partitions
        assert isinstance(done, pb.ProducedPartition)
        return done

    def fetch(self, *, node: int = 11, max_wait_ms: int = 0, **item: Any) -> pb.FetchedPartition:
        request = pb.FetchRequest(partitions=[pb.FetchPartition(**item)], max_wait_ms=max_wait_ms)
        (found,) = self.ask("Fetch", request, node=node).partitions
        assert isinstance(found, pb.FetchedPartition)
        return found


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with ApiCluster(3, brokers=BROKERS) as cluster:
        yield World(cluster)
        assert cluster.failures == []


# Produce and fetch.


def test_a_conditional_produce_names_the_end_and_the_claim(world: World) -> None:
    world.topic("conditions")

    def produce(data: bytes, **condition: Any) -> pb.ProducedPartition:
        item = pb.ProducePartition(topic="conditions", batches=data, **condition)
        (done,) = world.ask("Produce", pb.ProduceRequest(partitions=[item])).partitions
        assert isinstance(done, pb.ProducedPartition)
        return done

    claim = batch(b"mine", producer_id=7, producer_epoch=0, base_sequence=0, is_claim=True)
    assert produce(claim, expected_offset=0).base_offset == 0
    mismatch = produce(batch(b"x"), expected_offset=0)
    assert (mismatch.error.name, mismatch.error.code, mismatch.error.retriable) == ("OFFSET_MISMATCH", 1001, False)
    assert (mismatch.end_offset, mismatch.base_offset) == (1, -1)
    stale = produce(batch(b"x"), fencing_token=5)
    assert (stale.error.name, stale.claim) == ("STALE_FENCING_TOKEN", 0)
    assert produce(batch(b"x"), fencing_token=0, expected_offset=1).base_offset == 1
    with pytest.raises(TidelogError, match="an offset is not negative"):
        produce(batch(b"x"), expected_offset=-1)


def test_batches_come_back_as_they_went_in_by_name_and_by_id(world: World) -> None:
    topic_id = world.topic("round")
    done = world.produce("round", b"a", b"b")
    assert not done.HasField("error"), done.error.message
    assert (done.base_offset, done.start_offset) == (0, 0)
    again = world.produce("", b"c", topic_id=topic_id)
    assert again.base_offset == 2
    found = world.fetch(topic_id=topic_id)
    assert values_of(found.data) == [b"a", b"b", b"c"]
    assert (found.high_watermark, found.last_stable_offset, found.start_offset) == (3, 3, 0)
    assert read_header(found.data).size < len(found.data)
    assert values_of(world.fetch(topic="round", offset=1).data, start=1) == [b"b", b"c"]


def test_a_partition_that_is_led_elsewhere_says_who_leads(world: World) -> None:
    world.topic("elsewhere")
    done = world.produce("elsewhere", b"a", node=12)
    assert (done.error.name, done.error.retriable, done.leader) == ("NOT_LEADER_OR_FOLLOWER", True, 11)
    assert done.base_offset == -1
    found = world.fetch(topic="elsewhere", node=12)
    assert found.error.name == "NOT_LEADER_OR_FOLLOWER"
    assert found.leader == 11


def test_leader_epochs_are_checked_when_a_request_has_them(world: World) -> None:
    world.topic("epochs")
    epoch = world.fetch(topic="epochs").leader_epoch
    assert epoch >= 0
    assert not world.produce("epochs", b"a", leader_epoch=epoch).HasField("error")
    assert world.produce("epochs", b"a", leader_epoch=epoch + 1).error.name == "UNKNOWN_LEADER_EPOCH"
    assert world.fetch(topic="epochs", leader_epoch=epoch + 5).error.name == "UNKNOWN_LEADER_EPOCH"
    assert not world.fetch(topic="epochs", leader_epoch=epoch, last_epoch=epoch, offset=1).HasField("error")
    if epoch:
        assert world.produce("epochs", b"a", leader_epoch=0).error.name == "FENCED_LEADER_EPOCH"


def test_each_partition_fails_by_itself(world: World) -> None:
    world.topic("own")
    items = [
        pb.ProducePartition(topic="nobody", batches=batch(b"x")),
        pb.ProducePartition(topic="own", batches=batch(b"x")),
        pb.ProducePartition(topic="own", partition=7, batches=batch(b"x")),
        pb.ProducePartition(topic_id=UUID(int=4).bytes, batches=batch(b"x")),
        pb.ProducePartition(topic_id=b"short", batches=batch(b"x")),
    ]
    rows = world.ask("Produce", pb.ProduceRequest(partitions=items, tag=9))
    assert rows.tag == 9
    assert [row.error.name for row in rows.partitions] == [
        "UNKNOWN_TOPIC_OR_PARTITION",
        "",
        "UNKNOWN_TOPIC_OR_PARTITION",
        "UNKNOWN_TOPIC_ID",
        "INVALID_REQUEST",
    ]
    assert [(row.topic, row.partition) for row in rows.partitions][2] == ("own", 7)
    damaged = bytearray(batch(b"x"))
    damaged[-1] ^= 1
    for data, error in ((bytes(damaged), "CORRUPT_MESSAGE"), (b"", "INVALID_RECORD"), (b"abc", "CORRUPT_MESSAGE")):
        item = pb.ProducePartition(topic="own", batches=data)
        (row,) = world.ask("Produce", pb.ProduceRequest(partitions=[item])).partitions
        assert row.error.name == error
        assert row.error.message
    assert values_of(world.fetch(topic="own").data) == [b"x"]


def test_a_request_that_makes_no_sense_is_refused_as_a_whole(world: World) -> None:
    world.topic("whole")
    item = pb.ProducePartition(topic="whole", batches=batch(b"x"))
    assert world.refused("Produce", pb.ProduceRequest()).code is ErrorCode.INVALID_REQUEST
    unknown_acks = pb.ProduceRequest(partitions=[item], acks=2)
    assert world.refused("Produce", unknown_acks).code is ErrorCode.INVALID_REQUIRED_ACKS
    wanted = pb.FetchPartition(topic="whole")
    for fetch in (
        pb.FetchRequest(),
        pb.FetchRequest(partitions=[wanted, wanted]),
        pb.FetchRequest(partitions=[wanted], isolation=5),  # type: ignore[arg-type]
    ):
        assert world.refused("Fetch", fetch).code is ErrorCode.INVALID_REQUEST
    assert world.fetch(topic="whole").data == b""


def test_an_offset_outside_of_the_log_is_reported(world: World) -> None:
    world.topic("outside")
    world.produce("outside", b"a")
    assert world.fetch(topic="outside", offset=50).error.name == "OFFSET_OUT_OF_RANGE"


def test_a_fetch_waits_for_records_and_is_woken_by_them(world: World) -> None:
    world.topic("woken")
    cluster = world.cluster
    fetch, produce = method_named("Log", "Fetch"), method_named("Log", "Produce")
    asked = pb.FetchRequest(partitions=[pb.FetchPartition(topic="woken")], min_bytes=1, max_wait_ms=20_000)
    written = pb.ProduceRequest(partitions=[pb.ProducePartition(topic="woken", batches=batch(b"now"))])

    async def both(_: SimNode) -> tuple[Any, float]:
        loop, transport = asyncio.get_running_loop(), cluster.admin_transport
        began = loop.time()
        waiting = loop.create_task(
            transport.call(NodeId(11), fetch.wire_name, asked.SerializeToString(), timeout_ms=30_000)
        )
        await asyncio.sleep(1)
        assert not waiting.done()
        await transport.call(NodeId(11), produce.wire_name, written.SerializeToString(), timeout_ms=9_000)
        return pb.FetchResponse.FromString(await waiting), loop.time() - began

    found, took_s = cluster.world.run(cluster.admin, both)
    assert values_of(found.partitions[0].data) == [b"now"]
    assert took_s < 3
    before_s = cluster.now_s()
    assert world.fetch(topic="woken", offset=1, max_wait_ms=300).data == b""
    assert cluster.now_s() - before_s < 2


def test_the_bytes_of_a_response_are_limited_but_a_reader_always_gets_on(world: World) -> None:
    world.topic("limits")
    for number in range(4):
        world.produce("limits", bytes([number]) * 1_000)
    one = len(batch(b"x" * 1_000))
    request = pb.FetchRequest(partitions=[pb.FetchPartition(topic="limits")], max_bytes=2 * one + 10)
    (found,) = world.ask("Fetch", request).partitions
    assert len(found.data) == 2 * one
    assert len(world.fetch(topic="limits", max_bytes=1).data) == one


# Streams.


def test_produce_stream_appends_in_order_and_answers_in_order(world: World) -> None:
    world.topic("pipeline")
    requests = [
        pb.ProduceRequest(partitions=[pb.ProducePartition(topic="pipeline", batches=batch(b"%d" % number))], tag=number)
        for number in range(200)
    ]
    answers = world.cluster.api_stream(11, "Log", "ProduceStream", *requests)
    assert [answer.tag for answer in answers] == list(range(200))
    assert [answer.partitions[0].base_offset for answer in answers] == list(range(200))
    assert values_of(world.fetch(topic="pipeline").data) == [b"%d" % number for number in range(200)]


def test_a_bad_request_ends_a_produce_stream_with_its_error(world: World) -> None:
    world.topic("spoilt")
    good = pb.ProduceRequest(partitions=[pb.ProducePartition(topic="spoilt", batches=batch(b"a"))])
    with pytest.raises(RemoteError) as refusal:
        world.cluster.api_stream(11, "Log", "ProduceStream", good, pb.ProduceRequest(), good)
    assert refusal.value.code is ErrorCode.INVALID_REQUEST
    assert len(values_of(world.fetch(topic="spoilt").data)) <= 1


def test_a_produce_stream_that_is_cut_while_its_requests_wait_leaves_nothing_behind() -> None:
    with orders_cluster(415, b"0") as (cluster, orders):
        for broker in (12, 13):
            cluster.network.block(NodeId(broker), NodeId(11))

        async def cut(found: RunningBroker) -> None:
            service = found.service
            limits = RequestLimits(produce_stream_requests_max=2)
            handler = LogHandlers(service, limits)
            row = pb.ProducePartition(
                topic_id=orders.topic_id.bytes, partition=orders.partition, batches=batch(bytes(1000))
            )

            async def receive() -> pb.ProduceRequest:
                return pb.ProduceRequest(partitions=[row])

            async def send(_response: object) -> None:
                raise AssertionError("nothing is acknowledged")

            caller = INTERNAL
            stream = asyncio.get_running_loop().create_task(handler.produce_stream(receive, caller, send))
            await asyncio.sleep(0.1)
            # One is awaited, two stand in line, one waits for its place there: no more is read.
            assert len(data_requests.leading(service, orders).acks) == 4
            stream.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stream
            assert (len(data_requests.leading(service, orders).acks), service.produce.queued_bytes) == (0, 0)

        cluster.on_broker(11, cut)


def test_fetch_stream_pushes_what_is_written_and_counts_offsets_on(world: World) -> None:
    world.topic("pushed")
    cluster = world.cluster
    stream_method, produce = method_named("Log", "FetchStream"), method_named("Log", "Produce")
    request = pb.FetchRequest(
        partitions=[pb.FetchPartition(topic="pushed"), pb.FetchPartition(topic="nobody")], max_wait_ms=500
    )

    async def follow(_: SimNode) -> tuple[list[bytes], list[str], int]:
        transport = cluster.admin_transport
        stream = await transport.open_stream(NodeId(11), stream_method.wire_name)
        await stream.send(encode_message(request))
        found: list[bytes] = []
        errors: list[str] = []
        empty = 0
        for number in range(5):
            item = pb.ProducePartition(topic="pushed", batches=batch(b"%d" % number))
            data = pb.ProduceRequest(partitions=[item]).SerializeToString()
            await transport.call(NodeId(11), produce.wire_name, data, timeout_ms=9_000)
            while len(found) <= number:
                response = decode_response_frame(stream_method, await stream.receive())
                errors += [row.error.name for row in response.partitions if row.HasField("error")]
                found += [value for row in response.partitions for value in values_of(row.data)]
        while empty < 2:
            response = decode_response_frame(stream_method, await stream.receive())
            empty += not any(row.data for row in response.partitions)
        stream.close()
        return found, errors, empty

    found, errors, empty = cluster.world.run(cluster.admin, follow)
    assert found == [b"%d" % number for number in range(5)]
    assert errors == ["UNKNOWN_TOPIC_OR_PARTITION"]
    assert empty == 2
    waits = cluster.brokers[NodeId(11)].service.fetch
    cluster.world.run_until(lambda: waits.waiting_fetches == 0, timeout=5)


def test_a_fetch_stream_that_finds_no_place_to_wait_looks_now_and_then(world: World) -> None:
    world.topic("crowded")
    cluster = world.cluster
    stream_method, produce = method_named("Log", "FetchStream"), method_named("Log", "Produce")
    service = cluster.brokers[NodeId(11)].service.fetch
    fetches = 0

    async def follow(_: SimNode) -> tuple[list[float], float]:
        transport, loop = cluster.admin_transport, asyncio.get_running_loop()
        stream = await transport.open_stream(NodeId(11), stream_method.wire_name)
        request = pb.FetchRequest(partitions=[pb.FetchPartition(topic="crowded")], max_wait_ms=2_500)
        await stream.send(encode_message(request))
        came_s = [loop.time()]
        for _number in range(3):
            response = decode_response_frame(stream_method, await stream.receive())
            assert not any(row.data for row in response.partitions)
            came_s.append(loop.time())
        item = pb.ProducePartition(topic="crowded", batches=batch(b"at last"))
        data = pb.ProduceRequest(partitions=[item]).SerializeToString()
        await transport.call(NodeId(11), produce.wire_name, data, timeout_ms=9_000)
        written_s = loop.time()
        response = decode_response_frame(stream_method, await stream.receive())
        assert [value for row in response.partitions for value in values_of(row.data)] == [b"at last"]
        stream.close()
        return came_s, loop.time() - written_s

    limits, fetch = service.limits, service.fetch

    async def counted(*arguments: Any, **more: Any) -> list[FetchResult]:
        nonlocal fetches
        fetches += 1
        return await fetch(*arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "limits", replace(limits, waiting_fetches_max=0))
        patch.setattr(service, "fetch", counted)
        came_s, took_s = cluster.world.run(cluster.admin, follow)
        cluster.world.run_for(3)
    assert all(2.4 < later - earlier < 2.7 for earlier, later in pairwise(came_s)), came_s
    assert took_s <= 1.1
    assert fetches <= 20, "once a second, not in a circle"


def test_a_fetch_stream_of_nothing_that_is_here_ends(world: World) -> None:
    world.topic("away")
    request = pb.FetchRequest(partitions=[pb.FetchPartition(topic="away")])
    (only,) = world.cluster.api_stream(12, "Log", "FetchStream", request)
    assert only.partitions[0].error.name == "NOT_LEADER_OR_FOLLOWER"


def test_high_watermarks_of_many_partitions_are_watched_at_once(world: World) -> None:
    world.topic("watched-1")
    world.topic("watched-2")
    cluster = world.cluster
    watch, produce = method_named("Log", "WatchOffsets"), method_named("Log", "Produce")
    names = ("watched-1", "watched-2", "nobody")
    request = pb.WatchOffsetsRequest(partitions=[common.TopicPartition(topic=name) for name in names])

    async def follow(_: SimNode) -> tuple[dict[str, int], list[str]]:
        transport = cluster.admin_transport
        stream = await transport.open_stream(NodeId(11), watch.wire_name)
        await stream.send(encode_message(request))
        marks: dict[str, int] = {}
        errors: list[str] = []
        written = False
        while marks != {"watched-1": 0, "watched-2": 3}:
            for row in decode_response_frame(watch, await stream.receive()).partitions:
                if row.HasField("error"):
                    errors.append(row.error.name)
                else:
                    marks[row.topic] = row.high_watermark
            if len(marks) == 2 and not written:
                written = True
                item = pb.ProducePartition(topic="watched-2", batches=batch(b"a", b"b", b"c"))
                data = pb.ProduceRequest(partitions=[item]).SerializeToString()
                await transport.call(NodeId(11), produce.wire_name, data, timeout_ms=9_000)
        stream.close()
        return marks, errors

    _, errors = cluster.world.run(cluster.admin, follow)
    assert errors == ["UNKNOWN_TOPIC_OR_PARTITION"]
    (only,) = cluster.api_stream(12, "Log", "WatchOffsets", request, count=1)
    assert {row.error.name for row in only.partitions} == {"UNKNOWN_TOPIC_OR_PARTITION"}


# Offsets.


def test_offsets_are_found_by_time_and_by_epoch(world: World) -> None:
    world.topic("times")
    world.produce("times", b"a", b"b", b"c")  # at 1000, 1001 and 1002

    def offset(timestamp: int, name: str = "times") -> tuple[int, int, str]:
        item = pb.ListOffsetsPartition(topic=name, timestamp=timestamp)
        (row,) = world.ask("ListOffsets", pb.ListOffsetsRequest(partitions=[item])).partitions
        return row.offset, row.timestamp, row.error.name

    assert offset(-1) == (3, -1, "")
    assert offset(-2) == (0, -1, "")
    assert offset(-3) == (2, 1002, "")
    assert offset(1001) == (1, 1001, "")
    assert offset(5_000) == (-1, -1, "")
    assert offset(-9)[2] == "UNSUPPORTED_VERSION"
    assert offset(-1, "nobody") == (-1, 0, "UNKNOWN_TOPIC_OR_PARTITION")
    epoch = world.fetch(topic="times").leader_epoch

    def end(of: int) -> tuple[int, int, str]:
        item = pb.EpochPartition(topic="times", epoch=of)
        (row,) = world.ask("OffsetForLeaderEpoch", pb.OffsetForLeaderEpochRequest(partitions=[item])).partitions
        return row.epoch, row.end_offset, row.error.name

    assert end(epoch) == (epoch, 3, "")


def test_records_are_deleted_and_ranges_are_measured(world: World) -> None:
    world.topic("trim")
    for value in (b"a", b"b", b"c"):
        world.produce("trim", value)
    size = len(batch(b"a"))

    def measure(start: int, end: int) -> tuple[int, str]:
        item = pb.OffsetRange(topic="trim", start_offset=start, end_offset=end)
        (row,) = world.ask("RangeBytes", pb.RangeBytesRequest(partitions=[item])).partitions
        return row.bytes, row.error.name

    assert measure(0, 3) == (3 * size, "")
    assert measure(2, 1) == (0, "INVALID_REQUEST")

    def delete(before: int, node: int = 11) -> tuple[int, str]:
        item = pb.DeleteRecordsPartition(topic="trim", before_offset=before)
        request = pb.DeleteRecordsRequest(partitions=[item])
        (row,) = world.ask("DeleteRecords", request, node=node).partitions
        return row.start_offset, row.error.name

    assert delete(2) == (2, "")
    assert delete(99)[1] == "OFFSET_OUT_OF_RANGE"
    assert delete(2, node=12)[1] == "NOT_LEADER_OR_FOLLOWER"
    assert world.fetch(topic="trim", offset=0).error.name == "OFFSET_OUT_OF_RANGE"
    assert values_of(world.fetch(topic="trim", offset=2).data) == [b"c"]
    assert delete(-1) == (3, "")


@pytest.mark.requirement("a:G-60")
def test_records_before_a_time_are_deleted_by_looking_up_its_offset(world: World) -> None:
    world.topic("old")
    world.produce("old", b"a", b"b", b"c")  # at 1000, 1001 and 1002
    item = pb.ListOffsetsPartition(topic="old", timestamp=1001)
    (found,) = world.ask("ListOffsets", pb.ListOffsetsRequest(partitions=[item])).partitions
    deleted = pb.DeleteRecordsPartition(topic="old", before_offset=found.offset)
    (row,) = world.ask("DeleteRecords", pb.DeleteRecordsRequest(partitions=[deleted])).partitions
    assert row.start_offset == 1
    assert world.fetch(topic="old", offset=0).error.name == "OFFSET_OUT_OF_RANGE"
    assert values_of(world.fetch(topic="old", offset=1).data, start=1) == [b"b", b"c"]


def test_every_producer_id_is_given_once(world: World) -> None:
    given = [
        world.ask("InitProducerId", pb.InitProducerIdRequest(), node=node).producer_id for node in (11, 12, 11, 13, 12)
    ]
    assert len(set(given)) == 5


def test_brokers_describe_their_log_directories_through_any_node(world: World) -> None:
    topic_id = world.topic("sized")
    world.produce("sized", b"x" * 500)
    request = admin_pb2.DescribeLogDirsRequest(topics=["sized"])
    rows = world.cluster.api(int(world.cluster.active()), "Admin", "DescribeLogDirs", request).brokers
    assert [row.broker for row in rows] == list(BROKERS)
    for row in rows:
        (directory,) = row.directories
        (replica,) = directory.replicas
        assert (replica.topic, replica.topic_id, replica.partition) == ("sized", topic_id, 0)
        assert replica.bytes >= 500 or row.broker != 11
        assert len(directory.directory_id) == 16
        assert directory.usable_bytes > 0
    rows = world.cluster.api(12, "Admin", "DescribeLogDirs", admin_pb2.DescribeLogDirsRequest(brokers=[11])).brokers
    assert len(rows[0].directories[0].replicas) > 1


def test_a_replica_is_moved_to_another_directory_of_its_broker_through_any_node() -> None:
    with ApiCluster(9, directories=2, brokers=(11, 12)) as cluster:
        made = cluster.topic("moved", (11, 12))
        world = World(cluster)
        assert not world.produce("moved", b"a", b"b").HasField("error")

        def directories() -> dict[bytes, list[str]]:
            request = admin_pb2.DescribeLogDirsRequest(brokers=[11])
            (row,) = cluster.api(12, "Admin", "DescribeLogDirs", request).brokers
            return {found.directory_id: [replica.topic for replica in found.replicas] for found in row.directories}

        before = directories()
        (target,) = [directory for directory, topics in before.items() if not topics]

        def move(directory_id: bytes, **named: Any) -> str:
            item = admin_pb2.MovedReplica(directory_id=directory_id, **named)
            request = admin_pb2.MoveReplicasRequest(broker=11, replicas=[item])
            (row,) = cluster.api(12, "Admin", "MoveReplicas", request).replicas
            return str(row.error.name)

        assert move(target, topic="moved") == ""
        assert directories()[target] == ["moved"]
        assert move(target, topic_id=made.topic_id.bytes) == ""
        assert values_of(world.fetch(topic="moved").data) == [b"a", b"b"]
        assert move(UUID(int=8).bytes, topic="moved") == "INVALID_REQUEST"
        assert move(b"short", topic="moved") == "INVALID_REQUEST"
        assert move(target, topic="nobody") == "UNKNOWN_TOPIC_OR_PARTITION"
        assert cluster.failures == []


# By hand.


def test_a_joined_fetch_response_is_the_same_message() -> None:
    named = pb.FetchPartition(topic="t", topic_id=bytes(16), partition=3)
    error = OffsetOutOfRangeError("no", offset=1, start=2, end=3)
    rows = [
        FetchResult(data=b"x" * 300, high_watermark=7, last_stable=6, start_offset=1, leader_epoch=0, leader=2),
        FetchResult(error=error),
        FetchResult(data=b"y", diverging=(3, 4), preferred_replica=12, aborted=((5, 6),)),
        FetchResult(data=b"z" * 70_000),
    ]
    response = asyncio.run(fetch_response([(named, row) for row in rows]))
    found = pb.FetchResponse.FromString(response.SerializeToString())
    assert [row.data for row in found.partitions] == [row.data for row in rows]
    assert found.partitions[1].error.name == "OFFSET_OUT_OF_RANGE"
    assert (found.partitions[0].high_watermark, found.partitions[0].last_stable_offset) == (7, 6)
    assert (found.partitions[2].diverging.epoch, found.partitions[2].diverging.end_offset) == (3, 4)
    assert [(row.producer_id, row.first_offset) for row in found.partitions[2].aborted] == [(5, 6)]
    assert found.partitions[2].preferred_replica == 12
    assert all((row.topic, row.partition) == ("t", 3) for row in found.partitions)
    assert found == pb.FetchResponse.FromString(found.SerializeToString())


def test_where_a_reader_goes_on_is_behind_the_last_batch() -> None:
    last = bytearray(batch(b"c", b"d", b"e"))
    stamp(last, base_offset=2, leader_epoch=4)
    assert end_of(batch(b"a", b"b") + bytes(last)) == (5, 4)


def test_a_partition_lists_the_producers_that_its_log_remembers(world: World) -> None:
    world.topic("remembered")
    data = batch(b"x", producer_id=77, producer_epoch=2, base_sequence=0)
    item = pb.ProducePartition(topic="remembered", batches=data)
    (row,) = world.ask("Produce", pb.ProduceRequest(partitions=[item])).partitions
    assert not row.error.name
    named = [common.TopicPartition(topic="remembered"), common.TopicPartition(topic="nowhere")]
    known, unknown = world.ask("DescribeProducers", pb.DescribeProducersRequest(partitions=named)).partitions
    (producer,) = known.producers
    assert (producer.producer_id, producer.producer_epoch, producer.last_sequence) == (77, 2, 0)
    assert producer.transaction_start_offset == -1
    assert unknown.error.name == "UNKNOWN_TOPIC_OR_PARTITION"


def test_every_method_of_the_protos_has_its_handler() -> None:
    handlers = {
        "Log": LogHandlers,
        "Groups": GroupsHandlers,
        "Transactions": TransactionsHandlers,
        "Cluster": ClusterHandlers,
        "Admin": AdminHandlers,
    }
    assert set(handlers) == {method.service for method in METHODS.values()}
    for method in METHODS.values():
        assert callable(getattr(handlers[method.service], method.handler)), method.full_name
    assert len(METHODS) == 57
