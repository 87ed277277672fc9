"""Messages as bytes, written out by hand: what stands where, and what is refused."""

from __future__ import annotations

import pytest

from tidelog.rpc.kafka.headers import read_request_header, read_response_header, request_frame, response_frame
from tidelog.rpc.kafka.messages import (
    API_VERSIONS,
    CONSUMER_GROUP_HEARTBEAT,
    CREATE_TOPICS,
    DESCRIBE_PRODUCERS,
    DESCRIBE_QUORUM,
    DESCRIBE_TOPIC_PARTITIONS,
    FETCH,
    HEARTBEAT,
    METADATA,
    OFFSET_DELETE,
    OFFSET_FETCH,
    PRODUCE,
    SYNC_GROUP,
)
from tidelog.rpc.kafka.messages.cluster import DescribeQuorumResponse, QuorumListener, QuorumNode
from tidelog.rpc.kafka.messages.data import (
    DescribeProducersRequest,
    DescribeProducersTopicRequest,
    FetchableTopicResponse,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    ForgottenTopic,
    LeaderIdAndEpoch,
    NodeEndpoint,
    PartitionData,
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    ReplicaState,
    TopicProduceData,
    TopicProduceResponse,
)
from tidelog.rpc.kafka.messages.groups import (
    ConsumerGroupHeartbeatAssignment,
    ConsumerGroupHeartbeatResponse,
    ConsumerGroupHeartbeatTopicPartitions,
    HeartbeatRequest,
    OffsetFetchRequest,
    SyncGroupResponse,
)
from tidelog.rpc.kafka.messages.metadata import (
    Cursor,
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsTopicRequest,
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from tidelog.rpc.kafka.messages.topics import CreatableTopic, CreatableTopicConfig, CreateTopicsRequest
from tidelog.rpc.kafka.messages.versions import ApiVersion, ApiVersionsRequest, ApiVersionsResponse, SupportedFeatureKey
from tidelog.rpc.kafka.wire import (
    ELEMENTS_MAX,
    NUMBERS_MAX,
    EncodedRows,
    MalformedError,
    UnencodableError,
    read_varint,
    unsigned_varint,
)

TOPIC_ID = bytes(range(16))


def plain(text: str) -> bytes:
    """Bytes of hexadecimal numbers; words in quotes stand for their letters."""
    out = b""
    for word in text.split():
        out += word[1:-1].encode() if word.startswith("'") else bytes.fromhex(word)
    return out


def joined(parts: list[bytes | memoryview]) -> bytes:
    return b"".join(parts)


# headers


@pytest.mark.requirement("a:C-01")
def test_a_request_header_has_key_version_correlation_id_and_client_id() -> None:
    data = plain("0003 0008 0000002a 0003 'cli' ff")
    header = read_request_header(data)
    assert (header.api_key, header.api_version, header.correlation_id) == (3, 8, 42)
    assert (header.client_id, header.body) == ("cli", 13)


@pytest.mark.requirement("a:C-01")
def test_a_flexible_request_header_ends_with_tagged_fields() -> None:
    assert read_request_header(plain("0003 0009 0000002a 0003 'cli' 00 ff")).body == 14
    assert read_request_header(plain("0003 0009 0000002a ffff 01 05 02 abcd ff")) == (3, 9, 42, None, 15)


def test_a_header_of_an_unknown_key_is_read_up_to_the_client_id() -> None:
    assert read_request_header(plain("7fff 0009 00000001 0000 ff")) == (0x7FFF, 9, 1, "", 10)


def test_a_header_of_a_version_that_is_not_served_is_read_as_flexible() -> None:
    """A newer client's ApiVersions: it learns what is served, so its correlation id must be known."""
    assert read_request_header(plain("0012 0063 00000001 0000 00 ff")) == (18, 99, 1, "", 11)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0003 0008 0000002a",
        "0003 0008 0000002a 0004 'cli'",
        "0003 0008 0000002a fffe",
        "0003 0008 0000002a 0001 ff",
        "0003 0009 0000002a ffff",
        "0003 0009 0000002a ffff 01",
        "0003 0009 0000002a ffff 01 05 7f ab",
        "0003 0009 0000002a ffff ffffffffff 00",
    ],
)
def test_a_header_that_is_cut_or_wrong_is_malformed(text: str) -> None:
    with pytest.raises(MalformedError):
        read_request_header(plain(text))


