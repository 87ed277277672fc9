"""Bad requests for records, offsets and groups get the same error code through the gRPC API and the Kafka API.

A check exists once, in the services. `DIFFERENCES` are the codes that Kafka's own clients need instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from google.protobuf.message import Message
from support.brokers.cluster import batch
from support.kafka.cluster import KafkaCluster

from tidelog.coordinator.coordinator import OFFSETS_TOPIC
from tidelog.log.batch import Codec
from tidelog.log.batch_header import TRANSACTIONAL_BIT
from tidelog.model.errors import ErrorCode, RemoteError
from tidelog.rpc.kafka import fetch, group_offsets, groups, members, messages, offsets, produce
from tidelog.rpc.kafka.api import Api
from tidelog.rpc.kafka.messages import data as kafka_data
from tidelog.rpc.kafka.messages import groups as kafka_groups
from tidelog.rpc.kafka.messages import metadata as kafka_metadata
from tidelog.rpc.v1 import common_pb2 as common
from tidelog.rpc.v1 import groups_pb2, log_pb2

LONG, LONG_GROUP = "x" * 300, "g" * 2_000
NAMES = {"unknown topic": ("none", 0), "illegal name": ("no topic/name", 0), "empty name": ("", 0)}
NAMES |= {"long name": (LONG, 0), "partition out of range": ("orders", 7), "negative partition": ("orders", -1)}
GOOD = ("orders", 0)
TWICE = (GOOD, GOOD)
Named = tuple[str, int]
Case = tuple[str, Message, Api[Any, Any], int, object]
"""gRPC service and method, its request; the Kafka API, its version and request."""


# Requests in both forms.


def produce_case(*named: Named, records: bytes | None = None, acks: int = -1) -> Case:
    records = batch(b"v") if records is None else records
    items = [log_pb2.ProducePartition(topic=name, partition=number, batches=records) for name, number in named]
    topics = [
        kafka_data.TopicProduceData(
            name=name, partition_data=[kafka_data.PartitionProduceData(index=number, records=records)]
        )
        for name, number in named
    ]
    request = kafka_data.ProduceRequest(acks=acks, timeout_ms=5_000, topic_data=topics)
    return "Log.Produce", log_pb2.ProduceRequest(partitions=items, acks=acks), messages.PRODUCE, 12, request


def fetch_case(*named: Named, offset: int = 0, isolation: int = 0, leader_epoch: int = -1) -> Case:
    more = {} if leader_epoch < 0 else {"leader_epoch": leader_epoch}
    items = [
        log_pb2.FetchPartition(topic=name, partition=number, offset=offset, **more)  # type: ignore[arg-type]
        for name, number in named
    ]
    topics = [
        kafka_data.FetchTopic(
            topic=name,
            partitions=[
                kafka_data.FetchPartition(
                    partition=number,
                    fetch_offset=offset,
                    current_leader_epoch=leader_epoch,
                    partition_max_bytes=1_000,
                )
            ],
        )
        for name, number in named
    ]
    asked = log_pb2.FetchRequest(partitions=items, isolation=isolation)  # type: ignore[arg-type]
    return "Log.Fetch", asked, messages.FETCH, 12, kafka_data.FetchRequest(topics=topics, isolation_level=isolation)


def list_case(*named: Named, timestamp: int = -1, isolation: int = 0, leader_epoch: int = -1) -> Case:
    more = {} if leader_epoch < 0 else {"leader_epoch": leader_epoch}
    items = [
        log_pb2.ListOffsetsPartition(topic=name, partition=number, timestamp=timestamp, **more)  # type: ignore[arg-type]
        for name, number in named
    ]
    topics = [
        kafka_data.ListOffsetsTopic(
            name=name,
            partitions=[
                kafka_data.ListOffsetsPartition(
                    partition_index=number, timestamp=timestamp, current_leader_epoch=leader_epoch
                )
            ],
        )
        for name, number in named
    ]
    asked = log_pb2.ListOffsetsRequest(partitions=items, isolation=isolation)  # type: ignore[arg-type]
    request = kafka_data.ListOffsetsRequest(topics=topics, isolation_level=isolation)
    return "Log.ListOffsets", asked, messages.LIST_OFFSETS, messages.LIST_OFFSETS.high, request


def epoch_case(*named: Named, leader_epoch: int = -1) -> Case:
    more = {} if leader_epoch < 0 else {"leader_epoch": leader_epoch}
    items = [
        log_pb2.EpochPartition(topic=name, partition=number, epoch=0, **more)  # type: ignore[arg-type]
        for name, number in named
    ]
    topics = [
        kafka_data.OffsetForLeaderTopic(
            topic=name,
            partitions=[
                kafka_data.OffsetForLeaderPartition(partition=number, leader_epoch=0, current_leader_epoch=leader_epoch)
            ],
        )
        for name, number in named
    ]
    asked = log_pb2.OffsetForLeaderEpochRequest(partitions=items)
    request = kafka_data.OffsetForLeaderEpochRequest(topics=topics)
    return "Log.OffsetForLeaderEpoch", asked, messages.OFFSET_FOR_LEADER_EPOCH, 4, request


def delete_case(*named: Named, offset: int = 0) -> Case:
    items = [
        log_pb2.DeleteRecordsPartition(topic=name, partition=number, before_offset=offset) for name, number in named
    ]
    topics = [
        kafka_data.DeleteRecordsTopic(
            name=name, partitions=[kafka_data.DeleteRecordsPartition(partition_index=number, offset=offset)]
        )
        for name, number in named
    ]
    request = kafka_data.DeleteRecordsRequest(topics=topics, timeout_ms=5_000)
    return "Log.DeleteRecords", log_pb2.DeleteRecordsRequest(partitions=items), messages.DELETE_RECORDS, 2, request


def commit_case(*named: Named, group: str = "g", member: str = "", epoch: int = -1, note: str = "") -> Case:
    items = [
        groups_pb2.OffsetToCommit(topic=name, partition=number, offset=1, leader_epoch=-1, metadata=note)
        for name, number in named
    ]
    topics = [
        kafka_groups.OffsetCommitRequestTopic(
            name=name,
            partitions=[
                kafka_groups.OffsetCommitRequestPartition(
                    partition_index=number, committed_offset=1, committed_metadata=note
                )
            ],
        )
        for name, number in named
    ]
    asked = groups_pb2.CommitOffsetsRequest(group=group, member_id=member, member_epoch=epoch, offsets=items)
    request = kafka_groups.OffsetCommitRequest(
        group_id=group, member_id=member, generation_id_or_member_epoch=epoch, topics=topics
    )
    return "Groups.CommitOffsets", asked, messages.OFFSET_COMMIT, 9, request


def committed_case(*named: Named, group: str = "g", member: str | None = None, epoch: int = -1) -> Case:
    items = [common.TopicPartition(topic=name, partition=number) for name, number in named]
    more = {} if member is None else {"member_id": member, "member_epoch": epoch}
    topics = [kafka_groups.OffsetFetchRequestTopics(name=name, partition_indexes=[number]) for name, number in named]
    asked = groups_pb2.FetchOffsetsRequest(group=group, partitions=items, **more)  # type: ignore[arg-type]
    of_group = kafka_groups.OffsetFetchRequestGroup(group_id=group, member_id=member, member_epoch=epoch, topics=topics)
    return "Groups.FetchOffsets", asked, messages.OFFSET_FETCH, 9, kafka_groups.OffsetFetchRequest(groups=[of_group])


def forget_case(*named: Named, group: str = "g") -> Case:
    items = [common.TopicPartition(topic=name, partition=number) for name, number in named]
    topics = [
        kafka_groups.OffsetDeleteRequestTopic(
            name=name, partitions=[kafka_groups.OffsetDeleteRequestPartition(partition_index=number)]
        )
        for name, number in named
    ]
    asked = groups_pb2.DeleteOffsetsRequest(group=group, partitions=items)
    request = kafka_groups.OffsetDeleteRequest(group_id=group, topics=topics)
    return "Groups.DeleteOffsets", asked, messages.OFFSET_DELETE, 0, request


def group_case(method: str, api: Api[Any, Any], group: str) -> Case:
    asked = getattr(groups_pb2, f"{method}Request")(groups=[group])
    if api is messages.FIND_COORDINATOR:
        request: object = kafka_metadata.FindCoordinatorRequest(coordinator_keys=[group])
    elif api is messages.DELETE_GROUPS:
        request = kafka_groups.DeleteGroupsRequest(groups_names=[group])
    else:
        request = kafka_groups.ConsumerGroupDescribeRequest(group_ids=[group])
    return f"Groups.{method}", asked, api, api.high, request


def heartbeat_case(group: str, member: str, epoch: int) -> Case:
    asked = groups_pb2.HeartbeatRequest(group=group, member_id=member, member_epoch=epoch, rebalance_timeout_ms=1_000)
    asked.subscription.topics.append("orders")
    asked.owned.SetInParent()
    request = kafka_groups.ConsumerGroupHeartbeatRequest(
        group_id=group,
        member_id=member,
        member_epoch=epoch,
        rebalance_timeout_ms=1_000,
        subscribed_topic_names=["orders"],
        topic_partitions=[],
    )
    api = messages.CONSUMER_GROUP_HEARTBEAT
    return "Groups.Heartbeat", asked, api, api.high, request


def _changed(records: bytes, at: int, value: int) -> bytes:
    return records[:at] + bytes([value]) + records[at + 1 :]


ATTRIBUTES_AT, MAGIC_AT = 22, 16
TRANSACTIONAL = batch(b"v", producer_id=7, producer_epoch=0, base_sequence=0, is_transactional=True)
ROWS = dict.fromkeys(("Groups.CommitOffsets", "Groups.FetchOffsets", "Groups.DeleteOffsets"), "offsets")
ROWS |= {"Groups.FindCoordinator": "coordinators", "Groups.Heartbeat": ""}
ROWS |= dict.fromkeys(("Groups.DescribeGroups", "Groups.DeleteGroups"), "groups")
"""The rows of a response of the gRPC API."""
CASES: dict[str, Case] = {
    "produce: acks 2": produce_case(GOOD, acks=2),
    "produce: acks -2": produce_case(GOOD, acks=-2),
    "produce: no records": produce_case(GOOD, records=b""),
    "produce: garbage": produce_case(GOOD, records=bytes(range(100))),
    "produce: truncated": produce_case(GOOD, records=batch(b"v")[:-1]),
    "produce: wrong checksum": produce_case(GOOD, records=_changed(batch(b"v"), len(batch(b"v")) - 1, 99)),
    "produce: magic 1": produce_case(GOOD, records=_changed(batch(b"v"), MAGIC_AT, 1)),
    "produce: unknown codec": produce_case(GOOD, records=_changed(batch(b"v"), ATTRIBUTES_AT, 7)),
    "produce: wrong codec": produce_case(GOOD, records=_changed(batch(b"v"), ATTRIBUTES_AT, Codec.GZIP.value)),
    "produce: transactional": produce_case(GOOD, records=_changed(batch(b"v"), ATTRIBUTES_AT, TRANSACTIONAL_BIT)),
    "produce: transactional second": produce_case(GOOD, records=batch(b"v") + TRANSACTIONAL),
    "produce: control second": produce_case(GOOD, records=batch(b"v") + batch(b"v", is_control=True)),
    "produce: oversized": produce_case(GOOD, records=batch(bytes(5_000))),
    "produce: twice": produce_case(*TWICE),
    "fetch: negative offset": fetch_case(GOOD, offset=-1),
    "fetch: past the end": fetch_case(GOOD, offset=1_000),
    "fetch: isolation": fetch_case(GOOD, isolation=7),
    "fetch: newer epoch": fetch_case(GOOD, leader_epoch=99),
    "fetch: twice": fetch_case(*TWICE),
    "list offsets: timestamp -17": list_case(GOOD, timestamp=-17),
    "list offsets: isolation": list_case(GOOD, isolation=7),
    "list offsets: newer epoch": list_case(GOOD, leader_epoch=99),
    "list offsets: twice": list_case(*TWICE),
    "epoch end: newer epoch": epoch_case(GOOD, leader_epoch=99),
    "epoch end: twice": epoch_case(*TWICE),
    "delete: negative offset": delete_case(GOOD, offset=-5),
    "delete: past the end": delete_case(GOOD, offset=1_000),
    "delete: twice": delete_case(*TWICE),
    "commit: no group": commit_case(GOOD, group=""),
    "commit: long group": commit_case(GOOD, group=LONG_GROUP),
    "commit: member of no group": commit_case(GOOD, group="none", member="nobody", epoch=3),
    "commit: unknown member": commit_case(GOOD, group="members", member="nobody", epoch=3),
    "commit: long metadata": commit_case(GOOD, note="x" * 20_000),
    "committed: long group": committed_case(GOOD, group=LONG_GROUP),
    "committed: unknown member": committed_case(GOOD, member="nobody", epoch=3),
    "forget: unknown group": forget_case(GOOD, group="none"),
    "forget: long group": forget_case(GOOD, group=LONG_GROUP),
    "coordinator: no group": group_case("FindCoordinator", messages.FIND_COORDINATOR, ""),
    "coordinator: long group": group_case("FindCoordinator", messages.FIND_COORDINATOR, LONG_GROUP),
    "describe: unknown group": group_case("DescribeGroups", messages.CONSUMER_GROUP_DESCRIBE, "none"),
    "describe: long group": group_case("DescribeGroups", messages.CONSUMER_GROUP_DESCRIBE, LONG_GROUP),
    "delete group: unknown": group_case("DeleteGroups", messages.DELETE_GROUPS, "none"),
    "delete group: long": group_case("DeleteGroups", messages.DELETE_GROUPS, LONG_GROUP),
    "heartbeat: unknown member": heartbeat_case("g", "nobody", 3),
    "heartbeat: epoch -9": heartbeat_case("g", "nobody", -9),
    "heartbeat: long group": heartbeat_case(LONG_GROUP, "m", 0),
}
MAKERS: dict[str, Callable[..., Case]] = {
    "produce": produce_case,
    "fetch": fetch_case,
    "list offsets": list_case,
    "epoch end": epoch_case,
}
MAKERS |= {"delete": delete_case, "commit": commit_case, "committed": committed_case, "forget": forget_case}
CASES |= {f"{what}: {name}": make(named) for what, make in MAKERS.items() for name, named in NAMES.items()}

DIFFERENCES: dict[str, tuple[ErrorCode, ErrorCode | None]] = {
    # A fetch session has each partition once; Kafka takes the last.
    "fetch: twice": (ErrorCode.INVALID_REQUEST, None),
    # Kafka's protocol has one batch for each partition.
    "produce: transactional second": (ErrorCode.INVALID_TXN_STATE, ErrorCode.INVALID_RECORD),
    # Clients of this version look for this code, older ones for ILLEGAL_GENERATION.
    "commit: member of no group": (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.GROUP_ID_NOT_FOUND),
    # Kafka has no error here: nothing is committed for such a partition.
    **{f"committed: {name}": (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, None) for name in NAMES},
}
"""(code by gRPC, code by Kafka)."""


@pytest.fixture(scope="module")
def brokers() -> Iterator[KafkaCluster]:
    handlers = produce.HANDLERS | fetch.HANDLERS | offsets.HANDLERS
    handlers |= groups.HANDLERS | group_offsets.HANDLERS | members.HANDLERS
    with KafkaCluster(78, handlers, brokers=(11,)) as made:
        for name in ("orders", OFFSETS_TOPIC):
            made.leader(made.topic(name, (11,), configs={"max.message.bytes": "4000"} if name == "orders" else None))
        coordinator = made.brokers[next(iter(made.brokers))].broker.coordinator
        made.until(lambda: bool(list(coordinator.leading_shards())))
        made.api(11, "Groups", "Heartbeat", heartbeat_case("members", "m", 0)[1])
        yield made


def code_by_grpc(brokers: KafkaCluster, method: str, request: Message) -> ErrorCode | None:
    service, _, name = method.partition(".")
    try:
        response = brokers.api(11, service, name, request)
    except RemoteError as error:
        return error.code
    rows = getattr(response, ROWS.get(method, "partitions"), [response])
    return next((ErrorCode[row.error.name] for row in rows if row.HasField("error")), None)


def code_by_kafka(brokers: KafkaCluster, api: Api[Any, Any], version: int, request: object) -> ErrorCode | None:
    code = next(_codes(brokers.send(api, request, version=version)), 0)
    return next((row for row in ErrorCode if row.value.code == code), None)


def _codes(value: Any) -> Iterator[int]:
    """All error codes of a response, the outermost first."""
    if isinstance(value, list):
        for item in value:
            yield from _codes(item)
    elif is_dataclass(value):
        if code := getattr(value, "error_code", 0):
            yield code
        for field in fields(value):
            yield from _codes(getattr(value, field.name))


@pytest.mark.parametrize("name", sorted(CASES))
def test_both_apis_return_the_same_code(brokers: KafkaCluster, name: str) -> None:
    method, asked, api, version, request = CASES[name]
    by_grpc, by_kafka = code_by_grpc(brokers, method, asked), code_by_kafka(brokers, api, version, request)
    if name in DIFFERENCES:
        assert (by_grpc, by_kafka) == DIFFERENCES[name]
    else:
        assert by_grpc is by_kafka is not None
