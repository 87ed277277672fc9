"""Requests and replies as bytes: what goes in comes out; what is no request is refused with where it is wrong."""

import dataclasses
from collections.abc import Callable
from typing import Any
from uuid import UUID

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.metadata.controller import CLUSTER_ID, Cluster

from tidelog.metadata import (
    acls,
    brokers,
    config_changes,
    features,
    lost_replicas,
    partitions,
    producer_ids,
    queries,
    quotas,
    reassignments,
    recovering_replicas,
    topics,
    users,
)
from tidelog.metadata.controller import DECISIONS, QUERIES, Controller
from tidelog.metadata.requests import (
    REPLIES,
    REQUESTS,
    check_request,
    decode_message,
    decode_reply,
    decode_request,
    encode_message,
    encode_reply,
    encode_request,
)
from tidelog.model.errors import (
    ErrorCode,
    InvalidRequestError,
    NotLeaderError,
    RemoteError,
    TidelogError,
    UnsupportedVersionError,
)

ID = UUID(int=7)
EXAMPLES: list[Any] = [
    brokers.Register(
        cluster_id=CLUSTER_ID,
        broker=1,
        incarnation=ID,
        endpoints=(("A", "PLAINTEXT", "h", 1),),
        rack="r",
        directories=(ID,),
        features=(("f", 1, 2),),
        clean_stop_epoch=5,
        lost=((ID, 0),),
    ),
    brokers.Heartbeat(broker=1, broker_epoch=2, metadata_offset=3, wants_fence=True, stalled_directories=(ID,)),
    brokers.Fence(broker=1, broker_epoch=2),
    brokers.Unregister(broker=1, validate_only=True),
    brokers.Drain(broker=1, on=False),
    topics.CreateTopics(
        topics=(topics.NewTopic(name="t", assignment=((1, 2),), configs=(("k", "v"),)),), validate_only=True
    ),
    topics.DeleteTopics(names=("t",), ids=(ID,)),
    topics.AddPartitions(topics=(topics.NewPartitions(name="t", total=3),)),
    topics.AdvanceLogStart(
        broker=1,
        broker_epoch=2,
        partitions=(topics.LogStartAdvance(topic_id=ID, partition=0, leader_epoch=1, start_offset=2),),
    ),
    partitions.AlterPartition(
        broker=1,
        broker_epoch=2,
        partitions=(
            partitions.AlteredPartition(
                topic_id=ID, partition=0, leader_epoch=1, partition_epoch=2, isr=((1, 2), (3, 4))
            ),
        ),
    ),
    lost_replicas.ReplicasLost(broker=1, broker_epoch=2, replicas=((ID, 0),)),
    recovering_replicas.ReplicasRecovered(broker=1, broker_epoch=2, replicas=((ID, 0),)),
    partitions.ReportLogEnds(broker=1, broker_epoch=2, replicas=((ID, 0, 3, 40),)),
    partitions.ElectMissingLeaders(broker=1),
    partitions.ElectLeaders(kind="preferred", partitions=(("t", 0),)),
    partitions.ElectLeaders(kind="unclean"),
    partitions.BalanceLeaders(elections_max=3),
    partitions.AssignDirectories(broker=1, broker_epoch=2, replicas=((ID, 0, ID),)),
    reassignments.AlterReassignments(
        partitions=(
            reassignments.ReassignmentTarget(topic="t", partition=0, replicas=(1, 2)),
            reassignments.ReassignmentTarget(topic="t", partition=1, replicas=None),
        )
    ),
    reassignments.GrowInternalTopics(),
    config_changes.AlterConfigs(
        resources=(
            config_changes.ResourceChange(
                resource_type="topic",
                resource="t",
                changes=(config_changes.ConfigChange(key="k", operation="set", value="v"),),
            ),
        )
    ),
    quotas.AlterQuotas(changes=(quotas.QuotaChange(entity=(("user", None),), values=(("k", 1.5), ("l", None))),)),
    producer_ids.AllocateProducerIdBlock(broker=1, broker_epoch=2),
    features.UpdateFeatures(changes=(features.FeatureChange(name="f", level=1),)),
    users.AlterUsers(changes=(users.UserChange(user="u", mechanism="m", salt=b"s"),)),
    acls.CreateAcls(
        bindings=(acls.AclBinding(resource_type="topic", resource="t", principal="User:u", operation="read"),)
    ),
    acls.DeleteAcls(filters=(acls.AclFilter(host="h"),)),
    queries.DescribeTopics(names=("t",)),
    queries.DescribeBrokers(),
    queries.DescribeConfigs(resource_type="topic", resource="t"),
    queries.ListReassignments(partitions=(("t", 0),)),
    queries.DescribeAcls(matching=acls.AclFilter(principal="User:u")),
    queries.DescribeQuotas(),
    queries.DescribeUsers(),
    queries.DescribeFeatures(),
    queries.FindTopics(topic_ids=(ID,)),
]