def test_frames_begin_with_their_size() -> None:
    body = HEARTBEAT.encode_request(0, HeartbeatRequest(group_id="g", generation_id=1, member_id="m"))
    assert joined(request_frame(HEARTBEAT, 0, 7, "c", body)) == plain(
        "00000015 000c 0000 00000007 0001 'c' 0001 'g' 00000001 0001 'm'"
    )
    assert joined(response_frame(HEARTBEAT, 0, 7, [b"\0\0"])) == plain("00000006 00000007 0000")
    assert joined(response_frame(HEARTBEAT, 4, 7, [b"\0\0", b"end"])) == plain("0000000a 00000007 00 0000 'end'")


def test_the_answer_to_api_versions_never_has_a_flexible_header() -> None:
    assert joined(response_frame(API_VERSIONS, 4, 7, [b"body"])) == plain("00000008 00000007 'body'")
    assert read_response_header(API_VERSIONS, 4, plain("00000007 'body'")) == (7, 4)
    assert read_response_header(METADATA, 9, plain("00000007 01 00 01 ff 'body'")) == (7, 8)
    for short in ("0000", "00000007", "00000007 01"):
        with pytest.raises(MalformedError):
            read_response_header(METADATA, 9, plain(short))


def test_a_large_first_buffer_is_not_copied_behind_the_header() -> None:
    large = bytes(5000)
    assert response_frame(HEARTBEAT, 0, 1, [large])[1] is large


# the encodings


def test_a_message_before_flexible_versions() -> None:
    request = CreateTopicsRequest(
        topics=[
            CreatableTopic(
                name="tides",
                num_partitions=3,
                replication_factor=2,
                configs=[CreatableTopicConfig(name="k", value=None)],
            )
        ],
        timeout_ms=1,
        validate_only=True,
    )
    data = plain("00000001 0005 'tides' 00000003 0002 00000000 00000001 0001 'k' ffff 00000001 01")
    assert joined(CREATE_TOPICS.encode_request(4, request)) == data
    assert CREATE_TOPICS.decode_request(4, data) == request


def test_the_same_message_in_a_flexible_version() -> None:
    request = CreateTopicsRequest(
        topics=[CreatableTopic(name="tides", num_partitions=3, replication_factor=2)], timeout_ms=1
    )
    data = plain("02 06 'tides' 00000003 0002 01 01 00 00000001 00 00")
    assert joined(CREATE_TOPICS.encode_request(5, request)) == data
    assert CREATE_TOPICS.decode_request(5, data) == request


def test_null_and_empty_arrays_differ() -> None:
    everything, nothing = MetadataRequest(topics=None), MetadataRequest(topics=[])
    assert joined(METADATA.encode_request(1, everything)) == plain("ffffffff")
    assert joined(METADATA.encode_request(1, nothing)) == plain("00000000")
    assert joined(METADATA.encode_request(9, everything)) == plain("00 01 00 00 00")
    assert joined(METADATA.encode_request(9, nothing)) == plain("01 01 00 00 00")
    assert METADATA.decode_request(1, plain("ffffffff")).topics is None
    assert METADATA.decode_request(9, plain("01 01 00 00 00")).topics == []


def test_a_topic_is_named_by_its_id_alone() -> None:
    request = MetadataRequest(
        topics=[MetadataRequestTopic(topic_id=TOPIC_ID, name=None)], allow_auto_topic_creation=False
    )
    data = plain(f"02 {TOPIC_ID.hex()} 00 00 00 00 00")
    assert joined(METADATA.encode_request(12, request)) == data
    assert METADATA.decode_request(12, data) == request


def test_numbers_without_sign_have_their_own_range() -> None:
    node = QuorumNode(node_id=1, listeners=[QuorumListener(name="C", host="h", port=65_535)])
    data = plain("0000 01 01 02 00000001 02 02 'C' 02 'h' ffff 00 00 00")
    response = DescribeQuorumResponse(nodes=[node])
    assert joined(DESCRIBE_QUORUM.encode_response(2, response)) == data
    assert DESCRIBE_QUORUM.decode_response(2, data) == response


