"""Records of each client, in every codec, read by every other; what is stored is what was sent."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiokafka
import confluent_kafka
import pytest
from support.interop.clients import (
    CODECS,
    DEADLINE_S,
    KCAT,
    PEERS,
    Client,
    Row,
    deadline,
    every,
    kafka,
    leaders,
    make_topic,
    run_kcat,
    stored_codecs,
)
from support.kafka.server import KafkaClient

from tidelog.rpc.kafka.messages import FETCH
from tidelog.rpc.kafka.messages.data import FetchRequest
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.interop, pytest.mark.cluster]

PARTITIONS = 3
NOW_MS = int(time.time() * 1000)
OF_A_WRITER = [
    Row(b"plain", b"key"),
    Row(b"without a key"),
    Row(None, b"tombstone"),
    Row(b"headers", b"key", (("trace", b"1"), ("trace", b"2"), ("empty", b""), ("null", None))),
    Row("größe".encode(), "schlüssel".encode()),
    *(Row(b"number %d " % number + b"x" * 200, b"key-%d" % number) for number in range(30)),
]
MIB = 1 << 20


def record_counts(rows: list[Row]) -> Counter[tuple[bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]]:
    return Counter((row.value, row.key, row.headers) for row in rows)


@pytest.mark.requirement("a:C-17", "b:A-21", "b:U-01")
@pytest.mark.parametrize("writer", every())
def test_records_of_one_client_in_every_codec_are_read_by_every_other(writer: Client, cluster: LocalCluster) -> None:
    topic = make_topic(cluster, f"matrix-{writer.name}", PARTITIONS)
    rows = [row._replace(value=row.value and row.value + codec.encode()) for codec in CODECS for row in OF_A_WRITER]
    if writer.name == "kafka-python":  # which takes no null for a header's value
        rows = [row._replace(headers=tuple(one for one in row.headers if one[1] is not None)) for row in rows]
    size = len(OF_A_WRITER)
    for number, codec in enumerate(CODECS):
        writer.write(cluster, topic, rows[number * size : (number + 1) * size], codec=codec)
    assert stored_codecs(cluster, topic) == set(CODECS), "batches are stored as they were sent"
    ours = PEERS["tidelog"].read(cluster, topic, PARTITIONS, len(rows))
    assert record_counts(list(ours.values())) == record_counts(rows)
    assert all(abs(row.timestamp - NOW_MS) < 3_600_000 for row in ours.values())
    for name, reader in PEERS.items():
        if name == "tidelog" or (name == "kcat" and KCAT is None):
            continue
        assert reader.read(cluster, topic, PARTITIONS, len(rows)) == ours, f"{name} reads what {writer.name} wrote"


@pytest.mark.requirement("b:U-01")
def test_a_key_has_the_same_partition_with_every_client(cluster: LocalCluster) -> None:
    rows = [Row(b"value", b"key-%d" % number) for number in range(100)]
    chosen: dict[str, dict[bytes | None, int]] = {}
    for name, writer in PEERS.items():
        if name == "kcat" and KCAT is None:
            continue
        topic = make_topic(cluster, f"keys-{name}", 7)
        writer.write(cluster, topic, rows)
        found = PEERS["tidelog"].read(cluster, topic, 7, len(rows))
        chosen[name] = {row.key: partition for (partition, _), row in found.items()}
        assert len(chosen[name]) == len(rows)
    assert set(chosen["tidelog"].values()) == set(range(7))
    for name, partitions in chosen.items():
        assert partitions == chosen["tidelog"], name


@pytest.mark.requirement("a:C-07", "b:U-02")
@pytest.mark.parametrize("acks", ["0", "1", "all"])
def test_every_client_writes_with_every_kind_of_acknowledgement(acks: str, cluster: LocalCluster) -> None:
    topic = make_topic(cluster, f"acks-{acks}", PARTITIONS)
    rows: list[Row] = []
    for name, writer in PEERS.items():
        if name == "kcat" and KCAT is None:
            continue
        own = [Row(b"%d of %s" % (number, name.encode()), b"%d" % number) for number in range(20)]
        places = writer.write(cluster, topic, own, acks=acks)
        rows += own
        if acks != "0" and places:
            assert len(set(places)) == len(own), f"{name} knows where each is"
    # With acks=0 a client may be gone before the broker has read what it sent: so this waits.
    assert record_counts(list(PEERS["tidelog"].read(cluster, topic, PARTITIONS, len(rows)).values())) == record_counts(
        rows
    )


@pytest.mark.requirement("a:C-16", "b:U-03")
@pytest.mark.parametrize("writer", every(["confluent-kafka", "aiokafka"]))
def test_batches_of_a_mebibyte_pass_and_larger_ones_are_refused(writer: Client, cluster: LocalCluster) -> None:
    topic = make_topic(cluster, f"large-{writer.name}", PARTITIONS)
    noise = random.Random(7)
    rows = [Row(noise.randbytes(MIB - 1_000), b"large-%d" % number) for number in range(4)]
    rows += [Row(noise.randbytes(10_000), b"many") for _ in range(300)]
    places = writer.write(cluster, topic, rows, codec="lz4")
    assert len(set(places)) == len(rows)
    for reader in (PEERS["tidelog"], writer):
        found = reader.read(cluster, topic, PARTITIONS, len(rows))
        assert [found[place].value for place in places] == [row.value for row in rows]
    with pytest.raises(Exception, match=r"(?i)too.?large|MessageSizeTooLarge"):
        writer.write(cluster, topic, [Row(noise.randbytes(MIB + 10_000), b"too large")])


@pytest.mark.requirement("a:C-16", "b:U-03")
def test_clients_know_our_errors_by_their_names(cluster: LocalCluster) -> None:
    topic = make_topic(cluster, "errors", 1)
    PEERS["tidelog"].write(cluster, topic, [Row(b"value")])
    with pytest.raises(AssertionError, match="UNKNOWN_TOPIC"):
        PEERS["confluent-kafka"].write(cluster, "no-such-topic", [Row(b"value")])
    with pytest.raises(AssertionError, match="TOPIC_EXCEPTION"):
        PEERS["confluent-kafka"].write(cluster, "no/such/name", [Row(b"value")])

    options: dict[str, Any] = {"group.id": "errors", "auto.offset.reset": "error"}
    theirs = confluent_kafka.Consumer({"bootstrap.servers": cluster.kafka_bootstrap, **options})
    try:
        theirs.assign([confluent_kafka.TopicPartition(topic, 0, 1_000)])
        said = theirs.poll(DEADLINE_S)
        assert said is not None
        error = said.error()
        assert error is not None
        assert error.code() == confluent_kafka.KafkaError._AUTO_OFFSET_RESET
        assert "out of range" in error.str()
    finally:
        theirs.close()

    consumer = kafka.KafkaConsumer(bootstrap_servers=cluster.kafka_bootstrap, auto_offset_reset="none")
    try:
        place = kafka.TopicPartition(topic, 0)
        consumer.assign([place])
        consumer.seek(place, 1_000)
        with pytest.raises(kafka.errors.OffsetOutOfRangeError):
            consumer.poll(timeout_ms=int(DEADLINE_S * 1000))
    finally:
        consumer.close()


@pytest.mark.requirement("b:U-02")
def test_each_client_finds_records_by_their_time(cluster: LocalCluster) -> None:
    topic = make_topic(cluster, "times", 1)
    begin_ms = NOW_MS - 1_000_000
    rows = [Row(b"%d" % number, b"key", (), begin_ms + number * 1_000) for number in range(100)]
    for first in range(0, 100, 20):
        PEERS["tidelog"].write(cluster, topic, rows[first : first + 20])
    wanted_ms, late_ms = begin_ms + 41_500, NOW_MS + 1_000_000

    theirs = confluent_kafka.Consumer({"bootstrap.servers": cluster.kafka_bootstrap, "group.id": "times"})
    try:
        asked = [confluent_kafka.TopicPartition(topic, 0, wanted_ms)]
        assert theirs.offsets_for_times(asked, timeout=DEADLINE_S)[0].offset == 42
        assert theirs.get_watermark_offsets(confluent_kafka.TopicPartition(topic, 0), timeout=DEADLINE_S) == (0, 100)
        theirs.assign([confluent_kafka.TopicPartition(topic, 0, 42)])
        read = theirs.poll(DEADLINE_S)
        assert read is not None
        assert (read.error(), read.value()) == (None, b"42")
    finally:
        theirs.close()

    place = kafka.TopicPartition(topic, 0)
    consumer = kafka.KafkaConsumer(bootstrap_servers=cluster.kafka_bootstrap)
    try:
        found = consumer.offsets_for_times({place: wanted_ms})[place]
        assert (found.offset, found.timestamp) == (42, begin_ms + 42_000)
        assert consumer.offsets_for_times({place: late_ms}) == {place: None}
        assert consumer.beginning_offsets([place]) == {place: 0}
        assert consumer.end_offsets([place]) == {place: 100}
        consumer.assign([place])
        consumer.seek(place, found.offset)
        assert consumer.poll(timeout_ms=int(DEADLINE_S * 1000))[place][0].value == b"42"
    finally:
        consumer.close()

    asyncio.run(find_with_aiokafka(cluster, topic, wanted_ms, late_ms))
    if KCAT is not None:
        said = run_kcat(cluster, "-C", "-t", topic, "-o", f"s@{wanted_ms}", "-c", "1", "-q")
        assert said == "42\n"
        assert run_kcat(cluster, "-Q", "-t", f"{topic}:0:{wanted_ms}") == f"{topic} [0] offset 42\n"


async def find_with_aiokafka(cluster: LocalCluster, topic: str, wanted_ms: int, late_ms: int) -> None:
    place = aiokafka.TopicPartition(topic, 0)
    consumer = aiokafka.AIOKafkaConsumer(bootstrap_servers=cluster.kafka_bootstrap)
    await consumer.start()
    try:
        found = (await consumer.offsets_for_times({place: wanted_ms}))[place]
        assert found.offset == 42
        assert await consumer.offsets_for_times({place: late_ms}) == {place: None}
        assert await consumer.beginning_offsets([place]) == {place: 0}
        assert await consumer.end_offsets([place]) == {place: 100}
        consumer.assign([place])
        consumer.seek(place, found.offset)
        async with asyncio.timeout(DEADLINE_S):
            assert (await consumer.getone()).value == b"42"
    finally:
        await consumer.stop()


@pytest.mark.requirement("a:C-11", "a:X3-51")
def test_a_client_whose_fetch_session_is_gone_reads_on(cluster: LocalCluster) -> None:
    topic = make_topic(cluster, "sessions", 1)
    leader = leaders(cluster.ports(1).kafka, topic)[0]
    consumer = kafka.KafkaConsumer(
        bootstrap_servers=cluster.kafka_bootstrap, auto_offset_reset="earliest", fetch_max_wait_ms=100
    )
    read: list[bytes] = []
    sessions = [0]

    def session() -> int:
        handler = consumer._fetcher._session_handlers.get(leader)
        found: int = 0 if handler is None else handler.next_metadata.session_id
        return found

    def read_until(is_done: Callable[[], bool], what: str) -> None:
        for _ in deadline(is_done, what):
            for records in consumer.poll(timeout_ms=200).values():
                read.extend(one.value for one in records)

    try:
        consumer.assign([kafka.TopicPartition(topic, 0)])
        for turn in range(3):
            read_until(lambda: session() not in sessions, "it has a session, another one than before")
            sessions.append(session())
            PEERS["tidelog"].write(cluster, topic, [Row(b"%d" % turn)])
            read_until(lambda: len(read) == len(sessions) - 1, "it reads on")
            end_session(cluster.ports(leader).kafka, sessions[-1])
    finally:
        consumer.close()
    assert read == [b"0", b"1", b"2"]


def end_session(port: int, session: int) -> None:
    """As if the broker had forgotten it."""

    async def main() -> None:
        client = KafkaClient(*await asyncio.open_connection("localhost", port))
        try:
            client.send(FETCH, 12, 1, FetchRequest(session_id=session, session_epoch=-1, max_bytes=1))
            _, answer = await client.response(FETCH, 12)
        finally:
            client.writer.close()
            await client.writer.wait_closed()
        assert answer.error_code == 0

    asyncio.run(main())
