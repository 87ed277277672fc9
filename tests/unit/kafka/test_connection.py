"""A connection of the Kafka server: order, pipelining, versions, errors, other protocols."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from support.async_tests import uvloop_test
from support.kafka.server import (
    KafkaClient,
    RunningKafkaServer,
    api_versions,
    frame,
    heartbeat,
    kafka_server,
    nothing_produced,
    number_of,
    on_uvloop,
    produce,
    returns,
    soon,
)

from tidelog.model.errors import ErrorCode, InvalidRequestError
from tidelog.rpc.kafka.dispatch import build
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.messages import API_VERSIONS, APIS, FETCH, HEARTBEAT, METADATA, PRODUCE
from tidelog.rpc.kafka.messages.data import (
    FetchableTopicResponse,
    FetchRequest,
    FetchResponse,
    PartitionData,
    ProduceRequest,
)
from tidelog.rpc.kafka.messages.groups import HeartbeatRequest, HeartbeatResponse
from tidelog.rpc.kafka.messages.metadata import MetadataRequest, MetadataResponse
from tidelog.rpc.kafka.messages.versions import ApiVersionsRequest
from tidelog.rpc.kafka.services import Context, DeferredResponse
from tidelog.rpc.protocol_sniffing import EMPTY_SETTINGS, PREFACE

HEARTBEATS = {HEARTBEAT.key: Entry(returns(HeartbeatResponse))}


class Slow:
    """Handlers whose answers wait until a test lets them go."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.left: list[int] = []
        self.gates: dict[int, asyncio.Event] = {}

    async def produce(self, request: ProduceRequest, _context: Context) -> DeferredResponse | None:
        number = number_of(request)
        self.begun.append(number)
        if request.acks == 0:
            return None
        gate = self.gates[number] = asyncio.Event()

        async def answer() -> object:
            await gate.wait()
            return nothing_produced()

        return DeferredResponse(answer, lambda: self.left.append(number))

    @property
    def entries(self) -> dict[int, Entry]:
        return {PRODUCE.key: Entry(self.produce), **HEARTBEATS}


async def numbers(client: KafkaClient, count: int) -> list[int]:
    return [int.from_bytes((await client.answer())[:4], "big", signed=True) for _ in range(count)]


# Order.


@pytest.mark.requirement("a:C-08")
@uvloop_test
async def test_answers_leave_in_the_order_of_the_requests_with_a_slow_first_one() -> None:
    slow = Slow()
    async with kafka_server(slow.entries) as kafka:
        client = await kafka.client()
        client.writer.write(produce(1) + produce(2) + heartbeat(3) + produce(4))
        await soon(lambda: slow.begun == [1, 2, 4], "all are begun, in order, while the first one waits")
        slow.gates[4].set()
        slow.gates[2].set()
        await soon(lambda: sorted(slow.left) == [2, 4], "the later ones are done")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.reader.read(1)
        slow.gates[1].set()
        assert await numbers(client, 4) == [1, 2, 3, 4]
    assert sorted(slow.left) == [1, 2, 4], "each is left once"


@uvloop_test
async def test_the_next_request_is_begun_when_the_handler_of_the_one_before_has_returned() -> None:
    events: list[str] = []

    async def handle(_request: object, context: Context) -> HeartbeatResponse:
        events.append(f"begin {context.correlation_id}")
        await asyncio.sleep(0.01)
        events.append(f"end {context.correlation_id}")
        return HeartbeatResponse()

    async with kafka_server({HEARTBEAT.key: Entry(handle)}) as kafka:
        client = await kafka.client()
        client.writer.write(b"".join(map(heartbeat, range(5))))
        assert await numbers(client, 5) == [0, 1, 2, 3, 4]
    assert events == [f"{what} {number}" for number in range(5) for what in ("begin", "end")]


@uvloop_test
async def test_many_connections_and_many_requests_of_each_are_answered_to_whom_they_belong() -> None:
    async def handle(_request: object, context: Context) -> DeferredResponse:
        async def answer() -> HeartbeatResponse:
            await asyncio.sleep(context.correlation_id % 7 * 0.001)
            return HeartbeatResponse(throttle_time_ms=context.correlation_id)

        return DeferredResponse(answer)

    async def one(kafka: RunningKafkaServer, first: int) -> None:
        client = await kafka.client()
        client.writer.write(b"".join(heartbeat(first + number) for number in range(300)))
        for number in range(300):
            found, response = await client.response(HEARTBEAT, 4)
            assert (found, response.throttle_time_ms) == (first + number, first + number)

    async with kafka_server({HEARTBEAT.key: Entry(handle)}) as kafka:
        await asyncio.gather(*(one(kafka, 1_000 * number) for number in range(20)))
        assert kafka.counts.apis["Heartbeat"].requests == 6_000