def number_of(request: object) -> int:
    return next(number for number, cls in REQUESTS.items() if cls is type(request))


def test_there_is_an_example_and_a_decision_or_an_answer_for_every_request() -> None:
    assert {type(example) for example in EXAMPLES} == set(REQUESTS.values())
    special = {brokers.Register, features.UpdateFeatures}
    assert set(REQUESTS.values()) == {*DECISIONS, *QUERIES, *special}


@pytest.mark.parametrize("request_", EXAMPLES, ids=lambda example: type(example).__name__)
def test_a_request_comes_back_as_it_went(request_: Any) -> None:
    assert decode_request(encode_request(request_)) == request_


def result_of(work: Callable[[], Any]) -> Any:
    """What it returns, or the rejection that it raises."""
    try:
        return work()
    except TidelogError as error:
        return error


def ask(cluster: Cluster, request: Any) -> Any:
    """The reply to a request or question, or its rejection; what would be logged makes a valid image."""

    def work() -> Any:
        if type(request) in QUERIES:
            return cluster.controller.answer(cluster.image, request)
        decision = cluster.controller.decide(cluster.image, request, cluster.context())
        cluster.image.apply_all(decision.records).validate()
        return decision.reply

    return result_of(work)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_every_request_has_a_reply_that_can_travel(example: Any) -> None:
    cluster = Cluster(3)
    cluster.made("t", (0, 1, 2))
    reply = ask(cluster, example)
    back = result_of(lambda: decode_reply(encode_reply(reply)))
    if isinstance(reply, TidelogError):
        assert isinstance(back, RemoteError)
        assert (back.code, str(back)) == (reply.code, str(reply))
    else:
        assert type(reply) in REPLIES.values()
        assert back == reply


def test_a_refusal_travels_with_its_name_and_sentence() -> None:
    with pytest.raises(RemoteError, match="ask node 2") as rejection:
        decode_reply(encode_reply(NotLeaderError("ask node 2", leader=2)))
    assert rejection.value.code is ErrorCode.NOT_CONTROLLER
    unknown = msgpack.packb([0, ["SOMETHING_NEW", "later"]])
    with pytest.raises(RemoteError, match="later") as rejection:
        decode_reply(unknown)
    assert rejection.value.code is ErrorCode.UNKNOWN_SERVER_ERROR


WRONG_VALUES: list[Any] = [None, True, 5, -1, 1 << 63, 1.5, "text", "x" * 70_000, b"bytes", [], [1], ["a"], {}, {0: 1}]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_every_field_with_a_value_of_another_type_is_refused_and_nothing_happens(example: Any) -> None:
    """Each field in turn holds each wrong value: either the codec refuses it, or it is a value that could be meant."""
    cluster = Cluster(2)
    cluster.made("t", (0, 1))
    before = cluster.image
    _, fields = msgpack.unpackb(encode_request(example), strict_map_key=False)
    refusals = 0
    for number in range(len(dataclasses.fields(example))):
        for value in WRONG_VALUES:
            data = msgpack.packb([number_of(example), {**fields, number: value}])
            request = result_of(lambda data=data: decode_request(data))  # type: ignore[misc]
            if isinstance(request, TidelogError):
                refusals += 1
                assert isinstance(request, InvalidRequestError | UnsupportedVersionError)
                assert 0 < len(str(request)) < 500
                continue
            reply = ask(cluster, request)
            assert type(reply) in REPLIES.values() or str(reply)
    assert refusals or not dataclasses.fields(example)
    assert cluster.image is before


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_check_request_and_the_wire_reject_the_same_values(example: Any) -> None:
    check_request(example)
    for field in dataclasses.fields(example):
        for value in (None, 1.5, "text", "x" * 70_000, b"bytes", 1 << 63, (), (1,), ("a",), ((),), ID):
            request = dataclasses.replace(example, **{field.name: value})
            by_wire = result_of(lambda request=request: decode_request(encode_request(request)))  # type: ignore[misc]
            by_check = result_of(lambda request=request: check_request(request))  # type: ignore[misc]
            assert isinstance(by_wire, TidelogError) == isinstance(by_check, TidelogError), (field.name, value)
            assert not isinstance(by_wire, TidelogError) or str(by_wire) == str(by_check)