def test_long_strings_and_arrays_have_varints_of_more_bytes() -> None:
    name = "t" * 300
    request = MetadataRequest(topics=[MetadataRequestTopic(name=name) for _ in range(200)])
    data = joined(METADATA.encode_request(9, request))
    assert data[:4] == bytes([201 & 127 | 128, 201 >> 7, 301 & 127 | 128, 301 >> 7])
    assert METADATA.decode_request(9, data) == request


@pytest.mark.parametrize(
    ("value", "encoded"),
    [(0, "00"), (127, "7f"), (128, "8001"), (300, "ac02"), (16_384, "808001"), ((1 << 32) - 1, "ffffffff0f")],
)
def test_varints(value: int, encoded: str) -> None:
    assert unsigned_varint(value) == bytes.fromhex(encoded)
    assert read_varint(bytes.fromhex(encoded), 0) == (value, len(encoded) // 2)


@pytest.mark.parametrize("encoded", ["ffffffffff", "ffffffff10", "808080808000"])
def test_a_varint_of_more_than_32_bits_is_malformed(encoded: str) -> None:
    with pytest.raises(MalformedError, match="varint"):
        read_varint(bytes.fromhex(encoded), 0)


# nullable structs


def test_a_null_struct_is_one_byte() -> None:
    response = ConsumerGroupHeartbeatResponse(member_id="m", member_epoch=3, heartbeat_interval_ms=5)
    data = plain("00000000 0000 00 02 'm' 00000003 00000005 ff 00")
    assert joined(CONSUMER_GROUP_HEARTBEAT.encode_response(1, response)) == data
    assert CONSUMER_GROUP_HEARTBEAT.decode_response(1, data) == response


def test_a_struct_that_is_there_follows_a_one() -> None:
    owned = ConsumerGroupHeartbeatTopicPartitions(topic_id=TOPIC_ID, partitions=[0, 2])
    response = ConsumerGroupHeartbeatResponse(
        member_epoch=3, assignment=ConsumerGroupHeartbeatAssignment(topic_partitions=[owned])
    )
    data = plain(f"00000000 0000 00 00 00000003 00000000 01 02 {TOPIC_ID.hex()} 03 00000000 00000002 00 00 00")
    assert joined(CONSUMER_GROUP_HEARTBEAT.encode_response(0, response)) == data
    assert CONSUMER_GROUP_HEARTBEAT.decode_response(0, data) == response


def test_a_cursor_is_null_or_a_struct() -> None:
    request = DescribeTopicPartitionsRequest(
        topics=[DescribeTopicPartitionsTopicRequest(name="a")],
        response_partition_limit=9,
        cursor=Cursor(topic_name="a", partition_index=4),
    )
    data = plain("02 02 'a' 00 00000009 01 02 'a' 00000004 00 00")
    assert joined(DESCRIBE_TOPIC_PARTITIONS.encode_request(0, request)) == data
    assert DESCRIBE_TOPIC_PARTITIONS.decode_request(0, data) == request
    assert DESCRIBE_TOPIC_PARTITIONS.decode_request(0, plain("01 00000009 ff 00")).cursor is None


# tagged fields


def test_tagged_fields_at_their_default_are_not_written() -> None:
    data = plain("0000 02 0012 0000 0004 00 00000000 00")
    response = ApiVersionsResponse(api_keys=[ApiVersion(api_key=18, max_version=4)])
    assert joined(API_VERSIONS.encode_response(4, response)) == data
    assert API_VERSIONS.decode_response(4, data) == response


def test_tagged_fields_stand_in_the_order_of_their_tags() -> None:
    response = ApiVersionsResponse(
        finalized_features_epoch=9,
        supported_features=[SupportedFeatureKey(name="f", min_version=1, max_version=2)],
        zk_migration_ready=True,
    )
    data = plain("0000 01 00000000 03 00 08 02 02 'f' 0001 0002 00 01 08 0000000000000009 03 01 01")
    assert joined(API_VERSIONS.encode_response(3, response)) == data
    assert API_VERSIONS.decode_response(3, data) == response


def test_a_tagged_struct_tells_the_new_leader() -> None:
    response = ProduceResponse(
        responses=[
            TopicProduceResponse(
                name="t",
                partition_responses=[
                    PartitionProduceResponse(
                        index=1,
                        error_code=6,
                        base_offset=-1,
                        current_leader=LeaderIdAndEpoch(leader_id=2, leader_epoch=5),
                    )
                ],
            )
        ],
        node_endpoints=[NodeEndpoint(node_id=2, host="h", port=9092)],
    )
    no = "ffffffffffffffff"
    data = plain(
        f"02 02 't' 02 00000001 0006 {no} {no} {no} 01 00 01 00 09 00000002 00000005 00 00"
        "00000000 01 00 0d 02 00000002 02 'h' 00002384 00 00"
    )
    assert joined(PRODUCE.encode_response(12, response)) == data
    assert PRODUCE.decode_response(12, data) == response
    assert PRODUCE.decode_response(9, joined(PRODUCE.encode_response(9, response))).node_endpoints == []


def test_tagged_fields_of_a_follower_are_read() -> None:
    request = FetchRequest(
        cluster_id="c",
        replica_state=ReplicaState(replica_id=3, replica_epoch=8),
        topics=[
            FetchTopic(
                topic_id=TOPIC_ID,
                partitions=[FetchPartition(partition=1, replica_directory_id=TOPIC_ID, high_watermark=77)],
            )
        ],
    )
    data = joined(FETCH.encode_request(18, request))
    assert data.endswith(plain("02 00 02 02 'c' 01 0d 00000003 0000000000000008 00"))
    assert plain(f"02 00 10 {TOPIC_ID.hex()} 01 08 000000000000004d") in data
    assert FETCH.decode_request(18, data) == request


def test_unknown_tagged_fields_are_passed_over() -> None:
    """Of a newer client: in a struct with tags of its own, in one without, and a known tag between unknown ones."""
    assert METADATA.decode_request(9, plain("02 02 'a' 01 07 03 aabbcc 01 00 00 02 00 01 ff 64 00")) == MetadataRequest(
        topics=[MetadataRequestTopic(name="a")]
    )
    data = plain("0000 01 00000000 03 01 08 0000000000000009 02 01 01 8001 02 abcd")
    assert API_VERSIONS.decode_response(3, data) == ApiVersionsResponse(finalized_features_epoch=9)


def test_a_tag_of_a_later_version_is_unknown_in_an_earlier_one() -> None:
    data = joined(FETCH.encode_request(14, FetchRequest(replica_id=4)))
    with_replica_state = data[:-1] + plain("01 01 0d 00000003 0000000000000008 00")
    assert FETCH.decode_request(14, with_replica_state) == FetchRequest(replica_id=4)


@pytest.mark.parametrize(
    "tags",
    [
        "01",
        "01 01",
        "01 01 08 00000000",
        "02 01 08 0000000000000009 01 08 0000000000000009",
        "02 03 01 01 01 08 0000000000000009",
        "01 01 09 0000000000000009 00",
        "01 01 07 00000000000000",
        "01 00 02 02 01",
        "02 07 01 00 07 01 00",
        "01 07 ff ff",
        "ffffffff0f 00 01 01",
    ],
    ids=[
        "no tag",
        "no size",
        "cut",
        "twice",
        "falling",
        "longer than its type",
        "shorter than its type",
        "an array that leaves its field",
        "unknown twice",
        "a size past the end",
        "a count past the end",
    ],
)
def test_tagged_fields_that_are_wrong_are_malformed(tags: str) -> None:
    with pytest.raises(MalformedError):
        API_VERSIONS.decode_response(3, plain("0000 01 00000000 " + tags))


# records


def test_records_of_a_request_are_a_slice_of_it() -> None:
    records = bytes(range(256)) * 8
    request = ProduceRequest(
        acks=-1,
        timeout_ms=1500,
        topic_data=[TopicProduceData(name="t", partition_data=[PartitionProduceData(index=2, records=records)])],
    )
    data = joined(PRODUCE.encode_request(7, request))
    assert data == plain("ffff ffff 000005dc 00000001 0001 't' 00000001 00000002 00000800") + records
    got = PRODUCE.decode_request(7, data).topic_data[0].partition_data[0].records
    assert isinstance(got, memoryview)
    assert got.obj is data
    assert got == records


@pytest.mark.parametrize("version", [4, 11, 12, 18])
def test_records_of_an_answer_are_sent_as_the_buffers_that_they_are(version: int) -> None:
    first, second, small = memoryview(bytes(3000)), b"b" * 2000, b"small"
    response = FetchResponse(
        responses=[
            FetchableTopicResponse(
                partitions=[
                    PartitionData(partition_index=0, records=(first, second)),
                    PartitionData(partition_index=1, records=small),
                    PartitionData(partition_index=2, records=None),
                    PartitionData(partition_index=3, records=b""),
                ]
            )
        ]
    )
    parts = FETCH.encode_response(version, response)
    assert parts[1] is first
    assert parts[2] is second
    assert len(parts) == 4, "what is small is copied"
    got = FETCH.decode_response(version, joined(parts)).responses[0].partitions
    assert [one.records for one in got] == [bytes(3000) + second, small, None, b""]


# rows encoded before their message


@pytest.mark.parametrize("version", [0, 8, 9, 13])
@pytest.mark.parametrize("count", [0, 1, 200])
def test_rows_encoded_bit_by_bit_give_the_same_message(version: int, count: int) -> None:
    topics = [
        MetadataResponseTopic(name=f"t{number}", partitions=[MetadataResponsePartition(replica_nodes=[1, 2])])
        for number in range(count)
    ]
    rows = EncodedRows()
    for start in range(0, count, 64):
        some = topics[start : start + 64]
        rows.add(len(some), METADATA.encode_rows(version, MetadataResponseTopic, some))
    bit_by_bit = MetadataResponse(topics=rows, cluster_id="c")  # type: ignore[arg-type]
    whole = METADATA.encode_response(version, MetadataResponse(topics=topics, cluster_id="c"))
    assert joined(METADATA.encode_response(version, bit_by_bit)) == joined(whole)


# what is refused


@pytest.mark.parametrize(
    ("version", "text"),
    [
        (1, "fffffffe"),
        (1, "00000001 ffff"),
        (1, "00000001 fffe"),
        (1, "00000001 0002 'a'"),
        (1, "00000001 0001 ff"),
        (1, "7fffffff 0001 'a'"),
        (1, "00000000 00000000"),
        (9, "00 01 00 00"),
        (9, "02 00 00 01 00 00 00"),
        (9, "02 02 ff 00 01 00 00 00"),
        (9, "ffffffff0f 02 'a' 00"),
        (9, "02 ffffffff0f 'a' 00 01 00 00 00"),
        (9, "02 02 'a' 00 01 00 00 00 00000000"),
    ],
    ids=[
        "a count below null",
        "null where none may be",
        "a length below null",
        "a string past the end",
        "no UTF-8",
        "a count past the end",
        "bytes left over",
        "no tagged fields",
        "compact null where none may be",
        "compact, no UTF-8",
        "a compact count past the end",
        "a compact string past the end",
        "compact, bytes left over",
    ],
)
def test_a_request_that_is_wrong_is_malformed(version: int, text: str) -> None:
    with pytest.raises(MalformedError, match=f"MetadataRequest v{version}|varint"):
        METADATA.decode_request(version, plain(text))


def test_librdkafkas_request_for_all_topics_leaves_three_bytes() -> None:
    """It writes a count of 4 bytes, of which the first is null already."""
    request = METADATA.decode_request(12, plain("00000000 01 00 00"))
    assert request.topics is None
    with pytest.raises(MalformedError, match="left behind"):
        HEARTBEAT.decode_request(0, plain("0001 'g' 00000001 0001 'm' 00"))


def test_null_topics_are_refused_before_they_may_be_null() -> None:
    with pytest.raises(MalformedError, match="topics"):
        OFFSET_FETCH.decode_request(1, plain("0001 'g' ffffffff"))
    assert OFFSET_FETCH.decode_request(2, plain("0001 'g' ffffffff")) == OffsetFetchRequest(group_id="g", topics=None)


def test_a_count_is_held_against_what_is_left_before_anything_is_made() -> None:
    """Each element takes at least so many bytes: a count that cannot be true costs nothing."""
    with pytest.raises(MalformedError, match="partitions"):
        OFFSET_DELETE.decode_request(0, plain("0001 'g' 00000001 0001 't' 00000003 00000000 00000001"))


def test_a_message_of_too_many_elements_is_malformed() -> None:
    """Two bytes of input make an object of a hundred: the number of elements is bounded, not only the bytes."""
    count = ELEMENTS_MAX + 1
    data = unsigned_varint(count + 1) + plain("01 00") * count + plain("00000000 ff 00")
    with pytest.raises(MalformedError, match=f"topics: no count that can be: {count}"):
        DESCRIBE_TOPIC_PARTITIONS.decode_request(0, data)


def test_a_message_of_too_many_numbers_is_malformed() -> None:
    """Four bytes of input make an object of 32: of all arrays together there are only so many."""
    half = NUMBERS_MAX // 2
    request = DescribeProducersRequest(topics=[DescribeProducersTopicRequest(partition_indexes=[0] * half)] * 2)
    data = b"".join(DESCRIBE_PRODUCERS.encode_request(0, request))
    assert DESCRIBE_PRODUCERS.decode_request(0, data) == request
    request.topics[1] = DescribeProducersTopicRequest(partition_indexes=[0] * (half + 1))
    with pytest.raises(MalformedError, match=f"partition_indexes: no count that can be: {half + 1}"):
        DESCRIBE_PRODUCERS.decode_request(0, b"".join(DESCRIBE_PRODUCERS.encode_request(0, request)))


def test_fetch_of_many_topics_is_no_malformed_one() -> None:
    """50,000 topics with a partition each, and as many that are forgotten."""
    most = 50_000
    one = FetchTopic(topic_id=bytes(range(16)), partitions=[FetchPartition(partition=0)])
    gone = ForgottenTopic(topic_id=bytes(range(16)), partitions=[0])
    request = FetchRequest(topics=[one] * most, forgotten_topics_data=[gone] * most)
    version = FETCH.high
    assert FETCH.decode_request(version, b"".join(FETCH.encode_request(version, request))) == request


def test_a_compact_string_longer_than_kafka_allows_is_malformed() -> None:
    name = b"n" * 32_768
    with pytest.raises(MalformedError, match="name"):
        METADATA.decode_request(9, b"\x02" + unsigned_varint(len(name) + 1) + name + plain("00 01 00 00 00"))


@pytest.mark.requirement("a:C-02")
def test_versions_that_are_not_served_are_refused() -> None:
    for version in (-1, 14, 99):
        assert not METADATA.serves(version)
        with pytest.raises(MalformedError, match="0 to 13"):
            METADATA.decode_request(version, b"")
        with pytest.raises(UnencodableError, match="0 to 13"):
            METADATA.encode_response(version, MetadataResponse())


def test_values_that_do_not_fit_are_our_own_error_and_named() -> None:
    with pytest.raises(UnencodableError, match="HeartbeatRequest v0"):
        HEARTBEAT.encode_request(0, HeartbeatRequest(generation_id=1 << 31))
    with pytest.raises(UnencodableError, match="group_id: over 32767 bytes"):
        HEARTBEAT.encode_request(0, HeartbeatRequest(group_id="g" * 32_768))
    with pytest.raises(UnencodableError, match="group_id: over 32767 bytes"):
        HEARTBEAT.encode_request(4, HeartbeatRequest(group_id="g" * 32_768))
    with pytest.raises(UnencodableError, match="SyncGroupResponse v0"):
        SYNC_GROUP.encode_response(0, SyncGroupResponse(assignment=None))  # type: ignore[arg-type]
    with pytest.raises(UnencodableError, match="MetadataResponse v0"):
        METADATA.encode_response(0, MetadataResponse(topics=[MetadataResponseTopic(name=None)]))
    with pytest.raises(UnencodableError, match="topic_id: not 16 bytes"):
        METADATA.encode_response(12, MetadataResponse(topics=[MetadataResponseTopic(topic_id=b"short")]))
    assert METADATA.encode_response(12, MetadataResponse(topics=[MetadataResponseTopic(name=None)]))


def test_a_request_without_fields_is_empty() -> None:
    assert API_VERSIONS.encode_request(0, ApiVersionsRequest(client_software_name="x")) == []
    assert API_VERSIONS.decode_request(0, b"") == ApiVersionsRequest()
    with pytest.raises(MalformedError, match="left behind"):
        API_VERSIONS.decode_request(0, b"\0")