@uvloop_test
async def test_a_write_without_acknowledgement_has_no_answer() -> None:
    slow = Slow()
    async with kafka_server(slow.entries) as kafka:
        client = await kafka.client()
        client.writer.write(produce(1, acks=0) + heartbeat(2) + produce(3, acks=0) + heartbeat(4))
        assert await numbers(client, 2) == [2, 4]
        assert slow.begun == [1, 3]


@uvloop_test
async def test_what_was_sent_before_the_client_hung_up_is_done() -> None:
    slow = Slow()
    async with kafka_server(slow.entries) as kafka:
        client = await kafka.client()
        client.writer.write(b"".join(produce(number, 1_000, acks=0) for number in range(200)))
        client.writer.close()
        await soon(lambda: slow.begun == list(range(200)), "all of them")
        await soon(kafka.holds_nothing, "and the connection is gone")


@uvloop_test
async def test_a_client_that_is_gone_leaves_nothing_behind() -> None:
    slow = Slow()
    async with kafka_server(slow.entries) as kafka:
        client = await kafka.client()
        client.writer.write(b"".join(produce(number, 100_000) for number in range(10)))
        await soon(lambda: len(slow.begun) == 10, "all are begun")
        assert kafka.shared.requests.used > 1_000_000
        client.writer.transport.abort()
        await soon(kafka.holds_nothing, "nothing is held")
        await soon(lambda: sorted(slow.left) == list(range(10)), "every one is left")


# Versions.


@pytest.mark.requirement("a:C-02")
@pytest.mark.parametrize("version", [0, 1, 2, 3, 4])
@uvloop_test
async def test_api_versions_tells_what_is_served_in_every_version(version: int) -> None:
    entries = {HEARTBEAT.key: Entry(returns(HeartbeatResponse), low=1, high=3), PRODUCE.key: Entry(returns(list))}
    async with kafka_server(entries) as kafka:
        client = await kafka.client()
        client.writer.write(api_versions(9, version))
        number, response = await client.response(API_VERSIONS, version)
        assert (number, response.error_code) == (9, 0)
        rows = {row.api_key: (row.min_version, row.max_version) for row in response.api_keys}
        assert rows == {
            HEARTBEAT.key: (1, 3),
            PRODUCE.key: (PRODUCE.low, PRODUCE.high),
            API_VERSIONS.key: (API_VERSIONS.low, API_VERSIONS.high),
        }
        if version >= 3:
            assert [(row.name, row.max_version_level) for row in response.finalized_features] == [
                ("eligible.leader.replicas.version", 1),
                ("group.version", 1),
                ("kraft.version", 1),
                ("metadata.version", 1),
                ("transaction.version", 2),
            ]
            supported = {row.name: (row.min_version, row.max_version) for row in response.supported_features}
            # A client of version 3 fails on a feature that begins at level 0.
            assert supported.pop("transaction.version", None) == ((0, 2) if version >= 4 else None)
            names = [row.name for row in response.finalized_features if row.name != "transaction.version"]
            assert supported == dict.fromkeys(names, (1, 1))


@pytest.mark.requirement("a:C-02")
@uvloop_test
async def test_an_api_versions_of_the_future_is_answered_in_version_0_and_asked_again() -> None:
    async with kafka_server(HEARTBEATS) as kafka:
        client = await kafka.client()
        body = bytes.fromhex("0012 0063 00000007 ffff") + b"\xaa" * 40  # what follows cannot be read
        client.writer.write(len(body).to_bytes(4, "big") + body)
        data = await client.answer()
        assert int.from_bytes(data[:4], "big") == 7
        response = API_VERSIONS.decode_response(0, data, 4)
        assert response.error_code == ErrorCode.UNSUPPORTED_VERSION.value.code
        high = {row.api_key: row.max_version for row in response.api_keys}[18]
        client.writer.write(api_versions(8, high))
        assert (await client.response(API_VERSIONS, high))[1].error_code == 0


@uvloop_test
async def test_an_invalid_client_software_name_is_rejected() -> None:
    async with kafka_server(HEARTBEATS) as kafka:
        client = await kafka.client()
        wrong = ApiVersionsRequest(client_software_name="-no-", client_software_version="")
        client.send(API_VERSIONS, 3, 1, wrong)
        assert (await client.response(API_VERSIONS, 3))[1].error_code == ErrorCode.INVALID_REQUEST.value.code