def test_check_request_bounds_the_bytes_of_a_request() -> None:
    many = topics.DeleteTopics(names=("x" * 60_000,) * 150)
    assert str(result_of(lambda: check_request(many))).endswith("at most 8388608")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_a_message_between_services_is_decoded_as_its_class(example: Any) -> None:
    data = encode_message(example)
    assert decode_message(type(example), data) == example
    for wrong in (b"", data[:-1], b"\xc1", msgpack.packb({99: 1}), msgpack.packb([1])):
        rejection = result_of(lambda wrong=wrong: decode_message(type(example), wrong))  # type: ignore[misc]
        assert isinstance(rejection, InvalidRequestError | UnsupportedVersionError)
    assert isinstance(result_of(lambda: decode_message(type(example), bytes(11), bytes_max=10)), InvalidRequestError)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x92\x01",
        msgpack.packb(None),
        msgpack.packb(7),
        msgpack.packb([1]),
        msgpack.packb([1, {}, 3]),
        msgpack.packb(["x", {}]),
        msgpack.packb([True, {}]),
        msgpack.packb([6, []]),
        msgpack.packb([6, {}]),
        msgpack.packb([6, {"topics": []}]),
        msgpack.packb([6, {-1: []}]),
        msgpack.packb([6, {0: [{}]}]),
        msgpack.packb([6, {0: [{0: "t", 3: [[1, "x"]]}]}]),
        msgpack.packb([6, {0: [{0: "t", 4: [["k"]]}]}]),
        msgpack.packb([7, {1: [msgpack.ExtType(1, b"short")]}]),
        msgpack.packb([7, {1: [msgpack.ExtType(5, bytes(16))]}]),
        b"\x91" * 5000,
        b"\x92\x06\x81\x00" + b"\x91" * 100_000,
        b"\x92\x06\x81\x00\xdd\xff\xff\xff\xff",
        msgpack.packb([6, {0: "\ud800".encode("utf-8", "surrogatepass")}]),
        bytes(9 << 20),
    ],
    ids=lambda data: repr(data[:20]),
)
def test_bytes_that_are_no_request_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        decode_request(data)


def test_what_a_newer_version_asks_for_is_refused_as_such() -> None:
    with pytest.raises(UnsupportedVersionError, match="no request of type 999"):
        decode_request(msgpack.packb([999, {}]))
    with pytest.raises(UnsupportedVersionError, match="Drain has no field 9"):
        decode_request(msgpack.packb([5, {0: 1, 9: True}]))
    with pytest.raises(UnsupportedVersionError, match="no reply of type 999"):
        decode_reply(msgpack.packb([999, {}]))


def test_a_misfit_says_where_it_is() -> None:
    with pytest.raises(InvalidRequestError, match=r"CreateTopics: topics\[1\]\.partitions: an integer of 64 bits"):
        decode_request(msgpack.packb([6, {0: [{0: "a"}, {0: "b", 1: "many"}]}]))


def test_lists_are_bounded() -> None:
    with pytest.raises(InvalidRequestError, match="at most 200000"):
        decode_request(msgpack.packb([7, {0: ["a"] * 200_001}]))


def is_request_or_refused(data: bytes) -> bool:
    result = result_of(lambda: decode_request(data))
    return type(result) in REQUESTS.values() or (
        isinstance(result, InvalidRequestError | UnsupportedVersionError) and bool(str(result))
    )


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_refused(data: bytes) -> None:
    assert is_request_or_refused(data)


@given(st.integers(0, len(EXAMPLES) - 1), st.integers(0, 10_000), st.integers(1, 255))
def test_a_flipped_byte_is_a_request_or_refused(example: int, position: int, flip: int) -> None:
    data = bytearray(encode_request(EXAMPLES[example]))
    data[position % len(data)] ^= flip
    assert is_request_or_refused(bytes(data))


def test_a_request_without_a_decision_is_our_own_error() -> None:
    cluster = Cluster()
    with pytest.raises(AssertionError, match="no decision for str"):
        Controller("c").decide(cluster.image, "do something", cluster.context())
    with pytest.raises(AssertionError, match="no answer for str"):
        Controller("c").answer(cluster.image, "what is it?")
