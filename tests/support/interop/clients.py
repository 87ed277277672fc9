"""Other people's Kafka clients, and ours, behind one face: each writes records to a real cluster and reads them.

Rows are what all of them can carry: kcat speaks in lines of text, so keys and values are UTF-8 without line ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import aiokafka
import confluent_kafka
import pytest

import tidelog
from support.clusters.waiting import until
from support.kafka.server import KafkaClient
from tidelog.log.batch_header import split_batches
from tidelog.rpc.kafka.messages import METADATA
from tidelog.rpc.kafka.messages.metadata import MetadataRequest, MetadataRequestTopic
from tidelog.testing import LocalCluster

with warnings.catch_warnings():
    # kafka-python reads its schemas by a deprecated function when it is imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    kafka: Any = import_module("kafka")  # a checker of types takes the folder tests/unit/kafka for it
    import_module("kafka.admin")

confluent: Any = import_module("confluent_kafka.admin")  # whose annotations leave out what it exports

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
DEADLINE_S = 30.0
KCAT = shutil.which("kcat")
needs_kcat = pytest.mark.skipif(
    KCAT is None and os.environ.get("REQUIRE_KCAT") != "1", reason="kcat is not installed (Debian: apt install kcat)"
)

Place = tuple[int, int]
"""Partition and offset."""


class Row(NamedTuple):
    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp: int = 0
    """0: when it is written."""


class Client(Protocol):
    name: str

    def write(
        self, cluster: LocalCluster, topic: str, rows: Sequence[Row], *, codec: str = "none", acks: str = "all"
    ) -> list[Place]:
        """Returns when all are acknowledged as asked, with where each is; kcat does not know."""
        ...

    def read(self, cluster: LocalCluster, topic: str, partitions: int, count: int) -> dict[Place, Row]:
        """The first `count` records of all partitions."""
        ...


class Tidelog:
    name = "tidelog"

    def write(
        self, cluster: LocalCluster, topic: str, rows: Sequence[Row], *, codec: str = "none", acks: str = "all"
    ) -> list[Place]:
        with tidelog.Producer(
            {"compression": codec, "acks": acks}, bootstrap=cluster.bootstrap, linger_ms=50
        ) as producer:
            sent = [
                producer.send(topic, row.value, row.key, headers=row.headers, timestamp_ms=row.timestamp or None)
                for row in rows
            ]
            done = [one.result(DEADLINE_S) for one in sent]
        return [(one.partition, one.offset) for one in done]

    def read(self, cluster: LocalCluster, topic: str, partitions: int, count: int) -> dict[Place, Row]:
        found: dict[Place, Row] = {}
        with tidelog.Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
            consumer.assign([(topic, number) for number in range(partitions)])
            for _ in deadline(lambda: len(found) >= count, f"{count} records of {topic}"):
                for one in consumer.poll(0.2):
                    found[one.partition, one.offset] = Row(one.value, one.key, tuple(one.headers), one.timestamp)
        return found


class Confluent:
    name = "confluent-kafka"

    def write(
        self, cluster: LocalCluster, topic: str, rows: Sequence[Row], *, codec: str = "none", acks: str = "all"
    ) -> list[Place]:
        options = {
            "bootstrap.servers": cluster.kafka_bootstrap,
            "compression.type": codec,
            "acks": acks,
            "enable.idempotence": acks == "all",
            "linger.ms": 50,
            "partitioner": "murmur2_random",
            "message.max.bytes": 2 << 20,
            "message.timeout.ms": int(DEADLINE_S * 1000),
            "topic.metadata.propagation.max.ms": 2_000,
        }
        producer = confluent_kafka.Producer(options)
        reported: dict[int, Any] = {}

        def note(number: int) -> Callable[[Any, Any], None]:
            return lambda error, message: reported.update({number: (error, message)})

        for number, row in enumerate(rows):
            producer.produce(
                topic,
                row.value,
                row.key,
                headers=list(row.headers),
                timestamp=row.timestamp,
                on_delivery=note(number),
            )
        assert producer.flush(DEADLINE_S) == 0
        errors = [error for error, _ in reported.values() if error is not None]
        assert not errors, errors
        return [(reported[number][1].partition(), reported[number][1].offset()) for number in range(len(rows))]

    def read(self, cluster: LocalCluster, topic: str, partitions: int, count: int) -> dict[Place, Row]:
        found: dict[Place, Row] = {}
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": cluster.kafka_bootstrap,
                "group.id": "nobody",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 200,
            }
        )
        try:
            begin = confluent_kafka.OFFSET_BEGINNING
            consumer.assign([confluent_kafka.TopicPartition(topic, number, begin) for number in range(partitions)])
            for _ in deadline(lambda: len(found) >= count, f"{count} records of {topic}"):
                for one in consumer.consume(1_000, 0.2):
                    assert one.error() is None, one.error()
                    row = Row(one.value(), one.key(), tuple(one.headers() or ()), one.timestamp()[1])  # type: ignore[arg-type]
                    found[one.partition(), one.offset()] = row  # type: ignore[index]
        finally:
            consumer.close()
        return found


class AioKafka:
    name = "aiokafka"

    def write(
        self, cluster: LocalCluster, topic: str, rows: Sequence[Row], *, codec: str = "none", acks: str = "all"
    ) -> list[Place]:
        async def main() -> list[Place]:
            producer = aiokafka.AIOKafkaProducer(
                bootstrap_servers=cluster.kafka_bootstrap,
                compression_type=None if codec == "none" else codec,
                acks=acks if acks == "all" else int(acks),
                enable_idempotence=acks == "all",
                linger_ms=50,
                max_request_size=2 << 20,
            )
            await producer.start()
            try:
                sent = [
                    await producer.send(
                        topic, row.value, row.key, timestamp_ms=row.timestamp or None, headers=list(row.headers)
                    )
                    for row in rows
                ]
                async with asyncio.timeout(DEADLINE_S):
                    done = [await one for one in sent]
            finally:
                await producer.stop()
            # Without an acknowledgement it knows of no place.
            return [(one.partition, one.offset) for one in done if one is not None]

        return asyncio.run(main())

    def read(self, cluster: LocalCluster, topic: str, partitions: int, count: int) -> dict[Place, Row]:
        async def main() -> dict[Place, Row]:
            found: dict[Place, Row] = {}
            consumer = aiokafka.AIOKafkaConsumer(
                bootstrap_servers=cluster.kafka_bootstrap, auto_offset_reset="earliest", enable_auto_commit=False
            )
            await consumer.start()
            try:
                consumer.assign([aiokafka.TopicPartition(topic, number) for number in range(partitions)])
                async with asyncio.timeout(DEADLINE_S):
                    while len(found) < count:
                        for records in (await consumer.getmany(timeout_ms=200)).values():
                            for one in records:
                                row = Row(one.value, one.key, tuple(map(tuple, one.headers)), one.timestamp)
                                found[one.partition, one.offset] = row
            finally:
                await consumer.stop()
            return found

        return asyncio.run(main())


class KafkaPython:
    name = "kafka-python"

    def write(
        self, cluster: LocalCluster, topic: str, rows: Sequence[Row], *, codec: str = "none", acks: str = "all"
    ) -> list[Place]:
        producer = kafka.KafkaProducer(
            bootstrap_servers=cluster.kafka_bootstrap,
            compression_type=None if codec == "none" else codec,
            acks=acks if acks == "all" else int(acks),
            enable_idempotence=acks == "all",
            linger_ms=50,
            max_request_size=2 << 20,
        )
        try:
            sent = [
                producer.send(topic, row.value, row.key, headers=list(row.headers), timestamp_ms=row.timestamp or None)
                for row in rows
            ]
            done = [one.get(DEADLINE_S) for one in sent]
        finally:
            producer.close(DEADLINE_S)
        return [(one.partition, one.offset) for one in done]

    def read(self, cluster: LocalCluster, topic: str, partitions: int, count: int) -> dict[Place, Row]:
        found: dict[Place, Row] = {}
        consumer = kafka.KafkaConsumer(bootstrap_servers=cluster.kafka_bootstrap, auto_offset_reset="earliest")
        try:
            consumer.assign([kafka.TopicPartition(topic, number) for number in range(partitions)])
            for _ in deadline(lambda: len(found) >= count, f"{count} records of {topic}"):
                for records in consumer.poll(timeout_ms=200).values():
                    for one in records:
                        row = Row(one.value, one.key, tuple(map(tuple, one.headers)), one.timestamp)
                        found[one.partition, one.offset] = row
        finally:
            consumer.close()
        return found


class Kcat:
    name = "kcat"

    def write(
        self, cluster: LocalCluster, topic: str, rows: Sequence[Row], *, codec: str = "none", acks: str = "all"
    ) -> list[Place]:
        """Headers are those of a whole run, so rows with the same ones go together."""
        for headers in dict.fromkeys(row.headers for row in rows):
            flags = ["-P", "-t", topic, "-K", ":", "-Z", "-z", codec, "-X", "partitioner=murmur2_random"]
            flags += ["-X", f"acks={acks}", "-X", f"enable.idempotence={'true' if acks == 'all' else 'false'}"]
            for name, value in headers:
                flags += ["-H", name if value is None else f"{name}={value.decode()}"]
            lines = [
                f"{(row.key or b'').decode()}:{(row.value or b'').decode()}" for row in rows if row.headers == headers
            ]
            run_kcat(cluster, *flags, stdin="\n".join(lines) + "\n")
        return []

    def read(self, cluster: LocalCluster, topic: str, partitions: int, count: int) -> dict[Place, Row]:
        found: dict[Place, Row] = {}
        for line in run_kcat(cluster, "-C", "-t", topic, "-o", "beginning", "-c", str(count), "-J", "-q").splitlines():
            one = json.loads(line)
            names = one.get("headers") or []
            headers = tuple(zip(names[::2], map(_bytes, names[1::2]), strict=True))
            row = Row(_bytes(one["payload"]), _bytes(one["key"]), headers, one["ts"])
            found[one["partition"], one["offset"]] = row
        return found


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def run_kcat(cluster: LocalCluster, *flags: str, stdin: str = "") -> str:
    assert KCAT is not None, "REQUIRE_KCAT=1, and there is no kcat"
    done = subprocess.run(
        [KCAT, "-b", cluster.kafka_bootstrap, *flags],
        input=stdin, capture_output=True, text=True, check=False, timeout=DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 0, f"kcat {' '.join(flags)}: {done.stderr}"
    return done.stdout


PEERS: dict[str, Client] = {one.name: one for one in (Tidelog(), Confluent(), AioKafka(), KafkaPython(), Kcat())}


def every(names: Iterable[str] = PEERS) -> list[Any]:
    """For `parametrize`."""
    return [pytest.param(PEERS[name], id=name, marks=[needs_kcat] if name == "kcat" else []) for name in names]


def deadline(is_done: Callable[[], bool], what: str, *, timeout_s: float = DEADLINE_S) -> Iterable[None]:
    """Turns of a loop that polls, until it is done; never longer than this."""
    end_s = time.monotonic() + timeout_s
    while not is_done():
        assert time.monotonic() < end_s, f"not within {timeout_s} s: {what}"
        yield


def admin_of(cluster: LocalCluster, **more: Any) -> Any:
    return confluent.AdminClient({"bootstrap.servers": cluster.kafka_bootstrap, **more})


def only(futures: dict[Any, Any]) -> Any:
    (future,) = futures.values()
    return future.result(DEADLINE_S)


def fill(cluster: LocalCluster, topic: str, numbers: range) -> set[bytes]:
    """Numbered records with keys, by our own client; their values."""
    rows = [Row(b"%d" % number, b"key-%d" % number) for number in numbers]
    PEERS["tidelog"].write(cluster, topic, rows)
    return {b"%d" % number for number in numbers}


def make_topic(
    cluster: LocalCluster, name: str, partitions: int = 3, config: Mapping[str, object] | None = None
) -> str:
    """With three replicas; returns when the Kafka API of every node knows it."""
    with tidelog.Admin(cluster.bootstrap) as admin:
        admin.create_topic(name, partitions=partitions, replication_factor=3, configs=config)
    until_heard(cluster, name, partitions)
    return name


def until_heard(cluster: LocalCluster, topic: str, partitions: int) -> None:
    """Every broker answers from its own copy of the metadata: all have come so far."""
    ports = [cluster.ports(number).kafka for number in (1, 2, 3)]
    wanted = set(range(partitions))
    until(lambda: all(leaders(port, topic).keys() == wanted for port in ports), f"all know {partitions} of {topic}")


def leaders(port: int, topic: str) -> dict[int, int]:
    """Who leads each partition, as far as the broker at this port knows."""

    async def main() -> dict[int, int]:
        client = KafkaClient(*await asyncio.open_connection("localhost", port))
        try:
            client.send(METADATA, 12, 1, MetadataRequest(topics=[MetadataRequestTopic(name=topic)]))
            _, answer = await client.response(METADATA, 12)
        finally:
            client.writer.close()
            await client.writer.wait_closed()
        rows = [row for found in answer.topics for row in found.partitions]
        return {row.partition_index: row.leader_id for row in rows if row.leader_id >= 0}

    return asyncio.run(main())


def stored_codecs(cluster: LocalCluster, topic: str) -> set[str]:
    """The codecs of the batches in the files of all nodes."""
    files = list(cluster.data.glob(f"node-*/data/{topic}.*/*.log"))
    assert files, f"no files of {topic}"
    return {header.codec.name.lower() for path in files for _, header in split_batches(path.read_bytes())}