@pytest.mark.parametrize(("key", "version"), [(12, 99), (12, -1), (3, 1), (999, 0), (-5, 3)])
def test_what_is_not_served_ends_the_connection_with_one_line(
    key: int, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with kafka_server(HEARTBEATS) as kafka:
            for _ in range(5):
                client = await kafka.client()
                body = key.to_bytes(2, "big", signed=True) + version.to_bytes(2, "big", signed=True) + bytes(40)
                client.writer.write(heartbeat(1) + len(body).to_bytes(4, "big") + body + heartbeat(2))
                assert await numbers(client, 1) == [1], "older requests are answered"
                assert await client.rest() == b""
            await soon(lambda: kafka.counts.malformed == 5, "all are counted")
            assert kafka.shared.rate_limited_log.counts == {"unsupported": 5}

    with caplog.at_level(logging.WARNING):
        on_uvloop(main)
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"api key {key} version {version}" in line
    assert "peer=127.0.0.1:" in line


def test_names_from_clients_stay_within_their_log_line(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with kafka_server(HEARTBEATS) as kafka:
            for _ in range(3):
                kafka.shared.rate_limited_log.warn(
                    "kind", "peer=%s %s", "x", "a\nERROR node=1 all is lost\x1b[2J" + "y" * 5_000
                )

    with caplog.at_level(logging.WARNING):
        on_uvloop(main)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("peer=x a?ERROR node=1 all is lost?[2Jyy")
    assert len(line) < 1_100


def test_the_table_of_a_broker_serves_only_what_has_a_codec() -> None:
    table = build()
    assert API_VERSIONS.key in table
    for key, served in table.items():
        assert served.api is APIS[key]
        assert served.api.low <= served.low <= served.high <= served.api.high


@pytest.mark.requirement("a:C-01")
@pytest.mark.parametrize(("version", "client_id"), [(0, "old"), (3, None), (4, "flexible é"), (4, None)])
@uvloop_test
async def test_headers_of_every_version_are_read(version: int, client_id: str | None) -> None:
    seen: list[Context] = []

    async def handle(_request: object, context: Context) -> HeartbeatResponse:
        seen.append(context)
        return HeartbeatResponse()

    async with kafka_server({HEARTBEAT.key: Entry(handle)}) as kafka:
        client = await kafka.client()
        client.send(HEARTBEAT, version, -2, HeartbeatRequest(group_id="g"), client_id)
        assert (await client.response(HEARTBEAT, version))[0] == -2
    (context,) = seen
    assert (context.version, context.request.client_id, context.correlation_id) == (version, client_id or "", -2)
    assert (context.listener, context.request.client_host) == ("KAFKA", "127.0.0.1")


# Errors.


def raising(error: BaseException, *, is_later: bool) -> Any:
    async def fail() -> None:
        raise error

    async def handle(_request: object, _context: Context) -> DeferredResponse | None:
        if is_later:
            return DeferredResponse(fail)
        raise error

    return handle


@pytest.mark.parametrize("is_later", [False, True])
@uvloop_test
async def test_an_error_of_the_catalogue_is_the_code_of_the_answer(is_later: bool) -> None:
    entry = Entry(raising(InvalidRequestError("no"), is_later=is_later))
    async with kafka_server({HEARTBEAT.key: entry}) as kafka:
        client = await kafka.client()
        client.writer.write(heartbeat(1) + heartbeat(2))
        for number in (1, 2):
            found, response = await client.response(HEARTBEAT, 4)
            assert (found, response.error_code) == (number, ErrorCode.INVALID_REQUEST.value.code)
        assert kafka.counts.apis["Heartbeat"].errors == 2


@pytest.mark.parametrize("error", [ValueError("a defect"), asyncio.CancelledError()])
@pytest.mark.parametrize("is_later", [False, True])
def test_an_error_of_our_own_is_in_the_log_and_the_connection_goes_on(
    is_later: bool, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """A CancelledError too, unless the connection itself has ended the handler."""

    async def main() -> None:
        entry = Entry(raising(error, is_later=is_later))
        async with kafka_server({HEARTBEAT.key: entry}) as kafka:
            client = await kafka.client()
            client.writer.write(heartbeat(1) + api_versions(2))
            assert (await client.response(HEARTBEAT, 4))[1].error_code == -1
            assert await numbers(client, 1) == [2]

    with caplog.at_level(logging.ERROR):
        on_uvloop(main)
    (record,) = caplog.records
    assert "api=Heartbeat failed" in record.getMessage()
    assert record.exc_info is not None


@pytest.mark.parametrize("is_later", [False, True])
@uvloop_test
async def test_a_failure_that_an_answer_cannot_tell_ends_the_connection_and_nothing_passes_it(is_later: bool) -> None:
    slow = Slow()
    entries = {METADATA.key: Entry(raising(InvalidRequestError("no"), is_later=is_later)), **slow.entries}
    async with kafka_server(entries) as kafka:
        client = await kafka.client()
        metadata = frame(METADATA, 9, 2, MetadataRequest())
        client.writer.write(heartbeat(1) + metadata + heartbeat(3) + produce(4))
        assert await numbers(client, 1) == [1]
        assert await client.rest() == b"", "an answer behind it would be taken for its own"
        await soon(lambda: slow.left == slow.begun, "what had begun is left")


def test_an_answer_that_cannot_be_written_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        wrong = Entry(returns(lambda: MetadataResponse(cluster_id=7)))  # type: ignore[arg-type]
        async with kafka_server({METADATA.key: wrong, **HEARTBEATS}) as kafka:
            client = await kafka.client()
            client.writer.write(heartbeat(1) + frame(METADATA, 9, 2, MetadataRequest()))
            assert await numbers(client, 1) == [1]
            assert await client.rest() == b""

    with caplog.at_level(logging.ERROR):
        on_uvloop(main)
    assert "api=Metadata version=9" in caplog.text


@pytest.mark.parametrize(
    "body",
    [
        bytes.fromhex("000c 0004 00000001 0001 61 00"),  # ends too soon
        bytes.fromhex("000c 0004 00000001 7fff 61 00"),  # a client id that is longer than the request
        heartbeat(1)[4:] + b"more",  # bytes behind it
        bytes.fromhex("000c 0004 00000001"),  # no client id
    ],
)
def test_what_is_no_request_ends_the_connection(body: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with kafka_server(HEARTBEATS) as kafka:
            client = await kafka.client()
            client.writer.write(heartbeat(1) + len(body).to_bytes(4, "big") + body)
            assert await numbers(client, 1) == [1]
            assert await client.rest() == b""

    with caplog.at_level(logging.WARNING):
        on_uvloop(main)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "malformed request of key 12 version 4" in line


# Data.


@uvloop_test
async def test_large_data_goes_through_in_both_directions_unchanged() -> None:
    data = bytes(range(256)) * (1 << 14)
    stored = memoryview(data)
    seen: list[object] = []

    async def take(request: ProduceRequest, _context: Context) -> object:
        seen.append(request.topic_data[0].partition_data[0].records)
        return nothing_produced()

    async def give(_request: FetchRequest, _context: Context) -> FetchResponse:
        rows = [PartitionData(partition_index=number, records=stored) for number in range(4)]
        return FetchResponse(responses=[FetchableTopicResponse(topic="t", partitions=rows)])

    async with kafka_server({PRODUCE.key: Entry(take), FETCH.key: Entry(give)}) as kafka:
        client = await kafka.client()
        client.writer.write(produce(1, len(data)))
        await client.answer()
        (records,) = seen
        assert isinstance(records, memoryview), "a slice of the request, not a copy"
        assert records == bytes(len(data))
        client.send(FETCH, 11, 2, FetchRequest())
        _, response = await client.response(FETCH, 11)
        assert [bytes(row.records) for row in response.responses[0].partitions] == [data] * 4


# Clients of other protocols.


@pytest.mark.parametrize(
    ("first", "reported", "head", "answer"),
    [
        (
            b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
            "speaks HTTP on port",
            b"HTTP/1.1 400 Bad Request\r\n",
            b"this port is for Kafka clients: HTTP is on port 9392",
        ),
        (
            PREFACE + EMPTY_SETTINGS + bytes(30),
            "speaks gRPC (HTTP/2) on port",
            EMPTY_SETTINGS,
            b"this port is for Kafka clients: gRPC is on port 9292",
        ),
        (bytes.fromhex("16030100c8010000c40303") + bytes(80), "speaks TLS on port", b"", b""),
    ],
)
def test_another_protocol_is_known_by_its_first_bytes(
    first: bytes, reported: str, head: bytes, answer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with kafka_server(HEARTBEATS) as kafka:
            for at in (3, 5, 8, len(first)):
                client = await kafka.client()
                client.writer.write(first[:at])
                await client.writer.drain()
                client.writer.write(first[at:])
                found = await client.rest()
                assert answer in found
                assert bool(found) == bool(answer)
                assert found.startswith(head)
            await soon(lambda: sum(kafka.counts.other_protocols.values()) == 4, "all are counted")

    with caplog.at_level(logging.WARNING):
        on_uvloop(main)
    (line,) = [record.getMessage() for record in caplog.records]
    assert reported in line
    assert "which is for Kafka clients" in line
